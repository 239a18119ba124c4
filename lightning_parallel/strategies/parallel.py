"""The three strategies of a mesh: their arguments. What they do is in `mesh_strategy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Optional, Union

from lightning_parallel.mesh import DATA, PIPELINE, TENSOR, Axis, Size
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.strategies.setup import PipelineOptions, TensorOptions

__all__ = ["HybridParallelStrategy", "PipelineParallelStrategy", "ScheduleName", "TensorParallelStrategy"]

# LightningCLI lists these names, and refuses others, before anything is started.
ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv", "auto"]


class TensorParallelStrategy(MeshStrategy):
    """Divides the layers of any LightningModule over ranks, and the data over replicas.

    The module stays as it is written: attention is divided by heads, the layers of an MLP by features, embeddings by
    vocabulary, according to `plan`; what cannot be divided soundly stays whole. Loss, gradients, metrics and
    checkpoints are those of one process.

    Args:
        tensor_parallel_size: Ranks that hold one replica together. `"auto"`: what the replicas leave.
        data_parallel_size: Number of replicas. `"auto"`: what the tensor axis leaves; with both automatic, one replica
            per node.
        plan: `"auto"`: the plan a Hugging Face model brings, else by structure. Or a dict from globs over module
            paths to styles: `column`, `row`, `column_gather`, `row_split`, `vocab`, `head`, `attention`,
            `transformer_layer`, `replicate`, or Hugging Face's names.
        sequence_parallel: Also divide the activations between the layers of stacked blocks along the sequence, which
            saves memory; backward gathers the inputs of attention and MLP once more.
        gather_logits: Gather the output of a divided head at once, also in training, where it is otherwise left
            divided until code of the step looks at it: for steps that look at it on some ranks only.
        kwargs: See `MeshStrategy`: `compression`, `process_group_backend`, `timeout`, `start_method`, and Lightning's
            own.

    Raises:
        ValueError: When the Trainer starts, on every rank, if the sizes do not multiply to the number of processes,
            the plan does not fit the model, or the model has nothing to shard.

    Source: Megatron-LM, https://arxiv.org/abs/1909.08053
    """

    def __init__(
        self,
        *,
        tensor_parallel_size: Union[Literal["auto"], int] = "auto",
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        plan: Union[Literal["auto"], dict[str, str]] = "auto",
        sequence_parallel: bool = False,
        gather_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            sizes={TENSOR: tensor_parallel_size, DATA: data_parallel_size},
            tensor=TensorOptions(plan, sequence_parallel, gather_logits),
            pipeline=None,
            **kwargs,
        )


class _StagedStrategy(MeshStrategy):
    """Base of the strategies with a pipeline axis: the arguments of that axis.

    Args:
        sizes: Ranks along each axis, or `"auto"`.
        tensor: How layers are divided.
        layers: Dotted name of the repeated layers, or `"auto"`; names of several containers that follow each other are
            joined by commas.
        schedule: `gpipe`, `1f1b`, `interleaved_1f1b`, `zb_h1`, `interleaved_zb`, `zbv`, or `auto`: the fastest by
            simulation with measured costs, under `memory_limit_bytes`.
        num_microbatches: Into how many parts each batch is split. `"auto"`: four per stage, if the batch has as many
            samples; with `schedule="auto"` chosen together with it.
        virtual_stages: Stages per rank, for the schedules that can have several. `"auto"`: as many as they need.
        balance: How the layers are divided: `auto` evens out their measured time, `parameters` their parameters,
            `uniform` their number; or the layers of each stage.
        memory_limit_bytes: Most bytes that a stage may hold, for measured cuts and schedules.
        split_batch: `(batch, parts) -> microbatches`, or its dotted path, for batches whose tensors do not all have
            their samples in dimension 0.
        microbatch_weight: Weight of a microbatch in the loss, a function or its dotted path; by default its number of
            samples, or of tokens where the first batch shows that the loss is a mean over those.
        pipeline_plan: A `PipelinePlan`, or a file with one, that was made before (`analyze`, or the file in the folder
            of a checkpoint); everything above is then in it.
        kwargs: See `MeshStrategy`.
    """

    def __init__(
        self,
        sizes: Mapping[Axis, Size],
        tensor: TensorOptions,
        *,
        # Spelled out, as LightningCLI reads arguments from signatures; `kwargs` it follows to the base class.
        layers: str = "auto",
        schedule: ScheduleName = "1f1b",
        num_microbatches: Union[Literal["auto"], int] = "auto",
        virtual_stages: Union[Literal["auto"], int] = "auto",
        balance: Union[Literal["auto", "parameters", "uniform"], list[int]] = "auto",
        memory_limit_bytes: Optional[float] = None,
        split_batch: Optional[Union[Callable[[Any, int], list[Any]], str]] = None,
        microbatch_weight: Optional[Union[Callable[[Any], float], str]] = None,
        pipeline_plan: Optional[Union[PipelinePlan, str, Path]] = None,
        **kwargs: Any,
    ) -> None:
        options = PipelineOptions.of(
            layers,
            schedule,
            num_microbatches,
            virtual_stages,
            balance,
            memory_limit_bytes,
            split_batch,
            microbatch_weight,
            pipeline_plan,
        )
        super().__init__(sizes, tensor, options, **kwargs)


class PipelineParallelStrategy(_StagedStrategy):
    """Divides the layers of any LightningModule into stages, and the data over replicas.

    The module stays as it is written. Its repeated layers are cut into runs, one per stage; each stage runs the
    module's own steps on one microbatch after the other, from the first of its layers to the last. Loss, gradients,
    logged values, what steps return, and checkpoints are those of one process.

    Args:
        pipeline_parallel_size: Number of ranks that share the layers of one replica. `"auto"`: what the replicas leave.
        data_parallel_size: Number of replicas. `"auto"`: what the pipeline leaves.
        kwargs: `layers`, `schedule`, `num_microbatches`, `virtual_stages`, `balance`, `memory_limit_bytes`,
            `split_batch`, `microbatch_weight`, `pipeline_plan`: see the base class. `compression`,
            `process_group_backend`, `timeout`, `start_method`, and Lightning's own: see `MeshStrategy`.

    Raises:
        ValueError: When the Trainer starts, on every rank, if the sizes do not multiply to the number of processes, the
            model cannot be cut, or the module does what has no meaning in a pipeline, such as manual optimization.

    Source: GPipe, https://arxiv.org/abs/1811.06965; Megatron-LM, https://arxiv.org/abs/2104.04473
    """

    def __init__(
        self,
        *,
        pipeline_parallel_size: Union[Literal["auto"], int] = "auto",
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        **kwargs: Any,
    ) -> None:
        sizes = {PIPELINE: pipeline_parallel_size, DATA: data_parallel_size}
        super().__init__(sizes=sizes, tensor=TensorOptions(), **kwargs)


class HybridParallelStrategy(_StagedStrategy):
    """Divides each layer over ranks, the layers over stages, and the data over replicas, of any LightningModule.

    Args:
        data_parallel_size: Number of replicas. `"auto"`: what the other axes leave.
        pipeline_parallel_size: Number of ranks that share the layers of one replica.
        tensor_parallel_size: Number of ranks that share each layer.
        plan: How layers are divided: `"auto"`, or a dict from globs over module paths to styles, see
            `TensorParallelStrategy`.
        sequence_parallel: Also divide the activations between the layers of stacked blocks along the sequence.
        gather_logits: Gather the output of a divided head at once, also in training.
        kwargs: Those of `PipelineParallelStrategy`.

    Raises:
        ValueError: See `TensorParallelStrategy` and `PipelineParallelStrategy`.

    Source: Megatron-LM, https://arxiv.org/abs/2104.04473
    """

    def __init__(
        self,
        *,
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        pipeline_parallel_size: Union[Literal["auto"], int] = 1,
        tensor_parallel_size: Union[Literal["auto"], int] = 1,
        plan: Union[Literal["auto"], dict[str, str]] = "auto",
        sequence_parallel: bool = False,
        gather_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        sizes = {TENSOR: tensor_parallel_size, PIPELINE: pipeline_parallel_size, DATA: data_parallel_size}
        super().__init__(sizes=sizes, tensor=TensorOptions(plan, sequence_parallel, gather_logits), **kwargs)
