"""Stores the state of a compressor in a sharded checkpoint: each rank writes its own, and any layout reads it.

    {"layout": "parts", "model": [pipeline, tensor], "replicas": R, ...: the other entries of the state,
     "by_name": {slot: {parameter: [tensor of replica 0, ...]}},      full tensors, sharded as the parameter is
     "by_position": [{slot: {parameter: tensor}}, ...]}               tensors of another shape than the parameter

Residuals have the shape of their parameter, so any layout takes its shard of them. If the number of replicas changes,
each replica continues from their mean, which keeps the ratio of their sum to the mean gradient. Tensors of another
shape, such as the factors of PowerSGD, fit only the same layout of the model. Other layouts start them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.checkpoint import PartialTensor, StoredTensor, TensorPart, take_part
from lightning_parallel.comm import Group, MeshGroups, NodeGroups
from lightning_parallel.compression.compressor_state import CHUNKED, REPLICATED, joined, mean_of
from lightning_parallel.tensor.sharding import Shard

__all__ = ["PARTS", "assemble_state", "divide_state"]

PARTS = "parts"
_OWN_KEYS = ("layout", "model", "replicas", "by_name", "by_position")
State = Mapping[str, Any]


def divide_state(
    state: State, module: nn.Module, rules: Mapping[str, Shard], groups: MeshGroups, nodes: NodeGroups | None = None
) -> dict[str, Any]:
    """Return the entry of a sharded checkpoint for the states of all ranks; every rank must call it.

    Args:
        state: The state of this rank.
        module: The divided module.
        rules: How its parameters are sharded.
        groups: The mesh's groups.
        nodes: The nodes, if the ranks of a node share its state; each node counts as a replica.
    """
    replicas, inside = _replicas(groups, nodes)
    slots = {key: value for key, value in state.items() if isinstance(value, Mapping)}
    mine = {
        slot: {name: _described(name, tensor, module, rules, groups) for name, tensor in named.items()}
        for slot, named in slots.items()
    }
    # The ranks of a replica hold different parameters; ranks at one position of all replicas hold the same ones.
    mine = joined(comm.all_gather_object(mine, inside))
    everyone = comm.all_gather_object(mine, groups.replica)
    _fill_in(slots if inside.rank == 0 else {}, mine, everyone, module, rules, groups)
    divided: dict[str, Any] = {key: value for key, value in state.items() if key not in slots}
    if "owners" in divided:
        divided["owners"] = comm.all_gather_object(divided["owners"], groups.replica)
    divided |= {"layout": PARTS, "model": _sizes(groups), "replicas": replicas.size, "by_name": {}}
    divided["by_position"] = [{} for _ in everyone]
    # Every rank must describe every tensor, also without data: the writer joins the descriptions of all ranks.
    for position, theirs in enumerate(everyone):
        held = slots if position == groups.replica.rank else {}
        for slot, named in theirs.items():
            for name, (shape, dtype, is_elementwise) in named.items():
                tensor = held.get(slot, {}).get(name)
                first = next(other for other, found in enumerate(everyone) if name in found.get(slot, {}))
                # The stages of a tied parameter keep a tensor each: the tensor of the first stage goes under the name.
                if is_elementwise and first // groups.tensor_parallel.size == position // groups.tensor_parallel.size:
                    rows = divided["by_name"].setdefault(slot, {})
                    if tensor is not None or name not in rows:
                        rows[name] = _rows(tensor, shape, dtype, rules.get(name), groups, replicas)
                else:
                    stacked = _stacked(tensor, slot, shape, dtype, replicas)
                    divided["by_position"][position].setdefault(slot, {})[name] = stacked
    return divided


def _fill_in(
    slots: dict[str, Any],
    mine: dict[str, Any],
    everyone: list[dict[str, Any]],
    module: nn.Module,
    rules: Mapping[str, Shard],
    groups: MeshGroups,
) -> None:
    """Add zeros for shards without a value if the shards of other ranks have one: a full tensor needs all shards."""
    parameters, width = dict(module.named_parameters()), groups.tensor_parallel.size
    stage = groups.replica.rank // width
    for theirs in everyone[stage * width : (stage + 1) * width]:
        for slot, named in theirs.items():
            for name, described in named.items():
                _, dtype, is_elementwise = described
                if is_elementwise and name in parameters and name not in mine.get(slot, {}):
                    parameter, rule = parameters[name], rules.get(name)
                    rank = groups.tensor_parallel.rank
                    shape = parameter.shape if rule is None else rule.local_shape(parameter.shape, rank)
                    zeros = torch.zeros(shape, dtype=dtype, device=parameter.device)
                    slots[slot] = {**slots.get(slot, {}), name: zeros}
                    mine.setdefault(slot, {})[name] = described
    everyone[groups.replica.rank] = mine


def _replicas(groups: MeshGroups, nodes: NodeGroups | None) -> tuple[Group, Group]:
    """Return the ranks with states of this rank's parameters, and the ranks that share one such state."""
    if nodes is None:
        return groups.data_parallel, Group.alone("node")
    return nodes.across, nodes.inside


