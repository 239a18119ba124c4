"""How processes start and meet; the main process gets the full weights back from those started as functions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from typing_extensions import override

__all__ = ["SpawnLauncher", "announce_rank", "connect"]


class SpawnLauncher(_MultiProcessingLauncher):
    """Lightning's launcher, returning the merged state dict instead of rank 0's shards."""

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        full = self._strategy.lightning_module_state_dict()  # every rank takes part
        module = trainer.lightning_module
        module.state_dict = lambda *_, **__: full  # type: ignore[assignment,method-assign]
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.__dict__["state_dict"]


def announce_rank(rank: int) -> None:
    """Tell both copies of `rank_zero_only` who this process is."""
    for decorator in (rank_zero_only, utilities_rank_zero_only):
        decorator.rank = rank  # type: ignore[attr-defined]


def connect(
    environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta | None
) -> None:
    """Start the default process group, if there is none; its backend by the device unless one is given."""
    backend = backend or dist.Backend.default_device_backend_map.get(device.type, "gloo")
    _init_dist_connection(environment, backend, timeout=timeout, device_id=None if device.type == "cpu" else device)
