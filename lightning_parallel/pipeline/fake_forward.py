"""Run a module on random data where its true data are on other ranks; only the shapes of its outputs are kept.

Whatever the module leaves behind besides its outputs (attributes, entries of a list it was given, arguments of hooks)
would be random as well, so placeholders take its place there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_parallel.pipeline.interception import Call
from lightning_parallel.pipeline.placeholder import PlaceholderTensor

__all__ = [
    "SavedForwards",
    "data_of",
    "fake_data",
    "has_listeners",
    "parameter_lists",
    "replaced",
    "run_with_fake_data",
]

_PACKAGE = __name__.partition(".")[0]
_TensorFunction = Callable[[Tensor], Tensor]


def run_with_fake_data(call: Call, device: torch.device, available: bool) -> tuple[Any, Any]:
    """Call a module with random data for every placeholder among its arguments and for parameters that are not here.

    Args:
        call: The call; the module may write into containers among its arguments.
        device: Where it runs.
        available: Whether the placeholders that come of it count as data that are here.

    Returns:
        What it returned, and the arguments as it left them; placeholders for all tensors but those that it was given.
    """
    inputs, tree = tree_flatten((call.args, call.kwargs))
    data = [fake_data(leaf, device) if isinstance(leaf, PlaceholderTensor) else leaf for leaf in inputs]
    given = {id(fake): leaf for fake, leaf in zip(data, inputs)}

    def as_placeholder(tensor: Tensor) -> Tensor:
        if id(tensor) in given:
            return given[id(tensor)]
        return PlaceholderTensor.like(tensor, call.site.provenance, device, available=available)

    args, kwargs = tree_unflatten(data, tree)
    module = call.module
    with (
        torch.no_grad(),
        _attributes_as_placeholders(module, as_placeholder),
        _hooks_on_placeholders(module, as_placeholder, device),
        _forwards_on_placeholders(module, as_placeholder, device),
        replaced(module, lambda path, child: data_of(child, device)),
    ):
        result = call.function(*args, **kwargs)
    for leaf in tree_leaves((args, kwargs)):
        _change_inside(leaf, as_placeholder, set())
    return tree_map_only(Tensor, as_placeholder, (result, (args, kwargs)))


@contextmanager
def replaced(module: nn.Module, stand_ins: Callable[[str, nn.Module], dict[str, Any]]) -> Iterator[None]:
    """Put attributes in front of a module's own inside the block: an instance attribute hides a registered parameter.

    Tensors that the module sets anew inside the block stay; buffers are what they were.

    Args:
        module: The module.
        stand_ins: Gives the attributes of each submodule, from its path and itself.
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
    """Return the lists of parameters that `module` keeps, as recurrent layers do, with `stand_ins` put in by `id`."""
    lists = {}
    for name, value in vars(module).items():
        if isinstance(value, list) and any(id(item) in stand_ins for item in value):
            lists[name] = [stand_ins.get(id(item), item) for item in value]
    return lists


def has_listeners(modules: list[nn.Module]) -> bool:
    """Tell whether code outside of this package sees the modules' outputs, by a hook or a `forward` put in place."""
    for module in modules:
        # Asked at each call of a stub: most modules have no hooks.
        if module._forward_hooks or module._forward_pre_hooks:
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if any(_is_from_outside(hook) for hook in hooks):
                return True
        if "forward" in vars(module) and _is_replaced(module):
            return True
    return False


