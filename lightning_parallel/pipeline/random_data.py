"""Run a module on random data, where the true ones are on other ranks, to see the shapes of its outputs.

What the module leaves elsewhere (attributes, entries of a list among its arguments, arguments of hooks) would be random
as well, so tensors are replaced by placeholders, and numbers that depend on the data by values that refuse to be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parallel.compat.torch import buffers_of, forward_hooks_of, parameters_of, pytree
from lightning_parallel.pipeline.interception import (
    Call,
    SavedAttributes,
    SavedForwards,
    is_from_outside,
    is_replaced,
    own_attributes,
    parameter_lists,
    replaced,
)
from lightning_parallel.pipeline.microbatch import seed_all
from lightning_parallel.pipeline.placeholder import PlaceholderTensor, UnknownValue

__all__ = ["data_of", "fake_data", "run_with_fake_data"]

_TensorFunction = Callable[[Tensor], Tensor]

# The first is what the result is taken from. The others differ in sign and size, so that a comparison changes too.
_VARIANTS: tuple[_TensorFunction, ...] = (
    lambda data: data,
    lambda data: data.abs().mul(100),
    lambda data: data.abs().neg(),
    lambda data: data.mul(0.01),
)


def run_with_fake_data(
    call: Call, copied: Callable[[], tuple[Any, Any]], device: torch.device, available: bool
) -> tuple[Any, Any]:
    """Call a module with random data in place of placeholders among its arguments and of missing parameters.

    Args:
        call: The call.
        copied: Returns its arguments with new copies of containers, into which the module may write.
        device: Where it runs.
        available: Whether the resulting placeholders count as available.

    Returns:
        Its output, and the arguments as it left them, with placeholders for all tensors but those it was called with.
        A number or array that depends on the random data is an `UnknownValue`, in attributes of the module too.
    """
    saved = SavedAttributes(call.module)
    left = []
    for variant in range(len(_VARIANTS) - 1, -1, -1):
        saved.restore()
        try:
            result = _run_variant(call.with_arguments(copied()), device, available, variant)
        except Exception:
            # The first is the run itself; of the others nothing is learned, as of an index that is out of range.
            if variant == 0:
                raise
            continue
        attributes = [own_attributes(child) for child in call.module.modules()]
        # Copies of the containers: the next run goes on with the same objects.
        left.append(pytree.tree_map(lambda leaf: leaf, (result, attributes)))
    *others, mine = left

    def unknown(sample: Any) -> UnknownValue:
        return UnknownValue(sample, call.site.provenance, available)

    for other in others:
        mine = _where_different(mine, other, unknown)
    result, attributes = mine
    for child, own in zip(call.module.modules(), attributes):
        child.__dict__.update(_into(own_attributes(child), own))
    return result


def _run_variant(call: Call, device: torch.device, available: bool, variant: int) -> tuple[Any, Any]:
    """Run the module on one variant of the random data; see `run_with_fake_data`."""
    seed_all(variant)

    def data_for(leaf: Any) -> Any:
        if isinstance(leaf, UnknownValue):
            return leaf.sample
        if not isinstance(leaf, PlaceholderTensor):
            return leaf
        data = fake_data(leaf, device)
        return data if leaf.value is not None or not data.is_floating_point() else _VARIANTS[variant](data)

    inputs, tree = pytree.tree_flatten((call.args, call.kwargs))
    data = [data_for(leaf) for leaf in inputs]
    given = {id(fake): leaf for fake, leaf in zip(data, inputs)}

    # An argument that is passed on comes out as the placeholder that it was.
    def as_placeholder(tensor: Tensor) -> Tensor:
        if id(tensor) in given:
            return given[id(tensor)]
        return PlaceholderTensor.like(tensor, call.site.provenance, device, available=available)

    def stand_ins(child: nn.Module) -> dict[str, Any]:
        return data_of(child, device, all_parameters=variant > 0)

    args, kwargs = pytree.tree_unflatten(data, tree)
    module = call.module
    with (
        torch.no_grad(),
        _attributes_as_placeholders(module, as_placeholder),
        _hooks_on_placeholders(module, as_placeholder, device),
        _forwards_on_placeholders(module, as_placeholder, device),
        # Last, as it has to end first: the stand-ins would be taken for what the module left in its attributes.
        replaced(module, lambda path, child: stand_ins(child)),
    ):
        # Equal in all variants: what the module draws by itself does not depend on the data.
        seed_all(0)
        result = call.function(*args, **kwargs)
    for leaf in pytree.tree_leaves((args, kwargs)):
        _change_inside(leaf, as_placeholder, set())
    return pytree.tree_map_only(Tensor, as_placeholder, (result, (args, kwargs)))


def _where_different(mine: Any, other: Any, unknown: Callable[[Any], UnknownValue]) -> Any:
    """Replace plain values and arrays in `mine` that `other` does not have at the same place by unknown ones."""
    leaves, tree = pytree.tree_flatten(mine)
    others, other_tree = pytree.tree_flatten(other)
    if tree != other_tree:
        children, spec = pytree.tree_flatten(mine, is_leaf=lambda value: value is not mine)
        other_children, other_spec = pytree.tree_flatten(other, is_leaf=lambda value: value is not other)
        if spec != other_spec or not isinstance(mine, (list, tuple, dict)):
            return unknown(mine)
        pairs = zip(children, other_children)
        return pytree.tree_unflatten([_where_different(a, b, unknown) for a, b in pairs], spec)
    return pytree.tree_unflatten([unknown(a) if _is_different(a, b) else a for a, b in zip(leaves, others)], tree)


def _is_different(mine: Any, other: Any) -> bool:
    if isinstance(mine, (np.ndarray, np.generic)):
        return type(other) is not type(mine) or not np.array_equal(mine, other)
    # NaN differs from itself.
    return isinstance(mine, (bool, int, float, complex, str)) and repr(mine) != repr(other)


def _into(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return `new` with the containers of `old`, filled with its entries: others may hold the same objects."""
    for name, value in new.items():
        before = old.get(name)
        if type(before) is list and type(value) is list:
            before[:] = value
            new[name] = before
        elif type(before) is dict and type(value) is dict:
            before.update(value)
            new[name] = before
        elif isinstance(before, (list, dict, tuple)) and not isinstance(value, UnknownValue):
            new[name] = before  # containers of other classes stay
    return new


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
    """Apply `function` to the tensors inside an object such as a key-value cache, and inside all it refers to."""
    attributes = getattr(value, "__dict__", None)
    # `seen`, since objects may refer to each other in circles.
    if attributes is None or callable(value) or isinstance(value, Tensor) or id(value) in seen:
        return
    seen.add(id(value))
    attributes.update(_with_tensors(dict(attributes), function))
    for leaf in pytree.tree_leaves(attributes):
        _change_inside(leaf, function, seen)


