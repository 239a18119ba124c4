"""The mean of gradients over the data-parallel axis: in buckets, while backward still runs.

    backward:   ... layer 3 ........ layer 2 ........ layer 1 ...   reduce()
    in flight:            [ bucket 0 ]       [ bucket 1 ]  [ 2 ]    waits, writes the means into `.grad`

A bucket starts when its last gradient is ready, always in the order of the buckets, so that every rank issues the
same collectives whatever order its gradients come in. Which parameters have a gradient is exchanged with every step:
one that some replica did not use counts as zero there, one that no replica used keeps no gradient.

A compressor's messages depend on each other, so its buckets are reduced by a worker, on copies: a gradient that
accumulates once more meanwhile is seen, and the step is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group, Pending, Worker
from lightning_parallel.data_parallel.beside import Beside, MeanReducer, MeanStep

__all__ = ["GradientReducer"]

FIRST_BUCKET_BYTES = 1 << 20  # a small first bucket, so that communication starts early


class _GradientBucket:
    """Parameters of one dtype and device whose gradients travel together."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_bytes = 0
        self.ready: set[str] = set()
        self.launched = False
        self.stale = False
        self.flat: Tensor | None = None
        self.pending: Pending | None = None


class GradientReducer:
    """Replaces the gradients of parameters by their mean over `group`.

    `reduce()` ends a backward pass: afterwards every `.grad` is final. Inside `no_sync()` nothing is communicated and
    gradients accumulate; the next `reduce()` takes what has accumulated.

    Args:
        parameters: The parameters by name; a shared one under one of its names. Frozen ones are left out for as long
            as they are frozen.
        group: The data-parallel group.
        bucket_bytes: Size at which a bucket is full.
        compression: Computes the mean instead.
        side_group: A second group of the same ranks, which nobody else uses: there compression runs while backward
            does. Without it, it runs after backward, with all gradients at once.
        replica_group: Ranks that hold the rest of the model. A gradient that is not finite on any of them makes the
            compressors of all of them forget the step.
        prepare: Called with the gradients of `prepare_names` before they are reduced, to complete partial ones in
            place (sums over the tensor-parallel group).
        prepare_names: Parameters whose gradients `prepare` completes.

    Attributes:
        applied: False if a compressor has found a gradient that is not finite and forgotten the last step, on all ranks
            alike.
        reduced: What the compressor was given in the last step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        bucket_bytes: int = 25 << 20,
        compression: MeanReducer | None = None,
        side_group: Group | None = None,
        replica_group: Group | None = None,
        prepare: Callable[[dict[str, Tensor]], None] | None = None,
        prepare_names: frozenset[str] = frozenset(),
    ) -> None:
        self.group = group
        self._parameters = dict(parameters)
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._side_group = side_group if compression is not None and group.size > 1 else None
        self._replica_group = replica_group
        self._worker: Worker | None = None
        self._beside: Beside | None = None
        self._prepare = prepare
        self._prepare_names = prepare_names if prepare is not None else frozenset()
        self.applied = True
        self.reduced: set[str] = set()
        self._synchronizing = True
        self._hooks: list[Any] = []
        self._completed: set[str] = set()
        self._accumulated: set[str] = set()  # gradients that came since the last reduction; others may be old
        self._touched = False
        self._trainable: list[bool] = []
        self.refresh()

    def refresh(self) -> None:
        """Take notice of parameters that were frozen or unfrozen; to be called between steps."""
        trainable = [parameter.requires_grad for parameter in self._parameters.values()]
        if trainable == self._trainable:
            return
        self.remove()
        self._trainable = trainable
        self._active = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._buckets = self._fill_buckets()
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._next = 0
        self._launched_anywhere = False
        watched = self._active if self.group.size > 1 or self._compression is not None else self._prepare_names
        for name in self._active.keys() & watched:
            self._hooks.append(self._active[name].register_post_accumulate_grad_hook(self._hook(name)))

    @property
    def _overlaps(self) -> bool:
        return self.group.size > 1 and (self._compression is None or self._side_group is not None)

    def _fill_buckets(self) -> list[_GradientBucket]:
        """Buckets in reverse order of registration, about the order of backward; partial gradients come last."""
        order = list(reversed(self._active))
        order.sort(key=lambda name: name in self._prepare_names)
        buckets: list[_GradientBucket] = []
        open_buckets: dict[tuple[Any, ...], _GradientBucket] = {}
        for name in order:
            parameter = self._active[name]
            kind = (parameter.dtype, parameter.device, name in self._prepare_names)
            if kind not in open_buckets:
                open_buckets[kind] = _GradientBucket()
                buckets.append(open_buckets[kind])
            bucket = open_buckets[kind]
            bucket.names.append(name)
            bucket.num_bytes += parameter.numel() * parameter.element_size()
            full = min(FIRST_BUCKET_BYTES, self._bucket_bytes) if bucket is buckets[0] else self._bucket_bytes
            if bucket.num_bytes >= full:
                del open_buckets[kind]
        return buckets

    # ---------------------------------------------------------------------------------------------- during backward

    @property
    def synchronizing(self) -> bool:
        """False inside `no_sync()`."""
        return self._synchronizing

    def mark(self, parameters: Iterable[Tensor]) -> None:
        """Take notice of gradients that were put in place, rather than accumulated by autograd."""
        marked = set(map(id, parameters))
        self._accumulated |= {name for name, parameter in self._active.items() if id(parameter) in marked}

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass, whose gradients are final afterwards.

        Sums that an earlier pass has completed are put aside meanwhile: they would be summed over the ranks again.
        """
        completed = self._completed if self._synchronizing else set()
        held = {name: grad for name in completed if (grad := self._active[name].grad) is not None}
        if not self._synchronizing:
            self._completed = set()  # what accumulates now is partial
        for name in held:
            self._active[name].grad = None
        yield
        self.reduce()
        for name, gradient in held.items():
            new = self._active[name].grad
            self._active[name].grad = gradient if new is None else gradient.add_(new)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate without communication."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        early = self._overlaps and name not in self._prepare_names

        def ready(parameter: Tensor) -> None:
            self._accumulated.add(name)
            self._touched |= self._synchronizing
            if not self._synchronizing or not early:
                return
            bucket = self._bucket_of[name]
            bucket.ready.add(name)
            bucket.stale |= bucket.launched  # accumulated again: what was sent is not the whole
            while self._next < len(self._buckets):
                bucket = self._buckets[self._next]
                if len(bucket.ready) < len(bucket.names):
                    return
                self._launch(bucket)
                self._next += 1

        return ready

    def _launch(self, bucket: _GradientBucket) -> None:
        bucket.launched = True
        if self._compression is not None:
            self._compress_beside({name: self._gradient(name) for name in bucket.names})
            return
        bucket.flat = self._flatten(bucket)
        bucket.pending = comm.all_reduce_(bucket.flat, self.group, async_op=True)

    def _compress_beside(self, gradients: dict[str, Tensor]) -> None:
        assert self._compression is not None
        assert self._side_group is not None
        if self._worker is None:
            self._worker = Worker(next(iter(self._active.values())).device)
        if self._beside is None:
            self._beside = Beside(self._compression.begin(self._side_group), self._worker)
        self._beside.launch(gradients)

    @torch.no_grad()
    def _flatten(self, bucket: _GradientBucket) -> Tensor:
        pieces = [self._gradient(name) for name in bucket.names]
        with torch.inference_mode(False):
            return torch.cat([piece.reshape(-1) for piece in pieces])

    def _gradient(self, name: str) -> Tensor:
        """The gradient of a parameter; zeros where it has none."""
        parameter = self._active[name]
        if parameter.grad is None:
            return torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise TypeError(f"the gradient of `{name}` is sparse, which is not supported; use `sparse=False`")
        return parameter.grad

    # ---------------------------------------------------------------------------------------------- after backward

    @property
    def in_flight(self) -> bool:
        """Whether a backward pass has brought gradients and `reduce()` has not been called."""
        return self._touched

    @torch.no_grad()
    def reduce(self) -> None:
        """Finish the reduction: afterwards every `.grad` is the mean over the group. Nothing inside `no_sync()`."""
        if not self._synchronizing:
            return
        self.applied = True
        if self._prepare is not None:
            self._completed = {name for name in self._active if name in self._prepare_names}
            self._prepare({name: self._gradient_of(name) for name in self._active if name in self._prepare_names})
        try:
            if self._compression is not None:
                self.applied = self._compress(self._compression, self._exchange_use())
            elif self.group.size > 1:
                self._launch_rest()
                self._finish_buckets(self._exchange_use())
        finally:
            self._reset()

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.ready.clear()
            bucket.launched = bucket.stale = False
            bucket.flat, bucket.pending = None, None
        self._next, self._beside = 0, None
        self._accumulated, self._touched = set(), False

    def _gradient_of(self, name: str) -> Tensor:
        """The gradient of a parameter in its place; zeros are put there where it has none."""
        gradient = self._gradient(name)
        self._active[name].grad = gradient
        return gradient

    def _exchange_use(self) -> set[str]:
        """Names with a gradient on any replica; what any replica found stale or has launched is so here too.

        A plain mean does nothing to an old gradient; a compressor would take it for another one.
        """
        only = self._active if self._compression is None else self._accumulated
        flags = [parameter.grad is not None and name in only for name, parameter in self._active.items()]
        flags += [bucket.stale for bucket in self._buckets]
        if not flags:
            return set()
        flags.append(self._next > 0)
        device = next(iter(self._active.values())).device
        shared = comm.all_reduce_(torch.tensor(flags, dtype=torch.uint8, device=device), self.group, "max").tolist()
        for bucket, stale in zip(self._buckets, shared[len(self._active) :]):
            bucket.stale = bool(stale)
        self._launched_anywhere = bool(shared[-1])
        return {name for name, flag in zip(self._active, shared) if flag}

    def _compress(self, compression: MeanReducer, used: set[str]) -> bool:
        self.reduced = used
        if self._launched_anywhere:
            applied = self._finish_beside(used)
            if applied is not None:
                return applied
        step = compression.begin(self.group)
        try:
            step.reduce_({name: self._gradient_of(name) for name in self._active if name in used})
        except BaseException:
            step.rollback()
            raise
        return self._end(step)

    def _finish_beside(self, used: set[str]) -> bool | None:
        """Launch what is left and put the means into place; None if a gradient has changed since it was sent."""
        for bucket in self._buckets[self._next :]:  # where a rank has launched one, its parameters are all in use
            self._compress_beside({name: self._gradient_of(name) for name in bucket.names if name in used})
        assert self._beside is not None
        means = self._beside.wait()
        if any(bucket.stale for bucket in self._buckets):
            self._beside.step.rollback()
            return None
        for name, mean in means.items():
            self._active[name].grad = mean
        return self._end(self._beside.step)

    def _end(self, step: MeanStep) -> bool:
        """Commit the step if every gradient of the whole model was finite on every rank."""
        finite = step.finite
        if self._replica_group is not None:
            device = next(iter(self._active.values())).device
            finite = bool(comm.all_reduce_(torch.tensor(int(finite), device=device), self._replica_group, "min"))
        if finite:
            step.commit()
        else:
            step.rollback()
        return finite

    def _launch_rest(self) -> None:
        for bucket in self._buckets:
            if bucket.pending is None:
                self._launch(bucket)

    def _finish_buckets(self, used: set[str]) -> None:
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            if bucket.stale:
                self._launch(bucket)
                bucket.pending.wait()
            self._write_back(bucket, used)

    def _write_back(self, bucket: _GradientBucket, used: set[str]) -> None:
        assert bucket.flat is not None
        bucket.flat.div_(self.group.size)
        parameters = [self._active[name] for name in bucket.names]
        means = bucket.flat.split([parameter.numel() for parameter in parameters])
        for name, parameter, mean in zip(bucket.names, parameters, means):
            if name not in used:
                continue
            if parameter.grad is None or parameter.grad.is_contiguous():
                parameter.grad = mean.view_as(parameter)  # a part of the bucket, which saves a copy
            else:
                parameter.grad.copy_(mean.view_as(parameter))

    def remove(self) -> None:
        """Take the hooks off the parameters, and end the worker."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
