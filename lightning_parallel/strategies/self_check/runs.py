"""The two runs that the self-check compares: a step on the full model, and in shards or stages. Both are undone.

`StepRuns.whole` runs the undivided module on the first rank of the replica (see `reference`). `StepRuns.divided` runs
on all ranks: in shards, and in stages on one or several microbatches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from lightning_parallel import comm, tracing
from lightning_parallel.checkpoint import Inventory
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat import ParallelState, Patches
from lightning_parallel.compat.chance import random_state_kept, seed_all
from lightning_parallel.compat.torch import dispatch_modes_suspended, version_of
from lightning_parallel.data_parallel import GradientReducer, ParameterSlices
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.microbatch import count_samples, loss_of, map_tensors, split_by, without_caches
from lightning_parallel.pipeline.random_streams import DrawRecorder, OwnGenerators, RecordedDraws, ReplayedDraws
from lightning_parallel.pipeline.schedule import SCHEDULES
from lightning_parallel.step_trace.interception import RunsAll
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.step_trace.record import StepTrace, record_step
from lightning_parallel.strategies.self_check.observed import (
    ModuleTrace,
    ObservedStep,
    changed_attributes,
    counters_of,
    flags_of,
    numbers_in,
)
from lightning_parallel.strategies.steps.effects import LogCall, changes_undone, log_recorded
from lightning_parallel.strategies.steps.gradient_hooks import (
    LeftByBackward,
    LeftInCallbacks,
    refused_leaving,
    run_gradient_hooks,
)
from lightning_parallel.strategies.steps.pipeline import PipelineSteps, step_context
from lightning_parallel.strategies.steps.state import Snapshot, TrainerState
from lightning_parallel.strategies.whole.pinned import (
    SEED,
    Draws,
    StageStreams,
    blamed_on_us,
    doubled,
    in_double,
    with_fixed_norm,
    without_dropout,
)
from lightning_parallel.strategies.whole.reference import Blame, Owners, WholeModel, return_free_memory, run_reference
from lightning_parallel.strategies.whole.skeleton import Skeleton
from lightning_parallel.tensor.audit import part_in
from lightning_parallel.tensor.pieces import gather_attributes, without_pieces
from lightning_parallel.tensor.plan import Sharding
from lightning_parallel.tensor.regions import RandomRegion
from lightning_parallel.tensor.sharding import Shard, reduce_partial_

__all__ = ["DividedRun", "StepCall", "StepRuns", "Way", "WholeRun"]


@dataclass(frozen=True)
class StepCall:
    """A step: its name and its arguments.

    Attributes:
        full_length: The length of the sequences, of which the batch has some positions; 0 if it has all.
    """

    name: str
    batch: Any
    rest: tuple[Any, ...]
    kwargs: dict[str, Any]
    full_length: int = 0


@dataclass(frozen=True)
class Way:
    """Holds the settings of both runs of a step.

    Attributes:
        dropout: Whether dropout is on in the sharded step. In the step on the full model it is always off.
        splits: Whether a pipeline splits the samples into microbatches.
        traces: Whether the outputs of modules are recorded.
        double: Whether the steps compute in double precision, independent of the precision of the run.
        plain: Whether the steps compute in the precision of their parameters, without autocast.
        fixed_norm: Whether batch normalization uses its running statistics.
        seed: The seed of the step on the full model.
        hooks: Whether the user's gradient hooks run on the gradients of the step on the full model.
        draws: The random numbers of a step on all samples; microbatches get their rows.
        by_views: The order of several rows per sample, see `ReplayedDraws`.
        reverses: Whether the microbatches run in the opposite order.
    """

    dropout: bool = False
    splits: bool = True
    traces: bool = False
    double: bool = False
    plain: bool = False
    fixed_norm: bool = False
    seed: int = SEED
    hooks: bool = True
    draws: RecordedDraws | None = None
    by_views: bool = False
    reverses: bool = False


@dataclass
class WholeRun:
    """The results of the step on the full model, on every rank of the replica.

    Attributes:
        failure: Why the step could not run; empty if it ran.
        blame: Whose fault the failure is.
        effects: The results; the output on the first rank only.
        gradients: The gradients of the parameters of this rank, as shards.
        values: The buffers and parameters of this rank that the step wrote into.
        precisions: The precisions in which the step computed.
        draws: Whether the step drew random numbers.
        dropout: Whether the model has dropout, which was off.
        trace: The outputs of modules, if `Way.traces`.
        recorded: The known random numbers of the step in a pipeline.
    """

    failure: str
    blame: Blame
    effects: ObservedStep
    gradients: Mapping[str, Tensor]
    values: dict[str, Tensor]
    precisions: set[torch.dtype]
    draws: bool = False
    dropout: bool = False
    trace: ModuleTrace | None = None
    recorded: RecordedDraws = field(default_factory=RecordedDraws)


@dataclass
class DividedRun:
    """The results of the sharded or split step on this rank.

    Attributes:
        effects: The results.
        gradients: The gradients of all trained parameters of this rank; None if the step did not use the parameter.
        values: Buffers and parameters that the step changed.
        draws_apart: Whether sharded layers drew random numbers, which differ between ranks.
        trace: The outputs of modules, if `Way.traces`.
        replayed: The random numbers that microbatches replayed; None if they drew their own.
        merged: How microbatches were merged, by key; see `Merging.found`.
        unproven: Keys whose rule is not proven yet, and which show a rule in this run; see `Merging.unproven`.
    """

    effects: ObservedStep
    gradients: dict[str, Tensor | None]
    values: dict[str, Tensor]
    draws_apart: bool = False
    trace: ModuleTrace | None = None
    replayed: ReplayedDraws | None = None
    merged: Mapping[str, str] = field(default_factory=dict)
    unproven: Mapping[str, str] = field(default_factory=dict)


_LOSS = ("", "['loss']")
"""The keys under which a training step returns its loss."""

_DOUBLE_BYTES = 64 << 20
"""Parameters of a rank up to this size, in double precision, are converted to double precision for the self-check."""


class StepRuns:
    """Runs steps on the full model and in parallel; all ranks of a replica call its methods at the same points.

    Args:
        skeleton: The undivided module.
        groups: The mesh's groups.
        rules: How tensors are sharded over the tensor axis, by name.
        sharding: The sharded layers.
        steps: The module's steps in a pipeline; None without a pipeline.
        reducer: Reduces gradients over the replicas, during `fit`.
        precision: The precision plugin, whose contexts Lightning enters for each step.
        device: The device of this rank.
        slices: The slices of the replicas; None without ZeRO.

    Attributes:
        cuts_fully: Whether stages run as many microbatches as in the run, instead of two.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        groups: MeshGroups,
        rules: Mapping[str, Shard],
        sharding: Sharding | None,
        steps: PipelineSteps | None,
        reducer: GradientReducer | None,
        precision: Precision,
        device: torch.device,
        slices: ParameterSlices | None = None,
    ) -> None:
        assert isinstance(skeleton.module, LightningModule)
        self.skeleton = skeleton
        self.module = skeleton.module
        self.groups = groups
        self.rules = rules
        self.sharding = sharding
        self.steps = steps
        self.reducer = reducer
        self.precision = precision
        self.device = device
        self.slices = slices
        self.cuts_fully = False
        self._are_complete = False

    @property
    def engine(self) -> PipelineEngine | None:
        """The pipeline, if there is one."""
        return None if self.steps is None else self.steps.engine

    @property
    def microbatches(self) -> int:
        """The number of microbatches in a pipeline: two, or the number of the run if its schedule needs it."""
        if self.engine is None:
            return 1
        count = self.engine.schedule.num_microbatches
        return min(2, count) if self.engine.schedule.name in SCHEDULES and not self.cuts_fully else count

    # ------------------------------------------------------------------------------------------------ the two runs

    def whole(self, call: StepCall, way: Way) -> WholeRun:
        """Run a step on the full model; the result holds its failure, on all ranks."""
        # One rank alone runs the step, and could not gather them.
        gather_attributes(self.module)
        # The step may toggle parameters and make buffers, so each run needs a new inventory.
        inventory = Inventory.of(self.module, self.rules, self.groups.pipeline_parallel)
        owners = Owners(self.module, inventory, self.groups, self.device)
        output: dict[str, Any] = {}

        def run(model: WholeModel) -> tuple[ObservedStep, bool, bool, ModuleTrace | None, RecordedDraws]:
            effects, draws, dropout, trace, drawn = self._run_whole(call, way, model)
            # The output may be large, and is compared on this rank only.
            output.update(effects.output)
            return replace(effects, output={}), draws, dropout, trace, drawn

        keeps = call.name == "training_step" and not self.module.automatic_optimization
        failure: Exception | None = None
        try:
            with changes_undone(self.module):
                found = run_reference(self.skeleton, owners, run, way.double, keeps)
            # The condition is equal on all ranks, so all ranks try again together.
            if found.failure and self.engine is None:
                with changes_undone(self.module), self._whole_copies() as are_there:
                    if are_there:  # the step may have called a copy
                        found = run_reference(self.skeleton, owners, run, way.double, keeps)
            if way.hooks and not found.failure and call.name == "training_step":
                with changes_undone(self.module):
                    run_gradient_hooks(self.module, found.gradients, self.engine is not None)
        except Exception as error:  # a write on this rank cannot be undone
            failure = error
        if failure is None and found.result:
            failure = refused_leaving(call.name, found.result[0].left_by_backward, found.result[0].left_in_callback)
        comm.raise_together(failure, self.groups.replica)
        if owners.is_large():
            # The step in parallel comes next, and needs as much memory as any step.
            return_free_memory(self.device)
        effects, draws, dropout, trace, drawn = found.result or (ObservedStep(), False, False, None, RecordedDraws())
        return WholeRun(
            failure=found.failure,
            blame=found.blame,
            effects=replace(effects, output=output),
            gradients=found.gradients,
            values=found.values,
            precisions=found.precisions,
            draws=draws,
            dropout=dropout,
            trace=trace,
            recorded=drawn,
        )

    def _run_whole(
        self, call: StepCall, way: Way, model: WholeModel
    ) -> tuple[ObservedStep, bool, bool, ModuleTrace | None, RecordedDraws]:
        generators = OwnGenerators(self.module.modules()) if self.engine is None else self.engine.generators
        draws = Draws(generators)
        recorder = DrawRecorder()
        trace = ModuleTrace(self.module) if way.traces else None
        with ExitStack() as stack:
            if way.double:
                stack.enter_context(in_double(self.module, with_parameters=False))
            quiet = stack.enter_context(without_dropout(self.module))
            if way.fixed_norm:
                stack.enter_context(with_fixed_norm(self.module))
            if self.engine is None:
                seed_all(way.seed)
                draws.mark()
            else:
                stack.enter_context(StageStreams(self.engine, draws, recorder, way.seed).followed())
            if trace is not None:
                stack.enter_context(trace.recording())
            stack.enter_context(self._alone())
            effects = self._run_step(call, way, None if self.microbatches == 1 else recorder.around, model)
            draws.check()
        drawn = recorder.found if draws.found else RecordedDraws()
        drawn.is_complete &= not draws.others
        return effects, draws.found, quiet.found, trace, drawn

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Compute metrics and norms of gradients on this rank alone inside the block, which has the full model."""
        state = ParallelState.of(self.module)
        with ExitStack() as stack:
            if self.steps is not None:
                stack.enter_context(self.steps.alone())
            for order in filter(None, (state.order, state.position_order)):
                stack.enter_context(order.paused())
            state.is_alone = True
            stack.callback(setattr, state, "is_alone", False)
            yield

    @contextmanager
    def _whole_copies(self) -> Iterator[bool]:
        """Give copies of the module, such as averages, full tensors on the first rank; yield whether copies exist."""
        state = ParallelState.of(self.module)
        has_copies = state.copies is not None and state.full_states is not None and bool(state.copies)
        # All ranks decide together, since `restore_copies` communicates.
        if not comm.on_any_rank([has_copies], self.groups.replica)[0]:
            yield False
            return
        before = {id(tensor): (tensor, tensor.data, tensor.detach().clone()) for tensor in state.copies.tensors()}
        state.full_states.restore_copies(self.groups.model.rank == 0)
        try:
            yield True
        finally:
            state.copies.divide_again(self.rules, self.groups.tensor_parallel.rank)
            # Undo the writes of the self-check's step.
            for tensor, part, value in before.values():
                tensor.data = part.copy_(value)

    def divided(self, call: StepCall, way: Way) -> DividedRun:
        """Run a step in parallel, as the run will, but without the mean over the replicas.

        Args:
            call: The step.
            way: The settings of the run.
        """
        parameters = dict(self.module.named_parameters())
        buffers = {key: value.clone() for key, value in self.module.named_buffers() if type(value) is Tensor}
        versions = {key: version_of(value) for key, value in parameters.items()}
        self._are_complete = False
        trace = ModuleTrace(self.module, self.elsewhere()) if way.traces else None
        drawn = RandomRegion.draws
        with changes_undone(self.module), ExitStack() as stack:
            if way.double:
                stack.enter_context(in_double(self.module, with_parameters=True))
                buffers = {key: doubled(value) for key, value in buffers.items()}
                if self.engine is not None:
                    stack.enter_context(self.engine.other_precision(torch.float64))
            if not way.dropout:
                stack.enter_context(without_dropout(self.module))
            if way.fixed_norm:
                stack.enter_context(with_fixed_norm(self.module))
            if trace is not None:
                stack.enter_context(trace.recording())
            replayed: list[ReplayedDraws] = []
            if self.steps is None:
                seed_all(SEED)
                effects = self._run_step(call, way)
            else:
                effects = self._run_stages(self.steps, call, way, replayed)
            if call.name == "training_step":
                self._complete_gradients(parameters)
            gradients = {key: p.grad for key, p in parameters.items() if p.requires_grad}
            changed = {
                key: value.clone()
                for key, value in self.module.named_buffers()
                if key in buffers and not torch.equal(value, buffers[key])
            }
            written = [key for key, value in parameters.items() if version_of(value) != versions[key]]
            # Clone before the block ends, which restores all values in place.
            changed.update((key, parameters[key].detach().clone()) for key in written)
        return DividedRun(
            effects=effects,
            gradients=gradients,
            values=changed,
            draws_apart=RandomRegion.draws > drawn,
            trace=trace,
            replayed=replayed[0] if replayed else None,
            merged={} if self.steps is None else self.steps.merged,
            unproven={} if self.steps is None else self.steps.unproven,
        )

    def record(self, call: StepCall) -> StepTrace:
        """Record a step of the sharded or split module without data, to explain a difference; no communication."""
        step = getattr(self.module, call.name)

        def run(batch: Any) -> Any:
            with step_context(self.precision, call.name), torch.set_grad_enabled(call.name == "training_step"):
                return step(batch, *call.rest, **call.kwargs)

        with torch.inference_mode(False), ExitStack() as stack:
            for context in (log_recorded(self.module, []), changes_undone(self.module), self._alone()):
                stack.enter_context(context)
            # As in the compared steps, so that the record shows the draws of other code.
            stack.enter_context(without_dropout(self.module))
            if self.engine is not None:
                # The modules of other stages run on placeholders as well.
                stack.enter_context(self.engine.model.active.use(RunsAll()))
            return record_step(self.module, run, copied(call.batch, False), self.device, places=True)

    def _run_step(
        self,
        call: StepCall,
        way: Way,
        around: Callable[..., Any] | None = None,
        model: WholeModel | None = None,
    ) -> ObservedStep:
        """Run the step of the module in its present form on this rank, with its backward pass.

        Args:
            call: The step.
            way: The settings of the run.
            around: Wraps the step.
            model: The full parameters; None for a step on this rank's shards.
        """
        module = self.module
        before = self._kept()
        calls: list[LogCall] = []
        step = getattr(module, call.name)
        batch = copied(call.batch, way.double)
        callbacks = None if self.engine is None else LeftInCallbacks(module)
        context = step_context(self.precision, call.name)
        watch = None if model is not None else ParallelState.of(module).watch
        shown: Callable[[], AbstractContextManager[Any]] = nullcontext if watch is None else watch.step
        with log_recorded(module, calls), self._manual(model), self._precision(way), context, shown():
            # `without_pieces` communicates, so all ranks call it, although only one rank compares the output.
            output = without_pieces((step if around is None else around(step))(batch, *call.rest, **call.kwargs))
        loss = None
        if call.name == "training_step" and module.automatic_optimization and output is not None:
            loss = loss_of(output)
        # Record before backward, which may free tensors that attributes refer to.
        with blamed_on_us("to record the results of the step"):
            effects = self._effects(calls, output, loss, before)
        effects.left_in_callback = "" if callbacks is None else callbacks.name()
        if loss is not None:
            left = None if self.engine is None else LeftByBackward(module)
            effects.part_in_loss = part_in(loss)
            with shown():  # checkpointed code runs again
                module.backward(loss)
            effects.left_by_backward = "" if left is None else left.name()
        return effects

    def _effects(
        self,
        calls: Sequence[LogCall],
        output: Any,
        loss: Tensor | None,
        before: tuple[Snapshot, dict[str, Any], TrainerState],
    ) -> ObservedStep:
        logged: dict[str, Any] = {}
        for name, value, arguments in calls:
            # A metric object stands for its value of this batch; with `on_epoch` alone, no code reads that value.
            on_step = arguments.get("on_step")
            if hasattr(value, "cache") and not (loss is not None if on_step is None else on_step):
                continue
            for key, number in numbers_in(getattr(value, "cache", value), name).items():
                # A step may log one name several times.
                while key in logged:
                    key += "'"
                logged[key] = number
        attributes, unknown = changed_attributes(before[0])
        for (label, key), value in before[2].changes().items():
            attributes.update(numbers_in(value, f"{label}[{key!r}]"))
        counters = {name: value for name, value in counters_of(self.module).items() if value != before[1].get(name)}
        outputs = numbers_in(without_caches(output), "")
        elsewhere = {name for name, value in vars(self.module).items() if isinstance(value, PlaceholderTensor)}
        return ObservedStep(
            loss=None if loss is None else float(loss.detach()),
            logged=logged,
            output={key: value for key, value in outputs.items() if loss is None or key not in _LOSS},
            attributes=attributes,
            unknown=unknown | elsewhere,
            counters=counters,
            flags=flags_of(before[0]),
        )

    def _kept(self) -> tuple[Snapshot, dict[str, Any], TrainerState]:
        before = Snapshot(self.module, with_buffers=False, is_exact=True)
        return before, counters_of(self.module), TrainerState(self.module)

    def _run_stages(
        self, steps: PipelineSteps, call: StepCall, way: Way, replayed: list[ReplayedDraws]
    ) -> ObservedStep:
        before = self._kept()
        calls: list[LogCall] = []
        patches = Patches()
        # With one seed and no gradient scale, the gradients are comparable with the full model.
        patches.replace(steps.engine, "next_seed", lambda: SEED)
        patches.replace(steps, "gradient_scale", lambda: 1.0)
        patches.replace(steps, "is_compared", True)
        split, count = steps.engine.split_batch, self.microbatches if way.splits else 1

        def parts_of(batch: Any, _: int) -> Sequence[Any]:
            if count == 1:
                return [batch]
            parts = split_by(split, batch, count)
            return parts[::-1] if way.reverses else parts

        patches.replace(steps.engine, "split_batch", parts_of)
        if way.draws is not None and count > 1:
            sizes = [count_samples(part) for part in split_by(split, call.batch, count)]
            replayed.append(ReplayedDraws(way.draws, sizes if all(size > 0 for size in sizes) else (), way.by_views))
            patches.replace(steps.engine, "draws", replayed[0])
        arguments = (copied(call.batch, way.double), *call.rest)
        try:
            with log_recorded(self.module, calls), self._precision(way):
                if call.name == "training_step":
                    output = steps.training_step(arguments, call.kwargs, None, keeps_output=True)
                    steps.restore_gradients()
                else:
                    output = steps.evaluate(call.name, arguments, call.kwargs, keeps_output=True)
        finally:
            patches.undo()
        loss = loss_of(output) if call.name == "training_step" else None
        with blamed_on_us("to record the results of the step"):
            return self._effects(calls, output, loss, before)

    def _complete_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum partial gradients over the tensor axis, and gradients of tied parameters over the stages.

        Gradients of the context axis are averaged, because each of its ranks differentiates the same loss.
        """
        if not self._are_complete:
            self._sum_partial(parameters)
            self._average_over_context(parameters)
        if self.engine is not None:
            self.engine.reduce_tied_gradients()

    def _sum_partial(self, parameters: Mapping[str, nn.Parameter]) -> None:
        group = self.groups.tensor_parallel
        if self.sharding is not None:
            # Ranks must sum the same names: a rank without a gradient sends zeros.
            mine = [name for name, p in parameters.items() if name in self.sharding.partial and p.grad is not None]
            names = sorted({name for found in comm.all_gather_object(mine, group) for name in found})
            gradients: dict[str, Tensor] = {}
            for name in names:
                gradient = parameters[name].grad
                gradients[name] = torch.zeros_like(parameters[name]) if gradient is None else gradient
                parameters[name].grad = gradients[name]
            with torch.no_grad():
                reduce_partial_(gradients, self.rules, group)

    def _average_over_context(self, parameters: Mapping[str, nn.Parameter]) -> None:
        group = self.groups.context_parallel
        if group.size == 1:
            return
        # A rank without a position has no gradient, and sends zeros.
        mine = [name for name, p in parameters.items() if p.grad is not None]
        for name in sorted({name for found in comm.all_gather_object(mine, group) for name in found}):
            gradient = parameters[name].grad
            mean = torch.zeros_like(parameters[name]) if gradient is None else gradient.detach().clone()
            parameters[name].grad = comm.all_reduce_(mean, group) / group.size

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass and complete the gradients like the strategy: the step may read them."""
        partial = frozenset() if self.sharding is None else self.sharding.partial
        # With a context axis, every gradient is a part of a mean.
        is_all = self.groups.context_parallel.size > 1
        mine = {name: p for name, p in self.module.named_parameters() if is_all or name in partial}
        before = {name: p.grad for name, p in mine.items()}
        # Earlier gradients are sums over the ranks already, so only the new gradients may be summed.
        for p in mine.values():
            p.grad = None
        loss.backward(*args, **kwargs)
        self._sum_partial(dict(self.module.named_parameters()))
        self._average_over_context(mine)
        for name, p in mine.items():
            known = before[name]
            if known is not None:
                p.grad = known if p.grad is None else known + p.grad
        self._are_complete = True

    def elsewhere(self) -> set[int]:
        """Return the `id` of modules that this rank holds only as stubs."""
        if self.engine is None:
            return set()
        plan = self.engine.plan
        # A layer that is called several times may be on several stages.
        here = {name for name, stage in zip(plan.layers, plan.stage_of) if stage in self.engine.stages}
        names = [name for name in plan.layers if name not in here]
        names += [
            name
            for name in self.engine.model.outer_names
            if not set(plan.module_stages[name]) & set(self.engine.stages)
        ]
        return {id(child) for name in names for child in self.module.get_submodule(name).modules()}

    # --------------------------------------------------------------------------------------------------- the frame

    @contextmanager
    def nothing_left(self) -> Iterator[None]:
        """Keep steps inside the block out of random states, gradient reduction, profilers and compiled code."""
        with ExitStack() as stack:
            stack.enter_context(random_state_kept())
            if self.slices is not None:
                # Replicas may repeat a step for other reasons, so they could not gather parameters in one order.
                stack.enter_context(self.slices.held())
            if self.reducer is not None:
                stack.enter_context(self.reducer.paused())
            # Profilers would record the operators and spans of the self-check.
            stack.enter_context(dispatch_modes_suspended())
            stack.enter_context(tracing.suspended())
            # Compiled code computes the same values, but was compiled for the divided module.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
        if self.device.type == "cuda":
            # The user's memory statistics must not contain the peak of the self-check.
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def _precision(self, way: Way) -> Iterator[None]:
        patches = Patches()
        if way.plain or way.double:
            # The rounding of autocast would hide differences.
            patches.replace(self.precision, "forward_context", nullcontext)
        try:
            yield
        finally:
            patches.undo()

    @cached_property
    def fits_in_double(self) -> bool:
        """Whether all ranks of the replica have room for double precision; a collective, once."""
        num_bytes = sum(value.numel() * 8 for value in self.module.parameters() if value.is_floating_point())
        everyone = comm.all_gather_object(num_bytes, self.groups.replica)
        return self.device.type != "mps" and max(everyone) <= _DOUBLE_BYTES

    def precisions(self) -> list[Way]:
        """Return the precisions to try, the best first; a step may fail in some precisions."""
        parameters = [value for value in self.module.parameters() if value.is_floating_point()]
        is_double = all(value.dtype == torch.float64 for value in parameters)
        ways = []
        if self.fits_in_double and not all(comm.all_gather_object(is_double, self.groups.replica)):
            ways.append(Way(double=True))
        if isinstance(self.precision, MixedPrecision):
            ways.append(Way(plain=True))
        return [*ways, Way()]

    @contextmanager
    def _manual(self, model: WholeModel | None) -> Iterator[None]:
        """Let a module with manual optimization compute its gradients, but take no optimizer step.

        Args:
            model: The full parameters, which optimizers show instead of this rank's shards.
        """
        module = self.module
        if module.automatic_optimization or not module.trainer.training:
            yield
            return
        optimizers: Any = module.optimizers()
        whole = None if model is None else model.whole
        inert: Any = _Inert(optimizers, whole)
        if isinstance(optimizers, list):
            inert = [_Inert(each, whole) for each in optimizers]
        schedulers: Any = module.lr_schedulers()
        calm = [_Inert(each) for each in schedulers] if isinstance(schedulers, list) else _Inert(schedulers)
        patches = Patches()
        patches.replace(module, "optimizers", lambda *_, **__: inert)
        patches.replace(module, "lr_schedulers", lambda: calm)
        patches.replace(module, "manual_backward", self._backward if model is None else _own_backward)
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            patches.replace(module, name, _toggling(getattr(module, name), model))
        try:
            yield
        finally:
            patches.undo()


def _own_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    loss.backward(*args, **kwargs)


def _toggling(own: Callable[..., Any], model: WholeModel | None) -> Callable[..., Any]:
    """Return `toggle_optimizer` or `untoggle_optimizer` for `_Inert` optimizers."""

    def toggle(optimizer: Any) -> None:
        own(optimizer.inner if isinstance(optimizer, _Inert) else optimizer)
        if model is not None:
            model.train_as_owned()

    return toggle


class _Inert:
    """An optimizer, or scheduler, whose steps do nothing.

    Args:
        inner: The real optimizer or scheduler.
        whole: Returns the tensor to show instead of a parameter.
    """

    def __init__(self, inner: Any, whole: Callable[[Tensor], Tensor] | None = None) -> None:
        self.inner = inner
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if self._whole is None:
            return found
        if name == "param_groups":
            return [{**group, "params": [self._whole(each) for each in group["params"]]} for group in found]
        return _Inert(found, self._whole) if name == "optimizer" else found

    def step(self, closure: Any = None, *_: Any, **__: Any) -> Any:
        """Run the closure alone."""
        if callable(closure):
            # As in torch, whose optimizers run a closure with gradients enabled.
            with torch.enable_grad():
                return closure()
        return None

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Let gradients add up over the whole step."""


def copied(batch: Any, double: bool) -> Any:
    """Return a copy of a batch, which a step may write into; in double precision if asked."""
    try:
        batch = copy.deepcopy(batch)
    except Exception:  # an object of the user's that cannot be copied
        batch = map_tensors(batch, torch.clone)
    return map_tensors(batch, doubled) if double else batch
