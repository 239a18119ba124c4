"""Tensors whose sizes differ from the data of this rank, for code that takes lengths and widths from a tensor.

    Piece          this rank's part along one dimension, the full size in its shape   b, t, c = x.shape
    NarrowInput    full values, the features of this rank's heads in its shape        x.view(b, t, heads, c // heads)

Rules of a `Piece`:

1. Sizes are the full ones. Functions about sizes, dtype and device need no communication.
2. A function that computes each index of the sharded dimension by itself runs on the part, and returns a `Piece`.
   Full tensors among its arguments are cut alike. A parameter there gets the gradient of the part only.
3. Any other function gathers, which is exact and slower: each rank computes the same ordinary tensor.
4. A function that changes a `Piece` in place, and is no function of rule 2, raises an error.

Sharding-aware layers take the tensor behind both (`Piece.part`, `whole_input`), so they pay nothing for the wrapper.
`ELEMENTWISE` and `CASTS` also hold for sharded logits (`tensor.logits`), which stay a part of autograd's graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import DisableTorchFunctionSubclass, FakeTensor, pytree
from lightning_parallel.tensor.autograd import gather_from_group, scatter_to_group
from lightning_parallel.tensor.linear import SequenceLengths

__all__ = ["CASTS", "ELEMENTWISE", "NarrowInput", "Piece", "positions_of", "whole_input"]

_SIZES = {Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement}  # type: ignore[attr-defined]
# Functions that read no values, or make tensors with other values.
_ABOUT_SIZES = {
    *("dim", "ndimension", "is_floating_point", "is_complex", "element_size", "get_device", "__len__", "__repr__"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "zeros_like", "ones_like", "empty_like"),
    *("full_like", "__hash__", "is_contiguous"),
}
_ABOUT_TENSOR = {"dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "requires_grad", "is_sparse"}
_ABOUT_TENSOR |= {"is_nested", "is_quantized", "names", "is_mps", "is_xpu", "itemsize"}

# Functions that give each number in another format.
CASTS = {"float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone"}
# Functions of each element and of the elements at the same place in other arguments; the code of heads has these.
ELEMENTWISE = {"mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "neg", "negative"}
ELEMENTWISE |= {"__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__", "__rsub__", "__neg__"}
ELEMENTWISE |= {"tanh", "sigmoid", "clamp", "abs", "masked_fill", "where"}
# More such functions, for pieces only: logits that are gathered are kept, and their powers would be gathered again.
_ANY_ELEMENTWISE = ELEMENTWISE | {
    *("pow", "rsub", "exp", "log", "sqrt", "rsqrt", "square", "reciprocal", "clip", "addcmul", "lerp", "relu", "gelu"),
    *("silu", "elu", "leaky_relu", "mish", "softplus", "hardswish", "relu6", "logsigmoid", "selu", "celu", "sin"),
    *("cos", "erf", "__pow__", "__rtruediv__"),
}
_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
_DROPOUTS = {"dropout", "alpha_dropout"}
_OVER_FEATURES = {"layer_norm", "rms_norm"}
_REDUCTIONS = {"mean", "var", "std", "sum", "norm", "softmax", "log_softmax", "amax", "amin", "normalize"}


class NarrowInput(Tensor):
    """Full input (..., E) of an attention, whose last size reads as the width of this rank's heads.

    Code such as `x.view(b, t, heads, x.shape[-1] // heads)` takes the width of its heads from its input. Functions
    compute on the full tensor, and a result with as many features is narrow again.
    """

    whole: Tensor

    @staticmethod
    def of(whole: Tensor, features: int) -> NarrowInput:
        """Let the last size of `whole` read as `features`."""
        narrow = _without_values(whole, (*whole.shape[:-1], features)).as_subclass(NarrowInput)
        narrow.whole = whole
        return narrow

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Sizes come from the wrapper; any other function needs the full values.
        if func in _SIZES:
            return super().__torch_function__(func, types, args, kwargs)
        narrow = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, NarrowInput))
        features, local = narrow.whole.shape[-1], narrow.shape[-1]
        args, kwargs = pytree.tree_map(whole_input, (args, kwargs))
        result = func(*args, **kwargs)

        def again(leaf: Any) -> Any:
            is_wide = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[-1] == features
            return NarrowInput.of(leaf, local) if is_wide else leaf

        return pytree.tree_map(again, result)


def whole_input(value: Any) -> Any:
    """Return the tensor that a `NarrowInput` stands for; return any other value unchanged."""
    return value.whole if isinstance(value, NarrowInput) else value


def _without_values(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of that shape whose values no code should read; they are NaN, so a read shows."""
    with torch.no_grad():
        made = like.new_full((1,), float("nan"))
        if not isinstance(made, FakeTensor) and type(made).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            # `like` is the placeholder of another pipeline stage, and `as_subclass` rejects its class.
            made = torch.full((1,), float("nan"), dtype=like.dtype, device=like.device)
        return made.expand(*shape)


