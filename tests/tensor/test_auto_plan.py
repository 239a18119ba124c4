"""Models as their authors wrote them: divided by an automatic plan, they compute what one process computes."""

import enum
import functools
import re

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.step_trace.record import record_step
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.experts import find_routers
from lightning_parallel.tensor.inspection import structure_of
from lightning_parallel.tensor.layers import Column, Row
from lightning_parallel.tensor.low_rank import linear_layers
from lightning_parallel.tensor.plan import apply_plan
from lightning_parallel.tensor.sharding import ShardPart, reduce_partial_
from tests.harness import distributed
from tests.tensor.oracle import same_gradients

VOCABULARY = 101  # does not divide
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

HUGGING_FACE = {
    "GPT2LMHeadModel": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "vocab_size": VOCABULARY,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "LlamaForCausalLM": GROUPED,
    "BertForMaskedLM": {**SMALL, **NO_DROPOUT},
    "OPTForCausalLM": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 64,
        "vocab_size": VOCABULARY,
        "dropout": 0.0,
    },
    "ViTForImageClassification": {
        **{key: value for key, value in SMALL.items() if key != "vocab_size"},
        **NO_DROPOUT,
        "image_size": 16,
        "patch_size": 8,
        "num_labels": 7,
    },
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 8},
    "GemmaForCausalLM": {**SMALL, "num_key_value_heads": 1, "head_dim": 8},
    "GPTNeoXForCausalLM": SMALL,
    "T5ForConditionalGeneration": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "Phi3ForCausalLM": GROUPED,
    "GlmForCausalLM": {**GROUPED, "head_dim": 8},
}
SINGLE_PRECISION = {"MixtralForCausalLM"}  # its experts have no double precision
EFFICIENT = {"GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "OPTForCausalLM", "GPTNeoXForCausalLM"}
EFFICIENT |= {"Phi3ForCausalLM", "GlmForCausalLM"}  # fused projections, which the models' own plans gather


def _hugging_face(name):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    config = {**HUGGING_FACE[name], **({} if "ViT" in name or "T5" in name else TOKENS)}
    model = kind(kind.config_class(**config))
    return model.to(torch.float32 if name in SINGLE_PRECISION else torch.float64)


def _loss(model):
    generator = torch.Generator().manual_seed(1)
    if "ViT" in type(model).__name__:
        images = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
        return model(pixel_values=images, labels=torch.tensor([1, 3])).loss
    tokens = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
    if hasattr(model, "config"):
        return model(input_ids=tokens, labels=tokens).loss
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _train(model, sharding=None, group=None, steps=2):
    """Losses, and the gradients of the last step by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        if sharding is not None:
            names = [name for name, _ in model.named_parameters() if name in sharding.partial]
            reduce_partial_({name: model.get_parameter(name).grad for name in names}, sharding.shards, group)
        optimizer.step()
        losses.append(loss.detach())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def _recorded(model):
    """The record of a step, as a Trainer gives it."""
    return record_step(model, lambda _: _loss(model), None, torch.device("cpu"))


def _compare(group, build, rtol=1e-5, sequence_parallel=False, plan="auto", record=lambda model: None):
    """Divide one copy, train both, compare losses and every gradient by name; returns the plan and the copy."""
    losses, gradients = _train(build())
    model = build()
    plan = make_plan(model, plan, group, sequence_parallel, functools.cache(lambda: record(model)))
    sharding = apply_plan(model, plan, group)
    local_losses, local = _train(model, sharding, group)
    torch.testing.assert_close(local_losses, losses, rtol=rtol, atol=rtol)
    same_gradients(local, gradients, sharding.shards, group, rtol)
    return plan, model


def _paired(plan, pattern):
    """Whether the layers that match are divided in pairs, without gathering."""
    styles = [style for path, style in plan.styles.items() if re.search(pattern, path)]
    assert styles
    return all(
        (isinstance(style, Column) and not style.gather_output) or (isinstance(style, Row) and not style.split_input)
        for style in styles
        if isinstance(style, (Column, Row))
    )


@pytest.mark.sweep
@pytest.mark.parametrize("name", HUGGING_FACE)
@distributed(world_size=2)
def test_hugging_face_models(group, name):
    plan, model = _compare(group, lambda: _hugging_face(name))
    if name in EFFICIENT:
        assert _paired(plan, r"\.\d+\.")
        held = sum(parameter.numel() for parameter in model.parameters())
        full = sum(parameter.numel() for parameter in _hugging_face(name).parameters())
        assert held < 0.6 * full


@distributed(world_size=4)
def test_key_heads_that_several_of_four_ranks_share(group):
    _compare(group, lambda: _hugging_face("LlamaForCausalLM"))
    plan, _ = _compare(group, lambda: _hugging_face("Phi3ForCausalLM"), 1e-9)
    assert _paired(plan, r"\.\d+\.")


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_share_of_the_weights_that_are_divided_in_pairs(name, ranks):
    model = _hugging_face(name)
    plan = make_plan(model, "auto", Group.pretended("tensor", ranks), record=functools.cache(lambda: _recorded(model)))
    outside = {*find_routers(model)}  # every rank chooses between the experts
    layers = {path: layer for path, layer in linear_layers(model).items() if re.search(r"\.\d+\.", path)}
    sizes = {path: layer.weight.numel() for path, layer in layers.items() if path not in outside}
    paired = sum(size for path, size in sizes.items() if path in plan.styles and _paired(plan, f"^{re.escape(path)}$"))
    assert paired == sum(sizes.values())


def test_the_table_of_a_model_is_the_last_resort():
    model = _hugging_face("LlamaForCausalLM")
    model.model.forward = lambda only: None  # so that no run shows how the blocks are called
    plan = make_plan(model, "auto", Group.pretended("tensor", 2))
    assert _paired(plan, r"\.\d+\.")
    assert "no run has checked" in plan.notes["model.layers.0.self_attn.q_proj"]
    assert "model.layers.0.mlp.up_proj" not in plan.notes


class Residual(nn.Module):
    """A stack of blocks, which are no experts although each adds its output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_stack_of_blocks_is_no_list_of_experts():
    model = Residual()
    trace = record_step(model, model, torch.randn(2, 8), torch.device("cpu"))
    plan = make_plan(model, "auto", Group.pretended("tensor", 2), record=lambda: trace)
    assert {type(style) for style in plan.styles.values()} == {Column, Row}


class Language(nn.Module):
    """Embedding, blocks, and a head that may be tied to the embedding."""

    def __init__(self, blocks, width, tied=True, padding=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ChunkAttention(nn.Module):
    """Heads of a size that is written into the code; the local number follows from the features."""

    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SeparateAttention(nn.Module):
    """Three projections; the gradient of the keys' bias is zero but for rounding."""

    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in layers)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ViewAttention(nn.Module):
    """Takes all sizes from its input, and so the width of its heads, too."""

    def __init__(self, width, heads):
        super().__init__()
        self.n_head = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in self.c_attn(x).split(c, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self, attention, width):
        super().__init__()
        self.norm, self.attention, self.mlp_norm = nn.LayerNorm(width), attention, nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width + 3), nn.GELU(), nn.Linear(4 * width + 3, width))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


