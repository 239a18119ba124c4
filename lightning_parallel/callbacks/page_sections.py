"""The parts of the page, each from the figures of one or two callbacks; empty where these were not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from lightning_parallel.callbacks import charts
from lightning_parallel.callbacks.charts import Bar, Block, Line, Part
from lightning_parallel.pipeline.simulate import Timeline
from lightning_parallel.tracing.text import bytes_text, count_text, gap_text, percent, rank_label, seconds_text

__all__ = [
    "HELD",
    "PHASES",
    "STEPS",
    "communication",
    "course",
    "found_by",
    "memory",
    "pipeline",
    "section",
    "steps",
]

Report = Mapping[str, Any]

PHASES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "data_wait": "waiting for data",
    "communication_exposed": "waiting for communication",
    "pipeline_wait": "waiting for other stages",
    "checkpoint": "checkpoint",
    "validation": "validation",
    "other": "other",
}
"""Phases of a step in the order in which they are drawn: work, waits (hatched), the rest."""

HELD = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "compression": "compression state",
    "activations_peak": "activations (peak)",
}
"""What memory holds, in the order in which it is drawn."""


def section(name: str, title: str, lead: str, body: str) -> str:
    """A titled part of the page."""
    head = f'<h2 id="{name}">{escape(title)}</h2>' + (f"<p class=lead>{lead}</p>" if lead else "")
    return f'<section aria-labelledby="{name}">{head}{body}</section>'


def found_by(report: Report, callback: str) -> Report:
    """What a callback reported; empty if it was not there."""
    return report.get("reports", {}).get(callback) or {}


def _mesh(report: Report) -> Report:
    return report["run"].get("mesh") or {}


# ------------------------------------------------------------------------------------------------------------ steps


def steps(report: Report) -> str:
    """Where the time of a step went, rank by rank."""
    ranks = found_by(report, "StepBreakdown").get("ranks")
    if not ranks:
        return ""
    rows = [step_bar(rank, rank_label(rank, _mesh(report))) for rank in ranks]
    present = {name: words for name, words in PHASES.items() if any(rank.get(name) for rank in ranks)}
    hidden = any(rank.get("communication_hidden") for rank in ranks)
    keys = {**present, "communication_hidden": "communication behind computation"} if hidden else present
    lead = "Mean of a step on each rank. Hatched parts are waits; the parts of a bar add up to the whole step."
    axes = [axis for axis, size in _mesh(report).items() if size > 1]
    if axes and any(rank.get("coordinate") for rank in ranks):
        letters = ", ".join(f"{axis[0]} {axis.replace('_', ' ')}" for axis in axes)
        lead += f" Beside a rank is its place on the mesh: {letters}."
    if hidden:
        lead += " The strip below a bar is communication that cost nothing, as the rank computed meanwhile."
    body = (
        charts.legend(keys) + charts.bars(rows, "Where the time of a step went, by rank") + _step_table(report, present)
    )
    return section("steps", "Where the step went", lead, body)


def step_bar(rank: Report, label: str) -> Bar:
    """The phases of one rank side by side, hidden communication below."""
    wall = rank["wall"]
    parts = [
        Part(name, rank[name], seconds_text(rank[name]), f", {percent(rank[name] / wall)} of the step")
        for name in PHASES
        if rank.get(name)
    ]
    hidden = rank.get("communication_hidden")
    below = [Part("communication_hidden", hidden, seconds_text(hidden))] if hidden else []
    return Bar(label, parts, seconds_text(wall), below)


def _step_table(report: Report, present: Mapping[str, str]) -> str:
    ranks = found_by(report, "StepBreakdown")["ranks"]
    header = ["", *present.values(), "hidden communication", "step"]
    rows = [
        [
            rank_label(rank, _mesh(report)),
            *(_value(rank.get(name), seconds_text) for name in (*present, "communication_hidden", "wall")),
        ]
        for rank in ranks
    ]
    return _details("The same as a table", charts.table(header, rows, "mean of a step"))


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def _value(value: float | None, write: Any) -> str:
    return "not measured" if value is None else write(value)


# --------------------------------------------------------------------------------------------------------- pipeline


def pipeline(report: Report) -> str:
    """The pipeline as it was planned above as it happened, on one time axis, and its bubble."""
    bubble = found_by(report, "PipelineTimeline").get("bubble", {})
    drawn = found_by(report, "PipelineTimeline").get("timeline") or {}
    if not bubble and not drawn:
        return ""
    timelines = {name: Timeline.from_dict(drawn[name]) for name in ("planned", "measured") if drawn.get(name)}
    body = ""
    if timelines:
        span = max(timeline.makespan_s for timeline in timelines.values())
        titles = {
            "planned": "As planned: the schedule with each stage's mean times and instant messages",
            "measured": f"As it happened in step {drawn.get('step', 0)}",
        }
        panels = "".join(
            f"<h3>{titles[name]}, {seconds_text(timeline.makespan_s)}</h3>{_panel(name, timeline, span)}"
            for name, timeline in timelines.items()
        )
        kinds = {action.kind.value for timeline in timelines.values() for row in timeline.spans for action in row}
        keys = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
        shown = {kind: words for kind, words in keys.items() if kind in kinds}
        body += f"{charts.legend(shown)}<div class=wide><div>{panels}{charts.ticks(span * 1e3, 'ms')}</div></div>"
    lead = "A block is one microbatch in one stage, with its number; where a lane is empty the rank waits."
    if any(timeline.schedule.virtual_stages > 1 for timeline in timelines.values()):
        lead += " Every other stage of a rank is underlined."
    body += _bubble_bars(bubble)
    return section("pipeline", "The pipeline, planned and measured", lead, body)


def _panel(name: str, timeline: Timeline, span: float) -> str:
    start = timeline.start_s
    rows = []
    for rank, row in enumerate(timeline.spans):
        stages = timeline.schedule.stages_of(rank)
        blocks = [
            Block(
                f"{action.kind.value} v{stages.index(action.stage) % 2}",
                begin - start,
                end - start,
                str(action.microbatch),
                f"{action}: stage {action.stage}, microbatch {action.microbatch}, {seconds_text(end - begin)}"
                f" from {seconds_text(begin - start)}",
            )
            for action, (begin, end) in row.items()
        ]
        rows.append((f"stage {', '.join(map(str, stages))}", blocks))
    return charts.lanes(rows, span, f"Pipeline {name}")


def _bubble_bars(bubble: Report) -> str:
    words = {
        "ideal": "schedule alone",
        "simulated": "with these stages",
        "measured": "measured",
    }
    rows = [
        Bar(
            label,
            [Part("forward", 1 - bubble[key], ""), Part("pipeline_wait", bubble[key], percent(bubble[key]))],
            percent(bubble[key]),
        )
        for key, label in words.items()
        if bubble.get(key) is not None
    ]
    if not rows:
        return ""
    text = (
        "<p class=lead>Share of the time in which the ranks wait. From the first row to the second the stages' unequal"
        " times add to it, from the second to the third messages and jitter.</p>"
    )
    return f"<h3>Bubble</h3>{text}{charts.bars(rows, 'Bubble of the pipeline')}"


# ---------------------------------------------------------------------------------------------------- communication


def communication(report: Report) -> str:
    """Time and bytes of communication by mesh axis, and every kind of call."""
    records = found_by(report, "CommunicationProfiler").get("records")
    if not records:
        return ""
    axes: dict[str, list[Report]] = {}
    for record in records:
        axes.setdefault(record["axis"], []).append(record)
    body = charts.bars([_axis_bar(axis, found) for axis, found in axes.items()], "Communication by axis")
    body += _details("Every kind of call", _call_table(records))
    for group in found_by(report, "CommunicationProfiler").get("desynchronised", []):
        where = f"Ranks {group['group']} did not issue the same collectives along {group['axis'].replace('_', ' ')}."
        body += f"<p class=ending><b>{escape(where)}</b> {escape(group['detail'])}</p>"
    lead = (
        "How long a rank waits in a step for communication along each axis of the mesh, and how much it sends; mean"
        " over the ranks."
    )
    return section("communication", "Communication", lead, body)


def _axis_bar(axis: str, records: Sequence[Report]) -> Bar:
    exposed = sum((record.get("exposed") or 0.0) * record["count"] for record in records)
    sent = sum((record.get("wire_bytes") or 0) * record["count"] for record in records)
    part = Part("communication_exposed", exposed, seconds_text(exposed))
    return Bar(axis.replace("_", " "), [part], f"{seconds_text(exposed)}, {bytes_text(sent)}")


def _call_table(records: Sequence[Report]) -> str:
    header = [
        "axis",
        "operation",
        "ranks",
        "type",
        "calls",
        "payload",
        "on the wire",
        "latency",
        "skew",
        "algorithm",
        "bus",
    ]
    rows = [
        [
            record["axis"].replace("_", " "),
            record["op"],
            str(record["group_size"]),
            record.get("dtype") or "",
            count_text(record["count"]),
            _value(record.get("payload_bytes"), bytes_text),
            _value(record.get("wire_bytes"), bytes_text),
            _value(record.get("latency"), seconds_text),
            _value(record.get("skew"), seconds_text),
            _value(record.get("algorithm_bandwidth"), lambda rate: f"{bytes_text(rate)}/s"),
            _value(record.get("bus_bandwidth"), lambda rate: f"{bytes_text(rate)}/s"),
        ]
        for record in records
    ]
    return charts.table(
        header,
        rows,
        "calls per step; bytes and seconds of one call; bandwidths of the algorithm and of the bus",
        merge=True,
    )


# ----------------------------------------------------------------------------------------------------------- memory


def memory(report: Report) -> str:
    """What each rank's memory holds."""
    ranks = found_by(report, "MemoryProfiler").get("ranks")
    if not ranks:
        return ""
    # A run without compression has nothing to measure there; what else is absent was not measured.
    held = {name: words for name, words in HELD.items() if name != "compression" or any(name in rank for rank in ranks)}
    rows = [
        Bar(
            rank_label(rank, _mesh(report)),
            [Part(name, rank[name], bytes_text(rank[name])) for name in held if rank.get(name)],
            bytes_text(sum(rank.get(name) or 0 for name in held)),
        )
        for rank in ranks
    ]
    present = {name: words for name, words in held.items() if any(rank.get(name) for rank in ranks)}
    header = ["", *held.values(), "resident (peak)"]
    cells = [
        [rank_label(rank, _mesh(report)), *(_value(rank.get(name), bytes_text) for name in (*held, "resident_peak"))]
        for rank in ranks
    ]
    body = (
        charts.legend(present)
        + charts.bars(rows, "Memory by rank")
        + _details("The same as a table", charts.table(header, cells))
    )
    return section("memory", "Memory", "What training holds on each rank; shared storage is counted once.", body)


