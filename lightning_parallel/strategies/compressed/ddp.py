"""Gradient compression in strategies: the base class of all strategies, and compression under Lightning's DDP.

On a mesh, every rank of a replica compresses the gradients that it holds, so each position in the replica has a state.
`memory` writes the states to checkpoints of one file, `parts` to sharded checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_parallel.comm import (
    Group,
    NodeGroups,
    may_outlive_attempts,
    on_any_rank,
    report_failure,
    start_heartbeat,
    stop_heartbeat,
)
from lightning_parallel.compat import ParallelState, Patches
from lightning_parallel.compat.lightning import (
    FunctionLauncher,
    PathLike,
    follow_sigterm,
    process_group_backend_of,
    tell,
    timeout_of,
)
from lightning_parallel.compat.torch import remove_ddp_hooks
from lightning_parallel.compression import (
    HierarchicalReducer,
    HookState,
    Reducer,
    bind_to_module,
    check_reducer,
    compression_hook,
    warn_of_unmatched,
)
from lightning_parallel.pipeline.recomputation import Recomputed, recompute, repeated_layers
from lightning_parallel.strategies.checkpoints.files import SavesFiles
from lightning_parallel.strategies.checkpoints.rank_files import Place, remove_rank_files
from lightning_parallel.strategies.compressed.advice import tell_costs, warn_of_misfits
from lightning_parallel.strategies.compressed.memory import (
    KEY,
    CompressorMemory,
    KeptState,
    check_kept_state,
    is_memory_of,
)
from lightning_parallel.strategies.compressed.nodes import (
    Hierarchical,
    between_nodes,
    check_hierarchical,
    hosts_of,
    size_of_node,
)
from lightning_parallel.strategies.options import (
    ActivationCheckpointing,
    check_activation_checkpointing,
    named,
    spelled,
)
from lightning_parallel.strategies.ranks.processes import EndingLauncher, StartMethod, connect, start_method_here
from lightning_parallel.strategies.steps.recomputed import layers_within_limit, tell_recomputed

__all__ = [
    "CompressedDDPStrategy",
    "SavesCompression",
    "drop_gradients",
    "warn_of_dropped_step",
]


def drop_gradients(module: LightningModule, names: Optional[Collection[str]]) -> None:
    """Drop the gradients of `names`, or all: optimizers skip parameters without one, so the step changes nothing."""
    for name, parameter in module.named_parameters():
        if names is None or name in names:
            parameter.grad = None
    warn_of_dropped_step(module)


def warn_of_dropped_step(module: LightningModule) -> None:
    """Warn of a skipped step, the 1st, 2nd, 4th, 8th, ... time."""
    # The module holds the count, so that the next run continues it.
    state = ParallelState.of(module)
    state.skipped_steps += 1
    count = state.skipped_steps
    if count & (count - 1) == 0:
        rank_zero_warn(
            "A gradient was not finite on some rank, or overflowed when encoded (fp16 ends at 65504, bf16 at 3e38)."
            f" Its step is skipped. Skipped so far: {count}."
        )


def _connect(strategy: Any) -> None:
    """Connect the processes of a strategy if the store of its launcher may hold addresses of an earlier attempt."""
    # DeepSpeed connects its processes itself.
    if may_outlive_attempts() and not isinstance(strategy, DeepSpeedStrategy):
        strategy.set_world_ranks()
        # Lightning later finds the processes connected, and creates no second default group.
        backend, timeout = process_group_backend_of(strategy), timeout_of(strategy)
        connect(strategy.cluster_environment, strategy.root_device, backend, timeout)


class SavesCompression(SavesFiles):
    """Base class that saves the state of `compression` with Lightning's checkpoints.

    It also runs the heartbeat, which lets the error of a failed collective name the missing ranks.
    """

    compression: Reducer
    kept_state: KeptState = "local"
    activation_checkpointing: ActivationCheckpointing = "off"
    _patches: Patches | None = None

    def _compress_by(self, compression: Reducer, compressor_state: KeptState) -> None:
        """Set the compressor, and the argument `compressor_state`.

        Raises:
            TypeError: If `compression` is no compressor.
            ValueError: If `compressor_state` is unknown.
        """
        check_reducer(compression)
        check_kept_state(compressor_state)
        self.compression = compression
        self.kept_state = compressor_state

    @override
    def setup_environment(self) -> None:
        _connect(self)
        super().setup_environment()
        self._begin_compression()

    def _begin_compression(self) -> None:
        """Watch the other ranks, and bind the compressor to the module; once the processes have met."""
        start_heartbeat()
        module = self.lightning_module
        self._patches = Patches()
        if module is not None:
            follow_sigterm(module.trainer, lambda flag: on_any_rank([flag], self.every_rank)[0], self._patches)
        # For fitting only: an evaluation of another module must not reset the compressor.
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING and self.compression is not None:
            bind_to_module(module, self.compression)

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        if module is not None and self.is_global_zero and trainer.state.fn == TrainerFn.FITTING:
            # Before `super().setup`, in which FSDP wraps layers and renames their parameters.
            warn_of_unmatched(module, self.compression)
        compresses = trainer.state.fn == TrainerFn.FITTING and self.compression is not None
        if module is not None and compresses:
            self._tell_costs(module, trainer.world_size)
        if module is not None and trainer.state.fn == TrainerFn.FITTING:
            # Before `super().setup`, too: FSDP gathers the parameters of a layer around its call.
            self._recompute(module)
        super().setup(trainer)
        if module is not None and compresses:
            warn_of_misfits(self.compression, module, self.optimizers)

    def _tell_costs(self, module: LightningModule, replicas: int) -> None:
        tell_costs(self.compression, module, replicas)

    def _recompute(self, module: LightningModule) -> None:
        option: str | int | Mapping[str, Recomputed] = self.activation_checkpointing
        if option == "auto":
            recompute(module, "off")
            option = layers_within_limit(
                module,
                self.precision_plugin,
                self.root_device,
                self.every_rank,
                replicas=self.every_rank.size,
                zero_stage=self.similar_zero_stage,
            )
            tell_recomputed(option, len(set(repeated_layers(module, "auto").names)))
        recompute(module, option)

    @property
    def similar_zero_stage(self) -> int:
        """The ZeRO stage of a mesh strategy that shards as much as this strategy."""
        return 0

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Before the teardown, which ends the heartbeat: peers that miss this rank then look for its error.
        report_failure(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._patches is not None:
            self._patches.undo()
        if self.compression is not None:
            self.compression.leave_device()
        if self.lightning_module is not None:
            recompute(self.lightning_module, "off")
        try:
            super().teardown()
        finally:
            # After the collectives of the last save: until here, the heartbeat tells which rank is lost.
            stop_heartbeat()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Optional[Any] = None
    ) -> None:
        if "optimizer_states" in checkpoint:  # missing if only weights are saved
            # Before Lightning's check of the rank, which only rank 0 passes: every rank must write its state.
            checkpoint[KEY] = self._memory().save(self.path_of_parts(filepath)[0])
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_beside(self, filepath: PathLike) -> None:
        remove_rank_files(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: Optional[bool] = None) -> dict[str, Any]:
        # Lightning has no hook for the state of a strategy in a checkpoint, so this method restores the state.
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        # Only a fit continues compression, and has a session for the state.
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            if KEY in checkpoint and is_memory_of(checkpoint, drifts=False):
                self._memory().restore(checkpoint[KEY], checkpoint_path)
            elif KEY not in checkpoint and "optimizer_states" in checkpoint:
                tell("The checkpoint has no compression state; compression starts at step 0.")
        return checkpoint

    def _memory(self) -> CompressorMemory:
        """Return the object that saves and restores the compressor's memory; every rank must call it."""
        world = self.every_rank
        return CompressorMemory(self.compression, Place(world.rank, 0), None, world, self.kept_state)

    def _skip_step(self, names: Optional[Collection[str]] = None) -> None:
        """Drop the gradients of `names`, or all: optimizers skip parameters without a gradient."""
        assert self.lightning_module is not None
        drop_gradients(self.lightning_module, names)


