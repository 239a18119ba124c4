"""Reads a sharded checkpoint: of each tensor the part that a rank needs, and each part against its checksum.

    saved by 2 ranks, rows       read by 2 ranks, columns
    [ part 0 ]                   [  |  ]      each reads half of each row of both parts, and computes
    [ part 1 ]                   [  |  ]      the checksum of that: the sum over the ranks is that of the part

A part that a rank reads whole is checked at once; the others by `check_shared_parts`, all ranks of the tensor axis
together. A tensor that is not needed is not read.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, reduce
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.checkpoint.checksum import WORD, add_checksums, checksum, checksum_of_runs
from lightning_parallel.checkpoint.document import decode
from lightning_parallel.checkpoint.folder import MANIFEST, Folder, find, retried
from lightning_parallel.checkpoint.manifest import Manifest, SavedPart, dtype_named
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import DisableTorchFunctionSubclass, dispatch_modes_suspended
from lightning_parallel.tensor.sharding import Range, Shard

__all__ = ["SavedCheckpoint", "StoredTensor", "TensorSource", "bands_of", "bytes_of", "new_tensor", "take_part"]


_OWN_PAGES = 1 << 20

_BLOCK = 1 << 20
"""Bytes that are read at a time."""


class SavedCheckpoint:
    """A sharded checkpoint.

    Args:
        folder: Its folder.
        manifest: What is in it.

    Attributes:
        bytes_read: Bytes of tensors that were read so far.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.bytes_read = 0
        self._streams: dict[str, Any] = {}
        self._shared: dict[tuple[str, int], dict[Range, tuple[int, int]]] = {}

    @classmethod
    def open(
        cls, path: str, group: Group | None = None, storage_options: dict[str, Any] | None = None
    ) -> SavedCheckpoint:
        """Open the checkpoint at `path`, or the latest of a folder of them; checks that all its files are there.

        Args:
            path: A folder, as path or URL.
            group: Ranks that open it together: all get what the first one finds.
            storage_options: For fsspec.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If the manifest is damaged, or files are not there or of another size.
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
                # A run that goes on may have replaced it meanwhile; ranks that wait for each other look once.
                if group is not None or attempt == 2 or _read_manifest(wanted) == (found, content):
                    raise
        return opened

    def check_files(self) -> None:
        """Check that every file is there, in its size.

        Raises:
            ValueError: With the first tensor of each that is not.
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
        """Return the checkpoint's dict; tensors of the model and its optimizers are read when they are used."""
        return self.decoded(self._tensor)

    def decoded(self, tensor: Callable[[str], Tensor]) -> Any:
        """Return the checkpoint's dict, with what `tensor` gives for the names of tensors.

        Raises:
            ValueError: If the dict is damaged.
        """
        try:
            return decode(self.manifest.document, cache(tensor))
        except ValueError as error:
            if str(self.folder) in str(error):
                raise
            raise ValueError(f"The checkpoint {self.folder} is damaged: {error}") from error

    def facts(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        """Return the shape and the dtype of a tensor.

        Raises:
            ValueError: If it holds no such.
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
            ValueError: If what is read is not what was written.
        """
        saved = self.manifest.tensors[name]
        shape = torch.Size(saved.shape) if rule is None else rule.local_shape(saved.shape, rank)
        result = new_tensor(shape, dtype_named(saved.dtype))
        for number, part in enumerate(saved.parts):
            if rule is None:
                self._read_whole(name, part, result)
            else:
                self._read_slices(name, number, result, rule, rank)
        return result

    def _read_whole(self, name: str, part: SavedPart, result: Tensor) -> None:
        saved = self.manifest.tensors[name]
        if part.ranges is None or len(saved.parts) == 1 and part.ranges == ((0, saved.shape[part.dim]),):
            self._check(name, part, self._read_into(part.file, part.begin, bytes_of(result)))
            return
        block = new_tensor(part.shape(saved.shape), result.dtype)
        self._check(name, part, self._read_into(part.file, part.begin, bytes_of(block)))
        for start, stop, at in _with_offsets(part.ranges):
            result.narrow(part.dim, start, stop - start).copy_(block.narrow(part.dim, at, stop - start))

    def _read_slices(self, name: str, number: int, result: Tensor, rule: Shard, rank: int) -> None:
        """Read what the rank needs of one part, and note the checksum of what it is the first to have."""
        saved = self.manifest.tensors[name]
        part, dim = saved.parts[number], rule.dim % max(1, len(saved.shape))
        slices = list(_slices(part, dim, saved.shape, rule, rank))
        if not slices:
            return
        shape = part.shape(saved.shape)
        if not _is_in_words(shape, dim, slices, result.element_size()) or _is_all(slices, shape[dim]):
            is_whole = _is_all(slices, shape[dim]) and (part.ranges is None or part.dim == dim)
            is_same = is_whole and shape == result.shape and all(begin == at for begin, _, at, _ in slices)
            block = result if is_same else new_tensor(shape, result.dtype)
            self._check(name, part, self._read_into(part.file, part.begin, bytes_of(block)))
            if is_same:
                return
            for begin, size, at, _ in slices:
                _place(result, block.narrow(dim, begin, size), part, dim, at)
            return
        for begin, size, at, is_owned in slices:
            block, found = self._read_slice(part, shape, dim, begin, size, result.dtype)
            _place(result, block, part, dim, at)
            if is_owned:
                # By place: what is read twice counts once.
                self._shared.setdefault((name, number), {})[begin, size] = (found, block.numel())

    def _read_slice(
        self, part: SavedPart, shape: torch.Size, dim: int, begin: int, size: int, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        """Read `size` indices from `begin` of a dimension of a part; returns them, and their share of its checksum."""
        inner = prod(shape[dim + 1 :]) * dtype.itemsize
        outer, stride = prod(shape[:dim]), shape[dim] * inner
        block = new_tensor((*shape[:dim], size, *shape[dim + 1 :]), dtype)
        data, run = bytes_of(block), size * inner
        if outer == 1:
            return block, self._read_into(part.file, part.begin + begin * inner, data, begin * inner // WORD)
        rows = data.reshape(outer, run)
        self._read_runs(part.file, part.begin + begin * inner, stride, rows)
        return block, checksum_of_runs(rows, begin * inner // WORD, stride // WORD)

    def _check(self, name: str, part: SavedPart, found: int, where: str = "") -> None:
        if found != part.checksum:
            raise ValueError(
                f"{self.folder.file(part.file)} is damaged: bytes {part.begin} to {part.begin + part.num_bytes}, of the"
                f" tensor `{name}`, differ from the written bytes (their checksum must be {part.checksum:016x}; got"
                f" {found:016x}){where}. Resume from another checkpoint"
                " [LP036]"
            )

    def check_shared_parts(self, group: Group) -> None:
        """Check the parts of which ranks have read slices; every rank of the tensor axis must call it.

        Raises:
            ValueError: If what was read is not what was written.
        """
        slices: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for shared in comm.all_gather_object(self._shared, group):
            for key, sums in shared.items():
                slices.setdefault(key, []).extend(sums.values())
        self._shared.clear()
        for (name, number), found_in in slices.items():
            saved = self.manifest.tensors[name]
            part = saved.parts[number]
            # Where the ranks did not read all of it, nothing is known.
            if sum(count for _, count in found_in) == prod(part.shape(saved.shape)):
                found = reduce(add_checksums, (one for one, _ in found_in))
                self._check(name, part, found, f", as ranks {', '.join(map(str, group.ranks))} found together")

    # ---------------------------------------------------------------------------------------------------------- bytes

    def _stream(self, file: str) -> Any:
        if file not in self._streams:
            path = self.folder.file(file)
            # Closed by `close`: parts of several tensors are read from one file.
            local = partial(open, path, "rb", buffering=0)
            self._streams[file] = local() if self.folder.is_local else self.folder.fs.open(path, "rb")
        return self._streams[file]

    def _read_into(self, file: str, begin: int, data: np.ndarray[Any, Any], first_word: int = 0) -> int:
        """Fill `data` from a file; returns its checksum, if it begins at `first_word` of its part."""

        def read() -> int:
            stream, total = self._stream(file), 0
            stream.seek(begin)
            for at in range(0, len(data), _BLOCK):
                block = data[at : at + _BLOCK]
                if _fill(stream, memoryview(block.data)) < len(block):
                    raise ValueError(
                        f"{self.folder.file(file)} ends before byte {begin + len(data)}. It is damaged; load another"
                        " checkpoint"
                    )
                # While the block is in the processor's cache.
                total = add_checksums(total, checksum(block, first_word + at // WORD))
            return total

        found = retried(read)
        self.bytes_read += len(data)
        return found

    def _read_runs(self, file: str, begin: int, stride: int, rows: np.ndarray[Any, Any]) -> None:
        """Read runs at equal distances, into (runs, bytes)."""
        if not self.folder.is_local:
            # One request; a store answers each by itself.
            span = np.empty((len(rows) - 1) * stride + rows.shape[1], np.uint8)
            self._read_into(file, begin, span)
            rows[:] = np.lib.stride_tricks.as_strided(span, rows.shape, (stride, 1))
            return
        mapped = np.memmap(self.folder.file(file), np.uint8, "r", begin, ((len(rows) - 1) * stride + rows.shape[1],))
        rows[:] = np.lib.stride_tricks.as_strided(mapped, rows.shape, (stride, 1), writeable=False)
        self.bytes_read += rows.size

    def close(self) -> None:
        """Close its files."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


def _read_manifest(wanted: Folder) -> tuple[str, bytes]:
    """Return the folder of the checkpoint at `wanted`, and the content of its manifest."""
    folder = find(wanted)
    if folder is None:
        raise FileNotFoundError(f"{wanted} must be a sharded checkpoint; got {_what_is_at(wanted)}")
    return folder.path, folder.read(MANIFEST)


def _fill(stream: Any, view: memoryview) -> int:
    """Read until `view` is full, or the file ends; returns how many bytes were read."""
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
    """Return a tensor without contents, a large one in pages of its own.

    From the heap, tensors of many sizes that come and go would leave holes in which the next one just does not fit.
    """
    size = prod(shape) * dtype.itemsize
    if size < _OWN_PAGES or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    # Private: a process that is forked must not write into it.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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


def _slices(
    part: SavedPart, dim: int, shape: Sequence[int], rule: Shard, rank: int
) -> Iterator[tuple[int, int, int, bool]]:
    """Yield what `rank` needs of a part along `dim`: (begin in it, size, begin in its shard, is first holder)."""
    owned = rule.owned_ranges(rank)
    in_part = part.ranges if part.ranges is not None and part.dim == dim else ((0, shape[dim]),)
    for start, stop, at in _with_offsets(rule.ranges[rank]):
        bounds = {start, stop, *(bound for one in owned for bound in one if start < bound < stop)}
        for low, high in _pairs(sorted(bounds)):
            is_owned = any(begin <= low and high <= end for begin, end in owned)
            for begin, end, offset in _with_offsets(in_part):
                first, last = max(low, begin), min(high, end)
                if first < last:
                    yield offset + first - begin, last - first, at + first - start, is_owned


def _pairs(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(values, values[1:])


def _is_all(slices: Sequence[tuple[int, int, int, bool]], size: int) -> bool:
    return sum(count for _, count, _, _ in slices) == size


def _is_in_words(
    shape: Sequence[int], dim: int, slices: Sequence[tuple[int, int, int, bool]], element_size: int
) -> bool:
    """Whether the checksum of each slice can be computed without its neighbours."""
    inner = prod(shape[dim + 1 :]) * element_size
    if prod(shape[:dim]) > 1 and shape[dim] * inner % WORD:
        return False
    return all(
        begin * inner % WORD == 0 and (size * inner % WORD == 0 or begin + size == shape[dim])
        for begin, size, _, _ in slices
    )


def _place(result: Tensor, block: Tensor, part: SavedPart, dim: int, at: int) -> None:
    """Copy a slice of a part to where it belongs in the shard, from index `at` of `dim` on."""
    target = result.narrow(dim, at, block.shape[dim])
    if part.ranges is None or part.dim == dim:
        target.copy_(block)
        return
    for start, stop, offset in _with_offsets(part.ranges):
        target.narrow(part.dim, start, stop - start).copy_(block.narrow(part.dim, offset, stop - start))


# -------------------------------------------------------------------------------------------- tensors that are not read

_FACTS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "ndim", "requires_grad", "layout", "is_meta", "grad_fn")
}
_FACTS |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__, Tensor.stride}
_FACTS |= {Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous}
_DEVICE = Tensor.device.__get__


class TensorSource(Protocol):
    """What tensors are read from."""

    def facts(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        """Return the shape and the dtype of a tensor."""

    def read(self, name: str, rule: Shard | None = None, rank: int = 0) -> Tensor:
        """Read a tensor, or the part of it that `rank` has by `rule`."""


class StoredTensor(Tensor):
    """A tensor of a checkpoint, or a rank's part of it, that is read each time that something is computed from it."""

    read: Callable[[], Tensor]
    source: TensorSource
    stored_name: str
    rule: Shard | None
    rank: int

    @classmethod
    def of(cls, source: TensorSource, name: str, rule: Shard | None = None, rank: int = 0) -> StoredTensor:
        """Return the tensor called `name`, or the part of it that `rank` has by `rule`."""
        shape, dtype = source.facts(name)
        shape = shape if rule is None else rule.local_shape(shape, rank)
        found = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)

        def read() -> Tensor:
            # Where operations are recorded, as while a model is built, reading is none of them.
            with dispatch_modes_suspended():
                return source.read(name, rule, rank)

        found.read = read
        found.source, found.stored_name, found.rule, found.rank = source, name, rule, rank
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE:
            return torch.device("cpu")
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
    """Return what `rank` has of a full tensor by `rule`: of a stored one without reading it."""
    if isinstance(value, StoredTensor):
        if value.shape[rule.dim] != rule.full_size:
            return rule.split(value, rank)  # raises
        return StoredTensor.of(value.source, value.stored_name, rule, rank)
    return rule.split(value, rank)


def bands_of(value: Tensor, num_bytes: int) -> Iterator[Tensor]:
    """Yield a tensor in runs of its first dimension of about `num_bytes`, contiguous and on the CPU.

    Of a stored one, nothing else is in memory. What is read of it is checked by `check_shared_parts`.
    """
    row_bytes = value.element_size() * prod(value.shape[1:])
    step = max(1, num_bytes // max(1, row_bytes))
    is_cut_elsewhere = isinstance(value, StoredTensor) and value.rule is not None and value.rule.dim != 0
    # A slice that does not begin with a whole word of the checksum would be read with all around it.
    if not isinstance(value, StoredTensor) or value.dim() == 0 or row_bytes % WORD or is_cut_elsewhere:
        yield value.detach().cpu().contiguous()
        return
    rows = value.source.facts(value.stored_name)[0][0]
    for first, last in ((0, rows),) if value.rule is None else value.rule.ranges[value.rank]:
        for start in range(first, last, step):
            stop = min(last, start + step)
            rule = Shard(0, (((0, start),), ((start, stop),), ((stop, rows),)))
            yield value.source.read(value.stored_name, rule, 1)
