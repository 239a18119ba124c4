"""Predicted steps against measured ones: every layout of a few processes, of the example and of a Hugging Face model.

    python benchmarks/plan.py [--ranks 1 2 4] [--rounds 3] [--batches 10]

Each layout is run by the Trainer, in real processes, in turn; the planner measures the parts of the model in between.
`processor` compares the seconds in which all ranks compute, which the load of the machine hardly changes; `step`
compares the time of a step, and means something on an idle machine only.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.comm import Group, all_gather_object
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.simulate import Link
from lightning_parallel.planner.hardware import Cluster, measured_cpu
from lightning_parallel.planner.layouts import Layout
from lightning_parallel.planner.links import measured_link
from lightning_parallel.planner.plan_report import strategy_arguments
from lightning_parallel.planner.plans import plan

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))

SAMPLES, LENGTH, WARMUP, TOLERANCE = 8, 64, 3, 0.15


class Llama(LightningModule):
    """A small Llama of transformers, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=512,
            max_position_embeddings=128,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Next token."""
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def gpt() -> LightningModule:
    """The example's model."""
    from model import ByteGPT

    return ByteGPT(layers=4, width=96, heads=4, context=LENGTH, dropout=0.0, warmup_steps=1000)


MODELS: dict[str, Callable[[], LightningModule]] = {"example": gpt, "llama": Llama}


class _Clock(Callback):
    """Seconds of each step, of the wall and of this process."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.taken.append((time.perf_counter(), time.process_time()))

    def steps(self) -> list[tuple[float, float]]:
        """Return (wall, processor) of each step after the first ones."""
        pairs = list(zip(self.taken[WARMUP:], self.taken[WARMUP + 1 :]))
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


def _run(name: str, layout: Layout, ranks: int, batches: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    clock = _Clock()
    strategy = HybridParallelStrategy(**strategy_arguments(layout), verify="off")
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
        limit_train_batches=batches + WARMUP + 1,
    )
    length = LENGTH + 1 if name == "example" else LENGTH
    data = torch.randint(0, 256, (SAMPLES * layout.mesh.data_parallel * (batches + WARMUP + 2), length))
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(MODELS[name](), DataLoader(data, SAMPLES))  # type: ignore[arg-type]
    return clock.steps()


def _layouts(name: str, ranks: int, link: Link) -> list[Layout]:
    cores = len(os.sched_getaffinity(0))
    module = MODELS[name]()
    length = LENGTH + 1 if name == "example" else LENGTH
    cluster = Cluster(measured_cpu(), ranks, ranks, link, cores=cores)
    found = plan(module, torch.randint(0, 256, (SAMPLES, length)), cluster, schedules=("1f1b",))
    return [layout for layout in found.layouts if not layout.refusal]


def _measure(rank: int, ranks: int, folder: str, options: argparse.Namespace, link: Link) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    world = Group.of()
    rows: dict[tuple[str, Mesh], list[tuple[float, float, float, float]]] = {}
    for _ in range(options.rounds):
        for name in options.models:
            # Ranks wait meanwhile: what else they would do adds to the time of the parts.
            layouts = all_gather_object(_layouts(name, ranks, link) if rank == 0 else None, world)[0]
            assert layouts is not None
            for layout in layouts:
                os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
                everyone = all_gather_object(_run(name, layout, ranks, options.batches), world)
                # The least: other load can only add to a step, and so it is in the planner's measurements.
                wall = min(step[0] for step in everyone[0])
                processor = sum(min(step[1] for step in mine) for mine in everyone)
                found = (layout.step.total, wall, layout.processor_s, processor)
                rows.setdefault((f"{name}: {layout.name}", layout.mesh), []).append(found)
    if rank == 0:
        _show(rows)
    dist.destroy_process_group()


def _show(rows: dict[tuple[str, Mesh], list[tuple[float, float, float, float]]]) -> None:
    table = Table(title="predicted / measured, median of the rounds")
    for header in ("layout", "step", "ratio", "processor", "ratio"):
        table.add_column(header, justify="left" if header == "layout" else "right")
    good = [0, 0]
    for (name, _), found in rows.items():
        cells = [name]
        for which in (0, 1):
            pairs = [(one[2 * which], one[2 * which + 1]) for one in found]
            ratio = statistics.median(mine / theirs for mine, theirs in pairs)
            good[which] += abs(ratio - 1) <= TOLERANCE
            cells += [f"{1e3 * statistics.median(theirs for _, theirs in pairs):.1f} ms", f"{ratio:.2f}"]
        table.add_row(*cells)
    table.caption = f"within {TOLERANCE:.0%}: {good[0]} of {len(rows)} steps, {good[1]} of {len(rows)} processor times"
    Console(width=120).print(table)


def main() -> None:
    """Read the options, start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    link = measured_link()
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            torch.multiprocessing.spawn(_measure, (ranks, folder, options, link), ranks)


if __name__ == "__main__":
    main()
