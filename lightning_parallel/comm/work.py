"""Communication in flight: one call from its start to its result.

A call is recorded as a span where a recorder is active. Inside `skip_communication` calls on tensors send nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd.grad_mode import set_multithreading_enabled

from lightning_parallel import tracing
from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.presence import Blocked, describe_failure, trains_here
from lightning_parallel.comm.threads import current_helper
from lightning_parallel.tracing import InFlight

__all__ = [
    "PROFILING",
    "Done",
    "Pending",
    "Traffic",
    "blocking_call",
    "current_call",
    "skip_communication",
    "skips_communication",
    "raise_explained",
]

PROFILING = "profiling"
"""Axis of the group in which ranks exchange their measurements; communication along it is not recorded."""


class _ThreadState(threading.local):
    # The communication that this thread has skipped; None if it communicates.
    skipped: list[tuple[str, int]] | None = None
    # The call that this thread issues or waits for. The operations that torch issues for the call belong to it.
    call: InFlight | _Unrecorded | None = None


_thread = _ThreadState()


@contextmanager
def skip_communication() -> Iterator[list[tuple[str, int]]]:
    """Skip the communication of this thread inside the block.

    Collectives on tensors return tensors of the right shape with arbitrary values. If a computation can fail on some
    ranks only, it fails here, where no other rank waits for it. Python objects are still exchanged.

    Yields:
        The operations that were skipped so far, with their bytes.
    """
    # The flag belongs to the thread: a compressor's background thread must go on communicating meanwhile. Backward on
    # CUDA would run on the threads of autograd, which do not see the flag, so it must stay on this thread.
    before = _thread.skipped
    _thread.skipped = []
    try:
        with set_multithreading_enabled(False):
            yield _thread.skipped
    finally:
        _thread.skipped = before


def skips_communication() -> bool:
    """Return whether this thread skips its communication: see `skip_communication`."""
    return _thread.skipped is not None


class Pending:
    """A call in flight, as `launch` starts it.

    Args:
        op: Name of the operation in torch's terms (`all_reduce`, `send`, ...).
        group: The group.
        num_bytes: Payload: the full tensor for all_reduce and broadcast, the gathered total for all_gather and
            reduce_scatter, the bytes that this rank sends for all_to_all, the message for send and recv.
        dtype: Element type of the payload.
        result: The result of `wait`, or a function that makes it.
        peer: Global rank at the other end of a message; None for a collective.
        tag: Tag of a message.
        on_device: Whether a device carries the payload. Then its streams wait, instead of the host.
    """

    # Each collective of a step makes an object of this class; slots keep the object cheap.
    __slots__ = (
        "_bytes",
        "_call",
        "_dtype",
        "_flight",
        "_group",
        "_index",
        "_on_device",
        "_op",
        "_peer",
        "_result",
        "_tag",
        "_work",
    )

    def __init__(
        self,
        op: str,
        group: Group,
        num_bytes: int,
        dtype: torch.dtype,
        result: Any,
        peer: int | None = None,
        tag: int | None = None,
        on_device: bool = False,
    ) -> None:
        self._op = op
        self._group = group
        self._on_device = on_device
        self._bytes = num_bytes
        self._dtype = dtype
        self._result = result
        self._peer = peer
        self._tag = tag
        self._work: Any = None
        self._call: Any = None

    def launch(self, call: Callable[[], Any], between_hosts: bool = False) -> Pending:
        """Start the communication.

        Args:
            call: Returns torch's handle, or None if the communication is over in the order of the current stream.
            between_hosts: Whether the payload never passes through a device, even if the group has one.

        Raises:
            RuntimeError: If the communication fails; names the ranks that are gone.
        """
        if _thread.skipped is not None:
            _thread.skipped.append((self._op, self._bytes))
            return self
        if self._group.process_group is None:  # pretended: no other rank would answer
            if self._group.note is not None:
                self._group.note(self._op, self._bytes)
            return self
        # Before the call: a gate that raises keeps this rank out of a collective that other ranks do not enter.
        if self._group.gate is not None:
            self._group.gate(self._op)
        flight = self._flight = _begin(self._op, self._group, self._bytes, self._dtype, self._peer, self._tag)
        # Only two ranks of the group see a message. If they counted it, the ranks would number their collectives
        # differently.
        self._index = 0 if self._peer is not None else Blocked.begin(self._group.name)
        try:
            with flight, _as_call(flight, self._group):
                self._work = call()
        except RuntimeError as error:
            raise_explained(error, self._op, self._group)
        if self._work is None:
            # Without a handle, the current stream orders the collective: there is nothing to wait for.
            flight.finish()
            return self
        # Keeps the tensors of the call alive: torch keeps them only until the first wait, which may be a recorder's.
        self._call = call
        # Handles of messages between hosts are left out: they have no future, and only one wait is possible.
        if self._on_device or (self._peer is None and self._group.backend == "gloo"):
            flight.watch(self._work, self._on_device)
        return self

    def wait(self) -> Any:
        """Wait for the communication and return its result; a second call returns the same result.

        Raises:
            RuntimeError: If the communication fails; names the ranks that are gone.
        """
        # Cleared first: only one wait is possible on some handles of torch, so a second call must not wait again.
        work, self._work = self._work, None
        if work is not None:
            flight = self._flight
            start_ns = time.perf_counter_ns()
            try:
                with flight, _as_call(flight, self._group), _blocked(self._op, self._group, self._index):
                    work.wait()
            except RuntimeError as error:
                # A second call must not return the memory that the communication has not filled.
                self._result = partial(raise_explained, error, self._op, self._group)
                raise_explained(error, self._op, self._group)
            # The tensors of the call are free now, even if the caller keeps this object.
            self._call = None
            flight.note_wait(start_ns, time.perf_counter_ns())
            flight.finish()
        return self._result() if callable(self._result) else self._result


class Done(Pending):
    """The result of a collective in a group of one rank."""

    __slots__ = ()

    def __init__(self, result: Any) -> None:
        self._result = result
        self._work = None


class _Unrecorded:
    """Takes the place of an `InFlight` without an active recorder, so that callers need no condition."""

    op = ""
    bytes: int | None = 0
    dtype: str | None = ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def watch(self, work: Any, on_device: bool) -> None:
        pass

    def note_wait(self, begin: Any, end: Any) -> None:
        pass

    def finish(self) -> None:
        pass


_UNRECORDED = _Unrecorded()


class _as_call:
    """Make `flight` the result of `current_call` in the block, and store the group in the calling helper."""

    # Entered twice for each call of a step: `contextmanager` would take three times as long.
    __slots__ = ("_before", "_flight", "_group", "_helper")

    def __init__(self, flight: InFlight | _Unrecorded, group: Group) -> None:
        self._flight = flight
        self._group = group

    def __enter__(self) -> None:
        self._before = _thread.call
        _thread.call = self._flight
        # An executor that closes can interrupt its thread in this call: it closes the connections of the group.
        helper = self._helper = current_helper()
        if helper is not None:
            helper.process_group = self._group.process_group

    def __exit__(self, *_: object) -> None:
        _thread.call = self._before
        if self._helper is not None:
            self._helper.process_group = None


# Not a function of Python: a recorder asks several times for each message of a step.
current_call: Callable[[], InFlight | _Unrecorded | None] = partial(getattr, _thread, "call")
"""Returns the call of this module that the calling thread issues or waits for; None if there is none.

