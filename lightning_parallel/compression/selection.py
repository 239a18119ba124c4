"""The k elements of largest magnitude."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["largest"]

_STRIDE = 61  # of the sample from which a first threshold is taken


def largest(rows: Tensor, k: int) -> Tensor:
    """Positions (rows, k) of the k largest magnitudes in each row of (rows, n), ascending.

    NaN and infinity count as largest. Of equal magnitudes at the boundary the first are taken on the CPU.
    """
    if rows.device.type != "cpu":
        return rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    integers = torch.int64 if rows.dtype == torch.float64 else torch.int32
    # Without its sign bit, a float orders as an integer does, NaN above all.
    magnitudes = rows.view(integers).bitwise_and(torch.iinfo(integers).max).numpy()
    return torch.stack([torch.from_numpy(_largest(row, k)) for row in magnitudes])


def _largest(magnitudes: np.ndarray, k: int) -> np.ndarray:
    candidates = np.flatnonzero(magnitudes >= _threshold(magnitudes, k))
    if len(candidates) < k:  # the sample misled
        candidates = np.arange(len(magnitudes))
    chosen = magnitudes[candidates]
    boundary = np.partition(chosen, len(chosen) - k)[len(chosen) - k]
    above = chosen > boundary
    ties = np.flatnonzero(chosen == boundary)[: k - np.count_nonzero(above)]
    above[ties] = True
    return candidates[above]


def _threshold(magnitudes: np.ndarray, k: int) -> np.integer:
    """A magnitude that, as a sample tells, somewhat more than k elements reach."""
    sample = magnitudes[:: min(_STRIDE, max(1, k // 16))]
    share = k / len(magnitudes) * len(sample)
    rank = min(len(sample), int(share + 4 * share**0.5) + 1)
    return np.partition(sample, len(sample) - rank)[len(sample) - rank]
