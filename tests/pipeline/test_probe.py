"""The measured link."""

import time

import torch

from lightning_parallel import comm
from lightning_parallel.pipeline.measure import measure_link
from tests.harness import distributed
from tests.timing import compares_durations, durations

CPU = torch.device("cpu")


@distributed(world_size=3)
def test_all_ranks_find_the_same_plausible_link(group):
    link = measure_link(group, CPU)
    assert 0 < link.latency_s < 1
    assert link.bytes_per_s > 1e5
    assert comm.all_gather_object(link, group) == [link] * 3


@compares_durations
@distributed(world_size=3)
def test_the_slowest_pair_counts(group):
    quick = comm.isend

    def slow(tensor, group, to, tag):
        if {group.rank, to} == {1, 2}:
            time.sleep(0.05 + tensor.numel() / 1e7)
        return quick(tensor, group, to, tag)

    comm.isend = slow
    try:
        link = measure_link(group, CPU)
    finally:
        comm.isend = quick
    assert link.latency_s > 0.05
    with durations():
        assert 3e6 < link.bytes_per_s < 2e7


@distributed(world_size=2)
def test_a_measurement_leaves_nothing_behind(group):
    measure_link(group, CPU)
    message = torch.full((3,), float(group.rank))
    pending = comm.irecv(received := torch.zeros(3), group, 1 - group.rank, 900)
    comm.isend(message, group, 1 - group.rank, 900).wait()
    pending.wait()
    assert received[0] == 1 - group.rank
