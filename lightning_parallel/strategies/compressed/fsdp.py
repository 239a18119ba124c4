"""Gradient compression under Lightning's `FSDPStrategy` (FSDP1) and `ModelParallelStrategy` (FSDP2 modules)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    OptimStateKeyType,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import enable_wrap
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.compat.lightning import state_dict_type_of
from lightning_parallel.compat.precision import device_of_scaler
from lightning_parallel.compat.torch import fsdp1_synchronizes
from lightning_parallel.compression import (
    Reducer,
    ShardedSession,
    compress_fsdp,
    compress_fully_shard,
    shard_ranks,
)
from lightning_parallel.strategies.checkpoints.rank_files import Place
from lightning_parallel.strategies.compressed.ddp import SavesCompression
from lightning_parallel.strategies.compressed.memory import CompressorMemory, KeptState
from lightning_parallel.strategies.optimizers.checks import check_flattened
from lightning_parallel.strategies.options import (
    ActivationCheckpointing,
    check_activation_checkpointing,
    named,
    spelled,
)

__all__ = ["CompressedFSDPStrategy", "CompressedModelParallelStrategy"]


class _SavesShardedCompression(SavesCompression):
    """Base class of the strategies that shard parameters: the compressor's state belongs to a session."""

    _state: ShardedSession | None = None

    @override
    def _memory(self) -> CompressorMemory:
        assert self._state is not None
        # A step may stay open until the next forward pass, and its residuals belong to the state.
        self._state.finish()
        place, replicas = Place(*self._state.place()), self._state.group
        return CompressorMemory(self.compression, place, replicas, self.every_rank, self.kept_state)

    @override
    def teardown(self) -> None:
        if self._state is not None:
            # `_state` stays set: `save_checkpoint` after `fit` asks it for the place of this rank.
            self._state.close()
        super().teardown()


