"""Communication that has begun and not ended, on its way into a `Recorder`, and the clock of a device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Protocol

__all__ = ["DeviceClock", "InFlight"]

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
