"""Writes a sharded checkpoint: each rank writes its part to one file, all ranks agree, and the first rank commits.

    all      encode the dict, find the tensors of this rank  (in the background: copy them; training goes on)
    first    begin the folder
    all      write a file, compute checksums, sync  (in the background: in a process of its own, see `staging`)
    all      exchange the places of the tensors, or the error
    first    check that every element is there once, write the manifest, rename the folder

The files have the format of `safetensors`, https://huggingface.co/docs/safetensors. That library holds all tensors of
a file in memory, and their bytes as well. This module writes one tensor after the other.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.checkpoint.block_writer import BlockWriter
from lightning_parallel.checkpoint.document import encode
from lightning_parallel.checkpoint.folder import Folder, NewFolder
from lightning_parallel.checkpoint.manifest import BLOCK, Manifest, SavedPart, SavedTensor, check_coverage
from lightning_parallel.checkpoint.place import new_key, retried, sync_file, sync_folder
from lightning_parallel.checkpoint.reader import bands_of, bytes_of
from lightning_parallel.checkpoint.staging import StagedCopy, Staging, bytes_in
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import DisableTorchFunctionSubclass
from lightning_parallel.tensor.sharding import Range
from lightning_parallel.tracing.spans import bytes_text

__all__ = [
    "SAFETENSORS_DTYPES",
    "PartialTensor",
    "ShardedWriter",
    "TensorPart",
    "as_parts",
    "installed_versions",
    "write_file",
]

REPORT_EVERY_S = 10.0
_MOST_PENDING = 1
_MORE_BYTES = 1 << 16
SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    # Pairs of numbers: some versions of the library know no complex numbers.
    torch.complex64: "F32",
    torch.complex128: "F64",
}


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that this rank writes.

    Attributes:
        local: The elements; None if other ranks write the tensor.
        dim, ranges: The indices of the elements, see `SavedPart`.
    """

    local: Tensor | None = None
    dim: int = 0
    ranges: tuple[Range, ...] | None = None


class PartialTensor(Tensor):
    """Takes the place of a full tensor in a checkpoint's dict, without data; each rank writes its part."""

    part: TensorPart

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, part: TensorPart) -> PartialTensor:
        """Make a tensor of the full `shape` that knows this rank's part."""
        found = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)
        found.part = part
        return found


def as_parts(full: Mapping[str, Any], is_mine: bool) -> dict[str, Any]:
    """Return a state dict of tensors without data for a state dict of full tensors, which one rank writes."""
    found: dict[Any, Tensor] = {}
    state = {}
    for name, value in full.items():
        if isinstance(value, Tensor):
            part = TensorPart(value.detach() if is_mine else None)
            # Tied tensors stay one tensor. By memory: a state dict may hold several objects for one parameter.
            key = (value.data_ptr(), value.shape, value.stride()) if value.numel() > 0 else id(value)
            state[name] = found.setdefault(key, PartialTensor.of(value.shape, value.dtype, part))
        else:
            state[name] = value
    return state


@dataclass
class _Snapshot:
    """The parts that this rank writes, taken between two steps; copies of them in the background."""

    target: Folder
    document: Any
    described: dict[str, tuple[str, tuple[int, ...], bool]]
    parts: dict[str, TensorPart]
    step: int
    is_apart: bool
    copy: StagedCopy | None


