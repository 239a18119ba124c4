"""The k elements of largest magnitude."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["largest"]

_STRIDE = 61  # of the sample from which a first threshold is taken
_PIECE = 1 << 16  # elements looked at in one go: they stay in the cache


def largest(rows: Tensor, k: int) -> Tensor:
    """Positions (rows, k) of the k largest magnitudes in each row of (rows, n), ascending.

    NaN and infinity count as largest. Of equal magnitudes at the boundary the first are taken on the CPU.
    """
    if rows.device.type != "cpu":
        return rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    integers = torch.int64 if rows.dtype == torch.float64 else torch.int32
    return torch.stack([torch.from_numpy(_largest(row, k)) for row in rows.contiguous().view(integers).numpy()])


def _largest(bits: np.ndarray, k: int) -> np.ndarray:
    # Without its sign bit, a float orders as an integer does, NaN above all.
    mask = np.iinfo(bits.dtype).max
    threshold = _threshold(bits[:: min(_STRIDE, max(1, k // 16))] & mask, k / len(bits))
    candidates, magnitudes = [], []
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE] & mask
        found = np.flatnonzero(piece >= threshold)
        candidates.append(found + start)
        magnitudes.append(piece[found])
    positions, chosen = np.concatenate(candidates), np.concatenate(magnitudes)
    if len(positions) < k:  # the sample misled
        positions, chosen = np.arange(len(bits)), bits & mask
    boundary = np.partition(chosen, len(chosen) - k)[len(chosen) - k]
    above = chosen > boundary
    ties = np.flatnonzero(chosen == boundary)[: k - np.count_nonzero(above)]
    above[ties] = True
    return positions[above]


def _threshold(sample: np.ndarray, share: float) -> np.integer:
    """A magnitude that, as a sample tells, somewhat more than the wanted share of all elements reach."""
    expected = share * len(sample)
    rank = min(len(sample), int(expected + 4 * expected**0.5) + 1)
    return np.partition(sample, len(sample) - rank)[len(sample) - rank]
