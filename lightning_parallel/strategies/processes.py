"""Processes of a mesh: how they start and meet, and what makes the ranks of one replica act as one.

The ranks of one replica read the same data, draw the same random numbers and hold parts of the same model; replicas
start with equal weights and read different data.
"""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, Optional, Union
from uuid import uuid4

import numpy
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import Metric
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups, fingerprints, start_heartbeat
from lightning_parallel.compat import patched
from lightning_parallel.compat.lightning import (
    FunctionLauncher,
    ScriptLauncher,
    init_process_group,
    set_device_mesh,
    strategy_of,
    sync_tensor,
)
from lightning_parallel.compat.torch import non_persistent_buffers_of
from lightning_parallel.mesh import AXES, DATA, TENSOR, Axis, Mesh, Size
from lightning_parallel.strategies.deferred_init import deferred_init

__all__ = [
    "MeshProcesses",
    "SpawnLauncher",
    "StartMethod",
    "announce_rank",
    "connect",
    "discard_groups",
    "process_groups",
    "scope_metrics",
    "seed_workers",
    "share_buffers",
    "share_plateau_metrics",
    "share_random_state",
    "start_equal",
    "synchronize_batch_norm",
]


class _CachedGroups(NamedTuple):
    token: str
    world: dist.ProcessGroup | None
    groups: MeshGroups
    device_mesh: DeviceMesh


# Groups hold threads and sockets until the process ends, so fits of one process share them.
_cached_groups: dict[tuple[Mesh, str, timedelta | None], _CachedGroups] = {}


class SpawnLauncher(FunctionLauncher):
    """Starts processes as functions; returns the merged state dict to the main process instead of rank 0's shards."""

    # Lightning copies `module.state_dict()` of rank 0 back here, and has no hook for a strategy to say otherwise.
    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        # Every rank takes part, though only the first one returns it.
        full = strategy_of(self).lightning_module_state_dict()
        module = trainer.lightning_module
        with patched(module, "state_dict", lambda *_, **__: full):
            return super()._collect_rank_zero_results(trainer, results)


def announce_rank(rank: int) -> None:
    """Set the rank of this process in both copies of `rank_zero_only`."""
    # Lightning's loggers and warnings use one, its utilities the other.
    for decorator in (rank_zero_only, utilities_rank_zero_only):
        decorator.rank = rank  # type: ignore[attr-defined]


def connect(
    environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta | None
) -> None:
    """Start the default process group, if there is none, with the default backend of the device unless one is given."""
    backend = backend or dist.Backend.default_device_backend_map.get(device.type, "gloo")
    # The device is given to NCCL at once, so that it knows it before the first collective.
    init_process_group(environment, backend, timeout, None if device.type == "cpu" else device)


def process_groups(mesh: Mesh, device_type: str, timeout: timedelta | None) -> tuple[MeshGroups, DeviceMesh]:
    """Return the groups of `mesh`: those of an earlier fit if every rank still has them, else new ones.

    Every rank must call it at the same point, after `connect`.
    """
    settings = (mesh, device_type, timeout)
    world = Group.of()
    known = _cached_groups.get(settings)
    if known is not None and known.world is not world.process_group:
        known = None  # torch.distributed was started anew
    # Groups are reused on all ranks or on none: making new ones is a collective. A rank that failed in the last fit has
    # discarded its own, and a token tells groups of the same settings apart.
    views = comm.all_gather_object((known.token if known else None, uuid4().hex), world)
    tokens = {token for token, _ in views}
    if known is None or tokens != {known.token}:
        groups = MeshGroups(mesh, timeout=timeout)
        device_mesh = init_device_mesh(device_type, mesh.shape, mesh_dim_names=AXES)
        known = _CachedGroups(views[0][1], world.process_group, groups, device_mesh)
        _cached_groups[settings] = known
    return known.groups, known.device_mesh


def discard_groups(groups: MeshGroups | None) -> None:
    """Remove `groups` from those that later fits reuse: after an error, messages may still be under way in them."""
    for settings, cached in list(_cached_groups.items()):
        if cached.groups is groups:
            del _cached_groups[settings]


# --------------------------------------------------------------------------------------------------------- replicas


