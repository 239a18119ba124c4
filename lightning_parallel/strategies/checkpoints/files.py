"""Files of checkpoints: a fault during a save leaves the previous file intact, and a damaged file is not loaded.

A save writes a hidden file beside its target, flushes it to the disk, and replaces the target at once
(`checkpoint.place`). Lightning instead writes to `$TMPDIR` and moves the file. Between file systems a move is a copy,
which a full disk can interrupt. Rank zero writes, and all ranks learn the outcome. `SafeCheckpointIO` is only the
default of the strategies: a plugin of the user replaces it.
"""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional, TypeVar
from zipfile import BadZipFile, ZipFile, ZipInfo, is_zipfile

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.checkpoint.distributed import is_inflated
from lightning_parallel.checkpoint.place import put_file
from lightning_parallel.comm import Group
from lightning_parallel.compat.lightning import (
    PathLike,
    asynchronous_io,
    finish_saves,
    innermost_io,
    run_after_saves,
    set_default_io,
)
from lightning_parallel.compat.ray import accept_strategies, is_ray_environment, ray_device

__all__ = ["LOCAL_STEPS", "SafeCheckpointIO", "SavesFiles", "check_file", "local_path", "saves_under_way"]

T = TypeVar("T")

LOCAL_STEPS = "local_sgd"
"""Key of the entry of `LocalSGDStrategy` in a checkpoint. Its compressors remember drifts of parameters."""

_ZIP_HEAD, _PICKLE_HEAD = b"PK\x03\x04", b"\x80"
_IS_FOLDER = 0x10
_TORCH_LOADS_ALL = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""The variable by which a user lets `torch.load` run code of a file, without the argument `weights_only`."""
_CHUNK_BYTES = 1 << 22


# ---------------------------------------------------------------------------------------------------------- reading


def check_file(path: PathLike) -> None:
    """Check a local checkpoint by the CRC-32 of each record, which `torch.load` does not check.

    Folders, files elsewhere, and formats of `torch.save` without CRC-32 pass.

    Raises:
        RuntimeError: If the file is damaged, with the damaged records.
    """
    local = local_path(path)
    if local is None or not local.is_file():
        return
    with local.open("rb") as file:
        head = file.read(len(_ZIP_HEAD))
    if head != _ZIP_HEAD:
        is_older = head.startswith(_PICKLE_HEAD) or (bool(head) and tarfile.is_tarfile(local))
        if is_zipfile(local) or not is_older:
            what = f"it begins with {head!r}" if head else "it is empty"
            raise _damaged(path, f"{what}, but a file of `torch.save` begins with {_ZIP_HEAD!r}")
        return
    try:
        # Threads help, because zlib computes a checksum without Python's lock.
        with ZipFile(local) as archive, ThreadPoolExecutor(4) as pool:
            records = archive.infolist()
            if is_inflated(records, local.stat().st_size):
                raise BadZipFile("its records are larger than the file, although torch does not compress")
            # If all are zero, the writer has left them out (`torch.serialization.set_crc32_options`).
            if any(record.CRC for record in records):
                found = [fault for fault in pool.map(lambda record: _fault_of(archive, record), records) if fault]
            else:
                found = []
    except BadZipFile as error:
        raise _damaged(path, f"its end with the list of records is missing or changed ({error})") from error
    except Exception as error:  # damaged fields raise many kinds of errors
        raise _damaged(path, f"the list of its records cannot be read ({error})") from error
    if found:
        raise _damaged(path, "; ".join(found[:8]) + (f"; and {len(found) - 8} more" if len(found) > 8 else ""))


def _fault_of(archive: ZipFile, record: ZipInfo) -> str | None:
    """Read a record to its end, where `zipfile` compares the CRC-32; returns its fault, or None."""
    if record.external_attr & _IS_FOLDER:
        return f"record {record.filename!r} is marked as a folder"  # torch would read no data, without an error
    try:
        with archive.open(record) as file:
            while file.read(_CHUNK_BYTES):
                pass
    except Exception as error:  # the kind of error depends on the damaged field
        return f"record {record.filename!r}: {error}"
    return None


def _damaged(path: PathLike, what: str) -> RuntimeError:
    return RuntimeError(
        f"The checkpoint {path} is damaged: {what}. It must be a complete file of `torch.save`. Load an earlier"
        " checkpoint, or copy this one again from an intact source"
    )


def local_path(path: PathLike) -> Path | None:
    """Return the path on a local file system; None for other file systems, such as `s3://` and `memory://`."""
    system, name = url_to_fs(str(path))
    return Path(name) if isinstance(system, LocalFileSystem) else None


# ------------------------------------------------------------------------------------------------------ in Lightning


class SafeCheckpointIO(TorchCheckpointIO):
    """Replaces local files at once; for other file systems, it equals Lightning's `TorchCheckpointIO`."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Optional[Any] = None
    ) -> None:
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            put_file(local, lambda file: torch.save(checkpoint, file))  # type: ignore[arg-type]

    @override
    def load_checkpoint(
        self,
        path: PathLike,
        map_location: Optional[Callable[..., Any]] = lambda storage, _: storage,
        weights_only: Optional[bool] = None,
    ) -> dict[str, Any]:
        if weights_only is None and os.environ.get(_TORCH_LOADS_ALL, "").lower() not in ("1", "y", "yes", "true"):
            # Lightning takes False then for `http://` and `https://`, where a file may come from anybody.
            weights_only = True
        try:
            return super().load_checkpoint(path, map_location, weights_only)
        except Exception as error:  # a damaged pickle raises nearly anything
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is of a place before the beginning
                raise
            # Many messages of torch do not name the file.
            raise RuntimeError(f"The checkpoint {path} cannot be loaded: {error or type(error).__name__}") from error


