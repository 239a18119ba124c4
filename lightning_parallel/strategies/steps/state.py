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
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_parallel import comm
from lightning_parallel.compat import FOREIGN, is_power_of_two
from lightning_parallel.compat.torch import buffers_of, version_of
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.placeholder import PlaceholderTensor, missing

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
    "emptied",
    "is_container",
    "label_of",
    "put",
]


StatePath = tuple[Any, ...]
"""The name of an attribute, then keys, positions and fields inside the attribute."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)

_FLAT = frozenset((bool, int, float, str, type(None)))

_COPIED_BYTES = 16 << 20
"""Larger tensors and arrays are not copied before each step: a write into them is not seen and not undone."""
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
    """A new container."""

    value: Any


class Replaced(NamedTuple):
    """All entries of a container that was changed other than by new entries at its end."""

    value: Any


class Gone(NamedTuple):
    """A removed entry or attribute."""


Edit = Value | Added | Members | Fresh | Replaced | Gone


class _Child(str):
    """Name of a submodule."""

    __slots__ = ()


def label_of(path: StatePath) -> str:
    """Return a path in the form of code after `self.`, such as `stats['n']`."""
    label, holder = str(path[0]), path[0]
    for key in path[1:]:
        label += f".{key}" if isinstance(holder, _Child) else f"[{key!r}]"
        holder = key
    return label


def is_container(value: Any) -> bool:
    """Tell whether a value is a list, deque, dict or set."""
    return isinstance(value, (list, deque, dict, set))


_names_of_frameworks: set[str] = set()


def _is_foreign(name: str) -> bool:
    if not _names_of_frameworks:
        _names_of_frameworks.update(vars(LightningModule()), ("_parallel_state", "_pipeline_site"))
    return name in _names_of_frameworks


class Snapshot:
    """The state of a module at one time.

    Args:
        module: The module. The snapshot also follows its submodules in `ParallelState.followed`.
        with_buffers: Whether buffers count.
        is_exact: Whether to find writes into the `.data` of all tensors; if not, only of tensors that changed in the
            self-check.
    """

    def __init__(self, module: nn.Module, with_buffers: bool = True, is_exact: bool = False) -> None:
        self.module = module
        self._with_buffers = with_buffers
        self._is_exact = is_exact
        self._packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__} - FOREIGN
        self._holders: dict[StatePath, Any] = {}
        self._items: dict[StatePath, Any] = {}
        self._kept: dict[StatePath, Any] = {}
        self._seen: set[int] = set()
        state = vars(module).get("_parallel_state")
        self._rules = {name for rules in getattr(state, "merging", {}).values() for name in rules}
        self._parts = {id(module.get_submodule(name)) for name in getattr(state, "followed", ())}
        self._visit((), module, _COPIED_BYTES)

    def original(self, path: StatePath) -> Any:
        """Return the object that was at `path`; `MISSING` if there was none."""
        items = self._items.get(path[:-1])
        if isinstance(items, list):
            return items[path[-1]] if path[-1] < len(items) else MISSING
        return MISSING if items is None else items.get(path[-1], MISSING)

    def paths(self) -> list[StatePath]:
        """Return the paths of numbers, tensors and other single values."""
        found = []
        for path, items in self._items.items():
            if len(items) <= _FOLLOWED_ITEMS:
                keys = range(len(items)) if isinstance(items, list) else items
                found += [(*path, key) for key in keys if (*path, key) not in self._holders]
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

    # -------------------------------------------------------------------------------------------------- looking

    def _is_object(self, value: Any) -> bool:
        """Tell whether a value is a plain object of the user's, or a dataclass, whose fields are followed."""
        kind = type(value)
        if not hasattr(value, "__dict__") or isinstance(value, (type, nn.Module, torch.utils.data.Dataset, Tensor)):
            return False
        if callable(value) or hasattr(value, "__iter__") or hasattr(value, "__next__"):
            return False
        is_theirs = kind.__module__.partition(".")[0] in self._packages
        return is_theirs or dataclasses.is_dataclass(value) or kind is SimpleNamespace

    def _is_followed(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            is_elsewhere = isinstance(value, PlaceholderTensor) and (value.value is None or value.parameter)
            return not (is_elsewhere or isinstance(value, nn.Parameter))
        return isinstance(value, (*_PLAIN, np.ndarray)) or is_container(value) or self._is_object(value)

    def entries_of(self, holder: Any) -> Any:
        """Return the entries of a holder: a dict by key or name, or a list."""
        if isinstance(holder, nn.Module):
            found = {k: v for k, v in vars(holder).items() if not _is_foreign(k) and self._is_followed(v)}
            buffers = buffers_of(holder).items() if self._with_buffers else ()
            found |= {k: v for k, v in buffers if isinstance(v, Tensor) and self._is_followed(v)}
            if self._parts:
                found |= {_Child(k): v for k, v in holder.named_children() if id(v) in self._parts}
            return found
        if isinstance(holder, (list, deque)):
            return list(holder)
        return dict(holder if isinstance(holder, Mapping) else vars(holder))

    def _visit(self, path: StatePath, holder: Any, most: int) -> None:
        if id(holder) in self._seen:
            return
        # Containers may refer to each other in a cycle.
        self._seen.add(id(holder))
        items = self.entries_of(holder)
        self._holders[path], self._items[path] = holder, items
        if len(items) > _FOLLOWED_ITEMS:
            return
        if isinstance(items, list):
            if _FLAT.issuperset(map(type, items)):
                return
            most = _COPIED_ENTRY_BYTES
        for key, value in enumerate(items) if isinstance(items, list) else items.items():
            place: StatePath = (*path, key)
            if isinstance(value, _PLAIN):
                continue
            if isinstance(value, set):
                self._kept[place] = set(value)
            elif isinstance(value, (Tensor, np.ndarray)):
                if self._is_followed(value) and value.nbytes <= most:
                    self._kept[place] = _copy_of(value, self._is_exact or label_of(place) in self._rules)
            elif isinstance(value, nn.Module) or is_container(value) or self._is_object(value):
                self._visit((*path, key), value, most)

    # -------------------------------------------------------------------------------------------------- changes

    def changes(self) -> dict[StatePath, Edit]:
        """Return the changes since the snapshot, by path."""
        edits: dict[StatePath, Edit] = {}
        self._compare((), self.module, edits)
        return edits

    def _compare(self, path: StatePath, holder: Any, edits: dict[StatePath, Edit]) -> None:
        before, now = self._items[path], self.entries_of(holder)
        if isinstance(before, list):
            is_limited = isinstance(holder, deque) and holder.maxlen is not None
            shift = _shift(before, now, len(before) if is_limited else 0)
            if shift is None:
                edits[path] = Replaced(_frozen(holder))
                return
            if len(now) > len(before) - shift:
                edits[path] = Added(now[len(before) - shift :])
            if not shift and not _FLAT.issuperset(map(type, before)):
                for index, value in enumerate(before):
                    self._compare_same((*path, index), value, edits)
            return
        for key, value in now.items():
            old, place = before.get(key, MISSING), (*path, key)
            if value is old:
                self._compare_same((*path, key), value, edits)
            elif is_container(value):
                self._compare_container((*path, key), old, value, edits)
            elif isinstance(value, nn.Module):
                continue
            elif type(value) is not type(old) or not isinstance(value, _PLAIN) or value != old:
                edits[place] = Value(self._kept.get((*path, key), old), _leaf(value), False)
        for key in before.keys() - now.keys():
            place = (*path, key)
            # A placeholder may have taken the place of the value. The attribute still exists, so it is not removed.
            is_there = isinstance(holder, nn.Module) and (key in vars(holder) or key in buffers_of(holder))
            if not is_there and not isinstance(key, _Child):
                edits[place] = Gone()

    def _compare_container(self, path: StatePath, old: Any, value: Any, edits: dict[StatePath, Edit]) -> None:
        # Treat `self.found = self.found + [x]` like `self.found.append(x)`: the entries of microbatches add up.
        if type(value) is list and type(old) is list and old and path in self._items:
            before = self._items[path]
            if len(value) >= len(before) and _shift(before, value, 0) == 0:
                if len(value) > len(before):
                    edits[path] = Added(value[len(before) :])
                return
        edits[path] = Fresh(_frozen(value))

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

    # -------------------------------------------------------------------------------------------------- restoring

    def restore(self, removes: bool = True, tensors: bool = True, in_place: bool = False) -> None:
        """Restore the state.

        A copy of its earlier values replaces a changed tensor: autograd may have saved the changed tensor.

        Args:
            removes: Whether to remove new attributes of the module.
            tensors: Whether to restore tensors of modules, too.
            in_place: Whether tensors and arrays stay the same objects; only where no backward pass follows.
        """
        for path, holder in self._holders.items():
            items = copy.copy(self._items[path])
            if not tensors and isinstance(holder, nn.Module):
                items = {key: value for key, value in items.items() if not isinstance(value, Tensor)}
            for key in range(len(items)) if isinstance(items, list) else items:
                items[key] = self._as_it_was((*path, key), items[key], in_place)
            self._refill(holder, items, removes)

    def _as_it_was(self, path: StatePath, value: Any, in_place: bool = False) -> Any:
        before = self._kept.get(path)
        if before is None or _is_equal(before, value):
            return value
        if isinstance(value, set):
            value.clear()
            value.update(before)
            return value
        if in_place and before.shape == value.shape:
            if isinstance(value, Tensor):
                with torch.no_grad(), torch.inference_mode(value.is_inference()):
                    return value.copy_(before)
            value[...] = before
            return value
        return before.clone() if isinstance(before, Tensor) else before.copy()

    def _refill(self, holder: Any, items: Any, removes: bool) -> None:
        if isinstance(holder, nn.Module):
            if removes:
                for name in self.entries_of(holder).keys() - items.keys() - buffers_of(holder).keys():
                    holder.__dict__.pop(name, None)
            for name, value in items.items():
                if not isinstance(name, _Child):
                    put(holder, name, value)
        elif isinstance(holder, (list, deque)):
            holder.clear()
            holder.extend(items)
        elif isinstance(holder, dict):
            holder.clear()
            holder.update(items)
        else:
            vars(holder).clear()
            vars(holder).update(items)


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
    """Set an entry of a container, a field of an object, an attribute or buffer of a module."""
    if isinstance(holder, nn.Module):
        (buffers_of(holder) if key in buffers_of(holder) else holder.__dict__)[key] = value
    elif isinstance(holder, (list, deque, dict)):
        holder[key] = value
    else:
        vars(holder)[key] = value


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
    if isinstance(value, Tensor):
        return before is _known_copy(value) or (before.shape == value.shape and torch.equal(before, value.detach()))
    if isinstance(value, np.ndarray):
        # By bytes, since a NaN is not equal to itself.
        return before.shape == value.shape and before.tobytes() == value.tobytes()
    return bool(before == value)


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and old == new)


