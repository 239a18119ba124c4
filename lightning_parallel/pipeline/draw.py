"""Draw timelines, simulated or measured: coloured text for a terminal, a picture for everything else.

rank 0  F0 F1 F2 F3 ·····················B0    F4 B1    F5
rank 1  ···F0 F1 F2 ··············B0    F3 B1    F4 B2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

from rich.style import Style
from rich.text import Text as RichText

from lightning_parallel.pipeline.actions import Action, Kind, Schedule
from lightning_parallel.pipeline.picture import Line, Picture, Polygon, Rect, Text
from lightning_parallel.pipeline.simulate import Timeline
from lightning_parallel.tracing.text import seconds_text

__all__ = ["draw_picture", "draw_text", "legend_text"]

_COLOURS = {Kind.F: "#3b70d6", Kind.B: "#1f9d6b", Kind.I: "#1f9d6b", Kind.W: "#d98a1f"}
_MEANINGS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
_LIGHTEST = 0.5
_WAITING = Style(color="#6b7785", dim=True)

# What fills a cell of text after its label, so that the kinds differ without colours too.
_FILL = {Kind.F: "=", Kind.B: "-", Kind.I: "-", Kind.W: "+"}

_MARGIN, _LABELS, _FACTS, _LANES = 32, 104, 150, 980
_BAR, _HELD, _LANE, _HEADER, _AXIS = 26, 14, 58, 92, 44
_INK, _MUTED, _IDLE, _HELD_FILL, _CRITICAL = "#1f2933", "#6b7785", "#eef1f5", "#c3cddb", "#d6336c"


def draw_text(timeline: Timeline, width: int) -> list[RichText]:
    """Draw one line per rank, time to the right: colour is the kind of action, the number is the microbatch.

    Lighter shades are later chunks of the model on the same rank. Without colours the letters, or where there is no
    room for them `=`, `-` and `+`, tell the kinds apart, and `·` is waiting.

    Args:
        timeline: What to draw.
        width: Columns to use at most.
    """
    label_width = len(f"rank {timeline.schedule.num_ranks - 1}  ")
    columns = _columns(timeline, max(width - label_width, 1))
    scale = columns / (timeline.makespan_s or 1.0)
    longest = len(f"F{timeline.schedule.num_microbatches - 1}")
    letters = all(round((end - start) * scale) >= longest for row in timeline.spans for start, end in row.values())
    shades, origin_s = _shades(timeline.schedule), timeline.start_s
    lines = []
    for rank, row in enumerate(timeline.spans):
        line = RichText(no_wrap=True).append(f"rank {rank}".ljust(label_width), Style(bold=True))
        at = 0
        for action, (start_s, end_s) in row.items():
            start, stop = round((start_s - origin_s) * scale), round((end_s - origin_s) * scale)
            line.append("·" * (start - at), _WAITING)
            line.append(_cell(action, stop - max(start, at), letters), _style(shades, action))
            at = max(at, stop)
        lines.append(line.append("·" * (columns - at), _WAITING))
    return lines


def legend_text(timeline: Timeline) -> RichText:
    """Say what the colours of `draw_text` mean."""
    legend = RichText()
    for kind in _kinds(timeline):
        legend.append(_cell(Action(kind, 0, 0), 4, letters=True), _style([0.0], Action(kind, 0, 0)))
        legend.append(f" {_MEANINGS[kind]}   ")
    if timeline.schedule.virtual_stages > 1:
        legend.append("lighter: later chunk   ")
    legend.append("····", _WAITING)
    return legend.append(" waiting")


def draw_picture(timelines: Sequence[tuple[str, Timeline]]) -> Picture:
    """Draw timelines one above the other on one time scale, such as the planned and the measured one.

    One lane per rank: its actions, coloured by kind with the number of the microbatch, and under them the
    activations that it holds. A line under an action marks the critical path: what set the duration of the step.

    Args:
        timelines: Titles and what to draw under each.
    """
    span_s = max((timeline.makespan_s for _, timeline in timelines), default=0.0) or 1.0
    heights = [_HEADER + _LANE * len(timeline.spans) + _AXIS for _, timeline in timelines]
    picture = Picture(2 * _MARGIN + _LABELS + _LANES + _FACTS, sum(heights) + _MARGIN)
    top = 0.0
    for (title, timeline), height in zip(timelines, heights):
        _Panel(picture, timeline, top, _LANES / span_s, span_s).draw(title)
        top += height
    return picture


class _Panel:
    """One timeline of a picture."""

    def __init__(self, picture: Picture, timeline: Timeline, top: float, per_second: float, span_s: float) -> None:
        self.picture, self.timeline, self.top = picture, timeline, top
        self.per_second, self.span_s = per_second, span_s
        self.left, self.origin_s = _MARGIN + _LABELS, timeline.start_s
        self.shades = _shades(timeline.schedule)
        self.busy_s, self.peaks = timeline.busy_s, timeline.in_flight_peaks
        self.peak = max(self.peaks, default=0) or 1

    def draw(self, title: str) -> None:
        self._header(title)
        critical = set(self.timeline.critical_path(tolerance_s=1e-3 * self.timeline.makespan_s))
        for rank in range(len(self.timeline.spans)):
            self._lane(rank, self.top + _HEADER + rank * _LANE, critical)
        self._axis(self.top + _HEADER + len(self.timeline.spans) * _LANE)

    def _x(self, seconds: float) -> float:
        return self.left + (seconds - self.origin_s) * self.per_second

    def _header(self, title: str) -> None:
        timeline, schedule = self.timeline, self.timeline.schedule
        y = self.top + 40
        facts = (
            f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
            f"   ·   step {seconds_text(timeline.makespan_s)}   ·   bubble {timeline.bubble_fraction:.1%}"
        )
        self.picture.add(Text(_MARGIN, y, title, 20, bold=True), Text(_MARGIN, y + 24, facts, 13, _MUTED))
        x = float(self.left + _LANES)
        for label, colour in reversed(list(self._legend())):
            x -= 6 * len(label) + 38
            self.picture.add(Rect(x, y - 11, 13, 13, colour, 3), Text(x + 19, y, label, 12, _MUTED))
        right = self.left + _LANES
        self.picture.add(Text(right + 60, y + 24, "busy", 12, _MUTED, "end"))
        self.picture.add(Text(right + _FACTS, y + 24, "most held", 12, _MUTED, "end"))

    def _legend(self) -> Iterator[tuple[str, str]]:
        for kind in _kinds(self.timeline):
            yield _MEANINGS[kind], _COLOURS[kind]
        chunks = self.timeline.schedule.virtual_stages
        if chunks > 1:
            yield "later chunk", _lighten(_COLOURS[Kind.F], _LIGHTEST)
        yield "activations held", _HELD_FILL
        yield "critical path", _CRITICAL

    def _lane(self, rank: int, y: float, critical: set[Action]) -> None:
        timeline, picture = self.timeline, self.picture
        stages = timeline.schedule.stages_of(rank)
        names = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        picture.add(Text(_MARGIN, y + 13, f"rank {rank}", 13, bold=True), Text(_MARGIN, y + 28, names, 11, _MUTED))
        picture.add(Rect(self.left, y, timeline.makespan_s * self.per_second, _BAR, _IDLE, 3))
        for action, (start_s, end_s) in timeline.spans[rank].items():
            self._action(action, start_s, end_s, y)
            if action in critical:
                x, width = self._x(start_s), (end_s - start_s) * self.per_second
                picture.add(Rect(x, y + _BAR + 1, width, 3, _CRITICAL))
        self._held(rank, y + _BAR + 5 + _HELD)
        busy = self.busy_s[rank] / timeline.makespan_s if timeline.makespan_s else 0.0
        right = self.left + _LANES
        picture.add(
            Text(right + 60, y + 18, f"{busy:.1%}", 13, anchor="end"),
            Text(right + _FACTS, y + 18, str(self.peaks[rank]), 13, anchor="end"),
        )

    def _action(self, action: Action, start_s: float, end_s: float, y: float) -> None:
        x, width = self._x(start_s), (end_s - start_s) * self.per_second
        colour = _colour(self.shades, action)
        hint = f"{action}  {_MEANINGS[action.kind]}, {seconds_text(end_s - start_s)}"
        gap = 1 if width > 4 else 0
        self.picture.add(Rect(x, y, width - gap, _BAR, colour, 3 if width > 8 else 0, hint))
        label = str(action.microbatch)
        if width >= 7 * len(label) + 3:
            self.picture.add(Text(x + (width - gap) / 2, y + 17.5, label, 12, _text_on(colour), "middle"))

    def _held(self, rank: int, base: float) -> None:
        """Fill the steps of how many activations the rank holds, on the scale of the rank that holds most."""
        points, level = [(self._x(self.origin_s), base)], base
        for second, held in self.timeline.in_flight(rank):
            x = self._x(second)
            points.append((x, level))
            level = base - _HELD * held / self.peak
            points.append((x, level))
        points.append((points[-1][0], base))
        self.picture.add(Polygon(points, _HELD_FILL))

    def _axis(self, y: float) -> None:
        end = self.left + self.timeline.makespan_s * self.per_second
        self.picture.add(Line(self.left, y, end, y, _MUTED))
        step_s = _round_step(self.span_s / 12)
        for tick in range(math.floor(self.timeline.makespan_s / step_s + 1e-9) + 1):
            x = self.left + tick * step_s * self.per_second
            self.picture.add(Line(x, y, x, y + 5, _MUTED))
            self.picture.add(Text(x, y + 19, seconds_text(tick * step_s), 11, _MUTED, "middle"))


def _columns(timeline: Timeline, room: int) -> int:
    """Give the shortest action room for its label, if the whole fits."""
    shortest = min((end - start for row in timeline.spans for start, end in row.values() if end > start), default=1.0)
    label = len(str(timeline.schedule.num_microbatches)) + 2
    lengths = timeline.makespan_s / shortest
    each = min(label, int(room / max(lengths, 1.0)))
    # A whole number of columns for the shortest keeps equal actions equally wide.
    return round(lengths * each) if each > 1 else room


def _cell(action: Action, width: int, letters: bool) -> str:
    label = f"{action.kind.value * letters}{action.microbatch}"
    return (label if len(label) <= width else "").ljust(width, _FILL[action.kind])


@cache
def _ground(colour: str, lighter: float) -> Style:
    ground = _lighten(colour, lighter)
    return Style(color=_text_on(ground), bgcolor=ground)


def _style(shades: Sequence[float], action: Action) -> Style:
    # Neighbours of one colour would run together: every second microbatch is a little lighter.
    return _ground(_colour(shades, action), 0.16 * (action.microbatch % 2))


def _colour(shades: Sequence[float], action: Action) -> str:
    return _lighten(_COLOURS[action.kind], shades[action.stage])


def _shades(schedule: Schedule) -> list[float]:
    """Give for each stage how light it is drawn: the later on its rank, the lighter."""
    shades = [0.0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        for chunk, stage in enumerate(stages):
            shades[stage] = _LIGHTEST * chunk / max(len(stages) - 1, 1)
    return shades


def _kinds(timeline: Timeline) -> list[Kind]:
    used = {action.kind for row in timeline.spans for action in row}
    return [kind for kind in Kind if kind in used]


def _lighten(colour: str, share: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _text_on(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 160 else _INK


def _round_step(seconds: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= seconds * (1 - 1e-9))
