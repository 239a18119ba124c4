"""What is recorded: spans, and the steps that they belong to."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Span", "Window"]


class Span(NamedTuple):
    """Something that happened on this rank from `start_ns` to `end_ns`.

    Attributes:
        category: `phase`, `pipeline`, `communication`, `compression`, or another word for a row of the trace.
        name: What is shown: a phase, an action, an operation.
        step: Training batch, from 0.
        stage: Pipeline stage.
        microbatch: Microbatch within the step.
        axis: Mesh axis of a communication.
        op: Operation of a communication, in torch's names.
        bytes: Payload of a communication; None where it is not known.
        blocked_ns: How long the calling thread was held up, by the call and by the wait for it.
        ranks: Global ranks of the group.
        peer: Global rank at the other end of a point-to-point message.
        dtype: Element type of the payload.
        thread: Identifier of the thread that reported it.
        in_flight: Time from the start to the completion, where the calling thread saw the end later than that.
        sequence: How many calls this rank had made in that group (with that peer, operation and tag) before this one.
        tag: Of a point-to-point message; messages of one tag arrive in the order in which they were sent.
        group: Name of the group, the same on all its ranks; several groups may have the same ranks.
    """

    category: str
    name: str
    start_ns: int
    end_ns: int
    step: int
    stage: int | None = None
    microbatch: int | None = None
    axis: str | None = None
    op: str | None = None
    bytes: int | None = None
    blocked_ns: int = 0
    ranks: tuple[int, ...] = ()
    peer: int | None = None
    dtype: str | None = None
    thread: int = 0
    in_flight: int | None = None
    sequence: int | None = None
    tag: int | None = None
    group: str = ""

    @property
    def complete_ns(self) -> int:
        """When the operation itself was over."""
        return self.end_ns if self.in_flight is None else self.start_ns + self.in_flight


class Window(NamedTuple):
    """One step: its nanoseconds by phase, which add up to its length, and the spans that ended in it."""

    step: int
    start_ns: int
    end_ns: int
    phases: dict[str, int]
    spans: list[Span]

    @property
    def wall_ns(self) -> int:
        """Length of the step."""
        return self.end_ns - self.start_ns