class CompressedDDPStrategy(SavesCompression, DDPStrategy):
    """Compresses the gradients of Lightning's `DDPStrategy`, also on CPU.

    Compression overlaps with the backward pass, also on a single rank. If a gradient is not finite on any rank, all
    ranks skip the step, which changes nothing. Under `16-mixed` the gradient scaler skips the step, otherwise the
    strategy does. You may unfreeze parameters during training, as finetuning callbacks do: the strategy then wraps the
    module again. Checkpoints hold the compressor's state. Training resumes bit for bit on the same number of ranks.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CompressedDDPStrategy, PowerSGD

        trainer = Trainer(devices=2, strategy=CompressedDDPStrategy(PowerSGD(rank=4)))
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        compression: Compressor of the gradient all-reduce.
        compressor_state: How a checkpoint of one file stores the compressor's state. `local` writes one file per rank
            beside it, `none` stores nothing. A sharded checkpoint stores the state of each rank as tensors of it.
        hierarchical: Sum full gradients inside a node, and compress between nodes only. True groups the replicas by
            host. A number sets the replicas per node.
        activation_checkpointing: Recompute activations of the repeated layers in backward, which saves memory and takes
            time. `full` recomputes each layer, and a number n every n-th layer. `selective` keeps the results of
            products, attention and communication. `auto` chooses as few layers as fit in memory. `off` keeps all.
        broadcast_buffers: Broadcast the buffers of the first rank before each forward pass.
        init_sync: Broadcast parameters and buffers of the first rank when the module is wrapped.
        bucket_cap_mb: Size of a gradient bucket, in MiB. By default the size of `DistributedDataParallel`.
        find_unused_parameters: Search for parameters without a gradient after each forward pass.
        gradient_as_bucket_view: Let `.grad` be a view of its bucket, which saves a copy.
        static_graph: Promise that the same parameters are used in every step.
        process_group_backend: Backend of `torch.distributed`. By default it follows the device: gloo for CPU, NCCL for
            CUDA.
        timeout: Deadline of every collective. 30 minutes by default.
        start_method: How Lightning starts processes without a launcher. `popen` runs the script again. `spawn`, `fork`
            and `forkserver` start functions. `auto` takes `fork` in a notebook, and `popen` elsewhere.
        accelerator: Accelerator object, set by the Trainer.
        parallel_devices: Devices of this node, set by the Trainer.
        cluster_environment: Source of ranks and addresses. By default Lightning detects torchrun, SLURM and others.
        checkpoint_io: Lightning plugin that reads and writes files.
        precision_plugin: Precision plugin, set by the Trainer from `precision`.

    Raises:
        ValueError: If you also pass a communication hook. On every rank when the Trainer starts, if nodes have
            different numbers of ranks.
    """

    @spelled(
        **dict.fromkeys(
            ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"),
            "`compression` is the communication hook of DDP; use `DDPStrategy` for another hook.",
        )
    )
    def __init__(
        self,
        compression: Reducer,
        *,
        compressor_state: KeptState = "local",
        hierarchical: Hierarchical = False,
        activation_checkpointing: ActivationCheckpointing = "off",
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        bucket_cap_mb: Optional[int] = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "auto",
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        start_method = start_method_here(start_method)
        own = named(locals(), DDPStrategy.__init__)
        wrapping = named(locals(), DistributedDataParallel.__init__, CompressedDDPStrategy.__init__)
        super().__init__(**own, **wrapping)
        self._compress_by(compression, compressor_state)
        check_activation_checkpointing(activation_checkpointing)
        self.activation_checkpointing = activation_checkpointing
        check_hierarchical(hierarchical, compression)
        self.hierarchical = hierarchical
        self._between_nodes: HierarchicalReducer | None = None
        self._hook_state: HookState | None = None
        self._wrapped: set[int] = set()

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen" and isinstance(self._launcher, FunctionLauncher):
            self._launcher = EndingLauncher(self, start_method=self._start_method)

    @override
    def _begin_compression(self) -> None:
        super()._begin_compression()
        module = self.lightning_module
        world = Group.of()
        # Kept after `fit`: a checkpoint may be saved later, and the next `fit` of the same processes uses it again.
        known = None if self._between_nodes is None else self._between_nodes.nodes.whole.process_group
        if not self.hierarchical or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return
        # Another default group means that torch.distributed was restarted, and the groups of the nodes are gone.
        if self._between_nodes is None or known is not world.process_group:
            hosts = hosts_of(world, self.node_rank)
            nodes = NodeGroups.of(hosts, size_of_node(self.hierarchical), timeout_of(self))
            self._between_nodes = between_nodes(self.compression, nodes)

    @property
    def _means(self) -> Union[Reducer, HierarchicalReducer]:
        """The reducer that takes the means."""
        return self.compression if self._between_nodes is None else self._between_nodes

    @override
    def _tell_costs(self, module: LightningModule, replicas: int) -> None:
        if self._between_nodes is None:
            super()._tell_costs(module, replicas)
        else:
            nodes = self._between_nodes.nodes
            tell_costs(self.compression, module, nodes.across.size, nodes.inside.size)

    @override
    def _memory(self) -> CompressorMemory:
        memory = super()._memory()
        if self._between_nodes is None:
            return memory
        nodes = self._between_nodes.nodes
        place = Place(nodes.across.rank, 0, nodes.inside.rank)
        return replace(memory, means=self._between_nodes, place=place)

    @override
    def _register_ddp_hooks(self) -> None:
        # Without `super()`: Lightning's method does nothing on CPU.
        assert isinstance(self.model, DistributedDataParallel)
        self._hook_state = HookState(
            self._means,
            self.model,
            scaler=getattr(self.precision_plugin, "scaler", None),
            bucket_bytes=self.model.bucket_bytes_cap,
            timeout=timeout_of(self),
        )
        self.model.register_comm_hook(self._hook_state, compression_hook)
        self._wrapped = {id(parameter) for parameter in self.model.parameters() if parameter.requires_grad}

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._wrap_unfrozen()

    def _wrap_unfrozen(self) -> None:
        """Wrap the module again if more parameters are trained."""
        # DDP reduces only the parameters that required gradients when it wrapped the module.
        module = self.lightning_module
        wrapper = self.model
        assert module is not None
        if all(id(parameter) in self._wrapped for parameter in module.parameters() if parameter.requires_grad):
            return
        assert isinstance(wrapper, DistributedDataParallel)
        assert self._hook_state is not None
        # The hooks of the old wrapper would reduce every gradient a second time.
        self._hook_state.close()
        remove_ddp_hooks(wrapper)
        self.model = module
        self.configure_ddp()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        # While batches accumulate, DDP reduces nothing, so there is no step to finish.
        if self._hook_state is None or not self.model.require_backward_grad_sync:  # type: ignore[union-attr]
            return
        if not self._hook_state.finish() and getattr(self.precision_plugin, "scaler", None) is None:
            self._skip_step(self._hook_state.reduced)

    @override
    def teardown(self) -> None:
        if self._hook_state is not None:
            self._hook_state.close()
            self._hook_state = None
        super().teardown()
