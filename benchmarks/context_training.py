"""Training steps of a GPT whose sequences are split over ranks: memory of activations, and time beside peers."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from memory import GPT, WARMUP, Block, Watch, fit, show
from results import record
from sleeping import LiveBytes
from torch import Tensor
from torch_ring import TorchRing

from lightning_parallel import ContextParallelStrategy, comm
from lightning_parallel.comm import Group
from lightning_parallel.tensor.context_methods import Method, balanced_rows
from lightning_parallel.tensor.pieces import GATHERS

METHODS: tuple[Method, ...] = get_args(Method)
RANKS = 2  # ranks of `step`


class Project(LightningModule):
    """The GPT of `memory.py` with SGD, which has no state."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__()
        self.model = GPT(given.layers, given.width)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """Return the loss."""
        return self.model(tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make SGD."""
        return torch.optim.SGD(self.parameters(), 1e-2)


class ByHand(Project):
    """The same GPT, rewritten by hand: it takes the own positions, and its attention calls the ring of torch."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        group = Group.of()
        self.rule = balanced_rows(given.length, group.size).along(1)
        for block in self.model.blocks:
            block.__class__ = RingBlock

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """Return the loss of the own positions, of which each rank has as many."""
        return self.model(self.rule.split(tokens, dist.get_rank()).contiguous())


class RingBlock(Block):
    """A block whose attention calls the ring of torch."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, own positions, width) -> the same."""
        heads = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = TorchRing.apply(*heads, dist.group.WORLD)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def ours(method: Method, ranks: int) -> Strategy:
    """This library, without the self-check of the first step."""
    return ContextParallelStrategy(context_parallel_size=ranks, context_parallel_method=method, verify="off")


def train(
    make: Callable[[argparse.Namespace], Project], strategy: Strategy, given: argparse.Namespace, watch: Callback
) -> None:
    """Train a few steps."""
    torch.manual_seed(0)
    devices = 1 if isinstance(strategy, SingleDeviceStrategy) else dist.get_world_size()
    fit(make(given), strategy, given, watch, devices, given.batch, use_distributed_sampler=False)


def on_ranks(work: Callable[[argparse.Namespace], Any], ranks: int, given: argparse.Namespace) -> Any:
    """Return what `work` returns on the first of several processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (work, ranks, given, folder), ranks)
        return json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))


def _rank(
    rank: int, work: Callable[[argparse.Namespace], Any], ranks: int, given: argparse.Namespace, folder: str
) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    names = {"LOCAL_RANK": rank, "RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": ranks, "MASTER_PORT": 29417}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    found = work(given)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------------------- memory


class Peak(Callback):
    """The most bytes alive in a step besides those alive before it, and how often a line gathered a sequence."""

    def __init__(self, live: LiveBytes) -> None:
        self.live = live
        self.bytes = self.gathers = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        self.live.forget_peak()
        self.before = self.live.now, GATHERS.total()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step."""
        if batch_idx >= WARMUP:
            self.bytes = max(self.bytes, self.live.peak - self.before[0])
            self.gathers += GATHERS.total() - self.before[1]


def peaks(given: argparse.Namespace) -> dict[str, int]:
    """Return the bytes of each method, on the rank that has the most."""
    found, group = {}, Group.of()
    given = argparse.Namespace(**vars(given) | {"length": given.length * group.size})
    for method in METHODS:
        gc.collect()
        with LiveBytes() as live:
            peak = Peak(live)
            train(Project, ours(method, group.size), given, peak)
        # Data of a gathered sequence would be out of sight of `LiveBytes`.
        assert not peak.gathers, "a line gathers the sequence"
        found[method] = max(comm.all_gather_object(peak.bytes, group))
    return found


def compare_memory(given: argparse.Namespace) -> None:
    """Print the bytes of several ranks as ratios to one, at as many positions on each."""
    by_ranks = {ranks: on_ranks(peaks, ranks, given) for ranks in sorted({1, *given.ranks})}
    alone = by_ranks[1]
    shares = {
        method: {f"{ranks} ranks": found[method] / alone[method] for ranks, found in by_ranks.items() if ranks > 1}
        for method in METHODS
    }
    title = f"{given.length} positions on each rank, {alone['ring'] / 1e6:.1f} MB"
    _report("memory", title, shares, given)


# ---------------------------------------------------------------------------------------------------------------- step


class Side(NamedTuple):
    """A strategy and the module that it trains."""

    strategy: Callable[[], Strategy]
    project: Callable[[argparse.Namespace], Project] = Project


SIDES = {
    "one process": Side(lambda: SingleDeviceStrategy("cpu")),
    **{method: Side(lambda method=method: ours(method, RANKS)) for method in METHODS},
    "by hand, ring of torch": Side(DDPStrategy, ByHand),
}


def times(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the times of all sides, which train in turn."""
    group, watches = Group.of(), [Watch() for _ in SIDES]
    for number in range(given.rounds):
        turns = list(zip(SIDES.values(), watches))
        for side, watch in turns if number % 2 else reversed(turns):
            train(side.project, side.strategy(), given, watch)
            gc.collect()
    rows = []
    for name, watch in zip(SIDES, watches):
        own = statistics.median(watch.processor_s)
        # The one process runs on each rank, so that the cores are as busy as for other sides.
        work = own if name == "one process" else sum(comm.all_gather_object(own, group))
        rows.append((statistics.median(watch.wall_s), work))
    return {
        name: {"step": wall / rows[0][0], "processor": work / rows[0][1]} for name, (wall, work) in zip(SIDES, rows)
    }


def compare_steps(given: argparse.Namespace) -> None:
    """Print the time of a step as a ratio to one process."""
    _report("step", f"{given.length} positions, {RANKS} ranks", on_ranks(times, RANKS, given), given)


def _report(name: str, title: str, shares: dict[str, dict[str, float]], given: argparse.Namespace) -> None:
    show(f"{title} (load {os.getloadavg()[0]:.1f})", shares)
    if given.record:
        rounded = {side: {what: round(share, 2) for what, share in row.items()} for side, row in shares.items()}
        record(f"context, {name}", rounded)
