"""Process groups of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from lightning_parallel.compat.default_group import (
    all_processes,
    backend_of,
    replace_default_group,
    set_timeout,
    splits_groups,
)
from lightning_parallel.mesh import CONTEXT, DATA, PIPELINE, TENSOR, Axis, Mesh

__all__ = ["GRADIENTS", "Group", "MeshGroups", "NodeGroups", "group_labelled"]

GRADIENTS: Literal["gradients"] = "gradients"
"""Name of the groups whose ranks hold the same parameters: data x context."""


# Compared by identity: two groups of the same ranks carry different messages.
@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate with each other along `axis`.

    Attributes:
        axis: Name of the mesh axis, or a description of the group.
        ranks: Global ranks, in the order of their position in the group.
        rank: Position of this process in `ranks`.
        process_group: The torch group; None for a group of one.
        gate: Called before each collective on tensors, with its name.
        note: In a pretended group, called with the name and the bytes of each collective that it would have sent.
        size: The number of ranks.
        label: A name by which operators in compiled code find this group: see `group_labelled`.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None
    gate: Callable[[str], None] | None = None
    note: Callable[[str, int], None] | None = None
    # Plain attributes: each call of a sharded layer reads them, and compiled code takes them for constants.
    size: int = field(init=False, repr=False)
    label: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        label = f"{self.axis}/{next(_numbers)}"
        vars(self).update(size=len(self.ranks), label=label)
        _labelled[label] = self

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
        """Return this group with a gate."""
        return replace(self, gate=gate)

    @cached_property
    def behind_gate(self) -> Group:
        """This group without its gate, for messages that the ranks send after all of them have passed the gate."""
        return self if self.gate is None else replace(self, gate=None)

    @cached_property
    def backend(self) -> str:
        """Name of the backend; empty for a group of one."""
        # Cached, because torch's lookup takes longer than starting a small collective.
        return "" if self.process_group is None else backend_of(self.process_group)

    @property
    def is_ordered(self) -> bool:
        """Whether each operation of the group waits for all earlier operations, as in NCCL."""
        return "nccl" in self.backend

    @property
    def host_device(self) -> str:
        """Device type of tensors that hosts exchange: the CPU, unless the group communicates tensors on GPUs only."""
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
        """Make a group of `size` ranks without other processes; this process is the first rank. See `is_pretended`."""
        return cls(axis, tuple(range(size)), 0, None, note=note)

    @property
    def is_pretended(self) -> bool:
        """Whether the other ranks do not exist: the group only measures the work and the messages of one rank.

        Collectives on tensors return at once, in the right shapes, with arbitrary values. Collectives on objects
        answer as if all ranks had given the same value.
        """
        return self.process_group is None and self.size > 1

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None = None, axis: str = "world") -> Group:
        """Wrap a torch process group.

        Args:
            process_group: The group. None means torch's default group: all ranks or, in a run, the ranks along the data
                axis (see `MeshGroups.make_data_default`). Where torch is not distributed, None means this process.
            axis: See `Group`.

        Raises:
            ValueError: If this process is not a member of the group.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls.alone(axis)
        # The object instead of None, which torch also takes for the default group: name and backend are its attributes.
        wrapped = dist.group.WORLD if process_group is None else process_group
        if wrapped in _stand_ins:
            # torch reads a rank as a position if the group is its default group, and as a global rank otherwise. So the
            # library uses its own group of these ranks.
            return replace(_stand_ins[wrapped], axis=axis)
        ranks = tuple(dist.get_process_group_ranks(wrapped))
        rank = all_processes().rank()
        if rank not in ranks:
            raise ValueError(f"The process group must hold rank {rank}; got the ranks {ranks}")
        # A group of one sends nothing, so collectives need not ask torch.
        return cls(axis, ranks, ranks.index(rank), wrapped if len(ranks) > 1 else None)


_numbers = count()
_labelled: WeakValueDictionary[str, Group] = WeakValueDictionary()


def group_labelled(label: str) -> Group:
    """Return the group with a `label`.

    Raises:
        RuntimeError: If the group is gone, as after its run.
    """
    group = _labelled.get(label)
    if group is None:
        raise RuntimeError(
            f"Compiled code must run while its process groups exist; got the group `{label}` of an earlier run. Compile"
            " the model again, after `torch.compiler.reset()`"
        )
    return group


