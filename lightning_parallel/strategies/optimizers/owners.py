"""Gives whole tensors to optimizers that need them: each tensor has one owner among the ranks that share it.

    rank        0                    1
    before      A[0]  B[0]           A[1]  B[1]        parts of two matrices, and of their gradients
    collect     A                    B                 each owner gets one matrix in full
    step        A' and its state     B' and its state  the user's optimizer, at the same time
    deliver     A'[0] B'[0]          A'[1] B'[1]

Tensor parallelism, ZeRO and both together share these steps; both collect slices first, then shards. Over the replicas
an owner collects slices of gradients (stages 2 and 3) and of parameters (stage 3). It delivers full tensors to stages 1
and 2, and slices to stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.checkpoint import StateOwner
from lightning_parallel.comm import Group, MeshGroups, Pending, fill_buckets
from lightning_parallel.compat import ParallelState, Patches
from lightning_parallel.data_parallel import ParameterSlices
from lightning_parallel.data_parallel.bucketed_reducer import BUCKET_BYTES
from lightning_parallel.data_parallel.parameter_slices import MOST_IN_FLIGHT, wrap_step
from lightning_parallel.tensor.sharding import REPLICATED, Shard

__all__ = ["TensorOwners"]


class _SharedTensor(NamedTuple):
    """A part of a tensor on this rank.

    Attributes:
        value: The part.
        rule: How the ranks of the group hold parts of the tensor.
        owner: Position in the group of the rank that gets, or has, the whole tensor.
    """

    value: Tensor
    rule: Shard
    owner: int

    @property
    def shape(self) -> torch.Size:
        return self.rule.full_shape(self.value.shape)


class TensorOwners:
    """Distributes whole tensors over the ranks that share them, for the steps of optimizers that need whole tensors.

    Args:
        module: The module, of which this rank holds a part.
        groups: The mesh's groups.
        slices: The slices of the replicas; None without ZeRO.

    Attributes:
        of: The owner of each shared parameter, by optimizer. Only the owner has state for it.
    """

    def __init__(self, module: nn.Module, groups: MeshGroups, slices: ParameterSlices | None) -> None:
        self._module = module
        self._tensor = groups.tensor_parallel
        self._replicas = groups.data_parallel
        self._slices = slices
        self._rules: dict[Tensor, Shard] = {}
        # Elements that each rank owns, by its positions in both groups.
        self._loads: dict[tuple[int, int], int] = {}
        self.of: dict[Optimizer, dict[Tensor, StateOwner]] = {}

    def take(self, optimizer: Optimizer, patches: Patches) -> None:
        """Let an optimizer step on whole tensors until `patches` are undone; every rank must call it.

        A second call gives owners to parameters that came since the first one.
        """
        rules = ParallelState.of(self._module).rules
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        is_new = optimizer not in self.of
        owners = self.of.setdefault(optimizer, {})
        new: dict[Tensor, int] = {}
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter in owners:
                continue
            shape = parameter.shape if self._slices is None else self._slices.whole_shape(parameter)
            rule = rules.get(names.get(id(parameter), ""))
            if rule is not None:
                self._rules[parameter] = rule
                shape = rule.full_shape(shape)
            if rule is not None or self._is_shared_by_replicas(parameter):
                new[parameter] = shape.numel()
        # The largest first, each to the rank with the fewest elements. No rank then has more than its share and the
        # largest tensor. The sort keeps the order of equal sizes, which is the same on all ranks. Frozen parameters
        # come last, because they have no state.
        for parameter in sorted(new, key=lambda each: (not each.requires_grad, -new[each])):
            owners[parameter] = self._place(parameter, new[parameter])
        self._take_state(optimizer, new)
        if is_new:
            wrap_step(optimizer, patches, self._step)

    def _is_shared_by_replicas(self, parameter: Tensor) -> bool:
        return self._slices is not None and self._slices.divides(parameter)

    def _place(self, parameter: Tensor, numel: int) -> StateOwner:
        """Return the owner of a new parameter, the rank with the fewest elements so far."""
        replicas = range(self._replicas.size) if self._is_shared_by_replicas(parameter) else [0]
        ranks = range(self._tensor.size)
        # All tensor-parallel ranks of a replica step on a replicated parameter, which costs no message.
        places = [(rank, replica) for replica in replicas for rank in (ranks if parameter in self._rules else [0])]
        rank, replica = min(places, key=lambda place: self._loads.get(place, 0))
        for each in [rank] if parameter in self._rules else ranks:
            self._loads[each, replica] = self._loads.get((each, replica), 0) + numel
        return StateOwner(
            rank if parameter in self._rules else None, replica if self._is_shared_by_replicas(parameter) else None
        )

    def _is_mine(self, owner: StateOwner) -> bool:
        return self._is_in_my_replica(owner) and owner.rank in (None, self._tensor.rank)

    def _is_in_my_replica(self, owner: StateOwner) -> bool:
        return owner.replica in (None, self._replicas.rank)

    @torch.no_grad()
    def _take_state(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Leave the state that an optimizer has made in its constructor to the owners, as whole tensors."""
        for parameter in [each for each in parameters if each in optimizer.state]:
            state, rule = optimizer.state[parameter], self._rules.get(parameter)
            for key, value in state.items() if rule is not None else ():
                assert rule is not None
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    parts = comm.all_gather(value, self._tensor, rule.dim, rule.sizes).split(rule.sizes, rule.dim)
                    state[key] = rule.merge(parts)
            if not self._is_mine(self.of[optimizer][parameter]):
                del optimizer.state[parameter]

    # -------------------------------------------------------------------------------------------------- the step

    @contextmanager
    def _step(self, optimizer: Optimizer) -> Iterator[None]:
        """Give whole tensors to their owners inside the block, and hide other shared parameters from the optimizer."""
        watch = ParallelState.of(self._module).watch
        # A step under manual optimization sees full tensors. The messages carry the parts of this rank.
        with nullcontext() if watch is None else watch.views.hidden():
            owners = {
                parameter: owner
                for parameter, owner in self.of[optimizer].items()
                # Also without a gradient: ranks may have gradients for different parameters, but send the same.
                if parameter.requires_grad or parameter.grad is not None
            }
            # Frozen parameters stay in parts, which no optimizer must take for whole tensors.
            hidden = {each for each in self.of[optimizer] if each not in owners or not self._is_mine(owners[each])}
            shards, gradients = self._collect_slices(owners)
            kept = {parameter: (parameter.data, parameter.grad) for parameter in owners}
            whole = self._collect_shards(owners, shards, gradients)
            for parameter in owners:
                if parameter in hidden:
                    parameter.grad = None
                else:
                    _replace(parameter, *whole.get(parameter, (shards[parameter], gradients[parameter])))
            try:
                with _without(optimizer, hidden):
                    yield
                self._deliver(owners, shards, {parameter: data for parameter, (data, _) in kept.items()})
            finally:
                for parameter, (data, gradient) in kept.items():
                    _replace(parameter, data, gradient)
                if self._keeps_slices and self._slices is not None:
                    self._slices.widen()

    @property
    def _keeps_slices(self) -> bool:
        return self._slices is not None and self._slices.keeps_slices

    def _slice(self, parameter: Tensor, value: Tensor, owner: StateOwner) -> _SharedTensor:
        assert self._slices is not None
        assert owner.replica is not None, "slices belong to replicas"
        sizes = self._slices.sizes(self._slices.whole_shape(parameter).numel())
        return _SharedTensor(value.reshape(-1), Shard.of_sizes(sizes), owner.replica)

    @torch.no_grad()
    def _collect_slices(
        self, owners: Mapping[Tensor, StateOwner]
    ) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor | None]]:
        """Return shards and their gradients, which are full over the replicas; the replicas of the owners have all."""
        slices = self._slices
        shared = [parameter for parameter, owner in owners.items() if owner.replica is not None]
        if slices is None or not shared:
            return {each: each.data for each in owners}, {each: each.grad for each in owners}
        for parameter in shared if slices.keeps_slices else ():
            if not slices.is_narrow(parameter):
                slices.narrow(cast(nn.Parameter, parameter))
        narrow = {each: slices.whole_shape(each) for each in shared if slices.is_narrow(each)}
        # The replicas agree on the parameters with a gradient.
        found = {each: self._slice(each, each.grad, owners[each]) for each in narrow if each.grad is not None}
        data = {each: self._slice(each, each.data, owners[each]) for each in narrow if slices.keeps_slices}
        if not slices.keeps_slices:
            # Parameters become whole, with their values before the step. Their slices of gradients are freed.
            slices.widen()
        shards = {each: each.data for each in owners if each not in data}
        gradients: dict[Tensor, Tensor | None] = {each: None if each in narrow else each.grad for each in owners}
        for parameter, value in zip(data, _collected([*data.values()], self._replicas)):
            if value is not None:
                shards[parameter] = value.view(narrow[parameter])
        for parameter, value in zip(found, _collected([*found.values()], self._replicas)):
            if value is not None:
                gradients[parameter] = value.view(narrow[parameter])
        return shards, gradients

    def _shard(self, parameter: Tensor, value: Tensor, owner: StateOwner) -> _SharedTensor:
        assert owner.rank is not None, "shards belong to tensor-parallel ranks"
        return _SharedTensor(value, self._rules[parameter], owner.rank)

    @torch.no_grad()
    def _collect_shards(
        self,
        owners: Mapping[Tensor, StateOwner],
        shards: Mapping[Tensor, Tensor],
        gradients: Mapping[Tensor, Tensor | None],
    ) -> dict[Tensor, tuple[Tensor, Tensor | None]]:
        """Return the sharded parameters of this owner in full, with their gradients."""
        sharded = [each for each in owners if each in self._rules and self._is_in_my_replica(owners[each])]
        parts = []
        for parameter in sharded:
            data, gradient = shards[parameter], gradients[parameter]
            # The owner decides whether there is a gradient. All messages have the same size without it.
            values = data, torch.zeros_like(data) if gradient is None else gradient
            parts += [self._shard(parameter, value, owners[parameter]) for value in values]
        found = _collected(parts, self._tensor)
        whole: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        for parameter, whole_data, whole_gradient in zip(sharded, found[::2], found[1::2]):
            if whole_data is not None:
                whole[parameter] = whole_data, None if gradients[parameter] is None else whole_gradient
        return whole

    @torch.no_grad()
    def _deliver(
        self, owners: Mapping[Tensor, StateOwner], shards: Mapping[Tensor, Tensor], kept: Mapping[Tensor, Tensor]
    ) -> None:
        """Write the updated tensors of all owners into the parts of this rank.

        Args:
            owners: The owners of the parameters.
            shards: The shards in the replicas of the owners.
            kept: The data of the parameters on this rank between steps.
        """
        for parameter, owner in owners.items():
            # A step may give a parameter new memory, also a parameter that is full on this rank.
            is_whole = parameter not in self._rules and self._is_mine(owner)
            if is_whole and parameter.data_ptr() != shards[parameter].data_ptr():
                shards[parameter].copy_(parameter.data)
        sharded = [each for each in owners if each in self._rules and self._is_in_my_replica(owners[each])]
        parts = [self._shard(each, shards[each], owners[each]) for each in sharded]
        _deliver(parts, [each.data for each in sharded], self._tensor)
        shared = [each for each, owner in owners.items() if owner.replica is not None]
        if self._keeps_slices:
            parts = [self._slice(each, kept[each], owners[each]) for each in shared]
        else:
            # The other replicas need each shard in full.
            parts = [_SharedTensor(kept[each], REPLICATED, owners[each].replica or 0) for each in shared]
        full = [shards.get(each, kept[each]) for each in shared]
        _deliver(parts, [each.reshape(-1) for each in full] if self._keeps_slices else full, self._replicas)


