"""Watches the user's hooks for operations on shards and slices that would differ from one process.

The audit and the self-check watch steps. This module watches hooks of the module, of callbacks, of optimizers and of
gradients. It also watches a step under manual optimization after its first backward, in steps 1, 2, 4, 8, ...:

    calls 1, 2, 4, 8, ... of each hook      every operation is checked; then all ranks raise together, or none
    a line that has not run before          operations are checked from this line to the end of the hook
    other calls                             only new lines are noticed; after all lines have run, the watch costs
                                            nothing

A refused hook runs to its end: an error in the middle of a hook on some ranks only would leave other ranks waiting.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import FOREIGN, ParallelState, Patches, is_users, patched
from lightning_parallel.compat.torch import (
    current_dispatch_mode,
    current_function_mode,
    global_step_hooks,
    gradient_hooks_of,
    has_compiled_parts,
    leave_mode,
    step_hooks_of,
)
from lightning_parallel.compat.twins import is_a
from lightning_parallel.data_parallel import ParameterSlices
from lightning_parallel.strategies.checkpoints.files import LOCAL_STEPS
from lightning_parallel.strategies.hooks.part_use import GATHERED, ExportMode, PartUseMode
from lightning_parallel.strategies.hooks.parts import Part, PartMap
from lightning_parallel.tensor.sharding import Shard

__all__ = ["HookError", "HookWatch", "WatchedHook", "raised_in_shards"]

_PASSED = FOREIGN | {"lightning_utilities"} | set(sys.stdlib_module_names) - {"__main__"}
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward", "backward")
_OF_CHECKPOINTS = ("on_load_checkpoint", "load_state_dict")  # these hooks get full tensors
_WHOLE_IN_CHECKPOINTS = ("state_dict", "optimizer_states", LOCAL_STEPS)
_OURS = "lightning_parallel"
_ENGINE = ("backward", "grad", "_engine_run_backward")  # functions of autograd, which call hooks by themselves


_NOTHING_HELD = re.compile(r"(?i)empty|at least one tensor|list index|StopIteration")
"""Text of an error from code that finds no parameter or gradient in a list."""


class HookError(RuntimeError):
    """Reports a hook of your module that computes with a shard or a microbatch as if it were the full tensor.

    Under the mesh strategies, forward hooks and gradient hooks see only a shard or a microbatch. The error names the
    hook and its file.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import HookError, TensorParallelStrategy

        trainer = Trainer(devices=2, strategy=TensorParallelStrategy())
        try:
            trainer.fit(MyModule(), MyData())
        except HookError as error:
            print(error)  # names the hook and the way out
            raise
        ```
    """


@dataclass
class WatchedHook:
    """Describes a hook: its name for messages, the ranks that call it together, and the number of its calls.

    Attributes:
        codes: The user's functions that the hook has run.
    """

    title: str
    group: Group | None
    is_in_step: bool = False
    calls: int = 0
    codes: set[CodeType] = field(default_factory=set)

    def is_due(self) -> bool:
        """Count a call, and tell whether all ranks check this call."""
        self.calls += 1
        return not self.calls & (self.calls - 1)


class HookWatch:
    """Refuses hooks of the user that treat a part as the full tensor.

    Args:
        module: The divided module.
        rules: How its tensors are sharded over the tensor axis, by name.
        groups: The mesh's groups.
        slices: The slices of the replicas; None without ZeRO.
        optimizers: Returns the optimizers of the run.
    """

    def __init__(
        self,
        module: LightningModule,
        rules: Mapping[str, Shard],
        groups: MeshGroups,
        slices: ParameterSlices | None,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self._module = module
        self._rules = rules
        self._groups = groups
        self._slices = slices
        self._optimizers = optimizers
        self.group = groups.replica if slices is None else groups.world
        self._hooks: dict[str, WatchedHook | None] = {}
        self._agreed: frozenset[tuple[str, int]] = frozenset()
        self._parts = PartMap()
        self._lines = _Lines()
        self._calls: list[_WatchedCall] = []
        self._pending: HookError | None = None
        self._wrapped: list[tuple[dict[int, Callable[..., Any]], int, Callable[..., Any], Callable[..., Any]]] = []
        self._told: set[str] = set()
        self._steps = 0
        self._manual: _WatchedCall | None = None
        self._depth = 0
        self._modules: set[int] = set()
        self._saving: list[Any] = []
        self._kept: tuple[dict[str, tuple[torch.Size, bool]], int] | None = None

    def install(self, patches: Patches) -> None:
        """Watch the hooks of a run until `patches` are undone; every rank must call it."""
        trainer = self._module.trainer
        self._modules = {id(one) for one in self._module.modules() if not isinstance(one, Metric)}
        # Callbacks may differ between ranks; only hooks of callbacks that all ranks have can raise together.
        keys = Counter(_key(one) for one in trainer.callbacks if is_users(type(one)))  # type: ignore[attr-defined]
        found = comm.all_gather_object(set(keys.items()), self._groups.world)
        # With equal counts: several callbacks may have one key, and only their number tells a missing callback.
        self._agreed = frozenset(found[0].intersection(*found[1:]))
        state = ParallelState.of(self._module)
        patches.replace(state, "watch", self)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if _is_users_hook(callback, "state_dict"):
                self._saving.append(callback)
                # Rank zero alone may call this hook, so a refusal is raised later, when all ranks save.
                hook = WatchedHook(f"`{type(callback).__name__}.state_dict`", None, is_in_step=True)
                patches.replace(callback, "state_dict", self._watched(callback.state_dict, hook, None))
        # Patch the profiler: every version of Lightning runs each hook in a span of its profiler.
        own = trainer.profiler.profile  # type: ignore[attr-defined]

        def profile(action: str) -> AbstractContextManager[Any]:
            hook = self._hook_of(action)
            return own(action) if hook is None else self._around(hook, own(action))

        patches.replace(trainer.profiler, "profile", profile)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------------------------------------- which hooks

    def _hook_of(self, action: str) -> WatchedHook | None:
        """Return the hook with this name in Lightning; None if its code is not the user's."""
        if action not in self._hooks:
            self._hooks[action] = self._find(action)
        return self._hooks[action]

    def _find(self, action: str) -> WatchedHook | None:
        kind, _, rest = action.partition("]")
        owner, _, name = rest.rpartition(".")
        if name in (*_STEPS, *_OF_CHECKPOINTS) or name.endswith("_dataloader") or "transfer" in name:
            return None
        if name == "on_save_checkpoint" and self._groups.pipeline_parallel.size > 1:
            return None  # its full tensors share memory with the parts of this stage
        if kind == "[LightningModule":
            if not _is_users(getattr(self._module, name, None)):
                return None
            return WatchedHook(f"`{type(self._module).__name__}.{name}`", self._group_of(name))
        if kind == "[Callback":
            callbacks = [one for one in self._module.trainer.callbacks if _key(one) == owner]  # type: ignore[attr-defined]
            if not any(_is_users_hook(one, name) for one in callbacks):
                return None
            is_agreed = (owner, len(callbacks)) in self._agreed
            return WatchedHook(f"`{type(callbacks[0]).__name__}.{name}`", self._group_of(name) if is_agreed else None)
        return None

    def _group_of(self, name: str) -> Group:
        # In evaluation, replicas may have different numbers of batches.
        evaluates = any(stage in name for stage in ("validation", "test", "predict", "sanity"))
        return self._groups.replica if evaluates else self.group

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Watch the hooks of the optimizer, which code may register at any time, but not its step."""
        for hooks in (*step_hooks_of(optimizer), *global_step_hooks()):
            self._wrap_all(hooks, f"a hook of `{type(optimizer).__name__}.step`", None)
        with self.paused():
            yield

    def _wrap_all(self, hooks: dict[int, Callable[..., Any]], title: str, parameter: str | None) -> None:
        for key, function in list(hooks.items()):
            if _is_users(function) and not hasattr(function, "watches"):
                watched = self._watched(function, WatchedHook(title, None, is_in_step=True), parameter)
                hooks[key] = watched
                self._wrapped.append((hooks, key, function, watched))

    def _watched(self, function: Callable[..., Any], hook: WatchedHook, parameter: str | None) -> Callable[..., Any]:
        def run_watched(*args: Any, **kwargs: Any) -> Any:
            given = None if parameter is None or not args else (parameter, args[0])
            with self.watching(hook, given):
                return function(*args, **kwargs)

        run_watched.watches = function  # type: ignore[attr-defined]
        return functools.update_wrapper(run_watched, function, assigned=("__doc__",), updated=())

    def begin_step(self) -> None:
        """Find new gradient hooks, in some steps only; every rank must call it."""
        self._steps += 1
        if self._is_due_step():
            for name, parameter in self._module.named_parameters():
                for hooks in gradient_hooks_of(parameter):
                    self._wrap_all(hooks, f"a hook for the gradient of `{name}`", name)

    def _is_due_step(self) -> bool:
        return not self._steps & (self._steps - 1)

    @contextmanager
    def manual_step(self) -> Iterator[None]:
        """Watch a step under manual optimization after its first backward; every rank must call it.

        Raises:
            HookError: On every rank, here or in `settle`.
        """
        if not self._is_due_step() or has_compiled_parts(self._module):
            yield
            return
        hook = WatchedHook(f"`{type(self._module).__name__}.training_step`", self.group, is_in_step=True)
        call = self._manual = _WatchedCall(self, hook, None)
        self._calls.append(call)
        own = Tensor.backward
        depth = self._depth

        def backward(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            if self._depth == depth:  # the user may call `loss.backward()` instead of `manual_backward`
                call.begin()

        try:
            with patched(Tensor, "backward", backward):
                yield
        finally:
            call.end()
            self._calls.remove(call)
            self._manual = None
        comm.raise_together(call.failure, self.group)

    def follow_backward(self) -> None:
        """Begin to watch a step under manual optimization; called at the end of each backward."""
        if self._manual is not None:
            self._manual.begin()

    def settle(self) -> None:
        """Raise the refusals of hooks inside a step; every rank must call it at the same points.

        Raises:
            HookError: On every rank, in steps that all ranks check.
        """
        is_due = self._is_due_step()
        if is_due and self._pending is None:
            self._pending = self._part_of_states()  # check now, not after hours at the first save
        failure, self._pending = self._pending, None
        if self._manual is not None:
            failure = failure or self._manual.failure
        # In other steps only this rank may have found a new line, and the other ranks do not communicate here.
        if is_due:
            comm.raise_together(failure, self.group)
        elif failure is not None:
            raise failure

    # ------------------------------------------------------------------------------------------------- checkpoints

    def check_saved(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse parts among the values of the user's code in a checkpoint; every rank must call it before a save.

        Raises:
            HookError: On every rank, if such a value holds a part.
        """
        failure, self._pending = self._pending, None
        if failure is None:
            if self._kept is None:
                with self.paused():
                    self.seed()
            others = {key: value for key, value in checkpoint.items() if key not in _WHOLE_IN_CHECKPOINTS}
            failure = self._saved_part(others, "a checkpoint")
        comm.raise_together(failure, self._groups.world)

    def _part_of_states(self) -> HookError | None:
        if self._saving:
            with self.paused():  # the save may happen inside a watched hook
                self.seed()
        for callback in self._saving:
            try:
                state = callback.state_dict()
            except Exception:
                continue  # the state may exist only later in the run
            failure = self._saved_part({"state": state}, f"the state of `{type(callback).__name__}`")
            if failure is not None:
                return failure
        return None

    def _saved_part(self, saved: Any, title: str) -> HookError | None:
        for path, label in self._parts_in(saved, ()):
            return HookError(
                f"{title} must hold full tensors in `{'.'.join(path)}`; got {label}. Each rank holds another part,"
                " and only one is written. `self.state_dict()`, called in a hook on every rank, gives full tensors to"
                " save. The state dict of a `copy.deepcopy` of the module does so as well, and you can average it. Or"
                " use Lightning's `EMAWeightAveraging` [LP034]"
            )
        return None

    def _parts_in(self, value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        if isinstance(value, Tensor):
            found = self._parts.find(value)
            if found is not None and found.part.is_divided:
                yield path, f"{found.part.label or 'a part'}, which is {found.part.why or 'one part of several'}"
        elif isinstance(value, (Mapping, list, tuple)):
            entries = list(value.items() if isinstance(value, Mapping) else enumerate(value))
            held = self._held_of({str(key): each for key, each in entries if isinstance(each, Tensor)})
            if held:
                yield path, held
            for key, each in entries:
                yield from self._parts_in(each, (*path, str(key)))

    def _held_of(self, tensors: Mapping[str, Tensor]) -> str:
        """Return a text about tensors with the shape of a shard, or of this stage alone; empty without one."""
        own, count = self._held() if self._kept is None else self._kept
        for name in tensors.keys() & own.keys() & self._rules.keys():
            shape = tensors[name].shape
            if shape == own[name][0] and shape != self._rules[name].full_shape(shape):
                return f"`{name}` in the shape of this rank's shard"
        if not tensors or len(own) == count:
            return ""
        places = [self._parts.find(each) for each in tensors.values()]
        owners = frozenset().union(*(place.part.owners for place in places if place is not None))
        trained = {name for name, (_, is_trained) in own.items() if is_trained}
        matrices = {name for name, (shape, _) in own.items() if len(shape) > 1}
        # A full state dict shares memory with the tensors of this stage, so single tensors of the stage may be right.
        if tensors.keys() in (own.keys(), trained) or (
            all(place is not None for place in places) and owners in (own.keys(), trained, matrices)
        ):
            return "the parameters of this pipeline stage alone"
        return ""

    def _held(self) -> tuple[dict[str, tuple[torch.Size, bool]], int]:
        """Return shape and `requires_grad` of each parameter of this rank, and the number in the full model."""
        own = {name: (one.shape, one.requires_grad) for name, one in self._module.named_parameters()}
        names = ParallelState.of(self._module).names
        return own, len(own) if names is None else len(set(names.parameters.values()))

    def close(self) -> None:
        """Put the original hooks back. `check_saved` still knows the parts of the run."""
        self._kept = self._held()
        for hooks, key, function, watched in self._wrapped:
            # The user may have removed the hook meanwhile.
            if hooks.get(key) is watched:
                hooks[key] = function
        self._wrapped.clear()

    # ---------------------------------------------------------------------------------------------------- watching

    @contextmanager
    def _around(self, hook: WatchedHook, span: AbstractContextManager[Any]) -> Iterator[None]:
        with span, self.watching(hook):
            yield

    @contextmanager
    def watching(self, hook: WatchedHook, given: tuple[str, Tensor] | None = None) -> Iterator[None]:
        """Watch a call of a hook.

        Raises:
            HookError: On every rank, if all of them call the hook and check this call. On this rank alone, if a new
                line is refused.
        """
        is_due = hook.is_due()
        call = _WatchedCall(self, hook, given)
        self._calls.append(call)
        error: Exception | None = None
        with self._lines.noticed(call.begin, hook.codes, is_due):
            try:
                if is_due:
                    call.begin()
                yield
            except Exception as raised:
                # Raise later: the other ranks must first learn of the error.
                error = raised
            finally:
                call.end()
                self._calls.remove(call)
        is_shared = is_due and hook.group is not None and not hook.is_in_step
        if call.failure is None and error is not None and not is_shared:
            raise error
        if hook.is_in_step:
            # Other ranks may be in the middle of a schedule, so this rank raises in `settle`.
            self._pending = self._pending or call.failure
        elif is_due and hook.group is not None:
            self._parts.prune()
            self._raise_on_all(hook, hook.group, call.failure, error)
        elif call.failure is not None:
            raise call.failure

    def _raise_on_all(
        self, hook: WatchedHook, group: Group, refused: HookError | None, error: Exception | None
    ) -> None:
        """Raise the refusal of a hook on every rank; without one, the error of the hook itself."""
        mine = None if error is None else f"{type(error).__name__}: {error}"
        try:
            found = comm.all_gather_object((refused is not None, mine), group)
        except RuntimeError as lost:
            # A rank that has raised does not answer. The lost connection must not hide the error of this rank.
            if (known := refused or error) is not None:
                raise known from lost
            raise
        failed = {rank: text for rank, (_, text) in zip(group.ranks, found) if text is not None}
        if any(is_refused for is_refused, _ in found):
            # Raise the refusal first: ranks without the tensor of the hook may raise other errors of the same cause.
            comm.raise_together(refused, group)
            return
        is_apart = 0 < len(failed) < group.size and self._groups.pipeline_parallel.size > 1
        text = next(iter(failed.values()), "")
        if is_apart and _NOTHING_HELD.search(text):
            told = HookError(
                f"{hook.title} must run on every rank; got {text!r} on rank {', '.join(map(str, failed))} only. In a"
                " pipeline each rank holds the parameters and gradients of its own stages, so a list for one layer is"
                " empty on other ranks. Test for an empty list, or use TensorParallelStrategy, under which each rank"
                " has every layer"
            )
            raise told from error
        comm.raise_together(error, group)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the watch inside the block, for code such as a step, which has its own audit."""
        call = self._calls[-1] if self._calls and self._calls[-1].is_running else None
        with self._lines.suspended():
            if call is not None:
                call.end()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if call is not None:
                    call.begin()

    def seed(self) -> None:
        """Note the tensors that hold a part now."""
        names: dict[int, str] = {}
        for name, parameter in self._module.named_parameters():
            names[id(parameter)] = name
            self._note(f"`{name}`", name, parameter, parameter)
            if parameter.grad is not None:
                self._note(f"the gradient of `{name}`", name, parameter, parameter.grad)
        for optimizer in self._optimizers():
            for owner, state in optimizer.state.items():
                name = names.get(id(owner), "")
                for key, value in state.items() if name and isinstance(state, dict) else ():
                    # A tensor without dimensions is a number, such as the count of steps, and no part.
                    if isinstance(value, Tensor) and value.dim():
                        self._note(f"`{key}` of the optimizer for `{name}`", name, owner, value, is_state=True)

    def _note(self, label: str, name: str, parameter: Tensor, tensor: Tensor, is_state: bool = False) -> None:
        part = self._part_of(label, name, parameter, tensor, is_state)
        if part is None:
            self._parts.remove(tensor)  # a slice may have used its memory before
        else:
            self._parts.add(tensor, part)

    def note_gathered(self, path: str, tensors: Mapping[str, Tensor]) -> None:
        """Note that tensors of a state dict have own memory, so that a write into them does not reach the model."""
        self._parts.prune()
        for key, tensor in tensors.items():
            name = f"{path}.{key}" if path else key
            rule = self._rules.get(name)
            why = f"on one of {self._groups.pipeline_parallel.size} pipeline stages only"
            why = why if rule is None else f"sharded over {rule.ranks} tensor-parallel ranks"
            self._parts.note_gathered(tensor, Part(f"`{name}`", frozenset({name}), why))

    def note_given(self, name: str, gradient: Tensor) -> None:
        """Note that a hook gets the gradient of a parameter, before `.grad` holds it."""
        parameter = dict(self._module.named_parameters()).get(name)
        # The self-check also runs hooks, with full gradients.
        if parameter is not None and gradient is not parameter and gradient.shape == parameter.shape:
            self._note(f"the gradient of `{name}`", name, parameter, gradient)

    def note_dummies(self, dummies: Mapping[nn.Parameter, str]) -> None:
        """Note tensors that stand for parameters of other pipeline stages."""
        why = f"on one of {self._groups.pipeline_parallel.size} pipeline stages only"
        for dummy, name in dummies.items():
            self._parts.add(dummy, Part(f"`{name}`", frozenset({name}), why))

    def _part_of(self, label: str, name: str, parameter: Tensor, tensor: Tensor, is_state: bool = False) -> Part | None:
        """Return the part in a parameter or its tensor, such as a gradient; None if every rank has the full tensor."""
        slices = self._slices
        rule = self._rules.get(name)
        owners = frozenset({name})
        if slices is not None and (slices.is_narrow(parameter) or (is_state and slices.divides(parameter))):
            why = f"sharded over {slices.group.size} replicas (`zero_stage`)"
            return Part(label, owners, why, ("slice",), 1, tensor.numel(), True, is_inside=tensor is parameter)
        if rule is not None and rule.ranks > 1 and tensor.dim() == parameter.dim() and tensor.shape == parameter.shape:
            dim = rule.dim % tensor.dim()
            why = f"sharded over {rule.ranks} tensor-parallel ranks"
            return Part(label, owners, why, rule.ranges, max(1, tensor.stride(dim)), tensor.shape[dim])
        if self._groups.pipeline_parallel.size > 1:
            return Part(label, owners, f"on one of {self._groups.pipeline_parallel.size} pipeline stages only")
        return None

    # ----------------------------------------------------------------------------------------------------- messages

    def refuse(self, call: _WatchedCall, action: str, parts: Sequence[Part]) -> None:
        """Note the first reason to refuse a hook."""
        if call.failure is not None:
            return
        part = next((one for one in parts if one.is_divided and one.owners), parts[0])
        others = len({name for one in parts for name in one.owners}) - 1
        more = f" and of {others} other parameter{'s' * (others > 1)}" if others > 0 else ""
        place = _users_place(call.is_model) or "a hook"
        way_out = _way_out(part, action, call.hook.title)
        call.failure = HookError(
            f"{call.hook.title} must give the result of a single-process run; it would differ: {place} {action}"
            f" {part.label}{more}. This rank holds only a part of it: it is {part.why or 'one part of several'}."
            f" {way_out} [LP016]"
        )

    def refuse_freed(self, call: _WatchedCall, parameter: Tensor) -> None:
        """Note that a hook reads a gradient after the step, where `zero_stage=2` has freed it."""
        if call.failure is None and self._slices is not None and self._slices.has_freed(parameter):
            frame = _reader_of_gradient(call.is_model)
            if frame is None:
                return
            name = next((name for name, one in self._module.named_parameters() if one is parameter), "a parameter")
            call.failure = HookError(
                f"{call.hook.title} must give the result of a single-process run; it would differ:"
                f" {_place_of(frame)} reads the gradient of `{name}` after the optimizer's step and gets none. With"
                f" `zero_stage=2` each of {self._slices.group.size} replicas frees its slice in the step. Read"
                " gradients in `on_before_optimizer_step`, norms by Lightning's `grad_norm`, or use `zero_stage=1`"
            )

    def tell_shape(self, part: Part) -> None:
        """Warn once for each line that reads the shape of a part."""
        frame: FrameType | None = sys._getframe(2)
        if frame is None or _is_passed(frame):
            return
        place = _place_of(frame)
        if place not in self._told:
            self._told.add(place)
            rank_zero_warn(
                f"{place} reads the shape or the number of elements of {part.label}, and gets the value of this"
                f" rank's part: the tensor is {part.why}. A number that depends on it differs from a single-process"
                " run"
            )

    def is_model(self, module: object) -> bool:
        """Tell whether an object is a module of the model."""
        return id(module) in self._modules

    def parts(self) -> PartMap:
        """Return the known parts."""
        return self._parts


def _way_out(part: Part, action: str, title: str) -> str:
    if GATHERED in action:
        return (
            "This write is lost. Write into `parameters()` and `buffers()`, which hold each rank's part, or into"
            " clones that you then pass to `load_state_dict`"
        )
    if title.endswith("configure_optimizers`"):
        first = "Compute it in `__init__`, where the model is full, or copy each parameter by itself."
    elif "random" in action or "numbers" in action:
        first = "Draw and initialize in `__init__` or `configure_model`, where the model is full."
    else:
        first = (
            "In hooks, element-wise operations, `clip_grad_norm_`, `gradient_clip_val` and Lightning's `grad_norm`"
            " are right, and `self.state_dict()`, called on every rank, gives full parameters."
        )
    name = next(iter(sorted(part.owners)), "")
    if part.is_slice and "of the optimizer for" in part.label:
        return f"{first} With `zero_stage=0` the optimizer's state is full as well"
    if part.is_slice and part.why:
        return f"{first} With `zero_stage=1` gradients and parameters are full in hooks"
    if part.size and name:
        return (
            f"{first} Or keep the layer replicated with tensor_plan={{..., {name.rpartition('.')[0]!r}: 'replicate'}}"
        )
    return f"{first} TensorParallelStrategy keeps unsharded layers replicated on every rank"


