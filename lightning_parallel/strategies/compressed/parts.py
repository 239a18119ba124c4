"""Stores the state of a compressor in a sharded checkpoint: each rank writes its part, and any layout reads it.

    {"layout": "parts", "model": [pipeline, tensor], "replicas": R, ...: the other entries of the state,
     "by_name": {slot: {parameter: [tensor of replica 0, ...]}},      full tensors, sharded like the parameter
     "by_position": [{slot: {parameter: tensor}}, ...]}               tensors of another shape than the parameter

Residuals have the shape of their parameter, so any layout takes its shard of a residual. If the number of replicas
changes, each replica continues from the mean of the residuals, so the mean gradient receives the same unsent part.
Tensors of another shape, such as the factors of PowerSGD, fit only the same layout of the model. Other layouts begin
without such tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.checkpoint import PartialTensor, StoredTensor, TensorPart, take_part
from lightning_parallel.comm import Group, MeshGroups, NodeGroups
from lightning_parallel.compression.compressor_state import CHUNKED, REPLICATED, joined, mean_of
from lightning_parallel.tensor.sharding import Shard

__all__ = ["PARTS", "StateParts"]

PARTS = "parts"
_OWN_KEYS = ("layout", "model", "replicas", "by_name", "by_position")


class _Kind(NamedTuple):
    """The full shape and the dtype of a tensor, and whether it has one element for each element of the parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_elementwise: bool


_Kinds = dict[str, dict[str, _Kind]]


