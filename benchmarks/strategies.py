"""Our strategy against Lightning's own, through the Trainer, in turn, in one process group.

    python benchmarks/strategies.py [--rounds 5] [--batches 100] [--threads 1]

    one device      TensorParallelStrategy on one rank / SingleDeviceStrategy                   target <= 1.02
    data parallel   two replicas, no tensor axis / DDPStrategy                                  target <= 1.05
    tensor parallel two ranks, automatic plan / ModelParallelStrategy, hand-written DTensor plan

Only ratios of the time of equal numbers of training batches are printed; runs of both alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import TensorParallelStrategy

WIDTH, LAYERS, BATCH, WARMUP = 256, 4, 64, 5


class Project(LightningModule):
    """A stack of residual MLPs."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )

    def configure_model(self) -> None:
        """The plan that Lightning's own strategy asks its users to write."""
        if self.by_hand:
            for layer in self.layers:
                mesh = self.device_mesh["tensor_parallel"]  # type: ignore[index]
                parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Mean square of the output."""
        (x,) = batch
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Clock(Callback):
    """Seconds from batch `WARMUP` to the end of training."""

    seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP:
            self.start = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds = time.perf_counter() - self.start


def _seconds(strategy: Strategy | str, devices: int, batches: int, by_hand: bool = False) -> float:
    torch.manual_seed(0)
    clock = _Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    data = TensorDataset(torch.randn(BATCH * (batches + WARMUP) * devices, WIDTH))
    module = Project(by_hand)
    trainer.limit_train_batches = batches + WARMUP
    with contextlib.redirect_stdout(io.StringIO()):  # the table of what was sharded, many times over
        trainer.fit(module, DataLoader(data, BATCH))
    return clock.seconds


def _contests(ranks: int, batches: int) -> dict[str, tuple[Callable[[], float], Callable[[], float], str]]:
    if ranks == 1:
        ours = lambda: _seconds(TensorParallelStrategy(tensor_parallel_size=1, data_parallel_size=1), 1, batches)  # noqa: E731 (one line per contender)
        return {"one device": (ours, lambda: _seconds("auto", 1, batches), "<= 1.02")}
    return {
        "data parallel": (
            lambda: _seconds(TensorParallelStrategy(tensor_parallel_size=1, data_parallel_size=2), 2, batches),
            lambda: _seconds(DDPStrategy(), 2, batches),
            "<= 1.05",
        ),
        "tensor parallel": (
            lambda: _seconds(TensorParallelStrategy(tensor_parallel_size=2, data_parallel_size=1), 2, batches),
            lambda: _seconds(ModelParallelStrategy(1, 2), 2, batches, by_hand=True),
            "",
        ),
    }


def _measure(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(options.threads)
    store = dist.FileStore(f"{folder}/rendezvous{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    table = Table(title=f"{options.batches} batches on {ranks} rank(s), ours / Lightning's")
    for header in ("contest", "median", "least", "most", "target"):
        table.add_column(header, justify="left" if header == "contest" else "right")
    for name, (ours, theirs, target) in _contests(ranks, options.batches).items():
        ratios = []
        for turn in range(options.rounds + 1):
            os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
            mine = ours()
            os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
            ratio = mine / theirs()
            ratios += [ratio] if turn else []
        figures = (statistics.median(ratios), min(ratios), max(ratios))
        table.add_row(name, *(f"{figure:.2f}" for figure in figures), target)
    if rank == 0:
        Console().print(table)
    dist.destroy_process_group()


def main() -> None:
    """Read the options, start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            torch.multiprocessing.spawn(_measure, (ranks, folder, options), ranks)


if __name__ == "__main__":
    main()
