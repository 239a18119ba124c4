"""Shows a divided module as the full module to code between its steps.

*State dicts* of the module, its submodules and copies of them hold full tensors. Code copies weights by them (target
networks, moving averages, teachers, `torch.save`). It would save or compare a shard without an error.

*Calls* of a module that is split into stages, in hooks and callbacks (samples, summaries, probes), run the full model
on each rank. The rank fetches parameters when the code reads them.

All ranks must do the same: the ranks meet before each communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import ModelSummary, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_parallel import comm
from lightning_parallel.checkpoint import Checkpoints, Inventory
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat import ParallelState, Patches, innermost_users_line, patched
from lightning_parallel.compat.lightning import averaged_model, restore_swapped_scheduler
from lightning_parallel.compat.torch import (
    buffers_of,
    mark_as_parameter,
    parameters_of,
    state_hooks_of,
)
from lightning_parallel.compat.twins import is_a
from lightning_parallel.pipeline.layer_stack import LayerStack
from lightning_parallel.step_trace.interception import ActiveHandler, Call, CallSite, intercept
from lightning_parallel.strategies.ranks.order import MessageOrder
from lightning_parallel.strategies.ranks.replicas import share_random_state
from lightning_parallel.strategies.whole.copies import ModuleCopies
from lightning_parallel.strategies.whole.reference import Fetched
from lightning_parallel.tensor.sharded import ShardedTensor, ShardPlace
from lightning_parallel.tensor.sharding import REPLICATED

__all__ = ["FullStates", "OutsideCalls", "averages_of", "hold_averages", "open_outside"]

# `WeightAveraging` does not exist in all supported versions.
AVERAGING = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)


class FullStates:
    """Lets the state dicts of a module and its submodules hold full tensors.

    Every rank of the replica constructs it at the same point.

    Args:
        module: The divided module.
        groups: The mesh's groups.
        inventory: The tensors of the full model.
        device: The device of messages.

    Attributes:
        inventory: The tensors of the full model.
        meet: Waits until all ranks of the replica are about to send the message that it is called with.
        trained: Names of the parameters that require a gradient.
        is_paused: Whether state dicts hold the part of this rank: see `paused`.
    """

    def __init__(self, module: nn.Module, groups: MeshGroups, inventory: Inventory, device: torch.device) -> None:
        self._state = ParallelState.of(module)
        if self._state.full_states is not None:
            self._state.full_states.remove()
        self._state.full_states = self
        self._tensor_group = groups.tensor_parallel
        self._pipeline_group = groups.pipeline_parallel
        if self._state.order is not None:
            self._tensor_group = self._tensor_group.guarded_by(self._state.order)
        self.meet = MessageOrder(groups.model)
        if self._pipeline_group.size > 1:
            self._pipeline_group = self._pipeline_group.guarded_by(self.meet)
        self._device = device
        self.is_paused = False
        self._is_over = False
        self._hooks: list[Any] = []
        self._at_end: list[Callable[[], None]] = []
        self._module = module
        self._replica = groups.model
        if self._state.copies is None:
            self._state.copies = ModuleCopies(module)
        self.adopt(module, inventory)
        self._state.copies.watch(self._register)

    def adopt(self, module: nn.Module, inventory: Inventory) -> None:
        """Take the present form of `module`; every rank of the replica must call it.

        Args:
            module: The divided module.
            inventory: The tensors of the full model now.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.inventory = inventory
        self.trained = inventory.trained
        # By `id`: the hash of a metric changes with its state.
        self._originals: set[int] = set()
        # A state dict has the order of one process, though a stage knows its own tensors first.
        order = () if self._state.names is None else self._state.names.state
        position = {name: index for index, name in enumerate(order)}
        self._keys: dict[str, list[str]] = {}
        for name in sorted(inventory.tensors, key=lambda name: position.get(name, 0)):
            path, _, key = name.rpartition(".")
            self._keys.setdefault(path, []).append(key)
        for path in self._keys:
            if all(inventory.is_full(_joined(path, key)) for key in self._saved_keys(path)):
                continue
            owner = module.get_submodule(path)
            self._originals.add(id(owner))
            _forget_states(owner)
            self._hooks += self._register(owner, path)
        self._state.copies.mark(module)

    def _saved_keys(self, path: str) -> list[str]:
        return [key for key in self._keys[path] if self.inventory.tensors[_joined(path, key)].is_saved]

    def _register(self, owner: nn.Module, path: str) -> list[Any]:
        # torch sets an attribute on a hook, which a bound method does not allow. `deepcopy` copies hooks, too.
        return [
            owner.register_state_dict_post_hook(lambda *arguments: self._save(path, *arguments)),
            owner.register_load_state_dict_pre_hook(lambda *arguments: self._load(path, *arguments)),
        ]

    def remove(self) -> None:
        """Let state dicts hold the part of this rank again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for function in self._at_end:
            function()
        self._at_end.clear()
        self._state.copies.unmark(self._module)
        self._state.full_states = None
        self._is_over = True

    def at_end(self, function: Callable[[], None]) -> None:
        """Call `function` in `remove`, at the end of a run."""
        self._at_end.append(function)

    def restore_copies(self, is_mine: bool = True) -> None:
        """Give copies of the module their full tensors, after `remove`; every rank of the replica must call it.

        Args:
            is_mine: Whether this rank gets the full tensors.
        """
        self._state.copies.restore(self._replica, self.full, is_mine)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let state dicts hold the part of this rank inside the block, for code that gathers tensors by itself."""
        watch = self._state.watch
        with patched(self, "is_paused", True), nullcontext() if watch is None else watch.paused():
            yield

    def __deepcopy__(self, memo: dict[int, Any]) -> FullStates:
        return self

    @torch.no_grad()
    def _save(self, path: str, owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if self.is_paused:
            return
        if self._is_over:
            raise RuntimeError(
                f"This copy of `{path or type(owner).__name__}` was made during a run and holds only a part of the"
                " model. Take its state dict before the run ends, for example in `on_train_end`. Or set"
                " `gather_after_fit='all'`, and make the copy on all ranks"
            )
        engine = self._state.engine
        if engine is not None and engine.model.active.handler is not None:
            place = innermost_users_line()
            raise RuntimeError(
                f"The state dict of `{path or type(owner).__name__}` is not available inside a step, where each"
                f" pipeline stage holds only its own part; got a call{place and f' in {place}'}. Take single weights"
                " by their attributes. Or move the call into a hook that all ranks run, such as `on_train_batch_end`"
            )
        if path not in self._keys:
            raise RuntimeError(f"This copy holds only a part of `{path}`, which the model no longer has")
        tensors = self.inventory.tensors
        dtypes = {key: tensors[_joined(path, key)].dtype for key in self._saved_keys(path)}
        own: dict[str, Any] = {**parameters_of(owner), **buffers_of(owner)}
        if id(owner) not in self._originals:
            # A copy may have another dtype than its original, and receivers must allocate the dtype that is sent.
            held = {key: value.dtype for key, value in own.items() if value is not None}
            everyone = comm.all_gather_object(held, self._pipeline_group)
            dtypes = {key: everyone[self.inventory.owner(_joined(path, key))][key] for key in dtypes}
        full = {key: self._gathered(_joined(path, key), dtype, own.get(key)) for key, dtype in dtypes.items()}
        for key, mine in own.items():
            # A write into the state dict reaches the parameter, as in one process.
            if isinstance(mine, ShardedTensor) and key in full:
                full[key] = mine.piece(full[key])
            elif self._state.is_in_step and key in full and (rule := self.inventory.rules.get(_joined(path, key))):
                full[key] = ShardPlace(rule, self._tensor_group).piece(mine.detach(), full[key])
        # A stage adds tensors of other stages last, but state dicts must have the order of one process.
        others = [key for key in state if key.startswith(prefix) and key[len(prefix) :] not in full]
        for key, value in full.items():
            state.pop(prefix + key, None)
            state[prefix + key] = value
        for key in others:
            state[key] = state.pop(key)

    def full(self, name: str, dtype: torch.dtype, mine: Tensor | None) -> Tensor:
        """Return a full tensor, a copy unless all ranks hold it in full; every rank must call it.

        Args:
            name: Name of a parameter or buffer of the full model.
            dtype: Element type of the tensor; copies of the module may have another one than the module.
            mine: The part of this rank; None if it holds none.
        """
        if mine is not None and self.inventory.is_full(name):
            return mine.detach()
        return self._gathered(name, dtype, mine)

    def _gathered(self, name: str, dtype: torch.dtype, tensor: Tensor | None) -> Tensor:
        group = self._pipeline_group
        owner = self.inventory.owner(name)
        if group.size > 1:
            if group.rank == owner and tensor is not None:
                # The clone keeps the result, which code may write into, apart from the tensor of the module.
                sent = tensor.detach().to(self._device).contiguous().clone()
            else:
                shape = self.inventory.tensors[name].local_shape
                sent = torch.empty(shape, dtype=dtype, device=self._device)
            tensor = comm.broadcast_(sent, group, owner)
        assert tensor is not None
        rule = self.inventory.rules.get(name)
        if rule is None:
            return tensor.detach()
        sizes = [rule.local_size(rank) for rank in range(self._tensor_group.size)]
        gathered = comm.all_gather(tensor.detach().to(self._device), self._tensor_group, rule.dim, sizes)
        return rule.merge(gathered.split(sizes, rule.dim))

    def _load(self, path: str, owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if self.is_paused:
            return
        for key in self._saved_keys(path):
            given = state.get(prefix + key)
            if parameters_of(owner).get(key) is None and buffers_of(owner).get(key) is None:
                state.pop(prefix + key, None)  # another stage holds it
                continue
            rule = self.inventory.rules.get(_joined(path, key))
            mine = parameters_of(owner).get(key)
            if isinstance(mine, ShardedTensor):
                place = mine.place
                if place.slices is not None and place.slices.group is not place.group:
                    # A slice (ZeRO) has all elements of the shard while it is loaded; see `ParameterSlices`.
                    place = replace(place, slices=None)
                state[prefix + key] = place.cut(given)
                continue
            # A tensor of another size stays: it may be the shard of this rank already.
            if rule is not None and isinstance(given, Tensor) and given.shape[rule.dim] == rule.full_size:
                state[prefix + key] = rule.split(given, self._tensor_group.rank)


class OutsideCalls:
    """Runs calls of a module that is split into stages on the full module, outside steps, on all ranks alike.

    Args:
        module: The divided module.
        states: Gathers its tensors.
        groups: The mesh's groups.
        device: The device of the stages.
    """

    def __init__(self, module: nn.Module, states: FullStates, groups: MeshGroups, device: torch.device) -> None:
        self._module = module
        self._states = states
        self._replica = groups.model
        self._rank = groups.tensor_parallel.rank
        self._state = ParallelState.of(module)
        self._anchor = torch.empty(0, device=device, requires_grad=True)

    def intercept(self, active: ActiveHandler) -> None:
        """Route calls of the module and its submodules outside steps to this object."""
        active.outside = self
        self._states.at_end(partial(setattr, active, "outside", None))
        stack = LayerStack.at(self._module, self._state.engine.plan.container)
        layers = set(stack.layers)
        for path, child in self._module.named_modules():
            if child not in layers and any(inner in layers for inner in child.modules()):
                self._states.at_end(partial(_release, child, type(child)))
                intercept(child, _AroundSite(active, path or type(child).__name__, path))

    def __call__(self, call: Call) -> Any:
        """Run a call; returns `NotImplemented` in a step, where each stage runs its own."""
        if self._state.is_in_step:
            return NotImplemented
        self._states.meet("a call")
        with self.whole_step():
            return call.module(*call.args, **call.kwargs)

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Show the full module inside the block, which all ranks run with the same random numbers."""
        # All ranks must draw the same numbers, such as the next token: a draw may decide which parameters are fetched.
        share_random_state(self._replica)
        with self.whole():
            yield

    @contextmanager
    def whole(self, without_data: bool = False) -> Iterator[None]:
        """Show the full module inside the block; its parameters are fetched when code reads them.

        Args:
            without_data: Give parameters on the meta device, for code that reads shapes only; no rank has to wait.
        """
        watch = self._state.watch
        with nullcontext() if watch is None else watch.paused(), self._fetched(without_data):
            yield

    @contextmanager
    def _fetched(self, without_data: bool) -> Iterator[None]:
        held: dict[str, Tensor] = dict(self._module.named_parameters())
        buffers = self._state.skeleton.buffers()
        given: WeakValueDictionary[tuple[str, bool, bool], Tensor] = WeakValueDictionary()

        def parameter(name: str) -> Tensor:
            trains = torch.is_grad_enabled() and name in self._states.trained
            # Autograd refuses tensors that were made in inference mode, so each mode gets another object.
            key = (name, trains, torch.is_inference_mode_enabled())
            # Return one object for a parameter while code holds it: code compares parameters by identity.
            if key not in given:
                mine = held.get(name)
                with torch.no_grad():
                    full = self._empty(name) if without_data else self._full(name, mine)
                found = Fetched.apply(self._anchor, partial(self._keep, name, mine), full) if trains else full.detach()
                mark_as_parameter(found, True)
                given[key] = found
                return found
            return given[key]

        with torch.inference_mode(False), torch.no_grad():
            names = self._state.skeleton.buffer_names
            begun = {n: self._empty(n) if without_data else self._full(n, buffers.get(n)) for n in names}
            full = {name: value.clone() for name, value in begun.items()}
        with self._state.skeleton.put_on(parameter, full, keeps=True):
            yield
        for name, value in full.items():
            # Compare values, not versions: the kernels of batch normalization do not raise the version.
            if name in buffers and not value.is_meta and not torch.equal(value, begun[name]):
                self._keep_buffer(name, buffers[name], value)

    @torch.no_grad()
    def _keep_buffer(self, name: str, mine: Tensor, full: Tensor) -> None:
        mine.copy_(self._states.inventory.rules.get(name, REPLICATED).split(full, self._rank))

    def _full(self, name: str, mine: Tensor | None) -> Tensor:
        return self._states.full(name, self._states.inventory.tensors[name].dtype, mine)

    def _empty(self, name: str) -> Tensor:
        inventory = self._states.inventory
        return torch.empty(inventory.full_shape(name), dtype=inventory.tensors[name].dtype, device="meta")

    def _keep(self, name: str, mine: Tensor | None, gradient: Tensor) -> None:
        """Add the gradient of a full parameter to `.grad` of this rank's part; each rank computes all gradients."""
        if mine is None:
            return
        # Every rank has run the same call, so its own part of the gradient is complete without communication.
        part = self._states.inventory.rules.get(name, REPLICATED).split(gradient.detach(), self._rank)
        mine.grad = part.clone() if mine.grad is None else mine.grad + part


def _release(module: nn.Module, kind: type) -> None:
    """Undo `intercept`."""
    module.__class__ = kind
    del vars(module)["_pipeline_site"]


class _AroundSite(CallSite):
    """The call site of a module that contains the layers: in steps it runs itself, and its parts are intercepted."""

    def dispatch(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the module."""
        result = NotImplemented
        if self.active.handler is None and self.active.outside is not None:
            result = self.active.outside(Call(self, module, function, args, kwargs))
        return function(*args, **kwargs) if result is NotImplemented else result


def _has_memory_of(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def open_outside(
    module: LightningModule, groups: MeshGroups, inventory: Inventory, checkpoints: Checkpoints, patches: Patches
) -> None:
    """Show the full module to code outside its steps, until the run ends; every rank of the replica must call this."""
    if groups.replica.size > 1:
        _open(module, groups, inventory, checkpoints.device, patches)
    _copy_averages(module.trainer, module, checkpoints, patches)


def _forget_states(owner: nn.Module) -> None:
    """Remove the hooks of a former copy, now a part of the module: they gather by the path of its original."""
    for hooks in state_hooks_of(owner):
        for key, hook in list(hooks.items()):
            if getattr(getattr(hook, "hook", hook), "__module__", "") == __name__:
                del hooks[key]


def _open(
    module: LightningModule, groups: MeshGroups, inventory: Inventory, device: torch.device, patches: Patches
) -> None:
    states = FullStates(module, groups, inventory, device)
    calls = OutsideCalls(module, states, groups, device)
    engine = ParallelState.of(module).engine
    if engine is not None:
        calls.intercept(engine.model.active)
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if is_a(callback, ModelSummary):
            patches.replace(callback, "on_fit_start", _on_whole(callback.on_fit_start, calls))


def _on_whole(summarize: Callable[[Any, LightningModule], None], calls: OutsideCalls) -> Callable[..., None]:
    """Let a summary count the parameters of the full module."""

    def on_fit_start(trainer: Any, pl_module: LightningModule) -> None:
        # The summary calls the module only if it has an example input; without a call, shapes are enough.
        with calls.whole(without_data=pl_module.example_input_array is None):
            summarize(trainer, pl_module)

    return on_fit_start


def hold_averages(trainer: Trainer, patches: Patches) -> None:
    """Keep callbacks that average weights from copying the full module, until `open_outside` makes the copies."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, AVERAGING):
            patches.replace(callback, "setup", lambda *_, **__: None)


def averages_of(trainer: Trainer) -> list[nn.Module]:
    """Return the models that hold averages of the weights for callbacks."""
    found = [averaged_model(callback) for callback in trainer.callbacks if isinstance(callback, AVERAGING)]  # type: ignore[attr-defined]
    return [average for average in found if average is not None]


def _copy_averages(trainer: Trainer, module: LightningModule, checkpoints: Checkpoints, patches: Patches) -> None:
    """Let callbacks that average weights copy the divided module; every rank must call it.

    Averages are elementwise, so each rank averages its own part. Checkpoints hold the averages of the full model.

    Raises:
        ValueError: On every rank, if a callback would change batch normalisation in a pipeline.
    """
    states = ParallelState.of(module).full_states
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, AVERAGING):
            continue
        if isinstance(callback, StochasticWeightAveraging):
            if checkpoints.pipeline_group.size > 1 and callback.pl_module_contains_batch_norm(module):
                raise ValueError(
                    "`StochasticWeightAveraging` ends with an epoch without gradients for batch normalization, which"
                    " a pipeline does not support. Use `WeightAveraging`, which also averages the statistics, or"
                    " TensorParallelStrategy"
                )
            restore_swapped_scheduler(callback, trainer, patches)
        # `WeightAveraging.setup` calls `configure_model`. A second call would build full layers again.
        without = MethodType(LightningModule.configure_model, module)
        with patched(module, "configure_model", without):
            # Through the class, because `hold_averages` has replaced the method of the object.
            type(callback).setup(callback, trainer, module, stage=trainer.state.fn)
        average = averaged_model(callback)
        if average is not None and states is not None:
            own = average.state_dict
            patches.replace(average, "state_dict", partial(_gathered, average, own, checkpoints, states))


def _gathered(average: nn.Module, own: Callable[[], Any], checkpoints: Checkpoints, states: FullStates) -> Any:
    """Return the full state dict of an average for a checkpoint, with values on the first rank only."""
    copied = average.module if isinstance(average, AveragedModel) else average
    # `gather_state` gathers by itself, so the hooks of the copy must return the parts of this rank.
    with states.paused(), patched(average, "state_dict", own):
        full = replace(checkpoints, module=copied).gather_state()
        if copied is average:
            return full
        others = {key: value for key, value in own().items() if not key.startswith("module.")}
    return {**others, **{f"module.{key}": value for key, value in full.items()}}
