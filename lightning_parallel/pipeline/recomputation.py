"""Recompute the activations of repeated layers in backward, instead of keeping them (activation checkpointing).

    forward    keeps the inputs of each chosen layer
    backward   runs the layer again on its inputs, and then differentiates it

`torch.utils.checkpoint` runs the layer again with the same random numbers of torch. This module makes the second run
equal to the first one in all other respects, and lets it leave no trace:

* generators of Python, of numpy and of the layer draw the same numbers again;
* attributes, and statistics of batch normalization, change once;
* objects among the arguments, such as a key-value cache, are in the state of the first run.

The wrapper stands inside `nn.Module.__call__`. Pipelines, the recorder and the self-check see one call of the layer.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_parallel.comm.host_memory import HostCopies
from lightning_parallel.comm.kept import KeptResults
from lightning_parallel.compat.dispatcher import on_graph_end
from lightning_parallel.compat.torch import (
    CALLS,
    AroundCalls,
    BatchNormalization,
    buffers_of,
    pytree,
    saved_tensors_hooks_now,
    version_of,
)
from lightning_parallel.pipeline.layer_stack import LayerStack, find_layer_stacks
from lightning_parallel.pipeline.random_streams import OwnGenerators
from lightning_parallel.step_trace.attributes import SavedAttributes
from lightning_parallel.step_trace.stubs import copy_args

__all__ = ["Recomputation", "Recomputed", "layers_to_recompute", "observed", "recompute", "repeated_layers"]

Recomputed = Literal["full", "selective"]
"""How backward computes a layer again: all of it, or all but products, attention and communication."""


def recompute(
    module: nn.Module,
    option: str | int | Mapping[str, Recomputed],
    path: str = "auto",
    copies: HostCopies | None = None,
) -> None:
    """Recompute the activations of repeated layers in backward from now on, as a strategy's argument says.

    Args:
        module: The model.
        option: See `layers_to_recompute`; or the result of that function.
        path: Dotted name of the container of the layers, or `auto`; commas join several.
        copies: Keeps the inputs of the layers in host memory until backward; None keeps them on the device.

    Raises:
        ValueError: If there are no repeated layers, or fewer than n.
    """
    for layer in module.modules():
        around = vars(layer).get(CALLS)
        if isinstance(around, AroundCalls) and isinstance(around.around, Recomputation):
            vars(layer)[CALLS] = around.compiled
    if option == "off":
        return
    if not isinstance(option, Mapping):
        option = layers_to_recompute(repeated_layers(module, path), option)
    host = None if copies is None else _HostInputs(copies)
    for name, how in option.items():
        layer = module.get_submodule(name)
        # A pipeline has replaced the layers of other stages.
        if next(layer.parameters(), None) is not None:
            vars(layer)[CALLS] = AroundCalls(layer, Recomputation(name, layer, how, host))


def layers_to_recompute(stack: LayerStack, option: str | int) -> dict[str, Recomputed]:
    """Return how each layer is recomputed, by name, without layers whose activations stay.

    Args:
        stack: The layers.
        option: `full` or `selective` choose all layers, a number n every n-th layer, and `off` no layer.

    Raises:
        ValueError: If the number is larger than the number of layers.
    """
    if option == "off":
        return {}
    # A layer that is called several times counts once.
    layers = dict(zip(stack.names, stack.layers))
    interval = option if isinstance(option, int) else 1
    if interval > len(layers):
        raise ValueError(
            f"`activation_checkpointing` must be at most {len(layers)}, the number of repeated layers in"
            f" `{stack.path}`; got {interval}, which would leave only the first layer. Set a smaller number, or 'full'"
            " for all layers"
        )
    # An activation between the layers saves its input only. A run again would cost time and save nothing.
    chosen = [name for name in [*layers][::interval] if next(layers[name].parameters(), None) is not None]
    return dict.fromkeys(chosen, "selective" if option == "selective" else "full")


def repeated_layers(module: nn.Module, path: str) -> LayerStack:
    """Return the layers from which `activation_checkpointing` chooses.

    Args:
        module: The model.
        path: See `recompute`.

    Raises:
        ValueError: If there are no repeated layers.
    """
    try:
        # The first candidate is the longest: all similar containers in a row, such as an encoder and a decoder.
        return find_layer_stacks(module, 1, path)[0]
    except ValueError as error:
        if path != "auto":
            raise
        raise ValueError(
            f"`activation_checkpointing` needs repeated layers; got no `ModuleList`, `Sequential` or `ModuleDict` with"
            f" several modules of one class in `{type(module).__name__}`. Put the layers into one, call"
            " `torch.utils.checkpoint.checkpoint` in `forward`, or set activation_checkpointing='off'"
        ) from error


_observers: list[Callable[[Tensor], Any]] = []
# What the observers gave for the tensors of the layer that backward has computed again last.
_computed_again: list[Any] = []


@contextmanager
def observed(observer: Callable[[Tensor], Any]) -> Iterator[None]:
    """Call `observer` with each tensor that layers keep, or compute again, inside the block.

    Autograd's hooks for saved tensors do not see these tensors. The results of `observer` live as long as the tensors.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextmanager
