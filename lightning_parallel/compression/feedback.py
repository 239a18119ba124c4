"""Blocks of gradients, the method that reduces a block, the record of its outcome, and error feedback.

Error feedback adds the part that a compressor did not send to the next gradient.

g is this rank's gradient (unscaled), e its memory, M the tensor to compress, C(M) the part that the method sent
and mean(.) the mean over the ranks:

    none      M = g        out = mean(C(M))
    classic   M = g + e    out = mean(C(M))        e' = M - C(M)
    decayed   M = g + e    out = mean(C(M))        e' = beta e + (1 - beta) (M - C(M))
    fading    M = g + b e  out = mean(C(M))        e' = M - C(M)                            b = beta
    ef21      M = g - h    out = H + mean(C(M))    h' = h + C(M)    H' = out = mean(h')

Momentum correction replaces g by the velocity u' = m u + g, which e accumulates. u' becomes zero at the sent positions.
The momentum of ef21 replaces g by u' = m u + (1 - m) g, which begins with g.

Sources: classic: Karimireddy et al. 2019, arXiv 1901.09847; ef21: Richtarik et al. 2021, arXiv 2106.05203; decayed:
LoCo, arXiv 2407.04480; fading: SparseLoCo, arXiv 2508.15706; momentum of ef21: EF21-SGDM, Fatkhullin et al. 2023, arXiv
2305.15155; momentum correction and factor masking: Deep Gradient Compression, sections 3.1 and 3.2, arXiv
1712.01887.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Optional, Union

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import add_all_, copy_all_
from lightning_parallel.compression.compressor_state import Memory, Shapes, StackKey, corners
from lightning_parallel.compression.thin_products import Sum
from lightning_parallel.compression.wire import (
    AllReduceRequest,
    ReduceScatterRequest,
    Requests,
    Seconds,
    StepContext,
    bytes_sent,
    estimate_bytes,
)

__all__ = [
    "CompressionError",
    "Feedback",
    "FeedbackName",
    "GradientBlock",
    "Method",
    "Outcome",
    "Padding",
    "ReducedBlock",
    "estimate_method",
    "working_dtype",
]


FeedbackName = Literal["classic", "decayed", "fading", "ef21"]
"""Form of the error feedback, which adds the unsent part to later gradients."""


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are compressed and remembered: fp64 stays, others are fp32."""
    # A residual adds up the rests of many steps: in 16 bits the sum would lose small rests.
    return torch.float64 if dtype == torch.float64 else torch.float32


class Padding:
    """Small matrices of different shapes in one stack, which zeros fill up: few products instead of many.

    Zeros change neither a product nor an orthonormal basis. They are not sent.

    Attributes:
        extents: Rows N and columns M of each matrix of the stack.
        shapes: Shapes of the gradients.
        sizes: Rows n and columns m of each gradient as a matrix.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], extents: tuple[int, int]) -> None:
        self.extents = extents
        self.shapes = tuple(tuple(shape) for shape in shapes)
        self.sizes = [(shape[0], math.prod(shape[1:])) for shape in self.shapes]
        self._factors: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        self._places: dict[tuple[int, int, torch.device], Tensor] = {}

    def factor_shapes(self, side: int, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the shapes (rank, extent) of the factors that share the rows, side 0, or the columns, side 1."""
        key = (side, rank)
        if key not in self._factors:
            self._factors[key] = tuple((rank, size[side]) for size in self.sizes)
        return self._factors[key]

    def without_zeros(self, factors: Tensor, side: int) -> Tensor:
        """Return the numbers of the factors (names, rank, N or M) in one row, without the zeros that fill them up."""
        return factors.reshape(-1)[self._where(factors, side)].unsqueeze(0)

    def with_zeros(self, row: Tensor, like: Tensor, side: int) -> Tensor:
        """Return factors, shaped like `like`, from the result of `without_zeros`."""
        whole = like.new_zeros(like.numel())
        return whole.index_copy_(0, self._where(like, side), row.view(-1)).view_as(like)

    def _where(self, factors: Tensor, side: int) -> Tensor:
        """Return the positions of the numbers in the flattened factors; made once, as a device would have to wait."""
        key = (side, factors.shape[1], factors.device)
        if key not in self._places:
            count, rank, extent = factors.shape
            kept = torch.arange(extent) < torch.tensor([size[side] for size in self.sizes]).view(-1, 1, 1)
            self._places[key] = kept.expand(count, rank, extent).reshape(-1).nonzero().view(-1).to(factors.device)
        return self._places[key]


