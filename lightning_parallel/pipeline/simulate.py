"""Simulate a schedule with given costs: makespan, bubble, memory, critical path.

A `Timeline` says when each action started and ended on each rank. The simulator makes one from costs, the
`PipelineTimeline` callback from recorded spans, so that prediction and measurement can be compared.

    costs = [Cost(forward_s=0.02, input_gradient_s=0.02, weight_gradient_s=0.02)] * 4
    simulate(build_schedule("1f1b", 4, 8), costs, Link(latency_s=1e-4)).bubble_fraction
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

from lightning_parallel.pipeline.schedule import (
    Action,
    Kind,
    Schedule,
    activations_held,
    dependencies,
    producer,
    run_order,
)
from lightning_parallel.pipeline.validate import ScheduleError, describe_waits, validate

__all__ = ["Cost", "Link", "ScheduleError", "Span", "Timeline", "simulate", "validate"]

Span = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True)
class Cost:
    """The cost of one microbatch in a layer, or in a stage.

    Args:
        forward_s: Seconds of F.
        input_gradient_s: Seconds of I. A whole backward B takes I and W together.
        weight_gradient_s: Seconds of W; 0 where the backward cannot be split.
        activation_bytes: Held from F until B or W.
        boundary_bytes: Sent to the next stage, and as much gradient back.
        resident_bytes: Parameters, gradients and optimizer state: held always, whatever the microbatch.

    Raises:
        ValueError: If a value is negative.
    """

    forward_s: float = 0.0
    input_gradient_s: float = 0.0
    weight_gradient_s: float = 0.0
    activation_bytes: float = 0
    boundary_bytes: float = 0
    resident_bytes: float = 0

    def __post_init__(self) -> None:
        wrong = [f"{key}={value}" for key, value in vars(self).items() if not 0 <= value < inf]
        if wrong:
            raise ValueError(f"expected finite costs of at least 0, got {', '.join(wrong)}")

    @property
    def total_s(self) -> float:
        """Seconds of F, I and W together."""
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s

    def seconds(self) -> dict[Kind, float]:
        """Return the duration of an action of each kind."""
        backward_s = self.input_gradient_s + self.weight_gradient_s
        return {
            Kind.F: self.forward_s,
            Kind.B: backward_s,
            Kind.I: self.input_gradient_s,
            Kind.W: self.weight_gradient_s,
        }

    def scaled(self, factor: float) -> Cost:
        """Return the cost of a microbatch `factor` times as large: all but `resident_bytes` is scaled."""
        varying = {key: value * factor for key, value in vars(self).items() if key != "resident_bytes"}
        return replace(self, **varying)

    @classmethod
    def in_sequence(cls, costs: Iterable[Cost]) -> Cost:
        """Add the costs of consecutive layers; `boundary_bytes` is that of the last."""
        layers = list(costs)
        total = {key: sum(getattr(layer, key) for layer in layers) for key in cls.__dataclass_fields__}
        return cls(**{**total, "boundary_bytes": layers[-1].boundary_bytes if layers else 0})


@dataclass(frozen=True)
class Link:
    """The link from one rank to another: a message of n bytes takes `latency_s + n / bytes_per_s`.

    Messages of one sender to one receiver in one direction follow each other at `bytes_per_s`; they travel
    while both ends compute.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < inf and self.bytes_per_s > 0):
            raise ValueError(f"expected a finite latency_s >= 0 and bytes_per_s > 0, got {self}")


@dataclass
class Timeline:
    """Start and end of each action of a schedule, rank by rank, in the order in which they ran.

    Args:
        schedule: What was to run.
        spans: For each rank, action -> (start, end) in seconds on a clock common to the ranks; empty to begin with.
    """

    schedule: Schedule
    spans: list[dict[Action, Span]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.spans:
            self.spans = [{} for _ in range(self.schedule.num_ranks)]
        if len(self.spans) != self.schedule.num_ranks:
            raise ValueError(f"expected spans of {self.schedule.num_ranks} ranks, got {len(self.spans)}")

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
        return [max(activations_held(list(row)), default=0) for row in self.spans]

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """Return the activations held by a rank over time, as (second, number held from then on)."""
        row = self.spans[rank]
        return [(row[action][1], held) for action, held in zip(row, activations_held(list(row)))]

    def memory_peaks(self, costs: Sequence[Cost]) -> list[float]:
        """Return the most bytes that each rank holds, of resident memory and activations.

        Args:
            costs: One per stage.
        """
        peaks = []
        for rank, row in enumerate(self.spans):
            held_bytes = 0.0
            peak = 0.0
            # Without a backward nothing is saved. Stages differ in their bytes, so the count alone does not do.
            is_training = any(action.kind is not Kind.F for action in row)
            for action in row if is_training else ():
                step = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}[action.kind]
                held_bytes += step * costs[action.stage].activation_bytes
                peak = max(peak, held_bytes)
            peaks.append(peak + sum(costs[stage].resident_bytes for stage in self.schedule.stages_of(rank)))
        return peaks

    def critical_path(self, tolerance_s: float = 0.0) -> list[Action]:
        """Walk back from the last action to end, each time to what it waited for; first action first.

        The step back is to the rank's previous action if that left no gap, else to the dependency that ended
        last on another rank. One that had ended before the previous action began counts as having arrived by its end.

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
    """Simulate a schedule: each action starts when its rank is free and its inputs have arrived.

    Args:
        schedule: What to run.
        costs: One per stage, or one for all stages.
        link: Between any two ranks; by default instant. Stages on one rank hand over without it.
        overhead_s: Seconds that every action takes in addition to its cost.

    Returns:
        The timeline, starting at 0.

    Raises:
        ValueError: If there is not one cost per stage.
        ScheduleError: If the ranks wait for each other; says who waits for whom.
    """
    stages = [costs] * schedule.num_stages if isinstance(costs, Cost) else list(costs)
    if len(stages) != schedule.num_stages:
        raise ValueError(f"expected costs of {schedule.num_stages} stages, got {len(stages)}")
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
        # What the stage made itself is there as soon as its rank is free.
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
            # A channel carries one message at a time, but does not wait for the latency of the one before.
            channel = (rank, ranks[target], made.kind)
            sent_s = max(end_s, channel_free_s.get(channel, 0.0)) + transmit_s[boundary]
            channel_free_s[channel] = sent_s
            arrival_s[made] = sent_s + link.latency_s
    if played < sum(map(len, schedule.rows)):
        raise ScheduleError(f"the ranks wait for each other:\n{describe_waits(schedule)}")
    return timeline
