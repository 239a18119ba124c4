"""Attention is divided by whole heads: find them, and what an attention module must know about its local ones.

The head counts are read from the module or its configuration and believed only where they fit the weights: features =
heads x head size. A layer around which no such attributes are found is divided by single features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.tensor.conversion import is_linear, is_transposed
from lightning_parallel.tensor.layers import Column, Replicate, Row, Style
from lightning_parallel.tensor.sharding import Part

__all__ = ["Heads", "complete", "gathered", "heads_of", "local_edits", "sizes_of"]

Edits = dict[str, dict[str, int]]

QUERY_NAMES = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads")
KEY_VALUE_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
SIZE_NAMES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv", "d_head")
WIDTH_NAMES = ("split_size", "embed_dim", "all_head_size", "inner_dim")


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module."""

    queries: int
    keys: int
    size: int

    def query_part(self) -> Part:
        return Part.queries(self.queries, self.size, self.keys)

    def key_part(self) -> Part:
        return self.query_part() if self.keys == self.queries else Part.keys(self.keys, self.size)


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """(in, out) features of a linear layer."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    first, second = weight.shape
    return (first, second) if is_transposed(module) else (second, first)


def heads_of(module: nn.Module, config: Any = None) -> Heads | None:
    """The heads of an attention module, from its attributes or else those of its configuration."""
    sources = [source for source in (module, getattr(module, "config", None), config) if source is not None]
    queries = _first(sources, QUERY_NAMES)
    size = _first(sources, SIZE_NAMES)
    if queries is None:
        return None
    keys = _first(sources, KEY_VALUE_NAMES) or queries
    if size is None:
        width = _first(sources, (*WIDTH_NAMES, "hidden_size", "d_model"))
        if width is None or width % queries:
            return None
        size = width // queries
    return Heads(queries, keys, size) if queries % keys == 0 else None


def _first(sources: list[Any], names: tuple[str, ...]) -> int | None:
    for source in sources:
        for name in names:
            try:
                value = getattr(source, name, None)
            except Exception:  # a configuration whose layers differ refuses to name one value
                continue
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def local_edits(module: nn.Module, heads: Heads, group: Group) -> dict[str, int]:
    """The integer attributes of an attention module that count heads or features of heads, for this rank."""
    start, stop = heads.query_part().cut(group.size)[group.rank]
    queries = (stop - start) // heads.size
    start, stop = heads.key_part().cut(group.size)[group.rank]
    keys = (stop - start) // heads.size
    values = {
        **dict.fromkeys(QUERY_NAMES, (heads.queries, queries)),
        **dict.fromkeys(KEY_VALUE_NAMES, (heads.keys, keys)),
        **dict.fromkeys(WIDTH_NAMES, (heads.queries * heads.size, queries * heads.size)),
        "num_key_value_groups": (heads.queries // heads.keys, queries // keys),
    }
    return {name: local for name, (full, local) in values.items() if vars(module).get(name) == full and local != full}


def complete(module: nn.Module, styles: MutableMapping[str, Style], edits: Edits, group: Group) -> None:
    """Let `Column` and `Row` styles inside attention modules cut whole heads, and note what the modules must know.

    Norms of single heads inside such a module see this rank's heads only: their gradients become partial. Other
    parameters, of the attention itself or of layers that see the features of all heads, keep the attention from being
    divided by heads: its layers are gathered.

    Raises:
        ValueError: If an attention has fewer heads than ranks.
    """
    for path, attention in list(module.named_modules()):
        heads = heads_of(attention)
        prefix = f"{path}." if path else ""
        inside = [prefix + name for name, child in _linear_children(attention) if prefix + name in styles]
        if heads is None or not inside or not _fits(module, inside, styles, heads):
            continue
        cut = {full: _by_heads(styles[full], module.get_submodule(full), heads) for full in inside}
        if all(cut[full] is styles[full] for full in inside):
            continue
        others = _others(attention)
        own = any(True for _ in attention.parameters(recurse=False))
        if own or any(tuple(parameter.shape) != (heads.size,) for _, parameter in others):
            styles.update({full: gathered(style) for full, style in styles.items() if full.startswith(prefix)})
            continue
        styles.update(cut)
        for name in {name.rpartition(".")[0] for name, _ in others}:
            styles.setdefault(prefix + name, Replicate(partial_gradient=True))
        edits[path] = local_edits(attention, heads, group)


def gathered(style: Style) -> Style:
    """A style for the same kind of layer with whole tensors outside of it."""
    if isinstance(style, Column):
        return Column(gather_output=True)
    return Row(split_input=True) if isinstance(style, Row) else Replicate()


def _others(attention: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters of submodules that are no linear layers, such as norms of queries and keys."""
    return [
        (f"{path}.{name}", parameter)
        for path, child in attention.named_modules()
        if path and not is_linear(child)
        for name, parameter in child.named_parameters(recurse=False)
    ]


def _linear_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, child) for name, child in module.named_children() if is_linear(child))


def _fits(module: nn.Module, inside: list[str], styles: Mapping[str, Style], heads: Heads) -> bool:
    """Whether a layer inside takes in exactly the features of all query heads, as the output of attention does."""
    closing = [full for full in inside if isinstance(styles[full], Row)]
    return any(sizes_of(module.get_submodule(full))[0] == heads.queries * heads.size for full in closing)


def _by_heads(style: Style, layer: nn.Module, heads: Heads) -> Style:
    in_features, out_features = sizes_of(layer)
    queries, keys = heads.query_part(), heads.key_part()
    if isinstance(style, Column) and not style.gather_output and style.parts is None and style.unit == 1:
        if out_features == queries.size:
            return replace(style, parts=(queries,))
        if out_features == keys.size:
            return replace(style, parts=(keys,))
        if out_features == 3 * queries.size and heads.keys == heads.queries:
            return replace(style, unit=3 * heads.size)  # query, key and value of one head after another
    if isinstance(style, Row) and not style.split_input and style.parts is None and in_features == queries.size:
        return replace(style, parts=(queries,))
    return style
