"""The collectives on tensors, and messages between two ranks.

A group of one rank communicates nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.comm.groups import Group, group_labelled
from lightning_parallel.comm.kept import kept
from lightning_parallel.comm.work import Done, Pending
from lightning_parallel.compat.dispatcher import unseen
from lightning_parallel.compat.torch import all_gather_single, is_traced, reduce_scatter_single

__all__ = [
    "Spans",
    "all_gather",
    "all_gather_",
    "all_gather_in_turns",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "broadcast_",
    "exchange",
    "irecv",
    "isend",
    "reduce_",
    "reduce_scatter",
    "reduce_scatter_in_turns",
]


class Spans(NamedTuple):
    """Ranges of positions, which travel one by one.

    Attributes:
        dim: The dimension of the positions.
        of_ranks: For each rank, the ranges [start, stop) of its positions, without gaps; as many for each rank.
    """

    dim: int
    of_ranks: Sequence[Sequence[tuple[int, int]]]


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
    if type(tensor) is not Tensor and is_traced(tensor):
        return _traced(torch.ops.lightning_parallel.all_reduce(tensor, group.label, op), async_op)

    def start(has_handle: bool) -> Any:
        if swaps_all_reduce(tensor, group):
            return _swapped_all_reduce(tensor, group, op)
        return dist.all_reduce(tensor, _REDUCE_OPS[op], group=group.process_group, async_op=has_handle)

    return _issue("all_reduce", group, tensor, tensor, start, async_op, between_hosts)


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce `tensor` over `group` into a new tensor; in a group of one, return `tensor` itself."""
    if group.size == 1:
        return tensor
    if type(tensor) is not Tensor and is_traced(tensor):
        return all_reduce_(tensor, group, op)
    # `clone` alone would keep the strides, and collectives need contiguous memory.
    return all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group, op)


