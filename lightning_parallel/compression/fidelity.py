"""How close a compressed mean is to the true one, measured now and then by taking that as well."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.feedback import working_dtype

__all__ = ["Fidelity"]


class Fidelity:
    """Sums over the buckets of one step.

    The true mean is that of this step's gradients; what error feedback adds from earlier steps counts as error.
    """

    def __init__(self) -> None:
        self._dot = self._ours = self._true = self._error = 0.0

    @staticmethod
    def true_means(named_gradients: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
        """The exact means, in new tensors, by one all-reduce per tensor."""
        return {
            name: comm.all_reduce_(gradient.detach().to(working_dtype(gradient.dtype), copy=True).contiguous(), group)
            / group.size
            for name, gradient in sorted(named_gradients.items())
        }

    def add(self, ours: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> None:
        """Count one bucket's approximate and true means."""
        for name, mean in true.items():
            approximation = ours[name].detach().to(mean.dtype)
            self._dot += float((approximation * mean).sum())
            self._ours += float(approximation.square().sum())
            self._true += float(mean.square().sum())
            self._error += float((approximation - mean).square().sum())

    def report(self) -> dict[str, float]:
        """`relative_error` |ours - true| / |true| and `cosine` of the angle between them."""
        tiny = torch.finfo(torch.float64).tiny
        return {
            "relative_error": (self._error / max(self._true, tiny)) ** 0.5,
            "cosine": self._dot / max((self._ours * self._true) ** 0.5, tiny),
        }
