r"""Cut a live model in place: each rank keeps the layers of its stages and what is computed with before and after.

    embed   layers 0 1 2 3 4 5   norm   head
    \___ stage 0 ___/ \_______ stage 1 _____/

What is needed on several stages, such as the matrix of an embedding that is the head too, is kept on each ("tied").
Names in `state_dict` stay those of the whole model; the parameters of other stages are freed and leave ghosts behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_parallel.pipeline.absent import Answers, forget_parameters
from lightning_parallel.pipeline.ghost import Ghost
from lightning_parallel.pipeline.made_up import Forwards
from lightning_parallel.pipeline.observe import Observation
from lightning_parallel.pipeline.stage import Door, Gate, guard
from lightning_parallel.pipeline.trunk import Trunk, layer_kinds, units

__all__ = ["Cut", "TiedParameter"]


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
        self.gate, self.answers, self.forwards = Gate(), Answers(device), Forwards(module)
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
            self.forwards.restore()
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
