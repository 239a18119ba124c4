"""Measured values and their formatting.

The module has spans, counts of collectives, the times of a step by phase, samples of steps, and a formatter per unit.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from rich.console import Console

__all__ = [
    "is_verbose",
    "OTHER",
    "CallCounter",
    "Ledger",
    "Span",
    "StepSampler",
    "Window",
    "bandwidth_text",
    "bytes_text",
    "count_text",
    "duration_text",
    "expose",
    "gap_text",
    "percent",
    "printable",
    "rank_label",
    "seconds_text",
    "show",
]

OTHER = "other"
"""Phase of the time outside all named phases."""

WIDTH_OF_FILES = 120
"""Width in columns of a table outside a terminal."""

T = TypeVar("T")


class Span(NamedTuple):
    """An event on this rank from `start_ns` to `end_ns`.

    Attributes:
        category: `phase`, `pipeline`, `communication`, `compression`, `wait` (the training thread waited for another
            thread), or another name for a row of the trace.
        name: Displayed name: a phase, an action or an operation.
        step: Training batch, from 0.
        stage: Pipeline stage.
        microbatch: Microbatch within the step.
        axis: Mesh axis of a communication.
        op: Operation of a communication, in torch's names.
        bytes: Payload of a communication; None if unknown.
        ranks: Global ranks of the group.
        peer: Global rank at the other end of a point-to-point message.
        dtype: Element type of the payload.
        thread: Identifier of the reporting thread.
        sequence: Number of earlier calls of this rank in the group; for messages, with the same peer, operation and
            tag.
        tag: Tag of a point-to-point message; messages of one tag arrive in the order of their sends.
        group: Name of the group, the same on all its ranks; several groups may have the same ranks.
        apart: The phase outside the steps in which the span began, such as validation.
        blocked_ns: Nanoseconds for which the call and its wait blocked the calling thread.
        in_flight: Nanoseconds from the start to the completion, if known.
        exposed_ns: Nanoseconds for which the training thread stood still for the span. If the training thread made the
            call, the value equals `blocked_ns`. Otherwise it is the overlap with waits for the calling thread.
    """

    category: str
    name: str
    start_ns: int
    end_ns: int
    # From here to `apart`: the `SpanFacts` of the recorder, in this order.
    step: int
    stage: int | None = None
    microbatch: int | None = None
    axis: str | None = None
    op: str | None = None
    bytes: int | None = None
    ranks: tuple[int, ...] = ()
    peer: int | None = None
    dtype: str | None = None
    thread: int = 0
    sequence: int | None = None
    tag: int | None = None
    group: str = ""
    apart: str | None = None
    # Computed from the times of a communication.
    blocked_ns: int = 0
    in_flight: int | None = None
    exposed_ns: int = 0

    @property
    def complete_ns(self) -> int:
        """Time of the completion of the operation."""
        return self.end_ns if self.in_flight is None else self.start_ns + self.in_flight


class CallCounter:
    """Counts the collectives that this rank issued in one group.

    Attributes:
        count: Number of calls.
        digest: Hash of the ordered kinds of the calls: ranks with equal digests issued the same calls.
        recent: The latest calls, as (operation, bytes, dtype).
    """

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self.recent: deque[tuple[str, int | None, str | None]] = deque(maxlen=256)
        self._hashes: dict[tuple[str, int | None, str | None], int] = {}

    def add(self, op: str, num_bytes: int | None, dtype: str | None) -> int:
        """Count a call; return its number in the group, from 0."""
        # In an all_to_all, ranks may send different amounts, so its size must not enter the digest.
        call = (op, None if op == "all_to_all" else num_bytes, dtype)
        # Every step repeats the same few calls, so cache their hashes. `hash` of a string differs between processes.
        call_hash = self._hashes.get(call)
        if call_hash is None:
            call_hash = self._hashes[call] = zlib.crc32(repr(call).encode())
        # The order counts: ranks that issue the same calls in another order wait for each other.
        self.digest = (self.digest * 31 + call_hash) & 0xFFFFFFFF
        self.recent.append(call)
        self.count += 1
        return self.count - 1


class Window(NamedTuple):
    """One step: its nanoseconds by phase, which add up to its length, and all spans that ended in the step."""

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
    """Exclusive times of nested phases: every nanosecond is charged to exactly one phase.

    >>> ledger = Ledger(now_ns=0)
    >>> ledger.enter("optimizer", 10)
    >>> ledger.enter("forward", 20)
    >>> ledger.leave(50)
    >>> ledger.leave(55)
    >>> ledger.close(60)
    {'other': 15, 'optimizer': 15, 'forward': 30}

    Args:
        now_ns: Start of the first window.
        absorbing: Phases that keep the time of all phases nested in them.
    """

    def __init__(self, now_ns: int, absorbing: Collection[str] = ()) -> None:
        self._phases = [OTHER]
        self._absorbing = frozenset(absorbing)
        self._charged: defaultdict[str, int] = defaultdict(int)
        self.last_ns = now_ns

    def enter(self, phase: str, now_ns: int) -> None:
        """Charge the time from now on to `phase`, until `leave`."""
        # Inlined `_charge`: this runs for every span of a phase.
        around = self._phases[-1]
        self._charged[around] += now_ns - self.last_ns
        self.last_ns = now_ns
        self._phases.append(around if around in self._absorbing else phase)

    def leave(self, now_ns: int) -> None:
        """Charge the time from now on to the phase around the current one."""
        phases = self._phases
        self._charged[phases[-1]] += now_ns - self.last_ns
        self.last_ns = now_ns
        # A surplus `leave` must not break a user's run, so the outermost phase stays.
        if len(phases) > 1:
            phases.pop()

    def charge(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Charge a finished interval to `phase`, as `enter` and `leave` would; no phase may have changed since."""
        around = self._phases[-1]
        self._charged[around] += start_ns - self.last_ns
        self._charged[around if around in self._absorbing else phase] += end_ns - start_ns
        self.last_ns = end_ns

    def reassign(self, phase: str, start_ns: int, end_ns: int, now_ns: int, source: str | None = None) -> int:
        """Charge an interval to `phase` instead of `source`, by default the current phase; return the nanoseconds."""
        self._charge(now_ns)
        # Move at most the time charged to the source in this window, so that no phase becomes negative.
        current = self._phases[-1] if source is None else source
        reassigned = min(max(end_ns - start_ns, 0), self._charged[current])
        self._charged[current] -= reassigned
        self._charged[phase] += reassigned
        return reassigned

    def close(self, now_ns: int) -> dict[str, int]:
        """End the window and begin the next window; return nanoseconds by phase, which add up to its length."""
        self._charge(now_ns)
        # Open phases continue in the next window, so take only their charged time.
        charged = dict(self._charged)
        self._charged.clear()
        return charged

    def _charge(self, now_ns: int) -> None:
        self._charged[self._phases[-1]] += now_ns - self.last_ns
        self.last_ns = now_ns


