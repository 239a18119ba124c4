"""Where gradients are compressed while backward goes on: a thread for tensors on CPU, a stream on CUDA.

On gloo a method must wait for one collective before it issues the next. The threads of gloo itself may not do that:
with two buckets they would wait for each other. One thread of our own may, and it gives the collectives one order on
all ranks. Those of NCCL do not hold up the host, so there a stream beside that of backward suffices.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["Lane", "StreamLane", "ThreadLane", "lane_for"]

Job = Callable[[], None]


class Lane(Protocol):
    """Runs jobs one after another, in the order in which they were submitted."""

    beside_host: bool  # whether jobs run while the host goes on, so that they may wait

    def submit(self, job: Job) -> None:
        """Run `job` soon."""

    def wait(self) -> None:
        """Return when every job has been run; raise the first error of one."""

    def close(self) -> None:
        """Take no more jobs."""


class ThreadLane:
    """A thread of its own."""

    beside_host = True

    def __init__(self) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="lightning_parallel-compression", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def wait(self) -> None:
        self._jobs.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=5)

    @torch.no_grad()
    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._jobs.task_done()


class StreamLane:
    """A stream that waits for the stream of whoever submits a job."""

    beside_host = False

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @torch.no_grad()
    def submit(self, job: Job) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            job()

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def close(self) -> None:
        self.wait()


def lane_for(device: torch.device) -> Lane:
    """A new lane for gradients on `device`."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane()