class CompressedFSDPStrategy(_SavesShardedCompression, FSDPStrategy):
    """Compresses the gradients of Lightning's `FSDPStrategy` (FSDP1), also on CPU.

    If a gradient is not finite on any rank, all ranks skip the step. Checkpoints hold the compressor's state.
    While batches accumulate, the strategy does not communicate. You may clip gradients by norm.

    With reentrant activation checkpointing, FSDP reduces a gradient in two parts. The compressor would count them as
    two steps, so pass `use_reentrant=False`.

    With `HYBRID_SHARD` the strategy compresses gradients between replicas only. `device_mesh` defines the replicas.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CompressedFSDPStrategy, Quantize

        strategy = CompressedFSDPStrategy(Quantize(8), state_dict_type="sharded")
        trainer = Trainer(devices=2, strategy=strategy)
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        compression: Compressor of the gradient all-reduce.
        compressor_state: How a checkpoint of one file stores the compressor's state. `local` writes one file per rank
            beside it, `none` stores nothing. A sharded checkpoint stores the state of each rank as tensors of it.
        cpu_offload: Keep parameters and gradients in CPU memory.
        mixed_precision: Types of parameters, reductions and buffers. By default from `precision`.
        auto_wrap_policy: Module classes, or a policy, to wrap into an FSDP unit each.
        activation_checkpointing: `full`, `selective`, `auto` or a number, as in `CompressedDDPStrategy`. Or classes of
            modules that Lightning recomputes in the backward pass; deprecated in favour of the policy.
        activation_checkpointing_policy: Module classes, or a policy, to recompute in the backward pass.
        sharding_strategy: `FULL_SHARD`, `SHARD_GRAD_OP`, `NO_SHARD`, `HYBRID_SHARD`, or a `ShardingStrategy`.
        state_dict_type: `full` writes one checkpoint file, `sharded` a folder.
        device_mesh: Mesh of replicas and shards, for `HYBRID_SHARD`.
        backward_prefetch: When to gather the parameters of the next unit in the backward pass.
        ignored_modules: Modules that FSDP leaves alone.
        ignored_states: Parameters or modules that FSDP leaves alone.
        param_init_fn: Function that initialises a module on the meta device.
        sync_module_states: Broadcast parameters and buffers of the first rank when the module is wrapped.
        forward_prefetch: Gather the parameters of the next unit during the forward pass.
        limit_all_gathers: Wait before gathering more parameters than two units hold.
        use_orig_params: Show the original parameters to the optimizer. Lightning's default.
        process_group_backend: Backend of `torch.distributed`. By default it follows the device: gloo for CPU, NCCL for
            CUDA.
        timeout: Deadline of every collective. 30 minutes by default.
        accelerator: Accelerator object, set by the Trainer.
        parallel_devices: Devices of this node, set by the Trainer.
        cluster_environment: Source of ranks and addresses. By default Lightning detects torchrun, SLURM and others.
        checkpoint_io: Lightning plugin that reads and writes files.
        precision_plugin: Precision plugin, set by the Trainer from `precision`.

    Raises:
        ValueError: If `sharding_strategy` shards and replicates on CPU without a `device_mesh`.
    """

    @spelled()
    def __init__(
        self,
        compression: Reducer,
        *,
        compressor_state: KeptState = "local",
        cpu_offload: Union[bool, CPUOffload, None] = None,
        mixed_precision: Optional[MixedPrecision] = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Union[ActivationCheckpointing, type[nn.Module], list[type[nn.Module]], None] = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "full",
        device_mesh: Union[tuple[int, int], DeviceMesh, None] = None,
        backward_prefetch: Optional[BackwardPrefetch] = BackwardPrefetch.BACKWARD_PRE,
        ignored_modules: Optional[Iterable[nn.Module]] = None,
        ignored_states: Optional[Iterable[Any]] = None,
        param_init_fn: Optional[Callable[[nn.Module], None]] = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        if isinstance(activation_checkpointing, (str, int)):
            check_activation_checkpointing(activation_checkpointing)
            self.activation_checkpointing = activation_checkpointing
            # Lightning's argument of this name takes classes.
            activation_checkpointing = None
        wrapping = named(locals(), FullyShardedDataParallel.__init__, CompressedFSDPStrategy.__init__)
        super().__init__(**{**wrapping, **named(locals(), FSDPStrategy.__init__)})
        self._compress_by(compression, compressor_state)
        self._wrapped: Any = None

    @override
    def setup_environment(self) -> None:
        device = self.root_device.type
        mesh = self.kwargs.pop("device_mesh", None)
        if device == "cpu" and mesh is None and "HYBRID" in self.sharding_strategy.name:
            raise ValueError(
                "`device_mesh=(replicas, shards)` must be given with"
                f" `sharding_strategy={self.sharding_strategy.name!r}` on CPU, where the number of devices does not"
                " define the nodes; got none"
            )
        super().setup_environment()
        # Lightning would make a mesh of CUDA devices of the tuple.
        if mesh is not None:
            self.kwargs["device_mesh"] = init_device_mesh(device, mesh) if isinstance(mesh, tuple) else mesh
        # Not in the constructor: the Trainer sets the plugin of a strategy later.
        plugin = self.precision_plugin
        # The exact type: a subclass may be the user's plugin.
        if type(plugin) is FSDPPrecision:
            self.precision_plugin = DeviceFSDPPrecision(plugin, device, lambda: self.model)

    @property
    @override
    def similar_zero_stage(self) -> int:
        return 0 if self.sharding_strategy.name == "NO_SHARD" else 3

    @property
    def _arguments(self) -> dict[str, Any]:
        """The arguments of FSDP on CPU: Lightning passes the index of the device, which a CPU does not have."""
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": self.root_device,
            **self.kwargs,
        }

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator:
        on_cpu = self.root_device.type == "cpu"
        with (
            enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._arguments)
            if on_cpu
            else super().model_sharded_context()
        ):
            yield

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        # FSDP1 cannot be unwrapped: a module that is fitted again keeps the wrapper of its first fit.
        if self._wrapped is None or self._wrapped.module is not model:
            self._wrapped = self._wrap(model)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._state = self._compress(self._wrapped)
        return self._wrapped

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.world_size > 1 and self.sharding_strategy.name != "NO_SHARD":
            check_flattened(self.optimizers, "FSDP1")

    def _wrap(self, model: nn.Module) -> nn.Module:
        is_wrapped = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        if self.root_device.type == "cpu" and not is_wrapped:
            # Lightning does not wrap an FSDP module again.
            model = FullyShardedDataParallel(model, **self._arguments)
            # The policy was applied. Lightning would warn that it has no effect on a wrapped module.
            self.kwargs.pop("auto_wrap_policy", None)
        return super()._setup_model(model)

    def _compress(self, wrapped: nn.Module) -> ShardedSession:
        if not isinstance(wrapped, FullyShardedDataParallel):
            raise ValueError(
                "The module must be without FSDP; got wrapped layers in a module that is not wrapped. Leave the"
                " wrapping to the strategy (`auto_wrap_policy`). A module that another strategy has wrapped cannot be"
                " used again, because FSDP1 does not unwrap it."
            )
        return compress_fsdp(wrapped, self.compression, self._scaler)

    @property
    def _scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert isinstance(self.model, FullyShardedDataParallel)
        if state_dict_type_of(self) != "full" or self.root_device.type != "cpu":
            return super().lightning_module_state_dict()
        with self._whole_on_cpu():
            return self.model.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if state_dict_type_of(self) != "full" or self.root_device.type != "cpu":
            return super().optimizer_state(optimizer)
        assert isinstance(self.model, FullyShardedDataParallel)
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with self._whole_on_cpu():
            state = FullyShardedDataParallel.optim_state_dict(self.model, inner)
        # With `rank0_only`, the other ranks have an empty state.
        if self.global_rank > 0:
            return state
        # FSDP names the parameters in an optimizer's state, but Lightning's checkpoints number them.
        return FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)

    def _whole_on_cpu(self) -> AbstractContextManager:
        """Gather full states like Lightning, but without offload to CPU.

        If tensors are on the CPU already, the offload of FSDP frees memory in use.
        """
        assert isinstance(self.model, FullyShardedDataParallel)
        return FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
        )

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        # Lightning's method works for DDP only: FSDP would reduce every accumulated batch.
        model = self.model
        with model.no_sync() if isinstance(model, FullyShardedDataParallel) else nullcontext():
            yield

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        synchronized = isinstance(self.model, FullyShardedDataParallel) and fsdp1_synchronizes(self.model)
        # With a scaler the gradients stay: the scaler finds the non-finite values, and skips the step.
        if self._state is not None and synchronized and not self._state.finish() and self._scaler is None:
            self._skip_step()