class ShardedWriter:
    """Writes checkpoints of a run, one after the other; every rank calls each method at the same point.

    Args:
        group: All ranks. With `in_background`, a group without other messages.
        layout: Ranks along each axis.
        in_background: Let training go on while a checkpoint is written.
        report: Called with a line of text every few seconds of a long save, on the first rank.
    """

    def __init__(
        self,
        group: Group,
        layout: Mapping[str, int],
        in_background: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._group, self._layout = group, dict(layout)
        self._report = report if group.rank == 0 else None
        # One thread: its saves communicate, so all ranks must run them in one order.
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        # One copy is written, and others may wait.
        self._staging = Staging(_MOST_PENDING + 1) if in_background else None
        self._pending: list[Future[None]] = []
        self._failure: Exception | None = None

    def save(
        self,
        checkpoint: Mapping[str, Any],
        path: str,
        storage_options: dict[str, Any] | None = None,
        is_apart: bool = False,
    ) -> list[str]:
        """Write `checkpoint` to the folder `path`, or begin to.

        Args:
            checkpoint: The dict, the same on all ranks except for the parts of tensors.
            path: The folder, the same on all ranks.
            storage_options: Options of its file system.
            is_apart: Each rank has a folder at its own `path`, with its part. The files of all folders together are the
                checkpoint. The manifest is in the folder of the first rank.

        Returns:
            Paths in the dict of hyperparameters that have no form in the file, and were left out.

        Raises:
            TypeError, ValueError, OSError, RuntimeError: On every rank, if the checkpoint cannot be written; its files
                are removed.
        """
        snapshot, failure = None, None
        left_out: list[str] = []
        # A slow disk must not fill the memory with copies: one is written, and one may wait.
        while len(self._pending) > _MOST_PENDING or (self._pending and self._pending[0].done()):
            self._pending.pop(0).result()
        try:
            snapshot, left_out = self._snapshot(checkpoint, Folder.at(path, storage_options), is_apart)
        except Exception as error:
            # Raised with the other ranks: alone, this rank would leave them in the collectives of the save.
            failure = error
        if self._thread is None:
            comm.raise_together(failure, self._group)
            assert snapshot is not None
            self._write(snapshot)
        else:
            self._pending.append(self._thread.submit(self._write_later, snapshot, failure))
            if snapshot is not None and snapshot.copy is None:
                self._pending[-1].result()  # before a step changes the tensors
        return left_out

    def prepare(self, checkpoint: Mapping[str, Any]) -> None:
        """Make the memory of the copies in the background, before the first save; without `in_background` do nothing.

        Args:
            checkpoint: A dict as of `save`, with parts as large as in the first save.
        """
        if self._thread is None or self._staging is None:
            return
        _, tensors, _ = encode(checkpoint)
        parts = [tensor.part.local for tensor in tensors.values() if isinstance(tensor, PartialTensor)]
        mine = [local for local in parts if local is not None]
        # A little more, for tensors of callbacks.
        size = sum(map(bytes_in, mine)) + _MORE_BYTES
        self._thread.submit(self._staging.prepare, size, any(local.is_cuda for local in mine))

    def remove(self, path: str) -> None:
        """Remove the checkpoint at `path`, after the pending saves; on the first rank only.

        A failure only warns: an error would end the first rank alone, and the other ranks would wait.
        """
        if self._thread is None:
            _remove(path)
        else:
            # Kept after a failed save: the checkpoint that replaces it may be the failed one.
            self._pending.append(self._thread.submit(lambda: None if self._failure else _remove(path)))

    @property
    def failure(self) -> Exception | None:
        """The error of a checkpoint that could not be written in the background."""
        return self._failure

    def wait(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            Exception: On every rank, if a checkpoint could not be written.
        """
        pending, self._pending = self._pending, []
        for one in pending:
            one.result()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread and the process after all checkpoints are written."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._staging is not None:
            self._staging.close()

    # ------------------------------------------------------------------------------------------------------- snapshot

    def _snapshot(self, checkpoint: Mapping[str, Any], target: Folder, is_apart: bool) -> tuple[_Snapshot, list[str]]:
        document, tensors, left_out = encode(checkpoint)
        parts: dict[str, TensorPart] = {}
        for name, tensor in tensors.items():
            part = getattr(tensor, "part", None)
            if part is None and tensor.is_meta:
                raise ValueError(
                    f"`{name}` was computed from a tensor of the model in `on_save_checkpoint`. There, a sharded"
                    " checkpoint has names, shapes and dtypes, and no data, which no rank holds; entries can be"
                    " removed. Compute it from the module's own parameters on each rank, or use"
                    " `checkpoint_format='full'`"
                )
            if part is None:
                # Equal on every rank, or a tensor of the first rank, as in a full checkpoint.
                part = TensorPart(tensor.detach() if self._group.rank == 0 else None)
            if part.local is not None:
                parts[name] = part
        with DisableTorchFunctionSubclass():
            described = {
                name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), hasattr(tensor, "part"))
                for name, tensor in tensors.items()
            }
        step = checkpoint.get("global_step", 0)
        step = step if type(step) is int and step >= 0 else 0
        copy = None
        if self._staging is not None:
            names = _in_file_order(parts)
            try:
                copy = self._staging.copy([_local(parts[name]) for name in names])
            except OSError as error:
                warnings.warn(
                    f"There is no memory for copies of the tensors ({error}), so this checkpoint is written from the"
                    f" tensors, and the step of rank {self._group.rank} waits. Free memory, or set `async_save=False`",
                    stacklevel=2,
                )
            else:
                copied = zip(names, copy.tensors)
                parts = {name: TensorPart(local, parts[name].dim, parts[name].ranges) for name, local in copied}
        return _Snapshot(target, document, described, parts, step, is_apart, copy), left_out

    # --------------------------------------------------------------------------------------------------------- commit

    def _write_later(self, snapshot: _Snapshot | None, failure: Exception | None) -> None:
        # An error of the snapshot is exchanged here, because only this thread communicates in the group.
        try:
            comm.raise_together(failure, self._group)
            assert snapshot is not None
            self._write(snapshot)
        except Exception as error:
            self._failure = self._failure or error
        finally:
            if snapshot is not None and snapshot.copy is not None:
                snapshot.copy.release()

    def _write(self, snapshot: _Snapshot) -> None:
        # One key for all ranks, so that they write into one hidden folder.
        key = comm.broadcast_object(new_key(), self._group)
        new = NewFolder.found(snapshot.target, key)
        has_folder = self._group.rank == 0 or snapshot.is_apart
        with new.written() if has_folder else nullcontext():
            with comm.failing_together(self._group):
                if has_folder:
                    NewFolder.begin(snapshot.target, key)
            with comm.failing_together(self._group):
                file = new.file(self._group.ranks[self._group.rank])
                size, parts = write_file(new.work, file, snapshot.parts, self._progress(snapshot), snapshot.copy)
            # Only now may the first rank commit: all ranks have synced their files.
            everyone = comm.gather_object((file, size, parts), self._group)
            with comm.failing_together(self._group):
                if everyone is not None:
                    self._commit(new, snapshot, everyone)
                elif has_folder:
                    new.take_part(file, size)

    def _progress(self, snapshot: _Snapshot) -> Callable[[int], None] | None:
        report = self._report
        if report is None:
            return None
        total = sum(bytes_in(_local(part)) for part in snapshot.parts.values())
        written, due = 0, time.monotonic() + REPORT_EVERY_S

        def seen(count: int) -> None:
            nonlocal written, due
            written += count
            if time.monotonic() >= due:
                due += REPORT_EVERY_S
                share = f"{bytes_text(written)} of {bytes_text(total)}"
                report(f"Saving {snapshot.target.name}: {share} on rank zero ({written / total:.0%})")

        return seen

    def _commit(
        self, new: NewFolder, snapshot: _Snapshot, everyone: Sequence[tuple[str, int, dict[str, SavedPart]]]
    ) -> None:
        tensors = {
            name: SavedTensor(dtype, shape, is_sharded, tuple(parts[name] for _, _, parts in everyone if name in parts))
            for name, (dtype, shape, is_sharded) in snapshot.described.items()
        }
        problems = check_coverage(tensors)
        if problems:
            raise RuntimeError("The checkpoint is incomplete and was removed:\n" + "\n".join(problems))
        new.commit(
            Manifest(
                snapshot.document,
                tensors,
                {file: size for file, size, _ in everyone},
                self._layout,
                installed_versions("lightning_parallel", "torch", "lightning", "pytorch-lightning"),
                snapshot.step,
                time.time(),
            ),
            everyone[0][0] if snapshot.is_apart else None,
        )


def _remove(path: str) -> None:
    try:
        Folder.at(path).remove()
    except OSError as error:
        warnings.warn(f"Cannot remove the checkpoint {path}: {error}. It takes space until it is removed", stacklevel=2)


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages by name; a package that only exists as sources is left out."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


# --------------------------------------------------------------------------------------------------------------- files


def write_file(
    folder: Folder,
    file: str,
    parts: Mapping[str, TensorPart],
    seen: Callable[[int], None] | None = None,
    copy: StagedCopy | None = None,
) -> tuple[int, dict[str, SavedPart]]:
    """Write parts of tensors to a `safetensors` file, one after the other.

    Args:
        folder: The folder.
        file: Name of the file.
        parts: The parts, by name of the tensor.
        seen: Called with the number of bytes of each block.
        copy: The copy of exactly these parts. Its process writes to a folder of this host.

    Returns:
        The size of the file, and the place of each part in it.
    """
    names = _in_file_order(parts)
    head, path = _head(names, parts), folder.file(file)

    def write() -> list[tuple[int, list[int]]]:
        if copy is not None and folder.is_local:
            written = copy.write(path, head, BLOCK, seen)
        else:
            with open(path, "wb") if folder.is_local else folder.fs.open(path, "wb") as stream:
                stream.write(head)
                written = [_write_part(stream, parts[name], seen) for name in names]
                sync_file(stream)
        if folder.is_local:
            sync_folder(folder.path)
        return written

    # Each attempt writes the file from its beginning.
    begin, found = len(head), {}
    for name, (size, checksums) in zip(names, retried(write)):
        found[name] = SavedPart(file, begin, size, parts[name].dim, parts[name].ranges, tuple(checksums))
        begin += size
    return begin, found


def _in_file_order(parts: Mapping[str, TensorPart]) -> list[str]:
    # The library expects tensors without gaps, each at a multiple of its element size: large elements come first.
    return sorted(parts, key=lambda name: (-_local(parts[name]).element_size(), name))


def _head(names: Sequence[str], parts: Mapping[str, TensorPart]) -> bytes:
    """Return the beginning of a file: the length of its header in eight bytes, and the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        local, part = _local(parts[name]), parts[name]
        size = bytes_in(local)
        dtype, shape = _stored_as(local)
        key = name if part.ranges is None else f"{name}[{part.dim}: {', '.join(f'{a}..{b}' for a, b in part.ranges)}]"
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    # The data begin at a multiple of eight bytes, as in files of the library.
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def _stored_as(local: Tensor) -> tuple[str, list[int]]:
    """Return a dtype and a shape for the header of the file; the manifest holds the real dtype and shape."""
    if local.dtype not in SAFETENSORS_DTYPES:
        return "U8", [*local.shape, local.element_size()]
    return SAFETENSORS_DTYPES[local.dtype], [*local.shape, 2] if local.is_complex() else [*local.shape]


def _local(part: TensorPart) -> Tensor:
    assert part.local is not None
    return part.local


def _write_part(stream: Any, part: TensorPart, seen: Callable[[int], None] | None) -> tuple[int, list[int]]:
    writer = BlockWriter(stream, BLOCK, seen)
    # One tensor at a time in the host's memory.
    for band in bands_of(_local(part), BLOCK):
        writer.write(memoryview(bytes_of(band).data))
    return writer.end_part()
