"""A chain of functions of a piece gives the numbers of the same chain on the full tensor."""

import copy
import io
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_parallel.tensor import pieces
from lightning_parallel.tensor.autograd import reduce_from_group
from lightning_parallel.tensor.pieces import GATHERS, Piece, without_pieces
from lightning_parallel.tensor.sharded import ShardedParameter, ShardedTensor, ShardPlace
from lightning_parallel.tensor.sharding import Shard
from tests.harness import distributed, recorded_communication, run

SHAPE = (3, 5, 4)


def _changed(x, dim, full):
    y = x.clone()
    view = y.transpose(0, -1)
    y.mul_(1.5).add_(full)
    return view + y.transpose(0, -1)


def _set(x, dim, full):
    y = x.clone()
    y[..., :1] = 0.5
    return y * 1.0


def _set_in_a_view(x, dim, full):
    y = x.clone()
    y.narrow(dim, 0, 1).mul_(3)
    return y


def _masked(x, dim, full):
    y = x.clone()
    y[y > full] = -0.5
    return y.masked_fill_(full < 0.1, 2.0)


def _drawn(x, dim, full):
    torch.manual_seed(x.dim())
    return x + torch.randn_like(x) * torch.rand_like(full)


FUNCTIONS = {
    "scale": lambda x, dim, full: x * 0.7 - 0.1,
    "tanh": lambda x, dim, full: torch.tanh(x),
    "square": lambda x, dim, full: x * x,
    "add full": lambda x, dim, full: full + x,
    "divide by a row": lambda x, dim, full: x / (1 + full.select(dim, 0).unsqueeze(dim).abs()),
    "mask": lambda x, dim, full: x.masked_fill(full > 0.5, -0.25),
    "clamp": lambda x, dim, full: x.clamp(min=-0.5),
    "transpose": lambda x, dim, full: x.transpose(0, dim),
    "unsqueeze": lambda x, dim, full: x.unsqueeze(dim),
    "flatten": lambda x, dim, full: x.flatten(0, min(1, x.dim() - 1)),
    "flatten the end": lambda x, dim, full: x.flatten(-min(2, x.dim())),
    "split": lambda x, dim, full: x.unflatten(-1, (x.shape[-1], 1)),
    "rows": lambda x, dim, full: x.narrow(dim, 0, max(1, x.shape[dim] - 1)),
    "first": lambda x, dim, full: x.select(dim, -1) if x.dim() > 1 else x,
    "unbind": lambda x, dim, full: torch.stack([2 * row for row in x.unbind(dim)], dim),
    "iterate": lambda x, dim, full: torch.stack([row * at for at, row in enumerate(x)]),
    "chunk": lambda x, dim, full: torch.cat([part.exp() for part in x.chunk(2, dim)], dim),
    "index": lambda x, dim, full: x[torch.tensor([0, 0, -1])],
    "select": lambda x, dim, full: x[full.flatten(1)[:, 0] > -1] if x.dim() > 1 else x,
    "softmax": lambda x, dim, full: x.softmax(dim),
    "log_softmax": lambda x, dim, full: F.log_softmax(x, dim=dim),
    "sum": lambda x, dim, full: x.sum(dim, keepdim=True) + x,
    "mean": lambda x, dim, full: x - x.mean(dim, keepdim=True),
    "mean of two": lambda x, dim, full: x - x.mean((0, -1), keepdim=True) if x.dim() > 1 else x,
    "norm": lambda x, dim, full: x / (1 + x.norm(dim=dim, keepdim=True)),
    "logsumexp": lambda x, dim, full: x - torch.logsumexp(x, dim, keepdim=True),
    "max": lambda x, dim, full: x.max(dim, keepdim=True).values - x,
    "topk": lambda x, dim, full: x.topk(min(2, x.shape[dim]), dim).values,
    "argmax": lambda x, dim, full: x + x.argmax(dim, keepdim=True),
    "cumsum": lambda x, dim, full: x.cumsum(dim),
    "sort": lambda x, dim, full: x.sort(dim=dim).values,
    "matmul": lambda x, dim, full: x @ torch.ones(x.shape[-1], 2, dtype=x.dtype),
    "linear": lambda x, dim, full: F.linear(x, torch.ones(3, x.shape[-1], dtype=x.dtype)),
    "layer_norm": lambda x, dim, full: F.layer_norm(x, x.shape[-1:]),
    "products": lambda x, dim, full: x.transpose(0, dim) @ x.transpose(0, dim).transpose(-1, -2) if x.dim() > 1 else x,
    "einsum": lambda x, dim, full: torch.einsum("...i,...i->...i", x, full),
    "where": lambda x, dim, full: torch.where(x > full, x, full),
    "lerp": lambda x, dim, full: torch.lerp(x, full, 0.3).addcdiv(full, full + 1, value=0.5),
    "compare": lambda x, dim, full: x * (x.detach() <= full) + (x == x),
    "join": lambda x, dim, full: torch.cat([x, 2 * x], dim),
    "join full": lambda x, dim, full: torch.cat([full, x], dim),
    "pile": lambda x, dim, full: torch.stack([x, x - 1], -1).sum(-1),
    "turn": lambda x, dim, full: x.flip(dim).roll(1, dim),
    "expand": lambda x, dim, full: x.narrow(dim, 0, 1).expand_as(x) - x,
    "spread": lambda x, dim, full: x / (1 + x.std(dim, correction=0, keepdim=True)) + x.var(),
    "product": lambda x, dim, full: x + x.prod(dim, keepdim=True),
    "order": lambda x, dim, full: x * x.argsort(dim),
    "threshold": lambda x, dim, full: x * (x.abs() >= x.detach().abs().flatten().topk(2).values[-1]),
    "extremes": lambda x, dim, full: x / (2 + x.detach().abs().max()) + x.detach().amin(dim, keepdim=True),
    "norm of all": lambda x, dim, full: x * (0.5 / (1 + x.norm())).clamp(max=0.4),
    "other norm": lambda x, dim, full: x / (1 + torch.linalg.vector_norm(x, 1, dim=dim, keepdim=True)),
    "lists": lambda x, dim, full: torch._foreach_add(torch._foreach_mul([x, full], 0.5), [full, x])[0],
    "norms of lists": lambda x, dim, full: x * torch._foreach_norm([x.detach(), full])[0],
    "fill": lambda x, dim, full: torch.zeros_like(x).add_(x).mul_(0.9).sub_(full).clamp_(-2),
    "assign": lambda x, dim, full: x.clone().mul_(0.5).__iadd__(full),
    "masked set": _masked,
    "draw": _drawn,
    "change": _changed,
    "set": _set,
    "set in a view": _set_in_a_view,
}
CALLS = st.lists(st.tuples(st.sampled_from(sorted(FUNCTIONS)), st.integers(0, 2)), min_size=1, max_size=5)


