"""One forward of one stage: the user's own step runs, and at each layer it is decided what happens there.

stage 1 of 3 owns layers 2 and 3
embed, 0, 1     of stage 0: answer with ghosts
2               first owned: the ghosts among its arguments are received, then it runs
3               runs
4               of stage 2: its arguments are what has to be sent; the step is left here
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from lightning_parallel.pipeline.absent import Answers, Call
from lightning_parallel.pipeline.ghost import Ghost, GhostError, missing, reveal

__all__ = [
    "REENTRANT",
    "Demand",
    "Door",
    "Forward",
    "Gate",
    "Leave",
    "Rehearsal",
    "CutError",
    "Visit",
    "guard",
    "wanted",
]


class CutError(GhostError):
    """The model cannot be cut, or not here: a connection skips over the cut, or a layer runs twice."""


class Leave(BaseException):
    """Ends a step at the first layer of a later stage. Not an `Exception`, so that no handler in the model stops it."""

    def __init__(self, index: int, leaves: list[Any], tree: TreeSpec) -> None:
        self.index, self.leaves, self.tree = index, leaves, tree


class Visit(Protocol):
    """What happens at the doors while a step runs."""

    def layer(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """A layer of the trunk is called."""
        ...

    def unit(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """A module outside of the trunk that has parameters is called."""
        ...


@dataclass
class Gate:
    """Shared by all doors of a model: the visit under way, if any."""

    visit: Visit | None = None


@dataclass
class Door:
    """Stands at the call of one module.

    Attributes:
        name: Of the module.
        kind: Modules of equal kind answer alike.
        index: Of the layer in the trunk; None for a module outside of it.
        present: Whether this rank holds the module.
    """

    gate: Gate
    name: str
    kind: object
    index: int | None = None
    present: bool = True

    def enter(self, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """Call `module` as the visit under way decides."""
        visit = self.gate.visit
        if visit is not None:
            return (visit.unit if self.index is None else visit.layer)(self, module, call, args, kwargs)
        if not self.present:
            raise RuntimeError(
                f"`{self.name}` is on another pipeline stage and cannot be called on its own; "
                "run the model through the trainer, or save a checkpoint and load it into an uncut model"
            )
        return call(*reveal(args), **reveal(kwargs))  # activation checkpointing, during backward


class _Guarded(nn.Module):
    """Put in front of a module's class. Outside of whatever else a class does in `__call__`, such as checkpointing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_pipeline_door"].enter(self, super().__call__, args, kwargs)


_guarded_classes: dict[type, type] = {}


def guard(module: nn.Module, door: Door) -> None:
    """Let every call of `module` pass through `door`."""
    kind = type(module)
    if not issubclass(kind, _Guarded):
        if kind not in _guarded_classes:
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
            _guarded_classes[kind] = type(kind.__name__, (_Guarded, kind), names)
        module.__class__ = _guarded_classes[kind]
    module.__dict__["_pipeline_door"] = door


REENTRANT = (
    "the pipeline is cut at a layer that is called through a reentrant activation checkpoint, through which gradients "
    "do not reach the stage before; call `checkpoint(..., use_reentrant=False)`"
)

Receive = Callable[[int, list[Any], list[int]], list[Tensor]]
"""(layer, leaves of its arguments, positions of the ghosts among them) -> their data."""


