"""What `lightning-parallel checkpoint` does and prints: looks at sharded checkpoints, checks and converts them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from lightning_parallel.checkpoint.checksum import WORD, add_checksums, checksum
from lightning_parallel.checkpoint.folder import MANIFEST, Folder, checkpoints_in, find, newest_in, retried
from lightning_parallel.checkpoint.manifest import Manifest, SavedPart, SavedTensor
from lightning_parallel.checkpoint.merging import merge_checkpoint, num_bytes_of
from lightning_parallel.checkpoint.reader import SavedCheckpoint
from lightning_parallel.checkpoint.rewriting import export_weights, reshard, size_in_bytes

__all__ = ["COMMANDS", "find_damage"]

_BLOCK = 8 << 20
_MOST_ROWS = 12
"""Tensors of a group that are shown without `--tensors`."""
_GROUPS = {"state_dict": "model", "optimizer_states": "optimizer"}


def size_text(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _table(*columns: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if number == 0 else "right")
    return table


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are done."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


# ------------------------------------------------------------------------------------------------------------- inspect


def _inspect(options: argparse.Namespace) -> int:
    console = Console(width=options.width, highlight=False)
    folder = Folder.at(options.path)
    several = [] if folder.has(MANIFEST) else list(newest_in(folder))
    if len(several) > 1:
        console.print(_list_of(folder, several))
        return 0
    # One that is damaged is shown as well as it can be.
    saved = _opened(options.path)
    console.print(_summary(saved))
    for group, names in _by_group(saved.manifest.tensors).items():
        console.print(_tensor_table(group, names, saved.manifest.tensors, options.tensors))
    console.print(_other_entries(saved.manifest))
    return 0


def _opened(path: str) -> SavedCheckpoint:
    """Open a checkpoint whose files may be missing."""
    folder = find(Folder.at(path))
    if folder is None:
        return SavedCheckpoint.open(path)  # raises
    return SavedCheckpoint(folder, folder.manifest())


def _list_of(folder: Folder, several: list[Folder]) -> Table:
    table = _table("checkpoint", "step", "saved", "layout", "files", "size", title=f"{folder}, the newest first")
    for one in several:
        manifest = one.manifest()
        size = size_text(sum(manifest.files.values()))
        row = (str(manifest.step), _time(manifest.created), _layout(manifest), str(len(manifest.files)), size)
        table.add_row(one.name, *row)
    return table


def _time(created: float) -> str:
    return datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _layout(manifest: Manifest) -> str:
    axes = [f"{axis.removesuffix('_parallel')} {size}" for axis, size in manifest.layout.items() if size > 1]
    return " x ".join(axes) or "one process"


def _summary(saved: SavedCheckpoint) -> Table:
    manifest = saved.manifest
    table = Table(
        title=str(saved.folder), title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False
    )
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("step", str(manifest.step))
    table.add_row("saved", _time(manifest.created))
    table.add_row("layout", _layout(manifest))
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    tensors = manifest.tensors.values()
    table.add_row("tensors", f"{len(tensors)}, {size_text(sum(map(num_bytes_of, tensors)))}")
    for file, size in manifest.files.items():
        found = saved.folder.size(file)
        note = "" if found == size else "  [red]is not there" if found is None else f"  [red]has {found} bytes"
        table.add_row("file", f"{file}  {size_text(size)}{note}")
    return table


def _by_group(tensors: Mapping[str, SavedTensor]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {"model": [], "optimizer": [], "other": []}
    for name in tensors:
        groups[_GROUPS.get(name.partition("/")[0], "other")].append(name)
    return {group: names for group, names in groups.items() if names}


def _tensor_table(group: str, names: list[str], tensors: Mapping[str, SavedTensor], is_full: bool) -> Table:
    dtypes = Counter(tensors[name].dtype for name in names)
    listed = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
    size = size_text(sum(num_bytes_of(tensors[name]) for name in names))
    table = _table("name", "shape", "dtype", "parts", title=f"\n{group}: {len(names)} tensors, {size} ({listed})")
    for name in names if is_full else names[:_MOST_ROWS]:
        tensor = tensors[name]
        row = (" x ".join(map(str, tensor.shape)) or "scalar", tensor.dtype, _parts_text(tensor))
        table.add_row(name.partition("/")[2] if group != "other" else name, *row)
    if not is_full and len(names) > _MOST_ROWS:
        table.caption = f"and {len(names) - _MOST_ROWS} more: --tensors"
    return table


def _parts_text(tensor: SavedTensor) -> str:
    if len(tensor.parts) == 1:
        return "whole"
    return f"{len(tensor.parts)} along {tensor.parts[0].dim}"


def _other_entries(manifest: Manifest) -> Table:
    table = _table("entry", "", title="\nother entries")
    table.columns[1].justify = "left"
    document = manifest.document if isinstance(manifest.document, dict) else {}
    for key, value in document.items():
        if key not in _GROUPS:
            text = json.dumps(value)
            table.add_row(key, text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)")
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
            console.print(f"[red]damaged[/]  {one}")
            console.print(*(f"  {problem}" for problem in problems), sep="\n", soft_wrap=True, markup=False)
        else:
            console.print(f"[green]whole[/]    {one}", soft_wrap=True)
    return status


def _problems_of(folder: Folder) -> list[str]:
    try:
        saved = SavedCheckpoint(folder, folder.manifest())
    except ValueError as error:
        return [str(error)]
    total = sum(part.num_bytes for tensor in saved.manifest.tensors.values() for part in tensor.parts)
    with _progress("verify", total) as seen:
        return list(find_damage(saved, seen))


def find_damage(saved: SavedCheckpoint, seen: Callable[[int], None]) -> Iterator[str]:
    """Read all of a checkpoint in blocks, and yield what is not as it was written.

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
            yield f"{file}, {held}: is not there"
            continue
        if size != expected:
            yield f"{file}, {held}: has {size} bytes, expected {expected}"
        yield from _damage_of_file(saved.folder, file, parts, seen)


