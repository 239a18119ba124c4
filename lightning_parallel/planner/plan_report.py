"""A plan as text: a table of the layouts, the best three with reasons, and YAML to paste into a Lightning project."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_parallel.mesh import AXES, CONTEXT, Axis
from lightning_parallel.pipeline.schedule import SCHEDULES
from lightning_parallel.planner.layouts import Layout
from lightning_parallel.planner.plans import LayoutPlan
from lightning_parallel.planner.rank_memory import state_variants
from lightning_parallel.tracing.spans import bandwidth_text, bytes_text, count_text, seconds_text

__all__ = ["layout_yaml", "plan_text", "strategy_arguments"]

WORTHWHILE = 0.05
"""Share of a step that compression must save: smaller savings are within the error of the predictions."""

_MEANINGS = {
    "compute": "computation",
    "recomputation": "recomputation of activations",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "pipeline": "pipeline bubble",
    "cores": "waiting for a CPU core",
    "reduction": "gradient all-reduce",
    "optimizer": "optimizer step",
    "overhead": "Trainer overhead",
}


def plan_text(plan: LayoutPlan, rows: int = 20, with_yaml: bool = True) -> RenderableType:
    """Return tables and text for a terminal: the best layouts with YAML, or the best layout without YAML."""
    described = plan.best if with_yaml else plan.best[:1]
    shown = plan.layouts[:rows]
    possible = [layout for layout in shown if not layout.refusal]
    advice = [Text(text, style="bold") for text in (simplest(plan), compression(plan)) if text]
    parts: list[RenderableType] = [_alone(plan), *advice, *([_table(plan, possible)] if possible else [])]
    refused = [(layout, layout.refusal) for layout in shown if layout.refusal]
    # The description of a layout further below includes its warnings.
    warned = [(layout, text) for layout in possible if layout not in described for text in layout.warnings]
    parts += [Text(line, style="yellow") for line in _listed("warnings", warned, _axes(plan.layouts))]
    parts += [Text(line, style="dim") for line in _listed("impossible", refused, _axes(plan.layouts))]
    if len(plan.layouts) > rows:
        parts.append(Text(f"and {len(plan.layouts) - rows} more layouts (`--rows`)", style="dim"))
    parts += [Text(f"note: {note}", style="dim") for note in plan.notes]
    if plan.obstacle:
        parts.append(Text(plan.obstacle, style="bold red"))
    for place, layout in enumerate(described, 1):
        parts += [Text(f"\n{place}. {layout.name}", style="bold green"), Text(reason(plan, layout))]
        parts += [Text(f"   warning: {warning}", style="yellow") for warning in layout.warnings]
        if with_yaml:
            parts.append(Text(layout_yaml(plan, layout), style="cyan"))
    return Group(*parts)


def _alone(plan: LayoutPlan) -> Text:
    layout, limit = plan.alone, plan.cluster.memory_bytes
    if not layout.memory.total:
        return Text(f"{plan.model} cannot run on one device: {layout.refusal}")
    kinds = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in layout.memory.by_kind().items() if size)
    fits = "fits" if layout.memory.total <= limit else "does not fit"
    checkpointing = "" if layout.recomputation == "off" else f" and {_option(layout)}"
    width = {"16-true": 2, "bf16-true": 2, "64-true": 8}.get(plan.precision, 4)
    variants = state_variants(layout.memory, width, plan.cluster.num_devices)
    listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in variants.items())
    return Text(
        f"{plan.model} {fits} one {plan.cluster.device.name}: it needs {bytes_text(layout.memory.total)} of"
        f" {bytes_text(limit)} with {plan.precision}{checkpointing} ({kinds}).\n"
        f"Parameters, gradients and optimizer state on each of {plan.cluster.num_devices} replicas: {listed}."
    )


def simplest(plan: LayoutPlan) -> str:
    """Recommend one device or plain DDP if it does as well as the best layout; empty otherwise."""
    if not plan.best:
        return ""
    best, alone = plan.best[0], plan.alone
    if best.mesh.world_size > 1 and not alone.refusal and alone.samples_per_s >= best.samples_per_s:
        return (
            f"Use one device: it is predicted to reach {count_text(alone.samples_per_s)} samples/s."
            f" {plan.cluster.num_devices} devices reach {count_text(best.samples_per_s)} samples/s."
        )
    if _is_plain(best):
        return 'Use DDP (`strategy="ddp"`): the model fits each device, and no other layout is faster.'
    return ""


def compression(plan: LayoutPlan) -> str:
    """Say whether compressed gradients make the best layout faster; empty if replicas reduce no full gradients."""
    best = plan.best[0] if plan.best else plan.alone
    if best.compressed_reduction_s is None:
        return ""
    data, pipeline, context, tensor = best.mesh.shape
    step_s = best.step.total - best.step.reduction + best.compressed_reduction_s
    verb = "pays" if step_s < (1 - WORTHWHILE) * best.step.total else "does not pay"
    # Like `collective_s`, prefer the link measured in a group of this size to the link of two ranks.
    link = plan.cluster.group_links.get(data * context) or plan.cluster.link_of(
        pipeline * tensor if context == 1 else tensor, data * context
    )
    return (
        f"Gradient compression {verb} in layout 1, over {bandwidth_text(link.bytes_per_s)} between replicas: a step"
        f" takes {seconds_text(step_s)} with `Quantize(8)` and {seconds_text(best.step.total)} without it."
    )


def _is_plain(layout: Layout) -> bool:
    """Return whether Lightning's DDP runs the layout."""
    mesh = layout.mesh
    is_ddp = mesh.data_parallel == mesh.world_size > 1
    return is_ddp and not layout.zero_stage and layout.recomputation == layout.tiled == "off"


