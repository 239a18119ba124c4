"""Optimizer state of replicas that step independently, in a checkpoint.

    "are_new"        [whether each replica's optimizers have no state yet]
    "optimizers"     in one file      the entry of `RankFiles`: each rank writes its slots beside the checkpoint
                     in a folder      the entry of `StateParts.divide`

A slot is an optimizer and a key of its state, such as "0.exp_avg", and holds tensors by parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat.lightning import PathLike
from lightning_parallel.compression.compressor_state import mean_of
from lightning_parallel.strategies.checkpoints.rank_files import Place, RankFiles
from lightning_parallel.strategies.compressed.parts import StateParts
from lightning_parallel.tensor.sharding import Shard

__all__ = ["ReplicaOptimizers"]

_FILES = RankFiles(
    "optimizers",
    "the optimizer state of each replica",
    "All replicas start with the optimizer state of the first replica",
)


@dataclass(frozen=True)
class ReplicaOptimizers:
    """Saves and restores the optimizer state of each replica; every rank must call each method.

    Attributes:
        module: The module, of which this rank holds a part.
        groups: The mesh's groups.
        rules: How its parameters are sharded, by name.
        optimizers: The optimizers of this rank.
        device: The device of their state.
    """

    module: nn.Module
    groups: MeshGroups
    rules: Mapping[str, Shard]
    optimizers: Sequence[Optimizer]
    device: torch.device

    def save(self, path: PathLike, is_sharded: bool) -> dict[str, Any]:
        """Return the entries of a checkpoint at `path`, which is sharded or one file with files beside it."""
        mine = self._slots()
        # Zeros cannot replace a missing state: an optimizer would skip its corrections of the first steps.
        are_new = comm.all_gather_object(not mine, self.groups.gradients)
        mine = self._filled(mine)
        if is_sharded:
            entry = self._parts.divide(mine)
        else:
            entry = _FILES.write(mine, Place.of(self.groups), path, self.groups.world)
        return {"are_new": are_new, "optimizers": entry}

    def read(self, state: Mapping[str, Any], path: PathLike) -> Any:
        """Read the files beside a checkpoint at `path`, for `restore`; None without files, or if a file is lost."""
        saved = state["optimizers"]
        if not RankFiles.are_in(saved):
            return None
        return _FILES.read(saved, Place.of(self.groups), path, self.groups.world)

    def restore(self, state: Mapping[str, Any], found: Any) -> None:
        """Continue from the entries of `save` and the result of `read`; this communicates nothing.

        All ranks already have the state of the first replica, and keep it if files are lost.
        """
        data, saved = self.groups.gradients, state["optimizers"]
        if not RankFiles.are_in(saved):
            same_division = saved["model"] == [self.groups.pipeline_parallel.size, self.groups.tensor_parallel.size]
            # Tensors by position belong to the old shards, and `assemble` would warn of a compression state.
            saved = saved if same_division else {**saved, "by_position": []}
            found = self._parts.assemble(saved)
        elif found is None:
            return
        # An optimizer without a state must stay without one: zeros would count as old steps.
        if len(state["are_new"]) == data.size and state["are_new"][data.rank]:
            self.clear()
            return
        mine = _mean(found) if isinstance(found, list) else found
        parameters = dict(self.module.named_parameters())
        for slot, named in mine.items():
            number, _, key = slot.partition(".")
            if not number.isdecimal():
                continue  # not a slot
            optimizer = self.optimizers[int(number)]
            for name, value in named.items():
                entry = optimizer.state[parameters[name]]
                before = entry.get(key)
                # Device and dtype of the old entry: torch keeps the count of steps on the CPU, for example.
                entry[key] = value.to(before if isinstance(before, Tensor) else self.device)

    @property
    def _parts(self) -> StateParts:
        return StateParts(self.module, self.rules, self.groups)

    def clear(self) -> None:
        """Drop the state of this rank's optimizers."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def _slots(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors in the state of this replica's optimizers, by optimizer and key, then by parameter."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        slots: dict[str, dict[str, Tensor]] = {}
        for number, optimizer in enumerate(self.optimizers):
            for parameter, entry in optimizer.state.items():
                for key, value in entry.items():
                    if isinstance(value, Tensor) and id(parameter) in names:
                        slots.setdefault(f"{number}.{key}", {})[names[id(parameter)]] = value.detach()
        return slots

    def _filled(self, mine: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Add zeros for slots that only other replicas have: a checkpoint has a row for each replica."""
        described = {
            slot: {name: (tuple(value.shape), value.dtype) for name, value in named.items()}
            for slot, named in mine.items()
        }
        filled: dict[str, dict[str, Tensor]] = {}
        for theirs in comm.all_gather_object(described, self.groups.gradients):
            for slot, named in theirs.items():
                for name, (shape, dtype) in named.items():
                    value = mine.get(slot, {}).get(name)
                    if value is None:
                        value = torch.zeros(shape, dtype=dtype, device=self.device)
                    filled.setdefault(slot, {}).setdefault(name, value)
        return filled


def _mean(replicas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean over the replicas of every slot."""
    return {
        slot: {name: mean_of([replica[slot][name] for replica in replicas]) for name in named}
        for slot, named in replicas[0].items()
    }
