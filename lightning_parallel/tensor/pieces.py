"""Tensors of which this rank holds a part: a `Piece` has the sizes of the full tensor and the data of one rank.

Three kinds of tensors are pieces: logits, sharded by class; hidden states between blocks, sharded along the sequence;
and the inputs of attention or an MLP in a sequence region. A function of a piece goes one of two ways:

    on the part       it has a rule in the table below, and the rule applies to the arguments; no data are gathered
    on all of it      any other function: the parts are gathered, once, and the result is an ordinary tensor

For autograd a piece is the output of a gather whose data are made at the first read. Gradients of the full tensor go
back to the part as its slice, and gradients of the part go back directly. Either every rank of the group reads, or
none does: see `strategies.ranks.order` for the alternative.

A `NarrowInput` is the opposite: it has full values, and the features of this rank's heads in its sizes.

Legend: n extent of the sharded dimension, n_r its extent on rank r.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.comm.kept import kept, running_results
from lightning_parallel.compat import innermost_users_line, is_users_object
from lightning_parallel.compat.lightning import tell
from lightning_parallel.compat.torch import (
    DisableTorchFunctionSubclass,
    gathers_first,
    make_wrapper_subclass,
    pytree,
    schema_of,
    version_of,
)
from lightning_parallel.tensor.autograd import copy_to_group, gather_from_group, scatter_to_group
from lightning_parallel.tensor.linear import SequenceLengths
from lightning_parallel.tensor.loss import cross_entropy, nll_loss
from lightning_parallel.tensor.sharding import Shard

__all__ = [
    "GATHERS",
    "NarrowInput",
    "Piece",
    "StandIn",
    "gather_attributes",
    "has_pieces",
    "part_along",
    "part_of",
    "positions_of",
    "whole_input",
    "whole_of",
    "without_pieces",
]

# How often each line of the user's code had all of a piece gathered.
GATHERS: Counter[str] = Counter()

# The bytes that each line has gathered, and how often it has gathered the same part, by address; None if told.
_GATHERED: dict[str, tuple[int, Counter[int]] | None] = {}
_OFTEN = 10
_LARGE = 1 << 26  # bytes of full tensors

_aten = torch.ops.aten

# Views of data that are not made yet stay unmade as well.
_UNREAD = {
    *(_aten.view.default, _aten.slice.Tensor, _aten.select.int),
    *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.t.default),
    *(_aten.transpose.int, _aten.permute.default, _aten.detach.default),
    *(_aten.unbind.int, _aten.split.Tensor, _aten.split_with_sizes.default),
}
# These functions read the address of the data in C++, or copy the Python object.
_NEEDS_ADDRESS = {"numpy", "__array__", "tolist", "__dlpack__", "data_ptr", "storage", "untyped_storage", "is_set_to"}
_NEEDS_ADDRESS |= {"__reduce_ex__", "__deepcopy__", "__repr__", "__format__", "share_memory_"}
_NEEDS_ADDRESS |= {"apply_", "map_", "map2_"}
# These functions ask for the gradient of the full tensor.
_GRADIENT = {"retain_grad", "register_hook"}
# These functions make a tensor with other values.
_FACTORIES = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "zeros_like", "ones_like", "empty_like"}
_FACTORIES |= {"full_like"}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_MOST_NODES = 64
_STRIDE = 1_000_003  # marks the sharded dimension, to find it again after a view


@dataclass(eq=False)
class _Family:
    """The facts that all forms of the same piece share.

    Attributes:
        extents: The extent of the sharded dimension on each rank.
        group: The group over which it is sharded.
        packing: Where the parts lie in the full tensor; None if they follow each other in the order of the ranks.
        in_region: Whether parameters get partial gradients from the part, which a later reduction sums over the ranks.
        is_rounded: Whether the part lost digits of double precision.
        is_used: Whether a result with a gradient was computed from the part.
        is_watched: Whether code asked for the gradient of the full tensor, which lacks gradients from the part.
    """

    extents: tuple[int, ...]
    group: Group
    packing: Shard | None = None
    in_region: bool = False
    is_rounded: bool = False
    is_used: bool = False
    is_watched: bool = False

    @classmethod
    def of(cls, rule: Shard, group: Group) -> _Family:
        """Return the facts of a tensor that is sharded by a rule."""
        return cls(rule.sizes, group, None if rule.consecutive else rule)

    def is_like(self, other: _Family) -> bool:
        """Return whether parts of both lie at the same places."""
        return self.extents == other.extents and self.packing == other.packing and self.group.ranks == other.group.ranks

    @property
    def extent(self) -> int:
        """The extent of the sharded dimension of the full tensor."""
        return sum(self.extents) if self.packing is None else self.packing.full_size

    def cut(self, full: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a full tensor, in autograd's graph."""
        if self.packing is None:
            return scatter_to_group(full, self.group, dim, self.extents)
        return self.packing.along(dim).split(copy_to_group(full, self.group), self.group.rank)

    def cut_gradient(self, full: Tensor, dim: int) -> Tensor:
        """Return the gradient of this rank's part, given the gradient of the full tensor, equal on all ranks."""
        if self.packing is None:
            return part_along(full, self.group, dim, self.extents)
        full = copy_to_group(full.whole() if isinstance(full, Piece) else full, self.group)
        own = self.packing.along(dim).split(full, self.group.rank)
        # `join` takes an element that several ranks hold from the first of them.
        return self.packing.along(dim).only_owned(own, self.group.rank)

    def join(self, part: Tensor, dim: int) -> Tensor:
        """Return the full tensor, in autograd's graph; every rank of the group must call it."""
        full = gather_from_group(part, self.group, dim, self.extents)
        return full if self.packing is None else self._packed(full, dim)

    def join_data(self, part: Tensor, dim: int) -> Tensor:
        """Return the full tensor outside autograd's graph; every rank of the group must call it."""
        # The state of an optimizer may be in host memory, and a group may communicate tensors of devices only.
        sent = part.to(self.group.host_device) if part.device.type == "cpu" else part
        full = comm.all_gather(sent, self.group, dim, self.extents).contiguous().to(part.device)
        return full if self.packing is None else self._packed(full, dim)

    def _packed(self, full: Tensor, dim: int) -> Tensor:
        assert self.packing is not None
        return self.packing.along(dim).merge(full.split(self.extents, dim))


