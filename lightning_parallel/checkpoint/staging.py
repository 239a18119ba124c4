"""Copies tensors to memory that a process of its own writes to a file, so that training goes on meanwhile.

    step      copy tensors to free memory                    step              step
    process                               checksums, write, sync               ...

The memory is shared with the process, and used again by later saves. `Staging.prepare` makes it before the first save,
which would otherwise take as long as a save without a copy. Training waits only for the copy. Checksums and writes do
not hold the interpreter of the training process, see `block_writer`.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint import block_writer
from lightning_parallel.compat.torch import copy_all_

__all__ = ["SILENCE_S", "StagedCopy", "Staging", "bytes_in"]

SILENCE_S = 600.0
"""Seconds without news of a file after which its storage counts as gone."""
_PATIENCE_S = 5.0
"""Seconds for the end of the process after its kill."""
_TOUCHED = 1 << 26
"""Bytes of memory to touch at once."""
_PORTABLE = 1
"""Flag of `cudaHostRegister`: the memory is pinned for all devices of the process."""


class Staging:
    """Memory of copies, and the process that writes them.

    Args:
        count: The most copies at one time. Each has its own memory, as large as the largest copy so far.
    """

    def __init__(self, count: int) -> None:
        self._memories = [_Memory() for _ in range(count)]
        self._free = list(range(count))
        self._process: _WriterProcess | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, unless it lives. A save calls it as well."""
        if self._process is None or not self._process.is_usable:
            self._process = _WriterProcess([memory.descriptor for memory in self._memories])

    def prepare(self, size: int, on_device: bool) -> None:
        """Make memory of `size` bytes for the first copy, and start the process; any thread may call it.

        A failure is left to `copy`: the memory may be there by then.

        Args:
            size: Bytes.
            on_device: Whether the tensors are on a GPU, to which the memory is then pinned.
        """
        with self._lock:
            memory = self._memories[self._free[0]] if self._free else None
        if memory is not None:
            with suppress(OSError, RuntimeError):
                memory.prepare(size, on_device)
        self.start()

    def copy(self, tensors: Sequence[Tensor]) -> StagedCopy:
        """Copy tensors one behind the other; call it at most `count` times without `StagedCopy.release`.

        Args:
            tensors: On any device. Their element sizes do not grow, so that each is aligned.

        Raises:
            OSError: If there is no memory for the copies.
        """
        size = sum(map(bytes_in, tensors))
        with self._lock:
            # Memory that is large enough is also touched: new pages take longer than the copy.
            which = min(self._free, key=lambda one: (self._memories[one].size < size, self._memories[one].size))
            self._free.remove(which)
        try:
            return StagedCopy(self, which, self._memories[which].filled(tensors, size))
        except BaseException:
            self.take_back(which)
            raise

    def take_back(self, which: int) -> None:
        """Let another copy have this memory."""
        with self._lock:
            self._free.append(which)

    def write(
        self, path: str, head: bytes, which: int, sizes: Sequence[int], block: int, seen: Callable[[int], None] | None
    ) -> list[list[int]]:
        """Write `head` and a copy to a file in the process; see `StagedCopy.write`."""
        self.start()
        assert self._process is not None
        request = {"path": path, "head": head.decode("latin-1"), "memory": which, "sizes": list(sizes), "block": block}
        return self._process.write(request, seen)

    def close(self) -> None:
        """End the process, and free the memory; a second call does nothing."""
        if self._process is not None:
            self._process.close()
            self._process = None
        for memory in self._memories:
            memory.close()


