"""State divided over the replicas (ZeRO), inside each pipeline stage and tensor shard: `zero_stage` of the strategies.

    stage   optimizer's state   gradients                parameters
    0       whole               whole                    whole
    1       a slice             whole, means as ever     whole; a slice while the optimizer steps

Who reads `.grad` finds what is there without it. After a step the replicas gather what each has updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Optional

from torch import nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import Patches
from lightning_parallel.compression import Reducer
from lightning_parallel.data_parallel import ParameterSlices
from lightning_parallel.strategies.optimization import check_sliced

__all__ = ["ZeroStage", "check_zero_stage", "divide_optimizers", "make_slices", "refuse_zero_stage"]

ZeroStage = Literal[0, 1]


def check_zero_stage(stage: Any, compression: Optional[Reducer]) -> None:
    """Check the argument of a strategy, before any process is started.

    Raises:
        ValueError: If there is no such stage, or it does not go with another argument.
    """
    if isinstance(stage, bool) or stage not in (0, 1):
        raise ValueError(f"`zero_stage` must be 0 or 1, got {stage!r}; for 3, whole parameters divided, use FSDP")


def refuse_zero_stage(stage: Any) -> None:
    """Refuse any stage but 0, for replicas that take steps of their own.

    Raises:
        ValueError: If another one is given.
    """
    if stage != 0:
        raise ValueError(
            "LocalSGDStrategy lets each replica take steps of its own, for which it needs the whole optimizer state:"
            f" `zero_stage` must be 0, got {stage!r}; HybridParallelStrategy divides it"
        )


def make_slices(stage: ZeroStage, module: nn.Module, groups: MeshGroups) -> ParameterSlices | None:
    """Return the slices of a module's parameters; None where there is nothing to divide.

    Raises:
        ValueError: On every rank, if a parameter cannot be divided.
    """
    if stage == 0 or groups.data_parallel.size == 1:
        return None
    failure: Exception | None = None
    slices = None
    try:
        slices = ParameterSlices(dict(module.named_parameters()), groups.data_parallel)
    except ValueError as error:
        failure = error
    comm.raise_together(failure, groups.world)
    return slices


def divide_optimizers(optimizers: Sequence[Optimizer], slices: ParameterSlices, world: Group, patches: Patches) -> None:
    """Let each replica's optimizers update slices, until `patches` are undone; every rank must call it.

    Raises:
        ValueError: On every rank, if an optimizer would compute something else.
    """
    failure: Exception | None = None
    try:
        check_sliced(optimizers, slices.group.size)
    except ValueError as error:
        failure = error
    comm.raise_together(failure, world)
    for optimizer in optimizers:
        slices.divide(optimizer, patches)
