"""Simulated steps: the closed forms of the literature, hand-worked examples, and what a timeline says of itself."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.pipeline.schedule import Action, Kind, Schedule, build_schedule, dependencies, forward_only
from lightning_parallel.pipeline.simulate import Cost, Link, ScheduleError, Timeline, simulate
from tests.pipeline.test_schedule import schedules

SHAPES = [(2, 4), (4, 8), (8, 32), (3, 7), (5, 11)]
COSTS = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 3.0, 1.5)]


def play(name, ranks, microbatches, costs=(1.0, 1.0, 1.0), chunks=None, latency=0.0, warmup=None):
    """Costs are those of a rank's whole share; its chunks divide them."""
    schedule = build_schedule(name, ranks, microbatches, chunks, warmup)
    share = Cost(*costs).scaled(1 / schedule.virtual_stages)
    return simulate(schedule, share, Link(latency))


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_bubbles_have_their_closed_forms(ranks, microbatches, costs):
    f, i, w = costs
    for name, warmup in (("gpipe", None), ("1f1b", None), ("1f1b", 2)):
        timeline = play(name, ranks, microbatches, costs, warmup=warmup)
        assert timeline.bubble_s == pytest.approx((ranks - 1) * (f + i + w))
        assert timeline.bubble_fraction == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    for chunks in (2, 4):
        timeline = play("interleaved_1f1b", ranks, microbatches, costs, chunks)
        assert timeline.bubble_s == pytest.approx((ranks - 1) * (f + i + w) / chunks)
        assert timeline.bubble_fraction == pytest.approx((ranks - 1) / (chunks * microbatches + ranks - 1))
    assert play("zb_h1", ranks, microbatches, costs).bubble_s == pytest.approx((ranks - 1) * (f + i - w))
    if microbatches >= 2 * ranks:  # ZB-H2 fills its longer warm-up
        timeline = play("zb_h1", ranks, microbatches, costs, warmup=2)
        assert timeline.bubble_s == pytest.approx((ranks - 1) * max(f, f + i - 2 * w))
        assert timeline.in_flight_peaks == [min(microbatches, 2 * ranks - 1)] * ranks


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 32)])
def test_bubble_of_interleaved_zero_bubble(ranks, microbatches, chunks):
    timeline = play("interleaved_zb", ranks, microbatches, chunks=chunks)
    assert timeline.bubble_s == pytest.approx((ranks - 1) / chunks)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 32), (4, 7)])
def test_zbv_has_no_bubble_but_the_stagger(ranks, microbatches):
    timeline = play("zbv", ranks, microbatches)
    assert timeline.bubble_s == pytest.approx((ranks - 1) / 2)
    for row in timeline.spans:
        starts, ends = zip(*row.values())
        assert max(ends) - min(starts) == pytest.approx(3 * microbatches)


@pytest.mark.parametrize(
    ("name", "options", "fraction"),
    [
        ("gpipe", {}, 0.1892),
        ("1f1b", {}, 0.2246),
        ("1f1b", {"warmup": 2}, 0.1892),
        ("interleaved_1f1b", {"chunks": 2}, 0.1233),
        ("gpipe", {"chunks": 2}, 0.1103),
        ("zb_h1", {}, 0.0926),
        ("interleaved_zb", {"chunks": 2}, 0.0689),
        ("zbv", {}, 0.0661),
    ],
)
def test_bubble_with_a_latency_of_a_tenth(name, options, fraction):
    """Values of another simulator on PyTorch's tables, 8 ranks and 32 microbatches."""
    assert play(name, 8, 32, latency=0.1, **options).bubble_fraction == pytest.approx(fraction, abs=5e-5)


@pytest.mark.parametrize(("name", "fraction"), [("zbv", 0.0419), ("interleaved_zb", 0.0486), ("zb_h1", 0.0926)])
def test_bubble_with_unequal_backward_halves(name, fraction):
    assert play(name, 8, 32, (1.0, 1.2, 0.8)).bubble_fraction == pytest.approx(fraction, abs=5e-5)


def test_a_heavy_last_stage_costs_more_than_the_choice_of_schedule():
    """A head worth half a stage: a third longer."""
    schedule = build_schedule("1f1b", 8, 32)
    even = simulate(schedule, Cost(1, 1, 1)).makespan_s
    uneven = simulate(schedule, [Cost(1, 1, 1)] * 7 + [Cost(1.5, 1.5, 1.5)]).makespan_s
    balanced = simulate(schedule, Cost(1, 1, 1).scaled(8.5 / 8)).makespan_s
    assert even == 117
    assert uneven / balanced == pytest.approx(1.327, abs=1e-3)


