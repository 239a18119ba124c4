"""The command line `lightning-parallel`: its arguments.

This package is separate from `lightning_parallel`, whose import loads torch and Lightning. So `--help`, `--version` and
argument errors answer at once. `lightning_parallel.cli` does the work of the commands.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["build_parser", "main"]

_SCHEDULES = "gpipe, 1f1b, interleaved_1f1b, zb_h1, interleaved_zb, zbv"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: Words after the program's name; by default the words of this process.

    Returns:
        The exit status: 0; 1 for a damaged checkpoint, a plan without a layout that fits, or a problem that `doctor`
        found; 2 for a mistake in the arguments.
    """
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    # For mistakes in arguments or files, the message suffices. A traceback would hide it.
    except (ValueError, RuntimeError, OSError) as error:
        from lightning_parallel.tracing.spans import printable

        print(printable(f"lightning-parallel {options.command}: {error}", keep="\n"), file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="lightning-parallel", description="Plan, check and profile runs of lightning_parallel."
    )
    version = importlib.metadata.version("lightning-parallel")
    parser.add_argument("--version", action="version", version=f"lightning-parallel {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _plan_options(commands.add_parser("plan", help="predict memory and step time of every layout of a model"))
    _inspect_options(commands.add_parser("inspect", help="print how a layout shards and splits a model"))
    _doctor_options(commands.add_parser("doctor", help="check machine, launcher and network before a run"))
    _report_options(commands.add_parser("report", help="write the report page of a run again, or compare two runs"))
    _timeline_options(commands.add_parser("timeline", help="draw a pipeline step of a run, planned and measured"))
    _simulate_options(commands.add_parser("simulate", help="simulate and draw a pipeline schedule"))
    _checkpoint_options(commands.add_parser("checkpoint", help="inspect, verify and convert checkpoints"))
    return parser


def _later(module: str, function: str) -> Callable[[argparse.Namespace], int | None]:
    """Return a function that imports the command only at its call, so that `--help` needs no torch."""
    return lambda options: getattr(importlib.import_module(f"lightning_parallel.{module}"), function)(options)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print versions, devices, limits, network and launcher of this process, and the problems among them. Paste the"
        " output into a bug report."
    )
    parser.epilog = (
        "example: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host0:29400 --no-python lightning-parallel"
        " doctor --rendezvous"
    )
    parser.add_argument(
        "--rendezvous",
        action="store_true",
        help="meet the other processes of torchrun or srun, name missing ranks, and measure the links",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, help="seconds to wait for the other processes (default: %(default)s)"
    )
    parser.set_defaults(run=_later("cli.doctor", "run_doctor"))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds; got `{text}`")
    return seconds


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predict memory and step time of every layout of a model. Print the best three, with YAML to paste. Nothing is"
        " trained, and the cluster need not exist."
    )
    parser.epilog = (
        "example: lightning-parallel plan --script main.py --config my.yaml --devices 16 --per-node 8 --device H100"
        " --inter-node-bandwidth 400Gbit/s --intra-node-bandwidth 450GB/s --output plan.html"
    )
    model = _model_options(parser)
    model.add_argument(
        "--global-batch",
        type=int,
        help="samples of an optimizer step on all replicas together (default: replicas x loader batch)",
    )
    model.add_argument(
        "--tiled",
        choices=["off", "auto"],
        default="off",
        help="plan with the loss and MLPs in tiles of positions (default: %(default)s)",
    )
    cluster = parser.add_argument_group("the devices")
    cluster.add_argument(
        "--devices", type=int, help="devices of all nodes together (default: the number in the project)"
    )
    cluster.add_argument(
        "--per-node", type=int, help="devices of each node (default: the number in the project, else all)"
    )
    cluster.add_argument(
        "--device",
        help="name of the device, such as H100, or `cpu` for this machine (default: the device of this machine)",
    )
    cluster.add_argument("--memory", metavar="80GiB", help="memory limit of a rank (default: the memory of the device)")
    cluster.add_argument(
        "--intra-node-bandwidth", metavar="450GB/s", help="bandwidth between the devices of a node, in one direction"
    )
    cluster.add_argument(
        "--inter-node-bandwidth", metavar="400Gbit/s", help="bandwidth of a device to other nodes, in one direction"
    )
    cluster.add_argument(
        "--peak", metavar="989TFLOP/s", help="peak of the device, if `--device` names a model outside the table"
    )
    cluster.add_argument(
        "--memory-bandwidth",
        metavar="3.35TB/s",
        help="memory bandwidth of the device, if `--device` names a model outside the table",
    )
    cluster.add_argument("--latency", metavar="10us", help="latency of one transfer between nodes")
    cluster.add_argument(
        "--cores", type=int, help="cores of a node that its ranks share, with `--device cpu` (default: all cores)"
    )
    long = parser.add_argument_group("a long run")
    long.add_argument(
        "--device-mtbf", metavar="50000h", help="mean time between failures of one device: predict the productive share"
    )
    long.add_argument(
        "--save-stall", default="10s", metavar="10s", help="delay of training by a checkpoint (default: %(default)s)"
    )
    long.add_argument(
        "--restart", default="5min", metavar="5min", help="time from a failure to the next step (default: %(default)s)"
    )
    long.add_argument(
        "--site-bandwidth",
        metavar="10Gbit/s",
        help="link between two such sites, which train independently for some steps",
    )
    parser.add_argument("--rows", type=int, default=20, help="number of rows in the table (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, action="append", default=[], help="file to write, which ends in .html, .svg or .json"
    )
    parser.add_argument(
        "--width", type=_columns, help="width of the output in columns (default: the width of the terminal)"
    )
    parser.set_defaults(run=_later("cli.plan_command", "run_plan"))