class CompressedModelParallelStrategy(_SavesShardedCompression, ModelParallelStrategy):
    """Compresses the gradients of Lightning's `ModelParallelStrategy`, also on CPU.

    Your `configure_model` passes a mesh to `fully_shard`. The mesh decides which communication is compressed:

        self.device_mesh["data_parallel"]    the reduce-scatter over the data-parallel axis; `parallelize_module`
                                             may use the tensor-parallel axis
        self.device_mesh["tensor_parallel"]  hybrid sharding: the sum over the data-parallel axis, whose ranks hold
                                             the same shards; every rank then reads different data

    If a gradient is not finite on any rank, all ranks skip the step. Checkpoints hold the compressor's state.
    While batches accumulate, the strategy does not communicate.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CompressedModelParallelStrategy, PowerSGD
        from torch.distributed.fsdp import fully_shard

        class MyShardedModule(MyModule):
            def configure_model(self):
                fully_shard(self, mesh=self.device_mesh["data_parallel"])

        trainer = Trainer(devices=2, strategy=CompressedModelParallelStrategy(PowerSGD(rank=4)))
        trainer.fit(MyShardedModule(), MyData())
        ```

    Args:
        compression: Compressor of the gradient all-reduce.
        compressor_state: How a checkpoint of one file stores the compressor's state. `local` writes one file per rank
            beside it, `none` stores nothing. A sharded checkpoint stores the state of each rank as tensors of it.
        activation_checkpointing: Recompute activations of the repeated layers in backward, which saves memory and takes
            time. `full` recomputes each layer, and a number n every n-th layer. `selective` keeps the results of
            products, attention and communication. `off` keeps all activations.
        data_parallel_size: Ranks along the data-parallel axis.
        tensor_parallel_size: Ranks along the tensor-parallel axis.
        save_distributed_checkpoint: Write a folder with one file per rank. False writes one file.
        process_group_backend: Backend of `torch.distributed`. By default it follows the device: gloo for CPU, NCCL for
            CUDA.
        timeout: Deadline of every collective. 30 minutes by default.

    Raises:
        ValueError: If `configure_model` shards nothing with `fully_shard`, or over a mesh of shards and replicas.
    """

    @spelled()
    def __init__(
        self,
        compression: Reducer,
        *,
        compressor_state: KeptState = "local",
        activation_checkpointing: ActivationCheckpointing = "off",
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        tensor_parallel_size: Union[Literal["auto"], int] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
    ) -> None:
        super().__init__(**named(locals(), ModelParallelStrategy.__init__))
        check_activation_checkpointing(activation_checkpointing)
        if activation_checkpointing == "auto":
            raise ValueError(
                "activation_checkpointing='auto' measures layers before they are sharded; got modules that"
                " `configure_model` shards. Use 'off', 'full', 'selective' or a number, or"
                " HybridParallelStrategy(zero_stage=3)"
            )
        self.activation_checkpointing = activation_checkpointing
        self._compress_by(compression, compressor_state)
        self._synchronizes = True

    @property
    def _sharding(self) -> tuple[int, ...]:
        """The ranks over which parameters are sharded."""
        assert self.lightning_module is not None
        return shard_ranks(self.lightning_module) or self._axis("data_parallel")

    def _axis(self, name: str) -> tuple[int, ...]:
        return tuple(self.device_mesh[name].mesh.tolist())

    @property
    def _replicas(self) -> Optional[DeviceMesh]:
        """The replicas of hybrid sharding."""
        data = self._axis("data_parallel")
        tensor = self._axis("tensor_parallel")
        return self.device_mesh["data_parallel"] if self._sharding == tensor and len(data) > 1 else None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Ranks that shard parameters with each other read different data, even on the tensor-parallel axis.
        if self._sharding != self._axis("data_parallel"):
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return super().distributed_sampler_kwargs

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            # After `super().setup`, which gives data to parameters on the meta device: the replicas copy these data.
            self._state = compress_fully_shard(self.lightning_module, self.compression, self._replicas)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        assert self.model is not None
        # Each sharded module separately, because `configure_model` may not have sharded the root.
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self._synchronizes = False
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            self._synchronizes = True
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._state is not None and self._synchronizes and not self._state.finish():
            self._skip_step()


