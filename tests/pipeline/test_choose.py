"""The choice of the schedule: the fastest that fits, found by simulation and explained."""

import time

import pytest
import torch
from torch import nn

from lightning_parallel import comm
from lightning_parallel.pipeline.schedule import SCHEDULES
from lightning_parallel.pipeline.search import Workload, choose_schedule
from lightning_parallel.pipeline.simulate import Cost, Link, simulate
from tests.harness import distributed
from tests.pipeline.models import Sleep, pipeline
from tests.timing import compares_durations, durations

LAYER = Cost(1e-3, 1e-3, 1e-3, activation_bytes=2**20, resident_bytes=2**20)


def test_the_chosen_is_the_fastest_and_the_prediction_can_be_repeated():
    workload = Workload([LAYER] * 16, measured_microbatches=8, link=Link(1e-4), overhead_s=1e-5)
    choice = choose_schedule(workload, 4, [8])
    best = choice.best
    assert best.timeline.makespan_s == min(c.timeline.makespan_s for c in choice.candidates)
    _, costs = workload.cut(best.schedule)
    assert simulate(best.schedule, costs, Link(1e-4), 1e-5) == best.timeline
    assert {candidate.schedule.name for candidate in choice.candidates} == set(SCHEDULES)


def test_ties_go_to_the_one_that_holds_least():
    choice = choose_schedule(Workload([LAYER] * 4), 4, [8], schedules=("gpipe", "1f1b"), virtual_stages=(1,))
    assert (choice.best.schedule.name, choice.best.schedule.warmup) == ("1f1b", 1)


def test_latency_asks_for_a_longer_warmup():
    workload = Workload([LAYER] * 4, measured_microbatches=16, link=Link(3e-4))
    choice = choose_schedule(workload, 4, [16], schedules=("1f1b",))
    assert choice.best.schedule.warmup > 1


def test_a_backward_that_cannot_be_split_gains_nothing_from_zero_bubble():
    whole = Cost(1e-3, 2e-3)
    choice = choose_schedule(Workload([whole] * 4, overhead_s=1e-5), 4, [8], virtual_stages=(1,))
    assert choice.best.schedule.name in ("1f1b", "gpipe")


def test_more_microbatches_until_their_overhead_outweighs_the_bubble():
    def chosen(overhead_s):
        workload = Workload([LAYER] * 4, measured_microbatches=8, overhead_s=overhead_s)
        return choose_schedule(workload, 4, [4, 8, 16, 32], schedules=("1f1b",)).best.schedule.num_microbatches

    assert chosen(0.0) == 32
    assert chosen(1e-3) < 32


def test_the_memory_limit_is_kept():
    workload = Workload([LAYER] * 16, measured_microbatches=8)
    free = choose_schedule(workload, 4, [8], schedules=("gpipe", "1f1b"), virtual_stages=(1,))
    assert free.candidates[-1].schedule.name == "gpipe"
    limit = 20.5 * 2**20
    choice = choose_schedule(
        workload, 4, [8], schedules=("gpipe", "1f1b"), virtual_stages=(1, 2), memory_limit_bytes=limit
    )
    assert choice.best.peak_bytes <= limit
    assert [row[-1] for row in choice.rows() if row[0] == "gpipe"] == ["over the limit by 15.5 MiB"] * 2


def test_another_cut_is_taken_where_it_makes_a_schedule_fit():
    """The first rank holds most microbatches: under a tight limit it gets fewer layers."""
    workload = Workload([LAYER] * 16, measured_microbatches=8)
    choice = choose_schedule(
        workload, 4, [8], schedules=("1f1b",), warmups=(1,), memory_limit_bytes=17 * 2**20, virtual_stages=(1,)
    )
    assert choice.best.layers_per_stage[0] < 4
    assert choice.best.peak_bytes <= 17 * 2**20


def test_nothing_fits():
    with pytest.raises(ValueError, match=r"within 1 KiB per rank, the smallest is `\w+` with 8 microbatches"):
        choose_schedule(Workload([LAYER] * 8), 4, [4, 8], memory_limit_bytes=1024)


def test_too_few_layers():
    with pytest.raises(ValueError, match="can run 3 layers on 4 ranks"):
        choose_schedule(Workload([LAYER] * 3), 4, [8])


def test_the_cut_follows_the_costs():
    workload = Workload([LAYER] * 8, epilogue=Cost(4e-3, 4e-3, 4e-3))
    choice = choose_schedule(workload, 2, [8], schedules=("1f1b",))
    assert choice.best.layers_per_stage == (6, 2)


def test_rows_explain_the_choice():
    choice = choose_schedule(Workload([LAYER] * 8, measured_microbatches=8), 4, [8])
    rows = choice.rows()
    assert all(len(row) == len(choice.HEADER) for row in rows)
    assert [row[-1] for row in rows].count("chosen") == 1
    assert rows[0][-1] == "chosen"
    by_name = {(row[0], row[1], row[3]): row for row in rows}
    assert by_name["1f1b", "1", "1"][4:7] == ("66 ms", "27.3%", "4")


class Sleeper(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Sleep.apply(x * self.weight, self.seconds)


@compares_durations
@distributed(world_size=2)
def test_the_predicted_step_is_the_measured_one(group):
    """With costs that the engine measures itself."""
    ratio = _measured_over_predicted(group)
    with durations():
        assert 0.9 < ratio < 1.1


def _measured_over_predicted(group):
    model = nn.Sequential(*map(Sleeper, [0.01, 0.01, 0.02, 0.01]))
    batch, choices = torch.ones(8, 4), []

    def step(x):
        return model(x).mean()

    def choose(costs):
        workload = Workload(costs.layers, costs.prologue, costs.epilogue, measured_microbatches=4)
        choices.append(choose_schedule(workload, 2, [4]))
        return choices[-1].best.schedule

    engine = pipeline(model, group, choose, (step, batch[:2]))
    (choice,) = choices
    assert engine.plan.layers_per_stage == choice.best.layers_per_stage
    makespans_s = []
    for _ in range(3):
        comm.barrier(group)
        began_s = time.perf_counter()
        engine.forward_backward(step, batch)
        makespans_s.append(max(comm.all_gather_object(time.perf_counter() - began_s, group)))
    return min(makespans_s) / choice.best.timeline.makespan_s
