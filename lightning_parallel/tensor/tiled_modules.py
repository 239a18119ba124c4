"""Modules that run in tiles of positions: an MLP whose inner features never exist for all positions.

    forward    for each tile:  run the module, keep nothing
    backward   for each tile:  run the module again, and differentiate it

A tile is a part of the positions of all samples. The gradients of parameters are summed over the tiles, and autograd
gets each sum once, so hooks of parameters run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lightning_parallel.comm.kept import kept
from lightning_parallel.compat.lightning import tell
from lightning_parallel.compat.torch import (
    DisableTorchFunctionSubclass,
    forward_hooks_of,
    gather_absent,
    gradients_here,
    parameters_of,
)
from lightning_parallel.tensor.context import Positions
from lightning_parallel.tensor.layers import ColumnLinear, RowLinear
from lightning_parallel.tensor.pieces import Piece, piece_with
from lightning_parallel.tensor.tiles import Tiling, tiling_of, wide_zeros

__all__ = ["TiledModule", "gathers_sequence", "width_here"]

Run = Callable[[Tensor], Tensor]

_FEW = 16
"""Positions of the trial that compares a module with its tiles."""

_ROUNDINGS = 100


class TiledModule:
    """Runs the calls of a module in tiles of positions, where that saves memory; see `AroundCalls`.

    Args:
        name: Name of the module.
        module: The module, which takes one tensor (samples, positions, features) and returns another.
        width: Features of its largest inner tensor, of this rank.
    """

    def __init__(self, name: str, module: nn.Module, width: int) -> None:
        self._name = name
        self._module = module
        self._width = width
        self._is_tried = self._is_whole = False

    def __call__(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(x, Piece) and isinstance(x.family, Positions) and x.dim() == 3 and x.place < 2:
            part = x.valid_part
            if type(part) is Tensor and self._is_long(part):
                # Each position by itself, so the module needs no other rank.
                return piece_with(self(run, (part,), {}), x.place, x.family)
        # Without gradients, no inner tensor is kept; placeholders and pieces have their own ways.
        if type(x) is not Tensor or x.is_meta or x.dim() != 3 or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        tiling = self.tiling(x)
        parameters = [value for value in self._module.parameters() if value.requires_grad]
        dim = 1 if x.shape[1] >= x.shape[0] else 0
        if tiling.count == 1 or not (x.requires_grad or parameters) or self._must_be_whole(run, x, dim):
            return run(*args, **kwargs)
        gather_absent(parameters)
        length = max(1, tiling.rows * x.shape[dim] // (x.shape[0] * x.shape[1]))
        return _Tiles.apply(self._module, run, dim, length, x, *parameters)

    def _is_long(self, x: Tensor) -> bool:
        return torch.is_grad_enabled() and 0 not in x.shape and self.tiling(x).count > 1

    def _must_be_whole(self, run: Run, x: Tensor, dim: int) -> bool:
        """Return whether tiles would give another result, or hooks would see tiles."""
        hooks = (
            hook for child in self._module.modules() for found in forward_hooks_of(child) for hook in found.values()
        )
        # The hooks of this package open and close a region, which a tile does as well.
        if any(getattr(hook, "__module__", "").partition(".")[0] != __package__.partition(".")[0] for hook in hooks):
            return True
        if not self._is_tried:
            # The record does not show whether code adds, for example, a position to each of its inputs.
            self._is_tried = True
            few = x.detach().narrow(dim, 0, min(x.shape[dim], _FEW)).narrow(1 - dim, 0, 1).contiguous()
            with torch.no_grad():
                whole = run(few)
                try:
                    tiles = torch.cat([run(part) for part in _parts(few, (few.shape[dim] + 1) // 2, dim)], dim)
                except Exception:  # any error of the user's code
                    tiles = None
            # Kernels for other sizes may round differently.
            limit = _ROUNDINGS * torch.finfo(whole.dtype).eps * whole.abs().max()
            is_equal = tiles is not None and whole.shape == tiles.shape and bool((whole - tiles).abs().max() <= limit)
            self._is_whole = not is_equal
            if self._is_whole:
                tell(f"tiled='auto' does not run `{self._name}` in tiles: its results depend on the position.")
        return self._is_whole

    def tiling(self, x: Tensor) -> Tiling:
        """Return the tiles for an input (samples, positions, features)."""
        return tiling_of(x.shape[0] * x.shape[1], x.shape[2], self._width, x.element_size())


def gathers_sequence(module: nn.Module) -> bool:
    """Return whether layers of a module gather hidden states that are sharded along the sequence."""
    return any(isinstance(each, RowLinear) and each.lengths is not None for each in module.modules())


def width_here(module: nn.Module, width: int) -> int:
    """Return the features of the largest inner tensor on this rank: a sharded layer makes some of them.

    Args:
        module: The module, divided.
        width: The features on all ranks.
    """
    shards = [child for child in module.modules() if isinstance(child, ColumnLinear) and not child.gather_output]
    full = {child.feature_rule.full_size: max(child.feature_rule.sizes) for child in shards}
    return full.get(width, width)


class _Tiles(Function):
    """The input and the parameters of a module -> its output, of one tile after the other."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, run: Run, dim: int, length: int, x: Tensor, *parameters: Tensor) -> Tensor:
        kind = x.device.type
        ctx.module, ctx.run, ctx.dim, ctx.length = module, run, dim, length
        # The parameters themselves: hooks may give saved tensors back as other objects.
        ctx.parameters = parameters
        ctx.autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(x)

        def compute() -> Tensor:
            parts = map(run, _parts(x.detach(), length, dim))
            return _joined(parts, x.shape[dim], dim)

        # A layer that keeps its products keeps this output instead of those inside.
        return kept(compute)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,), parameters = ctx.saved_tensors, ctx.parameters
        around: Callable[[], AbstractContextManager[Any]] = ctx.autocast
        wanted = ctx.needs_input_grad[4:]
        gather_absent(parameters)
        if torch.is_grad_enabled():  # with `create_graph=True`, whose graph needs the inner tensors
            aliases = [value.view_as(value) if needed else value for value, needed in zip((x, *parameters), wanted)]
            with around(), _parameters_replaced(ctx.module, parameters, aliases[1:]):
                result = ctx.run(aliases[0])
            of = [value for value, needed in zip(aliases, wanted) if needed]
            found = iter(gradients_here(result, of, grad, create_graph=True))
            return (None, None, None, None, *(next(found) if needed else None for needed in wanted))
        of_x = torch.empty_like(x) if wanted[0] else None
        sums: list[Tensor | None] = [None] * len(parameters)
        with DisableTorchFunctionSubclass():  # in a step, sharded parameters read as full ones
            aliases = [value.detach().requires_grad_(needed) for value, needed in zip(parameters, wanted[1:])]
        first = 0
        for part, own in zip(x.split(ctx.length, ctx.dim), grad.split(ctx.length, ctx.dim)):
            tile = part.contiguous().detach().requires_grad_(wanted[0])
            with torch.enable_grad(), around(), _parameters_replaced(ctx.module, parameters, aliases):
                result = ctx.run(tile)
            of = [value for value, needed in zip((tile, *aliases), wanted) if needed]
            found = iter(gradients_here(result, of, own))
            if of_x is not None:
                of_tile = next(found)
                into = of_x.narrow(ctx.dim, first, part.shape[ctx.dim])
                into.zero_() if of_tile is None else into.copy_(of_tile)
            for index, needed in enumerate(wanted[1:]):
                new = next(found) if needed else None
                if new is not None:
                    sums[index] = _added(sums[index], new)
            first += part.shape[ctx.dim]
        totals = (None if total is None else total.to(value.dtype) for total, value in zip(sums, parameters))
        return (None, None, None, None, of_x, *totals)