class DeviceFSDPPrecision(FSDPPrecision):
    """`FSDPPrecision` with autocast and a gradient scaler for `device`: Lightning's plugin supports only CUDA.

    Args:
        like: The plugin to replace.
        device: Type of the device to train on.
        model: Returns the outermost FSDP module, the only one that can compute the norm of sharded gradients.
    """

    def __init__(self, like: FSDPPrecision, device: str, model: Callable[[], nn.Module | None]) -> None:
        super().__init__(like.precision)  # type: ignore[arg-type]
        self._device = device
        self._model = model
        if like.scaler is not None:
            self.scaler = like.scaler if device_of_scaler(like.scaler) == device else ShardedGradScaler(device)

    @override
    def forward_context(self) -> AbstractContextManager:
        if "mixed" not in self.precision:
            return super().forward_context()
        return torch.autocast(self._device, dtype=torch.bfloat16 if "bf16" in self.precision else torch.float16)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float, *_: Any, **__: Any) -> None:
        model = self._model()
        assert isinstance(model, FullyShardedDataParallel)
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not all(id(parameter) in owned for parameter in model.parameters() if parameter.requires_grad):
            raise ValueError(
                "FSDP clips the gradients of the full model by their norm, but this optimizer has only a part of"
                " them; use one optimizer, or `gradient_clip_algorithm='value'`"
            )
        # Lightning's plugin refuses this, because it has no reference to the root module. Only the root can sum the
        # norm over all shards.
        model.clip_grad_norm_(clip_val)
