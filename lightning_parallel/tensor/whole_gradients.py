"""Gradients that the user's code asks for directly, by `torch.autograd.grad(loss, weight)`: as in one process.

    of sharded logits       the gradient of the pieces, gathered
    of a sharded weight     a `ShardGradient`: element-wise operations keep this rank's part; any other operation, such
                            as a norm, gathers the full gradient
    of a partial gradient   the sum over the ranks

Either every rank of the tensor-parallel group asks, or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import DisableTorchFunctionSubclass, pytree
from lightning_parallel.tensor.autograd import gather_from_group
from lightning_parallel.tensor.pieces import Piece
from lightning_parallel.tensor.plan import Sharding
from lightning_parallel.tensor.sharded import ShardedTensor
from lightning_parallel.tensor.sharding import Shard, reduce_partial_

__all__ = ["ShardGradient", "give_whole_gradients"]

_ELEMENTWISE = {"mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "neg", "negative", "pow"}
_ELEMENTWISE |= {"square", "sqrt", "rsqrt", "abs", "exp", "log", "sign", "clamp", "clip", "reciprocal", "lerp"}
_ELEMENTWISE |= {"addcmul", "addcdiv", "where", "zeros_like", "ones_like", "empty_like", "nan_to_num", "copy_"}
_ELEMENTWISE |= {"maximum", "minimum", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "gt", "le", "ge", "rsub"}
_CASTS = {
    "detach",
    "clone",
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "type",
    "type_as",
    "contiguous",
    "cpu",
    "cuda",
}
# Functions that read facts about the part, or do not compute.
_PLAIN = {"__get__", "__set__", "__delete__", "dim", "size", "numel", "stride", "is_floating_point", "is_contiguous"}
_PLAIN |= {"requires_grad_", "data_ptr", "untyped_storage", "storage_offset", "is_complex", "ndimension", "__hash__"}
_PLAIN |= {"register_hook", "backward", "element_size", "get_device", "is_sparse", "is_shared", "grad"}
# Optimizers and these packages handle the part as a part.
_OURS = {"lightning_parallel", "lightning", "pytorch_lightning"}
_OPTIMIZERS = ("torch.optim.", "torch.nn.utils.", "torch.autograd.")


class ShardGradient(Tensor):
    """This rank's part of the gradient of a sharded parameter; the user's code sees the full gradient.

    Attributes:
        rule: How it is sharded.
        group: The tensor-parallel group.
        parameter: Its name.
    """

    rule: Shard
    group: Group
    parameter: str

    @staticmethod
    def of(part: Tensor, rule: Shard, group: Group, name: str) -> ShardGradient:
        """Return `part` as the shard of a gradient."""
        gradient = part.as_subclass(ShardGradient)
        gradient.rule, gradient.group, gradient.parameter = rule, group, name
        return gradient

    def whole(self) -> Tensor:
        """Return the gradient of the full parameter; every rank of the group must call it."""
        rule, layer = self.rule, self.parameter.rpartition(".")[0]
        with DisableTorchFunctionSubclass():
            if self.requires_grad:
                raise RuntimeError(
                    f"The step differentiates the gradient of `{self.parameter}`, which is sharded over ranks"
                    " (`create_graph=True`). Only elementwise operations support this. Keep its layer replicated with"
                    f" tensor_plan={{..., {layer!r}: 'replicate'}}"
                )
            gathered = comm.all_gather(self.as_subclass(Tensor).detach(), self.group, rule.dim, rule.sizes)
            return rule.merge(gathered.split(rule.sizes, rule.dim))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        leaves = pytree.tree_leaves((args, kwargs))
        first = next((leaf for leaf in leaves if isinstance(leaf, ShardGradient)), None)
        with DisableTorchFunctionSubclass():
            if first is None or name in _PLAIN or _is_called_by_us():
                return func(*args, **kwargs)
            if _is_elementwise(name, first, leaves):
                result = func(*args, **kwargs)
                return pytree.tree_map(lambda value: _kept(value, first, leaves), result)
            whole = pytree.tree_map(lambda leaf: leaf.whole() if isinstance(leaf, cls) else leaf, (args, kwargs))
            return func(*whole[0], **whole[1])


def _is_called_by_us() -> bool:
    """Return whether the caller is code that handles parts: this library or an optimizer."""
    # Frame 0 is this function, and frame 1 is `__torch_function__`.
    frame = sys._getframe(2)
    # A mode that watches the step adds its own frame before the caller's.
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    caller = frame.f_globals.get("__name__", "")
    return caller.partition(".")[0] in _OURS or caller.startswith(_OPTIMIZERS)


def _is_elementwise(name: str, first: ShardGradient, leaves: Sequence[Any]) -> bool:
    """Return whether an operation treats each number alike, on tensors that are parts of the same kind."""
    # `mul_`, `__imul__` and `__rmul__` are all `mul`.
    base = name.removesuffix("_") if not name.endswith("__") else name.strip("_").removeprefix("i").removeprefix("r")
    is_known = {name, base, name.strip("_")} & (_ELEMENTWISE | _CASTS) or name.lstrip("_").startswith("foreach_")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return bool(is_known) and all(tensor.dim() == 0 or tensor.shape == first.shape for tensor in tensors)


def _kept(value: Any, first: ShardGradient, inputs: Sequence[Any]) -> Any:
    """Return a result as a part, unless it is an input that was changed in place."""
    is_new = isinstance(value, Tensor) and not any(value is each for each in inputs)
    if not is_new or value.shape != first.shape:
        return value
    return ShardGradient.of(value, first.rule, first.group, first.parameter)


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
                is_full = isinstance(asked[index], ShardedTensor)
                found[index] = _completed(found[index], name, rules.get(name), sharding, group, is_full)
        return tuple(found)

    patches.replace_function(torch.autograd.grad, make)


def _completed(part: Tensor, name: str, rule: Shard | None, sharding: Sharding, group: Group, is_full: bool) -> Tensor:
    if name in sharding.partial:
        # A copy, because the reduction is in place, and autograd may share the tensor that it returns.
        part = part.clone()
        with torch.no_grad():
            reduce_partial_({name: part}, {} if rule is None else {name: rule}, group)
    if rule is None:
        return part
    # Beside a parameter that reads as full, its gradient must do so too.
    return Piece.by_rule(part, rule, group) if is_full else ShardGradient.of(part, rule, group, name)


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
