"""Checks of what users construct compressors with, and give as one.

All raise `TypeError` for a wrong type and `ValueError` for a value out of range; they name the argument, what was
expected and what was found. A bool is no number; numbers of numpy are.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Optional

from lightning_parallel.compression.reducer import Reducer

__all__ = ["check_flag", "check_fraction", "check_integer", "check_number", "check_ratio", "check_reducer"]


def check_integer(name: str, value: object, least: Optional[int] = None) -> None:
    """`value` must be an integer, of at least `least`."""
    expected = f"`{name}` must be an integer{'' if least is None else f' of at least {least}'}"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{expected}, got {value!r}")
    if least is not None and int(value) < least:
        raise ValueError(f"{expected}, got {value!r}")


def check_number(name: str, value: object) -> float:
    """`value` must be a number; returned as a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    return float(value)


def check_fraction(name: str, value: object) -> None:
    """`value` must be a number in [0, 1)."""
    if not 0 <= check_number(name, value) < 1:
        raise ValueError(f"`{name}` must be in [0, 1), got {value!r}")


def check_ratio(name: str, value: object) -> None:
    """`value` must be a number in (0, 1]."""
    if not 0 < check_number(name, value) <= 1:
        raise ValueError(f"`{name}` must be in (0, 1], got {value!r}")


def check_flag(name: str, value: object) -> None:
    """`value` must be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}")


def check_reducer(compression: object) -> None:
    """Check what was given as `compression`.

    Raises:
        TypeError: If it is no compressor.
    """
    if not isinstance(compression, Reducer):
        hint = f"; did you mean {compression.__name__}()?" if isinstance(compression, type) else ""
        raise TypeError(f"`compression` must be a compressor such as PowerSGD(rank=4), got {compression!r}{hint}")
