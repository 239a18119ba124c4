"""Pipeline x data parallelism for an unmodified LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision

from lightning_parallel.compression import Reducer
from lightning_parallel.strategies.base import StartMethod
from lightning_parallel.strategies.hybrid import HybridParallelStrategy, ScheduleName

__all__ = ["PipelineParallelStrategy"]


class PipelineParallelStrategy(HybridParallelStrategy):
    """Divides the layers of any LightningModule over stages, and the data over replicas.

    The arguments are those of `HybridParallelStrategy`, without a tensor axis.

    Args:
        pipeline_parallel_size: Number of ranks that share the layers of one replica. `"auto"`: what the replicas
            leave; with both automatic, all ranks.
        data_parallel_size: Number of replicas. `"auto"`: what the pipeline leaves.
        layers: Dotted name of the repeated layers, or `"auto"`; names of several containers that follow each other are
            joined by commas.
        schedule: `gpipe`, `1f1b`, `interleaved_1f1b`, `zb_h1`, `interleaved_zb`, `zbv`, or `auto`.
        num_microbatches: Into how many parts each batch is split.
        virtual_stages: Stages per rank.
        balance: `auto`, `parameters`, `uniform`, or the layers of each stage.
        memory_limit_bytes: Most bytes that a stage may hold, for measured cuts and schedules.
        split: `(batch, parts) -> microbatches`.
        weigh: Weight of a microbatch in the loss; by default its number of samples.
        compression: Compresses the gradients between replicas.
        checkpoint_format, process_group_backend, timeout, start_method: See `TensorParallelStrategy`.

    Raises:
        ValueError: See `HybridParallelStrategy`.

    Source: PipeDream-Flush (1F1B), https://arxiv.org/abs/2006.09503; GPipe, https://arxiv.org/abs/1811.06965; zero
    bubble, https://arxiv.org/abs/2401.10241
    """

    def __init__(
        self,
        pipeline_parallel_size: Union[Literal["auto"], int] = "auto",
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        layers: str = "auto",
        schedule: ScheduleName = "1f1b",
        num_microbatches: Union[Literal["auto"], int] = "auto",
        virtual_stages: int = 1,
        balance: Union[Literal["auto", "parameters", "uniform"], list[int]] = "auto",
        memory_limit_bytes: Optional[float] = None,
        split: Optional[Callable[[Any, int], list[Any]]] = None,
        weigh: Optional[Callable[[Any], float]] = None,
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
            data_parallel_size=data_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            tensor_parallel_size=1,
            layers=layers,
            schedule=schedule,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
            balance=balance,
            memory_limit_bytes=memory_limit_bytes,
            split=split,
            weigh=weigh,
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
