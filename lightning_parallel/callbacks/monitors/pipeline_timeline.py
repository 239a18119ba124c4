"""Timeline of a pipeline: the times of its actions, compared with the planned schedule."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from rich import box
from rich.table import Table
from typing_extensions import override

from lightning_parallel.callbacks.recording.clocks import NOT_COMPARED, ClockOffset, on_one_clock
from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback
from lightning_parallel.mesh import PIPELINE, Mesh
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.schedule import Action, Kind, Schedule
from lightning_parallel.pipeline.simulate import Cost, Timeline, simulate
from lightning_parallel.tracing import Span, Window
from lightning_parallel.tracing.spans import percent

__all__ = ["PipelineAccumulator", "PipelineTimeline", "mean_stage_costs"]

STEPS = 256
"""Number of latest steps whose times the ranks compare."""


class StepTimes(NamedTuple):
    """One step of one rank: its first and last moment, and the time it computed, and was blocked by messages."""

    step: int
    start_ns: int
    end_ns: int
    busy_ns: int
    receive_ns: int
    send_ns: int


class PipelineAccumulator(Accumulator):
    """Measures the actions of this rank.

    Args:
        rank: Global rank of this process.
        mesh: The mesh of all ranks.
        schedule: Schedule of a full step; a step with fewer microbatches does not count. None without a pipeline.
        clocks: See `Session.clocks`; None if all ranks read one clock.
        predicted_s: Predicted seconds of a step, from the plan.
    """

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        schedule: Schedule | None,
        clocks: Mapping[int, ClockOffset] | None = None,
        predicted_s: float | None = None,
    ) -> None:
        self._rank = rank
        self._mesh = mesh
        self._schedule = schedule
        self._clocks = clocks
        self._predicted_s = predicted_s
        row = schedule.rows[mesh.coordinate(rank).pipeline_parallel] if schedule is not None else ()
        self._actions = {str(action): action for action in row}  # spans are named by the text of their action
        self._count: Counter[tuple[int, Kind]] = Counter()
        self._total_ns: Counter[tuple[int, Kind]] = Counter()
        self._steps: deque[StepTimes] = deque(maxlen=STEPS)
        self._last: list[tuple[Action, int, int]] = []

    @override
    def add(self, window: Window) -> None:
        if not self._actions:
            return
        spans = [span for span in window.spans if span.category == "pipeline"]
        # Earlier spans belong to a validation in the pipeline.
        training = spans[-len(self._actions) :]
        # The last batch of an epoch may have fewer microbatches, and so another bubble.
        if {span.name for span in training} != self._actions.keys():
            return
        earlier = spans[: -len(self._actions)]
        self._add_step(window, training, earlier[-1].end_ns if earlier else window.start_ns)

    def _add_step(self, window: Window, training: Sequence[Span], since_ns: int) -> None:
        self._last = [(self._actions[span.name], span.start_ns, span.end_ns) for span in training]
        for (kind, stage, _), start_ns, end_ns in self._last:
            self._count[stage, kind] += 1
            self._total_ns[stage, kind] += end_ns - start_ns
        # The actions of a rank run one after the other, so their times add up.
        busy = sum(end_ns - start_ns for _, start_ns, end_ns in self._last)
        # Messages that ended earlier belong to a validation.
        messages = [span for span in window.spans if span.peer is not None and span.end_ns > since_ns]
        receive = sum(span.blocked_ns for span in messages if span.op == "recv")
        send = sum(span.blocked_ns for span in messages if span.op == "send")
        self._steps.append(StepTimes(window.step, self._last[0][1], self._last[-1][2], busy, receive, send))

    @override
    def share(self) -> dict[str, Any]:
        costs = {key: self._total_ns[key] / count / 1e9 for key, count in self._count.items()}
        last = [(str(action), start_ns, end_ns) for action, start_ns, end_ns in self._last]
        return {"rank": self._rank, "costs": costs, "steps": list(self._steps), "last": last}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        schedule = self._schedule
        if schedule is None:
            return {"missing": ["The strategy has no pipeline, so there is no timeline."]}
        # Use only pipelines whose ranks have all answered: a bubble belongs to the full pipeline.
        shared, uncertainty_ns = on_one_clock(shared, self._clocks, _shifted)
        by_rank = {rank["rank"]: rank for rank in shared}
        pipelines = [ranks for ranks in self._mesh.peers(PIPELINE) if all(_ran(by_rank.get(rank)) for rank in ranks)]
        if not pipelines:
            return {"missing": ["No step ran the full schedule, or the ranks could not exchange their measurements."]}
        costs = mean_stage_costs(schedule, [by_rank[rank]["costs"] for ranks in pipelines for rank in ranks])
        planned = simulate(schedule, costs)
        bubble = {
            # With equal stages, the schedule alone causes the bubble.
            "ideal": simulate(schedule, _mean_cost(costs)).bubble_fraction,
            "simulated": planned.bubble_fraction,
        }
        report: dict[str, Any] = {"schedule": schedule.name, "microbatches": schedule.num_microbatches}
        seconds = {} if self._predicted_s is None else {"predicted": self._predicted_s}
        seconds["simulated"] = planned.makespan_s
        matched = [_common_steps([by_rank[rank] for rank in ranks]) for ranks in pipelines]
        if uncertainty_ns is None or not any(matched):
            reason = NOT_COMPARED if uncertainty_ns is None else "The ranks have no step in common."
            missing = [f"{reason} The measured bubble is left out."]
            return {**report, "bubble": bubble, "seconds": seconds, "missing": missing}
        bubble["measured"] = fmean(_bubble(step) for steps in matched for step in steps)
        lengths = [_length_ns(step) for steps in matched for step in steps]
        seconds["measured"] = median(lengths) / 1e9
        if uncertainty_ns:
            bubble["uncertainty"] = uncertainty_ns / median(lengths)
        rows = []
        for ranks, steps in zip(pipelines, matched):
            rows += self._rows(schedule, ranks, steps, by_rank)
        return {
            **report,
            "bubble": bubble,
            "seconds": seconds,
            "ranks": sorted(rows, key=lambda row: row["rank"]),
            "stages": [_stage_row(stage, cost) for stage, cost in enumerate(costs)],
            # Show one replica, as all replicas run the same schedule.
            "timeline": {
                "step": matched[0][-1][0].step,
                "planned": planned.to_dict(),
                "measured": _measured(schedule, [by_rank[rank] for rank in pipelines[0]]).to_dict(),
            },
        }

    def _rows(
        self,
        schedule: Schedule,
        ranks: Sequence[int],
        steps: Sequence[Sequence[StepTimes]],
        by_rank: Mapping[int, Any],
    ) -> list[dict[str, Any]]:
        """Return the rows of the report for the ranks of one pipeline, in seconds per step."""
        # A step of the pipeline lasts from the first action of any rank to the last action of any rank.
        begins = [min(times.start_ns for times in step) for step in steps]
        ends = [max(times.end_ns for times in step) for step in steps]
        peaks = _measured(schedule, [by_rank[rank] for rank in ranks]).in_flight_peaks
        rows = []
        for position, rank in enumerate(ranks):
            mine = [step[position] for step in steps]
            busy = fmean(times.busy_ns for times in mine)
            length = fmean(end - begin for begin, end in zip(begins, ends))
            before = fmean(times.start_ns - begin for times, begin in zip(mine, begins))
            after = fmean(end - times.end_ns for times, end in zip(mine, ends))
            means = {
                "busy": busy,
                "wait": length - busy,
                "wait_before": before,
                "wait_between": length - busy - before - after,
                "wait_after": after,
                "receive_wait": fmean(times.receive_ns for times in mine),
                "send": fmean(times.send_ns for times in mine),
            }
            rows.append(
                {
                    "rank": rank,
                    "coordinate": self._mesh.coordinate(rank)._asdict(),
                    "stage": position,
                    "stages": list(schedule.stages_of(position)),
                    **{key: value / 1e9 for key, value in means.items()},
                    "in_flight_peak": peaks[position],
                }
            )
        return rows


class PipelineTimeline(MeasuringCallback[PipelineAccumulator]):
    """Compares the steps of a pipeline with its simulated schedule.

    `report()` returns the common keys and these:

        schedule, microbatches
        bubble: {measured, ideal, simulated, uncertainty}
        seconds: {predicted, simulated, measured}
        ranks: [{rank, coordinate, stage, stages, busy, wait, wait_before, wait_between, wait_after, receive_wait, send,
                 in_flight_peak}]
        stages: [{stage, forward, backward} or {stage, forward, input_gradient, weight_gradient}]
        timeline: {step, planned, measured}
        missing: [sentence]

    The bubble is a share of the time from the first to the last action of a step: the share in which the ranks ran no
    action.

    | key of `bubble` | meaning |
    |---|---|
    | `ideal` | bubble of the schedule if all stages took the same time |
    | `simulated` | bubble with each stage's mean times and instant messages; the excess over `ideal` is imbalance |
    | `measured` | bubble of the run; the excess over `simulated` is messages and jitter |
    | `uncertainty` | possible error on several hosts, whose clocks differ |

    | key of `seconds` | time of a step in the pipeline, seconds |
    |---|---|
    | `predicted` | prediction of the plan, with costs measured when the model was split |
    | `simulated` | simulation with each stage's mean times in the run |
    | `measured` | median of the run, with messages and jitter |

    Mean times in the run are longer if ranks share a machine or wait for each other within a stage.

    | key of `ranks` | meaning; times are seconds per step, mean over the last 256 steps |
    |---|---|
    | `stage`, `stages` | position in the pipeline, and the stages there |
    | `busy` | time in which the rank ran actions |
    | `wait` | time in which the rank ran no action: sum of the next three times |
    | `wait_before`, `wait_between`, `wait_after` | before the first action, between actions, after the last |
    | `receive_wait`, `send` | time for which receiving and sending blocked the rank |
    | `in_flight_peak` | most microbatches between forward and backward, over the rank's stages |

    The times of `stages` are seconds per microbatch.

    In `timeline`, `planned` and `measured` are `Timeline.to_dict()` of the same schedule. `planned` is the simulated
    step. `measured` is the last step of the first replica. Without a pipeline there is only `missing`.

    The progress bar shows the measured `bubble`. Nothing is logged, because one rank alone does not know the bubble.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import PipelineParallelStrategy, PipelineTimeline

        trainer = Trainer(devices=2, strategy=PipelineParallelStrategy(), callbacks=[PipelineTimeline()])
        trainer.fit(MyModule(), MyData())  # prints the bubble after training
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
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> PipelineAccumulator:
        session = self.open_session
        engine = getattr(getattr(trainer.strategy, "run", None), "engine", None)
        schedule = engine.schedule if isinstance(engine, PipelineEngine) else None
        # Predict with the costs and the link that were measured for the split of the model.
        plan = engine.plan if isinstance(engine, PipelineEngine) else None
        predicted = None if plan is None else simulate(plan.schedule, plan.stage_costs, plan.link).makespan_s
        return PipelineAccumulator(session.rank, session.mesh, schedule, session.clocks, predicted)

    @override
    def bar_items(self, report: Mapping[str, Any]) -> dict[str, str]:
        share = report.get("bubble", {}).get("measured")
        return {} if share is None else {"bubble": percent(share)}

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        if "ranks" not in report:
            return None
        bubble = ", ".join(f"{key} {report['bubble'][key]:.1%}" for key in ("ideal", "simulated", "measured"))
        table = Table(
            title=f"Pipeline {report['schedule']}, {report['microbatches']} microbatches; bubble: {bubble}",
            box=box.SIMPLE_HEAD,
        )
        for header in ("rank", "stages", "busy ms", "wait ms", "before", "between", "after", "in flight"):
            table.add_column(header, justify="right")
        for row in report["ranks"]:
            times = (row[key] for key in ("busy", "wait", "wait_before", "wait_between", "wait_after"))
            stages = ", ".join(map(str, row["stages"]))
            table.add_row(str(row["rank"]), stages, *(f"{t * 1e3:.2f}" for t in times), str(row["in_flight_peak"]))
        return table


