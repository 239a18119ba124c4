"""Column-, row- and vocabulary-parallel layers, made in place from ordinary ones.

    Column   y_r = x W_r^T            each rank computes some output features     backward: all-reduce of dx
    Row      y = sum_r x_r W_r^T      each rank holds some input features         forward: all-reduce of y
    Vocab    y = sum_r E_r[x]         each rank holds some rows of the table      forward: all-reduce of y

A layer keeps its identity, its hooks, its `Parameter` objects (only their data shrink) and the names of its state; its
class becomes a subclass of what it was. A style says how a kind of layer is divided: `rules` and `partial` are facts
about the full module and change nothing, `apply` divides it.

Source: Megatron-LM, section 3, https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.tensor.collectives import (
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from lightning_parallel.tensor.conversion import (
    convert,
    describe,
    full_shape,
    is_linear,
    is_native,
    is_transposed,
    shard_parameters,
    shared_inputs,
)
from lightning_parallel.tensor.linear import Inputs, SequenceLengths, column_linear, row_linear
from lightning_parallel.tensor.rng import Region
from lightning_parallel.tensor.sharding import Part, Shard

__all__ = [
    "Column",
    "ColumnLinear",
    "Replicate",
    "Row",
    "RowLinear",
    "Style",
    "Vocab",
    "VocabEmbedding",
]


class Style(Protocol):
    """How one kind of module is divided over the ranks of the tensor axis."""

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """The rule of each parameter of the full `module` that is divided, by its name inside the module.

        Raises:
            TypeError: If the style does not apply to this kind of module.
            ValueError: If the sizes cannot be divided over `ranks`.
        """
        ...

    def partial(self, module: nn.Module) -> frozenset[str]:
        """Names of whole parameters of which each rank computes only a part of the gradient."""
        ...

    def apply(self, module: nn.Module, group: Group) -> None:
        """Divide `module`, in place."""
        ...


# ------------------------------------------------------------------------------------------------------------- styles


@dataclass(frozen=True)
class Column:
    """Divide the output features.

    Args:
        gather_output: Whether every rank gets all features of the output (which costs an all-gather); otherwise the
            output holds this rank's features only, for element-wise functions, whole heads, and a `Row` layer.
        parts: What the output features consist of, where that matters: heads, or several projections in one weight.
        unit: Features that must stay together, when `parts` is not given.
        sequence_dim: With sequence parallelism, the dimension along which the input is divided.

    Raises:
        ValueError: If gathered features would be computed by several ranks.
    """

    gather_output: bool = False
    parts: tuple[Part | int, ...] | None = None
    unit: int = 1
    sequence_dim: int | None = None

    def __post_init__(self) -> None:
        if self.gather_output and any(isinstance(part, Part) and part.shared for part in self.parts or ()):
            raise ValueError("`gather_output=True` cannot be combined with features that several ranks share")

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        out_features = _features(module, type(self).__name__)[1]
        cut = _cut(self.parts, self.unit, out_features, ranks)
        rules = {"weight": cut.along(1 if is_transposed(module) else 0)}
        return {**rules, "bias": cut} if module.bias is not None else rules

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        return frozenset()

    def apply(self, module: nn.Module, group: Group) -> None:
        """See `Style`."""
        rules = self.rules(module, group.size)
        in_features, out_features = _features(module, type(self).__name__)
        transposed = is_transposed(module)
        layer = convert(module, ColumnLinear)
        layer.full_features, layer.transposed = (in_features, out_features), transposed
        layer.cut, layer.gather_output, layer.group = rules["weight"].along(-1), self.gather_output, group
        layer.inputs, layer.region = shared_inputs(group, self.sequence_dim), None
        shard_parameters(layer, rules, group)


@dataclass(frozen=True)
class Row:
    """Divide the input features; the bias stays whole and is added once.

    Args:
        split_input: Whether the input holds all features on every rank; otherwise it holds this rank's features, as a
            `Column` layer before leaves them.
        parts: As for `Column`: those of the layer whose output comes in.
        unit: As for `Column`.
        sequence_dim: With sequence parallelism, the dimension along which the output is divided.
    """

    split_input: bool = False
    parts: tuple[Part | int, ...] | None = None
    unit: int = 1
    sequence_dim: int | None = None

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        in_features = _features(module, type(self).__name__)[0]
        cut = _cut(self.parts, self.unit, in_features, ranks)
        if cut.replicated:
            raise ValueError("the input features of a row-parallel layer cannot be shared between ranks")
        return {"weight": cut.along(0 if is_transposed(module) else 1)}

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        return frozenset() if self.sequence_dim is None or module.bias is None else frozenset({"bias"})

    def apply(self, module: nn.Module, group: Group) -> None:
        """See `Style`."""
        rules = self.rules(module, group.size)
        in_features, out_features = _features(module, type(self).__name__)
        transposed = is_transposed(module)
        layer = convert(module, RowLinear)
        layer.full_features, layer.transposed = (in_features, out_features), transposed
        layer.cut, layer.split_input, layer.group = rules["weight"].along(-1), self.split_input, group
        layer.lengths, layer.region = shared_inputs(group, self.sequence_dim).lengths, None
        shard_parameters(layer, rules, group)


@dataclass(frozen=True)
class Vocab:
    """Divide the rows of an embedding table.

    Args:
        sequence_dim: With sequence parallelism, the dimension along which the output is divided.
    """

    sequence_dim: int | None = None

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        if not is_native(module, nn.Embedding):
            raise TypeError(f"`Vocab` applies to `nn.Embedding`, found {describe(module)}")
        used = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
        if used:
            raise ValueError(f"a vocabulary-parallel embedding cannot have {', '.join(f'`{name}`' for name in used)}")
        assert isinstance(module, nn.Embedding)
        return {"weight": Shard.even(0, module.num_embeddings, ranks)}

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        return frozenset()

    def apply(self, module: nn.Module, group: Group) -> None:
        """See `Style`."""
        rules = self.rules(module, group.size)
        layer = convert(module, VocabEmbedding)
        layer.group, layer.lengths = group, shared_inputs(group, self.sequence_dim).lengths
        (layer.first, layer.stop), *_ = rules["weight"].ranges[group.rank]
        shard_parameters(layer, rules, group)


@dataclass(frozen=True)
class Replicate:
    """Leave the module whole on every rank.

    Args:
        partial_gradient: Whether each rank applies it to other data (the norm of this rank's heads, any layer inside
            a sequence-parallel region), so that the gradients of its parameters have to be summed over the ranks.
    """

    partial_gradient: bool = False

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        return {}

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        return frozenset(name for name, _ in module.named_parameters()) if self.partial_gradient else frozenset()

    def apply(self, module: nn.Module, group: Group) -> None:
        """See `Style`."""


# ------------------------------------------------------------------------------------------------------------- layers


class _DividedLinear(nn.Module):
    """What both kinds of divided linear layers know; the other base of their classes is what they were before."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    full_features: tuple[int, int]
    transposed: bool
    cut: Shard
    group: Group
    region: Region | None

    __repr__ = nn.Module.__repr__  # transformers' Conv1D has one of its own, which would not show the sharding

    def _describe(self, local: str, extra: str) -> str:
        in_features, out_features = self.full_features
        text = f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}"
        held = f"{local}={self.cut.local_size(self.group.rank)}, rank={self.group.rank}/{self.group.size}"
        return ", ".join(filter(None, [text, held, extra]))