def _own(attention, width=30, heads=5, tied=True):
    torch.manual_seed(0)
    return Language([Block(attention(width, heads), width) for _ in range(2)], width, tied).double()


SHARING = {
    "in the same place": (
        [("blocks.1.mlp.0", "blocks.0.mlp.0"), ("blocks.1.attention.out", "blocks.0.attention.out")],
        2,
    ),
    "one gives, one takes": ([("blocks.1.attention.out", "blocks.0.attention.query")], 0),
    "all of one block": ([("blocks.0.attention.key", "blocks.0.attention.query")], 2),
}


def _sharing(pairs):
    model = _own(SeparateAttention, width=32, heads=4)
    for mine, theirs in pairs:
        model.get_submodule(mine).weight = model.get_submodule(theirs).weight
    return model


@pytest.mark.parametrize("name", SHARING)
@distributed(world_size=2)
def test_layers_that_share_a_weight(group, name):
    pairs, divided = SHARING[name]
    plan, _ = _compare(group, lambda: _sharing(pairs), rtol=1e-10)
    if name == "in the same place":
        assert _paired(plan, r"blocks\.")
    outputs = [style for path, style in plan.styles.items() if path.endswith("attention.out")]
    assert sum(isinstance(style, Row) and not style.split_input for style in outputs) == divided


