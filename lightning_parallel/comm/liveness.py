"""Who is still there: a heartbeat in the rendezvous store, read when a collective fails.

gloo reports a dead peer as a closed connection with a port number. A thread on every rank writes a counter to the
store about twice a second, so a rank whose collective has failed can tell which counters stand still, and name them.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

__all__ = ["describe_failure", "start", "stop"]

INTERVAL_S = 0.4
_heartbeat: _Heartbeat | None = None


class _Heartbeat:
    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store = dist.PrefixStore("lightning_parallel/liveness", store)
        self.rank = rank
        self.report("")  # of an earlier run of this process
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="lightning_parallel-heartbeat", daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        while not self.stopped.wait(INTERVAL_S):
            try:
                self.store.add(f"beat/{self.rank}", 1)
            except RuntimeError:  # the process that hosts the store is gone; the collectives will say so
                return

    def report(self, message: str) -> None:
        self.store.set(f"error/{self.rank}", message)

    def silent(self, ranks: Sequence[int]) -> tuple[list[int], dict[int, str]]:
        """Ranks without a beat during three intervals, and what the ranks that stopped with an error had said."""
        before = {rank: self.store.add(f"beat/{rank}", 0) for rank in ranks}
        time.sleep(3 * INTERVAL_S)
        silent = [rank for rank in ranks if self.store.add(f"beat/{rank}", 0) == before[rank]]
        said = {rank: self.store.get(f"error/{rank}").decode() for rank in ranks if self.store.check([f"error/{rank}"])}
        return silent, {rank: text for rank, text in said.items() if text}


def start() -> None:
    """Begin to beat in the default process group's store; does nothing when already started or not distributed."""
    global _heartbeat
    if _heartbeat is None and dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()
        _heartbeat = _Heartbeat(store, dist.get_rank())


@atexit.register  # a thread inside the store when the interpreter ends would abort the process
def stop() -> None:
    """End the heartbeat."""
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat.stopped.set()
        _heartbeat.thread.join(timeout=5)
        _heartbeat = None


def describe_failure(what: str, ranks: Sequence[int], error: BaseException) -> str:
    """The text of a failed collective `what` between `ranks`, naming those that are gone, as far as can be told."""
    message = f"{what} between ranks {list(ranks)} failed: {error}"
    if _heartbeat is None or not dist.is_initialized():
        return message
    me = _heartbeat.rank
    others = [rank for rank in range(dist.get_world_size()) if rank != me]
    try:
        silent, said = _heartbeat.silent(others)
        lost = [rank for rank in silent if rank not in said]
        _heartbeat.report(f"lost rank {', '.join(map(str, lost))}" if lost else str(error))
    except RuntimeError:
        peers = [str(rank) for rank in ranks if rank != me]
        who = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {', '.join(peers)}"
        return f"[rank {me}] {message}\n{who} is gone, and so is the rendezvous store"
    details = [f"rank {rank} is gone: it no longer answers" for rank in lost]
    details += [f"rank {rank} stopped with: {said[rank]}" for rank in silent if rank in said]
    return "\n".join([f"[rank {me}] {message}", *details])
