"""Shard rules: which part of a full tensor each rank of the tensor axis holds, and how to split, merge and reduce it.

A rule lists, for every rank, the ranges `(start, stop)` of one dimension that it holds. One form covers

    even            0..4 | 4..8
    uneven          0..3 | 3..5                        sizes that the number of ranks does not divide
    packed          0..2, 4..6 | 2..4, 6..8            fused projections: each part is split by itself
    shared          0..4 | 0..4 | 4..8                 fewer key/value heads than ranks: two ranks hold the same range
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, chain

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group

__all__ = [
    "REPLICATED",
    "Range",
    "Shard",
    "ShardPart",
    "balanced",
    "layer_of",
    "reduce_partial_",
]

Range = tuple[int, int]


def balanced(size: int, ranks: int) -> list[int]:
    """Split `size` items over `ranks` as evenly as possible; the first ranks take one more.

    >>> balanced(8, 3)
    [3, 3, 2]
    """
    share, rest = divmod(size, ranks)
    return [share + (rank < rest) for rank in range(ranks)]


def layer_of(parameters: Iterable[tuple[str, Tensor | None]], default: str) -> str:
    """Return the path of the module that has these sharded parameters, by their names in it; `default` if unknown."""
    for inner, parameter in parameters:
        name = getattr(parameter, "sharded_as", "")
        if name and name.endswith(inner):
            return name.removesuffix(inner).rstrip(".")
    return default


@dataclass(frozen=True)
class ShardPart:
    """A run of consecutive features that is split by itself, in full units.

    A fused projection has several parts in one weight, e.g. queries, keys and values.

    Attributes:
        size: Number of features.
        unit: Number of consecutive features that stay on one rank, such as the size of a head.
        groups: Number of groups of consecutive units that use the same key/value head. A rank holds full groups, or
            units of one group only. None if the units are independent of each other.
        shared: If True, ranks that work on the same group each hold all its units (key/value heads). If False, they
            split them (query heads).
    """

    size: int
    unit: int = 1
    groups: int | None = None
    shared: bool = False

    @classmethod
    def queries(cls, heads: int, head_size: int, key_value_heads: int | None = None) -> ShardPart:
        """Describe the features of `heads` query heads, in equal numbers for each of `key_value_heads`."""
        return cls(heads * head_size, head_size, key_value_heads or heads)

    @classmethod
    def keys(cls, key_value_heads: int, head_size: int) -> ShardPart:
        """Describe the features of the key or value heads; with fewer heads than ranks, several ranks hold one."""
        return cls(key_value_heads * head_size, head_size, key_value_heads, shared=True)

    def split(self, ranks: int) -> list[Range]:
        """Return the range of each rank, counted from the start of the part.

        Raises:
            ValueError: If the units do not fill the part, or a rank would be left without any.
        """
        units, rest = divmod(self.size, self.unit)
        groups = units if self.groups is None else self.groups
        if rest or units % groups:
            raise ValueError(
                f"A part must have a multiple of {groups} x {self.unit} features ({groups} equal groups of units of"
                f" {self.unit}); got {self.size}"
            )
        if units < ranks and not self.shared:
            what = "features" if self.unit == 1 else f"heads (units of {self.unit} features)"
            raise ValueError(
                f"{units} {what} cannot be sharded over {ranks} ranks: every rank needs at least one. Use a smaller"
                " tensor-parallel size."
            )
        per_group = units // groups
        # Each rank gets full groups, so that queries stay with their keys.
        if groups >= ranks:
            counts = [per_group * count for count in balanced(groups, ranks)]
            stops = [sum(counts[: rank + 1]) for rank in range(ranks)]
            return [((stop - count) * self.unit, stop * self.unit) for stop, count in zip(stops, counts)]
        # More ranks than groups: the ranks of one group share its units (keys) or split them (queries). Every query
        # head then has its key/value head on the same rank.
        ranges: list[Range] = []
        for group, holders in enumerate(balanced(ranks, groups)):
            counts = [per_group] * holders if self.shared else balanced(per_group, holders)
            start = group * per_group
            for count in counts:
                ranges.append((start * self.unit, (start + count) * self.unit))
                start += 0 if self.shared else count
        return ranges


@dataclass(frozen=True)
class Shard:
    """Rule by which one tensor is sharded over the ranks of the tensor axis.

    Attributes:
        dim: The dimension that is split; negative dimensions count from the end.
        ranges: For each rank, the ranges `(start, stop)` of that dimension that it holds, in the order of its shard.
        full_size: Extent of the full tensor along `dim`.
        sizes: Extent along `dim` on each rank.
        consecutive: Whether the shards, concatenated by rank, are the full tensor.

    Raises:
        ValueError: If the ranges of all ranks together leave a gap.
    """

    dim: int
    ranges: tuple[tuple[Range, ...], ...]
    full_size: int = field(init=False, repr=False, compare=False)
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    consecutive: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)
        flat = list(chain.from_iterable(self.ranges))
        full_size = max((stop for _, stop in flat), default=0)
        follows = sum(sizes) <= full_size and all(before[1] == after[0] for before, after in zip(flat, flat[1:]))
        # Plain attributes: layers read them in every forward, and compiled code takes them for constants.
        vars(self).update(sizes=sizes, full_size=full_size, consecutive=follows)
        # Ranges may overlap (shared heads), but an element without a holder would be lost in `merge`.
        covered = 0
        for start, stop in sorted(chain.from_iterable(self.ranges)):
            if start > covered:
                raise ValueError(
                    f"The ranges of the ranks must cover dimension {self.dim}; got none for {covered} to {start}:"
                    f" {self.ranges}"
                )
            covered = max(covered, stop)

    @classmethod
    def even(cls, dim: int, size: int, ranks: int, unit: int = 1) -> Shard:
        """Make a rule of consecutive ranges of full units, as equal as possible.

        >>> Shard.even(0, 8, 3).ranges
        (((0, 3),), ((3, 6),), ((6, 8),))
        """
        return cls.packed(dim, [ShardPart(size, unit)], ranks)

    @classmethod
    def packed(cls, dim: int, parts: Sequence[ShardPart | int], ranks: int) -> Shard:
        """Make a rule for consecutive parts, each split by itself; a plain number is a part with units of one feature.

        >>> Shard.packed(0, [4, 2], 2).ranges
        (((0, 2), (4, 5)), ((2, 4), (5, 6)))

        Raises:
            ValueError: If a part cannot be sharded over the ranks.
        """
        return _packed(dim, tuple(ShardPart(part) if isinstance(part, int) else part for part in parts), ranks)

    @staticmethod
    @cache
    def of_sizes(sizes: tuple[int, ...], dim: int = 0) -> Shard:
        """Make a rule of one range per rank, in the order of the ranks, with these sizes.

        >>> Shard.of_sizes((3, 2)).ranges
        (((0, 3),), ((3, 5),))
        """
        stops = list(accumulate(sizes))
        return Shard(dim, tuple(((stop - size, stop),) for stop, size in zip(stops, sizes)))

    def along(self, dim: int) -> Shard:
        """Return the same ranges for another dimension."""
        return self if dim == self.dim else replace(self, dim=dim)

    # ------------------------------------------------------------------------------------------------------- sizes

    @property
    def ranks(self) -> int:
        """Number of ranks that hold a shard."""
        return len(self.ranges)

    def local_size(self, rank: int) -> int:
        """Return the extent along `dim` on `rank`."""
        return self.sizes[rank]

    def full_shape(self, local_shape: Sequence[int]) -> torch.Size:
        """Return the shape of the full tensor whose shard has `local_shape`."""
        shape = list(local_shape)
        shape[self.dim] = self.full_size
        return torch.Size(shape)

    def local_shape(self, full_shape: Sequence[int], rank: int) -> torch.Size:
        """Return the shape of the shard of `rank`."""
        shape = list(full_shape)
        shape[self.dim] = self.sizes[rank]
        return torch.Size(shape)

    @cached_property
    def replicated(self) -> bool:
        """True if some element is held by more than one rank."""
        return sum(self.sizes) > self.full_size

    # --------------------------------------------------------------------------------------------- split and merge

    def split(self, full: Tensor, rank: int) -> Tensor:
        """Copy the shard of `rank` out of the full tensor; differentiable.

        Raises:
            ValueError: If `full` has another extent than the rule.
        """
        if full.shape[self.dim] != self.full_size:
            raise ValueError(
                f"The full tensor must have the extent {self.full_size} in dimension {self.dim}; got shape"
                f" {tuple(full.shape)}"
            )
        # A rank without ranges gets an empty shard.
        ranges = self.ranges[rank] or ((0, 0),)
        slices = [full.narrow(self.dim, start, stop - start) for start, stop in ranges]
        if len(slices) > 1:
            return torch.cat(slices, self.dim)
        # A view would keep the memory of the full tensor alive for as long as the shard lives.
        return slices[0].clone(memory_format=torch.contiguous_format)

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        """Assemble the full tensor from the shards of all ranks, by rank; differentiable.

        If several ranks hold an element, the first of them provides it.
        """
        sources = _sources(self)
        return torch.cat([shards[rank].narrow(self.dim, at, size) for rank, at, size in sources], self.dim)

    def owned(self, local: Tensor, rank: int) -> Tensor:
        """Return the part of a shard that no lower rank holds, so that all ranks together count each element once."""
        mine = self._owned(rank)
        # Most rules share no range, so this needs no copy.
        if sum(size for _, size, _ in mine) == self.sizes[rank]:
            return local
        slices = [local.narrow(self.dim, at, size) for at, size, _ in mine]
        return torch.cat(slices, self.dim) if slices else local.narrow(self.dim, 0, 0)

    def only_owned(self, local: Tensor, rank: int) -> Tensor:
        """Return a shard with zeros in place of the elements that a lower rank holds; differentiable."""
        mine = self._owned(rank)
        if sum(size for _, size, _ in mine) == self.sizes[rank]:
            return local
        kept = torch.zeros(self.sizes[rank], dtype=local.dtype, device=local.device)
        for at, size, _ in mine:
            kept[at : at + size] = 1
        return local * kept.view(*(-1 if at == self.dim % local.dim() else 1 for at in range(local.dim())))

    def owned_ranges(self, rank: int) -> tuple[Range, ...]:
        """Return the ranges of the full tensor that `owned` returns, in its order."""
        return tuple((start, start + size) for _, size, start in self._owned(rank))

    def _owned(self, rank: int) -> list[tuple[int, int, int]]:
        """List the owned ranges, in the order of the shard: (offset in the shard, length, start in the full tensor)."""
        # An element belongs to the first of its holders, from which `merge` also takes it.
        found, start = [], 0
        for owner, at, size in _sources(self):
            if owner == rank:
                found.append((at, size, start))
            start += size
        return sorted(found)


class _Replicated(Shard):
    """The rule of a tensor that every rank of the tensor axis holds in full."""

    def full_shape(self, local_shape: Sequence[int]) -> torch.Size:
        return torch.Size(local_shape)

    def local_shape(self, full_shape: Sequence[int], rank: int) -> torch.Size:
        return torch.Size(full_shape)

    def split(self, full: Tensor, rank: int) -> Tensor:
        return full

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0]


REPLICATED: Shard = _Replicated(0, ())
"""Rule of a tensor without a rule: `rules.get(name, REPLICATED)` splits and merges any tensor."""


# Cached: the many layers of a model have few different rules, and equal rules are then the same object.
@cache
def _packed(dim: int, parts: tuple[ShardPart, ...], ranks: int) -> Shard:
    per_rank: list[list[Range]] = [[] for _ in range(ranks)]
    offset = 0
    for part in parts:
        for ranges, (start, stop) in zip(per_rank, part.split(ranks)):
            ranges.append((offset + start, offset + stop))
        offset += part.size
    return Shard(dim, tuple(map(tuple, per_rank)))


@cache
def _sources(rule: Shard) -> tuple[tuple[int, int, int], ...]:
    """List the sources of the full tensor, in its order: (first rank that holds it, offset in that shard, length)."""
    bounds = sorted(set(chain.from_iterable(chain.from_iterable(rule.ranges))))
    found: list[tuple[int, int, int]] = []
    for start, stop in zip(bounds, bounds[1:]):
        rank, at = next(_holders(rule, start))
        # Adjacent ranges of one shard become one slice, so that `merge` copies few large slices.
        last = found[-1] if found else None
        if last is not None and last[0] == rank and last[1] + last[2] == at:
            found[-1] = (rank, last[1], last[2] + stop - start)
        else:
            found.append((rank, at, stop - start))
    return tuple(found)


def _holders(rule: Shard, element: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks that hold `element`, each with its offset in the shard."""
    for rank, ranges in enumerate(rule.ranges):
        at = 0
        for start, stop in ranges:
            if start <= element < stop:
                yield rank, at + element - start
            at += stop - start


