"""Compression between nodes: dense inside a node, where links are fast, compressed across nodes, where they are slow.

    node 0                      node 1
    rank 0   a b | c d          rank 2   a b | c d        gradients of the four parameters, on each rank
    rank 1   a b | c d          rank 3   a b | c d

    1. inside    each parameter is summed on its owner: a, b on the first rank of each node, c, d on the second
    2. across    rank 0 and 2 compress the means of a, b; rank 1 and 3 the means of c, d
    3. inside    owners broadcast their means to the other ranks of their node

The ranks of a node divide the encoding, the memory and the messages between nodes. Owners are balanced by size, in full
parameters: low-rank methods need matrices. To the compressor, a node is one rank. A checkpoint therefore holds one
state per node, and any reducer continues from these states. A state has one more entry:

    "owners"     [parameters of the first rank of a node, of the second, ...]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group, NodeGroups, Phases
from lightning_parallel.compression.compressor_state import SavedStates
from lightning_parallel.compression.feedback import working_dtype
from lightning_parallel.compression.reducer import GroupLike, Reducer, ReductionStep, as_group

__all__ = ["HierarchicalReducer", "HierarchicalStep", "assign_owners"]


def assign_owners(sizes: Mapping[str, int], owners: dict[str, int], total: list[int]) -> None:
    """Give each parameter without an owner to the rank with the fewest elements of `sizes`, then of all.

    Args:
        sizes: Elements by name.
        owners: Position of the owner by name; extended.
        total: Elements of each rank; increased.
    """
    load = [0] * len(total)
    for name in sizes.keys() & owners.keys():
        load[owners[name]] += sizes[name]
    # Largest first: small parameters then even out the differences. The names make the order equal on all ranks.
    for name in sorted(sizes.keys() - owners.keys(), key=lambda name: (-sizes[name], name)):
        place = min(range(len(total)), key=lambda place: (load[place], total[place], place))
        owners[name] = place
        load[place] += sizes[name]
        total[place] += sizes[name]


@dataclass
class _Part:
    """The gradients of one dtype and owner that travel inside a node together.

    Attributes:
        owner: Position of the rank in the node.
        flat: The gradients in the working dtype; a lone contiguous gradient of this dtype is its own `flat`.
    """

    owner: int
    names: list[str]
    gradients: list[Tensor]
    flat: Tensor

    @classmethod
    def of(cls, owner: int, named: Mapping[str, Tensor]) -> _Part:
        """Put gradients together."""
        gradients = [gradient.detach() for gradient in named.values()]
        dtype = working_dtype(gradients[0].dtype)
        # The sum runs in the working dtype, as between nodes: 16 bits would round each partial sum.
        if len(gradients) == 1 and gradients[0].dtype == dtype and gradients[0].is_contiguous():
            flat = gradients[0].view(-1)
        else:
            flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
        return cls(owner, list(named), gradients, flat)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of `flat` in the shapes of the gradients, by name."""
        parts = flat.split([gradient.numel() for gradient in self.gradients])
        return {name: part.view(g.shape) for name, part, g in zip(self.names, parts, self.gradients)}


