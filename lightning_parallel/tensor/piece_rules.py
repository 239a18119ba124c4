"""The rules by which functions compute on the parts of pieces; see `pieces`.

A rule takes a call with pieces among its arguments. It returns the result, or None if it does not apply: then the parts
are gathered. Or it returns a decision, which computes the result of this call and of all calls with the same key. The
table at the end names the rule of each function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm.kept import kept
from lightning_parallel.compat.torch import DisableTorchFunctionSubclass, EnableTorchFunction, pytree, version_of
from lightning_parallel.tensor.later_data import meta_of, places_after_view
from lightning_parallel.tensor.loss import class_loss_arguments, cross_entropy, nll_loss
from lightning_parallel.tensor.pieces import Family, Form, Piece, piece_with
from lightning_parallel.tensor.sharding import Shard
from lightning_parallel.tensor.tiled_logits import TiledLogits, best_in_tiles, losses_in_tiles, run_on_logits

__all__ = ["DROPOUTS", "RULES", "PieceCall", "computed_on_parts"]

_PLAIN_PARTS = (Tensor, nn.Parameter)
_MOST_NODES = 64


@dataclass
class PieceCall:
    """A call of a function with pieces among its arguments.

    Attributes:
        name: The name of the function, or of the function that makes a new tensor instead of a change.
        leaves: All values among the arguments.
        piece: The first piece among them; all pieces are sharded alike.
        parts: The parts of the pieces, by the identity of the piece.
        family: The family of the result.
        changes: Whether the function changes its first argument.
    """

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]
    piece: Piece
    parts: dict[int, Tensor]
    family: Family
    changes: bool

    @property
    def part(self) -> Tensor:
        return self.parts[id(self.piece)]

    @property
    def own_func(self) -> Callable[..., Any]:
        """The function, for parts; keys of decisions hold that all parts are ordinary tensors."""
        is_plain = all(type(part) in _PLAIN_PARTS for part in self.parts.values())
        return self.func if is_plain else partial(run_on_logits, self.func)

    def on_part(self) -> Any:
        return run_on_logits(self.func, self.part, *self.args[1:], **self.kwargs)

    def again(self, part: Tensor, place: int | None = None) -> Piece:
        """Return a result of the part as a piece."""
        return piece_with(part, self.piece.place if place is None else place, self.family)

    def argument(self, name: str, at: int, default: Any = None) -> Any:
        return self.kwargs.get(name, self.args[at] if len(self.args) > at else default)

    def dims(self, at: int) -> tuple[int, ...]:
        """Return the dimensions over which the function computes: by default all, which includes the sharded one."""
        dim, count = self.argument("dim", at), self.piece.dim()
        if isinstance(dim, int) and not isinstance(dim, bool):
            return (dim % count,)
        is_given = isinstance(dim, (tuple, list)) and len(dim) > 0
        return tuple(each % count for each in dim) if is_given else tuple(range(count))

    @property
    def operand(self) -> Callable[[Any], Any] | None:
        """A function of an argument that all rows share, for a computation on this rank's rows; None if it is that."""
        return None if self.family.is_of_positions else partial(_operand, self.family)


def _operand(family: Family, value: Any) -> Any:
    return family.shared(value) if isinstance(value, Tensor) and value.requires_grad else value


# ------------------------------------------------------------------------------------------------------------ decisions


class Decision:
    """The decision of a rule for all calls with the same key. It holds no tensors."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result; None if the rule does not apply after all."""
        raise NotImplementedError


# Values that a key holds with their type: `x[1]` and `x[True]` differ.
_VALUES = {bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.Size}
_INDICES = {int, type(None)}


