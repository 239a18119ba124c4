"""Gradient compression under Lightning's `DeepSpeedStrategy`."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional, Union

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.compat.deepspeed import disable_shared_memory_kernel, remove_accumulation_hooks
from lightning_parallel.compat.lightning import PathLike, init_deepspeed_distributed, train_dataloader_of
from lightning_parallel.compression import Reducer
from lightning_parallel.compression.deepspeed_session import DeepSpeedSession, compress_deepspeed
from lightning_parallel.strategies.compressed.ddp import SavesCompression, warn_of_dropped_step
from lightning_parallel.strategies.compressed.memory import KeptState, check_kept_state
from lightning_parallel.strategies.optimizers.checks import check_flattened
from lightning_parallel.strategies.options import (
    ActivationCheckpointing,
    check_activation_checkpointing,
    named,
    spelled,
)

__all__ = ["CompressedDeepSpeedStrategy"]

_SUPPORTED = RequirementCache("deepspeed>=0.19,<0.20")


class CompressedDeepSpeedStrategy(SavesCompression, DeepSpeedStrategy):
    """Compresses the gradients of Lightning's `DeepSpeedStrategy`, also on CPU.

    If a gradient is not finite on any rank, all ranks skip the step. Checkpoints hold the compressor's state. ZeRO 0
    and 1 communicate once per optimizer step. ZeRO 2 communicates after every batch and is therefore compressed only
    without accumulation. ZeRO 3 has no full gradients, so only DeepSpeed's own compression works there. On CPU,
    DeepSpeed itself fails if parameters have no dimensions or are transposed.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CompressedDeepSpeedStrategy, PowerSGD

        strategy = CompressedDeepSpeedStrategy(PowerSGD(rank=4), stage=1)
        trainer = Trainer(devices=2, strategy=strategy)
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        compression: Compressor of the gradient all-reduce. None leaves it to DeepSpeed.
        compressor_state: How a checkpoint of one file stores the compressor's state. `local` writes one file per rank
            beside it, `none` stores nothing. A sharded checkpoint stores the state of each rank as tensors of it.
        activation_checkpointing: Recompute activations of the repeated layers in backward, which saves memory and takes
            time. `full` recomputes each layer, and a number n every n-th layer. `selective` keeps the results of
            products, attention and communication. `auto` chooses as few layers as fit in memory. `off` keeps all.
        communication_data_type: DeepSpeed's own compression: type of the gradients on the wire.
        quantized_gradients: DeepSpeed's own compression under stage 3 on CUDA: gradients in 4 bits (ZeRO++,
            arXiv:2306.10209).
        zero_optimization: Use ZeRO. Ignored if you pass `config`, like most arguments below.
        stage: Stage of ZeRO: 0 none, 1 optimizer state, 2 also gradients, 3 also parameters.
        remote_device: Device of new parameters under stage 3: `cpu` or `nvme`.
        offload_optimizer: Keep the optimizer state in CPU memory or on NVMe.
        offload_parameters: Keep parameters in CPU memory or on NVMe, under stage 3.
        offload_params_device: `cpu` or `nvme`.
        nvme_path: Folder of the NVMe device.
        params_buffer_count: Buffers for parameters on NVMe.
        params_buffer_size: Elements of each such buffer.
        max_in_cpu: Elements of parameters to keep in CPU memory with NVMe.
        offload_optimizer_device: `cpu` or `nvme`.
        optimizer_buffer_count: Buffers for optimizer state on NVMe.
        block_size: Bytes of an NVMe read or write.
        queue_depth: Number of NVMe operations in flight.
        single_submit: Submit NVMe operations one by one.
        overlap_events: Overlap NVMe operations.
        thread_count: Threads per NVMe operation.
        pin_memory: Use pinned CPU memory for offloading.
        sub_group_size: Elements that the optimizer updates at a time, under stage 3.
        contiguous_gradients: Copy gradients into a contiguous buffer.
        overlap_comm: Reduce gradients during the backward pass.
        allgather_partitions: Gather updated parameters by all-gather instead of broadcasts.
        reduce_scatter: Average gradients by reduce-scatter instead of all-reduce.
        allgather_bucket_size: Elements of one all-gather.
        reduce_bucket_size: Elements of one gradient reduction.
        zero_allow_untested_optimizer: Allow optimizers that DeepSpeed has not tested.
        logging_batch_size_per_gpu: Batch size that DeepSpeed prints.
        config: DeepSpeed configuration, or its file. It replaces the arguments above.
        logging_level: Level of DeepSpeed's logger.
        loss_scale: Loss scale of float16; 0 adapts it.
        initial_scale_power: First loss scale, as a power of two.
        loss_scale_window: Steps without overflow before the scale grows.
        hysteresis: Overflows before the scale shrinks.
        min_loss_scale: Smallest loss scale.
        partition_activations: Shard checkpointed activations over model-parallel ranks.
        cpu_checkpointing: Keep sharded activations in CPU memory.
        contiguous_memory_optimization: Copy sharded activations into a contiguous buffer.
        synchronize_checkpoint_boundary: Synchronise the device at each activation checkpoint.
        load_full_weights: Load a checkpoint of one file under stage 3.
        exclude_frozen_parameters: Leave frozen parameters out of checkpoints.
        process_group_backend: Backend of `torch.distributed`. By default it follows the device: gloo for CPU, NCCL for
            CUDA.
        timeout: Deadline of every collective. 30 minutes by default.
        accelerator: Accelerator object, set by the Trainer.
        parallel_devices: Devices of this node, set by the Trainer.
        cluster_environment: Source of ranks and addresses. By default Lightning detects torchrun, SLURM and others.
        precision_plugin: Precision plugin, set by the Trainer from `precision`.

    Raises:
        ModuleNotFoundError: If DeepSpeed 0.19 is not installed.
        ValueError: If `compression` does not fit the other arguments. At the start of a run, if the device does not
            support the 16-bit type of `precision` or `config`.
    """

    compression: Optional[Reducer]  # type: ignore[assignment]

    @spelled()
    def __init__(
        self,
        compression: Optional[Reducer] = None,
        *,
        compressor_state: KeptState = "local",
        activation_checkpointing: ActivationCheckpointing = "off",
        communication_data_type: Optional[Literal["fp32", "bf16", "fp16"]] = None,
        quantized_gradients: bool = False,
        zero_optimization: bool = True,
        stage: int = 2,
        remote_device: Optional[str] = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_params_device: str = "cpu",
        nvme_path: str = "/local_nvme",
        params_buffer_count: int = 5,
        params_buffer_size: int = 100_000_000,
        max_in_cpu: int = 1_000_000_000,
        offload_optimizer_device: str = "cpu",
        optimizer_buffer_count: int = 4,
        block_size: int = 1_048_576,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = True,
        thread_count: int = 1,
        pin_memory: bool = False,
        sub_group_size: int = 1_000_000_000_000,
        contiguous_gradients: bool = True,
        overlap_comm: bool = True,
        allgather_partitions: bool = True,
        reduce_scatter: bool = True,
        allgather_bucket_size: int = 200_000_000,
        reduce_bucket_size: int = 200_000_000,
        zero_allow_untested_optimizer: bool = True,
        logging_batch_size_per_gpu: Union[str, int] = "auto",
        config: Union[str, Path, dict[str, Any], None] = None,
        logging_level: int = logging.WARN,
        loss_scale: float = 0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: int = 1,
        partition_activations: bool = False,
        cpu_checkpointing: bool = False,
        contiguous_memory_optimization: bool = False,
        synchronize_checkpoint_boundary: bool = False,
        load_full_weights: bool = False,
        exclude_frozen_parameters: bool = False,
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        _check_installed()
        super().__init__(**named(locals(), DeepSpeedStrategy.__init__))
        check_activation_checkpointing(activation_checkpointing)
        self.activation_checkpointing = activation_checkpointing
        self._configure(compression, compressor_state, communication_data_type, quantized_gradients)

    def _configure(
        self, compression: Optional[Reducer], state: KeptState, wire_type: str | None, to_4bits: bool
    ) -> None:
        if compression is not None:
            self._compress_by(compression, state)
        else:
            check_kept_state(state)
            self.compression = None
        self._state: DeepSpeedSession | None = None
        assert self.config is not None
        if wire_type is not None:
            self.config["communication_data_type"] = wire_type
        if to_4bits:
            self.config.setdefault("zero_optimization", {})["zero_quantized_gradients"] = True
        self._check()

    @property
    def _zero(self) -> dict[str, Any]:
        assert self.config is not None
        return self.config.get("zero_optimization", {})

    @property
    def _stage(self) -> int:
        return self._zero.get("stage", 0)

    @property
    @override
    def similar_zero_stage(self) -> int:
        return self._stage

    @property
    def _quantized(self) -> bool:
        return self._zero.get("zero_quantized_gradients", False)

    def _check(self) -> None:
        assert self.config is not None
        stage = self._stage
        own = self.config.get("communication_data_type")
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"`stage` of ZeRO must be 0, 1, 2 or 3; got {stage!r}")
        if self.compression is not None and stage == 3:
            raise ValueError(
                "`compression` needs ZeRO stage 0, 1 or 2; got stage 3. There no rank has the mean of a full gradient,"
                " which low-rank methods, top-k and error feedback need. Use stage=2, or compression=None with"
                " DeepSpeed's own `communication_data_type` or `quantized_gradients`."
            )
        if self.compression is not None and own is not None:
            raise ValueError(
                "`compression` and DeepSpeed's own `communication_data_type` must not be set together; got both"
                f" ({own}). The compressor sets the type of the values that are sent. Use `... | Cast('{own}')` or"
                " leave one of them out."
            )
        if self._quantized and stage != 3:
            raise ValueError(
                f"DeepSpeed sends gradients in 4 bits under ZeRO 3 only; got stage {stage}. Use"
                " `compression=Quantize(4)` there."
            )

    # ------------------------------------------------------------------------------------------------ on CPU

    @property
    @override
    def root_device(self) -> torch.device:
        # DeepSpeed reads the local rank from the device's index, which Lightning's CPU devices lack.
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    @override
    def setup_environment(self) -> None:
        from deepspeed.accelerator import get_accelerator

        if not isinstance(self.accelerator, CPUAccelerator):
            self._check_precision()
            super().setup_environment()
            return
        found = get_accelerator().device_name()
        if found != "cpu":
            raise RuntimeError(
                f"DeepSpeed must compute on the CPU; it has chosen {found!r}. Set DS_ACCELERATOR=cpu in the environment"
                " of all processes."
            )
        if self._quantized:
            raise RuntimeError("DeepSpeed has 4-bit gradients on CUDA only; leave out `quantized_gradients`.")
        self._check_precision()
        disable_shared_memory_kernel()
        # Skips `DeepSpeedStrategy`, which refuses any device but CUDA. This also skips `SavesCompression`.
        super(DeepSpeedStrategy, self).setup_environment()
        self._begin_compression()

    @override
    def setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        # The same as Lightning's method, without its check of the indices of CUDA devices.
        reset_seed()
        self.set_world_ranks()
        init_deepspeed_distributed(self)

    def _check_precision(self) -> None:
        """Check early that the device supports the 16-bit type: DeepSpeed's later error is less helpful.

        On CPU this depends on the processor: oneDNN computes in float16 only with AVX-512 FP16.

        Raises:
            ValueError: If the device does not support the 16-bit type of the configuration or the Trainer.
        """
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        if self._enables("fp16", "16-mixed", "16-true") and not accelerator.is_fp16_supported():
            name, missing, instead = "fp16", "float16", "precision='bf16-mixed' or '32-true'"
        elif self._enables("bf16", "bf16-mixed", "bf16-true") and not accelerator.is_bf16_supported():
            name, missing, instead = "bf16", "bfloat16", "precision='16-mixed' or '32-true'"
        else:
            return
        assert self.config is not None
        asked = (
            f"the configuration's `{name}`"
            if self.config.get(name)
            else f"precision={self.precision_plugin.precision!r}"
        )
        raise ValueError(
            f"DeepSpeed must compute in {missing}, as {asked} asks; got {_describe(self.root_device)}, which does not"
            f" support {missing}. Use {instead}."
        )

    def _enables(self, name: Literal["fp16", "bf16"], *precisions: str) -> bool:
        """Return whether DeepSpeed's configuration, else the Trainer's precision, asks for this type."""
        assert self.config is not None
        section = self.config.get(name)
        if section is not None:
            return section.get("enabled", False) is True
        return self.precision_plugin.precision in precisions

    # ------------------------------------------------------------------------------------------------ training

    @override
    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        if self._stage == 0 and self._enables("fp16"):
            raise ValueError(
                "`float16` needs ZeRO stage 1, 2 or 3; got stage 0. There DeepSpeed 0.19 divides gradients by a loss"
                " scale, but the loss was not multiplied by it. Use stage=1 or precision='bf16-mixed'."
            )
        super()._initialize_deepspeed_train(model)
        if self._stage > 0 and self.world_size > 1:
            # The user's optimizer, inside the wrapper of ZeRO, which shards its state.
            check_flattened([getattr(one, "optimizer", one) for one in self.optimizers], "DeepSpeed's ZeRO")
        if self.compression is not None:
            self._state = compress_deepspeed(self.deepspeed_engine, self.compression)

    @override
    def _auto_select_batch_size(self) -> int:
        # For DeepSpeed's log of samples per second. Lightning fails if the loader has no batch sampler.
        assert self.lightning_module is not None
        loader = train_dataloader_of(self.lightning_module.trainer)
        sampler = getattr(loader, "batch_sampler", None)
        return getattr(sampler, "batch_size", None) or 1

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optional[Optimizer], *args: Any, **kwargs: Any) -> Tensor:
        # Lightning has divided the loss by the number of accumulated batches; DeepSpeed would divide it again.
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._state is None or not self.deepspeed_engine.is_gradient_accumulation_boundary():
            return
        # The session has made DeepSpeed skip the step, so only the warning is missing.
        if not self._state.finish():
            assert self.lightning_module is not None
            warn_of_dropped_step(self.lightning_module)

    @override
    def teardown(self) -> None:
        if self._state is not None:
            self._state.close()
            self._state = None
        for optimizer in self.optimizers:
            # ZeRO leaves its hooks on the parameters: they would also run in the next `fit`.
            remove_accumulation_hooks(optimizer)
        super().teardown()

    # ------------------------------------------------------------------------------------------------ checkpoints

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Optional[Any] = None
    ) -> None:
        # Without a compressor there is no state to add, so this skips `SavesCompression`.
        if self.compression is None:
            DeepSpeedStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: Optional[bool] = None) -> dict[str, Any]:
        if self.compression is None:
            return DeepSpeedStrategy.load_checkpoint(self, checkpoint_path, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)


def _check_installed() -> None:
    if not _SUPPORTED:
        raise ModuleNotFoundError(f"{_SUPPORTED}. Install it with `pip install 'lightning-parallel[deepspeed]'`.")
    if not CUDAAccelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed takes MPS where it finds it


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return "a CPU"
