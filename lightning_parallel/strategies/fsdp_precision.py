"""Lightning's precision plugin for FSDP1, on any device and with clipping by norm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from typing_extensions import override

__all__ = ["DeviceFSDPPrecision"]


class DeviceFSDPPrecision(FSDPPrecision):
    """`FSDPPrecision`, whose autocast and gradient scaler are those of CUDA, for `device`.

    Args:
        like: The plugin to stand in for.
        device: Type of the device to train on.
        model: Gives the outermost FSDP module, which alone can take the norm of gradients in shards.
    """

    def __init__(self, like: FSDPPrecision, device: str, model: Callable[[], nn.Module | None]) -> None:
        super().__init__(like.precision)  # type: ignore[arg-type]
        self._device, self._model = device, model
        if like.scaler is not None:
            self.scaler = like.scaler if like.scaler._device == device else ShardedGradScaler(device)

    @override
    def forward_context(self) -> AbstractContextManager:
        if "mixed" not in self.precision:
            return super().forward_context()
        return torch.autocast(self._device, dtype=torch.bfloat16 if "bf16" in self.precision else torch.float16)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float, *_: Any, **__: Any) -> None:
        model = self._model()
        assert isinstance(model, FullyShardedDataParallel)
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not all(id(parameter) in owned for parameter in model.parameters() if parameter.requires_grad):
            raise ValueError(
                "FSDP clips the gradients of the whole model by their norm, but this optimizer has only a part of it; "
                "use one optimizer, or `gradient_clip_algorithm='value'`"
            )
        model.clip_grad_norm_(clip_val)
