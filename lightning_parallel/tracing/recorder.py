"""The recorder: keeps spans, charges time to phases, and counts the collectives of each group."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Protocol

from lightning_parallel.tracing.spans import CallCounter, Ledger, Span, Window, expose

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
    "waiting",
]


ARRIVAL_NS = 300_000
"""A wait that blocks longer than this ends when the communication does. After a shorter wait, the communication may
have been complete long before, while the thread was computing."""


class DeviceClock(Protocol):
    """Reads when a device reached a point in its queue, without waiting for it."""

    def mark(self) -> Any:
        """Put a mark into the queue."""

    def is_on_main_stream(self) -> bool:
        """Return whether marks go to the queue whose time is charged to phases."""

    def is_main(self, stream: Any) -> bool:
        """Return whether `stream` is that queue."""

    def completion(self, work: Any, lane: Hashable) -> Any:
        """Make a mark that is passed when `work` is complete; work on other lanes does not hold it up."""

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
        tensors: What it reads and writes, where something has to keep them until it is over.
    """

    # One is made for every communication call of a step; slots keep that cheap.
    __slots__ = (
        "_blocked",
        "_exposes",
        "_recorder",
        "apart",
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
        "step",
        "tag",
        "tensors",
    )

    def __init__(
        self,
        recorder: Any,
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
        self._exposes = False  # whether the thread that trains was blocked, and no other
        self.tensors: Sequence[Any] = ()
        self.apart = recorder.apart
        self.step = recorder.step
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
        clock: DeviceClock | None = self._recorder.clock
        return clock

    def now(self) -> Any:
        """Read the recorder's clock."""
        return self._recorder.now()

    def watch(self, work: Any, on_device: bool) -> None:
        """Let the backend note when `work` is complete, which may be long before anything waits for it.

        Args:
            work: Torch's handle.
            on_device: Whether a device carries the communication, whose streams wait instead of the host.
        """
        clock = self.clock
        if clock is not None:
            if on_device:
                # A lane for each peer: messages from and to a peer do not complete in the order of their start.
                self.complete = clock.completion(work, (self.group, self.op, self.peer))
        elif not on_device:
            # Not every operation has a future, and not every handle is torch's.
            with suppress(AttributeError, RuntimeError):
                work.get_future().add_done_callback(self._note_completion)

    def _note_completion(self, _: Any) -> None:
        # Runs on a thread of gloo. It must do nothing that takes long: that thread also completes other collectives.
        self.complete = perf_counter_ns()

    def note_wait(self, begin: Any, end: Any) -> None:
        """Note a wait from `begin` to `end`, which tells when the communication was complete if nothing else does."""
        if self.complete is None and self.clock is None and end - begin > ARRIVAL_NS:
            self.complete = end

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
        recorder = self._recorder
        if not recorder.is_computing():
            self._blocked.append(recorder.now())
            return
        between_stages = self.peer is not None or self.axis == "pipeline_parallel"
        phase = "pipeline_wait" if between_stages else "communication_exposed"
        self._blocked.append(recorder.charge(phase, self._blocked[-1]))
        self._exposes = True

    @property
    def released(self) -> Any:
        """When the calling thread was last released, at first by the call itself."""
        return self._blocked[-1] if self._blocked else self.start

    def block(self, begin: Any, end: Any) -> None:
        """Note that the thread that trains was blocked from `begin` to `end`, which something else has charged."""
        self._blocked += begin, end
        self._exposes = True

    def finish(self, end: Any = None) -> None:
        """Record the span: the calling thread has the result, since `end`, or since it was last blocked."""
        recorder = self._recorder
        recorder.land(self)
        blocked = self._blocked
        if end is None:
            end = blocked[-1] if blocked else recorder.now()
        call = recorder.step, None, None, self.axis, self.op, self.bytes, self.ranks, self.peer, self.dtype
        facts = (*call, get_ident(), self.sequence, self.tag, self.group, self.apart)
        if recorder.clock is None:
            self.tensors = ()  # a device may still read them: they stay until it has passed the completion
        recorder.add("communication", self.op, facts, self._exposes, self.start, end, self.complete, *blocked)


SpanFacts = tuple[Any, ...]
"""The fields of a `Span` from `step` to `apart`, in their order."""

Write = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]
"""A function, its arguments, and the marks of a device clock whose times it takes after them."""

