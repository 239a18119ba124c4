"""Keeps the classes and attributes of a module from before the division, without data.

A divided module can put the skeleton on inside a block (`put_on`): parameters are then fetched when code reads them.
After a run, the module gets the skeleton and its full tensors back (`restore`). The next run divides the module in the
same way (`divide_again`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.torch import BUFFERS, PARAMETERS, buffers_of, parameters_of
from lightning_parallel.pipeline.placeholder import PlaceholderTensor
from lightning_parallel.tensor.sharding import Shard

__all__ = [
    "ModuleChange",
    "FetchParameter",
    "Skeleton",
    "close_skeleton",
    "fill_in_full",
    "keep_skeleton",
    "strip_division",
    "take_out_full",
]

FetchParameter = Callable[[str], Tensor]
"""Returns a parameter of the full model by its first name."""


class _Named(NamedTuple):
    """Stands for a parameter in an attribute, by its first name."""

    name: str


@dataclass
class ModuleChange:
    """Lists the changes that the division made in one module.

    Attributes:
        kind: Class before the division.
        attributes: Former values of attributes that the division replaced or deleted.
        added: Names of attributes that the division added.
        after: Values of replaced and added attributes right after the division. A later value is the user's.
        entries: Former entries of dicts among the attributes, such as hooks and children, by attribute.
        added_entries: Keys that the division added to these dicts, by attribute.
        divided_kind: Class right after the division.
        parameters, buffers: First name of each own parameter and buffer, by key.
        lists: Former lists with parameters in them, which recurrent layers keep.
    """

    kind: type
    attributes: dict[str, Any] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    after: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, dict[Any, Any]] = field(default_factory=dict)
    added_entries: dict[str, list[Any]] = field(default_factory=dict)
    divided_kind: type | None = None
    parameters: dict[str, str | None] = field(default_factory=dict)
    buffers: dict[str, str | None] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)


class Skeleton:
    """Keeps the form of a module from before the division.

    Args:
        module: The full module. Call `close` after the division.

    Attributes:
        module: The module.
        changes: The changes by the division, for each submodule.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = [*module.named_parameters(), *module.named_buffers()]
        self._first = {id(tensor): name for name, tensor in named}
        # Lists, not dicts by module: the hash of a metric changes with its state.
        self.changes: list[tuple[nn.Module, ModuleChange]] = []
        self._before: list[dict[str, Any]] = []
        # Classes and attributes of the divided module, while the module is restored between runs.
        self._divided: list[tuple[type, dict[str, Any]]] = []
        self._restored: dict[str, Tensor] = {}
        for child in module.modules():
            before = {name: self._captured(value) for name, value in _attributes(child).items()}
            lists = _with_parameters(before)
            own = (self._names(parameters_of(child)), self._names(buffers_of(child)))
            self.changes.append((child, ModuleChange(type(child), parameters=own[0], buffers=own[1], lists=lists)))
            self._before.append(before)

    def close(self) -> None:
        """Note the changes by the division, and drop all other values, which the user may change or delete."""
        for (child, change), before in zip(self.changes, self._before):
            after = {name: self._captured(value) for name, value in _attributes(child).items()}
            change.added = [name for name in after if name not in before]
            for name, old in before.items():
                if name in change.lists or _same(old, after.get(name, _GONE)):
                    continue
                new = after.get(name, _GONE)
                if isinstance(old, dict) and isinstance(new, dict):
                    change.entries[name] = {k: v for k, v in old.items() if k not in new or new[k] is not v}
                    change.added_entries[name] = [key for key in new if key not in old]
                else:
                    change.attributes[name] = old
            changed = [name for name in (*change.added, *change.attributes) if name in vars(child)]
            change.after = {name: vars(child)[name] for name in changed}
            change.divided_kind = type(child)
        self._before.clear()
        self._first.clear()

    def adopt(self, change_of: Callable[[nn.Module], ModuleChange | None]) -> None:
        """Take the present form of the module: new submodules count as not divided, removed submodules are dropped.

        Args:
            change_of: Returns the changes in a new submodule that is a copy of a divided one; None for any other.
        """
        known = {id(child): change for child, change in self.changes}
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        self._first = {id(tensor): name for name, tensor in named}
        self.changes = []
        for child in self.module.modules():
            change = known.get(id(child)) or change_of(child) or ModuleChange(type(child))
            if type(child) is not change.divided_kind:
                change.kind = change.divided_kind = type(child)  # the user's, such as one with parametrizations
            change.parameters = self._names(parameters_of(child))
            change.buffers = self._names(buffers_of(child))
            change.lists = _with_parameters({k: self._captured(v) for k, v in _attributes(child).items()})
            self.changes.append((child, change))
        self._first.clear()

    def buffers(self) -> dict[str, Tensor]:
        """Return the present buffers by first name, even if the module has replaced them."""
        return {
            name: value
            for child, change in self.changes
            for key, name in change.buffers.items()
            if name is not None and (value := buffers_of(child).get(key)) is not None
        }

    @property
    def buffer_names(self) -> list[str]:
        """First names of all buffers of the full module."""
        found = [name for _, change in self.changes for name in change.buffers.values() if name is not None]
        return list(dict.fromkeys(found))

    def _names(self, tensors: Mapping[str, Tensor | None]) -> dict[str, str | None]:
        return {key: None if value is None else self._first[id(value)] for key, value in tensors.items()}

    def _captured(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return _Named(self._first[id(value)]) if id(value) in self._first else value
        if type(value) is list:
            return [self._captured(item) if isinstance(item, nn.Parameter) else item for item in value]
        return copy.copy(value) if isinstance(value, dict) else value

    # --------------------------------------------------------------------------------------- restored between runs

    @property
    def is_restored(self) -> bool:
        """Whether the module holds its full tensors now."""
        return bool(self._divided)

    def restore(self, full: Mapping[str, Tensor], trained: Collection[str]) -> None:
        """Give the module its former classes and attributes, and full tensors.

        Parameters that this rank holds stay the same objects, because optimizers and the user's code refer to them.

        Args:
            full: All parameters and buffers by first name.
            trained: Names of the parameters that require a gradient.
        """
        held = {**dict(self.module.named_parameters()), **self.buffers()}
        names = {name for _, change in self.changes for name in change.parameters.values() if name is not None}
        for name, value in full.items():
            mine = held.get(name)
            if mine is None or isinstance(mine, PlaceholderTensor):
                self._restored[name] = nn.Parameter(value, name in trained) if name in names else value
                continue
            if mine.shape != value.shape:
                # A gradient with the shape of the shard would not fit the full tensor.
                mine.grad = None
                mine.data = value
            elif name not in names:
                mine.data.copy_(value)  # every stage has a value of the buffer; the last stage has the final one
            self._restored[name] = mine
        self._divided = [(type(child), dict(vars(child))) for child, _ in self.changes]
        for child, change in self.changes:
            strip_division(child, change)
            fill_in_full(child, change, self._restored)

    def fits(self) -> bool:
        """Tell whether the restored module still has the submodules and parameters of the division."""
        if [id(child) for child in self.module.modules()] != [id(child) for child, _ in self.changes]:
            return False
        return all(
            type(child) is change.kind
            and all(parameters_of(child).get(key) is self._tensor(name) for key, name in change.parameters.items())
            and all(vars(child).get(name) is value for name, value in change.attributes.items() if _is_plain(value))
            for child, change in self.changes
        )

    def divide_again(self, rules: Mapping[str, Shard], rank: int) -> None:
        """Divide the restored module as in the last run. Changes by the user since then stay.

        Args:
            rules: How tensors are sharded over the tensor axis, by name.
            rank: Position on that axis.
        """
        for (child, change), (kind, divided) in zip(self.changes, self._divided):
            take_out_full(child, change, divided)
            child.__class__ = kind
        for name, tensor in [*self.module.named_parameters(), *self.buffers().items()]:
            rule = rules.get(name)
            if rule is not None and name in self._restored:
                tensor.grad = None
                # A slice would keep the full tensor alive.
                tensor.data = rule.split(tensor.data, rank).clone()
        self._divided.clear()
        self._restored.clear()

    def _tensor(self, name: str | None) -> Tensor | None:
        return None if name is None else self._restored[name]

    # -------------------------------------------------------------------------------------------------- for a while

    @contextmanager
    def put_on(self, parameters: FetchParameter, buffers: Mapping[str, Tensor], keeps: bool = False) -> Iterator[None]:
        """Give the module its former classes and attributes inside the block.

        Args:
            parameters: Returns each parameter when code reads it.
            buffers: The full buffers, by first name.
            keeps: Whether attributes that the block sets stay after it.
        """
        current = [(child, type(child), dict(vars(child))) for child, _ in self.changes]
        begun: list[dict[str, Any]] = []
        try:
            for child, change in self.changes:
                _put_on(child, change, parameters, buffers)
            # After an error in `_put_on`, `begun` is empty, and the block below restores the attributes all the same.
            begun += [dict(vars(child)) if keeps else {} for child, _ in self.changes]
            # Fetched tensors are full already, so state dicts must not gather them.
            with ParallelState.of(self.module).own_parts():
                yield
        finally:
            for index, (child, kind, attributes) in enumerate(current):
                child.__class__ = kind
                if keeps and index < len(begun):
                    attributes.update(_set_since(child, begun[index]))
                vars(child).clear()
                vars(child).update(attributes)


def _set_since(child: nn.Module, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module that are new or replaced, without its registries of tensors."""
    # The registries hold fetched tensors, which must not stay after the block.
    registries = {PARAMETERS, BUFFERS}
    return {k: v for k, v in vars(child).items() if k not in registries and before.get(k, _GONE) is not v}


def keep_skeleton(module: nn.Module) -> None:
    """Make the skeleton of `module`, before its first division."""
    state = ParallelState.of(module)
    if state.skeleton is None:
        state.skeleton = Skeleton(module)


def close_skeleton(module: nn.Module) -> None:
    """Note the changes by the division in the skeleton."""
    state = ParallelState.of(module)
    if state.skeleton is not None:
        state.skeleton.close()


_GONE = object()


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {PARAMETERS, BUFFERS, "_parallel_state"}
    return {name: value for name, value in vars(module).items() if name not in own}


def _with_parameters(attributes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the lists among captured attributes that have parameters in them."""
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, list) and any(isinstance(item, _Named) for item in value)
    }


