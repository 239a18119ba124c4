"""Tensors whose data are made at the first read: pieces, of which a rank holds a part, and logits in tiles.

A view of such a tensor has no data either. Two questions tell how a view or a reshape moves a dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ASKS_FOR_GRADIENT",
    "DATA_OF",
    "NEEDS_ADDRESS",
    "LaterData",
    "meta_of",
    "place_after_reshape",
    "places_after_view",
    "views_later",
]

NEEDS_ADDRESS = {"numpy", "__array__", "tolist", "__dlpack__", "data_ptr", "storage", "untyped_storage", "is_set_to"}
NEEDS_ADDRESS |= {"__reduce_ex__", "__deepcopy__", "__repr__", "__format__", "share_memory_"}
NEEDS_ADDRESS |= {"apply_", "map_", "map2_"}
"""These functions read the address of the data in C++, or copy the Python object."""

ASKS_FOR_GRADIENT = {"retain_grad", "register_hook"}
"""These functions ask for the gradient of the full tensor."""

DATA_OF = Tensor.data.__get__  # type: ignore[attr-defined]

_STRIDE = 1_000_003  # marks a dimension, to find it again after a view


class LaterData:
    """Data that are made at the first read, outside autograd's graph.

    Args:
        make: Makes the data.
    """

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make: Callable[[], Tensor] | None = make
        self.made: Tensor | None = None

    def get(self) -> Tensor:
        """Return the data."""
        if self.made is None:
            self.made = self._new()
            # The function refers to its inputs, and would keep their memory.
            self._make = None
        return self.made

    def _new(self) -> Tensor:
        assert self._make is not None
        with torch.no_grad():
            return self._make()


def meta_of(tensor: Tensor) -> Tensor:
    """Return a tensor with the same sizes, strides and dtype on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def views_later(
    func: Any, tensor: Tensor, data: LaterData, rest: Any, kwargs: Any, show: Callable[[Tensor, Any], Any]
) -> Any:
    """Return the result of a view, or a list of results, whose data are made at the first read.

    Args:
        func: An operator that takes a view.
        tensor: Its first argument.
        data: The data of that.
        rest: Other arguments.
        kwargs: Keyword arguments.
        show: Returns a tensor without data, given a meta tensor with its sizes, and a function that makes the data.
    """
    metas = func(meta_of(tensor), *rest, **kwargs)

    def view(meta: Tensor, choose: Callable[[Any], Tensor]) -> Any:
        return show(meta, lambda: choose(func(data.get(), *rest, **kwargs)))

    if isinstance(metas, Tensor):
        return view(metas, lambda result: result)
    return [view(meta, itemgetter(at)) for at, meta in enumerate(metas)]


def places_after_view(func: Callable[..., Any], shape: Sequence[int], place: int, *rest: Any, **kwargs: Any) -> Any:
    """Return where a dimension lies after a view, for each result; None if a result does not have all of it.

    Args:
        func: A function that takes a view.
        shape: The sizes of its first argument.
        place: The dimension.
        *rest: Other arguments.
        **kwargs: Keyword arguments.
    """
    # Only this dimension has a stride.
    strides = [_STRIDE if at == place else 0 for at in range(len(shape))]
    marked = func(torch.empty_strided(tuple(shape), strides, device="meta"), *rest, **kwargs)
    places = [
        next(
            (at for at, stride in enumerate(each.stride()) if stride == _STRIDE and each.shape[at] == shape[place]), -1
        )
        for each in ([marked] if isinstance(marked, Tensor) else marked)
    ]
    return None if -1 in places else places


def place_after_reshape(shape: Sequence[int], place: int, new: Sequence[int]) -> int | None:
    """Return where a dimension lies after a reshape; None if it is no dimension any more."""
    full, before = shape[place], math.prod(shape[:place])
    # It stays one dimension if as many elements lie before it as before.
    places = [at for at, size in enumerate(new) if size == full and math.prod(new[:at]) == before]
    return places[0] if full > 1 and len(places) == 1 else None
