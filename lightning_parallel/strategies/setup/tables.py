"""Prints tables of a pipeline: the contents of each stage, and the compared schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich import box
from rich.table import Table

from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.pipeline.simulate import simulate
from lightning_parallel.planner.rank_memory import RankMemory, planned_memory
from lightning_parallel.tracing.spans import bytes_text, seconds_text, show

__all__ = ["print_table", "show_stages", "stage_table"]


@rank_zero_only
def print_table(shown: Any) -> None:
    """Print a table once for all ranks."""
    show(shown)


def show_stages(
    plan: PipelinePlan, copies: float, replicas: int, zero_stage: int, sums_in_fp32: bool, offloads: bool
) -> None:
    """Print the stage table on rank zero."""
    print_table(stage_table(plan, copies, replicas, zero_stage, sums_in_fp32, offloads))


_MOST_NAMES = 3


def stage_table(
    plan: PipelinePlan,
    copies: float,
    replicas: int = 1,
    zero_stage: int = 0,
    sums_in_fp32: bool = True,
    offloads: bool = False,
) -> Table:
    """Return a table with the contents, predicted time and memory of each stage, and the predicted step below.

    Memory covers parameters, gradients, optimizer state, activations in flight, and buckets on their way between
    replicas. The caption lists the memory of the fullest stage by kind.

    Args:
        plan: How the model is split.
        copies: Bytes for each byte of a trained parameter.
        replicas: Number of replicas of each stage.
        zero_stage: ZeRO stage of the replicas.
        sums_in_fp32: Whether gradients of 16-bit parameters are added in fp32.
        offloads: Whether the optimizer steps in host memory.
    """
    schedule = plan.schedule
    costs = plan.stage_costs
    memories = [
        planned_memory(plan, [stage], copies, replicas, zero_stage, sums_in_fp32, offloads)
        for stage in range(len(costs))
    ]
    total_s = sum(cost.total_s for cost in costs)
    table = Table(
        title=f"{plan.model} in {schedule.num_stages} pipeline stages: {schedule.name}, "
        f"{schedule.num_microbatches} microbatches",
        caption=_caption(plan, memories) if total_s else None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for header in ("stage", "rank", "modules", "parameters", *(["time", "activations"] if total_s else []), "memory"):
        table.add_column(header, justify="left" if header == "modules" else "right", no_wrap=header != "modules")
    for stage, cost in enumerate(costs):
        row = [str(stage), str(schedule.stage_ranks[stage]), _modules(plan, stage), f"{plan.stage_parameters(stage):,}"]
        if total_s:
            row.append(f"{cost.total_s / total_s:.0%}")
            row.append(f"{plan.in_flight(stage)} x {bytes_text(cost.activation_bytes)}")
        table.add_row(*row, bytes_text(memories[stage].total))
    return table


def _modules(plan: PipelinePlan, stage: int) -> str:
    """Return the names of the modules of a stage, and of tensors that skip to it from earlier stages."""
    first, last = plan.layer_range(stage)
    container, _, number = last.rpartition(".")
    shown = first
    if first != last:
        shown = f"{first} .. {number if first.startswith(f'{container}.') else last}"
    shown += plan.repeats_text(stage)
    owners = plan.outer_names(stage)
    if len(owners) > _MOST_NAMES:
        owners = [*owners[: _MOST_NAMES - 1], f"{len(owners) - _MOST_NAMES + 1} more"]
    skips = len(plan.skips[stage]) if plan.skips else 0
    gets = f"; receives {plan.skips[stage][0]}{f' and {skips - 1} more' if skips > 1 else ''}" if skips else ""
    return ", ".join([*owners, shown] if stage == 0 else [shown, *owners]) + gets


def _caption(plan: PipelinePlan, memories: Sequence[RankMemory]) -> str:
    costs = [
        # The plan assumed an optimizer state, which is known by now.
        replace(cost, resident_bytes=memory.total - memory.activations)
        for cost, memory in zip(plan.stage_costs, memories)
    ]
    timeline = simulate(plan.schedule, costs, plan.link)
    fullest = max(range(len(memories)), key=lambda stage: memories[stage].total)
    kinds = [f"{kind} {bytes_text(size)}" for kind, size in memories[fullest].by_kind().items() if size]
    return (
        f"Prediction: step time {seconds_text(timeline.makespan_s)}, bubble {timeline.bubble_fraction:.0%}, at most"
        f" {bytes_text(max(timeline.memory_peaks(costs)))} per rank.\n"
        f"Memory of stage {fullest}: {', '.join(kinds)}."
    )