class StagedCopy:
    """Copies of tensors, one behind the other.

    Attributes:
        tensors: The copies.
    """

    def __init__(self, staging: Staging, which: int, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._staging, self._which = staging, which

    def write(
        self, path: str, head: bytes, block: int, seen: Callable[[int], None] | None = None
    ) -> list[tuple[int, list[int]]]:
        """Write a file in the process, and sync it.

        Args:
            path: The file.
            head: Bytes before the tensors.
            block: Bytes under one checksum.
            seen: Called with the number of bytes of each large piece.

        Returns:
            Bytes and checksums of each tensor.

        Raises:
            OSError: If the file cannot be written, or the process is silent for `SILENCE_S`.
            RuntimeError: If the process has ended, or has another error.
        """
        sizes = [tensor.nbytes for tensor in self.tensors]
        return list(zip(sizes, self._staging.write(path, head, self._which, sizes, block, seen)))

    def release(self) -> None:
        """Let another copy have the memory; the tensors must not be read any more."""
        self.tensors = []
        self._staging.take_back(self._which)


class _Memory:
    """Memory that another process can map by its descriptor."""

    def __init__(self) -> None:
        self.size = 0
        self.descriptor = _nameless_file()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        self._lock = threading.Lock()
        self._views: list[Tensor] = []
        self._form: list[tuple[torch.dtype, torch.Size]] = []

    def filled(self, tensors: Sequence[Tensor], size: int) -> list[Tensor]:
        """Return copies of tensors, which have `size` bytes together."""
        on_device = torch.cuda.is_initialized() and any(tensor.is_cuda for tensor in tensors)
        with self._lock:
            self._fit(size, on_device)
        form = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if form != self._form:
            # Of many small tensors, views take longer than copies. A later save has tensors of the same form.
            self._views, self._form = self._views_of(form), form
        # In one call: of many small tensors, a call for each would take longer than the copies.
        if tensors:
            with torch.no_grad():
                copy_all_(self._views, tensors, non_blocking=on_device)
        # One wait for all copies: they are asynchronous, and the next step would overwrite their sources.
        if on_device:
            torch.cuda.current_stream().synchronize()
        return self._views

    def prepare(self, size: int, on_device: bool) -> None:
        """Make and touch `size` bytes, as a first copy would; meanwhile other threads run."""
        with self._lock:
            self._fit(size, on_device)
            # One byte of each page: the system maps a page when it is first read. In parts, for which torch takes no
            # further threads.
            for part in self._bytes.split(_TOUCHED):
                part[:: mmap.PAGESIZE].sum()

    def _fit(self, size: int, on_device: bool) -> None:
        if size > self.size:
            self._grow(size)
        if on_device and not self._is_pinned:
            self._pin()

    def _views_of(self, form: Sequence[tuple[torch.dtype, torch.Size]]) -> list[Tensor]:
        views, at = [], 0
        for dtype, shape in form:
            flat = self._bytes[at : at + shape.numel() * dtype.itemsize]
            views.append(flat.view(dtype).view(shape))
            at += len(flat)
        return views

    def _grow(self, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            # Raises if there is no space. Without it, the first write to a missing page would kill the process.
            try:
                os.posix_fallocate(self.descriptor, self.size, size - self.size)
            except OSError:
                os.ftruncate(self.descriptor, self.size)
                raise
        else:
            os.ftruncate(self.descriptor, size)
        self._unpin()
        # They keep the map of the smaller memory alive.
        self._views, self._form = [], []
        # The tensor keeps the map alive.
        self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        self.size = size

    def _pin(self) -> None:
        if self.size == 0:
            return
        status = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.size, _PORTABLE))
        if status != 0:
            raise RuntimeError(
                f"{self.size / 2**20:.1f} MiB of memory for copies of tensors cannot be pinned: CUDA error {status}."
                " Raise the limit of locked memory (`ulimit -l unlimited`), or set `async_save=False`"
            )
        self._is_pinned = True

    def _unpin(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._is_pinned = False

    def close(self) -> None:
        self._unpin()
        self._views, self._form, self._bytes, self.size = [], [], torch.empty(0, dtype=torch.uint8), 0
        # Once: by a second close, the number may be that of a file of the run.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def bytes_in(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor; a tensor of a checkpoint is not read for it."""
    return tensor.numel() * tensor.element_size()


def _nameless_file() -> int:
    """Return the descriptor of memory without a name in any folder, of which nothing is left after its last user."""
    if hasattr(os, "memfd_create"):
        found = [os.memfd_create("checkpoint")]
    else:
        with tempfile.TemporaryFile() as file:
            found = [os.dup(file.fileno())]
    # A run without standard streams has their numbers free, which the pipes of the process take.
    while found[-1] < 3:
        found.append(os.dup(found[-1]))
    for low in found[:-1]:
        os.close(low)
    return found[-1]


class _WriterProcess:
    """A process that runs `block_writer`."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        # Isolated and without `site`: the process needs no package, and no file beside it may replace a module.
        command = [sys.executable, "-I", "-S", block_writer.__file__, str(os.getpid()), *map(str, descriptors)]
        # A session of its own: a signal to the group of the run, as SLURM sends before its time limit, is for the run.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=tuple(descriptors),
            start_new_session=True,
        )
        self._received = b""
        self._is_stuck = False

    @property
    def is_usable(self) -> bool:
        return not self._is_stuck and self._process.poll() is None

    def write(self, request: dict[str, Any], seen: Callable[[int], None] | None) -> list[list[int]]:
        self._send(json.dumps(request).encode() + b"\n")
        told = 0
        while True:
            answer = self._answer(request["path"])
            if "error" in answer:
                if answer["errno"] is None:
                    raise RuntimeError(f"{request['path']} cannot be written: {answer['error']}")
                raise OSError(answer["errno"], answer["error"], request["path"])
            if seen is not None and answer["written"] > told:
                seen(answer["written"] - told)
            told = answer["written"]
            if "checksums" in answer:
                checksums: list[list[int]] = answer["checksums"]
                return checksums

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(line)
        try:
            while view:
                view = view[self._process.stdin.write(view) or 0 :]
        except BrokenPipeError:
            raise self._ended() from None

    def _answer(self, path: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            if not wait([self._process.stdout.fileno()], SILENCE_S):
                # The next save has a new process: this one may stay in a call of the storage after its kill.
                self._is_stuck = True
                self._process.kill()
                raise TimeoutError(
                    errno.ETIME, f"nothing was written for {SILENCE_S:g} s; the storage does not answer", path
                )
            more = self._process.stdout.read(1 << 16)
            if not more:
                raise self._ended()
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> RuntimeError:
        return RuntimeError(
            f"The process that writes checkpoints has ended with the status {self._process.wait()} before a file was"
            " complete. A negative status is a signal: 9 comes from the system if memory runs out"
        )

    def close(self) -> None:
        """End the process; it writes nothing now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        # Each file is complete before `close`, so that an end at once loses nothing.
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
