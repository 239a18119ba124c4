"""Who is gone: a heartbeat on each rank, and what it tells the others.

gloo reports a dead peer as a closed connection with a port number; NCCL reports nothing, as the device waits and not
the host. So each rank has a heartbeat: a thread that counts up in the rendezvous store about twice a second. A rank
whose call has failed looks which counters stand still. Where devices wait, each heartbeat also watches the one of the
next rank, and ends its own rank when any is lost.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import torch.distributed as dist

from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.threads import Helper, end_helpers
from lightning_parallel.compat.default_group import abort_all_groups, all_processes, backend_of, default_store

__all__ = [
    "Blocked",
    "LostRankError",
    "blocked_calls",
    "describe_failure",
    "heartbeats",
    "process_host",
    "report_failure",
    "reported_errors",
    "start_heartbeat",
    "stop_heartbeat",
    "trains_here",
]

BEAT_S = 0.4
"""Seconds between two beats of the heartbeat."""

ENDED_S = 2.0
"""A process of this machine without a beat for so long that does not exist any more has ended."""

SILENT_S = 20.0
"""A process of another machine without a beat for so long is gone; less may pass in C, with the interpreter locked."""

_KEEPALIVE_S = 5
"""Seconds after which the system asks whether a quiet connection to the store still exists, and between requests."""

GRACE_S = 30.0
"""How long a rank that is told of a lost one may take to end by itself."""


class LostRankError(RuntimeError):
    """A rank of the run is gone; raised by the heartbeat in the thread that trains, where devices wait for it."""

    message: ClassVar[str] = ""

    def __init__(self, message: str | None = None) -> None:
        # Python makes the error in the other thread without arguments.
        super().__init__(self.message if message is None else message)


class Blocked:
    """What the thread that trains is blocked in, while it is."""

    __slots__ = ("group", "number", "op")

    now: ClassVar[Blocked | None] = None
    last: ClassVar[Blocked | None] = None
    count: ClassVar[int] = 0

    def __init__(self, op: str, group: Group) -> None:
        self.op = op
        self.group = group
        Blocked.count += 1
        self.number = Blocked.count

    def __enter__(self) -> None:
        Blocked.now = Blocked.last = self

    def __exit__(self, *_: object) -> None:
        Blocked.now = None

    @property
    def name(self) -> str:
        """The operation and its axis."""
        return f"`{self.op}` along {self.group.axis}"

    def __str__(self) -> str:
        return f"{self.number} {','.join(map(str, self.group.ranks))} {self.name}"


class _Heartbeat:
    """The thread of this rank, and its view of the other ranks."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, watches: bool) -> None:
        # A connection of its own: while a group is made the thread that trains waits in the store for others.
        before = _sockets() if hasattr(store, "clone") else {}
        own = store.clone() if hasattr(store, "clone") else store
        self.store = dist.PrefixStore("lightning_parallel/heartbeat", own)
        _notice_dead_connections(store, before)
        self.rank = rank
        # The one that trains. Ray calls the user's function in a thread that is not the main one.
        self.caller = threading.get_ident()
        # The store outlives a run: what an earlier run of this process reported must not explain this one's.
        self.report("")
        self.store.set(f"blocked/{rank}", "")
        self.store.set(f"process/{rank}", f"{process_host()} {os.getpid()}")
        self.run = self.store.add(f"run/{rank}", 1)
        self.stopped = threading.Event()
        self._watch = _Watch(self, world_size) if watches else None
        # A thread, because the one that trains may be inside a collective for as long as the slowest rank computes.
        self.thread = Helper("heartbeat", self._beat, self.stopped.set)
        self.thread.start()

    def _beat(self) -> None:
        seen: Blocked | None = None
        told: Blocked | None = None
        while not self.stopped.wait(BEAT_S):
            try:
                self.store.add(f"beat/{self.rank}", 1)
                # What the thread that trains is in for a whole interval, for ranks that wait for it.
                now = Blocked.now
                if now is not told and (now is None or now is seen):
                    self.store.set(f"blocked/{self.rank}", "" if now is None else str(now))
                    told = now
                seen = now
                loss = None if self._watch is None else self._watch.look()
            except RuntimeError:
                # The process that hosts the store is gone. Where hosts wait, their calls fail by themselves.
                if self._watch is None or self.stopped.wait(ENDED_S):
                    return
                loss = "the process with the rendezvous store (rank 0's, or the launcher's) is gone"
            if loss is not None:
                self._give_up(loss)
                return

    def _give_up(self, loss: str) -> None:
        """End this rank: the thread that trains may be waiting for a device, which waits for a rank that is gone."""
        last = "" if Blocked.last is None else f"; the last call of this rank was {Blocked.last.name}"
        LostRankError.message = f"[rank {self.rank}] {loss}{last}"
        # Said first: what follows needs that thread, and the device, to answer.
        sys.stderr.write(f"{LostRankError.message}\n")
        with suppress(RuntimeError):
            self.report(loss)
        caller = ctypes.c_ulong(self.caller)
        # Before the device is released: the thread that trains must not go on with what it then finds there.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(caller, ctypes.py_object(LostRankError))
        with suppress(RuntimeError, ValueError):
            abort_all_groups()
        if not self.stopped.wait(GRACE_S):
            os._exit(1)

    def stop(self) -> None:
        """End the thread."""
        end_helpers([self.thread])

    def report_end(self) -> None:
        """Publish that the run has ended here: other ranks do not miss this one, unless it has reported an error."""
        with suppress(RuntimeError):  # the store may be gone
            self.store.set(f"ended/{self.rank}", str(self.run))

    def report(self, message: str) -> None:
        """Publish the error that ends this rank, for the ranks that miss it."""
        self.store.set(f"error/{self.rank}", message)

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks without a beat during three intervals."""
        before = {rank: self.store.add(f"beat/{rank}", 0) for rank in ranks}
        time.sleep(3 * BEAT_S)
        return [rank for rank in ranks if self.store.add(f"beat/{rank}", 0) == before[rank]]

    def errors(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the errors that ranks have reported."""
        reported = {rank: self.read(f"error/{rank}") for rank in ranks}
        return {rank: message for rank, message in reported.items() if message}

    def read(self, key: str) -> str:
        """Return the value of a key, empty if it was never set."""
        # `get` would wait for the key, until the store's timeout.
        return self.store.get(key).decode() if self.store.check([key]) else ""


