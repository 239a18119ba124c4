"""Sharded checkpoints beside `torch.distributed.checkpoint` and `torch.save`, on one disk, in turn, in one run.

    python benchmarks/checkpoint.py [--ranks 2] [--megabytes 256] [--rounds 5] [--folder DIR] [--stall]

Every rank holds rows of the same matrices. Ours writes checksums and reads against them; all of them sync what they
write. `torch.save` gathers on the first rank, and each rank maps the file and takes its rows. A load begins when the
file is in the system's cache, as that of a run that restarts.

    save, load     seconds per GB, median of the rounds; ratios to ours
    reshard        bytes that a rank reads, for each byte that it needs: a rank reads whole blocks of 1 MiB, so that it
                   can check each block alone
    stall          seconds that training waits in a save, the longest of all ranks; its ratio to our synchronous save,
                   that of the training thread's processor time (`busy`), and that of the first save; what the steps
                   beside a save take longer in sum. The memory for the first save is made in the background before.
                   Steps that sleep stand in for a device. `torch.distributed.checkpoint.async_save` writes in a
                   thread, and in a process with a stager that shares and keeps its memory
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint import staging
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows

from lightning_parallel.checkpoint import PartialTensor, SavedCheckpoint, ShardedWriter, TensorPart
from lightning_parallel.checkpoint.manifest import BLOCK
from lightning_parallel.comm import Group
from lightning_parallel.tensor.sharding import Shard

WIDTH = 1024
STEPS, STEP_S = 12, 0.1


def state(count: int, group: Group) -> tuple[dict[str, Tensor], Shard]:
    """Matrices (WIDTH, WIDTH) of which each rank holds rows."""
    rule = Shard.even(0, WIDTH, group.size)
    generator = torch.Generator().manual_seed(group.rank)
    rows = rule.local_size(group.rank)
    return {f"layers.{i}.weight": torch.randn(rows, WIDTH, generator=generator) for i in range(count)}, rule


def as_checkpoint(local: dict[str, Tensor], rule: Shard, rank: int) -> dict[str, object]:
    """What a strategy hands to the writer."""
    part = {name: TensorPart(tensor, 0, rule.ranges[rank]) for name, tensor in local.items()}
    return {"state_dict": {name: PartialTensor.of((WIDTH, WIDTH), torch.float32, part[name]) for name in local}}


class Ours:
    """The sharded format."""

    name = "sharded"

    def __init__(self, local: dict[str, Tensor], rule: Shard, group: Group) -> None:
        self.local, self.rule, self.group = local, rule, group
        self.writer = ShardedWriter(group, {})

    def save(self, path: str) -> None:
        """Write."""
        self.writer.save(as_checkpoint(self.local, self.rule, self.group.rank), path)

    def load(self, path: str) -> dict[str, Tensor]:
        """Read what the rank holds."""
        saved = SavedCheckpoint.open(path, self.group)
        found = {name: saved.read(f"state_dict/{name}", self.rule, self.group.rank) for name in self.local}
        saved.close()
        return found


class Distributed:
    """`torch.distributed.checkpoint` with DTensors."""

    name = "torch.distributed.checkpoint"

    def __init__(self, local: dict[str, Tensor], rule: Shard, group: Group) -> None:
        mesh = init_device_mesh("cpu", (group.size,))
        self.tensors = {name: DTensor.from_local(tensor, mesh, [Rows(0)]) for name, tensor in local.items()}
        self.empty = {
            name: DTensor.from_local(torch.empty_like(tensor), mesh, [Rows(0)]) for name, tensor in local.items()
        }

    def save(self, path: str) -> None:
        """Write."""
        dcp.save(self.tensors, checkpoint_id=path)

    def load(self, path: str) -> dict[str, Tensor]:
        """Read what the rank holds."""
        dcp.load(self.empty, checkpoint_id=path)
        return {name: tensor.to_local() for name, tensor in self.empty.items()}


class OneFile:
    """`torch.save` of gathered tensors."""

    name = "torch.save"

    def __init__(self, local: dict[str, Tensor], rule: Shard, group: Group) -> None:
        self.local, self.rule, self.group = local, rule, group

    def save(self, path: str) -> None:
        """Gather and write."""
        full = {}
        for name, tensor in self.local.items():
            found = [torch.empty_like(tensor) for _ in range(self.group.size)] if self.group.rank == 0 else None
            dist.gather(tensor, found)
            if found is not None:
                full[name] = torch.cat(found)
        if self.group.rank == 0:
            with open(path, "wb") as stream:
                torch.save(full, stream)
                stream.flush()
                os.fsync(stream.fileno())
        dist.barrier()

    def load(self, path: str) -> dict[str, Tensor]:
        """Map the file and take the rank's rows."""
        full = torch.load(path, mmap=True, weights_only=True)
        return {name: self.rule.split(full[name], self.group.rank) for name in self.local}


