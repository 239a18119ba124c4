"""Python objects between ranks, and the checks that ranks make together: all go on, or all raise.

Tensors are compared by their fingerprints, hashes that are equal where all bits are.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.comm.collectives import all_reduce_
from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.work import blocking_call

__all__ = [
    "agree",
    "all_gather_object",
    "barrier",
    "broadcast_from",
    "broadcast_object",
    "equal_everywhere",
    "fingerprint",
    "fingerprints",
    "raise_together",
    "row_fingerprints",
]

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------------------- objects


def all_gather_object(value: T, group: Group) -> list[T]:
    """Gather the picklable `value` of every rank, by position."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    with blocking_call("all_gather_object", group):
        dist.all_gather_object(values, value, group=group.process_group)
    return values


def broadcast_object(value: T, group: Group, source: int = 0) -> T:
    """Return the picklable `value` of the rank at position `source`."""
    if group.size == 1:
        return value
    values: list[Any] = [value]
    with blocking_call("broadcast_object", group):
        dist.broadcast_object_list(values, group.ranks[source], group=group.process_group)
    return values[0]


def broadcast_from(make: Callable[[], T], group: Group, source: int = 0) -> T:
    """Call `make` on the rank at position `source` only, and return its result on every rank.

    Raises:
        Exception: On every rank, if `make` raises, or returns what cannot be pickled.
    """
    value: T | None = None
    data = b""
    failure: Exception | None = None
    if group.rank == source:
        try:
            value = make()
            # Pickled here rather than by the broadcast: an error there would leave the other ranks waiting.
            data = b"" if group.size == 1 else pickle.dumps(value)
        except Exception as error:
            failure = error
    description = "" if failure is None else f"{type(failure).__name__}: {failure}"
    data, description = broadcast_object((data, description), group, source)
    if failure is not None:
        raise failure
    if description:
        raise RuntimeError(f"rank {group.ranks[source]} failed with {description}")
    return cast(T, value) if group.rank == source else pickle.loads(data)


def barrier(group: Group) -> None:
    """Wait until every rank of `group` has arrived."""
    if group.size > 1:
        with blocking_call("barrier", group):
            dist.barrier(group=group.process_group)


# ----------------------------------------------------------------------------------------------------------- checks


def raise_together(error: Exception | None, group: Group) -> None:
    """Raise on every rank of `group` if any rank brings an `error`, so that no rank is left waiting.

    A rank that brings an error raises that one; the others raise one of the same type that names the failed ranks.
    """
    found = all_gather_object(None if error is None else (type(error).__name__, str(error)), group)
    if error is not None:
        raise error
    failed = {rank: failure for rank, failure in zip(group.ranks, found) if failure is not None}
    if failed:
        name, message = next(iter(failed.values()))
        # Only types that are made from a message alone; others may need arguments that are not known here.
        kind = {"ValueError": ValueError, "TypeError": TypeError}.get(name, RuntimeError)
        raise kind(f"{message}\n(found on rank {', '.join(map(str, failed))})")


def equal_everywhere(number: int, group: Group) -> bool:
    """Tell whether all ranks of `group` hold the same 63-bit `number`."""
    # One small all-reduce, where `agree` takes several: the maximum of x and of -x gives the largest and the smallest.
    device = "cuda" if "nccl" in group.backend else "cpu"
    largest, smallest = all_reduce_(torch.tensor([number, -number], device=device), group, "max").tolist()
    return largest == -smallest


def agree(what: str, value: Any, group: Group) -> None:
    """Check that all ranks of `group` hold an equal `value`, described by `what`.

    Raises:
        ValueError: On every rank, with the values of all ranks; of dicts, with the entries that differ.
    """
    values = all_gather_object(value, group)
    if any(other != values[0] for other in values):
        listed = "\n".join(f"  rank {rank}: {other}" for rank, other in zip(group.ranks, _differing(values)))
        raise ValueError(f"{what} must be the same on all ranks of the {group.axis} group, found\n{listed}")


def _differing(values: list[Any]) -> list[Any]:
    """Reduce dicts to the entries in which they differ; leave other values as they are."""
    if not all(isinstance(value, dict) for value in values):
        return values
    keys = dict.fromkeys(key for value in values for key in value)
    different = [key for key in keys if any(value.get(key) != values[0].get(key) for value in values)]
    return [{key: value.get(key) for key in different} for value in values]


# ----------------------------------------------------------------------------------------------------- fingerprints

_MIXER = 0x5851F42D4C957F2D  # odd, so that no bit is lost; its bits are spread over the word; products wrap around
_CHUNK = 1 << 17  # words hashed at a time, so that the products stay in the processor's cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> int:
    """Hash the bytes of a tensor to 64 bits: a sum of its words of eight bytes, each weighted by its position."""
    return fingerprints([tensor])[0]


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Hash each tensor, see `fingerprint`; the host waits once for each device, not once for each tensor."""
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
    weights = _weights(tensor.device)
    parts = [words] if len(words) <= _CHUNK else words.split(_CHUNK)
    total = (parts[0] * weights[: len(parts[0])]).sum()
    for index, part in enumerate(parts[1:], 1):
        total += (part * (weights[: len(part)] + 2 * index * _CHUNK)).sum()
    return total.mul_(_MIXER)


def _words(tensor: Tensor) -> Tensor:
    """View the bytes as integers of eight bytes, (words,); zeros fill up the last one."""
    flat = tensor.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    per_word = 8 // flat.element_size()
    # A view needs whole words from an aligned offset; everything else is copied.
    if len(flat) % per_word == 0 and flat.storage_offset() % per_word == 0:
        return flat.view(torch.int64)
    raw = flat.view(torch.uint8)
    return torch.cat([raw, raw.new_zeros(-len(raw) % 8)]).view(torch.int64)


@cache
def _weights(device: torch.device) -> Tensor:
    """Return odd weights, one per word of a chunk: multiplied by an odd number, every change of a word shows."""
    return 2 * torch.arange(_CHUNK, device=device) + 1


@torch.no_grad()
def row_fingerprints(tensor: Tensor, elements: int = 256) -> Tensor:
    """Hash up to `elements` evenly spaced elements of each row to 64 bits, on the tensor's device: (rows,)."""
    flat = tensor.detach().reshape(len(tensor), -1)
    flat = flat[:, :: max(1, flat.shape[1] // elements)].contiguous()
    if flat.element_size() not in _INTEGERS:  # complex128
        flat = torch.view_as_real(flat).flatten(1)
    integers = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    weights = 2 * torch.arange(integers.shape[1], device=flat.device) + 1
    return (integers * weights).sum(1).mul_(_MIXER)
