"""The order in which a module becomes parallel, on one screen: equal weights -> plan -> cut -> (data-parallel).

A module that has been cut stays cut: its `Sharding` is kept with it and found again by the next run.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from torch import nn

from lightning_parallel.comm import MeshGroups
from lightning_parallel.strategies import replicas
from lightning_parallel.tensor.discovery import make_plan
from lightning_parallel.tensor.plan import Sharding, UserPlan, apply_plan
from lightning_parallel.tensor.table import sharding_table

__all__ = ["shard_tensors"]


def shard_tensors(
    module: LightningModule, plan: UserPlan, groups: MeshGroups, device: torch.device, sequence_parallel: bool = False
) -> Sharding | None:
    """Divide `module` over the tensor axis, once.

    Raises:
        ValueError: On every rank: see `make_plan` and `apply_plan`; also if the module was cut for other ranks.
    """
    group = groups.tensor_parallel
    done: tuple[tuple[int, ...], Sharding] | None = module.__dict__.get("_tensor_sharding")
    if done is not None:
        if done[0] != group.ranks:
            raise ValueError(
                f"this module was divided over the ranks {done[0]} by an earlier run and cannot be divided over"
                f" {group.ranks}; build it anew and load a checkpoint"
            )
        return done[1]
    if group.size == 1:
        return None
    found = make_plan(module, plan, group, sequence_parallel)
    replicas.materialize(module, device)
    replicas.start_equal(module, groups.world)
    sharding = apply_plan(module, found, group)
    module.__dict__["_tensor_sharding"] = (group.ranks, sharding)
    _show(module, sharding, group.size)
    return sharding


@rank_zero_only
def _show(module: nn.Module, sharding: Sharding, ranks: int) -> None:
    Console().print(sharding_table(module, sharding, ranks))
