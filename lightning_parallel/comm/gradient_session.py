"""One path for gradients: a session that is fed during backward, and the executor that its communication runs on.

session = GradientSession(reducer, executor)
session.add({name: gradient})        # from our own hooks, DDP, FSDP or DeepSpeed, as gradients become ready
session.finish()                     # whether the step counts: False if a gradient was not finite on some rank

Executors run communication while the host or the device goes on with backward:

    InlineExecutor    in the calling thread, at once
    ThreadExecutor    on a second thread, which on CUDA has a second stream
    StreamExecutor    in the calling thread, on a second CUDA stream

All run calls in the order of submission, so ranks that submit the same calls in the same order issue their
collectives in the same order. Calls that overlap with other communication need a group that nobody else uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import Queue
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_parallel import tracing
from lightning_parallel.comm.collectives import all_reduce_
from lightning_parallel.comm.groups import Group
from lightning_parallel.compat.torch import pytree

__all__ = [
    "Executor",
    "GradientSession",
    "InlineExecutor",
    "MeanReducer",
    "MeanStep",
    "StreamExecutor",
    "ThreadExecutor",
    "fill_buckets",
    "overlapping_executor",
]


T = TypeVar("T")


class Executor(Protocol):
    """Runs calls one after another, in the order in which they were submitted.

    Attributes:
        overlaps_host: True if calls run while the host goes on, so that they may block.
    """

    overlaps_host: bool

    def submit(self, call: Callable[[], T]) -> Callable[[], T]:
        """Run `call` after everything submitted before; it sees what the current stream has done so far.

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

    A compression method waits for one collective before it issues the next. Waiting inside a callback of gloo would
    block the very threads that have to bring the answer: with two buckets they wait for each other. This thread may
    wait, and being one it gives the collectives one order on all ranks.

    Args:
        device: Device of the tensors that the calls work on.
    """

    overlaps_host = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._error: BaseException | None = None
        self._calls: Queue[Callable[[], None] | None] = Queue()
        # A daemon, so that a collective which never returns does not keep the process alive at its end.
        self._thread = threading.Thread(target=self._work, name="lightning_parallel-communication", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Callable[[], T]:
        """Run `call` on the thread; the stream of the caller waits for it when its result is taken."""
        future: Future[tuple[T, torch.cuda.Event | None]] = Future()
        stream = self._stream
        # The event orders the call after what the caller has enqueued: its kernels may not have run yet.
        ready = None if stream is None else torch.cuda.current_stream(stream.device).record_event()
        self._calls.put(partial(self._run, _noted(call), future, ready))

        def result() -> T:
            with tracing.waiting("result"):
                value, done = future.result()
            return value if done is None else _taken_over(value, done, self._stream)

        return result

    def wait(self) -> None:
        """Wait for the calls, and let the current stream wait for their kernels."""
        with tracing.waiting("results"):
            self._calls.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def close(self) -> None:
        """End the thread when it has run what was submitted; after 5 s it is left alone."""
        self._calls.put(None)
        self._thread.join(timeout=5)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                # `_run` catches every error of a call; `wait` must return in any case.
                call()
            finally:
                self._calls.task_done()

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
            self._stream.wait_event(ready)
            with torch.cuda.stream(self._stream):
                value = call()
            # Of this call: who takes its result must not wait for the calls after it.
            future.set_result((value, self._stream.record_event()))
        except BaseException as error:
            # Nobody may ask for the result, as in a hook of DDP: `wait` then raises the error.
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
        """Enqueue the kernels of `call` now; the stream of the caller waits for them when the result is taken."""
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
    """Let `call`, which leaves the thread or the stream, tell the recorder when it is done, if that wants to know."""
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
    """Return what a call has computed on `stream` until `done`, for use on the current stream."""
    assert stream is not None
    current = torch.cuda.current_stream(stream.device)
    current.wait_event(done)
    for tensor in pytree.tree_leaves(value):
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            # Its memory belongs to the other stream, which may use it again as soon as the tensor is gone.
            tensor.record_stream(current)
    return value


def overlapping_executor(device: torch.device) -> Executor:
    """Return a new executor that runs the reduction of gradients on `device` while backward goes on."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor(device)


FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early in backward


class MeanStep(Protocol):
    """One optimizer step of a `MeanReducer`; it ends in `commit` or in `rollback`."""

    @property
    def verdict(self) -> Tensor:
        """Whether every gradient so far was finite on every rank of the group, as far as this rank can tell.

        On the device of the gradients: the host does not wait for it.
        """

    def reduce_(self, named_gradients: Mapping[str, Tensor], shards: Mapping[str, int] | None = None) -> None:
        """Replace some of the gradients by their (approximate) mean, in place."""

    def watch(self, received: Tensor) -> None:
        """Check at the end of the step that `received`, which is equal on all ranks, is finite."""

    def commit(self, finite: bool | None = None) -> bool:
        """Keep the state of this step for the next ones, if its gradients were finite; return whether they were.

        Args:
            finite: The verdict, where it is known.
        """

    def rollback(self) -> None:
        """Restore the state before this step."""


class MeanReducer(Protocol):
    """Replaces gradients by their mean over a group, such as a compressor.

    Attributes:
        scale: The loss scale: the number that the gradients are multiplied by.
        expects_rollback: Whether steps are dropped as a matter of routine; it may do without a second copy of what it
            remembers where they are not.
    """

    scale: float
    expects_rollback: bool

    def begin(self, group: Any) -> MeanStep:
        """Start a step over `group`."""

    def leave_device(self) -> None:
        """Keep what it remembers on the CPU until the next step."""


