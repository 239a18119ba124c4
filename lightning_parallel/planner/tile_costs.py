"""The costs of MLPs and of a head with its loss that run in tiles (`tiled="auto"`).

In the rehearsal, an MLP keeps its input, and backward runs the MLP again, as with tiles. The head runs whole, because a
loss in tiles needs values. Both take nearly the same time. These bytes replace the bytes of the whole head:

    N E   hidden states: the head's input, its gradient, and the input of the norm before it, in fp32
    C E   the gradient of the weight, in fp32, which forward computes
    n C   a tile of logits: logits, log-probabilities and gradients, in fp32, and beside them logits in half precision

Legend: N positions, n positions of a tile, E features, C classes of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_parallel.compat.torch import CALLS, AroundCalls
from lightning_parallel.step_trace.record import StepTrace
from lightning_parallel.tensor.tile_plan import find_tiles
from lightning_parallel.tensor.tiled_modules import gathers_sequence, width_here
from lightning_parallel.tensor.tiles import tiling_of

__all__ = ["HeadBytes", "tile_for_plan"]

_WIDE = 4
"""Bytes of an element in single precision."""


class HeadBytes:
    """Notes the sizes of a head while it runs whole; see `AroundCalls`.

    Attributes:
        of_positions: The bytes of its last call in tiles, without the gradient of the weight; None before a call.
        of_weight: The bytes of that gradient.
    """

    def __init__(self) -> None:
        self.of_positions: float | None = None
        self.of_weight = 0.0

    def around(self, weight: Tensor) -> Callable[[Callable[..., Any], Any, Any], Any]:
        """Return what to run around the calls of a layer, given its weight (C, E)."""

        def run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            hidden: Tensor = args[0] if args else next(iter(kwargs.values()))
            classes = min(weight.shape[0], result.shape[-1])
            positions, features = hidden.shape[:-1].numel(), hidden.shape[-1]
            itemsize = result.element_size()
            self.of_positions = head_bytes(positions, features, classes, itemsize)
            self.of_weight = classes * features * max(itemsize, _WIDE)
            return result

        return run


def head_bytes(positions: int, features: int, classes: int, itemsize: int) -> float:
    """Return the bytes that a head and its loss hold in tiles, without the gradient of the weight.

    Args:
        positions: Positions of a microbatch.
        features: Features of each.
        classes: Classes of a rank.
        itemsize: Bytes of a logit.
    """
    rows = tiling_of(positions, features, classes, itemsize).rows
    wide = max(itemsize, _WIDE)
    half = itemsize if itemsize < _WIDE else 0
    return positions * features * (2 * itemsize + wide) + rows * classes * (3 * wide + 2 * half)


def tile_for_plan(module: nn.Module, trace: StepTrace | None) -> HeadBytes:
    """Let the MLPs of a model run in tiles, and its head note its sizes.

    Args:
        module: The model, divided.
        trace: The record of the full model.
    """
    plan, head = find_tiles(trace), HeadBytes()
    for path in plan.heads:
        layer = module.get_submodule(path)
        vars(layer)[CALLS] = AroundCalls(layer, head.around(layer.weight))  # type: ignore[arg-type]
    for path, width in plan.mlps.items():
        child = module.get_submodule(path)
        if not gathers_sequence(child):
            vars(child)[CALLS] = AroundCalls(child, partial(_run_again_in_backward, width_here(child, width)))
    return head


def _run_again_in_backward(width: int, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an MLP with an inner tensor of `width` features."""
    x = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(x, Tensor) or x.dim() != 3 or not torch.is_grad_enabled():
        return run(*args, **kwargs)
    if tiling_of(x.shape[0] * x.shape[1], x.shape[2], width, x.element_size()).count == 1:
        return run(x)
    # Each tile runs to its end.
    with set_checkpoint_early_stop(False):
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
