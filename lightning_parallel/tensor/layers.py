"""Column-, row- and vocabulary-parallel layers, converted in place from ordinary ones.

    Column   y_r = x W_r^T            each rank computes some output features     backward: all-reduce of dx
    Row      y = sum_r x_r W_r^T      each rank holds some input features         forward: all-reduce of y
    Vocab    y = sum_r E_r[x]         each rank holds some rows of the table      forward: all-reduce of y

A layer keeps its identity, its hooks, its `Parameter` objects (only their data shrink) and the names in its
`state_dict`. Its class becomes a subclass of its former class. A style says how a kind of layer is sharded: `rules` and
`partial` describe the full module and change nothing, `apply` shards it.

Legend for shapes: `in`, `out` are the features of the full layer.

Source: Megatron-LM, section 3, https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import (
    PARAMETERS,
    DisableTorchFunctionSubclass,
    assert_on_device,
    gather_absent,
    has_data,
    parameters_of,
)
from lightning_parallel.tensor.autograd import (
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
    whole_from_group,
)
from lightning_parallel.tensor.context import on_positions
from lightning_parallel.tensor.conversion import convert, shard_parameters
from lightning_parallel.tensor.inspection import (
    describe,
    full_shape,
    is_linear,
    is_native,
    is_transposed,
)
from lightning_parallel.tensor.linear import (
    Reader,
    SequenceLengths,
    SharedInputs,
    column_in_graph,
    column_linear,
    row_in_graph,
    row_linear,
    shared_inputs,
)
from lightning_parallel.tensor.low_rank import LowRankLinear, low_rank_of
from lightning_parallel.tensor.pieces import Piece, part_of, positions_of, whole_input
from lightning_parallel.tensor.regions import DividedExtent, RandomRegion, is_quiet_in_graph
from lightning_parallel.tensor.sharding import Shard, ShardPart, layer_of

__all__ = [
    "Column",
    "ColumnLinear",
    "Replicate",
    "Row",
    "RowLinear",
    "Style",
    "Vocab",
    "VocabEmbedding",
    "gather_features",
]


class Style(Protocol):
    """How one kind of module is sharded over the ranks of the tensor axis.

    Every style has these three methods; they are documented here.
    """

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """Return the shard rule of each parameter of the full `module` that is sharded, by its name inside the module.

        Raises:
            TypeError: If the style does not apply to this kind of module.
            ValueError: If the sizes cannot be split over `ranks`.
        """
        ...

    def partial(self, module: nn.Module) -> frozenset[str]:
        """Return the names of replicated parameters for which each rank computes only a part of the gradient."""
        ...

    def apply(self, module: nn.Module, group: Group) -> None:
        """Shard `module` in place."""
        ...


# ------------------------------------------------------------------------------------------------------------- styles


@dataclass(frozen=True)
class Column:
    """Column-parallel: shards the output features.

    Args:
        gather_output: Whether every rank gets all features of the output, which costs an all-gather. Otherwise the
            output holds this rank's features only, for element-wise functions, full heads, and a `Row` layer.
        parts: The parts of the output features that are split one by one: heads, or fused projections.
        unit: Number of consecutive features that stay on one rank, if `parts` is not given.
        sequence_dim: With sequence parallelism, the dimension along which the input is sharded.
        in_sublayer: Whether the input of the module around reads as full sequences; see `pieces.Piece`.

    Raises:
        ValueError: If gathered features would be computed by several ranks.
    """

    gather_output: bool = False
    parts: tuple[ShardPart | int, ...] | None = None
    unit: int = 1
    sequence_dim: int | None = None
    in_sublayer: bool = False

    def __post_init__(self) -> None:
        # The gathered output would hold shared features more than once.
        if self.gather_output and any(isinstance(part, ShardPart) and part.shared for part in self.parts or ()):
            raise ValueError("`gather_output=True` is not supported with features that several ranks share")

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        if inner := _inside_low_rank(module, self):
            return _rules_inside(module, inner, ranks)
        out_features = _features(module, type(self).__name__)[1]
        features = _feature_rule(self.parts, self.unit, out_features, ranks)
        # A transposed weight is (in, out).
        rules = {"weight": features.along(1 if is_transposed(module) else 0)}
        return {**rules, "bias": features} if module.bias is not None else rules

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        return _partial_inside(module, _inside_low_rank(module, self))

    def apply(self, module: nn.Module, group: Group, kind: type[ColumnLinear] | None = None) -> None:
        """See `Style`; the layer becomes an instance of `kind`."""
        if inner := _inside_low_rank(module, self):
            _divide_inside(module, inner, group, "opens")
            return
        # Read before the conversion, after which the module is no ordinary linear layer any more.
        rules = self.rules(module, group.size)
        in_features, out_features = _features(module, type(self).__name__)
        transposed = is_transposed(module)
        layer = convert(module, ColumnLinear if kind is None else kind)
        layer.full_features = (in_features, out_features)
        layer.transposed = transposed
        # Along the last dimension, in which activations have their features.
        layer.feature_rule = rules["weight"].along(-1)
        layer.gather_output = self.gather_output
        layer.group = group
        # One object for the group: layers that read one input then share one all-reduce of its gradient.
        layer.inputs = shared_inputs(group, self.sequence_dim)
        layer.reader = Reader()
        layer.in_sublayer = self.in_sublayer
        layer.region = None
        shard_parameters(layer, rules, group)


@dataclass(frozen=True)
class Row:
    """Row-parallel: shards the input features; the bias stays replicated and is added once, after the sum.

    Args:
        split_input: Whether the input holds all features on every rank. Otherwise it holds this rank's features, the
            output of a `Column` layer.
        parts: As for `Column`: the parts of the layer that produces the input.
        unit: As for `Column`.
        sequence_dim: With sequence parallelism, the dimension along which the output is sharded.
        in_sublayer: As for `Column`.
    """

    split_input: bool = False
    parts: tuple[ShardPart | int, ...] | None = None
    unit: int = 1
    sequence_dim: int | None = None
    in_sublayer: bool = False

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        if inner := _inside_low_rank(module, self):
            return _rules_inside(module, inner, ranks)
        in_features = _features(module, type(self).__name__)[0]
        features = _feature_rule(self.parts, self.unit, in_features, ranks)
        if features.replicated:  # the sum over the ranks would count the shared features twice
            raise ValueError("Input features that several ranks share are not supported by a row-parallel layer")
        return {"weight": features.along(0 if is_transposed(module) else 1)}

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        if inner := _inside_low_rank(module, self):
            return _partial_inside(module, inner)
        # With sequence parallelism each rank adds the bias to its part of the sequence only.
        return frozenset() if self.sequence_dim is None or module.bias is None else frozenset({"bias"})

    def apply(self, module: nn.Module, group: Group) -> None:
        """See `Style`."""
        if inner := _inside_low_rank(module, self):
            _divide_inside(module, inner, group, "closes")
            return
        rules = self.rules(module, group.size)
        in_features, out_features = _features(module, type(self).__name__)
        transposed = is_transposed(module)
        layer = convert(module, RowLinear)
        layer.full_features = (in_features, out_features)
        layer.transposed = transposed
        layer.feature_rule = rules["weight"].along(-1)
        layer.split_input = self.split_input
        layer.group = group
        # The object of the column-parallel layers: lengths that one layer records are looked up by another.
        layer.lengths = shared_inputs(group, self.sequence_dim).lengths
        layer.in_sublayer = self.in_sublayer
        layer.region = None
        shard_parameters(layer, rules, group)


@dataclass(frozen=True)
class Vocab:
    """Vocabulary-parallel: shards the rows of an embedding table.

    Args:
        sequence_dim: With sequence parallelism, the dimension along which the output is sharded.
    """

    sequence_dim: int | None = None

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        if not is_native(module, nn.Embedding):
            raise TypeError(f"`Vocab` must apply to `nn.Embedding`; got {describe(module)}")
        # These options act on the rows of a lookup, and tokens of other ranks look up row 0 here.
        used = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
        if used:
            raise ValueError(
                f"A vocabulary-parallel embedding does not support {', '.join(f'`{name}`' for name in used)}"
            )
        assert isinstance(module, nn.Embedding)
        return {"weight": Shard.even(0, module.num_embeddings, ranks)}

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        return frozenset()

    def apply(self, module: nn.Module, group: Group) -> None:
        """See `Style`."""
        rules = self.rules(module, group.size)
        layer = convert(module, VocabEmbedding)
        layer.group = group
        # Of all layers of the group: this layer records lengths that later layers look up.
        layer.lengths = shared_inputs(group, self.sequence_dim).lengths
        layer.row_rule = rules["weight"]
        layer.first, layer.stop = layer.row_rule.ranges[group.rank][0]
        shard_parameters(layer, rules, group)


@dataclass(frozen=True)
class Replicate:
    """Keeps the full module on every rank.

    Args:
        partial_gradient: Whether each rank applies it to different data (the norm of this rank's heads, any layer
            inside a sequence-parallel region). Its gradients then have to be summed over the ranks.
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


