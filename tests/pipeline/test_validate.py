"""Whatever is wrong with a schedule is refused, with the row and the fault marked."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.pipeline.schedule import SCHEDULES, Action, Kind, Schedule, build_schedule, forward_only
from lightning_parallel.pipeline.simulate import ScheduleError, describe_waits, validate


def changed(schedule, rank, change):
    row = list(schedule.rows[rank])
    change(row)
    table = tuple(tuple(row) if r == rank else old for r, old in enumerate(schedule.rows))
    return replace(schedule, rows=table)


def swap(first, second):
    def change(row):
        row[first], row[second] = row[second], row[first]

    return change


def message_of(schedule):
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    return str(caught.value)


def marked_word(message):
    """The word above the first arrows."""
    lines = message.splitlines()
    arrows = next(index for index, line in enumerate(lines) if set(line.strip()) == {"^"})
    start = lines[arrows].index("^")
    return lines[arrows - 1][start : start + lines[arrows].count("^")]


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_single_change_is_refused(name, microbatches):
    schedule = build_schedule(name, 3, microbatches)
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            dropped = message_of(changed(schedule, rank, lambda row, i=index: row.pop(i)))
            assert f"rank {rank} lacks {action}" in dropped
            assert marked_word(dropped) == f"({action})"
            for place in (index, len(row)):
                doubled = message_of(changed(schedule, rank, lambda row, i=place, a=action: row.insert(i, a)))
                assert f"rank {rank} repeats {action}, which must occur once" in doubled
                assert marked_word(doubled) == str(action)
            for other in range(index + 1, len(row)):
                swapped = message_of(changed(schedule, rank, swap(index, other)))
                assert "^^^" in swapped


def test_a_circular_wait_says_who_waits_for_whom():
    table = Schedule.from_text("0F0 0F1 0B1 0B0\n1F0 1B0 1F1 1B1")
    assert describe_waits(table) == ""
    table = Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    assert message_of(table).splitlines()[1:] == [
        "These ranks would wait forever:",
        "rank 0 waits at 0B0 for 1B0 of rank 1",
        "  rank 0: 0F0 0B0 0F1 0B1",
        "              ^^^",
        "rank 1 waits at 1F1 for 0F1 of rank 0",
        "  rank 1: 1F0 1F1 1B0 1B1",
        "              ^^^",
    ]


def test_ranks_outside_of_the_circle_come_after_it():
    table = Schedule.from_text("0F0 0B0\n1F0 1B0\n2B0 2F0")
    waits = [line for line in message_of(table).splitlines() if " waits " in line]
    assert waits == [
        "rank 2 waits at 2B0 for 2F0 later in its own row",
        "rank 0 waits at 0B0 for 1B0 of rank 1",
        "rank 1 waits at 1B0 for 2B0 of rank 2",
    ]


def test_messages_used_in_another_order_than_sent():
    table = Schedule.from_text("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1")
    assert "rank 0 sends 0F0 before 0F1, but rank 1 uses them in the reverse order" in message_of(table)


def test_more_in_flight_than_declared():
    schedule = replace(build_schedule("1f1b", 3, 4), max_in_flight=(2, 2, 1), name="custom")
    message = message_of(schedule)
    assert "rank 0 holds more activations than the 2 that it declares" in message
    assert marked_word(message) == "0F2"


def test_a_legal_order_is_not_the_schedule_of_that_name():
    schedule = changed(build_schedule("1f1b", 3, 4), 0, swap(4, 5))
    message = message_of(schedule)
    assert "rank 0 runs 0B1 where `1f1b` runs 0F3" in message
    validate(replace(schedule, name="custom"))


def test_forwards_alone_are_not_the_schedule_of_that_name():
    evaluation = replace(forward_only(build_schedule("1f1b", 2, 2)), name="1f1b")
    assert "rank 0 lacks 0B0" in message_of(evaluation)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F0 0B0\n1F0 1B0 0F1 0B1", "stage 0 on ranks"),
        ("0F0 0B0 0I0 0W0", "rank 0 runs 0B0 in addition to its halves"),
        ("0F0 0I0", "rank 0 lacks 0W0"),
        ("0F0 0W0", "rank 0 lacks 0I0"),
        ("0F0 0F1 0B0", "rank 0 lacks 0B1"),
        ("0F0 0W0 0I0", "rank 0 waits at 0W0 for 0I0 later in its own row"),
    ],
)
def test_custom_tables(table, message):
    with pytest.raises(ValueError, match=message):
        validate(Schedule.from_text(table))


def test_split_and_whole_backwards_may_be_neighbours():
    validate(Schedule.from_text("0F0 0F1 0B0 0I1 0W1\n1F0 1I0 1F1 1B1 1W0"))


def test_an_action_on_the_wrong_rank_or_out_of_range():
    schedule = build_schedule("1f1b", 2, 2)
    stray = changed(schedule, 0, lambda row: row.append(Action(Kind.F, 1, 0)))
    assert "rank 0 has 1F0, but stage 1 is on rank 1" in message_of(stray)
    stray = changed(schedule, 0, lambda row: row.append(Action(Kind.F, 5, 0)))
    assert "must have only stages below 2 and microbatches below 2" in message_of(stray)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage_ranks": (0, 7)}, r"on ranks 0 to 1; got \[7\]"),
        ({"max_in_flight": (2,)}, "`max_in_flight` must have 2 entries, one per rank; got 1"),
        ({"num_microbatches": 0}, "microbatches must be at least 1; got 0"),
    ],
)
def test_facts_that_do_not_fit_the_rows(change, message):
    with pytest.raises(ScheduleError, match=message):
        validate(replace(build_schedule("1f1b", 2, 2), **change))


def test_many_faults_are_counted_not_all_printed():
    message = message_of(replace(build_schedule("1f1b", 2, 8), rows=((), ())))
    assert message.count("lacks") == 4
    assert message.endswith("... and 12 more")


def test_evaluation_needs_forwards_only():
    evaluation = forward_only(build_schedule("zbv", 3, 4))
    validate(evaluation)
    assert "lacks 0F0" in message_of(changed(evaluation, 0, lambda row: row.pop(0)))


def test_channels_list_what_is_sent_in_order():
    sent = build_schedule("1f1b", 2, 2).channels
    assert {key: [str(action) for action in made] for key, made in sent.items()} == {
        (0, 1, Kind.F): ["0F0", "0F1"],
        (1, 0, Kind.I): ["1B0", "1B1"],
    }


def test_stages_on_one_rank_hand_over_without_a_channel():
    assert (2, 2, Kind.F) not in build_schedule("zbv", 3, 4).channels


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 6), st.integers(1, 12), st.data())
def test_a_random_swap_is_refused(name, ranks, microbatches, data):
    schedule = build_schedule(name, ranks, microbatches)
    rank = data.draw(st.integers(0, ranks - 1))
    first, second = data.draw(
        st.lists(st.integers(0, len(schedule.rows[rank]) - 1), min_size=2, max_size=2, unique=True)
    )
    assert f"rank {rank}" in message_of(changed(schedule, rank, swap(first, second)))
