"""How numbers travel: as they are, or encoded. What may follow `|`."""

from __future__ import annotations

import abc
from collections.abc import Generator
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from lightning_parallel.compression.exchange import Request, Sum, Traffic

if TYPE_CHECKING:
    from lightning_parallel.compression.reducer import Step

__all__ = ["Codec", "Exact", "Mean", "as_bytes", "by_rank", "from_bytes", "pad"]

Mean = Generator[Request, Tensor, tuple[Tensor, Optional[Tensor]]]


class Codec(abc.ABC):
    """Encodes rows of numbers, and takes their mean over the ranks in that encoding.

    Attributes:
        linear: Whether `mean` is a linear function of the ranks' numbers.
        unbiased: Whether the expected `mean` is the mean.
        collective: What `mean` is made of.
        stochastic: Whether it draws random numbers.
    """

    linear: bool
    unbiased: bool
    collective: str
    stochastic: bool = False

    @abc.abstractmethod
    def pack(self, rows: Tensor, noise: Optional[torch.Generator] = None) -> Tensor:
        """Bytes (rows, packed) of `rows` (rows, n)."""

    @abc.abstractmethod
    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Numbers (..., n) from bytes (..., packed)."""

    @abc.abstractmethod
    def packed_bytes(self, n: int, element_bytes: int = 4) -> int:
        """Bytes of one packed row of `n` numbers of `element_bytes`."""

    @abc.abstractmethod
    def mean(self, rows: Tensor, step: Step, purpose: object, keep: bool) -> Mean:
        """The mean of `rows` (rows, n) over the ranks, watched, and what this rank contributed to it (if to `keep`).

        The mean of all ranks' contributions is the returned mean, up to rounding in the working dtype and, for casts,
        in the sum.
        """

    @abc.abstractmethod
    def mean_traffic(self, n: int, element_bytes: int, world_size: int) -> list[Traffic]:
        """The payloads of `mean` for one row of `n` numbers of `element_bytes`."""


class Exact(Codec):
    """Numbers as they are."""

    linear = True
    unbiased = True
    collective = "all_reduce"

    def pack(self, rows: Tensor, noise: Optional[torch.Generator] = None) -> Tensor:
        return as_bytes(rows)

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        return from_bytes(packed, dtype)

    def packed_bytes(self, n: int, element_bytes: int = 4) -> int:
        return element_bytes * n

    def mean(self, rows: Tensor, step: Step, purpose: object, keep: bool) -> Mean:
        total = yield Sum(rows.clone() if keep else rows)
        step.watch(total)
        return total.div_(step.group.size), rows if keep else None

    def mean_traffic(self, n: int, element_bytes: int, world_size: int) -> list[Traffic]:
        return [Traffic("all_reduce", element_bytes * n)]

    def __repr__(self) -> str:
        return "Exact()"


def as_bytes(rows: Tensor) -> Tensor:
    """The bytes of each row of a matrix."""
    return rows.contiguous().view(torch.uint8)


def from_bytes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of `dtype` from bytes, along the last dimension."""
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)


def pad(rows: Tensor, extent: int) -> Tensor:
    """Rows (rows, n) filled up with zeros to (rows, extent); the same tensor where nothing is missing."""
    missing = extent - rows.shape[1]
    return rows if missing == 0 else torch.nn.functional.pad(rows, (0, missing))


def by_rank(rows: Tensor, size: int, shard: int) -> Tensor:
    """What each of `size` ranks needs of rows (rows, n): parts of `shard` elements, (size, rows, shard)."""
    return pad(rows, size * shard).view(len(rows), size, shard).transpose(0, 1)
