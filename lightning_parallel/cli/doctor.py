"""`lightning-parallel doctor`: the machine, the launcher and the network, before a run starts.

Without `--rendezvous` nothing is started and no other process is needed. With it, every process of `torchrun` or `srun`
runs this command: they meet in the rendezvous store, compare versions and clocks, and measure the links.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

from lightning_parallel.cli.findings import Findings
from lightning_parallel.tracing.spans import bytes_text

__all__ = ["run_doctor"]

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
        from lightning_parallel.cli.meeting import meet

        meet(found, os.environ, options.timeout)
    else:
        _port(found, os.environ)
    # One process prints the whole picture; each other process prints its own problems only.
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
        # NCCL takes prefixes, and names to leave out after a `^`.
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
    """Try the rendezvous port: it must be free before a run, and reachable from other hosts during one."""
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