@pytest.mark.parametrize("tied", [True, False])
@distributed(world_size=2)
def test_own_blocks_with_sizes_that_do_not_divide(group, tied):
    plan, _ = _compare(group, lambda: _own(ChunkAttention, tied=tied), rtol=1e-10)
    assert _paired(plan, r"blocks\.")


@distributed(world_size=2)
def test_code_that_takes_the_width_of_its_heads_from_its_input(group):
    plan, _ = _compare(group, lambda: _own(ViewAttention), rtol=1e-10)
    assert _paired(plan, r"blocks")


class Gated(nn.Module):
    """Adds what a layer makes of a context to its hidden features; without a context that layer is idle."""

    def __init__(self):
        super().__init__()
        self.up, self.context, self.down = nn.Linear(12, 16), nn.Linear(10, 16, bias=False), nn.Linear(16, 12)

    def forward(self, x, context=None):
        hidden = self.up(x)
        return x + self.down(F.elu(hidden if context is None else hidden + self.context(context)))


class WithContext(Language):
    def __init__(self, looks, **kwargs):
        super().__init__([Gated(), Gated()], 12, **kwargs)
        self.looks = looks

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.looks and float(x.sum()) == 0:  # so that it does not run without data
            return self.head(x)
        for block in self.blocks:
            x = block(x, x[..., :10])
        return self.head(x)


@pytest.mark.parametrize("looks", [False, True])
@distributed(world_size=2)
def test_layers_that_one_tensor_does_not_reach(group, looks):
    def build():
        torch.manual_seed(0)
        return WithContext(looks).double()

    _compare(group, build, rtol=1e-10)


