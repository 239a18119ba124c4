"""Leaves to optimizers only this rank's parts of the tensors that code made while it built them.

`configure_optimizers` sees all parameters in full (`strategies.hooks.views`). Wrapper optimizers and averages copy
parameters at that time. A step runs on shards, so each copy becomes this rank's part. A step pairs copies with
parameters by position, so copies of another stage's parameters go:

    lists, tuples, sets      lose the entry of such a parameter, or its position if they follow the parameters
    dicts                    lose the entry of such a parameter, by parameter, by name or by position
    modules                  get the stage's placeholder of a missing parameter
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.comm import Group
from lightning_parallel.compat import FOREIGN, is_users
from lightning_parallel.compat.torch import parameters_of
from lightning_parallel.strategies.whole.copies import MARK
from lightning_parallel.tensor.pieces import Piece
from lightning_parallel.tensor.sharded import ShardedTensor, local_numel
from lightning_parallel.tensor.sharding import Shard

__all__ = ["DummyPositions", "take_parts"]

_NO_HOLDERS = (str, bytes, bool, int, float, complex, type(None), Tensor, type, types.ModuleType)
_PASSED = FOREIGN - {"torch"}  # an optimizer of the user may hold an optimizer of torch


class DummyPositions:
    """Positions of dummies in lists that follow the parameters.

    Args:
        module: The user's module while it has the dummies.
        dummies: The dummies, and their names.
        optimizers: The optimizers of `configure_optimizers`, with the dummies in their groups.
    """

    def __init__(self, module: nn.Module, dummies: Mapping[Any, str], optimizers: Sequence[Any]) -> None:
        groups = [[group["params"] for group in optimizer.param_groups] for optimizer in optimizers]
        every = list(module.parameters())
        # User code lists parameters in the order of the optimizer, of the module, or of its trained parameters.
        orders = [list(chain.from_iterable(each)) for each in groups]
        orders += [every, [parameter for parameter in every if parameter.requires_grad]]
        self._groups = [[[each not in dummies for each in group] for group in each] for each in groups]
        self._masks = [[each not in dummies for each in order] for order in orders]

    def of(self, count: int) -> list[list[bool]]:
        """Return masks of the positions that stay in a list of `count` entries; the order of optimizers is first."""
        return [mask for mask in self._masks if len(mask) == count > 1]

    def of_groups(self, values: Sequence[Any]) -> list[list[bool]] | None:
        """Return masks of the positions that stay in lists for each group; None if lengths differ."""
        for groups in self._groups:
            if len(groups) == len(values) and all(
                isinstance(value, list) and len(value) == len(mask) for value, mask in zip(values, groups)
            ):
                return groups
        return None


def take_parts(
    module: nn.Module, dummies: Mapping[nn.Parameter, str], optimizers: Sequence[Any], positions: DummyPositions
) -> list[tuple[Tensor, Shard, Group]]:
    """Replace full tensors in optimizers by this rank's parts, and take out the tensors of other stages.

    Args:
        module: The user's module, which must have lost its dummies.
        dummies: The empty parameters in place of other stages' parameters, and their names.
        optimizers: The optimizers of `configure_optimizers`.
        positions: Positions of dummies in lists.

    Returns:
        The parts, each with the rule and the group of the full tensor.
    """
    cleaner = _Cleaner(module, dummies, positions)
    for optimizer in optimizers:
        cleaner.clean(optimizer)
    return cleaner.parts


class _Cleaner:
    def __init__(self, module: nn.Module, dummies: Mapping[nn.Parameter, str], positions: DummyPositions) -> None:
        self._ids = {id(dummy) for dummy in dummies}
        self._module = module
        self._positions = positions
        trainer = getattr(module, "_trainer", None)
        # Hold the values beside their ids, so that no new object gets the id of a freed object.
        self._seen: dict[int, Any] = {id(trainer): trainer, id(self): self, id(module): module}
        self._defaults: list[Any] = []
        self.parts: list[tuple[Tensor, Shard, Group]] = []

    def clean(self, value: Any) -> Any:
        """Return a value with parts, without the tensors of dummies; mutable values are changed in place."""
        if isinstance(value, Piece):
            part = value.part.detach()
            self.parts.append((part, value.rule, value.family.group))
            return part
        if isinstance(value, ShardedTensor):
            ShardedTensor.hide(value)  # a copy by `deepcopy`
        if isinstance(value, _NO_HOLDERS) or id(value) in self._seen:
            return value
        self._seen[id(value)] = value
        if isinstance(value, (list, deque)):
            self._clean_list(value)
        elif isinstance(value, tuple):
            return self._clean_tuple(value)
        elif isinstance(value, set):
            value.difference_update([each for each in value if self._belongs(each)])
        elif isinstance(value, MutableMapping):
            self._clean_dict(value)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self._clean_cell(cell)
        elif isinstance(value, types.MethodType):
            self.clean(value.__self__)
        elif isinstance(value, functools.partial):
            for each in (*value.args, *value.keywords.values()):
                self.clean(each)
        elif type(value).__module__.partition(".")[0] not in _PASSED or isinstance(value, nn.Module):
            self._clean_object(value)
        return value

    def _clean_list(self, values: list[Any] | deque[Any]) -> None:
        kept = self._kept(values)
        cleaned = [self.clean(each) for each in kept]
        if len(cleaned) != len(values) or any(one is not other for one, other in zip(cleaned, values)):
            # In place, because other objects may hold the same list.
            values.clear()
            values.extend(cleaned)

    def _kept(self, values: Sequence[Any]) -> list[Any]:
        """Return the entries of a list without the entries of dummies; parameter groups stay, without parameters."""
        if values and all(isinstance(value, dict) and "params" in value for value in values):
            return list(values)
        groups = self._positions.of_groups(values)
        if groups is not None:
            for value, stays_of in zip(values, groups):
                if self._fits(value, stays_of):
                    value[:] = [each for each, stays in zip(value, stays_of) if stays]
            return list(values)
        mask = None if any(values is known for known in self._defaults) else self._mask_of(values)
        if mask is not None:
            return [each for each, stays in zip(values, mask) if stays]
        return [each for each in values if not self._belongs(each)]

    def _mask_of(self, values: Sequence[Any]) -> list[bool] | None:
        """Return a mask of the positions that stay in values that follow the parameters; None for other values."""
        return next((mask for mask in self._positions.of(len(values)) if self._fits(values, mask)), None)

    def _fits(self, values: Sequence[Any], mask: Sequence[bool]) -> bool:
        """Return whether every entry with a known owner agrees with the mask."""
        return all(stays != self._belongs(each) or not self._owners(each) for each, stays in zip(values, mask))

    def _clean_tuple(self, values: tuple[Any, ...]) -> Any:
        cleaned = [self.clean(each) for each in values if not self._belongs(each)]
        if len(cleaned) == len(values) and all(one is other for one, other in zip(cleaned, values)):
            return values
        if hasattr(values, "_fields"):
            return type(values)(*cleaned) if len(cleaned) == len(values) else values
        return tuple(cleaned)

    def _clean_dict(self, values: MutableMapping[Any, Any]) -> None:
        is_by_number = all(type(key) is int and key == index for index, key in enumerate(values))
        mask = self._mask_of(list(values.values())) if is_by_number else None
        if mask is not None:
            kept = [each for each, stays in zip(values.values(), mask) if stays]
            values.clear()
            values.update(enumerate(kept))
        for key in [key for key, each in values.items() if self._belongs(key) or self._belongs(each)]:
            del values[key]
        for key, each in list(values.items()):
            if isinstance(key, str) and any(each is known for known in self._defaults):
                continue
            cleaned = self.clean(each)
            if cleaned is not each:
                values[key] = cleaned

    def _clean_cell(self, cell: Any) -> None:
        with suppress(ValueError):  # it is empty
            cell.cell_contents = self.clean(cell.cell_contents)

    def _clean_object(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._clean_module(value)
        if isinstance(value, Optimizer):
            self._defaults += [each for each in vars(value).get("defaults", {}).values() if isinstance(each, list)]
        own: Any = getattr(value, "__dict__", None)
        for name, each in list(own.items()) if isinstance(own, dict) else ():
            if name in ("_trainer", "_fabric"):
                continue
            cleaned = self.clean(each)
            if cleaned is not each:
                own[name] = cleaned

    def _clean_module(self, copied: nn.Module) -> None:
        """Replace dummies in a copy of a module by the stage's parameters or placeholders."""
        parameters: Any = parameters_of(copied)
        found = [name for name, value in parameters.items() if value is not None and self._is_elsewhere(value)]
        path = getattr(vars(copied).get(MARK), "path", None)
        if not found or path is None:
            return
        original = self._module.get_submodule(path)
        held = parameters_of(original)
        for name in found:
            del parameters[name]
            if name in held:
                parameters[name] = held[name]
            if name in vars(original):
                vars(copied)[name] = vars(original)[name]

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Return whether another stage has all elements of a tensor."""
        if isinstance(tensor, Piece):
            return tensor.is_elsewhere
        # A dummy, or a copy of one by `deepcopy`.
        return bool(self._ids) and isinstance(tensor, nn.Parameter) and local_numel(tensor) == 0

    def _belongs(self, value: Any) -> bool:
        """Return whether a value holds tensors of dummies alone: one tensor, or a record of tensors."""
        if type(value) is int:
            return value in self._ids  # dicts by `id(parameter)`
        tensors = _tensors_in(value)
        return bool(tensors) and all(self._is_elsewhere(tensor) for tensor in tensors)

    def _owners(self, value: Any) -> bool:
        """Return whether the parameter of a value is known."""
        return any(isinstance(tensor, (Piece, ShardedTensor)) for tensor in _tensors_in(value))


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a record, such as a parameter with its copy; a list is never a record of one parameter."""
    if isinstance(value, Tensor):
        return [value]
    entries: Iterable[Any] = ()
    if isinstance(value, tuple):
        entries = value
    elif isinstance(value, dict):
        entries = value.values()
    elif not isinstance(value, (nn.Module, Optimizer, type, types.ModuleType)) and not callable(value):
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and is_users(type(value)):
            entries = own.values()
    return [each for each in entries if isinstance(each, Tensor)]
