"""The mean of gradients over the data-parallel axis: in buckets, while backward still runs.

    backward:   ... layer 3 ........ layer 2 ........ layer 1 ...   reduce()
    in flight:            [ bucket 0 ]       [ bucket 1 ]  [ 2 ]    waits, writes the means into `.grad`

A bucket starts when its last gradient is ready. Buckets always start in the same order. So every rank issues the same
collectives, for any order of its gradients. In each step, the replicas exchange the names of parameters with a
gradient. A missing gradient counts as zero on its replica. A parameter without a gradient on all replicas keeps none.

The messages of a compressor depend on each other, so its buckets go through a `GradientSession` on a thread, as
copies. If a gradient accumulates again after its bucket was sent, the step is dropped and repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import GradientSession, Group, MeanReducer, Pending, ThreadExecutor, Traffic, fill_buckets
from lightning_parallel.comm.gradient_sums import (
    add_gradient,
    assign_gradient,
    bytes_of_exact,
    drop_exact,
    exact_gradient,
    sum_exactly,
    summed_dtype,
)

__all__ = ["BUCKET_BYTES", "GradientBucket", "GradientReducer"]

BUCKET_BYTES = 25 << 20


class GradientBucket:
    """Parameters of one dtype and device whose gradients travel together.

    Attributes:
        ready: Parameters whose gradient of this backward pass is final.
        launched: True after the gradients were sent.
        stale: True if a gradient has changed after it was sent.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.ready: set[str] = set()
        self.launched = False
        self.stale = False
        self.flat: Tensor | None = None
        self.pending: Pending | None = None

    def launch(self, flat: Tensor, group: Group) -> None:
        """Begin to sum `flat`, the gradients of the bucket in one vector, over `group`."""
        self.flat = flat
        self.pending = comm.all_reduce_(flat, group, async_op=True)

    def wait(self) -> Tensor:
        """Return the sum."""
        if self.pending is None or self.flat is None:
            raise RuntimeError("This bucket has not been launched")
        self.pending.wait()
        return self.flat

    def reset(self) -> None:
        """Prepare for the next step."""
        self.ready.clear()
        self.launched = False
        self.stale = False
        self.flat = None
        self.pending = None