def _same(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(new[key] is value for key, value in old.items())
    if type(old) is list:
        return len(old) == len(new) and all(a is b or isinstance(a, _Named) and a == b for a, b in zip(old, new))
    return old is new or isinstance(old, _Named) and bool(old == new)


def _put_on(child: nn.Module, change: ModuleChange, parameters: FetchParameter, buffers: Mapping[str, Tensor]) -> None:
    # A buffer that was None at the division, or was registered later, exists only in the divided module.
    since = {key: value for key, value in buffers_of(child).items() if not isinstance(value, PlaceholderTensor)}
    strip_division(child, change)
    own = vars(child)
    for name, items in change.lists.items():
        own[name] = _FetchedList(items, parameters)
        own["forward"] = _with_plain_list(child, name, own.get("forward"))
    own[PARAMETERS] = _FetchedParameters(change.parameters, parameters)
    known = {key: buffers[name] for key, name in change.buffers.items() if name is not None}
    # The keys come first, so that the buffers keep the order of their registration.
    own[BUFFERS] = {**dict.fromkeys(change.buffers), **since, **known}


def strip_division(child: nn.Module, change: ModuleChange) -> None:
    """Undo the changes by the division in a module, except for values that the user has overwritten."""
    child.__class__ = change.kind
    own = vars(child)
    for name in change.added:
        if own.get(name, _GONE) is change.after.get(name, _GONE):
            own.pop(name, None)
    for name, value in change.attributes.items():
        if not isinstance(value, _Named) and own.get(name, _GONE) is change.after.get(name, _GONE):
            own[name] = value
    for name, entries in change.entries.items():
        # Edit a copy of the present dict instead of returning to the former dict: the user may have added hooks.
        kept = copy.copy(own[name])
        for key in change.added_entries[name]:
            kept.pop(key, None)
        kept.update(entries)
        own[name] = kept
    # A placeholder of a freed tensor is an ordinary attribute, which would hide the registered tensor.
    for key in (*change.parameters, *change.buffers):
        if isinstance(own.get(key), PlaceholderTensor):
            del own[key]


def fill_in_full(child: nn.Module, change: ModuleChange, tensors: Mapping[str, Any]) -> None:
    """Register the full tensors of a module in their order, and later tensors of the user after them."""
    own = vars(child)
    for name, items in change.lists.items():
        own[name] = [tensors[item.name] if isinstance(item, _Named) else item for item in items]
    for registry, names in ((PARAMETERS, change.parameters), (BUFFERS, change.buffers)):
        # The user may have set a key that had no tensor at the division.
        since = {key: value for key, value in own[registry].items() if names.get(key) is None}
        own[registry] = {key: None if name is None else tensors[name] for key, name in names.items()} | since


def take_out_full(child: nn.Module, change: ModuleChange, divided: Mapping[str, Any]) -> None:
    """Replace the full form of a module, which the user may have changed since, by the attributes of the division.

    Args:
        child: The module.
        change: The changes by the division.
        divided: The attributes of the divided module.
    """
    own = vars(child)
    for name in (*change.added, *change.attributes, *change.lists):
        if name in own and own[name] is divided.get(name, _GONE):
            continue  # the user has set it: see `strip_division`
        own.pop(name, None)
        if name in divided:
            own[name] = divided[name]
    for name, entries in change.entries.items():
        kept = copy.copy(own[name])
        for key in (*entries, *change.added_entries[name]):
            kept.pop(key, None)
            if key in divided[name]:
                kept[key] = divided[name][key]
        own[name] = kept
    for registry, names in ((PARAMETERS, change.parameters), (BUFFERS, change.buffers)):
        current, before = own[registry], divided[registry]
        held = {key: current[key] if key in names and key in current else value for key, value in before.items()}
        own[registry] = {**held, **{key: value for key, value in current.items() if key not in names}}
        # Placeholders of freed tensors are ordinary attributes.
        own.update({key: divided[key] for key in names if isinstance(divided.get(key), PlaceholderTensor)})


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _with_plain_list(child: nn.Module, name: str, forward: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a `forward` that gives kernels a plain list: kernels of recurrent layers read the list in C."""

    def call(*args: Any, **kwargs: Any) -> Any:
        fetched = vars(child)[name]
        vars(child)[name] = list(fetched)
        try:
            return (forward or partial(type(child).forward, child))(*args, **kwargs)
        finally:
            vars(child)[name] = fetched

    return call


class _FetchedParameters(dict[str, Any]):
    """Holds the parameters of one module, and fetches each of them when code reads it."""

    # The reading methods are overridden, since the methods of `dict` in C do not call `__getitem__`.

    def __init__(self, names: Mapping[str, str | None], source: FetchParameter) -> None:
        super().__init__(names)
        self._source = source

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return self._source(value) if isinstance(value, str) else value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  (`dict.get` would not fetch it)

    def values(self) -> Any:
        return (self[key] for key in self)

    def items(self) -> Any:
        return ((key, self[key]) for key in self)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        # A plain dict: the copy may outlive the block, and parameters can be fetched only inside it.
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}


class _FetchedList(list[Any]):
    """Holds a list with parameters, and fetches each of them when Python reads it."""

    def __init__(self, items: Sequence[Any], source: FetchParameter) -> None:
        super().__init__(items)
        self._source = source

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if isinstance(key, slice):
            return [self._fetched(item) for item in value]
        return self._fetched(value)

    def __iter__(self) -> Iterator[Any]:
        return (self._fetched(item) for item in super().__iter__())

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [copy.deepcopy(item, memo) for item in self]

    def _fetched(self, item: Any) -> Any:
        return self._source(item.name) if isinstance(item, _Named) else item
