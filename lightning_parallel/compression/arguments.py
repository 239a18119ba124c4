"""Arguments of compressors: their checks, values that change with the step, and seeded random numbers.

The checks raise `TypeError` for a wrong type and `ValueError` for a value out of range; they name the argument, the
expected and the found value. A bool is not a number; numbers of numpy are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Optional, Union

import torch

__all__ = [
    "StepValue",
    "value_at",
    "check_flag",
    "check_fraction",
    "check_integer",
    "check_number",
    "check_ratio",
    "all_values",
    "seeded_generator",
]


def check_integer(name: str, value: object, least: Optional[int] = None) -> None:
    """Check that `value` is an integer, of at least `least`."""
    expected = f"`{name}` must be an integer{'' if least is None else f' of at least {least}'}"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{expected}, got {value!r}")
    if least is not None and int(value) < least:
        raise ValueError(f"{expected}, got {value!r}")


def check_number(name: str, value: object) -> float:
    """Check that `value` is a number, and return it as a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    return float(value)


def check_fraction(name: str, value: object) -> None:
    """Check that `value` is a number in [0, 1)."""
    if not 0 <= check_number(name, value) < 1:
        raise ValueError(f"`{name}` must be in [0, 1), got {value!r}")


def check_ratio(name: str, value: object) -> None:
    """Check that `value` is a number in (0, 1]."""
    if not 0 < check_number(name, value) <= 1:
        raise ValueError(f"`{name}` must be in (0, 1], got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Check that `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}")


class StepValue:
    """A ratio or rank that changes with the step: each value holds from its step until the next.

        StepValue({0: 0.25, 100: 0.05, 200: 0.01})

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
    ) -> StepValue:
        """Go from `start` to `value` in equal factors, within `steps` steps; through integers if both are (ranks).

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
        """Return the value at `step`."""
        return next(value for begin, value in reversed(self.values.items()) if begin <= step)

    def __repr__(self) -> str:
        return f"StepValue({self.values})"


def value_at(value: Union[float, StepValue], step: int) -> float:
    """Return a constant, or the value of a `StepValue` at `step`."""
    return value(step) if isinstance(value, StepValue) else value


def all_values(value: Union[float, StepValue]) -> list[float]:
    """Return all values that `value` takes, the last one last."""
    return list(value.values.values()) if isinstance(value, StepValue) else [value]


def seeded_generator(device: torch.device, *purpose: object) -> Optional[torch.Generator]:
    """Return a generator seeded by `purpose` (seed, step, parameter name, ...): equal wherever and whenever it is made.

    The global generators are not touched, and a resumed run draws the same numbers without a saved generator state.
    None on the meta device, where nothing is drawn.
    """
    if device.type == "meta":
        return None
    digest = hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
