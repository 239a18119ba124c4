"""Values that change with the step."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Union

from lightning_parallel.compression.arguments import check_integer, check_number

__all__ = ["Schedule", "at", "every"]


class Schedule:
    """A ratio or rank by step: each value holds from its step until the next.

        Schedule({0: 0.25, 100: 0.05, 200: 0.01})

    Args:
        values: Value by the optimizer step from which it holds; step 0 must be there.

    Raises:
        TypeError: If `values` is no mapping of integers to numbers.
        ValueError: If `values` has no step 0, or a negative step.
    """

    def __init__(self, values: Mapping[int, Union[int, float]]) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(f"a schedule is a mapping such as {{0: 0.25, 100: 0.01}}, got {values!r}")
        for step, value in values.items():
            check_integer("step", step)
            check_number(f"values[{step}]", value)
        if not values or min(values) != 0:
            raise ValueError(f"a schedule begins at step 0, found steps {sorted(values)}")
        self.values = dict(sorted(values.items()))

    @classmethod
    def warm_up(
        cls, value: Union[int, float], steps: int, start: Union[int, float] = 0.25, stages: int = 4
    ) -> Schedule:
        """From `start` to `value` in equal factors, reached after `steps` steps; integers if both are (ranks).

        Source: Deep Gradient Compression, section 3.3 (25 %, 6.25 %, 1.6 %, 0.4 %, 0.1 %), arXiv 1712.01887.
        """
        check_integer("steps", steps, least=0)
        check_integer("stages", stages, least=1)
        if check_number("value", value) <= 0 or check_number("start", start) <= 0:
            raise ValueError(f"`value` and `start` must be positive, got {value!r} and {start!r}")
        factor = (value / start) ** (1 / stages)
        found = {steps * stage // stages: start * factor**stage for stage in range(stages)}
        if isinstance(value, Integral) and isinstance(start, Integral):
            found = {step: round(rank) for step, rank in found.items()}
        return cls({**found, steps: value})

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
