"""Calls of divided layers outside of steps: all ranks of the tensor axis make them together, or none.

A callback that calls the model on rank zero only, to log samples or a graph, would pair its messages with those of the
next step of the other ranks: wrong numbers on both sides, or a wait for ever. So before a divided layer communicates
outside of a step, each rank writes into the rendezvous store where it is, and goes on when the others are there, too.
No message is sent before that.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from torch import nn

from lightning_parallel.comm import Group
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.torch import default_store

__all__ = ["OutsideCalls", "in_step"]

WAIT_S = 15.0
"""How long to wait for the other ranks: longer than one is late for a hook, which all of them are about to reach."""

P = ParamSpec("P")
R = TypeVar("R")
_made: Counter[str] = Counter()


class OutsideCalls:
    """Lets divided layers communicate inside of steps, and outside of them if all ranks are at the same place.

    Args:
        group: The tensor-parallel group.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._depth = 0
        self._count = 0
        # Several modules may be divided over one group.
        self._name = f"outside/{group.name}/{_made[group.name]}"
        _made[group.name] += 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let layers communicate freely inside the block: all ranks run it."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def __call__(self) -> None:
        """Wait for the other ranks; called before each message of a divided layer.

        Raises:
            RuntimeError: If they do not come, or are somewhere else.
        """
        if self._depth:
            return
        self._count += 1
        store = default_store()
        place = _place()
        keys = {rank: f"{self._name}/{self._count}/{rank}" for rank in self._group.ranks}
        mine = self._group.ranks[self._group.rank]
        store.set(keys[mine], place)
        try:
            store.wait(list(keys.values()), timedelta(seconds=WAIT_S))
        except RuntimeError as error:
            absent = [rank for rank, key in keys.items() if not store.check([key])]
            raise RuntimeError(
                f"the model is called in {place} on rank {mine}, but not on rank {', '.join(map(str, absent))}. Each"
                " rank holds a part of its layers, so all ranks have to call it, or none: leave out the condition on"
                " the rank there (`is_global_zero`, `rank_zero_only`), and let only what follows depend on it"
            ) from error
        # All have read the keys before these: the store of a long run must not fill up.
        store.delete_key(f"{self._name}/{self._count - 1}/{mine}")
        places = {rank: store.get(key).decode() for rank, key in keys.items()}
        if len(set(places.values())) > 1:
            listed = ", ".join(f"in {where} on rank {rank}" for rank, where in places.items())
            raise RuntimeError(
                f"the model is called at different places at once: {listed}; all ranks have to do the same"
            )


def _place() -> str:
    """Name the hook that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        is_hook = name.startswith("on_") or name in ("log_graph", "setup", "configure_optimizers")
        if is_hook and owner is not None and not isinstance(owner, OutsideCalls):
            return f"`{type(owner).__name__}.{name}`"
        frame = frame.f_back
    return "code outside of the training loop"


def in_step(method: Callable[P, R]) -> Callable[P, R]:
    """Let divided layers communicate freely in a method of a strategy, which all ranks run."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        strategy: Any = args[0]
        with _step_of(strategy.lightning_module):
            return method(*args, **kwargs)

    return run


def _step_of(module: nn.Module | None) -> AbstractContextManager[None]:
    calls = None if module is None else ParallelState.of(module).calls
    return nullcontext() if calls is None else calls.step()
