"""Search for the best split points and the best schedule, by dynamic programming and by simulation.

    layers   1 1 1 1 9 1 1 1          the head costs 3, four stages
    uniform  [1 1][1 1][9 1][1 1 +3]  slowest 10
    measured [1 1 1 1][9][1 1][1 +3]  slowest 9

The slowest stage sets the pace of every schedule, so even stages save more time than the choice of a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, build_schedule
from lightning_parallel.pipeline.simulate import Cost, Link, Timeline, simulate
from lightning_parallel.tracing.spans import bytes_text, seconds_text

__all__ = [
    "BALANCES",
    "WITH_CHUNKS",
    "Balance",
    "Candidate",
    "Choice",
    "Workload",
    "choose_schedule",
    "cut_layers",
    "stage_costs",
]

Balance = Literal["auto", "measured", "parameters", "uniform"] | Sequence[int]
"""The quantity that a split balances: measured seconds (`auto`, `measured`), parameters, or the number of layers
(`uniform`); or the layers of each stage."""

BALANCES = ("auto", "measured", "parameters", "uniform")

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
    """Choose how many consecutive layers each stage gets; at least one.

    `measured` and `parameters` minimize the cost of the heaviest stage exactly, over all splits. The prologue is in the
    first stage, and the epilogue in the last. Among the splits that reach the minimum, the most even one is chosen.

    Args:
        layers: Cost of each layer; `parameters` reads `resident_bytes`, `uniform` reads nothing.
        num_stages: Number of stages, all virtual stages of all ranks.
        balance: The quantity to balance, or the layers of each stage.
        prologue: Cost of the code before the layers.
        epilogue: Cost of the code after the layers.
        memory_cap_bytes: Most bytes that a stage may hold.
        in_flight: Microbatches whose activations each stage holds at once; by default one.

    Raises:
        ValueError: If there are fewer layers than stages, an explicit balance does not add up, or nothing was measured.
            Also if no split fits under the cap.
    """
    if len(layers) < num_stages:
        raise ValueError(
            f"Every stage must have at least one layer; got {len(layers)} layers for {num_stages} stages. Use fewer"
            " pipeline ranks or virtual stages [LP022]"
        )
    if not isinstance(balance, str):
        return _explicit(balance, len(layers), num_stages)
    if balance == "uniform":
        return _uniform(len(layers), num_stages)
    if balance not in ("auto", "measured", "parameters"):
        raise ValueError(
            f"`balance` must be auto, measured, parameters, uniform or the layers per stage; got {balance!r}"
        )
    weight = _resident_bytes if balance == "parameters" else _total_s
    if not any(map(weight, layers)):
        raise ValueError(f"balance={balance!r} needs layers with a cost; got none. Measure them or use 'uniform'")
    # Two objectives, one after the other: the slowest stage sets the pace of every schedule. Among the splits that
    # reach its minimum, the most even one leaves most room for noise in the measurements.
    heaviness = _segment_sum([weight(layer) for layer in layers], num_stages, weight(prologue), weight(epilogue))
    if memory_cap_bytes is None:
        return _most_even(len(layers), num_stages, heaviness)
    memory = _memory(layers, num_stages, prologue, epilogue, in_flight or [1] * num_stages)
    return _most_even_within(len(layers), num_stages, heaviness, memory, memory_cap_bytes)


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
"""(stage, start, stop) -> cost of giving layers start to stop-1 to the stage; a longer run never costs less."""


def _explicit(balance: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    if len(balance) != num_stages or sum(balance) != num_layers or min(balance) < 1:
        raise ValueError(
            f"`balance` must give each of {num_stages} stages at least one layer, {num_layers} in all; got"
            f" {list(balance)} ({len(balance)} stages, {sum(balance)} layers)"
        )
    return tuple(balance)


def _uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    # The remainder goes to the stages in the middle: the first and the last also hold the prologue and the epilogue.
    size, longer = divmod(num_layers, num_stages)
    first = (num_stages - longer) // 2
    return tuple(size + (first <= stage < first + longer) for stage in range(num_stages))


def _total_s(cost: Cost) -> float:
    return cost.total_s


def _resident_bytes(cost: Cost) -> float:
    return cost.resident_bytes


def _segment_sum(weights: Sequence[float], num_stages: int, prologue: float, epilogue: float) -> Segment:
    before = [0.0, *accumulate(weights)]

    # Prefix sums, because the search asks for O(stages x layers^2) runs.
    def segment(stage: int, start: int, stop: int) -> float:
        ends = prologue * (stage == 0) + epilogue * (stage == num_stages - 1)
        return before[stop] - before[start] + ends

    return segment


def _memory(
    layers: Sequence[Cost], num_stages: int, prologue: Cost, epilogue: Cost, in_flight: Sequence[int]
) -> Segment:
    if len(in_flight) != num_stages:
        raise ValueError(f"`in_flight` must have an entry for each of {num_stages} stages; got {len(in_flight)}")
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
    # The stages' costs have a given sum, so the sum of their squares is least where they are most alike.
    return _solve(num_layers, num_stages, segment, lambda so_far, cost: so_far + cost * cost, limit)[1]


def _solve(
    num_layers: int, num_stages: int, segment: Segment, add: Callable[[float, float], float], limit: float
) -> tuple[float, tuple[int, ...]]:
    """Minimise the stages' costs, combined by `add`, over the splits whose stages cost at most `limit` each.

    `best[stop]` is the least combined cost of the stages so far over the first `stop` layers.
    """
    best = [0.0] + [_INFINITE] * num_layers
    starts: list[list[int]] = []
    for stage in range(num_stages):
        found = [_INFINITE] * (num_layers + 1)
        where = [0] * (num_layers + 1)
        # Each earlier stage takes at least one layer, hence `stage + 1`.
        for stop in range(stage + 1, num_layers + 1):
            for start in range(stop - 1, stage - 1, -1):
                cost = segment(stage, start, stop)
                # Runs grow backwards from their end, and each layer adds cost: longer runs cannot be better.
                # `add(0.0, cost)` is the part of this run alone, so no total with it can be less.
                if cost > limit or add(0.0, cost) > found[stop]:
                    break
                total = add(best[start], cost)
                if total < found[stop]:
                    found[stop] = total
                    where[stop] = start
        best = found
        starts.append(where)
    # Walk back from the end: the start of a stage's run is the end of the run before.
    bounds = [num_layers]
    for where in reversed(starts):
        bounds.append(where[bounds[-1]])
    return best[num_layers], tuple(stop - start for start, stop in pairwise(reversed(bounds)))


def _most_even_within(
    num_layers: int, num_stages: int, segment: Segment, memory: Segment, memory_cap_bytes: float
) -> tuple[int, ...]:
    def segment_if_it_fits(stage: int, start: int, stop: int) -> float:
        # An infinite cost rules a run out without another constraint in the search: memory also grows with the run.
        return segment(stage, start, stop) if memory(stage, start, stop) <= memory_cap_bytes else _INFINITE

    if _bottleneck(num_layers, num_stages, segment_if_it_fits) == _INFINITE:
        least = _bottleneck(num_layers, num_stages, memory)
        raise ValueError(
            f"Every stage of {num_layers} layers in {num_stages} stages must stay within {memory_cap_bytes:.0f}"
            f" bytes; the best split needs {least:.0f}. Use more stages, smaller microbatches, or a schedule that"
            " holds fewer activations"
        )
    return _most_even(num_layers, num_stages, segment_if_it_fits)


# --------------------------------------------------------------------------------------------------------- schedules


@dataclass(frozen=True)
class Workload:
    """Costs of a model, measured with the batch split into `measured_microbatches`.

    Args:
        layers: Cost of one microbatch in each layer.
        prologue: Cost of the code before the layers.
        epilogue: Cost of the code after the layers.
        measured_microbatches: Number of microbatches at the measurement; with m microbatches the costs are
            `measured_microbatches / m` times as large.
        overhead_s: Seconds that every action takes in addition, whatever the size of the microbatch.
        link: Link between any two ranks.
    """

    layers: Sequence[Cost]
    prologue: Cost = _FREE
    epilogue: Cost = _FREE
    measured_microbatches: int = 1
    overhead_s: float = 0.0
    link: Link = Link()

    def cut(self, schedule: Schedule, memory_cap_bytes: float | None = None) -> tuple[tuple[int, ...], list[Cost]]:
        """Split the layers for a schedule; return the number of layers and the cost of each stage."""
        factor = self.measured_microbatches / schedule.num_microbatches
        layers = [layer.scaled(factor) for layer in self.layers]
        prologue = self.prologue.scaled(factor)
        epilogue = self.epilogue.scaled(factor)
        # The cap is per rank, but the split is per stage. So each stage of a rank gets an equal share of memory and of
        # the microbatches in flight. `choose_schedule` then checks the rank's true peak.
        share = schedule.virtual_stages
        counts = cut_layers(
            layers,
            schedule.num_stages,
            prologue=prologue,
            epilogue=epilogue,
            memory_cap_bytes=None if memory_cap_bytes is None else memory_cap_bytes / share,
            # Rounded up: a stage may hold one microbatch more than the other stages of its rank.
            in_flight=[-(-schedule.max_in_flight[rank] // share) for rank in schedule.stage_ranks],
        )
        return counts, stage_costs(layers, counts, prologue=prologue, epilogue=epilogue)


class Candidate(NamedTuple):
    """A schedule with its split, and the predicted step."""

    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    timeline: Timeline
    peak_bytes: float
    """Most bytes held by any rank."""
    fits: bool

    @property
    def held(self) -> float:
        """Most activations held by any rank, in units of a microbatch in all layers of the rank."""
        return max(self.schedule.max_in_flight) / self.schedule.virtual_stages


@dataclass(frozen=True)
class Choice:
    """The best candidate, and all candidates, best first."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    memory_limit_bytes: float | None

    # Without an annotation, so that it is no field of the dataclass.
    HEADER = ("schedule", "V", "microbatches", "warm-up", "step", "bubble", "held", "peak memory", "")

    def rows(self) -> list[tuple[str, ...]]:
        """Return a table that explains the choice: one row of text per candidate, best first, under `HEADER`."""
        return [self._row(candidate) for candidate in self.candidates]

    def _row(self, candidate: Candidate) -> tuple[str, ...]:
        schedule = candidate.schedule
        timeline = candidate.timeline
        slower = timeline.makespan_s / self.best.timeline.makespan_s - 1
        verdict = "chosen" if candidate is self.best else f"{slower:+.1%}"
        if not candidate.fits and self.memory_limit_bytes is not None:
            verdict = f"over the limit by {bytes_text(candidate.peak_bytes - self.memory_limit_bytes)}"
        return (
            schedule.name,
            str(schedule.virtual_stages),
            str(schedule.num_microbatches),
            "" if schedule.warmup is None else f"{schedule.warmup:g}",
            seconds_text(timeline.makespan_s),
            f"{timeline.bubble_fraction:.1%}",
            f"{candidate.held:g}",
            bytes_text(candidate.peak_bytes) if candidate.peak_bytes else "",
            verdict,
        )


