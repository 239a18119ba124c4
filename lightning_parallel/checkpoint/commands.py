"""The actions of `lightning-parallel checkpoint`: show checkpoints, verify and convert sharded checkpoints.

Any user may have written the names and texts in a checkpoint. They are printed without markup and control characters.
`reshard` and `export_weights` rewrite a checkpoint tensor by tensor: in files of equal size, or for other libraries.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lightning_parallel.checkpoint.distributed import load_safely
from lightning_parallel.checkpoint.document import encode
from lightning_parallel.checkpoint.folder import MANIFEST, Folder, NewFolder, checkpoints_in, find, newest_in
from lightning_parallel.checkpoint.manifest import BLOCK, Manifest, SavedPart, SavedTensor, check_coverage
from lightning_parallel.checkpoint.place import hidden_path, new_key, put_file, put_in_place, retried
from lightning_parallel.checkpoint.reader import SavedCheckpoint, StoredTensor
from lightning_parallel.checkpoint.writer import SAFETENSORS_DTYPES, TensorPart, write_file
from lightning_parallel.tensor.sharding import Range, Shard
from lightning_parallel.tracing.spans import bytes_text, printable

__all__ = [
    "export_weights",
    "find_damage",
    "merge_checkpoint",
    "reshard",
    "run_checkpoint",
    "size_in_bytes",
]


_MOST_ROWS = 12
"""Number of tensors of a group that `inspect` shows without `--tensors`."""
_GROUPS = {"state_dict": "model", "optimizer_states": "optimizer"}


def _table(*columns: str, title: str) -> Table:
    named = Text(printable(title, keep="\n"))
    table = Table(title=named, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if number == 0 else "right")
    return table


def _add_row(table: Table, *cells: object) -> None:
    table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in cells))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress in bytes; yield a function that counts finished bytes."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


# ------------------------------------------------------------------------------------------------------------- inspect


def _inspect(options: argparse.Namespace) -> int:
    console = Console(width=options.width, highlight=False)
    folder = Folder.at(options.path)
    if folder.fs.isfile(folder.path):
        _print_all(console, folder, _manifest_of_file(folder), options.tensors)
        return 0
    several = [] if folder.has(MANIFEST) else list(newest_in(folder))
    files = [] if folder.has(MANIFEST) else list(_files_in(folder))
    if len(several) + len(files) > 1:
        console.print(_list_of(folder, several, files))
    elif files:
        _print_all(console, files[0], _manifest_of_file(files[0]), options.tensors)
    else:
        # Through `find`, without a check of the files, so that a damaged checkpoint with a readable manifest is shown.
        found = find(folder) or SavedCheckpoint.open(options.path).folder  # raises
        _print_all(console, found, found.manifest(), options.tensors)
    return 0


def _print_all(console: Console, place: Folder, manifest: Manifest, is_full: bool) -> None:
    console.print(_summary(place, manifest))
    for group, names in _by_group(manifest.tensors).items():
        console.print(_tensor_table(group, names, manifest.tensors, is_full))
    console.print(_other_entries(manifest))


def _list_of(folder: Folder, several: list[Folder], files: list[Folder]) -> Table:
    table = _table("checkpoint", "step", "saved", "layout", "files", "size", title=f"{folder}, the newest first")
    rows: list[tuple[float, tuple[object, ...]]] = []
    for one in several:
        manifest = one.manifest()
        size = bytes_text(sum(manifest.files.values()))
        row = (one.name, manifest.step, _time(manifest.created), _layout(manifest), len(manifest.files), size)
        rows.append((manifest.created, row))
    for one in files:
        created, size, step = _time_of_file(one), bytes_text(one.parent.size(one.name) or 0), "?"
        note = _ONE_FILE
        try:
            step = str(_manifest_of_file(one).step)
        except ValueError as error:
            note = str(error)
        rows.append((created, (one.name, step, _time(created), note, 1, size)))
    if not files:  # in the order of steps
        rows = [(-number, row) for number, (_, row) in enumerate(rows)]
    for _, cells in sorted(rows, key=lambda row: row[0], reverse=True):
        _add_row(table, *cells)
    return table


# Files of `torch.save`, as Lightning writes them.

_ONE_FILE = "one file"
_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")


def _files_in(folder: Folder) -> Iterator[Folder]:
    """Yield the files of checkpoints in a folder, or in the folder `checkpoints` that Lightning makes there."""
    for place in (folder, folder.within("checkpoints")):
        if not place.fs.isdir(place.path):
            continue
        found = [Folder(place.fs, str(path).rstrip("/")) for path in place.fs.ls(place.path, detail=False)]
        named = [one for one in found if one.name.endswith(_SUFFIXES) and not one.name.startswith(".")]
        files = sorted((one for one in named if one.fs.isfile(one.path)), key=lambda one: one.name)
        if files:
            yield from files
            return


def _manifest_of_file(file: Folder) -> Manifest:
    """Describe a file in the form of a sharded checkpoint, without running code in it or reading its tensors.

    Raises:
        ValueError: If the file is no checkpoint, or holds values that only code could make.
    """
    if file.is_local:
        # The tables need names and shapes only, so the data stay in the file.
        found = load_safely(Path(file.path), str(file), is_mapped=True)
    else:
        with file.fs.open(file.path, "rb") as stream:
            found = load_safely(stream, str(file))
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} must hold a checkpoint or a state dict; got a {type(found).__name__}")
    is_state = all(isinstance(value, torch.Tensor) for value in found.values())
    try:
        document, tensors, _ = encode({"state_dict": found} if is_state else found)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{file} must hold only numbers, text and tensors; got {error}") from error
    part = SavedPart(file.name, 0, 0, 0, None, ())
    described = {
        name: SavedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), False, (part,))
        for name, tensor in tensors.items()
    }
    version, step = found.get("pytorch-lightning_version"), found.get("global_step", 0)
    versions = {"lightning": version} if isinstance(version, str) else {}
    size = file.parent.size(file.name) or 0
    step = step if type(step) is int else 0
    return Manifest(document, described, {file.name: size}, {}, versions, step, _time_of_file(file), _ONE_FILE)


def _time_of_file(file: Folder) -> float:
    try:
        return float(file.fs.modified(file.path).timestamp())
    except (NotImplementedError, AttributeError, OSError):
        return 0.0


def _time(created: float) -> str:
    return datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _layout(manifest: Manifest) -> str:
    if manifest.name == _ONE_FILE:
        return _ONE_FILE
    axes = [f"{axis.removesuffix('_parallel')} {size}" for axis, size in manifest.layout.items() if size > 1]
    return " x ".join(axes) or "one process"


def _summary(place: Folder, manifest: Manifest) -> Table:
    table = _table("", "", title=str(place))
    table.show_header = False
    table.columns[0].style, table.columns[1].justify = "bold", "left"
    _add_row(table, "step", manifest.step)
    _add_row(table, "saved", _time(manifest.created))
    _add_row(table, "layout", _layout(manifest))
    _add_row(table, "versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    tensors = manifest.tensors.values()
    _add_row(table, "tensors", f"{len(tensors)}, {bytes_text(sum(tensor.num_bytes for tensor in tensors))}")
    folder = place.parent if manifest.name == _ONE_FILE else place
    for file, size in manifest.files.items():
        found = folder.size(file)
        note = "" if found == size else "  is missing" if found is None else f"  has {found} bytes"
        _add_row(table, "file", Text.assemble(f"{printable(file)}  {bytes_text(size)}", (note, "red")))
    return table


def _by_group(tensors: Mapping[str, SavedTensor]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {"model": [], "optimizer": [], "other": []}
    for name in tensors:
        groups[_GROUPS.get(name.partition("/")[0], "other")].append(name)
    return {group: names for group, names in groups.items() if names}


def _tensor_table(group: str, names: list[str], tensors: Mapping[str, SavedTensor], is_full: bool) -> Table:
    dtypes = Counter(tensors[name].dtype for name in names)
    listed = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
    size = bytes_text(sum(tensors[name].num_bytes for name in names))
    table = _table("name", "shape", "dtype", "parts", title=f"\n{group}: {len(names)} tensors, {size} ({listed})")
    for name in names if is_full else names[:_MOST_ROWS]:
        tensor = tensors[name]
        row = (" x ".join(map(str, tensor.shape)) or "scalar", tensor.dtype, _parts_text(tensor))
        _add_row(table, name.partition("/")[2] if group != "other" else name, *row)
    if not is_full and len(names) > _MOST_ROWS:
        table.caption = f"and {len(names) - _MOST_ROWS} more; `--tensors` shows all"
    return table


def _parts_text(tensor: SavedTensor) -> str:
    if len(tensor.parts) == 1:
        return "1"
    return f"{len(tensor.parts)} along dimension {tensor.parts[0].dim}"


def _other_entries(manifest: Manifest) -> Table:
    table = _table("entry", "", title="\nother entries")
    table.columns[1].justify = "left"
    document = manifest.document if isinstance(manifest.document, dict) else {}
    for key, value in document.items():
        if key not in _GROUPS:
            text = json.dumps(value)
            _add_row(table, key, text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)")
    return table


# -------------------------------------------------------------------------------------------------------------- verify


def _verify(options: argparse.Namespace) -> int:
    console = Console(width=options.width, highlight=False)
    folder = Folder.at(options.path)
    found = [folder] if folder.has(MANIFEST) else list(checkpoints_in(folder))
    if not found:
        SavedCheckpoint.open(options.path)  # raises
    status = 0
    for one in found:
        problems = _problems_of(one)
        if problems:
            status = 1
            console.print(Text.assemble(("damaged", "red"), f"  {printable(one)}"), soft_wrap=True)
            console.print(*(f"  {printable(problem)}" for problem in problems), sep="\n", soft_wrap=True, markup=False)
        else:
            console.print(Text.assemble(("whole", "green"), f"    {printable(one)}"), soft_wrap=True)
    return status


def _problems_of(folder: Folder) -> list[str]:
    try:
        saved = SavedCheckpoint(folder, folder.manifest())
    except ValueError as error:
        return str(error).splitlines()
    total = sum(part.num_bytes for tensor in saved.manifest.tensors.values() for part in tensor.parts)
    with _progress("verify", total) as seen:
        return list(find_damage(saved, seen))


def find_damage(saved: SavedCheckpoint, seen: Callable[[int], None]) -> Iterator[str]:
    """Read all of a checkpoint in blocks, and yield each difference from the written bytes.

    Args:
        saved: The checkpoint.
        seen: Called with the number of bytes of each block.
    """
    by_file: dict[str, list[tuple[str, SavedPart]]] = {file: [] for file in saved.manifest.files}
    for name, tensor in saved.manifest.tensors.items():
        for part in tensor.parts:
            by_file[part.file].append((name, part))
    for file, parts in by_file.items():
        size, expected = saved.folder.size(file), saved.manifest.files[file]
        held = f"with `{parts[0][0]}` and {len(parts) - 1} more tensors" if parts else "without tensors"
        if size is None:
            yield f"{file}, {held}, is missing"
            continue
        if size != expected:
            yield f"{file}, {held}, must have {expected} bytes; got {size}"
        yield from _damage_of_file(saved, file, parts, seen)


def _damage_of_file(
    saved: SavedCheckpoint, file: str, parts: list[tuple[str, SavedPart]], seen: Callable[[int], None]
) -> Iterator[str]:
    path = saved.folder.file(file)
    with open(path, "rb") if saved.folder.is_local else saved.folder.fs.open(path, "rb") as stream:
        problem = _damage_of_header(stream, [part for _, part in parts])
    if problem:
        yield f"{file}: {problem}"
    for name, part in sorted(parts, key=lambda entry: entry[1].begin):
        # The first damaged block ends the search in this part; the other parts are still read.
        for first, expected in zip(range(0, part.num_bytes, BLOCK), part.checksums):
            data = np.empty(min(BLOCK, part.num_bytes - first), np.uint8)
            where = f"{file}, `{name}`, bytes {part.begin + first} to {part.begin + first + len(data)}"
            try:
                found = saved.checksum_of(part, first, data)
            except (OSError, ValueError) as error:
                yield f"{where}, cannot be read: {error}"
                break
            if found != expected:
                yield f"{where}, must have the checksum {expected:08x}; got {found:08x}"
                break
            seen(len(data))


def _damage_of_header(stream: Any, parts: list[SavedPart]) -> str:
    """Describe the fault of the header of a `safetensors` file, by which other programs read it; empty if none."""
    stream.seek(0)
    size = int.from_bytes(stream.read(8), "little")
    first = min((part.begin for part in parts), default=8 + size)
    if 8 + size != first:
        return f"its header must have {first - 8} bytes; got {size}"
    try:
        entries = json.loads(stream.read(size))
        offsets = sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its header cannot be read: {error}"
    expected = sorted((part.begin - first, part.begin - first + part.num_bytes) for part in parts)
    return "" if offsets == expected else "its header and the manifest name different positions"


# ------------------------------------------------------------------------------------------- merge, reshard and export


def _say(options: argparse.Namespace, text: str) -> None:
    Console(width=options.width, highlight=False).print(printable(text), soft_wrap=True, markup=False)


def _tensor_bytes(saved: SavedCheckpoint) -> int:
    return sum(tensor.num_bytes for tensor in saved.manifest.tensors.values())


def merge_checkpoint(saved: SavedCheckpoint, output: str, seen: Callable[[int], None] | None = None) -> None:
    """Write `saved` as one file of `torch.save`, in which tied tensors share their memory.

    All tensors are in memory at once.

    Args:
        saved: The checkpoint.
        output: Path or URL of the file; the complete new file replaces a file of this name.
        seen: Called with the number of bytes of each tensor.

    Raises:
        ValueError: If the checkpoint is damaged, or `output` is a folder.
    """
    target = Folder.at(output)
    if target.fs.isdir(target.path):
        raise ValueError(f"The path {output} must be free, or a file; got a folder. Choose another name")

    def read(name: str) -> torch.Tensor:
        found = saved.read(name)
        if seen is not None:
            seen(found.nbytes)
        return found

    content = saved.decoded(read)
    if target.is_local:
        put_file(target.path, lambda file: torch.save(content, file))  # type: ignore[arg-type]
        return
    # Complete before the upload: an object store would keep the beginning of a file whose writer fails.
    with TemporaryDirectory(prefix="lightning_parallel_merge_") as folder:
        torch.save(content, f"{folder}/merged.ckpt")
        retried(lambda: target.fs.put_file(f"{folder}/merged.ckpt", target.path))


def _merge(options: argparse.Namespace) -> int:
    saved = SavedCheckpoint.open(options.path)
    with _progress("merge", _tensor_bytes(saved)) as seen:
        merge_checkpoint(saved, options.output, seen)
    _say(options, f"wrote {options.output}")
    return 0


def _reshard(options: argparse.Namespace) -> int:
    saved = SavedCheckpoint.open(options.path)
    with _progress("reshard", _tensor_bytes(saved)) as seen:
        count = reshard(saved, options.output, options.files, seen)
    _say(options, f"wrote {options.output}, {count} files")
    return 0


def _export(options: argparse.Namespace) -> int:
    saved = SavedCheckpoint.open(options.path)
    size = size_in_bytes(options.max_shard_size)
    tensors = saved.manifest.tensors
    total = sum(tensors[name].num_bytes for name in _by_group(tensors).get("model", ()))
    with _progress("export", total) as seen:
        files, left_out = export_weights(saved, options.output, size, options.prefix, seen)
    note = f"; left out {left_out} tensors whose names begin otherwise than `{options.prefix}`" if left_out else ""
    _say(options, f"wrote {', '.join(files)} to {options.output}{note}")
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "inspect": _inspect,
    "verify": _verify,
    "merge": _merge,
    "reshard": _reshard,
    "export": _export,
}


def run_checkpoint(options: argparse.Namespace) -> int:
    """Run an action; returns the exit status."""
    return _COMMANDS[options.action](options)


# --------------------------------------------------------------------------------------------------- reshard and export


_SMALLEST_CUT = 1 << 16
"""Bytes below which a tensor stays in one file."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_INDEX = "model.safetensors.index.json"

