"""Steps of a compressor where ranks hold different pieces of a model: what FSDP1 and FSDP2 have in common.

The gradients of a piece are averaged over one group of ranks; other groups hold other pieces. A step counts only if it
does for all of them, and a checkpoint holds one state for each piece:

    {"layout": "pieces", "step": int, "pieces": [state of `gather_state()`, ...]}

where there is more than one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.reducer import Reducer, ReductionStep
from lightning_parallel.compression.transaction import Transaction

__all__ = ["ShardedSteps", "compress_fsdp", "compress_fully_shard", "fsdp_hook", "plain_name", "shard_ranks"]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class ShardedSteps(Transaction):
    """The steps of `compressor` over `group`.

    A step begins with the first gradients of a backward pass. `finish()` ends it; otherwise the next forward pass of
    the module given to `follow` does, or another gradient of the same parameter.

    Args:
        group: The ranks that hold the same piece of the model, or all of it.
        everyone: All ranks of the model.
        scaler: A gradient scaler in use: residuals are kept without its scale.
        alike: Whether all ranks of `group` receive the same means, and so know by themselves whether a step counts.
    """

    def __init__(
        self, compressor: Reducer, group: Group, everyone: Group, scaler: Optional[Any] = None, alike: bool = True
    ) -> None:
        super().__init__(compressor, scaler)
        self.group, self.everyone = group, everyone
        self._alike = alike and group.size == everyone.size
        self._device = torch.device("cpu")
        self._reduced: set[str] = set()
        self._earlier = True
        self._undo: list[Callable[[], None]] = []

    def follow(self, module: nn.Module) -> None:
        """End a step with the next forward pass of `module`, where nobody has called `finish`."""

        def finish(*_: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # not where backward computes activations once more
                self.finish()

        self.on_close(module.register_forward_pre_hook(finish).remove)

    def on_close(self, undo: Callable[[], None]) -> None:
        """Have `close` call `undo`."""
        self._undo.append(undo)

    @torch.no_grad()
    def reduce(self, named: Mapping[str, Tensor], shards: Optional[Mapping[str, int]] = None) -> None:
        """Replace some of the gradients by their mean, in place; see `ReductionStep.reduce_`."""
        if not self._reduced.isdisjoint(named):  # another backward pass, or a module that was used twice
            self._earlier &= self._end()
        self._reduced.update(named)
        self._device = next((gradient.device for gradient in named.values()), self._device)
        self.step(self.group).reduce_(named, shards)

    @override
    def finish(self) -> bool:
        """End the step of the last backward pass; False if a step since the last call did not count, on all ranks."""
        self.counted = self._end() and self._earlier
        self._earlier = True
        return self.counted

    def _end(self) -> bool:
        self._reduced.clear()
        if self._step is not None and not self._alike and not self._agreed(self._step):
            self.abandon()
            self.counted = False
        return super().finish()

    def _agreed(self, step: ReductionStep) -> bool:
        flag = torch.tensor(int(step.finite), device=self._device)
        return bool(comm.all_reduce_(flag, self.everyone, "min"))

    def close(self) -> None:
        """Leave the module as it was before."""
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------------------------------------------------- state

    def gather_state(self) -> dict[str, Any]:
        """The state of all ranks, for one checkpoint file, on the first; every rank must call it."""
        self.finish()
        state = self.compressor.gather_state(self.group)
        if self.group.size == self.everyone.size:
            return state
        pieces = comm.all_gather_object(pytree.tree_map_only(Tensor, Tensor.cpu, state), self.everyone)
        if self.everyone.rank > 0:
            return {}
        return {"layout": "pieces", "step": self.compressor.step, "pieces": [piece for piece in pieces if piece]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `gather_state()`. Where the model is cut into other pieces now, what was not sent is lost."""
        self.finish()
        firsts = sorted(set(comm.all_gather_object(self.group.ranks[0], self.everyone)))
        pieces = state["pieces"] if state.get("layout") == "pieces" else [state]
        if len(pieces) == len(firsts):
            self.compressor.load_state_dict(pieces[firsts.index(self.group.ranks[0])], self.group)
            return
        self.compressor.step = int(state["step"])
        if self.everyone.rank == 0:
            warnings.warn(
                f"The compression state is that of a model in {len(pieces)} pieces, there are {len(firsts)} now: what "
                "was not sent yet is forgotten.",
                stacklevel=2,
            )


