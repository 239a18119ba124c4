"""Attention in the ways in which people write it: divided by heads, with the gradients of one process."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_parallel import comm
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import apply_plan
from tests.harness import distributed
from tests.tensor.test_auto_plan import Block, Language, _compare

WIDTH = 24
HEADS = 4
SIZE = WIDTH // HEADS


def _attend(q, k, v, bias=None):
    """Attention of q, k, v (B, heads, T, size) -> (B, T, heads, size)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


class Fused(nn.Module):
    """One projection for queries, keys and values; `layout` names the code that takes them apart."""

    def __init__(self, layout):
        super().__init__()
        self.layout, self.num_heads, self.head_dim, self.embed_dim = layout, HEADS, SIZE, WIDTH
        self.qkv, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.o_proj(getattr(self, self.layout)(self.qkv(x), *x.shape))

    def by_head(self, qkv, b, t, c):  # the UvA tutorial
        q, k, v = qkv.reshape(b, t, self.num_heads, 3 * self.head_dim).permute(0, 2, 1, 3).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        return (scores @ v).permute(0, 2, 1, 3).reshape(b, t, self.embed_dim)

    def by_input(self, qkv, b, t, c):  # timm
        q, k, v = qkv.reshape(b, t, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        return _attend(q, k, v).reshape(b, t, c)

    def chunks(self, qkv, b, t, c):  # nanoGPT
        parts = (part.view(b, t, self.num_heads, c // self.num_heads).transpose(1, 2) for part in qkv.split(c, 2))
        return _attend(*parts).contiguous().view(b, t, c)

    def only_size(self, qkv, b, t, c):
        parts = (part.view(b, t, -1, self.head_dim).transpose(1, 2) for part in qkv.chunk(3, -1))
        return _attend(*parts).flatten(2)

    def strided(self, qkv, b, t, c):  # the heads are the innermost dimension
        q, k, v = qkv.reshape(b, t, SIZE, 3, self.num_heads).permute(3, 0, 4, 1, 2)
        return F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).reshape(b, t, c)

    def in_einops(self, qkv, b, t, c):
        einops = pytest.importorskip("einops")
        q, k, v = einops.rearrange(qkv, "b t (k h d) -> k b h t d", k=3, h=self.num_heads)
        return einops.rearrange(_attend(q, k, v), "b t h d -> b t (h d)")

    def literal(self, qkv, b, t, c):
        q, k, v = qkv.reshape(b, t, 3, 4, 6).permute(2, 0, 3, 1, 4)
        return _attend(q, k, v).reshape(b, t, c)


class Layers(nn.Module):
    """Takes heads apart with layers, which keep the number of heads: of einops, or `nn.Unflatten`."""

    def __init__(self, einops):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.split = nn.Unflatten(-1, (3, HEADS, SIZE))
        if einops:
            layers = pytest.importorskip("einops.layers.torch")
            self.split = layers.Rearrange("b t (k h d) -> b t k h d", k=3, h=HEADS)

    def forward(self, x):
        return self.out(_attend(*self.split(self.qkv(x)).permute(2, 0, 3, 1, 4)).flatten(2))


class Separate(nn.Module):
    """Three projections, with what authors put between them and the product."""

    def __init__(self, kind="", keys=HEADS):
        super().__init__()
        self.kind, self.groups, self.width = kind, keys, WIDTH
        self.cfg = SimpleNamespace(model={"n": HEADS, "n_layers": 2}, vocabulary=101)
        if kind != "config":
            self.number = HEADS
        self.to_q, self.to_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_k, self.to_v = (nn.Linear(WIDTH, keys * SIZE) for _ in range(2))
        if kind == "norm":
            self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.LayerNorm(SIZE)
        if kind == "wide norm":
            self.q_norm = nn.LayerNorm(WIDTH)
        if kind == "slopes":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1).view(HEADS, 1, 1))
        if kind == "buckets":
            self.buckets = nn.Embedding(16, HEADS)
        if kind == "gate":
            self.gate = nn.Linear(WIDTH, HEADS)
        if kind == "position network":
            self.network = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, HEADS))
        if kind == "mixed heads":
            self.mix = nn.Conv2d(HEADS, HEADS, 1)
        if kind == "scale":
            self.gamma = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        b, t, c = x.shape
        if self.kind == "config":
            q, k, v = (layer(x).view(b, t, self.cfg.model["n"], -1) for layer in (self.to_q, self.to_k, self.to_v))
        elif self.kind == "shapes":
            q, k, v = (layer(x) for layer in (self.to_q, self.to_k, self.to_v))
            heads = q.shape[-1] // SIZE
            q, k, v = (part.view(b, t, heads, -1) for part in (q, k, v))
        else:
            q = self.to_q(x)
            q = self.q_norm(q) if self.kind == "wide norm" else q
            q = q.view(b, t, self.number, -1)
            k, v = (layer(x).view(b, t, self.groups, -1) for layer in (self.to_k, self.to_v))
        if self.kind == "norm":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.kind != "config" and self.groups != self.number:
            k, v = (part.repeat_interleave(self.number // self.groups, 1) for part in (k, v))
        if self.kind == "mixed heads":
            weights = self.mix((q @ k.transpose(-2, -1)).softmax(-1))
            return self.to_out((weights @ v).transpose(1, 2).flatten(2))
        y = _attend(q, k, v, self.bias(t)).flatten(2)
        if self.kind == "gate":
            y = (y.unflatten(-1, (self.number, -1)) * self.gate(x).sigmoid()[..., None]).flatten(2)
        return self.to_out(y * self.gamma if self.kind == "scale" else y)

    def bias(self, t):
        distance = (torch.arange(t)[:, None] - torch.arange(t)).abs()
        if self.kind == "slopes":
            return -self.slopes.to(torch.float64) * distance
        if self.kind == "computed slopes":
            slopes = torch.tensor([2.0 ** (-8 * (i + 1) / self.number) for i in range(self.number)])
            return -slopes.to(torch.float64)[:, None, None] * distance
        if self.kind == "buckets":
            return self.buckets(distance).permute(2, 0, 1)
        if self.kind == "position network":
            return self.network(distance.to(torch.float64)[..., None]).permute(2, 0, 1)
        return None


class Swin(nn.Module):
    """Attention in windows of four positions, with a table of relative positions."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.scale = HEADS, SIZE**-0.5
        self.relative_position_bias_table = nn.Parameter(torch.randn(7, HEADS))
        self.register_buffer("relative_position_index", torch.arange(4)[:, None] - torch.arange(4) + 3)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(4, 4, -1)
        scores = (q * self.scale) @ k.transpose(-2, -1) + bias.permute(2, 0, 1).unsqueeze(0)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class Windowed(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Swin()

    def forward(self, x):
        b, t, c = x.shape
        padded = F.pad(x, (0, 0, 0, -t % 4))
        return self.attention(padded.reshape(-1, 4, c)).reshape(b, -1, c)[:, :t]


class Inline(nn.Module):
    """Attention and MLP in one forward, which takes the width of its heads from the input that it adds to."""

    def __init__(self):
        super().__init__()
        self.heads, self.norm1, self.norm2 = HEADS, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(_attend(q, k, v).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LowRank(nn.Module):
    """A layer with a low-rank term, as LoRA adds it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base, self.scaling = base, 0.5
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * self.scaling


def _low_rank(attention, *names):
    for name in names:
        setattr(attention, name, LowRank(getattr(attention, name)))
    return attention


class MultiQuery(nn.Module):
    """One head of keys and values for all queries, in one projection or in three."""

    def __init__(self, fused):
        super().__init__()
        self.sizes = (WIDTH, SIZE, SIZE)
        self.qkv = nn.Linear(WIDTH, sum(self.sizes)) if fused else None
        self.three = None if fused else nn.ModuleList(nn.Linear(WIDTH, size) for size in self.sizes)
        self.count, self.out = HEADS, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).split(self.sizes, -1) if self.three is None else (layer(x) for layer in self.three)
        q = q.unflatten(-1, (self.count, -1)).transpose(1, 2)
        weights = (q @ k[:, None].transpose(-2, -1)).softmax(-1)
        return self.out((weights @ v[:, None]).transpose(1, 2).flatten(2))


class ByHand(nn.Linear):
    """As Falcon's."""

    def forward(self, input):
        y = input @ self.weight.T
        return y if self.bias is None else y + self.bias


class Squashed(nn.Linear):
    def forward(self, input):
        return input @ self.weight.tanh().T


class OneNumber(Separate):
    """A number that all heads use."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.ones(1))

    def bias(self, t):
        return self.decay * (torch.arange(t)[:, None] - torch.arange(t)).abs()


def _linears(attention, change):
    for name in [name for name, child in attention.named_children() if isinstance(child, nn.Linear)]:
        setattr(attention, name, change(getattr(attention, name)))
    return attention


def _as(kind):
    return lambda layer: kind(layer.in_features, layer.out_features)


BY_HEADS = {
    "fused": {
        **{
            layout: functools.partial(Fused, layout)
            for layout in ("by_head", "by_input", "chunks", "only_size", "strided", "in_einops")
        },
        "Unflatten": lambda: Layers(False),
        "Rearrange": lambda: Layers(True),
        "multi-query": lambda: MultiQuery(True),
        "inline": Inline,
    },
    "separate": {
        **{
            kind: functools.partial(Separate, kind)
            for kind in ("config", "shapes", "norm", "slopes", "buckets", "gate", "scale")
        },
        "grouped": lambda: Separate(keys=2),
        "multi-query": lambda: MultiQuery(False),
        "one number": OneNumber,
        "swin": Windowed,
    },
    "layers": {
        "LoRA of q and v": lambda: _low_rank(Separate(), "to_q", "to_v"),
        "LoRA of all": lambda: _low_rank(Fused("by_input"), "qkv", "o_proj"),
        "by hand": lambda: _linears(Fused("by_head"), _as(ByHand)),
    },
}
NOT_BY_HEADS = {
    "literal": (lambda: Fused("literal"), "qkv", "works with all 4 heads only"),
    "wide norm": (lambda: Separate("wide norm"), "to_out", "features of all heads are mixed"),
    "computed slopes": (lambda: Separate("computed slopes"), "to_out", "works with all 4 heads only"),
    "mixed heads": (lambda: Separate("mixed heads"), "to_out", "features of all heads are mixed"),
    "squashed": (lambda: _linears(Separate(), _as(Squashed)), "to_q", "Squashed` has its own `forward`"),
    "weight norm": (lambda: _linears(Separate(), nn.utils.parametrizations.weight_norm), "to_q", "is computed from"),
}


def _model(builders):
    torch.manual_seed(0)
    return Language([Block(build(), WIDTH) for build in builders], WIDTH).double()


def _is_by_heads(plan, block):
    """Whether no activation inside the attention is gathered, but for small ones of low-rank terms."""
    styles = {path: style for path, style in plan.styles.items() if path.startswith(f"blocks.{block}.attention.")}
    return bool(styles) and not any(
        getattr(style, "gather_output", False) or getattr(style, "split_input", False) for style in styles.values()
    )


@pytest.mark.sweep
@pytest.mark.parametrize("name", BY_HEADS)
@distributed(world_size=2)
def test_divided_by_heads(group, name):
    plan, _ = _compare(group, lambda: _model(BY_HEADS[name].values()), rtol=1e-9)
    others = [kind for index, kind in enumerate(BY_HEADS[name]) if not _is_by_heads(plan, index)]
    assert not others, plan.notes


@distributed(world_size=2)
def test_why_it_is_not_divided_by_heads(group):
    plan, _ = _compare(group, lambda: _model(build for build, _, _ in NOT_BY_HEADS.values()), rtol=1e-9)
    for index, (_, layer, reason) in enumerate(NOT_BY_HEADS.values()):
        assert not _is_by_heads(plan, index)
        assert reason in plan.notes[f"blocks.{index}.attention.{layer}"]


class Dropping(LowRank):
    def forward(self, x):
        return self.base(x) + self.b(self.a(F.dropout(x, 0.5, self.training)))


@distributed(world_size=2)
def test_dropout_of_low_rank_terms_is_the_same_on_all_ranks_where_their_input_is(group):
    def build():
        attention = Fused("by_input")
        attention.qkv, attention.o_proj = Dropping(attention.qkv), Dropping(attention.o_proj)
        return _model([lambda: attention])

    torch.manual_seed(0)
    model = build()
    sharding = apply_plan(model, make_plan(model, "auto", group), group)
    model(torch.arange(8).view(1, 8)).square().sum().backward()
    for name in ("qkv.a", "o_proj.b"):
        gradient = model.get_submodule(f"blocks.0.attention.{name}").weight.grad
        assert f"blocks.0.attention.{name}.weight" not in sharding.shards
        assert len({str(other.tolist()) for other in comm.all_gather_object(gradient, group)}) == 1


class Coefficients(nn.Module):
    """Its code that reads a weight is in a method which another module calls, as in Gemma 3n."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(12, 12, bias=False)

    def correct(self, x):
        return x + F.linear(x, self.mix.weight.clamp(-1, 1))


class Corrected(nn.Module):
    def __init__(self):
        super().__init__()
        self.coefficients, self.up = Coefficients(), nn.Linear(12, 12)

    def forward(self, x):
        return self.coefficients.correct(self.up(x))


@distributed(world_size=2)
def test_a_weight_that_a_method_called_from_outside_reads_stays_whole(group):
    def build():
        torch.manual_seed(0)
        return Language([Corrected(), Corrected()], 12).double()

    plan, _ = _compare(group, build, rtol=1e-9)
    assert "blocks.0.up" in plan.styles
    assert "read outside" in plan.notes["blocks.0.coefficients.mix"]
