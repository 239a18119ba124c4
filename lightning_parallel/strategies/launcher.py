"""Processes started as functions (spawn, fork): the main process gets the full weights back."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from typing_extensions import override

__all__ = ["SpawnLauncher"]


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