def _damage_of_file(
    folder: Folder, file: str, parts: list[tuple[str, SavedPart]], seen: Callable[[int], None]
) -> Iterator[str]:
    path = folder.file(file)
    with open(path, "rb") if folder.is_local else folder.fs.open(path, "rb") as stream:
        problem = _damage_of_header(stream, [part for _, part in parts])
        if problem:
            yield f"{file}: {problem}"
        for name, part in sorted(parts, key=lambda entry: entry[1].begin):
            where = f"{file}, `{name}`, bytes {part.begin} to {part.begin + part.num_bytes}"
            try:
                found = _checksum_of_part(stream, part, seen)
            except OSError as error:
                yield f"{where}: cannot be read: {error}"
                continue
            if found != part.checksum:
                yield f"{where}: checksum {found:016x}, expected {part.checksum:016x}"


def _checksum_of_part(stream: Any, part: SavedPart, seen: Callable[[int], None]) -> int:
    total = 0
    for at in range(0, part.num_bytes, _BLOCK):
        size = min(_BLOCK, part.num_bytes - at)

        def read(begin: int = part.begin + at, size: int = size) -> bytes:
            stream.seek(begin)
            return bytes(stream.read(size))

        block = retried(read)
        total = add_checksums(total, checksum(np.frombuffer(block, np.uint8), at // WORD))
        seen(size)
    return total


def _damage_of_header(stream: Any, parts: list[SavedPart]) -> str:
    """Tell what is wrong with the header of a `safetensors` file, by which other programs read it."""
    stream.seek(0)
    size = int.from_bytes(stream.read(8), "little")
    first = min((part.begin for part in parts), default=8 + size)
    if 8 + size != first:
        return f"its header has {size} bytes, expected {first - 8}"
    try:
        entries = json.loads(stream.read(size))
        offsets = sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its header cannot be read: {error}"
    expected = sorted((part.begin - first, part.begin - first + part.num_bytes) for part in parts)
    return "" if offsets == expected else "its header names other places than the manifest"


# ------------------------------------------------------------------------------------------- merge, reshard and export


def _tensor_bytes(saved: SavedCheckpoint) -> int:
    return sum(map(num_bytes_of, saved.manifest.tensors.values()))


def _merge(options: argparse.Namespace) -> int:
    saved = SavedCheckpoint.open(options.path)
    with _progress("merge", _tensor_bytes(saved)) as seen:
        merge_checkpoint(saved, options.output, seen)
    Console(width=options.width, highlight=False).print(f"wrote {options.output}", soft_wrap=True)
    return 0


def _reshard(options: argparse.Namespace) -> int:
    saved = SavedCheckpoint.open(options.path)
    with _progress("reshard", _tensor_bytes(saved)) as seen:
        count = reshard(saved, options.output, options.files, seen)
    Console(width=options.width, highlight=False).print(f"wrote {options.output}, {count} files", soft_wrap=True)
    return 0


def _export(options: argparse.Namespace) -> int:
    saved = SavedCheckpoint.open(options.path)
    size = size_in_bytes(options.max_shard_size)
    tensors = saved.manifest.tensors
    total = sum(num_bytes_of(tensors[name]) for name in _by_group(tensors).get("model", ()))
    with _progress("export", total) as seen:
        files, left_out = export_weights(saved, options.output, size, options.prefix, seen)
    note = f"; left out {left_out} tensors whose names do not begin with `{options.prefix}`" if left_out else ""
    console = Console(width=options.width, highlight=False)
    console.print(f"wrote {', '.join(files)} to {options.output}{note}", soft_wrap=True)
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "inspect": _inspect,
    "verify": _verify,
    "merge": _merge,
    "reshard": _reshard,
    "export": _export,
}
"""The commands by name; each returns the exit status."""
