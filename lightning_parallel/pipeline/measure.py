"""What each layer costs: measured on made-up data, or counted in parameters.

Each layer is run alone, forward and backward, on random tensors of the shapes that the step gives it; layers of one
kind are measured once. Nothing but the layer under measurement computes, so a model on the meta device can be
measured too, a layer at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_parallel.pipeline.observe import Observation, Step
from lightning_parallel.pipeline.partition import Balance
from lightning_parallel.pipeline.simulate import Cost
from lightning_parallel.pipeline.trunk import Trunk

__all__ = ["Costs", "measure"]


@dataclass(frozen=True)
class Costs:
    """Cost of each layer, and of what comes before and after them."""

    layers: tuple[Cost, ...]
    prologue: Cost = Cost()
    epilogue: Cost = Cost()


def measure(
    module: nn.Module,
    trunk: Trunk,
    seen: Observation,
    example: tuple[Step, Any] | None,
    balance: Balance,
    device: torch.device,
) -> Costs:
    """Count parameters."""
    layers = [Cost(resident_bytes=_bytes(list(layer.parameters()))) for layer in trunk.layers]
    return Costs(tuple(layers))


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
