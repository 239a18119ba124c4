"""Heartbeat in the rendezvous store, to name the ranks that are gone when a collective fails.

gloo reports a dead peer as a closed connection with a port number. A thread on every rank therefore counts up in the
store about twice a second; a rank whose collective has failed looks which counters stand still.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from lightning_parallel.compat.torch import default_store

__all__ = ["describe_failure", "start", "stop"]

INTERVAL_S = 0.4


class _Heartbeat:
    """The thread of this rank, and its view of the other ranks."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store = dist.PrefixStore("lightning_parallel/heartbeat", store)
        self.rank = rank
        # The store outlives a run: an error that an earlier run of this process reported must not explain this one's.
        self.report("")
        self.stopped = threading.Event()
        # A thread, because the main one may be inside a collective for as long as the slowest rank computes.
        self.thread = threading.Thread(target=self._beat, name="lightning_parallel-heartbeat", daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        while not self.stopped.wait(INTERVAL_S):
            try:
                self.store.add(f"beat/{self.rank}", 1)
            except RuntimeError:
                return  # the process that hosts the store is gone; the collectives will report it

    def report(self, message: str) -> None:
        """Publish the error that ends this rank, for the ranks that miss it."""
        self.store.set(f"error/{self.rank}", message)

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks without a beat during three intervals."""
        before = {rank: self.store.add(f"beat/{rank}", 0) for rank in ranks}
        time.sleep(3 * INTERVAL_S)
        return [rank for rank in ranks if self.store.add(f"beat/{rank}", 0) == before[rank]]

    def errors(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the errors that ranks have reported."""
        # `get` would wait for a key that was never set, until the store's timeout.
        reported = {rank: self.store.get(f"error/{rank}").decode() for rank in ranks if self._has_reported(rank)}
        return {rank: message for rank, message in reported.items() if message}

    def _has_reported(self, rank: int) -> bool:
        return self.store.check([f"error/{rank}"])


_heartbeat: _Heartbeat | None = None


def start() -> None:
    """Start the heartbeat in the store of the default process group, unless it runs or torch is not distributed."""
    global _heartbeat
    if _heartbeat is None and dist.is_initialized() and dist.get_world_size() > 1:
        _heartbeat = _Heartbeat(default_store(), dist.get_rank())


@atexit.register  # a thread inside the store when the interpreter ends would abort the process
def stop() -> None:
    """Stop the heartbeat, if it runs."""
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat.stopped.set()
        _heartbeat.thread.join(timeout=5)
        _heartbeat = None


def describe_failure(what: str, ranks: Sequence[int], error: BaseException) -> str:
    """Describe the failed collective `what` between `ranks`, and name the ranks that are gone where that is known."""
    message = f"{what} between ranks {list(ranks)} failed: {error}"
    if _heartbeat is None or not dist.is_initialized():
        return message
    me = _heartbeat.rank
    # All ranks of the world: the one that started the failures may be in another group than the one that failed here.
    others = [rank for rank in range(dist.get_world_size()) if rank != me]
    try:
        silent = _heartbeat.silent(others)
        errors = _heartbeat.errors(others)
        lost = [rank for rank in silent if rank not in errors]
        _heartbeat.report(f"lost rank {', '.join(map(str, lost))}" if lost else str(error))
    except RuntimeError:
        peers = [str(rank) for rank in ranks if rank != me]
        who = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {', '.join(peers)}"
        return f"[rank {me}] {message}\n{who} is gone, and so is the rendezvous store"
    details = [f"rank {rank} is gone: it no longer answers" for rank in lost]
    details += [f"rank {rank} stopped with: {errors[rank]}" for rank in silent if rank in errors]
    return "\n".join([f"[rank {me}] {message}", *details])
