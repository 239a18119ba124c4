"""Make a precision plugin see the whole mesh: one gradient norm, one verdict on overflow.

There is no strategy hook for clipping: `LightningModule.clip_gradients` goes to the precision plugin, and torch's own
`clip_grad_norm_`, which many modules call by themselves, knows this rank's shards only. Both are corrected here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.gradients import clip_coefficient, total_norm

if TYPE_CHECKING:
    from lightning_parallel.strategies.base import MeshStrategy

__all__ = ["mesh_wide_norms", "span_mesh"]

# The function inside torch's `clip_grad_norm_` that takes the norm of a list of gradients.
_TORCH_NORM = "_get_total_norm" if hasattr(clip_grad, "_get_total_norm") else "get_total_norm"


def span_mesh(plugin: Precision, strategy: MeshStrategy) -> None:
    """Give `plugin` the mesh-wide norm and overflow check of `strategy`; its class and its state stay as they are."""
    if strategy.groups.replica.size == 1:
        return

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float, norm_type: float = 2.0) -> Tensor:
        gradients = [parameter.grad for parameter in plugin.main_params(optimizer) if parameter.grad is not None]
        norm = strategy_norm(strategy, gradients, norm_type)
        coefficient = clip_coefficient(norm, clip_val)
        for gradient in gradients:
            gradient.mul_(coefficient.to(gradient))
        return norm

    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[assignment,method-assign]
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not hasattr(scaler, "_spans_mesh"):
        scaler._unscale_grads_ = _unscale_together(scaler._unscale_grads_, strategy)
        scaler._spans_mesh = True


def strategy_norm(strategy: MeshStrategy, gradients: Iterable[Tensor], norm_type: float) -> Tensor:
    """The norm over the whole replica of the given gradients of `strategy`'s module."""
    assert strategy.lightning_module is not None
    names = {
        id(parameter.grad): name
        for name, parameter in strategy.lightning_module.named_parameters()
        if parameter.grad is not None
    }
    named = {names.get(id(gradient), f"unnamed {index}"): gradient for index, gradient in enumerate(gradients)}
    return total_norm(named, strategy.rules, strategy.groups, norm_type, strategy.counted_elsewhere)


def _unscale_together(unscale: Callable[..., dict[Any, Tensor]], strategy: MeshStrategy) -> Callable[..., Any]:
    """An overflow on any rank of the replica is one on all of them; else they would disagree on skipping the step."""

    def unscale_grads_(*args: Any, **kwargs: Any) -> dict[Any, Tensor]:
        found = unscale(*args, **kwargs)
        verdict = found.get(strategy.root_device)
        verdict = torch.zeros((), device=strategy.root_device) if verdict is None else verdict
        found[strategy.root_device] = comm.all_reduce(verdict, strategy.groups.replica, "max")
        return found

    return unscale_grads_


@contextmanager
def mesh_wide_norms(strategy: MeshStrategy) -> Iterator[None]:
    """Inside the block, torch's `clip_grad_norm_` takes the norm over the whole replica."""
    if strategy._groups is None or strategy.groups.replica.size == 1:
        yield
        return

    def norm(tensors: Iterable[Tensor], norm_type: float = 2.0, *_: Any, **__: Any) -> Tensor:
        return strategy_norm(strategy, list(tensors), norm_type)

    with mock.patch.object(clip_grad, _TORCH_NORM, norm):
        yield
