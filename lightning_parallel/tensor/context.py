"""Tensors that are split along positions over the ranks of the context axis (context parallelism).

    rank 0   positions 0..1, 6..7    embed | norm  q, k, v   attention   project   norm  MLP | norm  head  loss
    rank 1   positions 2..5                    own positions  exchange    own positions        own positions  sum

Hidden states become pieces where the first block is entered, and stay pieces up to the loss. The rules of `piece_rules`
compute each position by itself. This module adds the rules of functions that join positions: attention, products, and
losses. Any other function gathers the tensor.

Each rank differentiates the same loss, and all gradients along the axis are partial: the mean over the ranks of the
parameters' gradients is the gradient, as under data parallelism. So a gather sums gradients in backward, and a split
pads them with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import is_backward_running, pytree
from lightning_parallel.tensor.autograd import all_gather_to_group, reduce_scatter_to_group
from lightning_parallel.tensor.context_attention import attend
from lightning_parallel.tensor.context_methods import AttentionShape, Method, balanced_rows, choose_method
from lightning_parallel.tensor.piece_rules import DROPOUTS
from lightning_parallel.tensor.pieces import Family, Piece, piece_with, whole_input
from lightning_parallel.tensor.regions import own_stream
from lightning_parallel.tensor.sharding import Shard, balanced

_MOST_FAMILIES = 256
_DIMENSIONS = 3  # of hidden states: batch, positions, features

__all__ = ["Positions", "PositionSplit", "split_input"]


class AttentionNote(NamedTuple):
    """An attention over split positions.

    Attributes:
        block: Path of the block that computes it.
        heads, kv_heads: The numbers of its heads; 0 if the block computes scores by products.
        is_causal: Whether it is causal without a mask.
    """

    block: str
    heads: int = 0
    kv_heads: int = 0
    is_causal: bool = False


@dataclass(eq=False)
class PositionSplit:
    """How the sequences of a model are split over the ranks of the context axis.

    Attributes:
        group: The ranks of the axis.
        method: How attention exchanges positions; see `ContextParallelStrategy`.
        is_causal: Whether all attention is causal without a mask.
        notes: In a trial, the attention that was computed on split sequences; None otherwise.
        block: Path of the block that was entered last.
    """

    group: Group
    method: Literal["auto"] | Method = "auto"
    is_causal: bool = False
    notes: list[AttentionNote] | None = None
    block: str = ""
    # The facts of pieces, and the decisions of their functions.
    families: dict[Any, Positions] = field(default_factory=dict, repr=False)
    decisions: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: object) -> PositionSplit:
        return self

    @property
    def is_balanced(self) -> bool:
        """Whether each rank takes positions from both ends, since causal attention costs more for later queries."""
        return self.is_causal and self.method != "ulysses"

    def rule(self, length: int) -> Shard:
        """Return the positions of each rank in a sequence; ranks of a short sequence may have none."""
        ranks = self.group.size
        return balanced_rows(length, ranks) if self.is_balanced else Shard.of_sizes(tuple(balanced(length, ranks)))

    def split(self, full: Tensor, dim: int) -> Tensor:
        """Return a tensor as a piece along `dim`; each rank keeps its positions only."""
        family = Positions.of_positions(self.rule(full.shape[dim]), self)
        return piece_with(family.cut(full, dim).contiguous(), dim % full.dim(), family)

    def note(self, heads: int = 0, kv_heads: int = 0, is_causal: bool = False) -> None:
        """Note an attention in a trial."""
        if self.notes is not None:
            self.notes.append(AttentionNote(self.block, heads, kv_heads, is_causal))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Shard,
        columns: Shard,
        mask: Tensor | None,
        is_causal: bool,
        dropout: float,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        """Return the rows of this rank of an attention; see `context_attention.attend`."""
        self.note(q.shape[-3], k.shape[-3], is_causal)
        method = self.method
        if dropout or columns.replicated:
            method = "gather"  # the only one that drops weights, and the only one for keys that all ranks have
        elif method == "auto":
            shape = AttentionShape(
                batch=_count_of(q.shape[:-3]),
                heads=q.shape[-3],
                kv_heads=k.shape[-3],
                head_size=q.shape[-1],
                value_size=v.shape[-1],
                item_bytes=q.element_size(),
                rows=rows,
                columns=columns,
                is_causal=is_causal,
            )
            method = _chosen(shape, mask is not None)
        return attend(
            q,
            k,
            v,
            rows,
            columns,
            self.group,
            mask=mask,
            is_causal=is_causal,
            scale=scale,
            dropout=dropout,
            enable_gqa=enable_gqa,
            method=method,
        )


@lru_cache(256)  # lengths may change from step to step
def _chosen(shape: AttentionShape, has_mask: bool) -> Method:
    return choose_method(shape, has_mask)


@dataclass(eq=False, kw_only=True)
class Positions(Family):
    """The facts of a piece whose sharded dimension is positions, or positions joined with other dimensions.

    Attributes:
        positions: Which positions each rank holds.
        split: How sequences are split.
        outer: The elements before positions in a joined dimension, such as the samples of a flat batch.
        inner: The elements after positions in a joined dimension.
    """

    positions: Shard
    split: PositionSplit
    outer: int = 1
    inner: int = 1

    @classmethod
    def of_positions(
        cls, positions: Shard, split: PositionSplit, outer: int = 1, inner: int = 1, is_rounded: bool = False
    ) -> Positions:
        """Return the facts of a tensor of these positions: one object for all such tensors, as they do not change."""
        key = positions, outer, inner, is_rounded
        found = split.families.get(key)
        if found is not None:
            return found
        if len(split.families) >= _MOST_FAMILIES:  # lengths may change from step to step
            split.families.clear()
            split.decisions.clear()
        extents = tuple(outer * size * inner for size in positions.sizes)
        packing = None if outer == 1 and positions.consecutive else positions
        found = split.families[key] = cls(
            extents=extents,
            group=split.group,
            packing=packing,
            positions=positions,
            split=split,
            outer=outer,
            inner=inner,
            is_rounded=is_rounded,
            decisions=split.decisions,
        )
        return found

    def rounded(self) -> Positions:
        return self.of_positions(self.positions, self.split, self.outer, self.inner, True)

    @property
    def is_of_positions(self) -> bool:
        return True

    @property
    def has_no_full_gradient(self) -> bool:
        return True

    @property
    def is_gathered_now(self) -> bool:
        # In the backward of a user's function, the other factors are partial gradients, which differ between the ranks.
        # A second run of a layer has gradients enabled.
        return is_backward_running() and not torch.is_grad_enabled()

    @property
    def extent(self) -> int:
        return self.outer * self.positions.full_size * self.inner

    @property
    def is_plain(self) -> bool:
        """Whether the sharded dimension is positions alone."""
        return self.outer == self.inner == 1

    def is_like(self, other: Family) -> bool:
        return (
            isinstance(other, Positions)
            and (self.outer, self.inner, self.positions) == (other.outer, other.inner, other.positions)
            and self.group.ranks == other.group.ranks
        )

    def cut(self, full: Tensor, dim: int) -> Tensor:
        """Return this rank's part; in backward, zeros take the place of the other parts."""
        full = full.whole() if isinstance(full, Piece) else full
        if full.requires_grad and torch.is_grad_enabled():
            return _Cut.apply(full, self, dim)
        return self.part_of_rank(full, dim, self.group.rank)

    def cut_gradient(self, full: Tensor, dim: int) -> Tensor:
        """Return the gradient of this rank's part, given a share of the full gradient on each rank."""
        full = full.whole() if isinstance(full, Piece) else full
        if self.packing is not None:
            full = torch.cat([self.part_of_rank(full, dim, rank) for rank in range(self.group.size)], dim)
        return reduce_scatter_to_group(full, self.group, dim, self.extents)

    def shared(self, full: Tensor) -> Tensor:
        return full

    def all_of(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return all_gather_to_group(own, self.group, dim, sizes)

    def summed(self, own: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks; its gradients are summed too."""
        return self.all_of(own.unsqueeze(0), 0, [1] * self.group.size).sum(0)

    def drawing(self, name: str, part: Tensor) -> AbstractContextManager[Any]:
        return own_stream(self.group, part.device) if name in DROPOUTS else nullcontext()

    def after_reshape(self, shape: torch.Size, place: int, new: torch.Size) -> tuple[int, Family] | None:
        """Find the dimension that holds all positions, in the order of the elements."""
        size = self.positions.full_size
        before = _count_of(shape[:place]) * self.outer
        after = self.inner * _count_of(shape[place + 1 :])
        if size < 2 or not before * after:
            return None
        for at, extent in enumerate(new):
            outer, no_outer = divmod(before, _count_of(new[:at]))
            inner, no_inner = divmod(after, _count_of(new[at + 1 :]))
            if not no_outer and not no_inner and outer * size * inner == extent:
                return at, self._again(self.positions, outer, inner)
        return None

    def narrowed(self, start: int, length: int) -> tuple[tuple[int, int], Family] | None:
        if not self.is_plain:
            return None
        stop, ranges = start + length, []
        own: list[tuple[int, int]] = []
        for rank, held in enumerate(self.positions.ranges):
            mine, at = [], 0
            for first, last in held:
                low, high = max(first, start), min(last, stop)
                if low < high:
                    mine.append((low - start, high - start))
                    if rank == self.group.rank:
                        own.append((at + low - first, at + high - first))
                at += last - first
            ranges.append(tuple(mine))
        # The runs of a rank follow each other in the order of positions, so a range of positions is one of the part.
        if any(one[1] != other[0] for one, other in pairwise(own)):
            return None
        offset, end = (own[0][0], own[-1][1]) if own else (0, 0)
        return (offset, end - offset), self._again(Shard(0, tuple(ranges)), 1, 1)

    def at_next_stage(self, place: int) -> Callable[[Tensor, Any], Tensor] | None:
        return SentPositions(place, self.positions, self.outer, self.inner, self.is_rounded)

    def _again(self, positions: Shard, outer: int, inner: int) -> Positions:
        return self.of_positions(positions, self.split, outer, inner, self.is_rounded)

    def runs_of_rank(self, full: Tensor, dim: int, rank: int) -> list[Tensor]:
        """Return views of the runs of positions of a rank, with positions as a dimension of its own."""
        dim %= full.dim()
        x = full if self.is_plain else full.unflatten(dim, (self.outer, self.positions.full_size, self.inner))
        return [x.narrow(dim + (not self.is_plain), at, stop - at) for at, stop in self.positions.ranges[rank]]

    def opened(self, part: Tensor, dim: int) -> Tensor:
        """Return this rank's part with positions as a dimension of its own."""
        return part.unflatten(dim, (self.outer, self.positions.sizes[self.group.rank], self.inner))

    def part_of_rank(self, full: Tensor, dim: int, rank: int) -> Tensor:
        """Return the part of a rank, perhaps as a view."""
        dim %= full.dim()
        runs = self.runs_of_rank(full, dim, rank)
        if not runs:
            return full.narrow(dim, 0, 0)
        own = runs[0] if len(runs) == 1 else torch.cat(runs, dim + (not self.is_plain))
        return own if self.is_plain else own.flatten(dim, dim + 2)

    def in_order(self, full: Tensor, dim: int) -> Tensor:
        dim %= full.dim()
        parts = full.split(self.extents, dim)
        if self.is_plain:
            return self.positions.along(dim).merge(parts)
        sizes = self.positions.sizes
        parts = [part.unflatten(dim, (self.outer, size, self.inner)) for part, size in zip(parts, sizes)]
        return self.positions.along(dim + 1).merge(parts).flatten(dim, dim + 2)


# One node for each, so that the graph of a loss has the same operations on all ranks and for any number of samples.


class _Cut(Function):
    """The full tensor -> this rank's part."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, family: Positions, dim: int) -> Tensor:
        ctx.args = family, dim
        own = family.part_of_rank(full, dim, family.group.rank)
        # One run is a view, which would keep the memory of the full tensor.
        is_view = len(family.positions.ranges[family.group.rank]) < 2
        return own.clone(memory_format=torch.contiguous_format) if is_view else own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Padded.apply(grad, *ctx.args), None, None


class _Padded(Function):
    """This rank's part -> a full tensor with zeros in place of the other parts."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, family: Positions, dim: int) -> Tensor:
        ctx.args = family, dim
        full = part.new_zeros(family.full_shape(part.shape, dim))
        offset = 0
        at = dim % part.dim() + (not family.is_plain)
        own = part if family.is_plain else family.opened(part, dim % part.dim())
        for run in family.runs_of_rank(full, dim, family.group.rank):
            run.copy_(own.narrow(at, offset, run.shape[at]))
            offset += run.shape[at]
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Cut.apply(grad, *ctx.args), None, None


@dataclass(frozen=True)
class SentPositions:
    """Makes a piece of a part that another pipeline stage has sent; see `Positions`."""

    place: int
    positions: Shard
    outer: int
    inner: int
    is_rounded: bool

    def __call__(self, part: Tensor, split: PositionSplit) -> Tensor:
        family = Positions.of_positions(self.positions, split, self.outer, self.inner, self.is_rounded)
        return piece_with(part, self.place, family)


def split_input(split: PositionSplit, block: str, dim: int, arguments: Any, is_named: bool = True) -> Any:
    """Return the arguments of a block, with hidden states that are split along positions.

    Args:
        split: How sequences are split.
        block: Path of the block.
        dim: The dimension of positions of the hidden states: the first floating-point tensor among the arguments.
        arguments: The arguments.
        is_named: Whether attention belongs to this block also if its input was split before.
    """
    if is_named:
        split.block = block
    leaves = pytree.tree_leaves(arguments)
    hidden = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    # A padding mask makes nested tensors in evaluation.
    if hidden is None or hidden.is_nested or hidden.dim() != _DIMENSIONS:
        return arguments
    # `split` gathers pieces of the tensor axis first, such as the output of a sharded embedding.
    if isinstance(hidden, Piece) and isinstance(hidden.family, Positions):
        return arguments
    split.block = block
    part = split.split(hidden, dim)
    return pytree.tree_map(lambda leaf: part if leaf is hidden else leaf, arguments)


def on_positions(forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor | None:
    """Run a linear layer, which computes each position by itself, on the own positions of its input.

    Args:
        forward: Runs the layer.
        input: Its input.

    Returns:
        The output; None if the input is not split along positions.
    """
    x = whole_input(input)
    if not isinstance(x, Piece) or not isinstance(x.family, Positions):
        return None
    own = None if x.place == x.dim() - 1 else x.valid_part
    return forward(x.whole()) if own is None else piece_with(forward(own), x.place, x.family)


def _count_of(sizes: Sequence[int]) -> int:
    return torch.Size(sizes).numel()
