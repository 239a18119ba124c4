"""Encodes numbers as integers of 8, 4 or 2 bits, in groups: row by row, from the least to the largest of a group.

    8 bits     | q, one byte each  |            | scale, fp32 | bias, fp32 |    x = q scale + bias
    4 bits     | q, two in a byte  | peak, fp32 | scale, fp16 | bias, fp16 |    x = (q scale + bias) peak
    2 bits     | q, four in a byte | peak, fp32 | scale, fp16 | bias, fp16 |    x = (q scale + bias) peak

torch's fused kernels for embedding tables write q, scale and bias, on CPUs several times faster than single operations.
Other cases (devices, fp64, stochastic rounding) use single operations, which give the same bits in fp32. Ranks may
therefore mix both; the mean over ranks, `decode_mean`, may differ in the last bit. This module closes two gaps of the
kernels:

    With 8 bits, they add 1e-8 to the width of a group before they compute q, and not to its scale. Here the scale
    includes it. A group of width 2^-20 thus has levels that are 1 % wider. Narrower groups are multiplied by 2^56.
    With fewer bits, whose scale has the small range of fp16, numbers are divided by the largest magnitude, the peak.
    The kernels take its bytes for more q. They thus read and write whole rows of the message, without copies.
    They may ignore NaN. This module finds the least and the largest number, which show NaN and infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, Optional

import numpy as np
import torch
from torch import Tensor

from lightning_parallel.compression.thin_products import Sum
from lightning_parallel.compression.wire import as_bytes, from_bytes, launches_kernels

__all__ = ["Bits", "aligned", "decode_mean", "decode_rows", "encode_rows", "packed_bytes", "scales"]

Bits = Literal[8, 4, 2]

_HOST_NUMBERS = 1 << 20  # that a CPU works on in one go: each operation costs a call, and temporary tensors stay in L3
_DEVICE_NUMBERS = 1 << 26  # that a device works on in one go: few kernels, and no large temporary tensors
_EPSILON = 1e-8  # of torch's kernel
_EPSILON_SCALE = float(torch.tensor(_EPSILON) / 255)  # in fp32
_NARROW = 2.0**-20 / 255  # scale of a group below which the epsilon would cost levels
_ENLARGED = 2.0**56
_FUSED = hasattr(torch.ops.quantized, "embedding_bag_byte_prepack")
_KINDS = {8: "byte", 4: "4bit", 2: "2bit"}  # in the names of torch's kernels
_TAKES_ENDS = hasattr(torch.ops.quantized, "embedding_bag_byte_prepack_with_rowwise_min_max")  # torch 2.10


def aligned(bits: int) -> int:
    """Return the numbers to which groups are filled up, so that the fp32 behind them is aligned."""
    return max(8, 32 // bits)


def packed_bytes(extent: int, bits: int) -> int:
    """Return the bytes of a group of `extent` numbers."""
    return extent * bits // 8 + 8


def scales(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers in `packed` (..., bytes) that are not finite if a number of the group was not."""
    floats = _floats(packed)
    return floats[..., -2:] if bits == 8 else floats[..., -2]


def _floats(packed: Tensor) -> Tensor:
    """Return bytes (..., n), n a multiple of 4, as numbers of fp32 (..., n / 4)."""
    # A part of a joined message may begin at any byte, and a view of floats must not. Other parts are not copied: torch
    # would copy the scales byte by byte, which takes as long as a pass over all numbers.
    starts = (packed.storage_offset(), *packed.stride()[:-1])
    return packed.view(torch.float32) if not any(one % 4 for one in starts) else from_bytes(packed, torch.float32)


