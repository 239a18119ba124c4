"""The collectives on tensors. A group of one rank communicates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.comm.exchange import Exchange
from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.records import Done, Pending

__all__ = ["all_gather", "all_reduce", "all_reduce_", "all_to_all", "broadcast_", "irecv", "isend", "reduce_scatter"]


def _size_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# -------------------------------------------------------------------------------------------------- collectives

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def all_reduce_(tensor: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce a contiguous `tensor` over `group`, in place.

    Args:
        op: `sum`, `max`, `min` or `product`.
        async_op: Return a `Pending` instead of waiting.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    pending = Pending("all_reduce", group, _size_bytes(tensor), tensor.dtype, tensor).launch(
        lambda: (
            Exchange(tensor, group, op)
            if Exchange.suits(tensor, group)
            else dist.all_reduce(tensor, _OPS[op], group=group.process_group, async_op=True)
        )
    )
    return pending if async_op else pending.wait()


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """The reduction of `tensor` over `group`, in a new tensor."""
    if group.size == 1:
        return tensor
    return all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group, op)


def broadcast_(tensor: Tensor, group: Group, source: int = 0, async_op: bool = False) -> Any:
    """Overwrite a contiguous `tensor` with that of the rank at position `source`."""
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    pending = Pending("broadcast", group, _size_bytes(tensor), tensor.dtype, tensor).launch(
        lambda: dist.broadcast(tensor, group.ranks[source], group=group.process_group, async_op=True)
    )
    return pending if async_op else pending.wait()


def all_gather(
    tensor: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None, async_op: bool = False
) -> Any:
    """Concatenate the tensors of all ranks along `dim`.

    Args:
        sizes: Extent along `dim` on each rank, where they differ.
        async_op: Return a `Pending` instead of waiting.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    sizes = [tensor.shape[dim]] * group.size if sizes is None else sizes
    piece = _padded(tensor.movedim(dim, 0), max(sizes)).contiguous()
    whole = piece.new_empty((group.size, *piece.shape))

    def result() -> Tensor:
        if min(sizes) == max(sizes):
            return whole.flatten(0, 1).movedim(0, dim)
        return torch.cat([part[:size] for part, size in zip(whole, sizes)]).movedim(0, dim)

    pending = Pending("all_gather", group, _size_bytes(whole), tensor.dtype, result).launch(
        lambda: dist.all_gather(list(whole.unbind()), piece, group=group.process_group, async_op=True)
    )
    return pending if async_op else pending.wait()


def reduce_scatter(
    tensor: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None, async_op: bool = False
) -> Any:
    """Sum `tensor` over the ranks and keep this rank's part along `dim`.

    Args:
        sizes: Extent along `dim` that each rank keeps; equal parts when omitted.
        async_op: Return a `Pending` instead of waiting.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    sizes = [tensor.shape[dim] // group.size] * group.size if sizes is None else sizes
    parts = [_padded(part, max(sizes)).contiguous() for part in tensor.movedim(dim, 0).split(list(sizes))]
    mine = torch.empty_like(parts[0])
    pending = Pending(
        "reduce_scatter", group, _size_bytes(*parts), tensor.dtype, lambda: mine[: sizes[group.rank]].movedim(0, dim)
    ).launch(lambda: _reduce_scatter(mine, parts, group))
    return pending if async_op else pending.wait()


def _reduce_scatter(mine: Tensor, parts: list[Tensor], group: Group) -> Any:
    try:
        return dist.reduce_scatter(mine, parts, group=group.process_group, async_op=True)
    except RuntimeError as error:
        if "does not support reduce_scatter" not in str(error):
            raise
    return _SumAndCopy(mine, torch.stack(parts), group)


class _SumAndCopy:
    """A reduce-scatter where the backend has none: gloo in older versions of torch."""

    def __init__(self, mine: Tensor, whole: Tensor, group: Group) -> None:
        self._mine, self._part = mine, whole[group.rank]
        self._work = dist.all_reduce(whole, group=group.process_group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        self._mine.copy_(self._part)


def all_to_all(
    tensor: Tensor,
    group: Group,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Exchange slices along dimension 0: slice j goes to rank j; the result holds the slices meant for this rank.

    Args:
        send_sizes: Rows for each rank; equal parts when omitted.
        receive_sizes: Rows from each rank; equal parts when omitted.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    tensor = tensor.contiguous()
    rows = tensor.shape[0] if receive_sizes is None else sum(receive_sizes)
    received = tensor.new_empty((rows, *tensor.shape[1:]))
    send = None if send_sizes is None else list(send_sizes)
    receive = None if receive_sizes is None else list(receive_sizes)
    pending = Pending("all_to_all", group, _size_bytes(tensor), tensor.dtype, received).launch(
        lambda: dist.all_to_all_single(received, tensor, receive, send, group=group.process_group, async_op=True)
    )
    return pending if async_op else pending.wait()


def isend(tensor: Tensor, group: Group, to: int, tag: int = 0) -> Pending:
    """Start sending a contiguous `tensor` to the rank at position `to`."""
    peer = group.ranks[to]
    return Pending("send", group, _size_bytes(tensor), tensor.dtype, tensor, peer, tag).launch(
        lambda: dist.isend(tensor, peer, group=group.process_group, tag=tag)
    )


def irecv(tensor: Tensor, group: Group, source: int, tag: int = 0) -> Pending:
    """Start receiving into a contiguous `tensor` from the rank at position `source`."""
    process_group = group.process_group
    assert process_group is not None
    peer = group.ranks[source]
    return Pending("recv", group, _size_bytes(tensor), tensor.dtype, tensor, peer, tag).launch(
        lambda: dist.irecv(tensor, peer, group=group.process_group, tag=tag)
    )


def _padded(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[0]
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])
