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

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar

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
    apply_of,
    gathers_first,
    make_wrapper_subclass,
    pytree,
    schema_of,
    transforms_active,
    version_of,
    with_lost_weight,
)
from lightning_parallel.tensor.autograd import copy_to_group, gather_from_group, scatter_to_group
from lightning_parallel.tensor.later_data import (
    ASKS_FOR_GRADIENT,
    DATA_OF,
    NEEDS_ADDRESS,
    LaterData,
    meta_of,
    place_after_reshape,
)
from lightning_parallel.tensor.linear import SequenceLengths
from lightning_parallel.tensor.sharding import Shard
from lightning_parallel.tensor.tiled_logits import TiledLogits

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
    *(_aten.view_as_complex.default, _aten.view_as_real.default),
}
# The hash of an operator is Python code; torch keeps its operators.
_UNREAD_IDS = {id(each) for each in _UNREAD}
# These functions make a tensor with other values.
_FACTORIES = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "zeros_like", "ones_like", "empty_like"}
_FACTORIES |= {"full_like"}
# These functions read sizes and types only.
_FACTS: set[Any] = {Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex}
_FACTS |= {
    getattr(Tensor, each).__get__
    for each in ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_cuda", "is_nested")
}
_PROPERTIES = {Tensor.mT.__get__, Tensor.T.__get__}  # type: ignore[attr-defined]


_MOST_DECISIONS = 4096


