"""Functions and models whose sequences are split over ranks compute the numbers of one process."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import nn

from lightning_parallel import comm
from lightning_parallel.compat import Patches
from lightning_parallel.tensor.context import PositionSplit
from lightning_parallel.tensor.context_rules import attend_flexibly
from lightning_parallel.tensor.pieces import GATHERS, Piece
from tests.harness import run

B, S, E = 2, 7, 6


def _heads(x):
    return x.view(B, -1, 2, 3).transpose(1, 2)


def _eager(x, w):
    q, k, v = map(_heads, (x @ w, x @ w.sin(), x * 0.5))
    scores = q @ k.transpose(-2, -1) + torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).triu(1) * -1e9
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, -1, E)


def _sdpa(x, w, **kwargs):
    q, k, v = map(_heads, (x @ w, x @ w.sin(), x * 0.5))
    return F.scaled_dot_product_attention(q, k, v, **kwargs).transpose(1, 2).flatten(2)


def _flexible(x, w):
    q, k, v = map(_heads, (x @ w, x @ w.sin(), x * 0.5))
    block_mask = flex.create_block_mask(lambda b, h, row, column: row >= column, None, None, *[x.shape[1]] * 2, "cpu")
    found = flex.flex_attention(q, k, v, lambda score, b, h, row, column: score + (row - column), block_mask)
    return found.transpose(1, 2).flatten(2)


@contextmanager
def with_flex_attention(of_pieces=False):
    """On CPUs, flex_attention computes gradients without compilation, but refuses to."""
    patches = Patches()
    if of_pieces:
        attend_flexibly(patches)
    patches.replace(flex, "_validate_device", lambda *tensors: None)
    if hasattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"):
        patches.replace(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    try:
        yield
    finally:
        patches.undo()


def _labels(x):
    return torch.arange(B * x.shape[1]).view(B, -1) % E


def _module_of_heads(x, w, batch_first=True, **kwargs):
    torch.manual_seed(3)
    module = nn.MultiheadAttention(E, 2, batch_first=batch_first).double()
    return module(x, x, x, **kwargs)[0] @ w


def _ramp(x, *samples):
    """A number for each position, and for the samples and dimensions before."""
    return torch.linspace(0.5, 2, x.shape[1] * math.prod(samples)).double().view(*samples, -1)


def _rotated(x, w, is_in_place=False):
    z = torch.view_as_complex((x @ w).reshape(*x.shape[:-1], -1, 2))
    turn = torch.polar(torch.ones(x.shape[1], 1).double(), _ramp(x)[:, None])
    return torch.view_as_real(z.mul_(turn) if is_in_place else z * turn).flatten(2)


FUNCTIONS = {
    "linear": lambda x, w: F.linear(x, w).relu(),
    "flat and back": lambda x, w: torch.addmm(w[0], x.view(-1, E), w).view(B, -1, 2, 3).sum(-1),
    "heads and back": lambda x, w: _heads(x @ w).transpose(1, 2).contiguous().view(B, -1, E) * w[0],
    "position table": lambda x, w: x + F.embedding(torch.arange(x.shape[1]) % E, w),
    "norms": lambda x, w: F.layer_norm(x, (E,), w[0]) + x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    "rotate": lambda x, w: torch.cat([-x[..., E // 2 :], x[..., : E // 2]], -1) * w.cos()[0],
    "shift left": lambda x, w: (x[:, :-1] @ w)[:, 1:],
    "an empty range": lambda x, w: (x[:, 5:5] @ w).sum() + x,
    "narrow by keywords": lambda x, w: x.narrow(1, 1, length=3) @ w,
    "a slice up to more than the size": lambda x, w: (x[..., : 2 * E] @ w)[:, :, -E:, None][-B:, 0:99].sum(-1),
    "shift by narrow": lambda x, w: (x.narrow(1, 2, 4) @ w).transpose(1, 2),
    "first position": lambda x, w: (x[:, 0] @ w).tanh(),
    "last position": lambda x, w: x[:, -1, :] @ w,
    "mean": lambda x, w: x.mean(1) @ w,
    "masked mean": lambda x, w: ((x @ w) * (_labels(x) > 2).unsqueeze(-1)).sum(1) / 3,
    "softmax over positions": lambda x, w: ((x @ w[0]).softmax(-1).unsqueeze(-1) * x).sum(1),
    "eager attention": _eager,
    "attention": _sdpa,
    "causal attention": lambda x, w: _sdpa(x, w, is_causal=True),
    "causal attention, dropout that drops nothing": lambda x, w: _sdpa(x, w, is_causal=True, dropout_p=1e-14),
    "flex_attention": _flexible,
    "attention with padding": lambda x, w: _sdpa(x, w, attn_mask=(_labels(x) != 1)[:, None, None, :]),
    "heads in a module": _module_of_heads,
    "heads in a module, positions first": lambda x, w: _module_of_heads(x.transpose(0, 1), w, batch_first=False),
    "heads in a module, no weights": lambda x, w: _module_of_heads(x, w, need_weights=False),
    "keys of a short encoder": lambda x, w: F.scaled_dot_product_attention(
        _heads(x @ w), w.expand(B, 2, E, E)[..., :3], w.expand(B, 2, E, E)[..., 3:]
    ),
    "products with vectors": lambda x, w: (
        (x @ w[0]).unsqueeze(-1) + (w[1] @ x.mT).unsqueeze(-1) + torch.mv(x.view(-1, E), w[2]).view(B, -1, 1)
    ),
    "product of two vectors": lambda x, w: (x @ w)[0, :, 0] @ x[1, :, 1] + torch.mv(x[0].mT, (x @ w)[1, :, 2]),
    "linear to one feature": lambda x, w: F.linear(x, w[0], w[1, 0]).tanh(),
    "sum over positions with a vector": lambda x, w: (_ramp(x) @ (x @ w)) + torch.mv(x[0].mT, _ramp(x)),
    "dot and inner": lambda x, w: torch.dot((x @ w)[0, :, 0], x[1, :, 1]) + torch.inner(x, w[0]).sin(),
    "addmv and addr": lambda x, w: torch.addmv(x[0, :, 0], x[1], w[0], beta=0.5).outer(w[1]).addr(x[0, :, 1], w[2]),
    "baddbmm and addbmm": lambda x, w: (
        torch.baddbmm(x, x, w.expand(B, E, E), alpha=2) + torch.addbmm(x[0], x, w.expand(B, E, E))
    ),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1) + torch.tensordot(x, x @ w, ([0, 1], [0, 1])).sum(0),
    "bilinear": lambda x, w: F.bilinear(x, x @ w, w.expand(3, E, E), w[0, :3]),
    "linear attention": lambda x, w: (x @ w) @ ((x.sin() @ w).transpose(1, 2) @ x),
    "einsum": lambda x, w: torch.einsum(
        "bhqk,bkhd->bqhd",
        torch.einsum("bqhd,bkhd->bhqk", (x @ w).view(B, -1, 2, 3), x.view(B, -1, 2, 3)).softmax(-1),
        x.sin().view(B, -1, 2, 3),
    ),
    "repeated heads": lambda x, w: _heads(x)[:, :, None].expand(-1, -1, 2, -1, -1).reshape(B, 4, -1, 3) * w[0, :3],
    "diagonal by einsum": lambda x, w: torch.einsum("bii,bid->bid", (x @ w) @ x.transpose(1, 2), x),
    "einsum with one gate for all positions": lambda x, w: torch.einsum("btd,btd,t->btd", x, w[None, :1], _ramp(x)),
    "scores by keyword": lambda x, w: (
        _ramp(x, B, 1).baddbmm(batch1=x @ w, batch2=x.mT, beta=0.5, alpha=2).softmax(-1) @ x
    ),
    "normalized queries and keys": lambda x, w: F.scaled_dot_product_attention(
        F.normalize(_heads(x @ w), dim=-1), F.normalize(_heads(x), dim=-1), _heads(x), is_causal=True
    ),
    "complex rotation": _rotated,
    "complex rotation in place": lambda x, w: _rotated(x, w, is_in_place=True),
    "complex sum over positions": lambda x, w: torch.view_as_complex((x @ w).unflatten(-1, (3, 2))).cumsum(1).abs(),
    "cumulative sum": lambda x, w: x.cumsum(1) @ w,
    "convolution": lambda x, w: F.conv1d(x.transpose(1, 2), w[:, :, None], padding=1).transpose(1, 2),
    "windows": lambda x, w: F.pad(x @ w, (0, 0, 0, x.shape[1] % 2)).view(B, -1, 2, E).mean(2),
    "log-probabilities of labels": lambda x, w: torch.gather(
        (x @ w).log_softmax(-1), 2, index=_labels(x).unsqueeze(-1)
    ).squeeze(-1),
    "take along the features": lambda x, w: (x @ w).take_along_dim(_labels(x)[:, :, None] % 2, dim=-1).mul(x),
    "take along positions": lambda x, w: (x @ w).gather(1, _labels(x)[:, :, None] * 0),
    "cross entropy": lambda x, w: F.cross_entropy((x @ w).view(-1, E), _labels(x).view(-1), ignore_index=2),
    "shifted cross entropy": lambda x, w: F.cross_entropy(
        (x @ w)[:, :-1].reshape(-1, E), _labels(x)[:, 1:].reshape(-1), weight=w[0].abs().detach(), label_smoothing=0.1
    ),
    "cross entropy, classes second": lambda x, w: F.cross_entropy((x @ w).transpose(1, 2), _labels(x)),
    "cross entropy, each": lambda x, w: F.cross_entropy((x @ w).flatten(0, 1), _labels(x).flatten(), reduction="none"),
    "cross entropy of probabilities": lambda x, w: F.cross_entropy(
        (x @ w).transpose(1, 2), torch.ones(B, E, x.shape[1]).double() / E
    ),
    "squared error": lambda x, w: F.mse_loss(x @ w, torch.zeros(B, x.shape[1], E).double()),
    "binary": lambda x, w: F.binary_cross_entropy_with_logits(x @ w, torch.ones(B, x.shape[1], E).double()),
    "binary with weights": lambda x, w: F.binary_cross_entropy_with_logits(
        x @ w, x.detach().sigmoid(), weight=_ramp(x, B)[..., None], pos_weight=_ramp(x)[:, None]
    ),
    "squared error with weights": lambda x, w: F.mse_loss(
        x @ w, x.detach().cos(), weight=_ramp(x, B)[..., None].expand(B, -1, E)
    ),
    "absolute error with weights": lambda x, w: F.l1_loss(
        x @ w, x.detach().cos(), weight=_ramp(x, B)[..., None].expand(B, -1, E)
    ),
    "in place": lambda x, w: (x @ w).mul_(2).add_(x),
    "in place in a view": lambda x, w: _added_in_view(x @ w),
}
# These gather positions: one, those of keys or values, or those of all of the tensor.
GATHERING = {
    "an empty range",
    "first position",
    "last position",
    "eager attention",
    "einsum",
    "scores by keyword",
    "take along positions",
}
GATHERING |= {"heads in a module", "heads in a module, positions first", "sum over positions with a vector"}
GATHERING |= {"dot and inner", "addmv and addr", "baddbmm and addbmm", "tensordot", "bilinear"}
GATHERING |= {"cumulative sum", "convolution", "windows", "diagonal by einsum", "complex sum over positions"}
GATHERING |= {"in place in a view", "complex rotation in place", "flex_attention"}


def _added_in_view(y):
    y.view(-1, E).mul_(3)
    return y * 1.5


def _compute(name, x, w):
    y = FUNCTIONS[name](x, w)
    return y.whole() if isinstance(y, Piece) else y


def _inputs(length):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(B, length, E, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), torch.randn(E, E, dtype=torch.float64, generator=generator).requires_grad_()


@with_flex_attention(of_pieces=True)
def _divided(names, length, is_balanced):
    group = comm.Group.of()
    split, found = PositionSplit(group, "gather" if is_balanced else "auto", is_causal=is_balanced), {}
    # With two ranks, the second call of a function uses the decision on the first.
    for name in names * (2 if group.size == 2 else 1):
        x, w = _inputs(length)
        before = GATHERS.total()
        y = FUNCTIONS[name](split.split(x * 1.0, 1), w)
        gathers = GATHERS.total() - before
        y = y.whole() if isinstance(y, Piece) else y
        y.sin().sum().backward()
        # Partial gradients: their mean over the ranks is the gradient.
        gradients = [comm.all_reduce(each.grad, group) / group.size for each in (x, w)]
        found[name] = (y.detach(), *gradients, gathers)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "length", "is_balanced"), [(2, S, False), (2, 8, True), (3, S, True), (4, S, False)])
def test_functions_of_split_sequences(ranks, length, is_balanced):
    everyone = run(_divided, ranks, names=list(FUNCTIONS), length=length, is_balanced=is_balanced)
    for name in FUNCTIONS:
        x, w = _inputs(length)
        with with_flex_attention():
            y = _compute(name, x, w)
        y.sin().sum().backward()
        assert [results[name][-1] > 0 for results in everyone] == [name in GATHERING] * ranks, name
        for rank, results in enumerate(everyone):
            for what, found, expected in zip(("result", "input", "weight"), results[name], (y, x.grad, w.grad)):
                torch.testing.assert_close(
                    found, expected, rtol=1e-10, atol=1e-10, msg=f"{name}, {what}, rank {rank}: {found} {expected}"
                )
