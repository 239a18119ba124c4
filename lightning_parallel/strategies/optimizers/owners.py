"""Gives whole tensors to optimizers that need them: each tensor has one owner among the ranks that share it.

    rank        0                    1
    before      A[0]  B[0]           A[1]  B[1]        parts of two matrices, and of their gradients
    collect     A                    B                 each owner gets one matrix in full
    step        A' and its state     B' and its state  the user's optimizer, at the same time
    deliver     A'[0] B'[0]          A'[1] B'[1]

Most optimizers step in turns, on about `TURN_BYTES` at a time. Meanwhile owners collect the tensors of later turns, and
deliver the tensors of earlier turns.

Tensor parallelism, ZeRO and both together share these steps; both collect slices first, then shards. Over the replicas
an owner collects slices of gradients (stages 2 and 3) and of parameters (stage 3). It delivers full tensors to stages 1
and 2, and slices to stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from lightning_parallel.data_parallel.host_steps import HostSteps, only_parameters, put_data
from lightning_parallel.data_parallel.parameter_slices import MOST_IN_FLIGHT, wrap_step
from lightning_parallel.tensor.sharding import REPLICATED, Shard

__all__ = ["TensorOwners"]

TURN_BYTES = BUCKET_BYTES
"""Bytes of whole parameters for which an owner calls the step once; their gradients take as many."""


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


class _SlicesOfStep(NamedTuple):
    """The slices of this replica that owners collect in a step, by parameter.

    Attributes:
        shapes: Shape of each parameter, full over the replicas.
        data: Slices of parameters, if a replica keeps no more of them.
        gradients: Slices of gradients.
    """

    shapes: dict[Tensor, torch.Size]
    data: dict[Tensor, _SharedTensor]
    gradients: dict[Tensor, _SharedTensor]


class TensorOwners:
    """Distributes whole tensors over the ranks that share them, for the steps of optimizers that need whole tensors.

    Args:
        module: The module, of which this rank holds a part.
        groups: The mesh's groups.
        slices: The slices of the replicas; None without ZeRO.
        host: Runs the steps in host memory; None on the device.

    Attributes:
        of: The owner of each shared parameter, by optimizer. Only the owner has state for it.
    """

    def __init__(
        self, module: nn.Module, groups: MeshGroups, slices: ParameterSlices | None, host: HostSteps | None = None
    ) -> None:
        self._module = module
        self._tensor = groups.tensor_parallel
        self._replicas = groups.gradients
        self._slices = slices
        self._host = host
        self._rules: dict[Tensor, Shard] = {}
        self._numel: dict[Tensor, int] = {}
        self._in_turns: set[Optimizer] = set()
        # Elements that each rank owns, by its positions in both groups.
        self._loads: dict[tuple[int, int], int] = {}
        self.of: dict[Optimizer, dict[Tensor, StateOwner]] = {}

    def take(self, optimizer: Optimizer, patches: Patches, in_turns: bool = False) -> None:
        """Let an optimizer step on whole tensors until `patches` are undone; every rank must call it.

        A second call gives owners to parameters that came since the first one.

        Args:
            optimizer: The optimizer.
            patches: Undo the change.
            in_turns: Whether its step may be called for one tensor after another.
        """
        if in_turns:
            self._in_turns.add(optimizer)
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
                self._numel[parameter] = new[parameter] = shape.numel()
        # The largest first, each to the rank with the fewest elements. No rank then has more than its share and the
        # largest tensor. The sort keeps the order of equal sizes, which is the same on all ranks. Frozen parameters
        # come last, because they have no state.
        for parameter in sorted(new, key=lambda each: (not each.requires_grad, -new[each])):
            owners[parameter] = self._place(parameter, new[parameter])
        self._take_state(optimizer, new)
        if is_new:
            wrap_step(optimizer, patches, self._turns)

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
        return owner.has(self._tensor.rank, self._replicas.rank)

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

    def _turns(self, optimizer: Optimizer) -> Iterator[None]:
        """Yield for each call of the step, while owners have whole tensors and other shared parameters are hidden."""
        watch = ParallelState.of(self._module).watch
        # A step under manual optimization sees full tensors. The messages carry the parts of this rank.
        with nullcontext() if watch is None else watch.views.hidden():
            owners = {
                parameter: owner
                for parameter, owner in self.of[optimizer].items()
                # Also without a gradient: ranks may have gradients for different parameters, but send the same.
                if parameter.requires_grad or parameter.grad is not None
            }
            slices = self._take_slices(owners)
            kept = {parameter: (parameter.data, parameter.grad) for parameter in owners}
            for parameter in owners:
                parameter.grad = None
            turns = [
                self._turn(optimizer, batch, slices, kept, is_first=index == 0)
                for index, batch in enumerate(self._batches(owners, optimizer in self._in_turns))
            ]
            try:
                yield from _side_by_side(turns)
            finally:
                for parameter, (data, gradient) in kept.items():
                    put_data(parameter, data, gradient)
                if self._slices is not None and self._slices.keeps_slices:
                    self._slices.widen()

    def _batches(self, owners: Mapping[Tensor, StateOwner], in_turns: bool) -> list[dict[Tensor, StateOwner]]:
        """Divide parameters into the turns of a step; a turn has about `TURN_BYTES` of whole tensors on each owner."""
        found: list[dict[Tensor, StateOwner]] = [{}]
        filled: dict[StateOwner, int] = {}
        for parameter, owner in owners.items():
            turn = filled.get(owner, 0) // TURN_BYTES if in_turns else 0
            found += [{} for _ in range(turn + 1 - len(found))]
            found[turn][parameter] = owner
            # Not the size of the shard, which differs between ranks.
            filled[owner] = filled.get(owner, 0) + self._numel[parameter] * parameter.element_size()
        return [batch for batch in found if batch] or [{}]

    @torch.no_grad()
    def _take_slices(self, owners: Mapping[Tensor, StateOwner]) -> _SlicesOfStep:
        """Return the slices that owners collect, and make other parameters full over the replicas."""
        slices = self._slices
        shared = [parameter for parameter, owner in owners.items() if owner.replica is not None]
        if slices is None or not shared:
            return _SlicesOfStep({}, {}, {})
        for parameter in shared if slices.keeps_slices else ():
            if not slices.is_narrow(parameter):
                slices.narrow(cast(nn.Parameter, parameter))
        narrow = {each: slices.whole_shape(each) for each in shared if slices.is_narrow(each)}
        # The replicas agree on the parameters with a gradient.
        gradients = {each: self._slice(each, each.grad, owners[each]) for each in narrow if each.grad is not None}
        data = {each: self._slice(each, each.data, owners[each]) for each in narrow if slices.keeps_slices}
        if not slices.keeps_slices:
            # Parameters become whole, with their values before the step. Their slices of gradients are freed.
            slices.widen()
        return _SlicesOfStep(narrow, data, gradients)

    def _turn(
        self,
        optimizer: Optimizer,
        batch: Mapping[Tensor, StateOwner],
        slices: _SlicesOfStep,
        kept: Mapping[Tensor, tuple[Tensor, Tensor | None]],
        is_first: bool,
    ) -> Iterator[bool]:
        """Collect tensors, step on them and deliver them; yield True for the step, and False while messages travel.

        All turns on all ranks yield at the same places. So all ranks send the messages of both groups in one order.

        Args:
            optimizer: The optimizer.
            batch: The parameters of this turn.
            slices: The slices of the step.
            kept: Data and gradient of each parameter on this rank between the turns.
            is_first: Whether the step also sees parameters without owners.
        """
        # On the replicas of the owners, full over the replicas.
        shards = {each: kept[each][0] for each in batch if each not in slices.data}
        mine = yield from self._collect(batch, slices, kept, shards)
        with only_parameters(optimizer, mine, self.of[optimizer].keys() if is_first else None):
            yield from self._calls(optimizer)
        updated = {parameter: parameter.data for parameter in mine}
        for parameter, data in updated.items():
            # A step may give a parameter new memory.
            if parameter not in self._rules and data.data_ptr() != shards[parameter].data_ptr():
                shards[parameter].copy_(data)
        for parameter in batch:
            put_data(parameter, kept[parameter][0], None)
        if self._tensor.size > 1:
            is_delivered = self._deliver_shards(batch, shards, updated)
            yield False
            is_delivered()
        if self._slices is not None:
            is_delivered = self._deliver_slices(batch, shards, kept)
            yield False
            is_delivered()

    def _calls(self, optimizer: Optimizer) -> Iterator[bool]:
        """Yield True for each call of the step on the parameters that are left in the groups of the optimizer."""
        if self._host is None:
            yield True
            return
        present = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        for _ in self._host.turns(optimizer, present):
            yield True

    def _collect(
        self,
        batch: Mapping[Tensor, StateOwner],
        slices: _SlicesOfStep,
        kept: Mapping[Tensor, tuple[Tensor, Tensor | None]],
        shards: dict[Tensor, Tensor],
    ) -> Generator[bool, None, list[Tensor]]:
        """Put whole tensors and gradients into the parameters of this owner, and return these parameters.

        Args:
            batch, slices, kept: See `_turn`.
            shards: Gets the shards that are collected.
        """
        gradients = {each: None if each in slices.shapes else kept[each][1] for each in batch}
        if self._slices is not None:
            data_arrives = self._collect_slices(batch, slices.data, slices.shapes)
            gradients_arrive = self._collect_slices(batch, slices.gradients, slices.shapes)
            yield False
            shards.update(data_arrives())
            gradients.update(gradients_arrive())
        whole: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        if self._tensor.size > 1:
            shards_arrive = self._collect_shards(batch, shards, gradients)
            yield False
            whole = shards_arrive()
        mine = [parameter for parameter in batch if self._is_mine(batch[parameter])]
        for parameter in mine:
            put_data(parameter, *whole.get(parameter, (shards[parameter], gradients[parameter])))
        return mine

    def _slice(self, parameter: Tensor, value: Tensor, owner: StateOwner) -> _SharedTensor:
        assert self._slices is not None
        assert owner.replica is not None, "slices belong to replicas"
        sizes = self._slices.sizes(self._slices.whole_shape(parameter).numel())
        return _SharedTensor(value.reshape(-1), Shard.of_sizes(sizes), owner.replica)

    @torch.no_grad()
    def _collect_slices(
        self, batch: Iterable[Tensor], slices: dict[Tensor, _SharedTensor], shapes: Mapping[Tensor, torch.Size]
    ) -> Callable[[], dict[Tensor, Tensor]]:
        """Begin to collect slices of parameters or gradients; every rank must call it.

        Returns:
            A function that returns the tensors of which the owner is in this replica, full over the replicas.
        """
        # Taken out, so that memory is freed turn by turn.
        found = {parameter: slices.pop(parameter) for parameter in batch if parameter in slices}
        end = _collecting([*found.values()], self._replicas)
        return lambda: {each: value.view(shapes[each]) for each, value in zip(found, end()) if value is not None}

    def _shard(self, parameter: Tensor, value: Tensor, owner: StateOwner) -> _SharedTensor:
        assert owner.rank is not None, "shards belong to tensor-parallel ranks"
        return _SharedTensor(value, self._rules[parameter], owner.rank)

    @torch.no_grad()
    def _collect_shards(
        self,
        owners: Mapping[Tensor, StateOwner],
        shards: Mapping[Tensor, Tensor],
        gradients: Mapping[Tensor, Tensor | None],
    ) -> Callable[[], dict[Tensor, tuple[Tensor, Tensor | None]]]:
        """Begin to collect sharded parameters.

        Returns:
            A function that returns the parameters of this owner in full, with their gradients.
        """
        sharded = [each for each in owners if each in self._rules and self._is_in_my_replica(owners[each])]
        parts = []
        for parameter in sharded:
            data, gradient = shards[parameter], gradients[parameter]
            # The owner decides whether there is a gradient. All messages have the same size without it.
            values = data, torch.zeros_like(data) if gradient is None else gradient
            parts += [self._shard(parameter, value, owners[parameter]) for value in values]
        end = _collecting(parts, self._tensor)

        def whole() -> dict[Tensor, tuple[Tensor, Tensor | None]]:
            found = end()
            return {
                parameter: (data, None if gradients[parameter] is None else gradient)
                for parameter, data, gradient in zip(sharded, found[::2], found[1::2])
                if data is not None
            }

        return whole

    @torch.no_grad()
    def _deliver_shards(
        self, owners: Mapping[Tensor, StateOwner], shards: Mapping[Tensor, Tensor], updated: Mapping[Tensor, Tensor]
    ) -> Callable[[], None]:
        """Begin to write the updated tensors of the owners in this replica into the shards of this rank.

        Returns:
            A function that ends it.
        """
        sharded = [each for each in owners if each in self._rules and self._is_in_my_replica(owners[each])]
        parts = [self._shard(each, shards[each], owners[each]) for each in sharded]
        return _delivering(parts, [updated.get(each, shards[each]) for each in sharded], self._tensor)

    @torch.no_grad()
    def _deliver_slices(
        self,
        owners: Mapping[Tensor, StateOwner],
        shards: Mapping[Tensor, Tensor],
        kept: Mapping[Tensor, tuple[Tensor, Tensor | None]],
    ) -> Callable[[], None]:
        """Begin to write the updated shards of the owners into the data of other replicas.

        Args:
            owners: The owners of the parameters.
            shards: The shards in the replicas of the owners.
            kept: The data of the parameters on this rank between steps.

        Returns:
            A function that ends it.
        """
        assert self._slices is not None
        shared = [each for each, owner in owners.items() if owner.replica is not None]
        full = [shards.get(each, kept[each][0]) for each in shared]
        if self._slices.keeps_slices:
            parts = [self._slice(each, kept[each][0], owners[each]) for each in shared]
            full = [each.reshape(-1) for each in full]
        else:
            # The other replicas need each shard in full.
            parts = [_SharedTensor(kept[each][0], REPLICATED, owners[each].replica or 0) for each in shared]
        return _delivering(parts, full, self._replicas)


def _side_by_side(turns: Iterable[Iterator[bool]]) -> Iterator[None]:
    """Yield for the step of each turn in order, while messages of the turns before and after it travel.

        turn 0    collect    step       deliver
        turn 1               collect    step       deliver
        turn 2                          collect    step       deliver

    Args:
        turns: Yield True for the step, and False for a pause, after as many pauses as all other turns.
    """
    waiting, begun = list(turns), list[Iterator[bool]]()
    try:
        while waiting or begun:
            # The newest turn first: its messages begin before the step, and messages of earlier turns end after it.
            begun = waiting[:1] + begun
            del waiting[:1]
            for turn in list(begun):
                for is_step in turn:
                    if not is_step:
                        break
                    yield
                else:
                    begun.remove(turn)
    finally:
        for turn in begun:
            turn.close()  # type: ignore[attr-defined]


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


def _collecting(parts: Sequence[_SharedTensor], group: Group) -> Callable[[], list[Tensor | None]]:
    """Begin to collect tensors; every rank of the group must call it.

    Returns:
        A function that returns the whole tensors that this rank owns, and None for other tensors.
    """
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

    end = _in_flight(_rounds(parts, group), start, land)

    def collected() -> list[Tensor | None]:
        end()
        return found

    return collected


def _delivering(parts: Sequence[_SharedTensor], whole: Sequence[Tensor], group: Group) -> Callable[[], None]:
    """Begin to write whole tensors of their owners into the parts; every rank of the group calls it.

    Args:
        parts: The parts.
        whole: The whole tensor of each part that this rank owns; other entries are not read.
        group: The group.

    Returns:
        A function that ends it.
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

    return _in_flight(_rounds(parts, group), start, land)


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
    rounds: Sequence[list[list[int]]],
    start: Callable[[list[list[int]]], Pending],
    land: Callable[[list[list[int]], Tensor], None],
) -> Callable[[], None]:
    """Start the first messages of rounds, and return a function that runs all of them, a few at the same time."""
    # A limit for memory: each message in flight holds copies of its tensors.
    flights = [(each, start(each)) for each in rounds[:MOST_IN_FLIGHT]]

    @torch.no_grad()
    def end() -> None:
        for each in rounds[MOST_IN_FLIGHT:]:
            flights.append((each, start(each)))
            first, pending = flights.pop(0)
            land(first, pending.wait())
        for first, pending in flights:
            land(first, pending.wait())

    return end