WITH_CHUNKS: Mapping[str, str] = {"1f1b": "interleaved_1f1b", "zb_h1": "interleaved_zb", "zbv": "interleaved_zb"}
"""The schedules for stages that follow each other several times (see `LayerStack.passes`), by the name of a schedule
that does not support them: one stage on each rank, or the last stage on the first rank."""


def choose_schedule(
    workload: Workload,
    num_ranks: int,
    microbatches: Sequence[int],
    *,
    schedules: Sequence[str] = tuple(SCHEDULES),
    virtual_stages: Sequence[int] = (1, 2, 4),
    warmups: Sequence[float] = (1, 1.5, 2),
    memory_limit_bytes: float | None = None,
) -> Choice:
    """Find the fastest of schedule x V x m x warm-up by simulation, among the schedules that fit in memory.

    A schedule that fits only with other split points gets these. Of equally fast schedules, the least memory decides.

    Args:
        workload: The layers and their measured costs.
        num_ranks: P.
        microbatches: Values of m to try.
        schedules: Names to try.
        virtual_stages: Values of V to try; values that need more stages than there are layers are left out.
        warmups: Warm-ups to try, for the schedules that have one.
        memory_limit_bytes: Most bytes that a rank may hold.

    Raises:
        ValueError: If there are fewer layers than ranks, no schedule can be built from the values given, or no
            schedule fits in memory.
    """
    built = list(_schedules(num_ranks, microbatches, schedules, virtual_stages, warmups, len(workload.layers)))
    if not built:
        raise ValueError(
            f"No schedule of {', '.join(schedules)} can run {len(workload.layers)} layers on {num_ranks} ranks with"
            f" virtual_stages in {list(virtual_stages)} and microbatches in {list(microbatches)}"
        )
    candidates = [_best_candidate(workload, schedule, memory_limit_bytes) for schedule in built]
    # Rounded to nine digits: sums in another order differ in the last digits, and memory has to decide a tie.
    candidates.sort(key=lambda c: (not c.fits, float(f"{c.timeline.makespan_s:.9g}"), c.peak_bytes, c.held))
    if not candidates[0].fits:
        least = min(candidates, key=lambda candidate: candidate.peak_bytes)
        raise ValueError(
            f"A schedule must stay within {bytes_text(memory_limit_bytes or 0)} per rank; got at least"
            f" {bytes_text(least.peak_bytes)}, with `{least.schedule.name}` and {least.schedule.num_microbatches}"
            " microbatches. Use more ranks, or more and smaller microbatches"
        )
    return Choice(candidates[0], tuple(candidates), memory_limit_bytes)


