"""The mean of gradients by reduce-scatter instead of all-reduce: each replica gets only its slice of the mean.

    backward:   ... layer 3 ........ layer 2 ........ layer 1 ...   reduce()
    in flight:            [ bucket 0 ]       [ bucket 1 ]  [ 2 ]    parameters become narrow, with slices of the means

A gradient is freed when its bucket is sent, so only few full buckets exist at once. All other behavior is inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import Pending
from lightning_parallel.comm.gradient_sums import assign_gradient
from lightning_parallel.data_parallel.bucketed_reducer import BUCKET_BYTES, GradientBucket, GradientReducer
from lightning_parallel.data_parallel.parameter_slices import MOST_IN_FLIGHT, ParameterSlices, padded_to

__all__ = ["ScatteringReducer"]


class ScatteringReducer(GradientReducer):
    """Replaces gradients by this replica's slices of their means, and makes their parameters narrow.

    Args:
        parameters: See `GradientReducer`.
        slices: The slices of the replicas.
        bucket_bytes, prepare, prepare_names: See `GradientReducer`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        slices: ParameterSlices,
        bucket_bytes: int = BUCKET_BYTES,
        prepare: Callable[[dict[str, Tensor]], None] | None = None,
        prepare_names: frozenset[str] = frozenset(),
    ) -> None:
        # Set before `super().__init__`, which fills the buckets and calls `_kind`.
        self._slices = slices
        self._found: set[str] = set()  # gradients that were sent
        self._in_flight: list[tuple[GradientBucket, Pending]] = []
        self._sums: dict[GradientBucket, Tensor] = {}
        super().__init__(parameters, slices.group, bucket_bytes, prepare=prepare, prepare_names=prepare_names)

    @override
    def _kind(self, name: str) -> Hashable:
        return super()._kind(name), self._slices.divides(self._active[name])

    def _is_divided(self, bucket: GradientBucket) -> bool:
        return self._slices.divides(self._active[bucket.names[0]])

    # ---------------------------------------------------------------------------------------------- during backward

    @override
    @torch.no_grad()
    def _send(self, bucket: GradientBucket) -> None:
        if not self._is_divided(bucket):
            super()._send(bucket)
            return
        self._found |= {name for name in bucket.names if self._active[name].grad is not None}
        with torch.inference_mode(False):
            rows = torch.cat([self._row(self._gradient(name)) for name in bucket.names], 1)
        self.traffic.add(rows.nbytes + rows[0].nbytes)
        self._in_flight.append((bucket, comm.reduce_scatter(rows, self.group, async_op=True)))
        for name in bucket.names:
            # Gradients that accumulate from now on travel in another message, and are added to the sum.
            self._active[name].grad = None
        # A limit for memory: each bucket in flight holds its full gradients.
        while len(self._in_flight) > MOST_IN_FLIGHT:
            self._land()

    def _row(self, gradient: Tensor) -> Tensor:
        """Return a gradient with the slice of each replica in one row."""
        width = self._slices.width(gradient.numel())
        return padded_to(width * self.group.size, gradient).view(self.group.size, width)

    def _land(self) -> None:
        """Wait for the bucket that was sent first."""
        bucket, pending = self._in_flight.pop(0)
        mine = pending.wait().view(-1)
        self.traffic.remove(mine.nbytes * self.group.size)  # the slice stays
        self._sums[bucket] = self._sums[bucket].add_(mine) if bucket in self._sums else mine

    @override
    def cancel(self) -> None:
        while self._in_flight:
            self._land()
        super().cancel()

    # ---------------------------------------------------------------------------------------------- after backward

    @override
    def _reset(self) -> None:
        super()._reset()
        self._found = set()
        self._in_flight = []
        self._sums = {}

    @override
    def _is_used(self, name: str) -> bool:
        return name in self._found or super()._is_used(name)

    @override
    def _finish_buckets(self, used: set[str]) -> None:
        self._slices.begin()
        super()._finish_buckets(used)

    @override
    def _finish(self, bucket: GradientBucket, used: set[str]) -> None:
        if not self._is_divided(bucket):
            super()._finish(bucket, used)
            return
        if bucket.stale:
            self._send(bucket)
        # A stale bucket has two messages, and messages land in the order of their sends.
        while self._in_flight:
            self._land()
        widths = [self._slices.width(self._active[name].numel()) for name in bucket.names]
        means = self._sums.pop(bucket).div_(self.group.size).split(widths)
        for name, mean in zip(bucket.names, means):
            parameter = self._active[name]
            # Even without a gradient: the owners of a tied parameter must exchange gradients of one shape.
            size = self._slices.size(parameter.numel())
            # Without the gradient: a view of it would lose its exact sum.
            self._slices.narrow(parameter)
            if name in used:
                assign_gradient(parameter, mean[:size].view(parameter.shape))