def expose(spans: list[Span]) -> list[Span]:
    """Set `exposed_ns` of communication on other threads: its overlap with waits of the training thread.

    >>> lane = Span("communication", "all_reduce", 0, 90, 0, blocked_ns=50)
    >>> expose([lane, Span("wait", "backward", 70, 100, 0)])[0].exposed_ns
    20
    """
    waits = [(span.start_ns, span.end_ns) for span in spans if span.category == "wait"]
    if not waits:
        return spans
    exposed = []
    for span in spans:
        # `exposed_ns` is set already if the training thread made the call.
        if span.category == "communication" and span.blocked_ns and not span.exposed_ns:
            since = span.end_ns - span.blocked_ns
            overlap = sum(max(0, min(span.end_ns, end) - max(since, begin)) for begin, end in waits)
            span = span._replace(exposed_ns=overlap)
        exposed.append(span)
    return exposed


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
        # The kept steps depend only on the number of steps, so ranks keep the same steps without any agreement.
        while len(self.values) > self._most:
            self._stride *= 2
            self.values = {step: value for step, value in self.values.items() if step % self._stride == 0}


# -------------------------------------------------------------------------------------------------- as people read them


def percent(share: float) -> str:
    """Format a share: `0.0734` as `7.3 %`."""
    # From 9.95 % on, rounding to one decimal would give three digits.
    return f"{share * 100:.1f} %" if abs(share) < 0.0995 else f"{share * 100:.0f} %"


