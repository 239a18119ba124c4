"""A plan as a drawing: for each layout, a bar of memory with the device's limit, and a bar of the step."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from lightning_parallel.pipeline.plot import INK, MUTED, svg_rect, svg_text
from lightning_parallel.planner.layouts import Layout
from lightning_parallel.planner.plans import LayoutPlan
from lightning_parallel.tracing.spans import bytes_text, count_text, seconds_text

__all__ = ["draw_plan", "plan_page"]

_WIDTH, _MARGIN, _LABEL, _GAP, _ROW, _BAR, _FIGURE = 1440.0, 28.0, 372.0, 40.0, 40.0, 20.0, 80.0
_LETTER = 6.6  # width of a letter in the legend, in wide fonts
_MOST_LIMITS = 2.5  # where longer bars end, so that layouts that fit can be told apart
_LIMIT = "#d6336c"
_FONT = "Inter, system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
_MEMORY = {
    "parameters": "#3b70d6",
    "gradients": "#1f9d6b",
    "optimizer": "#8b5cd6",
    "activations": "#d98a1f",
    "logits": "#c2561a",
    "buckets": "#5aa9b8",
    "host": "#b8b08d",
    "reserved": "#c3cddb",
}
_STEP = {
    "compute": "#3b70d6",
    "recomputation": "#9db8ea",
    "tensor": "#8b5cd6",
    "context": "#c06cc0",
    "pipeline": "#dfe4ea",
    "cores": "#eab8c6",
    "reduction": "#1f9d6b",
    "optimizer": "#d98a1f",
    "overhead": "#6b7785",
}
_NAMES = {
    "tensor": "tensor messages",
    "context": "context messages",
    "pipeline": "bubble and transfers",
    "cores": "waiting for cores",
    "reduction": "gradient reduction",
}


def draw_plan(plan: LayoutPlan, most: int = 12) -> str:
    """Return an SVG of the best layouts, and of layouts that lack memory; at most `most` layouts."""
    shown = [layout for layout in plan.layouts if layout.memory.total][:most]
    height = 150 + _ROW * len(shown) + 40
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {_WIDTH:g} {height:g}"})
    svg.attrib |= {"width": f"{_WIDTH:g}", "height": f"{height:g}", "font-family": _FONT}
    svg.set("style", "font-variant-numeric: tabular-nums")
    SubElement(svg, "rect", {"width": "100%", "height": "100%", "fill": "#fff"})
    cluster = plan.cluster
    svg_text(svg, _MARGIN, 40, f"{plan.model} on {cluster.num_devices} x {cluster.device.name}", 20, bold=True)
    source = "parts measured" if plan.measured else "roofline model"
    svg_text(svg, _MARGIN, 62, f"{plan.precision}, {source}; best first, by samples per second", 13, MUTED)
    room = (_WIDTH - 2 * _MARGIN - _LABEL - _GAP) / 2
    left, right = _MARGIN + _LABEL, _MARGIN + _LABEL + room + _GAP
    limit = cluster.memory_bytes
    fullest = max([layout.memory.total for layout in shown], default=1.0)
    # Scale to the limit only if it tells something: bars below a twentieth of it would be too short to read.
    most_bytes = min(max(fullest, limit), _MOST_LIMITS * limit) if fullest > limit / 20 else fullest
    most_s = max([layout.step.total for layout in shown if not layout.refusal], default=1.0)
    bars = room - _FIGURE
    _legend(svg, left, room, "most memory on a rank", _MEMORY, [one.memory.by_kind() for one in shown])
    _legend(svg, right, room, "a step", _STEP, [one.step.by_kind() for one in shown])
    for place, layout in enumerate(shown):
        y = 140 + _ROW * place
        _label(svg, layout, y)
        _bar(svg, (left, y, bars), most_bytes, layout.memory.by_kind(), _MEMORY, bytes_text)
        is_over = layout.memory.total > limit
        figure = bytes_text(layout.memory.total)
        svg_text(svg, left + room, y + 15, figure, 13, _LIMIT if is_over else INK, "end")
        if layout.refusal:
            svg_text(svg, right, y + 15, "does not fit" if is_over else layout.refusal, 13, _LIMIT)
            continue
        _bar(svg, (right, y, bars), most_s, layout.step.by_kind(), _STEP, seconds_text)
        svg_text(svg, right + room, y + 15, seconds_text(layout.step.total), 13, anchor="end")
    bottom = 140 + _ROW * len(shown)
    if limit <= most_bytes:
        x = left + bars * limit / most_bytes
        line = {"x1": f"{x:.1f}", "x2": f"{x:.1f}", "y1": "134", "y2": f"{bottom:g}"}
        SubElement(svg, "line", line | {"stroke": _LIMIT, "stroke-width": "1.5", "stroke-dasharray": "4 3"})
        svg_text(svg, x, bottom + 16, f"limit {bytes_text(limit)}", 12, _LIMIT, "middle")
    else:
        svg_text(svg, left, bottom + 16, f"limit {bytes_text(limit)}, far to the right", 12, MUTED)
    indent(svg, space="")
    return tostring(svg, encoding="unicode") + "\n"


def plan_page(plan: LayoutPlan, text: str) -> str:
    """Return a self-contained HTML page: the drawing, and the plan as text."""
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(plan.model)}: plan</title>'
        f"<style>body{{margin:24px auto;max-width:{_WIDTH:g}px;font-family:{_FONT};color:{INK}}}"
        "svg{max-width:100%;height:auto}pre{overflow-x:auto;font-size:13px;line-height:1.4}</style>"
        f"{draw_plan(plan)}<pre>{html.escape(text)}</pre>\n"
    )


def _label(svg: Element, layout: Layout, y: float) -> None:
    svg_text(svg, _MARGIN, y + 10, layout.name, 13, MUTED if layout.refusal else INK, bold=not layout.refusal)
    if layout.refusal:
        return
    chunks = f" V={layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    staged = layout.mesh.pipeline_parallel > 1
    schedule = f"{layout.schedule}{chunks}, m={layout.microbatches} · " if staged else ""
    divided = f"ZeRO {layout.zero_stage} · " if layout.zero_stage else ""
    divided += f"{layout.recomputation} · " if layout.recomputation != "off" else ""
    svg_text(svg, _MARGIN, y + 25, f"{schedule}{divided}{count_text(layout.samples_per_s)} samples/s", 11, MUTED)


def _legend(
    svg: Element, x: float, room: float, title: str, colours: Mapping[str, str], bars: Sequence[Mapping[str, float]]
) -> None:
    """Name the kinds that appear in a bar, in two rows if one row is too narrow."""
    svg_text(svg, x, 88, title, 13, bold=True)
    at, y = x, 97.0
    for kind, colour in colours.items():
        if any(bar[kind] for bar in bars):
            name = _NAMES.get(kind, kind)
            length = 16 + _LETTER * len(name)
            if at + length > x + room:
                at, y = x, y + 16
            svg_rect(svg, (at, y, 11, 11), colour)
            svg_text(svg, at + 16, y + 10, name, 11, MUTED)
            at += length + 12


def _bar(
    svg: Element,
    place: tuple[float, float, float],
    most: float,
    parts: Mapping[str, float],
    colours: Mapping[str, str],
    text: Callable[[float], str],
) -> None:
    """Draw the parts one after the other from `place` (x, y) on; `most` is as long as its width."""
    x, y, width = place
    end = x + width
    for kind, value in parts.items():
        length = min(value * width / most, end - x)
        if length > 0:
            part = SubElement(svg, "g")
            svg_rect(part, (x, y, length, _BAR), colours[kind])
            SubElement(part, "title").text = f"{_NAMES.get(kind, kind)}: {text(value)}"
            x += length
    if sum(parts.values()) > 1.001 * most:
        for at in (end - 9, end - 4):  # a break shows that the bar continues
            svg_rect(svg, (at, y - 2, 2, _BAR + 4), "#fff")
