"""Pipeline schedules: actions, their dependencies, one row of actions per rank, and the functions that build the rows.

    rank 0:  0F0 0F1 0F2 0F3 0B0 0F4 0B1 ...        2F0 = stage 2, forward, microbatch 0
    rank 1:  1F0 1F1 1F2 1B0 1F3 1B1 ...

A schedule is data and nothing else: no communication, no times. The simulator, the checks, the runtime and the command
line all read the same value. The builders are pure functions of (ranks, virtual stages, microbatches).

Legend: P ranks, V stages on each rank ("virtual stages"), m microbatches, r a rank, s a stage; F, B, I, W the seconds
of a rank's full share of the model, B = I + W. "Bubble" is the time that the step takes beyond m(F+B).
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate, count, pairwise
from typing import NamedTuple

__all__ = [
    "SCHEDULES",
    "Action",
    "Builder",
    "Channel",
    "Kind",
    "Schedule",
    "activations_held",
    "build_schedule",
    "dependencies",
    "forward_only",
    "gpipe",
    "in_flight_peaks",
    "interleaved_1f1b",
    "interleaved_zb",
    "one_f_one_b",
    "peak_activation_bytes",
    "producer",
    "run_order",
    "zb_h1",
    "zbv",
]


class Kind(str, Enum):
    """The kinds of actions, by their result."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward: gradients of the stage's input and of its weights."""
    I = "I"  # noqa: E741 - the literature's letter
    """Gradient of the stage's input only; the previous stage waits for it."""
    W = "W"
    """Gradient of the stage's weights; no other stage waits for it."""

    # Enum's own hash is Python code and shows in simulations of 10^5 actions.
    __hash__ = str.__hash__


class Action(NamedTuple):
    """One stage working on one microbatch. Prints as `2F0`: stage 2, forward, microbatch 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action from its text form; raise ValueError if `text` is not of the form `2F0`."""
        word = text.strip()
        match = _ACTION.fullmatch(word)
        if match is None:
            raise ValueError(f"An action must be written like `2F0` (stage, one of F B I W, microbatch); got `{word}`")
        return cls(Kind(match[2]), int(match[1]), int(match[3]))


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")

# A split backward holds the tensors saved in forward until its W, which needs the inputs of the linear layers.
_HELD = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}


