"""Compression of the gradients of a DeepSpeed engine, ZeRO 0 to 2.

    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    state = compress_deepspeed(engine, PowerSGD(rank=4))
    ...
    engine.backward(loss)
    state.finish()      # ends the step: False if it did not count
    engine.step()

DeepSpeed averages gradients in one place per kind of optimizer; that place is replaced on the engine. ZeRO 1 and 2 fill
buckets while backward runs; a bucket is compressed when it is full, and each rank then takes its partition of the mean.
Without ZeRO all gradients are averaged after backward, and so they are compressed then.

The names used here are those of DeepSpeed 0.19, which has no public hook for this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.comm import Group
from lightning_parallel.compression.reducer import Reducer
from lightning_parallel.compression.transaction import Transaction, fill

__all__ = ["DeepSpeedState", "compress_deepspeed"]

_PORTION_BYTES = 25 << 20  # compressed together where ZeRO has no buckets


class DeepSpeedState:
    """The steps of `compressor` under a DeepSpeed engine."""

    def __init__(self, engine: Any, compressor: Reducer) -> None:
        self.compressor = compressor
        self._engine = engine
        self._group = Group.of(engine.seq_data_parallel_group, axis="data_parallel")
        self._names = {parameter: name for name, parameter in engine.module.named_parameters()}
        self._transaction = Transaction(compressor, self)

    def get_scale(self) -> float:
        """What DeepSpeed multiplied the loss by."""
        return float(getattr(self._engine.optimizer, "loss_scale", 1.0))

    @torch.no_grad()
    def reduce_bucket(self, bucket: Tensor, communication_data_type: torch.dtype) -> Tensor:
        """Replace a flat bucket of ZeRO's by its mean: stands in for `gradient_reduction_w_predivide`."""
        if bucket.numel():
            named = dict(self._of_bucket(bucket, communication_data_type))
            self._transaction.step(self._group).reduce_(named)
        return bucket

    def _of_bucket(self, bucket: Tensor, kind: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        zero, start = self._engine.optimizer, 0
        for group, index, _ in zero.ipg_buckets[kind].params:
            parameter = zero.bit16_groups[group][index]
            yield self._names[parameter], bucket[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    @torch.no_grad()
    def reduce_all(self, *_: Any, **__: Any) -> None:
        """Replace all gradients by their means: stands in for `buffered_allreduce_fallback`."""
        named = dict(self._of_model())
        sizes = {name: gradient.numel() * gradient.element_size() for name, gradient in named.items()}
        step = self._transaction.step(self._group)
        for portion in fill(reversed(sizes), sizes, _PORTION_BYTES):
            step.reduce_({name: named[name] for name in portion})

    def _of_model(self) -> Iterator[tuple[str, Tensor]]:
        optimizer = self._engine.optimizer
        if hasattr(optimizer, "get_grads_for_reduction"):  # bf16 with gradients accumulated in fp32
            for parameters, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients):
                for parameter, gradient in zip(parameters, gradients):
                    yield self._names[parameter], gradient.view(parameter.shape)
            return
        self._engine._get_gradients_for_reduction()  # gives a gradient of zeros to parameters without one
        for parameter, name in self._names.items():
            if parameter.grad is not None:
                yield name, parameter.grad

    def finish(self) -> bool:
        """End the step that the last backward pass began.

        Returns:
            False if it did not count, because a gradient was not finite on some rank: `engine.step()` then changes
            nothing.
        """
        counted = self._transaction.finish()
        if not counted and not hasattr(self._engine.optimizer, "overflow"):  # not one of DeepSpeed's, which skip
            for parameter in self._names:
                parameter.grad = None
        return counted


def compress_deepspeed(engine: Any, compressor: Reducer) -> DeepSpeedState:
    """Compress the gradients of a DeepSpeed engine, before its first backward pass.

    Args:
        engine: What `deepspeed.initialize` returned first, with ZeRO 0, 1 or 2.
        compressor: Computes the mean of the gradients.

    Raises:
        ValueError: If the engine is set up in a way in which its gradients cannot be compressed.
    """
    reasons = list(_obstacles(engine))
    if reasons:
        raise ValueError("These gradients cannot be compressed: " + "; ".join(reasons) + ".")
    state = DeepSpeedState(engine, compressor)
    optimizer = engine.optimizer
    if hasattr(optimizer, "gradient_reduction_w_predivide"):
        optimizer.reduce_scatter = False  # the mean is taken whole
        optimizer.gradient_reduction_w_predivide = state.reduce_bucket
        optimizer.check_grad_overflow = True  # skips what does not count
    else:
        engine.buffered_allreduce_fallback = state.reduce_all
        clip = engine.clip_fp32_gradients
        engine.clip_fp32_gradients = lambda: clip() if state.finish() else None  # fails where no gradient is left
    return state


def _obstacles(engine: Any) -> Iterator[str]:
    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    if stage == 3:
        yield (
            "ZeRO 3 has the mean of a whole gradient on no rank, as low-rank methods, top-k and error feedback need; "
            "use stage 1 or 2, or what DeepSpeed has itself (`communication_data_type`, `zero_quantized_gradients`)"
        )
    if stage == 2 and engine.gradient_accumulation_steps() > 1:
        yield "ZeRO 2 averages after every batch, not once per step; accumulate with stage 0 or 1"
    if stage in (1, 2) and not getattr(optimizer, "contiguous_gradients", True):
        yield "expected `contiguous_gradients` to be true, as the mean is taken of whole buckets"
    if not engine.gradient_average:
        yield "expected DeepSpeed to average gradients, found that it adds them"
    if engine.has_moe_layers:
        yield "layers of experts average their gradients over groups of their own"
    if engine.sequence_parallel_size > 1 or engine.mp_world_size > 1:
        yield "expected data parallelism alone, found that DeepSpeed also divides sequences or layers"
    if engine.torch_autocast_enabled():
        yield "under `torch_autocast` the loss scale is not DeepSpeed's; use its `fp16` or `bf16`"
    if engine.zenflow:
        yield "ZenFlow averages gradients in its own way"
