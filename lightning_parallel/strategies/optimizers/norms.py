"""Norms of gradients and overflow checks over a full replica; norms of full parameters.

Lightning has no strategy hook for clipping: `LightningModule.clip_gradients` calls the precision plugin. Many modules
call torch's `clip_grad_norm_` and `get_total_norm`, or Lightning's `grad_norm`. These functions know only the shards of
this rank, so this module replaces all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import ParallelState, Patches
from lightning_parallel.compat.lightning import grad_norm_functions
from lightning_parallel.compat.precision import TOTAL_NORM, clip_grad, norms_of, patch_unscale, scale_all
from lightning_parallel.data_parallel import ParameterSlices
from lightning_parallel.optim import TrustRatioOptimizer, WholeNorms
from lightning_parallel.strategies.hooks.views import refuse_freed
from lightning_parallel.tensor.pieces import Piece
from lightning_parallel.tensor.sharding import Shard

__all__ = ["ReplicaNorm", "ShardNorms", "give_norms", "span_replica"]


class ReplicaNorm:
    """Computes the norm of the gradients of a full replica, of which this rank holds a part.

    Args:
        module: The user's module.
        rules: How its parameters are sharded over the tensor axis, by name.
        groups: The mesh's groups.
        counted_by_others: Parameters of this rank that another pipeline stage counts, by name.
        slices: The slices of the replicas, if they divide gradients.
    """

    def __init__(
        self,
        module: LightningModule,
        rules: Mapping[str, Shard],
        groups: MeshGroups,
        counted_by_others: frozenset[str],
        slices: ParameterSlices | None = None,
    ) -> None:
        self.groups = groups
        self._slices = slices
        self._module = module
        self._rules = rules
        self._counted_by_others = counted_by_others

    def __call__(self, gradients: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the given gradients of the module; every rank of the replica must call it."""
        # Clipping functions pass gradients alone, but which elements to count depends on the parameter.
        owners: dict[int, tuple[str, nn.Parameter | None]] = {
            id(parameter.grad): (name, parameter)
            for name, parameter in self._module.named_parameters()
            if parameter.grad is not None
        }
        # A list, because `gradients` may be a generator and is read twice.
        given = list(gradients)
        owned = [owners.get(id(gradient), ("", None)) for gradient in given]
        parts = [self._counted(name, owner, gradient) for (name, owner), gradient in zip(owned, given)]
        # A rank without gradients still takes part, on a device that its group accepts.
        device = given[0].device if given else torch.device(self.groups.model.host_device)
        return _norm_over([part for part in parts if part is not None], self._holders, norm_type, device)

    @property
    def is_whole(self) -> bool:
        """Whether this rank runs the full module alone now: no other rank takes part."""
        return ParallelState.of(self._module).is_alone

    @property
    def spanned(self) -> Group:
        """The ranks that may hold different gradients of a step, and must decide together."""
        return self.groups.model if self._slices is None else self.groups.world

    @property
    def _holders(self) -> Group:
        """The ranks that hold the elements of a step's gradients now, each once."""
        # Before the reduction of accumulated batches, replicas have different gradients.
        return self.spanned if self._slices is not None and self._slices.holds_gradients else self.groups.model

    def _counted(self, name: str, parameter: nn.Parameter | None, gradient: Tensor) -> Tensor | None:
        """Return the elements of a gradient that this rank counts; None without one. No owner means no shard."""
        slices, rank = self._slices, self.groups.tensor_parallel.rank
        # Replicated gradients count on the first rank of the tensor axis.
        if name in self._counted_by_others or (name not in self._rules and rank > 0):
            return None
        if slices is not None and slices.holds_gradients:
            if parameter is not None and slices.is_narrow(parameter):
                return _owned(gradient, self._rules.get(name), rank, slices, parameter)
            # Such as a parameter without dimensions, which is not sliced.
            if self.groups.gradients.rank > 0:
                return None  # full on all replicas
        return _owned(gradient, self._rules.get(name), rank)

    def use_everywhere(self, patches: Patches) -> None:
        """Make torch's and Lightning's functions use these norms for the module until `patches` are undone."""
        if self.spanned.size == 1:
            return
        patches.replace_function(getattr(clip_grad, TOTAL_NORM), self._total_norm)
        patches.replace_function(clip_grad.clip_grad_value_, _clip_value)
        for function in grad_norm_functions():
            patches.replace_function(function, self._grad_norm)

    def _total_norm(self, own_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the replacement of torch's function."""

        def norm(tensors: Iterable[Tensor], norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
            # Another model in the process, such as the model of a metric, keeps torch's norm. A rank without gradients
            # takes part, since its peers wait for it.
            gradients = [one.held if isinstance(one, Piece) and one.held is not None else one for one in tensors]
            if not gradients:
                self._refuse_freed(self._module)
            ours = {id(parameter.grad) for parameter in self._module.parameters() if parameter.grad is not None}
            if self.is_whole or (gradients and not any(id(gradient) in ours for gradient in gradients)):
                return own_norm(gradients, norm_type, *args, **kwargs)
            return self(gradients, norm_type)

        return norm

    def _refuse_freed(self, module: nn.Module) -> None:
        if self._slices is not None:
            for name, parameter in module.named_parameters():
                if parameter.grad is None and self._slices.has_freed(parameter):
                    refuse_freed(name)

    def _grad_norm(self, own_norms: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Return the replacement of Lightning's function."""

        def norms(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Any]:
            is_other = not any(child is module for child in self._module.modules())
            # Lightning's function refuses such a norm type, with its own error.
            if self.is_whole or is_other or float(norm_type) <= 0:
                return own_norms(module, norm_type, group_separator)
            found = self.of_each(module, float(norm_type))
            named = {f"grad_{float(norm_type)}_norm{group_separator}{name}": norm for name, norm in found.items()}
            if named:
                # Lightning computes the total from the rounded norms in the same way.
                total = torch.tensor(list(named.values())).norm(float(norm_type))
                named[f"grad_{float(norm_type)}_norm_total"] = total
            return named

        return norms

    def of_each(self, module: nn.Module, norm_type: float) -> dict[str, Tensor]:
        """Return the norm of each gradient in a submodule, by names in it; every rank of the replica must call it."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        self._refuse_freed(module)
        powers: dict[str, tuple[float, torch.dtype]] = {}
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                mine = self._counted(names[id(parameter)], parameter, parameter.grad)
                # In double precision: the norm of a gradient in fp16 may exceed the range of fp16.
                norm = 0.0 if mine is None or not mine.numel() else float(norms_of([mine.double()], norm_type)[0])
                powers[name] = (norm if math.isinf(norm_type) else norm**norm_type, parameter.grad.dtype)
        everyone: dict[str, list[tuple[float, torch.dtype]]] = {}
        # One message with all names: stages have gradients of different parameters.
        for theirs in comm.all_gather_object(powers, self._holders):
            for name, power in theirs.items():
                everyone.setdefault(name, []).append(power)
        norms = {}
        for name, found in everyone.items():
            values = [value for value, _ in found]
            norm = max(values) if math.isinf(norm_type) else sum(values) ** (1.0 / norm_type)
            norms[name] = torch.tensor(norm, dtype=found[0][1], device=self._module.device)
        return norms


def _clip_value(own_clip: Callable[..., None]) -> Callable[..., None]:
    """Return the replacement of torch's function, which fails without gradients, as on another stage."""

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(parameter.grad is not None for parameter in found):
            own_clip(found, *args, **kwargs)

    return clip


def span_replica(plugin: Precision, norm: ReplicaNorm, device: torch.device, patches: Patches) -> None:
    """Make `plugin` use the replica's norm and overflow check until `patches` are undone."""
    # Replace methods instead of the plugin, which may be an object of a user's class.
    if norm.spanned.size == 1:
        return

    own_clip = plugin.clip_grad_by_norm

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float, norm_type: float = 2.0) -> Any:
        if norm.is_whole:
            return own_clip(optimizer, clip_val)
        gradients = [parameter.grad for parameter in plugin.main_params(optimizer) if parameter.grad is not None]
        # Also without gradients: the norm is a collective, and the other stages take part.
        total = norm(gradients, norm_type)
        # Scale on the device without reading the norm, so that the host does not wait.
        scale_all(gradients, _clip_coefficient(total, clip_val))
        return total

    def any_overflow(found: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        # An overflow on one rank counts on all ranks, which must skip the step together. A rank without gradients has
        # found no overflow, but must take part.
        overflow = found.get(device)
        if overflow is None:
            overflow = torch.zeros((), device=device)
        found[device] = comm.all_reduce(overflow, norm.spanned, "max")
        return found

    patches.replace(plugin, "clip_grad_by_norm", clip_grad_by_norm)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        patch_unscale(scaler, any_overflow, patches)


def _norm_over(parts: Sequence[Tensor], group: Group, norm_type: float, device: torch.device) -> Tensor:
    """Return the `norm_type`-norm over all elements of `parts` on all ranks of `group`, which must all call it.

    Args:
        parts: The elements of gradients that this rank counts.
        group: Ranks that together count each element once.
        norm_type: 1, 2, any positive number, or infinity.
        device: The device of the result.
    """
    # Sum in double precision: a sum of many squares in fp16 or bf16 would overflow, or stop growing.
    norms = norms_of([part for part in parts if part.numel()], norm_type)
    zero = torch.zeros((), device=device, dtype=torch.float64)
    if math.isinf(norm_type):
        return comm.all_reduce_(torch.stack(norms).double().max() if norms else zero, group, "max")
    powers = torch.stack(norms).double().pow(norm_type).sum() if norms else zero
    return comm.all_reduce_(powers, group).pow(1.0 / norm_type)


def _owned(
    mine: Tensor, rule: Shard | None, rank: int, slices: ParameterSlices | None = None, parameter: Tensor | None = None
) -> Tensor:
    """Return the elements of a part of a tensor that no lower rank of the tensor axis holds.

    Args:
        mine: The part that this rank holds.
        rule: How the tensor is sharded; None if it is replicated.
        rank: This rank's place in the tensor axis.
        slices, parameter: Given if `mine` is a slice of the shard of `parameter`.
    """
    if rule is None:
        return mine
    if slices is None or parameter is None:
        return rule.owned(mine, rank)
    # Shards overlap if several ranks share key and value heads. Without overlap, all elements of a slice count.
    if not rule.replicated:
        return mine
    # Mark the owned elements in the shape of the shard, and cut the marks like the parameter.
    shape = slices.whole_shape(parameter)
    owned = torch.zeros(shape.numel(), dtype=torch.bool, device=mine.device)
    owned[rule.owned(torch.arange(shape.numel(), device=mine.device).view(shape), rank).reshape(-1)] = True
    return mine.reshape(-1)[slices.cut(owned)]


def _clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that scales gradients of the given norm down to `max_norm`; 1 if they are below it."""
    # The formula of torch's `clip_grad_norm_`.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class ShardNorms(WholeNorms):
    """Computes norms of full parameters that are sharded by rules, and divided into slices during a step.

    Each stage of a pipeline has full parameters.

    Args:
        names: Name of each parameter, by `id`.
        rules: How parameters are sharded, by name.
        group: The tensor-parallel group.
        slices: Slices of the replicas; None without ZeRO.
    """

    def __init__(
        self, names: Mapping[int, str], rules: Mapping[str, Shard], group: Group, slices: ParameterSlices | None = None
    ) -> None:
        self._rules = {key: rules[name] for key, name in names.items() if name in rules}
        self._group = group
        self._slices = slices

    @override
    def groups(self, parameter: Tensor) -> tuple[Group, ...]:
        over_ranks = (self._group,) if id(parameter) in self._rules else ()
        # Include a parameter that is full now: a parameter without a gradient may be full on some ranks only.
        if self._slices is not None and self._slices.divides(parameter):
            return *over_ranks, self._slices.group
        return over_ranks

    @override
    def part(self, parameter: Tensor, shard: Tensor) -> Tensor:
        rule = self._rules.get(id(parameter))
        is_narrow = self._slices is not None and self._slices.is_narrow(parameter)
        return _owned(shard, rule, self._group.rank, self._slices if is_narrow else None, parameter)


def give_norms(
    optimizers: Sequence[Optimizer],
    names: Mapping[int, str],
    rules: Mapping[str, Shard],
    group: Group,
    patches: Patches,
    slices: ParameterSlices | None = None,
) -> None:
    """Let optimizers that use norms of full parameters compute them over shards, until `patches` are undone."""
    for optimizer in optimizers:
        if (rules or slices is not None) and isinstance(optimizer, TrustRatioOptimizer):
            patches.replace(optimizer, "norms", ShardNorms(names, rules, group, slices))
