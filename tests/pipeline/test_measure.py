"""The costs of layers that the cut balances, and the link between ranks."""

import time

import torch
from torch import nn

from lightning_parallel import comm
from lightning_parallel.pipeline import weight_gradients
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.layer_stack import find_layer_stack
from lightning_parallel.pipeline.measure import count_parameters, measure
from lightning_parallel.pipeline.module_use import trace_in_order
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.planner.links import measure_link
from lightning_parallel.step_trace.record import record_step
from tests.harness import distributed
from tests.pipeline.models import Sleep, built
from tests.strict_order import strict_order
from tests.timing import compares_durations, durations

CPU = torch.device("cpu")


def used(model, stack, step, batch):
    return trace_in_order(model, stack, record_step(model, step, batch, CPU))[1].parameters


class Sleeper(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Sleep.apply(self.linear(x), self.seconds)


def sleepers(seconds):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*map(Sleeper, seconds)), nn.BatchNorm1d(4), Sleeper(0.02))
    return model, (lambda batch: model(batch).mean()), torch.randn(3, 4)


@compares_durations
def test_layers_are_clocked_alone():
    model, step, batch = sleepers([0.005, 0.005, 0.02])
    stack = find_layer_stack(model, 2, "1")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    costs = measure(model, stack, used(model, stack, step, batch), step, batch, CPU)
    with durations():
        assert [round(cost.forward_s / 0.005) for cost in costs.layers] == [1, 1, 4]
        assert [round(cost.input_gradient_s / 0.01) for cost in costs.layers] == [1, 1, 4]
        assert costs.prologue.total_s < 0.01 < 0.06 <= costs.epilogue.total_s < 0.1
    assert costs.layers[0].boundary_bytes == 3 * 4 * 4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "running statistics"
    assert all(parameter.grad is None for parameter in model.parameters())


@compares_durations
def test_the_epilogue_counts_in_the_cut():
    model, step, batch = sleepers([0.01] * 6)
    schedule = build_schedule("gpipe", 1, 1, virtual_stages=2)
    plan = analyze(model, 1, schedule, example=(step, batch), layers="1", balance="measured")
    with durations():
        assert plan.layers_per_stage == (4, 2)


class _Product(torch.autograd.Function):
    """A weight gradient that takes long; whether it is put off is up to the layer."""

    @staticmethod
    def forward(ctx, x, weight, may_wait):
        ctx.may_wait, ctx.parameter = may_wait, weight
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        def compute():
            time.sleep(0.03)
            return gradient.sum(0)

        (weight,), waiting = ctx.saved_tensors, weight_gradients.weight_gradient_queue()
        time.sleep(0.01)
        if ctx.may_wait and waiting is not None and waiting.defer(ctx.parameter, compute):
            return gradient * weight, None, None
        return gradient * weight, compute(), None


class Product(nn.Module):
    def __init__(self, may_wait):
        super().__init__()
        self.may_wait, self.weight = may_wait, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return _Product.apply(x, self.weight, self.may_wait)


@compares_durations
def test_only_what_can_be_put_off_counts_as_w():
    model, batch = nn.Sequential(Product(True), Product(False)), torch.ones(2, 4)

    def step(x):
        return model(x).mean()

    stack = find_layer_stack(model, 2)
    costs = measure(model, stack, used(model, stack, step, batch), step, batch, CPU).layers
    shares = [cost.weight_gradient_s / (cost.input_gradient_s + cost.weight_gradient_s) for cost in costs]
    with durations():
        assert shares[0] > 0.5 > shares[1]
    assert model[0].weight.grad is None


def test_every_model_can_be_measured():
    for builder in ("mlp", "convolutional", "encoder", "two_streams", "tied", "gpt2", "llama", "bert", "mixtral"):
        model, step, batch = built(builder)
        stack = find_layer_stack(model, 2)
        costs = measure(model, stack, used(model, stack, step, batch), step, batch, CPU)
        assert all(cost.forward_s > 0 for cost in costs.layers), builder
        assert max(cost.input_gradient_s for cost in costs.layers) > 0, builder


def test_parameters_are_counted_where_they_are_used():
    model, step, batch = built("tied")
    stack = find_layer_stack(model, 2)
    costs = count_parameters(model, stack, used(model, stack, step, batch))
    assert costs.layers[0].resident_bytes == 4 * 8 * (8 * 8 + 8)
    assert costs.prologue.resident_bytes == 4 * 8 * (11 * 8 + 2 * 8)
    assert costs.epilogue.resident_bytes == 4 * 8 * 11 * 8


@distributed(world_size=3)
def test_all_ranks_find_the_same_plausible_link(group):
    link = measure_link(group, CPU)
    assert 0 < link.latency_s < 1
    assert link.bytes_per_s > 1e5
    assert comm.all_gather_object(link, group) == [link] * 3


@compares_durations
@distributed(world_size=3)
def test_the_slowest_pair_counts(group):
    quick = comm.isend

    def slow(tensor, group, to, tag):
        if {group.rank, to} == {1, 2}:
            time.sleep(0.05 + tensor.numel() / 1e7)
        return quick(tensor, group, to, tag)

    comm.isend = slow
    try:
        link = measure_link(group, CPU)
    finally:
        comm.isend = quick
    assert link.latency_s > 0.05
    with durations():
        assert 3e6 < link.bytes_per_s < 2e7


@distributed(world_size=2)
@strict_order(False)
def test_a_measurement_leaves_nothing_behind(group):
    measure_link(group, CPU)
    message = torch.full((3,), float(group.rank))
    pending = comm.irecv(received := torch.zeros(3), group, 1 - group.rank, 900)
    comm.isend(message, group, 1 - group.rank, 900).wait()
    pending.wait()
    assert received[0] == 1 - group.rank


def test_what_is_held_for_backward_is_counted_in_each_part_without_parameters():
    first, head = nn.Linear(6, 8).double(), nn.Linear(8, 11).double()
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(2)))
    model, batch = nn.Sequential(first, layers, head), torch.randn(3, 6, dtype=torch.float64)

    def step(x):
        return model(x).square().mean()

    stack = find_layer_stack(model, 2, "1")
    costs = measure(model, stack, used(model, stack, step, batch), step, batch, CPU)
    assert costs.prologue.activation_bytes == 8 * 3 * 6
    assert [layer.activation_bytes for layer in costs.layers] == [8 * 3 * (8 + 8)] * 2
    assert costs.epilogue.activation_bytes == 8 * 3 * (8 + 11)


def test_a_slow_rank_runs_layers_as_often_as_its_peers():
    """Divided layers communicate: each run of one rank needs one of every other."""
    runs = []
    for seconds in (0.0, 0.12):
        model, step, batch = sleepers([seconds] * 2)
        calls: list[nn.Module] = []
        for layer in model[1]:
            layer.linear.register_forward_hook(lambda layer, *_, calls=calls: calls.append(layer))
        stack = find_layer_stack(model, 2, "1")
        measure(model, stack, used(model, stack, step, batch), step, batch, CPU)
        runs.append(len(calls))
    assert runs[0] == runs[1]
