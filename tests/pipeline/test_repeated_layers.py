"""Layers that are called several times in a step: siamese steps, one layer for all, each twice in a row; exact."""

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.layer_stack import LayerStack
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.pipeline.schedule import SCHEDULES, build_schedule
from lightning_parallel.pipeline.weight_gradients import WeightGradients, deferring
from lightning_parallel.planner.rank_memory import planned_memory
from tests.harness import distributed
from tests.pipeline.test_engine import engine_for, expect_equal


class Encoder(nn.Module):
    """Layers with something before and after them, for steps that call it several times."""

    def __init__(self, layers=4):
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return F.normalize(self.head(x), dim=-1)


def contrastive(model, batch):
    first, second = model(batch[0]), model(batch[1])
    return F.softplus(-(first * second).sum(-1)).mean()


def triplet(model, batch):
    anchor, near, far = model(batch[0]), model(batch[1]), model(batch[0] - batch[1])
    return F.softplus((anchor - near).square().sum(-1) - (anchor - far).square().sum(-1)).mean()


class EachTwice(Encoder):
    """Each layer is called twice in a row, as where neighbours share weights."""

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(block(x).tanh())
        return self.head(x)


class ThereAndBack(Encoder):
    """The layers are called from the first to the last, and back."""

    def forward(self, x):
        x = self.embed(x)
        for block in [*self.blocks, *reversed(self.blocks)]:
            x = x + block(x).tanh()
        return self.head(x)


class Looped(Encoder):
    """Only the layers in the middle are called again, with what they have returned."""

    def forward(self, x):
        x = self.embed(x)
        for index in (0, 1, 2, 1, 2, 1, 2, 3):
            x = x + self.blocks[index](x).tanh()
        return self.head(x)


class OneLayer(Encoder):
    """One layer for all, as in ALBERT."""

    def __init__(self):
        super().__init__(1)

    def forward(self, x):
        x = self.embed(x)
        for _ in range(5):
            x = x + self.blocks[0](x).tanh()
        return self.head(x)


def plain(model, batch):
    return model(batch[0]).square().mean() + model.embed.weight.square().sum()


CASES = {
    "contrastive": (Encoder, contrastive),
    "triplet": (Encoder, triplet),
    "each twice": (EachTwice, plain),
    "there and back": (ThereAndBack, plain),
    "looped": (Looped, plain),
    "one layer": (OneLayer, plain),
}


def case(name):
    kind, step = CASES[name]
    torch.manual_seed(0)
    model = kind().double()
    return model, lambda batch: step(model, batch), [torch.randn(7, 5, dtype=torch.double) for _ in range(2)]


def expect_equal_to_one_process(group, name, schedule):
    reference, reference_step, batch = case(name)
    reference_step(batch).backward()
    loss = reference_step(batch)
    model, step, _ = case(name)
    engine = engine_for(group, model, step, batch, schedule, 3)
    expect_equal(engine, model, engine.forward_backward(step, batch), reference, loss)
    return engine


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(CASES))
@distributed(world_size=2)
def test_equal_to_one_process(group, name):
    for schedule in SCHEDULES:
        expect_equal_to_one_process(group, name, schedule)


@distributed(world_size=4)
def test_four_ranks_hold_a_quarter_each(group):
    engine = expect_equal_to_one_process(group, "contrastive", "1f1b")
    assert engine.plan.schedule.stage_ranks == (0, 1, 2, 3) * 2
    held = {name for name, _ in engine.module.named_parameters() if "blocks" in name}
    assert held == {f"blocks.{group.rank}.weight", f"blocks.{group.rank}.bias"}


def test_the_plan_lists_every_call():
    model, step, batch = case("triplet")
    plan = analyze(model, 2, build_schedule("1f1b", 2, 3), example=(step, batch), balance="uniform")
    assert plan.container == "blocks, blocks, blocks"
    assert plan.layers == tuple(f"blocks.{index}" for index in range(4)) * 3
    assert plan.layers_per_stage == (2,) * 6
    assert plan.schedule == build_schedule("interleaved_1f1b", 2, 3, virtual_stages=3)
    assert plan.parameters["blocks.0.weight"].stages == (0, 2, 4)
    # Of the stages of a rank, one holds the layer.
    held = [planned_memory(plan, [stage], 2).parameters for stage in (0, 2, 4)]
    assert held[0] > 2 * 6 * 6 * 8
    assert held[1] == held[2] == 0
    assert PipelinePlan.from_dict(plan.to_dict()) == plan
    plan.check_fits(case("triplet")[0], 2)


@pytest.mark.parametrize(
    ("name", "container", "layers"),
    [
        ("each twice", "blocks[0 0 1 1 2 2 3 3]", "00112233"),
        ("there and back", "blocks[0 1 2 3 3 2 1 0]", "01233210"),
        ("looped", "blocks[0 1 2 1 2 1 2 3]", "01212123"),
        ("one layer", "blocks, blocks, blocks, blocks, blocks", "00000"),
    ],
)
def test_orders_of_calls(name, container, layers):
    model, step, batch = case(name)
    plan = analyze(model, 2, example=(step, batch), balance="uniform")
    assert plan.container == container
    assert plan.layers == tuple(f"blocks.{index}" for index in layers)
    assert LayerStack.at(model, container).names == plan.layers


def test_a_measured_cut_counts_every_call():
    model, step, batch = case("contrastive")
    plan = analyze(model, 2, example=(step, batch), balance="measured")
    assert len(plan.costs.layers) == 8
    assert all(cost.forward_s > 0 for cost in plan.costs.layers)
    assert not any(cost.resident_bytes for cost in plan.costs.layers[4:])


def test_a_part_of_an_entry_called_again_is_refused():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
    first, second = model.layers

    def step(x):
        for layer in (first[0], first[1], first[0], *second):
            x = layer(x)
        return x.mean()

    with pytest.raises(
        ValueError, match=r"`layers.0.0` is called again after `layers.0.1`, but not together with all layers"
    ):
        analyze(model, 2, example=(step, torch.ones(2, 4)), layers="layers", balance="uniform")


def test_the_layers_of_the_benchmark_put_their_weights_off(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    layer = importlib.import_module("sleeping").Sleeper(0.0, 0.0, 0.0, 4)
    later = WeightGradients()
    with deferring(later):
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(later) == 1
    assert layer.weight.grad is None
    later.compute()
    assert layer.weight.grad is not None
