"""Gathers the state of the full model under the names of one process, and scatters it, for checkpoints of any layout.

A rank holds tensors of its pipeline stages, or shards of them. The layout of a state gives the stage and the shard
rule of every value of the full model. Saving gathers by the layout, and loading scatters by it.
Gathered tensors are full on the first rank, for one file that stock Lightning reads. With `as_parts`, each rank gets
tensors without data that know its own part.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.checkpoint.reader import StoredTensor, take_part
from lightning_parallel.checkpoint.writer import PartialTensor, TensorPart
from lightning_parallel.comm import Group, fingerprints
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.torch import versions_of, with_versions
from lightning_parallel.data_parallel import ParameterSlices
from lightning_parallel.tensor.sharding import REPLICATED, Shard

__all__ = ["Checkpoints", "ModelNames", "StateOwner", "rules_by_name"]

K = TypeVar("K", bound=Hashable)
_Slot = tuple[str, str]  # a parameter and a key of its state
ParameterGroups = Sequence[Sequence[str]]
"""Names of the parameters in each parameter group of an optimizer."""


class ModelNames(NamedTuple):
    """Lists the names of the full model, recorded before a pipeline frees the parameters of other stages.

    Attributes:
        state: Names in the state dict, in order.
        parameters: First name of each parameter, by each of its names, in order.
    """

    state: tuple[str, ...]
    parameters: dict[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> ModelNames:
        """Record the names in `module`."""
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        every = {name: first[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}
        return cls(tuple(_own_part(module)), every)


class StateOwner(NamedTuple):
    """Names the rank that has the whole state of a parameter, for optimizers that step on whole tensors.

    Attributes:
        rank: Position in the tensor group; None if all ranks of this group have the state.
        replica: Position among the replicas; None if all replicas have the state.
    """

    rank: int | None
    replica: int | None

    def has(self, rank: int, replica: int) -> bool:
        """Return whether a rank has the state, at its positions in both groups."""
        return self.rank in (None, rank) and self.replica in (None, replica)


def rules_by_name(module: nn.Module, rules: Mapping[str, Shard]) -> dict[str, Shard]:
    """Extend `rules` to every name of a shared tensor."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    # A plan names a shared tensor once, but the state dict lists it under each name.
    by_identity = {id(tensor): rules[name] for name, tensor in tensors.items() if name in rules}
    return {name: by_identity[id(tensor)] for name, tensor in tensors.items() if id(tensor) in by_identity}


