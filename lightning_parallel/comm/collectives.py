"""Collectives on tensors. In a group of one rank they communicate nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.work import Done, Pending

__all__ = ["all_gather", "all_reduce", "all_reduce_", "all_to_all", "broadcast_", "irecv", "isend", "reduce_scatter"]

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def all_reduce_(tensor: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce a contiguous `tensor` over `group`, in place.

    Args:
        tensor: Of the same shape and dtype on all ranks.
        group: The group.
        op: `sum`, `max`, `min` or `product`.
        async_op: Return a `Pending` instead of waiting.

    Returns:
        `tensor`, or a `Pending` that gives it.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    pending = Pending("all_reduce", group, _size_bytes(tensor), tensor.dtype, tensor).launch(
        lambda: (
            PairwiseAllReduce(tensor, group, op)
            if PairwiseAllReduce.suits(tensor, group)
            else dist.all_reduce(tensor, _REDUCE_OPS[op], group=group.process_group, async_op=True)
        )
    )
    return pending if async_op else pending.wait()


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce `tensor` over `group` into a new tensor; in a group of one, return `tensor` itself."""
    if group.size == 1:
        return tensor
    # `clone` alone would keep the strides, and collectives need contiguous memory.
    return all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group, op)


def broadcast_(tensor: Tensor, group: Group, source: int = 0, async_op: bool = False) -> Any:
    """Overwrite a contiguous `tensor` with that of the rank at position `source`.

    Returns:
        `tensor`; with `async_op`, a `Pending` that gives it.
    """
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
        tensor: This rank's part; only its extent along `dim` may differ between ranks.
        group: The group.
        dim: The dimension to concatenate.
        sizes: Extent along `dim` on each rank, where they differ.
        async_op: Return a `Pending` instead of waiting.

    Returns:
        The whole tensor; with `async_op`, a `Pending` that gives it.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    sizes = [tensor.shape[dim]] * group.size if sizes is None else sizes
    # `dist.all_gather` expects equal shapes, so smaller parts are sent with padding, which is cut off again.
    part = _padded(tensor.movedim(dim, 0), max(sizes)).contiguous()
    whole = part.new_empty((group.size, *part.shape))

    def result() -> Tensor:
        if min(sizes) == max(sizes):
            return whole.flatten(0, 1).movedim(0, dim)
        return torch.cat([padded[:size] for padded, size in zip(whole, sizes)]).movedim(0, dim)

    pending = Pending("all_gather", group, _size_bytes(whole), tensor.dtype, result).launch(
        lambda: dist.all_gather(list(whole.unbind()), part, group=group.process_group, async_op=True)
    )
    return pending if async_op else pending.wait()


def reduce_scatter(
    tensor: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None, async_op: bool = False
) -> Any:
    """Sum `tensor` over the ranks and return this rank's part along `dim`.

    Args:
        tensor: Of the same shape on all ranks.
        group: The group.
        dim: The dimension to divide.
        sizes: Extent along `dim` that each rank gets; equal parts when omitted.
        async_op: Return a `Pending` instead of waiting.

    Returns:
        The part; with `async_op`, a `Pending` that gives it.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    sizes = [tensor.shape[dim] // group.size] * group.size if sizes is None else sizes
    parts = [_padded(part, max(sizes)).contiguous() for part in tensor.movedim(dim, 0).split(list(sizes))]
    mine = torch.empty_like(parts[0])

    def result() -> Tensor:
        return mine[: sizes[group.rank]].movedim(0, dim)

    pending = Pending("reduce_scatter", group, _size_bytes(*parts), tensor.dtype, result).launch(
        lambda: _start_reduce_scatter(mine, parts, group)
    )
    return pending if async_op else pending.wait()


def _start_reduce_scatter(mine: Tensor, parts: list[Tensor], group: Group) -> Any:
    # Tried rather than asked: whether gloo has it depends on the version of torch, and nothing tells.
    try:
        return dist.reduce_scatter(mine, parts, group=group.process_group, async_op=True)
    except RuntimeError as error:
        if "does not support reduce_scatter" not in str(error):
            raise
    return _AllReduceAndSlice(mine, torch.stack(parts), group)


class _AllReduceAndSlice:
    """A reduce-scatter for backends that have none: gloo in older versions of torch."""

    def __init__(self, mine: Tensor, whole: Tensor, group: Group) -> None:
        self._mine = mine
        self._part = whole[group.rank]
        self._work = dist.all_reduce(whole, group=group.process_group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        # Not before: until then the buffer holds partial sums.
        self._mine.copy_(self._part)


def all_to_all(
    tensor: Tensor,
    group: Group,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Send slice j of `tensor` along dimension 0 to rank j, and return the slices that arrive, in the order of ranks.

    Args:
        tensor: The slices, one after another.
        group: The group.
        send_sizes: Rows for each rank; equal parts when omitted.
        receive_sizes: Rows from each rank; equal parts when omitted.
        async_op: Return a `Pending` instead of waiting.
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
    """Start sending a contiguous `tensor` to the rank at position `to`; it must not change until `wait` returns."""
    peer = group.ranks[to]
    return Pending("send", group, _size_bytes(tensor), tensor.dtype, tensor, peer, tag).launch(
        lambda: dist.isend(tensor, peer, group=group.process_group, tag=tag)
    )


def irecv(tensor: Tensor, group: Group, source: int, tag: int = 0) -> Pending:
    """Start receiving into a contiguous `tensor` from the rank at position `source`."""
    peer = group.ranks[source]
    return Pending("recv", group, _size_bytes(tensor), tensor.dtype, tensor, peer, tag).launch(
        lambda: dist.irecv(tensor, peer, group=group.process_group, tag=tag)
    )


def _size_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _padded(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[0]
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


# ------------------------------------------------------------------------------------- all-reduce between two ranks

PAIRWISE_MAX_BYTES = 1 << 21  # above, the addition in the calling thread costs more than the steps of gloo's ring
_PAIRWISE_TAG = 1 << 20  # outside the range of the tags of messages between stages
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class PairwiseAllReduce:
    """An all-reduce between two processes on CPU: each sends its tensor to the other, and both combine the two.

    `tensor` holds the result after `wait`.
    """

    # This moves as many bytes as gloo's ring does, in one step instead of several, each of which wakes a thread: it
    # takes about half the time for the messages of a tensor-parallel layer. Both ranks get the same bits, because
    # a + b == b + a also in floating point.

    def __init__(self, tensor: Tensor, group: Group, op: str) -> None:
        peer = group.ranks[1 - group.rank]
        self._tensor = tensor
        self._other = torch.empty_like(tensor)
        self._op = op
        self._works = (
            dist.irecv(self._other, peer, group=group.process_group, tag=_PAIRWISE_TAG),
            dist.isend(tensor, peer, group=group.process_group, tag=_PAIRWISE_TAG),
        )

    @staticmethod
    def suits(tensor: Tensor, group: Group) -> bool:
        """Tell whether to use this instead of the backend's all-reduce."""
        is_small = tensor.numel() * tensor.element_size() <= PAIRWISE_MAX_BYTES
        return group.size == 2 and tensor.device.type == "cpu" and tensor.layout == torch.strided and is_small

    def wait(self) -> None:
        """Wait for both directions, then combine."""
        for work in self._works:
            if work is not None:  # torch's type; only a rank outside the group gets None
                work.wait()
        _COMBINE[self._op](self._tensor, self._other, out=self._tensor)
