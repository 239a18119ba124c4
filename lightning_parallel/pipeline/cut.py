r"""Cut a live model in place: each rank keeps the layers of its stages and what is computed with before and after.

    embed   layers 0 1 2 3 4 5   norm   head
    \___ stage 0 ___/ \_______ stage 1 _____/

Where a module or parameter outside of the layers belongs is observed, not guessed: the step is played once on ghosts,
and what is computed with before the first layer belongs to the first stage, after the last layer to the last stage,
between two layers to the stage of the former; what is needed on several stages is kept on each of them ("tied").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_parallel.pipeline.absent import Answers, Call, forget_parameters
from lightning_parallel.pipeline.ghost import Ghost, watch_parameters
from lightning_parallel.pipeline.stage import Door, Gate, guard, unguarded
from lightning_parallel.pipeline.trunk import Trunk, layer_kinds

__all__ = ["Cut", "Observation", "Step", "TiedParameter", "observe", "read_off"]

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


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several stages compute with, so that its gradient is the sum of theirs.

    Attributes:
        names: All its names in the model; the first is the one in `named_parameters()`.
        stages: The stages.
        ranks: Positions in the pipeline group of the ranks that hold it, the one that counts it first.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


class Cut:
    """A model of which this rank keeps some stages.

    Args:
        module: The whole model, on all ranks alike. Parameters of other stages are freed, in place.
        trunk: The layers.
        observation: Where everything else belongs.
        layers_per_stage: How many layers each stage gets.
        stage_ranks: The rank, as a position in the pipeline group, of each stage.
        rank: This rank.
        device: Where stages compute.

    Attributes:
        stage_of: The stage of each layer.
        parameter_stages: Name of each parameter -> its stages.
        tied: Name of each parameter that several ranks hold -> where it is.
    """

    def __init__(
        self,
        module: nn.Module,
        trunk: Trunk,
        observation: Observation,
        layers_per_stage: Sequence[int],
        stage_ranks: Sequence[int],
        rank: int,
        device: torch.device,
    ) -> None:
        self.module, self.trunk, self.device = module, trunk, device
        self.layers_per_stage = tuple(layers_per_stage)
        self.stage_ranks = tuple(stage_ranks)
        self.stage_of = tuple(stage for stage, count in enumerate(layers_per_stage) for _ in range(count))
        self.stages = tuple(stage for stage, owner in enumerate(stage_ranks) if owner == rank)
        self.gate, self.answers = Gate(), Answers(device)
        self.parameter_stages = {
            name: tuple(sorted({self.stage_of[index] for index in observation.parameters[name]}))
            for name, _ in module.named_parameters()
        }
        self.tied = self._find_tied()
        self._guard(observation)
        self._free(observation)
        self._hidden = self._stand_ins()

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @contextmanager
    def visited(self, visit: Any) -> Iterator[None]:
        """Let `visit` decide what happens at the doors; until it is entered, no parameter outside is to be seen."""
        if not visit.entered:
            self.hide()
        self.gate.visit = visit
        try:
            yield
        finally:
            self.gate.visit = None
            self.show()
            self.answers.forget_arguments()

    def hide(self) -> None:
        """Put ghosts before the parameters that the step reads directly, as a stage without them would see."""
        for module, name, ghost in self._hidden:
            module.__dict__[name] = ghost

    def show(self) -> None:
        """Undo `hide`."""
        for module, name, _ in self._hidden:
            module.__dict__.pop(name, None)

    def _find_tied(self) -> dict[str, TiedParameter]:
        names: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        tied = {}
        for name, parameter in self.module.named_parameters():
            stages = self.parameter_stages[name]
            ranks = tuple(dict.fromkeys(self.stage_ranks[stage] for stage in stages))
            if len(ranks) > 1:
                tied[name] = TiedParameter(tuple(names[id(parameter)]), stages, ranks)
        return tied

    def _guard(self, observation: Observation) -> None:
        for index, (name, layer, kind) in enumerate(zip(self.trunk.names, self.trunk.layers, layer_kinds(self.trunk))):
            present = self.stage_of[index] in self.stages
            guard(layer, Door(self.gate, name, kind, index, present))
            if present:
                self.answers.twins[kind] = (layer, unguarded(layer))
        for name, unit in units(self.module, self.trunk):
            present = any(self.stage_of[index] in self.stages for index in observation.units[name])
            guard(unit, Door(self.gate, name, name, None, present))

    def _free(self, observation: Observation) -> None:
        labels = {id(parameter): name for name, parameter in self.module.named_parameters()}
        gone = {key for key, name in labels.items() if not set(self.parameter_stages[name]) & set(self.stages)}
        for child in self.module.modules():
            forget_parameters(child, gone, self.device, labels)
        for index, layer in enumerate(self.trunk.layers):
            if self.stage_of[index] not in self.stages:
                self._free_buffers(layer, self.trunk.names[index], keep_constants=False)
        for name, unit in units(self.module, self.trunk, owned=False):
            if name in observation.units and not unit.__dict__["_pipeline_door"].present:
                self._free_buffers(unit, name, keep_constants=True)

    def _free_buffers(self, module: nn.Module, name: str, keep_constants: bool) -> None:
        """Free buffers, or only those that a checkpoint holds: the others are constants that any stage may read."""
        for path, child in module.named_modules(prefix=name):
            for key, value in list(child._buffers.items()):
                if value is not None and not (keep_constants and key in child._non_persistent_buffers_set):
                    del child._buffers[key]
                    child.__dict__[key] = Ghost.like(value, f"the buffer `{path}.{key}`", self.device)

    def _stand_ins(self) -> list[tuple[nn.Module, str, Ghost]]:
        """Ghosts for the parameters held here that modules which contain the layers read directly."""
        inside = {id(child) for _, unit in units(self.module, self.trunk) for child in unit.modules()}
        inside |= {id(child) for layer in self.trunk.layers for child in layer.modules()}
        return [
            (child, name, Ghost.like(parameter, f"the parameter `{name}`", self.device))
            for child in self.module.modules()
            if id(child) not in inside
            for name, parameter in child._parameters.items()
            if parameter is not None
        ]


def units(module: nn.Module, trunk: Trunk, owned: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that have parameters and neither contain the layers nor lie inside them.

    Args:
        owned: Leave out those without parameters; without it, units that have lost theirs are found by their door.
    """

    def walk(name: str, child: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if child in layers:
            return
        if any(other in layers for other in child.modules()) or not name:
            for key, grandchild in child.named_children():
                yield from walk(f"{name}.{key}" if name else key, grandchild)
        elif "_pipeline_door" in child.__dict__ if not owned else next(child.parameters(), None) is not None:
            yield name, child

    layers = set(trunk.layers)
    yield from walk("", module)


def observe(module: nn.Module, trunk: Trunk, step: Step, microbatch: Any, device: torch.device) -> Observation:
    """Play `step` once on ghosts and see where each parameter and module is used.

    Nothing is computed with parameters and nothing is communicated. What follows the layers is played as far as it
    goes without data; parameters that are not reached belong with the last layer.

    Raises:
        ValueError: If the step cannot be played up to the last layer, or calls a layer twice; says why.
    """
    watcher = _Watcher(trunk, device)
    gate = Gate(watcher)
    for index, (name, layer, kind) in enumerate(zip(trunk.names, trunk.layers, layer_kinds(trunk))):
        guard(layer, Door(gate, name, kind, index))
        watcher.answers.twins[kind] = (layer, unguarded(layer))
    for name, unit in units(module, trunk):
        guard(unit, Door(gate, name, name))
        watcher.seen.units[name] = set()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    with _named_ghosts(module, names, device), watch_parameters(watcher.note):
        try:
            step(microbatch)
        except Exception as error:
            if watcher.called != len(trunk.layers):
                raise ValueError(
                    f"cannot cut at `{trunk.path}`: playing the step on tensors without data stopped "
                    f"{watcher.where()}: {error}"
                ) from error
    if not watcher.called:
        raise ValueError(
            f"the step never calls the layers of `{trunk.path}`; name the layers that it calls: layers=..."
        )
    return _completed(module, trunk, watcher.seen)


def read_off(module: nn.Module, trunk: Trunk) -> Observation:
    """Guess from the order of registration: what is registered before the layers is used before them."""
    seen = Observation(units={name: set() for name, _ in units(module, trunk)})
    order = {name: place for place, (name, _) in enumerate(module.named_modules(remove_duplicate=False))}
    start = order[trunk.names[0]]
    last = len(trunk.layers) - 1
    labels = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        if order[owner] < start or not _inside(owner, trunk.names):
            place = 0 if order[owner] < start else last
            seen.parameters.setdefault(labels[id(parameter)], set()).add(place)
    for name, unit in seen.units.items():
        unit.add(0 if order[name] < start else last)
    return _completed(module, trunk, seen)


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
            raise ValueError(
                f"`{door.name}` is called twice or out of order, a pipeline runs each layer once, in order"
            )
        self.position, self.called = door.index, self.called + 1
        return self.answers.ask(f"the output of `{door.name}`", door.kind, module, call, args, kwargs)

    def unit(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        self.seen.units[door.name].add(self.position)
        return self.answers.ask(f"the output of `{door.name}`", door.kind, module, call, args, kwargs)


def _completed(module: nn.Module, trunk: Trunk, seen: Observation) -> Observation:
    """Add the layers' own parameters, and what was not seen: it belongs with the last layer."""
    last = len(trunk.layers) - 1
    labels = {id(parameter): name for name, parameter in module.named_parameters()}
    for index, layer in enumerate(trunk.layers):
        for parameter in layer.parameters():
            seen.parameters.setdefault(labels[id(parameter)], set()).add(index)
    for name in labels.values():
        seen.parameters.setdefault(name, {last})
    for name, unit in units(module, trunk):
        if not seen.units[name]:
            seen.units[name] = {place for p in unit.parameters() for place in seen.parameters[labels[id(p)]]}
    return seen


@contextmanager
def _named_ghosts(module: nn.Module, names: Mapping[int, str], device: torch.device) -> Iterator[None]:
    """Hide every parameter behind a ghost that knows its name."""
    hidden: list[tuple[nn.Module, str]] = []
    for child in module.modules():
        for key, value in child._parameters.items():
            if value is not None:
                name = names[id(value)]
                child.__dict__[key] = Ghost.like(value, f"the parameter `{name}`", device, name)
                hidden.append((child, key))
    try:
        yield
    finally:
        for child, key in hidden:
            del child.__dict__[key]


def _inside(owner: str, names: Sequence[str]) -> bool:
    return any(owner == name or owner.startswith(f"{name}.") for name in names)
