"""Writes the state of each rank's compressor to a file beside a checkpoint, without communication.

    checkpoints/
        last.ckpt                       {"compression": {"layout": "files", "key", "places", "step", ...}, ...}
        compression-state/last.ckpt/
            <key>-0.pt  <key>-1.pt ...  the state of each rank

Each save has a new key, which ties the files to their checkpoint: a checkpoint never reads the files of another one.
The key begins with the time, so that names tell the latest files; not all file systems keep times.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Optional, get_args
from uuid import uuid4

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.checkpoint.folder import state_beside
from lightning_parallel.checkpoint.manifest import is_file_name
from lightning_parallel.comm import Group
from lightning_parallel.compat.lightning import PathLike
from lightning_parallel.compression import Reducer
from lightning_parallel.compression.compressor_state import REPLICATED, VERSION
from lightning_parallel.strategies.checkpoints.files import LOCAL_STEPS, check_file, local_path, replace_file

__all__ = [
    "KEY",
    "without_memory",
    "KeptState",
    "Place",
    "check_kept_state",
    "is_memory_of",
    "refers_to_files",
    "read_compression",
    "remove_compression",
    "write_compression",
]

KeptState = Literal["local", "exact", "mean", "none"]
"""How a checkpoint of one file stores the state of the compressor."""

KEY = "compression"
"""Of the entry in a checkpoint."""

_FILES = "files"
_KEPT = 2  # saves under one name: the last one may fail once its files are written


class Place(NamedTuple):
    """Which state a rank holds: that of a replica, at a position among the ranks that share the replica.

    Attributes:
        replica: Number of the replica; of the node, where its ranks share what is remembered: each holds a `part`.
        position: Number of the rank among those of its replica.
        part: Which part of it the rank holds.
        cut: How the ranks of a replica divide the model; those that divide it otherwise hold other parts at the same
            positions.
    """

    replica: int
    position: int
    part: int = 0
    cut: str = ""


def check_kept_state(state: object) -> None:
    """Check the argument `compressor_state` of a strategy.

    Raises:
        ValueError: If there is no such way to keep it.
    """
    if state not in get_args(KeptState):
        names = ", ".join(map(repr, get_args(KeptState)))
        raise ValueError(f"`compressor_state` must be one of {names}; got {state!r}")


def refers_to_files(state: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint's entry refers to files."""
    return state.get("layout") == _FILES


def is_memory_of(checkpoint: Mapping[str, Any], drifts: bool) -> bool:
    """Tell whether a checkpoint's compressors remember `drifts`, or gradients, which are larger by a learning rate."""
    is_same = (LOCAL_STEPS in checkpoint) == drifts
    if not is_same:
        found, wanted = ("gradients", "drifts of parameters") if drifts else ("drifts of parameters", "gradients")
        rank_zero_warn(
            f"The checkpoint holds the compressors' state for {found}, but this run compresses {wanted}. Residuals"
            " that were not sent yet are lost."
        )
    return is_same


def without_memory(reducer: Reducer) -> dict[str, Any]:
    """Return a state that says no more than how many steps there were."""
    return {"version": VERSION, "layout": "mean", "step": reducer.step, "world_size": 1}


def write_compression(state: Mapping[str, Any], place: Place, path: PathLike, world: Group) -> dict[str, Any]:
    """Write this rank's state beside the checkpoint at `path`; every rank must call it.

    Args:
        state: What this rank's compressor remembers.
        place: This rank's.
        path: The checkpoint, see `SavesFiles.path_of_parts`.
        world: All ranks.

    Returns:
        What the checkpoint is to hold of it, the same on all ranks.

    Raises:
        RuntimeError: On every rank, if one cannot write its file.
    """
    key = comm.broadcast_object(f"{time.time_ns():016x}{uuid4().hex[:8]}", world)
    folder, failure = state_beside(path), ""
    try:
        name = f"{key}-{world.rank}.pt"
        _write(f"{folder}/{name}", {**state, "key": key, "rank": world.rank})
        _remove_older(folder, name, world.rank)
    except Exception as error:
        failure = str(error) or type(error).__name__
    failures = {rank: text for rank, text in enumerate(comm.all_gather_object(failure, world)) if text}
    if failures:
        rank, text = next(iter(failures.items()))
        raise RuntimeError(
            f"The checkpoint {path} was not saved: rank {rank} cannot write the state of its compressor beside it"
            f" (`state='local'`): {text}"
        )
    places = [list(found) for found in comm.all_gather_object(tuple(place), world)]
    return {"version": VERSION, "layout": _FILES, "key": key, "places": places, "step": int(state["step"])}


