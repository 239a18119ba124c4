"""Attention in the ways in which people write it: divided by heads, with the gradients of one process."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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

    def __init__(self, layout, norm=None):
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

    def by_size(self, qkv, b, t, c):
        q, k, v = qkv.reshape(b, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return _attend(q, k, v).reshape(b, t, c)

    def inner(self, qkv, b, t, c):
        q, k, v = qkv.view(b, t, self.num_heads, 3, -1).transpose(1, 2).unbind(3)
        return _attend(q, k, v).flatten(2)

    def chunks(self, qkv, b, t, c):  # nanoGPT
        parts = (part.view(b, t, self.num_heads, c // self.num_heads).transpose(1, 2) for part in qkv.split(c, 2))
        return _attend(*parts).contiguous().view(b, t, c)

    def only_size(self, qkv, b, t, c):
        parts = (part.view(b, t, -1, self.head_dim).transpose(1, 2) for part in qkv.chunk(3, -1))
        return _attend(*parts).flatten(2)

    def strided(self, qkv, b, t, c):  # the heads are the innermost dimension
        q, k, v = qkv.reshape(b, t, SIZE, 3, self.num_heads).permute(3, 0, 4, 1, 2)
        return F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).reshape(b, t, c)

    def by_einsum(self, qkv, b, t, c):
        q, k, v = qkv.reshape(b, t, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.head_dim**-0.5
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v).transpose(1, 2).reshape(b, t, -1)

    def in_einops(self, qkv, b, t, c):
        einops = pytest.importorskip("einops")
        q, k, v = einops.rearrange(qkv, "b t (k h d) -> k b h t d", k=3, h=self.num_heads)
        return einops.rearrange(_attend(q, k, v), "b t h d -> b t (h d)")

    def in_einops_strided(self, qkv, b, t, c):
        einops = pytest.importorskip("einops")
        q, k, v = einops.rearrange(qkv, "b t (d k h) -> k b h t d", k=3, h=self.num_heads)
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
        if kind in ("norm", "rms"):
            self.q_norm, self.k_norm = ((nn.LayerNorm if kind == "norm" else nn.RMSNorm)(SIZE) for _ in range(2))
        if kind == "wide norm":
            self.q_norm = nn.LayerNorm(WIDTH)
        if kind == "slopes":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1).view(HEADS, 1, 1))
        if kind == "table":
            self.table = nn.Parameter(torch.randn(HEADS, 16))
        if kind == "buckets":
            self.buckets = nn.Embedding(16, HEADS)
        if kind == "temperature":
            self.scale = nn.Parameter(torch.rand(HEADS, 1, 1))
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
        if self.kind in ("norm", "rms"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.kind == "expand":
            each = self.number // self.groups
            k, v = (part[:, :, None].expand(-1, -1, each, -1, -1).reshape(b, self.number, t, -1) for part in (k, v))
        elif self.kind != "config" and self.groups != self.number:
            k, v = (part.repeat_interleave(self.number // self.groups, 1) for part in (k, v))
        if self.kind == "mixed heads":
            weights = self.mix((q @ k.transpose(-2, -1)).softmax(-1))
            return self.to_out((weights @ v).transpose(1, 2).flatten(2))
        if self.kind == "temperature":
            q = F.normalize(q, dim=-1) * self.scale
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
        if self.kind == "table":
            return self.table[:, distance]
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


LAYOUTS = [
    "by_head",
    "by_input",
    "by_size",
    "inner",
    "chunks",
    "only_size",
    "strided",
    "by_einsum",
    "in_einops",
    "in_einops_strided",
]
KINDS = ["", "config", "shapes", "norm", "rms", "slopes", "table", "buckets", "temperature", "gate", "scale"]
BY_HEADS = {
    **{layout: functools.partial(Fused, layout) for layout in LAYOUTS},
    **{kind or "separate": functools.partial(Separate, kind) for kind in KINDS},
    "Unflatten": lambda: Layers(False),
    "Rearrange": lambda: Layers(True),
    "grouped": lambda: Separate(keys=2),
    "expand": lambda: Separate("expand", keys=2),
    "swin": Windowed,
    "LoRA of q and v": lambda: _low_rank(Separate(), "to_q", "to_v"),
    "LoRA of qkv": lambda: _low_rank(Fused("by_input"), "qkv"),
    "LoRA of all": lambda: _low_rank(Fused("by_size"), "qkv", "o_proj"),
}
NOT_BY_HEADS = {
    "literal": (lambda: Fused("literal"), "does not work with some of 4 heads"),
    "wide norm": (lambda: Separate("wide norm"), "depends on all of theirs"),
    "computed slopes": (lambda: Separate("computed slopes"), "does not work with some of 4 heads"),
    "mixed heads": (lambda: Separate("mixed heads"), "depends on all of theirs"),
}


def _model(build):
    torch.manual_seed(0)
    return Language([Block(build(), WIDTH) for _ in range(2)], WIDTH).double()


def _is_by_heads(plan):
    """Whether no activation inside the attention is gathered, but for small ones of low-rank terms."""
    styles = {path: style for path, style in plan.styles.items() if path.startswith("blocks.1.attention.")}
    small = {path for path in styles if path.endswith((".a", "o_proj.b"))}
    assert styles
    return not any(
        getattr(style, "gather_output", False) or getattr(style, "split_input", False)
        for path, style in styles.items()
        if path not in small
    )


@pytest.mark.parametrize("name", BY_HEADS)
@distributed(world_size=2)
def test_divided_by_heads(group, name):
    plan, _ = _compare(group, lambda: _model(BY_HEADS[name]), rtol=1e-10)
    assert _is_by_heads(plan), plan.notes


@pytest.mark.parametrize("name", NOT_BY_HEADS)
@distributed(world_size=2)
def test_why_it_is_not_divided_by_heads(group, name):
    build, reason = NOT_BY_HEADS[name]
    plan, _ = _compare(group, lambda: _model(build), rtol=1e-10)
    assert not _is_by_heads(plan)
    assert reason in plan.notes["blocks.1.attention.qkv" if name == "literal" else "blocks.1.attention.to_out"]