def reduce_partial_(gradients: Mapping[str, Tensor], rules: Mapping[str, Shard], group: Group) -> None:
    """Sum partial gradients over `group`, in place, with one all-reduce per dtype and device.

    A gradient without a rule is summed in full. Of a sharded gradient only the ranges that several ranks hold are
    summed, over their holders. A rule without such ranges leaves the gradient unchanged. All ranks must pass the same
    names in the same order.

    Args:
        gradients: The gradients to sum, by parameter name.
        rules: The shard rules of the parameters, by name.
        group: The tensor-parallel group.
    """
    if group.size == 1:
        return
    # (gradient, its contribution to the message, its rule). A shared range is sent as a full tensor with zeros where
    # this rank holds nothing. One all-reduce over the group then replaces one over each set of holders.
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor, Shard | None]]] = {}
    for name, gradient in gradients.items():
        rule = rules.get(name)
        # Without shared ranges each rank has the only gradient of its shard, and there is nothing to sum.
        if rule is None or rule.replicated:
            kinds.setdefault((gradient.dtype, gradient.device), []).append(
                (gradient, gradient if rule is None else _spread(gradient, rule, group.rank), rule)
            )
    # Names come in the same order on all ranks, so the messages have the same layout.
    for entries in kinds.values():
        flat = torch.cat([whole.reshape(-1) for _, whole, _ in entries])
        comm.all_reduce_(flat, group)
        for (gradient, whole, rule), total in zip(entries, flat.split([whole.numel() for _, whole, _ in entries])):
            total = total.view(whole.shape)
            gradient.copy_(total if rule is None else rule.split(total, group.rank))


def _spread(local: Tensor, rule: Shard, rank: int) -> Tensor:
    """Return a full tensor with `local` at this rank's ranges, and zero elsewhere."""
    full = local.new_zeros(rule.full_shape(local.shape))
    at = 0
    for start, stop in rule.ranges[rank]:
        full.narrow(rule.dim, start, stop - start).copy_(local.narrow(rule.dim, at, stop - start))
        at += stop - start
    return full
