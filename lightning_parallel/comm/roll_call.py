"""A roll call: ranks tell each other their place in the program, and go on when all of them are at one place.

A collective pairs any calls that arrive. A rank that ends an epoch early, or calls the model by itself, would exchange
numbers with ranks at another place, or wait for ever. Here each rank writes its place into the rendezvous store. The
places are compared there before any message is sent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Mapping
from contextlib import nullcontext

import torch.distributed as dist

from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.heartbeat import (
    Blocked,
    BlockedCall,
    blocked_calls,
    describe_failure,
    ended_processes,
    heartbeats,
    reported_errors,
    trains_here,
)
from lightning_parallel.compat import users_place
from lightning_parallel.compat.default_group import default_store

__all__ = ["ApartError", "RollCall"]

_ROLL_CALL = "roll call/"
_LOOK_S = 0.5
"""Seconds between two looks of a waiting rank at the states of other ranks."""
_STUCK_S = 8.0
"""A rank is that long in a collective that this one has left only where it waits for this one; not on a slow link."""
_SILENCE_S = 15.0
"""A rank without a heartbeat for so long is gone; a shorter time may be spent in C, with the interpreter locked."""
_READ_S = 10.0
"""Seconds that a failing rank lets other ranks read its place: the store may end with its process."""


class ApartError(RuntimeError):
    """Ranks wait for each other at different places.

    Attributes:
        places: Where they are, by rank; empty for a rank that has not come and is not known to wait.
        lines: The lines of the user's code there, see `compat.users_place`, by rank; empty where none is known.
        purposes: Of the roll calls in which they wait, by rank; empty where it is none. Given by their whole names.
    """

    def __init__(self, places: Mapping[int, str], lines: Mapping[int, str], names: Mapping[int, str]) -> None:
        self.places = dict(places)
        self.lines = dict(sorted(lines.items()))
        self.purposes = {
            rank: name.split("/")[1] if name.startswith(_ROLL_CALL) else "" for rank, name in names.items()
        }
        listed = (f"rank {rank} {place or 'does not come'}" for rank, place in self.places.items())
        super().__init__("; ".join(listed))

    def told(self, text: str) -> RuntimeError:
        """Return an error of which other ranks give the text as it is."""
        error = RuntimeError(text)
        error.is_for_all_ranks = True  # type: ignore[attr-defined]
        return error


class RollCall:
    """The roll call of a group for a purpose; all its ranks make it at the same point.

    It takes a few round trips to the store, about 0.2 ms on one machine. In a group of more than `MOST_RANKS` ranks, the
    store would be asked too often.

    Args:
        group: The ranks that meet.
        purpose: Tells roll calls apart in errors.
        key: Tells roll calls apart in the store; all ranks of the group have it, see `comm.shared_key`.
    """

    MOST_RANKS = 64

    def __init__(self, group: Group, purpose: str, key: str) -> None:
        self._group = group
        self._ranks = group.ranks
        self._rank = group.ranks[group.rank]
        self._name = f"{_ROLL_CALL}{purpose}/{key}"
        self._count = 0

    def meet(self, place: str, patience_s: float, note: str = "") -> list[str]:
        """Wait until all ranks are at `place`; returns their notes, by position in the group.

        Raises:
            ApartError: On every rank that waits, if one is at another place; if one does not come within `patience_s`.
            RuntimeError: If a rank is gone.
        """
        self._count += 1
        store = default_store()
        keys = [f"{self._name}/{self._count}/{rank}" for rank in self._ranks]
        mine = keys[self._ranks.index(self._rank)]
        try:
            store.set(mine, f"{note}\n{place}")
            with Blocked(place, self._group, Blocked.begin(self._name), self._name) if trains_here() else nullcontext():
                self._wait(store, keys, place, patience_s)
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"[rank {self._rank}] {place}: the rendezvous store of rank 0 or the launcher does not answer"
                f" ({error}). Its process ended, or the network failed"
            ) from error
        # All have read the keys before these: the store of a long run must not fill up.
        store.delete_key(f"{self._name}/{self._count - 1}/{self._rank}")
        notes, places = zip(*(value.decode().split("\n", 1) for value in store.multi_get(keys)))
        if len(set(places)) > 1:
            store.set(f"{mine}/read", users_place(sys._getframe()))
            read = [f"{key}/read" for key in keys]
            lines = [value.decode() for value in store.multi_get(read)] if _all_set(store, read, _READ_S) else []
            names = dict.fromkeys(self._ranks, self._name)
            raise ApartError(dict(zip(self._ranks, places)), dict(zip(self._ranks, lines)), names)
        return list(notes)

    def _wait(self, store: dist.Store, keys: list[str], place: str, patience_s: float) -> None:
        end_s = time.monotonic() + patience_s
        since = _Unchanged()
        while not _all_set(store, keys, min(_LOOK_S, end_s - time.monotonic())):
            absent = [rank for rank, key in zip(self._ranks, keys) if not store.check([key])]
            blocked = blocked_calls(absent)
            stuck = [rank for rank, call in blocked.items() if call.is_apart or since(rank, call.number) > _STUCK_S]
            # Others may be about to say where they are.
            is_known = len(blocked) == len(absent) or since("stuck", bool(stuck)) > 2 * _LOOK_S
            if stuck and is_known or time.monotonic() >= end_s:
                blocked = blocked if stuck else {}
                here = dict.fromkeys(self._ranks, self._name) | dict.fromkeys(absent, "")
                raise ApartError(
                    dict.fromkeys(self._ranks, place) | dict.fromkeys(absent, "") | _names(blocked, "name"),
                    {self._rank: users_place(sys._getframe())} | _names(blocked, "place"),
                    here | _names(blocked, "key"),
                )
            silent = [rank for rank, beat in heartbeats(absent).items() if since((rank, "beat"), beat) > _SILENCE_S]
            if silent or ended_processes(absent) or reported_errors(absent):
                raise RuntimeError(describe_failure(place, self._ranks, TimeoutError("a rank does not come")))


def _names(blocked: Mapping[int, BlockedCall], name: str) -> dict[int, str]:
    return {rank: getattr(call, name) for rank, call in blocked.items()}


class _Unchanged:
    """For how many seconds values have been the same."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[int, float]] = {}

    def __call__(self, key: Hashable, value: int) -> float:
        now_s = time.monotonic()
        if key not in self._seen or self._seen[key][0] != value:
            self._seen[key] = (value, now_s)
        return now_s - self._seen[key][1]


def _all_set(store: dist.Store, keys: list[str], patience_s: float) -> bool:
    """Wait until all keys are set; tell if they are."""
    # Asked again and again: a wait in the store would block it for other threads of this process, such as the
    # heartbeat. A wait that ends by a timeout prints warnings.
    begun_s = time.monotonic()
    while not store.check(keys):
        waited_s = time.monotonic() - begun_s
        if waited_s > patience_s:
            return False
        # Often at first, as peers are seldom late.
        time.sleep(min(waited_s, 1e-3 if waited_s < 0.1 else 5e-3))
    return True