class _Data:
    """The data of a full tensor, made at the first read.

    Args:
        make: Makes the data.
        base: The data of which these data are a view.
        home: This rank's part, in memory that a parameter or a gradient uses too; changes of the data go there.
        cut: Returns this rank's part of the data, given a home.
    """

    def __init__(
        self,
        make: Callable[[], Tensor],
        base: _Data | None = None,
        home: Tensor | None = None,
        cut: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._make: Callable[[], Tensor] | None = make
        self.made: Tensor | None = None
        self.home = home
        self._cut = cut
        # The home of the base may change later, and then the view is made again.
        self._base = base if base is not None and base.has_home else None
        self._seen: Any = None

    @property
    def memory(self) -> Tensor:
        """The memory of the home, which is itself a piece if slices of a shard are over other ranks."""
        if self._base is not None:
            return self._base.memory
        assert self.home is not None
        return self.home._data.memory if isinstance(self.home, Piece) else self.home

    @property
    def has_home(self) -> bool:
        return self.home is not None or self._base is not None

    def get(self) -> Tensor:
        if not self.has_home:
            if self.made is None:
                self.made = self._new()
                # The function refers to the part, and would keep its memory.
                self._make = None
            return self.made
        seen = self._base.get() if self._base is not None else _changes_of(self.memory)
        if self.made is None or (seen is not self._seen and (self._base is not None or seen != self._seen)):
            self.made = self._new()
            self._seen = seen
        return self.made

    def take(self, made: Tensor) -> None:
        """Use data that were made already."""
        self.made, self._seen = made, _changes_of(self.memory)

    def _new(self) -> Tensor:
        assert self._make is not None
        with torch.no_grad():
            return self._make()

    def write_home(self) -> None:
        """Write changed data into the memory from which they came."""
        if self._base is not None:
            self._base.write_home()
        elif self.home is not None:
            assert self._cut is not None
            assert self.made is not None
            with torch.no_grad():
                self.home.copy_(self._cut(self.made))
            if not self.memory.is_inference():
                # Below autograd, where this runs, no operator counts the change.
                torch.autograd.graph.increment_version(self.memory)
            self._seen = _changes_of(self.memory)


def _changes_of(memory: Tensor) -> Any:
    """Return a value that changes when the memory does; tensors of inference mode count no changes."""
    return object() if memory.is_inference() else version_of(memory)


class Piece(Tensor):
    """A full tensor of which this rank holds a part until code reads all of it; see this module.

    Attributes:
        place: The sharded dimension; -1 if the tensor has no part any more.
        family: The facts that all forms of the same piece share.
        held: The gradient of a parameter that this piece shows in full.
    """

    place: int
    family: _Family
    held: Tensor | None = None
    _part: Tensor | None
    _data: _Data
    _unchanged: int
    _is_alias: bool

    @staticmethod
    def of(part: Tensor, group: Group, place: int, extents: Sequence[int], in_region: bool = False) -> Piece:
        """Return the full tensor, given the part of this rank.

        Args:
            part: (..., n_r, ...), in autograd's graph.
            group: The group over which the tensor is sharded.
            place: The sharded dimension.
            extents: The extent of each rank's part in that dimension.
            in_region: Whether parameters get partial gradients from the part, which a later reduction sums.
        """
        return _wrapped(part, place % part.dim(), _Family(tuple(extents), group, in_region=in_region))

    @staticmethod
    def by_rule(part: Tensor, rule: Shard, group: Group) -> Piece:
        """Return the full tensor, given the part of this rank and the rule by which it was cut."""
        return _wrapped(part, rule.dim % part.dim(), _Family.of(rule, group))

    @staticmethod
    def in_memory(part: Tensor, rule: Shard, group: Group, full: Tensor | None = None) -> Piece:
        """Return the full tensor, given this rank's part; functions that change it in place change the part.

        Args:
            part: A parameter, its gradient, or another tensor whose memory other code uses too.
            rule: How the tensor is sharded.
            group: The group over which it is sharded.
            full: The data of the full tensor, if the ranks have gathered them already.
        """
        home = part.detach() if part.requires_grad else part
        piece = _wrapped(part, rule.dim % part.dim(), _Family.of(rule, group), home=home)
        if full is not None:
            piece._data.take(full)
        return piece

    @property
    def home(self) -> Tensor | None:
        """The part in memory that other code uses too, if this piece is all of the tensor there."""
        return self._data.home

    @property
    def rule(self) -> Shard:
        """The rule by which the full tensor is cut."""
        packing = self.family.packing
        return Shard.of_sizes(self.family.extents, self.place) if packing is None else packing.along(self.place)

    def part_by(self, rule: Shard, group: Group) -> Tensor | None:
        """Return the data of this rank outside autograd's graph; None if they are not cut by this rule."""
        own = self.valid_part
        if own is None or self.place != rule.dim % self.dim() or not self.family.is_like(_Family.of(rule, group)):
            return None
        return own.detach() if self.home is None else self.home

    @property
    def part(self) -> Tensor:
        """The data of this rank, in autograd's graph; cut from the full tensor if that was changed."""
        family = self.family
        with DisableTorchFunctionSubclass():
            own = self._unchanged_part()
            if own is None:
                return family.cut(_aten.alias.default(self), self.place)
            # From here on, a gradient hook of the full tensor would miss the gradient of this part; see `_watch`.
            family.is_used = True
            return _PartOfWhole.apply(self) if self._is_apart(own) else own

    @property
    def valid_part(self) -> Tensor | None:
        """The data of this rank; None if the full tensor was changed in place, watched, or put into another graph."""
        with DisableTorchFunctionSubclass():
            own = self._unchanged_part()
            return None if own is None or self._is_apart(own) else own

    @property
    def is_elsewhere(self) -> bool:
        """Whether this rank has no element of the tensor."""
        return self.family.extents[self.family.group.rank] == 0

    def whole(self) -> Tensor:
        """Return an ordinary tensor, a part of autograd's graph; every rank of the group must call it."""
        with DisableTorchFunctionSubclass():
            # `alias` is not among `_UNREAD`: its dispatch reads the data, and autograd sees a node for it.
            return _aten.alias.default(self)

    def data_for(self, tensor: Tensor) -> Tensor:
        """Return the value that `tensor.data = self` sets; every rank of the group must call it."""
        return self if isinstance(tensor, StandIn) else self.whole()

    def has_rows_in(self, other: Tensor) -> bool:
        """Return whether a full tensor, which broadcasts with this one, has a row for each index of the dimension."""
        from_the_end = self.dim() - self.place
        return other.dim() >= from_the_end and other.shape[-from_the_end] != 1

    def _keep(self, part: Tensor, place: int, is_alias: bool) -> Piece:
        self._part = part
        self.place = place
        self._is_alias = is_alias
        # An in-place change of the full tensor raises its version, and the part lacks that change.
        self._unchanged = _version(self)
        return self

    def _may_change(self) -> bool:
        """Return whether the part may change in place: views of the full tensor and made data would not follow."""
        is_made = self._data.made is not None and self._data.home is None
        return not (self._is_alias or is_made or (self.requires_grad and self.is_leaf))

    def _unchanged_part(self) -> Tensor | None:
        return None if self.family.is_watched or _version(self) != self._unchanged else self._part

    def _is_apart(self, part: Tensor) -> bool:
        # By `detach().requires_grad_()`, or as the output of a function that ran without gradients.
        return self.requires_grad and not part.requires_grad

    @classmethod
    @torch.compiler.disable  # compiled code leaves its graph where it meets a piece
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if issubclass(kind, StandIn) or gathers_first(kind):
                return NotImplemented  # its functions compute on the tensor behind it, which may be a piece
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            return iter(args[0].unbind())
        if name == "equal":
            # Lightning compares all pairs of parameters so.
            return args[0] is args[1] or (args[0].shape == args[1].shape and bool((args[0] == args[1]).all()))
        with DisableTorchFunctionSubclass():
            is_data = name == "__get__" and func == _DATA
            if (is_data or name == "detach") and args[0].home is not None:
                return _wrapped(args[0].home, args[0].place, args[0].family, home=args[0].home)
            if is_data and args[0]._data.has_home:
                return args[0].detach()
            if is_data or name in _NEEDS_ADDRESS:
                found = func(*without_pieces(args), **kwargs)
                if isinstance(found, np.ndarray) and args[0]._data.has_home:
                    found.flags.writeable = False  # a change would not reach the part
                return found
            if name in _GRADIENT:
                _watch(args[0])
            elif name.endswith("_like") and name in _FACTORIES and args[0].home is not None:
                # Such as the state of an optimizer, which follows its parameter.
                return _wrapped(func(args[0].home, *args[1:], **kwargs), args[0].place, args[0].family)
            elif name in _FACTORIES and isinstance(args[0], Piece):
                args = (torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape), *args[1:])
            elif name == "__get__" and func in _PROPERTIES:
                name = "transpose"
            found = _on_parts(func, name, args, kwargs)
            if found is not None:
                return found
            result = func(*args, **kwargs)
            if isinstance(result, (bool, int, torch.Size)):
                return result
            # A view that lost the part has nothing to compute on, so it becomes an ordinary tensor.
            return pytree.tree_map_only(Piece, _whole_without_part, result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A view needs no data, so it must not cause the gather.
        is_view = func.is_view and func is not _aten.alias.default and isinstance(args[0], Piece)
        if func in _UNREAD or (is_view and args[0]._data.has_home):
            return _unread(func, args[0], args[1:], kwargs)
        if torch.Tag.inplace_view in func.tags or func.overloadpacket is _aten.set_:
            raise RuntimeError(
                "Logits, parameters or hidden states that are sharded over the tensor-parallel ranks must keep their"
                f" shape; got an in-place change by `{func}`. Use the form that makes a new tensor"
            )
        read: dict[int, Piece] = {}

        def read_whole(value: Any) -> Any:
            if not isinstance(value, Piece):
                return value
            whole = value._data.get()
            read[id(whole)] = value
            return whole

        result = func(*pytree.tree_map(read_whole, args), **pytree.tree_map(read_whole, kwargs))
        if read and schema_of(func).is_mutable:
            for piece in read.values():
                piece._data.write_home()
        # An in-place operator returns the tensor that it changed, so return the piece instead of its data.
        return pytree.tree_map(lambda value: read.get(id(value), value), result)


def _version(piece: Piece) -> int:
    # Tensors of inference mode count no changes.
    return 0 if piece.is_inference() else version_of(piece)


def _empty(shape: Sequence[int], strides: Sequence[int] | None, like: Tensor, data: _Data, family: _Family) -> Piece:
    piece = make_wrapper_subclass(Piece, shape, strides=strides, dtype=like.dtype, device=like.device)
    piece.place = -1
    piece.family = family
    piece._part = None
    piece._data = data
    piece._unchanged = 0
    piece._is_alias = True
    return piece


def _unread(func: Any, piece: Piece, rest: tuple[Any, ...], kwargs: Any) -> Any:
    """Return the result of a view of the data, or a list of results, computed at the first read."""
    metas = func(_meta(piece), *rest, **kwargs)
    data = piece._data

    def view(meta: Tensor, choose: Callable[[Any], Tensor]) -> Piece:
        made = _Data(lambda: choose(func(data.get(), *rest, **kwargs)), data)
        return _empty(meta.shape, meta.stride(), piece, made, piece.family)

    if isinstance(metas, Tensor):
        return view(metas, lambda result: result)
    return [view(meta, itemgetter(at)) for at, meta in enumerate(metas)]


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _wrapped(part: Tensor, place: int, family: _Family, is_alias: bool = False, home: Tensor | None = None) -> Piece:
    needs_graph = part.requires_grad and torch.is_grad_enabled()
    make = _WholeOfPart.apply if needs_graph else _without_graph
    piece = make(part, place, family, home)
    # Outside the guard, the question for the version would go through `Piece.__torch_function__`.
    with DisableTorchFunctionSubclass():
        return piece._keep(part, place, is_alias)


def _without_graph(part: Tensor, place: int, family: _Family, home: Tensor | None = None) -> Piece:
    shape = list(part.shape)
    shape[place] = family.extent
    # Detached: autograd knows the gather as `_WholeOfPart`, and the data are made outside its graph.
    own = part.detach()
    # A layer that runs again finds the data of its inputs in their pieces. It makes only its own pieces anew.
    inside = running_results()

    def make() -> Tensor:
        is_own = inside is not None and inside is running_results()
        return kept(partial(_gather, own, place, family)) if is_own else _gather(own, place, family)

    data = _Data(make, None, home, lambda full: family.cut(full, place))
    return _empty(shape, None, part, data, family)


def _gather(part: Tensor, place: int, family: _Family) -> Tensor:
    if line := innermost_users_line():
        GATHERS[line] += 1
        _tell_of_gathers(line, part, place, family)
    return family.join_data(part.whole() if isinstance(part, Piece) else part, place)


def _tell_of_gathers(line: str, part: Tensor, place: int, family: _Family) -> None:
    """Tell once of a line that gathers the same tensors again and again, and many bytes, unlike a hook of an epoch."""
    bytes_before, times = _GATHERED.setdefault(line, (0, Counter())) or (0, None)
    if times is None:
        return
    sizes = list(part.shape)
    sizes[place] = family.extent
    total = bytes_before + math.prod(sizes) * part.element_size()
    address = 0 if isinstance(part, Piece) else part.data_ptr()
    times[address] += 1
    is_told = times[address] >= _OFTEN and total >= _LARGE
    _GATHERED[line] = None if is_told else (total, times)
    if is_told:
        tell(
            f"{line} gathers sharded tensors in many steps: {total / 1e6:.0f} MB in {GATHERS[line]} reads so far."
            " Elementwise functions, sums, norms and extremes need no gather"
        )


class _WholeOfPart(Function):
    """The part of this rank -> the full tensor, whose data are not made yet."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, place: int, family: _Family, home: Tensor | None) -> Tensor:
        ctx.family, ctx.place = family, place
        return _without_graph(part, place, family, home)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # All ranks computed the same from the full tensor, so `grad` is the full gradient on each of them.
        return ctx.family.cut_gradient(grad, ctx.place), None, None, None


class _PartOfWhole(Function):
    """The full tensor -> a part in another graph, as of a block that reentrant checkpointing runs."""

    @staticmethod
    def forward(ctx: Any, whole: Piece) -> Tensor:
        assert whole._part is not None
        ctx.family, ctx.place = whole.family, whole.place
        return whole._part.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.family.join(grad, ctx.place)


class _Changed(Function):
    """The full tensor -> the same object, made from a part that has changed in place."""

    @staticmethod
    def forward(ctx: Any, whole: Piece, part: Tensor) -> Tensor:
        ctx.family, ctx.place = whole.family, whole.place
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # The earlier graph of the full tensor belongs to the part as it was before; the part knows that graph.
        return None, ctx.family.cut_gradient(grad, ctx.place)


def _watch(piece: Piece) -> None:
    """Compute on the full tensor from now on.

    Raises:
        RuntimeError: If a result was already computed from the part.
    """
    if piece.family.is_used:
        raise RuntimeError(
            "`retain_grad` and `register_hook` of sharded logits must come before the loss; got a call after it. The"
            " loss was computed from this rank's classes only. Call `retain_grad` or `register_hook` before the loss"
            " (on the output of a block: before the next block)"
        )
    piece.family.is_watched = True


def part_along(hidden: Tensor, group: Group, dim: int, extents: Sequence[int]) -> Tensor:
    """Return this rank's part of a full tensor along `dim`, without communication if it is a `Piece` along `dim`."""
    if not isinstance(hidden, Piece):
        return scatter_to_group(hidden, group, dim, extents)
    family = hidden.family
    is_cut_so = hidden.place == dim and family.extents == tuple(extents) and family.packing is None
    return hidden.part if is_cut_so else scatter_to_group(hidden.whole(), group, dim, extents)


def part_of(full: Tensor, rule: Shard, group: Group) -> Tensor:
    """Return this rank's part of a full tensor, in autograd's graph, without communication if a `Piece` is cut so."""
    family, dim = _Family.of(rule, group), rule.dim % full.dim()
    if not isinstance(full, Piece):
        return family.cut(full, dim)
    return full.part if full.place == dim and full.family.is_like(family) else family.cut(full.whole(), dim)


@torch.compiler.disable
def positions_of(part: Tensor, lengths: SequenceLengths) -> Tensor:
    """Return the full tensor, given the positions of this rank; see `whole_of`."""
    return whole_of(part, lengths.group, *lengths.of_piece(part), in_region=True)


def whole_of(part: Tensor, group: Group, place: int, extents: Sequence[int], in_region: bool = False) -> Tensor:
    """Return a `Piece`; gather a tensor without data, which only shows shapes. See `Piece.of`."""
    if type(part) not in (Tensor, nn.Parameter):
        return gather_from_group(part, group, place, extents)
    return Piece.of(part, group, place, extents, in_region)


# --------------------------------------------------------------------------------------------------------- the rules


@dataclass
class _FunctionCall:
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
    family: _Family
    changes: bool

    @property
    def part(self) -> Tensor:
        return self.parts[id(self.piece)]

    def on_part(self) -> Any:
        return self.func(self.part, *self.args[1:], **self.kwargs)

    def again(self, part: Tensor, place: int | None = None) -> Piece:
        """Return a result of the part as a piece."""
        return _wrapped(part, self.piece.place if place is None else place, self.family)

    def argument(self, name: str, at: int, default: Any = None) -> Any:
        return self.kwargs.get(name, self.args[at] if len(self.args) > at else default)

    def dims(self, at: int) -> tuple[int, ...]:
        """Return the dimensions over which the function computes: by default all, which includes the sharded one."""
        dim, count = self.argument("dim", at), self.piece.dim()
        if isinstance(dim, int) and not isinstance(dim, bool):
            return (dim % count,)
        is_given = isinstance(dim, (tuple, list)) and len(dim) > 0
        return tuple(each % count for each in dim) if is_given else tuple(range(count))

    def operand(self, value: Any) -> Any:
        """Return an argument that all rows of the full tensor share, for a computation on this rank's rows."""
        if self.family.in_region or not isinstance(value, Tensor) or not value.requires_grad:
            return value
        # Each rank uses it for a part of the result, so each has a part of its gradient.
        return copy_to_group(value, self.family.group)


def _on_parts(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `func`, computed on the parts; None if no rule of the table applies."""
    changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    base = name if not changes else f"__{name[3:]}" if name in _IN_PLACE else name[:-1]
    rule = RULES.get(base)
    if rule is None or "out" in kwargs:
        return None
    if not args and "input" in kwargs and rule is not _pointwise:
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    leaves: Sequence[Any] = (*args, *kwargs.values())
    if any(isinstance(leaf, (list, tuple, dict)) for leaf in leaves):
        leaves = pytree.tree_leaves(leaves)
    pieces = [leaf for leaf in leaves if isinstance(leaf, Piece)]
    first, parts = pieces[0], {}
    for piece in pieces:
        own = piece._unchanged_part()
        is_alike = (piece.dim(), piece.place) == (first.dim(), first.place)
        # Different parts do not match element by element.
        if own is None or piece._is_apart(own) or not is_alike or not piece.family.is_like(first.family):
            return None
        parts[id(piece)] = own
    changes = changes or _has_inplace(func, base, args, kwargs)
    if rule is not _pointwise and (changes or len(pieces) > 1 or not args or args[0] is not first):
        return None
    # Parameters get partial gradients if one of the pieces is in a region.
    family = next((piece.family for piece in pieces if piece.family.in_region), first.family)
    found = rule(_FunctionCall(func, base, args, kwargs, leaves, first, parts, family, changes))
    # A view shares its graph with the full tensor, any other result does not.
    if found is not None and rule not in (_view, _reshape) and torch.is_grad_enabled():
        for piece in pieces:
            piece.family.is_used |= parts[id(piece)].requires_grad
    return found


def _whole_without_part(piece: Piece) -> Tensor:
    return piece.whole() if piece._part is None and not piece._data.has_home else piece


def _has_inplace(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function of `torch.nn.functional` was called with `inplace=True`, its last argument."""
    if getattr(func, "__module__", "") != "torch.nn.functional":
        return False
    is_last = len(args) > (3 if name in _DROPOUTS else 1) and args[-1] is True
    return is_last or bool(kwargs.get("inplace"))


def _pointwise(call: _FunctionCall) -> Tensor | None:
    piece, family = call.piece, call.family
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    # The part broadcasts as the full tensor does if the result has the sharded dimension at the same place.
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in tensors)) if len(tensors) > 1 else piece.shape
    is_known = len(shape) == piece.dim() and shape[piece.place] == piece.shape[piece.place]
    # With one argument, `where` returns indices. Outside a region, dropout draws the same numbers on all ranks.
    is_drawn = call.name in _DROPOUTS and not family.in_region
    if not is_known or is_drawn or (call.name == "where" and len(call.leaves) < 3):
        return None
    # In a region, such a tensor would get the gradient of the part only. Parameters have one dimension, and their
    # gradients are summed over the ranks.
    others = [tensor for tensor in tensors if tensor.requires_grad and not isinstance(tensor, Piece)]
    without_rows = [other for other in others if not piece.has_rows_in(other)]
    if family.in_region and any(other.dim() > 1 or _is_of_pieces(other) for other in without_rows):
        return None
    target = call.args[0] if call.changes else None
    if call.changes and not (isinstance(target, Piece) and target._may_change() and shape == target.shape):
        if call.name in _DROPOUTS:  # on the full tensor, each rank would draw other numbers
            raise RuntimeError(
                "Hidden states that are sharded along the sequence must not change in place by dropout after code has"
                " read or viewed them. Use `inplace=False`, or `sequence_parallel=False`"
            )
        return None

    def own(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, Piece) and piece.has_rows_in(value):
            return family.cut(value, piece.place - piece.dim())
        return call.parts[id(value)] if isinstance(value, Piece) else call.operand(value)

    part = call.func(*map(own, call.args), **{name: own(value) for name, value in call.kwargs.items()})
    if target is None:
        return call.again(part)
    if part.requires_grad and torch.is_grad_enabled():
        _Changed.apply(target, part)
    if not target.is_inference():
        # Views of the full tensor must not take their parts any more: their graph lacks the change.
        torch.autograd.graph.increment_version(target)
    return target._keep(part, target.place, is_alias=False)


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


