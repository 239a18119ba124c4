"""Makes one ordinary `.ckpt` of a sharded checkpoint, which stock Lightning loads, without holding the model.

    torch.save, with stand-ins of all tensors     lays out the zip file, and leaves their bytes out
    tensor after tensor                           read, checked, written where its bytes belong
    checksums of the zip file                     entered, so that other programs can read it too

The stand-ins of a dtype are in one piece of memory, as large as the largest tensor, that nothing ever touches.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.folder import Folder, replacing, retried, sync_file, sync_folder
from lightning_parallel.checkpoint.manifest import SavedTensor, dtype_named
from lightning_parallel.checkpoint.reader import SavedCheckpoint, StoredTensor, bands_of, bytes_of
from lightning_parallel.comm import Group

__all__ = ["merge_checkpoint", "num_bytes_of"]

_BLOCK = 8 << 20
_ENTRY, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
"""Signatures in a zip file: of an entry of its directory, and of what follows the bytes of a file."""


def merge_checkpoint(saved: SavedCheckpoint, output: str, seen: Callable[[int], None] | None = None) -> None:
    """Write `saved` as one file of `torch.save`; tensors that were one tensor share their memory in it.

    Args:
        saved: The checkpoint.
        output: Path or URL of the file; one that is there is replaced, when the new one is complete.
        seen: Called with the number of bytes of each block.

    Raises:
        ValueError: If the checkpoint is damaged, or there is a folder at `output`.
    """
    target = Folder.at(output)
    if target.fs.isdir(target.path):
        raise ValueError(f"The path {output} must be free, or a file; got a folder. Choose another name")
    seen = seen or (lambda count: None)
    if target.is_local:
        Path(target.parent.path).mkdir(parents=True, exist_ok=True)
        with replacing(target.path) as path:
            _Merged(saved, Path(path), seen).write()
        retried(lambda: sync_folder(target.parent.path))
        return
    # A store of objects takes files from their beginning to their end; bytes are written here and there.
    with TemporaryDirectory(prefix="lightning_parallel_merge_") as folder:
        temporary = Path(folder, "merged.ckpt")
        _Merged(saved, temporary, seen).write()
        retried(lambda: target.fs.put_file(str(temporary), target.path))


class _Merged:
    def __init__(self, saved: SavedCheckpoint, path: Path, seen: Callable[[int], None]) -> None:
        self.saved, self.path, self.seen = saved, path, seen
        self.tensors = saved.manifest.tensors
        self.memory: dict[str, mmap.mmap] = {}
        # In the order in which `torch.save` comes to them: by the number of the storage in the file.
        self.stand_ins: dict[str, Tensor] = {}

    def write(self) -> None:
        arrays = set(_array_names(self.saved.manifest.document))
        # Arrays are in the pickle itself.
        content = self.saved.decoded(lambda name: self.saved.read(name) if name in arrays else self._stand_in(name))
        with torch.serialization.skip_data():
            torch.save(content, self.path)
        places = dict(_records(self.path))
        checksums = {}
        with open(self.path, "r+b") as stream:
            for name, record in zip(self.stand_ins, self._record_names(places), strict=True):
                checksums[record] = self._write_tensor(stream, name, places[record][0])
            self.saved.check_shared_parts(Group.alone("merge"))
            _enter_checksums(stream, checksums, places)
            sync_file(stream)

    def _stand_in(self, name: str) -> Tensor:
        """Return a tensor of the right form whose memory is never touched."""
        _, dtype = self.saved.facts(name)
        saved = self.tensors[name]
        size = num_bytes_of(saved)
        if size == 0:
            return torch.empty(saved.shape, dtype=dtype)
        if saved.dtype not in self.memory:
            # One for each dtype: storages at one address must be of one dtype when they are saved.
            sizes = [num_bytes_of(other) for other in self.tensors.values() if other.dtype == saved.dtype]
            self.memory[saved.dtype] = mmap.mmap(-1, max(sizes))
        storage = torch.frombuffer(self.memory[saved.dtype], dtype=torch.uint8, count=size).untyped_storage()
        strides = torch.empty(saved.shape, device="meta").stride()
        self.stand_ins[name] = torch.empty(0, dtype=dtype).set_(storage, 0, saved.shape, strides)
        return self.stand_ins[name]

    def _record_names(self, places: dict[str, tuple[int, int]]) -> list[str]:
        """Return the name in the zip file of each stand-in."""
        # Numbers are given out in the order in which storages are met, which is that of the dict.
        found = [name for name in places if name.split("/")[-2:-1] == ["data"] and name.split("/")[-1].isdigit()]
        found = [name for name in sorted(found, key=lambda name: int(name.rpartition("/")[2])) if places[name][1]]
        sizes = [num_bytes_of(self.tensors[name]) for name in self.stand_ins]
        if sizes != [places[name][1] for name in found]:
            raise RuntimeError(
                f"The file that torch {torch.__version__} saved must hold entries of {sizes} bytes; got"
                f" {[places[name] for name in found]}. Please report this"
            )
        return found

    def _write_tensor(self, stream: Any, name: str, begin: int) -> int:
        total = 0
        stream.seek(begin)
        for band in bands_of(StoredTensor.of(self.saved, name), _BLOCK):
            data = bytes_of(band).data
            total = zlib.crc32(data, total)
            stream.write(data)
            self.seen(len(data))
        return total


def num_bytes_of(saved: SavedTensor) -> int:
    """Return the size of a full tensor."""
    return prod(saved.shape) * dtype_named(saved.dtype).itemsize


def _array_names(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        if isinstance(document.get("$array"), str):
            yield document["$array"]
        for entry in (*document.get("$set", ()), *document.get("$frozenset", ())):
            if isinstance(entry, dict) and "$tensor" in entry:
                raise ValueError(
                    f"Sets must hold no tensors, because sets have no order; got `{entry['$tensor']}`. Save a list"
                )
        document = list(document.values())
    if isinstance(document, list):
        for entry in document:
            yield from _array_names(entry)


def _records(path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each file in a zip file: its name, where its bytes begin, and how many they are."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as stream:
        for entry in archive.infolist():
            stream.seek(entry.header_offset + 26)
            name_size, extra_size = struct.unpack("<HH", stream.read(4))
            yield entry.filename, (entry.header_offset + 30 + name_size + extra_size, entry.file_size)


def _enter_checksums(stream: Any, checksums: dict[str, int], places: dict[str, tuple[int, int]]) -> None:
    """Enter the checksums of files in a zip file: into its directory, and behind the bytes of each."""
    end = max(begin + size for begin, size in places.values())
    stream.seek(end)
    rest = stream.read()
    at = rest.index(_ENTRY)
    while rest[at : at + 4] == _ENTRY:
        sizes = struct.unpack_from("<HHH", rest, at + 28)
        name = rest[at + 46 : at + 46 + sizes[0]].decode()
        if name in checksums:
            stream.seek(end + at + 16)
            stream.write(struct.pack("<I", checksums[name]))
            begin, size = places[name]
            stream.seek(begin + size)
            if stream.read(4) == _DESCRIPTOR:
                stream.seek(begin + size + 4)
                stream.write(struct.pack("<I", checksums[name]))
        at += 46 + sum(sizes)
