"""Runs the user's hooks on full tensors.

Hooks of the module, of callbacks, of optimizers and of gradients see all parameters in full (`FullViews`), and so do
steps. An error of a hook on one rank alone is raised on all ranks, in calls 1, 2, 4, 8, ... of the hook.
"""

from __future__ import annotations

import functools
import linecache
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.checkpoint import StateOwner
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import FOREIGN, ParallelState, Patches, is_power_of_two, is_users
from lightning_parallel.compat.torch import (
    forward_hooks_of,
    global_step_hooks,
    gradient_hooks_of,
    named_parameters_of,
    step_hooks_of,
)
from lightning_parallel.compat.twins import is_a
from lightning_parallel.data_parallel import ParameterSlices
from lightning_parallel.strategies.checkpoints.files import LOCAL_STEPS
from lightning_parallel.strategies.hooks.views import FullViews, HookError
from lightning_parallel.tensor.layers import Column, Row
from lightning_parallel.tensor.pieces import without_pieces
from lightning_parallel.tensor.sharding import Shard

__all__ = ["HookWatch", "WatchedHook", "raised_in_shards"]

_PASSED = FOREIGN | {"lightning_utilities"} | set(sys.stdlib_module_names) - {"__main__"}
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward", "backward")
_OF_CHECKPOINTS = ("on_load_checkpoint", "load_state_dict")  # these hooks get full tensors
_WHOLE_IN_CHECKPOINTS = {"state_dict", "optimizer_states", LOCAL_STEPS}
_OURS = "lightning_parallel"


@dataclass
class WatchedHook:
    """Describes a hook: the ranks that call it together, and the number of its calls.

    Attributes:
        group: The ranks; None if an error stays on its rank.
        parameter: Name of the parameter whose gradient the hook takes; only ranks with the parameter run it.
    """

    group: Group | None
    parameter: str | None = None
    calls: int = 0


