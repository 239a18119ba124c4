"""Compression in people's own `DistributedDataParallel` code: every kind of parameter, many buckets."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel import comm
from lightning_parallel.compression import Dense, HookState, PowerSGD, Quantize, Sign, TopK, compression_hook
from tests.harness import distributed

SMALL = {"min_numel": 16}
COMPRESSORS = {
    "dense": Dense,
    "powersgd": lambda: PowerSGD(2, **SMALL),
    "alternating": lambda: PowerSGD(2, alternate=True, **SMALL),
    "topk_int8": lambda: TopK(0.1, **SMALL) | Quantize(8),
    "int4": lambda: Quantize(4, stochastic=True, feedback=None, **SMALL),
    "sign": lambda: Sign(**SMALL),
}
some = pytest.mark.parametrize("name", ["alternating", "topk_int8", "sign"])


class Odd(nn.Module):
    """Parameters of every kind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(11, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.temperature = nn.Parameter(torch.tensor(1.5))  # of no dimension
        self.nothing = nn.Parameter(torch.empty(0, 12))  # empty
        self.turned = nn.Parameter(torch.randn(20, 12).t() / 10)  # not contiguous
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.idle = nn.Linear(12, 12)  # used by some batches only

    def forward(self, tokens, idle=True):
        x = self.embedding(tokens) + self.nothing.sum()
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        x = self.frozen(x) @ self.turned @ self.turned.t()
        x = self.idle(x) if idle else x
        return self.head(x) * self.temperature


def tokens(step, rank):
    return torch.randint(11, (5, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def wrap(compressor, dtype=torch.float64, bucket_cap_mb=0.0005, **options):
    """About one bucket per layer."""
    model = DistributedDataParallel(Odd().to(dtype), bucket_cap_mb=bucket_cap_mb, **options)
    state = None
    if compressor is not None:
        state = HookState(compressor, model, bucket_bytes=600)
        model.register_comm_hook(state, compression_hook)
    return model, state


def train(model, group, state=None, num_steps=4, first=0, idle=lambda step: True):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(first, first + num_steps):
        optimizer.zero_grad()
        model(tokens(step, group.rank), idle(step)).square().mean().backward()
        if state is not None:
            assert state.finish()
        optimizer.step()
    whole = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(comm.all_gather(whole[None], group), whole.expand(group.size, -1)), "bitwise equal"
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal(found, expected):
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"static_graph": True}, torch.float64),
        ({"find_unused_parameters": True}, torch.float64),
        ({"gradient_as_bucket_view": True}, torch.float64),
    ],
)
@distributed(world_size=2)
def test_plain_means_equal_ddp(options, dtype, group):
    expected = train(wrap(None, dtype, **options)[0], group)
    model, state = wrap(Dense(), dtype, **options)
    found = train(model, group, state)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    state.close()


@pytest.mark.parametrize("name", ["dense", "alternating", "topk_int8"])
@distributed(world_size=4)
def test_many_buckets_on_four_ranks(name, group):
    model, buckets = DistributedDataParallel(Odd().double(), bucket_cap_mb=0.0005), []
    state = HookState(COMPRESSORS[name](), model, bucket_bytes=600)

    def count(given, bucket):
        buckets.append(bucket.index())
        return compression_hook(given, bucket)

    count.__annotations__ = dict(compression_hook.__annotations__)
    model.register_comm_hook(state, count)
    train(model, group, state)
    assert max(buckets) >= 7
    assert state.compressor.step == 4
    state.close()


@some
@distributed(world_size=2)
def test_how_ddp_fills_its_buckets_does_not_matter(name, group):
    results = []
    for size in (0.0005, 0.002, 25):
        model, state = wrap(COMPRESSORS[name](), bucket_cap_mb=size)
        results.append(train(model, group, state))
        state.close()
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@pytest.mark.parametrize("name", ["powersgd", "int4"])
@distributed(world_size=2)
def test_resumes_bit_for_bit_with_new_buckets(name, group):
    """A new DDP begins with other buckets than it goes on with."""
    whole, state = wrap(COMPRESSORS[name]())
    expected = train(whole, group, state, num_steps=3)
    weights, held = {k: v.clone() for k, v in whole.module.state_dict().items()}, state.state_dict()
    expected = train(whole, group, state, first=3)
    state.close()
    again, state = wrap(COMPRESSORS[name]())
    again.module.load_state_dict(weights)
    state.load_state_dict(held)
    assert_equal(train(again, group, state, first=3), expected)
    assert state.compressor.step == 7
    state.close()


