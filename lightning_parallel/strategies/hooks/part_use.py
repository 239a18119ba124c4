"""Checks operations on parts of tensors outside sharded layers.

    allowed     elementwise operations with elements at the same places, or with numbers that are equal on all ranks;
                operations along dimensions that are not sharded, such as a norm of each full row
    refused     all other operations, which would give each rank another result: reductions, products, draws, and
                numbers for Python

A pipeline stage may hold full parameters, but not all of them. An operation that combines several parameters gives each
stage another result. So does a value for Python or a log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.compat.torch import TorchDispatchMode, base_name, pytree, schema_of
from lightning_parallel.strategies.hooks.parts import (
    MIXED,
    Part,
    PartMap,
    Placed,
    covers_part,
    divided_dims,
    storage_of,
)
from lightning_parallel.tensor.sharding import ShowsFullShape

__all__ = ["GATHERED", "ExportMode", "GatheredMode", "PartUseMode", "Refusal"]

Refusal = Callable[[str, "Sequence[Part]"], None]
"""Takes a text about an operation, and the parts in the operation."""

GATHERED = "into the gathered copy in a state dict of"

# Elementwise operators and copies without torch's tag `pointwise`.
_ALSO_ELEMENTWISE = {
    *("to_copy", "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp", "clamp_max"),
    *("clamp_min", "clone", "contiguous", "copy", "cos", "cosh", "detach", "div", "erf", "erfc", "exp", "expm1"),
    *("floor", "floor_divide", "frac", "lerp", "lgamma", "lift_fresh", "log", "log10", "log1p", "log2", "masked_fill"),
    *("maximum", "minimum", "mul", "nan_to_num", "neg", "polar", "pow", "reciprocal", "relu", "round", "rsqrt", "sgn"),
    *("sigmoid", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "threshold", "trunc", "where", "xlogy"),
}
_CONSTANT = {
    *("zero", "fill", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full"),
    *("new_empty", "new_empty_strided", "zeros", "ones", "full", "empty", "empty_strided", "scalar_tensor", "resize"),
}
# Operators that combine elements only along `dim`.
_ALONG = {
    *("sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm"),
    *("logsumexp", "all", "any", "prod", "argmax", "argmin", "softmax", "log_softmax", "cumsum", "cumprod", "sort"),
    *("topk", "median", "flip", "nansum"),
}
_LEAVES = {"local_scalar_dense", "is_nonzero", "equal"}


class PartUseMode(TorchDispatchMode):
    """Follows parts through every operator, and calls `refuse` where ranks would get different results.

    Args:
        parts: The known parts.
        refuse: Notes a refusal; the operation goes on.
        is_users: Tells whether the user's own code has called the operation.
        is_logging: Tells whether Lightning's `log` has called it.
    """

    def __init__(
        self, parts: PartMap, refuse: Refusal, is_users: Callable[[], bool], is_logging: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._parts = parts
        self._refuse = refuse
        self._is_users = is_users
        self._is_logging = is_logging

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Operators must see the memory of this rank, not the shape of the full tensor.
        args, kwargs = pytree.tree_map_only(ShowsFullShape, Tensor.detach, (args, kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        placed = {id(tensor): found for tensor in tensors if (found := self._parts.find(tensor)) is not None}
        # This library and the model itself handle parts correctly; only the user's own code is checked.
        if placed and not self._is_users():
            return func(*args, **kwargs)
        # Before the call: `set_` gives its tensor other memory, as `deepcopy` gives the memory that it reads.
        overwritten = self._gathered(func, args, kwargs) if schema_of(func).is_mutable else None
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            # A shape that fits the full tensor does not fit a part: name the part beside torch's error.
            if placed:
                self._refuse(f"`{base_name(func)}` with a tensor of another shape", [p.part for p in placed.values()])
            raise
        if overwritten is not None and self._is_users():
            # On one process, the write would change the parameter.
            self._refuse(f"writes (`{base_name(func)}`) {GATHERED}", [overwritten])
        if placed:
            self._follow(func, args, kwargs, tensors, placed, result)
        else:
            self._note_origin(func, tensors, result)
        return result

    def _gathered(self, func: Any, args: Any, kwargs: Any) -> Part | None:
        """Return the part whose gathered copy an operator writes; None if it writes other memory."""
        written = pytree.tree_leaves(kwargs["out"] if kwargs.get("out") is not None else args[:1])
        found = (self._parts.gathered(tensor) for tensor in written if isinstance(tensor, Tensor))
        return next((part for part in found if part is not None), None)

    def _note_origin(self, func: Any, tensors: list[Tensor], result: Any) -> None:
        name = base_name(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            origin = "drawn"
        elif name in _CONSTANT:
            return
        elif not tensors:
            origin = "made"
        else:
            known = {self._parts.origin(tensor) for tensor in tensors}
            origin = "drawn" if "drawn" in known else "made" if "made" in known else ""
        if origin:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._parts.note_origin(leaf, origin)

    def _follow(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], placed: dict[int, Placed], result: Any
    ) -> None:
        """Refuse an operation with parts, or note the parts in its result."""
        name = base_name(func)
        parts = [found.part for found in placed.values()]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        is_divided = any(part.is_divided for part in parts)
        if torch.Tag.nondeterministic_seeded in func.tags:
            if name.endswith("_like") or name.startswith("new_"):
                for tensor in made:
                    self._parts.note_origin(tensor, "drawn")
                return
            self._refuse(f"draws random numbers (`{name}`) for", parts)
        elif self._is_view(func, tensors, made):
            self._check_views(made, name)
        elif name in _CONSTANT and not any(id(tensor) in placed for tensor in tensors[1:]):
            pass
        elif name in _LEAVES:
            if name != "equal" or not self._is_known(result, tensors, placed):
                self._refuse("takes a Python number out of", parts)
        elif name in ("clone", "copy") and MIXED in parts and all(tensor.dtype == torch.uint8 for tensor in tensors):
            pass  # `deepcopy` copies the memory that several tensors share, as bytes
        elif MIXED in parts:
            self._refuse(f"`{name}` combines", parts)
        elif any(not part.is_divided for part in parts) and self._is_logging():
            self._refuse("logs", parts)
        elif torch.Tag.pointwise in func.tags or name in _ALSO_ELEMENTWISE:
            for operands, target in _rows(func, args, kwargs, result):
                self._elementwise(name, operands, target)
        elif not is_divided:
            self._combine(name, tensors, placed, made)
        else:
            self._along(func, name, args, kwargs, placed, made)

    @staticmethod
    def _is_known(is_equal: bool, tensors: list[Tensor], placed: dict[int, Placed]) -> bool:
        """Tell whether one process would get the same answer; `BaseFinetuning` compares parameters with `equal`."""
        first, second = tensors
        if is_equal:
            # Equal parts prove nothing about the other ranks, except for one tensor in the same memory.
            return first.data_ptr() == second.data_ptr() and first.stride() == second.stride()
        found = [placed[id(tensor)].part if id(tensor) in placed else None for tensor in tensors]
        if any(part is not None and part.is_slice for part in found):
            return False
        one, other = [part.ranges if part is not None and part.is_divided else None for part in found]
        # Full tensors differ if parts at the same places differ. Tensors of different shapes are never equal.
        if first.shape == second.shape and (one == other or one is None or other is None):
            return True
        if _full_shape(first, found[0]) != _full_shape(second, found[1]):
            return True
        # This rank holds one tensor in full. A value of the part that the full tensor lacks proves a difference.
        part, full = (first, second) if one is not None else (second, first)
        return (one is None or other is None) and not bool(torch.isin(part.detach(), full.detach()).all())

    @staticmethod
    def _is_view(func: Any, tensors: list[Tensor], made: list[Tensor]) -> bool:
        if schema_of(func).is_mutable or not made:
            return False
        known = {storage_of(tensor) for tensor in tensors}
        return all((storage := storage_of(tensor)) is not None and storage in known for tensor in made)

    def _check_views(self, made: list[Tensor], name: str) -> None:
        for view in made:
            found = self._parts.find(view)
            if found is None or found.part is MIXED or not found.part.is_divided:
                continue
            if not covers_part(view, found.part, divided_dims(view, found.part)):
                self._refuse(f"indexes (`{name}`)", [found.part])
                return

    # ------------------------------------------------------------------------------------------ element by element

    def _elementwise(self, name: str, operands: list[Tensor], target: Tensor | None) -> None:
        """Check an elementwise operation, and note its result `target`."""
        placed = [(tensor, found.part) for tensor in operands if (found := self._parts.find(tensor)) is not None]
        if not placed or target is None:
            return
        parts = [part for _, part in placed]
        joined = {part.owners for part in parts} if any(part.is_joined for part in parts) else set()
        if len(joined) > 1:
            self._refuse(f"`{name}` combines", parts)
            return
        if any(part is MIXED for part in parts):
            self._refuse(f"`{name}` combines", parts)
            return
        divided = [(tensor, part) for tensor, part in placed if part.is_divided]
        for tensor, part in divided:
            reason = self._misfit(tensor, part, operands, target)
            if reason:
                self._refuse(reason, parts)
                return
        others = [tensor for tensor in operands if tensor is not target and self._parts.find(tensor) is None]
        if not divided and any(self._parts.origin(tensor) == "drawn" for tensor in others):
            # A stage draws only for its own parameters, so its draws differ from one process.
            self._refuse(f"`{name}` combines random numbers with", parts)
            return
        if self._parts.find(target) is None:
            self._register(target, *(divided or placed)[0], parts)

    def _misfit(self, tensor: Tensor, part: Part, operands: list[Tensor], target: Tensor) -> str:
        """Return a text if other operands do not fit the places of a sharded operand; empty if they fit."""
        for dim in divided_dims(tensor, part):
            # From the right, because broadcasting aligns shapes there.
            place = dim - tensor.dim()
            size = tensor.shape[dim]
            if -place <= target.dim() and target.shape[place] != size:
                return "scatters"
            for other in operands:
                # An operand that is broadcast along this dimension has the same number for all places.
                if other is tensor or -place > other.dim() or other.shape[place] == 1:
                    continue
                found = self._parts.find(other)
                if found is None:
                    # A tensor from before the watch, such as a copy, has no known origin and passes.
                    if self._parts.origin(other) == "drawn":
                        return "combines random numbers with"
                    if self._parts.origin(other) == "made":
                        return "combines other numbers, made for its shape, with"
                elif found.part.is_divided and found.part.ranges != part.ranges:
                    return "combines parts of different places of"
                elif not found.part.is_divided:
                    return "combines full tensors with"
        return ""

    def _register(self, target: Tensor, tensor: Tensor, part: Part, parts: list[Part]) -> None:
        """Note that `target` holds elements of a part, at the places of `tensor`."""
        owners = frozenset().union(*(one.owners for one in parts))
        new = replace(part, owners=owners, is_joined=any(one.is_joined for one in parts))
        if part.is_slice:
            new = replace(new, stride=1, size=target.numel(), is_inside=False)
        elif part.size:
            dims = divided_dims(tensor, part)
            dim = next(iter(dims)) if len(dims) == 1 else None
            if dim is not None and tensor.shape[dim] == part.size:
                place = dim - tensor.dim()
                # The result may have another order in memory than the operand.
                new = replace(new, stride=max(1, target.stride(place)))
            elif target.shape != tensor.shape or target.stride() != tensor.stride():
                self._refuse("rearranges", parts)
                return
        self._parts.add(target, new)

    # --------------------------------------------------------------------------------------------- other operations

    def _combine(self, name: str, tensors: list[Tensor], placed: dict[int, Placed], made: list[Tensor]) -> None:
        """Check an operation on full parameters of a pipeline stage, which may use one parameter at a time."""
        parts = [found.part for found in placed.values()]
        owners = {part.owners for part in parts}
        if len(owners) > 1 and name not in ("linalg_vector_norm", "norm", "max"):
            self._refuse(f"`{name}` combines", parts)
            return
        ordered = [placed[id(tensor)].part for tensor in tensors if id(tensor) in placed]
        for index, tensor in enumerate(made):
            # A call with a list of tensors has one result for each.
            part = ordered[index] if len(made) == len(ordered) else ordered[0]
            self._parts.add(tensor, replace(part, label=f"`{name}` of {part.label}", is_joined=True))

    def _along(
        self, func: Any, name: str, args: Any, kwargs: Any, placed: dict[int, Placed], made: list[Tensor]
    ) -> None:
        """Check an operation along some dimensions, which must not include the sharded dimension."""
        parts = [found.part for found in placed.values()]
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        arguments = schema_of(func).arguments
        given = {one.name: one.default_value for one in arguments if one.has_default_value()}
        given |= dict(zip((one.name for one in arguments), args)) | kwargs
        dims = given.get("dim")
        # No dimension, or an empty list, stands for all dimensions.
        if name not in _ALONG or tensor is None or len(parts) > 1 or dims is None or dims == [] or not tensor.dim():
            self._refuse(f"`{name}` combines elements of", parts)
            return
        part = parts[0]
        chosen = {dim % tensor.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
        divided = divided_dims(tensor, part)
        if chosen & divided or len(divided) != 1 or part.is_slice:
            self._refuse(f"`{name}` combines elements of", parts)
            return
        (dim,) = divided
        for result in made:
            # Without `keepdim`, reduced dimensions before the sharded dimension are gone from the result.
            place = dim if result.dim() == tensor.dim() else dim - sum(one < dim for one in chosen)
            if result.dim() and result.shape[place] == tensor.shape[dim] == part.size:
                self._parts.add(result, replace(part, stride=max(1, result.stride(place)), is_joined=True))


def _full_shape(tensor: Tensor, part: Part | None) -> tuple[int, ...]:
    """Return the shape of a tensor on one process."""
    shape = list(tensor.shape)
    if part is not None and part.is_divided:
        for dim in divided_dims(tensor, part):
            shape[dim] = max(stop for ranges in part.ranges for _, stop in ranges)
    return tuple(shape)


def _rows(func: Any, args: Any, kwargs: Any, result: Any) -> list[tuple[list[Tensor], Tensor | None]]:
    """Return the operands and the result of an elementwise operator; for a `foreach` operator, one pair per tensor."""
    values = [*args, *kwargs.values()]
    lists = [value for value in values if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)]
    single = [value for value in values if isinstance(value, Tensor)]
    is_mutable = schema_of(func).is_mutable
    if not lists:
        target = (kwargs.get("out") if kwargs.get("out") is not None else args[0]) if is_mutable else result
        return [(single, target if isinstance(target, Tensor) else None)]
    targets = lists[0] if is_mutable else result
    return [([*(each[i] for each in lists), *single], targets[i]) for i in range(len(lists[0]))]


class GatheredMode(torch.overrides.TorchFunctionMode):
    """Refuses a step that writes into gathered copies of a state dict, which are the parameters on one process.

    Args:
        parts: The known parts.
    """

    def __init__(self, parts: PartMap) -> None:
        super().__init__()
        self._parts = parts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_write = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))
        for tensor in pytree.tree_leaves((args[:1] if is_write else (), kwargs.get("out"))):
            part = self._parts.gathered(tensor) if isinstance(tensor, Tensor) else None
            if part is not None:
                raise RuntimeError(
                    f"The step writes (`{name}`) {GATHERED} {part.label}, which is {part.why}. This write is lost."
                    " Write into `parameters()` and `buffers()`, which hold each rank's part"
                )
        return func(*args, **kwargs)


_EXPORTS = {"numpy", "tolist", "__array__", "__dlpack__", "storage", "untyped_storage", "__reduce_ex__"}
_MADE = {"from_numpy", "tensor", "as_tensor", "asarray", "frombuffer"}
_PROPERTIES: Any = Tensor
_SET = (_PROPERTIES.data.__set__, _PROPERTIES.grad.__set__)
_GET_GRAD = _PROPERTIES.grad.__get__
_SHAPE = (_PROPERTIES.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement)


class ExportMode(torch.overrides.TorchFunctionMode):
    """Watches calls without an operator: exports of parts to numpy, Python or a file, copies, and replaced data.

    Args:
        parts: The known parts.
        refuse: Notes a refusal; the operation goes on.
        is_users: Tells whether the user's own code has called the operation.
        tell_shape: Takes a part whose shape the code reads.
        tell_missing: Takes a tensor without a gradient, if the code reads the gradient.
    """

    def __init__(
        self,
        parts: PartMap,
        refuse: Refusal,
        is_users: Callable[[], bool],
        tell_shape: Callable[[Part], None],
        tell_missing: Callable[[Tensor], None],
    ) -> None:
        super().__init__()
        self._parts = parts
        self._refuse = refuse
        self._is_users = is_users
        self._tell_shape = tell_shape
        self._tell_missing = tell_missing

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        found = self._parts.find(args[0]) if args and isinstance(args[0], Tensor) else None
        if name in _EXPORTS and found is not None and self._is_users():
            self._refuse(f"takes values out of torch (`{name}`) from", [found.part])
        elif func in _SET and found is not None and isinstance(args[1], Tensor):
            self._check_written(found.part, args[1])
        elif func in _SHAPE and found is not None and found.part.is_divided:
            self._tell_shape(found.part)
        result = func(*args, **kwargs)
        # `==` rather than `is`: each access to a property's `__get__` makes a new wrapper.
        if func == _GET_GRAD and result is None:
            self._tell_missing(args[0])
        if name == "__deepcopy__" and found is not None and isinstance(result, Tensor):
            # `deepcopy` copies memory without an operator, so no dispatch mode sees the copy.
            self._parts.add(result, found.part)
        elif name in _MADE and isinstance(result, Tensor) and result.numel() > 1:
            # The numbers come from outside torch, so they may be random.
            self._parts.note_origin(result, "drawn")
        return result

    def _check_written(self, part: Part, value: Tensor) -> None:
        origin = self._parts.origin(value)
        differs = origin == "drawn" or (origin != "" and part.is_divided)
        if differs and value.numel() > 1 and self._parts.find(value) is None and self._is_users():
            self._refuse("writes random or other new numbers into", [part])