def dependencies(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the actions that must end before `action` may start, nearest first.

    F(s)  <- F(s-1)             the previous stage's output
    B(s)  <- F(s), B(s+1)       the tensors saved in forward, and the gradient of the output
    I(s)  <- F(s), I(s+1)
    W(s)  <- I(s)
    """
    kind, stage, microbatch = action
    if kind is Kind.F:
        return (Action(Kind.F, stage - 1, microbatch),) if stage > 0 else ()
    if kind is Kind.W:
        return (Action(Kind.I, stage, microbatch),)
    forward = Action(Kind.F, stage, microbatch)
    # The gradient of the output is named by the kind of `action`. The next stage may make it by the other kind, because
    # only one of two neighbours may split its backward. `producer` gives both kinds the same name.
    return (forward, Action(kind, stage + 1, microbatch)) if stage + 1 < num_stages else (forward,)


def producer(action: Action) -> Action:
    """Return `I` for `B`, and any other action unchanged: both produce the gradient of the stage's input."""
    return action._replace(kind=Kind.I) if action.kind is Kind.B else action


Channel = tuple[int, int, Kind]
"""Sending rank, receiving rank, and `F` for activations or `I` for gradients."""


def run_order(rows: Sequence[Sequence[Action]], num_stages: int) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """Play the rows and yield (rank, action, its dependencies) in an order that respects the dependencies.

    Ends early, without the blocked actions, where ranks wait for each other. Dependencies are named as by `producer`.
    """
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    rests = [iter(row) for row in rows]
    blocked: list[Action | None] = [next(rest, None) for rest in rests]
    # A rank is examined again only when the single action that it waits for is done. To search all ranks after each
    # action would be quadratic, and the search for a schedule plays many.
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        while (action := blocked[rank]) is not None:
            needs = tuple(map(producer, dependencies(action, num_stages)))
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action, needs
            made = producer(action)
            done.add(made)
            # Only the ranks that waited for this action are looked at again.
            ready.extend(waiting.pop(made, ()))
            blocked[rank] = next(rests[rank], None)


@dataclass(frozen=True)
class Schedule:
    """Lists the actions of each rank, in order.

    Two schedules are equal if they run the same actions within the same limits.

    Args:
        rows: Actions of each rank, in the order in which it runs them.
        stage_ranks: Rank that holds each stage.
        num_microbatches: Microbatches of one step.
        max_in_flight: Most (stage, microbatch) pairs whose activations each rank may hold at once: from the end of `F`
            to the end of `B` or `W`.
        name: Name of the builder, or `custom`. `validate` compares a named schedule with the result of its builder.
        warmup: Warm-up option of the builder, if it has one.
    """

    rows: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    max_in_flight: tuple[int, ...]
    # Not compared: with few microbatches several builders and warm-ups make the same schedule.
    name: str = field(default="custom", compare=False)
    warmup: float | None = field(default=None, compare=False)

    @classmethod
    def from_rows(cls, rows: Iterable[Iterable[Action]], *, name: str = "custom") -> Schedule:
        """Read placement, microbatches and activation limits off a table of actions.

        Raises:
            ValueError: If a stage has no actions, or is on two ranks.
        """
        table = tuple(tuple(row) for row in rows)
        places: dict[int, set[int]] = {}
        for rank, row in enumerate(table):
            for action in row:
                places.setdefault(action.stage, set()).add(rank)
        if not places:
            raise ValueError("A schedule must have at least one action; got an empty table")
        wrong = {s: sorted(places.get(s, ())) for s in range(max(places) + 1) if len(places.get(s, ())) != 1}
        if wrong:
            found = ", ".join(f"stage {stage} on ranks {ranks}" for stage, ranks in wrong.items())
            raise ValueError(f"Each stage must be on exactly one rank; got {found}")
        stage_ranks = tuple(next(iter(places[stage])) for stage in range(len(places)))
        num_microbatches = 1 + max(action.microbatch for row in table for action in row)
        return cls(table, stage_ranks, num_microbatches, in_flight_peaks(table), name)

    @property
    def num_ranks(self) -> int:
        """P: ranks of the pipeline."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, over all ranks."""
        return len(self.stage_ranks)

    @property
    def virtual_stages(self) -> int:
        """V: stages on each rank; in a custom table, the most on any rank."""
        return max(self.stage_ranks.count(rank) for rank in range(self.num_ranks))

    @property
    def held(self) -> float:
        """Most activations held by any rank, in units of a microbatch in all layers of the rank."""
        return max(self.max_in_flight) / self.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """True if weight gradients are computed separately from input gradients."""
        return any(action.kind is Kind.I for row in self.rows for action in row)

    @property
    def is_training(self) -> bool:
        """True if the schedule has any backward."""
        return any(action.kind is not Kind.F for row in self.rows for action in row)

    @cached_property
    def channels(self) -> dict[Channel, tuple[Action, ...]]:
        """The actions (`F`, or `B` and `I`) whose results each rank sends to each other rank, in order."""
        sent: dict[Channel, list[Action]] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                # Activations go to the next stage, gradients to the previous stage; a W sends nothing.
                target = action.stage + (1 if action.kind is Kind.F else -1)
                if action.kind is Kind.W or not 0 <= target < self.num_stages:
                    continue
                receiver = self.stage_ranks[target]
                if receiver != rank:
                    sent.setdefault((rank, receiver, producer(action).kind), []).append(action)
        return {channel: tuple(made) for channel, made in sent.items()}

    @cached_property
    def forwards(self) -> Schedule:
        """The forward actions alone, built once; see `forward_only`."""
        rows = tuple(tuple(action for action in row if action.kind is Kind.F) for row in self.rows)
        return Schedule(rows, self.stage_ranks, self.num_microbatches, (0,) * self.num_ranks, "forward_only")

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in model order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def to_text(self) -> str:
        """Write one header line and one line per rank, read back by `from_text`."""
        header = {
            "schedule": self.name,
            "microbatches": self.num_microbatches,
            "stage_ranks": ",".join(map(str, self.stage_ranks)),
            "max_in_flight": ",".join(map(str, self.max_in_flight)),
        }
        if self.warmup is not None:
            header["warmup"] = self.warmup
        lines = ["# " + " ".join(f"{key}={value}" for key, value in header.items())]
        lines += [f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.rows)]
        return "\n".join(lines) + "\n"

    __str__ = to_text

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read a schedule from its text form. Without the header line, `from_rows` derives the rest from the rows.

        Raises:
            ValueError: If a word is not an action, or the rank lines are not 0, 1, 2, ... in order.
        """
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        rows: list[tuple[Action, ...]] = []
        for line in (line for line in lines if not line.startswith("#")):
            label, _, words = line.rpartition(":")
            if label not in ("", f"rank {len(rows)}"):
                raise ValueError(f"The next line must be for rank {len(rows)}; got `{label}`")
            rows.append(tuple(map(Action.parse, words.split())))
        header = dict(word.split("=", 1) for line in lines if line.startswith("#") for word in line[1:].split())
        if "stage_ranks" not in header:
            return cls.from_rows(rows)
        return cls(
            rows=tuple(rows),
            stage_ranks=tuple(map(int, header["stage_ranks"].split(","))),
            num_microbatches=int(header["microbatches"]),
            max_in_flight=tuple(map(int, header["max_in_flight"].split(","))),
            name=header["schedule"],
            warmup=float(header["warmup"]) if "warmup" in header else None,
        )


def activations_held(row: Sequence[Action]) -> list[int]:
    """Count the activations held after each action: from `F` to `B` or `W`; none in a schedule without backward."""
    if all(action.kind is Kind.F for action in row):
        return [0] * len(row)
    return list(accumulate(_HELD[action.kind] for action in row))


def peak_activation_bytes(
    row: Sequence[Action],
    stage_bytes: Sequence[float],
    again_bytes: Sequence[float] = (),
    largest_again_bytes: Sequence[float] = (),
) -> float:
    """Return the most bytes of activations that a rank holds at once; 0 without backward.

    Args:
        row: Actions of the rank.
        stage_bytes: Bytes that each stage holds for a microbatch from F to the end of its backward.
        again_bytes: Bytes that all layers of each stage compute again. A split backward holds them from I to W.
        largest_again_bytes: The same of its largest layer. A full backward holds one layer at a time.
    """
    if all(action.kind is Kind.F for action in row):
        return 0.0
    peak = held = 0.0
    for kind, stage, _ in row:
        again = again_bytes[stage] if again_bytes else 0.0
        held += {Kind.F: stage_bytes[stage], Kind.I: again}.get(kind, 0.0)
        peak = max(peak, held + (largest_again_bytes[stage] if kind is Kind.B and largest_again_bytes else 0.0))
        held -= {Kind.B: stage_bytes[stage], Kind.W: stage_bytes[stage] + again}.get(kind, 0.0)
    return peak


def in_flight_peaks(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Count, for each rank, the most activations held at once."""
    return tuple(max(activations_held(row), default=0) for row in rows)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the schedule's forward actions, in order, for evaluation: no activation is held for a backward."""
    return schedule.forwards


