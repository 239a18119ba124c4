"""Files of a profiled run: the report as data, the page, the trace; written, read and made again."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_parallel.callbacks.measuring import VERSION, finite
from lightning_parallel.callbacks.report.diagnosis import diagnose
from lightning_parallel.callbacks.report.page import render
from lightning_parallel.callbacks.report.trace import add_kineto, chrome_trace, read_json, read_trace, write_trace

__all__ = [
    "PAGE",
    "REPORT",
    "TRACE",
    "build_report",
    "first_error",
    "part_path",
    "read_parts",
    "read_report",
    "rebuild",
    "write_files",
    "write_part",
]

PAGE, REPORT, TRACE = "report.html", "report.json", "trace.json.gz"


def build_report(
    run: Mapping[str, Any],
    reports: Mapping[str, Mapping[str, Any]],
    loss: Sequence[Sequence[float]],
    trace: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Put together the contents of `report.json`, with the diagnosis.

    Args:
        run: Facts of the run.
        reports: Reports of the other callbacks, by name.
        loss: (step, loss).
        trace: Trace of `chrome_trace`, if there is one.
    """
    series = dict(reports.get("Throughput", {}).get("series", {}))
    report: dict[str, Any] = {"version": VERSION, "run": run, "reports": reports, "series": series}
    if loss:
        series["loss"] = loss
    if trace is not None:
        # The trace may be large, and the page must not have to read it: its facts are kept in the report.
        clocks = trace["otherData"]["clocks"]
        report["trace"] = {
            "file": TRACE,
            "ranks": [clock["rank"] for clock in clocks],
            "left_out": trace["otherData"]["left_out"],
            "steps": len({event["name"] for event in trace["traceEvents"] if event.get("cat") == "step"}),
            "uncertainty": max((clock["uncertainty_ns"] for clock in clocks), default=0) / 1e9,
        }
    # Before the diagnosis, which sees the same figures as that of a report that was written and read again.
    report = finite(report)
    report["diagnosis"] = [advice.to_dict() for advice in diagnose(report)]
    return report


def write_files(folder: Path, report: Mapping[str, Any], trace: Mapping[str, Any] | None) -> None:
    """Write page, data and trace."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT).write_text(json.dumps(report, indent=1, allow_nan=False), encoding="utf-8")
    (folder / PAGE).write_text(render(report), encoding="utf-8")
    if trace is not None:
        write_trace(trace, folder / TRACE)


def read_report(path: Path) -> tuple[Path, dict[str, Any]]:
    """Read the report of a run; returns the folder in which it lies, and the report.

    Args:
        path: That folder, or one that contains it as `profile`, such as the trainer's log folder.

    Raises:
        ValueError: If there is none, or one that this version cannot read.
    """
    for folder in (path, path / "profile"):
        file = folder / REPORT
        if file.is_file():
            report = read_json(file)
            if not isinstance(report, dict) or report.get("version") != VERSION or "run" not in report:
                raise ValueError(f"expected a report of version {VERSION} in {file}, as `ProfileReport` writes it")
            return folder, report
    raise ValueError(f"expected the folder of a profiled run, with `{REPORT}` or `profile/{REPORT}`, got {path}")


def rebuild(path: Path, kineto: Sequence[Path] = ()) -> Path:
    """Make the page of a run again with the rules of this version; returns its path.

    After an error, parts of the trace that came too late for rank 0 are added.

    Args:
        path: See `read_report`.
        kineto: Traces of `torch.profiler` to add to the run's own.

    Raises:
        ValueError: If there is no report, or a trace cannot be added.
    """
    folder, report = read_report(path)
    run = report["run"]
    trace = None
    parts = read_parts(folder, run["world_size"], run["started"], patience_s=0)
    if parts:
        trace = chrome_trace(parts, run["mesh"])
        run = {**run, **first_error(parts)}
    if kineto:
        trace = read_trace(folder / TRACE) if trace is None else trace
        for file in kineto:
            add_kineto(trace, read_trace(file))
    rebuilt = build_report(run, report["reports"], report["series"].get("loss", []), trace)
    # Without a trace to write, the one that is there stays, and so does what the report says about it.
    write_files(folder, rebuilt if trace is not None else {**report, **rebuilt}, trace)
    return folder / PAGE


def first_error(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Find the earliest error among the ranks, of which those of the others are the consequence; empty without any."""
    # On one clock: a rank that fails makes the others fail a little later.
    failed = [(part["failed_ns"] + part["clock"]["offset_ns"], part) for part in parts if "error" in part]
    if not failed:
        return {}
    _, first = min(failed, key=lambda one: one[0])
    return {"error": first["error"], "error_rank": first["rank"]}


def part_path(folder: Path, rank: int) -> Path:
    """Give the file in which a rank leaves its part of the trace."""
    return folder / f"part{rank}.json.gz"


def write_part(path: Path, part: Mapping[str, Any]) -> None:
    """Write one rank's part of a trace, so that others see it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Rank 0 looks for the file while it is written: only a rename makes it appear at once.
    partial = path.with_name(f".{path.name}")
    with gzip.open(partial, "wt", encoding="utf-8") as file:
        json.dump(part, file)
    partial.replace(path)


def read_parts(folder: Path, world_size: int, run: str, patience_s: float) -> list[dict[str, Any]]:
    """Read the parts that ranks of this run leave within `patience_s`; files that are not whole are passed over."""
    until = time.monotonic() + patience_s
    found: dict[int, dict[str, Any]] = {}
    while len(found) < world_size:
        for rank in set(range(world_size)) - found.keys():
            with suppress(ValueError, FileNotFoundError):
                part = read_json(part_path(folder, rank))
                if isinstance(part, dict) and part.pop("run", None) == run:
                    found[rank] = part
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return [found[rank] for rank in sorted(found)]
