"""Checks that all ranks make together, so that all of them go on or all of them raise."""

from __future__ import annotations

from typing import Any

from lightning_parallel.comm import Group, all_gather_object

__all__ = ["agree", "raise_together"]


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


def agree(what: str, value: Any, group: Group) -> None:
    """Check that all ranks of `group` hold an equal `value`.

    Raises:
        ValueError: On every rank, with the values of the ranks that differ.
    """
    values = all_gather_object(value, group)
    if any(other != values[0] for other in values):
        listed = "\n".join(f"  rank {rank}: {other}" for rank, other in zip(group.ranks, values))
        raise ValueError(f"{what} must be the same on all ranks of the {group.axis} group, found\n{listed}")
