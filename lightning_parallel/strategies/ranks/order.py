"""Keeps the order of the messages of an axis that splits layers or sequences: all its ranks send a message, or none.

Code may call the model on rank zero only, for example to log samples or a graph. Its messages would meet other messages
of the other ranks: both sides would get wrong numbers, or wait without end. So a roll call comes before such a message:

    outside steps          before each message
    in a step              before each message of a new sequence. The ranks agree on every sequence of messages once. A
                           step that repeats a sequence needs no roll call: its ranks have met before the batch. Only a
                           rank that sends its first message from another line than before asks again, or whose
                           generators have moved since. Ranks that do not ask wait in the message, and that tells.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from torch import nn

from lightning_parallel.comm import ApartError, Group, RollCall, shared_key
from lightning_parallel.compat import ParallelState, patched, users_line
from lightning_parallel.compat.torch import has_compiled_parts
from lightning_parallel.strategies.ranks.chance import SharedChance

__all__ = ["MessageOrder", "describe_apart", "in_step", "on_parts"]

WAIT_S = 15.0
"""Deadline of a roll call outside steps: longer than the delay of a rank before a hook that all ranks reach."""
STEP_WAIT_S = 30.0
"""Deadline in a step, where one rank may write a picture, or load a library first."""
COMPILING_S = 900.0
"""Deadline for compiled modules: one rank may find a kernel in the cache while another rank still compiles it."""
_MOST_KNOWN = 1 << 18

P = ParamSpec("P")
R = TypeVar("R")


class MessageOrder:
    """Lets a group send a message when all its ranks are about to send the same message.

    Args:
        group: The ranks along the tensor axis, or along the context axis.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._block = ""
        self._is_compiled = False
        self._is_first = False
        self._is_paused = False
        # Hash of the messages since the step began, and all hashes on which the ranks have agreed.
        self._sent = 0
        self._known: set[int] = set()
        # Whether the ranks have met since the last step, and the line of the first message of the last step by name.
        self._have_met = self._is_covered = False
        self._places: dict[str, str] = {}
        # Compares the generators at the start of a step that draws from the global ones.
        self.chance: SharedChance | None = None
        self._state = ""
        self.begin_run()

    def begin_run(self) -> None:
        """Count roll calls from zero: in a failed run, ranks may have counted differently, and were at other lines."""
        self._have_met = False
        self._places.clear()
        self._calls = RollCall(self._group, _CALLS, shared_key(self._group))

    def note_meeting(self) -> None:
        """Note that all ranks of the group are about to run the same step."""
        self._have_met = True

    def paused(self) -> AbstractContextManager[Any]:
        """Refuse messages inside the block, in which only one rank runs the full model."""
        return patched(self, "_is_paused", True)

    @contextmanager
    def step(self, name: str, module: nn.Module) -> Iterator[None]:
        """Treat the messages inside the block as one sequence, in a part of a step that all ranks run."""
        before = self._block
        if not self._known:
            self._is_compiled = has_compiled_parts(module)
        if not before:
            self._sent = hash(name)
            # Backward comes after a forward in which the ranks have met.
            self._is_first = name != "backward"
            if self._is_first:
                self._is_covered, self._have_met = self._have_met, False
            if self._is_first and self.chance is not None:
                # Before the step draws. The first roll call of the step compares it, without a further message.
                self._state = str(self.chance.state())
        self._block = name
        try:
            yield
        finally:
            self._block = before

    def __call__(self, operation: str) -> None:
        """Wait for the other ranks if necessary, before a message of a sharded layer.

        Args:
            operation: The name of the collective.

        Raises:
            RuntimeError: If the other ranks do not come in time, or are at another place.
        """
        if self._is_paused:
            raise RuntimeError(
                f"The step calls a sharded layer outside the full model (`{operation}`); call it through the model"
            )
        if not self._block:
            self._meet(_hook(), WAIT_S)
            return
        # Only this rank compares the hashes, so they need not be equal between processes.
        self._sent = hash((self._sent, operation))
        is_first, self._is_first = self._is_first, False
        is_known = self._sent in self._known
        if is_known and not (is_first and self._group.size <= RollCall.MOST_RANKS):
            return
        place = users_line(lambda frame: frame.f_code.co_name == "run_in_step")
        place = place or f"`{self._block}`"
        has_drawn = is_first and self.chance is not None and self._state != self.chance.noted
        if is_first:
            # The last line and no earlier one: of two ranks at different lines, at least one then asks.
            before, self._places[self._block] = self._places.get(self._block), place
            if is_known and self._is_covered and place == before and not has_drawn:
                return
        # The other ranks may still wait for their first batch.
        patience_s = (
            default_pg_timeout.total_seconds() if is_first else COMPILING_S if self._is_compiled else STEP_WAIT_S
        )
        notes = self._meet(place, patience_s, f"{operation} {self._state if is_first else ''}", has_drawn)
        operations, states = zip(*(note.split(" ", 1) for note in notes))
        # A condition on the rank may stand in one line with the rest of the step.
        if len(set(operations)) > 1:
            found = ", ".join(f"`{each}` on rank {rank}" for each, rank in zip(operations, self._group.ranks))
            raise RuntimeError(f"All ranks must communicate in one order in {place}; got {found}. {_WAY_OUT} [LP013]")
        if is_first and self.chance is not None:
            self.chance.refuse(states, self._group)
        if len(self._known) >= _MOST_KNOWN:
            # A step of variable length has ever new sequences. All ranks add equally many, so all clear at the same
            # message.
            self._known.clear()
        self._known.add(self._sent)

    def _meet(self, place: str, patience_s: float, note: str = "", has_drawn: bool = False) -> list[str]:
        try:
            return self._calls.meet(place, patience_s, note)
        except ApartError as error:
            text = describe_apart(error)
            # A rank that does not ask has not drawn since the ranks met.
            if has_drawn and self.chance is not None and {*error.purposes.values()} != {_CALLS}:
                text = self.chance.refusal([], self._group)
            raise error.told(text) from None


