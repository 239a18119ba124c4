"""What would be silently wrong under a mesh is refused, on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.strategies.replicas import fingerprint
from lightning_parallel.tensor.sharding import Shard

__all__ = ["check_callbacks", "check_optimizers", "check_same_batch"]

# Optimizers of torch whose update of one element depends on the other elements of the tensor.
WHOLE_TENSOR_OPTIMIZERS = {"LBFGS", "Adafactor", "Muon"}


def check_same_batch(batch: Any, group: Group) -> None:
    """Compare a batch between the ranks of one replica, which must all read the same.

    Raises:
        ValueError: On every rank of `group`, if the batches differ.
    """
    if group.size == 1:
        return
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    seen = [(tuple(tensor.shape), str(tensor.dtype), fingerprint(tensor)) for tensor in tensors]
    everyone = comm.all_gather_object(seen, group)
    different = [rank for rank, other in zip(group.ranks, everyone) if other != everyone[0]]
    if different:
        shapes = {rank: [entry[0] for entry in other] for rank, other in zip(group.ranks, everyone)}
        raise ValueError(
            f"the ranks {list(group.ranks)} hold one replica and must get the same batch, but the epoch's first batch"
            f" of rank {', '.join(map(str, different))} differs from that of rank {group.ranks[0]} (shapes: {shapes})."
            " Shard data by the data-parallel coordinate (`trainer.strategy.distributed_sampler_kwargs`), not by"
            " the global rank, and seed every rank alike"
        )


def check_callbacks(trainer: Trainer) -> None:
    """Refuse the search for the largest batch: when one rank runs out of memory, its peers wait for it.

    Raises:
        ValueError: If the Trainer has a `BatchSizeFinder`.
    """
    if trainer.world_size > 1 and any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ValueError("the batch size cannot be searched for on several ranks; set it, or search on one device")


def check_optimizers(optimizers: Sequence[Optimizer], names: Mapping[int, str], rules: Mapping[str, Shard]) -> None:
    """Refuse optimizers that look at whole tensors where only a shard is here.

    Raises:
        ValueError: With the optimizer and one of the sharded parameters it holds.
    """
    for optimizer in optimizers:
        if not any(kind.__name__ in WHOLE_TENSOR_OPTIMIZERS for kind in type(optimizer).__mro__):
            continue
        held = [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]
        sharded = [name for name in held if name in rules]
        if sharded:
            raise ValueError(
                f"`{type(optimizer).__name__}` computes with whole tensors, but `{sharded[0]}` and"
                f" {len(sharded) - 1} other parameters are divided over tensor-parallel ranks. Use an elementwise"
                " optimizer (SGD, Adam, AdamW, ...) for them, or keep them whole with `plan={'...': 'replicate'}`"
            )
