"""Private names of dependencies, patches of their objects, and the state on the user's module.

`lightning`, `torch` and `deepspeed` in this package give each private name of a dependency once, under a public name,
and with the reason for it. `tests/test_compat.py` compares the names with the installed versions.

* `patched` and `Patches` replace attributes of objects of other packages. No other code replaces them.
* `PartialModule` is the first base of the classes that modules get in place.
* `Division` records the changes of this package in one module, to undo and redo them.
* `ParallelState` holds everything that the library keeps on a module.
* `twins` serves the other package of Lightning.
"""

from __future__ import annotations

import ast
import copy
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from inspect import getattr_static
from types import CodeType, FrameType, FunctionType
from typing import Any
from uuid import uuid4

from torch import nn

__all__ = [
    "DIVISION",
    "FOREIGN",
    "Division",
    "ParallelState",
    "PartialModule",
    "Patches",
    "class_in_place",
    "hook_after",
    "hook_before",
    "innermost_users_line",
    "module_that_asks",
    "is_read_by_user",
    "is_users",
    "is_power_of_two",
    "fields_of",
    "has_value",
    "is_users_object",
    "patched",
    "users_line",
    "users_place",
]


class _MISSING:
    """Stands for an absent attribute, because an attribute may be None. `deepcopy` does not copy a class."""


class Patches:
    """Replaces attributes of objects of other packages, and restores them all at once, the last replacement first.

    An object gets its own attribute back. A replacement for an inherited attribute, such as a method, is deleted.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._added: list[tuple[dict[str, Any], str]] = []

    def replace(self, target: Any, name: str, value: Any) -> Any:
        """Set `target.name` to `value` and return the previous value."""
        before = getattr(target, name)
        # A data descriptor of the type, such as `__class__` or a slot, can be set again but not deleted.
        # Looked up statically, because an ordinary look-up would run the descriptor.
        is_descriptor = hasattr(type(getattr_static(type(target), name, None)), "__set__")
        own = before if is_descriptor or not hasattr(target, "__dict__") else vars(target).get(name, _MISSING)
        setattr(target, name, value)
        self._replaced.append((target, name, own))
        return before

    def replace_function(
        self, function: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Redirect all calls of a function to the result of `make` for the original function.

        This replaces the code of the function. Users import functions by name, so a new attribute would not reach them.
        """
        assert isinstance(function, FunctionType)
        # A second function with the old code, because `function` itself gets other code below.
        original = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        # A new key each time, because several patches may replace one function.
        key = f"_replacement_{uuid4().hex}"
        self._added.append((function.__globals__, key))
        function.__globals__[key] = make(original)
        self.replace(function, "__code__", _code_that_calls(key, function.__code__))

    def undo(self) -> None:
        """Restore all attributes; a second call does nothing."""
        while self._replaced:
            # Last first, because a later patch may have replaced an earlier patch.
            target, name, own = self._replaced.pop()
            if own is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, own)
        while self._added:
            names, key = self._added.pop()
            del names[key]


def _code_that_calls(key: str, code: CodeType) -> CodeType:
    """Return code that passes its arguments on to the global `key`, with as many free variables as `code`."""
    # Python refuses code with another number of free variables. The tuple only mentions them; its first item is the
    # result.
    cells = "".join(f"cell{index}, " for index in range(len(code.co_freevars)))
    found: dict[str, Any] = {}
    source = f"def make({cells}): return lambda *args, **kwargs: ({key}(*args, **kwargs), {cells})[0]"
    exec(source, found)
    return found["make"](*code.co_freevars).__code__.replace(co_name=code.co_name)


@contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[Any]:
    """Replace `target.name` by `value` in the block, which gets the previous value."""
    patches = Patches()
    try:
        yield patches.replace(target, name, value)
    finally:
        patches.undo()


# By torch's names: the user's attributes may have similar names, as Hugging Face's `_output_capturing_hooks_installed`.
_HOOK_DICTS = [name for name in vars(nn.Module()) if "_hooks" in name]

