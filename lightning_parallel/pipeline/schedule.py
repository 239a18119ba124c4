"""The pipeline schedules: pure functions of (ranks, virtual stages, microbatches) to rows of actions.

Legend: P ranks, V stages on each rank ("virtual stages"), m microbatches, r a rank, s a stage; F, B, I, W the seconds
of a rank's whole share of the model, B = I + W. "Bubble" is what the step takes beyond m(F+B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise

from lightning_parallel.pipeline.actions import (
    Action,
    Kind,
    Schedule,
    dependencies,
    forward_only,
    in_flight_peaks,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Builder",
    "Kind",
    "Schedule",
    "build_schedule",
    "dependencies",
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zb",
    "one_f_one_b",
    "zb_h1",
    "zbv",
]


def gpipe(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """Build GPipe: all forwards, then all backwards. With V > 1, chunk by chunk (breadth first).

    Bubble (P-1)(F+B)/V; holds all m microbatches.

    Source: https://arxiv.org/abs/1811.06965; breadth-first: https://arxiv.org/abs/2211.05953
    """
    stage_ranks = _looped(num_ranks, virtual_stages)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, len(stage_ranks), num_ranks)
        # Breadth first: with m >= P, the first input of a chunk has come round before the rank is done with the chunk
        # before, so only the first chunk waits.
        rows.append(
            [Action(Kind.F, s, i) for s in stages for i in range(num_microbatches)]
            + [Action(Kind.B, s, i) for s in reversed(stages) for i in range(num_microbatches)]
        )
    return _finish("gpipe", rows, stage_ranks, num_microbatches)


def one_f_one_b(num_ranks: int, virtual_stages: int, num_microbatches: int, warmup: float = 1) -> Schedule:
    """Build 1F1B: after a warm-up, one forward and one backward, alternating.

    Bubble (P-1)(F+B), as GPipe, but rank r holds min(m, P-r) microbatches. `warmup=2` runs twice as far ahead,
    holds 2(P-r)-1, and hides a link's latency, of which plain 1F1B exposes two hops in every steady step.

    Args:
        num_ranks: P.
        virtual_stages: Must be 1.
        num_microbatches: m, may be less than P.
        warmup: Forwards run ahead, per rank of distance to the last rank, at least 1.

    Source: https://arxiv.org/abs/1806.03377
    """
    _require_virtual_stages("1f1b", virtual_stages, 1, "`interleaved_1f1b`")
    return _alternating("1f1b", num_ranks, virtual_stages, num_microbatches, warmup, split=False)


def interleaved_1f1b(num_ranks: int, virtual_stages: int, num_microbatches: int, warmup: float = 2) -> Schedule:
    """Build interleaved 1F1B: V chunks of the model on each rank, visited in groups of P microbatches.

    Bubble (P-1)(F+B)/V for m >= P; rank 0 holds P(1+(P-1)/(PV)) microbatches' worth if P divides m.
    `warmup=1` holds P, but shows more of the links' latency.

    Source: https://arxiv.org/abs/2104.04473, section 2.2
    """
    return _alternating("interleaved_1f1b", num_ranks, virtual_stages, num_microbatches, warmup, split=False)


def zb_h1(num_ranks: int, virtual_stages: int, num_microbatches: int, warmup: float = 1) -> Schedule:
    """Build ZB-H1: 1F1B with deferred weight gradients, which fill the bubble.

    Bubble (P-1)(F+I-W), P microbatches held on every rank. `warmup=2` is ZB-H2: 2P-1 held, and a bubble of
    (P-1)(F+I-2W) or, if that is less, of the ranks' stagger (P-1)F.

    Source: https://arxiv.org/abs/2401.10241, section 3
    """
    _require_virtual_stages("zb_h1", virtual_stages, 1, "`interleaved_zb`")
    return _alternating("zb_h1", num_ranks, virtual_stages, num_microbatches, warmup, split=True)


def interleaved_zb(num_ranks: int, virtual_stages: int, num_microbatches: int, warmup: float = 1) -> Schedule:
    """Build interleaved 1F1B with deferred weight gradients. Bubble (P-1)(F+I-W)/V; holds P microbatches' worth."""
    return _alternating("interleaved_zb", num_ranks, virtual_stages, num_microbatches, warmup, split=True)


def zbv(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """Build ZB-V: two chunks per rank placed as a V, so the last stage is on rank 0 and starts going back at once.

        rank 0:  stage 0, stage 2P-1
        rank 1:  stage 1, stage 2P-2
        ...

    With F = I = W the only bubble is the stagger of the ranks, (P-1)F/2; P microbatches' worth held on every rank.

    Source: https://arxiv.org/abs/2401.10241, section 6
    """
    _require_virtual_stages("zbv", virtual_stages, 2, "`interleaved_zb`")
    stage_ranks = (*range(num_ranks), *reversed(range(num_ranks)))
    # Fewer microbatches than fill the V: the rows of a filled V without the microbatches that do not exist.
    filled = max(num_microbatches, 2 * num_ranks - 1)
    rows: list[list[Action]] = []
    for rank in range(num_ranks):
        far = num_ranks - rank
        # The paper's warm-up, steady state and cool-down. A word is a kind of action and a chunk: 0 goes down the V, 1
        # comes up. How often a pattern repeats depends on how far the rank is from the two ends of the V.
        phases = [
            ("F0", 2 * far - 1),
            ("F1 F0", rank),
            ("F1 I1 W1", far),
            ("F0 I0 W0 F1 I1 W1", filled - num_ranks),
            ("I0 I1", rank),
            ("I0 W0", far),
            ("W1", rank),
            ("W0", rank),
        ]
        microbatches = {word: count() for word in ("F0", "I0", "W0", "F1", "I1", "W1")}
        words = [word for pattern, repeat in phases for word in pattern.split() * repeat]
        stage = {"0": rank, "1": len(stage_ranks) - 1 - rank}
        row = [Action(Kind(word[0]), stage[word[1]], next(microbatches[word])) for word in words]
        rows.append([action for action in row if action.microbatch < num_microbatches])
    return _finish("zbv", rows, stage_ranks, num_microbatches)


Builder = Callable[..., Schedule]

SCHEDULES: Mapping[str, Builder] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "interleaved_zb": interleaved_zb,
    "zbv": zbv,
}


