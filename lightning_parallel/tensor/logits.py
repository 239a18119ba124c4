"""Logits that stay sharded by class until code reads them.

In training the head of a model returns a `DividedLogits`: a tensor with the shape of all logits. This rank has
computed its piece, the logits of its classes. An operation on it goes one of two ways:

    on the piece      views, casts and element-wise functions that leave the classes together; cross-entropy, by
                      `loss.cross_entropy`; `log_softmax` followed by `nll_loss`; `argmax` over the classes
    on all classes    everything else: the pieces are gathered, once, and the result is an ordinary tensor

For autograd it is the output of a gather whose data are made at the first read. Gradients of the full logits go back to
the piece as its slice, and gradients of the piece go back directly. Either every rank of the group reads, or none does:
see `strategies.ranks.order` for the alternative.

With sequence parallelism the outputs of inner blocks are such tensors as well, sharded along the sequence. For them,
read "positions" where this module says "classes". The next block takes the piece.

Legend: C classes, c classes on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import is_users_object
from lightning_parallel.compat.torch import (
    DisableTorchFunctionSubclass,
    log_softmax_operator,
    make_wrapper_subclass,
    pytree,
    version_of,
)
from lightning_parallel.tensor.autograd import copy_to_group, gather_from_group, scatter_to_group
from lightning_parallel.tensor.loss import cross_entropy
from lightning_parallel.tensor.pieces import CASTS, ELEMENTWISE
from lightning_parallel.tensor.sharding import Shard

__all__ = ["DividedLogits", "divided_logits", "has_divided_logits", "take_piece", "whole_logits"]

_aten = torch.ops.aten

# Views of data that are not made yet stay unmade as well.
_UNREAD = {
    *(_aten.view.default, _aten.slice.Tensor, _aten.select.int),
    *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
    *(_aten.transpose.int, _aten.permute.default, _aten.t.default, _aten.detach.default),
}
# Names of functions whose result is a view (or a copy) in which the classes may still be together.
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"}
_VIEWS = {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "unsqueeze", "squeeze", "t"}
_VIEWS |= {"detach", "narrow", "select"}
_PROPERTIES = {Tensor.mT.__get__, Tensor.T.__get__}  # type: ignore[attr-defined]
# These functions read the address of the data in C++, or copy the Python object.
_NEEDS_ADDRESS = {"numpy", "__array__", "tolist", "__dlpack__", "data_ptr", "storage", "untyped_storage", "is_set_to"}
_NEEDS_ADDRESS |= {"__reduce_ex__", "__deepcopy__", "__repr__", "__format__", "share_memory_"}
_NEEDS_ADDRESS |= {"apply_", "map_", "map2_"}
# These functions ask for the gradient of the full logits.
_GRADIENT = {"retain_grad", "register_hook"}
_STRIDE = 1_000_003  # marks the dimension of the classes, to find it again after a view


@dataclass
class _Family:
    """The logits of one call of a head, in all forms.

    Attributes:
        rule: How the classes are sharded.
        group: The tensor-parallel group.
        is_used: Whether a loss was computed from pieces.
        is_watched: Whether code asked for the gradient of the full logits, which lacks gradients from pieces.
    """

    rule: Shard
    group: Group
    is_used: bool = False
    is_watched: bool = False

    def whole(self, piece: Tensor, dim: int) -> _Data:
        """Return the full data for this rank's `piece`, with the classes in dimension `dim`."""
        # Detached: autograd knows the gather as `_DividedLogits`, and the data are made outside its graph.
        own = piece.detach()
        return _Data(lambda: _gather(own, dim, self))


