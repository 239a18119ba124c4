"""Compression inside the backward pass of FSDP1 (`FullyShardedDataParallel`) and FSDP2 (`fully_shard`).

    session = compress_fsdp(FullyShardedDataParallel(module, ...), Quantize(8))
    session = compress_fully_shard(model, PowerSGD(rank=4), replicas=mesh["replicate"])
    ...
    loss.backward()
    session.finish()      # ends the step: False if it was dropped

FSDP passes the gradients of one unit after another, and continues with this rank's part of their mean. The hook of a
unit therefore compresses its gradients. On CUDA this runs beside backward, on a stream of FSDP; on CPU it runs inline.

    without replicas    compresses full gradients, parameter by parameter, as low-rank methods and top-k need;
                        residuals are as large as the model
    with replicas       (hybrid sharding, for slow links between replicas) sums gradients over the shards without
                        compression, and compresses this rank's part between the replicas; residuals are as large as
                        a shard

Shards of FSDP1 begin and end within rows. Full rows are compressed under the name of their parameter, and the parts of
rows at both ends as vectors. `fully_shard` over a mesh of two dimensions has no place for a compressor, because its
hook runs after the sum over the replicas. Give `fully_shard` the dimension of the shards only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import GradientSession, Group
from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import (
    WRAPPER_PREFIXES,
    FullyShardedGroup,
    FullyShardedParameter,
    fsdp1_comm_hook,
    fsdp1_gradient_views,
    fsdp1_parameter_offsets,
    fsdp1_replica_group,
    fully_sharded_groups,
    install_fsdp1_comm_hook,
    is_backward_running,
)
from lightning_parallel.compression.reducer import Reducer, scale_reader

__all__ = ["ShardedSession", "compress_fsdp", "compress_fully_shard", "plain_name", "shard_ranks"]


class ShardedSession(GradientSession):
    """The steps of `compressor` where other groups of ranks hold other shards of the model.

    A step begins with the first gradients of a backward pass. `finish()` ends it. Without `finish()`, the next forward
    pass of the module given to `follow` ends it, or another gradient of the same parameter.

    Args:
        group: The ranks that hold the same shards, or the full model.
        everyone: All ranks of the model; a step is applied on all of them or on none.
        scaler: A gradient scaler in use: residuals are kept without its scale.
        same_means: True if all ranks of `group` receive the same means, so that each can tell if they are finite.
    """

    def __init__(
        self,
        compressor: Reducer,
        group: Group,
        everyone: Group,
        scaler: Optional[Any] = None,
        same_means: bool = True,
    ) -> None:
        # Ranks that receive different means see different numbers: one may find a NaN where another does not.
        verdict_group = None if same_means and group.size == everyone.size else everyone
        super().__init__(compressor, group, loss_scale=scale_reader(scaler), verdict_group=verdict_group)
        self.compressor = compressor
        self.everyone = everyone
        self.on_close = ExitStack()

    def follow(self, module: nn.Module) -> None:
        """End a step at the next forward pass of `module`, unless `finish` was called."""

        def finish(*_: Any) -> None:
            if not is_backward_running():  # where activation checkpointing computes the forward pass again
                self.finish()

        self.on_close.callback(module.register_forward_pre_hook(finish).remove)

    @override
    def close(self) -> None:
        """Remove the hooks from the module."""
        self.on_close.close()
        super().close()

    def place(self) -> tuple[int, int]:
        """Return this rank's position in its group, and the position of the group; every rank must call it."""
        # Groups are numbered by their first rank: all ranks compute the same numbers from this list.
        firsts = sorted(set(comm.all_gather_object(self.group.ranks[0], self.everyone)))
        return self.group.rank, firsts.index(self.group.ranks[0])


def plain_name(name: str) -> str:
    """Return the name of a parameter in the module as its author wrote it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


# ------------------------------------------------------------------------------------------------------------- FSDP1


class _Fsdp1Unit:
    """One FSDP module: the state of its communication hook."""

    def __init__(self, session: ShardedSession, module: FullyShardedDataParallel, prefix: str) -> None:
        self.session = session
        self.shards = Group.of(module.process_group, axis="shard")
        self.replicates = "HYBRID" in module.sharding_strategy.name
        self._module = module
        self._prefix = prefix

    def whole(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return views of a flat gradient (padded to equal parts) by parameter name."""
        return {self._name(name): view for name, view in fsdp1_gradient_views(self._module, gradient).items()}

    def part(self, shard: Tensor) -> dict[str, Tensor]:
        """Return views of this rank's part of the flat gradient by parameter name."""
        # FSDP1 pads the flat gradient, so all ranks have shards of equal size.
        here = self.shards.rank * shard.numel()
        found: dict[str, Tensor] = {}
        for name, shape, start in fsdp1_parameter_offsets(self._module):
            first = max(start, here)
            last = min(start + shape.numel(), here + shard.numel())
            if first < last:
                run = shard[first - here : last - here]
                found.update(_rows(self._name(name), run, first - start, shape[1:].numel()))
        return found

    def _name(self, name: str) -> str:
        return plain_name(self._prefix + name)


