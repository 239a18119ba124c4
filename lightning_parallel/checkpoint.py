"""One ordinary checkpoint for any layout: full tensors under global names, cut on load and merged on save.

A rank of a tensor-parallel group holds shards; their rules say which part of the full tensor each one is. Everything
here works on plain state dicts, so the file is that of one process: stock Lightning reads it, and the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.tensor.sharding import Shard

__all__ = [
    "check_shapes",
    "cut_optimizer_state",
    "cut_state_dict",
    "merge_optimizer_state",
    "merge_state_dict",
    "rules_by_name",
]

Rules = Mapping[str, Shard]


def rules_by_name(module: nn.Module, rules: Rules) -> dict[str, Shard]:
    """Extend `rules` to every name of a shared parameter."""
    by_identity = {id(tensor): rules[name] for name, tensor in _named_tensors(module).items() if name in rules}
    return {
        name: by_identity[id(tensor)] for name, tensor in _named_tensors(module).items() if id(tensor) in by_identity
    }


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


# ----------------------------------------------------------------------------------------------------------- saving


def merge_state_dict(state: Mapping[str, Any], rules: Rules, group: Group, keep: bool) -> dict[str, Any]:
    """The full state dict of a module of which `state` holds this rank's shards.

    Every rank of `group` must call it. Tensors that share storage in `state` share it in the result.

    Args:
        state: `state_dict()` of the module.
        rules: How the tensors are sharded, by name; the others are whole.
        group: The tensor-parallel group.
        keep: Whether this rank needs the values. Elsewhere the result holds tensors on the `meta` device, so that
            hooks which look at names and shapes work alike on all ranks at no cost.

    Returns:
        Tensors on the CPU (or `meta`); values that are not tensors as they are.
    """
    merged: dict[tuple[Any, ...], Tensor] = {}
    full: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            full[name] = value
            continue
        key = (value.device, value.data_ptr(), value.shape, value.stride(), name if value.numel() == 0 else "")
        if key not in merged:
            merged[key] = _merge(value.detach(), rules.get(name), group, keep)
        full[name] = merged[key]
    return full


def _merge(local: Tensor, rule: Shard | None, group: Group, keep: bool) -> Tensor:
    """Gather the shards of one tensor; the values reach only the ranks that `keep` them."""
    if rule is None or group.size == 1:
        return local.cpu() if keep else local.to("meta")
    sizes = [rule.local_size(rank) for rank in range(group.size)]
    gathered = comm.all_gather(local, group, rule.dim, sizes)
    if not keep:
        return torch.empty(rule.full_shape(local.shape), dtype=local.dtype, device="meta")
    return rule.merge(gathered.cpu().split(sizes, rule.dim))


def merge_optimizer_state(
    optimizer: Optimizer, names: Mapping[int, str], rules: Rules, group: Group, keep: bool
) -> dict[str, Any]:
    """The state dict that `optimizer` would have if its parameters were whole.

    Args:
        optimizer: The optimizer of this rank's shards.
        names: Name of each parameter, by `id`.
        rules, group, keep: As for `merge_state_dict`.

    Raises:
        RuntimeError: If the state of a sharded parameter holds a tensor that is neither of the parameter's shape nor
            a scalar, so that how to merge it is not known.
    """
    state = optimizer.state_dict()
    full: dict[int, Any] = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        if index not in state["state"]:
            continue
        rule = rules.get(names.get(id(parameter), ""))
        full[index] = {}
        for key, value in state["state"][index].items():
            elementwise = isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
            if rule is not None and isinstance(value, Tensor) and value.dim() > 0 and not elementwise:
                raise RuntimeError(
                    f"{type(optimizer).__name__} keeps `{key}` of shape {tuple(value.shape)} for the shard"
                    f" `{names[id(parameter)]}` of shape {tuple(parameter.shape)}; only state of the parameter's own"
                    " shape can be merged into a full checkpoint"
                )
            full[index][key] = _merge(value, rule if elementwise else None, group, keep) if elementwise else value
    return {**state, "state": full}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# ---------------------------------------------------------------------------------------------------------- loading


def check_shapes(state: Mapping[str, Any], module: nn.Module, rules: Rules, source: str) -> None:
    """Compare the shapes of a full state dict with those that `module` expects, before anything is loaded.

    Raises:
        ValueError: With every tensor that does not fit: its name, the expected and the found shape.
    """
    problems = []
    for name, tensor in module.state_dict().items():
        found = state.get(name)
        if not isinstance(tensor, Tensor) or not isinstance(found, Tensor):
            continue
        expected = tuple(rules[name].full_shape(tensor.shape) if name in rules else tensor.shape)
        if expected != tuple(found.shape):
            problems.append(f"  {name}: expected {expected}, found {tuple(found.shape)}")
    if problems:
        raise ValueError(f"the checkpoint {source} does not fit the model (full shapes):\n" + "\n".join(problems))


def cut_state_dict(state: Mapping[str, Any], rules: Rules, rank: int) -> dict[str, Any]:
    """This rank's part of a full state dict."""
    return {
        name: rules[name].split(value, rank) if name in rules and isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def cut_optimizer_state(
    state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[int, str], rules: Rules, rank: int
) -> dict[str, Any]:
    """This rank's part of a full optimizer state dict, for an optimizer over the same parameters in the same order.

    Raises:
        ValueError: If the parameter groups of the state and of the optimizer differ in number or size.
    """
    _check_groups(state["param_groups"], optimizer.param_groups)
    local: dict[int, Any] = {}
    for index, parameter in zip(
        (i for group in state["param_groups"] for i in group["params"]), _parameters(optimizer)
    ):
        if index not in state["state"]:
            continue
        rule = rules.get(names.get(id(parameter), ""))
        full_shape = tuple(parameter.shape if rule is None else rule.full_shape(parameter.shape))
        local[index] = {
            key: rule.split(value, rank)
            if rule is not None and isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == full_shape
            else value
            for key, value in state["state"][index].items()
        }
    return {**state, "state": local}


def _check_groups(saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]) -> None:
    expected, found = ([len(group["params"]) for group in groups] for groups in (current, saved))
    if expected != found:
        raise ValueError(
            f"the optimizer state in the checkpoint does not fit: expected parameter groups of {expected} parameters,"
            f" found {found}. Was `configure_optimizers` changed since it was saved?"
        )
