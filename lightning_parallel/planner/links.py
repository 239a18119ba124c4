"""Measured links: between processes of this machine, and between the ranks of a run."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.simulate import Link

__all__ = ["MOST_RANKS_MEASURED", "fitted_link", "group_links", "measure_link", "measured_links"]

_PROBE_BYTES = {"cpu": 1 << 18, "cuda": 1 << 24}  # large: the transfer must take longer than the noise of the latency
_LINK_REPEATS = 5
# No other message has this tag: stages use 1 and 2, tied parameters 1000 and more.
_TAG = 900
# In bytes. For larger tensors, the allocator would ask the system for new pages each time, unlike in a run.
_SIZES = (1 << 10, 1 << 18)
_REPEATS, _ROUNDS = 30, 5
_COMPUTED = 256  # rows of a matrix: its product takes about as long as a message
MOST_RANKS_MEASURED = 8
"""Most processes of a node that measure the links of groups together."""
_DEADLINE_S = 60.0


def measured_links(ranks: int, cores: int) -> dict[int, Link]:
    """Fork processes that share `cores`, and measure the links of groups of each size, see `group_links`.

    Raises:
        RuntimeError: If the processes fail, or do not end within a minute.
    """
    # Fork, as importing the library again takes longer than the whole measurement. The children use no other thread.
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        args = (os.path.join(folder, "store"), min(ranks, MOST_RANKS_MEASURED), cores, sender)
        workers = [context.Process(target=_measure, args=(rank, *args), daemon=True) for rank in range(args[1])]
        for worker in workers:
            worker.start()
        try:
            if not receiver.poll(_DEADLINE_S):
                raise RuntimeError("The links between processes could not be measured; give `--intra-node-bandwidth`")
            return {size: Link(*found) for size, found in receiver.recv().items()}
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _measure(rank: int, path: str, ranks: int, cores: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=_DEADLINE_S))
    found = group_links(cores)
    if rank == 0:
        sender.send({size: (link.latency_s, link.bytes_per_s) for size, link in found.items()})
    time.sleep(_DEADLINE_S)  # the parent kills all at once; an early exit could fail the other processes


def group_links(cores: int) -> dict[int, Link]:
    """Time all-reduces between computations, in groups of each size that divides the world; every rank must call it.

    The returned latency and bandwidth are fitted to a ring: a ring with these values adds the measured time. All groups
    of a size communicate at the same time, like replicas. With more ranks than cores, the time of a message is divided
    by their ratio, like the time of a computation: the plan multiplies both.
    """
    world = Group.of().size
    found = {}
    for size in (size for size in range(2, world + 1) if world % size == 0):
        groups = MeshGroups(Mesh(world // size, 1, size))
        short_s, long_s = (_added_s(groups.tensor_parallel, num_bytes, min(1.0, cores / world)) for num_bytes in _SIZES)
        # Noise may make the long message as fast as the short message: keep the bandwidth finite and positive.
        per_byte_s = max((long_s - short_s) / (_SIZES[1] - _SIZES[0]) / (2 * (size - 1) / size), 1e-12)
        found[size] = Link(max(short_s / (2 * (size - 1)), 1e-7), 1 / per_byte_s)
    return found


def _added_s(group: Group, num_bytes: int, share: float) -> float:
    """Return the seconds that an all-reduce adds to a computation; the median over the rounds."""
    tensor, matrix = torch.zeros(num_bytes // 4), torch.ones(_COMPUTED, _COMPUTED)
    added = []
    for _ in range(_ROUNDS):
        begun, computed = time.perf_counter(), 0.0
        for _ in range(_REPEATS):
            # Process time: other ranks on this core must not count as computation of this rank.
            before = time.process_time()
            matrix @ matrix
            computed += time.process_time() - before
            comm.all_reduce_(tensor, group)
        added.append((share * (time.perf_counter() - begun) - computed) / _REPEATS)
    return max(statistics.median(added), 1e-6)


def fitted_link(group: Group, device: torch.device) -> Link:
    """Time all-reduces of two sizes in `group`; every rank must call it.

    The least of many times counts for each size, because other load only adds time.
    """
    short_s, long_s = (_all_reduce_s(group, size, device) for size in _SIZES)
    steps = group.size - 1
    per_byte_s = max((long_s - short_s) / (_SIZES[1] - _SIZES[0]) / (2 * steps / group.size), 1e-12)
    return Link(max(short_s / (2 * steps), 1e-7), 1 / per_byte_s)


def _all_reduce_s(group: Group, num_bytes: int, device: torch.device) -> float:
    tensor = torch.zeros(num_bytes // 4, device=device)
    taken = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        comm.all_reduce_(tensor, group)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def measure_link(group: Group, device: torch.device, sync_group: Group | None = None) -> Link:
    """Time round trips between neighbours, every second pair at a time; the slowest pair counts.

    Args:
        group: The pipeline group; every rank of it must call this.
        device: Device of the messages.
        sync_group: The ranks that must get equal results, such as the world in a mesh of several axes; by default
            `group`.
    """
    probe_bytes = _PROBE_BYTES.get(device.type, 1 << 24)
    short_s = long_s = 0.0
    for first in (0, 1):
        # Every second pair at a time: a rank in two pairs at once would measure its own waiting.
        leads = (group.rank - first) % 2 == 0
        peer = group.rank + 1 if leads else group.rank - 1
        if 0 <= peer < group.size:
            short_s = max(short_s, _one_way_s(group, peer, leads, 1, device))
            long_s = max(long_s, _one_way_s(group, peer, leads, probe_bytes, device))
    found = comm.all_gather_object((short_s, long_s), sync_group or group)
    latency_s = max(short for short, _ in found)
    transfer_s = max(long for _, long in found) - latency_s
    # On a fast link, the difference is lost in noise and may be negative.
    return Link(latency_s, probe_bytes / transfer_s if transfer_s > 0 else float("inf"))


def _one_way_s(group: Group, peer: int, leads: bool, num_bytes: int, device: torch.device) -> float:
    """Return half of the shortest round trip, in seconds."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    taken = []
    # Time a round trip, so that only one clock is read: the clocks of two hosts differ.
    for _ in range(_LINK_REPEATS):
        begun_s = time.perf_counter()
        for sends in (leads, not leads):
            (comm.isend if sends else comm.irecv)(message, group, peer, _TAG).wait()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append((time.perf_counter() - begun_s) / 2)
    return min(taken)
