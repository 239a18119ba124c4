"""What the commands `report`, `timeline` and `simulate` do. Their arguments are in `lightning_parallel_cli`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_parallel.callbacks.report.comparison import changes, render_comparison
from lightning_parallel.callbacks.report.profile_report import read_report, reading_report, rebuild
from lightning_parallel.pipeline.plot import draw_svg, draw_text, legend_text, rank_table, schedule_title
from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, build_schedule
from lightning_parallel.pipeline.search import Choice, Workload, choose_schedule
from lightning_parallel.pipeline.simulate import Cost, Link, Timeline, simulate, validate
from lightning_parallel.planner.hardware import parse_bandwidth, parse_bytes, parse_seconds
from lightning_parallel.tracing.spans import printable

__all__ = ["run_report", "run_simulate", "run_timeline"]

_MOST_CANDIDATES = 20
"""Rows of the table of `--schedule auto`."""


def run_report(options: argparse.Namespace) -> None:
    """Write the page of a run again, or compare two runs."""
    if len(options.runs) > 2:
        raise ValueError(f"expected one run, or two to compare, got {len(options.runs)}")
    if len(options.runs) == 2:
        _compare(options)
        return
    if options.output is not None:
        raise ValueError("--output names the comparison of two runs; the page of one is written next to its data")
    print(printable(rebuild(options.runs[0], options.kineto)))


def _compare(options: argparse.Namespace) -> None:
    if options.kineto:
        raise ValueError("traces can be added to one run; give one RUN_DIR with --kineto")
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
            raise ValueError(f"expected a run with a pipeline and `PipelineTimeline()`, found no timeline in {folder}")
        planned, measured = Timeline.from_dict(step["planned"]), Timeline.from_dict(step["measured"])
        name = schedule_title(planned.schedule)
        titles = f"{name}: as planned", f"{name}: as it happened in step {step['step']}"
        _draw([*zip(titles, (planned, measured))], options)


def run_simulate(options: argparse.Namespace) -> None:
    """Simulate the schedules of the options, draw and save them."""
    if options.save is not None and len(options.schedule) > 1:
        raise ValueError(f"expected one schedule to save, got {len(options.schedule)}")
    costs = _read_costs(options.costs)
    timelines = []
    for name in options.schedule:
        timeline = _simulate_one(name, options, costs)
        timelines.append((schedule_title(timeline.schedule), timeline))
    _draw(timelines, options)
    if options.save is not None:
        options.save.write_text(timelines[0][1].schedule.to_text())
        print(f"wrote {options.save}")


def _simulate_one(name: str, options: argparse.Namespace, costs: list[Cost]) -> Timeline:
    bandwidth = float("inf") if options.bandwidth is None else parse_bandwidth(options.bandwidth)
    link = Link(parse_seconds(options.latency), bandwidth)
    if name == "auto":
        # With one cost, a rank's layers are taken as four equal ones; else each cost is a layer.
        layers = [costs[0].scaled(1 / 4)] * 4 * options.ranks if len(costs) == 1 else costs
        workload = Workload(layers, measured_microbatches=options.microbatches, link=link)
        limit = None if options.memory is None else parse_bytes(options.memory)
        choice = choose_schedule(workload, options.ranks, [options.microbatches], memory_limit_bytes=limit)
        Console(width=options.width, highlight=False).print(_choice_table(choice))
        return choice.best.timeline
    # A name that is neither gets the error of `build_schedule`, which lists the known ones.
    if name in SCHEDULES or not Path(name).is_file():
        schedule = build_schedule(name, options.ranks, options.microbatches, options.virtual_stages, options.warmup)
    else:
        schedule = Schedule.from_text(Path(name).read_text())
    # A schedule from a file may deadlock, which a simulation would only run into.
    validate(schedule)
    if len(costs) == 1:  # of a rank's layers, which its stages share
        costs = [costs[0].scaled(1 / schedule.virtual_stages)] * schedule.num_stages
    if len(costs) != schedule.num_stages:
        raise ValueError(f"expected costs of 1 rank or of {schedule.num_stages} stages, got {len(costs)}")
    return simulate(schedule, costs, link)


def _read_costs(text: str) -> list[Cost]:
    if text.endswith(".json"):
        try:
            return [Cost(**stage) for stage in json.loads(Path(text).read_text())]
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected a list of objects, one per stage, in {text}: {error}") from error
    return [_read_cost(group) for group in text.split(";")]


def _read_cost(group: str) -> Cost:
    try:
        seconds = [float(word) * 1e-3 for word in group.split(",")]
    except ValueError:
        seconds = []
    if len(seconds) == 2:
        # Both gradients of a matrix product are products of the same size.
        seconds = [seconds[0], seconds[1] / 2, seconds[1] / 2]
    if len(seconds) != 3:
        raise ValueError(f"expected costs as `F,B` or `F,I,W` in milliseconds, got `{group}`")
    return Cost(*seconds)


def _choice_table(choice: Choice) -> Table:
    table = Table(*choice.HEADER, box=None, header_style="bold")
    rows = choice.rows()
    for row in rows[:_MOST_CANDIDATES]:
        table.add_row(*row, style="bold green" if row[-1] == "chosen" else None)
    if len(rows) > _MOST_CANDIDATES:
        table.caption = f"and {len(rows) - _MOST_CANDIDATES} more"
    return table


def _draw(timelines: Sequence[tuple[str, Timeline]], options: argparse.Namespace) -> None:
    """Print timelines, and write them to the files that the options name."""
    console = Console(width=options.width, highlight=False)
    for title, timeline in timelines:
        if len(timelines) > 1:
            console.print(Text(f"\n{printable(title)}", style="bold"))
        # The drawing fits the width already: its lines must not be broken again.
        console.print(*draw_text(timeline, console.width), sep="\n", soft_wrap=True)
        console.print(legend_text(timeline))
        console.print(rank_table(timeline))
    for path in options.output:
        path.write_text(draw_svg(timelines), encoding="utf-8")
        console.print(f"wrote {path}", markup=False)
