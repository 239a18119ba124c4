"""NCCL's rules on gloo, to find on a machine without GPUs what would hang on one with them.

NCCL carries the operations of a group one after the other: a receive holds up all later operations until its message
has come, and a send until it has been received. The host goes on meanwhile. gloo starts everything at once, so that an
order that hangs on GPUs passes. With `LIGHTNING_PARALLEL_STRICT_P2P=1` in the environment, a thread per group does as
NCCL does. Messages between hosts, which do not travel through NCCL, are left out.

With that variable, importing this module lays the rules around the calls of `comm`, in this process and in its forks.
`tests/conftest.py` and `tests/preload.py` import it, for pytest, the ranks of `harness`, and the scripts that it runs.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_parallel.comm import Group, Helper, Pending, objects
from lightning_parallel.compat import Patches

__all__ = ["is_strict", "strict_order"]

_IN_ENVIRONMENT = os.environ.get("LIGHTNING_PARALLEL_STRICT_P2P", "") not in ("", "0")

_is_strict = False
_launch, _blocking_call = Pending.launch, objects.blocking_call
_rules = Patches()


def is_strict() -> bool:
    """Tell whether operations of a group wait for each other."""
    return _is_strict


@contextmanager
def strict_order(is_on: bool = True) -> Iterator[None]:
    """Turn NCCL's rules on inside the block, on all ranks alike; `LIGHTNING_PARALLEL_STRICT_P2P` does so for a run."""
    before = _is_strict
    _set(is_on)
    try:
        yield
    finally:
        _set(before)


def _set(is_on: bool) -> None:
    global _is_strict
    if is_on and not _is_strict:
        _rules.replace(Pending, "launch", _launch_in_order)
        _rules.replace(objects, "blocking_call", _blocking_call_in_order)
        _rules.replace(Group, "is_ordered", property(lambda group: True))
    elif _is_strict and not is_on:
        # Operations that are still in a queue go first: without the rules, later ones would overtake them.
        for waiting in _queues.values():
            waiting.drain()
        # The functions are taken away, as the watch over the user's hooks would take them for the user's.
        _rules.undo()
    _is_strict = is_on


def _launch_in_order(self: Pending, call: Callable[[], Any], between_hosts: bool = False) -> Pending:
    # Messages between hosts are told apart by their tags, collectives by their order.
    if not (between_hosts and self._peer is not None):
        call = partial(_in_order, self._group.process_group, call)
    return _launch(self, call, between_hosts)


@contextmanager
def _blocking_call_in_order(op: str, group: Group) -> Iterator[None]:
    with _blocking_call(op, group):
        # gloo pairs collectives of hosts, too, by the order of their start.
        if group.process_group in _queues:
            done = _OrderedWork(lambda: None)
            _queues[group.process_group].put(done)
            done.wait()
        yield


class _OrderedWork:
    """An operation in the queue of its group.

    Args:
        call: Starts it, and returns torch's handle.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self, broken: BaseException | None) -> BaseException | None:
        """Carry it out, unless the group is broken; returns why the group is broken now."""
        self._error = broken
        if broken is None:
            try:
                work = self._call()
                # gloo completes a send when the receiver has asked for it, as NCCL does.
                if work is not None:
                    work.wait()
            except BaseException as error:
                self._error = error
        self._done.set()
        return self._error

    def is_over(self, patience_s: float) -> bool:
        """Wait until it is over, at most so long; tell whether it is."""
        return self._done.wait(patience_s)

    def wait(self) -> None:
        """Wait until it is over.

        Raises:
            RuntimeError: If it fails, or one before it has: not later than after the timeout of the group.
        """
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


class _GroupQueue:
    """The operations of a group on this rank, first in, first out."""

    def __init__(self, process_group: Any) -> None:
        self._waiting: queue.SimpleQueue[_OrderedWork | None] = queue.SimpleQueue()
        stop = partial(self._waiting.put, None)
        self._helper = Helper(f"order-{process_group.group_name}", self._run, stop)
        self._helper.process_group = process_group
        self._helper.start()

    def put(self, work: _OrderedWork) -> None:
        self._waiting.put(work)

    def drain(self) -> None:
        """Wait until the operations that are in the queue have ended or failed."""
        last = _OrderedWork(lambda: None)
        self.put(last)
        # The thread of a destroyed group has ended. An operation that fails tells its caller.
        while self._helper.is_alive() and not last.is_over(0.1):
            pass

    def _run(self) -> None:
        broken: BaseException | None = None
        while (work := self._waiting.get()) is not None:
            broken = work.run(broken)


# By the process group itself: names are used again after `destroy_process_group`.
_queues: dict[Any, _GroupQueue] = {}


def _in_order(process_group: Any, call: Callable[[], Any]) -> _OrderedWork:
    """Put an operation behind those that were issued to the group before; `call` starts it."""
    if process_group not in _queues:
        _queues[process_group] = _GroupQueue(process_group)
    work = _OrderedWork(call)
    _queues[process_group].put(work)
    return work


_set(_IN_ENVIRONMENT)