def seconds(function: Callable[[], object]) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    start = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - start


def save_and_load(sides: list, local: dict[str, Tensor], folder: Path, rounds: int, rank: int) -> list[list[float]]:
    """Median seconds of save and load, by side; which side begins rotates."""
    times: list[list[list[float]]] = [[[], []] for _ in sides]
    for number in range(rounds + 1):
        for turn in range(len(sides)):
            which = (turn + number) % len(sides)
            path = str(folder / f"{which}.ckpt")
            taken = [seconds(partial(sides[which].save, path))]
            gc.collect()
            taken.append(seconds(partial(sides[which].load, path)))
            for kind, value in zip(times[which], taken):
                kind.append(value)
            found = sides[which].load(path)
            assert all(torch.equal(found[name], tensor) for name, tensor in local.items())
            dist.barrier()
            if rank == 0 and which:
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    return [[statistics.median(kind[1:]) for kind in side] for side in times]


def resharding(path: str) -> list[tuple[str, float, float]]:
    """Bytes that a rank reads for each that it needs, when other ranks hold other parts; and the target.

    Rows begin and end within a block: two blocks more than the rows. Each block has columns of all ranks: the matrix.
    """
    wanted = {"1 rank": None} | {
        f"{ranks} ranks, {what}": Shard.even(dim, WIDTH, ranks)
        for ranks in (2, 3, 4, 8)
        for dim, what in ((0, "rows"), (1, "columns"))
    }
    rows = []
    for name, rule in wanted.items():
        worst = 0.0
        for rank in range(1 if rule is None else rule.ranks):
            saved = SavedCheckpoint.open(path)
            found = [saved.read(one, rule, rank) for one in list(saved.manifest.tensors)[:4]]
            worst = max(worst, saved.bytes_read / sum(tensor.nbytes for tensor in found))
            saved.close()
        ranks = 1 if rule is None else rule.ranks
        is_by_columns = rule is not None and rule.dim == 1
        rows.append(
            (name, worst, WIDTH / (WIDTH // ranks) if is_by_columns else 1 + 2 * BLOCK * ranks / (WIDTH * WIDTH * 4))
        )
    return rows


@dataclass
class Saver:
    """A way to save between two steps.

    Attributes:
        name: Of the way.
        save: Begins a save at a path; returns what waits for its end.
    """

    name: str
    save: Callable[[str], Callable[[], object] | None]


def distributed_savers(tensors: dict[str, DTensor], ranks: tuple[int, ...]) -> list[Saver]:
    """The peer in the background; older releases of torch know only a thread."""
    # Its thread exchanges plans, for which it takes a group of its own.
    messages = dist.new_group(list(ranks), backend="gloo")

    def in_thread(path: str) -> Callable[[], object]:
        return dcp.async_save(tensors, checkpoint_id=path, process_group=messages).result

    savers = [Saver("torch's async_save, thread", in_thread)]
    if hasattr(staging, "DefaultStager"):
        stager = staging.DefaultStager(staging.StagingOptions(False, True, False, False))
        kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS

        def in_process(path: str) -> Callable[[], object]:
            options = {"process_group": messages, "async_checkpointer_type": kind, "async_stager": stager}
            return dcp.async_save(tensors, checkpoint_id=path, **options).result

        savers.append(Saver("torch's async_save, process", in_process))
    return savers


def stalls(savers: list[Saver], folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of a stall, its processor time, all steps beyond those without a save, and the first stall, by way."""

    def steps(saver: Saver, path: str) -> list[float]:
        stall, busy, wait = 0.0, 0.0, None
        dist.barrier()
        start = time.perf_counter()
        for number in range(STEPS):
            if number == 1:
                begin, busy = time.perf_counter(), time.thread_time()
                wait = saver.save(path)
                stall, busy = time.perf_counter() - begin, time.thread_time() - busy
            time.sleep(STEP_S)
            dist.all_reduce(torch.zeros(1))
        taken = torch.tensor([stall, busy, time.perf_counter() - start], dtype=torch.float64)
        if wait is not None:
            wait()
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        dist.barrier()
        return taken.tolist()

    savers = [Saver("", lambda path: None), *savers]
    times: dict[str, list[list[float]]] = {saver.name: [] for saver in savers}
    for number in range(rounds + 1):
        for turn in range(len(savers)):
            which = (turn + number) % len(savers)
            path = folder / f"stall-{which}-{number}.ckpt"
            times[savers[which].name].append(steps(savers[which], str(path)))
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
    # The least of all rounds, which other processes disturb least.
    least = {name: [min(kind) for kind in zip(*found[1:])] for name, found in times.items()}
    _, _, plain = least.pop("")
    return {name: [stall, busy, total - plain, times[name][0][0]] for name, (stall, busy, total) in least.items()}


def stall_table(sides: list, local: dict[str, Tensor], rule: Shard, group: Group, folder: Path, rounds: int) -> Table:
    """Stalls of a synchronous save and of saves in the background."""
    own = Group("checkpoint", group.ranks, group.rank, dist.new_group(list(group.ranks)))
    behind = ShardedWriter(own, {}, in_background=True)
    # As a strategy does after the first step of a run.
    behind.prepare(as_checkpoint(local, rule, group.rank))

    def in_background(path: str) -> Callable[[], object]:
        behind.save(as_checkpoint(local, rule, group.rank), path)
        return behind.wait

    savers = [
        Saver("sharded, synchronous", sides[0].save),
        Saver("torch's save, synchronous", sides[1].save),
        Saver("sharded, async_save", in_background),
        *distributed_savers(sides[1].tensors, group.ranks),
    ]
    found = stalls(savers, folder, rounds)
    behind.close()
    waited = found["sharded, synchronous"][0]
    table = Table("", "stall s", "ratio", "busy", "first", "steps longer, s", title="stall (target <= 0.05)")
    for name, (stall, busy, longer, first) in found.items():
        table.add_row(name, f"{stall:.4f}", *(f"{one / waited:.3f}" for one in (stall, busy, first)), f"{longer:.3f}")
    return table


def work(rank: int, ranks: int, megabytes: int, rounds: int, is_stall: bool, folder: str, file: str) -> None:
    """Measure; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    group = Group.of()
    local, rule = state(max(1, megabytes // 4), group)
    total = sum(tensor.nbytes for tensor in local.values()) * ranks / 1e9
    sides = [kind(local, rule, group) for kind in (Ours, Distributed, OneFile)]
    console = Console(quiet=rank > 0)
    if not is_stall:
        times = save_and_load(sides, local, Path(folder), rounds, rank)
        table = Table("", "save s/GB", "ratio", "load s/GB", "ratio", title=f"{total:.2f} GB, {ranks} ranks")
        for side, (save, load) in zip(sides, times):
            numbers = (save / total, save / times[0][0], load / total, load / times[0][1])
            table.add_row(side.name, *(f"{number:.2f}" for number in numbers))
        console.print(table)
        table = Table("read by", "bytes read / needed", "target <=", title="reshard")
        for name, ratio, target in resharding(str(Path(folder) / "0.ckpt")) if rank == 0 else ():
            table.add_row(name, f"{ratio:.3f}", f"{target:.2f}")
        console.print(table)
    console.print(stall_table(sides, local, rule, group, Path(folder), rounds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stall", action="store_true", help="measure the stall alone")
    parser.add_argument("--folder", help="on the disk to measure (default: that of temporary files)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        arguments = (given.ranks, given.megabytes, given.rounds, given.stall, folder, f"{folder}/ranks")
        mp.spawn(work, args=arguments, nprocs=given.ranks)


if __name__ == "__main__":
    main()
