"""One trace of all ranks, in the Chrome trace format, which Perfetto opens.

A process of the trace is a rank; its rows are computation, data, optimizer, communication along each axis. Arrows lead
from the sending of each message to its receipt. Times are on the clock of rank 0; `otherData`
holds the possible error of other clocks. Traces of `torch.profiler` can be added on the same clock.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from typing_extensions import override

from lightning_parallel.callbacks.recording.clocks import ClockOffset
from lightning_parallel.callbacks.recording.measuring import Accumulator
from lightning_parallel.checkpoint.place import NewFile, put_file
from lightning_parallel.tracing import Span, Window

__all__ = ["TraceAccumulator", "add_kineto", "chrome_trace", "read_json", "read_trace", "write_trace"]

Event = dict[str, Any]
Part = Mapping[str, Any]
"""One rank's contribution to the trace, see `TraceAccumulator.part`."""

_ROWS = ("steps", "compute", "data", "optimizer", "compression", "other")
"""Rows of a rank from top to bottom; rows of communication come after the optimizer."""
_ROW_OF = {
    "forward": "compute",
    "backward": "compute",
    "validation": "compute",
    "checkpoint": "other",
    "data_wait": "data",
    "optimizer": "optimizer",
}
_ROW_SPACING = 100
"""Distance between the numbers of rows: spans that overlap other spans of their row get extra rows below it."""
_FIRST_KINETO_ROW = 100_000
"""First row of `torch.profiler`, below the rows of this library."""
_SMALL = 1 << 26
"""Bytes up to which the compression ratio of a file is not checked."""
_MOST_INFLATED = 50
"""Highest compression ratio of larger files: traces reach 30, a decompression bomb 1000."""


class TraceAccumulator(Accumulator):
    """Keeps the spans of the last steps of this rank.

    Args:
        place: `rank` and `coordinate` of this process.
        steps: Number of steps to keep.
    """

    def __init__(self, place: Mapping[str, Any], steps: int) -> None:
        self._place = dict(place)
        self._windows: deque[Window] = deque(maxlen=steps)

    @override
    def add(self, window: Window) -> None:
        self._windows.append(window)

    @override
    def share(self) -> None:
        """Share nothing: the ranks exchange spans after training, see `part`."""

    @override
    def summarize(self, shared: Sequence[Any]) -> dict[str, Any]:
        return {}

    def part(self, clock: ClockOffset | None, unfinished: Sequence[Span] = ()) -> dict[str, Any]:
        """Return the part of this rank in the trace, as values for JSON.

        Args:
            clock: Offset of this rank's clock; None if the clocks of the ranks could not be compared.
            unfinished: Spans of a step without an end.
        """
        steps = [[window.step, window.start_ns, window.end_ns] for window in self._windows]
        spans = [list(span) for window in self._windows for span in window.spans]
        if unfinished:
            times = [time for span in unfinished for time in (span.start_ns, span.end_ns)]
            steps.append([unfinished[-1].step, min(times), max(times)])
            spans += [list(span) for span in unfinished]
        return {**self._place, "clock": None if clock is None else clock._asdict(), "steps": steps, "spans": spans}


