"""A training step with state divided over replicas, or in host memory, against torch's own, as ratios.

    python benchmarks/zero_stages.py [MLP] [transformer] [--ranks 2] [--threads 1] [--rounds 12]

All sides train equal copies of a model in one process group, in turn, a few steps each. With AdamW, peers are
DistributedDataParallel with the whole optimizer (1.00 in each column), with torch's ZeroRedundancyOptimizer, and FSDP2:
once it keeps parameters gathered from forward to backward, once it gathers them twice, as stage 3 does. On a CPU,
`cpu_offload` shows the cost of its copies. With Muon for matrices and AdamW for other parameters, on the model of 200
small layers, the peer is DistributedDataParallel (1.00), where each rank steps on all matrices. Ratios: medians of
steps, bytes of the optimizers' state on a rank, and the most bytes alive besides the first parameters.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

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

from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import Patches
from lightning_parallel.data_parallel import GradientReducer, ParameterShards, ParameterSlices, ScatteringReducer
from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies.optimizers.owners import TensorOwners
from lightning_parallel.strategies.optimizers.zero import units_of

STEPS = 4
MOST_FOR_MUON = 64 * 64
Made = tuple[Callable[[], None], Sequence[Optimizer]]
Side = Callable[[nn.Module, Tensor, Group], Made]


def stepper(called: nn.Module, x: Tensor, optimizers: Sequence[Optimizer], reduce: Callable[[], None]) -> Made:
    """A training step, and its optimizers."""

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        called(x).square().mean().backward()
        reduce()
        for optimizer in optimizers:
            optimizer.step()

    return step, optimizers


def ours(stage: int, offloads: bool = False) -> Side:
    """A step with a `zero_stage`, on the device or with `cpu_offload`."""

    def side(module: nn.Module, x: Tensor, group: Group) -> Made:
        parameters, optimizer = dict(module.named_parameters()), AdamW(module.parameters())
        slices = ParameterSlices(parameters, group if stage > 0 else Group.alone("data_parallel"))
        if offloads:
            slices.offload(x.device)
        if stage > 0 or offloads:
            slices.divide(optimizer, Patches(), in_turns=True)
        reducer = ScatteringReducer(parameters, slices) if stage == 2 else GradientReducer(parameters, group)
        return stepper(module, x, [optimizer], reducer.reduce)

    return side


def ours_sharded(module: nn.Module, x: Tensor, group: Group) -> Made:
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

    return step, [optimizer]


def plain(module: nn.Module, x: Tensor, group: Group) -> Made:
    """A step of DistributedDataParallel."""
    return stepper(DistributedDataParallel(module), x, [AdamW(module.parameters())], lambda: None)


def redundancy(module: nn.Module, x: Tensor, group: Group) -> Made:
    """The same with ZeroRedundancyOptimizer, as stage 1."""
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW)
    step, _ = stepper(DistributedDataParallel(module), x, [optimizer], lambda: None)
    return step, [optimizer.optim]


def with_muon(module: nn.Module) -> list[Optimizer]:
    """Muon for the matrices, AdamW for other parameters."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in module.parameters() if parameter.dim() != 2]
    return [torch.optim.Muon(matrices), AdamW(others)]


def plain_muon(module: nn.Module, x: Tensor, group: Group) -> Made:
    """A step of DistributedDataParallel."""
    return stepper(DistributedDataParallel(module), x, with_muon(module), lambda: None)


def owned_muon(stage: int) -> Side:
    """A step with a `zero_stage`, in which each rank steps on the matrices that it owns."""

    def side(module: nn.Module, x: Tensor, group: Group) -> Made:
        parameters, groups = dict(module.named_parameters()), replicas()
        muon, other = with_muon(module)
        slices = ParameterSlices(parameters, groups.data_parallel)
        TensorOwners(module, groups, slices).take(muon, Patches(), in_turns=True)
        slices.divide(other, Patches())
        reducer = ScatteringReducer(parameters, slices) if stage == 2 else GradientReducer(parameters, group)
        return stepper(module, x, [muon, other], reducer.reduce)

    return side


@functools.cache
def replicas() -> MeshGroups:
    """Groups of a mesh with one axis."""
    return MeshGroups(Mesh(data_parallel=dist.get_world_size()))


def sharded(gathers_again: bool) -> Side:
    """A step of FSDP2 that gathers parameters once, as stage 2, or again in backward, as stage 3."""

    def side(module: nn.Module, x: Tensor, group: Group) -> Made:
        mesh = dist.init_device_mesh("cpu", (group.size,))
        for layer in next((child for child in module.modules() if isinstance(child, nn.ModuleList)), module).children():
            fully_shard(layer, mesh=mesh, reshard_after_forward=gathers_again)
        fully_shard(module, mesh=mesh, reshard_after_forward=gathers_again)
        return stepper(module, x, [AdamW(module.parameters())], lambda: None)

    return side


WITH_ADAM: dict[str, Side] = {
    "DDP": plain,
    "zero_stage=0": ours(0),
    "zero_stage=1": ours(1),
    "ZeroRedundancyOptimizer": redundancy,
    "zero_stage=2": ours(2),
    "FSDP2, gathered once": sharded(False),
    "zero_stage=3": ours_sharded,
    "FSDP2, gathered twice": sharded(True),
    "cpu_offload": ours(0, offloads=True),
    "zero_stage=1, cpu_offload": ours(1, offloads=True),
}
WITH_MUON: dict[str, Side] = {
    "DDP, Muon": plain_muon,
    "zero_stage=1, Muon": owned_muon(1),
    "zero_stage=2, Muon": owned_muon(2),
}


def state_bytes(optimizers: Sequence[Optimizer]) -> int:
    """Bytes of the state of optimizers on this rank."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
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


def measure(sides: Sequence[Side], build: Build, group: Group, rounds: int) -> list[tuple[float, int, int]]:
    """Median seconds, bytes of state and most bytes alive, by side."""
    steps, optimizers, peaks = [], [], []
    for side in sides:
        torch.manual_seed(0)
        step, made = side(*build(), group)
        steps.append(step)
        optimizers.append(made)
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
    # Muon is as new as torch 2.9. It multiplies in bf16, which takes seconds for larger matrices on most processors.
    has_muon = hasattr(torch.optim, "Muon") and all(each.numel() <= MOST_FOR_MUON for each in build()[0].parameters())
    for sides in (WITH_ADAM, WITH_MUON) if has_muon else (WITH_ADAM,):
        found = measure([*sides.values()], build, group, rounds)
        for side, numbers in zip(sides, found) if group.rank == 0 else ():
            ratios = "".join(f"{number / base:10.2f}" for number, base in zip(numbers, found[0]))
            print(f"{name:36}{side:26}{ratios}", flush=True)


if __name__ == "__main__":
    start(__doc__ or "", f"against DistributedDataParallel\n{'':62}{'step':>10}{'state':>10}{'alive':>10}", report)
