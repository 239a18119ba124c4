"""Defines the public strategies of a mesh, with their arguments. `mesh_strategy` implements their behaviour.

Each class repeats its arguments, so that editors, `help()` and LightningCLI show them. `tests/test_signatures.py`
keeps the copies equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision

from lightning_parallel.compression import Reducer
from lightning_parallel.mesh import CONTEXT, DATA, PIPELINE, TENSOR
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.strategies.compressed.memory import KeptState
from lightning_parallel.strategies.compressed.nodes import Hierarchical
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.strategies.optimizers.zero import Reshard, ZeroStage
from lightning_parallel.strategies.options import (
    ActivationCheckpointing,
    CheckpointFormat,
    ContextMethod,
    ContextOptions,
    GradientSumDtype,
    OffloadedPart,
    PipelineOptions,
    TensorOptions,
    Tiled,
    named,
    spelled,
)
from lightning_parallel.strategies.ranks.processes import StartMethod
from lightning_parallel.strategies.self_check.proof import Verify
from lightning_parallel.strategies.whole.between_runs import GatherAfterFit

__all__ = [
    "ContextParallelStrategy",
    "HybridParallelStrategy",
    "PipelineParallelStrategy",
    "ScheduleName",
    "TensorParallelStrategy",
]

# LightningCLI lists these names and rejects others before it starts a process.
ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv", "auto"]
"""Order of the microbatches in a pipeline."""


class TensorParallelStrategy(MeshStrategy):
    """Shards the layers of any LightningModule over ranks, and the data over replicas.

    Attention is sharded by heads, an MLP by features, an embedding by vocabulary. Layers that cannot be sharded exactly
    stay replicated. The module itself is not changed.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import TensorParallelStrategy

        trainer = Trainer(devices=2, strategy=TensorParallelStrategy(tensor_parallel_size=2))
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        tensor_parallel_size: Ranks that share each layer of a replica. `"auto"` takes the ranks that the other axes
            leave.
        data_parallel_size: Number of replicas. `"auto"` takes the ranks that the other axes leave.
        tensor_plan: How each layer is sharded. `"auto"` uses the plan of a Hugging Face model, otherwise the structure
            of the model. A dict maps globs over module paths to styles: `column`, `row`, `column_gather`, `row_split`,
            `vocab`, `head`, `attention`, `transformer_layer`, `replicate`, or the style names of Hugging Face.
        sequence_parallel: Also shard the activations between sharded layers along the sequence. This saves memory; the
            backward pass gathers the inputs of attention and MLP once more.
        gather_logits: Gather the logits at once, also in training. By default they stay sharded by class until code
            reads them. Set this if only some ranks read them.
        compression: Compressor of the gradient all-reduce between replicas. None sends full gradients.
        compressor_state: How a checkpoint of one file stores the compressor's state. `local` writes one file per rank
            beside it, `none` stores nothing. A sharded checkpoint stores the state of each rank as tensors of it.
        hierarchical: Sum full gradients inside a node, and compress between nodes only. True groups the replicas by
            host. A number sets the replicas per node.
        zero_stage: ZeRO stage over the replicas. Stage 1 shards the optimizer state. Stage 2 also shards the gradients
            between backward and the end of the step. Stage 3 also shards the parameters, and gathers them for each
            layer.
        reshard: How long full parameters stay, with `zero_stage=3`: until the next `layer` begins, or until the `step`
            ends. `auto` takes `step` in a pipeline with several microbatches, which use a layer again and again.
        activation_checkpointing: Recompute activations of the repeated layers in backward, which saves memory and takes
            time. `full` recomputes each layer, and a number n every n-th layer. `selective` keeps the results of
            products, attention and communication. `auto` chooses as few layers as fit in memory. `off` keeps all.
        cpu_offload: Tensors in host memory, a tuple of names. `optimizer` keeps the state there, and takes its steps on
            the host. `activations` keeps the inputs of layers that `activation_checkpointing` recomputes.
        tiled: Compute the cross-entropy of the head, and MLPs, in tiles of positions with `auto`. Logits and inner
            features of a long sequence then never exist whole, and backward computes MLPs again. `off` uses no tiles.
        compile_layers: Compile each of the repeated layers with `torch.compile`. Inductor makes kernels if there is a
            compiler for them; otherwise the backend is `aot_eager`. The first steps take longer.
        gradient_sum_dtype: Dtype of sums of gradients of 16-bit parameters, such as with `bf16-true`: `fp32`, or a
            16-bit dtype for sums in the dtype of each parameter. `.grad` holds the sum, rounded once. None takes `fp32`
            if a step adds several gradients: with microbatches, or with `accumulate_grad_batches` above 1.
        checkpoint_format: `full` writes one ordinary Lightning checkpoint. `sharded` writes a folder with one file per
            rank. Every layout loads both formats.
        async_save: Write sharded checkpoints in the background. Training waits only for a copy of the tensors.
        verify: Self-check that compares the module's steps with one process, before their first batch. `auto` and
            `always` run the self-check, `off` does not.
        gather_after_fit: Ranks on which the module holds full parameters after a run: `all` or `off`. `auto` takes
            `all` for modules of up to 1 GiB, and prints a message otherwise.
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
        ValueError: On every rank when the Trainer starts, if the sizes do not multiply to the number of processes. Also
            if the plan does not fit the model, or the model has no layer to shard.

    Source: Megatron-LM, https://arxiv.org/abs/1909.08053
    """

    @spelled()
    def __init__(
        self,
        *,
        tensor_parallel_size: Union[Literal["auto"], int] = "auto",
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        tensor_plan: Union[Literal["auto"], dict[str, str]] = "auto",
        sequence_parallel: bool = False,
        gather_logits: bool = False,
        compression: Optional[Reducer] = None,
        compressor_state: KeptState = "local",
        hierarchical: Hierarchical = False,
        zero_stage: ZeroStage = 0,
        reshard: Reshard = "auto",
        activation_checkpointing: ActivationCheckpointing = "off",
        cpu_offload: Sequence[OffloadedPart] = (),
        tiled: Tiled = "off",
        compile_layers: bool = False,
        gradient_sum_dtype: Optional[GradientSumDtype] = None,
        checkpoint_format: CheckpointFormat = "full",
        async_save: bool = False,
        verify: Verify = "auto",
        gather_after_fit: GatherAfterFit = "auto",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "auto",
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        super().__init__(
            {TENSOR: tensor_parallel_size, DATA: data_parallel_size},
            TensorOptions(tensor_plan, sequence_parallel, gather_logits),
            None,
            **named(locals(), MeshStrategy.__init__),
        )


class ContextParallelStrategy(MeshStrategy):
    """Splits the positions of each sequence over ranks, and the data over replicas.

    Each rank computes the layers for its part of the positions. Attention also reads keys and values of other parts.
    Every rank holds all parameters. The module itself is not changed.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import ContextParallelStrategy

        trainer = Trainer(devices=2, strategy=ContextParallelStrategy(context_parallel_size=2))
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        context_parallel_size: Ranks that share the positions of a sequence. `"auto"` takes the ranks that the other
            axes leave.
        data_parallel_size: Number of replicas. `"auto"` takes the ranks that the other axes leave.
        context_parallel_method: How attention reads other positions. `ulysses` exchanges positions for heads. `ring`
            passes keys and values around. `gather` collects all keys and values. `auto` takes the fastest. Attention
            with dropout always takes `gather`, and each rank draws its own numbers, unlike one process.
        compression: Compressor of the gradient all-reduce between replicas. None sends full gradients.
        compressor_state: How a checkpoint of one file stores the compressor's state. `local` writes one file per rank
            beside it, `none` stores nothing. A sharded checkpoint stores the state of each rank as tensors of it.
        hierarchical: Sum full gradients inside a node, and compress between nodes only. True groups the replicas by
            host. A number sets the replicas per node.
        zero_stage: ZeRO stage over the data and context axes, whose ranks hold the same parameters. Stage 1 shards the
            optimizer state. Stage 2 also shards the gradients between backward and the end of the step. Stage 3 also
            shards the parameters, and gathers them for each layer.
        reshard: How long full parameters stay, with `zero_stage=3`: until the next `layer` begins, or until the `step`
            ends. `auto` takes `step` in a pipeline with several microbatches, which use a layer again and again.
        activation_checkpointing: Recompute activations of the repeated layers in backward, which saves memory and takes
            time. `full` recomputes each layer, and a number n every n-th layer. `selective` keeps the results of
            products, attention and communication. `auto` chooses as few layers as fit in memory. `off` keeps all.
        cpu_offload: Tensors in host memory, a tuple of names. `optimizer` keeps the state there, and takes its steps on
            the host. `activations` keeps the inputs of layers that `activation_checkpointing` recomputes.
        tiled: Compute the cross-entropy of the head, and MLPs, in tiles of positions with `auto`. Logits and inner
            features of a long sequence then never exist whole, and backward computes MLPs again. `off` uses no tiles.
        compile_layers: Compile each of the repeated layers with `torch.compile`. Inductor makes kernels if there is a
            compiler for them; otherwise the backend is `aot_eager`. The first steps take longer.
        gradient_sum_dtype: Dtype of sums of gradients of 16-bit parameters, such as with `bf16-true`: `fp32`, or a
            16-bit dtype for sums in the dtype of each parameter. `.grad` holds the sum, rounded once. None takes `fp32`
            if a step adds several gradients: with microbatches, or with `accumulate_grad_batches` above 1.
        checkpoint_format: `full` writes one ordinary Lightning checkpoint. `sharded` writes a folder with one file per
            rank. Every layout loads both formats.
        async_save: Write sharded checkpoints in the background. Training waits only for a copy of the tensors.
        verify: Self-check that compares the module's steps with one process, before their first batch. `auto` and
            `always` run the self-check, `off` does not.
        gather_after_fit: Ranks on which the module holds full parameters after a run: `all` or `off`. `auto` takes
            `all` for modules of up to 1 GiB, and prints a message otherwise.
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
        ValueError: On every rank when the Trainer starts, if the sizes do not multiply to the number of processes.

    Source: DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509; Ring Attention, https://arxiv.org/abs/2310.01889;
        Llama 3, https://arxiv.org/abs/2407.21783
    """

    @spelled()
    def __init__(
        self,
        *,
        context_parallel_size: Union[Literal["auto"], int] = "auto",
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        context_parallel_method: ContextMethod = "auto",
        compression: Optional[Reducer] = None,
        compressor_state: KeptState = "local",
        hierarchical: Hierarchical = False,
        zero_stage: ZeroStage = 0,
        reshard: Reshard = "auto",
        activation_checkpointing: ActivationCheckpointing = "off",
        cpu_offload: Sequence[OffloadedPart] = (),
        tiled: Tiled = "off",
        compile_layers: bool = False,
        gradient_sum_dtype: Optional[GradientSumDtype] = None,
        checkpoint_format: CheckpointFormat = "full",
        async_save: bool = False,
        verify: Verify = "auto",
        gather_after_fit: GatherAfterFit = "auto",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "auto",
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        super().__init__(
            {CONTEXT: context_parallel_size, DATA: data_parallel_size},
            TensorOptions(),
            None,
            ContextOptions(context_parallel_method),
            **named(locals(), MeshStrategy.__init__),
        )


class PipelineParallelStrategy(MeshStrategy):
    """Splits the layers of any LightningModule into pipeline stages, and the data over replicas.

    The repeated layers are split into runs, one per stage. Each stage runs the module's own step on one microbatch
    after another. The module itself is not changed.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import PipelineParallelStrategy

        trainer = Trainer(devices=2, strategy=PipelineParallelStrategy(schedule="1f1b", num_microbatches=4))
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        pipeline_parallel_size: Ranks that share the layers of a replica. `"auto"` takes the ranks that the other axes
            leave.
        data_parallel_size: Number of replicas. `"auto"` takes the ranks that the other axes leave.
        layers: Dotted name of the container of repeated layers. Join several containers in a row by commas.
        schedule: Order of the microbatches: `gpipe`, `1f1b`, `interleaved_1f1b`, `zb_h1`, `interleaved_zb`, `zbv`.
            `auto` simulates all of them with measured costs and takes the fastest within `memory_limit_bytes`.
        num_microbatches: Number of parts of each batch. `"auto"` takes four per stage if the batch has as many samples.
        virtual_stages: Stages per rank, for schedules that support several. `"auto"` takes the smallest supported
            number.
        warmup: Forwards that a rank runs ahead, per rank between it and the last rank, for `1f1b`, `zb_h1` and the
            interleaved schedules. More forwards hide slow links, and hold more activations. None takes the default.
        balance: Split points of the layers: `auto` equalises measured time, `parameters` the parameters, `uniform` the
            number of layers. A list gives the layers of each stage.
        memory_limit_bytes: Largest memory per rank, in bytes or such as `"80GiB"`, for measured split points and
            schedules.
        split_batch: Function `(batch, parts) -> microbatches`, or its dotted path. Needed if the samples are not in
            dimension 0.
        microbatch_weight: Function `(microbatch) -> weight` in the loss, or its dotted path. By default the number of
            samples, or of tokens if the loss is a mean over tokens.
        pipeline_plan: A `PipelinePlan` or its file, made by an earlier run. It replaces the pipeline arguments above.
        compression: Compressor of the gradient all-reduce between replicas. None sends full gradients.
        compressor_state: How a checkpoint of one file stores the compressor's state. `local` writes one file per rank
            beside it, `none` stores nothing. A sharded checkpoint stores the state of each rank as tensors of it.
        hierarchical: Sum full gradients inside a node, and compress between nodes only. True groups the replicas by
            host. A number sets the replicas per node.
        zero_stage: ZeRO stage over the replicas. Stage 1 shards the optimizer state. Stage 2 also shards the gradients
            between backward and the end of the step. Stage 3 also shards the parameters, and gathers them for each
            layer.
        reshard: How long full parameters stay, with `zero_stage=3`: until the next `layer` begins, or until the `step`
            ends. `auto` takes `step` in a pipeline with several microbatches, which use a layer again and again.
        activation_checkpointing: Recompute activations of the repeated layers in backward, which saves memory and takes
            time. `full` recomputes each layer, and a number n every n-th layer. `selective` keeps the results of
            products, attention and communication. `auto` chooses as few layers as fit in memory. `off` keeps all.
        cpu_offload: Tensors in host memory, a tuple of names. `optimizer` keeps the state there, and takes its steps on
            the host. `activations` keeps the inputs of layers that `activation_checkpointing` recomputes.
        tiled: Compute the cross-entropy of the head, and MLPs, in tiles of positions with `auto`. Logits and inner
            features of a long sequence then never exist whole, and backward computes MLPs again. `off` uses no tiles.
        compile_layers: Compile each of the repeated layers with `torch.compile`. Inductor makes kernels if there is a
            compiler for them; otherwise the backend is `aot_eager`. The first steps take longer.
        gradient_sum_dtype: Dtype of sums of gradients of 16-bit parameters, such as with `bf16-true`: `fp32`, or a
            16-bit dtype for sums in the dtype of each parameter. `.grad` holds the sum, rounded once. None takes `fp32`
            if a step adds several gradients: with microbatches, or with `accumulate_grad_batches` above 1.
        checkpoint_format: `full` writes one ordinary Lightning checkpoint. `sharded` writes a folder with one file per
            rank. Every layout loads both formats.
        async_save: Write sharded checkpoints in the background. Training waits only for a copy of the tensors.
        verify: Self-check that compares the module's steps with one process, before their first batch. `auto` and
            `always` run the self-check, `off` does not.
        gather_after_fit: Ranks on which the module holds full parameters after a run: `all` or `off`. `auto` takes
            `all` for modules of up to 1 GiB, and prints a message otherwise.
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
        ValueError: On every rank when the Trainer starts, if the sizes do not multiply to the number of processes. Also
            if the layers cannot be split, or the module uses a feature that a pipeline does not support.

    Source: GPipe, https://arxiv.org/abs/1811.06965; Megatron-LM, https://arxiv.org/abs/2104.04473
    """

    @spelled()
    def __init__(
        self,
        *,
        pipeline_parallel_size: Union[Literal["auto"], int] = "auto",
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        layers: str = "auto",
        schedule: ScheduleName = "1f1b",
        num_microbatches: Union[Literal["auto"], int] = "auto",
        virtual_stages: Union[Literal["auto"], int] = "auto",
        warmup: Optional[float] = None,
        balance: Union[Literal["auto", "parameters", "uniform"], list[int]] = "auto",
        memory_limit_bytes: Optional[Union[float, str]] = None,
        split_batch: Optional[Union[Callable[[Any, int], list[Any]], str]] = None,
        microbatch_weight: Optional[Union[Callable[[Any], float], str]] = None,
        pipeline_plan: Optional[Union[PipelinePlan, str, Path]] = None,
        compression: Optional[Reducer] = None,
        compressor_state: KeptState = "local",
        hierarchical: Hierarchical = False,
        zero_stage: ZeroStage = 0,
        reshard: Reshard = "auto",
        activation_checkpointing: ActivationCheckpointing = "off",
        cpu_offload: Sequence[OffloadedPart] = (),
        tiled: Tiled = "off",
        compile_layers: bool = False,
        gradient_sum_dtype: Optional[GradientSumDtype] = None,
        checkpoint_format: CheckpointFormat = "full",
        async_save: bool = False,
        verify: Verify = "auto",
        gather_after_fit: GatherAfterFit = "auto",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "auto",
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        super().__init__(
            {PIPELINE: pipeline_parallel_size, DATA: data_parallel_size},
            TensorOptions(),
            PipelineOptions.of(**named(locals(), PipelineOptions.of)),
            **named(locals(), MeshStrategy.__init__),
        )


class HybridParallelStrategy(MeshStrategy):
    """Combines tensor, context, pipeline and data parallelism for any LightningModule.

    Ranks of a replica share each layer (tensor parallelism) and each sequence (context parallelism), and its layers are
    split into stages (pipeline). Replicas read different data.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import HybridParallelStrategy

        strategy = HybridParallelStrategy(tensor_parallel_size=2, pipeline_parallel_size=2)
        trainer = Trainer(devices=4, strategy=strategy)
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        data_parallel_size: Number of replicas. `"auto"` takes the ranks that the other axes leave.
        pipeline_parallel_size: Ranks that share the layers of a replica. `"auto"` takes the ranks that the other axes
            leave.
        context_parallel_size: Ranks that share the positions of a sequence. `"auto"` takes the ranks that the other
            axes leave.
        tensor_parallel_size: Ranks that share each layer of a replica. `"auto"` takes the ranks that the other axes
            leave.
        tensor_plan: How each layer is sharded. `"auto"` uses the plan of a Hugging Face model, otherwise the structure
            of the model. A dict maps globs over module paths to styles: `column`, `row`, `column_gather`, `row_split`,
            `vocab`, `head`, `attention`, `transformer_layer`, `replicate`, or the style names of Hugging Face.
        sequence_parallel: Also shard the activations between sharded layers along the sequence. This saves memory; the
            backward pass gathers the inputs of attention and MLP once more.
        gather_logits: Gather the logits at once, also in training. By default they stay sharded by class until code
            reads them. Set this if only some ranks read them.
        context_parallel_method: How attention reads other positions. `ulysses` exchanges positions for heads. `ring`
            passes keys and values around. `gather` collects all keys and values. `auto` takes the fastest. Attention
            with dropout always takes `gather`, and each rank draws its own numbers, unlike one process.
        layers: Dotted name of the container of repeated layers. Join several containers in a row by commas.
        schedule: Order of the microbatches: `gpipe`, `1f1b`, `interleaved_1f1b`, `zb_h1`, `interleaved_zb`, `zbv`.
            `auto` simulates all of them with measured costs and takes the fastest within `memory_limit_bytes`.
        num_microbatches: Number of parts of each batch. `"auto"` takes four per stage if the batch has as many samples.
        virtual_stages: Stages per rank, for schedules that support several. `"auto"` takes the smallest supported
            number.
        warmup: Forwards that a rank runs ahead, per rank between it and the last rank, for `1f1b`, `zb_h1` and the
            interleaved schedules. More forwards hide slow links, and hold more activations. None takes the default.
        balance: Split points of the layers: `auto` equalises measured time, `parameters` the parameters, `uniform` the
            number of layers. A list gives the layers of each stage.
        memory_limit_bytes: Largest memory per rank, in bytes or such as `"80GiB"`, for measured split points and
            schedules.
        split_batch: Function `(batch, parts) -> microbatches`, or its dotted path. Needed if the samples are not in
            dimension 0.
        microbatch_weight: Function `(microbatch) -> weight` in the loss, or its dotted path. By default the number of
            samples, or of tokens if the loss is a mean over tokens.
        pipeline_plan: A `PipelinePlan` or its file, made by an earlier run. It replaces the pipeline arguments above.
        compression: Compressor of the gradient all-reduce between replicas. None sends full gradients.
        compressor_state: How a checkpoint of one file stores the compressor's state. `local` writes one file per rank
            beside it, `none` stores nothing. A sharded checkpoint stores the state of each rank as tensors of it.
        hierarchical: Sum full gradients inside a node, and compress between nodes only. True groups the replicas by
            host. A number sets the replicas per node.
        zero_stage: ZeRO stage over the data and context axes, whose ranks hold the same parameters. Stage 1 shards the
            optimizer state. Stage 2 also shards the gradients between backward and the end of the step. Stage 3 also
            shards the parameters, and gathers them for each layer.
        reshard: How long full parameters stay, with `zero_stage=3`: until the next `layer` begins, or until the `step`
            ends. `auto` takes `step` in a pipeline with several microbatches, which use a layer again and again.
        activation_checkpointing: Recompute activations of the repeated layers in backward, which saves memory and takes
            time. `full` recomputes each layer, and a number n every n-th layer. `selective` keeps the results of
            products, attention and communication. `auto` chooses as few layers as fit in memory. `off` keeps all.
        cpu_offload: Tensors in host memory, a tuple of names. `optimizer` keeps the state there, and takes its steps on
            the host. `activations` keeps the inputs of layers that `activation_checkpointing` recomputes.
        tiled: Compute the cross-entropy of the head, and MLPs, in tiles of positions with `auto`. Logits and inner
            features of a long sequence then never exist whole, and backward computes MLPs again. `off` uses no tiles.
        compile_layers: Compile each of the repeated layers with `torch.compile`. Inductor makes kernels if there is a
            compiler for them; otherwise the backend is `aot_eager`. The first steps take longer.
        gradient_sum_dtype: Dtype of sums of gradients of 16-bit parameters, such as with `bf16-true`: `fp32`, or a
            16-bit dtype for sums in the dtype of each parameter. `.grad` holds the sum, rounded once. None takes `fp32`
            if a step adds several gradients: with microbatches, or with `accumulate_grad_batches` above 1.
        checkpoint_format: `full` writes one ordinary Lightning checkpoint. `sharded` writes a folder with one file per
            rank. Every layout loads both formats.
        async_save: Write sharded checkpoints in the background. Training waits only for a copy of the tensors.
        verify: Self-check that compares the module's steps with one process, before their first batch. `auto` and
            `always` run the self-check, `off` does not.
        gather_after_fit: Ranks on which the module holds full parameters after a run: `all` or `off`. `auto` takes
            `all` for modules of up to 1 GiB, and prints a message otherwise.
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
        ValueError: On every rank when the Trainer starts, for the reasons of `TensorParallelStrategy` and
            `PipelineParallelStrategy`.

    Source: Megatron-LM, https://arxiv.org/abs/2104.04473
    """

    @spelled()
    def __init__(
        self,
        *,
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        pipeline_parallel_size: Union[Literal["auto"], int] = 1,
        context_parallel_size: Union[Literal["auto"], int] = 1,
        tensor_parallel_size: Union[Literal["auto"], int] = 1,
        tensor_plan: Union[Literal["auto"], dict[str, str]] = "auto",
        sequence_parallel: bool = False,
        gather_logits: bool = False,
        context_parallel_method: ContextMethod = "auto",
        layers: str = "auto",
        schedule: ScheduleName = "1f1b",
        num_microbatches: Union[Literal["auto"], int] = "auto",
        virtual_stages: Union[Literal["auto"], int] = "auto",
        warmup: Optional[float] = None,
        balance: Union[Literal["auto", "parameters", "uniform"], list[int]] = "auto",
        memory_limit_bytes: Optional[Union[float, str]] = None,
        split_batch: Optional[Union[Callable[[Any, int], list[Any]], str]] = None,
        microbatch_weight: Optional[Union[Callable[[Any], float], str]] = None,
        pipeline_plan: Optional[Union[PipelinePlan, str, Path]] = None,
        compression: Optional[Reducer] = None,
        compressor_state: KeptState = "local",
        hierarchical: Hierarchical = False,
        zero_stage: ZeroStage = 0,
        reshard: Reshard = "auto",
        activation_checkpointing: ActivationCheckpointing = "off",
        cpu_offload: Sequence[OffloadedPart] = (),
        tiled: Tiled = "off",
        compile_layers: bool = False,
        gradient_sum_dtype: Optional[GradientSumDtype] = None,
        checkpoint_format: CheckpointFormat = "full",
        async_save: bool = False,
        verify: Verify = "auto",
        gather_after_fit: GatherAfterFit = "auto",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "auto",
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        super().__init__(
            {
                TENSOR: tensor_parallel_size,
                CONTEXT: context_parallel_size,
                PIPELINE: pipeline_parallel_size,
                DATA: data_parallel_size,
            },
            TensorOptions(tensor_plan, sequence_parallel, gather_logits),
            PipelineOptions.of(**named(locals(), PipelineOptions.of)),
            ContextOptions(context_parallel_method),
            **named(locals(), MeshStrategy.__init__),
        )
