"""Lets `lightning.fabric.Fabric` train a loop of the user's own with the strategies of a mesh.

    fabric = Fabric(strategy=TensorParallelStrategy(tensor_parallel_size=2), devices=4)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

`FabricMesh` passes the calls of Fabric on to the user's strategy, so that one implementation divides models. The
strategy gets a Trainer whose loops do not run, and a LightningModule that holds the user's module. The user's loop is a
step under manual optimization:

    model(x)               training_step; validation_step without gradients
    fabric.backward(loss)  backward
    optimizer.step()       optimizer_step
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Optional, Union

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import stop_heartbeat
from lightning_parallel.compat import patched
from lightning_parallel.compat.default_group import default_group_kept
from lightning_parallel.compat.lightning import BackwardSyncControl, PathLike
from lightning_parallel.compat.torch import pytree
from lightning_parallel.mesh import CONTEXT, PIPELINE
from lightning_parallel.strategies.auto_parallel import AutoParallelStrategy
from lightning_parallel.strategies.local_sgd import LocalSGDStrategy
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.strategies.whole.between_runs import share_tensors
from lightning_parallel.tensor.pieces import without_pieces
from lightning_parallel.tensor.sharded import ShardedTensor

__all__ = ["FabricMesh", "fabric_strategy"]

_PREFIX = "module."


class FabricLoop(LightningModule):
    """Holds the user's module, whose calls are its steps."""

    module: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.given: list[Optimizer] = []

    @override
    def training_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.module(*args, **kwargs)

    @override
    def validation_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.module(*args, **kwargs)

    @override
    def configure_optimizers(self) -> Any:
        return self.given


class _Calls(nn.Module):
    """Runs each call of the user's module as a step of the strategy."""

    def __init__(self, strategy: MeshStrategy) -> None:
        super().__init__()
        # Not as a child: the module would then be registered twice.
        self._strategy = strategy

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "A module of `fabric.setup` cannot be copied, because the copy would compute with the weights of the"
            " original. Copy the module itself: `copy.deepcopy(model.module)`"
        )

    @override
    @torch.compiler.disable  # `torch.compile(model)` would compile the strategy; `compile_layers=True` compiles layers
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        strategy = self._strategy
        if torch.is_grad_enabled() and strategy.module.trainer.state.fn == TrainerFn.FITTING:
            strategy.note_batch((args, kwargs))
            strategy.begin_batch(False)
            return strategy.training_step(args, kwargs)
        return strategy.validation_step(args, kwargs)