@contextmanager
def _hooks_on_placeholders(module: nn.Module, as_placeholder: _TensorFunction, device: torch.device) -> Iterator[None]:
    """Pass placeholders to hooks instead of random data; a hook that needs data is skipped."""

    def wrapped(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(owner: nn.Module, *seen: Any) -> Any:
            try:
                result = hook(owner, *pytree.tree_map_only(Tensor, as_placeholder, seen))
            except RuntimeError:
                return None
            return pytree.tree_map_only(PlaceholderTensor, lambda placeholder: fake_data(placeholder, device), result)

        return call

    changed = []
    for child in module.modules():
        for hooks in forward_hooks_of(child):
            changed.append((hooks, dict(hooks)))
            hooks.update({key: wrapped(hook) for key, hook in hooks.items() if is_from_outside(hook)})
    try:
        yield
    finally:
        for hooks, before in changed:
            hooks.update(before)


@contextmanager
def _forwards_on_placeholders(
    module: nn.Module, as_placeholder: _TensorFunction, device: torch.device
) -> Iterator[None]:
    """Pass placeholders to functions that replace a `forward`, since they may collect their arguments."""

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pytree.tree_map_only(Tensor, as_placeholder, (args, kwargs))
            return pytree.tree_map_only(
                PlaceholderTensor, lambda placeholder: fake_data(placeholder, device), forward(*args, **kwargs)
            )

        return call

    before = SavedForwards(module)
    for child, forward in before.before:
        if forward is not None and is_replaced(child):
            child.__dict__["forward"] = wrapped(forward)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def _attributes_as_placeholders(module: nn.Module, as_placeholder: _TensorFunction) -> Iterator[None]:
    """Replace tensors that the block leaves in attributes of `module` by placeholders."""
    before = [leaf for child in module.modules() for leaf in pytree.tree_leaves(own_attributes(child))]
    known = {id(leaf) for leaf in before}

    def changed(tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in known or isinstance(tensor, PlaceholderTensor) else as_placeholder(tensor)

    try:
        yield
    finally:
        for child in module.modules():
            child.__dict__.update(_with_tensors(own_attributes(child), changed))


def data_of(module: nn.Module, device: torch.device, all_parameters: bool = False) -> dict[str, Any]:
    """Return tensors with data for the parameters and buffers of `module` itself, random ones for missing data.

    Buffers are copies, since a forward pass may write into them. Nothing is moved: `device` is for random data.

    Args:
        module: The module.
        device: Where random data are made.
        all_parameters: Take random data for parameters that are there, too.
    """
    data: dict[str, Any] = {}
    by_original: dict[int, Any] = {}
    # Freed parameters are attributes: they are registered no longer.
    hidden = {name: value for name, value in vars(module).items() if isinstance(value, PlaceholderTensor)}
    for name, value in {**hidden, **parameters_of(module), **buffers_of(module)}.items():
        if value is None:
            continue
        is_random = all_parameters and name in parameters_of(module)
        if is_random or value.is_meta or isinstance(value, PlaceholderTensor):
            data[name] = fake_data(value, device)
        else:
            data[name] = value.clone() if name in buffers_of(module) else value
        by_original[id(value)] = data[name]
        if name in hidden:
            by_original[id(hidden[name])] = data[name]
    return {**data, **parameter_lists(module, by_original)}


def fake_data(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the data of a received placeholder; else random numbers, or zeros for integers, in its shape."""
    if isinstance(tensor, PlaceholderTensor) and tensor.value is not None:
        return tensor.value
    shape, dtype = tensor.signature if isinstance(tensor, PlaceholderTensor) else (tensor.shape, tensor.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    # Zero is a valid index into any table.
    return torch.zeros(shape, dtype=dtype, device=device)
