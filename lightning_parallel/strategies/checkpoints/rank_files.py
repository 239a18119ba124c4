"""Writes the state of each rank to a file beside a checkpoint, without gathering it on one rank.

    checkpoints/
        last.ckpt                       {"compression": {"layout": "files", "key", "places"}, ...}
        rank-state/last.ckpt/
            compression-<key>-0.pt ...  the state of each rank

Each save has a new key, which ties the files to their checkpoint: a checkpoint never reads the files of another save.
The key begins with the time, so names show the latest files; not all file systems store times.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Union
from uuid import uuid4

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parallel import comm
from lightning_parallel.checkpoint.folder import state_beside
from lightning_parallel.checkpoint.manifest import is_file_name
from lightning_parallel.checkpoint.place import put_file
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat.lightning import PathLike
from lightning_parallel.compression.compressor_state import joined
from lightning_parallel.strategies.checkpoints.files import check_file, local_path, saves_under_way

__all__ = ["Place", "RankFiles", "remove_rank_files"]

State = dict[str, Any]

_LAYOUT = "files"


class Place(NamedTuple):
    """The place of a rank: its replica, its position in the replica, and its part of a state that ranks share.

    Attributes:
        replica: Number of the replica; with parts, number of the node.
        position: Number of the rank among the ranks of its replica.
        part: Number of the part, if the ranks of a node each hold the state of some parameters.
        cut: How the ranks of a replica shard and split the model. Another layout has other shards at equal positions.
    """

    replica: int
    position: int
    part: int = 0
    cut: str = ""

    @classmethod
    def of(cls, groups: MeshGroups) -> Place:
        """Return the place of this rank in a mesh."""
        # A replica of one rank has the place that it has under a strategy without a mesh.
        sizes = groups.pipeline_parallel.size, groups.tensor_parallel.size
        cut = "" if groups.model.size == 1 else "{} pipeline x {} tensor".format(*sizes)
        return cls(groups.gradients.rank, groups.model.rank, cut=cut)


@dataclass(frozen=True)
class RankFiles:
    """Files of one kind beside a checkpoint.

    Attributes:
        kind: First word of the names of the files.
        what: The content of the files, for messages.
        loss: The effect of losing the files, for messages.
    """

    kind: str
    what: str
    loss: str

    @staticmethod
    def are_in(saved: Mapping[str, Any]) -> bool:
        """Tell whether an entry of a checkpoint refers to files."""
        return saved.get("layout") == _LAYOUT

    def write(self, state: Mapping[str, Any], place: Place, path: PathLike, world: Group) -> dict[str, Any]:
        """Write this rank's state beside the checkpoint at `path`; every rank must call it.

        Args:
            state: Tensors by slot and name, and plain values.
            place: The place of this rank.
            path: The checkpoint, see `SavesFiles.path_of_parts`.
            world: All ranks.

        Returns:
            The entry for the checkpoint, equal on all ranks.

        Raises:
            RuntimeError: On every rank, if one rank cannot write its file.
        """
        # The time sorts the keys of saves under one name; the random part tells two jobs in one folder apart.
        key, queued = comm.broadcast_object((f"{time.time_ns():016x}{uuid4().hex[:8]}", saves_under_way(path)), world)
        folder, failure = state_beside(path), ""
        try:
            name = self._name(key, world.rank)
            _write(f"{folder}/{name}", {**state, "key": key, "rank": world.rank})
            # The last complete save stays: a save that is queued, or this save, may yet fail.
            self._remove_older(folder, name, world.rank, kept=1 + queued)
        except Exception as error:
            failure = str(error) or type(error).__name__
        # Rank zero writes the checkpoint next: it must not refer to a file that another rank could not write.
        everyone = comm.all_gather_object((failure, list(place)), world)
        failures = {rank: text for rank, (text, _) in enumerate(everyone) if text}
        if failures:
            rank, text = next(iter(failures.items()))
            raise RuntimeError(
                f"The checkpoint {path} was not saved: rank {rank} cannot write {self.what} beside it: {text}"
            )
        return {"layout": _LAYOUT, "key": key, "places": [found for _, found in everyone]}

    def read(
        self, saved: Mapping[str, Any], place: Place, path: PathLike, world: Group
    ) -> Union[State, list[State], None]:
        """Read the state that this rank continues with; every rank must call it.

        Args:
            saved: The entry that `write` returned.
            place: The place of this rank.
            path: The checkpoint.
            world: All ranks.

        Returns:
            This rank's state, if the places of all ranks are the saved places. Otherwise the states of all replicas at
            its position. None on all ranks, if the model is divided otherwise, or a file is missing or damaged.

        Raises:
            ValueError: If the entry is damaged.
        """
        places = _checked_places(saved, path)
        now = comm.all_gather_object(place, world)
        is_same_model = {_shard(found) for found in places} == {_shard(found) for found in now}
        if places == now:
            ranks = [world.rank]
        else:
            ranks = [rank for rank, found in enumerate(places) if is_same_model and _shard(found) == _shard(place)]
        states: list[State] = []
        fault = "" if ranks else "the model now has another sharding or split"
        try:
            folder = _found_beside(path)
            states = [_read(f"{folder}/{self._name(saved['key'], rank)}", saved["key"], rank) for rank in ranks]
        except Exception as error:  # damage raises many kinds; an error on one rank would leave other ranks waiting
            fault = f"not all files beside it can be read ({error})"
        # All ranks take their state, or none: residuals of some ranks alone would change the sum of the gradients.
        faults = [found for found in comm.all_gather_object(fault, world) if found]
        if faults:
            rank_zero_warn(
                f"The checkpoint {path} refers to {self.what} in {state_beside(path)}, but {faults[0]}. {self.loss}."
            )
            return None
        return states[0] if places == now else _whole_states([places[rank] for rank in ranks], states)

    def _name(self, key: str, rank: int) -> str:
        return f"{self.kind}-{key}-{rank}.pt"

    def _remove_older(self, folder: str, written: str, rank: int, kept: int) -> None:
        """Remove this rank's files, except `written` and the files of the `kept` saves before it."""
        fs, name = url_to_fs(folder)
        with suppress(OSError, NotImplementedError):
            found = {str(path).rpartition("/")[2]: path for path in fs.ls(name, detail=False)}
            own = [file for file in found if file.startswith(f"{self.kind}-") and file.endswith(f"-{rank}.pt")]
            for file in sorted(set(own) - {written})[:-kept]:
                fs.rm_file(found[file])


