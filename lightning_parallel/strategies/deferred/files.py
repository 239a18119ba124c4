"""Records reads of `safetensors` files while a model is built, instead of reading large tensors.

`transformers` opens a file with `safetensors.safe_open`, asks it for slices, and takes `slice[...]` when it sets a
parameter. So `AutoModel.from_pretrained(...)` in `configure_model` reads no large tensors. The same holds for
`safetensors.torch.load_file`. Later operations on such a tensor are recorded like all operations.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from lightning_parallel.checkpoint import StoredTensor
from lightning_parallel.checkpoint.weights import WeightFiles
from lightning_parallel.compat import Patches
from lightning_parallel.strategies.deferred.tensor import DeferredTensor

__all__ = ["files_deferred"]

_OPEN = "safe_open"
_PLACES = ("safetensors", "safetensors.torch", "transformers.modeling_utils")
"""Modules with this function under its name. A module imported inside the block takes it from the first module."""
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Makes transformers take slices in the calling thread: operations are recorded only in the thread of the build."""


@contextmanager
def files_deferred(threshold: int) -> Iterator[None]:
    """Defer tensors of `safetensors` files inside the block, if they have more than `threshold` elements."""
    safe_open = safetensors.safe_open

    def opened(filename: Any, framework: str = "pt", *args: Any, **kwargs: Any) -> Any:
        file = safe_open(filename, framework, *args, **kwargs)
        # Other threads have no `BuildMode`, so they could not record operations on a deferred tensor.
        if framework not in ("pt", "torch") or threading.get_ident() != thread:
            return file
        try:
            return _DeferredFile(file, filename, threshold, args, kwargs)
        except ValueError:  # a dtype that torch does not have: read without deferral
            return file

    thread, before = threading.get_ident(), os.environ.get(_ONE_BY_ONE)
    patches = Patches()
    try:
        for name in _PLACES:
            if getattr(sys.modules.get(name), _OPEN, None) is safe_open:
                patches.replace(sys.modules[name], _OPEN, opened)
        os.environ[_ONE_BY_ONE] = "1"
        yield
    finally:
        os.environ.pop(_ONE_BY_ONE, None)
        if before is not None:
            os.environ[_ONE_BY_ONE] = before
        patches.undo()
        for name in _PLACES[1:]:
            # Modules imported inside the block took the patched function, which `undo` does not know.
            if getattr(sys.modules.get(name), _OPEN, None) is opened:
                setattr(sys.modules[name], _OPEN, safe_open)


class _DeferredFile:
    """An open `safetensors` file whose large tensors are deferred."""

    def __init__(self, file: Any, path: Any, threshold: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._file = file
        self._threshold = threshold
        self._device = kwargs.get("device", args[0] if args else "cpu")
        self._source = WeightFiles([Path(os.fspath(path))])

    def __enter__(self) -> _DeferredFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensor(name, lambda: self._file.get_tensor(name))

    def get_tensors(self, *args: Any) -> Any:
        # `load_file` of newer versions calls it.
        return self._file.get_tensors(*args) if args else {name: self.get_tensor(name) for name in self._source.entries}

    def get_slice(self, name: str) -> _DeferredSlice:
        return _DeferredSlice(self._file.get_slice(name), lambda read: self._tensor(name, read))

    def _tensor(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        stored = StoredTensor.of(self._source, name)
        if stored.numel() <= self._threshold:
            return read()
        return DeferredTensor.read_later(stored).to(self._device)


class _DeferredSlice:
    """A tensor of a deferred file: deferred if the code takes the full tensor."""

    def __init__(self, real: Any, whole: Callable[[Callable[[], Tensor]], Tensor]) -> None:
        self._real = real
        self._whole = whole

    def __getitem__(self, key: Any) -> Tensor:
        return self._whole(lambda: self._real[key]) if key is Ellipsis or key == slice(None) else self._real[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
