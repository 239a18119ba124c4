"""Constructors of public names show every argument: to editors, `help()`, LightningCLI and the reference pages."""

import inspect
import re

import pytest
from lightning.pytorch.strategies import Strategy

import lightning_parallel
from lightning_parallel import PowerSGD

PUBLIC = {name: getattr(lightning_parallel, name) for name in lightning_parallel.__all__ if not name.endswith("Error")}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
STRATEGIES = {name: value for name, value in CLASSES.items() if issubclass(value, Strategy)}


def arguments(value):
    return {name: found for name, found in inspect.signature(value).parameters.items() if name != "self"}


def described(value):
    """The entries of the section `Args` of a docstring, by name."""
    text = re.search(r"\nArgs:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(value) + "\n\n", re.DOTALL)
    entries = re.findall(
        r"^    (\w+): (.*?)(?=^    \w+: |\Z)", text[1] + "\n" if text else "", re.DOTALL | re.MULTILINE
    )
    return {name: " ".join(meaning.split()) for name, meaning in entries}


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_is_spelled_out_and_described(name):
    found = arguments(CLASSES[name])
    assert not [kind for kind in found.values() if kind.kind in (kind.VAR_KEYWORD, kind.VAR_POSITIONAL)]
    assert set(described(CLASSES[name])) == set(found)


def test_an_argument_of_several_strategies_is_the_same_in_all():
    seen = {}
    for name, value in STRATEGIES.items():
        if name.startswith("Compressed"):
            continue  # on Lightning's strategies, with their arguments
        meanings = described(value)
        for argument, parameter in arguments(value).items():
            if argument in ("compression", "memory_limit_bytes", "zero_stage") or argument.endswith("parallel_size"):
                continue  # another meaning, or another default
            this = (parameter.annotation, parameter.default, meanings[argument])
            first, expected = seen.setdefault(argument, (name, this))
            assert this == expected, f"`{argument}` of {name} and of {first}"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_misspelt_argument_is_told_with_the_right_one(name):
    found = arguments(STRATEGIES[name])
    real = next(argument for argument in found if found[argument].default is not inspect.Parameter.empty)
    with pytest.raises(TypeError, match=f"`{name}` has no argument `{real}x`; did you mean `{real}`"):
        STRATEGIES[name](**{f"{real}x": 1})


# One wrong value of each kind for the strategies of a mesh: what Python takes, or a YAML file gives.
WRONG = {
    "data_parallel_size": [0, -1, "2", 2.0, True],
    "tensor_plan": ["automatic", {"*": "colum"}, 3],
    "sequence_parallel": ["yes", 1],
    "gather_logits": ["yes"],
    "context_parallel_method": ["rings", None],
    "layers": [3, ""],
    "schedule": ["1fb1", None],
    "num_microbatches": [0, "4"],
    "virtual_stages": [0, 2],  # 1f1b has one stage per rank
    "warmup": ["2", True, 0.5],
    "balance": ["even", [1, "2"], [0, 2]],
    "memory_limit_bytes": [-1, "80", "lots", True],
    "split_batch": ["no.such.function", 3],
    "microbatch_weight": ["no.such.function", 3],
    "pipeline_plan": ["missing.json", 3],
    "compression": ["topk", PowerSGD],
    "compressor_state": ["all"],
    "hierarchical": ["yes", True],  # without compression
    "zero_stage": [4, "1"],
    "reshard": ["never", True, "layer"],  # without `zero_stage=3`
    "activation_checkpointing": ["some", 0, 2.0, True],
    "cpu_offload": ["optimizer", ("state",), ("activations",), ("optimizer", "optimizer"), 1],
    "tiled": ["on", True],
    "compile_layers": ["yes", 1],
    "gradient_sum_dtype": ["fp64", 32],
    "checkpoint_format": ["shard"],
    "async_save": ["yes", True],  # in one file
    "verify": ["on"],
    "gather_after_fit": ["none", "rank_zero"],
    "process_group_backend": ["glo"],
    "timeout": [30],
    "start_method": ["thread"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_values_are_told_by_the_constructor(name, value):
    with pytest.raises((TypeError, ValueError), match="must|needs|writes only"):
        lightning_parallel.HybridParallelStrategy(**{name: value})


def test_each_argument_of_a_mesh_has_a_wrong_value():
    axes = {
        "tensor_parallel_size",
        "context_parallel_size",
        "pipeline_parallel_size",
    }  # checked as `data_parallel_size` is
    given_by_lightning = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
    assert set(arguments(lightning_parallel.HybridParallelStrategy)) == {*WRONG, *axes, *given_by_lightning}


def test_a_memory_limit_may_have_a_unit():
    strategy = lightning_parallel.PipelineParallelStrategy(memory_limit_bytes="80GiB")
    assert strategy.pipeline_options.memory_limit_bytes == 80 * 2**30
