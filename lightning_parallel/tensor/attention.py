"""Attention sharded by heads: PyTorch's own attention and transformer layers, and attention built of linear layers.

Legend for shapes: L target length, S source length, B batch, E features, H heads of D = E / H features, h heads on
this rank.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.tensor.autograd import copy_to_group, gather_from_group, reduce_from_group
from lightning_parallel.tensor.conversion import convert, shard_parameters
from lightning_parallel.tensor.inspection import (
    describe,
)
from lightning_parallel.tensor.layers import (
    Column,
    ColumnLinear,
    Row,
    RowLinear,
    Style,
)
from lightning_parallel.tensor.linear import SharedInputs, column_in_graph, column_linear, shared_inputs
from lightning_parallel.tensor.regions import RandomRegion
from lightning_parallel.tensor.sharding import Shard, ShardPart

__all__ = [
    "Attention",
    "ParallelAttention",
    "ParallelEncoderLayer",
    "TransformerLayer",
    "guard_fast_path",
    "transformer_styles",
]


@dataclass(frozen=True)
class Attention:
    """Shards the heads of an `nn.MultiheadAttention`.

    Args:
        sequence_dim: With sequence parallelism, the dimension along which inputs and output are sharded.
    """

    sequence_dim: int | None = None

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`.

        Raises:
            TypeError: If the module is not an `nn.MultiheadAttention`, or overrides its `forward`.
            ValueError: If it has fewer heads than `ranks`, `add_bias_kv` or `add_zero_attn`.
        """
        native = isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
        if not native or "forward" in vars(module):
            raise TypeError(f"`Attention` must apply to `nn.MultiheadAttention`; got {describe(module)}")
        assert isinstance(module, nn.MultiheadAttention)
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                "`add_bias_kv` and `add_zero_attn` cannot be sharded by heads; keep this attention replicated"
            )
        heads = ShardPart(module.embed_dim, module.head_dim)
        packed = Shard.packed(0, [heads] * 3, ranks)
        single = Shard.packed(0, [heads], ranks)
        rules = {f"{name}_proj_weight": single for name in ("q", "k", "v")}
        rules |= {"in_proj_weight": packed, "in_proj_bias": packed, "out_proj.weight": single.along(1)}
        # Separate projection weights exist only where keys or values have another size than queries.
        present = {name for name, _ in module.named_parameters()}
        return {name: rule for name, rule in rules.items() if name in present}

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        bias = "out_proj.bias"
        is_partial = self.sequence_dim is not None and any(name == bias for name, _ in module.named_parameters())
        return frozenset({bias}) if is_partial else frozenset()

    def apply(self, module: nn.Module, group: Group) -> None:
        """See `Style`."""
        rules = self.rules(module, group.size)
        layer = convert(module, ParallelAttention)
        heads = rules["out_proj.weight"]
        layer.group = group
        layer.inputs = shared_inputs(group, self.sequence_dim)
        layer.region = None
        layer.head_counts = tuple(size // layer.head_dim for size in heads.sizes)
        layer.first_head = heads.ranges[group.rank][0][0] // layer.head_dim
        # By full heads too: its inputs are the features of the heads that this rank computes.
        Row(unit=layer.head_dim, sequence_dim=self.sequence_dim).apply(layer.out_proj, group)
        shard_parameters(layer, {name: rule for name, rule in rules.items() if name != "out_proj.weight"}, group)


@dataclass(frozen=True)
class TransformerLayer:
    """Shards an `nn.TransformerEncoderLayer` or `nn.TransformerDecoderLayer`: attention by heads, then the MLP."""

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        return {
            f"{child}.{name}": rule
            for child, style in transformer_styles(module).items()
            for name, rule in style.rules(module.get_submodule(child), ranks).items()
        }

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        return frozenset()

    def apply(self, module: nn.Module, group: Group) -> None:
        """See `Style`."""
        self.rules(module, group.size)  # refuse before anything has changed
        for child, style in transformer_styles(module).items():
            style.apply(module.get_submodule(child), group)
        guard_fast_path(module)


# Activations that compute each feature by itself, so a rank can apply them to its features alone.
ELEMENTWISE = {
    *(F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.mish, F.selu, F.celu, F.relu6, F.hardswish, F.softplus),
    *(torch.relu, torch.tanh, torch.sigmoid, F.tanh, F.sigmoid),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Mish, nn.SELU, nn.CELU, nn.ReLU6, nn.Hardswish),
    *(nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Identity),
}


