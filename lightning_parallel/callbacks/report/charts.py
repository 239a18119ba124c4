"""Bars and curves as plain data for the page's template: values, words, and the place of each point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning_parallel.pipeline.plot import round_ticks

__all__ = ["Bar", "Curve", "LineChart", "Segment", "line_chart"]


@dataclass(frozen=True)
class Segment:
    """A part of a bar: `kind` gives its colour, and `value` its length; its hint shows `text` and `more`."""

    kind: str
    value: float
    text: str
    more: str = ""


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart: segments in sequence, and a thin strip of further segments `below` them."""

    label: str
    segments: Sequence[Segment]
    total: str
    below: Sequence[Segment] = ()

    @property
    def length(self) -> float:
        """Sum of the segments' values."""
        return sum(segment.value for segment in self.segments)


@dataclass(frozen=True)
class Curve:
    """A named curve over the steps: (step, value), with None for an unknown value; `note` is a remark on the curve."""

    name: str
    points: Sequence[tuple[float, float | None]]
    note: str = ""


@dataclass(frozen=True)
class LineChart:
    """Curves in a square of 100 x 100 units with the origin in the top left corner; see `line_chart`.

    Args:
        title: Name of the quantity.
        unit: Its unit.
        notes: Remarks on the curves.
        description: The chart in words, for screen readers.
        curves: Name and points of each curve: one list of points for each stretch without gaps.
        levels: Grid lines: (distance from the top, value).
        ticks: (distance from the left, step).
    """

    title: str
    unit: str
    notes: Sequence[str]
    description: str
    curves: Sequence[tuple[str, Sequence[Sequence[tuple[float, float]]]]]
    levels: Sequence[tuple[float, float]]
    ticks: Sequence[tuple[float, float]]


_MOST_POINTS = 400
"""Most points of a curve that a screen can show apart."""


def line_chart(curves: Sequence[Curve], title: str, unit: str) -> LineChart | None:
    """Place curves on common axes; None if they have fewer than two values."""
    values = [y for curve in curves for _, y in curve.points if y is not None]
    if len(values) < 2:
        return None
    thinned = [_thinned(curve.points) for curve in curves]
    # Include steps without a value: a curve that ends early must not look like the end of the run.
    steps = [x for points in thinned for x, _ in points]
    first = min(steps)
    last = max(steps)
    low = min(values)
    high = max(values)
    # A constant curve needs a margin, too: otherwise `top` would divide by zero.
    margin = (high - low or abs(high) or 1.0) * 0.08
    # If all values are non-negative, the axis must not show negative values.
    low = max(low - margin, 0.0) if low >= 0 else low - margin
    high += margin

    def left(x: float) -> float:
        # All points may belong to one step.
        return 100 * (x - first) / (last - first or 1)

    def top(y: float) -> float:
        return 100 - 100 * (y - low) / (high - low)

    placed = []
    for curve, points in zip(curves, thinned):
        placed.append((curve.name, [[(left(x), top(y)) for x, y in stretch] for stretch in _stretches(points)]))
    # A single curve needs no name: the title names it.
    notes = [f"{curve.name}: {curve.note}" if len(curves) > 1 else curve.note for curve in curves if curve.note]
    return LineChart(
        title,
        unit,
        notes,
        description=_description(title, curves, notes),
        curves=placed,
        levels=[(top(y), y) for y in round_ticks(low, high, 5)],
        ticks=[(left(x), x) for x in round_ticks(first, last, 6)],
    )


def _thinned(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """Average runs of equal length, so that at most `_MOST_POINTS` points remain; None for a run without a value."""
    size = -(-len(points) // _MOST_POINTS)
    means = []
    for start in range(0, len(points), size):
        run = points[start : start + size]
        values = [y for _, y in run if y is not None]
        means.append((fmean(x for x, _ in run), fmean(values) if values else None))
    return means


def _stretches(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Split a curve at its gaps."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is not None:
            stretches[-1].append((x, y))
        elif stretches[-1]:
            stretches.append([])
    # A gap at the end leaves an empty stretch.
    return [stretch for stretch in stretches if stretch]


def _description(title: str, curves: Sequence[Curve], notes: Sequence[str]) -> str:
    """Describe the first and the last value of each curve."""
    ends = []
    for curve in curves:
        values = [y for _, y in curve.points if y is not None]
        if values:
            ends.append(f"{curve.name} from {values[0]:.4g} to {values[-1]:.4g}")
    return f"{title}: {'; '.join([*ends, *notes])}"
