"""Intercept the calls of a model's modules, so that a pipeline can decide what happens at each of them.

    intercept(layer, CallSite(active, "blocks.3", kind, index=3))
    active.handler = handler            # from now on `layer(x)` is `handler.layer(Call(site, layer, ..., (x,), {}))`

A model is intercepted once; analysis, measurement and training differ in the handler only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from lightning_parallel.pipeline.placeholder import reveal

__all__ = ["ActiveHandler", "Call", "CallHandler", "CallSite", "intercept"]


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


class _Intercepted(nn.Module):
    """First base of the class of every intercepted module, so that its `__call__` comes before that of the class.

    A forward hook would come too late: checkpointing wrappers and `nn.Module.__call__` itself would already have run.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site: CallSite = self.__dict__["_pipeline_site"]
        return site.dispatch(self, super().__call__, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # `copy` would go by `__reduce__`, which refuses; a class with a copy function of its own keeps it.
        inherited = getattr(super(), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate

    def __reduce__(self) -> Any:
        """Refuse to be pickled, since the parameters of other stages would be missing."""
        raise RuntimeError(
            f"`{self.__dict__['_pipeline_site'].name}` is cut into pipeline stages, and this rank holds its own stage "
            "only, so it cannot be pickled or saved whole; write a checkpoint (`trainer.save_checkpoint(path)`) and "
            "load it into a new module (`load_from_checkpoint`)"
        )


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