class _Data:
    """The data of full logits, made at the first read."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make: Callable[[], Tensor] | None = make
        self._made: Tensor | None = None

    def get(self) -> Tensor:
        if self._made is None:
            assert self._make is not None
            with torch.no_grad():
                self._made = self._make()
            # The function refers to the piece, and would keep its memory.
            self._make = None
        return self._made


class DividedLogits(Tensor):
    """Logits of all classes; this rank holds only its piece until code reads them.

    Attributes:
        piece: This rank's classes, a part of autograd's graph; None if the classes are no longer together.
        class_dim: The dimension of the classes.
        is_log: Whether these are the logarithms of probabilities, and `piece` the logits behind them.
        family: The state that all forms of the same logits share.
    """

    piece: Tensor | None
    class_dim: int
    is_log: bool
    family: _Family
    _data: _Data
    _unchanged: int

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, data: _Data, family: _Family) -> DividedLogits:
        logits = make_wrapper_subclass(cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device)
        logits.piece = None
        logits.class_dim = -1
        logits.is_log = False
        logits.family = family
        logits._data = data
        logits._unchanged = 0
        return logits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # `Tensor.__init__` takes no arguments; `__new__` sets the attributes

    def keep(self, piece: Tensor, dim: int, is_log: bool = False) -> None:
        """Compute on `piece` where that is possible, with the classes in dimension `dim`."""
        self.piece, self.class_dim, self.is_log = piece, dim, is_log
        # An in-place change of the full logits raises their version, and the piece lacks that change.
        self._unchanged = version_of(self)

    def whole(self) -> Tensor:
        """Return an ordinary tensor, a part of autograd's graph; every rank of the group must call it."""
        with DisableTorchFunctionSubclass():
            # `alias` is not among `_UNREAD`: its dispatch reads the data, and autograd sees a node for it.
            return _aten.alias.default(self)

    def data_for(self, tensor: Tensor) -> Tensor:
        """Return the value that `tensor.data = self` sets; every rank of the group must call it."""
        return self.whole()

    @property
    def valid_piece(self) -> Tensor | None:
        """The piece, unless the logits were since changed in place, or made a leaf of another graph."""
        return None if self._is_apart() else self.unchanged_piece

    @property
    def unchanged_piece(self) -> Tensor | None:
        """The piece, unless the logits were since changed in place; it may belong to another graph."""
        with DisableTorchFunctionSubclass():
            is_valid = not self.family.is_watched and version_of(self) == self._unchanged
        return self.piece if is_valid else None

    def _is_apart(self) -> bool:
        # By `detach().requires_grad_()`, or as the output of a function that ran without gradients.
        with DisableTorchFunctionSubclass():
            return self.piece is not None and self.requires_grad and not self.piece.requires_grad

    @classmethod
    @torch.compiler.disable  # compiled code leaves its graph where it meets these logits
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with DisableTorchFunctionSubclass():
            if name in _NEEDS_ADDRESS or (name == "__get__" and func == _DATA):
                return func(*whole_logits(args), **kwargs)
            if name in _GRADIENT:
                _watch(args[0])
            found = _on_piece(func, name, args, kwargs)
            return func(*args, **kwargs) if found is None else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A view needs no data, so it must not cause the gather.
        if func in _UNREAD:
            return _unread(func, args[0], args[0]._data, args[1:], kwargs)
        if func is log_softmax_operator and (piece := args[0].valid_piece) is not None and not args[0].is_log:
            return _unread(func, args[0], args[0].family.whole(piece, args[0].class_dim), args[1:], kwargs)
        if torch.Tag.inplace_view in func.tags:
            raise RuntimeError(
                "Logits or hidden states that are sharded over the tensor-parallel ranks must keep their shape; got"
                f" an in-place change by `{func}`. Use the form that makes a new tensor"
            )
        read: dict[int, DividedLogits] = {}

        def read_whole(value: Any) -> Any:
            if not isinstance(value, DividedLogits):
                return value
            whole = value._data.get()
            read[id(whole)] = value
            return whole

        result = func(*pytree.tree_map(read_whole, args), **pytree.tree_map(read_whole, kwargs))
        # An in-place operator returns the tensor that it changed, so return these logits instead of their data.
        return pytree.tree_map(lambda value: read.get(id(value), value), result)


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


@torch.compiler.disable
def divided_logits(piece: Tensor, rule: Shard, group: Group, dim: int = -1) -> DividedLogits:
    """Return the full logits, given this rank's piece.

    Args:
        piece: (..., c), a part of autograd's graph.
        rule: The shard rule of the classes, one range per rank.
        group: The tensor-parallel group.
        dim: The dimension of the classes.
    """
    return _wrapped(piece, dim % piece.dim(), _Family(rule, group))


@torch.compiler.disable
def take_piece(whole: DividedLogits, dim: int, sizes: Sequence[int]) -> Tensor | None:
    """Return this rank's piece along `dim`, without communication; None if only the full tensor gives it.

    Args:
        whole: The tensor that stands for the full one.
        dim: The dimension to shard.
        sizes: Extent of each rank's piece.
    """
    piece = whole.unchanged_piece
    if piece is None or whole.class_dim != dim or whole.is_log or whole.family.rule.sizes != tuple(sizes):
        return None
    # From here on, a gradient hook of the full tensor would miss the gradient of this piece; see `_watch`.
    whole.family.is_used = True
    return _PieceOfWhole.apply(whole) if whole._is_apart() else piece


