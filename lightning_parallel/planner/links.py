"""Links, measured: between two processes of this machine, and between ranks that have met."""

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
from lightning_parallel.comm import Group
from lightning_parallel.pipeline.simulate import Link

__all__ = ["fitted_link", "measure_link", "measured_link"]

_PROBE_BYTES = {"cpu": 1 << 18, "cuda": 1 << 24}  # they take longer than the latency varies
_LINK_REPEATS = 5
# Of no other message: stages use 1 and 2, tied parameters 1000 and more.
_TAG = 900
# Bytes. Not more: for larger tensors the allocator asks the system for new pages each time, as it does not in a run.
_SIZES = (1 << 10, 1 << 18)
_REPEATS = 60
_DEADLINE_S = 60.0


def measured_link() -> Link:
    """Fork two processes, time their all-reduces, and fit latency and bandwidth.

    Raises:
        RuntimeError: If they fail, or do not end in a minute.
    """
    # Forked: to import the library twice takes longer than all that is measured. The children use no other thread.
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        path = os.path.join(folder, "store")
        workers = [context.Process(target=_measure, args=(path, rank, sender), daemon=True) for rank in (0, 1)]
        for worker in workers:
            worker.start()
        try:
            if not receiver.poll(_DEADLINE_S):
                raise RuntimeError("the link between two processes could not be measured; give --node-link")
            return Link(*receiver.recv())
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _measure(path: str, rank: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=_DEADLINE_S))
    found = fitted_link(Group.of())
    if rank == 0:
        sender.send((found.latency_s, found.bytes_per_s))
    time.sleep(_DEADLINE_S)  # killed as soon as this is read; one that left earlier could fail the other


def fitted_link(group: Group, device: torch.device | None = None) -> Link:
    """Time all-reduces of two sizes in `group`, on all its ranks; of each the least of many, as load adds to them.

    Latency and bandwidth are those with which a ring would take as long; every rank finds its own. On the host a
    message takes at least what the processor does for it, which ranks that share cores have to wait for.
    """
    device = device or torch.device("cpu")
    short_s, long_s = (_all_reduce_s(group, size, device) for size in _SIZES)
    steps = group.size - 1
    per_byte_s = max((long_s - short_s) / (_SIZES[1] - _SIZES[0]) / (2 * steps / group.size), 1e-12)
    return Link(max(short_s / (2 * steps), 1e-7), 1 / per_byte_s)


def _all_reduce_s(group: Group, num_bytes: int, device: torch.device) -> float:
    tensor = torch.zeros(num_bytes // 4, device=device)
    taken, busy = [], []
    for _ in range(_REPEATS):
        begun, busy_before = time.perf_counter(), time.process_time()
        comm.all_reduce_(tensor, group)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - begun)
        busy.append(time.process_time() - busy_before)
    # What threads of gloo do after the call belongs to the next one: the median has as much of it as each call causes.
    return max(min(taken), statistics.median(busy) if device.type == "cpu" else 0.0)


def measure_link(group: Group, device: torch.device, sync_group: Group | None = None) -> Link:
    """Time messages there and back between neighbours, every second pair at a time; the slowest pair counts.

    Args:
        group: The pipeline group; all its ranks call this.
        device: Where messages are.
        sync_group: The ranks that are to find the same, the world in a mesh of several axes; by default `group`.
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
    # On a fast link the difference of the two is lost in noise, and may be negative.
    return Link(latency_s, probe_bytes / transfer_s if transfer_s > 0 else float("inf"))


def _one_way_s(group: Group, peer: int, leads: bool, num_bytes: int, device: torch.device) -> float:
    """Return half the least of a few round trips, in seconds."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    taken = []
    # There and back, so that one clock is read: those of two hosts cannot be compared.
    for _ in range(_LINK_REPEATS):
        begun_s = time.perf_counter()
        for sends in (leads, not leads):
            (comm.isend if sends else comm.irecv)(message, group, peer, _TAG).wait()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append((time.perf_counter() - begun_s) / 2)
    return min(taken)
