"""Check a schedule before it runs, and simulate its makespan, bubble, memory and critical path.

`validate` finds deadlocks, actions that are missing or repeated, and too much memory. An error prints the row at fault
and marks the action, or says which ranks wait for each other:

    rank 0 waits at 0B1 for 1B1 of rank 1
    rank 1 waits at 1F0 for 0F0 of rank 0

A `Timeline` says when each action started and ended on each rank. `simulate` makes one from costs, and the
`PipelineTimeline` callback makes one from recorded spans, to compare prediction and measurement.

    costs = [Cost(forward_s=0.02, input_gradient_s=0.02, weight_gradient_s=0.02)] * 4
    simulate(build_schedule("1f1b", 4, 8), costs, Link(latency_s=1e-4)).bubble_fraction
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from math import inf
from typing import Any

from lightning_parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    activations_held,
    build_schedule,
    dependencies,
    peak_activation_bytes,
    producer,
    run_order,
)

__all__ = ["Cost", "Interval", "Link", "ScheduleError", "Timeline", "describe_waits", "simulate", "validate"]

# Rows have thousands of actions, and one mistake makes many faults: print the surroundings of the first few.
_WINDOW = 6
_MOST_FAULTS = 4


class ScheduleError(ValueError):
    """A schedule that cannot be run. The message prints the row at fault."""


def validate(schedule: Schedule) -> None:
    """Check that every rank can run its row to the end and that the result is one full step, training or forward-only.

    In this order: each action occurs exactly once and on its rank, and after its dependencies. No ranks wait in a
    circle. Both ends of every channel agree on the order of messages. No more activations are held than declared. A
    schedule with a builder's name equals the result of that builder, action for action.

    Raises:
        ScheduleError: At the first kind of fault found.
    """
    # Each check relies on the checks before it: places and dependencies have no meaning in a table with gaps.
    faults = _shape_faults(schedule) or _count_faults(schedule)
    if not faults:
        waits = describe_waits(schedule)
        if waits:
            raise ScheduleError(f"{_title(schedule)}\nThese ranks would wait forever:\n{waits}")
        faults = _channel_faults(schedule) or _in_flight_faults(schedule) or _builder_faults(schedule)
    if faults:
        rest = len(faults) - _MOST_FAULTS
        more = [f"... and {rest} more"] if rest > 0 else []
        raise ScheduleError("\n".join([_title(schedule), *faults[:_MOST_FAULTS], *more]))


def describe_waits(schedule: Schedule) -> str:
    """Describe where each rank waits, and for which action, if the rows cannot be played to the end; else return "".

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
    for rank in _deadlock_first(schedule, waits):
        need = waits[rank]
        # The neighbour may make the gradient by a B where this stage would use an I: print its row's own action.
        owner, position = places.get(producer(need), (schedule.stage_ranks[need.stage], None))
        actual = need if position is None else schedule.rows[owner][position]
        whose = "later in its own row" if owner == rank else f"of rank {owner}"
        lines.append(f"rank {rank} waits at {schedule.rows[rank][stuck[rank]]} for {actual} {whose}")
        lines.append(_marked(schedule, rank, stuck[rank]))
    return "\n".join(lines)


def _title(schedule: Schedule) -> str:
    return (
        f"Schedule `{schedule.name}` ({schedule.num_ranks} ranks, {schedule.num_stages} stages,"
        f" {schedule.num_microbatches} microbatches) is not valid:"
    )


def _shape_faults(schedule: Schedule) -> list[str]:
    ranks = range(schedule.num_ranks)
    unknown = [rank for rank in schedule.stage_ranks if rank not in ranks]
    faults = []
    if unknown or not schedule.stage_ranks:
        faults.append(f"`stage_ranks` must place stages on ranks 0 to {len(ranks) - 1}; got {unknown}")
    if len(schedule.max_in_flight) != len(ranks):
        faults.append(
            f"`max_in_flight` must have {len(ranks)} entries, one per rank; got {len(schedule.max_in_flight)}"
        )
    if schedule.num_microbatches < 1:
        faults.append(f"The number of microbatches must be at least 1; got {schedule.num_microbatches}")
    return faults