def encode_rows(
    numbers: Tensor,
    packed: Tensor,
    bits: int,
    noise: Optional[torch.Generator] = None,
    rest: bool = False,
    late: Optional[Sum] = None,
) -> None:
    """Encode `numbers` (n), followed by zeros, into `packed` (groups, bytes).

    Args:
        noise: Draws the numbers of stochastic rounding; None to round to the nearest.
        rest: Leave the loss of the encoding in `numbers`.
        late: The sum to fill `numbers` with before encoding: one contiguous gradient and its residual.
    """
    if numbers.is_meta:  # an estimate of bytes needs only the size of `packed`
        return
    extent = (packed.shape[1] - 8) * 8 // bits
    for begin, end in _pieces(packed, 1, extent):
        place = slice(begin * extent, end * extent)
        piece = numbers[place]
        # Filled piece by piece: the encoding finds the sum in the cache of the CPU.
        if late is not None:
            _fill(piece, late, place)
        whole, tail = len(piece) // extent, len(piece) % extent
        if whole:
            rows = piece[: whole * extent].view(whole, extent)
            _encode(rows, packed[begin : begin + whole], bits, noise, rest)
        if begin + whole == end:
            continue
        # The last numbers do not fill a group: zeros in a copy fill it.
        padded = piece.new_zeros(end - begin - whole, extent)
        padded[0, :tail] = piece[whole * extent :]
        _encode(padded, packed[begin + whole : end], bits, noise, rest)
        if rest:
            piece[whole * extent :] = padded[0, :tail]


def _fill(piece: Tensor, late: Sum, place: slice) -> None:
    gradient = late.gradients[0].view(-1)[place]
    if late.old is not None:
        torch.add(late.old.view(-1)[place], gradient, alpha=late.factor, out=piece)
        return
    piece.copy_(gradient)
    if late.factor != 1:
        piece.mul_(late.factor)


def decode_rows(packed: Tensor, numbers: Tensor, bits: int) -> None:
    """Decode the first n numbers of `packed` (groups, bytes) into `numbers` (n)."""
    if numbers.is_meta:
        return
    extent = (packed.shape[1] - 8) * 8 // bits
    for begin, end in _pieces(packed, 1, extent):
        piece = numbers[begin * extent : end * extent]
        if len(piece):
            _put(_decode(packed[begin:end], bits, numbers.dtype), piece)


def decode_mean(packed: Tensor, numbers: Tensor, bits: int) -> None:
    """Decode the first n numbers of `packed` (ranks, groups, bytes) into `numbers` (n): the mean over the ranks.

    Ranks with torch's kernels get the same bits from the same bytes. Ranks without them may differ in the last bit.
    """
    if numbers.is_meta:
        return
    ranks, groups, num_bytes = packed.shape
    extent = (num_bytes - 8) * 8 // bits
    is_fused = _FUSED and numbers.dtype == torch.float32 and not launches_kernels(numbers)
    packed = packed.contiguous()  # a part of a joined message is not
    for begin, end in _pieces(packed[0], 1 if is_fused else ranks, extent):
        into = numbers[begin * extent : end * extent]
        if is_fused:
            _put(_mean_fused(packed, begin, end, bits), into)
            continue
        found = _decode(packed[:, begin:end].reshape(-1, num_bytes), bits, numbers.dtype).view(ranks, -1)
        torch.sum(found[:, : len(into)], 0, out=into)
        into.div_(ranks)


def _put(rows: Tensor, numbers: Tensor) -> None:
    """Copy the first n of `rows` (groups, extent), which may be a part of wider rows, to `numbers` (n)."""
    if rows.numel() == len(numbers):
        numbers.view(rows.shape).copy_(rows)
    else:
        numbers.copy_(rows.reshape(-1)[: len(numbers)])


