"""Hosts as network namespaces on a bridge, each on a link of a given rate. Needs root, `ip` and `tc`.

host 0 --- link --- [bridge] --- link --- host 1        a link is shaped in both directions by `tc tbf`
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

__all__ = ["Network", "unavailable"]

BURST_S = 0.001  # what a link may send at once after it was idle, in seconds of its rate
MIN_BURST_BYTES = 16_000


def unavailable() -> str:
    """Why this machine cannot make such networks; empty if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    try:
        with Network(2, rate_mbit=1000):
            return ""
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` says: {error.stderr.strip()}"


class Network:
    """A context in which the hosts exist; they and what runs on them are removed at its end.

    Args:
        hosts: Number of hosts.
        rate_mbit: Rate of each link and direction, in Mbit/s.
    """

    def __init__(self, hosts: int, rate_mbit: float) -> None:
        self.hosts, self.rate_mbit = hosts, rate_mbit
        self._names = [f"lp{os.getpid()}h{host}" for host in range(hosts)]
        self._bridge = f"lp{os.getpid()}b"
        self._processes: list[subprocess.Popen[str]] = []

    def address(self, host: int) -> str:
        """The address of a host on its only network."""
        return f"10.201.0.{host + 1}"

    def _port(self, host: int) -> str:
        return f"lp{os.getpid()}p{host}"

    def __enter__(self) -> Network:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave through `__exit__`
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "link", "set", self._bridge, "up")
            for host, name in enumerate(self._names):
                self._add_host(host, name)
        except BaseException:
            self._remove()
            raise
        return self

    def _add_host(self, host: int, name: str) -> None:
        port = self._port(host)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", port, "master", self._bridge)
        _run("ip", "link", "set", port, "up")
        inside = ("ip", "-n", name)
        _run(*inside, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "link", "set", "lo", "up")
        burst = max(int(self.rate_mbit * 1e6 / 8 * BURST_S), MIN_BURST_BYTES)
        shape = ("root", "tbf", "rate", f"{self.rate_mbit}mbit", "burst", str(burst), "latency", "100ms")
        _run("tc", "qdisc", "add", "dev", port, *shape)
        _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)

    def run(self, commands: Sequence[Sequence[str]], deadline_s: float) -> list[int | None]:
        """Run one command on each host, with the output of this process.

        Returns:
            Their exit codes; None for those that had to be killed at the deadline.
        """
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(["ip", "netns", "exec", name, *command], env=environment, text=True)
            for name, command in zip(self._names, commands)
        ]
        until = time.monotonic() + deadline_s
        while time.monotonic() < until and any(process.poll() is None for process in self._processes):
            time.sleep(0.05)
        codes = [process.poll() for process in self._processes]
        self._kill()
        return codes

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
        self._remove()

    def _remove(self) -> None:
        for host, name in enumerate(self._names):
            subprocess.run(["ip", "link", "delete", self._port(host)], capture_output=True)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
