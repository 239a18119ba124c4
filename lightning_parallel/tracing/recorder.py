"""The recorder: keeps spans, charges time to phases, and counts the collectives of each group."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
"""Shortest wait whose end counts as the end of the communication. Before a shorter wait, the communication may have
been complete for long, while the thread was computing."""


class DeviceClock(Protocol):
    """Reads when a device reached a point in its queue, without waiting for it."""

    def mark(self) -> Any:
        """Put a mark into the queue."""

    def is_on_main_stream(self) -> bool:
        """Return whether marks now go to the main queue, whose time is charged to phases."""

    def is_main(self, stream: Any) -> bool:
        """Return whether `stream` is the main queue."""

    def completion(self, work: Any, lane: Hashable) -> Any:
        """Create a mark that is passed when `work` is complete; work on other lanes does not delay it."""

    def passed(self, mark: Any) -> bool:
        """Return whether the device has passed `mark`."""

    def read(self, mark: Any) -> int:
        """Return when the device passed `mark`, in `perf_counter_ns`."""

    def synchronize(self) -> None:
        """Wait for the device to pass all marks."""


class InFlight:
    """A communication call that has begun; as a context manager, it records that the call blocks the thread.

    Attributes:
        complete: Time of completion, if known: nanoseconds, or a mark of the device clock.
        tensors: Tensors of the call, if the recorder must keep them alive until its end.
    """

    # Every communication call of a step creates one object; slots keep it cheap.
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
        self._exposes = False  # whether the training thread was blocked, and no other thread
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
        # Keyed by identity, because several equal calls may be in flight. The hang watchdog reads this dict.
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
        """Let the backend note the completion of `work`, which may come long before any wait.

        Args:
            work: Torch's handle.
            on_device: Whether a device carries the communication; its streams then wait instead of the host.
        """
        clock = self._recorder.clock
        if clock is not None:
            if on_device:
                # A lane for each peer: messages from and to a peer do not complete in the order of their start.
                self.complete = clock.completion(work, (self.group, self.op, self.peer))
            return
        # Not every handle is torch's.
        get_future = None if on_device else getattr(work, "get_future", None)
        if get_future is not None:
            try:
                get_future().add_done_callback(self._note_completion)
            except RuntimeError:
                return  # not every operation has a future

    def _note_completion(self, _: Any) -> None:
        # Runs on a thread of gloo, which also completes other collectives. So this must be quick.
        self.complete = perf_counter_ns()

    def note_wait(self, begin: Any, end: Any) -> None:
        """Note a wait from `begin` to `end`; a long wait sets the completion time if it is unknown."""
        if self.complete is None and end - begin > ARRIVAL_NS and self._recorder.clock is None:
            self.complete = end

    @property
    def has_ended(self) -> bool:
        """Whether the device is known to have completed the communication."""
        return self.clock is not None and self.complete is not None and self.clock.passed(self.complete)

    @property
    def is_waited_for(self) -> bool:
        """Whether the communication blocks a thread right now."""
        return len(self._blocked) % 2 == 1

    def __enter__(self) -> None:
        self._blocked.append(self._recorder.now())

    def __exit__(self, *_: object) -> None:
        recorder = self._recorder
        # The first two conditions hold for nearly all calls without a device, and cost no call of Python.
        is_on_host = recorder.clock is None and get_ident() == recorder.main_thread
        if not is_on_host and not recorder.is_computing():
            self._blocked.append(recorder.now())
            return
        between_stages = self.peer is not None or self.axis == "pipeline_parallel"
        phase = "pipeline_wait" if between_stages else "communication_exposed"
        if is_on_host:
            now = perf_counter_ns()
            recorder.charge_host(phase, self._blocked[-1], now)
            self._blocked.append(now)
        else:
            self._blocked.append(recorder.charge(phase, self._blocked[-1]))
        self._exposes = True

    @property
    def released(self) -> Any:
        """Time of the thread's last release from a wait; the start of the call before any wait."""
        return self._blocked[-1] if self._blocked else self.start

    def block(self, begin: Any, end: Any) -> None:
        """Note that the training thread was blocked from `begin` to `end`; the caller charges this time elsewhere."""
        self._blocked += begin, end
        self._exposes = True

    def finish(self, end: Any = None) -> None:
        """Record the span; its end is `end`, or else the end of the last wait."""
        recorder = self._recorder
        if recorder.clock is None:
            recorder.in_flight.pop(id(self), None)
            self.tensors = ()  # with a device, keep them: it may read them until it has passed the completion
        else:
            recorder.land(self)
        blocked = self._blocked
        if end is None:
            end = blocked[-1] if blocked else recorder.now()
        call = recorder.step, None, None, self.axis, self.op, self.bytes, self.ranks, self.peer, self.dtype
        facts = (*call, get_ident(), self.sequence, self.tag, self.group, self.apart)
        recorder.add("communication", self.op, facts, self._exposes, self.start, end, self.complete, *blocked)


