"""Gives the module its full parameters again between runs.

The strategy divides the user's module in place. At the end of a run, the module gets back its classes and full tensors,
because the script after `trainer.fit` was written for one process (`torch.save(model.state_dict())`, `model(x)`,
`load_state_dict`). The next run divides the module as before, without a new plan, and with the user's changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.checkpoint import Checkpoints, Inventory
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.lightning import tell
from lightning_parallel.strategies.ranks import replicas

__all__ = ["EVERYWHERE_BYTES", "GatherAfterFit", "divide_again", "end_run", "keeps_full", "share_tensors"]

GatherAfterFit = Literal["auto", "all", "off"]
"""Ranks on which the module holds full parameters after a run."""

EVERYWHERE_BYTES = 1 << 30
"""Up to this size, each rank gets the full module by default."""
_CHUNK_BYTES = 32 << 20


def end_run(module: LightningModule, checkpoints: Checkpoints, groups: MeshGroups, where: GatherAfterFit) -> bool:
    """End the view of full state dicts, and restore the module unless an exception has ended the run.

    Args:
        module: The divided module.
        checkpoints: Gathers its tensors.
        groups: The mesh's groups.
        where: The argument of the strategy.

    Returns:
        Whether the module holds its full tensors now, on every rank.
    """
    state = ParallelState.of(module)
    states = state.full_states
    skeleton = state.skeleton
    if states is not None:
        states.remove()
    # After an error other ranks may be gone, and the gathering below needs all ranks.
    if module.trainer.state.status != TrainerStatus.RUNNING:
        return False
    # The strategy may refuse a run before the parameters have data.
    has_data = not any(parameter.is_meta for parameter in module.parameters())
    if skeleton is None or where == "off" or not has_data:
        return False
    # Make a new inventory, since code may have frozen parameters during the run.
    inventory = Inventory.of(module, checkpoints.rules, groups.pipeline_parallel)
    if not keeps_full(inventory, where):
        return False
    # Each replica gathers its own tensors, so that only ranks of one replica send to each other.
    full = replace(checkpoints, is_saved=True).gather_tensors()
    share_tensors(full, groups.model, checkpoints.device)
    if states is not None:
        states.restore_copies()
    skeleton.restore(full, inventory.trained)
    return True


def keeps_full(inventory: Inventory, where: GatherAfterFit) -> bool:
    """Tell whether each rank gets the full module after a run, and say why not.

    Args:
        inventory: The tensors of the full model.
        where: The argument of the strategy.
    """
    total = inventory.total_bytes
    if where == "auto" and total > EVERYWHERE_BYTES:
        tell(
            f"The module stays sharded after the run, because its {total / 2**30:.1f} GiB may not fit into the memory"
            " of a host once for each rank. Load a checkpoint into a new module, or set `gather_after_fit='all'`."
            " [LP037]"
        )
    return where == "all" or (where == "auto" and total <= EVERYWHERE_BYTES)


def share_tensors(full: dict[Any, Tensor], replica: Group, device: torch.device) -> None:
    """Send tensors from the first rank of the replica to its other ranks, in place."""
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


def divide_again(module: LightningModule, groups: MeshGroups) -> None:
    """Divide a module that `end_run` has restored; every rank must call it.

    A module with other submodules, or for another mesh, stays full: the setup divides it again.

    Raises:
        ValueError: On every rank, if only some ranks hold the full module.
    """
    state = ParallelState.of(module)
    is_full = state.skeleton is not None and state.skeleton.is_restored
    is_usable = is_full and state.skeleton.fits() and _is_for(state, groups)
    views = comm.all_gather_object((is_full, is_usable), groups.world)
    if not any(full for full, _ in views):
        return
    if not all(full for full, _ in views):
        raise ValueError(
            "The last run ended with an error on some ranks, so that only the other ranks hold the full module."
            " Build the module anew on every rank"
        )
    # The user may have loaded other weights on rank zero only, as a script for one process would.
    replicas.start_equal(module, groups.world)
    if all(usable for _, usable in views):
        state.skeleton.divide_again(state.rules, groups.tensor_parallel.rank)
        if state.copies is not None:
            state.copies.divide_again(state.rules, groups.tensor_parallel.rank)
    else:
        forget_division(module)


def forget_division(module: nn.Module) -> None:
    """Remove all attributes of the division from a restored module."""
    for parameter in module.parameters():
        if hasattr(parameter, "shard_rule"):
            del parameter.shard_rule
    for buffer in module.buffers():
        if hasattr(buffer, "shard_rule"):
            del buffer.shard_rule
    module.__dict__.pop("_parallel_state", None)


def _is_for(state: ParallelState, groups: MeshGroups) -> bool:
    """Tell whether the module was divided for the ranks of these groups."""
    is_for_tensor = state.sharding is None or state.tensor_ranks == groups.tensor_parallel.ranks
    is_for_pipeline = state.engine is None or state.engine.group.ranks == groups.pipeline_parallel.ranks
    return bool(is_for_tensor and is_for_pipeline)
