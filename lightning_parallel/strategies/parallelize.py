"""The order in which a module becomes parallel, on one screen.

    shard_tensors    equal weights -> plan -> each layer divided over the tensor axis
    cut_stages       example batch -> costs -> schedule -> the layers divided over the pipeline axis

What follows, the mean of the gradients over the replicas, is the strategy's reducer. A module that has been cut stays
cut: what became of it is kept with it and found again by the next run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.pipeline.choose import Workload, choose_schedule
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.measure import Costs
from lightning_parallel.pipeline.microbatch import Split, num_samples
from lightning_parallel.pipeline.p2p import Channels
from lightning_parallel.pipeline.partition import Balance
from lightning_parallel.pipeline.probe import measure_link
from lightning_parallel.pipeline.schedule import Schedule, build_schedule
from lightning_parallel.pipeline.simulate import Link
from lightning_parallel.strategies import replicas
from lightning_parallel.strategies.example import warn_unless_mean
from lightning_parallel.strategies.stage_table import choice_table, stage_table
from lightning_parallel.tensor.discovery import make_plan
from lightning_parallel.tensor.plan import Sharding, UserPlan, apply_plan
from lightning_parallel.tensor.table import sharding_table
from lightning_parallel.tracing.text import show

__all__ = ["Pipelining", "cut_stages", "shard_tensors"]

_MOST_TIED = 0.5
"""Share of the parameters that may be on several stages without a word."""


def shard_tensors(
    module: LightningModule, plan: UserPlan, groups: MeshGroups, device: torch.device, sequence_parallel: bool = False
) -> Sharding | None:
    """Divide `module` over the tensor axis, once.

    Raises:
        ValueError: On every rank: see `make_plan` and `apply_plan`; also if the module was cut for other ranks.
    """
    group = groups.tensor_parallel
    done: tuple[tuple[int, ...], Sharding] | None = module.__dict__.get("_tensor_sharding")
    if done is not None:
        if done[0] != group.ranks:
            raise ValueError(
                f"this module was divided over the ranks {done[0]} by an earlier run and cannot be divided over"
                f" {group.ranks}; build it anew and load a checkpoint"
            )
        return done[1]
    if group.size == 1:
        return None
    found = make_plan(module, plan, group, sequence_parallel)
    replicas.materialize(module, device)
    replicas.start_equal(module, groups.world)
    sharding = apply_plan(module, found, group)
    module.__dict__["_tensor_sharding"] = (group.ranks, sharding)
    _show(module, sharding, group.size)
    return sharding


@dataclass(frozen=True)
class Pipelining:
    """How a module is to be run in stages: see the arguments of `PipelineParallelStrategy`."""

    layers: str
    schedule: str
    num_microbatches: int | Literal["auto"]
    virtual_stages: int | None
    balance: Balance
    memory_limit_bytes: float | None
    split: Split
    weigh: Callable[[Any], float]


def cut_stages(
    module: LightningModule,
    how: Pipelining,
    groups: MeshGroups,
    device: torch.device,
    example: tuple[Callable[[Any], Any], Any] | None,
    channels: Channels | None = None,
) -> PipelineEngine | None:
    """Divide `module` over the pipeline axis, once.

    Args:
        example: A step, and the first batch for it.
        channels: Groups for messages between stages.

    Raises:
        ValueError: On every rank: see `PipelineEngine`; also if the module was cut for other ranks.
    """
    group = groups.pipeline_parallel
    engine: PipelineEngine | None = module.__dict__.get("_pipeline_engine")
    if engine is not None:
        if engine.group.ranks != group.ranks:
            raise ValueError(
                f"this module was cut into stages for the ranks {engine.group.ranks} by an earlier run and cannot be"
                f" run on {group.ranks}; build it anew and load a checkpoint"
            )
        return engine
    if group.size == 1:
        return None
    replicas.materialize(module, device)
    module.to(device)
    replicas.start_equal(module, groups.data_parallel if groups.tensor_parallel.size > 1 else groups.world)
    link = measure_link(group, device, groups.world)
    failure: Exception | None = None
    try:
        engine = _cut(module, how, groups, device, example, channels, link)
    except (TypeError, ValueError) as error:
        failure = error
    comm.raise_together(failure, groups.world)
    assert engine is not None
    module.__dict__["_pipeline_engine"] = engine
    empty = next((rank for rank, count in enumerate(_held(module, group)) if count == 0), None)
    if empty is not None:
        raise ValueError(
            f"pipeline rank {empty} would hold no parameter, with {engine.layers_per_stage} layers per stage; use fewer"
            " stages or give the layers per stage: balance=[...]"
        )
    if len(engine.tied) > _MOST_TIED * len(engine.parameter_stages):
        rank_zero_warn(
            f"{len(engine.tied)} of {len(engine.parameter_stages)} parameters are on several stages, since the step"
            f" computes with them outside of their layers (`{next(iter(engine.tied))}`, ...). A penalty on all"
            " parameters belongs into the optimizer (`weight_decay`)"
        )
    _print(stage_table(engine, link))
    return engine


def _held(module: nn.Module, group: Group) -> list[int]:
    return comm.all_gather_object(sum(1 for _ in module.parameters()), group)


def _cut(
    module: LightningModule,
    how: Pipelining,
    groups: MeshGroups,
    device: torch.device,
    example: tuple[Callable[[Any], Any], Any] | None,
    channels: Channels | None,
    link: Link,
) -> PipelineEngine:
    ranks = groups.pipeline_parallel.size
    samples = None if example is None else _samples(how.split(example[1], 1))
    if samples is not None and any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        samples //= 2  # batch normalisation needs two samples in each microbatch
    counts = _microbatch_counts(how.num_microbatches, ranks, samples)
    if example is not None:
        step, batch = example
        microbatches = how.split(batch, counts[0])
        warn_unless_mean(module, step, batch, microbatches, [how.weigh(part) for part in microbatches])
        example = (step, microbatches[0])

    def choose(costs: Costs) -> Schedule:
        workload = Workload(costs.layers, costs.prologue, costs.epilogue, measured_microbatches=counts[0], link=link)
        choice = choose_schedule(workload, ranks, counts, memory_limit_bytes=how.memory_limit_bytes)
        _print(choice_table(choice))
        return choice.best.schedule

    schedule: Schedule | Callable[[Costs], Schedule] = choose
    if how.schedule != "auto":
        schedule = build_schedule(how.schedule, ranks, counts[0], how.virtual_stages)
    return PipelineEngine(
        module,
        groups.pipeline_parallel,
        schedule,
        example=example,
        layers=how.layers,
        balance=how.balance,
        memory_cap_bytes=how.memory_limit_bytes,
        device=device,
        split=how.split,
        weigh=how.weigh,
        channels=channels,
        alike=groups.world,
    )


def _microbatch_counts(wanted: int | Literal["auto"], ranks: int, samples: int | None) -> list[int]:
    """Numbers of microbatches to choose from; the first is taken where nothing else decides."""
    if wanted != "auto":
        return [wanted]
    counts = [ranks * factor for factor in (4, 1, 2, 8)]
    fitting = [count for count in counts if samples is None or count <= samples]
    return fitting or [max(samples or 1, 1)]


def _samples(parts: list[Any]) -> int | None:
    """Samples in a batch, if it has a form in which they can be counted."""
    try:
        return sum(num_samples(part) for part in parts)
    except ValueError:
        return None


@rank_zero_only
def _print(shown: Any) -> None:
    show(shown)


@rank_zero_only
def _show(module: nn.Module, sharding: Sharding, ranks: int) -> None:
    show(sharding_table(module, sharding, ranks))