Seen = Callable[[int], None]


def size_in_bytes(text: str) -> int:
    """Parse a size in the notation of Hugging Face: `5GB`, `500MB`, `1.5GiB`, or a number of bytes.

    Raises:
        ValueError: If the text is no size.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"`--max-shard-size` must be a size such as 5GB, 500MB or 1GiB; got `{text}`")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


# ------------------------------------------------------------------------------------------------------------- reshard


def reshard(saved: SavedCheckpoint, output: str, files: int, seen: Seen | None = None) -> int:
    """Write `saved` into `files` files of about equal size; a tensor is in one file, or divided along dimension 0.

    Args:
        saved: The checkpoint.
        output: Path or URL of the new checkpoint, which may be the path of the old checkpoint.
        files: Number of files.
        seen: Called with the number of bytes of each block.

    Returns:
        The number of files; fewer than `files` if there are too few bytes.

    Raises:
        ValueError: If the checkpoint is damaged, `files` is less than 1, or `output` is another file or folder.
    """
    if files < 1:
        raise ValueError(f"`--files` must be at least 1; got {files}")
    target = Folder.at(output)
    # Into a new folder: `output` may be the checkpoint that is being read.
    new, shares = NewFolder.found(target, new_key()), _shares(saved, files)
    sizes: dict[str, int] = {}
    tensors = {name: SavedTensor(t.dtype, t.shape, t.is_sharded, ()) for name, t in saved.manifest.tensors.items()}
    with new.written():
        # Inside the block, so that an error also removes the folder that `begin` makes.
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
    """Return the content of each file, as tensors that are read during the write."""
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
    # A checkpoint without tensors still gets one file.
    return [share for share in shares if share] or shares[:1]


def _runs(tensor: SavedTensor, at: int, size: int, total: int, files: int) -> Iterator[tuple[int, Range]]:
    """Yield the number of each file with rows of a tensor, and these rows; `at` is the tensor's offset in all bytes."""
    rows = tensor.shape[0] if tensor.shape else 1
    if not tensor.is_sharded or size < _SMALLEST_CUT or rows < 2:
        # In the file of its middle: a small rest at the end of a file does not justify a division.
        yield min(files - 1, (at + size // 2) * files // max(1, total)), (0, rows)
        return
    first, last = at * files // total, min(files - 1, (at + size - 1) * files // total)
    start = 0
    for file in range(first, last + 1):
        end = (file + 1) * total // files
        # The last file takes all rows that are left, so rounding loses no row.
        stop = rows if file == last else min(rows, round((end - at) * rows / size))
        if stop > start:
            yield file, (start, stop)
        start = max(start, stop)


# -------------------------------------------------------------------------------------------------------------- export


def export_weights(
    saved: SavedCheckpoint, output: str, max_shard_size: int, prefix: str = "", seen: Seen | None = None
) -> tuple[list[str], int]:
    """Write the model's tensors as `model*.safetensors`, with an index if there are several files.

    A tied tensor is written only under its first name, as in transformers, which ties it again by the config.

    Args:
        saved: The checkpoint.
        output: Path or URL of the folder, which may have other files, such as `config.json`.
        max_shard_size: Most bytes of a file; a larger tensor is alone in its file.
        prefix: Write only tensors whose names begin with this prefix, and remove the prefix.
        seen: Called with the number of bytes of each block.

    Returns:
        The files, and the number of tensors without the prefix, which were left out.

    Raises:
        ValueError: If the checkpoint is damaged or has no tensor to write, or the folder already holds weights.
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
    # Hidden until all files are written. An object store shows a file only when it is complete.
    temporary = [Path(hidden_path("", suffix=".tmp")).name for _ in names] if folder.is_local else names
    try:
        for file, group in zip(temporary, groups):
            write_file(folder, file, {name: TensorPart(tensor) for name, tensor in group.items()}, seen)
    except BaseException:
        for file in temporary:
            with suppress(OSError):
                folder.fs.rm(folder.file(file))
        raise
    # The index comes last: a folder with an index has all the files that it names.
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
