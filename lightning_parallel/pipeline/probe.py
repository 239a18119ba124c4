"""How long messages between neighbouring stages take, measured before anything is cut."""

from __future__ import annotations

import time

import torch

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.pipeline.simulate import Link

__all__ = ["measure_link"]

_PROBE_BYTES = 1 << 18
_REPEATS = 5
_TAG = 900


def measure_link(group: Group, device: torch.device, alike: Group | None = None) -> Link:
    """Send messages there and back between neighbours, every second pair at a time; the slowest pair counts.

    Args:
        group: The pipeline group; all its ranks call this.
        device: Where messages are.
        alike: The ranks that are to find the same, the world in a mesh of several axes; by default `group`.
    """
    short_s = long_s = 0.0
    for first in (0, 1):
        leads = (group.rank - first) % 2 == 0
        peer = group.rank + 1 if leads else group.rank - 1
        if 0 <= peer < group.size:
            short_s = max(short_s, _one_way_s(group, peer, leads, 1, device))
            long_s = max(long_s, _one_way_s(group, peer, leads, _PROBE_BYTES, device))
    found = comm.all_gather_object((short_s, long_s), alike or group)
    latency_s = max(short for short, _ in found)
    transfer_s = max(long for _, long in found) - latency_s
    return Link(latency_s, _PROBE_BYTES / transfer_s if transfer_s > 0 else float("inf"))


def _one_way_s(group: Group, peer: int, leads: bool, num_bytes: int, device: torch.device) -> float:
    """The least of a few round trips, halved."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(_REPEATS):
        begun_s = time.perf_counter()
        for sends in (leads, not leads):
            (comm.isend if sends else comm.irecv)(message, group, peer, _TAG).wait()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append((time.perf_counter() - begun_s) / 2)
    return min(taken)
