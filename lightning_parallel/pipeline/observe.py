"""See where each part of a model is used, by playing the step on tensors without data.

What is computed with before the first layer belongs to the first stage, after the last layer to the last stage,
between two layers to the stage of the former. Then each stage is tried alone, so that a model that cannot be cut is
refused before anything is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.pipeline.absent import Answers, Call
from lightning_parallel.pipeline.ghost import Ghost, missing, trial, watch_parameters
from lightning_parallel.pipeline.made_up import Forwards
from lightning_parallel.pipeline.randomness import seeded
from lightning_parallel.pipeline.stage import REENTRANT, CutError, Door, Forward, Gate, Leave, guard
from lightning_parallel.pipeline.trunk import Trunk, layer_kinds, units

__all__ = ["Observation", "Step", "observe", "read_off", "try_stages"]

Step = Callable[[Any], Any]
"""Runs the user's step on one microbatch."""


@dataclass
class Observation:
    """With which layer's stage each parameter and module outside of the layers belongs.

    Attributes:
        parameters: Parameter name -> the layers at whose stages it is computed with.
        units: Module name -> the layers at whose stages it is called.
    """

    parameters: dict[str, set[int]] = field(default_factory=dict)
    units: dict[str, set[int]] = field(default_factory=dict)


def observe(module: nn.Module, trunk: Trunk, step: Step, microbatch: Any, device: torch.device) -> Observation:
    """Play `step` once on ghosts and see where each parameter and module is used.

    Nothing is computed with parameters and nothing is communicated. What follows the layers is played as far as it
    goes without data; parameters that are not reached belong with the last layer.

    Raises:
        ValueError: If the step cannot be played up to the last layer, or calls a layer twice; says why.
    """
    watcher = _Watcher(trunk, device)
    doors = _install(module, trunk)
    watcher.seen.units = {door.name: set() for door in doors.units}
    with _named_ghosts(module, device), watch_parameters(watcher.note), doors.open(watcher):
        try:
            step(microbatch)
        except Exception as error:
            if isinstance(error, CutError) or watcher.position + 1 != len(trunk.layers):
                raise ValueError(
                    f"cannot cut at `{trunk.path}`: playing the step on tensors without data stopped "
                    f"{watcher.where()}: {error}"
                ) from error
    if not watcher.called:
        raise ValueError(
            f"the step never calls the layers of `{trunk.path}`; name the layers that it calls: layers=..."
        )
    return _completed(module, trunk, watcher.seen)


def try_stages(
    module: nn.Module,
    trunk: Trunk,
    seen: Observation,
    stage_of: tuple[int, ...],
    step: Step,
    microbatch: Any,
    device: torch.device,
) -> None:
    """Play each stage alone, on ghosts, and see that it gets all that it needs.

    Args:
        stage_of: The stage of each layer.

    Raises:
        ValueError: If a connection skips over a cut, or a stage cannot get to its layers; says which and why.
    """
    answers = Answers(device, faithful=True)
    doors = _install(module, trunk)
    with trial(), _named_ghosts(module, device) as ghosts:
        trials = []
        for stage in range(stage_of[-1] + 1):
            here = {name for name, places in seen.parameters.items() if stage in {stage_of[place] for place in places}}
            for door in doors.units:
                door.present = stage in {stage_of[place] for place in seen.units[door.name]}
            played = _Trial(stage, stage_of, answers, [ghost for ghost in ghosts if ghost.parameter in here])
            played.play(step, microbatch, doors)
            trials.append(played)
    for before, after in pairwise(trials):
        lost = next((before.lost[position] for position in after.entry if position in before.lost), None)
        if lost is not None:
            raise ValueError(
                f"stage {after.stage} needs {lost}, which is on an earlier stage and does not pass through "
                f"stage {before.stage}: a connection that skips over the cut. Pass it through the layers as an "
                "argument, or cut elsewhere (`balance`, fewer stages)"
            )


def read_off(module: nn.Module, trunk: Trunk) -> Observation:
    """Guess from the order of registration: what is registered before the layers is used before them."""
    seen = Observation(units={name: set() for name, _ in units(module, trunk)})
    order = {name: place for place, (name, _) in enumerate(module.named_modules(remove_duplicate=False))}
    starts = [order[name] for name in trunk.names]
    labels = {id(parameter): name for name, parameter in module.named_parameters()}

    def place(owner: str) -> int:
        return max(0, sum(start < order[owner] for start in starts) - 1)

    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        if not _inside(owner, trunk.names):
            seen.parameters.setdefault(labels[id(parameter)], set()).add(place(owner))
    for name, unit in seen.units.items():
        unit.add(place(name))
    return _completed(module, trunk, seen)


@dataclass
class _Doors:
    gate: Gate
    units: list[Door]
    forwards: Forwards

    @contextmanager
    def open(self, visit: Any) -> Iterator[None]:
        self.gate.visit = visit
        try:
            with seeded(0):
                yield
        finally:
            self.gate.visit = None
            self.forwards.restore()


def _install(module: nn.Module, trunk: Trunk) -> _Doors:
    """Put doors before all layers and units."""
    doors = _Doors(Gate(), [], Forwards(module))
    for index, (name, layer, kind) in enumerate(zip(trunk.names, trunk.layers, layer_kinds(trunk))):
        guard(layer, Door(doors.gate, name, kind, index))
    for name, unit in units(module, trunk):
        doors.units.append(Door(doors.gate, name, name))
        guard(unit, doors.units[-1])
    return doors


