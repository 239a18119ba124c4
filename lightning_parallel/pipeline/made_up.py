"""Run a module on made-up data, where its true data are elsewhere: only what its outputs look like is kept.

Whatever the module leaves behind besides its outputs (attributes, entries of a list it was given, arguments of hooks)
would be made up too, so ghosts take its place there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_parallel.pipeline.ghost import Ghost

__all__ = ["Forwards", "is_listened_to", "parameter_lists", "replaced", "run_made_up"]

_PACKAGE = __name__.partition(".")[0]
Call = Callable[..., Any]


def run_made_up(
    origin: str, module: nn.Module, call: Call, args: Any, kwargs: Any, device: torch.device, live: bool
) -> tuple[Any, Any]:
    """Call `module` with data for every ghost among its arguments, and for its parameters that are not here.

    Args:
        origin: Of the ghosts that come of it.
        args, kwargs: The module may write into containers among them.
        live: Whether the ghosts count as present.

    Returns:
        What it returned, and the arguments as it left them; ghosts for all tensors but those that it was given.
    """
    inputs, tree = tree_flatten((args, kwargs))
    data = [_made_up(leaf, device) if isinstance(leaf, Ghost) else leaf for leaf in inputs]
    given = {id(made): leaf for made, leaf in zip(data, inputs)}

    def ghostly(tensor: Tensor) -> Tensor:
        return given[id(tensor)] if id(tensor) in given else Ghost.like(tensor, origin, device, live=live)

    arguments = tree_unflatten(data, tree)
    own_data = replaced(module, lambda path, child: _data(child, device))
    with (
        torch.no_grad(),
        _attributes_ghostly(module, ghostly),
        _hooks_ghostly(module, ghostly, device),
        _forwards_ghostly(module, ghostly, device),
        own_data,
    ):
        result = call(*arguments[0], **arguments[1])
    for leaf in tree_leaves(arguments):
        _change_inside(leaf, ghostly, set())
    return tree_map_only(Tensor, ghostly, (result, arguments))


@contextmanager
def replaced(module: nn.Module, stand_ins: Callable[[str, nn.Module], dict[str, Any]]) -> Iterator[None]:
    """Put attributes, as `stand_ins` gives them for each submodule and its path, in front of its own.

    Tensors that the module sets anew inside the block stay; buffers are what they were.
    """
    done = []
    buffers = [(child, dict(child._buffers)) for child in module.modules()]
    for path, child in module.named_modules():
        attributes = stand_ins(path, child)
        done.append((child, {name: vars(child)[name] for name in attributes if name in vars(child)}, attributes))
        child.__dict__.update(attributes)
    try:
        yield
    finally:
        for child, before, attributes in done:
            for name, stand_in in attributes.items():
                if vars(child).get(name) is stand_in or isinstance(stand_in, list):
                    child.__dict__.pop(name, None)
                    child.__dict__.update({name: before[name]} if name in before else {})
        for child, registered in buffers:
            child._buffers.update(registered)


def parameter_lists(module: nn.Module, stand_ins: dict[int, Any]) -> dict[str, list[Any]]:
    """The lists of parameters that `module` keeps, as recurrent layers do, with those that stand in, by id."""
    return {
        name: [stand_ins.get(id(item), item) for item in value]
        for name, value in vars(module).items()
        if isinstance(value, list) and any(id(item) in stand_ins for item in value)
    }


def is_listened_to(modules: list[nn.Module]) -> bool:
    """Whether others than this package see what comes out of the modules, by a hook or a `forward` put in place."""
    return any(
        _is_foreign(hook)
        for module in modules
        if module._forward_hooks or module._forward_pre_hooks
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ) or any("forward" in vars(module) and _is_replaced(module) for module in modules)


def _is_replaced(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not type(module).forward


class Forwards:
    """The methods `forward` of a model's modules, to be put back after a step that was left before it could do so."""

    def __init__(self, module: nn.Module) -> None:
        self.before = [(child, vars(child).get("forward")) for child in module.modules()]

    def restore(self) -> None:
        """Put back what was there when this was made."""
        for child, forward in self.before:
            if vars(child).get("forward") is not forward:
                del child.__dict__["forward"]
                child.__dict__.update({} if forward is None else {"forward": forward})


