"""Lets the ranks of a replica act as one process, and the replicas as copies of one model.

The ranks of a replica read the same data, draw the same random numbers and hold parts of one model. Replicas start with
equal weights and read different data.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups, fingerprints
from lightning_parallel.compat import Patches
from lightning_parallel.compat.lightning import at_end_of_epochs
from lightning_parallel.compat.torch import buffers_of, non_persistent_buffers_of, pytree
from lightning_parallel.data_parallel import AbsentParameter

__all__ = [
    "compute_at_end_of_epochs",
    "content_of",
    "equalize",
    "scope_metrics",
    "seed_workers",
    "share_buffers",
    "share_finite_buffers",
    "share_means",
    "share_plateau_metrics",
    "share_random_state",
    "start_equal",
    "synchronize_batch_norm",
]

_CONTENT_LEAVES = 8
"""Number of tensors of a batch that `content_of` looks at."""
_CONTENT_VALUES = 64
"""Number of values that `content_of` hashes of each tensor."""


def share_random_state(group: Group) -> None:
    """Copy the random state of a replica's first rank to its other ranks, for data, dropout and initialisation."""
    if group.size == 1:
        return
    # A run on CPUs must not create a CUDA context, even if the machine has GPUs.
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    state = (torch.get_rng_state(), random.getstate(), numpy.random.get_state(), cuda_state)
    torch_state, python_state, numpy_state, cuda_state = comm.broadcast_object(state, group)
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    # The first rank sends no CUDA state if it has no CUDA.
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state)


def start_equal(module: nn.Module, group: Group) -> None:
    """Copy parameters and buffers of the first rank of `group` to ranks with other values.

    Raises:
        ValueError: If the names, shapes or dtypes differ between the ranks.
    """
    equalize({name: tensor for name, tensor in _tensors(module) if _has_data(tensor)}, group)


def equalize(tensors: Mapping[str, Tensor], group: Group) -> None:
    """Copy the tensors of the first rank of `group` to ranks with other values.

    Raises:
        ValueError: If the names, shapes or dtypes differ between the ranks.
    """
    if group.size == 1:
        return
    # First, since the messages below need equal lists of tensors on all ranks.
    comm.agree(
        "the module's tensors (name, shape, dtype)",
        [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()],
        group,
    )
    # Equal seeds make equal models, so usually the ranks send only fingerprints.
    prints = comm.all_gather_object(fingerprints(tensors.values()), group)
    for tensor, *values in zip(tensors.values(), *prints):
        if len(set(values)) > 1:
            _broadcast(tensor, group)


def _has_data(tensor: Tensor) -> bool:
    # Replicas with slices of one tensor are equal: `ShardedInitialization` has compared them in full.
    return not tensor.is_meta and not isinstance(tensor, AbsentParameter)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def _broadcast(tensor: Tensor, group: Group) -> None:
    # NCCL takes only tensors on CUDA, and the module may not be there yet.
    device = torch.device("cuda", torch.cuda.current_device()) if _needs_cuda(group) else tensor.device
    shared = tensor.detach().to(device, copy=True).contiguous()
    tensor.copy_(comm.broadcast_(shared, group))


@torch.no_grad()
def share_buffers(module: nn.Module, group: Group, source: int = 0) -> None:
    """Copy buffers of the replica at position `source` to all, such as running statistics of batch normalisation.

    DistributedDataParallel copies all buffers. This function copies only buffers in checkpoints: a buffer outside
    checkpoints is constant.
    """
    if group.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in _saved_buffers(module):
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    # One message for all buffers of a dtype, since each message has a latency.
    for buffers in kinds.values():
        flat = comm.broadcast_(torch.cat([buffer.reshape(-1) for buffer in buffers]), group, source)
        for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
            buffer.copy_(value.view_as(buffer))


def _saved_buffers(module: nn.Module) -> Iterator[Tensor]:
    for owner in module.modules():
        # Most modules have no buffer, and `named_buffers` would take milliseconds for thousands of them in each step.
        for name, buffer in buffers_of(owner).items():
            if buffer is not None and name not in non_persistent_buffers_of(owner):
                yield buffer


def share_finite_buffers(module: nn.Module, groups: MeshGroups) -> None:
    """Copy the buffers of the first replica with finite buffers to all replicas; if none is finite, of replica zero."""
    alike = groups.gradients
    floating = [buffer for buffer in _saved_buffers(module) if buffer.is_floating_point()]
    if alike.size == 1 or not comm.on_any_rank([bool(floating)], groups.world)[0]:
        share_buffers(module, alike)
        return
    # Over the replica, whose ranks must all take their buffers from the same source.
    is_broken = comm.on_any_rank([not all(bool(buffer.isfinite().all()) for buffer in floating)], groups.model)[0]
    # Each position in the replica has another group, and all groups get the same answer.
    broken = comm.all_gather_object(is_broken, alike)
    share_buffers(module, alike, broken.index(False) if False in broken else 0)


