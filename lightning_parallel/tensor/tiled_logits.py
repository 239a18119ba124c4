"""Logits that never exist whole: the head's product and the loss are computed in tiles of positions.

    hidden states (N, E)  ->  head  ->  logits (N, C)  ->  cross-entropy      as the user's code says
    tile by tile:   logits of a tile  ->  its losses  ->  its gradients       as the processor does it

The head returns `TiledLogits`, a tensor with the sizes of the logits and without their data. A function of it goes one
of three ways:

    view               shares the data, which are still not made; it knows its own rows of the hidden states
    cast, elementwise  new logits without data, with one more step after the product
    cross-entropy      reads the tiles; see `tiled_loss`

Any other function makes the data of all logits, once.

Legend: N positions, n positions of a tile, E features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from lightning_parallel.compat.torch import (
    DisableTorchFunctionSubclass,
    computes_on_parts,
    gather_absent,
    make_wrapper_subclass,
    parameters_of,
    pytree,
    schema_of,
    unsafe_view,
    version_of,
    with_lost_weight,
)
from lightning_parallel.tensor.later_data import (
    ASKS_FOR_GRADIENT,
    DATA_OF,
    NEEDS_ADDRESS,
    LaterData,
    meta_of,
    place_after_reshape,
    places_after_view,
    views_later,
)
from lightning_parallel.tensor.loss import class_loss_arguments
from lightning_parallel.tensor.tiled_loss import LogitsProduct, differentiated_again, loss_of_product

__all__ = ["TiledHead", "TiledLogits", "best_in_tiles", "losses_in_tiles", "run_on_logits"]

_aten = torch.ops.aten
# `alias` reads the data instead.
_VIEWS = {unsafe_view, _aten.detach.default}


@dataclass
class _Uses:
    """Whether a function of logits, or of their views, passed by their data, and whether code asked for a gradient."""

    is_passed: bool = False
    is_watched: bool = False


class TiledLogits(Tensor):
    """Logits without data, which their readers compute in tiles; see this module."""

    _data: LaterData
    _uses: _Uses
    _product: LogitsProduct | None = None
    _unchanged: int = 0

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None, width: int | None = None) -> TiledLogits:
        """Return `hidden @ weight.T + bias`, of which no data are made.

        Args:
            hidden: (..., E), in autograd's graph.
            weight: (C, E).
            bias: (C,), or None.
            width: The most classes of a rank, if the classes are sharded; C by default.
        """
        dtype, classes = hidden.dtype, weight.shape[0]
        if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(hidden.device.type)
        like = torch.empty(*hidden.shape[:-1], classes, dtype=dtype, device="meta")
        return _unmade(LogitsProduct(hidden, hidden.dim() - 1, weight, bias, dtype, like, width or classes))

    def whole(self) -> Tensor:
        """Return an ordinary tensor, a part of autograd's graph."""
        with DisableTorchFunctionSubclass():
            # `alias` is not among the views that stay unmade: its dispatch reads the data.
            return _aten.alias.default(self)

    @property
    def tiles(self) -> LogitsProduct | None:
        """The product, to be computed in tiles; None if the data have changed, or code asks for their gradient.

        Raises:
            RuntimeError: If the hidden states or the weight changed in place.
        """
        with DisableTorchFunctionSubclass():
            is_changed, needs_graph = version_of(self) != self._unchanged, self.requires_grad
            has_own_gradient = needs_graph and self.is_leaf  # by `detach().requires_grad_()`
        if self._product is None or is_changed or has_own_gradient or self._uses.is_watched:
            return None
        self._product.check_unchanged()
        return self._product if needs_graph else self._product.detached

    @classmethod
    @torch.compiler.disable  # compiled code leaves its graph where it meets such a tensor
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(kind in (TiledLogits, Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # absent parameters are gathered first, and pieces know of other ranks
        kwargs = with_lost_weight(func, kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            return iter(args[0].unbind())
        with DisableTorchFunctionSubclass():
            if name in NEEDS_ADDRESS or (name == "__get__" and func == DATA_OF):
                return func(*pytree.tree_map_only(TiledLogits, TiledLogits.whole, args), **kwargs)
            if name in ASKS_FOR_GRADIENT or name == "grad":
                _watch(args[0] if name != "grad" else kwargs["inputs"] if "inputs" in kwargs else args[1])
            first = args[0] if args else None
            rule = _RULES.get(name)
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
        is_view = func in _VIEWS or (func.is_view and func is not _aten.alias.default)
        if is_view and isinstance(first, TiledLogits):
            show = partial(_without_data, device=first.device)
            return views_later(func, first, first._data, args[1:], kwargs, show)
        read: dict[int, TiledLogits] = {}

        def read_all(value: Any) -> Any:
            if not isinstance(value, TiledLogits):
                return value
            data = value._data.get()
            read[id(data)] = value
            return data

        result = func(*pytree.tree_map(read_all, args), **pytree.tree_map(read_all, kwargs))
        # An operator that works in place returns the tensor that it changed.
        is_changed = schema_of(func).is_mutable
        return pytree.tree_map(lambda value: read.get(id(value), value), result) if is_changed else result


def run_on_logits(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function where classes of tensors see no functions; logits without data see it nevertheless."""
    if any(isinstance(value, TiledLogits) for value in args):
        return TiledLogits.__torch_function__(func, (TiledLogits,), args, kwargs)
    return func(*args, **kwargs)


def _watch(tensors: Any) -> None:
    """Compute on the full logits from now on.

    Raises:
        RuntimeError: If another function has passed by their data already.
    """
    for logits in pytree.tree_leaves(tensors):
        if not isinstance(logits, TiledLogits):
            continue
        if logits._uses.is_passed:
            raise RuntimeError(
                "`retain_grad` and `register_hook` of logits must come before other functions of them with"
                " tiled='auto'; got such a call, or `torch.autograd.grad`, after the loss or after a cast. The loss"
                " was computed in tiles, without the logits. Call `retain_grad` first, or set tiled='off'"
            )
        logits._uses.is_watched = True


def _without_data(like: Tensor, make: Callable[[], Tensor], device: torch.device) -> TiledLogits:
    made = make_wrapper_subclass(TiledLogits, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
    made._data, made._uses = LaterData(make), _Uses()
    return made


def _unmade(product: LogitsProduct) -> TiledLogits:
    """Return logits for a product, the output of a node of autograd's graph."""
    gather_absent(product.tensors)
    product = product.marked()
    with product.graph:
        return _kept(_UnmadeLogits.apply(*product.tensors, product.recipe), product, _Uses())


def _kept(made: TiledLogits, product: LogitsProduct, uses: _Uses) -> TiledLogits:
    with DisableTorchFunctionSubclass():
        made._unchanged = version_of(made)
        # Detached logits that code keeps must not keep the graph of the hidden states.
        made._product = product.marked() if made.requires_grad else product.detached.marked()
    made._uses = uses if made.requires_grad else _Uses()
    return made


class _UnmadeLogits(Function):
    """Hidden states, weight and bias -> logits, whose data are not made yet."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, recipe: LogitsProduct) -> Tensor:
        ctx.save_for_backward(rows, weight, bias)
        ctx.recipe = recipe
        product, like = replace(recipe, rows=rows.detach(), weight=weight, bias=bias), recipe.like

        def make() -> Tensor:
            product.check_unchanged()
            gather_absent(product.tensors)
            found = product.all_of(*product.tensors)
            if found.stride() == like.stride():
                return found
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=found.device).copy_(found)

        return _without_data(like, make, rows.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *differentiated_again(ctx.recipe.all_of, ctx.saved_tensors, ctx.needs_input_grad, grad), None


# --------------------------------------------------------------------------------------------------------- the rules


@dataclass
class _LogitsCall:
    """A call of a function whose first argument is logits without data."""

    func: Callable[..., Any]
    name: str
    logits: TiledLogits
    product: LogitsProduct
    rest: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, first: Tensor) -> Any:
        """Call the function with another first argument."""
        return self.func(first, *self.rest, **self.kwargs)

    def is_along_classes(self) -> bool:
        """Return whether the argument `dim` is the dimension of the classes."""
        dim = self.kwargs.get("dim", self.rest[0] if self.rest else None)
        return isinstance(dim, int) and dim % self.logits.dim() == self.product.place

    def view(self, view: TiledLogits, rows: Tensor, place: int) -> TiledLogits:
        """Let a view of the logits know its product."""
        product = replace(self.product, rows=rows, place=place, like=meta_of(view))
        return view if view is self.logits else _kept(view, product, self.logits._uses)

    def anew(self, like: Tensor, *steps: Callable[[Tensor], Tensor], **changes: Any) -> TiledLogits:
        """Return new logits with the sizes of `like`, after some more steps."""
        product = replace(self.product, like=like, steps=(*self.product.steps, *steps), **changes)
        # Hooks of the logits would not see the gradient.
        self.logits._uses.is_passed = True
        return _unmade(product)


def _reshaped(call: _LogitsCall) -> Any:
    product, meta = call.product, meta_of(call.logits)
    if any(isinstance(value, torch.dtype) for value in (*call.rest, *call.kwargs.values())):
        return None
    shown = call.on(meta)
    place = place_after_reshape(meta.shape, product.place, shown.shape)
    if place is None:
        return None
    rows = product.rows.reshape(*shown.shape[:place], product.rows.shape[product.place], *shown.shape[place + 1 :])
    try:
        meta.view(shown.shape)
    except RuntimeError:  # the reshape copies
        return call.anew(shown, rows=rows, place=place)
    return call.view(call.on(call.logits), rows, place)


def _viewed(call: _LogitsCall) -> Any:
    product, shape = call.product, call.logits.shape
    if call.name == "__getitem__" and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(call.rest)):
        return _selected(call)
    if call.name == "squeeze" and min(shape[product.place], product.rows.shape[product.place]) < 2:
        return None
    places = places_after_view(call.func, shape, product.place, *call.rest, **call.kwargs)
    if places is None:
        return None
    views, rows = call.on(call.logits), call.on(product.rows)
    if isinstance(views, Tensor):
        return call.view(views, rows, places[0])  # type: ignore[arg-type]
    return type(views)(map(call.view, views, rows, places))


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
    place = rows.dim() - (product.rows.dim() - product.place)
    shape = (*rows.shape[:place], call.logits.shape[product.place], *rows.shape[place + 1 :])
    return call.anew(torch.empty(shape, dtype=call.logits.dtype, device="meta"), rows=rows, place=place)


def _elementwise(call: _LogitsCall) -> Any:
    is_last = call.product.place == call.logits.dim() - 1
    # Other tensors may differ by class only, so that all positions share them.
    for other in (*call.rest, *call.kwargs.values()):
        is_shared = isinstance(other, Tensor) and (other.dim() == 0 or (is_last and other.dim() == 1))
        if isinstance(other, Tensor) and (other.requires_grad or not is_shared or isinstance(other, TiledLogits)):
            return None
    metas = pytree.tree_map_only(Tensor, meta_of, (call.rest, call.kwargs))
    like = call.func(meta_of(call.logits), *metas[0], **metas[1])
    if not isinstance(like, Tensor) or like.shape != call.logits.shape or not like.dtype.is_floating_point:
        return None
    # Copies: the tensors may change before the tiles are computed.
    rest, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, (call.rest, call.kwargs))
    return call.anew(like, lambda tile: call.func(tile, *rest, **kwargs))


def _cast(call: _LogitsCall) -> Any:
    logits, meta = call.logits, meta_of(call.logits)
    if "memory_format" in call.kwargs:
        return None
    if call.name == "contiguous":
        return logits if meta.is_contiguous() else call.anew(meta.contiguous())
    empty = torch.empty((0,) * logits.dim(), dtype=logits.dtype, device=logits.device)
    shown = call.on(empty)
    if shown is empty:
        return logits
    if shown.device != logits.device or not shown.dtype.is_floating_point:
        return None
    return call.anew(torch.empty_like(meta, dtype=shown.dtype), partial(Tensor.to, dtype=shown.dtype))


def _log_softmaxed(call: _LogitsCall) -> Any:
    if not call.is_along_classes():
        return None
    # Autocast may choose another type, so ask for it.
    shown = call.on(torch.empty((0,) * call.logits.dim(), dtype=call.logits.dtype, device=call.logits.device))
    like = torch.empty_like(meta_of(call.logits), dtype=shown.dtype)
    return call.anew(like, partial(F.log_softmax, dim=-1, dtype=shown.dtype))


def _best(call: _LogitsCall) -> Any:
    keepdim = call.kwargs.get("keepdim", call.rest[1] if len(call.rest) > 1 else False)
    found = best_in_tiles(call.logits, call.name) if call.is_along_classes() else None
    return None if found is None else found[1] if keepdim else found[1].squeeze(call.product.place)


def _loss(call: _LogitsCall) -> Tensor | None:
    given = class_loss_arguments(call.logits.shape, call.product.place, call.rest, call.kwargs)
    function = F.cross_entropy if call.name == "cross_entropy" else F.nll_loss
    return None if given is None else losses_in_tiles(call.logits, function, **given)


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


def best_in_tiles(logits: TiledLogits, name: str) -> tuple[Tensor, Tensor] | None:
    """Return the best logits and their classes, in a dimension of one element, computed in tiles.

    Args:
        logits: Logits without data; None if their data exist.
        name: `argmax` or `argmin`.
    """
    product = logits.tiles
    if product is None or logits._data.made is not None:
        return None
    flat, shape = product.flat, list(logits.shape)
    shape[product.place] = 1
    parts = []
    with torch.no_grad():
        gather_absent(flat.tensors)
        for rows in flat.rows.split(flat.tiling.rows):
            tile = flat.all_of(rows, flat.weight, flat.bias)
            index = getattr(torch, name)(tile, -1, keepdim=True)
            parts.append((tile.gather(-1, index), index))
    values, classes = (torch.cat(each).view(shape) for each in zip(*parts))
    return values, classes


def losses_in_tiles(
    logits: TiledLogits, function: Callable[..., Tensor], target: Tensor, **given: Any
) -> Tensor | None:
    """Compute a loss in tiles of positions; None if code asks for data or gradients of the logits.

    Args:
        logits: Logits without data.
        function: The loss of logits (n, C) and targets (n,), which takes the arguments of torch's.
        target: Class indices, (N...).
        **given: The other arguments; see `class_loss_arguments`.

    Returns:
        The loss: () for `mean` and `sum`, (N...) for `none`.
    """
    product, reduction = logits.tiles, given.pop("reduction")
    if product is None:
        return None
    logits._uses.is_passed = True
    counting = {name: given[name] for name in ("weight", "ignore_index") if name in given}
    return loss_of_product(product, target, partial(function, **given), reduction, **counting)


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
