"""The schedules as data: their forms, their rules, and that they are the tables they claim to be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from lightning_parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    activations_held,
    build_schedule,
    dependencies,
    forward_only,
    in_flight_peaks,
    producer,
    run_order,
)
from lightning_parallel.pipeline.simulate import validate

CHUNKS = {"1f1b": (1,), "zb_h1": (1,), "zbv": (2,)}


@st.composite
def schedules(draw, max_ranks=8, max_microbatches=20):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = draw(st.sampled_from(CHUNKS.get(name, (1, 2, 3, 4))))
    warmup = None if name in ("gpipe", "zbv") else draw(st.sampled_from((None, 1, 1.3, 1.5, 2)))
    ranks, microbatches = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    return build_schedule(name, ranks, microbatches, chunks, warmup)


def rows(text):
    return tuple(tuple(map(Action.parse, line.split())) for line in text.strip().splitlines())


def test_an_action_reads_and_prints_as_stage_kind_microbatch():
    action = Action(Kind.F, 2, 0)
    assert str(action) == "2F0"
    assert Action.parse("12W345") == Action(Kind.W, 12, 345)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "-1F0", "2F0x", "2SEND_F0"])
def test_what_is_not_an_action_is_refused(text):
    with pytest.raises(ValueError, match=r"An action must be written like `2F0`"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        ("0F3", ""),
        ("2F3", "1F3"),
        ("3B1", "3F1"),
        ("1B1", "1F1 2B1"),
        ("3I1", "3F1"),
        ("1I1", "1F1 2I1"),
        ("1W1", "1I1"),
    ],
)
def test_dependencies_of_four_stages(action, needs):
    assert [str(need) for need in dependencies(Action.parse(action), num_stages=4)] == needs.split()


def test_both_backwards_produce_the_gradient_of_the_input():
    assert producer(Action.parse("1B1")) == producer(Action.parse("1I1")) != producer(Action.parse("1W1"))


def test_1f1b_of_three_ranks():
    expected = """
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    assert build_schedule("1f1b", 3, 4).rows == rows(expected)


def test_gpipe_of_two_ranks_and_two_chunks():
    expected = """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    assert build_schedule("gpipe", 2, 2, 2).rows == rows(expected)


def test_zb_h1_of_two_ranks():
    expected = """
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    assert build_schedule("zb_h1", 2, 3).rows == rows(expected)


def test_zbv_places_the_last_stage_on_the_first_rank():
    schedule = build_schedule("zbv", 4, 8)
    assert schedule.stage_ranks == (0, 1, 2, 3, 3, 2, 1, 0)
    assert schedule.stages_of(0) == (0, 7)


def test_fewer_microbatches_than_ranks():
    assert build_schedule("1f1b", 4, 2).rows == rows(
        "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1\n3F0 3B0 3F1 3B1"
    )


@given(schedules())
def test_every_schedule_is_valid(schedule):
    validate(schedule)
    validate(forward_only(schedule))


@given(schedules())
def test_each_action_once_and_in_the_order_of_its_dependencies(schedule):
    played = [action for _, action, _ in run_order(schedule.rows, schedule.num_stages)]
    work = [(s, i) for s in range(schedule.num_stages) for i in range(schedule.num_microbatches)]
    kinds = (Kind.F, Kind.B) if Kind.B in {action.kind for action in played} else (Kind.F, Kind.I, Kind.W)
    assert sorted(played) == sorted(Action(kind, *each) for kind in kinds for each in work)
    position = {producer(action): index for index, action in enumerate(played)}
    for action in played:
        for need in dependencies(action, schedule.num_stages):
            assert position[producer(need)] < position[producer(action)]


@given(schedules())
def test_text_round_trips(schedule):
    back = Schedule.from_text(schedule.to_text())
    assert back == schedule
    assert (back.name, back.warmup) == (schedule.name, schedule.warmup)
    assert len(schedule.to_text().splitlines()) == 1 + schedule.num_ranks


@given(schedules())
def test_bare_text_round_trips(schedule):
    bare = "\n".join(line for line in str(schedule).splitlines() if not line.startswith("#"))
    assert Schedule.from_text(bare) == schedule


def test_rank_lines_out_of_order_are_refused():
    with pytest.raises(ValueError, match="The next line must be for rank 0; got `rank 1`"):
        Schedule.from_text("rank 1: 1F0 1B0\nrank 0: 0F0 0B0\n")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F0 0B0\n0F1 0B1", r"stage 0 on ranks \[0, 1\]"),
        ("0F0 0B0\n2F0 2B0", r"stage 1 on ranks \[\]"),
    ],
)
def test_a_table_with_no_clear_placement_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_rows(rows(table))


def test_an_empty_table_is_refused():
    with pytest.raises(ValueError, match="at least one action"):
        Schedule.from_text("")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 4, 8), "`schedule` must be one of gpipe, 1f1b"),
        (("1f1b", 0, 8), "num_ranks=0"),
        (("1f1b", 4, -1, 0), "virtual_stages=0, num_microbatches=-1"),
        (("1f1b", 4, 8, 2), "`virtual_stages` must be 1 with `1f1b`; got 2. For another number use `interleaved_1f1b`"),
        (("zb_h1", 4, 8, 2), "use `interleaved_zb`"),
        (("zbv", 4, 8, 1), "`virtual_stages` must be 2 with `zbv`"),
        (("gpipe", 4, 8, 1, 2), "`warmup` must be None"),
        (("1f1b", 4, 8, 1, 0.5), "at least 1"),
        (("interleaved_1f1b", 4, 8, 2, 3), "from 1 to 2"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(*arguments)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 8), (4, 8), (8, 32), (8, 5), (5, 7)])
