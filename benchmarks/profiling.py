"""What measuring costs: a step with all callbacks against one without, in turn, and the cost of a span.

    python benchmarks/profiling.py [--step 0.05] [--blocks 5] [--steps 60] [--ranks 2] [--strategy tensor|ddp]

Every step sleeps for `--step` seconds, as if a device computed, and runs a small model besides, tensor-parallel or in
replicas, whose collectives are recorded. Runs with and without callbacks alternate, so that a change of the machine's
speed meets both; what is compared is the first decile over all steps, which other processes disturb least: of the step,
and of the processor time that the main thread spends in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import TensorParallelStrategy, tracing
from lightning_parallel.callbacks import (
    CommunicationProfiler,
    HangWatchdog,
    MemoryProfiler,
    PipelineTimeline,
    ProfileReport,
    ReplicaDriftMonitor,
    StepBreakdown,
    StragglerMonitor,
    Throughput,
)
from lightning_parallel.callbacks.monitors.communication import CommunicationAccumulator
from lightning_parallel.callbacks.monitors.step_times import BreakdownAccumulator
from lightning_parallel.callbacks.recording.collective_tracer import CollectiveTracer, trace_collectives
from lightning_parallel.tracing import InFlight, Recorder

Step = tuple[float, float]

MOST_SHARE, MOST_SPAN_S = 0.01, 3e-6
WARMUP = 3


class Model(LightningModule):
    """Eight tensor-parallel blocks, and a sleep."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(8))
        )

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """The mean square of what the blocks give."""
        time.sleep(self.step_s)
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """The time from the end of one step to the end of the next, and the main thread's processor time in it."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self.ends.append((time.perf_counter(), time.thread_time()))

    @property
    def steps(self) -> list[Step]:
        """Seconds of each step after the first ones."""
        pairs = zip(self.ends[WARMUP:], self.ends[WARMUP + 1 :])
        return [(wall[1] - wall[0], busy[1] - busy[0]) for wall, busy in (zip(*pair) for pair in pairs)]


def _measuring(folder: str) -> list[Callback]:
    makers: tuple[Callable[..., Callback], ...] = (
        StepBreakdown,
        CommunicationProfiler,
        PipelineTimeline,
        Throughput,
        StragglerMonitor,
    )
    report = ProfileReport(f"{folder}/report", show_diagnosis=False)
    others = (MemoryProfiler(show_table=False), ReplicaDriftMonitor(show_table=False), HangWatchdog(), report)
    return [*(make(show_table=False) for make in makers), *others]


def _strategy(arguments: argparse.Namespace) -> Any:
    if arguments.ranks == 1:
        return "auto"
    if arguments.strategy == "ddp":
        return DDPStrategy(bucket_cap_mb=0.1, process_group_backend="gloo")
    return TensorParallelStrategy(tensor_parallel_size=arguments.ranks)


def _block(arguments: argparse.Namespace, callbacks: list[Callback]) -> list[Step]:
    """Step times of one run."""
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.ranks,
        strategy=_strategy(arguments),
        callbacks=[*callbacks, clock],
        max_steps=arguments.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(Model(arguments.step), DataLoader(torch.randn(4 * arguments.steps, 64), batch_size=4))
    return clock.steps


def _worker(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(arguments.ranks))
    torch.set_num_threads(1)
    if arguments.ranks > 1:
        store = dist.FileStore(f"{folder}/rendezvous", arguments.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    off, on = list[Step](), list[Step]()
    for block in range(2 * arguments.blocks):
        measured = block % 2 == 1
        (on if measured else off).extend(_block(arguments, _measuring(folder) if measured else []))
    calls = _calls() if arguments.ranks > 1 else {}
    if rank == 0:
        _print(arguments, off, on, {**_spans(), **calls})


def _calls(count: int = 300, repeats: int = 5) -> dict[str, float]:
    """Seconds of processor time of the main thread that seeing a collective of torch's takes."""

    def reduce() -> float:
        start = time.thread_time()
        for _ in range(count):
            dist.all_reduce(numbers)
        return (time.thread_time() - start) / count

    numbers = torch.zeros(4)
    plain, seen = list[float](), list[float]()
    for _ in range(repeats):
        plain.append(reduce())
        recorder = Recorder()
        with trace_collectives(CollectiveTracer({}), recorder), tracing.activate(recorder):
            seen.append(reduce())
    return {"seeing a collective": min(seen) - min(plain)}


def _print(arguments: argparse.Namespace, off: list[Step], on: list[Step], spans: dict[str, float]) -> None:
    wall, busy = (statistics.quantiles(kind, n=10)[0] for kind in zip(*off))
    measured_wall, measured_busy = (statistics.quantiles(kind, n=10)[0] for kind in zip(*on))
    table = Table(title=f"all callbacks, {len(on)} steps each, {arguments.ranks} rank(s)")
    for header in ("", "found", "at most"):
        table.add_column(header, justify="right")
    table.add_row("longer step", f"{(measured_wall - wall) / wall:.2%}", f"{MOST_SHARE:.0%}")
    table.add_row("more processor time / step", f"{(measured_busy - busy) / wall:.2%}", f"{MOST_SHARE:.0%}")
    for name, seconds in spans.items():
        limit = f"{MOST_SPAN_S * 1e6:.0f} us" if "off" not in name and "seeing" not in name else ""
        table.add_row(name, f"{seconds * 1e6:.2f} us", limit)
    Console().print(table)
    print(f"a step: {wall * 1e3:.2f} ms without callbacks, {measured_wall * 1e3:.2f} ms with")


def _spans(count: int = 20_000, repeats: int = 5) -> dict[str, float]:
    """Seconds of one span: as a phase, as a communication, what the accumulators add to that, and with nothing on."""

    def phases() -> None:
        for _ in range(count):
            with tracing.span("forward", "forward"):
                pass

    def communications() -> None:
        active = tracing.active()
        assert active is not None
        for _ in range(count):
            flight = InFlight(active, "all_reduce", "tensor_parallel", (0, 1), 1024, "float32", None)
            with flight:
                pass
            flight.finish()

    def accumulation() -> None:
        communication, breakdown = CommunicationAccumulator(0, None, {}, []), BreakdownAccumulator({"rank": 0})
        communication.add(window)
        breakdown.add(window)

    found = {"a span with recording off": min(_seconds(phases) for _ in range(repeats)) / count}
    with tracing.activate(Recorder()) as active:
        found["a phase"] = min(_seconds(phases) for _ in range(repeats)) / count
        active.close_step()
        found["a communication"] = min(_seconds(communications) for _ in range(repeats)) / count
        (window,) = active.close_step()
    found["adding it up"] = min(_seconds(accumulation) for _ in range(repeats)) / len(window.spans)
    return found


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--blocks", type=int, default=5, help="runs with, and as many without")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=("tensor", "ddp"), default="tensor")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_worker, (arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
