"""The processes of a mesh, as Lightning sees them: ranks, groups, collectives, and which rank reads which data."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Optional, Union

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups, heartbeat
from lightning_parallel.compat.lightning import (
    ScriptLauncher,
    set_device_mesh,
    sync_tensor,
)
from lightning_parallel.mesh import DATA, TENSOR, Axis, Mesh, Size
from lightning_parallel.strategies import processes
from lightning_parallel.strategies.deferred_init import deferred_init

__all__ = ["MeshProcesses", "StartMethod"]

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class MeshProcesses(ParallelStrategy):
    """Starts the processes of a mesh and lets the Trainer, loggers and callbacks communicate over it.

    Args:
        sizes: Ranks along each axis, or `"auto"`.
        process_group_backend, timeout, start_method: See `MeshStrategy`.
        kwargs: Lightning's own.
    """

    def __init__(
        self,
        sizes: Mapping[Axis, Size],
        process_group_backend: Optional[str],
        timeout: Optional[timedelta],
        start_method: StartMethod,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_nodes = 1
        self._sizes = dict(sizes)
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method: StartMethod = start_method
        self._mesh: Mesh | None = None
        self._groups: MeshGroups | None = None
        self._device_mesh: DeviceMesh | None = None
        self._built_apart = False

    # ---------------------------------------------------------------------------------- processes, ranks, groups

    @property
    def module(self) -> LightningModule:
        """The user's module.

        Raises:
            RuntimeError: If the Trainer has not connected one yet.
        """
        if self.lightning_module is None:
            raise RuntimeError("the strategy has no module yet; it gets one from `Trainer.fit`, `validate`, ...")
        return self.lightning_module

    @property
    def mesh(self) -> Mesh:
        """The mesh of all processes.

        Raises:
            ValueError: If the axis sizes do not multiply to the number of processes.
        """
        if self._mesh is None:
            sizes = dict(self._sizes)
            if sizes.get(TENSOR) == "auto" and sizes.get(DATA) == "auto" and self.num_nodes > 1:
                sizes[DATA] = self.num_nodes  # tensor parallelism inside the node, replicas across nodes
            self._mesh = Mesh.resolve(self.world_size, sizes)
        return self._mesh

    @property
    def groups(self) -> MeshGroups:
        """This rank's process groups.

        Raises:
            RuntimeError: Before the processes have met.
        """
        if self._groups is None:
            raise RuntimeError("the process groups exist only while the Trainer runs; there is none yet")
        return self._groups

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's view of the mesh, with the axes' names."""
        if self._device_mesh is None:
            raise RuntimeError("the device mesh exists only while the Trainer runs; there is none yet")
        return self._device_mesh

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning to give each replica its part of the data: a single one reads what one process would."""
        return self.mesh.data_parallel > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> Optional[str]:
        """Backend of torch.distributed, if one was given."""
        return self._process_group_backend

    def set_world_ranks(self) -> None:
        """Tell the environment and both copies of `rank_zero_only` who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        processes.announce_rank(self.global_rank)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = processes.SpawnLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        mesh = self.mesh
        if mesh.data_parallel > 1:
            reset_seed()  # replicas of one process would go on with its random numbers
        if self._groups is None:
            assert self.cluster_environment is not None
            processes.connect(self.cluster_environment, self.root_device, self._process_group_backend, self._timeout)
            self._groups, self._device_mesh = processes.process_groups(mesh, self.root_device.type, self._timeout)
        heartbeat.start()
        processes.share_random_state(self.groups.replica)
        set_device_mesh(self.module, self.device_mesh)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: Optional[bool] = None) -> Generator[None, None, None]:
        """Build modules deferred: `setup` makes what this rank owns of them, equal to one process with the same seed.

        Args:
            empty_init: Without effect, since large tensors get no memory anyway.
        """
        if self._groups is None:
            # In `trainer.init_module()` the ranks have not met: nobody knows whether they draw the same numbers.
            self._built_apart = True
        with deferred_init(self.root_device), self.precision_plugin.tensor_init_context():
            yield

    @override
    def on_exception(self, exception: BaseException) -> None:
        processes.discard_groups(self._groups)
        super().on_exception(exception)

    # ------------------------------------------------------------------------------------------------ collectives

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
        return sync_tensor(tensor, group or self.groups.data_parallel.process_group, reduce_op)

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

    # --------------------------------------------------------------------------------------------------- the data

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        coordinate = self.mesh.coordinate(self.global_rank)
        return {"num_replicas": self.mesh.data_parallel, "rank": coordinate.data_parallel}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return processes.seed_workers(dataloader, self.mesh.coordinate(self.global_rank).data_parallel)
