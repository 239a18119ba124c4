"""One path for gradients: a session takes them from whoever runs backward, and replaces them by their mean.

    source                                        executor     bucket by bucket
    hooks on parameters (`data_parallel`)         thread       on copies, while backward runs
    `DistributedDataParallel`                     thread       while backward runs; on CUDA on a stream
    `FullyShardedDataParallel`, `fully_shard`     inline       where FSDP communicates
    DeepSpeed                                     inline       where DeepSpeed communicates

    source:    add(named) ... add(named) ... add(named) ... finish() -> True if the step was applied
    executor:      [ bucket 0 ]      [ bucket 1 ]  [ bucket 2 ]

All buckets between two calls of `finish` are one step of the reducer. A step is a transaction: it is committed if every
gradient was finite on every rank, and otherwise leaves no trace in the reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_parallel.comm.collectives import all_reduce_
from lightning_parallel.comm.executor import Executor, InlineExecutor
from lightning_parallel.comm.groups import Group

__all__ = ["GradientSession", "MeanReducer", "MeanStep", "fill_buckets"]

FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early in backward


class MeanStep(Protocol):
    """One optimizer step of a `MeanReducer`; it ends in `commit` or in `rollback`."""

    @property
    def finite(self) -> bool:
        """True if every gradient so far was finite on every rank of the group, as far as this rank can tell."""

    def reduce_(self, named_gradients: Mapping[str, Tensor], shards: Mapping[str, int] | None = None) -> None:
        """Replace some of the gradients by their (approximate) mean, in place."""

    def watch(self, received: Tensor) -> None:
        """Check at the end of the step that `received`, which is equal on all ranks, is finite."""

    def commit(self) -> bool:
        """Keep the state of this step for the next ones, if its gradients were finite; return whether they were."""

    def rollback(self) -> None:
        """Restore the state before this step."""


class MeanReducer(Protocol):
    """Replaces gradients by their mean over a group, such as a compressor.

    Attributes:
        scale: The loss scale: the number that the gradients are multiplied by.
    """

    scale: float

    def begin(self, group: Any) -> MeanStep:
        """Start a step over `group`."""


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
        # Evaluated before the commit: a rank of another part of the model may have found what is not seen here.
        if self._verdict_group is None or self._agrees(step.finite, self._verdict_group):
            self.applied = step.commit()
        else:
            step.rollback()
            self.applied = False
        return self.applied

    def discard(self) -> None:
        """Roll back the open step, if any."""
        step = self._step
        self._step = None
        self._added.clear()
        if step is not None:
            step.rollback()

    def _agrees(self, finite: bool, group: Group) -> bool:
        return bool(all_reduce_(torch.tensor(int(finite), device=self._device), group, "min"))


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
