"""Storages of tensors, counted once each: of what is given, and of what autograd saves for backward."""

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

from lightning_parallel import tracing
from lightning_parallel.compat.torch import storage_address, version_of

__all__ = ["ActivationMeter", "StorageSet", "tensors_in"]


class StorageSet:
    """A set of storages, which counts the bytes of those that are added."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Add the storages of `tensors`; returns the bytes of those that are new. Views of one storage count once."""
        num_bytes = 0
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None and storage not in self:
                # The reference keeps it alive, so that no other storage gets its address.
                self._seen[storage_address(storage)] = storage
                num_bytes += storage.nbytes()
        return num_bytes

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage_address(storage) in self._seen


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Find the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor's data; None where there is none, as for tensors on the meta device."""
    # Of a DTensor this rank holds only its shard. Other subclasses may have no storage, or several.
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if type(tensor) not in (Tensor, Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage()


class ActivationMeter:
    """Measures the bytes that autograd saves between forward and backward.

    Storages count once however often they are saved, and as a whole, as a view keeps all of its storage alive. Storages
    that are held anyway do not count.

    Attributes:
        current: Bytes saved now.
        peak: Most bytes saved at once.
    """

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self._held = StorageSet()
        self._kept: dict[int, list[int]] = {}  # by storage: references, bytes
        # Backward frees tensors on other threads, and garbage collection may free some within `keep` itself.
        self._lock = threading.RLock()

    @contextmanager
    def measure(self, held: StorageSet) -> Iterator[None]:
        """Measure the tensors that the block saves, without the storages in `held`."""
        self._held = held
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._held = StorageSet()

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        storage = _storage(tensor)
        # `_unpack` is given whatever is returned here, so tensors that do not count are wrapped, too.
        if storage is None or storage in self._held or tracing.is_suspended():
            return _SavedTensor(tensor)
        return _CountedTensor(tensor, self, storage_address(storage), storage.nbytes())

    def keep(self, key: int, num_bytes: int) -> None:
        """Add a reference to a storage, which is counted with the first one."""
        with self._lock:
            entry = self._kept.setdefault(key, [0, num_bytes])
            entry[0] += 1
            if entry[0] == 1:
                self.current += num_bytes
                self.peak = max(self.peak, self.current)

    def release(self, key: int) -> None:
        """Drop a reference to a storage, which is no longer counted after the last one."""
        with self._lock:
            entry = self._kept[key]
            entry[0] -= 1
            if entry[0] == 0:
                self.current -= entry[1]
                del self._kept[key]


class _SavedTensor:
    """A tensor that autograd saved, with its version at that time."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached, for an output of the operation that saves it would keep its graph alive, and so itself.
        self.tensor = tensor.detach()
        self.version = version_of(tensor)


class _CountedTensor(_SavedTensor):
    __slots__ = ("key", "meter")

    def __init__(self, tensor: Tensor, meter: ActivationMeter, key: int, num_bytes: int) -> None:
        super().__init__(tensor)
        self.meter = meter
        self.key = key
        meter.keep(key, num_bytes)

    # Autograd drops what it saved without calling a hook: freeing is the only sign.
    def __del__(self) -> None:
        self.meter.release(self.key)


def _unpack(saved: _SavedTensor) -> Tensor:
    # Under hooks autograd leaves this check to them; without it gradients would be silently wrong.
    version = version_of(saved.tensor)
    if version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            f" of shape {tuple(saved.tensor.shape)} is at version {version}; expected version"
            f" {saved.version} instead. Hint: torch.autograd.set_detect_anomaly(True) finds the operation,"
            " without MemoryProfiler"
        )
    return saved.tensor