def _cast(call: _FunctionCall) -> Tensor | None:
    own, before = call.on_part(), call.part
    if own is before or not isinstance(own, Tensor):  # without arguments, `type` returns a string
        return call.piece if own is before else own
    if not own.is_floating_point() or own.device != before.device:
        return None
    if _loses_digits(before, own.dtype):
        call.family = replace(call.family, is_rounded=True)
    return call.again(own)


def _loses_digits(part: Tensor, dtype: torch.dtype) -> bool:
    return part.dtype == torch.float64 != dtype


def _reshape(call: _FunctionCall) -> Tensor | None:
    piece, part = call.piece, call.part
    tried = call.func(_meta(piece), *call.args[1:], **call.kwargs)
    full, before = piece.shape[piece.place], math.prod(piece.shape[: piece.place])
    # The sharded dimension stays one dimension if as many elements lie before it as before.
    places = [at for at, size in enumerate(tried.shape) if size == full and math.prod(tried.shape[:at]) == before]
    if full < 2 or len(places) != 1:
        return None
    (place,) = places
    own = part.reshape(*tried.shape[:place], part.shape[piece.place], *tried.shape[place + 1 :])
    if not (tried.is_contiguous() and piece.is_contiguous()):
        return _wrapped(own, place, piece.family, is_alias=True)
    # Autograd must see a view of the full tensor, because a change of the view in place also changes the tensor.
    return piece.view(tried.shape)._keep(own, place, is_alias=True)  # type: ignore[attr-defined]


