"""Where a recorded step uses each module and parameter: before, at, or after which of the repeated layers.

    stack, use = trace_in_order(module, stack, trace)

The layers come in the order of their calls, whatever the order of registration. A copy of the model that the step does
not call, such as a moving average, is split like its original. Code that goes through
both, `for t, s in zip(teacher.parameters(), model.parameters())`, then finds the same pieces on every stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lightning_parallel.pipeline.layer_stack import LayerStack, outer_modules
from lightning_parallel.pipeline.microbatch import MissingLossError
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.pipeline.stage import CutError
from lightning_parallel.step_trace.record import ModuleCall, StepTrace

__all__ = [
    "ModuleUse",
    "Step",
    "copies_of_layers",
    "trace_in_order",
    "unpaired_copies",
    "use_by_registration",
]

Step = Callable[[Any], Any]
"""Runs the user's step on one microbatch."""


@dataclass
class ModuleUse:
    """The layers at whose stages the parameters, and the modules outside the layers, are used.

    Attributes:
        parameters: Parameter name -> the layers at whose stages it is used.
        modules: Module name -> the layers at whose stages it is called.
        direct: The parameters that the step computes with outside modules; None if unknown.
        stopped: Why the step was not followed to its end, unless only data was missing.
    """

    parameters: dict[str, set[int]] = field(default_factory=dict)
    modules: dict[str, set[int]] = field(default_factory=dict)
    direct: set[str] | None = field(default_factory=set)
    stopped: str = ""


def trace_in_order(module: nn.Module, stack: LayerStack, trace: StepTrace) -> tuple[LayerStack, ModuleUse]:
    """Return the stack in the order in which the recorded step calls its containers, and the use of each module.

    Containers that it does not call are left out, such as a moving average of the model that it trains. Parameters that
    the record does not reach count as used after the last layer.

    Raises:
        ValueError: If the record does not reach the last layer, or a layer is called twice; with the reason.
    """
    path = stack.in_order_of([index for index, _ in _calls_of_layers(stack, trace)])
    if path != stack.path:
        stack = LayerStack.at(module, path)
    return stack, _use(module, stack, trace)


def _calls_of_layers(stack: LayerStack, trace: StepTrace) -> list[tuple[int, ModuleCall]]:
    """Return the recorded calls of the layers, with the position of each in the stack."""
    places, last = stack.places(), -1
    found = []
    for call in trace.outermost({*places}):
        mine = places[call.module]
        # A layer with several places is told apart only by the order of calls.
        last = next((place for place in mine if place > last), mine[-1])
        found.append((last, call))
    return found


def _use(module: nn.Module, stack: LayerStack, trace: StepTrace) -> ModuleUse:
    """Return where the recorded step uses each module and parameter."""
    use = ModuleUse()
    layers = _calls_of_layers(stack, trace)
    order = _Order(stack, layers)
    error: Exception | None
    try:
        order.check()
        error = trace.error
    except CutError as wrong:
        error = wrong
    if error is not None:
        _explain_end(error, stack, order, use)
    if not layers:
        raise ValueError(
            f"The step never calls the layers of `{stack.path}`; name the layers that it calls: layers=..."
        )
    outer = {child: name for name, child in outer_modules(module, stack)}
    inside = {*stack.layers, *outer}
    use.modules = {name: set() for name, _ in outer_modules(module, stack)}
    for call in trace.calls:
        if call.module in outer:
            use.modules[outer[call.module]].add(order.position(call.number))
    for operation in trace.operations:
        for name in {value.parameter for value in operation.inputs if value.parameter is not None}:
            use.parameters.setdefault(name, set()).add(order.position(operation.after - 1))
    if use.direct is not None:
        use.direct = trace.read_outside(inside)
    return _completed(module, stack, use, _divide_copies(module, stack, use))


