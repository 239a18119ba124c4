"""The command line `lightning-parallel`: its arguments.

Apart from the package, whose import loads torch and Lightning: `--help`, `--version` and mistakes in the arguments
answer at once. What the commands do is in `lightning_parallel.cli`.
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
        arguments: Words after the program's name; by default those of this process.

    Returns:
        The exit status: 0; 1 for a damaged checkpoint, a plan without a layout that fits, or a problem that `doctor`
        found; 2 for a mistake in the arguments.
    """
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    # Mistakes in arguments or files: the message is enough, a traceback would hide it.
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
    """Return a function that imports the command when it is called."""
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
        "--timeout", type=_seconds, default=60.0, help="seconds to wait for the others (default: %(default)s)"
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
        help="samples of an optimizer step over all replicas (default: replicas x loader batch)",
    )
    cluster = parser.add_argument_group("the devices")
    cluster.add_argument("--devices", type=int, help="number of devices on all nodes (default: that of the project)")
    cluster.add_argument("--per-node", type=int, help="devices of each node (default: that of the project, or all)")
    cluster.add_argument(
        "--device",
        help="model of the device, such as H100; `cpu` for this machine (default: the device of this machine)",
    )
    cluster.add_argument("--memory", metavar="80GiB", help="memory limit of a rank (default: memory of the device)")
    cluster.add_argument("--intra-node-bandwidth", metavar="450GB/s", help="between devices of a node, one direction")
    cluster.add_argument("--inter-node-bandwidth", metavar="400Gbit/s", help="between nodes per device, one direction")
    cluster.add_argument("--peak", metavar="989TFLOP/s", help="peak of a device that `--device` does not know")
    cluster.add_argument("--memory-bandwidth", metavar="3.35TB/s", help="memory bandwidth of such a device")
    cluster.add_argument("--latency", metavar="10us", help="latency of a message between nodes")
    cluster.add_argument("--cores", type=int, help="cores of a node, shared by its ranks, with `--device cpu`")
    parser.add_argument("--rows", type=int, default=20, help="rows of the table (default: %(default)s)")
    parser.add_argument("--output", type=Path, action="append", default=[], help="file to write: .html, .svg or .json")
    parser.add_argument("--width", type=_columns, help="columns to print (default: the terminal's)")
    parser.set_defaults(run=_later("cli.plan_command", "run_plan"))


def _model_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments that name a model and its batch."""
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--script", metavar="MAIN.py", help="a script that calls `Trainer.fit`, with LightningCLI or not"
    )
    model.add_argument(
        "--config", metavar="YAML", nargs="+", default=[], help="configuration files of a LightningCLI project"
    )
    model.add_argument(
        "--script-args", nargs=argparse.REMAINDER, default=[], help="all further arguments go to the script"
    )
    model.add_argument("--model", metavar="PACKAGE.MODULE:CLASS", help="a LightningModule class, instead of a script")
    model.add_argument("--model-args", metavar="JSON", default="{}", help="arguments of the class, as a JSON object")
    model.add_argument("--batch", metavar="NAME=8x2048:int64", nargs="+", help="tensors of the batch of one replica")
    model.add_argument("--precision", help="precision of the Trainer (default: that of the project, or 32-true)")
    model.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="shard activations along the sequence, as in TensorParallelStrategy",
    )
    model.add_argument("--layers", default="auto", help="dotted name of the repeated layers (default: detected)")
    return model


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print how each layer is sharded and where the stages are split, for one layout. No process is started, and"
        " nothing is trained."
    )
    parser.epilog = "example: lightning-parallel inspect --script main.py --tensor 2 --pipeline 2"
    _model_options(parser)
    layout = parser.add_argument_group("the layout")
    layout.add_argument("--tensor", type=_count, default=1, help="tensor-parallel ranks (default: %(default)s)")
    layout.add_argument("--pipeline", type=_count, default=1, help="pipeline ranks (default: %(default)s)")
    layout.add_argument("--data", type=_count, default=1, help="replicas (default: %(default)s)")
    layout.add_argument("--schedule", default="1f1b", help=f"{_SCHEDULES} (default: %(default)s)")
    layout.add_argument(
        "--microbatches", type=_count, help="microbatches of a step (default: as many as fit, up to 4 a rank)"
    )
    layout.add_argument("--zero-stage", type=int, choices=(0, 1, 2), default=0, help="as in the strategies")
    parser.add_argument("--width", type=_columns, help="columns to print (default: the terminal's)")
    parser.set_defaults(run=_later("cli.inspect_command", "run_inspect"))


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got `{text}`")
    return int(text)


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make the page of a run with `ProfileReport` again; of two runs, compare them."
    parser.epilog = "example: lightning-parallel report runs/gpt/version_0 runs/gpt/version_1"
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="folder of a run, or of its profile")
    parser.add_argument("--output", type=Path, help="the comparison's file (default: comparison.html in the last run)")
    parser.add_argument(
        "--kineto", type=Path, nargs="+", default=[], help="traces of torch.profiler, to be added to the run's own"
    )
    parser.set_defaults(run=_later("cli.report_command", "run_report"))


def _timeline_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw a step of a run that was trained with `PipelineTimeline` and `ProfileReport`: the schedule simulated with"
        " the times of each stage, and as it happened."
    )
    parser.epilog = "example: lightning-parallel timeline runs/gpt/version_0 --output timeline.svg"
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run, or of its profile")
    _drawing_options(parser)
    parser.set_defaults(run=_later("cli.report_command", "run_timeline"))


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
    parser.set_defaults(run=_later("checkpoint.commands", "run_checkpoint"))


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Simulate a pipeline schedule with given costs; print it, and write a drawing of it."
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
        help=f"{_SCHEDULES}; `auto` for the fastest; or a text file, as --save "
        "writes it. Several are drawn below each other (default: 1f1b)",
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
    parser.add_argument("--latency", default="0us", help="latency of a message, such as 10us (default: 0us)")
    parser.add_argument(
        "--bandwidth", metavar="50GB/s", help="bandwidth of a link, for boundary_bytes (default: unlimited)"
    )
    parser.add_argument("--memory", metavar="80GiB", help="memory limit of a rank, for `--schedule auto`")
    parser.add_argument("--save", type=Path, help="write the schedule itself, as text")
    _drawing_options(parser)
    parser.set_defaults(run=_later("cli.drawings", "run_simulate"))


def _drawing_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=_svg, action="append", default=[], help="drawing to write: .svg")
    parser.add_argument("--width", type=_columns, help="columns to print (default: the terminal's)")


def _columns(text: str) -> int:
    if not text.isdigit() or int(text) < 20:
        raise argparse.ArgumentTypeError(f"must be at least 20; got `{text}`")
    return int(text)


def _svg(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".svg":
        raise argparse.ArgumentTypeError(f"must end in .svg; got `{path.name}`")
    return path
