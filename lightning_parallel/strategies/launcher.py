"""How processes start and meet; the main process gets the full weights back from those started as functions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.mesh import AXES, Mesh

__all__ = ["SpawnLauncher", "announce_rank", "connect", "forget", "meet"]


class _Meeting(NamedTuple):
    token: str
    world: dist.ProcessGroup | None
    groups: MeshGroups
    device_mesh: DeviceMesh


# Groups hold threads and sockets until the process ends, so fits of one process share them.
_meetings: dict[tuple[Mesh, str, timedelta | None], _Meeting] = {}


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


def meet(mesh: Mesh, device_type: str, timeout: timedelta | None) -> tuple[MeshGroups, DeviceMesh]:
    """The groups of `mesh`: those of an earlier fit if every rank still has them, else new ones.

    Every rank must call it at the same point, after `connect`.
    """
    settings, world = (mesh, device_type, timeout), Group.of()
    known = _meetings.get(settings)
    if known is not None and known.world is not world.process_group:
        known = None  # torch.distributed was started anew
    views = comm.all_gather_object((known.token if known else None, uuid4().hex), world)
    tokens = {token for token, _ in views}
    if known is None or tokens != {known.token}:
        groups = MeshGroups(mesh, timeout=timeout)
        device_mesh = init_device_mesh(device_type, mesh.shape, mesh_dim_names=AXES)
        known = _meetings[settings] = _Meeting(views[0][1], world.process_group, groups, device_mesh)
    return known.groups, known.device_mesh


def forget(groups: MeshGroups | None) -> None:
    """Share `groups` no more: a rank left them in the middle of something."""
    for settings, meeting in list(_meetings.items()):
        if meeting.groups is groups:
            del _meetings[settings]
