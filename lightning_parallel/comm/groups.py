"""Process groups of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

from lightning_parallel.compat.default_group import (
    all_processes,
    backend_of,
    replace_default_group,
    set_timeout,
    splits_groups,
)
from lightning_parallel.mesh import DATA, PIPELINE, TENSOR, Axis, Mesh

__all__ = ["Group", "MeshGroups", "NodeGroups"]


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate with each other along `axis`.

    Attributes:
        axis: Name of the mesh axis, or a description of the group.
        ranks: Global ranks, in the order of their position in the group.
        rank: Position of this process in `ranks`.
        process_group: The torch group; None for a group of one.
        gate: Called before each collective on tensors, with its name.
        note: Of a pretended group: called with the name and the bytes of what it would have sent.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None
    gate: Callable[[str], None] | None = None
    note: Callable[[str, int], None] | None = None

    def __deepcopy__(self, memo: object) -> Group:
        # Layers hold their group. A copied layer communicates with the same ranks, and process groups cannot be copied.
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                f"A group along {self.axis} cannot be pickled, because only its own process can use it. Do not pickle"
                " the Trainer, its strategy, or a module during a run. Save a checkpoint or a state dict"
            )
        return vars(self)

    def guarded_by(self, gate: Callable[[str], None]) -> Group:
        """Return the same ranks with a gate."""
        return replace(self, gate=gate)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def backend(self) -> str:
        """Name of the backend; empty for a group of one."""
        # Cached, because torch's lookup takes longer than starting a small collective.
        return "" if self.process_group is None else backend_of(self.process_group)

    @property
    def is_ordered(self) -> bool:
        """Whether operations of the group wait for those that were issued before, as NCCL's do."""
        return "nccl" in self.backend

    @property
    def host_device(self) -> str:
        """Type of the device of tensors that hosts exchange: the CPU, unless the group knows GPUs only."""
        return "cuda" if self.backend == "nccl" else "cpu"

    @cached_property
    def name(self) -> str:
        """Name of the process group, equal on all its ranks and unique among groups; empty for a group of one."""
        return "" if self.process_group is None else self.process_group.group_name

    @classmethod
    def alone(cls, axis: str, rank: int = 0) -> Group:
        """Make a group of this process only."""
        return cls(axis, (rank,), 0, None)

    @classmethod
    def pretended(cls, axis: str, size: int, note: Callable[[str, int], None] | None = None) -> Group:
        """Make a group of `size` ranks of which only the first, this process, is there: see `is_pretended`."""
        return cls(axis, tuple(range(size)), 0, None, note=note)

    @property
    def is_pretended(self) -> bool:
        """Whether the other ranks are imagined, to find out what one rank of so many would compute and send.

        Collectives on tensors return at once, in the right shapes, with arbitrary values; those on objects answer as if
        all ranks had brought the same.
        """
        return self.process_group is None and self.size > 1

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None = None, axis: str = "world") -> Group:
        """Wrap a torch process group.

        Args:
            process_group: The group; None for torch's default: all ranks, in a run those along the data axis, see
                `MeshGroups.make_data_default`; or this process alone where torch is not distributed.
            axis: See `Group`.

        Raises:
            ValueError: If this process is not a member of the group.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls.alone(axis)
        # None stands for the default group, but its name and backend are those of the object.
        wrapped = dist.group.WORLD if process_group is None else process_group
        if wrapped in _stand_ins:
            # torch takes ranks given with its default group for positions in it, and those of others for global ones.
            return replace(_stand_ins[wrapped], axis=axis)
        ranks = tuple(dist.get_process_group_ranks(wrapped))
        rank = all_processes().rank()
        if rank not in ranks:
            raise ValueError(f"The process group must hold rank {rank}; got the ranks {ranks}")
        return cls(axis, ranks, ranks.index(rank), wrapped if len(ranks) > 1 else None)


# By group that stands in for torch's default group: the other one of the same ranks, which is the library's own.
_stand_ins: dict[Any, Group] = {}


@dataclass(frozen=True, eq=False)
class NodeGroups:
    """This rank's place in a group whose ranks are on several nodes, as many on each.

    Attributes:
        whole: The group.
        inside: Its ranks on this rank's node.
        across: Those at the same place as this one on each node, in the order of the nodes.
    """

    whole: Group
    inside: Group
    across: Group

    @classmethod
    def of(cls, hosts: Mapping[int, str], size: int | None = None, timeout: timedelta | None = None) -> NodeGroups:
        """Create the groups of all ranks; every rank must call it at the same point, with the same arguments.

        Args:
            hosts: What tells the nodes apart, by global rank.
            size: Ranks on a node: so many, one after the other. None: those with equal `hosts`.
            timeout: Deadline of each collective.

        Raises:
            ValueError: On every rank, if the nodes have different numbers of ranks.
        """
        whole = Group.of()
        nodes = _divide_by_node(whole.ranks, hosts, size)
        return _node_groups(whole, [nodes], lambda peers: _new_groups(peers, timeout, None))

    def close(self) -> None:
        """Destroy the groups that `of` has created."""
        for group in (self.inside, self.across):
            if group.process_group is not None:
                dist.destroy_process_group(group.process_group)


def _divide_by_node(ranks: Sequence[int], hosts: Mapping[int, str], size: int | None) -> list[list[int]]:
    """Return the ranks on each node."""
    if size is not None:
        if len(ranks) % size:
            raise ValueError(
                f"The number of replicas must be a multiple of {size}, the size of a node; got {len(ranks)}"
            )
        return [list(ranks[first : first + size]) for first in range(0, len(ranks), size)]
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(hosts[rank], []).append(rank)
    if len({len(node) for node in nodes.values()}) > 1:
        found = ", ".join(f"{len(node)} on {host}" for host, node in nodes.items())
        raise ValueError(
            f"Each node must have the same number of replicas; got {found}. Use as many devices on each node, or"
            " `hierarchical=False`"
        )
    return list(nodes.values())


def _node_groups(
    whole: Group, lines: Sequence[list[list[int]]], create: Callable[[list[list[int]]], dist.ProcessGroup | None]
) -> NodeGroups:
    """Create the groups along all `lines` of a mesh, of which `whole` is one, each given by the ranks on its nodes."""
    me = whole.ranks[whole.rank]

    def made(axis: str, peers: list[list[int]]) -> Group:
        process_group = create(peers) if any(len(ranks) > 1 for ranks in peers) else None
        ranks = next(ranks for ranks in peers if me in ranks)
        return Group(axis, tuple(ranks), ranks.index(me), process_group if len(ranks) > 1 else None)

    inside = made("node", [node for nodes in lines for node in nodes])
    across = made("nodes", [list(peers) for nodes in lines for peers in zip(*nodes)])
    return NodeGroups(whole, inside, across)


class MeshGroups:
    """This rank's groups in `mesh`.

    Every rank must construct it at the same point, with the same arguments.

    Args:
        mesh: The mesh; its size must be that of the default process group.
        timeout: Deadline of each collective.
        backend: Backend of the groups; None for that of the default group.

    Attributes:
        data_parallel, pipeline_parallel, tensor_parallel: The group along each axis.
        replica: The ranks that together hold the model once: pipeline x tensor.
        world: All ranks.

    Raises:
        ValueError: If the mesh and the default process group differ in size.
    """

    def __init__(self, mesh: Mesh, timeout: timedelta | None = None, backend: str | None = None) -> None:
        self.world = Group.of()
        if mesh.world_size != self.world.size:
            raise ValueError(f"The mesh must have {self.world.size} ranks, one per process; got {mesh}")
        self.mesh = mesh
        self.coordinate = mesh.coordinate(self.world.ranks[self.world.rank])
        self._timeout = timeout
        self._backend = backend
        self._extra: dict[tuple[Axis, str], Group] = {}
        self._between: dict[tuple[Axis, str], dict[tuple[int, int], Group]] = {}
        self._hosts: dict[str, Group] = {}
        self._nodes: dict[tuple[str, int | None], NodeGroups] = {}
        self._stand_in: dist.ProcessGroup | None = None
        self.data_parallel = self._create((DATA,), DATA)
        self.pipeline_parallel = self._create((PIPELINE,), PIPELINE)
        self.tensor_parallel = self._create((TENSOR,), TENSOR)
        # A process group costs threads and sockets, so the replica has one of its own only where no axis spans it.
        if self.pipeline_parallel.size > 1 and self.tensor_parallel.size > 1:
            self.replica = self._create((PIPELINE, TENSOR), "replica")
        elif self.pipeline_parallel.size > 1:
            self.replica = self.pipeline_parallel
        else:
            self.replica = self.tensor_parallel

    def _create(self, axes: Sequence[Axis], name: str) -> Group:
        me = self.world.ranks[self.world.rank]
        # The size of an axis is the same everywhere: either all ranks create groups for it, or none does.
        if self.mesh.size(*axes) == 1:
            return Group.alone(name, me)
        peers = self.mesh.peers(*axes)
        # Layers wait for the messages of the tensor axis: they go before those that overlap with computation.
        process_group = self._new_groups(peers, is_urgent=axes == (TENSOR,))
        ranks = next(ranks for ranks in peers if me in ranks)
        return Group(name, tuple(ranks), ranks.index(me), process_group)

    def _new_groups(self, peers: list[list[int]], is_urgent: bool = False) -> dist.ProcessGroup | None:
        return _new_groups(peers, self._timeout, self._backend, is_urgent)

    def between(self, axis: Axis, pairs: Sequence[tuple[int, int]], purpose: str) -> dict[tuple[int, int], Group]:
        """Return a group for each pair of positions along `axis` that this rank is one of, created by the first call.

        All ranks of the mesh must ask for them at the same point.
        """
        if (axis, purpose) not in self._between:
            me = self.world.ranks[self.world.rank]
            lines = self.mesh.peers(axis)
            found = {}
            for disjoint in _without_common_members(pairs):
                process_group = self._new_groups(
                    [[line[one], line[other]] for line in lines for one, other in disjoint]
                )
                for line in lines:
                    for one, other in disjoint:
                        ranks = (line[one], line[other])
                        if me in ranks:
                            found[one, other] = Group(axis, ranks, ranks.index(me), process_group)
            self._between[axis, purpose] = found
        return self._between[axis, purpose]

    def extra(self, axis: Axis, purpose: str) -> Group:
        """Return a further group of the ranks along `axis`, one per `purpose`, created by the first call.

        Collectives of one group must start in the same order on all its ranks; a group of its own lets a thread or a
        stream communicate independently of the others. All ranks of the mesh must ask for it at the same point.
        """
        if (axis, purpose) not in self._extra:
            self._extra[axis, purpose] = self._create((axis,), axis)
        return self._extra[axis, purpose]

    def nodes(self, hosts: Mapping[int, str], size: int | None, purpose: str) -> NodeGroups:
        """Return the groups of the data axis in and across nodes, see `NodeGroups.of` and `extra`."""
        key = (purpose, size)
        if key not in self._nodes:
            lines = [_divide_by_node(ranks, hosts, size) for ranks in self.mesh.peers(DATA)]
            self._nodes[key] = _node_groups(self.data_parallel, lines, self._new_groups)
        return self._nodes[key]

    def between_hosts(self, purpose: str) -> Group:
        """Return a group of all ranks for messages between hosts, one per `purpose`, see `extra`."""
        if purpose not in self._hosts:
            process_group = None
            if self.world.size > 1:
                process_group = dist.new_group(list(self.world.ranks), timeout=self._timeout, backend="gloo")
            self._hosts[purpose] = replace(self.world, axis=purpose, process_group=process_group)
        return self._hosts[purpose]

    def make_data_default(self) -> None:
        """Let torch's default group be the data axis, as in a project for replicas; `default_group_kept` undoes it.

        All ranks of the mesh must call it at the same point. It is a group of its own, also for one replica: messages
        of the user's code must not meet those of the library.
        """
        if self.data_parallel.size == self.world.size:
            return
        if self._stand_in is None:
            if self.data_parallel.size > 1:
                self._stand_in = self.extra(DATA, "default").process_group
            else:
                self._stand_in = dist.new_group(
                    [self.world.ranks[self.world.rank]],
                    timeout=self._timeout,
                    backend=self._backend,
                    use_local_synchronization=True,
                )
            assert self._stand_in is not None
            _stand_ins[self._stand_in] = self.data_parallel
        replace_default_group(self._stand_in)


def _new_groups(
    peers: list[list[int]], timeout: timedelta | None, backend: str | None, is_urgent: bool = False
) -> dist.ProcessGroup | None:
    """Create groups that share no rank, with one call on all ranks; returns that of this rank, if it has one."""
    world = all_processes()
    has_nccl = "nccl" in (backend or backend_of(world))
    options: dict[str, Any] = {"timeout": timeout}
    if has_nccl and is_urgent:
        options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if has_nccl and backend is None and splits_groups(world):
        group = dist.split_group(world, peers, **options)
        if group is not None and timeout is not None:
            set_timeout(group, timeout)
        return group
    # torch requires every rank to create every group, also those of which it is not a member.
    return dist.new_subgroups_by_enumeration(peers, backend=backend, **options)[0]


def _without_common_members(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divide pairs into lists in which no position occurs twice: two or three for a pipeline of any length."""
    lists: list[list[tuple[int, int]]] = []
    for pair in pairs:
        fitting = (members for members in lists if not any(set(pair) & set(other) for other in members))
        found = next(fitting, None)
        if found is None:
            lists.append(found := [])
        found.append(pair)
    return lists
