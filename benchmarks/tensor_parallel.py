"""Tensor parallelism: our automatic plan against a hand-written DTensor plan, in turn, in one process group.

    python benchmarks/tensor_parallel.py [--widths 128 256 512 1024] [--steps 30] [--ranks 2] [--threads 1]
    python benchmarks/tensor_parallel.py --experts [eager | batched_mm | grouped_mm] [--widths 128 256]

The same transformer (pre-norm blocks, separate query, key and value), the same input, forward + backward + SGD step.
Steps of both alternate, so that a change of the machine's speed meets both. Only ratios are printed: ours / DTensor,
below 1 is faster. They depend on the threads per rank.

With `--experts`, transformers' Mixtral (eight experts, two for each token): ours against one process, the first rank
alone with as many threads, and the share of the parameters that a rank holds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from gpu_models import Block
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_parallel.comm import Group
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import apply_plan

TARGETS = {128: 0.45, 256: 0.55, 512: 0.75, 1024: 0.95}
BATCH, LENGTH, LAYERS, WARMUP = 4, 128, 4, 3


def _stepper(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    return step


def _pair(width: int) -> dict[str, Callable[[], None]]:
    """One step of each contender; both start from the same weights."""
    torch.manual_seed(0)
    ours = nn.Sequential(*(Block(width, max(4, width // 64)) for _ in range(LAYERS)))
    theirs = copy.deepcopy(ours)
    group = Group.of(axis="tensor_parallel")
    plan = make_plan(ours, "auto", group)
    assert not plan.notes, plan.notes
    apply_plan(ours, plan, group)
    mesh = init_device_mesh("cpu", (group.size,))
    styles = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    for block in theirs:
        parallelize_module(block, mesh, {**styles, "out": RowwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(BATCH, LENGTH, width)
    return {"ours": _stepper(ours, x), "DTensor": _stepper(theirs, x)}


def _experts(width: int, implementation: str) -> tuple[dict[str, Callable[[], None]], float]:
    """One step of each contender on a Mixture of Experts, and the share of the parameters that a rank holds."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(4, width // 64),
        num_key_value_heads=max(2, width // 128),
        num_local_experts=8,
        vocab_size=256,
    )
    torch.manual_seed(0)
    whole = MixtralForCausalLM(config)
    whole.set_experts_implementation(implementation)
    ours = copy.deepcopy(whole)
    group = Group.of(axis="tensor_parallel")
    apply_plan(ours, make_plan(ours, "auto", group), group)
    held = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, whole)]
    tokens = torch.randint(256, (BATCH, LENGTH))

    def stepper(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        return step

    alone = stepper(whole) if group.rank == 0 else lambda: None
    return {"ours": stepper(ours), "one process": alone}, held[0] / held[1]


def _measure(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    store = dist.FileStore(f"{folder}/rendezvous", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    peer = "one process" if options.experts else "DTensor"
    table = Table(title=f"step time, ours / {peer}: {ranks} gloo ranks, {options.threads} thread(s) each")
    for header in ("width", "median", "least", "most", "parameters held" if options.experts else "target"):
        table.add_column(header, justify="right")
    for width in options.widths:
        share = 1.0
        if options.experts:
            steps, share = _experts(width, options.experts)
        else:
            steps = _pair(width)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.steps + WARMUP):
            for name, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
        ratios = [ours / theirs for ours, theirs in zip(seconds["ours"][WARMUP:], seconds[peer][WARMUP:])]
        figures = (statistics.median(ratios), min(ratios), max(ratios))
        target = f"<= {TARGETS[width]}" if width in TARGETS else ""
        last = f"{share:.0%}" if options.experts else target
        table.add_row(str(width), *(f"{figure:.2f}" for figure in figures), last)
    if rank == 0:
        Console().print(table)
    dist.destroy_process_group()


def main() -> None:
    """Read the options, start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--experts", choices=["eager", "batched_mm", "grouped_mm"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure, (options.ranks, folder, options), options.ranks)


if __name__ == "__main__":
    main()
