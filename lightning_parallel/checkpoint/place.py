"""Puts files and folders in place: at any time, either the complete new one or the old one has the name.

    checkpoints/.partial-5f3c...-<host>-<pid>-<start>.tmp    a file while it is written; then synced and renamed
    checkpoints/.partial-5f3c...-<host>-<pid>-<start>        a folder while it is written
    checkpoints/.replaced-5f3c...                            a folder that loses its name to a new one, for a moment

The hidden name identifies the writer. `collect_leftovers` removes the hidden files and folders of dead writers. On this
host, a writer is dead after its process has ended. On another host, it counts as dead after an hour without a touch. A
writer touches its file or folder every minute, also during a slow save.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from lightning_parallel.comm import Helper, Process, host_id

__all__ = [
    "PAUSES_S",
    "PARTIAL",
    "REPLACED",
    "NewFile",
    "collect_leftovers",
    "hidden_path",
    "new_key",
    "put_file",
    "put_in_place",
    "remove_path",
    "retried",
    "sync_file",
    "sync_folder",
    "touched",
]

PARTIAL, REPLACED = ".partial-", ".replaced-"
# `.partial-`, a random number, the host, and the process and its start.
_HIDDEN = re.compile(r"\.(?:partial|replaced)-[0-9a-f]+-(?P<host>[0-9a-f]+)-(?P<pid>\d+)-(?P<start>\d+)(?:\.\w+)?")
TOUCH_S = 60.0
"""Seconds between two touches of a file or folder that is being written."""
ABANDONED_S = 3600.0
"""Seconds without a touch after which a writer on another host counts as dead."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before each new attempt after a transient error of the storage."""
_TRANSIENT = frozenset({errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EBUSY})

T = TypeVar("T")


def retried(function: Callable[[], T], what: str = "", passing: Collection[int] = _TRANSIENT) -> T:
    """Call `function`, and call it again after a pause if the storage has a transient error.

    Args:
        function: The function.
        what: The file, for a warning before each pause; no warning if empty.
        passing: Codes of transient errors.
    """
    for pause in PAUSES_S:
        try:
            return function()
        except OSError as error:
            if error.errno not in passing:
                raise
            reason = error.strerror or str(error)
        if what:
            warnings.warn(f"{what} cannot be written: {reason}. The next attempt is in {pause:g} s.", stacklevel=3)
        time.sleep(pause)
    return function()


# --------------------------------------------------------------------------------------------------------------- files


def put_file(target: str | os.PathLike[str], content: bytes | Callable[[NewFile], Any]) -> None:
    """Write a file and replace `target` by it at once; after an error the previous file is intact.

    Args:
        target: The file; this function makes its folder.
        content: The content, or a function that writes it, which is called again after a transient error.

    Raises:
        RuntimeError: If the file cannot be written, with the reason of the system.
    """
    path = Path(target)

    def attempt() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        with NewFile(path.parent) as file, touched(file.path):
            file.write(content) if isinstance(content, bytes) else content(file)
            file.put(path)

    try:
        # ENOENT: another process has removed the folder, or the new file in it, meanwhile.
        retried(attempt, str(path), _TRANSIENT | {errno.ENOENT})
    except OSError as error:
        raise RuntimeError(
            f"{path} cannot be written: {error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'unknown')});"
            f" {_free_space(path.parent)}. A previous file of this name is intact. The new file is written"
            " beside it: make room for both and allow new files in the folder, or save elsewhere"
        ) from error


