"""Gradients that the user's code asks for directly, by `torch.autograd.grad(loss, weight)`: as in one process.

    of sharded logits       the gradient of the pieces, gathered
    of a sharded weight     a `Piece` of the full gradient
    of a partial gradient   the sum over the ranks

Either every rank of the tensor-parallel group asks, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches
from lightning_parallel.tensor.autograd import gather_from_group, reduce_from_group
from lightning_parallel.tensor.pieces import Piece
from lightning_parallel.tensor.plan import Sharding
from lightning_parallel.tensor.sharding import Shard, reduce_partial_

__all__ = ["give_whole_gradients"]


def give_whole_gradients(
    module: nn.Module,
    sharding: Sharding,
    rules: Mapping[str, Shard],
    group: Group,
    is_whole: Callable[[], bool],
    patches: Patches,
) -> None:
    """Let `torch.autograd.grad` return the gradients of one process until `patches` are undone.

    Args:
        module: The module with sharded layers.
        sharding: The result of `apply_plan`.
        rules: How its tensors are sharded, by name.
        group: The tensor-parallel group.
        is_whole: Tells whether this rank runs the full module now.
        patches: Collects the replacement, to undo it.
    """

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        is_inside = False

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            # Under a mode that watches functions, torch's own function calls itself.
            if is_inside or is_whole():
                return own(outputs, inputs, *args, **kwargs)
            is_inside = True
            try:
                return whole(own, outputs, inputs, args, kwargs)
            finally:
                is_inside = False

        return grad

    def whole(own: Callable[..., Any], outputs: Any, inputs: Any, args: Any, kwargs: Any) -> Any:
        asked = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if not any(isinstance(value, Tensor) for value in asked):
            return own(outputs, inputs, *args, **kwargs)
        names = {id(value): name for name, value in module.named_parameters()}
        known = {index: names[id(value)] for index, value in enumerate(asked) if id(value) in names}
        known = {index: name for index, name in known.items() if name in rules or name in sharding.partial}
        logits = [index for index, value in enumerate(asked) if isinstance(value, Piece)]
        if logits:
            found = _through_pieces(own, outputs, asked, logits, args, kwargs)
        else:
            found = list(own(outputs, inputs, *args, **kwargs))
        for index, name in known.items():
            if found[index] is not None:
                found[index] = _completed(found[index], name, rules.get(name), sharding, group)
        return tuple(found)

    patches.replace_function(torch.autograd.grad, make)


def _completed(part: Tensor, name: str, rule: Shard | None, sharding: Sharding, group: Group) -> Tensor:
    if rule is None:
        return reduce_from_group(part, group)
    if name in sharding.partial:
        # A copy, because the reduction is in place, and autograd may share the tensor that it returns.
        part = part.clone()
        with torch.no_grad():
            reduce_partial_({name: part}, {name: rule}, group)
    return Piece.by_rule(part, rule, group)


def _through_pieces(
    own: Callable[..., Any], outputs: Any, asked: Sequence[Any], logits: Sequence[int], args: Any, kwargs: Any
) -> list[Any]:
    """Return the asked gradients; for sharded logits through their pieces, because losses are computed from pieces.

    A view collects gradients through its piece and through the full logits; both are added. Gradients of the logits
    themselves all pass through their piece.
    """
    names = ("grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")  # torch's order
    given = dict(zip(names, args), **kwargs)
    allow_unused = bool(given.pop("allow_unused", None))
    inputs = list(asked)
    pieces: dict[int, Tensor] = {}
    for index in logits:
        value = asked[index]
        piece = value.valid_part
        if piece is None:
            continue
        pieces[index] = piece
        if value.grad_fn is not None and value.grad_fn.name() == "_WholeOfPartBackward":
            inputs[index] = piece
    views = [index for index in pieces if inputs[index] is asked[index]]
    # Some pieces may be unused; the `allow_unused` of the caller applies to the result below.
    results = own(outputs, [*inputs, *(pieces[index] for index in views)], allow_unused=True, **given)
    found = list(results[: len(inputs)])
    for index in pieces:
        value, part = asked[index], found[index]
        whole = None
        if index in views:
            whole, part = part, results[len(inputs) + views.index(index)]
        if part is not None:
            # With `create_graph=True` code may differentiate the gathered gradient.
            part = gather_from_group(part.contiguous(), value.family.group, value.place, value.family.extents)
        found[index] = whole if part is None else part if whole is None else part + whole
    if not allow_unused and any(gradient is None for gradient in found):
        raise RuntimeError("The outputs do not depend on one of the tensors whose gradient the step asks for")
    return found