def test_two_ranks_by_hand():
    """Activations of 2 bytes at 1 byte/s take 2 s and 0.5 s of latency; the link carries one at a time.

    rank 0: F0 0-1, F1 1-2          arrive at 3.5 and 5.5
    rank 1: F0 3.5-4.5, B0 4.5-7.5, F1 7.5-8.5, B1 8.5-11.5     gradients arrive at 10 and 14
    rank 0: B0 10-13, B1 14-17
    """
    schedule = build_schedule("1f1b", 2, 2)
    timeline = simulate(schedule, Cost(1, 2, 1, boundary_bytes=2), Link(0.5, 1.0))
    assert timeline.spans == [
        {Action.parse(a): s for a, s in {"0F0": (0, 1), "0F1": (1, 2), "0B0": (10, 13), "0B1": (14, 17)}.items()},
        {
            Action.parse(a): s
            for a, s in {"1F0": (3.5, 4.5), "1B0": (4.5, 7.5), "1F1": (7.5, 8.5), "1B1": (8.5, 11.5)}.items()
        },
    ]
    assert (timeline.makespan_s, timeline.busy_s, timeline.bubble_s) == (17, [8, 8], 9)


def test_messages_queue_on_a_slow_link():
    schedule = forward_only(build_schedule("gpipe", 2, 3))
    timeline = simulate(schedule, Cost(1, boundary_bytes=3), Link(bytes_per_s=1))
    assert list(timeline.spans[1].values()) == [(4, 5), (7, 8), (10, 11)]


def test_gradients_have_the_size_of_the_boundary_that_they_cross():
    costs = [Cost(1, 1, boundary_bytes=5), Cost(1, 1, boundary_bytes=100)]
    timeline = simulate(build_schedule("1f1b", 2, 1), costs, Link(bytes_per_s=1))
    assert timeline.makespan_s == 1 + 5 + 1 + 1 + 5 + 1


def test_stages_on_one_rank_hand_over_at_once():
    schedule = build_schedule("zbv", 1, 1)
    assert simulate(schedule, Cost(1, 1, 1, boundary_bytes=9), Link(100, 1)).makespan_s == 6


def test_every_action_pays_the_overhead():
    schedule = build_schedule("zb_h1", 1, 2)
    assert simulate(schedule, Cost(1, 1, 1), overhead_s=0.25).makespan_s == 7.5


def test_split_and_whole_backwards_mixed():
    schedule = Schedule.from_text("0F0 0B0\n1F0 1I0 1W0")
    assert simulate(schedule, Cost(1, 2, 4)).makespan_s == 1 + 1 + 2 + 6


def test_wrong_number_of_costs():
    with pytest.raises(ValueError, match="must have the costs of 4 stages; got 3"):
        simulate(build_schedule("1f1b", 4, 4), [Cost(1)] * 3)


def test_a_circular_wait_is_named():
    with pytest.raises(ScheduleError, match="rank 0 waits at 0B0 for 1B0 of rank 1"):
        simulate(Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), Cost(1, 1))


@pytest.mark.parametrize("wrong", [{"forward_s": -1}, {"activation_bytes": -2}])
def test_negative_costs_are_refused(wrong):
    with pytest.raises(ValueError, match="at least 0"):
        Cost(**wrong)


@pytest.mark.parametrize("wrong", [{"latency_s": -1}, {"bytes_per_s": 0}])
def test_impossible_links_are_refused(wrong):
    with pytest.raises(ValueError, match="`latency_s` must be finite and at least 0, `bytes_per_s` positive"):
        Link(**wrong)


def test_costs_of_layers_add_up():
    layers = [Cost(1, 2, 3, 10, 100, 1000), Cost(4, 5, 6, 20, 200, 2000)]
    assert Cost.in_sequence(layers) == Cost(5, 7, 9, 30, 200, 3000)
    assert Cost.in_sequence(layers).total_s == 21
    assert layers[0].scaled(2) == Cost(2, 4, 6, 20, 200, 1000)


@given(schedules(max_ranks=5, max_microbatches=8), st.data())
def test_actions_wait_for_what_they_need_and_for_nothing_else(schedule, data):
    duration = st.integers(0, 5)
    costs = [Cost(*(data.draw(duration) for _ in range(3))) for _ in range(schedule.num_stages)]
    latency = data.draw(st.integers(0, 3))
    timeline = simulate(schedule, costs, Link(latency))
    ends = {action: span[1] for row in timeline.spans for action, span in row.items()}
    for rank, row in enumerate(timeline.spans):
        assert tuple(row) == schedule.rows[rank]
        free = 0
        for action, (start, end) in row.items():
            arrivals = [free]
            for need in dependencies(action, schedule.num_stages):
                hops = schedule.stage_ranks[need.stage] != rank
                arrivals.append(ends[need] + latency * hops)
            assert start == max(arrivals)
            assert end - start == costs[action.stage].seconds()[action.kind]
            free = end


