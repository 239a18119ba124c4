"""Comparison of two runs: faster and slower parts, as figures and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_parallel.callbacks.report.charts import Bar, Curve, LineChart, line_chart
from lightning_parallel.callbacks.report.figures import Figures, Report
from lightning_parallel.callbacks.report.page import (
    CURVES,
    PHASE_LABELS,
    advice_parts,
    headline,
    phase_bar,
    render_template,
    run_line,
)
from lightning_parallel.tracing.spans import bytes_text, count_text, gap_text, percent, seconds_text

__all__ = ["Change", "changes", "render_comparison"]

Write = Callable[[float], str]


class Change(NamedTuple):
    """A figure of both runs, or None if unmeasured; `better` is `less` or `more`."""

    name: str
    first: float | None
    second: float | None
    better: str
    write: Write

    @property
    def verdict(self) -> str:
        """The difference in words; empty if a figure is missing."""
        if self.first is None or self.second is None:
            return ""
        difference = self.second - self.first
        # Differences below half a percent are noise, or vanish in the rounding of the displayed figures.
        unseen = self.write is percent and percent(abs(difference)) == percent(0.0)
        if unseen or abs(difference) <= 0.005 * max(abs(self.first), abs(self.second)):
            return "the same"
        words = "more" if difference > 0 else "less"
        # From 2 % to 1 % a share has changed by 1 %, which "50 % less" would exaggerate.
        if self.write is percent:
            return f"{percent(abs(difference))} {words}"
        share = f" ({percent(abs(difference) / self.first)})" if self.first else ""
        return f"{self.write(abs(difference))} {words}{share}"

    @property
    def kind(self) -> str:
        """`faster`, `slower`, or empty."""
        if self.first is None or self.second is None or self.verdict == "the same":
            return ""
        return "faster" if (self.second < self.first) == (self.better == "less") else "slower"

    @property
    def values(self) -> tuple[str, str]:
        """Both figures as text."""
        first, second = ("not measured" if value is None else self.write(value) for value in (self.first, self.second))
        return first, second


_COMPARED: tuple[tuple[str, str, str, Write], ...] = (
    ("step", "step", "less", seconds_text),
    ("samples_per_second", "samples per second", "more", count_text),
    ("tokens_per_second", "tokens per second", "more", count_text),
    ("model_flops_utilisation", "share of peak FLOP/s", "more", percent),
    ("bubble", "pipeline bubble", "less", percent),
    ("memory", "most memory on a rank", "less", bytes_text),
    ("sent", "bytes sent per rank and step", "less", bytes_text),
    *((name, words, "less", seconds_text) for name, words in PHASE_LABELS.items()),
)
"""Key and name of each figure, the better direction (less or more), and the format."""


def changes(first: Report, second: Report) -> list[Change]:
    """List the comparable figures of the runs; leave out figures that are missing or 0 in both runs."""
    before = _compared_figures(Figures(first))
    after = _compared_figures(Figures(second))
    found = [Change(words, before.get(key), after.get(key), better, write) for key, words, better, write in _COMPARED]
    return [change for change in found if change.first or change.second]


def _compared_figures(run: Figures) -> dict[str, float]:
    """Return the measured figures of a run that `_COMPARED` names."""
    found: dict[str, float] = {}
    if run.ranks:
        found["step"] = run.step
        found |= run.mean_phases(PHASE_LABELS)
    for name in ("samples_per_second", "tokens_per_second", "model_flops_utilisation"):
        if run.throughput.get(name) is not None:
            found[name] = run.throughput[name]
    if run.bubble.get("measured") is not None:
        found["bubble"] = run.bubble["measured"]
    if run.held:
        # The rank with the most memory decides whether a run fits.
        found["memory"], _ = max(run.held)
    if run.records:
        found["sent"] = sum(run.sent.values())
    return found


# ---------------------------------------------------------------------------------------------------------------- page

_HEADLINE_FIGURES = 4


def render_comparison(first: Report, second: Report, names: tuple[str, str]) -> str:
    """Render the page that compares two runs.

    Args:
        first: Contents of a run's `report.json`.
        second: Contents of the other run's `report.json`.
        names: Names of the runs on the page.
    """
    reports = (first, second)
    found = changes(first, second)
    bars = _bars(reports, names)
    drawn = {segment.kind for bar in bars for segment in bar.segments}
    # Leave out the phases: bars further below show them.
    in_header = [change for change in found if change.name not in PHASE_LABELS.values() and change.verdict]
    return render_template(
        "comparison",
        title=f"{names[0]} and {names[1]}",
        names=names,
        runs=[
            {
                "name": name,
                "line": f"{headline(report['run'])} · {run_line(report['run'])}",
                "advice": advice_parts(report),
            }
            for name, report in zip(names, reports)
        ],
        figures=[
            (" → ".join(change.values), f"{change.name}: {change.verdict}") for change in in_header[:_HEADLINE_FIGURES]
        ],
        settings=_settings(first["run"], second["run"]),
        bars=bars,
        phases={name: words for name, words in PHASE_LABELS.items() if name in drawn},
        changes=[[change.name, *change.values, change.verdict] for change in found],
        kinds=[change.kind for change in found],
        charts=_charts(reports, names),
    )


_NOT_SETTINGS = {"seconds", "started", "steps", "error", "error_rank", "mesh", "versions"}
"""Facts of a run that are no settings, or that `_flat` already writes out."""


def _settings(first: Report, second: Report) -> list[list[str]]:
    """List the settings that differ: name, and value in each run."""
    before = _flat(first)
    after = _flat(second)
    rows = []
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            rows.append([key.replace("_", " "), before.get(key, "not there"), after.get(key, "not there")])
    return rows


def _flat(run: Report) -> dict[str, str]:
    flat = {key: str(value) for key, value in run.items() if key not in _NOT_SETTINGS}
    flat |= {f"{axis} size": str(size) for axis, size in (run.get("mesh") or {}).items()}
    return flat | {f"version of {name}": value for name, value in (run.get("versions") or {}).items()}


def _bars(reports: Sequence[Report], names: Sequence[str]) -> list[Bar]:
    """Create one bar per run with its phases, mean over its ranks."""
    bars = []
    for name, report in zip(names, reports):
        means = Figures(report).mean_phases(PHASE_LABELS)
        if means:
            # The mean phases add up to less than the step of the slowest rank, so use their sum as the total.
            bars.append(phase_bar({**means, "wall": sum(means.values())}, name))
    return bars


def _charts(reports: Sequence[Report], names: Sequence[str]) -> list[LineChart]:
    """Draw both runs in each chart."""
    charts = []
    for key, _, title, unit in CURVES:
        curves = []
        for name, report in zip(names, reports):
            points = report.get("series", {}).get(key, ())
            if len(points) > 1:
                curves.append(Curve(name, points, gap_text(points)))
        chart = line_chart(curves, title, unit)
        if chart is not None:
            charts.append(chart)
    return charts