def _rows(name: str, run: Tensor, offset: int, extent: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the rows of a run of a flattened parameter, and the parts of rows at its ends.

    Args:
        offset: Element of the parameter at which the run begins.
        extent: Elements of a row.
    """
    # A low-rank method needs a matrix, and parts of rows do not fit into it: they become vectors.
    head = min(-offset % extent, len(run))
    tail = (len(run) - head) % extent
    rows = run[head : len(run) - tail]
    if len(rows):
        yield name, rows.view(-1, extent) if extent > 1 else rows
    if head:
        yield f"{name}:head", run[:head]
    if tail:
        yield f"{name}:tail", run[len(run) - tail :]


def _fsdp1_hook(unit: _Fsdp1Unit, gradient: Tensor, shard: Optional[Tensor] = None) -> None:
    """Reduce the flat gradient of a unit: a communication hook of FSDP1, which passes `shard` to be filled."""
    if unit.replicates:
        if shard is None:
            raise RuntimeError(
                "FSDP must pass the shard to fill; got none. Use a sharding strategy of FSDP that shards"
            )
        # With a hook, FSDP neither communicates nor divides. This takes the mean over the shards; `add` then takes the
        # mean over the replicas.
        shard.copy_(comm.reduce_scatter(gradient.div_(unit.shards.size), unit.shards))
        unit.session.add(unit.part(shard))
        return
    unit.session.add(unit.whole(gradient))
    if shard is not None:
        # `add` has written the means into the flat gradient, through the views.
        shard.copy_(gradient.view(-1, shard.numel())[unit.shards.rank])


def compress_fsdp(model: FullyShardedDataParallel, compressor: Reducer, scaler: Optional[Any] = None) -> ShardedSession:
    """Compress the gradients of a root FSDP module; call it before the first forward pass.

    Args:
        scaler: A gradient scaler in use: residuals are kept without its scale.

    Returns:
        The session: call its `finish()` after each backward pass, or leave it to the next forward pass.

    Raises:
        ValueError: If `model` is not the outermost FSDP module, has a communication hook already, or has units that
            divide the ranks differently.
    """
    units = [(name, unit) for name, unit in model.named_modules() if isinstance(unit, FullyShardedDataParallel)]
    if not model.check_is_root():
        raise ValueError("`model` must be the outermost FSDP module; got a module inside another; give the outer one")
    if any(fsdp1_comm_hook(unit) is not None for _, unit in units):
        raise ValueError("`model` must have no communication hook, because FSDP takes only one; got a hook; remove it")
    groups = {(unit.process_group, fsdp1_replica_group(unit)) for _, unit in units}
    if len(groups) > 1:
        raise ValueError(
            f"All FSDP units must be sharded over the same ranks; got {len(groups)} groups. Use one `device_mesh`"
        )
    [(shards, replicas)] = groups
    everyone = Group.of(shards, axis="data_parallel") if replicas is None else Group.of(axis="data_parallel")
    group = everyone if replicas is None else Group.of(replicas, axis="data_parallel")
    session = ShardedSession(compressor, group, everyone, scaler)
    # Each unit gets a separate state, because FSDP does not tell the hook the unit of a gradient.
    patches = Patches()
    session.on_close.callback(patches.undo)
    for name, unit in units:
        install_fsdp1_comm_hook(unit, _fsdp1_hook, _Fsdp1Unit(session, unit, f"{name}." if name else ""), patches)
    session.follow(model)
    return session


# ------------------------------------------------------------------------------------------------------------- FSDP2


class _Fsdp2Unit:
    """The parameters that one call of `fully_shard` communicates together, and their places in a flat gradient."""

    def __init__(
        self, session: ShardedSession, parameters: Sequence[tuple[str, FullyShardedParameter]], shards: Group
    ) -> None:
        self.session = session
        self._parameters = parameters
        self._shards = shards

    def average_replicas(self, flat: Tensor) -> None:
        """Replace this rank's shards by their mean over the replicas: the all-reduce hook of FSDP2."""
        named: dict[str, Tensor] = {}
        for name, parameter, start in self._places(flat.numel()):
            size = parameter.shard_size
            named[name] = flat[start : start + size.numel()].view(size)
        self.session.add(named)

    def average_whole(self, output: Tensor, flat: Tensor) -> None:
        """Fill `output` with this rank's shards of the mean of the full gradients in `flat`."""
        rows = flat.view(self._shards.size, -1)
        places = self._places(output.numel())
        whole = {name: _joined(rows[:, start:], parameter) for name, parameter, start in places}
        # Only shards along the first dimension are contiguous in the flattened gradient.
        shards = {name: parameter.padded_shard_size.numel() for name, parameter, _ in places if parameter.dim == 0}
        self.session.add(whole, shards)
        # A shard may be shorter than its padded place: the padding must not hold uninitialised numbers.
        output.zero_()
        for name, parameter, start in places:
            size = parameter.padded_shard_size
            dim = parameter.dim
            first = self._shards.rank * size[dim]
            mine = whole[name][(slice(None),) * dim + (slice(first, first + size[dim]),)]
            output[start : start + size.numel()].view(size).narrow(dim, 0, mine.shape[dim]).copy_(mine)

    def _places(self, numel: int) -> list[tuple[str, FullyShardedParameter, int]]:
        """Return name, parameter and first element of each gradient in a flat gradient of `numel` elements."""
        places: list[tuple[str, FullyShardedParameter, int]] = []
        end = 0
        for name, parameter in self._parameters:
            if parameter.tensor.requires_grad:
                places.append((name, parameter, end))
                end += parameter.padded_shard_size.numel()
        if end != numel:
            raise RuntimeError(
                f"All parameters of {', '.join(name for name, *_ in places)} must have gradients, {end} elements of the"
                f" shards of this rank; got {numel}, because a parameter was not used. Freeze it, or call"
                " `set_reduce_scatter_unused_params(True)` on the module"
            )
        return places


def _joined(rows: Tensor, parameter: FullyShardedParameter) -> Tensor:
    """Return a full gradient from rows (ranks, padded shard, ...), without the padding."""
    size = parameter.padded_shard_size
    shards = rows[:, : size.numel()].unflatten(1, size)
    return torch.cat(list(shards), parameter.dim).narrow(parameter.dim, 0, parameter.size[parameter.dim])


class _CompressedReduceScatter:
    """Replaces the reduce-scatter of FSDP2, with the methods of torch's protocol."""

    def __init__(self, unit: _Fsdp2Unit) -> None:
        self._unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._unit.average_whole(output_tensor, input_tensor)
        # FSDP2 asks for a sum where it divides by itself, as with `set_gradient_divide_factor`.
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())
        elif op != dist.ReduceOp.AVG:
            raise RuntimeError(
                f"FSDP2 must ask for a sum or a mean; got {op}, because of `set_gradient_divide_factor`. Call"
                " `set_force_sum_reduction_for_comms(True)` as well"
            )


