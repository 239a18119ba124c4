"""What a rank owns gets memory and the values of one process; the rest never does."""

import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat.chance import random_state_kept
from lightning_parallel.data_parallel import AbsentParameter
from lightning_parallel.strategies.checks import check_parameters
from lightning_parallel.strategies.deferred import init
from lightning_parallel.strategies.optimizers.zero import UnitSharding, units_of
from tests.harness import distributed
from tests.harness import run as run_on_ranks
from tests.strategies.models import trainer_for

WIDTH = 160  # matrices have more elements than what is deferred
CONFIG = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "use_cache": False,
}


class Plain(nn.Module):
    """Constructors that draw in several ways: a parameter made of random numbers, an initialiser, a tied head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(128, WIDTH))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )
        for layer in self.layers:
            nn.init.trunc_normal_(layer[0].weight, std=0.02)
        self.scale = torch.rand(()).item()

    def forward(self, ids):
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for layer in self.layers:
            x = x + layer(x)
        return self.scale * F.linear(x, self.embed.weight)


class Built(LightningModule):
    """Built in `configure_model`, as large models are."""

    def __init__(self, kind, model=None):
        super().__init__()
        self.kind, self.model = kind, model
        self.after = []

    def configure_model(self):
        if self.model is None:
            self.model = build(self.kind)
            self.after = [torch.rand(3)]

    def training_step(self, ids, index):
        out = self.model(ids)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recurrent(Plain):
    """Its layers keep weak references to their parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def build(kind):
    if kind == "recurrent":
        return Recurrent()
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    return Plain()


def initialized(kind):
    """Build a model whose modules initialise themselves one by one, in the order of one process."""
    with random_state_kept():
        model = build(kind)
    for child in model.modules():
        child.reset_parameters() if hasattr(child, "reset_parameters") else model._init_weights(child)
    return model


def data(replicas=1, replica=0):
    ids = torch.randint(128, (8, 6), generator=torch.Generator().manual_seed(3))
    return DataLoader(ids, batch_size=4 // replicas, sampler=DistributedSampler(ids, replicas, replica, shuffle=False))


def run(module, strategy, devices, replicas=1, replica=0):
    trainer = trainer_for(strategy, devices, max_epochs=1)
    trainer.fit(module, data(replicas, replica))
    return {name: value.float() for name, value in trainer.strategy.lightning_module_state_dict().items()}


def expected_run(kind):
    torch.manual_seed(7)
    module = Built(kind)
    return module, run(module, "auto", 1)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "layout"), [("plain", (2, 1)), ("plain", (1, 2)), ("llama", (2, 2))], ids=["pipeline", "tensor", "both"]
)
def test_a_model_built_in_configure_model_trains_as_in_one_process(kind, layout):
    run_on_ranks(_trains_as_in_one_process, layout[0] * layout[1], kind=kind, layout=layout)


def _trains_as_in_one_process(group, kind, layout):
    pipeline, tensor = layout
    expected, weights = expected_run(kind)
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE=str(group.size))
    torch.manual_seed(7)
    module = Built(kind)
    strategy = HybridParallelStrategy(
        pipeline_parallel_size=pipeline,
        tensor_parallel_size=tensor,
        num_microbatches=2,
        balance="uniform",
        gather_after_fit="off",
    )
    found = run(module, strategy, group.size)
    if group.rank == 0:
        assert torch.equal(module.after[0], expected.after[0]), "random numbers go on as in one process"
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    held = sum(value.numel() for value in module.parameters())
    assert not any(value.is_meta for value in module.parameters())
    assert held < 0.8 * sum(value.numel() for value in expected.parameters())
    for name, value in module.named_parameters():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), f"{name} keeps its rest"


