"""Snapshots of the state of a module: attributes, buffers, and the entries of containers, arrays and objects.

before = Snapshot(module)
step(batch)                    # self.outputs[0].append({"loss": loss}); self.seen += len(x)
before.changes()               # {("outputs", 0): Fresh([{"loss": loss}]), ("seen",): Value(0, 8, False)}
before.restore()               # as if the step had not been run
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from types import FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_parallel import comm
from lightning_parallel.compat import (
    FOREIGN,
    PartialModule,
    fields_of,
    has_value,
    is_power_of_two,
    is_users,
    is_users_object,
)
from lightning_parallel.compat.torch import CALLS, buffers_of, named_parameters_of, pytree, version_of
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.step_trace.placeholder import PlaceholderTensor, missing
from lightning_parallel.tensor.pieces import Piece
from lightning_parallel.tensor.sharded import ShardedTensor

__all__ = [
    "MISSING",
    "Added",
    "Edit",
    "Elsewhere",
    "Fresh",
    "FrozenParameters",
    "Gone",
    "Members",
    "Replaced",
    "Snapshot",
    "StatePath",
    "TrainerState",
    "Value",
    "WatchedCopies",
    "is_container",
    "is_fixed",
    "is_plain",
    "label_of",
    "put",
    "refill",
    "remove",
    "refilled",
]


StatePath = tuple[Any, ...]
"""The name of an attribute, then keys, positions and fields inside the attribute."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)

_CONSTANTS = (Enum, slice, type(...), torch.device, torch.dtype, torch.layout, torch.memory_format)
"""More values that never change, without a hash of their contents."""

_FLAT = frozenset((bool, int, float, str, type(None)))

_COPIED_BYTES = 16 << 20
"""Larger tensors and arrays are not copied before each step: a write into them is not seen and not undone."""
_COPIED_PARAMETERS = 64 << 20
"""In the self-check, parameters up to this size together, and arrays, are copied. Other parameters are watched."""
_COPIED_ENTRY_BYTES = 4 << 10
"""The same limit for entries of lists: steps collect many entries, and hardly ever write into them later."""
_FOLLOWED_ITEMS = 10_000
"""The entries of longer containers, such as data sets, are not followed."""

# Copies of tensors, reused as long as the tensor does not change: most buffers are constants.
_copies = WeakTensorKeyDictionary()


class _Missing:
    def __reduce__(self) -> str:
        return "MISSING"  # one object in every process


MISSING = _Missing()
"""Stands for a value that does not exist."""


class Elsewhere:
    """A value that the last stage does not know; other ranks have the value of one microbatch."""

    def __init__(self, placeholder: PlaceholderTensor) -> None:
        self.shape, self.dtype = placeholder.signature
        self.provenance = placeholder.provenance

    def placeholder(self, device: torch.device) -> PlaceholderTensor:
        """Return a placeholder, which refuses to be read."""
        return PlaceholderTensor(torch.empty(self.shape, dtype=self.dtype, device="meta"), device, self.provenance)


class Value(NamedTuple):
    """A number, tensor, array or other value that was set, or changed in place."""

    before: Any
    after: Any
    in_place: bool


class Added(NamedTuple):
    """Entries at the end of a list or deque."""

    entries: list[Any]


class Members(NamedTuple):
    """New members of a set."""

    added: set[Any]


class Fresh(NamedTuple):
    """A new container or object.

    Attributes:
        value: A copy of it.
        kept: The keys of the entries that a dict has taken from the dict in its place.
        is_grown: Whether these are all entries of the earlier dict.
        added: If a list or tuple begins with all entries of the list in its place, its further entries; else None.
            The step may have added them, as by `self.found = self.found + [x]`, or made equal entries by chance.
    """

    value: Any
    kept: frozenset[Any] = frozenset()
    is_grown: bool = False
    added: list[Any] | None = None


class Replaced(NamedTuple):
    """All entries of a container that was changed other than by new entries at its end."""

    value: Any


class Gone(NamedTuple):
    """A removed entry or attribute."""


Edit = Value | Added | Members | Fresh | Replaced | Gone


class _Child(str):
    """Name of a submodule, or of a class of a module whose attributes are followed."""

    __slots__ = ()


