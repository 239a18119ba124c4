"""Every communication call in flight, observed: what it was, how long it took, and who is gone when it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from lightning_parallel import tracing
from lightning_parallel.comm import liveness
from lightning_parallel.comm.groups import Group
from lightning_parallel.tracing import InFlight

__all__ = ["PROFILING", "CommRecord", "Done", "Pending", "explain", "observe", "record", "recorded", "rehearsal"]

PROFILING = "profiling"
"""Axis of the group in which ranks exchange what they measured; it is not measured itself."""

ARRIVAL_NS = 300_000
"""A wait longer than this ends when the communication does; after a shorter one it may have been over long before."""


@dataclass(frozen=True)
class CommRecord:
    """One finished communication call of this rank.

    Attributes:
        op: Name of the operation in torch's terms (`all_reduce`, `send`, ...).
        axis: Mesh axis of the group, or its description.
        bytes: Payload: the full tensor for all_reduce and broadcast, the gathered total for all_gather and
            reduce_scatter, what this rank sends for all_to_all, the message for send and recv.
        seconds: From the call to its completion; where the backend does not tell that, to the end of the wait for it.
        blocked_s: How long the calling thread was held up, by the call and by the wait for it.
        start_ns: `time.perf_counter_ns()` at the call.
        dtype: Element type of the payload.
        group_size: Ranks in the group.
        end_ns: `time.perf_counter_ns()` when the calling thread had the result.
        ranks: Global ranks of the group.
        peer: Global rank at the other end of a message; None for a collective.
    """

    op: str
    axis: str
    bytes: int
    seconds: float
    blocked_s: float
    start_ns: int
    dtype: torch.dtype
    group_size: int
    end_ns: int
    ranks: tuple[int, ...]
    peer: int | None = None


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


_rehearsing = False


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside the block collectives return tensors of the right shape and communicate nothing; values are arbitrary.

    A computation that fails on some ranks only fails here, where no other rank waits for it.
    """
    global _rehearsing
    _rehearsing = True
    try:
        yield
    finally:
        _rehearsing = False


class Pending:
    """A collective in flight. `wait()` returns its result; calling it again returns the same result."""

    __slots__ = (
        "_blocked_ns",
        "_bytes",
        "_complete_ns",
        "_dtype",
        "_flight",
        "_group",
        "_op",
        "_peer",
        "_result",
        "_start_ns",
        "_tag",
        "_work",
    )

    def __init__(
        self,
        op: str,
        group: Group,
        num_bytes: int,
        dtype: torch.dtype,
        result: Any,
        peer: int | None = None,
        tag: int | None = None,
    ) -> None:
        self._op, self._group, self._bytes, self._dtype, self._result = op, group, num_bytes, dtype, result
        self._peer, self._tag = peer, tag
        self._complete_ns: int | None = None
        self._work: Any = None
        self._start_ns = time.perf_counter_ns()
        self._blocked_ns = 0

    def launch(self, call: Callable[[], Any]) -> Pending:
        if _rehearsing:
            return self
        flight = self._flight = _begin(self._op, self._group, self._bytes, self._dtype, self._peer, self._tag)
        try:
            with flight:
                self._work = call()
        except RuntimeError as error:
            explain(error, self._op, self._group)
        self._blocked_ns = time.perf_counter_ns() - self._start_ns
        if _observers or flight is not _UNSEEN:
            self._watch_completion(flight)
        return self

    def _watch_completion(self, flight: InFlight | _Unseen) -> None:
        clock = flight.clock
        if clock is not None:
            flight.complete = clock.completion(self._work)
        elif self._peer is None and self._group.backend == "gloo" and hasattr(self._work, "get_future"):
            with suppress(RuntimeError):  # not every operation tells
                self._work.get_future().add_done_callback(self._note_completion)  # runs on a thread of gloo

    def _note_completion(self, _: Any) -> None:
        self._complete_ns = self._flight.complete = time.perf_counter_ns()

    def wait(self) -> Any:
        work, self._work = self._work, None
        if work is not None:
            before = time.perf_counter_ns()
            try:
                with self._flight:
                    work.wait()
            except RuntimeError as error:
                explain(error, self._op, self._group)
            after = time.perf_counter_ns()
            if self._flight.complete is None and self._flight.clock is None and after - before > ARRIVAL_NS:
                self._flight.complete = after
            self._flight.finish()
            if _observers:
                self._report(after, before)
        return self._result() if callable(self._result) else self._result

    def _report(self, end_ns: int, wait_ns: int) -> None:
        blocked_s = (self._blocked_ns + end_ns - wait_ns) / 1e9
        seconds = ((self._complete_ns or end_ns) - self._start_ns) / 1e9
        group = self._group
        finished = CommRecord(
            self._op,
            group.axis,
            self._bytes,
            seconds,
            blocked_s,
            self._start_ns,
            self._dtype,
            group.size,
            end_ns,
            group.ranks,
            self._peer,
        )
        for observer in _observers:
            observer(finished)


class Done(Pending):
    """The result of a collective in a group of one."""

    __slots__ = ()

    def __init__(self, result: Any) -> None:
        self._result, self._work = result, None


class _Unseen:
    """Stands for a `InFlight` where nothing is recorded."""

    complete: Any = None
    clock = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def finish(self) -> None:
        pass


_UNSEEN = _Unseen()


def _begin(
    op: str,
    group: Group,
    num_bytes: int | None,
    dtype: torch.dtype | None,
    peer: int | None = None,
    tag: int | None = None,
) -> InFlight | _Unseen:
    active = tracing.active()
    if active is None or group.axis == PROFILING:
        return _UNSEEN
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    return InFlight(active, op, group.axis, group.ranks, num_bytes, name, peer, tag, group.name)


@contextmanager
def recorded(op: str, group: Group) -> Iterator[None]:
    """Record the block as one call in `group` that keeps the calling thread waiting; how many bytes is not known."""
    flight = _begin(op, group, None, None)
    with flight:
        yield
    flight.finish()


def explain(error: RuntimeError, op: str, group: Group) -> NoReturn:
    """Re-raise a failed collective with the ranks that are gone."""
    raise RuntimeError(liveness.describe_failure(f"{op} along {group.axis}", group.ranks, error)) from error
