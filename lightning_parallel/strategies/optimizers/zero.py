"""Shards state over the replicas (ZeRO), inside each pipeline stage and tensor shard: `zero_stage` of the strategies.

    stage   optimizer state     gradients                parameters
    0       full                full                     full
    1       a slice             full, averaged           full; a slice while the optimizer steps
    2       a slice             a slice                  full; a slice from the end of backward to the end of the step

After a step, each replica gathers the parameters that other replicas updated. Stage 1 leaves `.grad` unchanged.
Stage 2 frees gradients as it sends their buckets. Torch's optimizers step on slices with the same number of dimensions.
The user's hooks, and optimizers of the user that compute with full tensors, see full parameters, gradients and states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Optional, get_args

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import Patches
from lightning_parallel.compression import Reducer
from lightning_parallel.data_parallel import ParameterSlices
from lightning_parallel.strategies.optimizers.checks import check_sliced

__all__ = [
    "ZeroStage",
    "check_zero_stage",
    "divide_optimizers",
    "follow_other_steps",
    "make_slices",
    "refuse_zero_stage",
]

ZeroStage = Literal[0, 1, 2]
"""0 shards nothing, 1 shards the optimizer state, 2 also shards the gradients."""


def check_zero_stage(stage: Any, compression: Optional[Reducer]) -> None:
    """Check the argument of a strategy, before any process is started.

    Raises:
        ValueError: If there is no such stage, or it does not go with another argument.
    """
    # `True` equals 1, but a flag is most likely a misplaced argument.
    if isinstance(stage, bool) or stage not in get_args(ZeroStage):
        raise ValueError(f"`zero_stage` must be 0, 1 or 2; got {stage!r}. To shard the parameters as well, use FSDP")
    if stage == 2 and compression is not None:
        raise ValueError(
            "`compression` gives every replica the full mean gradient, but `zero_stage=2` keeps only a slice of it."
            " Use `zero_stage=1`, which shards only the optimizer state, or no compression"
        )


def refuse_zero_stage(stage: Any) -> None:
    """Refuse any stage but 0, for replicas that step independently.

    Raises:
        ValueError: If another one is given.
    """
    if stage != 0:
        raise ValueError(
            f"`zero_stage` must be 0 with LocalSGDStrategy; got {stage!r}. Each replica takes its own steps and"
            " needs the full optimizer state. HybridParallelStrategy shards the optimizer state"
        )


def make_slices(stage: ZeroStage, module: LightningModule, groups: MeshGroups) -> ParameterSlices | None:
    """Return the slices of a module's parameters; None without ZeRO or with one replica.

    Raises:
        ValueError: On every rank, if a parameter cannot be divided, or the module trains in a way that needs full
            gradients.
    """
    if stage == 0 or groups.data_parallel.size == 1:
        return None
    with comm.failing_together(groups.world):
        if stage == 2:
            _check_gradients_unneeded(module)
        slices = ParameterSlices(dict(module.named_parameters()), groups.data_parallel)
        if stage == 2:
            # From backward on, parameters are narrow, and a hook may save the module before the step.
            slices.keep_states_whole(module)
    return slices


def _check_gradients_unneeded(module: LightningModule) -> None:
    """Refuse modules that need full gradients; `hook_watch` watches hooks that read them."""
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"`{kind}` optimizes manually and may need its gradients for several steps, but `zero_stage=2` frees"
            " them after the backward pass. Use `zero_stage=1`"
        )
    if is_overridden("optimizer_zero_grad", module):
        raise ValueError(
            f"`{kind}` overrides `optimizer_zero_grad`, but `zero_stage=2` keeps no gradient after a step. Use"
            " `zero_stage=1`, and `accumulate_grad_batches` to add up gradients"
        )


def divide_optimizers(
    optimizers: Sequence[Optimizer],
    slices: ParameterSlices,
    world: Group,
    patches: Patches,
    shown: Callable[[Optimizer], AbstractContextManager[None]] | None = None,
) -> list[Optimizer]:
    """Let each replica's optimizers update slices, until `patches` are undone; every rank must call it.

    Args:
        optimizers: The optimizers.
        slices: The slices of the replicas.
        world: All ranks.
        patches: Undo the change.
        shown: Runs around the step of an optimizer, to show full tensors to it; None refuses optimizers that need them.

    Returns:
        The user's optimizers whose steps must see full tensors.

    Raises:
        ValueError: On every rank, if an optimizer would compute another update with slices.
    """
    with comm.failing_together(world):
        full = check_sliced(optimizers, slices.group.size, shown is not None)
    for optimizer in optimizers:
        # This function runs again when optimizers change. A second wrapper of `step` would gather twice.
        if not slices.has_divided(optimizer):
            slices.divide(optimizer, patches, shown)
    return full


def follow_other_steps(slices: ParameterSlices, world: Group, patches: Patches) -> None:
    """Divide the steps of optimizers that the module's own `optimizer_step` brings, once a closure made them narrow.

    The first step of such an optimizer has updated slices, which no other code would gather.
    """

    def take(optimizer: Optimizer) -> None:
        # The step has already run with slices, so it is too late to show full tensors.
        divide_optimizers([optimizer], slices, world, patches)
        slices.gather_step(optimizer)

    slices.watch_steps(take)
