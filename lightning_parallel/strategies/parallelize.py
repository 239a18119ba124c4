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
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.initialization import materialize
from lightning_parallel.pipeline.analyze import analyze
from lightning_parallel.pipeline.choose import Workload, choose_schedule
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.measure import measure_link, truncated
from lightning_parallel.pipeline.microbatch import SplitBatch, num_samples
from lightning_parallel.pipeline.p2p import MessageGroups
from lightning_parallel.pipeline.partition import Balance
from lightning_parallel.pipeline.pipeline_plan import Costs, PipelinePlan
from lightning_parallel.pipeline.schedule import Schedule, build_schedule
from lightning_parallel.pipeline.simulate import Link
from lightning_parallel.strategies import replicas
from lightning_parallel.strategies.example import warn_unless_mean
from lightning_parallel.strategies.stage_table import choice_table
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import Sharding, UserPlan, apply_plan, materialize_shards, sharding_table
from lightning_parallel.terminal import show

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
    state = ParallelState.of(module)
    if state.sharding is not None:
        if state.tensor_ranks != group.ranks:
            raise ValueError(
                f"this module was divided over the ranks {state.tensor_ranks} by an earlier run and cannot be divided "
                f"over {group.ranks}; build it anew and load a checkpoint"
            )
        return state.sharding
    if group.size == 1:
        return None
    found = make_plan(module, plan, group, sequence_parallel)
    replicas.start_equal(module, groups.world)
    sharding = apply_plan(module, found, group)
    materialize_shards(module, device, sharding, group)  # divided first: the full model may not fit on the device
    state.tensor_ranks = group.ranks
    state.sharding = sharding
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
    split_batch: SplitBatch
    microbatch_weight: Callable[[Any], float]


def cut_stages(
    module: LightningModule,
    how: Pipelining,
    groups: MeshGroups,
    device: torch.device,
    example: tuple[Callable[[Any], Any], Any] | None,
    message_groups: MessageGroups | None = None,
) -> PipelineEngine | None:
    """Divide `module` over the pipeline axis, once.

    Args:
        module: The user's module, whole; only what this rank owns is moved to the device.
        how: The strategy's arguments.
        groups: The mesh's groups.
        device: Where the stages compute.
        example: A step, and the first batch for it.
        message_groups: Groups for messages between stages.

    Raises:
        ValueError: On every rank: see `analyze`; also if the module was cut for other ranks.
    """
    group = groups.pipeline_parallel
    state = ParallelState.of(module)
    if state.engine is not None:
        if state.engine.group.ranks != group.ranks:
            raise ValueError(
                f"this module was cut into stages for the ranks {state.engine.group.ranks} by an earlier run and cannot"
                f" be run on {group.ranks}; build it anew and load a checkpoint"
            )
        return state.engine
    if group.size == 1:
        return None
    replicas.start_equal(module, groups.data_parallel if groups.tensor_parallel.size > 1 else groups.world)
    _move_buffers(module, device)
    link = measure_link(group, device, groups.world)
    plan: PipelinePlan | None = None
    failure: Exception | None = None
    try:
        plan = _plan(module, how, groups, device, example, link)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        failure = error
    comm.raise_together(failure, groups.world)
    assert plan is not None
    engine = PipelineEngine(
        module,
        plan,
        group,
        device=device,
        split_batch=how.split_batch,
        microbatch_weight=how.microbatch_weight,
        message_groups=message_groups,
    )
    state.engine = engine
    materialize(module, device)
    module.to(device)
    _check_cut(engine, groups)
    return engine


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers to the device, where the first batch is: steps compute masks and positions from both."""
    for child in module.modules():
        for name, value in child._buffers.items():
            if value is not None and not value.is_meta:
                child._buffers[name] = value.to(device)


def _check_cut(engine: PipelineEngine, groups: MeshGroups) -> None:
    held = comm.all_gather_object(sum(1 for _ in engine.module.parameters()), engine.group)
    if 0 in held:
        raise ValueError(
            f"pipeline rank {held.index(0)} would hold no parameter, with {engine.plan.layers_per_stage} layers per"
            " stage; use fewer stages or give the layers per stage: balance=[...]"
        )
    if len(engine.tied) > _MOST_TIED * len(engine.plan.parameters):
        rank_zero_warn(
            f"{len(engine.tied)} of {len(engine.plan.parameters)} parameters are on several stages, since the step"
            f" computes with them outside of their layers (`{next(iter(engine.tied))}`, ...). A penalty on all"
            " parameters belongs into the optimizer (`weight_decay`)"
        )


def _plan(
    module: LightningModule,
    how: Pipelining,
    groups: MeshGroups,
    device: torch.device,
    example: tuple[Callable[[Any], Any], Any] | None,
    link: Link,
) -> PipelinePlan:
    ranks = groups.pipeline_parallel.size
    samples = None if example is None else _samples(how.split_batch(example[1], 1))
    if samples is not None and any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        samples //= 2  # batch normalisation needs two samples in each microbatch
    counts = _microbatch_counts(how.num_microbatches, ranks, samples)
    microbatches: list[Any] = []
    if example is not None:
        microbatches = how.split_batch(example[1], counts[0])

    def choose(costs: Costs) -> Schedule:
        workload = Workload(costs.layers, costs.prologue, costs.epilogue, measured_microbatches=counts[0], link=link)
        choice = choose_schedule(workload, ranks, counts, memory_limit_bytes=how.memory_limit_bytes)
        _print(choice_table(choice))
        return choice.best.schedule

    schedule: Schedule | Callable[[Costs], Schedule] = choose
    if how.schedule != "auto":
        schedule = build_schedule(how.schedule, ranks, counts[0], how.virtual_stages)
    plan = analyze(
        module,
        ranks,
        schedule,
        example=None if example is None else (example[0], microbatches[0]),
        layers=how.layers,
        balance=how.balance,
        memory_limit_bytes=how.memory_limit_bytes,
        device=device,
        link=link,
        sync_group=groups.world,
    )
    if example is not None:
        weights = [how.microbatch_weight(part) for part in microbatches]
        warn_unless_mean(module, truncated(module, plan, device, example[0]), example[1], microbatches, weights)
    return plan


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
