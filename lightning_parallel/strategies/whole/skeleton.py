"""Keeps the form of a module from before the division, without data.

Each module that the division has changed carries a record (`Division`). A divided module can put its full form on
inside a block (`put_on`): parameters are then fetched when code reads them. After a run, the module gets its full form
and full tensors back (`restore`). The next run divides the module in the same way (`divide_again`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_parallel.compat import DIVISION, Division, ParallelState
from lightning_parallel.compat.torch import BUFFERS, CALLS, PARAMETERS, AroundCalls, buffers_of, parameters_of
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.tensor.sharded import CompiledLayer
from lightning_parallel.tensor.sharding import Shard

__all__ = ["FetchParameter", "ModuleForm", "Skeleton", "close_skeleton", "division_of", "keep_skeleton"]

FetchParameter = Callable[[str], Tensor]
"""Returns a parameter of the full model by its first name."""


class _Named(NamedTuple):
    """Stands for a parameter in an attribute, by its first name."""

    name: str


def division_of(module: nn.Module) -> Division:
    """Return the record of the division of `module`; an empty record if the division has not changed it."""
    return vars(module).get(DIVISION) or Division(type(module), placed_kind=type(module))


@dataclass
class ModuleForm:
    """Lists the tensors of one module of the full model, and holds the record of its division.

    Attributes:
        division: The changes by the division.
        parameters, buffers: First name of each own parameter and buffer, by key.
        lists: Former lists with parameters in them, which recurrent layers keep.
    """

    division: Division
    parameters: dict[str, str | None] = field(default_factory=dict)
    buffers: dict[str, str | None] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)

    def undo(self, child: nn.Module) -> tuple[type, dict[str, Any]]:
        """Undo the division of `child`, and return its class and its attributes; the full tensors are still absent."""
        divided = self.division.undo(child)
        # The full form keeps its activations. A new run chooses the layers to recompute again.
        if isinstance(around := vars(child).get(CALLS), AroundCalls):
            vars(child)[CALLS] = around.compiled
        if isinstance(vars(child).get(CALLS), CompiledLayer):
            vars(child)[CALLS] = None
        for key in (*self.parameters, *self.buffers):
            # A placeholder of a freed tensor is an ordinary attribute, which would hide the registered tensor.
            if isinstance(vars(child).get(key), PlaceholderTensor):
                del vars(child)[key]
        return divided

    def fill_in(self, child: nn.Module, tensors: Mapping[str, Any]) -> None:
        """Register the full tensors of `child` in their order, and later tensors of the user after them."""
        own = vars(child)
        for name, items in self.lists.items():
            own[name] = [tensors[item.name] if isinstance(item, _Named) else item for item in items]
        for registry, names in ((PARAMETERS, self.parameters), (BUFFERS, self.buffers)):
            # The user may have set a key that had no tensor at the division.
            since = {key: value for key, value in own[registry].items() if names.get(key) is None}
            own[registry] = {key: None if name is None else tensors[name] for key, name in names.items()} | since

    def redo(self, child: nn.Module, kind: type, divided: Mapping[str, Any]) -> None:
        """Divide `child` again, with its present tensors where this rank holds them."""
        own = vars(child)
        self.division.redo(child, kind, divided)
        for registry, names in ((PARAMETERS, self.parameters), (BUFFERS, self.buffers)):
            now = own[registry]
            held = {key: now[key] if key in names and key in now else v for key, v in divided[registry].items()}
            own[registry] = held | {key: value for key, value in now.items() if key not in names}
            own.update({key: divided[key] for key in names if isinstance(divided.get(key), PlaceholderTensor)})
        own.update({name: divided[name] for name in self.lists if name in divided})


class Skeleton:
    """Keeps the form of a module from before the division.

    Args:
        module: The full module. Call `close` after the division.

    Attributes:
        module: The module.
        forms: Each submodule and its form. A list, not a dict: the hash of a metric changes with its state.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Classes and attributes of the divided module, while the module is restored between runs.
        self._divided: list[tuple[type, dict[str, Any]]] = []
        self._restored: dict[str, Tensor] = {}
        self.forms: list[tuple[nn.Module, ModuleForm]] = []
        self._take_form()

    def _take_form(self) -> None:
        """Note the tensors of the present module."""
        first = {id(value): name for name, value in (*self.module.named_parameters(), *self.module.named_buffers())}
        self.forms = [(child, _form_of(child, first)) for child in self.module.modules()]

    def close(self) -> None:
        """End the records of the division: later values of attributes are the user's."""
        for child, form in self.forms:
            # The division has made the record if it has changed the module.
            form.division = vars(child).get(DIVISION) or form.division
            form.division.close(child)

    def adopt(self) -> None:
        """Take the present form of the module: new submodules count as not divided, removed submodules are dropped.

        A new submodule that is a copy of a divided one has a copy of its record.
        """
        self._take_form()
        for child, form in self.forms:
            if type(child) is not form.division.placed_kind:
                # The user's class, such as one with parametrizations.
                form.division.kind = form.division.placed_kind = type(child)

    def buffers(self) -> dict[str, Tensor]:
        """Return the present buffers by first name, even if the module has replaced them."""
        return {
            name: value
            for child, form in self.forms
            for key, name in form.buffers.items()
            if name is not None and (value := buffers_of(child).get(key)) is not None
        }

    @property
    def buffer_names(self) -> list[str]:
        """First names of all buffers of the full module."""
        found = [name for _, form in self.forms for name in form.buffers.values() if name is not None]
        return list(dict.fromkeys(found))

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
        names = {name for _, form in self.forms for name in form.parameters.values() if name is not None}
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
        for child, form in self.forms:
            self._divided.append(form.undo(child))
            form.fill_in(child, self._restored)

    def fits(self) -> bool:
        """Tell whether the restored module still has the submodules and parameters of the division."""
        if [id(child) for child in self.module.modules()] != [id(child) for child, _ in self.forms]:
            return False
        return all(
            type(child) is form.division.kind
            and all(parameters_of(child).get(key) is self._tensor(name) for key, name in form.parameters.items())
            and all(vars(child).get(name) is v for name, v in form.division.former.items() if _is_plain(v))
            for child, form in self.forms
        )

    def divide_again(self, rules: Mapping[str, Shard], rank: int) -> None:
        """Divide the restored module as in the last run. Changes by the user since then stay.

        Args:
            rules: How tensors are sharded over the tensor axis, by name.
            rank: Position on that axis.
        """
        for (child, form), divided in zip(self.forms, self._divided):
            form.redo(child, *divided)
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
        current: list[tuple[nn.Module, type, dict[str, Any]]] = []
        begun: list[dict[str, Any]] = []
        try:
            for child, form in self.forms:
                current.append((child, *form.undo(child)))
                _fetch_tensors(child, form, parameters, buffers)
            # After an error above, `begun` is empty, and the block below restores the attributes all the same.
            begun += [dict(vars(child)) if keeps else {} for child, _ in self.forms]
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


