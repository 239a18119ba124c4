"""What each rank's compressor remembers, in files of their own beside a checkpoint: nothing travels between ranks.

    checkpoints/
        last.ckpt                       {"compression": {"layout": "files", "key", "places", "step", ...}, ...}
        compression-state/last.ckpt/
            <key>-0.pt  <key>-1.pt ...  the state of each rank

The key, new for each save, ties the files to their checkpoint: files of another one are never taken for its own.
"""

from __future__ import annotations

import os
import posixpath
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
from lightning_parallel.comm import Group
from lightning_parallel.compat.lightning import PathLike
from lightning_parallel.compression import Reducer
from lightning_parallel.compression.compressor_state import REPLICATED, VERSION
from lightning_parallel.strategies.checkpoint_files import local_path, replace_file

__all__ = [
    "KEY",
    "without_memory",
    "KeptState",
    "Place",
    "check_kept_state",
    "refers_to_files",
    "read_compression",
    "remove_compression",
    "write_compression",
]

KeptState = Literal["local", "exact", "mean", "none"]
"""What a checkpoint keeps of the compressors' memory; see `CompressedDDPStrategy`."""

KEY = "compression"
"""Of the entry in a checkpoint."""

_FILES = "files"
_KEPT = 2  # saves under one name: the last one may fail once its files are written


class Place(NamedTuple):
    """Which state a rank holds: that of a replica, at a position among the ranks that share the replica.

    Attributes:
        replica: A node, where its ranks share what is remembered; each then holds a `part`.
    """

    replica: int
    position: int
    part: int = 0


def check_kept_state(state: object) -> None:
    """Check the argument `state` of a strategy.

    Raises:
        ValueError: If there is no such way to keep it.
    """
    if state not in get_args(KeptState):
        raise ValueError(f"`state` must be one of {', '.join(map(repr, get_args(KeptState)))}, got {state!r}")


def refers_to_files(state: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint's entry refers to files."""
    return state.get("layout") == _FILES


def without_memory(reducer: Reducer) -> dict[str, Any]:
    """Return a state that says no more than how many steps there were."""
    return {"version": VERSION, "layout": "mean", "step": reducer.step, "world_size": 1}


def write_compression(state: Mapping[str, Any], place: Place, path: PathLike, world: Group) -> dict[str, Any]:
    """Write this rank's state beside the checkpoint at `path`; every rank must call it.

    Returns:
        What the checkpoint is to hold of it, the same on all ranks.

    Raises:
        RuntimeError: On every rank, if one cannot write its file.
    """
    key = comm.broadcast_object(uuid4().hex[:12], world)
    folder, failure = state_beside(path), ""
    try:
        _write(f"{folder}/{key}-{world.rank}.pt", dict(state))
        _remove_older(folder, world.rank)
    except Exception as error:
        failure = str(error) or type(error).__name__
    failures = {rank: text for rank, text in enumerate(comm.all_gather_object(failure, world)) if text}
    if failures:
        rank, text = next(iter(failures.items()))
        raise RuntimeError(
            f"the checkpoint {path} was not saved: rank {rank} cannot write what its compressor remembers beside it"
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


def _remove_older(folder: str, rank: int) -> None:
    """Remove this rank's files of all saves but the latest."""
    fs, name = url_to_fs(folder)
    with suppress(OSError, NotImplementedError):
        mine = [found for found in fs.ls(name, detail=True) if str(found["name"]).endswith(f"-{rank}.pt")]
        mine.sort(key=lambda found: found.get("mtime") or found.get("created") or 0, reverse=True)
        for found in mine[_KEPT:]:
            fs.rm_file(found["name"])


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
    places = [Place(*found) for found in saved["places"]]
    now = [Place(*found) for found in comm.all_gather_object(tuple(place), world)]
    if places == now:
        ranks = [world.rank]
    else:
        is_same_model = {found.position for found in places} == {found.position for found in now}
        ranks = [rank for rank, found in enumerate(places) if found.position == place.position] if is_same_model else []
    states: list[dict[str, Any]] = []
    for rank in ranks:
        with suppress(OSError, RuntimeError, EOFError, ValueError):
            states.append(_read(f"{state_beside(path)}/{saved['key']}-{rank}.pt"))
    if comm.on_any_rank([not ranks or len(states) < len(ranks)], world)[0]:
        why = "the model is divided otherwise now" if not ranks else "not all files beside it can be read"
        rank_zero_warn(
            f"The checkpoint {path} refers to the compressors' memory in {state_beside(path)}, but {why}: what was not"
            " sent yet is forgotten."
        )
        return None
    return states[0] if places == now else _stacked(_of_replicas([places[rank] for rank in ranks], states))


def _read(source: str) -> dict[str, Any]:
    fs, name = url_to_fs(source)
    with fs.open(name, "rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)


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
