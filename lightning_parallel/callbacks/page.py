"""The page `report.html`: one file that holds everything it shows, from the figures of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from lightning_parallel.callbacks import page_findings
from lightning_parallel.callbacks import page_sections as sections
from lightning_parallel.tracing.text import count_text, percent, seconds_text

__all__ = ["advice_list", "document", "figures", "headline", "render", "run_facts"]

Report = Mapping[str, Any]


def render(report: Report) -> str:
    """The page of one run.

    Args:
        report: What `report.json` holds; every part but `run` may be absent.
    """
    run = report["run"]
    parts = [
        f"<header><h1>{escape(headline(run))}</h1><p class=lead>{escape(run_facts(run))}</p>"
        f"{_ending(run)}{figures(key_figures(report))}</header>",
        f"<section aria-labelledby=diagnosis><h2 id=diagnosis>What to change</h2>{advice_list(report)}</section>",
        sections.steps(report),
        sections.pipeline(report),
        sections.communication(report),
        sections.memory(report),
        sections.course(report),
        page_findings.findings(report),
        page_findings.compression(report),
        page_findings.missing(report),
        _footer(report),
    ]
    return document(headline(run), "".join(parts))


def document(title: str, body: str) -> str:
    """A whole HTML file around `body`, with style and script inside."""
    here = resources.files("lightning_parallel.callbacks")
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style}</style></head>'
        f'<body><main>{body}</main><div id="tip"></div><div id="spoken" class="unseen" aria-live="polite"></div>'
        f'<script type="module">{script}</script></body></html>'
    )


def headline(run: Report) -> str:
    """The run in a few words."""
    return f"{run.get('model', 'Training')} on {run['world_size']} rank{'s' if run['world_size'] > 1 else ''}"


def run_facts(run: Report) -> str:
    """What was run, when and how, in one line."""
    mesh = run.get("mesh") or {}
    sizes = " × ".join(f"{size} {axis.replace('_', ' ')}" for axis, size in mesh.items() if size > 1)
    schedule = run.get("schedule")
    microbatches = f", {run['num_microbatches']} microbatches" if run.get("num_microbatches") else ""
    facts = [
        run.get("strategy"),
        sizes,
        f"schedule {schedule}{microbatches}" if schedule else None,
        f"batch of {run['global_batch']:g}" if run.get("global_batch") else None,
        run.get("precision"),
        run.get("device"),
        f"{run['steps']} steps in {seconds_text(run['seconds'])}" if "seconds" in run else f"{run['steps']} steps",
        run.get("started", "")[:16],
    ]
    return " · ".join(fact for fact in facts if fact)


def _ending(run: Report) -> str:
    error = run.get("error")
    if not error:
        return ""
    where = f" on rank {run['error_rank']}" if run["world_size"] > 1 and "error_rank" in run else ""
    return f"<p class=ending><b>The run ended with an error{where}.</b> {escape(error)}</p>"


def key_figures(report: Report) -> list[tuple[str, str]]:
    """The numbers on top: value and what it is."""
    reports = report.get("reports", {})
    ranks = reports.get("StepBreakdown", {}).get("ranks", [])
    throughput = reports.get("Throughput", {})
    bubble = reports.get("PipelineTimeline", {}).get("bubble", {}).get("measured")
    found = []
    if ranks:
        wall = sum(rank["wall"] for rank in ranks)
        found.append((seconds_text(max(rank["wall"] for rank in ranks)), "per step"))
        computing = sum(rank.get("forward", 0.0) + rank.get("backward", 0.0) for rank in ranks)
        found.append((percent(computing / wall), "of the time in forward and backward"))
    for key, words in (("samples_per_second", "samples per second"), ("tokens_per_second", "tokens per second")):
        if throughput.get(key) is not None:
            found.append((count_text(throughput[key]), words))
    if throughput.get("model_flops_utilisation") is not None:
        found.append((percent(throughput["model_flops_utilisation"]), "of peak FLOP/s"))
    if bubble is not None:
        found.append((percent(bubble), "pipeline bubble"))
    return found


def figures(found: Iterable[tuple[str, str]]) -> str:
    """Large numbers with words below them."""
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(words)}</span></li>" for value, words in found)
    return f"<ul class=figures>{items}</ul>" if items else ""


_SHOWN = 3
"""Findings with a gain that are shown at once; the smaller ones open on demand."""
_WORDS = {"wrong": "Wrong", "slow": "", "note": "Remark", "good": "Fine"}


def advice_list(report: Report) -> str:
    """The diagnosis as a list."""
    found: Sequence[Report] = report.get("diagnosis", [])
    if not found:
        text = "Nothing was measured that would tell. Add `StepBreakdown()` to the callbacks."
        return f"<p class=lead>{prose(text)}</p>"
    small = [advice for advice in found if advice["kind"] == "slow"][_SHOWN:]
    shown = [advice for advice in found if advice not in small]
    text = f"<ol class=advice>{''.join(map(_advice, shown))}</ol>"
    if small:
        more = f"{len(small)} smaller finding{'s' if len(small) > 1 else ''}"
        text += f"<details><summary>{more}</summary><ol class=advice>{''.join(map(_advice, small))}</ol></details>"
    return text


def _advice(advice: Report) -> str:
    gain = f"{percent(advice['gain'])}<small>of a step, at most</small>" if advice["gain"] else _WORDS[advice["kind"]]
    return (
        f'<li class="{advice["kind"]}"><div class=gain>{gain}</div>'
        f"<div><strong>{prose(advice['title'])}.</strong><p>{prose(advice['text'])}</p></div></li>"
    )


def prose(text: str) -> str:
    """Text with words in back-ticks set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def _footer(report: Report) -> str:
    run = report["run"]
    versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
    trace = report.get("trace")
    text = _about_trace(trace) if trace else ""
    return f"<footer>{text}<p class=lead>{escape(versions)}</p></footer>"


def _about_trace(trace: Report) -> str:
    within = trace["uncertainty"]
    clocks = f"clocks aligned within {seconds_text(within)}" if within else "all on one clock"
    steps = f"the last {trace['steps']} steps" if trace["steps"] > 1 else "the last step"
    ranks = f"{len(trace['ranks'])} ranks, {clocks}" if len(trace["ranks"]) > 1 else "one rank"
    return (
        f"<p><code>{escape(trace['file'])}</code> beside this page holds {steps} of {ranks}."
        ' Open it at <a href="https://ui.perfetto.dev">ui.perfetto.dev</a>, which reads it inside the browser.</p>'
    )
