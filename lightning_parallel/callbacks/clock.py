"""How far the clocks of the ranks are apart."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import NamedTuple

import torch

from lightning_parallel import comm
from lightning_parallel.comm import Group

__all__ = ["Clock", "clock_id", "compare_clocks"]

PINGS = 16


class Clock(NamedTuple):
    """The clock of one rank beside that of rank 0, in nanoseconds.

    Attributes:
        offset_ns: What to add to `perf_counter_ns()` here to get that of rank 0.
        uncertainty_ns: How far that may be off.
        unix_ns: What to add to `perf_counter_ns()` here to get `time_ns()` here.
    """

    offset_ns: int
    uncertainty_ns: int
    unix_ns: int


def compare_clocks(group: Group, clock_id: str, now: Callable[[], int] = perf_counter_ns) -> Clock:
    """Compare the clocks of all ranks of `group` with that of its first; every rank must call it.

    Ranks with the same `clock_id` read the same clock. For every other clock one rank exchanges messages with the first
    rank; the fastest of 16 there and back tells most: the answer was given somewhere on the way.

    Args:
        group: All ranks; on CPU.
        clock_id: Of the clock that this rank reads.
        now: Reads it.
    """
    ids = comm.all_gather_object(clock_id, group)
    pioneers = [ids.index(each) for each in dict.fromkeys(ids) if each != ids[0]]
    mine = (0, 0)
    for pioneer in pioneers:
        if group.rank == 0:
            _answer(group, pioneer, now)
        elif group.rank == pioneer:
            mine = _ask(group, now)
    found = comm.all_gather_object(mine, group)
    offset, uncertainty = found[ids.index(clock_id)]
    return Clock(offset, uncertainty, time_ns() - perf_counter_ns())


def _ask(group: Group, now: Callable[[], int]) -> tuple[int, int]:
    """Ask the first rank for its time; returns what to add to this rank's, and how far off that may be."""
    answer, trips = torch.zeros(1, dtype=torch.int64), []
    for _ in range(PINGS):
        begin = now()
        comm.isend(answer, group, 0).wait()
        comm.irecv(answer, group, 0).wait()
        end = now()
        trips.append((end - begin, int(answer.item()) - (begin + end) // 2))
    length, offset = min(trips)
    return offset, (length + 1) // 2


def _answer(group: Group, asker: int, now: Callable[[], int]) -> None:
    question = torch.zeros(1, dtype=torch.int64)
    for _ in range(PINGS):
        comm.irecv(question, group, asker).wait()
        comm.isend(torch.tensor([now()]), group, asker).wait()


def clock_id() -> str:
    """Which clock `perf_counter_ns` reads: that of one boot of one host, in one time namespace."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    if not (boot.exists() and namespace.is_symlink()):
        return platform.node()
    return f"{boot.read_text()} {namespace.readlink()}"
