"""Two runs side by side: what got faster, what slower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

from lightning_parallel.callbacks import charts
from lightning_parallel.callbacks.charts import Line
from lightning_parallel.callbacks.page import advice_list, document, figures, headline, run_facts
from lightning_parallel.callbacks.page_sections import CURVES, HELD, PHASES, STEPS, section, step_bar, thinned
from lightning_parallel.tracing.text import bytes_text, count_text, gap_text, percent, seconds_text

__all__ = ["Change", "changes", "render_comparison"]

Report = Mapping[str, Any]
Write = Callable[[float], str]


class Change(NamedTuple):
    """A figure of both runs. `better` is whether less of it is better, or more."""

    name: str
    first: float | None
    second: float | None
    better: str
    write: Write

    @property
    def verdict(self) -> str:
        """The difference in words; empty where one is missing."""
        if self.first is None or self.second is None:
            return ""
        difference = self.second - self.first
        unseen = self.write is percent and percent(abs(difference)) == percent(0.0)
        if unseen or abs(difference) <= 0.005 * max(abs(self.first), abs(self.second)):
            return "the same"
        words = ("less", "more")[difference > 0]
        if self.write is percent:  # of shares the difference says more than the ratio
            return f"{percent(abs(difference))} {words}"
        share = f" ({percent(abs(difference) / self.first)})" if self.first else ""
        return f"{self.write(abs(difference))} {words}{share}"

    @property
    def kind(self) -> str:
        """`faster`, `slower`, or neither."""
        if self.verdict in ("", "the same"):
            return ""
        assert self.first is not None
        assert self.second is not None
        return "faster" if (self.second < self.first) == (self.better == "less") else "slower"


def changes(first: Report, second: Report) -> list[Change]:
    """The figures by which the runs can be compared; those that neither has, or that are 0 in both, are left out."""
    one, other = _figures(first), _figures(second)
    found = [Change(words, one.get(key), other.get(key), better, write) for key, words, better, write in _COMPARED]
    return [change for change in found if change.first or change.second]


_COMPARED: tuple[tuple[str, str, str, Write], ...] = (
    ("step", "step", "less", seconds_text),
    ("samples_per_second", "samples per second", "more", count_text),
    ("tokens_per_second", "tokens per second", "more", count_text),
    ("model_flops_utilisation", "share of peak FLOP/s", "more", percent),
    ("bubble", "pipeline bubble", "less", percent),
    ("memory", "memory of the fullest rank", "less", bytes_text),
    ("sent", "sent by a rank, per step", "less", bytes_text),
    *((name, words, "less", seconds_text) for name, words in PHASES.items()),
)


def _figures(report: Report) -> dict[str, float]:
    reports = report.get("reports", {})
    found: dict[str, float] = {}
    ranks = reports.get("StepBreakdown", {}).get("ranks", [])
    if ranks:
        found["step"] = max(rank["wall"] for rank in ranks)
        found |= _mean(ranks)
    throughput = reports.get("Throughput", {})
    names = ("samples_per_second", "tokens_per_second", "model_flops_utilisation")
    found |= {name: throughput[name] for name in names if throughput.get(name) is not None}
    bubble = reports.get("PipelineTimeline", {}).get("bubble", {}).get("measured")
    if bubble is not None:
        found["bubble"] = bubble
    held = reports.get("MemoryProfiler", {}).get("ranks", [])
    if held:
        found["memory"] = max(sum(rank.get(name) or 0 for name in HELD) for rank in held)
    records = reports.get("CommunicationProfiler", {}).get("records", [])
    if records:
        found["sent"] = sum((record.get("wire_bytes") or 0) * record["count"] for record in records)
    return found


def _mean(ranks: Sequence[Report]) -> dict[str, float]:
    """Each phase, mean over the ranks that measured it."""
    by_phase = {name: [rank[name] for rank in ranks if name in rank] for name in PHASES}
    return {name: fmean(times) for name, times in by_phase.items() if times}


# ------------------------------------------------------------------------------------------------------------- page


def render_comparison(first: Report, second: Report, names: tuple[str, str]) -> str:
    """The page of two runs.

    Args:
        first: What `report.json` of a run holds.
        second: The same of the run to compare with it.
        names: What to call them.
    """
    found = changes(first, second)
    title = f"{names[0]} and {names[1]}"
    runs = "".join(
        f"<p class=lead><b>{escape(name)}</b> {escape(f'{headline(run)} · {run_facts(run)}')}</p>"
        for name, run in zip(names, (first["run"], second["run"]))
    )
    parts = [
        f"<header><h1>{escape(title)}</h1>{runs}{figures(_headline_figures(found))}</header>",
        _differences(first["run"], second["run"], names),
        _steps(first, second, names),
        section("changes", "Figure by figure", "", _table(found, names)),
        _course(first, second, names),
        *(
            f"<section><h2>What to change in {escape(name)}</h2>{advice_list(report)}</section>"
            for name, report in zip(names, (first, second))
        ),
    ]
    return document(title, "".join(parts))


def _headline_figures(found: Sequence[Change]) -> list[tuple[str, str]]:
    shown = [change for change in found if change.name not in PHASES.values() and change.verdict]
    return [
        (
            f"{_shown(change.first, change.write)} → {_shown(change.second, change.write)}",
            f"{change.name}: {change.verdict}",
        )
        for change in shown[:4]
    ]


def _differences(first: Report, second: Report, names: tuple[str, str]) -> str:
    ignored = {"seconds", "started", "steps", "error", "error_rank", "mesh", "versions"}
    one, other = (_flat(run, ignored) for run in (first, second))
    keys = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
    rows = [[key.replace("_", " "), one.get(key, "not there"), other.get(key, "not there")] for key in keys]
    if not rows:
        return section("settings", "Settings", "", "<p>All known settings are the same.</p>")
    return section("settings", "Settings that differ", "", charts.table(["", *names], rows))


def _flat(run: Report, ignored: set[str]) -> dict[str, str]:
    flat = {key: str(value) for key, value in run.items() if key not in ignored}
    flat |= {f"{axis} size": str(size) for axis, size in (run.get("mesh") or {}).items()}
    return flat | {f"version of {name}": value for name, value in (run.get("versions") or {}).items()}


def _steps(first: Report, second: Report, names: tuple[str, str]) -> str:
    rows = []
    for name, report in zip(names, (first, second)):
        ranks = report.get("reports", {}).get("StepBreakdown", {}).get("ranks")
        if ranks:
            mean = _mean(ranks)
            rows.append(step_bar({**mean, "wall": sum(mean.values())}, name))
    if not rows:
        return ""
    kinds = {part.kind for row in rows for part in row.parts}
    keys = charts.legend({name: words for name, words in PHASES.items() if name in kinds})
    lead = "Mean of a step over all ranks, both runs on one scale. Hatched parts are waits."
    return section(
        "steps", "Where the step went", lead, keys + charts.bars(rows, "Where the time of a step went, by run")
    )


def _table(found: Sequence[Change], names: tuple[str, str]) -> str:
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in ("", *names, "difference"))
    rows = "".join(
        f'<tr><th scope="row">{escape(change.name)}</th><td>{_shown(change.first, change.write)}</td>'
        f'<td>{_shown(change.second, change.write)}</td><td class="{change.kind}">{escape(change.verdict)}</td></tr>'
        for change in found
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _shown(value: float | None, write: Write) -> str:
    return "not measured" if value is None else write(value)


def _course(first: Report, second: Report, names: tuple[str, str]) -> str:
    plots = []
    for key, _, title, unit in CURVES:
        curves = [
            Line(name, thinned(report["series"][key]), gap_text(report["series"][key]))
            for name, report in zip(names, (first, second))
            if len(report.get("series", {}).get(key, ())) > 1
        ]
        if curves:
            plots.append(charts.lines(curves, title, unit))
    return section("course", "Over the run", STEPS, f"<div class=plots>{''.join(plots)}</div>") if plots else ""
