"""The index of a folder of `torch.distributed.checkpoint`, read without running any code that it names.

The file `.metadata` is a pickle of torch's classes, some of them private. torch reads it with `pickle.load`, which
calls any function that the file names. Here an empty class replaces each class that torch puts into the file. Any other
name is an error. The layout is the same in torch 2.6 to 2.13.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

__all__ = ["DistributedIndex", "SavedChunk", "SavedPlace", "read_index"]

_CHECKPOINT = "torch.distributed.checkpoint"
_CLASSES = {
    *((f"{_CHECKPOINT}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((f"{_CHECKPOINT}.metadata", name) for name in ("TensorStorageMetadata", "TensorProperties")),
    *((f"{_CHECKPOINT}.metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata")),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    (f"{_CHECKPOINT}.filesystem", "_StoragePrefix"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    *(("pathlib", name) for name in ("Path", "PurePosixPath", "PureWindowsPath")),
}


@dataclass(frozen=True)
class SavedPlace:
    """The place of an object of `torch.save`: its file and its bytes."""

    file: str
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class SavedChunk:
    """A box of a tensor: its offset in each dimension, its shape, and its place in the files."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: SavedPlace


@dataclass
class DistributedIndex:
    """The content of the folder.

    Attributes:
        tensors: dtype, shape and chunks of each tensor.
        objects: The place of each other value.
        paths: The keys that lead to each value in the saved dict.
    """

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], tuple[SavedChunk, ...]]] = field(default_factory=dict)
    objects: dict[str, SavedPlace] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)


class _Plain:
    """Replaces an object of torch's classes: holds its arguments and its state."""

    state: Any = ()

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


def _member(kind: Any, name: str) -> _Plain:
    if not (isinstance(kind, type) and issubclass(kind, _Plain)):
        raise pickle.UnpicklingError(f"the index reads `{name}` of {kind!r}, which no index needs")
    return kind(name)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        # torch pickles a layout as a call of this function.
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        # Python 3.11.0 to 3.11.3 pickles the member of an enumeration as a call of this function.
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _CLASSES:
            # Each file gets a new class, so that a later file cannot meet objects of an earlier one.
            return type(name, (_Plain,), {})
        raise pickle.UnpicklingError(
            f"the index names `{module}.{name}`, which no index needs, and which could run any code"
        )


def read_index(content: bytes, source: str) -> DistributedIndex:
    """Read a file `.metadata`.

    Args:
        content: The bytes of the file.
        source: Their origin, for the error message.

    Raises:
        ValueError: If the file is damaged, or names anything that torch does not put there. No such name is called.
    """
    try:
        metadata = _IndexUnpickler(io.BytesIO(content)).load()
        return _index(metadata)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(
            f"{source} must be an index of `torch.distributed.checkpoint`; got {error or type(error).__name__}"
        ) from error


def _index(metadata: Any) -> DistributedIndex:
    found = DistributedIndex()
    places: dict[tuple[str, tuple[int, ...] | None], SavedPlace] = {}
    for key, info in metadata["storage_data"].items():
        if info.state.get("transform_descriptors"):
            raise ValueError(
                f"`{key['fqn']}` must not be compressed; got {info['transform_descriptors']}. Save without compression"
            )
        # The index may come from anybody: a path in place of a name could lead out of the folder.
        file = info["relative_path"]
        if type(file) is not str or not file or "/" in file or "\\" in file or file in (".", ".."):
            raise ValueError(f"{file!r} is not the name of a file in the folder")
        offset = key.state.get("offset")
        place = SavedPlace(file, *_counts((info["offset"], info["length"])))
        places[str(key["fqn"]), None if offset is None else _counts(offset)] = place
    _check_apart(places.values())
    for name, described in metadata["state_dict_metadata"].items():
        if type(described).__name__ == "TensorStorageMetadata":
            found.tensors[str(name)] = _tensor(str(name), described, places)
        else:
            found.objects[str(name)] = places[name, None]
    for name, path in (metadata.state.get("planner_data") or {}).items():
        if not path or not all(isinstance(key, (str, int)) for key in path):
            raise ValueError(f"`{name}` stands at {path!r}")
        found.paths[str(name)] = tuple(path)
    return found


def _check_apart(places: Iterable[SavedPlace]) -> None:
    # One place holds one value. So the result cannot be larger than the files.
    ends: dict[str, int] = {}
    for place in sorted(set(places), key=lambda place: place.begin):
        if place.num_bytes and place.begin < ends.get(place.file, 0):
            raise ValueError(f"the index places several values in the same bytes of {place.file}, at {place.begin}")
        ends[place.file] = place.begin + place.num_bytes


def _tensor(name: str, described: Any, places: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[SavedChunk, ...]]:
    properties = described["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"`{name}` has the dtype {dtype!r}")
    shape, chunks = _counts(described["size"]), []
    # Before anything is allocated: the index may ask for any amount of memory.
    if len(shape) > 64 or prod(max(1, size) for size in shape) > 1 << 60:
        raise ValueError(f"`{name}` has the shape {shape}, which no tensor can have")
    for chunk in described["chunks"]:
        offsets, sizes = _counts(chunk["offsets"]), _counts(chunk["sizes"])
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"`{name}` of shape {shape} has a chunk of shape {sizes} at {offsets}")
        if any(begin + size > most for begin, size, most in zip(offsets, sizes, shape)):
            raise ValueError(f"`{name}` of shape {shape} has a chunk of shape {sizes} at {offsets}")
        if (name, offsets) in places:
            chunks.append(SavedChunk(offsets, sizes, places[name, offsets]))
        elif prod(sizes):
            raise ValueError(f"the chunk of `{name}` at {offsets} is nowhere")
    # Elements that no chunk holds would keep arbitrary values in memory.
    # By offset, so that a chunk which is listed twice counts once.
    held = {chunk.offsets: prod(chunk.shape) for chunk in chunks if prod(chunk.shape)}
    if sum(held.values()) != prod(shape):
        raise ValueError(f"the chunks of `{name}` have {sum(held.values())} of its {prod(shape)} elements")
    kept = tuple(chunk for chunk in chunks if prod(chunk.shape))
    if _overlap(kept):
        raise ValueError(f"the chunks of `{name}` overlap, so that other elements are missing")
    return dtype, shape, kept


def _overlap(chunks: Sequence[SavedChunk]) -> bool:
    """Tell whether two chunks at different offsets have an element in common."""
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets)
    for index, chunk in enumerate(ordered):
        for other in itertools.islice(ordered, index + 1, None):
            if not chunk.offsets or other.offsets[0] >= chunk.offsets[0] + chunk.shape[0]:
                break  # neither this chunk nor a later one begins within the rows
            pairs = zip(chunk.offsets, chunk.shape, other.offsets, other.shape)
            if chunk.offsets != other.offsets and all(b < a + n and a < b + m for a, n, b, m in pairs):
                return True
    return False


def _counts(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"numbers must be at least 0; got {values}")
    return tuple(values)
