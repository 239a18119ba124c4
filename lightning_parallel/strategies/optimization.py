"""Optimizers over a mesh: gradient norms and overflow checks of a whole replica; parameter groups of the whole model.

There is no strategy hook for clipping: `LightningModule.clip_gradients` calls the precision plugin, and torch's own
`clip_grad_norm_`, which many modules call directly, knows this rank's shards only. Both are corrected here.

A checkpoint numbers the parameters of an optimizer in the order of its groups. Each stage holds some of them, so while
`configure_optimizers` runs, dummy parameters fill the gaps; they are then removed from the optimizers, and the order
stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.checkpoint import ModelNames
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import TOTAL_NORM, clip_grad, norms_of, parameters_of, patch_unscale
from lightning_parallel.tensor.sharding import Shard

__all__ = [
    "ReplicaNorm",
    "clip_coefficient",
    "remove_dummy_parameters",
    "span_replica",
    "total_norm",
    "whole_parameters",
]


class ReplicaNorm:
    """Norm of the gradients of a whole replica, of which this rank holds a part.

    Args:
        module: The user's module.
        rules: How its parameters are sharded over the tensor axis, by name.
        groups: The mesh's groups.
        counted_by_others: Parameters of this rank that another pipeline stage counts, by name.
    """

    def __init__(
        self, module: LightningModule, rules: Mapping[str, Shard], groups: MeshGroups, counted_by_others: frozenset[str]
    ) -> None:
        self.groups = groups
        self._module = module
        self._rules = rules
        self._counted_by_others = counted_by_others

    def __call__(self, gradients: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the given gradients of the module; every rank of the replica must call it."""
        # Clipping functions pass gradients without names, but which elements to count depends on the parameter.
        names = {
            id(parameter.grad): name
            for name, parameter in self._module.named_parameters()
            if parameter.grad is not None
        }
        named = {names.get(id(gradient), f"unnamed {index}"): gradient for index, gradient in enumerate(gradients)}
        return total_norm(named, self._rules, self.groups, norm_type, self._counted_by_others)

    def use_in_torch(self, patches: Patches) -> None:
        """Make torch's `clip_grad_norm_` use this norm for the module's gradients until `patches` are undone."""
        if self.groups.replica.size == 1:
            return
        own_norm = getattr(clip_grad, TOTAL_NORM)

        def norm(tensors: Iterable[Tensor], norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
            # Another model in the same process, such as a metric's, keeps torch's own norm. A rank without gradients
            # takes part, since the others wait for it.
            gradients = list(tensors)
            ours = {id(parameter.grad) for parameter in self._module.parameters() if parameter.grad is not None}
            if gradients and not any(id(gradient) in ours for gradient in gradients):
                return own_norm(gradients, norm_type, *args, **kwargs)
            return self(gradients, norm_type)

        patches.replace(clip_grad, TOTAL_NORM, norm)


def span_replica(plugin: Precision, norm: ReplicaNorm, device: torch.device, patches: Patches) -> None:
    """Make `plugin` use the replica's norm and overflow check until `patches` are undone."""
    # Methods of the user's object are replaced instead of the plugin: it may be of a class of the user's.
    if norm.groups.replica.size == 1:
        return

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float, norm_type: float = 2.0) -> Tensor:
        gradients = [parameter.grad for parameter in plugin.main_params(optimizer) if parameter.grad is not None]
        total = norm(gradients, norm_type)
        # On the device, without asking for its value: the host does not wait for the norm.
        coefficient = clip_coefficient(total, clip_val)
        for gradient in gradients:
            gradient.mul_(coefficient.to(gradient))
        return total

    def any_overflow(found: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        # An overflow on any rank of the replica is one on all of them; else they would disagree on skipping the step.
        # A rank whose gradients are all None has found nothing, but has to take part.
        overflow = found.get(device)
        if overflow is None:
            overflow = torch.zeros((), device=device)
        found[device] = comm.all_reduce(overflow, norm.groups.replica, "max")
        return found

    patches.replace(plugin, "clip_grad_by_norm", clip_grad_by_norm)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        patch_unscale(scaler, any_overflow, patches)


def total_norm(
    gradients: Mapping[str, Tensor],
    rules: Mapping[str, Shard],
    groups: MeshGroups,
    norm_type: float = 2.0,
    counted_by_others: frozenset[str] = frozenset(),
) -> Tensor:
    """Return the `norm_type`-norm over all elements of one replica's gradients, each distinct element counted once.

    Sharded gradients count on every rank, without the parts that a lower rank of the tensor axis holds as well;
    whole ones count on the first rank of the tensor axis. Every rank of the replica must call it.

    Args:
        gradients: This rank's gradients by parameter name; a shared parameter under one of its names.
        rules: How the parameters are sharded, by name.
        groups: The mesh's groups.
        norm_type: 1, 2, any positive number, or infinity.
        counted_by_others: Names that another pipeline stage counts (all but one owner of a tied parameter).

    Returns:
        A scalar, equal on all ranks of the replica.
    """
    position = groups.tensor_parallel.rank
    counted = []
    for name, gradient in gradients.items():
        if name in counted_by_others:
            continue
        if name in rules:
            # Shards may overlap, as key and value heads do that several ranks share.
            counted.append(rules[name].owned(gradient, position))
        elif position == 0:
            counted.append(gradient)
    device = next((gradient.device for gradient in gradients.values()), torch.device("cpu"))
    # In double precision: a sum of many squares in fp16 or bf16 would overflow, or stop growing.
    norms = [norm.double() for norm in norms_of([gradient for gradient in counted if gradient.numel()], norm_type)]
    zero = torch.zeros((), device=device, dtype=torch.float64)
    if math.isinf(norm_type):
        return comm.all_reduce_(torch.stack(norms).max() if norms else zero, groups.replica, "max")
    powers = torch.stack(norms).pow(norm_type).sum() if norms else zero
    return comm.all_reduce_(powers, groups.replica).pow(1.0 / norm_type)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that scales gradients of the given norm down to `max_norm`; 1 if they are below it."""
    # The formula of torch's `clip_grad_norm_`.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@contextmanager
def whole_parameters(
    module: nn.Module, names: ModelNames, group: Group, device: torch.device
) -> Iterator[dict[nn.Parameter, str]]:
    """Register dummies for the parameters of other stages in `module` inside the block, in the usual order.

    An optimizer that is built there has the parameter groups that it has in one process. Without the dummies each
    stage would know the order of its own parameters only, and a checkpoint needs that of all. They have the shape,
    dtype and device of parameters, but one element of memory. Every rank of `group` must call it.

    Args:
        module: The model, of which this rank holds some stages.
        names: Names in the whole model.
        group: The pipeline group.
        device: The device of the dummies.

    Yields:
        The dummy parameters, and the first name of each.
    """
    held = {
        name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }
    described = {name: facts for stage in comm.all_gather_object(held, group) for name, facts in stage.items()}
    # Not on `meta`: fused optimizers refuse devices that they have no kernels for.
    dummies = {
        # Expanded from one element, so a stage does not need memory for the others.
        name: nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape), requires_grad)
        for name, (shape, dtype, requires_grad) in described.items()
        if name not in held
    }
    attributes: dict[str, dict[str, str]] = {}
    for name, first in names.parameters.items():
        path, _, attribute = name.rpartition(".")
        attributes.setdefault(path, {})[attribute] = first
    undo: list[Callable[[], None]] = []
    try:
        for path, firsts in attributes.items():
            wanted = {attribute: dummies.get(first) for attribute, first in firsts.items()}
            undo.append(_fill_in(module.get_submodule(path), wanted))
        yield {parameter: name for name, parameter in dummies.items()}
    finally:
        for restore in undo:
            restore()


def _fill_in(owner: nn.Module, wanted: Mapping[str, nn.Parameter | None]) -> Callable[[], None]:
    """Register the `wanted` dummies in `owner` where it lacks the parameter; return a function that undoes it."""
    parameters = parameters_of(owner)
    before = dict(parameters)
    # What a stage has of a missing parameter is an ordinary attribute, which would hide the registered dummy.
    hidden = {name: vars(owner).pop(name) for name in wanted if before.get(name) is None and name in vars(owner)}
    # Filled anew rather than added to: the order of the dict is that of `named_parameters`.
    parameters.clear()
    for name, dummy in wanted.items():
        parameters[name] = dummy if before.get(name) is None else before[name]
    for name, parameter in before.items():
        parameters.setdefault(name, parameter)

    def restore() -> None:
        # `configure_optimizers` may have registered a parameter, which stays.
        added = {name: value for name, value in parameters.items() if name not in before and name not in wanted}
        parameters.clear()
        parameters.update(before)
        parameters.update(added)
        vars(owner).update(hidden)

    return restore


def remove_dummy_parameters(
    optimizer: Optimizer, dummies: Mapping[nn.Parameter, str], module: nn.Module
) -> list[list[str]]:
    """Remove the parameters of other stages from `optimizer`.

    Returns:
        The names in its parameter groups before that, as one process would have them.
    """
    names = {**{parameter: name for name, parameter in module.named_parameters()}, **dummies}
    groups = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        groups.append([names.get(parameter, "") for parameter in parameters])
        is_held = [parameter not in dummies for parameter in parameters]
        for key in ("params", "param_names"):  # the latter if an optimizer was given named parameters
            if key in group:
                group[key] = [entry for entry, keep in zip(group[key], is_held) if keep]
    for parameter in dummies:
        optimizer.state.pop(parameter, None)  # some optimizers, such as Adagrad, have state from the start
    return groups
