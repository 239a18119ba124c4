"""Simulation of ranks that share cores: concurrent actions slow each other down.

`pipeline.simulate` gives each rank one device. With fewer cores than ranks, other ranks use a core during the bubble
of one rank. So a step takes at least the work of all ranks divided by the cores, and mostly little more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from lightning_parallel.pipeline.schedule import Action, Kind, Schedule, dependencies, producer
from lightning_parallel.pipeline.simulate import Cost, Link

__all__ = ["shared_makespan_s"]

_EPSILON_S = 1e-12


def shared_makespan_s(
    schedule: Schedule, costs: Sequence[Cost], link: Link, cores: float, copies: int = 1, overhead_s: float = 0.0
) -> float:
    """Return the seconds of a step in which more concurrent actions than `cores` share the cores evenly.

    Args:
        schedule: Actions of each rank of a pipeline.
        costs: One cost per stage, on a core without other work.
        link: Link between any two ranks.
        cores: Cores of all ranks together.
        copies: Processes for each rank of the pipeline that run the same actions: replicas and tensor-parallel ranks.
        overhead_s: Seconds that every action takes in addition.
    """
    seconds = [{kind: overhead_s + s for kind, s in cost.seconds().items()} for cost in costs]
    done: dict[Action, float] = {}  # by the action that makes a result, the time at which the result exists
    places = dict.fromkeys(range(schedule.num_ranks), 0)
    left: dict[int, float] = {}  # by rank, the remaining seconds of its current action
    now = 0.0

    while True:
        waiting = inf
        for rank, row in enumerate(schedule.rows):
            if rank in left or places[rank] == len(row):
                continue
            at = _ready_at(schedule, costs, link, row[places[rank]], done)
            if at <= now + _EPSILON_S:
                action = row[places[rank]]
                left[rank] = seconds[action.stage][action.kind]
            else:
                waiting = min(waiting, at)
        if not left:
            if waiting == inf:
                return now
            now = waiting
            continue
        # The share of a core changes when any action begins or ends, so advance only to the next such moment.
        rate = min(1.0, cores / (len(left) * copies))
        step_s = min(min(left.values()) / rate, waiting - now)
        now += step_s
        for rank in list(left):
            left[rank] -= step_s * rate
            # Rounding may leave a rest of an action that has ended.
            if left[rank] <= _EPSILON_S:
                action = schedule.rows[rank][places[rank]]
                # No other action needs a weight gradient.
                if action.kind is not Kind.W:
                    done[producer(action)] = now
                places[rank] += 1
                del left[rank]


def _ready_at(
    schedule: Schedule, costs: Sequence[Cost], link: Link, action: Action, done: Mapping[Action, float]
) -> float:
    """Return the time at which all inputs of an action exist; infinity if a producer has not ended."""
    found = 0.0
    for need in dependencies(action, schedule.num_stages):
        made = done.get(producer(need))
        if made is None:
            return inf
        is_remote = schedule.stage_ranks[need.stage] != schedule.stage_ranks[action.stage]
        # The boundary after stage s carries activations of s and gradients of s + 1.
        boundary_bytes = costs[min(need.stage, action.stage)].boundary_bytes
        found = max(found, made + (link.latency_s + boundary_bytes / link.bytes_per_s if is_remote else 0.0))
    return found
