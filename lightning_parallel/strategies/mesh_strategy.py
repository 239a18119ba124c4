"""Base class of the mesh strategies: implements the hooks that the Trainer calls.

The order of a run is `setup_environment` (processes, groups) -> `setup` (parallelizes the model, see `setup.py`) ->
`training_step` -> `backward` -> `optimizer_step` -> `save_checkpoint` -> `teardown`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Optional, Union, get_args

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import stop_heartbeat
from lightning_parallel.compat import ParallelState, Patches
from lightning_parallel.compat.lightning import (
    early_optimizers,
    log_without_advice,
    move_optimizers,
    reset_optimizers,
    synchronizes_layers,
    tell,
)
from lightning_parallel.compat.torch import explain_swaps, give_data
from lightning_parallel.compression import Reducer, check_reducer
from lightning_parallel.compression.compressor import check_flag
from lightning_parallel.data_parallel import GradientReducer, ParameterSlices
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.pipeline.microbatch import without_caches
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.planner.rank_memory import optimizer_copies
from lightning_parallel.strategies import checks
from lightning_parallel.strategies.compressed.advice import tell_costs, warn_of_misfits
from lightning_parallel.strategies.compressed.mesh import MeshCompression, gradient_reducer
from lightning_parallel.strategies.compressed.nodes import Hierarchical, check_hierarchical
from lightning_parallel.strategies.compressed.state_files import KeptState, check_kept_state
from lightning_parallel.strategies.deferred.init import deferred_init, materialize_owned, move_to_meta
from lightning_parallel.strategies.deferred.tensor import is_deferred
from lightning_parallel.strategies.hooks.changes import (
    Differences,
    ModelWatch,
    refuse_in_shards,
    refuse_in_stages,
    refuse_new_parameters,
)
from lightning_parallel.strategies.hooks.watch import HookWatch, WatchedHook
from lightning_parallel.strategies.mesh_checkpoints import CheckpointFormat, MeshCheckpoints
from lightning_parallel.strategies.optimizers.checks import WholeGroups, check_optimizers
from lightning_parallel.strategies.optimizers.norms import ReplicaNorm, give_norms, span_replica
from lightning_parallel.strategies.optimizers.zero import (
    ZeroStage,
    check_zero_stage,
    divide_optimizers,
    follow_other_steps,
    make_slices,
)
from lightning_parallel.strategies.ranks import replicas
from lightning_parallel.strategies.ranks.order import in_step
from lightning_parallel.strategies.ranks.processes import StartMethod
from lightning_parallel.strategies.self_check.proof import FirstBatches, Verify
from lightning_parallel.strategies.self_check.runs import StepRuns
from lightning_parallel.strategies.setup.divide import (
    PipelineOptions,
    TensorOptions,
    cut_stages,
    shard_tensors,
)
from lightning_parallel.strategies.setup.tables import show_stages
from lightning_parallel.strategies.steps.effects import side_effects_discarded
from lightning_parallel.strategies.steps.pipeline import PipelineSteps
from lightning_parallel.strategies.whole.between_runs import GatherAfterFit, divide_again, end_run
from lightning_parallel.strategies.whole.full_state import hold_averages, open_outside
from lightning_parallel.strategies.whole.skeleton import close_skeleton, keep_skeleton
from lightning_parallel.tensor.audit import StepAudit
from lightning_parallel.tensor.logits import has_divided_logits, whole_logits
from lightning_parallel.tensor.plan import Sharding
from lightning_parallel.tensor.sharding import Shard
from lightning_parallel.tensor.whole_gradients import give_whole_gradients

__all__ = ["MeshStrategy"]


class MeshStrategy(MeshCheckpoints):
    """Divides a LightningModule over a mesh of processes.

    Args:
        sizes: Ranks along each axis, or `"auto"`.
        tensor: How layers are sharded.
        pipeline: How layers are split into stages; None without a pipeline axis.

    The other arguments are those of `HybridParallelStrategy`.
    """

    def __init__(
        self,
        sizes: Mapping[Axis, Size],
        tensor: TensorOptions,
        pipeline: Optional[PipelineOptions],
        *,
        compression: Optional[Reducer] = None,
        compressor_state: KeptState = "local",
        hierarchical: Hierarchical = False,
        zero_stage: ZeroStage = 0,
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
        check_flag("async_save", async_save)
        self.set_checkpoint_format(checkpoint_format, async_save)
        if verify not in ("auto", "always", "off"):
            raise ValueError(f"`verify` must be 'auto', 'always' or 'off'; got {verify!r}")
        if gather_after_fit not in get_args(GatherAfterFit):
            names = ", ".join(map(repr, get_args(GatherAfterFit)))
            raise ValueError(f"`gather_after_fit` must be one of {names}; got {gather_after_fit!r}")
        if compression is not None:
            check_reducer(compression)
        check_kept_state(compressor_state)
        check_hierarchical(hierarchical, compression)
        check_zero_stage(zero_stage, compression)
        self.compression = compression
        self.kept_state = compressor_state
        self.hierarchical = hierarchical
        self.zero_stage = zero_stage
        self.verify = verify
        self.gather_after_fit = gather_after_fit
        self.tensor_options = tensor
        self.pipeline_options = pipeline
        self._sharding: Sharding | None = None
        self._reducer: GradientReducer | None = None
        self._steps: PipelineSteps | None = None
        self._patches = Patches()
        self._first_batches: FirstBatches | None = None
        self._loader_index, self._is_first_batch = 0, True
        self._audit: StepAudit | None = None
        self._shows_stages = False

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshStrategy:
        # Code copies what it holds, and by way of a Trainer that is the strategy. What the library has made for a run,
        # such as process groups, is for this process and shared; all else is copied, as of a strategy of Lightning.
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        is_used = self._groups is not None
        for name, value in vars(self).items():
            is_made_here = type(value).__module__.partition(".")[0] == __name__.partition(".")[0]
            vars(duplicate)[name] = value if is_used and is_made_here else copy.deepcopy(value, memo)
        return duplicate

    # ------------------------------------------------------------------------------------------------- the model

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Now that the ranks have met: one that raised by itself, and left, would be all that the others tell of.
        with comm.failing_together(self.groups.world):
            if self.mesh.pipeline_parallel > 1:
                checks.check_pipeline_module(self.module)
            checks.check_callbacks(self.module.trainer, self.groups.replica.size)
        asks_for_replicas = self.is_for_replicas or self.zero_stage or self.compression is not None
        if self.mesh.data_parallel == self.mesh.world_size > 1 and not asks_for_replicas:
            tell(
                f"`{type(self).__name__}` runs {self.mesh.world_size} replicas of the full model, as DDP does. Set"
                " `tensor_parallel_size` or `pipeline_parallel_size` to shard or split it."
            )
        hold_averages(self.module.trainer, self._patches)
        if self.groups.replica.size > 1:
            give_data(self._patches)
            explain_swaps(self._patches)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        module, fitting = self.module, trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        self._end_on_sigterm = self.keep_together(trainer, self._patches)
        if not self.is_distributed:
            log_without_advice(self._patches)
        divide_again(module, self.groups, self.root_device)
        self._is_restored = False
        if synchronizes_layers(self) and fitting:
            # Before the model is planned, since this replaces modules.
            replicas.synchronize_batch_norm(module, self.groups.data_parallel)
        # Entered again, so that a cast of deferred parameters is recorded, too.
        with deferred_init(self.root_device):
            self.precision_plugin.convert_module(module)
        self.parallelize(module)
        if (order := ParallelState.of(module).order) is not None:
            order.chance = self._chance if self.engine is None else None
        self.model_to_device()
        # Each replica has built its own model, perhaps from other random numbers.
        replicas.start_equal(module, self.groups.data_parallel)
        replicas.scope_metrics(module, self.groups)
        replicas.compute_at_end_of_epochs(trainer, self.groups.data_parallel, self._patches)
        open_outside(module, self.groups, self.checkpoints, self._patches)
        self._compression = None
        if fitting:
            kept, drifts = self.kept_state, self.compresses_drifts
            self._compression = MeshCompression.of(
                self.compression, module, self.groups, kept, drifts, self.hierarchical, self.node_rank
            )
            self.setup_optimizers(trainer)
            self.check_optimizers()
            self._reducer = self.make_reducer()
            if self.compression is not None and self._compression is not None:
                sizes = self._compression.replicas_and_owners
                tell_costs(self.compression, module, *sizes, self.steps_between_reductions)
                self.check_compression(self.compression)
            self._is_first_batch = True
            self._audit = None if self._sharding is None else StepAudit(module, self._sharding, self.verify != "off")
        self._first_batches = FirstBatches(self.groups, self.verify, self._step_runs)
        self.setup_precision_plugin()
        elsewhere = frozenset() if self.engine is None else self.engine.counted_by_others
        norm = ReplicaNorm(module, self._rules, self.groups, elsewhere, self._gradient_slices)
        norm.use_everywhere(self._patches)
        if self._sharding is not None:
            tensor = self.groups.tensor_parallel
            give_whole_gradients(module, self._sharding, self._rules, tensor, lambda: norm.is_whole, self._patches)
        span_replica(self.precision_plugin, norm, self.root_device, self._patches)
        if self.groups.replica.size > 1 or self._slices is not None:
            self._hook_watch = HookWatch(module, self._rules, self.groups, self._slices, lambda: self.optimizers)
            self._hook_watch.install(self._patches)
        if fitting:
            move_optimizers(self.optimizers, self.root_device)
            replicas.share_plateau_metrics(self.lr_scheduler_configs, self.groups.data_parallel)
        if self._shows_stages and self.engine is not None:
            copies = optimizer_copies(self.optimizers) if fitting else 1
            count = self.groups.data_parallel.size if fitting else 1
            show_stages(self.engine.plan, copies, count, self.zero_stage)
            self._shows_stages = False
        self._watch = ModelWatch(module, lambda: self.optimizers)

    def parallelize(self, module: LightningModule) -> None:
        """Divide `module` in place, layers first, runs of layers second; both are kept from run to run."""
        if self.groups.replica.size > 1 and ParallelState.of(module).pending is None:
            with comm.failing_together(self.groups.world):
                checks.check_parameters(module)
        held = move_to_meta(module, self.root_device)
        if self.groups.replica.size > 1:
            keep_skeleton(module)
        self._sharding = shard_tensors(module, self.tensor_options, self.groups)
        self._rules = ParallelState.of(module).rules

        def materialize(plan: PipelinePlan | None) -> None:
            materialize_owned(module, self.root_device, self.groups, self._sharding, plan, held, self._built_apart)

        if self.pipeline_options is None or self.groups.pipeline_parallel.size == 1:
            materialize(None)
            close_skeleton(module)
            return
        steps = PipelineSteps(module, self.pipeline_options, self.precision_plugin, self.root_device)
        is_new = ParallelState.of(module).engine is None
        # The analysis runs the user's steps: what they log and remember is not of the run.
        fits = module.trainer.state.fn == TrainerFn.FITTING
        with side_effects_discarded(module), early_optimizers(self, module) if fits else nullcontext():
            self.engine = cut_stages(
                module,
                self.pipeline_options,
                self.groups,
                self.root_device,
                lambda: steps.example(module.trainer),
                materialize,
            )
        doubt = ParallelState.of(module).doubt
        if doubt is not None and self.verify == "off":  # else the self-check looks into it
            rank_zero_warn(doubt[1])
        steps.bind(self.engine, self._patches)
        self._steps = steps
        self._shows_stages = is_new
        close_skeleton(module)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        # A second `fit` would add its optimizers to those of the first.
        reset_optimizers(self)
        failure: Exception | None = None
        try:
            self._build_optimizers(trainer)
        except Exception as error:
            failure = error
        # A stage whose `configure_optimizers` fails would leave the others waiting in the next collective.
        comm.raise_together(failure, self.groups.world)

    def _build_optimizers(self, trainer: Trainer) -> None:
        self._whole = WholeGroups(self.module, self._rules, self.groups.pipeline_parallel, self.root_device)
        if self.groups.replica.size == 1:
            super().setup_optimizers(trainer)
        else:
            # It makes copies of parameters, and reads them, as hooks do.
            watch = HookWatch(self.module, self._rules, self.groups, None, lambda: ())
            hook = WatchedHook(f"`{type(self.module).__name__}.configure_optimizers`", watch.group)
            with watch.watching(hook), self._whole.shown(lambda: self.optimizers, watch):
                super().setup_optimizers(trainer)
        self._whole.follow(trainer, self._patches)

    compresses_drifts = False
    """Of parameters, instead of gradients."""

    is_for_replicas = False
    """Whether a run of replicas only is expected, and is not told."""

    @property
    def steps_between_reductions(self) -> int:
        """Optimizer steps from one reduction over the replicas to the next."""
        return 1

    def check_compression(self, compression: Reducer) -> None:
        """Warn of what does not go with the compressor."""
        warn_of_misfits(compression, self.module, self.optimizers)

    def make_reducer(self) -> GradientReducer:
        """Return what averages the gradients over the replicas, for one `fit`; every rank must call it."""
        options = {} if self._compression is None else self._compression.reducer_options()
        data = self.groups.data_parallel
        slices = self._gradient_slices
        return gradient_reducer(self.module, self.groups, data, self._sharding, self._rules, options, slices)

    @property
    def _gradient_slices(self) -> ParameterSlices | None:
        return self._slices if self.zero_stage == 2 else None

    def check_optimizers(self) -> None:
        """Refuse optimizers that would compute something else than on one process."""
        self._slices = make_slices(self.zero_stage, self.module, self.groups)
        if self._slices is not None:
            follow_other_steps(self._slices, self.groups.world, self._patches)
        self._take_optimizers()

    def _take_optimizers(self) -> None:
        """Let the optimizers that there are now step on parts of the model; every rank must call it.

        Raises:
            ValueError: On every rank, if one would compute something else than on one process.
        """
        tensor = self.groups.tensor_parallel
        give_norms(self.optimizers, self.parameter_names, self._rules, tensor, self._patches, self._slices)
        check_optimizers(self.optimizers, self.parameter_names, self._rules, self.engine is not None, self.groups.world)
        for group in (self.groups.tensor_parallel, self.groups.data_parallel):
            checks.check_agreement(self.module, self.optimizers, self.parameter_names, group)
        if self._slices is not None:
            divide_optimizers(self.optimizers, self._slices, self.groups.world, self._patches)

    # ------------------------------------------------------------------------------------- what changes during a run

    keeps_parameters = False
    """Whether the strategy keeps something of each parameter, so that none may come or go."""

    _watch: ModelWatch | None = None
    _saved_optimizers: tuple[Optimizer, ...] = ()
    _hook_watch: HookWatch | None = None
    _past_watch: HookWatch | None = None

    @override
    def check_saved(self, checkpoint: Mapping[str, Any]) -> None:
        watch = self._hook_watch or self._past_watch
        if watch is not None:
            watch.check_saved(checkpoint)

    @property
    @override
    def has_changed(self) -> bool:
        return self._watch is not None and self._watch.is_changed

    @property
    def _is_running(self) -> bool:
        module = self.lightning_module
        return self._groups is not None and module is not None and module.trainer.state.status == TrainerStatus.RUNNING

    @override
    def adopt_changes(self) -> None:
        watch = self._watch
        assert watch is not None
        found = watch.differences() if watch.has_new_model else None
        failure: Exception | None = None
        try:
            if found is not None:
                self._check_changes(found)
        except ValueError as error:
            failure = error
        comm.raise_together(failure, self.groups.world)
        mine = (watch.has_new_optimizers, None if found is None else found.summary())
        everyone = comm.all_gather_object(mine, self.groups.world)
        if self.engine is None and any(changes != everyone[0] for changes in everyone):
            raise ValueError(
                f"All ranks must change the model and its optimizers alike; got {everyone[0]} on rank 0 and"
                f" {[changes for changes in everyone if changes != everyone[0]][0]} on another rank. Make the same"
                " change on every rank, without a condition on the rank [LP031]"
            )
        if found is not None:
            self._adopt_model(found)
        if self._reducer is not None and (found is not None or any(has_new for has_new, _ in everyone)):
            self._take_optimizers()
            self.checkpoints.check_groups(self.optimizers, self._recorded_groups)
            replicas.share_plateau_metrics(self.lr_scheduler_configs, self.groups.data_parallel)
        watch.begin()

    def _check_changes(self, found: Differences) -> None:
        """Refuse what cannot be adopted.

        Raises:
            ValueError: If there is something.
        """
        if self.engine is not None:
            intercepted = set(map(id, self.engine.model.sites.intercepted))
            refuse_in_stages(found, self.engine.plan.container, lambda child: id(child) in intercepted)
        if self._sharding is not None:
            refuse_in_shards(found, self._sharding, dict(self.module.named_modules(remove_duplicate=False)))
        if self.keeps_parameters:
            refuse_new_parameters(
                found, f"`{type(self).__name__}` keeps the values of each replica from the last mean."
            )
        if self._compression is not None and self._compression.nodes is not None:
            refuse_new_parameters(found, "`hierarchical` gives each replica of a node a part of them.")

    def _adopt_model(self, found: Differences) -> None:
        module, state = self.module, ParallelState.of(self.module)
        if self.engine is not None:
            return  # nothing that holds parameters
        # Copies of what is sharded, such as teachers, are sharded, too; by the names that the others are known by.
        originals = {} if state.copies is None else state.copies.originals_of(found.come_modules)
        copies = {new: state.rules[old] for new, old in originals.items() if old in state.rules}
        for group, are_copies in ((self.groups.world, False), (self.groups.data_parallel, True)):
            new = [value for name, value in found.come.items() if (name in copies) is are_copies]
            replicas.start_equal(nn.ParameterList(new), group)
        if self._sharding is not None:
            self._sharding = state.sharding = self._sharding.without(found.gone, found.gone_modules)
            for name in found.gone:
                state.rules.pop(name, None)
            state.rules.update(copies)
            self._sharding = state.sharding = self._sharding.with_copies(originals)
            self._audit = StepAudit(module, self._sharding, self.verify != "off")
        if state.whole is not None:
            state.whole.adopt(lambda child: None if state.copies is None else state.copies.change_of(child))
        if state.full_states is not None:
            state.full_states.adopt(module, self.groups)
        # As before the first step: what is new was neither watched nor compared with one process.
        self._is_first_batch = True
        self._first_batches = FirstBatches(self.groups, self.verify, self._step_runs)
        parameters = dict(module.named_parameters())
        if self._slices is not None:
            self._slices.adopt(parameters)
            if self.zero_stage == 2:
                self._slices.keep_states_whole(module)
        if self._reducer is not None:
            partial = None if self._sharding is None else self._sharding.partial
            self._reducer.adopt(parameters, partial)

    @property
    def sharding(self) -> Optional[Sharding]:
        """What was divided how; None before the first run, and with one tensor-parallel rank."""
        return self._sharding

    @property
    def reducer(self) -> Optional[GradientReducer]:
        """What averages the gradients over the replicas; None outside of `fit`."""
        return self._reducer

    @property
    def rules(self) -> Mapping[str, Shard]:
        """How the module's tensors are sharded over the tensor axis, by name."""
        return self._rules

    @property
    def parameter_names(self) -> dict[int, str]:
        """Name of each parameter of the module, by `id`."""
        return {id(parameter): name for name, parameter in self.module.named_parameters()}

    @override
    def teardown(self) -> None:
        if self._is_running:
            self.meet_at_end()  # a hook may have failed on one rank alone
            self.agree_on_changes()  # of the last hooks
        self._watch = None
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        if self._hook_watch is not None:
            self._hook_watch.close()
            self._past_watch, self._hook_watch = self._hook_watch, None
        self._saved_optimizers = ()
        self._patches.undo()
        if self._slices is not None:
            self._slices.close()
        self.end_saves()
        module = self.lightning_module
        if module is not None and self._groups is not None:
            self._is_restored = end_run(module, self.checkpoints, self._groups, self.gather_after_fit)
        stop_heartbeat()
        if module is not None and any(value.is_meta or is_deferred(value) for value in module.parameters()):
            # Refused before it got its data. Lightning would move it to the CPU, which fails or makes the whole model.
            self._patches.replace(module, "cpu", lambda: module)
        super().teardown()
        self._patches.undo()

    # -------------------------------------------------------------------------------------------------- the steps

    @override
    @in_step
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._begin_step(args, kwargs)
        # To watch every function slows a step down several times; the graph is checked in `backward`.
        audit = self._audit if self._is_first_batch else None
        self._is_first_batch = False
        if self._steps is not None:
            # Gradients appear in the middle of the schedule; `backward` will hand them to the reducer, once.
            with (reducer := self._open_reducer).no_sync() as is_last:
                return self._steps.training_step(args, kwargs, audit, reducer if is_last else None)
        step = super().training_step
        watch = None if self.module.automatic_optimization else self._hook_watch
        with nullcontext() if watch is None else watch.manual_step():
            output = (step if audit is None else audit.wrap(step))(*args, **kwargs)
        # Callbacks may look at what the step returns, or keeps in the module, on some ranks only.
        kept = vars(self.module)
        for name in [name for name, value in kept.items() if has_divided_logits(value)]:
            kept[name] = whole_logits(kept[name])
        output = whole_logits(output)
        if self.groups.replica.size > 1:
            output = without_caches(output)
        if self._chance is not None and self.groups.replica.size > 1:
            self._chance.end_step()
        return output

    @override
    def on_train_start(self) -> None:
        # After the user's hooks, which may seed the generators, or have drawn numbers on some ranks only.
        if self.engine is not None:
            self.engine.share_seed()

    @override
    def on_validation_start(self) -> None:
        assert self._first_batches is not None
        self._first_batches.begin_evaluation()
        self.on_train_start()

    on_test_start = on_predict_start = on_validation_start

    def _step_runs(self) -> StepRuns:
        return StepRuns(
            ParallelState.of(self.module).whole,
            self.groups,
            self._rules,
            self._sharding,
            self._steps,
            self._reducer,
            self.precision_plugin,
            self.root_device,
        )

    def _begin_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._slices is not None:
            self._slices.widen()  # of a closure whose gradients were not used
        if self.has_changed:
            self.adopt_changes()  # since the batch began
        if self._reducer is not None:
            self._reducer.refresh()
        if self._hook_watch is not None:
            self._hook_watch.begin_step()
        if self._compression is not None:
            self._compression.prepare_step(self.precision_plugin)
        assert self._first_batches is not None
        kinds = None if self._steps is None else self._steps.loss_kinds
        unproven = None if kinds is None else kinds.unproven
        if self._first_batches.see_training(args, kwargs, self.module.current_epoch, unproven) and kinds is not None:
            kinds.unproven = None

    @override
    def batch_to_device(self, batch: Any, device: Optional[torch.device] = None, dataloader_idx: int = 0) -> Any:
        # The one hook before a step that always names the loader; a step may not take its index.
        self._loader_index = dataloader_idx
        # Before it is on the device.
        self._content = replicas.content_of(batch, self._content)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, kwargs)

    @property
    def _open_reducer(self) -> GradientReducer:
        if self._reducer is None:
            raise RuntimeError("Gradients are reduced only during `fit`")
        return self._reducer

    @in_step
    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_restored:
            return getattr(super(), name)(*args, **kwargs)  # in `on_fit_end`
        self._end_on_sigterm()
        if self.has_changed:
            self.adopt_changes()  # in a hook before it
        assert self._first_batches is not None
        self._first_batches.see_evaluation(name, args, kwargs, self._loader_index)
        if self._steps is not None:
            return self._steps.evaluate(name, args, kwargs)
        output = getattr(super(), name)(*args, **kwargs)
        return without_caches(output) if self.groups.replica.size > 1 else output

    @override
    @in_step
    def backward(self, closure_loss: Tensor, optimizer: Optional[Optimizer], *args: Any, **kwargs: Any) -> Tensor:
        if self._audit is not None and self._steps is None:
            self._audit.check_loss(closure_loss, self.module.current_epoch)
        if self._watch is not None and self._watch.has_new_model:
            self.adopt_changes()  # in the step
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.module)
        with nullcontext() if self._reducer is None else self._reducer.backward():
            if self._steps is not None:
                self._steps.deliver_gradients(self._open_reducer)
            else:
                self.precision_plugin.backward(closure_loss, self.module, optimizer, *args, **kwargs)
        if self.engine is not None and self._reducer is not None and self._reducer.synchronizing:
            # After the means over the replicas: compressed ones differ between the owners of a tied parameter.
            self.engine.reduce_tied_gradients()
        if self._compression is not None and self._reducer is not None:
            self._compression.drop_nonfinite_gradients(self._reducer, self.precision_plugin)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.module)
        self.post_backward(closure_loss)
        if self._hook_watch is not None:
            self._hook_watch.follow_backward()
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Optional[Union[LightningModule, nn.Module]] = None,
        **kwargs: Any,
    ) -> Any:
        if self.has_changed:
            self.adopt_changes()  # since the batch began: an optimizer must be taken before it evaluates its closure
        if self._reducer is not None and self._reducer.in_flight:
            self._reducer.reduce()  # a module under manual optimization called `loss.backward()` by itself
            if self._compression is not None:
                self._compression.drop_nonfinite_gradients(self._reducer, self.precision_plugin)
        with nullcontext() if self._hook_watch is None else self._hook_watch.optimizer_step(optimizer):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._slices is not None:
            self._slices.widen()  # of a step that was skipped
        self.end_step(optimizer)
        if self._hook_watch is not None:
            self._hook_watch.settle()
        if optimizer not in self._saved_optimizers and self.module.trainer.checkpoint_callbacks:
            # Now, and not after hours, when they are saved.
            self._saved_optimizers = (*self._saved_optimizers, optimizer)
            self.checkpoints.check_keys(optimizer)
        return output

    def end_step(self, optimizer: Optimizer) -> None:
        """Do what replicas do together after a step of `optimizer`."""
        # As DistributedDataParallel does, but after the step: validation sees what the next training step will.
        replicas.share_buffers(self.module, self.groups.data_parallel)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        context: AbstractContextManager = nullcontext() if self._reducer is None else self._reducer.no_sync()
        with context:
            yield