def _shift(before: list[Any], now: list[Any], most: int) -> int | None:
    """Return how many first entries were dropped, up to `most`, as a full deque does; None if other entries changed."""
    if len(now) < len(before):
        return None
    if all(map(operator.is_, before, now)):
        return 0
    return next((shift for shift in range(most + 1) if all(map(_is_same, before[shift:], now))), None)


def _leaf(value: Any) -> Any:
    return Elsewhere(value) if missing(value) else value


def _frozen(value: Any) -> Any:
    """Return a container with copies of the containers inside; values of other stages become `Elsewhere`."""
    if isinstance(value, dict):
        items: Any = {key: _frozen(item) for key, item in value.items()}
    elif isinstance(value, (list, deque)):
        return _refilled(value, [_frozen(item) if is_container(item) else item for item in value])
    elif isinstance(value, set):
        return set(value)
    else:
        return _leaf(value)
    return _refilled(value, items)


def _refilled(value: Any, items: Any) -> Any:
    found = emptied(value)
    found.update(items) if isinstance(found, (dict, set)) else found.extend(items)
    return found


def emptied(value: Any) -> Any:
    """Return an empty container of the same class, with its default factory, or its limit."""
    found = copy.copy(value)
    found.clear()
    return found


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
        self._values = {name: value for name, value in module.named_parameters() if not value.requires_grad}
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
