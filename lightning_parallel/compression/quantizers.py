"""Quantizers: send every element in fewer bits."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Literal, NamedTuple, Optional, Union, get_args

import torch
from torch import Tensor

from lightning_parallel.compression.compressor import Compressor, check_flag, check_integer, seeded_generator
from lightning_parallel.compression.feedback import FeedbackName, GradientBlock
from lightning_parallel.compression.rowwise import (
    Bits,
    aligned,
    decode_mean,
    decode_rows,
    encode_rows,
    packed_bytes,
    scales,
)
from lightning_parallel.compression.thin_products import Sum, works_in_cache
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
    pack_signs,
    pad,
    split_by_rank,
    unpack_signs,
)

__all__ = ["Cast", "Quantize", "Sign"]

_GROUP = 512  # elements that share a scale, at most
_WHOLE_RANKS = 2  # up to this number an all-gather of everything takes no more bytes than the two phases
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Quantizer(Compressor, Codec):
    """A compressor of whole tensors that can also encode the values of another compressor."""

    @property
    def scatters(self) -> bool:
        """True without `ef21`, whose memory holds the whole mean."""
        return self.feedback.kind != "ef21"

    @property
    def separate(self) -> bool:
        """True if the encoding draws random numbers."""
        return self.stochastic

    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        rows = work.flatten(1)
        mean, sent = yield from self.mean(rows, step, block.names, block.keep_rest)
        if sent is not None:
            rows.sub_(sent)
        block.write(mean)


class _Source(NamedTuple):
    """Numbers to encode, and how.

    Attributes:
        rows: Numbers (rows, n).
        noise: Draws the numbers of stochastic rounding; None to round to the nearest.
        rest: Leave the unsent part in `rows`.
        late: The sum to fill `rows`, one contiguous row, with.
    """

    rows: Tensor
    noise: Optional[torch.Generator] = None
    rest: bool = False
    late: Optional[Sum] = None


class Cast(Quantizer):
    """Sends elements in a shorter dtype, and sums them in this dtype.

        C(M) = W cast(M / W)        out = sum(cast(M_i / W))

    The division before the sum keeps the sum in range. Rounding makes the method biased. A half-precision cast is not
    linear.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import Cast, CompressedDDPStrategy

        trainer = Trainer(devices=2, strategy=CompressedDDPStrategy(Cast("bf16")))
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        dtype: `bf16`, `fp16`, `fp32` or a torch dtype.
        feedback: Error feedback: `classic`, `decayed`, `fading`, `ef21` or None, see `Compressor`.
        decay: Share of the old residual that `decayed` and `fading` keep, in [0, 1). By default 0.5 for `decayed` and
            0.95 for `fading`.
        start_step: Steps with full gradients before compression begins.
        min_numel: Tensors with fewer elements, or with less than two dimensions, are averaged uncompressed.

    Raises:
        ValueError: If `dtype` is not supported, or a number is out of range.
    """

    def __init__(
        self,
        dtype: Union[Literal["bf16", "fp16", "fp32"], torch.dtype] = "bf16",
        *,
        feedback: Optional[FeedbackName] = None,
        decay: Optional[float] = None,
        start_step: int = 0,
        min_numel: int = 1024,
    ) -> None:
        super().__init__(feedback=feedback, decay=decay, start_step=start_step, min_numel=min_numel)
        found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if not isinstance(found, torch.dtype) or found not in DTYPES.values():
            error = ValueError if isinstance(dtype, (str, torch.dtype)) else TypeError
            raise error(f"`dtype` must be one of {', '.join(DTYPES)} or such a torch dtype; got {dtype!r}")
        self.dtype: torch.dtype = found

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
        # Always a copy: the sum overwrites it, and `rows` are still needed. Divided before the sum, which might
        # otherwise overflow in 16 bits.
        short = (rows if size == 1 else rows / size).to(self.dtype, copy=True)
        return short, short.to(rows.dtype).mul_(size) if keep else None

    def _main(self) -> dict[str, str]:
        return {"dtype": next(repr(name) for name, dtype in DTYPES.items() if dtype == self.dtype)}


class Quantize(Quantizer):
    """Sends elements as integers of 8, 4 or 2 bits, with scale and bias per group of at most 512 elements.

        b = min x    s = (max x - b) / L        C(x) = s round((x - b) / s) + b        L = 255, 15 or 3

    Two bits suit the values of `TopK`, which have a sign and about one magnitude: `TopK(0.02, chunk=4096) |
    Quantize(2)`.

    Two ranks send each other all their integers. More ranks take the mean in two phases, to send fewer bytes. Each
    phase sends n bits/8 bytes per rank, for any number of ranks:

        1. rank r receives part r of every rank's integers and takes the mean, in the working dtype
        2. rank r encodes the mean again and all ranks gather it; omitted if each rank needs only its part

    Two phases would save two ranks no bytes, and would round a second time.

    With error feedback, the owner of a part also keeps the error of the second encoding, times the number of ranks. The
    mean of all residuals then accounts for both encodings. The method is not linear. It is unbiased with `stochastic`
    and without feedback.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CompressedDDPStrategy, Quantize

        trainer = Trainer(devices=2, strategy=CompressedDDPStrategy(Quantize(bits=8)))
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        bits: 8, 4 or 2.
        stochastic: Round up with the probability of the fraction: floor((x - b) / s + u), u uniform in [0, 1).
        seed: Seed of stochastic rounding. Every rank draws different numbers.
        feedback: Error feedback: `classic`, `decayed`, `fading`, `ef21` or None, see `Compressor`.
        decay: Share of the old residual that `decayed` and `fading` keep, in [0, 1). By default 0.5 for `decayed` and
            0.95 for `fading`.
        start_step: Steps with full gradients before compression begins.
        min_numel: Tensors with fewer elements, or with less than two dimensions, are averaged uncompressed.

    Raises:
        ValueError: If `bits` is not 8, 4 or 2, or another argument is out of range.

    Sources: QSGD, Alistarh et al. 2017, arXiv 1610.02132; two phases: 1-bit Adam, Tang et al. 2021, arXiv 2102.02888.
    """

    def __init__(
        self,
        bits: Bits = 8,
        *,
        stochastic: bool = False,
        seed: int = 0,
        feedback: Optional[FeedbackName] = "classic",
        decay: Optional[float] = None,
        start_step: int = 0,
        min_numel: int = 1024,
    ) -> None:
        super().__init__(feedback=feedback, decay=decay, start_step=start_step, min_numel=min_numel)
        check_integer("bits", bits)
        check_flag("stochastic", stochastic)
        check_integer("seed", seed)
        if bits not in get_args(Bits):
            raise ValueError(f"`bits` must be 8, 4 or 2; got {bits!r}")
        self.bits = bits
        self.stochastic = stochastic
        self.seed = seed

    def pack(self, rows: Tensor, noise: Optional[torch.Generator] = None) -> Tensor:
        return self._encode(_Source(rows, noise), 1, rows.shape[1]).flatten(1)

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        numbers = torch.empty(*packed.shape[:-1], n, dtype=dtype, device=packed.device)
        self._decode(packed.reshape(-1, 1, packed.shape[-1]), numbers.view(-1, n), n)
        return numbers

    def requests(self, block: GradientBlock, step: StepContext) -> Requests:
        """Replace the block's gradients by their mean, with error feedback around it."""
        first = block.gradients[0]
        is_lone = len(block.names) == 1 and block.shard is None and first.is_contiguous()
        if self.feedback.kind != "classic" or not (is_lone and works_in_cache(first)):
            yield from super().requests(block, step)
            return
        # `encode_rows` adds gradient and residual piece by piece, while the piece is in the cache.
        work, late = self.feedback.begin(block, step.memory, step.scale, in_place=False)
        yield from self._write_mean(work, block, step, late)
        self.feedback.update(block, step.memory, work, step.scale)

    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        if block.shard is None:
            yield from self._write_mean(work, block, step)
            return
        source = self._source(work.flatten(1), step, block.names, block.keep_rest)
        mine = yield from self._mean_part(source, step, block.shard)
        step.watch(mine)
        block.write_shard(mine, block.shard, step.group.rank)

    def mean(self, rows: Tensor, step: StepContext, purpose: object, keep: bool) -> MeanRequests:
        # `_mean` leaves the unsent part in `rest`, so the sent part is `rows` minus `rest`.
        rest = rows.clone() if keep else rows
        mean = torch.empty_like(rows)
        yield from self._mean(self._source(rest, step, purpose, keep), step, mean)
        return mean, rest.sub_(rows).neg_() if keep else None

    def _write_mean(
        self, work: Tensor, block: GradientBlock, step: StepContext, late: Optional[Sum] = None
    ) -> Requests:
        rows = work.flatten(1)
        into = block.outputs[0].view(1, -1) if len(block.outputs) == 1 else torch.empty_like(rows)
        yield from self._mean(self._source(rows, step, block.names, block.keep_rest, late), step, into)
        block.write(into)

    def _source(
        self, rows: Tensor, step: StepContext, purpose: object, rest: bool, late: Optional[Sum] = None
    ) -> _Source:
        # The seeds contain the rank: independent roundings cancel in the mean.
        seeds = (self.seed, step.number, purpose, step.group.rank)
        return _Source(rows, seeded_generator(rows.device, *seeds) if self.stochastic else None, rest, late)

    def _mean(self, source: _Source, step: StepContext, mean: Tensor) -> Requests:
        """Write the mean of the ranks' rows into `mean` (rows, n)."""
        is_two_phase = step.group.size > _WHOLE_RANKS
        yield from (self._mean_of_parts if is_two_phase else self._mean_of_wholes)(source, step, mean)

    def _mean_of_wholes(self, source: _Source, step: StepContext, mean: Tensor) -> Requests:
        """Send everything to the other rank: as many bytes as in two phases, with one rounding instead of two."""
        count, n = source.rows.shape
        chunk = math.prod(self._grouping(n))
        whole, packed = self._message(source.rows, step, chunk)
        self._encode(source, 1, chunk, packed)
        everyone = yield AllGatherRequest(packed, whole)
        everyone = everyone.reshape(step.group.size, -1, self._group_bytes(chunk))
        # A group with a NaN or infinity has a scale that is not finite, so watching the scales is enough.
        step.watch(scales(everyone.flatten(0, 1), self.bits))
        if mean.is_contiguous() and (count == 1 or n == chunk):
            decode_mean(everyone, mean.view(-1), self.bits)
            return
        padded = mean.new_empty(count, chunk)
        decode_mean(everyone, padded.view(-1), self.bits)
        mean.copy_(padded[:, :n])

    def _mean_of_parts(self, source: _Source, step: StepContext, mean: Tensor) -> Requests:
        """Send each rank its part, and gather the means of the parts."""
        rows = source.rows
        size = step.group.size
        rank = step.group.rank
        # The parts are full groups, so that `encode_rows` takes the parts of all ranks in one call.
        chunk = math.prod(self._grouping(math.ceil(rows.shape[1] / size)))
        mine = yield from self._mean_part(source, step, chunk)
        # `source.noise` continues, so the rounding of the second phase is independent of the first.
        whole, packed = self._message(rows, step, chunk)
        self._encode(source._replace(rows=mine, late=None), 1, chunk, packed)
        if source.rest:
            # The error of the second encoding belongs to all ranks. The owner keeps it times the number of ranks, so
            # that it counts once in the mean of the residuals.
            part = rows[:, rank * chunk : (rank + 1) * chunk]
            part.add_(mine[:, : part.shape[1]], alpha=size)
        everyone = (yield AllGatherRequest(packed, whole)).reshape(size, len(rows), -1)
        step.watch(scales(everyone.reshape(-1, self._group_bytes(chunk)), self.bits))
        self._decode(everyone.transpose(0, 1), mean, chunk)

    def _mean_part(self, source: _Source, step: StepContext, chunk: int) -> Generator[Request, Tensor, Tensor]:
        """Run the first phase and return this rank's part (rows, chunk) of the mean. The last parts may be short."""
        size = step.group.size
        count = len(source.rows)
        packed = self._encode(source, size, chunk)
        received = yield AllToAllRequest(packed.transpose(0, 1).reshape(size, -1))
        groups, extent = self._grouping(chunk)
        mine = source.rows.new_empty(count, groups * extent)
        decode_mean(received.reshape(size, count * groups, -1), mine.view(-1), self.bits)
        return mine[:, :chunk]

    def _message(self, rows: Tensor, step: StepContext, chunk: int) -> tuple[Tensor, Tensor]:
        """Return memory for the bytes of all ranks, (ranks, n), and the row of this rank, for `chunk` numbers a row."""
        groups, _ = self._grouping(chunk)
        n = len(rows) * groups * self._group_bytes(chunk)
        whole = rows.new_empty(step.group.size, n, dtype=torch.uint8)
        return whole, whole[step.group.rank]

    def _encode(self, source: _Source, parts: int, chunk: int, into: Optional[Tensor] = None) -> Tensor:
        """Return bytes (rows, parts, packed) of the rows, each in parts of `chunk` numbers, followed by zeros.

        Args:
            into: Memory of as many bytes for them; new memory when omitted.
        """
        rows, noise, rest, late = source
        groups, extent = self._grouping(chunk)
        count, n = rows.shape
        shape = count, parts, groups * self._group_bytes(chunk)
        packed = rows.new_empty(shape, dtype=torch.uint8) if into is None else into.view(shape)
        flat = packed.view(-1, self._group_bytes(chunk))
        # Rows of full groups are encoded in place. Other rows need padding between their parts, or at their ends.
        if rows.is_contiguous() and (n == parts * groups * extent or (count == 1 and chunk == groups * extent)):
            encode_rows(rows.view(-1), flat, self.bits, noise, rest, late)
            return packed
        padded = pad(pad(rows, parts * chunk).view(count * parts, chunk), groups * extent)
        # `pad` returns its argument if nothing is missing, and `encode_rows` writes into its numbers.
        padded = padded.clone() if padded.data_ptr() == rows.data_ptr() else padded
        encode_rows(padded.view(-1), flat, self.bits, noise, rest)
        if rest:
            rows.copy_(padded[:, :chunk].reshape(count, -1)[:, :n])
        return packed

    def _decode(self, packed: Tensor, rows: Tensor, chunk: int) -> None:
        """Decode bytes (rows, parts, packed) into rows (rows, n), parts of `chunk` numbers side by side."""
        groups, extent = self._grouping(chunk)
        count, parts, _ = packed.shape
        flat = packed.reshape(-1, self._group_bytes(chunk))
        n = rows.shape[1]
        if rows.is_contiguous() and (n == parts * groups * extent or (count == 1 and chunk == groups * extent)):
            decode_rows(flat, rows.view(-1), self.bits)
            return
        padded = rows.new_empty(count * parts, groups * extent)
        decode_rows(flat, padded.view(-1), self.bits)
        rows.copy_(padded[:, :chunk].reshape(count, -1)[:, :n])

    def _group_bytes(self, chunk: int) -> int:
        return packed_bytes(self._grouping(chunk)[1], self.bits)

    def _grouping(self, n: int) -> tuple[int, int]:
        """Return the number and extent of the equal groups that `n` elements are padded to."""
        # Equal groups, instead of full groups and a short group, let a row be viewed as (groups, extent).
        groups = math.ceil(n / _GROUP)
        extent = math.ceil(n / groups)
        return groups, extent + -extent % aligned(self.bits)

    def _main(self) -> dict[str, str]:
        return {"bits": str(self.bits)}


