"""State of the optimizers of replicas that take steps of their own, in a checkpoint.

    "are_new"        [whether each replica's optimizers have no state yet]
    "optimizers"     in one file      {"layout": [replicas, pipeline, tensor], "ranks": [slots of each rank]}
                     in a folder      what `compression_parts.divide_state` gives of the slots

A slot is an optimizer and a key of its state, "0.exp_avg", and holds tensors by parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compression.compressor_state import gather_states
from lightning_parallel.strategies.compressed.parts import assemble_state, divide_state, mean_of
from lightning_parallel.tensor.sharding import Shard

__all__ = ["ReplicaOptimizers"]


@dataclass(frozen=True)
class ReplicaOptimizers:
    """Saves and restores what the optimizers of each replica remember; every rank must call each method.

    Attributes:
        module: The module, of which this rank holds a part.
        groups: The mesh's groups.
        rules: How its parameters are sharded, by name.
        optimizers: Those of this rank.
        device: Where their state is.
    """

    module: nn.Module
    groups: MeshGroups
    rules: Mapping[str, Shard]
    optimizers: Sequence[Optimizer]
    device: torch.device

    def save(self, is_sharded: bool) -> dict[str, Any]:
        """Return what a checkpoint holds of all replicas, on rank zero; in a folder, what this rank writes."""
        data, mine = self.groups.data_parallel, self._slots()
        are_new = comm.all_gather_object(not mine, data)
        mine = self._filled(mine)
        if is_sharded:
            return {"are_new": are_new, "optimizers": divide_state(mine, self.module, self.rules, self.groups)}
        # The first replica's are those of `optimizer_states`.
        everyone = gather_states(mine if data.rank > 0 else {}, self.groups.world)
        return {"are_new": are_new, "optimizers": {"layout": self._sizes, "ranks": everyone}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `save` has returned, once all have loaded the state of the first replica."""
        data, saved = self.groups.data_parallel, state["optimizers"]
        if "by_name" in saved:
            same_division = saved["model"] == self._sizes[1:]
            saved = saved if same_division else {**saved, "by_position": []}
            mine = assemble_state(saved, self.module, self.rules, self.groups)
        else:
            mine = self._part_of(saved["layout"], saved["ranks"])
        if len(state["are_new"]) == data.size and state["are_new"][data.rank]:
            self.clear()
            return
        parameters = dict(self.module.named_parameters())
        for slot, named in mine.items():
            number, _, key = slot.partition(".")
            if not number.isdecimal():
                continue  # not a slot
            optimizer = self.optimizers[int(number)]
            for name, value in named.items():
                entry = optimizer.state[parameters[name]]
                before = entry.get(key)
                entry[key] = value.to(before if isinstance(before, Tensor) else self.device)

    def clear(self) -> None:
        """Let this rank's optimizers forget everything."""
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
        """Add zeros for what other replicas have: a checkpoint has a row of each of them."""
        described = {
            slot: {name: (tuple(value.shape), value.dtype) for name, value in named.items()}
            for slot, named in mine.items()
        }
        filled: dict[str, dict[str, Tensor]] = {}
        for theirs in comm.all_gather_object(described, self.groups.data_parallel):
            for slot, named in theirs.items():
                for name, (shape, dtype) in named.items():
                    value = mine.get(slot, {}).get(name)
                    if value is None:
                        value = torch.zeros(shape, dtype=dtype, device=self.device)
                    filled.setdefault(slot, {}).setdefault(name, value)
        return filled

    @property
    def _sizes(self) -> list[int]:
        groups = self.groups
        return [groups.data_parallel.size, groups.pipeline_parallel.size, groups.tensor_parallel.size]

    def _part_of(self, layout: list[int], ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of this rank's optimizers from that of all ranks, which the first replica's lack."""
        data, replica = self.groups.data_parallel, self.groups.replica
        if layout == self._sizes:
            return ranks[data.rank * replica.size + replica.rank]
        if layout[1:] != self._sizes[1:]:
            rank_zero_warn(
                f"The checkpoint is from replicas of {' x '.join(map(str, layout[1:]))} ranks (pipeline x tensor)."
                " This run has another layout, so all replicas start with the optimizer state of the first replica."
            )
            return {}
        first, others = self._slots(), [ranks[r * replica.size + replica.rank] for r in range(1, layout[0])]
        return {
            slot: {
                name: mean_of([value, *(other[slot][name].to(value) for other in others)])
                for name, value in named.items()
            }
            for slot, named in first.items()
        }
