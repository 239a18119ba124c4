"""The state of a reducer on its way to a checkpoint and back, also to another number of ranks.

A state is `{"version", "layout", "step", "world_size", slot: {parameter: tensor}, ...}`:

    layout      who made it       what a slot holds per parameter
    local       state_dict()      this rank's tensor
    stacked     gather_state()    (ranks, *shape); replicated slots as they are
    mean        gather_state()    the mean over the ranks; replicated slots as they are
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.memory import Memory

__all__ = ["gather_state", "local_state", "values_for"]

VERSION = 1
REPLICATED = {"left", "right", "mean_estimate"}  # equal on all ranks by construction
CHUNKED = {"server_residual"}  # rank r holds part r of the flattened parameter, which adds to the mean of `residual`

Slots = dict[str, dict[str, Tensor]]


def local_state(memory: Memory, step: int, world_size: int) -> dict[str, Any]:
    """This rank's state."""
    state = _header("local", step, world_size)
    for slot, name, tensor in memory.items():
        state.setdefault(slot, {})[name] = tensor.detach().clone()
    return state


def gather_state(memory: Memory, step: int, group: Group, exact: bool) -> dict[str, Any]:
    """The state of all ranks, on the first one."""
    first = group.rank == 0
    state = _header("stacked" if exact else "mean", step, group.size)
    comm.agree("the compression state's parameters", [(slot, name) for slot, name, _ in memory.items()], group)
    folded: Slots = {}
    for slot, name, tensor in memory.items():
        if slot in REPLICATED:
            value = tensor.detach().clone()
        elif exact or slot in CHUNKED:
            value = comm.all_gather(tensor.detach().reshape(1, *tensor.shape).clone(), group)
        else:
            value = comm.all_reduce_(tensor.detach().clone(), group).div_(group.size)
        target = folded if slot in CHUNKED and not exact else state
        if first:
            target.setdefault(slot, {})[name] = value
    _fold_chunks(state, folded)
    return state if first else {}


def values_for(state: Mapping[str, Any], group: Group) -> Slots:
    """The slots that this rank of `group` continues with."""
    if state.get("version") != VERSION:
        raise ValueError(f"expected a compression state of version {VERSION}, found {state.get('version')!r}")
    slots: Slots = {slot: dict(named) for slot, named in state.items() if isinstance(named, Mapping)}
    same = state["world_size"] == group.size
    if state["layout"] == "local" and not same:
        raise ValueError(
            f"this compression state belongs to one of {state['world_size']} ranks, but there are {group.size} now; "
            "save with `gather_state()`, which loads at any number of ranks"
        )
    if state["layout"] != "stacked":
        return slots
    chunks = {slot: slots.pop(slot) for slot in list(slots) if slot in CHUNKED and not same}
    for slot in slots.keys() - REPLICATED:
        slots[slot] = {name: rows[group.rank] if same else rows.mean(0) for name, rows in slots[slot].items()}
    _fold_chunks(slots, chunks)
    return slots


def _fold_chunks(slots: dict[str, Any], chunks: Slots) -> None:
    for named in chunks.values():
        for name, parts in named.items():
            residual = slots["residual"][name]
            slots["residual"][name] = residual + parts.flatten()[: residual.numel()].view_as(residual)


def _header(layout: str, step: int, world_size: int) -> dict[str, Any]:
    return {"version": VERSION, "layout": layout, "step": step, "world_size": world_size}
