"""Python objects between ranks, and the checks that all ranks make together: all go on, or all raise."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from lightning_parallel.comm.collectives import all_reduce_
from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.records import explain, recorded

__all__ = [
    "agree",
    "all_gather_object",
    "barrier",
    "broadcast_from",
    "broadcast_object",
    "equal_everywhere",
    "raise_together",
]

T = TypeVar("T")


def all_gather_object(value: T, group: Group) -> list[T]:
    """The picklable `value` of every rank, by position."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    try:
        with recorded("all_gather_object", group):
            dist.all_gather_object(values, value, group=group.process_group)
    except RuntimeError as error:
        explain(error, "all_gather_object", group)
    return values


def broadcast_object(value: T, group: Group, source: int = 0) -> T:
    """The picklable `value` of the rank at position `source`."""
    if group.size == 1:
        return value
    values: list[Any] = [value]
    try:
        with recorded("broadcast_object", group):
            dist.broadcast_object_list(values, group.ranks[source], group=group.process_group)
    except RuntimeError as error:
        explain(error, "broadcast_object", group)
    return values[0]


def broadcast_from(make: Callable[[], T], group: Group, source: int = 0) -> T:
    """What `make` returns on the rank at position `source`, where alone it is called.

    Raises:
        Exception: On every rank, if it raises, or returns what cannot be pickled.
    """
    value, failure, message = None, None, (b"", "")
    if group.rank == source:
        try:
            value = make()
            message = (b"" if group.size == 1 else pickle.dumps(value), "")
        except Exception as error:
            failure, message = error, (b"", f"{type(error).__name__}: {error}")
    data, what = broadcast_object(message, group, source)
    if failure is not None:
        raise failure
    if what:
        raise RuntimeError(f"rank {group.ranks[source]} failed with {what}")
    return cast(T, value) if group.rank == source else pickle.loads(data)


def barrier(group: Group) -> None:
    """Wait until every rank of `group` has arrived."""
    if group.size > 1:
        try:
            with recorded("barrier", group):
                dist.barrier(group=group.process_group)
        except RuntimeError as error:
            explain(error, "barrier", group)


def raise_together(error: Exception | None, group: Group) -> None:
    """Raise on every rank of `group` if any rank brings an `error`, so that no rank is left waiting.

    A rank with an error of its own raises that; the others raise one of the same type that names the ranks.
    """
    found = all_gather_object(None if error is None else (type(error).__name__, str(error)), group)
    if error is not None:
        raise error
    failed = {group.ranks[position]: what for position, what in enumerate(found) if what is not None}
    if failed:
        first = next(iter(failed.values()))
        kind = {"ValueError": ValueError, "TypeError": TypeError}.get(first[0], RuntimeError)
        raise kind(f"{first[1]}\n(found on rank {', '.join(map(str, failed))})")


def equal_everywhere(number: int, group: Group) -> bool:
    """Whether all ranks of `group` hold the same 63-bit `number`: a small all-reduce, where `agree` takes several."""
    device = "cuda" if "nccl" in group.backend else "cpu"
    largest, smallest = all_reduce_(torch.tensor([number, -number], device=device), group, "max").tolist()
    return largest == -smallest


def agree(what: str, value: Any, group: Group) -> None:
    """Check that all ranks of `group` hold an equal `value`.

    Raises:
        ValueError: On every rank, with the values of the ranks that differ.
    """
    values = all_gather_object(value, group)
    if any(other != values[0] for other in values):
        listed = "\n".join(f"  rank {rank}: {other}" for rank, other in zip(group.ranks, _differing(values)))
        raise ValueError(f"{what} must be the same on all ranks of the {group.axis} group, found\n{listed}")


def _differing(values: list[Any]) -> list[Any]:
    """Of dicts only the entries in which they differ; other values as they are."""
    if not all(isinstance(value, dict) for value in values):
        return values
    keys = dict.fromkeys(key for value in values for key in value)
    different = [key for key in keys if any(value.get(key) != values[0].get(key) for value in values)]
    return [{key: value.get(key) for key in different} for value in values]