@dataclass
class GradientBlock:
    """Gradients of one shape, or of one padded shape, that one method compresses together.

    Attributes:
        names: Parameter names, sorted.
        gradients: One per name; overwritten with the mean at the end.
        sent: Positions (names, k) in the flattened tensors that were sent, if the method sends only some.
        keep_rest: True if M - C(M) is needed.
        effective_step: The step number for schedules and alternating methods; see `Method.effective_steps`.
        shard: Elements of a rank's part, if each rank needs only its part of the flattened means. The last parts may be
            shorter, or empty. Set only for methods that can leave out the rest.
        padding: How gradients of different shapes share a stack; None for gradients of one shape. Set only for methods
            with `Method.padded`.
        outputs: One contiguous tensor per name, in the working dtype, for the unscaled mean.
    """

    names: tuple[str, ...]
    gradients: list[Tensor]
    sent: Optional[Tensor] = None
    keep_rest: bool = True
    effective_step: int = 0
    shard: Optional[int] = None
    padding: Optional[Padding] = None
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def shape(self) -> Sequence[int]:
        """Shape of each gradient, filled up with zeros."""
        return self.gradients[0].shape if self.padding is None else self.padding.extents

    @property
    def shapes(self) -> Shapes:
        """Shapes of the gradients, if they differ."""
        return None if self.padding is None else self.padding.shapes

    @property
    def num_elements(self) -> int:
        """Elements of all gradients."""
        return sum(gradient.numel() for gradient in self.gradients)

    def rows(self, stack: Tensor) -> Sequence[Tensor]:
        """Return the part of each gradient in a tensor (names, *shape), as a view."""
        return stack.unbind() if self.padding is None else corners(stack, self.padding.shapes)

    @property
    def dtype(self) -> torch.dtype:
        """The working dtype."""
        return working_dtype(self.gradients[0].dtype)

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        return self.gradients[0].device

    def stack_key(self, slot: str, shape: Optional[Sequence[int]] = None, shapes: Shapes = None) -> StackKey:
        """Return the key of one value per name in the memory; by default of tensors like the gradients.

        Args:
            shape: Shape of a row.
            shapes: Shapes of the values, if they are corners of the rows.
        """
        if shape is None:
            shape, shapes = self.shape, self.shapes
        return StackKey(slot, self.names, tuple(shape), self.dtype, self.device, shapes)

    def new_work(self) -> Tensor:
        """Return a tensor (names, *shape); its elements beyond `rows` are zero."""
        make = torch.empty if self.padding is None else torch.zeros
        return make((len(self.names), *self.shape), dtype=self.dtype, device=self.device)

    def allocate_outputs(self) -> None:
        """Use the gradients themselves as outputs where their layout and dtype allow it, new tensors elsewhere."""
        dtype, device = self.dtype, self.device
        # Methods write through views of another shape, which only contiguous tensors have.
        self.outputs = [
            gradient
            if gradient.dtype == dtype and gradient.is_contiguous()
            else torch.empty(gradient.shape, dtype=dtype, device=device)
            for gradient in self.gradients
        ]

    def write(self, means: Tensor) -> None:
        """Copy the unscaled means (names, numel or shape) into the outputs."""
        # `Dense` sums a lone gradient in its own memory: the mean is then in the output already.
        if len(self.outputs) > 1 or self.outputs[0].data_ptr() != means.data_ptr():
            copy_all_(self.outputs, self.rows(means.view(len(means), *self.shape)))

    def write_shard(self, means: Tensor, shard: int, rank: int) -> None:
        """Copy this rank's parts (names, at most shard) of the unscaled means into the outputs."""
        for output, mean in zip(self.outputs, means):
            part = output.view(-1)[rank * shard : (rank + 1) * shard]
            part.copy_(mean[: len(part)])

    def write_gradients(self, scale: float) -> None:
        """Copy the outputs to the gradients, times the loss scale."""
        for gradient, output in zip(self.gradients, self.outputs):
            if output is not gradient:
                # Scaled before the cast: without its loss scale, a mean may underflow in fp16.
                gradient.copy_(output if scale == 1 else output * scale)
            elif scale != 1:
                gradient.mul_(scale)


