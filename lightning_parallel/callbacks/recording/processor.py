"""Processors: how many a rank may use, who shares them, and how long its training thread waited for one."""

from __future__ import annotations

import os
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

try:
    import resource
except ImportError:  # on Windows, which does not tell what is read from it
    resource = None  # type: ignore[assignment]

from lightning_parallel.callbacks.recording.clocks import clock_id

__all__ = ["Cores", "ProcessorUse", "ProcessorTimes", "cores_of_process", "processor_times", "queue_file"]

MOST_STEPS = 8
"""Steps between two questions to the system."""


class Cores(NamedTuple):
    """The processors that a process may use.

    Attributes:
        place: Tells these processors from others, such as those of another host.
        number: How many; a share of one, where a quota says so.
        threads: How many of them one operation of torch uses at most.
    """

    place: str
    number: float
    threads: int


def cores_of_process() -> Cores:
    """Return the processors of this process, by its affinity and by the quota of its container."""
    if hasattr(os, "sched_getaffinity"):
        numbers = sorted(os.sched_getaffinity(0))
    else:
        numbers = list(range(os.cpu_count() or 1))
    number = min(float(len(numbers)), _quota())
    return Cores(f"{clock_id()} {numbers}", number, torch.get_num_threads())


def _quota() -> float:
    """Return the processors that the container may use at once; infinity where it has no limit."""
    with suppress(OSError, ValueError):
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(most) / int(period)  # "max" is no number
    return float("inf")


class ProcessorTimes(NamedTuple):
    """Totals of the calling thread: nanoseconds on a processor, and waiting for one; times it was interrupted.

    `waiting_ns` is None where the system does not tell.
    """

    running_ns: int
    waiting_ns: int | None
    interrupted: int


def queue_file() -> BinaryIO | None:
    """Open what the system tells of the calling thread's waits for a processor; None elsewhere than on Linux."""
    with suppress(OSError):
        return open("/proc/thread-self/schedstat", "rb", buffering=0)
    return None


def processor_times(queue: BinaryIO | None) -> ProcessorTimes:
    """Read the totals of the calling thread, whose `queue_file` is `queue`; takes three microseconds."""
    interrupted = 0
    if hasattr(resource, "RUSAGE_THREAD"):
        interrupted = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    waiting = None
    if queue is not None:
        with suppress(OSError, ValueError, IndexError):
            # Nanoseconds on a processor, nanoseconds in a queue for one: ready to run, while others did. To open the
            # file anew would take five times as long.
            waiting = int(os.pread(queue.fileno(), 64, 0).split()[1])
    return ProcessorTimes(time.thread_time_ns(), waiting, interrupted)


class ProcessorUse:
    """Adds up what the training thread got of a processor in its steps; `end_step` is called by that thread.

    Runs of 1, 2, 4 and then always 8 steps are measured: to ask the system takes longer than all else that is done for
    a step. Those with a validation or a checkpoint are left out, whose times would count as theirs.

    Args:
        cores: The processors of this rank.
        shared_by: How many ranks use them.
    """

    def __init__(self, cores: Cores, shared_by: int) -> None:
        self._facts = {"cores": cores.number, "cores_shared_by": shared_by}
        self._queue: BinaryIO | None = None
        self._last: ProcessorTimes | None = None
        self._steps = self._running_ns = self._interrupted = 0
        self._waiting_ns: int | None = 0
        self._num_apart = self._ended = 0
        self._length = 1

    def end_step(self, num_apart: int) -> None:
        """End a step.

        Args:
            num_apart: Validations and checkpoints so far, see `Recorder.num_apart`.
        """
        if self._last is None:
            self._queue = queue_file()
            if self._queue is not None:
                weakref.finalize(self, self._queue.close)
        self._ended += 1
        is_apart = self._last is None or num_apart != self._num_apart
        if not is_apart and self._ended < self._length:
            return
        now = processor_times(self._queue)
        last, self._last = self._last, now
        steps, self._ended = self._ended, 0
        if last is None or is_apart:
            self._num_apart = num_apart
            self._length = 1
            return
        self._length = min(2 * self._length, MOST_STEPS)
        self._steps += steps
        self._running_ns += now.running_ns - last.running_ns
        self._interrupted += now.interrupted - last.interrupted
        if self._waiting_ns is None or now.waiting_ns is None or last.waiting_ns is None:
            self._waiting_ns = None
        else:
            self._waiting_ns += now.waiting_ns - last.waiting_ns

    def row(self) -> dict[str, Any]:
        """Return keys of a rank: seconds, and interruptions, per step; keys that are not known are left out."""
        row: dict[str, Any] = dict(self._facts)
        if self._steps:
            row["processor"] = self._running_ns / self._steps / 1e9
            row["interruptions"] = self._interrupted / self._steps
            if self._waiting_ns is not None:
                row["processor_wait"] = self._waiting_ns / self._steps / 1e9
        return row
