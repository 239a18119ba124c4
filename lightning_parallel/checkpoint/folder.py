"""The folder of a sharded checkpoint: writes it so that it is complete or absent, and finds it.

On a local disk a save has its own folder, which gets its name after all files are in it:

    checkpoints/.partial-5f3c.../            written: 5f3c-00000.safetensors, ..., manifest.json; synced
    checkpoints/epoch=0-step=10.ckpt/        renamed, exchanged with the folder that had the name before
    checkpoints/latest.json                  replaced

Object stores (`s3://`) and file systems in memory cannot rename folders. There each file gets its place at once, under
a name that is used once. The manifest, written last, makes the files a checkpoint.

The next save beside an unfinished save of a dead process removes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_parallel.checkpoint.manifest import Manifest, is_file_name
from lightning_parallel.checkpoint.place import (
    REPLACED,
    collect_leftovers,
    hidden_path,
    put_file,
    put_in_place,
    remove_path,
    retried,
    sync_folder,
    touched,
)

__all__ = [
    "LATEST",
    "MANIFEST",
    "Folder",
    "NewFolder",
    "checkpoints_in",
    "find",
    "is_sharded_checkpoint",
    "newest_in",
    "remove_abandoned",
    "state_beside",
]

MANIFEST = "manifest.json"
LATEST = "latest.json"


@dataclass(frozen=True)
class Folder:
    """A folder of a file system.

    Attributes:
        fs: The file system.
        path: The path of the folder in the file system.
    """

    fs: Any
    path: str

    @classmethod
    def at(cls, path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> Folder:
        """Return the folder of a path or URL."""
        fs, found = fsspec.core.url_to_fs(os.fspath(path), **(storage_options or {}))
        return cls(fs, str(found).rstrip("/") or "/")

    def __str__(self) -> str:
        return self.path

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Folder:
        head, slash, _ = self.path.rpartition("/")
        return Folder(self.fs, head or slash)

    def within(self, name: str) -> Folder:
        """Return a folder inside this folder."""
        return Folder(self.fs, self.file(name))

    def file(self, name: str) -> str:
        """Return the path of a file in this folder."""
        return f"{self.path}/{name}"

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return bytes(retried(lambda: self.fs.cat_file(self.file(name))))

    def manifest(self) -> Manifest:
        """Return the manifest of the checkpoint in this folder.

        Raises:
            ValueError: If the manifest is damaged.
        """
        return Manifest.from_json(self.read(MANIFEST), self.file(MANIFEST))

    def has(self, name: str) -> bool:
        """Tell whether this folder has a file called `name`."""
        return bool(self.fs.isfile(self.file(name)))

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it is missing or no regular file: reading a pipe would block."""
        try:
            found = self.fs.info(self.file(name))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def write(self, name: str, content: bytes) -> None:
        """Replace a file by `content` at once; after an error the previous file is intact."""
        if not self.is_local:
            retried(lambda: self.fs.pipe_file(self.file(name), content))
            return
        # Checked, because `put_file` would make a removed folder again, with this file alone.
        if not os.path.isdir(self.path):
            raise FileNotFoundError(f"The folder {self.path} of `{name}` was removed while it was written")
        put_file(self.file(name), content)

    def remove(self) -> None:
        """Remove this folder, the manifest first: the rest is no checkpoint. Of a link, remove only the link."""
        if self.is_local and os.path.islink(self.path):
            os.unlink(self.path)
            return
        with suppress(FileNotFoundError, NotADirectoryError):  # it may be a file, of the other format
            self.fs.rm(self.file(MANIFEST))
        with suppress(FileNotFoundError):
            self.fs.rm(self.path, recursive=True)


# ------------------------------------------------------------------------------------------------------------ writing