def _explain_end(error: Exception, stack: LayerStack, order: _Order, use: ModuleUse) -> None:
    """Note why the record ends early.

    Raises:
        ValueError: If it ends before the last layer, or calls the layers in another order.
        MissingLossError: If the step returns no loss.
    """
    # Not a matter of the split: in one process this step would fail as well.
    if isinstance(error, MissingLossError):
        raise error
    # After the last layer a step may need data, for a metric say; the record has all layers by then.
    if isinstance(error, CutError) or order.last + 1 != len(stack.layers):
        raise ValueError(
            f"The model cannot be split at `{stack.path}`: the step stopped on tensors without data"
            f" {order.where()}: {error} [LP039]"
        ) from error
    # Missing data do not explain such an error, so the step needs something that a record lacks.
    if isinstance(error, (AttributeError, LookupError)) or "NoneType" in str(error):
        use.stopped = f"{type(error).__name__}: {error}"
    else:
        use.direct = None


class _Order:
    """The calls of the layers in the order of a recorded step.

    Args:
        stack: The layers.
        calls: Their calls, each with its position in the stack.

    Attributes:
        last: The position of the last layer that was called; 0 before the first.
    """

    def __init__(self, stack: LayerStack, calls: Sequence[tuple[int, ModuleCall]]) -> None:
        self.stack = stack
        self.positions = [index for index, _ in calls]
        self.last = self.positions[-1] if calls else 0
        self._numbers = [call.number for _, call in calls]

    def position(self, number: int) -> int:
        """Return the layer whose call comes last before, or at, the call with this number."""
        before = bisect_right(self._numbers, number)
        return self.positions[before - 1] if before else 0

    def where(self) -> str:
        """Describe how far the step has come."""
        return f"after `{self.stack.names[self.last]}`" if self.positions else "before the first layer"

    def check(self) -> None:
        """Refuse layers that are called again, or in another order than the stack's.

        Raises:
            CutError: With the layer, and what to do.
        """
        names = self.stack.names
        for number, (before, index) in enumerate(pairwise(self.positions), 1):
            if index in self.positions[:number]:
                self.last = before
                raise CutError(
                    f"`{names[index]}` is called again after `{names[before]}`, but not together with all layers of"
                    " its entry in their container. Put layers that are called together into one module"
                )
            if index < before:
                self.last = before
                raise CutError(
                    f"`{names[index]}` is called after `{names[before]}`, but comes before it in `{self.stack.path}`. A"
                    " pipeline needs the layers in the order of their calls. Put them into one `ModuleList` in that"
                    " order, or name the layers to split: layers=..."
                )


def use_by_registration(module: nn.Module, stack: LayerStack) -> ModuleUse:
    """Guess the use from the order of registration: modules registered before the layers are used before them."""
    use = ModuleUse(modules={name: set() for name, _ in outer_modules(module, stack)}, direct=None)
    order = {name: number for number, (name, _) in enumerate(module.named_modules(remove_duplicate=False))}
    starts = [order[name] for name in stack.names]
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def layer_before(owner: str) -> int:
        # Like the trace: a module between two layers goes with the first of the two.
        return max(0, sum(start < order[owner] for start in starts) - 1)

    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        is_inside = any(owner == layer or owner.startswith(f"{layer}.") for layer in stack.names)
        if not is_inside:
            use.parameters.setdefault(names[id(parameter)], set()).add(layer_before(owner))
    for name, layers in use.modules.items():
        layers.add(layer_before(name))
    return _completed(module, stack, use, {})


