"""Saves, restores and replaces the attributes of a model's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_parallel.compat.torch import buffers_of, forward_hooks_of

__all__ = ["SavedAttributes", "SavedForwards", "own_attributes", "parameter_lists", "replaced"]

# Parameters, buffers, submodules and hooks, which each module has.
_REGISTRIES = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of `module` without parameters, buffers, submodules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in _REGISTRIES}


class SavedAttributes:
    """Saves the attributes of a module and its submodules, lists and dicts among them with their entries, and hooks.

    Hooks, since code that registers hooks in its first call notes that in an attribute.
    """

    def __init__(self, module: nn.Module) -> None:
        self.before = [(child, dict(own_attributes(child))) for child in module.modules()]
        containers = [value for _, own in self.before for value in own.values() if type(value) in (list, dict)]
        containers += [hooks for child, _ in self.before for hooks in forward_hooks_of(child)]
        self.entries = [(value, value.copy()) for value in containers]

    def restore(self) -> None:
        """Restore the saved attributes."""
        for child, own in self.before:
            for name in own_attributes(child).keys() - own.keys():
                del child.__dict__[name]
            child.__dict__.update(own)
        for value, entries in self.entries:
            value.clear()
            value.extend(entries) if isinstance(value, list) else value.update(entries)


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
    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.before = [(module, vars(module).get("forward")) for module in modules]

    def restore(self) -> None:
        """Restore the saved attributes."""
        for child, forward in self.before:
            if vars(child).get("forward") is not forward:
                del child.__dict__["forward"]
                child.__dict__.update({} if forward is None else {"forward": forward})
