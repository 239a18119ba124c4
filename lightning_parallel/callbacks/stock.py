"""What can be seen of the communication of Lightning's own strategies, and what cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel.comm.foreign import Foreign, bucket_mean
from lightning_parallel.mesh import AXES, DATA, Mesh

__all__ = ["foreign_of", "show_buckets", "unseen", "waits_unseen"]


def foreign_of(trainer: Trainer, mesh: Mesh) -> Foreign:
    """Names for the groups that others communicate in: axes of the mesh."""
    axes: dict[tuple[int, ...], str] = {
        tuple(ranks): axis for axis in AXES for ranks in mesh.peers(axis) if len(ranks) > 1
    }
    replicas_only = not hasattr(trainer.strategy, "groups") and mesh.data_parallel == mesh.world_size
    return Foreign(axes, DATA if replicas_only else "world")


def show_buckets(trainer: Trainer) -> None:
    """Let DDP reduce its buckets in Python, where that is seen, unless a communication hook does it already."""
    model = trainer.strategy.model
    if isinstance(model, DistributedDataParallel) and not model._comm_hooks:
        model.register_comm_hook(model.process_group, bucket_mean)


def waits_unseen(strategy: Strategy) -> bool:
    """Whether ranks wait for each other inside of forward and backward where that cannot be told from work."""
    if isinstance(strategy, FSDPStrategy):
        return strategy.root_device.type == "cuda"
    return isinstance(strategy, (DeepSpeedStrategy, ModelParallelStrategy))


def unseen(trainer: Trainer) -> Iterator[str]:
    """What happens where it is not seen, in sentences."""
    strategy: Any = trainer.strategy
    if trainer.world_size == 1:
        return
    if isinstance(strategy.model, DistributedDataParallel):
        if any(True for _ in strategy.model.buffers()):
            yield "DDP sends buffers before each forward inside torch, where that is not seen: it counts as forward."
        hooks = [hook for hook, _ in strategy.model._comm_hooks]
        if any(hook is not bucket_mean and not _is_ours(hook) for hook in hooks):
            names = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
            yield f"The communication hook {names} is seen only as far as it calls functions of torch.distributed."
    if isinstance(strategy, FSDPStrategy) and waits_unseen(strategy):
        yield "FSDP communicates in streams of its own: how long computing waits for it counts as forward and backward."
    if isinstance(strategy, ModelParallelStrategy):
        yield "DTensor communicates inside torch, where that is not seen: it counts as forward and backward."
    if isinstance(strategy, DeepSpeedStrategy):
        yield "DeepSpeed's communication is seen only as far as it calls functions of torch.distributed."


def _is_ours(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("lightning_parallel.")
