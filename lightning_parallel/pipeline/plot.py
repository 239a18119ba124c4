"""Draw timelines, simulated or measured: as coloured text for a terminal, as SVG for files and for the report's page.

rank 0  F0 F1 F2 F3 ·····················B0    F4 B1    F5
rank 1  ···F0 F1 F2 ··············B0    F3 B1    F4 B2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rich.style import Style
from rich.table import Table
from rich.text import Text

from lightning_parallel.pipeline.schedule import Action, Kind, Schedule, build_schedule
from lightning_parallel.pipeline.search import Choice
from lightning_parallel.pipeline.simulate import Timeline
from lightning_parallel.tracing.spans import seconds_text

__all__ = [
    "INK",
    "MUTED",
    "choice_table",
    "draw_svg",
    "draw_text",
    "legend_text",
    "rank_table",
    "round_ticks",
    "schedule_title",
    "svg_rect",
    "svg_text",
]

_COLOURS = {Kind.F: "#3b70d6", Kind.B: "#1f9d6b", Kind.I: "#1f9d6b", Kind.W: "#d98a1f"}
_MEANINGS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
_LIGHTEST = 0.6
"""Share of white in the colours of the last chunk of a rank."""
INK, MUTED, _IDLE, _HELD, _CRITICAL = "#1f2933", "#6b7785", "#eef1f5", "#c3cddb", "#d6336c"


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Choose at most `most` round numbers from `low` to `high`, multiples of 1, 2 or 5 times a power of ten."""
    spread = high - low or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(spread / most))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if spread / (size * factor) <= most - 1)
    # A limit that is a tick itself must not be lost to rounding.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(step * index, 12) for index in range(first, last + 1)]


# ------------------------------------------------------------------------------------------------------------ colours


