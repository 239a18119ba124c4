"""Values of the steps of a run of any length."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["EvenSteps"]

T = TypeVar("T")


class EvenSteps(Generic[T]):
    """Values of steps that are evenly spread over the run, `most` at most: the same steps on all ranks.

    >>> kept = EvenSteps[float](most=4)
    >>> for step in range(10):
    ...     kept.add(step, 2.0 * step)
    >>> kept.values
    {0: 0.0, 4: 8.0, 8: 16.0}
    """

    def __init__(self, most: int) -> None:
        self._most, self._stride = most, 1
        self.values: dict[int, T] = {}

    def add(self, step: int, value: T) -> None:
        """Take notice of the value of a step."""
        if step % self._stride == 0:
            self.values[step] = value
        while len(self.values) > self._most:
            self._stride *= 2
            self.values = {step: value for step, value in self.values.items() if step % self._stride == 0}
