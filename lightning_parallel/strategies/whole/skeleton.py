"""A module as it was before it was divided, without its data: its classes and attributes.

A divided module can put them on for a while, with data that are fetched when they are read (`put_on`), or get them back
together with its full tensors, until the next run divides it in the same way (`restore`, `divide_again`).
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
"""Returns a parameter of the whole model by its first name."""


class _Named(NamedTuple):
    """Stands for a parameter in an attribute, by its first name."""

    name: str


@dataclass
class ModuleChange:
    """What dividing has changed in one module: how it was.

    Attributes:
        kind: Its class.
        attributes: Attributes that had another value, or are gone.
        added: Attributes that it did not have.
        after: What it had for both when it had been divided: what is there later may be the user's.
        entries: Of dicts among its attributes (hooks, children): entries that had another value, or are gone.
        added_entries: Of these dicts: keys that they did not have.
        divided_kind: Its class when it had been divided.
        parameters, buffers: First name of each own parameter and buffer, by key.
        lists: Lists with parameters in them, as recurrent layers keep.
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
    """A module as it was before it was divided, without its data.

    Args:
        module: The module, whole; `close` is called when it has been divided.

    Attributes:
        module: The module.
        changes: What dividing has changed, by submodule.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = [*module.named_parameters(), *module.named_buffers()]
        self._first = {id(tensor): name for name, tensor in named}
        # Lists and no dicts: the hash of a metric changes with its state.
        self.changes: list[tuple[nn.Module, ModuleChange]] = []
        self._before: list[dict[str, Any]] = []
        # While the module is whole: how it is when it is divided.
        self._divided: list[tuple[type, dict[str, Any]]] = []
        self._restored: dict[str, Tensor] = {}
        for child in module.modules():
            before = {name: self._captured(value) for name, value in _attributes(child).items()}
            lists = _with_parameters(before)
            own = (self._names(parameters_of(child)), self._names(buffers_of(child)))
            self.changes.append((child, ModuleChange(type(child), parameters=own[0], buffers=own[1], lists=lists)))
            self._before.append(before)

    def close(self) -> None:
        """Keep only what has been changed since: everything else of the module stays the user's, and alive."""
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
        """Take what the module has become since: what is new in it is not divided, and what is gone is forgotten.

        Args:
            change_of: Returns what dividing has changed in a new module that is a copy of a divided one.
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
        """Return the buffers by name, of the module as it is: what it has put in their place, too."""
        return {
            name: value
            for child, change in self.changes
            for key, name in change.buffers.items()
            if name is not None and (value := buffers_of(child).get(key)) is not None
        }

    @property
    def buffer_names(self) -> list[str]:
        """First names of all buffers of the whole module."""
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

    # ------------------------------------------------------------------------------------------ whole between runs

    @property
    def is_restored(self) -> bool:
        """Whether the module is whole now, to be divided again."""
        return bool(self._divided)

    def restore(self, full: Mapping[str, Tensor], trained: Collection[str]) -> None:
        """Give the module its former classes and attributes, and full tensors.

        Parameters that are held here stay the same objects: others refer to them.

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
                mine.grad = None
                mine.data = value
            elif name not in names:
                mine.data.copy_(value)  # all stages hold it, and steps end on the last one
            self._restored[name] = mine
        self._divided = [(type(child), dict(vars(child))) for child, _ in self.changes]
        for child, change in self.changes:
            strip_division(child, change)
            fill_in_full(child, change, self._restored)

    def fits(self) -> bool:
        """Tell whether the module, which is whole, still has the modules and parameters that were divided."""
        if [id(child) for child in self.module.modules()] != [id(child) for child, _ in self.changes]:
            return False
        return all(
            type(child) is change.kind
            and all(parameters_of(child).get(key) is self._tensor(name) for key, name in change.parameters.items())
            and all(vars(child).get(name) is value for name, value in change.attributes.items() if _is_plain(value))
            for child, change in self.changes
        )

    def divide_again(self, rules: Mapping[str, Shard], rank: int) -> None:
        """Divide the module, which is whole, as it was: what the user has changed in it since stays.

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
        """Give the module its former classes and attributes inside the block; afterwards it is as it was before.

        Args:
            parameters: Returns each parameter when it is read.
            buffers: All of them, by first name.
            keeps: Whether attributes that the block sets stay.
        """
        current = [(child, type(child), dict(vars(child))) for child, _ in self.changes]
        begun: list[dict[str, Any]] = []
        try:
            for child, change in self.changes:
                _put_on(child, change, parameters, buffers)
            begun += [dict(vars(child)) if keeps else {} for child, _ in self.changes]
            with ParallelState.of(self.module).own_parts():  # all that is fetched is whole
                yield
        finally:
            for index, (child, kind, attributes) in enumerate(current):
                child.__class__ = kind
                if keeps and index < len(begun):
                    attributes.update(_set_since(child, begun[index]))
                vars(child).clear()
                vars(child).update(attributes)


def _set_since(child: nn.Module, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module that are new or other objects than before, without its registries."""
    registries = {PARAMETERS, BUFFERS}
    return {k: v for k, v in vars(child).items() if k not in registries and before.get(k, _GONE) is not v}