class _WatchedCall:
    """Watches one call of a hook."""

    def __init__(self, watch: HookWatch, hook: WatchedHook, given: tuple[str, Tensor] | None) -> None:
        self.hook = hook
        self.failure: HookError | None = None
        self._given = given
        self.is_running = False
        self._watch = watch
        self._modes: list[Any] = []

    def begin(self) -> None:
        """Begin to check every operation."""
        if self.is_running or current_dispatch_mode() is not None:
            return  # a mode of the user is active, and modes must end in reverse order
        self.is_running = True  # set first, since the calls below may run new lines and begin again
        watch = self._watch
        watch.seed()
        if self._given is not None:
            watch.note_given(*self._given)
        refuse = functools.partial(watch.refuse, self)
        is_users = functools.partial(_is_users_call, self.is_model)
        self._modes = [PartUseMode(watch.parts(), refuse, is_users, _is_logging)]
        if current_function_mode() is None:
            tell_missing = functools.partial(watch.refuse_freed, self)
            self._modes.insert(0, ExportMode(watch.parts(), refuse, is_users, watch.tell_shape, tell_missing))
        # Begin after `seed`, whose own operations must not be checked.
        for mode in self._modes:
            mode.__enter__()

    def end(self) -> None:
        """Stop checking operations."""
        if self.is_running:
            self.is_running = False
            for mode in reversed(self._modes):
                leave_mode(mode)

    def is_model(self, module: object) -> bool:
        """Tell whether an object is a module of the model."""
        return self._watch.is_model(module)


