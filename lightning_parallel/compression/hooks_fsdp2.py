"""Compression inside the backward pass of modules that `fully_shard` has divided (FSDP2).

    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    steps = compress_fully_shard(model, PowerSGD(rank=4), replicas=mesh["replicate"])

Two collectives can be replaced:

    the reduce-scatter      without `replicas`: each rank takes its shard of the mean; residuals are as large as the
                            whole model
    the sum over replicas   with `replicas`: gradients are scattered over the shards as they are, and each rank
                            compresses its rows with the ranks that hold the same; residuals are as large as a shard

The second is hybrid sharding, for slow links between the replicas. `fully_shard` over a mesh of two dimensions has no
place for a compressor: its hook runs after the sum over the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.reducer import Reducer
from lightning_parallel.compression.sharded import ShardedSteps, plain_name

__all__ = ["compress_fully_shard", "shard_ranks"]


class _Unit:
    """The parameters that one call of `fully_shard` communicates together, and their places in a flat gradient."""

    def __init__(self, steps: ShardedSteps, parameters: Sequence[tuple[str, Any]], shards: Group) -> None:
        self.steps, self._parameters, self._shards = steps, parameters, shards

    def average_replicas(self, flat: Tensor) -> None:
        """Replace this rank's shards by their mean over the replicas: a hook of FSDP2."""
        pieces = self._laid_out(flat.numel())
        self.steps.reduce(
            {name: flat[start : start + p.sharded_size.numel()].view(p.sharded_size) for name, p, start in pieces}
        )

    def average_whole(self, output: Tensor, flat: Tensor) -> None:
        """Take this rank's shards of the mean of whole gradients."""
        rows = flat.view(self._shards.size, -1)
        pieces = self._laid_out(output.numel())
        whole = {name: _joined(rows[:, start:], p) for name, p, start in pieces}
        shards = {name: p.padded_sharded_param_size.numel() for name, p, _ in pieces if p.fsdp_placement.dim == 0}
        self.steps.reduce(whole, shards)
        output.zero_()
        for name, p, start in pieces:
            size, dim = p.padded_sharded_param_size, p.fsdp_placement.dim
            first = self._shards.rank * size[dim]
            mine = whole[name][(slice(None),) * dim + (slice(first, first + size[dim]),)]
            output[start : start + size.numel()].view(size).narrow(dim, 0, mine.shape[dim]).copy_(mine)

    def _laid_out(self, numel: int) -> list[tuple[str, Any, int]]:
        """Name, parameter and first element of all that have a gradient."""
        pieces, end = [], 0
        for name, parameter in self._parameters:
            if parameter.sharded_param.requires_grad:
                pieces.append((name, parameter, end))
                end += parameter.padded_sharded_param_size.numel()
        if end != numel:
            raise RuntimeError(
                f"expected gradients of all of {', '.join(name for name, *_ in pieces)}, {end} elements of this rank's "
                f"shards, found {numel}: a parameter was not used. Freeze it, or call "
                "`set_reduce_scatter_unused_params(True)` on the module"
            )
        return pieces


def _joined(rows: Tensor, parameter: Any) -> Tensor:
    """A whole gradient from (ranks, padded shard, ...), without the padding."""
    size, dim = parameter.padded_sharded_param_size, parameter.fsdp_placement.dim
    shards = rows[:, : size.numel()].unflatten(1, size)
    return torch.cat(list(shards), dim).narrow(dim, 0, parameter._orig_size[dim])


class _ReduceScatter:
    """Stands in for the reduce-scatter of FSDP2."""

    def __init__(self, unit: _Unit) -> None:
        self._unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._unit.average_whole(output_tensor, input_tensor)
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())
        elif op != dist.ReduceOp.AVG:
            raise RuntimeError(
                f"expected a sum or a mean, found {op}, of `set_gradient_divide_factor`; call "
                "`set_force_sum_reduction_for_comms(True)` as well"
            )


