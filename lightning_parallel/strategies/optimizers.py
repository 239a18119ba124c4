"""Optimizers on ranks that hold few of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import Group

__all__ = ["empty_allowed", "require_parameters"]


@contextmanager
def empty_allowed() -> Iterator[None]:
    """Inside the block optimizers may be built without parameters, as on a stage whose layers are frozen."""
    build = Optimizer.__init__

    def built(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        if not isinstance(params, Tensor):
            params = list(params) or [{"params": []}]
        build(self, params, defaults)

    with mock.patch.object(Optimizer, "__init__", built):
        yield


def require_parameters(optimizers: Sequence[Optimizer], group: Group) -> None:
    """See that each optimizer has parameters on some rank of `group`.

    Raises:
        ValueError: On every rank, if one has none, as torch would in one process.
    """
    mine = [sum(len(part["params"]) for part in optimizer.param_groups) for optimizer in optimizers]
    for index, counts in enumerate(zip(*comm.all_gather_object(mine, group))):
        if not any(counts):
            raise ValueError(f"`{type(optimizers[index]).__name__}` got an empty parameter list on every stage")