def _gather(piece: Tensor, dim: int, family: _Family) -> Tensor:
    return comm.all_gather(piece, family.group, dim, family.rule.sizes).contiguous()


def _wrapped(piece: Tensor, dim: int, family: _Family) -> DividedLogits:
    logits = _DividedLogits.apply(piece, dim, family)
    logits.keep(piece, dim)
    return logits


class _DividedLogits(Function):
    """Piece of the logits -> the full logits, whose data are not made yet."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, dim: int, family: _Family) -> Tensor:
        ctx.args = family.group, dim, family.rule.sizes
        shape = list(piece.shape)
        shape[dim] = family.rule.full_size
        meta = torch.empty(shape, dtype=piece.dtype, device="meta")
        return DividedLogits(meta, piece.device, family.whole(piece, dim), family)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # All ranks computed the same from the full logits, so `grad` is the full gradient on each of them.
        return scatter_to_group(grad, *ctx.args), None, None


class _PieceOfWhole(Function):
    """The full logits -> a piece of another graph, as of a block that reentrant checkpointing runs."""

    @staticmethod
    def forward(ctx: Any, whole: DividedLogits) -> Tensor:
        family, piece = whole.family, whole.piece
        assert piece is not None
        ctx.args = family.group, whole.class_dim, family.rule.sizes
        return piece.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gather_from_group(grad, *ctx.args)


def whole_logits(value: Any) -> Any:
    """Replace sharded logits, and parts of gradients, by ordinary tensors, in a value of any structure.

    Containers that pytree knows are made anew. In other containers, such as dataclasses and the user's objects, they
    are replaced in place. They stay a part of autograd's graph. Every rank of the group must call it.
    """
    return _whole_inside(value, set())


def _whole_inside(value: Any, seen: set[int]) -> Any:
    return pytree.tree_map(lambda leaf: _whole_leaf(leaf, seen), value)


def _whole_leaf(leaf: Any, seen: set[int]) -> Any:
    if _is_part(leaf):
        return leaf.whole()
    if isinstance(leaf, (*_PLAIN, type)) or id(leaf) in seen:
        return leaf
    # Objects may refer to each other in circles.
    seen.add(id(leaf))
    if isinstance(leaf, (MutableMapping, MutableSequence)):
        keys = leaf.keys() if isinstance(leaf, MutableMapping) else range(len(leaf))
        _replace_inside(leaf, [(key, leaf[key]) for key in keys], seen)
    elif is_users_object(leaf) or is_dataclass(leaf):
        for name in (*getattr(leaf, "__dict__", ()), *getattr(type(leaf), "__slots__", ())):
            item = getattr(leaf, name, None)
            whole = _whole_inside(item, seen)
            if not _is_same(whole, item):
                # Unlike `setattr`, this also works on frozen dataclasses.
                object.__setattr__(leaf, name, whole)
    return leaf


def _is_part(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(type(value), "whole")


_PLAIN = (Tensor, bool, int, float, str, bytes, type(None), nn.Module)


def _replace_inside(container: Any, items: Iterable[tuple[Any, Any]], seen: set[int]) -> None:
    for key, item in items:
        whole = _whole_inside(item, seen)
        if not _is_same(whole, item):
            container[key] = whole


def _is_same(one: Any, two: Any) -> bool:
    """Return whether two values, one of them made from the other, have the same leaves."""
    return one is two or all(a is b for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(two)))


def has_divided_logits(value: Any) -> bool:
    """Return whether a value is sharded logits, a part of a gradient, or a small container of them."""
    if isinstance(value, list):
        return bool(value) and _is_part(value[-1])
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    return len(items) <= _SMALL_CONTAINER and any(
        isinstance(item, Tensor) and hasattr(type(item), "whole") for item in items
    )


_SMALL_CONTAINER = 16


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _watch(logits: DividedLogits) -> None:
    """Compute on the full logits from now on.

    Raises:
        RuntimeError: If a loss was already computed from the pieces.
    """
    if logits.family.is_used:
        raise RuntimeError(
            "`retain_grad` and `register_hook` of sharded logits must come before the loss; got a call after it. The"
            " loss was computed from this rank's classes only. Call `retain_grad` or `register_hook` before the loss"
            " (on the output of a block: before the next block)"
        )
    logits.family.is_watched = True


def _unread(func: Any, logits: DividedLogits, data: _Data, rest: tuple[Any, ...], kwargs: Any) -> DividedLogits:
    """Return the result of an operation on `data`, computed at its first read."""
    meta = func(_meta(logits), *rest, **kwargs)
    return DividedLogits(meta, logits.device, _Data(lambda: func(data.get(), *rest, **kwargs)), logits.family)


# -------------------------------------------------------------------------------------------------------- on the piece


def _on_piece(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `func`, computed on this rank's classes; None if it needs all classes."""
    if not args and "input" in kwargs:
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    divided = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DividedLogits)]
    if len(divided) != 1 or (piece := divided[0].valid_piece) is None:
        return None
    logits = divided[0]
    if name in ELEMENTWISE:
        return _elementwise(func, logits, piece, args, kwargs)
    if not args or args[0] is not logits:
        return None
    rest = args[1:]
    if func in _REDUCTIONS:
        return _REDUCTIONS[func](logits, piece, *rest, **kwargs)
    if name in CASTS:
        own = None if logits.is_log else func(piece, *rest, **kwargs)
        # Double precision is there to compare runs to 1e-10. After a cast to single precision, sums by rank would
        # round differently from one sum over all classes.
        is_rounded = own is not None and piece.dtype == torch.float64 != own.dtype
        return None if own is None or is_rounded else _derived(logits, piece, own)
    if name in _RESHAPES:
        return _reshape(func, logits, piece, rest, kwargs)
    if name == "__getitem__" and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(rest)):
        return _select(func, logits, piece, rest[0])
    return _view(func, logits, piece, rest, kwargs) if _is_view(func, name) else None


