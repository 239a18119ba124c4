"""Cut a run of layers into stages so that the slowest stage is as fast as possible.

    layers   1 1 1 1 9 1 1 1          the head costs 3, four stages
    uniform  [1 1][1 1][9 1][1 1 +3]  slowest 10
    measured [1 1 1 1][9][1 1][1 +3]  slowest 9

The slowest stage sets the pace of every schedule, so this saves more than the choice of schedule does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from lightning_parallel.pipeline.simulate import Cost

__all__ = ["Balance", "cut_layers", "cut_min_max", "stage_costs"]

Balance = Literal["auto", "measured", "parameters", "uniform"] | Sequence[int]
"""What to even out over the stages: measured seconds (`auto` too), parameters, the number of layers; or the layers
of each stage."""

_FREE = Cost()
_INFINITE = float("inf")


def cut_layers(
    layers: Sequence[Cost],
    num_stages: int,
    balance: Balance = "auto",
    *,
    prologue: Cost = _FREE,
    epilogue: Cost = _FREE,
    memory_cap_bytes: float | None = None,
    in_flight: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Choose how many consecutive layers each stage gets, at least one.

    `measured` and `parameters` give the exact minimum, over all cuts, of the heaviest stage, with the prologue in
    the first stage and the epilogue in the last; among the cuts that reach it, the most even one.

    Args:
        layers: Cost of each layer; `parameters` reads `resident_bytes`, `uniform` reads nothing.
        num_stages: Stages to cut into, all virtual stages of all ranks.
        balance: What to even out, or the layers of each stage.
        prologue: Cost of what comes before the layers.
        epilogue: Cost of what comes after them.
        memory_cap_bytes: Most bytes that a stage may hold.
        in_flight: Microbatches whose activations each stage holds at once; by default one.

    Raises:
        ValueError: If there are fewer layers than stages, an explicit balance does not add up, nothing was
            measured, or no cut fits under the cap.
    """
    if len(layers) < num_stages:
        raise ValueError(
            f"expected at least one layer per stage, got {len(layers)} layers for {num_stages} stages; "
            "use fewer pipeline ranks or virtual stages"
        )
    if not isinstance(balance, str):
        return _explicit(balance, len(layers), num_stages)
    if balance == "uniform":
        return _uniform(len(layers), num_stages)
    if balance not in ("auto", "measured", "parameters"):
        raise ValueError(
            f"expected `balance` to be auto, measured, parameters, uniform or the layers per stage, got {balance!r}"
        )
    weight = _resident_bytes if balance == "parameters" else _total_s
    if not any(map(weight, layers)):
        raise ValueError(f"balance={balance!r} needs layers with a cost, got none; measure them or use 'uniform'")
    heaviness = _segment_sum([weight(layer) for layer in layers], num_stages, weight(prologue), weight(epilogue))
    if memory_cap_bytes is None:
        return _most_even(len(layers), num_stages, heaviness)
    memory = _memory(layers, num_stages, prologue, epilogue, in_flight or [1] * num_stages)

    def heaviness_if_it_fits(stage: int, start: int, stop: int) -> float:
        return heaviness(stage, start, stop) if memory(stage, start, stop) <= memory_cap_bytes else _INFINITE

    if _bottleneck(len(layers), num_stages, heaviness_if_it_fits) == _INFINITE:
        least = _bottleneck(len(layers), num_stages, memory)
        raise ValueError(
            f"no cut of {len(layers)} layers into {num_stages} stages keeps every stage within "
            f"{memory_cap_bytes:.0f} bytes; the best needs {least:.0f}. Use more stages, smaller microbatches, or a "
            "schedule that holds fewer activations"
        )
    return _most_even(len(layers), num_stages, heaviness_if_it_fits)


def stage_costs(
    layers: Sequence[Cost], layers_per_stage: Sequence[int], *, prologue: Cost = _FREE, epilogue: Cost = _FREE
) -> list[Cost]:
    """Add up the costs of the layers of each stage, prologue and epilogue included."""
    bounds = [0, *accumulate(layers_per_stage)]
    runs = [list(layers[start:stop]) for start, stop in pairwise(bounds)]
    runs[0] = [prologue, *runs[0]]
    runs[-1] = [*runs[-1], epilogue]
    return [Cost.in_sequence(run) for run in runs]