def _second_run_observed() -> Iterator[None]:
    hooks = saved_tensors_hooks_now()
    if not _observers or hooks is None:
        yield
        return
    pack, unpack = hooks
    # Backward no longer needs the tensors of the previous layer, and at its end it needs none.
    _computed_again.clear()
    on_graph_end(_computed_again.clear)

    def observe(tensor: Tensor) -> Any:
        _computed_again.extend(observer(tensor) for observer in _observers)
        return pack(tensor)

    with saved_tensors_hooks(observe, unpack):
        yield


class Recomputation:
    """Runs the calls of one layer, and runs each again in backward.

    Args:
        name: Name of the layer.
        layer: The layer.
        how: See `Recomputed`.
        host: Keeps the inputs in host memory until backward; None keeps them on the device.

    Attributes:
        around_again: Returns a context for each run in backward.
    """

    def __init__(self, name: str, layer: nn.Module, how: Recomputed, host: _HostInputs | None = None) -> None:
        self.name = name
        self.host = host
        self.selective = how == "selective"
        # The results for which backward asks. The last product of a layer is mostly not among them.
        self.most_results: int | None = None
        self.around_again: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.layer = layer
        self.generators = OwnGenerators(layer.modules())
        # Buffers that a call changes, by module and key; None before the first call.
        self.changing: Collection[tuple[nn.Module, str]] | None = None

    def __call__(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Without gradients autograd keeps nothing, so there is nothing to save.
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return self.begin(run, args, kwargs)[0]

    def begin(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _LayerCall]:
        """Return the result of a call, and the object that keeps its inputs for backward."""
        call = _LayerCall(self, run, args, kwargs)
        options: dict[str, Any] = {}
        if self.selective:
            options["context_fn"] = call.contexts
        if self.host is not None:
            args, kwargs = (call.send(args, kwargs, self.host),), {}
        # As two arguments: a keyword of the layer may have the name of an option of `checkpoint`.
        return checkpoint(call, args, kwargs, use_reentrant=False, **options), call

    def buffers(self) -> dict[tuple[nn.Module, str], Tensor]:
        """Return the buffers of the layer that a call may change."""
        if self.changing is None:
            found = [(child, key) for child in self.layer.modules() for key in buffers_of(child)]
        else:
            found = list(self.changing)
        return {(child, key): value for child, key in found if (value := buffers_of(child)[key]) is not None}

    def note_changes(self, before: dict[tuple[nn.Module, str], Tensor], versions: list[int]) -> None:
        """Note the buffers that the first call has changed."""
        self.changing = [
            (child, key)
            for ((child, key), buffer), version in zip(before.items(), versions)
            # The kernels of batch normalization do not raise the version.
            if isinstance(child, BatchNormalization)
            or buffers_of(child).get(key) is not buffer
            or version_of(buffer) != version
        ]


class _LayerCall:
    """One call of a layer: the first run in forward, and later runs in backward."""

    def __init__(
        self, owner: Recomputation, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.owner = owner
        self.run = run
        self.has_run = False
        self.results = KeptResults(owner.most_results)
        self.given = copy_args((args, kwargs), {})
        self.first: tuple[Any, Any] | None = None
        self.waiting: Any = None
        self.before: Callable[[], _LayerCall | None] = lambda: None
        # On the device again, ahead of the later run.
        self.fetched: Any = None
        self.was_fetched = False
        self.is_changed = False
        self.observations: list[Any] = []
        self.versions = _versions(self.given)
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.own = owner.generators.states()
        self.buffers = {place: value.detach().clone() for place, value in owner.buffers().items()}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.has_run:
            return self._again()
        self.has_run = True
        if self.first is not None:
            (args, kwargs), self.first = self.first, None
            result = self._run_and_let_go(args, kwargs)
        else:
            result = self._run(args, kwargs)
        self.observations = [observer(tensor) for observer in _observers for tensor in self.kept()]
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer for the first time."""
        if self.owner.changing is not None:
            return self.run(*args, **kwargs)
        before = self.owner.buffers()
        versions = [version_of(value) for value in before.values()]
        result = self.run(*args, **kwargs)
        self.owner.note_changes(before, versions)
        self.buffers = {place: value for place, value in self.buffers.items() if place in (self.owner.changing or ())}
        return result

    def inputs(self) -> list[Tensor]:
        """Return the inputs that this call keeps on the device until backward."""
        # Inputs without a gradient, such as a mask, mostly belong to all layers.
        return [leaf for leaf in pytree.tree_leaves(self.given) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def kept(self) -> list[Tensor]:
        """Return the tensors that this call keeps on the device until backward."""
        return [*self.inputs(), *self.results.tensors()]

    def send(self, args: tuple[Any, ...], kwargs: dict[str, Any], host: _HostInputs) -> Tensor:
        """Begin to copy the inputs to host memory; return an argument for `checkpoint`, which keeps its arguments."""
        self.first = args, kwargs
        # Weak: a call ends with the graph that runs it again.
        self.before, host.last = host.last, weakref.ref(self)
        leaves, tree = pytree.tree_flatten(self.given)
        # Inputs without a gradient, such as a mask, mostly belong to all layers, and stay on the device.
        sent = [
            _OnHost(host.copies.to_host(leaf), leaf.device) if type(leaf) is Tensor and leaf.requires_grad else leaf
            for leaf in leaves
        ]
        self.waiting = pytree.tree_unflatten(sent, tree)
        # `checkpoint` saves the random state of the devices of its arguments. Without elements it takes no memory.
        return next((leaf.detach().new_empty(0) for leaf in leaves if isinstance(leaf, Tensor)), torch.empty(0))

    def _run_and_let_go(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._run(args, kwargs)
        host = self.owner.host
        assert host is not None, "`send` has used it"
        self.is_changed = _versions(self.given) != self.versions
        # The copy ran beside the layer. Code after the layer may write into its input, so kernels wait for the copy.
        host.copies.join()
        self.given = self.waiting
        self.waiting = None
        return result

    def _inputs(self) -> Any:
        """Return the inputs of the first run, on their device."""
        host = self.owner.host
        if host is None:
            return self.given
        if self.fetched is None:
            self._fetch(host.copies)
        found, self.fetched = self.fetched, None
        host.copies.join()
        # Backward comes to the call before this one next. Its inputs arrive while this layer runs.
        ahead = self.before()
        if ahead is not None and ahead.waiting is None and not ahead.was_fetched:
            ahead._fetch(host.copies)
        return found

    def _fetch(self, copies: HostCopies) -> None:
        """Begin to copy the inputs to their device."""

        def fetched(leaf: Any) -> Any:
            if not isinstance(leaf, _OnHost):
                return leaf
            value = torch.empty_like(leaf.value, device=leaf.device)
            copies.to_device(leaf.value, value)
            return value.requires_grad_()

        self.fetched = pytree.tree_map(fetched, self.given)
        self.was_fetched = True

    def contexts(self) -> tuple[KeptResults, KeptResults]:
        """Return the contexts of the first run and of later runs."""
        return self.results, self.results

    def _again(self) -> Any:
        if self.is_changed or (self.owner.host is None and _versions(self.given) != self.versions):
            raise RuntimeError(
                f"The inputs of `{self.owner.name}` must not change in place, because backward computes the layer from"
                " its inputs again (`activation_checkpointing`); got another version. Write `x = x + y` instead of"
                " `x += y`, set `inplace=False`, or leave the layer out by activation_checkpointing='off'"
            )
        # Copies again: with `retain_graph=True` a layer runs a third time.
        args, kwargs = copy_args(self._inputs(), {})
        with self._as_before(), self.owner.around_again(), _second_run_observed():
            return self.run(*args, **kwargs)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Put the states of the first run on inside the block."""
        layer, generators = self.owner.layer, self.owner.generators
        saved = SavedAttributes(layer)
        states = random.getstate(), np.random.get_state(), generators.states()
        for (child, key), value in self.buffers.items():
            # Another tensor, not a write in place: autograd may have saved the present one.
            buffers_of(child)[key] = value.clone()
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        generators.restore(self.own)
        try:
            yield
        finally:
            # torch ends the run by an exception, as soon as it has all tensors.
            self.owner.most_results = max(self.owner.most_results or 0, self.results.asked)
            saved.restore()
            random.setstate(states[0])
            np.random.set_state(states[1])
            generators.restore(states[2])


class _HostInputs:
    """Keeps the inputs of calls in host memory, and knows the last call."""

    def __init__(self, copies: HostCopies) -> None:
        self.copies = copies
        self.last: Callable[[], _LayerCall | None] = lambda: None


class _OnHost:
    """An input in host memory, and its device."""

    def __init__(self, value: Tensor, device: torch.device) -> None:
        self.value = value
        self.device = device


def _versions(arguments: Any) -> list[int]:
    leaves = pytree.tree_leaves(arguments)
    # Tensors of inference mode have no version, and cannot change outside it.
    return [version_of(leaf) for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