def _is_foreign(hook: Call) -> bool:
    return getattr(hook, "__module__", "").partition(".")[0] != _PACKAGE


def _with_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Put `function` of each tensor in its place; lists and dicts stay the same objects."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [_with_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        value[:] = [_with_tensors(item, function) for item in value]
    elif type(value) is dict:
        value.update({key: _with_tensors(item, function) for key, item in value.items()})
    return value


def _change_inside(value: Any, function: Callable[[Tensor], Tensor], seen: set[int]) -> None:
    """As `_with_tensors`, for objects such as a key-value cache and all that they refer to."""
    attributes = getattr(value, "__dict__", None)
    if attributes is None or callable(value) or isinstance(value, Tensor) or id(value) in seen:
        return
    seen.add(id(value))
    attributes.update(_with_tensors(dict(attributes), function))
    for leaf in tree_leaves(attributes):
        _change_inside(leaf, function, seen)


@contextmanager
def _hooks_ghostly(module: nn.Module, ghostly: Callable[[Tensor], Tensor], device: torch.device) -> Iterator[None]:
    """Show hooks ghosts; one that must see data is left out."""

    def wrapped(hook: Call) -> Call:
        def call(owner: nn.Module, *seen: Any) -> Any:
            try:
                result = hook(owner, *tree_map_only(Tensor, ghostly, seen))
            except RuntimeError:
                return None
            return tree_map_only(Ghost, lambda ghost: _made_up(ghost, device), result)

        return call

    changed = []
    for child in module.modules():
        for hooks in (child._forward_hooks, child._forward_pre_hooks):
            changed.append((hooks, dict(hooks)))
            hooks.update({key: wrapped(hook) for key, hook in hooks.items() if _is_foreign(hook)})
    try:
        yield
    finally:
        for hooks, before in changed:
            hooks.update(before)


@contextmanager
def _forwards_ghostly(module: nn.Module, ghostly: Callable[[Tensor], Tensor], device: torch.device) -> Iterator[None]:
    """Show ghosts to what others have put in place of a `forward`; it may collect what it sees."""

    def wrapped(forward: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Tensor, ghostly, (args, kwargs))
            return tree_map_only(Ghost, lambda ghost: _made_up(ghost, device), forward(*args, **kwargs))

        return call

    before = Forwards(module)
    for child, forward in before.before:
        if forward is not None and _is_replaced(child):
            child.__dict__["forward"] = wrapped(forward)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def _attributes_ghostly(module: nn.Module, ghostly: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Turn tensors into ghosts that the block leaves in attributes of `module`."""
    before = [leaf for child in module.modules() for leaf in tree_leaves(_own_attributes(child))]
    known = {id(leaf) for leaf in before}

    def changed(tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in known or isinstance(tensor, Ghost) else ghostly(tensor)

    try:
        yield
    finally:
        for child in module.modules():
            child.__dict__.update(_with_tensors(_own_attributes(child), changed))


_REGISTRIES = frozenset(vars(nn.Module()))


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _REGISTRIES}


def _data(module: nn.Module, device: torch.device) -> dict[str, Any]:
    """Tensors with data for the parameters and buffers of `module` itself, made up where they are not here."""
    data: dict[str, Any] = {}
    places: dict[int, Any] = {}
    hidden = {name: value for name, value in vars(module).items() if isinstance(value, Ghost)}
    for name, value in {**hidden, **module._parameters, **module._buffers}.items():
        if value is not None:
            is_here = not (value.is_meta or isinstance(value, Ghost))
            data[name] = _made_up(value, device) if not is_here else value.clone() if name in module._buffers else value
            places.update({id(other): data[name] for other in (value, hidden.get(name))})
    return {**data, **parameter_lists(module, places)}


def _made_up(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, Ghost) and tensor.value is not None:
        return tensor.value
    shape, dtype = tensor.signature if isinstance(tensor, Ghost) else (tensor.shape, tensor.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)
