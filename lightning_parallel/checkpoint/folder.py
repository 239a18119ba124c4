"""The folder of a sharded checkpoint: how it is written, so that it is whole or not there, and how it is found.

On a local disk a save has a folder of its own, which gets its name when all is in it:

    checkpoints/.partial-5f3c.../            written: 5f3c-00000.safetensors, ..., manifest.json; synced
    checkpoints/epoch=0-step=10.ckpt/        renamed, exchanged with the one that had the name before
    checkpoints/latest.json                  replaced

Stores of objects (`s3://`) and file systems in memory cannot rename folders: there the files get their place at once,
under names that are used once, and the manifest, written last, is what makes them a checkpoint.

What was not finished when its process was killed is removed by the next save beside it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_parallel.checkpoint.manifest import Manifest, is_file_name
from lightning_parallel.comm import process_host

__all__ = [
    "ABANDONED_S",
    "LATEST",
    "MANIFEST",
    "TRANSIENT",
    "Folder",
    "NewFolder",
    "checkpoints_in",
    "find",
    "is_sharded_checkpoint",
    "new_key",
    "newest_in",
    "remove_abandoned",
    "replacing",
    "retried",
    "state_beside",
    "sync_file",
    "sync_folder",
]

MANIFEST = "manifest.json"
LATEST = "latest.json"
_PARTIAL, _REPLACED = ".partial-", ".replaced-"
ABANDONED_S = 3600.0
"""Age at which what a process on another machine has begun counts as left behind, if nothing in it has changed."""
TRANSIENT = {errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EBUSY}
"""Errors of storage that may pass."""
_PAUSES_S = (0.5, 1.0, 2.0)

T = TypeVar("T")


def retried(function: Callable[[], T]) -> T:
    """Call `function`, again after a pause if the storage fails in a way that may pass."""
    for pause in _PAUSES_S:
        try:
            return function()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            time.sleep(pause)
    return function()


@dataclass(frozen=True)
class Folder:
    """A folder of a file system.

    Attributes:
        fs: The file system.
        path: The folder, as the file system names it.
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
        return Folder(self.fs, self.path.rpartition("/")[0])

    def within(self, name: str) -> Folder:
        """Return a folder in it."""
        return Folder(self.fs, self.file(name))

    def file(self, name: str) -> str:
        """Return the path of a file in it."""
        return f"{self.path}/{name}"

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return bytes(retried(lambda: self.fs.cat_file(self.file(name))))

    def manifest(self) -> Manifest:
        """Return what the checkpoint in it holds.

        Raises:
            ValueError: If its manifest is damaged.
        """
        return Manifest.from_json(self.read(MANIFEST), self.file(MANIFEST))

    def has(self, name: str) -> bool:
        """Tell whether there is such a file."""
        return bool(self.fs.isfile(self.file(name)))

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it is not there, or no file: a pipe would be waited for."""
        try:
            found = self.fs.info(self.file(name))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def write(self, name: str, content: bytes) -> None:
        """Write a file that is there with all of `content`, or as before."""
        if not self.is_local:
            retried(lambda: self.fs.pipe_file(self.file(name), content))
            return

        def write() -> None:
            with replacing(self.file(name)) as temporary, open(temporary, "wb") as stream:
                stream.write(content)
                sync_file(stream)
            sync_folder(self.path)

        retried(write)

    def remove(self) -> None:
        """Remove it, the manifest first: a checkpoint that is removed in part is none. Of a link, the link alone."""
        if self.is_local and os.path.islink(self.path):
            os.unlink(self.path)
            return
        with suppress(FileNotFoundError, NotADirectoryError):  # it may be a file, of the other format
            self.fs.rm(self.file(MANIFEST))
        with suppress(FileNotFoundError):
            self.fs.rm(self.path, recursive=True)


@contextmanager
def replacing(target: str | os.PathLike[str]) -> Iterator[str]:
    """Give the path of a new hidden file, which takes the place of `target` at the end: that is whole, or as before.

    It did not exist before: in a folder where others may write, a link under a name that can be guessed would lead to
    any file of this user's. `remove_abandoned` removes what a killed process has left.
    """
    # With a suffix: torch writes no file whose name begins with its only dot.
    temporary = f"{os.path.dirname(target) or '.'}/{_PARTIAL}{new_key()}.tmp"
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def sync_file(stream: Any) -> None:
    """Wait until what was written to a file is on the disk."""
    stream.flush()
    with suppress(OSError, AttributeError, ValueError):  # not a file of the operating system
        os.fsync(stream.fileno())


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Wait until the names in a folder are on the disk.

    Raises:
        OSError: If it is gone, or the storage fails in a way that may pass.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some network file systems have no such thing.
        if error.errno in TRANSIENT or error.errno == errno.ENOENT:
            raise


# ------------------------------------------------------------------------------------------------------------ writing


@dataclass(frozen=True)
class NewFolder:
    """Where a checkpoint is written, before it is one.

    Attributes:
        target: The folder that it will be.
        work: Where files are written until then.
        key: Names this save and the process that began it.
    """

    target: Folder
    work: Folder
    key: str

    @classmethod
    def begin(cls, target: Folder, key: str) -> NewFolder:
        """Make the folder, on the first rank; removes what killed processes have left beside it.

        Raises:
            ValueError: If there is something else at the target.
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
        """Return what `begin` has made, on the other ranks."""
        work = target
        if target.is_local:
            # Not the target's name in it: Lightning takes every name with `last` in it for the last checkpoint.
            work = Folder(target.fs, f"{target.parent.path}/{_PARTIAL}{key}")
        return cls(target, work, key)

    def file(self, rank: int) -> str:
        """Return the name of the file of a rank."""
        return f"{self._prefix}-{rank:05d}.safetensors"

    @property
    def _prefix(self) -> str:
        return self.key.partition("-")[0]

    def abort(self) -> None:
        """Remove what was written."""
        if self.work != self.target:
            shutil.rmtree(self.work.path, ignore_errors=True)
            return
        for path in self.target.fs.ls(self.target.path, detail=False):
            if str(path).rpartition("/")[2].startswith(self._prefix):
                self.target.fs.rm(path)

    def commit(self, manifest: Manifest, own: str | None = None) -> None:
        """Make it the checkpoint; everything that the manifest names must be written and synced.

        Args:
            manifest: What the checkpoint holds.
            own: The one file that is here; None if all are.

        Raises:
            ValueError: If files are not there, or of another size.
        """
        for file, size in manifest.files.items():
            if own is None or file == own:
                self._check(file, size)
        manifest.name = self.target.name if is_file_name(self.target.name) else ""
        self._finish(manifest)

    def take_part(self, file: str, size: int) -> None:
        """Give the folder its name where it holds this rank's part alone, without a manifest.

        Raises:
            ValueError: If the part is not there, or of another size.
        """
        self._check(file, size)
        if self.work != self.target:
            _rename(self.work.path, self.target.path)

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
            self.target.write(MANIFEST, manifest.to_json())
            for file in before.files if before is not None else ():
                if file not in manifest.files:
                    self.target.fs.rm(self.target.file(file))
        else:
            self.work.write(MANIFEST, manifest.to_json())
            _rename(self.work.path, self.target.path)
            retried(lambda: sync_folder(self.target.parent.path))
        entry = {"checkpoint": self.target.name, "step": manifest.step, "created": manifest.created}
        self.target.parent.write(LATEST, json.dumps(entry).encode())


