"""Logits that never exist whole: the head's product and the loss are computed in tiles of positions.

    hidden states (N, E)  ->  head  ->  logits (N, C)  ->  cross-entropy      as the user's code says
    tile by tile:   logits of a tile  ->  its losses  ->  its gradients       as the processor does it

The head returns `TiledLogits`, a tensor with the sizes of the logits and without their data. Views, casts and
elementwise functions of it have no data either. Cross-entropy reads the tiles. It computes the gradients of a tile at
once, so that backward only scales them. Any other function makes the data of all logits, once.

Legend: N positions, n positions of a tile, E features, C classes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from lightning_parallel.compat.lightning import tell
from lightning_parallel.compat.torch import (
    DisableTorchFunctionSubclass,
    cast_operator,
    computes_on_parts,
    gather_absent,
    gradients_here,
    keeps_graph,
    log_softmax_operator,
    make_wrapper_subclass,
    parameters_of,
    pytree,
    schema_of,
    unsafe_view,
    version_of,
)
from lightning_parallel.tensor.tiles import Tiling, tiling_of, wide_zeros
from lightning_parallel.tracing.spans import bytes_text

__all__ = ["TiledHead", "TiledLogits", "best_in_tiles", "run_on_logits", "tiled_losses"]

_aten = torch.ops.aten
_STRIDE = 1_000_003  # marks the dimension of the classes, to find it again after a view

Step = Callable[[Tensor], Tensor]
"""An elementwise function of the logits (n, C) of a tile."""


@dataclass(frozen=True)
class _Product:
    """The product that makes logits, and the functions that follow it.

    Attributes:
        rows: The hidden states in autograd's graph, with the features in dimension `place`.
        place: The dimension of the classes.
        weight: (C, E).
        bias: (C,), or None.
        dtype: The dtype of the product.
        result: The dtype of the logits after `steps`.
        steps: The functions that were applied to the product.
        width: The most classes of a rank, by which all ranks choose equal tiles.
    """

    rows: Tensor
    place: int
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    result: torch.dtype
    steps: tuple[Step, ...] = ()
    width: int = 0

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.rows, self.weight, self.bias

    @property
    def flat(self) -> _Product:
        """The same product with the rows (N, E)."""
        rows = self.rows.movedim(self.place, -1)
        return replace(self, rows=rows.reshape(-1, rows.shape[-1]), place=1)

    @property
    def recipe(self) -> _Product:
        """The same product without tensors, for a node of autograd's graph, which keeps these apart."""
        none: Any = None
        return replace(self, rows=none, weight=none, bias=none)

    def of(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the logits of some rows, with the classes in the last dimension."""
        cast = None if bias is None else bias.to(self.dtype)
        return F.linear(rows.to(self.dtype), weight.to(self.dtype), cast)

    def finished(self, logits: Tensor) -> Tensor:
        """Apply the functions that follow the product."""
        for step in self.steps:
            logits = step(logits)
        return logits


class _Values:
    """The data of a tensor, made at the first read.

    Args:
        make: Makes the data.
        base: The values of which these are a view.
    """

    def __init__(self, make: Callable[[], Tensor], base: _Values | None = None) -> None:
        self._make: Callable[[], Tensor] | None = make
        self.made: Tensor | None = None
        self.memory: _Values = self if base is None else base.memory
        # Values that are computed from this memory later.
        self.waiting: list[weakref.ref[_Values]] = []

    def get(self) -> Tensor:
        if self.made is None:
            assert self._make is not None
            with torch.no_grad():
                self.made = self._make()
            # The function refers to the hidden states, and would keep their memory.
            self._make = None
        return self.made

    def settle(self) -> None:
        """Make all values that come from this memory, before it changes in place."""
        for found in [found() for found in self.memory.waiting]:
            if found is not None:
                found.get()
                found.settle()
        self.memory.waiting.clear()


# Views of data that are not made yet stay unmade as well.
_VIEWS = {unsafe_view, _aten.detach.default}
# The results of these functions stay unmade, too.
_LATER = {
    *(cast_operator, _aten.clone.default, _aten.tanh.default, _aten.neg.default, _aten.clamp.default),
    *(_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar),
    *(_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar, log_softmax_operator),
}
# These functions read the address of the data in C++, or copy the Python object.
_NEEDS_ADDRESS = {"numpy", "__array__", "tolist", "__dlpack__", "data_ptr", "storage", "untyped_storage", "is_set_to"}
_NEEDS_ADDRESS |= {"__reduce_ex__", "__deepcopy__", "__repr__", "__format__", "share_memory_", "apply_", "map_"}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
# These functions ask for the gradient of the logits.
_GRADIENT = {"retain_grad", "register_hook"}


@dataclass
class _Uses:
    """The uses of one product: whether a result came from its tiles, and whether code asked for its gradient."""

    is_tiled: bool = False
    is_watched: bool = False


class TiledLogits(Tensor):
    """Logits without data, which their readers compute in tiles; see this module."""

    _content: _Values
    _product: _Product | None
    _unchanged: int
    _uses: _Uses

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None, width: int | None = None) -> TiledLogits:
        """Return `hidden @ weight.T + bias`, of which no data are made.

        Args:
            hidden: (..., E), in autograd's graph.
            weight: (C, E).
            bias: (C,), or None.
            width: The most classes of a rank, if the classes are sharded; C by default.
        """
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(hidden.device.type)
        return _unmade(_Product(hidden, hidden.dim() - 1, weight, bias, dtype, dtype, (), width or weight.shape[0]))

    def whole(self) -> Tensor:
        """Return an ordinary tensor, a part of autograd's graph."""
        with DisableTorchFunctionSubclass():
            # `alias` is not among the views that stay unmade: its dispatch reads the data.
            return _aten.alias.default(self)

    @property
    def tiles(self) -> _Product | None:
        """The product, to be computed in tiles; None if the data have changed, or code asked for their gradient."""
        with DisableTorchFunctionSubclass():
            is_changed = version_of(self) != self._unchanged
        return None if is_changed or self._uses.is_watched else self._product

    @classmethod
    @torch.compiler.disable  # compiled code leaves its graph where it meets such a tensor
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(kind in (TiledLogits, Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # absent parameters are gathered first, and pieces know of other ranks
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            return iter(args[0].unbind())
        with DisableTorchFunctionSubclass():
            if name in _NEEDS_ADDRESS or (name == "__get__" and func == _DATA):
                return func(*pytree.tree_map_only(TiledLogits, TiledLogits.whole, args), **kwargs)
            if name in _GRADIENT:
                _watch(args[0])
            rule = _RULES.get(name)
            first = args[0] if args else None
            if name == "cat" and (joined := _joined_logits(*args, **kwargs)) is not None:
                return joined
            if rule is not None and isinstance(first, TiledLogits) and "out" not in kwargs:
                product = first.tiles
                found = None if product is None else rule(_LogitsCall(func, name, first, product, args[1:], kwargs))
                if found is not None:
                    return found
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, TiledLogits) and first._content.memory.made is None:
            is_view = func in _VIEWS or (func.is_view and func is not _aten.alias.default)
            others = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
            if is_view or (func in _LATER and not any(isinstance(other, TiledLogits) for other in others)):
                return _later(func, is_view, first, args[1:], kwargs)
        read: dict[int, TiledLogits] = {}
        mutable = schema_of(func).is_mutable

        def read_all(value: Any) -> Any:
            if not isinstance(value, TiledLogits):
                return value
            if mutable:
                value._content.settle()
            data = value._content.get()
            read[id(data)] = value
            return data

        result = func(*pytree.tree_map(read_all, args), **pytree.tree_map(read_all, kwargs))
        # An operator that works in place returns the tensor that it changed.
        return pytree.tree_map(lambda value: read.get(id(value), value), result) if mutable else result


def run_on_logits(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function where classes of tensors see no functions; logits without data see it nevertheless."""
    if any(isinstance(value, TiledLogits) for value in args):
        return TiledLogits.__torch_function__(func, (TiledLogits,), args, kwargs)
    return func(*args, **kwargs)


def _watch(logits: TiledLogits) -> None:
    """Compute on the full logits from now on.

    Raises:
        RuntimeError: If a loss was already computed from tiles.
    """
    if logits._uses.is_tiled:
        raise RuntimeError(
            "`retain_grad` and `register_hook` of logits must come before the loss with tiled='auto'; got a call after"
            " it. The loss was computed in tiles, without the logits. Call them before the loss, or set tiled='off'"
        )
    logits._uses.is_watched = True


def _empty(shape: Sequence[int], strides: Any, dtype: torch.dtype, device: torch.device, values: _Values) -> Any:
    made: Any = make_wrapper_subclass(TiledLogits, shape, strides=strides, dtype=dtype, device=device)
    made._content = values
    made._product = None
    made._unchanged = 0
    made._uses = _Uses()
    return made


def _unmade(product: _Product) -> TiledLogits:
    """Return logits for a product, the output of a node of autograd's graph."""
    gather_absent(product.tensors)
    made: TiledLogits = _UnmadeLogits.apply(*product.tensors, product.recipe)
    return _kept(made, product, _Uses())


def _kept(made: TiledLogits, product: _Product, uses: _Uses) -> TiledLogits:
    made._product = product
    made._uses = uses
    with DisableTorchFunctionSubclass():
        made._unchanged = version_of(made)
    return made


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _later(func: Any, is_view: bool, logits: TiledLogits, rest: Any, kwargs: Any) -> Any:
    """Return the result of an operator, or a list of results, whose data are made at the first read."""
    shown = {"device": "meta"} if kwargs.get("device") is not None else {}
    if shown and torch.device(kwargs["device"]) != logits.device:
        return func(logits._content.get(), *rest, **kwargs)
    plain = pytree.tree_map_only(Tensor, _meta, (rest, kwargs))
    metas = func(_meta(logits), *plain[0], **{**plain[1], **shown})
    source = logits._content

    def unmade(meta: Tensor, at: int | None) -> Any:
        def make() -> Tensor:
            result = func(source.get(), *rest, **kwargs)
            return result if at is None else result[at]

        values = _Values(make, source if is_view else None)
        if not is_view:
            source.memory.waiting.append(weakref.ref(values))
        return _empty(meta.shape, meta.stride(), meta.dtype, logits.device, values)

    return unmade(metas, None) if isinstance(metas, Tensor) else [unmade(meta, at) for at, meta in enumerate(metas)]


class _UnmadeLogits(Function):
    """Hidden states, weight and bias -> logits, whose data are not made yet."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, recipe: _Product) -> Tensor:
        ctx.save_for_backward(rows, weight, bias)
        ctx.recipe = recipe
        tensors, version = (rows.detach(), weight, bias), version_of(rows)

        def make() -> Tensor:
            if version_of(rows) != version:
                raise RuntimeError(
                    "The input of the head must not change in place before its output is read, with tiled='auto'; got"
                    " another version. Write `x = x + y` instead of `x += y`, or set tiled='off'"
                )
            gather_absent(tensors)
            rows_last = tensors[0].movedim(recipe.place, -1)
            logits = recipe.finished(recipe.of(rows_last, *tensors[1:]))
            return logits.movedim(-1, recipe.place).contiguous()

        shape = list(rows.shape)
        shape[recipe.place] = weight.shape[0]
        return _empty(shape, None, recipe.result, rows.device, _Values(make))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        recipe: _Product = ctx.recipe
        found = _differentiated(
            lambda rows, weight, bias: recipe.finished(recipe.of(rows.movedim(recipe.place, -1), weight, bias)).movedim(
                -1, recipe.place
            ),
            ctx.saved_tensors,
            ctx.needs_input_grad,
            grad,
        )
        return *found, None


def _differentiated(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Run a function again and return the gradients of its inputs; with a graph in a backward that makes a graph."""
    with_graph = torch.is_grad_enabled()
    # Aliases: the hooks of a parameter run once, when autograd has its gradient.
    inputs = [
        value
        if value is None
        else value.view_as(value)
        if with_graph and needed
        else value.detach().requires_grad_(needed)
        for value, needed in zip(inputs, wanted)
    ]
    with torch.enable_grad():
        result = function(*inputs)
        of = [value for value, needed in zip(inputs, wanted) if needed and value is not None]
        grads = iter(gradients_here(result, of, grad, with_graph))
    return [next(grads) if needed and value is not None else None for value, needed in zip(inputs, wanted)]


# --------------------------------------------------------------------------------------------------------- the rules


@dataclass
class _LogitsCall:
    """A call of a function whose first argument is logits without data."""

    func: Callable[..., Any]
    name: str
    logits: TiledLogits
    product: _Product
    rest: tuple[Any, ...]
    kwargs: dict[str, Any]

    def applied(self) -> Any:
        """Return the result as autograd's graph knows it; its data may be unmade."""
        return self.func(self.logits, *self.rest, **self.kwargs)

    def argument(self, name: str, at: int, default: Any = None) -> Any:
        return self.kwargs.get(name, self.rest[at] if len(self.rest) > at else default)

    def again(self, result: Any, **changes: Any) -> Any:
        """Let a result without data know its product; give back any other result."""
        if not isinstance(result, TiledLogits) or result is self.logits:
            return result
        return _kept(result, replace(self.product, result=result.dtype, **changes), self.logits._uses)


def _reshaped(call: _LogitsCall) -> Any:
    product, shape = call.product, call.logits.shape
    if any(isinstance(value, torch.dtype) for value in (*call.rest, *call.kwargs.values())):
        return None
    shown = call.func(_meta(call.logits), *call.rest, **call.kwargs)
    classes, before = shape[product.place], shape[: product.place].numel()
    # The classes stay one dimension if as many elements lie before it as before.
    places = [at for at, size in enumerate(shown.shape) if size == classes and shown.shape[:at].numel() == before]
    if classes < 2 or len(places) != 1:
        return None
    (place,) = places
    rows = product.rows.reshape(*shown.shape[:place], product.rows.shape[product.place], *shown.shape[place + 1 :])
    return call.again(call.applied(), rows=rows, place=place)


def _viewed(call: _LogitsCall) -> Any:
    product, shape = call.product, call.logits.shape
    if call.name == "__getitem__" and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(call.rest)):
        return _selected(call)
    if call.name == "squeeze" and min(shape[product.place], product.rows.shape[product.place]) < 2:
        return None
    # Run the view on a tensor without data, where only the classes have a stride, to see where they end up.
    strides = [_STRIDE if at == product.place else 0 for at in range(len(shape))]
    marked = call.func(torch.empty_strided(shape, strides, device="meta"), *call.rest, **call.kwargs)
    several = [marked] if isinstance(marked, Tensor) else marked
    full = shape[product.place]
    places = [
        next((at for at, stride in enumerate(each.stride()) if stride == _STRIDE and each.shape[at] == full), -1)
        for each in several
    ]
    if -1 in places:
        return None
    results, rows = call.applied(), call.func(product.rows, *call.rest, **call.kwargs)
    if isinstance(results, Tensor):
        return call.again(results, rows=rows, place=places[0])
    return type(results)(call.again(each, rows=row, place=at) for each, row, at in zip(results, rows, places))


def _selected(call: _LogitsCall) -> Any:
    """Select positions by a mask or by indices, such as the positions with a label."""
    product = call.product
    choices = call.rest[0] if isinstance(call.rest[0], tuple) else (call.rest[0],)
    if not all(isinstance(each, Tensor) and not isinstance(each, TiledLogits) for each in choices):
        return None
    # A mask selects as many dimensions as it has, a tensor of indices selects one.
    taken = sum(each.dim() if each.dtype in (torch.bool, torch.uint8) else 1 for each in choices)
    if taken > product.place:
        return None
    rows = product.rows[call.rest[0]]
    found = _unmade(replace(product, rows=rows, place=rows.dim() - (product.rows.dim() - product.place)))
    # The selected logits are a copy: later changes of the full logits must not reach them.
    call.logits._content.memory.waiting.append(weakref.ref(found._content))
    return found


def _joined_logits(parts: Any = (), dim: int = 0, **others: Any) -> TiledLogits | None:
    """Join parts of the same logits, such as the ranges of a rank; None if they do not share their product."""
    products = [part.tiles if isinstance(part, TiledLogits) else None for part in parts]
    first = products[0] if products else None
    if first is None or others or dim % parts[0].dim() == first.place:
        return None
    for other in products:
        is_alike = other is not None and other.weight is first.weight and other.bias is first.bias
        if not is_alike or (other.place, other.steps) != (first.place, first.steps):  # type: ignore[union-attr]
            return None
    found = _unmade(replace(first, rows=torch.cat([each.rows for each in products if each is not None], dim)))
    for part in parts:
        part._content.memory.waiting.append(weakref.ref(found._content))
    return found


def _elementwise(call: _LogitsCall) -> Any:
    product, values = call.product, (*call.rest, *call.kwargs.values())
    tensors = [value for value in values if isinstance(value, Tensor)]
    # Other tensors may differ by class only, so that all positions share them.
    is_last = product.place == call.logits.dim() - 1
    for other in tensors:
        has_one_row = other.dim() == 0 or (is_last and other.dim() == 1)
        if other.requires_grad or not has_one_row or isinstance(other, TiledLogits):
            return None
    result = call.applied()
    if isinstance(result, Tensor) and (result.shape != call.logits.shape or result.device != call.logits.device):
        return result
    step = partial(_applied_to, call.func, call.rest, call.kwargs)
    return call.again(result, steps=(*product.steps, step))


def _cast(call: _LogitsCall) -> Any:
    result, before = call.applied(), call.logits
    if not isinstance(result, TiledLogits) or result is before or not result.dtype.is_floating_point:
        return result
    dtype = result.dtype
    steps = () if dtype == before.dtype else (partial(Tensor.to, dtype=dtype),)
    return call.again(result, steps=(*call.product.steps, *steps))


def _applied_to(func: Callable[..., Tensor], rest: tuple[Any, ...], kwargs: dict[str, Any], tile: Tensor) -> Tensor:
    return func(tile, *rest, **kwargs)


def _log_softmaxed(call: _LogitsCall) -> Any:
    dim, dtype = call.argument("dim", 0), call.kwargs.get("dtype")
    if not isinstance(dim, int) or dim % call.logits.dim() != call.product.place:
        return None
    step = partial(F.log_softmax, dim=-1, dtype=dtype)
    return call.again(call.applied(), steps=(*call.product.steps, step))


def _best(call: _LogitsCall) -> Any:
    dim, keepdim = call.argument("dim", 0), call.argument("keepdim", 1, False)
    if not isinstance(dim, int) or dim % call.logits.dim() != call.product.place or not isinstance(keepdim, bool):
        return None
    found = best_in_tiles(call.logits, call.name)
    return None if found is None else found[1] if keepdim else found[1].squeeze(call.product.place)


def best_in_tiles(logits: TiledLogits, name: str) -> tuple[Tensor, Tensor] | None:
    """Return the best logits and their classes, in a dimension of one element, computed in tiles.

    Args:
        logits: Logits without data; None if their data exist.
        name: `argmax` or `argmin`.
    """
    product = logits.tiles
    if product is None or logits._content.memory.made is not None:
        return None
    flat, shape = product.flat, list(logits.shape)
    shape[product.place] = 1
    parts = []
    with torch.no_grad():
        gather_absent(flat.tensors)
        for rows in flat.rows.split(_tile_rows(flat).rows):
            tile = flat.finished(flat.of(rows, flat.weight, flat.bias))
            index = getattr(torch, name)(tile, -1, keepdim=True)
            parts.append((tile.gather(-1, index), index))
    values, classes = (torch.cat(each).view(shape) for each in zip(*parts))
    return values, classes


def _loss(call: _LogitsCall) -> Tensor | None:
    names: tuple[str, ...] = (
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    )
    if call.name == "nll_loss":
        names = names[:-1]
    given = dict(zip(names, call.rest)) | call.kwargs
    product, shape = call.product, call.logits.shape
    target, weight, reduction = given.pop("target", None), given.get("weight"), given.pop("reduction", "mean")
    outdated = (given.pop("size_average", None), given.pop("reduce", None))
    if (
        product.place != min(1, len(shape) - 1)
        or not isinstance(target, Tensor)
        or target.dtype != torch.long
        or [*target.shape] != [size for at, size in enumerate(shape) if at != product.place]
        or (weight is not None and (weight.requires_grad or weight.dim() != 1))
        or outdated != (None, None)
        or reduction not in ("mean", "sum", "none")
        or given.keys() - {"weight", "ignore_index", "label_smoothing"}
    ):
        return None
    function = F.cross_entropy if call.name == "cross_entropy" else F.nll_loss
    return tiled_losses(call.logits, target, partial(function, **given), given, reduction)


# The functions that need no data; any other function makes the data.
_TABLE: list[tuple[Callable[[_LogitsCall], Any], str]] = [
    (_elementwise, "mul multiply div divide true_divide add sub subtract neg negative tanh clamp clip"),
    (_elementwise, "__mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ __neg__"),
    (_cast, "float double half bfloat16 to type_as contiguous clone"),
    (_reshaped, "view reshape flatten unflatten view_as reshape_as"),
    (_viewed, "transpose permute movedim moveaxis swapaxes swapdims detach unsqueeze squeeze narrow select"),
    (_viewed, "unbind split chunk __getitem__"),
    (_log_softmaxed, "log_softmax"),
    (_best, "argmax argmin"),
    (_loss, "cross_entropy nll_loss"),
]
_RULES = {name: rule for rule, names in _TABLE for name in names.split()}


# ------------------------------------------------------------------------------------------------------ the tiled loss

_told: set[int] = set()


def _tile_rows(flat: _Product) -> Tiling:
    positions, features = flat.rows.shape
    return tiling_of(positions, features, flat.width, flat.rows.element_size())


def tiled_losses(
    logits: TiledLogits,
    target: Tensor,
    function: Callable[..., Tensor],
    given: dict[str, Any],
    reduction: str,
) -> Tensor | None:
    """Compute a loss in tiles of positions; None if the data of the logits exist.

    Args:
        logits: Logits without data.
        target: Class indices, (N...).
        function: The loss of logits (n, C) and targets (n,), which takes `reduction`.
        given: The arguments `weight` and `ignore_index` of the loss.
        reduction: As in PyTorch.

    Returns:
        The loss: () for `mean` and `sum`, (N...) for `none`.
    """
    product = logits.tiles
    if product is None:
        return None
    flat, indices = product.flat, target.reshape(-1)
    tiling = _tile_rows(flat)
    _tell_of_tiles(flat, tiling)
    gather_absent(flat.tensors)
    logits._uses.is_tiled = True
    wants_graph = torch.is_grad_enabled() and logits.requires_grad
    work = _TileWork(flat.recipe, tiling.rows, partial(_single, function), wants_graph)
    # The gradients of half precision need the scale of the loss, which only backward knows.
    if reduction == "none" or flat.dtype == torch.float16:
        losses = _LossesAgain.apply(*flat.tensors, indices, work)
        if reduction == "none":
            return losses.view(target.shape)
        total = losses.sum()
        return total if reduction == "sum" else total / _counted(indices, given, total.dtype)
    counted = None if reduction == "sum" else _counted(indices, given, torch.float32)
    return _LossAndGradients.apply(*flat.tensors, indices, counted, work)


def _tell_of_tiles(flat: _Product, tiling: Tiling) -> None:
    if flat.width not in _told:
        _told.add(flat.width)
        tell(
            f"tiled='auto' computes the loss of {len(flat.rows):,} positions and {flat.width:,} classes in"
            f" {tiling.count} tiles of {tiling.rows:,} positions ({bytes_text(tiling.bytes)} of logits each)."
        )


def _single(function: Callable[..., Tensor], logits: Tensor, target: Tensor, reduction: str) -> Tensor:
    # A sum of many losses needs more digits than half precision has.
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return function(wide, target, reduction=reduction)


def _counted(target: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Return the number of targets that count, or their total weight."""
    valid, weight = target != given.get("ignore_index", -100), given.get("weight")
    if weight is None:
        return valid.sum()
    # An ignored target is no index into `weight`.
    return (weight[target.masked_fill(~valid, 0)] * valid).sum()


@dataclass(frozen=True)
class _TileWork:
    """The computation of a tile.

    Attributes:
        recipe: The product.
        rows: Positions of a tile.
        losses: Takes logits (n, C), targets (n,), and a reduction.
        wants_graph: Whether gradients are computed.
    """

    recipe: _Product
    rows: int
    losses: Callable[..., Tensor]
    wants_graph: bool

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """Return the dtype of the loss as torch gives it."""
        is_cast = torch.is_autocast_enabled(device.type) and self.recipe.result != torch.float64
        return torch.float32 if is_cast else self.recipe.result

    def whole(self, target: Tensor, reduction: str, dtype: torch.dtype) -> Callable[..., Tensor]:
        """Return the function from rows, weight and bias to the losses, computed without tiles."""

        def losses(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            logits = self.recipe.finished(self.recipe.of(rows, weight, bias))
            return self.losses(logits, target, reduction=reduction).to(dtype)

        return losses


class _Sums:
    """The gradients of weight and bias, summed over tiles, and of the rows.

    Args:
        tensors: Rows (N, E), weight (C, E), and bias (C,) or None.
        wanted: Whether each needs a gradient.
    """

    def __init__(self, tensors: Sequence[Tensor | None], wanted: Sequence[bool], recipe: _Product) -> None:
        self.tensors, self.recipe = tensors, recipe
        rows, weight, bias = tensors
        assert rows is not None
        assert weight is not None
        self.of_rows = torch.empty_like(rows) if wanted[0] else None
        self.of_weight = wide_zeros(weight) if wanted[1] else None
        self.of_bias = wide_zeros(bias) if bias is not None and wanted[2] else None

    def add(self, first: int, rows: Tensor, grad: Tensor) -> None:
        """Add the gradients of the rows from `first` on, given the gradient (n, C) of their product."""
        weight = self.tensors[1]
        assert weight is not None
        if self.of_rows is not None:
            self.of_rows[first : first + len(rows)] = grad @ weight.to(grad.dtype)
        if self.of_weight is not None:
            if self.of_weight.dtype == grad.dtype:
                self.of_weight.addmm_(grad.t(), rows.to(grad.dtype))
            else:
                self.of_weight += grad.t() @ rows.to(grad.dtype)
        if self.of_bias is not None:
            self.of_bias += grad.sum(0, dtype=self.of_bias.dtype)

    def all(self) -> list[Tensor | None]:
        return [self.of_rows, self.of_weight, self.of_bias]


class _LossAndGradients(Function):
    """Rows, weight, bias, targets -> the sum or mean of their losses; forward computes the gradients as well."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        counted: Tensor | None,
        work: _TileWork,
    ) -> Tensor:
        recipe = work.recipe
        wanted = [work.wants_graph and needed for needed in ctx.needs_input_grad[:3]]
        sums = _Sums((rows, weight, bias), wanted, recipe)
        # Cast once for all tiles.
        near, bias_near = weight.to(recipe.dtype), None if bias is None else bias.to(recipe.dtype)
        parts = []
        for first in range(0, len(rows), work.rows):
            tile, labels = rows[first : first + work.rows], target[first : first + work.rows]
            logits = recipe.of(tile, near, bias_near).requires_grad_(any(wanted))
            with torch.set_grad_enabled(any(wanted)):
                loss = work.losses(recipe.finished(logits), labels, reduction="sum")
            if any(wanted):
                (grad,) = gradients_here(loss, [logits])
                del logits
                sums.add(first, tile, grad)
                del grad
            parts.append(loss.detach())
        total = torch.stack(parts).sum() if parts else rows.new_zeros(())
        ctx.save_for_backward(rows, weight, bias, target, counted, *sums.all())
        ctx.work = work
        loss = total if counted is None else total / counted
        return loss.to(work.dtype_on(rows.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weight, bias, target, counted, *gradients = ctx.saved_tensors
        work: _TileWork = ctx.work
        # Half precision would round the scale of all gradients alike.
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        # Targets that are all ignored have no gradient, though their mean is nan.
        scale = grad if counted is None else torch.where(counted == 0, 0.0, grad / counted)
        if torch.is_grad_enabled():  # with `create_graph=True`, whose graph needs the logits
            losses = work.whole(target, "sum", scale.dtype)
            found = _differentiated(losses, (rows, weight, bias), ctx.needs_input_grad[:3], scale)
            return *found, None, None, None
        keeps = keeps_graph()
        scaled = [
            None if value is None else (value * scale if keeps else value.mul_(scale)).to(like.dtype)
            for value, like in zip(gradients, (rows, weight, bias))
        ]
        return *scaled, None, None, None


class _LossesAgain(Function):
    """Rows, weight, bias, targets -> the loss of each target; backward computes the tiles again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, work: _TileWork) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, target)
        ctx.work = work
        kind = rows.device.type
        ctx.autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        recipe = work.recipe
        near, bias_near = weight.to(recipe.dtype), None if bias is None else bias.to(recipe.dtype)
        parts = []
        for first in range(0, len(rows), work.rows):
            part = slice(first, first + work.rows)
            parts.append(
                work.losses(recipe.finished(recipe.of(rows[part], near, bias_near)), target[part], reduction="none")
            )
        losses = torch.cat(parts) if parts else rows.new_zeros(0)
        return losses.to(work.dtype_on(rows.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weight, bias, target = ctx.saved_tensors
        work: _TileWork = ctx.work
        around: Callable[[], AbstractContextManager[Any]] = ctx.autocast
        if torch.is_grad_enabled():
            with around():
                losses = work.whole(target, "none", grad.dtype)
                found = _differentiated(losses, (rows, weight, bias), ctx.needs_input_grad[:3], grad)
            return *found, None, None
        recipe = work.recipe
        sums = _Sums((rows, weight, bias), ctx.needs_input_grad[:3], recipe)
        near, bias_near = weight.to(recipe.dtype), None if bias is None else bias.to(recipe.dtype)
        for first in range(0, len(rows), work.rows):
            part = slice(first, first + work.rows)
            logits = recipe.of(rows[part], near, bias_near).requires_grad_()
            with torch.enable_grad(), around():
                each = work.losses(recipe.finished(logits), target[part], reduction="none")
            (own,) = gradients_here(each, [logits], grad[part].to(each.dtype))
            sums.add(first, rows[part], own)
        found = [
            None if value is None else value.to(like.dtype) for value, like in zip(sums.all(), (rows, weight, bias))
        ]
        return *found, None, None


# ------------------------------------------------------------------------------------------------------------ the head


class _HeadCall(TorchFunctionMode):
    """Lets the product of one layer return logits without data."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled():
            given = dict(zip(("input", "weight", "bias"), args)) | kwargs
            hidden = given["input"]
            is_head = parameters_of(self._layer).get("weight") is given["weight"]
            if is_head and _is_plain(hidden):
                return TiledLogits.of(hidden, given["weight"], given.get("bias"))
            if is_head and computes_on_parts(type(hidden)):
                # Its rule calls the function again, with the part, and this mode sees that call.
                with self:
                    return type(hidden).__torch_function__(func, (type(hidden),), args, kwargs)
        return func(*args, **kwargs)


def _is_plain(hidden: Any) -> bool:
    """Return whether a tensor has data: a placeholder for another stage's tensor has none."""
    return type(hidden) in (Tensor, nn.Parameter) and not hidden.is_meta


class TiledHead:
    """Runs the calls of a linear layer so that its output has no data; see `AroundCalls`.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __call__(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _HeadCall(self._layer):
            return run(*args, **kwargs)
