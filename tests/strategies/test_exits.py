"""The statuses that processes end with, as an interpreter does: 0 after a run that succeeded, in whatever way it ends.

The whole table is `benchmarks/exits.py`: every strategy, by every launcher and in every way, many times.
"""

from pathlib import Path

import pytest

from tests.harness import free_port, run_script, start_script

SCRIPT = Path(__file__).with_name("ending.py")
SOON_S = 120.0  # where a rank waits for one that is gone, it would be half an hour


def ends_of(kind, end):
    """Start two ranks, each by itself, and return how they ended."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    ranks = [
        start_script(SCRIPT, kind, end, deadline_s=SOON_S, RANK=str(rank), LOCAL_RANK=str(rank), **address)
        for rank in range(2)
    ]
    return [rank() for rank in ranks]


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "end"), [("ddp powersgd", "fit"), ("ddp powersgd", "dropped")])
def test_a_run_that_has_succeeded_ends_with_zero(kind, end):
    for ended in ends_of(kind, end):
        assert ended.returncode == 0, ended.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["hook", "reduce", "local"])
def test_so_do_loops_that_close_nothing_and_steps_that_overlap(kind):
    for ended in ends_of(kind, "fit"):
        assert ended.returncode == 0, ended.stderr


@pytest.mark.sweep
@pytest.mark.parametrize(("end", "reason"), [("alone", "rank 1 stopped with: Failure"), ("killed", "rank 1 is gone")])
def test_one_rank_that_fails_between_two_buckets_is_named_by_the_other(end, reason):
    first, second = ends_of("ddp powersgd", end)
    assert second.returncode == (1 if end == "alone" else -9)
    assert first.returncode == 1, first.stderr
    assert reason in first.stderr


def test_a_signal_to_one_rank_ends_both_after_the_same_step():
    for ended in ends_of("ddp powersgd", "term one"):
        assert ended.returncode == 0, ended.stderr  # as Lightning, where all get it


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "end", "status"), [("ddp powersgd", "term", 0), ("pipeline", "int", 1)])
def test_who_has_started_functions_ends_as_they_do(kind, end, status):
    """Lightning waits for ever for the results of processes that ended without any."""
    ended = run_script(SCRIPT, kind, end, "fork", deadline_s=SOON_S)
    assert ended.returncode == status, ended.stderr
