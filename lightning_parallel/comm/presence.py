"""Presence of ranks in the rendezvous store: which ranks live, the place of each rank, and which ranks have failed.

gloo reports a dead peer as a closed connection with a port number. NCCL reports nothing, because the device waits
instead of the host. Three kinds of entries in the store tell more:

* **Beats.** A thread of each rank counts up about twice a second. After a failed call, a rank looks for counters that
  stand still. Where devices wait, this thread also watches the counter of the next rank. It ends its own rank when any
  rank is lost.
* **Errors.** A rank that fails may live on while other ranks wait for it. It reports its error and waits until these
  ranks have ended. Their threads close the connections in which they are blocked.
* **Roll calls.** A collective pairs any calls that arrive. A rank that ends an epoch early would exchange numbers with
  ranks at another place, or wait forever. Before such a message each rank writes its place into the store. The ranks
  go on when all of them are at one place.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.host import Process
from lightning_parallel.comm.threads import Helper, current_helper, end_helpers, waiting_helpers
from lightning_parallel.compat import users_place
from lightning_parallel.compat.default_group import (
    abort_all_groups,
    all_processes,
    backend_of,
    close_connections,
    default_store,
    groups_of_run,
)

__all__ = [
    "ApartError",
    "Blocked",
    "BlockedCall",
    "LostRankError",
    "RollCall",
    "blocked_calls",
    "describe_failure",
    "ended_processes",
    "explained",
    "heartbeats",
    "name_run",
    "report_failure",
    "reported_errors",
    "start_heartbeat",
    "stop_heartbeat",
    "trains_here",
    "wait_until_heard",
]


BEAT_S = 0.4
"""Seconds between two beats of the heartbeat."""

ENDED_S = 2.0
"""Seconds without a beat after which a process of this machine counts as ended, if it no longer exists."""

SILENT_S = 20.0
"""Seconds without a beat after which a process of another machine counts as gone.

