"""Replicas start equal: the same random numbers inside a replica, the same weights everywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group, fingerprints

__all__ = ["share_buffers", "share_random_state", "start_equal", "synchronize_batch_norm"]


def share_random_state(group: Group) -> None:
    """Give the ranks of one replica the random state of its first rank, for data, dropout and initialisation."""
    if group.size == 1:
        return
    state = (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    torch_state, python_state, numpy_state = comm.broadcast_object(state, group)
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(comm.broadcast_object(torch.cuda.get_rng_state(), group))


def start_equal(module: nn.Module, group: Group) -> None:
    """Bring parameters and buffers on all ranks of `group` to those of its first rank, where they differ.

    Raises:
        ValueError: If the names, shapes or dtypes differ between the ranks.
    """
    if group.size == 1:
        return
    tensors = {name: tensor for name, tensor in _tensors(module) if not tensor.is_meta}
    comm.agree(
        "the module's tensors (name, shape, dtype)",
        [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()],
        group,
    )
    prints = comm.all_gather_object(fingerprints(tensors.values()), group)
    for tensor, *values in zip(tensors.values(), *prints):
        if len(set(values)) > 1:
            _broadcast(tensor, group)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def _broadcast(tensor: Tensor, group: Group) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if _needs_cuda(group) else tensor.device
    shared = tensor.detach().to(device, copy=True).contiguous()
    tensor.copy_(comm.broadcast_(shared, group))


@torch.no_grad()
def share_buffers(module: nn.Module, group: Group) -> None:
    """Give all replicas the buffers of the first, such as running statistics of batch normalisation.

    As torch's DistributedDataParallel does; of the buffers that a checkpoint holds, the others being constants.
    """
    if group.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in kinds.values():
        flat = comm.broadcast_(torch.cat([buffer.reshape(-1) for buffer in buffers]), group)
        for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
            buffer.copy_(value.view_as(buffer))


def _needs_cuda(group: Group) -> bool:
    return "nccl" in torch.distributed.get_backend(group.process_group)


def synchronize_batch_norm(module: nn.Module, group: Group) -> None:
    """Convert batch normalisation to compute its statistics over the replicas (`Trainer(sync_batchnorm=True)`)."""
    if group.size > 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(module, group.process_group)