@dataclass(frozen=True)
class Feedback:
    """Error feedback: adds the residual to the gradients, and keeps the unsent part for the next step.

    Computes M from the gradients and the memory, and the new memory from M - C(M). See the table of this module.

    Attributes:
        kind: None, `classic`, `decayed`, `fading` or `ef21`.
        decay: beta of `decayed` and `fading`.
        momentum: m of the momentum, applied before the compression; 0 for none.
        averages: Whether the momentum is a mean of gradients, as in ef21, rather than their sum.
    """

    kind: Optional[FeedbackName] = None
    decay: float = 0.0
    momentum: float = 0.0
    averages: bool = False

    @property
    def slots(self) -> frozenset[str]:
        """The slots of memory that are used."""
        kept = {None: set(), "ef21": {"estimate", "mean_estimate"}}.get(self.kind, {"residual"})
        return frozenset(kept | ({"velocity"} if self.momentum else set()))

    def begin(self, block: GradientBlock, memory: Memory, scale: float, in_place: bool) -> tuple[Tensor, Sum]:
        """Return the work tensor of classic feedback, and the sum to fill it with; allocate the outputs."""
        block.allocate_outputs()
        block.keep_rest = True
        old = None if in_place else _read_stacked(block, memory, "residual")
        work = (_hold if in_place else _stage)(block, memory, "residual")
        rows = None if block.padding is None else block.rows(work)
        return work, Sum(work if in_place else old, block.gradients, 1 / scale, rows)

    def apply(self, block: GradientBlock, memory: Memory, scale: float, in_place: bool = False) -> Tensor:
        """Return the work tensor M, (names, *shape), and allocate the outputs for the mean.

        If `block.keep_rest` is set, the method must turn M into M - C(M). M may share its storage with the outputs, so
        the method must write the outputs last.

        Args:
            in_place: Build M of classic feedback in the buffer of the residual. A dropped step then loses the residual.
        """
        gradients, factor = self._corrected(block, memory, 1 / scale)
        if self.kind == "ef21":
            return self._apply_ef21(block, gradients, memory, factor)
        block.allocate_outputs()
        block.keep_rest = self.kind is not None
        if self.kind is None:
            # Without memory M is the gradient. A lone gradient is compressed in its own memory, which saves a copy.
            if len(block.names) == 1 and factor == 1 and block.outputs[0] is gradients[0]:
                return gradients[0].unsqueeze(0)
            work = block.new_work()
            for row, gradient in zip(block.rows(work), gradients):
                _scaled(gradient, factor, out=row)
            return work
        if in_place and self.kind == "classic":
            work = _hold(block, memory, "residual")
            add_all_(block.rows(work), gradients, factor)
            return work
        # M is built in the buffer of the new residual: the method leaves M - C(M) there, which is the residual.
        work = _stage(block, memory, "residual")
        if block.padding is not None:
            # All of them in one call. The zeros are written too: the buffer may hold other numbers there after a
            # dropped step.
            before = _read_stacked(block, memory, "residual")
            share = self.decay if self.kind == "fading" else 1.0
            _ = work.zero_() if before is None else torch.mul(before, share, out=work)
            add_all_(block.rows(work), gradients, factor)
            return work
        for row, old, gradient in zip(work, _read(block, memory, "residual"), gradients):
            if old is None:
                _scaled(gradient, factor, out=row)
            elif self.kind == "fading":
                torch.mul(old, self.decay, out=row).add_(gradient, alpha=factor)
            else:
                torch.add(old, gradient, alpha=factor, out=row)
        return work

    def update(self, block: GradientBlock, memory: Memory, work: Tensor, scale: float) -> None:
        """Update the memory from `work`, now M - C(M), and write the mean into the gradients."""
        if self.kind == "decayed":
            work.mul_(1 - self.decay)
            for row, old in zip(block.rows(work), _read(block, memory, "residual")):
                if old is not None:
                    row.add_(old, alpha=self.decay)
        elif self.kind == "ef21":
            for output, estimate in zip(block.outputs, _read(block, memory, "mean_estimate")):
                if estimate is not None:
                    output.add_(estimate)
            # Within a step `_stage` returns the tensor of `_apply_ef21`, g: g - (M - C(M)) = h + C(M).
            _stage(block, memory, "estimate").sub_(work)
        # Momentum factor masking: the velocity of a sent element would move the element a second time.
        if self.momentum and not self.averages and block.sent is not None:
            _stage(block, memory, "velocity").flatten(1).scatter_(1, block.sent, 0.0)
        block.write_gradients(scale)

    def apply_momentum(self, means: Tensor, block: GradientBlock, memory: Memory, scale: float) -> None:
        """Replace scaled `means` (names, *shape), equal on all ranks, by a momentum step, in place."""
        if not self.momentum:
            return
        # The velocity, like all memory, has no loss scale: the scale changes between steps.
        velocity = _stage(block, memory, "velocity")
        torch.mul(means, 1 / scale, out=velocity)
        for row, old in zip(velocity, _read(block, memory, "velocity")):
            self._accelerate(row, old)
        torch.mul(velocity, scale, out=means)

    def _apply_ef21(self, block: GradientBlock, gradients: Sequence[Tensor], memory: Memory, factor: float) -> Tensor:
        # The outputs are the new memory H' itself. `write_gradients` copies them to the gradients at the end.
        block.outputs = list(_stage(block, memory, "mean_estimate").unbind())
        work = block.new_work()
        estimate = _stage(block, memory, "estimate")
        for row, now, old, gradient in zip(work, estimate, _read(block, memory, "estimate"), gradients):
            _scaled(gradient, factor, out=now)  # h' = h + C(M) = g - (M - C(M)): begin with g
            torch.sub(now, old if old is not None else 0, out=row)
        return work

    def _corrected(self, block: GradientBlock, memory: Memory, factor: float) -> tuple[Sequence[Tensor], float]:
        if not self.momentum:
            return block.gradients, factor
        velocity = _stage(block, memory, "velocity")
        for row, old, gradient in zip(velocity, _read(block, memory, "velocity"), block.gradients):
            _scaled(gradient, factor, out=row)
            self._accelerate(row, old)
        return velocity.unbind(), 1.0

    def _accelerate(self, gradient: Tensor, velocity: Optional[Tensor]) -> None:
        """Turn a gradient into the new velocity, in place; the first velocity is the gradient itself."""
        if velocity is not None:
            if self.averages:
                gradient.mul_(1 - self.momentum)
            gradient.add_(velocity, alpha=self.momentum)