def _count_faults(schedule: Schedule) -> list[str]:
    """Find actions that are unknown, on the wrong rank, repeated or missing."""
    faults = []
    for rank, row in enumerate(schedule.rows):
        seen: set[Action] = set()
        for index, action in enumerate(row):
            problem = _misplaced(schedule, rank, action)
            if action in seen:
                problem = f"repeats {action}, which must occur once"
            if problem:
                faults.append(f"rank {rank} {problem}\n{_marked(schedule, rank, index)}")
            seen.add(action)
    return faults or _missing_faults(schedule)


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str:
    if not (0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches):
        most = f"stages below {schedule.num_stages} and microbatches below {schedule.num_microbatches}"
        return f"has {action}, but must have only {most}"
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
            # `Kind` lists F, B, I, W in this order.
            forward, b, grad, weight = (Action(kind, stage, i) for kind in Kind)
            wanted = [forward]
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


def _deadlock_first(schedule: Schedule, waits: dict[int, Action]) -> list[int]:
    if not waits:
        return []
    path = [next(iter(waits))]
    # Follow the waits from rank to rank, until a rank comes again, or one is reached that does not wait.
    while True:
        owner = schedule.stage_ranks[waits[path[-1]].stage]
        if owner in path:
            circle = path[path.index(owner) :]
            break
        if owner not in waits:
            circle = path[-1:]
            break
        path.append(owner)
    # The fault is in the circle; other ranks mostly wait because these do.
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
                what = (
                    f"rank {sender} sends {first} before {second}, but rank {receiver} uses them in the reverse order"
                )
                rows = _marked(schedule, sender, places[producer(second)][1]), _marked(schedule, receiver, next_at)
                faults.append("\n".join((what, *rows)))
                # One mistake mostly puts later pairs out of order as well.
                break
    return faults


def _in_flight_faults(schedule: Schedule) -> list[str]:
    faults = []
    for rank, (row, limit) in enumerate(zip(schedule.rows, schedule.max_in_flight)):
        index = next((i for i, held in enumerate(activations_held(row)) if held > limit), None)
        if index is not None:
            what = f"rank {rank} holds more activations than the {limit} that it declares"
            faults.append(f"{what}\n{_marked(schedule, rank, index)}")
    return faults


def _builder_faults(schedule: Schedule) -> list[str]:
    """Compare with the builder: an order may be legal, but belong to another schedule, with another bubble."""
    # `custom` and `forward_only` schedules have no builder.
    if schedule.name not in SCHEDULES:
        return []
    meant = build_schedule(
        schedule.name, schedule.num_ranks, schedule.num_microbatches, schedule.virtual_stages, schedule.warmup
    )
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
                # With one action more or less, all later actions are in another place.
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


Interval = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True)
class Cost:
    """The cost of one microbatch in a layer, or in a stage.

    Args:
        forward_s: Seconds of F.
        input_gradient_s: Seconds of I. A full backward B takes I and W together.
        weight_gradient_s: Seconds of W; 0 if the backward cannot be split.
        activation_bytes: Held from F until B or W.
        boundary_bytes: Sent to the next stage, and as much gradient back.
        resident_bytes: Parameters, gradients and optimizer state: always held, whatever the microbatch.
        again_s: The part of `input_gradient_s` in which backward computes activations again.
        again_bytes: Activations that backward computes again, of all layers.
        largest_again_bytes: The same of the layer with the most.
        input_bytes: The part of `activation_bytes` that are inputs of layers which backward computes again.
        host_bytes: Held in host memory from F until B or W.

    Raises:
        ValueError: If a value is negative.
    """

    forward_s: float = 0.0
    input_gradient_s: float = 0.0
    weight_gradient_s: float = 0.0
    activation_bytes: float = 0
    boundary_bytes: float = 0
    resident_bytes: float = 0
    again_s: float = 0.0
    again_bytes: float = 0
    largest_again_bytes: float = 0
    input_bytes: float = 0
    host_bytes: float = 0

    def __post_init__(self) -> None:
        # Written so that NaN, which is neither less nor more than any number, is also refused.
        wrong = [f"{key}={value}" for key, value in vars(self).items() if not 0 <= value < inf]
        if wrong:
            raise ValueError(f"Costs must be finite and at least 0; got {', '.join(wrong)}")

    @property
    def total_s(self) -> float:
        """Seconds of F, I and W together."""
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s

    def offloaded(self) -> Cost:
        """Return the cost of a layer whose inputs wait for backward in host memory."""
        return replace(
            self,
            activation_bytes=self.activation_bytes - self.input_bytes,
            again_bytes=self.again_bytes + self.input_bytes,
            largest_again_bytes=self.largest_again_bytes + self.input_bytes,
            input_bytes=0,
            host_bytes=self.host_bytes + self.input_bytes,
        )

    def seconds(self) -> dict[Kind, float]:
        """Return the duration of an action of each kind."""
        halves = {Kind.I: self.input_gradient_s, Kind.W: self.weight_gradient_s}
        return {Kind.F: self.forward_s, Kind.B: sum(halves.values()), **halves}

    def scaled(self, factor: float) -> Cost:
        """Return the cost of a microbatch `factor` times as large: all but `resident_bytes` is scaled."""
        varying = {key: value * factor for key, value in vars(self).items() if key != "resident_bytes"}
        return replace(self, **varying)

    @classmethod
    def in_sequence(cls, costs: Iterable[Cost]) -> Cost:
        """Add the costs of consecutive layers; `boundary_bytes` comes from the last layer."""
        layers = list(costs)
        total = {key: sum(getattr(layer, key) for layer in layers) for key in cls.__dataclass_fields__}
        # Outputs of the layers before the last stay inside the stage.
        total["boundary_bytes"] = layers[-1].boundary_bytes if layers else 0
        return cls(**{**total, "largest_again_bytes": max((one.largest_again_bytes for one in layers), default=0)})

    @staticmethod
    def peak_activation_bytes(row: Sequence[Action], stages: Sequence[Cost]) -> float:
        """Return the most bytes of activations that a rank with these actions holds; `stages` are all stages' costs."""
        again = [stage.again_bytes for stage in stages], [stage.largest_again_bytes for stage in stages]
        return peak_activation_bytes(row, [stage.activation_bytes for stage in stages], *again)


