"""Holds the objects that a mesh strategy makes for one run of the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.checkpoint import Checkpoints, Inventory, ModelNames
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat import ParallelState
from lightning_parallel.data_parallel import GradientReducer, ParameterSlices
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.strategies.compressed.mesh import MeshCompression
from lightning_parallel.strategies.hooks.changes import (
    Differences,
    ModelWatch,
    refuse_in_shards,
    refuse_in_stages,
    refuse_new_parameters,
)
from lightning_parallel.strategies.hooks.watch import HookWatch
from lightning_parallel.strategies.optimizers.checks import WholeGroups
from lightning_parallel.strategies.optimizers.owners import TensorOwners
from lightning_parallel.strategies.optimizers.zero import ZeroStage
from lightning_parallel.strategies.ranks import replicas
from lightning_parallel.strategies.self_check.proof import FirstBatches, Verify
from lightning_parallel.strategies.self_check.runs import StepRuns
from lightning_parallel.strategies.steps.pipeline import PipelineSteps
from lightning_parallel.strategies.whole.saved_modules import weakly
from lightning_parallel.tensor.audit import LossAudit
from lightning_parallel.tensor.plan import Sharding
from lightning_parallel.tensor.sharding import Shard

__all__ = ["Run"]


@dataclass
class Run:
    """Holds the objects that a mesh strategy makes in `setup`.

    `teardown` closes the run. The strategy keeps a closed run until the next `setup`: a script may save a checkpoint
    after `fit`, and this needs the rules, the pipeline and the slices.

    Attributes:
        module: The user's module.
        groups: The process groups of the mesh.
        device: The device of this rank.
        precision: Precision plugin of the Trainer.
        verify, zero_stage: The arguments of the strategy.
        optimizer_groups: Parameter groups of the optimizers over all stages. They outlive later evaluations, like the
            optimizers.
        slices: Slices of the parameters over the replicas, with `zero_stage`. They outlive later evaluations, too.
        host_slices: The slices, or all parameters, on which optimizers step in host memory; None without
            `cpu_offload`.
        steps: Runs the module's steps through the stages; None without a pipeline.
        compression: Averages gradients with the user's compressor; None without one, and in evaluation.
        reducer: Averages the gradients over the replicas; None outside `fit`.
        audit: Searches losses for parts of activations; None without sharded layers, and in evaluation.
        hook_watch: Shows full tensors to the user's hooks; None if every rank holds the full model.
        model_watch: Notices changes of the model and its optimizers; None before and after the run.
        loader_index: Index of the loader of the latest batch.
        owners: Owners of whole tensors, for optimizers that need them; None before `fit`. They outlive later
            evaluations.
        full_optimizers: Optimizers of the user whose steps see full tensors on every rank.
        checked_optimizers: Optimizers whose state is known to fit into a checkpoint.
        last_state: Tensors of the last full state dict, for as long as other code holds them.
        is_closed: Whether `close` was called.
        is_restored: Whether the module holds its full tensors again, after the run.
    """

    module: LightningModule
    groups: MeshGroups
    device: torch.device
    precision: Precision
    verify: Verify
    zero_stage: ZeroStage
    optimizer_groups: WholeGroups | None = None
    slices: ParameterSlices | None = None
    host_slices: ParameterSlices | None = None
    steps: PipelineSteps | None = None
    compression: MeshCompression | None = None
    reducer: GradientReducer | None = None
    audit: LossAudit | None = None
    hook_watch: HookWatch | None = None
    model_watch: ModelWatch | None = None
    loader_index: int = 0
    owners: TensorOwners | None = None
    full_optimizers: list[Optimizer] = field(default_factory=list)
    checked_optimizers: list[Optimizer] = field(default_factory=list)
    last_state: Mapping[str, Tensor] = field(default_factory=lambda: weakly({}))
    is_closed: bool = False
    is_restored: bool = False

    def __post_init__(self) -> None:
        self.state = ParallelState.of(self.module)
        self.first_batches = FirstBatches(self.groups, self.verify, self._step_runs)

    # The division belongs to the module, which keeps it from run to run.

    @property
    def sharding(self) -> Sharding | None:
        """How layers are sharded; None with one tensor-parallel rank."""
        return self.state.sharding

    @property
    def rules(self) -> dict[str, Shard]:
        """How the module's tensors are sharded over the tensor axis, by name."""
        return self.state.rules

    @property
    def engine(self) -> PipelineEngine | None:
        """The pipeline; None with one pipeline rank."""
        return self.state.engine

    @property
    def gradient_slices(self) -> ParameterSlices | None:
        """The slices to which gradients are reduced; None unless `zero_stage` is 2 or 3."""
        return self.slices if self.zero_stage >= 2 else None

    @property
    def parameter_names(self) -> dict[int, str]:
        """Name of each parameter of the module, by `id`."""
        return {id(parameter): name for name, parameter in self.module.named_parameters()}

    @property
    def checkpoints(self) -> Checkpoints:
        """Gathers the values of a checkpoint from the ranks of a replica, and scatters them again."""
        # A stage uses the names from before the split, since it lacks the layers of other stages.
        names = self.state.names
        if names is None:
            with nullcontext() if self.slices is None else self.slices.shown():
                names = ModelNames.of(self.module)
        return Checkpoints(
            self.module,
            self.rules,
            self.groups.tensor_parallel,
            self.groups.pipeline_parallel,
            names,
            self.device,
            # Replicas hold equal tensors, so only the first replica gathers them.
            is_saved=self.groups.gradients.rank == 0,
            last_rank=0 if self.engine is None else self.engine.last_rank,
            replicas=self.groups.gradients,
            slices=self.slices,
            owners={} if self.owners is None else self.owners.of,
        )

    def take_inventory(self) -> None:
        """List the tensors of the full model; every rank must call it."""
        # Every stage has a copy of a buffer outside the layers. The last stage has its final value.
        last_stage = 0 if self.engine is None else self.engine.last_rank
        self.inventory = Inventory.of(self.module, self.rules, self.groups.pipeline_parallel, last_stage)

    def recorded_groups(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the known names in the parameter groups of an optimizer over all stages."""
        return [] if self.optimizer_groups is None else self.optimizer_groups.recorded.get(optimizer, [])

    def _step_runs(self) -> StepRuns:
        return StepRuns(
            self.state.skeleton,
            self.groups,
            self.rules,
            self.sharding,
            self.steps,
            self.reducer,
            self.precision,
            self.device,
            self.slices,
        )

    def check_anew(self) -> None:
        """Compare the next step of each kind with one process again, as before the first step."""
        self.first_batches = FirstBatches(self.groups, self.verify, self._step_runs)
        if self.sharding is not None:
            self.audit = LossAudit()

    # ------------------------------------------------------------------------------------- changes during the run

    @property
    def has_changed(self) -> bool:
        """Whether the user's code has changed the model or an optimizer since the last step."""
        return self.model_watch is not None and self.model_watch.is_changed

    def refuse_changes(self, found: Differences, reason: str = "") -> None:
        """Refuse changes of the model that a run cannot adopt.

        Args:
            found: The changes.
            reason: Why the strategy cannot take other parameters; empty if it can.

        Raises:
            ValueError: If one of the changes cannot be adopted.
        """
        if self.engine is not None:
            intercepted = set(map(id, self.engine.model.sites.site_of))
            refuse_in_stages(found, self.engine.plan.container, lambda child: id(child) in intercepted)
        if self.sharding is not None:
            refuse_in_shards(found, self.sharding, dict(self.module.named_modules(remove_duplicate=False)))
        if reason:
            refuse_new_parameters(found, reason)
        if self.compression is not None and self.compression.nodes is not None:
            refuse_new_parameters(found, "`hierarchical` gives each replica of a node a part of them.")

    def adopt(self, found: Differences) -> None:
        """Continue with the changed model; every rank must call it, after `refuse_changes`."""
        state = self.state
        if self.hook_watch is not None:
            self.hook_watch.views.forget()
        if self.engine is not None:
            return  # only modules without parameters can change in a pipeline
        # Copies of sharded modules, such as teachers, are sharded, too. They take the rules of their originals.
        originals = {} if state.copies is None else state.copies.originals_of(found.come_modules)
        copies = {new: state.rules[old] for new, old in originals.items() if old in state.rules}
        # A new replicated parameter must be equal on all ranks, a new shard only on the replicas of its rank.
        for group, are_copies in ((self.groups.world, False), (self.groups.gradients, True)):
            new = [value for name, value in found.come.items() if (name in copies) is are_copies]
            replicas.start_equal(nn.ParameterList(new), group)
        if state.sharding is not None:
            kept = state.sharding.without(found.gone, found.gone_modules)
            for name in found.gone:
                state.rules.pop(name, None)
            state.rules.update(copies)
            state.sharding = kept.with_copies(originals)
        if state.skeleton is not None:
            state.skeleton.adopt()
        if state.full_states is not None:
            self.take_inventory()
            state.full_states.adopt(self.module, self.inventory)
        self.check_anew()
        parameters = dict(self.module.named_parameters())
        if self.slices is not None:
            self.slices.adopt(parameters)
            if self.zero_stage >= 2:
                self.slices.keep_states_whole(self.module)
        if self.reducer is not None:
            self.reducer.adopt(parameters, None if self.sharding is None else self.sharding.partial)

    def close(self) -> None:
        """End the reducer and the watches, which work only while the Trainer runs; a second call does nothing."""
        if self.is_closed:
            return
        self.model_watch = None
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        if self.hook_watch is not None:
            # It still answers for checkpoints that are saved after the run.
            self.hook_watch.close()
        self.is_closed = True
