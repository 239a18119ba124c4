"""The recorder in use, and what opens and closes spans in it."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Protocol

from lightning_parallel.recorder.ledger import Ledger
from lightning_parallel.recorder.spans import Span, Window

__all__ = [
    "Calls",
    "DeviceClock",
    "Flight",
    "OpenSpan",
    "Recorder",
    "activate",
    "active",
    "span",
]

Facts = tuple[Any, ...]

_new_span = partial(tuple.__new__, Span)  # a third of the time of `Span(...)`


class DeviceClock(Protocol):
    """Tells when a device gets to a point in its queue, without waiting for it."""

    def mark(self) -> Any:
        """Put a mark into the queue."""

    def is_here(self) -> bool:
        """Whether the queue that marks go to now is the one whose time is charged to phases."""

    def completion(self, work: Any) -> Any:
        """A mark that is passed when `work` is complete."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has passed `mark`."""

    def read(self, mark: Any) -> int:
        """When the device passed `mark`, in `perf_counter_ns`."""

    def synchronize(self) -> None:
        """Wait for the device to pass all marks."""


class Calls:
    """The collectives of one group in the order of their issue: how many, and a digest that is equal where they are."""

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self.recent: deque[tuple[str, int | None, str | None]] = deque(maxlen=256)
        self._kinds: dict[tuple[str, int | None, str | None], int] = {}

    def add(self, op: str, num_bytes: int | None, dtype: str | None) -> int:
        """Count a call; returns its number in the group, from 0."""
        call = (op, None if op == "all_to_all" else num_bytes, dtype)  # there ranks may send as much as they like
        kind = self._kinds.get(call)
        if kind is None:
            kind = self._kinds[call] = zlib.crc32(repr(call).encode())
        self.digest = (self.digest * 31 + kind) & 0xFFFFFFFF
        self.recent.append(call)
        self.count += 1
        return self.count - 1


