"""The time of each step: its phases, and the ranks that are slower than their peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Optional

from lightning.pytorch import LightningModule, Trainer
from rich import box
from rich.table import Table
from typing_extensions import override

from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback, rank_info
from lightning_parallel.callbacks.recording.session import PHASES
from lightning_parallel.mesh import PIPELINE
from lightning_parallel.tracing import OTHER, Span, StepSampler, Window
from lightning_parallel.tracing.spans import percent, seconds_text

__all__ = [
    "BreakdownAccumulator",
    "RankLateness",
    "StepBreakdown",
    "StragglerAccumulator",
    "StragglerMonitor",
    "compare_peers",
    "hidden_ns",
    "training_seconds",
    "union_ns",
]

EXPOSED = "communication_exposed"
HIDDEN = "communication_hidden"

_HEADS = {
    "wall": "step",
    "data_wait": "data\nwait",
    "forward": "for-\nward",
    "backward": "back-\nward",
    "communication_exposed": "comm\nwait",
    HIDDEN: "comm\nhidden",
    "pipeline_wait": "stage\nwait",
    "optimizer": "opti-\nmizer",
    "checkpoint": "check-\npoint",
    "validation": "valid-\nation",
}
"""Headers of the table: all columns together fit into 80 characters."""

KEPT = 256
"""Largest number of steps that the ranks compare, evenly spread over the run."""


# ---------------------------------------------------------------------------------------------------------- breakdown


class BreakdownAccumulator(Accumulator):
    """Adds up nanoseconds by phase.

    Args:
        rank_info: `rank` and `coordinate` of this process.
        missing: Communication that is not recorded, in sentences; may grow until `summarize`.
    """

    def __init__(self, rank_info: Mapping[str, Any], missing: Sequence[str] = ()) -> None:
        self._rank_info = dict(rank_info)
        self._missing = missing
        self._total: Counter[str] = Counter()
        self._steps = 0
        self._logged: Counter[str] = Counter()
        self._steps_logged = 0
        self._waits = StepSampler[int](KEPT)

    @override
    def add(self, window: Window) -> None:
        self._steps += 1
        # Keyed by step: ranks can compare only the waits of the same step.
        self._waits.add(window.step, window.phases.get(EXPOSED, 0))
        self.end(window)

    @override
    def end(self, window: Window) -> None:
        # A user's span may have an unknown phase. It counts as other, so that the sum stays the wall time.
        for phase, duration_ns in window.phases.items():
            self._total[phase if phase in PHASES else OTHER] += duration_ns
        self._total[HIDDEN] += hidden_ns(window.spans)

    @override
    def share(self) -> dict[str, Any]:
        means = self._means(self._total, self._steps) if self._steps else {}
        return {"row": {**self._rank_info, **means}, "waits": dict(self._waits.values)}

    def _means(self, total_ns: Mapping[str, int], steps: int) -> dict[str, float]:
        """Return seconds per step; `wall` is the sum of the phases."""
        wall = sum(total_ns[phase] for phase in PHASES)
        # Tables and files show hidden communication next to exposed communication.
        phases = {phase: total_ns[phase] for phase in (*PHASES[:4], HIDDEN, *PHASES[4:])}
        return {key: value / steps / 1e9 for key, value in {"wall": wall, **phases}.items()}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        # A rank without a finished step has no means.
        report: dict[str, Any] = {"ranks": [rank["row"] for rank in shared if rank["waits"]]}
        # With a rank missing, the shortest wait of the known ranks would be no bound.
        if len(report["ranks"]) == len(shared) > 1 and (least := _least_waits(shared)):
            report["communication_least"] = least
        return {**report, "missing": list(self._missing)} if self._missing else report

    @override
    def scalars(self) -> dict[str, float]:
        steps = self._steps - self._steps_logged
        if steps == 0:
            return {}
        # Only since the last logging: a mean over the whole run would show a change late.
        recent = Counter({phase: self._total[phase] - self._logged[phase] for phase in self._total})
        self._logged = self._total.copy()
        self._steps_logged = self._steps
        return {f"step_breakdown/{key}": value for key, value in self._means(recent, steps).items()}


class StepBreakdown(MeasuringCallback[BreakdownAccumulator]):
    """Breaks the time of every step down into phases that do not overlap and add up to the step.

    | phase | work of the training thread |
    |---|---|
    | `data_wait` | waited for the next batch, or moved it to the device |
    | `forward`, `backward` | ran the step; computed gradients |
    | `communication_exposed` | waited for a collective; between pipeline stages, see `pipeline_wait` |
    | `pipeline_wait` | waited for another pipeline stage |
    | `optimizer` | updated the parameters, clipped gradients, set them to zero |
    | `checkpoint`, `validation` | saved a checkpoint; validated, with all work inside |
    | `other` | anything else: hooks, logging, callbacks |

    The innermost phase counts: a collective in the forward is communication. On CUDA these are times of the device.
    Work of the host then costs nothing while the device is busy.

    `report()` returns the common keys and these:

        ranks: [{rank, coordinate: {axis: index}, wall, data_wait, forward, backward, communication_exposed,
                 communication_hidden, pipeline_wait, optimizer, checkpoint, validation, other}]
        communication_least: [seconds]
        missing: [sentence]

    | key of `ranks` | meaning; times are seconds per step |
    |---|---|
    | `wall` | sum of the phases |
    | `communication_hidden` | time of collectives in flight while the training thread worked; not part of `wall` |

    Validation and checkpoints after the last step are distributed over the steps.

    `communication_least` has one value for each pipeline stage, if there are several ranks. The value is the time per
    step for which communication blocked every rank of the stage. Beyond this time, a blocked rank waited for late
    ranks.

    `missing` names groups whose communication is not seen. Their time counts as forward or backward.

    Logged: `step_breakdown/<phase>`, seconds per step of rank 0, mean over the steps since the last logging.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import StepBreakdown

        breakdown = StepBreakdown()
        trainer = Trainer(callbacks=[breakdown])
        trainer.fit(MyModule(), MyData())
        print(breakdown.report()["ranks"])  # seconds per step
        ```

    Args:
        every_n_batches: Number of batches between two exchanges of results among the ranks. The smallest value of all
            callbacks counts.
        warmup_batches: Number of first batches that are not counted. The largest value of all callbacks counts.
        dirpath: Folder where rank 0 writes `<name>.json` and `<name>.csv` after training. None writes nothing.
        show_table: Print a table after training, on rank 0.

    Raises:
        ValueError: If a number of steps is too small.
    """

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> BreakdownAccumulator:
        return BreakdownAccumulator(rank_info(self.open_session), self.open_session.missing)

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        ranks = report["ranks"]
        if not ranks:
            return None
        title = f"Where a step goes: milliseconds, mean of {report['steps']} steps"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
        keys = ["wall", *PHASES[:4], HIDDEN, *PHASES[4:]]
        # Leave out phases in which no rank spent time.
        shown = [key for key in keys if any(rank.get(key, 0.0) > 0 for rank in ranks)]
        for header in ("rank", *(_HEADS.get(key, key) for key in shown)):
            # Fold headers that are too narrow: two truncated headers may look the same.
            table.add_column(header, justify="right", overflow="fold")
        for rank in ranks:
            table.add_row(str(rank["rank"]), *(_milliseconds(rank[key]) if key in rank else "-" for key in shown))
        return table


def _milliseconds(seconds: float) -> str:
    found = seconds * 1e3
    return f"{found:.{0 if found >= 99.95 else 1 if found >= 9.995 else 2}f}"


def training_seconds(rank: Mapping[str, Any]) -> float:
    """Return the seconds of a step on a rank, without validation and checkpoints."""
    seconds: float = rank["wall"] - rank.get("validation", 0.0) - rank.get("checkpoint", 0.0)
    return seconds


def _least_waits(shared: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return, for each pipeline stage, the shortest wait of its ranks in a step: seconds, mean over the steps.

    Empty if the ranks of a stage have finished no step together.
    """
    by_stage: dict[int, list[dict[int, int]]] = {}
    for rank in shared:
        by_stage.setdefault(rank["row"]["coordinate"][PIPELINE], []).append(rank["waits"])
    least = []
    for _, waits in sorted(by_stage.items()):
        steps = set.intersection(*map(set, waits))
        if not steps:
            return []
        least.append(fmean(min(wait[step] for wait in waits) for step in steps) / 1e9)
    return least


def hidden_ns(spans: Iterable[Span]) -> int:
    """Return the time for which collectives were in flight while the training thread worked.

    A collective that completed before its wait counts only if its completion time is known. Messages between pipeline
    stages are left out: the schedule hides them, see `PipelineTimeline`.
    """
    flights: list[tuple[int, int]] = []
    stalls: list[tuple[int, int]] = []
    for span in spans:
        if span.apart is not None:
            continue
        if span.category == "wait":
            stalls.append((span.start_ns, span.end_ns))
        if span.category != "communication" or span.peer is not None or span.axis == "pipeline_parallel":
            continue
        if span.in_flight is not None:
            flights.append((span.start_ns, span.complete_ns))
        # If a wait for another thread exposes the collective, that wait is among the stalls already.
        if span.exposed_ns == span.blocked_ns:
            stalls.append((span.end_ns - span.blocked_ns, span.end_ns))
    # Collectives may overlap: the union counts each moment once.
    return union_ns([*flights, *stalls]) - union_ns(stalls)


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    total = 0
    reached = 0
    for start, end in sorted(intervals):
        if end > reached:
            # Not `max`, which takes longer than all the rest: a step may have thousands of intervals.
            total += end - (start if start > reached else reached)
            reached = end
    return total


# --------------------------------------------------------------------------------------------------------- stragglers

WORK = ("data_wait", "forward", "backward", "optimizer", OTHER)
"""Phases in which a rank works. In the other phases it waits for ranks, or does work that its peers need not do."""

MIN_STEPS = 20
"""Least number of steps for a conclusion."""

LATE_SHARE = 0.75
"""Share of the steps in which a straggler is late."""

CAUSE_SHARE = 0.8
"""Share of the lateness that a cause has to explain."""

WorkTimes = dict[str, float]
"""Seconds by phase of work, and `wall`."""


@dataclass(frozen=True)
class RankLateness:
    """Comparison of a rank with its peers.

    Attributes:
        rank: Global rank.
        own: Seconds of work per step. All figures are medians over the steps.
        excess: Seconds by which the work exceeds the median of its peers.
        late: Share of the steps in which the excess is above the threshold.
        cause: The phase that covers most of the excess; None if no phase covers enough of it.
    """

    rank: int
    own: float
    excess: float
    late: float
    cause: str | None


def compare_peers(
    ranks: Sequence[int], steps: Sequence[Mapping[int, WorkTimes]], threshold: float
) -> list[RankLateness]:
    """Compare peers, step by step.

    Args:
        ranks: The peers, at least two.
        steps: The times of each rank in the steps that all ranks have.
        threshold: Share of the step's time by which a late rank exceeds the median of its peers.
    """
    found = []
    # A share of the full step with its waits, because the full step is about equally long on all peers.
    limits = [threshold * median(step[peer]["wall"] for peer in ranks) for step in steps]
    for rank in ranks:
        excesses = [_excess(step, rank, WORK) for step in steps]
        late = sum(excess > limit for excess, limit in zip(excesses, limits)) / len(steps)
        # Medians: a few far slower steps, such as steps with a checkpoint, must not make a straggler.
        typical = median(excesses)
        by_phase = {phase: median(_excess(step, rank, [phase]) for step in steps) for phase in WORK}
        cause = max(by_phase, key=lambda phase: by_phase[phase])
        # Noise alone makes some phase the largest, so the largest phase need not explain the excess.
        is_explained = typical > 0 and by_phase[cause] >= CAUSE_SHARE * typical
        own = median(_work(step[rank], WORK) for step in steps)
        found.append(RankLateness(rank, own, typical, late, cause if is_explained else None))
    return found


def _excess(step: Mapping[int, WorkTimes], rank: int, phases: Sequence[str]) -> float:
    """Return the seconds by which `rank` exceeds the median of its peers."""
    # Without the rank itself: of two peers, it would be half of the reference.
    others = [_work(times, phases) for other, times in step.items() if other != rank]
    return _work(step[rank], phases) - median(others)


def _work(times: WorkTimes, phases: Sequence[str]) -> float:
    return sum(times.get(phase, 0.0) for phase in phases)


class StragglerAccumulator(Accumulator):
    """Keeps this rank's work times in a sample of the steps; all ranks sample the same steps.

    Args:
        rank_info: `rank` and `coordinate` of this process.
        threshold: See `compare_peers`.
    """

    def __init__(self, rank_info: Mapping[str, Any], threshold: float = 0.1) -> None:
        self._rank_info = dict(rank_info)
        self._threshold = threshold
        self._steps = StepSampler[WorkTimes](KEPT)
        self._last: WorkTimes = {}

    @override
    def add(self, window: Window) -> None:
        phases = {phase: window.phases.get(phase, 0) / 1e9 for phase in WORK}
        self._last = {**phases, "wall": window.wall_ns / 1e9}
        self._steps.add(window.step, self._last)

    @override
    def share(self) -> dict[str, Any]:
        return {**self._rank_info, "steps": dict(self._steps.values)}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        found = sorted(self._compare(shared), key=lambda one: one.rank)
        if not found:
            return {
                "missing": [
                    f"Finding slow ranks needs {MIN_STEPS} steps in which two or more ranks do identical work;"
                    " this run had none."
                ]
            }
        stragglers = [
            {"rank": one.rank, "cause": one.cause, "excess": one.excess}
            # Worst first, the order of the table and of the page.
            for one in sorted(found, key=lambda one: -one.excess)
            if one.late >= LATE_SHARE
        ]
        rows = [{"rank": one.rank, "own": one.own, "excess": one.excess, "late": one.late} for one in found]
        return {"stragglers": stragglers, "ranks": rows}

    def _compare(self, shared: Sequence[dict[str, Any]]) -> list[RankLateness]:
        """Compare the ranks of each pipeline and tensor coordinate: they do the same work on other data."""
        peers: dict[tuple[int, int], list[int]] = {}
        for rank in shared:
            coordinate = rank["coordinate"]
            peers.setdefault((coordinate["pipeline_parallel"], coordinate["tensor_parallel"]), []).append(rank["rank"])
        steps = {rank["rank"]: rank["steps"] for rank in shared}
        found: list[RankLateness] = []
        for ranks in peers.values():
            # All ranks sample the same steps, but a rank that did not answer lately has fewer.
            common = sorted(set.intersection(*(set(steps[rank]) for rank in ranks)))
            if len(ranks) > 1 and len(common) >= MIN_STEPS:
                together = [{rank: steps[rank][number] for rank in ranks} for number in common]
                found += compare_peers(ranks, together, self._threshold)
        return found

    @override
    def scalars(self) -> dict[str, float]:
        return {"straggler/own": _work(self._last, WORK)} if self._last else {}


class StragglerMonitor(MeasuringCallback[StragglerAccumulator]):
    """Names ranks that keep their peers waiting, and the phase that makes them late.

    Peers are ranks with the same pipeline and tensor coordinates. They do the same work on other data. So a heavy stage
    is no straggler, and neither is a rank that waits for a straggler.

    The work of a rank is the time of data, forward, backward, optimizer and the rest, without waiting. A rank is late
    if its work exceeds the median of its peers by more than `threshold` of the step. A straggler is late in three steps
    of four. The cause is the phase that covers 80 % of the excess, if there is one. If all ranks are equally slow, none
    is late.

    `report()` returns the common keys and these. Times are seconds per step, median over the steps.

        stragglers: [{rank, cause, excess}]
        ranks: [{rank, own, excess, late}]

    | key | meaning, unit |
    |---|---|
    | `cause` | phase that makes the rank late; None if no single phase explains the excess |
    | `own` | work of the rank, seconds |
    | `excess` | work beyond the median of the peers, seconds |
    | `late` | share of the steps in which the rank was late |

    With fewer than 20 steps, or if no rank has a peer, the report has `missing` instead.

    Logged: `straggler/own`, seconds of work of rank 0 in the last step.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import StragglerMonitor

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[StragglerMonitor(threshold=0.1)])
        trainer.fit(MyModule(), MyData())  # names slow ranks after training
        ```

    Args:
        threshold: Share of the step's time, between 0 and 1.
        every_n_batches: Number of batches between two exchanges of results among the ranks. The smallest value of all
            callbacks counts.
        warmup_batches: Number of first batches that are not counted. The largest value of all callbacks counts.
        dirpath: Folder where rank 0 writes `<name>.json` and `<name>.csv` after training. None writes nothing.
        show_table: Print a table after training, on rank 0.

    Raises:
        ValueError: If `threshold` is not between 0 and 1, or a number of steps is too small.

    Source: TraceML names a cause only if it covers 80 % of the lateness.
    """

    def __init__(
        self,
        threshold: float = 0.1,
        every_n_batches: int = 50,
        warmup_batches: int = 2,
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        super().__init__(every_n_batches, warmup_batches, dirpath, show_table)
        if not 0 < threshold < 1:
            raise ValueError(f"`threshold` must be between 0 and 1; got {threshold}")
        self.threshold = threshold

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> StragglerAccumulator:
        return StragglerAccumulator(rank_info(self.open_session), self.threshold)

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        stragglers = report.get("stragglers")
        if not stragglers:
            return None
        table = Table("rank", "later by", "in steps", "cause", title="Slow ranks", box=box.SIMPLE_HEAD)
        late = {row["rank"]: row["late"] for row in report["ranks"]}
        for one in stragglers:
            cause = (one["cause"] or "unattributed").replace("_", " ")
            table.add_row(str(one["rank"]), seconds_text(one["excess"]), percent(late[one["rank"]]), cause)
        return table
