"""Executors: they run the communication of gradients while the host or the device goes on with backward.

    InlineExecutor    in the calling thread, at once
    ThreadExecutor    on a second thread, which on CUDA has a second stream
    StreamExecutor    in the calling thread, on a second CUDA stream

All run calls in the order of submission, so ranks that submit the same calls in the same order issue their
collectives in the same order. Calls that overlap with other communication need a group without other messages.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Queue
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightning_parallel import tracing
from lightning_parallel.comm.threads import Helper, end_helpers
from lightning_parallel.compat.torch import pytree

__all__ = ["Executor", "InlineExecutor", "StreamExecutor", "ThreadExecutor", "overlapping_executor"]

T = TypeVar("T")


class Executor(Protocol):
    """Runs calls one after another, in the order in which they were submitted.

    Attributes:
        overlaps_host: True if calls run while the host goes on, so that a call may block.
    """

    overlaps_host: bool

    def submit(self, call: Callable[[], T]) -> Callable[[], T]:
        """Run `call` after all earlier calls; it sees the results of the current stream so far.

        Returns:
            A function that waits for this call alone and returns its result, or raises its error. Executors that run
            the call at once raise its error here.
        """

    def wait(self) -> None:
        """Wait for all submitted calls, and raise the first error of a call since the last `wait`."""

    def close(self) -> None:
        """Finish the submitted calls and accept no more."""


class InlineExecutor:
    """Runs each call at once, in the calling thread."""

    overlaps_host = False

    def submit(self, call: Callable[[], T]) -> Callable[[], T]:
        """Run `call` now."""
        value = call()
        return lambda: value

    def wait(self) -> None:
        """Do nothing: every call has returned."""

    def close(self) -> None:
        """Do nothing."""


class ThreadExecutor:
    """Runs calls on a second thread, on CUDA also on a second stream.

    A compression method waits for one collective before it issues the next. A callback of gloo must not wait: it would
    block the threads that bring the answer, and two buckets would wait for each other. This thread may wait. As the
    only thread, it issues the collectives in one order on all ranks.

    Args:
        device: Device of the tensors that the calls work on.
    """

    overlaps_host = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._error: BaseException | None = None
        self._calls: Queue[Callable[[], None] | None] = Queue()
        # The None stands behind the queued calls, so the thread runs them before it ends.
        self._helpers = [Helper("communication", self._work, lambda: self._calls.put(None))]
        self._stops: list[Callable[[], None]] = []
        self._helpers[0].start()

    def submit(self, call: Callable[[], T]) -> Callable[[], T]:
        """Run `call` on the thread; the caller's stream waits for the call when the caller takes its result."""
        future: Future[tuple[T, torch.cuda.Event | None]] = Future()
        stream = self._stream
        # The event orders the call after the kernels that the caller has enqueued: they may not have run yet.
        ready = None if stream is None else torch.cuda.current_stream(stream.device).record_event()
        self._calls.put(partial(self._run, _noted(call), future, ready))

        def result() -> T:
            with tracing.waiting("result"):
                value, done = future.result()
            return value if done is None else _taken_over(value, done, self._stream)

        return result

    def start_beside(self, name: str, work: Callable[[], None], stop: Callable[[], None]) -> None:
        """Start another thread that waits for messages on behalf of this thread, and stop it after this thread."""
        self._stops.append(stop)
        # `end_helpers` stops all threads at once, but queued calls still need this thread: `_work` stops it at its end.
        self._helpers.append(Helper(name, work, stop=lambda: None))
        self._helpers[-1].start()

    def wake(self, call: Callable[[], object]) -> None:
        """Run `call` on the thread, from any thread; only `wait` tells when the call is over, and raises its error."""
        # Nothing reads the future. No event is needed, because only buckets on the CPU wake the thread.
        self._calls.put(partial(self._run, call, Future(), None))

    def wait(self) -> None:
        """Wait for the calls, and let the current stream wait for their kernels."""
        # `join` returns after the last `task_done`, so also after calls that `wake` has added meanwhile.
        with tracing.waiting("results"):
            self._calls.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def close(self) -> None:
        """End the thread after all calls; a call that still waits after `PATIENCE_S` fails."""
        end_helpers(self._helpers)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                # `_run` catches every error of a call; `wait` must return in any case.
                call()
            finally:
                self._calls.task_done()
        self._calls.task_done()  # of the None, so that `wait` also returns after the end
        # Only now: calls of this thread may have waited for messages on the other threads.
        for stop in self._stops:
            stop()

    def _run(
        self,
        call: Callable[[], T],
        future: Future[tuple[T, torch.cuda.Event | None]],
        ready: torch.cuda.Event | None,
    ) -> None:
        try:
            if self._stream is None or ready is None:
                future.set_result((call(), None))
                return
            # The current stream belongs to a thread: without the block, kernels would go to the default stream.
            self._stream.wait_event(ready)
            with torch.cuda.stream(self._stream):
                value = call()
            # An event per call: the caller's stream waits for this call, not for later calls.
            future.set_result((value, self._stream.record_event()))
        except BaseException as error:
            # A caller may never ask for the result, as in a hook of DDP. `wait` then raises the error.
            self._error = self._error or error
            future.set_exception(error)


class StreamExecutor:
    """Runs each call at once on a CUDA stream that waits for the stream of the caller.

    The collectives of NCCL do not block the host, so a second stream is enough for them to overlap with backward.
    """

    overlaps_host = False

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, call: Callable[[], T]) -> Callable[[], T]:
        """Enqueue the kernels of `call` now; the caller's stream waits for them when the caller takes the result."""
        # Kernels that the caller enqueues later do not delay the call, which is the point of a second stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        call = _noted(call)
        with torch.cuda.stream(self._stream):
            value = call()
        done = self._stream.record_event()
        return lambda: _taken_over(value, done, self._stream)

    def wait(self) -> None:
        """Let the current stream wait for the kernels of all calls."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def close(self) -> None:
        """Let the current stream wait for the kernels of all calls."""
        self.wait()


def _noted(call: Callable[[], T]) -> Callable[[], T]:
    """Wrap `call`, which leaves the thread or the stream, so that the active recorder learns when it is done."""
    recorder = tracing.active()
    note_done = None if recorder is None else recorder.submitted()
    if note_done is None:
        return call

    def noted() -> T:
        try:
            return call()
        finally:
            note_done()

    return noted


def _taken_over(value: T, done: torch.cuda.Event, stream: torch.cuda.Stream | None) -> T:
    """Return the value that a call computed on `stream` until `done`, for use on the current stream."""
    assert stream is not None
    current = torch.cuda.current_stream(stream.device)
    current.wait_event(done)
    for tensor in pytree.tree_leaves(value):
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            # The allocator would give the memory back to the other stream as soon as Python drops the tensor, while
            # kernels of the current stream may still read it.
            tensor.record_stream(current)
    return value


def overlapping_executor(device: torch.device) -> Executor:
    """Return a new executor that runs the reduction of gradients on `device` while backward goes on."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor(device)
