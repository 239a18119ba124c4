"""The search for a cut, exact against brute force, and for the schedule: the fastest that fits."""

import time
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_parallel import comm
from lightning_parallel.pipeline.recomputed_set import cheapest_set, mixed_costs
from lightning_parallel.pipeline.schedule import SCHEDULES, build_schedule
from lightning_parallel.pipeline.search import Costs, Workload, choose_schedule, cut_layers, schedule_arguments
from lightning_parallel.pipeline.simulate import Cost, Link, simulate
from lightning_parallel.tracing.spans import bytes_text
from tests.harness import distributed
from tests.pipeline.models import Sleep, pipeline
from tests.timing import compares_durations, durations


def all_cuts(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *inner, num_layers)))


def slowest(layers, cut, **ends):
    return max(cost.total_s for cost in Costs(layers, **ends).per_stage(cut))


def timed(seconds):
    return [Cost(second) for second in seconds]


@given(st.data())
def test_no_cut_is_better(data):
    seconds = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any))
    num_stages = data.draw(st.integers(1, min(4, len(seconds))))
    ends = {"prologue": Cost(data.draw(st.integers(0, 30))), "epilogue": Cost(0, data.draw(st.integers(0, 30)))}
    layers = timed(seconds)
    cut = cut_layers(layers, num_stages, "measured", **ends)
    cuts = list(all_cuts(len(layers), num_stages))
    assert cut in cuts
    best = min(slowest(layers, each, **ends) for each in cuts)
    assert slowest(layers, cut, **ends) == best

    def squares(each):
        return sum(cost.total_s**2 for cost in Costs(layers, **ends).per_stage(each))

    assert squares(cut) == min(squares(each) for each in cuts if slowest(layers, each, **ends) == best)


@given(st.data())
def test_no_cut_within_the_memory_is_better(data):
    sizes = st.integers(0, 9)
    layers = data.draw(
        st.lists(
            st.builds(Cost, st.integers(1, 9), activation_bytes=sizes, resident_bytes=sizes), min_size=3, max_size=7
        )
    )
    num_stages = data.draw(st.integers(1, 3))
    in_flight = [num_stages - stage for stage in range(num_stages)]
    ends = {"prologue": Cost(2, activation_bytes=1, resident_bytes=4), "epilogue": Cost(3, resident_bytes=6)}
    cap = data.draw(st.integers(5, 60))

    def held(cut):
        costs = Costs(layers, **ends).per_stage(cut)
        return max(cost.resident_bytes + n * cost.activation_bytes for cost, n in zip(costs, in_flight))

    fitting = [cut for cut in all_cuts(len(layers), num_stages) if held(cut) <= cap]
    if fitting:
        cut = cut_layers(layers, num_stages, memory_cap_bytes=cap, in_flight=in_flight, **ends)
        assert held(cut) <= cap
        assert slowest(layers, cut, **ends) == min(slowest(layers, each, **ends) for each in fitting)
    else:
        least = min(held(cut) for cut in all_cuts(len(layers), num_stages))
        with pytest.raises(ValueError, match=f"within {bytes_text(cap)}; the best split needs {bytes_text(least)}"):
            cut_layers(layers, num_stages, memory_cap_bytes=cap, in_flight=in_flight, **ends)


def test_a_skewed_model():
    layers = timed([1, 1, 1, 1, 9, 1, 1, 1])
    assert cut_layers(layers, 4, "uniform") == (2, 2, 2, 2)
    cut = cut_layers(layers, 4, epilogue=Cost(3))
    assert slowest(layers, cut, epilogue=Cost(3)) == 9
    assert cut == (4, 1, 2, 1)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(8, 4, (2, 2, 2, 2)), (9, 4, (2, 3, 2, 2)), (10, 4, (2, 3, 3, 2)), (11, 4, (3, 3, 3, 2)), (3, 3, (1, 1, 1))],
)
def test_uniform_spreads_the_rest_from_the_middle(num_layers, num_stages, expected):
    assert cut_layers([Cost()] * num_layers, num_stages, "uniform") == expected


def test_parameters_counts_what_is_resident():
    layers = [Cost(1, resident_bytes=size) for size in (8, 1, 1, 1, 1)]
    assert cut_layers(layers, 2, "parameters") == (1, 4)
    assert cut_layers(layers, 2, "parameters", epilogue=Cost(resident_bytes=4)) == (1, 4)
    assert cut_layers(layers, 2, "measured") in {(2, 3), (3, 2)}


