"""Arguments of the public strategies: the spelling is checked, and copies are passed on by name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["named", "spelled"]

P = ParamSpec("P")
T = TypeVar("T")


def named(arguments: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return those of the arguments that a function has under the same names, for a call by keyword."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names and name != "self"}


def spelled(init: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Let a constructor suggest the name of a misspelt argument, and name the class that the user wrote.

    Raises:
        TypeError: From the constructor, for an argument that it does not have.
    """
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: T, *args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean `{close[0]}`?" if close else f"it has {', '.join(known)}."
                raise TypeError(f"`{type(self).__name__}` has no argument `{name}`; {hint}")
        init(self, *args, **kwargs)

    return checked
