"""The gradient reducer: the mean over replicas, whatever was used, frozen, shared or accumulated."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.data_parallel import GradientReducer
from tests.harness import distributed


class Branches(nn.Module):
    """Two branches, of which a call uses those it names, and a parameter shared by both ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, x, use=("first", "second")):
        for name in use:
            x = getattr(self, name)(x).tanh() * self.scale
        return x.sum() + self.empty.sum()


def _data(rank, steps=1):
    return torch.randn(steps, 3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _mean_gradients(group, uses, steps=1):
    """Gradients by name of the mean over the ranks' losses, in one process."""
    module = Branches().double()
    for rank in range(group.size):
        for x in _data(rank, steps):
            (module(x, uses[rank]) / group.size).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def _assert_equal(module, expected):
    for name, parameter in module.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)


BOTH = ("first", "second")


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    "uses",
    [
        [BOTH, BOTH],
        [BOTH, ("second", "first")],
        [("first",), BOTH],
        [("first",), ("second",)],
        [("first",), ("first",)],
    ],
    ids=["all", "other order", "unused on one", "disjoint", "unused on all"],
)
@distributed(world_size=2)
def test_gradients_are_the_mean_over_replicas(group, uses, bucket_bytes):
    module = Branches().double()
    reducer = GradientReducer(dict(module.named_parameters()), group, bucket_bytes)
    for _ in range(2):
        module.zero_grad()
        module(_data(group.rank)[0], uses[group.rank]).backward()
        reducer.reduce()
        _assert_equal(module, _mean_gradients(group, uses))


@distributed(world_size=2)
def test_accumulation_communicates_only_at_the_end(group):
    module = Branches().double()
    reducer = GradientReducer(dict(module.named_parameters()), group)
    batches = _data(group.rank, steps=3)
    with comm.record() as records, reducer.no_sync():
        for x in batches[:2]:
            module(x).backward()
            reducer.reduce()
    assert not records
    module(batches[2]).backward()
    reducer.reduce()
    _assert_equal(module, _mean_gradients(group, [BOTH, BOTH], steps=3))


@distributed(world_size=2)
def test_buckets_start_while_backward_runs(group):
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    reducer = GradientReducer(dict(layers.named_parameters()), group, bucket_bytes=1)
    started = []
    layers[0].weight.register_hook(lambda _: started.append(sum(b.pending is not None for b in reducer._buckets)))
    layers(_data(group.rank)[0]).sum().backward()
    reducer.reduce()
    assert started[0] >= 2, "the last layers' buckets wait for the first layer"


@distributed(world_size=2)
def test_a_layer_that_is_recomputed_and_used_twice(group):
    x = _data(group.rank)[0].requires_grad_()
    module = nn.Linear(4, 4).double()
    reducer = GradientReducer(dict(module.named_parameters()), group, bucket_bytes=1)
    y = checkpoint(module, checkpoint(module, x, use_reentrant=True), use_reentrant=True)
    y.sum().backward()
    module(x).sum().backward()
    reducer.reduce()
    expected = nn.Linear(4, 4).double()
    expected.load_state_dict(module.state_dict())
    for rank in range(2):
        x = _data(rank)[0]
        ((expected(expected(x)).sum() + expected(x).sum()) / 2).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_freezing_and_unfreezing(group):
    module = Branches().double()
    module.first.requires_grad_(False)
    reducer = GradientReducer(dict(module.named_parameters()), group)
    for frozen in (True, False):
        module.first.requires_grad_(not frozen)
        module.zero_grad()
        reducer.refresh()
        module(_data(group.rank)[0]).backward()
        reducer.reduce()
        expected = _mean_gradients(group, [BOTH, BOTH])
        if frozen:
            expected |= {"first.weight": None, "first.bias": None}
        _assert_equal(module, expected)


@distributed(world_size=2)
def test_partial_gradients_are_prepared_once_before_they_are_averaged(group):
    module = Branches().double()
    seen = []

    def double(gradients):
        seen.append(sorted(gradients))
        for gradient in gradients.values():
            gradient.mul_(2)

    names = frozenset({"scale", "first.bias"})
    for reduced in (group, Group.alone("data_parallel")):
        module.zero_grad()
        reducer = GradientReducer(dict(module.named_parameters()), reduced, prepare=double, prepare_names=names)
        module(_data(group.rank)[0]).backward()
        local = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        reducer.reduce()
        for name, parameter in module.named_parameters():
            factor = 2 if name in names else 1
            torch.testing.assert_close(
                parameter.grad, factor * comm.all_reduce(local[name], reduced) / reduced.size, rtol=1e-10, atol=1e-12
            )
    assert seen == [["first.bias", "scale"]] * 2


class _Recorder:
    def __init__(self):
        self.calls = []

    def reduce_(self, named_gradients, group):
        self.calls.append(list(named_gradients))
        for gradient in named_gradients.values():
            gradient.copy_(comm.all_reduce(gradient, group) / group.size)


@distributed(world_size=2)
def test_compression_gets_every_gradient_that_any_replica_has(group):
    module = Branches().double()
    compression = _Recorder()
    reducer = GradientReducer(dict(module.named_parameters()), group, compression=compression)
    uses = [("first",), ("first", "second")]
    module(_data(group.rank)[0], uses[group.rank]).backward()
    reducer.reduce()
    assert compression.calls == [[name for name, _ in module.named_parameters()]]
    _assert_equal(module, _mean_gradients(group, uses))


@distributed(world_size=2)
def test_sparse_gradients_are_refused(group):
    module = nn.Embedding(5, 3, sparse=True)
    reducer = GradientReducer(dict(module.named_parameters()), group)
    with reducer.no_sync():
        module(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="`weight` is sparse"):
        reducer.reduce()


@distributed(world_size=2)
def test_dtypes_are_kept(group):
    module = nn.ModuleDict({"low": nn.Linear(4, 4).bfloat16(), "single": nn.Linear(4, 4)})
    reducer = GradientReducer(dict(module.named_parameters()), group)
    for layer in module.values():
        layer(torch.full((1, 4), group.rank + 1.0, dtype=layer.weight.dtype)).sum().backward()
    reducer.reduce()
    for parameter in module.parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.unique().tolist() == ([1.5] if parameter.dim() == 2 else [1.0])


def test_one_process_installs_nothing():
    module = Branches()
    reducer = GradientReducer(dict(module.named_parameters()), Group.alone("data_parallel"))
    assert not reducer._hooks
    assert all(not parameter._post_accumulate_grad_hooks for parameter in module.parameters())
