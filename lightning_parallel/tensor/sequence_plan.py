"""Sequence parallelism of a plan: stacks of blocks between which activations are divided along the sequence.

    rank 0   positions 0..3    norm   gather -> column ... row -> reduce-scatter    dropout   norm   ...
    rank 1   positions 4..7

What is between the divided layers, norms and dropout, takes each position by itself: a rank computes its own positions,
and the gradients of the parameters there are sums over the ranks. A stack is divided as a whole or not at all.

Source: https://arxiv.org/abs/2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from lightning_parallel.tensor.layers import Column, Replicate, Row, Style
from lightning_parallel.tensor.plan import Plan
from lightning_parallel.tensor.verify import PlanVerifier

__all__ = ["divide_sequences", "sequence_parallel_styles"]


def divide_sequences(module: nn.Module, plan: Plan, verifier: PlanVerifier) -> None:
    """Divide the sequence along the stacks of blocks whose results this does not change."""
    modules = dict(module.named_modules())
    for path, stack in modules.items():
        if not isinstance(stack, (nn.ModuleList, nn.Sequential)) or len(stack) == 0 or not path:
            continue
        blocks = [f"{path}.{name}" for name, _ in stack.named_children()]
        # All blocks of a stack or none: the sequence is divided before the first and gathered after the last.
        divided = [_sequence_plan(modules[block], plan.under(block), verifier) for block in blocks]
        accepted = [part for part in divided if part is not None]
        if len(accepted) == len(blocks):
            for block, part in zip(blocks, accepted):
                plan.add(block, part)
            plan.sequence_regions.append((path.rpartition(".")[0], blocks[0], blocks[-1]))
    if not plan.sequence_regions:
        raise ValueError(
            f"`sequence_parallel=True` finds no stack of blocks in `{type(module).__name__}` whose activations can be"
            " divided along the sequence (dimension 1): blocks must take one tensor (batch, sequence, features), and"
            " lengths from their projections, not from the input. Use `sequence_parallel=False`."
        )


def _sequence_plan(block: nn.Module, inside: Plan, verifier: PlanVerifier) -> Plan | None:
    if not any(isinstance(style, Column) for style in inside.styles.values()):
        return None
    try:
        styles = sequence_parallel_styles(block, inside.styles)
    except ValueError:
        return None
    return verifier.first_verified(block, inside, [Plan(styles, sequence_regions=[("", "", "")])])


def sequence_parallel_styles(block: nn.Module, styles: Mapping[str, Style], dim: int = 1) -> dict[str, Style]:
    """Return the styles of a `block` whose input and output are divided along the sequence.

    Args:
        block: The full module.
        styles: The styles of its layers without sequence parallelism, by path inside it.
        dim: Dimension of the sequence.

    Returns:
        The same styles with sequence parallelism, and partial gradients for all other parameters of the block.

    Raises:
        ValueError: If a style cannot be combined with sequence parallelism.
    """
    result: dict[str, Style] = {}
    for path, style in styles.items():
        gathered = isinstance(style, Column) and style.gather_output
        split = isinstance(style, Row) and style.split_input
        if gathered or split or not isinstance(style, (Column, Row, Replicate)):
            raise ValueError(f"`{path}` cannot be sequence-parallel with {style}; use `Column()` and `Row()` in pairs")
        result[path] = style if isinstance(style, Replicate) else replace(style, sequence_dim=dim)
    divided = tuple(f"{path}." for path, style in styles.items() if isinstance(style, (Column, Row)))
    for path, module in block.named_modules():
        # Norms and other layers see this rank's positions only.
        if any(True for _ in module.parameters(recurse=False)) and not f"{path}.".startswith(divided):
            result[path] = Replicate(partial_gradient=True)
    return result
