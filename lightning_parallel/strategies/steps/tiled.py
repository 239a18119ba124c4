"""Lets the head with its loss, and MLPs, run in tiles of positions (`tiled="auto"`)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.lightning import tell
from lightning_parallel.compat.torch import CALLS, AroundCalls
from lightning_parallel.step_trace.record import StepTrace
from lightning_parallel.tensor.head import HeadLinear
from lightning_parallel.tensor.tile_plan import TilePlan, find_tiles
from lightning_parallel.tensor.tiled_logits import TiledHead
from lightning_parallel.tensor.tiled_modules import TiledModule, gathers_sequence, width_here

__all__ = ["plan_tiles", "tile_modules"]


def plan_tiles(module: nn.Module, records: Callable[[], Sequence[StepTrace]], world: Group) -> None:
    """Find the modules to run in tiles, once, while the module is whole; every rank must call it.

    Args:
        module: The user's module, not divided yet.
        records: Returns the records of its steps.
        world: All ranks, which must find the same modules.
    """
    state = ParallelState.of(module)
    if state.tiles is None:
        with comm.failing_together(world):
            found = find_tiles(next(iter(records()), None))
        comm.agree("the modules in tiles", vars(found), world)
        state.tiles = found


def tile_modules(module: nn.Module, is_on: bool) -> None:
    """Run the modules of the plan in tiles from now on, and no others.

    Args:
        module: The module, divided.
        is_on: Whether the run uses tiles at all.
    """
    for child in module.modules():
        around = vars(child).get(CALLS)
        if isinstance(around, AroundCalls) and isinstance(around.around, (TiledHead, TiledModule)):
            vars(child)[CALLS] = around.compiled
        if isinstance(child, HeadLinear):
            child.in_tiles = False
    plan: TilePlan | None = ParallelState.of(module).tiles
    if not is_on or plan is None:
        return
    for path in plan.heads:
        layer = module.get_submodule(path)
        if isinstance(layer, HeadLinear):
            layer.in_tiles = True
        # A pipeline has replaced the layers of other stages.
        elif next(layer.parameters(), None) is not None:
            vars(layer)[CALLS] = AroundCalls(layer, TiledHead(layer))
    whole = dict(plan.no_mlps)
    for path, width in plan.mlps.items():
        child = module.get_submodule(path)
        if isinstance(vars(child).get(CALLS), AroundCalls):
            whole[path] = "backward computes the whole layer again"
        elif gathers_sequence(child):
            whole[path] = "its layers gather the sequence (`sequence_parallel`)"
        elif next(child.parameters(), None) is not None:
            vars(child)[CALLS] = AroundCalls(child, TiledModule(path, child, width_here(child, width)))
    _tell_tiles(plan, whole)


def _tell_tiles(plan: TilePlan, whole: Mapping[str, str]) -> None:
    """Say what runs in tiles, and why other parts do not."""
    heads = ", ".join(f"`{path}`" for path in plan.heads)
    lines = [f"{heads} and its loss run in tiles" if heads else f"no loss in tiles: {plan.no_head}"]
    tiled = [path for path in plan.mlps if path not in whole]
    if tiled:
        lines.append(f"{_counted(tiled)} {'run' if len(tiled) > 1 else 'runs'} in tiles if the sequence is long")
    for why in dict.fromkeys(whole.values()):
        lines.append(f"not {_counted([path for path in whole if whole[path] == why])}: {why}")
    if not plan.mlps and not plan.no_mlps:
        lines.append("no module inside layers has an inner tensor larger than its input and output")
    tell(f"tiled='auto': {'; '.join(lines)}.")


def _counted(paths: Sequence[str]) -> str:
    kinds = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", path) for path in paths)
    return ", ".join(f"`{kind}`" + (f" ({count} modules)" if count > 1 else "") for kind, count in kinds.items())
