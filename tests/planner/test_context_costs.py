"""The planner on the context axis: attention that it counts, messages, memory, and where the axis is of use."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel import AutoParallelStrategy, HybridParallelStrategy
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.simulate import Cost, Link
from lightning_parallel.planner import Cluster
from lightning_parallel.planner.collective_costs import collective_s, gradients_s
from lightning_parallel.planner.context_costs import (
    AttentionCosts,
    ContextAxis,
    context_obstacle,
    methods_for,
    total_s,
)
from lightning_parallel.planner.hardware import Device
from lightning_parallel.planner.layouts import LayoutSearch
from lightning_parallel.planner.plan_report import layout_yaml, strategy_arguments
from lightning_parallel.planner.plans import plan
from lightning_parallel.planner.rehearsal import Rehearsal
from lightning_parallel.tensor.context_methods import AttentionShape, attention_messages
from lightning_parallel.tensor.sharding import Shard
from tests.planner.test_planner import HEADS, WIDTH, Block, Model, cluster

LENGTH, SAMPLES = 64, 4
BYTES = SAMPLES * LENGTH * WIDTH * 4  # of queries, as of keys, values and results


class Eager(Block):
    """Attention by two products and a softmax."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class EagerModel(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Eager() for _ in range(4))


class Positionwise(Model):
    """No position reads another one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))


def long(samples=SAMPLES):
    return torch.zeros(samples, LENGTH, dtype=torch.long)


def rehearsal(kind=Model, where=None):
    return Rehearsal(kind(), long(), where or cluster())


@pytest.mark.parametrize("kind", [Model, EagerModel])
def test_attention_is_counted_in_each_layer_and_direction(kind):
    found = rehearsal(kind).attention(1)
    assert found.seen == (HEADS, HEADS, LENGTH, kind is EagerModel)
    for part, is_layer in ((0, False), (1, True), (4, True), (5, False)):
        forward, none = found.in_part(part, "forward_s", 1.0)
        assert (*forward[:4], none.calls) == ((1, *[2 * BYTES] * 3, 0) if is_layer else (0, 0, 0, 0, 0))
        none, backward = found.in_part(part, "input_gradient_s", 0.5)
        assert (none.calls, *backward[:3]) == ((0, 1, BYTES, BYTES) if is_layer else (0, 0, 0, 0))


def test_a_second_run_sends_again_what_it_does_not_keep():
    calls = {}
    for option in ("off", "selective", "full"):
        forward, _ = rehearsal().attention(1, option).in_part(2, "again_s", 1.0)
        calls[option] = forward.calls
    assert calls == {"off": 0, "selective": 0, "full": 1}


def test_shards_of_the_tensor_axis_have_their_heads_only():
    found = rehearsal().attention(2)
    assert found.seen == (HEADS // 2, HEADS // 2, LENGTH, False)
    assert found.in_part(1, "forward_s", 1.0)[0].key_bytes == BYTES


def test_messages_of_each_method_by_hand():
    found = rehearsal().attention(1)
    link = Link(1e-5, 1e9)

    def forward_s(method, ranks=4):
        return ContextAxis(method, ranks, 1, cluster()).messages(found, 1.0).layers[0].forward_s

    assert forward_s("gather") == pytest.approx(3 * link.latency_s + 3 / 4 * 2 * BYTES / link.bytes_per_s)
    # Queries, keys and values of a quarter of the positions go, and results return.
    sent = (3 * BYTES + BYTES) / 4 * 3 / 4
    assert forward_s("ulysses") == pytest.approx(2 * 3 * link.latency_s + sent / link.bytes_per_s)
    turn_s = link.latency_s + 2 * BYTES / 4 / link.bytes_per_s
    computed_s = found.in_part(1, "forward_s", 1.0)[0].seconds / 16
    merged_s = 3 * BYTES / 4 / 1e9 + 10 * 1e-6
    assert computed_s > turn_s  # on this slow device, so that nothing is left of the turn
    assert forward_s("ring") == pytest.approx(3 * merged_s)
    axis = ContextAxis("ring", 4, 1, replace(cluster(), node_link=Link(1e-2, 1e9)))
    turn_s += 1e-2 - 1e-5
    assert axis.messages(found, 1.0).layers[0].forward_s == pytest.approx(3 * (turn_s - computed_s + merged_s))
    backward = ContextAxis("gather", 4, 1, cluster()).messages(found, 1.0).layers[0]
    assert backward.input_gradient_s == pytest.approx(backward.forward_s)


@pytest.mark.parametrize("method", ["ulysses", "ring", "gather"])
def test_the_bytes_are_those_that_attention_sends(method):
    """By a link that only bytes delay, so that seconds are bytes."""
    narrow = replace(cluster(), node_link=Link(0.0, 1.0))
    bare = replace(narrow, device=replace(narrow.device, bytes_per_s=float("inf"), launch_s=0.0))
    found = rehearsal().attention(1)
    costs = tuple(each.mapped(lambda _: Cost()) if number % 5 == 4 else each for number, each in enumerate(found.costs))
    rows = Shard.even(0, LENGTH, 4)
    shape = AttentionShape(SAMPLES, HEADS, HEADS, WIDTH // HEADS, WIDTH // HEADS, 4, rows, rows)
    messages = ContextAxis(method, 4, 1, bare).messages(found._replace(costs=costs), 1.0).layers[0]
    sent = {
        way: sum(each.sent for each in attention_messages(method, shape) if each.is_backward == way) for way in (0, 1)
    }
    assert messages.forward_s == pytest.approx(sent[0])
    assert messages.input_gradient_s == pytest.approx(sent[1])


def test_which_methods_there_are_and_what_they_keep():
    found = rehearsal().attention(1)
    assert methods_for(found, 4) == ["ulysses", "ring", "gather"]
    assert methods_for(found, 8) == ["ring", "gather"]
    assert methods_for(rehearsal(EagerModel).attention(1), 4) == ["ulysses", "gather"]
    assert "too few" in context_obstacle(found, LENGTH)
    assert not context_obstacle(found, LENGTH // 2)
    assert "no attention" in context_obstacle(AttentionCosts(), 2)
    costs = rehearsal().costs(1, 1).compute
    shared = found._replace(seen=found.seen._replace(kv_heads=1))

    def added(method, attention=found):
        held = ContextAxis(method, 4, 1, cluster()).held(costs, attention, 1.0)
        return held.layers[0].activation_bytes - costs.layers[0].activation_bytes

    assert added("gather") == 3 / 4 * 2 * BYTES
    assert added("ring") == added("ulysses") == 0
    assert added("ulysses", shared) == 3 / 4 * 2 * BYTES


def test_a_share_of_the_positions_costs_what_so_many_samples_cost():
    search = LayoutSearch(rehearsal(where=replace(cluster(), memory_bytes=1e9)), copies=2.0)
    whole, half = search.best(Mesh()), search.best(Mesh(context_parallel=2))
    fewer = Rehearsal(Model(), long(SAMPLES // 2), cluster())
    expected = LayoutSearch(fewer, copies=2.0).best(Mesh())
    assert half.step.compute == pytest.approx(expected.step.compute)
    assert whole.samples == half.samples == SAMPLES
    assert half.step.context > 0 == whole.step.context
    messages = {
        method: total_s(ContextAxis(method, 2, 1, cluster()).messages(rehearsal().attention(1), 1.0))
        for method in methods_for(rehearsal().attention(1), 2)
    }
    assert half.method == min(messages, key=messages.get)
    assert half.step.context == pytest.approx(messages[half.method])
    kept = 4 * BYTES if half.method == "gather" else 0
    assert half.memory.activations == pytest.approx(expected.memory.activations + kept, rel=0.01)
    assert half.memory.buckets == search.best(Mesh(data_parallel=2)).memory.buckets > whole.memory.buckets


def test_gradients_are_averaged_over_both_axes():
    where = cluster(16, 4)
    for op in ("all_reduce", "all_gather"):
        alike = {
            gradients_s(op, 1e6, Mesh(**sizes), where) for sizes in ({"data_parallel": 4}, {"context_parallel": 4})
        }
        assert alike == {collective_s(op, 1e6, 1, 4, where)}
    mesh = Mesh(data_parallel=2, pipeline_parallel=2, context_parallel=2, tensor_parallel=2)
    inside, across = collective_s("all_gather", 1e6, 2, 2, where), collective_s("all_reduce", 5e5, 8, 2, where)
    assert gradients_s("all_reduce", 1e6, mesh, where) == pytest.approx(2 * inside + across)


def planned(kind=Model, memory=1e9, devices=4, **options):
    where = replace(cluster(devices), memory_bytes=memory)
    return plan(kind(), long(), where, measured=False, **options)


@pytest.mark.sweep(kept=None)
def test_a_context_axis_is_tried_where_replicas_do_not_fit():
    assert {layout.mesh.context_parallel for layout in planned().layouts} == {1}
    least = min(layout.memory.total for layout in planned().layouts if layout.mesh.data_parallel == 4)
    short = planned(memory=0.8 * least)
    contexts = {layout.mesh.shape: layout for layout in short.layouts if layout.mesh.context_parallel > 1}
    assert not contexts[2, 1, 2, 1].refusal
    assert contexts[2, 1, 2, 1].method in ("ulysses", "ring", "gather")
    # Larger axes do not follow a layout that fits at once.
    assert (1, 1, 4, 1) not in contexts or contexts[2, 1, 2, 1].recomputation != "off"
    assert {layout.mesh.context_parallel for layout in planned(Positionwise, 0.8 * least).layouts} == {1}


def test_a_context_axis_is_tried_where_samples_are_too_few():
    found = planned(global_batch=2)
    assert "cannot be shared by 4 replicas" in next(
        layout.refusal for layout in found.layouts if layout.mesh == Mesh(4)
    )
    layout = next(layout for layout in found.possible if layout.mesh == Mesh(2, 1, 2))
    assert layout.samples == 2


def test_a_chosen_layout_runs_with_its_method():
    found = planned(global_batch=1)
    layout = next(layout for layout in found.possible if layout.mesh == Mesh(context_parallel=4))
    strategy = HybridParallelStrategy(**strategy_arguments(layout))
    assert strategy.mesh_for(4) == layout.mesh
    assert strategy.context_options.method == layout.method
    assert f"context_parallel_method: {layout.method}" in layout_yaml(found, layout)
    automatic = AutoParallelStrategy()
    automatic._take(replace(found, layouts=(layout,)))
    assert automatic.mesh_for(4) == layout.mesh
    assert automatic.context_options.method == layout.method


def test_causal_attention_computes_half_of_the_scores():
    class Causal(Block):
        def forward(self, x):
            q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))

    class CausalModel(Model):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Causal() for _ in range(4))

    slow = Device("slow", {"float32": 1e6}, 1e9, 1e12, launch_s=0.0, efficiency=1.0)
    where = Cluster(slow, 1, 1)
    full, half = (
        rehearsal(kind, where).attention(1).in_part(1, phase, 1.0)[direction].seconds
        for kind, phase, direction in ((Model, "forward_s", 0), (CausalModel, "forward_s", 0))
    )
    assert half == pytest.approx(full / 2)