def gpipe(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """Build GPipe: all forwards, then all backwards. With V > 1, chunk by chunk (breadth first).

    Bubble (P-1)(F+B)/V; holds all m microbatches.

    Source: https://arxiv.org/abs/1811.06965; breadth-first: https://arxiv.org/abs/2211.05953
    """
    stage_ranks = tuple(range(num_ranks)) * virtual_stages
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, len(stage_ranks), num_ranks)
        # Breadth first: only the first chunk waits. With m >= P, the first input of a later chunk has come round
        # before the rank is done with the previous chunk.
        rows.append(
            [Action(Kind.F, s, i) for s in stages for i in range(num_microbatches)]
            + [Action(Kind.B, s, i) for s in reversed(stages) for i in range(num_microbatches)]
        )
    return _finish("gpipe", rows, stage_ranks, num_microbatches)


def one_f_one_b(num_ranks: int, virtual_stages: int, num_microbatches: int, warmup: float = 1) -> Schedule:
    """Build 1F1B: after a warm-up, one forward and one backward, alternating.

    Bubble (P-1)(F+B), as GPipe, but rank r holds min(m, P-r) microbatches. `warmup=2` runs twice as far ahead and
    holds 2(P-r)-1. It hides the latency of a link; plain 1F1B exposes two hops of it in every steady step.
    V must be 1; m may be less than P.

    Source: https://arxiv.org/abs/1806.03377
    """
    return _alternating("1f1b", num_ranks, virtual_stages, num_microbatches, warmup)