def test_activations_held(ranks, microbatches):
    far = [ranks - rank for rank in range(ranks)]
    peaks = {name: build_schedule(name, ranks, microbatches).max_in_flight for name in SCHEDULES}
    assert peaks["gpipe"] == (microbatches,) * ranks
    assert peaks["1f1b"] == tuple(min(microbatches, f) for f in far)
    eager = build_schedule("1f1b", ranks, microbatches, warmup=2)
    assert eager.max_in_flight == tuple(min(microbatches, 2 * f - 1) for f in far)
    assert peaks["zb_h1"] == (min(microbatches, ranks),) * ranks
    assert max(peaks["zbv"]) <= 2 * min(microbatches, ranks)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (8, 32)])
def test_activations_held_by_several_chunks(ranks, microbatches, chunks):
    interleaved = build_schedule("interleaved_1f1b", ranks, microbatches, chunks)
    assert interleaved.max_in_flight[0] / chunks == ranks * (1 + (ranks - 1) / (ranks * chunks))
    split = build_schedule("interleaved_zb", ranks, microbatches, chunks)
    assert split.max_in_flight == (ranks * chunks,) * ranks


def test_activations_are_held_from_forward_to_the_end_of_backward():
    assert activations_held(rows("0F0 0F1 0I0 0W0 0B1")[0]) == [1, 2, 2, 1, 0]
    assert in_flight_peaks(rows("0F0 0F1")) == (0,)


def test_forward_only_keeps_the_forwards_in_order():
    schedule = build_schedule("interleaved_zb", 2, 4, 2)
    evaluation = forward_only(schedule)
    assert not evaluation.is_training
    assert evaluation.rows[1] == tuple(action for action in schedule.rows[1] if action.kind is Kind.F)
    assert evaluation.max_in_flight == (0, 0)


def test_the_last_group_of_microbatches_does_not_deadlock_or_idle():
    """Seven microbatches on four ranks are one group of seven: a short last group of three would wait."""
    row = build_schedule("interleaved_1f1b", 4, 7, 2).rows[0]
    assert [str(action) for action in row[:8]] == ["0F0", "0F1", "0F2", "0F3", "0F4", "0F5", "0F6", "4F0"]


class _Stage(_PipelineStageBase):
    """What PyTorch's schedules read of a stage, without processes."""

    def __init__(self, index, num_ranks, num_stages):
        self.stage_index, self.group_size, self.num_stages, self.group_rank = index, num_ranks, num_stages, 0
        self.stage_index_to_group_rank = {stage: stage % num_ranks for stage in range(num_stages)}
        self.submod, self.has_backward = None, False

    def _create_grad_recv_info(self, *_):
        raise NotImplementedError

    def _prepare_forward_infra(self, *_):
        raise NotImplementedError

    def _prepare_backward_infra(self, *_):
        raise NotImplementedError


PEERS = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zb_h1": torch_schedules.ScheduleInterleavedZeroBubble,
    "interleaved_zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", PEERS)
def test_rows_are_those_of_torch(name, ranks):
    compared = 0
    for chunks in CHUNKS.get(name, (2, 3)):
        for microbatches in (1, 2, 3, 5, 8, 12, 16, 24):
            rounds = max(1, microbatches // ranks)
            if name != "zbv" and microbatches % rounds:
                continue  # torch refuses these
            stages = [_Stage(0, ranks, ranks * chunks) for _ in range(chunks)]
            table = PEERS[name](stages, microbatches).pipeline_order
            theirs = [[str(action) for action in table[rank] if action is not None] for rank in range(ranks)]
            ours = build_schedule(name, ranks, microbatches, chunks)
            assert [[str(action) for action in row] for row in ours.rows] == theirs
            compared += 1
    assert compared >= 6


@given(schedules(max_ranks=5, max_microbatches=9))
def test_torch_can_place_the_communication(schedule):
    """Its checks and its lowering are independent of ours."""
    table = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in row]
        for rank, row in enumerate(schedule.rows)
    }
    torch_schedules._validate_schedule(table, schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
    lowered = torch_schedules._add_send_recv(table, lambda stage: schedule.stage_ranks[stage], schedule.num_stages)
    sends = sum("SEND" in str(action) for row in lowered.values() for action in row)
    hops = sum(a != b for a, b in zip(schedule.stage_ranks, schedule.stage_ranks[1:]))
    assert sends == 2 * hops * schedule.num_microbatches


@given(st.integers(1, 8), st.floats(1, 2), st.integers(1, 24))
def test_a_longer_warmup_holds_more(ranks, warmup, microbatches):
    schedule = build_schedule("1f1b", ranks, microbatches, warmup=warmup)
    expected = tuple(min(microbatches, math.ceil(warmup * (ranks - 1 - rank)) + 1) for rank in range(ranks))
    assert schedule.max_in_flight == expected
