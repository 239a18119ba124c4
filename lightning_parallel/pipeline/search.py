"""Search for the best split points and the best schedule, by dynamic programming and by simulation.

    layers   1 1 1 1 9 1 1 1          the head costs 3, four stages
    uniform  [1 1][1 1][9 1][1 1 +3]  slowest 10
    measured [1 1 1 1][9][1 1][1 +3]  slowest 9

The slowest stage sets the pace of every schedule, so even stages save more time than the choice of a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, TypeVar

from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, build_schedule
from lightning_parallel.pipeline.simulate import Cost, Link, Timeline, simulate
from lightning_parallel.tracing.spans import bytes_text, seconds_text

__all__ = [
    "BALANCES",
    "Arguments",
    "Balance",
    "Candidate",
    "Choice",
    "Costs",
    "MemoryLimitError",
    "Rank",
    "Workload",
    "best_first",
    "choose_schedule",
    "cut_layers",
    "microbatch_counts",
    "rank_of",
    "schedule_arguments",
]

Balance = Literal["auto", "measured", "parameters", "uniform"] | Sequence[int]
"""The quantity that a split balances: measured seconds (`auto`, `measured`), parameters, or the number of layers
(`uniform`); or the layers of each stage."""

BALANCES = ("auto", "measured", "parameters", "uniform")

T = TypeVar("T")
_FREE = Cost()
_INFINITE = float("inf")


class MemoryLimitError(ValueError):
    """No split or no schedule fits in memory.

    Attributes:
        least_bytes: Bytes that a rank needs at least.
    """

    def __init__(self, text: str, least_bytes: float) -> None:
        super().__init__(text)
        self.least_bytes = least_bytes


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
        MemoryLimitError: If no split fits under the cap.
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


@dataclass(frozen=True)
class Costs:
    """Holds the cost of one microbatch in each layer, in the prologue, and in the epilogue.

    Attributes:
        layers: Cost of each layer.
        prologue: Cost of the code before the first layer.
        epilogue: Cost of the code after the last layer, with the loss.
    """

    layers: Sequence[Cost]
    prologue: Cost = _FREE
    epilogue: Cost = _FREE

    @property
    def parts(self) -> tuple[Cost, ...]:
        """The costs of all parts, in the order of the step."""
        return (self.prologue, *self.layers, self.epilogue)

    @property
    def are_measured(self) -> bool:
        """True if the costs have seconds, and not bytes only."""
        # One is enough: single layers, and the ends of the model, may cost nothing.
        return any(cost.total_s for cost in self.parts)

    def mapped(self, function: Callable[..., Cost], *others: Costs) -> Costs:
        """Return the results of a function of each part, and of the same part of other costs."""
        first, *layers, last = map(function, self.parts, *(other.parts for other in others))
        return Costs(tuple(layers), first, last)

    def in_runs(self, sizes: Sequence[int]) -> Costs:
        """Add up the costs of so many consecutive layers at a time."""
        ends = [0, *accumulate(sizes)]
        layers = tuple(Cost.in_sequence(self.layers[start:stop]) for start, stop in pairwise(ends))
        return Costs(layers, self.prologue, self.epilogue)

    def of_one_pass(self, passes: int) -> Costs:
        """Add up the costs of the calls of each layer, if all layers are called `passes` times, one after the other."""
        count = len(self.layers) // passes
        # Every `count`-th cost is of another call of the same layer.
        layers = tuple(Cost.in_sequence(self.layers[first::count]) for first in range(count))
        return Costs(layers, self.prologue, self.epilogue)

    def per_stage(self, layers_per_stage: Sequence[int]) -> list[Cost]:
        """Add up the costs of the layers of each stage, prologue and epilogue included."""
        stages = [[layer] for layer in self.in_runs(layers_per_stage).layers]
        stages[0].insert(0, self.prologue)
        stages[-1].append(self.epilogue)
        return [Cost.in_sequence(stage) for stage in stages]


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
    # Of the largest layer: the caller checks the true peak afterwards.
    again_bytes = max((layer.largest_again_bytes for layer in layers), default=0.0)

    def memory(stage: int, start: int, stop: int) -> float:
        return resident(stage, start, stop) + in_flight[stage] * activations(stage, start, stop) + again_bytes

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
        raise MemoryLimitError(
            f"Every stage of {num_layers} layers in {num_stages} stages must stay within"
            f" {bytes_text(memory_cap_bytes)}; the best split needs {bytes_text(least)}. Use more stages, smaller"
            " microbatches, or a schedule that holds fewer activations",
            least,
        )
    return _most_even(num_layers, num_stages, segment_if_it_fits)


# --------------------------------------------------------------------------------------------------------- schedules


Arguments = tuple[str, int, int, int, float | None]
"""The arguments of `build_schedule`: name, ranks, microbatches, stages per rank, and warm-up."""


def microbatch_counts(num_ranks: int, samples: int | None) -> list[int]:
    """Return the numbers of microbatches to try for a batch; the first is the default.

    Args:
        num_ranks: P.
        samples: Samples of the batch; None if unknown.
    """
    # With four per rank the bubble of 1F1B, (p - 1) / (4 p + p - 1), stays below a fifth.
    counts = [num_ranks * factor for factor in (4, 1, 2, 8)]
    fitting = [count for count in counts if samples is None or count <= samples]
    return fitting or [max(samples or 1, 1)]


def schedule_arguments(
    num_ranks: int,
    microbatches: Sequence[int],
    num_layers: int,
    passes: int = 1,
    *,
    schedules: Sequence[str] = tuple(SCHEDULES),
    virtual_stages: Sequence[int] = (1, 2, 4),
    warmups: Sequence[float] = (1, 1.5, 2),
) -> Iterator[Arguments]:
    """Yield the arguments of all schedules to compare.

    Args:
        num_ranks: P.
        microbatches: Values of m to try.
        num_layers: Calls of layers. Schedules with more stages are left out.
        passes: Number of passes through the layers. Every rank then needs a stage in each pass.
        schedules: Names to try.
        virtual_stages: Values of V to try, for each pass.
        warmups: Warm-ups to try, for the schedules that have one.
    """
    for name in schedules:
        builder = SCHEDULES[name]
        for chunks in [passes * count for count in virtual_stages]:
            # The stages of such a schedule have one order of ranks, which a second pass cannot repeat.
            is_fixed = builder.with_chunks is not None and (passes > 1 or chunks != builder.virtual_stages)
            if is_fixed or chunks * num_ranks > num_layers:
                continue
            for count in microbatches:
                for warmup in [None] if builder.warmup is None else warmups:
                    yield name, num_ranks, count, chunks, warmup


@dataclass(frozen=True)
class Workload(Costs):
    """Costs of a model, measured with the batch split into `measured_microbatches`.

    Args:
        layers: Cost of one microbatch in each call of a layer.
        prologue: Cost of the code before the layers.
        epilogue: Cost of the code after the layers.
        measured_microbatches: Number of microbatches at the measurement; with m microbatches the costs are
            `measured_microbatches / m` times as large.
        overhead_s: Seconds that every action takes in addition, whatever the size of the microbatch.
        link: Link between any two ranks.
        passes: Number of passes through the layers; all passes get the same split points.
        spare_bytes: Bytes that each rank holds besides its stages.
        rehearsed: Returns the costs for a number of microbatches, if they do not follow from the costs above.
    """

    measured_microbatches: int = 1
    overhead_s: float = 0.0
    link: Link = Link()
    passes: int = 1
    spare_bytes: float = 0.0
    rehearsed: Callable[[int], Costs] | None = None
    _counts: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Many schedules share the numbers of stages and microbatches.
    _stages_of: dict[tuple[int, int], tuple[tuple[int, ...], list[Cost]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def costs_of(self, num_microbatches: int) -> Costs:
        """Return the costs of one of so many microbatches."""
        if self.rehearsed is not None:
            return self.rehearsed(num_microbatches)
        factor = self.measured_microbatches / num_microbatches
        return self.mapped(lambda cost: cost.scaled(factor))

    def cut(self, schedule: Schedule, memory_cap_bytes: float | None = None) -> tuple[tuple[int, ...], list[Cost]]:
        """Split the layers for a schedule; return the number of layers and the cost of each stage."""
        if memory_cap_bytes is None:
            return self.fastest_cut(schedule.num_stages, schedule.num_microbatches)
        costs = self.costs_of(schedule.num_microbatches)
        # The cap is per rank, but the split is per stage. So each stage of a rank gets an equal share of memory and of
        # the microbatches in flight. The rank's true peak is checked afterwards.
        share = schedule.virtual_stages
        cap = (memory_cap_bytes - self.spare_bytes) / share * self.passes
        # Rounded up: a stage may hold one microbatch more than the other stages of its rank.
        in_flight = [-(-schedule.max_in_flight[rank] // share) for rank in schedule.stage_ranks]
        counts = self._cut(schedule.num_stages, costs, cap, in_flight)
        return counts, self._stages(counts, costs)

    def fastest_cut(self, num_stages: int, num_microbatches: int) -> tuple[tuple[int, ...], list[Cost]]:
        """Split the layers without a cap of memory; return the number of layers and the cost of each stage."""
        # Kept, and found for one number of microbatches: noise in measured costs must not move the split points.
        if num_stages not in self._counts:
            self._counts[num_stages] = self._cut(num_stages, self.costs_of(self.measured_microbatches))
        key = num_stages, num_microbatches
        if key not in self._stages_of:
            counts = self._counts[num_stages]
            self._stages_of[key] = counts, self._stages(counts, self.costs_of(num_microbatches))
        return self._stages_of[key]

    def _cut(
        self, num_stages: int, costs: Costs, cap_bytes: float | None = None, in_flight: Sequence[int] = ()
    ) -> tuple[int, ...]:
        if num_stages == 1:
            return (len(costs.layers),)
        one = costs.of_one_pass(self.passes)
        count = num_stages // self.passes
        found = cut_layers(
            one.layers,
            count,
            prologue=one.prologue,
            epilogue=one.epilogue,
            memory_cap_bytes=cap_bytes,
            in_flight=in_flight[:count] or None,
        )
        return found * self.passes

    @staticmethod
    def _stages(counts: Sequence[int], costs: Costs) -> list[Cost]:
        first, *later = costs.per_stage(counts)
        # Later stages compute masks and positions from the batch once more.
        return [first, *(replace(stage, forward_s=stage.forward_s + costs.prologue.forward_s) for stage in later)]

    def bound_s(self, arguments: Arguments) -> float:
        """Return seconds in which no schedule with these arguments can end, without building the schedule.

        A rank waits for its first input, then does all its work. Without split backward passes, its last gradient also
        has to go back to the first stage.
        """
        name, ranks, microbatches, chunks, _ = arguments
        splits = SCHEDULES[name].splits_backward
        _, stages = self.fastest_cut(ranks * chunks, microbatches)
        work = self.work_s(name, ranks, stages)
        bound = ahead = 0.0
        for rank, cost in enumerate(stages[:ranks]):
            bound = max(bound, ahead + microbatches * work[rank])
            there_and_back_s = cost.forward_s if splits else cost.total_s
            hop_s = self.overhead_s + self.link.latency_s + cost.boundary_bytes / self.link.bytes_per_s
            ahead += there_and_back_s + (1 if splits else 2) * hop_s
        return bound

    def work_s(self, name: str, num_ranks: int, stages: Sequence[Cost]) -> list[float]:
        """Return the seconds that each rank of a schedule computes for a microbatch."""
        builder = SCHEDULES[name]
        actions_s = self.overhead_s * (3 if builder.splits_backward else 2)
        work = [0.0] * num_ranks
        for rank, cost in zip(builder.stage_ranks(num_ranks, len(stages) // num_ranks), stages):
            work[rank] += cost.total_s + actions_s
        return work


Rank = tuple[bool, float, float, float]
"""The order of candidates: whether it does not fit, its seconds, its bytes, the activations that it holds."""


def rank_of(schedule: Schedule, fits: bool, seconds: float, peak_bytes: float) -> Rank:
    """Return the place of a candidate among others: of equally fast candidates, the least memory decides."""
    # Rounded to nine digits: sums in another order differ in the last digits, and memory has to decide a tie.
    return not fits, float(f"{seconds:.9g}"), peak_bytes, schedule.held


def best_first(
    arguments: Iterable[Arguments],
    predict: Callable[[Schedule], tuple[Rank, T]],
    bound_s: Callable[[Arguments], float] = lambda _: 0.0,
) -> list[T]:
    """Predict schedules, and return the predictions, best first.

    Args:
        arguments: The schedules, as arguments of `build_schedule`.
        predict: Predicts a schedule; returns its rank and the prediction.
        bound_s: Returns seconds that the prediction of a schedule cannot fall below. Schedules whose bound is above the
            best prediction are neither built nor predicted.
    """
    found: list[tuple[Rank, int, T]] = []
    seen: set[Schedule] = set()
    best_s = _INFINITE
    bounds = sorted((bound_s(values), place, values) for place, values in enumerate(arguments))
    for bound, place, values in bounds:
        # The bound adds up the same seconds in another order, so its last digits may differ.
        if bound * (1 - 1e-9) > best_s:
            break
        schedule = build_schedule(*values)
        # With one chunk, or few microbatches, several names and warm-ups mean the same actions.
        if schedule in seen:
            continue
        seen.add(schedule)
        rank, prediction = predict(schedule)
        found.append((rank, place, prediction))
        if not rank[0]:
            best_s = min(best_s, rank[1])
    # The place decides last, so that the order of the bounds cannot change the choice.
    return [prediction for *_, prediction in sorted(found, key=lambda entry: entry[:2])]


class Candidate(NamedTuple):
    """A schedule with its split, and the predicted step."""

    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    timeline: Timeline
    peak_bytes: float
    """Most bytes held by any rank."""
    fits: bool


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
            f"{schedule.held:g}",
            bytes_text(candidate.peak_bytes) if candidate.peak_bytes else "",
            verdict,
        )


def choose_schedule(
    workload: Workload,
    num_ranks: int,
    microbatches: Sequence[int],
    *,
    memory_limit_bytes: float | None = None,
    **options: Any,
) -> Choice:
    """Find the fastest of schedule x V x m x warm-up by simulation, among the schedules that fit in memory.

    A schedule that fits only with other split points gets these. Of equally fast schedules, the least memory decides.

    Args:
        workload: The layers and their measured costs.
        num_ranks: P.
        microbatches: Values of m to try.
        memory_limit_bytes: Most bytes that a rank may hold.
        options: See `schedule_arguments`.

    Raises:
        ValueError: If there are fewer layers than ranks, or no schedule can be built from the values given.
        MemoryLimitError: If no schedule fits in memory.
    """
    num_layers = len(workload.layers)
    arguments = list(schedule_arguments(num_ranks, microbatches, num_layers, workload.passes, **options))
    if not arguments:
        tried = ", ".join(f"{name} in {list(values)}" for name, values in options.items())
        raise ValueError(f"No schedule can run {num_layers} layers on {num_ranks} ranks{tried and f' with {tried}'}")

    def predict(schedule: Schedule) -> tuple[Rank, Candidate]:
        found = _best_candidate(workload, schedule, memory_limit_bytes)
        return rank_of(schedule, found.fits, found.timeline.makespan_s, found.peak_bytes), found

    # Without a bound: the table of the choice shows all candidates.
    candidates = best_first(arguments, predict)
    if not candidates[0].fits:
        least = min(candidates, key=lambda candidate: candidate.peak_bytes)
        raise MemoryLimitError(
            f"A schedule must stay within {bytes_text(memory_limit_bytes or 0)} per rank; got at least"
            f" {bytes_text(least.peak_bytes)}, with `{least.schedule.name}` and {least.schedule.num_microbatches}"
            " microbatches. Use more ranks, or more and smaller microbatches",
            least.peak_bytes,
        )
    return Choice(candidates[0], tuple(candidates), memory_limit_bytes)


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
    peak_bytes = max(timeline.memory_peaks(costs)) + workload.spare_bytes
    return Candidate(schedule, counts, timeline, peak_bytes, limit_bytes is None or peak_bytes <= limit_bytes)