@dataclass(frozen=True)
class NewFolder:
    """The folder in which a save writes, before it is a checkpoint.

    Attributes:
        target: The folder of the complete checkpoint.
        work: The folder of the files until then.
        key: Names this save and the process that began it.
    """

    target: Folder
    work: Folder
    key: str

    @classmethod
    def begin(cls, target: Folder, key: str) -> NewFolder:
        """Make the folder, on the first rank, and remove unfinished saves of dead processes beside it.

        Raises:
            ValueError: If the target is another file or folder.
        """
        new = cls.found(target, key)
        if target.fs.isfile(target.path):
            if target.is_local:
                raise ValueError(f"The path {target} must be free, or a checkpoint; got a file. Choose another name")
        elif target.is_local and os.path.isdir(target.path) and not target.has(MANIFEST) and os.listdir(target.path):
            raise ValueError(
                f"The path {target} must be free, or a checkpoint; got a folder with other files. Choose another name"
            )
        if target.is_local:
            os.makedirs(target.parent.path, exist_ok=True)
            remove_abandoned(target.parent.path)
        new.work.fs.makedirs(new.work.path, exist_ok=True)
        return new

    @classmethod
    def found(cls, target: Folder, key: str) -> NewFolder:
        """Return the folder that `begin` makes, on any rank."""
        work = target
        if target.is_local:
            work = Folder(target.fs, hidden_path(target.parent.path, key))
        return cls(target, work, key)

    def file(self, rank: int) -> str:
        """Return the name of the file of a rank."""
        return f"{self._prefix}-{rank:05d}.safetensors"

    @contextmanager
    def written(self) -> Iterator[None]:
        """Show other hosts in the block that the writer lives, and remove the files of the save after an error."""
        with touched(self.work.path) if self.target.is_local else nullcontext():
            try:
                yield
            except BaseException:
                self._abort()
                raise

    @property
    def _prefix(self) -> str:
        return self.key.partition("-")[0]

    def _abort(self) -> None:
        """Remove the files of this save."""
        if self.work != self.target:
            remove_path(self.work.path)
            return
        with suppress(FileNotFoundError):
            for path in self.target.fs.ls(self.target.path, detail=False):
                if str(path).rpartition("/")[2].startswith(self._prefix):
                    self.target.fs.rm(path)

    def commit(self, manifest: Manifest, own: str | None = None) -> None:
        """Make this folder the checkpoint; all files that the manifest names must be written and synced.

        Args:
            manifest: The content of the checkpoint.
            own: The only file in this folder; None if all files are here.

        Raises:
            ValueError: If files are missing, or have another size.
        """
        for file, size in manifest.files.items():
            if own is None or file == own:
                self._check(file, size)
        manifest.name = self.target.name if is_file_name(self.target.name) else ""
        self._finish(manifest)

    def take_part(self, file: str, size: int) -> None:
        """Give the folder its name if it holds only this rank's part, without a manifest.

        Raises:
            ValueError: If the part is missing, or has another size.
        """
        self._check(file, size)
        if self.work != self.target:
            put_in_place(self.work.path, self.target.path)

    def _check(self, file: str, size: int) -> None:
        found = self.work.size(file)
        if found != size:
            raise ValueError(
                f"{self.work.file(file)}, which another rank wrote, must have {size} bytes; got"
                f" {'no file' if found is None else found}. Choose a folder that all ranks share"
            )

    def _finish(self, manifest: Manifest) -> None:
        if self.work == self.target:
            before = _manifest_of(self.target)
            # The manifest first: until then, the old manifest needs the old files.
            self.target.write(MANIFEST, manifest.to_json())
            for file in before.files if before is not None else ():
                if file not in manifest.files:
                    self.target.fs.rm(self.target.file(file))
        else:
            self.work.write(MANIFEST, manifest.to_json())
            put_in_place(self.work.path, self.target.path)
            # After a power failure, the parent must still have the new name.
            retried(lambda: sync_folder(self.target.parent.path))
        entry = {"checkpoint": self.target.name, "step": manifest.step, "created": manifest.created}
        # Last: until here the note leads to the previous checkpoint, which is complete.
        self.target.parent.write(LATEST, json.dumps(entry).encode())


def _manifest_of(folder: Folder) -> Manifest | None:
    try:
        return folder.manifest()
    except (OSError, ValueError):
        return None


def state_beside(path: str | os.PathLike[str]) -> str:
    """Return the folder of the files that ranks write beside a checkpoint in one file.

    Its name differs from the name of the checkpoint: Lightning looks for `last` in all names beside a checkpoint.
    """
    parent, _, name = str(path).rstrip("/").rpartition("/")
    return f"{parent}/rank-state/{name}" if parent or str(path).startswith("/") else f"rank-state/{name}"


def remove_abandoned(parent: str | os.PathLike[str]) -> None:
    """Remove unfinished saves of dead processes from `parent`, and restore a name that a killed rename took."""
    with os.scandir(parent) as entries:
        replaced = [entry.path for entry in entries if entry.name.startswith(REPLACED)]
    for path in replaced:
        _recover(path)
    # After the names are restored: a replaced folder may be the only copy of a checkpoint.
    collect_leftovers(parent, REPLACED)
    collect_leftovers(parent)


def _recover(path: str) -> None:
    manifest = _manifest_of(Folder.at(path))
    if manifest is None or not manifest.name:
        return
    # Any user may have written the manifest: the folder stays in its parent, under a name that a checkpoint may have.
    target = os.path.join(os.path.dirname(path), manifest.name)
    if not manifest.name.startswith(".") and not os.path.lexists(target):
        with suppress(OSError):
            os.rename(path, target)


# ------------------------------------------------------------------------------------------------------------ finding


def is_sharded_checkpoint(path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> bool:
    """Tell whether `path` is a sharded checkpoint, or a folder of checkpoints with a note of the latest."""
    return find(Folder.at(path, storage_options)) is not None


def find(folder: Folder) -> Folder | None:
    """Return the folder of the checkpoint at `folder`: itself, or the latest checkpoint in it; None without any."""
    if folder.has(MANIFEST):
        return folder
    # A killed rename may have taken the name: `remove_abandoned` restores it.
    if folder.is_local and not os.path.lexists(folder.path) and os.path.isdir(folder.parent.path):
        remove_abandoned(folder.parent.path)
        return folder if folder.has(MANIFEST) else None
    if folder.has(LATEST):
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError):
            name = json.loads(folder.read(LATEST))["checkpoint"]
            if is_file_name(name) and folder.within(name).has(MANIFEST):
                return folder.within(name)
        return next(newest_in(folder), None)
    return None


def checkpoints_in(folder: Folder) -> Iterator[Folder]:
    """Yield the sharded checkpoints in a folder by name, also those whose manifest is damaged."""
    if not folder.fs.isdir(folder.path):
        return
    for path in sorted(folder.fs.ls(folder.path, detail=False)):
        one = Folder(folder.fs, str(path).rstrip("/"))
        if not one.name.startswith(".") and one.has(MANIFEST):
            yield one


def newest_in(folder: Folder) -> Iterator[Folder]:
    """Yield the sharded checkpoints in a folder, the newest first."""
    found = [(one, _manifest_of(one)) for one in checkpoints_in(folder)]
    dated = [(manifest.step, manifest.created, one) for one, manifest in found if manifest is not None]
    yield from (one for _, _, one in sorted(dated, key=lambda entry: entry[:2], reverse=True))
