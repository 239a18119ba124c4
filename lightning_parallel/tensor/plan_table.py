"""The table of a sharded model: the style of each kind of module, a rank's share of it, and why it is replicated."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from torch import nn

from lightning_parallel.tensor.attention import Attention, TransformerLayer
from lightning_parallel.tensor.experts import Experts
from lightning_parallel.tensor.head import Head
from lightning_parallel.tensor.layers import Column, Row, Style, Vocab
from lightning_parallel.tensor.per_head import PerHead
from lightning_parallel.tensor.plan import Sharding
from lightning_parallel.tracing.spans import percent

__all__ = ["merge_names", "repeated_work", "sharding_rows", "sharding_table"]

Shape = tuple[int, ...]
_LITTLE = 0.5
"""Share of the parameters below which ranks mostly do the same."""


def sharding_rows(sharding: Sharding, local_shapes: dict[str, Shape]) -> list[tuple[str, ...]]:
    """Return (module, style, global shape, local shape, parameters per rank, note), one row per kind of module.

    Equal modules of repeated layers are merged. A row shows the shapes of the module's largest parameter, and counts
    the parameters of all merged modules.

    Args:
        sharding: The result of `apply_plan`.
        local_shapes: Shape of every parameter on this rank, by name.
    """
    owners: dict[str, list[str]] = {}
    for name in sharding.full_shapes:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    merged: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for owner, names in owners.items():
        largest = max(names, key=lambda name: math.prod(sharding.full_shapes[name]))
        style = _style_of(owner, names, sharding)
        # Layer numbers are replaced by `*`: modules of repeated layers with the same key share a row.
        pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", f"{owner}.")
        note = re.sub(r"(?<=\.)\d+(?=\.)", "*", sharding.plan.notes.get(owner, ""))
        key = (pattern, style, _shape(sharding.full_shapes[largest]), _shape(local_shapes[largest]), note)
        merged.setdefault(key, []).append((owner, sum(math.prod(local_shapes[name]) for name in names)))
    rows: list[tuple[str, ...]] = []
    for (_, style, full, local, note), found in merged.items():
        count = sum(count for _, count in found)
        rows.append((merge_names([owner for owner, _ in found]) or "(root)", style, full, local, f"{count:,}", note))
    return rows


def sharding_table(module: nn.Module, sharding: Sharding, ranks: int, stages: int = 1) -> Table:
    """Return the table of a model sharded over `ranks` ranks, to show before the model is split into stages."""
    local_shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    total, held = (sum(map(math.prod, shapes.values())) for shapes in (sharding.full_shapes, local_shapes))
    rows = sharding_rows(sharding, local_shapes)
    notes = list(dict.fromkeys(note for *_, note in rows if note))
    lines = [f"({number}) {note}" for number, note in enumerate(notes, 1)]
    lines += _sequence_lines(sharding)
    share = f"{held:,} of {total:,} parameters ({held / max(total, 1):.0%})"
    further = f"A rank's shards are {share}; the {stages} pipeline stages below split them further."
    lines.append(f"This rank holds {share}." if stages == 1 else further)
    advice = repeated_work(sharding)
    if advice:
        lines.append(advice)
    elif total < 1_000_000:
        lines.append(f"Note: this model has {total / 1e6:.2g} M parameters; a single device is usually faster.")
    title = f"{type(module).__name__} over {ranks} tensor-parallel ranks"
    table = Table(title=title, caption="\n".join(lines), box=box.SIMPLE_HEAD)
    table.title_justify = table.caption_justify = "left"
    for header in ("module", "style", "global", "local", "parameters\nper rank"):
        numeric = header not in ("module", "style")
        # In a narrow window long names are folded instead of truncated.
        table.add_column(header, justify="right" if numeric else "left", no_wrap=header != "module", overflow="fold")
    for path, style, *cells, note in rows:
        mark = f" ({notes.index(note) + 1})" if note else ""
        table.add_row(path, style + mark, *cells, style="dim" if style == "replicated" else None)
    return table


def repeated_work(sharding: Sharding) -> str:
    """Return advice if tensor parallelism shards little or nothing of a model; empty if it shards most of it."""
    total = sum(map(math.prod, sharding.full_shapes.values()))
    share = sum(math.prod(sharding.full_shapes[name]) for name in sharding.shards) / max(total, 1)
    if share >= _LITTLE:
        return ""
    what = f"only {percent(share)}" if share else "none"
    return (
        f"Tensor parallelism shards {what} of this model's parameters; every rank repeats the work of the rest. Use"
        ' data parallelism instead: `tensor_parallel_size=1`, or `strategy="ddp"`.'
    )


def _sequence_lines(sharding: Sharding) -> list[str]:
    """Return where the sequence is sharded, and why it is not elsewhere."""
    lines = []
    alone: dict[str, list[str]] = {}
    for region in sharding.plan.sequence_regions:
        if len(region.blocks) == 1:
            alone.setdefault(re.sub(r"\d+$", "*", region.blocks[0]), []).append(region.blocks[0])
        lines.append(f"sequence sharded in {_run(region.blocks)}")
        if region.gathered:
            names = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name) for name in region.gathered)
            lines[-1] += f"; gathered for {', '.join(names)}, which needs full sequences"
    for blocks in alone.values():
        if len(blocks) > 1:
            lines.append(f"full sequences between {', '.join(blocks)}: the model may change the hidden states there")
    whole: dict[tuple[str, str], list[str]] = {}
    for path, reason in sharding.plan.whole_sequences.items():
        whole.setdefault((re.sub(r"\d+$", "*", path), reason), []).append(path)
    lines += [f"full sequences in {merge_names(paths)}: {reason}" for (_, reason), paths in whole.items()]
    return lines


def _run(blocks: Sequence[str]) -> str:
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"


def _style_of(owner: str, names: Sequence[str], sharding: Sharding) -> str:
    """Return the name of the style that sharded the module at path `owner`, or a module around it."""
    if not any(name in sharding.shards for name in names):
        return "replicated"
    parts = owner.split(".")
    for depth in range(len(parts), -1, -1):
        style = sharding.plan.styles.get(".".join(parts[:depth]))
        if style is not None:
            return _style_name(style)
    return "replicated"


def _style_name(style: Style) -> str:
    if isinstance(style, Head):
        return "head"
    if isinstance(style, Column):
        return "column, gathered" if style.gather_output else "column"
    if isinstance(style, Row):
        return "row, input split" if style.split_input else "row"
    names = {Vocab: "vocab", Attention: "heads", PerHead: "heads", TransformerLayer: "heads, mlp", Experts: "experts"}
    return names.get(type(style), type(style).__name__)


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"


def merge_names(names: Sequence[str]) -> str:
    """Return one name: merge `layers.0.up`, ..., `layers.11.up` -> `layers.{0..11}.up`."""
    merged = []
    for parts in zip(*(name.split(".") for name in names)):
        different = sorted({int(part) for part in parts if part.isdigit()})
        merged.append(parts[0] if len(set(parts)) == 1 else f"{{{different[0]}..{different[-1]}}}")
    return ".".join(merged)
