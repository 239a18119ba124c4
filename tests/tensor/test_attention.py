"""PyTorch's attention and transformer layers against themselves in one process."""

import copy

import pytest
import torch
from torch import nn

from lightning_parallel.tensor.attention import Attention, ParallelAttention, ParallelEncoderLayer, TransformerLayer
from lightning_parallel.tensor.layers import Column, Row
from tests.harness import distributed, recorded_communication, run
from tests.tensor.oracle import check, divide, same_by_name

WORLDS = pytest.mark.parametrize("world", [2, 3])  # heads that can be divided evenly, and heads that cannot


def double(*shape):
    return torch.randn(*shape, dtype=torch.double)


class Call(nn.Module):
    """Calls attention in one of the ways that its signature allows."""

    def __init__(self, attention, **kwargs):
        super().__init__()
        self.attention, self.kwargs = attention, kwargs

    def forward(self, *inputs):
        q, k, v = inputs if len(inputs) == 3 else (inputs[0], *[inputs[-1]] * 2)
        y, weights = self.attention(q, k, v, **self.kwargs)
        assert (weights is not None) == self.kwargs.get("need_weights", True)
        return y if weights is None else torch.cat([y.flatten(), weights.flatten()])


@WORLDS
def test_multihead_attention(world):
    run(multihead_attention, world)


def multihead_attention(group):
    heads, size, batch, length, source = 4, 3, 2, 5, 6
    width = heads * size
    x, y, z = double(length, batch, width), double(source, batch, width), double(source, batch, width)
    causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.double)
    padding = torch.zeros(batch, source, dtype=torch.bool)
    padding[0, -2:] = True
    per_head = torch.rand(batch * heads, length, source) < 0.3
    per_head[..., 0] = False
    cases = [
        ([x], {}, {}),
        ([x], {}, {"need_weights": False}),
        ([x], {"bias": False}, {"need_weights": False, "attn_mask": causal, "is_causal": True}),
        ([x], {}, {"attn_mask": causal, "is_causal": True}),
        ([x, y], {}, {"need_weights": False, "key_padding_mask": padding}),
        ([x, y, z], {}, {"key_padding_mask": padding, "attn_mask": per_head}),
        ([x, y, z], {}, {"attn_mask": per_head, "average_attn_weights": False}),
        ([x.transpose(0, 1), y.transpose(0, 1)], {"batch_first": True}, {"key_padding_mask": padding}),
        ([x[:, 0]], {}, {"attn_mask": causal}),
        ([x[:, 0], y[:, 0]], {"batch_first": True}, {"key_padding_mask": padding[0], "average_attn_weights": False}),
        ([x, double(source, batch, 5), double(source, batch, 7)], {"kdim": 5, "vdim": 7}, {}),
    ]
    for inputs, options, kwargs in cases:
        attention = nn.MultiheadAttention(width, heads, **options).double()
        for bias in (attention.in_proj_bias, attention.out_proj.bias):
            if bias is not None:
                nn.init.normal_(bias)
        model = Call(attention, **kwargs)
        check(model, {"attention": Attention()}, inputs, group, steps=1)
        assert isinstance(attention, ParallelAttention)


class LearnedMasks(nn.Module):
    """Attention with a learned bias of the positions, shared by the heads or for each, and one of the sources."""

    def __init__(self, heads, width, length, shared):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads)
        self.positions = nn.Parameter(torch.randn(*([] if shared else [heads]), length, length))
        self.sources = nn.Parameter(torch.randn(1, length))

    def forward(self, x):
        return self.attention(x, x, x, key_padding_mask=self.sources, attn_mask=self.positions)[0]


@WORLDS
@pytest.mark.parametrize("shared", [True, False])
def test_learned_masks(world, shared):
    run(learned_masks, world, shared=shared)


def learned_masks(group, shared):
    torch.manual_seed(0)
    model = LearnedMasks(4, 12, 5, shared).double()
    check(model, {"attention": Attention()}, [double(5, 1, 12)], group)


