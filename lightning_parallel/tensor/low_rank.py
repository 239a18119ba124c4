"""Linear layers with low-rank terms, such as LoRA: recognised by their computation, and sharded like one layer.

    y = x W^T + b + s (x A^T) B^T        W (out, in), A (rank, in), B (out, rank)

    column     W, B by output features     A replicated: the input gradient of B is summed over the ranks
    row        W, A by input features      B replicated: its input is the sum over the ranks of x A^T

A run with layers of a few features shows whether a module computes this, because its code does not depend on sizes. A
module that reads a weight, or has more parameters than these (DoRA), computes something else.

Source: https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.tensor.inspection import full_shape, is_linear, is_transposed, sizes_of
from lightning_parallel.tensor.regions import RandomRegion

__all__ = ["LowRank", "LowRankLinear", "layer_sizes", "linear_layers", "low_rank_of"]

WIDTHS = (6, 5)  # of the input and output of the copy that is tried
MOST_TERMS = 16


@dataclass(frozen=True)
class LowRank:
    """A linear layer with low-rank terms.

    Attributes:
        base: Path of the full linear layer inside the module.
        first: Paths of the layers A.
        second: Paths of the layers B, in the same order.
    """

    base: str
    first: tuple[str, ...]
    second: tuple[str, ...]


def low_rank_of(module: nn.Module) -> LowRank | None:
    """Return the layers of a module that is a linear layer with low-rank terms; None for any other module."""
    if is_linear(module):
        return None
    layers: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        if name and is_linear(child):
            layers[name] = child
            if len(layers) > 1 + 2 * MOST_TERMS:
                return None
    terms = (len(layers) - 1) // 2
    # A further parameter would be a further term, such as the magnitude of DoRA.
    if terms < 1 or len(layers) != 1 + 2 * terms or len([*module.parameters()]) != _count(layers):
        return None
    names = [*layers]
    found = LowRank(names[0], tuple(names[1 : 1 + terms]), tuple(names[1 + terms :]))
    width, out = layer_sizes(layers[found.base])
    for first, second in zip(found.first, found.second):
        (a_in, a_rank), (b_rank, b_out) = layer_sizes(layers[first]), layer_sizes(layers[second])
        plain = all(layers[name].bias is None for name in (first, second))
        if not plain or (a_in, b_out) != (width, out) or a_rank != b_rank:
            return None
    key = (names, repr([item for item in vars(module).items() if isinstance(item[1], _PLAIN)]))
    known = _KNOWN.get(id(module))
    # Keyed by `id`, because the hash of some modules changes.
    if known is None or known[0]() is not module or known[1] != key:
        known = _KNOWN[id(module)] = (weakref.ref(module), key, _computes_low_rank(module, found, layers))
    return found if known[2] else None


_PLAIN = (bool, int, float, str, list, tuple)
_KNOWN: dict[int, tuple[weakref.ref[nn.Module], object, bool]] = {}


def _count(layers: dict[str, nn.Module]) -> int:
    return sum(len([*layer.parameters(recurse=False)]) for layer in layers.values())


def layer_sizes(module: nn.Module) -> tuple[int, int]:
    """Return the (in, out) features of a full linear layer, with or without low-rank terms."""
    if not is_linear(module):
        found = low_rank_of(module)
        assert found is not None
        module = module.get_submodule(found.base)
    if full_shape(module.weight) == module.weight.shape:  # type: ignore[arg-type]
        return sizes_of(module)
    shape = full_shape(module.weight)  # type: ignore[arg-type]
    return (shape[0], shape[1]) if is_transposed(module) else (shape[1], shape[0])


def linear_layers(root: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers in `root` by path; a layer with low-rank terms counts as one."""
    return dict(_outermost(root, "", set()))


def _outermost(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if is_linear(module) or low_rank_of(module) is not None:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}" if path else name, seen)


# ---------------------------------------------------------------------------------------------------------- recognised


class _Tried(nn.Linear):
    """Linear layer of a few features; code that reads its weight finds NaN."""

    used: Tensor
    used_bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
        for own in self.parameters():
            nn.init.constant_(own, float("nan"))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.used, self.used_bias)


def _computes_low_rank(module: nn.Module, found: LowRank, layers: dict[str, nn.Module]) -> bool:
    """Return whether the module, with some outputs or inputs only, computes a part of its full result."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    width, out = WIDTHS
    weights = {found.base: draw(out, width)}
    # Each term has another rank, so code that mixes two terms fails.
    for rank, (first, second) in enumerate(zip(found.first, found.second), start=2):
        weights |= {first: draw(rank, width), second: draw(out, rank)}
    bias = None if layers[found.base].bias is None else draw(out)
    x = draw(2, 3, width)

    tried = {name: _Tried(weights[name], bias if name == found.base else None) for name in layers}

    def run(x: Tensor, rows: slice = slice(None), columns: slice = slice(None), biased: bool = True) -> Tensor:
        # Like shards: B and the base take some rows, A and the base take some columns.
        for name, layer in tried.items():
            weight = weights[name] if name in found.first else weights[name][rows]
            layer.used = weight if name in found.second else weight[:, columns]
            layer.used_bias = bias[rows] if biased and bias is not None and name == found.base else None
        y: Tensor = copied(x)
        return y

    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):  # any error of the user's code
        copied = copy.deepcopy(module, {id(layer): tried[name] for name, layer in layers.items()}).eval()
        y = run(x)
        half = slice(0, width // 2)
        rest = slice(width // 2, width)
        plain = F.linear(x, weights[found.base], bias)
        # A row-parallel layer adds its bias once, so one of the two terms leaves it out.
        summed = run(x[..., half], columns=half, biased=False) + run(x[..., rest], columns=rest)
        parts = (run(x, rows=slice(0, 2)), y[..., :2]), (summed, y)
        # `y` equals `plain` if the terms are switched off; this run then proves nothing about them.
        return not torch.allclose(y, plain) and all(torch.allclose(part, whole) for part, whole in parts)
    return False


# ------------------------------------------------------------------------------------------------------------- sharded


class LowRankLinear(nn.Module):
    """Linear layer with low-rank terms, with sharded base and terms; it draws its dropout like one layer.

    The ranks draw alike where the input is replicated, because A would get different gradients otherwise. They draw
    independently where each rank has its own features.
    """

    region: RandomRegion | None
    region_end: Literal["opens", "closes"] | None

    @torch.compiler.disable  # the layers inside cannot be traced, nor the streams of random numbers
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the original class on sharded layers."""
        if self.region is None or self.region_end is None:
            return super().forward(*args, **kwargs)
        # The dropout of a column layer's terms reads the replicated input, so an open region ends here.
        if self.region_end == "opens":
            self.region.close()
        output = super().forward(*args, **kwargs)
        if self.region_end == "closes":
            self.region.close()
        elif self.training and isinstance(output, Tensor):
            self.region.open(output.device)
        return output
