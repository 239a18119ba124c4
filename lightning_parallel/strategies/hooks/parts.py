"""Finds tensors that hold only a part of a full tensor (a shard, a slice, the gradient of one stage), by their memory.

Views and gradients in a bucket are new objects each time. So a tensor is identified by its storage and its offset. Each
region of memory knows which coordinate of its elements is sharded over the ranks:

    coordinate of the element at place i of a region     i // stride % size
    sharded dimension of a tensor                        a dimension along which this coordinate changes
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
    """Describes a region of memory that holds a part of a full tensor.

    Attributes:
        label: Name for messages, such as "the gradient of `net.0.weight`".
        owners: Names of the parameters that the values come from.
        why: Reason, such as "sharded over 2 tensor-parallel ranks".
        ranges: Ranges of the sharded coordinate on each rank; None if this stage holds the full tensor.
        stride, size: Stride and extent of the sharded coordinate in the region; the extent is 0 without a coordinate.
        is_slice: Whether the region is a run of elements, which may begin and end inside any dimension.
        is_inside: Whether the memory around the region still holds the full tensor.
        is_joined: Whether each element combines several elements of its parameter, such as a norm.
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
    """Holds a part, and the offset of a tensor in the part."""

    part: Part
    at: int


class _PartRegion(NamedTuple):
    start: int
    stop: int
    part: Part


MIXED = Part("a tensor with parts in it", frozenset(), "", is_slice=True)
"""Part of a tensor that covers several regions."""


class PartMap:
    """Finds the part that contains a tensor, by memory."""

    def __init__(self) -> None:
        # A weak reference prevents the reuse of a storage's address, but does not keep its memory.
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
            # The memory may have held other parts before, such as a slice of an earlier step.
            self.remove(tensor)
        self._regions[key.cdata][1][start] = _PartRegion(start, stop, part)

    def remove(self, tensor: Tensor) -> None:
        """Note that a tensor holds full values."""
        key = storage_ref(tensor)
        if key is not None and key.cdata in self._regions and tensor.numel():
            regions, (start, stop) = self._regions[key.cdata][1], _span(tensor)
            for region in [one for one in regions.values() if one.start < stop and start < one.stop]:
                del regions[region.start]

    def find(self, tensor: Tensor) -> Placed | None:
        """Return the part that contains a tensor; `MIXED` for several parts, or if the tensor exceeds the part."""
        key = storage_ref(tensor)
        if key is None or key.cdata not in self._regions or not tensor.numel():
            return None
        start, stop = _span(tensor)
        found = [one for one in self._regions[key.cdata][1].values() if one.start < stop and start < one.stop]
        # The tensor around a slice is the full parameter, which every rank holds.
        if not found or (found[0].part.is_inside and stop - start > found[0].stop - found[0].start):
            return None
        if len(found) > 1 or start < found[0].start or stop > found[0].stop:
            return Placed(MIXED, 0)
        return Placed(found[0].part, start - found[0].start)

    def note_origin(self, tensor: Tensor, origin: str) -> None:
        """Note that the values of a tensor were `drawn`, or `made` of numbers other than constants."""
        key = storage_ref(tensor)
        if key is not None:
            self._drawn[key.cdata] = (key, origin)

    def note_gathered(self, tensor: Tensor, part: Part) -> None:
        """Note that a tensor is a full copy of a parameter, of which this rank holds a part."""
        key = storage_ref(tensor)
        if key is not None:
            self._gathered[key.cdata] = (key, part)

    def gathered(self, tensor: Tensor) -> Part | None:
        """Return the part of a gathered full copy; None for other tensors."""
        key = storage_ref(tensor) if self._gathered else None
        found = None if key is None else self._gathered.get(key.cdata)
        return None if found is None else found[1]

    def origin(self, tensor: Tensor) -> str:
        """Return the known origin of the values of a tensor; empty if there is none."""
        key = storage_ref(tensor)
        if key is None:
            return ""
        if key.cdata in self._drawn:
            return self._drawn[key.cdata][1]
        # The memory belongs to numpy, whose operations torch does not see, so the values may be random.
        return "drawn" if tensor.numel() > 1 and not tensor.untyped_storage().resizable() else ""

    def prune(self) -> None:
        """Forget freed storages."""
        self._regions = {key: entry for key, entry in self._regions.items() if not entry[0].expired()}
        self._drawn = {key: entry for key, entry in self._drawn.items() if not entry[0].expired()}
        self._gathered = {key: entry for key, entry in self._gathered.items() if not entry[0].expired()}


def storage_ref(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to the memory of a tensor; None if the tensor has no own memory."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return None
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None  # a subclass without own memory


def storage_of(tensor: Tensor) -> int | None:
    """Return a number for the memory of a tensor, unique among live memory; None without own memory."""
    key = storage_ref(tensor)
    return None if key is None else key.cdata


def _span(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset())
    # A subclass may override `shape` with the shape of the full tensor, so read the size of the local memory.
    sizes = Tensor.size(tensor)
    return start, start + 1 + sum(int((size - 1) * stride) for size, stride in zip(sizes, tensor.stride()))


def divided_dims(tensor: Tensor, part: Part) -> set[int]:
    """Return the dimensions along which other ranks hold other elements, for a tensor inside a part."""
    if part.is_slice:
        return set(range(tensor.dim()))
    if part.size == 1:
        # With one row per rank, no stride shows the coordinate: any dimension of size 1 may be the sharded dimension.
        return {dim for dim, size in enumerate(tensor.shape) if size == 1}
    if not part.size:
        return set()
    # Steps by full periods, and runs within one stride, do not change the coordinate.
    period = part.stride * part.size
    return {
        dim
        for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride()))
        if size > 1 and step % period and step * (size - 1) >= part.stride
    }


def covers_part(tensor: Tensor, part: Part, dims: Iterable[int]) -> bool:
    """Tell whether a view contains the full extent of the sharded coordinate on this rank."""
    if part.is_slice or part.size < 2:
        return not part.is_slice or tensor.numel() == part.stride * max(part.size, 1)
    count = 1
    for dim in dims:
        size, step = tensor.shape[dim], tensor.stride(dim)
        # A flattened dimension steps by less than the stride of the coordinate.
        count *= size if step >= part.stride else -(-size * step // part.stride)
    return count >= part.size
