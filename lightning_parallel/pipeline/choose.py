"""Choose the schedule by playing every candidate with measured costs: the `auto` of `schedule`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_parallel.pipeline.partition import cut_layers, stage_costs
from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, build_schedule
from lightning_parallel.pipeline.simulate import Cost, Link, Timeline, simulate
from lightning_parallel.tracing.text import bytes_text

__all__ = ["Candidate", "Choice", "Workload", "choose_schedule"]

_FREE = Cost()


@dataclass(frozen=True)
class Workload:
    """What there is to run, as measured with the batch split into `measured_microbatches`.

    Args:
        layers: Cost of one microbatch in each layer.
        prologue: Cost of what comes before the layers.
        epilogue: Cost of what comes after them.
        measured_microbatches: Split of the batch at which the costs were taken; with m microbatches the costs are
            `measured_microbatches / m` times as large.
        overhead_s: Seconds that every action takes besides, whatever the size of the microbatch.
        link: Between any two ranks.
    """

    layers: Sequence[Cost]
    prologue: Cost = _FREE
    epilogue: Cost = _FREE
    measured_microbatches: int = 1
    overhead_s: float = 0.0
    link: Link = Link()

    def cut(self, schedule: Schedule, memory_cap_bytes: float | None = None) -> tuple[tuple[int, ...], list[Cost]]:
        """Cut the layers for a schedule; give the layers and the cost of each stage."""
        factor = self.measured_microbatches / schedule.num_microbatches
        layers = [layer.scaled(factor) for layer in self.layers]
        prologue, epilogue = self.prologue.scaled(factor), self.epilogue.scaled(factor)
        share = schedule.virtual_stages
        counts = cut_layers(
            layers,
            schedule.num_stages,
            prologue=prologue,
            epilogue=epilogue,
            memory_cap_bytes=None if memory_cap_bytes is None else memory_cap_bytes / share,
            in_flight=[-(-schedule.max_in_flight[rank] // share) for rank in schedule.stage_ranks],
        )
        return counts, stage_costs(layers, counts, prologue=prologue, epilogue=epilogue)


class Candidate(NamedTuple):
    """One way to run the step and what it is predicted to take."""

    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    timeline: Timeline
    peak_bytes: float
    """Most bytes held by any rank."""
    fits: bool

    @property
    def held(self) -> float:
        """Most activations held by any rank, in microbatches through all its layers."""
        return max(self.schedule.max_in_flight) / self.schedule.virtual_stages


@dataclass(frozen=True)
class Choice:
    """The best candidate, and all of them, best first."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    memory_limit_bytes: float | None

    HEADER = ("schedule", "V", "microbatches", "warm-up", "step", "bubble", "held", "peak memory", "")

    def rows(self) -> list[tuple[str, ...]]:
        """Explain the choice: one row of words per candidate, best first, under `HEADER`."""
        return [self._row(candidate) for candidate in self.candidates]

    def _row(self, candidate: Candidate) -> tuple[str, ...]:
        schedule, timeline = candidate.schedule, candidate.timeline
        slower = timeline.makespan_s / self.best.timeline.makespan_s - 1
        verdict = "chosen" if candidate is self.best else f"{slower:+.1%}"
        if not candidate.fits and self.memory_limit_bytes is not None:
            verdict = f"over the limit by {bytes_text(candidate.peak_bytes - self.memory_limit_bytes)}"
        return (
            schedule.name,
            str(schedule.virtual_stages),
            str(schedule.num_microbatches),
            "" if schedule.warmup is None else f"{schedule.warmup:g}",
            f"{timeline.makespan_s * 1e3:.4g} ms",
            f"{timeline.bubble_fraction:.1%}",
            f"{candidate.held:g}",
            bytes_text(candidate.peak_bytes) if candidate.peak_bytes else "",
            verdict,
        )


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
    """Find the fastest of schedule x V x m x warm-up by simulation, among those that fit in memory.

    Where one fits only with another cut of the layers, that cut is taken. Ties go to the one that holds least.

    Args:
        workload: The layers and their measured costs.
        num_ranks: P.
        microbatches: Values of m to try.
        schedules: Names to try.
        virtual_stages: Values of V to try; those that need more stages than there are layers are left out.
        warmups: Warm-ups to try, for the schedules that have one.
        memory_limit_bytes: Most bytes that a rank may hold.

    Raises:
        ValueError: If there are fewer layers than ranks, no schedule can be built from the values given, or none
            fits in memory.
    """
    built = list(_schedules(num_ranks, microbatches, schedules, virtual_stages, warmups, len(workload.layers)))
    if not built:
        raise ValueError(
            f"no schedule of {', '.join(schedules)} can run {len(workload.layers)} layers on {num_ranks} ranks with "
            f"virtual_stages in {list(virtual_stages)} and microbatches in {list(microbatches)}"
        )
    candidates = [_play(workload, schedule, memory_limit_bytes) for schedule in built]
    candidates.sort(key=lambda c: (not c.fits, float(f"{c.timeline.makespan_s:.9g}"), c.peak_bytes, c.held))
    if not candidates[0].fits:
        least = min(candidates, key=lambda candidate: candidate.peak_bytes)
        raise ValueError(
            f"expected a schedule within {bytes_text(memory_limit_bytes or 0)} per rank, the smallest is "
            f"`{least.schedule.name}` with {least.schedule.num_microbatches} microbatches and "
            f"{bytes_text(least.peak_bytes)}; use more ranks or more, hence smaller, microbatches"
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
        for v in (v for v in chunks if v in virtual_stages and v * num_ranks <= num_layers):
            for m in microbatches:
                for warmup in [None] if name in ("gpipe", "zbv") else warmups:
                    schedule = build_schedule(name, num_ranks, m, v, warmup)
                    # With one chunk, or few microbatches, several names and warm-ups mean the same actions.
                    if schedule not in seen:
                        seen.add(schedule)
                        yield schedule


def _play(workload: Workload, schedule: Schedule, limit_bytes: float | None) -> Candidate:
    candidate = _play_cut(workload, schedule, limit_bytes, *workload.cut(schedule))
    if candidate.fits:
        return candidate
    try:
        return _play_cut(workload, schedule, limit_bytes, *workload.cut(schedule, limit_bytes))
    except ValueError:
        return candidate


def _play_cut(
    workload: Workload, schedule: Schedule, limit_bytes: float | None, counts: tuple[int, ...], costs: list[Cost]
) -> Candidate:
    timeline = simulate(schedule, costs, workload.link, workload.overhead_s)
    peak_bytes = max(timeline.memory_peaks(costs))
    return Candidate(schedule, counts, timeline, peak_bytes, limit_bytes is None or peak_bytes <= limit_bytes)
