"""`AutoParallelStrategy`: the planner chooses the mesh and the schedule when a run begins.

The first rank plans before the strategy makes the groups of the mesh, and all ranks take its plan. Samplers,
`device_mesh` and hooks see the chosen mesh from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, Optional, Union, cast

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.default_group import all_processes_as_default
from lightning_parallel.compat.lightning import tell, train_dataloader_of
from lightning_parallel.compression import Reducer
from lightning_parallel.mesh import AXES
from lightning_parallel.pipeline.recomputed_set import OPTIONS
from lightning_parallel.pipeline.simulate import Link
from lightning_parallel.planner.hardware import Cluster, available_cores, device_here, measured_cpu
from lightning_parallel.planner.layouts import Layout
from lightning_parallel.planner.links import MOST_RANKS_MEASURED, fitted_link, group_links
from lightning_parallel.planner.plan_report import plan_text
from lightning_parallel.planner.plans import LayoutPlan, optimizers_of, plan
from lightning_parallel.planner.rehearsal import without_data
from lightning_parallel.strategies.compressed.memory import KeptState
from lightning_parallel.strategies.compressed.nodes import Hierarchical
from lightning_parallel.strategies.optimizers.checks import Needs, check_sliced
from lightning_parallel.strategies.optimizers.zero import Reshard, ZeroStage
from lightning_parallel.strategies.options import (
    ActivationCheckpointing,
    CheckpointFormat,
    ContextMethod,
    ContextOptions,
    GradientSumDtype,
    OffloadedPart,
    Tiled,
    memory_limit,
    named,
    spelled,
)
from lightning_parallel.strategies.parallel import HybridParallelStrategy
from lightning_parallel.strategies.ranks.processes import StartMethod
from lightning_parallel.strategies.self_check.proof import Verify
from lightning_parallel.strategies.setup.tables import print_table
from lightning_parallel.strategies.whole.between_runs import GatherAfterFit
from lightning_parallel.tracing.spans import count_text

__all__ = ["AutoParallelStrategy", "accumulated_batches", "first_of_loaders"]


class AutoParallelStrategy(HybridParallelStrategy):
    """Predicts every layout of the processes when `fit` begins, takes the best, and prints it.

    The strategy takes the layout with the most samples per second that fits in memory. Each replica has the batch size
    of the training loader. To see the plan without a run, or for other devices, use `lightning-parallel plan`. To keep
    a layout, use `HybridParallelStrategy` with the printed arguments.

    The first rank reads a batch early. For this it calls `prepare_data` and `setup` of the data once more, before all
    ranks do. Validation, test and prediction run with replicas only, unless `fit` ran before. A resumed run may take
    another layout: checkpoints fit all layouts.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import AutoParallelStrategy

        trainer = Trainer(devices=4, strategy=AutoParallelStrategy())
        trainer.fit(MyModule(), MyData())  # prints the layout that it chose
        ```

    Args:
        memory_limit_bytes: Largest memory per rank, in bytes or such as `"80GiB"`. By default the memory of the device.
            On CPU, the rank's share of the host's memory.
        tensor_plan: How each layer is sharded. `"auto"` uses the plan of a Hugging Face model, otherwise the structure
            of the model. A dict maps globs over module paths to styles: `column`, `row`, `column_gather`, `row_split`,
            `vocab`, `head`, `attention`, `transformer_layer`, `replicate`, or the style names of Hugging Face.
        sequence_parallel: Also shard the activations between sharded layers along the sequence. This saves memory; the
            backward pass gathers the inputs of attention and MLP once more.
        gather_logits: Gather the logits at once, also in training. By default they stay sharded by class until code
            reads them. Set this if only some ranks read them.
        layers: Dotted name of the container of repeated layers. Join several containers in a row by commas.
        split_batch: Function `(batch, parts) -> microbatches`, or its dotted path. Needed if the samples are not in
            dimension 0.
        microbatch_weight: Function `(microbatch) -> weight` in the loss, or its dotted path. By default the number of
            samples, or of tokens if the loss is a mean over tokens.
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
        ValueError: If the limit is not positive. On every rank when the Trainer starts, if no layout fits; the message
            lists the shortfall of each layout.
    """

    is_for_replicas = True

    @spelled()
    def __init__(
        self,
        *,
        memory_limit_bytes: Optional[Union[float, str]] = None,
        tensor_plan: Union[Literal["auto"], dict[str, str]] = "auto",
        sequence_parallel: bool = False,
        gather_logits: bool = False,
        layers: str = "auto",
        split_batch: Optional[Union[Callable[[Any, int], list[Any]], str]] = None,
        microbatch_weight: Optional[Union[Callable[[Any], float], str]] = None,
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
        hybrid = named(locals(), HybridParallelStrategy.__init__)
        # The limit applies to the plan of a layout. The schedule is chosen with it.
        super().__init__(**{**hybrid, "memory_limit_bytes": None})
        self.memory_limit_bytes = memory_limit(memory_limit_bytes)
        self.layout: Layout | None = None

    @override
    def setup_environment(self) -> None:
        trainer = self.module.trainer
        state = ParallelState.of(self.module)
        # A module that an earlier run has divided cannot take another layout.
        is_divided = state.sharding is not None or state.engine is not None
        if trainer.state.fn == TrainerFn.FITTING and self.layout is None and not is_divided:
            self.meet()
            with all_processes_as_default():
                world = Group.of()
                links = self._links(world)
                # All ranks take the plan of the first rank: measured times differ between ranks.
                self._take(comm.broadcast_from(lambda: self._planned(trainer, links), world))
        super().setup_environment()

    def _planned(self, trainer: Trainer, links: Mapping[int, Link]) -> LayoutPlan:
        """Plan on the first rank.

        Raises:
            ValueError: If no layout fits.
        """
        # The early batch and the plan draw numbers on this rank alone.
        with torch.random.fork_rng():
            batch = _early_batch(trainer)
            module = _whole_copy(self.module)
            cluster = self._cluster(links)
            # Layers are timed with the threads of one rank, because the ranks of a host share its cores.
            before = torch.get_num_threads()
            checkpointing = self.activation_checkpointing
            torch.set_num_threads(cluster.threads)
            try:
                found = plan(
                    module,
                    batch,
                    cluster,
                    precision=trainer.precision,  # type: ignore[arg-type]
                    accumulated=accumulated_batches(trainer.accumulate_grad_batches, trainer.callbacks),  # type: ignore[attr-defined]
                    tensor_plan=self.tensor_options.plan,
                    sequence_parallel=self.tensor_options.sequence_parallel,
                    layers=self.pipeline_options.layers if self.pipeline_options is not None else "auto",
                    zero_stages=self._zero_stages(module),
                    tiled=self.tiled,
                    offloads=self.steps_on_host,
                    offloads_inputs="activations" in self.cpu_offload,
                    recomputations=OPTIONS if checkpointing == "auto" else (checkpointing,),
                )
            finally:
                torch.set_num_threads(before)
        if found.obstacle:
            listed = "\n".join(f"  {layout.name}: {layout.refusal}" for layout in found.layouts)
            raise ValueError(f"{found.obstacle}:\n{listed}")
        return found

    def _zero_stages(self, module: LightningModule) -> tuple[int, ...]:
        """Return the ZeRO stages to choose from: the user's; otherwise 0, and 1 if the optimizer allows it."""
        if self.zero_stage:
            return (self.zero_stage,)
        try:
            needs = check_sliced(optimizers_of(module)[0], self.world_size, may_show=True)
        except ValueError:
            return (0,)
        # A step that needs the full model on every rank saves no memory.
        return (0,) if Needs.MODEL in needs.values() else (0, 1)

    def _links(self, world: Group) -> dict[int, Link]:
        """Measure links by group size, on one CPU host; otherwise the link of the world. Every rank must call it."""
        if world.size == 1:
            return {}
        if self.root_device.type == "cpu" and world.size == self.num_processes <= MOST_RANKS_MEASURED:
            return group_links(available_cores())
        return {world.size: fitted_link(world, self.root_device)}

    def _cluster(self, links: Mapping[int, Link]) -> Cluster:
        ranks = self.world_size
        per_node = self.num_processes
        link = links[min(links)] if links else Link()
        limit = self.memory_limit_bytes or 0.0
        device = device_here(self.root_device)
        if device is not None:
            return Cluster(device, ranks, per_node, link, link, limit)
        cores = available_cores()
        threads = max(1, cores // per_node)
        return Cluster(measured_cpu(threads), ranks, per_node, link, link, limit, cores, threads, links)

    def _take(self, found: LayoutPlan) -> None:
        """Run the best layout of a plan from now on."""
        layout = self.layout = found.best[0]
        self.zero_stage = cast(ZeroStage, layout.zero_stage)
        self.activation_checkpointing = cast(ActivationCheckpointing, layout.recomputation)
        self.choose_mesh({axis: layout.mesh.size(axis) for axis in AXES})
        self.context_options = ContextOptions(cast(ContextMethod, layout.method or "auto"))
        assert self.pipeline_options is not None
        self.pipeline_options = replace(
            self.pipeline_options,
            schedule=layout.schedule,
            num_microbatches=layout.microbatches,
            virtual_stages=layout.virtual_stages,
            warmup=layout.warmup,
            balance=layout.layers_per_stage or "auto",
            memory_limit_bytes=None,
        )
        print_table(plan_text(found, with_yaml=False))
        tell(
            f"AutoParallelStrategy runs {layout.name} on the {layout.mesh.world_size} devices of the Trainer:"
            f" {count_text(layout.samples_per_s)} samples/s are predicted"
        )


def _early_batch(trainer: Trainer) -> Any:
    """Return the first batch of the training loader, before the Trainer has set it up.

    Raises:
        ValueError: If there is no training loader, or it is empty.
    """
    data = trainer.datamodule if trainer.datamodule is not None else trainer.lightning_module  # type: ignore[attr-defined]
    data.prepare_data()
    data.setup("fit")
    loader = train_dataloader_of(trainer)
    if loader is None:
        raise ValueError("AutoParallelStrategy needs a batch to plan; got a run without a training loader")
    return first_of_loaders(loader)


def accumulated_batches(count: int | None, callbacks: Any) -> int:
    """Return the number of batches in the first optimizer step of a Trainer with these arguments."""
    for callback in callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]:
        if hasattr(callback, "get_accumulate_grad_batches"):  # `GradientAccumulationScheduler` of either package
            return int(callback.get_accumulate_grad_batches(0))
    return count or 1


def first_of_loaders(loaders: Any) -> Any:
    """Return the first batch of a loader, or of a list or dict of loaders, as the Trainer would.

    Raises:
        ValueError: If there is none.
    """
    try:
        if not isinstance(loaders, DataLoader) and isinstance(loaders, (list, tuple, dict)):
            return next(iter(CombinedLoader(loaders, "max_size_cycle")))[0]
        return next(iter(loaders))
    except StopIteration:
        raise ValueError("AutoParallelStrategy needs a batch to plan; got an empty training loader") from None


def _whole_copy(module: LightningModule) -> LightningModule:
    """Return a copy of a module without data, after its own `configure_model` and `setup`."""
    copied = without_data(module)
    assert isinstance(copied, LightningModule)
    copied.trainer = module.trainer
    with torch.device("meta"):
        copied.configure_model()
        if next(copied.parameters(), None) is None:
            copied.setup("fit")
    return copied
