"""Numbers and tables as people read them: one formatter for each unit, and one way to print a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

__all__ = ["bytes_text", "count_text", "gap_text", "percent", "rank_label", "seconds_text", "show"]

WIDTH_OF_FILES = 120
"""Columns of a table that is not printed to a terminal."""


def percent(share: float) -> str:
    """Format a share: `0.0734` as `7.3 %`."""
    return f"{share * 100:.1f} %" if abs(share) < 0.0995 else f"{share * 100:.0f} %"


def seconds_text(seconds: float) -> str:
    """Format seconds in a suitable unit, with three digits: `0.01234` as `12.3 ms`."""
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{count_text(seconds / size)} {unit}"
    return f"{count_text(seconds * 1e6)} µs" if seconds else "0"


def bytes_text(count: float) -> str:
    """Format bytes in binary units: `1572864` as `1.5 MiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count_text(count / size)} {unit}"
    return f"{count:.0f} B"


def count_text(value: float) -> str:
    """Format a number with three digits, or all of those before the point: `1234.5` as `1,234`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def gap_text(points: Sequence[Sequence[Any]]) -> str:
    """Say where a curve over the steps has no finite value; empty if it has one at each point.

    Args:
        points: (step, value), in the order of the steps; None where the value was not finite.

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
    """Label a rank with its coordinate on the axes of several ranks, by their first letters: `rank 3 · d1 t1`."""
    coordinate = entry.get("coordinate") or {}
    places = [f"{axis[0]}{coordinate[axis]}" for axis, size in mesh.items() if size > 1 and axis in coordinate]
    return f"rank {entry['rank']}" + (f" · {' '.join(places)}" if places else "")


def show(renderable: Any) -> None:
    """Print a table, 120 columns wide where the output is not a terminal."""
    console = Console(highlight=False)
    # In a log file `rich` assumes 80 columns, which cuts the tables of a run short.
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = WIDTH_OF_FILES
    console.print(renderable)
