"""What holds a pipeline back: its schedule, its stages, or the messages between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_parallel.callbacks.advice import WORTH_SAYING, Advice
from lightning_parallel.tracing.text import percent

__all__ = ["diagnose_pipeline"]

Report = Mapping[str, Any]


def diagnose_pipeline(reports: Report, ranks: Sequence[Report], run: Report) -> Iterator[Advice]:
    """What the ranks of a pipeline wait for, and what would make it less."""
    bubble = reports.get("PipelineTimeline", {}).get("bubble", {})
    measured, ideal, simulated = (bubble.get(key) for key in ("measured", "ideal", "simulated"))
    share = _pipeline_share(ranks)
    if not bubble:
        yield from _unexplained(ranks)
    if ideal is not None and measured is not None and ideal >= WORTH_SAYING:
        text, target = _smaller_bubble(ideal, run)
        yield Advice(
            "slow",
            f"Pipeline ranks idle for {percent(measured)} of the time in the pipeline; {percent(ideal)} is the"
            " schedule's own bubble",
            text,
            share * (1 - (1 - ideal) / (1 - target)),
            {"measured": measured, "ideal": ideal},
        )
    if simulated is not None and ideal is not None and simulated - ideal >= WORTH_SAYING:
        yield Advice(
            "slow",
            f"Unequal stages add {percent(simulated - ideal)} to the pipeline's bubble ({percent(ideal)} to"
            f" {percent(simulated)})",
            "Even out the stages: `balance='auto'` cuts by measured time, or give the layers of each stage.",
            share * (1 - (1 - simulated) / (1 - ideal)),
            {"simulated": simulated, "ideal": ideal},
        )
    if simulated is not None and measured is not None and measured - simulated >= WORTH_SAYING:
        yield Advice(
            "slow",
            f"Messages between stages and uneven run times add {percent(measured - simulated)} to the pipeline's bubble"
            f" ({percent(simulated)} to {percent(measured)})",
            "Larger microbatches make messages fewer; keep neighbouring stages on one node, and look at the waits"
            " before each action in the picture of the pipeline.",
            share * (1 - (1 - measured) / (1 - simulated)),
            {"measured": measured, "simulated": simulated},
        )


def _unexplained(ranks: Sequence[Report]) -> Iterator[Advice]:
    """Waits whose reason `PipelineTimeline` would tell."""
    waits = [rank["pipeline_wait"] / rank["wall"] for rank in ranks if "pipeline_wait" in rank]
    share = sum(waits) / max(len(waits), 1)
    if share >= WORTH_SAYING:
        yield Advice(
            "slow",
            f"Ranks wait for other pipeline stages for {percent(share)} of a step",
            "Add `PipelineTimeline()`, which tells how much of it is the schedule, the stages, and the messages.",
            share,
            {"pipeline_wait": share},
        )


def _pipeline_share(ranks: Sequence[Report]) -> float:
    """Share of the step in which the pipeline runs; all of it where that was not measured."""
    inside = ("forward", "backward", "communication_exposed", "pipeline_wait")
    shares = [sum(rank.get(phase, 0.0) for phase in inside) / rank["wall"] for rank in ranks]
    return max(shares, default=1.0)


def _smaller_bubble(ideal: float, run: Report) -> tuple[str, float]:
    """What makes a schedule's bubble smaller, and how small twice the microbatches would make it."""
    halved = ideal / (2 - ideal)  # (p-1)/(m+p-1) with twice as many; the same holds for the other schedules
    count, samples = run.get("num_microbatches"), run.get("replica_batch")
    if count and samples and count * 2 > samples:
        text = (
            f"The batch of {samples} samples is in {count} microbatches already: a larger batch, with twice as many,"
            f" brings the schedule's bubble to {percent(halved)}."
        )
    else:
        now = f" (now {count})" if count else ""
        text = (
            f"Split the batch into more microbatches{now}: twice as many bring the schedule's bubble to"
            f" {percent(halved)}."
        )
    if run.get("schedule") in ("gpipe", "1f1b"):
        text += (
            " Schedules with `virtual_stages` (`interleaved_1f1b`) or a divided backward (`zb_h1`, `zbv`) have a"
            " smaller one; `schedule='auto'` takes the best."
        )
    return text, halved
