"""Gives the module its full parameters again between runs.

The strategy shards the user's module in place. At the end of a run, the module gets back its classes and full tensors.
The script after `trainer.fit` was written for one process (`torch.save(model.state_dict())`, `model(x)`,
`load_state_dict`). The next run shards the module as before, without a new plan, and with the user's changes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.checkpoint import Checkpoints
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.lightning import tell
from lightning_parallel.strategies.ranks import replicas
from lightning_parallel.tensor.sharding import Shard

__all__ = ["EVERYWHERE_BYTES", "GatherAfterFit", "divide_again", "end_run", "share_tensors"]

GatherAfterFit = Literal["auto", "all", "rank_zero", "off"]
"""Ranks on which the module holds full parameters after a run."""

EVERYWHERE_BYTES = 1 << 30
"""Up to this size each rank gets the whole module by default."""
_MEMORY_SHARE = 0.25
"""Of the host's memory, up to which rank zero gets it by default."""
_CHUNK_BYTES = 32 << 20


def end_run(module: LightningModule, checkpoints: Checkpoints, groups: MeshGroups, where: GatherAfterFit) -> bool:
    """End what holds during a run; make the module whole if no exception has ended it: see `_restore_whole`."""
    state = ParallelState.of(module)
    states = state.full_states
    if states is not None:
        states.remove()
    if module.trainer.state.status != TrainerStatus.RUNNING:
        return False
    return _restore_whole(module, checkpoints, groups, where, states)


def _restore_whole(
    module: LightningModule, checkpoints: Checkpoints, groups: MeshGroups, where: GatherAfterFit, states: Any
) -> bool:
    """Give the module back its full tensors, in the host's memory, after a run that ended well; on every rank.

    Args:
        module: The divided module.
        checkpoints: Gathers its tensors.
        groups: The mesh's groups.
        where: On which ranks; `auto` decides by its size.
        states: Makes its copies whole, too (`FullStates`).

    Returns:
        Whether it is whole at least on rank zero.
    """
    whole = ParallelState.of(module).whole
    if whole is None or where == "off" or _is_without_data(module):
        return False
    total = _total_bytes(module, checkpoints, groups)
    is_default = where == "auto"
    if is_default:
        where = _place_of(total, groups.world)
    if where == "off":
        tell(
            f"The module stays sharded after the run, because its {total / 2**30:.1f} GiB may not fit into the"
            " memory of one host. Load a checkpoint into a new module, or set `gather_after_fit='rank_zero'`. [LP037]"
        )
        return False
    is_mine = where == "all" or groups.data_parallel.rank == 0
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    trained = set().union(*comm.all_gather_object(trained, groups.pipeline_parallel))
    full = replace(checkpoints, is_saved=is_mine).gather_tensors()
    if where == "all":
        share_tensors(full, groups.replica, checkpoints.device)
    is_here = where == "all" or groups.world.rank == 0
    if states is not None:
        states.restore_copies(is_here)
    if is_here:
        whole.restore(full, trained)
    if where == "rank_zero" and is_default:
        tell(
            "Because of its size, only rank 0 holds the full module after the run. Set `gather_after_fit='all'`"
            " for the full module on all ranks."
        )
    return True


def _place_of(total: int, world: Group) -> GatherAfterFit:
    if total <= EVERYWHERE_BYTES:
        return "all"
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        memory = 0
    has_room = comm.broadcast_object(total <= _MEMORY_SHARE * memory, world)
    return "rank_zero" if has_room else "off"


def _is_without_data(module: nn.Module) -> bool:
    """Whether a run that was refused has left the module before it got its data."""
    return any(parameter.is_meta for parameter in module.parameters())


def _total_bytes(module: nn.Module, checkpoints: Checkpoints, groups: MeshGroups) -> int:
    sizes: dict[str, int] = {}
    for name, tensor in module.named_parameters():
        rule = checkpoints.rules.get(name)
        shape = tensor.shape if rule is None else rule.full_shape(tensor.shape)
        sizes[name] = shape.numel() * tensor.element_size()
    for theirs in comm.all_gather_object(sizes, groups.pipeline_parallel):
        sizes.update(theirs)
    return sum(sizes.values())