def _mean_fused(packed: Tensor, begin: int, end: int, bits: int) -> Tensor:
    """Return the mean over the ranks, (groups, extent): each group is a bag of one row of each rank."""
    ranks, groups, num_bytes = packed.shape
    indices, offsets, weights = _bags(ranks, groups, end - begin)
    rows = packed.view(-1, num_bytes)[begin:]
    if bits < 8:
        # The peaks, which torch's kernel does not know, are the weights of the rows.
        weights = scales(packed[:, begin:end], bits).t().reshape(-1) / ranks
    bag = getattr(torch.ops.quantized, f"embedding_bag_{_KINDS[bits]}_rowwise_offsets")
    found: Tensor = bag(rows, indices, offsets, per_sample_weights=weights, include_last_offset=True)
    return found[:, : (num_bytes - 8) * 8 // bits]


@lru_cache(maxsize=64)
def _bags(ranks: int, stride: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row indices and offsets of `count` bags, `stride` rows from rank to rank, and equal weights."""
    indices = torch.arange(count, dtype=torch.int32).unsqueeze(1) + stride * torch.arange(ranks, dtype=torch.int32)
    offsets = torch.arange(0, count * ranks + 1, ranks, dtype=torch.int32)
    return indices.view(-1), offsets, torch.full((count * ranks,), 1 / ranks)


def _pieces(packed: Tensor, at_once: int, extent: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of groups to work on at once; a piece holds `at_once` times the numbers of its range."""
    count = max(1, (_DEVICE_NUMBERS if launches_kernels(packed) else _HOST_NUMBERS) // (at_once * extent))
    for begin in range(0, len(packed), count):
        yield begin, min(begin + count, len(packed))


def _encode(rows: Tensor, packed: Tensor, bits: int, noise: Optional[torch.Generator], rest: bool) -> None:
    """Encode rows (groups, extent), all of them at once."""
    is_fused = _FUSED and noise is None and rows.dtype == torch.float32 and not launches_kernels(rows)
    if is_fused and bits == 8:
        _encode_bytes_fused(rows, packed)
    elif is_fused:
        _encode_short_fused(rows, packed, bits)
    elif bits == 8:
        _encode_bytes(rows, packed, noise)
    else:
        _encode_short(rows, packed, bits, noise)
    if rest:
        rows.sub_(_decode(packed, bits, rows.dtype))


def _decode(packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return rows (groups, extent)."""
    packed = packed.contiguous()
    if packed.storage_offset() % 4:
        packed = packed.clone()  # a slice of a joined message may begin at any byte, and a view of floats must not
    is_fused = _FUSED and dtype == torch.float32 and not launches_kernels(packed)
    if bits == 8:
        if is_fused:
            return torch.ops.quantized.embedding_bag_byte_unpack(packed)
        ends = packed[:, -8:].view(torch.float32).to(dtype)
        return torch.addcmul(ends[:, 1:], packed[:, :-8].to(dtype), ends[:, :1])
    peaks = scales(packed, bits).unsqueeze(1).to(dtype)
    if is_fused:
        found: Tensor = getattr(torch.ops.quantized, f"embedding_bag_{_KINDS[bits]}_unpack")(packed)
        return found[:, : (packed.shape[1] - 8) * 8 // bits].mul_(peaks)
    joint, most = packed[:, :-8], (1 << bits) - 1
    # The first levels need no shift, and the last ones no mask.
    middle = [joint >> shift & most for shift in range(bits, 8 - bits, bits)]
    levels = torch.stack([joint & most, *middle, joint >> 8 - bits], dim=2).flatten(1).to(dtype)
    ends = packed[:, -4:].view(torch.float16).to(dtype)
    return torch.addcmul(ends[:, 1:], levels, ends[:, :1]).mul_(peaks)


def _prepacked(rows: Tensor, least: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Return rows (groups, extent), whose ends (groups, 1) are known, as torch's kernel encodes them."""
    if _TAKES_ENDS:
        # The kernel would find the ends itself, but hide NaN.
        kernel = getattr(torch.ops.quantized, f"embedding_bag_{_KINDS[bits]}_prepack_with_rowwise_min_max")
        return kernel(rows, torch.cat([least, largest], dim=1))
    found: Tensor = getattr(torch.ops.quantized, f"embedding_bag_{_KINDS[bits]}_prepack")(rows)
    if bits == 8:
        scales(found, bits).add_((largest - least).mul_(0))  # NaN if an end is not finite
    return found


def _encode_bytes_fused(rows: Tensor, packed: Tensor) -> None:
    least, largest = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    packed.copy_(_prepacked(rows, least, largest, 8))
    # By numpy, whose calls on few numbers cost a fraction of torch's.
    scale = packed.numpy().view(np.float32)[:, -2]
    with np.errstate(all="ignore"):
        is_narrow = scale < _NARROW
        if not is_narrow.any():
            scale += _EPSILON_SCALE
            return
        # Groups of equal numbers need no levels, and may be most of a sparse gradient.
        narrow = torch.from_numpy((is_narrow & (scale > 0)).nonzero()[0])
        large, low, high = (one[narrow].mul_(_ENLARGED) for one in (rows, least, largest))
        packed[narrow] = _prepacked(large, low, high, 8)
        packed[narrow, -8:] = as_bytes(packed[narrow, -8:].view(torch.float32).mul_(1 / _ENLARGED))
        scale += np.where(is_narrow, np.float32(_EPSILON_SCALE / _ENLARGED), np.float32(_EPSILON_SCALE))


def _encode_bytes(rows: Tensor, packed: Tensor, noise: Optional[torch.Generator]) -> None:
    least, largest = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    width = (largest - least).float()
    scale = width / 255
    # The fused kernel multiplies the numbers of narrow groups by 2^56. To divide epsilon instead gives the same bits.
    # fp64 has no such kernel, so this holds for all its groups: then a power of two as factor changes no level.
    narrow = _NARROW if rows.dtype == torch.float32 else math.inf
    epsilon = torch.full_like(scale, _EPSILON).masked_fill_(scale < narrow, _EPSILON / _ENLARGED)
    # Scale and bias are rounded before the levels are computed, because the decoder reads the rounded values.
    bias = least.float()
    levels = _rounded((rows - bias).mul_(255 / width.add_(epsilon)), noise).clamp_(0, 255)
    packed[:, :-8] = levels.to(torch.uint8)
    packed[:, -8:] = as_bytes(torch.cat([scale.add_(epsilon.div_(255)), bias], dim=1))


def _peaks(least: Tensor, largest: Tensor) -> Tensor:
    """Return the largest magnitude of each row, (groups, 1), in fp32: a tiny number for zeros, NaN for NaN."""
    return torch.maximum(largest, least.neg()).float().clamp_min_(torch.finfo(torch.float32).tiny)


def _encode_short_fused(rows: Tensor, packed: Tensor, bits: int) -> None:
    least, largest = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    peaks = _peaks(least, largest)
    factors = peaks.reciprocal()
    groups, extent = rows.shape
    # As wide as the row of the message: the peak will replace the q of the last numbers. These repeat the first ones,
    # so that a kernel which finds the ends itself finds the same.
    reduced = rows.new_empty(groups, extent + 32 // bits)
    torch.mul(rows, factors, out=reduced[:, :extent])
    reduced[:, extent:] = reduced[:, : 32 // bits]
    joint = _prepacked(reduced, least.mul_(factors), largest.mul_(factors), bits)
    joint.view(torch.float32)[:, -2:-1] = peaks
    packed.copy_(joint)


def _encode_short(rows: Tensor, packed: Tensor, bits: int, noise: Optional[torch.Generator]) -> None:
    if launches_kernels(rows):
        # One kernel instead of four.
        peaks = torch.linalg.vector_norm(rows, torch.inf, 1, keepdim=True).float()
        peaks.clamp_min_(torch.finfo(torch.float32).tiny)
    else:
        peaks = _peaks(rows.amin(1, keepdim=True), rows.amax(1, keepdim=True))
    reduced = rows * peaks.reciprocal()
    least, largest = reduced.amin(1, keepdim=True), reduced.amax(1, keepdim=True)
    # Rounded to fp16 before the levels are computed, because the decoder reads the rounded values.
    bias = least.half()
    most = (1 << bits) - 1
    scale = ((largest.float() - bias.float()) / most).half()
    # Equal numbers, or a width below the range of fp16: the levels are 0, and any scale decodes to the bias.
    scale = scale.masked_fill(scale == 0, 1)
    levels = _rounded(reduced.sub_(bias).mul_(scale.float().reciprocal()), noise).clamp_(0, most).to(torch.uint8)
    joint = levels[:, 0 :: 8 // bits]
    for index in range(1, 8 // bits):
        joint = joint | levels[:, index :: 8 // bits] << bits * index
    packed[:, :-8] = joint
    packed[:, -8:-4] = as_bytes(peaks)
    packed[:, -4:] = as_bytes(torch.cat([scale, bias], dim=1))


def _rounded(levels: Tensor, noise: Optional[torch.Generator]) -> Tensor:
    """Round in place: to the nearest, or up with the probability of the fraction."""
    if noise is None:
        return levels.round_()
    return levels.add_(torch.rand(levels.shape, generator=noise, dtype=levels.dtype, device=levels.device)).floor_()
