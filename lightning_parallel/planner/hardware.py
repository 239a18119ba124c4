"""Devices, links and clusters: devices come from a table or from a measurement on this machine.

Cluster(device_named("H100"), num_devices=16, per_node=8, node_link=Link(5e-6, 450e9), link=Link(1e-5, 50e9))
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lightning_parallel.pipeline.simulate import Link
from lightning_parallel.tracing.spans import bandwidth_text, seconds_text

__all__ = [
    "DEVICES",
    "Cluster",
    "Device",
    "available_cores",
    "clock_here",
    "cores_busy",
    "data_sheet_flops",
    "device_here",
    "device_named",
    "free_memory",
    "measured_cpu",
]

_GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Speed and memory of a device.

    Attributes:
        name: The maker's name of the device.
        flops: Peak operations per second in dense matrix products, by dtype (`float32`, `tf32`, `bfloat16`, ...).
        memory_bytes: Memory that a process can use.
        bytes_per_s: Bandwidth of its memory.
        launch_s: Least seconds of one operation, from the call to its end.
        efficiency: Share of the peak that large matrix products reach.
        reserved_bytes: Typical memory of the runtime and the communicators.
        source: Source of the figures.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    bytes_per_s: float
    launch_s: float = 5e-6
    efficiency: float = 0.7
    reserved_bytes: float = 0.0
    source: str = "data sheet"

    def flops_per_s(self, dtype: str) -> float:
        """Return operations per second in matrix products of `dtype`; an unknown dtype falls back to float32."""
        peak = self.flops.get(dtype) or self.flops.get("float32") or max(self.flops.values())
        return peak * self.efficiency


_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bfloat16": 2250e12, "float16": 2250e12}),
    ("H100 PCIe", {"bfloat16": 756e12, "float16": 756e12, "tf32": 378e12, "float32": 51.2e12}),
    ("H100 NVL", {"bfloat16": 835.5e12, "float16": 835.5e12, "tf32": 417.8e12, "float32": 60e12}),
    ("H100|H200|GH200", {"bfloat16": 989.4e12, "float16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12}),
    ("GB200", {"bfloat16": 2500e12, "float16": 2500e12}),
    ("A100", {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12}),
    ("L40S", {"bfloat16": 362e12, "float16": 362e12, "tf32": 183e12, "float32": 91.6e12}),
    ("L40", {"bfloat16": 181e12, "float16": 181e12, "tf32": 90.5e12, "float32": 90.5e12}),
    ("A10", {"bfloat16": 125e12, "float16": 125e12, "tf32": 62.5e12, "float32": 31.2e12}),
    ("A10G", {"bfloat16": 70e12, "float16": 70e12, "tf32": 35e12, "float32": 31.5e12}),
    ("RTX 4090", {"bfloat16": 165.2e12, "float16": 165.2e12, "tf32": 82.6e12, "float32": 82.6e12}),
    ("RTX 3090", {"bfloat16": 71e12, "float16": 71e12, "tf32": 35.6e12, "float32": 35.6e12}),
    ("L4", {"bfloat16": 121e12, "float16": 121e12, "tf32": 60e12, "float32": 30.3e12}),
    ("V100", {"float16": 125e12, "float32": 15.7e12}),
    ("T4", {"float16": 65e12, "float32": 8.1e12}),
    ("MI300X", {"bfloat16": 1307.4e12, "float16": 1307.4e12, "float32": 163.4e12}),
)
"""Operations per second in dense matrix products, from data sheets. Keys are parts of device names, specific first.