@dataclass(frozen=True)
class Link:
    """Describes the link from one rank to another: a message of n bytes takes `latency_s + n / bytes_per_s`.

    Messages in one direction between two ranks follow each other at `bytes_per_s`. Both ranks compute meanwhile.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < inf and self.bytes_per_s > 0):
            raise ValueError(f"`latency_s` must be finite and at least 0, `bytes_per_s` positive; got {self}")


@dataclass
class Timeline:
    """Start and end of each action of a schedule, rank by rank, in the order in which they ran.

    Args:
        schedule: The schedule that was to run.
        spans: For each rank, action -> (start, end) in seconds on a clock common to the ranks; empty to begin with.
    """

    schedule: Schedule
    spans: list[dict[Action, Interval]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.spans:
            self.spans = [{} for _ in range(self.schedule.num_ranks)]
        if len(self.spans) != self.schedule.num_ranks:
            raise ValueError(
                f"`spans` must have an entry for each of {self.schedule.num_ranks} ranks; got {len(self.spans)}"
            )

    def record(self, rank: int, action: Action, start_s: float, end_s: float) -> None:
        """Note that `rank` ran `action` from `start_s` to `end_s`."""
        self.spans[rank][action] = (start_s, end_s)

    @property
    def start_s(self) -> float:
        """Start of the first action of any rank."""
        return min((start for row in self.spans for start, _ in row.values()), default=0.0)

    @property
    def end_s(self) -> float:
        """End of the last action of any rank."""
        return max((end for row in self.spans for _, end in row.values()), default=0.0)

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return self.end_s - self.start_s

    @property
    def busy_s(self) -> list[float]:
        """Seconds in which each rank computed."""
        return [sum(end - start for start, end in row.values()) for row in self.spans]

    @property
    def bubble_s(self) -> float:
        """Seconds in which a rank did not compute, mean over the ranks."""
        return self.makespan_s - sum(self.busy_s) / len(self.spans)

    @property
    def bubble_fraction(self) -> float:
        """`bubble_s` as a share of the makespan."""
        return self.bubble_s / self.makespan_s if self.makespan_s else 0.0

    @property
    def in_flight_peaks(self) -> list[int]:
        """For each rank, the most (stage, microbatch) activations held at once."""
        # A dict keeps the order of insertion, in which the rank ran its actions.
        return [max(activations_held(list(row)), default=0) for row in self.spans]

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """Return the activations held by a rank over time, as (second, number held from then on)."""
        row = self.spans[rank]
        return [(row[action][1], held) for action, held in zip(row, activations_held(list(row)))]

    def memory_peaks(self, costs: Sequence[Cost]) -> list[float]:
        """Return the most bytes that each rank holds, of resident memory and activations, by the cost of each stage."""
        return [
            Cost.peak_activation_bytes(list(row), costs)
            + sum(costs[stage].resident_bytes for stage in self.schedule.stages_of(rank))
            for rank, row in enumerate(self.spans)
        ]

    def critical_path(self, tolerance_s: float = 0.0) -> list[Action]:
        """Walk back from the last action to end, each time to the cause of its wait; return the first action first.

        The step back is to the rank's previous action if that left no gap. Otherwise it is to the dependency that ended
        last on another rank.

        Args:
            tolerance_s: A gap up to which the rank counts as not having waited; more than 0 for measured times.
        """
        span_of = {action: span for row in self.spans for action, span in row.items()}
        actual = {producer(action): action for action in span_of}
        before = {action: earlier for row in self.spans for earlier, action in pairwise(row)}
        here = max(span_of, key=lambda action: span_of[action][1], default=None)
        path = []
        while here is not None:
            path.append(here)
            start_s = span_of[here][0]
            previous = before.get(here)
            needs = (producer(need) for need in dependencies(here, self.schedule.num_stages))
            remote = [actual[need] for need in needs if need.stage != here.stage and need in actual]
            if previous is not None:
                # A dependency that ended before the previous action began counts as arrived by that action's end.
                remote = [need for need in remote if span_of[need][1] > span_of[previous][0]]
            # Without a gap before it, the action started when its rank was free, whatever had arrived in the meantime.
            waited = previous is None or start_s - span_of[previous][1] > tolerance_s
            here = max(remote, key=lambda action: span_of[action][1]) if waited and remote else previous
        return path[::-1]

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold, read back by `from_dict`."""
        rows = [[[str(action), *span] for action, span in row.items()] for row in self.spans]
        return {"schedule": self.schedule.to_text(), "ranks": rows}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timeline:
        """Read a timeline from `to_dict`."""
        spans = [{Action.parse(text): (start, end) for text, start, end in row} for row in values["ranks"]]
        return cls(Schedule.from_text(values["schedule"]), spans)