@contextmanager
def _without(optimizer: Optimizer, hidden: set[Tensor]) -> Iterator[None]:
    """Take parameters out of the groups of an optimizer inside the block: some steps expect a gradient for each."""
    groups = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
    # In place, because optimizers keep references to the lists.
    for params, every in groups:
        params[:] = [each for each in every if each not in hidden]
    try:
        yield
    finally:
        for params, every in groups:
            params[:] = every


# ------------------------------------------------------------------------------------------------------- the messages


def _rounds(parts: Sequence[_SharedTensor], group: Group) -> list[list[list[int]]]:
    """Divide parts into rounds of one message to each rank; a round has the indices of parts by their owner."""
    kinds: dict[Any, list[list[int]]] = {}
    for index, part in enumerate(parts):
        kind = part.value.dtype, part.value.device
        kinds.setdefault(kind, [[] for _ in range(group.size)])[part.owner].append(index)
    rounds: list[list[list[int]]] = []
    for by_owner in kinds.values():
        buckets = [
            fill_buckets(
                {str(index): parts[index].shape.numel() * parts[index].value.element_size() for index in indices},
                BUCKET_BYTES,
            )
            for indices in by_owner
        ]
        # All owners receive at the same time, each its next bucket.
        rounds += [[list(map(int, names)) for names in each] for each in zip_longest(*buckets, fillvalue=[])]
    return rounds


