"""Removes or refuses tensors that the user's code made of dummies while it built optimizers.

A pipeline stage shows dummies in place of the parameters of other stages, so that parameter groups equal the groups of
one process (`checkpoint.dummies`). Wrapper optimizers and averages copy parameters at that time. Later, without the
dummies, they pair copies with parameters by position:

    lists, tuples, sets      lose the entry of a dummy, or its position if they follow the parameters
    dicts                    lose the entry of a dummy by parameter, by name or by position
    modules                  get the stage's placeholder of a missing parameter
    any other holder         is refused
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lightning_parallel.compat import FOREIGN, innermost_users_line, is_users
from lightning_parallel.compat.torch import TorchDispatchMode, parameters_of, pytree, schema_of
from lightning_parallel.strategies.hooks.parts import storage_ref
from lightning_parallel.strategies.whole.copies import MARK

__all__ = ["DummyPositions", "DummyTrace", "take_out_dummies"]

_NO_HOLDERS = (str, bytes, bool, int, float, complex, type(None), Tensor, type, types.ModuleType)
_PASSED = FOREIGN - {"torch"}  # an optimizer of the user may hold an optimizer of torch


class DummyTrace(TorchDispatchMode):
    """Follows parameters through every operation, and knows the tensors that were made of a dummy alone.

    Args:
        module: The user's module while it has the dummies.
        dummies: The dummies, and their names.
    """

    def __init__(self, module: nn.Module, dummies: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self.ids = {id(dummy): name for dummy, name in dummies.items()}
        self._names = frozenset(self.ids.values())
        self._sketches = {_sketch(dummy) for dummy in dummies}
        # By the address of the memory. The weak reference prevents the reuse of an address.
        self._made: dict[int, tuple[StorageWeakRef, frozenset[str], str]] = {}
        # Parameters of this stage count as well: a tensor of both kinds is not of a dummy alone, and stays.
        for name, parameter in module.named_parameters():
            self._note(parameter, frozenset({name}))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        first = args[0] if args else None
        # An operator that writes in place returns its argument or nothing.
        targets = first if schema_of(func).is_mutable else result
        # Operators on lists, such as in averages, work entry by entry: an entry comes only from its own parameter.
        if isinstance(first, (list, tuple)) and isinstance(targets, (list, tuple)) and len(first) == len(targets):
            others = [one for one in args if isinstance(one, (list, tuple)) and len(one) == len(first)]
            for *operands, target in zip(*others, targets):
                self._follow(operands, target)
        else:
            # `copy_` overwrites its target, so the target's own past does not count.
            written = targets if func.__name__.startswith("copy_") else None
            self._follow([one for one in pytree.tree_leaves((args, kwargs)) if one is not written], targets)
        return result

    def _follow(self, operands: Iterable[Any], targets: Any) -> None:
        owners = frozenset().union(*(self.owners(one) for one in operands if isinstance(one, Tensor)))
        for target in pytree.tree_leaves(targets) if owners else ():
            if isinstance(target, Tensor) and self.owners(target) != owners:
                self._note(target, owners)

    def _note(self, tensor: Tensor, owners: frozenset[str]) -> None:
        reference = storage_ref(tensor)
        if reference is not None:
            # The line goes into the error, which comes long after the operation.
            line = innermost_users_line() if owners & self._names else ""
            self._made[reference.cdata] = reference, owners, line

    def owners(self, tensor: Tensor) -> frozenset[str]:
        """Return the parameters that a tensor was made of."""
        reference = storage_ref(tensor)
        return (
            self._made[reference.cdata][1] if reference is not None and reference.cdata in self._made else frozenset()
        )

    def is_of_dummy(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made of dummies alone."""
        # `deepcopy` copies a dummy without an operator. The user may have expanded another number.
        if tensor.dim() and tensor.numel() > 1 and not any(tensor.stride()) and _sketch(tensor) in self._sketches:
            return True
        owners = self.owners(tensor)
        return bool(owners) and owners <= self._names

    def left(self) -> tuple[str, str] | None:
        """Return a parameter of another stage whose dummy or copy code still holds, and the line that made it."""
        for reference, owners, line in self._made.values():
            if owners & self._names and not reference.expired():
                return min(owners & self._names), line
        return None


def _sketch(tensor: Tensor) -> Any:
    """Return the shape, the dtype and the first number of a tensor, in which dummies differ from other tensors."""
    first = tensor.detach()[(0,) * tensor.dim()].item() if tensor.numel() and not tensor.is_meta else None
    return tensor.shape, tensor.dtype, first


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


def take_out_dummies(
    trace: DummyTrace, module: nn.Module, optimizers: Sequence[Any], positions: DummyPositions
) -> None:
    """Take the tensors of dummies out of optimizers and the module, which must have lost its dummies.

    Args:
        trace: Knows the tensors of dummies.
        module: The user's module.
        optimizers: The optimizers of `configure_optimizers`.
        positions: Positions of dummies in lists.

    Raises:
        ValueError: If another holder still has such a tensor.
    """
    cleaner = _Cleaner(trace, module, positions)
    for optimizer in optimizers:
        cleaner.clean(optimizer)
    # From the likeliest holder to the rarest: a walk through a module or a garbage collection takes long.
    if trace.left() is not None:
        cleaner.clean(module)
    if trace.left() is not None:
        for callback in getattr(getattr(module, "_trainer", None), "callbacks", ()):
            cleaner.clean(callback)
    if trace.left() is not None:
        # A reference cycle keeps a tensor that no code reaches any more.
        gc.collect()
    left = trace.left()
    if left is not None:
        name, line = left
        raise ValueError(
            f"`{type(module).__name__}.configure_optimizers` keeps a tensor made of `{name}`, which is on another"
            f" pipeline stage{f': {line}' if line else ''}. The place of this tensor is unknown, or it is joined with"
            " other tensors. While optimizers are created, such parameters have a shape and no values. Keep copies of"
            " parameters in lists or dicts that follow the parameters, or in the optimizer's `state`. Or make the"
            " copies in the first `step`, or use TensorParallelStrategy"
        )


class _Cleaner:
    def __init__(self, trace: DummyTrace, module: nn.Module, positions: DummyPositions) -> None:
        self._trace = trace
        self._module = module
        self._positions = positions
        trainer = getattr(module, "_trainer", None)
        # Hold the values beside their ids, so that no new object gets the id of a freed object.
        self._seen: dict[int, Any] = {id(trainer): trainer, id(self): self, id(trace): trace}
        self._defaults: list[Any] = []

    def clean(self, value: Any) -> Any:
        """Return a value without the tensors of dummies; mutable values are changed in place."""
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
        found = [name for name, value in parameters.items() if value is not None and self._trace.is_of_dummy(value)]
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

    def _belongs(self, value: Any) -> bool:
        """Return whether a value holds tensors of dummies alone: one tensor, or a record of tensors."""
        if type(value) is int:
            return value in self._trace.ids  # dicts by `id(parameter)`
        tensors = _tensors_in(value)
        return bool(tensors) and all(self._trace.is_of_dummy(tensor) for tensor in tensors)

    def _owners(self, value: Any) -> bool:
        """Return whether the parameter of a value is known."""
        return any(self._trace.owners(tensor) for tensor in _tensors_in(value))


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
