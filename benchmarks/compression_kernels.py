"""Compression arithmetic and its collectives against their counterparts in torch, as ratios.

    python benchmarks/compression_kernels.py [--ranks 4] [--device cuda]

The counterparts: torch's PowerSGD hook, called as DDP calls it in a group of one; `torch.topk`; an fp32 all-reduce over
gloo on this host. Both sides run in turn, several times in a row each; the medians are compared. On a CPU one thread
computes, as in a rank that shares its host.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression import Cast, PowerSGD, Quantize, Sign, TopK
from lightning_parallel.compression.sparsifiers import largest

ROUNDS, REPEATS = 3, 6


class Bucket:
    """What the hook asks of DDP's bucket."""

    def __init__(self, flat: torch.Tensor, shapes: list[tuple[int, ...]]) -> None:
        self.flat, self.shapes = flat, shapes

    def buffer(self) -> torch.Tensor:
        return self.flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[torch.Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        return [part.view(shape) for part, shape in zip(self.flat.split(sizes), self.shapes)]


def seconds(call: Callable[[], Any], device: str) -> float:
    """Wall-clock seconds of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(ours: Callable[[], Any], peer: Callable[[], Any], device: str) -> tuple[float, float]:
    """Median seconds of both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, taken in zip((ours, peer), times):
            call()
            taken += [seconds(call, device) for _ in range(REPEATS)]
    return statistics.median(times[0]), statistics.median(times[1])


def show(what: str, ours: float, peer: float, target: str = "") -> None:
    """Print one line of the table."""
    print(f"{what:58} {ours * 1e3:8.2f} {peer * 1e3:8.2f} {ours / peer:8.3f}  {target}", flush=True)


def powersgd(device: str) -> None:
    """Compress and decompress a 33 MB bucket."""
    shapes = [(1024, 1024)] * 8
    flat = torch.randn(sum(torch.Size(shape).numel() for shape in shapes), device=device)
    for rank in (1, 2, 4, 8):
        state = torch_powersgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
        torch_bucket, our_bucket = Bucket(flat.clone(), shapes), Bucket(flat.clone(), shapes)
        ours = PowerSGD(rank)
        named = {f"weight{index}": gradient for index, gradient in enumerate(our_bucket.gradients())}

        def ours_step(ours: PowerSGD = ours, named: dict[str, torch.Tensor] = named) -> None:
            ours.reduce_(named, Group.alone("alone"))

        def torch_step(state: Any = state, bucket: Any = torch_bucket) -> None:
            torch_powersgd.powerSGD_hook(state, bucket).wait()

        ours_s, torch_s = compare(ours_step, torch_step, device)
        show(f"PowerSGD rank {rank}, 8 x 1024 x 1024 / torch's hook", ours_s, torch_s, "<= 0.25" if rank == 4 else "")


def selection(device: str) -> None:
    """Find the largest elements."""
    n, k = 2_000_000, 20_000
    values = torch.randn(1, n, device=device)
    ours_s, torch_s = compare(lambda: largest(values, k), lambda: values.abs().topk(k), device)
    show("1 % of 2 M elements / torch.topk", ours_s, torch_s, "<= 0.1 on a CPU")


def collectives(rank: int, ranks: int, file: str) -> None:
    """Whole reductions of one 4 MiB gradient; runs on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    group = Group.of()
    gradient = torch.randn(1024, 1024)
    candidates = [
        (Quantize(8, feedback=None), "< 0.6"),
        (Quantize(8), ""),
        (Quantize(4), ""),
        (Cast("bf16"), ""),
        (TopK(0.01), ""),
        (Sign(), ""),
        (PowerSGD(4), ""),
        (PowerSGD(4, alternate=True), ""),
    ]
    for compressor, target in candidates:
        mine, dense = gradient.clone(), gradient.clone()
        times = compare(
            lambda mine=mine, compressor=compressor: compressor.reduce_({"weight": mine}, group),
            lambda dense=dense: comm.all_reduce_(dense, group),
            "cpu",
        )
        if rank == 0:
            feedback = f", feedback={compressor.feedback.kind}"
            show(f"{compressor}{feedback}: 4 MiB, {ranks} ranks / fp32 all-reduce", *times, target)
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':58} {'ours ms':>8} {'peer ms':>8} {'ratio':>8}  target")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/alone", rank=0, world_size=1)
        powersgd(arguments.device)
        selection(arguments.device)
        dist.destroy_process_group()
        mp.spawn(collectives, args=(arguments.ranks, f"{folder}/ranks"), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
