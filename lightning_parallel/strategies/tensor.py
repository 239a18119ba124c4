"""Tensor x data parallelism for an unmodified LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_parallel.checkpoint import rules_by_name
from lightning_parallel.compression import Reducer
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.mesh import DATA, TENSOR
from lightning_parallel.strategies import checks, compression_axis
from lightning_parallel.strategies.base import MeshStrategy, StartMethod
from lightning_parallel.strategies.parallelize import shard_tensors
from lightning_parallel.tensor.plan import Sharding
from lightning_parallel.tensor.sharding import Shard, reduce_partial_
from lightning_parallel.tensor.verify import StepAudit

__all__ = ["TensorParallelStrategy"]


class TensorParallelStrategy(MeshStrategy):
    """Divides the layers of any LightningModule over ranks, and the data over replicas.

    The module stays as it is written: attention is cut by heads, the layers of an MLP by features, embeddings by
    vocabulary, according to `plan`; what cannot be cut soundly stays whole. Loss, gradients, metrics and checkpoints
    are those of one process.

    Args:
        tensor_parallel_size: Ranks that hold one replica together. `"auto"`: what the replicas leave.
        data_parallel_size: Number of replicas. `"auto"`: what the tensor axis leaves; with both automatic, one replica
            per node.
        plan: `"auto"`: the plan a Hugging Face model brings, else by structure. Or a dict from globs over module
            paths to styles: `column`, `row`, `column_gather`, `row_split`, `vocab`, `attention`, `transformer_layer`,
            `replicate`, or Hugging Face's names.
        sequence_parallel: Also divide the activations between the layers of stacked blocks along the sequence
            (dimension 1), which saves memory at the same communication.
        compression: Compresses the gradients between replicas.
        checkpoint_format: `full`: one ordinary Lightning checkpoint, for any layout and for stock Lightning.
        process_group_backend: Backend of torch.distributed; by the device when omitted.
        timeout: Deadline of every collective.
        start_method: How processes are started when no launcher did: `popen`, or `spawn`, `fork`, `forkserver`.

    Raises:
        ValueError: When the Trainer starts, on every rank, if the sizes do not multiply to the number of processes,
            the plan does not fit the model, or the model has nothing to shard.

    Source: Megatron-LM, https://arxiv.org/abs/1909.08053
    """

    def __init__(
        self,
        tensor_parallel_size: Union[Literal["auto"], int] = "auto",
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        plan: Union[Literal["auto"], dict[str, str]] = "auto",
        sequence_parallel: bool = False,
        compression: Optional[Reducer] = None,
        checkpoint_format: Literal["full"] = "full",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "popen",
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        super().__init__(
            {TENSOR: tensor_parallel_size, DATA: data_parallel_size},
            compression=compression,
            checkpoint_format=checkpoint_format,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        checks.check_plan_argument(plan)
        self.plan = plan
        self.sequence_parallel = sequence_parallel
        self._sharding: Sharding | None = None
        self._rules: dict[str, Shard] = {}

    @property
    @override
    def rules(self) -> Mapping[str, Shard]:
        return self._rules

    @override
    def parallelize(self, module: LightningModule) -> None:
        self._sharding = shard_tensors(module, self.plan, self.groups, self.root_device, self.sequence_parallel)
        self._rules = {} if self._sharding is None else rules_by_name(module, self._sharding.shards)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._epoch_checked >= 0 or self._sharding is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        audit = StepAudit(self.lightning_module, self._sharding)
        return audit.wrap(super().training_step)(*args, **kwargs)  # the first batch of a run

    @override
    def gradient_reducer(self, module: LightningModule) -> GradientReducer:
        group = self.groups.tensor_parallel
        partial_names = self._sharding.partial if self._sharding is not None else frozenset()
        return GradientReducer(
            dict(module.named_parameters()),
            self.groups.data_parallel,
            **compression_axis.reducer_options(self),
            prepare=partial(reduce_partial_, rules=self.rules, group=group) if partial_names else None,
            prepare_names=partial_names,
        )

    @property
    def sharding(self) -> Any:
        """What was sharded how; None before the first run, and with one rank on the tensor axis."""
        return self._sharding
