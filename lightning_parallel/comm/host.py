"""The identity of hosts and processes, and whether a process of this host is alive."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

__all__ = ["Process", "boot_id", "host_id"]


@cache
def boot_id() -> str:
    """Identify one boot of one machine; empty if the system does not tell."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@cache
def host_id() -> str:
    """Identify the machine and the PID namespace, in which a process number means one process."""
    with suppress(OSError):
        return f"{boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"
    # Several containers may share a host name. Without /proc, no other process counts as a process of this host.
    return f"{socket.gethostname()}/{uuid4().hex}"


class Process(NamedTuple):
    """Identifies a process to other processes, which may run on other hosts.

    Attributes:
        host: See `host_id`.
        pid: Its number on the host.
        started: When the process was started, in ticks of its host; empty if the host does not tell.
    """

    host: str
    pid: int
    started: str

    @classmethod
    def of(cls, pid: int | None = None) -> Process:
        """Return the process of this host with the number `pid`; by default the calling process."""
        pid = os.getpid() if pid is None else pid
        return cls(host_id(), pid, _state_and_start(pid)[1])

    @classmethod
    def parse(cls, text: str) -> Process:
        """Parse the text of a process; an empty text gives a process without a host."""
        host, pid, started = text.split(" ") if text else ("", "0", "")
        return cls(host, int(pid), started)

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.started}"

    def is_alive(self) -> bool | None:
        """Tell whether the process runs; None if it belongs to another host, or its host does not tell."""
        # A process number of another host says nothing here, and without a start a reused number looks alive.
        if self.host != host_id() or not self.started:
            return None
        # A process that has ended stays as a zombie (Z) until its parent asks for its status.
        state, started = _state_and_start(self.pid)
        # The system reuses process numbers: a later process with this number has another start.
        return started == self.started and state not in "ZX"

    def kill(self) -> bool:
        """Kill the process, even if it is stopped, if it runs on this host; return whether it ran here."""
        is_here = bool(self.is_alive())
        if is_here:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
        return is_here


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process and its start, fields 3 and 22 of /proc/<pid>/stat; empty without such a file."""
    try:
        # The second field, the name, may have spaces and brackets: fields are counted from its last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