def decision_on(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], new: Decision | None = None
) -> Decision | None:
    """Return the decision on a call that is like an earlier one, or keep a new decision for all calls like this one.

    The key holds everything of a call that rules with decisions read; other calls have none. This is one loop without
    calls of Python functions, as every function of a piece passes here.
    """
    decisions: dict[Any, Any] | None = None
    family: Family | None = None
    key: list[Any] = [func]
    values: Any = args
    if kwargs:
        key += kwargs
        values = (*args, *kwargs.values())
    for value in values:
        kind = type(value)
        if kind is Piece:
            part = value._part
            decisions = value.family.decisions  # None if code may watch the piece
            family, version = value.family, 0 if value.is_inference() else version_of(value)
            if decisions is None or part is None or type(part) not in _PLAIN_PARTS or version != value._unchanged:
                return None
            if value.requires_grad and not part.requires_grad:
                return None
            key.append(value._form or value.form)
        elif kind is Tensor or kind is nn.Parameter:
            key += (value.shape, value.requires_grad, value.is_leaf)
        elif kind in _VALUES:
            key += (kind, value)
        elif kind is float:  # no rule reads its value
            key.append(kind)
        elif kind is slice or kind is tuple or kind is list:
            inside = (value.start, value.stop, value.step) if kind is slice else value
            key += (kind, len(inside))
            for each in inside:
                if type(each) is slice and kind is not slice:
                    if not {type(each.start), type(each.stop), type(each.step)} <= _INDICES:
                        return None
                    key += (slice, each.start, each.stop, each.step)
                elif type(each) in _VALUES:
                    key += (type(each), each)
                else:
                    return None
        else:
            return None
    if decisions is None or family is None or (not torch.is_grad_enabled() and family.is_gathered_now):
        return None
    if new is not None:
        decisions[tuple(key)] = new
    return decisions.get(tuple(key))


class OnParts(Decision):
    """The decision of a rule whose function is the same on the parts.

    Args:
        call: The call.
        place_of: Returns the sharded dimension of a result.
        own: Returns what the function takes for an argument that is no piece; None to take each as it is.
    """

    def __init__(
        self, call: PieceCall, place_of: Callable[[Tensor], int], own: Callable[[Any], Any] | None = None
    ) -> None:
        self._func, self._family, self._place_of, self._own = call.own_func, call.family, place_of, own
        self._changes = call.changes
        self._draws = call.name if call.name in DROPOUTS else ""
        self._form: Form | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: list[Any] = []
        own = self._own
        for value in args:
            given.append(value._part if isinstance(value, Piece) else value if own is None else own(value))
        if kwargs:
            kwargs = {name: self._argument(value) for name, value in kwargs.items()}
        if self._draws:
            with self._family.drawing(self._draws, kwargs["input"] if not given else given[0]):
                found = self._func(*given, **kwargs)
        else:
            found = self._func(*given, **kwargs)
        if self._changes:
            return args[0].changed_to(found)
        if not isinstance(found, Tensor):
            return pytree.tree_map_only(Tensor, self._again, found)
        form = self._form
        # Autocast may change the type.
        if form is None or found.shape != form.part_shape or found.dtype is not form.dtype:
            form = self._form = Form.of_part(found, self._place_of(found), self._family)
        return piece_with(found, form.place, self._family, False, None, form)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Piece):
            return value._part
        return value if self._own is None else self._own(value)

    def _again(self, part: Tensor) -> Piece:
        return piece_with(part, self._place_of(part), self._family)


