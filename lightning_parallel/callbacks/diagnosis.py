"""What holds a run back and what to do about it, read from the reports of the other callbacks.

Every sentence rests on a figure of the report: a signal that was not measured gives no advice. What is wrong comes
first, then what costs time, the costliest first, then remarks without a gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning_parallel.callbacks.advice import WORTH_SAYING, Advice
from lightning_parallel.callbacks.diagnosis_pipeline import diagnose_pipeline
from lightning_parallel.callbacks.page_sections import HELD
from lightning_parallel.tracing.text import bytes_text, gap_text, percent, seconds_text

__all__ = ["diagnose"]

Report = Mapping[str, Any]


def diagnose(report: Report) -> list[Advice]:
    """Read a gathered report (`reports`, `run`) and say what to do, in order of expected gain.

    Args:
        report: `reports` by callback name, with the keys of each callback's `report()`; `run` with facts of the run.
    """
    reports, run = report.get("reports", {}), report.get("run", {})
    ranks = reports.get("StepBreakdown", {}).get("ranks", [])
    found = [*_loss(report), *_wrong(reports)]
    if ranks:
        found += [
            *_data(ranks, reports),
            *_lateness(ranks, reports),
            *_rare(ranks, reports),
            *_compression(reports, ranks),
        ]
        if len(ranks) == run.get("world_size", len(ranks)) > 1:
            found += [*_communication(ranks, report), *_uneven(ranks, reports)]
    found += diagnose_pipeline(reports, ranks, run)
    found.sort(key=lambda advice: (advice.kind != "wrong", -(advice.gain or 0.0)))
    return [*found, *_complete(ranks, run, bool(found)), *_learning_rate(report), *_memory(reports)]


# ------------------------------------------------------------------------------------------------------------ wrong


def _loss(report: Report) -> Iterator[Advice]:
    points = report.get("series", {}).get("loss", [])
    if gap_text(points):
        yield Advice(
            "wrong" if points[-1][1] is None else "note",
            f"The loss is {gap_text(points)}",
            "Such steps teach nothing. Lower the learning rate or warm it up, clip gradients (`gradient_clip_val`), use"
            " `bf16-mixed` in place of `16-mixed`; `Trainer(detect_anomaly=True)` names the operation.",
            None,
            {"points": len(points), "not_finite": sum(value is None for _, value in points)},
        )


def _wrong(reports: Report) -> Iterator[Advice]:
    for name, title, text in (
        (
            "ReplicaDriftMonitor",
            "Replicas hold different values",
            "The gradients of such a run are those of no model. Look for updates outside the optimizer, operations that"
            " differ between ranks, or a faulty device; `ReplicaDriftMonitor(action='heal')` makes them equal again.",
        ),
        (
            "DataShardingMonitor",
            "The data is not divided as it should be",
            "Let the Trainer set the sampler, or build it with `trainer.strategy.distributed_sampler_kwargs`, and call"
            " `set_epoch` on samplers of your own.",
        ),
    ):
        findings = reports.get(name, {}).get("findings", [])
        if findings:
            first = findings[0]
            where = f"optimizer step {first['step']}, rank {', '.join(map(str, first['ranks']))}: {first['detail']}"
            more = f" ({len(findings) - 1} more)" if len(findings) > 1 else ""
            title = f"{title}: `{first['name']}`, {where}{more}"
            yield Advice("wrong", title, text, None, {"findings": len(findings)})
    for group in reports.get("CommunicationProfiler", {}).get("desynchronised", []):
        yield Advice(
            "wrong",
            f"Ranks {group['group']} did not issue the same collectives along {group['axis'].replace('_', ' ')}:"
            f" {group['detail']}",
            "Such a run hangs or mixes up tensors. Look for collectives, logging with `sync_dist` or metrics inside of"
            " conditions that differ between ranks.",
            None,
            {"ranks": len(group["ranks"])},
        )


# -------------------------------------------------------------------------------------------------- where time goes


def _wall(ranks: Sequence[Report]) -> float:
    return max(rank["wall"] for rank in ranks)


def _times(phase: str, ranks: Sequence[Report], reports: Report) -> list[tuple[float, int]]:
    """The time of a phase on each rank, without those that are late because of it: `_lateness` speaks of them."""
    late = {(one["rank"], one.get("cause")) for one in reports.get("StragglerMonitor", {}).get("stragglers", [])}
    return [(rank[phase], rank["rank"]) for rank in ranks if phase in rank and (rank["rank"], phase) not in late]


def _data(ranks: Sequence[Report], reports: Report) -> Iterator[Advice]:
    waits = _times("data_wait", ranks, reports)
    if not waits:
        return
    wait, slowest = max(waits)
    share = wait / _wall(ranks)
    if share >= WORTH_SAYING:
        yield Advice(
            "slow",
            f"Waiting for data takes {seconds_text(wait)} of a {seconds_text(_wall(ranks))} step ({percent(share)},"
            f" rank {slowest})",
            "Load batches ahead of need: raise `num_workers` of the DataLoader, with `persistent_workers=True` and a"
            " higher `prefetch_factor`, or make a sample cheaper to read.",
            share,
            {"data_wait": wait, "wall": _wall(ranks)},
        )


def _communication(ranks: Sequence[Report], report: Report) -> Iterator[Advice]:
    """What every rank waits in a step is communication; what some wait beyond that is lateness of the others."""
    least = report["reports"]["StepBreakdown"].get("communication_least")
    if not least:
        return
    wall, wait = _wall(ranks), min(least)
    share = wait / wall
    if share < WORTH_SAYING:
        return
    records = report.get("reports", {}).get("CommunicationProfiler", {}).get("records", [])
    by_axis: dict[str, float] = {}
    for record in records:
        axis = record["axis"]
        if "exposed" in record and axis != "pipeline_parallel":  # there a rank waits for a stage, see `_bubble`
            by_axis[axis] = by_axis.get(axis, 0.0) + record["exposed"] * record["count"]
    axis = max(by_axis, key=lambda name: by_axis[name], default="")
    of_axis = f", most of it along {axis.replace('_', ' ')}" if axis else ""
    title = (
        f"Every rank is held up by communication for at least {seconds_text(wait)} of a {seconds_text(wall)} step"
        f" ({percent(share)}{of_axis})"
    )
    yield Advice("slow", title, _remedy(axis, report), share, {"communication_exposed": wait, "wall": wall})


def _remedy(axis: str, report: Report) -> str:
    if axis == "tensor_parallel":
        return (
            "Each layer waits for its peers: use a smaller `tensor_parallel_size` with more pipeline stages or"
            " replicas, keep the ranks of one group on one node, set `sequence_parallel=True`, or give each step a"
            " larger batch."
        )
    run = report.get("run", {})
    steps = [
        "a larger batch per rank or `accumulate_grad_batches` (4 instead of 1 exchanges gradients a quarter as often)"
    ]
    if "CompressionMonitor" not in report.get("reports", {}) and not run.get("compression"):
        name = _COMPRESSED.get(run.get("strategy", ""))
        where = f"`{name}(Cast('bf16'))`" if name else "`compression=Cast('bf16')`"
        steps.append(f"compressed gradients ({where} sends half the bytes, `PowerSGD(rank=4)` a small part)")
    return f"Exchange gradients less often, or fewer bytes: {'; '.join(steps)}."


_COMPRESSED = {f"{name}Strategy": f"Compressed{name}Strategy" for name in ("DDP", "FSDP", "DeepSpeed", "ModelParallel")}
"""What takes the place of Lightning's own strategies, which know no `compression`."""