@dataclass(frozen=True)
class StateParts:
    """Divides the states of all ranks among the files of a sharded checkpoint, and assembles them again.

    Attributes:
        module: The module, of which this rank holds a part.
        rules: How its parameters are sharded, by name.
        groups: The mesh's groups.
        nodes: The nodes, if the ranks of a node share its state; each node then counts as a replica.
    """

    module: nn.Module
    rules: Mapping[str, Shard]
    groups: MeshGroups
    nodes: Optional[NodeGroups] = None

    def divide(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry of the checkpoint, with the data of this rank; every rank must call it.

        Args:
            state: The state of this rank.
        """
        slots = {key: dict(value) for key, value in state.items() if isinstance(value, Mapping)}
        divided: dict[str, Any] = {key: value for key, value in state.items() if key not in slots}
        if "owners" in divided:
            divided["owners"] = comm.all_gather_object(divided["owners"], self.groups.model)
        divided |= {"layout": PARTS, "model": self._model, "replicas": self._replicas.size}
        inside = Group.alone("node") if self.nodes is None else self.nodes.inside
        mine = {slot: {name: self._kind(name, value) for name, value in named.items()} for slot, named in slots.items()}
        # The ranks of a node hold states of different parameters.
        mine = joined(comm.all_gather_object(mine, inside))
        everyone = comm.all_gather_object(mine, self.groups.model)
        zeros = self._add_kinds(mine, everyone)
        # Only one rank of a node may write the zeros: each parameter has one writer per node.
        if inside.rank == 0:
            slots = joined([slots, zeros])
        # `_add_kinds` has extended `mine` after the exchange.
        everyone[self.groups.model.rank] = mine
        return {**divided, **self._tensors(slots, everyone)}

    def _tensors(self, slots: Mapping[str, Mapping[str, Tensor]], everyone: Sequence[_Kinds]) -> dict[str, Any]:
        """Return `by_name` and `by_position`, with the data of this rank."""
        by_name: dict[str, dict[str, list[Tensor]]] = {}
        by_position: list[dict[str, dict[str, Tensor]]] = [{} for _ in everyone]
        stages: dict[tuple[str, str], int] = {}
        # Every rank must describe every tensor, even without data: the writer joins the descriptions of all ranks.
        for position, theirs in enumerate(everyone):
            # The tensor axis varies fastest among the ranks of a replica.
            stage = position // self.groups.tensor_parallel.size
            held = slots if position == self.groups.model.rank else {}
            for slot, named in theirs.items():
                for name, kind in named.items():
                    tensor = held.get(slot, {}).get(name)
                    # Each stage of a tied parameter keeps a tensor. The tensor of the first stage gets the name.
                    is_first = stages.setdefault((slot, name), stage) == stage
                    if not (kind.is_elementwise and is_first):
                        by_position[position].setdefault(slot, {})[name] = self._stacked(tensor, slot, kind)
                    elif tensor is not None or name not in by_name.get(slot, {}):
                        by_name.setdefault(slot, {})[name] = self._rows(tensor, kind, self.rules.get(name))
        return {"by_name": by_name, "by_position": by_position}

    def _add_kinds(self, mine: _Kinds, everyone: Sequence[_Kinds]) -> dict[str, dict[str, Tensor]]:
        """Add the kinds that only other tensor-parallel ranks of the stage have; return zeros for these kinds."""
        # Another layout reads full tensors, and a full tensor needs the shards of all ranks.
        parameters, width = dict(self.module.named_parameters()), self.groups.tensor_parallel.size
        stage = self.groups.model.rank // width
        zeros: dict[str, dict[str, Tensor]] = {}
        for theirs in everyone[stage * width : (stage + 1) * width]:
            for slot, named in theirs.items():
                for name, kind in named.items():
                    if kind.is_elementwise and name in parameters and name not in mine.get(slot, {}):
                        shape, device = self._local_shape(name, parameters[name]), parameters[name].device
                        zeros.setdefault(slot, {})[name] = torch.zeros(shape, dtype=kind.dtype, device=device)
                        mine.setdefault(slot, {})[name] = kind
        return zeros

    def assemble(self, divided: Mapping[str, Any]) -> dict[str, Any]:
        """Return the next state of this rank from an entry of `divide`, in any layout; this communicates nothing."""
        replicas, rank = self._replicas, self.groups.tensor_parallel.rank
        is_same_model = divided["model"] == self._model
        is_same_number = divided["replicas"] == replicas.size
        state = {key: value for key, value in divided.items() if key not in _OWN_KEYS}
        state["world_size"] = replicas.size
        if "owners" in state:
            state["owners"] = divided["owners"][self.groups.model.rank] if is_same_model else ()
        names = {name for name, _ in self.module.named_parameters()}
        for slot, named in divided["by_name"].items():
            for name in names & named.keys():
                # An equal number of replicas takes its own rows, bit for bit. Otherwise all take the mean of the rows.
                rows = [named[name][replicas.rank]] if is_same_number else named[name]
                state.setdefault(slot, {})[name] = mean_of(_part(row, self.rules.get(name), rank) for row in rows)
        if not is_same_model:
            if any(divided["by_position"]):
                rank_zero_warn(
                    f"The checkpoint's compression state is from {' x '.join(map(str, divided['model']))} (pipeline x"
                    f" tensor) ranks per replica, but this run has {' x '.join(map(str, self._model))}. Residuals are"
                    " kept; the state of the old shards starts anew."
                )
            return state
        for slot, named in divided["by_position"][self.groups.model.rank].items():
            for name, tensor in named.items():
                if slot in REPLICATED:
                    state.setdefault(slot, {})[name] = _part(tensor, None, 0)
                elif is_same_number:
                    row = Shard.even(0, replicas.size, replicas.size)
                    state.setdefault(slot, {})[name] = _part(tensor, row, replicas.rank)[0]
                elif slot not in CHUNKED:  # a chunk has no owner among other replicas
                    state.setdefault(slot, {})[name] = mean_of(_part(tensor, None, 0))
        return state

    @property
    def _replicas(self) -> Group:
        """The ranks that keep a state of the parameters of this rank."""
        return self.groups.gradients if self.nodes is None else self.nodes.across

    @property
    def _model(self) -> list[int]:
        return [self.groups.pipeline_parallel.size, self.groups.tensor_parallel.size]

    def _local_shape(self, name: str, parameter: Tensor) -> torch.Size:
        rule = self.rules.get(name)
        if rule is None:
            return parameter.shape
        return torch.Size(rule.local_shape(parameter.shape, self.groups.tensor_parallel.rank))

    def _kind(self, name: str, tensor: Tensor) -> _Kind:
        parameter, rule = dict(self.module.named_parameters()).get(name), self.rules.get(name)
        if parameter is None or tensor.shape != self._local_shape(name, parameter):
            return _Kind(tuple(tensor.shape), tensor.dtype, False)
        return _Kind(tuple(tensor.shape if rule is None else rule.full_shape(tensor.shape)), tensor.dtype, True)

    def _rows(self, tensor: Tensor | None, kind: _Kind, rule: Shard | None) -> list[Tensor]:
        """Return one full tensor for each replica; this rank writes its part of the tensor of its replica."""
        rank, replicas, part = self.groups.tensor_parallel.rank, self._replicas, TensorPart()
        if tensor is not None and rule is not None:
            part = TensorPart(rule.owned(tensor, rank), rule.dim % tensor.dim(), rule.owned_ranges(rank))
        elif tensor is not None and rank == 0:
            part = TensorPart(tensor)
        parts = [part if replica == replicas.rank else TensorPart() for replica in range(replicas.size)]
        return [PartialTensor.of(kind.shape, kind.dtype, part) for part in parts]

    def _stacked(self, tensor: Tensor | None, slot: str, kind: _Kind) -> Tensor:
        """Return the tensors of all replicas as one tensor, (replicas, *shape), with the row of this rank."""
        rank, size = self._replicas.rank, self._replicas.size
        if slot in REPLICATED:
            # Equal on all replicas, so only the first replica writes it.
            return PartialTensor.of(kind.shape, kind.dtype, TensorPart(tensor if rank == 0 else None))
        part = TensorPart() if tensor is None else TensorPart(tensor.unsqueeze(0), 0, ((rank, rank + 1),))
        return PartialTensor.of((size, *kind.shape), kind.dtype, part)


def _part(tensor: Tensor, rule: Shard | None, rank: int) -> Tensor:
    found = tensor if rule is None else take_part(tensor, rule, rank)
    return found.read() if isinstance(found, StoredTensor) else found