@WORLDS
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers(world, norm_first):
    run(transformer_layers, world, norm_first=norm_first)


def transformer_layers(group, norm_first):
    options = {"dropout": 0.0, "norm_first": norm_first, "dtype": torch.double, "dim_feedforward": 10}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, **options), 2, enable_nested_tensor=False)
    check(encoder, {f"layers.{i}": TransformerLayer() for i in range(2)}, [double(5, 2, 8)], group)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 4, batch_first=True, **options), 2)
    check(decoder, {f"layers.{i}": TransformerLayer() for i in range(2)}, [double(2, 3, 8), double(2, 5, 8)], group)


@pytest.mark.parametrize("divided", ["layer", "attention", "mlp"])
@distributed(world_size=2)
def test_the_fused_encoder_does_not_read_shards(group, divided):
    """Evaluation without gradients takes torch's fused kernel, and nested tensors where there is padding."""
    layer = nn.TransformerEncoderLayer(8, 4, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)).eval()
    whole = copy.deepcopy(model)
    styles = {
        "layer": {"": TransformerLayer()},
        "attention": {".self_attn": Attention()},
        "mlp": {".linear1": Column(), ".linear2": Row()},
    }[divided]
    divide(model, {f"layers.{i}{name}": style for i in range(2) for name, style in styles.items()}, group)
    assert isinstance(model.layers[0], ParallelEncoderLayer)
    x = torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [2]])
    for mask in (None, padding):
        with torch.no_grad(), recorded_communication() as records:
            y = model(x, src_key_padding_mask=mask)
        assert len(records) == (4 if divided == "layer" else 2)
        with torch.inference_mode():
            torch.testing.assert_close(y, whole(x, src_key_padding_mask=mask), rtol=1e-5, atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


@distributed(world_size=2)
def test_collective_counts(group):
    attention = nn.MultiheadAttention(8, 4)
    Attention().apply(attention, group)
    x, memory = (torch.randn(5, 2, 8, requires_grad=True) for _ in range(2))
    for inputs, backward in (((x, x, x), 1), ((x, memory, memory), 2)):
        with recorded_communication() as records:
            y, _ = attention(*inputs, need_weights=False)
        assert [record.op for record in records] == ["all_reduce"]
        with recorded_communication() as records:
            y.sum().backward()
        assert [record.op for record in records] == ["all_reduce"] * backward


@distributed(world_size=2)
def test_autocast(group):
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    whole = copy.deepcopy(model)
    rules, _ = divide(model, {"": TransformerLayer()}, group)
    x = torch.randn(4, 2, 8)
    for m in (model, whole):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(x)
        y.float().pow(2).sum().backward()
    same_by_name(model, whole, rules, group, "grad", atol=0.1)


@distributed(world_size=3)
def test_what_cannot_be_divided_is_refused(group):
    class Own(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    for module, error, message in [
        (nn.MultiheadAttention(8, 2), ValueError, r"2 heads \(units of 4 features\) cannot be sharded over 3 ranks"),
        (nn.MultiheadAttention(9, 3, add_bias_kv=True), ValueError, "add_bias_kv"),
        (nn.MultiheadAttention(9, 3, add_zero_attn=True), ValueError, "add_zero_attn"),
        (Own(9, 3), TypeError, "`Attention` must apply to `nn.MultiheadAttention`; got"),
        (nn.Linear(9, 3), TypeError, "`Attention` must apply to `nn.MultiheadAttention`; got"),
    ]:
        with pytest.raises(error, match=message):
            Attention().apply(module, group)
    layer = nn.TransformerEncoderLayer(8, 2)
    with pytest.raises(ValueError, match="2 heads"):
        TransformerLayer().apply(layer, group)
    assert layer.linear1.weight.shape == (2048, 8), "nothing has changed"
    assert f"num_heads=3, local_heads=1, rank={group.rank}/3" in repr(divided(group))


def divided(group):
    attention = nn.MultiheadAttention(9, 3)
    Attention().apply(attention, group)
    return attention