def _shard(place: Place) -> tuple[int, str]:
    """Return a key for the parameters of a rank: ranks with equal keys hold states of the same parameters."""
    return place.position, place.cut


def _write(target: str, state: Mapping[str, Any]) -> None:
    on_host = {
        key: {name: tensor.cpu() for name, tensor in value.items()} if isinstance(value, Mapping) else value
        for key, value in state.items()
    }
    local = local_path(target)
    if local is not None:
        put_file(local, lambda file: torch.save(on_host, file))  # type: ignore[arg-type]
        return
    fs, name = url_to_fs(target)
    fs.makedirs(posixpath.dirname(name), exist_ok=True)
    with fs.open(name, "wb") as file:
        torch.save(on_host, file)


def _checked_places(saved: Mapping[str, Any], path: PathLike) -> list[Place]:
    """Return the places of the ranks that saved."""
    # The checkpoint may come from an untrusted source: a key must not be a path.
    try:
        places = [Place(*found) for found in saved["places"]]
        is_right = all([type(part) for part in found] == [int, int, int, str] for found in places)
    except (KeyError, TypeError):
        is_right = False
    if not is_right or not is_file_name(saved.get("key")):
        raise ValueError(f"The checkpoint {path} is damaged: its entry about files of each rank has an unknown form")
    return places


def _found_beside(path: PathLike) -> str:
    """Return the folder beside a checkpoint, or beside the target of a link, as `save_last="link"` makes it."""
    local = local_path(path)
    return state_beside(path) if local is None else state_beside(os.path.realpath(local))


def _read(source: str, key: str, rank: int) -> State:
    check_file(source)
    fs, name = url_to_fs(source)
    with fs.open(name, "rb") as file:
        state: State = torch.load(file, map_location="cpu", weights_only=True)
    # A copied or renamed file has the right name and the residuals of another rank or save.
    found = state.pop("key"), state.pop("rank")
    if found != (key, rank):
        raise ValueError(f"{source} must hold the state of rank {rank} of save {key}; got {found}")
    return state


def _whole_states(places: Sequence[Place], states: Sequence[State]) -> list[State]:
    """Return the state of each replica, with the parts of its ranks joined."""
    parts: dict[int, list[State]] = {}
    for place, state in zip(places, states):
        parts.setdefault(place.replica, []).append(state)
    return [joined(parts[replica]) for replica in sorted(parts)]


def remove_rank_files(path: PathLike) -> None:
    """Remove the files beside a checkpoint that is removed."""
    fs, name = url_to_fs(state_beside(path))
    with suppress(OSError):
        if fs.exists(name):
            fs.rm(name, recursive=True)
    if isinstance(fs, LocalFileSystem):
        with suppress(OSError):
            os.rmdir(os.path.dirname(name))  # if it was the last one
