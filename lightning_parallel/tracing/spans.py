"""Data that a recorder produces: spans, counts of collectives, the time of a step by phase, samples of many steps."""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Collection
from typing import Generic, NamedTuple, TypeVar

__all__ = ["OTHER", "CallCounter", "Ledger", "Span", "StepSampler", "Window"]

OTHER = "other"
"""The phase of time in which no named phase was running."""

T = TypeVar("T")


class Span(NamedTuple):
    """Something that happened on this rank from `start_ns` to `end_ns`.

    Attributes:
        category: `phase`, `pipeline`, `communication`, `compression`, or another name for a row of the trace.
        name: What is shown: a phase, an action, an operation.
        step: Training batch, from 0.
        stage: Pipeline stage.
        microbatch: Microbatch within the step.
        axis: Mesh axis of a communication.
        op: Operation of a communication, in torch's names.
        bytes: Payload of a communication; None where it is not known.
        blocked_ns: How long the calling thread was blocked, by the call and by the wait for it.
        ranks: Global ranks of the group.
        peer: Global rank at the other end of a point-to-point message.
        dtype: Element type of the payload.
        thread: Identifier of the thread that reported it.
        in_flight: Nanoseconds from the start to the completion, where the calling thread noticed the end only later.
        sequence: How many calls this rank had made in that group (with that peer, operation and tag) before this one.
        tag: Of a point-to-point message; messages of one tag arrive in the order in which they were sent.
        group: Name of the group, the same on all its ranks; several groups may have the same ranks.
    """

    category: str
    name: str
    start_ns: int
    end_ns: int
    step: int
    stage: int | None = None
    microbatch: int | None = None
    axis: str | None = None
    op: str | None = None
    bytes: int | None = None
    blocked_ns: int = 0
    ranks: tuple[int, ...] = ()
    peer: int | None = None
    dtype: str | None = None
    thread: int = 0
    in_flight: int | None = None
    sequence: int | None = None
    tag: int | None = None
    group: str = ""

    @property
    def complete_ns(self) -> int:
        """When the operation itself was complete."""
        return self.end_ns if self.in_flight is None else self.start_ns + self.in_flight


class CallCounter:
    """Counts the collectives that this rank issued in one group.

    Attributes:
        count: How many.
        digest: Hash of their kinds in order: ranks with equal digests issued the same calls.
        recent: The latest ones, as (operation, bytes, dtype).
    """

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self.recent: deque[tuple[str, int | None, str | None]] = deque(maxlen=256)
        self._hashes: dict[tuple[str, int | None, str | None], int] = {}

    def add(self, op: str, num_bytes: int | None, dtype: str | None) -> int:
        """Count a call; returns its number in the group, from 0."""
        # In an all_to_all ranks may send different amounts, so its size must not enter the digest.
        call = (op, None if op == "all_to_all" else num_bytes, dtype)
        call_hash = self._hashes.get(call)
        if call_hash is None:
            call_hash = self._hashes[call] = zlib.crc32(repr(call).encode())
        self.digest = (self.digest * 31 + call_hash) & 0xFFFFFFFF
        self.recent.append(call)
        self.count += 1
        return self.count - 1


class Window(NamedTuple):
    """One step: its nanoseconds by phase, which add up to its length, and the spans that ended in it."""

    step: int
    start_ns: int
    end_ns: int
    phases: dict[str, int]
    spans: list[Span]

    @property
    def wall_ns(self) -> int:
        """Length of the step."""
        return self.end_ns - self.start_ns


class Ledger:
    """Exclusive times of nested phases: every nanosecond is charged to exactly one.

    >>> ledger = Ledger(now_ns=0)
    >>> ledger.enter("optimizer", 10)
    >>> ledger.enter("forward", 20)
    >>> ledger.leave(50)
    >>> ledger.leave(55)
    >>> ledger.close(60)
    {'other': 15, 'optimizer': 15, 'forward': 30}

    Args:
        now_ns: When the first window begins.
        absorbing: Phases that keep the time of all phases nested in them.
    """

    def __init__(self, now_ns: int, absorbing: Collection[str] = ()) -> None:
        self._phases = [OTHER]
        self._absorbing = frozenset(absorbing)
        self._charged: defaultdict[str, int] = defaultdict(int)
        self.last_ns = now_ns

    def enter(self, phase: str, now_ns: int) -> None:
        """Charge the time from now on to `phase`, until `leave`."""
        # Written out instead of a call of `_charge`: this runs for every span of a phase.
        around = self._phases[-1]
        self._charged[around] += now_ns - self.last_ns
        self.last_ns = now_ns
        self._phases.append(around if around in self._absorbing else phase)

    def leave(self, now_ns: int) -> None:
        """Charge the time from now on to the phase around the current one."""
        phases = self._phases
        self._charged[phases[-1]] += now_ns - self.last_ns
        self.last_ns = now_ns
        # One `leave` too many must not break a user's run: the outermost phase stays.
        if len(phases) > 1:
            phases.pop()

    def charge(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Charge a finished interval to `phase`, as `enter` and `leave` would; no phase may have changed since."""
        around = self._phases[-1]
        self._charged[around] += start_ns - self.last_ns
        self._charged[around if around in self._absorbing else phase] += end_ns - start_ns
        self.last_ns = end_ns

    def reassign(self, phase: str, start_ns: int, end_ns: int, now_ns: int) -> int:
        """Charge an interval to `phase` instead of the current one; returns how many nanoseconds were reassigned.

        At most what the current phase was charged in this window, so that no phase becomes negative.
        """
        self._charge(now_ns)
        current = self._phases[-1]
        reassigned = min(max(end_ns - start_ns, 0), self._charged[current])
        self._charged[current] -= reassigned
        self._charged[phase] += reassigned
        return reassigned

    def close(self, now_ns: int) -> dict[str, int]:
        """End the window and begin the next; returns nanoseconds by phase, which add up to its length."""
        self._charge(now_ns)
        # Open phases go on in the next window; only what was charged to them is taken.
        charged = dict(self._charged)
        self._charged.clear()
        return charged

    def _charge(self, now_ns: int) -> None:
        self._charged[self._phases[-1]] += now_ns - self.last_ns
        self.last_ns = now_ns


class StepSampler(Generic[T]):
    """Keeps at most `most` values of steps, evenly spread over the run: the same steps on all ranks.

    >>> kept = StepSampler[float](most=4)
    >>> for step in range(10):
    ...     kept.add(step, 2.0 * step)
    >>> kept.values
    {0: 0.0, 4: 8.0, 8: 16.0}
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._stride = 1
        self.values: dict[int, T] = {}

    def add(self, step: int, value: T) -> None:
        """Keep the value of `step` if it is a multiple of the current stride, which doubles when there are too many."""
        if step % self._stride == 0:
            self.values[step] = value
        # Which steps are kept depends on how many there were, so that ranks keep the same ones without agreeing on it.
        while len(self.values) > self._most:
            self._stride *= 2
            self.values = {step: value for step, value in self.values.items() if step % self._stride == 0}