class NumberedAttention(ViewAttention):
    """Numbers its entry in a cache: the number of the sixth layer is that of the heads."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.layer_idx, self.entry = 5, 5

    def forward(self, x, cache=None):
        return super().forward(x if cache is None else cache.update(x, self.entry))


@distributed(world_size=2)
def test_the_number_of_a_layer_is_no_number_of_heads(group):
    plan, model = _compare(group, lambda: _own(NumberedAttention), rtol=1e-10)
    assert _paired(plan, r"attention")
    attention = model.blocks[0].attention
    assert (attention.layer_idx, attention.entry) == (5, 5)
    assert attention.n_head < 5


def _torch_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 50, dropout=0.0, batch_first=True)
    return Language([nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)], 32).double()


@distributed(world_size=4)
def test_torch_transformer_encoder(group):
    _compare(group, lambda: _torch_encoder().eval(), rtol=1e-10)


@distributed(world_size=2)
def test_sequence_parallel(group):
    plan, model = _compare(group, lambda: _own(ChunkAttention), rtol=1e-10, sequence_parallel=True)
    assert [region.blocks for region in plan.sequence_regions] == [("blocks.0", "blocks.1")]
    lengths = []
    model.blocks[0].mlp_norm.register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))
    _loss(model)
    assert lengths == [4 - group.rank], "7 positions over 2 ranks"


@distributed(world_size=2)
def test_sequence_parallel_where_blocks_read_lengths_from_the_stream(group):
    plan, _ = _compare(group, lambda: _own(ViewAttention), rtol=1e-10, sequence_parallel=True)
    assert [len(region.blocks) for region in plan.sequence_regions] == [2]


SEQUENCE_PARALLEL = (
    *("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM", "BertForMaskedLM", "OPTForCausalLM"),
    *("GPTNeoXForCausalLM", "ViTForImageClassification", "Phi3ForCausalLM", "T5ForConditionalGeneration"),
)


@pytest.mark.sweep
@pytest.mark.parametrize("name", SEQUENCE_PARALLEL)
@distributed(world_size=2)
def test_sequence_parallel_hugging_face_models(group, name):
    plan, model = _compare(group, lambda: _hugging_face(name), 1e-10, sequence_parallel=True, record=_recorded)
    stacks = 2 if name.startswith("T5") else 1
    assert [len(region.blocks) for region in plan.sequence_regions] == [2] * stacks
    assert not any(region.gathered for region in plan.sequence_regions), "its layers are pairs"
    norms = [
        child
        for path, child in model.named_modules()
        if path.startswith(plan.sequence_regions[0].blocks[0]) and "norm" in type(child).__name__.lower()
    ]
    lengths = []
    norms[-1].register_forward_hook(lambda _, args, __: lengths.append(args[0].numel()))
    _loss(model)
    everywhere = comm.all_gather_object(lengths[-1], group)
    full = (5 if "ViT" in name else 7) * 2 * 32
    assert sum(everywhere) == full
    assert max(everywhere) < full


class BiasedAttention(ViewAttention):
    """May be given a bias for each head."""

    def forward(self, x, bias=None):
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        weights = q @ k.transpose(-1, -2)
        if bias is not None and bias.dim() == 1:
            bias = bias[:, None, None] * torch.arange(x.shape[1])
        weights = (weights if bias is None else weights + bias).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).flatten(2))


class Scoring(BiasedAttention):
    """Also returns its scores, behind an entry without a tensor."""

    def forward(self, x, bias=None):
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) + bias
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None, scores


class BiasedBlock(Block):
    by_keyword = False

    def forward(self, x, bias=None):
        h = self.norm(x)
        found = self.attention(h, bias=bias) if self.by_keyword else self.attention(h, bias)
        x = x + (found[0] if isinstance(found, tuple) else found)
        return x + self.mlp(self.mlp_norm(x))


class BiasedLanguage(Language):
    """Gives all blocks one learned bias of positions, as T5, a scale, or slopes, as ALiBi."""

    def __init__(self, *shape, kind=BiasedAttention):
        torch.manual_seed(0)
        super().__init__([BiasedBlock(kind(32, 4), 32) for _ in range(2)], 32)
        self.bias = nn.Parameter(torch.randn(shape))

    def forward(self, tokens):
        x, length = self.embedding(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, bias=self.bias[..., :length, :length] if self.bias.shape[-1] == 16 else self.bias)
        return self.head(x)


@distributed(world_size=2)
def test_a_bias_of_all_heads_that_the_model_gives_to_its_blocks(group):
    for shape in ((1, 4, 16, 16), (4, 16, 16), (1, 4, 1, 1), (4,)):
        plan, _ = _compare(group, lambda shape=shape: BiasedLanguage(*shape).double(), rtol=1e-10)
        assert _paired(plan, "mlp|attention"), shape
    # All heads share it: each rank has a part of its gradient.
    for kind in (BiasedAttention, Scoring):
        plan, _ = _compare(group, lambda kind=kind: BiasedLanguage(16, 16, kind=kind).double(), rtol=1e-10)
        assert _paired(plan, "mlp|attention")
        assert plan.styles["blocks.0.attention"].common


@distributed(world_size=2)
def test_a_bias_of_all_heads_has_other_dimensions_in_a_later_step(group):
    model, whole = (BiasedLanguage(4, 16, 16).double() for _ in range(2))
    sharding = apply_plan(model, make_plan(model, "auto", group), group)
    tokens = torch.randint(3, VOCABULARY, (4, 16))  # as many samples as heads
    for shape in ((4, 16, 16), (4, 1, 16, 16), (4, 4, 16, 16), (16, 16)):
        bias = torch.randn(shape, dtype=torch.float64)
        found = []
        for one in (whole, model):
            one.bias = nn.Parameter(bias)
            one.blocks[0].by_keyword = True
            one.zero_grad()
            F.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten()).backward()
            found.append({name: parameter.grad for name, parameter in one.named_parameters()})
        same_gradients(found[1], found[0], sharding.shards, group, 1e-10)


class Functional(nn.Module):
    """Reads the embedding's weight by itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))

    def forward(self, tokens):
        return F.linear(self.mlp(self.embedding(tokens)), self.embedding.weight)


@distributed(world_size=2)
def test_a_weight_that_is_read_by_other_code_stays_whole(group):
    plan, _ = _compare(group, lambda: Functional().double(), rtol=1e-10)
    assert "embedding" not in plan.styles
    assert "read outside" in plan.notes["embedding"]


