"""The recorder: keeps spans, charges time to phases, and counts the collectives of each group."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Protocol

from lightning_parallel.tracing.spans import CallCounter, Ledger, Span, Window

__all__ = [
    "DeviceClock",
    "InFlight",
    "OpenSpan",
    "Recorder",
    "activate",
    "active",
    "is_suspended",
    "span",
    "suspended",
]

SpanFields = tuple[Any, ...]
"""The fields of a `Span` in their order, without those that are times."""

Write = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]
"""A function, its arguments, and the marks of a device clock whose times it takes after them."""

# Thousands of spans a step are possible, and this takes a third of the time of `Span(...)`.
_new_span = partial(tuple.__new__, Span)


class DeviceClock(Protocol):
    """Reads when a device reached a point in its queue, without waiting for it."""

    def mark(self) -> Any:
        """Put a mark into the queue."""

    def is_on_main_stream(self) -> bool:
        """Return whether marks go to the queue whose time is charged to phases."""

    def completion(self, work: Any, lane: Hashable) -> Any:
        """Make a mark that is passed when `work` is complete; what is on other lanes does not hold it up."""

    def passed(self, mark: Any) -> bool:
        """Return whether the device has passed `mark`."""

    def read(self, mark: Any) -> int:
        """Return when the device passed `mark`, in `perf_counter_ns`."""

    def synchronize(self) -> None:
        """Wait for the device to pass all marks."""


class InFlight:
    """A communication call that has begun; as a context manager, it records that the calling thread is blocked by it.

    Attributes:
        complete: When it was complete, where something reports that: nanoseconds, or a mark of the device clock.
    """

    # One is made for every communication call of a step; slots keep that cheap.
    __slots__ = (
        "_blocked",
        "_recorder",
        "axis",
        "bytes",
        "complete",
        "dtype",
        "group",
        "op",
        "peer",
        "ranks",
        "sequence",
        "start",
        "tag",
    )

    def __init__(
        self,
        recorder: Recorder,
        op: str,
        axis: str,
        ranks: tuple[int, ...],
        num_bytes: int | None,
        dtype: str | None,
        peer: int | None,
        tag: int | None = None,
        group: str = "",
    ) -> None:
        self._recorder = recorder
        self._blocked: list[Any] = []  # begin, end, begin, end, ...
        self.op = op
        self.axis = axis
        self.ranks = ranks
        self.bytes = num_bytes
        self.dtype = dtype
        self.peer = peer
        self.tag = tag
        self.group = group
        self.sequence = recorder.calls_of(axis, ranks, group, op, peer, tag).add(op, num_bytes, dtype)
        self.complete: Any = None
        self.start: Any = recorder.now()
        # By identity, as several calls of one kind may be in flight; a hang is explained from these.
        recorder.in_flight[id(self)] = self

    @property
    def clock(self) -> DeviceClock | None:
        """The device clock in use."""
        return self._recorder.clock

    def now(self) -> Any:
        """Read the recorder's clock."""
        return self._recorder.now()

    @property
    def has_ended(self) -> bool:
        """Whether the device is known to have completed it."""
        return self.clock is not None and self.complete is not None and self.clock.passed(self.complete)

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread is blocked by it right now."""
        return len(self._blocked) % 2 == 1

    def __enter__(self) -> None:
        self._blocked.append(self._recorder.now())

    def __exit__(self, *_: object) -> None:
        between_stages = self.peer is not None or self.axis == "pipeline_parallel"
        phase = "pipeline_wait" if between_stages else "communication_exposed"
        self._blocked.append(self._recorder.charge(phase, self._blocked[-1]))

    def blocked_until(self, end: Any) -> Any:
        """Note that the calling thread was blocked until `end`, since it was last released; returns since when."""
        begin = self._blocked[-1]
        self._blocked += begin, end
        return begin

    def finish(self, end: Any = None) -> None:
        """Record the span: the calling thread has the result, since `end`, or since it was last blocked."""
        recorder = self._recorder
        recorder.land(self)
        blocked = self._blocked
        if end is None:
            end = blocked[-1] if blocked else recorder.now()
        what = "communication", self.op, recorder.step, None, None, self.axis, self.op, self.bytes
        who = self.ranks, self.peer, self.dtype, get_ident()
        fields = (*what, *who, self.sequence, self.tag, self.group)
        recorder.add(fields, self.start, end, self.complete, *blocked)


class Recorder:
    """Keeps the latest spans of this process, and the ledger of its main thread.

    Args:
        capacity: Spans kept; older ones are dropped.
        clock: Reads the time of the device; None where the host computes.
        absorbing: Phases that keep the time of all phases nested in them, such as validation.
        calls: Counters to go on with, see the attribute.

    Attributes:
        step: Number of the open window.
        now: Reads the clock: nanoseconds, or a mark of the device clock.
        in_flight: Communications that have begun and not ended, on the device if there is one.
        add: Keeps a finished span, see `_keep`.
        calls: Collectives issued in each group, by axis, ranks and name; messages also by operation, peer and tag.
    """

    def __init__(
        self,
        capacity: int = 100_000,
        clock: DeviceClock | None = None,
        absorbing: Collection[str] = (),
        calls: dict[tuple[Any, ...], CallCounter] | None = None,
    ) -> None:
        self.spans: deque[Span] = deque(maxlen=capacity)
        self.step = 0
        self.main_thread = get_ident()
        self.clock = clock
        self.now: Callable[[], Any] = perf_counter_ns if clock is None else clock.mark
        self.in_flight: dict[int, InFlight] = {}
        self.calls: dict[tuple[Any, ...], CallCounter] = {} if calls is None else calls
        self._ledger = Ledger(perf_counter_ns(), absorbing)
        self._start_ns = self._ledger.last_ns
        self._ended: list[Span] = []
        self._windows: list[Window] = []
        # Under a device clock all entries wait here, in the order of their issue, until the device has passed their
        # marks; the ledger needs them in order.
        self._unread: deque[Write] = deque()
        self.add: Callable[..., None] = self._keep if clock is None else self._keep_later

    # ------------------------------------------------------------------------------------------------------- phases

    def is_main_thread(self) -> bool:
        """Return whether the caller is the thread that trains; autograd's threads count, as they run in its stead."""
        if get_ident() == self.main_thread:
            return True
        # Autograd starts its threads in C++: Python has a dummy object for each, of a class with no public name.
        return isinstance(threading.current_thread(), threading._DummyThread)

    def enter(self, phase: str) -> Any:
        """Charge the main thread's time to `phase`, until `leave`; returns `now()`."""
        now = self.now()
        # Compared here first: the call is the slower part, and almost all phases are entered on the main thread.
        if get_ident() == self.main_thread or self.is_main_thread():
            if self.clock is None:
                self._ledger.enter(phase, now)
            else:
                self._unread.append((self._ledger.enter, (phase,), (now,)))
        return now

    def leave(self) -> Any:
        """End the innermost phase; returns `now()`."""
        now = self.now()
        if get_ident() == self.main_thread or self.is_main_thread():
            if self.clock is None:
                self._ledger.leave(now)
            else:
                self._unread.append((self._ledger.leave, (), (now,)))
        return now

    def charge(self, phase: str, start: Any) -> Any:
        """Charge the main thread's time since `start`, in which no phase began or ended; returns `now()`."""
        now = self.now()
        if get_ident() == self.main_thread or self.is_main_thread():
            if self.clock is None:
                self._ledger.charge(phase, start, now)
            else:
                self._unread.append((self._ledger.charge, (phase,), (start, now)))
        return now

    def reassign(self, phase: str, start: Any, end: Any) -> None:
        """Charge the time between two values of `now()` to `phase` instead of the innermost one."""
        if self.is_main_thread():
            self._put(self._ledger.reassign, (phase,), start, end, self.now())

    # -------------------------------------------------------------------------------------------------------- spans

    def land(self, flight: InFlight) -> None:
        """Note that the caller has gone on; where a device waits in its stead, the communication may not have ended."""
        if self.clock is None or flight.complete is None:
            self.in_flight.pop(id(flight), None)
        else:
            self._unread.append((lambda _: self.in_flight.pop(id(flight), None), (), (flight.complete,)))

    def calls_of(
        self,
        axis: str,
        ranks: tuple[int, ...],
        group: str = "",
        op: str = "",
        peer: int | None = None,
        tag: int | None = None,
    ) -> CallCounter:
        """Return the counter of a group's collectives; messages have one for each peer, direction and tag."""
        key = (axis, ranks, group) if peer is None else (axis, ranks, group, op, peer, tag)
        calls = self.calls.get(key)
        if calls is None:
            calls = self.calls[key] = CallCounter()
        return calls

    def last_steps(self, count: int) -> list[Span]:
        """Return the spans of the last `count` steps, oldest first; may be called from any thread."""
        first = self.step - count
        # A copy first: the main thread may append meanwhile.
        return [span for span in list(self.spans) if span.step > first]

    def _keep(
        self, fields: SpanFields, start_ns: int, end_ns: int, complete_ns: int | None = None, *blocked_ns: int
    ) -> None:
        """Keep a finished span.

        Args:
            fields: See `SpanFields`.
            start_ns: When it began.
            end_ns: When it ended.
            complete_ns: When a communication was complete, if that is known.
            blocked_ns: Begin and end of each time for which the calling thread was blocked.
        """
        category, name, step, stage, microbatch, axis, op, size, ranks, peer, dtype, thread, number, tag, group = fields
        # Nearly always: one call that blocks, or one wait.
        if len(blocked_ns) == 2:
            total_ns = blocked_ns[1] - blocked_ns[0]
        else:
            total_ns = sum(max(0, end - begin) for begin, end in zip(blocked_ns[::2], blocked_ns[1::2]))
        in_flight = None if complete_ns is None else complete_ns - start_ns
        what = category, name, start_ns, end_ns, step, stage, microbatch, axis, op, size
        span = _new_span((*what, total_ns, ranks, peer, dtype, thread, in_flight, number, tag, group))
        self.spans.append(span)
        self._ended.append(span)

    def _keep_later(self, fields: SpanFields, start: Any, end: Any, complete: Any = None, *blocked: Any) -> None:
        self._unread.append((self._keep, (fields,), (start, end, complete, *blocked)))

    # ------------------------------------------------------------------------------------------------------ windows

    def close_step(self, wait: bool = False) -> list[Window]:
        """End the step; returns the steps completed since the last call: this one, where the host computes.

        Args:
            wait: Wait for the device, so that this step is among them.
        """
        self._put(self._close, (self.step,), self.now())
        self.step += 1
        if self.clock is not None:
            if wait:
                self.clock.synchronize()
            self._read()
        windows = self._windows
        self._windows = []
        return windows

    def _close(self, step: int, now_ns: int) -> None:
        phases = self._ledger.close(now_ns)
        self._windows.append(Window(step, self._start_ns, now_ns, phases, self._ended))
        self._ended = []
        self._start_ns = now_ns

    def _put(self, function: Callable[..., Any], arguments: tuple[Any, ...], *times: Any) -> None:
        if self.clock is None:
            function(*arguments, *times)
        else:
            self._unread.append((function, arguments, times))

    def _read(self) -> None:
        """Record the entries whose marks the device has passed."""
        clock = self.clock
        if clock is None:
            return
        unread = self._unread
        while unread:
            # In order: the ledger takes times that do not decrease, and a window needs all spans before its end.
            function, arguments, marks = unread[0]
            if not all(mark is None or clock.passed(mark) for mark in marks):
                return
            times = [None if mark is None else clock.read(mark) for mark in marks]
            function(*arguments, *times)
            unread.popleft()


