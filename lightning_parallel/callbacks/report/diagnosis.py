"""Diagnosis of a run from the reports of the other callbacks: the causes of lost time, and remedies.

`RULES` is a table of rules. Each rule reads some figures, and gives advice if they pass a threshold. Every sentence
rests on a figure of the report: a missing figure gives no advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from lightning_parallel.callbacks.monitors.step_times import training_seconds
from lightning_parallel.callbacks.report.figures import Figures, Report
from lightning_parallel.tracing.spans import bytes_text, gap_text, percent, seconds_text

__all__ = ["Advice", "diagnose", "verdict"]

WORTH_SAYING = 0.03
"""Least share of a step for which the diagnosis mentions a loss of time."""


@dataclass(frozen=True)
class Advice:
    """One finding of the diagnosis, and the remedy.

    Attributes:
        kind: `wrong` (results cannot be trusted), `slow` (time is lost), `note`, or `good`.
        title: The finding, with its figure.
        text: The remedy.
        gain: Largest possible saving, as a share of the step's time; None if no time is lost.
        figures: The numbers behind the sentences.
    """

    kind: Literal["wrong", "slow", "note", "good"]
    title: str
    text: str
    gain: float | None = None
    figures: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Convert the advice to values for JSON."""
        return asdict(self)


def diagnose(report: Report) -> list[Advice]:
    """Return advice on a gathered report: wrong results first, then losses of time by their gain, then remarks.

    Args:
        report: `reports` by callback name, with the keys of each callback's `report()`; `run` with facts of the run.
    """
    figures = Figures(report)
    found = [advice for rule in RULES for advice in rule(figures)]
    found.sort(key=lambda advice: (advice.kind != "wrong", -(advice.gain or 0.0)))
    notes = [advice for rule in REMARKS for advice in rule(figures)]
    return [*found, *_completeness(figures, bool(found)), *notes]


def verdict(report: Report) -> str:
    """Compare the ranks with one process, in a sentence; empty without a breakdown of the steps.

    One process would do at most the work of all ranks, one after the other. Several ranks repeat some of this work, so
    the ratio is an upper bound of the gain.
    """
    figures = Figures(report)
    if not figures.has_all_ranks:
        return ""
    wall, count = figures.step, len(figures.ranks)
    phases = ("forward", "backward", "optimizer")
    works = [sum(rank.get(name, 0.0) for name in phases) for rank in figures.ranks]
    work = sum(works)
    if work < wall:
        return (
            f"Slower than one process: all {count} ranks together compute for {seconds_text(work)} of a"
            f" {seconds_text(wall)} step. Use one device, if the model fits on it."
        )
    return (
        f"At most {work / wall:.1f} times as fast as one process: the {count} ranks compute for"
        f" {percent(work / wall / count)} of their time."
    )


# --------------------------------------------------------------------------------------------------------------- wrong


def _loss_not_finite(figures: Figures) -> Iterator[Advice]:
    loss = figures.series.get("loss", [])
    gap = gap_text(loss)
    # With a gradient scaler, single overflows are usual, and the scaler skips them. A loss that stays so is a fault.
    if gap:
        yield Advice(
            "wrong" if loss[-1][1] is None else "note",
            f"The loss is {gap}",
            "The model learns nothing in such steps. Lower the learning rate or warm it up, clip gradients"
            " (`gradient_clip_val`), or use `bf16-mixed` instead of `16-mixed`. `Trainer(detect_anomaly=True)` names"
            " the operation.",
            figures={"points": len(loss), "not_finite": sum(value is None for _, value in loss)},
        )


_MONITORS = {
    "ReplicaDriftMonitor": (
        "Replicas hold different values",
        "The gradients are then averaged over different models. Look for updates outside the optimizer, operations"
        " that differ between ranks, or a faulty device.",
    ),
    "DataShardingMonitor": (
        "The data is not sharded correctly",
        "Let the Trainer set the sampler, or build it with `trainer.strategy.distributed_sampler_kwargs`. Call"
        " `set_epoch` on your own samplers.",
    ),
}


