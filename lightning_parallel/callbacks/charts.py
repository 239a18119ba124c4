"""Charts as HTML: bars and blocks whose widths are percentages, lines as SVG. Pure functions from numbers to text.

What a mark stands for is in its `data-tip`; the page's script shows it under the pointer, under a finger, and for the
arrow keys. Hatched marks are waits, so no reader depends on telling colours apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import ceil, floor, log10

__all__ = ["Bar", "Block", "Line", "Part", "bars", "lanes", "legend", "lines", "table", "ticks"]

_LABEL_FROM = 4.0
"""Percent of the width from which a mark bears its label."""


@dataclass(frozen=True)
class Part:
    """A piece of a bar: `kind` gives its colour, `value` its length; `more` follows `text` where there is room."""

    kind: str
    value: float
    text: str
    more: str = ""


@dataclass(frozen=True)
class Bar:
    """One row: parts side by side, and a thin strip of further parts below them."""

    label: str
    parts: Sequence[Part]
    total: str
    below: Sequence[Part] = ()


@dataclass(frozen=True)
class Block:
    """Something that ran in a lane from `start` to `end`."""

    kind: str
    start: float
    end: float
    label: str
    tip: str


@dataclass(frozen=True)
class Line:
    """A named curve with gaps where a value is None; `note` is said of it."""

    name: str
    points: Sequence[tuple[float, float | None]]
    note: str = ""


def _percent(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".") + "%"


def bars(rows: Sequence[Bar], what: str) -> str:
    """Rows of stacked bars on one scale: the longest fills the width."""
    longest = max((sum(part.value for part in row.parts) for row in rows), default=0.0) or 1.0
    inner = "".join(
        f'<div class="row"><span class="label">{escape(row.label)}</span>'
        f'<span class="track">{_stack(row.parts, longest, "bar")}{_stack(row.below, longest, "strip")}</span>'
        f'<span class="total">{escape(row.total)}</span></div>'
        for row in rows
    )
    return _marks("bars", what, inner)


def _stack(parts: Sequence[Part], longest: float, name: str) -> str:
    pieces = []
    for part in parts:
        if part.value <= 0:
            continue
        width = 100 * part.value / longest
        label = f"<b>{escape(part.text)}</b>" if name == "bar" and width >= 2 * _LABEL_FROM else ""
        tip = escape(f"{part.kind.replace('_', ' ')}: {part.text}{part.more}")
        pieces.append(f'<i class="{part.kind}" style="width:{_percent(width)}" data-tip="{tip}">{label}</i>')
    return f'<span class="{name}">{"".join(pieces)}</span>' if pieces else ""


def lanes(rows: Sequence[tuple[str, Sequence[Block]]], span: float, what: str) -> str:
    """Lanes of blocks on one time axis from 0 to `span`."""
    inner = "".join(
        f'<div class="row"><span class="label">{escape(label)}</span>'
        f'<span class="track"><span class="lane">{_blocks(blocks, span)}</span></span></div>'
        for label, blocks in rows
    )
    return _marks("lanes", what, inner)


def _blocks(blocks: Sequence[Block], span: float) -> str:
    pieces = []
    for block in blocks:
        left, width = 100 * block.start / span, 100 * (block.end - block.start) / span
        label = escape(block.label) if width >= _LABEL_FROM / 3 else ""
        place = f"left:{_percent(left)};width:{_percent(width)}"
        pieces.append(f'<i class="{block.kind}" style="{place}" data-tip="{escape(block.tip)}">{label}</i>')
    return "".join(pieces)


def ticks(span: float, unit: str) -> str:
    """The axis below lanes: round numbers from 0 to `span`."""
    marks = "".join(f'<i style="left:{_percent(100 * at / span)}">{at:g}</i>' for at in _round_steps(0, span, 6))
    return f'<div class="row axis"><span class="label">{escape(unit)}</span><span class="track">{marks}</span></div>'


def _round_steps(low: float, high: float, most: int) -> list[float]:
    """At most `most` round numbers from `low` to `high`."""
    spread = high - low or abs(high) or 1.0
    size = 10 ** floor(log10(spread / most))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if spread / (size * factor) <= most - 1)
    first = ceil(low / step - 1e-9)
    return [round(step * index, 12) for index in range(first, floor(high / step + 1e-9) + 1)]


def _marks(name: str, what: str, inner: str) -> str:
    return f'<div class="{name}" role="group" tabindex="0" aria-label="{escape(what)}">{inner}</div>'


def legend(kinds: Mapping[str, str]) -> str:
    """The meaning of the colours: `kind -> words`."""
    items = "".join(f'<li><i class="{kind}"></i>{escape(words)}</li>' for kind, words in kinds.items())
    return f'<ul class="legend">{items}</ul>'


def lines(curves: Sequence[Line], what: str, unit: str) -> str:
    """Curves over a common x axis; the second one is dashed. Values are on the left, steps below."""
    values = [y for curve in curves for _, y in curve.points if y is not None]
    if len(values) < 2:
        return ""
    xs = [x for curve in curves for x, _ in curve.points]
    low, high, first, last = min(values), max(values), min(xs), max(xs)
    margin = (high - low or abs(high) or 1.0) * 0.08
    low, high = (max(low - margin, 0.0) if low >= 0 else low - margin), high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        return 100 * (x - first) / (last - first or 1), 100 - 100 * (y - low) / (high - low)

    levels = _round_steps(low, high, 5)
    grid = "".join(f'<path class="grid" d="M0 {place(first, y)[1]:.2f}H100"/>' for y in levels)
    drawn = "".join(f'<path class="curve c{index}" d="{_path(curve, place)}"/>' for index, curve in enumerate(curves))
    scale = "".join(f'<i style="top:{_percent(place(first, y)[1])}">{y:g}</i>' for y in levels)
    steps = "".join(f'<i style="left:{_percent(place(x, low)[0])}">{x:g}</i>' for x in _round_steps(first, last, 6))
    keys = "".join(f'<li><i class="curve c{i}"></i>{escape(curve.name)}</li>' for i, curve in enumerate(curves))
    notes = "".join(f"<small class=gap> {escape(note)}</small>" for note in _notes(curves))
    return (
        f'<figure class="lines"><figcaption>{escape(what)} <small>{escape(unit)}</small>{notes}</figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(_in_words(what, curves))}"><div class="scale">{scale}</div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{grid}{drawn}</svg>'
        f'<div class="steps">{steps}</div></div>'
        f"{f'<ul class=legend>{keys}</ul>' if len(curves) > 1 else ''}</figure>"
    )


def _path(curve: Line, place: Callable[[float, float], tuple[float, float]]) -> str:
    pieces = [list(piece) for _, piece in groupby(curve.points, key=lambda point: point[1] is None)]
    drawn = [[place(x, y) for x, y in piece if y is not None] for piece in pieces]
    return "".join("M" + "L".join(f"{left:.2f} {top:.2f}" for left, top in piece) for piece in drawn if piece)


def _notes(curves: Sequence[Line]) -> list[str]:
    return [f"{curve.name}: {curve.note}" if len(curves) > 1 else curve.note for curve in curves if curve.note]


def _in_words(what: str, curves: Sequence[Line]) -> str:
    known = [(curve.name, [y for _, y in curve.points if y is not None]) for curve in curves]
    ends = [f"{name} from {values[0]:.4g} to {values[-1]:.4g}" for name, values in known if values]
    return f"{what}: {'; '.join([*ends, *_notes(curves)])}"


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    merge: bool = False,
    words: bool = False,
) -> str:
    """A table whose first column names the row.

    Args:
        header: Of the columns.
        rows: Of cells.
        caption: Above the table.
        merge: Equal first cells that follow each other become one.
        words: The cells are words rather than numbers.
    """
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in header)
    body = ""
    for _, group in groupby(rows, key=(lambda row: row[0]) if merge else id):
        members = list(group)
        for index, row in enumerate(members):
            spans = f' rowspan="{len(members)}"' if len(members) > 1 else ""
            first = f'<th scope="row"{spans}>{escape(row[0])}</th>' if index == 0 else ""
            body += f"<tr>{first}{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    inner = f"{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0"><table{" class=words" if words else ""}>{inner}</table></div>'
