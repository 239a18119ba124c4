"""A training step with state divided over replicas, or in host memory, against torch's own, as ratios.

    python benchmarks/zero_stages.py [MLP] [transformer] [--ranks 2] [--threads 1] [--rounds 12]
    sudo python benchmarks/zero_stages.py late [--hosts 2] [--rate 300] [--forward-ms 100 200] [--rounds 3]

All sides train equal copies of a model in one process group, in turn, a few steps each. With AdamW, peers are
DistributedDataParallel with the whole optimizer (1.00 in each column), with torch's ZeroRedundancyOptimizer, and FSDP2:
once it keeps parameters gathered from forward to backward, once it gathers them twice, as stage 3 does. On a CPU,
`cpu_offload` shows the cost of its copies. With Muon for matrices and AdamW for other parameters, on the model of 200
small layers, the peer is DistributedDataParallel (1.00), where each rank steps on all matrices. Ratios: medians of
steps, bytes of the optimizers' state on a rank, and the most bytes alive besides the first parameters.

late: replicas gather updated parameters at once after the step, or while the next forward runs. Hosts are network
namespaces whose links are shaped by `tc tbf`. Layers sleep, as if devices computed: the given time in forward, twice as
long in backward. A third step gathers nothing. Prints the waits of a host for parameters in `optimizer.step`, and the
share of the gathering by which a step is longer than the third.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import Build, start
from shaped_network import Network, unavailable
from sleeping import LiveBytes
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from lightning_parallel.comm import Group, MeshGroups, Pending
from lightning_parallel.compat import Patches, patched
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


# ---------------------------------------------------------------------------------------------------------------- late


class _Sleep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class SleepingLayer(nn.Linear):
    """A layer that takes the time of a larger batch."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """(samples, features) -> the same."""
        return _Sleep.apply(super().forward(x), self.seconds)


LATE_SIDES = ("at once", "late", "not at all")
LAYERS, WIDTH = 8, 512


def late_side(name: str, stage: int, group: Group) -> tuple[Callable[[], None], ParameterSlices, Optimizer]:
    """A step of a model that sleeps; `name` says when replicas gather parameters."""
    torch.manual_seed(0)
    module, x = nn.Sequential(*(SleepingLayer(WIDTH, WIDTH) for _ in range(LAYERS))), torch.randn(1, WIDTH)
    parameters, optimizer = dict(module.named_parameters()), torch.optim.SGD(module.parameters(), lr=1e-3)
    slices = ParameterSlices(parameters, group)
    slices.divide(optimizer, Patches())
    if name == "late":
        slices.gather_late(module)
    elif name == "not at all":
        slices._gather = lambda *_: None  # type: ignore[method-assign]
    reducer = ScatteringReducer(parameters, slices) if stage == 2 else GradientReducer(parameters, group)
    return stepper(module, x, [optimizer], reducer.reduce)[0], slices, optimizer


def time_late(options: argparse.Namespace) -> None:
    """Measure the sides, as one host among others; the first one writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{options.address}:29500", rank=options.rank, world_size=options.hosts)
    group = Group.of(axis="data_parallel")
    found = []
    for stage in (1, 2):
        made = [late_side(name, stage, group) for name in LATE_SIDES]
        for forward_ms in options.forward_ms:
            SleepingLayer.seconds = forward_ms / 1e3 / LAYERS
            seconds = [statistics.median(times) for times in timed([step for step, *_ in made], options.rounds)]
            counts = [_waits(*side) for side in made]
            dist.barrier()
            begin = time.perf_counter()
            own = ParameterSlices._gather
            own(made[0][1], list(made[0][1]._parameters.values()), {})
            alone_s = time.perf_counter() - begin
            found.append((stage, forward_ms, seconds, counts, alone_s))
    if group.rank == 0:
        Path(options.results).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _waits(step: Callable[[], None], slices: ParameterSlices, optimizer: Optimizer) -> int:
    """Count how often `optimizer.step` waits for a message."""
    counted, inside, own_wait, own_step = [0], [False], Pending.wait, optimizer.step

    def wait(pending: Pending) -> Any:
        counted[0] += inside[0]
        return own_wait(pending)

    def step_watched() -> None:
        inside[0] = True
        own_step()
        inside[0] = False

    with patched(Pending, "wait", wait), patched(optimizer, "step", step_watched):
        step()
    slices.settle()
    return counted[0]


def show_late(options: argparse.Namespace) -> None:
    """Print a row for each stage, time of computation and side."""
    if reason := unavailable():
        print(f"late gathers are skipped: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder, Network(options.hosts, options.rate) as network:
        results = Path(folder) / "results.json"
        script = [sys.executable, __file__, *sys.argv[1:], "--results", str(results), "--address", network.address(0)]
        network.run([[*script, "--rank", str(host)] for host in range(options.hosts)], deadline_s=600)
        found = json.loads(results.read_text())
    print(f"{options.hosts} hosts, {options.rate} Mbit/s, {LAYERS} layers of {WIDTH} x {WIDTH} that sleep")
    print(f"{'stage':>5} {'forward':>8} {'gather':12} {'waits':>6} {'step':>8} {'exposed':>8}")
    for stage, forward_ms, seconds, counts, alone_s in found:
        for name, taken, waits in zip(LATE_SIDES, seconds, counts):
            exposed = (taken - seconds[-1]) / alone_s
            print(
                f"{stage:5} {forward_ms:5.0f} ms {name:12} {waits:6} {taken * 1e3:5.0f} ms {exposed:8.2f}", flush=True
            )


def late() -> None:
    """Read the options of `late`, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", type=int, default=300, help="Mbit/s")
    parser.add_argument("--forward-ms", type=float, nargs="+", default=[100, 200])
    parser.add_argument("--rounds", type=int, default=3)
    for hidden in ("--address", "--results", "--rank"):
        parser.add_argument(hidden, help=argparse.SUPPRESS, type=int if hidden == "--rank" else str)
    options = parser.parse_args()
    (show_late if options.rank is None else time_late)(options)


if __name__ == "__main__":
    if "late" in sys.argv[1:2]:
        late()
    else:
        start(__doc__ or "", f"against DistributedDataParallel\n{'':62}{'step':>10}{'state':>10}{'alive':>10}", report)