def _collected(parts: Sequence[_SharedTensor], group: Group) -> list[Tensor | None]:
    """Return the whole tensors that this rank owns, and None for other tensors; every rank of the group calls it."""
    found: list[Tensor | None] = [None] * len(parts)

    def start(by_owner: list[list[int]]) -> Pending:
        sent = [[parts[index].value.reshape(-1) for index in indices] for indices in by_owner]
        mine = by_owner[group.rank]
        arriving = [sum(_size(parts[index], rank) for index in mine) for rank in range(group.size)]
        return _exchange(sent, arriving, parts[next(index for each in by_owner for index in each)].value, group)

    def land(by_owner: list[list[int]], received: Tensor) -> None:
        mine = by_owner[group.rank]
        sizes = [_size(parts[index], rank) for rank in range(group.size) for index in mine]
        pieces = received.split(sizes)
        for at, index in enumerate(mine):
            part = parts[index]
            by_rank = pieces[at :: len(mine)]
            shards = [piece.view(part.rule.local_shape(part.shape, rank)) for rank, piece in enumerate(by_rank)]
            found[index] = part.rule.merge(shards)

    _in_flight(_rounds(parts, group), start, land)
    return found


def _deliver(parts: Sequence[_SharedTensor], whole: Sequence[Tensor], group: Group) -> None:
    """Write whole tensors of their owners into the parts; every rank of the group calls it.

    Args:
        parts: The parts.
        whole: The whole tensor of each part that this rank owns; other entries are not read.
        group: The group.
    """

    def start(by_owner: list[list[int]]) -> Pending:
        sent = [
            [parts[index].rule.split(whole[index], rank).reshape(-1) for index in by_owner[group.rank]]
            for rank in range(group.size)
        ]
        arriving = [sum(parts[index].value.numel() for index in indices) for indices in by_owner]
        return _exchange(sent, arriving, parts[next(index for each in by_owner for index in each)].value, group)

    def land(by_owner: list[list[int]], received: Tensor) -> None:
        order = [index for indices in by_owner for index in indices]
        for index, piece in zip(order, received.split([parts[index].value.numel() for index in order])):
            parts[index].value.copy_(piece.view(parts[index].value.shape))

    _in_flight(_rounds(parts, group), start, land)


