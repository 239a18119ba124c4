"""The files of the package that one training step enters: how far a reader has to follow it.

    python benchmarks/step_path.py [--schedule 1f1b] [--microbatches 4]

A small GPT is trained on 2 x 2 gloo processes, tensor x pipeline, through the Trainer. In the third step, when nothing
is set up any more, every call of a Python function is noted, in all threads, from `training_step` through the optimizer
step. A file counts once it runs any function. The table lists the files in the order in which a rank first enters
them, the position on each rank, and the function by which the first of these ranks enters.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_parallel
from lightning_parallel import HybridParallelStrategy

TENSOR, PIPELINE, STEP = 2, 2, 2
RANKS = TENSOR * PIPELINE
VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 64, 32, 4, 4, 16, 8
MOST_FILES = 22
PACKAGE = Path(lightning_parallel.__file__).parent

StepPath = dict[str, str]
"""File -> first function entered, in order."""


class Block(nn.Module):
    """Causal attention and an MLP, each added to its input: (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(LightningModule):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, (batch, length, vocabulary)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        """Cross-entropy of the next token."""
        loss = F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class PathRecorder(Callback):
    """Notes the files of the package that batch `STEP` enters, from any thread."""

    def __init__(self) -> None:
        self.entered: StepPath = {}
        self._is_on = False
        threading.setprofile(self._note)  # for threads that start from now on, such as those of the strategy

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to note; Lightning calls the step after this."""
        if batch_idx == STEP:
            self._is_on = True
            sys.setprofile(self._note)

    def on_train_batch_end(self, *_: Any) -> None:
        """End; the optimizer has stepped."""
        sys.setprofile(None)
        self._is_on = False

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call":
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                name = str(file.relative_to(PACKAGE))
                self.entered.setdefault(name, getattr(frame.f_code, "co_qualname", frame.f_code.co_name))


def _rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/ranks", RANKS), rank=rank, world_size=RANKS)
    recorder = PathRecorder()
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=HybridParallelStrategy(
            pipeline_parallel_size=PIPELINE,
            tensor_parallel_size=TENSOR,
            schedule=options.schedule,
            num_microbatches=options.microbatches,
        ),
        callbacks=[recorder],
        max_steps=STEP + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(GPT(), DataLoader(torch.randint(VOCABULARY, (BATCH * (STEP + 1), LENGTH)), batch_size=BATCH))
    paths: list[StepPath] = [{} for _ in range(RANKS)]
    dist.all_gather_object(paths, recorder.entered)
    if rank == 0:
        _print(paths)
    dist.destroy_process_group()


def _print(paths: list[StepPath]) -> None:
    """Print the union of the ranks' paths, in order of first entry, and the number of files on each rank."""
    order = [list(path) for path in paths]
    union = {name for path in paths for name in path}
    places = {name: [path.index(name) if name in path else None for path in order] for name in union}
    first = {name: min((place, rank) for rank, place in enumerate(places[name]) if place is not None) for name in union}
    table = Table(title=f"files of the package that a training step enters: {len(union)} (at most {MOST_FILES})")
    for header in ("file", "first function"):
        table.add_column(header, no_wrap=True)
    for rank in range(RANKS):
        table.add_column(f"rank {rank}", justify="right")
    for name in sorted(union, key=first.__getitem__):
        shown = ("" if place is None else str(place + 1) for place in places[name])
        table.add_row(name, paths[first[name][1]][name], *shown)
    table.add_section()
    table.add_row("files", "", *(str(len(path)) for path in paths))
    Console(width=max(Console().width, 120)).print(table)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, parser.parse_args()), RANKS)


if __name__ == "__main__":
    main()
