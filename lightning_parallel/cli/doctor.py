"""`lightning-parallel doctor`: the machine, the launcher and the network, before a run starts.

Without `--rendezvous`, the command starts nothing and needs no other process. With it, every process of `torchrun` or
`srun` runs this command. The processes meet in the rendezvous store, compare versions and clocks, and measure the
links. Every wait has a deadline and names the missing ranks: this command exists for starts that hang.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel.comm import Group
from lightning_parallel.planner.links import fitted_link
from lightning_parallel.tracing.spans import bandwidth_text, bytes_text, seconds_text

__all__ = [
    "Findings",
    "meet",
    "run_doctor",
]


@dataclass
class Findings:
    """Lines to print, and the problems among them, each with a fix."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        """Begin a group of values."""
        self.lines += ["", title]

    def value(self, name: str, value: object, meaning: str = "") -> None:
        """Add a value, with its meaning if the name does not say it."""
        self.lines.append(f"  {name:<30} {value}" + (f"   ({meaning})" if meaning else ""))

    def problem(self, text: str) -> None:
        """Add a problem, as a sentence with a fix."""
        self.problems.append(text)


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
    # If the variable says so, torchrun has already opened the store. Otherwise the first rank opens it.
    is_open = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Without a wait for workers, in which the constructor could not name the missing ranks.
    store = dist.TCPStore(
        address,
        port,
        world_size,
        rank == 0 and not is_open,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    # The store of torchrun outlives an attempt, and keys of an earlier attempt must not count.
    return dist.PrefixStore(f"doctor/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _present(store: dist.Store, rank: int, world_size: int, end_s: float) -> dict[int, dict[str, Any]]:
    """Announce this rank, and read the announcements of other ranks until all are present or the time is over."""
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "clock": time.time(), "torch": torch.__version__}
    store.set(f"rank/{rank}", json.dumps({**mine, "version": version("lightning-parallel")}))
    present: dict[int, dict[str, Any]] = {}
    while len(present) < world_size and time.monotonic() < end_s:
        for peer in range(world_size):
            # `get` alone would block until the other rank has come.
            if peer not in present and store.check([f"rank/{peer}"]):
                present[peer] = {**json.loads(store.get(f"rank/{peer}")), "seen": time.time()}
        time.sleep(_POLL_S)
    # The first rank holds the store, so it must leave last: no other rank may read from a closed store.
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
    # No rank can read an announcement before its write, so an announcement from the future shows a wrong clock.
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
        # NCCL refuses two ranks on one device.
        local = int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")))
        torch.cuda.set_device(local % torch.cuda.device_count())
        nccl = dist.new_group(backend="nccl", timeout=timedelta(seconds=120))
        link = fitted_link(Group.of(nccl), torch.device("cuda", torch.cuda.current_device()))
        found.value("all-reduce over NCCL", f"{seconds_text(link.latency_s)}, {bandwidth_text(link.bytes_per_s)}")


_PACKAGES = (
    "lightning-parallel",
    "torch",
    "lightning",
    "pytorch-lightning",
    "numpy",
    "transformers",
    "deepspeed",
    "ray",
)
_LAUNCHERS: dict[str, tuple[str, ...]] = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "SLURM": ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES"),
    "Ray": ("RAY_ADDRESS", "RAY_JOB_ID"),
}
_NETWORK = {
    "MASTER_ADDR": "host of the rendezvous store",
    "MASTER_PORT": "port of the rendezvous store",
    "GLOO_SOCKET_IFNAME": "interface that gloo uses",
    "NCCL_SOCKET_IFNAME": "interfaces that NCCL uses",
    "NCCL_IB_DISABLE": "1 turns InfiniBand off",
    "NCCL_IB_HCA": "InfiniBand adapters that NCCL uses",
    "NCCL_P2P_DISABLE": "1 turns direct transfers between GPUs off",
    "NCCL_SHM_DISABLE": "1 turns shared memory off",
    "NCCL_DEBUG": "INFO prints the transports that NCCL chooses",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0 lets a lost rank hang the other ranks",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL checks every collective, slowly",
    "CUDA_VISIBLE_DEVICES": "GPUs that this process sees",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1 lets a waiting communication stream block the compute stream",
    "OMP_NUM_THREADS": "threads of CPU operations",
}
_MIN_SHM_BYTES, _MIN_FILES = 1 << 30, 4096
_PROBE_S = 3.0


def run_doctor(options: argparse.Namespace) -> int:
    """Print the findings.

    Args:
        options: `rendezvous`: whether to meet the other processes; `timeout`: seconds to wait for them.

    Returns:
        0, or 1 if there is a problem.
    """
    found = Findings()
    _versions(found)
    _machine(found)
    _network(found, os.environ)
    _launcher(found, os.environ)
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    if options.rendezvous:
        meet(found, os.environ, options.timeout)
    else:
        _port(found, os.environ)
    # One process prints all findings. Every other process prints only its problems.
    if rank == 0:
        print("\n".join(found.lines[1:]))
        print()
    where = f"rank {rank}: " if options.rendezvous else ""
    for problem in found.problems:
        print(f"{where}problem: {problem}")
    if not found.problems and rank == 0:
        print("no problem found")
    return 1 if found.problems else 0


def _versions(found: Findings) -> None:
    found.section("versions")
    found.value("python", f"{platform.python_version()} ({sys.executable})")
    found.value("platform", platform.platform())
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.value(name, importlib.metadata.version(name))


def _machine(found: Findings) -> None:
    import torch

    found.section("machine")
    # A container or SLURM may give a process fewer cores than `os.cpu_count()` counts.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
    found.value("cores", f"{cores} of {os.cpu_count()}", "this process may use")
    found.value("processes on this node", local)
    if cores < local:
        found.problem(
            f"{local} processes share {cores} cores; training will wait for the CPU. Start fewer processes, or raise"
            " `--cpus-per-task`."
        )
    found.value("threads", torch.get_num_threads(), "per process")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found.value(f"cuda:{index}", f"{properties.name}, {bytes_text(properties.total_memory)}")
        found.value("CUDA, NCCL", f"{torch.version.cuda}, {'.'.join(map(str, torch.cuda.nccl.version()))}")
    else:
        found.value("GPU", "none")
    _limits(found)


def _limits(found: Findings) -> None:
    if os.path.isdir("/dev/shm"):
        usage = shutil.disk_usage("/dev/shm")
        found.value("/dev/shm", f"{bytes_text(usage.free)} free of {bytes_text(usage.total)}")
        if usage.free < _MIN_SHM_BYTES:
            found.problem(
                "/dev/shm has less than 1 GiB free; data loader workers and NCCL need it. Use `docker run"
                " --shm-size=8g`, or `num_workers=0`."
            )
    try:
        import resource
    except ImportError:  # on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found.value("open files", f"{soft} (limit {hard})")
    if soft < _MIN_FILES:
        found.problem(f"a process may open only {soft} files; many ranks need more. Run `ulimit -n {_MIN_FILES}`.")


def _network(found: Findings, environment: Mapping[str, str]) -> None:
    found.section("network")
    host = socket.gethostname()
    found.value("host", host)
    addresses = sorted(_addresses_of(host))
    found.value("address told to peers", ", ".join(addresses) or "none")
    if not addresses:
        found.problem(
            f"the host name `{host}` has no address, so peers cannot connect. Add it to DNS or `/etc/hosts`, or set"
            " `GLOO_SOCKET_IFNAME`."
        )
    elif all(address.startswith("127.") for address in addresses) and _nodes(environment) > 1:
        found.problem(
            f"the host name `{host}` resolves to {addresses[0]}, which other nodes cannot reach. Fix `/etc/hosts`, or"
            " set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`."
        )
    interfaces = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    found.value("interfaces", ", ".join(interfaces))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        asked = [name.lstrip("^=") for name in environment.get(variable, "").split(",") if name]
        # NCCL accepts prefixes of names, and excludes names after a `^`.
        if asked and not any(interface.startswith(name) for name in asked for interface in interfaces):
            found.problem(f"`{variable}={environment[variable]}` names no interface here; use one of {interfaces}.")
    for name, meaning in _NETWORK.items():
        if name in environment:
            found.value(name, environment[name], meaning)
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.problem(
            "`CUDA_DEVICE_MAX_CONNECTIONS=1` lets a waiting communication stream block the compute stream. Unset it."
        )


def _addresses_of(host: str) -> set[str]:
    with suppress(OSError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return set()


def _nodes(environment: Mapping[str, str]) -> int:
    world = int(environment.get("WORLD_SIZE", environment.get("SLURM_NTASKS", "1")))
    return max(
        world // max(int(environment.get("LOCAL_WORLD_SIZE", world)), 1), int(environment.get("SLURM_NNODES", 1))
    )


def _launcher(found: Findings, environment: Mapping[str, str]) -> None:
    found.section("launcher")
    names = [name for name, variables in _LAUNCHERS.items() if variables[0] in environment]
    found.value("found", ", ".join(names) or "none: the Trainer starts the processes of one node")
    for name in names:
        for variable in _LAUNCHERS[name]:
            found.value(variable, environment.get(variable, "not set"))
    found.problems += _contradictions(environment)


def _contradictions(environment: Mapping[str, str]) -> Iterator[str]:
    given = {name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in environment}
    if "TORCHELASTIC_RUN_ID" not in environment and "RANK" in given and len(given) < 4:
        missing = sorted({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - given)
        yield f"`RANK` is set but {', '.join(missing)} are not. Set all four, or start the script with `torchrun`."
    if "SLURM_NTASKS" in environment and "SLURM_PROCID" not in environment:
        yield "this is a SLURM allocation without `srun`. Start the script with `srun`, or `torchrun` on each node."
    if "TORCHELASTIC_RUN_ID" in environment and int(environment.get("SLURM_NTASKS_PER_NODE", "1")) > 1:
        yield (
            "`srun` starts several tasks per node, and each starts `torchrun`. Set `--ntasks-per-node=1`, or start the"
            " script by `srun` alone."
        )


def _port(found: Findings, environment: Mapping[str, str]) -> None:
    """Try the rendezvous port: it must be free before a run, and reachable from other hosts during the run."""
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not address or not port:
        return
    with socket.socket() as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect((address, int(port)))
        except OSError as error:
            found.value(f"{address}:{port}", f"no answer ({error})", "normal before the run starts")
            if isinstance(error, (TimeoutError, socket.gaierror)):
                found.problem(
                    f"{address}:{port} cannot be reached from here: {error}. A firewall drops the packets, or"
                    " `MASTER_ADDR` is wrong."
                )
        else:
            found.value(f"{address}:{port}", "answers")
