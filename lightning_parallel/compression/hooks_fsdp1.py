"""Compression inside the backward pass of `FullyShardedDataParallel` (FSDP1).

    model = FullyShardedDataParallel(module, ...)
    state = compress_fsdp(model, Quantize(8))
    ...
    loss.backward()
    state.finish()      # ends the step: False if it did not count

FSDP1 hands over the gradients of one unit after another and goes on with this rank's part of their mean, so a unit is
compressed when it comes: beside backward on CUDA, where FSDP gives it a stream, and in line on CPU. Where FSDP only
shards, the mean is taken whole, parameter by parameter, as low-rank methods and top-k need it; residuals therefore are
as large as the model. Where it shards and replicates (HYBRID_SHARD), gradients are summed over the shards as they are,
and what is compressed is this rank's part, between the replicas: its whole rows under the name of their parameter, the
pieces of rows at its ends as vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any, Optional

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.reducer import Reducer
from lightning_parallel.compression.sharded import ShardedSteps, plain_name

__all__ = ["compress_fsdp", "fsdp_hook"]


class _Unit:
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


def fsdp_hook(unit: _Unit, gradient: Tensor, shard: Optional[Tensor] = None) -> None:
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
        _set_hook(unit, fsdp_hook, _Unit(steps, unit, f"{name}." if name else ""))
        steps.on_close(partial(_set_hook, unit, None, None))
    steps.follow(model)
    return steps


def _set_hook(module: Any, hook: Any, state: Any) -> None:
    module._comm_hook, module._comm_hook_state = hook, state
