"""Runs the user's hooks for gradients of parameters once per batch in a pipeline, as in one process.

1. During the microbatches, the hooks are off, and `.grad` collects the gradient of the batch.
2. At the end of a stage, each `register_hook` of its parameters gets this gradient, and may return a new gradient.
3. In `backward`, the gradient is added to `.grad` of earlier batches; then `register_post_accumulate_grad_hook` runs.

A hook runs only on the rank that holds its parameter, so its side effects would exist on that rank alone. Calls 1, 2,
4, 8, ... of a hook are watched, and a side effect is refused. The self-check gives hooks the gradients of the step on
the full model.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.compat import FOREIGN, ParallelState, is_power_of_two
from lightning_parallel.compat.torch import backward_hooks_of, gradient_hooks_of, named_parameters_of
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.strategies.hooks.views import HookError
from lightning_parallel.strategies.steps.state import Snapshot, label_of

__all__ = ["GradientHooks", "HookedState", "LeftByBackward", "LeftInCallbacks", "refused_leaving", "run_gradient_hooks"]

_Hook = Callable[[Any], Any]
_OURS = __name__.partition(".")[0]

_WAY_OUT = (
    "Keep figures of gradients in `on_before_optimizer_step`, by Lightning's `grad_norm`. Or use"
    " TensorParallelStrategy, whose ranks hold every layer"
)


class _HeldHooks(NamedTuple):
    """A parameter, the dicts in which torch holds its hooks, and copies of these dicts."""

    parameter: nn.Parameter
    hooks: tuple[dict[int, _Hook], dict[int, _Hook]]
    kept: tuple[dict[int, _Hook], dict[int, _Hook]]

    def taken(self, which: int) -> list[_Hook]:
        """Return the removed hooks of one kind: 0 for `register_hook`, 1 for hooks after accumulation."""
        return [hook for hook in self.kept[which].values() if _is_users(hook)]


class GradientHooks:
    """Runs the hooks for gradients of a module in a pipeline.

    Args:
        module: The user's module.
        engine: The pipeline.
    """

    def __init__(self, module: nn.Module, engine: PipelineEngine) -> None:
        self._module = module
        self._engine = engine
        self._held: dict[str, _HeldHooks] = {}
        self._calls: dict[int, int] = {}
        self._steps = 0
        self._epoch = -1
        self._tied: frozenset[str] = frozenset()

    @contextmanager
    def held(self, epoch: int, is_compared: bool = False) -> Iterator[None]:
        """Take the hooks off inside the block; every rank of the pipeline enters it.

        Args:
            epoch: The current epoch.
            is_compared: Whether the self-check runs the step. It has taken off the hooks of the reducer.
        """
        # Find the hooks in each step: code may register hooks between steps.
        self._steps += 1
        named = list(named_parameters_of(self._module))
        self._held = {name: _take_off(one) for name, one in named if any(gradient_hooks_of(one))}
        # The dicts after the removal: any further key comes from the step.
        numbers = {name: [hooks.copy() for hooks in held.hooks] for name, held in self._held.items()}
        try:
            self._agree_on_tied(-1 if is_compared else epoch)
            yield
            if self.is_due:
                comm.raise_together(self._registered_failure(named, numbers), self._engine.group)
        finally:
            for held in self._held.values():
                for hooks, kept in zip(held.hooks, held.kept):
                    # Keep hooks that the step has registered, after the hooks from before it.
                    new = {key: hook for key, hook in hooks.items() if key not in kept}
                    # The reducer may have removed its own.
                    old = {key: hook for key, hook in kept.items() if key in hooks or _is_users(hook)}
                    hooks.clear()
                    hooks.update(old | new)

    @property
    def are_held(self) -> bool:
        """Whether gradients of this step have hooks."""
        return bool(self._held or self._tied)

    @property
    def is_due(self) -> bool:
        """Whether to check this step."""
        return is_power_of_two(self._steps)

    def _registered_failure(
        self, named: Iterable[tuple[str, nn.Parameter]], before: Mapping[str, list[dict[int, _Hook]]]
    ) -> HookError | None:
        for name, parameter in named:
            then, now = before.get(name, [{}, {}]), gradient_hooks_of(parameter)
            new = [hook for old, hooks in zip(then, now) for key, hook in hooks.items() if key not in old]
            if new := [hook for hook in new if _is_users(hook)]:
                return HookError(
                    f"Hooks for gradients of parameters must exist before the step; got {_place_of(new[0])} for the"
                    f" gradient of `{name}`, which `training_step` registers. A pipeline runs the step once per"
                    " microbatch. Register the hook in `__init__`, or in a hook such as `on_train_batch_start`"
                )
        return None

    def _agree_on_tied(self, epoch: int) -> None:
        """Exchange which tied parameters have hooks: their owners sum the gradients before a hook runs."""
        if not self._engine.tied:
            return
        mine = frozenset(self._held) & frozenset(self._engine.tied)
        failure = None
        # At points that all ranks know, because the exchange is a collective.
        if self.is_due or self._epoch != epoch or epoch < 0:
            self._epoch = epoch
            everyone = comm.all_gather_object(mine, self._engine.group)
            self._tied = frozenset().union(*everyone)
        if not (mine or self._tied):
            return
        apart = mine ^ (self._tied & frozenset(dict(self._module.named_parameters())))
        if apart:
            failure = HookError(
                "A gradient hook of a tied parameter must be on every stage that holds the parameter, from the start"
                f" of an epoch; got `{min(apart)}` with a hook on some pipeline stages only. Register it in"
                " `__init__`, on every rank"
            )
        if self.is_due:
            comm.raise_together(failure, self._engine.group)
        elif failure is not None:
            raise failure

    def waits(self, name: str) -> bool:
        """Tell whether hooks may change the gradient of a parameter after its stage has ended."""
        return name in self._tied or (name in self._held and bool(self._held[name].taken(1)))

    def end_stage(self, names: Iterable[str], earlier: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Run hooks of parameters whose gradients of this batch are complete.

        Args:
            names: The names of the parameters.
            earlier: Gradients of earlier batches, which hooks see in `.grad`.
        """
        # In the order of the module, since a hook may gather, and `names` is a set, whose order differs between ranks.
        for name in self._held:
            if name in names and name not in self._tied:
                self._run(name, earlier)

    def end_step(self, earlier: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Run hooks of tied parameters, on the sum over their owners; the first owner keeps the sum."""
        failure: Exception | None = None
        # Sorted, since `sum_tied` communicates, and all owners must sum in one order. For the same reason a failed hook
        # must not end the loop.
        for name in sorted(self._tied):
            self._engine.sum_tied([name])
            if name not in self._held:
                continue
            if name in self._engine.counted_by_others:
                self._held[name].parameter.grad = None
                continue
            try:
                self._run(name, earlier)
            except Exception as error:
                failure = failure or error
        if self._tied:
            comm.raise_together(failure, self._engine.group)

    @torch.no_grad()
    def _run(self, name: str, earlier: Mapping[nn.Parameter, Tensor | None]) -> None:
        parameter, gradient = self._held[name].parameter, self._held[name].parameter.grad
        if gradient is None:
            return
        for hook in self._held[name].taken(0):
            # In one process, `.grad` holds the sum of earlier batches when such a hook runs.
            parameter.grad = earlier.get(parameter)
            with self._watched(hook, name):
                result = self._hooked(hook, name, gradient)
            gradient = gradient if result is None else result
        parameter.grad = gradient

    @torch.no_grad()
    def after_accumulation(self, parameters: Container[nn.Parameter]) -> None:
        """Run the hooks after accumulation, when `.grad` is the sum of this batch and earlier batches."""
        for name, held in self._held.items():
            if held.parameter in parameters:
                for hook in held.taken(1):
                    with self._watched(hook, name):
                        self._hooked(hook, name, held.parameter)

    def _hooked(self, hook: _Hook, name: str, given: Tensor) -> Any:
        watch = ParallelState.of(self._module).watch
        if watch is None or hasattr(hook, "watches"):  # the watch itself calls such a hook
            return hook(given)
        return watch.views.run_gradient_hook(hook, name, given)

    @contextmanager
    def _watched(self, hook: _Hook, name: str) -> Iterator[None]:
        key = id(_own(hook))
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if not is_power_of_two(calls):
            yield
            return
        with _nothing_left(hook, name, self._module):
            yield


def _take_off(parameter: nn.Parameter) -> _HeldHooks:
    hooks = gradient_hooks_of(parameter)
    held = _HeldHooks(parameter, hooks, (dict(hooks[0]), dict(hooks[1])))
    for each in hooks:
        for key in [key for key, hook in each.items() if _is_users(hook)]:
            del each[key]
    return held


# ------------------------------------------------------------------------------------------------- the self-check


@torch.no_grad()
def run_gradient_hooks(module: nn.Module, gradients: MutableMapping[str, Tensor], is_pipeline: bool) -> None:
    """Give the gradients of a step on the full model to the hooks of this rank's parameters.

    Args:
        module: The divided module.
        gradients: The gradients by name; replaced by the results of hooks.
        is_pipeline: Whether hooks may leave nothing behind.

    Raises:
        HookError: If a hook leaves something behind, or draws.
    """
    watch = ParallelState.of(module).watch
    for name, parameter in module.named_parameters():
        before, after = ([*map(_own, filter(_is_users, each.values()))] for each in gradient_hooks_of(parameter))
        if not (before or after) or name not in gradients:
            continue
        # A clone, because a hook may write into its argument.
        gradient = gradients[name].clone()
        run = None if watch is None else functools.partial(watch.views.run_gradient_hook, is_complete=True)
        for hook in before:
            with _nothing_left(hook, name, module if is_pipeline else None):
                result = hook(gradient) if run is None else run(hook, name, gradient)
            gradient = gradient if result is None else result
        # The gradient may have another dtype than the parameter, and torch refuses such a `.grad`.
        stand_in = nn.Parameter(parameter.detach().to(gradient.dtype))
        stand_in.grad = gradient
        for hook in after:
            with _nothing_left(hook, name, module if is_pipeline else None):
                hook(stand_in) if run is None else run(hook, name, stand_in)
        if stand_in.grad is not None:
            gradients[name] = stand_in.grad


# ------------------------------------------------------------------------------------------------- side effects


class _Reach(NamedTuple):
    """The place of a value that a function reaches: a cell of a closure, or an entry of a dict."""

    label: str
    holder: Any
    key: str

    def read(self) -> Any:
        """Return the value; None without a value."""
        if isinstance(self.holder, CellType):
            return getattr(self.holder, "cell_contents", None)
        return self.holder.get(self.key)

    def write(self, value: Any) -> None:
        """Set the value."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


class HookedState:
    """Values that functions reach by closures, globals and bound objects, to be compared or restored.

    Args:
        functions: The user's functions.
    """

    def __init__(self, functions: Iterable[_Hook]) -> None:
        self._found: list[tuple[list[tuple[_Reach, Any]], Snapshot]] = []
        seen: set[int] = set()
        for function in functions:
            places = [(place, place.read()) for place in _places(function, seen)]
            # `Snapshot` follows objects of the module's package, so the holder claims the package of the hook.
            holder = type("Reached", (nn.Module,), {"__module__": _package_of(function)})()
            vars(holder)["found"] = {place.label: value for place, value in places}
            self._found.append((places, Snapshot(holder, is_exact=True)))

    @staticmethod
    def of(module: nn.Module) -> HookedState:
        """Return the values that the gradient hooks of a module reach."""
        hooks = (hooks.values() for one in module.parameters() for hooks in gradient_hooks_of(one))
        return HookedState(_own(hook) for each in hooks for hook in each if _is_users(hook))

    def changed(self) -> str:
        """Return the name of a changed value; empty if nothing has changed."""
        for places, before in self._found:
            for place, then in places:
                now = place.read()
                if now is not then and not (isinstance(now, (int, float, str)) and now == then):
                    return place.label
            for path in before.changes():
                return ".".join(map(str, path[1:]))
        return ""

    def restore(self) -> None:
        """Restore all values."""
        for places, before in self._found:
            before.restore()
            for place, then in places:
                if place.read() is not then:
                    place.write(then)


class LeftByBackward:
    """Finds side effects of a backward pass in a module, in its callbacks, and in values that its hooks reach.

    Args:
        module: The user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
        hooks = (hook for child in module.modules() for hooks in backward_hooks_of(child) for hook in hooks.values())
        self._state = Snapshot(module, is_exact=True)
        self._others = HookedState([*callbacks, *hooks])

    def name(self) -> str:
        """Return the name of a changed value; empty if nothing has changed."""
        return next((f"self.{label_of(path)}" for path in self._state.changes()), "") or self._others.changed()


class LeftInCallbacks:
    """Finds changes that a step makes in callbacks, whose hooks may read them after the step.

    Args:
        module: The user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
        self._states = {type(one).__name__: HookedState([one]) for one in callbacks}

    def name(self) -> str:
        """Return the name of a changed value, and restore all values; empty if nothing has changed."""
        found = ((state.changed(), name) for name, state in self._states.items())
        label = next((f"`{changed}` of the callback `{name}`" for changed, name in found if changed), "")
        for state in self._states.values():
            state.restore()
        return label


def refused_leaving(step: str, by_backward: str, in_callback: str) -> HookError | None:
    """Return the error for a step in a pipeline with side effects; None without side effects."""
    if in_callback:
        return HookError(
            f"`{step}` must not change callbacks; got a change of {in_callback}, as by a forward hook. In a pipeline"
            " only the stage that runs the layer makes this change, once per microbatch. Keep the value in an"
            " attribute of the LightningModule, where microbatches are merged. Or use TensorParallelStrategy"
        )
    if by_backward:
        return HookError(
            f"The backward pass of `{step}` must change only gradients; got a change of `{by_backward}`, as by a"
            f" gradient hook. In a pipeline each stage runs its own backward pass, once per microbatch. {_WAY_OUT}"
        )
    return None


def _places(function: Any, seen: set[int]) -> Iterator[_Reach]:
    """Yield the values that a function reaches, directly or by the functions that it names."""
    if id(function) in seen or _package_of(function).partition(".")[0] in FOREIGN - {"builtins"}:
        return
    seen.add(id(function))
    for place in _places_of(function):
        value = place.read()
        if isinstance(value, (FunctionType, MethodType, BuiltinMethodType, functools.partial)):
            yield from _places(value, seen)
        elif value is not None and not isinstance(value, (ModuleType, type, nn.Module)):
            yield place


def _places_of(function: Any) -> Iterator[_Reach]:
    if isinstance(function, functools.partial):
        parts = dict(enumerate((function.func, *function.args))) | function.keywords
        yield from (_Reach(f"argument {key}", {"": value}, "") for key, value in parts.items())
    elif isinstance(function, (MethodType, BuiltinMethodType)):
        # `norms.append` itself may be a hook.
        yield from (_Reach("self", {"": value}, "") for value in (function.__self__, getattr(function, "__func__", 0)))
    elif isinstance(function, FunctionType):
        yield from (_Reach(*each, "") for each in zip(function.__code__.co_freevars, function.__closure__ or ()))
        yield from (_Reach("a default", {"": value}, "") for value in function.__defaults__ or ())
        names = _names_in(function.__code__) & function.__globals__.keys()
        yield from (_Reach(name, function.__globals__, name) for name in sorted(names))
    elif hasattr(function, "__dict__"):
        yield from (_Reach(name, vars(function), name) for name in vars(function))


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


@contextmanager
def _nothing_left(hook: _Hook, name: str, module: nn.Module | None) -> Iterator[None]:
    """Refuse a hook that draws random numbers, or that changes a module or another value, inside the block."""
    numbers = _random_states()
    before = None if module is None else (Snapshot(module), HookedState([_own(hook)]))
    yield
    # Not in a `finally`: after an error of the hook, this error counts.
    found = ""
    if numbers != _random_states():
        found = "draws random numbers. Each rank of a replica draws other numbers for its shards or stages"
        expected, way_out = "The hook must draw none", "Draw in `on_after_backward`, or do not draw"
    elif before is not None:
        state, others = before
        label = next((f"self.{label_of(path)}" for path in state.changes()), "") or others.changed()
        found = label and f"changes `{label}`. In a pipeline it runs only on the rank that holds the parameter"
        expected, way_out = "The hook must return a gradient and change nothing else", _WAY_OUT
    if found:
        raise HookError(f"The hook {_place_of(hook)} for the gradient of `{name}` {found}. {expected}. {way_out}")


def _random_states() -> list[Any]:
    # Numpy's state as a list, because `==` of two arrays gives an array.
    of_numpy = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    states = [torch.get_rng_state().tolist(), random.getstate(), of_numpy]
    return [*states, torch.cuda.get_rng_state().tolist()] if torch.cuda.is_initialized() else states


# ------------------------------------------------------------------------------------------------- whose hook it is


def _own(hook: _Hook) -> _Hook:
    """Return the user's function, without the wrapper that watches it."""
    own: _Hook = getattr(hook, "watches", hook)
    return own


def _innermost(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _package_of(hook: _Hook) -> str:
    own = _innermost(_own(hook))
    module = getattr(own, "__module__", None) or type(getattr(own, "__self__", own)).__module__
    return str(module)


def _is_users(hook: Any) -> bool:
    return _package_of(hook).partition(".")[0] != _OURS


def _place_of(hook: _Hook) -> str:
    own = _innermost(_own(hook))
    code = getattr(own, "__code__", None)
    name = getattr(own, "__qualname__", type(own).__name__).rpartition("<locals>.")[2]
    return (
        f"`{name}`" if code is None else f"`{name}` ({code.co_filename.rpartition('/')[2]}, line {code.co_firstlineno})"
    )