def _monitors_found(figures: Figures) -> Iterator[Advice]:
    for callback, (title, text) in _MONITORS.items():
        findings = figures.of(callback).get("findings", [])
        if findings:
            # Show the first finding only: later findings may be its consequences.
            first = findings[0]
            where = f"optimizer step {first['step']}, rank {', '.join(map(str, first['ranks']))}: {first['detail']}"
            more = f" ({len(findings) - 1} more)" if len(findings) > 1 else ""
            full_title = f"{title}: `{first['name']}`, {where}{more}"
            yield Advice("wrong", full_title, text, figures={"findings": len(findings)})


def _desynchronised(figures: Figures) -> Iterator[Advice]:
    for group in figures.of("CommunicationProfiler").get("desynchronised", []):
        yield Advice(
            "wrong",
            f"Ranks {group['group']} did not issue the same collectives along {group['axis'].replace('_', ' ')}:"
            f" {group['detail']}",
            "Such a run hangs or mixes up tensors. Look for conditions that differ between ranks, around collectives,"
            " metrics, or logging with `sync_dist`.",
            figures={"ranks": len(group["ranks"])},
        )


# ---------------------------------------------------------------------------------------------------------------- slow


_PHASES = {
    "data_wait": (
        "Waiting for data",
        WORTH_SAYING,
        "Raise `num_workers` of the DataLoader, with `persistent_workers=True` and a higher `prefetch_factor`, or make"
        " samples cheaper to read.",
    ),
    "optimizer": ("The optimizer", 0.1, "Use the fused form of the optimizer (`fused=True`), if torch has one."),
    "other": (
        "Other work on the host",
        0.1,
        "Callbacks, logging and hooks take this time. Log less often (`log_every_n_steps`), and look at the gaps in"
        " the trace.",
    ),
}
"""Phases that may take too long: words, threshold as a share of a step, remedy."""


def _long_phases(figures: Figures) -> Iterator[Advice]:
    # The slowest rank counts, not the mean, because the other ranks wait for it.
    for phase, (words, threshold, remedy) in _PHASES.items():
        seconds, rank = figures.longest(phase)
        share = seconds / figures.step if seconds else 0.0
        if share >= threshold:
            yield Advice(
                "slow",
                f"{words} takes {seconds_text(seconds)} of a {seconds_text(figures.step)} step ({percent(share)}, rank"
                f" {rank})",
                remedy,
                share,
                {phase: seconds, "wall": figures.step},
            )


_PAUSES = {
    "checkpoint": (
        "Saving checkpoints",
        "Save less often (`every_n_train_steps` of ModelCheckpoint), or write in the background.",
    ),
    "validation": (
        "Validation",
        "Validate less often (`val_check_interval`), or on fewer batches (`limit_val_batches`).",
    ),
}
"""Phases between steps: words, remedy."""


def _pauses(figures: Figures) -> Iterator[Advice]:
    # Relate pauses to the wall time, not to a step: they are no part of a step.
    steps = figures.of("StepBreakdown").get("steps") or figures.run.get("steps") or 1
    for phase, (words, remedy) in _PAUSES.items():
        seconds, rank = figures.longest(phase)
        wall = max((one["wall"] for one in figures.ranks), default=0.0)
        if seconds and seconds / wall >= 0.1:
            yield Advice(
                "slow",
                f"{words} took {seconds_text(steps * seconds)} of {seconds_text(steps * wall)} in training"
                f" ({percent(seconds / wall)}, rank {rank})",
                remedy,
                seconds / wall,
                {phase: steps * seconds, "wall": steps * wall},
            )


def _stragglers(figures: Figures) -> Iterator[Advice]:
    for straggler in figures.stragglers if figures.ranks else ():  # without ranks, the time of a step is unknown
        excess = straggler["excess"]
        cause = straggler.get("cause") or "unattributed"
        remedy = _CAUSES.get(cause, "Compare its row in the trace with the row of a peer.")
        share = excess / figures.step
        if share >= WORTH_SAYING:
            yield Advice(
                "slow",
                f"Rank {straggler['rank']} is {seconds_text(excess)} later than its peers in every step"
                f" ({percent(share)}; cause: {cause.replace('_', ' ')})",
                f"The other ranks wait for it. {remedy}",
                share,
                {"excess": excess, "wall": figures.step},
            )