@distributed(world_size=2)
def test_a_recurrent_model_that_stays_whole_gets_its_values(group):
    _, weights = expected_run("recurrent")
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    torch.manual_seed(7)
    found = run(Built("recurrent"), HybridParallelStrategy(tensor_parallel_size=2), 2)
    if group.rank == 0:
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@distributed(world_size=2)
def test_a_model_built_before_the_ranks_meet_is_that_of_the_first(group):
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    strategy = HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, balance="uniform")
    trainer = trainer_for(strategy, 2, max_epochs=1)
    torch.manual_seed(7 + group.rank)
    with trainer.init_module(empty_init=True):
        module = Built("llama", build("llama"))
    trainer.fit(module, data())
    found = trainer.strategy.lightning_module_state_dict()
    torch.manual_seed(7)
    weights = run(Built("llama", build("llama")), "auto", 1)
    if group.rank == 0:
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


class BuiltOnMeta(Built):
    """Builds its model on the meta device, by itself; random numbers are drawn for buffers too."""

    def configure_model(self):
        if self.model is None:
            with torch.device("meta"):
                self.model = build(self.kind)
                self.model.noise = Noise()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "layout", "make"),
    [
        ("recurrent", (1, 1), Built),
        ("plain", (1, 2), Built),
        ("llama", (2, 1), Built),
        ("llama", (1, 2), BuiltOnMeta),
    ],
    ids=["data", "tensor", "pipeline", "on meta"],
)
def test_parameters_are_made_and_sharded_unit_by_unit(kind, layout, make):
    run_on_ranks(_is_sharded_unit_by_unit, 2 * layout[0] * layout[1], kind=kind, layout=layout, make=make)


def _is_sharded_unit_by_unit(group, kind, layout, make):
    if make is Built:
        _, weights = expected_run(kind)
    else:
        torch.manual_seed(7)
        expected = initialized(kind)
        weights = run(Built(kind, expected), "auto", 1)
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE=str(group.size))
    torch.manual_seed(7)
    module, live, patches = make(kind), [], Patches()
    before = UnitSharding.made

    def made(units, parameter, is_lost):
        # The small tensors of a build have data at once.
        full = [p.numel() for p in module.parameters() if type(p) is nn.Parameter and not p.is_meta]
        live.append(sum(size for size in full if size > init.THRESHOLD))
        return before(units, parameter, is_lost)

    patches.replace(UnitSharding, "made", made)
    sizes = {"pipeline_parallel_size": layout[0], "tensor_parallel_size": layout[1], "num_microbatches": 2}
    strategy = HybridParallelStrategy(zero_stage=3, balance="uniform", gather_after_fit="off", **sizes)
    try:
        found = run(module, strategy, group.size, 2, group.rank * 2 // group.size)
    finally:
        patches.undo()
    assert all(isinstance(p, AbsentParameter) for p in module.parameters())
    units = [sum(p.numel() for p in unit.values()) for unit in units_of(module)]
    assert 0 < max(live) <= max(units) < sum(units) / 2
    if group.rank == 0:
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self):
        self.values.normal_()


@distributed(world_size=2)
def test_a_model_that_its_code_built_on_meta_initialises_itself(group):
    torch.manual_seed(7)
    expected = initialized("llama")
    noise = torch.empty(3).normal_()
    weights = run(Built("llama", expected), "auto", 1)
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    strategy = HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, balance="uniform")
    module = BuiltOnMeta("llama")
    torch.manual_seed(7)
    found = run(module, strategy, 2)
    torch.testing.assert_close(module.model.noise.values, noise)
    if group.rank == 0:
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


class Remembering(Built):
    """Sees whether gradients of the step before are still there when the next one begins."""

    def on_before_optimizer_step(self, optimizer):
        self.last = [weakref.ref(value.grad) for value in self.parameters() if value.grad is not None]

    def training_step(self, ids, index):
        if index:
            assert self.last
            assert not any(gradient() is not None for gradient in self.last), "held through the next step"
        return super().training_step(ids, index)


@distributed(world_size=2)
def test_gradients_of_the_last_step_are_not_held_through_the_next(group):
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    strategy = HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, balance="uniform")
    gc.disable()
    try:
        run(Remembering("plain"), strategy, 2)
    finally:
        gc.enable()


