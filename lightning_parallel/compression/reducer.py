"""The contract of every reducer, and the step: a transaction over the buckets of one optimizer step."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.compressor_state import Memory, gather_state, local_state, values_for
from lightning_parallel.compression.feedback import CompressionError, GradientBlock, working_dtype
from lightning_parallel.compression.wire import (
    SEPARATE_BYTES,
    Operation,
    Requests,
    Seconds,
    StepContext,
    Traffic,
    run,
    sent_bytes,
)

__all__ = [
    "check_reducer",
    "scale_reader",
    "GroupLike",
    "Method",
    "Outcome",
    "ReducedBlock",
    "Reducer",
    "ReductionStep",
]


class Method(abc.ABC):
    """What a reducer does with the gradients of one block.

    Attributes:
        batched: Whether gradients of one shape are computed together however large they are. Otherwise only small ones
            are, as it costs a copy.
    """

    batched: ClassVar[bool] = False

    @property
    def scatters(self) -> bool:
        """Whether it can leave out what other ranks need of the mean, and then sends less: `GradientBlock.shard`."""
        return False

    @property
    def separate(self) -> bool:
        """Whether a gradient must be a block by itself: what is drawn for it would depend on its company otherwise.

        The company of a parameter that tensor-parallel ranks hold alike may differ from rank to rank.
        """
        return False

    def effective_step(self, name: str, number: int, memory: Memory) -> int:
        """By which number parameter `name` goes in step `number`; a block holds parameters with the same."""
        return number

    @abc.abstractmethod
    def requests(self, block: GradientBlock, step: StepContext) -> Requests:
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


class ReducedBlock(NamedTuple):
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
        seconds: Where its time went; None if somebody else has taken plain means, see `Reducer.count_plain_step`.
        compression_error: How it compares with the true mean, if that was taken.
    """

    blocks: list[ReducedBlock]
    seconds: Optional[Seconds]
    compression_error: Optional[CompressionError]


GroupLike = Union[Group, dist.ProcessGroup, None]
_LATE = 1 << 40  # a step at which every warm-up and schedule has ended; even, as the alternating methods count in twos

_Signature = tuple[tuple[str, tuple[int, ...], torch.dtype, torch.layout], ...]
_CACHED = 1 << 19  # elements that stay in a CPU's cache from one operation to the next


