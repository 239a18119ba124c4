"""The head of a model: a column-parallel layer whose output stays sharded until code reads it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import FakeTensor
from lightning_parallel.tensor.autograd import copy_to_group
from lightning_parallel.tensor.context import on_positions
from lightning_parallel.tensor.layers import Column, ColumnLinear, Style, gather_features, on_shards
from lightning_parallel.tensor.low_rank import layer_sizes, low_rank_of
from lightning_parallel.tensor.pieces import Piece, whole_input
from lightning_parallel.tensor.tiled_logits import TiledLogits

__all__ = ["NOTE", "Head", "find_heads", "gathered_heads"]

NOTE = (
    "during training the logits stay sharded by class; cross-entropy works on the shards, any other access gathers them"
)


@dataclass(frozen=True)
class Head(Column):
    """Column-parallel head whose output stays sharded until code reads it; see `Piece`.

    Outside training its output is gathered at once.
    """

    gather_output: bool = True

    @classmethod
    def like(cls, style: Column) -> Head:
        """Return the style of a head with the parts of `style`."""
        return cls(True, style.parts, style.unit, style.sequence_dim)

    def gathered(self) -> Column:
        """Return the style that gathers its output at once."""
        return Column(True, self.parts, self.unit, self.sequence_dim)

    def apply(self, module: nn.Module, group: Group, kind: type[ColumnLinear] | None = None) -> None:
        """See `Style`."""
        if low_rank_of(module) is not None:  # the addition of its terms would read the output
            self.gathered().apply(module, group)
            return
        super().apply(module, group, HeadLinear)


class HeadLinear(ColumnLinear):
    """Linear layer whose output reads as the full one; see `Head`.

    Attributes:
        in_tiles: Whether its part of the output has no data either; see `TiledLogits`.
    """

    in_tiles = False

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        # A graph returns ordinary tensors.
        if torch.compiler.is_dynamo_compiling():
            return self.in_graph(input)
        if type(input) is not Tensor and (split := on_positions(self.forward, input)) is not None:
            return split
        rule, group = self.feature_rule, self.group
        y = self._unmade(input) if self.in_tiles else None
        if y is None:
            # The parent class would gather at once; the part becomes a `Piece` below.
            self.gather_output = False
            try:
                y = super().forward(input)
            finally:
                self.gather_output = True
        # Without gradients, and outside training, sharded logits would save nothing.
        is_trained = self.training and torch.is_grad_enabled() and y.requires_grad
        # A placeholder for another stage's tensor has no data, so a gather only changes its shape.
        is_plain = type(y) in (Tensor, FakeTensor, TiledLogits) and not y.is_meta
        # Only for consecutive classes does a gather of the pieces give the order of the full layer.
        if group.size == 1 or not (is_trained and is_plain and rule.consecutive):
            return gather_features(y, rule, group)
        return Piece.of(y, group, -1, rule.sizes)

    def _unmade(self, input: Tensor) -> Tensor | None:
        """Return this rank's part of the output without data; None if it is computed at once."""
        x = whole_input(input)
        is_piece, rule = isinstance(x, Piece), self.feature_rule
        is_plain = is_piece or (type(x) is Tensor and not x.is_meta)
        if not (is_plain and self.training and torch.is_grad_enabled() and rule.consecutive) or self.region is not None:
            return None
        hidden = copy_to_group(x.whole() if isinstance(x, Piece) else x, self.group)
        with on_shards(hidden, self):
            # Views: outside this layer, in a step, the parameters read as full ones.
            weight, bias = (None if each is None else each.view_as(each) for each in self.own_parameters())
            assert weight is not None
            weight = weight.t() if self.transposed else weight
        return TiledLogits.of(hidden, weight, bias, max(rule.sizes))


def find_heads(module: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return the style `Head` for the layers with gathered outputs that may be the head, by path.

    Candidates stand outside repeated layers, where an output goes into the next layer. A layer that is no head loses
    nothing as `Head`: the code that reads its output gathers it.

    Args:
        module: The model.
        styles: The styles of its layers, by path.
    """
    lists = tuple(f"{path}." for path, child in module.named_modules() if isinstance(child, nn.ModuleList))
    gathered = {
        path: style
        for path, style in styles.items()
        if isinstance(style, Column) and style.gather_output and not path.startswith(lists)
        if low_rank_of(module.get_submodule(path)) is None
    }
    kinds = {path: (re.sub(r"\d+", "*", path), layer_sizes(module.get_submodule(path))) for path in gathered}
    repeated = Counter(kinds.values())
    return {path: Head.like(style) for path, style in gathered.items() if repeated[kinds[path]] == 1}


def gathered_heads(styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return the heads among `styles` as layers whose output is gathered at once, by path."""
    return {path: style.gathered() for path, style in styles.items() if isinstance(style, Head)}
