"""Writes a checkpoint, and is killed when it calls a function for the N-th time: OWNER NAME N PATH [two-renames]."""

import os
import signal
import sys

from lightning_parallel.checkpoint import place, writer
from lightning_parallel.compat import patched
from tests.checkpoint.test_sharded_files import write

owner, name, calls, path = sys.argv[1:5]
owner = {"os": os, "writer": writer}[owner]
left = int(calls)


def killed(*args, **kwargs):
    """Call the function, or die."""
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)


if "two-renames" in sys.argv:
    place._exchange = lambda one, other: False
with patched(owner, name, killed) as real:
    write(path, 2.0, step=2)
