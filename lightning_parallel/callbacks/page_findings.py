"""The parts of the page that are lists and tables: what the monitors found, and what was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from lightning_parallel.callbacks import charts
from lightning_parallel.callbacks.page_sections import found_by, section
from lightning_parallel.tracing.text import bytes_text, count_text, percent, seconds_text

__all__ = ["compression", "findings", "missing"]

Report = Mapping[str, Any]

_SIGNALS = {
    "StepBreakdown": "where the step went",
    "CommunicationProfiler": "communication by axis",
    "PipelineTimeline": "the pipeline's bubble",
    "Throughput": "throughput",
    "MemoryProfiler": "memory",
    "StragglerMonitor": "slow ranks",
    "ReplicaDriftMonitor": "whether replicas stay equal",
    "DataShardingMonitor": "whether replicas read different data",
    "CompressionMonitor": "what compression costs and saves",
}


_MOST = 50
"""Findings that are shown."""


def findings(report: Report) -> str:
    """What the monitors found: slow ranks, replicas that drift, data that is divided wrongly."""
    body = ""
    monitor = found_by(report, "StragglerMonitor")
    stragglers = monitor.get("stragglers")
    if stragglers:
        rows = [
            [f"rank {s['rank']}", (s.get("cause") or "unattributed").replace("_", " "), seconds_text(s["excess"])]
            for s in stragglers
        ]
        body += charts.table(["rank", "cause", "later than its peers, per step"], rows, "Slow ranks", words=True)
    elif stragglers is not None and not monitor.get("missing"):
        body += "<p>No rank is slower than its peers, those with the same stage and shard.</p>"
    for callback, title, good in (
        ("ReplicaDriftMonitor", "Replicas that differ", "Everything that must be equal between replicas was equal."),
        (
            "DataShardingMonitor",
            "Data",
            "Each sample went to one replica; the ranks of a replica saw the same batches.",
        ),
    ):
        found = found_by(report, callback).get("findings")
        if found:
            rows = [[str(f["step"]), f["name"], ", ".join(map(str, f["ranks"])), f["detail"]] for f in found]
            caption = title if len(rows) <= _MOST else f"{title}: the first {_MOST} of {len(rows)}"
            body += charts.table(["optimizer step", "what", "ranks", "found"], rows[:_MOST], caption, words=True)
        elif found is not None:
            body += f"<p>{good}</p>"
    return section("findings", "Slow ranks, replicas, data", "", body) if body else ""


def compression(report: Report) -> str:
    """What compression saves, costs and loses."""
    monitor = found_by(report, "CompressionMonitor")
    writers = {
        "dense_bytes": ("dense", bytes_text),
        "sent_bytes": ("sent", bytes_text),
        "ratio": ("ratio", lambda value: f"{count_text(value)} : 1"),
        "relative_error": ("relative error", percent),
        "cosine": ("cosine to the dense mean", count_text),
        "residual_norm": ("norm of the residual", count_text),
        "encode": ("encode", seconds_text),
        "wire": ("wire", seconds_text),
        "decode": ("decode", seconds_text),
    }
    rows = [[words, write(monitor[key])] for key, (words, write) in writers.items() if monitor.get(key) is not None]
    return section("compression", "Compression", "Mean of a step.", charts.table(["", ""], rows)) if rows else ""


def missing(report: Report) -> str:
    """What this page cannot tell, and what would."""
    absent = {name: words for name, words in _SIGNALS.items() if name not in report.get("reports", {})}
    if (report["run"].get("mesh") or {}).get("pipeline_parallel", 1) == 1:
        absent.pop("PipelineTimeline", None)
    if not report["run"].get("compression"):
        absent.pop("CompressionMonitor", None)
    if report["run"]["world_size"] == 1:
        for name in ("CommunicationProfiler", "StragglerMonitor", "ReplicaDriftMonitor", "DataShardingMonitor"):
            absent.pop(name, None)
    items = "".join(f"<li>{words} <small>(add <code>{name}()</code>)</small></li>" for name, words in absent.items())
    for name, found in report.get("reports", {}).items():
        sentences = list(found.get("missing", ()))
        if "incomplete" in found:
            sentences.append(f"What other ranks measured: {found['incomplete']}")
        items += "".join(f"<li>{escape(sentence)} <small>({name})</small></li>" for sentence in sentences)
    return section("missing", "Not measured", "", f"<ul class=missing>{items}</ul>") if items else ""
