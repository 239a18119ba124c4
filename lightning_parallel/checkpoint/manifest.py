"""The manifest of a sharded checkpoint: the place of each part of each tensor, and the checkpoint's dict.

All parts of a tensor divide the same dimension. A part holds one or several ranges of this dimension:

    layers.0.up.weight (8, 4)    rank 0: rows 0..4      rank 1: rows 4..8
    qkv.weight (12, 4)           rank 0: rows 0..2, 4..6, 8..10      rank 1: the other rows

A manifest is not trusted: every number is checked before it serves to read bytes or make a tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch

from lightning_parallel.tensor.sharding import Range

__all__ = [
    "BLOCK",
    "FORMAT",
    "Manifest",
    "SavedPart",
    "SavedTensor",
    "check_coverage",
    "check_places",
    "checked_shape",
    "dtype_named",
    "is_file_name",
]

FORMAT = "lightning_parallel.sharded"
VERSION = 1
BLOCK = 1 << 20
"""Bytes under one checksum: a rank that reads a slice of a part checks only the blocks of the slice."""
_MOST_ELEMENTS = 1 << 60
_MOST_DIMS = 64
"""Dimensions of a tensor that torch can copy."""
_LATEST_S = 253_000_000_000
"""A time near the end of the year 9987, after which there are no dates."""


@dataclass(frozen=True)
class SavedPart:
    """A part of a tensor in a file.

    Attributes:
        file: Name of the file in the folder.
        begin: Offset of its first byte in the file.
        num_bytes: Number of its bytes.
        dim: Dimension along which the tensor is divided; 0 if the part is the full tensor.
        ranges: Its indices of that dimension, in the order of its memory; None for the full tensor.
        checksums: CRC-32 of each block of `BLOCK` bytes, counted from `begin`; the last block may be shorter.
    """

    file: str
    begin: int
    num_bytes: int
    dim: int
    ranges: tuple[Range, ...] | None
    checksums: tuple[int, ...]

    def shape(self, full: Sequence[int]) -> torch.Size:
        """Return the shape of the part of a tensor of shape `full`."""
        shape = list(full)
        if self.ranges is not None:
            shape[self.dim] = sum(stop - start for start, stop in self.ranges)
        return torch.Size(shape)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the full model, in parts.

    Attributes:
        dtype: torch's name of the dtype, without `torch.`.
        shape: Shape of the full tensor.
        is_sharded: Whether ranks read only parts of the tensor, as of parameters; otherwise each rank reads all of it.
        parts: The parts, which cover the tensor exactly once.
    """

    dtype: str
    shape: tuple[int, ...]
    is_sharded: bool
    parts: tuple[SavedPart, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor."""
        return prod(self.shape) * dtype_named(self.dtype).itemsize


@dataclass
class Manifest:
    """The content of a sharded checkpoint.

    Attributes:
        document: The checkpoint's dict, see `document.encode`.
        tensors: The tensors that the document names.
        files: Size in bytes of each file.
        layout: Ranks along each axis of the mesh that saved it.
        versions: Versions of the packages that saved it.
        step: Optimizer steps so far.
        created: Time of the save, in seconds since 1970.
        name: Name of the folder.
    """

    document: Any
    tensors: dict[str, SavedTensor]
    files: dict[str, int]
    layout: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    step: int = 0
    created: float = 0.0
    name: str = ""

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`: a line with the hash of the rest, and the rest."""
        # Without NaN, which is no JSON and which other programs cannot read.
        body = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, allow_nan=False).encode()
        head = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode()
        return head + b"\n" + body + b"\n"

    @classmethod
    def from_json(cls, content: bytes, source: str) -> Manifest:
        """Parse the bytes that `to_json` makes.

        Args:
            content: Bytes of the file.
            source: Name of the file, for the error message.

        Raises:
            ValueError: If the bytes are damaged, or not a manifest of a known version.
        """
        try:
            head, _, body = content.partition(b"\n")
            # Before the body is parsed: a damaged body may still be valid JSON.
            if json.loads(head)["sha256"] != hashlib.sha256(body.removesuffix(b"\n")).hexdigest():
                raise ValueError("its checksum does not match: it is damaged, or was changed")
            values = json.loads(body)
            if values.pop("format") != FORMAT or values.pop("version") != VERSION:
                raise ValueError(f"it is not version {VERSION} of {FORMAT}: a newer release wrote it")
            values["tensors"] = {str(name): _tensor(entry) for name, entry in values["tensors"].items()}
            manifest = cls(**values)
            manifest._check()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = error if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise ValueError(f"{source} must be the manifest of a sharded checkpoint: {what}") from error
        return manifest

    def _check(self) -> None:
        self._check_facts()
        for file, size in self.files.items():
            if not is_file_name(file) or type(size) is not int:
                raise ValueError(f"`{file}` is not the name of a file in the folder")
        for name, tensor in self.tensors.items():
            for part in tensor.parts:
                if part.file not in self.files or part.begin + part.num_bytes > self.files[part.file]:
                    raise ValueError(f"`{name}` is placed at byte {part.begin} of `{part.file}`, which is too short")
        check_places(
            (part.file, part.begin, part.num_bytes, name)
            for name, tensor in self.tensors.items()
            for part in tensor.parts
        )
        problems = check_coverage(self.tensors)
        if problems:
            raise ValueError("\n".join(problems))

    def _check_facts(self) -> None:
        """Check the facts for display, and the facts that decide the newest checkpoint and its place."""
        if self.name != "" and not is_file_name(self.name):
            raise ValueError(f"{self.name!r} is not the name of a folder")
        _count(self.step)
        created = self.created
        if type(created) not in (int, float) or not 0 <= created <= _LATEST_S:
            raise ValueError(f"`created` must be in seconds since 1970; got {created!r}")
        if not all(type(size) is int and size > 0 for size in self.layout.values()):
            raise ValueError(f"`layout` must give the number of ranks along each axis; got {self.layout!r}")
        if not all(isinstance(version, str) for version in self.versions.values()):
            raise ValueError(f"`versions` must be text; got {self.versions!r}")


