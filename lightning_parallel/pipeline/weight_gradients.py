"""Gradients of weights that are computed later than those of inputs, for zero-bubble schedules.

A layer takes part by asking in its backward, with the parameter that it kept from its forward:

    queue = weight_gradient_queue()
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

from lightning_parallel.compat.torch import parameters_of

__all__ = ["WeightGradients", "deferring", "split_linears", "weight_gradient_queue"]


class WeightGradients:
    """A queue of weight gradients that are computed later."""

    def __init__(self) -> None:
        self._deferred: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __len__(self) -> int:
        return len(self._deferred)

    def defer(self, parameter: Tensor | None, compute: Callable[[], Tensor]) -> bool:
        """Defer the gradient of `parameter`; returns False if the layer has to compute it now."""
        # Only a parameter itself can wait. The gradient of a cast or a view of one has to pass through a graph that is
        # freed by then; so has that of a tensor which hooks recomputed (activation checkpointing).
        if not isinstance(parameter, nn.Parameter):
            return False
        self._deferred.append((parameter, compute))
        return True

    @torch.no_grad()
    def compute(self) -> None:
        """Compute the deferred gradients and accumulate them as a backward pass does: hooks run once per parameter."""
        deferred, self._deferred = self._deferred, []
        # Summed before autograd sees them: a layer that ran twice would run its hooks twice.
        totals: dict[int, tuple[Tensor, Tensor]] = {}
        for parameter, compute in deferred:
            gradient = compute()
            if id(parameter) in totals:
                gradient = totals[id(parameter)][1] + gradient
            totals[id(parameter)] = (parameter, gradient)
        if totals:
            parameters, gradients = zip(*totals.values())
            # Through autograd instead of `.grad +=`: data-parallel reduction and the user's hooks wait for it.
            torch.autograd.backward(parameters, gradients)


# Global instead of thread-local: autograd runs backward functions of CUDA tensors on threads of its own.
_queue: WeightGradients | None = None


def weight_gradient_queue() -> WeightGradients | None:
    """Return the queue for weight gradients; None if they are to be computed now."""
    return _queue


@contextmanager
def deferring(gradients: WeightGradients) -> Iterator[None]:
    """Let layers defer their weight gradients to `gradients` during the backward pass in this block."""
    global _queue
    before, _queue = _queue, gradients
    try:
        yield
    finally:
        _queue = before


def split_linears(module: nn.Module) -> int:
    """Make the plain linear layers of `module` take part in split backward passes; returns how many there are."""
    # A weight that several modules share keeps its ordinary backward, since it has to be complete at once.
    # Read as attributes: while a layer is measured, the parameters that it computes with take the place of its own.
    owners = Counter(id(getattr(child, name)) for child in module.modules() for name in parameters_of(child))
    count = 0
    for child in module.modules():
        # Subclasses, such as tensor-parallel layers, compute something else.
        if type(child) is nn.Linear and owners[id(child.weight)] == 1:
            child.__class__ = _SplitLinear
            count += 1
    return count


class _SplitLinear(nn.Linear):
    """`nn.Linear` with a backward that can defer the gradients of its weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return nn.functional.linear(x, self.weight, self.bias)
        # As autocast does inside `linear`, which leaves double precision alone, but before x is saved: backward
        # multiplies it by a gradient of that dtype.
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
        # Saved tensors come back as other objects under unpacking hooks; only here is known which are parameters.
        ctx.leaves = [leaf if isinstance(leaf, nn.Parameter) else None for leaf in (weight, bias)]
        # What is not 2-D comes out as a view, which autograd lets nobody change in place after a custom function.
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

        queue = weight_gradient_queue()
        dw = None
        db = None
        if wants_weight and (queue is None or not queue.defer(ctx.leaves[0], weight_gradient)):
            dw = weight_gradient()
        if wants_bias and (queue is None or not queue.defer(ctx.leaves[1], bias_gradient)):
            db = bias_gradient()
        return dx, dw, db
