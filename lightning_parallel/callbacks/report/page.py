"""The page `report.html`: the report of a run as plain data, for the template `page.html.j2`.

Python decides on rows and lengths, the template has the markup. A section without data is None, and left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_parallel.callbacks.monitors.gradient_noise import noise_rows
from lightning_parallel.callbacks.monitors.memory import HELD
from lightning_parallel.callbacks.report.charts import Bar, Curve, Segment, line_chart
from lightning_parallel.callbacks.report.diagnosis import verdict
from lightning_parallel.callbacks.report.figures import Figures, Report
from lightning_parallel.pipeline.plot import draw_svg
from lightning_parallel.pipeline.simulate import Timeline
from lightning_parallel.tracing.spans import bytes_text, count_text, gap_text, percent, rank_label, seconds_text

__all__ = [
    "CURVES",
    "PHASE_LABELS",
    "advice_parts",
    "headline",
    "key_figures",
    "phase_bar",
    "render",
    "render_template",
    "run_line",
]

PHASE_LABELS = {
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
"""Phases of a step in drawing order: work, waits (hatched), the rest."""


def render(report: Report) -> str:
    """Render the page of one run.

    Args:
        report: Contents of `report.json`; every part but `run` may be missing.
    """
    run = report["run"]
    return render_template(
        "run",
        title=headline(run),
        run=run,
        line=run_line(run),
        verdict=verdict(report),
        command=run.get("command"),
        figures=key_figures(report),
        advice=advice_parts(report),
        steps=_steps(report),
        pipeline=_pipeline(report),
        communication=_communication(report),
        memory=_memory(report),
        charts=_charts(report),
        findings=_findings(report),
        compression=_compression(report),
        noise=noise_rows(Figures(report).of("GradientNoiseScale")),
        missing=_missing(report),
        trace=report.get("trace"),
        versions=", ".join(f"{name} {version}" for name, version in _versions(run).items()),
    )


def _versions(run: Report) -> dict[str, str]:
    return {**run.get("versions", {}), **({"commit": run["commit"]} if run.get("commit") else {})}


def render_template(kind: str, **context: Any) -> str:
    """Fill the template: `kind` is `run` or `comparison`."""
    return _environment().get_template("page.html.j2").render(kind=kind, **context)


@cache
def _environment() -> Environment:
    # Names, errors and findings come from the user's run, so the template must escape them.
    environment = Environment(
        loader=PackageLoader("lightning_parallel.callbacks.report", package_path=""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,  # a misspelt name is an error, not an empty place on the page
    )
    environment.filters |= {"code_spans": _code_spans, "percent": percent, "seconds": seconds_text}
    return environment


def _code_spans(text: str) -> list[tuple[bool, str]]:
    """Divide text at words in back-ticks: (whether it is code, text)."""
    # A split by a pattern with a group alternates text and code. A single back-tick remains text.
    parts: list[str] = re.split(r"`([^`]+)`", text)
    return [(index % 2 == 1, part) for index, part in enumerate(parts)]


def _mesh(report: Report) -> Report:
    mesh: Report = report["run"].get("mesh") or {}
    return mesh


def _cell(value: float | None, write: Callable[[float], str]) -> str:
    return "not measured" if value is None else write(value)


# -------------------------------------------------------------------------------------------------------------- header


def headline(run: Report) -> str:
    """Describe the run in a few words: model and size."""
    return f"{run.get('model', 'Training')} on {run['world_size']} rank{'s' if run['world_size'] > 1 else ''}"


def run_line(run: Report) -> str:
    """Describe the settings of a run in one line."""
    mesh = run.get("mesh") or {}
    sizes = " × ".join(f"{size} {axis.replace('_', ' ')}" for axis, size in mesh.items() if size > 1)
    schedule = run.get("schedule")
    microbatches = f", {run['num_microbatches']} microbatches" if run.get("num_microbatches") else ""
    facts = [
        run.get("strategy"),
        sizes,
        f"schedule {schedule}{microbatches}" if schedule else None,
        f"global batch {run['global_batch']:g}" if run.get("global_batch") else None,
        f"learning rate {run['learning_rate']:g}" if run.get("learning_rate") is not None else None,
        run.get("precision"),
        run.get("device"),
        run.get("host"),
        f"{_counted(run['cores'], 'core')} and {_counted(run['threads'], 'thread')} per rank"
        if run.get("cores")
        else None,
        f"{run['steps']} steps in {seconds_text(run['seconds'])}" if "seconds" in run else f"{run['steps']} steps",
        # Show minutes, without seconds and the time zone.
        run.get("started", "")[:16],
    ]
    return " · ".join(fact for fact in facts if fact)


def _counted(number: float, noun: str) -> str:
    return f"{number:.2g} {noun}{'' if number == 1 else 's'}"


def key_figures(report: Report) -> list[tuple[str, str]]:
    """Choose the numbers at the top: (value, words)."""
    found = Figures(report)
    figures = []
    if found.ranks:
        pauses = max(rank.get("validation", 0.0) + rank.get("checkpoint", 0.0) for rank in found.ranks)
        wall = max(rank["wall"] for rank in found.ranks)
        with_pauses = f" ({seconds_text(wall)} with validation and checkpoints)" if pauses else ""
        # `Throughput` covers the same steps, so samples per second and seconds per step give the batch.
        step = seconds_text(found.throughput.get("seconds_per_step", found.step))
        figures.append((step, f"per step{with_pauses}"))
        figures.append((percent(found.useful), "of the steps in forward and backward"))
        if pauses:
            figures.append((percent(pauses / wall), "of the run in validation and checkpoints"))
    for key, words in (("samples_per_second", "samples per second"), ("tokens_per_second", "tokens per second")):
        if found.throughput.get(key) is not None:
            figures.append((count_text(found.throughput[key]), words))
    utilisation = found.throughput.get("model_flops_utilisation")
    for share, words in ((utilisation, "of peak FLOP/s"), (found.bubble.get("measured"), "pipeline bubble")):
        if share is not None:
            figures.append((percent(share), words))
    return figures


_SHOWN = 3
"""Number of losses of time to show at once; the page opens the rest on demand."""


def advice_parts(report: Report) -> tuple[list[Report], list[Report]]:
    """Divide the diagnosis into advice to show at once, and advice with smaller gains."""
    found: Sequence[Report] = report.get("diagnosis", [])
    # The diagnosis sorts losses of time by their gain. Hide only such losses, and never advice on wrong results.
    small = [advice for advice in found if advice["kind"] == "slow"][_SHOWN:]
    return [advice for advice in found if advice not in small], small


# --------------------------------------------------------------------------------------------------- steps and pipeline


def _steps(report: Report) -> dict[str, Any] | None:
    """Gather where the time of a step went: bars and table, one row per rank."""
    ranks = Figures(report).of("StepBreakdown").get("ranks")
    if not ranks:
        return None
    mesh = _mesh(report)
    present = {name: words for name, words in PHASE_LABELS.items() if any(rank.get(name) for rank in ranks)}
    names = (*present, "communication_hidden", "wall")
    # Labels of ranks name axes by a letter. The page explains the letters if a rank has a coordinate.
    located = any(rank.get("coordinate") for rank in ranks)
    return {
        "phases": present,
        "hidden": any(rank.get("communication_hidden") for rank in ranks),
        "axes": [f"{axis[0]} {axis.replace('_', ' ')}" for axis, size in mesh.items() if size > 1 and located],
        "bars": [phase_bar(rank, rank_label(rank, mesh)) for rank in ranks],
        "rows": [[rank_label(rank, mesh), *(_cell(rank.get(name), seconds_text) for name in names)] for rank in ranks],
    }


def phase_bar(rank: Report, label: str) -> Bar:
    """Create the bar of one rank: its phases in sequence, with hidden communication below."""
    wall = rank["wall"]
    segments = [
        Segment(name, rank[name], seconds_text(rank[name]), f", {percent(rank[name] / wall)} of the step")
        for name in PHASE_LABELS
        if rank.get(name)
    ]
    hidden = rank.get("communication_hidden")
    # Hidden communication overlaps the phases, so it is no part of the bar's length.
    below = [Segment("communication_hidden", hidden, seconds_text(hidden))] if hidden else []
    return Bar(label, segments, seconds_text(wall), below)


_DRAWING_WIDTH = 1120
"""Width in pixels of a drawing on a wide screen; on a narrow screen the drawing scrolls."""


def _pipeline(report: Report) -> dict[str, Any] | None:
    """Draw the planned pipeline above the measured pipeline, on one time axis, and the bubble."""
    found = Figures(report).of("PipelineTimeline")
    step = found.get("timeline") or {}
    titles = {"planned": "Planned", "measured": f"Measured in step {step.get('step', 0)}"}
    timelines = [(title, Timeline.from_dict(step[name])) for name, title in titles.items() if step.get(name)]
    labels = {"ideal": "schedule alone", "simulated": "measured stages", "measured": "measured"}
    bars = []
    for key, label in labels.items():
        share = found.get("bubble", {}).get(key)
        if share is not None:
            segments = [Segment("forward", 1 - share, ""), Segment("pipeline_wait", share, percent(share))]
            off = found["bubble"].get("uncertainty") if key == "measured" else None
            bars.append(Bar(label, segments, percent(share) + (f" ± {percent(off)}" if off else "")))
    if not timelines and not bars:
        return None
    svg = draw_svg(timelines, _DRAWING_WIDTH, margin=0, row_name="p") if timelines else None
    return {"svg": svg, "bubble": bars, "seconds": _pipeline_seconds(found.get("seconds", {}))}


def _pipeline_seconds(seconds: Report) -> list[list[str]]:
    """Compare the predicted, the simulated and the measured step, with the causes of their differences."""
    rows = []
    before = None
    for key, words, gap in _PIPELINE_SECONDS:
        value = seconds.get(key)
        if value is not None:
            longer = "" if before is None else f"{percent(value / before - 1)}: {gap}"
            rows.append([words, seconds_text(value), longer])
            before = value
    return rows if len(rows) > 1 else []


_PIPELINE_SECONDS = (
    ("predicted", "predicted by the plan", ""),
    ("simulated", "simulated with the measured stages", "other load, or waits within stages"),
    ("measured", "measured (median)", "communication and jitter"),
)
"""Key in `seconds` of `PipelineTimeline`, words, and the cause of the difference to the previous row."""


# --------------------------------------------------------------------------------------------- communication and memory


def _bandwidth_text(rate: float) -> str:
    return f"{bytes_text(rate)}/s"


_CALL_COLUMNS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("payload_bytes", bytes_text),
    ("wire_bytes", bytes_text),
    ("latency", seconds_text),
    ("skew", seconds_text),
    ("algorithm_bandwidth", _bandwidth_text),
    ("bus_bandwidth", _bandwidth_text),
)


_SKEW = [key for key, _ in _CALL_COLUMNS].index("skew")


def _communication(report: Report) -> dict[str, Any] | None:
    """Gather time and bytes of communication by mesh axis, and every kind of call."""
    figures = Figures(report)
    if not figures.records:
        return None
    sent = figures.sent
    # Group the calls by axis, in the order of the bars of the axes.
    axes = list(sent)
    records = sorted(figures.records, key=lambda record: axes.index(record["axis"]))
    return {
        "bars": [_axis_bar(axis, seconds, sent[axis]) for axis, seconds in figures.exposed.items()],
        "rows": [_call_row(record) for record in records],
        "desynchronised": figures.of("CommunicationProfiler").get("desynchronised", []),
    }


def _call_row(record: Report) -> list[str]:
    call = [record["axis"].replace("_", " "), record["op"], str(record["group_size"]), record.get("dtype") or ""]
    measured = [_cell(record.get(key), write) for key, write in _CALL_COLUMNS]
    if "skew_uncertainty" in record:
        measured[_SKEW] += f" ± {seconds_text(record['skew_uncertainty'])}"
    return [*call, count_text(record["count"]), *measured]


def _axis_bar(axis: str, exposed: float, sent: float) -> Bar:
    segment = Segment("communication_exposed", exposed, seconds_text(exposed))
    return Bar(axis.replace("_", " "), [segment], f"{seconds_text(exposed)}, {bytes_text(sent)}")


_HELD_LABELS = {"compression": "compression state", "activations_peak": "activations (peak)"}


def _memory(report: Report) -> dict[str, Any] | None:
    """Gather the parts of each rank's memory: bars and table."""
    ranks = Figures(report).of("MemoryProfiler").get("ranks")
    if not ranks:
        return None
    mesh = _mesh(report)
    # A run without compression has no such memory. Any other missing key was not measured.
    keys = [key for key in HELD if key != "compression" or any(key in rank for rank in ranks)]
    bars = []
    for rank in ranks:
        segments = [Segment(key, rank[key], bytes_text(rank[key])) for key in keys if rank.get(key)]
        bars.append(Bar(rank_label(rank, mesh), segments, bytes_text(sum(rank.get(key) or 0 for key in keys))))
    # The memory of the process includes all parts and more, so it is a column but no segment.
    columns = (*keys, "resident_peak")
    labels = {key: _HELD_LABELS.get(key, key) for key in keys}
    return {
        "labels": labels,
        "present": {key: label for key, label in labels.items() if any(rank.get(key) for rank in ranks)},
        "bars": bars,
        "rows": [[rank_label(rank, mesh), *(_cell(rank.get(key), bytes_text) for key in columns)] for rank in ranks],
    }