class Averaged(Language):
    """Keeps an average of its first block, which stays right in shards, and reads one weight of its last block."""

    def forward(self, tokens):
        average, block = self.blocks[1].parameters(), self.blocks[0].parameters()
        with torch.no_grad():
            for mine, theirs in zip(average, block):
                mine.data.mul_(0.9).add_(theirs.detach().clone(), alpha=0.1)
            torch._foreach_lerp_([p.data for p in self.blocks[1].parameters()], [*self.blocks[0].parameters()], 0.1)
        self.norm = self.blocks[2].mlp[0].weight.to(torch.float32).norm()
        # The layer itself reads its weight, also if code does not call it as a module.
        return self.head.forward(super().forward(tokens) @ self.head.weight.new_ones(VOCABULARY, 32))


@distributed(world_size=2)
def test_code_that_treats_each_number_of_a_weight_alike_reads_no_weight(group):
    model = Averaged([Block(SeparateAttention(32, 4), 32) for _ in range(3)], 32).double()
    plan = make_plan(model, "auto", group)
    assert _paired(plan, r"blocks\.[01]\.|blocks.2.attention")
    assert "read outside its forward, in `forward` (test_auto_plan" in plan.notes["blocks.2.mlp.0"]
    assert "read outside" not in plan.notes.get("head", "")


@distributed(world_size=2)
def test_a_users_plan_learns_how_a_fused_layer_is_packed(group):
    plan = {"*.mlp.0": "column", "*.mlp.2": "row", "embedding": "vocab"}
    for attention, opening, closing in ((ChunkAttention, "qkv", "out"), (ViewAttention, "c_attn", "c_proj")):
        whole = {f"*.{opening}": "column", f"*.{closing}": "row", **plan}
        found, _ = _compare(group, lambda attention=attention: _own(attention), rtol=1e-10, plan=whole)
        assert found.styles[f"blocks.0.attention.{opening}"].parts is not None


@distributed(world_size=4)
def test_a_users_plan_learns_which_heads_share_keys(group):
    plan = {"*.[qkv]_proj": "column", "*.o_proj": "row"}
    found, _ = _compare(group, lambda: _hugging_face("LlamaForCausalLM"), plan=plan)
    (part,) = found.styles["model.layers.0.self_attn.k_proj"].parts
    assert part == ShardPart.keys(2, 8)


# ----------------------------------------------------------------------------------------------------------- refusals


@distributed(world_size=2)
def test_a_users_plan_that_changes_the_result(group):
    with pytest.raises(ValueError, match="`blocks.0.mlp` must compute the same"):
        make_plan(_own(ChunkAttention), {"*.mlp.0": "column", "*.mlp.2": "row_split"}, group)


@distributed(world_size=2)
def test_nothing_to_shard(group):
    with pytest.raises(ValueError, match=r"to shard over.*got Conv2d"):
        make_plan(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), "auto", group)
    with pytest.raises(ValueError, match=r"to shard over.*got LSTM, Linear \(too small to shard"):
        make_plan(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 1)), "auto", group)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"blocks.*.attention.qvk": "column"},
            r"`blocks.\*.attention.qvk` must match a module.*blocks.0.attention.qkv",
        ),
        ({"blocks.*.attention.qkv": "colum"}, r"A style must be one of .*got 'colum' \(did you mean 'column'"),
        ({"embedding": "column"}, "`embedding`: `Column` must apply to"),
    ],
)
@distributed(world_size=2)
def test_wrong_plans_are_refused_as_a_whole(group, plan, message):
    model = _own(ChunkAttention)
    with pytest.raises(ValueError, match=message):
        make_plan(model, {"blocks.*.mlp.0": "column", **plan}, group)


@distributed(world_size=4)
def test_more_ranks_than_heads(group):
    config = {**HUGGING_FACE["LlamaForCausalLM"], "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    plan = make_plan(model, "auto", group)
    assert plan.notes["model.layers.0.self_attn.q_proj"] == "2 heads for 4 ranks"
    assert plan.styles["model.layers.0.self_attn.q_proj"] == Column(gather_output=True)
    assert _paired(plan, r"mlp")


@distributed(world_size=2)
def test_ranks_that_disagree_are_told(group):
    model = nn.Sequential(nn.Linear(8, 8 + 2 * group.rank), nn.ReLU(), nn.Linear(8 + 2 * group.rank, 8))
    with pytest.raises(ValueError, match=r"(?s)shapes of the model's parameters.*rank 0.*rank 1"):
        apply_plan(model, make_plan(model, {"0": "column", "2": "row"}, group), group)


class Chosen(nn.Module):
    """An MLP whose activation depends on something that is not in its code: see `ACTIVATIONS`."""

    def __init__(self, index, activation=None):
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)
        self.layer_idx, self.act = index, activation or (lambda x: F.gelu(x))

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class ByIndex(Chosen):
    def forward(self, x):
        hidden = self.up(x)
        return x + self.down(F.gelu(hidden) if self.layer_idx == 0 else hidden.softmax(-1))


