"""One ordinary checkpoint for any layout: full tensors under the model's own names.

A rank holds the tensors of its pipeline stages, and of these the shards of its place on the tensor axis. The layout of
a state says for every value of the whole model which stage it is on and how it is sharded; `gather` follows it when
saving, `scatter` when loading, for the model and for optimizers alike. The file is that of one process: stock Lightning
reads it, and the reverse.

A checkpoint numbers the parameters of an optimizer in the order of its groups. Each stage holds some of them, so while
`configure_optimizers` runs, dummy parameters fill the gaps; they are then removed from the optimizers, and the order
stays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.torch import parameters_of
from lightning_parallel.tensor.sharding import Shard

__all__ = ["Checkpoints", "ModelNames", "remove_dummy_parameters", "rules_by_name", "whole_parameters"]

K = TypeVar("K", bound=Hashable)
ParameterGroups = Sequence[Sequence[str]]
"""Names of the parameters in each parameter group of an optimizer."""


class ModelNames(NamedTuple):
    """Names in the whole model, recorded before a pipeline frees the parameters of other stages.

    Attributes:
        state: Names in the state dict, in order.
        parameters: Every name of each parameter, in order, and its first name, which `named_parameters` gives.
    """

    state: tuple[str, ...]
    parameters: dict[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> ModelNames:
        """Record the names in `module`."""
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        every = {name: first[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}
        return cls(tuple(_own_part(module)), every)


def rules_by_name(module: nn.Module, rules: Mapping[str, Shard]) -> dict[str, Shard]:
    """Extend `rules` to every name of a shared tensor."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    # A plan names a shared tensor once, and the state dict has it under each name.
    by_identity = {id(tensor): rules[name] for name, tensor in tensors.items() if name in rules}
    return {name: by_identity[id(tensor)] for name, tensor in tensors.items() if id(tensor) in by_identity}


@contextmanager
def whole_parameters(
    module: nn.Module, names: ModelNames, group: Group, device: torch.device
) -> Iterator[dict[nn.Parameter, str]]:
    """Register dummies for the parameters of other stages in `module` inside the block, in the usual order.

    An optimizer that is built there has the parameter groups that it has in one process. Without the dummies each
    stage would know the order of its own parameters only, and a checkpoint needs that of all. They have the shape,
    dtype and device of parameters, but one element of memory. Every rank of `group` must call it.

    Args:
        module: The model, of which this rank holds some stages.
        names: Names in the whole model.
        group: The pipeline group.
        device: The device of the dummies.

    Yields:
        The dummy parameters, and the first name of each.
    """
    held = {
        name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }
    described = {name: facts for stage in comm.all_gather_object(held, group) for name, facts in stage.items()}
    # Not on `meta`: fused optimizers refuse devices that they have no kernels for.
    dummies = {
        # Expanded from one element, so a stage does not need memory for the others.
        # Of different values, as Lightning's `BaseFinetuning` tells parameters apart by these.
        name: nn.Parameter(torch.full((), float(number), dtype=dtype, device=device).expand(shape), requires_grad)
        for number, (name, (shape, dtype, requires_grad)) in enumerate(described.items(), 1)
        if name not in held
    }
    attributes: dict[str, dict[str, str]] = {}
    for name, first in names.parameters.items():
        path, _, attribute = name.rpartition(".")
        attributes.setdefault(path, {})[attribute] = first
    undo: list[Callable[[], None]] = []
    try:
        for path, firsts in attributes.items():
            wanted = {attribute: dummies.get(first) for attribute, first in firsts.items()}
            undo.append(_fill_in(module.get_submodule(path), wanted))
        yield {parameter: name for name, parameter in dummies.items()}
    finally:
        # Last first: a module that is registered under two names was filled in twice.
        for restore in reversed(undo):
            restore()