def label_of(path: StatePath) -> str:
    """Return a path in the form of code after `self.`, such as `stats['n']`."""
    label, holder = str(path[0]), path[0]
    for key in path[1:]:
        label += f".{key}" if isinstance(holder, _Child) else f"[{key!r}]"
        holder = key
    return label


def is_container(value: Any) -> bool:
    """Tell whether a value is a list, deque, dict, set, tuple or byte array, or a variant of them."""
    return isinstance(value, (list, deque, dict, set, tuple, frozenset, bytearray, array))


def is_fixed(value: Any) -> bool:
    """Tell whether a value is a named tuple, which has a number of fields and not of entries."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_plain(value: Any) -> bool:
    """Tell whether a value never changes and is compared by its contents, such as a number, a text or a path."""
    return isinstance(value, _PLAIN) or _is_constant(value)


def _is_constant(value: Any) -> bool:
    if isinstance(value, (type, FunctionType)):
        # Pickle finds classes and functions by their names, so functions inside functions cannot be sent.
        return "<" not in value.__qualname__
    if isinstance(value, _CONSTANTS):
        return True
    # Methods and weak references have a hash, too.
    if is_container(value) or isinstance(value, Tensor) or dataclasses.is_dataclass(value) or callable(value):
        return False
    kind: Any = type(value)
    # Streams and events of torch have a hash of their contents, but belong to one process.
    return has_value(kind) and not kind.__module__.startswith("torch")


@lru_cache(maxsize=1024)
def _user_classes(kind: Any) -> tuple[type, ...]:
    """Return the classes of the user among the bases of a class, without the classes that split modules get."""
    return tuple(base for base in kind.__mro__ if is_users(base) and not issubclass(base, PartialModule))


_names_of_frameworks: set[str] = set()


def _is_foreign(name: str) -> bool:
    if not _names_of_frameworks:
        _names_of_frameworks.update(vars(LightningModule()), ("_parallel_state", "_pipeline_site", CALLS))
    return name in _names_of_frameworks


class Snapshot:
    """The state of a module at one time.

    Args:
        module: The module.
        with_buffers: Whether buffers count.
        is_exact: Whether to find writes into the `.data` of all tensors; if not, only of tensors that changed in the
            self-check.
        scope: The submodules whose attributes count: those in `ParallelState.followed`, or all of the user's classes.
            With `all`, it is all state of all submodules, with parameters and hooks, which can only be restored.
    """

    def __init__(
        self,
        module: nn.Module,
        with_buffers: bool = True,
        is_exact: bool = False,
        scope: Literal["followed", "users", "all"] = "followed",
    ) -> None:
        self.module = module
        self._with_buffers = with_buffers
        self._scope = scope
        self._is_whole = scope == "all"
        self._is_exact = is_exact or self._is_whole
        packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__} - FOREIGN
        self._packages = packages | {"collections"}
        self._holders: dict[StatePath, Any] = {}
        self._items: dict[StatePath, Any] = {}
        self._kept: dict[StatePath, Any] = {}
        self._seen: set[int] = set()
        self._watched: list[tuple[StatePath, nn.Parameter, int]] = []
        self._room = _COPIED_PARAMETERS
        state = vars(module).get("_parallel_state")
        self._rules = {name for rules in getattr(state, "merging", {}).values() for name in rules}
        followed = map(module.get_submodule, getattr(state, "followed", ()))
        self._parts = {id(part) for part in (module.modules() if scope == "users" else followed)}
        self._visit((), module, _COPIED_PARAMETERS if self._is_whole else _COPIED_BYTES)

    def original(self, path: StatePath) -> Any:
        """Return the object that was at `path`; `MISSING` if there was none."""
        items = self._items.get(path[:-1], {})
        if isinstance(items, dict):
            return items.get(path[-1], MISSING)
        return items[path[-1]] if path[-1] < len(items) else MISSING

    def paths(self) -> list[StatePath]:
        """Return the paths of numbers, tensors and other single values."""
        found = []
        for path, items in self._items.items():
            if len(items) <= _FOLLOWED_ITEMS:
                found += [(*path, key) for key in _keys_of(items) if (*path, key) not in self._holders]
        return found

    def modules(self) -> list[tuple[StatePath, nn.Module]]:
        """Return the modules that are followed, by path."""
        return [(path, holder) for path, holder in self._holders.items() if isinstance(holder, nn.Module)]

    def holder(self, path: StatePath) -> Any:
        """Return the container, object or module that now holds the value at `path`."""
        found: Any = self.module
        for key in path[:-1]:
            found = self.entries_of(found)[key]
        return found

    def put(self, path: StatePath, value: Any) -> None:
        """Set the value at `path`; a new tuple takes the place of a tuple around it."""
        holder, key = self.holder(path), path[-1]
        if isinstance(holder, tuple):
            self.put(path[:-1], refilled(holder, [*holder[:key], value, *holder[key + 1 :]]))
        else:
            put(holder, key, value)

    # -------------------------------------------------------------------------------------------------- looking

    def _is_object(self, value: Any) -> bool:
        """Tell whether a value is a plain object of the user's, or a dataclass, whose fields are followed."""
        kind: Any = type(value)
        if self._is_whole:
            return is_users_object(value)
        if isinstance(value, (*_PLAIN, type, nn.Module, torch.utils.data.Dataset, Tensor, Enum)):
            return False
        is_theirs = kind.__module__.partition(".")[0] in self._packages or kind is SimpleNamespace
        is_constant = has_value(kind) and not hasattr(value, "__dict__")
        return dataclasses.is_dataclass(value) or (is_theirs and not is_constant)

    def _is_followed(self, value: Any) -> bool:
        if isinstance(value, _PLAIN):
            return True
        if isinstance(value, Tensor):
            is_elsewhere = isinstance(value, PlaceholderTensor) and (value.value is None or value.parameter)
            # A comparison of a piece would communicate.
            return not (is_elsewhere or isinstance(value, (nn.Parameter, Piece, ShardedTensor)))
        if isinstance(value, (bytearray, array)):
            return len(value) <= _COPIED_BYTES
        return isinstance(value, np.ndarray) or is_container(value) or self._is_object(value) or is_plain(value)

    def entries_of(self, holder: Any) -> Any:
        """Return the entries of a holder: a dict by key or name, or a sequence."""
        if isinstance(holder, nn.Module):
            # A list in the body of a class is shared by all of its modules, and steps append to it.
            kind: Any = type(holder)
            # A dot keeps the names of classes apart from the names of attributes.
            classes = {_Child(f"{base.__module__}.{base.__qualname__}"): base for base in _user_classes(kind)}
            if self._is_whole:
                return {**vars(holder), **classes}
            found = {}
            if self._scope == "followed" or holder is self.module or is_users(kind):
                found = {k: v for k, v in vars(holder).items() if not _is_foreign(k) and self._is_followed(v)}
            buffers = buffers_of(holder).items() if self._with_buffers else ()
            found |= {k: v for k, v in buffers if isinstance(v, Tensor) and self._is_followed(v)}
            if self._parts:
                found |= {_Child(k): v for k, v in holder.named_children() if id(v) in self._parts}
            return found | classes
        if isinstance(holder, type):
            own = vars(holder).items()
            return {k: v for k, v in own if not (k.startswith("__") or callable(v)) and self._is_followed(v)}
        if isinstance(holder, dict):
            return dict(holder)
        if isinstance(holder, (list, deque)):
            return list(holder)
        if isinstance(holder, tuple):
            return holder
        if isinstance(holder, (bytearray, array)):
            return bytes(holder) if isinstance(holder, bytearray) else holder[:]
        return fields_of(holder)

    def _visit(self, path: StatePath, holder: Any, most: int) -> None:
        if id(holder) in self._seen:
            return
        # Containers may refer to each other in a cycle.
        self._seen.add(id(holder))
        items = self.entries_of(holder)
        self._holders[path], self._items[path] = holder, items
        if len(items) > _FOLLOWED_ITEMS or _is_flat(items):
            return
        if isinstance(items, (list, tuple)) and not self._is_whole:
            most = _COPIED_ENTRY_BYTES
        for key in _keys_of(items):
            place: StatePath = (*path, key)
            value = items[key]
            if isinstance(value, (*_PLAIN, frozenset)):
                continue
            if isinstance(value, set):
                self._kept[place] = set(value)
            elif isinstance(value, Tensor) and self._is_whole:
                self._keep_tensor(place, value)
            elif isinstance(value, (Tensor, np.ndarray)):
                if self._is_followed(value) and value.nbytes <= most:
                    self._kept[place] = _copy_of(value, self._is_exact or label_of(place) in self._rules)
            elif isinstance(value, nn.Module) or isinstance(key, _Child) or self._is_holder(value):
                self._visit(place, value, most)

    def _keep_tensor(self, path: StatePath, value: Tensor) -> None:
        """Copy a tensor of any size, but only as many parameters as there is room for."""
        if type(value) not in (Tensor, nn.Parameter) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Parameter):
            self._room -= value.nbytes
            if self._room < 0:
                self._watched.append((path, value, version_of(value)))
                return
        self._kept[path] = _copy_of(value, is_exact=True)

    def _is_holder(self, value: Any) -> bool:
        is_wanted = self._is_whole or self._is_followed(value)
        return (is_container(value) or self._is_object(value)) and is_wanted

    # -------------------------------------------------------------------------------------------------- changes

    def changes(self) -> dict[StatePath, Edit]:
        """Return the changes since the snapshot, by path."""
        edits: dict[StatePath, Edit] = {}
        self._compare((), self.module, edits)
        return edits

    def _compare(self, path: StatePath, holder: Any, edits: dict[StatePath, Edit]) -> None:
        before, now = self._items[path], self.entries_of(holder)
        if not isinstance(before, dict):
            is_limited = isinstance(holder, deque) and holder.maxlen is not None
            shift = _shift(before, now, len(before) if is_limited else 0)
            if shift is None:
                edits[path] = Replaced(self._frozen(holder))
                return
            if len(now) > len(before) - shift:
                edits[path] = Added(list(now[len(before) - shift :]))
            if not shift and not _is_flat(before):
                for index, value in enumerate(before):
                    self._compare_same((*path, index), value, edits)
            return
        for key, value in now.items():
            old, place = before.get(key, MISSING), (*path, key)
            if value is old:
                self._compare_same(place, value, edits)
            elif is_container(value):
                self._compare_container(place, old, value, edits)
            elif isinstance(value, nn.Module) or isinstance(key, _Child):
                continue
            elif self._is_object(value):
                edits[place] = Fresh(self._frozen(value))
            elif type(value) is not type(old) or not is_plain(value) or value != old:
                edits[place] = Value(self._kept.get(place, old), _leaf(value), False)
        for key in before.keys() - now.keys():
            place = (*path, key)
            # A placeholder may have taken the place of the value. The attribute still exists, so it is not removed.
            is_there = isinstance(holder, nn.Module) and (key in vars(holder) or key in buffers_of(holder))
            if not is_there and not isinstance(key, _Child):
                edits[place] = Gone()

    def _compare_container(self, path: StatePath, old: Any, value: Any, edits: dict[StatePath, Edit]) -> None:
        # Another object is new even if its entries are equal: `y.tolist()` of two microbatches may be the same numbers.
        before = self._items.get(path) if type(value) is type(old) else None
        if type(value) in (list, tuple) and before is not None and _shift(before, value, 0) == 0:
            edits[path] = Fresh(self._frozen(value), added=list(value[len(before) :]))
            return
        # The keys of a counter are values, and its counts are small numbers, which are equal by chance.
        before = before if isinstance(before, dict) and not isinstance(value, Counter) else {}
        kept = frozenset(key for key, item in before.items() if _is_same(item, value.get(key, MISSING)))
        edits[path] = Fresh(self._frozen(value), kept, 0 < len(kept) == len(before))

    def _compare_same(self, path: StatePath, value: Any, edits: dict[StatePath, Edit]) -> None:
        """Compare an object with its earlier contents."""
        if path in self._holders:
            self._compare(path, value, edits)
        elif path in self._kept and not _is_equal(self._kept[path], value):
            before = self._kept[path]
            if not isinstance(value, set):
                edits[path] = Value(before, copy.copy(value) if isinstance(value, np.ndarray) else value, True)
            elif before <= value:
                edits[path] = Members(value - before)
            else:
                edits[path] = Replaced(set(value))

    def _frozen(self, value: Any) -> Any:
        """Return a copy of a container or object, and of those inside; values of other stages become `Elsewhere`."""
        if isinstance(value, (set, frozenset, bytearray, array)):
            return copy.copy(value)
        if isinstance(value, dict):
            return refilled(value, {key: self._frozen(item) for key, item in value.items()})
        if is_container(value):
            return refilled(value, [self._frozen(item) for item in value])
        if self._is_object(value):
            found = copy.copy(value)
            for name, item in fields_of(value).items():
                put(found, name, self._frozen(item))
            return found
        return _leaf(value)

    # -------------------------------------------------------------------------------------------------- restoring

    def restore(self, removes: bool = True, tensors: bool = True, in_place: bool = False) -> None:
        """Restore the state.

        A copy of its earlier values replaces a changed tensor: autograd may have saved the changed tensor.

        Args:
            removes: Whether to remove new attributes of the module. New attributes of submodules stay.
            tensors: Whether to restore tensors of submodules, too.
            in_place: Whether tensors and arrays stay the same objects; only where no backward pass follows.

        Raises:
            RuntimeError: If a parameter without a copy was changed.
        """
        for path, parameter, version in self._watched:
            if version_of(parameter) != version:
                names = (name for name, value in self.module.named_parameters() if value is parameter)
                name = next(names, label_of(path))
                raise RuntimeError(
                    f"The step writes into the parameter `{name}`, which the self-check cannot undo for a model of"
                    " this size; set `verify='off'`"
                )
        for path, holder in self._holders.items():
            items = self._items[path]
            if not tensors and path and isinstance(holder, nn.Module):
                items = {key: value for key, value in items.items() if not isinstance(value, Tensor)}
            if not _is_flat(items):
                # A tuple cannot take another tensor, so its tensors get their values back in place.
                is_inside = in_place or isinstance(items, tuple)
                found = {key: self._as_it_was((*path, key), items[key], is_inside) for key in _keys_of(items)}
                items = found if isinstance(items, dict) else list(found.values())
            self._refill(holder, items, removes)

    def _as_it_was(self, path: StatePath, value: Any, in_place: bool = False) -> Any:
        before = self._kept.get(path)
        if before is None or _is_equal(before, value):
            return value
        if isinstance(value, set):
            value.clear()
            value.update(before)
            return value
        if self._is_whole and isinstance(value, Tensor):
            # A copy into `.data` leaves the version alone: autograd and other watchers see no write.
            with torch.no_grad(), torch.inference_mode(False):
                value.data = value.data.copy_(before) if value.shape == before.shape else before
            return value
        if in_place and before.shape == value.shape:
            if isinstance(value, Tensor):
                with torch.no_grad(), torch.inference_mode(value.is_inference()):
                    return value.copy_(before)
            value[...] = before
            return value
        return before.clone() if isinstance(before, Tensor) else before.copy()

    def _refill(self, holder: Any, items: Any, removes: bool) -> None:
        if isinstance(holder, nn.Module) and self._is_whole:
            refill(vars(holder), {name: value for name, value in items.items() if not isinstance(name, _Child)})
        elif isinstance(holder, nn.Module):
            if removes and holder is self.module:
                for name in self.entries_of(holder).keys() - items.keys() - buffers_of(holder).keys():
                    holder.__dict__.pop(name, None)
            for name, value in items.items():
                if not isinstance(name, _Child):
                    put(holder, name, value)
        elif isinstance(holder, (list, deque, bytearray, array, dict)):
            refill(holder, items)
        elif not isinstance(holder, tuple):
            now = self.entries_of(holder)
            for name in now.keys() - items.keys():
                remove(holder, name)
            for name, value in items.items():
                if now.get(name, MISSING) is not value:
                    put(holder, name, value)