def _completed(module: nn.Module, stack: LayerStack, use: ModuleUse, copies: dict[nn.Module, nn.Module]) -> ModuleUse:
    """Add the parameters of layers and of outer modules; unseen parameters count as used with the last layer.

    The parameters of `copies` go to the stages of their originals, and no stage calls them.
    """
    last = len(stack.layers) - 1
    # By identity: a tied parameter is reached under several names, and counts under its first.
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for index, layer in enumerate(stack.layers):
        for parameter in layer.parameters():
            use.parameters.setdefault(names[id(parameter)], set()).add(index)
    for name, outer in outer_modules(module, stack):
        for parameter in outer.parameters():
            use.parameters.setdefault(names[id(parameter)], set()).update(use.modules[name])
    # Unused parameters need a stage as well: a checkpoint holds them.
    for name in names.values():
        # `or`: an empty set also means that no layer uses it.
        use.parameters[name] = use.parameters.get(name) or {last}
    for duplicate, original in copies.items():
        for one, other in zip(duplicate.parameters(), original.parameters()):
            use.parameters[names[id(one)]] = set(use.parameters[names[id(other)]])
    inside = {child for duplicate in copies for child in duplicate.modules()}
    for name, outer in outer_modules(module, stack):
        if not use.modules[name] and outer not in inside and not any(child in copies for child in outer.modules()):
            for parameter in outer.parameters():
                use.modules[name] |= use.parameters[names[id(parameter)]]
    return use


# ------------------------------------------------------------------------------------------------------------ copies


def copies_of_layers(module: nn.Module, stack: LayerStack) -> dict[nn.Module, nn.Module]:
    """Return the copies of a module with the layers in it, such as a teacher, a target, a moving average.

    A copy has as many parameters of the same shapes in the same order, and shares none. Only the largest copies count.
    """
    layers = set(stack.layers)
    # The module itself is left out, because it holds all copies as well.
    originals = [child for child in module.modules() if child is not module and layers & set(child.modules())]
    originals = [child for child in originals if child not in layers]
    # Trained modules are originals: a teacher may be registered, or called, before its student.
    originals.sort(key=lambda child: not any(value.requires_grad for value in child.parameters()))
    by_shapes: dict[tuple[torch.Size, ...], nn.Module] = {}
    copies: dict[nn.Module, nn.Module] = {}
    for original in originals:
        first = by_shapes.setdefault(_shapes(original), original)
        # A container around the layers has the same parameters; a teacher in one row with its student has others.
        if not {id(value) for value in first.parameters()} & {id(value) for value in original.parameters()}:
            copies[original] = first
    used = {id(value) for original in originals for value in original.parameters()}
    inside: set[nn.Module] = {child for original in originals for child in original.modules()}
    for child in module.modules():
        if child in inside:
            continue
        found = by_shapes.get(_shapes(child))
        if found is not None and not any(id(value) in used for value in child.parameters()):
            copies[child] = found
            inside.update(child.modules())
    return copies


def _divide_copies(module: nn.Module, stack: LayerStack, use: ModuleUse) -> dict[nn.Module, nn.Module]:
    """Return the copies that the step does not compute with; they are split like their originals."""
    names = {id(value): name for name, value in module.named_parameters()}
    called = {module.get_submodule(name) for name, layers in use.modules.items() if layers}
    inside = {child for outer in called for child in outer.modules()}
    return {
        duplicate: original
        for duplicate, original in copies_of_layers(module, stack).items()
        if not any(child in inside or child in stack.layers for child in duplicate.modules())
        and not any(use.parameters.get(names[id(value)]) for value in duplicate.parameters())
    }


def _shapes(module: nn.Module) -> tuple[torch.Size, ...]:
    return tuple(value.shape for value in module.parameters())


def unpaired_copies(module: nn.Module, plan: PipelinePlan) -> dict[str, str]:
    """Return the copies, and their originals, by name, for which a stage does not hold the same parameters.

    Code that goes through the parameters of both would form other pairs than in one process.
    """
    names = {id(value): name for name, value in module.named_parameters()}
    paths = {child: path for path, child in module.named_modules()}
    stages = plan.parameter_stages
    return {
        paths[duplicate]: paths[original]
        for duplicate, original in copies_of_layers(module, LayerStack.at(module, plan.container)).items()
        if any(
            stages[names[id(one)]] != stages[names[id(other)]]
            for one, other in zip(duplicate.parameters(), original.parameters())
        )
    }