def _uneven(ranks: Sequence[Report], reports: Report) -> Iterator[Advice]:
    """Waits of ranks of one stage beyond what all of them wait; `_lateness` names ranks that are always late."""
    monitor, least = reports.get("StragglerMonitor"), reports["StepBreakdown"].get("communication_least")
    if not least or (monitor or {}).get("stragglers"):
        return
    stages: dict[int, list[tuple[float, int]]] = {}
    for rank in ranks:
        stage = rank.get("coordinate", {}).get("pipeline_parallel", 0)
        if "communication_exposed" in rank:
            stages.setdefault(stage, []).append((rank["communication_exposed"], rank["rank"]))
    lost = {stage: fmean(wait for wait, _ in waits) - least[stage] for stage, waits in stages.items()}
    worst, wall = max(lost, key=lambda stage: lost[stage]), _wall(ranks)
    if lost[worst] / wall < WORTH_SAYING:
        return
    (fewest, waited_for), (most, waiter) = min(stages[worst]), max(stages[worst])
    if monitor is None:
        why = "Add `StragglerMonitor()`, which names ranks that are late in most steps."
    else:
        known = " ".join(monitor.get("missing", ["No rank is late in most steps."]))
        why = f"{known} Look for inputs of unequal length, and for other load on the machines."
    title = (
        f"Ranks wait for each other for {seconds_text(lost[worst])} of a {seconds_text(wall)} step: rank {waiter} is"
        f" held up for {seconds_text(most)}, rank {waited_for} for {seconds_text(fewest)}, all of them at once for"
        f" {seconds_text(least[worst])}"
    )
    figures = {"lost": lost[worst], "most": most, "fewest": fewest, "least": least[worst], "wall": wall}
    yield Advice("slow", title, why, lost[worst] / wall, figures)


def _lateness(ranks: Sequence[Report], reports: Report) -> Iterator[Advice]:
    wall = _wall(ranks)
    for straggler in reports.get("StragglerMonitor", {}).get("stragglers", []):
        excess, cause = straggler["excess"], straggler.get("cause") or "unattributed"
        if excess / wall < WORTH_SAYING:
            continue
        yield Advice(
            "slow",
            f"Rank {straggler['rank']} is {seconds_text(excess)} later than its peers in every step"
            f" ({percent(excess / wall)}; cause: {cause.replace('_', ' ')})",
            f"The other ranks wait for it. {_CAUSES.get(cause, 'Compare its row in the trace with that of a peer.')}",
            excess / wall,
            {"excess": excess, "wall": wall},
        )


