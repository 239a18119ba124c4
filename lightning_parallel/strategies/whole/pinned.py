"""Run a step several times alike: in one precision, without dropout, and with the same random numbers."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_parallel.compat import Patches, innermost_users_line
from lightning_parallel.compat.chance import seed_all
from lightning_parallel.compat.torch import BatchNormalization, buffers_of, is_backward_running, seed_torch
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.random_streams import DrawRecorder, OwnGenerators, call_seed, layer_seed
from lightning_parallel.tensor.verify import DropoutOff

__all__ = [
    "SEED",
    "Draws",
    "RefusedCalls",
    "ReferenceRunError",
    "StageStreams",
    "blamed_on_us",
    "communication_refused",
    "doubled",
    "in_double",
    "with_fixed_norm",
    "without_dropout",
]

SEED = 20_240_229
"""The seed of the steps that are compared."""


def doubled(value: Tensor) -> Tensor:
    """Return a tensor in double precision; an integer tensor unchanged."""
    return value.double() if value.is_floating_point() else value


@contextmanager
def in_double(module: nn.Module, with_parameters: bool) -> Iterator[None]:
    """Hold floating-point buffers and tensors of `module`, and parameters, in double precision inside the block.

    Changes of these tensors inside the block are lost.
    """
    parameters = []
    if with_parameters:
        parameters = [(value, value.data) for value in module.parameters() if value.is_floating_point()]
    entries: list[tuple[dict[str, Any], str, Tensor]] = []
    for child in module.modules():
        for registry in (buffers_of(child), vars(child)):
            for key, value in registry.items():
                if type(value) is Tensor and value.is_floating_point():
                    entries.append((registry, key, value))
    before = torch.get_default_dtype()
    # Tensors that the step creates must be in double precision, too.
    torch.set_default_dtype(torch.float64)
    try:
        for value, data in parameters:
            # Exchange the data and keep the objects, by which optimizers and the step know their parameters.
            value.data = data.double()
        for registry, key, value in entries:
            registry[key] = value.double()
        yield
    finally:
        torch.set_default_dtype(before)
        for value, data in parameters:
            value.data = data
        for registry, key, value in entries:
            registry[key] = value


# ------------------------------------------------------------------------------------------------- random numbers


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[DropoutOff]:
    """Turn dropout off inside the block; recurrent layers compute dropout in C, and have an attribute for it."""
    patches = Patches()
    mode = DropoutOff()
    for child in module.modules():
        if isinstance(child, nn.RNNBase) and child.dropout:
            mode.found |= child.training
            patches.replace(child, "dropout", 0.0)
    mode.replace_functions(patches)
    try:
        with mode:
            yield mode
    finally:
        patches.undo()


@contextmanager
def with_fixed_norm(module: nn.Module) -> Iterator[None]:
    """Let batch normalization use its running statistics inside the block; without statistics it only scales."""
    patches = Patches()
    try:
        for child in module.modules():
            if isinstance(child, BatchNormalization) and child.training:
                patches.replace(child, "training", False)
                if child.running_mean is None:
                    patches.replace(child, "forward", partial(_scaled, child))
        yield
    finally:
        patches.undo()


def _scaled(norm: Any, value: Tensor) -> Tensor:
    if norm.weight is None:
        return value
    shape = (1, -1, *[1] * (value.dim() - 2))
    return value * norm.weight.view(shape) + norm.bias.view(shape)


class Draws:
    """Tells whether random numbers were drawn, even if generators are seeded in between.

    Attributes:
        found: Whether any number was drawn, up to the last `check`.
        others: Whether a generator outside torch was used.
    """

    def __init__(self, generators: OwnGenerators) -> None:
        self.found = self.others = False
        self._generators = generators
        self.mark()

    def mark(self) -> None:
        """Note the states of all generators."""
        self._state = self._states()

    def check(self) -> None:
        """Compare the states with the states at `mark`."""
        state = self._states()
        self.found |= state != self._state
        self.others |= state[2:4] != self._state[2:4] or any(
            not isinstance(generator, torch.Generator) and before != after
            for generator, before, after in zip(self._generators.generators, self._state[4], state[4])
        )

    def _states(self) -> Any:
        numpy_state = np.random.get_state(legacy=False)
        cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else b""
        return (
            torch.get_rng_state().numpy().tobytes(),
            cuda,
            random.getstate(),
            # As bytes: an array in the state compares element by element.
            pickle.dumps(numpy_state),
            self._generators.states(),
        )


class StageStreams:
    """Seeds a step on the full model as a pipeline seeds one microbatch: see `random_streams` and `runtime`.

    Args:
        engine: The pipeline.
        draws: Tells whether numbers are drawn.
        recorder: Records the numbers.
        seed: The seed of the step.
    """

    def __init__(self, engine: PipelineEngine, draws: Draws, recorder: DrawRecorder, seed: int = SEED) -> None:
        self._engine = engine
        self._draws = draws
        self._recorder = recorder
        self._step_seed = seed
        self._calls = 0
        self._is_inside = False

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Seed inside the block."""
        module = self._engine.module
        hooks = []
        # A layer has several numbers if the model calls it several times.
        numbers: dict[nn.Module, list[int]] = {}
        for number, name in enumerate(self._engine.plan.layers):
            numbers.setdefault(module.get_submodule(name), []).append(number)
        for layer, mine in numbers.items():
            # First, because other hooks of the layer may draw numbers.
            hooks.append(layer.register_forward_pre_hook(self._entering(mine), prepend=True))
        for name in self._engine.model.outer_names:
            hooks.append(module.get_submodule(name).register_forward_hook(self._after_outer_call))
        try:
            with self._engine.generators.kept():
                self._seed(0)
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _seed(self, number: int) -> None:
        self._draws.check()
        seed_all(call_seed(self._step_seed, number))
        self._engine.generators.seed(call_seed(self._step_seed - SEED, number))
        self._recorder.enter(f"call {number}")
        self._draws.mark()

    def _after_outer_call(self, *_: Any) -> None:
        if not self._is_inside:
            self._calls += 1
            self._seed(self._calls)

    def _entering(self, numbers: Sequence[int]) -> Callable[..., None]:
        """Return the hook of a layer that is called with these numbers, one after the other."""
        calls = iter(numbers)

        def enter(*_: Any) -> None:
            if is_backward_running():
                # An activation checkpoint computes the layer again, with the same numbers as before.
                if len(numbers) == 1:
                    seed_torch(layer_seed(self._step_seed, numbers[0]))
                return
            number = next(calls, None)
            if number is None:
                return
            self._draws.check()
            seed_all(layer_seed(self._step_seed, number))
            self._engine.generators.seed(layer_seed(self._step_seed - SEED, number))
            self._recorder.enter(f"layer {number}")
            self._is_inside = True
            self._draws.mark()

        return enter


