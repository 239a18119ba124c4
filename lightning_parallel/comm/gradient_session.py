"""One path for gradients: a session that is fed during backward.

session = GradientSession(reducer, executor)
session.add({name: gradient})        # from our own hooks, DDP, FSDP or DeepSpeed, as gradients become ready
session.finish()                     # whether the step counts: False if a gradient was not finite on some rank

On a thread, and with a second group, two buckets are in flight: one computes while the other waits for its messages.

    bucket 0, group 0    encode  ~~~~~~~~  decode            encode  ~~~~~~~~ ...
    bucket 1, group 1            encode  ~~~~~~~~  decode            encode   ...
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from lightning_parallel import tracing
from lightning_parallel.comm.collectives import all_reduce_
from lightning_parallel.comm.executors import Executor, InlineExecutor, ThreadExecutor
from lightning_parallel.comm.groups import Group

__all__ = ["GradientSession", "MeanReducer", "MeanStep", "Phases", "fill_buckets"]

Phases = Generator[Callable[[], None], None, None]
"""A reduction in phases: each yields a function that waits for its messages, on any thread."""

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

    def overlaps(self, named_gradients: Mapping[str, Tensor]) -> bool:
        """Tell whether `phases` is possible for these gradients; the same on all ranks."""

    def phases(
        self, named_gradients: Mapping[str, Tensor], group: Group, shards: Mapping[str, int] | None = None
    ) -> Phases:
        """Reduce like `reduce_`, in phases; `group` carries all messages."""

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
        expects_rollback: Whether the run drops steps as a routine. Otherwise the reducer may do without a second copy
            of its memory.
    """

    scale: float
    expects_rollback: bool

    def begin(self, group: Any) -> MeanStep:
        """Start a step over `group`."""

    def leave_device(self) -> None:
        """Keep the memory on the CPU until the next step."""


_Done = Callable[[Optional[BaseException]], None]


class _BucketsInFlight:
    """Runs the reductions of several buckets at a time on one thread: one computes while others wait for messages.

    Bucket k communicates in group k modulo the number of groups. It begins when the previous bucket of this group has
    ended. So a group carries the messages of one bucket after another, in the order of `add`, which is the same on all
    ranks. The first message to arrive decides which bucket a rank computes first. It changes no order within a group,
    and no order between groups is needed.

    Ranks cannot wait for each other in a circle. The thread waits for the next message of any bucket, never of one
    bucket alone. Take the first bucket, in the order of `add`, that does not end on some rank. All earlier buckets
    have ended on all ranks. So every rank begins this bucket once it has the gradients, and answers all its messages.

    After bucket k has failed, k + 1 goes on, and no bucket from k + 2 on begins until `forget`. If k failed on all
    ranks, all ranks therefore run the same buckets. If k failed on some ranks, the other ranks get no message of a
    later bucket in place of a message of k. They wait for k until the connection is closed. `finish` raises the error.

    Args:
        groups: Groups of the same ranks, which carry no other messages while buckets are in flight.
        executor: The thread.
    """

    def __init__(self, groups: Sequence[Group], executor: ThreadExecutor) -> None:
        self._groups = groups
        self._executor = executor
        self._added = 0
        self._buckets: dict[int, tuple[int, Phases, _Done]] = {}  # number and bucket, by the position of the group
        self._failed: tuple[int, BaseException] | None = None  # the first bucket that has failed
        self._arrived: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._waits: list[SimpleQueue[Callable[[], None] | None]] = []

    def add(self, start: Callable[[Group], Phases], done: _Done) -> None:
        """Begin a reduction, and return when its first messages are on their way; `done` is called at its end."""
        place = self._added % len(self._groups)
        # Advances any bucket whose message comes: a wait for this bucket alone could block ranks in a circle.
        while place in self._buckets:
            self._advance(*self._arrived.get())
        number = self._added
        self._added += 1
        # All buckets up to `number - len(groups)` have ended here, so the answer does not depend on timing.
        if self._failed is not None and self._failed[0] <= number - len(self._groups):
            done(self._failed[1])
            return
        self._buckets[place] = number, start(self._groups[place]), done
        self._advance(place)

    def proceed(self) -> None:
        """Go on with the buckets whose messages have arrived."""
        while True:
            try:
                arrived = self._arrived.get_nowait()
            except Empty:
                return
            self._advance(*arrived)

    def finish(self) -> None:
        """Finish all buckets.

        Raises:
            BaseException: The error of the first bucket that has failed since `forget`, when no bucket is in flight.
        """
        while self._buckets:
            self._advance(*self._arrived.get())
        if self._failed is not None:
            raise self._failed[1]
        # The numbers restart at the same point on all ranks, so buckets and groups still agree.
        self._added = 0

    def forget(self) -> None:
        """Start again after an error, when no bucket is in flight."""
        self._added = 0
        self._failed = None

    @torch.no_grad()
    def _advance(self, place: int, error: BaseException | None = None) -> None:
        """Go on with one bucket, whose messages have arrived or failed."""
        number, phases, done = self._buckets[place]
        try:
            if error is not None:
                raise error
            wait = next(phases)
        # Out of `_buckets` first: `add` of a later bucket may take the place as soon as this bucket has ended.
        except StopIteration:
            del self._buckets[place]
            done(None)
        except BaseException as failure:
            del self._buckets[place]
            # Buckets may fail in another order than they began. The lowest number counts, so that all ranks stop alike.
            if self._failed is None or number < self._failed[0]:
                self._failed = number, failure
            done(failure)
        else:
            self._wait_beside(place, wait)

    def _wait_beside(self, place: int, wait: Callable[[], None]) -> None:
        if not self._waits:
            self._waits = [SimpleQueue() for _ in self._groups]
            for index, waits in enumerate(self._waits):
                work, stop = partial(self._work, index, waits), partial(waits.put, None)
                # One thread per group: a wait cannot be for the first of two messages.
                self._executor.start_beside(f"messages-{index}", work, stop)
        self._waits[place].put(wait)

    def _work(self, place: int, waits: SimpleQueue[Callable[[], None] | None]) -> None:
        while (wait := waits.get()) is not None:
            error: BaseException | None = None
            try:
                wait()
            # Any error: without an entry in `_arrived`, `add` and `finish` would wait forever.
            except BaseException as found:
                error = found
            self._arrived.put((place, error))
            # `proceed` takes the message if the thread is idle. If `add` or `finish` takes it first, `proceed` does
            # nothing.
            self._executor.wake(self.proceed)


