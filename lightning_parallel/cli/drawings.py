"""`lightning-parallel simulate`, and the drawing of timelines; needs no torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lightning_parallel.pipeline.plot import choice_table, draw_svg, draw_text, legend_text, rank_table, schedule_title
from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, build_schedule
from lightning_parallel.pipeline.search import Workload, choose_schedule
from lightning_parallel.pipeline.simulate import Cost, Link, Timeline, simulate, validate
from lightning_parallel.tracing.spans import printable
from lightning_parallel.tracing.units import parse_bandwidth, parse_bytes, parse_seconds

__all__ = ["draw", "run_simulate"]


def run_simulate(options: argparse.Namespace) -> None:
    """Simulate the schedules of the options, draw and save them."""
    if options.save is not None and len(options.schedule) > 1:
        raise ValueError(f"`--save` takes one schedule; got {len(options.schedule)}. Give `--schedule` one name")
    costs = _read_costs(options.costs)
    timelines = []
    for name in options.schedule:
        timeline = _simulate_one(name, options, costs)
        timelines.append((schedule_title(timeline.schedule), timeline))
    draw(timelines, options)
    if options.save is not None:
        options.save.write_text(timelines[0][1].schedule.to_text())
        print(f"wrote {options.save}")


def _simulate_one(name: str, options: argparse.Namespace, costs: list[Cost]) -> Timeline:
    bandwidth = float("inf") if options.bandwidth is None else parse_bandwidth(options.bandwidth)
    link = Link(parse_seconds(options.latency), bandwidth)
    if name == "auto":
        # A single cost is the cost of a rank, taken as four equal layers. Several costs are the costs of layers.
        layers = [costs[0].scaled(1 / 4)] * 4 * options.ranks if len(costs) == 1 else costs
        workload = Workload(layers, measured_microbatches=options.microbatches, link=link)
        limit = None if options.memory is None else parse_bytes(options.memory)
        choice = choose_schedule(workload, options.ranks, [options.microbatches], memory_limit_bytes=limit)
        Console(width=options.width, highlight=False).print(choice_table(choice, most=20))
        return choice.best.timeline
    # For an unknown name `build_schedule` raises an error that lists the known names.
    if name in SCHEDULES or not Path(name).is_file():
        schedule = build_schedule(name, options.ranks, options.microbatches, options.virtual_stages, options.warmup)
    else:
        schedule = Schedule.from_text(Path(name).read_text())
    # A schedule from a file may deadlock: check it before the simulation runs into the deadlock.
    validate(schedule)
    if len(costs) == 1:  # the cost of a rank, which its stages share
        costs = [costs[0].scaled(1 / schedule.virtual_stages)] * schedule.num_stages
    if len(costs) != schedule.num_stages:
        raise ValueError(
            f"`--costs` must have 1 group for all ranks, or {schedule.num_stages}, one per stage; got {len(costs)}"
        )
    return simulate(schedule, costs, link)


def _read_costs(text: str) -> list[Cost]:
    if text.endswith(".json"):
        try:
            return [Cost(**stage) for stage in json.loads(Path(text).read_text())]
        except (TypeError, ValueError) as error:
            raise ValueError(f"`--costs` must hold a list of objects, one per stage; got {text}: {error}") from error
    return [_read_cost(group) for group in text.split(";")]


def _read_cost(group: str) -> Cost:
    try:
        seconds = [float(word) * 1e-3 for word in group.split(",")]
    except ValueError:
        seconds = []
    if len(seconds) == 2:
        # Split B evenly: both gradients of a matrix product are products of the same size.
        seconds = [seconds[0], seconds[1] / 2, seconds[1] / 2]
    if len(seconds) != 3:
        raise ValueError(f"`--costs` must be `F,B` or `F,I,W` in milliseconds; got `{group}`")
    return Cost(*seconds)


def draw(timelines: Sequence[tuple[str, Timeline]], options: argparse.Namespace) -> None:
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
