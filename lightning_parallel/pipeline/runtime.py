"""Run a schedule: `for action in row: handle[action.kind](action)`.

    F  run the step from the first layer of the stage to the last; receive before, send after
    B  run backward from the output; receive its gradient before, send the gradient of the input after
    I  as B, but the weight gradients of linear layers are deferred
    W  compute the deferred weight gradients

Zero-bubble schedules (https://arxiv.org/abs/2401.10241) compute W when the rank would wait otherwise.

A rank on which an action fails continues its row without computing, so that no rank waits for its messages. It sends
activations that report the failure, and gradients of zeros. All ranks then raise the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel import comm, tracing
from lightning_parallel.comm import Group
from lightning_parallel.compat.chance import random_state_kept, seed_all, seed_nth
from lightning_parallel.compat.torch import map_only, pytree, seed_torch
from lightning_parallel.pipeline.dry_runs import NextStageDryRun, StageInputs
from lightning_parallel.pipeline.microbatch import StepResult, loss_of, tell_microbatch, under_way
from lightning_parallel.pipeline.p2p import (
    FAILURE,
    LostMessageError,
    Message,
    MessageGroups,
    MessageLayout,
    MessageLayouts,
    StageMessages,
    TensorSpec,
    line_of_step,
)
from lightning_parallel.pipeline.random_streams import OwnGenerators, ReplayedDraws, call_seed, layer_seed, layer_seeds
from lightning_parallel.pipeline.schedule import Action, Kind, Schedule
from lightning_parallel.pipeline.skips import NO_SKIPS, Skip, Skips, StageSkips
from lightning_parallel.pipeline.stage import (
    REENTRANT,
    CutError,
    PipelineStages,
    StageEnd,
    StageExit,
    StageForward,
)
from lightning_parallel.pipeline.weight_gradients import WeightGradients, deferring
from lightning_parallel.step_trace.placeholder import (
    PARAMETERS_ELSEWHERE,
    PlaceholderError,
    PlaceholderTensor,
    draws_numbers,
    missing,
)

__all__ = ["ScheduleRun"]


class _FailedBeforeError(BaseException):
    """Ends a step on a stage whose input was not made."""

    # Not an `Exception`, so that no handler in the model stops it.


@dataclass
class _MicrobatchState:
    """A microbatch on one stage, from the arrival of its inputs to its backward.

    Attributes:
        layout: The layout of the received message.
        values: The received tensors, as part of the graph; until the forward ends.
        placeholders: The placeholders of the arguments among them.
        captured: The gradients of the received tensors.
        roots: Where the backward starts; for the last stage, `loss`.
        deferred: The weight gradients, between I and W.
    """

    layout: MessageLayout | None = None
    values: list[Tensor] = field(default_factory=list)
    roots: list[GradientEdge] = field(default_factory=list)
    loss: Tensor | None = None
    captured: list[Tensor | None] = field(default_factory=list)
    placeholders: list[PlaceholderTensor | None] = field(default_factory=list)
    deferred: WeightGradients | None = None


@dataclass(eq=False)
class ScheduleRun:
    """One step: a schedule, the microbatches, and their state between actions.

    Args:
        model: The stages of this rank.
        group: The pipeline group.
        schedule: The schedule to run.
        step: The user's step.
        microbatches: As many as the schedule has.
        weights: Share of each in the loss.
        layouts: The last layouts of messages, kept from step to step.
        stage_inputs: The inputs that the next stages lack, kept from step to step.
        scale: The gradients are multiplied by this.
        seed: The seed of draws that all stages make; equal on all stages.
        generators: The generators that modules keep themselves.
        message_groups: Groups for messages between stages; see `MessageGroups`.
        skips: The values that each stage is sent besides the arguments of its first layer; empty for none.
        end_stage: Called with each stage of this rank after its last action.
        draws: The step's draws for all samples; each microbatch gets its rows.
        at_once: Parameters, by `id`, whose gradients do not wait for a W.
        share: Makes a value of the result on the rank of the last stage, which every rank gets.
        meeting: Carries the value and the failures, kept from step to step.
    """

    model: PipelineStages
    group: Group
    schedule: Schedule
    step: Callable[[Any], Any]
    microbatches: Sequence[Any]
    weights: Sequence[float]
    layouts: MessageLayouts
    stage_inputs: dict[int, list[StageInputs]]
    scale: float | Tensor = 1.0
    seed: int = 0
    generators: OwnGenerators = field(default_factory=OwnGenerators)
    message_groups: MessageGroups | None = None
    skips: Skips = ()
    end_stage: Callable[[int], None] | None = None
    draws: ReplayedDraws | None = None
    at_once: frozenset[int] = frozenset()
    share: Callable[[StepResult], Any] | None = None
    meeting: comm.RepeatedBroadcast | None = None

    def __post_init__(self) -> None:
        self.messages = StageMessages(self.group, self.schedule, self.model.device, self.layouts, self.message_groups)
        self.training = self.schedule.is_training
        # Received tensors enter the graph through a function of this leaf: autograd records nothing for a function
        # without an input that requires a gradient.
        self.anchor = torch.empty(0, device=self.model.device, requires_grad=True)
        self.states: dict[tuple[int, int], _MicrobatchState] = {}
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, Tensor] = {}
        self.open = tracing.OpenSpan()
        self.failure: BaseException | None = None
        # Whether the current action has received its message from another stage, and has sent its own.
        self._has_received = False
        self._has_sent = False
        # Only for schedules with an I.
        splits = self.training and self.schedule.splits_backward
        self.parameters = [p for p in self.model.module.parameters() if p.requires_grad] if splits else []

    def __call__(self) -> StepResult:
        """Run this rank's row of the schedule.

        Raises:
            PlaceholderError: If a stage needs data that another stage has.
            RuntimeError: If a message does not come, or the step does not go through the layers.
            Exception: Any error of the step. It is raised on every rank, except if a message does not come.
        """
        handle: Mapping[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
        }
        row = self.schedule.rows[self.group.rank]
        last = {action.stage: action for action in row}
        self.messages.post()
        # Once per step, not per action: saving the state of all generators takes longer than seeding them.
        with random_state_kept(), self.generators.kept(), self.draws or nullcontext():
            for action in row:
                phase = "forward" if action.kind is Kind.F else "backward"
                with tracing.span(str(action), phase, "pipeline", action.stage, action.microbatch) as self.open:
                    self._run(action, handle[action.kind])
                if self.end_stage is not None and action is last[action.stage] and self.failure is None:
                    try:
                        self.end_stage(action.stage)
                    except comm.LostRankError:
                        raise
                    except Exception as error:  # of a hook for a gradient
                        self.failure = error
        self.messages.finish()
        outcome = self._met()
        if outcome.is_failed:
            self.failure = self.failure or outcome.failure
            self._raise_together()
        return replace(self._result(), shared=outcome.value)

    def _result(self) -> StepResult:
        outputs = [self.outputs[number] for number in sorted(self.outputs)]
        # A microbatch without weight may have the loss 0 / 0, and 0 * nan would spread.
        losses = [loss * self.weights[number] for number, loss in sorted(self.losses.items()) if self.weights[number]]
        loss = torch.stack(losses).sum() if losses else None
        return StepResult(list(self.microbatches), outputs, list(self.weights), loss)

    def _run(self, action: Action, handle: Callable[[Action], None]) -> None:
        """Run an action; after a failure, only exchange its messages."""
        if action.kind is Kind.F:
            self.states[action.stage, action.microbatch] = _MicrobatchState()
        self._has_received = False
        self._has_sent = False
        if self.failure is None:
            try:
                handle(action)
            # No message passes that rank any more, so there is nothing to exchange for the rest of the row.
            except (LostMessageError, comm.LostRankError):
                raise
            except (Exception, _FailedBeforeError) as error:
                self.failure = self._explained(error)
        if self.failure is not None:
            try:
                self._pass_by(action)
            except LostMessageError as lost:
                # The step's error is the cause: a neighbour that saw it mostly ended, and so the message was lost.
                raise lost if isinstance(self.failure, _FailedBeforeError) else self.failure from lost

    def _explained(self, error: BaseException) -> BaseException:
        """Explain an error of a look-up by name, if the name is a parameter of another stage."""
        name = error.args[0] if isinstance(error, KeyError) and error.args else None
        parameter = self.model.plan.parameters.get(name) if isinstance(name, str) else None
        if parameter is None or set(parameter.stages) & set(self.model.stages):
            return error
        explained = PlaceholderError(
            f"The step looks for the parameter `{name}` by its name, but hooks see only the parameters of their own"
            f" stage, and this stage does not hold it. {PARAMETERS_ELSEWHERE}"
        )
        explained.__cause__ = error
        return explained

    def _pass_by(self, action: Action) -> None:
        """Exchange the messages of an action that was not run, or failed."""
        kind, stage, microbatch = action
        is_last = stage == self.model.num_stages - 1
        state = self.states[stage, microbatch]
        if kind is Kind.F:
            if stage > 0 and state.layout is None:
                state.layout = self.messages.receive_activations(action).layout
            if not is_last and not self._has_sent:
                self.messages.send_activations(stage, microbatch, Message(FAILURE, ()))
        elif kind is not Kind.W:
            if not is_last and not self._has_received:
                self.messages.receive_gradients(action)
            if stage > 0 and not self._has_sent:
                self.messages.send_gradients(stage, microbatch, self._input_gradients(state))

    def _met(self) -> comm.StepOutcome:
        """Meet the other ranks at the end of the step: tell them of a failure, and share a value of the last stage."""
        share = self.share or (lambda result: None)
        meeting = self.meeting or comm.RepeatedBroadcast(self.group, self.schedule.stage_ranks[-1], self.model.device)
        return meeting(lambda: share(self._result()), self.failure is not None)

    def _raise_together(self) -> None:
        """Raise on every rank: an action failed on one rank."""
        own = self.failure if isinstance(self.failure, Exception) else None
        # The traceback of an error keeps this object alive. It must not keep the activations.
        self.states.clear()
        texts = comm.all_gather_object(None if own is None else str(own), self.group)
        first = next((text for text in texts if text is not None), None)
        # One text for all ranks: stages may stop for different reasons, and the first one causes the rest.
        comm.raise_together(own if own is not None and str(own) == first else None, self.group)

    def _forward(self, action: Action) -> None:
        _, stage, microbatch = action
        state = self.states[stage, microbatch]
        handler = StageForward(
            stage,
            self.model.stage_of,
            self.model.stubs,
            lambda index, leaves, positions: self._receive(action, state, index, leaves, positions),
            self.model.show,
            lambda number: self._seed(microbatch, number),
            self._skips_of(stage, lambda skip, placeholder: self._skipped(action, state, skip, placeholder)),
            self._layer_seeder(microbatch),
        )
        is_last = stage == self.model.num_stages - 1
        if is_last and self.training:
            handler.ran = []
        # The step's draws before the layers, such as a mask of the batch, must be the same on all stages.
        self._seed(microbatch)
        with self.model.handled_by(handler), draws_numbers(stage > 0), under_way(microbatch):
            try:
                result = self.step(self.microbatches[microbatch])
            except StageExit as exit_:
                # Not the exception itself: its traceback would make a cycle through this frame. The cycle would keep
                # activations, and all objects in the callers' frames, until the garbage collector runs.
                end = exit_.end
            except Exception as error:
                if type(error).__module__.partition(".")[0] not in ("torch", __name__.partition(".")[0]):
                    tell_microbatch(error, self.microbatches, microbatch)
                raise
            else:
                # On any stage but the last, a step that returns has not reached the layer that ends it.
                self._require_end(stage, handler, is_last)
        # Dropped here: the graph keeps the tensors that the backward needs.
        state.values = []
        if is_last:
            self._keep_result(microbatch, state, result)
            if state.loss is not None:
                self.model.check_direct(state.loss, handler.ran or ())
            handler.ran = None
        else:
            self._send(stage, microbatch, state, end, handler.skips)
        if not self.training:
            del self.states[stage, microbatch]

    def _seed(self, microbatch: int, number: int = 0) -> None:
        """Seed the step's draws before its layers, after `number` calls of outer modules."""
        seed_all(call_seed(self._seed_of(microbatch), number))
        # Without the seed of the step: each generator has given a number, which follows from its seed.
        self.generators.seed(call_seed(self._seed_of(microbatch) - self.seed, number))
        if self.draws is not None:
            self.draws.enter(f"call {number}", microbatch)

    def _seed_of(self, microbatch: int) -> int:
        # If the draws of one step are replayed, a draw for all samples is the same in all microbatches.
        return self.seed + (microbatch if self.draws is None else 0)

    def _layer_seeder(self, microbatch: int) -> Callable[[int], None]:
        """Return `_seed_layer` for a microbatch, as one function where only the global generators draw."""
        if self.draws is not None or self.generators:
            return partial(self._seed_layer, microbatch)
        return partial(seed_nth, layer_seeds(self._seed_of(microbatch), len(self.model.stage_of)))

    def _seed_layer(self, microbatch: int, index: int) -> None:
        """Seed the draws of a layer, and the draws after it."""
        seed_all(layer_seed(self._seed_of(microbatch), index))
        self.generators.seed(layer_seed(self._seed_of(microbatch) - self.seed, index))
        if self.draws is not None:
            self.draws.enter(f"layer {index}", microbatch)

    def _seed_layer_again(self, microbatch: int, index: int) -> None:
        # Torch's generators alone, because activation checkpoints restore no others.
        seed_torch(layer_seed(self._seed_of(microbatch), index))

    def _require_end(self, stage: int, handler: StageForward, is_last: bool) -> None:
        if not is_last or not handler.entered:
            reached = self.model.plan.layers[handler.last] if handler.last >= 0 else "none"
            raise RuntimeError(
                f"The step ended on pipeline stage {stage} without running all its layers (last called:"
                f" `{reached}`). Every step must run the layers of `{self.model.plan.container}` in this order, and"
                " must not catch `BaseException`"
            )

    def _skips_of(self, stage: int, supply: Callable[[Skip, PlaceholderTensor], Tensor | None]) -> StageSkips:
        if not any(self.skips):
            return NO_SKIPS
        is_last = stage + 1 == self.model.num_stages
        return StageSkips(self.skips[stage], () if is_last else self.skips[stage + 1], supply)

    def _receive(
        self, action: Action, state: _MicrobatchState, index: int, leaves: list[Any], positions: list[int]
    ) -> list[Tensor]:
        # Called from inside the user's step, when it reaches the first layer of the stage.
        layout, values = self._inputs(action, state)
        lacking = [leaves[position] for position in positions]
        self._check(action, layout, index, positions, lacking)
        state.placeholders = lacking
        arguments = values[: len(lacking)]
        # A reentrant checkpoint runs its forward without gradients: the first layer would have no graph to its input.
        if self.training and not torch.is_grad_enabled() and any(value.requires_grad for value in arguments):
            raise CutError(REENTRANT)
        return arguments

    def _inputs(self, action: Action, state: _MicrobatchState) -> tuple[MessageLayout, list[Tensor]]:
        """Receive the message of the stage before, once, when the step first needs one of its tensors."""
        if state.layout is None:
            message = self.messages.receive_activations(action)
            # The span of an action begins when its inputs are there, so that waiting shows as idle time.
            self.open.restart()
            state.layout = message.layout
            if message.layout.is_failure:
                raise _FailedBeforeError
            state.values = list(message.tensors)
            flags = [spec.requires_grad for spec in message.layout.tensors]
            if self.training and any(flags):
                # Even if the step first needs a tensor where gradients are off, as for the output of a teacher.
                with torch.enable_grad():
                    state.values = list(_Received.apply(self.anchor, state.captured, flags, *message.tensors))
            with torch.set_grad_enabled(self.training):
                state.values = [
                    value if spec.piece is None else spec.piece(value, self.model.split)
                    for value, spec in zip(state.values, message.layout.tensors)
                ]
        return state.layout, state.values

    def _skipped(
        self, action: Action, state: _MicrobatchState, skip: Skip, placeholder: PlaceholderTensor
    ) -> Tensor | None:
        """Return the tensor of a skip connection; None if the stage before did not have it in this step."""
        layout, values = self._inputs(action, state)
        if skip not in layout.skips:
            return None
        number = len(layout.positions) + layout.skips.index(skip)
        self._check_shape(action, placeholder, layout.tensors[number])
        return values[number]

    def _check(
        self,
        action: Action,
        layout: MessageLayout,
        index: int,
        positions: list[int],
        lacking: list[PlaceholderTensor],
    ) -> None:
        """Compare the message with the arguments that this stage lacks, which the sender found by its own dry run."""
        names = self.model.plan.layers
        if (layout.line, layout.index, layout.positions) != (line := line_of_step(), index, tuple(positions)):
            raise RuntimeError(
                f"At {action} this stage enters at `{names[index]}` in {line} and lacks the arguments {positions}."
                f" It received {list(layout.positions)} for `{names[layout.index]}` in {layout.line}. The step must"
                " do the same on every stage. Does it depend on the rank, the time, or random numbers drawn before"
                " the layers?"
            )
        for placeholder, spec in zip(lacking, layout.tensors):
            self._check_shape(action, placeholder, spec)

    def _check_shape(self, action: Action, placeholder: PlaceholderTensor, spec: TensorSpec) -> None:
        shape, dtype = placeholder.signature
        if (tuple(shape), dtype) != (spec.full_shape, spec.dtype):
            raise RuntimeError(
                f"At {action} the tensor from {placeholder.provenance} must be {tuple(shape)} {dtype}; got "
                f"{spec.full_shape} {spec.dtype}. Its shape depends on the data, so that stages before and after the"
                " split point disagree"
            )

    def _keep_result(self, microbatch: int, state: _MicrobatchState, result: Any) -> None:
        for leaf in pytree.tree_leaves(result):
            if missing(leaf):
                is_parameter = leaf.provenance.startswith("the parameter `")
                raise PlaceholderError(
                    f"The step returns {leaf.provenance}, which is on an earlier pipeline stage. Return the outputs of "
                    "the layers, or compute the loss from these outputs"
                    f"{f'. {PARAMETERS_ELSEWHERE}' if is_parameter else ''}"
                    " [LP024]",
                    [leaf],
                )
        if self.training:
            state.loss = loss_of(result)
            self.losses[microbatch] = state.loss.detach()
        # Detached: a kept output must not keep its graph.
        self.outputs[microbatch] = map_only(Tensor, lambda tensor: tensor.detach(), result)

    def _send(self, stage: int, microbatch: int, state: _MicrobatchState, end: StageEnd, kept: StageSkips) -> None:
        positions = self._inputs_of_next(stage, microbatch, end, kept).positions
        skips = tuple(sorted(kept.kept))
        tensors = [*(end.leaves[position] for position in positions), *map(kept.kept.__getitem__, skips)]
        for tensor in tensors:
            if isinstance(tensor, PlaceholderTensor):
                raise PlaceholderError(
                    f"`{self.model.plan.layers[end.index]}` on stage {stage + 1} needs {tensor.provenance}, which"
                    f" stage {stage} does not hold either (a connection that skips the split point). Pass it through"
                    " the layers as an argument, move the split point (`balance`), or use fewer stages [LP024]",
                    [tensor],
                )
        described = [TensorSpec.with_part(tensor) for tensor in tensors]
        tensors = [part for _, part in described]
        layout = MessageLayout(end.index, positions, tuple(spec for spec, _ in described), end.line, skips)
        # Backward starts at edges of the graph, so that the data of an output can be freed before its gradient comes.
        # An edge keeps a C++ node alive, such as a view's, but before torch 2.7 no node of a custom function.
        # An evaluation has no graph, not even for parameters that are sent.
        roots = [tensor for tensor in tensors if tensor.requires_grad and self.training]
        state.roots = [get_gradient_edge(tensor.view_as(tensor)) for tensor in roots]
        self.messages.send_activations(stage, microbatch, Message(layout, tuple(tensor.detach() for tensor in tensors)))
        self._has_sent = True

    def _inputs_of_next(self, stage: int, microbatch: int, end: StageEnd, kept: StageSkips) -> StageInputs:
        """Find the inputs that the next stage lacks by a dry run of its forward, once per structure of arguments."""
        known = self.stage_inputs.setdefault(stage + 1, [])
        for inputs in known:
            if inputs.fits(end.index, end.leaves, end.tree):
                return inputs
        # The same seed as in the forward: a step's draws before the layers may decide about its path.
        handler = NextStageDryRun(
            stage + 1,
            self.model.stage_of,
            self.model.stubs,
            lambda number: self._seed(microbatch, number),
            # Copies, because the step may change them in place.
            self._skips_of(stage + 1, lambda skip, placeholder: kept.kept[skip].clone() if skip in kept.kept else None),
        )
        self._seed(microbatch)
        with self.model.handled_by(handler), draws_numbers(True), torch.no_grad():
            try:
                self.step(self.microbatches[microbatch])
            except StageExit as exit_:
                inputs = StageInputs.at(exit_.end)
        if not inputs.fits(end.index, end.leaves, end.tree):
            raise RuntimeError(
                f"`{self.model.plan.layers[end.index]}` is called with other arguments on stage {stage + 1} than on"
                f" stage {stage}. The step must do the same on every stage"
            )
        known.append(inputs)
        return inputs

    def _backward(self, action: Action) -> None:
        self._differentiate(action, self.states[action.stage, action.microbatch])
        del self.states[action.stage, action.microbatch]

    def _input_gradient(self, action: Action) -> None:
        state = self.states[action.stage, action.microbatch]
        state.deferred = WeightGradients(self.at_once)
        # Only parameters without a gradient: the others accumulate into memory that they hold already.
        without = [parameter for parameter in self.parameters if parameter.grad is None]
        with deferring(state.deferred):
            self._differentiate(action, state)
        state.deferred.separate(without)

    def _weight_gradient(self, action: Action) -> None:
        deferred = self.states[action.stage, action.microbatch].deferred
        assert deferred is not None, "A schedule must have an I before each W"
        deferred.compute()
        del self.states[action.stage, action.microbatch]

    def _differentiate(self, action: Action, state: _MicrobatchState) -> None:
        _, stage, microbatch = action
        # Only the last stage has a loss. Its share is its weight, so that the sum is the mean over the full batch.
        if state.loss is not None:
            roots: list[Any] = [state.loss] if self.weights[microbatch] else []  # without a label it may be 0 / 0
            # In place, because the scale may be a tensor on the device: reading it would make the host wait.
            gradients = [torch.full_like(state.loss, self.weights[microbatch]).mul_(self.scale)][: len(roots)]
        else:
            roots = list(state.roots)
            gradients = self.messages.receive_gradients(action)
            self._has_received = True
        self.open.restart()
        if self.draws is not None:
            self.draws.enter_backward(microbatch)
        # If the output requires no gradient, the sender still waits for gradients of the received tensors: zeros.
        if roots:
            self.model.active.seed_again = partial(self._seed_layer_again, microbatch)
            try:
                torch.autograd.backward(roots, gradients)
            finally:
                self.model.active.seed_again = None
        if stage > 0:
            self.messages.send_gradients(stage, microbatch, self._input_gradients(state))
            self._has_sent = True  # what fails after this must not send again
        # Free the graph now: with a split backward the state itself lives until W.
        state.roots = []
        state.loss = None

    def _input_gradients(self, state: _MicrobatchState) -> list[Tensor]:
        """Return the gradients of the received tensors that need one; zeros for unused tensors."""
        assert state.layout is not None
        specs = state.layout.tensors
        captured = state.captured or [None] * len(specs)
        gradients = []
        for spec, gradient, placeholder in zip_longest(specs, captured, state.placeholders):
            if not spec.requires_grad:
                continue
            # A custom function that took the placeholder itself leaves its gradient there, not at the value.
            own = None if placeholder is None else placeholder.own_grad
            parts = [part for part in (gradient, own) if part is not None]
            if not parts:
                parts = [torch.zeros(spec.shape, dtype=spec.dtype, device=self.model.device)]
            gradients.append(parts[0] if len(parts) == 1 else parts[0] + parts[1])
        return gradients


class _Received(Function):
    """Put received tensors into the graph and capture their gradients."""

    # Outputs of a function instead of leaves, so that a layer may write into them, as in one process.

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, captured: list[Tensor | None], flags: list[bool], *tensors: Tensor) -> Any:
        ctx.captured = captured
        outputs = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(*(tensor for tensor, flag in zip(outputs, flags) if not flag))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # Captured here, because only leaves have a `.grad`.
        ctx.captured[:] = gradients
        return (None,) * (3 + len(gradients))
