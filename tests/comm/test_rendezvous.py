"""Processes of one attempt meet in a store that has seen others."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_parallel.comm import RendezvousError, attempt_store

WORLD = 3


def _meet(store, late=None, patience_s=20.0):
    """Let all ranks meet, some of them later; returns a value that each has read from the attempt's store, by rank."""
    found = {}

    def run(rank):
        time.sleep((late or {}).get(rank, 0))
        part = attempt_store(store, rank, WORLD, timedelta(seconds=patience_s))
        if rank == 0:
            assert not part.check(["key"]), "another attempt was here"
            part.set("key", f"{id(part)}")
        found[rank] = part.get("key").decode()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("late", [{}, {0: 0.2}, {2: 0.2}])
def test_attempts_in_one_store_are_apart(late):
    store = dist.HashStore()
    for _ in range(3):
        found = _meet(store, late)
        assert sorted(found) == [0, 1, 2]
        assert len(set(found.values())) == 1


@pytest.mark.parametrize("dead", [0, 1])
def test_what_dead_processes_have_said_is_not_taken_for_an_answer(dead):
    store = dist.HashStore()
    for rank in range(WORLD):  # all but one come, and then die
        if rank != dead:
            with pytest.raises(RendezvousError):
                attempt_store(store, rank, WORLD, timedelta(seconds=0.1))
    # The first rank comes last, when the words of the dead are all that it finds.
    for late in ({0: 0.3}, {1: 0.3, 2: 0.3}):
        found = _meet(store, late)
        assert sorted(found) == [0, 1, 2]
        assert len(set(found.values())) == 1


def test_the_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    waiting = threading.Thread(target=lambda: attempt_store(store, 1, WORLD, timedelta(seconds=5)))
    waiting.start()
    with pytest.raises(RendezvousError, match="All 3 processes must start .* rank 2 did not"):
        attempt_store(store, 0, WORLD, timedelta(seconds=0.5))
    waiting.join()
    with pytest.raises(RendezvousError, match="Rank 0 must start .* did not answer rank 1"):
        attempt_store(dist.HashStore(), 1, WORLD, timedelta(seconds=0.1))
