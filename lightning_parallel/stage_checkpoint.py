"""The checkpoint of a model whose layers are on several pipeline stages: one file, as of one process.

Each stage has the state of its own parameters under their global names. It is brought together on the first rank of
the pipeline group when saving; each takes its own part when loading.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import Group

__all__ = ["gather_optimizer_state", "gather_state", "local_optimizer_state", "local_state"]

K = TypeVar("K", bound=Hashable)
_META = torch.device("meta")


def gather_state(
    state: Mapping[K, Any], order: Sequence[K], group: Group, device: torch.device, values: bool
) -> dict[K, Any]:
    """The entries of all stages; what several hold is taken from the first. Every rank of `group` must call it.

    Args:
        state: Entries of this rank's stages.
        order: Names in the order of the whole model; others follow.
        group: The pipeline group.
        device: Through which tensors are sent.
        values: Whether this group brings values together, the same on all its ranks; otherwise names and shapes only.

    Returns:
        On the group's first rank with `values`, tensors on the CPU; elsewhere tensors on the `meta` device.
    """
    described = comm.all_gather_object({name: _describe(value) for name, value in state.items()}, group)
    owner = {name: rank for rank in reversed(range(group.size)) for name in described[rank]}
    names = [name for name in order if name in owner]
    names += [name for name in owner if name not in set(names)]
    whole: dict[K, Any] = {}
    sent: dict[Any, Tensor] = {}
    for tag, name in enumerate(names):
        home = owner[name]
        shape, dtype, value, twin = described[home][name]
        if dtype is None:
            whole[name] = value
        elif not values or group.rank not in (0, home):
            whole[name] = torch.empty(shape, dtype=dtype, device=_META)
        elif home == 0:
            whole[name] = state[name].cpu() if group.rank == 0 else torch.empty(shape, dtype=dtype, device=_META)
        elif (home, twin) in sent:
            whole[name] = sent[home, twin]
        elif group.rank == 0:
            received = torch.empty(shape, dtype=dtype, device=device)
            comm.irecv(received, group, home, tag).wait()
            whole[name] = sent[home, twin] = received.cpu()
        else:
            comm.isend(state[name].to(device).contiguous(), group, 0, tag).wait()
            whole[name] = sent[home, twin] = torch.empty(shape, dtype=dtype, device=_META)
    return whole


def _describe(value: Any) -> tuple[Any, Any, Any, Any]:
    """Shape, dtype, the value if it is no tensor, and what tells tensors that share their storage."""
    if not isinstance(value, Tensor):
        return None, None, value, None
    storage = value.untyped_storage()
    place = (storage.data_ptr(), value.storage_offset()) if value.numel() and not value.is_meta else id(value)
    return tuple(value.shape), value.dtype, None, (place, tuple(value.shape), value.stride())


def local_state(state: Mapping[str, Any], mine: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """This rank's part of the whole state: the rest of the known names is dropped, unknown ones stay to be reported."""
    elsewhere = set(order) - mine.keys()
    return {name: value for name, value in state.items() if name not in elsewhere}


# --------------------------------------------------------------------------------------------------------- optimizers


def gather_optimizer_state(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    names: Mapping[int, str],
    order: Sequence[str],
    group: Group,
    device: torch.device,
    values: bool,
) -> dict[str, Any]:
    """The state dict that the optimizer of the whole model would have. Every rank of `group` must call it.

    Args:
        state: State dict of this rank's optimizer.
        optimizer: The optimizer.
        names: Name of each of this rank's parameters, by `id`.
        order: Names of all parameters, in the order of the whole model.
        group, device, values: As for `gather_state`.

    Raises:
        RuntimeError: If the order of the parameters in the whole optimizer cannot be told.
    """
    mine = _group_names(optimizer, names)
    whole = _whole_groups(mine, order, group)
    flat_names = [name for group_names in mine for name in group_names]
    entries = {
        (flat_names[index], key): value for index, entry in state["state"].items() for key, value in entry.items()
    }
    gathered = gather_state(entries, [], group, device, values)
    position = {name: index for index, name in enumerate(name for group_names in whole for name in group_names)}
    full: dict[int, Any] = {index: {} for index in sorted({position[name] for name, _ in gathered})}
    for (name, key), value in gathered.items():
        full[position[name]][key] = value
    groups = [
        {**settings, "params": [position[name] for name in group_names]}
        for settings, group_names in zip(state["param_groups"], whole)
    ]
    return {**state, "state": full, "param_groups": groups}


def local_optimizer_state(
    state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[int, str], order: Sequence[str], group: Group
) -> dict[str, Any]:
    """The part of a whole optimizer's state that is of this rank's parameters. Every rank of `group` must call it.

    Raises:
        ValueError: If the parameter groups of the state and of the whole optimizer differ in number or size.
    """
    mine = _group_names(optimizer, names)
    whole = _whole_groups(mine, order, group)
    saved = [entry["params"] for entry in state["param_groups"]]
    if [len(indices) for indices in saved] != [len(group_names) for group_names in whole]:
        raise ValueError(
            "the optimizer state in the checkpoint does not fit: expected parameter groups of "
            f"{[len(group_names) for group_names in whole]} parameters, found {[len(indices) for indices in saved]}. "
            "Was `configure_optimizers` changed since it was saved?"
        )
    index_of = {name: index for indices, group_names in zip(saved, whole) for index, name in zip(indices, group_names)}
    flat_names = [name for group_names in mine for name in group_names]
    local = {
        index: state["state"][index_of[name]]
        for index, name in enumerate(flat_names)
        if index_of[name] in state["state"]
    }
    counts = iter(range(len(flat_names)))
    groups = [
        {**settings, "params": [next(counts) for _ in group_names]}
        for settings, group_names in zip(state["param_groups"], mine)
    ]
    return {**state, "state": local, "param_groups": groups}


def _group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _whole_groups(mine: list[list[str]], order: Sequence[str], group: Group) -> list[list[str]]:
    """The parameter groups of the whole model, from those of the stages.

    Raises:
        RuntimeError: If a group is neither in the order of the model nor sorted by name.
    """
    everyone = comm.all_gather_object(mine, group)
    place = {name: index for index, name in enumerate(order)}
    whole = []
    for number, parts in enumerate(zip(*everyone, strict=True)):
        union = {name for part in parts for name in part}
        for key in (place.__getitem__, str):
            if all(list(part) == sorted(part, key=key) for part in parts):
                whole.append(sorted(union, key=key))
                break
        else:
            raise RuntimeError(
                f"parameter group {number} of the optimizer is neither in the order of `named_parameters()` nor sorted "
                "by name, so that the order of the whole group over the pipeline stages is not known; build the groups "
                "in one of these orders"
            )
    return whole