class FabricMesh(DDPStrategy):
    """Passes the calls of Fabric on to a strategy of the Trainer.

    Args:
        strategy: The user's strategy, which `fabric_strategy` has accepted.
    """

    def __init__(self, strategy: MeshStrategy) -> None:
        self.mesh_strategy = strategy
        super().__init__(**strategy.arguments_of_processes())
        self._backward_sync_control = _Synchronization(strategy)
        self._loop = FabricLoop()
        self._shares = True
        self._shown = ExitStack()
        self._kept = ExitStack()

    # -------------------------------------------------------------------------------------------------- the set-up

    @override
    def setup_environment(self) -> None:
        strategy, loop = self.mesh_strategy, self._loop
        self._kept.enter_context(default_group_kept())
        environment = self.cluster_environment
        assert environment is not None
        loop.trainer = trainer = Trainer(
            accelerator=self.root_device.type,
            devices=self.num_processes,
            num_nodes=self.num_nodes,
            strategy=strategy,
            precision=self.precision.precision,
            plugins=[environment],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
        trainer.training = True
        strategy.connect(loop)
        strategy.setup_environment()
        # Fabric has no hook for the end of a loop, nor for errors.
        atexit.register(stop_heartbeat)
        self._kept.callback(atexit.unregister, stop_heartbeat)
        self._kept.callback(setattr, sys, "excepthook", sys.excepthook)
        sys.excepthook = partial(_report, sys.excepthook)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        # Without optimizers, the module only computes.
        self._loop.trainer.state.fn = TrainerFn.VALIDATING
        return self._set_up(module, [])

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        return self._set_up(module, optimizers), optimizers, scheduler

    def _set_up(self, module: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        loop = self._loop
        if hasattr(loop, "module"):
            raise RuntimeError(
                f"A `{type(self.mesh_strategy).__name__}` divides one module; got a second `Fabric.setup`. Put all"
                " modules that train together into one `nn.Module`, and set it up with all optimizers"
            )
        loop.module, loop.given = module, optimizers
        # A state that was loaded before is that of full parameters.
        states = [optimizer.state_dict() if optimizer.state else None for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.state.clear()
        # A loop has no step that one process could run as well. The strategy may serve a Trainer later.
        with patched(self.mesh_strategy, "verify", "off"):
            self.mesh_strategy.setup(loop.trainer)
        for optimizer, state in zip(optimizers, states):
            if state is not None:
                self._load_optimizer(optimizer, state)
        watch = self.mesh_strategy.run.hook_watch
        if watch is not None:
            # The user's code between two calls is a part of a step, too: it may read weights and gradients.
            self._shown.enter_context(watch.step())
        return _Calls(self.mesh_strategy)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise NotImplementedError(
            f"A `{type(self.mesh_strategy).__name__}` sets up optimizers together with the module that it divides; call"
            " `fabric.setup(module, optimizer)`"
        )

    @override
    def teardown(self) -> None:
        """End the strategy: the module gets its full parameters, and torch's default group is that of all ranks again.

        Fabric does not call it. A program that goes on after its loop may call it, on every rank.
        """
        self._shown.close()
        self.mesh_strategy.teardown()
        self._kept.close()

    @property
    def num_replicas(self) -> int:
        """The number of replicas of the module, which divide the data."""
        return self.mesh_strategy.groups.data_parallel.size

    @property
    @override
    def distributed_sampler_kwargs(self) -> Any:
        # None leaves the loader as it is: the ranks of one replica draw the same order.
        return self.mesh_strategy.distributed_sampler_kwargs if self.num_replicas > 1 else None

    # -------------------------------------------------------------------------------------------------- the steps

    @override
    def backward(self, tensor: Tensor, module: Optional[nn.Module], *args: Any, **kwargs: Any) -> None:
        if self._loop.trainer.state.fn != TrainerFn.FITTING:
            raise RuntimeError(
                "A module that trains must be set up together with its optimizers, `fabric.setup(module, optimizer)`;"
                " got a backward pass after `fabric.setup(module)`"
            )
        self.mesh_strategy.backward(tensor, None, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, closure: Optional[Callable[[], Any]] = None, **kwargs: Any) -> Any:
        return self.mesh_strategy.optimizer_step(optimizer, closure or (lambda: None), self._loop, **kwargs)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: Union[float, int],
        norm_type: Union[float, int, str] = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        # A number, also of "inf": parts of a norm are combined by it.
        return super().clip_gradients_norm(module, optimizer, max_norm, float(norm_type), error_if_nonfinite)

    # ---------------------------------------------------------------------------------------------- communication

    @override
    def all_reduce(
        self, tensor: Any, group: Optional[Any] = None, reduce_op: Optional[Union[ReduceOp, str]] = "mean"
    ) -> Any:
        return self.mesh_strategy.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Optional[Any] = None, sync_grads: bool = False) -> Tensor:
        return self.mesh_strategy.all_gather(tensor, group, sync_grads)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.mesh_strategy.barrier()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return self.mesh_strategy.broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.mesh_strategy.reduce_boolean_decision(decision, all)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def _is_mine(self, module: nn.Module) -> bool:
        return isinstance(module, _Calls) or module is getattr(self._loop, "module", None)

    @override
    def save_checkpoint(
        self, path: PathLike, state: dict[str, Any], storage_options: Optional[Any] = None, filter: Any = None
    ) -> None:
        # Here, on all ranks: rank zero alone writes, and could not gather the parts in an average of weights.
        others = {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in state.items()
            if not isinstance(value, (nn.Module, Optimizer))
        }
        others = pytree.tree_map_only(ShardedTensor, ShardedTensor.whole, others)
        state = {**state, **without_pieces(others)}
        self._shares = bool(filter)
        try:
            super().save_checkpoint(path, state, storage_options, filter)
        finally:
            self._shares = True

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        if not self._is_mine(module):
            return super().get_module_state_dict(module)
        state = self.mesh_strategy.lightning_module_state_dict()
        state = {name.removeprefix(_PREFIX): value for name, value in state.items()}
        self._share(state)
        return state

    def _share(self, values: dict[Any, Any]) -> None:
        """Send tensors from rank zero to all ranks, except where rank zero alone writes them."""
        if self._shares:
            tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            share_tensors(tensors, self.mesh_strategy.groups.world, self.root_device)
            values.update(tensors)

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        if not self._is_mine(module):
            super().load_module_state_dict(module, dict(state_dict), strict)
            return
        named = {_PREFIX + name: value for name, value in state_dict.items()}
        self.mesh_strategy.load_model_state_dict({"state_dict": named}, strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = self.mesh_strategy.optimizer_state(optimizer)
        entries = state.get("state", {})
        # In one dict, so that small tensors of all parameters share messages.
        values = {(index, key): value for index, entry in entries.items() for key, value in entry.items()}
        self._share(values)
        for (index, key), value in values.items():
            entries[index][key] = value
        return state

    @override
    def load_checkpoint(
        self, path: PathLike, state: Optional[Any] = None, strict: bool = True, weights_only: Optional[bool] = None
    ) -> dict[str, Any]:
        load = partial(super().load_checkpoint, path, strict=strict, weights_only=weights_only)
        if isinstance(state, Optimizer):
            self._load_optimizer(state, load(state=None))
            return {}
        if not isinstance(state, dict):
            return load(state=state)
        # Fabric would load the state of full parameters into an optimizer of parts.
        taken = {
            key: _Loads(partial(self._load_optimizer, value)) if isinstance(value, Optimizer) else value
            for key, value in state.items()
        }
        rest = load(state=taken)
        state.update((key, value) for key, value in taken.items() if not isinstance(value, _Loads))
        return rest

    def _load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        strategy = self.mesh_strategy
        before, strategy.optimizers = strategy.optimizers, [optimizer]
        try:
            strategy.load_optimizer_state_dict({"optimizer_states": [state]})
        finally:
            strategy.optimizers = before


class _Loads:
    """Stands for an optimizer while Fabric loads a checkpoint."""

    def __init__(self, load: Callable[[Mapping[str, Any]], None]) -> None:
        self.load_state_dict = load

    def state_dict(self) -> dict[str, Any]:
        """Return nothing; with it Fabric takes the object for one that can load."""
        return {}


class _Synchronization(BackwardSyncControl):
    """Leaves out the mean over the replicas, while gradients accumulate."""

    def __init__(self, strategy: MeshStrategy) -> None:
        self._strategy = strategy

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return self._strategy.block_backward_sync() if enabled else nullcontext()


def _report(known: Callable[..., Any], kind: type, error: BaseException, trace: Any) -> None:
    """Tell the other ranks why this rank ends, before its own traceback."""
    comm.report_failure(error)
    comm.wait_until_heard()
    known(kind, error, trace)


def fabric_strategy(strategy: Any) -> FabricMesh:
    """Return the strategy of Fabric for a strategy of this library.

    Raises:
        ValueError: If the strategy needs the user's step as a function, or is made for the loops of the Trainer.
    """
    kind = type(strategy).__name__
    reason = ""
    if not isinstance(strategy, MeshStrategy) or isinstance(strategy, (AutoParallelStrategy, LocalSGDStrategy)):
        reason = f"`{kind}` is made for the loops of the Trainer"
    elif strategy.has_axis(PIPELINE):
        reason = "a pipeline runs a step once for each microbatch and stage, and a loop has no step to run"
    elif strategy.has_axis(CONTEXT):
        reason = "a context axis is planned from the record of a step, and a loop has no step to record"
    elif strategy.zero_stage > 1:
        reason = f"`zero_stage={strategy.zero_stage}` frees gradients that a loop may read"
    elif strategy.is_sharded:
        reason = "`checkpoint_format='sharded'` is written by the Trainer"
    elif strategy.activation_checkpointing == "auto" or strategy.tiled != "off":
        reason = "`activation_checkpointing='auto'` and `tiled` need the record of a step"
    elif strategy.verify == "always":
        reason = "`verify='always'` compares steps, and a loop has no step to compare"
    if reason:
        raise ValueError(
            "Fabric takes `TensorParallelStrategy`, or `HybridParallelStrategy` with tensor and data parallelism and"
            f" `zero_stage` 0 or 1; {reason}. Use the Trainer for it [LP040]"
        )
    return FabricMesh(strategy)
