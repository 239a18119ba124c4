"""Hashes of tensors: equal where all bits are, different where one bit is not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["fingerprint", "fingerprints", "row_fingerprints"]

_MIXER = 0x5851F42D4C957F2D  # odd, with bits all over; products wrap around
_CHUNK = 1 << 20  # elements at a time, as they are widened to eight bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit hash of the bytes: a sum of the elements, taken as integers, each weighted by its place."""
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
    flat = tensor.detach().contiguous().view(-1)
    if flat.element_size() not in _INTEGERS:  # complex128
        flat = torch.view_as_real(flat).reshape(-1)
    integers = flat.view(_INTEGERS[flat.element_size()])
    places = 2 * torch.arange(min(len(integers), _CHUNK), device=flat.device) + 1  # odd: no bit of an element is lost
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(integers), _CHUNK):
        values = integers[start : start + _CHUNK].to(torch.int64)
        total += (values * (places[: len(values)] + 2 * start)).mul_(_MIXER).sum()
    return total


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
