"""A thread for communication in which one message depends on the answer to another.

Waiting inside a callback of gloo blocks the threads that would bring the answer. A worker waits on a thread of its own:
it runs what it is given in the order in which it was given, so ranks that submit alike communicate alike. What it runs
must use groups that nobody else uses meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """Runs calls one after the other beside the thread that submits them; on CUDA, on a stream of its own.

    Args:
        device: Of the tensors that the calls work on.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lightning_parallel-communication", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Callable[[], T]:
        """Run `call` after all that was submitted before; it sees what the current stream has done so far.

        Returns:
            A function that waits for the call and gives what it returned, or raises what it raised.
        """
        future: Future[T] = Future()
        stream = self._stream
        ready = None if stream is None else torch.cuda.current_stream(stream.device).record_event()
        self._jobs.put(partial(self._run, call, future, ready))

        def result() -> T:
            value = future.result()
            if stream is not None:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            return value

        return result

    def close(self) -> None:
        """End the thread when it has run what was submitted."""
        self._jobs.put(None)
        self._thread.join(timeout=5)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _run(self, call: Callable[[], T], future: Future[T], ready: torch.cuda.Event | None) -> None:
        try:
            if self._stream is None:
                future.set_result(call())
                return
            assert ready is not None
            self._stream.wait_event(ready)
            with torch.cuda.stream(self._stream):
                future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
