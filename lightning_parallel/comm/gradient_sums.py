"""Adds gradients of 16-bit parameters in single precision: `gradient_sum_dtype`.

    parameter.grad       the sum, rounded to the dtype of the parameter: hooks and optimizers read it
    an attribute of it   the exact sum, from the second gradient to the end of the reduction

The exact sum lives as long as the tensor in `.grad`. So `zero_grad` and any new `.grad` end it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

__all__ = [
    "HALF_DTYPES",
    "add_gradient",
    "assign_gradient",
    "bytes_of_exact",
    "drop_exact",
    "exact_gradient",
    "sum_exactly",
    "summed_dtype",
]

HALF_DTYPES = (torch.bfloat16, torch.float16)

_EXACT = "_lightning_parallel_exact_sum"


def summed_dtype(dtype: torch.dtype, sum_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which gradients of a parameter are added.

    Args:
        dtype: The dtype of the parameter.
        sum_dtype: The dtype for 16-bit parameters; None for the dtype of the parameter.
    """
    return sum_dtype if dtype in HALF_DTYPES and sum_dtype is not None else dtype


def exact_gradient(gradient: Tensor) -> Tensor:
    """Return the exact sum behind a gradient; the gradient itself if it is no rounded sum."""
    total = getattr(gradient, _EXACT, None)
    if total is None or total.shape != gradient.shape:
        return gradient
    # Code may have written into `.grad` since. No version tells it: `.grad.data.zero_()` counts no version. So each
    # element of the exact sum is valid only where it still rounds to the element of `.grad`.
    return torch.where(gradient == total.to(gradient.dtype), total, gradient.to(total.dtype))


def assign_gradient(parameter: Tensor, total: Tensor) -> None:
    """Set `.grad` to a sum, rounded once to the dtype of the parameter; `exact_gradient` returns the sum."""
    gradient = total.to(parameter.dtype)
    if gradient is not total:
        setattr(gradient, _EXACT, total)
    parameter.grad = gradient


@torch.no_grad()
def add_gradient(parameter: Tensor, gradient: Tensor, sum_dtype: torch.dtype | None) -> None:
    """Add a gradient to `.grad` in the dtype of `summed_dtype`."""
    dtype = summed_dtype(parameter.dtype, sum_dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    elif dtype == parameter.dtype:
        parameter.grad.add_(gradient)
    else:
        assign_gradient(parameter, exact_gradient(parameter.grad).to(dtype) + exact_gradient(gradient))


def bytes_of_exact(parameter: Tensor) -> int:
    """Return the bytes of the exact sum behind `.grad`; 0 without a sum."""
    total = None if parameter.grad is None else getattr(parameter.grad, _EXACT, None)
    return 0 if total is None else int(total.nbytes)


def drop_exact(parameter: Tensor) -> None:
    """Free the exact sum behind `.grad`; `.grad` stays."""
    if parameter.grad is not None and hasattr(parameter.grad, _EXACT):
        delattr(parameter.grad, _EXACT)


def sum_exactly(parameter: Tensor, dtype: torch.dtype) -> list[Any]:
    """Let autograd add gradients of a parameter in `dtype`.

    Returns:
        Handles that undo this by `remove`; keep them, because they keep autograd's node alive.
    """
    waiting: list[Tensor] = []

    def before(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, ...] | None:
        new, old = gradients[0], parameter.grad
        # A graph of gradients (`create_graph=True`) needs torch's own sum.
        if new is None or old is None or torch.is_grad_enabled() or new.is_sparse or old.is_sparse:
            return None
        total = exact_gradient(old).to(dtype) + new
        waiting.append(total)
        # Autograd would add the rounded sum to `.grad`. Without a `.grad` it stores the sum.
        parameter.grad = None
        return (total.to(parameter.dtype),)

    def after(_: Tensor) -> None:
        total = waiting.pop() if waiting else None
        if total is not None and parameter.grad is not None:
            setattr(parameter.grad, _EXACT, total)

    # A hook of the node, since it runs after all hooks of the tensor, which may change the new gradient.
    node = get_gradient_edge(parameter).node
    return [_Kept(node, node.register_prehook(before)), parameter.register_post_accumulate_grad_hook(after)]


class _Kept:
    """A handle that keeps a node alive: a parameter holds its node only weakly."""

    def __init__(self, node: Any, handle: Any) -> None:
        self._node = node
        self._handle = handle

    def remove(self) -> None:
        self._handle.remove()
        self._node = None
