"""What each layer costs: measured on one microbatch, or counted in parameters.

The step runs a few times for real, with a clock at every door. The first layer of each kind is also run alone, forward
and backward. What runs before the first layer is the prologue, what runs after the last the epilogue, loss
included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.pipeline.absent import Call, autocast_dtype, spared
from lightning_parallel.pipeline.linear import splitting
from lightning_parallel.pipeline.observe import Observation, Step
from lightning_parallel.pipeline.randomness import seeded
from lightning_parallel.pipeline.simulate import Cost
from lightning_parallel.pipeline.stage import Door, Gate, guard
from lightning_parallel.pipeline.trunk import Trunk, layer_kinds, units
from lightning_parallel.weight_gradients import WeightGradients, deferring

__all__ = ["Costs", "count_parameters", "measure"]

T = TypeVar("T")
_REPEATS = 3
_COPIES = 4  # a parameter, its gradient and two moments of it


@dataclass(frozen=True)
class Costs:
    """Cost of each layer, and of what comes before and after them."""

    layers: tuple[Cost, ...]
    prologue: Cost = Cost()
    epilogue: Cost = Cost()


def count_parameters(module: nn.Module, trunk: Trunk, seen: Observation) -> Costs:
    """The bytes that each part holds: parameters, gradients and two moments of an optimizer."""
    layers = tuple(Cost(resident_bytes=_COPIES * _bytes(list(layer.parameters()))) for layer in trunk.layers)
    inside = {id(parameter) for layer in trunk.layers for parameter in layer.parameters()}
    outside = {name: value for name, value in module.named_parameters() if id(value) not in inside}
    first = [value for name, value in outside.items() if 0 in seen.parameters[name]]
    last = [value for name, value in outside.items() if len(layers) - 1 in seen.parameters[name]]
    return Costs(layers, Cost(resident_bytes=_COPIES * _bytes(first)), Cost(resident_bytes=_COPIES * _bytes(last)))


def measure(
    module: nn.Module, trunk: Trunk, seen: Observation, step: Step, microbatch: Any, device: torch.device
) -> Costs:
    """Run `step` on `microbatch` for real and clock its parts; the model is left as it was.

    Seconds are the least of a few runs; a W is what a backward pass takes beyond its I, which leaves out only what the
    runtime can put off.
    """
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    clock, gate = _Clock(trunk, device), Gate()
    for index, (name, layer, kind) in enumerate(zip(trunk.names, trunk.layers, layer_kinds(trunk))):
        guard(layer, Door(gate, name, kind, index))
    for name, unit in units(module, trunk):
        guard(unit, Door(gate, name, name))
    for parameter in gradients:
        parameter.grad = None
    try:
        for _ in range(_REPEATS):
            with seeded(0), torch.enable_grad():
                gate.visit = clock
                clock.start()
                clock.finish(step(microbatch))
        gate.visit = None
        with seeded(0), torch.enable_grad():
            measured = clock.layer_costs()
    finally:
        gate.visit = None
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    held = count_parameters(module, trunk, seen)
    layers = [replace(cost, resident_bytes=layer.resident_bytes) for cost, layer in zip(measured, held.layers)]
    return Costs(
        tuple(layers),
        replace(min(clock.prologues, key=_seconds), resident_bytes=held.prologue.resident_bytes),
        replace(min(clock.epilogues, key=_seconds), resident_bytes=held.epilogue.resident_bytes),
    )


@dataclass
class _Call:
    """A layer with the arguments of its call, to be run again."""

    module: nn.Module
    call: Call
    parameters: list[Tensor]
    arguments: Any
    autocast: torch.dtype | None


class _Clock:
    """Measures at the doors, in the middle of a step, and what it noted there afterwards."""

    entered = True

    def __init__(self, trunk: Trunk, device: torch.device) -> None:
        self.trunk, self.device = trunk, device
        self.kinds: dict[int, object] = {}
        self.calls: dict[object, _Call] = {}
        self.prologues: list[Cost] = []
        self.epilogues: list[Cost] = []
        self.begun_s = 0.0
        self.is_first = True

    def start(self) -> None:
        """Begin a run of the step."""
        self.begun_s = self._now()
        self.is_first = True

    def unit(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        return call(*args, **kwargs)

    def layer(self, door: Door, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        assert door.index is not None
        if self.is_first:
            self.is_first = False
            forward_s = self._now() - self.begun_s
            self.prologues.append(Cost(forward_s, 0.0, self._backward_s(_differentiable((args, kwargs)), keep=True)))
            args, kwargs = tree_map_only(Tensor, _cut_off, (args, kwargs))
        self.kinds[door.index] = door.kind
        if door.kind not in self.calls:
            parameters: list[Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
            arguments = tree_map_only(Tensor, _cut_off, spared((args, kwargs), {}))
            self.calls[door.kind] = _Call(module, call, parameters, arguments, autocast_dtype(self.device))
        result = tree_map_only(Tensor, _cut_off, call(*args, **kwargs))
        self.begun_s = self._now()
        return result

    def finish(self, result: Any) -> None:
        """Clock what came after the last layer, and led to what the step returned."""
        forward_s = self._now() - self.begun_s
        self.epilogues.append(Cost(forward_s, 0.0, self._backward_s(_differentiable(result))))

    def layer_costs(self) -> list[Cost]:
        """Run a layer of each kind alone: nothing in the model that listens to its layers may take it for the step."""
        known = {kind: self._measured(call) for kind, call in self.calls.items()}
        return [known[self.kinds[i]] if i in self.kinds else Cost() for i in range(len(self.trunk.layers))]

    def _measured(self, noted: _Call) -> Cost:
        whole = [self._run(noted) for _ in range(_REPEATS)]
        with splitting(noted.module):
            put_off = [self._run(noted, WeightGradients()) for _ in range(_REPEATS)]
        forward_s = min(run.forward_s for run in whole)
        backward_s = min(run.input_gradient_s for run in whole)
        input_s = min(backward_s, *(run.input_gradient_s for run in put_off))
        return replace(whole[0], forward_s=forward_s, input_gradient_s=input_s, weight_gradient_s=backward_s - input_s)

    def _run(self, noted: _Call, later: WeightGradients | None = None) -> Cost:
        """Forward and backward, noted as an I, without what can be left for `later`."""
        args, kwargs = tree_map_only(Tensor, _cut_off, spared(noted.arguments, {}))
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        autocast = torch.autocast(self.device.type, noted.autocast, enabled=noted.autocast is not None)
        with autocast, saved_tensors_hooks(note, lambda tensor: tensor):
            forward_s, result = self._timed(lambda: noted.call(*args, **kwargs))
        for parameter in noted.parameters:
            saved.pop(parameter.untyped_storage().data_ptr(), None)
        sent = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        with nullcontext() if later is None else deferring(later):
            backward_s = self._backward_s(_differentiable(result))
        return Cost(forward_s, backward_s, 0.0, sum(saved.values()), _bytes(sent))

    def _backward_s(self, roots: Sequence[Tensor], keep: bool = False) -> float:
        """Seconds of differentiating `roots`, as far back as their graph goes."""
        if not roots:
            return 0.0
        ones = [torch.ones_like(root) for root in roots]
        return self._timed(lambda: torch.autograd.backward(roots, ones, retain_graph=keep))[0]

    def _timed(self, call: Callable[[], T]) -> tuple[float, T]:
        begun_s = self._now()
        result = call()
        return self._now() - begun_s, result

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def _seconds(cost: Cost) -> float:
    return cost.total_s


def _differentiable(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _cut_off(tensor: Tensor) -> Tensor:
    """A copy without history, which is no leaf, so that the model may write into it."""
    return tensor.detach().requires_grad_() * 1 if tensor.requires_grad else tensor.clone()


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
