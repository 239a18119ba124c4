"""Intercept the calls of a model's modules, so that a pipeline can decide what happens at each call.

    intercept(layer, CallSite(active, "blocks.3", kind, places=(3,)))
    active.handler = handler            # from now on `layer(x)` is `handler.layer(Call(site, layer, ..., (x,), {}))`

A model is intercepted once; analysis, measurement and training differ in the handler only.

A `forward` that reads data runs on random data several times, to see the shapes of its outputs. The module may leave
tensors elsewhere: in attributes, in a list among its arguments, in arguments of hooks. Placeholders replace all of
them. Numbers that differ between the runs depend on the data, and become values that refuse to be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parallel.compat import Division, PartialModule, class_in_place
from lightning_parallel.compat.chance import seed_all
from lightning_parallel.compat.torch import buffers_of, forward_hooks_of, parameters_of, pytree, random_values
from lightning_parallel.step_trace.attributes import (
    SavedAttributes,
    SavedForwards,
    own_attributes,
    parameter_lists,
    replaced,
)
from lightning_parallel.step_trace.placeholder import PlaceholderTensor, UnknownValue, reveal

__all__ = [
    "ActiveHandler",
    "Call",
    "CallHandler",
    "CallSite",
    "QuickHandler",
    "RunsAll",
    "data_of",
    "has_listeners",
    "intercept",
    "run_on_random_data",
]


@dataclass(frozen=True)
class Call:
    """One call of an intercepted module.

    Attributes:
        site: Where it was intercepted.
        module: The module.
        function: Runs the module, hooks included, as if it were not intercepted.
        args, kwargs: The arguments of the call.
        index: The position among the calls of repeated layers; None for a module outside the layers.
    """

    site: CallSite
    module: nn.Module
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None = None

    @property
    def layer_index(self) -> int:
        """Position among the calls of repeated layers.

        Raises:
            ValueError: If the module is not a repeated layer.
        """
        if self.index is None:
            raise ValueError(f"`{self.site.name}` is not one of the repeated layers")
        return self.index

    def run(self) -> Any:
        """Run the module with the call's own arguments."""
        return self.function(*self.args, **self.kwargs)

    def with_arguments(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Call:
        """Return the same call with other arguments."""
        args, kwargs = arguments
        return replace(self, args=args, kwargs=kwargs)


class CallHandler(Protocol):
    """Interface of the objects that decide what intercepted calls do."""

    def layer(self, call: Call) -> Any:
        """Handle the call of a repeated layer."""
        ...

    def outer_module(self, call: Call) -> Any:
        """Handle the call of a module with parameters outside the layer stack."""
        ...


QuickHandler = Callable[["CallSite", nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(site, module, function, arguments by position and by name) -> the result, or `NotImplemented`; see `Call`."""


class RunsAll:
    """Handler that runs each call as it is."""

    def layer(self, call: Call) -> Any:
        """Run a repeated layer."""
        return call.run()

    def outer_module(self, call: Call) -> Any:
        """Run a module outside the layers."""
        return call.run()


@dataclass
class ActiveHandler:
    """The current handler, shared by all sites of a model; None outside steps.

    Attributes:
        handler: Decides about the calls.
        quick: Handles usual calls of layers with one place, at less cost; the other calls go to `handler`.
        outside: Runs a call outside steps, with parameters that this rank lacks; it returns `NotImplemented` in a step.
        last: The last call of a repeated layer in this step, -1 before the first.
        seed_again: Seeds a layer that is called again during backward, given its position.
    """

    handler: CallHandler | None = None
    quick: QuickHandler | None = None
    outside: Callable[[Call], Any] | None = None
    last: int = -1
    seed_again: Callable[[int], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ActiveHandler:
        # A copy of the module is independent: no handler gathers its missing parameters.
        return ActiveHandler()

    @contextmanager
    def use(self, handler: CallHandler) -> Iterator[None]:
        """Pass calls to `handler` inside the block."""
        self.handler = handler
        self.quick = getattr(handler, "quick", None)
        self.last = -1
        try:
            yield
        finally:
            self.handler = self.quick = None


@dataclass
class CallSite:
    """An intercepted module of a model.

    Attributes:
        active: The model's current handler.
        name: Name of the module in the model.
        kind: Modules of equal kind return outputs of equal shapes for inputs of equal shapes.
        places: Positions of the layer in the stack, several if it is called several times; empty for an outer module.
        present: Whether this rank holds the module.
        provenance: Name of the module's output in error messages.
    """

    active: ActiveHandler
    name: str
    kind: object
    places: tuple[int, ...] = ()
    present: bool = True
    provenance: str = field(init=False)

    def __post_init__(self) -> None:
        self.provenance = f"the output of `{self.name}`"

    def place_after(self, last: int) -> int:
        """Return the next position of the layer after the call `last`; if there is none, its last position."""
        return next((place for place in self.places if place > last), self.places[-1])

    def dispatch(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Pass the call to the current handler; without one, run the module if this rank holds it.

        Raises:
            RuntimeError: If there is no handler and the module is on another stage.
        """
        handler = self.active.handler
        if handler is not None and self.places:
            # A layer with several places is told apart only by the order of calls.
            index = self.active.last = self.place_after(self.active.last)
            return handler.layer(Call(self, module, function, args, kwargs, index))
        call = Call(self, module, function, args, kwargs)
        if handler is not None:
            return handler.outer_module(call)
        if self.active.outside is not None:
            result = self.active.outside(call)
            if result is not NotImplemented:
                return result
        if not self.present:
            raise RuntimeError(
                f"`{self.name}` is on another pipeline stage and cannot be called on its own; run the model through"
                " the trainer, or save a checkpoint and load it into a full model"
            )
        # Activation checkpointing calls layers again during backward, outside steps, with the first call's arguments.
        # Placeholders among them have been received since. The layer must draw the same numbers as in the first call.
        if self.active.seed_again is not None and len(self.places) == 1:
            self.active.seed_again(self.places[0])
        return function(*reveal(args), **reveal(kwargs))


class _Intercepted(PartialModule):
    """First base of the class of every intercepted module, so that its `__call__` precedes the class's own."""

    # A forward hook would come too late: checkpointing wrappers and `nn.Module.__call__` itself would have run by then.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site: CallSite | None = self.__dict__.get("_pipeline_site")
        # A module of this class without a site was derived from an intercepted one, such as a slice of a `Sequential`.
        if site is None:
            return super().__call__(*args, **kwargs)
        quick = site.active.quick
        if quick is not None and len(site.places) == 1:
            result = quick(site, self, super().__call__, args, kwargs)
            if result is not NotImplemented:
                return result
        return site.dispatch(self, super().__call__, args, kwargs)

    def _what_is_missing(self) -> str:
        name = self.__dict__["_pipeline_site"].name
        return f"`{name}` is split into pipeline stages, and this rank holds only its own stage"


# One subclass for each class of modules, so that layers of one type stay of one type.
_intercepted_classes: dict[type, type] = {}


def intercept(module: nn.Module, site: CallSite) -> None:
    """Pass every call of `module` through `site`. Its class becomes a subclass with the same name.

    Raises:
        ValueError: If its class cannot be changed, or its parameters are out of Python's reach.
    """
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"`{site.name}` is a TorchScript module, which cannot be split into stages; use the original module"
        )
    Division.of(module).keep(module, "_pipeline_site")
    # A model may be intercepted again, by the analysis and then by the engine: only the site is replaced.
    if not issubclass(kind, _Intercepted):
        if kind not in _intercepted_classes:
            # `repr` and code that compares names must see the user's class.
            names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
            _intercepted_classes[kind] = class_in_place(kind.__name__, (_Intercepted, kind), names)
        module.__class__ = _intercepted_classes[kind]
    module.__dict__["_pipeline_site"] = site


_PACKAGE = __name__.partition(".")[0]


def has_listeners(modules: list[nn.Module]) -> bool:
    """Return whether code outside this package sees the modules' outputs, by a hook or a replaced `forward`."""
    for module in modules:
        # Runs at each call of a stub, so take the fast path: most modules have no hooks.
        after, before = forward_hooks_of(module)
        if (after or before) and any(map(_is_from_outside, (*after.values(), *before.values()))):
            return True
        if "forward" in vars(module) and _is_replaced(module):
            return True
    return False


def _is_replaced(module: nn.Module) -> bool:
    # Code that restores a `forward` may assign a bound method of the class to the instance: that is no replacement.
    return getattr(module.forward, "__func__", None) is not type(module).forward


def _is_from_outside(hook: Callable[..., Any]) -> bool:
    # Hooks of this package collect nothing, unless they say so: sequence parallelism notes the lengths.
    own = getattr(hook, "__module__", "").partition(".")[0] == _PACKAGE
    return not own or getattr(hook, "has_effects", False)


_TensorFunction = Callable[[Tensor], Tensor]

# The result comes from the first variant. The other variants differ in sign and size, to change comparisons as well.
_VARIANTS: tuple[_TensorFunction, ...] = (
    lambda data: data,
    lambda data: data.abs().mul(100),
    lambda data: data.abs().neg(),
    lambda data: data.mul(0.01),
)


def run_on_random_data(
    call: Call, copied: Callable[[], tuple[Any, Any]], device: torch.device, available: bool
) -> tuple[Any, Any]:
    """Call a module with random data in place of placeholders among its arguments and of missing parameters.

    Args:
        call: The call.
        copied: Returns its arguments with new copies of containers, into which the module may write.
        device: Where it runs.
        available: Whether the resulting placeholders count as available.

    Returns:
        Its output and its final arguments, with placeholders for all tensors except the tensors of the call. A number
        or array that depends on the random data is an `UnknownValue`, also in attributes of the module.
    """
    saved = SavedAttributes(call.module)
    left = []
    # From the last to the first: the first variant is the run itself, so its traces in the module must stay.
    for variant in range(len(_VARIANTS) - 1, -1, -1):
        saved.restore()
        try:
            result = _run_variant(call.with_arguments(copied()), device, available, variant)
        except Exception:
            # The first variant is the run itself. A failure of another, as by an index out of range, shows nothing.
            if variant == 0:
                raise
            continue
        attributes = [own_attributes(child) for child in call.module.modules()]
        # Copies of the containers: the next run continues with the same objects.
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


def _where_different(mine: Any, other: Any, unknown: Callable[[Any], UnknownValue]) -> Any:
    """Replace plain values and arrays in `mine` by unknown values where `other` has different ones."""
    leaves, tree = pytree.tree_flatten(mine)
    others, other_tree = pytree.tree_flatten(other)
    if tree != other_tree:
        # One level at a time, so that only the part with another structure becomes unknown.
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
    # NaN differs from itself, so compare the texts.
    return isinstance(mine, (bool, int, float, complex, str)) and repr(mine) != repr(other)


def _into(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return `new` with the containers of `old`, filled with its entries: other objects may hold these containers."""
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


def _run_variant(call: Call, device: torch.device, available: bool, variant: int) -> tuple[Any, Any]:
    """Call a module with random data in place of placeholders among its arguments and of missing parameters.

    Args:
        call: The call; the module may write into containers among its arguments.
        device: Where it runs.
        available: Whether the resulting placeholders count as available.
        variant: Which of `_VARIANTS` of the random data.

    Returns:
        Its output and its final arguments, with placeholders for all tensors except the tensors of the call.
    """
    seed_all(variant)

    def data_for(leaf: Any) -> Any:
        if isinstance(leaf, UnknownValue):
            return leaf.sample
        if not isinstance(leaf, PlaceholderTensor):
            return leaf
        data = _fake_data(leaf, device)
        return data if leaf.value is not None or not data.is_floating_point() else _VARIANTS[variant](data)

    inputs, tree = pytree.tree_flatten((call.args, call.kwargs))
    data = [data_for(leaf) for leaf in inputs]
    # `data` keeps the tensors alive: otherwise another tensor could get the same `id`.
    given = {id(fake): leaf for fake, leaf in zip(data, inputs)}

    # An argument that is passed on comes out as its original placeholder.
    def as_placeholder(tensor: Tensor) -> Tensor:
        if id(tensor) in given:
            return given[id(tensor)]
        return PlaceholderTensor.like(tensor, call.site.provenance, device, available=available)

    def data_of_own(value: Tensor, is_buffer: bool) -> Tensor:
        if value.is_meta or isinstance(value, PlaceholderTensor) or (variant > 0 and not is_buffer):
            return _fake_data(value, device)
        # A copy, because a forward pass may write into a buffer.
        return value.clone() if is_buffer else value

    args, kwargs = pytree.tree_unflatten(data, tree)
    module = call.module
    with (
        torch.no_grad(),
        _attributes_as_placeholders(module, as_placeholder),
        _users_code_on_placeholders(module, as_placeholder, device),
        # Last, because it has to end first: otherwise the stand-ins would count as tensors that the module left.
        replaced(module, lambda path, child: data_of(child, data_of_own)),
    ):
        # Equal in all variants: the module's own draws do not depend on the data.
        seed_all(0)
        result = call.function(*args, **kwargs)
    for leaf in pytree.tree_leaves((args, kwargs)):
        _change_inside(leaf, as_placeholder, set())
    return pytree.tree_map_only(Tensor, as_placeholder, (result, (args, kwargs)))


def _with_tensors(value: Any, function: _TensorFunction) -> Any:
    """Replace each tensor by the result of `function`; lists and dicts stay the same objects."""
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
    """Apply `function` to the tensors inside an object such as a key-value cache, and inside all that it refers to."""
    attributes = getattr(value, "__dict__", None)
    # `seen` ends the walk: objects may refer to each other in circles.
    if attributes is None or callable(value) or isinstance(value, Tensor) or id(value) in seen:
        return
    seen.add(id(value))
    attributes.update(_with_tensors(dict(attributes), function))
    for leaf in pytree.tree_leaves(attributes):
        _change_inside(leaf, function, seen)


@contextmanager
def _users_code_on_placeholders(
    module: nn.Module, as_placeholder: _TensorFunction, device: torch.device
) -> Iterator[None]:
    """Pass placeholders instead of random data to hooks and replaced `forward`s, since they may collect arguments.

    A hook that needs data is skipped.
    """

    def wrapped(function: Callable[..., Any], is_hook: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pytree.tree_map_only(Tensor, as_placeholder, (args, kwargs))
            try:
                result = function(*args, **kwargs)
            # Also a `PlaceholderError`: the hook reads data.
            except RuntimeError:
                if is_hook:
                    return None
                raise
            return pytree.tree_map_only(PlaceholderTensor, lambda placeholder: _fake_data(placeholder, device), result)

        return call

    forwards = SavedForwards(list(module.modules()))
    changed = [(hooks, dict(hooks)) for child in module.modules() for hooks in forward_hooks_of(child)]
    for hooks, before in changed:
        hooks.update({key: wrapped(hook, True) for key, hook in before.items() if _is_from_outside(hook)})
    for child, forward in forwards.before.values():
        if forward is not None and _is_replaced(child):
            child.__dict__["forward"] = wrapped(forward, False)
    try:
        yield
    finally:
        for hooks, before in changed:
            hooks.update(before)
        forwards.restore()


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


def data_of(module: nn.Module, data: Callable[[Tensor, bool], Tensor]) -> dict[str, Any]:
    """Return tensors for the module's own parameters and buffers, and for the parameters in its lists, by attribute.

    Args:
        module: The module, without its children.
        data: Returns the tensor for a parameter or a buffer, with data; told whether it is a buffer.
    """
    # Freed parameters are no longer registered: they are plain attributes.
    hidden = {name: value for name, value in vars(module).items() if isinstance(value, PlaceholderTensor)}
    buffers = buffers_of(module)
    found: dict[str, Any] = {}
    by_original: dict[int, Any] = {}
    for name, value in {**hidden, **parameters_of(module), **buffers}.items():
        if value is not None:
            found[name] = by_original[id(value)] = data(value, name in buffers)
            # A list may hold the placeholder of a parameter that is registered.
            by_original[id(hidden.get(name, value))] = found[name]
    return {**found, **parameter_lists(module, by_original)}


def _fake_data(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the data of a received placeholder; else random numbers, or zeros for integers, in its shape."""
    if isinstance(tensor, PlaceholderTensor) and tensor.value is not None:
        return tensor.value
    if isinstance(tensor, PlaceholderTensor):
        # The code of a sharded module computes with the shard.
        tensor = tensor.meta if tensor.shard is None else tensor.shard
    return random_values(tensor.shape, tensor.dtype, device)
