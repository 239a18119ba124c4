"""The link between two processes of this machine, measured with the collectives that a run will use."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.pipeline.simulate import Link

__all__ = ["fitted_link", "measured_link"]

_SIZES = (1 << 10, 1 << 20)  # bytes
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


def fitted_link(group: Group) -> Link:
    """Time all-reduces of two sizes between the two ranks of `group`; of each the least of many: load adds to them."""
    short_s, long_s = (_all_reduce_s(group, size) for size in _SIZES)
    per_byte_s = max((long_s - short_s) / (_SIZES[1] - _SIZES[0]), 1e-12)
    # By the formula of the ring for two ranks, which takes two messages.
    return Link(max(short_s - _SIZES[0] * per_byte_s, 1e-7) / 2, 1 / per_byte_s)


def _all_reduce_s(group: Group, num_bytes: int) -> float:
    tensor = torch.zeros(num_bytes // 4)
    taken = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        comm.all_reduce_(tensor, group)
        taken.append(time.perf_counter() - begun)
    return min(taken)