def _lighten(colour: str, share: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _text_on(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    # Perceived brightness by the weights of ITU-R BT.601: green looks brightest, blue darkest.
    return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 160 else INK


def _shades(schedule: Schedule) -> list[float]:
    """Return the share of white for each stage: the later on its rank, the lighter it is drawn."""
    shades = [0.0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        for chunk, stage in enumerate(stages):
            shades[stage] = _LIGHTEST * chunk / max(len(stages) - 1, 1)
    return shades


def _kinds(timeline: Timeline) -> list[Kind]:
    """Return the kinds of actions that occur, in the order of the legend."""
    used = {action.kind for row in timeline.spans for action in row}
    return [kind for kind in Kind if kind in used]


# --------------------------------------------------------------------------------------------------------------- text

_WAITING = Style(color="#6b7785", dim=True)

_FILL = {Kind.F: "=", Kind.B: "-", Kind.I: "-", Kind.W: "+"}
"""Fills a cell of text after its label, so that kinds can be told apart without colours too."""


def draw_text(timeline: Timeline, width: int) -> list[Text]:
    """Draw one line per rank, time to the right: colour is the kind of action, the number is the microbatch.

    Lighter shades are later chunks of the model on the same rank. Without colours, letters tell the kinds apart, or
    `=`, `-` and `+` if there is no room for them; `·` is waiting.

    Args:
        timeline: Timeline to draw.
        width: Columns to use at most.
    """
    label_width = len(f"rank {timeline.schedule.num_ranks - 1}  ")
    columns = _columns(timeline, max(width - label_width, 1))
    scale = columns / (timeline.makespan_s or 1.0)
    longest = len(f"F{timeline.schedule.num_microbatches - 1}")
    # Letters for all actions or for none, so that the same kind looks the same whatever its length.
    letters = all(round((end - start) * scale) >= longest for row in timeline.spans for start, end in row.values())
    shades = _shades(timeline.schedule)
    origin_s = timeline.start_s
    lines = []
    for rank, row in enumerate(timeline.spans):
        line = Text(no_wrap=True).append(f"rank {rank}".ljust(label_width), Style(bold=True))
        column = 0
        for action, (start_s, end_s) in row.items():
            start = round((start_s - origin_s) * scale)
            stop = round((end_s - origin_s) * scale)
            line.append("·" * (start - column), _WAITING)
            line.append(_cell(action, stop - max(start, column), letters), _cell_style(shades, action))
            column = max(column, stop)
        lines.append(line.append("·" * (columns - column), _WAITING))
    return lines


def legend_text(timeline: Timeline) -> Text:
    """Explain the colours of `draw_text`."""
    legend = Text()
    for kind in _kinds(timeline):
        sample = Action(kind, 0, 0)
        legend.append(_cell(sample, 4, letters=True), _cell_style([0.0], sample))
        legend.append(f" {_MEANINGS[kind]}   ")
    if timeline.schedule.virtual_stages > 1:
        legend.append("lighter: later chunk   ")
    legend.append("····", _WAITING)
    return legend.append(" waiting")


def schedule_title(schedule: Schedule) -> str:
    """Return the name of a schedule with the options that its name does not include."""
    facts = [schedule.name]
    if schedule.virtual_stages > 1:
        facts.append(f"{schedule.virtual_stages} stages a rank")
    if schedule.warmup is not None and schedule.warmup != build_schedule(schedule.name, schedule.num_ranks, 1).warmup:
        facts.append(f"warm-up {schedule.warmup:g}")
    return ", ".join(facts)


def choice_table(choice: Choice, most: int = 8) -> Table:
    """Return a table of the compared schedules, best first."""
    table = Table(title="Schedules, compared by simulation", title_justify="left", box=None, header_style="bold")
    for header in choice.HEADER:
        table.add_column(header, justify="left" if header == "schedule" else "right")
    rows = choice.rows()
    for row in rows[:most]:
        table.add_row(*row, style="bold green" if row[-1] == "chosen" else None)
    if len(rows) > most:
        table.caption = f"{len(rows) - most} slower schedules are not shown."
    return table


def rank_table(timeline: Timeline) -> Table:
    """Return a table of the time that each rank computes and waits, with the duration of the step as its title."""
    table = Table(
        title=f"step {seconds_text(timeline.makespan_s)}, bubble {timeline.bubble_fraction:.2%}",
        title_justify="left",
        box=None,
        header_style="bold",
    )
    for name in ("rank", "stages", "busy", "waiting", "activations held"):
        table.add_column(name, justify="left" if name == "stages" else "right")
    for rank, (busy_s, peak) in enumerate(zip(timeline.busy_s, timeline.in_flight_peaks)):
        stages = ", ".join(map(str, timeline.schedule.stages_of(rank)))
        waiting_s = timeline.makespan_s - busy_s
        table.add_row(str(rank), stages, seconds_text(busy_s), seconds_text(waiting_s), str(peak))
    return table


def _columns(timeline: Timeline, room: int) -> int:
    """Return a number of columns, up to `room`, that leaves space for the label of the shortest action if possible."""
    durations = [end - start for row in timeline.spans for start, end in row.values() if end > start]
    lengths = timeline.makespan_s / min(durations, default=1.0)
    label = len(str(timeline.schedule.num_microbatches)) + 2
    each = min(label, int(room / max(lengths, 1.0)))
    # A whole number of columns for the shortest keeps equal actions equally wide.
    return round(lengths * each) if each > 1 else room


def _cell(action: Action, width: int, letters: bool) -> str:
    label = f"{action.kind.value * letters}{action.microbatch}"
    return (label if len(label) <= width else "").ljust(width, _FILL[action.kind])


def _cell_style(shades: Sequence[float], action: Action) -> Style:
    # Neighbours of one colour would run together: every second microbatch is a little lighter.
    return _background(_lighten(_COLOURS[action.kind], shades[action.stage]), 0.16 * (action.microbatch % 2))


@cache
def _background(colour: str, lighter: float) -> Style:
    background = _lighten(colour, lighter)
    return Style(color=_text_on(background), bgcolor=background)


# ---------------------------------------------------------------------------------------------------------------- SVG

_FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"

# Sizes in pixels. Horizontal: the labels left of the time axis, the figures right of it.
_LABELS, _FIGURES = 104, 150
# Vertical: header of a timeline, row of a rank with its actions and the activations below them, time axis.
_HEADER, _ROW, _ACTION, _ACTIVATIONS, _AXIS = 92, 58, 26, 14, 44
_LETTER = 7
"""Width of a digit in a label, rounded up."""


def draw_svg(
    timelines: Sequence[tuple[str, Timeline]], width: float = 1298, margin: float = 32, row_name: str = "rank "
) -> str:
    """Draw timelines one above the other on one time scale, such as the planned and the measured one.

    One row per rank: its actions, coloured by kind with the number of the microbatch, and under them the activations
    that it holds. A line under an action marks the critical path: what set the duration of the step.

    Colours are attributes, which every program that opens SVG understands. Shapes have classes too, by which the CSS of
    a page around the drawing can replace the colours: `background`, `title`, `muted`, and for each rank a `row` with
    its `label`, `idle`, `action`, `held` and `critical`. An `action` has its kind as a further class (`F`, `B`, `I`,
    `W`); `later` marks later chunks, whose property `--lighter` is the share of white in their colour.

    Args:
        timelines: Title and timeline of each part.
        width: Of the drawing, in pixels.
        margin: Empty space left and right, in pixels.
        row_name: Name of a row, before its number: the rank's index in the pipeline.

    Returns:
        One SVG element, self-contained.
    """
    span_s = max((timeline.makespan_s for _, timeline in timelines), default=0.0) or 1.0
    heights = [_HEADER + _ROW * len(timeline.spans) + _AXIS for _, timeline in timelines]
    height = sum(heights) + margin
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "timelines"})
    svg.attrib |= {"width": f"{width:g}", "height": f"{height:g}", "viewBox": f"0 0 {width:g} {height:g}"}
    svg.attrib |= {"font-family": _FONT, "style": "font-variant-numeric: tabular-nums"}
    SubElement(svg, "rect", {"class": "background", "width": "100%", "height": "100%", "fill": "#fff"})
    top = 0.0
    for (title, timeline), part_height in zip(timelines, heights):
        _SvgTimeline(svg, timeline, margin, width - margin, top, span_s).draw(title, row_name)
        top += part_height
    indent(svg, space="")  # one shape per line, for readable differences between versions of a file
    return tostring(svg, encoding="unicode") + "\n"


class _SvgTimeline:
    """One timeline of a drawing, between `left` and `right`, below `top`; `span_s` is the length of the time axis."""

    def __init__(self, svg: Element, timeline: Timeline, left: float, right: float, top: float, span_s: float) -> None:
        self.group = SubElement(svg, "g")
        self.timeline = timeline
        self.left = left
        self.right = right
        self.top = top
        self.start = left + _LABELS
        self.end = right - _FIGURES
        self.span_s = span_s
        self.per_second = (self.end - self.start) / span_s
        self.origin_s = timeline.start_s
        self.shades = _shades(timeline.schedule)

    def draw(self, title: str, row_name: str) -> None:
        """Add the shapes to the drawing, later ones on top."""
        timeline = self.timeline
        # Measured actions never follow each other without any gap: a thousandth of the step counts as none.
        critical = set(timeline.critical_path(tolerance_s=1e-3 * timeline.makespan_s))
        busy_s = timeline.busy_s
        peaks = timeline.in_flight_peaks
        self._header(title)
        for rank in range(len(timeline.spans)):
            y = self.top + _HEADER + rank * _ROW
            row = SubElement(self.group, "g", {"class": "row"})
            self._labels(row, rank, y, row_name)
            self._actions(row, rank, y, critical)
            self._held(row, rank, y + _ACTION + 5 + _ACTIVATIONS, max(peaks) or 1)
            busy = busy_s[rank] / timeline.makespan_s if timeline.makespan_s else 0.0
            svg_text(row, self.end + 60, y + 18, f"{busy:.1%}", 13, anchor="end")
            svg_text(row, self.right, y + 18, str(peaks[rank]), 13, anchor="end")
        self._axis(self.top + _HEADER + len(timeline.spans) * _ROW)

    def _x(self, seconds: float) -> float:
        return self.start + (seconds - self.origin_s) * self.per_second

    def _header(self, title: str) -> None:
        timeline = self.timeline
        schedule = timeline.schedule
        y = self.top + 40
        facts = (
            f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
            f"   ·   step {seconds_text(timeline.makespan_s)}   ·   bubble {timeline.bubble_fraction:.1%}"
        )
        svg_text(self.group, self.left, y, title, 20, bold=True).set("class", "title")
        svg_text(self.group, self.left, y + 24, facts, 13, MUTED)
        x = self.end
        # From the right end, with an estimate of the width of the words, which depends on the viewer's fonts.
        for label, colour, attributes in reversed(list(self._legend())):
            x -= 6 * len(label) + 38
            svg_rect(SubElement(self.group, "g", attributes), (x, y - 11, 13, 13), colour, radius=3)
            svg_text(self.group, x + 19, y, label, 12, MUTED)
        svg_text(self.group, self.end + 60, y + 24, "busy", 12, MUTED, "end")
        svg_text(self.group, self.right, y + 24, "most held", 12, MUTED, "end")

    def _legend(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Yield the label, the colour and the attributes of each sample."""
        for kind in _kinds(self.timeline):
            yield _MEANINGS[kind], _COLOURS[kind], _kind_class("sample", kind, 0.0)
        if self.timeline.schedule.virtual_stages > 1:
            yield "later chunk", _lighten(_COLOURS[Kind.F], _LIGHTEST), _kind_class("sample", Kind.F, _LIGHTEST)
        yield "activations held", _HELD, {"class": "held"}
        yield "critical path", _CRITICAL, {"class": "critical"}

    def _labels(self, row: Element, rank: int, y: float, row_name: str) -> None:
        stages = self.timeline.schedule.stages_of(rank)
        names = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        svg_text(row, self.left, y + 13, f"{row_name}{rank}", 13, bold=True).set("class", "label")
        svg_text(row, self.left, y + 28, names, 11, MUTED)

    def _actions(self, row: Element, rank: int, y: float, critical: set[Action]) -> None:
        svg_rect(row, (self.start, y, self.timeline.makespan_s * self.per_second, _ACTION), _IDLE, "idle", 3)
        for action, (start_s, end_s) in self.timeline.spans[rank].items():
            self._action(row, action, start_s, end_s, y)
            if action in critical:
                width = (end_s - start_s) * self.per_second
                svg_rect(row, (self._x(start_s), y + _ACTION + 1, width, 3), _CRITICAL, "critical")

    def _action(self, row: Element, action: Action, start_s: float, end_s: float, y: float) -> None:
        shade = self.shades[action.stage]
        colour = _lighten(_COLOURS[action.kind], shade)
        group = SubElement(row, "g", _kind_class("action", action.kind, shade))
        SubElement(group, "title").text = (
            f"{action}: {_MEANINGS[action.kind]} of microbatch {action.microbatch} in stage {action.stage},"
            f" {seconds_text(end_s - start_s)} from {seconds_text(start_s - self.origin_s)}"
        )
        x = self._x(start_s)
        width = (end_s - start_s) * self.per_second
        # A pixel between neighbours, but not where it would be most of the block.
        gap = 1 if width > 4 else 0
        svg_rect(group, (x, y, width - gap, _ACTION), colour, radius=3 if width > 8 else 0)
        label = str(action.microbatch)
        if width >= _LETTER * len(label) + 3:
            svg_text(group, x + (width - gap) / 2, y + 17.5, label, 12, _text_on(colour), "middle")

    def _held(self, row: Element, rank: int, base: float, peak: int) -> None:
        """Draw the activations held over time as a filled step curve above `base`; `peak` is the most of any rank."""
        level = base
        points = [(self._x(self.origin_s), base)]
        for second, held in self.timeline.in_flight(rank):
            x = self._x(second)
            # Two corners for each step: the level stays until the action ends, then jumps.
            points.append((x, level))
            level = base - _ACTIVATIONS * held / peak
            points.append((x, level))
        points.append((points[-1][0], base))
        corners = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        SubElement(row, "polygon", {"class": "held", "points": corners, "fill": _HELD})

    def _axis(self, y: float) -> None:
        length = self.timeline.makespan_s * self.per_second
        svg_rect(self.group, (self.start, y, length, 1), MUTED, "muted")
        for tick_s in round_ticks(0, self.span_s, 13):
            # A shorter timeline shares the ticks of the longest, as far as it reaches.
            if tick_s > self.timeline.makespan_s * (1 + 1e-9):
                break
            x = self.start + tick_s * self.per_second
            svg_rect(self.group, (x - 0.5, y, 1, 5), MUTED, "muted")
            svg_text(self.group, x, y + 19, seconds_text(tick_s) if tick_s else "0", 11, MUTED, "middle")


def _kind_class(name: str, kind: Kind, shade: float) -> dict[str, str]:
    """Return the attributes by which the CSS of a page can colour a shape."""
    if not shade:
        return {"class": f"{name} {kind.value}"}
    return {"class": f"{name} {kind.value} later", "style": f"--lighter: {shade:.0%}"}


def svg_rect(
    parent: Element, box: tuple[float, float, float, float], fill: str, name: str = "", radius: float = 0
) -> None:
    """Add a filled rectangle; `box` is x, y, width, height and `name` its classes."""
    rect = SubElement(parent, "rect", {"class": name} if name else {})
    rect.attrib |= {key: f"{value:.2f}" for key, value in zip(("x", "y", "width", "height"), box)}
    rect.attrib |= {"fill": fill, **({"rx": f"{radius:g}"} if radius else {})}


def svg_text(
    parent: Element,
    x: float,
    y: float,
    text: str,
    size: float,
    fill: str = INK,
    anchor: str = "start",
    bold: bool = False,
) -> Element:
    """Add one line of text whose baseline begins at, is centred on, or ends at (x, y)."""
    element = SubElement(parent, "text", {"x": f"{x:.2f}", "y": f"{y:.2f}", "font-size": f"{size:g}", "fill": fill})
    if fill == MUTED:
        element.set("class", "muted")
    if anchor != "start":
        element.set("text-anchor", anchor)
    if bold:
        element.set("font-weight", "600")
    element.text = text
    return element
