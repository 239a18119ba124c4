"""Parameters that the user's code sees in full, although this rank holds a shard.

    weight.shape            the shape of the full tensor
    weight.mul_(0.9)        changes the shard
    weight.norm()           reduces over the ranks
    weight[3] = 0           gathers, writes, keeps the shard: exact for any function
    weight.grad             a `Piece` of the full gradient, in the memory of this rank's gradient

A hook of the user runs while the parameters have the class `ShardedParameter`. Only the class changes, not the object,
so optimizers and dicts by parameter stay valid. Each function of such a parameter is a function of its `Piece`. Outside
hooks the parameters are ordinary ones. This package and torch's optimizers see shards everywhere.

Every rank of the group must run the same code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import isfunction, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lightning_parallel.comm import Group
from lightning_parallel.compat import DIVISION
from lightning_parallel.compat.torch import (
    CALL_CODE,
    WITHOUT_VALUES,
    DisableTorchFunctionSubclass,
    base_of,
    compiler_backend,
    forward_hooks_of,
    gather_absent,
    pytree,
    uncompiled_call_of,
    unsafe_view,
)
from lightning_parallel.tensor.autograd import whole_from_group
from lightning_parallel.tensor.pieces import Piece, StandIn
from lightning_parallel.tensor.sharding import Shard

__all__ = ["CompiledLayer", "ShardPlace", "ShardedParameter", "ShardedTensor", "Slices", "local_numel"]

_PROPERTIES: Any = Tensor
_GET_GRAD = _PROPERTIES.grad.__get__
_SET_GRAD = _PROPERTIES.grad.__set__
_SET_DATA = _PROPERTIES.data.__set__
_VALUES = ("shape", "nbytes", "data", "real", "imag", "T", "mT", "H", "mH")
# Other properties are facts that hold for the shard as well.
_OF_VALUES = {getattr(_PROPERTIES, name).__get__ for name in _VALUES}
_OF_VALUES |= {_GET_GRAD, _SET_GRAD, _SET_DATA}
_OF_SHAPE = {_PROPERTIES.shape.__get__, _PROPERTIES.nbytes.__get__, _GET_GRAD, _SET_GRAD}
_FACTS = {"__hash__", "backward", "dim", "element_size", "get_device", "is_complex", "is_floating_point", "is_shared"}
# `torch.autograd.grad` must find the parameter itself in the graph; see `whole_gradients`.
_FACTS |= {"grad", "ndimension", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"}
# This code handles shards. `strategies.optimizers.norms` replaces the norms of `clip_grad`, and
# `strategies.whole.full_state` the entries of state dicts.
_HANDLE_SHARDS: tuple[str, ...] = (
    "lightning_parallel.",
    "torch.optim.",
    "torch.nn.utils.clip_grad",
    "torch.amp.",
    "torch.cuda.amp.",
    "torch.nn.modules.module",
    # Autograd restores what these modules have packed, and computes with shards.
    "torch.utils.checkpoint",
    "torch.autograd.graph",
)
# The modules of `torch.compiler.disable` and of `give_data` add frames as well.
_BETWEEN = {"torch._dynamo.eval_frame", "lightning_parallel.compat.torch"}


@dataclass(frozen=True)
class Slices:
    """How a tensor is cut into slices over the replicas (ZeRO): a slice is a run of its elements.

    Attributes:
        rule: The elements of each replica.
        group: The replicas.
        shape: The shape of the tensor.
        whole: The data of the tensor, if this rank has them; the slice is a view of them.
    """

    rule: Shard
    group: Group
    shape: torch.Size
    whole: Tensor | None = None


@dataclass(frozen=True)
class ShardPlace:
    """Where this rank's part lies in a full tensor.

    Attributes:
        rule: How the tensor is sharded; None if this rank has all of it but for slices.
        group: The group over which it is sharded.
        slices: How the shard is cut into slices.
        users: In a step, the modules that compute with the shard, by `id`; None in a hook.
        is_partial: Whether its users compute for a part of the gradient, which a later reduction sums over the group.
    """

    rule: Shard | None
    group: Group
    slices: Slices | None = None
    users: frozenset[int] | None = None
    is_partial: bool = False

    def piece(self, part: Tensor, full: Tensor | None = None) -> Tensor:
        """Return the full tensor; functions that change it in place change the part.

        Args:
            part: This rank's part.
            full: The data of the full tensor, if the ranks have gathered them already.
        """
        sliced = self.slices
        if sliced is not None and not sliced.shape:
            # A tensor without dimensions, which other ranks lack.
            data = sliced.whole if full is None else full
            data = None if data is None else data.reshape(1)
            return Piece.in_memory(part.view(-1), sliced.rule, sliced.group, data).view(())
        # A state dict is made, with the full data, while the shard has all its elements.
        if sliced is not None and (full is None or part.shape != sliced.shape):
            if part.requires_grad and torch.is_grad_enabled():
                part = _SliceInGraph.apply(part)
            whole = None if sliced.whole is None or full is not None else sliced.whole.reshape(-1)
            part = Piece.in_memory(part.view(-1), sliced.rule, sliced.group, whole).view(sliced.shape)
        if self.is_partial and self.rule is None and torch.is_grad_enabled() and part.requires_grad:
            # The code computes for the full gradient on each rank, and the later sum must count it once.
            return whole_from_group(part, self.group)
        return part if self.rule is None else Piece.in_memory(part, self.rule, self.group, full)

    def of_gradient(self) -> ShardPlace:
        """Return the place of the gradient, whose full data this rank lacks."""
        slices = None if self.slices is None else replace(self.slices, whole=None)
        return replace(self, slices=slices, is_partial=False)

    def cut(self, value: Any) -> Any:
        """Return this rank's part of a full tensor; return any other value unchanged."""
        if isinstance(value, ShardedTensor):
            value = value.piece()
        if isinstance(value, Piece):
            own = None if self.rule is None or self.slices is not None else value.part_by(self.rule, self.group)
            if own is not None:
                return own
            value = value.whole()
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        if self.rule is not None and value.dim() and value.shape[self.rule.dim] == self.rule.full_size:
            value = self.rule.split(value, self.group.rank)
        if self.slices is not None and value.shape == self.slices.shape:
            value = self.slices.rule.split(value.reshape(-1), self.slices.group.rank)
            # A rank without the element of a tensor without dimensions has an empty tensor.
            first = [-1] if self.slices.shape or not value.numel() else []
            value = value.view(first + [1] * (len(self.slices.shape) - 1))
        return value