class Sign(Compressor):
    """Sends one bit per element and one scale per tensor, in the two phases of `Quantize`.

        C(x) = s sign(x),  s = mean|x|,  sign(0) = 1

    Each phase has its own residual. Each rank keeps one for its tensors. The owner of part r keeps one for the mean
    that it encodes:

        M_i = g_i + e_i        c = mean(C(M_i)) + d        out = C(c)        d' = c - C(c)

    The method is biased and not linear. It needs error feedback to converge. On a small CNN of 500 steps the loss ended
    1.3 % above the uncompressed loss, and within 0.1 % with `start_step=50`. Do not use it with AdamW. One bit also
    changes elements without a gradient, and AdamW makes full steps of these changes. A small GPT of 600 steps ended 34
    % above, with dense embeddings and `start_step=50` 11 %.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CompressedDDPStrategy, Sign

        trainer = Trainer(devices=2, strategy=CompressedDDPStrategy(Sign(start_step=100)))
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        feedback: Error feedback: `classic`, `decayed`, `fading`, `ef21` or None (no residual at all), see `Compressor`.
        decay: Share of the old residual that `decayed` and `fading` keep, in [0, 1). By default 0.5 for `decayed` and
            0.95 for `fading`.
        start_step: Steps with full gradients before compression begins.
        min_numel: Tensors with fewer elements, or with less than two dimensions, are averaged uncompressed.

    Raises:
        ValueError: If an argument is out of range.

    Sources: EF-signSGD, Karimireddy et al. 2019, arXiv 1901.09847; two phases: 1-bit Adam, arXiv 2102.02888.
    """

    loss_under_adam = "34 % higher than with uncompressed gradients, 11 % with dense embeddings and `start_step=50`"

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
        # Eight signs fill a byte, so each part is filled up to full bytes.
        bits = pack_signs(torch.nn.functional.pad(parts, (0, _chunk(shard, 1) - shard)))
        # Each rank receives one part of a tensor, and needs the scale of the full tensor beside it.
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
        # The last parts may be short: decoded numbers beyond the tensor must not enter the scale.
        part[:, valid:] = 0
        if block.keep_rest:
            held = [step.memory.read("server_residual", name, block.device, (chunk,)) for name in block.names]
            for row, old in zip(part, held):
                if old is not None:
                    row.add_(old)
        scales = (part.abs().sum(1) / max(valid, 1)).float()
        bits = pack_signs(part)
        if block.keep_rest:
            staged = step.memory.stage(block.stack_key("server_residual", (chunk,)))
            torch.addcmul(
                part, unpack_signs(bits, part.dtype), scales.to(part.dtype).unsqueeze(1), value=-1, out=staged
            )
            # Positions beyond the tensor must not accumulate a residual.
            staged[:, valid:] = 0
        return torch.cat([bits, as_bytes(scales.unsqueeze(1))], dim=1)


def _mean_of_messages(messages: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode the messages of the ranks, (ranks, names, packed), and return their mean, summed in rank order."""
    if launches_kernels(messages):
        return _decode(messages, dtype).sum(0).div_(len(messages))
    total = _decode(messages[0], dtype)
    for message in messages[1:] if not messages.is_meta else ():  # the shape does not depend on further messages
        total.add_(_decode(message, dtype))
    return total.div_(len(messages))


def _decode(messages: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers (..., 8 n) from messages (..., n + 4): signs, then the scale."""
    scales = from_bytes(messages[..., -4:], torch.float32).to(dtype)
    return unpack_signs(messages[..., :-4], dtype).mul_(scales)


def _chunk(n: int, size: int) -> int:
    """Return the elements of each rank's part of n, rounded up to full bytes of signs."""
    return 8 * math.ceil(n / (8 * size))
