"""Predicted steps against measured ones: every layout of a few processes, of the example and of a Hugging Face model.

    python benchmarks/plan.py [--ranks 1 2 4] [--rounds 5] [--batches 10]

Each layout is run by the Trainer, in real processes, in turn; the planner measures the parts of the model in between.
All ranks compute the same before and after each of both, and the ratio is corrected by how much longer that took around
the run than around the plan: neighbours of a virtual machine change its speed by half in minutes.

For each model the caption has the mean absolute percentage error and the rank correlation over the layouts. The goal on
an idle machine is 10 % and 0.9.
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
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
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
from lightning_parallel.planner.hardware import Cluster, available_cores, measured_cpu
from lightning_parallel.planner.layouts import Layout
from lightning_parallel.planner.links import measured_links
from lightning_parallel.planner.plan_report import strategy_arguments
from lightning_parallel.planner.plans import plan

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))

SAMPLES, LENGTH, WARMUP, TOLERANCE, PROBES = 8, 64, 3, 0.15, 20


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
    """Times the steps."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.taken.append(time.perf_counter())

    def step_s(self) -> float:
        """Return the median of the steps after the first ones."""
        return statistics.median(after - before for before, after in pairwise(self.taken[WARMUP:]))


def _run(name: str, layout: Layout, ranks: int, batches: int) -> float:
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
    return clock.step_s()


def _layouts(name: str, ranks: int, links: dict[int, Link]) -> list[Layout]:
    cores = available_cores()
    threads = max(1, cores // ranks)
    module = MODELS[name]()
    length = LENGTH + 1 if name == "example" else LENGTH
    link = links.get(2, Link())
    device = measured_cpu(threads)
    cluster = Cluster(device, ranks, ranks, link, cores=cores, threads=threads, group_links=links)
    torch.set_num_threads(threads)
    found = plan(module, torch.randint(0, 256, (SAMPLES, length)), cluster, schedules=("1f1b",))
    return [layout for layout in found.layouts if not layout.refusal]


def _probe(threads: int, world: Group) -> float:
    """Return the seconds of the same computations on all ranks at a time."""
    torch.set_num_threads(threads)
    matrix, values = torch.ones(256, 256), torch.ones(1 << 18)
    all_gather_object(None, world)
    taken = []
    for _ in range(PROBES):
        begun = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
            torch.nn.functional.gelu(values)
        taken.append(time.perf_counter() - begun)
    return statistics.mean(all_gather_object(statistics.median(taken), world))


def _measure(rank: int, ranks: int, folder: str, options: argparse.Namespace, links: dict[int, Link]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    world, threads = Group.of(), max(1, available_cores() // ranks)
    rows: dict[tuple[str, Mesh], list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for name in options.models:
            # Ranks wait meanwhile: what else they would do adds to the time of the parts.
            planned = [_probe(threads, world)]
            layouts = all_gather_object(_layouts(name, ranks, links) if rank == 0 else None, world)[0]
            planned.append(_probe(threads, world))
            assert layouts is not None
            for layout in layouts:
                os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
                before = _probe(threads, world)
                steps = _run(name, layout, ranks, options.batches)
                slower = (before + _probe(threads, world)) / sum(planned)
                rows.setdefault((f"{name}: {layout.name}", layout.mesh), []).append((layout.step.total * slower, steps))
    if rank == 0:
        _show(rows)
    dist.destroy_process_group()


def _show(rows: dict[tuple[str, Mesh], list[tuple[float, float]]]) -> None:
    table = Table(title="step, predicted and measured")
    for header in ("layout", "predicted", "measured", "ratio", "of each round"):
        table.add_column(header, justify="left" if header == "layout" else "right")
    medians: dict[str, list[tuple[float, float]]] = {}
    good = 0
    for (name, _), found in rows.items():
        ratios = sorted(mine / theirs for mine, theirs in found)
        ratio = statistics.median(ratios)
        good += abs(ratio - 1) <= TOLERANCE
        predicted, measured = (statistics.median(one[which] for one in found) for which in (0, 1))
        medians.setdefault(name.partition(":")[0], []).append((ratio * measured, measured))
        milliseconds = f"{1e3 * predicted:.1f} ms", f"{1e3 * measured:.1f} ms"
        table.add_row(name, *milliseconds, f"{ratio:.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}")
    errors = "; ".join(f"{name}: {errors_text(found)}" for name, found in medians.items())
    table.caption = f"within {TOLERANCE:.0%}: {good} of {len(rows)}. {errors}"
    Console(width=120).print(table)


def errors_text(pairs: Sequence[tuple[float, float]]) -> str:
    """Describe predictions of layouts by their errors and by their order; `pairs` has (predicted, measured)."""
    error = statistics.mean(abs(predicted / measured - 1) for predicted, measured in pairs)
    text = f"mean absolute percentage error {error:.0%}"
    if len(pairs) < 3:
        return text  # two layouts have one order or the other
    predicted, measured = ([sorted(one).index(value) for value in one] for one in zip(*pairs))
    couples = list(combinations(pairs, 2))
    agreeing = sum((one[0] - other[0]) * (one[1] - other[1]) > 0 for one, other in couples)
    kendall = 2 * agreeing / len(couples) - 1
    spearman = statistics.correlation(predicted, measured)
    return f"{text}, rank correlation {spearman:.2f} (Spearman), {kendall:.2f} (Kendall)"


def main() -> None:
    """Read the options, start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            links = measured_links(ranks, available_cores()) if ranks > 1 else {}
            print(
                {
                    size: f"{1e6 * link.latency_s:.0f} us, {link.bytes_per_s / 1e9:.2f} GB/s"
                    for size, link in links.items()
                }
            )
            torch.multiprocessing.spawn(_measure, (ranks, folder, options, links), ranks)


if __name__ == "__main__":
    main()