def _is_view(func: Callable[..., Any], name: str) -> bool:
    return name in _VIEWS or name == "__getitem__" or (name == "__get__" and func in _PROPERTIES)


def _derived(logits: DividedLogits, piece: Tensor, own: Tensor) -> DividedLogits | None:
    """Return logits with the new piece `own`, if each of its numbers was made from one number of `piece`."""
    if own is piece:
        return logits
    if own.shape != piece.shape or not own.is_floating_point() or own.device != piece.device:
        return None
    return _wrapped(own, logits.class_dim, logits.family)


def _elementwise(
    func: Callable[..., Any], logits: DividedLogits, piece: Tensor, args: tuple[Any, ...], kwargs: Any
) -> DividedLogits | None:
    if logits.is_log or "out" in kwargs:
        return None
    rule, group = logits.family.rule, logits.family.group
    from_the_end = logits.dim() - logits.class_dim

    def own(value: Any) -> Any:
        if value is logits:
            return piece
        if not isinstance(value, Tensor):
            return value
        if value.dim() >= from_the_end and value.shape[-from_the_end] == rule.full_size:
            return scatter_to_group(value, group, -from_the_end, rule.sizes)
        # Each rank uses it for its own classes, so each has a part of its gradient.
        return copy_to_group(value, group)

    # Reject a result with another shape: the operand broadcasts the logits to more numbers or classes.
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if torch.broadcast_shapes(*(leaf.shape for leaf in tensors)) != logits.shape:
        return None
    return _derived(logits, piece, func(*pytree.tree_map(own, args), **pytree.tree_map(own, kwargs)))


def _reshape(
    func: Callable[..., Any], logits: DividedLogits, piece: Tensor, rest: tuple[Any, ...], kwargs: Any
) -> DividedLogits | None:
    tried = func(_meta(logits), *rest, **kwargs)
    # The classes stay together only if they are the last dimension before and after.
    stay = logits.class_dim == logits.dim() - 1 and tried.dim() > 0 and tried.shape[-1] == logits.shape[-1]
    if not stay:
        return None
    own = piece.reshape(*tried.shape[:-1], piece.shape[-1])
    if not (tried.is_contiguous() and logits.is_contiguous()):
        return None if logits.is_log else _wrapped(own, own.dim() - 1, logits.family)
    # Autograd must see a view of the full logits: an in-place change of one of them shows in both.
    viewed: DividedLogits = logits.view(tried.shape)  # type: ignore[assignment]
    viewed.keep(own, own.dim() - 1, logits.is_log)
    return viewed


