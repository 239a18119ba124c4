"""Hashes of tensors: equal where all bits are, different where one bit is not."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

__all__ = ["fingerprint", "fingerprints", "row_fingerprints"]

_MIXER = 0x5851F42D4C957F2D  # odd, with bits all over; products wrap around
_CHUNK = 1 << 17  # words at a time, so that products stay in the cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit hash of the bytes: a sum of words of eight bytes, each weighted by its place."""
    return fingerprints([tensor])[0]


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """The hash of each tensor; devices are waited for once, not once per tensor."""
    sums = [_sum(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(sums):
        by_device.setdefault(value.device, []).append(index)
    hashes = [0] * len(sums)
    for indices in by_device.values():
        for index, value in zip(indices, torch.stack([sums[index] for index in indices]).tolist()):
            hashes[index] = value
    return hashes


@torch.no_grad()
def _sum(tensor: Tensor) -> Tensor:
    words, places = _words(tensor), _places(tensor.device)
    parts = [words] if len(words) <= _CHUNK else words.split(_CHUNK)
    total = (parts[0] * places[: len(parts[0])]).sum()
    for index, part in enumerate(parts[1:], 1):
        total += (part * (places[: len(part)] + 2 * index * _CHUNK)).sum()
    return total.mul_(_MIXER)


def _words(tensor: Tensor) -> Tensor:
    """The bytes as integers of eight; zeros fill up the last one."""
    flat = tensor.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    per_word = 8 // flat.element_size()
    if len(flat) % per_word == 0 and flat.storage_offset() % per_word == 0:
        return flat.view(torch.int64)
    raw = flat.view(torch.uint8)
    return torch.cat([raw, raw.new_zeros(-len(raw) % 8)]).view(torch.int64)


@cache
def _places(device: torch.device) -> Tensor:
    """Odd weights: whatever bit of a word changes, its product changes."""
    return 2 * torch.arange(_CHUNK, device=device) + 1


@torch.no_grad()
def row_fingerprints(tensor: Tensor, elements: int = 256) -> Tensor:
    """A 64-bit hash of each row, (rows,), of up to `elements` of its elements, evenly spread; on the same device."""
    flat = tensor.detach().reshape(len(tensor), -1)
    flat = flat[:, :: max(1, flat.shape[1] // elements)].contiguous()
    if flat.element_size() not in _INTEGERS:
        flat = torch.view_as_real(flat).flatten(1)
    integers = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    places = 2 * torch.arange(integers.shape[1], device=flat.device) + 1
    return (integers * places).sum(1).mul_(_MIXER)
