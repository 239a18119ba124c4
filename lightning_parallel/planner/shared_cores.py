"""Simulation of ranks that share cores: actions that run at the same time slow each other down.

`pipeline.simulate` gives each rank one device. Where there are fewer cores than ranks, other ranks use a core during
the bubble of one rank. So a step takes at least all ranks' work over the cores, and mostly not much more.
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
    """Return the seconds of a step whose actions share `cores` evenly whenever there are more of them.

    Args:
        schedule: What each rank of a pipeline runs.
        costs: One per stage, of a core that nobody else uses.
        link: Between any two ranks.
        cores: For all ranks together.
        copies: Processes for each rank of the pipeline, which do the same at the same time: replicas, and the ranks
            that share its layers.
        overhead_s: Seconds that every action takes in addition.
    """
    seconds = [{kind: overhead_s + s for kind, s in cost.seconds().items()} for cost in costs]
    done: dict[Action, float] = {}  # by what is made, when it is there
    places = dict.fromkeys(range(schedule.num_ranks), 0)
    left: dict[int, float] = {}  # of the action that a rank is in
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
        rate = min(1.0, cores / (len(left) * copies))
        step_s = min(min(left.values()) / rate, waiting - now)
        now += step_s
        for rank in list(left):
            left[rank] -= step_s * rate
            if left[rank] <= _EPSILON_S:
                action = schedule.rows[rank][places[rank]]
                if action.kind is not Kind.W:
                    done[producer(action)] = now
                places[rank] += 1
                del left[rank]


def _ready_at(
    schedule: Schedule, costs: Sequence[Cost], link: Link, action: Action, done: Mapping[Action, float]
) -> float:
    """Return when all that an action needs is there; infinity where some of it is not made yet."""
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
