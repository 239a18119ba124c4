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


def named(
    arguments: Mapping[str, Any], function: Callable[..., Any], given_to: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Return those of the arguments that a function has under the same names, for a call by keyword.

    Args:
        arguments: By name.
        function: The function to call.
        given_to: Leave out arguments with the default of this function: those of `function` may differ by version.
    """
    names = inspect.signature(function).parameters
    defaults = {} if given_to is None else inspect.signature(given_to).parameters
    return {
        name: value
        for name, value in arguments.items()
        if name in names and name != "self" and not (name in defaults and value is defaults[name].default)
    }


def spelled(**reasons: str) -> Callable[[Callable[Concatenate[T, P], None]], Callable[Concatenate[T, P], None]]:
    """Let a constructor suggest the name of a misspelt argument, and name the class that the user wrote.

    Args:
        reasons: Why an argument of the base class is not supported, by its name.

    Raises:
        TypeError: From the constructor, for an argument that it does not have.
    """

    def decorate(init: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
        known = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def checked(self: T, *args: P.args, **kwargs: P.kwargs) -> None:
            for name in kwargs:
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1)
                    hint = f"did you mean `{close[0]}`?" if close else f"the arguments are {', '.join(known)}."
                    raise TypeError(
                        f"`{type(self).__name__}` has no argument `{name}`; {reasons.get(name, hint)} [LP005]"
                    )
            init(self, *args, **kwargs)

        return checked

    return decorate
