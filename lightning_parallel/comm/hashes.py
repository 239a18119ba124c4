"""Hashes of tensors, by which ranks compare their tensors: equal bits give equal hashes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

__all__ = ["fingerprint", "fingerprints", "row_fingerprints"]

_MIXER = 0x5851F42D4C957F2D  # odd, so that no bit is lost; its bits are spread over the word; products wrap around
_CHUNK = 1 << 17  # words hashed at a time, so that the products stay in the processor's cache
_DEVICE_CHUNK = 1 << 23  # the same on a GPU: 64 MB, so that launches are few (7 billion parameters: 2,000, not 112,000)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> int:
    """Hash the bytes of a tensor to 64 bits: the sum of its eight-byte words, weighted by their positions."""
    return fingerprints([tensor])[0]


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Hash each tensor, see `fingerprint`; the host waits once for each device, not once for each tensor."""
    # All kernels are queued before the first `tolist`, which waits for the device.
    sums = [_weighted_sum(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(sums):
        by_device.setdefault(value.device, []).append(index)
    hashes = [0] * len(sums)
    for indices in by_device.values():
        for index, value in zip(indices, torch.stack([sums[index] for index in indices]).tolist()):
            hashes[index] = value
    return hashes


@torch.no_grad()
def _weighted_sum(tensor: Tensor) -> Tensor:
    # Integers, because their sums do not depend on the order of additions, which differs between devices.
    words = _words(tensor)
    chunk = _CHUNK if tensor.device.type == "cpu" else _DEVICE_CHUNK
    weights = _weights(chunk, tensor.device)
    parts = [words] if len(words) <= chunk else words.split(chunk)
    total = (parts[0] * weights[: len(parts[0])]).sum()
    for index, part in enumerate(parts[1:], 1):
        # Goes on with the weights 2 * position + 1, so that swapped chunks give another hash.
        total += (part * (weights[: len(part)] + 2 * index * chunk)).sum()
    return total.mul_(_MIXER)


def _words(tensor: Tensor) -> Tensor:
    """View the bytes as integers of eight bytes, (words,); zeros fill up the last word."""
    flat = tensor.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    per_word = 8 // flat.element_size()
    # A view needs full words from an aligned offset. Other tensors are copied.
    if len(flat) % per_word == 0 and flat.storage_offset() % per_word == 0:
        return flat.view(torch.int64)
    raw = flat.view(torch.uint8)
    return torch.cat([raw, raw.new_zeros(-len(raw) % 8)]).view(torch.int64)


@cache
def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd weights, one per word of a chunk: multiplied by an odd number, every change of a word shows."""
    return 2 * torch.arange(count, device=device) + 1


@torch.no_grad()
def row_fingerprints(tensor: Tensor, elements: int = 256) -> Tensor:
    """Hash up to `elements` evenly spaced elements of each row to 64 bits, on the tensor's device: (rows,)."""
    flat = tensor.detach().reshape(len(tensor), -1)
    flat = flat[:, :: max(1, flat.shape[1] // elements)].contiguous()
    if flat.element_size() not in _INTEGERS:  # complex128
        flat = torch.view_as_real(flat).flatten(1)
    # Bits instead of values: a NaN equals nothing, and 0.0 equals -0.0. Integer sums do not depend on their order.
    integers = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    weights = 2 * torch.arange(integers.shape[1], device=flat.device) + 1
    return (integers * weights).sum(1).mul_(_MIXER)
