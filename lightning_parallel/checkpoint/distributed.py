"""Reads folders of `torch.distributed.checkpoint`, which Lightning's `ModelParallelStrategy` and `FSDPStrategy` write.

    .metadata         the place of each chunk of each tensor   see `compat.distributed_checkpoint`
    __0_0.distcp      chunks, each an object of `torch.save`
    meta.pt           the rest of the checkpoint

A rank reads the chunks that it needs, when it needs them. Nothing in such a folder can run code.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import IO, Any
from zipfile import BadZipFile, ZipFile, ZipInfo

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.checkpoint.folder import Folder
from lightning_parallel.checkpoint.place import retried
from lightning_parallel.checkpoint.reader import Box, StoredTensor, assemble
from lightning_parallel.comm import Group
from lightning_parallel.compat.distributed_checkpoint import DistributedIndex, SavedChunk, SavedPlace, read_index
from lightning_parallel.tensor.sharding import Shard

__all__ = ["DistributedCheckpoint", "is_distributed_checkpoint", "is_inflated", "load_safely"]

_INDEX, _REST = ".metadata", "meta.pt"
_MODEL = ("state_dict", "model")
"""The key of the model's state, by `ModelParallelStrategy` and by `FSDPStrategy`."""
_OPTIMIZER = "optimizer_"


def load_safely(content: IO[bytes] | os.PathLike[str], name: str, is_mapped: bool = False) -> Any:
    """Return the content of a file of `torch.save`, if loading it cannot run code.

    Args:
        content: The path of the file, or the open file.
        name: Its name, for the error message.
        is_mapped: Leave the bytes of tensors in the file until their first use.

    Raises:
        ValueError: If loading may run code, or the file is damaged or of another kind.
    """
    try:
        with suppress(BadZipFile, OSError), ZipFile(content) as archive:  # an older form is no zip file
            size = content.seek(0, os.SEEK_END) if isinstance(content, io.IOBase) else os.path.getsize(str(content))
            if is_inflated(archive.infolist(), size):
                raise ValueError("it would be larger in memory than it is in the file")
        if isinstance(content, io.IOBase):
            # `ZipFile` has moved the position.
            content.seek(0)
        return torch.load(content, map_location="cpu", weights_only=True, mmap=is_mapped or None)
    except Exception as error:  # a damaged pickle raises nearly anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a damaged file names a negative offset
            raise
        kind = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if kind is None:
            text = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
            what = f"{type(error).__name__}: {text[:400]}"
            raise ValueError(
                f"{name} must be a file that `torch.save` of torch 1.6 or later wrote; got {what}"
            ) from error
        raise ValueError(
            f"{name} must hold only tensors, numbers and text, because loading other objects may run code; got"
            f" {kind[1]}. If you trust its author, call `torch.serialization.add_safe_globals([...])` with the classes"
            " in it"
        ) from error


def is_inflated(records: Iterable[ZipInfo], size: int) -> bool:
    """Tell whether the records of a file of `torch.save` are larger than its `size`: torch compresses nothing.

    Compressed records, or several records in the same bytes, would let a small file fill the memory.
    """
    return sum(record.file_size for record in records) > size


def is_distributed_checkpoint(path: str) -> bool:
    """Tell whether `path` is a folder of `torch.distributed.checkpoint`."""
    return Folder.at(path).has(_INDEX)