Not from Lightning's `get_available_flops` (2.6): its figures for sparse matrices are twice as high, and it confuses
L40 with L4.
"""


def data_sheet_flops(name: str) -> Mapping[str, float]:
    """Return the peaks by dtype of the device with this driver name; empty if they are unknown."""
    # Full words only: `A10` is a part of `A100`.
    return next((peaks for part, peaks in _PEAKS if re.search(rf"\b({part})\b", name)), {})


RESERVED_BYTES = 1.5 * _GIB
"""Memory of a GPU that its runtime and its communicators take."""


def _gpu(name: str, gib: float, tb_per_s: float) -> Device:
    return Device(
        name,
        data_sheet_flops(name.replace("-", " ")),
        gib * _GIB,
        tb_per_s * 1e12,
        reserved_bytes=RESERVED_BYTES,
        source=f"data sheet of {name}, dense",
    )


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        # Usable memory by the driver, which is less than the figure on the card.
        _gpu("H200", 139.8, 4.8),
        _gpu("H100", 79.1, 3.35),
        _gpu("A100-80GB", 79.1, 2.039),
        _gpu("A100-40GB", 39.4, 1.555),
        _gpu("L40S", 44.5, 0.864),
        _gpu("L4", 22.0, 0.3),
        _gpu("A10G", 22.0, 0.6),
        _gpu("V100", 31.7, 0.9),
        _gpu("T4", 14.7, 0.32),
        _gpu("RTX-4090", 23.6, 1.008),
        _gpu("RTX-3090", 23.6, 0.936),
        _gpu("MI300X", 191.0, 5.3),
    )
}


def device_named(name: str) -> Device:
    """Return the device of the table with this name; the case does not matter.

    Raises:
        ValueError: If the table has no such device; the message lists the names.
    """
    wanted = re.sub(r"[\s_]", "-", name).lower()
    for known, device in DEVICES.items():
        if known.lower() == wanted:
            return device
    raise ValueError(
        f"The device must be one of {', '.join(DEVICES)}, or `cpu` for this machine; got `{name}`. For another device,"
        " give `--peak`, `--memory-bandwidth` and `--memory` as well"
    )


def device_here(device: torch.device) -> Device | None:
    """Return the table's device for a GPU of this process, with its actual memory; None for the CPU.

    Raises:
        ValueError: If the table has no such device.
    """
    if device.type == "cpu":
        return None
    properties = torch.cuda.get_device_properties(device)
    words = re.sub(r"[\s_]", "-", properties.name).lower()
    # By the family, because the driver writes the size of the memory in another form.
    fitting = [known for known in DEVICES if re.search(rf"\b{known.partition('-')[0].lower()}\b", words)]
    if words.startswith("nvidia-geforce-rtx"):
        fitting = [known for known in DEVICES if known.lower() in words]
    if not fitting:
        raise ValueError(f"The device must be one of {', '.join(DEVICES)}; got `{properties.name}`")
    # Variants of one name differ in memory, and the driver's name may not tell it.
    nearest = min(fitting, key=lambda name: abs(DEVICES[name].memory_bytes - properties.total_memory))
    known = DEVICES[nearest]
    # Use the peaks of the exact variant: PCIe and NVLink cards of one name differ.
    flops = data_sheet_flops(properties.name) or known.flops
    return replace(known, flops=flops, memory_bytes=properties.total_memory)


def memory_here(device: torch.device, ranks_here: int) -> float:
    """Return the bytes that a rank of this process may hold: the device's, or a share of the host's on the CPU.

    Args:
        device: The device of the rank.
        ranks_here: Ranks on this host.
    """
    if device.type == "cpu":
        return _host_bytes() / ranks_here
    return torch.cuda.get_device_properties(device).total_memory - RESERVED_BYTES


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process could still take: of the GPU, or of the host within its container.

    Returns 0 on systems that do not report them.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    report = Path("/proc/meminfo")
    lines = report.read_text().splitlines() if device.type == "cpu" and report.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    # The use of a container includes its file cache, which the system would give back: the sum is on the safe side.
    return max(0, min([*available, *(limit - use for limit, use in _container_limits())])) if available else 0


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def clock_here() -> Callable[[], float]:
    """Return the clock for measurements on this processor.

    With one thread, the process clock excludes the time of other programs. With several threads, the process clock
    would count spinning threads, too, so use the wall clock.
    """
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


# The loop ends with its parent, or after five minutes: a run that is killed must leave no busy process.
_BUSY = """
import os, sys, time
import numpy
parent, until = os.getppid(), time.monotonic() + 300
left, moved = numpy.ones((128, 128), "f"), numpy.ones(1 << 20, "f")
print("busy", flush=True)
while os.getppid() == parent and time.monotonic() < until:
    for _ in range(20):
        left @ left
    moved += 1
