"""Steps that change nothing, because a gradient was not finite."""

from __future__ import annotations

from collections.abc import Collection
from typing import Optional

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

__all__ = ["skip", "warn_of_skip"]

_KEY = "_skipped_backward_passes"


def skip(module: LightningModule, names: Optional[Collection[str]]) -> None:
    """Take the gradients of `names`, or all, away from the optimizers."""
    for name, parameter in module.named_parameters():
        if names is None or name in names:
            parameter.grad = None
    warn_of_skip(module)


def warn_of_skip(module: LightningModule) -> None:
    """Say so the 1st, 2nd, 4th, 8th, ... time."""
    count = module.__dict__[_KEY] = module.__dict__.get(_KEY, 0) + 1
    if count & (count - 1) == 0:
        rank_zero_warn(
            "A gradient was not finite on some rank, or not once encoded (fp16 ends at 65504, bf16 at 3e38): its step "
            f"changes nothing. So far this has happened {count} time{'s' if count > 1 else ''}."
        )
