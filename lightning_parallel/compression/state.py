"""The state of a reducer on its way to a checkpoint and back, also to another number of ranks.

A state is `{"version", "layout", "step", "world_size", slot: {parameter: tensor}, ...}`:

    layout      who made it       what a slot holds per parameter
    local       state_dict()      this rank's tensor
    stacked     gather_state()    (ranks, *shape); replicated slots as they are
    mean        gather_state()    the mean over the ranks; replicated slots as they are
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Optional

from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.memory import Memory

__all__ = ["gather_state", "local_state", "values_for"]

VERSION = 1
LAYOUTS = ("local", "stacked", "mean")
COMBINED = ("mesh", "pieces")  # of several states, by the strategies that cut models
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


def values_for(state: Mapping[str, Any], group: Group, wanted: Optional[frozenset[str]] = None) -> Slots:
    """The slots that this rank of `group` continues with.

    Args:
        wanted: The slots that the reducer uses, which may be another one than has saved them; None for all.

    Raises:
        ValueError: If `state` is none that this module has made, or damaged.
    """
    _check(state)
    if state["layout"] in COMBINED:
        _warn(f"The compression state is that of a model in parts (`{state['layout']}`)", group)
        return {}
    slots: Slots = {slot: dict(named) for slot, named in state.items() if isinstance(named, Mapping)}
    same = state["world_size"] == group.size
    if state["layout"] == "local" and not same:
        raise ValueError(
            f"this compression state belongs to one of {state['world_size']} ranks, but there are {group.size} now; "
            "save with `gather_state()`, which loads at any number of ranks"
        )
    stacked, folds = state["layout"] == "stacked", wanted is not None and "residual" in wanted
    foreign = set() if wanted is None else slots.keys() - wanted
    chunks = {
        slot: slots[slot] for slot in slots.keys() & CHUNKED if stacked and (not same or (slot in foreign and folds))
    }
    for slot in slots.keys() - REPLICATED - chunks.keys() if stacked else ():
        slots[slot] = {name: rows[group.rank] if same else rows.mean(0) for name, rows in slots[slot].items()}
    for slot in chunks.keys() | foreign:
        del slots[slot]
    _fold_chunks(slots, chunks if "residual" in slots else {})
    lost = foreign - REPLICATED - chunks.keys()
    if lost:
        listed = ", ".join(f"`{slot}`" for slot in sorted(lost))
        _warn(f"The compression state holds {listed}, which this compressor does not use", group)
    return slots


def _warn(what: str, group: Group) -> None:
    if group.rank == 0:
        warnings.warn(f"{what}: what was not sent yet is forgotten.", stacklevel=2)


def _check(state: Mapping[str, Any]) -> None:
    if isinstance(state, Mapping) and state.get("layout") in COMBINED:
        return
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        found = state.get("version") if isinstance(state, Mapping) else state
        raise ValueError(f"expected a compression state of version {VERSION}, found {found!r}")
    missing = {"layout", "step", "world_size"} - state.keys()
    if missing or state["layout"] not in LAYOUTS:
        raise ValueError(
            f"expected a compression state with `step`, `world_size` and a `layout` of {', '.join(LAYOUTS)}, found "
            f"{state.get('layout')!r} as layout and {sorted(map(str, state))}"
        )
    for slot, named in state.items():
        for name, tensor in named.items() if isinstance(named, Mapping) else ():
            if not tensor.isfinite().all():
                raise ValueError(f"`{slot}` of `{name}` in the compression state holds values that are not finite")
            ranks = len(tensor) if tensor.dim() else 0
            if state["layout"] == "stacked" and slot not in REPLICATED and ranks != state["world_size"]:
                raise ValueError(
                    f"`{slot}` of `{name}` in the compression state must hold a row for each of the "
                    f"{state['world_size']} ranks, found {ranks}"
                )


def _fold_chunks(slots: dict[str, Any], chunks: Slots) -> None:
    for named in chunks.values():
        for name, parts in named.items():
            residual = slots["residual"][name]
            slots["residual"][name] = residual + parts.flatten()[: residual.numel()].view_as(residual)


def _header(layout: str, step: int, world_size: int) -> dict[str, Any]:
    return {"version": VERSION, "layout": layout, "step": step, "world_size": world_size}