def _write(target: str, state: dict[str, Any]) -> None:
    on_host = {
        key: {name: tensor.cpu() for name, tensor in value.items()} if isinstance(value, Mapping) else value
        for key, value in state.items()
    }
    local = local_path(target)
    if local is not None:
        replace_file(local, lambda file: torch.save(on_host, file))  # type: ignore[arg-type]
        return
    fs, name = url_to_fs(target)
    fs.makedirs(posixpath.dirname(name), exist_ok=True)
    with fs.open(name, "wb") as file:
        torch.save(on_host, file)


def _remove_older(folder: str, written: str, rank: int) -> None:
    """Remove this rank's files of all saves but the latest, of which `written` is one."""
    fs, name = url_to_fs(folder)
    with suppress(OSError, NotImplementedError):
        found = {str(path).rpartition("/")[2]: path for path in fs.ls(name, detail=False)}
        others = sorted(file for file in found if file.endswith(f"-{rank}.pt") and file != written)
        for file in others[: 1 - _KEPT]:
            fs.rm_file(found[file])


def read_compression(saved: Mapping[str, Any], place: Place, path: PathLike, world: Group) -> Optional[dict[str, Any]]:
    """Read the state that this rank continues with; every rank must call it.

    Args:
        saved: What `write_compression` returned.
        place: This rank's.
        path: The checkpoint.
        world: All ranks.

    Returns:
        The state of the same rank of as many, or those of all replicas in one; None where the model is divided
        otherwise, or files are missing: then on all ranks.
    """
    places = _checked_places(saved, path)
    now = comm.all_gather_object(place, world)
    if places == now:
        ranks = [world.rank]
    else:
        mine = place.position, place.cut
        is_same_model = {found[1::2] for found in places} == {found[1::2] for found in now}
        ranks = [rank for rank, found in enumerate(places) if found[1::2] == mine] if is_same_model else []
    states: list[dict[str, Any]] = []
    fault = "" if ranks else "the model now has another sharding or split"
    try:
        states = [_read(_found_beside(path), saved["key"], rank) for rank in ranks]
    except Exception as error:  # there are many, by what is damaged; alone, it would leave the other ranks waiting
        fault = f"not all files beside it can be read ({error})"
    faults = [found for found in comm.all_gather_object(fault, world) if found]
    if faults:
        rank_zero_warn(
            f"The checkpoint {path} refers to the compressors' state in {state_beside(path)}, but {faults[0]}."
            " Residuals that were not sent yet are lost."
        )
        return None
    return states[0] if places == now else _stacked(_of_replicas([places[rank] for rank in ranks], states))


def _checked_places(saved: Mapping[str, Any], path: PathLike) -> list[Place]:
    """Return the places of the ranks that saved; what is in a checkpoint somebody else may have written."""
    try:
        places = [Place(*found) for found in saved["places"]]
        is_right = all([type(part) for part in found] == [int, int, int, str] for found in places)
    except (KeyError, TypeError):
        is_right = False
    if not is_right or not is_file_name(saved.get("key")):
        raise ValueError(
            f"The checkpoint {path} is damaged: its entry about the compressors' files has an unknown form"
        )
    return places


def _found_beside(path: PathLike) -> str:
    """Return the folder beside a checkpoint, or beside that to which a link leads, as `save_last="link"` makes it."""
    local = local_path(path)
    return state_beside(path) if local is None else state_beside(os.path.realpath(local))


def _read(folder: str, key: str, rank: int) -> dict[str, Any]:
    source = f"{folder}/{key}-{rank}.pt"
    check_file(source)
    fs, name = url_to_fs(source)
    with fs.open(name, "rb") as file:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    found = state.pop("key"), state.pop("rank")
    if found != (key, rank):
        raise ValueError(f"{source} must hold the state of rank {rank} of save {key}; got {found}")
    return state


def _of_replicas(places: Sequence[Place], states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the parts of each replica's state."""
    joined: dict[int, dict[str, Any]] = {}
    for place, state in zip(places, states):
        whole = joined.setdefault(place.replica, {})
        for key, value in state.items():
            whole[key] = {**whole.get(key, {}), **value} if isinstance(value, Mapping) else value
    return list(joined.values())


def _stacked(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the states of several ranks as `gather_state` would."""
    joined = {**states[0], "layout": "stacked", "world_size": len(states)}
    for slot, named in states[0].items():
        if isinstance(named, Mapping) and slot not in REPLICATED:
            joined[slot] = {name: torch.stack([_row(state, slot, name) for state in states]) for name in named}
    return joined


def _row(state: Mapping[str, Any], slot: str, name: str) -> Tensor:
    found: Tensor = state[slot][name]
    return found


def remove_compression(path: PathLike) -> None:
    """Remove what is beside a checkpoint that is removed."""
    fs, name = url_to_fs(state_beside(path))
    with suppress(OSError):
        if fs.exists(name):
            fs.rm(name, recursive=True)
    if isinstance(fs, LocalFileSystem):
        with suppress(OSError):
            os.rmdir(os.path.dirname(name))  # if it was the last one