def _fill_in(owner: nn.Module, wanted: Mapping[str, nn.Parameter | None]) -> Callable[[], None]:
    """Register the `wanted` dummies in `owner` where it lacks the parameter; return a function that undoes it."""
    parameters = parameters_of(owner)
    before = dict(parameters)
    # What a stage has of a missing parameter is an ordinary attribute, which would hide the registered dummy.
    hidden = {name: vars(owner).pop(name) for name in wanted if before.get(name) is None and name in vars(owner)}
    # Filled anew rather than added to: the order of the dict is that of `named_parameters`.
    parameters.clear()
    for name, dummy in wanted.items():
        parameters[name] = dummy if before.get(name) is None else before[name]
    for name, parameter in before.items():
        parameters.setdefault(name, parameter)

    def restore() -> None:
        # `configure_optimizers` may have registered a parameter, which stays.
        added = {name: value for name, value in parameters.items() if name not in before and name not in wanted}
        parameters.clear()
        parameters.update(before)
        parameters.update(added)
        vars(owner).update(hidden)

    return restore


def remove_dummy_parameters(
    optimizer: Optimizer, dummies: Mapping[nn.Parameter, str], module: nn.Module
) -> list[list[str]]:
    """Remove the parameters of other stages from `optimizer`.

    Returns:
        The names in its parameter groups before that, as one process would have them.
    """
    names = {**{parameter: name for name, parameter in module.named_parameters()}, **dummies}
    groups = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        groups.append([names.get(parameter, "") for parameter in parameters])
        is_held = [parameter not in dummies for parameter in parameters]
        for key in ("params", "param_names"):  # the latter if an optimizer was given named parameters
            if key in group:
                group[key] = [entry for entry, keep in zip(group[key], is_held) if keep]
    for parameter in dummies:
        optimizer.state.pop(parameter, None)  # some optimizers, such as Adagrad, have state from the start
    return groups