def _stage(block: GradientBlock, memory: Memory, slot: str) -> Tensor:
    # A step reads one buffer and writes the other, so a staged tensor never overwrites a tensor from `_read`.
    return memory.stage(block.stack_key(slot))


def _hold(block: GradientBlock, memory: Memory, slot: str) -> Tensor:
    return memory.hold(block.stack_key(slot))


def _read(block: GradientBlock, memory: Memory, slot: str) -> list[Optional[Tensor]]:
    return [memory.read(slot, name, block.device, old.shape) for name, old in zip(block.names, block.gradients)]


def _read_stacked(block: GradientBlock, memory: Memory, slot: str) -> Optional[Tensor]:
    """Return the committed values in one tensor (names, *shape); None if there are none."""
    found = memory.read_stack(block.stack_key(slot))
    if found is not None:
        return found
    # After buckets were rebuilt, or after a load, the rows of a block are in different tensors.
    rows = _read(block, memory, slot)
    if all(row is None for row in rows):
        return None
    made = torch.zeros((len(rows), *block.shape), dtype=block.dtype, device=block.device)
    for into, row in zip(block.rows(made), rows):
        if row is not None:
            into.copy_(row)
    return made


def _scaled(gradient: Tensor, factor: float, out: Tensor) -> None:
    # Cast first: divided by the loss scale, a gradient in fp16 may become zero.
    out.copy_(gradient)
    if factor != 1:
        out.mul_(factor)