def seconds_text(seconds: float) -> str:
    """Format seconds in a suitable unit, with three digits: `0.01234` as `12.3 ms`."""
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{count_text(seconds / size)} {unit}"
    return f"{count_text(seconds * 1e6)} us" if seconds else "0"


def duration_text(seconds: float) -> str:
    """Format seconds of a run in a suitable unit: `5400` as `1.5 h`."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{count_text(seconds / size)} {unit}"
    return seconds_text(seconds)


def bytes_text(count: float) -> str:
    """Format bytes in binary units: `1572864` as `1.5 MiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count_text(count / size)} {unit}"
    return f"{count:.0f} B"


def bandwidth_text(bytes_per_s: float) -> str:
    """Format a bandwidth: `1.25e10` as `12.5 GB/s`."""
    return f"{count_text(bytes_per_s / 1e9)} GB/s"


def count_text(value: float) -> str:
    """Format a number with three digits, or with all digits before the point: `1234.5` as `1,234`."""
    # From 1000 on, `.3g` would write an exponent.
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def printable(text: object, keep: str = "") -> str:
    """Return foreign text in a safe form for a terminal: control characters are spelled out.

    Args:
        text: The text.
        keep: Control characters to keep, such as line ends.
    """
    found = str(text)
    if found.isprintable():
        return found
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode("ascii") for one in found
    )


def gap_text(points: Sequence[Sequence[Any]]) -> str:
    """Name the steps at which a curve has no finite value; empty if all its values are finite.

    Args:
        points: (step, value), in the order of the steps; None for a value that was not finite.

    >>> gap_text([(0, 0.5), (1, None), (2, 0.4), (3, None), (4, None)])
    'not finite from step 3 on'
    """
    gaps = [step for step, value in points if value is None]
    if not gaps:
        return ""
    if points[-1][1] is None:
        last = max((step for step, value in points if value is not None), default=-1)
        return f"not finite from step {min(step for step in gaps if step > last)} on"
    return f"not finite at {len(gaps)} of {len(points)} points, first at step {gaps[0]}"


def rank_label(entry: Mapping[str, Any], mesh: Mapping[str, int]) -> str:
    """Label a rank with its coordinate on axes of several ranks, by first letters of the axes: `rank 3 · d1 t1`."""
    coordinate = entry.get("coordinate") or {}
    places = [f"{axis[0]}{coordinate[axis]}" for axis, size in mesh.items() if size > 1 and axis in coordinate]
    return f"rank {entry['rank']}" + (f" · {' '.join(places)}" if places else "")


LOG_VARIABLE = "LIGHTNING_PARALLEL_LOG"


def is_verbose() -> bool:
    """Return whether to print tables and lines: True unless `LIGHTNING_PARALLEL_LOG=warning`.

    Raises:
        ValueError: If the variable has another value than `info` or `warning`.
    """
    level = os.environ.get(LOG_VARIABLE, "info").lower()
    if level not in ("info", "warning"):
        raise ValueError(f"`{LOG_VARIABLE}` must be `info` or `warning`; got `{level}`")
    return level == "info"


def show(renderable: Any) -> None:
    """Print a table, 120 columns wide if the output is no terminal."""
    if not is_verbose():
        return
    console = Console(highlight=False)
    # For a log file, `rich` assumes 80 columns, which truncates the tables of a run.
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = WIDTH_OF_FILES
    console.print(renderable)
