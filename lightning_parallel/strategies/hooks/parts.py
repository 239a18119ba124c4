"""Which tensors hold a part only: of a sharded tensor, of a slice, of one pipeline stage; found by their memory.

Views, copies and gradients in a bucket are other objects each time, so a tensor is known by its storage and its place
in it. Of each region it is known which coordinate of its elements is divided over the ranks:

    coordinate of the element at place i of a region     i // stride % size
    dimension of a tensor that is divided                one along which that coordinate changes
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["MIXED", "Part", "PartMap", "Placed", "covers_part", "divided_dims", "storage_of", "storage_ref"]


@dataclass(frozen=True)
class Part:
    """What is known of a region of memory of which this rank holds a part.

    Attributes:
        label: What it is, such as "the gradient of `net.0.weight`".
        owners: The parameters that it was computed from.
        why: Why it is a part, such as "sharded over 2 tensor-parallel ranks".
        ranges: How the divided coordinate goes to the ranks; None if it is whole on this pipeline stage.
        stride, size: Of that coordinate in the region; no size if none is divided.
        is_slice: Whether it is a run of elements, which leaves no dimension whole.
        is_inside: Whether the rest of its memory is the whole, as it was before.
        is_joined: Whether each element comes from several ones of its parameter, such as its norm.
    """

    label: str
    owners: frozenset[str]
    why: str
    ranges: Any = None
    stride: int = 1
    size: int = 0
    is_slice: bool = False
    is_inside: bool = False
    is_joined: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether other ranks hold other elements of the same parameter."""
        return self.is_slice or self.size > 0


class Placed(NamedTuple):
    """A part, and where the tensor that was looked up begins in it."""

    part: Part
    at: int


class _PartRegion(NamedTuple):
    start: int
    stop: int
    part: Part


MIXED = Part("a tensor with parts in it", frozenset(), "", is_slice=True)
"""Of a tensor that is more than one region."""


class PartMap:
    """Finds the part that a tensor is, or lies in."""

    def __init__(self) -> None:
        # A weak reference keeps the address of a storage from being used again, and not its memory.
        self._regions: dict[int, tuple[StorageWeakRef, dict[int, _PartRegion]]] = {}
        self._drawn: dict[int, tuple[StorageWeakRef, str]] = {}
        self._gathered: dict[int, tuple[StorageWeakRef, Part]] = {}

    def add(self, tensor: Tensor, part: Part) -> None:
        """Note that a tensor is a part."""
        key = storage_ref(tensor)
        if key is None or not tensor.numel():
            return
        start, stop = _span(tensor)
        known = self._regions.setdefault(key.cdata, (key, {}))[1].get(start)
        if known is None or known.stop != stop:
            self.remove(tensor)
        self._regions[key.cdata][1][start] = _PartRegion(start, stop, part)

    def remove(self, tensor: Tensor) -> None:
        """Note that a tensor is whole, and what is in its memory."""
        key = storage_ref(tensor)
        if key is not None and key.cdata in self._regions and tensor.numel():
            regions, (start, stop) = self._regions[key.cdata][1], _span(tensor)
            for region in [one for one in regions.values() if one.start < stop and start < one.stop]:
                del regions[region.start]

    def find(self, tensor: Tensor) -> Placed | None:
        """Return the part that a tensor lies in; `MIXED` of several, or where there is more than the part."""
        key = storage_ref(tensor)
        if key is None or key.cdata not in self._regions or not tensor.numel():
            return None
        start, stop = _span(tensor)
        found = [one for one in self._regions[key.cdata][1].values() if one.start < stop and start < one.stop]
        if not found or (found[0].part.is_inside and stop - start > found[0].stop - found[0].start):
            return None
        if len(found) > 1 or start < found[0].start or stop > found[0].stop:
            return Placed(MIXED, 0)
        return Placed(found[0].part, start - found[0].start)

    def note_origin(self, tensor: Tensor, origin: str) -> None:
        """Note that what is in a tensor was `drawn`, or `made` of other numbers than a constant."""
        key = storage_ref(tensor)
        if key is not None:
            self._drawn[key.cdata] = (key, origin)

    def note_gathered(self, tensor: Tensor, part: Part) -> None:
        """Note that a tensor is a copy of all of a parameter, of which this rank holds a part."""
        key = storage_ref(tensor)
        if key is not None:
            self._gathered[key.cdata] = (key, part)

    def gathered(self, tensor: Tensor) -> Part | None:
        """Return of what a tensor is a gathered copy."""
        key = storage_ref(tensor) if self._gathered else None
        found = None if key is None else self._gathered.get(key.cdata)
        return None if found is None else found[1]

    def origin(self, tensor: Tensor) -> str:
        """Return what is known of where a tensor's values come from; empty if nothing is."""
        key = storage_ref(tensor)
        if key is None:
            return ""
        if key.cdata in self._drawn:
            return self._drawn[key.cdata][1]
        # The memory of numpy's arrays, whose numbers nobody has seen being made.
        return "drawn" if tensor.numel() > 1 and not tensor.untyped_storage().resizable() else ""

    def prune(self) -> None:
        """Forget storages that are gone."""
        self._regions = {key: entry for key, entry in self._regions.items() if not entry[0].expired()}
        self._drawn = {key: entry for key, entry in self._drawn.items() if not entry[0].expired()}
        self._gathered = {key: entry for key, entry in self._gathered.items() if not entry[0].expired()}


def storage_ref(tensor: Tensor) -> StorageWeakRef | None:
    """Return a reference to the memory of a tensor that does not keep it; None if it has none of its own."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return None
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None  # a subclass without memory of its own


def storage_of(tensor: Tensor) -> int | None:
    """Identify the memory of a tensor among that in use; None if it has none of its own."""
    key = storage_ref(tensor)
    return None if key is None else key.cdata


def _span(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset())
    # Not `shape`: a parameter may show that of the full tensor.
    sizes = Tensor.size(tensor)
    return start, start + 1 + sum(int((size - 1) * stride) for size, stride in zip(sizes, tensor.stride()))


def divided_dims(tensor: Tensor, part: Part) -> set[int]:
    """Return the dimensions of a tensor in a part along which other ranks hold other elements."""
    if part.is_slice:
        return set(range(tensor.dim()))
    if part.size == 1:
        return {dim for dim, size in enumerate(tensor.shape) if size == 1}
    if not part.size:
        return set()
    period = part.stride * part.size
    return {
        dim
        for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride()))
        if size > 1 and step % period and step * (size - 1) >= part.stride
    }


def covers_part(tensor: Tensor, part: Part, dims: Iterable[int]) -> bool:
    """Tell whether a view has all that this rank holds along the divided coordinate, and not some rows of it."""
    if part.is_slice or part.size < 2:
        return not part.is_slice or tensor.numel() == part.stride * max(part.size, 1)
    count = 1
    for dim in dims:
        size, step = tensor.shape[dim], tensor.stride(dim)
        count *= size if step >= part.stride else -(-size * step // part.stride)
    return count >= part.size
