"""Losses and gradients that are not finite: all ranks take the same action.

The guard is no part of `AutoResume`. The guard communicates in each optimizer step, and `AutoResume` only for
checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.default_group import all_processes
from lightning_parallel.compat.precision import norms_of
from lightning_parallel.compat.twins import Callback

__all__ = ["NonFiniteAction", "NonFiniteGuard"]

NonFiniteAction = Literal["ignore", "skip", "stop", "raise"]
"""Reaction to a loss or gradient that is not finite."""


class NonFiniteGuard(Callback):
    """Takes the same action on all ranks if a loss or a gradient is not finite on one rank.

    The guard acts before the optimizer step, so the weights and the optimizer's moments stay unchanged. It names the
    ranks, the step and the first parameter. Gradients are checked after they were averaged: one replica's fault shows
    on all replicas. The loss is checked on each rank. If the loss is not finite either, it tells which rank caused the
    fault.

    In each optimizer step, the guard costs one message of a few bytes between the hosts and one pass over the
    gradients. Under `16-mixed` the gradient scaler skips such steps, and the guard does nothing. Without the
    guard, strategies with `compression` already skip a step whose gradients are not finite.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import NonFiniteGuard

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[NonFiniteGuard("skip")])
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        action: `skip` skips the step and goes on. `stop` skips the step and ends training, as `trainer.should_stop`
            does. `raise` raises an error on all ranks. `ignore` checks nothing and communicates nothing.

    Raises:
        ValueError: If `action` is none of these values.
    """

    def __init__(self, action: NonFiniteAction = "raise") -> None:
        if action not in get_args(NonFiniteAction):
            raise ValueError(
                f"`action` must be one of {', '.join(map(repr, get_args(NonFiniteAction)))}; got {action!r}"
            )
        self.action = action
        self.skipped_steps = 0
        self._losses: list[Tensor] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses.clear()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self.action != "ignore":
            self._losses.append(loss.detach())

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        losses, self._losses = self._losses, []
        # A gradient scaler skips such steps by itself.
        if self.action == "ignore" or getattr(trainer.precision_plugin, "scaler", None) is not None:
            return
        gradients = list(_gradients(pl_module))
        # Reduce to one number, so that the host waits for the device only once.
        largest = norms_of([value for _, value in gradients], math.inf)
        values = [loss.abs().max() for loss in losses] + largest
        # With offloading, gradients are on several devices.
        is_finite = not values or bool(torch.stack([value.to(values[0].device) for value in values]).isfinite().all())
        # Not torch's default group, which may hold the replicas of this rank alone.
        world = Group.of(all_processes())
        # All ranks must decide alike: if a single rank took the step, replicas would differ.
        if not comm.on_any_rank([not is_finite], world)[0]:
            return
        has_loss = all(bool(loss.isfinite().all()) for loss in losses)
        first = next((name for (name, _), norm in zip(gradients, largest) if not bool(norm.isfinite())), "")
        found = comm.all_gather_object((has_loss, first), world)
        message = f"In optimizer step {trainer.global_step}, {_described(found)}"
        if self.action == "raise":
            raise RuntimeError(f"{message}. The weights are unchanged since the step before [LP033]")
        for parameter in pl_module.parameters():
            parameter.grad = None  # optimizers leave such parameters alone
        self.skipped_steps += 1
        if self.action == "stop":
            trainer.should_stop = True
        # Warn after 1, 2, 4, 8, ... skipped steps: a run that skips each step must not fill its log.
        if self.skipped_steps & (self.skipped_steps - 1) == 0:
            times = f"; {self.skipped_steps} steps so far" if self.skipped_steps > 1 else ""
            rank_zero_warn(
                f"{message}. The step is skipped{', and training ends' * (self.action == 'stop')}{times} [LP033]"
            )


def _gradients(module: LightningModule) -> Iterator[tuple[str, Any]]:
    """Yield this rank's parts of the module's gradients."""
    for name, parameter in module.named_parameters():
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
            if gradient.numel():
                yield name, gradient.detach()


def _described(found: list[tuple[bool, str]]) -> str:
    """Name the ranks and values that are not finite: losses first, because their ranks cause the fault."""
    by_loss = [str(rank) for rank, (is_finite, _) in enumerate(found) if not is_finite]
    by_name: dict[str, list[str]] = {}
    for rank, (_, name) in enumerate(found):
        if name:
            by_name.setdefault(name, []).append(str(rank))
    parts = [f"the loss of rank {', '.join(by_loss)} is not finite"] if by_loss else []
    parts += [f"the gradient of `{name}` is not finite on rank {', '.join(ranks)}" for name, ranks in by_name.items()]
    return "; ".join(parts)
