"""Norms of the whole model's gradients, of which this rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.tensor.sharding import Shard

__all__ = ["clip_coefficient", "total_norm"]


def total_norm(
    gradients: Mapping[str, Tensor],
    rules: Mapping[str, Shard],
    groups: MeshGroups,
    norm_type: float = 2.0,
    elsewhere: frozenset[str] = frozenset(),
) -> Tensor:
    """The `norm_type`-norm over all elements of one replica's gradients, each distinct element counted once.

    Sharded gradients count on every rank, without the pieces that a lower rank of the tensor axis holds as well;
    whole ones count on the first rank of the tensor axis. Every rank of the replica must call it.

    Args:
        gradients: This rank's gradients by parameter name; a shared parameter under one of its names.
        rules: How the parameters are sharded, by name.
        groups: The mesh's groups.
        norm_type: 1, 2, any positive number, or infinity.
        elsewhere: Names that another pipeline stage counts (the second home of a tied parameter).

    Returns:
        A scalar, equal on all ranks of the replica.
    """
    position = groups.tensor_parallel.rank
    counted = []
    for name, gradient in gradients.items():
        if name in elsewhere:
            continue
        if name in rules:
            counted.append(rules[name].owned(gradient, position))
        elif position == 0:
            counted.append(gradient)
    device = next((gradient.device for gradient in gradients.values()), torch.device("cpu"))
    norms = _norms([gradient for gradient in counted if gradient.numel()], norm_type)
    zero = torch.zeros((), device=device, dtype=torch.float64)
    if math.isinf(norm_type):
        return comm.all_reduce_(torch.stack(norms).max() if norms else zero, groups.replica, "max")
    powers = torch.stack(norms).pow(norm_type).sum() if norms else zero
    return comm.all_reduce_(powers, groups.replica).pow(1.0 / norm_type)


def _norms(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """Norm of each tensor, accumulated in double precision across tensors of any dtype."""
    return [norm.double() for norm in torch._foreach_norm(tensors, norm_type)] if tensors else []


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that brings gradients of the given norm down to `max_norm`; 1 where they are below it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