def _own_part(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of the part of this rank."""
    with ParallelState.of(module).own_parts():
        return module.state_dict()


class _Place(NamedTuple):
    """Locates a value of the state of the full model.

    Attributes:
        stage: Position in the pipeline group of the first rank that holds the value.
        shard: Shard rule over the tensor group of that rank; None for a replicated value.
        shape: Shape of the full tensor.
        dtype: Element type; None for a value that is no tensor.
        constant: The value itself, if it is no tensor.
        alias: Equal for values of one rank that share memory.
    """

    stage: int
    shard: Shard | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    constant: Any
    alias: Hashable


_KNOWN_KEYS = {"state", "param_groups"}


class _Contents(NamedTuple):
    """Summarizes a value in an optimizer's state dict under a key other than `state` and `param_groups`.

    Attributes:
        tensors: Shape and hash of each tensor with several elements.
        lengths: Lengths of all containers.
        amount: Number of tensors.
    """

    tensors: list[tuple[tuple[int, ...], int]]
    lengths: list[int]
    amount: int


@dataclass(frozen=True)
class Checkpoints:
    """Gathers the state of a model and its optimizers for a checkpoint, and scatters the state in a checkpoint.

    Every rank of the replica must call each method at the same point.

    Attributes:
        module: The model, of which this rank holds a part.
        rules: How its tensors are sharded over the tensor axis, by name. Other tensors are replicated.
        tensor_group: The ranks that hold the shards of one stage.
        pipeline_group: The ranks that hold the stages.
        names: Names of the full model; necessary if the pipeline group has several ranks.
        device: Device of messages between stages.
        is_saved: Whether values of this replica are gathered. Other replicas need names and shapes only.
        last_rank: Position in the pipeline group of the rank with the last stage, where steps end.
        as_parts: Whether to gather nothing, and return tensors without data that know the part of this rank.
        replicas: The ranks that hold the same part. Each of them writes a share of it.
        are_alike: Whether replicas hold equal values. Otherwise the first replica writes its values.
        slices: Slices of the parameters over the replicas, if each replica keeps the optimizer state of its slice.
        owners: Owners of the state of whole parameters, by optimizer and parameter. Other ranks have no such state.
    """

    module: nn.Module
    rules: Mapping[str, Shard]
    tensor_group: Group
    pipeline_group: Group
    names: ModelNames
    device: torch.device
    is_saved: bool
    last_rank: int = 0
    as_parts: bool = False
    replicas: Group | None = None
    are_alike: bool = True
    slices: ParameterSlices | None = None
    owners: Mapping[Optimizer, Mapping[Tensor, StateOwner]] = field(default_factory=dict)

    # -------------------------------------------------------------------------------------------------- the model

    def gather_state(self) -> dict[str, Any]:
        """Gather the full state dict of the model.

        Returns:
            Tensors on the CPU on the first rank of the saved replica. Other ranks get tensors on the `meta` device, so
            that hooks can read names and shapes on all ranks. Tensors that share memory in the model share it here.
        """
        state, sliced = self._own_state()
        shards = {name: self.rules[name] for name in state if name in self.rules}
        return with_versions(self._gather(state, shards, self.names.state, sliced), versions_of(state))

    def _own_state(self) -> tuple[dict[str, Any], dict[str, torch.Size]]:
        """Return the state dict of the part of this rank, and the shapes of parameters of which it has slices."""
        slices = self.slices
        if slices is None or not slices.keeps_slices:
            return _own_part(self.module), {}
        shapes = {
            name: slices.whole_shape(parameter)
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
            if slices.divides(parameter)
        }
        with slices.shown():
            state = _own_part(self.module)
        return state, {name: shape for name, shape in shapes.items() if name in state}

    def gather_tensors(self) -> dict[str, Tensor]:
        """Gather all parameters and buffers by first name, also buffers that no checkpoint holds.

        Returns:
            Tensors as `gather_state` returns them.
        """
        held: dict[str, Any] = dict(self.module.named_parameters())
        held.update((name, buffer) for name, buffer in self.module.named_buffers() if not buffer.is_meta)
        return self._gather(held, {name: self.rules[name] for name in held if name in self.rules}, order=())

    def scatter_state(self, full: Mapping[str, Any], source: str, strict: bool = True) -> dict[str, Any]:
        """Take this rank's part of a full state dict; unknown names stay, so that the module reports them.

        Args:
            full: The full state dict.
            source: Name of its file, for the error message.
            strict: Refuse tensors of a sharded checkpoint that have another dtype.

        Raises:
            ValueError: If shapes or dtypes do not fit the model.
        """
        state, sliced = self._own_state()
        for name, shape in sliced.items():
            state[name] = torch.empty(shape, dtype=state[name].dtype, device="meta")
        # Before the first split, so that one message lists all misfits.
        self._check_tensors(full, state, source, strict)
        on_other_stages = set(self.names.state) - state.keys() if self.pipeline_group.size > 1 else set()
        part = {}
        for name, value in full.items():
            if name in on_other_stages:
                continue
            is_shard = name in self.rules and isinstance(value, Tensor)
            part[name] = take_part(value, self.rules[name], self.tensor_group.rank) if is_shard else value
        # Modules convert states of older versions. Without a version, a module of another stage would add a key.
        here, versions = versions_of(state), versions_of(full)
        versions |= {path: here[path] for path in {name.rpartition(".")[0] for name in on_other_stages} if path in here}
        return with_versions(part, versions)

    def _check_tensors(self, full: Mapping[str, Any], state: Mapping[str, Any], source: str, strict: bool) -> None:
        problems = []
        for name, tensor in state.items():
            found = full.get(name)
            if not isinstance(tensor, Tensor) or not isinstance(found, Tensor):
                continue
            expected = tuple(self.rules.get(name, REPLICATED).full_shape(tensor.shape))
            if expected != tuple(found.shape):
                problems.append(f"  {name} must have the shape {expected}; got {tuple(found.shape)}")
            elif strict and isinstance(found, StoredTensor) and found.dtype != tensor.dtype:
                problems.append(
                    f"  {name} must be {tensor.dtype}; got {found.dtype}. Set `strict_loading = False` on the module to"
                    " convert it"
                )
        if problems:
            raise ValueError(
                f"The checkpoint {source} does not fit the model (full shapes):\n" + "\n".join(problems) + " [LP035]"
            )

    # --------------------------------------------------------------------------------------------- the optimizers

    def gather_optimizer(self, optimizer: Optimizer, recorded: ParameterGroups = ()) -> dict[str, Any]:
        """Gather the state dict that `optimizer` would have with the parameters of the full model.

        Args:
            optimizer: The optimizer of this rank's parameters.
            recorded: Its parameter groups over all stages, from `remove_dummy_parameters`.

        Returns:
            Tensors as `gather_state` returns them.

        Raises:
            RuntimeError: On every rank. A state of a sharded parameter has another shape than the parameter. Or the
                order of the parameters over the stages is unknown. Or another key of the optimizer holds parts.
        """
        state = optimizer.state_dict()
        self.check_keys(optimizer, state)
        if not self.is_cut and not state.keys() >= _KNOWN_KEYS:
            return state  # equal on every rank; no value belongs to a parameter
        mine = self._group_names(optimizer)
        joined = self._joined_groups(mine, recorded)
        # One stage alone may refuse its values; the other stages would wait for it.
        with comm.failing_together(self.pipeline_group):
            # Only local work in the block: the collectives follow after all stages have agreed.
            values, shards, sliced = self._optimizer_values(optimizer, state["state"], chain.from_iterable(mine))
        owned: dict[_Slot, StateOwner] = {}
        if optimizer in self.owners:
            owners = dict(zip(chain.from_iterable(mine), map(self.owners[optimizer].get, _parameters(optimizer))))
            values = self._described(values, owners)
            # Every rank has the value of a small tensor now, such as a count of steps.
            large = (slot for slot, value in values.items() if isinstance(value, Tensor) and value.numel() > 1)
            owned = {slot: owner for slot in large if (owner := owners[slot[0]]) is not None}
        gathered = self._gather(values, shards, order=(), sliced=sliced, owned=owned)
        position = {name: index for index, name in enumerate(chain.from_iterable(joined))}
        # In the order of the numbers, like the state dict of one process.
        full: dict[int, Any] = {index: {} for index in sorted({position[name] for name, _ in gathered})}
        for (name, key), value in gathered.items():
            full[position[name]][key] = value
        return {**state, "state": full, "param_groups": _numbered(state["param_groups"], mine, joined)}

    def _described(self, values: Mapping[_Slot, Any], owners: Mapping[str, StateOwner | None]) -> dict[_Slot, Any]:
        """Add the values of other owners of a stage, tensors without data; every rank of the stage must call it."""
        known = {
            slot: value.to("meta") if isinstance(value, Tensor) and value.numel() > 1 else value
            for slot, value in values.items()
            if owners[slot[0]] is not None
        }
        for group in (self.tensor_group, self.replicas):
            for theirs in [] if group is None else comm.all_gather_object(known, group):
                known |= theirs
        # In one order on all ranks, because the messages follow it.
        keys: dict[str, list[str]] = {name: [] for name in owners}
        for name, key in {**known, **values}:
            keys[name].append(key)
        return {(name, key): values.get((name, key), known.get((name, key))) for name in owners for key in keys[name]}

    def _optimizer_values(
        self, optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]], names: Iterable[str]
    ) -> tuple[dict[_Slot, Any], dict[_Slot, Shard], dict[_Slot, torch.Size]]:
        """Return the values in the state of an optimizer, their shard rules, and the shapes of sliced values.

        Raises:
            RuntimeError: If the state of a sharded parameter has another shape than the parameter.
        """
        values: dict[_Slot, Any] = {}
        shards: dict[_Slot, Shard] = {}
        sliced: dict[_Slot, torch.Size] = {}
        for index, (name, parameter) in enumerate(zip(names, _parameters(optimizer))):
            # A parameter without a gradient so far has no state.
            for key, value in state.get(index, {}).items():
                values[name, key] = value
                if not isinstance(value, Tensor) or value.dim() == 0:
                    continue
                if parameter in self.owners.get(optimizer, {}):
                    continue  # whole on its owner
                # A hook between backward and step may call this while the parameter is a slice.
                shape = parameter.shape if self.slices is None else self.slices.whole_shape(parameter)
                local = shape
                if name in self.rules:
                    # After a run the parameter is full, but the optimizer still has the state of its shard.
                    local = self.rules[name].local_shape(shape, self.tensor_group.rank)
                    shards[name, key] = self.rules[name]
                is_alike = value.shape in (shape, local)
                if self.slices is not None and self.slices.divides(parameter):
                    is_alike = value.numel() == self.slices.size(local.numel())
                    sliced[name, key] = local
                if not is_alike and (name in self.rules or (name, key) in sliced):
                    raise _not_elementwise(optimizer, name, parameter, key, value)
        return values, shards, sliced

    def scatter_optimizer(
        self, full: Mapping[str, Any], optimizer: Optimizer, recorded: ParameterGroups = ()
    ) -> dict[str, Any]:
        """Take this rank's part of a full optimizer state dict.

        Args:
            full: The state dict of the same optimizer with the parameters of the full model.
            optimizer, recorded: As for `gather_optimizer`.

        Raises:
            ValueError: If the parameter groups of the state and of the optimizer differ in number or size.
            RuntimeError: On every rank, if another key of the optimizer holds full tensors.
        """
        if not self.is_cut and not full.keys() >= _KNOWN_KEYS:
            return {key: _read(value) for key, value in full.items()}
        self._check_restored(optimizer, full)
        mine = self._group_names(optimizer)
        joined = self._joined_groups(mine, recorded)
        saved = [group["params"] for group in full["param_groups"]]
        expected = [len(names) for names in joined]
        found = [len(indices) for indices in saved]
        if expected != found:
            raise ValueError(
                f"The parameter groups in the checkpoint must have {expected} parameters; got {found}. If you changed"
                " `configure_optimizers` since it was saved, undo that"
            )
        names = full.get("names", joined)  # a folder of torch's format has names, so its order does not count
        if [sorted(group) for group in names] != [sorted(group) for group in joined]:
            raise ValueError(
                f"The parameter groups in the checkpoint must hold the parameters {joined}; got {names}. If you changed"
                " `configure_optimizers` since it was saved, undo that"
            )
        index_of = dict(zip(chain.from_iterable(names), chain.from_iterable(saved)))
        part: dict[int, Any] = {}
        for index, (name, parameter) in enumerate(zip(chain.from_iterable(mine), _parameters(optimizer))):
            entry = full["state"].get(index_of[name])
            # Optimizers make the state of a parameter at its first gradient, so a parameter may have no state.
            owner = self.owners.get(optimizer, {}).get(parameter)
            if entry is not None and owner is None:
                part[index] = {key: self._part(parameter, name, value) for key, value in entry.items()}
            elif entry is not None and owner is not None and self._is_here(owner, or_alike=True):
                part[index] = {key: _read(value) for key, value in entry.items()}
        others = {key: _read(value) for key, value in full.items() if key not in ("names", *_KNOWN_KEYS)}
        return {**others, "state": part, "param_groups": _numbered(full["param_groups"], joined, mine)}

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds only a part of the state of optimizers."""
        return self.tensor_group.size > 1 or self.pipeline_group.size > 1 or self.slices is not None

    def check_keys(self, optimizer: Optimizer, saved: Mapping[str, Any] | None = None) -> None:
        """Check that an optimizer saves no parts of tensors beside `state` and `param_groups`; every rank must call it.

        Args:
            optimizer: The optimizer of this rank's parameters.
            saved: Its own state dict, if the caller has it.

        Raises:
            RuntimeError: On every rank, if another key of the optimizer holds parts of tensors.
        """
        if not self.is_cut:
            return
        state = optimizer.state_dict() if saved is None else saved
        groups = [self.tensor_group, self.pipeline_group]
        if self.slices is not None:
            groups.append(self.slices.group)
        missing = sorted(_KNOWN_KEYS - state.keys())
        mine = {key: _contents(value) for key, value in state.items() if key not in _KNOWN_KEYS}
        partial = next((key for key, found in mine.items() if self._is_of_parts(optimizer, found)), None)
        # Twice over all groups except the last, so that a finding of any rank reaches all ranks.
        for group in (*groups, *groups[:-1]):
            everyone = comm.all_gather_object((missing, partial, mine), group)
            missing = next((one[0] for one in everyone if one[0]), missing)
            keys = dict.fromkeys(key for one in everyone for key in one[2])
            differing = (key for key in keys if any(one[2].get(key) != everyone[0][2].get(key) for one in everyone))
            partial = next((one[1] for one in everyone if one[1] is not None), None) or next(differing, None)
        if missing:
            raise _own_keys(optimizer, f"has no `{missing[0]}`, but {', '.join(f'`{key}`' for key in state)}")
        if partial is not None:
            raise _own_keys(optimizer, f"has a key `{partial}` of its own, which holds one rank's part of it")

    def _is_of_parts(self, optimizer: Optimizer, found: _Contents) -> bool:
        """Tell whether values belong to the parameters of this rank, even if they are equal on other ranks."""
        parameters = _parameters(optimizer)
        if self.pipeline_group.size > 1 and len(parameters) > 1 and len(parameters) in found.lengths:
            return True
        # A momentum before its first step is zero on all ranks, so equal hashes prove nothing for zeros.
        return not self._shapes_of_parts(optimizer).isdisjoint(shape for shape, mark in found.tensors if mark == 0)

    def _shapes_of_parts(self, optimizer: Optimizer, are_full: bool = False) -> set[tuple[int, ...]]:
        """Return the shapes of the parameters of an optimizer on this rank, or of the full parameters."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        shapes: set[tuple[int, ...]] = set()
        for parameter in _parameters(optimizer):
            shape = parameter.shape if self.slices is None else self.slices.whole_shape(parameter)
            rule = self.rules.get(names.get(id(parameter), ""), REPLICATED)
            is_sliced = self.slices is not None and self.slices.divides(parameter)
            if rule is REPLICATED and not is_sliced and not (are_full and self.pipeline_group.size > 1):
                continue
            local = rule.local_shape(shape, self.tensor_group.rank)
            if are_full:
                shapes.add(tuple(rule.full_shape(local)))
            elif is_sliced and self.slices is not None:
                shapes.add((self.slices.size(math.prod(local)), *[1] * (len(local) - 1)))
            else:
                shapes.add(tuple(local))
        return shapes - {()}

    def _check_restored(self, optimizer: Optimizer, full: Mapping[str, Any]) -> None:
        """Check that no other key of the optimizer holds full tensors; every rank must call it."""
        # The tensor group first: each of its ranks then passes the error on to its pipeline group.
        with comm.failing_together(self.pipeline_group), comm.failing_together(self.tensor_group):
            missing = sorted(_KNOWN_KEYS - full.keys())
            if missing:
                found = ", ".join(f"`{key}`" for key in full)
                raise _own_keys(optimizer, f"has no `{missing[0]}` in the checkpoint, but {found}")
            for key, value in full.items() if self.is_cut else ():
                if key not in _KNOWN_KEYS and key != "names":
                    shapes = {shape for shape, _ in _contents(value, False).tensors}
                    if not shapes.isdisjoint(self._shapes_of_parts(optimizer, are_full=True)):
                        raise _own_keys(optimizer, f"has `{key}` in the checkpoint, with full tensors")

    def check_groups(self, optimizers: Sequence[Optimizer], recorded: Callable[[Optimizer], ParameterGroups]) -> None:
        """Check that the parameter groups over all stages are known, as `gather_optimizer` needs them.

        Raises:
            RuntimeError: On every rank, if they are unknown.
        """
        for optimizer in optimizers if self.pipeline_group.size > 1 else ():
            with comm.failing_together(self.pipeline_group):
                names = self._group_names(optimizer)
            self._joined_groups(names, recorded(optimizer))

    def _part(self, parameter: Tensor, name: str, value: Any) -> Any:
        """Return this rank's part of a value in the full optimizer state of a parameter."""
        mine = _read(self._split_like(parameter, name, value))
        return mine if self.slices is None else self.slices.part_of_state(mine, parameter)

    def _split_like(self, parameter: Tensor, name: str, value: Any) -> Any:
        rule = self.rules.get(name)
        # Scalars, such as the step count of Adam, are the same on all ranks.
        if rule is None or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        is_elementwise = tuple(value.shape) == tuple(rule.full_shape(parameter.shape))
        return take_part(value, rule, self.tensor_group.rank) if is_elementwise else value

    def _group_names(self, optimizer: Optimizer) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        others = {id(parameter): f"parameter {index}" for index, parameter in enumerate(_parameters(optimizer))}
        unknown = others.keys() - names.keys()
        # Without a pipeline all ranks have the same order, and a number is name enough.
        if unknown and self.pipeline_group.size > 1:
            raise RuntimeError(
                f"All parameters of `{type(optimizer).__name__}` must be in the module, or their pipeline stage is not"
                f" known; got {len(unknown)} other parameters. Register them in the module"
            )
        return [[names.get(id(p), others[id(p)]) for p in group["params"]] for group in optimizer.param_groups]

    def _joined_groups(self, mine: list[list[str]], recorded: ParameterGroups) -> list[list[str]]:
        """Join the parameter groups of the stages, in the order in which one process would have them.

        Raises:
            RuntimeError: If a group is neither in the recorded order nor in the order of the model.
        """
        if self.pipeline_group.size == 1:
            return mine
        everyone = comm.all_gather_object((mine, recorded), self.pipeline_group)
        recorded = everyone[0][1]  # from one rank, so that all ranks decide the same
        counts = [len(groups) for groups, _ in everyone]
        if len(set(counts)) > 1:
            raise RuntimeError(
                f"The optimizer must have the same number of parameter groups on all pipeline stages; got {counts},"
                " by stage. Build the optimizer in `configure_optimizers`, or give each stage the same groups."
                " A group is empty where the stage holds none of its parameters"
            )
        model_order = _positions(self.names.parameters.values())
        joined = []
        for number, parts in enumerate(zip(*(groups for groups, _ in everyone), strict=True)):
            union = {name for part in parts for name in part}
            # A group that was added to the optimizer later, as when layers are unfrozen, has no recorded order.
            for order in (_positions(recorded[number]) if number < len(recorded) else {}, model_order):
                if union <= order.keys() and all(list(part) == sorted(part, key=order.__getitem__) for part in parts):
                    joined.append(sorted(union, key=order.__getitem__))
                    break
            else:
                raise RuntimeError(
                    f"Parameter group {number} of the optimizer must be in the order of `named_parameters()`, because"
                    " it was changed after `configure_optimizers`. Another order is not known over the pipeline stages."
                    " Build the groups in the order of `named_parameters()`"
                )
        return joined

    # ---------------------------------------------------------------------------------------------- the transform

    def _gather(
        self,
        values: Mapping[K, Any],
        shards: Mapping[K, Shard],
        order: Sequence[K],
        sliced: Mapping[K, torch.Size] | None = None,
        owned: Mapping[K, StateOwner] | None = None,
    ) -> dict[K, Any]:
        """Gather the values of all stages, from the first stage that holds each; see `gather_state` for the result.

        Args:
            values: The values of this rank.
            shards: How the tensors among them are sharded.
            order: Keys that come first.
            sliced: Shapes of tensors on this rank that are sliced over the replicas.
            owned: Owners of whole tensors of this stage; other ranks have no data.
        """
        full: dict[K, Any] = {}
        # By stage and memory, since tied tensors have several keys.
        tensors: dict[Hashable, Tensor] = {}
        sliced, owned = sliced or {}, owned or {}
        # All ranks follow the order of the layout, so that their collectives and messages meet.
        for tag, (key, place) in enumerate(self._layout(values, shards, order, sliced, owned).items()):
            if place.dtype is None:
                full[key] = place.constant
                continue
            # A tied tensor is gathered once, and its names share the result.
            alias = (place.stage, place.alias)
            if alias not in tensors:
                mine = values.get(key)
                if self.slices is not None and key in sliced and place.stage == self.pipeline_group.rank:
                    assert isinstance(mine, Tensor)
                    # One tensor at a time, so that a replica never holds more than one full tensor.
                    mine = self.slices.merge(mine.detach().to(self.device), sliced[key])
                owner = owned.get(key)
                if self.as_parts:
                    tensors[alias] = self._part_of_tensor(mine, key, place, tag, owner)
                else:
                    if owner is not None and place.stage == self.pipeline_group.rank:
                        mine = self._sent_to_first(mine, place, owner, tag)
                    tensors[alias] = self._gather_tensor(mine, key, place, tag)
            full[key] = tensors[alias]
        return full

    def _layout(
        self,
        values: Mapping[K, Any],
        shards: Mapping[K, Shard],
        order: Sequence[K],
        sliced: Mapping[K, torch.Size],
        owned: Mapping[K, StateOwner],
    ) -> dict[K, _Place]:
        """Locate the values of the full model: keys in `order` first, then the other keys."""
        stage = self.pipeline_group.rank
        held = {key: _place(stage, value, shards.get(key)) for key, value in values.items()}
        for key, shape in sliced.items():
            full = shards.get(key, REPLICATED).full_shape(shape)
            # Tied parameters share the alias; an empty slice has no address.
            alias = self.names.parameters.get(key, key) if isinstance(key, str) else key
            held[key] = held[key]._replace(shape=tuple(full), alias=alias)
        for key in owned:
            # Tensors without data have no address, and all ranks must find the same aliases.
            held[key] = held[key]._replace(alias=key)
        if self.pipeline_group.size == 1:
            return held
        # Several stages hold a tied parameter. The first of them sends it.
        found: dict[K, _Place] = {}
        for rank, places in enumerate(comm.all_gather_object(held, self.pipeline_group)):
            for key, place in places.items():
                # All stages hold the buffers of the module itself. A step that updates them ends on the last stage.
                is_buffer = isinstance(key, str) and key not in self.names.parameters
                if key not in found or (is_buffer and rank == self.last_rank):
                    found[key] = place
        in_order = [key for key in order if key in found]
        return {key: found[key] for key in dict.fromkeys([*in_order, *found])}

    def _is_here(self, owner: StateOwner, or_alike: bool = False) -> bool:
        """Return whether this rank has a whole tensor; with `or_alike`, also if other ranks have an equal one."""
        rank, replica = self.tensor_group.rank, 0 if self.replicas is None else self.replicas.rank
        if or_alike:
            return owner.has(rank, replica)
        return (owner.rank or 0, owner.replica or 0) == (rank, replica)

    def _sent_to_first(self, mine: Any, place: _Place, owner: StateOwner, tag: int) -> Any:
        """Send a whole tensor from its owner to the first rank of its stage in the first replica."""
        # First to the first replica, then inside it. Every rank returns a tensor, without data on all other ranks.
        rank, replica = owner.rank or 0, owner.replica or 0
        if self.replicas is not None and self.tensor_group.rank == rank:
            mine = self._passed(mine, place, self.replicas, replica, tag)
        if self.replicas is None or self.replicas.rank == 0:
            mine = self._passed(mine, place, self.tensor_group, rank, tag)
        return mine

    def _passed(self, mine: Any, place: _Place, group: Group, source: int, tag: int) -> Any:
        """Return a tensor of the rank `source` on the first rank of the group."""
        if source == 0 or group.rank not in (0, source):
            return mine
        if group.rank == source:
            comm.isend(mine.detach().to(self.device).contiguous(), group, 0, tag).wait()
            return mine
        received: Tensor = comm.irecv(
            torch.empty(place.shape, dtype=place.dtype, device=self.device), group, source, tag
        ).wait()
        return received

    def _part_of_tensor(self, mine: Any, key: K, place: _Place, tag: int, owner: StateOwner | None) -> Tensor:
        """Return a tensor without data that knows the part for this rank to write."""
        part = TensorPart()
        rank = self.tensor_group.rank
        replica, replicas = (0, 1) if self.replicas is None else (self.replicas.rank, self.replicas.size)
        if not self.are_alike or (isinstance(key, str) and key not in self.names.parameters):
            tag = 0  # replicas may differ, also in buffers between two steps: the first replica writes its value
        # Ranks with equal values take turns, so that all of them write about as many bytes.
        is_mine = self.pipeline_group.rank == place.stage and tag % replicas == replica
        if owner is not None:
            if self.pipeline_group.rank == place.stage and self._is_here(owner):
                part = TensorPart(mine.detach())
        elif is_mine and place.shard is not None:
            local = place.shard.owned(mine.detach(), rank)
            # If lower ranks hold all elements of this shard too, this rank writes nothing.
            if local.numel() > 0 or self.tensor_group.size == 1:
                part = TensorPart(local, place.shard.dim % local.dim(), place.shard.owned_ranges(rank))
        elif is_mine and tag // replicas % self.tensor_group.size == rank:
            part = TensorPart(mine.detach())
        return PartialTensor.of(place.shape, place.dtype or torch.float32, part)

    def _gather_tensor(self, mine: Any, key: K, place: _Place, tag: int) -> Tensor:
        """Merge the shards on the stage that holds the tensor, and send the full tensor to the first stage."""
        empty = torch.empty(place.shape, dtype=place.dtype, device="meta")
        stage = self.pipeline_group.rank
        if not self.is_saved or stage not in (0, place.stage):
            return empty
        full = empty
        if stage == place.stage and (place.shard is not None or self.tensor_group.rank == 0):
            # After a run the state of optimizers is in the host's memory.
            full = _merge(mine.detach().to(self.device), place.shard, self.tensor_group)
        # Only after the merge, which needed all ranks of the tensor group.
        if self.tensor_group.rank > 0:
            return empty
        if place.stage == 0:
            return full.cpu()
        if stage == 0:
            # One tensor at a time, so that the device never holds more than one full tensor.
            received = torch.empty(place.shape, dtype=place.dtype, device=self.device)
            return comm.irecv(received, self.pipeline_group, place.stage, tag).wait().cpu()
        comm.isend(full.to(self.device).contiguous(), self.pipeline_group, 0, tag).wait()
        return empty


def _place(stage: int, value: Any, shard: Shard | None) -> _Place:
    if not isinstance(value, Tensor):
        return _Place(stage, None, (), None, value, None)
    shape = tuple((shard or REPLICATED).full_shape(value.shape))
    # An empty tensor, and a tensor on `meta`, has no distinct address.
    has_memory = value.numel() > 0 and not value.is_meta
    address = (str(value.device), value.data_ptr()) if has_memory else id(value)
    return _Place(stage, shard, shape, value.dtype, None, (address, tuple(value.shape), value.stride()))


def _merge(local: Tensor, shard: Shard | None, group: Group) -> Tensor:
    """Merge the shards of one tensor on the CPU of the first rank of `group`; other ranks get no full tensor."""
    if shard is None or group.size == 1:
        return local
    sizes = [shard.local_size(rank) for rank in range(group.size)]
    # Merged on the CPU, because the merge takes a second copy of the full tensor.
    gathered = comm.all_gather(local, group, shard.dim, sizes)
    return gathered if group.rank > 0 else shard.merge(gathered.cpu().split(sizes, shard.dim))


def _read(value: Any) -> Any:
    # An optimizer may keep tensors in nested containers.
    if type(value) in (list, tuple):
        return type(value)(map(_read, value))
    if type(value) is dict:
        return {key: _read(each) for key, each in value.items()}
    return value.read() if isinstance(value, StoredTensor) else value


def _not_elementwise(optimizer: Optimizer, name: str, parameter: Tensor, key: str, value: Tensor) -> RuntimeError:
    return RuntimeError(
        f"`{key}` of `{type(optimizer).__name__}` must have the shape of its parameter, to be merged into a full"
        f" checkpoint; got {tuple(value.shape)} for the shard `{name}` of shape {tuple(parameter.shape)}"
    )


def _own_keys(optimizer: Optimizer, found: str) -> RuntimeError:
    return RuntimeError(
        f"`{type(optimizer).__name__}.state_dict()` {found}. Tensors of parameters must be in `state`: only these are"
        " merged for a checkpoint, and sharded when it is loaded. Keep such tensors in `self.state[parameter]`, and"
        " do not override `state_dict`. Or do not save the optimizer (`ModelCheckpoint(save_weights_only=True)`, or"
        " `enable_checkpointing=False`)"
    )


def _contents(value: Any, hashes: bool = True) -> _Contents:
    """Find the tensors in a value, and the lengths of its containers."""
    tensors: list[Tensor] = []
    lengths: list[int] = []
    seen: set[int] = set()
    # A list instead of recursion: objects of the user may nest deeply, or refer to each other.
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            tensors.append(one)
            continue
        if isinstance(one, (str, bytes, bool, int, float, type(None), type)) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (Mapping, Sequence, Set, deque)):
            lengths.append(len(one))
            left += one.values() if isinstance(one, Mapping) else one
        elif isinstance(one, nn.Module):
            left.append(one.state_dict())
        else:
            left += getattr(one, "__dict__", {}).values()
    large = [one for one in tensors if one.numel() > 1]
    marks = fingerprints(large) if hashes else [0] * len(large)
    return _Contents([(tuple(one.shape), mark) for one, mark in zip(large, marks)], lengths, len(tensors))


def _numbered(settings: Sequence[Mapping[str, Any]], given: ParameterGroups, wanted: ParameterGroups) -> list[Any]:
    """Turn the parameter groups of a state dict, `given` by names, into groups of the `wanted` parameters."""
    groups = []
    first = 0
    for group, had, names in zip(settings, given, wanted):
        group = {**group, "params": list(range(first, first + len(names)))}
        if "param_names" in group and list(had) != list(names):
            group["param_names"] = list(names)  # torch stores names if the optimizer got named parameters
        groups.append(group)
        first += len(names)
    return groups


def _positions(names: Any) -> dict[str, int]:
    return {name: index for index, name in enumerate(dict.fromkeys(names))}


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
