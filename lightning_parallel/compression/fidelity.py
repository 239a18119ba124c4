"""How close a compressed mean is to the true one, measured now and then by taking that as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.feedback import working_dtype

__all__ = ["Fidelity"]


class Fidelity:
    """Sums over the elements of each parameter, in one step.

    The true mean is that of this step's gradients; what error feedback adds from earlier steps counts as error.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # error^2, true^2, ours^2, ours * true

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
            mine = ours[name].detach().to(mean.dtype)
            sums = [(mine - mean).square().sum(), mean.square().sum(), mine.square().sum(), (mine * mean).sum()]
            self._sums[name] = torch.stack(sums).double()

    def report(self, names: Iterable[str] | None = None) -> dict[str, float]:
        """`relative_error` |ours - true| / |true| and `cosine` of the angle between them; of all parameters, or some.

        Empty where the true mean is zero: nothing can be told.
        """
        chosen = self._sums.keys() if names is None else self._sums.keys() & set(names)
        if not chosen:
            return {}
        error, true, ours, dot = torch.stack([self._sums[name] for name in sorted(chosen)]).sum(0).tolist()
        if true == 0:
            return {}
        return {"relative_error": (error / true) ** 0.5, "cosine": dot / (ours * true) ** 0.5 if ours else 0.0}
