"""Splits sequences over the context axis: finds the blocks, and the dimension of positions, by a trial of the step.

The trial records the user's own step once more without data. In it, the inputs of blocks are split for two ranks, along
the first or the second dimension. The right dimension is that along which attention joins positions.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from rich import box
from rich.table import Table
from torch import nn

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import ParallelState, Patches, hook_before
from lightning_parallel.compat.torch import backward_hooks_of, global_backward_hooks
from lightning_parallel.pipeline.layer_stack import repeated_entries
from lightning_parallel.step_trace.record import StepTrace
from lightning_parallel.strategies.options import ContextOptions
from lightning_parallel.strategies.ranks.order import MessageOrder
from lightning_parallel.strategies.setup.tables import print_table
from lightning_parallel.tensor.context import AttentionNote, PositionSplit, split_input
from lightning_parallel.tensor.context_methods import ulysses_reason
from lightning_parallel.tensor.pieces import GATHERS
from lightning_parallel.tensor.plan_table import merge_names

__all__ = [
    "SequencePlan",
    "plan_sequences",
    "refuse_backward_hooks",
    "refuse_gradients_in_steps",
    "sequence_table",
    "split_sequences",
]

_MOST_LINES = 6
_DIMS = (1, 0)  # hidden states (batch, positions, features), or positions first


@dataclass
class _SplitTrial:
    """The results of a trial.

    Attributes:
        dim: The dimension along which inputs of blocks were split.
        notes: The attention that was computed on split sequences.
        gathers: How often each line gathered a tensor.
        error: Why the step was not followed to its end; None if it was.
    """

    dim: int
    notes: list[AttentionNote]
    gathers: Counter[str]
    error: Exception | None


class SequencePlan(NamedTuple):
    """The blocks whose inputs are split.

    Attributes:
        dims: The dimension of positions in the input of each block, by its path.
        is_causal: Whether all attention is causal without a mask.
        by_products: The blocks that compute scores by products.
        gathers: How often each line gathers full sequences in the recorded steps.
    """

    dims: dict[str, int]
    is_causal: bool
    by_products: frozenset[str] = frozenset()
    gathers: Mapping[str, int] = {}


def plan_sequences(
    module: LightningModule, options: ContextOptions, groups: MeshGroups, records: Callable[[], list[StepTrace]]
) -> SequencePlan | None:
    """Find the blocks whose inputs the context axis splits along positions; None without such an axis.

    Args:
        module: The user's module, before its layers are sharded.
        options: The strategy's arguments.
        groups: The mesh's groups.
        records: Records the steps of the run anew.

    Raises:
        ValueError: On every rank, if no block computes attention over positions, or its heads do not suffice for
            `ulysses`.
    """
    if groups.context_parallel.size == 1 or ParallelState.of(module).positions is not None:
        return None
    with comm.failing_together(groups.world):
        blocks = {path: layer for layers in repeated_entries(module).values() for path, layer in layers}
        trials = _trials(blocks, records)
        if not any(trial.notes for trial in trials):
            # Blocks may be attributes, or one layer may be called several times.
            blocks = {path: child for path, child in module.named_modules() if path and _has_children(child)}
            trials = _trials(blocks, records, is_named=False)
        found = _blocks_of(module, trials)
        if options.method == "ulysses":
            _refuse_few_heads(found, groups)
    dims = {path: dim for path, (dim, _) in found.items()}
    comm.agree("the blocks with split sequences", dims, groups.world)
    # Replicas see other masks.
    is_causal = all(note.is_causal for _, notes in found.values() for note in notes)
    products = frozenset(path for path, (_, notes) in found.items() if not all(note.heads for note in notes))
    gathers = sum((trial.gathers for trial in trials if trial.dim in dims.values()), Counter[str]())
    return SequencePlan(dims, all(comm.all_gather_object(is_causal, groups.world)), products, gathers)


def _refuse_few_heads(found: Mapping[str, tuple[int, list[AttentionNote]]], groups: MeshGroups) -> None:
    tensor, ranks = groups.tensor_parallel.size, groups.context_parallel.size
    for path, (_, notes) in found.items():
        for note in notes:
            # The tensor axis shards heads as well.
            heads, kv_heads = note.heads // tensor, max(1, note.kv_heads // tensor)
            reason = ulysses_reason(heads, kv_heads, ranks) if note.heads else None
            if reason is not None:
                raise ValueError(
                    f"context_parallel_method='ulysses' cannot split `{path}`: {reason}. Use 'ring', 'gather' or"
                    " 'auto', or a smaller `context_parallel_size`"
                )


def split_sequences(
    module: LightningModule, plan: SequencePlan | None, options: ContextOptions, groups: MeshGroups
) -> None:
    """Split hidden states along positions over the context axis, in every step from now on.

    Args:
        module: The user's module.
        plan: The blocks; None without a context axis, or if an earlier run has found them.
        options: The strategy's arguments.
        groups: The mesh's groups.
    """
    group, state = groups.context_parallel, ParallelState.of(module)
    if plan is None and state.positions is None:
        return
    # Each axis checks its own order of calls: all ranks of the tensor axis may call the model, and some ranks of this
    # axis not.
    state.position_order = order = MessageOrder(group) if group.size > 1 else None
    group = group if order is None else group.guarded_by(order)
    if state.positions is not None:
        # The hooks of an earlier run stay. Its parameters are replicated, so the size of the axis may change.
        state.positions.group, state.positions.method = group, options.method
    if plan is None:
        return
    state.positions = split = PositionSplit(group, options.method, plan.is_causal)
    for path, dim in plan.dims.items():
        hook_before(module.get_submodule(path), partial(_enter, state, split, path, dim), with_kwargs=True)
    print_table(sequence_table(module, plan, split))


def sequence_table(module: nn.Module, plan: SequencePlan, split: PositionSplit) -> Table:
    """Return the table of split sequences: a row for each kind of block, and the lines that gather below.

    Args:
        module: The user's module.
        plan: The blocks.
        split: How their sequences are split.
    """
    rows: dict[tuple[str, int, str], list[str]] = {}
    for path, dim in plan.dims.items():
        method: str = "by fewest bytes, in each call" if split.method == "auto" else split.method
        method = "gather, by products" if path in plan.by_products else method
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path)
        rows.setdefault((pattern, dim, method), []).append(path)
    order = "one run of positions from each end" if split.is_balanced else "consecutive positions"
    lines = [f"Each rank holds {order}."]
    if plan.gathers:
        lines.append("Lines that gather full sequences, with their number in the recorded steps:")
        most = Counter(plan.gathers).most_common()
        lines += [f"  {line}: {count}" for line, count in most[:_MOST_LINES]]
        lines += [f"  and {len(most) - _MOST_LINES} more"] if len(most) > _MOST_LINES else []
    title = f"Sequences of {type(module).__name__} over {split.group.size} context-parallel ranks"
    table = Table(title=title, caption="\n".join(lines), box=box.SIMPLE_HEAD)
    table.title_justify = table.caption_justify = "left"
    for header in ("blocks", "positions", "attention"):
        table.add_column(header, overflow="fold")
    for (_, dim, method), paths in rows.items():
        table.add_row(merge_names(paths), f"dimension {dim}", method)
    return table


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _trials(
    blocks: Mapping[str, nn.Module], records: Callable[[], list[StepTrace]], is_named: bool = True
) -> list[_SplitTrial]:
    found = []
    for dim in _DIMS:
        split = PositionSplit(Group.pretended("context_parallel", 2), "gather", notes=[])

        def enter(module: nn.Module, args: Any, kwargs: Any, path: str, dim: int = dim, split: Any = split) -> Any:
            return split_input(split, path, dim, (args, kwargs), is_named)

        handles = [
            block.register_forward_pre_hook(partial(enter, path=path), with_kwargs=True)
            for path, block in blocks.items()
        ]
        before = Counter(GATHERS)
        try:
            traces = records()
        finally:
            for handle in handles:
                handle.remove()
        assert split.notes is not None
        found.append(_SplitTrial(dim, split.notes, GATHERS - before, traces[0].error if traces else None))
        GATHERS.clear()
        GATHERS.update(before)
    return found


def _blocks_of(module: nn.Module, trials: list[_SplitTrial]) -> dict[str, tuple[int, list[AttentionNote]]]:
    """Return the dimension of positions, and the attention, of each block that joins positions.

    Raises:
        ValueError: If there is none.
    """
    found: dict[str, tuple[int, list[AttentionNote]]] = {}
    for trial in trials:
        for path in dict.fromkeys(note.block for note in trial.notes):
            notes = [note for note in trial.notes if note.block == path]
            found.setdefault(path, (trial.dim, notes))
    if found:
        return found
    errors = {str(trial.error) for trial in trials if trial.error is not None}
    why = f" The step could not be followed: {'; '.join(sorted(errors))}." if errors else ""
    raise ValueError(
        f"Sequences of `{type(module).__name__}` cannot be split: no module computes attention over"
        f" positions of its input (batch, positions, features).{why} Does the first batch have one position only? Set"
        " `context_parallel_size=1`"
    )


def refuse_backward_hooks(module: nn.Module) -> None:
    """Refuse hooks for gradients of modules, which would see a share of each gradient.

    Raises:
        ValueError: If a module has one.
    """
    # Each step asks, and names take longer.
    if not any(global_backward_hooks()) and not any(any(backward_hooks_of(child)) for child in module.modules()):
        return
    named = ((path or type(child).__name__, child) for path, child in module.named_modules())
    hooked = (f"`{name}`" for name, child in named if any(backward_hooks_of(child)))
    raise ValueError(
        "With a context axis, modules must have no backward hooks (`register_full_backward_hook`); got one of"
        f" {next(hooked, 'all modules')}. Each rank has a share of the gradients there. Use hooks of parameters,"
        " or `context_parallel_size=1`"
    )


def refuse_gradients_in_steps(state: ParallelState, patches: Patches) -> None:
    """Refuse `torch.autograd.grad` in steps, which would return a share of a gradient, until `patches` are undone."""
    original = torch.autograd.grad

    @wraps(original)
    def grad(*args: Any, **kwargs: Any) -> Any:
        split = state.positions
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        is_users = caller not in ("torch", "lightning_parallel")
        if is_users and state.is_in_step and not state.is_alone and split is not None and split.group.size > 1:
            raise RuntimeError(
                "With a context axis, a step must not call `torch.autograd.grad`: each rank would get a share of the"
                " gradient. Use `context_parallel_size=1`, or differentiate a model outside the step"
            )
        return original(*args, **kwargs)

    patches.replace(torch.autograd, "grad", grad)


def _enter(
    state: ParallelState, split: PositionSplit, path: str, dim: int, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    if split.group.size == 1 or state.is_alone or comm.skips_communication():
        return None
    return split_input(split, path, dim, (args, kwargs))