# ------------------------------------------------------------------------------------------------ communication


class ReferenceRunError(RuntimeError):
    """Reports a failure of the self-check itself."""


@contextmanager
def blamed_on_us(what: str) -> Iterator[None]:
    """Turn errors inside the block, which runs no code of the user, into a ReferenceRunError."""
    try:
        yield
    except Exception as error:
        raise ReferenceRunError(f"{what} failed with {type(error).__name__}: {error}") from error


@dataclass
class RefusedCalls:
    """The calls that tried to communicate with ranks that do not run the step, in words.

    Attributes:
        users: The first call of the user's code.
        ours: The first call of this library.
    """

    users: str = ""
    ours: str = ""


_COMMUNICATION = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


@contextmanager
def communication_refused(others: set[int], is_ours: Callable[[], bool], calls: RefusedCalls) -> Iterator[None]:
    """Refuse communication with ranks that do not run the step: they would never answer.

    Args:
        others: The global ranks that do not run the step.
        is_ours: Tells whether the current call fetches parameters or sends gradients.
        calls: Notes the refused calls.
    """

    def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or next((value for value in args if isinstance(value, dist.ProcessGroup)), None)
            group = group or dist.group.WORLD
            ranks = set(dist.get_process_group_ranks(group))
            # Refuse other replicas, too: a replica that searches for the cause of a difference runs steps alone.
            if not is_ours() and (ranks & others or (group is dist.group.WORLD and len(ranks) > 1)):
                line = innermost_users_line()
                text = f"the step communicates by itself (`torch.distributed.{name}`{f', in {line}' if line else ''})"
                if _is_called_by_user():
                    calls.users = calls.users or text
                else:
                    calls.ours = calls.ours or text
                raise RuntimeError(text)
            return function(*args, **kwargs)

        return call

    patches = Patches()
    try:
        for name in _COMMUNICATION:
            if hasattr(dist, name):
                patches.replace(dist, name, guarded(name, getattr(dist, name)))
        yield
    finally:
        patches.undo()


_USERS_CALLS = {"all_gather", "reduce", "barrier", "broadcast", "reduce_boolean_decision"}
"""Methods of a strategy by which a user's code communicates."""


def _is_called_by_user() -> bool:
    """Tell whether the user's code communicates, by torch or by Lightning, and not this library."""
    frame: FrameType | None = sys._getframe(2)
    is_ours = False
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "lightning_parallel":
            is_ours = True
            if frame.f_code.co_name in _USERS_CALLS and isinstance(frame.f_locals.get("self"), Strategy):
                return True
        elif package not in ("torch", "contextlib"):
            return not is_ours
        frame = frame.f_back
    return False