def transformer_styles(module: nn.Module) -> dict[str, Style]:
    """Return the styles of the modules inside one of torch's own transformer layers.

    Raises:
        TypeError: If the module is no such layer, or overrides its methods.
    """
    if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        raise TypeError(f"`TransformerLayer` must apply to torch's own transformer layers; got {describe(module)}")
    base = nn.TransformerEncoderLayer if isinstance(module, nn.TransformerEncoderLayer) else nn.TransformerDecoderLayer
    replaced = [
        name
        for name in ("forward", "_sa_block", "_mha_block", "_ff_block")
        if name in vars(module) or getattr(type(module), name, None) is not getattr(base, name, None)
    ]
    if type(module) is not base and isinstance(module, ParallelEncoderLayer):
        replaced = []  # sharded before
    if replaced:
        raise TypeError(
            f"`TransformerLayer` must apply to layers with torch's own methods; got {describe(module)}, which"
            f" overrides {', '.join(f'`{name}`' for name in replaced)}"
        )
    activation = module.activation
    if activation not in ELEMENTWISE and type(activation) not in ELEMENTWISE:
        raise TypeError(
            "`TransformerLayer` must apply to layers whose activation computes each feature by itself; got"
            f" {describe(module)} with the unknown activation {activation}"
        )
    if type(module.dropout) not in (nn.Dropout, nn.Identity):
        raise TypeError(f"`TransformerLayer` must apply to layers with torch's dropout; got {describe(module.dropout)}")
    # A decoder layer also attends to the encoder's output.
    attentions = ["self_attn"] if isinstance(module, nn.TransformerEncoderLayer) else ["self_attn", "multihead_attn"]
    return {**{name: Attention() for name in attentions}, "linear1": Column(), "linear2": Row()}


@torch.compiler.disable  # where it draws, or knows the lengths of sequences from earlier layers
def _outside_of_graph(layer: nn.Module, *args: Any) -> Any:
    return layer.forward(*args)


class ParallelAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` that computes this rank's heads; see `Attention`.

    `embed_dim` and `num_heads` keep the values of the full layer, because masks and other code expect them.
    """

    group: Group
    inputs: SharedInputs
    region: RandomRegion | None
    head_counts: tuple[int, ...]
    first_head: int

    @property
    def region_end(self) -> Literal["inside"]:
        """`"inside"`: the dropout of the attention weights must differ between the ranks; see `tensor.regions`."""
        return "inside"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention like `nn.MultiheadAttention`, including masks and weights."""
        if torch.compiler.is_dynamo_compiling() and not self._is_for_graph():
            given = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return _outside_of_graph(self, query, key, value, *given)
        if is_causal and attn_mask is None:
            raise RuntimeError("`is_causal` is only a hint about `attn_mask`; pass the mask as well")
        batched = query.dim() == 3
        if not batched:
            # Inputs that are one tensor must stay one: their projections then share one product and one all-reduce.
            distinct = {id(x): x.unsqueeze(1) for x in (query, key, value)}
            query, key, value = (distinct[id(x)] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        batch_first = self.batch_first and batched
        q, k, v = (_by_head(x, self.head_dim, batch_first) for x in self._project(query, key, value))
        mask = self._mask(attn_mask, key_padding_mask, q)
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None  # the kernel applies the causal mask itself, as in torch
        else:
            is_causal = False
        mixed, weights = self._attend(q, k, v, mask, is_causal, need_weights)
        # (B, h, L, D) -> (B, L, h, D), or (L, B, h, D): `out_proj` takes the features of this rank's heads.
        mixed = mixed.transpose(1, 2) if batch_first else mixed.permute(2, 0, 1, 3)
        output = self.out_proj(mixed.flatten(2))
        if weights is not None:
            weights = self._full_weights(weights, average_attn_weights)
        if not batched:
            return output.squeeze(1), None if weights is None else weights.squeeze(0)
        return output, weights

    def _is_for_graph(self) -> bool:
        lengths = self.inputs.lengths
        draws = self.region is not None and self.training and self.dropout > 0
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        return not draws and type(weight) is nn.Parameter and (lengths is None or lengths.suspended)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Project (..., E) each -> (..., h D) each, with one product for projections that share an input."""
        bias = self.in_proj_bias
        if torch.compiler.is_dynamo_compiling():
            linear = partial(column_in_graph, inputs=self.inputs.label, transposed=False)
        else:
            linear = partial(column_linear, inputs=self.inputs)
        # Self-attention: one product for all three projections, and one all-reduce of the input gradient.
        if self.in_proj_weight is not None and query is key and key is value:
            return linear(query, self.in_proj_weight, bias).chunk(3, -1)
        # Packed shards: each third holds this rank's queries, keys or values.
        if self.in_proj_weight is not None:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(linear(x, matrix, b) for x, matrix, b in zip((query, key, value), matrices, biases))

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Combine both masks into one term of the scores of q (B, h, L, D), which broadcasts to (B, h, L, S)."""
        mask = None
        if attn_mask is not None:
            # A learned mask is replicated, and each rank uses it for its own heads, so its gradient is a sum.
            mask = copy_to_group(_additive(attn_mask, q.dtype), self.group)
            if mask.dim() == 3:  # (B H, L, S): one mask per head; this rank takes the masks of its heads
                mask = mask.unflatten(0, (-1, self.num_heads)).narrow(1, self.first_head, q.shape[1])
        if key_padding_mask is not None:
            padding = copy_to_group(_additive(key_padding_mask, q.dtype), self.group)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        return mask

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with q (B, h, L, D), k and v (B, h, S, D) -> (B, h, L, D), and the weights (B, h, L, S) if needed."""
        # Dropout of the weights draws for this rank's heads only, so it needs this rank's random stream.
        dropout = self.dropout if self.training else 0.0
        with self.region.scope(q.device) if self.region is not None and dropout else nullcontext():
            if not need_weights:
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal), None
            # The queries are scaled before the product, as in torch: scaling the scores would round differently.
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout, training=dropout > 0)
            return weights @ v, weights

    def _full_weights(self, weights: Tensor, average: bool) -> Tensor:
        # Averaged weights are a sum over heads, hence over ranks; single ones have to be gathered.
        if average:
            return reduce_from_group(weights.sum(1), self.group) / self.num_heads
        return gather_from_group(weights, self.group, 1, self.head_counts)

    def extra_repr(self) -> str:
        """Return the full and the local number of heads, and the rank."""
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads},"
            f" local_heads={self.head_counts[self.group.rank]}, rank={self.group.rank}/{self.group.size}"
        )


def _by_head(x: Tensor, head_size: int, batch_first: bool) -> Tensor:
    """Rearrange (B, L, h D), or (L, B, h D), -> (B, h, L, D)."""
    x = x.unflatten(-1, (-1, head_size))
    return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores; True in a boolean mask excludes."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


# ------------------------------------------------------------------------------------------------ torch's fused encoder


class ParallelEncoderLayer(nn.TransformerEncoderLayer):
    """`nn.TransformerEncoderLayer` without the fused inference kernel, which would read the shards as full weights."""

    @property
    def activation_relu_or_gelu(self) -> int:  # type: ignore[override]
        """0: an activation without a fused kernel, as torch asks before it takes the kernel."""
        return 0

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Run the layer without the fused kernel; pad nested tensors, which torch makes from a padding mask."""
        if not src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        # Only the fused kernel computes on nested tensors.
        lengths = torch.tensor([sequence.shape[0] for sequence in src.unbind()], device=src.device)
        padded = src.to_padded_tensor(0.0)
        padding = torch.arange(padded.shape[1], device=src.device) >= lengths[:, None]
        output = super().forward(padded, None, padding)
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(output, lengths.tolist())])


def guard_fast_path(root: nn.Module) -> None:
    """Disable torch's fused encoder kernel for sharded layers. Call it after the layers inside `root` are sharded."""
    for module in list(root.modules()):
        if isinstance(module, nn.TransformerEncoderLayer) and not isinstance(module, ParallelEncoderLayer):
            kinds = (ColumnLinear, RowLinear, ParallelAttention)
            if any(isinstance(inner, kinds) for inner in module.modules()):
                convert(module, ParallelEncoderLayer)
