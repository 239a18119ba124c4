"""The example GPT with each compressor and with local steps: validation loss against that of plain means.

    python benchmarks/convergence.py [--ranks 2] [--steps 600] [--methods ...] [--record]

Same model, same batches in the same order, AdamW, gradients clipped; every method has its own run. Prints the loss as a
ratio, 1.010 is one per cent above plain means, and the bytes that plain means send for each byte of the method.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results import record
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from lightning_parallel import BlockTopK, Cast, Policy, PowerSGD, Quantize, RandomK, Sign, TopK
from lightning_parallel.comm import Group
from lightning_parallel.compression import Dense, Reducer
from lightning_parallel.data_parallel import DriftExchange

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 96, 2, 4, 64, 16  # the batch of all ranks together
LEARNING_RATE, WARM_UP = 3e-3, 40
EMBEDDINGS = {"embedding*": None, "position*": None}  # most of their rows have no gradient in a step


class LocalSteps(NamedTuple):
    """Local steps with an exchange of drifts, as `LocalSGDStrategy` takes them."""

    every_n_steps: int
    reducer: Reducer
    outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    fragments: int = 1
    overlap_steps: int = 0
    start_step: int = 0
    average_first: int = 4
    is_torch: bool = False  # torch's averager instead


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer of DiLoCo."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def sparse(ratio: float) -> Reducer:
    """The encoding of SparseLoCo: top-k of each chunk in 2 bits."""
    return TopK(ratio, chunk=4096, feedback="fading") | Quantize(2)


METHODS: dict[str, Callable[[], Reducer | LocalSteps]] = {
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
    "local 10": lambda: LocalSteps(10, Dense()),
    "local 10, torch's post-local SGD": lambda: LocalSteps(10, Dense(), start_step=40, is_torch=True),
    "local 10, Quantize(4)": lambda: LocalSteps(10, Quantize(4)),
    "local 10, nesterov": lambda: LocalSteps(10, Dense(), nesterov),
    "local 10, nesterov, Quantize(4)": lambda: LocalSteps(10, Quantize(4), nesterov),
    "local 20, nesterov, Quantize(4)": lambda: LocalSteps(20, Quantize(4), nesterov),
    "local 30, nesterov, Quantize(4)": lambda: LocalSteps(30, Quantize(4), nesterov),
    "the same, 2 fragments, overlap 5": lambda: LocalSteps(30, Quantize(4), nesterov, fragments=2, overlap_steps=5),
    "the same, late": lambda: LocalSteps(30, Quantize(4), nesterov, overlap_steps=30),
    "local 10, late, average": lambda: LocalSteps(10, Quantize(4), overlap_steps=10),
    "local 20, SparseLoCo(0.03)": lambda: LocalSteps(20, sparse(0.03)),
    "local 20, SparseLoCo(0.1)": lambda: LocalSteps(20, sparse(0.1)),
    "local 20, nesterov, SparseLoCo(0.1)": lambda: LocalSteps(20, sparse(0.1), nesterov),
    "local 10, TopK(0.05), fading": lambda: LocalSteps(10, TopK(0.05, feedback="fading")),
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


def train(method: Reducer | LocalSteps, steps: int, group: Group) -> tuple[float, float]:
    """Validation loss at the end, and bytes that one rank sends in a step on average."""
    data, model = example()
    local = method if isinstance(method, LocalSteps) else None
    reducer = Dense() if local is not None else method
    assert isinstance(reducer, Reducer)
    exchange = None if local is None or local.is_torch else drift_exchange(model, local, group)
    start_step = 0 if local is None else local.start_step
    averager = PeriodicModelAverager(local.every_n_steps, start_step) if local is not None and local.is_torch else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps))
    draws, share = torch.Generator().manual_seed(1), BATCH // group.size
    for step in range(steps):
        chosen = torch.randint(len(data.training), (BATCH,), generator=draws)[group.rank * share :][:share]
        optimizer.zero_grad()
        model.loss(windows(data.training, chosen)).backward()
        is_local = local is not None and step >= start_step
        if exchange is not None and is_local and step == start_step:
            exchange.begin()
        if not is_local:
            reducer.reduce_({name: parameter.grad for name, parameter in model.named_parameters()}, group)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if exchange is not None and is_local:
            exchange.count_step()
        if averager is not None:
            averager.average_parameters(model.parameters())
        schedule.step()
    if exchange is not None:
        exchange.flush()
        exchange.close()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    sent = reducer.wire_bytes(shapes, group.size) if local is None else local.reducer.wire_bytes(shapes, group.size)
    sent /= 1 if local is None else local.every_n_steps
    with torch.no_grad():
        chunks = torch.arange(len(data.validation)).split(256)
        losses = [model.loss(windows(data.validation, chunk)) * len(chunk) for chunk in chunks]
    return float(torch.stack(losses).sum()) / len(data.validation), sent


def drift_exchange(model: nn.Module, local: LocalSteps, group: Group) -> DriftExchange:
    """What averages the drift of the replicas."""
    side = Group.of(dist.new_group(), "data_parallel") if local.overlap_steps else None
    return DriftExchange(
        dict(model.named_parameters()),
        group,
        local.reducer,
        local.outer,
        every_n_steps=local.every_n_steps,
        average_first=local.average_first,
        fragments=local.fragments,
        overlap_steps=local.overlap_steps,
        side_group=side,
    )


def windows(dataset: Any, chosen: Tensor) -> Tensor:
    """Windows by number, (windows, context + 1)."""
    return torch.stack([dataset[int(index)] for index in chosen])


def factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def compare(rank: int, ranks: int, file: str, steps: int, methods: list[str], keep: bool) -> None:
    """Train by each method in turn; runs on every rank, the first one prints, and writes the figures to `keep`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    dense, dense_bytes = 0.0, 0.0
    for name in methods:
        loss, sent = train(METHODS[name](), steps, Group.of())
        dense, dense_bytes = dense or loss, dense_bytes or sent
        if rank == 0:
            print(f"{name:36} {loss:8.4f} {loss / dense:8.4f} {dense_bytes / sent:8.1f}", flush=True)
            if keep:
                figures = {"loss": round(loss / dense, 4), "fewer_bytes": round(dense_bytes / sent, 2)}
                record("convergence", {name: figures})
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--record", action="store_true", help="write the figures to benchmarks/results.json")
    arguments = parser.parse_args()
    methods = list(dict.fromkeys(["plain means", *arguments.methods]))
    print(f"{arguments.ranks} ranks, {arguments.steps} steps{'':19} {'loss':>8} {'ratio':>8} {'bytes':>8}")
    with tempfile.TemporaryDirectory() as folder:
        given = (arguments.ranks, f"{folder}/ranks", arguments.steps, methods, arguments.record)
        mp.spawn(compare, given, nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
