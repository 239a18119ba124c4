"""One finding of the diagnosis."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["WORTH_SAYING", "Advice"]

WORTH_SAYING = 0.03
"""Share of a step from which a loss of time is mentioned."""


@dataclass(frozen=True)
class Advice:
    """One finding.

    Attributes:
        kind: `wrong` (results cannot be trusted), `slow` (time is lost), `note`, or `good`.
        title: What was found, with its figure.
        text: What to do.
        gain: Share of the step's time that can be saved at most; None where no time is lost.
        figures: The numbers that the sentences rest on.
    """

    kind: Literal["wrong", "slow", "note", "good"]
    title: str
    text: str
    gain: float | None
    figures: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Give a form that JSON can hold."""
        return asdict(self)