class NewFile:
    """A hidden file in the folder of its target, open for writing; `put` makes it the target, otherwise it is removed.

    `torch.save` and `gzip` write to it directly, without a copy in memory. `put` raises the `OSError` of an earlier
    write: torch would hide it behind an error about the end of the archive.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        # With a suffix: torch does not write a file whose only dot is its first character.
        self.path = Path(hidden_path(folder, suffix=".tmp"))
        # O_EXCL: in a shared folder, a link of another user under this name could lead to any file of this user.
        # O_BINARY exists on Windows only, which would otherwise write a line feed as two bytes.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._file: int | None = os.open(self.path, flags, 0o666)
        self._failure: OSError | None = None
        # Before the new file needs the space of the leftovers.
        collect_leftovers(folder)

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view and self._failure is None:
                assert self._file is not None
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._failure = error
        return size

    def flush(self) -> None:
        """Do nothing, because `write` buffers nothing."""

    def put(self, target: Path) -> None:
        """Replace `target` by the file, once the file is on the disk.

        Raises:
            OSError: If the replacement, or a write before it, has failed.
        """
        if self._failure is not None:
            raise self._failure
        assert self._file is not None
        # Before the rename: after a power failure, the name must not lead to an incomplete file.
        os.fsync(self._file)
        # Windows renames no open file.
        self._close()
        os.replace(self.path, target)
        # The new name is on the disk only after a sync of the folder.
        sync_folder(target.parent)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def _free_space(folder: Path) -> str:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return "its folder does not answer"
    return f"{free / 2**20:.1f} MiB are free there"


def sync_file(stream: Any) -> None:
    """Wait until the content of a file is on the disk.

    Raises:
        OSError: If the storage reports only now that it could not keep the content.
    """
    stream.flush()
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError, ValueError):
        return  # not a file of the operating system
    os.fsync(descriptor)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Wait until the names in a folder are on the disk.

    Raises:
        OSError: If the folder is gone, or the storage has a transient error.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some network file systems, and Windows, cannot sync a folder.
        if error.errno in _TRANSIENT or error.errno == errno.ENOENT:
            raise


# ------------------------------------------------------------------------------------------------------------- folders


def put_in_place(source: str, target: str) -> None:
    """Give a complete file or folder the name `target`, which another file or folder may have."""
    if not os.path.lexists(target):
        try:
            os.rename(source, target)
            return
        except OSError:
            # Another process may have taken the name meanwhile.
            if not os.path.lexists(target):
                raise
    if not os.path.isdir(source) and (os.path.islink(target) or not os.path.isdir(target)):
        os.replace(source, target)
        return
    if os.path.islink(target):
        os.unlink(target)
        os.rename(source, target)
        return
    if _exchange(source, target):
        remove_path(source)
        return
    # Between the two renames no folder has the name. A reader then finds the old folder by the name in its manifest.
    replaced = hidden_path(os.path.dirname(target), prefix=REPLACED)
    os.rename(target, replaced)
    os.rename(source, target)
    remove_path(replaced)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(one: str, other: str) -> bool:
    """Exchange the names of two folders at once; return False where the system cannot, as outside Linux."""
    if not sys.platform.startswith("linux"):
        return False
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    return function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def remove_path(path: str | os.PathLike[str]) -> None:
    """Remove a file, a link or a folder, as far as the system lets us."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)


# ----------------------------------------------------------------------------------------------------------- leftovers


def new_key() -> str:
    """Return a name for a save, which identifies this process."""
    # In the name, not in a file: the process may be killed before it has written a file.
    _, pid, started = Process.of()
    return f"{uuid4().hex[:12]}-{_short(host_id())}-{pid}-{started or 0}"


def _short(host: str) -> str:
    return f"{zlib.crc32(host.encode()):08x}"


def hidden_path(folder: str | os.PathLike[str], key: str | None = None, suffix: str = "", prefix: str = PARTIAL) -> str:
    """Return the hidden path of an incomplete file or folder.

    Args:
        folder: The folder.
        key: Name of the save; a new one by default.
        suffix: End of the name.
        prefix: `PARTIAL`, or `REPLACED`.
    """
    # Without the target's name: Lightning mistakes any name that contains `last` for the last checkpoint.
    return f"{os.fspath(folder) or '.'}/{prefix}{key or new_key()}{suffix}"


@contextmanager
def touched(path: str | os.PathLike[str]) -> Iterator[None]:
    """Touch a file or folder every minute during the block, so that collectors on other hosts see a live writer."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(TOUCH_S):
            with suppress(OSError):
                os.utime(path)

    helper = Helper("touch", touch, ended.set)
    # At its end the interpreter starts no threads. A save is then short, and needs no touches.
    with suppress(RuntimeError):
        helper.start()
    try:
        yield
    finally:
        ended.set()
        if helper.is_alive():
            helper.join()


def collect_leftovers(folder: str | os.PathLike[str], prefix: str = PARTIAL) -> None:
    """Remove the hidden files and folders of dead writers from `folder`, as far as the system lets us."""
    with suppress(OSError):
        for path in [entry.path for entry in os.scandir(folder) if entry.name.startswith(prefix)]:
            if _is_abandoned(path):
                remove_path(path)


def _is_abandoned(path: str) -> bool:
    name = _HIDDEN.fullmatch(os.path.basename(path))
    if name is None:
        return False
    host = host_id() if name["host"] == _short(host_id()) else ""
    is_alive = Process(host, int(name["pid"]), "" if name["start"] == "0" else name["start"]).is_alive()
    # None: the writer runs on another host, which only its touches tell about.
    if is_alive is not None:
        return not is_alive
    try:
        # A writer touches its folder, and each write changes the time of a file in it.
        inner = os.scandir(path) if os.path.isdir(path) else ()
        newest = max(os.stat(path).st_mtime, *(entry.stat().st_mtime for entry in inner), 0.0)
        return _now_at(os.path.dirname(path)) - newest > ABANDONED_S
    except OSError:
        return False


def _now_at(folder: str) -> float:
    """Return the time by the clock of the file system of a folder, which other hosts may share."""
    # By a new file: the clocks of this host and of a file server may differ.
    path = hidden_path(folder, suffix=".tmp")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return os.fstat(file).st_mtime
    finally:
        os.close(file)
        os.unlink(path)
