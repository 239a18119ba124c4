"""The command line `lightning-parallel`: one function per subcommand."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_parallel.callbacks.page_compare import changes, render_comparison
from lightning_parallel.callbacks.report import read_report, rebuild
from lightning_parallel.pipeline.choose import Choice, Workload, choose_schedule
from lightning_parallel.pipeline.draw import draw_picture, draw_text, legend_text
from lightning_parallel.pipeline.picture import write_picture
from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, build_schedule
from lightning_parallel.pipeline.simulate import Cost, Link, Timeline, simulate
from lightning_parallel.pipeline.validate import validate
from lightning_parallel.tracing.text import seconds_text

__all__ = ["main"]

_MOST_CANDIDATES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: Words after the program's name; by default those it was started with.

    Returns:
        The exit status: 0, or 2 for a mistake in the arguments.
    """
    parser = argparse.ArgumentParser(prog="lightning-parallel", description="Tools around lightning_parallel.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_simulate(commands)
    _add_timeline(commands)
    _add_report(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"lightning-parallel {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="make the page of a profiled run again, or compare two runs",
        description="Make the page of a run that was trained with `ProfileReport` again; of two runs, compare them.",
        epilog="example: lightning-parallel report runs/gpt/version_0 runs/gpt/version_1",
    )
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="folder of a run, or of its profile")
    parser.add_argument("--output", type=Path, help="the comparison's file (default: comparison.html in the last run)")
    parser.add_argument(
        "--kineto", type=Path, nargs="+", default=[], help="traces of torch.profiler, to be added to the run's own"
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    if len(options.runs) == 1:
        if options.output is not None:
            raise ValueError("--output names the comparison of two runs; the page of one is written beside its data")
        print(rebuild(options.runs[0], options.kineto))
        return
    if len(options.runs) > 2:
        raise ValueError(f"expected one run, or two to compare, got {len(options.runs)}")
    if options.kineto:
        raise ValueError("traces can be added to one run; give one RUN_DIR with --kineto")
    (_, first), (folder, second) = map(read_report, options.runs)
    output = options.output or folder / "comparison.html"
    one, other = (run.resolve() for run in options.runs)
    shared = os.path.commonpath([one, other])
    names = (os.path.relpath(one, shared), os.path.relpath(other, shared))
    output.write_text(render_comparison(first, second, names), encoding="utf-8")
    for change in changes(first, second):
        if change.kind:
            print(f"{change.name}: {change.verdict}")
    print(output)


def _add_timeline(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "timeline",
        help="draw the pipeline of a profiled run: as planned, and as it happened",
        description="Draw a step of a run that was trained with `PipelineTimeline` and `ProfileReport`: the schedule "
        "played with the times of each stage, and as it happened.",
        epilog="example: lightning-parallel timeline runs/gpt/version_0 --output timeline.svg",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run, or of its profile")
    parser.add_argument("--output", type=Path, action="append", default=[], help="picture to write: .svg or .png")
    parser.add_argument("--width", type=_columns, help="columns to print (default: the terminal's)")
    parser.set_defaults(run=_timeline)


def _columns(text: str) -> int:
    if not text.isdigit() or int(text) < 20:
        raise argparse.ArgumentTypeError(f"expected a number of at least 20, got `{text}`")
    return int(text)


def _timeline(options: argparse.Namespace) -> None:
    folder, report = read_report(options.run_dir)
    step = report["reports"].get("PipelineTimeline", {}).get("timeline")
    if step is None:
        raise ValueError(f"expected a run with a pipeline and `PipelineTimeline()`, found no timeline in {folder}")
    console = Console(width=options.width, highlight=False)
    planned, measured = (Timeline.from_dict(step[key]) for key in ("planned", "measured"))
    name = _title(planned.schedule)
    timelines = [(f"{name}: as planned", planned), (f"{name}: as it happened in step {step['step']}", measured)]
    for titled in timelines:
        _show(titled, console, several=True)
    _write(timelines, options.output, console)


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "simulate",
        help="play a pipeline schedule and draw it",
        description="Play a pipeline schedule with given costs; print it, and write a picture of it.",
        epilog="example: lightning-parallel simulate --ranks 4 --microbatches 8 --schedule 1f1b zb_h1 --costs 1,1,1 "
        "--latency 0.1 --output schedules.svg",
    )
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step (default: %(default)s)")
    parser.add_argument(
        "--schedule",
        nargs="+",
        default=["1f1b"],
        metavar="NAME",
        help=f"{', '.join(SCHEDULES)}; `auto`: the fastest of them; or a file with a schedule of your own, as text or "
        ".csv; several are drawn one above the other (default: 1f1b)",
    )
    parser.add_argument("--virtual-stages", type=int, help="stages on each rank (default: what the schedule needs)")
    parser.add_argument("--warmup", type=float, help="forwards run ahead, per rank of distance to the last rank")
    parser.add_argument(
        "--costs",
        default="1,2",
        help="milliseconds of one microbatch in the layers of one rank: `F,B`, `F,I,W` (input and weight gradient "
        "apart), several such groups separated by `;` for as many stages, or a .json file with a list of objects, one "
        "per stage, with the keys forward_s, input_gradient_s, weight_gradient_s, activation_bytes, boundary_bytes, "
        "resident_bytes (default: %(default)s)",
    )
    parser.add_argument("--latency", type=float, default=0.0, help="milliseconds a message takes (default: 0)")
    parser.add_argument(
        "--bandwidth", type=float, default=float("inf"), help="GB/s of a link, for boundary_bytes (default: unlimited)"
    )
    parser.add_argument("--memory-limit", type=float, help="GiB that a rank may hold, for `--schedule auto`")
    parser.add_argument("--output", type=Path, action="append", default=[], help="picture to write: .svg or .png")
    parser.add_argument("--save", type=Path, help="write the schedule itself: as text, or as .csv")
    parser.add_argument("--width", type=_columns, help="columns to print (default: the terminal's)")
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> None:
    if options.save is not None and len(options.schedule) > 1:
        raise ValueError(f"expected one schedule to save, got {len(options.schedule)}")
    console = Console(width=options.width, highlight=False)
    timelines = []
    for name in options.schedule:
        timeline = _play(name, options, console)
        timelines.append((_title(timeline.schedule), timeline))
        _show(timelines[-1], console, several=len(options.schedule) > 1)
    _write(timelines, options.output, console)
    if options.save is not None:
        schedule = timelines[0][1].schedule
        options.save.write_text(schedule.to_csv() if options.save.suffix == ".csv" else schedule.to_text())
        console.print(f"wrote {options.save}")


def _play(name: str, options: argparse.Namespace, console: Console) -> Timeline:
    costs = _read_costs(options.costs)
    link = Link(options.latency * 1e-3, options.bandwidth * 1e9)
    if name == "auto":
        choice = _choose(options, costs, link)
        console.print(_choice_table(choice))
        return choice.best.timeline
    schedule = _read_schedule(name, options)
    validate(schedule)
    return simulate(schedule, _spread(costs, schedule), link)


def _title(schedule: Schedule) -> str:
    facts = [schedule.name]
    if schedule.virtual_stages > 1:
        facts.append(f"{schedule.virtual_stages} stages a rank")
    if schedule.warmup is not None and schedule.warmup != build_schedule(schedule.name, schedule.num_ranks, 1).warmup:
        facts.append(f"warm-up {schedule.warmup:g}")
    return ", ".join(facts)


def _show(titled: tuple[str, Timeline], console: Console, several: bool) -> None:
    title, timeline = titled
    if several:
        console.print(f"\n[bold]{title}")
    console.print(*draw_text(timeline, console.width), sep="\n", soft_wrap=True)
    console.print(legend_text(timeline))
    console.print(_rank_table(timeline))


def _write(timelines: list[tuple[str, Timeline]], paths: list[Path], console: Console) -> None:
    for path in paths:
        write_picture(draw_picture(timelines), path)
        console.print(f"wrote {path}")


def _read_schedule(name: str, options: argparse.Namespace) -> Schedule:
    path = Path(name)
    if name in SCHEDULES or not path.is_file():
        return build_schedule(name, options.ranks, options.microbatches, options.virtual_stages, options.warmup)
    return Schedule.from_csv(path.read_text()) if path.suffix == ".csv" else Schedule.from_text(path.read_text())


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
        seconds = [seconds[0], seconds[1] / 2, seconds[1] / 2]
    if len(seconds) != 3:
        raise ValueError(f"expected costs as `F,B` or `F,I,W` in milliseconds, got `{group}`")
    return Cost(*seconds)


def _spread(costs: list[Cost], schedule: Schedule) -> list[Cost]:
    """One cost is that of a rank's layers, which its stages share."""
    if len(costs) == 1:
        return [costs[0].scaled(1 / schedule.virtual_stages)] * schedule.num_stages
    if len(costs) != schedule.num_stages:
        raise ValueError(f"expected costs of 1 rank or of {schedule.num_stages} stages, got {len(costs)}")
    return costs


def _choose(options: argparse.Namespace, costs: list[Cost], link: Link) -> Choice:
    """With one cost, a rank's layers are taken as four equal ones; else each cost is a layer."""
    layers = [costs[0].scaled(1 / 4)] * 4 * options.ranks if len(costs) == 1 else costs
    workload = Workload(layers, measured_microbatches=options.microbatches, link=link)
    limit = None if options.memory_limit is None else options.memory_limit * 2**30
    return choose_schedule(workload, options.ranks, [options.microbatches], memory_limit_bytes=limit)


def _choice_table(choice: Choice) -> Table:
    table = Table(*choice.HEADER, box=None, header_style="bold")
    rows = choice.rows()
    for row in rows[:_MOST_CANDIDATES]:
        table.add_row(*row, style="bold green" if row[-1] == "chosen" else None)
    if len(rows) > _MOST_CANDIDATES:
        table.caption = f"and {len(rows) - _MOST_CANDIDATES} more"
    return table


def _rank_table(timeline: Timeline) -> Table:
    """Say per rank how much of the step it computes, and above it what the step takes."""
    table = Table(
        title=f"step {seconds_text(timeline.makespan_s)}, bubble {timeline.bubble_fraction:.2%}",
        title_justify="left",
        box=None,
        header_style="bold",
    )
    for name in ("rank", "stages", "busy", "waiting", "activations held"):
        table.add_column(name, justify="left" if name == "stages" else "right")
    for rank, (busy_s, peak) in enumerate(zip(timeline.busy_s, timeline.in_flight_peaks)):
        stages = ", ".join(map(str, timeline.schedule.stages_of(rank)))
        waiting_s = timeline.makespan_s - busy_s
        table.add_row(str(rank), stages, seconds_text(busy_s), seconds_text(waiting_s), str(peak))
    return table
