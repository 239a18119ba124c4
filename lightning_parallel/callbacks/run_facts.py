"""What kind of run it is: what the page says above its pictures, and what the diagnosis has to know."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_parallel.mesh import AXES, Mesh
from lightning_parallel.pipeline.engine import PipelineEngine

__all__ = ["run_facts"]


def run_facts(trainer: Trainer, pl_module: LightningModule, mesh: Mesh) -> dict[str, Any]:
    """Facts of a run whose training begins; those that are not known are left out."""
    strategy = trainer.strategy
    engine = getattr(strategy, "engine", None)
    compression = getattr(strategy, "compression", None)
    samples = getattr(trainer.train_dataloader, "batch_size", None)
    facts = {
        "model": type(pl_module).__name__,
        "strategy": type(strategy).__name__,
        "world_size": trainer.world_size,
        "mesh": {axis: mesh.size(axis) for axis in AXES},
        "replicas": mesh.data_parallel,
        "precision": str(trainer.precision),
        "device": _device(strategy.root_device),
        "schedule": engine.schedule.name if isinstance(engine, PipelineEngine) else None,
        "num_microbatches": engine.schedule.num_microbatches if isinstance(engine, PipelineEngine) else None,
        "compression": None if compression is None else repr(compression),
        "replica_batch": samples,
        "global_batch": samples and samples * mesh.data_parallel * trainer.accumulate_grad_batches,
        "learning_rate": _learning_rate(trainer),
        "learning_rate_scaled": any(type(c).__name__ == "LearningRateScaling" for c in trainer.callbacks),  # type: ignore[attr-defined]
        "versions": {name: version(name) for name in ("lightning-parallel", "lightning", "torch")},
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _learning_rate(trainer: Trainer) -> float | None:
    """The first group's, before a schedule changes it."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return float(groups[0].get("initial_lr", groups[0]["lr"])) if groups else None
