"""A queue of weight gradients, which are computed later than input gradients, for zero-bubble schedules.

The pipeline opens the queue. Layers of any package defer weight gradients, because no other stage waits for them. A
layer takes part by a call in its backward, with the parameter that it kept from its forward:

    return input_gradient, put_off(ctx.weight, lambda: gradient.t() @ x, gradient, x)

A saved tensor does not tell which parameter it is, because hooks of autograd may unpack another object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lightning_parallel.compat.torch import parameters_of, storage_address, version_of

__all__ = [
    "WeightGradients",
    "deferring",
    "put_off",
    "shared_parameters",
    "weight_gradient_queue",
]


class WeightGradients:
    """A queue of weight gradients that are computed later.

    Args:
        at_once: Parameters, by `id`, whose gradients must not be deferred; see `shared_parameters`.
    """

    def __init__(self, at_once: Collection[int] = ()) -> None:
        self._at_once = at_once
        self._deferred: list[tuple[Tensor, Callable[[], Tensor], list[tuple[Tensor, int]]]] = []

    def __len__(self) -> int:
        return len(self._deferred)

    def defer(self, parameter: Tensor | None, compute: Callable[[], Tensor], *reads: Tensor) -> bool:
        """Defer the gradient of `parameter`; returns False if the layer has to compute it now.

        Args:
            parameter: The parameter.
            compute: Computes its gradient.
            reads: The tensors that `compute` reads. They must not change before it runs.
        """
        # Only a parameter itself can wait. The gradient of a cast or a view has to pass through a graph, which backward
        # has freed by then. The same holds for a tensor that hooks have recomputed (activation checkpointing).
        if not isinstance(parameter, nn.Parameter) or id(parameter) in self._at_once:
            return False
        self._deferred.append((parameter, compute, [(tensor, version_of(tensor)) for tensor in reads]))
        return True

    @torch.no_grad()
    def separate(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy each gradient of `parameters` that shares memory with a deferred read.

        The next backward adds to `.grad` in place. Autograd stores an incoming gradient as `.grad` without a copy if
        it sees no other reference. But a sum gives the same tensor to all its terms, and a view hides its base.
        """
        read = {storage_address(tensor.untyped_storage()) for *_, reads in self._deferred for tensor, _ in reads}
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if storage_address(gradient.untyped_storage()) in read:
                parameter.grad = gradient.clone()

    @torch.no_grad()
    def compute(self) -> None:
        """Compute the deferred gradients and accumulate them as a backward pass does: hooks run once per parameter.

        Raises:
            RuntimeError: If a tensor that a deferred gradient reads was changed in place.
        """
        deferred, self._deferred = self._deferred, []
        # Summed before autograd sees them: a layer that ran twice would run its hooks twice.
        totals: dict[int, tuple[Tensor, Tensor]] = {}
        for parameter, compute, reads in deferred:
            if any(version_of(tensor) != version for tensor, version in reads):
                raise RuntimeError(
                    f"A weight of shape {tuple(parameter.shape)} gets its gradient later than the backward pass of its"
                    " layer, but a tensor that the gradient needs was changed in place since. This tensor is the input"
                    " of the layer or the gradient of its output. Change a copy of that tensor, or use a schedule that"
                    " computes all gradients at once, such as `1f1b`"
                )
            gradient = compute()
            if id(parameter) in totals:
                gradient = totals[id(parameter)][1] + gradient
            totals[id(parameter)] = (parameter, gradient)
        if totals:
            parameters, gradients = zip(*totals.values())
            # Through autograd instead of `.grad +=`: data-parallel reduction and the user's hooks wait for it.
            torch.autograd.backward(parameters, gradients)


# One for all threads: autograd runs backward functions of CUDA tensors on its own threads.
class _OpenQueue:
    queue: WeightGradients | None = None


_open = _OpenQueue()

# Not a function of Python: each layer asks in each backward.
weight_gradient_queue: Callable[[], WeightGradients | None] = partial(getattr, _open, "queue")
"""Returns the queue for weight gradients; None if layers must compute them now."""


@contextmanager
def deferring(gradients: WeightGradients) -> Iterator[None]:
    """Let layers defer their weight gradients to `gradients` during the backward pass in this block."""
    before, _open.queue = _open.queue, gradients
    try:
        yield
    finally:
        _open.queue = before


def put_off(parameter: Tensor | None, compute: Callable[[], Tensor], *reads: Tensor) -> Tensor | None:
    """Return the gradient of `parameter` for the caller's backward; None if it is deferred, see `defer`."""
    queue = _open.queue
    return None if queue is not None and queue.defer(parameter, compute, *reads) else compute()


def shared_parameters(module: nn.Module) -> frozenset[int]:
    """Return the parameters of `module` that several modules share, by `id`: their gradients must be complete at once.

    For example, the head and the embedding share a matrix. The embedding computes its gradient in ordinary backward.
    """
    # Read as attributes: while a layer is measured, other tensors take the place of its parameters.
    found = (getattr(child, name) for child in module.modules() for name in parameters_of(child))
    owners = Counter(id(parameter) for parameter in found if parameter is not None)
    return frozenset(parameter for parameter, count in owners.items() if count > 1)