def _option(layout: Layout) -> str:
    return f"activation_checkpointing={layout.recomputation!r}"


_COLUMNS = ("schedule", "memory", "step", "bubble", "comm", "samples/s")


def _table(plan: LayoutPlan, layouts: Sequence[Layout]) -> Table:
    """Show each layout as a row of figures, in at most 80 columns."""
    cluster = plan.cluster
    source = "layers measured on this machine" if plan.measured else "times by the roofline model"
    table = Table(
        title=f"{plan.model} on {cluster.num_devices} x {cluster.device.name}, {source}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=0,
        show_edge=False,
    )
    axes = _axes(plan.layouts)
    outer, *inner = [axis.removesuffix("_parallel") for axis in axes]
    for header in (f"{outer} x {inner[0]}\nx {' x '.join(inner[1:])}", *_COLUMNS):
        is_long = header == "schedule"
        table.add_column(header, justify="left" if is_long else "right", overflow="fold", no_wrap=not is_long)
    for layout in layouts:
        table.add_row(*_row(layout, axes), style="green" if layout in plan.best else None)
    return table


def _axes(layouts: Sequence[Layout]) -> list[Axis]:
    """Return the axes to show: a plan without context parallelism does not name it."""
    return [axis for axis in AXES if axis != CONTEXT or any(layout.mesh.size(CONTEXT) > 1 for layout in layouts)]


def _sizes(layout: Layout, axes: Sequence[Axis]) -> str:
    return " x ".join(str(layout.mesh.size(axis)) for axis in axes)


def _row(layout: Layout, axes: Sequence[Axis]) -> Iterator[str]:
    step = layout.step
    yield _sizes(layout, axes)
    chunks = f"V={layout.virtual_stages} " if layout.virtual_stages > 1 else ""
    yield f"{layout.schedule} {chunks}m={layout.microbatches}" if layout.mesh.pipeline_parallel > 1 else ""
    zero = f"\nZeRO {layout.zero_stage}" if layout.zero_stage else ""
    again = f"\n{layout.recomputation}" if layout.recomputation != "off" else ""
    yield bytes_text(layout.memory.total) + zero + again
    yield seconds_text(step.total)
    yield f"{step.pipeline / step.total:.0%}"
    yield f"{(step.tensor + step.context + step.reduction) / step.total:.0%}"
    yield count_text(layout.samples_per_s)