_under_way: list[str] = []
"""The paths of the saves that `AsyncCheckpointIO` has not completed; a list, since its methods are atomic."""


def saves_under_way(path: PathLike) -> int:
    """Return how many saves under one path are not complete, on rank zero."""
    return _under_way.count(str(path))


class SavesFiles(ParallelStrategy):
    """Base class of strategies: `SafeCheckpointIO` writes files by default, and an error is raised on all ranks.

    Only rank zero writes. If it raised alone, the other ranks would wait.
    """

    @property
    def every_rank(self) -> Group:
        """The ranks that save and load together."""
        return Group.of()

    def path_of_parts(self, filepath: PathLike) -> tuple[str, bool]:
        """Return the place of this rank's part of a checkpoint, and whether each rank has another place.

        All ranks write beside the path of the first rank, since ranks may name a checkpoint after a metric of their
        replica. Under Ray, ranks with different paths write beside their own: Ray joins the folders of workers whose
        hosts share no storage. Every rank must call it.
        """
        paths = comm.all_gather_object(str(filepath), self.every_rank)
        is_apart = is_ray_environment(self.cluster_environment) and len(set(paths)) == len(paths) > 1
        return (str(filepath) if is_apart else paths[0]), is_apart

    @property
    @override
    def root_device(self) -> torch.device:
        device = ray_device(self.cluster_environment)
        return super().root_device if device is None else device  # type: ignore[safe-super]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if is_ray_environment(self.cluster_environment):
            # The Trainer in a Ray worker assumes one host with one device.
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return super().distributed_sampler_kwargs

    @override
    def _configure_launcher(self) -> None:
        # This is the first hook that knows the environment, before the user passes the Trainer to Ray.
        accept_strategies(self.cluster_environment, SavesFiles)
        super()._configure_launcher()

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        # Set the default here: in the constructor it would count as the user's, and exclude a plugin of the Trainer.
        set_default_io(self, SafeCheckpointIO)
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        ParallelStrategy.checkpoint_io.fset(self, io)  # type: ignore[attr-defined]

    def together(self, function: Callable[[], T]) -> T:
        """Return the result of `function` on this rank; if it fails on one rank, raise on all ranks."""
        with comm.failing_together(self.every_rank):
            return function()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Optional[Any] = None
    ) -> None:
        # Outside the function below, in which `super()` has no arguments.
        write = super().save_checkpoint

        def save() -> None:
            write(checkpoint, filepath, storage_options)
            self.save_beside(filepath)
            queue = asynchronous_io(self.checkpoint_io)
            if queue is not None and self.is_global_zero:
                _under_way.append(str(filepath))
                run_after_saves(queue, lambda: _under_way.remove(str(filepath)))

        self.together(save)

    def save_beside(self, filepath: PathLike) -> None:
        """Write more files into the folder of a checkpoint; called on all ranks."""

    def remove_beside(self, filepath: PathLike) -> None:
        """Remove the files beside a checkpoint that is removed; called on the first rank."""

    @override
    def remove_checkpoint(self, filepath: PathLike) -> None:
        queue = asynchronous_io(self.checkpoint_io)
        if queue is None:
            super().remove_checkpoint(filepath)
            if self.is_global_zero:
                self.remove_beside(filepath)
        elif self.is_global_zero:

            def remove() -> None:
                queue.remove_checkpoint(filepath)
                self.remove_beside(filepath)

            # Lightning removes the old checkpoint while the new checkpoint, which may yet fail, is still being written.
            run_after_saves(queue, remove)

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: Optional[bool] = None) -> dict[str, Any]:
        # One rank of a host checks for all of them: they read the same file. A plugin of the user has its own format.
        is_mine = self.local_rank == 0 and isinstance(innermost_io(self.checkpoint_io), SafeCheckpointIO)
        # Outside the lambda below, in which `super()` has no arguments.
        load = super().load_checkpoint
        self.together(lambda: check_file(checkpoint_path) if is_mine else None)
        return self.together(lambda: load(checkpoint_path, weights_only))

    @override
    def teardown(self) -> None:
        queue = asynchronous_io(self.checkpoint_io)
        module = self.lightning_module
        if queue is not None and module is not None:
            failure = finish_saves(queue)
            if module.trainer.state.status == TrainerStatus.RUNNING:
                assert failure is None or isinstance(failure, Exception)
                comm.raise_together(failure, self.every_rank)
            elif failure is not None:
                # After an exception, other ranks may be in any collective, and the exception itself is raised.
                rank_zero_warn(f"A checkpoint was not saved: {failure}")
        super().teardown()
