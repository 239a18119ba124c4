"""The cut and the choice of a schedule, as tables for the terminal."""

from __future__ import annotations

from itertools import accumulate

from rich import box
from rich.table import Table

from lightning_parallel.pipeline.actions import activations_held
from lightning_parallel.pipeline.choose import Choice
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.simulate import Link, simulate
from lightning_parallel.tracing.text import bytes_text

__all__ = ["choice_table", "stage_table"]

_SHOWN = 8
_MOST_NAMES = 3


def stage_table(engine: PipelineEngine, link: Link) -> Table:
    """What each stage holds, its predicted share of the time, and its memory; the predicted step below.

    Memory is parameters, gradients, two moments of an optimizer, and the activations held at once.

    Args:
        engine: The model in stages.
        link: Between neighbours, for the prediction.
    """
    schedule, costs = engine.schedule, engine.stage_costs
    total_s = sum(cost.total_s for cost in costs)
    table = Table(
        title=f"{type(engine.module).__name__} in {schedule.num_stages} pipeline stages: {schedule.name}, "
        f"{schedule.num_microbatches} microbatches",
        caption=_caption(engine, link) if total_s else None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for header in ("stage", "rank", "modules", "parameters", *(["time", "activations"] if total_s else []), "memory"):
        table.add_column(header, justify="left" if header == "modules" else "right", no_wrap=header != "modules")
    for stage, cost in enumerate(costs):
        rank = schedule.stage_ranks[stage]
        held = max(activations_held([action for action in schedule.rows[rank] if action.stage == stage]))
        row = [str(stage), str(rank), _modules(engine, stage), f"{engine.stage_parameters[stage]:,}"]
        if total_s:
            row += [f"{cost.total_s / total_s:.0%}", f"{held} x {bytes_text(cost.activation_bytes)}"]
        table.add_row(*row, bytes_text(cost.resident_bytes + held * cost.activation_bytes))
    return table


def _modules(engine: PipelineEngine, stage: int) -> str:
    """The layers of a stage, and what it holds before and after them."""
    names, ends = engine.cut.trunk.names, [0, *accumulate(engine.layers_per_stage)]
    first, last = names[ends[stage]], names[ends[stage + 1] - 1]
    container, _, number = last.rpartition(".")
    shown = first if first == last else f"{first} .. {number if first.startswith(f'{container}.') else last}"
    outside = [
        name.rpartition(".")[0] or name
        for name, stages in engine.parameter_stages.items()
        if stage in stages and not any(name.startswith(f"{layer}.") for layer in names)
    ]
    owners = list(dict.fromkeys(outside))
    if len(owners) > _MOST_NAMES:
        owners = [*owners[: _MOST_NAMES - 1], f"{len(owners) - _MOST_NAMES + 1} more"]
    return ", ".join([*owners, shown] if stage == 0 else [shown, *owners])


def _caption(engine: PipelineEngine, link: Link) -> str:
    costs = engine.stage_costs
    timeline = simulate(engine.schedule, costs, link)
    peak = max(timeline.memory_peaks(costs))
    return (
        f"predicted: {timeline.makespan_s * 1e3:,.1f} ms a step, bubble {timeline.bubble_fraction:.0%}, "
        f"at most {bytes_text(peak)} on a rank"
    )


def choice_table(choice: Choice) -> Table:
    """The schedules that were compared, best first."""
    table = Table(title="schedules compared by simulation with measured costs", box=box.SIMPLE_HEAD)
    for header in choice.HEADER:
        table.add_column(header, justify="left" if header == "schedule" else "right")
    for row in choice.rows()[:_SHOWN]:
        table.add_row(*row)
    left_out = len(choice.candidates) - _SHOWN
    if left_out > 0:
        table.caption = f"and {left_out} slower ones"
    return table
