"""Slices of parameters, and the reducer that leaves slices of the means: whatever was used, shared or accumulated."""

import contextlib

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat import Patches
from lightning_parallel.data_parallel import ParameterSlices, ScatteringReducer
from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies.optimizers.norms import ReplicaNorm, ShardNorms
from lightning_parallel.tensor.sharding import Shard, ShardPart
from tests.harness import distributed
from tests.strict_order import strict_order
from tests.test_bucketed_reducer import BOTH, Branches, _data, _mean_gradients


def sliced(module, group, bucket_bytes):
    parameters = dict(module.named_parameters())
    slices = ParameterSlices(parameters, group, bucket_bytes)
    return slices, ScatteringReducer(parameters, slices, bucket_bytes)


def assert_slices(module, slices, expected):
    """Compare gradients with slices of the expected ones, and make parameters whole again."""
    assert slices.holds_gradients
    for name, parameter in module.named_parameters():
        assert slices.is_narrow(parameter) == slices.divides(parameter) == (parameter.dim() > 0)
        if expected[name] is None:
            assert parameter.grad is None, name
            continue
        mine = slices.cut(expected[name]) if parameter.dim() else expected[name]
        torch.testing.assert_close(parameter.grad, mine, rtol=1e-10, atol=1e-12, msg=name)
    slices.widen()
    assert not slices.holds_gradients


@pytest.mark.parametrize(
    "uses",
    [[BOTH, ("second", "first")], [("first",), ("second",)], [("first",), ("first",)]],
    ids=["other order", "disjoint", "unused on all"],
)
@distributed(world_size=2)
def test_gradients_are_slices_of_the_mean(group, uses):
    for bucket_bytes in (1, 100, 1 << 20):
        module = Branches().double()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        slices, reducer = sliced(module, group, bucket_bytes)
        for steps in (1, 1, 3):
            module.zero_grad()
            batches = _data(group.rank, steps)
            with reducer.no_sync():
                for x in batches[:-1]:
                    module(x, uses[group.rank]).backward()
            module(batches[-1], uses[group.rank]).backward()
            reducer.reduce()
            assert_slices(module, slices, _mean_gradients(group, uses, steps))
        torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
        reducer.remove()


@distributed(world_size=2)
def test_a_gradient_that_comes_after_its_bucket_was_sent_is_added(group):
    """By recomputation, by a second use, and by a second backward pass on one rank."""
    module, expected = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    expected.load_state_dict(module.state_dict())
    slices, reducer = sliced(module, group, 1)
    for rank in range(2):
        x = _data(rank)[0].requires_grad_()
        for each, factor in ((expected, 0.5), *(((module, 1.0),) if rank == group.rank else ())):
            for _ in range(1 + rank):
                y = checkpoint(each, checkpoint(each, x, use_reentrant=True), use_reentrant=True)
                (y.sum() * factor).backward()
                (each(x).sum() * factor).backward()
    reducer.reduce()
    assert_slices(module, slices, {name: value.grad for name, value in expected.named_parameters()})


@distributed(world_size=2)
def test_gradients_are_freed_while_backward_runs(group):
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6))).double()
    slices, reducer = sliced(layers, group, 1)
    found = []
    layers[0].weight.register_hook(
        lambda _: found.append((sum(p.grad is not None for p in layers.parameters()), len(reducer._in_flight)))
    )
    layers(_data(group.rank)[0]).sum().backward()
    assert found == [(0, 2)], "the last layers' buckets wait for the first layer, or stay there whole"
    # What was started, and is not wanted any more, leaves nothing behind.
    reducer.cancel()
    layers(_data(group.rank)[0]).sum().backward()
    reducer.reduce()
    expected = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6))).double()
    slices.widen()
    expected.load_state_dict(layers.state_dict())
    layers(_data(group.rank)[0]).sum().backward()
    for rank in range(2):
        (expected(_data(rank)[0]).sum() / 2).backward()
    reducer.reduce()
    assert_slices(layers, slices, {name: value.grad for name, value in expected.named_parameters()})


