"""Which part of a full tensor each rank of the tensor axis holds: cut, put together, counted once.

A rule lists, for every rank, the pieces `(start, stop)` of one dimension. That one form covers

    even            0..4 | 4..8
    uneven          0..3 | 3..5                        sizes that do not divide
    packed          0..2, 4..6 | 2..4, 6..8            fused projections: each part is cut by itself
    shared          0..4 | 0..4 | 4..8                 fewer key/value heads than ranks: several ranks hold one piece
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group

__all__ = ["Part", "Range", "Shard", "balanced", "reduce_partial_"]

Range = tuple[int, int]


def balanced(size: int, ranks: int) -> list[int]:
    """Split `size` items over `ranks` as evenly as possible; the first ranks take one more.

    >>> balanced(8, 3)
    [3, 3, 2]
    """
    share, rest = divmod(size, ranks)
    return [share + (rank < rest) for rank in range(ranks)]


@dataclass(frozen=True)
class Part:
    """A run of features that is cut by itself, in whole units.

    Attributes:
        size: Number of features.
        unit: Features that stay together, such as the size of a head.
        groups: Number of groups of consecutive units that need the same key/value head; a rank holds whole groups,
            or units of one group only. None when the units do not depend on each other.
        shared: Whether ranks that work on one group each hold all of its units (key/value heads), instead of
            dividing them (query heads).
    """

    size: int
    unit: int = 1
    groups: int | None = None
    shared: bool = False

    @classmethod
    def queries(cls, heads: int, head_size: int, key_value_heads: int | None = None) -> Part:
        """The features of `heads` query heads, of which equal numbers use each of `key_value_heads`."""
        return cls(heads * head_size, head_size, key_value_heads or heads)

    @classmethod
    def keys(cls, key_value_heads: int, head_size: int) -> Part:
        """The features of the key or value heads; held by several ranks where there are fewer of them than ranks."""
        return cls(key_value_heads * head_size, head_size, key_value_heads, shared=True)

    def cut(self, ranks: int) -> list[Range]:
        """The piece of each rank, counted from the start of the part.

        Raises:
            ValueError: If the units do not fill the part, or a rank would be left without any.
        """
        units, rest = divmod(self.size, self.unit)
        groups = units if self.groups is None else self.groups
        if rest or units % groups:
            raise ValueError(
                f"{self.size} features cannot be divided into whole units of {self.unit} in {groups} equal groups"
            )
        if units < ranks and not self.shared:
            what = "features" if self.unit == 1 else f"heads (units of {self.unit} features)"
            raise ValueError(
                f"{units} {what} cannot be divided over {ranks} ranks: every rank needs at least one."
                " Use a smaller tensor-parallel size."
            )
        per_group = units // groups
        if groups >= ranks:
            counts = [per_group * count for count in balanced(groups, ranks)]
            stops = [sum(counts[: rank + 1]) for rank in range(ranks)]
            return [((stop - count) * self.unit, stop * self.unit) for stop, count in zip(stops, counts)]
        pieces: list[Range] = []
        for group, holders in enumerate(balanced(ranks, groups)):
            counts = [per_group] * holders if self.shared else balanced(per_group, holders)
            start = group * per_group
            for count in counts:
                pieces.append((start * self.unit, (start + count) * self.unit))
                start += 0 if self.shared else count
        return pieces


@dataclass(frozen=True)
class Shard:
    """How one tensor is divided over the ranks of the tensor axis.

    Attributes:
        dim: The dimension that is cut; negative dimensions count from the end.
        ranges: For each rank, the pieces `(start, stop)` of that dimension that it holds, in the order it holds them.

    Raises:
        ValueError: If the pieces of all ranks together leave a gap.
    """

    dim: int
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        covered = 0
        for start, stop in sorted(piece for pieces in self.ranges for piece in pieces):
            if start > covered:
                raise ValueError(f"no rank holds {covered} to {start} of dimension {self.dim}: {self.ranges}")
            covered = max(covered, stop)

    @classmethod
    def even(cls, dim: int, size: int, ranks: int, unit: int = 1) -> Shard:
        """Consecutive pieces of whole units, as equal as possible.

        >>> Shard.even(0, 8, 3).ranges
        (((0, 3),), ((3, 6),), ((6, 8),))
        """
        return cls.packed(dim, [Part(size, unit)], ranks)

    @classmethod
    def packed(cls, dim: int, parts: Sequence[Part | int], ranks: int) -> Shard:
        """Parts that follow each other, each cut by itself; a plain number is a part with units of one feature.

        >>> Shard.packed(0, [4, 2], 2).ranges
        (((0, 2), (4, 5)), ((2, 4), (5, 6)))

        Raises:
            ValueError: If a part cannot be divided over the ranks.
        """
        return _packed(dim, tuple(Part(part) if isinstance(part, int) else part for part in parts), ranks)

    def along(self, dim: int) -> Shard:
        """The same cut of another dimension."""
        return self if dim == self.dim else replace(self, dim=dim)

    # ------------------------------------------------------------------------------------------------------- sizes

    @property
    def ranks(self) -> int:
        return len(self.ranges)

    @cached_property
    def full_size(self) -> int:
        """Extent of the full tensor along `dim`."""
        return max(stop for pieces in self.ranges for _, stop in pieces)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Extent along `dim` on each rank."""
        return tuple(sum(stop - start for start, stop in pieces) for pieces in self.ranges)

    def local_size(self, rank: int) -> int:
        """Extent along `dim` on `rank`."""
        return self.sizes[rank]

    def full_shape(self, local_shape: Sequence[int]) -> torch.Size:
        """Shape of the full tensor of which a shard has `local_shape`."""
        shape = list(local_shape)
        shape[self.dim] = self.full_size
        return torch.Size(shape)

    def local_shape(self, full_shape: Sequence[int], rank: int) -> torch.Size:
        """Shape of the shard of `rank`."""
        shape = list(full_shape)
        shape[self.dim] = self.sizes[rank]
        return torch.Size(shape)

    @cached_property
    def replicated(self) -> bool:
        """Whether some element is held by more than one rank."""
        return sum(self.sizes) > self.full_size

    @cached_property
    def consecutive(self) -> bool:
        """Whether the shards, one after another, are the full tensor."""
        flat = [piece for pieces in self.ranges for piece in pieces]
        return not self.replicated and all(before[1] == after[0] for before, after in zip(flat, flat[1:]))

    # --------------------------------------------------------------------------------------------- cut and put together

    def split(self, full: Tensor, rank: int) -> Tensor:
        """The shard of `rank`, in memory of its own; differentiable.

        Raises:
            ValueError: If `full` does not have the extent that the rule is for.
        """
        if full.shape[self.dim] != self.full_size:
            raise ValueError(
                f"expected extent {self.full_size} in dimension {self.dim} of the full tensor,"
                f" found shape {tuple(full.shape)}"
            )
        pieces = [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        return (
            torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from the shards of all ranks, by rank; differentiable.

        An element that several ranks hold is taken from the first of them.
        """
        sources = _sources(self)
        return torch.cat([shards[rank].narrow(self.dim, at, size) for rank, at, size in sources], self.dim)

    def owned(self, local: Tensor, rank: int) -> Tensor:
        """The part of a shard that no lower rank holds, so that over all ranks each element appears once."""
        mine = sorted((at, size) for owner, at, size in _sources(self) if owner == rank)
        if sum(size for _, size in mine) == self.sizes[rank]:
            return local
        pieces = [local.narrow(self.dim, at, size) for at, size in mine]
        return torch.cat(pieces, self.dim) if pieces else local.narrow(self.dim, 0, 0)


@cache
def _packed(dim: int, parts: tuple[Part, ...], ranks: int) -> Shard:
    per_rank: list[list[Range]] = [[] for _ in range(ranks)]
    offset = 0
    for part in parts:
        for pieces, (start, stop) in zip(per_rank, part.cut(ranks)):
            pieces.append((offset + start, offset + stop))
        offset += part.size
    return Shard(dim, tuple(map(tuple, per_rank)))


@cache
def _sources(rule: Shard) -> tuple[tuple[int, int, int], ...]:
    """Where the full tensor comes from, in its order: (first rank that holds it, offset in that shard, length)."""
    cuts = sorted({bound for pieces in rule.ranges for piece in pieces for bound in piece})
    found: list[tuple[int, int, int]] = []
    for start, stop in zip(cuts, cuts[1:]):
        rank, at = next(_holders(rule, start))
        last = found[-1] if found else None
        if last is not None and last[0] == rank and last[1] + last[2] == at:
            found[-1] = (rank, last[1], last[2] + stop - start)
        else:
            found.append((rank, at, stop - start))
    return tuple(found)


def _holders(rule: Shard, element: int) -> Iterator[tuple[int, int]]:
    """The ranks that hold `element`, each with its offset in the shard."""
    for rank, pieces in enumerate(rule.ranges):
        at = 0
        for start, stop in pieces:
            if start <= element < stop:
                yield rank, at + element - start
            at += stop - start


def reduce_partial_(gradients: Mapping[str, Tensor], rules: Mapping[str, Shard], group: Group) -> None:
    """Sum gradients that each rank of `group` holds a part of, in place, with one all-reduce per dtype and device.

    A gradient without a rule is summed as a whole. Of a sharded one the pieces that several ranks hold are summed
    over their holders; one without such pieces is left alone. Every rank must give the same names in the same order.

    Args:
        gradients: The gradients to sum, by parameter name.
        rules: How parameters are sharded, by name.
        group: The tensor-parallel group.
    """
    if group.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor, Shard | None]]] = {}
    for name, gradient in gradients.items():
        rule = rules.get(name)
        if rule is None or rule.replicated:
            kinds.setdefault((gradient.dtype, gradient.device), []).append(
                (gradient, gradient if rule is None else _spread(gradient, rule, group.rank), rule)
            )
    for entries in kinds.values():
        flat = torch.cat([whole.reshape(-1) for _, whole, _ in entries])
        comm.all_reduce_(flat, group)
        for (gradient, whole, rule), total in zip(entries, flat.split([whole.numel() for _, whole, _ in entries])):
            total = total.view(whole.shape)
            gradient.copy_(total if rule is None else rule.split(total, group.rank))


def _spread(local: Tensor, rule: Shard, rank: int) -> Tensor:
    """A full tensor that holds `local` where this rank has it, and zero elsewhere."""
    full = local.new_zeros(rule.full_shape(local.shape))
    at = 0
    for start, stop in rule.ranges[rank]:
        full.narrow(rule.dim, start, stop - start).copy_(local.narrow(rule.dim, at, stop - start))
        at += stop - start
    return full