def broadcast_(tensor: Tensor, group: Group, source: int = 0, async_op: bool = False) -> Any:
    """Overwrite the contiguous `tensor` with the tensor of the rank at position `source`.

    Returns:
        `tensor`; with `async_op`, a `Pending` that gives it.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor

    def start(has_handle: bool) -> Any:
        # torch expects the global rank of the source, not its position in the group.
        return dist.broadcast(tensor, group.ranks[source], group=group.process_group, async_op=has_handle)

    return _issue("broadcast", group, tensor, tensor, start, async_op)


def reduce_(tensor: Tensor, group: Group, to: int, async_op: bool = False) -> Any:
    """Sum a contiguous `tensor` over `group` into the tensor of the rank at position `to`.

    Afterwards the tensors of all other ranks have arbitrary values.

    Returns:
        `tensor`; with `async_op`, a `Pending` that gives it.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor

    def start(has_handle: bool) -> Any:
        return dist.reduce(tensor, group.ranks[to], group=group.process_group, async_op=has_handle)

    return _issue("reduce", group, tensor, tensor, start, async_op)


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
        The full tensor; with `async_op`, a `Pending` that gives it.
    """
    if group.size == 1:
        return Done(tensor) if async_op else tensor
    sizes = [tensor.shape[dim]] * group.size if sizes is None else sizes
    if type(tensor) is not Tensor and is_traced(tensor):
        return _traced(torch.ops.lightning_parallel.all_gather(tensor, group.label, dim, sizes), async_op)
    # `dist.all_gather` expects equal shapes, so smaller parts travel with padding, which `result` cuts off.
    part = _padded(tensor.movedim(dim, 0), max(sizes)).contiguous()
    whole = part.new_empty((group.size, *part.shape))

    def result() -> Tensor:
        if min(sizes) == max(sizes):
            gathered = whole.flatten(0, 1).movedim(0, dim)
        else:
            gathered = torch.cat([padded[:size] for padded, size in zip(whole, sizes)]).movedim(0, dim)
        # One copy here: otherwise each of the query, key and value layers would copy it, in forward and in backward.
        return gathered.contiguous()

    return _issue("all_gather", group, whole, result, partial(_start_all_gather, whole, part, group), async_op)


def all_gather_(whole: Tensor, group: Group, async_op: bool = False) -> Any:
    """Fill the rows of the contiguous `whole` (ranks, ...) in place; the caller gives the row of this rank.

    Returns:
        `whole`; with `async_op`, a `Pending` that gives it.
    """
    if group.size == 1:
        return Done(whole) if async_op else whole
    start = partial(_start_all_gather, whole, whole[group.rank], group)
    return _issue("all_gather", group, whole, whole, start, async_op)


def _start_all_gather(whole: Tensor, part: Tensor, group: Group, has_handle: bool) -> Any:
    # `all_gather` pads `part` to one size on all ranks, so both ranks take the same way.
    is_large = part.numel() * part.element_size() >= DIRECT_MIN_BYTES
    if is_large and group.size <= DIRECT_MAX_RANKS and part.device.type == "cpu":
        return _gather_by_all_to_all(whole, part.detach(), group)
    if part.device.type == "cpu":
        # gloo writes all rows, this rank's row too, so it must not read from one.
        is_row = whole[group.rank].data_ptr() == part.data_ptr()
        source = part.clone() if is_row else part
        return dist.all_gather(list(whole.unbind()), source, group=group.process_group, async_op=True)
    return all_gather_single(whole.view(-1), part.view(-1), group=group.process_group, async_op=has_handle)


def _gather_by_all_to_all(whole: Tensor, part: Tensor, group: Group) -> Any:
    """Start to send `part` to every rank at once: gloo's all-gather takes a step for each rank, and two copies."""
    # Not by `isend`, with which gloo sends in the calling thread. Its own thread meanwhile spins for the lock of the
    # connection, and on a busy machine keeps the processor from the sender.
    into, rows = whole, part
    split: list[int] | None = None
    if group.size == 2:
        if whole[group.rank].data_ptr() != part.data_ptr():
            whole[group.rank].copy_(part)
        into = whole[1 - group.rank]
        split = [0 if place == group.rank else part.numel() * part.element_size() for place in range(2)]
    else:
        rows = part.expand(group.size, *part.shape).contiguous()
    # As bytes, because gloo knows few dtypes. Unseen, as `launch` records it.
    into, rows = (tensor.detach().view(-1).view(torch.uint8) for tensor in (into, rows))
    with unseen():
        return dist.all_to_all_single(into, rows, split, split, group=group.process_group, async_op=True)


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
    if type(tensor) is not Tensor and is_traced(tensor):
        return _traced(torch.ops.lightning_parallel.reduce_scatter(tensor, group.label, dim, sizes), async_op)
    rows = tensor.movedim(dim, 0)
    if min(sizes) < max(sizes):
        # Backends expect equal parts, so smaller parts travel with padding, which `result` cuts off.
        rows = torch.cat([_padded(part, max(sizes)) for part in rows.split(list(sizes))])
    rows = rows.contiguous()
    mine = rows.new_empty((max(sizes), *rows.shape[1:]))

    def result() -> Tensor:
        return mine[: sizes[group.rank]].movedim(0, dim)

    return _issue("reduce_scatter", group, rows, result, partial(_start_reduce_scatter, mine, rows, group), async_op)


def _start_reduce_scatter(mine: Tensor, rows: Tensor, group: Group, has_handle: bool) -> Any:
    if group.size == 2 and mine.device.type == "cpu" and not group.is_ordered:
        # Detached, so that autograd does not record the addition below.
        parts = rows.detach().view(2, *mine.shape)
        kept = parts[group.rank]
        return _Swap(parts[1 - group.rank], mine, group, _SCATTER_TAG, lambda: mine.add_(kept))
    # Tried: whether gloo has the operation depends on the version of torch, which offers no query for it. The error
    # comes before any message and on all ranks, so the fallback meets the same fallback.
    try:
        if mine.device.type != "cpu":
            return reduce_scatter_single(mine.view(-1), rows.view(-1), group=group.process_group, async_op=has_handle)
        # gloo takes twice as long for megabytes in one tensor. NCCL would copy every tensor of a list.
        listed = list(rows.view(group.size, *mine.shape).unbind())
        return dist.reduce_scatter(mine, listed, group=group.process_group, async_op=True)
    except RuntimeError as error:
        if "does not support reduce_scatter" not in str(error):
            raise
    return _AllReduceAndSlice(mine, rows, group)