def mean_stage_costs(schedule: Schedule, shared: Sequence[Mapping[tuple[int, Kind], float]]) -> list[Cost]:
    """Average the seconds of every stage over the ranks that hold it, from seconds by (stage, kind).

    A backward without a split counts as input gradient.
    """
    seconds: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for costs in shared:
        for key, value in costs.items():
            seconds[key].append(value)
    # Replicas run the same stages: the mean over replicas describes one pipeline.
    mean = {key: fmean(values) for key, values in seconds.items()}
    result = []
    for stage in range(schedule.num_stages):
        if (stage, Kind.I) in mean:
            result.append(Cost(mean[stage, Kind.F], mean[stage, Kind.I], mean[stage, Kind.W]))
        else:
            result.append(Cost(mean[stage, Kind.F], mean[stage, Kind.B]))
    return result


def _measured(schedule: Schedule, pipeline: Sequence[dict[str, Any]]) -> Timeline:
    """Return the timeline of the last step of one pipeline, from its first action."""
    timeline = Timeline(schedule)
    # Count from the start of each pipeline: replicas need not begin a step together.
    begin_ns = min(start_ns for rank in pipeline for _, start_ns, _ in rank["last"])
    for position, rank in enumerate(pipeline):
        for name, start_ns, end_ns in rank["last"]:
            timeline.record(position, Action.parse(name), (start_ns - begin_ns) / 1e9, (end_ns - begin_ns) / 1e9)
    return timeline


