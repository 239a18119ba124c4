"""What the rules of the diagnosis read, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_parallel.callbacks.monitors.step_times import training_seconds

__all__ = ["WORTH_SAYING", "Advice", "Evidence", "Report"]

Report = Mapping[str, Any]

WORTH_SAYING = 0.03
"""Share of a step from which a loss of time is mentioned."""


@dataclass(frozen=True)
class Advice:
    """One finding of the diagnosis, and what to do about it.

    Attributes:
        kind: `wrong` (results cannot be trusted), `slow` (time is lost), `note`, or `good`.
        title: The finding, with its figure.
        text: What to do.
        gain: Share of the step's time that can be saved at most; None where no time is lost.
        figures: The numbers that the sentences rest on.
    """

    kind: Literal["wrong", "slow", "note", "good"]
    title: str
    text: str
    gain: float | None = None
    figures: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Give a form that JSON can hold."""
        return asdict(self)


class Evidence:
    """A gathered report as the rules read it."""

    def __init__(self, report: Report) -> None:
        self.reports: Report = report.get("reports", {})
        self.run: Report = report.get("run", {})
        self.loss: Sequence[Sequence[Any]] = report.get("series", {}).get("loss", [])
        self.ranks: Sequence[Report] = self.of("StepBreakdown").get("ranks", [])
        self.stragglers: Sequence[Report] = self.of("StragglerMonitor").get("stragglers", [])

    def of(self, callback: str) -> Report:
        """Give the report of a callback; empty if the run did not have it."""
        found: Report = self.reports.get(callback) or {}
        return found

    @property
    def wall(self) -> float:
        """Seconds of a step without validation and checkpoints, on the slowest rank."""
        return max(training_seconds(rank) for rank in self.ranks)

    @property
    def useful(self) -> float:
        """Share of forward and backward in the steps of all ranks together, as at the top of the page."""
        useful = sum(rank.get("forward", 0.0) + rank.get("backward", 0.0) for rank in self.ranks)
        return float(useful / sum(map(training_seconds, self.ranks)))

    @property
    def has_all_ranks(self) -> bool:
        """Whether several ranks were measured, and all of them."""
        return len(self.ranks) == self.run.get("world_size", len(self.ranks)) > 1

    def longest(self, phase: str) -> tuple[float, int]:
        """Find the most seconds of a phase on any rank, and the rank; 0 s where it was not measured.

        Ranks that are late because of this phase are left out: the rule on stragglers speaks of them.
        """
        late = {(one["rank"], one.get("cause")) for one in self.stragglers}
        times = [(rank[phase], rank["rank"]) for rank in self.ranks if phase in rank]
        return max((time for time in times if (time[1], phase) not in late), default=(0.0, 0))