def _inside_low_rank(module: nn.Module, style: Column | Row) -> dict[str, Style]:
    """Return the styles of the layers of a linear layer with low-rank terms; empty for any other module."""
    found = low_rank_of(module)
    if found is None:
        return {}
    divided, whole = (found.second, found.first) if isinstance(style, Column) else (found.first, found.second)
    inner: dict[str, Style] = dict.fromkeys((found.base, *divided), style)
    # With sequence parallelism, a replicated layer sees this rank's positions only.
    return inner | dict.fromkeys(whole, Replicate(partial_gradient=style.sequence_dim is not None))


def _rules_inside(module: nn.Module, inner: Mapping[str, Style], ranks: int) -> dict[str, Shard]:
    found = {path: style.rules(module.get_submodule(path), ranks) for path, style in inner.items()}
    return {f"{path}.{name}": rule for path, rules in found.items() for name, rule in rules.items()}


def _partial_inside(module: nn.Module, inner: Mapping[str, Style]) -> frozenset[str]:
    found = {path: style.partial(module.get_submodule(path)) for path, style in inner.items()}
    return frozenset(f"{path}.{name}" for path, names in found.items() for name in names)


def _divide_inside(
    module: nn.Module, inner: Mapping[str, Style], group: Group, end: Literal["opens", "closes"]
) -> None:
    layers = [module.get_submodule(path) for path in inner]
    for layer, style in zip(layers, inner.values()):
        style.apply(layer, group)
    around = convert(module, LowRankLinear)
    around.region = None
    around.region_end = end if any(getattr(layer, "region_end", None) for layer in layers) else None