class Loaded(Built):
    """Its weights are not those of any initialiser."""

    def configure_model(self):
        if self.model is None:
            super().configure_model()
            self.model.load_state_dict({name: value * 0.9 for name, value in self.model.state_dict().items()})


@distributed(world_size=2)
def test_a_refused_run_says_why_and_leaves_the_model_to_the_next_one(group):
    torch.manual_seed(7)
    weights = run(Loaded("plain"), "auto", 1)
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    torch.manual_seed(7)
    module = Loaded("plain")
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    with pytest.raises(ValueError, match="nowhere"):
        run(module, HybridParallelStrategy(layers="nowhere", **options), 2)
    found = run(module, HybridParallelStrategy(balance="uniform", **options), 2)
    if group.rank == 0:
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


class SharingMemory(Built):
    """Two parameters in one memory, which one process trains by both."""

    def configure_model(self):
        super().configure_model()
        first, second = self.model.layers[:2]
        second[0].weight.data = first[0].weight.data


class Scripted(Built):
    def configure_model(self):
        super().configure_model()
        self.model.layers[1] = torch.jit.script(self.model.layers[1])


class Lazy(Built):
    def configure_model(self):
        super().configure_model()
        self.model.layers[1][0] = nn.LazyLinear(2 * WIDTH)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(SharingMemory, "in the same memory"), (Scripted, "is TorchScript"), (Lazy, "is lazy")],
    ids=["shared memory", "scripted", "lazy"],
)
@pytest.mark.parametrize("argument", ["pipeline_parallel_size", "zero_stage"])
def test_parameters_that_cannot_be_divided_are_refused(argument, kind, message):
    run_on_ranks(_is_refused, 2, argument=argument, kind=kind, message=message)


def _is_refused(group, argument, kind, message):
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    strategy = HybridParallelStrategy(**{argument: 3 if argument == "zero_stage" else 2})
    with pytest.raises(ValueError, match=message):
        run(kind("plain"), strategy, 2)


def test_columns_of_one_matrix_share_no_memory_but_rows_and_diagonals_do():
    matrix = torch.randn(4, 6)

    def holding(*values):
        module = nn.Module()
        for number, value in enumerate(values):
            module.register_parameter(f"p{number}", nn.Parameter(value))
        return module

    check_parameters(holding(matrix[:, :2], matrix[:, 2:4], matrix[:, 4:]))
    check_parameters(holding(matrix[:2], matrix[2:]))
    for other in (matrix[1], matrix.diagonal(), matrix[:, 1:3]):
        with pytest.raises(ValueError, match="`p0` and `p1` are two parameters in the same memory"):
            check_parameters(holding(matrix[:, :2], other))


@distributed(world_size=2)
def test_a_value_that_the_first_rank_cannot_make_is_an_error_on_every_rank(group):
    def fails(deferred):
        raise ValueError("no such file")

    parameter, patches = nn.Parameter(torch.empty(2, device="meta")), Patches()
    held = init.PendingInitialization({0: (parameter, torch.empty(2))})
    groups = SimpleNamespace(world=group, tensor_parallel=Group.alone("tensor_parallel"))
    patches.replace(init, "materialize", fails)
    try:
        with pytest.raises(ValueError, match="no such file"):
            init._make_parameters(held, groups, lambda _: False, True, lambda _, is_lost: is_lost)
    finally:
        patches.undo()


@distributed(world_size=2)
def test_a_replica_that_cannot_make_a_parameter_ends_all(group):
    def fails(parameter, deferred, tensor_group):
        if group.rank == 1 and parameter.shape[0] == 2 * WIDTH:
            raise ValueError("no such file")
        return before(parameter, deferred, tensor_group)

    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    with patched(init, "_make_part", fails) as before, pytest.raises(ValueError, match="no such file"):
        run(Built("plain"), HybridParallelStrategy(zero_stage=3), 2, 2)