# One for the process: code that names its spans should not have to be given a recorder. Not a context variable, since
# autograd and communication threads record into it, too.
_active: Recorder | None = None


def active() -> Recorder | None:
    """Return the recorder in use, if any."""
    return _active


@contextmanager
def activate(recorder: Recorder) -> Iterator[Recorder]:
    """Record into `recorder` inside the block."""
    global _active
    before = _active
    _active = recorder
    try:
        yield recorder
    finally:
        _active = before


_suspended = False


def is_suspended() -> bool:
    """Tell whether what runs now is not of the run that is measured."""
    return _suspended


@contextmanager
def suspended() -> Iterator[None]:
    """Record nothing inside the block."""
    global _active, _suspended
    before, _active, _suspended = (_active, _suspended), None, True
    try:
        yield
    finally:
        _active, _suspended = before


def span(
    name: str,
    phase: str | None = None,
    category: str = "phase",
    stage: int | None = None,
    microbatch: int | None = None,
) -> OpenSpan:
    """Record the block as a span, and charge its time to `phase` where one is given."""
    if _active is None:
        return _NOTHING
    return _RecordedSpan(_active, phase, (category, name, _active.step, stage, microbatch))


class OpenSpan(AbstractContextManager["OpenSpan"]):
    """A span that has begun; this base class does nothing, for where nothing is recorded."""

    __slots__ = ()

    def restart(self) -> None:
        """Let the span begin now: the time before was waiting."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _RecordedSpan(OpenSpan):
    __slots__ = ("_fields", "_phase", "_recorder", "_start")

    def __init__(self, recorder: Recorder, phase: str | None, fields: SpanFields) -> None:
        self._recorder = recorder
        self._phase = phase
        self._fields = fields

    def __enter__(self) -> OpenSpan:
        self._start = self._recorder.now() if self._phase is None else self._recorder.enter(self._phase)
        return self

    def restart(self) -> None:
        self._start = self._recorder.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self._recorder.now() if self._phase is None else self._recorder.leave()
        # In the order in which `_keep` unpacks them.
        fields = (*self._fields, None, None, None, (), None, None, get_ident(), None, None, "")
        self._recorder.add(fields, self._start, end)


_NOTHING = OpenSpan()