def build_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int | None = None,
    warmup: float | None = None,
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: One of `SCHEDULES`.
        num_ranks: P.
        num_microbatches: m.
        virtual_stages: V; by default 2 where the schedule needs chunks, else 1.
        warmup: For the schedules that take it, forwards run ahead per rank of distance to the last rank.

    Raises:
        ValueError: If the name is unknown, a count is not positive, or the schedule cannot be built with these.
    """
    if name not in SCHEDULES:
        raise ValueError(f"expected one of {', '.join(SCHEDULES)} as schedule, got `{name}`")
    if virtual_stages is None:
        virtual_stages = 2 if name in ("interleaved_1f1b", "interleaved_zb", "zbv") else 1
    counts = {"num_ranks": num_ranks, "virtual_stages": virtual_stages, "num_microbatches": num_microbatches}
    wrong = [f"{key}={value}" for key, value in counts.items() if value < 1]
    if wrong:
        raise ValueError(f"expected counts of at least 1, got {', '.join(wrong)}")
    if warmup is None:
        return SCHEDULES[name](num_ranks, virtual_stages, num_microbatches)
    if name in ("gpipe", "zbv"):
        raise ValueError(f"`{name}` has no warm-up to choose, got warmup={warmup}; leave it out")
    return SCHEDULES[name](num_ranks, virtual_stages, num_microbatches, warmup)


def _alternating(
    name: str, num_ranks: int, virtual_stages: int, num_microbatches: int, warmup: float, *, split: bool
) -> Schedule:
    """Build the 1F1B family: some forwards ahead, then one forward and one backward, alternating.

    With a split backward, the W of a rank follow their I as many iterations later as there are ranks before it, which
    evens out what the ranks hold.
    """
    if warmup < 1 or (virtual_stages > 1 and warmup > 2):
        allowed = "at least 1" if virtual_stages == 1 else "from 1 to 2 with several stages on a rank"
        raise ValueError(f"expected `warmup` {allowed}, outside of which ranks wait for each other, got {warmup}")
    stage_ranks = _looped(num_ranks, virtual_stages)
    groups = _groups(num_ranks, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, len(stage_ranks), num_ranks)
        # A group passes through all chunks before the next begins, which bounds what a rank holds. Groups of one
        # microbatch would leave every rank waiting until it has come round all the others.
        forwards = [(s, i) for group in groups for s in stages for i in group]
        backwards = [(s, i) for group in groups for s in reversed(stages) for i in group]
        # The first group goes through the earlier chunks before any backward. Earlier ranks run further ahead, since
        # their first gradient has to come back from the last rank.
        ahead = (virtual_stages - 1) * len(groups[0]) + math.ceil(warmup * (num_ranks - 1 - rank))
        rows.append(list(_interleave(forwards, backwards, ahead, math.ceil(warmup * rank) if split else None)))
    schedule = _finish(name, rows, stage_ranks, num_microbatches)
    return replace(schedule, warmup=warmup)


def _interleave(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int, weight_lag: int | None
) -> Iterator[Action]:
    """Yield `ahead` forwards, then alternate forward and backward; W follows I `weight_lag` iterations later."""
    yield from (Action(Kind.F, *work) for work in forwards[:ahead])
    for iteration, work in enumerate(backwards):
        if ahead + iteration < len(forwards):
            yield Action(Kind.F, *forwards[ahead + iteration])
        if weight_lag is None:
            yield Action(Kind.B, *work)
            continue
        yield Action(Kind.I, *work)
        if iteration >= weight_lag:
            yield Action(Kind.W, *backwards[iteration - weight_lag])
    if weight_lag:
        yield from (Action(Kind.W, *work) for work in backwards[-weight_lag:])


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Cut the microbatches into groups that pass through a rank's chunks together, larger groups first.

    Groups of P keep every rank busy and hold least. Where P does not divide m a short last group would leave
    ranks waiting (or deadlock), so the remainder is spread and groups have up to 2P-1.
    """
    num_groups = max(1, num_microbatches // num_ranks)
    size, longer = divmod(num_microbatches, num_groups)
    starts = [g * size + min(g, longer) for g in range(num_groups + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _looped(num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    return tuple(range(num_ranks)) * virtual_stages


def _finish(
    name: str, rows: Sequence[Sequence[Action]], stage_ranks: tuple[int, ...], num_microbatches: int
) -> Schedule:
    return Schedule(tuple(map(tuple, rows)), stage_ranks, num_microbatches, in_flight_peaks(rows), name)


def _require_virtual_stages(name: str, got: int, needed: int, otherwise: str) -> None:
    if got != needed:
        raise ValueError(f"`{name}` needs virtual_stages={needed}, got {got}; for another number take {otherwise}")