@contextmanager
def _parameters_replaced(module: nn.Module, parameters: Sequence[Tensor], aliases: Sequence[Tensor]) -> Iterator[None]:
    """Let a module compute with other tensors inside the block: hooks of parameters would run for each tile."""
    others = dict(zip(map(id, parameters), aliases))
    places: list[tuple[dict[str, Any], str, Any]] = [
        (own, name, value)
        for child in module.modules()
        for own in (parameters_of(child),)
        for name, value in own.items()
        if id(value) in others
    ]
    for own, name, value in places:
        own[name] = others[id(value)]
    try:
        yield
    finally:
        for own, name, value in places:
            own[name] = value


def _parts(x: Tensor, length: int, dim: int) -> Iterator[Tensor]:
    """Yield the tiles of a tensor, each in memory as the tensor itself is: code may take views."""
    return (part.contiguous() for part in x.split(length, dim))


def _added(total: Tensor | None, new: Tensor) -> Tensor:
    if total is None:
        total = wide_zeros(new)
    return total.add_(new)


def _joined(parts: Any, length: int, dim: int) -> Tensor:
    """Join the outputs of tiles, which are written into their places one after the other."""
    found: Tensor | None = None
    first = 0
    for part in parts:
        if found is None:
            sizes = list(part.shape)
            sizes[dim] = length
            found = part.new_empty(sizes)
        found.narrow(dim, first, part.shape[dim]).copy_(part)
        first += part.shape[dim]
    assert found is not None
    return found
