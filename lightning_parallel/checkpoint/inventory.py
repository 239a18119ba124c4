"""Lists the tensors of the full model, with the ranks that hold each tensor, and its form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import buffers_of, non_persistent_buffers_of, parameters_of
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.tensor.sharding import REPLICATED, Shard

__all__ = ["HeldTensor", "Inventory"]


class HeldTensor(NamedTuple):
    """Describes a tensor of the full model.

    Attributes:
        stages: Positions in the pipeline group of the ranks that hold the tensor, in order.
        local_shape: Shape on its owner; the shape of a shard if the tensor is sharded.
        dtype: Element type.
        is_buffer: Whether the tensor is a buffer.
        is_saved: Whether the state dict contains the tensor.
        trains: Whether the tensor is a parameter that requires a gradient.
        is_alias: Whether the tensor has an earlier name on the same rank.
    """

    stages: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool
    is_saved: bool
    trains: bool
    is_alias: bool


@dataclass(frozen=True)
class Inventory:
    """Lists the tensors of the full model, by each of their names.

    Attributes:
        tensors: The tensors, by name, in the order of the stages.
        rules: How they are sharded over the tensor axis, by name. Other tensors are replicated.
        num_stages: Number of ranks in the pipeline group.
        last_stage: Position of the rank on which steps end.
    """

    tensors: Mapping[str, HeldTensor]
    rules: Mapping[str, Shard]
    num_stages: int
    last_stage: int

    @classmethod
    def of(cls, module: nn.Module, rules: Mapping[str, Shard], pipeline: Group, last_stage: int = 0) -> Inventory:
        """Gather the inventory of `module`; every rank of the pipeline group must call it."""
        found: dict[str, HeldTensor] = {}
        # In the order of the stages on all ranks, so that all ranks get the same inventory.
        for everyone in comm.all_gather_object(dict(_held(module, pipeline.rank)), pipeline):
            for name, held in everyone.items():
                known = found.get(name)
                if known is None:
                    found[name] = held
                    continue
                # A step that updates a buffer of all stages ends on the last stage, so its dtype counts there.
                facts = held if held.is_buffer and last_stage in held.stages else known
                found[name] = facts._replace(stages=(*known.stages, *held.stages))
        return cls(found, rules, pipeline.size, last_stage)

    def full_shape(self, name: str) -> torch.Size:
        """Return the shape of a full tensor."""
        return self.rules.get(name, REPLICATED).full_shape(self.tensors[name].local_shape)

    def owner(self, name: str) -> int:
        """Return the position in the pipeline group of the rank whose value of a tensor counts."""
        held = self.tensors[name]
        return self.last_stage if held.is_buffer and self.last_stage in held.stages else held.stages[0]

    def is_full(self, name: str) -> bool:
        """Tell whether every rank of a replica holds the full tensor."""
        return name not in self.rules and len(self.tensors[name].stages) == self.num_stages

    @property
    def total_bytes(self) -> int:
        """Bytes of the parameters of the full model."""
        parameters = [name for name, held in self.tensors.items() if not (held.is_buffer or held.is_alias)]
        return sum(self.full_shape(name).numel() * self.tensors[name].dtype.itemsize for name in parameters)

    @property
    def trained(self) -> set[str]:
        """Names of the parameters that require a gradient."""
        return {name for name, held in self.tensors.items() if held.trains}


def _held(module: nn.Module, stage: int) -> Iterator[tuple[str, HeldTensor]]:
    """Yield the tensors on this rank under all their names; a shared module counts under its first path."""
    seen: set[int] = set()

    def described(tensor: Tensor, is_buffer: bool, is_saved: bool) -> HeldTensor:
        is_alias = id(tensor) in seen
        seen.add(id(tensor))
        trains = tensor.requires_grad and not is_buffer
        return HeldTensor((stage,), tuple(tensor.shape), tensor.dtype, is_buffer, is_saved, trains, is_alias)

    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for key, parameter in parameters_of(child).items():
            if parameter is not None:
                yield prefix + key, described(parameter, False, True)
        for key, buffer in buffers_of(child).items():
            # A placeholder stands for the buffer of another stage.
            if buffer is not None and not isinstance(buffer, PlaceholderTensor):
                yield prefix + key, described(buffer, True, key not in non_persistent_buffers_of(child))