def _mean_cost(costs: Sequence[Cost]) -> Cost:
    return Cost(
        fmean(cost.forward_s for cost in costs),
        fmean(cost.input_gradient_s for cost in costs),
        fmean(cost.weight_gradient_s for cost in costs),
    )


def _stage_row(stage: int, cost: Cost) -> dict[str, Any]:
    row = {"stage": stage, "forward": cost.forward_s}
    # A schedule without a split backward has no actions W.
    if cost.weight_gradient_s == 0:
        return {**row, "backward": cost.input_gradient_s}
    return {**row, "input_gradient": cost.input_gradient_s, "weight_gradient": cost.weight_gradient_s}


def _ran(rank: Mapping[str, Any] | None) -> bool:
    return rank is not None and bool(rank["steps"])


def _common_steps(pipeline: Sequence[Mapping[str, Any]]) -> list[list[StepTimes]]:
    """Collect the steps that all ranks of a pipeline still have, with the times of every rank."""
    rows = [{times.step: times for times in rank["steps"]} for rank in pipeline]
    common = set.intersection(*(set(by_step) for by_step in rows))
    return [[by_step[step] for by_step in rows] for step in sorted(common)]


def _bubble(step: Sequence[StepTimes]) -> float:
    """Return the idle share of a step: the part of its time in which its ranks computed nothing."""
    return 1 - sum(times.busy_ns for times in step) / (len(step) * _length_ns(step))


def _length_ns(step: Sequence[StepTimes]) -> int:
    """Return the nanoseconds from the first action of a step to the last, over all ranks of a pipeline."""
    return max(times.end_ns for times in step) - min(times.start_ns for times in step)


def _shifted(rank: dict[str, Any], offset_ns: int) -> dict[str, Any]:
    """Move the times of a rank to another clock."""
    steps = [
        times._replace(start_ns=times.start_ns + offset_ns, end_ns=times.end_ns + offset_ns) for times in rank["steps"]
    ]
    last = [(name, start_ns + offset_ns, end_ns + offset_ns) for name, start_ns, end_ns in rank["last"]]
    return {**rank, "steps": steps, "last": last}
