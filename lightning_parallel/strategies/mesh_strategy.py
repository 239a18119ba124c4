"""Implements the Trainer's hooks for strategies that divide a module over a mesh of processes.

The hooks stand in the order of a run: `setup_environment` (processes, groups) -> `setup` (divides the model) ->
`load_checkpoint` -> `training_step` -> `backward` -> `optimizer_step` -> `save_checkpoint` -> `teardown`. The objects
of a run are in `Run`.

A `full` checkpoint is one file, gathered on rank zero, which stock Lightning also reads. A `sharded` checkpoint is a
folder to which each rank writes its part; no rank holds more than its part and one tensor. Any layout loads either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.checkpoint import (
    Checkpoints,
    DistributedCheckpoint,
    Folder,
    Inventory,
    SavedCheckpoint,
    ShardedWriter,
    as_parts,
    is_distributed_checkpoint,
    is_sharded_checkpoint,
)
from lightning_parallel.comm import Group, stop_heartbeat
from lightning_parallel.comm.host_memory import HostCopies
from lightning_parallel.compat import Patches, is_users
from lightning_parallel.compat.default_group import all_processes_as_default
from lightning_parallel.compat.lightning import (
    PathLike,
    at_end_of_epochs,
    early_optimizers,
    log_without_advice,
    move_optimizers,
    reset_optimizers,
    synchronizes_layers,
    tell,
)
from lightning_parallel.compat.torch import explain_swaps, give_data
from lightning_parallel.compat.twins import is_a
from lightning_parallel.compression import Reducer, check_reducer
from lightning_parallel.data_parallel import AbsentParameter, GradientReducer, ParameterSlices
from lightning_parallel.mesh import AXES, CONTEXT, DATA, Axis, Size
from lightning_parallel.pipeline.microbatch import without_caches
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.pipeline.recomputation import Recomputed, recompute, repeated_layers
from lightning_parallel.planner.rank_memory import optimizer_copies
from lightning_parallel.step_trace.placeholder import record_flex_attention
from lightning_parallel.step_trace.record import StepTrace
from lightning_parallel.strategies import checks
from lightning_parallel.strategies.checkpoints.rank_files import remove_rank_files
from lightning_parallel.strategies.compressed.advice import tell_costs, warn_of_misfits
from lightning_parallel.strategies.compressed.memory import KeptState, check_kept_state
from lightning_parallel.strategies.compressed.mesh import MeshCompression, gradient_reducer
from lightning_parallel.strategies.compressed.nodes import Hierarchical, check_hierarchical
from lightning_parallel.strategies.deferred.init import deferred_init, held_by_stage, materialize_owned, move_to_meta
from lightning_parallel.strategies.deferred.tensor import is_deferred
from lightning_parallel.strategies.hooks.changes import ModelWatch
from lightning_parallel.strategies.hooks.views import FullViews
from lightning_parallel.strategies.hooks.watch import HookWatch
from lightning_parallel.strategies.optimizers.checks import Needs, WholeGroups, check_optimizers, check_sliced
from lightning_parallel.strategies.optimizers.norms import ReplicaNorm, give_norms, span_replica
from lightning_parallel.strategies.optimizers.owners import TensorOwners
from lightning_parallel.strategies.optimizers.zero import (
    Reshard,
    UnitSharding,
    ZeroStage,
    begin_shards,
    check_on_host,
    check_zero_stage,
    divide_optimizers,
    follow_other_steps,
    gather_late,
    make_slices,
    settle_before_graphs,
    take_shards,
)
from lightning_parallel.strategies.options import (
    ActivationCheckpointing,
    CheckpointFormat,
    ContextOptions,
    GradientSumDtype,
    OffloadedPart,
    PipelineOptions,
    TensorOptions,
    Tiled,
    check_activation_checkpointing,
    check_checkpoint_format,
    check_choice,
    check_compile_layers,
    check_cpu_offload,
    dtype_of_sums,
)
from lightning_parallel.strategies.ranks import replicas
from lightning_parallel.strategies.ranks.order import MessageOrder, in_step, on_parts
from lightning_parallel.strategies.ranks.processes import MeshProcesses, StartMethod
from lightning_parallel.strategies.run import Run
from lightning_parallel.strategies.self_check.proof import Verify
from lightning_parallel.strategies.setup.divide import cut_stages, records_of_run, save_plan, shard_tensors
from lightning_parallel.strategies.setup.positions import (
    plan_sequences,
    refuse_backward_hooks,
    refuse_gradients_in_steps,
    split_sequences,
)
from lightning_parallel.strategies.setup.tables import show_stages
from lightning_parallel.strategies.steps.compiled import compile_layers
from lightning_parallel.strategies.steps.effects import side_effects_discarded
from lightning_parallel.strategies.steps.pipeline import PipelineSteps
from lightning_parallel.strategies.steps.recomputed import layers_within_limit, tell_recomputed
from lightning_parallel.strategies.steps.tiled import plan_tiles, tile_modules
from lightning_parallel.strategies.whole.between_runs import (
    EVERYWHERE_BYTES,
    GatherAfterFit,
    divide_again,
    end_run,
    keeps_full,
    share_tensors,
)
from lightning_parallel.strategies.whole.full_state import hold_averages, open_outside
from lightning_parallel.strategies.whole.saved_modules import holds_modules, put_full_copies, weakly
from lightning_parallel.strategies.whole.skeleton import close_skeleton, keep_skeleton
from lightning_parallel.tensor.context_rules import attend_flexibly
from lightning_parallel.tensor.pieces import gather_attributes, without_pieces
from lightning_parallel.tensor.whole_gradients import give_whole_gradients

__all__ = ["MeshStrategy"]


class MeshStrategy(MeshProcesses):
    """Divides a LightningModule over a mesh of processes.

    Args:
        sizes: Ranks along each axis, or `"auto"`.
        tensor: How layers are sharded.
        pipeline: How layers are split into stages; None without a pipeline axis.
        context: How positions are split.

    `HybridParallelStrategy` documents the other arguments.
    """

    compresses_drifts = False
    """Whether the compressor encodes drifts of parameters rather than gradients."""

    is_for_replicas = False
    """Whether a run with one rank per replica is expected. Otherwise the strategy suggests other sizes."""

    keeps_parameters = False
    """Whether the strategy stores a value for each parameter, so that none may be added or removed in a run."""

    def __init__(
        self,
        sizes: Mapping[Axis, Size],
        tensor: TensorOptions,
        pipeline: Optional[PipelineOptions],
        context: Optional[ContextOptions] = None,
        *,
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
            sizes,
            process_group_backend,
            timeout,
            start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        check_activation_checkpointing(activation_checkpointing)
        check_checkpoint_format(checkpoint_format, async_save)
        check_choice("tiled", tiled, Tiled)
        check_compile_layers(compile_layers, tiled, tensor.sequence_parallel, sizes.get(CONTEXT, 1))
        check_choice("verify", verify, Verify)
        check_choice("gather_after_fit", gather_after_fit, GatherAfterFit)
        if compression is not None:
            check_reducer(compression)
        check_kept_state(compressor_state)
        check_hierarchical(hierarchical, compression)
        check_zero_stage(zero_stage, reshard, compression)
        self.compression = compression
        self.kept_state = compressor_state
        self.hierarchical = hierarchical
        self.zero_stage = zero_stage
        self.reshard = reshard
        self.activation_checkpointing = activation_checkpointing
        self.cpu_offload = check_cpu_offload(cpu_offload, activation_checkpointing)
        self.tiled = tiled
        self.compile_layers = compile_layers
        self.gradient_sum_dtype = dtype_of_sums(gradient_sum_dtype)
        self.checkpoint_format = checkpoint_format
        self.async_save = async_save
        self.verify = verify
        self.gather_after_fit = gather_after_fit
        self.tensor_options = tensor
        self.pipeline_options = pipeline
        self.context_options = ContextOptions() if context is None else context
        self._run: Run | None = None
        # Not in `Run`: patches begin before `setup`, and the last patches end after `teardown` of Lightning's strategy.
        self._patches = Patches()
        # Not in `Run` either: a script may save or load between runs.
        self._writer: ShardedWriter | None = None
        self._opened: SavedCheckpoint | DistributedCheckpoint | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshStrategy:
        # A copy of a module reaches the strategy through its Trainer. The copy shares objects that the library has made
        # for a run, such as process groups, which belong to this process. All other attributes are copied.
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        is_used = self._groups is not None
        for name, value in vars(self).items():
            is_made_here = type(value).__module__.partition(".")[0] == __name__.partition(".")[0]
            vars(duplicate)[name] = value if is_used and is_made_here else copy.deepcopy(value, memo)
        return duplicate

    @property
    def run(self) -> Run:
        """The objects of the present run; after `teardown`, of the last run.

        Raises:
            RuntimeError: Before the first `setup`.
        """
        if self._run is None:
            raise RuntimeError("The strategy has no run yet; it begins in `Trainer.fit`, `validate`, ...")
        return self._run

    # -------------------------------------------------------------------------------------------------- the set-up

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Check only now, when the ranks have met. If one rank raised earlier, other ranks would report only its loss.
        with comm.failing_together(self.groups.world):
            if self.mesh.pipeline_parallel > 1 and self.pipeline_options is not None:
                checks.check_pipeline_module(self.module, self.pipeline_options.layers)
            checks.check_callbacks(self.module.trainer, self.groups.replica.size)
        asks_for_replicas = self.is_for_replicas or self.zero_stage or self.compression is not None
        if self.mesh.data_parallel == self.mesh.world_size > 1 and not asks_for_replicas:
            others = " or ".join(f"`{axis}_size`" for axis in AXES if axis in self._sizes and axis != DATA)
            tell(
                f"`{type(self).__name__}` runs {self.mesh.world_size} replicas of the full model, as DDP does. Set"
                f" {others} to shard or split it."
            )
        # Lightning calls the `setup` of callbacks next, in which weight averaging would copy the full module.
        hold_averages(self.module.trainer, self._patches)
        if self.groups.replica.size > 1:
            give_data(self._patches)
            explain_swaps(self._patches)
            record_flex_attention(self._patches)
        if self.groups.context_parallel.size > 1:
            attend_flexibly(self._patches)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        is_fit = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        self._end_on_sigterm = self.keep_together(trainer, self._patches)
        if not self.is_distributed:
            log_without_advice(self._patches)
        # `end_run` has given the module its full tensors. `_prepare_model` expects the division of the last run.
        divide_again(self.module, self.groups)
        run = self._begin_run()
        was_split = run.engine is not None
        self._prepare_model(trainer)
        if is_fit:
            self._prepare_fit(trainer)
        if self.groups.context_parallel.size > 1:
            refuse_gradients_in_steps(run.state, self._patches)
        # After the optimizers: a precision plugin may replace them when it connects to the model.
        self.setup_precision_plugin()
        self._guard_gradients()
        if self.groups.replica.size > 1 or run.slices is not None:
            meet = None if run.slices is None else run.state.replica_order
            owners = None if run.owners is None else run.owners.of
            run.hook_watch = HookWatch(
                self.module, run.rules, self.groups, run.slices, self._recorded_optimizers, meet, owners
            )
            run.hook_watch.install(self._patches)
            if run.optimizer_groups is not None:
                run.hook_watch.views.keep(run.optimizer_groups.kept)
        if is_fit:
            move_optimizers(self.optimizers, self._optimizer_device)
            replicas.share_plateau_metrics(self.lr_scheduler_configs, self.groups.data_parallel)
        if run.engine is not None and not was_split:
            # The table needs the memory of the optimizers, which is known only now.
            copies = optimizer_copies(self.optimizers) if is_fit else 1
            replicas_here = self.groups.gradients.size if is_fit else 1
            show_stages(run.engine.plan, copies, replicas_here, self.zero_stage, self.adds_in_fp32, self.steps_on_host)
        # Begin the watch last: the changes above are not the user's.
        run.model_watch = ModelWatch(self.module, lambda: self.optimizers)

    def _begin_run(self) -> Run:
        last = self._run
        self._run = Run(
            self.module,
            self.groups,
            self.root_device,
            self.precision_plugin,
            self.verify,
            self.zero_stage,
            # The optimizers of the last `fit` stay during an evaluation, and their state stays divided.
            optimizer_groups=None if last is None else last.optimizer_groups,
            slices=None if last is None else last.slices,
            owners=None if last is None else last.owners,
        )
        self._run.state.replica_order = MessageOrder(self.groups.gradients) if self.zero_stage else None
        self._run.slices = take_shards(self._run.state, self.zero_stage, self.groups, self._run.slices)
        return self._run

    def _prepare_model(self, trainer: Trainer) -> None:
        """Divide the module, move it to the device, and let replicas start equal."""
        module = self.module
        data = self.groups.data_parallel
        if synchronizes_layers(self) and trainer.state.fn == TrainerFn.FITTING:
            # Convert before the model is planned, since the conversion replaces modules.
            replicas.synchronize_batch_norm(module, data)
        # Deferred parameters record a cast only inside the mode that made them.
        with deferred_init(self.root_device):
            self.precision_plugin.convert_module(module)
        run = self.run
        run.slices = begin_shards(self.zero_stage, module, self.groups, run.state.replica_order, run.slices)
        self._divide(module)
        self._shard_units()
        for order in filter(None, (self.run.state.order, self.run.state.position_order)):
            # Stages draw different numbers, so a pipeline compares them by itself.
            order.chance = self._chance if self.run.engine is None else None
        self.model_to_device()
        # Each replica has built its model, perhaps from other random numbers.
        replicas.start_equal(module, self.groups.gradients)
        replicas.scope_metrics(module, self.groups)
        replicas.compute_at_end_of_epochs(trainer, data, self._patches)
        # First, since a value to compute would wait for replicas with more batches.
        at_end_of_epochs(trainer, self._serve_steps, self._patches, is_first=True)
        self.run.take_inventory()
        open_outside(module, self.groups, self.run.inventory, self.run.checkpoints, self._patches)

    def _divide(self, module: LightningModule) -> None:
        """Divide `module` in place: shard layers, then split runs of layers into stages. Both stay from run to run."""
        run = self.run
        if self.groups.replica.size > 1 and run.state.pending is None:
            with comm.failing_together(self.groups.world):
                checks.check_parameters(module)
        # The plan needs shapes only, so no rank has to hold the full model.
        held = move_to_meta(module, self.root_device)
        if self.groups.replica.size > 1:
            keep_skeleton(module)
        # A step under manual optimization asks for its optimizers, which are made after the split.
        is_fit = module.trainer.state.fn == TrainerFn.FITTING
        early = partial(early_optimizers, self, module) if is_fit else nullcontext

        def record() -> list[StepTrace]:
            with early():
                return records_of_run(module, self.precision_plugin, self.root_device)

        records = cache(record)
        is_tiled = is_fit and self.tiled == "auto"
        if is_tiled:
            plan_tiles(module, records, self.groups.world)
        sequences = plan_sequences(module, self.context_options, self.groups, record)
        sharding = shard_tensors(module, self.tensor_options, self.groups, records)
        split_sequences(module, sequences, self.context_options, self.groups)

        def materialize(plan: PipelinePlan | None) -> None:
            holds = held_by_stage(module, self.groups.pipeline_parallel, plan)
            made = self._shard_units(holds)
            materialize_owned(module, self.root_device, self.groups, sharding, holds, held, self._built_apart, made)

        if self.pipeline_options is None or self.groups.pipeline_parallel.size == 1:
            materialize(None)
            self._recompute(module, records)
            tile_modules(module, is_tiled)
            close_skeleton(module)
            return
        steps = PipelineSteps(module, self.pipeline_options, self.precision_plugin, self.root_device)
        # The analysis runs the user's steps. Their logs and attributes are not part of the run.
        with side_effects_discarded(module), early():
            engine = cut_stages(
                module,
                self.pipeline_options,
                self.groups,
                self.root_device,
                lambda: steps.example(module.trainer),
                materialize,
                is_verified=self.verify != "off",
                zero_stage=self.zero_stage,
                trace=next(iter(records()), None) if self.groups.tensor_parallel.size > 1 else None,
                recomputation=self.activation_checkpointing if is_fit else "off",
                offloads_inputs="activations" in self.cpu_offload,
            )
        doubt = run.state.doubt
        if doubt is not None and self.verify == "off":  # else the self-check examines the doubt
            rank_zero_warn(doubt[1])
        steps.bind(engine, self._patches)
        run.steps = steps
        self._recompute(module, records)
        tile_modules(module, is_tiled)
        close_skeleton(module)

    def _shard_units(
        self, holds: Callable[[Tensor], bool] = lambda parameter: True
    ) -> Callable[[nn.Parameter, bool], bool]:
        """Shard units of parameters that have data, with `zero_stage=3`; every rank must call it.

        Args:
            holds: Whether this rank holds any of a parameter.

        Returns:
            The argument `made` of `materialize_owned`, which shards the other units.
        """
        shards = self.run.slices
        if shards is None or not shards.keeps_slices:
            return lambda parameter, is_lost: is_lost
        units = UnitSharding(self.module, self.groups, self.root_device, shards, holds)
        shards.keep_states_whole(self.module)
        return units.made

    def _recompute(self, module: LightningModule, records: Callable[[], list[StepTrace]]) -> None:
        """Choose the layers whose activations backward recomputes; a later run may choose other layers.

        Args:
            module: The module, divided.
            records: Returns the records of its steps.

        Raises:
            ValueError: If the model has no repeated layers. On every rank with `auto`: see `layers_within_limit`.
        """
        is_fit = module.trainer.state.fn == TrainerFn.FITTING
        engine, given = self.run.engine, self.pipeline_options
        path = engine.plan.container if engine is not None else "auto" if given is None else given.layers
        compile_layers(module, self.compile_layers, path, self.root_device)
        option: str | int | Mapping[str, Recomputed] = self.activation_checkpointing if is_fit else "off"
        if option == "auto":
            option = engine.plan.recomputed if engine is not None else self._layers_within_limit(path, records)
            tell_recomputed(option, len(set(repeated_layers(module, path).names)))
        copies = HostCopies(self.root_device) if "activations" in self.cpu_offload else None
        recompute(module, option, path, copies)

    def _layers_within_limit(self, path: str, records: Callable[[], list[StepTrace]]) -> dict[str, Recomputed]:
        # No second fit measures on an earlier choice.
        recompute(self.module, "off")
        return layers_within_limit(
            self.module,
            self.precision_plugin,
            self.root_device,
            self.groups.world,
            layers=path,
            limit_bytes=None if self.pipeline_options is None else self.pipeline_options.memory_limit_bytes,
            replicas=self.groups.gradients.size,
            zero_stage=self.zero_stage,
            offloads=self.steps_on_host,
            offloads_inputs="activations" in self.cpu_offload,
            trace=next(iter(records()), None) if self.groups.tensor_parallel.size > 1 else None,
        )

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        slices = self.run.slices
        # Slices are there already.
        with nullcontext() if slices is None else slices.shown():
            self.model.to(self.root_device)

    def _prepare_fit(self, trainer: Trainer) -> None:
        """Make the optimizers and the reducer of a `fit`."""
        run = self.run
        run.compression = MeshCompression.of(
            self.compression,
            self.module,
            self.groups,
            self.kept_state,
            self.compresses_drifts,
            self.hierarchical,
            self.node_rank,
        )
        self.setup_optimizers(trainer)
        # After the optimizers, since `configure_optimizers` may register parameters.
        run.slices = make_slices(self.zero_stage, self.module, self.groups, run.slices)
        if run.slices is not None:
            is_repeated = run.engine is not None and run.engine.plan.schedule.num_microbatches > 1
            run.slices.stays_for_step = self.reshard == "step" or (self.reshard == "auto" and is_repeated)
            follow_other_steps(run.slices, self.groups.world, self._patches)
            if self.root_device.type == "cuda":
                settle_before_graphs(run.slices, self._patches)
        if self.steps_on_host:
            parameters = dict(self.module.named_parameters())
            # Without ZeRO each rank steps on all its parameters, which are one slice each.
            run.host_slices = run.slices or ParameterSlices(parameters, Group.alone(DATA))
            run.host_slices.offload(self.root_device)
        host = None if run.host_slices is None else run.host_slices.host
        run.owners = TensorOwners(self.module, self.groups, run.slices, host)
        self._take_optimizers()
        run.reducer = self.make_reducer()
        if self.compression is not None and run.compression is not None:
            sizes = run.compression.replicas_and_owners
            tell_costs(self.compression, self.module, *sizes, self.steps_between_reductions)
            self.check_compression(self.compression)
        run.check_anew()

    @override
    @on_parts
    def setup_optimizers(self, trainer: Trainer) -> None:
        # A second `fit` would add its optimizers to the optimizers of the first.
        reset_optimizers(self)
        # A stage whose `configure_optimizers` fails would leave the other stages waiting in the next collective.
        with comm.failing_together(self.groups.world):
            self._build_optimizers(trainer)

    def _build_optimizers(self, trainer: Trainer) -> None:
        run = self.run
        groups = WholeGroups(self.module, self.groups.pipeline_parallel)
        run.optimizer_groups = groups
        if self.groups.replica.size == 1:
            super().setup_optimizers(trainer)
        else:
            # `configure_optimizers` copies and reads parameters, as hooks do.
            views = FullViews(self.module, run.rules, self.groups, lambda: (), None)
            with groups.built(lambda: self.optimizers, views):
                super().setup_optimizers(trainer)
        groups.follow(trainer, self._patches)

    def _recorded_optimizers(self) -> list[tuple[Optimizer, list[list[str]]]]:
        """Return the optimizers, each with the names in its parameter groups over all stages."""
        return [(optimizer, self.run.recorded_groups(optimizer)) for optimizer in self.optimizers]

    def _take_optimizers(self) -> None:
        """Let the present optimizers step on parts of the model; every rank must call it.

        Raises:
            ValueError: On every rank, if an optimizer would compute another step than on one process.
        """
        # Norms first: `check_optimizers` accepts optimizers that take norms over all parts.
        run = self.run
        names = run.parameter_names
        tensor = self.groups.tensor_parallel
        give_norms(self.optimizers, names, run.rules, tensor, self._patches, run.slices)
        needs = check_optimizers(self.optimizers, names, run.rules, run.engine is not None, self.groups.world)
        for group in (tensor, self.groups.gradients):
            checks.check_agreement(self.module, self.optimizers, names, group)
        if run.slices is not None:
            with comm.failing_together(self.groups.world):
                sliced = check_sliced(self.optimizers, run.slices.group.size, may_show=True)
            needs = {each: max(needs[each], sliced[each]) for each in needs}
        if run.host_slices is not None:
            with comm.failing_together(self.groups.world):
                check_on_host(needs)
        run.full_optimizers = [each for each in needs if needs[each] is Needs.MODEL]
        assert run.owners is not None, "`fit` makes them"
        for optimizer in (each for each in needs if needs[each] in (Needs.TENSOR, Needs.TENSORS)):
            run.owners.take(optimizer, self._patches, in_turns=needs[optimizer] is Needs.TENSOR)
        slices = run.slices or run.host_slices
        if slices is not None:
            others = [each for each in needs if each not in run.owners.of]
            divide_optimizers(others, slices, self._patches, self._full_step)

    def _full_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Show full tensors to the step of an optimizer that needs them."""
        watch = self.run.hook_watch
        if watch is None or optimizer not in self.run.full_optimizers:
            return nullcontext()
        return watch.full_step(optimizer)

    def make_reducer(self) -> GradientReducer:
        """Return the reducer that averages the gradients over the replicas, for one `fit`; every rank must call it."""
        run = self.run
        options = {} if run.compression is None else run.compression.reducer_options()
        alike = self.groups.gradients
        return gradient_reducer(self.module, self.groups, alike, run.sharding, run.rules, options, run.gradient_slices)

    @property
    def steps_between_reductions(self) -> int:
        """Optimizer steps from one reduction over the replicas to the next."""
        return 1

    def check_compression(self, compression: Reducer) -> None:
        """Warn of optimizers and parameters that do not go with the compressor."""
        warn_of_misfits(compression, self.module, self.optimizers)

    def _guard_gradients(self) -> None:
        """Let norms and hooks of gradients see the gradients of the full model."""
        run = self.run
        elsewhere = frozenset() if run.engine is None else run.engine.counted_by_others
        norm = ReplicaNorm(self.module, run.rules, self.groups, elsewhere, run.gradient_slices)
        norm.use_everywhere(self._patches)
        if run.sharding is not None:
            tensor = self.groups.tensor_parallel
            give_whole_gradients(self.module, run.sharding, run.rules, tensor, lambda: norm.is_whole, self._patches)
        span_replica(self.precision_plugin, norm, self.root_device, self._patches)

    # ---------------------------------------------------------------------------------------------- loading a file

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Tensors of a checkpoint go into shards and stages, which exist only after `setup`.
        return True

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: Optional[bool] = None) -> dict[str, Any]:
        # Ranks may name the best checkpoint after the metric of their replica, so all ranks take the name of rank 0.
        path = self.broadcast(checkpoint_path)
        self._close_opened()
        # Rank 0 decides for all ranks, because the two ways to load send different messages.
        kind = self.broadcast(_kind_of(str(path)) if self.is_global_zero else "")
        checkpoint = self._open_folder(str(path), kind) if kind else super().load_checkpoint(path, weights_only)
        compression = None if self._run is None else self._run.compression
        if compression is not None:
            compression.restore(checkpoint, path, self.run.rules)
        return checkpoint

    def _close_opened(self) -> None:
        if isinstance(self._opened, SavedCheckpoint):
            self._opened.close()
        self._opened = None

    def _open_folder(self, path: str, kind: str) -> dict[str, Any]:
        reader = SavedCheckpoint if kind == "sharded" else DistributedCheckpoint

        def open_folder() -> tuple[SavedCheckpoint | DistributedCheckpoint, dict[str, Any]]:
            opened = reader.open(path, self.groups.world)
            return opened, opened.checkpoint()

        self._opened, checkpoint = self.together(open_folder)
        return checkpoint

    @override
    @on_parts
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # A rank whose part does not fit must not leave the other ranks waiting in the next collective.
        with comm.failing_together(self.groups.world):
            source = "file" if self._opened is None else str(self._opened.folder)
            part = self.run.checkpoints.scatter_state(checkpoint["state_dict"], source, strict)
            # `part` holds shards already. The hooks of full state dicts would expect full tensors.
            with self.run.state.own_parts():
                self.module.load_state_dict(part, strict=strict)

    @override
    @on_parts
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        run = self.run
        if run.optimizer_groups is not None:
            # Before the load: torch refuses a state with another number of parameter groups.
            run.optimizer_groups.restore(self.module.trainer)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            # Ranks read different parts of a folder, so one rank may fail alone. A file is equal for all ranks.
            with nullcontext() if self._opened is None else comm.failing_together(self.groups.world):
                part = run.checkpoints.scatter_optimizer(state, optimizer, run.recorded_groups(optimizer))
            # Load one optimizer after the other, so that a rank never holds the file's values of several.
            # Torch loads each value to the device of its parameter, which may lack memory for the state.
            on_host = nullcontext() if run.host_slices is None else run.host_slices.taken_off(optimizer)
            with on_host:
                optimizer.load_state_dict(part)
            move_optimizers([optimizer], self._optimizer_device)

    # -------------------------------------------------------------------------------------------------- the steps

    @override
    def on_train_start(self) -> None:
        # Share the seed after the user's hooks, which may seed the generators or draw on some ranks only.
        if self.run.engine is not None:
            self.run.engine.share_seed()

    @override
    def on_validation_start(self) -> None:
        self.run.first_batches.begin_evaluation()
        self.on_train_start()

    on_test_start = on_predict_start = on_validation_start

    @override
    def begin_batch(self, flag: bool) -> bool:
        # In evaluation, replicas may have different numbers of batches, so failures wait for the next training step.
        is_training = self.module.trainer.training
        failed = is_training and self._writer is not None and self._writer.failure is not None
        changed = is_training and self.has_changed
        is_set = super().begin_batch(flag or failed or changed)
        # Replicas meet in training only, so the messages between them keep their own roll calls.
        for order in filter(None, (self.run.state.order, self.run.state.position_order)):
            order.note_meeting()
        if not is_set or not is_training:
            return is_set
        # Ranks learn of a failed save one after the other, and stop at the same step.
        flags, failures, changes = zip(*comm.all_gather_object((flag, failed, changed), self.groups.world))
        if any(failures):
            assert self._writer is not None
            self._writer.wait()
        if any(changes):
            self.adopt_changes()
        return any(flags)

    @override
    def batch_to_device(self, batch: Any, device: Optional[torch.device] = None, dataloader_idx: int = 0) -> Any:
        # No other hook before a step names the loader; a step may not take its index.
        self.run.loader_index = dataloader_idx
        self.note_batch(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def note_batch(self, batch: Any) -> None:
        """Note a batch, which the ranks of a replica compare with their next meeting."""
        # Hash the batch while it is still in host memory: on a device, the host would wait for its values.
        self._content = replicas.content_of(batch, self._content)

    @override
    @in_step
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._begin_step(args, kwargs)
        run = self.run
        if run.steps is not None:
            # Gradients appear in the middle of the schedule; `backward` passes them to the reducer once.
            with (reducer := self._open_reducer).no_sync() as is_last:
                prove = run.first_batches.prover("training_step")
                with self._pass():
                    return run.steps.training_step(args, kwargs, reducer if is_last else None, prove=prove)
        step = super().training_step
        with self._pass(is_last=False), nullcontext() if run.hook_watch is None else run.hook_watch.step():
            output = step(*args, **kwargs)
        # Callbacks may read the output of the step, or logits in the module's attributes, on some ranks only.
        gather_attributes(self.module)
        output = without_pieces(output)
        if self.groups.replica.size > 1:
            output = without_caches(output)
            self._chance.end_step()
        return output

    def _settle(self) -> None:
        """Wait for parameters that are on their way, before other code than a step of training."""
        if self._run is not None and self._run.slices is not None:
            self._run.slices.settle()

    def _pass(self, is_last: bool = True) -> AbstractContextManager[None]:
        slices = self.run.slices
        return nullcontext() if slices is None else slices.in_pass(is_last)

    def _begin_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = self.run
        if self.groups.context_parallel.size > 1:
            refuse_backward_hooks(self.module)
        if run.slices is not None:
            run.slices.widen()  # a closure may have made parameters narrow without a step after it
        if self.has_changed:
            self.adopt_changes()  # since the batch began
        if run.reducer is not None:
            # A hook may have frozen parameters. A bucket waits for all its gradients, and would never be sent. The
            # Trainer may have changed the number of accumulated batches.
            run.reducer.sum_dtype = torch.float32 if self.adds_in_fp32 else None
            run.reducer.refresh()
            if run.engine is not None:
                run.engine.sum_dtype = run.reducer.sum_dtype
        if run.hook_watch is not None:
            run.hook_watch.begin_step()
        if run.compression is not None:
            # Before backward, in which the first buckets are compressed.
            run.compression.prepare_step(self.precision_plugin)
        kinds = None if run.steps is None else run.steps.loss_kinds
        unproven = None if kinds is None else kinds.unproven
        if run.first_batches.see_training(args, kwargs, self.module.current_epoch, unproven) and kinds is not None:
            kinds.unproven = None

    @property
    def adds_in_fp32(self) -> bool:
        """Whether gradients of 16-bit parameters are added in single precision now."""
        engine = self.run.engine
        adds_several = self.module.trainer.accumulate_grad_batches > 1 or (
            engine is not None and engine.schedule.num_microbatches > 1
        )
        return adds_several if self.gradient_sum_dtype is None else self.gradient_sum_dtype == torch.float32

    @property
    def steps_on_host(self) -> bool:
        """Whether optimizers step in host memory."""
        return "optimizer" in self.cpu_offload

    @property
    def _optimizer_device(self) -> torch.device:
        """The device of the state of optimizers."""
        return torch.device("cpu") if self.steps_on_host else self.root_device

    @property
    def _open_reducer(self) -> GradientReducer:
        if self.run.reducer is None:
            raise RuntimeError("Gradients are reduced only during `fit`")
        return self.run.reducer

    @override
    @in_step
    def backward(self, closure_loss: Tensor, optimizer: Optional[Optimizer], *args: Any, **kwargs: Any) -> Tensor:
        run = self.run
        if run.audit is not None and run.steps is None:
            run.audit.check(closure_loss)
        if run.model_watch is not None and run.model_watch.has_new_model:
            self.adopt_changes()  # in the step
        if run.reducer is not None:
            run.reducer.refresh()  # the step may have frozen parameters, as `toggle_optimizer` does
        # These calls repeat Lightning's `Strategy.backward`, which has no place for the reducer.
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.module)
        # Checkpointed code runs again in the backward pass.
        shown = nullcontext() if run.hook_watch is None else run.hook_watch.step()
        with self._pass(), shown, nullcontext() if run.reducer is None else run.reducer.backward():
            if run.steps is not None:
                run.steps.deliver_gradients(self._open_reducer)
            else:
                self.precision_plugin.backward(closure_loss, self.module, optimizer, *args, **kwargs)
        if run.engine is not None and run.reducer is not None and run.reducer.synchronizing:
            # Sum after the means over the replicas: compressed means differ between the owners of a tied parameter.
            run.engine.reduce_tied_gradients()
        if run.reducer is not None and run.reducer.synchronizing and self.module.automatic_optimization:
            # Only now: the owners of a tied parameter add exact sums, too.
            run.reducer.release()
        if run.compression is not None and run.reducer is not None:
            run.compression.drop_nonfinite_gradients(run.reducer, self.precision_plugin)
        # It calls `on_after_backward`, whose hooks must see the mean gradients, as under DDP.
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Optional[Union[LightningModule, nn.Module]] = None,
        **kwargs: Any,
    ) -> Any:
        run = self.run
        if self.has_changed:
            self.adopt_changes()  # since the batch began: an optimizer must be taken before it evaluates its closure
        if run.reducer is not None and run.reducer.in_flight:
            run.reducer.reduce()  # a module under manual optimization called `loss.backward()` by itself
            if run.compression is not None:
                run.compression.drop_nonfinite_gradients(run.reducer, self.precision_plugin)
        if run.reducer is not None and not self.module.automatic_optimization:
            # Not after each backward, to which the next one may add. Otherwise the closure runs the backward.
            run.reducer.release()
        if run.hook_watch is not None:
            closure = run.hook_watch.closure(closure)
        # With slices, parameters become narrow later, inside the optimizer's step; see `ParameterSlices.divide`.
        shown = self._full_step(optimizer) if run.slices is None else nullcontext()
        with nullcontext() if run.hook_watch is None else run.hook_watch.optimizer_step(optimizer), shown:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if run.slices is not None:
            run.slices.widen()  # after a step that was skipped
        self.end_step(optimizer)
        if optimizer not in run.checked_optimizers and self.module.trainer.checkpoint_callbacks:
            # Check after the first step, when the state exists, not after hours at the first save.
            run.checked_optimizers.append(optimizer)
            run.checkpoints.check_keys(optimizer)
            if self.async_saves and len(run.checked_optimizers) == len(self.optimizers):
                self._prepare_saves()
        return output

    def end_step(self, optimizer: Optimizer) -> None:
        """Share values between replicas after a step of `optimizer`."""
        # DistributedDataParallel shares buffers before the forward. After the step, validation uses the same buffers as
        # the next training step.
        replicas.share_buffers(self.module, self.groups.gradients)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        reducer = self.run.reducer
        context: AbstractContextManager = nullcontext() if reducer is None else reducer.no_sync()
        with context:
            yield

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, kwargs)

    @in_step
    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.run
        self._settle()
        if run.is_restored:
            return getattr(super(), name)(*args, **kwargs)  # in `on_fit_end`
        self._end_on_sigterm()
        if self.has_changed:
            self.adopt_changes()  # in a hook before it
        run.first_batches.see_evaluation(name, args, kwargs, run.loader_index)
        if run.steps is not None:
            with self._shared_pass():
                return run.steps.evaluate(name, args, kwargs, prove=run.first_batches.prover(name))
        step = getattr(super(), name)
        with self._shared_pass(), nullcontext() if run.hook_watch is None else run.hook_watch.step():
            output = step(*args, **kwargs)
        if run.state.positions is not None:
            # Callbacks may read outputs, or attributes, on some ranks only.
            gather_attributes(self.module)
            output = without_pieces(output)
        return without_caches(output) if self.groups.replica.size > 1 else output

    @contextmanager
    def _shared_pass(self) -> Generator:
        """Run a step of evaluation inside the block, of which other replicas may have fewer."""
        slices = self.run.slices
        if slices is None or not slices.keeps_slices:
            yield
            return
        _, is_any_over = comm.on_any_rank([True, False], self.groups.gradients)
        with slices.held() if is_any_over else nullcontext(), slices.in_pass():
            yield

    def _serve_steps(self) -> None:
        """Gather parameters for replicas that have more batches of evaluation, after the last batch of this one."""
        slices = self.run.slices
        if self.module.trainer.training or slices is None or not slices.keeps_slices:
            return
        while comm.on_any_rank([False, True], self.groups.gradients)[0]:
            with slices.held():
                pass

    # ------------------------------------------------------------------------------------- what changes during a run

    @property
    def has_changed(self) -> bool:
        """Whether the user's code has changed the model or its optimizers since the last step."""
        run = self._run
        if run is None or run.hook_watch is None or not run.hook_watch.views.is_shown:
            return run is not None and run.has_changed
        with run.hook_watch.paused():
            return run.has_changed

    def agree_on_changes(self) -> None:
        """Adopt changes of any rank; every rank must call it."""
        if comm.on_any_rank([self.has_changed], self.groups.world)[0]:
            self.adopt_changes()

    @on_parts
    def adopt_changes(self) -> None:
        """Continue with the changed model and optimizers; every rank must call it.

        Raises:
            ValueError: On every rank, if a change cannot be adopted.
        """
        run = self.run
        watch = run.model_watch
        assert watch is not None, "a watch found the changes"
        self._settle()
        found = watch.differences() if watch.has_new_model else None
        with comm.failing_together(self.groups.world):
            if found is not None:
                reason = f"`{type(self).__name__}` keeps the values of each replica from the last mean."
                run.refuse_changes(found, reason if self.keeps_parameters else "")
        # Pipeline stages hold different modules. Without a pipeline, all ranks must make the same changes.
        mine = (watch.has_new_optimizers, None if found is None else found.summary())
        everyone = comm.all_gather_object(mine, self.groups.world)
        if run.engine is None and any(changes != everyone[0] for changes in everyone):
            raise ValueError(
                f"All ranks must change the model and its optimizers alike; got {everyone[0]} on rank 0 and"
                f" {[changes for changes in everyone if changes != everyone[0]][0]} on another rank. Make the same"
                " change on every rank, without a condition on the rank [LP031]"
            )
        if found is not None:
            run.adopt(found)
            if run.slices is not None and not run.slices.keeps_slices:
                gather_late(run.slices, self.module)
        # If any stage has changed: all ranks must prepare their optimizers together.
        if run.reducer is not None and any(has_new or changes is not None for has_new, changes in everyone):
            self._take_optimizers()
            run.checkpoints.check_groups(self.optimizers, run.recorded_groups)
            replicas.share_plateau_metrics(self.lr_scheduler_configs, self.groups.data_parallel)
        watch.begin()

    # ------------------------------------------------------------------------------------------------ saving a file

    @property
    def is_sharded(self) -> bool:
        """Whether checkpoints are written as folders."""
        return self.checkpoint_format == "sharded"

    @property
    def async_saves(self) -> bool:
        """Whether training goes on while checkpoints are written."""
        return self.is_sharded and (self.async_save or isinstance(self.checkpoint_io, AsyncCheckpointIO))

    @property
    def differing(self) -> frozenset[str]:
        """Kinds of values that may differ between replicas now: some of `parameter`, `buffer` and `optimizer`."""
        return frozenset() if self._run is None or self._run.slices is None else frozenset({"optimizer"})

    @property
    def _saved(self) -> Checkpoints:
        return replace(self.run.checkpoints, as_parts=self.is_sharded)

    @override
    @on_parts
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict; called on every rank.

        Returns:
            Values on rank zero only. For a sharded checkpoint, tensors without data that know the part of this rank.
        """
        run = self.run
        self._settle()
        if not run.is_restored:
            self.agree_on_changes()
        if not self.is_sharded:
            state = self.full_state_dict()
            run.last_state = weakly(state)
            self._share_with_hooks(state)
            return state
        if run.is_restored:
            return as_parts(self.module.state_dict(), self.is_global_zero)
        return self._saved.gather_state()

    def full_state_dict(self) -> dict[str, Any]:
        """Return the full state dict, values on rank zero only; called on every rank."""
        return self.module.state_dict() if self.run.is_restored else self.run.checkpoints.gather_state()

    @override
    @on_parts
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of `optimizer` with full tensors, see `lightning_module_state_dict`."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = self._saved.gather_optimizer(inner, self.run.recorded_groups(inner))
        if "state" not in state:
            return state  # an optimizer with other keys; every rank has the full state
        values = {(index, key): value for index, entry in state["state"].items() for key, value in entry.items()}
        if not self.is_sharded and self._share_with_hooks(values):
            for (index, key), value in values.items():
                # `_share_with_hooks` has replaced the tensors in the flat dict only.
                state["state"][index][key] = value
        return state

    def _share_with_hooks(self, values: dict[Any, Any]) -> bool:
        """Send values from rank zero to every rank if a hook of the user reads them and they are small.

        Returns:
            Whether every rank has the values now.
        """
        trainer = self.module.trainer
        callbacks = [one for one in trainer.callbacks if is_a(one, Callback)]  # type: ignore[attr-defined]
        owners = [(self.module, LightningModule), *((one, Callback) for one in callbacks)]
        looks = any(
            is_users(type(owner)) and is_overridden("on_save_checkpoint", owner, parent=kind) for owner, kind in owners
        )
        tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        if not looks or sum(value.nbytes for value in tensors.values()) > EVERYWHERE_BYTES:
            return False
        share_tensors(tensors, self.groups.world, self.root_device)
        values.update(tensors)
        return True

    @override
    @on_parts
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any = None) -> None:
        run = self.run
        self._settle()
        if run.hook_watch is not None:
            run.hook_watch.gather_saved(checkpoint)
        path, is_apart = self.path_of_parts(filepath)
        if run.compression is not None:
            # Every rank writes its state before the checkpoint, which rank 0 may write alone.
            run.compression.save(checkpoint, path, run.rules, self.is_sharded)
        if not self.is_sharded:
            self._put_full_copies(checkpoint)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        left_out = self._sharded_writer().save(checkpoint, path, storage_options, is_apart)
        if is_apart:
            self._sharded_writer().wait()  # the upload is next
        if left_out:
            rank_zero_warn(
                f"The checkpoint leaves out {', '.join(f'`{name}`' for name in left_out)}: a sharded checkpoint"
                " holds only numbers, text and tensors. `self.save_hyperparameters(ignore=[...])` leaves them out."
            )
        if self.module.trainer.state.status != TrainerStatus.RUNNING:
            # After a run no later hook waits for the writer.
            self.end_saves()
        self.together(lambda: self.save_beside(filepath))

    def _prepare_saves(self) -> None:
        """Make the memory for the copies of the first save while training goes on; the same call on all ranks."""
        callbacks = self.module.trainer.checkpoint_callbacks
        only_weights = all(getattr(one, "save_weights_only", False) for one in callbacks)
        moments = [] if only_weights else [self.optimizer_state(one) for one in self.optimizers]
        # Only the parts count. `lightning_module_state_dict` of local steps would exchange the drifts out of turn.
        self._settle()
        self._sharded_writer().prepare({"state_dict": self._saved.gather_state(), "optimizer_states": moments})

    def _sharded_writer(self) -> ShardedWriter:
        if self._writer is None:
            mesh = self.mesh
            layout: dict[str, int] = {axis: mesh.size(axis) for axis in AXES}
            group = self.groups.world
            if self.async_saves:
                # The writer's thread needs a group that the main thread does not use meanwhile.
                with all_processes_as_default():
                    group = self.groups.between_hosts("checkpoint")
            self._writer = ShardedWriter(group, layout, self.async_saves, rank_zero_info)
        return self._writer

    def _put_full_copies(self, checkpoint: dict[str, Any]) -> None:
        """Replace modules of the hyperparameters by full copies; every rank must call it."""
        run = self.run
        # Strong references, so that no tensor disappears while the copies are made.
        known, run.last_state = dict(run.last_state), weakly({})
        if run.is_restored:
            return
        writes = self.is_global_zero
        found = self.together(lambda: writes and holds_modules(checkpoint, self.module))
        if self.broadcast(found):
            gather = run.checkpoints.gather_tensors
            self.together(lambda: put_full_copies(checkpoint, self.module, known, gather, writes))

    @override
    def save_beside(self, filepath: PathLike) -> None:
        if self.is_global_zero and self.run.engine is not None:
            save_plan(self.run.engine.plan, filepath)

    @override
    def remove_checkpoint(self, filepath: PathLike) -> None:
        if not self.is_global_zero:
            return
        if self._writer is not None:
            self._writer.remove(str(filepath))
            self.remove_beside(filepath)
        else:
            super().remove_checkpoint(filepath)

    @override
    def remove_beside(self, filepath: PathLike) -> None:
        remove_rank_files(filepath)

    def end_saves(self) -> None:
        """Wait for the background writer, at the end of a run.

        Raises:
            Exception: On every rank, if a checkpoint could not be written, unless another error has ended the run.
        """
        self._close_opened()
        writer, self._writer = self._writer, None
        if writer is None:
            return
        # It waits for the thread, which sets `failure` at the end of a save.
        writer.close()
        failure = writer.failure
        if failure is None:
            return
        # After an interruption, `raise` would hide the error that has ended the run.
        if self.module.trainer.state.status != TrainerStatus.INTERRUPTED:
            raise failure
        rank_zero_warn(f"A checkpoint could not be written: {failure}")

    # --------------------------------------------------------------------------------------------------- the end

    @property
    def _is_running(self) -> bool:
        module = self.lightning_module
        return self._groups is not None and module is not None and module.trainer.state.status == TrainerStatus.RUNNING

    @override
    def teardown(self) -> None:
        run = self._run
        if self._is_running:
            self.meet_at_end()  # a hook may have failed on one rank alone
            self.agree_on_changes()  # of the last hooks
        if run is not None:
            run.close()
        self._patches.undo()
        if run is not None and run.slices is not None:
            if self._is_running and run.slices.keeps_slices:
                inventory = Inventory.of(self.module, run.rules, self.groups.pipeline_parallel)
                if keeps_full(inventory, self.gather_after_fit):
                    run.slices.restore()
            run.slices.close()
        if run is not None and run.host_slices is not None:
            run.host_slices.close()
        # Before the groups and the module change: the writer's thread still communicates and reads tensors.
        self.end_saves()
        module = self.lightning_module
        if run is not None and module is not None and self._groups is not None and not run.is_restored:
            run.is_restored = end_run(module, run.checkpoints, self._groups, self.gather_after_fit)
        if module is not None and any(map(_is_without_data, module.parameters())):
            # The run was refused before the module got its data, or each replica keeps a slice. Lightning would move
            # the module to the CPU, which fails or makes the full model.
            self._patches.replace(module, "cpu", lambda: module)
        if module is not None:
            recompute(module, "off")
        try:
            super().teardown()
        finally:
            # After the collectives of the last save: until here, the heartbeat tells which rank is lost.
            stop_heartbeat()
        self._patches.undo()


def _is_without_data(parameter: nn.Parameter) -> bool:
    return parameter.is_meta or is_deferred(parameter) or isinstance(parameter, AbsentParameter)


def _kind_of(path: str) -> str:
    """Return the kind of folder at `path`: "sharded", "distributed", or "" for a file."""
    if is_distributed_checkpoint(path):
        return "distributed"
    # Open a folder without a checkpoint, too, so that the error names the folder.
    folder = Folder.at(path)
    return "sharded" if folder.fs.isdir(folder.path) or is_sharded_checkpoint(path) else ""