class Forward:
    """The forward of one stage on one microbatch.

    Args:
        stage: The stage.
        stage_of: The stage of each layer.
        answers: What absent modules return.
        receive: Called once, at the first layer that is not of an earlier stage.
        on_entry: Called just before that.
    """

    def __init__(
        self,
        stage: int,
        stage_of: tuple[int, ...],
        answers: Answers,
        receive: Receive,
        on_entry: Callable[[], None] = lambda: None,
    ) -> None:
        self.stage, self.stage_of, self.answers = stage, stage_of, answers
        self.receive, self.on_entry = receive, on_entry
        self.entered = stage == 0
        self.last = -1

    def layer(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        index = door.index
        assert index is not None
        self._require_order(door, index)
        stage = self.stage_of[index]
        if stage < self.stage:
            return self._answer(door, module, call, args, kwargs)
        if not self.entered:
            args, kwargs = self._enter(index, args, kwargs)
        else:
            args, kwargs = reveal(args), reveal(kwargs)
        if stage > self.stage:
            leaves, tree = tree_flatten((args, kwargs))
            raise Leave(index, leaves, tree)
        _require_data(door.name, args, kwargs)
        return self._run(door, module, call, args, kwargs)

    def unit(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        if not self.entered:
            return self._answer(door, module, call, args, kwargs)
        if not door.present:
            raise CutError(
                f"`{door.name}` is called on pipeline stage {self.stage}, which does not hold it: it was taken for a "
                "module that is only used before the layers, or after them. Let the cut observe a batch"
            )
        args, kwargs = reveal(args), reveal(kwargs)
        _require_data(door.name, args, kwargs)
        return self._run(door, module, call, args, kwargs)

    def _answer(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        return self.answers.answer(door.name, door.kind, module, call, args, kwargs)

    def _run(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        return call(*args, **kwargs)

    def _require_order(self, door: Door, index: int) -> None:
        if index <= self.last:
            again = "again" if index == self.last else f"after layer {self.last}"
            raise CutError(
                f"`{door.name}` is called {again} in one step; a pipeline runs each layer once per step, in order. "
                "Join the inputs along the sample dimension and call the model once"
            )
        self.last = index

    def _enter(self, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.on_entry()
        leaves = tree_leaves((args, kwargs))
        positions = wanted(leaves)
        for position, value in zip(positions, self.receive(index, leaves, positions)):
            leaves[position].receive(value)
        self.entered = True
        return reveal(args), reveal(kwargs)


@dataclass(frozen=True)
class Demand:
    """What a stage lacks when it is entered.

    Attributes:
        index: The layer at which it is entered.
        tree: Structure of the layer's arguments.
        kinds: Which of their leaves are tensors.
        positions: The leaves to be received.
    """

    index: int
    tree: TreeSpec
    kinds: tuple[bool, ...]
    positions: tuple[int, ...]

    def fits(self, index: int, leaves: list[Any], tree: TreeSpec) -> bool:
        """Whether this was found for a call with arguments of this structure."""
        return self.index == index and self.kinds == tensors_among(leaves) and self.tree == tree


class Rehearsal(Forward):
    """The next stage's forward up to its entry, played on this rank to learn what it lacks."""

    def __init__(self, stage: int, stage_of: tuple[int, ...], answers: Answers) -> None:
        super().__init__(stage, stage_of, answers, self._stop)

    def _enter(self, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, tree = tree_flatten((args, kwargs))
        raise Leave(index, leaves, tree)

    def _stop(self, index: int, leaves: list[Any], positions: list[int]) -> list[Tensor]:
        raise AssertionError("a rehearsal receives nothing")


def wanted(leaves: list[Any]) -> list[int]:
    """Positions of the ghosts among `leaves`; of one that occurs twice, the first."""
    seen: set[int] = set()
    positions = []
    for position, leaf in enumerate(leaves):
        if missing(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            positions.append(position)
    return positions


def tensors_among(leaves: list[Any]) -> tuple[bool, ...]:
    """Which leaves are tensors."""
    return tuple([isinstance(leaf, Tensor) for leaf in leaves])


def _require_data(name: str, args: Any, kwargs: Any) -> None:
    ghost = _first_missing((args, kwargs))
    if ghost is not None:
        raise CutError(
            f"`{name}` needs {ghost.origin}, which is on an earlier pipeline stage and is not handed on with the "
            "arguments of this stage's first layer: a connection that skips over the cut. Move it (a residual "
            "addition, say) into the layers, pass it to them as an argument, or cut elsewhere (`balance`, fewer stages)"
        )


def _first_missing(value: Any) -> Ghost | None:
    if type(value) is Ghost:
        return value if missing(value) else None
    if isinstance(value, (tuple, list)):
        return next((found for item in value if (found := _first_missing(item)) is not None), None)
    if isinstance(value, dict):
        return next((found for item in value.values() if (found := _first_missing(item)) is not None), None)
    return None