class TrainerState:
    """The values that a step may set in its trainer: `should_stop`, options of optimizers, and schedulers.

    Args:
        module: The module of a run; a module without a trainer has no such values.
    """

    def __init__(self, module: LightningModule) -> None:
        trainer = vars(module).get("_trainer")
        self._holders: dict[str, dict[str, Any]] = {} if trainer is None else {"self.trainer": vars(trainer)}
        if trainer is not None:
            for number, optimizer in enumerate(trainer.optimizers):
                for index, group in enumerate(optimizer.param_groups):
                    self._holders[f"self.trainer.optimizers[{number}].param_groups[{index}]"] = group
            for number, config in enumerate(trainer.lr_scheduler_configs):
                self._holders[f"self.trainer.lr_scheduler_configs[{number}].scheduler"] = vars(config.scheduler)
        self._before = {label: _options(label, holder) for label, holder in self._holders.items()}

    def changes(self) -> dict[tuple[str, str], Any]:
        """Return the changed values, by holder and name."""
        found: dict[tuple[str, str], Any] = {}
        for label, holder in self._holders.items():
            before, now = self._before[label], _options(label, holder)
            if before != now:
                found.update({(label, key): now.get(key) for key in now if before.get(key, MISSING) != now[key]})
        return found

    def put(self, changes: Mapping[tuple[str, str], Any]) -> None:
        """Make changes."""
        for (label, key), value in changes.items():
            self._holders[label][key] = copy.copy(value)

    def restore(self) -> None:
        """Restore the values."""
        for label, key in self.changes():
            if key in self._before[label]:
                self._holders[label][key] = copy.copy(self._before[label][key])
            else:
                del self._holders[label][key]