def computed_on_parts(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_new: bool = False
) -> Any:
    """Return the result of `func`, computed on the parts; None if no rule of the table applies.

    Args:
        func: The function.
        name: Its name in the table.
        args: Its arguments.
        kwargs: Its keywords.
        is_new: Whether `func` is a function of torch, and not made for this call, so that the decision may be kept.
    """
    changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    base = name if not changes else f"__{name[3:]}" if name in _IN_PLACE else name[:-1]
    rule = RULES.get(base)
    if "out" in kwargs:
        if kwargs["out"] is not None:
            return None
        # `F.normalize` passes on `out=None`.
        kwargs = {each: value for each, value in kwargs.items() if each != "out"}
        is_new = False
    leaves: Sequence[Any] = (*args, *kwargs.values())
    if any(isinstance(leaf, (list, tuple, dict)) for leaf in leaves):
        leaves = pytree.tree_leaves(leaves)
    pieces = [leaf for leaf in leaves if isinstance(leaf, Piece)]
    if any(piece.family.is_gathered_now for piece in pieces):
        return None
    for family in (piece.family for piece in pieces if not changes):
        own_rule = family.rules.get(base)
        if own_rule is not None:
            # Such a rule calls other functions of pieces, which have their own rules.
            with EnableTorchFunction():
                return own_rule(func, base, args, kwargs)
    if rule is None:
        return None
    if not args and "input" in kwargs and rule is not _pointwise:
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        is_new = False
    first, parts = pieces[0], _parts_of(pieces)
    if parts is None:
        return None
    changes = changes or _has_inplace(func, base, args, kwargs)
    if rule is not _pointwise and (changes or len(pieces) > 1 or not args or args[0] is not first):
        return None
    # Parameters get partial gradients if one of the pieces is in a region.
    family = next((piece.family for piece in pieces if piece.family.in_region), first.family)
    # A part may be a piece of another group, or logits without data, whose functions have rules as well.
    is_plain = all(type(own) in _PLAIN_PARTS for own in parts.values())
    with nullcontext() if is_plain else EnableTorchFunction():
        found = rule(PieceCall(func, base, args, kwargs, leaves, first, parts, family, changes))
        if isinstance(found, Decision):
            # Whether a tensor may change in place is no part of the key.
            if is_new and not changes:
                decision_on(func, args, kwargs, found)
            found = found(args, kwargs)
    # A view shares its graph with the full tensor, any other result does not.
    if found is not None and rule not in (_view, _reshape, _as_complex) and torch.is_grad_enabled():
        for piece in pieces:
            piece.family.is_used |= parts[id(piece)].requires_grad
    return found


def _parts_of(pieces: Sequence[Piece]) -> dict[int, Tensor] | None:
    """Return the parts of pieces by identity; None if one has none, or if they lie at different places."""
    first, parts = pieces[0], {}
    for piece in pieces:
        own = piece.unchanged_part()
        is_alike = (piece.dim(), piece.place) == (first.dim(), first.place)
        # Different parts do not match element by element.
        if own is None or piece.is_apart(own) or not is_alike or not piece.family.is_like(first.family):
            return None
        parts[id(piece)] = own
    return parts


