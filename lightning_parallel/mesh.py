"""Ranks, coordinates and axes of a device mesh: arithmetic only.

A mesh has four axes, outermost first. The last axis varies fastest, so tensor-parallel peers are neighbours:

    Mesh(data_parallel=2, pipeline_parallel=1, context_parallel=2, tensor_parallel=2)

        rank   data_parallel  pipeline_parallel  context_parallel  tensor_parallel
        0      0              0                  0                 0
        1      0              0                  0                 1
        2      0              0                  1                 0
        3      0              0                  1                 1
        4      1              0                  0                 0
        5      1              0                  0                 1
        6      1              0                  1                 0
        7      1              0                  1                 1

Ranks along the data axis read different samples. All other ranks read the same samples. Ranks along the data and
context axes hold the same parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, Union

__all__ = ["AXES", "CONTEXT", "DATA", "PIPELINE", "TENSOR", "Axis", "Coordinate", "Mesh", "Size"]

Axis = Literal["data_parallel", "pipeline_parallel", "context_parallel", "tensor_parallel"]
Size = Union[Literal["auto"], int]

DATA: Axis = "data_parallel"
PIPELINE: Axis = "pipeline_parallel"
CONTEXT: Axis = "context_parallel"
TENSOR: Axis = "tensor_parallel"
# Outermost first, like the order of the ranks: `coordinate`, `peers` and torch's `DeviceMesh` depend on this order.
AXES: tuple[Axis, ...] = (DATA, PIPELINE, CONTEXT, TENSOR)


class Coordinate(NamedTuple):
    """Position of one rank on every axis."""

    data_parallel: int
    pipeline_parallel: int
    context_parallel: int
    tensor_parallel: int

    def __str__(self) -> str:
        return " ".join(f"{axis.removesuffix('_parallel')}={place}" for axis, place in zip(AXES, self))


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes; their product is the number of ranks.

    Raises:
        ValueError: If a size is not a positive integer.
    """

    data_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            # `True` is an int, but a size of `True` is most likely a misplaced flag.
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"`{axis}_size` must be a positive integer or 'auto'; got {size!r}")

    @classmethod
    def resolve(cls, world_size: int, sizes: Mapping[Axis, Size]) -> Mesh:
        """Fill in `"auto"` sizes so that the product is `world_size`.

        The innermost automatic axis takes the remaining factor; further automatic axes get 1.

        Raises:
            ValueError: If the sizes cannot multiply to `world_size`.
        """
        # Build it first: its check rejects a size of 0 before the division below.
        given = cls(**{axis: size for axis, size in sizes.items() if size != "auto"})
        # Innermost first: tensor parallelism communicates most, and neighbouring ranks share a node.
        automatic = [axis for axis in reversed(AXES) if sizes.get(axis, 1) == "auto"]
        rest, remainder = divmod(world_size, given.world_size)
        if remainder or (rest != 1 and not automatic):
            asked = " x ".join(f"{axis}_size={sizes.get(axis, 1)}" for axis in AXES)
            if automatic:
                got = f"; the sizes without 'auto' multiply to {given.world_size}, which does not divide {world_size}"
                fix = ""
            else:
                got, fix = f", which multiply to {given.world_size}", ", or leave one size at 'auto'"
            raise ValueError(
                f"The axis sizes must multiply to the number of processes, {world_size}; got {asked}{got}."
                f" Change `devices`, `num_nodes` or one of the sizes{fix} [LP004]"
            )
        filled = {automatic[0]: rest} if automatic else {}
        return cls(**{**{axis: given.size(axis) for axis in AXES}, **filled})

    @property
    def world_size(self) -> int:
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.data_parallel, self.pipeline_parallel, self.context_parallel, self.tensor_parallel)

    def size(self, *axes: Axis) -> int:
        """Return the number of ranks in one group along `axes`."""
        return math.prod(getattr(self, axis) for axis in axes)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the position of global rank `rank`.

        Raises:
            ValueError: If the mesh has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"`rank` must be in [0, {self.world_size}) for {self}; got {rank}")
        places = []
        for size in reversed(self.shape):
            rank, place = divmod(rank, size)
            places.append(place)
        return Coordinate(*reversed(places))

    def rank(self, coordinate: Coordinate) -> int:
        """Return the global rank at `coordinate`; the inverse of `coordinate()`."""
        rank = 0
        for place, size in zip(coordinate, self.shape):
            rank = rank * size + place
        return rank

    def peers(self, *axes: Axis) -> list[list[int]]:
        """Return the ranks of all groups that span `axes`; together they hold every rank once.

        >>> Mesh(data_parallel=2, tensor_parallel=2).peers("tensor_parallel")
        [[0, 1], [2, 3]]
        >>> Mesh(data_parallel=2, tensor_parallel=2).peers("data_parallel")
        [[0, 2], [1, 3]]
        """
        # Positions come in the order of the ranks, so every process builds the same lists in the same order. Torch
        # requires this when processes create groups.
        fixed = [axis for axis in AXES if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for position in product(*map(range, self.shape)):
            coordinate = Coordinate(*position)
            key = tuple(getattr(coordinate, axis) for axis in fixed)
            groups.setdefault(key, []).append(self.rank(coordinate))
        return list(groups.values())