def _options(label: str, holder: Mapping[str, Any]) -> dict[str, Any]:
    if label == "self.trainer":
        return {"should_stop": bool(holder.get("should_stop"))}
    return {
        key: value.copy() if isinstance(value, list) else value
        for key, value in holder.items()
        if isinstance(value, (bool, int, float, tuple))
        or (isinstance(value, list) and _FLAT.issuperset(map(type, value)))
    }


def put(holder: Any, key: Any, value: Any) -> None:
    """Set an entry of a container, a field of an object, an attribute or buffer of a module or class."""
    if isinstance(holder, nn.Module):
        (buffers_of(holder) if key in buffers_of(holder) else holder.__dict__)[key] = value
    elif isinstance(holder, (list, deque, dict)):
        holder[key] = value
    elif isinstance(holder, type):
        setattr(holder, key, value)
    elif isinstance(getattr(type(holder), key, None), MemberDescriptorType):
        # A slot. Unlike `setattr`, this also works on frozen dataclasses.
        object.__setattr__(holder, key, value)
    else:
        vars(holder)[key] = value


def remove(holder: Any, key: Any) -> None:
    """Remove an entry of a dict, a field of an object, an attribute of a module or class; lists keep their entries."""
    if isinstance(holder, dict):
        holder.pop(key, None)
    elif isinstance(holder, type):
        delattr(holder, key)
    elif key in getattr(holder, "__dict__", ()):
        del vars(holder)[key]
    elif not is_container(holder) and hasattr(holder, key):
        object.__delattr__(holder, key)


