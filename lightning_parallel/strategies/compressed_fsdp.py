"""Gradient compression under Lightning's `FSDPStrategy`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)
from torch.distributed.fsdp.wrap import enable_wrap
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.compression import Reducer, ShardedSession, check_reducer, compress_fsdp
from lightning_parallel.strategies.compressed import SavesShardedCompression
from lightning_parallel.strategies.fsdp_precision import DeviceFSDPPrecision

__all__ = ["CompressedFSDPStrategy"]


class CompressedFSDPStrategy(SavesShardedCompression, FSDPStrategy):
    """Lightning's `FSDPStrategy` (FSDP1) with compressed gradients, on CPU too.

    A step in which a gradient is not finite on some rank is skipped on all of them; the compressor's memory is part
    of the checkpoint. While batches accumulate nothing is communicated. Gradients may be clipped by their norm.

    With reentrant activation checkpointing FSDP reduces a gradient in two parts, which are two steps of the compressor:
    use `use_reentrant=False`.

    With HYBRID_SHARD gradients are compressed between the replicas only: `device_mesh` says which ranks those are.

    Args:
        compression: Computes the mean of the gradients.
        kwargs: Everything that `FSDPStrategy` takes.

    Raises:
        ValueError: If `sharding_strategy` shards and replicates on CPU and there is no `device_mesh`.
    """

    def __init__(self, compression: Reducer, **kwargs: Any) -> None:
        check_reducer(compression)
        super().__init__(**kwargs)
        self.compression = compression
        self._wrapped: Any = None

    @override
    def setup_environment(self) -> None:
        device, mesh = self.root_device.type, self.kwargs.pop("device_mesh", None)
        if device == "cpu" and mesh is None and "HYBRID" in self.sharding_strategy.name:
            raise ValueError(
                f"expected `device_mesh=(replicas, shards)` beside `sharding_strategy={self.sharding_strategy.name!r}` "
                "on CPU, where no number of devices says which ranks form a node; found none"
            )
        super().setup_environment()
        if mesh is not None:  # for Lightning it would be one of CUDA devices
            self.kwargs["device_mesh"] = init_device_mesh(device, mesh) if isinstance(mesh, tuple) else mesh
        plugin = self.precision_plugin
        if type(plugin) is FSDPPrecision:
            self.precision_plugin = DeviceFSDPPrecision(plugin, device, lambda: self.model)

    @property
    def _arguments(self) -> dict[str, Any]:
        """Of FSDP, on CPU: Lightning passes the index of the device, which a CPU does not have."""
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
        if self._wrapped is None or self._wrapped.module is not model:
            self._wrapped = self._wrap(model)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._state = self._compress(self._wrapped)
        return self._wrapped

    def _wrap(self, model: nn.Module) -> nn.Module:
        ready = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        if self.root_device.type == "cpu" and not ready:
            model = FullyShardedDataParallel(model, **self._arguments)
            self.kwargs.pop("auto_wrap_policy", None)
        return super()._setup_model(model)

    def _compress(self, wrapped: nn.Module) -> ShardedSession:
        if not isinstance(wrapped, FullyShardedDataParallel):
            raise ValueError(
                "expected a module without FSDP, found layers of it wrapped but not the whole, which unites their "
                "gradients in one step: leave the wrapping to the strategy (`auto_wrap_policy`). A module that another "
                "strategy has wrapped cannot be used again, as FSDP1 does not unwrap it."
            )
        return compress_fsdp(wrapped, self.compression, self._scaler)

    @property
    def _scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert isinstance(self.model, FullyShardedDataParallel)
        if self._state_dict_type != "full" or self.root_device.type != "cpu":
            return super().lightning_module_state_dict()
        with self._whole_on_cpu():
            return self.model.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._state_dict_type != "full" or self.root_device.type != "cpu":
            return super().optimizer_state(optimizer)
        assert isinstance(self.model, FullyShardedDataParallel)
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with self._whole_on_cpu():
            state = FullyShardedDataParallel.optim_state_dict(self.model, inner)
        if self.global_rank > 0:
            return state
        return FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)

    def _whole_on_cpu(self) -> AbstractContextManager:
        """As Lightning does, but FSDP frees memory in use when it is to move from CPU to CPU."""
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
        model = self.model
        with model.no_sync() if isinstance(model, FullyShardedDataParallel) else nullcontext():
            yield

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        synchronized = isinstance(self.model, FullyShardedDataParallel) and self.model._sync_gradients
        if self._state is not None and synchronized and not self._state.finish() and self._scaler is None:
            self._skip_step()
