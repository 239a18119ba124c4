"""What a reducer does with the gradients of one block, and what it has done."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Optional

import torch

from lightning_parallel.compression.exchange import Exchange, Operation, Seconds, Traffic, sent_bytes
from lightning_parallel.compression.feedback import Block, working_dtype
from lightning_parallel.compression.fidelity import Fidelity
from lightning_parallel.compression.memory import Memory

if TYPE_CHECKING:
    from lightning_parallel.compression.reducer import Step

__all__ = ["Method", "Outcome", "Part"]


class Method(abc.ABC):
    """What a reducer does with the gradients of one block.

    Attributes:
        batched: Whether gradients of one shape are computed together however large they are. Otherwise only small ones
            are, as it costs a copy.
    """

    batched: ClassVar[bool] = False

    @property
    def scatters(self) -> bool:
        """Whether it can leave out what other ranks need of the mean, and then sends less: `Block.shard`."""
        return False

    @property
    def alone(self) -> bool:
        """Whether a gradient must be a block by itself: what is drawn for it would depend on its company otherwise.

        The company of a parameter that tensor-parallel ranks hold alike may differ from rank to rank.
        """
        return False

    def turn(self, name: str, number: int, memory: Memory) -> int:
        """By which number parameter `name` goes in step `number`; a block holds parameters with the same."""
        return number

    @abc.abstractmethod
    def exchange(self, block: Block, step: Step) -> Exchange:
        """Replace the block's gradients by their mean; a generator of requests. It watches what it receives."""

    @abc.abstractmethod
    def traffic(self, shape: Sequence[int], element_bytes: int, world_size: int, step: int) -> list[Traffic]:
        """The payloads of one gradient of `shape` in step number `step`.

        Args:
            element_bytes: Of one element in the dtype in which it is computed with, `working_dtype`.
        """

    def scatter_traffic(self, shard: int, element_bytes: int, world_size: int) -> list[Traffic]:
        """The same where each rank needs no more than `shard` elements of the mean, if it `scatters`."""
        raise NotImplementedError


class Part(NamedTuple):
    """What one step has done with gradients of one shape."""

    method: Method
    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    world_size: int
    step: int
    shard: Optional[int] = None

    @property
    def dense_bytes(self) -> int:
        """What one rank sends for their mean by a bandwidth-optimal all-reduce, or reduce-scatter of shards."""
        payload_bytes = len(self.names) * math.prod(self.shape) * self.dtype.itemsize
        operation: Operation = "all_reduce" if self.shard is None else "reduce_scatter"
        return sent_bytes([Traffic(operation, payload_bytes)], self.world_size)

    @property
    def sent_bytes(self) -> int:
        """What one rank has sent."""
        element_bytes = working_dtype(self.dtype).itemsize
        if self.shard is None:
            traffic = self.method.traffic(self.shape, element_bytes, self.world_size, self.step)
        else:
            traffic = self.method.scatter_traffic(self.shard, element_bytes, self.world_size)
        return sent_bytes(traffic * len(self.names), self.world_size)


class Outcome(NamedTuple):
    """What one step that counts has done.

    Attributes:
        seconds: Where its time went; None if somebody else has taken plain means, see `Reducer.pass_by`.
        compared: How it compares with the true mean, if that was taken.
    """

    parts: list[Part]
    seconds: Optional[Seconds]
    compared: Optional[Fidelity]
