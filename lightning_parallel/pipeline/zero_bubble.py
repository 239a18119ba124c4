"""Split backward passes: weight gradients are computed later than the gradients of the inputs.

Zero-bubble schedules (https://arxiv.org/abs/2401.10241) hand the gradient of a stage's input back first and compute
weight gradients when nothing else is to be done. A layer takes part by asking in its backward, with the parameter that
it kept from its forward:

    queue = waiting()
    if queue is not None and queue.defer(ctx.weight, lambda: gradient.t() @ x):
        return input_gradient, None
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["WeightGradients", "deferring", "split_linears", "splitting", "waiting"]


class WeightGradients:
    """Weight gradients to be computed later."""

    def __init__(self) -> None:
        self._deferred: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __len__(self) -> int:
        return len(self._deferred)

    def defer(self, parameter: Tensor | None, compute: Callable[[], Tensor]) -> bool:
        """Leave the gradient of `parameter` for later; returns whether it will be computed then.

        Anything but a parameter itself has to be differentiated now: a cast or a view of one, and what unpacking hooks
        make of a saved one (activation checkpointing), whose gradient would go astray once its graph is gone.
        """
        if not isinstance(parameter, nn.Parameter):
            return False
        self._deferred.append((parameter, compute))
        return True

    @torch.no_grad()
    def compute(self) -> None:
        """Compute what was deferred, and accumulate it as a backward pass would: hooks fire, once per parameter."""
        deferred, self._deferred = self._deferred, []
        totals: dict[int, tuple[Tensor, Tensor]] = {}
        for parameter, compute in deferred:
            gradient = compute()
            if id(parameter) in totals:
                gradient = totals[id(parameter)][1] + gradient
            totals[id(parameter)] = (parameter, gradient)
        if totals:
            parameters, gradients = zip(*totals.values())
            torch.autograd.backward(parameters, gradients)


_waiting: WeightGradients | None = None


def waiting() -> WeightGradients | None:
    """Return where to leave weight gradients for later; None when they are wanted now."""
    return _waiting


@contextmanager
def deferring(gradients: WeightGradients) -> Iterator[None]:
    """Let layers leave their weight gradients in `gradients` during the backward pass in this block."""
    global _waiting
    before, _waiting = _waiting, gradients
    try:
        yield
    finally:
        _waiting = before


def split_linears(module: nn.Module) -> int:
    """Make the plain linear layers of `module` take part in split backward passes; returns how many there are.

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
    """Do what `split_linears` does inside the block only."""
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

        queue = waiting()
        dw = None
        db = None
        if wants_weight and (queue is None or not queue.defer(ctx.leaves[0], weight_gradient)):
            dw = weight_gradient()
        if wants_bias and (queue is None or not queue.defer(ctx.leaves[1], bias_gradient)):
            db = bias_gradient()
        return dx, dw, db
