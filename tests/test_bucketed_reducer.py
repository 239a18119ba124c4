"""The gradient reducer: the mean over replicas, whatever was used, frozen, shared or accumulated."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import patched
from lightning_parallel.compression import Compressor, PowerSGD, RandomK, TopK, thin_products
from lightning_parallel.compression.compressor import Dense
from lightning_parallel.data_parallel import GradientReducer, bucketed_reducer
from lightning_parallel.tensor.sharding import reduce_partial_
from tests.compression.test_launches import Launches, Reads
from tests.harness import distributed, recorded_communication


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


def _compressed(compressor, overlapped=True):
    extra = [Group.of(dist.new_group()) if overlapped else None for _ in range(2)]
    return {"compression": compressor, "side_group": extra[0], "second_group": extra[1]}


BOTH = ("first", "second")


@pytest.mark.parametrize("compression", ["none", "after", "overlapped"])
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
def test_gradients_are_the_mean_over_replicas(group, uses, compression):
    expected = _mean_gradients(group, uses)
    options = _compressed(Dense(), overlapped=compression == "overlapped") if compression != "none" else {}
    for bucket_bytes in (1, 100, 1 << 20):
        module = Branches().double()
        reducer = GradientReducer(dict(module.named_parameters()), group, bucket_bytes, **options)
        for _ in range(2):
            module.zero_grad()
            module(_data(group.rank)[0], uses[group.rank]).backward()
            reducer.reduce()
            _assert_equal(module, expected)
        reducer.remove()


@distributed(world_size=2)
def test_accumulation_communicates_only_at_the_end(group):
    module = Branches().double()
    reducer = GradientReducer(dict(module.named_parameters()), group)
    batches = _data(group.rank, steps=3)
    with recorded_communication() as records, reducer.no_sync():
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
        seen.append(sorted(name for name in gradients if name))
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


@distributed(world_size=2)
def test_partial_gradients_that_no_rank_has_stay_none(group):
    module = Branches().double()
    names = frozenset({"scale", "first.bias"})
    reducer = GradientReducer(
        dict(module.named_parameters()),
        Group.alone("data_parallel"),
        prepare=functools.partial(reduce_partial_, rules={}, group=group),
        prepare_names=names,
    )
    with reducer.backward():
        if group.rank == 0:
            (module.scale.sum() * 3).backward()
        else:
            module.first.weight.sum().backward()
    assert module.first.bias.grad is None
    assert torch.equal(module.scale.grad, torch.full_like(module.scale, 3))


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


class Layers(nn.Module):
    """Layers of one shape, of which a call uses some, some of them twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, use=(0, 1, 2, 3)):
        for index in use:
            x = self.layers[index](x).tanh()
        return x.sum()


def _steps(group, compressor, overlapped, uses=None, steps=4, **options):
    """Gradients of some steps of a fixed model, and the compressor's state at the end."""
    module = Layers().double()
    options |= _compressed(compressor, overlapped)
    reducer = GradientReducer(dict(module.named_parameters()), group, bucket_bytes=1, **options)
    found = []
    for step in range(steps):
        module.zero_grad()
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step + 10 * group.rank), dtype=torch.float64)
        use = (uses or {}).get(step, (0, 1, 2, 3))
        module(x, use[group.rank] if isinstance(use, list) else use).backward()
        reducer.reduce()
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()})
    reducer.remove()
    return found, _state(compressor)


def _state(compressor):
    return {key: value for key, value in compressor.state_dict().items() if not isinstance(value, str)}


def _compressor(kind) -> Compressor:
    return {
        "powersgd": lambda: PowerSGD(2, min_numel=1),
        "alternating": lambda: PowerSGD(2, alternate=True, min_numel=1),
        "topk": lambda: TopK(0.25, min_numel=1),
        "randomk": lambda: RandomK(0.25, min_numel=1),
    }[kind]()


@pytest.mark.parametrize("kind", ["powersgd", "alternating", "topk", "randomk"])
@distributed(world_size=2)
def test_compression_beside_backward_gives_what_it_gives_after(group, kind):
    """Also where ranks use different layers, or one after the other has been sent."""
    uses = {1: [(0, 1, 2, 3), (2, 3)], 2: (3, 2, 3)}
    found, state = _steps(group, _compressor(kind), overlapped=True, uses=uses)
    expected, expected_state = _steps(group, _compressor(kind), overlapped=False, uses=uses)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_compression_runs_while_backward_does(group):
    module = Layers().double()
    reducer = GradientReducer(
        dict(module.named_parameters()), group, bucket_bytes=1, **_compressed(PowerSGD(2, min_numel=1))
    )
    for _ in range(2):
        started = []
        hook = module.layers[0].weight.register_hook(
            lambda _, started=started: started.append(sum(bucket.launched for bucket in reducer._buckets))
        )
        module(torch.ones(1, 8, dtype=torch.float64)).backward()
        reducer.reduce()
        hook.remove()
        assert started[0] >= 4, "the last layers' buckets wait for the first layer"
    reducer.remove()