@torch.no_grad()
def share_means(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace tensors that differ between the replicas by their means.

    A mean leaves out replicas whose tensor is not finite. Tensors of integers become equal to the first replica.
    """
    if group.size == 1 or not tensors:
        return
    prints = comm.all_gather_object(fingerprints(tensors), group)
    # All ranks have the same fingerprints, so all send the same tensors in the same order.
    different = [tensor for tensor, *values in zip(tensors, *prints) if len(set(values)) > 1]
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in different:
        if tensor.is_floating_point():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        else:
            _broadcast(tensor, group)
    for (dtype, device), found in kinds.items():
        # As tensors: a Python bool would wait for the device once per tensor.
        finite = torch.stack([tensor.isfinite().all() for tensor in found])
        values = [tensor.where(is_finite, 0).reshape(-1) for tensor, is_finite in zip(found, finite)]
        # In 16 bits, sums over the replicas would round and could exceed the range.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # The flags travel with the values. Their sum is the number of finite replicas.
        flat = torch.cat([finite, *values]).to(wide).to(device if device.type != "cpu" else group.host_device)
        flat = comm.all_reduce_(flat, group).to(device)
        counts, flat = flat[: len(found)], flat[len(found) :]
        for tensor, count, total in zip(found, counts, flat.split([tensor.numel() for tensor in found])):
            tensor.copy_((total / count).view_as(tensor).where(count > 0, tensor))


def _needs_cuda(group: Group) -> bool:
    return group.host_device == "cuda"


def synchronize_batch_norm(module: nn.Module, group: Group) -> None:
    """Convert batch normalisation to compute its statistics over the replicas (`Trainer(sync_batchnorm=True)`)."""
    if group.size > 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(module, group.process_group)


# ----------------------------------------------------------------------------------------------- data and metrics


def content_of(batch: Any, before: int) -> int:
    """Return a hash of the earlier batches and of a few values of the first tensors of a batch in host memory."""
    found = before
    for leaf in pytree.tree_leaves(batch)[:_CONTENT_LEAVES]:
        is_here = isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided
        if is_here and leaf.numel() and leaf.is_contiguous() and not leaf.is_complex():
            few = leaf.detach().view(-1)[:: max(1, leaf.numel() // _CONTENT_VALUES)].contiguous()
            # A checksum is faster here than `fingerprints`, whose kernels take longer for so few values.
            found = zlib.crc32(few.view(torch.uint8).numpy().tobytes(), found)
    return found


def seed_workers(dataloader: object, replica: int) -> object:
    """Seed the loader's workers by replica, under `seed_everything(workers=True)`.

    Lightning seeds workers by global rank right afterwards, if they have no function yet. The ranks of a replica would
    then augment the same sample differently.
    """
    seeded = int(os.environ.get("PL_SEED_WORKERS", 0))
    if seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=replica)
    return dataloader


def _not_distributed() -> bool:
    return False


def scope_metrics(module: nn.Module, groups: MeshGroups) -> None:
    """Let the module's torchmetrics objects synchronise over replicas instead of all ranks.

    The ranks of one replica have the same samples, which would be counted several times.
    """
    if groups.replica.size == 1:
        return
    for metric in module.modules():
        if not isinstance(metric, Metric) or metric.process_group is not None:
            continue
        if groups.data_parallel.process_group is None:
            # With one replica, the metric would find the process group of all ranks and count samples several times.
            metric.distributed_available_fn = _not_distributed
        else:
            metric.process_group = groups.data_parallel.process_group


def compute_at_end_of_epochs(trainer: Trainer, group: Group, patches: Patches) -> None:
    """Compute the logged values of an epoch on every rank, before the hooks at its end.

    A progress bar computes these values in a hook on rank zero alone. There it would wait for other replicas, which
    already wait for rank zero in another hook.
    """
    if group.size > 1:
        at_end_of_epochs(trainer, lambda: trainer.callback_metrics, patches)


def share_plateau_metrics(configs: Sequence[LRSchedulerConfig], group: Group) -> None:
    """Step `ReduceLROnPlateau` with the mean over the replicas, so that all replicas keep one learning rate."""
    if group.size == 1:
        return
    for config in configs:
        if config.reduce_on_plateau:
            # Use a subclass, not an attribute: attributes of a scheduler go into the checkpoint.
            kind = type(config.scheduler)
            shared = {"group": group, "__module__": kind.__module__}
            config.scheduler.__class__ = type(kind.__name__, (_SharedPlateau, kind), shared)


class _SharedPlateau(ReduceLROnPlateau):
    """Serves as the first base of the classes that `share_plateau_metrics` makes.

    Attributes:
        group: The data-parallel group.
    """

    group: Group

    def step(self, metrics: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        # A group with only NCCL takes no tensor on the CPU.
        value = torch.as_tensor(metrics, dtype=torch.float64)
        total = comm.all_reduce(value if value.device.type != "cpu" else value.to(self.group.host_device), self.group)
        super().step(total / self.group.size, *args, **kwargs)