class HookWatch:
    """Runs the hooks of the user on full tensors.

    Args:
        module: The divided module.
        rules: How its tensors are sharded over the tensor axis, by name.
        groups: The mesh's groups.
        slices: The slices of the replicas; None without ZeRO.
        optimizers: Returns the optimizers of the run, each with the names in its parameter groups over all stages.
        meet: Waits until all replicas are about to read slices; None without ZeRO.
        owners: Owners of the state of whole parameters, by optimizer.
    """

    def __init__(
        self,
        module: LightningModule,
        rules: Mapping[str, Shard],
        groups: MeshGroups,
        slices: ParameterSlices | None,
        optimizers: Callable[[], Sequence[tuple[Optimizer, Sequence[Sequence[str]]]]],
        meet: Callable[[str], None] | None = None,
        owners: Mapping[Optimizer, Mapping[Tensor, StateOwner]] | None = None,
    ) -> None:
        self._module = module
        self._groups = groups
        self.views = FullViews(module, rules, groups, optimizers, slices, meet, owners)
        self.group = groups.replica if slices is None else groups.world
        self._hooks: dict[str, WatchedHook | None] = {}
        self._agreed: frozenset[tuple[str, int]] = frozenset()
        self._wrapped: list[tuple[dict[int, Callable[..., Any]], int, Callable[..., Any], Callable[..., Any]]] = []
        self._steps = 0
        self._planned_hooks: Set[tuple[str, int]] = frozenset()

    def install(self, patches: Patches) -> None:
        """Watch the hooks of a run until `patches` are undone; every rank must call it."""
        trainer = self._module.trainer
        # Callbacks may differ between ranks; only hooks of callbacks that all ranks have can raise together.
        keys = Counter(_key(one) for one in trainer.callbacks if is_users(type(one)))  # type: ignore[attr-defined]
        found = comm.all_gather_object(set(keys.items()), self._groups.world)
        # With equal counts: several callbacks may have one key, and only their number tells a missing callback.
        self._agreed = frozenset(found[0].intersection(*found[1:]))
        state = ParallelState.of(self._module)
        patches.replace(state, "watch", self)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if _is_users_hook(callback, "state_dict"):
                # Rank zero alone may call this hook, so its errors stay there.
                patches.replace(callback, "state_dict", self._watched(callback.state_dict, WatchedHook(None)))
        # Patch the profiler: every version of Lightning runs each hook in a span of its profiler.
        own = trainer.profiler.profile  # type: ignore[attr-defined]

        def profile(action: str) -> AbstractContextManager[Any]:
            hook = self._hook_of(action)
            return own(action) if hook is None else self._around(hook, own(action))

        patches.replace(trainer.profiler, "profile", profile)  # type: ignore[attr-defined]
        self._wrap_gradient_hooks()
        self._planned_hooks = self._hooks_of_parts().keys()

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
        if kind == "[LightningModule":
            is_called = name == "lr_scheduler_step" and self._schedulers_are_users()
            if not is_called and not _is_users(getattr(self._module, name, None)):
                return None
            return WatchedHook(self._group_of(name))
        if kind == "[Callback":
            callbacks = [one for one in self._module.trainer.callbacks if _key(one) == owner]  # type: ignore[attr-defined]
            if not any(_is_users_hook(one, name) for one in callbacks):
                return None
            return WatchedHook(self._group_of(name) if (owner, len(callbacks)) in self._agreed else None)
        return None

    def _schedulers_are_users(self) -> bool:
        """Tell whether schedulers call the user's code, which may read parameters."""
        schedulers = [config.scheduler for config in self._module.trainer.lr_scheduler_configs]
        return any(is_users(type(each)) or any(map(_is_users, getattr(each, "lr_lambdas", ()))) for each in schedulers)

    def _group_of(self, name: str) -> Group:
        # In evaluation, replicas may have different numbers of batches.
        evaluates = any(stage in name for stage in ("validation", "test", "predict", "sanity"))
        return self._groups.replica if evaluates else self.group

    def optimizer_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Run the hooks of the optimizer on full tensors inside the block; code may register hooks at any time."""
        for hooks in (*step_hooks_of(optimizer), *global_step_hooks()):
            self._wrap_all(hooks, None)
        return self.paused()

    @contextmanager
    def full_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Show full tensors to the step of an optimizer inside the block."""
        with self.views.shown(on_all_stages=False):
            yield
        self.views.keep_parts(optimizer)

    def _wrap_all(self, hooks: dict[int, Callable[..., Any]], parameter: str | None) -> None:
        for key, function in list(hooks.items()):
            if _is_users(function) and not hasattr(function, "watches"):
                watched = self._watched(function, WatchedHook(None, parameter))
                hooks[key] = watched
                self._wrapped.append((hooks, key, function, watched))

    def _watched(self, function: Callable[..., Any], hook: WatchedHook) -> Callable[..., Any]:
        def run_watched(*args: Any, **kwargs: Any) -> Any:
            with self.watching(hook):
                if hook.parameter is None:
                    return function(*args, **kwargs)
                return self.views.run_gradient_hook(function, hook.parameter, *args)

        run_watched.watches = function  # type: ignore[attr-defined]
        return functools.update_wrapper(run_watched, function, assigned=("__doc__",), updated=())

    def begin_step(self) -> None:
        """Find new gradient hooks, in some steps only."""
        self._steps += 1
        if is_power_of_two(self._steps):
            self._wrap_gradient_hooks()
            self._refuse_late_hooks()

    def _hooks_of_parts(self) -> dict[tuple[str, int], Callable[..., Any]]:
        """Return the user's hooks that get activations of which each rank holds a part."""
        sharding = ParallelState.of(self._module).sharding
        found: dict[tuple[str, int], Callable[..., Any]] = {}
        for path, style in {} if sharding is None else sharding.plan.styles.items():
            after, before = forward_hooks_of(self._module.get_submodule(path))
            is_part_after = isinstance(style, Column) and not style.gather_output
            is_part_before = isinstance(style, Row) and not style.split_input
            hooks = {**(after if is_part_after else {}), **(before if is_part_before else {})}
            found |= {(path, key): hook for key, hook in hooks.items() if _is_users(hook)}
        return found

    def _refuse_late_hooks(self) -> None:
        # The plan gathers for the hooks that exist before it.
        for (path, key), hook in self._hooks_of_parts().items():
            if (path, key) not in self._planned_hooks:
                raise HookError(
                    f"Forward hooks of sharded layers must exist before the layers are sharded; got"
                    f" `{getattr(hook, '__qualname__', type(hook).__name__)}` on `{path}`, which would see the features"
                    " of one rank. Register it in `__init__`, `setup` or `configure_model`, or keep the layer"
                    f" replicated: tensor_plan={{..., {path!r}: 'replicate'}} [LP018]"
                )

    def _wrap_gradient_hooks(self) -> None:
        for name, parameter in named_parameters_of(self._module):
            for hooks in gradient_hooks_of(parameter):
                self._wrap_all(hooks, name)

    def step(self) -> AbstractContextManager[None]:
        """Show parameters in full to a step; under manual optimization, also gradients and states of optimizers."""
        if not self._module.automatic_optimization:
            return self.views.shown(is_step=True)
        return self.views.in_step() if self.views.has_shards else nullcontext()

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure of an optimizer under manual optimization, which sees full parameters like its step."""

        def shown() -> Any:
            with self.step():
                return closure()

        return closure if self._module.automatic_optimization else shown

    def gather_saved(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Gather the pieces that the user's code keeps in a checkpoint; every rank must call it before a save."""
        for key in checkpoint.keys() - _WHOLE_IN_CHECKPOINTS:
            checkpoint[key] = without_pieces(checkpoint[key])

    def close(self) -> None:
        """Put the original hooks back."""
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
    def watching(self, hook: WatchedHook) -> Iterator[None]:
        """Show parameters in full during a call of a hook.

        Raises:
            Exception: The error of the hook, on every rank if all of them compare this call.
        """
        hook.calls += 1
        if hook.group is None or not is_power_of_two(hook.calls):
            with self.views.shown(hook.parameter is None):
                yield
            return
        error: Exception | None = None
        try:
            with self.views.shown():
                yield
        except Exception as raised:
            # Raise later: the other ranks must first learn of the error.
            error = raised
        comm.raise_together(error, hook.group)

    def paused(self) -> AbstractContextManager[None]:
        """Show ordinary parameters inside the block, for code such as a step."""
        return self.views.hidden()


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
        f"{found} Between sharded layers, each tensor-parallel rank computes a part of the features or heads, so code"
        f" there meets other shapes. Take sizes from the tensors, or {whole} [LP018]"
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
