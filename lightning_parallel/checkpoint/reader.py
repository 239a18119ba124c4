"""Reads a sharded checkpoint: the part of each tensor that a rank needs, checked against its checksums.

    saved by 2 ranks, rows       read by 2 ranks, columns
    [ part 0 ]                   [  |  ]      each rank reads the blocks of both parts that hold some of its columns,
    [ part 1 ]                   [  |  ]      and checks each block alone

A tensor that is not needed is not read. `assemble` builds a tensor from boxes. A box is a part of this format, a chunk
of `torch.distributed.checkpoint`, or a mapped file.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.checkpoint.document import decode
from lightning_parallel.checkpoint.folder import MANIFEST, Folder, find
from lightning_parallel.checkpoint.manifest import BLOCK, Manifest, SavedPart, dtype_named
from lightning_parallel.checkpoint.place import retried
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import DisableTorchFunctionSubclass, dispatch_modes_suspended
from lightning_parallel.tensor.sharding import Range, Shard

__all__ = [
    "Box",
    "SavedCheckpoint",
    "StoredTensor",
    "TensorSource",
    "assemble",
    "bands_of",
    "bytes_of",
    "new_tensor",
    "take_part",
]

_OWN_PAGES = 1 << 20

Array = np.ndarray[Any, np.dtype[Any]]


class Box(NamedTuple):
    """A block of a tensor that is stored in one piece.

    Attributes:
        offsets: First index of the block along each dimension of the tensor.
        shape: Shape of the block.
        fill: Fills a tensor with indices `begin` to `end` of its dimension `dim`: `fill(target, dim, begin, end)`.
    """

    offsets: Sequence[int]
    shape: Sequence[int]
    fill: Callable[[Tensor, int, int, int], None]

    @classmethod
    def of(cls, full: Tensor) -> Box:
        """Return the box of a full tensor in memory, or in a mapped file."""
        whole = full.reshape(full.shape or (1,))
        return cls([0] * full.dim(), full.shape, lambda target, dim, a, b: _copy(target, whole.narrow(dim, a, b - a)))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source.view(target.shape) if source.shape != target.shape else source)


def assemble(shape: Sequence[int], dtype: torch.dtype, rule: Shard | None, rank: int, boxes: Iterable[Box]) -> Tensor:
    """Build a tensor, or its shard on `rank` by `rule`, from the boxes that hold some of it.

    Args:
        shape: Shape of the full tensor.
        dtype: Its dtype.
        rule: How the tensor is sharded; None for the full tensor.
        rank: Position of the rank.
        boxes: The boxes, which cover the tensor; a box without wanted indices is not read.
    """
    result = new_tensor(shape if rule is None else rule.local_shape(shape, rank), dtype)
    if result.numel() == 0:
        return result
    # Boxes store a scalar as one element.
    whole = result.view(result.shape or (1,))
    dim, wanted = _wanted(shape, rule, rank)
    for box in boxes:
        offsets, extent = tuple(box.offsets) or (0,), tuple(box.shape) or (1,)
        target = whole
        for other, (offset, size) in enumerate(zip(offsets, extent)):
            target = target if other == dim else target.narrow(other, offset, size)
        for start, stop, at in _with_offsets(wanted):
            low, high = max(start, offsets[dim]), min(stop, offsets[dim] + extent[dim])
            if low < high:
                part = target.narrow(dim, at + low - start, high - low)
                box.fill(part, dim, low - offsets[dim], high - offsets[dim])
    return result


def _wanted(shape: Sequence[int], rule: Shard | None, rank: int) -> tuple[int, Sequence[Range]]:
    """Return the dimension along which a tensor is sharded, and the indices of `rank` along it."""
    sizes = tuple(shape) or (1,)
    return (0, ((0, sizes[0]),)) if rule is None else (rule.dim % len(sizes), rule.ranges[rank])


class SavedCheckpoint:
    """A sharded checkpoint.

    Args:
        folder: Its folder.
        manifest: Its content.

    Attributes:
        bytes_read: Bytes of tensors that were read so far.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.bytes_read = 0
        self._streams: dict[str, Any] = {}
        # The last block that was read for a slice: often the next slice begins in the same block.
        self._block: tuple[SavedPart, int, Array] | None = None

    @classmethod
    def open(
        cls, path: str, group: Group | None = None, storage_options: dict[str, Any] | None = None
    ) -> SavedCheckpoint:
        """Open the checkpoint at `path`, or the latest checkpoint in this folder, and check that all its files exist.

        Args:
            path: A folder, as path or URL.
            group: Ranks that open it together: all ranks get the manifest that the first rank reads.
            storage_options: Options for fsspec.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If the manifest is damaged, or files are missing or have another size.
        """
        wanted = Folder.at(path, storage_options)
        for attempt in range(3):
            found, content = (
                _read_manifest(wanted) if group is None else comm.broadcast_from(lambda: _read_manifest(wanted), group)
            )
            folder = Folder(wanted.fs, found)
            opened = cls(folder, Manifest.from_json(content, folder.file(MANIFEST)))
            try:
                opened.check_files()
                break
            except ValueError:
                # A running training may have replaced the checkpoint meanwhile. A group of ranks looks only once,
                # because its ranks would have to agree on another attempt.
                if group is not None or attempt == 2 or _read_manifest(wanted) == (found, content):
                    raise
        return opened

    def check_files(self) -> None:
        """Check that every file exists and has its size.

        Raises:
            ValueError: With the first tensor of each file that is missing or has another size.
        """
        problems = []
        for file, expected in self.manifest.files.items():
            size = self.folder.size(file)
            if size != expected:
                tensors = [
                    name for name, saved in self.manifest.tensors.items() if any(p.file == file for p in saved.parts)
                ]
                held = f", with `{tensors[0]}` and {len(tensors) - 1} more tensors" if tensors else ""
                what = "is missing" if size is None else f"must have {expected} bytes; got {size}"
                problems.append(f"  {self.folder.file(file)}{held and held + ','} {what}")
        if problems:
            raise ValueError(f"The checkpoint {self.folder} is damaged:\n" + "\n".join(problems))

    def checkpoint(self) -> Any:
        """Return the checkpoint's dict; tensors of the model and its optimizers are read at their use."""
        return self.decoded(self._tensor)

    def decoded(self, tensor: Callable[[str], Tensor]) -> Any:
        """Return the checkpoint's dict, with the values of `tensor` for the names of tensors.

        Raises:
            ValueError: If the dict is damaged.
        """
        try:
            # The cache gives a tied tensor as one object under all its names.
            return decode(self.manifest.document, cache(tensor))
        except ValueError as error:
            if str(self.folder) in str(error):
                raise
            raise ValueError(f"The checkpoint {self.folder} is damaged: {error}") from error

    def facts(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        """Return the shape and the dtype of a tensor.

        Raises:
            ValueError: If the checkpoint holds no tensor of this name.
        """
        if name not in self.manifest.tensors:
            raise ValueError(f"The checkpoint {self.folder} names a tensor `{name}` that it does not hold")
        saved = self.manifest.tensors[name]
        return saved.shape, dtype_named(saved.dtype)

    def _tensor(self, name: str) -> Tensor:
        self.facts(name)
        return StoredTensor.of(self, name) if self.manifest.tensors[name].is_sharded else self.read(name)

    # -------------------------------------------------------------------------------------------------------- tensors

    def read(self, name: str, rule: Shard | None = None, rank: int = 0) -> Tensor:
        """Read a tensor, or the part of it that `rank` has by `rule`.

        Raises:
            ValueError: If the bytes differ from the written bytes.
        """
        saved = self.manifest.tensors[name]
        dim, wanted = _wanted(saved.shape, rule, rank)
        parts = (_PartBoxes(self, name, part, dim, wanted) for part in saved.parts)
        boxes = (box for part in parts for box in part.boxes())
        return assemble(saved.shape, dtype_named(saved.dtype), rule, rank, boxes)

    # ---------------------------------------------------------------------------------------------------------- bytes

    def _stream(self, file: str) -> Any:
        if file not in self._streams:
            path = self.folder.file(file)
            # Kept open until `close`: one file holds parts of several tensors.
            # Without a buffer, so that bytes go from the file directly into the memory of the tensor.
            local = partial(open, path, "rb", buffering=0)
            self._streams[file] = local() if self.folder.is_local else self.folder.fs.open(path, "rb")
        return self._streams[file]

    def fill(self, name: str, part: SavedPart, dim: int, begin: int, target: Tensor) -> None:
        """Fill `target` from a part: indices of the dimension `dim` from `begin` on, and all of the other dimensions.

        Raises:
            ValueError: If a block of the part differs from the written block.
        """
        # Bytes go directly into `target` if its memory is contiguous.
        memory = target if target.is_contiguous() else new_tensor(target.shape, target.dtype)
        shape = part.shape(self.manifest.tensors[name].shape) or (1,)
        inner = prod(shape[dim + 1 :]) * memory.dtype.itemsize
        rows = bytes_of(memory).reshape(-1, target.shape[dim] * inner)
        stride = shape[dim] * inner
        # Several short runs in one read, but never more than a block.
        step = max(1, BLOCK // stride)
        for first in range(0, len(rows), step):
            group, at = rows[first : first + step], begin * inner + first * stride
            if len(group) == 1:
                self._read_bytes(name, part, at, group[0])
                continue
            span = np.empty((len(group) - 1) * stride + group.shape[1], np.uint8)
            self._read_bytes(name, part, at, span)
            # The span also holds the bytes between the runs, which the strides skip.
            group[:] = np.lib.stride_tricks.as_strided(span, group.shape, (stride, 1))
        if memory is not target:
            target.copy_(memory)

    def _read_bytes(self, name: str, part: SavedPart, begin: int, data: Array) -> None:
        """Fill `data` with the bytes of a part from `begin` on, and check each block that holds some of them."""
        end = begin + len(data)
        for first in range(begin // BLOCK * BLOCK, end, BLOCK):
            last = min(first + BLOCK, part.num_bytes)
            if begin <= first and last <= end:
                self._read_block(name, part, first, data[first - begin : last - begin])
                continue
            # A checksum covers a full block, so a slice of a block needs all its bytes.
            if self._block is None or self._block[:2] != (part, first):
                block = np.empty(last - first, np.uint8)
                self._read_block(name, part, first, block)
                self._block = part, first, block
            low, high = max(begin, first), min(end, last)
            data[low - begin : high - begin] = self._block[2][low - first : high - first]

    def _read_block(self, name: str, part: SavedPart, first: int, data: Array) -> None:
        """Fill `data` with the block at byte `first` of a part.

        Raises:
            ValueError: If the block differs from the written block.
        """
        found = self.checksum_of(part, first, data)
        expected = part.checksums[first // BLOCK]
        if found != expected:
            begin = part.begin + first
            raise ValueError(
                f"{self.folder.file(part.file)} is damaged: bytes {begin} to {begin + len(data)}, of the tensor"
                f" `{name}`, differ from the written bytes (their checksum must be {expected:08x}; got {found:08x})."
                " Resume from another checkpoint [LP036]"
            )

    def checksum_of(self, part: SavedPart, first: int, data: Array) -> int:
        """Fill `data` with the bytes of a part from `first` on; return their checksum."""

        def read() -> None:
            stream = self._stream(part.file)
            # In each attempt: a failed read may have moved the position.
            stream.seek(part.begin + first)
            if _fill(stream, memoryview(data.data)) < len(data):
                raise ValueError(
                    f"{self.folder.file(part.file)} ends before byte {part.begin + first + len(data)}. It is damaged;"
                    " load another checkpoint"
                )

        retried(read)
        self.bytes_read += len(data)
        # At once, while the block is in the processor's cache.
        return zlib.crc32(data.data)

    def close(self) -> None:
        """Close its files."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._block = None


def _read_manifest(wanted: Folder) -> tuple[str, bytes]:
    """Return the folder of the checkpoint at `wanted`, and the content of its manifest."""
    folder = find(wanted)
    if folder is None:
        raise FileNotFoundError(f"{wanted} must be a sharded checkpoint; got {_what_is_at(wanted)}")
    return folder.path, folder.read(MANIFEST)


def _fill(stream: Any, view: memoryview) -> int:
    """Read until `view` is full or the file ends; return the number of bytes."""
    at = 0
    while at < len(view):
        count = stream.readinto(view[at:])
        if not count:
            break
        at += count
    return at


def _what_is_at(folder: Folder) -> str:
    if not folder.fs.exists(folder.path):
        return "nothing"
    if not folder.fs.isdir(folder.path):
        return "a file. If it is a checkpoint, `lightning-parallel checkpoint inspect` shows it"
    names = [str(path) for path in folder.fs.ls(folder.path, detail=False)]
    if any(name.endswith(".safetensors") for name in names):
        return f"a folder without `{MANIFEST}`. Its save was not finished"
    if any(name.endswith(".ckpt") for name in names):
        return "a folder of full checkpoints. `lightning-parallel checkpoint inspect` shows them"
    return f"a folder without `{MANIFEST}`"


def new_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor with arbitrary values; a large tensor has its own pages.

    On the heap, many short-lived tensors of different sizes would leave holes that are too small for the next tensor.
    """
    size = prod(shape) * dtype.itemsize
    if size < _OWN_PAGES or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    # Private: a forked process must not write into this tensor.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor keeps the map alive.
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(tuple(shape))


def bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """View the memory of a contiguous tensor as bytes."""
    flat = tensor.reshape(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return flat.view(torch.uint8).numpy()


def _with_offsets(ranges: Sequence[Range] | None) -> Iterator[tuple[int, int, int]]:
    """Yield each range with its offset in the part: (start, stop, offset)."""
    at = 0
    for start, stop in ranges or ():
        yield start, stop, at
        at += stop - start


class _PartBoxes:
    """The boxes of one part of a tensor, one for each of its ranges.

    Args:
        saved: The checkpoint.
        name: The tensor.
        part: The part.
        dim: The dimension of the wanted slices.
        wanted: The wanted indices of this dimension.
    """

    def __init__(self, saved: SavedCheckpoint, name: str, part: SavedPart, dim: int, wanted: Sequence[Range]) -> None:
        self.saved = saved
        self.name = name
        self.part = part
        self.shape = saved.manifest.tensors[name].shape or (1,)
        ranges = part.ranges if part.ranges is not None else ((0, self.shape[part.dim]),)
        self.ranges = list(_with_offsets(ranges))
        self.is_along = part.dim == dim
        bounds = [
            (max(start, low), min(stop, high), at - start) for start, stop, at in self.ranges for low, high in wanted
        ]
        slices = [(low + shift, high + shift) for low, high, shift in bounds if low < high] if self.is_along else wanted
        # Slices of each row share the blocks of the row, so all slices are read at once.
        has_rows = prod(self.shape[:dim]) > 1
        self.is_direct = (self.is_along or len(self.ranges) == 1) and not (has_rows and len(slices) > 1)
        self.first = min((low for low, _ in slices), default=0)
        self.last = max((high for _, high in slices), default=0)
        self.loaded: Tensor | None = None

    def boxes(self) -> Iterator[Box]:
        """Yield the box of each range."""
        for start, stop, at in self.ranges:
            offsets, extent = [0] * len(self.shape), list(self.shape)
            offsets[self.part.dim], extent[self.part.dim] = start, stop - start
            yield Box(offsets, extent, partial(self._fill, at, stop - start))

    def _fill(self, at: int, size: int, target: Tensor, dim: int, begin: int, end: int) -> None:
        first = begin + at if self.is_along else begin
        if self.is_direct:
            self.saved.fill(self.name, self.part, dim, first, target)
            return
        if self.loaded is None:
            shape = list(self.part.shape(self.shape))
            shape[dim] = self.last - self.first
            self.loaded = new_tensor(shape, target.dtype)
            self.saved.fill(self.name, self.part, dim, self.first, self.loaded)
        found = self.loaded.narrow(dim, first - self.first, end - begin)
        target.copy_(found if self.is_along else found.narrow(self.part.dim, at, size))


# ------------------------------------------------------------------------------------------------------- lazy tensors

_FACTS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "ndim", "requires_grad", "layout", "is_meta", "grad_fn")
}
_FACTS |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__, Tensor.stride}
_FACTS |= {Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous}
_DEVICE = Tensor.device.__get__


class TensorSource(Protocol):
    """A file or folder from which tensors are read."""

    def facts(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        """Return the shape and the dtype of a tensor."""

    def read(self, name: str, rule: Shard | None = None, rank: int = 0) -> Tensor:
        """Read a tensor, or the part of it that `rank` has by `rule`."""


class StoredTensor(Tensor):
    """A tensor of a checkpoint, or a rank's shard of it, that is read again for each computation."""

    read: Callable[[], Tensor]
    source: TensorSource
    stored_name: str
    rule: Shard | None
    rank: int

    @classmethod
    def of(cls, source: TensorSource, name: str, rule: Shard | None = None, rank: int = 0) -> StoredTensor:
        """Return the tensor called `name`, or its shard on `rank` by `rule`."""
        shape, dtype = source.facts(name)
        shape = shape if rule is None else rule.local_shape(shape, rank)
        found = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)

        def read() -> Tensor:
            # Modes may record the operations of a model. Reading a file must not be recorded.
            with dispatch_modes_suspended():
                return source.read(name, rule, rank)

        found.read = read
        found.source, found.stored_name, found.rule, found.rank = source, name, rule, rank
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The tensor itself is on `meta`, but its values are read into the host's memory.
        if func == _DEVICE:
            return torch.device("cpu")
        # The tensor on `meta` knows these facts, so nothing is read for them.
        if func in _FACTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = _read_all(args), _read_all(kwargs or {})
        return func(*args, **kwargs)


def _read_all(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.read()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_read_all, value))
    return {key: _read_all(entry) for key, entry in value.items()} if type(value) is dict else value


def take_part(value: Tensor, rule: Shard, rank: int) -> Tensor:
    """Return the shard of a full tensor on `rank` by `rule`; a stored tensor is not read."""
    if isinstance(value, StoredTensor):
        if value.shape[rule.dim] != rule.full_size:
            return rule.split(value, rank)  # raises
        return StoredTensor.of(value.source, value.stored_name, rule, rank)
    return rule.split(value, rank)


def bands_of(value: Tensor, num_bytes: int) -> Iterator[Tensor]:
    """Yield a tensor in runs of its first dimension of about `num_bytes`, contiguous and on the CPU.

    Only the current run of a stored tensor is in memory, unless it is sharded along another dimension.
    """
    row_bytes = value.element_size() * prod(value.shape[1:])
    step = max(1, num_bytes // max(1, row_bytes))
    is_cut_elsewhere = isinstance(value, StoredTensor) and value.rule is not None and value.rule.dim != 0
    if not isinstance(value, StoredTensor) or value.dim() == 0 or is_cut_elsewhere:
        yield value.detach().cpu().contiguous()
        return
    rows = value.source.facts(value.stored_name)[0][0]
    for first, last in ((0, rows),) if value.rule is None else value.rule.ranges[value.rank]:
        for start in range(first, last, step):
            stop = min(last, start + step)
            # A rule for three ranks: the middle rank has the wanted rows.
            rule = Shard(0, (((0, start),), ((start, stop),), ((stop, rows),)))
            yield value.source.read(value.stored_name, rule, 1)