_SLOW_DEVICE = "Check its device for longer inputs, other load or a lower clock."
_CAUSES = {
    "data_wait": "Check the files that its DataLoader reads, and their storage.",
    "forward": _SLOW_DEVICE,
    "backward": _SLOW_DEVICE,
    "optimizer": _SLOW_DEVICE,
    "other": "Check its process for callbacks and hooks that run on this rank only.",
}


def _compressing(figures: Figures) -> Iterator[Advice]:
    monitor = figures.of("CompressionMonitor")
    if not figures.ranks or not all(key in monitor for key in ("encode", "decode", "wire")):
        return
    # If coding takes longer than sending, compression is the bottleneck, not the link.
    coding = monitor["encode"] + monitor["decode"]
    share = coding / figures.step
    if coding > monitor["wire"] and share >= WORTH_SAYING:
        yield Advice(
            "slow",
            f"Compressing takes {seconds_text(coding)} of a step, longer than sending the compressed gradients"
            f" ({seconds_text(monitor['wire'])})",
            "Use a cheaper method (`Cast('bf16')`, a lower rank, a larger block). A link as fast as this may need no"
            " compression.",
            share,
            {"coding": coding, "wire": monitor["wire"]},
        )


def _communication(figures: Figures) -> Iterator[Advice]:
    """Advise on the waits that all ranks share; longer waits of some ranks come from late ranks."""
    least = figures.of("StepBreakdown").get("communication_least")
    if not least or not figures.has_all_ranks or min(least) / figures.step < WORTH_SAYING:
        return
    # One value per stage. Communication alone causes the least of them, on every rank.
    wait = min(least)
    share = wait / figures.step
    # Along the pipeline, a rank waits for a stage, not for the link. The rules on the bubble cover these waits.
    by_axis = {axis: seconds for axis, seconds in figures.exposed.items() if axis != "pipeline_parallel"}
    axis = max(by_axis, key=lambda name: by_axis[name], default="")
    of_axis = f", most of it along {axis.replace('_', ' ')}" if axis else ""
    yield Advice(
        "slow",
        f"Every rank waits for communication for at least {seconds_text(wait)} of a {seconds_text(figures.step)} step"
        f" ({percent(share)}{of_axis})",
        f"{_of_shared_cores(figures)}{_less_communication(axis, figures)}",
        share,
        {"communication_exposed": wait, "wall": figures.step},
    )


def _of_shared_cores(figures: Figures) -> str:
    """Return a sentence on ranks that share cores: their waits are also waits for a core."""
    cores = figures.run.get("cores")
    if not cores or cores >= 1:
        return ""
    return f"The ranks share cores ({cores:.2g} per rank), so part of this time they wait for a core. "


def _less_communication(axis: str, figures: Figures) -> str:
    if axis == "tensor_parallel":
        return (
            "Each layer waits for the all-reduces of its tensor-parallel ranks. Use a smaller `tensor_parallel_size`"
            " with more pipeline stages or replicas, or keep the ranks of one group on one node. Or set"
            " `sequence_parallel=True`, or use a larger batch."
        )
    steps = [
        "Use a larger batch per rank, or `accumulate_grad_batches`: with 4 instead of 1, the gradient all-reduce runs a"
        " quarter as often."
    ]
    if "CompressionMonitor" not in figures.reports and not figures.run.get("compression"):
        name = _COMPRESSED.get(figures.run.get("strategy", ""))
        where = f"`{name}(Cast('bf16'))`" if name else "`compression=Cast('bf16')`"
        steps.append(f"Or compress gradients: {where} sends half the bytes, `PowerSGD(rank=4)` a small part.")
    return " ".join(steps)


_COMPRESSED = {f"{name}Strategy": f"Compressed{name}Strategy" for name in ("DDP", "FSDP", "DeepSpeed", "ModelParallel")}
"""Replacements for Lightning's strategies, which take no `compression`."""