def _copy_of(value: Any, is_exact: bool) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    known = None if is_exact else _known_copy(value)
    if known is None:
        with torch.no_grad(), torch.inference_mode(False):
            known = value.detach().clone()
        if not is_exact and type(value) is Tensor and not value.is_inference():
            _copies[value] = (_state_of(value), known)
    return known


def _known_copy(tensor: Tensor) -> Tensor | None:
    """Return the kept copy of a tensor, if there is one and the tensor has not changed since."""
    known = _copies.get(tensor) if type(tensor) is Tensor and not tensor.is_inference() else None
    return known[1] if known is not None and known[0] == _state_of(tensor) else None


def _state_of(tensor: Tensor) -> tuple[int, int]:
    """Return values that change when a tensor is written or gets other memory; a write into `.data` changes neither."""
    return version_of(tensor), tensor.data_ptr()


def _is_equal(before: Any, value: Any) -> bool:
    # A NaN is not equal to itself, but unchanged.
    if isinstance(value, Tensor):
        # Tensors of the meta device have no values to compare.
        if before is _known_copy(value) or value.is_meta:
            return True
        now = value.detach()
        if before.shape != now.shape or torch.equal(before, now):
            return before.shape == now.shape
        return bool(((before == now) | (before.isnan() & now.isnan())).all())
    if isinstance(value, np.ndarray):
        return before.shape == value.shape and before.tobytes() == value.tobytes()
    return before is value or bool(before == value)


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and is_plain(old) and bool(old == new))


