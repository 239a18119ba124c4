"""Linear layers whose weight gradient can be computed apart from the gradient of their input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_parallel import weight_gradients

__all__ = ["split_linears", "splitting"]


def split_linears(module: nn.Module) -> int:
    """Let the plain linear layers of `module` take part in split backward passes; returns how many there are.

    A weight that several modules share keeps its ordinary backward, since it has to be complete at once.
    """
    owners = Counter(id(value) for child in module.modules() for value in child._parameters.values())
    count = 0
    for child in module.modules():
        if type(child) is nn.Linear and owners[id(child.weight)] == 1:
            child.__class__ = _SplitLinear
            count += 1
    return count


@contextmanager
def splitting(module: nn.Module) -> Iterator[None]:
    """As `split_linears`, inside the block."""
    before = [child for child in module.modules() if type(child) is nn.Linear]
    split_linears(module)
    try:
        yield
    finally:
        for child in before:
            child.__class__ = nn.Linear


class _SplitLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return nn.functional.linear(x, self.weight, self.bias)
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _Linear.apply(x, self.weight, self.bias)

    def _get_name(self) -> str:
        return "Linear"


class _Linear(Function):
    """y = x W^T + b; backward computes the gradients of W and b now, or leaves them for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.leaves = [leaf if isinstance(leaf, nn.Parameter) else None for leaf in (weight, bias)]
        return nn.functional.linear(x, weight, bias)

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

        queue = weight_gradients.waiting()
        dw = db = None
        if wants_weight and (queue is None or not queue.defer(ctx.leaves[0], weight_gradient)):
            dw = weight_gradient()
        if wants_bias and (queue is None or not queue.defer(ctx.leaves[1], bias_gradient)):
            db = bias_gradient()
        return dx, dw, db
