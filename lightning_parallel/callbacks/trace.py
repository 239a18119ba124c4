"""One trace of all ranks, in the Chrome trace format, which Perfetto opens.

A process of the trace is a rank; its rows are computation, data, optimizer, communication along each axis. Arrows lead
from each message's sending to its receiving. Times are those of rank 0's clock; how far the others may be off is in
`otherData`.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_parallel.callbacks.clocks import ClockOffset
from lightning_parallel.callbacks.measuring import Accumulator
from lightning_parallel.tracing import Span, Window

__all__ = ["TraceAccumulator", "chrome_trace", "read_json", "read_trace", "write_trace"]

Event = dict[str, Any]
Part = Mapping[str, Any]

_ROWS = ("steps", "compute", "data", "optimizer", "compression", "other")
_ROW_OF = {
    "forward": "compute",
    "backward": "compute",
    "validation": "compute",
    "checkpoint": "other",
    "data_wait": "data",
    "optimizer": "optimizer",
}
_LANES = 100
"""Rows are this far apart: spans of one row that overlap are drawn in rows of their own below it."""


class TraceAccumulator(Accumulator):
    """The spans of the last steps of this rank.

    Args:
        place: `rank` and `coordinate` of this process.
        steps: How many steps to keep.
    """

    def __init__(self, place: Mapping[str, Any], steps: int) -> None:
        self._place = dict(place)
        self._windows: deque[Window] = deque(maxlen=steps)

    @override
    def add(self, window: Window) -> None:
        self._windows.append(window)

    @override
    def share(self) -> None:
        """Nothing: spans are exchanged when training has ended, see `part`."""

    @override
    def summarize(self, shared: Sequence[Any]) -> dict[str, Any]:
        return {}

    def part(self, clock: ClockOffset | None, unfinished: Sequence[Span] = ()) -> dict[str, Any]:
        """What this rank contributes to the trace; JSON can hold it.

        Args:
            clock: None where the clocks of the ranks could not be compared.
            unfinished: Spans of a step that did not end.
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
        parts: Of any ranks; those whose clock could not be compared are left out, and named in `otherData`.
        mesh: Size of each axis.
    """
    parts = [part for part in parts if part["steps"]]
    known = [part for part in parts if part["clock"] is not None]
    origin = min((part["steps"][0][1] + part["clock"]["offset_ns"] for part in known), default=0)
    ranks = [_Rank(part, origin, mesh) for part in known]
    events = [event for rank in ranks for event in rank.names()]
    messages = list(_messages(ranks))
    for rank in ranks:
        events += rank.events()
    for number, (sender, sent, receiver, received) in enumerate(messages):
        events += _arrow(number, sender.place_of(sent), receiver.place_of(received))
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
        self.rank, self.shift = part["rank"], part["clock"]["offset_ns"] - origin
        places = [f"{axis} {part['coordinate'][axis]}" for axis, size in mesh.items() if size > 1]
        self.name = f"rank {self.rank}: {', '.join(places)}" if places else f"rank {self.rank}"
        self.spans = [_span(fields) for fields in part["spans"]]
        self.steps = part["steps"]
        self.received_ns: dict[int, int] = {}
        self._places: dict[int, Event] = {}

    def common(self, time_ns: int) -> int:
        """A time of this rank on the common clock."""
        return time_ns + self.shift

    def interval(self, index: int) -> tuple[int, int]:
        """From when to when a span is drawn, on this rank's clock."""
        span = self.spans[index]
        if span.op == "recv":  # posted long before it is waited for
            return max(span.start_ns, min(span.end_ns - span.blocked_ns, span.end_ns - 1)), span.end_ns
        end = span.complete_ns if span.category == "communication" else span.end_ns
        return span.start_ns, min(end, self.received_ns.get(index, end))

    def names(self) -> Iterator[Event]:
        """Metadata: what process and rows are called."""
        yield _metadata("process_name", self.rank, 0, name=self.name)
        yield _metadata("process_sort_index", self.rank, 0, sort_index=self.rank)

    def events(self) -> Iterator[Event]:
        """All spans, row by row."""
        rows: dict[str, list[int]] = {}
        for index, span in enumerate(self.spans):
            rows.setdefault(_row_of(span), []).append(index)
        order = [*_ROWS[:4], *sorted(row for row in rows if row not in _ROWS), *_ROWS[4:]]
        yield from self._steps()
        for number, row in enumerate(order):
            if row in rows:
                yield from self._row(row, number * _LANES, rows)

    def _steps(self) -> Iterator[Event]:
        yield _metadata("thread_name", self.rank, 0, name="steps")
        for step, start, end in self.steps:
            yield self._event(f"step {step}", "step", 0, start, end, {})

    def _row(self, row: str, first: int, rows: Mapping[str, Sequence[int]]) -> Iterator[Event]:
        pieces = [(*self.interval(index), index) for index in rows[row]]
        if row == "optimizer":  # Lightning runs forward and backward inside of it
            inner = sorted(self.interval(index) for index in rows.get("compute", ()))
            pieces = [(*left, index) for start, end, index in pieces for left in _less(start, end, inner)]
        lanes: set[int] = set()
        for (start, end, index), lane in _in_lanes(pieces):
            if lane not in lanes:
                lanes.add(lane)
                name = row if lane == 0 else f"{row} ({lane + 1})"
                yield _metadata("thread_name", self.rank, first + lane, name=name)
                yield _metadata("thread_sort_index", self.rank, first + lane, sort_index=first + lane)
            span = self.spans[index]
            event = self._event(span.name, span.category, first + lane, start, end, _arguments(span))
            self._places[index] = event
            yield event

    def _event(self, name: str, category: str, tid: int, start: int, end: int, arguments: Event) -> Event:
        times = {"ts": self.common(start) / 1e3, "dur": (end - start) / 1e3}
        return {"ph": "X", "name": name, "cat": category, "pid": self.rank, "tid": tid, **times, "args": arguments}

    def place_of(self, index: int) -> Event:
        """The event of a span, after `events`."""
        return self._places[index]


