"""Where the parts of a model go, what is kept and freed, and what is refused."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel.comm import Group
from lightning_parallel.pipeline.analyze import dry_run_stages, trace_use, use_by_registration
from lightning_parallel.pipeline.layer_stack import cut_units, find_layer_stack, find_layer_stacks, layer_kinds
from lightning_parallel.pipeline.placeholder import PlaceholderTensor
from lightning_parallel.pipeline.schedule import build_schedule
from tests.harness import distributed
from tests.pipeline import other_models
from tests.pipeline.models import Encoder, Outer, built, pipeline

CPU = torch.device("cpu")


def engine_of(group, builder, schedule="1f1b", microbatches=2, options=None, **engine_options):
    model, step, batch = built(builder, **(options or {}))
    schedule = build_schedule(schedule, group.size, microbatches)
    engine_options.setdefault("balance", "uniform")  # measured, the cut would depend on the machine's load
    return model, step, batch, pipeline(model, group, schedule, (step, batch), **engine_options)


@pytest.mark.parametrize(
    ("builder", "path"),
    [
        ("mlp", ""),
        ("convolutional", "1"),
        ("encoder", "encoder.layers"),
        ("two_streams", "blocks"),
        ("gpt2", "transformer.h"),
        ("llama", "model.layers"),
        ("bert", "bert.encoder.layer"),
        ("mixtral", "model.layers"),
    ],
)
def test_the_trunk_is_found(builder, path):
    model, _, _ = built(builder)
    assert find_layer_stack(model, 2).path == path
    outer = nn.ModuleDict({"wrapped": nn.ModuleDict({"model": model})})
    assert find_layer_stack(outer, 2).path == f"wrapped.model.{path}".rstrip(".")


def test_a_trunk_that_cannot_be_told_is_refused():
    two = nn.ModuleDict({name: nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]) for name in ("left", "right")})
    with pytest.raises(ValueError, match="(?s)`left`.*`right`.*layers='left'"):
        find_layer_stack(two, 2)
    assert find_layer_stack(two, 2, "right").path == "right"
    with pytest.raises(ValueError, match="found no .*layers='model.blocks'"):
        find_layer_stack(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), 2)
    with pytest.raises(ValueError, match="`wrong`.*containers: `left`, `right`"):
        find_layer_stack(two, 2, "wrong")
    with pytest.raises(ValueError, match="got `left.0`, a Linear"):
        find_layer_stack(two, 2, "left.0")
    with pytest.raises(ValueError, match="4 layers in `left` for 5 stages"):
        find_layer_stack(two, 5, "left")


def test_containers_that_follow_each_other_are_cut_together():
    model = other_models.ResNet()
    row, alone = find_layer_stacks(model, 2)
    assert (row.path, alone.path) == ("layer1, layer2, layer3", "layer3")
    assert row.names == tuple(f"layer{group}.{block}" for group in (1, 2, 3) for block in (0, 1))
    assert [stack.path for stack in find_layer_stacks(model, 4)] == ["layer1, layer2, layer3"], (
        "the largest has too few"
    )
    assert find_layer_stack(model, 2, "layer2, layer3").layers == (*model.layer2, *model.layer3)
    encoder_decoder, _, _ = other_models.encoder_decoder()
    assert layer_kinds(find_layer_stacks(encoder_decoder, 2)[0]) == [0, 0, 0, 1, 1, 1]


def test_entries_that_are_lists_stay_together():
    model, _, _ = other_models.nested_lists()
    stack = find_layer_stack(model, 4)
    assert stack.names[:4] == ("layers.0.0", "layers.0.1", "layers.0.2", "layers.1.0")
    assert stack.blocks == cut_units(stack) == (3, 3, 3, 3)
    with pytest.raises(ValueError, match="got 4 layers in `layers` for 5 stages"):
        find_layer_stack(model, 5)


def test_every_stage_gets_parameters_but_uniform_counts_layers():
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)]
    assert cut_units(find_layer_stack(nn.Sequential(*layers), 2)) == (4, 1, 1)

    def cut(balance):
        schedule = build_schedule("gpipe", 1, 1, virtual_stages=3)
        model = nn.Sequential(*layers)
        return pipeline(model, Group.alone("pipeline_parallel"), schedule, balance=balance).plan.layers_per_stage

    assert cut("parameters") == (4, 1, 1)
    assert cut("uniform") == (2, 2, 2)
    assert cut((1, 4, 1)) == (1, 4, 1)


def test_layers_of_one_kind():
    model, _, _ = built("llama")
    assert layer_kinds(find_layer_stack(model, 2)) == [0, 0, 0, 0]
    strides = nn.Sequential(*[nn.Conv1d(2, 2, 3, stride=s) for s in (1, 1, 2, 1)])
    assert layer_kinds(find_layer_stack(strides, 2)) == [0, 0, 1, 0]


def test_where_modules_belong_is_observed_not_guessed():
    model, step, batch = built("encoder")
    seen = trace_use(model, find_layer_stack(model, 2), step, batch, CPU)
    assert seen.modules["head"] == {3}
    assert seen.modules["embed"] == {0}
    assert seen.parameters["position"] == {0}
    assert seen.parameters["encoder.norm.weight"] == {3}
    assert seen.parameters["encoder.layers.2.linear1.weight"] == {2}
    assert use_by_registration(model, find_layer_stack(model, 2)).modules["head"] == {0}, "the head is registered first"
    assert not any(
        isinstance(value, PlaceholderTensor) for module in model.modules() for value in vars(module).values()
    )


def test_what_is_used_on_several_stages_is_kept_on_each():
    model, step, batch = built("tied")
    seen = trace_use(model, find_layer_stack(model, 2), step, batch, CPU)
    assert seen.parameters["embed.weight"] == {0, 3}
    assert seen.parameters["shared.weight"] == {0, 1, 2}, "between two layers: with the former"
    gpt2, _, _ = built("gpt2")
    assert use_by_registration(gpt2, find_layer_stack(gpt2, 2)).parameters["transformer.wte.weight"] == {0, 3}


def test_observing_changes_nothing():
    model, step, batch = built("two_streams")
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trace_use(model, find_layer_stack(model, 2), step, batch, CPU)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@distributed(world_size=2)
def test_each_rank_holds_its_stages_only(group):
    whole, _, _ = built("gpt2")
    names = set(whole.state_dict())
    total = sum(value.numel() for value in whole.parameters())
    model, _, _, engine = engine_of(group, "gpt2")
    held = dict(model.named_parameters())
    mine = {name for name, stages in engine.plan.parameter_stages.items() if group.rank in stages}
    assert set(held) == mine
    assert set(model.state_dict()) <= names
    tied = engine.tied["transformer.wte.weight"]
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    assert tied.ranks == (0, 1)
    assert engine.counted_by_others == (frozenset(["transformer.wte.weight"]) if group.rank else frozenset())
    shared = held["transformer.wte.weight"].numel()
    assert sum(value.numel() for value in held.values()) < 0.6 * total + shared
    layer = f"transformer.h.{3 if group.rank else 0}.attn.c_attn.weight"
    assert torch.equal(held[layer], whole.get_parameter(layer)), "a kept parameter must not change"
    absent = model.get_submodule(f"transformer.h.{3 if group.rank == 0 else 0}.attn.c_attn")
    assert isinstance(absent.weight, PlaceholderTensor)
    assert (absent.weight.shape, absent.weight.device) == ((16, 48), CPU)
    with pytest.raises(RuntimeError, match="is on another pipeline stage and cannot be called on its own"):
        model(torch.zeros(1, 2, dtype=torch.long))


@distributed(world_size=2)
def test_a_model_on_the_meta_device(group):
    whole, step, batch = built("encoder")
    with torch.device("meta"):
        model = Encoder().double()
    engine = pipeline(model, group, build_schedule("1f1b", 2, 2), (lambda b: F.cross_entropy(model(b[0]), b[1]), batch))
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        value = nn.Parameter(whole.get_parameter(name).detach().clone())
        assert parameter.is_meta
        setattr(owner, name.rpartition(".")[2], value)
    result = engine.forward_backward(lambda b: F.cross_entropy(model(b[0]), b[1]), batch)
    if group.rank == 1:
        torch.testing.assert_close(result.loss, step(batch).detach(), rtol=1e-10, atol=1e-10)


REFUSED = [
    ("Outer", r"`layers.3` needs .*`embed`.*Move it \(a residual addition"),
    ("Skipping", "`layers.3` needs the output of `embed`.*skips over the cut"),
    ("Twice", "`layers.0` is called twice or out of order"),
    ("PrologueInLoss", "the step returns something made of the output of `embed`"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSED)
@distributed(world_size=2)
def test_models_that_cannot_be_cut_are_refused_on_every_rank(group, kind, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        engine_of(group, "outer", options={"kind": kind})


def test_a_skip_over_a_whole_stage_is_refused():
    class Skip(Outer):
        def forward(self, x):
            start = x = self.embed(x)
            for number, layer in enumerate(self.layers):
                x = layer(x * start if number == 3 else x)
            return x

    model = Skip()
    stack = find_layer_stack(model, 2)
    step, batch = (lambda batch: model(batch).mean()), torch.randn(2, 4)
    seen = trace_use(model, stack, step, batch, CPU)
    with pytest.raises(ValueError, match="skips over the cut"):
        dry_run_stages(model, stack, seen, (0, 1, 1, 1), step, batch, CPU)
    dry_run_stages(model, stack, seen, (0, 0, 0, 0), step, batch, CPU)


def test_settings_that_do_not_fit_are_refused():
    model, step, batch = built("mlp")
    with pytest.raises(ValueError, match="1 ranks of the pipeline group, got one for 2"):
        pipeline(model, Group.alone("pipeline_parallel"), build_schedule("1f1b", 2, 2), example=(step, batch))
    nine = build_schedule("gpipe", 1, 2, virtual_stages=9)
    with pytest.raises(ValueError, match="8 layers in `` for 9 stages"):
        pipeline(model, Group.alone("pipeline_parallel"), nine)


def test_batch_normalisation_is_warned_of():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)])
    with pytest.warns(UserWarning, match="one microbatch at a time"):
        pipeline(model, Group.alone("pipeline_parallel"), build_schedule("gpipe", 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(model, Group.alone("pipeline_parallel"), build_schedule("gpipe", 1, 1))