# ------------------------------------------------------------------------------------------------------------ the rest

CURVES = (
    ("loss", "loss", "Loss", ""),
    ("samples_per_second", "samples", "Throughput", "samples per second"),
    ("step_seconds", "step", "Step time", "seconds"),
)
"""Quantities to draw over the steps: key in `series`, name, title, unit."""


def _charts(report: Report) -> list[Any]:
    """Draw loss, throughput and step time over the steps."""
    series = report.get("series") or {}
    found = [(series[key], name, title, unit) for key, name, title, unit in CURVES if series.get(key)]
    charts = [line_chart([Curve(name, points, gap_text(points))], title, unit) for points, name, title, unit in found]
    return [chart for chart in charts if chart is not None]


_MOST_FINDINGS = 50
"""Most rows of a table of findings."""


def _findings(report: Report) -> dict[str, Any]:
    """Gather the findings of the monitors; leave out monitors that the run did not use."""
    monitor = Figures(report).of("StragglerMonitor")
    stragglers = monitor.get("stragglers")
    slow = [
        [f"rank {one['rank']}", (one.get("cause") or "unattributed").replace("_", " "), seconds_text(one["excess"])]
        for one in stragglers or ()
    ]
    # Without a comparison of ranks, the page must not suggest that no rank was slow.
    compared = stragglers is not None and not monitor.get("missing")
    tables: dict[str, Any] = {}
    for callback in ("ReplicaDriftMonitor", "DataShardingMonitor"):
        found = Figures(report).of(callback).get("findings")
        if found is not None:
            rows = [[str(f["step"]), f["name"], ", ".join(map(str, f["ranks"])), f["detail"]] for f in found]
            good = _all_equal(report, callback)
            tables[callback] = {"rows": rows[:_MOST_FINDINGS], "count": len(rows), "good": good}
    return {"slow": slow, "none_slow": compared and not slow, "tables": tables}