def chrome_trace(parts: Sequence[Part], mesh: Mapping[str, int]) -> dict[str, Any]:
    """Merge the parts of the ranks.

    Args:
        parts: Parts of any ranks. The trace omits parts without a compared clock, and `otherData` names their ranks.
        mesh: Size of each axis.
    """
    parts = [part for part in parts if part["steps"]]
    known = [part for part in parts if part["clock"] is not None]
    # Times count from the first step in the trace, because viewers begin at 0.
    origin = min((part["steps"][0][1] + part["clock"]["offset_ns"] for part in known), default=0)
    ranks = [_Rank(part, origin, mesh) for part in known]
    events = [event for rank in ranks for event in rank.names()]
    # Match messages before creating events: the drawn length of a send depends on the receipt of its message.
    messages = list(_messages(ranks))
    for rank in ranks:
        events += rank.events()
    for number, (sender, sent, receiver, received) in enumerate(messages):
        events += _arrow(number, sender.event_of(sent), receiver.event_of(received))
    other = {
        "mesh": dict(mesh),
        "origin_ns": origin,
        "clocks": [{"rank": part["rank"], **part["clock"]} for part in known],
        "left_out": [part["rank"] for part in parts if part not in known],
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


class _Rank:
    """One rank's spans on the common clock, each with its row."""

    def __init__(self, part: Part, origin: int, mesh: Mapping[str, int]) -> None:
        self.rank = part["rank"]
        self.shift = part["clock"]["offset_ns"] - origin
        coordinate = [f"{axis} {part['coordinate'][axis]}" for axis, size in mesh.items() if size > 1]
        self.name = f"rank {self.rank}: {', '.join(coordinate)}" if coordinate else f"rank {self.rank}"
        self.spans = [_span(fields) for fields in part["spans"]]
        self.steps = part["steps"]
        self.received_ns: dict[int, int] = {}
        self._events: dict[int, Event] = {}

    def common(self, time_ns: int) -> int:
        """Convert a time of this rank to the common clock; nanoseconds."""
        return time_ns + self.shift

    def interval(self, index: int) -> tuple[int, int]:
        """Return the drawn start and end of a span, on this rank's clock."""
        span = self.spans[index]
        # A receive is posted long before its message is needed, so draw only the wait.
        if span.op == "recv":
            return max(span.start_ns, min(span.end_ns - span.blocked_ns, span.end_ns - 1)), span.end_ns
        end = span.complete_ns if span.category == "communication" else span.end_ns
        return span.start_ns, min(end, self.received_ns.get(index, end))

    def names(self) -> Iterator[Event]:
        """Yield the name of the process, and its place among the ranks."""
        yield _metadata("process_name", self.rank, 0, name=self.name)
        yield _metadata("process_sort_index", self.rank, 0, sort_index=self.rank)

    def events(self) -> Iterator[Event]:
        """Yield all spans, row by row."""
        rows: dict[str, list[int]] = {}
        for index, span in enumerate(self.spans):
            rows.setdefault(_row_of(span), []).append(index)
        order = [*_ROWS[:4], *sorted(row for row in rows if row not in _ROWS), *_ROWS[4:]]
        yield from self._steps()
        for number, row in enumerate(order):
            if row in rows:
                yield from self._row(row, number * _ROW_SPACING, rows)

    def _steps(self) -> Iterator[Event]:
        yield _metadata("thread_name", self.rank, 0, name="steps")
        for step, start, end in self.steps:
            yield self._event(f"step {step}", "step", 0, start, end, {})

    def _row(self, row: str, first: int, rows: Mapping[str, Sequence[int]]) -> Iterator[Event]:
        pieces = [(*self.interval(index), index) for index in rows[row]]
        # Lightning runs forward and backward inside the optimizer's step. Cut them out, so that the row shows only the
        # optimizer.
        if row == "optimizer":
            inner = sorted(self.interval(index) for index in rows.get("compute", ()))
            pieces = [(*left, index) for start, end, index in pieces for left in _outside(start, end, inner)]
        named: set[int] = set()
        for (start, end, index), offset in _without_overlap(pieces):
            tid = first + offset
            if offset not in named:
                named.add(offset)
                yield _metadata("thread_name", self.rank, tid, name=row if offset == 0 else f"{row} ({offset + 1})")
                yield _metadata("thread_sort_index", self.rank, tid, sort_index=tid)
            span = self.spans[index]
            event = self._event(span.name, span.category, tid, start, end, _arguments(span))
            self._events[index] = event
            yield event

    def _event(self, name: str, category: str, tid: int, start: int, end: int, arguments: Event) -> Event:
        times = {"ts": self.common(start) / 1e3, "dur": (end - start) / 1e3}
        return {"ph": "X", "name": name, "cat": category, "pid": self.rank, "tid": tid, **times, "args": arguments}

    def event_of(self, index: int) -> Event:
        """Return the event of a span; call `events` first."""
        return self._events[index]


def _span(fields: Sequence[Any]) -> Span:
    span = Span(*fields)
    # JSON has no tuples, and the ranks are part of the keys by which messages are matched.
    return span._replace(ranks=tuple(span.ranks))


def _row_of(span: Span) -> str:
    if span.category == "communication":
        return f"communication: {(span.axis or '').replace('_', ' ')}"
    if span.category == "pipeline":
        return "compute"
    return "compression" if span.category == "compression" else _ROW_OF.get(span.name, "other")


def _arguments(span: Span) -> Event:
    found: Event = {}
    for name in ("step", "stage", "microbatch", "bytes", "dtype", "peer", "sequence"):
        value = getattr(span, name)
        if value is not None:
            found[name] = value
    if span.category == "communication":
        found |= {"ranks": list(span.ranks), "waited_us": span.blocked_ns / 1e3}
    return found


def _metadata(what: str, pid: int, tid: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}


# ---------------------------------------------------------------------------------------------------------- geometry


def _outside(start: int, end: int, inner: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of an interval outside all `inner` intervals, which are sorted."""
    for inner_start, inner_end in inner:
        if inner_end > start and inner_start < end:
            if inner_start > start:
                yield start, inner_start
            start = max(start, inner_end)
    if start < end:
        yield start, end


def _without_overlap(pieces: Iterable[tuple[int, int, int]]) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Yield each (start, end, index) with its first row without a partial overlap with other spans.

    Viewers draw nested spans on top of each other, but not spans that overlap only in part.
    """
    rows: list[list[int]] = []  # for each row, the ends of the spans that are open, the innermost last
    # Of two spans with one start, the longer span comes first, because it contains the shorter span.
    for piece in sorted(pieces, key=lambda piece: (piece[0], -piece[1])):
        start, end, _ = piece
        for open_ends in rows:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
        fitting = (number for number, open_ends in enumerate(rows) if not open_ends or end <= open_ends[-1])
        number = next(fitting, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(end)
        yield piece, number


# ---------------------------------------------------------------------------------------------------------- messages


def _messages(ranks: Sequence[_Rank]) -> Iterator[tuple[_Rank, int, _Rank, int]]:
    """Yield every message with two known ends: sender, index of its span, receiver, index of its span."""
    # The group is part of the key: two groups of the same ranks number their messages independently.
    sent = {
        (rank.rank, span.peer, span.ranks, span.group, span.tag, span.sequence): (rank, index)
        for rank in ranks
        for index, span in enumerate(rank.spans)
        if span.op == "send"
    }
    for receiver in ranks:
        for received, span in enumerate(receiver.spans):
            key = (span.peer, receiver.rank, span.ranks, span.group, span.tag, span.sequence)
            if span.op == "recv" and key in sent:
                sender, index = sent[key]
                # The send ends at the latest with the receipt of the message.
                arrival = receiver.common(span.end_ns) - sender.shift
                sender.received_ns[index] = max(arrival, sender.spans[index].start_ns + 1)
                yield sender, index, receiver, received


def _arrow(number: int, sent: Event, received: Event) -> list[Event]:
    common = {"name": "message", "cat": "message", "id": number}
    start = {"ph": "s", "pid": sent["pid"], "tid": sent["tid"], "ts": sent["ts"]}
    # An arrow ends at the span around its time, and the last moment of a span does not count as inside.
    end = {"ph": "f", "bp": "e", "pid": received["pid"], "tid": received["tid"]}
    return [common | start, common | end | {"ts": received["ts"] + received["dur"] * 0.999}]


# ------------------------------------------------------------------------------------------------------ torch.profiler


def add_kineto(trace: dict[str, Any], kineto: Mapping[str, Any], rank: int | None = None) -> int:
    """Add the events of one rank's profiler to a trace of `chrome_trace`, on its clock, under that rank's process.

    Args:
        trace: Changed in place.
        kineto: Trace that `torch.profiler` exported.
        rank: The profiled rank; by default the rank in the profiler's trace, which exists if torch is distributed.

    Returns:
        The rank.

    Raises:
        ValueError: If the rank is unknown, or has no part in `trace`.
    """
    if rank is None:
        rank = kineto.get("distributedInfo", {}).get("rank")
    clocks = {clock["rank"]: clock for clock in trace["otherData"]["clocks"]}
    if rank is None and len(clocks) == 1:
        (rank,) = clocks
    if rank not in clocks:
        raise ValueError(f"The profile must be of one of the ranks {sorted(clocks)}; got rank {rank}")
    clock = clocks[rank]
    # The profiler's times are Unix time since its base; ours are rank 0's `perf_counter_ns` since the origin.
    shift_ns = kineto.get("baseTimeNanoseconds", 0) - clock["unix_ns"] + clock["offset_ns"]
    shift_us = (shift_ns - trace["otherData"]["origin_ns"]) / 1e3
    rows: dict[tuple[Any, Any], int] = {}
    arrows: dict[tuple[Any, Any], int] = {}
    first_arrow = max((event["id"] for event in trace["traceEvents"] if "id" in event), default=-1) + 1
    for event in kineto["traceEvents"]:
        # The profiler's processes become rows of the rank. Of its metadata, only names of threads make sense there.
        if event["ph"] == "M" and event["name"] != "thread_name":
            continue
        row = rows.setdefault((event.get("pid"), event.get("tid")), _FIRST_KINETO_ROW + len(rows))
        moved = {**event, "pid": rank, "tid": row}
        if "ts" in event and event["ph"] != "M":
            moved["ts"] = event["ts"] + shift_us
        # Viewers join arrows with equal numbers, so number the profiler's arrows after the existing arrows.
        if "id" in event:
            moved["id"] = first_arrow + arrows.setdefault((event.get("cat"), event["id"]), len(arrows))
        trace["traceEvents"].append(moved)
    return rank


# ------------------------------------------------------------------------------------------------------------- files


def write_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Write a trace, compressed."""

    def write(target: NewFile) -> None:
        with gzip.open(cast(IO[bytes], target), "wt", encoding="utf-8", compresslevel=6) as file:
            json.dump(trace, file, separators=(",", ":"))

    put_file(path, write)


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace, of this library or of `torch.profiler`, compressed or not.

    Raises:
        ValueError: If the file is not a trace.
    """
    trace = read_json(path)
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        raise ValueError(f"{path} must hold a trace with `traceEvents`")
    return trace


def read_json(path: Path) -> Any:
    """Read JSON, compressed or not.

    Raises:
        ValueError: If the file holds something else, or is not whole.
    """
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    most = max(_SMALL, _MOST_INFLATED * path.stat().st_size)
    try:
        with opener(path, "rb") as file:
            # Bounded: a decompression bomb must not fill the memory before the check.
            content = file.read(most + 1)
            if len(content) > most:
                raise ValueError(f"it holds more than {_MOST_INFLATED} times its size")
            return json.loads(content)
    except (ValueError, RecursionError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must hold JSON, compressed if its name ends in .gz: {error}") from error