def _uneven_ranks(figures: Figures) -> Iterator[Advice]:
    """Advise on waits between ranks of one stage beyond their shared waits, if no rank is late in most steps."""
    least = figures.of("StepBreakdown").get("communication_least")
    if not least or not figures.has_all_ranks or figures.stragglers:  # stragglers explain the waits
        return
    stages: dict[int, list[tuple[float, int]]] = {}
    for rank in figures.ranks:
        stage = rank.get("coordinate", {}).get("pipeline_parallel", 0)
        if "communication_exposed" in rank:
            stages.setdefault(stage, []).append((rank["communication_exposed"], rank["rank"]))
    # If no rank were late, each rank would wait only for the shared time. The mean wait beyond it is lost.
    lost = {stage: fmean(wait for wait, _ in waits) - least[stage] for stage, waits in stages.items()}
    if not lost:
        return
    worst = max(lost, key=lambda stage: lost[stage])
    share = lost[worst] / figures.step
    if share < WORTH_SAYING:
        return
    fewest, waited_for = min(stages[worst])  # the last rank waits least
    most, waiter = max(stages[worst])
    if "StragglerMonitor" not in figures.reports:
        text = "Add `StragglerMonitor()`, which names ranks that are slow in most steps."
    else:
        missing = figures.of("StragglerMonitor").get("missing", ["No rank is slow in most steps."])
        text = f"{' '.join(missing)} Look for inputs of unequal length, and for other load on the machines."
    yield Advice(
        "slow",
        f"Ranks wait for each other for {seconds_text(lost[worst])} of a {seconds_text(figures.step)} step: rank"
        f" {waiter} waits {seconds_text(most)}, rank {waited_for} {seconds_text(fewest)}, and all ranks at once"
        f" {seconds_text(least[worst])}",
        text,
        share,
        {"lost": lost[worst], "most": most, "fewest": fewest, "least": least[worst], "wall": figures.step},
    )


# ------------------------------------------------------------------------------------------------------------ pipeline


def _unexplained_waits(figures: Figures) -> Iterator[Advice]:
    waits = [rank["pipeline_wait"] / training_seconds(rank) for rank in figures.ranks if "pipeline_wait" in rank]
    if figures.bubble or not waits or fmean(waits) < WORTH_SAYING:
        return
    yield Advice(
        "slow",
        f"Ranks wait for other pipeline stages for {percent(fmean(waits))} of a step",
        "Add `PipelineTimeline()`. It tells how much of the wait comes from the schedule, the stages and the"
        " communication.",
        fmean(waits),
        {"pipeline_wait": fmean(waits)},
    )


def _schedule_bubble(figures: Figures) -> Iterator[Advice]:
    bubble = figures.bubble
    measured = bubble.get("measured")
    ideal = bubble.get("ideal")
    if measured is None or ideal is None or ideal < WORTH_SAYING:
        return
    # The bubble (p-1)/(m+p-1) with 2m microbatches, by the bubble with m. The same holds for the other schedules.
    halved = ideal / (2 - ideal)
    # For a given amount of work, a step takes work / (1 - bubble). The gain below is the ratio of two such steps.
    yield Advice(
        "slow",
        f"Pipeline ranks are idle for {percent(measured)} of the time in the pipeline; the schedule alone causes"
        f" {percent(ideal)}",
        _smaller_bubble(halved, figures.run),
        _pipeline_share(figures) * (1 - (1 - ideal) / (1 - halved)),
        {"measured": measured, "ideal": ideal},
    )


def _smaller_bubble(halved: float, run: Report) -> str:
    """Suggest how to shrink a schedule's bubble; `halved` is the bubble with twice the microbatches."""
    count = run.get("num_microbatches")
    samples = run.get("replica_batch")
    if count and samples and count * 2 > samples:  # a microbatch has at least one sample
        text = (
            f"The batch of {samples} samples already has {count} microbatches. A larger batch with twice as many"
            f" microbatches lowers the bubble of the schedule to {percent(halved)}."
        )
    else:
        now = f" (now {count})" if count else ""
        text = f"Use more microbatches{now}: twice as many lower the bubble of the schedule to {percent(halved)}."
    if run.get("schedule") in ("gpipe", "1f1b"):
        text += (
            " Schedules with `virtual_stages` (`interleaved_1f1b`) or a split backward pass (`zb_h1`, `zbv`) have a"
            " smaller bubble. `schedule='auto'` takes the best schedule."
        )
    return text


_BUBBLE_GROWTH = (
    (
        "ideal",
        "simulated",
        "Unequal stages add",
        "Balance the stages: `balance='auto'` splits by measured time. Or give the number of layers of each stage.",
    ),
    (
        "simulated",
        "measured",
        "Communication between stages and varying run times add",
        "Use fewer, larger microbatches, and keep neighbouring stages on one node. The drawing of the pipeline shows"
        " the wait before each action.",
    ),
)
"""Bubble without a cause, bubble with it, the cause, and a remedy."""