def _size(part: _SharedTensor, rank: int) -> int:
    return part.rule.local_shape(part.shape, rank).numel()


def _exchange(sent: Sequence[Sequence[Tensor]], arriving: Sequence[int], like: Tensor, group: Group) -> Pending:
    """Start to send tensors to each rank, and to receive as many elements as given from each rank."""
    flat = [each for tensors in sent for each in tensors]
    message = torch.cat(flat) if flat else like.new_empty(0)
    leaving = [sum(each.numel() for each in tensors) for tensors in sent]
    pending: Pending = comm.all_to_all(message, group, leaving, arriving, async_op=True)
    return pending


def _in_flight(
    rounds: Iterable[list[list[int]]],
    start: Callable[[list[list[int]]], Pending],
    land: Callable[[list[list[int]], Tensor], None],
) -> None:
    """Run the messages of rounds, a few at the same time."""
    flights: list[tuple[list[list[int]], Pending]] = []
    for each in rounds:
        flights.append((each, start(each)))
        # A limit for memory: each message in flight holds copies of its tensors.
        if len(flights) > MOST_IN_FLIGHT:
            first, pending = flights.pop(0)
            land(first, pending.wait())
    for first, pending in flights:
        land(first, pending.wait())


def _replace(parameter: Tensor, data: Tensor, gradient: Tensor | None) -> None:
    """Give a parameter other data, and a gradient of the same shape."""
    # Cleared first: a gradient must have the shape of its parameter at any time.
    parameter.grad = None
    parameter.data = data
    parameter.grad = gradient