def raised_in_shards(name: str, error: Exception) -> str:
    """Return a text on an error of a step in shards, with a way out; empty for errors of this library."""
    frames = _frames_of(error)
    if not frames or (_is_ours(frames[-1][0]) and linecache.getline(*frames[-1][1:]).strip().startswith("raise ")):
        return ""
    users = [frame for frame in frames if not _is_passed(frame[0])]
    place = (
        f" in `{users[-1][0].f_code.co_name}` ({users[-1][1].rpartition('/')[2]}, line {users[-1][2]})" if users else ""
    )
    text = str(error).rstrip(" .")
    found = f"`{name}` must run in shards as in a single-process run; got {type(error).__name__}{place}: {text}."
    whole = "keep the layers that it uses replicated with tensor_plan={..., '<their path>': 'replicate'}"
    if _is_transformed(error):
        return (
            f"{found} Transforms of `torch.func` (`vmap`, `grad`, `jacrev`, ...) are not supported through layers"
            " that are sharded over tensor-parallel ranks. Use `torch.autograd.grad` on the module itself, or"
            f" {whole} [LP018]"
        )
    return (
        f"{found} Each tensor-parallel rank holds a part of the weights of sharded layers, so code outside these"
        " layers meets other shapes. Copies by `p.detach().clone()` in a hook have the shapes of `parameters()`;"
        f" tensors of `state_dict()` are full. Use shapes of the same kind, or {whole} [LP018]"
    )


