"""Run the user's steps on microbatches as if they ran once on the whole batch.

training_step(batch)
|  split -> each stage runs the user's `training_step` on each microbatch, forward and backward (engine)
|  outputs, logged values and attributes of the last stage are merged, and repeated on every rank
|  gradients are set aside: Lightning sets `.grad` to zero next
backward(loss)
the gradients are put back, and reduced over the replicas
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from traceback import walk_tb
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import (
    FOREIGN,
    ParallelState,
    Patches,
    innermost_users_line,
    is_power_of_two,
    patched,
)
from lightning_parallel.compat.lightning import (
    at_end_of_epochs,
    own_numbers_of,
    set_update_count,
    states_of,
    update_count_of,
)
from lightning_parallel.compat.precision import kept_casts, shared_casts
from lightning_parallel.compat.torch import has_compiled_parts, named_parameters_of
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.pipeline.engine import PipelineEngine, StepOnCopies
from lightning_parallel.pipeline.microbatch import (
    StepResult,
    count_samples,
    loss_of,
    merge_outputs,
    own_copy,
    without_caches,
)
from lightning_parallel.pipeline.skips import Skips
from lightning_parallel.pipeline.stage import in_whole_model
from lightning_parallel.step_trace.placeholder import PlaceholderError
from lightning_parallel.strategies.checks import STEPS, first_batch, output_is_read, positional_arguments, steps_of_run
from lightning_parallel.strategies.options import PipelineOptions
from lightning_parallel.strategies.steps.effects import (
    Change,
    LogCall,
    StepEffects,
    side_effects_discarded,
    to_device,
)
from lightning_parallel.strategies.steps.gradient_hooks import GradientHooks
from lightning_parallel.strategies.steps.state import FrozenParameters, WatchedCopies
from lightning_parallel.strategies.whole.full_state import OutsideCalls
from lightning_parallel.tensor.audit import LossAudit, operations_behind
from lightning_parallel.tensor.pieces import gather_attributes, without_pieces
from lightning_parallel.tensor.sequence_regions import refused_between

__all__ = ["LossKinds", "PipelineSteps", "SharedMetrics", "step_context"]

_TRAINING = STEPS[TrainerFn.FITTING]


class ProveValues(Protocol):
    """Compares a step with one process, because its microbatches differ in values that no comparison has proven."""

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], names: Collection[str]) -> None:
        """Compare the step `name` with these arguments; all ranks of the replica call it.

        Raises:
            SelfCheckError: If a value of the step differs from its value on one process.
        """


class PipelineSteps:
    """Runs the steps of a module in stages.

    Args:
        module: The user's module.
        options: The strategy's arguments.
        precision: The precision plugin, whose contexts Lightning enters for each step.
        device: The device of this rank.

    Attributes:
        is_compared: Whether the self-check runs the steps.
        merged: How the microbatches of the last compared step were merged, see `Merging.found`.
        unproven: The values of the last compared step without a proven rule, see `Merging.unproven`.
    """

    def __init__(
        self, module: LightningModule, options: PipelineOptions, precision: Precision, device: torch.device
    ) -> None:
        self.module = module
        self.options = options
        self.precision = precision
        self.device = device
        self._engine: PipelineEngine | None = None
        self._positional: dict[str, int] = {}
        self._skips: dict[Any, Skips | None] = {}
        self._step_gradients: dict[nn.Parameter, Tensor | None] = {}
        self._gradients_are_watched = False
        self._is_running = False
        self._metrics: SharedMetrics | None = None
        self._output_is_read: dict[str, bool] = {}
        self.is_compared = False
        self.merged: dict[str, str] = {}
        self.unproven: dict[str, str] = {}
        self._asked: Counter[tuple[str, str, str]] = Counter()
        self.loss_kinds = LossKinds()

    @property
    def engine(self) -> PipelineEngine:
        """The pipeline.

        Raises:
            RuntimeError: Before `bind`.
        """
        if self._engine is None:
            raise RuntimeError("The module has not been split into stages yet")
        return self._engine

    def bind(self, engine: PipelineEngine, patches: Patches) -> None:
        """Run steps through `engine` from now on; metrics give their value on every rank until `patches` are undone."""
        self._engine = engine
        in_whole_model(patches)
        self._copies = WatchedCopies(engine)
        self._hooks = GradientHooks(self.module, engine)
        mine = {*engine.stages}
        self._stages_here = {name: mine & {*stages} for name, stages in engine.plan.parameter_stages.items()}
        self._gradients_are_watched = self._hooks_see_gradients()
        ParallelState.of(self.module).followed = _outside_of(
            self.module, (*engine.plan.layers, *engine.model.outer_names)
        )
        self._metrics = SharedMetrics(self.module, engine.group, engine.last_rank, lambda: self._is_running)
        self._metrics.install(patches)

    def example(self, trainer: Trainer) -> tuple[Callable[[Any], Any], Any] | None:
        """Return the step of the run that begins, and its first batch; None if that can be read only once."""
        name = steps_of_run(trainer)[0]
        batch = first_batch(trainer, name)
        if batch is None:
            return None
        step = StepOnCopies(self._step(name, (0,), {}))
        if not trainer.training:
            return step, batch

        # Refuse a step that returns no loss before the model is split. Later, the last stage alone would raise.
        def with_loss(microbatch: Any) -> Any:
            output = step(microbatch)
            loss_of(output)
            return output

        return with_loss, batch

    def training_step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reducer: GradientReducer | None = None,
        keeps_output: bool | None = None,
        prove: ProveValues | None = None,
    ) -> Any:
        """Run forward and backward of a batch; its gradients are kept for `deliver_gradients`.

        Args:
            args, kwargs: Of the module's `training_step`.
            reducer: Begins to reduce gradients over the replicas once no further microbatch adds to them.
            keeps_output: Whether to send the full output of the step to every rank, not only its loss. By default, if
                a hook of the user may read it.
            prove: Compares the step with one process if its microbatches differ in values of unknown kind.
        """
        self._copies.check()
        # Frozen ones, too: the step may train them.
        parameters = [parameter for _, parameter in named_parameters_of(self.module)]
        is_needed = self._gradients_are_needed()
        # A single process sets old gradients to zero after `training_step`; here both would need memory at once.
        held = {each: each.grad for each in parameters if is_needed or not each.requires_grad}
        # Accumulated gradients are reduced once, as the sum over batches, in `backward`.
        earlier = held if self._is_accumulating() else {}
        is_alone = reducer is None or reducer.group.size == 1

        def run(skips: Skips | None) -> Any:
            for parameter in parameters:
                parameter.grad = None
            end_stage = self._end_of_stages(None if self._is_accumulating() else reducer, earlier)
            return self._run(_TRAINING, args, kwargs, skips, keeps_output, end_stage, prove)

        # One stage alone could not gather the pieces over the replica that a hook has kept.
        gather_attributes(self.module)
        # Fingerprints make the host wait for the device, so only some steps take them.
        frozen = FrozenParameters(self.module) if self._copies.looks else None
        with self._hooks.held(self.module.current_epoch, self.is_compared), _explain_missing_data(_TRAINING):
            # Hooks ran for gradients of the first try, and replicas may have begun to reduce them.
            tries_again = is_alone and not self._hooks.are_held
            output = self._with_skips(_TRAINING, args, kwargs, run, tries_again)
            self._hooks.end_step(earlier)
        if frozen is not None:
            comm.raise_together(frozen.failure(), self.engine.group)
        self._step_gradients = {parameter: parameter.grad for parameter in parameters}
        for parameter in parameters:
            parameter.grad = held.get(parameter)
        return output

    def _end_of_stages(
        self, reducer: GradientReducer | None, earlier: Mapping[nn.Parameter, Tensor | None]
    ) -> Callable[[int], None]:
        """Return a function for the end of a stage's last backward: it runs hooks, and starts the reduction."""
        left, ended = set(self.engine.stages), set[str]()
        if reducer is not None:
            reducer.cancel()

        def end_stage(stage: int) -> None:
            if reducer is not None and not ended:
                reducer.refresh()  # the step may have frozen parameters; nothing is under way yet
            left.discard(stage)
            # A gradient is complete when the last stage here that uses the parameter has ended.
            names = {name for name, stages in self._stages_here.items() if not stages & left}
            self._hooks.end_stage(names - ended, earlier)
            ended.update(names)
            if reducer is not None:
                reducer.start(name for name in names if not self._hooks.waits(name))

        return end_stage

    def _gradients_are_needed(self) -> bool:
        """Tell whether code may read the gradients of earlier batches after `training_step`."""
        return self._is_accumulating() or self._gradients_are_watched

    def _is_accumulating(self) -> bool:
        """Tell whether the gradients of this batch are added to the gradients of earlier batches."""
        trainer = self.module.trainer
        return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches > 0

    def _hooks_see_gradients(self) -> bool:
        """Tell whether a hook of the user runs before a single process sets the last gradients to zero."""
        trainer = self.module.trainer
        hooks = [callback for callback in trainer.callbacks if isinstance(callback, Callback)]  # type: ignore[attr-defined]
        return (
            is_overridden("optimizer_zero_grad", self.module)
            or is_overridden("on_before_zero_grad", self.module)
            or any(is_overridden("on_before_zero_grad", callback, parent=Callback) for callback in hooks)
        )

    def deliver_gradients(self, reducer: GradientReducer) -> None:
        """Add the gradients of the last step to `.grad`, and tell the reducer of the replicas that they are there."""
        # A parameter without a gradient is not marked: its gradient would become zeros, and weight decay would act.
        fresh = {parameter: gradient for parameter, gradient in self._step_gradients.items() if gradient is not None}
        for parameter in self._summed_before(self._step_gradients):
            parameter.grad = None
        self._step_gradients = {}
        reducer.add(fresh)
        self._hooks.after_accumulation(fresh)

    def _summed_before(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return tied parameters whose `.grad` is already a sum over their owners, on all owners but the first.

        An example is an `optimizer_zero_grad` that clears gradients every second batch.
        """
        engine = self.engine
        are_summed, engine.tied_are_summed = engine.tied_are_summed, False
        if not are_summed or not engine.counted_by_others:
            return []
        here = dict(self.module.named_parameters())
        others = {id(here[name]) for name in engine.counted_by_others}
        return [parameter for parameter in parameters if id(parameter) in others]

    def restore_gradients(self) -> None:
        """Set `.grad` to the gradients of the last step."""
        for parameter, gradient in self._step_gradients.items():
            parameter.grad = gradient
        self._hooks.after_accumulation({one for one, gradient in self._step_gradients.items() if gradient is not None})
        self._step_gradients = {}

    def evaluate(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keeps_output: bool | None = None,
        prove: ProveValues | None = None,
    ) -> Any:
        """Run `validation_step`, `test_step` or `predict_step`; for the arguments see `training_step`."""
        gather_attributes(self.module)

        def run(skips: Skips | None) -> Any:
            if skips is None:
                return self._run_whole(name, args, kwargs)
            return self._run(name, args, kwargs, skips, keeps_output, prove=prove)

        with _explain_missing_data(name):
            return self._with_skips(name, args, kwargs, run)

    def alone(self) -> AbstractContextManager[Any]:
        """Let metrics compute on this rank alone inside the block, as in a step."""
        return patched(self, "_is_running", True)

    def goes_in_stages(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a step can be run in the stages of the plan."""
        return name == _TRAINING or self._skips_of(name, args, kwargs) is not None

    def _skips_of(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Skips | None:
        """Return the skip connections of a step; None for a step of evaluation that cannot be run in stages.

        Raises:
            ValueError: If it is a `training_step` that cannot be run in stages.
        """
        kind = _kind_of(name, args, kwargs)
        if kind in self._skips:
            return self._skips[kind]
        plan = self.engine.plan
        planned_for = [step for run, step in STEPS.items() if run.value == plan.request.get("run")]
        is_planned = bool(plan.skips) and [*kind] == planned_for
        self._skips[kind] = plan.skips if is_planned else self._find_skips(name, args, kwargs)
        return self._skips[kind]

    def _find_skips(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Skips | None:
        """Find the skip connections in a record of the step on this batch; see `_skips_of`."""
        batch, *rest = args
        found: Skips | None = None
        failure = None
        # Metrics must not wait for other ranks here, as in a step.
        self._is_running = True
        with side_effects_discarded(self.module), torch.set_grad_enabled(name == _TRAINING):
            try:
                step = self._step(name, tuple(rest), kwargs)
                found = self.engine.find_skips(step, batch, training=name == _TRAINING)
            except ValueError as error:
                failure = error
            finally:
                self._is_running = False
        if name == _TRAINING:
            comm.raise_together(failure, self.engine.seed_group)
        reason = next(filter(None, comm.all_gather_object(failure and str(failure), self.engine.seed_group)), None)
        if reason is not None:
            rank_zero_warn(
                f"`{name}` is not run in pipeline stages: {reason}. Every rank runs it on the full model instead. It"
                " fetches one parameter after the other from the rank that holds it"
            )
            return None
        return found

    def _with_skips(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[Skips | None], Any],
        tries_again: bool = True,
    ) -> Any:
        """Call `run` with the skip connections of a step, again with more connections if a stage lacks data.

        Args:
            name, args, kwargs: The step and its arguments.
            run: Runs the step; every rank of the pipeline meets its errors.
            tries_again: Whether the step may run again.
        """
        kind = _kind_of(name, args, kwargs)
        skips = self._skips_of(name, args, kwargs)
        while True:
            try:
                return run(skips)
            except PlaceholderError as error:
                is_lacking = error.is_missing or error.lacks_parameter
                # Every rank has met the error, but hooks may be on one stage only.
                if comm.on_any_rank([not (tries_again and is_lacking)], self.engine.seed_group)[0]:
                    raise
                # An earlier batch did not compute with these data, such as a penalty that begins later.
                try:
                    found = self._find_skips(name, args, kwargs)
                except ValueError:
                    raise error from None
                # With the connections of earlier batches, since a condition may change back.
                pairs = zip_longest(skips or (), found or (), fillvalue=())
                more = None if found is None else tuple(tuple(sorted({*old, *new})) for old, new in pairs)
                comm.agree("the data that the step needs from other stages", more, self.engine.seed_group)
                if more == skips:
                    raise
                skips = self._skips[kind] = more

    def _run_whole(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step on the full model, as one process does: a step that samples a text calls each layer many times."""
        outside = self.engine.model.active.outside
        assert isinstance(outside, OutsideCalls)
        batch, *rest = args
        with outside.whole_step():
            return self._step(name, tuple(rest), kwargs)(batch)

    def _step(self, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
        """Return the module's own step, for one microbatch."""
        method = getattr(self.module, name)
        if name not in self._positional:
            self._positional[name] = positional_arguments(method)
        # `example` passes a batch index, which the step need not take.
        rest = rest[: self._positional[name] - 1]

        def step(microbatch: Any) -> Any:
            # Without kept casts, each microbatch would cast all parameters, and keep the copies until its backward.
            casts = kept_casts() if name == _TRAINING else nullcontext()
            with step_context(self.precision, name), casts, _parts_told(self.module):
                return method(microbatch, *rest, **kwargs)

        return step

    def _keeps(self, name: str, is_asked: bool | None) -> bool:
        if is_asked is None:
            # Ask once, since the callbacks of a run do not change.
            if name not in self._output_is_read:
                self._output_is_read[name] = output_is_read(self.module, name)
            return self._output_is_read[name]
        return is_asked

    def _shown(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a step that sees sharded parameters of this stage in full."""
        watch = ParallelState.of(self.module).watch
        if watch is not None:
            self.engine.model.full_parameter = watch.views.full_parameter

        def shown(microbatch: Any) -> Any:
            with watch.step():
                return step(microbatch)

        return shown if watch is not None and watch.views.has_shards else step

    def _run(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        skips: Skips | None = None,
        keeps_output: bool | None = None,
        end_stage: Callable[[int], None] | None = None,
        prove: ProveValues | None = None,
    ) -> Any:
        """Run a step on the microbatches of a batch, with the result and the effects of a step on the whole batch."""
        batch, *rest = args
        # A step may change its batch, and a comparison after the step needs the batch from before.
        is_changed = prove is not None and self.engine.changes_batch(name == _TRAINING)
        before = (own_copy(batch, {}), *rest) if is_changed else args
        effects = StepEffects(self.module, name)
        kinds = self.loss_kinds if name == _TRAINING else None
        own_step = self._shown(self._step(name, tuple(rest), kwargs))
        step = _StageStep(own_step, effects, self._keeps(name, keeps_output), kinds)
        step.is_watched = name == _TRAINING and self._hooks.is_due and not has_compiled_parts(self.module)
        if self._metrics is not None:
            self._metrics.are_shared = False
            self._metrics.adopt(effects.metrics.holders)
        try:
            result = self._in_stages(
                name, step, batch, skips, end_stage, lambda result: self._merged(name, result, effects)
            )
            shared = self._learned(_Shared(*result.shared))
        except PlaceholderError:
            effects.undo()
            raise
        if shared.unproven and prove is not None:
            self._prove(name, before, kwargs, shared.unproven, effects, prove)
            if name in ParallelState.of(self.module).whole_batches:
                effects.undo()
                return self._run(name, before, kwargs, skips, keeps_output)
            # Only the last stage has outputs; an error in merging them raises on every rank.
            is_new = shared.is_new
            again = comm.broadcast_from(
                lambda: self._merged(name, result, effects, is_new),
                self.engine.group,
                self.engine.last_rank,
                self.device,
            )
            shared = self._learned(_Shared(*again))
        # Only now: `module.log` hands the values to the trainer, which cannot take them back.
        effects.repeat(shared.calls, shared.changes, self.device)
        # After `repeat`, which sets the buffers back to the state before the batch.
        effects.settle([count_samples(microbatch) for microbatch in result.microbatches])
        if shared.is_new:
            self.loss_kinds.unproven = (args, kwargs)
        return to_device(shared.output, self.device)

    def _in_stages(
        self,
        name: str,
        step: _StageStep,
        batch: Any,
        skips: Skips | None,
        end_stage: Callable[[int], None] | None,
        share: Callable[[StepResult], Any],
    ) -> StepResult:
        """Run a step on the microbatches of a batch."""
        # A step in stages draws from seeded streams. The global generator must keep its state, since it decides the
        # order of shuffled data in the next epoch.
        state = torch.get_rng_state()
        # Metrics that are computed inside the step must not wait for stages that are not there yet.
        self._is_running = True
        try:
            if name != _TRAINING:
                is_whole = name in ParallelState.of(self.module).whole_batches
                return self.engine.forward(step, batch, skips=skips, is_whole=is_whole, share=share)
            # Tied gradients are summed in `backward`, after their means over the replicas.
            scale = self.gradient_scale()
            with shared_casts(self.device):
                return self.engine.forward_backward(
                    step, batch, scale=scale, synchronize=False, skips=skips, end_stage=end_stage, share=share
                )
        finally:
            self._is_running = False
            torch.set_rng_state(state)

    def _merged(
        self, name: str, result: StepResult, effects: StepEffects, is_new: bool | None = None
    ) -> tuple[Any, ...]:
        """Return the fields of `_Shared`, on the rank of the last stage.

        Args:
            name: The step.
            result, effects: The results of its microbatches on this rank.
            is_new: Whether the loss is of a new kind; None if that is not known yet.
        """
        samples = [count_samples(microbatch) for microbatch in result.microbatches]
        merging = effects.merging(samples, result.weights, is_strict=not self.is_compared)
        output: Any = merge_outputs(result.outputs, merging)
        if name == _TRAINING:
            output = {**output, "loss": result.loss} if isinstance(output, Mapping) else result.loss
        with step_context(self.precision, name), self.alone():  # values of metrics are computed again
            calls, changes = effects.merged(merging)
        kinds = merging.found if self.is_compared else {}
        for key, why in merging.unproven.items() if self.is_compared else ():
            # The self-check has met the attribute before the step does, in a part of the same batch.
            self._asked.setdefault((name, key, why), -1 if why in ("first", "once") else 0)
        other = name == _TRAINING and self.loss_kinds.end_step(self.is_compared) if is_new is None else is_new
        unproven = merging.unproven
        if is_new is None and not self.is_compared:
            unproven = {key: why for key, why in unproven.items() if self._is_due(name, key, why)}
        return output, calls, changes, kinds, unproven, other

    def _learned(self, shared: _Shared) -> _Shared:
        if self.is_compared:
            self.merged = shared.kinds
            self.unproven = shared.unproven
        return shared

    def _is_due(self, name: str, key: str, why: str) -> bool:
        """Tell whether to compare a value without a proven rule: ever more rarely, if comparisons show no rule."""
        # An example is a condition on the loss that holds in one microbatch, or a constant that only the first sets.
        self._asked[name, key, why] += 1
        asked = self._asked[name, key, why]
        return asked > 0 and (asked < _EACH or is_power_of_two(asked))

    def _prove(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unproven: Mapping[str, str],
        effects: StepEffects,
        prove: ProveValues,
    ) -> None:
        """Compare a step with one process in the state from before its batch, and learn the rules of its values.

        Raises:
            ValueError: If microbatches changed an attribute that the compared step does not change.
        """
        state = ParallelState.of(self.module)
        with ExitStack() as stack:
            stack.enter_context(effects.rewound())
            # The compared step runs inside this step, whose gradients and hooks it must leave alone.
            for holder, attribute in (
                (self, "_step_gradients"),
                (self._hooks, "_held"),
                (self.engine, "tied_are_summed"),
            ):
                stack.enter_context(patched(holder, attribute, getattr(holder, attribute)))
            prove(name, args, kwargs, unproven)
        if name in state.whole_batches:
            return
        rules = state.merging[name]
        missing = [key for key, why in unproven.items() if why == "changed" and key not in rules]
        if missing and name == _TRAINING:
            raise ValueError(
                f"`self.{missing[0]}` must change as in a single-process run; got a change by microbatches of this"
                " batch, and none when the self-check ran the step on the same batch. Update"
                f" `self.{missing[0]}` in `on_train_batch_end`, or set `num_microbatches=1`"
            )
        if missing:
            state.whole_batches.add(name)
        for key in unproven:
            rules.setdefault(key, "")

    def gradient_scale(self) -> float | Tensor:
        """Return the factor of gradients: the share of a batch in an accumulated batch, times the loss scale."""
        # Lightning divides the loss after `training_step`, when a pipeline has computed the gradients already.
        share = 1.0 / self.module.trainer.accumulate_grad_batches
        scaler = getattr(self.precision, "scaler", None)
        return share if scaler is None else scaler.scale(torch.full((), share, device=self.device))


def _kind_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the name of a step with the index of its loader, because a step may treat loaders differently."""
    return (name, *args[2:], *kwargs.values())


def step_context(precision: Precision, name: str) -> AbstractContextManager[Any]:
    """Return the context in which Lightning runs a step, such as autocast."""
    kind = {"training_step": "train", "validation_step": "val"}.get(name, name.removesuffix("_step"))
    context: AbstractContextManager[Any] = getattr(precision, f"{kind}_step_context")()
    return context


@contextmanager
def _parts_told(module: nn.Module) -> Iterator[None]:
    """Explain an error about shapes if activations between blocks are shards of the sequence."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        sharding = ParallelState.of(module).sharding
        regions = [] if sharding is None else sharding.plan.sequence_regions
        if any(region.sends_pieces and len(region.blocks) > 1 for region in regions) and _is_of_shapes(error):
            found = f"{_users_place(error)} raises the error above"
            error.args = (f"{error}\n{refused_between(found)}",)
        raise


def _is_of_shapes(error: Exception) -> bool:
    """Tell whether torch may have raised `error` because of the shape of a tensor or placeholder."""
    text = str(error)
    if "sequence_parallel=" in text or type(error) not in (RuntimeError, ValueError, IndexError, PlaceholderError):
        return False
    return any(word in text.lower() for word in ("size", "shape", "dimension", "out of range", "out of bounds"))


def _users_place(error: Exception) -> str:
    """Name the innermost line of the user's code that `error` went through."""
    for frame, line in reversed(list(walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in FOREIGN | {"contextlib"}:
            return f"`{frame.f_code.co_name}` ({frame.f_code.co_filename.rpartition('/')[2]}, line {line})"
    return "the step"


@contextmanager
def _explain_missing_data(name: str) -> Iterator[None]:
    """Explain an error of missing data inside the block: the first batch did not need the data."""
    try:
        yield
    except PlaceholderError as error:
        if error.is_missing:
            if error.lacks_parameter:
                raise
            text, mark, where = str(error).partition("\n(found on rank")
            error.args = (
                f"{text}. The first `{name}` of this run did not compute with it, so the pipeline does not send it."
                f" Compute with it in every step; multiply it by zero where you do not want it{mark}{where}",
            )
        raise


_EACH = 4
"""Steps in a row in which a value without a proven rule is compared, before it is compared ever more rarely."""
_MOST_PROOFS = 3


class LossKinds:
    """Notices a step that computes its loss in another way than the steps that the self-check compared.

    Two losses are of one kind if the last operations of their graphs are the same, in any number.

    Attributes:
        unproven: On every rank, the arguments of a step of a new kind since the last self-check.
    """

    def __init__(self) -> None:
        self.unproven: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._proven: set[frozenset[str]] = set()
        self._seen: set[frozenset[str]] = set()
        self._steps = self._told = 0
        self._audit = LossAudit()

    def see(self, output: Any) -> None:
        """Look at the output of a microbatch, before its backward."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        # The walk through the graph costs time in each step, so it ends after some proofs.
        if self._told < _MOST_PROOFS and isinstance(loss, Tensor) and loss.grad_fn is not None:
            self._seen.add(operations_behind(loss))
            self._audit.check(loss)

    def end_step(self, is_compared: bool) -> bool:
        """End a step on the rank with the last stage; tell whether its loss was computed in a new way.

        Args:
            is_compared: Whether the self-check has run it.
        """
        seen, self._seen = self._seen, set()
        if is_compared:
            self._proven |= seen
            return False
        # The self-check may have left out autocast, so the first step of the run may have other operations.
        is_other_precision = self._steps == 0 and not seen & self._proven
        is_new = not is_other_precision and not seen <= self._proven
        self._proven |= seen
        self._steps += 1
        self._told += is_new
        return is_new


class _GradientsRead(TorchFunctionMode):
    """Refuses steps that read gradients of parameters: a microbatch would see the gradients of earlier microbatches."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # `==` rather than `is`: each access to a property's `__get__` makes a new wrapper.
        if func == _GET_GRADIENT and isinstance(args[0], nn.Parameter):
            raise RuntimeError(
                "A step in a pipeline must not read the gradient of a parameter; got a read in"
                f" {innermost_users_line()}. In a single process it is the gradient of the previous step; in a"
                " pipeline, microbatches add to it on the stage that holds the parameter. Read gradients in"
                " `on_before_optimizer_step` and keep the values for the step, or use TensorParallelStrategy"
            )
        return func(*args, **(kwargs or {}))


_GET_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]


@dataclass(frozen=True)
class _Shared:
    """The values of a step on the whole batch, on every rank of the pipeline.

    Attributes:
        output, calls, changes: The output, calls of `self.log`, and changed attributes.
        kinds: How microbatches were merged; only in the self-check.
        unproven: The values to compare with one process, see `Merging.unproven`.
        is_new: Whether the loss is of a new kind.
    """

    output: Any
    calls: list[LogCall]
    changes: list[Change]
    kinds: dict[str, str]
    unproven: dict[str, str]
    is_new: bool


@dataclass
class _StageStep:
    """The module's step for one microbatch on this stage."""

    step: Callable[[Any], Any]
    effects: StepEffects
    keeps_output: bool
    kinds: LossKinds | None
    is_watched: bool = False

    def __call__(self, microbatch: Any) -> Any:
        with self.effects.step(), _GradientsRead() if self.is_watched else nullcontext():
            output = self.step(microbatch)
        if self.kinds is not None:
            self.kinds.see(output)
        if self.keeps_output:
            return without_caches(without_pieces(output))
        # No code reads the output, and keeping it would hold the logits of all microbatches in memory at once.
        if self.kinds is None:
            return None
        return {"loss": output["loss"]} if isinstance(output, Mapping) and "loss" in output else output


def _outside_of(module: nn.Module, intercepted: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of modules whose attributes every stage may set, and of the modules around them."""
    found: dict[str, None] = {}
    inside = tuple(f"{name}." for name in intercepted)
    for path, child in module.named_modules():
        if not path or f"{path}.".startswith(inside) or isinstance(child, Metric):
            continue
        parts = path.split(".")
        found.update(dict.fromkeys(".".join(parts[: length + 1]) for length in range(len(parts))))
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------ metrics


_SHARED = "_is_shared"


class SharedMetrics:
    """Lets torchmetrics objects compute on every rank, although only the last stage updates them.

    Args:
        module: The user's module.
        group: The pipeline group.
        source: Position of the last stage's rank.
        is_running: Tells whether a step is running, in which only the last stage may ask for a value.

    Attributes:
        are_shared: Whether every rank has the states since the last step, and may compute values alone.
    """

    def __init__(self, module: LightningModule, group: Group, source: int, is_running: Callable[[], bool]) -> None:
        self._module = module
        self._group = group
        self._source = source
        self._is_running = is_running
        self.are_shared = False

    def install(self, patches: Patches) -> None:
        """Share the metrics of the module until `patches` are undone."""
        self._patches = patches
        self.adopt(self._module.modules())
        at_end_of_epochs(self._module.trainer, self.share, patches)

    def adopt(self, modules: Iterable[nn.Module]) -> None:
        """Share the metrics among `modules`, such as metrics that a `MetricTracker` made during the run."""
        for metric in modules:
            if isinstance(metric, Metric) and not hasattr(metric.compute, _SHARED):
                self._patches.replace(metric, "compute", self._shared_compute(metric, metric.compute))

    def share(self) -> None:
        """Send the states of all metrics to every rank, so that rank zero alone may read them for its progress bar."""
        if not self.are_shared:
            self._bring([each for each in self._module.modules() if isinstance(each, Metric)])
            self.are_shared = True

    def _bring(self, metrics: list[Metric]) -> None:
        # On the CPU: a pickled CUDA tensor would come back on the device of the sender.
        mine = [(update_count_of(each), to_device(own_numbers_of(each), torch.device("cpu"))) for each in metrics]
        theirs = comm.broadcast_object(mine, self._group, self._source) if metrics else []
        if self._group.rank != self._source:
            for metric, (count, states) in zip(metrics, theirs):
                for name, state in states.items():
                    setattr(metric, name, to_device(state, metric.device))
                set_update_count(metric, count)

    def _shared_compute(self, metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
        state = ParallelState.of(self._module)

        def shared(*args: Any, **kwargs: Any) -> Any:
            if state.batch_states is not None:
                # Inside `forward`, the metric holds only the states of the microbatch.
                states = {name: list(v) if isinstance(v, list) else v for name, v in states_of(metric).items()}
                state.batch_states[id(metric)] = metric, states
            elif not self._is_running() and not self.are_shared:
                # This is a collective: Lightning computes logged metrics on every rank, in the same order.
                self._bring([metric])
            return compute(*args, **kwargs)

        setattr(shared, _SHARED, True)
        return shared
