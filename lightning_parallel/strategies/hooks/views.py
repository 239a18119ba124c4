"""Shows the user's hooks all parameters of the model in full, of which this rank holds a part.

    tensor axis        a shard of the layer
    pipeline axis      the parameters of this stage; of another stage's parameter, nothing
    both               one rule over all ranks of the replica

Outside hooks the parameters are ordinary tensors.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.checkpoint import Inventory, StateOwner, fill_in
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.torch import (
    DisableTorchFunctionSubclass,
    parameters_of,
    pytree,
)
from lightning_parallel.data_parallel import AbsentParameter, ParameterSlices
from lightning_parallel.tensor.autograd import whole_from_group
from lightning_parallel.tensor.layers import Replicate
from lightning_parallel.tensor.pieces import Piece, StandIn
from lightning_parallel.tensor.plan import Plan
from lightning_parallel.tensor.sharded import ShardedParameter, ShardedTensor, ShardPlace, Slices, local_numel
from lightning_parallel.tensor.sharding import Shard, reduce_partial_

__all__ = ["FullViews", "HookError", "refuse_freed"]

# The empty parameters of copied modules, by name; copies outlive a run.
_EMPTY: WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = WeakKeyDictionary()


class HookError(RuntimeError):
    """Reports a hook of your module that cannot give the result of one process.

    In a pipeline, forward hooks and gradient hooks see a microbatch. With `zero_stage=2`, the optimizer's step frees
    gradients. The error names the hook and its file, or the parameter.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import HookError, TensorParallelStrategy

        trainer = Trainer(devices=2, strategy=TensorParallelStrategy())
        try:
            trainer.fit(MyModule(), MyData())
        except HookError as error:
            print(error)  # names the hook and the way out
            raise
        ```
    """


class _RemoteParameter(StandIn, nn.Parameter):
    """Class of a parameter of another stage outside hooks, where code may meet it in a list that a hook has kept.

    Attributes:
        holder: The module of the parameter, and the name of its attribute, which is a placeholder in a step.
    """

    holder: tuple[nn.Module, str]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def shown(leaf: Any) -> Any:
            if type(leaf) is not cls:
                return leaf
            module, name = leaf.holder
            # Not by `getattr`: the user may have put a property in its place, as `parametrize` does.
            found = vars(module).get(name, parameters_of(module).get(name))
            return leaf if found is None else found

        if func is not Tensor.__hash__:
            args, kwargs = pytree.tree_map(shown, (args, kwargs or {}))
        is_left = any(type(leaf) is cls for leaf in pytree.tree_leaves((args, kwargs)))
        with DisableTorchFunctionSubclass() if is_left else nullcontext():
            return func(*args, **(kwargs or {}))


class _OwnedState(defaultdict[Any, Any]):
    """State of an optimizer in a hook, whose tensors other ranks own; the first access fills it.

    Args:
        own: The state on this rank.
        fill: Puts the entries of all ranks into this dict; every rank must call it.
    """

    def __init__(self, own: defaultdict[Any, Any], fill: Callable[[dict[Any, Any]], None]) -> None:
        super().__init__(getattr(own, "default_factory", None), own)
        self.own = own
        self.fill: Callable[[dict[Any, Any]], None] | None = fill

    def __reduce__(self) -> Any:
        # A copy of the optimizer outlives the hook.
        return defaultdict, (self.default_factory,), None, None, iter(self.items())


def _after_fill(name: str) -> Callable[..., Any]:
    own = getattr(defaultdict, name)

    def method(self: _OwnedState, *args: Any) -> Any:
        # Cleared first, because `fill` itself uses these methods.
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return own(self, *args)

    return method


for _name in ("contains", "delitem", "getitem", "iter", "len", "setitem"):
    setattr(_OwnedState, f"__{_name}__", _after_fill(f"__{_name}__"))
for _name in ("clear", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"):
    setattr(_OwnedState, _name, _after_fill(_name))


class FullViews:
    """Changes the class of parameters while a hook of the user runs.

    Args:
        module: The divided module.
        rules: How its parameters are sharded over the tensor axis, by name.
        groups: The mesh's groups.
        optimizers: Returns the optimizers of the run, each with the names in its parameter groups over all stages.
        slices: The slices of the replicas; None without ZeRO.
        meet: Waits until all replicas are about to read slices; None without ZeRO.
        owners: Owners of the state of whole parameters, by optimizer.

    Attributes:
        remote: Empty parameters in place of the parameters of other stages, by name.
        is_shown: Whether parameters are shown in full now.
    """

    def __init__(
        self,
        module: nn.Module,
        rules: Mapping[str, Shard],
        groups: MeshGroups,
        optimizers: Callable[[], Iterable[tuple[Optimizer, Sequence[Sequence[str]]]]],
        slices: ParameterSlices | None,
        meet: Callable[[str], None] | None = None,
        owners: Mapping[Optimizer, Mapping[Tensor, StateOwner]] | None = None,
    ) -> None:
        self._module = module
        self._state = ParallelState.of(module)
        self._rules = rules
        self._owners = {} if owners is None else owners
        self._optimizers = optimizers
        self._slices = slices
        # A rank that reads alone must not wait without end.
        order, states = self._state.order, self._state.full_states
        self._tensor_group = groups.tensor_parallel if order is None else groups.tensor_parallel.guarded_by(order)
        self._replica = groups.model if states is None else groups.model.guarded_by(states.meet)
        self._replicas = groups.gradients if meet is None else groups.gradients.guarded_by(meet)
        self._shown: list[Tensor] = []
        # The states of optimizers when they were shown, by `id`, which must not pass to another tensor meanwhile.
        self._states: dict[int, Any] = {}
        # Not the length of the list: a step may make the first state of an optimizer.
        self.is_shown = False
        self._show_again: Callable[[], None] = self._show_to_step
        self._in_step: list[tuple[nn.Parameter, ShardPlace]] = []
        self._places: dict[nn.Parameter, ShardPlace] | None = None
        self._is_split = False
        self._remote: set[nn.Parameter] = set()
        self._undo: list[Callable[[], None]] = []
        self._kept: list[tuple[Tensor, ShardPlace]] = []
        self._named: dict[bool, dict[str, nn.Parameter]] = {}
        self.remote: dict[str, nn.Parameter] = {}
        self._over_replica: dict[str, Shard] = {}
        self._scalars: set[nn.Parameter] = set()
        if groups.pipeline_parallel.size > 1:
            self._learn(Inventory.of(module, rules, groups.pipeline_parallel), groups)
            self._remote = set(self.remote.values())
        self._are_gradients_known = False

    def _learn(self, inventory: Inventory, groups: MeshGroups) -> None:
        """Make the rules over the replica, and empty parameters in place of other stages' parameters."""
        own = dict(self._module.named_parameters())
        device = next(iter(own.values()), torch.empty(0)).device
        stages, ranks = range(groups.pipeline_parallel.size), range(groups.tensor_parallel.size)
        for name, held in inventory.tensors.items():
            shape, rule = inventory.full_shape(name), self._rules.get(name)
            is_everywhere = rule is None and len(held.stages) == len(stages)
            # A slice of a replica has its own rule, which knows no tensors without dimensions.
            if held.is_buffer or held.is_alias or is_everywhere or not (shape or self._slices is None):
                continue
            dim = 0 if rule is None else rule.dim % len(shape)
            parts = [((0, shape[dim] if shape else 1),)] * len(ranks) if rule is None else rule.ranges
            empty = ((0, 0),)
            self._over_replica[name] = Shard(
                dim, tuple(parts[rank] if stage in held.stages else empty for stage in stages for rank in ranks)
            )
            if name not in own:
                sizes = [0 if at == dim else size for at, size in enumerate(shape or (1,))]
                self.remote[name] = nn.Parameter(torch.empty(sizes, dtype=held.dtype, device=device), held.trains)
                if not shape:
                    self._scalars.add(self.remote[name])
                path, _, attribute = name.rpartition(".")
                vars(self.remote[name])["holder"] = self._module.get_submodule(path), attribute

    @contextmanager
    def shown(self, on_all_stages: bool = True, is_step: bool = False) -> Iterator[None]:
        """Show parameters in full inside the block.

        Args:
            on_all_stages: Whether all ranks of the replica run the block; otherwise the ranks of the tensor axis do.
            is_step: Whether the block is a step, whose layers compute with shards.
        """
        # A hook may start a loop of the Trainer, with further hooks.
        if self.is_shown or self._state.is_alone:
            yield
            return
        self._show(on_all_stages, is_step)
        try:
            yield
        finally:
            self._hide()

    @property
    def has_shards(self) -> bool:
        """Whether steps can meet shards of parameters."""
        return bool(self._rules)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Show sharded parameters in full inside the block, a step, but not to the layers that compute with shards."""
        if self.is_shown or self._state.is_alone:
            yield
            return
        self._show_to_step()
        try:
            yield
        finally:
            self._hide()

    def full_parameter(self, name: str, value: Tensor) -> Tensor:
        """Return a sharded parameter in full, in autograd's graph; every rank of the tensor axis must call it."""
        rule = self._rules.get(name)
        if rule is not None:
            return Piece.by_rule(value, rule, self._tensor_group).whole()
        return whole_from_group(value, self._tensor_group) if name in self._partial else value

    @property
    def _partial(self) -> frozenset[str]:
        return frozenset() if self._state.sharding is None else self._state.sharding.partial

    def _show_to_step(self) -> None:
        self.is_shown = True
        self._show_again = self._show_to_step
        # Without a function for each parameter, since each step does so.
        self._in_step = [
            (one, place)
            for one, place in self._places_in_step().items()
            if type(one) in (nn.Parameter, AbsentParameter)
        ]
        for parameter, place in self._in_step:
            parameter.__class__ = ShardedParameter
            fields = parameter.__dict__
            fields["place"] = place
            fields["before_gradient"] = None

    def _places_in_step(self) -> dict[nn.Parameter, ShardPlace]:
        """Return the places of sharded parameters, and of parameters with partial gradients, with their users."""
        if self._places is None:
            self._places = {}
            users = self._users()
            for parameter, name in self._registered():
                rule, is_partial = self._rules.get(name), name in self._partial
                if parameter not in self._places and (rule is not None or is_partial):
                    self._places[parameter] = ShardPlace(
                        rule, self._tensor_group, users=frozenset(users[parameter]), is_partial=is_partial
                    )
        return self._places

    def _registered(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Yield the parameters of this rank under all their names."""
        # Not by `named_parameters`: in a stage that has no inputs yet, it returns placeholders.
        for path, child in self._module.named_modules(remove_duplicate=False):
            for name, parameter in parameters_of(child).items():
                if parameter is not None:
                    yield parameter, f"{path}.{name}".lstrip(".")

    def _users(self) -> dict[nn.Parameter, set[int]]:
        """Return the modules that compute with this rank's shard of a parameter, or for a part of its gradient.

        These are the owners of shards, and the sharded modules and the blocks of sequence regions around parameters.
        """
        plan = Plan() if self._state.sharding is None else self._state.sharding.plan
        # Not by `DIVISION`: the layers of a pipeline have such a record, too.
        sharded = {path for path, style in plan.styles.items() if not isinstance(style, Replicate)}
        sharded |= plan.attributes.keys() | {path for region in plan.sequence_regions for path in region.blocks}
        modules = dict(self._module.named_modules(remove_duplicate=False))
        found: dict[nn.Parameter, set[int]] = {}
        for parameter, name in self._registered():
            owner = path = name.rpartition(".")[0]
            users = found.setdefault(parameter, set())
            while path:
                if path in sharded:
                    users.add(id(modules[path]))
                path = path.rpartition(".")[0]
            # Code may call the norm of a block outside it, which then computes for the full gradient. A norm of heads
            # has no block around it without a sequence region.
            if hasattr(parameter, "shard_rule") or not users:
                users.add(id(modules[owner]))
        return found

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Show ordinary parameters inside the block, in which a step or another part of this package runs."""
        if not self.is_shown:
            yield
            return
        show_again = self._show_again
        self._hide()
        try:
            yield
        finally:
            show_again()

    def _show(self, on_all_stages: bool, is_step: bool) -> None:
        self.is_shown = True
        self._show_again = partial(self._show, on_all_stages, is_step)
        if self._slices is not None and not is_step:
            self._slices.show()
        is_split = self._is_split = on_all_stages and bool(self._over_replica)
        rules, group = (self._over_replica, self._replica) if is_split else (self._rules, self._tensor_group)
        self._are_gradients_known = not is_split
        if is_split:
            self._add_remote()
        own = self._named_parameters(is_split)
        found: list[tuple[Tensor, ShardPlace]] = []
        places: dict[Tensor, tuple[Shard | None, Group]] = {}
        for name, parameter in (*own.items(), *self._copied()):
            places[parameter] = rules.get(name), group
            place = self._place(parameter, parameter, rules.get(name), group)
            in_step = self._places_in_step().get(parameter) if is_step else None
            if in_step is not None:
                place = in_step if place is None else replace(place, users=in_step.users)
            if place is not None:
                found.append((parameter, place))
        for optimizer, listed in self._optimizers():
            for params, expected in zip(optimizer.param_groups, listed) if is_split else ():
                if set(expected) <= own.keys():
                    # In place, because optimizers keep a reference to the list.
                    params["params"][:] = [own[name] for name in expected]
                    if "param_names" in params:
                        params["param_names"][:] = expected
            has_owners = optimizer in self._owners
            if is_split and not has_owners:
                self._add_states(optimizer)
            for owner, state in optimizer.state.items():
                values = list(state.values()) if isinstance(state, dict) else []
                self._states.update(zip(map(id, values), values))
                for value in values if owner in places and not has_owners else ():
                    place = self._place(owner, value, *places[owner]) if isinstance(value, Tensor) else None
                    if place is not None:
                        found.append((value, place))
        found.extend(self._kept)
        for tensor, place in found:
            if type(tensor) in (Tensor, nn.Parameter, AbsentParameter):
                before = self._find_gradients if is_split else None
                if self._slices is not None and self._slices.has_freed(tensor):
                    before = partial(_refuse_freed, next(name for name, one in own.items() if one is tensor), tensor)
                ShardedTensor.show(tensor, place, before)
                self._shown.append(tensor)
        for optimizer in self._owners:
            optimizer.state = _OwnedState(optimizer.state, partial(self._fill_state, optimizer, own))

    def _fill_state(self, optimizer: Optimizer, own: Mapping[str, nn.Parameter], state: dict[Any, Any]) -> None:
        """Show the state of an optimizer whose tensors have owners; every rank of the group must call it."""
        group = self._replica if self._is_split else self._tensor_group
        names = {parameter: name for name, parameter in own.items()}
        # Small values travel at once. Of other tensors, only shapes do.
        mine = {
            names[parameter]: {
                key: value.to("meta") if isinstance(value, Tensor) and value.numel() > 1 else value
                for key, value in entry.items()
            }
            for parameter, entry in state.items()
            if parameter in names
        }
        replicas = Group.alone("replica") if self._slices is None else self._replicas
        for each in (group, replicas):
            if each.gate is not None:
                each.gate("all_gather_object")  # a rank may read alone
        by_rank = comm.all_gather_object(mine, group)
        everyone = comm.all_gather_object(by_rank, replicas)
        held = dict(state)
        state.clear()
        for parameter in (each for params in optimizer.param_groups for each in params["params"]):
            name = names.get(parameter, "")
            holders = {
                (rank, replica)
                for replica, ranks in enumerate(everyone)
                for rank, entries in enumerate(ranks)
                if name in entries
            }
            if not holders:
                continue
            rank, replica = min(holders)
            is_here = (group.rank, replicas.rank) in holders
            # The dict of the optimizer itself, so that changes remain.
            state[parameter] = held[parameter] if is_here else dict(everyone[replica][rank][name])
            for key, value in everyone[replica][rank][name].items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    self._show_owned(state[parameter], key, value.shape, holders, replicas, parameter.device)

    def _show_owned(
        self,
        entry: dict[str, Any],
        key: str,
        shape: torch.Size,
        holders: set[tuple[int, int]],
        replicas: Group,
        device: torch.device,
    ) -> None:
        """Show a tensor that some ranks have in full, and other ranks lack."""
        group = self._replica if self._is_split else self._tensor_group
        ranks, with_state = {rank for rank, _ in holders}, {replica for _, replica in holders}
        everything, nothing = ((0, shape[0]),), ((0, 0),)
        ranges = tuple(everything if rank in ranks else nothing for rank in range(group.size))
        rule = None if len(ranks) == group.size else Shard(0, ranges)
        slices = None
        if len(with_state) < replicas.size:
            local = shape if group.rank in ranks else torch.Size([0, *shape[1:]])
            # The slice of one replica has all elements.
            sizes = tuple(local.numel() if replica in with_state else 0 for replica in range(replicas.size))
            slices = Slices(Shard.of_sizes(sizes), replicas, local)
        if (group.rank, replicas.rank) not in holders:
            entry[key] = torch.empty([0, *shape[1:]], dtype=entry[key].dtype, device=device)
        if rule is not None or slices is not None:
            ShardedTensor.show(entry[key], ShardPlace(rule, group, slices))
            self._shown.append(entry[key])

    def _hide_states(self) -> None:
        """Give back to optimizers the state on this rank, with the changes by the hook."""
        for optimizer, owners in self._owners.items():
            shown = optimizer.state
            if not isinstance(shown, _OwnedState):
                continue
            own, optimizer.state = shown.own, shown.own
            if shown.fill is not None:
                continue  # no code has read it
            entries = dict(shown)
            for entry in entries.values():
                # In one order on all ranks, because a gather follows.
                entry.update({key: value.whole() for key, value in entry.items() if isinstance(value, Piece)})
            own.clear()
            for parameter, entry in entries.items():
                owner = owners.get(parameter, StateOwner(None, None))
                if owner.has(self._tensor_group.rank, self._replicas.rank) and parameter not in self._remote:
                    own[parameter] = entry

    def _add_states(self, optimizer: Optimizer) -> None:
        """Give the parameters of other stages empty states, with the entries of the states on this stage."""
        kept = optimizer.state
        for params in optimizer.param_groups:
            own = [each for each in params["params"] if each.dim() and isinstance(kept.get(each), dict) and kept[each]]
            for each in [each for each in params["params"] if own and each in self._remote]:
                kept[each] = {
                    key: torch.empty_like(each.data, dtype=value.dtype)
                    if isinstance(value, Tensor) and value.shape == own[0].shape
                    else copy.copy(value)
                    for key, value in kept[own[0]].items()
                }
        # Code may go through all states, in one order on all stages.
        for each in [each for params in optimizer.param_groups for each in params["params"] if each in kept]:
            kept[each] = kept.pop(each)

    def keep(self, parts: Iterable[tuple[Tensor, Shard, Group]]) -> None:
        """Show further tensors in full from now on, which optimizers keep in their attributes.

        Args:
            parts: The part of this rank, the rule and the group of each tensor.
        """
        for part, rule, group in parts:
            # Over the replica, ranks of other stages have nothing.
            own = tuple(rule.ranges[group.ranks.index(rank)] for rank in self._tensor_group.ranks)
            if 0 < part.shape[rule.dim] < rule.full_size:
                self._kept.append((part, ShardPlace(Shard(rule.dim, own), self._tensor_group)))

    def keep_parts(self, optimizer: Optimizer, known: Container[int] = ()) -> None:
        """Replace full tensors in the state of an optimizer, which code has put there, by this rank's parts.

        Args:
            optimizer: The optimizer.
            known: Tensors that are parts already, by `id`.
        """
        new = [
            (owner, state, key, value)
            for owner, state in optimizer.state.items()
            if isinstance(state, dict)
            for key, value in state.items()
            if id(value) not in known and isinstance(value, Tensor) and owner.dim() and owner not in self._remote
        ]
        if not new or optimizer in self._owners:
            return
        names: dict[Any, str] = {one: name for name, one in self._named_parameters(False).items()}
        rules, group = (self._over_replica, self._replica) if self._is_split else (self._rules, self._tensor_group)
        for owner, state, key, value in new:
            rule = rules.get(names.get(owner, ""))
            place = ShardPlace(rule, group, self._slices_of(owner))
            shard = owner.shape if place.slices is None else place.slices.shape
            shape = shard if rule is None else rule.full_shape(shard)
            is_part = shape != owner.shape or place.slices is not None
            # Code may also have made an ordinary tensor of the full shape.
            if value.shape == shape and (is_part or type(value) is Piece):
                state[key] = place.cut(value)
            elif isinstance(value, Piece):
                state[key] = value.whole()

    def forget(self) -> None:
        """Find the parameters anew, after the module has changed."""
        self._named.clear()
        self._places = None

    def _named_parameters(self, is_split: bool) -> dict[str, nn.Parameter]:
        # Kept, since hooks run several times in a step, and a walk through the module takes longer than the rest.
        if is_split not in self._named:
            self._named[is_split] = dict(self._module.named_parameters())
        return self._named[is_split]

    def _place(self, owner: Tensor, value: Tensor, rule: Shard | None, group: Group) -> ShardPlace | None:
        """Return the place of a parameter, or of a state of its optimizer; None if this rank has the full tensor."""
        slices, sliced, is_parameter = self._slices, self._slices_of(owner), value is owner
        if slices is not None and sliced is not None:
            shape = sliced.shape
            if is_parameter:
                is_slice = slices.is_narrow(owner)
            else:
                is_slice = (
                    value.dim() == len(shape) and value.shape != shape and value.numel() == slices.size(shape.numel())
                )
            if is_slice:
                return ShardPlace(rule, group, sliced if is_parameter else replace(sliced, whole=None))
            if is_parameter and rule is None and slices.has_freed(owner):
                return ShardPlace(None, group)  # to refuse a read of its gradient
        # A state of another shape, such as a count of steps, is no part.
        if rule is None or value.shape != owner.shape:
            return None
        # A tensor without dimensions is a run of one element, which other stages lack.
        is_scalar = rule.full_size == 1 and (owner.dim() == 0 or owner in self._scalars)
        return ShardPlace(None, group, Slices(rule, group, torch.Size([]))) if is_scalar else ShardPlace(rule, group)

    def _slices_of(self, owner: Tensor) -> Slices | None:
        """Return how a parameter, or a state of its optimizer, is cut into slices; None if it never is."""
        slices = self._slices
        if slices is None or not slices.divides(owner):
            return None
        shape = slices.whole_shape(owner)
        return Slices(Shard.of_sizes(slices.sizes(shape.numel())), self._replicas, shape, slices.whole_data(owner))

    def _add_remote(self) -> None:
        assert self._state.names is not None
        for parameter in self.remote.values():
            parameter.__class__ = nn.Parameter
        attributes: dict[str, dict[str, str]] = {}
        for name, first in self._state.names.parameters.items():
            path, _, attribute = name.rpartition(".")
            attributes.setdefault(path, {})[attribute] = first
        for path, firsts in attributes.items():
            if self.remote.keys().isdisjoint(firsts.values()):
                continue
            wanted = {attribute: self.remote.get(first) for attribute, first in firsts.items()}
            self._undo.append(fill_in(self._module.get_submodule(path), wanted))
        for path, child in self._copies():
            if child in _EMPTY:
                wanted = {attribute: _EMPTY[child].get(attribute) for attribute in attributes[path]}
                self._undo.append(fill_in(child, wanted))

    def _hide(self) -> None:
        self.is_shown = False
        if self._in_step:
            for parameter, _ in self._in_step:
                parameter.__class__ = _class_of(parameter)
                del parameter.__dict__["place"], parameter.__dict__["before_gradient"]
            self._in_step.clear()
            return
        self._hide_states()
        # The hook may have copied a module.
        copied = [parameter for _, parameter in self._copied() if isinstance(parameter, ShardedTensor)]
        for tensor in {id(tensor): tensor for tensor in (*self._shown, *copied)}.values():
            ShardedTensor.hide(tensor)
            if isinstance(tensor, nn.Parameter):
                tensor.__class__ = _class_of(tensor)
        self._shown.clear()
        for optimizer, _ in self._optimizers():
            self.keep_parts(optimizer, self._states)
        if self._slices is not None:
            self._slices.hide()
        self._states.clear()
        # Last first: a module that is registered under two names was filled in twice.
        for restore in reversed(self._undo):
            restore()
        self._undo.clear()
        if self._is_split:
            self._take_out_copies()
            remote = self._remote
            for optimizer, _ in self._optimizers():
                for parameter in remote & optimizer.state.keys():
                    del optimizer.state[parameter]
                for params in optimizer.param_groups:
                    is_held = [each not in remote for each in params["params"]]
                    for key in params.keys() & {"params", "param_names"}:
                        params[key][:] = compress(params[key], is_held)
            for parameter in remote:
                parameter.grad = None
                parameter.__class__ = _RemoteParameter

    def _take_out_copies(self) -> None:
        """Put the placeholders of the stage in place of empty parameters, in modules that the hook has copied."""
        for path, child in self._copies():
            own = parameters_of(child)
            empty = {key: value for key, value in own.items() if value is not None and local_numel(value) == 0}
            if empty:
                _EMPTY[child] = empty
                original = vars(self._module.get_submodule(path))
                for key in empty:
                    del own[key]
                    if key in original:
                        vars(child)[key] = original[key]

    def _copies(self) -> Iterable[tuple[str, nn.Module]]:
        return () if self._state.copies is None else self._state.copies.modules()

    def _copied(self) -> Iterable[tuple[str, nn.Parameter]]:
        copies = self._state.copies
        return () if copies is None else copies.named_parameters()

    def _find_gradients(self) -> None:
        """Give the parameters of other stages empty gradients, if these stages have gradients."""
        if self._are_gradients_known:
            return
        self._are_gradients_known = True
        mine = {name for name, one in self._module.named_parameters() if one.grad is not None}
        if self._replica.gate is not None:
            self._replica.gate("all_gather_object")  # a rank may read alone
        known = set().union(*comm.all_gather_object(mine, self._replica))
        for name in known & self.remote.keys():
            self.remote[name].grad = torch.zeros_like(self.remote[name].data)

    def run_gradient_hook(self, hook: Callable[[Any], Any], name: str, given: Tensor, is_complete: bool = False) -> Any:
        """Run a hook for the gradient of a parameter on the full tensor.

        Args:
            hook: The hook.
            name: The name of the parameter.
            given: This rank's part of its gradient, or the parameter.
            is_complete: Whether partial gradients are summed already.

        Returns:
            The part of its result.
        """
        rule = self._rules.get(name)
        is_partial = name in self._partial if rule is None else rule.replicated
        if self._state.is_alone or isinstance(given, Piece):
            return hook(given)
        if is_complete or not is_partial:
            return self._run_in_full(hook, rule, given)
        is_parameter = isinstance(given, nn.Parameter)
        # A clone, because autograd may share the gradient that it gives to a hook.
        gradient = given.grad if is_parameter else given.clone()
        if gradient is None:
            return hook(given)
        with self.hidden(), torch.no_grad():
            reduce_partial_({name: gradient}, {} if rule is None else {name: rule}, self._tensor_group)
        result = self._run_in_full(hook, rule, given if is_parameter else gradient)
        with self.hidden(), torch.no_grad():
            # A clone, because the hook may keep the gradient.
            left = given.grad if is_parameter else (gradient if result is None else result).clone()
            # The reducer sums later. One rank keeps each element, so that the sum is the result.
            if left is not None and rule is not None:
                left.copy_(rule.only_owned(left, self._tensor_group.rank))
            elif left is not None and self._tensor_group.rank:
                left.zero_()
        return None if is_parameter else left

    def _run_in_full(self, hook: Callable[[Any], Any], rule: Shard | None, given: Tensor) -> Any:
        if rule is None or isinstance(given, (Piece, ShardedTensor)):
            return hook(given)
        place = ShardPlace(rule, self._tensor_group)
        if isinstance(given, nn.Parameter):  # of the self-check
            ShardedTensor.show(given, place)
            try:
                return hook(given)
            finally:
                ShardedTensor.hide(given)
        return place.cut(hook(place.piece(given)))


def _class_of(parameter: nn.Parameter) -> type[nn.Parameter]:
    return AbsentParameter if "gather_slices" in parameter.__dict__ else nn.Parameter


def _refuse_freed(name: str, parameter: Tensor) -> None:
    # In the next backward, a gradient hook reads the new gradient.
    if parameter.grad is None:
        refuse_freed(name)


def refuse_freed(name: str) -> None:
    """Refuse to read a gradient that the optimizer's step has freed.

    Raises:
        HookError: Always.
    """
    raise HookError(
        f"Code must not read the gradient of `{name}` after the optimizer's step; got a read. With `zero_stage=2` each"
        " replica frees its slice in the step. Read gradients in `on_before_optimizer_step`, norms by Lightning's"
        " `grad_norm`, or use `zero_stage=1` [LP016]"
    )