def plain_name(name: str) -> str:
    """The name of a parameter in the module as its author wrote it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class _Fsdp1Unit:
    """One FSDP module: the hook's state, as it comes with its gradient."""

    def __init__(self, steps: ShardedSteps, module: Any, prefix: str) -> None:
        self.steps, self._module, self._prefix = steps, module, prefix
        self.shards = Group.of(module.process_group, axis="shard")
        self.replicated = "HYBRID" in module.sharding_strategy.name

    def whole(self, gradient: Tensor) -> dict[str, Tensor]:
        """Views of a flat gradient (padded to equal parts) by parameter name."""
        handle = self._module._handle
        flat = handle.flat_param
        views = handle._get_unflat_views(gradient[: flat._unpadded_unsharded_size.numel()])
        return {self._name(name): view for name, view in zip(flat._fqns, views)}

    def part(self, shard: Tensor) -> dict[str, Tensor]:
        """Views of this rank's part of the flat gradient by parameter name."""
        flat = self._module._handle.flat_param
        ends = list(accumulate(flat._numels_with_padding))
        starts = [start for start, padding in zip([0, *ends], flat._is_padding_mask) if not padding]
        here = self.shards.rank * shard.numel()
        found: dict[str, Tensor] = {}
        for name, shape, start in zip(flat._fqns, flat._shapes, starts):
            first, last = max(start, here), min(start + shape.numel(), here + shard.numel())
            if first < last:
                run = shard[first - here : last - here]
                found.update(_rows(self._name(name), run, first - start, shape[1:].numel()))
        return found

    def _name(self, name: str) -> str:
        return plain_name(self._prefix + name)


def _rows(name: str, run: Tensor, offset: int, extent: int) -> Iterator[tuple[str, Tensor]]:
    """A run of a flattened parameter, from its element `offset` on: the rows of `extent` elements, and the ends."""
    head = min(-offset % extent, len(run))
    tail = (len(run) - head) % extent
    rows = run[head : len(run) - tail]
    if len(rows):
        yield name, rows.view(-1, extent) if extent > 1 else rows
    if head:
        yield f"{name}:head", run[:head]
    if tail:
        yield f"{name}:tail", run[len(run) - tail :]


def fsdp_hook(unit: _Fsdp1Unit, gradient: Tensor, shard: Optional[Tensor] = None) -> None:
    """A communication hook of `FullyShardedDataParallel`, with a state made by `compress_fsdp`."""
    if unit.replicated:
        assert shard is not None
        shard.copy_(comm.reduce_scatter(gradient.div_(unit.shards.size), unit.shards))
        unit.steps.reduce(unit.part(shard))
        return
    unit.steps.reduce(unit.whole(gradient))
    if shard is not None:
        shard.copy_(gradient.view(-1, shard.numel())[unit.shards.rank])


def compress_fsdp(model: FullyShardedDataParallel, compressor: Reducer, scaler: Optional[Any] = None) -> ShardedSteps:
    """Compress the gradients of a root FSDP module, before its first forward pass.

    Args:
        scaler: A gradient scaler in use: residuals are kept without its scale.

    Returns:
        The steps: call their `finish()` after each backward pass, or leave it to the next forward pass.

    Raises:
        ValueError: If `model` is not the outermost FSDP module, has a communication hook already, or has units that
            divide the ranks differently.
    """
    units = [(name, unit) for name, unit in model.named_modules() if isinstance(unit, FullyShardedDataParallel)]
    if not model.check_is_root():
        raise ValueError("expected the outermost FSDP module, found one inside of another; give that one")
    if any(unit._comm_hook is not None for _, unit in units):
        raise ValueError("found a communication hook already, and FSDP has room for one")
    groups = {(unit.process_group, getattr(unit, "_inter_node_pg", None)) for _, unit in units}
    if len(groups) > 1:
        raise ValueError(
            f"expected all FSDP units to divide the ranks alike, found {len(groups)} divisions; use one `device_mesh`"
        )
    [(shards, replicas)] = groups
    everyone = Group.of(shards, axis="data_parallel") if replicas is None else Group.of(axis="data_parallel")
    group = everyone if replicas is None else Group.of(replicas, axis="data_parallel")
    steps = ShardedSteps(compressor, group, everyone, scaler)
    for name, unit in units:
        # `register_comm_hook` does the same, but refuses to where there are replicas.
        _set_hook(unit, fsdp_hook, _Fsdp1Unit(steps, unit, f"{name}." if name else ""))
        steps.on_close(partial(_set_hook, unit, None, None))
    steps.follow(model)
    return steps


def _set_hook(module: Any, hook: Any, state: Any) -> None:
    module._comm_hook, module._comm_hook_state = hook, state


class _Fsdp2Unit:
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


class _CompressedReduceScatter:
    """Stands in for the reduce-scatter of FSDP2."""

    def __init__(self, unit: _Fsdp2Unit) -> None:
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
        unit = _Fsdp2Unit(steps, [(names[id(p.sharded_param)], p) for p in parameters.fsdp_params], shards)
        _install(sharded[name], parameters, unit, replicas is not None)
    for name, module in sharded.items():
        if not any(name.startswith(f"{other}." if other else "") for other in sharded if other != name):
            steps.follow(module)
    if replicas is not None:
        _make_equal(model, group)
    return steps


def _install(module: Any, parameters: Any, unit: _Fsdp2Unit, hybrid: bool) -> None:
    if hybrid:
        module.set_all_reduce_hook(unit.average_replicas)
        unit.steps.on_close(partial(module.set_all_reduce_hook, None))
    else:
        before = parameters._reduce_scatter_comm
        module.set_custom_reduce_scatter(_CompressedReduceScatter(unit))
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
        or isinstance(getattr(group, "_reduce_scatter_comm", None), _CompressedReduceScatter)
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
