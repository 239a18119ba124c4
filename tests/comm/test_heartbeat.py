"""The heartbeat that tells who is gone."""

from lightning_parallel import comm
from lightning_parallel.comm import heartbeat
from tests.harness import distributed


@distributed(world_size=2)
def test_the_error_of_an_earlier_run_does_not_explain_a_later_one(group):
    for attempt in range(2):
        heartbeat.start()
        comm.barrier(group)
        if attempt == 0:
            heartbeat._heartbeat.report("an earlier error")
        comm.barrier(group)
        assert bool(heartbeat._heartbeat.errors([1 - group.rank])) == (attempt == 0)
        comm.barrier(group)
        heartbeat.stop()
