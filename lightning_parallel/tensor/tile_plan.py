"""Which parts of a recorded step can run in tiles of positions: the head with its loss, and MLPs.

head    a linear layer whose output reaches a cross-entropy, through views, casts and elementwise functions
MLP     a module that computes each position by itself, with an intermediate larger than its input
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_parallel.compat.torch import pytree
from lightning_parallel.step_trace.record import ModuleCall, Operation, StepTrace

__all__ = ["TilePlan", "find_tiles"]

_LOSSES = {"nll_loss_forward", "nll_loss2d_forward", "cross_entropy_loss"}


@dataclass
class TilePlan:
    """The modules that run in tiles of positions.

    Attributes:
        heads: Paths of the layers whose logits are computed in tiles.
        no_head: Why there is none; empty if there is one.
    """

    heads: list[str] = field(default_factory=list)
    no_head: str = ""


def find_tiles(trace: StepTrace | None) -> TilePlan:
    """Return the modules of a recorded step that can run in tiles; without a record, the reason."""
    if trace is None:
        return TilePlan(no_head="the batches can be read only once, so the step was not recorded")
    found = TilePlan(list(dict.fromkeys(call.path for call in trace.calls if _is_head(trace, call))))
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


def _name(operation: Operation) -> str:
    return getattr(getattr(operation.function, "overloadpacket", None), "__name__", "")


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
