"""Where Lightning names what it does: its profiler is told of every start and stop, whatever the strategy.

The backward is taken from the strategy itself: under manual optimization the profiler is not told of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import Strategy

from lightning_parallel import recorder
from lightning_parallel.recorder import OTHER, OpenSpan

__all__ = ["ABSORBING", "PHASES", "lightning_phases"]

PHASES = (
    "data_wait",
    "forward",
    "backward",
    "communication_exposed",
    "pipeline_wait",
    "optimizer",
    "checkpoint",
    "validation",
    OTHER,
)
"""Every nanosecond of a step belongs to one of these."""

ABSORBING = ("checkpoint", "validation")
"""Phases that keep the time of what runs in them: the forward of a validation step is validation."""

_ACTIONS = {
    "train_dataloader_next": "data_wait",
    "batch_to_device": "data_wait",
    "training_step": "forward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "save_checkpoint": "checkpoint",
}
_OWNERS = ("[Strategy]", "[LightningModule]", "[_TrainingEpochLoop]")


@cache
def phase_of(action: str) -> str | None:
    """The phase of an action as Lightning names it: `[Strategy]DDPStrategy.training_step` is `forward`."""
    if action.startswith(_OWNERS):
        return _ACTIONS.get(action.rpartition(".")[2])
    return _ACTIONS.get(action)


@contextmanager
def lightning_phases(trainer: Trainer) -> Iterator[None]:
    """Inside the block, record as phases what Lightning does."""
    with _named_actions(trainer.profiler), _backward(trainer.strategy):  # type: ignore[attr-defined]
        yield


@contextmanager
def _named_actions(profiler: Profiler) -> Iterator[None]:
    """Inside the block, `profiler` records phases besides what it does by itself."""
    opened: list[tuple[str, OpenSpan]] = []
    start, stop, nothing = profiler.start, profiler.stop, OpenSpan()

    def start_phase(action_name: str) -> None:
        start(action_name)
        phase = phase_of(action_name)
        if phase is not None:
            span = recorder.span(phase, phase)
            span.__enter__()
            opened.append((action_name, span))

    def stop_phase(action_name: str) -> None:
        if opened and opened[-1][0] == action_name:
            opened.pop()[1].__exit__(None, None, None)
        stop(action_name)

    def profile(action_name: str) -> OpenSpan:
        phase = phase_of(action_name)
        return nothing if phase is None else recorder.span(phase, phase)

    profiler.start, profiler.stop = start_phase, stop_phase  # type: ignore[method-assign]
    if type(profiler) is PassThroughProfiler:  # about a hundred times a step; this is faster than starting nothing
        profiler.profile = profile  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for name in vars(profiler).keys() & {"start", "stop", "profile"}:
            delattr(profiler, name)  # that of the class is back


@contextmanager
def _backward(strategy: Strategy) -> Iterator[None]:
    backward = strategy.backward

    @wraps(backward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with recorder.span("backward", "backward"):
            return backward(*args, **kwargs)

    strategy.backward = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        del strategy.backward  # that of the class is back