class Reducer(abc.ABC):
    """Replaces gradients by their (approximate) mean over a group, in place.

    Attributes:
        scale: What the gradients are multiplied by (the loss scale); memory is kept unscaled. Set it before a step.
        step: Steps committed so far. A skipped step does not count.
        seconds: Where the time of the last step went.
        blocks: What the last step has done.
        sample_every: Compare with the true mean in every so many steps (at the price of taking it); 0 for never.
        last_error: The last comparison; None before it.
        observers: Called with the outcome of each step that counts, on the thread that ends it.
    """

    linear: bool
    unbiased: bool
    collective: str

    def __init__(self) -> None:
        self.scale = 1.0
        self.step = 0
        self.seconds = Seconds()
        self.blocks: list[ReducedBlock] = []
        self.sample_every = 0
        self.last_error: Optional[CompressionError] = None
        self.observers: list[Callable[[Outcome], None]] = []
        self.memory = Memory()
        self._group_size = 1
        self._agreed: set[tuple[Any, ...]] = set()

    @property
    def is_plain(self) -> bool:
        """True if the source of the gradients may average them itself; it then calls `count_plain_step`."""
        return False

    def count_plain_step(self) -> None:
        """Count a step of plain means that somebody else has taken."""
        self._conclude(Outcome(self.blocks, None, None))

    def _conclude(self, outcome: Outcome) -> None:
        self.step += 1
        for observer in self.observers:
            observer(outcome)

    @property
    def slots(self) -> Optional[frozenset[str]]:
        """What it keeps in memory; None if that cannot be told."""
        return None

    def reset(self) -> None:
        """Forget all: as if no step had been taken."""
        self.memory, self.step, self.scale, self._agreed = Memory(), 0, 1.0, set()
        self.seconds, self.blocks, self.last_error = Seconds(), [], None

    @abc.abstractmethod
    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        """What is done with parameter `name` in step number `step`; equal on all ranks."""

    def reduce_(self, named_gradients: Mapping[str, Tensor], group: GroupLike = None) -> bool:
        """Replace each gradient by its (approximate) mean over `group`: one whole step.

        Args:
            named_gradients: Gradients by parameter name; the same names and shapes on every rank.
            group: A group of this library or of torch; None means all ranks.

        Returns:
            True if the step counts. False if a gradient was not finite somewhere: then the gradients hold non-finite
            values on every rank, so that whoever checks them skips alike, and the reducer is as if never called.

        Raises:
            TypeError: If a gradient is sparse, complex or of integers.
            ValueError: If the ranks bring different names, shapes or dtypes.
        """
        with self.begin(group) as step:
            step.compare(named_gradients)
            step.reduce_(named_gradients)
            return step.commit()

    def begin(self, group: GroupLike = None) -> ReductionStep:
        """Start a step that is reduced in several buckets: `reduce_` each, in one order on all ranks, then `commit`.

        Ranks whose buckets differ are told so only where a bucket is new to all of them.
        """
        return ReductionStep(self, group if isinstance(group, Group) else Group.of(group, axis="data_parallel"))

    def wire_bytes(
        self,
        named_shapes: Mapping[str, Sequence[int]],
        world_size: int,
        step: Optional[int] = None,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        """Bytes that one rank sends in one step.

        Args:
            step: Number of the step; None for one after all warm-up and schedules (on average, where steps alternate).
            dtype: Of the gradients.
        """
        element_bytes = working_dtype(dtype).itemsize
        steps = [_LATE, _LATE + 1] if step is None else [step]
        traffic = [
            Traffic(operation, payload_bytes / len(steps))
            for number in steps
            for name, shape in named_shapes.items()
            for operation, payload_bytes in self._traffic(name, shape, element_bytes, world_size, number)
        ]
        return sent_bytes(traffic, world_size)

    def _traffic(
        self, name: str, shape: Sequence[int], element_bytes: int, world_size: int, step: int
    ) -> list[Traffic]:
        if 0 in shape:
            return []
        return self.method(name, shape, step).traffic(shape, element_bytes, world_size, step)

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, copied: tensors by slot and parameter name, ints and strings. Resumes bit for bit."""
        return local_state(self.memory, self.step, self._group_size)

    def gather_state(self, group: GroupLike = None, exact: bool = True) -> dict[str, Any]:
        """The state of all ranks, for one checkpoint file; every rank must call it. It loads at any world size.

        Args:
            exact: Keep every rank's memory, so that as many ranks resume bit for bit. Otherwise only their mean is
                kept, one tensor per parameter: exact in exact arithmetic for linear reducers, an approximation for
                the others.

        Returns:
            The state on the group's first rank, an empty dict on the others.
        """
        group = group if isinstance(group, Group) else Group.of(group, axis="data_parallel")
        return gather_state(self.memory, self.step, group, exact)

    def load_state_dict(self, state: Mapping[str, Any], group: GroupLike = None) -> None:
        """Continue from `state_dict()` of the same rank of as many ranks, or from `gather_state()` of any number.

        Of another compressor's state this takes what it understands, and warns of the rest.

        Raises:
            ValueError: If `state` is that of one rank among a different number of ranks, of another version or damaged.
        """
        group = group if isinstance(group, Group) else Group.of(group, axis="data_parallel")
        self.memory.load(values_for(state, group, self.slots))
        self.step, self._group_size = int(state["step"]), group.size

    @property
    def residual_norms(self) -> dict[str, float]:
        """Euclidean norm of this rank's residual by parameter name."""
        norms = {name: tensor.norm().double() for slot, name, tensor in self.memory.items() if slot == "residual"}
        return dict(zip(norms, torch.stack(list(norms.values())).tolist())) if norms else {}

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of this rank's residuals."""
        return math.hypot(*self.residual_norms.values())


class ReductionStep:
    """One optimizer step of a reducer, in any number of buckets; leaving it without `commit` rolls back.

    Attributes:
        number: How many steps were committed before this one.
    """

    def __init__(self, reducer: Reducer, group: Group) -> None:
        self.reducer, self.group = reducer, group
        self.number, self.scale, self.memory = reducer.step, reducer.scale, reducer.memory
        self._suspects: list[Tensor] = []
        self._open = True
        self._seconds = Seconds()
        self._blocks_done: list[ReducedBlock] = []
        sampled = reducer.sample_every > 0 and reducer.step % reducer.sample_every == 0
        self._error = CompressionError() if sampled else None
        self.memory.rollback()

    def __enter__(self) -> ReductionStep:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self.rollback()

    def compare(self, named_gradients: Mapping[str, Tensor]) -> None:
        """Check that every rank is about to bring these.

        Raises:
            ValueError: On every rank, with the gradients in which they differ.
        """
        signature = _signature(named_gradients)
        digest = blake2b(repr(signature).encode(), digest_size=8).digest()
        if not comm.equal_everywhere(int.from_bytes(digest, "little") >> 1, self.group):
            self._agree_on(signature)

    def reduce_(self, named_gradients: Mapping[str, Tensor], shards: Optional[Mapping[str, int]] = None) -> None:
        """Replace a part of the gradients by their mean; each parameter comes once in a step.

        Args:
            shards: Elements of a rank's part of the flattened gradient, for parameters of which each rank needs no
                more than its own part; the rest may then hold anything. As ranks then see different means, `finite`
                is what this rank can tell.
        """
        if not self._open:
            raise RuntimeError("this step has been committed or rolled back; begin another one")
        self._agree(named_gradients)
        true = CompressionError.true_means(named_gradients, self.group) if self._error else {}
        blocks = self._blocks(named_gradients, {} if self._error or shards is None else shards)
        run([method.requests(block, self) for method, block in blocks], self.group, self._seconds)
        self._blocks_done += [
            ReducedBlock(
                method,
                block.names,
                block.shape,
                block.gradients[0].dtype,
                self.group.size,
                block.effective_step,
                block.shard,
            )
            for method, block in blocks
        ]
        if self._error:
            self._error.add(named_gradients, true)

    def watch(self, received: Tensor) -> None:
        """Remember a tensor, equal on all ranks, that is non-finite where a gradient on any rank was."""
        self._suspects.append(received.detach().sum(dtype=working_dtype(received.dtype)))

    def average_(self, total: Tensor) -> Tensor:
        """Watch a contiguous sum over the ranks and divide it by their number, in place."""
        numbers = _CACHED if total.device.type == "cpu" else total.numel()
        for piece in total.view(-1).split(max(numbers, 1)):
            self.watch(piece)
            piece.div_(self.group.size)
        return total

    @property
    def finite(self) -> bool:
        """Whether every gradient so far was finite on every rank."""
        return all(bool(torch.stack(some).isfinite().all()) for some in _by_kind(self._suspects))

    def commit(self) -> bool:
        """End the step; False, and no trace of it, if a gradient was not finite on any rank."""
        self._open = False
        if not self.finite:
            self.memory.rollback()
            return False
        self.memory.commit()
        self.reducer._group_size = self.group.size
        self.reducer.seconds, self.reducer.blocks = self._seconds, self._blocks_done
        self.reducer.last_error = self._error or self.reducer.last_error
        self.reducer._conclude(Outcome(self._blocks_done, self._seconds, self._error))
        return True

    def rollback(self) -> None:
        """End the step and forget it."""
        self._open = False
        self.memory.rollback()

    def _blocks(
        self, named_gradients: Mapping[str, Tensor], shards: Mapping[str, int]
    ) -> list[tuple[Method, GradientBlock]]:
        found: dict[Any, tuple[Method, GradientBlock]] = {}
        seen: set[Tensor] = set()  # tensors hash by identity: a tied gradient under two names is reduced once
        for name in sorted(named_gradients):
            gradient = named_gradients[name]
            if gradient.numel() == 0 or gradient in seen:
                continue
            seen.add(gradient)
            method = self.reducer.method(name, gradient.shape, self.number)
            shard = shards.get(name) if method.scatters else None
            large = not method.batched and gradient.numel() * gradient.element_size() >= SEPARATE_BYTES
            alone = large or method.separate
            effective_step = method.effective_step(name, self.number, self.memory)
            key = (
                id(method),
                effective_step,
                gradient.shape,
                gradient.dtype,
                gradient.device,
                shard,
                name if alone else None,
            )
            _, block = found.setdefault(
                key, (method, GradientBlock((), [], effective_step=effective_step, shard=shard))
            )
            block.names += (name,)
            block.gradients.append(gradient.detach())
        return list(found.values())

    def _agree(self, named_gradients: Mapping[str, Tensor]) -> None:
        """Check gradients of a new kind with the other ranks, before the first collective on them."""
        signature = _signature(named_gradients)
        key = (self.group.ranks, signature)
        if key in self.reducer._agreed:
            return
        refused = {
            name: f"{gradient.layout} {gradient.dtype}"
            for name, gradient in named_gradients.items()
            if gradient.layout != torch.strided or not gradient.dtype.is_floating_point
        }
        error = TypeError(f"gradients must be dense and of a floating-point dtype, found {refused}")
        comm.raise_together(error if refused else None, self.group)
        settings = {"compressor": repr(self.reducer), "step": self.number, "sample_every": self.reducer.sample_every}
        comm.agree("the compressor and its step", settings, self.group)
        self._agree_on(signature)
        self.reducer._agreed.add(key)

    def _agree_on(self, signature: _Signature) -> None:
        listed = {name: f"{list(shape)} {dtype} {layout}" for name, shape, dtype, layout in signature}
        comm.agree("the gradients' names, shapes and dtypes", listed, self.group)


def _signature(named_gradients: Mapping[str, Tensor]) -> _Signature:
    return tuple((name, tuple(g.shape), g.dtype, g.layout) for name, g in sorted(named_gradients.items()))


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def scale_reader(scaler: Optional[Any]) -> Callable[[], float]:
    """Return a function that reads the loss scale of `scaler`, such as a `torch.amp.GradScaler`; 1 without one."""
    return lambda: 1.0 if scaler is None else float(scaler.get_scale())


def check_reducer(compression: object) -> None:
    """Check what was given as `compression`.

    Raises:
        TypeError: If it is no compressor.
    """
    if not isinstance(compression, Reducer):
        hint = f"; did you mean {compression.__name__}()?" if isinstance(compression, type) else ""
        raise TypeError(f"`compression` must be a compressor such as PowerSGD(rank=4), got {compression!r}{hint}")