def simulate(
    schedule: Schedule, costs: Cost | Sequence[Cost], link: Link = Link(), overhead_s: float = 0.0
) -> Timeline:
    """Simulate a schedule from time 0: each action starts when its rank is free and its inputs have arrived.

    Args:
        schedule: The schedule to run.
        costs: One per stage, or one for all stages.
        link: Link between any two ranks; by default instant. Stages on one rank do not use it.
        overhead_s: Seconds that every action takes in addition to its cost.

    Raises:
        ValueError: If there is not one cost per stage.
        ScheduleError: If the ranks wait for each other; names them.
    """
    stages = [costs] * schedule.num_stages if isinstance(costs, Cost) else list(costs)
    if len(stages) != schedule.num_stages:
        raise ValueError(f"`stages` must have the costs of {schedule.num_stages} stages; got {len(stages)}")
    seconds = [{kind: overhead_s + s for kind, s in cost.seconds().items()} for cost in stages]
    transmit_s = [cost.boundary_bytes / link.bytes_per_s for cost in stages]
    ranks = schedule.stage_ranks
    timeline = Timeline(schedule)
    free_s = [0.0] * schedule.num_ranks
    arrival_s: dict[Action, float] = {}
    channel_free_s: dict[tuple[int, int, Kind], float] = {}
    played = 0
    # Every action comes after its dependencies, so one pass suffices: no events, no clock.
    for rank, action, needs in run_order(schedule.rows, schedule.num_stages):
        kind, stage, _ = action
        # A result of the same stage is there as soon as its rank is free.
        # The 0.0 is for actions without needs: `max` of a single number is an error.
        start_s = max(free_s[rank], *(arrival_s[need] for need in needs if need.stage != stage), 0.0)
        end_s = start_s + seconds[stage][kind]
        free_s[rank] = end_s
        timeline.spans[rank][action] = (start_s, end_s)
        played += 1
        # The boundary after stage s carries activations of s and gradients of s + 1.
        boundary, target = (stage, stage + 1) if kind is Kind.F else (stage - 1, stage - 1)
        if kind is Kind.W or not 0 <= target < len(ranks):
            continue
        made = producer(action)
        arrival_s[made] = end_s
        if ranks[target] != rank:
            # A channel carries one message at a time, but does not wait for the latency of the previous message.
            channel = (rank, ranks[target], made.kind)
            sent_s = max(end_s, channel_free_s.get(channel, 0.0)) + transmit_s[boundary]
            channel_free_s[channel] = sent_s
            arrival_s[made] = sent_s + link.latency_s
    if played < sum(map(len, schedule.rows)):
        raise ScheduleError(f"The ranks wait for each other:\n{describe_waits(schedule)}")
    return timeline
