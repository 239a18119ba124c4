"""Compression arithmetic and its collectives against their counterparts in torch, as ratios.

    python benchmarks/compression_kernels.py [powersgd] [selection] [collectives] [--ranks 4] [--device cuda]

The counterparts: torch's PowerSGD hook, called as DDP calls it in a group of one; `torch.topk`; an fp32 all-reduce over
gloo on this host. Both sides run in turn, several times in a row each. On a CPU one thread computes, as in a rank that
shares its host, and processor time counts, of all threads: it depends less on what else runs there. The least of all
runs is compared, and the median shown beside it.
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
from lightning_parallel.compression import Cast, PowerSGD, Quantize, Reducer, Sign, TopK
from lightning_parallel.compression.sparsifiers import largest

ROUNDS, REPEATS = 5, 6


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
    """Seconds of one call: of the device, or of this process's threads."""
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def compare(ours: Callable[[], Any], peer: Callable[[], Any], device: str) -> tuple[list[float], list[float]]:
    """Seconds of each run of both."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(ROUNDS):
        for call, taken in zip((ours, peer), times):
            for _ in range(1 if round_number else 4):  # torch's hook begins with plain means
                call()
            taken += [seconds(call, device) for _ in range(REPEATS)]
    return times


def show(what: str, ours: list[float], peer: list[float], target: str = "") -> None:
    """Print one line of the table."""
    least, median = ((pick(ours), pick(peer)) for pick in (min, statistics.median))
    line = f"{what:58} {least[0] * 1e3:8.2f} {least[1] * 1e3:8.2f} {least[0] / least[1]:8.3f}"
    print(f"{line} {median[0] / median[1]:8.3f}  {target}", flush=True)


BUCKETS: dict[str, list[tuple[int, ...]]] = {
    "25 MB": [(1024, 1024)] * 6 + [(256, 1024)],
    "300 x (64, 64)": [(64, 64)] * 300,
    "120 small matrices, 180 vectors": [(64, 64), (64,), (128, 64), (128,), (64,)] * 60,
    "300 shapes, 40 to 69": [(40 + index // 10, 40 + index % 10) for index in range(300)],
    "300 shapes, 32 to 256": [(32 + 7 * index % 225, 32 + 89 * index % 225) for index in range(300)],
}
ROWS = (  # rank, bucket, target
    (4, "25 MB", "<= 0.22"),
    (4, "300 x (64, 64)", "<= 0.22"),
    (4, "120 small matrices, 180 vectors", "<= 0.22"),
    (4, "300 shapes, 40 to 69", "<= 1.2"),
    (4, "300 shapes, 32 to 256", "<= 1.2"),
    (1, "25 MB", ""),
    (8, "25 MB", ""),
)


def powersgd(device: str) -> None:
    """Compress and decompress a bucket as DDP fills it, and as many small tensors as may be in it."""
    for rank, bucket, target in ROWS:
        shapes = BUCKETS[bucket]
        flat = torch.randn(sum(torch.Size(shape).numel() for shape in shapes), device=device)
        state = torch_powersgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
        torch_bucket, our_bucket = Bucket(flat.clone(), shapes), Bucket(flat.clone(), shapes)
        ours = PowerSGD(rank)
        named = {f"weight{index}": gradient for index, gradient in enumerate(our_bucket.gradients())}

        def ours_step(ours: PowerSGD = ours, named: dict[str, torch.Tensor] = named) -> None:
            ours.reduce_(named, Group.alone("alone"))

        def torch_step(state: Any = state, bucket: Any = torch_bucket) -> None:
            torch_powersgd.powerSGD_hook(state, bucket).wait()

        ours_s, torch_s = compare(ours_step, torch_step, device)
        show(f"PowerSGD rank {rank}, {bucket} / torch's hook", ours_s, torch_s, target)


def selection(device: str) -> None:
    """Find the largest elements."""
    n, k = 2_000_000, 20_000
    values = torch.randn(1, n, device=device)
    ours_s, torch_s = compare(lambda: largest(values, k), lambda: values.abs().topk(k), device)
    show("1 % of 2 M elements / torch.topk", ours_s, torch_s, "<= 0.1 on a CPU")


def one_bucket(reducer: Reducer, named: dict[str, torch.Tensor], group: Group) -> None:
    """Take a step as the hooks of DDP do."""
    with reducer.begin(group) as step:
        step.reduce_(named)
        step.commit()


def collectives(rank: int, ranks: int, file: str) -> None:
    """Whole reductions of one 4 MiB gradient; runs on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    group = Group.of()
    gradient = torch.randn(1024, 1024)
    candidates = [
        (Quantize(8, feedback=None), "<= 0.8"),
        (Quantize(4, feedback=None), "<= 0.9"),
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
            lambda mine=mine, compressor=compressor: one_bucket(compressor, {"weight": mine}, group),
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
    parser.add_argument("parts", nargs="*", default=["powersgd", "selection", "collectives"], help="of the table")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':58} {'ours ms':>8} {'peer ms':>8} {'ratio':>8} {'median':>8}  target")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/alone", rank=0, world_size=1)
        for name, part in (("powersgd", powersgd), ("selection", selection)):
            if name in arguments.parts:
                part(arguments.device)
        dist.destroy_process_group()
        if "collectives" in arguments.parts:
            mp.spawn(collectives, args=(arguments.ranks, f"{folder}/ranks"), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