def _is_transformed(error: Exception) -> bool:
    """Tell whether an error comes from a transform of `torch.func` around a function of this library."""
    frames = [frame for frame, _, _ in _frames_of(error)]
    return any(map(_is_ours, frames)) and any(
        frame.f_globals.get("__name__", "").startswith("torch._functorch") for frame in frames
    )


def _is_ours(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__name__", "").partition(".")[0] == _OURS)


def _frames_of(error: Exception) -> list[tuple[FrameType, str, int]]:
    """Return the frames of an error, each with its file and line."""
    return [(frame, frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]


# A trace function in C that does nothing. A function in Python would take several times as long.
_trace_nothing = functools.partial(sys.audit, "lightning_parallel.trace")


class _Lines:
    """Notices lines of the user's code that run for the first time, by Python's trace function.

    A debugger that uses the trace function keeps it. The trace function costs a call for each function and each line of
    the user, so it is set only while lines are left.
    """

    def __init__(self) -> None:
        self._left: dict[CodeType, set[int]] = {}
        self._inline: set[CodeType] = set()
        self._begin: Callable[[], None] | None = None
        self._codes: set[CodeType] = set()
        self._only: CodeType | None = None

    @contextmanager
    def noticed(self, begin: Callable[[], None], codes: set[CodeType], is_due: bool) -> Iterator[None]:
        """Call `begin` before each new line inside the block.

        Args:
            begin: Function without arguments.
            codes: The functions of the user that this hook has run. New functions are added.
            is_due: Whether to look for functions that have not run before.
        """
        waiting = [code for code in codes if self._left.get(code) or code in self._inline]
        # Hooks nest: afterwards the outer hook goes on with its own lines.
        outer, trace = (self._begin, self._codes, self._only), sys.gettrace()
        is_debugged = trace is not None and trace not in (self._call, _trace_nothing)
        if is_debugged or not (is_due or waiting):
            yield
            return
        self._begin = begin
        self._codes = codes
        is_alone = not is_due and len(waiting) == 1 and waiting[0] not in self._inline
        self._only = waiting[0] if is_alone else None
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(trace)
            self._begin, self._codes, self._only = outer

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Notice no lines inside the block."""
        trace = sys.gettrace()
        if trace not in (self._call, _trace_nothing):
            yield
            return
        sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(trace)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        left = self._left.get(code)
        if left is None:
            # The line of `def` does not run in a call, but a lambda may have no other line.
            lines = {line for _, _, line in code.co_lines() if line is not None} - {code.co_firstlineno}
            left = self._left[code] = set() if _is_passed(frame) else lines or {code.co_firstlineno}
            if left:
                self._codes.add(code)
                if _has_branch_in_line(code):
                    self._inline.add(code)
        if code is self._only:
            self._only = None
            if not _is_called_by_user(frame):
                # All functions that this function calls have run before, and it runs once in the hook.
                # The frame itself keeps its local trace function, so its lines are still noticed.
                sys.settrace(_trace_nothing)
        return self._line if left else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            left = self._left[frame.f_code]
            if frame.f_lineno in left:
                left.discard(frame.f_lineno)
                if self._begin is not None:
                    self._begin()
        return self._line


def _is_called_by_user(frame: FrameType) -> bool:
    inner = frame.f_back
    while inner is not None and not _is_end(inner):
        if not _is_passed(inner):
            return True
        inner = inner.f_back
    return False


def _has_branch_in_line(code: CodeType) -> bool:
    """Tell whether a line of a function makes a call on a condition, such as `if late: clip()`."""
    last = max(line or 0 for _, _, line in code.co_lines())
    return any(code.co_firstlineno <= line <= last for line in _lines_with_branches(code.co_filename))


@functools.lru_cache(maxsize=64)
def _lines_with_branches(path: str) -> list[int]:
    """Return the lines of a file that make a call on a condition."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return []
    return [node.lineno for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.expr)) and _calls_in_branch(node)]


