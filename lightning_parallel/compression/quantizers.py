"""Quantizers: send every element in fewer bits."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any, Literal, Optional, Union

import torch
from torch import Tensor

from lightning_parallel.compression.compressor import Compressor, check_flag, check_integer, seeded_generator
from lightning_parallel.compression.feedback import FeedbackName, GradientBlock
from lightning_parallel.compression.wire import (
    AllGatherRequest,
    AllReduceRequest,
    AllToAllRequest,
    Codec,
    MeanRequests,
    ReduceScatterRequest,
    Request,
    Requests,
    StepContext,
    as_bytes,
    from_bytes,
    launches_kernels,
    pack_nibbles,
    pack_signs,
    pad,
    split_by_rank,
    unpack_nibbles,
    unpack_signs,
)

__all__ = ["Cast", "Quantize", "Sign"]

_GROUP = 512  # elements that share a scale, at most
_CACHED_NUMBERS = 1 << 16  # that a CPU works on in one go
_DEVICE_NUMBERS = 1 << 26  # that a device works on in one go: few kernels, and no large temporary tensors
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Quantizer(Compressor, Codec):
    """A compressor of whole tensors that can also encode what another one sends."""

    @property
    def scatters(self) -> bool:
        """True without `ef21`, whose memory holds the whole mean."""
        return self.feedback.kind != "ef21"

    @property
    def separate(self) -> bool:
        """True if it draws random numbers."""
        return self.stochastic

    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        rows = work.flatten(1)
        mean, sent = yield from self.mean(rows, step, block.names, block.keep_rest)
        if sent is not None:
            rows.sub_(sent)
        block.write(mean)


class Cast(Quantizer):
    """Send elements in a shorter dtype; the sum is taken in it as well.

        C(M) = W cast(M / W)        out = sum(cast(M_i / W))

    Dividing before the sum keeps it in range. Biased by rounding; a half-precision cast is not linear.

    Args:
        dtype: `bf16`, `fp16`, `fp32` or a torch dtype.
        feedback: Error feedback; None, the default, needs no memory.
        kwargs: The arguments of every compressor, see `Compressor`.
    """

    collective = "all_reduce"
    unbiased = False

    def __init__(
        self,
        dtype: Union[Literal["bf16", "fp16", "fp32"], torch.dtype] = "bf16",
        *,
        feedback: Optional[FeedbackName] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(feedback=feedback, **kwargs)
        found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if not isinstance(found, torch.dtype) or found not in DTYPES.values():
            error = ValueError if isinstance(dtype, (str, torch.dtype)) else TypeError
            raise error(f"`dtype` must be one of {', '.join(DTYPES)} or such a torch dtype, got {dtype!r}")
        self.dtype: torch.dtype = found

    @property
    def linear(self) -> bool:
        """True for fp32, which does not round gradients."""
        return self.dtype == torch.float32

    def pack(self, rows: Tensor, noise: Optional[torch.Generator] = None) -> Tensor:
        return as_bytes(rows.to(self.dtype))

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        return from_bytes(packed, self.dtype).to(dtype)

    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        if block.shard is None:
            yield from super().compress(work, block, step)
            return
        rows = work.flatten(1)
        short, sent = self._shorten(rows, step.group.size, block.keep_rest)
        mine = yield ReduceScatterRequest(split_by_rank(short, step.group.size, block.shard).flatten(1))
        step.watch(mine)
        if sent is not None:
            rows.sub_(sent)
        block.write_shard(mine.view(-1, block.shard), block.shard, step.group.rank)

    def mean(self, rows: Tensor, step: StepContext, purpose: object, keep: bool) -> MeanRequests:
        short, sent = self._shorten(rows, step.group.size, keep)
        total = yield AllReduceRequest(short)
        step.watch(total)
        return total.to(rows.dtype), sent

    def _shorten(self, rows: Tensor, size: int, keep: bool) -> tuple[Tensor, Optional[Tensor]]:
        # A copy in any case: the sum overwrites it, and `rows` are still needed. Divided before the sum, which would
        # otherwise leave the range of 16 bits.
        short = (rows if size == 1 else rows / size).to(self.dtype, copy=True)
        return short, short.to(rows.dtype).mul_(size) if keep else None

    def _main(self) -> dict[str, str]:
        return {"dtype": next(repr(name) for name, dtype in DTYPES.items() if dtype == self.dtype)}


class Quantize(Quantizer):
    """Send elements as integers of 8 or 4 bits, with one scale per group of at most 512 elements.

        s = max|x| / L        C(x) = s round(x / s)        L = 127 or 7

    The mean is taken in two phases, each of n bits/8 bytes per rank whatever the number of ranks:

        1. rank r receives part r of every rank's integers and takes the mean, in the working dtype
        2. it encodes that mean again and all ranks gather it; left out where each rank needs its part only

    With error feedback the owner of a part also keeps what the second encoding lost, times the number of ranks, so that
    the mean of all residuals accounts for both. Not linear; unbiased with `stochastic` and without feedback.

    Args:
        bits: 8 or 4.
        stochastic: Round up with the probability of the fraction: floor(x / s + u), u uniform in [0, 1).
        seed: Seed of stochastic rounding; every rank draws different numbers.
        kwargs: The arguments of every compressor, see `Compressor`.

    Sources: QSGD, Alistarh et al. 2017, arXiv 1610.02132; two phases: 1-bit Adam, Tang et al. 2021, arXiv 2102.02888.
    """

    linear = False
    collective = "two_phase"

    def __init__(
        self,
        bits: Literal[8, 4] = 8,
        *,
        stochastic: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_integer("bits", bits)
        check_flag("stochastic", stochastic)
        check_integer("seed", seed)
        if bits not in (8, 4):
            raise ValueError(f"`bits` must be 8 or 4, got {bits!r}")
        self.bits = bits
        self.stochastic = stochastic
        self.seed = seed
        self.levels = 2 ** (bits - 1) - 1

    @property
    def unbiased(self) -> bool:
        """True with stochastic rounding and without error feedback."""
        return self.stochastic and self.feedback.kind is None

    def pack(self, rows: Tensor, noise: Optional[torch.Generator] = None) -> Tensor:
        packed = self._new_packed(rows, 1, len(rows), rows.shape[1])
        self._encode(rows.unsqueeze(0), packed, rows.shape[1], noise)
        return packed[0]

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        numbers = torch.empty(*packed.shape[:-1], n, dtype=dtype, device=packed.device)
        self._decode(packed.reshape(1, -1, packed.shape[-1]), numbers.view(1, -1, n), n)
        return numbers

    def _packed_bytes(self, n: int) -> int:
        """Return the bytes of one packed row of `n` numbers."""
        groups, extent = self._grouping(n)
        return groups * extent * self.bits // 8 + 4 * groups

    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        rows = work.flatten(1)
        if block.shard is not None:
            noise = self._noise(rows, step, block.names)
            mine = yield from self._mean_part(rows, step, block.shard, noise, block.keep_rest)
            step.watch(mine)
            block.write_shard(mine, block.shard, step.group.rank)
            return
        into = block.outputs[0].view(1, -1) if len(block.outputs) == 1 else torch.empty_like(rows)
        yield from self._mean(rows, step, block.names, block.keep_rest, into)
        block.write(into)

    def mean(self, rows: Tensor, step: StepContext, purpose: object, keep: bool) -> MeanRequests:
        # `_mean` leaves in its rows what was not sent: what was sent is the difference to a copy.
        rest = rows.clone() if keep else rows
        mean = torch.empty_like(rows)
        yield from self._mean(rest, step, purpose, keep, mean)
        return mean, rest.sub_(rows).neg_() if keep else None

    def _mean(self, rows: Tensor, step: StepContext, purpose: object, keep: bool, mean: Tensor) -> Requests:
        """Write the mean of `rows` (rows, n) into `mean`; with `keep`, leave in `rows` what was not sent."""
        size = step.group.size
        rank = step.group.rank
        chunk = math.ceil(rows.shape[1] / size)
        noise = self._noise(rows, step, purpose)
        mine = yield from self._mean_part(rows, step, chunk, noise, keep)
        packed_mine = self._new_packed(rows, 1, len(rows), chunk)
        self._encode(mine.unsqueeze(0), packed_mine, chunk, noise, rest=keep)
        if keep:
            # The error of the second encoding belongs to all ranks. Its owner keeps it times their number, so that it
            # counts once in the mean of the residuals.
            part = rows[:, rank * chunk : (rank + 1) * chunk]
            part.add_(mine[:, : part.shape[1]], alpha=size)
        everyone = (yield AllGatherRequest(packed_mine.flatten())).reshape(size, *packed_mine.shape[1:])
        # A group that holds something not finite has such a scale, so the scales tell of all numbers.
        step.watch(self._scales(everyone, chunk))
        n = rows.shape[1]
        whole = mean.new_empty(len(mean), size * chunk) if n < size * chunk and launches_kernels(mean) else mean
        for parts, some in _side_by_side(whole, everyone, chunk):
            self._decode(some, parts, chunk)
        if whole is not mean:
            mean.copy_(whole[:, :n])

    def _mean_part(
        self, rows: Tensor, step: StepContext, chunk: int, noise: Optional[torch.Generator], keep: bool
    ) -> Generator[Request, Tensor, Tensor]:
        """Run the first phase and return this rank's part (rows, chunk) of the mean. The last parts may be short."""
        size = step.group.size
        packed = self._new_packed(rows, size, len(rows), chunk)
        padded = pad(rows, size * chunk) if launches_kernels(rows) else rows
        for parts, some in _side_by_side(padded, packed, chunk):
            self._encode(parts, some, chunk, noise, rest=keep)
        if keep and padded is not rows:
            rows.copy_(padded[:, : rows.shape[1]])
        received = (yield AllToAllRequest(packed.view(size, -1))).reshape(packed.shape)
        mine = torch.empty_like(rows[:, :chunk])
        for index, some in enumerate(received.split(size if launches_kernels(rows) else 1)):
            self._decode(some, mine.unsqueeze(0), chunk, add=index > 0)
        return mine.div_(size)

    def _noise(self, rows: Tensor, step: StepContext, purpose: object) -> Optional[torch.Generator]:
        return (
            # With the rank: roundings that are independent cancel in the mean.
            seeded_generator(rows.device, self.seed, step.number, purpose, step.group.rank) if self.stochastic else None
        )

    def _encode(
        self, parts: Tensor, packed: Tensor, n: int, noise: Optional[torch.Generator], rest: bool = False
    ) -> None:
        """Encode `parts` (parts, rows, at most n, followed by zeros) into `packed` (parts, rows, packed).

        Args:
            rest: Leave in `parts` what the encoding has lost.
        """
        if parts.is_meta:  # only the size of `packed` is asked for, of up to thousands of ranks
            return
        groups, extent = self._grouping(n)
        count, rows, _ = parts.shape
        scales = parts.new_empty(count, rows, groups, dtype=torch.float32)
        for begin, end in self._pieces(parts, count, n):
            piece = _elements(parts, begin * extent, end * extent)
            grouped = _padded(piece, (end - begin) * extent).view(count, rows, end - begin, extent)
            # A group of zeros has some tiny scale instead of none; NaN passes.
            some = scales.narrow(2, begin, end - begin)
            some.copy_(_peaks(grouped).div_(self.levels)).clamp_min_(torch.finfo(torch.float32).tiny)
            exact = some.to(parts.dtype).unsqueeze(3)
            levels = grouped * exact.reciprocal()
            if self.stochastic:
                levels.add_(torch.rand(levels.shape, generator=noise, dtype=parts.dtype, device=parts.device)).floor_()
                # The reciprocal is rounded: it may lift the largest number of a group over the last level.
                levels.clamp_max_(self.levels)
            else:
                levels.round_()
            # Integers first, then the scales: both at the same place for every row.
            where = _elements(packed, begin * extent * self.bits // 8, end * extent * self.bits // 8).view(torch.int8)
            if self.bits == 8:
                where.view(levels.shape).copy_(levels)
            else:
                where.copy_(pack_nibbles(levels.to(torch.int8).flatten(2)).view(torch.int8))
            if rest:
                piece.sub_(_elements(levels.mul_(exact).flatten(2), 0, piece.shape[2]))
        packed[..., -4 * groups :] = as_bytes(scales)

    def _decode(self, packed: Tensor, numbers: Tensor, n: int, add: bool = False) -> None:
        """Decode the first of n numbers from `packed` (parts, rows, packed) into `numbers` (parts, rows, at most n).

        Args:
            numbers: Of one part only, to take the sum over the parts.
            add: Add to what is there; of one part only.
        """
        if numbers.is_meta:
            return
        _, extent = self._grouping(n)
        scales = self._scales(packed, n).to(numbers.dtype).unsqueeze(3)
        count, rows, _ = packed.shape
        is_sum = count > len(numbers)
        for begin, end in self._pieces(numbers, count, n):
            integers = _elements(packed, begin * extent * self.bits // 8, end * extent * self.bits // 8)
            levels = integers.view(torch.int8) if self.bits == 8 else unpack_nibbles(integers)
            levels = levels.view(count, rows, end - begin, extent)
            piece, some = _elements(numbers, begin * extent, end * extent), scales.narrow(2, begin, end - begin)
            if is_sum or piece.shape[2] < (end - begin) * extent:
                found = levels.to(numbers.dtype).mul_(some)
                found = (found.sum(0, keepdim=True) if is_sum else found).flatten(2)
                found = found[..., : piece.shape[2]]
                piece.copy_(piece + found if add else found)
            elif add:
                piece.view(levels.shape).addcmul_(levels.to(numbers.dtype), some)
            else:
                piece.view(levels.shape).copy_(levels).mul_(some)

    def _pieces(self, parts: Tensor, parts_at_once: int, n: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the groups of each part to encode or decode at once."""
        groups, extent = self._grouping(n)
        numbers = _DEVICE_NUMBERS if launches_kernels(parts) else _CACHED_NUMBERS
        count = max(1, numbers // (parts_at_once * parts.shape[1] * extent))
        for begin in range(0, groups, count):
            yield begin, min(begin + count, groups)

    def _new_packed(self, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialised tensor for packed rows of `shape[-1]` numbers."""
        return like.new_empty(*shape[:-1], self._packed_bytes(shape[-1]), dtype=torch.uint8)

    def _scales(self, packed: Tensor, n: int) -> Tensor:
        groups, _ = self._grouping(n)
        return from_bytes(packed[..., -4 * groups :], torch.float32)

    def _grouping(self, n: int) -> tuple[int, int]:
        """Return the number and extent of the equal groups that `n` elements are padded to."""
        # Equal groups, rather than full ones and a rest, so that a row can be viewed as (groups, extent).
        groups = math.ceil(n / _GROUP)
        extent = math.ceil(n / groups)
        # Two numbers of 4 bits share a byte.
        return groups, extent + (extent % 2 if self.bits == 4 else 0)

    def _main(self) -> dict[str, str]:
        return {"bits": str(self.bits)}


def _side_by_side(rows: Tensor, packed: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts (parts, rows, chunk) of rows (rows, n), with their `packed` (parts, rows, packed).

    All at once on a device, where launching kernels takes longer than running them; one by one on CPUs, where the last
    ones may be short, and what one works on stays in the cache.
    """
    if launches_kernels(rows):
        yield split_by_rank(rows, len(packed), chunk), packed
        return
    for index, some in enumerate(packed.split(1)):
        yield rows[:, index * chunk : (index + 1) * chunk].unsqueeze(0), some


def _elements(parts: Tensor, begin: int, end: int) -> Tensor:
    """Return a range of the last of three dimensions, as far as there is one."""
    size = parts.shape[2]
    if end <= size:
        return parts.narrow(2, begin, end - begin)  # faster than an index
    return parts[..., begin:end]


def _padded(parts: Tensor, extent: int) -> Tensor:
    missing = extent - parts.shape[2]
    return torch.nn.functional.pad(parts, (0, missing)) if missing else parts


def _peaks(grouped: Tensor) -> Tensor:
    """Return the largest magnitudes along the last dimension, in a new tensor; NaN passes."""
    if launches_kernels(grouped):
        return torch.linalg.vector_norm(grouped, torch.inf, -1)  # one kernel instead of four
    return torch.maximum(grouped.amax(-1), grouped.amin(-1).neg_())  # several times faster than a norm on CPUs


class Sign(Compressor):
    """Send one bit per element and one scale per tensor, in the two phases of `Quantize`.

        C(x) = s sign(x),  s = mean|x|,  sign(0) = 1

    Both phases have their own residual: each rank for its tensors, and the owner of part r for the mean it encodes,

        M_i = g_i + e_i        c = mean(C(M_i)) + d        out = C(c)        d' = c - C(c)

    Not linear, biased; it needs error feedback to converge. On a small CNN of 500 steps the loss ended 1.3 % above the
    dense one, and within 0.1 % with `start_step=50`. It does not suit AdamW, which makes full steps of what one bit
    adds to elements without a gradient: a small GPT of 600 steps ended 43 % above, with dense embeddings and
    `start_step=50` 15 %.

    Args:
        kwargs: The arguments of every compressor, see `Compressor`; `feedback=None` turns off both residuals.

    Sources: EF-signSGD, Karimireddy et al. 2019, arXiv 1901.09847; two phases: 1-bit Adam, arXiv 2102.02888.
    """

    linear = False
    unbiased = False
    collective = "two_phase"
    method_slots = frozenset({"server_residual"})

    @property
    def scatters(self) -> bool:
        """True without `ef21`, whose memory holds the whole mean."""
        return self.feedback.kind != "ef21"

    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        rows = work.flatten(1)
        size = step.group.size
        n = rows.shape[1]
        shard = block.shard or _chunk(n, size)
        scales = rows.abs().mean(1).float()
        parts = split_by_rank(rows, size, shard)
        bits = pack_signs(torch.nn.functional.pad(parts, (0, _chunk(shard, 1) - shard)))
        send = torch.cat([bits, as_bytes(scales.unsqueeze(1)).expand(size, -1, -1)], dim=2)
        received = (yield AllToAllRequest(send.view(size, -1))).reshape(send.shape)
        mine = _mean_of_messages(received, rows.dtype)
        if block.keep_rest:
            sent = unpack_signs(bits, rows.dtype)[..., :shard].transpose(0, 1).flatten(1)[:, :n]
            rows.sub_(sent * scales.to(rows.dtype).unsqueeze(1))
        if block.shard is not None:
            step.watch(mine)
            block.write_shard(mine, block.shard, step.group.rank)
            return
        everyone = yield AllGatherRequest(self._encode_part(mine, n, block, step).flatten())
        everyone = _decode(everyone.reshape(size, len(rows), -1), rows.dtype)
        step.watch(everyone)
        block.write(everyone.transpose(0, 1).flatten(1)[:, :n])

    @staticmethod
    def _encode_part(part: Tensor, n: int, block: GradientBlock, step: StepContext) -> Tensor:
        """Encode this rank's part (names, chunk) of the mean, with its residual."""
        chunk = part.shape[1]
        valid = min(max(n - step.group.rank * chunk, 0), chunk)
        # The last parts may be short: what was decoded beyond the tensor must not enter the scale.
        part[:, valid:] = 0
        if block.keep_rest:
            held = [step.memory.read("server_residual", name, block.device, (chunk,)) for name in block.names]
            for row, old in zip(part, held):
                if old is not None:
                    row.add_(old)
        scales = (part.abs().sum(1) / max(valid, 1)).float()
        bits = pack_signs(part)
        if block.keep_rest:
            staged = step.memory.stage("server_residual", block.names, (chunk,), part.dtype, part.device)
            torch.addcmul(
                part, unpack_signs(bits, part.dtype), scales.to(part.dtype).unsqueeze(1), value=-1, out=staged
            )
            staged[:, valid:] = 0
        return torch.cat([bits, as_bytes(scales.unsqueeze(1))], dim=1)


def _mean_of_messages(messages: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of what the ranks have sent, (ranks, names, packed), decoded and added up in their order."""
    if launches_kernels(messages):
        return _decode(messages, dtype).sum(0).div_(len(messages))
    total = _decode(messages[0], dtype)
    for message in messages[1:] if not messages.is_meta else ():  # the shape does not depend on the others
        total.add_(_decode(message, dtype))
    return total.div_(len(messages))


def _decode(messages: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers (..., 8 n) from messages (..., n + 4): signs, then the scale."""
    scales = from_bytes(messages[..., -4:], torch.float32).to(dtype)
    return unpack_signs(messages[..., :-4], dtype).mul_(scales)


def _chunk(n: int, size: int) -> int:
    """Return the elements of each rank's part of n, in whole bytes of signs."""
    return 8 * math.ceil(n / (8 * size))
