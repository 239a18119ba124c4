"""Attention of a sequence whose positions are sharded over the ranks of a group (context parallelism).

`attend` computes this rank's rows of `F.scaled_dot_product_attention`. It has three methods, see
`tensor.context_methods`. Gradients are partial along the group: the ranks differentiate the same loss, or parts of it.
A sharded tensor gets the sum of its gradients from all ranks.

Legend for shapes: B batch, H query heads, H_kv heads of keys and values, L queries, S keys, L_r queries of this rank,
S_r keys of this rank, E features of a head, E_v features of a value.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.comm.kept import kept
from lightning_parallel.compat.torch import version_of
from lightning_parallel.tensor.autograd import all_gather_to_group
from lightning_parallel.tensor.context_methods import Method, head_rules, ulysses_reason
from lightning_parallel.tensor.regions import own_stream
from lightning_parallel.tensor.ring_attention import Turns, causal_turns, masked_turns, ring_attention
from lightning_parallel.tensor.sharding import Range, Shard

__all__ = ["attend"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Shard,
    columns: Shard,
    group: Group,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    enable_gqa: bool = False,
    method: Method = "ulysses",
) -> Tensor:
    """Compute this rank's rows of an attention whose positions are sharded over the ranks.

    All ranks of the group must call it with the same options and the same full `mask`.

    Args:
        q: (B, H, L_r, E), queries of this rank; any number of batch dimensions.
        k: (B, H_kv, S_r, E), keys of this rank.
        v: (B, H_kv, S_r, E_v), values of this rank.
        rows: The positions of the queries on each rank.
        columns: The positions of the keys on each rank. With `gather`, each rank may hold all of them.
        group: The ranks.
        mask: Broadcastable to (B, H, L, S), for all positions: boolean (True attends) or added to the scores. Its
            gradient is partial: the sum over the ranks is the full gradient.
        is_causal: Whether row i attends to columns 0 to i only, as in torch.
        scale: Factor of the scores; 1 / sqrt(E) by default.
        dropout: Share of the weights that are dropped. Only `gather` drops weights. Each rank draws its own numbers,
            so it drops other weights than one process.
        enable_gqa: Whether several query heads may share a key and value head.
        method: `ulysses`, `ring` or `gather`.

    Returns:
        (B, H, L_r, E_v), the rows of this rank.

    Raises:
        ValueError: On every rank, if the method cannot compute this attention or the shapes do not fit together.
    """
    given = mask
    q, k, v, mask = _as_autocast(q, k, v, mask)
    _check(q, k, v, rows, columns, group, mask, is_causal, dropout, enable_gqa, method)
    batch = q.shape[:-3]
    q, k, v, mask = _four_dims(q, k, v, mask)
    work = _Work(rows.along(-2), columns.along(-2), group, mask, is_causal, scale, dropout)
    if method == "ring":
        turns = causal_turns(rows.ranges, columns.ranges, is_causal) if given is None else _turns_of(given, work)
        result = ring_attention(q, k, v, mask, scale, turns, group)
    else:
        result = (_ulysses if method == "ulysses" else _gather)(q, k, v, work)
    return result.reshape(*batch, *result.shape[1:]) if len(batch) != 1 else result


class _Work(NamedTuple):
    """The arguments of an attention that all ranks share; see `attend`."""

    rows: Shard
    columns: Shard
    group: Group
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    dropout: float


# ------------------------------------------------------------------------------------------------------------- checks


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Shard,
    columns: Shard,
    group: Group,
    mask: Tensor | None,
    is_causal: bool,
    dropout: float,
    enable_gqa: bool,
    method: str,
) -> None:
    """Refuse an attention that the method cannot compute, before the first collective."""
    if method not in ("ulysses", "ring", "gather"):
        raise ValueError(f"`method` must be `ulysses`, `ring` or `gather`; got {method!r}")
    if dropout > 0 and method != "gather":
        raise ValueError(f"`{method}` must have no dropout; got {dropout}. Use `gather`, or set the dropout to 0")
    if mask is not None and is_causal:
        raise ValueError("Attention takes a mask or `is_causal`; got both. Put the causal order into the mask")
    if min(x.dim() for x in (q, k, v)) < 3:
        raise ValueError(f"Queries, keys and values must have heads and positions; got shape {tuple(q.shape)}")
    for what, x, rule in (("queries", q, rows), ("keys", k, columns), ("values", v, columns)):
        is_whole = method == "gather" and rule is columns and rule.sizes == (rule.full_size,) * group.size
        if rule.ranks != group.size or (rule.replicated and not is_whole):
            raise ValueError(
                f"Each position of the {what} must be on one of the {group.size} ranks; got the ranges {rule.ranges}"
            )
        if x.shape[-2] != rule.sizes[group.rank]:
            raise ValueError(
                f"The {what} of rank {group.rank} must have {rule.sizes[group.rank]} positions; got {x.shape[-2]}"
            )
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if v.shape[-3] != kv_heads or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            "Queries, keys and values must have equal heads and features; got shapes"
            f" {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if heads != kv_heads and kv_heads != 1 and (not enable_gqa or heads % kv_heads):
        raise ValueError(
            f"{heads} query heads must be a multiple of the {kv_heads} key and value heads, with `enable_gqa=True`"
        )
    if mask is not None:
        full = (*q.shape[:-2], rows.full_size, columns.full_size)
        trailing = full[len(full) - mask.dim() :]
        if mask.dim() > len(full) or any(found not in (1, size) for found, size in zip(mask.shape, trailing)):
            raise ValueError(f"`mask` must be broadcastable to {full}, all positions; got {tuple(mask.shape)}")
    reason = ulysses_reason(heads, kv_heads, group.size) if method == "ulysses" else None
    if reason is not None:
        raise ValueError(f"`ulysses` cannot be used: {reason}. Use `ring` or `gather`")


def _as_autocast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast like autocast in torch's attention, so that the messages are in low precision."""
    device = q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        low = [x.to(dtype) if x is not None and x.dtype == torch.float32 else x for x in (q, k, v, mask)]
        q, k, v, mask = low  # type: ignore[assignment]
    return q, k, v, mask


