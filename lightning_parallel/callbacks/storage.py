"""Bytes of tensors, each storage counted once, and what autograd keeps for the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

__all__ = ["ActivationMeter", "Storages", "tensors_in"]


class Storages:
    """Counts the bytes of storages that were not counted before."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those storages behind `tensors` that are new here; views of one storage count once, as a whole."""
        num_bytes = 0
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None and storage._cdata not in self._seen:
                self._seen[storage._cdata] = storage  # alive, so that nothing else gets its address
                num_bytes += storage.nbytes()
        return num_bytes

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._seen


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage with the data; None where there is none, as behind tensors on the meta device."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if type(tensor) not in (Tensor, Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage()


class ActivationMeter:
    """Measures what autograd keeps between forward and backward.

    Storages count once however often they are saved, and as a whole, as a view keeps all of its storage. What was held
    anyway counts nothing.

    Attributes:
        current: Bytes kept now.
        peak: Most bytes kept at once, since `peak` was last set.
    """

    def __init__(self) -> None:
        self.current = self.peak = 0
        self._held = Storages()
        self._kept: dict[int, list[int]] = {}
        self._lock = threading.RLock()  # backward runs on other threads for other devices; freeing may come any time

    @contextmanager
    def watch(self, held: Storages) -> Iterator[None]:
        """Measure what the block saves, apart from the storages in `held`."""
        self._held = held
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._held = Storages()

    def _pack(self, tensor: Tensor) -> _Saved:
        storage = _storage(tensor)
        if storage is None or storage in self._held:
            return _Saved(tensor)
        return _Counted(tensor, self, storage._cdata, storage.nbytes())

    def keep(self, key: int, num_bytes: int) -> None:
        """Count a storage, if it is not counted already."""
        with self._lock:
            entry = self._kept.setdefault(key, [0, num_bytes])
            entry[0] += 1
            if entry[0] == 1:
                self.current += num_bytes
                self.peak = max(self.peak, self.current)

    def release(self, key: int) -> None:
        """Undo `keep`."""
        with self._lock:
            entry = self._kept[key]
            entry[0] -= 1
            if entry[0] == 0:
                self.current -= entry[1]
                del self._kept[key]


class _Saved:
    """A tensor that autograd has saved, as it was then."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached, for an output of the operation that saves it would keep its graph alive, and so itself.
        self.tensor, self.version = tensor.detach(), tensor._version


class _Counted(_Saved):
    __slots__ = ("key", "meter")

    def __init__(self, tensor: Tensor, meter: ActivationMeter, key: int, num_bytes: int) -> None:
        super().__init__(tensor)
        self.meter, self.key = meter, key
        meter.keep(key, num_bytes)

    def __del__(self) -> None:
        self.meter.release(self.key)


def _unpack(saved: _Saved) -> Tensor:
    # Under hooks autograd leaves this check to them, and gradients would be wrong in silence.
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            f" of shape {tuple(saved.tensor.shape)} is at version {saved.tensor._version}; expected version"
            f" {saved.version} instead. Hint: torch.autograd.set_detect_anomaly(True) finds the operation,"
            " without MemoryProfiler"
        )
    return saved.tensor