class ColumnLinear(_DividedLinear):
    """Linear layer that computes this rank's output features; see `Column`."""

    gather_output: bool
    inputs: Inputs

    @torch.compiler.disable  # collectives are not for a graph
    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out / ranks), or (..., out) when the output is gathered."""
        y = column_linear(input, self.weight, self.bias, self.inputs, self.transposed)
        if self.gather_output:
            return _gather(y, self.cut, self.group)
        if self.region is not None and self.training:
            self.region.open(y.device)
        return y

    @property
    def region_end(self) -> Literal["opens"] | None:
        """Whether random numbers after this layer have to differ between the ranks, other than before it."""
        return None if self.gather_output or self.inputs.lengths is not None else "opens"

    def extra_repr(self) -> str:
        """Full sizes, the local size, and the rank."""
        return self._describe("local_out_features", "gather_output" if self.gather_output else "")


class RowLinear(_DividedLinear):
    """Linear layer that holds the weights of this rank's input features; see `Row`."""

    split_input: bool
    lengths: SequenceLengths | None

    @torch.compiler.disable  # collectives are not for a graph
    def forward(self, input: Tensor) -> Tensor:
        """(..., in / ranks), or (..., in) when the layer divides its input, -> (..., out)."""
        if self.region is not None:
            self.region.close()
        x = input
        if self.split_input:
            x = _split(x, self.cut, self.group)
        return row_linear(x, self.weight, self.bias, self.group, self.lengths, self.transposed)

    @property
    def region_end(self) -> Literal["closes"] | None:
        """Whether random numbers before this layer have to differ between the ranks, and after it no longer."""
        return None if self.split_input or self.lengths is not None else "closes"

    def extra_repr(self) -> str:
        """Full sizes, the local size, and the rank."""
        return self._describe("local_in_features", "split_input" if self.split_input else "")