def _all_equal(report: Report, callback: str) -> str:
    """Describe the values that a monitor without findings compared: few if there is one replica."""
    run = report["run"]
    is_alone = run.get("replicas", 2) == 1
    if callback == "DataShardingMonitor":
        if is_alone:
            return "There is one replica. All its ranks read the same batches."
        return "Each sample went to one replica. The ranks of a replica read the same batches."
    if not is_alone:
        return "All values that must be equal between replicas were equal."
    count = sum(Figures(report).of(callback).get("compared", {}).values())
    if not count:
        return "There is one replica, so there was nothing to compare."
    return f"There is one replica. The {count} values that several of its ranks hold were equal."


_COMPRESSION: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("dense_bytes", "dense", bytes_text),
    ("sent_bytes", "sent", bytes_text),
    ("inside_bytes", "sent inside the node", bytes_text),
    ("ratio", "ratio", lambda value: f"{count_text(value)} : 1"),
    ("relative_error", "relative error", percent),
    ("cosine", "cosine similarity to the uncompressed mean", count_text),
    ("residual_norm", "norm of the error-feedback residual", count_text),
    ("encode", "encode", seconds_text),
    ("wire", "wire", seconds_text),
    ("decode", "decode", seconds_text),
)
"""Key of `CompressionMonitor`, words, format."""