class InTraining(Chosen):
    def forward(self, x):
        hidden = F.gelu(self.up(x))
        return x + self.down(F.dropout(hidden / hidden.norm(dim=-1, keepdim=True), 0.0) if self.training else hidden)


def _closure(function):
    return lambda x: function(x, dim=-1) if function is F.softmax else function(x)


class FromEnum(Chosen):
    def forward(self, x):
        return x + self.down(self.act.value(self.up(x)))


class Kind(enum.Enum):
    EACH = functools.partial(F.gelu)
    ALL = functools.partial(F.softmax, dim=-1)


ACTIVATIONS = {
    "index": lambda: [ByIndex(i) for i in range(2)],
    "training": lambda: [InTraining(i) for i in range(2)],
    "partial": lambda: [Chosen(0, functools.partial(F.gelu)), Chosen(1, functools.partial(F.softmax, dim=-1))],
    "closure": lambda: [Chosen(0, _closure(F.gelu)), Chosen(1, _closure(F.softmax))],
    "enum": lambda: [FromEnum(0, Kind.EACH), FromEnum(1, Kind.ALL)],
    "builtin": lambda: [Chosen(0, torch.tanh), Chosen(1, F.normalize)],
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@distributed(world_size=2)
def test_blocks_that_differ_in_more_than_their_code(group, name):
    def build():
        torch.manual_seed(0)
        return Language(ACTIVATIONS[name](), 12).double()

    _compare(group, build)


class Cached(Chosen):
    def forward(self, x, cache=None):
        return super().forward(x if cache is None else cache.layers[self.layer_idx].update(x, self.layer_idx))


class Scaled(Chosen):
    def forward(self, x, cache=None):
        return super().forward(x if cache is None else cache.update(x / (1 + self.layer_idx), self.layer_idx))


def test_blocks_that_number_their_entry_in_a_cache_are_alike():
    assert structure_of(Cached(0, F.gelu)) == structure_of(Cached(1, F.gelu))
    assert structure_of(Scaled(0, F.gelu)) != structure_of(Scaled(1, F.gelu))


class Second(nn.Module):
    """Returns its hidden features too; the model adds a term of them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x):
        hidden = F.relu(self.up(x))
        return x + self.down(hidden), hidden


class WithSecond(Language):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x, hidden = block(x)
            x = x + hidden.mean(-1, keepdim=True)
        return self.head(x)


@distributed(world_size=2)
def test_every_output_counts(group):
    def build():
        torch.manual_seed(0)
        return WithSecond([Second(), Second()], 12).double()

    _compare(group, build)


class Normalized(nn.TransformerEncoderLayer):
    """Takes the norm over all hidden features."""

    def _ff_block(self, x):
        return self.linear2(F.normalize(self.activation(self.linear1(x)), dim=-1))


def _torch_layer(kind):
    options = {"dropout": 0.0, "batch_first": True}
    if kind == "override":
        return Normalized(16, 4, 32, **options)
    if kind == "softmax":
        return nn.TransformerEncoderLayer(16, 4, 32, activation=nn.Softmax(-1), **options)
    layer = nn.TransformerEncoderLayer(16, 4, 32, activation=nn.GLU(), **options)
    layer.linear1 = nn.Linear(16, 64)
    return layer


@pytest.mark.parametrize("kind", ["override", "softmax", "glu"])
@distributed(world_size=2)
def test_transformer_layers_with_other_code_are_verified(group, kind):
    def build():
        torch.manual_seed(0)
        return Language([_torch_layer(kind) for _ in range(2)], 16).double()

    plan, _ = _compare(group, build)
    assert "blocks.0.self_attn" in plan.styles
    with pytest.raises(ValueError, match="got these problems:\n.*`TransformerLayer`"):
        _compare(group, build, plan={"blocks.?": "transformer_layer"})


class Masked(ChunkAttention):
    """Cannot be run on random values."""

    def forward(self, x, mask):
        if float(mask) != 1:
            raise ValueError("it must be a mask of ones")
        return super().forward(x) * mask


class WithMask(Language):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x, (x * 0 + 1).mean())
        return self.head(x)


@distributed(world_size=2)
def test_fused_layers_that_cannot_be_tried_must_tell_their_parts(group):
    def build():
        torch.manual_seed(0)
        return WithMask([Masked(16, 4), Masked(16, 4)], 16).double()

    with pytest.raises(ValueError, match=r"`blocks.0.qkv` makes 48 features .* takes 16.*Column\(parts="):
        make_plan(build(), {"*.qkv": "column", "*.out": "row"}, group)
    part = ShardPart(16, 4)
    _compare(group, build, plan={"*.qkv": Column(parts=(part,) * 3), "*.out": Row(parts=(part,))})


class Listened(nn.Module):
    """A feed-forward block whose activation is a module."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def seen_by_hook(model, path, call):
    """Return what a forward hook at `path` is given in `call`."""
    seen = []
    hook = model.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    yield hook
    call(model)
    yield seen[-1]


@pytest.mark.parametrize("path", ["1.act", "1.up", "1.down", "1"])
@distributed(world_size=2)
def test_hooks_are_given_whole_tensors(group, path):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Listened().double() for _ in range(3))), torch.randn(2, 3, 8, dtype=torch.float64)
    _expect_same_in_hooks(group, model, path, lambda model: model(x))