class VocabEmbedding(nn.Embedding):
    """Embedding that holds the rows [first, stop) of the table; see `Vocab`."""

    first: int
    stop: int
    group: Group
    lengths: SequenceLengths | None

    @torch.compiler.disable  # collectives are not for a graph
    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (..., features).

        Raises:
            IndexError: If a token is outside of the whole vocabulary (on the CPU; on CUDA it gives zeros).
        """
        tokens = input
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = tokens.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(f"tokens must be in [0, {self.num_embeddings}), found {int(low)} to {int(high)}")
        absent = (tokens < self.first) | (tokens >= self.stop)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - self.first if self.first <= padding < self.stop else None
        rows = F.embedding((tokens - self.first).masked_fill(absent, 0), self.weight, padding)
        rows = rows.masked_fill(absent.unsqueeze(-1), 0)
        if self.lengths is None:
            return reduce_from_group(rows, self.group)
        dim = self.lengths.dim
        return reduce_scatter_to_group(rows, self.group, dim, self.lengths.divide(rows.shape[dim]))

    def extra_repr(self) -> str:
        """Full sizes, the rows held, and the rank."""
        return f"{super().extra_repr()}, rows=[{self.first}, {self.stop}), rank={self.group.rank}/{self.group.size}"


def _features(module: nn.Module, style: str) -> tuple[int, int]:
    if not is_linear(module):
        raise TypeError(
            f"`{style}` applies to `nn.Linear` (without a `forward` of its own) and `Conv1D`, found {describe(module)}"
        )
    weight = module.weight
    assert isinstance(weight, Tensor)
    shape = full_shape(weight)
    out_features, in_features = shape if not is_transposed(module) else shape[::-1]
    return in_features, out_features


def _cut(parts: Sequence[Part | int] | None, unit: int, features: int, ranks: int) -> Shard:
    cut = Shard.packed(0, parts if parts is not None else (Part(features, unit),), ranks)
    if cut.full_size != features:
        raise ValueError(f"the parts {parts} make {cut.full_size} features, but the layer has {features}")
    return cut


def _gather(y: Tensor, cut: Shard, group: Group) -> Tensor:
    full = gather_from_group(y, group, -1, cut.sizes)
    full = full if cut.consecutive else cut.merge(full.split(cut.sizes, -1))
    return full.contiguous()  # as the output of a linear layer is: code may `view` it


def _split(x: Tensor, cut: Shard, group: Group) -> Tensor:
    if not cut.consecutive:
        x = torch.cat([cut.split(x, rank) for rank in range(group.size)], -1)
    return scatter_to_group(x, group, -1, cut.sizes)
