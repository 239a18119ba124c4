"""Give memory and initial values to what this rank owns of a model, and to nothing else.

A model that is built in `configure_model`, or under `trainer.init_module()`, is built deferred: its large tensors only
record how they are made. `hold_back` puts tensors on the meta device in their places, on which the model is planned and
divided; `materialize_owned` then makes each tensor that this rank owns, keeps its shard, and drops the rest. Both give
the bits that one process would have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat.initialization import materialize, set_data
from lightning_parallel.compat.torch import buffers_of
from lightning_parallel.pipeline.microbatch import random_state_kept
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.strategies.deferred_init import is_deferred, replace_data
from lightning_parallel.strategies.deferred_init import materialize as make
from lightning_parallel.tensor.plan import Sharding, materialize_shards

__all__ = ["HeldBack", "hold_back", "materialize_owned"]


@dataclass
class HeldBack:
    """What a model was before it was planned.

    Attributes:
        parameters: By `id` of a parameter that is on the meta device now: it, and the deferred tensor that it was.
        buffers: The user's buffers on the meta device, as (module, name, buffer), which have values now.
    """

    parameters: dict[int, tuple[nn.Parameter, Tensor]] = field(default_factory=dict)
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)


def hold_back(module: nn.Module, device: torch.device) -> HeldBack:
    """Move deferred parameters to the meta device, as which they are planned and divided; they stay the same objects.

    Buffers get values at once: the analysis of a pipeline computes masks and positions with them.

    Returns:
        What `materialize_owned` needs.
    """
    held = HeldBack()
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            if is_deferred(parameter):
                deferred = parameter.detach()
                meta = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device=torch.device("meta")
                )
                replace_data(parameter, meta)
                held.parameters[id(parameter)] = (parameter, deferred)
        buffers = buffers_of(child)
        for name, buffer in buffers.items():
            if buffer is not None and is_deferred(buffer):
                buffers[name] = make(buffer).to(device)
            elif buffer is not None and buffer.is_meta:
                held.buffers.append((child, name, buffer))
    if held.buffers:
        # For the plan alone: in the end all tensors of a module draw their numbers together, in the model's order.
        with random_state_kept():
            materialize(module, device, wanted=lambda tensor: not isinstance(tensor, nn.Parameter))
    return held


def materialize_owned(
    module: LightningModule,
    device: torch.device,
    groups: MeshGroups,
    sharding: Sharding | None,
    plan: PipelinePlan | None,
    held: HeldBack,
    is_shared: bool,
) -> None:
    """Allocate and initialise what this rank owns of parameters without data.

    Args:
        module: The divided module, before the parameters of other stages are freed.
        device: Where the parameters are allocated.
        groups: The mesh's groups.
        sharding: How its layers are divided.
        plan: How it is cut into stages.
        held: What `hold_back` returned; emptied.
        is_shared: Take the values of the first rank of all, where ranks may have built the model from other random
            numbers.
    """
    owned: set[int] | None = None
    if plan is not None:
        mine = set(plan.stages_of_rank(groups.pipeline_parallel.rank))
        owned = {id(value) for name, value in module.named_parameters() if mine & set(plan.parameters[name].stages)}

    def holds(tensor: Tensor) -> bool:
        return owned is None or not isinstance(tensor, nn.Parameter) or id(tensor) in owned

    were_deferred = set(held.parameters)
    for key in list(held.parameters):
        parameter, deferred = held.parameters.pop(key)
        if is_shared:
            full = _shared(deferred, groups)
        elif holds(parameter):
            full = make(deferred)
        else:
            continue
        if holds(parameter):
            rule: Any = getattr(parameter, "shard_rule", None)
            local = full if rule is None else rule.split(full, groups.tensor_parallel.rank)
            # A slice would keep the full tensor alive.
            set_data(parameter, local.clone() if local.untyped_storage().nbytes() > _num_bytes(local) else local)
        del full

    # The user's own tensors on the meta device: every module initialises itself, in the order of one process.
    def wanted(tensor: Tensor) -> bool:
        return id(tensor) not in were_deferred

    for owner, name, buffer in held.buffers:
        buffers_of(owner)[name] = buffer
    if sharding is not None:
        materialize_shards(module, device, sharding, groups.tensor_parallel, wanted=wanted, holds=holds)
    else:
        materialize(module, device, wanted=wanted, keep=lambda tensor, full: full if holds(tensor) else None)


def _shared(deferred: Tensor, groups: MeshGroups) -> Tensor:
    """Return the full tensor of the first rank; every rank must call it for each tensor, in the same order."""
    if groups.world.rank == 0:
        full = make(deferred).contiguous()
    else:
        full = torch.empty(deferred.shape, dtype=deferred.dtype, device=deferred.device)
    return comm.broadcast_(full, groups.world)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