class _Trial(Forward):
    """A stage's forward on ghosts. From its entry on, what it would have is alive.

    Attributes:
        entry: Which of its first layer's arguments it has to receive.
        lost: Those arguments of the next stage's first layer that it does not have, with what they are.
    """

    def __init__(self, stage: int, stage_of: tuple[int, ...], answers: Answers, held: list[Ghost]) -> None:
        super().__init__(stage, stage_of, answers, self._enliven)
        self.held = held
        self.entry: list[int] = []
        self.lost: dict[int, str] = {}

    def play(self, step: Step, microbatch: Any, doors: _Doors) -> None:
        if self.entered:
            self._hold()
        try:
            with doors.open(self):
                result = step(microbatch)
        except Leave as leave:
            self.lost = {place: leaf.origin for place, leaf in enumerate(leave.leaves) if missing(leaf)}
        except Exception as error:
            # Once it has data, a stage may look at them, which a trial cannot follow.
            if not self.entered or isinstance(error, CutError) or getattr(error, "lost", False):
                raise ValueError(f"cannot run stage {self.stage} of the pipeline on its own: {error}") from error
        else:
            lost = next(filter(missing, tree_leaves(result)), None)
            if lost is not None:
                raise ValueError(
                    f"the step returns something made of {lost.origin}, which is on an earlier pipeline stage; compute "
                    "the loss from what the layers return"
                )
        finally:
            for ghost in self.held:
                ghost.live = False

    def _enliven(self, index: int, leaves: list[Any], positions: list[int]) -> list[Tensor]:
        if not torch.is_grad_enabled() and any(leaves[position].requires_grad for position in positions):
            raise CutError(REENTRANT)
        self.entry = positions
        self._hold()
        return [Ghost(leaves[p].meta, leaves[p].device, leaves[p].origin, live=True) for p in positions]

    def _hold(self) -> None:
        for ghost in self.held:
            ghost.live = True

    def _answer(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        answer = super()._answer(door, module, call, args, kwargs)
        return tree_map_only(Ghost, _differentiable, answer) if torch.is_grad_enabled() else answer

    def _run(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        return self.answers.ask(f"the output of `{door.name}`", module, call, args, kwargs, live=True)


def _differentiable(ghost: Ghost) -> Tensor:
    """A ghost that requires a gradient and is no leaf, as the output of a layer with parameters."""
    return ghost.requires_grad_() * 1 if ghost.signature[1].is_floating_point else ghost


class _Watcher:
    """Notes what is used at which layer; every module is absent."""

    entered = False

    def __init__(self, trunk: Trunk, device: torch.device) -> None:
        self.trunk, self.answers = trunk, Answers(device)
        self.position, self.called = 0, 0
        self.seen = Observation()

    def note(self, parameter: str) -> None:
        self.seen.parameters.setdefault(parameter, set()).add(self.position)

    def where(self) -> str:
        return f"after `{self.trunk.names[self.position]}`" if self.called else "before the first layer"

    def layer(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        assert door.index is not None
        if self.called and door.index <= self.position:
            raise CutError(
                f"`{door.name}` is called twice or out of order; a pipeline runs each layer once per step, in order. "
                "Join the inputs along the sample dimension and call the model once"
            )
        self.position, self.called = door.index, self.called + 1
        return self.answers.ask(f"the output of `{door.name}`", module, call, args, kwargs)

    def unit(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        self.seen.units[door.name].add(self.position)
        return self.answers.ask(f"the output of `{door.name}`", module, call, args, kwargs)


def _completed(module: nn.Module, trunk: Trunk, seen: Observation) -> Observation:
    """Add the parameters of layers and units, and what was not seen: it belongs with the last layer."""
    last = len(trunk.layers) - 1
    labels = {id(parameter): name for name, parameter in module.named_parameters()}
    for index, layer in enumerate(trunk.layers):
        for parameter in layer.parameters():
            seen.parameters.setdefault(labels[id(parameter)], set()).add(index)
    for name, unit in units(module, trunk):
        for parameter in unit.parameters():
            seen.parameters.setdefault(labels[id(parameter)], set()).update(seen.units[name])
    for name in labels.values():
        seen.parameters[name] = seen.parameters.get(name) or {last}
    for name, unit in units(module, trunk):
        if not seen.units[name]:
            seen.units[name] = {place for p in unit.parameters() for place in seen.parameters[labels[id(p)]]}
    return seen


@contextmanager
def _named_ghosts(module: nn.Module, device: torch.device) -> Iterator[list[Ghost]]:
    """Hide every parameter behind a ghost that knows its name, from `module.parameters()` as well."""
    ghosts = {
        id(parameter): Ghost.like(parameter, f"the parameter `{name}`", device, name)
        for name, parameter in module.named_parameters()
    }
    hidden = [
        (child, key, ghosts[id(value)])
        for child in module.modules()
        for key, value in child._parameters.items()
        if value is not None
    ]
    for child, key, ghost in hidden:
        child.__dict__[key] = ghost
    named_parameters = nn.Module.named_parameters

    def named_ghosts(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, parameter in named_parameters(self, *args, **kwargs):
            yield name, ghosts.get(id(parameter), parameter)

    try:
        with mock.patch.object(nn.Module, "named_parameters", named_ghosts):
            yield list(ghosts.values())
    finally:
        for child, key, _ in hidden:
            del child.__dict__[key]


def _inside(owner: str, names: Sequence[str]) -> bool:
    return any(owner == name or owner.startswith(f"{name}.") for name in names)