@pytest.mark.parametrize("path", ["model.layers.1.mlp.act_fn", "model.layers.0.self_attn.v_proj"])
@distributed(world_size=2)
def test_hooks_in_models_with_a_plan_are_given_whole_tensors(group, path):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).double()
    tokens = torch.randint(VOCABULARY, (2, 5))
    _expect_same_in_hooks(group, model, path, lambda model: model(tokens).logits)


def _expect_same_in_hooks(group, model, path, call):
    listening = seen_by_hook(model, path, call)
    next(listening)
    expected = next(listening)
    plan = make_plan(model, "auto", group)
    apply_plan(model, plan, group)
    listening = seen_by_hook(model, path, call)
    next(listening)
    for found, whole in zip(next(listening), expected):
        torch.testing.assert_close(found, whole)
    # What is not beside the hook is divided as ever.
    assert sum(isinstance(style, Row) for style in plan.styles.values()) >= 2


class HalfOnly(nn.Module):
    """Attention by a kernel that knows no double precision."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.head = width // heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("this kernel supports fp16 and bf16 only")
        return x + self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@distributed(world_size=2)
def test_attention_that_knows_half_precision_only_is_divided_by_heads(group):
    torch.manual_seed(0)
    model = nn.Sequential(HalfOnly(), HalfOnly()).bfloat16()
    x = torch.randn(2, 5, 16).bfloat16()
    expected = model(x)
    plan = make_plan(model, "auto", group)
    assert [type(plan.styles[f"0.{name}_proj"]) for name in ("q", "out")] == [Column, Row]
    assert not plan.styles["0.q_proj"].gather_output
    apply_plan(model, plan, group)
    torch.testing.assert_close(model(x), expected, rtol=3e-2, atol=3e-2)


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.up(x).relu())


class ScaledBetween(nn.Module):
    """Calls the layers of its MLP by themselves, with a vector between them."""

    def __init__(self):
        super().__init__()
        self.mlp, self.scale = Apart(), nn.Parameter(torch.rand(64))

    def forward(self, x):
        return x + self.mlp.down(self.mlp.up(x).relu() * self.scale)


@distributed(world_size=2)
def test_layers_that_the_block_around_calls_are_divided_by_what_it_computes(group):
    torch.manual_seed(0)
    model, x = nn.Sequential(ScaledBetween(), ScaledBetween()), torch.rand(4, 16)
    expected = model(x)
    apply_plan(model, make_plan(model, "auto", group), group)
    torch.testing.assert_close(model(x), expected)
