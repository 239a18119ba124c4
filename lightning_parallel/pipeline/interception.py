"""Intercept the calls of a model's modules, so that a pipeline can decide what happens at each of them.

    intercept(layer, CallSite(active, "blocks.3", kind, index=3))
    active.handler = handler            # from now on `layer(x)` is `handler.layer(Call(site, layer, ..., (x,), {}))`

A model is intercepted once; analysis, measurement and training differ in the handler only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from lightning_parallel.compat import PartialModule
from lightning_parallel.compat.torch import buffers_of, forward_hooks_of
from lightning_parallel.pipeline.placeholder import reveal

__all__ = [
    "ActiveHandler",
    "Call",
    "CallHandler",
    "CallSite",
    "SavedAttributes",
    "SavedForwards",
    "has_listeners",
    "intercept",
    "is_from_outside",
    "is_replaced",
    "own_attributes",
    "parameter_lists",
    "replaced",
]


@dataclass(frozen=True)
class Call:
    """One call of an intercepted module.

    Attributes:
        site: Where it was intercepted.
        module: The module.
        function: Runs the module, hooks included, as if it were not intercepted.
        args, kwargs: What it was called with.
    """

    site: CallSite
    module: nn.Module
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

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
    """The current handler, shared by all sites of a model; None outside of steps."""

    handler: CallHandler | None = None

    @contextmanager
    def use(self, handler: CallHandler) -> Iterator[None]:
        """Pass calls to `handler` inside the block."""
        self.handler = handler
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
        index: Of the layer in the stack; None for a module outside of it.
        present: Whether this rank holds the module.
    """

    active: ActiveHandler
    name: str
    kind: object
    index: int | None = None
    present: bool = True

    @property
    def layer_index(self) -> int:
        """Position in the layer stack.

        Raises:
            ValueError: If the module is not one of its layers.
        """
        if self.index is None:
            raise ValueError(f"`{self.name}` is not one of the repeated layers")
        return self.index

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
        if handler is not None:
            call = Call(self, module, function, args, kwargs)
            return handler.outer_module(call) if self.index is None else handler.layer(call)
        if not self.present:
            raise RuntimeError(
                f"`{self.name}` is on another pipeline stage and cannot be called on its own; "
                "run the model through the trainer, or save a checkpoint and load it into an uncut model"
            )
        # Activation checkpointing calls layers again during backward, when no step is running, with the arguments of
        # the first call: placeholders among them have been received since.
        return function(*reveal(args), **reveal(kwargs))


class _Intercepted(PartialModule):
    """First base of the class of every intercepted module, so that its `__call__` comes before that of the class."""

    # A forward hook would come too late: checkpointing wrappers and `nn.Module.__call__` itself would have run by then.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site: CallSite = self.__dict__["_pipeline_site"]
        return site.dispatch(self, super().__call__, args, kwargs)

    def _what_is_missing(self) -> str:
        name = self.__dict__["_pipeline_site"].name
        return f"`{name}` is cut into pipeline stages, and this rank holds its own stage only"


# One subclass for each class of modules, so that layers of one type stay of one type.
_intercepted_classes: dict[type, type] = {}


def intercept(module: nn.Module, site: CallSite) -> None:
    """Pass every call of `module` through `site`. Its class becomes a subclass with the same name."""
    kind = type(module)
    # A model may be intercepted again, by the analysis and then by the engine: only the site is replaced.
    if not issubclass(kind, _Intercepted):
        if kind not in _intercepted_classes:
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
            _intercepted_classes[kind] = type(kind.__name__, (_Intercepted, kind), names)
        module.__class__ = _intercepted_classes[kind]
    module.__dict__["_pipeline_site"] = site


_PACKAGE = __name__.partition(".")[0]
# Parameters, buffers, submodules and hooks: all that a module without attributes has.
_REGISTRIES = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that `module` has besides parameters, buffers, submodules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in _REGISTRIES}


class SavedAttributes:
    """Saves the attributes of a module and its submodules, lists and dicts among them with their entries."""

    def __init__(self, module: nn.Module) -> None:
        self.before = [(child, dict(own_attributes(child))) for child in module.modules()]
        containers = [value for _, own in self.before for value in own.values() if type(value) in (list, dict)]
        self.entries = [(value, value.copy()) for value in containers]

    def restore(self) -> None:
        """Restore the attributes as they were when this object was made."""
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
    buffers = [(child, dict(buffers_of(child))) for child in module.modules()]
    for path, child in module.named_modules():
        attributes = stand_ins(path, child)
        done.append((child, {name: vars(child)[name] for name in attributes if name in vars(child)}, attributes))
        # `nn.Module.__getattr__` finds registered parameters, and is asked only for what `__dict__` lacks.
        child.__dict__.update(attributes)
    try:
        yield
    finally:
        for child, before, attributes in done:
            for name, stand_in in attributes.items():
                # Something else is there if the module has assigned to it; lists, such as the weights of a recurrent
                # layer, are restored in any case.
                if vars(child).get(name) is stand_in or isinstance(stand_in, list):
                    child.__dict__.pop(name, None)
                    child.__dict__.update({name: before[name]} if name in before else {})
        for child, registered in buffers:
            buffers_of(child).update(registered)


def parameter_lists(module: nn.Module, stand_ins: dict[int, Any]) -> dict[str, list[Any]]:
    """Return the lists of parameters that `module` keeps, as recurrent layers do, with `stand_ins` put in by `id`."""
    lists = {}
    for name, value in vars(module).items():
        if isinstance(value, list) and any(id(item) in stand_ins for item in value):
            lists[name] = [stand_ins.get(id(item), item) for item in value]
    return lists


def has_listeners(modules: list[nn.Module]) -> bool:
    """Return whether code outside of this package sees the modules' outputs, by a hook or a replaced `forward`."""
    for module in modules:
        # Asked at each call of a stub: most modules have no hooks.
        after, before = forward_hooks_of(module)
        if (after or before) and any(map(is_from_outside, (*after.values(), *before.values()))):
            return True
        if "forward" in vars(module) and is_replaced(module):
            return True
    return False


def is_replaced(module: nn.Module) -> bool:
    """Tell whether the `forward` of this instance is not that of its class."""
    # A bound method of the class may have been assigned to the instance by those who put a `forward` back.
    return getattr(module.forward, "__func__", None) is not type(module).forward


class SavedForwards:
    """Saves the `forward` attributes of a model's modules, to restore them after a step that was ended early."""

    # Libraries that record outputs replace `forward` for one call and restore it afterwards; `StageExit` may skip that.
    def __init__(self, module: nn.Module) -> None:
        self.before = [(child, vars(child).get("forward")) for child in module.modules()]

    def restore(self) -> None:
        """Restore the attributes as they were when this object was made."""
        for child, forward in self.before:
            if vars(child).get("forward") is not forward:
                del child.__dict__["forward"]
                child.__dict__.update({} if forward is None else {"forward": forward})


def is_from_outside(hook: Callable[..., Any]) -> bool:
    """Tell whether a hook comes from outside of this package."""
    # Hooks of this package, such as those of sequence parallelism, collect nothing.
    return getattr(hook, "__module__", "").partition(".")[0] != _PACKAGE