The call records itself where a recorder wants it. An observer of torch must not record its operations again.
"""


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
        RuntimeError: If the block raises one; names the ranks that are gone.
    """
    flight = _begin(op, group, None, None)
    try:
        with flight, _as_call(flight, group), _blocked(op, group, Blocked.begin(group.name)):
            yield
    except RuntimeError as error:
        raise_explained(error, op, group)
    flight.finish()


def _blocked(op: str, group: Group, index: int) -> Blocked | _Unrecorded:
    # `Blocked.now` is one for the process: a helper's call must not replace the call of the training thread.
    return Blocked(op, group, index) if trains_here() else _UNRECORDED


def raise_explained(error: RuntimeError, op: str, group: Group) -> NoReturn:
    """Raise the failure of a call again, with the ranks that are gone."""
    helper = current_helper()
    if helper is not None and helper.is_interrupted:
        raise error  # this rank has closed the connection: a description would replace the error that it has reported
    raise RuntimeError(describe_failure(f"{op} along {group.axis}", group.ranks, error)) from error


class Traffic:
    """Bytes of the buckets that are on their way between replicas.

    Attributes:
        peak: The largest number of bytes at once, so far.
    """

    def __init__(self) -> None:
        self._now = 0
        self.peak = 0

    def add(self, num_bytes: int) -> None:
        """Count a bucket that is on its way."""
        self._now += num_bytes
        self.peak = max(self.peak, self._now)

    def remove(self, num_bytes: int) -> None:
        """Remove a bucket that has arrived."""
        self._now -= num_bytes

    def clear(self) -> None:
        """Remove all buckets."""
        self._now = 0
