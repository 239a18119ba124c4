"""Sparsifiers: send some elements exactly, keep the others for later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Optional, Union

import numpy as np
import torch
from torch import Tensor

from lightning_parallel.compression.arguments import (
    StepValue,
    all_values,
    check_integer,
    check_ratio,
    seeded_generator,
    value_at,
)
from lightning_parallel.compression.compressor import Compressor
from lightning_parallel.compression.feedback import FeedbackName, GradientBlock
from lightning_parallel.compression.wire import (
    AllGatherRequest,
    AllReduceRequest,
    Codec,
    Requests,
    StepContext,
    Traffic,
    as_bytes,
    from_bytes,
    pad,
)

__all__ = ["BlockTopK", "RandomK", "Sparsifier", "TopK", "largest"]

_SPAN = 1 << 16  # elements that a two-byte index can tell apart


class Sparsifier(Compressor):
    """What sparsifiers have in common.

    Args:
        ratio: Share of the elements to send, in (0, 1], or a schedule of it.
        feedback: Error feedback.
        decay: How much of the old residual `decayed` keeps, in [0, 1); 0.5 when omitted.
        momentum: Momentum correction: the momentum of SGD, applied before the selection. Give the optimizer none.
        start_step: Steps with plain means before compression begins.
        min_numel: Tensors with fewer elements, and those of less than two dimensions, are averaged as they are.
        values: Encoding of the values sent: `TopK(0.01) | Quantize(8)`.
        seed: Of the random choices, where there are any.
    """

    codecs: ClassVar[tuple[str, ...]] = ("Cast", "Quantize")

    def __init__(
        self,
        ratio: Union[float, StepValue] = 0.02,
        feedback: Optional[FeedbackName] = "classic",
        decay: Optional[float] = None,
        momentum: float = 0.0,
        start_step: int = 0,
        min_numel: int = 1024,
        values: Optional[Codec] = None,
        seed: int = 0,
    ) -> None:
        super().__init__(feedback, decay, start_step, min_numel, values, momentum)
        for value in all_values(ratio):
            check_ratio("ratio", value)
        check_integer("seed", seed)
        self.ratio, self.seed = ratio, seed

    def _count(self, n: int, step: int) -> int:
        return max(1, round(value_at(self.ratio, step) * n))

    def _main(self) -> dict[str, str]:
        return {"ratio": f"ratio={self.ratio}"}


class TopK(Sparsifier):
    """Send the k = ratio n elements of largest magnitude of each tensor, with their positions, to all ranks.

        C(M) = M where |M| is among the k largest, 0 elsewhere        out = mean(C(M_i)), by all-gather

    Contraction: |C(M) - M|^2 <= (1 - k/n) |M|^2. Biased and not linear. A position takes two bytes (an offset in a
    span of 65 536, and one count per span). Over W ranks one rank sends (W - 1) k (value + 2) bytes, so from W = 8 /
    (ratio (value + 2)) on a plain all-reduce sends less.

    An element waits about 1 / ratio steps. On a small CNN the loss was within 1 % of the dense one at 2 % after 500
    steps and at 1 % after 1000. A small GPT of 600 steps under AdamW, which scales every element by its own history,
    was still 28 % above at 2 % and 5.6 % at 20 %. See `Sparsifier` for the arguments.

    Source: Aji and Heafield 2017, arXiv 1704.05021; momentum: Lin et al. 2018, arXiv 1712.01887.
    """

    linear = False
    unbiased = False
    collective = "all_gather"

    def traffic(self, shape: Sequence[int], element_bytes: int, world_size: int, step: int) -> list[Traffic]:
        n = math.prod(shape)
        k = self._count(n, step)
        value_bytes = self.values.packed_bytes(k, element_bytes)
        return [Traffic("all_gather", value_bytes + 2 * k + 4 * math.ceil(n / _SPAN))]

    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        rows = work.flatten(1)
        n, k = rows.shape[1], self._count(rows.shape[1], step.number)
        positions = largest(rows, k)
        values = rows.gather(1, positions)
        noise = seeded_generator(rows.device, self.seed, step.number, block.names, step.group.rank)
        packed = self.values.pack(values, noise)
        if block.keep_rest:
            rows.scatter_(1, positions, values - self.values.unpack(packed, k, rows.dtype))
        block.sent = positions
        message = torch.cat([packed, _pack_positions(positions, n)], dim=1)
        everyone = yield AllGatherRequest(message.flatten())
        everyone = everyone.reshape(step.group.size, *message.shape)
        values = self.values.unpack(everyone[..., : packed.shape[1]], k, rows.dtype)
        step.watch(values)
        values.div_(step.group.size)
        for index, output in enumerate(block.outputs):
            flat = output.view(-1).zero_()
            for some, where in zip(values[:, index], everyone[:, index, packed.shape[1] :]):
                flat.index_add_(0, _unpack_positions(where, k), some)  # rank by rank: the sum has one order


class RandomK(Sparsifier):
    """Send k = ratio n random elements, the same on all ranks, so positions need not travel and an all-reduce suffices.

    The tensor is divided into k nearly equal runs and one element is drawn from each, from a generator that depends on
    seed, step and parameter name only.

        with feedback       C(M) = M at the drawn positions                    linear
        without             C(M) = M times the length of the run, there        linear and unbiased

    A quarter of the elements is the least at which a small CNN stayed within 1 % of the dense loss (500 steps); a small
    GPT under AdamW was then 23 % above (600 steps). See `Sparsifier`.

    Source: Stich et al. 2018, arXiv 1809.07599; sampling one element per run keeps memory access in order.
    """

    def __init__(
        self,
        ratio: Union[float, StepValue] = 0.25,
        feedback: Optional[FeedbackName] = "classic",
        decay: Optional[float] = None,
        momentum: float = 0.0,
        start_step: int = 0,
        min_numel: int = 1024,
        values: Optional[Codec] = None,
        seed: int = 0,
    ) -> None:
        super().__init__(ratio, feedback, decay, momentum, start_step, min_numel, values, seed)

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.values.linear and self.feedback.kind != "ef21"

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.feedback.kind is None and self.values.unbiased

    @property
    def collective(self) -> str:  # type: ignore[override]
        return self.values.collective

    def traffic(self, shape: Sequence[int], element_bytes: int, world_size: int, step: int) -> list[Traffic]:
        return self.values.mean_traffic(self._count(math.prod(shape), step), element_bytes, world_size)

    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        rows = work.flatten(1)
        n, k = rows.shape[1], self._count(rows.shape[1], step.number)
        starts = torch.arange(k + 1) * n // k
        lengths = starts.diff()
        draws = [seeded_generator(starts.device, self.seed, step.number, name) for name in block.names]
        uniform = torch.stack([torch.rand(k, generator=draw, dtype=torch.float64) for draw in draws])
        positions = (starts[:-1] + (uniform * lengths).long()).to(rows.device)
        values = rows.gather(1, positions)
        if self.feedback.kind is None:
            values.mul_(lengths.to(rows))
        values[:, 0].add_(rows.sum(1), alpha=0)  # NaN, if there is something non-finite that was not drawn
        mean, sent = yield from self.values.mean(values, step, block.names, block.keep_rest)
        if sent is not None:
            rows.scatter_(1, positions, values - sent)
        block.sent = positions
        for output, where, some in zip(block.outputs, positions, mean):
            output.view(-1).zero_().scatter_(0, where, some)


class BlockTopK(Sparsifier):
    """Send the blocks of consecutive elements that are largest over all ranks together: no positions, no all-gather.

        1. all-reduce of the squared norms of all blocks of the flattened tensor: every rank chooses the same blocks
        2. all-reduce of the elements of the chosen blocks

    The first phase costs 1 / block of the dense bytes. Biased and not linear. On a small CNN of 500 steps the loss
    stayed within 1 % of the dense one at 10 % of the blocks, not at 5 %; that of a small GPT under AdamW (600 steps)
    was 22 % above at 10 % and 3.5 % at 50 %.

    Args:
        ratio: Share of the blocks to send, in (0, 1], or a schedule of it.
        block: Elements of a block.
        feedback: See `Sparsifier`, as for all further arguments.

    Source: agreed sparsification, Shi et al. 2019, arXiv 1902.06855.
    """

    linear = False
    unbiased = False

    def __init__(
        self,
        ratio: Union[float, StepValue] = 0.1,
        block: int = 256,
        feedback: Optional[FeedbackName] = "classic",
        decay: Optional[float] = None,
        momentum: float = 0.0,
        start_step: int = 0,
        min_numel: int = 1024,
        values: Optional[Codec] = None,
    ) -> None:
        super().__init__(ratio, feedback, decay, momentum, start_step, min_numel, values)
        check_integer("block", block, least=1)
        self.block = block

    @property
    def collective(self) -> str:  # type: ignore[override]
        return self.values.collective

    def traffic(self, shape: Sequence[int], element_bytes: int, world_size: int, step: int) -> list[Traffic]:
        num_blocks = math.ceil(math.prod(shape) / self.block)
        chosen = self._count(num_blocks, step) * self.block
        values = self.values.mean_traffic(chosen, element_bytes, world_size)
        return [Traffic("all_reduce", element_bytes * num_blocks), *values]

    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        rows = work.flatten(1)
        n, num_blocks = rows.shape[1], math.ceil(rows.shape[1] / self.block)
        padded = pad(rows, num_blocks * self.block)
        blocks = padded.view(len(rows), num_blocks, self.block)
        norms = yield AllReduceRequest(torch.linalg.vector_norm(blocks, dim=2).square_())
        step.watch(norms)
        chosen = norms.topk(self._count(num_blocks, step.number), dim=1).indices.sort(dim=1).values
        positions = (chosen.unsqueeze(2) * self.block + torch.arange(self.block, device=rows.device)).flatten(1)
        values = padded.gather(1, positions)
        mean, sent = yield from self.values.mean(values, step, block.names, block.keep_rest)
        if sent is not None:
            padded.scatter_(1, positions, values - sent)
            if padded is not rows:
                rows.copy_(padded[:, :n])
        block.sent = positions.clamp_max(n - 1)  # what is clamped belongs to the last block, which was sent
        for output, where, some in zip(block.outputs, positions, mean):
            inside = len(where) - (num_blocks * self.block - n) * int(where[-1] >= n)
            output.view(-1).zero_().scatter_(0, where[:inside], some[:inside])


def _pack_positions(positions: Tensor, n: int) -> Tensor:
    """Bytes (rows, 2 k + 4 spans) of ascending positions (rows, k) below n."""
    spans = math.ceil(n / _SPAN)
    counts = torch.zeros(len(positions), spans, dtype=torch.int32, device=positions.device)
    counts.scatter_add_(1, positions // _SPAN, torch.ones_like(positions, dtype=torch.int32))
    offsets = (positions % _SPAN).to(torch.int32).to(torch.int16)
    return torch.cat([as_bytes(counts), as_bytes(offsets)], dim=1)


def _unpack_positions(packed: Tensor, k: int) -> Tensor:
    counts, offsets = from_bytes(packed[: len(packed) - 2 * k], torch.int32), from_bytes(packed[-2 * k :], torch.int16)
    spans = torch.arange(len(counts), device=packed.device) * _SPAN
    return torch.repeat_interleave(spans, counts, output_size=k) + (offsets.to(torch.int64) & (_SPAN - 1))


_STRIDE = 61  # of the sample from which a first threshold is taken
_PIECE = 1 << 16  # elements looked at in one go: they stay in the cache


def largest(rows: Tensor, k: int) -> Tensor:
    """Positions (rows, k) of the k largest magnitudes in each row of (rows, n), ascending.

    NaN and infinity count as largest. Of equal magnitudes at the boundary the first are taken on the CPU.
    """
    if rows.device.type != "cpu":
        return rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    integers = torch.int64 if rows.dtype == torch.float64 else torch.int32
    return torch.stack([torch.from_numpy(_largest(row, k)) for row in rows.contiguous().view(integers).numpy()])


def _largest(bits: np.ndarray, k: int) -> np.ndarray:
    # Without its sign bit, a float orders as an integer does, NaN above all.
    mask = np.iinfo(bits.dtype).max
    threshold = _threshold(bits[:: min(_STRIDE, max(1, k // 16))] & mask, k / len(bits))
    candidates, magnitudes = [], []
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE] & mask
        found = np.flatnonzero(piece >= threshold)
        candidates.append(found + start)
        magnitudes.append(piece[found])
    positions, chosen = np.concatenate(candidates), np.concatenate(magnitudes)
    if len(positions) < k:  # the sample misled
        positions, chosen = np.arange(len(bits)), bits & mask
    boundary = np.partition(chosen, len(chosen) - k)[len(chosen) - k]
    above = chosen > boundary
    ties = np.flatnonzero(chosen == boundary)[: k - np.count_nonzero(above)]
    above[ties] = True
    return positions[above]


def _threshold(sample: np.ndarray, share: float) -> np.integer:
    """A magnitude that, as a sample tells, somewhat more than the wanted share of all elements reach."""
    expected = share * len(sample)
    rank = min(len(sample), int(expected + 4 * expected**0.5) + 1)
    return np.partition(sample, len(sample) - rank)[len(sample) - rank]
