"""Deferred tensors that come from a file: they are read when their data are made, and of most only a rank's part.

    weight = read_later(stored)       # recorded
    parameter.copy_(weight)           # recorded, with the conversion to the parameter's dtype
    read_part(parameter, rule, rank)  # reads the rows or columns that the rank owns, and converts them

What else is done with such tensors is replayed as with any other: the whole tensor is read then, one at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.reader import StoredTensor, TensorSource, take_part
from lightning_parallel.compat.torch import forbid_data_access, to_copy
from lightning_parallel.strategies.deferred.records import (
    META,
    RecordedOperation,
    StorageHistory,
    StorageLayout,
    StorageView,
)
from lightning_parallel.tensor.sharding import Shard

__all__ = ["read_later_as_meta", "read_part", "stored_origin"]

_aten = torch.ops.aten
_CONVERSIONS = {to_copy, _aten.clone, _aten.copy_}


class RecordedRead(RecordedOperation):
    """Reads a tensor of a file into a new storage."""

    def __init__(self, stored: StoredTensor) -> None:
        super().__init__(None, (), {}, None)
        self.stored = stored

    def run(self, memory: dict[StorageHistory, torch.UntypedStorage]) -> None:
        """Read it."""
        ((_, history, _),) = self.created
        value = self.stored.read()
        # A copy: the memory that files are read into is for passing by.
        memory[history] = torch.empty_like(value, device=history.device).copy_(value).untyped_storage()


def read_later_as_meta(stored: StoredTensor) -> Tensor:
    """Return a meta tensor whose storage has the record that it is read from a file, on the CPU."""
    strides = torch.empty(stored.shape, device=META).stride()
    layout = StorageLayout(stored.dtype, torch.Size(stored.shape), strides, 0)
    plain = layout.empty(META)
    history = StorageHistory(torch.device("cpu"), plain.untyped_storage())
    operation = RecordedRead(stored)
    operation.append_to(history)
    operation.created.append((0, history, layout))
    plain.untyped_storage().history = history  # type: ignore[attr-defined]
    forbid_data_access(plain)
    return plain


def stored_origin(tensor: Tensor) -> tuple[StoredTensor, list[torch.dtype]] | None:
    """Return what a deferred tensor is read from, and its dtypes on the way; None if it is anything else."""
    view = StorageView.of(tensor)
    dtypes: list[torch.dtype] = []
    while True:
        layout = view.layout
        num_bytes = layout.size.numel() * layout.dtype.itemsize
        is_whole = layout.offset == 0 and layout.num_bytes == num_bytes and layout.empty(META).is_contiguous()
        if view.is_conj or not is_whole or view.history.is_shared or view.version == 0:
            return None
        operation = view.history.operations[view.version - 1]
        if isinstance(operation, RecordedRead):
            same = layout.size == operation.stored.shape and layout.dtype == operation.stored.dtype
            return (operation.stored, dtypes) if same else None
        source = _converted_from(operation, view)
        if source is None:
            return None
        dtypes.insert(0, layout.dtype)
        view = source


def _converted_from(operation: RecordedOperation, view: StorageView) -> StorageView | None:
    """Return the tensor of which `view` is the copy by `operation`, in another dtype perhaps, element by element."""
    packet: Any = getattr(operation.func, "overloadpacket", None)
    if packet not in _CONVERSIONS:
        return None
    is_written = packet is _aten.copy_
    if is_written:
        target = operation.args[0]
        if not operation.overwrites or target.history is not view.history or target.layout != view.layout:
            return None
    elif not any(layout == view.layout for _, history, layout in operation.created if history is view.history):
        return None
    source = operation.args[1 if is_written else 0]
    if not isinstance(source, StorageView) or source.layout.size != view.layout.size:
        return None
    # From complex to real numbers a part would be dropped with a warning, the second time.
    return None if source.layout.dtype.is_complex != view.layout.dtype.is_complex else source


def read_part(deferred: Tensor, rule: Shard | None, rank: int) -> tuple[Tensor, TensorSource] | None:
    """Read what `rank` owns of a deferred tensor that comes from a file; None if it does not.

    Returns:
        The part, in memory of its own where the tensor's data belong, and what it was read from.
    """
    origin = stored_origin(deferred)
    if origin is None:
        return None
    stored, dtypes = origin
    part = stored if rule is None else take_part(stored, rule, rank)
    value = part.read() if isinstance(part, StoredTensor) else part
    for dtype in dtypes:
        value = value.to(dtype)
    return torch.empty_like(value, device=deferred.device).copy_(value), stored.source