def test_explicit_layers_are_taken_as_they_are():
    assert cut_layers(timed([1] * 6), 3, [1, 1, 4]) == (1, 1, 4)


@pytest.mark.parametrize("balance", [[3, 3], [1, 1, 1], [0, 3, 3], [2, 2, 3]])
def test_explicit_layers_that_do_not_add_up(balance):
    with pytest.raises(ValueError, match="each of 3 stages at least one layer, 6 in all"):
        cut_layers(timed([1] * 6), 3, balance)


def test_fewer_layers_than_stages():
    with pytest.raises(ValueError, match="got 3 layers for 4 stages"):
        cut_layers(timed([1] * 3), 4)


def test_an_unknown_balance():
    with pytest.raises(ValueError, match="got 'even'"):
        cut_layers(timed([1] * 4), 2, "even")


@pytest.mark.parametrize("balance", ["auto", "measured", "parameters"])
def test_nothing_to_balance(balance):
    with pytest.raises(ValueError, match="needs layers with a cost"):
        cut_layers([Cost()] * 4, 2, balance)


def test_in_flight_of_the_wrong_length():
    with pytest.raises(ValueError, match="`in_flight` must have an entry for each of 2 stages; got 3"):
        cut_layers(timed([1] * 4), 2, memory_cap_bytes=1, in_flight=[1, 2, 3])


def test_stage_costs_include_the_ends():
    layers = timed([1, 2, 3])
    costs = Costs(layers, prologue=Cost(10), epilogue=Cost(20)).per_stage((2, 1))
    assert [cost.total_s for cost in costs] == [13, 23]


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


@pytest.mark.parametrize("cost", [LAYER, Cost(1e-3, 2e-3), Cost(2e-3, 1e-3, 5e-4)], ids=["split", "whole", "uneven"])
@pytest.mark.parametrize("link", [Link(), Link(2e-4, 1e9)], ids=["at once", "slow"])
def test_no_schedule_ends_before_its_bound(cost, link):
    workload = Workload([cost] * 16, Cost(1e-3), Cost(2e-3, 3e-3), 8, 1e-5, link)
    arguments = list(schedule_arguments(4, [2, 4, 8, 16], 16))
    assert {name for name, *_ in arguments} == set(SCHEDULES)
    bounds, predicted = [], []
    for values in arguments:
        schedule = build_schedule(*values)
        bounds.append(workload.bound_s(values))
        predicted.append(simulate(schedule, workload.cut(schedule)[1], link, 1e-5).makespan_s)
    assert all(bound <= seconds * (1 + 1e-9) for bound, seconds in zip(bounds, predicted))
    # Close enough to leave schedules out.
    assert sum(bound > min(predicted) for bound in bounds) > len(bounds) / 3


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
    with pytest.raises(ValueError, match=r"within 1 KiB per rank; got at least .*, with `\w+` and 8 microbatches"):
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

    def choose(costs, passes):
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


@given(st.data())
def test_the_layers_computed_again_fit_and_none_of_them_could_cost_less(data):
    sizes, times = st.integers(0, 20), st.integers(0, 9)
    count = data.draw(st.integers(1, 4))
    off = [data.draw(sizes) for _ in range(count)]
    costs = {"off": Costs([Cost(1, 1, 1, held) for held in off])}
    for option in data.draw(st.sampled_from([["selective"], ["selective", "full"]])):
        kept = [data.draw(st.integers(0, held)) for held in off]
        costs[option] = Costs(
            [
                Cost(1, 1 + time, 1, held, again_s=time, again_bytes=all_of - held, largest_again_bytes=all_of - held)
                for held, all_of in zip(kept, off)
                for time in [data.draw(times)]
            ]
        )
    names = [f"layers.{data.draw(st.integers(0, index))}" for index in range(count)]  # some are called twice
    row = build_schedule("1f1b", 1, 1).rows[0]

    def peak(mixed):
        return Cost.peak_activation_bytes(row, mixed.per_stage([count]))

    limit = data.draw(st.integers(0, 60))
    found = cheapest_set(costs, names, dict.fromkeys(names), peak, limit)
    options = list(costs)
    everything = dict.fromkeys(names, options[-1])
    if peak(mixed_costs(costs, names, found)) > limit:
        # A first layer computed again adds its activations to the peak, so fewer may fit although all do not.
        assert peak(mixed_costs(costs, names, everything)) > limit or len(options) == 3
        return
    for name, option in found.items():
        for cheaper in options[: options.index(option)]:
            assert peak(mixed_costs(costs, names, {**found, name: cheaper})) > limit