def _is_replaced(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not type(module).forward


class SavedForwards:
    """The `forward` attributes of a model's modules, restored after a step that ended before it could do so itself.

    Libraries that record outputs replace `forward` for one call and put it back; `StageExit` comes in between.
    """

    def __init__(self, module: nn.Module) -> None:
        self.before = [(child, vars(child).get("forward")) for child in module.modules()]

    def restore(self) -> None:
        """Put back what was there when this was made."""
        for child, forward in self.before:
            if vars(child).get("forward") is not forward:
                del child.__dict__["forward"]
                child.__dict__.update({} if forward is None else {"forward": forward})


def _is_from_outside(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "").partition(".")[0] != _PACKAGE


def _with_tensors(value: Any, function: _TensorFunction) -> Any:
    """Replace each tensor by `function` of it; lists and dicts stay the same objects."""
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


def _change_inside(value: Any, function: _TensorFunction, seen: set[int]) -> None:
    """Do the same inside objects such as a key-value cache, and all that they refer to."""
    attributes = getattr(value, "__dict__", None)
    if attributes is None or callable(value) or isinstance(value, Tensor) or id(value) in seen:
        return
    seen.add(id(value))
    attributes.update(_with_tensors(dict(attributes), function))
    for leaf in tree_leaves(attributes):
        _change_inside(leaf, function, seen)


@contextmanager
def _hooks_on_placeholders(module: nn.Module, as_placeholder: _TensorFunction, device: torch.device) -> Iterator[None]:
    """Give hooks placeholders instead of random data; a hook that has to see data is skipped."""

    def wrapped(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(owner: nn.Module, *seen: Any) -> Any:
            try:
                result = hook(owner, *tree_map_only(Tensor, as_placeholder, seen))
            except RuntimeError:
                return None
            return tree_map_only(PlaceholderTensor, lambda placeholder: fake_data(placeholder, device), result)

        return call

    changed = []
    for child in module.modules():
        for hooks in (child._forward_hooks, child._forward_pre_hooks):
            changed.append((hooks, dict(hooks)))
            hooks.update({key: wrapped(hook) for key, hook in hooks.items() if _is_from_outside(hook)})
    try:
        yield
    finally:
        for hooks, before in changed:
            hooks.update(before)


@contextmanager
def _forwards_on_placeholders(
    module: nn.Module, as_placeholder: _TensorFunction, device: torch.device
) -> Iterator[None]:
    """Give placeholders to functions that others put in place of a `forward`, since they may collect what they see."""

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Tensor, as_placeholder, (args, kwargs))
            return tree_map_only(
                PlaceholderTensor, lambda placeholder: fake_data(placeholder, device), forward(*args, **kwargs)
            )

        return call

    before = SavedForwards(module)
    for child, forward in before.before:
        if forward is not None and _is_replaced(child):
            child.__dict__["forward"] = wrapped(forward)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def _attributes_as_placeholders(module: nn.Module, as_placeholder: _TensorFunction) -> Iterator[None]:
    """Replace tensors that the block leaves in attributes of `module` by placeholders."""
    before = [leaf for child in module.modules() for leaf in tree_leaves(_own_attributes(child))]
    known = {id(leaf) for leaf in before}

    def changed(tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in known or isinstance(tensor, PlaceholderTensor) else as_placeholder(tensor)

    try:
        yield
    finally:
        for child in module.modules():
            child.__dict__.update(_with_tensors(_own_attributes(child), changed))


_REGISTRIES = frozenset(vars(nn.Module()))


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _REGISTRIES}


def data_of(module: nn.Module, device: torch.device) -> dict[str, Any]:
    """Return tensors with data for the parameters and buffers of `module` itself: random where they are not here.

    Buffers are copies, as a forward pass may write into them. Nothing is moved: `device` is for random data.
    """
    data: dict[str, Any] = {}
    by_original: dict[int, Any] = {}
    hidden = {name: value for name, value in vars(module).items() if isinstance(value, PlaceholderTensor)}
    for name, value in {**hidden, **module._parameters, **module._buffers}.items():
        if value is None:
            continue
        if value.is_meta or isinstance(value, PlaceholderTensor):
            data[name] = fake_data(value, device)
        else:
            data[name] = value.clone() if name in module._buffers else value
        by_original[id(value)] = data[name]
        if name in hidden:
            by_original[id(hidden[name])] = data[name]
    return {**data, **parameter_lists(module, by_original)}


def fake_data(tensor: Tensor, device: torch.device) -> Tensor:
    """Return normal random numbers, or zeros for integers, in the shape of `tensor`; a received placeholder's data."""
    if isinstance(tensor, PlaceholderTensor) and tensor.value is not None:
        return tensor.value
    shape, dtype = tensor.signature if isinstance(tensor, PlaceholderTensor) else (tensor.shape, tensor.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    # Zero is a valid index into any table.
    return torch.zeros(shape, dtype=dtype, device=device)