def compress_fully_shard(
    model: nn.Module,
    compressor: Reducer,
    replicas: Union[dist.ProcessGroup, DeviceMesh, None] = None,
    scaler: Optional[Any] = None,
) -> ShardedSteps:
    """Compress the gradients of the modules in `model` that `fully_shard` has divided, before the first forward pass.

    With `replicas`, or where parameters are divided by tensor parallelism as well, all ranks must train `model`.

    Args:
        replicas: The ranks that hold the same shards, where `fully_shard` was given the shards' mesh of hybrid
            sharding. Their shards are made equal. None: compress between the ranks that share a parameter out.
        scaler: A gradient scaler in use: residuals are kept without its scale.

    Returns:
        The steps: call their `finish()` after each backward pass, or leave it to the next forward pass. Where one
        did not count, not every rank has a gradient that tells.

    Raises:
        ValueError: If nothing in `model` is fully sharded, it is over a mesh of shards and replicas, its modules
            divide the ranks differently, it has been compressed already, or replicas have no data yet.
        RuntimeError: If this version of torch lacks the hook.
    """
    sharded: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    groups = _parameter_groups(model)
    shards = _check(groups, replicas)
    group = shards if replicas is None else _group(replicas)
    if replicas is not None and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("expected parameters with data, which replicas are to share, found some on the meta device")
    steps = ShardedSteps(compressor, group, _everyone(groups, shards, replicas), scaler, alike=replicas is not None)
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    for name, parameters in groups.items():
        unit = _Unit(steps, [(names[id(p.sharded_param)], p) for p in parameters.fsdp_params], shards)
        _install(sharded[name], parameters, unit, replicas is not None)
    for name, module in sharded.items():
        if not any(name.startswith(f"{other}." if other else "") for other in sharded if other != name):
            steps.follow(module)
    if replicas is not None:
        _make_equal(model, group)
    return steps


def _install(module: Any, parameters: Any, unit: _Unit, hybrid: bool) -> None:
    if hybrid:
        module.set_all_reduce_hook(unit.average_replicas)
        unit.steps.on_close(partial(module.set_all_reduce_hook, None))
    else:
        before = parameters._reduce_scatter_comm
        module.set_custom_reduce_scatter(_ReduceScatter(unit))
        unit.steps.on_close(partial(module.set_custom_reduce_scatter, before))


def shard_ranks(model: nn.Module) -> Optional[tuple[int, ...]]:
    """The ranks that share the parameters of the first fully sharded module out; None if there is no such module."""
    groups = _parameter_groups(model)
    return _shards(next(iter(groups.values()))).ranks if groups else None


def _parameter_groups(model: nn.Module) -> dict[str, Any]:
    """What `fully_shard` communicates together, by the name of the module that it was given."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            found.update((name, group) for group in groups if group is not None and group not in found.values())
    return found


def _shards(parameters: Any) -> Group:
    return Group.of(parameters.mesh_info.shard_process_group, axis="data_parallel")


def _check(groups: dict[str, Any], replicas: Any) -> Group:
    """The one group of ranks that all modules are divided over."""
    if not groups:
        raise ValueError("expected modules with `fully_shard` applied, found none")
    hybrid = [name for name, group in groups.items() if hasattr(group.mesh_info, "replicate_process_group")]
    if hybrid:
        raise ValueError(
            f"found `fully_shard` over a mesh of shards and replicas at {hybrid}: FSDP2 sums over the replicas before "
            "its hook runs, so nothing is left to compress. Give `fully_shard` the shards' dimension of the mesh only "
            "and `compress_fully_shard` that of the `replicas`."
        )
    needed = "set_custom_reduce_scatter" if replicas is None else "set_all_reduce_hook"
    if not hasattr(FSDPModule, needed):
        raise RuntimeError(f"expected a version of torch whose FSDPModule has `{needed}`, found {torch.__version__}")
    used = [
        name
        for name, group in groups.items()
        if group._all_reduce_hook is not None
        or isinstance(getattr(group, "_reduce_scatter_comm", None), _ReduceScatter)
    ]
    if used:
        raise ValueError(f"found a communication hook already, at {used}; close the steps that it belongs to first")
    divisions = {_shards(group).ranks for group in groups.values()}
    if len(divisions) > 1:
        raise ValueError(f"expected all modules to be divided over the same ranks, found {sorted(divisions)}")
    return _shards(next(iter(groups.values())))


def _everyone(groups: dict[str, Any], shards: Group, replicas: Any) -> Group:
    """The ranks that must agree on whether a step counts."""
    meshes = [p.sharded_param.device_mesh for group in groups.values() for p in group.fsdp_params]
    alone = replicas is None and all(mesh.ndim == 1 for mesh in meshes)
    return shards if alone else Group.of(axis="data_parallel")


def _group(replicas: Union[dist.ProcessGroup, DeviceMesh]) -> Group:
    process_group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
    return Group.of(process_group, axis="data_parallel")


@torch.no_grad()
def _make_equal(model: nn.Module, replicas: Group) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.numel():
            local.copy_(comm.broadcast_(local.detach().contiguous().clone(), replicas))
