"""Threads beside the training thread, all of which end before the interpreter does.

While the interpreter ends, it ends any thread that asks for Python's lock on the spot (before Python 3.14). torch asks
for the lock in destructors. C++ aborts the process when a thread ends inside a destructor, so a run that has succeeded
ends with SIGABRT. A thread needs only to drop its last reference to a process group, or to receive a message.

    h = Helper("messages", work, stop)      h.start()
    end_helpers([h])                        stops the thread, and interrupts it if it still waits for a message

At exit the module ends all threads that are left, such as the threads of an abandoned trainer.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from lightning_parallel.compat.default_group import close_connections

__all__ = ["Helper", "current_helper", "end_helpers", "waiting_helpers"]

PATIENCE_S = 5.0
"""How long a thread may take to end by itself: as long as the slowest rank computes between two messages."""


class Helper(threading.Thread):
    """A thread beside the training thread.

    Args:
        name: The task of the thread.
        work: The function that the thread runs.
        stop: Lets `work` return after its queued calls. Another thread calls it, perhaps twice.

    Attributes:
        process_group: The group in which the thread waits for other ranks; None while it waits for none.
        is_interrupted: Whether `interrupt` has closed the connections of that group.
    """

    def __init__(self, name: str, work: Callable[[], None], stop: Callable[[], None]) -> None:
        # A daemon: the interpreter joins all other threads before it calls `_end_all`, which would stop them.
        super().__init__(name=f"lightning_parallel-{name}", target=work, daemon=True)
        self.stop = stop
        self.process_group: dist.ProcessGroup | None = None
        self.is_interrupted = False
        # Exit functions run in reverse order. Registered last, `_end_all` runs before any function destroys the groups.
        atexit.unregister(_end_all)
        atexit.register(_end_all)

    def run(self) -> None:
        """Run the work."""
        _state.helper = self
        super().run()

    def interrupt(self) -> None:
        """Close the connections of the group, so that its calls fail here and on the ranks that wait for this rank."""
        if self.process_group is not None:
            self.is_interrupted = True
            close_connections(self.process_group)


class _State(threading.local):
    # One value per thread: only a helper sees itself here.
    helper: Helper | None = None


_state = _State()


def current_helper() -> Helper | None:
    """Return the helper of the calling thread; None in other threads."""
    return _state.helper


def waiting_helpers() -> list[Helper]:
    """Return the threads that may be waiting for other ranks."""
    return [one for one in threading.enumerate() if isinstance(one, Helper) and one.process_group is not None]


def end_helpers(helpers: Sequence[Helper]) -> None:
    """End threads after their queued calls; interrupt the threads that still wait after `PATIENCE_S`."""
    # All are told first, so that they end beside each other within one wait.
    for helper in helpers:
        helper.stop()
    if _end_in_time(helpers):
        return
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for helper in helpers:
            if helper.is_alive():
                helper.interrupt()
        # Again and again: an interrupted thread may go on and wait for its next message.
        if _end_in_time(helpers, 0.05):
            return


def _end_in_time(helpers: Sequence[Helper], seconds: float = PATIENCE_S) -> bool:
    until = time.monotonic() + seconds
    for helper in helpers:
        # `join` raises for a thread that was never started.
        if helper.is_alive():
            helper.join(max(0.0, until - time.monotonic()))
    return not any(helper.is_alive() for helper in helpers)


def _end_all() -> None:
    end_helpers([thread for thread in threading.enumerate() if isinstance(thread, Helper)])