def _chain(x, calls):
    generator = torch.Generator().manual_seed(3)
    for name, dim in calls:
        full = torch.rand(x.shape, dtype=torch.float64, generator=generator)
        x = FUNCTIONS[name](x, dim % x.dim(), full)
    return x


# The ranges of each rank in a dimension of a size.
RULES = {
    "first": lambda n: (((0, 1),), ((1, n),)),
    "last": lambda n: (((0, n - 1),), ((n - 1, n),)),
    "all here": lambda n: (((0, n),), ((0, 0),)),
    "all there": lambda n: (((0, 0),), ((0, n),)),
    "packed": lambda n: (((0, 1), (2, n)), ((1, 2),)),
    "shared": lambda n: (((0, 2),), ((1, n),)),
}


@pytest.mark.sweep(kept=None)
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls=CALLS, place=st.integers(0, 2), name=st.sampled_from(sorted(RULES)), in_region=st.booleans())
def test_chains_of_functions_equal_the_full_tensor(calls, place, name, in_region):
    # Hidden states of a region are never packed.
    run(chain_is_equal, 2, calls=calls, place=place, name=name, in_region=in_region and name in ("first", "last"))


def chain_is_equal(group, calls, place, name, in_region):
    torch.manual_seed(1)
    rule = Shard(place, RULES[name](SHAPE[place]))
    leaf = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    part = rule.split(leaf.detach(), group.rank).requires_grad_()
    expected = _chain(leaf * 1.0, calls)
    own = part * 1.0
    x = Piece.of(own, group, place, rule.sizes, in_region) if in_region else Piece.by_rule(own, rule, group)
    found = _chain(x, calls)
    torch.testing.assert_close(without_pieces(found).detach(), expected.detach(), rtol=1e-9, atol=1e-9, equal_nan=True)
    weights = torch.rand(expected.shape, dtype=torch.float64)
    (want,) = torch.autograd.grad((expected * weights).sum(), leaf, create_graph=True)
    (have,) = torch.autograd.grad((found * weights).sum(), part, create_graph=True)
    _assert_part(have, want, rule, group)
    # Gradients of gradients.
    if want.requires_grad:
        (want,) = torch.autograd.grad(want.square().sum(), leaf)
        (have,) = torch.autograd.grad(reduce_from_group(have.square().sum(), group), part)
        _assert_part(have, want, rule, group)


def _assert_part(have, want, rule, group):
    # The first rank that holds an element has its gradient.
    want = rule.only_owned(rule.split(want, group.rank), group.rank)
    # The gradient of `std` is no number where all values are equal.
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9, equal_nan=True)