DIVISION = "_parallel_division"
"""The attribute of a module that holds its `Division`."""


@dataclass
class Division:
    """Records the changes of this package in one module, to undo and redo them.

    The record is an attribute of the module, so that `deepcopy` copies both. An attribute that the user has set since
    the division is not undone.

    Attributes:
        kind, placed_kind: Class of the module before and after the division.
        former, placed: Values of the changed attributes before and after the division.
        hooks: Keys of the hooks that the division has registered.
    """

    kind: type
    placed_kind: type | None = None
    former: dict[str, Any] = field(default_factory=dict)
    placed: dict[str, Any] = field(default_factory=dict)
    hooks: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, module: nn.Module) -> Division:
        """Return the record of a module; a new record if it has none. Call this before the class changes."""
        found: Division = vars(module).setdefault(DIVISION, cls(type(module)))
        return found

    def keep(self, module: nn.Module, *names: str) -> None:
        """Keep the values of attributes that the caller is going to replace or to add."""
        for name in names:
            self.former.setdefault(name, vars(module).get(name, _MISSING))

    def close(self, module: nn.Module) -> None:
        """Note the class and the attributes of the divided module."""
        self.placed_kind = type(module)
        self.placed = {name: vars(module).get(name, _MISSING) for name in self.former}

    def undo(self, module: nn.Module) -> tuple[type, dict[str, Any]]:
        """Undo the division of `module`, and return its class and its attributes, for `redo`."""
        own = vars(module)
        divided = type(module), dict(own)
        module.__class__ = self.kind
        own.pop(DIVISION, None)
        for name, value in self.former.items():
            if own.get(name, _MISSING) is self.placed.get(name, _MISSING):
                _put(own, name, value)
        for name in self._hooks_in(own):
            # Copies of the dicts: the user may have added hooks, and the divided module keeps its dicts.
            own[name] = type(own[name])((key, hook) for key, hook in own[name].items() if key not in self.hooks)
        return divided

    def redo(self, module: nn.Module, kind: type, divided: Mapping[str, Any]) -> None:
        """Divide `module` again. Hooks and further attributes of the user stay."""
        own = vars(module)
        module.__class__ = kind
        for name in (DIVISION, *self.former):
            _put(own, name, divided.get(name, _MISSING))
        for name in self._hooks_in(divided):
            # In the order of the divided module, because some hooks of this package run before the user's.
            before, now = divided[name], own[name]
            own[name] = type(now)((key, hook) for key, hook in before.items() if key in now or key in self.hooks)
            own[name].update(now)

    def _hooks_in(self, attributes: Mapping[str, Any]) -> list[str]:
        """Return the names of the dicts of torch that have hooks of the division."""
        return [name for name in _HOOK_DICTS if not self.hooks.isdisjoint(attributes.get(name, ()))]


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    attributes[name] = value
    if value is _MISSING:
        del attributes[name]