def interleaved_1f1b(num_ranks: int, virtual_stages: int, num_microbatches: int, warmup: float = 2) -> Schedule:
    """Build interleaved 1F1B: V chunks of the model on each rank, visited in groups of P microbatches.

    Bubble (P-1)(F+B)/V for m >= P; rank 0 holds P(1+(P-1)/(PV)) microbatches' worth if P divides m.
    `warmup=1` holds P, but shows more of the links' latency.

    Source: https://arxiv.org/abs/2104.04473, section 2.2
    """
    return _alternating("interleaved_1f1b", num_ranks, virtual_stages, num_microbatches, warmup)


def zb_h1(num_ranks: int, virtual_stages: int, num_microbatches: int, warmup: float = 1) -> Schedule:
    """Build ZB-H1: 1F1B with deferred weight gradients, which fill the bubble.

    Bubble (P-1)(F+I-W), P microbatches held on every rank. `warmup=2` is ZB-H2: 2P-1 held, and a bubble of
    (P-1)(F+I-2W) or, if that is less, of the ranks' stagger (P-1)F.

    Source: https://arxiv.org/abs/2401.10241, section 3
    """
    return _alternating("zb_h1", num_ranks, virtual_stages, num_microbatches, warmup)


def interleaved_zb(num_ranks: int, virtual_stages: int, num_microbatches: int, warmup: float = 1) -> Schedule:
    """Build interleaved 1F1B with deferred weight gradients. Bubble (P-1)(F+I-W)/V; holds P microbatches' worth."""
    return _alternating("interleaved_zb", num_ranks, virtual_stages, num_microbatches, warmup)