def compress_fully_shard(
    model: nn.Module,
    compressor: Reducer,
    replicas: Union[dist.ProcessGroup, DeviceMesh, None] = None,
    scaler: Optional[Any] = None,
) -> ShardedSession:
    """Compress the gradients of the fully sharded modules in `model`; call it before the first forward pass.

    With `replicas`, or with tensor parallelism inside `model`, all ranks must train `model`.

    Args:
        replicas: The ranks that hold the same shards, if `fully_shard` got the shards' mesh of hybrid sharding. This
            makes their shards equal. None: compress between the ranks that shard a parameter.
        scaler: A gradient scaler in use: residuals are kept without its scale.

    Returns:
        The session: call its `finish()` after each backward pass, or leave it to the next forward pass. After a
        dropped step, some ranks may have finite gradients only.

    Raises:
        ValueError: If no module in `model` is fully sharded, or a mesh has shards and replicas. Also if the modules are
            sharded over different ranks or have a communication hook. With `replicas`, if parameters have no data yet.
        RuntimeError: If this version of torch lacks the hook.
    """
    sharded: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    groups = _groups_by_module(model)
    shards = _check(groups, replicas)
    group = shards if replicas is None else _group_of(replicas)
    if replicas is not None and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("The parameters must have data that replicas can share; got parameters on the meta device")
    everyone = _everyone(groups, shards, replicas)
    session = ShardedSession(compressor, group, everyone, scaler, same_means=replicas is not None)
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    for name, parameters in groups.items():
        unit = _Fsdp2Unit(session, [(names[id(p.tensor)], p) for p in parameters.parameters], shards)
        _install(sharded[name], parameters, unit, replicas is not None)
    for name, module in sharded.items():
        # Only the outermost modules: inner modules are also called in the middle of a forward pass.
        inside = any(name.startswith(f"{other}." if other else "") for other in sharded if other != name)
        if not inside:
            session.follow(module)
    if replicas is not None:
        _make_equal(model, group)
    return session


