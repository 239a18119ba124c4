"""Compiled models: no graph breaks at a sharded layer, and equal to one process."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import apply_plan
from lightning_parallel.tensor.regions import RandomRegion
from tests.harness import distributed, recorded_communication, run

WIDTH, HEADS, VOCABULARY = 16, 4, 22
INDUCTOR = pytest.param("inductor", 2, marks=pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler"))


class Block(nn.Module):
    """Queries, keys and values of three layers, or of one; grouped keys with fewer heads; a gated MLP."""

    def __init__(self, fused, dropout=0.0):
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH)] if fused else [nn.Linear(WIDTH, WIDTH) for _ in "qkv"])
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.norm(x)
        parts = self.qkv[0](h).chunk(3, -1) if len(self.qkv) == 1 else [layer(h) for layer in self.qkv]
        q, k, v = (each.view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for each in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        h = self.mlp_norm(x)
        return x + self.down(self.dropout(F.silu(self.gate(h)) * self.up(h)))


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def native():
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)


def train(model, tokens, targets):
    F.cross_entropy(model(tokens).flatten(0, 1).double(), targets.flatten()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.sweep(kept=1)
@pytest.mark.parametrize(("backend", "world"), [("aot_eager", 2), ("aot_eager", 3), INDUCTOR])
def test_a_compiled_model_has_no_breaks(backend, world):
    run(compiled_without_breaks, world, backend=backend)


def compiled_without_breaks(group, backend):
    torch._inductor.config.compile_threads = 1  # in this process
    # Three ranks have uneven numbers of heads and classes.
    is_large = group.size == 2 and backend != "inductor"
    whole = Model(Block(True), Block(False), native()) if is_large else Model(Block(group.size == 3))
    parts = copy.deepcopy(whole)
    sharding = apply_plan(parts, make_plan(parts, "auto", group), group)
    assert {"embedding.weight", "head.weight"} - {*sharding.shards} <= ({"embedding.weight"} if is_large else set())
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(parts, backend=backend, fullgraph=True)  # raises an error at a break
    for shape in ((2, 5), (3, 4)) if is_large else [(2, 5)]:
        tokens, targets = torch.randint(VOCABULARY, (2, *shape)).unbind()
        for model in (whole, parts):
            model.zero_grad()
        expected, found = train(whole, tokens, targets), train(compiled, tokens, targets)
        for name, value in expected.items():
            rule = sharding.shards.get(name)
            want = value if rule is None else rule.split(value, group.rank)
            torch.testing.assert_close(found[f"_orig_mod.{name}"], want, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + is_large  # one for other shapes


@distributed(world_size=2)
def test_layers_that_read_one_tensor_share_a_message(group):
    parts = Model(Block(False))
    apply_plan(parts, make_plan(parts, "auto", group), group)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 5)).unbind()
    counts = []
    torch.compiler.reset()
    for model in (parts.blocks[0], torch.compile(parts.blocks[0], backend="aot_eager")):
        x = torch.randn(2, 5, WIDTH, requires_grad=True)
        model(x).sum().backward()  # compiles
        with recorded_communication() as spans:
            model(x).sum().backward()
        counts.append(len(spans))
    assert counts == [4, 4]


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("later", [False, True])
@distributed(world_size=2)
def test_a_block_that_draws_leaves_its_graph(later, group):
    torch.compiler.reset()
    parts = Model(Block(True, dropout=0.0 if later else 0.5))
    apply_plan(parts, make_plan(parts, "auto", group), group)
    block, x = parts.blocks[0], torch.randn(2, 5, WIDTH)
    compiled = torch.compile(block, backend="aot_eager")
    if later:
        compiled(x)
        assert not torch._dynamo.explain(block)(x).graph_break_count
        block.dropout.p = 0.5
    drawn = RandomRegion.draws
    compiled(x).sum().backward()
    assert torch._dynamo.explain(block)(x).graph_break_count
    assert RandomRegion.draws > drawn
