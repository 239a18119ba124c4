"""Searches the graph of a loss for activations of which each rank holds a part.

The automatic plan and the self-check see the first steps only. A later step, or a step with `verify="off"`, may read
hidden features between two sharded layers. Its loss would differ from one process, without an error.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_parallel.compat import is_power_of_two
from lightning_parallel.mesh import CONTEXT
from lightning_parallel.tensor.autograd import RECEIVED

__all__ = ["LossAudit", "operations_behind", "part_in"]

# Backward nodes of the functions in `linear`, `autograd`, `pieces` and `loss`, by their effect on an activation:
# JOINS makes the full one from parts, DIVIDES a part from the full one, STAYS_DIVIDED another part from a part.
JOINS = {
    "_RowLinearFunctionBackward",
    "_ReduceFromGroupBackward",
    "_GatherFromGroupBackward",
    "_WholeFromGroupBackward",
    "_WholeOfPartBackward",
    "_ChangedBackward",
    "_CrossEntropyBackward",
}
DIVIDES = {"_ColumnLinearFunctionBackward", "_ScatterToGroupBackward", "_PartOfWholeBackward"}
STAYS_DIVIDED = {"_AllGatherToGroupBackward", "_ReduceScatterToGroupBackward"}
# Only gradients change here: the tensor is equal on all ranks before and after.
ENTERS = "_CopyToGroupBackward"
_SEEN_NODES = 32


class LossAudit:
    """Checks the losses number 1, 2, 4, 8, ... and each loss of a new kind.

    Two losses are of one kind if the last operations of their graphs are the same, in any number.
    """

    def __init__(self) -> None:
        self._count = 0
        self._known: set[frozenset[str]] = set()

    def check(self, loss: Tensor) -> None:
        """Check a loss before its backward, if its turn has come.

        Raises:
            RuntimeError: If it depends on this rank's part of an activation.
        """
        self._count += 1
        operations = operations_behind(loss)
        # A walk through the full graph takes time, so it becomes rare once the loss is known.
        if (is_power_of_two(self._count) or operations not in self._known) and (found := part_in(loss)):
            raise RuntimeError(found)
        self._known.add(operations)


def operations_behind(loss: Tensor) -> frozenset[str]:
    """Return the names of the last operations before a loss."""
    names: set[str] = set()
    queue: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    found = set(queue)
    for node in queue:  # grows inside
        names.add(node.name())
        for before, _ in node.next_functions:
            if before is not None and before not in found and len(found) < _SEEN_NODES:
                found.add(before)
                queue.append(before)
    return frozenset(names)


def part_in(loss: Tensor) -> str:
    """Return an error message if a loss depends on this rank's part of an activation, without an operation that joins.

    Args:
        loss: The loss, in autograd's graph.
    """
    # (node, whether its output is sharded): from the loss back, full -> sharded -> full again.
    todo: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    seen: set[tuple[Any, bool]] = set()
    while todo:
        node, inside = todo.pop()
        # Both belong to the key: code may use a node's output in a sharded region and outside.
        if node is None or (node, inside) in seen:
            continue
        seen.add((node, inside))
        kind = node.name()
        if _axis_of(node) == CONTEXT:
            # A tensor that is split along positions is a `Piece`, and code that reads it gathers it.
            todo += [(following, inside) for following, _ in node.next_functions]
            continue
        # With sequence parallelism a row-parallel layer shards along the sequence.
        divides = kind in DIVIDES or (kind == "_RowLinearFunctionBackward" and node.lengths is not None)
        if not inside and (divides or kind in STAYS_DIVIDED):
            return _message(node, kind)
        # Behind a received tensor are only nodes that keep it in the graph. A compiled piece is one node for all its
        # results, full and sharded alike, so its inputs are unknown.
        if kind == RECEIVED or (inside and kind.startswith("CompiledFunction")):
            continue
        before = [_is_divided_before(node, kind, inside)] * len(node.next_functions)
        if kind == "_ChangedBackward":
            # The full tensor before the change, and the part after it.
            before[0] = False
        todo += [(following, divided) for (following, _), divided in zip(node.next_functions, before)]
    return ""


def _axis_of(node: Any) -> str:
    """Return the mesh axis along which an operation of `autograd` or `pieces` communicates; empty for others."""
    if node.name() not in JOINS | DIVIDES | STAYS_DIVIDED:
        return ""
    family, args = getattr(node, "family", None), getattr(node, "args", None)
    group = family.group if family is not None else args[0] if args else None
    return getattr(group, "axis", "")


def _is_divided_before(node: Any, kind: str, inside: bool) -> bool:
    """Return whether the inputs of an operation are sharded; `inside` says this of its output."""
    if kind == "_ColumnLinearFunctionBackward":
        # With sequence parallelism a column-parallel layer gathers the positions of its input.
        return node.gradient is not None and node.gradient.layout is not None
    if kind in JOINS:
        return True
    return inside and kind not in DIVIDES and kind != ENTERS


def _message(node: Any, kind: str) -> str:
    # `apply_plan` puts the name on the parameter.
    weight = node.next_functions[1][0] if "LinearFunction" in kind else None
    name = getattr(getattr(weight, "variable", None), "sharded_as", "")
    layer = f" of `{name.rpartition('.')[0]}`" if name else ""
    return (
        "the loss depends on an activation of which each rank holds only a piece (hidden features, attention weights;"
        f" met at {kind.removesuffix('Backward')}{layer}). It would differ from its value in one process. Let the layer"
        " that makes it gather its output: tensor_plan={..., '<its path>': 'column_gather'} [LP015]"
    )