class _SliceInGraph(Function):
    """The slice of a parameter -> the same, without gradients: autograd expects gradients of the whole parameter."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            "Code must not differentiate with respect to a parameter of which each replica holds a slice: before the"
            " optimizer's step with `zero_stage=2`, or in a hook with `zero_stage=3`. Add the term to the loss in"
            " `training_step`, or use `zero_stage=1`"
        )


class ShardedTensor(StandIn):
    """Class of a shard while the user's code sees the full tensor.

    Attributes:
        place: Where the shard lies in the full tensor.
        before_gradient: Called before code reads the gradient.
    """

    place: ShardPlace
    before_gradient: Callable[[], None] | None

    @staticmethod
    def show(shard: Tensor, place: ShardPlace, before_gradient: Callable[[], None] | None = None) -> None:
        """Let `shard` read as the full tensor.

        Args:
            shard: This rank's part.
            place: Where the shard lies in the full tensor.
            before_gradient: Called before code reads a gradient that this rank lacks.
        """
        kind = ShardedParameter if isinstance(shard, nn.Parameter) else ShardedTensor
        shard.__class__ = kind
        vars(shard).update(place=place, before_gradient=before_gradient)

    @staticmethod
    def hide(shard: Tensor) -> None:
        """Let a tensor that `show` has changed read as the shard again."""
        for name in ("place", "before_gradient"):
            del vars(shard)[name]
        shard.__class__ = nn.Parameter if type(shard) is ShardedParameter else Tensor

    def piece(self, full: Tensor | None = None) -> Tensor:
        """Return the full tensor; functions that change it in place change this shard.

        Args:
            full: The data of the full tensor, if the ranks have gathered them already.
        """
        with DisableTorchFunctionSubclass():
            own = self.as_subclass(Tensor) if full is None else self.detach().as_subclass(Tensor)
            return self.place.piece(own, full)

    def whole(self) -> Tensor:
        """Return an ordinary full tensor, a part of autograd's graph; every rank of the group must call it."""
        gather_absent(self)
        piece = self.piece()
        return piece.whole() if isinstance(piece, Piece) else piece

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            gather_absent(self)
            with DisableTorchFunctionSubclass():
                copied: Any = self.detach().as_subclass(Tensor).clone()
                if isinstance(self, nn.Parameter):
                    copied = nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
            ShardedTensor.show(copied, self.place, self.before_gradient)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = self.whole().detach()
        if isinstance(self, nn.Parameter):
            whole = nn.Parameter(whole, self.requires_grad)
        return whole.__reduce_ex__(protocol)

    @classmethod
    @torch.compiler.disable  # compiled code leaves its graph where it meets a parameter in full
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_property = name in ("__get__", "__set__", "__delete__")
        is_fact = name in _FACTS or (is_property and func not in _OF_VALUES)
        if not is_fact and name not in WITHOUT_VALUES and func not in _OF_SHAPE:
            gather_absent((args, kwargs))
        if is_fact or _is_code_for_shards(caller := _caller(sys._getframe(1))) or _is_compiled(caller):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _is_in_user(caller, args, kwargs):
            return _on_shards(func, types, args, kwargs)
        if name == "data_ptr":
            # Code compares addresses to find tied parameters. This rank may hold no element.
            with DisableTorchFunctionSubclass():
                return func(*args) or id(args[0])
        if func == _GET_GRAD:
            return _gradient(args[0])
        if name in ("__repr__", "__format__"):
            full = args[0].whole().detach().requires_grad_(args[0].requires_grad)
            return func(nn.Parameter(full, full.requires_grad) if cls is ShardedParameter else full, *args[1:])
        if name == "__set__":
            return _set(func, *args)
        is_change = name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and _is_method(func))
        if is_change and torch.is_grad_enabled() and args[0].requires_grad:
            # The piece is no leaf, so torch might allow it.
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        pieces: dict[int, Tensor] = {}
        given: dict[int, ShardedTensor] = {}

        def as_piece(leaf: Any) -> Any:
            if not isinstance(leaf, ShardedTensor):
                return leaf
            if id(leaf) not in pieces:
                piece = pieces[id(leaf)] = leaf.piece()
                given[id(piece)] = leaf
            return pieces[id(leaf)]

        args, kwargs = pytree.tree_map(as_piece, (args, kwargs))
        result = func(*args, **kwargs)
        # A function in place returns the tensor that it has changed.
        return pytree.tree_map(lambda leaf: given.get(id(leaf), leaf), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Never called, since only the class of the tensor has changed. Because of this method, `torch.compile` leaves
        # its graph here, instead of a guard on the sizes, which it reads in C++.
        return func(*args, **(kwargs or {}))


class ShardedParameter(ShardedTensor, nn.Parameter):
    """Class of a sharded parameter while the user's code sees it in full."""


@contextmanager
def _shards_in(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Let parameters be ordinary ones with this rank's shards inside the block, in which compiled code reads them."""
    gather_absent(list(parameters))
    shown: list[tuple[Any, ShardPlace, Callable[[], None] | None]] = [
        (parameter, vars(parameter).pop("place"), vars(parameter).pop("before_gradient"))
        for parameter in parameters
        if type(parameter) is ShardedParameter
    ]
    for parameter, *_ in shown:
        parameter.__class__ = nn.Parameter
    try:
        yield
    finally:
        for parameter, place, before in shown:
            ShardedTensor.show(parameter, place, before)


def _for_graph(tensor: Tensor) -> Tensor:
    """Return a tensor that is no piece, and no view of a piece: the compiler reads the base of a view."""
    whole = tensor.whole() if isinstance(tensor, Piece) else tensor
    return unsafe_view(whole, whole.shape) if type(base_of(whole)) is Piece else whole


class CompiledLayer:
    """Stands in a layer's `CALLS`: compiles the layer, and runs it with ordinary parameters.

    In a step, parameters read as full ones. Their class would end the graph at each layer.

    Args:
        layer: The layer.
        device: Where it computes.
    """

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self.parameters = list(layer.parameters())
        self._uncompiled = uncompiled_call_of(layer)
        self._run = torch.compile(self._uncompiled, backend=compiler_backend(device))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(type(leaf) is not Tensor or type(base_of(leaf)) is Piece for leaf in given):
            args, kwargs = pytree.tree_map_only(Tensor, _for_graph, (args, kwargs))
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(type(leaf) not in (Tensor, nn.Parameter) for leaf in given):
            return self._uncompiled(*args, **kwargs)  # a run that sees shapes only
        with _shards_in(self.parameters):
            return self._run(*args, **kwargs)

    # As for `AroundCalls`: a copy would call the original layer.
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _is_method(func: Callable[..., Any]) -> bool:
    # The functions of `nn.init` have such names, too, and disable gradients by themselves.
    return getattr(Tensor, getattr(func, "__name__", ""), None) is not None and not isfunction(func)


def _caller(frame: Any) -> Any:
    """Return the frame of the code that calls a function, given the frame that calls its implementation."""
    # A mode that watches functions adds its own frame before the caller's.
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_globals.get("__name__") in _BETWEEN
    ):
        frame = frame.f_back
    return frame


def _is_code_for_shards(frame: Any) -> bool:
    """Return whether code handles shards: this package, or an optimizer of torch."""
    return frame is None or frame.f_globals.get("__name__", "").startswith(_HANDLE_SHARDS)


def _is_compiled(frame: Any) -> bool:
    """Return whether the code of a graph runs: `CompiledLayer` compiles layers with shards, and backward reads them."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch._functorch._aot_autograd."):
            return True
        # The code of a graph has no name of a module, or one of these.
        if name not in ("", "torch._ops") and not name.startswith(("torch._inductor.", "torch._dynamo.")):
            return False
        frame = frame.f_back
    return False


def _is_in_user(frame: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a module runs that computes with the shard among the arguments."""
    shard = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedTensor))
    users = vars(shard)["place"].users
    codes: set[Any] = set()
    while frame is not None and frame.f_code.co_name not in ("run_watched", "run_in_step"):
        if frame.f_code is CALL_CODE and isinstance(module := frame.f_locals.get("self"), nn.Module):
            # A module inside the layer may compute with a shard that the layer gives to it. The user's own forward,
            # too, gets the shards of a layer with parameters of its heads.
            is_user = DIVISION in vars(module) if users is None else id(module) in users
            if is_user or users is None:
                return is_user and not _runs_hook(module, codes)
            codes.clear()
        codes.add(frame.f_code)
        frame = frame.f_back
    return False