@some
@distributed(world_size=2)
def test_parameters_that_are_not_used_keep_their_residual(name, group):
    """DDP sends zeros for them; what error feedback owes them must not be spent on nobody."""
    model, state = wrap(COMPRESSORS[name](), find_unused_parameters=True)
    train(model, group, state, num_steps=2)
    before = state.state_dict().get("residual", {}).get("idle.weight")
    train(model, group, state, num_steps=3, first=2, idle=lambda step: False)
    assert model.module.idle.weight.grad is None
    if before is not None:
        assert torch.equal(state.state_dict()["residual"]["idle.weight"], before)
    used_by_one = train(model, group, state, num_steps=1, first=5, idle=lambda step: group.rank == 0)
    assert all(weight.isfinite().all() for weight in used_by_one)
    state.close()


@distributed(world_size=2)
def test_what_has_state_and_what_has_not(group):
    model, state = wrap(TopK(0.1, **SMALL))
    train(model, group, state)
    held = state.state_dict()["residual"]
    assert {"embedding.weight", "turned", "layers.0.weight"} <= held.keys()
    assert not held.keys() & {"head.weight", "frozen.weight", "nothing", "temperature", "layers.0.bias"}
    assert held["turned"].shape == (12, 20)
    state.close()


@distributed(world_size=2)
def test_accumulation_is_silent_and_counts_once(group):
    model, state = wrap(TopK(0.1, **SMALL))
    for step in range(4):
        with model.no_sync():
            model(tokens(step, group.rank)).square().mean().backward()
        model(tokens(step + 10, group.rank)).square().mean().backward()
        assert state.finish()
        model.zero_grad()
    assert state.compressor.step == 4
    state.close()


@distributed(world_size=2)
def test_overflow_on_one_rank_leaves_no_trace_in_later_steps(group):
    runs = []
    for bad in (False, True):
        model, state = wrap(COMPRESSORS["topk_int8"]())
        train(model, group, state, num_steps=3)
        if bad:
            loss = model(tokens(99, group.rank)).square().mean() * (torch.inf if group.rank == 1 else 1.0)
            loss.backward()
            assert not state.finish()
            gradients = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
            assert all(not gradient.isfinite().all() for gradient in gradients), "on every rank"
            assert state.compressor.step == 3
        runs.append(train(model, group, state, num_steps=4, first=3))
        state.close()
    assert_equal(*runs)


@distributed(world_size=4)
def test_a_part_of_the_ranks(group):
    """Two pairs, each a DDP of its own."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = comm.Group.of(pairs[group.rank // 2])
    model = DistributedDataParallel(Odd().double(), process_group=mine.process_group, bucket_cap_mb=0.0005)
    state = HookState(PowerSGD(2, **SMALL), model, process_group=mine.process_group)
    model.register_comm_hook(state, compression_hook)
    train(model, mine, state)
    state.close()


@distributed(world_size=2)
def test_a_module_that_ddp_does_not_wrap_is_refused(group):
    model = DistributedDataParallel(Odd().double())
    state = HookState(Dense(), nn.Linear(3, 3))
    model.register_comm_hook(state, compression_hook)
    with pytest.raises(RuntimeError, match="give `HookState` the module that DDP wraps"):
        model(tokens(0, group.rank)).sum().backward()
    state.close()


@distributed(world_size=2)
def test_an_error_in_a_compressor_is_raised_where_it_is_waited_for(group):
    class Broken(TopK):
        def compress(self, work, block, step):
            raise ArithmeticError("no")
            yield

    model, state = wrap(Broken(0.1, **SMALL))
    with contextlib.suppress(RuntimeError):  # DDP's own, where the last bucket fails
        model(tokens(0, group.rank)).sum().backward()
    with pytest.raises(ArithmeticError, match="no"):
        state.finish()
    state.close()


@distributed(world_size=2)
def test_before_start_step_weights_are_equal_to_ddp_without_a_compressor(group):
    """Bit for bit, in the gradients' dtype; but a step that is not finite counts for nothing."""
    for dtype in (torch.float32, torch.bfloat16):
        model, state = wrap(PowerSGD(1, start_step=3, **SMALL), dtype)
        train(model, group, state, num_steps=2)
        model(tokens(7, group.rank)).mul(torch.inf if group.rank else 1.0).sum().backward()
        assert not state.finish()
        assert "layers.0.weight" in state.reduced
        assert state.compressor.step == 2
        train(model, group, state, num_steps=1, first=2)
        again, _ = wrap(None, dtype)
        train(again, group, num_steps=2)
        train(again, group, num_steps=1, first=2)
        for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        train(model, group, state, num_steps=2, first=3)
        assert state.compressor.step == 5
        state.close()
    shapes = {"w": (100, 100)}
    assert Dense().wire_bytes(shapes, 2, dtype=torch.bfloat16) == Dense().wire_bytes(shapes, 2) / 2