def _span(fields: Sequence[Any]) -> Span:
    span = Span(*fields)
    return span._replace(ranks=tuple(span.ranks))


def _row_of(span: Span) -> str:
    if span.category == "communication":
        return f"communication: {(span.axis or '').replace('_', ' ')}"
    if span.category == "pipeline":
        return "compute"
    return "compression" if span.category == "compression" else _ROW_OF.get(span.name, "other")


def _arguments(span: Span) -> Event:
    names = ("step", "stage", "microbatch", "bytes", "dtype", "peer", "sequence")
    found = {name: value for name in names if (value := getattr(span, name)) is not None}
    if span.category == "communication":
        found |= {"ranks": list(span.ranks), "waited_us": span.blocked_ns / 1e3}
    return found


def _metadata(what: str, pid: int, tid: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}


# ---------------------------------------------------------------------------------------------------------- geometry


def _less(start: int, end: int, inner: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What is left of an interval without others, which are sorted."""
    for other_start, other_end in inner:
        if other_end > start and other_start < end:
            if other_start > start:
                yield start, other_start
            start = max(start, other_end)
    if start < end:
        yield start, end


def _in_lanes(pieces: Iterable[tuple[int, int, int]]) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Give each piece the first lane in which it lies apart from the others, or inside of another."""
    lanes: list[list[int]] = []
    for piece in sorted(pieces, key=lambda piece: (piece[0], -piece[1])):
        start, end, _ = piece
        for ends in lanes:
            while ends and ends[-1] <= start:
                ends.pop()
        number = next((n for n, ends in enumerate(lanes) if not ends or end <= ends[-1]), len(lanes))
        if number == len(lanes):
            lanes.append([])
        lanes[number].append(end)
        yield piece, number


# ---------------------------------------------------------------------------------------------------------- messages


def _messages(ranks: Sequence[_Rank]) -> Iterator[tuple[_Rank, int, _Rank, int]]:
    """Every message whose both ends are known. The sending is over, at the latest, when it has been received."""
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
                arrival = receiver.common(span.end_ns) - sender.shift
                sender.received_ns[index] = max(arrival, sender.spans[index].start_ns + 1)
                yield sender, index, receiver, received


def _arrow(number: int, sent: Event, received: Event) -> list[Event]:
    common = {"name": "message", "cat": "message", "id": number}
    start = {"ph": "s", "pid": sent["pid"], "tid": sent["tid"], "ts": sent["ts"]}
    # The end binds to the slice around it, whose last moment does not count as inside.
    end = {"ph": "f", "bp": "e", "pid": received["pid"], "tid": received["tid"]}
    return [common | start, common | end | {"ts": received["ts"] + received["dur"] * 0.999}]


# ------------------------------------------------------------------------------------------------------------- files


def write_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Write a trace, compressed."""
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(trace, file, separators=(",", ":"))


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace, of this library or of `torch.profiler`, compressed or not.

    Raises:
        ValueError: If the file is not a trace.
    """
    trace = read_json(path)
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        raise ValueError(f"expected a trace with `traceEvents` in {path}")
    return trace


def read_json(path: Path) -> Any:
    """Read JSON, compressed or not.

    Raises:
        ValueError: If the file holds something else, or is not whole.
    """
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            return json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"expected JSON, compressed if its name ends in .gz, in {path}: {error}") from error