def _sizes(groups: MeshGroups) -> list[int]:
    return [groups.pipeline_parallel.size, groups.tensor_parallel.size]


def _described(
    name: str, tensor: Tensor, module: nn.Module, rules: Mapping[str, Shard], groups: MeshGroups
) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Return the full shape, the dtype, and whether the tensor has an element for each of the parameter's."""
    parameter, rule = dict(module.named_parameters()).get(name), rules.get(name)
    if parameter is None:
        return tuple(tensor.shape), tensor.dtype, False
    local = parameter.shape if rule is None else rule.local_shape(parameter.shape, groups.tensor_parallel.rank)
    if tensor.shape != local:
        return tuple(tensor.shape), tensor.dtype, False
    return tuple(local if rule is None else rule.full_shape(local)), tensor.dtype, True


def _rows(
    tensor: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rule: Shard | None,
    groups: MeshGroups,
    data: Group,
) -> list[Tensor]:
    """Return one full tensor for each replica; this rank writes its part of the tensor of its replica."""
    rank, part = groups.tensor_parallel.rank, TensorPart()
    if tensor is not None and rule is not None:
        part = TensorPart(rule.owned(tensor, rank), rule.dim % tensor.dim(), rule.owned_ranges(rank))
    elif tensor is not None and rank == 0:
        part = TensorPart(tensor)
    return [
        PartialTensor.of(shape, dtype, part if replica == data.rank else TensorPart()) for replica in range(data.size)
    ]


def _stacked(tensor: Tensor | None, slot: str, shape: tuple[int, ...], dtype: torch.dtype, data: Group) -> Tensor:
    """Return the tensors of all replicas as one, (replicas, *shape), of which this rank writes its row."""
    if slot in REPLICATED:
        # Equal on all replicas, so the first one writes it alone.
        return PartialTensor.of(shape, dtype, TensorPart(tensor if data.rank == 0 else None))
    part = TensorPart() if tensor is None else TensorPart(tensor.unsqueeze(0), 0, ((data.rank, data.rank + 1),))
    return PartialTensor.of((data.size, *shape), dtype, part)


def assemble_state(
    divided: State, module: nn.Module, rules: Mapping[str, Shard], groups: MeshGroups, nodes: NodeGroups | None = None
) -> dict[str, Any]:
    """Return the state that this rank continues with, from an entry of `divide_state` in any layout."""
    (data, _), rank = _replicas(groups, nodes), groups.tensor_parallel.rank
    replicas, is_same_model = divided["replicas"], divided["model"] == _sizes(groups)
    names = {name for name, _ in module.named_parameters()}
    state = {key: value for key, value in divided.items() if key not in _OWN_KEYS}
    state["world_size"] = data.size
    if "owners" in state:
        state["owners"] = divided["owners"][groups.replica.rank] if is_same_model else ()
    for slot, named in divided["by_name"].items():
        for name in names & named.keys():
            # As many replicas take their own row, bit for bit; others take the mean of all rows.
            rows = named[name] if replicas != data.size else [named[name][data.rank]]
            state.setdefault(slot, {})[name] = mean_of(_part(row, rules.get(name), rank) for row in rows)
    positions = divided["by_position"]
    if not is_same_model:
        if any(positions):
            rank_zero_warn(
                f"The checkpoint's compression state is that of {' x '.join(map(str, divided['model']))} (pipeline x"
                f" tensor) ranks per replica, but this run has {' x '.join(map(str, _sizes(groups)))}. Residuals are"
                " kept; the state of the old shards starts anew."
            )
        return state
    for slot, named in positions[groups.replica.rank].items():
        for name, tensor in named.items():
            if slot in REPLICATED:
                state.setdefault(slot, {})[name] = _part(tensor, None, 0)
            elif replicas == data.size:
                row = Shard.even(0, replicas, replicas)
                state.setdefault(slot, {})[name] = _part(tensor, row, data.rank)[0]
            elif slot not in CHUNKED:  # a chunk has no owner among other replicas
                state.setdefault(slot, {})[name] = mean_of(_part(tensor, None, 0))
    return state


def _part(tensor: Tensor, rule: Shard | None, rank: int) -> Tensor:
    found = tensor if rule is None else take_part(tensor, rule, rank)
    return found.read() if isinstance(found, StoredTensor) else found