class Piece(Tensor):
    """Part of a full tensor whose sizes read as the full ones; see the rules of this module.

    Attributes:
        part: The data of this rank, a part of autograd's graph.
        group: The group over which the tensor is sharded.
        place: The sharded dimension.
        extents: The extent of the part of each rank in that dimension.
    """

    part: Tensor
    group: Group
    place: int
    extents: tuple[int, ...]

    @staticmethod
    def of(part: Tensor, group: Group, place: int, extents: Sequence[int]) -> Piece:
        """Let the sizes of a `part` read as the full sizes."""
        shape = (*part.shape[:place], sum(extents), *part.shape[place + 1 :])
        piece = _without_values(part, shape).as_subclass(Piece)
        piece.part = part
        piece.group = group
        piece.place = place
        piece.extents = tuple(extents)
        return piece

    def gathered(self) -> Tensor:
        """Return the full tensor, for a computation that all ranks repeat."""
        return gather_from_group(self.part, self.group, self.place, self.extents)

    def has_rows_in(self, other: Tensor) -> bool:
        """Return whether a full tensor, which broadcasts with this one, has a row for each index of the dimension."""
        from_the_end = self.dim() - self.place
        return other.dim() >= from_the_end and other.shape[-from_the_end] != 1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if NarrowInput in types:
            return NotImplemented  # its functions compute on the tensor behind it, which may be a piece
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # The wrapper has the full sizes, so these functions need no gather.
        if func in _SIZES or name in _ABOUT_SIZES:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        owner = getattr(func, "__self__", None)
        if name == "__get__" and getattr(owner, "__name__", "") in _ABOUT_TENSOR:
            # The wrapper has no graph, so the part answers for it.
            found = args[0].part if getattr(owner, "__name__", "") == "requires_grad" else args[0]
            with DisableTorchFunctionSubclass():
                return func(found)
        leaves = pytree.tree_leaves((args, kwargs))
        first = next(leaf for leaf in leaves if isinstance(leaf, Piece))
        if _is_by_row(name, args, kwargs, leaves, first):
            is_cut = _base_name(name) in _ANY_ELEMENTWISE
            args, kwargs = pytree.tree_map(partial(_own_part, first, is_cut), (args, kwargs))
            result = func(*args, **kwargs)
            return pytree.tree_map_only(
                Tensor, lambda leaf: Piece.of(leaf, first.group, first.place, first.extents), result
            )
        # The change would be lost with the gathered tensor.
        if _changes_first(name) and isinstance(args[0], Piece):
            raise RuntimeError(
                f"Hidden states that are sharded along the sequence must not change in place by `{name}`, which mixes"
                " positions. Use the form that makes a new tensor, or `sequence_parallel=False`"
            )
        args, kwargs = pytree.tree_map(_gathered, (args, kwargs))
        return func(*args, **kwargs)


def _own_part(like: Piece, is_cut: bool, value: Any) -> Any:
    """Return the rows of this rank in an argument of a function that treats each row of `like` alone."""
    if isinstance(value, Piece):
        return value.part
    if is_cut and isinstance(value, Tensor) and like.has_rows_in(value):
        return scatter_to_group(value, like.group, like.place - like.dim(), like.extents)
    return value


def _gathered(value: Any) -> Any:
    return value.gathered() if isinstance(value, Piece) else value


def positions_of(part: Tensor, lengths: SequenceLengths) -> Tensor:
    """Return a `Piece` for the positions of this rank; gather a tensor without data, which only shows shapes."""
    make = Piece.of if type(part) in (Tensor, nn.Parameter) else gather_from_group
    return make(part, lengths.group, *lengths.of_piece(part))


def _changes_first(name: str) -> bool:
    return name in _IN_PLACE or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _base_name(name: str) -> str:
    """Return the name of the function that computes the same as `name`, but makes a new tensor."""
    if name in _IN_PLACE:
        return f"__{name[3:]}"
    return name[:-1] if _changes_first(name) and name != "__setitem__" else name


def _is_by_row(name: str, args: Sequence[Any], kwargs: dict[str, Any], leaves: Sequence[Any], first: Piece) -> bool:
    """Return whether a function computes each index of the sharded dimension by itself, given these arguments."""
    pieces = [leaf for leaf in leaves if isinstance(leaf, Piece)]
    # Inputs with different shards do not match element by element.
    if any((other.dim(), other.place, other.extents) != (first.dim(), first.place, first.extents) for other in pieces):
        return False
    if first.place >= first.dim() - 1 or not args or "out" in kwargs:
        return False
    # A full tensor that changes in place must change as a whole.
    if _changes_first(name) and not isinstance(args[0], Piece):
        return False
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Piece)]
    if name == "linear":
        return isinstance(args[0], Piece) and len(pieces) == 1
    if name in CASTS or name == "detach":
        return isinstance(args[0], Piece)
    if _base_name(name) in _ANY_ELEMENTWISE:
        return _broadcasts(first, pieces, others)
    # A tensor of one dimension broadcasts along the features, because positions always come before features.
    if any(other.dim() > 1 for other in others):
        return False
    if name in _OVER_FEATURES:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return len(shape) == 1
    if name in _REDUCTIONS:
        return _reduced(name, args, kwargs) in ((-1,), (first.dim() - 1,))
    return _base_name(name) in _DROPOUTS


def _broadcasts(first: Piece, pieces: Sequence[Piece], others: Sequence[Tensor]) -> bool:
    """Return whether the elements of `others` that belong to the rows of this rank are known."""
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in (*pieces, *others)))
    if len(shape) != first.dim() or shape[first.place] != first.shape[first.place]:
        return False
    # A tensor with a graph that broadcasts over the rows would get the gradient of the part only. Parameters have one
    # dimension, and their gradients are summed over the ranks.
    return not any(other.requires_grad and other.dim() > 1 and not first.has_rows_in(other) for other in others)


def _reduced(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the dimensions over which a function reduces, if its arguments name them."""
    place = 2 if name in ("norm", "normalize") else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else None)
    return tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
