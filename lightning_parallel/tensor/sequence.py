"""Sequence parallelism: between its divided layers, each rank holds a part of the sequence instead of all of it.

    stream | first: keep my part | norm | Column: all-gather ... Row: reduce-scatter | last: all-gather | stream
    (L, E) | (L / ranks, E)             | (L, E / ranks)                              | (L / ranks, E)   | (L, E)

An all-gather and a reduce-scatter move as many bytes as the all-reduce that they replace, and the activations between
the layers take 1 / ranks of the memory. Each rank computes norms and biases there for its positions only, so their
gradients are partial.

The blocks must take all lengths from their projections' outputs, not from the stream that they read.

Source: Korthikanti et al., https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.tensor.collectives import gather_from_group, scatter_to_group
from lightning_parallel.tensor.conversion import shared_inputs
from lightning_parallel.tensor.layers import Column, Replicate, Row, Style
from lightning_parallel.tensor.rng import Region

__all__ = ["along_sequence", "divide_sequence"]


def along_sequence(block: nn.Module, styles: Mapping[str, Style], dim: int = 1) -> dict[str, Style]:
    """The styles of a `block` whose input and output are divided along the sequence.

    Args:
        block: The full module.
        styles: How its layers are divided otherwise, by path inside it.
        dim: Dimension of the sequence.

    Returns:
        The same styles with sequence parallelism, and partial gradients for all other parameters of the block.

    Raises:
        ValueError: If a style cannot be combined with it.
    """
    result: dict[str, Style] = {}
    for path, style in styles.items():
        whole = isinstance(style, Column) and style.gather_output or isinstance(style, Row) and style.split_input
        if whole or not isinstance(style, (Column, Row, Replicate)):
            raise ValueError(f"`{path}` cannot be sequence-parallel with {style}; use `Column()` and `Row()` in pairs")
        result[path] = style if isinstance(style, Replicate) else replace(style, sequence_dim=dim)
    for path, module in block.named_modules():
        if any(True for _ in module.parameters(recurse=False)) and not isinstance(result.get(path), (Column, Row)):
            result[path] = Replicate(partial_gradient=True)
    return result


def divide_sequence(owner: nn.Module, first: nn.Module, last: nn.Module, group: Group, dim: int = 1) -> None:
    """Divide the sequence from the input of `first` to the output of `last`, two modules inside `owner`.

    The stream is the first positional tensor of `first`, and the output of `last` or its first element. Random numbers
    in between differ between the ranks.
    """
    lengths = shared_inputs(group, dim).lengths
    assert lengths is not None
    region = Region(group)

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        stream = scatter_to_group(args[0], group, dim, lengths.divide(args[0].shape[dim]))
        if module.training:
            region.open(stream.device)
        return (stream, *args[1:])

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        region.close()
        stream = output if isinstance(output, Tensor) else output[0]
        stream = gather_from_group(stream, group, dim, lengths.parts(stream.shape[dim]))
        return stream if isinstance(output, Tensor) else (stream, *output[1:])

    first.register_forward_pre_hook(enter)
    last.register_forward_hook(leave)
    owner.register_forward_hook(lambda *_: region.close(), always_call=True)