def is_file_name(name: object) -> bool:
    """Tell whether `name` is the name of an entry of a folder, and no path that leads out of it."""
    # Another user may have written the name: a path could name any file or place of this machine.
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def check_places(places: Iterable[tuple[str, int, int, str]]) -> None:
    """Check that no two tensors are placed in the same bytes of a file, so that tensors are no larger than the files.

    Args:
        places: File, first byte, number of bytes and name of each tensor.

    Raises:
        ValueError: If two tensors share bytes.
    """
    ends: dict[str, tuple[int, str]] = {}
    for file, begin, num_bytes, name in sorted(place for place in places if place[2]):
        end, before = ends.get(file, (0, ""))
        if begin < end:
            raise ValueError(f"`{name}` and `{before}` are placed in the same bytes of `{file}`, at {begin}")
        ends[file] = begin + num_bytes, name


def checked_shape(sizes: Any) -> tuple[int, ...]:
    """Return the shape of a tensor from the numbers in a file.

    Raises:
        ValueError: If torch can have no such tensor.
    """
    shape = tuple(_count(size) for size in sizes)
    # A dimension of size zero must not hide the other sizes.
    if len(shape) > _MOST_DIMS or prod(max(1, size) for size in shape) > _MOST_ELEMENTS:
        raise ValueError(f"The shape of a tensor must be one that torch supports; got {str(shape)[:200]}")
    return shape


def _tensor(entry: Mapping[str, Any]) -> SavedTensor:
    dtype_named(entry["dtype"])
    shape = checked_shape(entry["shape"])
    return SavedTensor(entry["dtype"], shape, bool(entry["is_sharded"]), tuple(map(_part, entry["parts"])))


def _part(entry: Mapping[str, Any]) -> SavedPart:
    ranges = entry["ranges"]
    return SavedPart(
        str(entry["file"]),
        _count(entry["begin"]),
        _count(entry["num_bytes"]),
        _count(entry["dim"]),
        None if ranges is None else tuple((_count(start), _count(stop)) for start, stop in ranges),
        tuple(map(_count, entry["checksums"])),
    )


def _count(value: Any) -> int:
    # The exact type, because `true` is a bool, and a bool is an int in Python.
    if type(value) is not int or value < 0:
        raise ValueError(f"The number must be an integer of at least 0; got {value!r}")
    return value


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that torch calls `name`.

    Raises:
        ValueError: If there is none.
    """
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"The dtype must be one of this torch; got {name!r}. A newer torch may know it")
    return found


def check_coverage(tensors: Mapping[str, SavedTensor]) -> list[str]:
    """Return the faults of parts: each element must be in exactly one part, and each part must have its size."""
    return [f"`{name}`: {problem}" for name, tensor in tensors.items() for problem in _uncovered(tensor)]


def _uncovered(tensor: SavedTensor) -> Iterable[str]:
    item = dtype_named(tensor.dtype).itemsize
    # The first fault of a part ends the check, since the checks of ranges below need valid parts.
    for part in tensor.parts:
        if part.ranges is not None and part.dim >= len(tensor.shape):
            yield f"a part is sharded along dimension {part.dim} of {list(tensor.shape)}"
            return
        if any(start > stop for start, stop in part.ranges or ()):
            yield f"a part has the ranges {part.ranges}"
            return
        if part.num_bytes != prod(part.shape(tensor.shape)) * item:
            yield f"a part in `{part.file}` has {part.num_bytes} bytes, which does not match its shape"
            return
        if len(part.checksums) != -(-part.num_bytes // BLOCK):
            yield f"a part in `{part.file}` has {part.num_bytes} bytes and {len(part.checksums)} checksums of blocks"
            return
    if len({part.dim for part in tensor.parts if part.ranges is not None}) > 1:
        yield "its parts are sharded along different dimensions"
        return
    whole = [part for part in tensor.parts if part.ranges is None]
    if len(whole) == 1 and len(tensor.parts) == 1:
        return
    if whole or not tensor.parts:
        yield "no part holds it" if not tensor.parts else "several parts hold it"
        return
    size, covered = tensor.shape[tensor.parts[0].dim], 0
    for start, stop in sorted(one for part in tensor.parts for one in part.ranges or ()):
        if start > covered:
            yield f"no part holds {covered} to {start} of dimension {tensor.parts[0].dim}"
        if start < covered:
            yield f"several parts hold {start} to {min(covered, stop)} of dimension {tensor.parts[0].dim}"
        covered = max(covered, stop)
    if covered != size:
        yield f"its parts reach to {covered} of {size} in dimension {tensor.parts[0].dim}"
