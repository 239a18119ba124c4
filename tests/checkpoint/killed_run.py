"""Runs a save in the background, kills the run, and tells whether its writing process ends: PATH."""

import os
import signal
import sys
import time

from lightning_parallel.checkpoint import ShardedWriter
from lightning_parallel.comm import Group
from tests.checkpoint.test_staging import save


def run(told, path):
    """Save, start a child as a `DataLoader` does, which holds all pipes of this process, and die."""
    saving = ShardedWriter(Group.alone("world"), {}, in_background=True)
    save(saving, path, 1.0)
    saving.wait()
    child = os.fork()
    if child == 0:
        time.sleep(120)
        os._exit(0)
    os.write(told, f"{saving._staging._process._process.pid} {child}".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def is_alive(pid):
    """Whether a process runs; nobody may be there to collect its status."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


hears, told = os.pipe()
killed = os.fork()
if killed == 0:
    run(told, sys.argv[1])
os.waitpid(killed, 0)
process, child = map(int, os.read(hears, 100).split())
until = time.monotonic() + 30
while is_alive(process) and time.monotonic() < until:
    time.sleep(0.05)
print("ended" if is_alive(child) and not is_alive(process) else "lives")
os.kill(child, signal.SIGKILL)
