"""`lightning-parallel report` and `timeline`: pages and drawings of a run that was profiled."""

from __future__ import annotations

import argparse
import os

from lightning_parallel.callbacks.report.comparison import changes, render_comparison
from lightning_parallel.callbacks.report.profile_report import read_report, reading_report, rebuild
from lightning_parallel.cli.drawings import draw
from lightning_parallel.pipeline.plot import schedule_title
from lightning_parallel.pipeline.simulate import Timeline
from lightning_parallel.tracing.spans import printable

__all__ = ["run_report", "run_timeline"]


def run_report(options: argparse.Namespace) -> None:
    """Write the page of a run again, or compare two runs."""
    if len(options.runs) > 2:
        raise ValueError(f"`report` takes one run, or two runs to compare; got {len(options.runs)}")
    if len(options.runs) == 2:
        _compare(options)
        return
    if options.output is not None:
        raise ValueError("`--output` names the comparison of two runs. The page of one run is written next to its data")
    print(printable(rebuild(options.runs[0], options.kineto)))


def _compare(options: argparse.Namespace) -> None:
    if options.kineto:
        raise ValueError("`--kineto` adds traces to one run; got two runs. Give one RUN_DIR")
    _, first = read_report(options.runs[0])
    folder, second = read_report(options.runs[1])
    # Runs are named by the part of their paths that differs.
    paths = [run.resolve() for run in options.runs]
    shared = os.path.commonpath(paths)
    names = (os.path.relpath(paths[0], shared), os.path.relpath(paths[1], shared))
    output = options.output or folder / "comparison.html"
    with reading_report(folder):
        page = render_comparison(first, second, names)
        found = [f"{change.name}: {change.verdict}" for change in changes(first, second) if change.kind]
    output.write_text(page, encoding="utf-8")
    print(*map(printable, (*found, output)), sep="\n")


def run_timeline(options: argparse.Namespace) -> None:
    """Draw a step of a run, planned and measured."""
    folder, report = read_report(options.run_dir)
    with reading_report(folder):
        step = report["reports"].get("PipelineTimeline", {}).get("timeline")
        if step is None:
            raise ValueError(f"The run must have a pipeline and `PipelineTimeline()`; got no timeline in {folder}")
        planned, measured = Timeline.from_dict(step["planned"]), Timeline.from_dict(step["measured"])
        name = schedule_title(planned.schedule)
        titles = f"{name}: as planned", f"{name}: as it happened in step {step['step']}"
        draw([*zip(titles, (planned, measured))], options)