def _four_dims(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tensors with one batch dimension."""
    batch = q.shape[:-3]
    k, v = (x if x.shape[:-3] == batch else x.expand(*batch, *x.shape[-3:]) for x in (k, v))
    if mask is not None:
        mask = mask[(None,) * (q.dim() - mask.dim())]
    if len(batch) != 1:
        # Sizes in numbers: a rank without positions has no elements.
        q, k, v = (x.reshape(prod(batch), *x.shape[-3:]) for x in (q, k, v))
        if mask is not None:
            samples = batch if prod(mask.shape[:-3]) > 1 else mask.shape[:-3]
            mask = mask.expand(*samples, *mask.shape[-3:]).reshape(prod(samples), *mask.shape[-3:])
    return q, k, v, mask


# ---------------------------------------------------------------------------------------------------------------- ring

_last_turns: list[tuple[weakref.ref[Tensor], tuple[int, Shard, Shard], Turns]] = []


def _turns_of(mask: Tensor, work: _Work) -> Turns:
    """Return the turns of a mask that the caller passed.

    The layers of a step share a mask. To ask for its values in each layer would wait for the device.
    """
    assert work.mask is not None
    key = None if mask.is_inference() else (version_of(mask), work.rows, work.columns)
    for found, known, turns in _last_turns:
        if found() is mask and known == key:
            return turns
    turns = masked_turns(work.rows.ranges, work.columns.ranges, work.mask)
    if key is not None:
        _last_turns[:] = [(weakref.ref(mask), key, turns)]
    return turns


# -------------------------------------------------------------------------------------------------------------- gather


_FEW_SCORES = 1 << 16  # of a head


def _gather(q: Tensor, k: Tensor, v: Tensor, work: _Work) -> Tensor:
    """Gather keys and values, and compute the rows of this rank."""
    k, v = _gathered(k, v, work.columns, work.group)
    mask, own = work.mask, work.rows.ranges[work.group.rank]
    # Equal on all ranks, so that the graph of a loss has the same operations.
    sizes, columns = work.rows.sizes, work.columns.full_size
    if work.is_causal and not work.dropout and min(sizes) > 0 and max(sizes) * columns <= _FEW_SCORES:
        # One kernel with a mask: the tiles below take many small kernels, which cost more on the host.
        held = torch.cat([torch.arange(*each, device=q.device) for each in own])
        return _kernel(q, k, v, held[:, None] >= torch.arange(columns, device=q.device), False, work.scale)
    if work.is_causal and not work.dropout:
        # In full tiles and squares on the diagonal: a mask would have as many elements as the scores.
        turns = causal_turns((own,), (((0, work.columns.full_size),),), is_causal=True)
        return ring_attention(q, k, v, None, work.scale, turns, Group.alone(work.group.axis))
    if mask is not None and mask.shape[-2] > 1:
        mask = work.rows.split(mask, work.group.rank)
    with own_stream(work.group, q.device) if work.dropout else nullcontext():
        if work.is_causal:
            return _in_runs(q, k, v, own, work)
        return _kernel(q, k, v, mask, False, work.scale, work.dropout)


def _in_runs(q: Tensor, k: Tensor, v: Tensor, own: Sequence[Range], work: _Work) -> Tensor:
    """Compute each run of causal rows with the keys up to its last row: tiles cannot drop weights."""
    results, at = [], 0
    # A rank without rows also reads keys, so that its backward takes part in the exchange of their gradients.
    for start, stop in own or ((0, 0),):
        keys = max(1, min(stop, k.shape[-2]))
        mask = torch.arange(start, stop, device=q.device)[:, None] >= torch.arange(keys, device=q.device)
        rows, at = q.narrow(-2, at, stop - start), at + stop - start
        columns = k.narrow(-2, 0, keys), v.narrow(-2, 0, keys)
        results.append(_kernel(rows, *columns, mask, False, work.scale, work.dropout))
    return results[0] if len(results) == 1 else torch.cat(results, -2)


def _gathered(k: Tensor, v: Tensor, columns: Shard, group: Group) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all positions, in order; both travel in one message."""
    if group.size == 1 or columns.replicated:
        return k, v
    widths = [k.shape[-1], v.shape[-1]]
    both = all_gather_to_group(torch.cat([k, v], -1), group, -2, columns.sizes)
    if not columns.consecutive:
        both = columns.merge(both.split(list(columns.sizes), -2))
    k, v = both.split(widths, -1)
    return k, v


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout: float = 0.0,
) -> Tensor:
    shares_heads = q.shape[-3] != k.shape[-3]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=shares_heads)