def _own_part(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of what this rank holds."""
    with ParallelState.of(module).own_parts():
        return module.state_dict()


class _Place(NamedTuple):
    """Where a value of the whole model's state is.

    Attributes:
        stage: Position in the pipeline group of the first rank that holds it.
        shard: Which part of it each rank of the tensor group there holds; None where each holds it whole.
        shape: Shape of the full tensor.
        dtype: Element type; None where the value is not a tensor.
        constant: The value itself where it is not a tensor.
        alias: Equal for values of one rank that share their memory.
    """

    stage: int
    shard: Shard | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    constant: Any
    alias: Hashable


@dataclass(frozen=True)
class Checkpoints:
    """Gathers the state of a model and its optimizers for a checkpoint, and scatters that of a checkpoint.

    Every rank of the replica must call each method at the same point.

    Attributes:
        module: The model, of which this rank holds a part.
        rules: How its tensors are sharded over the tensor axis, by name; the others are whole.
        tensor_group: The ranks that hold the shards of one stage.
        pipeline_group: The ranks that hold the stages.
        names: Names in the whole model; needed where the pipeline group has several ranks.
        device: Where tensors must be to be sent between stages.
        is_saved: Whether this replica's values are gathered. On the others, names and shapes are enough.
        last_rank: Position in the pipeline group of the rank that holds the last stage, where steps run to their end.
    """

    module: nn.Module
    rules: Mapping[str, Shard]
    tensor_group: Group
    pipeline_group: Group
    names: ModelNames
    device: torch.device
    is_saved: bool
    last_rank: int = 0

    # -------------------------------------------------------------------------------------------------- the model

    def gather_state(self) -> dict[str, Any]:
        """Gather the full state dict of the model.

        Returns:
            Tensors on the CPU on the first rank of the saved replica, on the `meta` device elsewhere, so that hooks
            that look at names and shapes work on all ranks. Tensors that share memory in the model share it here.
        """
        state = _own_part(self.module)
        shards = {name: self.rules[name] for name in state if name in self.rules}
        return self._gather(state, shards, self.names.state)

    def gather_tensors(self) -> dict[str, Tensor]:
        """Gather all parameters and buffers by first name, those included that no checkpoint holds.

        Returns:
            Tensors as `gather_state` returns them.
        """
        held: dict[str, Any] = dict(self.module.named_parameters())
        held.update((name, buffer) for name, buffer in self.module.named_buffers() if not buffer.is_meta)
        return self._gather(held, {name: self.rules[name] for name in held if name in self.rules}, order=())

    def scatter_state(self, full: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Take this rank's part of a full state dict. Names that the model does not know stay, to be reported.

        Args:
            full: The state dict.
            source: Where it is from, for the error message.

        Raises:
            ValueError: If shapes do not fit the model.
        """
        state = _own_part(self.module)
        # Before anything is split or loaded, so that one message lists all that does not fit.
        self._check_shapes(full, state, source)
        on_other_stages = set(self.names.state) - state.keys() if self.pipeline_group.size > 1 else set()
        part = {}
        for name, value in full.items():
            if name in on_other_stages:
                continue
            is_shard = name in self.rules and isinstance(value, Tensor)
            part[name] = self.rules[name].split(value, self.tensor_group.rank) if is_shard else value
        return part

    def _check_shapes(self, full: Mapping[str, Any], state: Mapping[str, Any], source: str) -> None:
        problems = []
        for name, tensor in state.items():
            found = full.get(name)
            if not isinstance(tensor, Tensor) or not isinstance(found, Tensor):
                continue
            expected = tuple(self.rules[name].full_shape(tensor.shape) if name in self.rules else tensor.shape)
            if expected != tuple(found.shape):
                problems.append(f"  {name}: expected {expected}, found {tuple(found.shape)}")
        if problems:
            raise ValueError(f"the checkpoint {source} does not fit the model (full shapes):\n" + "\n".join(problems))

    # --------------------------------------------------------------------------------------------- the optimizers

    def gather_optimizer(self, optimizer: Optimizer, recorded: ParameterGroups = ()) -> dict[str, Any]:
        """Gather the state dict that `optimizer` would have if it held the whole model's parameters.

        Args:
            optimizer: The optimizer of this rank's parameters.
            recorded: Its parameter groups over all stages, as `remove_dummy_parameters` gave them.

        Returns:
            Tensors as `gather_state` returns them.

        Raises:
            RuntimeError: If the state of a sharded parameter holds a tensor that is neither of the parameter's shape
                nor a scalar, or the order of the parameters over the stages is not known.
        """
        state = optimizer.state_dict()
        mine = self._group_names(optimizer)
        whole = self._whole_groups(mine, recorded)
        held = list(zip(chain.from_iterable(mine), _parameters(optimizer)))
        values: dict[tuple[str, str], Any] = {}
        shards: dict[tuple[str, str], Shard] = {}
        for index, (name, parameter) in enumerate(held):
            for key, value in state["state"].get(index, {}).items():
                values[name, key] = value
                if name in self.rules and isinstance(value, Tensor) and value.dim() > 0:
                    # The parameter is whole after a run, when the optimizer still has the state of its shard.
                    local = self.rules[name].local_shape(parameter.shape, self.tensor_group.rank)
                    if value.shape not in (parameter.shape, local):
                        raise _not_elementwise(optimizer, name, parameter, key, value)
                    shards[name, key] = self.rules[name]
        gathered = self._gather(values, shards, order=())
        position = {name: index for index, name in enumerate(chain.from_iterable(whole))}
        full: dict[int, Any] = {index: {} for index in sorted({position[name] for name, _ in gathered})}
        for (name, key), value in gathered.items():
            full[position[name]][key] = value
        return {**state, "state": full, "param_groups": _numbered(state["param_groups"], mine, whole)}

    def scatter_optimizer(
        self, full: Mapping[str, Any], optimizer: Optimizer, recorded: ParameterGroups = ()
    ) -> dict[str, Any]:
        """Take this rank's part of a full optimizer state dict.

        Args:
            full: The state dict of the same optimizer over the whole model's parameters.
            optimizer, recorded: As for `gather_optimizer`.

        Raises:
            ValueError: If the parameter groups of the state and of the optimizer differ in number or size.
        """
        mine = self._group_names(optimizer)
        whole = self._whole_groups(mine, recorded)
        saved = [group["params"] for group in full["param_groups"]]
        expected = [len(names) for names in whole]
        found = [len(indices) for indices in saved]
        if expected != found:
            raise ValueError(
                f"the optimizer state in the checkpoint does not fit: expected parameter groups of {expected}"
                f" parameters, found {found}. Was `configure_optimizers` changed since it was saved?"
            )
        index_of = dict(zip(chain.from_iterable(whole), chain.from_iterable(saved)))
        part: dict[int, Any] = {}
        for index, (name, parameter) in enumerate(zip(chain.from_iterable(mine), _parameters(optimizer))):
            entry = full["state"].get(index_of[name])
            # Optimizers make the state of a parameter with its first gradient; it may have had none.
            if entry is not None:
                part[index] = {key: self._split_like(parameter, name, value) for key, value in entry.items()}
        return {**full, "state": part, "param_groups": _numbered(full["param_groups"], whole, mine)}

    def _split_like(self, parameter: Tensor, name: str, value: Any) -> Any:
        rule = self.rules.get(name)
        # Scalars, such as the step count of Adam, are the same on all ranks.
        if rule is None or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        is_elementwise = tuple(value.shape) == tuple(rule.full_shape(parameter.shape))
        return rule.split(value, self.tensor_group.rank) if is_elementwise else value

    def _group_names(self, optimizer: Optimizer) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        others = {id(parameter): f"parameter {index}" for index, parameter in enumerate(_parameters(optimizer))}
        unknown = others.keys() - names.keys()
        if unknown and self.pipeline_group.size > 1:
            raise RuntimeError(
                f"{len(unknown)} parameters of `{type(optimizer).__name__}` are not in the module, so that the stage"
                " they belong to is not known; register them in the module"
            )
        return [[names.get(id(p), others[id(p)]) for p in group["params"]] for group in optimizer.param_groups]

    def _whole_groups(self, mine: list[list[str]], recorded: ParameterGroups) -> list[list[str]]:
        """Join the parameter groups of the stages, in the order in which one process would have them.

        Raises:
            RuntimeError: If a group is in another order than the recorded one, and than that of the model.
        """
        if self.pipeline_group.size == 1:
            return mine
        everyone = comm.all_gather_object((mine, recorded), self.pipeline_group)
        recorded = everyone[0][1]  # those of one rank, so that all ranks decide the same
        model_order = _positions(self.names.parameters.values())
        whole = []
        for number, parts in enumerate(zip(*(groups for groups, _ in everyone), strict=True)):
            union = {name for part in parts for name in part}
            # A group that was added to the optimizer later, as when layers are unfrozen, has no recorded order.
            for order in (_positions(recorded[number]) if number < len(recorded) else {}, model_order):
                if union <= order.keys() and all(list(part) == sorted(part, key=order.__getitem__) for part in parts):
                    whole.append(sorted(union, key=order.__getitem__))
                    break
            else:
                raise RuntimeError(
                    f"parameter group {number} of the optimizer was changed after `configure_optimizers` and is not in"
                    " the order of `named_parameters()`, so that the order of the whole group over the pipeline stages"
                    " is not known; build the groups in that order"
                )
        return whole

    # ---------------------------------------------------------------------------------------------- the transform

    def _gather(self, values: Mapping[K, Any], shards: Mapping[K, Shard], order: Sequence[K]) -> dict[K, Any]:
        """Gather the values of all stages, from the first stage that holds each; see `gather_state` for the result."""
        full: dict[K, Any] = {}
        tensors: dict[Hashable, Tensor] = {}
        # All ranks follow the one order of the layout, so that their collectives and messages meet.
        for tag, (key, place) in enumerate(self._layout(values, shards, order).items()):
            if place.dtype is None:
                full[key] = place.constant
                continue
            alias = (place.stage, place.alias)
            if alias not in tensors:
                tensors[alias] = self._gather_tensor(values, key, place, tag)
            full[key] = tensors[alias]
        return full

    def _layout(self, values: Mapping[K, Any], shards: Mapping[K, Shard], order: Sequence[K]) -> dict[K, _Place]:
        """Find where the values of the whole model are: those in `order` first, then the others."""
        stage = self.pipeline_group.rank
        held = {key: _place(stage, value, shards.get(key)) for key, value in values.items()}
        if self.pipeline_group.size == 1:
            return held
        # Several stages hold a tied parameter; its place is the first of them, and the others send nothing.
        found: dict[K, _Place] = {}
        for rank, places in enumerate(comm.all_gather_object(held, self.pipeline_group)):
            for key, place in places.items():
                # All stages hold the buffers of the module itself, and a step that updates them ends on the last one.
                is_buffer = isinstance(key, str) and key not in self.names.parameters
                if key not in found or (is_buffer and rank == self.last_rank):
                    found[key] = place
        in_order = [key for key in order if key in found]
        return {key: found[key] for key in dict.fromkeys([*in_order, *found])}

    def _gather_tensor(self, values: Mapping[K, Any], key: K, place: _Place, tag: int) -> Tensor:
        """Merge the shards on the stage that holds the tensor, and send it from there to the first stage."""
        empty = torch.empty(place.shape, dtype=place.dtype, device="meta")
        stage = self.pipeline_group.rank
        if not self.is_saved or stage not in (0, place.stage):
            return empty
        full = empty
        if stage == place.stage:
            # After a run the state of optimizers is in the host's memory.
            full = _merge(values[key].detach().to(self.device), place.shard, self.tensor_group)
        # Only now: all ranks of the tensor group had to take part in the merge.
        if self.tensor_group.rank > 0:
            return empty
        if place.stage == 0:
            return full.cpu()
        if stage == 0:
            # One at a time through the device, so that it never holds more of the model than one tensor.
            received = torch.empty(place.shape, dtype=place.dtype, device=self.device)
            return comm.irecv(received, self.pipeline_group, place.stage, tag).wait().cpu()
        comm.isend(full.to(self.device).contiguous(), self.pipeline_group, 0, tag).wait()
        return empty


def _place(stage: int, value: Any, shard: Shard | None) -> _Place:
    if not isinstance(value, Tensor):
        return _Place(stage, None, (), None, value, None)
    shape = tuple(value.shape if shard is None else shard.full_shape(value.shape))
    # An empty tensor or one on `meta` has no address of its own.
    has_memory = value.numel() > 0 and not value.is_meta
    address = (str(value.device), value.data_ptr()) if has_memory else id(value)
    return _Place(stage, shard, shape, value.dtype, None, (address, tuple(value.shape), value.stride()))


def _merge(local: Tensor, shard: Shard | None, group: Group) -> Tensor:
    """Merge the shards of one tensor, on the CPU, on the first rank of `group`; the others have no use for it."""
    if shard is None or group.size == 1:
        return local
    sizes = [shard.local_size(rank) for rank in range(group.size)]
    gathered = comm.all_gather(local, group, shard.dim, sizes)
    return gathered if group.rank > 0 else shard.merge(gathered.cpu().split(sizes, shard.dim))


def _not_elementwise(optimizer: Optimizer, name: str, parameter: Tensor, key: str, value: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{type(optimizer).__name__} keeps `{key}` of shape {tuple(value.shape)} for the shard `{name}` of shape"
        f" {tuple(parameter.shape)}; only state of the parameter's own shape can be merged into a full checkpoint"
    )


def _numbered(settings: Sequence[Mapping[str, Any]], given: ParameterGroups, wanted: ParameterGroups) -> list[Any]:
    """Turn the parameter groups of a state dict, `given` by names, into groups of the `wanted` parameters."""
    groups = []
    first = 0
    for group, had, names in zip(settings, given, wanted):
        group = {**group, "params": list(range(first, first + len(names)))}
        if "param_names" in group and list(had) != list(names):
            group["param_names"] = list(names)  # torch keeps them where an optimizer was given named parameters
        groups.append(group)
        first += len(names)
    return groups


def _positions(names: Any) -> dict[str, int]:
    return {name: index for index, name in enumerate(dict.fromkeys(names))}


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
