"""`lightning-parallel doctor --rendezvous`: all processes of a launcher meet, and measure their links.

Every wait has a deadline, and names the ranks that are missing: this command exists for starts that hang.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel.cli.findings import Findings
from lightning_parallel.comm import Group
from lightning_parallel.planner.links import fitted_link
from lightning_parallel.tracing.spans import bandwidth_text, seconds_text

__all__ = ["meet"]

_POLL_S = 0.2
_MAX_CLOCK_S = 1.0


def meet(found: Findings, environment: Mapping[str, str], timeout_s: float) -> None:
    """Meet the other processes in the rendezvous store, compare them, and measure all-reduces.

    Args:
        found: Where lines and problems are added.
        environment: Variables of `torchrun` or of `srun`, with `MASTER_ADDR` and `MASTER_PORT`.
        timeout_s: Seconds to wait for the other ranks.
    """
    try:
        rank, world_size = _place(environment)
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except KeyError as error:
        found.problem(f"`--rendezvous` needs the variable {error}; start it with `torchrun` or `srun` on all nodes.")
        return
    found.section("rendezvous")
    begun = time.monotonic()
    try:
        store = _store(address, port, rank, world_size, environment, timeout_s)
    except (RuntimeError, OSError) as error:
        found.problem(f"rank {rank} cannot reach the store at {address}:{port}: {str(error).splitlines()[0]}.")
        return
    present = _present(store, rank, world_size, begun + timeout_s)
    missing = sorted(set(range(world_size)) - present.keys())
    found.value("ranks that came", f"{len(present)} of {world_size} in {time.monotonic() - begun:.1f} s")
    for peer, said in sorted(present.items()):
        found.value(f"rank {peer}", f"{said['host']}, process {said['pid']}")
    if missing:
        found.problem(
            f"ranks {missing} did not come within {timeout_s:.0f} s. Check on their nodes that this command runs,"
            f" and that {address}:{port} answers."
        )
        return
    _compare(found, present)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("doctor", store), rank=rank, world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    try:
        _links(found, environment)
    except RuntimeError as error:
        found.problem(f"an all-reduce failed: {str(error).splitlines()[0]}. Check `GLOO_SOCKET_IFNAME`.")
    finally:
        dist.destroy_process_group()


def _place(environment: Mapping[str, str]) -> tuple[int, int]:
    if "RANK" in environment:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])


def _store(
    address: str, port: int, rank: int, world_size: int, environment: Mapping[str, str], timeout_s: float
) -> dist.Store:
    # torchrun has opened the store already, where it says so; else the first rank opens it.
    is_open = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        address,
        port,
        world_size,
        rank == 0 and not is_open,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"doctor/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _present(store: dist.Store, rank: int, world_size: int, end_s: float) -> dict[int, dict[str, Any]]:
    """Announce this rank, and read the announcements of other ranks until all came or the time is over."""
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "clock": time.time(), "torch": torch.__version__}
    store.set(f"rank/{rank}", json.dumps({**mine, "version": version("lightning-parallel")}))
    present: dict[int, dict[str, Any]] = {}
    while len(present) < world_size and time.monotonic() < end_s:
        for peer in range(world_size):
            if peer not in present and store.check([f"rank/{peer}"]):
                present[peer] = {**json.loads(store.get(f"rank/{peer}")), "seen": time.time()}
        time.sleep(_POLL_S)
    # The first rank holds the store: it leaves last, so that no other reads from a closed one.
    with suppress(RuntimeError):
        store.add("read", 1)
        while rank == 0 and store.add("read", 0) < len(present) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
    return present


def _compare(found: Findings, present: Mapping[int, Mapping[str, Any]]) -> None:
    for name in ("torch", "version"):
        values = {peer: said[name] for peer, said in present.items()}
        if len(set(values.values())) > 1:
            label = "lightning-parallel" if name == "version" else name
            found.problem(f"the ranks have different versions of {label}: {values}. Install the same on all nodes.")
    # An announcement is never read before it is written: a clock that seems to run ahead by more than that is wrong.
    ahead = {peer: said["clock"] - said["seen"] for peer, said in present.items()}
    worst = max(ahead, key=lambda peer: ahead[peer])
    found.value("largest clock difference", f"{max(ahead[worst], 0.0):.1f} s", "at least")
    if ahead[worst] > _MAX_CLOCK_S:
        found.problem(f"the clock of rank {worst} runs {ahead[worst]:.1f} s ahead. Start NTP on that node.")


def _links(found: Findings, environment: Mapping[str, str]) -> None:
    group = Group.of()
    if group.size == 1:
        return
    device = torch.device("cpu")
    link = fitted_link(group, device)
    found.value("all-reduce over gloo", f"{seconds_text(link.latency_s)}, {bandwidth_text(link.bytes_per_s)}")
    if torch.cuda.is_available() and dist.is_nccl_available():
        local = int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")))
        torch.cuda.set_device(local % torch.cuda.device_count())
        nccl = dist.new_group(backend="nccl", timeout=timedelta(seconds=120))
        link = fitted_link(Group.of(nccl), torch.device("cuda", torch.cuda.current_device()))
        found.value("all-reduce over NCCL", f"{seconds_text(link.latency_s)}, {bandwidth_text(link.bytes_per_s)}")