class Flight:
    """A communication that has begun.

    Attributes:
        complete: When it was over, where something tells: nanoseconds, or a mark of the device clock.
    """

    __slots__ = (
        "_held",
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
        self._recorder, self._held = recorder, list[Any]()
        self.op, self.axis, self.ranks, self.bytes, self.dtype, self.peer = op, axis, ranks, num_bytes, dtype, peer
        self.tag, self.group = tag, group
        self.sequence = recorder.calls_of(axis, ranks, group, op, peer, tag).add(op, num_bytes, dtype)
        self.complete: Any = None
        self.start: Any = recorder.now()
        recorder.in_flight[id(self)] = self

    @property
    def clock(self) -> DeviceClock | None:
        """The device clock in use."""
        return self._recorder.clock

    def now(self) -> Any:
        """The time, as the recorder gives it."""
        return self._recorder.now()

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread is held up by it right now."""
        return len(self._held) % 2 == 1

    def __enter__(self) -> None:
        """The calling thread is held up, between stages by the pipeline."""
        self._held.append(self._recorder.now())

    def __exit__(self, *_: object) -> None:
        between_stages = self.peer is not None or self.axis == "pipeline_parallel"
        phase = "pipeline_wait" if between_stages else "communication_exposed"
        self._held.append(self._recorder.spend(phase, self._held[-1]))

    def held_until(self, end: Any) -> Any:
        """Others held the calling thread up until `end`, from when it was last let go, which is returned."""
        begin = self._held[-1]
        self._held += begin, end
        return begin

    def finish(self, end: Any = None) -> None:
        """The calling thread has the result: since `end`, or since it was last held up."""
        recorder = self._recorder
        recorder.in_flight.pop(id(self), None)
        held = self._held
        if end is None:
            end = held[-1] if held else recorder.now()
        who = self.ranks, self.peer, self.dtype, get_ident()
        what = "communication", self.op, recorder.step, None, None, self.axis, self.op, self.bytes
        recorder.add((*what, *who, self.sequence, self.tag, self.group), self.start, end, self.complete, *held)


class Recorder:
    """The last `capacity` spans of this process, and the ledger of its main thread.

    Args:
        capacity: Spans kept; older ones are dropped.
        clock: Tells the time of the device; None where the host computes.
        absorbing: Phases that keep the time of all phases within them, such as validation.
        calls: Where to count calls; those counted before go on.

    Attributes:
        step: Number of the open window.
        now: Reads the clock: nanoseconds, or a mark of the device clock.
        in_flight: Communications that have begun and not ended.
        add: Keeps a finished span, see `_keep`.
        calls: What was issued in each group, by axis, ranks and name; of messages, also by operation, peer and tag.
    """

    def __init__(
        self,
        capacity: int = 100_000,
        clock: DeviceClock | None = None,
        absorbing: Collection[str] = (),
        calls: dict[tuple[Any, ...], Calls] | None = None,
    ) -> None:
        self.spans: deque[Span] = deque(maxlen=capacity)
        self.step = 0
        self.main_thread = get_ident()
        self.clock = clock
        self.now: Callable[[], Any] = perf_counter_ns if clock is None else clock.mark
        self.in_flight: dict[int, Flight] = {}
        self.calls: dict[tuple[Any, ...], Calls] = {} if calls is None else calls
        self._ledger = Ledger(perf_counter_ns(), absorbing)
        self._start_ns = self._ledger.last_ns
        self._ended: list[Span] = []
        self._windows: list[Window] = []
        self._unread: deque[tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = deque()
        self.add: Callable[..., None] = self._keep if clock is None else self._keep_later

    # ------------------------------------------------------------------------------------------------------- phases

    def is_main_thread(self) -> bool:
        """Whether the caller is the thread that trains; autograd's device threads count, as they run in its stead."""
        if get_ident() == self.main_thread:
            return True
        return isinstance(threading.current_thread(), threading._DummyThread)

    def enter(self, phase: str) -> Any:
        """Charge the main thread's time to `phase`, until `leave`; returns `now()`."""
        now = self.now()
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

    def spend(self, phase: str, start: Any) -> Any:
        """Charge the main thread's time since `start`, in which no phase began or ended; returns `now()`."""
        now = self.now()
        if get_ident() == self.main_thread or self.is_main_thread():
            if self.clock is None:
                self._ledger.spend(phase, start, now)
            else:
                self._unread.append((self._ledger.spend, (phase,), (start, now)))
        return now

    def move(self, phase: str, start: Any, end: Any) -> None:
        """Charge the time between two moments, as `now()` gave them, to `phase` instead of the innermost one."""
        if self.is_main_thread():
            self._put(self._ledger.move, (phase,), start, end, self.now())

    # -------------------------------------------------------------------------------------------------------- spans

    def calls_of(
        self,
        axis: str,
        ranks: tuple[int, ...],
        group: str = "",
        op: str = "",
        peer: int | None = None,
        tag: int | None = None,
    ) -> Calls:
        """What was issued in a group; messages count apart, by peer, direction and tag."""
        key = (axis, ranks, group) if peer is None else (axis, ranks, group, op, peer, tag)
        calls = self.calls.get(key)
        if calls is None:
            calls = self.calls[key] = Calls()
        return calls

    def last_steps(self, count: int) -> list[Span]:
        """The spans of the last `count` steps, oldest first; from any thread."""
        first = self.step - count
        return [span for span in list(self.spans) if span.step > first]

    def _keep(self, facts: Facts, start_ns: int, end_ns: int, complete_ns: int | None = None, *held_ns: int) -> None:
        """Keep a finished span, with its times as `now()` gave them.

        Args:
            facts: The fields of `Span` in their order, but those that are times.
            start_ns: When it began.
            end_ns: When it ended.
            complete_ns: When a communication was over, if that is known.
            held_ns: From when to when the calling thread was held up, any number of times.
        """
        category, name, step, stage, micro, axis, op, size, ranks, peer, dtype, thread, number, tag, group = facts
        if len(held_ns) == 2:
            blocked_ns = held_ns[1] - held_ns[0]
        else:
            blocked_ns = sum(max(0, end - begin) for begin, end in zip(held_ns[::2], held_ns[1::2]))
        in_flight = None if complete_ns is None else complete_ns - start_ns
        what = category, name, start_ns, end_ns, step, stage, micro, axis, op, size
        span = _new_span((*what, blocked_ns, ranks, peer, dtype, thread, in_flight, number, tag, group))
        self.spans.append(span)
        self._ended.append(span)

    def _keep_later(self, facts: Facts, start: Any, end: Any, complete: Any = None, *held: Any) -> None:
        self._unread.append((self._keep, (facts,), (start, end, complete, *held)))

    # ------------------------------------------------------------------------------------------------------ windows

    def close_step(self, wait: bool = False) -> list[Window]:
        """End the step; returns the steps known since the last call: this one, where the host computes.

        Args:
            wait: Wait for the device, so that this step is among them.
        """
        self._put(self._close, (self.step,), self.now())
        self.step += 1
        if self.clock is not None:
            if wait:
                self.clock.synchronize()
            self._read()
        windows, self._windows = self._windows, []
        return windows

    def _close(self, step: int, now_ns: int) -> None:
        phases = self._ledger.close(now_ns)
        self._windows.append(Window(step, self._start_ns, now_ns, phases, self._ended))
        self._ended, self._start_ns = [], now_ns

    def _put(self, function: Callable[..., Any], arguments: tuple[Any, ...], *times: Any) -> None:
        if self.clock is None:
            function(*arguments, *times)
        else:
            self._unread.append((function, arguments, times))

    def _read(self) -> None:
        """Do what was put off, as far as the device has got."""
        clock, unread = self.clock, self._unread
        assert clock is not None
        while unread:
            function, arguments, marks = unread[0]
            if not all(mark is None or clock.passed(mark) for mark in marks):
                return
            function(*arguments, *(None if mark is None else clock.read(mark) for mark in marks))
            unread.popleft()


_active: Recorder | None = None


def active() -> Recorder | None:
    """The recorder in use, if any."""
    return _active


@contextmanager
def activate(recorder: Recorder) -> Iterator[Recorder]:
    """Record into `recorder` inside the block."""
    global _active
    before, _active = _active, recorder
    try:
        yield recorder
    finally:
        _active = before


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
    return _Recording(_active, phase, (category, name, _active.step, stage, microbatch))


class OpenSpan(AbstractContextManager["OpenSpan"]):
    """A span that has begun, or nothing where nothing is recorded."""

    __slots__ = ()

    def restart(self) -> None:
        """Let the span begin now: what came before was waiting."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _Recording(OpenSpan):
    __slots__ = ("_facts", "_phase", "_recorder", "_start")

    def __init__(self, recorder: Recorder, phase: str | None, facts: tuple[Any, ...]) -> None:
        self._recorder, self._phase, self._facts = recorder, phase, facts

    def __enter__(self) -> OpenSpan:
        self._start = self._recorder.now() if self._phase is None else self._recorder.enter(self._phase)
        return self

    def restart(self) -> None:
        self._start = self._recorder.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self._recorder.now() if self._phase is None else self._recorder.leave()
        facts = (*self._facts, None, None, None, (), None, None, get_ident(), None, None, "")
        self._recorder.add(facts, self._start, end)


_NOTHING = OpenSpan()