def _view(func: Callable[..., Any], logits: DividedLogits, piece: Tensor, rest: tuple[Any, ...], kwargs: Any) -> Tensor:
    viewed = func(logits, *rest, **kwargs)
    # Run the view on a tensor without data, where only the classes have a stride, to see where they end up.
    strides = [_STRIDE if at == logits.class_dim else 0 for at in range(logits.dim())]
    marked = func(torch.empty_strided(logits.shape, strides, device="meta"), *rest, **kwargs)
    classes = logits.family.rule.full_size
    found = [at for at, stride in enumerate(marked.stride()) if stride == _STRIDE and marked.shape[at] == classes]
    if isinstance(viewed, DividedLogits) and len(found) == 1:
        own = func(piece, *rest, **kwargs)
        shape = list(viewed.shape)
        shape[found[0]] = piece.shape[logits.class_dim]
        if list(own.shape) == shape:
            viewed.keep(own, found[0], logits.is_log)
    return viewed


def _select(func: Callable[..., Any], logits: DividedLogits, piece: Tensor, index: Any) -> DividedLogits | None:
    """Select positions by a mask or by indices, for example the positions with a label."""
    places = index if isinstance(index, tuple) else (index,)
    if logits.is_log or logits.class_dim != logits.dim() - 1 or not all(isinstance(place, Tensor) for place in places):
        return None
    # A mask selects as many dimensions as it has, a tensor of indices selects one.
    taken = sum(place.dim() if place.dtype in (torch.bool, torch.uint8) else 1 for place in places)
    # Such an index also selects single classes.
    if taken >= logits.dim():
        return None
    own = func(piece, index)
    return _wrapped(own, own.dim() - 1, logits.family)


def _cross_entropy(
    logits: DividedLogits,
    piece: Tensor,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    rest = [size for at, size in enumerate(logits.shape) if at != logits.class_dim]
    if (
        logits.is_log
        or logits.class_dim != min(1, logits.dim() - 1)
        or not isinstance(target, Tensor)
        or target.dtype != torch.long
        or list(target.shape) != rest
        or (weight is not None and (weight.requires_grad or list(weight.shape) != [logits.family.rule.full_size]))
        or (size_average, reduce) != (None, None)
        or reduction not in ("mean", "sum", "none")
        or not 0.0 <= label_smoothing <= 1.0
    ):
        return None
    family = logits.family
    family.is_used = True
    return cross_entropy(
        piece,
        target,
        family.rule,
        family.group,
        dim=logits.class_dim,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,  # type: ignore[arg-type]
        label_smoothing=label_smoothing,
    )


def _nll_loss(logits: DividedLogits, piece: Tensor, *rest: Any, **kwargs: Any) -> Tensor | None:
    if not logits.is_log:
        return None
    # `piece` holds the logits behind the logarithms, and cross-entropy takes these.
    logits.is_log = False
    try:
        return _cross_entropy(logits, piece, *rest, **kwargs)
    finally:
        logits.is_log = True


def _log_softmax(
    func: Callable[..., Any], logits: DividedLogits, piece: Tensor, dim: int | None = None, *rest: Any, **kwargs: Any
) -> Tensor | None:
    if dim is None or dim % logits.dim() != logits.class_dim or logits.is_log:
        return None
    dtype = kwargs.pop("dtype", None)
    if dtype is not None:
        piece = piece.to(dtype)
        logits = _derived(logits, logits.piece, piece)  # type: ignore[arg-type, assignment]
    if dtype is not None and logits is None:
        return None
    found = func(logits, dim, *rest, **kwargs)
    if isinstance(found, DividedLogits):
        found.keep(piece.to(found.dtype), logits.class_dim, is_log=True)
    return found


def _argmax(logits: DividedLogits, piece: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | None:
    if dim is None or dim % logits.dim() != logits.class_dim:
        return None
    family = logits.family
    own = piece.detach()
    index = own.argmax(logits.class_dim, keepdim=True)
    best = own.gather(logits.class_dim, index)
    # `index` counts from the first class of the piece; the result counts from the first of all classes.
    index += family.rule.ranges[family.group.rank][0][0]
    # Like torch, take the first of equal maxima: the ranks are in the order of their classes.
    best, index = (comm.all_gather(found, family.group, logits.class_dim) for found in (best, index))
    found = index.gather(logits.class_dim, best.argmax(logits.class_dim, keepdim=True))
    return found if keepdim else found.squeeze(logits.class_dim)


_REDUCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    torch.argmax: _argmax,
    Tensor.argmax: _argmax,
    **{func: partial(_log_softmax, func) for func in (F.log_softmax, torch.log_softmax, Tensor.log_softmax)},
}