# ------------------------------------------------------------------------------------------------------------- layers


class _ParallelLinear(nn.Module):
    """Attributes of both kinds of sharded linear layers; the second base of their classes is the original class."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    full_features: tuple[int, int]
    transposed: bool
    feature_rule: Shard
    group: Group
    in_sublayer: bool
    region: RandomRegion | None

    __repr__ = nn.Module.__repr__  # the `__repr__` of transformers' Conv1D would not show the sharding

    def plain_parameters(self) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias if they are ordinary parameters, with this rank's shards; else None."""
        # As attributes: a dry run of a pipeline puts tensors without data in their place.
        weight, bias = self.weight, self.bias
        if type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter):
            return weight, bias
        return None, None

    def _describe(self, local: str, extra: str) -> str:
        in_features, out_features = self.full_features
        text = f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}"
        held = f"{local}={self.feature_rule.local_size(self.group.rank)}, rank={self.group.rank}/{self.group.size}"
        return ", ".join(filter(None, [text, held, extra]))


class ColumnLinear(_ParallelLinear):
    """Linear layer that computes this rank's output features; see `Column`."""

    gather_output: bool
    inputs: SharedInputs
    reader: Reader

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out / ranks), or to (..., out) if the output is gathered."""
        if torch.compiler.is_dynamo_compiling():
            return self.in_graph(input)
        if type(input) is not Tensor and (split := on_positions(self.forward, input)) is not None:
            return split
        x, inputs = input, self.inputs
        if type(input) is not Tensor or self.in_sublayer:
            x, inputs = self._entered(input)
        weight, bias = self.plain_parameters()
        if weight is not None and type(x) is Tensor:
            y = column_linear(x, weight, bias, inputs, self.transposed, self.reader)
        else:
            # In a step, the weight reads as the full one, but this layer computes with the shard.
            with on_shards(x, self):
                weight, bias = self.own_parameters()
                y = column_linear(x, weight, bias, inputs, self.transposed, self.reader)
        if self.gather_output:
            return gather_features(y, self.feature_rule, self.group)
        if self.region is not None and self.training:  # dropout draws in training only
            self.region.open(y.device, partial(_features_drawn, y.shape, self.feature_rule.sizes, x.shape[-1]))
        return y

    def in_graph(self, input: Tensor) -> Tensor:
        """Do the same in code that is compiled."""
        lengths = self.inputs.lengths
        # In a step, parameters read as full ones, and only compiled layers of this package get their shards.
        is_shard = type(self.weight) is nn.Parameter
        if not is_shard or self.in_sublayer or (lengths is not None and not lengths.suspended):
            return _outside_of_graph(self, input)
        y = column_in_graph(input, self.weight, self.bias, self.inputs.label, self.transposed)
        if self.gather_output:
            return gather_features(y, self.feature_rule, self.group)
        if self.region is not None and self.training and not is_quiet_in_graph(self.region.label):
            _open_outside_of_graph(self.region, y, self.feature_rule.sizes, input.shape[-1])
        return y

    def _entered(self, input: Tensor) -> tuple[Tensor, SharedInputs]:
        """Return the tensor to compute on, and the inputs among which it counts."""
        x, inputs = whole_input(input), self.inputs
        lengths = inputs.lengths
        # A layer that knows the lengths gathers by itself. Any other layer needs the full tensor now.
        part = x.part if isinstance(x, Piece) and x.family.in_region else None
        if part is not None and lengths is not None and lengths.takes(x.place, part):
            return part, inputs
        # A full tensor inside a sublayer comes from code that gathered all positions.
        whole = x.whole() if isinstance(x, Piece) else x
        return whole, shared_inputs(self.group, None) if self.in_sublayer else inputs

    def own_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's part of weight and bias; call it inside `on_shards`."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if type(weight) is not nn.Parameter:
            weight = _own_part(weight, self.feature_rule.along(1 if self.transposed else 0), self.group)
        if bias is not None and type(bias) is not nn.Parameter:
            bias = _own_part(bias, self.feature_rule.along(0), self.group)
        return weight, bias

    @property
    def region_end(self) -> Literal["opens"] | None:
        """`"opens"` if random numbers after this layer have to differ between the ranks; see `tensor.regions`."""
        return None if self.gather_output else "opens"

    def extra_repr(self) -> str:
        """Return the full sizes, the local size, and the rank."""
        return self._describe("local_out_features", "gather_output" if self.gather_output else "")


class RowLinear(_ParallelLinear):
    """Linear layer that holds the weights of this rank's input features; see `Row`."""

    split_input: bool
    lengths: SequenceLengths | None

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in / ranks), or (..., in) if the layer splits its input, to (..., out)."""
        if torch.compiler.is_dynamo_compiling():
            return self._in_graph(input)
        if type(input) is not Tensor and (split := on_positions(self.forward, input)) is not None:
            return split
        if self.region is not None:
            self.region.close()  # the output is equal on all ranks again, and so must be the dropout that follows
        x = input.whole() if type(input) is not Tensor and isinstance(input, Piece) else input
        lengths = self.lengths
        is_outside = lengths is not None and lengths.outside is not None
        if lengths is not None and (lengths.suspended or (self.in_sublayer and lengths.is_flat(x))):
            lengths = None
        # Later steps may call the layer by hand, with all features.
        if self.split_input or x.shape[-1] == self.feature_rule.full_size:
            if not self.split_input and lengths is not None:
                raise RuntimeError(
                    f"`{layer_of(self.named_parameters(), '<its path>')}` must get the features of this rank inside its"
                    f" block; got all {x.shape[-1]}. Call it outside the block in the first batch too, or use"
                    " `sequence_parallel=False` [LP018]"
                )
            x = _split_features(x, self.feature_rule, self.group)
        weight, bias = self.plain_parameters()
        if weight is not None and type(x) is Tensor and not is_outside:
            y = row_linear(x, weight, bias, self.group, lengths, self.transposed)
        else:
            with on_shards(x, self):
                weight, bias = self.weight, self.bias
                if type(weight) is not nn.Parameter:
                    weight = _own_part(weight, self.feature_rule.along(0 if self.transposed else 1), self.group)
                if is_outside and bias is not None:
                    # Each rank computes all positions here, but the gradient of the bias is summed over the ranks.
                    bias = whole_from_group(bias, self.group)
                y = row_linear(x, weight, bias, self.group, lengths, self.transposed)
        # Code of the sublayer must see the sizes of the full sequence, as it saw them in the input.
        return positions_of(y, lengths) if lengths is not None and self.in_sublayer else y

    def _in_graph(self, input: Tensor) -> Tensor:
        is_shard = type(self.weight) is nn.Parameter
        if not is_shard or (self.lengths is not None and not self.lengths.suspended):
            return _outside_of_graph(self, input)
        if self.region is not None and self.training and not is_quiet_in_graph(self.region.label):
            _close_outside_of_graph(self.region)
        if self.split_input or input.shape[-1] == self.feature_rule.full_size:
            input = _split_features(input, self.feature_rule, self.group)
        return row_in_graph(input, self.weight, self.bias, self.group.label, self.transposed)

    @property
    def region_end(self) -> Literal["closes"] | None:
        """`"closes"` if random numbers before this layer have to differ between the ranks; see `tensor.regions`."""
        return None if self.split_input else "closes"

    def extra_repr(self) -> str:
        """Return the full sizes, the local size, and the rank."""
        return self._describe("local_in_features", "split_input" if self.split_input else "")


class VocabEmbedding(nn.Embedding):
    """Embedding that holds the rows [first, stop) of the table; see `Vocab`."""

    first: int
    stop: int
    row_rule: Shard
    group: Group
    lengths: SequenceLengths | None

    def forward(self, input: Tensor) -> Tensor:
        """Look up tokens (...) -> (..., features).

        Raises:
            IndexError: If a token is outside the full vocabulary (on CUDA, an assertion on the device).
        """
        # No rank holds a token outside the full vocabulary, so without a check it would silently give zeros.
        is_compiled, tokens = torch.compiler.is_dynamo_compiling(), input
        if is_compiled and (self.lengths is not None or type(self.weight) is not nn.Parameter):
            return _outside_of_graph(self, input)
        if not is_compiled and tokens.device.type == "cpu" and tokens.numel() and has_data(tokens):
            low, high = tokens.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(f"Tokens must be in [0, {self.num_embeddings}); got {int(low)} to {int(high)}")
        elif tokens.numel():
            assert_on_device(
                ((tokens >= 0) & (tokens < self.num_embeddings)).all(),
                "Tokens must be in the vocabulary; got a token that is not",
            )
        elsewhere = (tokens < self.first) | (tokens >= self.stop)
        # Only the rank with the padding row has to mask that row's gradient.
        padding = self.padding_idx
        if padding is not None:
            padding = padding - self.first if self.first <= padding < self.stop else None
        # Row 0 stands in for the tokens of other ranks. The mask below drops its values and their gradient.
        index = (tokens - self.first).masked_fill(elsewhere, 0)
        with nullcontext() if is_compiled else on_shards(index, self):
            rows = F.embedding(index, _own_part(self.weight, self.row_rule, self.group), padding)
        # Each token is nonzero on one rank, so the sum over the ranks is the full lookup.
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.lengths is None:
            return reduce_from_group(rows, self.group)
        dim = self.lengths.dim
        # `divide` also records the length, for the layers that gather the sequence.
        return reduce_scatter_to_group(rows, self.group, dim, self.lengths.divide(rows.shape[dim]))

    def extra_repr(self) -> str:
        """Return the full sizes, the rows held, and the rank."""
        return f"{super().extra_repr()}, rows=[{self.first}, {self.stop}), rank={self.group.rank}/{self.group.size}"


def on_shards(x: Tensor, layer: nn.Module) -> AbstractContextManager[Any]:
    """Compute inside the block with the shards of a layer's parameters, which read as full parameters in a step."""
    # Each layer of a step comes here: no call of a function. Parameters that still arrive are awaited.
    for parameter in vars(layer)[PARAMETERS].values():
        # Ordinary parameters are neither absent nor read as full.
        if parameter is not None and type(parameter) is not nn.Parameter:
            gather_absent(list(parameters_of(layer).values()))
            break
    # A placeholder answers through its class.
    return DisableTorchFunctionSubclass() if type(x) is Tensor else nullcontext()