@distributed(world_size=2)
def test_a_gradient_that_changes_after_it_was_sent_is_sent_again(group):
    """A second backward pass before `reduce`, on one rank only."""

    def gradients(overlapped):
        module = Layers().double()
        compressor = PowerSGD(2, min_numel=1)
        reducer = GradientReducer(
            dict(module.named_parameters()), group, bucket_bytes=1, **_compressed(compressor, overlapped)
        )
        x = torch.full((1, 8), group.rank + 1.0, dtype=torch.float64)
        for _ in range(2):
            module.zero_grad()
            for _ in range(1 + group.rank):
                module(x).backward()
            reducer.reduce()
        reducer.remove()
        return {name: parameter.grad for name, parameter in module.named_parameters()}, _state(compressor)

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("in_stages", [False, True])
@distributed(world_size=2)
def test_compressed_steps_are_counted_once_and_unused_parameters_keep_their_residual(group, in_stages):
    """Gradients come from autograd, or a pipeline says when all of a stage are there."""
    compressor = TopK(0.25, min_numel=1)
    module = Layers().double()
    reducer = GradientReducer(dict(module.named_parameters()), group, bucket_bytes=1, **_compressed(compressor))
    x = torch.full((1, 8), group.rank + 1.0, dtype=torch.float64)
    with recorded_communication() as records, reducer.no_sync():
        module(x).backward()
        reducer.reduce()
    assert not records
    module(x).backward()
    reducer.reduce()
    before = compressor.state_dict()
    module.zero_grad()
    with reducer.no_sync() if in_stages else contextlib.nullcontext():
        module(x, (0, 1)).backward()
    if in_stages:
        reducer.start(name for name, _ in module.named_parameters())
        reducer.mark(parameter for parameter in module.parameters() if parameter.grad is not None)
    reducer.reduce()
    reducer.remove()
    after = compressor.state_dict()
    assert (before["step"], after["step"]) == (1, 2)
    same = {name: torch.equal(before["residual"][name], value) for name, value in after["residual"].items()}
    assert same == {f"layers.{index}.weight": index > 1 for index in range(4)}
    assert module.layers[2].weight.grad is None


@pytest.mark.parametrize("overlapped", [True, False])
@distributed(world_size=4)
def test_an_overflow_anywhere_in_a_replica_makes_all_its_compressors_forget_the_step(group, overlapped):
    """Ranks 0 and 1 hold one half of the model, 2 and 3 the other."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    side = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half, replica = divmod(group.rank, 2)
    compressor = PowerSGD(2, min_numel=1, exact_rollback=True)
    module = Layers().double()
    reducer = GradientReducer(
        dict(module.named_parameters()),
        Group.of(pairs[half]),
        bucket_bytes=1,
        compression=compressor,
        side_group=Group.of(side[half]) if overlapped else None,
        replica_group=Group.of(across[replica]),
    )
    states = []
    for step in range(3):
        module.zero_grad()
        x = torch.full((1, 8), group.rank + step + 1.0, dtype=torch.float64)
        factor = torch.inf if step == 1 and group.rank == 3 else 1.0
        (module(x) * factor).backward()
        reducer.reduce()
        states.append(_state(compressor))
    reducer.remove()
    assert [state["step"] for state in states] == [1, 1, 2]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@distributed(world_size=2)
def test_parts_of_a_bucket_begin_at_aligned_places_on_a_gpu(group):
    expected = _mean_gradients(group, [("first", "second")] * 2)
    module = Branches().double()
    with patched(bucketed_reducer, "_padding", lambda tensor, dtype: -tensor.numel() % 2):
        reducer = GradientReducer(dict(module.named_parameters()), group)
        module(_data(group.rank)[0]).backward()
        reducer.reduce()
    _assert_equal(module, expected)
    assert all(p.grad.storage_offset() * p.grad.element_size() % 16 == 0 for p in module.parameters())
    assert len({p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.numel()}) == 1, "one bucket"


@pytest.mark.parametrize("kind", ["plain", "compressed", "overlapped"])
@distributed(world_size=2)
def test_the_host_waits_for_a_device_at_most_once_in_a_step(kind, group):
    """What ranks tell each other between hosts is not of the device."""

    def on_any_rank(flags, group):
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return found(flags, group)

    found = comm.on_any_rank
    options = {} if kind == "plain" else _compressed(PowerSGD(1, min_numel=1), kind == "overlapped")
    module = Branches().double()
    reducer = GradientReducer(dict(module.named_parameters()), group, **options, replica_group=group)
    device = patched(thin_products, "launches_kernels", lambda tensor: not tensor.is_meta)
    with patched(comm, "on_any_rank", on_any_rank), device:
        for step in range(3):
            module.zero_grad()
            seen = Launches()
            with seen, Reads(seen):
                module(_data(group.rank)[0]).backward()
                seen.waited.clear()
                reducer.reduce()
            assert step == 0 or sum(seen.waited.values()) <= (kind != "plain"), +seen.waited
    reducer.close()


@distributed(world_size=2)
def test_a_closed_reducer_leaves_no_second_buffers(group):
    module, compressor = Branches().double(), TopK(0.1, min_numel=1)
    reducer = GradientReducer(dict(module.named_parameters()), group, **_compressed(compressor))
    for _ in range(2):
        module(_data(group.rank)[0]).backward()
        reducer.reduce()
    held = compressor.memory.num_bytes
    reducer.close()
    assert compressor.memory.num_bytes == held // 2
    assert compressor.residual_norm > 0