_SLOW_DEVICE = "Look for longer inputs, another load or a lower clock on its device."
_CAUSES = {
    "data_wait": "Look at what its DataLoader reads, and from where.",
    "forward": _SLOW_DEVICE,
    "backward": _SLOW_DEVICE,
    "optimizer": _SLOW_DEVICE,
    "other": "Look for what its process does besides: callbacks and hooks that run on this rank only.",
}


def _rare(ranks: Sequence[Report], reports: Report) -> Iterator[Advice]:
    wall = _wall(ranks)
    remedies = {
        "checkpoint": "Save less often (`every_n_train_steps` of ModelCheckpoint), or write in the background.",
        "validation": "Validate less often (`val_check_interval`), or on fewer batches (`limit_val_batches`).",
        "optimizer": "Use the fused form of the optimizer (`fused=True`) where torch has one.",
        "other": "This is host work outside the phases: callbacks, logging, hooks. Log less often"
        " (`log_every_n_steps`), and look at the gaps in the trace.",
    }
    for phase, remedy in remedies.items():
        longest, _ = max(_times(phase, ranks, reports), default=(0.0, 0))
        share = longest / wall
        if share >= 0.1:
            title = f"{phase.capitalize()} takes {seconds_text(longest)} of a {seconds_text(wall)} step"
            yield Advice("slow", f"{title} ({percent(share)})", remedy, share, {phase: longest, "wall": wall})


# ----------------------------------------------------------------------------------------------------- compression


def _compression(reports: Report, ranks: Sequence[Report]) -> Iterator[Advice]:
    monitor = reports.get("CompressionMonitor", {})
    if not ranks or not all(key in monitor for key in ("encode", "decode", "wire")):
        return
    coding, wall = monitor["encode"] + monitor["decode"], _wall(ranks)
    if coding > monitor["wire"] and coding / wall >= WORTH_SAYING:
        yield Advice(
            "slow",
            f"Compressing takes {seconds_text(coding)} of a step, sending what is compressed"
            f" {seconds_text(monitor['wire'])}",
            "Take a cheaper method (`Cast('bf16')`, a lower rank, a larger block), or none on a link as fast as this.",
            coding / wall,
            {"coding": coding, "wire": monitor["wire"]},
        )


# ------------------------------------------------------------------------------------------------------------ notes


def _learning_rate(report: Report) -> Iterator[Advice]:
    run = report.get("run", {})
    replicas, batch, rate = (run.get(key) for key in ("replicas", "global_batch", "learning_rate"))
    if not replicas or not batch or rate is None or replicas < 2 or run.get("learning_rate_scaled"):
        return
    alone = batch / replicas
    yield Advice(
        "note",
        f"The learning rate {rate:g} is not scaled with the batch of {batch:g} samples ({replicas} replicas)",
        f"If it was found with the batch of one replica, {alone:g} samples, the linear rule gives {rate * replicas:g}"
        f" and the square-root rule, for adaptive optimizers, {rate * replicas**0.5:.3g}; with a warm-up.",
        None,
        {"learning_rate": rate, "global_batch": batch, "replicas": replicas},
    )


def _memory(reports: Report) -> Iterator[Advice]:
    ranks = reports.get("MemoryProfiler", {}).get("ranks", [])
    held = [(sum(rank.get(part, 0) for part in HELD), rank["rank"]) for rank in ranks]
    if len(held) < 2 or not sum(total for total, _ in held):
        return
    mean = sum(total for total, _ in held) / len(held)
    most, rank = max(held)
    if most > 1.25 * mean:
        yield Advice(
            "note",
            f"Rank {rank} holds {bytes_text(most)}, {most / mean:.2f} times the mean of the ranks",
            "It decides the largest batch that fits. Cut with `memory_limit_bytes`, or move layers to other stages.",
            None,
            {"most": most, "mean": mean},
        )


def _complete(ranks: Sequence[Report], run: Report, found_any: bool) -> Iterator[Advice]:
    """Whether more could be said."""
    if not ranks:
        return
    expected = run.get("world_size", len(ranks))
    if len(ranks) < expected:
        known = ", ".join(str(rank["rank"]) for rank in ranks)
        title = f"Only {len(ranks)} of {expected} ranks are known (rank {known}), so what holds the others up is not"
        text = "The ranks could not exchange their figures; the reason is at the end of the page."
        yield Advice("note", title, text, None, {"ranks": len(ranks), "expected": expected})
        return
    useful = sum(rank.get("forward", 0.0) + rank.get("backward", 0.0) for rank in ranks)
    share = useful / sum(rank["wall"] for rank in ranks)
    if not found_any:
        yield Advice(
            "good",
            f"Nothing that was measured holds this run back: {percent(share)} of the time is forward and backward",
            "To go faster, make the computation itself faster: lower precision, a compiled model, a larger batch.",
            None,
            {"useful": share},
        )