class GradientSession:
    """The steps of a reducer whose gradients arrive in buckets.

    A parameter that comes a second time before `finish` (another backward pass, a module used twice under FSDP) begins
    the next step.

    Args:
        reducer: Computes the means.
        group: The ranks to take the mean over.
        executor: Runs the reduction; `InlineExecutor` when omitted. If it overlaps with other communication of the same
            ranks, `group` must be an extra one.
        loss_scale: Returns the loss scale when a step begins; if omitted, whoever owns the reducer sets its `scale`.
        verdict_group: Ranks that must all agree that a step was finite: those with other parts of the model, or other
            shards of the means. None if all ranks of `group` see the same numbers and there is nobody else.
        device: Device of the verdict's tensor before any gradient was added.

    Attributes:
        applied: False if the last step was dropped because a gradient was not finite.
    """

    def __init__(
        self,
        reducer: MeanReducer,
        group: Group,
        executor: Executor | None = None,
        *,
        loss_scale: Callable[[], float] | None = None,
        verdict_group: Group | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.reducer = reducer
        self.group = group
        self.executor: Executor = InlineExecutor() if executor is None else executor
        self.applied = True
        self._loss_scale = loss_scale
        self._verdict_group = verdict_group
        self._device = torch.device("cpu") if device is None else device
        self._step: MeanStep | None = None
        self._added: set[str] = set()
        self._earlier_applied = True

    def add(
        self, named_gradients: Mapping[str, Tensor], shards: Mapping[str, int] | None = None, copy: bool = False
    ) -> Callable[[], Mapping[str, Tensor]]:
        """Reduce one bucket on the executor; all ranks must add the same buckets in the same order.

        Args:
            named_gradients: Gradients by parameter name, overwritten with the mean.
            shards: Elements of each rank's part of a flattened gradient, where a rank needs no more than its part.
            copy: Leave the gradients as they are and reduce copies, made on the executor.

        Returns:
            A function that waits for the means and returns them by name.
        """
        return self.executor.submit(partial(self.reduce, named_gradients, shards, copy))

    def wait(self) -> None:
        """Wait until all buckets are reduced.

        Raises:
            Exception: The first error of the executor; the step is then dropped.
        """
        try:
            # Buckets of a failed step are missing: the others must not be committed.
            self.executor.wait()
        except BaseException:
            self.discard()
            raise

    def finish(self) -> bool:
        """Wait for the buckets and end the step.

        Returns:
            True if this step, and all steps since the last call, were applied. False if a gradient was not finite on
            some rank: the same on all ranks.

        Raises:
            Exception: The first error of the executor.
        """
        self.wait()
        # A step that ended since the last call, by a parameter that came again, has told nobody its verdict yet.
        self.applied = self.end_step() and self._earlier_applied
        self._earlier_applied = True
        return self.applied

    def close(self) -> None:
        """Close the executor."""
        self.executor.close()

    # ----------------------------------------------------------------- on the executor, or while it has nothing to do

    @property
    def step(self) -> MeanStep:
        """The open step; a new one begins when there is none."""
        if self._step is None:
            # The scale may change between steps, but residuals are kept without it: it is read once, at the beginning.
            if self._loss_scale is not None:
                self.reducer.scale = self._loss_scale()
            self._step = self.reducer.begin(self.group)
        return self._step

    @torch.no_grad()
    def reduce(
        self, named_gradients: Mapping[str, Tensor], shards: Mapping[str, int] | None = None, copy: bool = False
    ) -> Mapping[str, Tensor]:
        """Reduce one bucket now and return its means; an error drops the step."""
        # Nobody announces a backward pass: a parameter that comes again can only belong to the next one.
        if not self._added.isdisjoint(named_gradients):
            self._earlier_applied &= self.end_step()
        self._added.update(named_gradients)
        # Copied here and not in `add`: on CUDA the copy then runs on the executor's stream, after the caller's kernels.
        if copy:
            for gradient in named_gradients.values():
                if gradient.is_cuda:
                    # The caller may let go of it before this stream has read it.
                    gradient.record_stream(torch.cuda.current_stream(gradient.device))
            named_gradients = {name: gradient.detach().clone() for name, gradient in named_gradients.items()}
        # NCCL communicates tensors of its device only: the verdict is taken where the gradients are.
        for gradient in named_gradients.values():
            self._device = gradient.device
            break
        try:
            self.step.reduce_(named_gradients, shards)
        except BaseException:
            self.discard()
            raise
        return named_gradients

    @torch.no_grad()
    def end_step(self) -> bool:
        """Commit or roll back the open step; return whether the last step was applied."""
        step = self._step
        # Closed first: an error in the verdict must not leave the step open for the next gradients.
        self._step = None
        self._added.clear()
        if step is None:
            return self.applied
        # Agreed on before the commit: a rank of another part of the model may have found what is not seen here. The
        # host reads the verdict of all ranks only, for which it has to wait once.
        finite = None
        if self._verdict_group is not None:
            verdict = step.verdict.to(self._device, torch.uint8)
            finite = bool(all_reduce_(verdict, self._verdict_group, "min"))
        self.applied = step.commit(finite)
        return self.applied

    def discard(self) -> None:
        """Roll back the open step, if any."""
        step = self._step
        self._step = None
        self._added.clear()
        if step is not None:
            step.rollback()


def _one_kind(name: str) -> Hashable:
    return None


def fill_buckets(
    sizes: Mapping[str, int], bucket_bytes: int, kind: Callable[[str], Hashable] = _one_kind
) -> list[list[str]]:
    """Divide parameters into buckets of about `bucket_bytes`, in order; the first one is small.

    Args:
        sizes: Bytes of each gradient by parameter name, in the order in which gradients are expected.
        bucket_bytes: Size at which a bucket is full.
        kind: Returns what all gradients of a bucket must have in common, such as the dtype.

    Returns:
        The names in each bucket; buckets are in the order of their first name.
    """
    buckets: list[list[str]] = []
    open_buckets: dict[Hashable, list[str]] = {}
    filled: dict[Hashable, int] = {}
    for name, num_bytes in sizes.items():
        key = kind(name)
        # One bucket per kind is open at a time. Kinds alternate along a model (weights in 16 bits, norms in 32): a new
        # bucket at each change would make many small messages.
        if key not in open_buckets:
            open_buckets[key] = []
            filled[key] = 0
            buckets.append(open_buckets[key])
        bucket = open_buckets[key]
        bucket.append(name)
        filled[key] += num_bytes
        full = min(FIRST_BUCKET_BYTES, bucket_bytes) if bucket is buckets[0] else bucket_bytes
        if filled[key] >= full:
            del open_buckets[key]
    return buckets