@pytest.mark.parametrize("in_order", [False, True])
@distributed(world_size=2)
def test_updates_are_gathered_whatever_the_size_and_the_strides(group, in_order):
    def made():
        generator = torch.Generator().manual_seed(3)
        shapes = {
            "large": (512, 160),
            "odd": (513, 161),
            "turned": (300, 300),
            "small": (3,),
            "one": (1, 1),
            "none": (),
        }
        tensors = {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}
        tensors["turned"] = tensors["turned"].t()
        return nn.ParameterDict(tensors)

    def train(module, step):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        patches = Patches()
        slices = step(optimizer, patches)
        for number in range(2):
            for name, parameter in module.items():
                parameter.grad = None if name == "small" and number else parameter.detach().cos() + number
            optimizer.step()
        patches.undo()
        return slices

    def divided(optimizer, patches):
        slices = ParameterSlices(dict(module.named_parameters()), group, bucket_bytes=1 << 20)
        slices.divide(optimizer, patches)
        return slices

    module, expected = made(), made()
    addresses = {name: parameter.data_ptr() for name, parameter in module.items()}
    with strict_order() if in_order else contextlib.nullcontext():
        slices = train(module, divided)
    train(expected, lambda *_: None)
    torch.testing.assert_close(dict(module.items()), dict(expected.items()), rtol=1e-12, atol=1e-14)
    assert addresses == {name: parameter.data_ptr() for name, parameter in module.items()}
    assert module["turned"].stride() == (1, 300)
    # The large one was sent from where it is.
    sent = sum(module[name].nbytes for name in ("odd", "turned"))
    assert sent <= slices.traffic.peak <= 1.6 * sent


@distributed(world_size=4)
def test_norms_of_shards_that_two_ranks_hold(group):
    """A head of keys for two of queries, in slices of two replicas: each element counts once."""
    groups = MeshGroups(Mesh(data_parallel=2, tensor_parallel=2))
    tensor = groups.tensor_parallel
    whole = torch.randn(10, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rule = Shard.packed(0, [ShardPart.queries(2, 2, 1), ShardPart.keys(1, 2), 4], 2)
    assert rule.replicated
    module = LightningModule()
    module.qk = nn.Parameter(rule.split(whole, tensor.rank))
    module.bias, module.scale = nn.Parameter(whole[0].clone()), nn.Parameter(whole[0, 0].clone())
    slices = ParameterSlices(dict(module.named_parameters()), groups.data_parallel)
    norm = ReplicaNorm(module, {"qk": rule}, groups, frozenset(), slices)
    norms = ShardNorms({id(module.qk): "qk"}, {"qk": rule}, tensor, slices)
    for parameter in module.parameters():
        parameter.grad = 2 * parameter.detach()
    for parameter in (module.qk, module.bias):
        slices.narrow(parameter, slices.cut(parameter.grad))
    slices.begin()
    elements = 2 * torch.cat([whole.flatten(), whole[0], whole[0, :1]])
    patches = Patches()
    norm.use_everywhere(patches)
    for norm_type in (1.0, 2.0, float("inf")):
        found = nn.utils.get_total_norm([p.grad for p in module.parameters()], norm_type)
        torch.testing.assert_close(found, elements.norm(norm_type), rtol=1e-12, atol=0)
    patches.undo()
    each = norm.of_each(module, 2.0)
    expected = {"qk": 2 * whole.norm(), "bias": 2 * whole[0].norm(), "scale": 2 * whole[0, 0].abs()}
    torch.testing.assert_close(each, expected, rtol=1e-12, atol=0)
    found = norms([module.qk, module.bias], [module.qk, module.bias], [module.qk.grad, None])
    expected = torch.stack([whole.norm(), whole[0].norm(), 2 * whole.norm(), torch.zeros_like(whole[0, 0])])
    torch.testing.assert_close(found.view(-1), expected, rtol=1e-12, atol=0)
    comm.barrier(group)
