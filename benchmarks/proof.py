"""What the proof costs before the first batch, in steps of the run that it proves.

    python benchmarks/proof.py [--steps 10] [--width 256] [--layers 8] [--batch 16]

A GPT of the example trains in each layout; the time of the proof of its training step is divided by the median time of
the steps that follow. Target: at most 10.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.strategies.self_check.proof import StepProof

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))

LAYOUTS = {"tensor 2": (1, 2), "pipeline 2": (2, 1), "pipeline 2 x tensor 2": (2, 2)}  # pipeline x tensor ranks
WARMUP = 2


class _Clock(Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def _measure(rank: int, ranks: int, layout: str, folder: str, options: argparse.Namespace) -> None:
    from model import ByteGPT

    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
    store = dist.FileStore(f"{folder}/rendezvous", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    proofs: list[float] = []
    prove = StepProof.prove

    def timed(self: StepProof, *args: Any) -> None:
        start = time.perf_counter()
        prove(self, *args)
        proofs.append(time.perf_counter() - start)

    StepProof.prove = timed  # type: ignore[method-assign]
    clock = _Clock()
    pipeline, tensor = LAYOUTS[layout]
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=HybridParallelStrategy(
            pipeline_parallel_size=pipeline, tensor_parallel_size=tensor, verify="always", num_microbatches=4
        ),
        max_steps=options.steps + WARMUP,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    torch.manual_seed(0)
    module = ByteGPT(width=options.width, layers=options.layers, context=128)
    tokens = torch.randint(256, (options.batch * (options.steps + WARMUP), 129))
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, DataLoader(tokens, options.batch))  # type: ignore[arg-type]
    if rank == 0:
        step_s = statistics.median(clock.seconds[WARMUP:])
        count = sum(parameter.numel() for parameter in ByteGPT(width=options.width, layers=options.layers).parameters())
        table = Table(title=f"{layout}: {count:,} parameters, batches of {options.batch}")
        for header in ("proof / step", "target"):
            table.add_column(header, justify="right")
        table.add_row(f"{proofs[0] / step_s:.1f}", "<= 10")
        Console().print(table)
    dist.destroy_process_group()


def main() -> None:
    """Read the options, start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    for layout, (pipeline, tensor) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            ranks = pipeline * tensor
            torch.multiprocessing.spawn(_measure, (ranks, layout, folder, options), ranks)


if __name__ == "__main__":
    main()