def _manifest_of(folder: Folder) -> Manifest | None:
    try:
        return folder.manifest()
    except (OSError, ValueError):
        return None


def _rename(source: str, target: str) -> None:
    """Give the folder `source` the name `target`, which another folder may have."""
    if not os.path.lexists(target):
        try:
            os.rename(source, target)
            return
        except OSError:
            if not os.path.lexists(target):
                raise
    if os.path.islink(target):
        os.unlink(target)
        os.rename(source, target)
        return
    if _exchange(source, target):
        shutil.rmtree(source, ignore_errors=True)
        return
    # Between the two renames nothing has the name: who looks for it finds it by the name in the manifest.
    replaced = source.replace(_PARTIAL, _REPLACED)
    os.rename(target, replaced)
    os.rename(source, target)
    shutil.rmtree(replaced, ignore_errors=True)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(one: str, other: str) -> bool:
    """Exchange the names of two folders at once; tells whether the system can do so: Linux on a local disk."""
    if not sys.platform.startswith("linux"):
        return False
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    return function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def state_beside(path: str | os.PathLike[str]) -> str:
    """Return the folder of what ranks write by themselves beside a checkpoint in one file.

    Its own name is not that of the checkpoint, as Lightning looks for `last` in all names beside a checkpoint.
    """
    parent, _, name = str(path).rstrip("/").rpartition("/")
    return f"{parent}/rank-state/{name}" if parent or str(path).startswith("/") else f"rank-state/{name}"


def new_key() -> str:
    """Return a name for a save, which tells this process from a later one with the same number."""
    # In the folder's name and not in a file: the process may be killed before it has written one.
    return f"{uuid4().hex[:12]}-{_this_host()}-{os.getpid()}-{_start_of(os.getpid())}"


def _this_host() -> str:
    # Not by its name, which may have `last` in it, and which several containers may share.
    return f"{zlib.crc32(process_host().encode()):08x}"


def _start_of(pid: int) -> str:
    """Return when a process was started; 0 if there is none, or the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"


def remove_abandoned(parent: str | os.PathLike[str]) -> None:
    """Remove what saves of dead processes have left in `parent`, and give back a name that a killed rename took.

    What a process has begun that lives, or may live on another machine, stays.
    """
    with os.scandir(parent) as entries:
        found = [entry.path for entry in entries if entry.name.startswith((_PARTIAL, _REPLACED))]
    for path in found:
        if os.path.basename(path).startswith(_REPLACED):
            _recover(path)
        if not _is_abandoned(path):
            continue
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(path)


def _recover(path: str) -> None:
    manifest = _manifest_of(Folder.at(path))
    if manifest is None or not manifest.name:
        return
    # It stays beside itself, under a name that a checkpoint may have.
    target = os.path.join(os.path.dirname(path), manifest.name)
    if not manifest.name.startswith(".") and not os.path.lexists(target):
        with suppress(OSError):
            os.rename(path, target)


def _is_abandoned(path: str) -> bool:
    words = os.path.basename(path).removesuffix(".tmp").removesuffix(".ckpt").split("-")
    if len(words) == 5 and words[2] == _this_host() and words[4] != "0" and words[3].isdigit():
        return _start_of(int(words[3])) != words[4]
    try:
        inner = os.scandir(path) if os.path.isdir(path) else ()
        newest = max(os.stat(path).st_mtime, *(entry.stat().st_mtime for entry in inner), 0.0)
    except OSError:
        return False
    return time.time() - newest > ABANDONED_S


# ------------------------------------------------------------------------------------------------------------ finding


def is_sharded_checkpoint(path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> bool:
    """Tell whether there is a sharded checkpoint, or a folder of them with the note which is the latest."""
    return find(Folder.at(path, storage_options)) is not None


def find(folder: Folder) -> Folder | None:
    """Return the folder of the checkpoint at `folder`: itself, or the latest one in it; None if there is none."""
    if folder.has(MANIFEST):
        return folder
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
