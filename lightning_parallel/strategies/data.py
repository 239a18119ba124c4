"""Data, seeds and metrics follow the data-parallel coordinate: the ranks of one replica are one reader."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups

__all__ = ["scope_metrics", "seed_workers", "share_plateau_metrics"]


def seed_workers(dataloader: object, replica: int) -> object:
    """Under `seed_everything(workers=True)`, seed the loader's workers by replica.

    Lightning would do it by global rank right afterwards, and the ranks of one replica would augment a sample each in
    its own way.
    """
    seeded = int(os.environ.get("PL_SEED_WORKERS", 0))
    if seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=replica)
    return dataloader


def _not_distributed() -> bool:
    return False


def scope_metrics(module: nn.Module, groups: MeshGroups) -> None:
    """Let the module's torchmetrics objects synchronise over replicas, not over the ranks of one replica as well."""
    if groups.replica.size == 1:
        return
    for metric in module.modules():
        if not isinstance(metric, Metric) or metric.process_group is not None:
            continue
        if groups.data_parallel.process_group is None:
            metric.distributed_available_fn = _not_distributed
        else:
            metric.process_group = groups.data_parallel.process_group


def share_plateau_metrics(configs: Sequence[LRSchedulerConfig], group: Group) -> None:
    """Step `ReduceLROnPlateau` with the mean of the replicas' values, so that all replicas keep one learning rate."""
    if group.size == 1:
        return
    for config in configs:
        if config.reduce_on_plateau:
            # A subclass, since a scheduler's attributes are its state and go into the checkpoint.
            kind = type(config.scheduler)
            shared = {"group": group, "__module__": kind.__module__}
            config.scheduler.__class__ = type(kind.__name__, (_SharedPlateau, kind), shared)


class _SharedPlateau(ReduceLROnPlateau):
    group: Group

    def step(self, metrics: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        device = metrics.device if isinstance(metrics, torch.Tensor) else None
        total = comm.all_reduce(torch.as_tensor(metrics, dtype=torch.float64, device=device), self.group)
        super().step(total / self.group.size, *args, **kwargs)