def share_random_state(group: Group) -> None:
    """Copy the random state of a replica's first rank to its other ranks, for data, dropout and initialisation."""
    if group.size == 1:
        return
    state = (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    torch_state, python_state, numpy_state = comm.broadcast_object(state, group)
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(comm.broadcast_object(torch.cuda.get_rng_state(), group))


def start_equal(module: nn.Module, group: Group) -> None:
    """Copy parameters and buffers of the first rank of `group` to the others where they differ.

    Raises:
        ValueError: If the names, shapes or dtypes differ between the ranks.
    """
    if group.size == 1:
        return
    tensors = {name: tensor for name, tensor in _tensors(module) if not tensor.is_meta}
    comm.agree(
        "the module's tensors (name, shape, dtype)",
        [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()],
        group,
    )
    # Equal seeds make equal models: usually fingerprints are all that is sent.
    prints = comm.all_gather_object(fingerprints(tensors.values()), group)
    for tensor, *values in zip(tensors.values(), *prints):
        if len(set(values)) > 1:
            _broadcast(tensor, group)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def _broadcast(tensor: Tensor, group: Group) -> None:
    # NCCL takes tensors on CUDA only, and the module may not have been moved there yet.
    device = torch.device("cuda", torch.cuda.current_device()) if _needs_cuda(group) else tensor.device
    shared = tensor.detach().to(device, copy=True).contiguous()
    tensor.copy_(comm.broadcast_(shared, group))


@torch.no_grad()
def share_buffers(module: nn.Module, group: Group) -> None:
    """Copy the buffers of the first replica to all, such as running statistics of batch normalisation.

    Like torch's DistributedDataParallel, but only buffers that are in checkpoints: the others are constants.
    """
    if group.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in non_persistent_buffers_of(owner):
                kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    # One message for all buffers of a dtype instead of one for each.
    for buffers in kinds.values():
        flat = comm.broadcast_(torch.cat([buffer.reshape(-1) for buffer in buffers]), group)
        for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
            buffer.copy_(value.view_as(buffer))


def _needs_cuda(group: Group) -> bool:
    return "nccl" in torch.distributed.get_backend(group.process_group)


def synchronize_batch_norm(module: nn.Module, group: Group) -> None:
    """Convert batch normalisation to compute its statistics over the replicas (`Trainer(sync_batchnorm=True)`)."""
    if group.size > 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(module, group.process_group)


# ----------------------------------------------------------------------------------------------- data and metrics


def seed_workers(dataloader: object, replica: int) -> object:
    """Under `seed_everything(workers=True)`, seed the loader's workers by replica.

    Lightning would seed them by global rank right afterwards, and the ranks of one replica would augment the same
    sample differently.
    """
    seeded = int(os.environ.get("PL_SEED_WORKERS", 0))
    if seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=replica)
    return dataloader


def _not_distributed() -> bool:
    return False


def scope_metrics(module: nn.Module, groups: MeshGroups) -> None:
    """Let the module's torchmetrics objects synchronise over replicas, and not over all ranks.

    The ranks of one replica see the same samples, which would be counted several times.
    """
    if groups.replica.size == 1:
        return
    for metric in module.modules():
        if not isinstance(metric, Metric) or metric.process_group is not None:
            continue
        if groups.data_parallel.process_group is None:
            # There is one replica, but the processes are distributed, so the metric would take the world.
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
    """Base of the classes that `share_plateau_metrics` makes; `group` are the replicas."""

    group: Group

    def step(self, metrics: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        device = metrics.device if isinstance(metrics, torch.Tensor) else None
        total = comm.all_reduce(torch.as_tensor(metrics, dtype=torch.float64, device=device), self.group)
        super().step(total / self.group.size, *args, **kwargs)


StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class MeshProcesses(ParallelStrategy):
    """Starts the processes of a mesh and lets the Trainer, loggers and callbacks communicate over it.

    Args:
        sizes: Ranks along each axis, or `"auto"`.
        process_group_backend, timeout, start_method: See `MeshStrategy`.
        kwargs: All arguments of `ParallelStrategy`.
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
        """The mesh as torch's `DeviceMesh`, with the names of the axes."""
        if self._device_mesh is None:
            raise RuntimeError("the device mesh exists only while the Trainer runs; there is none yet")
        return self._device_mesh

    @property
    def is_distributed(self) -> bool:
        """True if there are several replicas, between which Lightning then divides the data."""
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
        """Set the rank of this process in the cluster environment and in both copies of `rank_zero_only`."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        announce_rank(self.global_rank)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = SpawnLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        mesh = self.mesh
        if mesh.data_parallel > 1:
            reset_seed()  # as under Lightning's DDP: every process begins with the numbers of the global seed
        if self._groups is None:
            assert self.cluster_environment is not None
            connect(self.cluster_environment, self.root_device, self._process_group_backend, self._timeout)
            self._groups, self._device_mesh = process_groups(mesh, self.root_device.type, self._timeout)
        start_heartbeat()
        share_random_state(self.groups.replica)
        set_device_mesh(self.module, self.device_mesh)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: Optional[bool] = None) -> Generator[None, None, None]:
        """Build modules deferred: `setup` makes what this rank owns of them, equal to one process with the same seed.

        Args:
            empty_init: Without effect, since large tensors get no memory anyway.
        """
        if self._groups is None:
            # In `trainer.init_module()` there are no groups yet, so ranks may draw different numbers.
            self._built_apart = True
        failure: Exception | None = None
        try:
            with deferred_init(self.root_device), self.precision_plugin.tensor_init_context():
                yield
        except Exception as error:
            failure = error
        if self._groups is not None:
            # A rank whose `configure_model` fails would leave the others waiting in the next collective.
            comm.raise_together(failure, self._groups.world)
        elif failure is not None:
            raise failure

    @override
    def on_exception(self, exception: BaseException) -> None:
        discard_groups(self._groups)
        # Before the teardown, which ends the heartbeat: the peers that miss this rank look for the reason.
        comm.report_failure(exception)
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
        return seed_workers(dataloader, self.mesh.coordinate(self.global_rank).data_parallel)