def _schedules(
    num_ranks: int,
    microbatches: Sequence[int],
    names: Sequence[str],
    virtual_stages: Sequence[int],
    warmups: Sequence[float],
    num_layers: int,
) -> Iterator[Schedule]:
    seen = set()
    for name in names:
        chunks = {"1f1b": [1], "zb_h1": [1], "zbv": [2]}.get(name, list(virtual_stages))
        possible = [v for v in chunks if v in virtual_stages and v * num_ranks <= num_layers]
        for v in possible:
            for m in microbatches:
                for warmup in [None] if name in ("gpipe", "zbv") else warmups:
                    schedule = build_schedule(name, num_ranks, m, v, warmup)
                    # With one chunk, or few microbatches, several names and warm-ups mean the same actions.
                    if schedule not in seen:
                        seen.add(schedule)
                        yield schedule


def _best_candidate(workload: Workload, schedule: Schedule, limit_bytes: float | None) -> Candidate:
    # First the fastest split, whatever memory it needs; a split under the cap is slower, and often not needed.
    candidate = _candidate(workload, schedule, limit_bytes, *workload.cut(schedule))
    if candidate.fits:
        return candidate
    try:
        return _candidate(workload, schedule, limit_bytes, *workload.cut(schedule, limit_bytes))
    except ValueError:
        # Kept although it does not fit: the error, or the table of the choice, has to name it.
        return candidate


def _candidate(
    workload: Workload, schedule: Schedule, limit_bytes: float | None, counts: tuple[int, ...], costs: list[Cost]
) -> Candidate:
    timeline = simulate(schedule, costs, workload.link, workload.overhead_s)
    peak_bytes = max(timeline.memory_peaks(costs))
    return Candidate(schedule, counts, timeline, peak_bytes, limit_bytes is None or peak_bytes <= limit_bytes)
