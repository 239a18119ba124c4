"""Weight gradients that may be computed later than the gradients of the inputs.

Some pipeline schedules hand the gradient of a stage's input back first and compute weight gradients when nothing else
is to be done. A layer takes part by asking in its backward, with the parameter that it kept from its forward:

    waiting = weight_gradients.waiting()
    if waiting is not None and waiting.defer(ctx.weight, lambda: gradient.t() @ x):
        return input_gradient, None
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["WeightGradients", "deferring", "waiting"]


class WeightGradients:
    """Gradients to be computed later."""

    def __init__(self) -> None:
        self._deferred: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __len__(self) -> int:
        return len(self._deferred)

    def defer(self, parameter: Tensor | None, compute: Callable[[], Tensor]) -> bool:
        """Leave the gradient of `parameter` for later; says whether it will be computed then.

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
    """Where to leave weight gradients for later; None when they are wanted now."""
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
