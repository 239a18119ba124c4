"""The contract of a compression method, and the records of what it did."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Optional

import torch
from torch import Tensor

from lightning_parallel.comm import Group
from lightning_parallel.compression.compressor_state import Memory
from lightning_parallel.compression.feedback import CompressionError, GradientBlock
from lightning_parallel.compression.wire import (
    AllReduceRequest,
    ReduceScatterRequest,
    Requests,
    Seconds,
    StepContext,
    bytes_sent,
    estimate_bytes,
)

__all__ = ["Method", "Outcome", "ReducedBlock", "estimate_method"]


class Method(abc.ABC):
    """The way in which a reducer takes the mean of one block of gradients.

    Attributes:
        batched: True if gradients of one shape are computed together however large they are. Otherwise only small ones
            are, as it costs a copy.
    """

    batched: ClassVar[bool] = False

    @property
    def scatters(self) -> bool:
        """True if it sends less where each rank needs its shard of the mean only: `GradientBlock.shard`."""
        return False

    @property
    def separate(self) -> bool:
        """True if each gradient needs a separate block, because random draws would otherwise depend on the grouping.

        Tensor-parallel ranks that hold the same parameter may group it with different shards.
        """
        return False

    def effective_step(self, name: str, number: int, memory: Memory) -> int:
        """Return the step number by which `name` goes in step `number`; parameters in one block share it."""
        return number

    @abc.abstractmethod
    def requests(self, block: GradientBlock, step: StepContext) -> Requests:
        """Replace the block's gradients by their mean: a generator of requests, which watches what it receives."""


class ReducedBlock(NamedTuple):
    """A record of what one step did with gradients of one shape.

    Attributes:
        sent_bytes: Bytes that this rank has sent.
        shard: Elements of this rank's part of the mean, if it took no more than that.
    """

    method: Method
    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    world_size: int
    sent_bytes: int
    shard: Optional[int] = None

    @property
    def dense_bytes(self) -> int:
        """Bytes that one rank sends for the plain mean, by a ring all-reduce, or reduce-scatter for shards."""
        payload_bytes = len(self.names) * math.prod(self.shape) * self.dtype.itemsize
        kind = AllReduceRequest if self.shard is None else ReduceScatterRequest
        return round(bytes_sent(kind, payload_bytes, self.world_size))


class Outcome(NamedTuple):
    """A record of one step that was applied.

    Attributes:
        seconds: Where its time went; None if somebody else has taken plain means, see `Reducer.count_plain_step`.
        compression_error: The error of the means, in the steps in which it was measured.
    """

    blocks: list[ReducedBlock]
    seconds: Optional[Seconds]
    compression_error: Optional[CompressionError]


class _MetaStep:
    """A step on meta tensors: nothing is communicated, remembered or checked."""

    scale = 1.0

    def __init__(self, world_size: int, number: int) -> None:
        self.group = Group("estimate", tuple(range(world_size)), 0, None)
        self.number = number
        self.memory = Memory()

    def watch(self, received: Tensor) -> None:
        """Do nothing."""

    def average_(self, total: Tensor) -> Tensor:
        """Return `total`."""
        return total


def estimate_method(
    method: Method, name: str, shape: Sequence[int], dtype: torch.dtype, world_size: int, number: int
) -> float:
    """Return the bytes that one rank would send for one gradient in step `number`, by a run on meta tensors."""
    gradient = torch.empty(tuple(shape), dtype=dtype, device="meta")
    block = GradientBlock((name,), [gradient], effective_step=number)
    return estimate_bytes(method.requests(block, _MetaStep(world_size, number)), world_size)