def _view(call: _FunctionCall) -> Any:
    piece, name = call.piece, call.name
    if name == "__getitem__" and any(isinstance(leaf, Tensor) for leaf in call.leaves[1:]):
        return _select(call)
    # Such functions would do something else, or nothing, with the extent of the part.
    is_cut = name in ("narrow", "select") and call.argument("dim", 1) % piece.dim() == piece.place
    if is_cut or (name == "squeeze" and min(piece.family.extents) < 2):
        return None
    # Run the view on a tensor without data, where only the sharded dimension has a stride, to see where it ends up.
    strides = [_STRIDE if at == piece.place else 0 for at in range(piece.dim())]
    marked = call.func(torch.empty_strided(piece.shape, strides, device="meta"), *call.args[1:], **call.kwargs)
    full = piece.shape[piece.place]
    places = [
        next((at for at, stride in enumerate(each.stride()) if stride == _STRIDE and each.shape[at] == full), -1)
        for each in ([marked] if isinstance(marked, Tensor) else marked)
    ]
    if -1 in places:
        return None
    viewed, own = call.func(piece, *call.args[1:], **call.kwargs), call.on_part()
    if isinstance(viewed, Tensor):
        return viewed._keep(own, places[0], is_alias=True)  # type: ignore[attr-defined]
    return type(viewed)(view._keep(*kept, is_alias=True) for view, *kept in zip(viewed, own, places))


