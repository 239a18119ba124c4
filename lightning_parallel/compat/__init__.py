"""Private names of dependencies, patches of their objects, and the state on the user's module.

`lightning`, `torch` and `deepspeed` in this package give each private name of a dependency once, under a public name.
Each has the reason why no public name will do. `tests/test_compat.py` compares them with the installed version.

* `patched` and `Patches` replace attributes of objects of other packages. No other code does.
* `PartialModule` is the first base of the classes that modules get in place.
* `ParallelState` holds everything that the library keeps on a module.
* `twins` serves the other package of Lightning.
"""

from __future__ import annotations

import ast
import copy
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import getattr_static
from types import CodeType, FrameType, FunctionType
from typing import Any
from uuid import uuid4

from torch import nn

__all__ = [
    "FOREIGN",
    "ParallelState",
    "PartialModule",
    "Patches",
    "class_in_place",
    "innermost_users_line",
    "module_that_asks",
    "is_read_by_user",
    "is_users",
    "is_power_of_two",
    "is_users_object",
    "patched",
    "users_line",
    "users_place",
]

# An attribute may have the value None.
_MISSING = object()


class Patches:
    """Replaces attributes of objects that are not ours, and puts them back all at once, last first.

    The object gets its own attribute back. A replacement for an inherited attribute, such as a method, is deleted.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._added: list[tuple[dict[str, Any], str]] = []

    def replace(self, target: Any, name: str, value: Any) -> Any:
        """Set `target.name` to `value` and return the value before."""
        before = getattr(target, name)
        # A data descriptor of the type, such as `__class__` or a slot, can be set again but not deleted.
        # Looked up statically, as asking for a descriptor would run it.
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
        original = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        key = f"_replacement_{uuid4().hex}"
        self._added.append((function.__globals__, key))
        function.__globals__[key] = make(original)
        self.replace(function, "__code__", _code_that_calls(key, function.__code__))

    def undo(self) -> None:
        """Put everything back; a second call does nothing."""
        while self._replaced:
            # Last first, as a later patch may have replaced an earlier one.
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
    cells = "".join(f"cell{index}, " for index in range(len(code.co_freevars)))
    found: dict[str, Any] = {}
    source = f"def make({cells}): return lambda *args, **kwargs: ({key}(*args, **kwargs), {cells})[0]"
    exec(source, found)
    return found["make"](*code.co_freevars).__code__.replace(co_name=code.co_name)


@contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[Any]:
    """Replace `target.name` by `value` during the block; gives the value before."""
    patches = Patches()
    try:
        yield patches.replace(target, name, value)
    finally:
        patches.undo()


def class_in_place(name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    """Return a class with these bases that objects of the last of them can be given as their `__class__`.

    Raises:
        ValueError: If there can be none.
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
        object.__setattr__(object.__new__(kind), "__class__", wanted)
    except TypeError:
        pass
    else:
        return wanted

    # Python compares the layouts of first bases only: `class LSTM(RNN, nn.LSTM)` with an abstract `RNN` fits no class
    # with another first base. So `kind` is the only base here, and the others come before it by the method order.
    def mro(cls: Any) -> list[type]:
        # Subclasses have none of their own, and derive theirs as usual.
        order = cls.__dict__.get("_order")
        return [cls, *order] if order else type.mro(cls)

    ordered = type("Ordered", (type(wanted),), {"mro": mro})
    found = ordered(name, (kind,), {**namespace, "_order": wanted.__mro__[1:]})
    object.__setattr__(object.__new__(kind), "__class__", found)
    return found


FOREIGN = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_parallel"}
FOREIGN |= {"builtins", "torchmetrics", "numpy"}
"""Packages whose classes and functions are not the user's own."""


def is_users(kind: type) -> bool:
    """Tell whether a class is the user's own, rather than one of a known package."""
    return kind.__module__.partition(".")[0] not in FOREIGN


def is_power_of_two(number: int) -> bool:
    """Tell whether a number is 1, 2, 4, 8 and so on: for checks that become rare as a run goes on."""
    return number.bit_count() == 1


def is_users_object(value: Any) -> bool:
    """Tell whether an object has attributes and a class of the user; modules, classes and functions do not count."""
    is_plain = hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value)
    return is_plain and is_users(type(value))


def users_line(is_end: Callable[[FrameType], bool]) -> str:
    """Name the line of the user's code that runs, such as `forward` (model.py, line 12); empty if none does.

    This is the outermost line below the frame for which `is_end` is true. Inner lines may be compiled.
    """
    lines = list(_users_lines(sys._getframe(1), is_end))
    return lines[-1] if lines else ""


def module_that_asks() -> str:
    """Return the name of the module that has called an operation, for the `__torch_function__` that calls this.

    Modes that look at every operation stand between the two: they are passed over.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def innermost_users_line() -> str:
    """Name the innermost running line of the user's code, as `users_line` does; empty if there is none."""
    return next(_users_lines(sys._getframe(1), lambda frame: False), "")


def _users_lines(frame: FrameType | None, is_end: Callable[[FrameType], bool]) -> Iterator[str]:
    """Yield the lines of the user's code that run, from inside out."""
    while frame is not None and not is_end(frame):
        code = frame.f_code
        if frame.f_globals.get("__name__", "").partition(".")[0] not in FOREIGN | {"contextlib", "copy", "functools"}:
            yield f"`{code.co_name}` ({code.co_filename.rpartition('/')[2]}, line {frame.f_lineno})"
        frame = frame.f_back