class GradientReducer:
    """Replaces the gradients of parameters by their mean over `group`.

    `reduce()` ends a backward pass: afterwards every `.grad` is final. Inside `no_sync()`, gradients accumulate without
    communication; the next `reduce()` averages the accumulated gradients.

    Args:
        parameters: The parameters by name; a shared parameter under one of its names. Frozen parameters are left out
            until they are unfrozen.
        group: The data-parallel group.
        bucket_bytes: Size at which a bucket is full.
        compression: Computes the mean instead of an all-reduce.
        side_group: An extra group of the same ranks, only for this reducer, in which compression runs during backward.
            Without the group, compression runs after backward, with all gradients at once.
        second_group: Another extra group, with which two buckets are compressed at once; see `GradientSession`.
        replica_group: Ranks that hold the other parts of the model. If a gradient is not finite on any of these ranks,
            the compressors of all these ranks drop the step.
        prepare: Called with the gradients of `prepare_names` before they are reduced, to complete partial ones in
            place (sums over the tensor-parallel group).
        prepare_names: Parameters whose gradients `prepare` completes.

    Attributes:
        sum_dtype: Dtype in which gradients of 16-bit parameters are added, over backward passes and over ranks. None
            takes the dtype of the parameter. Call `refresh` after a change. A compressor sees rounded gradients.
        sum_bytes: Bytes of the exact sums of this rank at the end of the last backward pass.
        applied: False if a compressor has found a gradient that is not finite and dropped the last step; equal on all
            ranks.
        reduced: The parameters whose gradients the compressor received in the last step.
        traffic: Buckets of gradients in flight, without the copies of compressors.
        observer: If set, called with the gradients of each bucket before they are sent. Gradients that change later are
            passed once more.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        bucket_bytes: int = BUCKET_BYTES,
        compression: MeanReducer | None = None,
        side_group: Group | None = None,
        second_group: Group | None = None,
        replica_group: Group | None = None,
        prepare: Callable[[dict[str, Tensor]], None] | None = None,
        prepare_names: frozenset[str] = frozenset(),
    ) -> None:
        self.group = group
        self.sum_dtype: torch.dtype | None = None
        self._parameters = dict(parameters)
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._side_group = side_group if compression is not None and group.size > 1 else None
        self._second_group = second_group
        self._replica_group = replica_group
        self._overlapped: GradientSession | None = None  # on a thread, while backward runs
        self._means: list[Callable[[], Mapping[str, Tensor]]] = []  # of the buckets given to it
        self._prepare = prepare
        self._prepare_names = prepare_names if prepare is not None else frozenset()
        self.applied = True
        self.reduced: set[str] = set()
        self.traffic = Traffic()
        self.observer: Callable[[Mapping[str, Tensor]], None] | None = None
        self._synchronizing = True
        self._hooks: list[Any] = []
        self._completed: set[str] = set()
        self._accumulated: set[str] = set()  # gradients that came since the last reduction; others may be old
        self._has_new_gradients = False
        self._trainable: list[tuple[bool, bool]] = []
        self._summed_in: torch.dtype | None = None
        self.sum_bytes = 0
        self.refresh()

    def adopt(self, parameters: Mapping[str, nn.Parameter], prepare_names: frozenset[str] | None = None) -> None:
        """Reduce the gradients of these parameters from now on; call it between steps.

        Args:
            parameters: By name.
            prepare_names: Parameters whose gradients are completed first; None leaves them unchanged.
        """
        self._parameters = dict(parameters)
        if prepare_names is not None and self._prepare is not None:
            self._prepare_names = prepare_names
        self._trainable = []
        self.refresh()

    def refresh(self) -> None:
        """Adapt to parameters that were frozen or unfrozen, and to `sum_dtype`; call it before a backward pass."""
        # A frozen parameter takes part as long as it has a gradient that is not reduced yet.
        trainable = [
            (each.requires_grad, not each.requires_grad and name in self._accumulated)
            for name, each in self._parameters.items()
        ]
        if trainable == self._trainable and self.sum_dtype == self._summed_in:
            return
        self.remove()
        self._trainable = trainable
        self._summed_in = self.sum_dtype
        self._active = {name: each for (name, each), due in zip(self._parameters.items(), trainable) if any(due)}
        # A bucket with a frozen parameter would never be full, and later buckets would never start.
        self._buckets = self._create_buckets()
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._next = 0
        self._launched_anywhere = False
        for name, parameter in self._active.items():
            if parameter.requires_grad and self._dtype_of_sum(name) != parameter.dtype:
                # Before the hooks below, which may send the sum.
                self._hooks += sum_exactly(parameter, self._dtype_of_sum(name))
        watched = self._active if self.group.size > 1 or self._compression is not None else self._prepare_names
        for name in self._active.keys() & watched:
            if self._active[name].requires_grad:
                self._hooks.append(self._active[name].register_post_accumulate_grad_hook(self._hook(name)))

    @property
    def _overlaps(self) -> bool:
        return self.group.size > 1 and (self._compression is None or self._side_group is not None)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._active.values())).device

    def _dtype_of_sum(self, name: str) -> torch.dtype:
        return summed_dtype(self._active[name].dtype, self.sum_dtype)

    def _dtype_of_message(self, name: str) -> torch.dtype:
        return self._dtype_of_sum(name) if self._compression is None else self._active[name].dtype

    def _create_buckets(self) -> list[GradientBucket]:
        """Fill buckets in reverse order of registration, about the order of backward; partial gradients come last."""
        # The sort is stable. Partial gradients are complete only after backward, and must not delay other buckets.
        order = list(reversed(self._active))
        order.sort(key=lambda name: name in self._prepare_names)
        sizes = {name: self._active[name].numel() * self._dtype_of_message(name).itemsize for name in order}
        return [GradientBucket(names) for names in fill_buckets(sizes, self._bucket_bytes, self._kind)]

    def _kind(self, name: str) -> Hashable:
        """Return the properties that all gradients of a bucket share."""
        parameter = self._active[name]
        return parameter.dtype, parameter.device, name in self._prepare_names

    # ---------------------------------------------------------------------------------------------- during backward

    @property
    def synchronizing(self) -> bool:
        """False inside `no_sync()`."""
        return self._synchronizing

    def mark(self, parameters: Iterable[Tensor], changed: Iterable[Tensor] = ()) -> None:
        """Register gradients that were assigned, not accumulated by autograd.

        Args:
            parameters: The parameters with these gradients.
            changed: Parameters among them whose gradients have changed since `start`.
        """
        # By identity: comparing tensors would compare their elements.
        marked, stale = set(map(id, parameters)), set(map(id, changed))
        self._accumulated |= {name for name, parameter in self._active.items() if id(parameter) in marked}
        for bucket in self._buckets if stale else ():
            bucket.stale |= bucket.launched and any(id(self._active[name]) in stale for name in bucket.names)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Reduce the gradients of the backward pass in the block: after the block they are final.

        During the block, gradients that an earlier pass has completed are removed: `prepare` would sum them over the
        ranks a second time.
        """
        held: dict[str, Tensor] = {}
        for name in self._completed & self._active.keys() if self._synchronizing else ():
            gradient = self._active[name].grad
            if gradient is not None:
                held[name] = gradient
        if not self._synchronizing:
            self._completed = set()  # gradients that accumulate now are partial
        for name in held:
            self._active[name].grad = None
        yield
        self.reduce()
        for name, gradient in held.items():
            parameter = self._active[name]
            new, parameter.grad = parameter.grad, gradient
            if new is not None:
                add_gradient(parameter, new, self.sum_dtype)

    def add(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients that were computed apart to `.grad`."""
        # A parameter with an earlier gradient: the reducer must not use a result that it began without this gradient.
        sums = [parameter for parameter in gradients if parameter.grad is not None]
        for parameter, gradient in gradients.items():
            add_gradient(parameter, gradient, self.sum_dtype)
        self.mark(gradients, changed=sums)

    def release(self) -> None:
        """Free the exact sums, after all communication of a step; every `.grad` keeps the rounded sum."""
        for parameter in self._active.values():
            drop_exact(parameter)

    @contextmanager
    def no_sync(self) -> Iterator[bool]:
        """Let gradients accumulate without communication; yield False inside another such block."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield before
        finally:
            self._synchronizing = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the hooks in the block, so that its gradients are not reduced."""
        self.remove()
        try:
            yield
        finally:
            # An empty list never equals the state of the parameters, so `refresh` registers the hooks again.
            self._trainable = []
            self.refresh()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        early = self._overlaps and name not in self._prepare_names

        def ready(parameter: Tensor) -> None:
            self._accumulated.add(name)
            self._has_new_gradients |= self._synchronizing
            if not self._synchronizing or not early:
                return
            bucket = self._bucket_of[name]
            bucket.ready.add(name)
            bucket.stale |= bucket.launched  # accumulated again: the message held only a part of the gradient
            self._launch_ready()

        return ready

    def start(self, names: Iterable[str]) -> None:
        """Begin to reduce final gradients in `.grad`; a bucket starts once all its gradients are final.

        The next `reduce()` needs the same gradients in `.grad`.
        """
        if self._overlaps:
            for name in self._active.keys() & set(names) - self._prepare_names:
                # A compressor must get only parameters with a gradient on some replica. For a parameter without a
                # gradient here, only `reduce` finds this out.
                if self._compression is None or self._is_used(name):
                    self._bucket_of[name].ready.add(name)
            self._launch_ready()

    def cancel(self) -> None:
        """Forget the buckets that were started, if `reduce()` did not follow."""
        if self._next > 0:
            # Collectives cannot be cancelled: their buffers must live until every message has arrived.
            for bucket in self._buckets[: self._next]:
                if bucket.pending is not None:
                    bucket.wait()
            if self._means:
                self._overlapped_session().wait()
                self._overlapped_session().discard()
            self._reset()

    def _launch_ready(self) -> None:
        # In the order of the buckets, not of the gradients: other ranks may use the layers in another order, and
        # backends pair collectives by the order of the calls.
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if len(bucket.ready) < len(bucket.names):
                return
            self._launch(bucket)
            self._next += 1

    def _launch(self, bucket: GradientBucket) -> None:
        bucket.launched = True
        if self.observer is not None:
            self.observer({name: self._gradient(name) for name in bucket.names})
        if self._compression is None:
            self._send(bucket)
        else:
            self._compress_early({name: self._gradient(name) for name in bucket.names})

    def _send(self, bucket: GradientBucket) -> None:
        flat = self._flatten(bucket)
        self.traffic.add(flat.nbytes)
        bucket.launch(flat, self.group)

    def _compress_early(self, gradients: dict[str, Tensor]) -> None:
        """Compress copies of a bucket while backward goes on."""
        # Copies, because the gradient may accumulate again before the end of the step.
        self._means.append(self._overlapped_session().add(gradients, copy=True))

    def _overlapped_session(self) -> GradientSession:
        if self._overlapped is None:
            assert self._compression is not None
            assert self._side_group is not None
            executor = ThreadExecutor(self._device)
            self._overlapped = GradientSession(
                self._compression,
                self._side_group,
                executor,
                verdict_group=self._replica_group,
                device=self._device,
                second_group=self._second_group,
            )
        return self._overlapped

    @torch.no_grad()
    def _flatten(self, bucket: GradientBucket) -> Tensor:
        parts = []
        for gradient in map(self._gradient, bucket.names):
            parts.append(gradient.reshape(-1))
            if missing := _padding(gradient, gradient.dtype):
                parts.append(gradient.new_zeros(missing))
        with torch.inference_mode(False):
            return torch.cat(parts)

    def _gradient(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the gradient of a parameter, by default in the dtype of messages; zeros if it has none."""
        parameter = self._active[name]
        dtype = self._dtype_of_message(name) if dtype is None else dtype
        if parameter.grad is None:
            return torch.zeros_like(parameter, dtype=dtype)
        if parameter.grad.is_sparse:
            raise TypeError(f"The gradient of `{name}` is sparse, which is not supported; use `sparse=False`")
        # The dtype may be wider though no sum exists here: another replica may have added several gradients.
        return parameter.grad if dtype == parameter.dtype else exact_gradient(parameter.grad).to(dtype)

    # ---------------------------------------------------------------------------------------------- after backward

    @property
    def in_flight(self) -> bool:
        """True if a backward pass has brought gradients and `reduce()` has not been called."""
        return self._has_new_gradients

    @torch.no_grad()
    def reduce(self) -> None:
        """Finish the reduction: afterwards every `.grad` is the mean over the group. Inside `no_sync()`, do nothing."""
        if not self._synchronizing:
            return
        self.applied = True
        self.sum_bytes = sum(map(bytes_of_exact, self._active.values()))
        if self._prepare is not None:
            self._complete(self._prepare)
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
            bucket.reset()
        self._next = 0
        self.traffic.clear()
        self._means = []
        # Frozen parameters, which a later pass may train again, keep their marks.
        self._accumulated -= self._active.keys()
        self._has_new_gradients = False

    def _gradient_of(self, name: str) -> Tensor:
        """Return the gradient of a parameter; set it to zeros first if there is none."""
        gradient = self._gradient(name)
        self._active[name].grad = gradient
        return gradient

    def _complete(self, prepare: Callable[[dict[str, Tensor]], None]) -> None:
        """Complete partial gradients; a parameter that no rank has used in this step keeps no gradient."""
        self._completed |= self._active.keys() & self._prepare_names
        names = [name for name in self._active if name in self._prepare_names]
        unused = [name for name in names if self._active[name].grad is None]
        gradients = {name: self._gradient(name, self._dtype_of_sum(name)) for name in names}
        if not names:
            prepare(gradients)
            return
        # The flags travel with the gradients, which saves a message. `prepare` sums all elements under an unknown name.
        used = gradients[names[0]].new_tensor([float(name not in unused) for name in names])
        prepare({**gradients, "": used})
        for name, gradient in gradients.items():
            assign_gradient(self._active[name], gradient)
        # Read only if this rank needs the counts, because the host waits for the device here.
        for name, count in zip(names, used.tolist()) if unused else ():
            if not count:
                self._active[name].grad = None

    def _exchange_use(self) -> set[str]:
        """Return the names with a gradient on any replica, and share the flags of stale and launched buckets.

        The mean of an old gradient, equal on all replicas, is the same gradient. A compressor would add it once more to
        its memory. So with compression, only gradients since the last reduction count.
        """
        only = self._active if self._compression is None else self._accumulated
        flags = [self._is_used(name) and name in only for name in self._active]
        # One collective for all questions: each further collective would cost a round trip per step.
        flags += [bucket.stale for bucket in self._buckets]
        if not flags:
            return set()
        flags.append(self._next > 0)
        shared = comm.on_any_rank(flags, self.group)
        for bucket, stale in zip(self._buckets, shared[len(self._active) :]):
            bucket.stale = stale
        # A rank that has launched no bucket must still take part in the collectives of launched buckets.
        self._launched_anywhere = shared[-1]
        return {name for name, flag in zip(self._active, shared) if flag}

    def _is_used(self, name: str) -> bool:
        return self._active[name].grad is not None

    def _compress(self, compression: MeanReducer, used: set[str]) -> bool:
        self.reduced = used
        if self._launched_anywhere and self._finish_early(used):
            return self._overlapped_session().finish()
        # In place and in the calling thread: backward is over, so there is no work to overlap with.
        session = GradientSession(compression, self.group, verdict_group=self._replica_group, device=self._device)
        # In the order of `_active`, not of the set `used`: all ranks need one order.
        session.add({name: self._gradient_of(name) for name in self._active if name in used})
        return session.finish()

    def _finish_early(self, used: set[str]) -> bool:
        """Compress the remaining buckets and assign the means; False if a gradient has changed after it was sent."""
        for bucket in self._buckets[self._next :]:  # a bucket launched on any rank is in use in full, so names agree
            self._compress_early({name: self._gradient_of(name) for name in bucket.names if name in used})
        session = self._overlapped_session()
        session.wait()
        # `_exchange_use` has shared the flags: either all ranks repeat the step, or none does.
        if any(bucket.stale for bucket in self._buckets):
            session.discard()
            # Such a model does this in every step, so from now on the compressor keeps a copy of its memory.
            session.reducer.expects_rollback = True
            return False
        for means in self._means:
            for name, mean in means().items():
                self._active[name].grad = mean
        return True

    def _launch_rest(self) -> None:
        for bucket in self._buckets:
            if not bucket.launched:
                self._launch(bucket)

    def _finish_buckets(self, used: set[str]) -> None:
        for bucket in self._buckets:
            self._finish(bucket, used)

    def _finish(self, bucket: GradientBucket, used: set[str]) -> None:
        total = bucket.wait()
        # The first sum held a part of a gradient. All ranks know the flag, so all send the bucket again.
        if bucket.stale:
            self._launch(bucket)
            total = bucket.wait()
        self._write_back(bucket, total.div_(self.group.size), used)

    def _write_back(self, bucket: GradientBucket, flat: Tensor, used: set[str]) -> None:
        parameters = [self._active[name] for name in bucket.names]
        parts = flat.split([extent for p in parameters for extent in (p.numel(), _padding(p, flat.dtype))])
        for name, parameter, mean in zip(bucket.names, parameters, parts[::2]):
            if name not in used:
                continue
            if parameter.grad is None or parameter.grad.is_contiguous():
                assign_gradient(parameter, mean.view_as(parameter))  # a view of the bucket saves a copy
            else:
                parameter.grad.copy_(mean.view_as(parameter))

    def close(self) -> None:
        """Remove the hooks, end the thread, and move the memory of a compressor off the device."""
        self.remove()
        if self._compression is not None:
            self._compression.leave_device()

    def remove(self) -> None:
        """Remove the hooks from the parameters, and end the thread."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._overlapped is not None:
            self._overlapped.close()
            self._overlapped = None


_ALIGNED_BYTES = 16  # kernels read this many bytes at once


def _padding(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the elements between a gradient and the next gradient in a bucket of this dtype."""
    # Only on CUDA, where alignment helps. Elsewhere padding would move elements, and some backends sum the ranks in an
    # order that depends on the position of an element.
    unit = _ALIGNED_BYTES // dtype.itemsize if tensor.is_cuda else 1
    return -tensor.numel() % unit