# ------------------------------------------------------------------------------------------------------------- ulysses


def _ulysses(q: Tensor, k: Tensor, v: Tensor, work: _Work) -> Tensor:
    """Exchange positions for heads, compute full sequences of this rank's heads, and exchange back."""
    group, mask = work.group, work.mask
    if group.size == 1:
        return _kernel(q, k, v, mask, work.is_causal, work.scale)
    query_heads, key_heads = head_rules(q.shape[-3], k.shape[-3], group.size)
    # One message for all three: a message costs latency.
    ways = [_Way(query_heads, work.rows), *[_Way(key_heads, work.columns)] * 2]
    q, k, v = _Exchange.apply(group, ways, q, k, v)
    if mask is not None and mask.shape[-3] > 1:
        mask = query_heads.split(mask, group.rank)
    result = _kernel(q, k, v, mask, work.is_causal, work.scale)
    (result,) = _Exchange.apply(group, [_Way(work.rows, query_heads)], result)
    return result


class _Way(NamedTuple):
    """The rule by which each rank cuts its tensor, and the rule by which it joins the parts of all ranks."""

    cut: Shard
    joined: Shard


class _Exchange(Function):
    """Exchanges positions for heads, (B, H, L_r, E) to (B, H_r, L, E), or back; sums gradients of shared heads."""

    @staticmethod
    def forward(ctx: Any, group: Group, ways: Sequence[_Way], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.args = group, ways
        received = kept(partial(_exchanged, group, ways, tensors))
        shapes = _arriving(tensors, ways, group)
        flat = iter(received.split([shape.numel() for of_rank in shapes for shape in of_rank]))
        by_rank = [[next(flat).view(shape) for shape in of_rank] for of_rank in shapes]
        return tuple(
            _summed(parts, way.joined) if way.joined.replicated else way.joined.merge(parts)
            for parts, way in zip(zip(*by_rank), ways)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        group, ways = ctx.args
        return None, None, *_Exchange.apply(group, [_Way(way.joined, way.cut) for way in ways], *grads)


def _exchanged(group: Group, ways: Sequence[_Way], tensors: Sequence[Tensor]) -> Tensor:
    """Send each rank its shards of all tensors in one message; return the messages of all ranks, flat."""
    leaving = [[way.cut.local_shape(x.shape, rank) for x, way in zip(tensors, ways)] for rank in range(group.size)]
    sent = tensors[0].new_empty(sum(shape.numel() for shapes in leaving for shape in shapes))
    at = 0
    for rank, shapes in enumerate(leaving):
        for x, way, shape in zip(tensors, ways, shapes):
            # Straight into the message: `split` would copy each shard once more.
            part, start = sent[at : at + shape.numel()].view(shape), 0
            for first, stop in way.cut.ranges[rank]:
                into = part.narrow(way.cut.dim, start, stop - first)
                into.copy_(x.narrow(way.cut.dim, first, stop - first))
                start += stop - first
            at += shape.numel()
    sizes, arriving = (
        [sum(shape.numel() for shape in shapes) for shapes in by_rank]
        for by_rank in (leaving, _arriving(tensors, ways, group))
    )
    return comm.all_to_all(sent, group, sizes, arriving)


def _arriving(tensors: Sequence[Tensor], ways: Sequence[_Way], group: Group) -> list[list[torch.Size]]:
    """Return the shapes of the parts of all tensors that arrive from each rank."""
    mine = [way.cut.local_shape(x.shape, group.rank) for x, way in zip(tensors, ways)]
    return [[way.joined.local_shape(shape, rank) for shape, way in zip(mine, ways)] for rank in range(group.size)]


def _summed(parts: Sequence[Tensor], rule: Shard) -> Tensor:
    """Return the full tensor in which shards that overlap are summed."""
    full = parts[0].new_zeros(rule.full_shape(parts[0].shape))
    for part, ranges in zip(parts, rule.ranges):
        ((start, stop),) = ranges
        full.narrow(rule.dim, start, stop - start).add_(part)
    return full