@given(schedules(max_ranks=5, max_microbatches=8), st.data())
def test_the_critical_path_explains_the_makespan(schedule, data):
    duration = st.integers(1, 5)
    costs = [Cost(*(data.draw(duration) for _ in range(3))) for _ in range(schedule.num_stages)]
    timeline = simulate(schedule, costs)
    path = timeline.critical_path()
    spans = {action: span for row in timeline.spans for action, span in row.items()}
    assert spans[path[0]][0] == 0
    assert spans[path[-1]][1] == timeline.makespan_s
    assert all(spans[earlier][1] == spans[later][0] for earlier, later in zip(path, path[1:]))


def test_the_critical_path_crosses_a_link():
    timeline = simulate(build_schedule("1f1b", 2, 1), Cost(1, 1, 1), Link(0.5))
    assert [str(action) for action in timeline.critical_path()] == ["0F0", "1F0", "1B0", "0B0"]


def test_measured_gaps_within_the_tolerance_are_not_waiting():
    timeline = Timeline(build_schedule("1f1b", 2, 1))
    for rank, action, start, end in [(0, "0F0", 0, 1), (1, "1F0", 1.5, 3), (1, "1B0", 3.01, 5), (0, "0B0", 5.2, 6)]:
        timeline.record(rank, Action.parse(action), start, end)
    assert [str(action) for action in timeline.critical_path(0.05)] == ["0F0", "1F0", "1B0", "0B0"]
    assert timeline.in_flight_peaks == [1, 1]


def test_what_has_long_arrived_is_not_waited_for():
    """Rank 1 is late with 1F1 by itself: 0F1 had ended before 1B0 began."""
    timeline = Timeline(build_schedule("1f1b", 2, 2))
    row0 = [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 5, 6), ("0B1", 9, 10)]
    for action, start, end in row0:
        timeline.record(0, Action.parse(action), start, end)
    for action, start, end in [("1F0", 1, 3), ("1B0", 3, 5), ("1F1", 6, 7), ("1B1", 7, 9)]:
        timeline.record(1, Action.parse(action), start, end)
    assert [str(action) for action in timeline.critical_path(0.1)] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


@given(schedules(max_ranks=5, max_microbatches=8))
def test_peaks_are_those_declared(schedule):
    costs = [Cost(1, 1, 1, activation_bytes=10, resident_bytes=1000)] * schedule.num_stages
    timeline = simulate(schedule, costs)
    assert tuple(timeline.in_flight_peaks) == schedule.max_in_flight
    resident = 1000 * schedule.virtual_stages
    assert timeline.memory_peaks(costs) == [10 * peak + resident for peak in schedule.max_in_flight]


def test_memory_counts_each_stage_with_its_own_size():
    schedule = Schedule.from_text("0F0 1F0 1B0 0B0")
    costs = [Cost(1, activation_bytes=3, resident_bytes=100), Cost(1, activation_bytes=7, resident_bytes=1000)]
    assert simulate(schedule, costs).memory_peaks(costs) == [1110]
    evaluation = forward_only(schedule)
    assert simulate(evaluation, costs).memory_peaks(costs) == [1100]


def test_in_flight_over_time():
    timeline = simulate(build_schedule("1f1b", 1, 2), Cost(1, 1, 1))
    assert timeline.in_flight(0) == [(1, 1), (3, 0), (4, 1), (6, 0)]


def test_an_empty_timeline_is_filled_by_a_clock():
    schedule = build_schedule("1f1b", 2, 1)
    timeline = Timeline(schedule)
    assert (timeline.makespan_s, timeline.bubble_fraction, timeline.critical_path()) == (0, 0, [])
    timeline.record(0, Action(Kind.F, 0, 0), 100.0, 101.0)
    timeline.record(1, Action(Kind.F, 1, 0), 101.0, 104.0)
    assert (timeline.makespan_s, timeline.busy_s) == (4, [1, 3])
    assert timeline.bubble_fraction == 0.5


def test_a_timeline_of_another_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="`spans` must have an entry for each of 2 ranks; got 1"):
        Timeline(build_schedule("1f1b", 2, 1), [{}])


def test_timelines_survive_json():
    timeline = play("zbv", 3, 4, latency=0.1)
    back = Timeline.from_dict(json.loads(json.dumps(timeline.to_dict())))
    assert back == timeline
    assert back.schedule.name == "zbv"


def test_a_large_pipeline():
    timeline = simulate(build_schedule("1f1b", 64, 512), Cost(1, 1, 1))
    assert timeline.makespan_s == (512 + 63) * 3
