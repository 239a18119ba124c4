"""Values that change with the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Union

__all__ = ["Schedule", "at", "every"]


class Schedule:
    """A ratio or rank by step: each value holds from its step until the next.

        Schedule({0: 0.25, 100: 0.05, 200: 0.01})

    Args:
        values: Value by the optimizer step from which it holds; step 0 must be there.

    Raises:
        ValueError: If `values` has no step 0, or a negative step.
    """

    def __init__(self, values: Mapping[int, float]) -> None:
        if not values or min(values) != 0:
            raise ValueError(f"a schedule begins at step 0, found steps {sorted(values)}")
        self.values = dict(sorted(values.items()))

    @classmethod
    def warm_up(cls, value: float, steps: int, start: float = 0.25, stages: int = 4) -> Schedule:
        """From `start` to `value` in equal factors, reached after `steps` steps.

        Source: Deep Gradient Compression, section 3.3 (25 %, 6.25 %, 1.6 %, 0.4 %, 0.1 %), arXiv 1712.01887.
        """
        factor = (value / start) ** (1 / stages)
        return cls({steps * stage // stages: start * factor**stage for stage in range(stages)} | {steps: value})

    def __call__(self, step: int) -> float:
        return next(value for begin, value in reversed(self.values.items()) if begin <= step)

    def __repr__(self) -> str:
        return f"Schedule({self.values})"


def at(value: Union[float, Schedule], step: int) -> float:
    """A constant, or the schedule's value at `step`."""
    return value(step) if isinstance(value, Schedule) else value


def every(value: Union[float, Schedule]) -> list[float]:
    """All values that `value` takes, the last one last."""
    return list(value.values.values()) if isinstance(value, Schedule) else [value]
