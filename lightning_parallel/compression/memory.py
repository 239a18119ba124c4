"""Tensors by slot and parameter name, with a transaction: what a step writes replaces the old only at `commit`.

Parameters of one shape are kept in one stacked tensor, so that methods work on a batch. Each stack has two buffers: a
step reads the current one and writes the other, and committing exchanges them. Nothing is copied, and dropping a step
restores every bit, at the price of a second buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Memory"]


class _Key(NamedTuple):
    slot: str
    names: tuple[str, ...]


class Memory:
    """Named tensors in slots (`residual`, `factor`, ...), changed by staging and committing."""

    def __init__(self) -> None:
        self._current: dict[str, dict[str, Tensor]] = {}
        self._buffers: dict[_Key, list[Tensor]] = {}  # [spare] or [spare, current]; current last
        self._staged: dict[_Key, Tensor] = {}
        self._discarded: list[_Key] = []

    def holds(self, slot: str, name: str) -> bool:
        """Whether there is a committed tensor."""
        return name in self._current.get(slot, {})

    def read(self, slot: str, name: str, device: torch.device, shape: Sequence[int | None]) -> Tensor | None:
        """The committed tensor, on `device`; None if there is none yet.

        Args:
            shape: The expected one; None stands for any extent.

        Raises:
            ValueError: If it has another shape.
        """
        tensor = self._current.get(slot, {}).get(name)
        if tensor is not None and not _fits(tensor.shape, shape):
            wanted, found = ("x".join("?" if n is None else str(n) for n in some) for some in (shape, tensor.shape))
            raise ValueError(
                f"expected `{slot}` of `{name}` in the compressor's memory to be of shape {wanted}, found {found}: "
                "it is that of another model, or of one cut otherwise; use a compressor for each"
            )
        return tensor if tensor is None or tensor.device == device else tensor.to(device)

    def stage(
        self, slot: str, names: Sequence[str], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised tensor (names, *shape) whose rows become the new values of `names` at `commit`.

        Within one step the same names give the same tensor.
        """
        key = _Key(slot, tuple(names))
        if key in self._staged:
            return self._staged[key]
        buffers = self._buffers.setdefault(key, [])
        size = torch.Size((len(names), *shape))
        spare = buffers[0] if len(buffers) == 2 else None
        if spare is None or spare.shape != size or spare.dtype != dtype or spare.device != device:
            spare = torch.empty(size, dtype=dtype, device=device)
        self._staged[key] = spare
        return spare

    def discard(self, slot: str, names: Sequence[str]) -> None:
        """Hold nothing for `names` in `slot` after `commit`."""
        self._discarded.append(_Key(slot, tuple(names)))

    def commit(self) -> None:
        for slot_name, names in self._discarded:
            for name in names:
                self._current.get(slot_name, {}).pop(name, None)
        for key, buffer in self._staged.items():
            self._buffers[key] = [*self._buffers[key][-1:], buffer]
            slot = self._current.setdefault(key.slot, {})
            slot.update(zip(key.names, buffer.unbind()))
        if self._staged:
            self._forget_regrouped()
        self._staged, self._discarded = {}, []

    def rollback(self) -> None:
        for key, buffer in self._staged.items():
            current = self._buffers[key][-1:]
            self._buffers[key] = [buffer, *current] if current else []
        self._staged, self._discarded = {}, []

    def _forget_regrouped(self) -> None:
        """Drop stacks whose names are now stacked in other company, as after buckets were rebuilt."""
        owner = {(key.slot, name): key for key in self._staged for name in key.names}
        stale = [
            key
            for key in self._buffers
            if key not in self._staged and any((key.slot, name) in owner for name in key.names)
        ]
        for key in stale:
            del self._buffers[key]

    def items(self) -> Iterator[tuple[str, str, Tensor]]:
        """Slot, name and committed tensor, in sorted order."""
        for slot in sorted(self._current):
            for name in sorted(self._current[slot]):
                yield slot, name, self._current[slot][name]

    def load(self, values: dict[str, dict[str, Tensor]]) -> None:
        """Replace everything by copies of `values`."""
        self._buffers, self._staged, self._discarded = {}, {}, []
        self._current = {
            slot: {name: tensor.detach().clone() for name, tensor in named.items()} for slot, named in values.items()
        }

    @property
    def num_bytes(self) -> int:
        """Bytes held, second buffers included."""
        stacked = {id(buffer): buffer for buffers in self._buffers.values() for buffer in buffers}
        named = {(key.slot, name) for key in self._buffers for name in key.names}
        loose = [tensor for slot, name, tensor in self.items() if (slot, name) not in named]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*stacked.values(), *loose))


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(want in (None, found) for found, want in zip(shape, wanted))