def _install(module: Any, parameters: FullyShardedGroup, unit: _Fsdp2Unit, hybrid: bool) -> None:
    if hybrid:
        module.set_all_reduce_hook(unit.average_replicas)
        unit.session.on_close.callback(partial(module.set_all_reduce_hook, None))
    else:
        before = parameters.reduce_scatter
        module.set_custom_reduce_scatter(_CompressedReduceScatter(unit))
        # FSDP2 keeps the object until it is replaced, so closing restores the former object.
        unit.session.on_close.callback(partial(module.set_custom_reduce_scatter, before))


def shard_ranks(model: nn.Module) -> Optional[tuple[int, ...]]:
    """Return the ranks that shard the parameters of the first fully sharded module; None without such a module."""
    groups = _groups_by_module(model)
    return _shards(next(iter(groups.values()))).ranks if groups else None


def _groups_by_module(model: nn.Module) -> dict[str, FullyShardedGroup]:
    """Return the groups of parameters that `fully_shard` communicates together, by the name of their module."""
    found: dict[str, FullyShardedGroup] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            # `fully_shard([a, b])` gives both modules the same group.
            found.update((name, group) for group in fully_sharded_groups(module) if group not in found.values())
    return found


def _shards(parameters: FullyShardedGroup) -> Group:
    return Group.of(parameters.shard_group, axis="data_parallel")


def _check(groups: Mapping[str, FullyShardedGroup], replicas: Any) -> Group:
    """Return the group of ranks over which all modules are sharded."""
    if not groups:
        raise ValueError("`model` must hold modules with `fully_shard` applied; got none. Call `fully_shard` first")
    hybrid = [name for name, group in groups.items() if group.replicates]
    if hybrid:
        raise ValueError(
            f"The mesh of `fully_shard` must have one dimension; got shards and replicas at {hybrid}. FSDP2 would sum"
            " over the replicas before compression. Give `fully_shard` the dimension of the shards only, and"
            " `compress_fully_shard` the dimension of the `replicas`."
        )
    needed = "set_custom_reduce_scatter" if replicas is None else "set_all_reduce_hook"
    if not hasattr(FSDPModule, needed):
        raise RuntimeError(
            f"The version of torch must have `FSDPModule.{needed}`; got {torch.__version__}. Install a newer version,"
            " or compress under DDP or FSDP1 (`CompressedDDPStrategy`, `CompressedFSDPStrategy`)"
        )
    used = [
        name
        for name, group in groups.items()
        if group.has_all_reduce_hook or isinstance(group.reduce_scatter, _CompressedReduceScatter)
    ]
    if used:
        raise ValueError(
            f"The modules must have no communication hook; got one at {used}. Close the session of that hook first"
        )
    divisions = {_shards(group).ranks for group in groups.values()}
    if len(divisions) > 1:
        raise ValueError(f"All modules must be sharded over the same ranks; got {sorted(divisions)}. Use one mesh")
    return _shards(next(iter(groups.values())))


def _everyone(groups: Mapping[str, FullyShardedGroup], shards: Group, replicas: Any) -> Group:
    """Return the ranks that must agree on whether a step is applied."""
    meshes = [parameter.tensor.device_mesh for group in groups.values() for parameter in group.parameters]
    # A mesh with a second dimension means tensor parallelism: other ranks hold other parts of a parameter.
    alone = replicas is None and all(mesh.ndim == 1 for mesh in meshes)
    return shards if alone else Group.of(axis="data_parallel")


def _group_of(replicas: Union[dist.ProcessGroup, DeviceMesh]) -> Group:
    process_group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
    return Group.of(process_group, axis="data_parallel")


@torch.no_grad()
def _make_equal(model: nn.Module, replicas: Group) -> None:
    """Copy the values of the first replica to all replicas."""
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        # Ranks with an empty shard skip it together: replicas hold equal shards.
        if local.numel():
            # The broadcast writes in place and needs contiguous memory, which a shard may lack.
            local.copy_(comm.broadcast_(local.detach().contiguous().clone(), replicas))
