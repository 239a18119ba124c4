"""Pipeline schedules as data: actions, what each action waits for, and one row of actions per rank.

    rank 0:  0F0 0F1 0F2 0F3 0B0 0F4 0B1 ...        2F0 = stage 2, forward, microbatch 0
    rank 1:  1F0 1F1 1F2 1B0 1F3 1B1 ...

A schedule is one row of actions per rank and nothing else: no communication, no times. The simulator, the validator,
the runtime and the command line all read the same value.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

__all__ = [
    "Action",
    "Channel",
    "Kind",
    "Schedule",
    "activations_held",
    "dependencies",
    "forward_only",
    "in_flight_peaks",
    "producer",
    "run_order",
]


class Kind(str, Enum):
    """The kinds of actions, by what they compute."""

    F = "F"
    """Forward."""
    B = "B"
    """Whole backward: gradients of the stage's input and of its weights."""
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
        """Read an action from its text form.

        Raises:
            ValueError: If `text` is not of the form `2F0`.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"expected an action such as `2F0` (stage, one of F B I W, microbatch), got `{text.strip()}`"
            )
        return cls(Kind(match[2]), int(match[1]), int(match[3]))


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def dependencies(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the actions that must end before `action` may start, nearest first.

        F(s)  <- F(s-1)             the previous stage's output
        B(s)  <- F(s), B(s+1)       what forward saved, and the gradient of the output
        I(s)  <- F(s), I(s+1)
        W(s)  <- I(s)

    The gradient of the output is named by the kind of `action`. The next stage may make it by another kind, since a
    stage that splits its backward and one that does not may be neighbours; `producer` gives both the same name.

    Args:
        action: The action that waits.
        num_stages: Stages of the whole pipeline.
    """
    kind, stage, microbatch = action
    if kind is Kind.F:
        return (Action(Kind.F, stage - 1, microbatch),) if stage > 0 else ()
    if kind is Kind.W:
        return (Action(Kind.I, stage, microbatch),)
    forward = Action(Kind.F, stage, microbatch)
    return (forward, Action(kind, stage + 1, microbatch)) if stage + 1 < num_stages else (forward,)


def producer(action: Action) -> Action:
    """Return `I` for `B`, and other actions as they are: both produce the gradient of the stage's input."""
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
    # A rank is looked at again only when the one action it waits for is done: searching all ranks after each action
    # would be quadratic, and the search for a schedule plays many.
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
            ready.extend(waiting.pop(made, ()))
            blocked[rank] = next(rests[rank], None)


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order. Two schedules are equal if they run the same actions under the same limits.

    Args:
        rows: Actions of each rank, in the order in which it runs them.
        stage_ranks: The rank that holds each stage.
        num_microbatches: Microbatches of one step.
        max_in_flight: For each rank, the most (stage, microbatch) pairs whose activations it may hold at once:
            from the end of `F` to the end of `B` or `W`.
        name: The builder's name, or `custom`. `validate` holds a named schedule to what its builder makes.
        warmup: The builder's warm-up option, where it has one.
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
            raise ValueError("expected at least one action, got an empty table")
        wrong = {s: sorted(places.get(s, ())) for s in range(max(places) + 1) if len(places.get(s, ())) != 1}
        if wrong:
            found = ", ".join(f"stage {stage} on ranks {ranks}" for stage, ranks in wrong.items())
            raise ValueError(f"expected each stage on exactly one rank, got {found}")
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
                # Activations go to the next stage, gradients to the one before; a W sends nothing.
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

    def __str__(self) -> str:
        return self.to_text()

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
                raise ValueError(f"expected the line of rank {len(rows)}, got `{label}`")
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


# A split backward holds what forward saved until its W, which needs the inputs of the linear layers.
_HELD = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}


def in_flight_peaks(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Count, for each rank, the most activations held at once."""
    return tuple(max(activations_held(row), default=0) for row in rows)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the schedule's forward actions, in order, for evaluation: no activation is held for a backward."""
    return schedule.forwards
