"""Threads beside the one that trains, all of which end before the interpreter does.

While the interpreter ends, a thread that asks for Python's lock is ended on the spot (before Python 3.14). torch asks
in destructors, which may not be left so: C++ aborts the process, and a run that has succeeded ends with SIGABRT. It is
enough that a thread drops its last reference to a process group, or that a message comes for which it waits.

    h = Helper("messages", work, stop)      h.start()
    end_helpers([h])                        stops it; what it still waits for then, is interrupted

At exit all that are left are ended so: those of an abandoned trainer, or of a training loop that closes nothing.
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
    """A thread beside the one that trains.

    Args:
        name: What it does.
        work: What it runs.
        stop: Lets `work` return when it has done what it was given; called from another thread, perhaps twice.

    Attributes:
        process_group: Whose other ranks it is waiting for, if it is.
        is_interrupted: Whether the connections of that group were closed, so that it need not wait any longer.
    """

    def __init__(self, name: str, work: Callable[[], None], stop: Callable[[], None]) -> None:
        # A daemon, as the interpreter waits for other threads before it calls what could stop them.
        super().__init__(name=f"lightning_parallel-{name}", target=work, daemon=True)
        self.stop = stop
        self.process_group: dist.ProcessGroup | None = None
        self.is_interrupted = False
        # What is registered last is called first: before anybody destroys the groups that threads work with.
        atexit.unregister(_end_all)
        atexit.register(_end_all)

    def run(self) -> None:
        """Run the work."""
        _state.helper = self
        super().run()

    def interrupt(self) -> None:
        """Let what it waits for fail, here and on the ranks that would wait for this one."""
        if self.process_group is not None:
            self.is_interrupted = True
            close_connections(self.process_group)


class _State(threading.local):
    helper: Helper | None = None


_state = _State()


def current_helper() -> Helper | None:
    """Return the helper that calls, None in other threads."""
    return _state.helper


def waiting_helpers() -> list[Helper]:
    """Return the threads that may be waiting for other ranks."""
    return [one for one in threading.enumerate() if isinstance(one, Helper) and one.process_group is not None]


def end_helpers(helpers: Sequence[Helper]) -> None:
    """End threads: they do what they were given, and then what they still wait for is interrupted."""
    for helper in helpers:
        helper.stop()
    if _end_in_time(helpers):
        return
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for helper in helpers:
            if helper.is_alive():
                helper.interrupt()
        # Again and again: one that goes on may come to the next message.
        if _end_in_time(helpers, 0.05):
            return


def _end_in_time(helpers: Sequence[Helper], seconds: float = PATIENCE_S) -> bool:
    until = time.monotonic() + seconds
    for helper in helpers:
        # One that was not started cannot be waited for.
        if helper.is_alive():
            helper.join(max(0.0, until - time.monotonic()))
    return not any(helper.is_alive() for helper in helpers)


def _end_all() -> None:
    end_helpers([thread for thread in threading.enumerate() if isinstance(thread, Helper)])