def _runs_hook(module: nn.Module, codes: set[Any]) -> bool:
    """Return whether a forward hook of a module runs, given the code of the frames since its call."""
    hooks = [hook for found in forward_hooks_of(module) for hook in found.values()]
    return any(getattr(hook, "__code__", None) in codes for hook in map(_function_of, hooks))


def _function_of(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    # A wrapper, as of `torch.compiler.disable`, has the code of all such wrappers.
    return unwrap(hook) if hasattr(hook, "__code__") else type(hook).__call__


def _on_shards(func: Callable[..., Any], types: Iterable[type], args: Any, kwargs: Any) -> Any:
    """Return the result of a function in a module that computes with shards."""
    if not any(issubclass(kind, Piece) for kind in types):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def shard(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor):
            return leaf
        with DisableTorchFunctionSubclass():
            return leaf.as_subclass(Tensor)

    # Activations that are pieces have rules, too, which the block above would turn off.
    return func(*pytree.tree_map(shard, args), **pytree.tree_map(shard, kwargs))


def local_numel(tensor: Tensor) -> int:
    """Return the number of elements of this rank."""
    # Parameters of other stages would answer for their placeholders, even to this module.
    with DisableTorchFunctionSubclass():
        return tensor.numel()


def _gradient(shard: ShardedTensor) -> Tensor | None:
    if shard.before_gradient is not None:
        shard.before_gradient()
    with DisableTorchFunctionSubclass():
        gradient = shard.grad
        is_shard = gradient is not None and gradient.shape == shard.shape
    if gradient is None or not is_shard or isinstance(gradient, (Piece, ShardedTensor)):
        return gradient
    full = shard.place.of_gradient().piece(gradient)
    if isinstance(full, Piece):
        full.held = gradient
    return full


def _set(func: Callable[..., Any], shard: ShardedTensor, value: Any) -> None:
    if func == _SET_DATA and shard.place.slices is not None:
        # A slice is a view of the full data, which the optimizer's step gathers again.
        with torch.no_grad():
            shard.piece().copy_(value)
        return
    own = shard.place.cut(value)
    with DisableTorchFunctionSubclass():
        func(shard, own)
