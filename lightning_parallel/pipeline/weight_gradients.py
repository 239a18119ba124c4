"""Plain linear layers whose weight gradients zero-bubble schedules can put off; see `comm.weight_gradients`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_parallel.comm.weight_gradients import (
    WeightGradients,
    deferring,
    put_off,
    shared_parameters,
    weight_gradient_queue,
)
from lightning_parallel.compat import Division

__all__ = ["WeightGradients", "deferring", "shared_parameters", "split_linears", "weight_gradient_queue"]


def split_linears(module: nn.Module) -> None:
    """Make the plain linear layers of `module` take part in split backward passes; sharded ones always do."""
    for child in module.modules():
        # Subclasses compute something else.
        if type(child) is nn.Linear:
            # The record keeps the class before the change.
            Division.of(child)
            child.__class__ = _SplitLinear


class _SplitLinear(nn.Linear):
    """`nn.Linear` with a backward that can defer the gradients of its weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return nn.functional.linear(x, self.weight, self.bias)
        # `linear` would cast under autocast, except in double precision. Cast here, before x is saved, because backward
        # multiplies x by a gradient of that dtype.
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _Linear.apply(x, self.weight, self.bias)

    def _get_name(self) -> str:
        return "Linear"


class _Linear(Function):
    """y = x W^T + b; backward computes the gradients of W and b now, or defers them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.parameters = weight, bias
        # Output that is not 2-D is a view, and autograd forbids in-place changes of a view from a custom function.
        return nn.functional.linear(x, weight, bias).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight, bias = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dx = gradient @ weight.to(gradient.dtype) if wants_x else None
        flat = gradient.flatten(0, -2) if gradient.dim() > 1 else gradient[None]

        def weight_gradient() -> Tensor:
            inputs = x.flatten(0, -2) if x.dim() > 1 else x[None]
            return (flat.t() @ inputs).to(weight.dtype)

        def bias_gradient() -> Tensor:
            return flat.sum(0).to(bias.dtype)

        weight_parameter, bias_parameter = ctx.parameters
        dw = put_off(weight_parameter, weight_gradient, x, gradient) if wants_weight else None
        db = put_off(bias_parameter, bias_gradient, gradient) if wants_bias else None
        return dx, dw, db