def _keys_of(items: Any) -> Any:
    return items.keys() if isinstance(items, dict) else range(len(items))


def _is_flat(items: Any) -> bool:
    """Tell whether entries of a sequence are numbers and texts only, without entries inside."""
    return not isinstance(items, dict) and (isinstance(items, (bytes, array)) or _FLAT.issuperset(map(type, items)))


def _shift(before: Sequence[Any], now: Sequence[Any], most: int) -> int | None:
    """Return how many first entries were dropped, up to `most`, as a full deque does; None if other entries changed."""
    if len(now) < len(before):
        return None
    if isinstance(before, (bytes, array)):
        return 0 if before == now[: len(before)] else None
    if all(map(operator.is_, before, now)):
        return 0
    return next((shift for shift in range(most + 1) if all(map(_is_same, before[shift:], now))), None)


def _leaf(value: Any) -> Any:
    return Elsewhere(value) if missing(value) else value


def refilled(value: Any, items: Any) -> Any:
    """Return a container of the same class, with its default factory or its limit, and with other entries."""
    if isinstance(value, tuple):
        return type(value)(*items) if is_fixed(value) else type(value)(items)
    if isinstance(value, frozenset):
        return type(value)(items)
    found = copy.copy(value)
    refill(found, items)
    return found


def refill(value: Any, items: Any) -> None:
    """Give a container other entries, in place."""
    if isinstance(value, (bytearray, array)):
        # The self-check tries rules that put a list in the place of a number.
        items = pytree.tree_leaves([*items])
    # Arrays have no `clear` in older versions of Python.
    value.__delitem__(slice(None)) if isinstance(value, array) else value.clear()
    value.update(items) if isinstance(value, (dict, set)) else value.extend(items)


