"""Several small integers in one byte."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["pack_nibbles", "pack_signs", "unpack_nibbles", "unpack_signs"]


def pack_nibbles(levels: Tensor) -> Tensor:
    """Bytes (..., n / 2) of integers in [-8, 7], (..., n) with n even."""
    pairs = levels.view(*levels.shape[:-1], -1, 2)
    return ((pairs[..., 0] & 15) | (pairs[..., 1] << 4)).view(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Integers (..., 2 n), int8, from bytes (..., n)."""
    signed = packed.view(torch.int8)
    return torch.stack([(signed << 4) >> 4, signed >> 4], dim=-1).flatten(-2)


def pack_signs(numbers: Tensor) -> Tensor:
    """Bytes (..., n / 8), one bit per number, (..., n) with n a multiple of 8: set where it is not negative."""
    positive = numbers >= 0
    if numbers.device.type == "cpu":
        return torch.from_numpy(np.packbits(positive.numpy(), axis=-1, bitorder="little"))
    bits = positive.view(*numbers.shape[:-1], -1, 8).to(torch.uint8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=numbers.device)).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """+1 and -1, (..., 8 n), from bytes (..., n)."""
    if packed.device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.contiguous().numpy(), axis=-1, bitorder="little"))
    else:
        bits = ((packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten(-2)
    return bits.to(dtype).mul_(2).sub_(1)