def hook_before(module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
    """Register a hook of the division before the forward of `module`; `options` are torch's."""
    Division.of(module).hooks.add(module.register_forward_pre_hook(hook, **options).id)


def hook_after(module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
    """Register a hook of the division after the forward of `module`; `options` are torch's."""
    Division.of(module).hooks.add(module.register_forward_hook(hook, **options).id)


def class_in_place(name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    """Return a class with these bases that objects of the last base can get as their `__class__`.

    Raises:
        ValueError: If Python allows no such class.
    """
    try:
        return _class_in_place(name, bases, namespace)
    except TypeError as error:
        raise ValueError(
            f"Modules of the class `{bases[-1].__name__}` cannot be sharded in place, because Python allows no"
            f" subclass of it here ({error}). Give the class no `__init_subclass__` with arguments, and no metaclass"
            " that forbids subclasses"
        ) from error


def _class_in_place(name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    kind = bases[-1]
    wanted = type(name, bases, dict(namespace))
    try:
        # Tried on an empty object, because only the assignment tells whether Python allows the class.
        object.__setattr__(object.__new__(kind), "__class__", wanted)
    except TypeError:
        pass
    else:
        return wanted

    # Python compares the layouts of first bases only: `class LSTM(RNN, nn.LSTM)` with an abstract `RNN` fits no class
    # with another first base. So `kind` is the only base here, and the method order puts all other bases before it.
    def mro(cls: Any) -> list[type]:
        # Subclasses have no `_order` in their own dict, and get their method order as usual.
        order = cls.__dict__.get("_order")
        return [cls, *order] if order else type.mro(cls)

    ordered = type("Ordered", (type(wanted),), {"mro": mro})
    found = ordered(name, (kind,), {**namespace, "_order": wanted.__mro__[1:]})
    object.__setattr__(object.__new__(kind), "__class__", found)
    return found


FOREIGN = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_parallel"}
FOREIGN |= {"builtins", "torchmetrics", "numpy"}
"""Packages whose classes and functions are not the user's code."""


def is_users(kind: type) -> bool:
    """Tell whether a class is the user's own, not a class of a known package."""
    return kind.__module__.partition(".")[0] not in FOREIGN


def is_power_of_two(number: int) -> bool:
    """Tell whether a number is 1, 2, 4, 8 and so on: for checks that become rare as a run goes on."""
    return number.bit_count() == 1


def is_users_object(value: Any) -> bool:
    """Tell whether an object has attributes and a class of the user; modules, classes and constants do not count."""
    kind: Any = type(value)
    if isinstance(value, (type, nn.Module, Enum)) or not is_users(kind):
        return False
    # A class with slots and a hash of its contents, such as a path or a fraction, is a constant.
    return hasattr(value, "__dict__") or bool(_slots_of(kind)) and not has_value(kind)


@lru_cache(maxsize=1024)
def has_value(kind: Any) -> bool:
    """Tell whether objects of a class are compared, and hashed, by their contents."""
    return kind.__hash__ not in (None, object.__hash__) and kind.__eq__ is not object.__eq__


@lru_cache(maxsize=1024)
def _slots_of(kind: Any) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            # Python stores a private name together with the name of its class.
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(found)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, by name."""
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    return found | {name: getattr(value, name) for name in _slots_of(value.__class__) if hasattr(value, name)}


def users_line(is_end: Callable[[FrameType], bool]) -> str:
    """Name the running line of the user's code, such as `forward` (model.py, line 12); empty if there is none.

    The line is the outermost one below the frame for which `is_end` is true. Inner lines may be compiled.
    """
    lines = list(_users_lines(sys._getframe(1), is_end))
    return lines[-1] if lines else ""


def module_that_asks() -> str:
    """Return the name of the module that has called an operation, for the calling `__torch_function__`.

    Frames of modes between the module and the caller, which see every operation, are skipped.
    """
    # Two frames up: this function, and the `__torch_function__` that asks.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def innermost_users_line() -> str:
    """Name the innermost running line of the user's code, as `users_line` does; empty if there is none."""
    return next(_users_lines(sys._getframe(1), lambda frame: False), "")


def _users_lines(frame: FrameType | None, is_end: Callable[[FrameType], bool]) -> Iterator[str]:
    """Yield the running lines of the user's code, innermost first."""
    while frame is not None and not is_end(frame):
        code = frame.f_code
        if frame.f_globals.get("__name__", "").partition(".")[0] not in FOREIGN | {"contextlib", "copy", "functools"}:
            yield f"`{code.co_name}` ({code.co_filename.rpartition('/')[2]}, line {frame.f_lineno})"
        frame = frame.f_back


_PASSED_ON = FOREIGN | {"lightning_utilities"} | set(sys.stdlib_module_names) - {"__main__"}
_ON_RANK = re.compile(r"rank|global_zero|main_process|is_master", re.IGNORECASE)


def users_place(frame: FrameType) -> str:
    """Name the running line of the user's code, and the condition on the rank above it; empty if there is none.

    In a hook or a step that Lightning has called, the line is the outermost line of the user there. Otherwise it is the
    innermost line.

    Args:
        frame: The innermost frame of any thread.
    """
    lines: list[FrameType] = []
    condition, is_called = "", False
    inner: FrameType | None = frame
    while inner is not None and not is_called:
        module = inner.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _PASSED_ON:
            lines.append(inner)
            condition = condition or _condition_on_rank(inner.f_code, inner.f_lineno)
        elif module.endswith(".rank_zero"):
            condition = condition or "`rank_zero_only`"
        inner = inner.f_back
        is_called = module.endswith(".trainer.call") or inner is not None and inner.f_code.co_name == "run_in_step"
    if not lines:
        return ""
    line = lines[-1] if is_called else lines[0]
    place = f"`{line.f_code.co_name}` ({line.f_code.co_filename.rpartition('/')[2]}, line {line.f_lineno})"
    return f"{place}, under {condition}" if condition else place


@lru_cache(maxsize=64)
def _condition_on_rank(code: CodeType, line: int) -> str:
    """Return the last condition on the rank under which a line of a function runs; empty if none is found."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    # Python 3.11 raises a SystemError if the garbage collector runs code meanwhile.
    except (SyntaxError, ValueError, SystemError):
        return ""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.If, ast.IfExp)) or not code.co_firstlineno <= node.lineno <= line:
            continue
        test = ast.unparse(node.test)
        if not _ON_RANK.search(test):
            continue
        if isinstance(node, ast.IfExp):
            # Both branches may be in one line, so no line tells which of them runs.
            if line <= (node.end_lineno or 0):
                found.append((node.lineno, f"`{ast.unparse(node)}` (line {node.lineno})"))
            continue
        body, other = node.body, node.orelse
        is_else = any(one.lineno <= line <= (one.end_lineno or 0) for one in other)
        is_left = line > (node.end_lineno or 0) and isinstance(body[-1], (ast.Return, ast.Continue, ast.Raise))
        if is_else or is_left or line <= (body[-1].end_lineno or 0):
            found.append((node.lineno, f"{'the `else` of ' if is_else else ''}`if {test}` (line {node.lineno})"))
    return max(found)[1] if found else ""


def is_read_by_user() -> bool:
    """Tell whether the user's code reads the calling property, and not Lightning or this library.

    Frames with the name of the property, such as `Trainer.world_size`, only pass the value on and are skipped.
    """
    frame: FrameType | None = sys._getframe(1)
    name = frame.f_code.co_name  # type: ignore[union-attr]
    while frame is not None and frame.f_code.co_name == name:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in FOREIGN


@dataclass
class ParallelState:
    """All state of the library on the user's LightningModule, under one attribute, from one run to the next.

    A copied or unpickled module starts without this state, because it is not part of a pipeline.

    Attributes:
        tensor_ranks: The tensor-parallel ranks over which the module is sharded.
        sharding: The result of the tensor-parallel plan (`tensor.plan.Sharding`).
        rules: How tensors of the full module are sharded, under every name (`tensor.sharding.Shard`).
        order: Watches the messages of its layers (`strategies.ranks.order.MessageOrder`).
        positions: How sequences are split over the context axis (`tensor.context.PositionSplit`).
        position_order: Watches the messages between the parts of sequences, like `order`.
        parameter_shards: Holds the slices of its parameters (`data_parallel.ParameterShards`), with `zero_stage=3`.
        replica_order: Watches the messages that gather slices of its parameters over the replicas, like `order`.
        engine: Its pipeline (`pipeline.engine.PipelineEngine`).
        tiles: The modules that run in tiles of positions (`tensor.tile_plan.TilePlan`).
        names: Names in the full module, before the split into stages (`checkpoint.ModelNames`).
        skeleton: The full module without data (`strategies.whole.skeleton.Skeleton`).
        full_states: Puts full tensors into its state dicts during a run (`strategies.whole.full_state.FullStates`).
        copies: Knows the copies of its parts (`strategies.whole.copies.ModuleCopies`).
        pending: Parameters that wait for their data (`strategies.deferred.init.PendingInitialization`). A run that
            was refused leaves them to the next run.
        watch: Shows full tensors to the user's hooks during a run (`strategies.hooks.watch.HookWatch`).
        is_in_step: Whether a part of a step runs that all ranks run.
        is_alone: Whether this rank runs the full module alone, as the reference of the self-check does.
        skipped_steps: Number of steps that changed nothing, because a gradient was not finite.
        logged: Two flags for each name that a step logs in microbatches. The first: the value is a mean over samples,
            but another number weights the microbatches. The second: its `batch_size` is the size of the full batch.
        metric_numbers: By the argument of a metric: whether the number of a batch is the `mean`, `sum`, `max` or `min`
            of the numbers of its microbatches.
        merging: By step, and by name of a result or changed attribute, such as `return['preds']`, `seen` or
            `losses[0]`: the kind of `pipeline.Merging` by which microbatches are merged. The kind is empty for a value
            that needs no merging: consecutive microbatches leave the same value as a single step.
        proven: By step, the names in `merging` whose rule fitted different values of microbatches in a comparison, with
            the strength of this proof; see `pipeline.Merging.unproven`.
        whole_batches: Evaluation steps that run as one microbatch, because several microbatches give another result.
        doubt: Two microbatches together, and a warning, if the loss of a sketch of the model is not the mean of their
            losses.
        copies_in_doubt: Batches of copied samples for which the sketch's loss differs from the mean over their halves;
            None if the sketch could not run.
        batch_states: While a step runs on a microbatch: metrics, and their states of this microbatch alone, by `id`.
        followed: Paths of the modules that are not intercepted: all stages run their code, and the attributes on the
            last stage count.
    """

    tensor_ranks: tuple[int, ...] = ()
    sharding: Any = None
    rules: dict[str, Any] = field(default_factory=dict)
    order: Any = None
    positions: Any = None
    position_order: Any = None
    parameter_shards: Any = None
    replica_order: Any = None
    engine: Any = None
    tiles: Any = None
    names: Any = None
    skeleton: Any = None
    full_states: Any = None
    copies: Any = None
    pending: Any = None
    watch: Any = None
    is_in_step: bool = False
    is_alone: bool = False
    skipped_steps: int = 0
    logged: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    metric_numbers: dict[str, str] = field(default_factory=dict)
    merging: dict[str, dict[str, str]] = field(default_factory=dict)
    proven: dict[str, dict[str, str]] = field(default_factory=dict)
    whole_batches: set[str] = field(default_factory=set)
    doubt: tuple[Any, str] | None = None
    copies_in_doubt: list[Any] | None = None
    batch_states: dict[int, tuple[Any, dict[str, Any]]] | None = None
    followed: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: Any) -> ParallelState:
        """Return the state of `module`; a new state if it has none yet."""
        return module.__dict__.setdefault("_parallel_state", cls())

    def own_parts(self) -> AbstractContextManager[None]:
        """Let state dicts of the module hold only this rank's part in the block, without a collective."""
        return nullcontext() if self.full_states is None else self.full_states.paused()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelState:
        return ParallelState()

    def __reduce__(self) -> Any:
        return ParallelState, ()


class PartialModule(nn.Module):
    """The first base of the class that a split or sharded module gets in place: allows copies, refuses to pickle."""

    def _what_is_missing(self) -> str:
        """Describe the missing part of the module, as the beginning of the error."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # `copy` would call `__reduce__`, which refuses. A class with its own `__deepcopy__` keeps it.
        inherited = getattr(super(), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        duplicate = type(self).__new__(type(self))
        # Before the attributes are copied, because they may refer to the module.
        memo[id(self)] = duplicate
        # As `copy` does: `__getstate__` of a module leaves out objects such as the Trainer.
        held = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        duplicate.__setstate__(copy.deepcopy(held, memo))
        return duplicate

    def __reduce__(self) -> Any:
        """Refuse to be pickled, since the parameters of other ranks would be missing."""
        raise RuntimeError(
            f"{self._what_is_missing()}, so it cannot be pickled or saved as a full module; write a checkpoint"
            " (`trainer.save_checkpoint(path)`) and load it into a new module (`load_from_checkpoint`) [LP038]"
        )