def _compression(report: Report) -> list[list[str]]:
    monitor = Figures(report).of("CompressionMonitor")
    return [[words, write(monitor[key])] for key, words, write in _COMPRESSION if monitor.get(key) is not None]


_SIGNALS = {
    "StepBreakdown": "The phases of a step",
    "CommunicationProfiler": "Communication by axis",
    "PipelineTimeline": "The pipeline bubble",
    "Throughput": "Throughput",
    "MemoryProfiler": "Memory",
    "StragglerMonitor": "Slow ranks",
    "ReplicaDriftMonitor": "Differences between replicas",
    "DataShardingMonitor": "Sharding of the data",
    "CompressionMonitor": "Cost and savings of compression",
}
"""Each callback, and the part of the page that needs it."""


def _missing(report: Report) -> list[tuple[str, str]]:
    """List the missing parts of the page, and the callbacks that measure them."""
    reports = report.get("reports", {})
    items = [(_SIGNALS[name], f"add `{name}()`") for name in _applicable(report["run"]) if name not in reports]
    for name, found in reports.items():
        items += [(sentence, name) for sentence in found.get("missing", ())]
        if "incomplete" in found:
            items.append((f"The figures of other ranks: {found['incomplete']}", name))
    return items


def _applicable(run: Report) -> Iterator[str]:
    """Name the callbacks that apply to this kind of run."""
    # A section that does not apply to the run is no gap in the measurements.
    needs_peers = ("CommunicationProfiler", "StragglerMonitor", "ReplicaDriftMonitor", "DataShardingMonitor")
    for name in _SIGNALS:
        if name == "PipelineTimeline" and (run.get("mesh") or {}).get("pipeline_parallel", 1) == 1:
            continue
        if name == "CompressionMonitor" and not run.get("compression"):
            continue
        if name in needs_peers and run["world_size"] == 1:
            continue
        yield name
