"""Run a schedule: `for action in row: handle[action.kind](action)`.

    F  play the step from the first layer of the stage to the last; receive before, send after
    B  differentiate what F made; receive the gradient of the output before, send that of the input after
    I  as B, but the weight gradients of linear layers are left for later
    W  compute what I left

What is recorded of an action starts when its inputs are there, so waiting shows as idle time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel import tracing, weight_gradients
from lightning_parallel.comm import Group
from lightning_parallel.pipeline.actions import Action, Kind, Schedule
from lightning_parallel.pipeline.cut import Cut
from lightning_parallel.pipeline.ghost import Ghost, GhostError, missing
from lightning_parallel.pipeline.observe import Step
from lightning_parallel.pipeline.p2p import Agreements, Boundary, Channels, Links, Message, TensorSpec
from lightning_parallel.pipeline.randomness import mixed, random_state_kept, seed_all, seed_torch, seeded
from lightning_parallel.pipeline.simulate import Timeline
from lightning_parallel.pipeline.stage import (
    REENTRANT,
    CutError,
    Demand,
    Forward,
    Leave,
    Rehearsal,
    tensors_among,
    wanted,
)
from lightning_parallel.weight_gradients import WeightGradients

__all__ = ["Run", "StepResult", "loss_of"]


@dataclass
class StepResult:
    """What one step through the pipeline gave.

    Attributes:
        outputs: What the step returned for each microbatch, detached; empty except on the rank of the last stage.
        weights: The share of each microbatch in the loss; they sum to 1.
        loss: Sum of the microbatches' losses by their weights, on the rank of the last stage in training.
        timeline: When this rank ran its actions.
    """

    outputs: list[Any]
    weights: list[float]
    loss: Tensor | None
    timeline: Timeline


@dataclass
class _Flight:
    """A microbatch between the forward and the backward of one stage."""

    roots: list[GradientEdge] = field(default_factory=list)
    loss: Tensor | None = None
    captured: list[Tensor | None] = field(default_factory=list)
    received: tuple[TensorSpec, ...] = ()
    ghosts: list[Ghost] = field(default_factory=list)
    deferred: WeightGradients = field(default_factory=WeightGradients)


class Run:
    """One step: a schedule, the microbatches, and what is under way.

    Args:
        cut: The model.
        group: The pipeline group.
        schedule: What to run.
        step: The user's step.
        microbatches: As many as the schedule has.
        weights: Share of each in the loss.
        agreements: What neighbours know of each other, kept from step to step.
        demands: What the next stages lack, kept from step to step.
        scale: The gradients are multiplied by this.
        seed: Of the random numbers that all stages draw alike.
    """

    def __init__(
        self,
        cut: Cut,
        group: Group,
        schedule: Schedule,
        step: Step,
        microbatches: Sequence[Any],
        weights: Sequence[float],
        agreements: Agreements,
        demands: dict[int, list[Demand]],
        scale: float | Tensor = 1.0,
        seed: int = 0,
        channels: Channels | None = None,
    ) -> None:
        self.cut, self.group, self.schedule, self.step = cut, group, schedule, step
        self.microbatches, self.weights, self.scale, self.seed = microbatches, weights, scale, seed
        self.demands = demands
        self.links = Links(group, schedule, cut.device, agreements, channels)
        self.training = schedule.is_training
        self.anchor = torch.empty(0, device=cut.device, requires_grad=True)
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, Tensor] = {}
        self.ready_s = 0.0
        self.open = tracing.OpenSpan()

    def __call__(self) -> StepResult:
        """Run this rank's row.

        Raises:
            GhostError: If a stage needs data that another one has.
            RuntimeError: If a message does not come, or the step does not go through the layers.
        """
        handle: Mapping[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
        }
        timeline = Timeline(self.schedule)
        self.links.post()
        with random_state_kept():
            for action in self.schedule.rows[self.group.rank]:
                self.ready_s = time.perf_counter()
                phase = "forward" if action.kind is Kind.F else "backward"
                with tracing.span(str(action), phase, "pipeline", action.stage, action.microbatch) as self.open:
                    handle[action.kind](action)
                timeline.record(self.group.rank, action, self.ready_s, time.perf_counter())
        self.links.finish()
        outputs = [self.outputs[i] for i in sorted(self.outputs)]
        losses = [self.losses[i] * self.weights[i] for i in sorted(self.losses)]
        loss = torch.stack(losses).sum() if losses else None
        return StepResult(outputs, list(self.weights), loss, timeline)

    def _begin(self) -> None:
        """The inputs of the action are there."""
        self.ready_s = time.perf_counter()
        self.open.restart()

    def _forward(self, action: Action) -> None:
        _, stage, microbatch = action
        flight = _Flight()
        visit = Forward(
            stage,
            self.cut.stage_of,
            self.cut.answers,
            lambda index, leaves, positions: self._receive(action, flight, index, leaves, positions),
            self.cut.show,
        )
        is_last = stage == self.cut.num_stages - 1
        seed_all(self.seed + microbatch)
        with self.cut.visited(visit):
            try:
                result = self.step(self.microbatches[microbatch])
            except Leave as leave:
                index, leaves, tree = leave.index, leave.leaves, leave.tree
            else:
                self._require_end(stage, visit, is_last)
        if is_last:
            self._keep_result(microbatch, flight, result)
        else:
            self._send(stage, microbatch, flight, index, leaves, tree)
        if self.training:
            self.flights[stage, microbatch] = flight

    def _require_end(self, stage: int, visit: Forward, is_last: bool) -> None:
        if not is_last or not visit.entered:
            reached = self.cut.trunk.names[visit.last] if visit.last >= 0 else "none"
            raise RuntimeError(
                f"the step ended on pipeline stage {stage} without running all its layers (last called: `{reached}`). "
                f"Every step must run the layers of `{self.cut.trunk.path}` once, and must not catch `BaseException`"
            )

    def _receive(
        self, action: Action, flight: _Flight, index: int, leaves: list[Any], positions: list[int]
    ) -> list[Tensor]:
        message = self.links.receive_activations(action)
        self._check(action, message.boundary, index, leaves, positions)
        self._begin()
        if action.stage > 0:
            seed_torch(mixed(self.seed + action.microbatch, action.stage))
        flight.received = message.boundary.tensors
        flight.ghosts = [leaves[position] for position in positions]
        flags = [spec.requires_grad for spec in flight.received]
        if not (self.training and any(flags)):
            return list(message.tensors)
        if not torch.is_grad_enabled():
            raise CutError(REENTRANT)
        return list(_Received.apply(self.anchor, flight.captured, flags, *message.tensors))

    def _check(self, action: Action, boundary: Boundary, index: int, leaves: list[Any], positions: list[int]) -> None:
        """The sender worked out by itself what this stage lacks; see that it did so rightly."""
        names = self.cut.trunk.names
        if boundary.index != index or boundary.positions != tuple(positions):
            raise RuntimeError(
                f"at {action} this stage enters at `{names[index]}` and lacks the arguments {positions}, but was sent "
                f"{list(boundary.positions)} for `{names[boundary.index]}`: the step does not do the same on every "
                "stage. Does it depend on the rank, on time, or on random numbers drawn before the layers?"
            )
        for position, spec in zip(positions, boundary.tensors):
            shape, dtype = leaves[position].signature
            if (tuple(shape), dtype) != (spec.shape, spec.dtype):
                raise RuntimeError(
                    f"at {action} `{names[index]}` expected {tuple(shape)} {dtype} from {leaves[position].origin}, "
                    f"got {spec.shape} {spec.dtype}: its shape depends on the data, so that stages before and after "
                    "the cut disagree"
                )

    def _keep_result(self, microbatch: int, flight: _Flight, result: Any) -> None:
        for leaf in tree_leaves(result):
            if missing(leaf):
                raise GhostError(
                    f"the step returns {leaf.origin}, which is on an earlier pipeline stage; return or compute the "
                    "loss from what the layers return"
                )
        if self.training:
            flight.loss = loss_of(result)
            self.losses[microbatch] = flight.loss.detach()
        self.outputs[microbatch] = tree_map_only(Tensor, lambda tensor: tensor.detach(), result)

    def _send(self, stage: int, microbatch: int, flight: _Flight, index: int, leaves: list[Any], tree: Any) -> None:
        positions = self._demand(stage, microbatch, index, leaves, tree).positions
        tensors = [leaves[position] for position in positions]
        for tensor in tensors:
            if isinstance(tensor, Ghost):
                raise GhostError(
                    f"`{self.cut.trunk.names[index]}` on stage {stage + 1} needs {tensor.origin}, which stage {stage} "
                    "does not hold either (a connection that skips over the cut). Pass it through the layers as an "
                    "argument, move the cut (`balance`), or use fewer stages"
                )
        boundary = Boundary(index, positions, tuple(map(TensorSpec.of, tensors)))
        # An edge keeps a node of C++ alive, such as a view's, but before torch 2.7 no node of a custom function.
        flight.roots = [get_gradient_edge(tensor.view_as(tensor)) for tensor in tensors if tensor.requires_grad]
        self.links.send_activations(stage, microbatch, Message(boundary, tuple(t.detach() for t in tensors)))

    def _demand(self, stage: int, microbatch: int, index: int, leaves: list[Any], tree: Any) -> Demand:
        """What the next stage lacks: found by playing its forward up to its entry, once per structure of arguments."""
        known = self.demands.setdefault(stage + 1, [])
        for demand in known:
            if demand.fits(index, leaves, tree):
                return demand
        visit = Rehearsal(stage + 1, self.cut.stage_of, self.cut.answers)
        with seeded(self.seed + microbatch), self.cut.visited(visit), torch.no_grad():
            try:
                self.step(self.microbatches[microbatch])
            except Leave as leave:
                demand = Demand(leave.index, leave.tree, tensors_among(leave.leaves), tuple(wanted(leave.leaves)))
        if not demand.fits(index, leaves, tree):
            raise RuntimeError(
                f"`{self.cut.trunk.names[index]}` is called with other arguments on stage {stage + 1} than on stage "
                f"{stage}: the step does not do the same on every stage"
            )
        known.append(demand)
        return demand

    def _backward(self, action: Action) -> None:
        flight = self.flights.pop((action.stage, action.microbatch))
        self._differentiate(action, flight)

    def _input_gradient(self, action: Action) -> None:
        flight = self.flights[action.stage, action.microbatch]
        with weight_gradients.deferring(flight.deferred):
            self._differentiate(action, flight)

    def _weight_gradient(self, action: Action) -> None:
        self.flights.pop((action.stage, action.microbatch)).deferred.compute()

    def _differentiate(self, action: Action, flight: _Flight) -> None:
        _, stage, microbatch = action
        if flight.loss is not None:
            roots: list[Any] = [flight.loss]
            gradients = [torch.full_like(flight.loss, self.weights[microbatch]).mul_(self.scale)]
        else:
            roots, gradients = flight.roots, self.links.receive_gradients(action)
        self._begin()
        if roots:
            torch.autograd.backward(roots, gradients)
        if stage > 0:
            self.links.send_gradients(stage, microbatch, self._captured(flight))
        flight.roots, flight.loss = [], None  # frees the graph, for which nobody waits

    def _captured(self, flight: _Flight) -> list[Tensor]:
        """The gradients of what was received, for those tensors that need one; zero where it was not used."""
        captured = flight.captured or [None] * len(flight.received)
        gradients = []
        for spec, gradient, ghost in zip(flight.received, captured, flight.ghosts):
            if spec.requires_grad:
                parts = [part for part in (gradient, ghost.own_grad) if part is not None]
                zero = torch.zeros(spec.shape, dtype=spec.dtype, device=self.cut.device) if not parts else parts[0]
                gradients.append(zero if len(parts) < 2 else parts[0] + parts[1])
        return gradients


class _Received(torch.autograd.Function):
    """Gives received tensors a place in the graph, where their gradients are captured.

    They are no leaves, so that a layer may write into them as it may in one process.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, captured: list[Tensor | None], flags: list[bool], *tensors: Tensor) -> Any:
        ctx.captured = captured
        outputs = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(*(tensor for tensor, flag in zip(outputs, flags) if not flag))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.captured[:] = gradients
        return (None,) * (3 + len(gradients))


def loss_of(result: Any) -> Tensor:
    """The loss in what a training step returned: the tensor itself, or the entry `loss`.

    Raises:
        ValueError: If there is none.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"expected the step to return its loss, or a dict with the key `loss`, got {type(result).__name__}; "
            "a pipeline cannot skip a microbatch"
        )
    return loss