"""


@contextmanager
def cores_busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy with other processes inside the block, as the other ranks of a run do.

    Cores share caches, memory and, as hyperthreads, execution units: a core is faster while its neighbours sleep.
    """
    # One thread each, so that `count` processes take `count` cores.
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    command = [sys.executable, "-c", _BUSY]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | threads) for _ in range(count)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()  # the worker prints when its imports have ended: only then is the core busy
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def measured_cpu(threads: int = 1, seconds: float = 0.1) -> Device:
    """Measure a matrix product, a copy and a small operation on `threads` threads of this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        matrix, small, large = torch.ones(512, 512), torch.ones(8), torch.ones(1 << 22)
        other = torch.empty_like(large)
        product_s = _fastest(lambda: matrix @ matrix, seconds)
        copy_s = _fastest(lambda: other.copy_(large), seconds)
        launch_s = _fastest(lambda: small + small, seconds / 4)
    finally:
        torch.set_num_threads(before)
    flops = {"float32": 2 * 512**3 / product_s}
    # A copy reads and writes each byte.
    return Device(
        "CPU", flops, _host_bytes(), 2 * large.nbytes / copy_s, launch_s, efficiency=1.0, source="measured here"
    )


def _host_bytes() -> int:
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *(limit for limit, _ in _container_limits())])


def _container_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use, in bytes, of each control group that bounds the memory of this process."""
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text().splitlines() if groups.exists() else []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup", controllers)
            limit, use = _CGROUP_FILES[controllers]
            # A limit of any ancestor counts. Inside a container, the name may be that of the host, not found here.
            inside = root / name.lstrip("/")
            for folder in (inside, *inside.parents):
                if folder.is_relative_to(root):
                    with suppress(OSError, ValueError):  # no such file, or "max"
                        yield int((folder / limit).read_text()), int((folder / use).read_text())


_CGROUP_FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""The files of a control group's limit and use: of version 2, which names no controllers, and of version 1."""


def _fastest(call: object, seconds: float) -> float:
    assert callable(call)
    call()  # the first call allocates memory
    fastest, until = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        call()
        # The fastest call, not the mean: other programs only add time.
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


class _AssumedLink(Link):
    """A link with an assumed bandwidth: neither given nor measured."""


@dataclass(frozen=True)
class Cluster:
    """Devices, with the same number on each node, and the links between them.

    Attributes:
        device: The kind of all devices.
        num_devices: Number of devices, with one rank on each.
        per_node: Devices on one node.
        node_link: Link between two devices of a node, in one direction; assumed by default, see `assumed_links`.
        link: One device's share of the link between two nodes, in one direction; assumed by default.
        memory_bytes: Most bytes that a rank may hold.
        cores: Cores of a node, which its ranks share; None if each rank has its own device.
        threads: Threads of each rank, if ranks share cores.
        group_links: Measured links inside groups on one node, by the number of ranks in a group.

    Raises:
        ValueError: If nodes would have different numbers of devices.
    """

    device: Device
    num_devices: int
    per_node: int
    node_link: Link = field(default_factory=lambda: _AssumedLink(5e-6, 100e9))
    link: Link = field(default_factory=lambda: _AssumedLink(15e-6, 12.5e9))
    memory_bytes: float = 0.0
    cores: int | None = None
    threads: int = 1
    group_links: Mapping[int, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.per_node < 1:
            raise ValueError(
                f"`num_devices` and `per_node` must be at least 1; got {self.num_devices} and {self.per_node}"
            )
        if self.num_devices > self.per_node and self.num_devices % self.per_node:
            raise ValueError(
                f"All nodes must have the same number of devices; got {self.num_devices} devices with {self.per_node}"
                f" per node. Give a multiple of {self.per_node}"
            )
        if not self.memory_bytes:
            # Ranks on the cores of a node share its memory.
            shared = min(self.per_node, self.num_devices) if self.cores is not None else 1
            # The dataclass is frozen.
            object.__setattr__(self, "memory_bytes", self.device.memory_bytes / shared)

    @property
    def num_nodes(self) -> int:
        return max(1, self.num_devices // self.per_node)

    @property
    def ranks_per_node(self) -> int:
        return min(self.per_node, self.num_devices)

    @property
    def assumed_links(self) -> str:
        """Describe the assumed links that ranks use; empty if all used links were given or measured."""
        used = {
            "within a node (`--intra-node-bandwidth`)": self.node_link if self.ranks_per_node > 1 else None,
            "between nodes, per device (`--inter-node-bandwidth`)": self.link if self.num_nodes > 1 else None,
        }
        listed = (
            f"{bandwidth_text(link.bytes_per_s)} and {seconds_text(link.latency_s)} {where}"
            for where, link in used.items()
            if isinstance(link, _AssumedLink)
        )
        return ", ".join(listed)

    def is_inside_node(self, stride: int, size: int) -> bool:
        """Return whether every group of `size` ranks with this stride lies on one node."""
        # A divisor, so that no group begins on one node and ends on the next.
        return stride * size <= self.ranks_per_node and self.ranks_per_node % (stride * size) == 0

    def link_of(self, stride: int, size: int) -> Link:
        """Return the slowest link inside a group of `size` ranks with this stride."""
        return self.node_link if self.num_nodes == 1 or self.is_inside_node(stride, size) else self.link
