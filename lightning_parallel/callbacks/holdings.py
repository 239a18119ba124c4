"""What every rank holds, under keys that two ranks share exactly where they must hold the same."""

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
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_parallel.compression.fsdp import plain_name
from lightning_parallel.mesh import Mesh

__all__ = ["Held", "Key", "holdings"]

Piece = Callable[[str], "str | None"]
"""Name of a parameter or buffer -> which part of it this rank holds (empty: all of it), or None if nobody shares it."""


class Key(NamedTuple):
    """What a value is; ranks that hold values under equal keys must hold equal values.

    Attributes:
        kind: `parameter`, `buffer`, `optimizer` or `option`.
        name: As people know it.
        piece: Which part of the whole; empty for all of it.
    """

    kind: str
    name: str
    piece: str = ""


@dataclass(frozen=True)
class Held:
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
        """Take another value, in place."""
        if isinstance(self.value, Tensor):
            self.value.copy_(value)
        else:
            assert self.owner is not None
            self.owner[self.slot] = value


def holdings(trainer: Trainer, module: LightningModule) -> dict[Key, Held]:
    """Parameters, buffers, optimizer state and options of the optimizers' parameter groups."""
    found: dict[Key, Held] = {}
    for key, held in _all(trainer, module):
        value = held.value
        if isinstance(value, DTensor):
            key, held = key._replace(piece=f"{key.piece}{_coordinate(value)}"), Held(value.to_local())
        if not isinstance(value, Tensor) or (value.layout == torch.strided and not value.is_meta):
            found[key] = held
    return found


def _all(trainer: Trainer, module: LightningModule) -> Iterator[tuple[Key, Held]]:
    piece_of, strategy = _pieces(trainer), trainer.strategy
    parameters = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    names = {id(parameter): name for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if (piece := piece_of(name)) is not None:
            yield Key("parameter", name, piece), Held(parameter)
    own = _own_buffers(trainer, module)
    for name, buffer in module.named_buffers():
        if name not in own:
            yield Key("buffer", name, _rule_piece(trainer)(name) or ""), Held(buffer)
    if isinstance(strategy, DeepSpeedStrategy):  # its optimizers work on flattened pieces
        return
    for index, optimizer in enumerate(strategy.optimizers):
        prefix = f"optimizer {index}: " if index else ""
        for key, state in optimizer.state.items():
            name = names.get(id(key), "")
            piece = piece_of(name)
            if name and piece is not None:
                for slot, value in state.items():
                    if isinstance(value, (Tensor, int, float)):
                        yield Key("optimizer", f"{prefix}{slot} of {name}", piece), Held(value, state, slot)
        yield from _options(optimizer, prefix, _stage(trainer))


def _options(optimizer: Optimizer, prefix: str, stage: str) -> Iterator[tuple[Key, Held]]:
    """Learning rate and the like. Only a single group is the same one on all stages for certain."""
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        for option, value in group.items():
            if option != "params" and isinstance(value, (Tensor, int, float, tuple)):
                where = stage if len(groups) > 1 else ""
                yield Key("option", f"{prefix}{option} of group {index}", where), Held(value, group, option)


# ------------------------------------------------------------------------------------------------- who shares what


def _pieces(trainer: Trainer) -> Piece:
    strategy, model = trainer.strategy, trainer.strategy.model
    if isinstance(strategy, FSDPStrategy) and isinstance(model, FullyShardedDataParallel):
        if model.sharding_strategy == ShardingStrategy.NO_SHARD:
            return lambda name: ""
        part = f"part {dist.get_rank(model.process_group)} of {dist.get_world_size(model.process_group)}"
        return lambda name: part
    if isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3:
        return lambda name: None
    return _rule_piece(trainer)


def _rule_piece(trainer: Trainer) -> Piece:
    """Under a strategy with a mesh, the rules of the tensor axis say who holds what."""
    strategy: Any = trainer.strategy
    if not isinstance(getattr(strategy, "mesh", None), Mesh):
        return lambda name: ""
    rules: Mapping[str, Any] = strategy.rules
    rank = strategy.groups.tensor_parallel.rank
    return lambda name: str(rules[name].ranges[rank]) if name in rules else ""


def _stage(trainer: Trainer) -> str:
    mesh = getattr(trainer.strategy, "mesh", None)
    return f"stage {mesh.coordinate(trainer.global_rank).pipeline_parallel}" if isinstance(mesh, Mesh) else ""


def _own_buffers(trainer: Trainer, module: LightningModule) -> set[str]:
    """Buffers that replicas need not share between steps.

    DDP overwrites those of all ranks with those of the first at each forward. Elsewhere than in a mesh, normalisation
    that is not synchronised keeps the statistics of its own rank.
    """
    model = trainer.strategy.model
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
        return {name for name, _ in module.named_buffers()}
    if isinstance(getattr(trainer.strategy, "mesh", None), Mesh):
        return set()
    return {
        f"{path}.{name}".lstrip(".")
        for path, child in module.named_modules()
        if isinstance(child, _NormBase) and not isinstance(child, nn.SyncBatchNorm)
        for name, _ in child.named_buffers(recurse=False)
    }


def _coordinate(tensor: DTensor) -> list[int]:
    """Place of this rank on the mesh dimensions over which `tensor` is divided."""
    here = tensor.device_mesh.get_coordinate()
    assert here is not None
    return [place for place, placement in zip(here, tensor.placements) if not placement.is_replicate()]