class GradientSession:
    """The steps of a reducer whose gradients arrive in buckets.

    A parameter may come a second time before `finish`: in another backward pass, or from a module that runs twice under
    FSDP. It then begins the next step.

    Args:
        reducer: Computes the means.
        group: The ranks to take the mean over.
        executor: Runs the reduction; `InlineExecutor` when omitted. If it overlaps with other communication of the same
            ranks, `group` must be an extra group.
        loss_scale: Returns the loss scale when a step begins; if omitted, the owner of the reducer sets its `scale`.
        verdict_group: Ranks that must agree that a step was finite, because they hold other parts of the model or
            other shards of the means. None if all ranks see the same numbers.
        device: Device of the verdict's tensor before the first gradient.
        second_group: Another group like `group`. With it, and a thread for gradients on the CPU, two buckets are in
            flight at once.

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
        second_group: Group | None = None,
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
        # Only on the CPU. On a device, streams already let a message travel while earlier kernels still run. And two
        # communicators of NCCL at once hang unless every device begins their kernels in one order.
        self._in_flight: _BucketsInFlight | None = None
        if second_group is not None and isinstance(executor, ThreadExecutor) and self._device.type == "cpu":
            self._in_flight = _BucketsInFlight([group, second_group], executor)

    def add(
        self, named_gradients: Mapping[str, Tensor], shards: Mapping[str, int] | None = None, copy: bool = False
    ) -> Callable[[], Mapping[str, Tensor]]:
        """Reduce one bucket on the executor; all ranks must add the same buckets in the same order.

        Args:
            named_gradients: Gradients by parameter name, overwritten with the mean.
            shards: Elements of each rank's part of a flattened gradient, where a rank needs no more than its part.
            copy: Leave the gradients unchanged and reduce copies, made on the executor.

        Returns:
            A function that waits for the means and returns them by name.
        """
        if self._in_flight is None:
            return self.executor.submit(partial(self.reduce, named_gradients, shards, copy))
        # A future, because the executor's call returns while the bucket is still in flight.
        future: Future[Mapping[str, Tensor]] = Future()
        self.executor.submit(partial(self.start, named_gradients, partial(_settle, future), shards, copy))

        def result() -> Mapping[str, Tensor]:
            with tracing.waiting("result"):
                return future.result()

        return result

    def wait(self) -> None:
        """Wait until all buckets are reduced.

        Raises:
            Exception: The first error of the executor; the step is then dropped.
        """
        try:
            if self._in_flight is not None:
                # On the executor, because only its thread may touch the buckets in flight.
                self.executor.submit(self.drain)
            self.executor.wait()
        except BaseException:
            # Buckets of a failed step are missing: the other buckets must not be committed.
            self.discard()
            if self._in_flight is not None:
                self._in_flight.forget()
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
        # A parameter that came again may have ended a step since the last call: the verdict of that step counts, too.
        self.applied = self.end_step() and self._earlier_applied
        self._earlier_applied = True
        return self.applied

    def close(self) -> None:
        """Close the executor after the buckets in flight; the executor limits the wait."""
        if self._in_flight is not None:
            # A backward pass that failed may have left buckets. Other ranks wait for the messages of these buckets.
            self.executor.submit(self.drain)
        self.executor.close()

    # ----------------------------------------------------------------- on the executor, or while it has nothing to do

    @property
    def step(self) -> MeanStep:
        """The open step; a new one begins when there is none."""
        if self._step is None:
            # Read once per step: the scale may change between steps, and residuals are stored without it.
            if self._loss_scale is not None:
                self.reducer.scale = self._loss_scale()
            self._step = self.reducer.begin(self.group)
        return self._step

    @torch.no_grad()
    def reduce(
        self, named_gradients: Mapping[str, Tensor], shards: Mapping[str, int] | None = None, copy: bool = False
    ) -> Mapping[str, Tensor]:
        """Reduce one bucket now and return its means; an error drops the step."""
        named_gradients = self._take(named_gradients, copy)
        try:
            self.step.reduce_(named_gradients, shards)
        except BaseException:
            self.discard()
            raise
        return named_gradients

    @torch.no_grad()
    def start(
        self,
        named_gradients: Mapping[str, Tensor],
        done: Callable[[Mapping[str, Tensor], BaseException | None], None],
        shards: Mapping[str, int] | None = None,
        copy: bool = False,
    ) -> None:
        """Begin to reduce one bucket; the executor calls `done` with the means, or with the error.

        The reduction is over when this method returns or raises, unless two buckets may be in flight.
        """

        def end(error: BaseException | None) -> None:
            done(named_gradients, error)

        try:
            named_gradients = self._take(named_gradients, copy)
            if self._in_flight is not None and self.step.overlaps(named_gradients):
                self._in_flight.add(partial(self.step.phases, named_gradients, shards=shards), end)
                return
            # This bucket cannot overlap, and it uses `group`: the buckets in flight there must end first.
            self.drain()
            self.step.reduce_(named_gradients, shards)
        except BaseException as error:
            self.discard()
            end(error)
            # Raised as well, so that the next `wait` of the executor fails.
            raise
        end(None)

    def _take(self, named_gradients: Mapping[str, Tensor], copy: bool) -> Mapping[str, Tensor]:
        """Return the gradients to reduce, or copies of them, and note their names in the step."""
        # No call announces a backward pass: a parameter that comes again can only belong to the next backward pass.
        if not self._added.isdisjoint(named_gradients):
            self._earlier_applied &= self.end_step()
        self._added.update(named_gradients)
        # Copied here and not in `add`: on CUDA the copy then runs on the executor's stream, after the caller's kernels.
        if copy:
            for gradient in named_gradients.values():
                if gradient.is_cuda:
                    # The caller may drop the gradient before this stream has read it.
                    gradient.record_stream(torch.cuda.current_stream(gradient.device))
            named_gradients = {name: gradient.detach().clone() for name, gradient in named_gradients.items()}
        # NCCL communicates only tensors on its device, so the verdict must be on the device of the gradients.
        for gradient in named_gradients.values():
            self._device = gradient.device
            break
        return named_gradients

    def drain(self) -> None:
        """Wait for the buckets in flight; afterwards `group` carries no message."""
        if self._in_flight is not None:
            self._in_flight.finish()

    @torch.no_grad()
    def end_step(self) -> bool:
        """Commit or roll back the open step; return whether the last step was applied."""
        self.drain()
        step = self._step
        # Closed first: an error in the verdict must not leave the step open for the next gradients.
        self._step = None
        self._added.clear()
        if step is None:
            return self.applied
        # Agreed before the commit: only a rank with another part of the model may have found the NaN. The host reads
        # only the joint verdict, so it waits for the device once.
        finite = None
        if self._verdict_group is not None:
            # gloo reduces no booleans.
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


def _settle(future: Future[Mapping[str, Tensor]], means: Mapping[str, Tensor], error: BaseException | None) -> None:
    if error is None:
        future.set_result(means)
    else:
        future.set_exception(error)


def _one_kind(name: str) -> Hashable:
    return None


def fill_buckets(
    sizes: Mapping[str, int], bucket_bytes: int, kind: Callable[[str], Hashable] = _one_kind
) -> list[list[str]]:
    """Divide parameters into buckets of about `bucket_bytes`, in order; the first bucket is small.

    Args:
        sizes: Bytes of each gradient by parameter name, in the order in which gradients are expected.
        bucket_bytes: Size at which a bucket is full.
        kind: Returns a property that the gradients of a bucket must share, such as the dtype.

    Returns:
        The names in each bucket; buckets are in the order of their first name.
    """
    buckets: list[list[str]] = []
    open_buckets: dict[Hashable, list[str]] = {}
    filled: dict[Hashable, int] = {}
    for name, num_bytes in sizes.items():
        key = kind(name)
        # One bucket per kind is open at a time. Kinds alternate along a model, as with weights in 16 bits and norms in
        # 32 bits. A new bucket at each change would make many small messages.
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