def _sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets, by what tells each socket from all others."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _notice_dead_connections(store: dist.Store, before: Mapping[int, int]) -> None:
    """Let the system end the heartbeat's connection to the store when the network to it is cut.

    The store waits for an answer without a deadline, so every request would wait for ever, also those by which a rank
    that has noticed the cut looks for who is gone.

    Args:
        store: The store, whose address the connection has.
        before: Sockets that there were before the connection was made, which belong to others.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host is None or port is None or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return  # not over a network, or not on Linux
    hosts: set[Any] = set()
    with suppress(OSError):
        hosts = {found[4][0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for number, descriptor in _sockets().items():
        if number in before:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            # Options belong to the connection, of which this is a second descriptor.
            is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (
                socket.AF_INET,
                socket.AF_INET6,
            )
            if is_tcp and _address_of_peer(connection) in [(known, port) for known in hosts]:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                    connection.setsockopt(socket.IPPROTO_TCP, option, _KEEPALIVE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))


def _address_of_peer(connection: socket.socket) -> tuple[str, int]:
    host, port, *_ = connection.getpeername()
    return host.removeprefix("::ffff:"), port  # as IPv6 writes addresses of IPv4


class _Watch:
    """Finds out that a rank is lost, with a few requests to the store whatever the number of ranks.

    Each rank watches the next one that runs, and all look at one key, in which the finder tells the others.
    """

    def __init__(self, heartbeat: _Heartbeat, world_size: int) -> None:
        self._heartbeat = heartbeat
        self._others = [(heartbeat.rank + step) % world_size for step in range(1, world_size)]
        self._seen: tuple[int, str] | None = None
        self._since_s = 0.0

    def look(self) -> str | None:
        """Return which rank is lost, if any is known to be."""
        heartbeat = self._heartbeat
        key = f"lost/{heartbeat.run}"
        found: str | None = heartbeat.read(key)
        if found or heartbeat.read(f"error/{heartbeat.rank}"):  # this rank is about to end by itself
            return found or None
        for rank in self._others:
            if heartbeat.store.add(f"run/{rank}", 0) == heartbeat.run:
                error = heartbeat.read(f"error/{rank}")
                if error or heartbeat.read(f"ended/{rank}") != str(heartbeat.run):
                    found = self._judge(rank, error)
                    if found:
                        heartbeat.store.set(key, found)
                    return found
        return None

    def _judge(self, rank: int, error: str) -> str | None:
        seen, now_s = (rank, error or str(self._heartbeat.store.add(f"beat/{rank}", 0))), time.monotonic()
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
            return None
        waited_s = now_s - self._since_s
        if error and waited_s > ENDED_S:
            return f"rank {rank} stopped with: {error}"
        is_alive = self._is_alive(rank)
        if is_alive is False and waited_s > ENDED_S:
            return f"rank {rank} is gone: its process has ended"
        if is_alive is None and waited_s > SILENT_S:
            return f"rank {rank} is gone: its heartbeat has stopped for {waited_s:.0f} s"
        return None

    def _is_alive(self, rank: int) -> bool | None:
        """Tell whether the process of a rank exists; None if it is not of this machine."""
        host, pid = self._heartbeat.read(f"process/{rank}").rsplit(" ", 1)
        if host != process_host():
            return None
        try:
            # One that has ended stays until its parent asks for it, as Z. The name, in brackets, may hold anything.
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False


@cache
def process_host() -> str:
    """Name the machine, and the part of it where a process number means one process; without /proc, this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{uuid4().hex}"


