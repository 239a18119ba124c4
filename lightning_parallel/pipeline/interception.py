"""Intercept the calls of a model's modules, so that a pipeline can decide what happens at each of them.

    intercept(layer, CallSite(active, "blocks.3", kind, places=(3,)))
    active.handler = handler            # from now on `layer(x)` is `handler.layer(Call(site, layer, ..., (x,), {}))`

A model is intercepted once; analysis, measurement and training differ in the handler only.

A call can also be run on random data, where the true ones are on other ranks, to see the shapes of its outputs. What
the module leaves elsewhere (attributes, entries of a list among its arguments, arguments of hooks) would be random as
well, so it is replaced by placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_parallel.compat import PartialModule, class_in_place
from lightning_parallel.compat.torch import buffers_of, forward_hooks_of, parameters_of, pytree
from lightning_parallel.pipeline.attributes import SavedForwards, own_attributes, parameter_lists, replaced
from lightning_parallel.pipeline.placeholder import PlaceholderTensor, reveal
from lightning_parallel.pipeline.random_streams import seed_all
from lightning_parallel.pipeline.unknown_value import UnknownValue

__all__ = [
    "ActiveHandler",
    "Call",
    "CallHandler",
    "CallSite",
    "VARIANTS",
    "data_of",
    "fake_data",
    "has_listeners",
    "intercept",
    "run_variant",
]


@dataclass(frozen=True)
class Call:
    """One call of an intercepted module.

    Attributes:
        site: Where it was intercepted.
        module: The module.
        function: Runs the module, hooks included, as if it were not intercepted.
        args, kwargs: What it was called with.
        index: Which of the calls of repeated layers it is; None for a module outside of them.
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
            ValueError: If the module is not one of them.
        """
        if self.index is None:
            raise ValueError(f"`{self.site.name}` is not one of the repeated layers")
        return self.index

    def run(self) -> Any:
        """Run the module as it is."""
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
        """Handle the call of a module with parameters outside of the layer stack."""
        ...


@dataclass
class ActiveHandler:
    """The current handler, shared by all sites of a model; None outside of steps.

    Attributes:
        handler: Decides what calls do.
        outside: Runs a call outside of steps, with what this rank lacks; it returns `NotImplemented` in a step.
        last: The last call of a repeated layer in this step, -1 before the first.
        seed_again: Seeds what a layer draws that is called again during backward, by its position.
    """

    handler: CallHandler | None = None
    outside: Callable[[Call], Any] | None = None
    last: int = -1
    seed_again: Callable[[int], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ActiveHandler:
        # A copy of the module is on its own: nobody gathers what it lacks.
        return ActiveHandler()

    @contextmanager
    def use(self, handler: CallHandler) -> Iterator[None]:
        """Pass calls to `handler` inside the block."""
        self.handler = handler
        self.last = -1
        try:
            yield
        finally:
            self.handler = None


@dataclass
class CallSite:
    """An intercepted module of a model.

    Attributes:
        active: The model's current handler.
        name: Of the module in the model.
        kind: Modules of equal kind return outputs of equal shapes for inputs of equal shapes.
        places: Positions of the layer in the stack, several if it is called several times; none for a module outside.
        present: Whether this rank holds the module.
    """

    active: ActiveHandler
    name: str
    kind: object
    places: tuple[int, ...] = ()
    present: bool = True

    def place_after(self, last: int) -> int:
        """Return the next position of the layer after the call `last`; its last one if there is none."""
        return next((place for place in self.places if place > last), self.places[-1])

    @property
    def provenance(self) -> str:
        """Name of the module's output in error messages."""
        return f"the output of `{self.name}`"

    def dispatch(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Pass the call to the current handler; without one, run the module if this rank holds it.

        Raises:
            RuntimeError: If there is no handler and the module is on another stage.
        """
        handler = self.active.handler
        if handler is not None and self.places:
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
        # Activation checkpointing calls layers again during backward, when no step is running, with the arguments of
        # the first call: placeholders among them have been received since. It draws what the first call drew.
        if self.active.seed_again is not None and len(self.places) == 1:
            self.active.seed_again(self.places[0])
        return function(*reveal(args), **reveal(kwargs))


class _Intercepted(PartialModule):
    """First base of the class of every intercepted module, so that its `__call__` comes before that of the class."""

    # A forward hook would come too late: checkpointing wrappers and `nn.Module.__call__` itself would have run by then.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site: CallSite | None = self.__dict__.get("_pipeline_site")
        # A module of this class without a site was made of an intercepted one, as a slice of a `Sequential` is.
        if site is None:
            return super().__call__(*args, **kwargs)
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
    # A model may be intercepted again, by the analysis and then by the engine: only the site is replaced.
    if not issubclass(kind, _Intercepted):
        if kind not in _intercepted_classes:
            names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
            _intercepted_classes[kind] = class_in_place(kind.__name__, (_Intercepted, kind), names)
        module.__class__ = _intercepted_classes[kind]
    module.__dict__["_pipeline_site"] = site


_PACKAGE = __name__.partition(".")[0]


def has_listeners(modules: list[nn.Module]) -> bool:
    """Return whether code outside of this package sees the modules' outputs, by a hook or a replaced `forward`."""
    for module in modules:
        # Asked at each call of a stub: most modules have no hooks.
        after, before = forward_hooks_of(module)
        if (after or before) and any(map(_is_from_outside, (*after.values(), *before.values()))):
            return True
        if "forward" in vars(module) and _is_replaced(module):
            return True
    return False


def _is_replaced(module: nn.Module) -> bool:
    # A bound method of the class may have been assigned to the instance by those who put a `forward` back.
    return getattr(module.forward, "__func__", None) is not type(module).forward


def _is_from_outside(hook: Callable[..., Any]) -> bool:
    # Hooks of this package collect nothing, unless they say so: sequence parallelism notes the lengths.
    own = getattr(hook, "__module__", "").partition(".")[0] == _PACKAGE
    return not own or getattr(hook, "has_effects", False)


_TensorFunction = Callable[[Tensor], Tensor]

# The first is what the result is taken from. The others differ in sign and size, so that a comparison changes too.
VARIANTS: tuple[_TensorFunction, ...] = (
    lambda data: data,
    lambda data: data.abs().mul(100),
    lambda data: data.abs().neg(),
    lambda data: data.mul(0.01),
)


def run_variant(call: Call, device: torch.device, available: bool, variant: int) -> tuple[Any, Any]:
    """Call a module with random data in place of placeholders among its arguments and of missing parameters.

    Args:
        call: The call; the module may write into containers among its arguments.
        device: Where it runs.
        available: Whether the resulting placeholders count as available.
        variant: Which of `VARIANTS` of the random data.

    Returns:
        Its output, and the arguments as it left them, with placeholders for all tensors but those it was called with.
    """
    seed_all(variant)

    def data_for(leaf: Any) -> Any:
        if isinstance(leaf, UnknownValue):
            return leaf.sample
        if not isinstance(leaf, PlaceholderTensor):
            return leaf
        data = fake_data(leaf, device)
        return data if leaf.value is not None or not data.is_floating_point() else VARIANTS[variant](data)

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
        if forward is not None and _is_replaced(child):
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
    """Return tensors with data for the parameters and buffers of `module` itself, random ones on `device` for others.

    Buffers are copies, since a forward pass may write into them. `all_parameters` makes all parameters random.
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