def _own_part(tensor: Tensor, rule: Shard, group: Group) -> Tensor:
    """Return this rank's part of a parameter, in place of which `functional_call` may give a full tensor."""
    if type(tensor) is nn.Parameter:
        return tensor
    is_full = isinstance(tensor, Piece) or tensor.shape[rule.dim] == rule.full_size != rule.local_size(group.rank)
    return part_of(tensor, rule, group) if is_full else tensor


# Sequence parallelism knows the lengths of sequences from earlier layers, as no graph does.
@torch.compiler.disable
def _outside_of_graph(layer: nn.Module, input: Tensor) -> Tensor:
    return layer.forward(input)


# Code that draws leaves its graph, because no graph changes a generator.
@torch.compiler.disable
def _open_outside_of_graph(region: RandomRegion, y: Tensor, parts: tuple[int, ...], whole_features: int) -> None:
    region.open(y.device, partial(_features_drawn, y.shape, parts, whole_features))


@torch.compiler.disable
def _close_outside_of_graph(region: RandomRegion) -> None:
    region.close()


def _features_drawn(shape: Sequence[int], parts: tuple[int, ...], whole_features: int) -> DividedExtent:
    return DividedExtent(tuple(shape), len(shape) - 1, parts, whole_features)


def _features(module: nn.Module, style: str) -> tuple[int, int]:
    if not is_linear(module):
        raise TypeError(
            f"`{style}` must apply to a layer that computes the same as `nn.Linear`, or to `Conv1D`; got"
            f" {describe(module)}"
        )
    shape = full_shape(parameters_of(module)["weight"])  # type: ignore[arg-type]
    out_features, in_features = shape if not is_transposed(module) else shape[::-1]
    return in_features, out_features


def _feature_rule(parts: Sequence[ShardPart | int] | None, unit: int, features: int, ranks: int) -> Shard:
    rule = Shard.packed(0, parts if parts is not None else (ShardPart(features, unit),), ranks)
    if rule.full_size != features:
        raise ValueError(
            f"`parts` must add up to the {features} features of the layer; got {rule.full_size} from {parts}"
        )
    return rule


def gather_features(y: Tensor, rule: Shard, group: Group) -> Tensor:
    """Return all output features on every rank."""
    full = gather_from_group(y, group, -1, rule.sizes)
    # Packed parts arrive in the order of the ranks; `merge` restores the order of the full layer.
    full = full if rule.consecutive else rule.merge(full.split(rule.sizes, -1))
    return full.contiguous()  # the output of a linear layer is contiguous, and code may `view` it


def _split_features(x: Tensor, rule: Shard, group: Group) -> Tensor:
    # The collective takes consecutive slices, so packed parts are first sorted by rank.
    if not rule.consecutive:
        x = torch.cat([rule.split(x, rank) for rank in range(group.size)], -1)
    return scatter_to_group(x, group, -1, rule.sizes)