_heartbeat: _Heartbeat | None = None


def start_heartbeat(watches: bool | None = None) -> None:
    """Start the heartbeat in the store of the default process group, unless it runs or torch is not distributed.

    Args:
        watches: Whether it ends this rank when another one is lost; by default where devices wait for each other.
    """
    global _heartbeat
    if _heartbeat is None and dist.is_initialized() and all_processes().size() > 1:
        world = all_processes()
        if watches is None:
            watches = "nccl" in backend_of(world)
        _heartbeat = _Heartbeat(default_store(), world.rank(), world.size(), watches)
    elif _heartbeat is not None:
        _heartbeat.caller = threading.get_ident()


def stop_heartbeat() -> None:
    """Stop the heartbeat, if it runs, at the end of a run."""
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat.stop()
        _heartbeat.report_end()
        _heartbeat = None


def trains_here() -> bool:
    """Tell whether the heartbeat runs for the thread that asks, which is the one that trains."""
    return _heartbeat is not None and threading.get_ident() == _heartbeat.caller


def blocked_calls(ranks: Sequence[int]) -> dict[int, tuple[int, str]]:
    """Return the collectives in which ranks are blocked that wait for this one, too: number and name, by rank."""
    if _heartbeat is None:
        return {}
    found = {}
    for rank in ranks:
        if _heartbeat.store.check([f"blocked/{rank}"]):
            text = _heartbeat.store.get(f"blocked/{rank}").decode()
            number, members, name = text.split(" ", 2) if text else ("0", "", "")
            if str(_heartbeat.rank) in members.split(","):
                found[rank] = int(number), name
    return found


def reported_errors(ranks: Sequence[int]) -> dict[int, str]:
    """Return the errors that have ended ranks, as far as they have told."""
    return {} if _heartbeat is None else _heartbeat.errors(ranks)


def heartbeats(ranks: Sequence[int]) -> dict[int, int]:
    """Return how often the hearts of ranks have beaten; nothing if this rank has none."""
    return {} if _heartbeat is None else {rank: _heartbeat.store.add(f"beat/{rank}", 0) for rank in ranks}


def report_failure(error: BaseException) -> None:
    """Publish the error that ends this rank, unless it has: the ranks that wait for this one will name it."""
    if _heartbeat is not None and dist.is_initialized():
        with suppress(RuntimeError):  # the store may be gone
            if not _heartbeat.errors([_heartbeat.rank]):
                _heartbeat.report(f"{type(error).__name__}: {error}")


def describe_failure(what: str, ranks: Sequence[int], error: BaseException) -> str:
    """Describe the failed collective `what` between `ranks`, and name the ranks that are gone where that is known."""
    message = f"{what} between ranks {list(ranks)} failed: {error}"
    if _heartbeat is None or not dist.is_initialized():
        return message
    me = _heartbeat.rank
    # All ranks of the world: the one that started the failures may be in another group than the one that failed here.
    others = [rank for rank in range(all_processes().size()) if rank != me]
    try:
        silent = _heartbeat.silent(others)
        errors = _heartbeat.errors(others)
        lost = [rank for rank in silent if rank not in errors]
        _heartbeat.report(f"lost rank {', '.join(map(str, lost))}" if lost else str(error))
    except RuntimeError:
        peers = [str(rank) for rank in ranks if rank != me]
        who = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {', '.join(peers)}"
        return f"[rank {me}] {message}\n{who} is gone, and so is the rendezvous store"
    details = [f"rank {rank} is gone: it no longer answers" for rank in lost]
    details += [f"rank {rank} stopped with: {errors[rank]}" for rank in silent if rank in errors]
    return "\n".join([f"[rank {me}] {message}", *details])