C code that holds Python's lock may stop the beat for a shorter time.
"""

_KEEPALIVE_S = 5
"""Seconds until the system first probes a quiet connection to the store, and between two probes."""

GRACE_S = 30.0
"""Seconds that a rank may take to end by itself after it has learned of a lost rank."""

_OF_GLOO = re.compile("gloo/transport|pair closure|Connection (closed|reset) by peer")

_AFTER = "stopped after rank "
"""Begins the report of a rank that failed because another rank had failed."""

_FOR_ALL = "found for all ranks: "
"""Begins the report of an error whose text is the same on all ranks."""

RELEASE_S = 2.0
"""Seconds that a rank may go on after the failure of another rank, before its groups are closed."""

_SELDOM = 4
"""While this rank is not known to wait, one beat in this many looks for failures."""

_MOST_NAMED = 16
"""Ranks up to which an error names each of them: every rank prints the error."""

HEARD_S = 10.0
"""Seconds that a failed rank lets other ranks read its error: the store may end with its process."""


class LostRankError(RuntimeError):
    """Reports a rank of the run that died or does not answer.

    The other ranks raise the error instead of waiting for the timeout of a collective. The error names the rank.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import LostRankError, TensorParallelStrategy

        trainer = Trainer(devices=2, strategy=TensorParallelStrategy())
        try:
            trainer.fit(MyModule(), MyData())
        except LostRankError as error:
            print(error)  # names the rank
            raise
        ```
    """

    message: ClassVar[str] = ""

    def __init__(self, message: str | None = None) -> None:
        # `PyThreadState_SetAsyncExc` makes the error in the other thread without arguments.
        super().__init__(self.message if message is None else message)


class Blocked:
    """The call in which the training thread is blocked: a collective, a message or a roll call.

    Args:
        op: The operation, or the place of a roll call.
        group: The ranks that take part.
        index: Number of the collective in its group, or of the roll call, from 1; 0 for a message.
        key: The name of a roll call; otherwise the name of the group.
    """

    __slots__ = ("group", "index", "key", "number", "op")

    now: ClassVar[Blocked | None] = None
    last: ClassVar[Blocked | None] = None
    count: ClassVar[int] = 0
    begun: ClassVar[Counter[str]] = Counter()
    """Number of collectives per group, and of roll calls per name, that this rank has begun in this run."""
    of_helpers: ClassVar[set[str]] = set()
    """Groups in which other threads begin collectives, so that the next collective is unpredictable."""

    def __init__(self, op: str, group: Group, index: int, key: str = "") -> None:
        self.op = op
        self.group = group
        self.index = index
        self.key = key
        Blocked.count += 1
        self.number = Blocked.count

    def __enter__(self) -> None:
        # The heartbeat's thread reads this attribute without a lock: one assignment is atomic.
        Blocked.now = self
        if self.index and not self.key:
            Blocked.last = self

    def __exit__(self, *_: object) -> None:
        Blocked.now = None

    @classmethod
    def begin(cls, key: str) -> int:
        """Count a collective of a group, or a roll call; returns its index."""
        if current_helper() is not None:
            cls.of_helpers.add(key)
        cls.begun[key] += 1
        return cls.begun[key]

    @property
    def name(self) -> str:
        """The operation and its axis."""
        return self.op if self.key else f"`{self.op}` along {self.group.axis}"

    def described(self, run: str, place: str) -> str:
        """Return the description of this call for other ranks, with the line of the user's code."""
        ranks = list(self.group.ranks) if self.index else []
        return json.dumps([run, self.number, ranks, self.key or self.group.name, self.index, self.name, place])


class BlockedCall(NamedTuple):
    """The call in which another rank is blocked.

    Attributes:
        number: A number that differs for each call of that rank.
        key: The name of the roll call, or of the group.
        name: The operation and its axis, or the place of a roll call.
        place: The line of the user's code, see `compat.users_place`.
        is_apart: Whether the call waits for this rank, which has not begun it.
    """

    number: int
    key: str
    name: str
    place: str
    is_apart: bool


class _Heartbeat:
    """The thread of this rank, and its view of the other ranks."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, watches: bool) -> None:
        # A second connection: while a group is made, the training thread waits in the store for other ranks.
        before = _sockets() if hasattr(store, "clone") else {}
        own = store.clone() if hasattr(store, "clone") else store
        self.store = dist.PrefixStore("lightning_parallel/heartbeat", own)
        _notice_dead_connections(store, before)
        self.rank = rank
        # The training thread. Ray calls the user's function in a thread that is not the main thread.
        self.caller = threading.get_ident()
        # The store outlives a run: the report of an earlier run of this process must not explain errors of this run.
        self.report("")
        self.store.set(f"blocked/{rank}", "")
        self.store.set(f"process/{rank}", str(Process.of()))
        self.run = self.store.add(f"run/{rank}", 1)
        # Equal on all ranks, unlike the number of the run; empty until the ranks have agreed on it.
        self.name = ""
        self.world_size = world_size
        self._looks, self._released_s = 0, 0.0
        self._processes: dict[int, Process] = {}
        self.stopped = threading.Event()
        self._watch = _Watch(self, world_size) if watches else None
        # The training thread may be in a collective for as long as the slowest rank computes.
        self.thread = Helper("heartbeat", self._beat, self.stopped.set)
        self.thread.start()

    def _beat(self) -> None:
        seen: Blocked | None = None
        told: Blocked | None = None
        while not self.stopped.wait(BEAT_S):
            try:
                self.store.add(f"beat/{self.rank}", 1)
                # Only a call that lasts for a full interval is published for the ranks that wait for this rank.
                now = Blocked.now
                if now is not told and (now is None or now is seen):
                    self.store.set(f"blocked/{self.rank}", "" if now is None else self._description(now))
                    told = now
                else:
                    self._release(now if now is told else None)
                seen = now
                loss = None if self._watch is None else self._watch.look()
            except RuntimeError:
                # The process with the store is gone. Where hosts wait, their calls fail without the heartbeat.
                # The store also goes when rank 0 ends the run as planned. Then this rank stops, too, in a moment.
                if self._watch is None or self.stopped.wait(ENDED_S):
                    return
                loss = "the process with the rendezvous store (rank 0's, or the launcher's) is gone"
            if loss is not None:
                self._give_up(loss)
                return

    def _description(self, call: Blocked) -> str:
        frame = sys._current_frames().get(self.caller)
        return call.described(self.name, "" if frame is None else users_place(frame))

    def _release(self, call: Blocked | None) -> None:
        """Make the call of this rank fail if another rank has failed; roll calls look for failures themselves."""
        self._looks += 1
        if not self.name or (call is None and self._looks % _SELDOM) or (call is not None and call.key):
            return
        # `add` of 0 reads a counter that may not exist yet.
        if not self.store.add(f"failed/{self.name}", 0) or self.read(f"error/{self.rank}"):
            return
        self._released_s = self._released_s or time.monotonic() + RELEASE_S
        if call is not None:
            groups = [call.group.process_group, *(helper.process_group for helper in waiting_helpers())]
        elif time.monotonic() > self._released_s:
            # This rank computes, and must not wait for others afterwards. Or it is in a collective that torch or the
            # user has called, which `Blocked` does not see.
            groups = list(groups_of_run())
        else:
            return
        # A helper may wait in the same group: its connections are closed once.
        for process_group in dict.fromkeys(groups):
            if process_group is not None:
                close_connections(process_group)

    def _give_up(self, loss: str) -> None:
        """End this rank: the training thread may be waiting for a device, which waits for a lost rank."""
        last = "" if Blocked.last is None else f"; the last call of this rank was {Blocked.last.name}"
        LostRankError.message = f"[rank {self.rank}] {loss}{last}"
        # Printed first: the next steps need the training thread and the device, which may not answer.
        sys.stderr.write(f"{LostRankError.message}\n")
        with suppress(RuntimeError):
            self.report(loss)
        # ctypes passes a plain number as a C int, which would cut off the upper bits of the thread's number.
        caller = ctypes.c_ulong(self.caller)
        # Before the abort releases the device: the training thread must not go on with arbitrary values.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(caller, ctypes.py_object(LostRankError))
        with suppress(RuntimeError, ValueError):
            abort_all_groups()
        if not self.stopped.wait(GRACE_S):
            # Not `sys.exit`, which would end only this thread: the training thread may hang in C.
            os._exit(1)

    def stop(self) -> None:
        """End the thread."""
        end_helpers([self.thread])

    def report_end(self) -> None:
        """Publish that the run has ended here, so that other ranks do not miss this rank."""
        with suppress(RuntimeError):  # the store may be gone
            self.store.set(f"ended/{self.rank}", str(self.run))
            # A failed rank has already counted itself in `report`.
            if self.name and not self.read(f"error/{self.rank}"):
                self._count_itself()

    def report(self, message: str) -> None:
        """Publish the error that ends this rank, for the ranks that wait for this rank."""
        is_first = message and not self.read(f"error/{self.rank}")
        if is_first:
            self.store.set(f"order/{self.rank}", str(self.store.add("order", 1)))
        # After the order, which readers of the error expect, and before the counters, which make ranks look for it.
        self.store.set(f"error/{self.rank}", message)
        if is_first and self.name:
            self.store.add(f"failed/{self.name}", 1)
            self._count_itself()

    def _count_itself(self) -> None:
        self.store.add(f"over/{self.name}", 1)
        self.store.set(f"over/{self.name}/{self.rank}", "1")

    def num_over(self, others: Sequence[int]) -> int:
        """Return how many ranks have ended the run: a rank that has said so and has left counts once."""
        said = self.store.add(f"over/{self.name}", 0)
        return said + sum(not self.store.check([f"over/{self.name}/{rank}"]) for rank in self.ended(others))

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks without a beat during three intervals."""
        before = self.read_all("beat", ranks)
        time.sleep(3 * BEAT_S)
        now = self.read_all("beat", ranks)
        return [rank for rank in ranks if now[rank] == before[rank]]

    def errors(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the reported errors by rank, in the order of the reports."""
        found = {rank: message for rank, message in self.read_all("error", ranks).items() if message}
        order = self.read_all("order", list(found))
        return {rank: found[rank] for rank in sorted(found, key=lambda rank: int(order[rank]))}

    def read(self, key: str) -> str:
        """Return the value of a key; empty if it was never set."""
        # `get` would wait for the key, until the store's timeout.
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def read_all(self, what: str, ranks: Sequence[int]) -> dict[int, str]:
        """Return the values of ranks; empty for a rank that has never set its value."""
        keys = [f"{what}/{rank}" for rank in ranks]
        # Two requests for any number of ranks: after a failure, all ranks read the values of all ranks.
        if keys and self.store.check(keys):
            return {rank: value.decode() for rank, value in zip(ranks, self.store.multi_get(keys))}
        return {rank: self.read(key) for rank, key in zip(ranks, keys)}

    def process(self, rank: int) -> Process:
        """Return the process of a rank; one without a host if the rank has not begun."""
        return self._processes_of([rank])[rank]

    def _processes_of(self, ranks: Sequence[int]) -> dict[int, Process]:
        unknown = [rank for rank in ranks if rank not in self._processes]
        # Kept, as the ranks of a group keep their processes: a waiting rank asks 20 times a second.
        found = {rank: Process.parse(text) for rank, text in self.read_all("process", unknown).items()}
        self._processes.update({rank: process for rank, process in found.items() if process.host})
        return {rank: self._processes.get(rank) or found[rank] for rank in ranks}

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks on this machine whose processes no longer exist."""
        return [rank for rank, process in self._processes_of(ranks).items() if process.is_alive() is False]


def _sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets, by inode number."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _notice_dead_connections(store: dist.Store, before: Mapping[int, int]) -> None:
    """Let the system end the heartbeat's connection to the store when the network to it is cut.

    The store waits for an answer without a deadline. So every request would wait forever, also the requests by which
    a rank looks for the lost rank.

    Args:
        store: The store at the other end of the connection.
        before: Sockets that existed before the connection, and belong to other code.
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
            # A second descriptor of the same connection: options belong to the connection, not to the descriptor.
            is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (
                socket.AF_INET,
                socket.AF_INET6,
            )
            if is_tcp and _address_of_peer(connection) in [(known, port) for known in hosts]:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                    connection.setsockopt(socket.IPPROTO_TCP, option, _KEEPALIVE_S)
                # Keepalive probes quiet connections only. This option also ends a connection with a request on its way.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))


def _address_of_peer(connection: socket.socket) -> tuple[str, int]:
    host, port, *_ = connection.getpeername()
    return host.removeprefix("::ffff:"), port  # IPv6 writes this prefix before addresses of IPv4


class _Watch:
    """Detects a lost rank, with a few requests to the store for any number of ranks.

    Each rank watches the next running rank. A rank that detects a loss writes it to one key, which all ranks read.
    """

    def __init__(self, heartbeat: _Heartbeat, world_size: int) -> None:
        self._heartbeat = heartbeat
        self._others = [(heartbeat.rank + step) % world_size for step in range(1, world_size)]
        self._seen: tuple[int, str] | None = None
        self._since_s = 0.0

    def look(self) -> str | None:
        """Return a description of the lost rank; None if no rank is known to be lost."""
        heartbeat = self._heartbeat
        key = f"lost/{heartbeat.run}"
        found: str | None = heartbeat.read(key)
        if found or heartbeat.read(f"error/{heartbeat.rank}"):  # this rank is about to end by itself
            return found or None
        for rank in self._others:
            # A rank that has not begun this run, or has begun another, cannot be missed in it.
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
        # The clock starts again at each beat, and when the watched rank is another.
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
            return None
        waited_s = now_s - self._since_s
        if error and waited_s > ENDED_S:
            return f"rank {rank} stopped with: {error}"
        is_alive = self._heartbeat.process(rank).is_alive()
        if is_alive is False and waited_s > ENDED_S:
            return f"rank {rank} is gone: its process has ended [LP028]"
        if is_alive is None and waited_s > SILENT_S:
            return f"rank {rank} is gone: its heartbeat has stopped for {waited_s:.0f} s [LP028]"
        return None


_heartbeat: _Heartbeat | None = None


def start_heartbeat(watches: bool | None = None) -> None:
    """Start the heartbeat in the store of the default process group, unless it runs or torch is not distributed.

    Args:
        watches: Whether it ends this rank when another rank is lost; by default where devices wait for each other.
    """
    global _heartbeat
    if _heartbeat is None and dist.is_initialized() and all_processes().size() > 1:
        world = all_processes()
        if watches is None:
            watches = "nccl" in backend_of(world)
        _heartbeat = _Heartbeat(default_store(), world.rank(), world.size(), watches)
    elif _heartbeat is not None:
        # The next run may train on another thread.
        _heartbeat.caller = threading.get_ident()


def stop_heartbeat() -> None:
    """Stop the heartbeat, if it runs, at the end of a run."""
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat.stop()
        _heartbeat.report_end()
        _heartbeat = None


def trains_here() -> bool:
    """Tell whether the calling thread is the training thread of the heartbeat."""
    return _heartbeat is not None and threading.get_ident() == _heartbeat.caller


def name_run(name: str) -> None:
    """Give the run a name, the same on all ranks and at the same point: ranks then tell each other their calls."""
    if _heartbeat is not None:
        # Counted from here, a point that all ranks share, so that equal numbers mean the same call.
        Blocked.begun.clear()
        Blocked.of_helpers.clear()
        _heartbeat.name = name


def blocked_calls(ranks: Sequence[int]) -> dict[int, BlockedCall]:
    """Return the calls of other ranks that wait for this rank, by rank."""
    if _heartbeat is None:
        return {}
    found = {}
    for rank in ranks:
        text = _heartbeat.read(f"blocked/{rank}")
        run, number, members, key, index, name, place = json.loads(text) if text else ("", 0, (), "", 0, "", "")
        if _heartbeat.rank in members:
            # Without a common name of the run, the numbers of two ranks do not mean the same call.
            is_apart = run == _heartbeat.name != "" and key not in Blocked.of_helpers and index > Blocked.begun[key]
            found[rank] = BlockedCall(number, key, name, place, is_apart)
    return found


def reported_errors(ranks: Sequence[int]) -> dict[int, str]:
    """Return the reported errors by rank, in the order of the reports."""
    return {} if _heartbeat is None else _heartbeat.errors(ranks)


def heartbeats(ranks: Sequence[int]) -> dict[int, int]:
    """Return the number of beats by rank; empty if this rank has no heartbeat."""
    found = {} if _heartbeat is None else _heartbeat.read_all("beat", ranks)
    return {rank: int(beats or 0) for rank, beats in found.items()}


def ended_processes(ranks: Sequence[int]) -> list[int]:
    """Return the ranks on this machine whose processes no longer exist."""
    return [] if _heartbeat is None else _heartbeat.ended(ranks)


def report_failure(error: BaseException) -> None:
    """Publish the error that ends this rank, unless it has published one: the ranks that wait will name it."""
    if _heartbeat is not None and dist.is_initialized():
        with suppress(RuntimeError):  # the store may be gone
            if not _heartbeat.errors([_heartbeat.rank]):
                kind = _FOR_ALL if getattr(error, "is_for_all_ranks", False) else f"{type(error).__name__}: "
                _heartbeat.report(f"{kind}{error}")


def explained(error: BaseException) -> BaseException:
    """Add the failed and lost ranks to the error of a collective that another package called.

    Any other error is returned unchanged.
    """
    if _heartbeat is None or not isinstance(error, RuntimeError) or not _OF_GLOO.search(str(error)):
        return error
    known = reported_errors([_heartbeat.rank])
    return error if known else RuntimeError(describe_failure("a collective", range(_heartbeat.world_size), error))


def wait_until_heard() -> None:
    """Wait after a failure of this rank until all living ranks have ended the run: its process may hold the store."""
    heart = _heartbeat
    if heart is None or not heart.name or not dist.is_initialized():
        return
    until_s = time.monotonic() + HEARD_S
    others = [rank for rank in range(heart.world_size) if rank != heart.rank]
    with suppress(RuntimeError):
        while heart.num_over(others) < heart.world_size:
            if time.monotonic() > until_s:
                return
            time.sleep(0.05)


def describe_failure(what: str, ranks: Sequence[int], error: BaseException) -> str:
    """Describe the failed collective `what` between `ranks`, and name the ranks that have failed or are gone."""
    place = f"{what} between ranks [{_named(ranks)}] failed"
    message = f"{place}: {error}"
    if _heartbeat is None or not dist.is_initialized():
        return message
    me = _heartbeat.rank
    # All ranks of the world: the rank that failed first may not be in the group of the call that failed here.
    others = [rank for rank in range(all_processes().size()) if rank != me]
    try:
        errors = _heartbeat.errors(others)
        # The quick answers first: `silent` sleeps for three beats. A report may arrive meanwhile.
        lost = [] if errors else ended_processes(others) or _heartbeat.silent(others)
        errors = errors or _heartbeat.errors(others)
        lost = [rank for rank in lost if rank not in errors]
        known = f"lost rank {_named(lost)}" if lost else str(error)
        _heartbeat.report(f"{_AFTER}{next(iter(errors))}" if errors else known)
    except RuntimeError:
        peers = [rank for rank in ranks if rank != me]
        who = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {_named(peers)}"
        return f"[rank {me}] {message}\n{who} is gone, and so is the rendezvous store [LP028]"
    details = [f"rank {rank} is gone: it no longer answers [LP028]" for rank in lost]
    for rank, text in errors.items():
        if text.startswith(_FOR_ALL):
            return f"{text.removeprefix(_FOR_ALL)}\n(found on rank {rank})"
        if not text.startswith(_AFTER):
            details.append(f"rank {rank} stopped with: {text}")
    if len(details) > _MOST_NAMED:
        details[_MOST_NAMED:] = [f"and {len(details) - _MOST_NAMED} more ranks"]
    # With the error of another rank, the text of this rank's own error adds nothing.
    return "\n".join([f"[rank {me}] {place if errors else message}", *details])


def _named(ranks: Sequence[int]) -> str:
    """Return the ranks; of many ranks, the first ones and the number of the others."""
    if len(ranks) <= _MOST_NAMED:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))} and {len(ranks) - 4} others"


# ----------------------------------------------------------------------------------------------------------- roll calls


_ROLL_CALL = "roll call/"
_LOOK_S = 0.5
"""Seconds between two looks of a waiting rank at the other ranks."""
_STUCK_S = 8.0
"""Seconds in one call after which a rank counts as stuck there: a slow link would not take as long."""
_QUIET_S = 4.0
"""Seconds without a beat after which a call that a rank has reported does not tell where the rank is."""
_SILENCE_S = 15.0
"""Seconds without a beat after which a rank counts as gone; C code may hold Python's lock for a shorter time."""
_READ_S = 10.0
"""Seconds that a failing rank lets other ranks read its place: the store may end with its process."""


class ApartError(RuntimeError):
    """Ranks wait for each other at different places.

    Attributes:
        places: The place of each rank; empty for a rank that has not come and is not known to wait.
        lines: The line of the user's code on each rank, see `compat.users_place`; empty if it is unknown.
        purposes: The purpose of the roll call in which each rank waits; empty if it waits in none. The constructor
            takes the full names of the roll calls.
    """

    def __init__(self, places: Mapping[int, str], lines: Mapping[int, str], names: Mapping[int, str]) -> None:
        self.places = dict(places)
        self.lines = dict(sorted(lines.items()))
        self.purposes = {
            rank: name.split("/")[1] if name.startswith(_ROLL_CALL) else "" for rank, name in names.items()
        }
        listed = (f"rank {rank} {place or 'does not come'}" for rank, place in self.places.items())
        super().__init__("; ".join(listed))

    def told(self, text: str) -> RuntimeError:
        """Return an error whose text is the same on all ranks, so that other ranks report it unchanged."""
        error = RuntimeError(text)
        error.is_for_all_ranks = True  # type: ignore[attr-defined]
        return error


class RollCall:
    """The roll call of a group for a purpose; all ranks of the group construct it at the same point.

    A roll call takes a few round trips to the store, about 0.2 ms on one machine. A group of more than `MOST_RANKS`
    ranks would send too many requests to the store.

    Args:
        group: The ranks that meet.
        purpose: Tells roll calls apart in errors.
        key: Tells roll calls apart in the store; all ranks of the group have the same key, see `comm.shared_key`.
    """

    MOST_RANKS = 64

    def __init__(self, group: Group, purpose: str, key: str) -> None:
        self._group = group
        self._ranks = group.ranks
        self._rank = group.ranks[group.rank]
        self._name = f"{_ROLL_CALL}{purpose}/{key}"
        self._count = 0

    def meet(self, place: str, patience_s: float, note: str = "") -> list[str]:
        """Wait until all ranks are at `place`; returns their notes, by position in the group.

        Raises:
            ApartError: On every rank that waits, if a rank is at another place or does not come within `patience_s`.
            RuntimeError: If a rank is gone.
        """
        self._count += 1
        store = default_store()
        keys = [f"{self._name}/{self._count}/{rank}" for rank in self._ranks]
        mine = keys[self._ranks.index(self._rank)]
        try:
            store.set(mine, f"{note}\n{place}")
            with Blocked(place, self._group, Blocked.begin(self._name), self._name) if trains_here() else nullcontext():
                self._wait(store, keys, place, patience_s)
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"[rank {self._rank}] {place}: the rendezvous store of rank 0 or the launcher does not answer"
                f" ({error}). Its process ended, or the network failed"
            ) from error
        # All ranks are past the previous roll call, so no rank reads its keys. A long run must not fill the store.
        store.delete_key(f"{self._name}/{self._count - 1}/{self._rank}")
        notes, places = zip(*(value.decode().split("\n", 1) for value in store.multi_get(keys)))
        if len(set(places)) > 1:
            # Only after a mismatch: `users_place` parses source files.
            store.set(f"{mine}/read", users_place(sys._getframe()))
            read = [f"{key}/read" for key in keys]
            lines = [value.decode() for value in store.multi_get(read)] if _all_set(store, read, _READ_S) else []
            names = dict.fromkeys(self._ranks, self._name)
            raise ApartError(dict(zip(self._ranks, places)), dict(zip(self._ranks, lines)), names)
        return list(notes)

    def _wait(self, store: dist.Store, keys: list[str], place: str, patience_s: float) -> None:
        end_s = time.monotonic() + patience_s
        since = _Unchanged()
        while not _all_set(store, keys, min(_LOOK_S, end_s - time.monotonic())):
            absent = [rank for rank, key in zip(self._ranks, keys) if not store.check([key])]
            blocked = blocked_calls(absent)
            silent_s = {rank: since((rank, "beat"), beat) for rank, beat in heartbeats(absent).items()}
            # What a rank wrote before its network failed does not tell where it is.
            quiet = [rank for rank, passed_s in silent_s.items() if passed_s > _QUIET_S]
            # `is_apart` is certain at once. Any other blocked rank may only be slow, so its call gets some seconds.
            stuck = [
                rank
                for rank, call in blocked.items()
                if call.is_apart or rank not in quiet and since(rank, call.number) > _STUCK_S
            ]
            # The other absent ranks may be about to report their places: wait a little for a complete error.
            is_known = len(blocked) == len(absent) or since("stuck", bool(stuck)) > 2 * _LOOK_S
            is_over = time.monotonic() >= end_s
            if stuck and is_known or is_over and not quiet:
                blocked = blocked if stuck else {}
                here = dict.fromkeys(self._ranks, self._name) | dict.fromkeys(absent, "")
                raise ApartError(
                    dict.fromkeys(self._ranks, place) | dict.fromkeys(absent, "") | _names(blocked, "name"),
                    {self._rank: users_place(sys._getframe())} | _names(blocked, "place"),
                    here | _names(blocked, "key"),
                )
            is_silent = any(passed_s > _SILENCE_S for passed_s in silent_s.values())
            if is_over or is_silent or ended_processes(absent) or reported_errors(absent):
                raise RuntimeError(describe_failure(place, self._ranks, TimeoutError("a rank does not come")))


def _names(blocked: Mapping[int, BlockedCall], name: str) -> dict[int, str]:
    return {rank: getattr(call, name) for rank, call in blocked.items()}


class _Unchanged:
    """Measures for how many seconds values have been unchanged."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[int, float]] = {}

    def __call__(self, key: Hashable, value: int) -> float:
        now_s = time.monotonic()
        if key not in self._seen or self._seen[key][0] != value:
            self._seen[key] = (value, now_s)
        return now_s - self._seen[key][1]


def _all_set(store: dist.Store, keys: list[str], patience_s: float) -> bool:
    """Wait until all keys are set, or for `patience_s`; tell whether they are set."""
    # Polled: a wait in the store would block its connection for other threads of this process, such as the heartbeat.
    # And a wait that times out prints warnings.
    begun_s = time.monotonic()
    while not store.check(keys):
        waited_s = time.monotonic() - begun_s
        if waited_s > patience_s:
            return False
        # Often at first, because peers are seldom late.
        time.sleep(min(waited_s, 1e-3 if waited_s < 0.1 else 5e-3))
    return True