def _calls_in_branch(node: ast.AST) -> bool:
    branches: list[ast.AST] = []
    if isinstance(node, ast.If) and node.body[0].lineno == node.lineno:
        branches = [*node.body, *node.orelse]
    elif isinstance(node, ast.IfExp):
        branches = [node.body, node.orelse]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp):
        branches = list(node.value.values[1:])
    return any(isinstance(inner, ast.Call) for branch in branches for inner in ast.walk(branch))


# ------------------------------------------------------------------------------------------------- owners of code


def _root_of(function: Any) -> str:
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            break
    return (getattr(function, "__module__", None) or "").partition(".")[0]


def _is_users(function: Any) -> bool:
    return callable(function) and _root_of(function) not in FOREIGN


def _is_users_hook(callback: Any, name: str) -> bool:
    function = getattr(callback, name, None)
    if function is None or not is_a(callback, Callback):
        return False
    # A hook of Lightning may call methods that a subclass of the user overrides.
    of_base = getattr(Callback, name, None)
    is_own = getattr(function, "__func__", function) is not of_base and _root_of(function) != ""
    empty = getattr(getattr(function, "__func__", None), "__qualname__", "") == f"Callback.{name}"
    return _is_users(function) or (is_users(type(callback)) and is_own and not empty)


def _key(callback: Any) -> str:
    return str(getattr(callback, "state_key", type(callback).__name__))