def _has_inplace(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function of `torch.nn.functional` was called with `inplace=True`, its last argument."""
    if getattr(func, "__module__", "") != "torch.nn.functional":
        return False
    is_last = len(args) > (3 if name in DROPOUTS else 1) and args[-1] is True
    return is_last or bool(kwargs.get("inplace"))


def _pointwise(call: PieceCall) -> Decision | None:
    piece, family = call.piece, call.family
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    # The part broadcasts as the full tensor does if the result has the sharded dimension at the same place.
    # torch's function takes as long as a small kernel, and most shapes are equal.
    shapes = {leaf.shape for leaf in tensors}
    shape = torch.broadcast_shapes(*shapes) if len(shapes) > 1 else piece.shape
    is_known = len(shape) == piece.dim() and shape[piece.place] == piece.shape[piece.place]
    # With one argument, `where` returns indices. Outside a region, dropout draws the same numbers on all ranks.
    is_drawn = call.name in DROPOUTS and not family.is_of_positions
    if not is_known or is_drawn or (call.name == "where" and len(call.leaves) < 3):
        return None
    # In a region, such a tensor would get the gradient of the part only. Parameters have one dimension, and their
    # gradients are summed over the ranks.
    others = [tensor for tensor in tensors if tensor.requires_grad and not isinstance(tensor, Piece)]
    without_rows = [other for other in others if not piece.has_rows_in(other)]
    if family.in_region and any(other.dim() > 1 or _is_of_pieces(other) for other in without_rows):
        return None
    target = call.args[0] if call.changes else None
    if call.changes and not (isinstance(target, Piece) and target.may_change() and shape == target.shape):
        if call.name in DROPOUTS:  # on the full tensor, each rank would draw other numbers
            raise RuntimeError(
                "Hidden states that are sharded along the sequence must not change in place by dropout after code has"
                " read or viewed them. Use `inplace=False`, or `sequence_parallel=False`"
            )
        return None

    has_rows = any(piece.has_rows_in(tensor) for tensor in tensors if not isinstance(tensor, Piece))
    at, operand = piece.place - piece.dim(), call.operand

    def own(value: Any) -> Any:
        is_cut = has_rows and isinstance(value, Tensor) and not isinstance(value, Piece) and value.dim() >= -at
        if is_cut and value.shape[at] != 1:
            return family.cut(value, at)
        return value if operand is None else operand(value)

    return OnParts(call, lambda found: found.dim() + at, own if has_rows else operand)


def _is_of_pieces(tensor: Tensor) -> bool:
    """Return whether a tensor was computed from full hidden states, such as their norm, and not from parameters alone.

    Only gradients of parameters may be partial. The search stops after a few nodes of the graph.
    """
    waiting = [tensor.grad_fn]
    for _ in range(_MOST_NODES):
        if not waiting:
            return False
        node = waiting.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        waiting += [each for each, _ in node.next_functions] if node is not None else []
    return True


class _Cast(Decision):
    def __init__(self, call: PieceCall) -> None:
        self._func, self._family, self._place = call.own_func, call.family, call.piece.place
        # The part of a transposed tensor may be contiguous already.
        self._keeps = call.name != "contiguous" or call.piece.is_contiguous()
        self._form: Form | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, family = args[0]._part, self._family
        own = self._func(before, *args[1:], **kwargs)
        if not isinstance(own, Tensor):  # without arguments, `type` returns a string
            return own
        if own is before and self._keeps:
            return args[0]
        if not (own.is_floating_point() or own.is_complex()) or own.device != before.device:
            return None
        if own.dtype is not before.dtype:
            return piece_with(own, self._place, family.rounded() if _loses_digits(before, own.dtype) else family)
        form = self._form = self._form or Form.of_part(own, self._place, family)
        return piece_with(own, self._place, family, False, None, form)


def _loses_digits(part: Tensor, dtype: torch.dtype) -> bool:
    return part.dtype == torch.float64 != dtype


def _as_complex(call: PieceCall) -> Tensor | None:
    """View pairs of numbers in the last dimension as complex numbers, or complex numbers as pairs."""
    piece, is_complex = call.piece, call.part.is_complex()
    if not is_complex and piece.place == piece.dim() - 1:
        return None
    # The strides of a part may not allow the view, although those of the full tensor do.
    own = call.func(call.part if is_complex else call.part.contiguous())
    with DisableTorchFunctionSubclass():
        return call.func(piece).keep(own, piece.place, is_alias=True)


def _reshape(call: PieceCall) -> Decision | None:
    piece = call.piece
    tried = call.func(meta_of(piece), *call.args[1:], **call.kwargs)
    found = piece.family.after_reshape(piece.shape, piece.place, tried.shape)
    if found is None:
        return None
    place, family = found
    # Autograd must see a view of the full tensor, because a change of the view in place also changes the tensor.
    return _Reshaped(tried.shape, place, family, tried.is_contiguous() and piece.is_contiguous())


class _Reshaped(Decision):
    def __init__(self, shape: torch.Size, place: int, family: Family, is_view: bool) -> None:
        self._shape, self._place, self._family, self._is_view = shape, place, family, is_view
        self._sizes = (*shape[:place], family.extents[family.group.rank], *shape[place + 1 :])
        self._form: Form | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        piece = args[0]
        part = piece._part
        own = part.reshape(self._sizes) if type(part) is Tensor else run_on_logits(Tensor.reshape, part, self._sizes)
        if not self._is_view:
            self._form = self._form or Form.of_part(own, self._place, self._family)
            return piece_with(own, self._place, self._family, True, None, self._form)
        with DisableTorchFunctionSubclass():
            view: Any = piece.view(self._shape).keep(own, self._place, True, self._family, self._form)
        self._form = view._form or view.form
        return view


def _view(call: PieceCall) -> Any:
    piece, name = call.piece, call.name
    if name == "__getitem__" and any(isinstance(leaf, Tensor) for leaf in call.leaves[1:]):
        return _select(call)
    if name == "__getitem__" and _takes_everything(piece.shape, call.args[1]):
        # torch returns an alias here, which would read the data.
        with DisableTorchFunctionSubclass():
            return piece.view(piece.shape).keep(call.part, piece.place, True)  # type: ignore[attr-defined]
    index = _index_at_place(call)
    if index is not None:
        return _narrowed(call, *index)
    # Such functions would do something else, or nothing, with the extent of the part.
    is_cut = name in ("narrow", "select") and call.argument("dim", 1) % piece.dim() == piece.place
    if is_cut or (name == "squeeze" and min(piece.family.extents) < 2 and piece.place in call.dims(1)):
        return None
    places = places_after_view(call.func, piece.shape, piece.place, *call.args[1:], **call.kwargs)
    if places is None:
        return None
    return _Viewed(call, places)


class _Viewed(Decision):
    def __init__(self, call: PieceCall, places: list[int]) -> None:
        self._func, self._own_func, self._places = call.func, call.own_func, places
        self._forms: list[Form | None] = [None for _ in places]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self._own_func(args[0]._part, *args[1:], **kwargs)
        with DisableTorchFunctionSubclass():
            viewed: Any = self._func(*args, **kwargs)
            if isinstance(viewed, Piece):
                viewed.keep(own, self._places[0], True, None, self._forms[0])
                self._forms[0] = viewed._form or viewed.form
            else:
                for at, view in enumerate(viewed):
                    view.keep(own[at], self._places[at], True, None, self._forms[at])
                    self._forms[at] = view._form or view.form
        return viewed


def _takes_everything(shape: torch.Size, index: Any) -> bool:
    given = list(index if isinstance(index, tuple) else (index,))
    if not all(each is Ellipsis or isinstance(each, slice) for each in given):
        return False
    left = len(shape) - sum(each is not Ellipsis for each in given)
    at = next((at for at, each in enumerate(given) if each is Ellipsis), len(given))
    slices = [*given[:at], *[slice(None)] * left, *given[at + 1 :]]
    return all(each.indices(size) == (0, size, 1) for each, size in zip(slices, shape))


def _index_at_place(call: PieceCall) -> tuple[int | slice, tuple[Any, ...]] | None:
    """Return the range or the index that a call takes of the sharded dimension, and the index of the rest."""
    piece, place = call.piece, call.piece.place
    full = [slice(None)] * piece.dim()
    if call.name in ("narrow", "select"):
        if call.argument("dim", 1) % piece.dim() != place:
            return None
        start = call.argument("start" if call.name == "narrow" else "index", 2)
        if call.name == "select":
            return int(start), (*full[:place], 0)
        first = int(start) % piece.shape[place]
        return slice(first, first + call.argument("length", 3)), ()
    if call.name != "__getitem__":
        return None
    given = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    taken = sum(each is not None and each is not Ellipsis for each in given)
    if any(isinstance(each, bool) or not isinstance(each, (int, slice, type(None), type(...))) for each in given):
        return None
    at = next((i for i, each in enumerate(given) if each is Ellipsis), len(given))
    given = (*given[:at], *full[: piece.dim() - taken], *given[at + 1 :])
    places = [i for i, each in enumerate(given) if each is not None]
    mine, size = given[places[place]], piece.shape[place]
    if isinstance(mine, slice) and mine.indices(size) == (0, size, 1):
        return None
    rest = 0 if isinstance(mine, int) else slice(None)
    return mine, (*given[: places[place]], rest, *given[places[place] + 1 :])


def _narrowed(call: PieceCall, index: int | slice, rest: tuple[Any, ...]) -> Any:
    """Take a range, or one index, of the sharded dimension, and then `rest` of the result."""
    piece, place, size = call.piece, call.piece.place, call.piece.shape[call.piece.place]
    if isinstance(index, int) and not -size <= index < size:
        return None
    run = slice(index % size, index % size + 1) if isinstance(index, int) else index
    start, stop, step = run.indices(size)
    found = piece.family.narrowed(start, stop - start) if step == 1 and stop > start else None
    if found is None:
        return None
    own, family = found
    part = call.part.narrow(place, *own)
    if isinstance(index, int):
        # Only this row is gathered.
        return piece_with(part, place, family).whole()[rest]
    with DisableTorchFunctionSubclass():
        view = piece.narrow(place, start, stop - start).keep(part, place, True, family)  # type: ignore[attr-defined]
    return (
        view
        if _takes_everything(view.shape, rest)
        else computed_on_parts(Tensor.__getitem__, "__getitem__", (view, rest), {})
    )


def _select(call: PieceCall) -> Piece | None:
    """Select rows by a mask or by indices, for example the positions with a label."""
    index, piece = call.args[1], call.piece
    choices = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(each, Tensor) for each in choices):
        return None
    # A mask selects as many dimensions as it has, a tensor of indices selects one.
    taken = sum(each.dim() if each.dtype in (torch.bool, torch.uint8) else 1 for each in choices)
    # Such an index also selects in the sharded dimension.
    if taken > piece.place:
        return None
    own = call.on_part()
    return call.again(own, own.dim() - (piece.dim() - piece.place))


def _by_row(call: PieceCall, dims: Sequence[int] = ()) -> Any:
    """Compute each index of the sharded dimension by itself, with a function over the dimensions `dims`."""
    piece, name = call.piece, call.name
    if name in _ALONG:
        dims = call.dims(_ALONG[name])
    elif not dims:
        shape = (1,) if name == "linear" else call.argument("normalized_shape", 1)
        dims = range(piece.dim() - len(shape), piece.dim())
    # A tensor of one dimension, such as a bias, belongs to the last dimension.
    others = [leaf for leaf in call.leaves if isinstance(leaf, Tensor) and leaf is not piece]
    if piece.place in dims or (name != "linear" and any(other.dim() > 1 for other in others)):
        return None
    place, count = piece.place, piece.dim()
    removed = sum(dim < place for dim in dims)
    return OnParts(call, lambda own: place - removed if own.dim() < count else place, call.operand)


def _reduce(call: PieceCall) -> Any:
    """Reduce over the group, if a reduction of the ranks' results is the reduction of the full tensor."""
    piece, part, name = call.piece, call.part, call.name
    at = 2 if "norm" in name else 1
    dims, keepdim = call.dims(at), call.argument("keepdim", at + 1, False)
    if piece.place not in dims:
        return _by_row(call, dims)
    dtype = call.kwargs.get("dtype") or part.dtype
    # Autograd shares the gradient of equal extremes, and would not count the extremes of other ranks.
    is_shared = name in ("amax", "amin") and part.requires_grad and torch.is_grad_enabled()
    is_known = isinstance(keepdim, bool) and not call.kwargs.keys() - {"dim", "keepdim", "dtype", "p", "ord"}
    if is_shared or not is_known or not _may_join(piece, dtype):
        return None
    if name in ("any", "all"):
        part, dtype = part.bool(), torch.bool
        reduce = partial(torch.amax if name == "any" else torch.amin, keepdim=True)
    elif "norm" not in name:
        reduce = partial(getattr(torch, name), keepdim=True)
    else:
        order = call.argument("p" if name == "norm" else "ord", 1, 2)
        order = 2 if order in (None, "fro") else order
        if isinstance(order, str) or order <= 0:
            return None
        reduce = partial(torch.linalg.vector_norm, ord=order, keepdim=True)
    share = part.shape[piece.place] / piece.shape[piece.place] if name == "mean" else None
    found = _reduced_twice(reduce, part.to(dtype), piece, dims, share)
    return found if keepdim else found.squeeze(dims)


def _may_join(piece: Piece, dtype: torch.dtype) -> bool:
    """Return whether a result over all parts may be computed from the ranks' results.

    Double precision is there to compare runs to 1e-10. After a cast to single precision, sums by rank would round
    differently from one sum.
    """
    family = piece.family
    # An element that several ranks hold would count several times.
    is_shared = family.packing is not None and family.packing.replicated
    return min(family.extents) > 0 and not is_shared and not family.is_rounded and not _loses_digits(piece, dtype)


def _reduced_twice(
    reduce: Callable[..., Tensor], part: Tensor, piece: Piece, dims: tuple[int, ...], share: float | None = None
) -> Tensor:
    """Reduce the part, gather the ranks' results, and reduce these; for a mean, `share` is the weight of this rank."""
    own = reduce(part, dim=dims)
    if share is not None:
        own, reduce = own * share, partial(torch.sum, keepdim=True)
    group = piece.family.group
    return reduce(piece.family.all_of(own, piece.place, [1] * group.size), dim=(piece.place,))


def _spread(call: PieceCall) -> Any:
    """Sum the squares of deviations from the mean, which the ranks exchange first."""
    piece, part, dims = call.piece, call.part, call.dims(1)
    if piece.place not in dims:
        return _by_row(call)
    correction, keepdim = call.kwargs.get("correction", 1), call.kwargs.get("keepdim", False)
    count = math.prod(piece.shape[dim] for dim in dims)
    is_known = len(call.args) < 3 and not isinstance(call.argument("dim", 1), bool) and isinstance(correction, int)
    is_known &= not call.kwargs.keys() - {"dim", "correction", "keepdim"}
    if not is_known or count <= correction or not _may_join(piece, part.dtype):
        return None
    total = partial(torch.sum, keepdim=True)
    mean = _reduced_twice(total, part, piece, dims) / count
    deviation = part - piece.family.shared(mean)
    found = _reduced_twice(total, deviation.square(), piece, dims) / (count - correction)
    found = found.sqrt() if call.name == "std" else found
    return found if keepdim else found.squeeze(dims)


def _softmax(call: PieceCall) -> Any:
    piece, part, dims = call.piece, call.part, call.dims(1)
    if piece.place not in dims:
        return _by_row(call, dims)
    # Autocast may choose another type, so ask for it.
    dtype = call.func(part.detach()[:0], *call.args[1:], **call.kwargs).dtype
    if len(dims) != 1 or not _may_join(piece, dtype):
        return None
    # The sum of exponentials needs more digits than half precision has.
    z = part.to(torch.promote_types(dtype, torch.float32))
    total = _reduced_twice(partial(torch.logsumexp, keepdim=True), z, piece, dims)
    log_p = z - piece.family.shared(total)
    return call.again((log_p if call.name == "log_softmax" else log_p.exp()).to(dtype))


def _pick(call: PieceCall) -> Any:
    """Find the best of the full tensor among the best of each rank."""
    piece, part, name, group, place = call.piece, call.part, call.name, call.family.group, call.piece.place
    is_topk, is_index = name == "topk", name.startswith("arg")
    dim = call.argument("dim", 2 if is_topk else 1, -1 if is_topk else None)
    # For too large a `k`, torch raises its error.
    if dim is None and name in ("max", "min") and len(call.leaves) == 1:
        return _reduce(replace(call, name=f"a{name}"))
    if not isinstance(dim, int) or (is_topk and call.argument("k", 1) > piece.shape[dim]):
        return None
    if dim % piece.dim() != place:
        return _by_row(call, (dim % piece.dim(),))
    if min(piece.family.extents) == 0 or piece.family.packing is not None:
        return None
    sizes = [min(call.argument("k", 1) if is_topk else 1, extent) for extent in piece.family.extents]
    best: Callable[[Tensor, int], Tensor] = partial(torch.argmax if "max" in name else torch.argmin, keepdim=True)
    if is_topk:
        largest, is_sorted = call.argument("largest", 3, True), call.argument("sorted", 4, True)

        def best(values: Tensor, dim: int) -> Tensor:
            count = min(call.argument("k", 1), values.shape[dim])
            return values.topk(count, dim, largest, is_sorted).indices

    in_tiles = best_in_tiles(part, name) if is_index and isinstance(part, TiledLogits) else None
    if in_tiles is None:
        index = best(part.detach(), place)
        in_tiles = (part.detach() if is_index else part).gather(place, index), index
    own, index = in_tiles
    # `index` counts from the first index of the part; the result counts from the first of all.
    first = sum(piece.family.extents[: group.rank])
    index = kept(partial(comm.all_gather, index + first, group, place, sizes))
    values = piece.family.all_of(own, place, sizes)
    # Like torch, take the first of equal values: the ranks are in the order of their parts.
    chosen = best(values.detach(), place)
    found = [values.gather(place, chosen), index.gather(place, chosen)]
    if not is_topk and not call.argument("keepdim", 2, False):
        found = [each.squeeze(place) for each in found]
    return found[1] if is_index else getattr(torch.return_types, name)(found)


def _loss(call: PieceCall) -> Tensor | None:
    piece, part = call.piece, call.part
    given = class_loss_arguments(piece.shape, piece.place, call.args[1:], call.kwargs)
    if given is None or piece.family.is_rounded or piece.family.packing is not None:
        return None
    loss = cross_entropy if call.name == "cross_entropy" else nll_loss
    rule, group = Shard.of_sizes(piece.family.extents), piece.family.group
    if isinstance(part, TiledLogits):
        found = losses_in_tiles(part, partial(loss, rule=rule, group=group), **given)
        if found is not None:
            return found
    return loss(part, rule=rule, group=group, dim=piece.place, **given)


_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
DROPOUTS = {"dropout", "alpha_dropout"}
# The place of `dim` among the arguments.
_ALONG = {"var": 1, "std": 1, "prod": 1, "cumsum": 1, "cumprod": 1, "sort": 1, "argsort": 1, "normalize": 2}

# The table of the functions that compute on the part, and how. Any other function gathers.
_TABLE: list[tuple[Callable[[PieceCall], Any], str]] = [
    # Each element by itself: other arguments are cut alike, and the result is a piece.
    (_pointwise, "mul multiply div divide true_divide add sub subtract rsub neg negative pow square sqrt rsqrt abs"),
    (_pointwise, "reciprocal exp log sin cos erf clamp clip masked_fill where addcmul lerp tanh sigmoid logsigmoid"),
    (_pointwise, "addcdiv copy sign sgn expm1 log1p log2 log10 clamp_min clamp_max maximum minimum nan_to_num floor"),
    (_pointwise, "ceil round trunc frac remainder fmod xlogy eq ne lt le gt ge isnan isinf isfinite logical_not"),
    (_pointwise, "logical_and logical_or logical_xor __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__"),
    (_pointwise, "__xor__ __invert__ __mod__ __floordiv__ __rpow__ __rsub__"),
    (_pointwise, "relu relu6 leaky_relu elu selu celu gelu silu mish softplus hardswish zero fill __pow__ __neg__"),
    (_pointwise, "__mul__ __rmul__ __truediv__ __rtruediv__ __add__ __radd__ __sub__ __rsub__"),
    (_pointwise, "dropout alpha_dropout"),
    (_Cast, "float double half bfloat16 to type type_as contiguous clone"),
    (_as_complex, "view_as_complex view_as_real"),
    # The result is a piece if the sharded dimension stays one dimension, with its full extent.
    (_reshape, "view reshape flatten unflatten view_as reshape_as"),
    (_view, "transpose permute movedim moveaxis swapaxes swapdims t detach unsqueeze squeeze narrow select"),
    (_view, "unbind split chunk __getitem__"),
    # The result is a piece if the function goes along other dimensions.
    (_by_row, "linear layer_norm rms_norm prod cumsum cumprod sort argsort normalize"),
    # The same; along the sharded dimension, the ranks exchange their results and each makes the full result of them.
    (_reduce, "sum mean amax amin any all logsumexp norm linalg_vector_norm"),
    (_pick, "argmax argmin max min topk"),
    (_softmax, "softmax log_softmax"),
    (_spread, "var std"),
    # The ranks exchange a few numbers per target.
    (_loss, "cross_entropy nll_loss"),
]
RULES = {name: rule for rule, names in _TABLE for name in names.split()}
Piece.computed_on_parts = staticmethod(computed_on_parts)
Piece.decision_on = staticmethod(decision_on)