def _bubble_growth(figures: Figures) -> Iterator[Advice]:
    bubble = figures.bubble
    for before_key, after_key, cause, remedy in _BUBBLE_GROWTH:
        before = bubble.get(before_key)
        after = bubble.get(after_key)
        if before is None or after is None or after - before < WORTH_SAYING:
            continue
        yield Advice(
            "slow",
            f"{cause} {percent(after - before)} to the pipeline's bubble ({percent(before)} to {percent(after)})",
            remedy,
            _pipeline_share(figures) * (1 - (1 - after) / (1 - before)),
            {before_key: before, after_key: after},
        )


def _pipeline_share(figures: Figures) -> float:
    """Estimate the share of the step in which the pipeline runs; 1 if it was not measured."""
    inside = ("forward", "backward", "communication_exposed", "pipeline_wait")
    shares = [sum(rank.get(phase, 0.0) for phase in inside) / training_seconds(rank) for rank in figures.ranks]
    return max(shares, default=1.0)


# ------------------------------------------------------------------------------------------------------------- remarks


def _completeness(figures: Figures, found_any: bool) -> Iterator[Advice]:
    """Say that ranks are missing, or that nothing holds the run back."""
    ranks = figures.ranks
    if not ranks:
        return
    expected = figures.run.get("world_size", len(ranks))
    # Other ranks may explain the waits of a rank, so an all-clear needs the data of all ranks.
    if len(ranks) < expected:
        known = ", ".join(str(rank["rank"]) for rank in ranks)
        yield Advice(
            "note",
            f"Only {len(ranks)} of {expected} ranks reported ({known}); nothing is known about the other ranks",
            "The ranks could not exchange their figures. The end of the page gives the reason.",
            figures={"ranks": len(ranks), "expected": expected},
        )
    elif not found_any:
        share = figures.useful
        yield Advice(
            "good",
            f"No bottleneck was found: {percent(share)} of the time is forward and backward",
            "To go faster, make the computation itself faster: use a lower precision, a compiled model or a larger"
            " batch.",
            figures={"useful": share},
        )


def _learning_rate(figures: Figures) -> Iterator[Advice]:
    replicas, batch, rate = (figures.run.get(key) for key in ("replicas", "global_batch", "learning_rate"))
    # Remind users without `LearningRateScaling`: no figure shows whether the rate was tuned for this batch.
    if not replicas or not batch or rate is None or replicas < 2 or figures.run.get("scales_learning_rate"):
        return
    yield Advice(
        "note",
        f"The learning rate {rate:g} is not scaled with the batch of {batch:g} samples ({replicas} replicas)",
        f"Did you find this rate with the batch of one replica, {batch / replicas:g} samples? Then the linear rule"
        f" gives {rate * replicas:g}, and the square-root rule, for adaptive optimizers, {rate * replicas**0.5:.3g}."
        " Add a warm-up.",
        figures={"learning_rate": rate, "global_batch": batch, "replicas": replicas},
    )


def _uneven_memory(figures: Figures) -> Iterator[Advice]:
    held = figures.held
    mean = fmean(total for total, _ in held) if held else 0.0
    most, rank = max(held, default=(0, 0))
    if most > 1.25 * mean > 0:
        yield Advice(
            "note",
            f"Rank {rank} holds {bytes_text(most)}, {most / mean:.2f} times the mean of the ranks",
            "This rank limits the largest batch that fits. Set `memory_limit_bytes`, so that stages are split by"
            " memory, or move layers to other stages.",
            figures={"most": most, "mean": mean},
        )


Rule = Callable[[Figures], Iterator[Advice]]

RULES: tuple[Rule, ...] = (
    _loss_not_finite,
    _monitors_found,
    _desynchronised,
    _long_phases,
    _pauses,
    _stragglers,
    _compressing,
    _communication,
    _uneven_ranks,
    _unexplained_waits,
    _schedule_bubble,
    _bubble_growth,
)
"""Rules whose advice is sorted: wrong results first, then losses of time by their gain."""

REMARKS: tuple[Rule, ...] = (_learning_rate, _uneven_memory)
"""Rules whose advice comes last."""