class CompressionError:
    """The error of compressed means in one step: their distance from the true means, by parameter.

    The true mean is the mean of this step's gradients; the residuals of earlier steps count as error.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # over the elements: error^2, true^2, ours^2, ours * true

    @staticmethod
    def true_means(named_gradients: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
        """Return the exact means, in new tensors, by one all-reduce per tensor."""
        means: dict[str, Tensor] = {}
        # One collective per name: sorted, because the dicts of two ranks may have different orders.
        for name, gradient in sorted(named_gradients.items()):
            # A copy: the sum overwrites it, and the gradient is compressed afterwards.
            total = gradient.detach().to(working_dtype(gradient.dtype), copy=True).contiguous()
            means[name] = comm.all_reduce_(total, group) / group.size
        return means

    def add(self, ours: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> None:
        """Add the approximate and true means of one bucket."""
        for name, mean in true.items():
            mine = ours[name].detach().to(mean.dtype)
            sums = [(mine - mean).square().sum(), mean.square().sum(), mine.square().sum(), (mine * mean).sum()]
            # The sums stay on the device: reading them here would block the host in every bucket.
            self._sums[name] = torch.stack(sums).double()

    def report(self, names: Iterable[str] | None = None) -> dict[str, float]:
        """Return `relative_error` |ours - true| / |true| and the `cosine` of the angle between the two.

        Args:
            names: The parameters to take into account; all when omitted.

        Returns:
            The two numbers, or nothing if the true mean is zero: neither is defined then.
        """
        chosen = self._sums.keys() if names is None else self._sums.keys() & set(names)
        if not chosen:
            return {}
        # One transfer for all parameters: each transfer waits for the device.
        error, true, ours, dot = torch.stack([self._sums[name] for name in sorted(chosen)]).sum(0).tolist()
        if true == 0:
            return {}
        return {"relative_error": (error / true) ** 0.5, "cosine": dot / (ours * true) ** 0.5 if ours else 0.0}


class Method(abc.ABC):
    """The way in which a reducer takes the mean of one block of gradients.

    Attributes:
        batched: True if gradients of one shape are computed together at any size. Otherwise only small gradients are
            joined, because joining costs a copy.
    """

    batched: ClassVar[bool] = False

    def padded(self, shape: Sequence[int]) -> Optional[tuple[int, int]]:
        """Return the rows and columns to which zeros may fill up a gradient of `shape` as a matrix; None for none.

        Gradients with the same result share a block, if that saves many blocks.
        """
        return None

    @property
    def scatters(self) -> bool:
        """True if the method sends less when each rank needs only its shard of the mean: `GradientBlock.shard`."""
        return False

    @property
    def separate(self) -> bool:
        """True if each gradient needs a separate block, because random draws would otherwise depend on the grouping.

        Tensor-parallel ranks that hold the same parameter may group it with different shards.
        """
        return False

    def effective_steps(self, names: Sequence[str], number: int, memory: Memory) -> Union[int, list[int]]:
        """Return the effective number of step `number` for `names`: one for all, or one for each name.

        Parameters in one block share their number.
        """
        return number

    @abc.abstractmethod
    def requests(self, block: GradientBlock, step: StepContext) -> Requests:
        """Replace the block's gradients by their mean: a generator of requests, which watches the answers."""


class ReducedBlock(NamedTuple):
    """A record of how one step reduced the gradients of a block.

    Attributes:
        num_elements: Elements of all gradients.
        sent_bytes: Bytes that this rank has sent.
        shard: Elements of this rank's part of the mean, if the rank received its part only.
    """

    method: Method
    names: tuple[str, ...]
    num_elements: int
    dtype: torch.dtype
    world_size: int
    sent_bytes: int
    shard: Optional[int] = None

    @property
    def dense_bytes(self) -> int:
        """Bytes that one rank sends for the plain mean, by a ring all-reduce, or reduce-scatter for shards."""
        payload_bytes = self.num_elements * self.dtype.itemsize
        kind = AllReduceRequest if self.shard is None else ReduceScatterRequest
        return round(bytes_sent(kind, payload_bytes, self.world_size))


class Outcome(NamedTuple):
    """A record of one step that was applied.

    Attributes:
        seconds: Times of the parts of the step.
        compression_error: The error of the means; None in a step that did not measure it.
        inside_bytes: Bytes that this rank has sent inside its node, if the blocks count the bytes between nodes.
    """

    blocks: list[ReducedBlock]
    seconds: Seconds
    compression_error: Optional[CompressionError]
    inside_bytes: int = 0


class _MetaStep:
    """A step on meta tensors: nothing is communicated, remembered or checked."""

    scale = 1.0
    expects_rollback = False

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
    # On the meta device, so that an estimate takes neither memory nor random numbers.
    gradient = torch.empty(tuple(shape), dtype=dtype, device="meta")
    block = GradientBlock((name,), [gradient], effective_step=number)
    return estimate_bytes(method.requests(block, _MetaStep(world_size, number)), world_size)
