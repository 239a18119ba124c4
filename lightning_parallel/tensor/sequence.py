"""Sequence parallelism: between divided layers, each rank holds a part of the sequence instead of all of it.

    hidden | first: keep my part | norm | Column: all-gather ... Row: reduce-scatter | last: all-gather | hidden
    (L, E) | (L / ranks, E)             | (L, E / ranks)                              | (L / ranks, E)   | (L, E)

An all-gather and a reduce-scatter send as many bytes as the all-reduce that they replace, and the activations between
the layers take 1 / ranks of the memory. Each rank computes norms and biases there for its positions only, so their
gradients are partial.

The blocks must take all lengths from the outputs of their projections, not from their input.

Legend: L sequence length, E features.

Source: Korthikanti et al., https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.tensor.autograd import gather_from_group, scatter_to_group
from lightning_parallel.tensor.layers import Column, Replicate, Row, Style
from lightning_parallel.tensor.linear import SequenceLengths, shared_inputs
from lightning_parallel.tensor.random import RandomRegion

__all__ = ["divide_sequence", "sequence_parallel_styles"]


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
    for path, module in block.named_modules():
        # Norms and other layers see this rank's positions only.
        if any(True for _ in module.parameters(recurse=False)) and not isinstance(result.get(path), (Column, Row)):
            result[path] = Replicate(partial_gradient=True)
    return result


def divide_sequence(owner: nn.Module, first: nn.Module, last: nn.Module, group: Group, dim: int = 1) -> None:
    """Divide the sequence from the input of `first` to the output of `last`, two modules inside `owner`.

    The tensor that is divided is the first positional argument of `first`; the one that is gathered is the output of
    `last` or its first element. Random numbers in between differ between the ranks.
    """
    lengths: SequenceLengths = shared_inputs(group, dim).lengths  # type: ignore[assignment]
    region = RandomRegion(group)

    def scatter_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = scatter_to_group(args[0], group, dim, lengths.divide(args[0].shape[dim]))
        if module.training:  # dropout between the layers draws for different positions on each rank
            region.open(hidden.device)
        return (hidden, *args[1:])

    def gather_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        region.close()
        hidden = output if isinstance(output, Tensor) else output[0]
        hidden = gather_from_group(hidden, group, dim, lengths.parts(hidden.shape[dim]))
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    first.register_forward_pre_hook(scatter_input)
    last.register_forward_hook(gather_output)
    # The blocks may be left by an exception, before `last` closes the region.
    owner.register_forward_hook(lambda *_: region.close(), always_call=True)
