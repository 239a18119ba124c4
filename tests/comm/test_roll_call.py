"""Roll calls: ranks go on together, or all are told where the others are."""

import time

import pytest
import torch.distributed as dist

from lightning_parallel import comm
from lightning_parallel.comm import ApartError, RollCall, presence
from lightning_parallel.compat import patched
from tests.harness import distributed


@distributed(world_size=2)
def test_ranks_go_on_together_with_the_notes_of_all(group):
    calls = RollCall(group, "test", comm.shared_key(group))
    for turn in range(3):
        if turn == group.rank:
            time.sleep(0.1)
        assert calls.meet("here", 10.0, f"rank {group.rank} in {turn}") == [f"rank {rank} in {turn}" for rank in (0, 1)]


@distributed(world_size=2)
def test_ranks_at_different_places_are_told_on_all(group):
    with pytest.raises(ApartError) as caught:
        RollCall(group, "test", comm.shared_key(group)).meet(f"place {group.rank}", 10.0)
    assert caught.value.places == {0: "place 0", 1: "place 1"}


@distributed(world_size=2)
def test_a_rank_that_does_not_come_is_told(group):
    calls = RollCall(group, "test", comm.shared_key(group))
    if group.rank == 0:
        with pytest.raises(ApartError) as caught:
            calls.meet("here", 0.2)
        assert caught.value.places == {0: "here", 1: ""}
    dist.barrier()


@distributed(world_size=2)
def test_a_rank_that_waits_in_a_collective_is_told(group):
    calls = RollCall(group, "test", comm.shared_key(group))
    comm.start_heartbeat()
    if group.rank == 0:
        with patched(presence, "_STUCK_S", 1.0), pytest.raises(ApartError) as caught:
            calls.meet("here", 60.0)
        assert caught.value.places == {0: "here", 1: "`barrier` along world"}
    comm.barrier(group)
    comm.stop_heartbeat()
