"""Saves, restores and replaces the attributes of a model's modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

from torch import nn

from lightning_parallel.compat.torch import buffers_of

__all__ = ["SavedAttributes", "SavedForwards", "own_attributes", "parameter_lists", "replaced"]

# Parameters, buffers, submodules and hooks, which each module has.
_REGISTRIES = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of `module` without parameters, buffers, submodules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in _REGISTRIES}


class SavedAttributes:
    """Saves the attributes of a module and its submodules, with the entries of lists, dicts and sets among them.

    The registered parameters, buffers, submodules and hooks are such dicts. Code that registers hooks in its first call
    notes that in an attribute, so both must be restored together.
    """

    def __init__(self, module: nn.Module) -> None:
        attributes = [vars(child) for child in module.modules()]
        containers = [value for own in attributes for value in own.values() if type(value) in _CONTAINERS]
        # A module has a dozen empty dicts for hooks: a tuple is a cheaper copy of one.
        self._before = [(value, value.copy() if value else ()) for value in (*attributes, *containers)]

    def restore(self) -> None:
        """Restore the saved attributes."""
        for now, before in self._before:
            # Unchanged ones stay untouched: code may go through them at this moment.
            if not (now or before) or _has_same_entries(now, before):
                continue
            now.clear()
            now.extend(before) if isinstance(now, list) else now.update(before)


_CONTAINERS = (list, dict, OrderedDict, set)


def _has_same_entries(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, set):
        return bool(now == before)
    if isinstance(now, list):
        return all(map(is_, now, before))
    # By identity: the comparison of two tensors is no truth value.
    return now.keys() == before.keys() and all(map(is_, now.values(), before.values()))


@contextmanager
def replaced(module: nn.Module, stand_ins: Callable[[str, nn.Module], dict[str, Any]]) -> Iterator[None]:
    """Set attributes of a module's submodules inside the block: they hide registered parameters of the same name.

    Tensors that the module assigns to its attributes inside the block stay; its buffers are restored.

    Args:
        module: The module.
        stand_ins: Returns the attributes of a submodule, called with its path and itself.
    """
    done = []
    modules = list(module.named_modules())
    buffers = [(child, dict(buffers_of(child))) for _, child in modules]
    for path, child in modules:
        attributes = stand_ins(path, child)
        done.append((child, {name: vars(child)[name] for name in attributes if name in vars(child)}, attributes))
        # `nn.Module.__getattr__` finds registered parameters, and Python asks it only for names that `__dict__` lacks.
        child.__dict__.update(attributes)
    try:
        yield
    finally:
        for child, before, attributes in done:
            for name, stand_in in attributes.items():
                # Another value means that the module has assigned one. Lists are restored in any case.
                if vars(child).get(name) is stand_in or isinstance(stand_in, (list, tuple)):
                    child.__dict__.pop(name, None)
                    child.__dict__.update({name: before[name]} if name in before else {})
        for child, registered in buffers:
            buffers_of(child).update(registered)


def parameter_lists(module: nn.Module, stand_ins: dict[int, Any]) -> dict[str, Any]:
    """Return the lists of parameters in attributes, as of recurrent layers, with `stand_ins` in place by `id`."""
    lists = [(name, value) for name, value in vars(module).items() if type(value) in (list, tuple)]
    lists = [(name, value) for name, value in lists if any(id(item) in stand_ins for item in value)]
    return {name: type(value)(stand_ins.get(id(item), item) for item in value) for name, value in lists}


class SavedForwards:
    """Saves the `forward` attributes of modules, to restore them after a step that ended early."""

    # Libraries that record outputs replace `forward` for one call and restore it afterwards; `StageExit` may skip that.
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.before = self._replaced()

    def _replaced(self) -> dict[int, tuple[nn.Module, Any]]:
        # In each microbatch, all modules are looked at and mostly none is found.
        return {id(child): (child, vars(child)["forward"]) for child in self._modules if "forward" in child.__dict__}

    def restore(self) -> None:
        """Restore the saved attributes."""
        for key, (child, now) in {**self.before, **self._replaced()}.items():
            _, forward = self.before.get(key, (child, None))
            if forward is not now or "forward" not in child.__dict__:
                child.__dict__.pop("forward", None)
                child.__dict__.update({} if forward is None else {"forward": forward})
