"""Sizes of tiles: how many positions are computed at a time.

A tile with few positions reads the weight for little work. A tile with many positions needs memory. So a tile takes
about as many bytes as the hidden states, within limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LEAST_BYTES", "LEAST_ROWS", "MOST_BYTES", "Tiling", "tiling_of", "wide_zeros"]

LEAST_BYTES = 16 << 20
"""Smaller tiles would save no memory that counts."""

LEAST_ROWS = 512
"""Each tile adds to the gradient of the weight, whose memory traffic would exceed the products of fewer positions."""

MOST_BYTES = 512 << 20
"""The weight is read in less time than a tile of this size takes."""


@dataclass(frozen=True)
class Tiling:
    """How positions are divided into tiles.

    Attributes:
        count: Number of tiles.
        rows: Positions of a tile.
        bytes: Bytes of a tile.
    """

    count: int
    rows: int
    bytes: int


def tiling_of(positions: int, features: int, width: int, itemsize: int) -> Tiling:
    """Return tiles for the largest tensor of a computation on hidden states.

    Args:
        positions: Positions of the hidden states.
        features: Features of each.
        width: Elements for each position of the largest tensor, such as the classes of logits.
        itemsize: Bytes of an element.
    """
    size = max(1, width * itemsize)
    wanted = min(max(positions * features * itemsize, LEAST_BYTES), MOST_BYTES)
    count = max(1, math.ceil(positions * size / wanted))
    rows = max(1, math.ceil(positions / count), min(positions, LEAST_ROWS))
    return Tiling(max(1, math.ceil(positions / rows)), rows, rows * size)


def wide_zeros(tensor: Tensor) -> Tensor:
    """Return zeros for a sum over tiles, which needs more digits than half precision has."""
    kind = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    return torch.zeros_like(tensor, dtype=kind, memory_format=torch.contiguous_format)