# By group that stands in for torch's default group: the library's own group of the same ranks. The stand-ins of a mesh
# that is gone are dropped.
_stand_ins: WeakKeyDictionary[Any, Group] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class NodeGroups:
    """This rank's place in a group whose ranks are on several nodes, with equal numbers on each node.

    Attributes:
        whole: The group.
        inside: The ranks of the group on this rank's node.
        across: The rank at this rank's place on each node, in the order of the nodes.
    """

    whole: Group
    inside: Group
    across: Group

    @classmethod
    def of(cls, hosts: Mapping[int, str], size: int | None = None, timeout: timedelta | None = None) -> NodeGroups:
        """Create the groups of all ranks; every rank must call it at the same point, with the same arguments.

        Args:
            hosts: A name of the node, by global rank.
            size: Number of consecutive ranks that form a node. None: ranks with equal `hosts` form a node.
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
    """Create the groups along all `lines` of a mesh; a line lists the ranks on each of its nodes.

    `whole` is the group along this rank's line.
    """
    me = whole.ranks[whole.rank]

    def made(axis: str, peers: list[list[int]]) -> Group:
        # `peers` holds the groups of all ranks, so all ranks agree whether to make the collective call `create`.
        process_group = create(peers) if any(len(ranks) > 1 for ranks in peers) else None
        ranks = next(ranks for ranks in peers if me in ranks)
        return Group(axis, tuple(ranks), ranks.index(me), process_group if len(ranks) > 1 else None)

    inside = made("node", [node for nodes in lines for node in nodes])
    across = made("nodes", [list(peers) for nodes in lines for peers in zip(*nodes)])
    return NodeGroups(whole, inside, across)


class MeshGroups:
    """This rank's groups in `mesh`.

    Every rank must construct the object at the same point, with the same arguments.

    Args:
        mesh: The mesh. It must have as many ranks as the default process group.
        timeout: Deadline of each collective.
        backend: Backend of the groups; None for the backend of the default group.

    Attributes:
        data_parallel, pipeline_parallel, context_parallel, tensor_parallel: The group along each axis.
        replica: The ranks that read the same samples: pipeline x context x tensor.
        model: The ranks that together hold one copy of the parameters: pipeline x tensor.
        gradients: The ranks that hold the same parameters, and average their gradients: data x context.
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
        self._extra: dict[tuple[str, str], Group] = {}
        self._between: dict[tuple[Axis, str], dict[tuple[int, int], Group]] = {}
        self._hosts: dict[str, Group] = {}
        self._nodes: dict[tuple[str, int | None], NodeGroups] = {}
        self._stand_in: dist.ProcessGroup | None = None
        self.data_parallel = self._create((DATA,), DATA)
        self.pipeline_parallel = self._create((PIPELINE,), PIPELINE)
        self.context_parallel = self._create((CONTEXT,), CONTEXT)
        self.tensor_parallel = self._create((TENSOR,), TENSOR)
        self.model = self._spanning((PIPELINE, TENSOR), "replica" if mesh.context_parallel == 1 else "model")
        self.replica = self.model
        self.gradients = self.data_parallel
        if mesh.context_parallel > 1:
            self.replica = self._spanning((PIPELINE, CONTEXT, TENSOR), "replica")
            # Its own group also with one replica. Messages of gradients overlap with the messages of attention, and
            # ranks may start them in another order.
            self.gradients = self._create((DATA, CONTEXT), GRADIENTS)

    def _spanning(self, axes: Sequence[Axis], name: str) -> Group:
        """Return the group of several axes.

        A process group costs threads and sockets, so a new group is created only if no axis alone spans it.
        """
        long = [axis for axis in axes if self.mesh.size(axis) > 1]
        if len(long) > 1:
            return self._create(axes, name)
        alone: Group = getattr(self, long[0] if long else axes[-1])
        return alone

    def _create(self, axes: Sequence[Axis], name: str) -> Group:
        me = self.world.ranks[self.world.rank]
        # An axis has one size on all ranks: either all ranks create groups for it, or none does.
        if self.mesh.size(*axes) == 1:
            return Group.alone(name, me)
        peers = self.mesh.peers(*axes)
        # Layers wait for the messages of these axes. So these precede messages that overlap with computation.
        process_group = self._new_groups(peers, is_urgent=axes in ((CONTEXT,), (TENSOR,)))
        ranks = next(ranks for ranks in peers if me in ranks)
        return Group(name, tuple(ranks), ranks.index(me), process_group)

    def _new_groups(self, peers: list[list[int]], is_urgent: bool = False) -> dist.ProcessGroup | None:
        return _new_groups(peers, self._timeout, self._backend, is_urgent)

    def between(self, axis: Axis, pairs: Sequence[tuple[int, int]], purpose: str) -> dict[tuple[int, int], Group]:
        """Return a group for each pair of positions along `axis` that includes this rank; the first call creates them.

        All ranks of the mesh must call it at the same point.
        """
        if (axis, purpose) not in self._between:
            me = self.world.ranks[self.world.rank]
            lines = self.mesh.peers(axis)
            found = {}
            # torch creates many groups in one call only if they share no rank. Few calls keep the start short.
            for disjoint in _without_common_members(pairs):
                # One call lists the groups of all lines, because every rank must take part in the creation of every
                # group.
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

    def extra(self, axis: Axis | Literal["gradients"], purpose: str) -> Group:
        """Return a further group of the ranks along `axis`, one per `purpose`; the first call creates it.

        `GRADIENTS` stands for the data and context axes.

        Collectives of one group must start in the same order on all its ranks. With a separate group, a thread or a
        stream communicates independently of other threads. All ranks of the mesh must call it at the same point.
        """
        if (axis, purpose) not in self._extra:
            name = self.gradients.axis if axis == GRADIENTS else axis
            self._extra[axis, purpose] = self._create((DATA, CONTEXT) if axis == GRADIENTS else (axis,), name)
        return self._extra[axis, purpose]

    def nodes(self, hosts: Mapping[int, str], size: int | None, purpose: str) -> NodeGroups:
        """Return the groups of `gradients` in and across nodes, see `NodeGroups.of` and `extra`."""
        key = (purpose, size)
        if key not in self._nodes:
            lines = [_divide_by_node(ranks, hosts, size) for ranks in self.mesh.peers(DATA, CONTEXT)]
            self._nodes[key] = _node_groups(self.gradients, lines, self._new_groups)
        return self._nodes[key]

    def between_hosts(self, purpose: str) -> Group:
        """Return a group of all ranks for messages between hosts, one per `purpose`, see `extra`."""
        if purpose not in self._hosts:
            process_group = None
            if self.world.size > 1:
                # gloo on any device, so that a message between hosts never waits for kernels. Each rank of the mesh is
                # in it.
                process_group = dist.new_group(list(self.world.ranks), timeout=self._timeout, backend="gloo")
            self._hosts[purpose] = replace(self.world, axis=purpose, process_group=process_group)
        return self._hosts[purpose]

    def make_data_default(self) -> None:
        """Make the ranks along the data axis torch's default group, as in a replicated run.

        All ranks of the mesh must call it at the same point. `default_group_kept` undoes it. The default group is a
        separate group, also for one replica: messages of the user's code must not meet messages of the library.
        """
        if self.data_parallel.size == self.world.size:
            return
        if self._stand_in is None:
            if self.data_parallel.size > 1:
                self._stand_in = self.extra(DATA, "default").process_group
            else:
                # Local synchronization: each rank makes another group, of itself alone.
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
    """Create groups that share no rank, with one call on all ranks; returns the group of this rank, if any."""
    world = all_processes()
    has_nccl = "nccl" in (backend or backend_of(world))
    options: dict[str, Any] = {"timeout": timeout}
    if has_nccl and is_urgent:
        options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # A split has the backend of its parent. It reuses the parent's connections, so a start is short.
    if has_nccl and backend is None and splits_groups(world):
        group = dist.split_group(world, peers, **options)
        # `split_group` sets the timeout of NCCL only. Python objects travel through gloo, and need it, too.
        if group is not None and timeout is not None:
            set_timeout(group, timeout)
        return group
    # torch requires every rank to create every group, also a group without this rank.
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
