"""The command line `lightning-parallel`: `plan`, `report`, `timeline`, `simulate`, `checkpoint`.

Drawing a schedule needs neither torch nor Lightning: commands that read a profiled run import them for themselves. (So
does `lightning_parallel/__init__.py`, eagerly: importing the package registers the names of strategies.)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_parallel.pipeline.plot import draw_svg, draw_text, legend_text, rank_table, schedule_title
from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, build_schedule
from lightning_parallel.pipeline.search import Choice, Workload, choose_schedule
from lightning_parallel.pipeline.simulate import Cost, Link, Timeline, simulate, validate
from lightning_parallel.tracing.spans import printable

__all__ = ["main"]

_MOST_CANDIDATES = 20
"""Rows of the table of `--schedule auto`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: Words after the program's name; by default those it was started with.

    Returns:
        The exit status: 0, 1 for a damaged checkpoint or a plan in which no layout can be run, or 2 for a mistake in
        the arguments.
    """
    parser = argparse.ArgumentParser(prog="lightning-parallel", description="Tools around lightning_parallel.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _plan_options(commands.add_parser("plan", help="find out on how many devices a model fits, and its best layout"))
    _report_options(commands.add_parser("report", help="make the page of a profiled run again, or compare two runs"))
    summary = "draw the pipeline of a profiled run: as planned, and as it happened"
    _timeline_options(commands.add_parser("timeline", help=summary))
    _simulate_options(commands.add_parser("simulate", help="simulate a pipeline schedule and draw it"))
    _checkpoint_options(commands.add_parser("checkpoint", help="look at checkpoints, check and convert sharded ones"))
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    # Mistakes in arguments or files; the message says what was expected, a traceback would only hide it.
    except (ValueError, RuntimeError, OSError) as error:
        # With the status that argparse gives to mistakes which it finds by itself.
        print(printable(f"lightning-parallel {options.command}: {error}", keep="\n"), file=sys.stderr)
        return 2


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predict memory and step time of every layout of a model on a cluster, which need not be here; print the best"
        " three with YAML to paste. Nothing is trained."
    )
    parser.epilog = (
        "example: lightning-parallel plan --script main.py --config my.yaml --devices 16 --per-node 8 --device H100"
        " --link 400Gbit/s --node-link 450GB/s --output plan.html"
    )
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--script", metavar="MAIN.py", help="a script that calls `Trainer.fit`, with LightningCLI or not"
    )
    model.add_argument(
        "--config", metavar="YAML", nargs="+", default=[], help="configuration of a LightningCLI project"
    )
    model.add_argument("--script-args", nargs=argparse.REMAINDER, default=[], help="further words for the script, last")
    model.add_argument("--model", metavar="PACKAGE.MODULE:CLASS", help="a LightningModule by itself")
    model.add_argument("--model-args", metavar="JSON", default="{}", help="arguments of its constructor")
    model.add_argument("--batch", metavar="NAME=8x2048:int64", nargs="+", help="tensors of a replica's batch")
    model.add_argument(
        "--global-batch", type=int, help="samples of an optimizer step (default: each replica's loader's)"
    )
    model.add_argument("--precision", help="as the Trainer names it (default: the project's, or 32-true)")
    model.add_argument("--sequence-parallel", action="store_true", help="see TensorParallelStrategy")
    model.add_argument("--layers", default="auto", help="dotted name of the repeated layers (default: found)")
    cluster = parser.add_argument_group("the devices")
    cluster.add_argument("--devices", type=int, help="all of them (default: the project's)")
    cluster.add_argument("--per-node", type=int, help="on each node (default: the project's, or all on one)")
    cluster.add_argument(
        "--device", help="such as H100 or A100-80GB; `cpu`: cores of this machine (default: what is here)"
    )
    cluster.add_argument("--memory", metavar="80GiB", help="that a rank may hold (default: the device's)")
    cluster.add_argument("--node-link", metavar="450GB/s", help="between devices of a node, in one direction")
    cluster.add_argument("--link", metavar="400Gbit/s", help="between nodes, for each device, in one direction")
    cluster.add_argument("--latency", type=float, help="microseconds of a message between nodes")
    cluster.add_argument("--cores", type=int, help="of a node, which its ranks share, with `--device cpu`")
    parser.add_argument("--rows", type=int, default=20, help="of the table (default: %(default)s)")
    parser.add_argument("--output", type=Path, action="append", default=[], help="file to write: .html, .svg or .json")
    parser.add_argument("--width", type=_columns, help="columns to print (default: the terminal's)")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from lightning_parallel.cli.plan_command import run_plan

    return run_plan(options)


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make the page of a run with `ProfileReport` again; of two runs, compare them."
    parser.epilog = "example: lightning-parallel report runs/gpt/version_0 runs/gpt/version_1"
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="folder of a run, or of its profile")
    parser.add_argument("--output", type=Path, help="the comparison's file (default: comparison.html in the last run)")
    parser.add_argument(
        "--kineto", type=Path, nargs="+", default=[], help="traces of torch.profiler, to be added to the run's own"
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    # Imported here and below: callbacks load torch and Lightning, which a drawing does not need.
    from lightning_parallel.callbacks.report.profile_report import rebuild

    if len(options.runs) > 2:
        raise ValueError(f"expected one run, or two to compare, got {len(options.runs)}")
    if len(options.runs) == 2:
        _compare(options)
        return
    if options.output is not None:
        raise ValueError("--output names the comparison of two runs; the page of one is written next to its data")
    print(printable(rebuild(options.runs[0], options.kineto)))


def _compare(options: argparse.Namespace) -> None:
    from lightning_parallel.callbacks.report.comparison import changes, render_comparison
    from lightning_parallel.callbacks.report.profile_report import read_report, reading_report

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


def _timeline_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw a step of a run that was trained with `PipelineTimeline` and `ProfileReport`: the schedule simulated with"
        " the times of each stage, and as it happened."
    )
    parser.epilog = "example: lightning-parallel timeline runs/gpt/version_0 --output timeline.svg"
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run, or of its profile")
    _drawing_options(parser)
    parser.set_defaults(run=_timeline)


def _timeline(options: argparse.Namespace) -> None:
    from lightning_parallel.callbacks.report.profile_report import read_report, reading_report

    folder, report = read_report(options.run_dir)
    with reading_report(folder):
        step = report["reports"].get("PipelineTimeline", {}).get("timeline")
        if step is None:
            raise ValueError(f"expected a run with a pipeline and `PipelineTimeline()`, found no timeline in {folder}")
        planned, measured = Timeline.from_dict(step["planned"]), Timeline.from_dict(step["measured"])
        name = schedule_title(planned.schedule)
        titles = f"{name}: as planned", f"{name}: as it happened in step {step['step']}"
        _draw([*zip(titles, (planned, measured))], options)


def _checkpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Look at checkpoints; check and convert sharded ones. Paths may be URLs."
    parser.epilog = "example: lightning-parallel checkpoint merge checkpoints/epoch=0-step=10.ckpt whole.ckpt"
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    inspect = actions.add_parser(
        "inspect", help="show what is in a checkpoint, a folder or a file, or list those of a folder"
    )
    inspect.add_argument("--tensors", action="store_true", help="show all tensors, not only the first of each kind")
    verify = actions.add_parser("verify", help="read every byte of a checkpoint, or of all in a folder; 1 if damaged")
    merge = actions.add_parser("merge", help="write one ordinary file, which Lightning loads without this library")
    reshard = actions.add_parser("reshard", help="write the same checkpoint in another number of files")
    export = actions.add_parser("export", help="write the weights as Hugging Face's `safetensors` files")
    for action in (inspect, verify, merge, reshard, export):
        action.add_argument("path", metavar="PATH", help="a checkpoint, or a folder of several")
        action.add_argument("--width", type=_columns, help="columns to print (default: the terminal's)")
    merge.add_argument("output", metavar="OUTPUT.ckpt", help="the file to write")
    reshard.add_argument("output", metavar="OUTPUT", help="the new checkpoint's folder")
    reshard.add_argument("--files", type=int, required=True, help="into how many files; each is about as large")
    export.add_argument("output", metavar="OUTPUT_DIR", help="folder for the weights, beside a `config.json`")
    export.add_argument("--max-shard-size", default="5GB", help="most bytes of a file (default: %(default)s)")
    export.add_argument(
        "--prefix", default="", help="write only names that begin with it, without it, such as `model.` (default: all)"
    )
    parser.set_defaults(run=_checkpoint)


def _checkpoint(options: argparse.Namespace) -> int:
    from lightning_parallel.checkpoint.commands import COMMANDS

    return COMMANDS[options.action](options)


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Simulate a pipeline schedule with given costs; print it, and write a drawing of it."
    parser.epilog = (
        "example: lightning-parallel simulate --ranks 4 --microbatches 8 --schedule 1f1b zb_h1 --costs 1,1,1"
        " --latency 0.1 --output schedules.svg"
    )
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step (default: %(default)s)")
    parser.add_argument(
        "--schedule",
        nargs="+",
        default=["1f1b"],
        metavar="NAME",
        help=f"{', '.join(SCHEDULES)}; `auto`: the fastest of them; or a text file with your own schedule, as --save "
        "writes it; several are drawn one above the other (default: 1f1b)",
    )
    parser.add_argument("--virtual-stages", type=int, help="stages on each rank (default: what the schedule needs)")
    parser.add_argument("--warmup", type=float, help="forwards run ahead, per rank of distance to the last rank")
    parser.add_argument(
        # By default a backward takes twice as long as a forward, since it has twice the products.
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
    parser.add_argument("--save", type=Path, help="write the schedule itself, as text")
    _drawing_options(parser)
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> None:
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
    link = Link(options.latency * 1e-3, options.bandwidth * 1e9)
    if name == "auto":
        # With one cost, a rank's layers are taken as four equal ones; else each cost is a layer.
        layers = [costs[0].scaled(1 / 4)] * 4 * options.ranks if len(costs) == 1 else costs
        workload = Workload(layers, measured_microbatches=options.microbatches, link=link)
        limit = None if options.memory_limit is None else options.memory_limit * 2**30
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


def _drawing_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, action="append", default=[], help="drawing to write: .svg")
    parser.add_argument("--width", type=_columns, help="columns to print (default: the terminal's)")


def _columns(text: str) -> int:
    if not text.isdigit() or int(text) < 20:
        raise argparse.ArgumentTypeError(f"expected a number of at least 20, got `{text}`")
    return int(text)


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
        if path.suffix != ".svg":
            raise ValueError(f"expected a file name ending in .svg, got `{path.name}`")
        path.write_text(draw_svg(timelines), encoding="utf-8")
        console.print(f"wrote {path}", markup=False)