def _select(call: _FunctionCall) -> Piece | None:
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


def _by_row(call: _FunctionCall, dims: Sequence[int] = ()) -> Any:
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
    kwargs = {name: call.operand(value) for name, value in call.kwargs.items()}
    results = call.func(call.part, *map(call.operand, call.args[1:]), **kwargs)

    def again(own: Tensor) -> Piece:
        removed = sum(dim < piece.place for dim in dims) if own.dim() < piece.dim() else 0
        return call.again(own, piece.place - removed)

    return pytree.tree_map_only(Tensor, again, results)


def _reduce(call: _FunctionCall) -> Any:
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
    return reduce(gather_from_group(own, group, piece.place, [1] * group.size), dim=(piece.place,))


def _spread(call: _FunctionCall) -> Any:
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
    deviation = part - copy_to_group(mean, piece.family.group)
    found = _reduced_twice(total, deviation.square(), piece, dims) / (count - correction)
    found = found.sqrt() if call.name == "std" else found
    return found if keepdim else found.squeeze(dims)


def _softmax(call: _FunctionCall) -> Any:
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
    log_p = z - copy_to_group(total, piece.family.group)
    return call.again((log_p if call.name == "log_softmax" else log_p.exp()).to(dtype))


def _pick(call: _FunctionCall) -> Any:
    """Find the best of the full tensor among the best of each rank."""
    piece, part, name, group, place = call.piece, call.part, call.name, call.family.group, call.piece.place
    is_topk, is_index = name == "topk", name.startswith("arg")
    dim = call.argument("dim", 2 if is_topk else 1, -1 if is_topk else None)
    # For too large a `k`, torch raises its error.
    if dim is None and name in ("max", "min") and len(call.leaves) == 1:
        return _reduce(replace(call, name=f"a{name}"))
    is_known = isinstance(dim, int) and not (is_topk and call.argument("k", 1) > piece.shape[dim])
    if not is_known or min(piece.family.extents) == 0 or piece.family.packing is not None:
        return None
    if dim % piece.dim() != place:
        return _by_row(call, (dim % piece.dim(),))
    sizes = [min(call.argument("k", 1) if is_topk else 1, extent) for extent in piece.family.extents]
    best: Callable[[Tensor, int], Tensor] = partial(torch.argmax if "max" in name else torch.argmin, keepdim=True)
    if is_topk:
        largest, is_sorted = call.argument("largest", 3, True), call.argument("sorted", 4, True)

        def best(values: Tensor, dim: int) -> Tensor:
            count = min(call.argument("k", 1), values.shape[dim])
            return values.topk(count, dim, largest, is_sorted).indices

    index = best(part.detach(), place)
    own = (part.detach() if is_index else part).gather(place, index)
    # `index` counts from the first index of the part; the result counts from the first of all.
    first = sum(piece.family.extents[: group.rank])
    index = kept(partial(comm.all_gather, index + first, group, place, sizes))
    values = gather_from_group(own, group, place, sizes)
    # Like torch, take the first of equal values: the ranks are in the order of their parts.
    chosen = best(values.detach(), place)
    found = [values.gather(place, chosen), index.gather(place, chosen)]
    if not is_topk and not call.argument("keepdim", 2, False):
        found = [each.squeeze(place) for each in found]
    return found[1] if is_index else getattr(torch.return_types, name)(found)


