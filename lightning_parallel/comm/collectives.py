"""The collectives, on tensors and on Python objects, and the checks that ranks make together: all go on, or all raise.

A group of one rank communicates nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.work import Done, Pending, blocking_call

__all__ = [
    "agree",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast_",
    "broadcast_from",
    "broadcast_object",
    "equal_everywhere",
    "exchange",
    "irecv",
    "isend",
    "on_any_rank",
    "raise_together",
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
    pending = Pending("all_reduce", group, _size_bytes(tensor), tensor.dtype, tensor).launch(
        lambda: (
            PairwiseAllReduce(tensor, group, op)
            if PairwiseAllReduce.suits(tensor, group)
            else dist.all_reduce(tensor, _REDUCE_OPS[op], group=group.process_group, async_op=True)
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
    return Pending("send", group, _size_bytes(tensor), tensor.dtype, tensor, peer, tag).launch(
        lambda: dist.isend(sent, peer, group=group.process_group, tag=tag), between_hosts
    )


def irecv(tensor: Tensor, group: Group, source: int, tag: int = 0, between_hosts: bool = False) -> Pending:
    """Start receiving into a contiguous `tensor` from the rank at position `source`; see `isend`."""
    peer = group.ranks[source]
    received = _on_wire(tensor, group)
    result = tensor if received is tensor else lambda: tensor.copy_(received)
    return Pending("recv", group, _size_bytes(tensor), tensor.dtype, result, peer, tag).launch(
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
    return Pending(op, group, num_bytes, ways[0][1].dtype, result, peer, tag).launch(
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

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


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


T = TypeVar("T")

# ---------------------------------------------------------------------------------------------------------- objects


def all_gather_object(value: T, group: Group) -> list[T]:
    """Gather the picklable `value` of every rank, by position."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    with blocking_call("all_gather_object", group):
        dist.all_gather_object(values, value, group=group.process_group)
    return values


def broadcast_object(value: T, group: Group, source: int = 0) -> T:
    """Return the picklable `value` of the rank at position `source`."""
    if group.size == 1:
        return value
    values: list[Any] = [value]
    with blocking_call("broadcast_object", group):
        dist.broadcast_object_list(values, group.ranks[source], group=group.process_group)
    return values[0]


def broadcast_from(make: Callable[[], T], group: Group, source: int = 0) -> T:
    """Call `make` on the rank at position `source` only, and return its result on every rank.

    Raises:
        Exception: On every rank, if `make` raises, or returns what cannot be pickled.
    """
    value: T | None = None
    data = b""
    failure: Exception | None = None
    if group.rank == source:
        try:
            value = make()
            # Pickled here rather than by the broadcast: an error there would leave the other ranks waiting.
            data = b"" if group.size == 1 else pickle.dumps(value)
        except Exception as error:
            failure = error
    description = "" if failure is None else f"{type(failure).__name__}: {failure}"
    data, description = broadcast_object((data, description), group, source)
    if failure is not None:
        raise failure
    if description:
        raise RuntimeError(f"rank {group.ranks[source]} failed with {description}")
    return cast(T, value) if group.rank == source else pickle.loads(data)


def barrier(group: Group) -> None:
    """Wait until every rank of `group` has arrived."""
    if group.size > 1:
        with blocking_call("barrier", group):
            dist.barrier(group=group.process_group)


# ----------------------------------------------------------------------------------------------------------- checks


def raise_together(error: Exception | None, group: Group) -> None:
    """Raise on every rank of `group` if any rank brings an `error`, so that no rank is left waiting.

    A rank that brings an error raises that one; the others raise one of the same type that names the failed ranks.
    """
    try:
        found = all_gather_object(None if error is None else (type(error).__name__, str(error)), group)
    except RuntimeError as failure:
        if error is None:
            raise
        # A rank that has heard of the error already is gone: that it is must not hide the error itself.
        raise error from failure
    if error is not None:
        raise error
    failed = {rank: failure for rank, failure in zip(group.ranks, found) if failure is not None}
    if failed:
        name, message = next(iter(failed.values()))
        # Only types that are made from a message alone; others may need arguments that are not known here.
        kind = {"ValueError": ValueError, "TypeError": TypeError}.get(name, RuntimeError)
        raise kind(f"{message}\n(found on rank {', '.join(map(str, failed))})")


def equal_everywhere(number: int, group: Group) -> bool:
    """Tell whether all ranks of `group` hold the same 63-bit `number`."""
    # One small all-reduce, where `agree` takes several: the maximum of x and of -x gives the largest and the smallest.
    both = torch.tensor([number, -number], device=group.host_device)
    largest, smallest = all_reduce_(both, group, "max", between_hosts=True).tolist()
    return largest == -smallest


def on_any_rank(flags: Sequence[bool], group: Group) -> list[bool]:
    """Tell for each of `flags`, as many on all ranks, whether it is set on some rank of `group`.

    The host waits for the other hosts, and for a device only in a group that knows devices only.
    """
    shared = torch.tensor(flags, dtype=torch.uint8)
    if group.size > 1 and group.host_device != "cpu":
        # From memory that does not move, so that the host need not wait for the copy as well.
        shared = shared.pin_memory().to(group.host_device, non_blocking=True)
    return [bool(flag) for flag in all_reduce_(shared, group, "max", between_hosts=True).tolist()]


def agree(what: str, value: Any, group: Group) -> None:
    """Check that all ranks of `group` hold an equal `value`, described by `what`.

    Raises:
        ValueError: On every rank, with the values of all ranks; of dicts, with the entries that differ.
    """
    values = all_gather_object(value, group)
    if any(other != values[0] for other in values):
        listed = "\n".join(f"  rank {rank}: {other}" for rank, other in zip(group.ranks, _differing(values)))
        raise ValueError(f"{what} must be the same on all ranks of the {group.axis} group, found\n{listed}")


def _differing(values: list[Any]) -> list[Any]:
    """Reduce dicts to the entries in which they differ; leave other values as they are."""
    if not all(isinstance(value, dict) for value in values):
        return values
    keys = dict.fromkeys(key for value in values for key in value)
    different = [key for key in keys if any(value.get(key) != values[0].get(key) for value in values)]
    return [{key: value.get(key) for key in different} for value in values]