# ------------------------------------------------------------------------------------------------------------ course


def course(report: Report) -> str:
    """Loss, throughput and step time over the steps."""
    series = report.get("series") or {}
    plots = [
        charts.lines([Line(name, thinned(series[key]), gap_text(series[key]))], title, unit)
        for key, name, title, unit in CURVES
        if len(series.get(key, ())) > 1
    ]
    drawn = "".join(plots)
    return section("course", "Over the run", STEPS, f"<div class=plots>{drawn}</div>") if drawn else ""


STEPS = "Steps are batches of this run, counted from 0, as in the trace."


CURVES = (
    ("loss", "loss", "Loss", ""),
    ("samples_per_second", "samples", "Throughput", "samples per second"),
    ("step_seconds", "step", "Step time", "seconds"),
)
"""What is drawn over the steps: key in `series`, name, title, unit."""

_MOST_POINTS = 400


def thinned(points: Sequence[Sequence[Any]]) -> list[tuple[float, float | None]]:
    """At most as many points as can be seen: means of runs of equal length, None where no value is known."""
    size = -(-len(points) // _MOST_POINTS)
    runs = [list(zip(*points[start : start + size])) for start in range(0, len(points), size)]
    known = [[y for y in ys if y is not None] for _, ys in runs]
    return [(fmean(xs), fmean(ys) if ys else None) for (xs, _), ys in zip(runs, known)]
