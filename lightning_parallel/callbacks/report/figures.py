"""The figures of a run: read once from its report, for the page, the diagnosis and the comparison of two runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning_parallel.callbacks.monitors.memory import HELD
from lightning_parallel.callbacks.monitors.step_times import training_seconds

__all__ = ["Figures", "Report"]

Report = Mapping[str, Any]


class Figures:
    """The figures of a run.

    Args:
        report: `reports` by callback name, with the keys of each callback's `report()`; `run` with facts of the run.

    Attributes:
        reports: Reports of the callbacks, by name.
        run: Facts of the run.
        series: Curves over the steps, by name.
        ranks: Seconds by phase, of each rank; empty if steps were not broken down.
        stragglers: The slow ranks.
        bubble: Shares of the pipeline's bubble.
        throughput: Report of `Throughput`.
    """

    def __init__(self, report: Report) -> None:
        self.reports: Report = report.get("reports", {})
        self.run: Report = report.get("run", {})
        self.series: Report = report.get("series") or {}
        self.ranks: Sequence[Report] = self.of("StepBreakdown").get("ranks", [])
        self.stragglers: Sequence[Report] = self.of("StragglerMonitor").get("stragglers", [])
        self.bubble: Report = self.of("PipelineTimeline").get("bubble", {})
        self.throughput = self.of("Throughput")

    def of(self, callback: str) -> Report:
        """Return the report of a callback; empty if the run had no such callback."""
        found: Report = self.reports.get(callback) or {}
        return found

    # ------------------------------------------------------------------------------------------------------- steps

    @property
    def step(self) -> float:
        """Seconds of a step on the slowest rank, which sets the pace; without validation and checkpoints."""
        return max(training_seconds(rank) for rank in self.ranks)

    @property
    def useful(self) -> float:
        """Share of forward and backward in the steps of all ranks together."""
        useful = sum(rank.get("forward", 0.0) + rank.get("backward", 0.0) for rank in self.ranks)
        return float(useful / sum(map(training_seconds, self.ranks)))

    @property
    def has_all_ranks(self) -> bool:
        """Whether the run has several ranks, and all of them were measured."""
        return len(self.ranks) == self.run.get("world_size", len(self.ranks)) > 1

    def longest(self, phase: str) -> tuple[float, int]:
        """Return the most seconds of a phase on any rank, and the rank; 0 s if the phase was not measured.

        Ranks that are late because of this phase are left out: the advice on stragglers speaks of them.
        """
        late = {(one["rank"], one.get("cause")) for one in self.stragglers}
        times = [(rank[phase], rank["rank"]) for rank in self.ranks if phase in rank]
        return max((time for time in times if (time[1], phase) not in late), default=(0.0, 0))

    def mean_phases(self, names: Iterable[str]) -> dict[str, float]:
        """Average each phase over the ranks that measured it; seconds."""
        means = {}
        for name in names:
            # Skip ranks without the phase: an unmeasured phase does not count as zero seconds.
            times = [rank[name] for rank in self.ranks if name in rank]
            if times:
                means[name] = fmean(times)
        return means

    # ------------------------------------------------------------------------------------------ memory, communication

    @property
    def held(self) -> list[tuple[int, int]]:
        """Bytes that each rank holds, and the rank."""
        ranks = self.of("MemoryProfiler").get("ranks") or ()
        return [(sum(rank.get(key) or 0 for key in HELD), rank["rank"]) for rank in ranks]

    @property
    def records(self) -> Sequence[Report]:
        """Kinds of communication calls."""
        found: Sequence[Report] = self.of("CommunicationProfiler").get("records") or ()
        return found

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of a step for which the training thread stood still for communication, by axis."""
        return self._by_axis("exposed")

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a rank sends in a step, by axis."""
        return self._by_axis("wire_bytes")

    def _by_axis(self, key: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for record in self.records:
            # A record holds the bytes of one call, and `count` the calls in a step.
            found[record["axis"]] = found.get(record["axis"], 0.0) + (record.get(key) or 0.0) * record["count"]
        return found
