"""Lines and problems that `lightning-parallel doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Findings"]


@dataclass
class Findings:
    """Lines to print, and the problems among them, each with a fix."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        """Begin a group of values."""
        self.lines += ["", title]

    def value(self, name: str, value: object, meaning: str = "") -> None:
        """Add a value, with its meaning if the name does not say it."""
        self.lines.append(f"  {name:<30} {value}" + (f"   ({meaning})" if meaning else ""))

    def problem(self, text: str) -> None:
        """Add a problem, as a sentence with a fix."""
        self.problems.append(text)