class HierarchicalReducer:
    """Replaces gradients by their mean over all ranks of all nodes.

    Each rank compresses its part of the mean of its node.

    Args:
        reducer: Compressor of the mean across nodes.
        nodes: Groups of ranks. No other communication may use the groups inside and across nodes during a step.
        sizes: Elements by parameter name, which balance the owners instead of the elements of the gradients. Shards of
            unequal size, and the replicated parameters with them, then have the same owners on all ranks.
    """

    def __init__(self, reducer: Reducer, nodes: NodeGroups, sizes: Optional[Mapping[str, int]] = None) -> None:
        self.reducer = reducer
        self.nodes = nodes
        self._sizes = {} if sizes is None else dict(sizes)
        self._total = [0] * nodes.inside.size
        self.tried: set[frozenset[str]] = set()
        if any(place >= nodes.inside.size for place in reducer.owners.values()):
            reducer.owners = {}  # of larger nodes

    @property
    def scale(self) -> float:
        """The loss scale."""
        return self.reducer.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self.reducer.scale = scale

    @property
    def expects_rollback(self) -> bool:
        """See `Reducer`."""
        return self.reducer.expects_rollback

    @expects_rollback.setter
    def expects_rollback(self, expects: bool) -> None:
        self.reducer.expects_rollback = expects

    def begin(self, group: GroupLike = None) -> HierarchicalStep:
        """Start a step; `group` is the group of all ranks, or another unused group of the same ranks."""
        return HierarchicalStep(self, self.nodes.whole if group is None else as_group(group))

    def owned(self, named_gradients: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the gradients of each rank of a node, by its position; without empty and repeated tensors."""
        # Tensors hash by identity: a tensor under two names is reduced once, under its first name.
        unique = {tensor: name for name, tensor in sorted(named_gradients.items(), reverse=True) if tensor.numel()}
        named = {name: tensor for tensor, name in unique.items()}
        sizes = {name: self._sizes.get(name, tensor.numel()) for name, tensor in named.items()}
        assign_owners(sizes, self.reducer.owners, self._total)
        owned: list[dict[str, Tensor]] = [{} for _ in self._total]
        for name in sorted(named):
            owned[self.reducer.owners[name]][name] = named[name]
        return owned

    def leave_device(self) -> None:
        """See `Reducer.leave_device`."""
        self.reducer.leave_device()

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state, which covers the parameters that the rank owns."""
        return {**self.reducer.state_dict(), "owners": self._names_by_owner()}

    def load_state_dict(self, state: SavedStates, group: GroupLike = None) -> None:
        """Continue from `state_dict()` of the same rank, or from a list with the full state of each node.

        The number of nodes may differ, and the full states may come from another reducer.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        saved = states[0].get("owners", ())
        owners = self.reducer.owners = {}
        self._total = [0] * len(self._total)
        if len(saved) == len(self._total):
            owners.update((name, place) for place, names in enumerate(saved) for name in names)
        sizes: dict[str, int] = {}
        for one in states:
            for named in one.values():
                for name, tensor in named.items() if isinstance(named, Mapping) else ():
                    sizes[name] = max(sizes.get(name, 0), tensor.numel())
        assign_owners(sizes, owners, self._total)
        mine = [self._owned_state(one) for one in states]
        self.reducer.load_state_dict(mine[0] if isinstance(state, Mapping) else mine, self.nodes.across)

    def _owned_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of `state` for the parameters that this rank owns."""
        rank, owners = self.nodes.inside.rank, self.reducer.owners
        return {
            key: {name: tensor for name, tensor in value.items() if owners[name] == rank}
            if isinstance(value, Mapping)
            else value
            for key, value in state.items()
        }

    def _names_by_owner(self) -> list[list[str]]:
        names: list[list[str]] = [[] for _ in self._total]
        for name, place in self.reducer.owners.items():
            names[place].append(name)
        return names


class HierarchicalStep:
    """One optimizer step of a `HierarchicalReducer`, in any number of buckets."""

    def __init__(self, reducer: HierarchicalReducer, group: Group) -> None:
        self._reducer = reducer
        self._group = group
        self._nodes = reducer.nodes
        self._device = torch.device("cpu")
        self._verdict: Optional[Tensor] = None
        # This step only compares gradients. Its constructor rolls back the memory, which both steps share, so it comes
        # first.
        self._all_ranks = ReductionStep(reducer.reducer, group)
        self._across = reducer.reducer.begin(reducer.nodes.across)

    def watch(self, received: Tensor) -> None:
        """See `ReductionStep.watch`."""
        self._across.watch(received)

    def reduce_(self, named_gradients: Mapping[str, Tensor], shards: Optional[Mapping[str, int]] = None) -> None:
        """Replace some of the gradients by their full mean; `shards` is ignored."""
        # Compared over all ranks. Across nodes, only ranks at one position would find a difference, and raise alone.
        self._all_ranks.agree(named_gradients)
        for gradient in named_gradients.values():
            self._device = gradient.device
        owned = self._reducer.owned(named_gradients)
        parts = [_Part.of(owner, named) for owner, all_named in enumerate(owned) for named in _by_kind(all_named)]
        # All sums begin before the first wait, so that they overlap.
        for sent in [comm.reduce_(part.flat, self._nodes.inside, part.owner, async_op=True) for part in parts]:
            sent.wait()
        mine = [part for part in parts if part.owner == self._nodes.inside.rank]
        self._reduce_across(mine, frozenset(named_gradients))
        self._share(parts)

    def overlaps(self, named_gradients: Mapping[str, Tensor]) -> bool:
        """Return False: buckets share the groups inside and across nodes."""
        return False

    def phases(
        self, named_gradients: Mapping[str, Tensor], group: Group, shards: Optional[Mapping[str, int]] = None
    ) -> Phases:
        """Refuse: see `overlaps`."""
        raise RuntimeError("Compression by nodes must run through `reduce_`, because its communication has no phases")

    def _reduce_across(self, mine: Sequence[_Part], names: frozenset[str]) -> None:
        """Replace the sums over the node by means over all nodes."""
        means: dict[str, Tensor] = {}
        for part in mine:
            # Rounded to the gradients' dtype, in which plain means are sent.
            part.flat = part.flat.div_(self._nodes.inside.size).to(part.gradients[0].dtype)
            means |= part.named(part.flat)
        failure: Optional[Exception] = None
        try:
            if self._nodes.across.size == 1:
                # With one node no compressor runs, so this step watches the means.
                for part in mine:
                    self._across.watch(part.flat)
            else:
                self._across.reduce_(means)
        except Exception as error:
            failure = error
        # An owner may fail alone, and the other ranks of its node would wait for it. Errors in settings show in the
        # first step of these gradients. Later only a dead process fails, and the heartbeat tells the other ranks.
        if names not in self._reducer.tried:
            comm.raise_together(failure, self._group)
            self._reducer.tried.add(names)
        if failure is not None:
            raise failure

    def _share(self, parts: Sequence[_Part]) -> None:
        """Give each owner's means to the other ranks of the node, in the gradients' dtype."""
        inside, num_bytes = self._nodes.inside, 0
        sent = []
        for part in parts:
            # No copy on the owner, whose mean has this dtype already.
            mean = part.flat.to(part.gradients[0].dtype)
            sent.append(comm.broadcast_(mean, inside, part.owner, async_op=True))
            num_bytes += mean.numel() * working_dtype(mean.dtype).itemsize + mean.nbytes
        for part, pending in zip(parts, sent):
            for gradient, mean in zip(part.gradients, part.named(pending.wait()).values()):
                # A lone contiguous gradient was broadcast in its own memory.
                if gradient.data_ptr() != mean.data_ptr():
                    gradient.copy_(mean)
        # Counted for bandwidth-optimal algorithms, as between nodes; equal on all ranks of a node.
        self._across.inside_bytes += round(num_bytes * (inside.size - 1) / inside.size)

    @property
    def verdict(self) -> Tensor:
        """Whether every gradient was finite on every rank. The first access communicates; every rank must make it."""
        if self._verdict is None:
            # Owners at one position of all nodes have seen the same means. The owners of one node have seen all means.
            mine = self._across.verdict.to(self._device, torch.uint8)
            self._verdict = comm.all_reduce(mine, self._nodes.inside, "min").bool()
        return self._verdict

    def commit(self, finite: Optional[bool] = None) -> bool:
        """End the step on all ranks; False, without a change of state, if a gradient was not finite on any rank."""
        return self._across.commit(bool(self.verdict) if finite is None else finite)

    def rollback(self) -> None:
        """End the step and restore the state before it."""
        self._across.rollback()


def _by_kind(named: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in named.items():
        kinds.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    return list(kinds.values())
