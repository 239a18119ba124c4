"""The cut and the choice of a schedule, as tables for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from lightning_parallel.pipeline.choose import Choice
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.simulate import Cost, simulate

__all__ = ["choice_table", "stage_table"]

_SHOWN = 8


def stage_table(engine: PipelineEngine) -> Table:
    """Stage, ranks, layers, parameters, predicted share of the time and memory; the predicted bubble below."""
    schedule, costs = engine.schedule, engine.stage_costs
    measured = any(cost.total_s for cost in costs)
    table = Table(
        title=f"{type(engine.module).__name__} in {schedule.num_stages} pipeline stages: {schedule.name}, "
        f"{schedule.num_microbatches} microbatches",
        caption=_caption(engine, costs) if measured else None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for header in ("stage", "rank", "layers", "parameters", *(["time", "activations"] if measured else [])):
        table.add_column(header, justify="left" if header == "layers" else "right")
    names, first = engine.cut.trunk.names, 0
    total_s = sum(cost.total_s for cost in costs)
    for stage, (count, cost) in enumerate(zip(engine.layers_per_stage, costs)):
        last = first + count - 1
        layers = names[first] if count == 1 else f"{names[first]} .. {names[last].rpartition('.')[2]}"
        row = [str(stage), str(schedule.stage_ranks[stage]), layers, f"{engine.stage_parameters[stage]:,}"]
        if measured:
            held = schedule.max_in_flight[schedule.stage_ranks[stage]]
            row += [f"{cost.total_s / total_s:.0%}", f"{held} x {cost.activation_bytes / 2**20:,.1f} MiB"]
        table.add_row(*row)
        first = last + 1
    return table


def _caption(engine: PipelineEngine, costs: list[Cost]) -> str:
    timeline = simulate(engine.schedule, costs)
    return f"predicted: {timeline.makespan_s * 1e3:,.1f} ms a step, bubble {timeline.bubble_fraction:.0%}"


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
