"""Process groups of a mesh and every collective the library calls.

All communication passes through this file: each call names its group, can be recorded, and turns the loss of a peer
into an error that names the lost ranks. A group of one rank communicates nothing and needs no process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel import liveness
from lightning_parallel.mesh import AXES, PIPELINE, TENSOR, Axis, Mesh

__all__ = [
    "CommRecord",
    "Group",
    "MeshGroups",
    "Pending",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast_",
    "broadcast_object",
    "irecv",
    "isend",
    "observe",
    "record",
    "reduce_scatter",
]

T = TypeVar("T")


@dataclass(frozen=True)
class CommRecord:
    """One finished communication call of this rank.

    Attributes:
        op: Name of the operation in torch's terms (`all_reduce`, `send`, ...).
        axis: Mesh axis of the group, or its description.
        bytes: Payload: the full tensor for all_reduce and broadcast, the gathered total for all_gather and
            reduce_scatter, what this rank sends for all_to_all, the message for send and recv.
        seconds: From the call to its observed completion.
        blocked_s: The part of `seconds` that the calling thread spent waiting.
        start_ns: `time.perf_counter_ns()` at the call.
        dtype: Element type of the payload.
        group_size: Ranks in the group.
    """

    op: str
    axis: str
    bytes: int
    seconds: float
    blocked_s: float
    start_ns: int
    dtype: torch.dtype
    group_size: int


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate with each other along `axis`.

    Attributes:
        axis: Name of the mesh axis, or a description of the group.
        ranks: Global ranks, in the order of their position in the group.
        rank: Position of this process in `ranks`.
        process_group: The torch group; None for a group of one.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @classmethod
    def alone(cls, axis: str, rank: int = 0) -> Group:
        """A group that holds this process only."""
        return cls(axis, (rank,), 0, None)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None = None, axis: str = "world") -> Group:
        """Wrap a torch process group; None means all ranks (this process alone, when torch is not distributed)."""
        if not dist.is_available() or not dist.is_initialized():
            return cls.alone(axis)
        process_group = process_group if process_group is not None else dist.group.WORLD
        assert process_group is not None
        ranks = tuple(dist.get_process_group_ranks(process_group))
        if dist.get_rank() not in ranks:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the given process group of ranks {ranks}")
        return cls(axis, ranks, ranks.index(dist.get_rank()), process_group if len(ranks) > 1 else None)


class MeshGroups:
    """This rank's groups in `mesh`: one per axis, `model` (pipeline x tensor: one replica) and `world`.

    Every rank must construct it at the same point, with the same arguments.

    Args:
        mesh: The mesh; its size must be that of the default process group.
        timeout: Deadline of each collective.
        backend: Backend of the groups; None for that of the default group.

    Raises:
        ValueError: If the mesh and the default process group differ in size.
    """

    def __init__(self, mesh: Mesh, timeout: timedelta | None = None, backend: str | None = None) -> None:
        self.world = Group.of()
        if mesh.world_size != self.world.size:
            raise ValueError(f"{mesh} has {mesh.world_size} ranks, but {self.world.size} processes are running")
        self.mesh = mesh
        self.coordinate = mesh.coordinate(self.world.ranks[self.world.rank])
        made = {axis: self._create((axis,), axis, timeout, backend) for axis in AXES}
        self.data_parallel, self.pipeline_parallel, self.tensor_parallel = (made[axis] for axis in AXES)
        if self.pipeline_parallel.size > 1 and self.tensor_parallel.size > 1:
            self.model = self._create((PIPELINE, TENSOR), "model", timeout, backend)
        else:
            self.model = self.pipeline_parallel if self.pipeline_parallel.size > 1 else self.tensor_parallel

    def _create(self, axes: Sequence[Axis], name: str, timeout: timedelta | None, backend: str | None) -> Group:
        me = self.world.ranks[self.world.rank]
        if self.mesh.size(*axes) == 1:
            return Group.alone(name, me)
        peers = self.mesh.peers(*axes)
        group, _ = dist.new_subgroups_by_enumeration(peers, timeout=timeout, backend=backend)
        ranks = next(ranks for ranks in peers if me in ranks)
        return Group(name, tuple(ranks), ranks.index(me), group)

    def __getitem__(self, axis: Axis) -> Group:
        return getattr(self, axis)


# ---------------------------------------------------------------------------------------------------- observing

_observers: tuple[Callable[[CommRecord], None], ...] = ()


@contextmanager
def observe(observer: Callable[[CommRecord], None]) -> Iterator[None]:
    """Call `observer` with the record of every communication that completes inside the block."""
    global _observers
    _observers = (*_observers, observer)
    try:
        yield
    finally:
        _observers = tuple(other for other in _observers if other is not observer)


@contextmanager
def record() -> Iterator[list[CommRecord]]:
    """Collect the records of all communication that completes inside the block."""
    records: list[CommRecord] = []
    with observe(records.append):
        yield records


class Pending:
    """A collective in flight. `wait()` returns its result; calling it again returns the same result."""

    __slots__ = ("_blocked_ns", "_bytes", "_dtype", "_group", "_op", "_result", "_start_ns", "_work")

    def __init__(self, op: str, group: Group, num_bytes: int, dtype: torch.dtype, result: Any) -> None:
        self._op, self._group, self._bytes, self._dtype, self._result = op, group, num_bytes, dtype, result
        self._work: Any = None
        self._start_ns = time.perf_counter_ns()
        self._blocked_ns = 0

    def launch(self, call: Callable[[], Any]) -> Pending:
        try:
            self._work = call()
        except RuntimeError as error:
            _explain(error, self._op, self._group)
        self._blocked_ns = time.perf_counter_ns() - self._start_ns
        return self

    def wait(self) -> Any:
        work, self._work = self._work, None
        if work is not None:
            before = time.perf_counter_ns()
            try:
                work.wait()
            except RuntimeError as error:
                _explain(error, self._op, self._group)
            if _observers:
                self._report(time.perf_counter_ns(), before)
        return self._result() if callable(self._result) else self._result

    def _report(self, end_ns: int, wait_ns: int) -> None:
        blocked_s = (self._blocked_ns + end_ns - wait_ns) / 1e9
        seconds = (end_ns - self._start_ns) / 1e9
        group = self._group
        finished = CommRecord(
            self._op, group.axis, self._bytes, seconds, blocked_s, self._start_ns, self._dtype, group.size
        )
        for observer in _observers:
            observer(finished)


class _Done(Pending):
    """The result of a collective in a group of one."""

    __slots__ = ()

    def __init__(self, result: Any) -> None:
        self._result, self._work = result, None


def _explain(error: RuntimeError, op: str, group: Group) -> NoReturn:
    """Re-raise a failed collective with the ranks that are gone."""
    raise RuntimeError(liveness.describe_failure(f"{op} along {group.axis}", group.ranks, error)) from error


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
        return _Done(tensor) if async_op else tensor
    pending = Pending("all_reduce", group, _size_bytes(tensor), tensor.dtype, tensor).launch(
        lambda: dist.all_reduce(tensor, _OPS[op], group=group.process_group, async_op=True)
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
        return _Done(tensor) if async_op else tensor
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
        return _Done(tensor) if async_op else tensor
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
        return _Done(tensor) if async_op else tensor
    sizes = [tensor.shape[dim] // group.size] * group.size if sizes is None else sizes
    parts = [_padded(part, max(sizes)).contiguous() for part in tensor.movedim(dim, 0).split(list(sizes))]
    mine = torch.empty_like(parts[0])
    pending = Pending(
        "reduce_scatter", group, _size_bytes(*parts), tensor.dtype, lambda: mine[: sizes[group.rank]].movedim(0, dim)
    ).launch(lambda: dist.reduce_scatter(mine, parts, group=group.process_group, async_op=True))
    return pending if async_op else pending.wait()


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
        return _Done(tensor) if async_op else tensor
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
    return Pending("send", group, _size_bytes(tensor), tensor.dtype, tensor).launch(
        lambda: dist.isend(tensor, group.ranks[to], group=group.process_group, tag=tag)
    )


def irecv(tensor: Tensor, group: Group, source: int, tag: int = 0) -> Pending:
    """Start receiving into a contiguous `tensor` from the rank at position `source`."""
    return Pending("recv", group, _size_bytes(tensor), tensor.dtype, tensor).launch(
        lambda: dist.irecv(tensor, group.ranks[source], group=group.process_group, tag=tag)
    )


def _padded(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[0]
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


# ------------------------------------------------------------------------------------------------ Python objects


def all_gather_object(value: T, group: Group) -> list[T]:
    """The picklable `value` of every rank, by position."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    try:
        dist.all_gather_object(values, value, group=group.process_group)
    except RuntimeError as error:
        _explain(error, "all_gather_object", group)
    return values


def broadcast_object(value: T, group: Group, source: int = 0) -> T:
    """The picklable `value` of the rank at position `source`."""
    if group.size == 1:
        return value
    values: list[Any] = [value]
    try:
        dist.broadcast_object_list(values, group.ranks[source], group=group.process_group)
    except RuntimeError as error:
        _explain(error, "broadcast_object", group)
    return values[0]


def barrier(group: Group) -> None:
    """Wait until every rank of `group` has arrived."""
    if group.size > 1:
        try:
            dist.barrier(group=group.process_group)
        except RuntimeError as error:
            _explain(error, "barrier", group)
