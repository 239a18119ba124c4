"""Communication in flight: one call from its start to its result, and who is gone when it fails.

A call is recorded as a span where a recorder is active. Inside `skip_communication` calls on tensors send nothing.

gloo reports a dead peer as a closed connection with a port number. So each rank has a heartbeat: a thread that counts
up in the rendezvous store about twice a second. A rank whose call has failed looks which counters stand still.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import set_multithreading_enabled

from lightning_parallel import tracing
from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.strict_order import in_strict_order, is_strict
from lightning_parallel.compat.default_group import all_processes, default_store
from lightning_parallel.tracing import InFlight

__all__ = [
    "PROFILING",
    "Done",
    "Pending",
    "blocked_calls",
    "blocking_call",
    "describe_failure",
    "heartbeats",
    "reported_errors",
    "skip_communication",
    "raise_explained",
    "start_heartbeat",
    "stop_heartbeat",
]

PROFILING = "profiling"
"""Axis of the group in which ranks exchange their measurements; communication along it is not recorded."""

ARRIVAL_NS = 300_000
"""A wait that blocks longer than this ends when the communication does. After a shorter wait, the communication may
have completed long before, while the thread was computing."""

BEAT_S = 0.4
"""Seconds between two beats of the heartbeat."""


class _ThreadState(threading.local):
    skips_communication = False


_thread = _ThreadState()


@contextmanager
def skip_communication() -> Iterator[None]:
    """Skip the communication of this thread inside the block.

    Collectives on tensors return tensors of the right shape with arbitrary values. A computation that would fail on
    some ranks only then fails here, where no other rank waits for it. Python objects are still exchanged.
    """
    # The flag belongs to the thread: a compressor's background thread must go on communicating meanwhile. Backward on
    # CUDA runs on threads of autograd's own, which would not see the flag, unless it is told to stay on this thread.
    before = _thread.skips_communication
    _thread.skips_communication = True
    try:
        with set_multithreading_enabled(False):
            yield
    finally:
        _thread.skips_communication = before


class Pending:
    """A call in flight, as `launch` starts it.

    Args:
        op: Name of the operation in torch's terms (`all_reduce`, `send`, ...).
        group: The group.
        num_bytes: Payload: the full tensor for all_reduce and broadcast, the gathered total for all_gather and
            reduce_scatter, what this rank sends for all_to_all, the message for send and recv.
        dtype: Element type of the payload.
        result: What `wait` returns, or a function that makes it.
        peer: Global rank at the other end of a message; None for a collective.
        tag: Tag of a message.
    """

    # One is made for every collective of a step; slots keep that cheap.
    __slots__ = ("_bytes", "_dtype", "_flight", "_group", "_op", "_peer", "_result", "_tag", "_work")

    def __init__(
        self,
        op: str,
        group: Group,
        num_bytes: int,
        dtype: torch.dtype,
        result: Any,
        peer: int | None = None,
        tag: int | None = None,
    ) -> None:
        self._op = op
        self._group = group
        self._bytes = num_bytes
        self._dtype = dtype
        self._result = result
        self._peer = peer
        self._tag = tag
        self._work: Any = None

    def launch(self, call: Callable[[], Any], between_hosts: bool = False) -> Pending:
        """Start the communication.

        Args:
            call: Returns torch's handle of it.
            between_hosts: Whether it never passes through a device, even where there is one.

        Raises:
            RuntimeError: If it fails; names the ranks that are gone.
        """
        if _thread.skips_communication:
            return self
        if self._group.gate is not None:
            self._group.gate(self._op)
        flight = self._flight = _begin(self._op, self._group, self._bytes, self._dtype, self._peer, self._tag)
        try:
            with flight:
                self._work = (
                    in_strict_order(self._group.process_group, call) if is_strict() and not between_hosts else call()
                )
        except RuntimeError as error:
            raise_explained(error, self._op, self._group)
        if flight is not _UNRECORDED:
            self._watch_completion(flight)
        return self

    def _watch_completion(self, flight: InFlight | _Unrecorded) -> None:
        """Let the backend note when the communication is over, which may be long before `wait` is called."""
        if flight.clock is not None:
            flight.complete = flight.clock.completion(self._work)
        # The handles of this package, such as the all-reduce between two ranks, have no future: `wait` completes them.
        elif self._peer is None and self._group.backend == "gloo" and hasattr(self._work, "get_future"):
            with suppress(RuntimeError):  # some operations have no future
                self._work.get_future().add_done_callback(self._note_completion)

    def _note_completion(self, _: Any) -> None:
        # Runs on a thread of gloo. It must do nothing that takes long: that thread also completes other collectives.
        self._flight.complete = time.perf_counter_ns()

    def wait(self) -> Any:
        """Wait for the communication and return its result; calling it again returns the same.

        Raises:
            RuntimeError: If it fails; names the ranks that are gone.
        """
        # Cleared first, so that a second call does not wait again for a handle that is used up.
        work, self._work = self._work, None
        if work is not None:
            flight = self._flight
            start_ns = time.perf_counter_ns()
            try:
                with flight, _blocked(self._op, self._group, self._peer):
                    work.wait()
            except RuntimeError as error:
                raise_explained(error, self._op, self._group)
            if flight is not _UNRECORDED and flight.complete is None and flight.clock is None:
                end_ns = time.perf_counter_ns()
                if end_ns - start_ns > ARRIVAL_NS:
                    flight.complete = end_ns
            flight.finish()
        return self._result() if callable(self._result) else self._result


class Done(Pending):
    """The result of a collective in a group of one rank."""

    __slots__ = ()

    def __init__(self, result: Any) -> None:
        self._result = result
        self._work = None


class _Unrecorded:
    """Takes the place of an `InFlight` where nothing is recorded, so that callers need not ask."""

    complete: Any = None
    clock = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def finish(self) -> None:
        pass


_UNRECORDED = _Unrecorded()


def _begin(
    op: str,
    group: Group,
    num_bytes: int | None,
    dtype: torch.dtype | None,
    peer: int | None = None,
    tag: int | None = None,
) -> InFlight | _Unrecorded:
    active = tracing.active()
    if active is None or group.axis == PROFILING:
        return _UNRECORDED
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    return InFlight(active, op, group.axis, group.ranks, num_bytes, name, peer, tag, group.name)


@contextmanager
def blocking_call(op: str, group: Group) -> Iterator[None]:
    """Record the block as one call in `group` that blocks the thread, of an unknown number of bytes.

    Raises:
        RuntimeError: If the block does; names the ranks that are gone.
    """
    flight = _begin(op, group, None, None)
    try:
        with flight, _blocked(op, group):
            yield
    except RuntimeError as error:
        raise_explained(error, op, group)
    flight.finish()


class _Blocked:
    """What the main thread is blocked in, while it is."""

    __slots__ = ("group", "number", "op")

    now: ClassVar[_Blocked | None] = None
    count: ClassVar[int] = 0

    def __init__(self, op: str, group: Group) -> None:
        self.op = op
        self.group = group
        _Blocked.count += 1
        self.number = _Blocked.count

    def __enter__(self) -> None:
        _Blocked.now = self

    def __exit__(self, *_: object) -> None:
        _Blocked.now = None

    def __str__(self) -> str:
        return f"{self.number} {','.join(map(str, self.group.ranks))} `{self.op}` along {self.group.axis}"


def _blocked(op: str, group: Group, peer: int | None = None) -> _Blocked | _Unrecorded:
    # A message between two ranks may be on its way while its sender goes on.
    is_seen = _heartbeat is not None and peer is None and threading.current_thread() is threading.main_thread()
    return _Blocked(op, group) if is_seen else _UNRECORDED


def raise_explained(error: RuntimeError, op: str, group: Group) -> NoReturn:
    """Raise the failure of a call again, with the ranks that are gone."""
    raise RuntimeError(describe_failure(f"{op} along {group.axis}", group.ranks, error)) from error


# -------------------------------------------------------------------------------------------------------- the heartbeat


class _Heartbeat:
    """The thread of this rank, and its view of the other ranks."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store = dist.PrefixStore("lightning_parallel/heartbeat", store)
        self.rank = rank
        # The store outlives a run: what an earlier run of this process reported must not explain this one's.
        self.report("")
        self.store.set(f"blocked/{rank}", "")
        self.stopped = threading.Event()
        # A thread, because the main one may be inside a collective for as long as the slowest rank computes.
        self.thread = threading.Thread(target=self._beat, name="lightning_parallel-heartbeat", daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        seen: _Blocked | None = None
        told: _Blocked | None = None
        while not self.stopped.wait(BEAT_S):
            try:
                self.store.add(f"beat/{self.rank}", 1)
                # What the main thread is in for a whole interval, for ranks that wait for it.
                now = _Blocked.now
                if now is not told and (now is None or now is seen):
                    self.store.set(f"blocked/{self.rank}", "" if now is None else str(now))
                    told = now
                seen = now
            except RuntimeError:
                return  # the process that hosts the store is gone; the collectives will report it

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
        # `get` would wait for a key that was never set, until the store's timeout.
        reported = {rank: self.store.get(f"error/{rank}").decode() for rank in ranks if self._has_reported(rank)}
        return {rank: message for rank, message in reported.items() if message}

    def _has_reported(self, rank: int) -> bool:
        return self.store.check([f"error/{rank}"])


_heartbeat: _Heartbeat | None = None


def start_heartbeat() -> None:
    """Start the heartbeat in the store of the default process group, unless it runs or torch is not distributed."""
    global _heartbeat
    if _heartbeat is None and dist.is_initialized() and all_processes().size() > 1:
        _heartbeat = _Heartbeat(default_store(), all_processes().rank())


@atexit.register  # a thread inside the store when the interpreter ends would abort the process
def stop_heartbeat() -> None:
    """Stop the heartbeat, if it runs."""
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat.stopped.set()
        _heartbeat.thread.join(timeout=5)
        _heartbeat = None


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