_WAY_OUT = (
    "Each rank holds a part of its layers or sequences, so all ranks or none must call it. Remove the condition on"
    " the rank there (`is_global_zero`, `rank_zero_only`), and apply it only to the code after the call. A read of"
    " weights, gradients or sharded logits is such a call as well. `gather_logits=True` gathers logits on all ranks in"
    " each step"
)
_OF_REPLICA = (
    "These ranks hold parts of one model and read the same data. Hooks, loaders and callbacks must do the same on"
    " each of them, without a condition on the rank"
)
_CALLS = "messages"


def describe_apart(error: ApartError) -> str:
    """Return one text for all ranks that names the place of each rank, where they wait for each other."""
    places = {rank: place or "another place" for rank, place in error.places.items()}
    calling = [rank for rank, purpose in error.purposes.items() if purpose == _CALLS]
    others = [rank for rank in places if rank not in calling]
    at = "in " if calling else ""
    listed = ", ".join(f"{at}{places[rank]} on rank {rank}" for rank in calling or places)
    lines = [f" Rank {rank} runs {line}." for rank, line in error.lines.items() if line]
    if calling and others:
        text = (
            f"All ranks must call the model together; got a call {listed}, but not on rank"
            f" {', '.join(map(str, others))}"
        )
        lines += [f" Rank {rank} is at {error.places[rank]}." for rank in others if error.places[rank]]
    else:
        text = f"All ranks must {'call the model' if calling else 'run'} at the same place; got {listed}"
    return f"{text}.{''.join(lines)} {_WAY_OUT if calling else _OF_REPLICA} [LP013]"


def _hook() -> str:
    """Return the name of the running hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        values = frame.f_locals
        module = frame.f_globals.get("__name__", "")
        if module.endswith(".trainer.call") and "hook_name" in values:
            # Lightning's frame knows the name of the hook, even if the user's function has another name.
            owner = values.get("callback") or values["trainer"].lightning_module
            return f"`{type(owner).__name__}.{values['hook_name']}`"
        # The first argument is the instance, even if it is not named `self`.
        name = frame.f_code.co_name
        owner = values.get(next(iter(frame.f_code.co_varnames), ""))
        is_hook = name.startswith("on_") or name in ("log_graph", "setup", "configure_optimizers")
        # Loops of Lightning (`_FitLoop`, ...) have methods of these names, too.
        if is_hook and not isinstance(owner, MessageOrder) and not type(owner).__name__.startswith("_"):
            return f"`{type(owner).__name__}.{name}`"
        frame = frame.f_back
    return "code outside the training loop"


def in_step(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of a strategy as a part of a step; all ranks must run the method."""

    @wraps(method)
    # `MessageOrder` ends its search for the user's line at this name.
    def run_in_step(*args: P.args, **kwargs: P.kwargs) -> R:
        strategy: Any = args[0]
        with _step_of(strategy.lightning_module, method.__name__):
            return method(*args, **kwargs)

    return run_in_step


def on_parts(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of a strategy that handles this rank's parts, although a hook of the user may call it."""

    @wraps(method)
    def run_on_parts(*args: P.args, **kwargs: P.kwargs) -> R:
        strategy: Any = args[0]
        module = strategy.lightning_module
        watch = None if module is None else ParallelState.of(module).watch
        with nullcontext() if watch is None else watch.paused():
            return method(*args, **kwargs)

    return run_on_parts


@contextmanager
def _step_of(module: nn.Module | None, name: str) -> Iterator[None]:
    if module is None:
        yield
        return
    state = ParallelState.of(module)
    # Steps nest: under manual optimization, `training_step` calls `backward`.
    before, state.is_in_step = state.is_in_step, True
    try:
        with (
            nullcontext() if state.watch is None else state.watch.paused(),
            nullcontext() if state.order is None else state.order.step(name, module),
            nullcontext() if state.position_order is None else state.position_order.step(name, module),
            nullcontext() if state.replica_order is None else state.replica_order.step(name, module),
        ):
            yield
    finally:
        state.is_in_step = before
