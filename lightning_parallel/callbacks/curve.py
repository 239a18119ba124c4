"""A value over the steps of a run of any length."""

from __future__ import annotations

from torch import Tensor

__all__ = ["Curve"]


class Curve:
    """Every so-many-th value, so that there are never more than `most`; reads tensors only at the end.

    >>> import torch
    >>> curve = Curve(most=4)
    >>> for step in range(10):
    ...     curve.add(step, torch.tensor(float(step)))
    >>> curve.points()
    [(0, 0.0), (4, 4.0), (8, 8.0)]
    """

    def __init__(self, most: int = 1000) -> None:
        self._most, self._stride, self._count = most, 1, 0
        self._steps: list[int] = []
        self._values: list[Tensor] = []

    def add(self, step: int, value: Tensor) -> None:
        """Take notice of the value of the next step: a tensor with one element."""
        if self._count % self._stride == 0:
            self._steps.append(step)
            self._values.append(value.detach().clone())  # it may be written to, or be a piece of something large
        self._count += 1
        if len(self._steps) > self._most:
            self._steps, self._values, self._stride = self._steps[::2], self._values[::2], self._stride * 2

    def points(self) -> list[tuple[int, float]]:
        """The values kept, by step."""
        return [(step, value.item()) for step, value in zip(self._steps, self._values)]
