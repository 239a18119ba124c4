"""The plan of a pipeline: how a model is split, as plain data. Made by `analyze`, applied by `PipelineEngine`.

plan = analyze(module, group.size, example=(step, microbatch))
print(plan)                                  # a line per stage
plan.save("pipeline_plan.json")              # the same plan after a restart, without measuring again
PipelineEngine(module, PipelinePlan.load("pipeline_plan.json"), group)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_parallel.pipeline.recomputation import Recomputed
from lightning_parallel.pipeline.schedule import (
    SCHEDULES,
    Schedule,
    activations_held,
    build_schedule,
    peak_activation_bytes,
)
from lightning_parallel.pipeline.search import Costs
from lightning_parallel.pipeline.simulate import Cost, Link
from lightning_parallel.pipeline.skips import Skip, Skips

__all__ = ["PipelinePlan", "PlannedParameter", "TiedParameter", "TensorLayout", "device_of"]

# Raise it when `to_dict` changes: an old file is refused instead of misread.
_VERSION = 2
_MOST_ACTIONS = 1 << 20
"""The most actions of a kind in the schedule of a plan from a file: the schedule is built, whatever a file says."""


@dataclass(frozen=True)
class TensorLayout:
    """Describes a tensor that passes from one stage to the next.

    Attributes:
        shape: Shape for one microbatch of the example.
        dtype: Name of the dtype in torch, such as `float32`.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class PlannedParameter:
    """Describes a parameter and the stages that hold it.

    Attributes:
        stages: Stages that compute with the parameter. A tied parameter has several.
        count: Number of elements in this rank's tensor-parallel shard.
        num_bytes: Size of these elements in bytes.
        is_trained: Whether the parameter requires a gradient.
    """

    stages: tuple[int, ...]
    count: int
    num_bytes: int
    is_trained: bool


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several stages compute with, so that its gradient is the sum of their gradients.

    Attributes:
        names: All its names in the model, beginning with its name in `named_parameters()`.
        stages: The stages.
        ranks: Positions in the pipeline group of the ranks that hold it; the first of them counts it.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class PipelinePlan:
    """Describes how the layers of a model are split into pipeline stages, with the predicted costs.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import PipelineParallelStrategy, PipelinePlan

        plan = PipelinePlan.load("pipeline_plan.json")  # written by `plan.save`
        print(plan.layers_per_stage)
        trainer = Trainer(devices=2, strategy=PipelineParallelStrategy(pipeline_plan=plan))
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        model: Class of the model.
        container: Dotted name of the container of repeated layers.
        layers: Name of each repeated layer, in the order of their calls.
        layers_per_stage: Number of layers in each stage.
        schedule: Actions of each rank.
        parameters: Stages and size of each parameter, by name.
        buffer_stages: Stages that hold each buffer, by name.
        module_stages: Stages that call each module that is not in the container, by name.
        costs: Cost of each layer. Seconds are 0 if nothing was measured.
        boundaries: Tensors that pass from each stage to the next. Empty if no example was given.
        skips: Additional inputs of each stage, besides the arguments of its first layer. Empty if no example was given.
        link: Link between neighbouring ranks.
        request: Request that the plan answers. A plan is used again only for the same request.
        direct: Parameters that the step uses without calling a module. None if unknown.
        stopped: Reason that the model was not traced to its end, unless only data was missing.
        recomputed: How backward computes layers again, by name. `costs` include it.
    """

    model: str
    container: str
    layers: tuple[str, ...]
    layers_per_stage: tuple[int, ...]
    schedule: Schedule
    parameters: Mapping[str, PlannedParameter]
    buffer_stages: Mapping[str, tuple[int, ...]]
    module_stages: Mapping[str, tuple[int, ...]]
    costs: Costs
    boundaries: tuple[tuple[TensorLayout, ...], ...] = ()
    skips: Skips = ()
    link: Link = field(default_factory=Link)
    request: Mapping[str, Any] = field(default_factory=dict)
    direct: tuple[str, ...] | None = None
    stopped: str = ""
    recomputed: Mapping[str, Recomputed] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, over all ranks."""
        return self.schedule.num_stages

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each layer."""
        return tuple(stage for stage, count in enumerate(self.layers_per_stage) for _ in range(count))

    @property
    def stage_costs(self) -> list[Cost]:
        """Cost of each stage for a microbatch as large as the example; without seconds if none were measured."""
        return self.costs.per_stage(self.layers_per_stage)

    @property
    def parameter_stages(self) -> dict[str, tuple[int, ...]]:
        """The stages that compute with each parameter, by name."""
        return {name: parameter.stages for name, parameter in self.parameters.items()}

    def stage_parameters(self, stage: int) -> int:
        """Return the elements of the parameters that a stage computes with."""
        # A tied parameter counts on each of its stages, because each holds it.
        return sum(parameter.count for parameter in self.parameters.values() if stage in parameter.stages)

    def held_parameters(self, stage: int) -> list[PlannedParameter]:
        """Return the parameters that a rank holds for a stage.

        A layer that is called several times may be in several stages of a rank. The first of these stages holds its
        parameters.
        """
        ranks = self.schedule.stage_ranks
        return [
            parameter
            for parameter in self.parameters.values()
            if stage == next((other for other in parameter.stages if ranks[other] == ranks[stage]), None)
        ]

    def activation_bytes(self, stages: Sequence[int]) -> float:
        """Return the most bytes of activations that some stages of a rank hold at once."""
        row = self.schedule.rows[self.schedule.stage_ranks[stages[0]]] if stages else ()
        mine = [action for action in row if action.stage in stages]
        return Cost.peak_activation_bytes(mine, self.stage_costs)

    def host_bytes(self, stages: Sequence[int]) -> float:
        """Return the most bytes of activations of some stages of a rank that wait in host memory at once."""
        row = self.schedule.rows[self.schedule.stage_ranks[stages[0]]] if stages else ()
        mine = [action for action in row if action.stage in stages]
        return peak_activation_bytes(mine, [cost.host_bytes for cost in self.stage_costs])

    def peak_bytes(self, rank: int, costs: Costs | None = None) -> float:
        """Return the most bytes that a rank holds: resident memory and activations.

        Args:
            rank: Position in the pipeline group.
            costs: Costs of the layers; None takes the costs of the plan.
        """
        stages = (costs or self.costs).per_stage(self.layers_per_stage)
        resident = sum(stages[stage].resident_bytes for stage in self.schedule.stages_of(rank))
        return resident + Cost.peak_activation_bytes(self.schedule.rows[rank], stages)

    def in_flight(self, stage: int) -> int:
        """Return the most microbatches whose activations `stage` holds at once."""
        # A rank with several stages may hold the most of each at different times, so each is counted by itself.
        row = self.schedule.rows[self.schedule.stage_ranks[stage]]
        return max(activations_held([action for action in row if action.stage == stage]), default=0)

    def layer_range(self, stage: int) -> tuple[str, str]:
        """Return the names of the first and the last layer of a stage."""
        ends = [0, *accumulate(self.layers_per_stage)]
        return self.layers[ends[stage]], self.layers[ends[stage + 1] - 1]

    def repeats_text(self, stage: int) -> str:
        """Tell how often a stage calls its layers, if it or an earlier one calls some of them again; else empty."""
        starts = [0, *accumulate(self.layers_per_stage)]
        names = self.layers[starts[stage] : starts[stage + 1]]
        if set(names) & {*self.layers[: starts[stage]]}:
            return f" again ({len(names)} calls)" if len(set(names)) < len(names) else " again"
        return f" ({len(names)} calls)" if len(set(names)) < len(names) else ""

    def outer_names(self, stage: int) -> list[str]:
        """Return the modules of a stage that have parameters and are not in the layer stack."""
        # The dot matters: `layers.1` is no prefix of `layers.10`.
        inside = tuple(f"{layer}." for layer in self.layers)
        owners = []
        for name, parameter in self.parameters.items():
            if stage in parameter.stages and not name.startswith(inside):
                # A parameter of the model itself has no owner: it is listed by its own name.
                owners.append(name.rpartition(".")[0] or name)
        return list(dict.fromkeys(owners))

    def outline(self) -> dict[str, Any]:
        """Return the values on which ranks must agree to run the plan together."""
        schedule = self.schedule
        return {
            "layers": (self.container, self.layers, self.layers_per_stage),
            "schedule": (schedule.name, schedule.num_ranks, schedule.num_microbatches, schedule.virtual_stages),
            "stages of parameters": self.parameter_stages,
            "stages of modules": dict(self.module_stages),
            "skip connections": self.skips,
            "recomputed layers": dict(self.recomputed),
        }

    def check_fits(self, module: nn.Module, num_ranks: int) -> None:
        """Check that the plan was made for a model of this structure and for this number of ranks.

        Raises:
            ValueError: If the model or the number of ranks differs from the plan, or the plan contradicts itself.
        """
        if self.schedule.num_ranks != num_ranks:
            raise ValueError(
                f"The pipeline plan must be for the {num_ranks} ranks of the pipeline group; got one for"
                f" {self.schedule.num_ranks}. Make a new plan (`analyze`)"
            )
        found = dict(module.named_parameters())
        names = sorted(found.keys() ^ self.parameters.keys())
        known = [name for name in found if name in self.parameters]
        names += [name for name in known if self.parameters[name].count not in _sizes(found[name])]
        if names:
            raise ValueError(
                f"The pipeline plan must be for this model; got one for `{self.model}`: `{names[0]}` and"
                f" {len(names) - 1} other parameters are missing, new, or of another size. Make a new plan (`analyze`)"
            )
        # With all names: a shared layer may stand in the plan under another name than its first.
        contradiction = self._contradiction({name for name, _ in module.named_modules(remove_duplicate=False)})
        if contradiction:
            # Such as a file that was edited by hand: ranks would hold one part and run another, and wait without end.
            raise ValueError(f"The pipeline plan contradicts itself: {contradiction}. Make a new plan (`analyze`)")

    def _contradiction(self, modules: set[str]) -> str:
        """Return the contradiction within the plan, for a model with the named `modules`; empty if there is none."""
        counts, num_layers, num_stages = list(self.layers_per_stage), len(self.layers), self.num_stages
        are_counts = all(isinstance(count, int) and count >= 1 for count in counts)
        if not are_counts or len(counts) != num_stages or sum(counts) != num_layers:
            return f"it gives {num_stages} stages with {num_layers} layers the numbers of layers {counts}"
        if len(self.costs.layers) != num_layers:
            return f"it has the costs of {len(self.costs.layers)} layers for {num_layers} layers"
        missing = {*self.layers, *self.recomputed} - modules
        if missing:
            return f"it names the layer `{min(missing)}`, which the model does not have"
        placed = {name: parameter.stages for name, parameter in self.parameters.items()}
        for name, stages in {**placed, **self.buffer_stages, **self.module_stages}.items():
            if name in placed and not stages or not all(0 <= stage < num_stages for stage in stages):
                return f"it puts `{name}` on the stages {list(stages)} of {num_stages}"
        for layer, stage in zip(self.layers, self.stage_of):
            for name, stages in placed.items():
                if name.startswith(f"{layer}.") and stage not in stages:
                    return f"it runs `{layer}` on stage {stage}, and holds `{name}` on {list(stages)}"
        if self.skips and len(self.skips) != num_stages or any(self.skips[:1]):
            return f"it has the skip connections of {len(self.skips)} stages for {num_stages}, or some into the first"
        for skip in chain(*self.skips):
            if skip.name not in (placed if skip.is_parameter else modules):
                return f"it sends {skip}, which is not in the model"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as values that JSON can hold.

        Raises:
            ValueError: If the schedule of the plan is a custom table of actions.
        """
        # A schedule is saved as the arguments of its builder, which are much shorter than its rows.
        schedule = self.schedule
        if schedule.name not in SCHEDULES:
            raise ValueError(f"The schedule of a saved plan must be one of {list(SCHEDULES)}; got `{schedule.name}`")
        return {
            "version": _VERSION,
            "model": self.model,
            "container": self.container,
            "layers": list(self.layers),
            "layers_per_stage": list(self.layers_per_stage),
            "schedule": {
                "name": schedule.name,
                "num_ranks": schedule.num_ranks,
                "num_microbatches": schedule.num_microbatches,
                "virtual_stages": schedule.virtual_stages,
                "warmup": schedule.warmup,
            },
            "parameters": {name: asdict(parameter) for name, parameter in self.parameters.items()},
            "buffer_stages": {name: list(stages) for name, stages in self.buffer_stages.items()},
            "module_stages": {name: list(stages) for name, stages in self.module_stages.items()},
            "costs": asdict(self.costs),
            "boundaries": [[asdict(tensor) for tensor in tensors] for tensors in self.boundaries],
            "skips": [[list(skip) for skip in skips] for skips in self.skips],
            "link": {"latency_s": self.link.latency_s, "bytes_per_s": _finite(self.link.bytes_per_s)},
            "request": dict(self.request),
            "direct": None if self.direct is None else list(self.direct),
            "stopped": self.stopped,
            "recomputed": dict(self.recomputed),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PipelinePlan:
        """Read a plan that `to_dict` wrote.

        Raises:
            ValueError: If the plan is of another version, or an entry is missing.
        """
        if not isinstance(data, Mapping) or data.get("version") != _VERSION:
            found = data.get("version") if isinstance(data, Mapping) else data
            raise ValueError(f"The pipeline plan must have version {_VERSION}; got {found!r}")
        try:
            return cls._read(data)
        # A file may hold any JSON, so each of these means a wrong entry.
        except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                "The pipeline plan must be a file of `save`; got a missing entry or one of another kind"
                f" ({type(error).__name__}: {error})"
            ) from error

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> PipelinePlan:
        built = data["schedule"]
        sizes = built["num_ranks"], built["num_microbatches"], built["virtual_stages"]
        if not all(type(size) is int and size > 0 for size in sizes) or prod(sizes) > _MOST_ACTIONS:
            raise ValueError(f"it names {sizes[0]} ranks and {sizes[1]} microbatches for its schedule")
        costs = data["costs"]
        link = data["link"]
        # JSON turns tuples into lists; turn them back, so that a plan equals itself after writing and reading.
        return cls(
            model=data["model"],
            container=data["container"],
            layers=tuple(data["layers"]),
            layers_per_stage=tuple(data["layers_per_stage"]),
            schedule=build_schedule(
                built["name"], built["num_ranks"], built["num_microbatches"], built["virtual_stages"], built["warmup"]
            ),
            parameters={
                name: PlannedParameter(**{**parameter, "stages": tuple(parameter["stages"])})
                for name, parameter in data["parameters"].items()
            },
            buffer_stages={name: tuple(stages) for name, stages in data["buffer_stages"].items()},
            module_stages={name: tuple(stages) for name, stages in data["module_stages"].items()},
            costs=Costs(
                tuple(Cost(**layer) for layer in costs["layers"]), Cost(**costs["prologue"]), Cost(**costs["epilogue"])
            ),
            boundaries=tuple(
                tuple(TensorLayout(tuple(tensor["shape"]), tensor["dtype"]) for tensor in tensors)
                for tensors in data["boundaries"]
            ),
            skips=tuple(tuple(Skip(*skip) for skip in skips) for skips in data["skips"]),
            link=Link(link["latency_s"], float("inf") if link["bytes_per_s"] is None else link["bytes_per_s"]),
            request=dict(data["request"]),
            direct=None if data.get("direct") is None else tuple(data["direct"]),
            stopped=data.get("stopped", ""),
            recomputed=dict(data.get("recomputed", {})),
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> PipelinePlan:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: If the file is missing, or has no plan of this version.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"The pipeline plan `{path}` must be readable; got {error}") from error

    def __str__(self) -> str:
        schedule = self.schedule
        count = schedule.num_microbatches
        lines = [f"{self.model} in {self.num_stages} pipeline stages: {schedule.name}, {count} microbatches"]
        for stage, cost in enumerate(self.stage_costs):
            first, last = self.layer_range(stage)
            parameters = self.stage_parameters(stage)
            outer = "".join(f" + {name}" for name in self.outer_names(stage))
            seconds = f", {cost.total_s * 1e3:.3g} ms per microbatch" if cost.total_s else ""
            place = f"stage {stage} on rank {schedule.stage_ranks[stage]}"
            if self.skips and self.skips[stage]:
                outer += "".join(f", receives {skip}" for skip in self.skips[stage])
            lines.append(
                f"  {place}: {first} .. {last}{self.repeats_text(stage)}{outer}, {parameters:,} parameters{seconds}"
            )
        return "\n".join(lines)


def _finite(value: float) -> float | None:
    # JSON has no infinity: Python would write a word that other readers refuse.
    return None if value == float("inf") else value


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the parameters that have data; the CPU if none has data."""
    # The meta device does not tell where deferred parameters will be.
    for parameter in module.parameters():
        if not parameter.is_meta:
            return parameter.device
    return torch.device("cpu")


def _sizes(parameter: nn.Parameter) -> set[int]:
    """Return the sizes that a plan may give for a parameter: the size of a shard on any tensor-parallel rank."""
    # Layers are sharded before a plan is made, perhaps unevenly, and all ranks take the plan of one rank.
    rule = getattr(parameter, "shard_rule", None)
    if rule is None or not parameter.numel():
        return {parameter.numel()}
    return {parameter.numel() // parameter.shape[rule.dim] * size for size in rule.sizes}
