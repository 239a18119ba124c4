"""Compression in a DeepSpeed engine, ZeRO 0 to 2.

    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    session = compress_deepspeed(engine, PowerSGD(rank=4))
    ...
    engine.backward(loss)
    session.finish()      # ends the step: False if it was dropped
    engine.step()

DeepSpeed averages gradients in one method per kind of optimizer. The session replaces this method on the object. ZeRO 1
and 2 fill buckets while backward runs. The session compresses a full bucket, and each rank then takes its partition of
the mean. Without ZeRO, DeepSpeed averages all gradients after backward, and the session compresses them at this point.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_parallel.comm import GradientSession, Group, fill_buckets
from lightning_parallel.compat import Patches
from lightning_parallel.compat.deepspeed import (
    gradients_of_engine,
    has_overflow_check,
    is_zero_optimizer,
    loss_scale_of,
    parameters_of_bucket,
    replace_bucket_reduction,
    replace_fallback_reduction,
)
from lightning_parallel.compression.reducer import Reducer

__all__ = ["DeepSpeedSession", "compress_deepspeed"]

_BUCKET_BYTES = 25 << 20  # compressed together where ZeRO has no buckets


class DeepSpeedSession(GradientSession):
    """The steps of `compressor` under a DeepSpeed engine."""

    def __init__(self, engine: Any, compressor: Reducer) -> None:
        group = Group.of(engine.seq_data_parallel_group, axis="data_parallel")
        super().__init__(compressor, group, loss_scale=lambda: loss_scale_of(engine))
        self.compressor = compressor
        self._engine = engine
        self._names = {parameter: name for name, parameter in engine.module.named_parameters()}
        self._patches = Patches()
        if is_zero_optimizer(engine.optimizer):
            replace_bucket_reduction(engine, self._reduce_bucket, self._patches)
        else:
            replace_fallback_reduction(engine, self._reduce_all, self.finish, self._patches)

    def _reduce_bucket(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Replace a flat bucket of ZeRO by its mean."""
        named: dict[str, Tensor] = {}
        start = 0
        # The bucket is flat: parameters lie in it one after another, without padding. ZeRO also flushes empty buckets.
        for parameter in parameters_of_bucket(self._engine.optimizer, dtype) if flat.numel() else ():
            # Views of the bucket: `add` writes the means into it.
            named[self._names[parameter]] = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        if named:
            self.add(named)
        return flat

    @torch.no_grad()
    def _reduce_all(self, *_: Any, **__: Any) -> None:
        """Replace all gradients by their means."""
        named = {self._names[parameter]: gradient for parameter, gradient in gradients_of_engine(self._engine)}
        # In reverse: about the order in which backward makes gradients. It is equal on all ranks.
        sizes = {name: named[name].numel() * named[name].element_size() for name in reversed(named)}
        for bucket in fill_buckets(sizes, _BUCKET_BYTES):
            self.add({name: named[name] for name in bucket})

    @override
    def finish(self) -> bool:
        """End the step that the last backward pass began.

        Returns:
            False if a gradient was not finite on some rank. The step is then dropped, and `engine.step()` changes
            nothing.
        """
        applied = super().finish()
        # DeepSpeed's optimizers with an overflow check find the infinity. Other optimizers skip parameters without a
        # gradient.
        if not applied and not has_overflow_check(self._engine.optimizer):
            for parameter in self._names:
                parameter.grad = None
        return applied

    @override
    def close(self) -> None:
        """Restore the engine's own reduction of gradients."""
        self._patches.undo()
        super().close()


def compress_deepspeed(engine: Any, compressor: Reducer) -> DeepSpeedSession:
    """Compress the gradients of a DeepSpeed engine; call it before the first backward pass.

    Args:
        engine: First value of `deepspeed.initialize`, with ZeRO 0, 1 or 2.
        compressor: Computes the mean of the gradients.

    Raises:
        ValueError: If the engine is set up in a way in which its gradients cannot be compressed.
    """
    reasons = list(_obstacles(engine))
    if reasons:
        raise ValueError("The gradients of this engine cannot be compressed. " + ". ".join(reasons) + ".")
    return DeepSpeedSession(engine, compressor)


def _obstacles(engine: Any) -> Iterator[str]:
    stage = int(engine.zero_optimization_stage())
    if stage == 3:
        yield (
            "The ZeRO stage must be 0, 1 or 2; got 3, where no rank holds a full gradient. Use stage 1 or 2, or the"
            " compression of DeepSpeed (`communication_data_type`, `zero_quantized_gradients`)"
        )
    if stage == 2 and engine.gradient_accumulation_steps() > 1:
        yield (
            "`gradient_accumulation_steps` must be 1 with ZeRO 2, which averages after every batch; accumulate with"
            " stage 0 or 1"
        )
    if stage in (1, 2) and not getattr(engine.optimizer, "contiguous_gradients", True):
        yield "`contiguous_gradients` must be true, because full buckets are averaged; got false"
    if not engine.gradient_average:
        yield "DeepSpeed must average gradients; got a sum of them"
    if engine.has_moe_layers:
        yield "The model must have no layers of experts, because they average their gradients over other groups"
    if engine.sequence_parallel_size > 1 or engine.mp_world_size > 1:
        yield "DeepSpeed must use data parallelism only; got sequence or model parallelism"
    if engine.torch_autocast_enabled():
        yield "`torch_autocast` must be off, because its loss scale is unknown; use `fp16` or `bf16` of DeepSpeed"
    if engine.zenflow:
        yield "ZenFlow must be off, because it averages gradients differently"