def _form_of(module: nn.Module, first: Mapping[int, str]) -> ModuleForm:
    """Return the form of a module; `first` has the first name of each tensor, by `id`."""
    found = ModuleForm(division_of(module))
    tensors: Mapping[str, Tensor | None]
    for names, tensors in ((found.parameters, parameters_of(module)), (found.buffers, buffers_of(module))):
        names.update({key: None if value is None else first[id(value)] for key, value in tensors.items()})
    for name, value in vars(module).items():
        if type(value) is list:
            named = [id(item) in first and isinstance(item, nn.Parameter) for item in value]
            items = [_Named(first[id(item)]) if is_named else item for item, is_named in zip(value, named)]
            if any(named):
                found.lists[name] = items
    return found


def _fetch_tensors(
    child: nn.Module, form: ModuleForm, parameters: FetchParameter, buffers: Mapping[str, Tensor]
) -> None:
    own = vars(child)
    # A buffer that was None at the division, or was registered later, exists only in the divided module.
    since = {key: value for key, value in buffers_of(child).items() if not isinstance(value, PlaceholderTensor)}
    for name, items in form.lists.items():
        own[name] = _FetchedList(items, parameters)
        own["forward"] = _with_plain_list(child, name, own.get("forward"))
    own[PARAMETERS] = _FetchedParameters(form.parameters, parameters)
    known = {key: buffers[name] for key, name in form.buffers.items() if name is not None}
    # The keys come first, so that the buffers keep the order of their registration.
    own[BUFFERS] = {**dict.fromkeys(form.buffers), **since, **known}


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
