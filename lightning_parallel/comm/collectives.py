"""The collectives on tensors, and messages between two ranks.

A group of one rank communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.work import Done, Pending
from lightning_parallel.compat.torch import all_gather_single, reduce_scatter_single

__all__ = [
    "all_gather",
    "all_gather_",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "broadcast_",
    "exchange",
    "irecv",
    "isend",
    "reduce_",
    "reduce_scatter",
]


_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def all_reduce_(
    tensor: Tensor, group: Group, op: str = "sum", async_op: bool = False, between_hosts: bool = False
) -> Any:
    """Reduce a contiguous `tensor` over `group`, in place.

    Args:
        tensor: Of the same shape and dtype on all ranks.
        group: The group.
        op: `sum`, `max`, `min` or `product`.
        async_op: Return a `Pending` instead of waiting.
        between_hosts: See `isend`.

    Returns:
        `tensor`, or a `Pending` that gives it.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    has_handle = async_op or _has_handles(tensor)
    pending = _pending("all_reduce", group, tensor, tensor).launch(
        lambda: (
            PairwiseAllReduce(tensor, group, op)
            if PairwiseAllReduce.suits(tensor, group)
            else dist.all_reduce(tensor, _REDUCE_OPS[op], group=group.process_group, async_op=has_handle)
        ),
        between_hosts,
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
    has_handle = async_op or _has_handles(tensor)
    pending = _pending("broadcast", group, tensor, tensor).launch(
        lambda: dist.broadcast(tensor, group.ranks[source], group=group.process_group, async_op=has_handle)
    )
    return pending if async_op else pending.wait()


def reduce_(tensor: Tensor, group: Group, to: int, async_op: bool = False) -> Any:
    """Sum a contiguous `tensor` over `group` into that of the rank at position `to`; the others hold anything then.

    Returns:
        `tensor`; with `async_op`, a `Pending` that gives it.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    has_handle = async_op or _has_handles(tensor)
    pending = _pending("reduce", group, tensor, tensor).launch(
        lambda: dist.reduce(tensor, group.ranks[to], group=group.process_group, async_op=has_handle)
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
            gathered = whole.flatten(0, 1).movedim(0, dim)
        else:
            gathered = torch.cat([padded[:size] for padded, size in zip(whole, sizes)]).movedim(0, dim)
        # Once here: query, key and value layers would copy it each, in forward and in backward.
        return gathered.contiguous()

    has_handle = async_op or _has_handles(tensor)
    pending = _pending("all_gather", group, whole, result).launch(
        lambda: (
            DirectAllGather(whole, part, group)
            if DirectAllGather.suits(part, group)
            else dist.all_gather(list(whole.unbind()), part, group=group.process_group, async_op=True)
            if tensor.device.type == "cpu"
            else all_gather_single(whole.view(-1), part.view(-1), group=group.process_group, async_op=has_handle)
        )
    )
    return pending if async_op else pending.wait()


def all_gather_(whole: Tensor, group: Group, async_op: bool = False) -> Any:
    """Fill the rows of a contiguous `whole` (ranks, ...) in place: this rank's own is there.

    Returns:
        `whole`; with `async_op`, a `Pending` that gives it.
    """
    if group.size == 1:
        return Done(whole) if async_op else whole
    part = whole[group.rank]
    has_handle = async_op or _has_handles(whole)
    pending = _pending("all_gather", group, whole, whole).launch(
        lambda: (
            DirectAllGather(whole, part, group)
            if DirectAllGather.suits(part, group)
            else dist.all_gather(list(whole.unbind()), part.clone(), group=group.process_group, async_op=True)
            if whole.device.type == "cpu"
            else all_gather_single(whole.view(-1), part.view(-1), group=group.process_group, async_op=has_handle)
        )
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
    rows = tensor.movedim(dim, 0)
    if min(sizes) < max(sizes):
        rows = torch.cat([_padded(part, max(sizes)) for part in rows.split(list(sizes))])
    rows = rows.contiguous()
    mine = rows.new_empty((max(sizes), *rows.shape[1:]))

    def result() -> Tensor:
        return mine[: sizes[group.rank]].movedim(0, dim)

    has_handle = async_op or _has_handles(tensor)
    pending = _pending("reduce_scatter", group, rows, result).launch(
        lambda: _start_reduce_scatter(mine, rows, group, has_handle)
    )
    return pending if async_op else pending.wait()


def _start_reduce_scatter(mine: Tensor, rows: Tensor, group: Group, has_handle: bool) -> Any:
    if PairwiseReduceScatter.suits(mine, group):
        return PairwiseReduceScatter(mine, rows, group)
    # Tried rather than asked: whether gloo has it depends on the version of torch, and nothing tells.
    try:
        if mine.device.type != "cpu":
            return reduce_scatter_single(mine.view(-1), rows.view(-1), group=group.process_group, async_op=has_handle)
        # gloo takes twice as long for megabytes in one tensor; NCCL, given a list, would copy all of it.
        parts = list(rows.view(group.size, *mine.shape).unbind())
        return dist.reduce_scatter(mine, parts, group=group.process_group, async_op=True)
    except RuntimeError as error:
        if "does not support reduce_scatter" not in str(error):
            raise
    return _AllReduceAndSlice(mine, rows, group)


class _AllReduceAndSlice:
    """A reduce-scatter for backends that have none: gloo in older versions of torch."""

    def __init__(self, mine: Tensor, rows: Tensor, group: Group) -> None:
        whole = rows.clone()  # it may be the caller's
        self._mine = mine
        self._part = whole.view(group.size, *mine.shape)[group.rank]
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
    has_handle = async_op or _has_handles(tensor)
    pending = _pending("all_to_all", group, tensor, received).launch(
        lambda: dist.all_to_all_single(received, tensor, receive, send, group=group.process_group, async_op=has_handle)
    )
    return pending if async_op else pending.wait()


def isend(tensor: Tensor, group: Group, to: int, tag: int = 0, between_hosts: bool = False) -> Pending:
    """Start sending a contiguous `tensor` to the rank at position `to`; it must not change until `wait` returns.

    Args:
        tensor: With `between_hosts`, on the group's `host_device`.
        group: The group.
        to: Position of the receiver.
        tag: Of the message; NCCL has none, and carries messages of a group in the order in which they are issued.
        between_hosts: Let the message pass by those that travel from device to device.
    """
    peer = group.ranks[to]
    sent = _on_wire(tensor, group)
    return _pending("send", group, tensor, tensor, peer, tag).launch(
        lambda: dist.isend(sent, peer, group=group.process_group, tag=tag), between_hosts
    )


def irecv(tensor: Tensor, group: Group, source: int, tag: int = 0, between_hosts: bool = False) -> Pending:
    """Start receiving into a contiguous `tensor` from the rank at position `source`; see `isend`."""
    peer = group.ranks[source]
    received = _on_wire(tensor, group)
    result = tensor if received is tensor else lambda: tensor.copy_(received)
    return _pending("recv", group, tensor, result, peer, tag).launch(
        lambda: dist.irecv(received, peer, group=group.process_group, tag=tag), between_hosts
    )


def exchange(
    sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]], group: Group, tag: int = 0
) -> Pending:
    """Start several messages as one operation, so that none of them waits for another.

    Args:
        sent: Contiguous tensors, which must not change until `wait` returns, and the positions of their receivers.
        received: Contiguous tensors to receive into, and the positions of their senders.
        group: The group.
        tag: Of all of them.
    """
    ways = [(dist.isend, tensor, peer) for tensor, peer in sent] + [
        (dist.irecv, tensor, peer) for tensor, peer in received
    ]
    held = [_on_wire(tensor, group) for _, tensor, _ in ways]
    operations = [
        dist.P2POp(way, on_wire, group.ranks[peer], group=group.process_group, tag=tag)
        for (way, _, peer), on_wire in zip(ways, held)
    ]

    def result() -> None:
        for (way, tensor, _), on_wire in zip(ways, held):
            if way is dist.irecv and on_wire is not tensor:
                tensor.copy_(on_wire)

    op, peer = "exchange", None
    if len({peer for _, _, peer in ways}) == 1 and not (sent and received):
        op, peer = "send" if sent else "recv", group.ranks[ways[0][2]]  # several tensors, but one message
    num_bytes = _size_bytes(*(tensor for _, tensor, _ in ways))
    return Pending(op, group, num_bytes, ways[0][1].dtype, result, peer, tag, _on_device(ways[0][1], group)).launch(
        lambda: _Works(dist.batch_isend_irecv(operations))
    )


def _on_wire(tensor: Tensor, group: Group) -> Tensor:
    """Return what takes the place of a tensor in messages: gloo sends and receives nothing on a GPU."""
    is_staged = tensor.device.type != "cpu" and group.backend == "gloo"
    return torch.empty_like(tensor, device="cpu").copy_(tensor) if is_staged else tensor


class _Works:
    """Several handles of torch as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _pending(
    op: str, group: Group, tensor: Tensor, result: Any, peer: int | None = None, tag: int | None = None
) -> Pending:
    """Make the call that moves `tensor`."""
    on_device = _on_device(tensor, group)
    return Pending(op, group, _size_bytes(tensor), tensor.dtype, result, peer, tag, on_device)


def _on_device(tensor: Tensor, group: Group) -> bool:
    """Tell whether a device carries the tensor: gloo stages it through the host, or takes it from there."""
    return tensor.device.type != "cpu" and "nccl" in group.backend


def _has_handles(tensor: Tensor) -> bool:
    """Tell whether to start also what is waited for at once with a handle: on the host, where waits are recorded.

    On a GPU a collective without one takes its place in the stream that computes, with no events in between.
    """
    return tensor.device.type == "cpu"


def _size_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _padded(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[0]
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


# ----------------------------------------------------------------------------------------- messages between CPU ranks

DIRECT_MIN_BYTES = 1 << 18  # below, gloo's latency is the lower one
_GATHER_TAG = (1 << 20) + 1  # as below, and not that of another collective that may be under way


class DirectAllGather:
    """An all-gather of two gloo ranks: each sends its part to the other, half the time of gloo's ring with its copies.

    `whole` (ranks, ...) holds the parts after `wait`.
    """

    @staticmethod
    def suits(part: Tensor, group: Group) -> bool:
        """Whether it is the faster way; the same answer on both ranks."""
        is_large = part.numel() * part.element_size() >= DIRECT_MIN_BYTES
        return is_large and group.size == 2 and part.device.type == "cpu" and not group.is_ordered

    def __init__(self, whole: Tensor, part: Tensor, group: Group) -> None:
        others = [(place, rank) for place, rank in enumerate(group.ranks) if place != group.rank]
        self._works = [dist.irecv(whole[i], rank, group=group.process_group, tag=_GATHER_TAG) for i, rank in others]
        self._works += [dist.isend(part, rank, group=group.process_group, tag=_GATHER_TAG) for _, rank in others]
        if whole[group.rank].data_ptr() != part.data_ptr():
            whole[group.rank].copy_(part.detach())  # as gloo's, which autograd does not see

    def wait(self) -> None:
        """Wait for all parts, and until this rank's may change."""
        for work in self._works:
            if work is not None:  # torch's type; only a rank outside the group gets None
                work.wait()


PAIRWISE_MAX_BYTES = 1 << 21  # above, the addition in the calling thread costs more than the steps of gloo's ring
_PAIRWISE_TAG = 1 << 20  # outside the range of the tags of messages between stages
_SCATTER_TAG = (1 << 20) + 2
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


class PairwiseReduceScatter:
    """A reduce-scatter between two processes on CPU: each sends what the other keeps, and adds what it keeps itself.

    `mine` holds this rank's part of the sum after `wait`.
    """

    def __init__(self, mine: Tensor, rows: Tensor, group: Group) -> None:
        peer = group.ranks[1 - group.rank]
        parts = rows.detach().view(2, *mine.shape)
        self._mine, self._kept = mine, parts[group.rank]
        self._works = (
            dist.irecv(mine, peer, group=group.process_group, tag=_SCATTER_TAG),
            dist.isend(parts[1 - group.rank], peer, group=group.process_group, tag=_SCATTER_TAG),
        )

    @staticmethod
    def suits(mine: Tensor, group: Group) -> bool:
        """Tell whether to use this instead of the backend's reduce-scatter; the same answer on both ranks."""
        return group.size == 2 and mine.device.type == "cpu" and not group.is_ordered

    def wait(self) -> None:
        """Wait for both directions, then add."""
        for work in self._works:
            if work is not None:  # torch's type; only a rank outside the group gets None
                work.wait()
        self._mine.add_(self._kept)
