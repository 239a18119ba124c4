"""Every communication call in flight, observed: what it was, how long it took, and who is gone when it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from lightning_parallel.comm import liveness
from lightning_parallel.comm.groups import Group

__all__ = ["CommRecord", "Done", "Pending", "explain", "observe", "record"]


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
            explain(error, self._op, self._group)
        self._blocked_ns = time.perf_counter_ns() - self._start_ns
        return self

    def wait(self) -> Any:
        work, self._work = self._work, None
        if work is not None:
            before = time.perf_counter_ns()
            try:
                work.wait()
            except RuntimeError as error:
                explain(error, self._op, self._group)
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


class Done(Pending):
    """The result of a collective in a group of one."""

    __slots__ = ()

    def __init__(self, result: Any) -> None:
        self._result, self._work = result, None


def explain(error: RuntimeError, op: str, group: Group) -> NoReturn:
    """Re-raise a failed collective with the ranks that are gone."""
    raise RuntimeError(liveness.describe_failure(f"{op} along {group.axis}", group.ranks, error)) from error