@dataclass(eq=False)
class Family:
    """The facts that all forms of the same piece share.

    Attributes:
        extents: The extent of the sharded dimension on each rank.
        group: The group over which it is sharded.
        packing: Where the parts lie in the full tensor; None if they follow each other in the order of the ranks.
        in_region: Whether parameters get partial gradients from the part, which a later reduction sums over the ranks.
        is_rounded: Whether the part lost digits of double precision.
        is_used: Whether a result with a gradient was computed from the part.
        is_watched: Whether code asked for the gradient of the full tensor, which lacks gradients from the part.
        decisions: The decisions of rules so far, by everything that they read of a call, and the forms of pieces and
            views; None if these facts may change.
    """

    extents: tuple[int, ...]
    group: Group
    packing: Shard | None = None
    in_region: bool = False
    is_rounded: bool = False
    is_used: bool = False
    is_watched: bool = False
    decisions: dict[Any, Any] | None = None
    rules: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """The rules of functions whose arguments may be sharded in different ways."""

    def form(
        self,
        place: int,
        shape: torch.Size,
        strides: tuple[int, ...] | None,
        dtype: torch.dtype,
        device: torch.device,
        part_shape: torch.Size,
    ) -> Form:
        """Return the form of a piece; equal forms are one object where these facts do not change."""
        decisions = self.decisions
        if decisions is None:
            return Form(self, place, shape, strides, dtype, device, part_shape)
        key = (self, place, shape, strides, dtype, device)
        found = decisions.get(key)
        if found is None:
            if len(decisions) >= _MOST_DECISIONS:  # shapes may change from step to step
                decisions.clear()
            found = decisions[key] = Form(self, place, shape, strides, dtype, device, part_shape)
        return found

    def rounded(self) -> Family:
        """Return the facts of a part that has lost digits."""
        return replace(self, is_rounded=True)

    @property
    def is_of_positions(self) -> bool:
        """Whether ranks compute other positions: they draw other numbers, and shared operands get partial gradients."""
        return self.in_region

    @classmethod
    def of(cls, rule: Shard, group: Group) -> Family:
        """Return the facts of a tensor that is sharded by a rule."""
        return cls(rule.sizes, group, None if rule.consecutive else rule)

    def is_like(self, other: Family) -> bool:
        """Return whether parts of both lie at the same places."""
        return self.extents == other.extents and self.packing == other.packing and self.group.ranks == other.group.ranks

    @property
    def extent(self) -> int:
        """The extent of the sharded dimension of the full tensor."""
        return sum(self.extents) if self.packing is None else self.packing.full_size

    def full_shape(self, shape: Sequence[int], dim: int) -> torch.Size:
        """Return the shape of the full tensor, given that of a part."""
        sizes = list(shape)
        sizes[dim] = self.extent
        return torch.Size(sizes)

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
        full = self.all_of(part, dim, self.extents)
        return full if self.packing is None else self.in_order(full, dim)

    def join_data(self, part: Tensor, dim: int) -> Tensor:
        """Return the full tensor outside autograd's graph; every rank of the group must call it."""
        # The state of an optimizer may be in host memory, and a group may communicate tensors of devices only.
        sent = part.to(self.group.host_device) if part.device.type == "cpu" else part
        full = comm.all_gather(sent, self.group, dim, self.extents).contiguous().to(part.device)
        return full if self.packing is None else self.in_order(full, dim)

    def shared(self, full: Tensor) -> Tensor:
        """Return a full tensor for a computation with the part.

        Each rank then has a part of its gradient.
        """
        return copy_to_group(full, self.group)

    def after_reshape(self, shape: torch.Size, place: int, new: torch.Size) -> tuple[int, Family] | None:
        """Return where the sharded dimension of a tensor lies after a reshape; None if it is no dimension any more."""
        found = place_after_reshape(shape, place, new)
        return None if found is None else (found, self)

    def narrowed(self, start: int, length: int) -> tuple[tuple[int, int], Family] | None:
        """Return the offset and length of this rank's elements in a range of the full tensor, and the range's facts.

        It returns None if a range has no parts.
        """
        return None

    def at_next_stage(self, place: int) -> Callable[[Tensor, Any], Tensor] | None:
        """Return a function that makes a piece of a part that was sent; None if the full tensor is sent."""
        return None

    def all_of(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Concatenate results of all ranks along `dim`, in autograd's graph; every rank of the group must call it."""
        return gather_from_group(own, self.group, dim, sizes)

    @property
    def has_no_full_gradient(self) -> bool:
        """Whether no rank gets the full gradient of the full tensor."""
        return False

    @property
    def is_gathered_now(self) -> bool:
        """Whether functions compute on the full tensor for now."""
        return False

    def drawing(self, name: str, part: Tensor) -> AbstractContextManager[Any]:
        """Return a context in which the function `name` may draw random numbers for the part."""
        return nullcontext()

    def in_order(self, full: Tensor, dim: int) -> Tensor:
        """Put the parts, which follow each other by rank, in the order of the full tensor."""
        assert self.packing is not None
        return self.packing.along(dim).merge(full.split(self.extents, dim))


class _Data(LaterData):
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
        super().__init__(make)
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
            return super().get()
        seen = self._base.get() if self._base is not None else _changes_of(self.memory)
        if self.made is None or (seen is not self._seen and (self._base is not None or seen != self._seen)):
            self.made = self._new()
            self._seen = seen
        return self.made

    def take(self, made: Tensor) -> None:
        """Use data that were made already."""
        self.made, self._seen = made, _changes_of(self.memory)

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
    family: Family
    held: Tensor | None = None
    computed_on_parts: ClassVar[Callable[..., Any]]
    """Computes a function on the parts, if it has a rule; `piece_rules` sets it."""
    decision_on: ClassVar[Callable[..., Any]]
    """Returns the decision of a rule for a call like this, if it is known; `piece_rules` sets it."""
    _part: Tensor | None
    _unchanged: int
    _is_alias: bool
    # The data; before the first read, their source: a part, or a view of another piece.
    _made: _Data | None
    _source: Any
    _inside: Any
    _form: Form | None = None

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
        return piece_with(part, place % part.dim(), Family(tuple(extents), group, in_region=in_region))

    @staticmethod
    def by_rule(part: Tensor, rule: Shard, group: Group) -> Piece:
        """Return the full tensor, given the part of this rank and the rule by which it was cut."""
        return piece_with(part, rule.dim % part.dim(), Family.of(rule, group))

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
        piece = piece_with(part, rule.dim % part.dim(), Family.of(rule, group), home=home)
        if full is not None:
            piece._data.take(full)
        return piece

    @property
    def _data(self) -> _Data:
        if self._made is None:
            self._made, self._source = _data_from(self, self._source), None
        return self._made

    @property
    def form(self) -> Form:
        """All that rules read of this piece; equal forms are one object where the family keeps decisions."""
        if self._form is None:
            with DisableTorchFunctionSubclass():
                shape, place, family = self.shape, self.place, self.family
                part_shape = [*shape]
                if place >= 0:
                    part_shape[place] = family.extents[family.group.rank]
                strides, own = self.stride(), torch.Size(part_shape)
                self._form = family.form(place, shape, strides, self.dtype, self.device, own)
        return self._form

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
        if own is None or self.place != rule.dim % self.dim() or not self.family.is_like(Family.of(rule, group)):
            return None
        return own.detach() if self.home is None else self.home

    @property
    def part(self) -> Tensor:
        """The data of this rank, in autograd's graph; cut from the full tensor if that was changed."""
        family = self.family
        with DisableTorchFunctionSubclass():
            own = self.unchanged_part()
            if own is None:
                return family.cut(_aten.alias.default(self), self.place)
            # From here on, a gradient hook of the full tensor would miss the gradient of this part; see `_watch`.
            family.is_used = True
            return _PartOfWhole.apply(self) if self.is_apart(own) else own

    @property
    def valid_part(self) -> Tensor | None:
        """The data of this rank; None if the full tensor was changed in place, watched, or put into another graph."""
        with DisableTorchFunctionSubclass():
            own = self.unchanged_part()
            return None if own is None or self.is_apart(own) else own

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

    def for_next_stage(self) -> tuple[Tensor, Callable[[Tensor, Any], Tensor] | None]:
        """Return a tensor to send to the next pipeline stage, and a function that makes a piece of it there."""
        own = self.valid_part
        made = self.family.at_next_stage(self.place)
        return (self.whole(), None) if own is None or made is None else (own, made)

    def has_rows_in(self, other: Tensor) -> bool:
        """Return whether a full tensor, which broadcasts with this one, has a row for each index of the dimension."""
        from_the_end = self.dim() - self.place
        return other.dim() >= from_the_end and other.shape[-from_the_end] != 1

    def keep(
        self, part: Tensor, place: int, is_alias: bool, family: Family | None = None, form: Form | None = None
    ) -> Piece:
        """Take a part, which lies at `place`; a form that is known saves time."""
        self._part = part
        self.place = place
        self._is_alias = is_alias
        if family is not None:
            self.family = family
        self._form = form
        # An in-place change of the full tensor raises its version, and the part lacks that change.
        self._unchanged = 0 if self.is_inference() else version_of(self)
        return self

    def changed_to(self, part: Tensor) -> Piece:
        """Return this piece with a part that a function has changed in place."""
        if part.requires_grad and torch.is_grad_enabled():
            _Changed.apply(self, part)
        if not self.is_inference():
            # Views of the full tensor must not take their parts any more: their graph lacks the change.
            torch.autograd.graph.increment_version(self)
        return self.keep(part, self.place, is_alias=False)

    def may_change(self) -> bool:
        """Return whether the part may change in place: views of the full tensor and made data would not follow."""
        is_made = self._data.made is not None and self._data.home is None
        return not (self._is_alias or is_made or (self.requires_grad and self.is_leaf))

    def unchanged_part(self) -> Tensor | None:
        return None if self.family.is_watched or _version(self) != self._unchanged else self._part

    def is_apart(self, part: Tensor) -> bool:
        # By `detach().requires_grad_()`, or as the output of a function that ran without gradients.
        return self.requires_grad and not part.requires_grad

    @classmethod
    @torch.compiler.disable  # compiled code leaves its graph where it meets a piece
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind is not Piece and (issubclass(kind, StandIn) or gathers_first(kind)):
                return NotImplemented  # its functions compute on the tensor behind it, which may be a piece
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if func in _FACTS:
                return func(*args, **kwargs)
            decision = cls.decision_on(func, args, kwargs)
            if decision is not None and (found := decision(args, kwargs)) is not None:
                return found
        kwargs = with_lost_weight(func, kwargs)
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            return iter(args[0].unbind())
        if name == "equal":
            # Lightning compares all pairs of parameters so.
            return args[0] is args[1] or (args[0].shape == args[1].shape and bool((args[0] == args[1]).all()))
        with DisableTorchFunctionSubclass():
            is_data = name == "__get__" and func == DATA_OF
            if (is_data or name == "detach") and args[0].home is not None:
                return piece_with(args[0].home, args[0].place, args[0].family, home=args[0].home)
            if is_data and args[0]._data.has_home:
                return args[0].detach()
            if is_data or name in NEEDS_ADDRESS:
                # A memo of its own: `deepcopy` knows tensors by `id`, which the next full tensor may have again.
                given = (args[0], {}) if name == "__deepcopy__" else args
                found = func(*without_pieces(given), **kwargs)
                if isinstance(found, np.ndarray) and args[0]._data.has_home:
                    found.flags.writeable = False  # a change would not reach the part
                return found
            if name in ASKS_FOR_GRADIENT:
                _watch(args[0])
            elif name.endswith("_like") and name in _FACTORIES and args[0].home is not None:
                # Such as the state of an optimizer, which follows its parameter.
                return piece_with(func(args[0].home, *args[1:], **kwargs), args[0].place, args[0].family)
            elif name in _FACTORIES and isinstance(args[0], Piece):
                args = (torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape), *args[1:])
            elif name == "__get__" and func in _PROPERTIES:
                name = "transpose"
            found = cls.computed_on_parts(func, name, args, kwargs, True)
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
        if id(func) in _UNREAD_IDS:
            return _unread(func, args[0], args[1:], kwargs)
        is_view = func.is_view and func is not _aten.alias.default and isinstance(args[0], Piece)
        if is_view and args[0]._data.has_home:
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