class _AllReduceAndSlice:
    """A reduce-scatter for backends that have none: gloo in older versions of torch."""

    def __init__(self, mine: Tensor, rows: Tensor, group: Group) -> None:
        whole = rows.clone()  # `rows` may share memory with the caller's tensor
        self._mine = mine
        self._part = whole.view(group.size, *mine.shape)[group.rank]
        self._work = dist.all_reduce(whole, group=group.process_group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        # Not earlier: before the wait the buffer holds partial sums.
        self._mine.copy_(self._part)


# The two below move the bytes of `all_gather` and `reduce_scatter`. Each message leaves as early as it can, and the
# caller computes meanwhile. All ranks issue the same turns in the same order, as NCCL needs it:
#
#     turn (k, j)    send span j to the rank k places on, receive span j from the rank k places back

_AHEAD = 2
"""Messages of a gather in flight: with one, the link is idle while the ranks tell each other that they are ready."""


def all_gather_in_turns(part: Tensor, whole: Tensor, group: Group, spans: Spans) -> Iterator[tuple[int, int, Tensor]]:
    """Fill `whole` with the parts of all ranks, and yield each span that is there: start, stop, values.

    This rank's part comes first. The next messages are in flight while the caller works on a span.

    Args:
        part: This rank's part; it must not change until the end.
        whole: Contiguous memory for the full tensor.
        group: A group of at least two ranks.
        spans: See `Spans`.
    """
    dim, of_ranks = spans
    mine = of_ranks[group.rank]
    first = mine[0][0]
    whole.narrow(dim, first, part.shape[dim]).copy_(part)

    def launched() -> Iterator[tuple[Pending, int, int, Tensor]]:
        for turn in range(1, group.size):
            to, source = (group.rank + turn) % group.size, (group.rank - turn) % group.size
            for (start, stop), (begin, end) in zip(mine, of_ranks[source]):
                sent = part.narrow(dim, start - first, stop - start).contiguous()
                place = whole.narrow(dim, begin, end - begin)
                received = place if place.is_contiguous() else part.new_empty(place.shape)
                yield exchange([(sent, to)], [(received, source)], group, _GATHER_TURN_TAG), begin, end, received

    messages = launched()
    in_flight = deque(islice(messages, _AHEAD))
    yield first, mine[-1][1], part
    while in_flight:
        pending, begin, end, received = in_flight.popleft()
        pending.wait()
        in_flight.extend(islice(messages, 1))
        place = whole.narrow(dim, begin, end - begin)
        if place.data_ptr() != received.data_ptr():
            place.copy_(received)
        yield begin, end, received


def reduce_scatter_in_turns(compute: Callable[[int, int], Tensor], group: Group, spans: Spans) -> Pending:
    """Sum tensors over the ranks, and return this rank's part.

    Each span of the other ranks is on its way as soon as it is computed. This rank's part comes last.

    Args:
        compute: Computes the positions [start, stop) in new, contiguous memory.
        group: A group of at least two ranks.
        spans: See `Spans`.
    """
    dim, of_ranks = spans
    mine = of_ranks[group.rank]
    first = mine[0][0]
    coming = []
    for turn in range(1, group.size):
        to, source = (group.rank + turn) % group.size, (group.rank - turn) % group.size
        for (begin, end), (start, stop) in zip(of_ranks[to], mine):
            sent = compute(begin, end)
            received = sent.new_empty(_resized(sent, dim, stop - start))
            # Nothing waits here: on a GPU, the next product would wait too.
            pending = exchange([(sent, to)], [(received, source)], group, _SCATTER_TURN_TAG)
            coming.append((pending, received, start - first))
    return _Summed(compute(first, mine[-1][1]), dim, coming)


class _Summed(Done):
    """The sum of this rank's part and of the parts that arrive."""

    __slots__ = ("_coming", "_dim")

    def __init__(self, own: Tensor, dim: int, coming: list[tuple[Pending, Tensor, int]]) -> None:
        super().__init__(own)
        self._dim = dim
        self._coming = coming

    def wait(self) -> Any:
        coming, self._coming = self._coming, []
        for pending, received, start in coming:
            pending.wait()
            self._result.narrow(self._dim, start, received.shape[self._dim]).add_(received)
        return self._result


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

    def start(has_handle: bool) -> Any:
        # torch takes the rows to receive before the rows to send.
        return dist.all_to_all_single(received, tensor, receive, send, group=group.process_group, async_op=has_handle)

    return _issue("all_to_all", group, tensor, received, start, async_op)


def isend(tensor: Tensor, group: Group, to: int, tag: int = 0, between_hosts: bool = False) -> Pending:
    """Start sending a contiguous `tensor` to the rank at position `to`; it must not change until `wait` returns.

    Args:
        tensor: The message; with `between_hosts`, on the group's `host_device`.
        group: The group.
        to: Position of the receiver.
        tag: Tag of the message. NCCL has no tags, and carries the messages of a group in the order of the calls.
        between_hosts: The message travels between hosts, and may overtake messages that travel between devices.
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
    # Copied to the GPU by `wait`: before it, the bytes have not arrived.
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
        tag: Tag of all messages.
    """
    ways = [(dist.isend, tensor, peer) for tensor, peer in sent] + [
        (dist.irecv, tensor, peer) for tensor, peer in received
    ]
    # `result` keeps these copies alive: torch drops its references when the messages are over.
    held = [_on_wire(tensor, group) for _, tensor, _ in ways]

    def start() -> _Works:
        operations = [
            dist.P2POp(way, on_wire, group.ranks[peer], group=group.process_group, tag=tag)
            for (way, _, peer), on_wire in zip(ways, held)
        ]
        return _Works(dist.batch_isend_irecv(operations))

    def result() -> None:
        for (way, tensor, _), on_wire in zip(ways, held):
            if way is dist.irecv and on_wire is not tensor:
                tensor.copy_(on_wire)

    op, peer = "exchange", None
    if len({peer for _, _, peer in ways}) == 1 and not (sent and received):
        op, peer = "send" if sent else "recv", group.ranks[ways[0][2]]  # several tensors, but one message
    num_bytes = _size_bytes(*(tensor for _, tensor, _ in ways))
    return Pending(op, group, num_bytes, ways[0][1].dtype, result, peer, tag, _on_device(ways[0][1], group)).launch(
        start
    )


def _on_wire(tensor: Tensor, group: Group) -> Tensor:
    """Return `tensor`, or its copy on the CPU if it is on a GPU and gloo, which cannot reach GPUs, carries it."""
    is_staged = tensor.device.type != "cpu" and group.backend == "gloo"
    return torch.empty_like(tensor, device="cpu").copy_(tensor) if is_staged else tensor


class _Works:
    """Several handles of torch as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _issue(
    op: str,
    group: Group,
    moved: Tensor,
    result: Any,
    start: Callable[[bool], Any],
    async_op: bool,
    between_hosts: bool = False,
) -> Any:
    """Start a collective, and wait for it unless `async_op`.

    Args:
        op: Its name.
        group: The group.
        moved: The tensor that counts as moved.
        result: See `Pending`.
        start: Starts it, given whether torch must return a handle.
        async_op: Return a `Pending` instead of the result.
        between_hosts: See `isend`.
    """
    # On the host a handle is needed also without `async_op`, because the host records waits. On a GPU, a collective
    # without a handle runs on the stream that computes, without events in between.
    is_on_host = moved.device.type == "cpu"
    on_device = not is_on_host and "nccl" in group.backend
    # Each sharded layer of a step comes here, so the way makes few calls.
    pending = Pending(op, group, moved.numel() * moved.element_size(), moved.dtype, result, on_device=on_device)
    pending.launch(partial(start, async_op or is_on_host), between_hosts)
    return pending if async_op else pending.wait()


def _pending(
    op: str, group: Group, tensor: Tensor, result: Any, peer: int | None = None, tag: int | None = None
) -> Pending:
    """Make the call that moves `tensor`."""
    on_device = _on_device(tensor, group)
    return Pending(op, group, _size_bytes(tensor), tensor.dtype, result, peer, tag, on_device)


def _on_device(tensor: Tensor, group: Group) -> bool:
    """Tell whether a device carries the tensor: gloo stages it through the host, or takes it from there."""
    return tensor.device.type != "cpu" and "nccl" in group.backend


def _size_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _padded(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[0]
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


# --------------------------------------------------------------------------------------------------- in compiled code
#
# The compiler runs layers once with tensors without data. It sees an operator for each collective, and inside the
# operator neither the gate nor the recorder. The operators change no argument, so the compiler may move them; their
# results and arguments order them alike on all ranks.

_LIBRARY = torch.library.Library("lightning_parallel", "FRAGMENT")


def _define(name: str, arguments: str, compute: Callable[..., Tensor], shape: Callable[..., Sequence[int]]) -> None:
    """Define an operator by its code, and by its shape for tensors without data."""
    if hasattr(torch.ops.lightning_parallel, name):
        return  # by an earlier import of this module
    _LIBRARY.define(f"{name}(Tensor x, str group, {arguments}) -> Tensor")
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"lightning_parallel::{name}", lambda x, *rest: x.new_empty(shape(x, *rest)), lib=_LIBRARY
    )


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    sizes = list(x.shape)
    sizes[dim] = size
    return sizes


_define(
    "all_reduce",
    "str op",
    lambda x, label, op: kept(lambda: all_reduce(x, group_labelled(label), op)),
    lambda x, label, op: x.shape,
)
_define(
    "all_gather",
    "int dim, SymInt[] sizes",
    lambda x, label, dim, sizes: kept(lambda: all_gather(x, group_labelled(label), dim, sizes)),
    lambda x, label, dim, sizes: _resized(x, dim, sum(sizes)),
)
_define(
    "reduce_scatter",
    "int dim, SymInt[] sizes",
    lambda x, label, dim, sizes: kept(lambda: reduce_scatter(x, group_labelled(label), dim, sizes).contiguous()),
    lambda x, label, dim, sizes: _resized(x, dim, sizes[group_labelled(label).rank]),
)


def _traced(result: Tensor, async_op: bool) -> Any:
    return Done(result) if async_op else result


# ----------------------------------------------------------------------------------------- messages between CPU ranks

DIRECT_MIN_BYTES = 1 << 16
"""Bytes from which few ranks gather by an all-to-all; below, an all-gather has the lower latency."""
DIRECT_MAX_RANKS = 4
"""Ranks up to which an all-to-all gathers.

Of more ranks, several may be on one host: a ring sends each part between two hosts once, and an all-to-all many times.
"""
PAIRWISE_MAX_BYTES = 1 << 21
"""Bytes up to which two ranks reduce by messages.

Above, the addition in the calling thread costs more than the steps of gloo's ring.
"""
# Outside the range of tags between stages. One tag per kind: collectives of several kinds may be in flight at once.
_REDUCE_TAG, _SCATTER_TAG = 1 << 20, (1 << 20) + 1
_GATHER_TURN_TAG, _SCATTER_TURN_TAG = ((1 << 20) + number for number in (3, 4))
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class _Swap:
    """A collective between two processes on CPUs: each sends the other a tensor.

    It moves as many bytes as gloo's ring. The ring takes several steps, each of which wakes a thread. The swap takes
    one step, and about half the time.

    Args:
        sent: The tensor for the other rank.
        received: The memory for the other rank's tensor.
        group: The group of both ranks.
        tag: Tag of both messages.
        finish: Makes the result after both messages.
    """

    def __init__(
        self, sent: Tensor, received: Tensor, group: Group, tag: int, finish: Callable[[], Any] | None = None
    ) -> None:
        peer = group.ranks[1 - group.rank]

        # Neither call waits for the other rank, so two ranks cannot block each other. Unseen, as `launch` records both.
        with unseen():
            self._works = (
                dist.irecv(received, peer, group=group.process_group, tag=tag),
                dist.isend(sent, peer, group=group.process_group, tag=tag),
            )
        self._finish = finish

    def wait(self) -> None:
        """Wait until `received` is filled and `sent` may change, then make the result."""
        for work in self._works:
            if work is not None:  # torch's type; only a rank outside the group gets None
                work.wait()
        if self._finish is not None:
            self._finish()


def swaps_all_reduce(tensor: Tensor, group: Group) -> bool:
    """Tell whether an all-reduce is faster by messages than by the backend; the same answer on both ranks."""
    # Sparse tensors go to the backend, because a message carries dense memory only.
    is_small = tensor.numel() * tensor.element_size() <= PAIRWISE_MAX_BYTES
    return group.size == 2 and tensor.device.type == "cpu" and tensor.layout == torch.strided and is_small


def _swapped_all_reduce(tensor: Tensor, group: Group, op: str) -> _Swap:
    other = torch.empty_like(tensor)
    # Both ranks get the same bits: floating-point addition is commutative, though not associative.
    return _Swap(tensor, other, group, _REDUCE_TAG, lambda: _COMBINE[op](tensor, other, out=tensor))