# ------------------------------------------------------------------------------- parameters that a step must not change

# Stages hold different parameters, so a step that writes into parameters is refused. Hashes of the bits find a write.
# The host waits for the hashes, so a run checks only a few steps.


class WatchedCopies:
    """Refuses a run that changes a copy of the model, such as a teacher, if the copy is not split like the model.

    Args:
        engine: The pipeline.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._steps = 0
        self._before: dict[str, list[int]] = {}

    @property
    def looks(self) -> bool:
        """Whether to check this step: often at first, then rarely, since an average may begin late."""
        # A check compares two steps, so check pairs of steps: 1 and 2, 2 and 3, 4 and 5, 8 and 9, ...
        return self._steps < 2 or is_power_of_two(self._steps) or is_power_of_two(self._steps - 1)

    def check(self) -> None:
        """Look at the copies before a step.

        Raises:
            RuntimeError: On every rank of the pipeline, if one has changed.
        """
        self._steps += 1
        if not self._engine.unpaired or not self.looks:
            return
        failure = None
        for path, original in self._engine.unpaired.items():
            both = [self._engine.module.get_submodule(name) for name in (path, original)]
            # Compare bits, since a write into `.data` leaves the version unchanged. Leave out trained parameters, which
            # the optimizer changes.
            frozen = [value for each in both for value in each.parameters() if not value.requires_grad]
            found = comm.fingerprints(frozen)
            before, self._before[path] = self._before.get(path, found), found
            if before != found:
                failure = failure or RuntimeError(
                    f"`{path}` is a copy of `{original}` and has changed between two steps. The training step calls"
                    f" it, so it is not split into stages like `{original}`. A loop over the parameters of both pairs"
                    " others than in a single process. Use TensorParallelStrategy, which shards both alike; or call"
                    f" `{path}` only outside `training_step`"
                )
        comm.raise_together(failure, self._engine.group)


class FrozenParameters:
    """Finds steps that write into frozen parameters, such as the parameters of a teacher.

    The dry run finds writes in the first batch. A moving average may begin later.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._values = {name: value for name, value in named_parameters_of(module) if not value.requires_grad}
        self._before = comm.fingerprints(self._values.values())

    def failure(self) -> RuntimeError | None:
        """Return the error for a step that wrote into a frozen parameter; None if it wrote into none."""
        for name, before, after in zip(self._values, self._before, comm.fingerprints(self._values.values())):
            if before != after:
                return RuntimeError(
                    f"`training_step` must not write into a parameter in a pipeline; got a write into `{name}`. A"
                    " pipeline runs the step once per microbatch, and each stage has other parameters. Write in a"
                    " hook, such as `on_train_batch_start`; or use TensorParallelStrategy, whose ranks run a step once"
                )
        return None