def _listed(title: str, told: Sequence[tuple[Layout, str]], axes: Sequence[Axis]) -> Iterator[str]:
    """Yield a line for each text, with all layouts that share it."""
    layouts: dict[str, list[Layout]] = {}
    for layout, text in told:
        layouts.setdefault(text, []).append(layout)
    if layouts:
        yield f"{title}:"
    for text, same in layouts.items():
        yield f"  {', '.join(_sizes(layout, axes) for layout in same)}: {text}"


def reason(plan: LayoutPlan, layout: Layout) -> str:
    """Describe the speed of a layout, and the largest parts of its step and memory, in a sentence or two."""
    kinds = sorted(layout.step.by_kind().items(), key=lambda item: -item[1])
    shares = [f"{_MEANINGS[kind]} {seconds / layout.step.total:.0%}" for kind, seconds in kinds[:3] if seconds]
    memory = sorted(layout.memory.by_kind().items(), key=lambda item: -item[1])
    place = plan.best.index(layout) if layout in plan.best else 0
    against = ""
    if place:
        less = 1 - layout.samples_per_s / plan.best[0].samples_per_s
        against = f", {less:.0%} fewer than layout 1"
    elif len(plan.best) > 1:
        more = layout.samples_per_s / plan.best[1].samples_per_s - 1
        against = f", {more:.0%} more than layout 2"
    again = ""
    if layout.recomputation != "off":
        added = layout.step.recomputation / (layout.step.total - layout.step.recomputation)
        again = f"\n   {_option(layout)} makes it fit, and adds {added:.0%} to the step."
    return (
        f"   {count_text(layout.samples_per_s)} samples/s{against}.\n   Step time"
        f" {seconds_text(layout.step.total)} (global batch {layout.samples:,}): {', '.join(shares)}.\n"
        f"   Most memory on a rank: {bytes_text(layout.memory.total)} of {bytes_text(plan.cluster.memory_bytes)},"
        f" mainly {memory[0][0]} ({bytes_text(memory[0][1])}).{again}"
    )


def strategy_arguments(layout: Layout) -> dict[str, Any]:
    """Return the arguments of `HybridParallelStrategy` with which a Trainer runs a layout."""
    arguments: dict[str, Any] = {f"{axis}_size": layout.mesh.size(axis) for axis in _axes([layout])}
    pipeline = layout.mesh.pipeline_parallel
    if layout.method:
        arguments["context_parallel_method"] = layout.method
    if pipeline > 1:
        arguments |= {"schedule": layout.schedule, "num_microbatches": layout.microbatches}
        if layout.virtual_stages > 1:
            arguments["virtual_stages"] = layout.virtual_stages
        if layout.warmup != SCHEDULES[layout.schedule].warmup:
            arguments["warmup"] = layout.warmup
        arguments["balance"] = list(layout.layers_per_stage)
    if layout.zero_stage:
        arguments["zero_stage"] = layout.zero_stage
    if layout.recomputation != "off":
        arguments["activation_checkpointing"] = layout.recomputation
    if layout.tiled != "off":
        arguments["tiled"] = layout.tiled
    return arguments


def layout_yaml(plan: LayoutPlan, layout: Layout) -> str:
    """Return the part of a LightningCLI project's configuration that runs a layout."""
    cluster = plan.cluster
    lines = [
        "trainer:",
        f"  accelerator: {'cpu' if cluster.device.name == 'CPU' else 'gpu'}",
        f"  devices: {cluster.ranks_per_node}",
        f"  num_nodes: {cluster.num_nodes}",
        f"  precision: {plan.precision}",
    ]
    if layout.accumulated != plan.accumulated:
        lines.append(f"  accumulate_grad_batches: {layout.accumulated}")
    per_replica = layout.samples // (layout.mesh.data_parallel * layout.accumulated)
    loads = f"# each of the {layout.mesh.data_parallel} replicas gets batches of {per_replica}"
    if layout.mesh.world_size == 1 and layout.recomputation == layout.tiled == "off":
        return "\n".join([*lines, "  strategy: auto"])
    if _is_plain(layout):
        return "\n".join([*lines, "  strategy: ddp", loads])
    lines += ["  strategy:", "    class_path: lightning_parallel.HybridParallelStrategy", "    init_args:"]
    lines += [f"      {name}: {value}" for name, value in strategy_arguments(layout).items()]
    return "\n".join([*lines, loads])
