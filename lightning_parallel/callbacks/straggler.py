"""Which rank is late, and because of what.

A rank is late if its own work takes longer than that of ranks which do the same: those with the same pipeline and
tensor coordinates. A heavy stage is no straggler, nor is a rank that waits for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Optional

from lightning.pytorch import LightningModule, Trainer
from rich import box
from rich.table import Table
from typing_extensions import override

from lightning_parallel.callbacks.base import Accumulator, MeasuringCallback, place
from lightning_parallel.callbacks.even_steps import EvenSteps
from lightning_parallel.callbacks.stock import waits_unseen
from lightning_parallel.callbacks.units import percent, seconds_text
from lightning_parallel.recorder import OTHER, Window

__all__ = ["Lateness", "StragglerAccumulator", "StragglerMonitor", "compare"]

WORK = ("data_wait", "forward", "backward", "optimizer", OTHER)
"""Phases in which a rank works. In the others it waits for ranks, or does what no peer needs to do."""

KEPT = 256
"""Steps that are compared at most, evenly spread over the run."""

MIN_STEPS = 20
"""Fewer tell nothing."""

MOST = 0.75
"""Share of the steps in which a straggler is late."""

COVERS = 0.8
"""Share of the lateness that a cause has to explain."""

Step = dict[str, float]
"""Seconds by phase of work, and `wall`."""


@dataclass(frozen=True)
class Lateness:
    """How a rank compares with its peers.

    Attributes:
        rank: The rank.
        own: Seconds of work per step; the median, as all figures.
        excess: How much longer than that of the median peer.
        late: Share of the steps in which it is later than the threshold.
        cause: The phase that covers most of the excess, if one covers enough of it.
    """

    rank: int
    own: float
    excess: float
    late: float
    cause: str | None


def compare(ranks: Sequence[int], steps: Sequence[Mapping[int, Step]], threshold: float) -> list[Lateness]:
    """Compare peers, step by step.

    Args:
        ranks: The peers, two at least.
        steps: Each rank's times in the steps that all of them have.
        threshold: Share of the step's time by which a late rank exceeds the median of the others.
    """
    found = []
    for rank in ranks:
        excesses = [_excess(step, rank, WORK) for step in steps]
        limits = [threshold * median(step[peer]["wall"] for peer in ranks) for step in steps]
        late = sum(value > limit for value, limit in zip(excesses, limits)) / len(steps)
        typical = median(excesses)
        by_phase = {phase: median(_excess(step, rank, [phase]) for step in steps) for phase in WORK}
        cause = max(by_phase, key=lambda phase: by_phase[phase])
        covered = typical > 0 and by_phase[cause] >= COVERS * typical
        own = median(_work(step[rank], WORK) for step in steps)
        found.append(Lateness(rank, own, typical, late, cause if covered else None))
    return found


def _excess(step: Mapping[int, Step], rank: int, phases: Sequence[str]) -> float:
    """By how much `rank` exceeds the median of the others."""
    return _work(step[rank], phases) - median(_work(times, phases) for other, times in step.items() if other != rank)


def _work(step: Step, phases: Sequence[str]) -> float:
    return sum(step.get(phase, 0.0) for phase in phases)


class StragglerAccumulator(Accumulator):
    """The times of this rank's work in steps that all ranks keep.

    Args:
        place: `rank` and `coordinate` of this process.
        threshold: See `compare`.
        unseen: Phases in which waiting cannot be told from work.
    """

    def __init__(self, place: Mapping[str, Any], threshold: float = 0.1, unseen: Sequence[str] = ()) -> None:
        self._place, self._threshold, self._unseen = dict(place), threshold, frozenset(unseen)
        self._steps = EvenSteps[Step](KEPT)
        self._last: Step = {}

    @override
    def add(self, window: Window) -> None:
        phases = {phase: window.phases.get(phase, 0) / 1e9 for phase in WORK if phase not in self._unseen}
        self._last = {**phases, "wall": window.wall_ns / 1e9}
        self._steps.add(window.step, self._last)

    @override
    def share(self) -> dict[str, Any]:
        return {**self._place, "steps": dict(self._steps.values)}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        peers: dict[tuple[int, int], list[int]] = {}
        for rank in shared:
            where = rank["coordinate"]
            peers.setdefault((where["pipeline_parallel"], where["tensor_parallel"]), []).append(rank["rank"])
        steps = {rank["rank"]: rank["steps"] for rank in shared}
        found: list[Lateness] = []
        for ranks in peers.values():
            common = sorted(set.intersection(*(set(steps[rank]) for rank in ranks)))
            if len(ranks) > 1 and len(common) >= MIN_STEPS:
                together = [{rank: steps[rank][number] for rank in ranks} for number in common]
                found += compare(ranks, together, self._threshold)
        if not found:
            return {"missing": [f"No two ranks do the same for {MIN_STEPS} steps, so none can be called slow."]}
        rows = [
            {"rank": one.rank, "own": one.own, "excess": one.excess, "late": one.late}
            for one in sorted(found, key=lambda one: one.rank)
        ]
        stragglers = [{"rank": one.rank, "cause": one.cause, "excess": one.excess} for one in found if one.late >= MOST]
        report = {"stragglers": sorted(stragglers, key=lambda one: -float(one["excess"] or 0)), "ranks": rows}
        if not self._unseen:
            return report
        phases = " and ".join(phase for phase in WORK if phase in self._unseen)
        return {**report, "missing": [f"In {phases} ranks wait for each other unseen: who is late there is not known."]}

    @override
    def scalars(self) -> dict[str, float]:
        return {"straggler/own": _work(self._last, WORK)} if self._last else {}


class StragglerMonitor(MeasuringCallback):
    """Names ranks that keep their peers waiting, and the phase that makes them late.

    Peers are ranks with the same pipeline and tensor coordinates, which do the same work on other data. A rank is a
    straggler if its own work (data, forward, backward, optimizer and the rest; no waiting) exceeds that of the median
    of its peers by more than `threshold` of the step, in three steps of four. The cause is the phase that covers 80 %
    of the excess, if one does. Where all are slow alike nobody is late.

    `report()` has, besides the common keys, in seconds per step, the median over the steps:

        stragglers: [{rank, cause, excess}]       `cause` is None if no single phase explains it
        ranks: [{rank, own, excess, late}]        `late`: share of the steps in which it was late

    While there are fewer than 20 steps, and where no rank has a peer, `missing` says so instead. Under FSDP on CUDA,
    DeepSpeed and Lightning's `ModelParallelStrategy` ranks wait for each other inside forward and backward, unseen, so
    that only the other phases are compared, as `missing` says.

    Logged: `straggler/own`, seconds of work of rank 0 in the last step.

    Args:
        threshold: Share of the step's time, between 0 and 1.
        exchange_every, warmup_steps, dirpath, show_table: See `MeasuringCallback`.

    Raises:
        ValueError: If `threshold` is not between 0 and 1.

    Source: naming a cause only where it covers 80 % of the lateness is TraceML's policy.
    """

    def __init__(
        self,
        threshold: float = 0.1,
        exchange_every: int = 50,
        warmup_steps: int = 2,
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        super().__init__(exchange_every, warmup_steps, dirpath, show_table)
        if not 0 < threshold < 1:
            raise ValueError(f"expected a threshold between 0 and 1, got {threshold}")
        self.threshold = threshold

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> StragglerAccumulator:
        assert self.session is not None
        unseen = ("forward", "backward") if waits_unseen(trainer.strategy) else ()
        return StragglerAccumulator(place(self.session), self.threshold, unseen)

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        stragglers = report.get("stragglers")
        if not stragglers:
            return None
        table = Table("rank", "later by", "in steps", "cause", title="Ranks that are late", box=box.SIMPLE_HEAD)
        late = {row["rank"]: row["late"] for row in report["ranks"]}
        for one in stragglers:
            cause = (one["cause"] or "unattributed").replace("_", " ")
            table.add_row(str(one["rank"]), seconds_text(one["excess"]), percent(late[one["rank"]]), cause)
        return table
