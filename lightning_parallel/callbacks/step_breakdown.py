"""Where the time of a step goes, rank by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from rich import box
from rich.table import Table
from typing_extensions import override

from lightning_parallel.callbacks.base import Accumulator, MeasuringCallback, place
from lightning_parallel.callbacks.even_steps import EvenSteps
from lightning_parallel.callbacks.phases import PHASES
from lightning_parallel.mesh import PIPELINE
from lightning_parallel.recorder import OTHER, Span, Window

__all__ = ["BreakdownAccumulator", "StepBreakdown", "union_ns"]

EXPOSED, HIDDEN = "communication_exposed", "communication_hidden"

KEPT = 256
"""Steps in which the ranks compare how long they waited, evenly spread over the run."""


class BreakdownAccumulator(Accumulator):
    """Nanoseconds by phase, of the steps so far.

    Args:
        place: `rank` and `coordinate` of this process.
        missing: What is not seen, in sentences; may grow until `summarize`.
    """

    def __init__(self, place: Mapping[str, Any], missing: Sequence[str] = ()) -> None:
        self._place, self._missing = dict(place), missing
        self._total: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()
        self._steps = self._steps_logged = 0
        self._waits = EvenSteps[int](KEPT)

    @override
    def add(self, window: Window) -> None:
        self._steps += 1
        self._waits.add(window.step, window.phases.get(EXPOSED, 0))
        self.end(window)

    @override
    def end(self, window: Window) -> None:
        for phase, duration_ns in window.phases.items():
            self._total[phase if phase in PHASES else OTHER] += duration_ns
        self._total[HIDDEN] += hidden_ns(window.spans)

    @override
    def share(self) -> dict[str, Any]:
        row = {**self._place, **self._means(self._total, self._steps)} if self._steps else self._place
        return {"row": row, "waits": dict(self._waits.values)}

    def _means(self, total_ns: Mapping[str, int], steps: int) -> dict[str, float]:
        """Seconds per step; `wall` is the sum of the phases."""
        wall = sum(total_ns[phase] for phase in PHASES)
        phases = {phase: total_ns[phase] for phase in (*PHASES[:4], HIDDEN, *PHASES[4:])}
        return {key: value / steps / 1e9 for key, value in {"wall": wall, **phases}.items()}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        report: dict[str, Any] = {"ranks": [rank["row"] for rank in shared if rank["waits"]]}
        if len(report["ranks"]) == len(shared) > 1:
            report["communication_least"] = _least_waits(shared)
        return {**report, "missing": list(self._missing)} if self._missing else report

    @override
    def scalars(self) -> dict[str, float]:
        steps = self._steps - self._steps_logged
        if steps == 0:
            return {}
        recent = Counter({phase: self._total[phase] - self._logged[phase] for phase in self._total})
        self._logged, self._steps_logged = self._total.copy(), self._steps
        return {f"step_breakdown/{key}": value for key, value in self._means(recent, steps).items()}


class StepBreakdown(MeasuringCallback):
    """Divides the time of every step into phases that exclude each other and add up to it.

    | phase | what the main thread did |
    |---|---|
    | `data_wait` | waited for the next batch, or moved it to the device |
    | `forward`, `backward` | ran the step; computed gradients |
    | `communication_exposed` | waited for a collective; where stages are neighbours, see `pipeline_wait` |
    | `pipeline_wait` | waited for another pipeline stage |
    | `optimizer` | updated the parameters, clipped, set gradients to zero |
    | `checkpoint`, `validation` | saved; validated: with all that runs in it |
    | `other` | anything else: hooks, logging, callbacks |

    The innermost phase counts: a collective in the forward is communication. On CUDA these are times of the device, so
    what the host does while the device is busy costs nothing.

    `report()` has, besides the common keys, one row for each rank, in seconds per step:

        ranks: [{rank, coordinate: {axis: index}, wall, data_wait, forward, backward, communication_exposed,
                 communication_hidden, pipeline_wait, optimizer, checkpoint, validation, other}]
        communication_least: [seconds]
        missing: [sentence]

    `wall` is the sum of the phases. `communication_hidden` lies beside it: collectives in flight while the main thread
    did other things. Validation and checkpoints after the last step are shared out among the steps.
    `communication_least`, where there are several ranks, says for each pipeline stage how long every one of its ranks
    was held up by communication in a step: what a rank was held up beyond that it waited for late ranks. `missing`,
    only where something is, says which communication of the strategy is not seen and so counts as forward or backward.

    Logged: `step_breakdown/<phase>`, seconds per step of rank 0, mean over the steps since the last logging.
    """

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> Accumulator:
        assert self.session is not None
        return BreakdownAccumulator(place(self.session), self.session.missing)

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        ranks = report["ranks"]
        if not ranks:
            return None
        title = f"Where a step goes: milliseconds, mean of {report['steps']} steps"
        table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        keys = [key for key in ranks[0] if key not in ("coordinate", "rank")]
        shown = [key for key in keys if any(rank.get(key, 0.0) > 0 for rank in ranks)]
        for header in ("rank", *shown):
            table.add_column(header.replace("_", " "), justify="right")
        for rank in ranks:
            table.add_row(str(rank["rank"]), *(f"{rank[key] * 1e3:.2f}" if key in rank else "-" for key in shown))
        return table


def _least_waits(shared: Sequence[Mapping[str, Any]]) -> list[float]:
    """By pipeline stage, the shortest wait among its ranks in a step, mean over the steps."""
    stages: dict[int, list[dict[int, int]]] = {}
    for rank in shared:
        stages.setdefault(rank["row"]["coordinate"][PIPELINE], []).append(rank["waits"])
    common = {stage: set.intersection(*map(set, waits)) for stage, waits in stages.items()}
    return [
        fmean(min(wait[step] for wait in stages[stage]) for step in steps) / 1e9
        for stage, steps in sorted(common.items())
    ]


def hidden_ns(spans: Iterable[Span]) -> int:
    """How long collectives were in flight, less how long they kept the main thread waiting.

    A collective that was over before it was waited for counts only if something told when. Messages between pipeline
    stages are left out: what hides them is the schedule, see `PipelineTimeline`.
    """
    flights = [
        span for span in spans if span.in_flight is not None and span.peer is None and span.axis != "pipeline_parallel"
    ]
    in_flight = union_ns((span.start_ns, span.complete_ns) for span in flights)
    return max(0, in_flight - sum(span.blocked_ns for span in flights))


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, reached = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