Segment = Callable[[int, int, int], float]
"""(stage, start, stop) -> cost of giving layers start to stop-1 to the stage; not less for a longer run."""


def cut_min_max(num_layers: int, num_stages: int, segment: Segment) -> tuple[int, ...]:
    """Cut exactly, by dynamic programming over (stage, layers before its end).

    Args:
        num_layers: Layers to cut.
        num_stages: Runs to cut them into, none empty.
        segment: Cost of a run. Must not decrease when the run gets longer; may be infinite.

    Returns:
        Layers of each stage: the least possible maximum of `segment`, and among those the least sum of squares.
    """
    return _most_even(num_layers, num_stages, segment)


def _explicit(balance: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    if len(balance) != num_stages or sum(balance) != num_layers or min(balance) < 1:
        raise ValueError(
            f"expected `balance` to give {num_stages} stages at least one layer each, {num_layers} in all, "
            f"got {list(balance)} ({len(balance)} stages, {sum(balance)} layers)"
        )
    return tuple(balance)


def _uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Spread the remainder from the middle, away from what the first and the last stage hold besides layers."""
    size, longer = divmod(num_layers, num_stages)
    first = (num_stages - longer) // 2
    return tuple(size + (first <= stage < first + longer) for stage in range(num_stages))


def _total_s(cost: Cost) -> float:
    return cost.total_s


def _resident_bytes(cost: Cost) -> float:
    return cost.resident_bytes


def _segment_sum(weights: Sequence[float], num_stages: int, prologue: float, epilogue: float) -> Segment:
    before = [0.0, *accumulate(weights)]

    def segment(stage: int, start: int, stop: int) -> float:
        ends = prologue * (stage == 0) + epilogue * (stage == num_stages - 1)
        return before[stop] - before[start] + ends

    return segment


def _memory(
    layers: Sequence[Cost], num_stages: int, prologue: Cost, epilogue: Cost, in_flight: Sequence[int]
) -> Segment:
    if len(in_flight) != num_stages:
        raise ValueError(f"expected `in_flight` of {num_stages} stages, got {len(in_flight)}")
    resident = _segment_sum(
        [layer.resident_bytes for layer in layers], num_stages, prologue.resident_bytes, epilogue.resident_bytes
    )
    activations = _segment_sum(
        [layer.activation_bytes for layer in layers], num_stages, prologue.activation_bytes, epilogue.activation_bytes
    )

    def memory(stage: int, start: int, stop: int) -> float:
        return resident(stage, start, stop) + in_flight[stage] * activations(stage, start, stop)

    return memory


def _bottleneck(num_layers: int, num_stages: int, segment: Segment) -> float:
    return _solve(num_layers, num_stages, segment, max, _INFINITE)[0]


def _most_even(num_layers: int, num_stages: int, segment: Segment) -> tuple[int, ...]:
    limit = _bottleneck(num_layers, num_stages, segment)
    return _solve(num_layers, num_stages, segment, lambda so_far, cost: so_far + cost * cost, limit)[1]


def _solve(
    num_layers: int, num_stages: int, segment: Segment, add: Callable[[float, float], float], limit: float
) -> tuple[float, tuple[int, ...]]:
    """Fold the stages' costs with `add`, minimal over the cuts whose stages cost at most `limit`.

    `best[stop]` is the least fold of the stages so far over the first `stop` layers. A run is grown backwards
    from its end, so the search stops as soon as the run alone is worse than the best found.
    """
    best = [0.0] + [_INFINITE] * num_layers
    starts: list[list[int]] = []
    for stage in range(num_stages):
        found, where = [_INFINITE] * (num_layers + 1), [0] * (num_layers + 1)
        for stop in range(stage + 1, num_layers + 1):
            for start in range(stop - 1, stage - 1, -1):
                cost = segment(stage, start, stop)
                if cost > limit or add(0.0, cost) > found[stop]:
                    break
                total = add(best[start], cost)
                if total < found[stop]:
                    found[stop], where[stop] = total, start
        best = found
        starts.append(where)
    bounds = [num_layers]
    for where in reversed(starts):
        bounds.append(where[bounds[-1]])
    return best[num_layers], tuple(stop - start for start, stop in pairwise(reversed(bounds)))