def _loss(call: _FunctionCall) -> Tensor | None:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, call.args[1:])) | call.kwargs
    target, weight, piece = given.pop("target", None), given.get("weight"), call.piece
    outdated = (given.pop("size_average", None), given.pop("reduce", None))
    rest = [size for at, size in enumerate(piece.shape) if at != piece.place]
    if (
        piece.place != min(1, piece.dim() - 1)
        or piece.family.is_rounded
        or piece.family.packing is not None
        or not isinstance(target, Tensor)
        or target.dtype != torch.long
        or list(target.shape) != rest
        or (weight is not None and (weight.requires_grad or list(weight.shape) != [piece.shape[piece.place]]))
        or outdated != (None, None)
        or given.get("reduction", "mean") not in ("mean", "sum", "none")
        or not 0.0 <= given.get("label_smoothing", 0.0) <= 1.0
    ):
        return None
    loss = cross_entropy if call.name == "cross_entropy" else nll_loss
    rule = Shard.of_sizes(piece.family.extents)
    return loss(call.part, target, rule, piece.family.group, dim=piece.place, **given)


_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
_PROPERTIES = {Tensor.mT.__get__, Tensor.T.__get__}  # type: ignore[attr-defined]
_DROPOUTS = {"dropout", "alpha_dropout"}
# The place of `dim` among the arguments.
_ALONG = {"var": 1, "std": 1, "prod": 1, "cumsum": 1, "cumprod": 1, "sort": 1, "argsort": 1, "normalize": 2}