@dataclass(eq=False, slots=True)
class Form:
    """All that rules read of a piece, but for its part. Forms are keys, and compare by identity.

    Attributes:
        family: The facts of the piece.
        place: The sharded dimension; -1 if it has no part.
        shape: The shape of the full tensor.
        strides: Its strides; None if it is contiguous.
        dtype, device: Type and device of the full tensor.
        part_shape: The shape of this rank's part.
    """

    family: Family
    place: int
    shape: torch.Size
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    part_shape: torch.Size

    @staticmethod
    def of_part(part: Tensor, place: int, family: Family) -> Form:
        """Return the form of a contiguous full tensor, given its part."""
        return family.form(place, family.full_shape(part.shape, place), None, part.dtype, part.device, part.shape)


def _unread(func: Any, piece: Piece, rest: tuple[Any, ...], kwargs: Any) -> Any:
    """Return the result of a view of the data, or a list of results, computed at the first read."""
    decisions = piece.family.decisions
    key: Any = None
    if decisions is not None and not kwargs:
        key = [id(func), piece._form or piece.form]  # torch keeps its operators
        for each in rest:
            key.append(tuple(each) if type(each) is list else each)
        key = tuple(key)
    forms = None if key is None else decisions.get(key)  # type: ignore[union-attr]
    if forms is None:
        metas = func(meta_of(piece), *rest, **kwargs)
        device = piece.device
        forms = (
            [
                piece.family.form(-1, each.shape, each.stride(), each.dtype, device, each.shape)
                for each in ([metas] if isinstance(metas, Tensor) else metas)
            ],
            isinstance(metas, Tensor),
        )
        if key is not None:
            decisions[key] = forms  # type: ignore[index]
    views: list[Piece] = []
    for form in forms[0]:
        index = None if forms[1] else len(views)
        views.append(_empty(form, None, False, (piece, func, rest, kwargs, index)))
    return views[0] if forms[1] else views


