"""Compression inside the backward pass of `FullyShardedDataParallel` (FSDP1).

    model = FullyShardedDataParallel(module, ...)
    state = compress_fsdp(model, Quantize(8))
    ...
    loss.backward()
    state.finish()      # ends the step: False if it did not count

FSDP1 hands over the gradients of one unit after another and goes on with this rank's part of their mean, so a unit is
compressed when it comes: beside backward on CUDA, where FSDP gives it a stream, and in line on CPU. The mean is taken
whole, parameter by parameter, as low-rank methods and top-k need it; residuals therefore are as large as the model.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_parallel.comm import Group
from lightning_parallel.compression.reducer import Reducer
from lightning_parallel.compression.transaction import Transaction

__all__ = ["FSDPState", "compress_fsdp", "fsdp_hook"]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class FSDPState:
    """The steps of `compressor` under a root FSDP module."""

    def __init__(self, compressor: Reducer, group: Group, scaler: Optional[Any] = None) -> None:
        self.compressor, self.group = compressor, group
        self._transaction = Transaction(compressor, scaler)

    @torch.no_grad()
    def reduce(self, unit: _Unit, gradient: Tensor) -> None:
        """Replace the flat gradient of a unit by its mean."""
        self._transaction.step(self.group).reduce_(unit.named(gradient))

    def finish(self) -> bool:
        """End the step that the last backward pass began; False if it did not count."""
        return self._transaction.finish()


class _Unit:
    """One FSDP module: the hook's state, as it comes with its gradient."""

    def __init__(self, state: FSDPState, module: FullyShardedDataParallel, prefix: str) -> None:
        self.state, self._module, self._prefix = state, module, prefix

    def named(self, gradient: Tensor) -> dict[str, Tensor]:
        """Views of a flat gradient (padded to equal parts) by parameter name."""
        handle: Any = self._module._handle
        flat = handle.flat_param
        views = handle._get_unflat_views(gradient[: flat._unpadded_unsharded_size.numel()])
        return {_clean(self._prefix + name): view for name, view in zip(flat._fqns, views)}


def fsdp_hook(unit: _Unit, gradient: Tensor, shard: Optional[Tensor] = None) -> None:
    """A communication hook of `FullyShardedDataParallel`, with a state made by `compress_fsdp`."""
    unit.state.reduce(unit, gradient)
    if shard is not None:
        shard.copy_(gradient.view(-1, shard.numel())[unit.state.group.rank])


def compress_fsdp(model: FullyShardedDataParallel, compressor: Reducer, scaler: Optional[Any] = None) -> FSDPState:
    """Compress the gradients of a root FSDP module, before its first forward pass.

    Args:
        scaler: A gradient scaler in use: residuals are kept without its scale.

    Raises:
        ValueError: If `model` shards and replicates: FSDP1 has no hook there.
    """
    units = [(name, unit) for name, unit in model.named_modules() if isinstance(unit, FullyShardedDataParallel)]
    hybrid = [name for name, unit in units if "HYBRID" in unit.sharding_strategy.name]
    if hybrid:
        raise ValueError(
            "FSDP1 has no communication hook where it shards and replicates (HYBRID_SHARD), found "
            f"{', '.join(repr(name) for name in hybrid)}; use `fully_shard` over the shards and `compress_fully_shard` "
            "for the replicas"
        )
    state = FSDPState(compressor, Group.of(model.process_group, axis="data_parallel"), scaler)
    model.register_comm_hook(state, fsdp_hook)
    for name, unit in units:
        unit._comm_hook_state = _Unit(state, unit, f"{name}." if name else "")
    return state


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