_PASSED_ON = FOREIGN | {"lightning_utilities"} | set(sys.stdlib_module_names) - {"__main__"}
_ON_RANK = re.compile(r"rank|global_zero|main_process|is_master", re.IGNORECASE)


def users_place(frame: FrameType) -> str:
    """Name the line of the user's code that runs, and the condition on the rank above it; empty if none does.

    In a hook or a step that Lightning has called, it is the line there.

    Args:
        frame: The innermost one, of any thread.
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
    except (SyntaxError, ValueError):
        return ""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.If, ast.IfExp)) or not code.co_firstlineno <= node.lineno <= line:
            continue
        test = ast.unparse(node.test)
        if not _ON_RANK.search(test):
            continue
        body, other = (node.body, node.orelse) if isinstance(node, ast.If) else ([node.body], [node.orelse])
        is_else = any(one.lineno <= line <= (one.end_lineno or 0) for one in other)
        is_left = line > (node.end_lineno or 0) and isinstance(body[-1], (ast.Return, ast.Continue, ast.Raise))
        if is_else or is_left or any(one.lineno <= line <= (one.end_lineno or 0) for one in [node.test, *body]):
            found.append((node.lineno, f"{'the `else` of ' if is_else else ''}`if {test}` (line {node.lineno})"))
    return max(found)[1] if found else ""


def is_read_by_user() -> bool:
    """Tell whether the property that calls this is read by the user's code, and not by Lightning or this library.

    Properties that only pass it on, such as `Trainer.world_size`, have its name.
    """
    frame: FrameType | None = sys._getframe(1)
    name = frame.f_code.co_name  # type: ignore[union-attr]
    while frame is not None and frame.f_code.co_name == name:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in FOREIGN


@dataclass
class ParallelState:
    """All that the library keeps on the user's LightningModule, under one attribute, from one run to the next.

    A copy of the module, or one that was pickled, starts without: it is no part of a pipeline.

    Attributes:
        tensor_ranks: The tensor-parallel ranks that the module was divided over.
        sharding: What was divided how (`tensor.plan.Sharding`).
        rules: How tensors of the whole module are sharded, under every name (`tensor.sharding.Shard`).
        order: Watches the messages of its layers (`strategies.ranks.order.MessageOrder`).
        engine: Its pipeline (`pipeline.engine.PipelineEngine`).
        names: Names in the whole module, before it was cut (`checkpoint.ModelNames`).
        skeleton: The module before the division, without data (`strategies.whole.skeleton.Skeleton`).
        full_states: Puts full tensors into its state dicts during a run (`strategies.whole.full_state.FullStates`).
        copies: Knows the copies of its parts (`strategies.whole.copies.ModuleCopies`).
        pending: Parameters that wait for their data (`strategies.deferred.init.PendingInitialization`); a run that was
            refused leaves them to the next one.
        watch: Watches the user's hooks during a run (`strategies.hooks.watch.HookWatch`).
        is_in_step: Whether a part of a step is running, of those that all ranks run.
        is_alone: Whether this rank runs the whole module by itself, as the reference of the self-check does.
        skipped_steps: How many steps changed nothing, because a gradient was not finite.
        logged: By name of what a step logs in microbatches: whether it is a mean over samples although microbatches are
            weighted by something else, and whether its `batch_size` is that of the whole batch.
        metric_numbers: By the argument of a metric: whether the number of a batch is the `mean`, `sum`, `max` or `min`
            of the numbers of its microbatches.
        merging: By step, and by name of a result or changed attribute, such as `return['preds']`, `seen` or
            `losses[0]`: the kind of `pipeline.Merging` by which microbatches are merged. The kind is empty for a value
            that the microbatches leave one after another as a single step does.
        whole_batches: Steps for evaluation that are run as one microbatch, since several do not give the same.
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
    engine: Any = None
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
    whole_batches: set[str] = field(default_factory=set)
    doubt: tuple[Any, str] | None = None
    copies_in_doubt: list[Any] | None = None
    batch_states: dict[int, tuple[Any, dict[str, Any]]] | None = None
    followed: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: Any) -> ParallelState:
        """Return the state of `module`; a new one where it has none yet."""
        return module.__dict__.setdefault("_parallel_state", cls())

    def own_parts(self) -> AbstractContextManager[None]:
        """Let state dicts of the module hold this rank's part inside the block, without a collective."""
        return nullcontext() if self.full_states is None else self.full_states.paused()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelState:
        return ParallelState()

    def __reduce__(self) -> Any:
        return ParallelState, ()


class PartialModule(nn.Module):
    """First base of the class that a module gets in place when it is divided: may be copied, refuses to be pickled."""

    def _what_is_missing(self) -> str:
        """Name the whole that the module is a part of."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # `copy` would go by `__reduce__`, which refuses; a class with a copy function of its own keeps it.
        inherited = getattr(super(), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        # As `copy` does: without what modules leave out, such as the Trainer.
        held = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        duplicate.__setstate__(copy.deepcopy(held, memo))
        return duplicate

    def __reduce__(self) -> Any:
        """Refuse to be pickled, since the parameters of other ranks would be missing."""
        raise RuntimeError(
            f"{self._what_is_missing()}, so it cannot be pickled or saved as a full module; write a checkpoint"
            " (`trainer.save_checkpoint(path)`) and load it into a new module (`load_from_checkpoint`) [LP038]"
        )