def share_tensors(full: dict[Any, Tensor], replica: Group, device: torch.device) -> None:
    """Send the tensors, which the first rank of the replica has, to its other ranks."""
    if replica.size == 1:
        return
    kinds: dict[torch.dtype, list[Any]] = {}
    for name, tensor in full.items():
        kinds.setdefault(tensor.dtype, []).append(name)
    for dtype, names in kinds.items():
        for chunk in _chunks(names, [full[name].nbytes for name in names]):
            sizes = [full[name].numel() for name in chunk]
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            if replica.rank == 0:
                flat = torch.cat([full[name].reshape(-1) for name in chunk]).to(device)
            flat = comm.broadcast_(flat, replica).cpu() if len(flat) else flat.cpu()
            for name, part in zip(chunk, flat.split(sizes)):
                if replica.rank > 0:
                    # A view would keep its neighbours alive, and a checkpoint would write them.
                    full[name] = part.view(full[name].shape).clone()


def _chunks(names: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    chunks: list[list[Any]] = [[]]
    num_bytes = 0
    for name, size in zip(names, sizes):
        if chunks[-1] and num_bytes + size > _CHUNK_BYTES:
            chunks.append([])
            num_bytes = 0
        chunks[-1].append(name)
        num_bytes += size
    return chunks


def divide_again(module: LightningModule, groups: MeshGroups, device: torch.device) -> None:
    """Divide a module that `end_run` has made whole; on every rank, whole or not.

    Where it has other modules now, or another mesh is to run it, it is left whole, to be divided anew.

    Raises:
        ValueError: On every rank, if it was changed on rank zero while the other ranks hold parts of it.
    """
    state = ParallelState.of(module)
    is_whole = state.whole is not None and state.whole.is_whole
    is_usable = is_whole and state.whole.fits() and _is_for(state, groups)
    views = comm.all_gather_object((is_whole, is_usable), groups.world)
    if not any(whole for whole, _ in views):
        return
    if all(whole for whole, _ in views):
        # The user may have loaded other weights on rank zero only, as a script for one process would.
        replicas.start_equal(module, groups.world)
        if all(usable for _, usable in views):
            _divide(state, groups)
        else:
            forget_division(module)
        return
    if any(whole and not usable for whole, usable in views):
        raise ValueError(
            "The module has changed since the last run. That run left the full module on rank 0 only; the other"
            " ranks still hold their parts. Build it anew on every rank, or set `gather_after_fit='all'`"
        )
    _send_parts(module, state, groups, device)


def forget_division(module: nn.Module) -> None:
    """Take from a whole module all that the library knows about how it was divided."""
    for parameter in module.parameters():
        if hasattr(parameter, "shard_rule"):
            del parameter.shard_rule
    for buffer in module.buffers():
        if hasattr(buffer, "shard_rule"):
            del buffer.shard_rule
    module.__dict__.pop("_parallel_state", None)


def _is_for(state: ParallelState, groups: MeshGroups) -> bool:
    """Whether the module was divided for the ranks of these groups."""
    is_for_tensor = state.sharding is None or state.tensor_ranks == groups.tensor_parallel.ranks
    is_for_pipeline = state.engine is None or state.engine.group.ranks == groups.pipeline_parallel.ranks
    return bool(is_for_tensor and is_for_pipeline)


def _send_parts(module: LightningModule, state: ParallelState, groups: MeshGroups, device: torch.device) -> None:
    """Send what rank zero has made of the module to the ranks of its replica, which hold their parts of it."""
    if groups.data_parallel.rank > 0:
        return
    is_source = groups.replica.rank == 0
    tensors: dict[str, Tensor] = {}
    if is_source:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    described = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    mine = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, shape, dtype in comm.broadcast_object(described, groups.replica):
        full = tensors[name].detach().to(device) if is_source else torch.empty(shape, dtype=dtype, device=device)
        comm.broadcast_(full.contiguous(), groups.replica)
        if not is_source and name in mine and not mine[name].is_meta:
            rule: Shard | None = state.rules.get(name)
            part = full if rule is None else rule.split(full, groups.tensor_parallel.rank)
            mine[name].data.copy_(part)
    if is_source:
        _divide(state, groups)


def _divide(state: ParallelState, groups: MeshGroups) -> None:
    """Divide a module and the copies of it that are whole."""
    state.whole.divide_again(state.rules, groups.tensor_parallel.rank)
    if state.copies is not None:
        state.copies.divide_again(state.rules, groups.tensor_parallel.rank)
