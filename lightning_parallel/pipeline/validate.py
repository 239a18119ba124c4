"""Check a schedule before anything runs: for deadlocks, actions that are missing or repeated, and memory.

An error prints the row at fault and marks the action, or says which ranks wait for each other:

    rank 0 waits at 0B1 for 1B1 of rank 1
    rank 1 waits at 1F0 for 0F0 of rank 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, zip_longest

from lightning_parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    activations_held,
    dependencies,
    producer,
    run_order,
)

__all__ = ["ScheduleError", "describe_waits", "validate"]

_WINDOW = 6
_MOST_FAULTS = 4


class ScheduleError(ValueError):
    """A schedule that cannot be run. The message prints the row at fault."""


def validate(schedule: Schedule) -> None:
    """Check that every rank can run its row to the end and that the result is one whole step.

    In this order: each action exactly once and on its rank; each after what it depends on; no circular wait;
    on every channel both ends agree on the order of messages; no more activations held than declared; and a
    schedule that bears a builder's name is what that builder makes, action for action.

    Args:
        schedule: Training or forward-only.

    Raises:
        ScheduleError: At the first kind of fault found.
    """
    # Each check relies on those before it: places and dependencies have no meaning in a table with gaps.
    faults = _shape_faults(schedule) or _count_faults(schedule)
    if not faults:
        _check_order(schedule)
        faults = _channel_faults(schedule) or _in_flight_faults(schedule) or _builder_faults(schedule)
    if faults:
        rest = len(faults) - _MOST_FAULTS
        more = [f"... and {rest} more"] if rest > 0 else []
        raise ScheduleError("\n".join([_title(schedule), *faults[:_MOST_FAULTS], *more]))


def describe_waits(schedule: Schedule) -> str:
    """Describe which rank waits at which action for what, if the rows cannot be played to the end; else return "".

    Ranks that wait for each other in a circle come first.
    """
    places = _places(schedule)
    done: set[Action] = set()
    stuck = dict.fromkeys(range(schedule.num_ranks), 0)
    for rank, action, _ in run_order(schedule.rows, schedule.num_stages):
        done.add(producer(action))
        stuck[rank] += 1
    stuck = {rank: at for rank, at in stuck.items() if at < len(schedule.rows[rank])}
    waits = {}
    for rank, index in stuck.items():
        needs = dependencies(schedule.rows[rank][index], schedule.num_stages)
        waits[rank] = next(need for need in needs if producer(need) not in done)
    lines = []
    for rank in _circle_first(schedule, waits):
        index = stuck[rank]
        need = waits[rank]
        at = schedule.rows[rank][index]
        owner = schedule.stage_ranks[need.stage]
        actual = need
        # The neighbour may make the gradient by a B where this stage would by an I: print what stands in its row.
        if producer(need) in places:
            owner, position = places[producer(need)]
            actual = schedule.rows[owner][position]
        whose = "later in its own row" if owner == rank else f"of rank {owner}"
        lines += [f"rank {rank} waits at {at} for {actual} {whose}", _marked(schedule, rank, index)]
    return "\n".join(lines)


def _title(schedule: Schedule) -> str:
    return (
        f"schedule `{schedule.name}` ({schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches) is not valid:"
    )


def _shape_faults(schedule: Schedule) -> list[str]:
    ranks = range(schedule.num_ranks)
    strangers = [rank for rank in schedule.stage_ranks if rank not in ranks]
    faults = []
    if strangers or not schedule.stage_ranks:
        faults.append(f"expected `stage_ranks` to place stages on ranks 0 to {len(ranks) - 1}, got {strangers}")
    if len(schedule.max_in_flight) != len(ranks):
        faults.append(f"expected `max_in_flight` for {len(ranks)} ranks, got {len(schedule.max_in_flight)}")
    if schedule.num_microbatches < 1:
        faults.append(f"expected at least 1 microbatch, got {schedule.num_microbatches}")
    return faults


def _count_faults(schedule: Schedule) -> list[str]:
    """Find actions that are unknown, on the wrong rank, repeated or missing."""
    faults = []
    for rank, row in enumerate(schedule.rows):
        seen: set[Action] = set()
        for index, action in enumerate(row):
            problem = _misplaced(schedule, rank, action)
            if action in seen:
                problem = f"repeats {action}, expected once"
            if problem:
                faults.append(f"rank {rank} {problem}\n{_marked(schedule, rank, index)}")
            seen.add(action)
    return faults or _missing_faults(schedule)


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str:
    if not (0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches):
        return (
            f"has {action}, expected stages below {schedule.num_stages} "
            f"and microbatches below {schedule.num_microbatches}"
        )
    owner = schedule.stage_ranks[action.stage]
    return "" if owner == rank else f"has {action}, but stage {action.stage} is on rank {owner}"


def _missing_faults(schedule: Schedule) -> list[str]:
    """Require for each stage and microbatch F, and B or both I and W; only F in a forward-only schedule."""
    have = Counter(action for row in schedule.rows for action in row)
    faults = []
    for stage, rank in enumerate(schedule.stage_ranks):
        split = sum(have[Action(Kind.I, stage, i)] for i in range(schedule.num_microbatches))
        whole = sum(have[Action(Kind.B, stage, i)] for i in range(schedule.num_microbatches))
        for i in range(schedule.num_microbatches):
            b = Action(Kind.B, stage, i)
            grad = Action(Kind.I, stage, i)
            weight = Action(Kind.W, stage, i)
            wanted = [Action(Kind.F, stage, i)]
            if schedule.is_training:
                # A microbatch without any backward lacks the kind that most microbatches of the stage have.
                splits = have[grad] or have[weight] or (not have[b] and split > whole)
                wanted += [grad, weight] if splits else [b]
            faults += [_missing(schedule, rank, action) for action in wanted if not have[action]]
            if have[b] and (have[grad] or have[weight]):
                index = schedule.rows[rank].index(b)
                faults.append(f"rank {rank} runs {b} in addition to its halves\n{_marked(schedule, rank, index)}")
    return faults


def _missing(schedule: Schedule, rank: int, action: Action) -> str:
    """Mark the gap, after the same action on an earlier microbatch."""
    row = schedule.rows[rank]
    before = [i for i, a in enumerate(row) if a[:2] == action[:2] and a.microbatch < action.microbatch]
    index = before[-1] + 1 if before else 0
    return f"rank {rank} lacks {action}\n{_draw_marked(rank, [*row[:index], f'({action})', *row[index:]], index)}"


def _check_order(schedule: Schedule) -> None:
    waits = describe_waits(schedule)
    if waits:
        raise ScheduleError(f"{_title(schedule)}\nthese ranks would wait forever:\n{waits}")


def _circle_first(schedule: Schedule, waits: dict[int, Action]) -> list[int]:
    if not waits:
        return []
    path = [next(iter(waits))]
    # Follow who waits for whom until a rank comes again, or one is reached that does not wait.
    while True:
        owner = schedule.stage_ranks[waits[path[-1]].stage]
        if owner in path:
            circle = path[path.index(owner) :]
            break
        if owner not in waits:
            circle = path[-1:]
            break
        path.append(owner)
    return circle + [rank for rank in waits if rank not in circle]


def _places(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    return {producer(a): (rank, index) for rank, row in enumerate(schedule.rows) for index, a in enumerate(row)}


def _channel_faults(schedule: Schedule) -> list[str]:
    """Compare the order in which messages are made with the order in which the other end uses them."""
    places = _places(schedule)
    faults = []
    for (sender, receiver, kind), messages in schedule.channels.items():
        step = 1 if kind is Kind.F else -1
        uses = [places[Action(kind, a.stage + step, a.microbatch)][1] for a in messages]
        # Gradients have no header, and a backend may ignore tags: both ends must agree on the order of messages.
        for (first, at), (second, next_at) in pairwise(zip(messages, uses)):
            if next_at < at:
                faults.append(
                    f"rank {sender} sends {first} before {second}, rank {receiver} uses them the other way round\n"
                    + _marked(schedule, sender, places[producer(second)][1])
                    + "\n"
                    + _marked(schedule, receiver, next_at)
                )
                break
    return faults


def _in_flight_faults(schedule: Schedule) -> list[str]:
    faults = []
    for rank, (row, limit) in enumerate(zip(schedule.rows, schedule.max_in_flight)):
        index = next((i for i, held in enumerate(activations_held(row)) if held > limit), None)
        if index is not None:
            faults.append(
                f"rank {rank} holds more activations than the {limit} that it declares\n"
                + _marked(schedule, rank, index)
            )
    return faults


def _builder_faults(schedule: Schedule) -> list[str]:
    """Compare with the builder: an order may be legal, but that of another schedule, with another bubble."""
    # `custom` and `forward_only` schedules have no builder.
    if schedule.name not in SCHEDULES:
        return []
    options = {} if schedule.warmup is None else {"warmup": schedule.warmup}
    build = SCHEDULES[schedule.name]
    meant = build(schedule.num_ranks, schedule.virtual_stages, schedule.num_microbatches, **options)
    faults = []
    for rank, (row, expected) in enumerate(zip(schedule.rows, meant.rows)):
        for index, (action, wanted) in enumerate(zip_longest(row, expected)):
            if action is None:
                faults.append(_missing(schedule, rank, wanted))
                break
            if action != wanted:
                faults.append(
                    f"rank {rank} runs {action} where `{schedule.name}` runs {wanted}; "
                    f"name a schedule `custom` if no builder made it\n{_marked(schedule, rank, index)}"
                )
                break
    return faults


def _marked(schedule: Schedule, rank: int, index: int) -> str:
    return _draw_marked(rank, schedule.rows[rank], index)


def _draw_marked(rank: int, row: Sequence[Action | str], index: int) -> str:
    """Draw the part of a row around one action, with arrows under it."""
    start = max(0, index - _WINDOW)
    stop = index + _WINDOW + 1
    words = [str(word) for word in row[start:stop]]
    line = f"  rank {rank}: " + ("... " if start else "")
    marked = index - start
    arrows = " " * len(line + "".join(f"{word} " for word in words[:marked])) + "^" * len(words[marked])
    return f"{line}{' '.join(words)}{' ...' if stop < len(row) else ''}\n{arrows}"
