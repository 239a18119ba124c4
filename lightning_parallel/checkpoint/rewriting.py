"""Writes a sharded checkpoint anew, tensor after tensor: in other files, or as weights for other libraries.

`reshard` keeps everything and cuts it into files of equal size. `export_weights` writes the model's tensors alone, in
the files and under the names that Hugging Face's libraries read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from lightning_parallel.checkpoint.folder import Folder, NewFolder
from lightning_parallel.checkpoint.manifest import Manifest, SavedTensor, check_coverage
from lightning_parallel.checkpoint.place import hidden_path, new_key, put_in_place
from lightning_parallel.checkpoint.reader import SavedCheckpoint, StoredTensor
from lightning_parallel.checkpoint.writer import SAFETENSORS_DTYPES, TensorPart, write_file
from lightning_parallel.tensor.sharding import Range, Shard

__all__ = ["export_weights", "reshard", "size_in_bytes"]

_SMALLEST_CUT = 1 << 16
"""Bytes below which a tensor stays whole."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_INDEX = "model.safetensors.index.json"

Seen = Callable[[int], None]


def size_in_bytes(text: str) -> int:
    """Read a size as Hugging Face writes it: `5GB`, `500MB`, `1.5GiB`, or a number of bytes.

    Raises:
        ValueError: If it is none.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"`--max-shard-size` must be a size such as 5GB, 500MB or 1GiB; got `{text}`")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


# ------------------------------------------------------------------------------------------------------------- reshard


def reshard(saved: SavedCheckpoint, output: str, files: int, seen: Seen | None = None) -> int:
    """Write `saved` into so many files of about equal size; tensors are whole, or cut along dimension 0.

    Args:
        saved: The checkpoint.
        output: Path or URL of the new checkpoint, which may be the path of the old checkpoint.
        files: Number of files.
        seen: Called with the number of bytes of each block.

    Returns:
        The number of files; fewer than asked for, if there is less to write.

    Raises:
        ValueError: If the checkpoint is damaged, the number makes no sense, or there is something else at `output`.
    """
    if files < 1:
        raise ValueError(f"`--files` must be at least 1; got {files}")
    target = Folder.at(output)
    new, shares = NewFolder.found(target, new_key()), _shares(saved, files)
    sizes: dict[str, int] = {}
    tensors = {name: SavedTensor(t.dtype, t.shape, t.is_sharded, ()) for name, t in saved.manifest.tensors.items()}
    with new.written():
        NewFolder.begin(target, new.key)
        for number, parts in enumerate(shares):
            file = new.file(number)
            sizes[file], written = write_file(new.work, file, parts, seen)
            for name, part in written.items():
                before = tensors[name]
                tensors[name] = SavedTensor(before.dtype, before.shape, before.is_sharded, (*before.parts, part))
        problems = check_coverage(tensors)
        if problems:
            raise RuntimeError("The new checkpoint is incomplete and was removed:\n" + "\n".join(problems))
        old = saved.manifest
        new.commit(Manifest(old.document, tensors, sizes, old.layout, old.versions, old.step, old.created))
    return len(shares)


def _shares(saved: SavedCheckpoint, files: int) -> list[dict[str, TensorPart]]:
    """Return the content of each file, as tensors that are read when they are written."""
    total = sum(tensor.num_bytes for tensor in saved.manifest.tensors.values())
    shares: list[dict[str, TensorPart]] = [{} for _ in range(files)]
    at = 0
    for name, tensor in saved.manifest.tensors.items():
        size = tensor.num_bytes
        runs = list(_runs(tensor, at, size, total, files))
        at += size
        if len(runs) == 1:
            shares[runs[0][0]][name] = TensorPart(StoredTensor.of(saved, name))
            continue
        rule = Shard(0, tuple((rows,) for _, rows in runs))
        for rank, (file, rows) in enumerate(runs):
            shares[file][name] = TensorPart(StoredTensor.of(saved, name, rule, rank), 0, (rows,))
    return [share for share in shares if share] or shares[:1]


def _runs(tensor: SavedTensor, at: int, size: int, total: int, files: int) -> Iterator[tuple[int, Range]]:
    """Yield which rows of a tensor are in which file; `at` is where it begins in the bytes of all."""
    rows = tensor.shape[0] if tensor.shape else 1
    if not tensor.is_sharded or size < _SMALLEST_CUT or rows < 2:
        # With its middle: a rest at the end of a file is not worth a cut.
        yield min(files - 1, (at + size // 2) * files // max(1, total)), (0, rows)
        return
    first, last = at * files // total, min(files - 1, (at + size - 1) * files // total)
    start = 0
    for file in range(first, last + 1):
        end = (file + 1) * total // files
        stop = rows if file == last else min(rows, round((end - at) * rows / size))
        if stop > start:
            yield file, (start, stop)
        start = max(start, stop)


# -------------------------------------------------------------------------------------------------------------- export


def export_weights(
    saved: SavedCheckpoint, output: str, max_shard_size: int, prefix: str = "", seen: Seen | None = None
) -> tuple[list[str], int]:
    """Write the model's tensors as `model*.safetensors`, with an index if there are several files.

    A tied tensor is written under its first name alone, as transformers does, which ties it again by the config.

    Args:
        saved: The checkpoint.
        output: Path or URL of the folder, which may have other files, such as `config.json`.
        max_shard_size: Most bytes of a file; a larger tensor is alone in its file.
        prefix: Write only tensors whose names begin with it, without it.
        seen: Called with the number of bytes of each block.

    Returns:
        The files, and the number of tensors that were left out for their names.

    Raises:
        ValueError: If the checkpoint is damaged, nothing is to be written, or there are weights in the folder.
    """
    state, left_out = _weights(saved, prefix)
    folder = Folder.at(output)
    folder.fs.makedirs(folder.path, exist_ok=True)
    found = sorted(str(path).rpartition("/")[2] for path in folder.fs.ls(folder.path, detail=False))
    weights = [name for name in found if re.fullmatch(r"(model.*\.safetensors.*|pytorch_model.*\.bin.*)", name)]
    if weights:
        raise ValueError(f"The folder {output} must hold no weights; got {', '.join(weights)}. Choose another folder")
    groups = _file_groups(state, max_shard_size)
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    # Hidden until all are written; a store of objects shows a file when it is complete.
    temporary = [Path(hidden_path("", suffix=".tmp")).name for _ in names] if folder.is_local else names
    try:
        for file, group in zip(temporary, groups):
            write_file(folder, file, {name: TensorPart(tensor) for name, tensor in group.items()}, seen)
    except BaseException:
        for file in temporary:
            with suppress(OSError):
                folder.fs.rm(folder.file(file))
        raise
    for before, name in zip(temporary, names):
        if before != name:
            put_in_place(folder.file(before), folder.file(name))
    if len(names) > 1:
        places = {name: file for file, group in zip(names, groups) for name in group}
        size = sum(_num_bytes(tensor) for tensor in state.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        folder.write(_INDEX, (json.dumps(index, indent=2) + "\n").encode())
        names = [*names, _INDEX]
    return names, left_out


def _weights(saved: SavedCheckpoint, prefix: str) -> tuple[dict[str, StoredTensor], int]:
    """Return the model's tensors to write, by name, and the number of its other tensors."""
    content = saved.decoded(lambda name: StoredTensor.of(saved, name))
    state = content.get("state_dict") if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping):
        raise ValueError(f"The checkpoint {saved.folder} must hold a `state_dict`; got none")
    tensors = {name: value for name, value in state.items() if isinstance(value, StoredTensor)}
    chosen = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
    if not chosen:
        first = sorted({name.partition(".")[0] + "." for name in tensors})
        raise ValueError(
            f"`--prefix` must begin the name of a tensor; got `{prefix}`. Names begin with {', '.join(first)}"
        )
    others = [
        (name, value.dtype)
        for name, value in chosen.items()
        if value.is_complex() or value.dtype not in SAFETENSORS_DTYPES
    ]
    if others:
        name, dtype = others[0]
        raise ValueError(f"`{name}` must have a dtype that `safetensors` supports; got {dtype}")
    first_names: dict[str, str] = {}
    for name, value in chosen.items():
        first_names.setdefault(value.stored_name, name)
    return {name: chosen[name] for name in first_names.values()}, len(tensors) - len(chosen)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _file_groups(state: Mapping[str, StoredTensor], most: int) -> list[dict[str, StoredTensor]]:
    """Divide tensors over files in their order, as Hugging Face does."""
    groups: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if groups[-1] and size + _num_bytes(tensor) > most:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += _num_bytes(tensor)
    return groups