def _pieces(group, place=1):
    extents = {0: (2, 1), 1: (3, 2), 2: (1, 3)}[place]
    full = torch.arange(60, dtype=torch.float64).view(SHAPE).sin()
    return full, Piece.of(full.split(extents, place)[group.rank].clone(), group, place, extents)


@distributed(world_size=2)
def test_reductions_send_results_only(group):
    for place in range(3):
        full, x = _pieces(group, place)
        functions = (
            lambda x: (x.pow(2).mean() + x.norm(), x.sum((0, 1)), x.argmin(-1), x.topk(1, 0), x.min(1)),
            lambda x: (x.softmax(-1).sum(), F.log_softmax(x, 1).mean(), torch.linalg.vector_norm(x, 1, dim=0)),
            lambda x: (x.amax((0, 2)), torch.logsumexp(x, 2, keepdim=True), x.std(), x.var((0, 1), correction=0)),
        )
        for function in functions:
            with recorded_communication() as records:
                found = function(x)
            found = without_pieces(found)
            # The parts together have 60 numbers, and no result has more than 20 on each rank.
            assert max((record.bytes for record in records), default=0) <= 40 * 8, records
            torch.testing.assert_close(found, function(full))


@distributed(world_size=2)
def test_gathers_are_counted_by_line(group):
    _, x = _pieces(group)
    before = GATHERS.total()
    x.sum()
    (2 * x).transpose(0, 1)
    assert GATHERS.total() == before
    for _ in range(2):
        y = x + 1
        y.flip(1)
        y.roll(1, 1)
    assert GATHERS.total() == before + 2
    (line,) = (line for line in GATHERS if "test_gathers_are_counted_by_line" in line)
    assert "test_pieces.py" in line


@distributed(world_size=2)
def test_a_line_that_often_gathers_much_is_told_once(group):
    told = []
    with mock.patch.object(pieces, "tell", told.append), mock.patch.object(pieces, "_LARGE", 60 * 8 * 15):
        parameters = [_pieces(group)[1].part for _ in range(30)]
        for _ in range(20):
            Piece.of(parameters[0], group, 1, (3, 2)).flip(1)
        for part in parameters:  # as of an epoch's end: much, but not often
            Piece.of(part, group, 1, (3, 2)).flip(1)
    (text,) = told
    assert "test_pieces.py" in text
    assert "in 15 reads" in text


@distributed(world_size=2)
def test_saved_pieces_are_full_tensors(group):
    full, x = _pieces(group)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file), full)
    assert repr(x) == repr(full)
    assert x.type() == full.type()
    with pytest.raises(RuntimeError, match="out of range"):
        x.topk(6, 1)
    assert torch.equal(torch.split(tensor=x, split_size_or_sections=2, dim=1)[2], full[:, 4:])
    assert f"{x.sum():.3f}" == f"{full.sum():.3f}"
    assert x.select(0, 1)[2, 3].item() == full[1, 2, 3].item()
    torch.manual_seed(0)
    found = torch.multinomial(x[0].softmax(-1), 2)
    torch.manual_seed(0)
    assert torch.equal(found, torch.multinomial(full[0].softmax(-1), 2))


@distributed(world_size=2)
def test_parameters_beside_a_piece_have_full_gradients(group):
    full, x = _pieces(group)
    results = []
    for tensor in (full, x):
        weight, scale = torch.full((4,), 0.5, dtype=torch.float64).requires_grad_(), torch.tensor(2.0).requires_grad_()
        y = F.layer_norm(tensor * scale, (4,), weight)
        results.append(torch.autograd.grad(y.square().mean(), [weight, scale]))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected)


@distributed(world_size=2)
def test_hooks_must_come_before_the_part_is_used(group):
    _, x = _pieces(group)
    x = Piece.of(x.part.requires_grad_() * 1, group, 1, (3, 2))
    (x * 2).sum()
    with pytest.raises(RuntimeError, match="before the loss"):
        x.register_hook(print)


@distributed(world_size=2)
def test_a_copy_gathers_only_what_it_copies(group):
    full, x = _pieces(group)
    weight = nn.Parameter(torch.ones(2, 3))
    ShardedTensor.show(weight, ShardPlace(Shard.even(0, 4, 2), group))
    with recorded_communication() as calls:
        copied, found = copy.deepcopy([weight, x])
    # The memo of the copy of `x` holds the weight.
    assert len(calls) == 1
    assert type(copied) is ShardedParameter
    assert torch.equal(found, full)
    pieces_of = [_pieces(group) for _ in range(20)]
    pieces_of = [(number * full, number * x) for number, (full, x) in enumerate(pieces_of)]
    copies = copy.deepcopy([x for _, x in pieces_of])
    # Memory of a full tensor that is gone may be that of the next one.
    assert all(torch.equal(found, full) for found, (full, _) in zip(copies, pieces_of))