def _model_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments that name a model and its batch."""
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--script", metavar="MAIN.py", help="script that calls `Trainer.fit`, with or without LightningCLI"
    )
    model.add_argument(
        "--config", metavar="YAML", nargs="+", default=[], help="configuration files of a LightningCLI project"
    )
    model.add_argument(
        "--script-args", nargs=argparse.REMAINDER, default=[], help="arguments of the script; give this option last"
    )
    model.add_argument("--model", metavar="PACKAGE.MODULE:CLASS", help="LightningModule class, instead of a script")
    model.add_argument(
        "--model-args",
        metavar="JSON",
        default="{}",
        help="arguments of `--model`, as a JSON object (default: %(default)s)",
    )
    model.add_argument(
        "--batch",
        metavar="NAME=8x2048:int64",
        nargs="+",
        help="tensors of the batch of one replica (default: the first batch of the project)",
    )
    model.add_argument(
        "--precision", help="precision of the Trainer (default: the precision in the project, else 32-true)"
    )
    model.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="shard activations along the sequence, like `sequence_parallel` of the strategies",
    )
    model.add_argument(
        "--layers", default="auto", help="dotted name of the repeated layers (default: detected automatically)"
    )
    return model


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print how each layer is sharded and where the stages are split, for one layout. No process is started, and"
        " nothing is trained."
    )
    parser.epilog = "example: lightning-parallel inspect --script main.py --tensor 2 --pipeline 2"
    _model_options(parser)
    layout = parser.add_argument_group("the layout")
    layout.add_argument("--tensor", type=_count, help="tensor-parallel ranks (default: as in the script, else 1)")
    layout.add_argument("--pipeline", type=_count, help="pipeline ranks (default: as in the script, else 1)")
    layout.add_argument("--data", type=_count, help="replicas (default: as in the script, else 1)")
    layout.add_argument("--schedule", default="1f1b", help=f"{_SCHEDULES} (default: %(default)s)")
    layout.add_argument(
        "--microbatches",
        type=_count,
        help="microbatches of a step (default: as many as the batch allows, up to 4 per pipeline rank)",
    )
    layout.add_argument(
        "--zero-stage",
        type=int,
        choices=(0, 1, 2, 3),
        help="`zero_stage` of the strategies (default: as in the script, else 0)",
    )
    parser.add_argument(
        "--width", type=_columns, help="width of the output in columns (default: the width of the terminal)"
    )
    parser.set_defaults(run=_later("cli.inspect_command", "run_inspect"))


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got `{text}`")
    return int(text)


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write the report page of a run again, or compare two runs. The runs need `ProfileReport`."
    parser.epilog = "example: lightning-parallel report runs/gpt/version_0 runs/gpt/version_1"
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="folder of a run, or of its profile")
    parser.add_argument("--output", type=Path, help="file of the comparison (default: comparison.html in the last run)")
    parser.add_argument(
        "--kineto", type=Path, nargs="+", default=[], help="traces of torch.profiler to add to the trace of the run"
    )
    parser.set_defaults(run=_later("cli.report_command", "run_report"))


def _timeline_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw one pipeline step of a run twice: as simulated from the measured time of each stage, and as it happened."
        " The run needs `PipelineTimeline` and `ProfileReport`."
    )
    parser.epilog = "example: lightning-parallel timeline runs/gpt/version_0 --output timeline.svg"
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run, or of its profile")
    _drawing_options(parser)
    parser.set_defaults(run=_later("cli.report_command", "run_timeline"))


def _checkpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Inspect checkpoints; verify and convert sharded checkpoints. Paths may be URLs."
    parser.epilog = "example: lightning-parallel checkpoint merge checkpoints/epoch=0-step=10.ckpt full.ckpt"
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    inspect = actions.add_parser(
        "inspect", help="show the contents of a checkpoint, or list the checkpoints of a folder"
    )
    inspect.add_argument(
        "--tensors", action="store_true", help="show all tensors, not only the first tensors of each group"
    )
    verify = actions.add_parser(
        "verify", help="read every byte of the checkpoints; exit with status 1 if one is damaged"
    )
    merge = actions.add_parser(
        "merge", help="write one full checkpoint file, which Lightning loads without this library"
    )
    reshard = actions.add_parser("reshard", help="write the checkpoint with another number of files")
    export = actions.add_parser("export", help="write the weights as `safetensors` files in the layout of Hugging Face")
    for action in (inspect, verify, merge, reshard, export):
        action.add_argument("path", metavar="PATH", help="checkpoint, or folder of checkpoints")
        action.add_argument(
            "--width", type=_columns, help="width of the output in columns (default: the width of the terminal)"
        )
    merge.add_argument("output", metavar="OUTPUT.ckpt", help="file to write")
    reshard.add_argument("output", metavar="OUTPUT", help="folder of the new checkpoint")
    reshard.add_argument("--files", type=int, required=True, help="number of files, all of about the same size")
    export.add_argument(
        "output", metavar="OUTPUT_DIR", help="folder for the weights; a `config.json` may already be there"
    )
    export.add_argument("--max-shard-size", default="5GB", help="largest size of a file (default: %(default)s)")
    export.add_argument(
        "--prefix",
        default="",
        help="write only tensors whose names begin with this prefix, such as `model.`, and remove it (default: all)",
    )
    parser.set_defaults(run=_later("checkpoint.commands", "run_checkpoint"))


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Simulate a pipeline schedule with given costs. Print the result, and write a drawing of it."
    parser.epilog = (
        "example: lightning-parallel simulate --ranks 4 --microbatches 8 --schedule 1f1b zb_h1 --costs 1,1,1"
        " --latency 100us --output schedules.svg"
    )
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step (default: %(default)s)")
    parser.add_argument(
        "--schedule",
        nargs="+",
        default=["1f1b"],
        metavar="NAME",
        help=f"{_SCHEDULES}, `auto` for the fastest, or a text file that `--save` "
        "wrote. Several schedules are drawn below each other (default: 1f1b)",
    )
    parser.add_argument(
        "--virtual-stages", type=int, help="stages on each rank (default: the number that the schedule needs)"
    )
    parser.add_argument(
        "--warmup", type=float, help="forward passes that a rank runs ahead, per rank between it and the last rank"
    )
    parser.add_argument(
        # By default a backward takes twice as long as a forward, since it has twice the products.
        "--costs",
        default="1,2",
        help="milliseconds of one microbatch in the layers of one rank: `F,B` (forward, backward) or `F,I,W` (forward, "
        "input gradient, weight gradient). Give one group for all ranks, or one per stage, separated by `;`. A .json "
        "file holds a list of objects, one per stage, with the keys forward_s, input_gradient_s, weight_gradient_s, "
        "activation_bytes, boundary_bytes, resident_bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--latency", metavar="10us", default="0us", help="latency of one transfer (default: %(default)s)"
    )
    parser.add_argument(
        "--bandwidth", metavar="50GB/s", help="bandwidth of the links between stages (default: unlimited)"
    )
    parser.add_argument("--memory", metavar="80GiB", help="memory limit of a rank, for `--schedule auto`")
    parser.add_argument("--save", type=Path, help="text file to which the schedule is written")
    _drawing_options(parser)
    parser.set_defaults(run=_later("cli.drawings", "run_simulate"))


def _drawing_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=_svg, action="append", default=[], help="drawing to write, which ends in .svg")
    parser.add_argument(
        "--width", type=_columns, help="width of the output in columns (default: the width of the terminal)"
    )


def _columns(text: str) -> int:
    if not text.isdigit() or int(text) < 20:
        raise argparse.ArgumentTypeError(f"must be at least 20; got `{text}`")
    return int(text)


def _svg(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".svg":
        raise argparse.ArgumentTypeError(f"must end in .svg; got `{path.name}`")
    return path