def _is_passed(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED


def _is_end(frame: FrameType) -> bool:
    """Tell whether a frame has called the hook."""
    return frame.f_code.co_name == "run_watched" or frame.f_globals.get("__name__", "").endswith(".trainer.call")


def _walk(is_model: Callable[[object], bool]) -> FrameType | None:
    """Return the innermost frame of the user's code in a hook; None if our code or the model made the call."""
    frame: FrameType | None = sys._getframe(1)
    found: FrameType | None = None
    # Frames of the watch itself and of tensor attributes count as code of their caller.
    places = "strategies.hooks.part_use", "strategies.optimizers.dummies", "tensor.audit", "compat.torch"
    own = __name__, *(f"{_OURS}.{place}" for place in places)
    is_copied = False
    while frame is not None and not _is_end(frame):
        name = frame.f_globals.get("__name__", "")
        # This library deep-copies a sharded layer only for the user, so the copy counts as the user's call.
        is_copied = is_copied or frame.f_code.co_name == "__deepcopy__"
        if found is None and not is_copied and name.partition(".")[0] == _OURS and name not in own:
            return None
        if frame.f_code.co_name == "_call_impl" and is_model(frame.f_locals.get("self")):
            return None
        if found is None and name.startswith("torch.autograd") and frame.f_code.co_name in _ENGINE:
            return None
        if found is None and not _is_passed(frame):
            found = frame
        frame = frame.f_back
    return found


def _is_users_call(is_model: Callable[[object], bool]) -> bool:
    return _walk(is_model) is not None


def _users_place(is_model: Callable[[object], bool]) -> str:
    frame = _walk(is_model)
    return "" if frame is None else _place_of(frame)


def _place_of(frame: FrameType) -> str:
    return f"`{frame.f_code.co_name}` ({frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno})"


def _reader_of_gradient(is_model: Callable[[object], bool]) -> FrameType | None:
    """Return the frame of the user's code that reads a gradient, also through other packages, except to clear it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_end(frame):
        is_call = frame.f_code.co_name == "_call_impl" and is_model(frame.f_locals.get("self"))
        if is_call or frame.f_code.co_name == "zero_grad":
            return None
        if not _is_passed(frame):
            return frame
        frame = frame.f_back
    return None


def _is_logging() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_passed(frame) or frame.f_globals.get("__name__") == __name__):
        if frame.f_code.co_name in ("log", "log_dict", "log_metrics") and not _is_end(frame):
            return True
        if _is_end(frame):
            return False
        frame = frame.f_back
    return False
