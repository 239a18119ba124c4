"""What the Trainer, loggers and callbacks exchange between the processes of a mesh."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups

__all__ = ["MeshCollectives"]


class MeshCollectives(ParallelStrategy):
    """The collectives that every strategy offers, over replicas or all ranks."""

    _groups: MeshGroups | None = None

    @property
    def groups(self) -> MeshGroups:
        """This rank's process groups; there are none before the processes have met."""
        if self._groups is None:
            raise RuntimeError("the process groups exist only while the Trainer runs; there is none yet")
        return self._groups

    @override
    def reduce(
        self,
        tensor: Union[Tensor, Any],
        group: Optional[Any] = None,
        reduce_op: Optional[Union[ReduceOp, str]] = "mean",
    ) -> Union[Tensor, Any]:
        """Reduce over the replicas, unless another `group` is given: the ranks of one replica hold the same value."""
        if not isinstance(tensor, Tensor):
            return tensor
        if group is None and self.groups.data_parallel.process_group is None:
            return tensor
        return _sync_ddp_if_available(tensor, group or self.groups.data_parallel.process_group, reduce_op=reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        verdict = torch.tensor(int(decision), device=self.root_device)
        return bool(comm.all_reduce_(verdict, self.groups.world, "min" if all else "max"))

    @override
    def all_gather(self, tensor: Tensor, group: Optional[Any] = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data-parallel replicas, unless another `group` is given: (replicas, *shape)."""
        group = None if group is dist.group.WORLD else group  # what `LightningModule.all_gather` passes by default
        if group is None and self.groups.data_parallel.process_group is None:
            return tensor.unsqueeze(0) if self.world_size > 1 else tensor
        return super().all_gather(tensor, group or self.groups.data_parallel.process_group, sync_grads)

    @override
    def barrier(self, name: Optional[str] = None) -> None:
        if self._groups is not None:
            comm.barrier(self.groups.world)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return comm.broadcast_object(obj, self.groups.world, src) if self._groups is not None else obj