# The table of the functions that compute on the part, and how. Any other function gathers.
_TABLE: list[tuple[Callable[[_FunctionCall], Any], str]] = [
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
    (_cast, "float double half bfloat16 to type type_as contiguous clone"),
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


# ------------------------------------------------------------------------------------------------- pieces in containers


def without_pieces(value: Any) -> Any:
    """Replace pieces by ordinary tensors in a value of any structure.

    Containers that pytree knows are made anew. In other containers, such as dataclasses and the user's objects, they
    are replaced in place. They stay a part of autograd's graph. Every rank of the group must call it.
    """
    return _whole_inside(value, set())


def gather_attributes(module: nn.Module) -> None:
    """Replace pieces in the attributes of a module by ordinary tensors; every rank of the group must call it."""
    kept = vars(module)
    # Each step asks, and most attributes are plain.
    asked = [(name, value) for name, value in kept.items() if type(value) not in _ATOMS]
    for name in [name for name, value in asked if (type(value) not in _EMPTIED or value) and has_pieces(value)]:
        kept[name] = without_pieces(kept[name])


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
        items, put = [(key, leaf[key]) for key in keys], leaf.__setitem__
    elif is_users_object(leaf) or is_dataclass(leaf):
        names = (*getattr(leaf, "__dict__", ()), *getattr(type(leaf), "__slots__", ()))
        # Unlike `setattr`, this also works on frozen dataclasses.
        items, put = [(name, getattr(leaf, name, None)) for name in names], partial(object.__setattr__, leaf)
    else:
        return leaf
    for key, item in items:
        whole = _whole_inside(item, seen)
        if not _is_same(whole, item):
            put(key, whole)
    return leaf


def _is_part(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(type(value), "whole")


_PLAIN = (Tensor, bool, int, float, str, bytes, type(None), nn.Module)
_ATOMS = {bool, int, float, str, type(None)}
_EMPTIED = {dict, OrderedDict, list, tuple, set}
_SMALL_CONTAINER = 16


def _is_same(one: Any, two: Any) -> bool:
    """Return whether a value has the same leaves as the value from which it was made."""
    return one is two or all(a is b for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(two)))


def has_pieces(value: Any) -> bool:
    """Return whether a value is a piece or a container of pieces.

    A large container counts by its first and its last value: a search in each step would take too long.
    """
    items: Any = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    if len(items) > _SMALL_CONTAINER:
        items = (next(iter(items)), next(reversed(items)))
    return any(map(_is_part, items))


# -------------------------------------------------------------------------------------------------------- narrow inputs


class StandIn(Tensor):
    """A tensor that puts another tensor in its place before a function runs."""


class NarrowInput(StandIn):
    """Full input (..., E) of an attention, whose last size reads as the width of this rank's heads.

    Code such as `x.view(b, t, heads, x.shape[-1] // heads)` takes the width of its heads from its input. Functions
    compute on the full tensor, and a result with as many features is narrow again.
    """

    whole: Tensor

    @staticmethod
    def of(whole: Tensor, features: int) -> NarrowInput:
        """Let the last size of `whole` read as `features`."""
        # No code should read its values. It has none, so a read raises an error.
        sizes = torch.empty((), dtype=whole.dtype, device="meta").expand(*whole.shape[:-1], features)
        narrow = sizes.as_subclass(NarrowInput)
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


_SIZES = {Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement}  # type: ignore[attr-defined]


def whole_input(value: Any) -> Any:
    """Return the tensor that a `NarrowInput` stands for; return any other value unchanged."""
    return value.whole if isinstance(value, NarrowInput) else value
