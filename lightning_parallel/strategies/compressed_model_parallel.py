"""Gradient compression under Lightning's `ModelParallelStrategy`, for modules sharded by `fully_shard` (FSDP2)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Optional

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_parallel.compression import Reducer, check_reducer, compress_fully_shard, shard_ranks
from lightning_parallel.strategies.compressed import SavesShardedCompression

__all__ = ["CompressedModelParallelStrategy"]


class CompressedModelParallelStrategy(SavesShardedCompression, ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` with compressed gradients, on CPU too.

    What is compressed follows from the mesh that the module's `configure_model` gives to `fully_shard`:

        self.device_mesh["data_parallel"]    the reduce-scatter over the data-parallel axis; beside it
                                             `parallelize_module` may use the tensor-parallel axis
        self.device_mesh["tensor_parallel"]  hybrid sharding: the sum over the data-parallel axis, whose ranks hold
                                             the same shards; every rank then reads data of its own

    A step in which a gradient is not finite on some rank is skipped on all of them; the compressor's memory is part of
    the checkpoint. While batches accumulate nothing is communicated.

    Args:
        compression: Computes the mean of the gradients.
        kwargs: Everything that `ModelParallelStrategy` takes.

    Raises:
        ValueError: If `configure_model` shards nothing with `fully_shard`, or over a mesh of shards and replicas.
    """

    def __init__(self, compression: Reducer, **kwargs: Any) -> None:
        check_reducer(compression)
        super().__init__(**kwargs)
        self.compression = compression
        self._synchronizes = True

    @property
    def _sharding(self) -> tuple[int, ...]:
        """The ranks that share parameters out."""
        assert self.lightning_module is not None
        return shard_ranks(self.lightning_module) or self._axis("data_parallel")

    def _axis(self, name: str) -> tuple[int, ...]:
        return tuple(self.device_mesh[name].mesh.tolist())

    @property
    def _replicas(self) -> Optional[DeviceMesh]:
        """The replicas of hybrid sharding."""
        data, tensor = self._axis("data_parallel"), self._axis("tensor_parallel")
        return self.device_mesh["data_parallel"] if self._sharding == tensor and len(data) > 1 else None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._sharding != self._axis("data_parallel"):  # ranks that share parameters out see different data
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return super().distributed_sampler_kwargs

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            self._state = compress_fully_shard(self.lightning_module, self.compression, self._replicas)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        assert self.model is not None
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