def _empty(form: Form, part: Tensor | None, is_alias: bool, source: Any) -> Piece:
    piece = make_wrapper_subclass(Piece, form.shape, form.strides, None, None, form.dtype, torch.strided, form.device)
    piece.place = form.place
    piece.family = form.family
    piece._form = form
    piece._part = part
    piece._unchanged = 0
    piece._is_alias = is_alias
    piece._made = None
    piece._source = source
    return piece


def _data_from(piece: Piece, source: Any, home: Tensor | None = None) -> _Data:
    """Return the data of a piece, which the first read makes."""
    if isinstance(source, tuple):
        base, func, rest, kwargs, index = source
        data = base._data

        def view() -> Tensor:
            found = func(data.get(), *rest, **kwargs)
            return found if index is None else found[index]

        return _Data(view, data)
    place, family, inside = piece.place, piece.family, piece._inside
    # Detached: autograd knows the gather as `_WholeOfPart`, and the data are made outside its graph.
    own = source.detach()

    def make() -> Tensor:
        # A layer that runs again finds the data of its inputs in their pieces. It makes only its own pieces anew.
        is_own = inside is not None and inside is running_results()
        return kept(partial(_gather, own, place, family)) if is_own else _gather(own, place, family)

    return _Data(make, None, home, lambda full: family.cut(full, place))