def zbv(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """Build ZB-V: two chunks per rank placed as a V, so the last stage is on rank 0 and starts going back at once.

        rank 0:  stage 0, stage 2P-1
        rank 1:  stage 1, stage 2P-2
        ...

    With F = I = W the only bubble is the stagger of the ranks, (P-1)F/2; P microbatches' worth held on every rank.

    Source: https://arxiv.org/abs/2401.10241, section 6
    """
    stage_ranks = SCHEDULES["zbv"].stage_ranks(num_ranks, virtual_stages)
    # Too few microbatches to fill the V: take the rows of a filled V without the missing microbatches.
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


@dataclass(frozen=True)
class Builder:
    """A function that builds a schedule, and the facts about the schedule that other code reads.

    Args:
        build: Function of ranks, stages per rank, microbatches and, if it takes one, a warm-up.
        virtual_stages: Stages per rank by default.
        with_chunks: Name of the schedule for another number of stages per rank; None if `build` takes any number.
        warmup: Warm-up by default; None if `build` takes none.
        splits_backward: Whether weight gradients are computed separately from input gradients.
        is_v: Whether the second half of the stages lies on the ranks in reverse order.
    """

    build: Callable[..., Schedule]
    virtual_stages: int = 1
    with_chunks: str | None = None
    warmup: float | None = 1
    splits_backward: bool = False
    is_v: bool = False

    def stage_ranks(self, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        ranks = tuple(range(num_ranks))
        return ranks + ranks[::-1] if self.is_v else ranks * virtual_stages


SCHEDULES: Mapping[str, Builder] = {
    "gpipe": Builder(gpipe, warmup=None),
    "1f1b": Builder(one_f_one_b, with_chunks="interleaved_1f1b"),
    "interleaved_1f1b": Builder(interleaved_1f1b, 2, warmup=2),
    "zb_h1": Builder(zb_h1, with_chunks="interleaved_zb", splits_backward=True),
    "interleaved_zb": Builder(interleaved_zb, 2, splits_backward=True),
    "zbv": Builder(zbv, 2, with_chunks="interleaved_zb", warmup=None, splits_backward=True, is_v=True),
}


def build_schedule(
    name: str, num_ranks: int, num_microbatches: int, virtual_stages: int | None = None, warmup: float | None = None
) -> Schedule:
    """Build a schedule of P ranks and m microbatches by name.

    Args:
        name: One of `SCHEDULES`.
        virtual_stages: V; by default 2 if the schedule needs chunks, else 1.
        warmup: For the schedules that take it, forwards run ahead per rank of distance to the last rank.

    Raises:
        ValueError: If the name is unknown, a count is not positive, or the schedule cannot be built with these.
    """
    if name not in SCHEDULES:
        raise ValueError(f"`schedule` must be one of {', '.join(SCHEDULES)}; got `{name}`")
    builder = SCHEDULES[name]
    if virtual_stages is None:
        virtual_stages = builder.virtual_stages
    counts = {"num_ranks": num_ranks, "virtual_stages": virtual_stages, "num_microbatches": num_microbatches}
    wrong = [f"{key}={value}" for key, value in counts.items() if value < 1]
    if wrong:
        raise ValueError(f"All counts must be at least 1; got {', '.join(wrong)}")
    if builder.with_chunks is not None and virtual_stages != builder.virtual_stages:
        raise ValueError(
            f"`virtual_stages` must be {builder.virtual_stages} with `{name}`; got {virtual_stages}. For another number"
            f" use `{builder.with_chunks}`"
        )
    if builder.warmup is not None:
        return builder.build(num_ranks, virtual_stages, num_microbatches, builder.warmup if warmup is None else warmup)
    if warmup is not None:
        raise ValueError(f"`warmup` must be None with `{name}`; got {warmup}. Leave it out")
    return builder.build(num_ranks, virtual_stages, num_microbatches)


def _alternating(name: str, num_ranks: int, virtual_stages: int, num_microbatches: int, warmup: float) -> Schedule:
    """Build the 1F1B family: some forwards ahead, then one forward and one backward, alternating."""
    if warmup < 1 or (virtual_stages > 1 and warmup > 2):
        allowed = "at least 1" if virtual_stages == 1 else "from 1 to 2 with several stages on a rank"
        raise ValueError(f"`warmup` must be {allowed}; got {warmup}, with which ranks wait for each other")
    builder = SCHEDULES[name]
    stage_ranks = builder.stage_ranks(num_ranks, virtual_stages)
    groups = _groups(num_ranks, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, len(stage_ranks), num_ranks)
        # A group passes through all chunks before the next group begins, which bounds the activations of a rank. With
        # groups of one microbatch, every rank would wait until it has come round all other ranks.
        forwards = [(s, i) for group in groups for s in stages for i in group]
        backwards = [(s, i) for group in groups for s in reversed(stages) for i in group]
        # The first group goes through the earlier chunks before any backward. Earlier ranks run further ahead, because
        # their first gradient has to come back from the last rank.
        ahead = (virtual_stages - 1) * len(groups[0]) + math.ceil(warmup * (num_ranks - 1 - rank))
        # Late ranks run few forwards ahead and may keep the inputs of a W for longer. With a lag of as many iterations
        # as there are ranks before it, each rank holds about as much.
        weight_lag = math.ceil(warmup * rank) if builder.splits_backward else None
        rows.append(list(_interleave(forwards, backwards, ahead, weight_lag)))
    return replace(_finish(name, rows, stage_ranks, num_microbatches), warmup=warmup)


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
    # A lag of 0 leaves none: `[-0:]` would be all.
    if weight_lag:
        yield from (Action(Kind.W, *work) for work in backwards[-weight_lag:])


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Split the microbatches into groups that pass through a rank's chunks together, larger groups first."""
    # Groups of P keep every rank busy and hold least. If P does not divide m, a short last group would leave ranks
    # waiting (or deadlock). So the remainder is spread, and groups have up to 2P-1.
    num_groups = max(1, num_microbatches // num_ranks)
    size, longer = divmod(num_microbatches, num_groups)
    starts = [g * size + min(g, longer) for g in range(num_groups + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _finish(
    name: str, rows: Sequence[Sequence[Action]], stage_ranks: tuple[int, ...], num_microbatches: int
) -> Schedule:
    return Schedule(tuple(map(tuple, rows)), stage_ranks, num_microbatches, in_flight_peaks(rows), name)
