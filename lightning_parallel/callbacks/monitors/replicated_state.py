"""Each rank's replicated state: equal keys on two ranks mean that the values must be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_parallel.compat.torch import NormalizationBase
from lightning_parallel.compat.twins import is_a
from lightning_parallel.compression.fsdp import plain_name
from lightning_parallel.mesh import Mesh

__all__ = ["StateEntry", "StateKey", "collect_state", "option_entries"]

ShardOf = Callable[[str], "str | None"]
"""Name of a parameter or buffer -> the shard that this rank holds (empty: all of it), or None if no rank shares it."""


class StateKey(NamedTuple):
    """Identifies a value; ranks that hold values under equal keys must hold equal values.

    Attributes:
        kind: `parameter`, `buffer`, `optimizer` or `option`.
        name: As users know it.
        shard: Which shard of the whole; empty for all of it.
    """

    kind: str
    name: str
    shard: str = ""


@dataclass(frozen=True)
class StateEntry:
    """One value on this rank.

    Attributes:
        value: A tensor, or a plain number.
        owner: The dict that holds a plain number, under `slot`.
    """

    value: Any
    owner: dict[str, Any] | None = None
    slot: str = ""

    @torch.no_grad()
    def replace(self, value: Any) -> None:
        """Overwrite the value in place."""
        if isinstance(self.value, Tensor):
            self.value.copy_(value)
        elif self.owner is not None:
            self.owner[self.slot] = value


def collect_state(trainer: Trainer, module: LightningModule) -> dict[StateKey, StateEntry]:
    """Collect parameters, buffers, optimizer state and options of the optimizers' parameter groups."""
    found: dict[StateKey, StateEntry] = {}
    # Under local SGD replicas differ between two exchanges: then only what one of them holds twice is compared.
    differing: frozenset[str] = getattr(trainer.strategy, "differing", frozenset())
    replica = str(_mesh_place(trainer, "data_parallel")) if differing else ""
    for key, entry in _entries(trainer, module):
        if key.kind in differing:
            key = key._replace(shard=f"{key.shard} of replica {replica}")
        # Ranks at the same coordinate of the sharded mesh dimensions hold the same shard.
        if isinstance(entry.value, DTensor):
            key = key._replace(shard=f"{key.shard}{_coordinate(entry.value)}")
            entry = StateEntry(entry.value.to_local())
        value = entry.value
        # Sparse tensors cannot be hashed by their bytes, and on the meta device there are none.
        if not isinstance(value, Tensor) or (value.layout == torch.strided and not value.is_meta):
            found[key] = entry
    return found


def _entries(trainer: Trainer, module: LightningModule) -> Iterator[tuple[StateKey, StateEntry]]:
    shard_of = _shards(trainer)
    strategy = trainer.strategy
    parameters = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    for name, parameter in parameters.items():
        shard = shard_of(name)
        if shard is not None:
            yield StateKey("parameter", name, shard), StateEntry(parameter)
    excluded = _unshared_buffers(trainer, module)
    for name, buffer in module.named_buffers():
        if name not in excluded:
            yield StateKey("buffer", name, _rule_shards(trainer)(name) or ""), StateEntry(buffer)
    if is_a(strategy, DeepSpeedStrategy):  # its optimizers work on flattened partitions
        return
    # Optimizers know parameters by identity only.
    names = {id(parameter): name for name, parameter in parameters.items()}
    for index, optimizer in enumerate(strategy.optimizers):
        prefix = f"optimizer {index}: " if index else ""
        for owner, state in optimizer.state.items():
            name = names.get(id(owner), "")
            shard = shard_of(name)
            if not name or shard is None:
                continue
            for slot, value in state.items():
                if isinstance(value, (Tensor, int, float)):
                    yield StateKey("optimizer", f"{prefix}{slot} of {name}", shard), StateEntry(value, state, slot)
        yield from option_entries(optimizer, prefix, _stage(trainer))


def option_entries(optimizer: Optimizer, prefix: str, stage: str) -> Iterator[tuple[StateKey, StateEntry]]:
    """Yield learning rate, momentum and the other options of an optimizer's parameter groups.

    With several groups `stage` becomes part of the keys: group numbers need not mean the same on all stages.
    """
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        for option, value in group.items():
            if option != "params" and isinstance(value, (Tensor, int, float, tuple)):
                shard = stage if len(groups) > 1 else ""
                key = StateKey("option", f"{prefix}{option} of group {index}", shard)
                yield key, StateEntry(value, group, option)


# --------------------------------------------------------------------------------------------- which ranks share what


def _shards(trainer: Trainer) -> ShardOf:
    strategy = trainer.strategy
    model = strategy.model
    if is_a(strategy, FSDPStrategy) and isinstance(model, FullyShardedDataParallel):
        if model.sharding_strategy == ShardingStrategy.NO_SHARD:
            return lambda name: ""
        # Under a HYBRID strategy the ranks with the same index in their shard groups hold the same shards.
        shard = f"part {dist.get_rank(model.process_group)} of {dist.get_world_size(model.process_group)}"
        return lambda name: shard
    # Under ZeRO-3 every rank holds another partition of each parameter: nothing is there twice.
    if is_a(strategy, DeepSpeedStrategy) and strategy.zero_stage_3:
        return lambda name: None
    return _rule_shards(trainer)


def _rule_shards(trainer: Trainer) -> ShardOf:
    """Return the shards by the shard rules of the tensor axis; under strategies without a mesh, nothing is sharded."""
    strategy: Any = trainer.strategy
    if not isinstance(getattr(strategy, "mesh", None), Mesh):
        return lambda name: ""
    rules: Mapping[str, Any] = strategy.run.rules
    rank = strategy.groups.tensor_parallel.rank
    # By what the shard covers, not by rank: several ranks hold the same one where heads are shared.
    return lambda name: str(rules[name].ranges[rank]) if name in rules else ""


def _stage(trainer: Trainer) -> str:
    place = _mesh_place(trainer, "pipeline_parallel")
    return "" if place is None else f"stage {place}"


def _mesh_place(trainer: Trainer, axis: str) -> int | None:
    """Return this rank's position along an axis; None under strategies without a mesh."""
    mesh = getattr(trainer.strategy, "mesh", None)
    return getattr(mesh.coordinate(trainer.global_rank), axis) if isinstance(mesh, Mesh) else None


def _unshared_buffers(trainer: Trainer, module: LightningModule) -> set[str]:
    """Return the names of the buffers that may differ between replicas from step to step.

    DDP overwrites those of all ranks with those of the first at each forward. Under strategies without a mesh,
    normalization that is not synchronised keeps the statistics of its rank.
    """
    model = trainer.strategy.model
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
        return {name for name, _ in module.named_buffers()}
    if isinstance(getattr(trainer.strategy, "mesh", None), Mesh):
        return set()
    names = set()
    for path, child in module.named_modules():
        if isinstance(child, NormalizationBase) and not isinstance(child, nn.SyncBatchNorm):
            names |= {f"{path}.{name}".lstrip(".") for name, _ in child.named_buffers(recurse=False)}
    return names


def _coordinate(tensor: DTensor) -> list[int]:
    """Return the coordinate of this rank on the mesh dimensions along which `tensor` is sharded."""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return [index for index, placement in zip(coordinate, tensor.placements) if not placement.is_replicate()]
