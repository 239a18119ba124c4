"""Process groups of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

from lightning_parallel.mesh import AXES, PIPELINE, TENSOR, Axis, Mesh

__all__ = ["Group", "MeshGroups"]


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate with each other along `axis`.

    Attributes:
        axis: Name of the mesh axis, or a description of the group.
        ranks: Global ranks, in the order of their position in the group.
        rank: Position of this process in `ranks`.
        process_group: The torch group; None for a group of one.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None

    def __deepcopy__(self, memo: object) -> Group:
        return self  # a copied module communicates with the same ranks

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def backend(self) -> str:
        """Name of the backend; looked up once, as that takes longer than to start a collective."""
        return "" if self.process_group is None else dist.get_backend(self.process_group)

    @cached_property
    def name(self) -> str:
        """Of the process group: the same on all its ranks, and no other group has it."""
        return "" if self.process_group is None else self.process_group.group_name

    @classmethod
    def alone(cls, axis: str, rank: int = 0) -> Group:
        """A group that holds this process only."""
        return cls(axis, (rank,), 0, None)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None = None, axis: str = "world") -> Group:
        """Wrap a torch process group; None means all ranks (this process alone, when torch is not distributed)."""
        if not dist.is_available() or not dist.is_initialized():
            return cls.alone(axis)
        process_group = process_group if process_group is not None else dist.group.WORLD
        assert process_group is not None
        ranks = tuple(dist.get_process_group_ranks(process_group))
        if dist.get_rank() not in ranks:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the given process group of ranks {ranks}")
        return cls(axis, ranks, ranks.index(dist.get_rank()), process_group if len(ranks) > 1 else None)


class MeshGroups:
    """This rank's groups in `mesh`: one per axis, `model` (pipeline x tensor: one replica) and `world`.

    Every rank must construct it at the same point, with the same arguments.

    Args:
        mesh: The mesh; its size must be that of the default process group.
        timeout: Deadline of each collective.
        backend: Backend of the groups; None for that of the default group.

    Raises:
        ValueError: If the mesh and the default process group differ in size.
    """

    def __init__(self, mesh: Mesh, timeout: timedelta | None = None, backend: str | None = None) -> None:
        self.world = Group.of()
        if mesh.world_size != self.world.size:
            raise ValueError(f"{mesh} has {mesh.world_size} ranks, but {self.world.size} processes are running")
        self.mesh = mesh
        self.coordinate = mesh.coordinate(self.world.ranks[self.world.rank])
        self._settings = timeout, backend
        self._others: dict[tuple[Axis, str], Group] = {}
        made = {axis: self._create((axis,), axis, timeout, backend) for axis in AXES}
        self.data_parallel, self.pipeline_parallel, self.tensor_parallel = (made[axis] for axis in AXES)
        if self.pipeline_parallel.size > 1 and self.tensor_parallel.size > 1:
            self.model = self._create((PIPELINE, TENSOR), "model", timeout, backend)
        else:
            self.model = self.pipeline_parallel if self.pipeline_parallel.size > 1 else self.tensor_parallel

    def _create(self, axes: Sequence[Axis], name: str, timeout: timedelta | None, backend: str | None) -> Group:
        me = self.world.ranks[self.world.rank]
        if self.mesh.size(*axes) == 1:
            return Group.alone(name, me)
        peers = self.mesh.peers(*axes)
        group, _ = dist.new_subgroups_by_enumeration(peers, timeout=timeout, backend=backend)
        ranks = next(ranks for ranks in peers if me in ranks)
        return Group(name, tuple(ranks), ranks.index(me), group)

    def another(self, axis: Axis, purpose: str) -> Group:
        """A further group of the ranks along `axis`, one for each `purpose`; all ranks of the mesh must ask for it."""
        if (axis, purpose) not in self._others:
            self._others[axis, purpose] = self._create((axis,), axis, *self._settings)
        return self._others[axis, purpose]

    def __getitem__(self, axis: Axis) -> Group:
        return getattr(self, axis)