def keep_skeleton(module: nn.Module) -> None:
    """Note how `module` is, before it is divided for the first time."""
    state = ParallelState.of(module)
    if state.skeleton is None:
        state.skeleton = Skeleton(module)


def close_skeleton(module: nn.Module) -> None:
    """Note what has been divided."""
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
    # A buffer that was empty when the module was divided, or came later, is here only.
    since = {key: value for key, value in buffers_of(child).items() if not isinstance(value, PlaceholderTensor)}
    strip_division(child, change)
    own = vars(child)
    for name, items in change.lists.items():
        own[name] = _FetchedList(items, parameters)
        own["forward"] = _with_plain_list(child, name, own.get("forward"))
    own[PARAMETERS] = _FetchedParameters(change.parameters, parameters)
    known = {key: buffers[name] for key, name in change.buffers.items() if name is not None}
    own[BUFFERS] = {**dict.fromkeys(change.buffers), **since, **known}


def strip_division(child: nn.Module, change: ModuleChange) -> None:
    """Take from a module what dividing has given it."""
    child.__class__ = change.kind
    own = vars(child)
    for name in change.added:
        if own.get(name, _GONE) is change.after.get(name, _GONE):
            own.pop(name, None)
    for name, value in change.attributes.items():
        if not isinstance(value, _Named) and own.get(name, _GONE) is change.after.get(name, _GONE):
            own[name] = value
    for name, entries in change.entries.items():
        # Not what was there then: the user may have registered more hooks since.
        kept = copy.copy(own[name])
        for key in change.added_entries[name]:
            kept.pop(key, None)
        kept.update(entries)
        own[name] = kept
    # Freed parameters and buffers are placeholders in attributes, which would hide those of the dicts.
    for key in (*change.parameters, *change.buffers):
        if isinstance(own.get(key), PlaceholderTensor):
            del own[key]


def fill_in_full(child: nn.Module, change: ModuleChange, tensors: Mapping[str, Any]) -> None:
    """Register the full tensors of a module in their order, and after them what has been registered since."""
    own = vars(child)
    for name, items in change.lists.items():
        own[name] = [tensors[item.name] if isinstance(item, _Named) else item for item in items]
    for registry, names in ((PARAMETERS, change.parameters), (BUFFERS, change.buffers)):
        # What was empty then may have been set since.
        since = {key: value for key, value in own[registry].items() if names.get(key) is None}
        own[registry] = {key: None if name is None else tensors[name] for key, name in names.items()} | since


def take_out_full(child: nn.Module, change: ModuleChange, divided: Mapping[str, Any]) -> None:
    """Undo `_put_on` on a module that has been used since, where `divided` are its attributes from before that."""
    own = vars(child)
    for name in (*change.added, *change.attributes, *change.lists):
        if name in own and own[name] is divided.get(name, _GONE):
            continue  # the user's: see `strip_division`
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
        # Freed tensors are placeholders in attributes.
        own.update({key: divided[key] for key in names if isinstance(divided.get(key), PlaceholderTensor)})


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _with_plain_list(child: nn.Module, name: str, forward: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a `forward` for a module whose kernel reads a list of parameters in C, as those of recurrent layers do."""

    def call(*args: Any, **kwargs: Any) -> Any:
        fetched = vars(child)[name]
        vars(child)[name] = list(fetched)
        try:
            return (forward or partial(type(child).forward, child))(*args, **kwargs)
        finally:
            vars(child)[name] = fetched

    return call


class _FetchedParameters(dict[str, Any]):
    """The parameters of one module, each fetched when it is read."""

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
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}


class _FetchedList(list[Any]):
    """A list with parameters in it, each fetched when it is read from Python."""

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