SpanFacts = tuple[Any, ...]
"""The fields of a `Span` from `step` to `apart`, in their order."""

Write = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]
"""A function, its first arguments, and device marks; the times of the marks are its last arguments."""

# A step may have thousands of spans, and this takes a third of the time of `Span(...)`.
_new_span = partial(tuple.__new__, Span)


class Recorder:
    """Keeps the latest spans of this process, and the ledger of its main thread.

    Args:
        capacity: Number of spans to keep; older spans are dropped.
        clock: Reads the time of the device; None if the host computes.
        absorbing: Phases that keep the time of all phases nested in them, such as validation.
        calls: Counters to continue, see the attribute.

    Attributes:
        step: Number of the open window.
        now: Reads the clock: nanoseconds, or a mark of the device clock.
        in_flight: Unfinished communication calls; with a device, calls that the device has not finished.
        add: Keeps a finished span, see `_keep`.
        charge_host: Charges an interval of the training thread to a phase, without a device; see `Ledger.charge`.
        calls: Collectives issued in each group, by axis, ranks and name; messages also by operation, peer and tag.
        apart: The running absorbing phase; None outside such phases.
        on_submit: Called when another thread or stream gets work; returns whether a backward pass waits for the work.
        beside: End times of the work for which a backward pass waits, in the order of the ends.
        num_beside: Number of unfinished pieces of such work.
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
        self._beside_lock = threading.Lock()  # work ends on other threads
        self._absorbing = frozenset(absorbing)
        self._num_nested = 0  # phases that began within `apart`
        # Host time even with a device clock: the device clock is anchored to this clock.
        self._ledger = Ledger(perf_counter_ns(), absorbing)
        self.charge_host = self._ledger.charge
        self._start_ns = self._ledger.last_ns
        self._ended: list[Span] = []
        self._windows: list[Window] = []
        # With a device clock, all entries wait here until the device has passed their marks. They stay in the order of
        # their issue, because the ledger needs ordered times.
        self._unread: deque[Write] = deque()
        self.add: Callable[..., None] = self._keep if clock is None else self._keep_later

    # ------------------------------------------------------------------------------------------------------- phases

    def is_main_thread(self) -> bool:
        """Return whether the caller is the training thread, or a thread of autograd, which runs in its place."""
        if get_ident() == self.main_thread:
            return True
        # Autograd starts its threads in C++. Python represents each by a dummy object of a private class.
        return isinstance(threading.current_thread(), threading._DummyThread)

    def is_computing(self) -> bool:
        """Return whether the caller's time is charged to phases: the training thread, in the compute stream."""
        if get_ident() != self.main_thread and not self.is_main_thread():
            return False
        return self.clock is None or self.clock.is_on_main_stream()

    def enter(self, phase: str) -> Any:
        """Charge the main thread's time to `phase`, until `leave`; return `now()`."""
        now = self.now()
        # Compare identifiers first: the call is slower, and the main thread enters almost all phases.
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
        """End the innermost phase; return `now()`."""
        now = self.now()
        if get_ident() == self.main_thread or self.is_main_thread():
            if self._num_nested:
                self._num_nested -= 1
            else:
                # No nested phase is left, so this ends the absorbing phase, if there is one.
                self.apart = None
            if self.clock is None:
                self._ledger.leave(now)
            else:
                self._unread.append((self._ledger.leave, (), (now,)))
        return now

    def charge(self, phase: str, start: Any) -> Any:
        """Charge the time since `start`, and return `now()`; no phase may have begun or ended. See `is_computing`."""
        now = self.now()
        if self.clock is None:
            self._ledger.charge(phase, start, now)
        else:
            self._unread.append((self._ledger.charge, (phase,), (start, now)))
        return now

    def reassign(self, phase: str, start: Any, end: Any, source: str | None = None) -> None:
        """Charge the time between two values of `now()` to `phase` instead of `source`, or of the innermost phase."""
        if self.is_main_thread():
            self._put(partial(self._ledger.reassign, source=source), (phase,), start, end, self.now())

    def submitted(self) -> Callable[[], None] | None:
        """Note that another thread or stream gets work; return a function to call at its end, or None."""
        # Outside a backward pass, the caller waits for its work by itself.
        if self.on_submit is None or not self.on_submit():
            return None
        with self._beside_lock:
            self.num_beside += 1
        return self._note_done

    def _note_done(self) -> None:
        self.beside.append(self.now())
        with self._beside_lock:
            self.num_beside -= 1

    def add_wait(self, name: str, start: Any, end: Any) -> None:
        """Keep a wait of the training thread; the caller charges its time elsewhere."""
        self.add("wait", name, _plain_facts(self.step), False, start, end)

    # -------------------------------------------------------------------------------------------------------- spans

    def land(self, flight: InFlight) -> None:
        """Remove a call from the calls in flight, after its completion on the device if there is one."""
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
        # Not `setdefault`, which would make a counter for each call.
        calls = self.calls.get(key)
        if calls is None:
            calls = self.calls[key] = CallCounter()
        return calls

    def last_steps(self, count: int) -> list[Span]:
        """Return the spans of the last `count` steps, oldest first; any thread may call it."""
        first = self.step - count
        # Copy first: the main thread may append during the iteration.
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
            exposes: Whether the training thread was blocked, and no other thread.
            start_ns: Start of the span.
            end_ns: End of the span.
            complete_ns: Completion of a communication, if known.
            blocked_ns: Begin and end of each interval in which the calling thread was blocked.
        """
        # A loop: a generator would take most of the time of a call, which blocks in its begin and in its wait.
        total_ns = 0
        for place in range(1, len(blocked_ns), 2):
            if blocked_ns[place] > blocked_ns[place - 1]:
                total_ns += blocked_ns[place] - blocked_ns[place - 1]
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
        """End the step; return the steps that completed since the last call. Without a device, this is the ended step.

        Args:
            wait: Wait for the device, so that the result includes the ended step.
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
            # Stop at the first unread mark: the ledger needs non-decreasing times, and a window needs all its spans.
            function, arguments, marks = unread[0]
            if not all(mark is None or clock.passed(mark) for mark in marks):
                return
            times = [None if mark is None else clock.read(mark) for mark in marks]
            function(*arguments, *times)
            unread.popleft()


# One recorder per process, so that code can name spans without getting a recorder. No context variable, because
# threads of autograd and communication must see the same recorder.
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
    """Return whether recording is suspended: the running code is no part of the measured run."""
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
    """Record the block as a span, and charge its time to `phase`, if given."""
    if _active is None:
        return _NOTHING
    return _RecordedSpan(_active, phase, category, name, _plain_facts(_active.step, stage, microbatch))


class OpenSpan(AbstractContextManager["OpenSpan"]):
    """A span that has begun; this base class does nothing, and stands in if no recorder is active."""

    __slots__ = ()

    def restart(self) -> None:
        """Begin the span now: the time before was waiting."""

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
    """Return the facts of a span without communication."""
    return step, stage, microbatch, None, None, None, (), None, None, get_ident(), None, None, "", None


def waiting(what: str) -> OpenSpan:
    """Record the block as a wait of the training thread for its work on another thread or stream."""
    if _active is None or not _active.is_computing():
        return _NOTHING
    return _RecordedSpan(_active, "communication_exposed", "wait", what, _plain_facts(_active.step))


# One shared object, so that a span without a recorder allocates nothing.
_NOTHING = OpenSpan()