# Thousands of spans a step are possible, and this takes a third of the time of `Span(...)`.
_new_span = partial(tuple.__new__, Span)


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
        apart: The absorbing phase that runs, if one does.
        on_submit: Called where work is given to another thread or stream; tells whether a backward pass waits for it.
        beside: When work that a backward pass waits for was done, in the order in which it ended.
        num_beside: How much of such work has not ended.
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
        self.apart: str | None = None
        self.on_submit: Callable[[], bool] | None = None
        self.beside: list[Any] = []
        self.num_beside = 0
        self._absorbing = frozenset(absorbing)
        self._num_nested = 0  # phases that began within `apart`
        # The time of the host, also with a device clock, whose anchor is on this clock.
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

    def is_computing(self) -> bool:
        """Return whether the time of the caller is charged to phases: it trains, in the stream that computes."""
        if get_ident() != self.main_thread and not self.is_main_thread():
            return False
        return self.clock is None or self.clock.is_on_main_stream()

    def enter(self, phase: str) -> Any:
        """Charge the main thread's time to `phase`, until `leave`; returns `now()`."""
        now = self.now()
        # Compared here first: the call is the slower part, and almost all phases are entered on the main thread.
        if get_ident() == self.main_thread or self.is_main_thread():
            if self.apart is not None:
                self._num_nested += 1
            elif phase in self._absorbing:
                self.apart = phase
            if self.clock is None:
                self._ledger.enter(phase, now)
            else:
                self._unread.append((self._ledger.enter, (phase,), (now,)))
        return now

    def leave(self) -> Any:
        """End the innermost phase; returns `now()`."""
        now = self.now()
        if get_ident() == self.main_thread or self.is_main_thread():
            if self._num_nested:
                self._num_nested -= 1
            else:
                self.apart = None
            if self.clock is None:
                self._ledger.leave(now)
            else:
                self._unread.append((self._ledger.leave, (), (now,)))
        return now

    def charge(self, phase: str, start: Any) -> Any:
        """Charge the time since `start`, in which no phase began or ended; returns `now()`. See `is_computing`."""
        now = self.now()
        if self.clock is None:
            self._ledger.charge(phase, start, now)
        else:
            self._unread.append((self._ledger.charge, (phase,), (start, now)))
        return now

    def reassign(self, phase: str, start: Any, end: Any, source: str | None = None) -> None:
        """Charge the time between two values of `now()` to `phase` instead of `source`, or the innermost one."""
        if self.is_main_thread():
            self._put(partial(self._ledger.reassign, source=source), (phase,), start, end, self.now())

    def submitted(self) -> Callable[[], None] | None:
        """Note that another thread or stream gets work; returns a function to call at its end, if anything."""
        # Outside a backward pass, the caller waits for its work by itself.
        if self.on_submit is None or not self.on_submit():
            return None
        self.num_beside += 1
        return self._note_done

    def _note_done(self) -> None:
        self.beside.append(self.now())
        self.num_beside -= 1

    def add_wait(self, name: str, start: Any, end: Any) -> None:
        """Keep a wait of the thread that trains, which something else has charged."""
        self.add("wait", name, _plain_facts(self.step), False, start, end)

    # -------------------------------------------------------------------------------------------------------- spans

    def land(self, flight: InFlight) -> None:
        """Note that the caller has gone on; if a device waits for the caller, the communication may not have ended."""
        if self.clock is None or flight.complete is None:
            self.in_flight.pop(id(flight), None)
        else:
            # Until the device has passed the completion, a report on a hang must find the call in flight.
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
        self,
        category: str,
        name: str,
        facts: SpanFacts,
        exposes: bool,
        start_ns: int,
        end_ns: int,
        complete_ns: int | None = None,
        *blocked_ns: int,
    ) -> None:
        """Keep a finished span.

        Args:
            category: See `Span`.
            name: See `Span`.
            facts: See `SpanFacts`.
            exposes: Whether the thread that trains was blocked, and no other thread.
            start_ns: When it began.
            end_ns: When it ended.
            complete_ns: When a communication was complete, if that is known.
            blocked_ns: Begin and end of each time for which the calling thread was blocked.
        """
        # Nearly always: one call that blocks, or one wait.
        if len(blocked_ns) == 2:
            total_ns = blocked_ns[1] - blocked_ns[0]
        else:
            total_ns = sum(max(0, end - begin) for begin, end in zip(blocked_ns[::2], blocked_ns[1::2]))
        in_flight = None if complete_ns is None else complete_ns - start_ns
        exposed_ns = total_ns if exposes else 0
        span = _new_span((category, name, start_ns, end_ns, *facts, total_ns, in_flight, exposed_ns))
        self.spans.append(span)
        self._ended.append(span)

    def _keep_later(
        self,
        category: str,
        name: str,
        facts: SpanFacts,
        exposes: bool,
        start: Any,
        end: Any,
        complete: Any = None,
        *blocked: Any,
    ) -> None:
        self._unread.append((self._keep, (category, name, facts, exposes), (start, end, complete, *blocked)))

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
        self._windows.append(Window(step, self._start_ns, now_ns, phases, expose(self._ended)))
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
    """Tell whether the code that runs now is no part of the measured run."""
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
    return _RecordedSpan(_active, phase, category, name, _plain_facts(_active.step, stage, microbatch))


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
    __slots__ = ("_category", "_facts", "_name", "_phase", "_recorder", "_start")

    def __init__(self, recorder: Recorder, phase: str | None, category: str, name: str, facts: SpanFacts) -> None:
        self._recorder = recorder
        self._phase = phase
        self._category = category
        self._name = name
        self._facts = facts

    def __enter__(self) -> OpenSpan:
        self._start = self._recorder.now() if self._phase is None else self._recorder.enter(self._phase)
        return self

    def restart(self) -> None:
        self._start = self._recorder.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self._recorder.now() if self._phase is None else self._recorder.leave()
        self._recorder.add(self._category, self._name, self._facts, False, self._start, end)


def _plain_facts(step: int, stage: int | None = None, microbatch: int | None = None) -> SpanFacts:
    """Return the facts of a span that is no communication."""
    return step, stage, microbatch, None, None, None, (), None, None, get_ident(), None, None, "", None


def waiting(what: str) -> OpenSpan:
    """Record that the thread that trains waits in the block for work that it gave to another thread or stream."""
    if _active is None or not _active.is_computing():
        return _NOTHING
    return _RecordedSpan(_active, "communication_exposed", "wait", what, _plain_facts(_active.step))


_NOTHING = OpenSpan()
