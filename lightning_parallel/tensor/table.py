"""What was sharded, as a table: one row for equal modules of repeated layers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from torch import nn

from lightning_parallel.tensor.attention import Attention, TransformerLayer
from lightning_parallel.tensor.layers import Column, Replicate, Row, Style, Vocab
from lightning_parallel.tensor.plan import Sharding

__all__ = ["sharding_rows", "sharding_table"]


def sharding_rows(sharding: Sharding, local_shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, ...]]:
    """(module, style, global shape, local shape, parameters per rank, note), equal ones of repeated layers merged.

    Args:
        sharding: What became of the model.
        local_shapes: Shape of every parameter on this rank, by name.
    """
    merged: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for name, full in sharding.full_shapes.items():
        owner, _, leaf = name.rpartition(".")
        styled = next((path for path in _ancestors(owner) if path in sharding.plan.styles), None)
        style = _style_name(sharding.plan.styles[styled]) if styled is not None and name in sharding.shards else "whole"
        if style == "whole" and leaf != "weight" and len(full) < 2:
            note = ""
        else:
            note = sharding.plan.notes.get(styled if styled is not None else owner, "")
        pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
        local = local_shapes[name]
        key = (pattern, style, _shape(full), _shape(local), note)
        merged.setdefault(key, []).append((name, math.prod(local)))
    return [
        (_merge_names([name for name, _ in found]), style, full, local, f"{sum(count for _, count in found):,}", note)
        for (_, style, full, local, note), found in merged.items()
    ]


def sharding_table(module: nn.Module, sharding: Sharding, ranks: int) -> Table:
    """The table that is shown when a model has been divided over `ranks` ranks."""
    local_shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    total = sum(math.prod(shape) for shape in sharding.full_shapes.values())
    held = sum(math.prod(shape) for shape in local_shapes.values())
    table = Table(
        title=f"{type(module).__name__} over {ranks} tensor-parallel ranks",
        caption=f"rank 0 holds {held:,} of {total:,} parameters ({held / max(total, 1):.0%})",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for header, justify in zip(
        ("parameter", "style", "global", "local", "per rank", "note"),
        ("left", "left", "right", "right", "right", "left"),
    ):
        table.add_column(header, justify=justify, no_wrap=header != "note", overflow="fold")  # type: ignore[arg-type]
    for row in sharding_rows(sharding, local_shapes):
        table.add_row(*row, style="dim" if row[1] == "whole" else None)
    return table


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def _style_name(style: Style) -> str:
    if isinstance(style, Column):
        return "column, gathered" if style.gather_output else "column"
    if isinstance(style, Row):
        return "row, input split" if style.split_input else "row"
    names = {Vocab: "vocab", Attention: "heads", TransformerLayer: "heads and MLP", Replicate: "whole"}
    return names.get(type(style), type(style).__name__)


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"


def _merge_names(names: Sequence[str]) -> str:
    """`layers.0.up`, ..., `layers.11.up` -> `layers.{0..11}.up`."""
    split = [name.split(".") for name in names]
    merged = []
    for parts in zip(*split):
        different = sorted({int(part) for part in parts if part.isdigit()})
        merged.append(parts[0] if len(set(parts)) == 1 else f"{{{different[0]}..{different[-1]}}}")
    return ".".join(merged)