def piece_with(
    part: Tensor,
    place: int,
    family: Family,
    is_alias: bool = False,
    home: Tensor | None = None,
    form: Form | None = None,
) -> Piece:
    """Return the full tensor, given the part of this rank; a form that is known saves time."""
    form = form or Form.of_part(part, place, family)
    if not (part.requires_grad and torch.is_grad_enabled()):
        return _make_piece(None, part, form, is_alias, home)
    # Transforms of `torch.func` need what `Function.apply` does around it.
    apply = _WholeOfPart.apply if transforms_active() else _apply_whole
    return apply(part, form, is_alias, home)


def _make_piece(ctx: Any, part: Tensor, form: Form, is_alias: bool, home: Tensor | None) -> Piece:
    if ctx is not None:
        ctx.form = form
    is_plain = type(part) is Tensor or type(part) is nn.Parameter
    piece = _empty(form, part, is_alias, part if is_plain else part.detach())
    piece._inside = running_results()
    if home is not None:
        piece._made = _data_from(piece, piece._source, home)
    return piece


def _gather(part: Tensor, place: int, family: Family) -> Tensor:
    line = innermost_users_line()
    GATHERS[line] += bool(line)
    if line and not family.group.is_pretended:
        _tell_of_gathers(line, part, place, family)
    return family.join_data(part.whole() if isinstance(part, (Piece, TiledLogits)) else part, place)


def _tell_of_gathers(line: str, part: Tensor, place: int, family: Family) -> None:
    """Tell once of a line that gathers the same tensors again and again, and many bytes, unlike a hook of an epoch."""
    bytes_before, times = _GATHERED.setdefault(line, (0, Counter())) or (0, None)
    if times is None:
        return
    total = bytes_before + family.full_shape(part.shape, place).numel() * part.element_size()
    address = 0 if isinstance(part, (Piece, TiledLogits)) else part.data_ptr()
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

    forward = staticmethod(_make_piece)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # All ranks computed the same from the full tensor, so `grad` is the full gradient on each of them.
        return ctx.form.family.cut_gradient(grad, ctx.form.place), None, None, None


_apply_whole = apply_of(_WholeOfPart)


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
    if piece.family.has_no_full_gradient:
        raise RuntimeError(
            "`retain_grad` and `register_hook` need a full gradient; got hidden states that are split along positions."
            " Each rank has a share of their gradient. Use `context_parallel_size=1` to look at it"
        )
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
    family, dim = Family.of(rule, group), rule.dim % full.dim()
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


def _whole_without_part(piece: Piece) -> Tensor:
    return piece.whole() if piece._part is None and not piece._data.has_home else piece


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
