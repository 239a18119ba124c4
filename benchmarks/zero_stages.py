"""A training step with state divided over replicas: `zero_stage` 0 to 3 against torch's own, as ratios.

    python benchmarks/zero_stages.py [MLP] [transformer] [--ranks 2] [--threads 1] [--rounds 12]

All sides train equal copies of a model in one process group with AdamW, in turn, a few steps each. Peers are
DistributedDataParallel with the whole optimizer (1.00 in each column), with torch's ZeroRedundancyOptimizer, and FSDP2:
once it keeps parameters gathered from forward to backward, once it gathers them twice, as stage 3 does. Ratios: medians
of steps, bytes of the optimizer's state on a rank, and the most bytes alive besides the first parameters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from data_parallel import Build, start
from sleeping import LiveBytes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches
from lightning_parallel.data_parallel import GradientReducer, ParameterShards, ParameterSlices, ScatteringReducer
from lightning_parallel.strategies.optimizers.zero import units_of

STEPS = 4
Side = Callable[[nn.Module, Tensor, Group], tuple[Callable[[], None], Optimizer]]


def stepper(called: nn.Module, x: Tensor, optimizer: Optimizer, reduce: Callable[[], None]) -> Callable[[], None]:
    """A training step."""

    def step() -> None:
        optimizer.zero_grad()
        called(x).square().mean().backward()
        reduce()
        optimizer.step()

    return step


def ours(stage: int) -> Side:
    """A step with a `zero_stage`."""

    def side(module: nn.Module, x: Tensor, group: Group) -> tuple[Callable[[], None], Optimizer]:
        parameters, optimizer = dict(module.named_parameters()), AdamW(module.parameters())
        slices = ParameterSlices(parameters, group)
        if stage > 0:
            slices.divide(optimizer, Patches())
        reducer = ScatteringReducer(parameters, slices) if stage == 2 else GradientReducer(parameters, group)
        return stepper(module, x, optimizer, reducer.reduce), optimizer

    return side


def ours_sharded(module: nn.Module, x: Tensor, group: Group) -> tuple[Callable[[], None], Optimizer]:
    """A step with `zero_stage=3`."""
    optimizer = AdamW(module.parameters())
    parameters = dict(module.named_parameters())
    slices = ParameterShards(units_of(module), group, lambda operation: None)
    slices.divide(optimizer, Patches())
    reducer = ScatteringReducer(parameters, slices)

    def step() -> None:
        optimizer.zero_grad()
        with slices.in_pass(is_last=False):
            loss = module(x).square().mean()
        with slices.in_pass():
            loss.backward()
        reducer.reduce()
        optimizer.step()

    return step, optimizer


def plain(module: nn.Module, x: Tensor, group: Group) -> tuple[Callable[[], None], Optimizer]:
    """A step of DistributedDataParallel."""
    optimizer = AdamW(module.parameters())
    return stepper(DistributedDataParallel(module), x, optimizer, lambda: None), optimizer


def redundancy(module: nn.Module, x: Tensor, group: Group) -> tuple[Callable[[], None], Optimizer]:
    """The same with ZeroRedundancyOptimizer, as stage 1."""
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW)
    return stepper(DistributedDataParallel(module), x, optimizer, lambda: None), optimizer.optim


def sharded(gathers_again: bool) -> Side:
    """A step of FSDP2 that gathers parameters once, as stage 2, or again in backward, as stage 3."""

    def side(module: nn.Module, x: Tensor, group: Group) -> tuple[Callable[[], None], Optimizer]:
        mesh = dist.init_device_mesh("cpu", (group.size,))
        for layer in next((child for child in module.modules() if isinstance(child, nn.ModuleList)), module).children():
            fully_shard(layer, mesh=mesh, reshard_after_forward=gathers_again)
        fully_shard(module, mesh=mesh, reshard_after_forward=gathers_again)
        optimizer = AdamW(module.parameters())
        return stepper(module, x, optimizer, lambda: None), optimizer

    return side


SIDES: dict[str, Side] = {
    "DDP": plain,
    "zero_stage=0": ours(0),
    "zero_stage=1": ours(1),
    "ZeroRedundancyOptimizer": redundancy,
    "zero_stage=2": ours(2),
    "FSDP2, gathered once": sharded(False),
    "zero_stage=3": ours_sharded,
    "FSDP2, gathered twice": sharded(True),
}


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state on this rank."""
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in values)


def timed(steps: list[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Seconds of each step by side; every step begins together on all ranks."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 1):
        for side in range(len(steps)) if number % 2 else reversed(range(len(steps))):
            for _ in range(STEPS):
                dist.barrier()
                start = time.perf_counter()
                steps[side]()
                times[side].append(time.perf_counter() - start)
    return [side[STEPS:] for side in times]  # the first round is for warming up


def measure(build: Build, group: Group, rounds: int) -> list[tuple[float, int, int]]:
    """Median seconds, bytes of state and most bytes alive, by side."""
    steps, optimizers, peaks = [], [], []
    for side in SIDES.values():
        torch.manual_seed(0)
        step, optimizer = side(*build(), group)
        steps.append(step)
        optimizers.append(optimizer)
        torch.manual_seed(0)
        module, x = build()
        with LiveBytes() as live:
            watched, _ = side(module, x, group)
            for _ in range(3):
                watched()
        peaks.append(live.peak)
    medians = [statistics.median(times) for times in timed(steps, rounds)]
    return list(zip(medians, map(state_bytes, optimizers), peaks))


def report(name: str, build: Build, group: Group, rounds: int) -> None:
    """Measure a model, and print a row for each side on the first rank."""
    found = measure(build, group, rounds)
    for side, numbers in zip(SIDES, found) if group.rank == 0 else ():
        ratios = "".join(f"{number / base:10.2f}" for number, base in zip(numbers, found[0]))
        print(f"{name:36}{side:26}{ratios}", flush=True)


if __name__ == "__main__":
    start(__doc__ or "", f"against DistributedDataParallel\n{'':62}{'step':>10}{'state':>10}{'alive':>10}", report)