class DistributedCheckpoint:
    """A folder of `torch.distributed.checkpoint`.

    Args:
        folder: The folder.
        index: The content of its index.
        rest: The content of `meta.pt`; None without the file.
    """

    def __init__(self, folder: Folder, index: DistributedIndex, rest: bytes | None) -> None:
        self.folder, self.index = folder, index
        self._rest = rest
        self.bytes_read = 0

    @classmethod
    def open(cls, path: str, group: Group) -> DistributedCheckpoint:
        """Open a folder, and check that it has all its files.

        Args:
            path: The folder, as path or URL.
            group: Ranks that open it together: all ranks get the index that the first rank reads.

        Raises:
            ValueError: If its index is damaged or unsafe, or files are missing or too short.
        """
        folder = Folder.at(path)

        def read() -> tuple[bytes, bytes | None]:
            return folder.read(_INDEX), folder.read(_REST) if folder.has(_REST) else None

        # Read once: all ranks then see the same index, even if a new save replaces the folder meanwhile.
        content, rest = comm.broadcast_from(read, group)
        index = read_index(content, folder.file(_INDEX))
        ends: dict[str, int] = {}
        chunks = chain.from_iterable(chunks for _, _, chunks in index.tensors.values())
        for place in (*(chunk.place for chunk in chunks), *index.objects.values()):
            ends[place.file] = max(ends.get(place.file, 0), place.begin + place.num_bytes)
        for file, end in ends.items():
            size = folder.size(file)
            if size is None or size < end:
                found = "no file" if size is None else f"{size}"
                raise ValueError(
                    f"{folder.file(file)} must have {end} bytes; got {found}. The checkpoint is damaged; load another"
                )
        return cls(folder, index, rest)

    def checkpoint(self) -> dict[str, Any]:
        """Return the checkpoint's dict, as one process would save it; tensors are read at their use.

        Raises:
            ValueError: If it is no checkpoint of a Trainer, or has values that only code could make.
        """
        tree = self._tree()
        model = next((key for key in _MODEL if key in tree), None)
        if self._rest is None or model is None:
            raise ValueError(
                f"{self.folder} must hold a checkpoint of a Trainer, with `{_REST}` and a `state_dict`; got"
                f" {', '.join(tree) or 'nothing'}{'' if self._rest else f', and no `{_REST}`'}"
            )
        found = load_safely(io.BytesIO(self._rest), f"`{_REST}` in {self.folder}")
        if not isinstance(found, dict) or not isinstance(tree[model], dict):
            what = f"`{model}` in {self.folder}" if isinstance(found, dict) else self.folder.file(_REST)
            raise ValueError(f"{what} must hold a dict; got another value")
        # By number: as text, `optimizer_10` would come before `optimizer_2`.
        optimizers = sorted((key for key in tree if str(key).startswith(_OPTIMIZER)), key=_number)
        try:
            states = [_numbered_state(tree[key]) for key in optimizers]
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.folder} must hold the states of the optimizers; got {error!r}") from error
        return {**found, "state_dict": tree[model], **({"optimizer_states": states} if states else {})}

    def _tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        # Several names may share an object, which is read once.
        values: dict[SavedPlace, Any] = {}
        for name in (*self.index.tensors, *self.index.objects):
            path = self.index.paths.get(name, (name,))
            place = self.index.objects.get(name)
            if place is not None and place not in values:
                values[place] = self._load(name, place)
            value = StoredTensor.of(self, name) if place is None else values[place]
            inner = tree
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
                if type(inner) is not dict:
                    raise ValueError(f"{self.folder} must hold one value for each key; got two for {path}")
            inner[path[-1]] = value
        return tree

    def _load(self, name: str, place: SavedPlace) -> Any:
        return load_safely(io.BytesIO(self._bytes(place)), f"`{name}` in {self.folder.file(place.file)}")

    def _bytes(self, place: SavedPlace) -> bytes:
        def read() -> bytes:
            path = self.folder.file(place.file)
            with open(path, "rb") if self.folder.is_local else self.folder.fs.open(path, "rb") as stream:
                stream.seek(place.begin)
                return bytes(stream.read(place.num_bytes))

        self.bytes_read += place.num_bytes
        return retried(read)

    # -------------------------------------------------------------------------------------------------------- tensors

    def facts(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        """Return the shape and the dtype of a tensor."""
        dtype, shape, _ = self.index.tensors[name]
        return shape, dtype

    def read(self, name: str, rule: Shard | None = None, rank: int = 0) -> Tensor:
        """Read a tensor, or the part of it that `rank` has by `rule`, chunk after chunk.

        Raises:
            ValueError: If a chunk differs from its entry in the index.
        """
        dtype, shape, chunks = self.index.tensors[name]
        return assemble(shape, dtype, rule, rank, (self._box(name, chunk, dtype) for chunk in chunks))

    def _box(self, name: str, chunk: SavedChunk, dtype: torch.dtype) -> Box:
        loaded: list[Box] = []

        def fill(target: Tensor, dim: int, begin: int, end: int) -> None:
            # Loaded once for all slices of a chunk, and only if a slice is wanted.
            if not loaded:
                loaded.append(Box.of(self._chunk(name, chunk, dtype)))
            loaded[0].fill(target, dim, begin, end)

        return Box(chunk.offsets, chunk.shape, fill)

    def _chunk(self, name: str, chunk: SavedChunk, dtype: torch.dtype) -> Tensor:
        found = self._load(name, chunk.place)
        if not isinstance(found, Tensor) or found.dtype != dtype or tuple(found.shape) != chunk.shape:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"`{name}` in {chunk.place.file} must be {dtype} {list(chunk.shape)}; got {what}")
        return found


def _number(key: str) -> int:
    return int(key.removeprefix(_OPTIMIZER)) if key.removeprefix(_OPTIMIZER).isdigit() else 0


def _numbered_state(state: dict[str, Any]) -> dict[str, Any]:
    """Turn the state of an optimizer by names into a state by numbers, which `Optimizer.load_state_dict` takes."""
    # In the tree, a list is a dict by position.
    groups = [state["param_groups"][index] for index in range(len(state["param_groups"]))] if state else []
    names = list(chain.from_iterable(group.get("params", []) for group in groups))
    position = {name: index for index, name in enumerate(names)}
    unknown = [name for name in state.get("state", {}) if name not in position]
    if unknown or len(position) < len(names):
        raise ValueError(
            f"The optimizer state must belong to the parameters of the optimizer; got {unknown[:3] or names[:3]}"
        )
    numbered = [{**group, "params": [position[name] for name in group.get("params", [])]} for group in groups]
    held = {position[name]: entry for name, entry in state.get("state", {}).items()}
    named = [group.get("params", []) for group in groups]
    return {"state": dict(sorted(held.items())), "param_groups": numbered, "names": named}
