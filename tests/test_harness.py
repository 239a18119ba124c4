"""The harness: failures on ranks are shown, and do not reach the next test."""

import pytest
import torch.distributed as dist

from lightning_parallel import comm
from tests.harness import RankError, distributed, run


def _fail_on_rank_one(group):
    assert group.rank == 0, "this rank fails"
    comm.barrier(group)


def test_the_harness_shows_every_failing_rank_and_recovers():
    test_the_next_job_gets_new_workers()  # starts workers, which would take of the short deadline
    with pytest.raises(RankError, match="(?s)rank 0.*rank 1: error.*this rank fails"):
        run(_fail_on_rank_one, 2, deadline_s=2)
    test_the_next_job_gets_new_workers()


@distributed(world_size=2)
def test_connections_that_a_job_has_closed_are_replaced(group):
    assert comm.all_gather_object(group.rank, group) == [0, 1]
    dist.destroy_process_group()


@distributed(world_size=2)
def test_the_next_job_gets_new_workers(group):
    assert comm.all_gather_object(group.rank, group) == [0, 1]
