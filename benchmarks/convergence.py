"""The example GPT with each compressor as it comes: validation loss against that of plain means, at equal steps.

    python benchmarks/convergence.py [--ranks 2] [--steps 600] [--methods ...]

Same model, same batches in the same order, AdamW, gradients clipped; every compressor has its own run. Prints the loss
as a ratio: 1.010 is one per cent above plain means.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lightning_parallel import BlockTopK, Cast, Policy, PowerSGD, Quantize, RandomK, Sign, TopK
from lightning_parallel.comm import Group
from lightning_parallel.compression import Dense, Reducer

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 96, 2, 4, 64, 16  # the batch of all ranks together
LEARNING_RATE, WARM_UP = 3e-3, 40
EMBEDDINGS = {"embedding*": None, "position*": None}  # most of their rows have no gradient in a step
METHODS: dict[str, Callable[[], Reducer]] = {
    "plain means": Dense,
    "Cast('bf16')": Cast,
    "Quantize(8)": Quantize,
    "Quantize(4)": lambda: Quantize(4),
    "PowerSGD(4)": PowerSGD,
    "PowerSGD(8)": lambda: PowerSGD(8),
    "PowerSGD(16)": lambda: PowerSGD(16),
    "PowerSGD(4, alternate=True)": lambda: PowerSGD(alternate=True),
    "PowerSGD(16, alternate=True)": lambda: PowerSGD(16, alternate=True),
    "TopK(0.02)": TopK,
    "TopK(0.2)": lambda: TopK(0.2),
    "BlockTopK()": BlockTopK,
    "BlockTopK(0.5)": lambda: BlockTopK(0.5),
    "RandomK(0.25)": RandomK,
    "Sign()": Sign,
    "Sign(start_step=50), no embeddings": lambda: Policy({**EMBEDDINGS, "*": Sign(start_step=50)}),
    "PowerSGD(4), no embeddings": lambda: Policy({**EMBEDDINGS, "*": PowerSGD(4)}),
    "TopK(0.02), no embeddings": lambda: Policy({**EMBEDDINGS, "*": TopK()}),
}


def example() -> tuple[Any, Any]:
    """The example's data and model."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))
    from data import StandardLibrary
    from model import ByteGPT

    data = StandardLibrary(context=CONTEXT, training_bytes=2_000_000, validation_bytes=60_000)
    data.setup("fit")
    torch.manual_seed(0)
    return data, ByteGPT(layers=LAYERS, width=WIDTH, heads=HEADS, context=CONTEXT, dropout=0.0)


def train(reducer: Reducer, steps: int, group: Group) -> float:
    """Validation loss at the end."""
    data, model = example()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps))
    draws, share = torch.Generator().manual_seed(1), BATCH // group.size
    for _ in range(steps):
        chosen = torch.randint(len(data.training), (BATCH,), generator=draws)[group.rank * share :][:share]
        optimizer.zero_grad()
        model.loss(windows(data.training, chosen)).backward()
        reducer.reduce_({name: parameter.grad for name, parameter in model.named_parameters()}, group)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        chunks = torch.arange(len(data.validation)).split(256)
        losses = [model.loss(windows(data.validation, chunk)) * len(chunk) for chunk in chunks]
    return float(torch.stack(losses).sum()) / len(data.validation)


def windows(dataset: Any, chosen: Tensor) -> Tensor:
    """Windows by number, (windows, context + 1)."""
    return torch.stack([dataset[int(index)] for index in chosen])


def factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def compare(rank: int, ranks: int, file: str, steps: int, methods: list[str]) -> None:
    """Train by each method in turn; runs on every rank, the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    dense = None
    for name in methods:
        loss = train(METHODS[name](), steps, Group.of())
        dense = loss if dense is None else dense
        if rank == 0:
            print(f"{name:36} {loss:8.4f} {loss / dense:8.4f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    arguments = parser.parse_args()
    methods = list(dict.fromkeys(["plain means", *arguments.methods]))
    print(f"{arguments.ranks} ranks, {arguments.steps} steps{'':19} {'loss':>8} {'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (arguments.ranks, f"{folder}/ranks", arguments.steps, methods), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
