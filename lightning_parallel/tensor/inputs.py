"""Inputs whose sizes differ from this rank's data, for code that takes lengths and widths from its input.

    NarrowInput    full values, the features of this rank's heads in its shape     x.view(b, t, heads, c // heads)
    DividedInput   this rank's positions, the positions of all ranks in its shape  b, t, c = x.shape

Sharding-aware layers take the tensor behind it (`whole_input`, `DividedInput.piece`). With sequence parallelism,
functions that compute each position by itself run on this rank's positions, and take the same positions of full
tensors. For any other function the sequence is gathered, which is right but slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.compat.torch import DisableTorchFunctionSubclass, FakeTensor, pytree
from lightning_parallel.tensor.autograd import gather_from_group, scatter_to_group
from lightning_parallel.tensor.linear import SequenceLengths

__all__ = ["DividedInput", "NarrowInput", "divided_input", "whole_input"]

_SIZES = {Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement}  # type: ignore[attr-defined]


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


# ---------------------------------------------------------------------------------------------- sharded along positions


class DividedInput(Tensor):
    """Activations (B, L, E) whose sizes read as the full ones, although this rank holds only some positions.

    Attributes:
        piece: This rank's part.
        lengths: How sequences are sharded.
        division: The sharded dimension, and the extent of each rank's part.
    """

    piece: Tensor
    lengths: SequenceLengths
    division: tuple[int, list[int]]

    @staticmethod
    def of(piece: Tensor, lengths: SequenceLengths, division: tuple[int, list[int]] | None = None) -> DividedInput:
        """Let the sizes of a `piece` read as the full sizes."""
        dim, parts = division = lengths.of_piece(piece) if division is None else division
        shape = (*piece.shape[:dim], sum(parts), *piece.shape[dim + 1 :])
        divided = _without_values(piece, shape).as_subclass(DividedInput)
        divided.piece = piece
        divided.lengths = lengths
        divided.division = division
        return divided

    def gathered(self) -> Tensor:
        """Return the positions of all ranks, for a computation that all ranks repeat."""
        return gather_from_group(self.piece, self.lengths.group, *self.division)

    def has_rows_in(self, other: Tensor) -> bool:
        """Return whether a full tensor, which broadcasts with this one, has one row for each position."""
        from_the_end = self.dim() - self.division[0]
        return other.dim() >= from_the_end and other.shape[-from_the_end] != 1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # The wrapper has the full sizes, so these functions need no gather.
        if func in _SIZES or name in _ABOUT_SIZES:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        owner = getattr(func, "__self__", None)
        if name == "__get__" and getattr(owner, "__name__", "") in _ABOUT_TENSOR:
            # The wrapper has no graph, so the piece answers for it.
            found = args[0].piece if getattr(owner, "__name__", "") == "requires_grad" else args[0]
            with DisableTorchFunctionSubclass():
                return func(found)
        leaves = pytree.tree_leaves((args, kwargs))
        divided = [leaf for leaf in leaves if isinstance(leaf, DividedInput)]
        if _is_by_position(name, args, kwargs, leaves, divided):
            lengths, division = divided[0].lengths, divided[0].division
            args, kwargs = pytree.tree_map(partial(_own_part, divided[0], _is_of_elements(name)), (args, kwargs))
            result = func(*args, **kwargs)
            return pytree.tree_map_only(Tensor, lambda leaf: DividedInput.of(leaf, lengths, division), result)
        args, kwargs = pytree.tree_map(_gathered, (args, kwargs))
        return func(*args, **kwargs)


def _own_part(like: DividedInput, is_cut: bool, value: Any) -> Any:
    """Return the positions of this rank in an argument of a function that treats each position of `like` alone."""
    if isinstance(value, DividedInput):
        return value.piece
    if is_cut and isinstance(value, Tensor) and like.has_rows_in(value):
        dim, parts = like.division
        return scatter_to_group(value, like.lengths.group, dim - like.dim(), parts)
    return value


def _gathered(value: Any) -> Any:
    return value.gathered() if isinstance(value, DividedInput) else value


def divided_input(piece: Tensor, lengths: SequenceLengths) -> Tensor:
    """Let the sizes of a `piece` read as the full sizes; gather a tensor without data, which only shows shapes."""
    if type(piece) in (Tensor, nn.Parameter):
        return DividedInput.of(piece, lengths)
    return gather_from_group(piece, lengths.group, *lengths.of_piece(piece))


# Functions that read no values, or make tensors with other values.
_ABOUT_SIZES = {
    *("dim", "ndimension", "is_floating_point", "is_complex", "element_size", "get_device", "__len__", "__repr__"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "zeros_like", "ones_like", "empty_like"),
    *("full_like", "__hash__", "is_contiguous"),
}
_ABOUT_TENSOR = {"dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "requires_grad", "is_sparse"}
_ABOUT_TENSOR |= {"is_nested", "is_quantized", "names", "is_mps", "is_xpu", "itemsize"}

# Functions of each element, or of each position, whatever their other arguments are. A tensor of one dimension
# broadcasts along the features, because positions always come before features.
_OF_ELEMENTS = {
    *("add", "sub", "mul", "div", "true_divide", "neg", "pow", "rsub", "abs", "exp", "log", "sqrt", "rsqrt", "square"),
    *("reciprocal", "clamp", "clip", "where", "addcmul", "lerp", "rsub", "multiply", "subtract", "divide"),
    *("relu", "gelu", "silu", "sigmoid", "tanh", "elu", "leaky_relu", "mish", "softplus", "hardswish", "relu6"),
    *("dropout", "alpha_dropout", "to", "float", "double", "half", "bfloat16", "type", "clone", "contiguous", "detach"),
    *("logsigmoid", "selu", "celu", "sin", "cos", "erf", "type_as"),
}
_OPERATORS = {"add", "sub", "mul", "truediv", "pow", "radd", "rsub", "rmul", "rtruediv", "neg", "iadd", "isub", "imul"}
_OF_ELEMENTS |= {f"__{name}__" for name in _OPERATORS}
_OVER_FEATURES = {"layer_norm", "rms_norm"}
_REDUCTIONS = {"mean", "var", "std", "sum", "norm", "softmax", "log_softmax", "amax", "amin", "normalize"}


def _is_by_position(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], leaves: Sequence[Any], divided: Sequence[DividedInput]
) -> bool:
    """Return whether a function computes each position by itself, given these arguments."""
    first = divided[0]
    # Inputs with different shards do not match element by element.
    if any(other.dim() != first.dim() or other.division != first.division for other in divided[1:]):
        return False
    if first.division[0] >= first.dim() - 1 or not args:
        return False
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DividedInput)]
    if name == "linear":
        return isinstance(args[0], DividedInput) and len(divided) == 1
    # Each rank takes its rows of a full tensor with one row per position. A tensor that has a graph and broadcasts over
    # the positions would get a part of its gradient only; a parameter, of one dimension, is summed over the ranks.
    if _is_of_elements(name):
        return torch.broadcast_shapes(first.shape, *(other.shape for other in others)) == first.shape and not any(
            other.requires_grad and other.dim() > 1 and not first.has_rows_in(other) for other in others
        )
    if any(other.dim() > 1 for other in others):
        return False
    if name in _OVER_FEATURES:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return len(shape) == 1
    if name in _REDUCTIONS:
        return _reduced(name, args, kwargs) in ((-1,), (first.dim() - 1,))
    return False


def _is_of_elements(name: str) -> bool:
    """Return whether the function of that name computes each element by itself."""
    return name in _OF_ELEMENTS or name.removesuffix("_") in _OF_ELEMENTS


def _reduced(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the dimensions over which a function reduces, if its arguments name them."""
    place = 2 if name in ("norm", "normalize") else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else None)
    return tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
