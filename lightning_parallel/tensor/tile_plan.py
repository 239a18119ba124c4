"""Which parts of a recorded step can run in tiles of positions: the head with its loss, and MLPs.

head    a linear layer whose output reaches a cross-entropy, through views, casts and elementwise functions
MLP     a module that computes each position by itself, with an intermediate larger than its input
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.compat.torch import pytree
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.step_trace.record import ModuleCall, Operation, StepTrace

__all__ = ["TilePlan", "find_tiles"]

_LOSSES = {"nll_loss_forward", "nll_loss2d_forward", "cross_entropy_loss"}


@dataclass
class TilePlan:
    """The modules that run in tiles of positions.

    Attributes:
        heads: Paths of the layers whose logits are computed in tiles.
        no_head: Why there is none; empty if there is one.
        mlps: Features of the largest inner tensor of each MLP, by path.
        no_mlps: Why a module that looks like an MLP is none, by path.
    """

    heads: list[str] = field(default_factory=list)
    no_head: str = ""
    mlps: dict[str, int] = field(default_factory=dict)
    no_mlps: dict[str, str] = field(default_factory=dict)


def find_tiles(trace: StepTrace | None) -> TilePlan:
    """Return the modules of a recorded step that can run in tiles; without a record, the reason."""
    if trace is None:
        return TilePlan(no_head="the batches can be read only once, so the step was not recorded")
    found = TilePlan(list(dict.fromkeys(call.path for call in trace.calls if _is_head(trace, call))))
    _add_mlps(trace, found)
    if not found.heads:
        losses = [each for each in trace.operations if _name(each) in _LOSSES]
        if trace.error is not None and not losses:
            found.no_head = f"the record of the step ends before a cross-entropy ({trace.error})"
        elif not losses:
            found.no_head = "the step computes no cross-entropy of class indices"
        else:
            found.no_head = (
                "no linear layer with more classes than features makes the logits of the cross-entropy, through"
                " views, casts and elementwise functions alone"
            )
    return found


def _add_mlps(trace: StepTrace, found: TilePlan) -> None:
    """Add the innermost modules with a large inner tensor, each of whose calls computes each position by itself."""
    inside: dict[int, list[Operation]] = {call.number: [] for call in trace.calls}
    weights = _Weights(trace)
    for operation in trace.operations:
        number = operation.call
        while number >= 0:
            inside[number].append(operation)
            number = trace.calls[number].parent
    candidates: dict[str, int] = {}
    # Inner calls come later than the calls around them.
    for call in reversed(trace.calls):
        width = _inner_width(call, inside[call.number], weights)
        if width and call.path and not any(other.startswith(f"{call.path}.") for other in candidates):
            candidates[call.path] = max(width, candidates.get(call.path, 0))
    for path, width in sorted(candidates.items(), key=lambda item: trace.calls_of(item[0])[0].number):
        why = _why_whole(trace, path, inside, weights)
        if why:
            found.no_mlps[path] = why
        else:
            found.mlps[path] = width


def _inner_width(call: ModuleCall, operations: Sequence[Operation], weights: _Weights) -> int:
    """Return the features of the largest inner tensor, if it is larger than input and output; 0 otherwise."""
    x, y = call.args[0] if len(call.args) == 1 and not call.kwargs else None, call.output
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() == 3 and y.shape[:-1] == x.shape[:-1]):
        return 0
    positions = x.shape[:-1].numel()
    sizes = [leaf.numel() for each in operations if not weights.has_made(each) for leaf in _tensors(each.output)]
    width = max(sizes, default=0) // max(1, positions)
    return width if width > max(x.shape[-1], y.shape[-1]) else 0


_OF_WEIGHTS = {"t", "transpose", "permute", "cat", "stack", "view", "unsafe_view", "to_copy", "clone", "detach"}


class _Weights:
    """Parameters, and tensors that are computed from parameters alone."""

    def __init__(self, trace: StepTrace) -> None:
        self._made: set[int] = set()
        for operation in trace.operations:
            if operation.inputs and self.has_made(operation):
                self._made.update(map(id, _tensors(operation.output)))

    def __contains__(self, value: PlaceholderTensor) -> bool:
        return value.view_of is not None or id(value) in self._made

    def has_made(self, operation: Operation) -> bool:
        """Return whether the result of an operation is among them; the record does not show tensors of the batch."""
        return _name(operation) in _OF_WEIGHTS and all(value in self for value in operation.inputs)


def _why_whole(trace: StepTrace, path: str, inside: Mapping[int, Sequence[Operation]], weights: _Weights) -> str:
    """Return why the calls of a module cannot run in tiles; empty if they can."""
    calls = trace.calls_of(path)
    if any(name == f"`{path}`" or name.startswith(f"`{path}.") for name in trace.draws):
        return "it draws random numbers, which would differ in tiles"
    if any(call.has_data or trace.calls[call.parent].has_data for call in calls if call.parent >= 0):
        return "its code reads values"
    for call in calls:
        others = [child for child in trace.calls[call.number :] if child.number != call.number and child.has_data]
        if any(trace.is_inside(child.number, {call.module}) for child in others):
            return "code inside reads values"
        for operation in inside[call.number]:
            if not _is_by_position(operation, call.args[0], weights):
                return f"`{_name(operation)}` joins positions"
    return ""


_PRODUCTS = {"mm", "addmm", "linear", "matmul"}
_NORMS = {"native_layer_norm", "fused_rms_norm", "rms_norm", "layer_norm"}
_ALONG_LAST = {"split", "split_with_sizes", "slice", "select", "narrow", "cat", "unbind", "mean", "sum", "var", "amax"}
_VIEWS = {
    "view",
    "unsafe_view",
    "reshape",
    "reshape_alias",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "clone",
    "to_copy",
}


def _is_by_position(operation: Operation, x: Tensor, weights: _Weights) -> bool:
    """Return whether an operation computes each position by itself.

    The hidden states have the shapes (samples, positions, features) or (samples x positions, features).
    """
    if weights.has_made(operation):
        return True
    positions, name = x.shape[:-1], _name(operation)
    activations = [value for value in operation.inputs if value not in weights]
    outputs = [*_tensors(operation.output)] if operation.output is not None else []
    # Results for the reader of a norm, such as means, have as many positions as well.
    if not all(_has_positions(value, positions) for value in (*activations, *outputs)):
        return False
    if name in _PRODUCTS:
        # The hidden states come first, and the weight has no positions.
        return len(activations) == 1 and operation.inputs[-1] in weights
    if name in _VIEWS:
        return all(out.shape[-1] == activations[0].shape[-1] for out in outputs)
    if name in _NORMS:
        return True
    if name in _ALONG_LAST:
        return all(out.dim() == activations[0].dim() for out in outputs)
    function = operation.function
    # Elementwise, with parameters of one dimension, which all positions share.
    shared = [value for value in operation.inputs if value in weights]
    return torch.Tag.pointwise in getattr(function, "tags", ()) and all(value.dim() <= 1 for value in shared)


def _has_positions(value: Tensor, positions: torch.Size) -> bool:
    shape = value.shape[:-1]
    return shape in (positions, torch.Size([positions.numel()]))


def _name(operation: Operation) -> str:
    return str(getattr(getattr(operation.function, "overloadpacket", None), "__name__", "")).lstrip("_")


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _is_head(trace: StepTrace, call: ModuleCall) -> bool:
    """Return whether the output of a call of a linear layer reaches a cross-entropy."""
    weight, given = getattr(call.module, "weight", None), [*_tensors((call.args, call.kwargs))]
    is_linear = isinstance(call.module, nn.Linear) and isinstance(call.output, Tensor) and len(given) == 1
    if not is_linear or weight is None or call.output.shape[-1] <= given[0].shape[-1]:
        return False
    reached = {id(call.output)}
    for operation in trace.operations:
        if operation.after <= call.number or reached.isdisjoint(map(id, operation.inputs)):
            continue
        if _name(operation) in _LOSSES:
            return True
        # A product with another parameter makes other hidden states.
        if operation.call != call.number and not any(value.view_of for value in operation.inputs):
            reached.update(map(id, _tensors(operation.output)))
    return False
