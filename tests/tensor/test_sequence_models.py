"""Sequence parallelism of models as people write them against one process."""

import functools
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat import ParallelState
from lightning_parallel.mesh import Mesh
from lightning_parallel.step_trace.record import record_step
from lightning_parallel.strategies.hooks.views import FullViews
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.linear import shared_inputs
from lightning_parallel.tensor.pieces import Piece
from lightning_parallel.tensor.plan import apply_plan
from lightning_parallel.tensor.plan_table import sharding_table
from tests.harness import distributed, recorded_communication
from tests.tensor.oracle import finish_gradients, same_by_name

WIDTH, TOKENS = 16, 23


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Reads batch, length and width from its input."""

    def __init__(self, width, norm=None, p=0.0):
        super().__init__()
        self.n_head, self.n_embd = 4, width
        self.norm = nn.Identity() if norm is None else norm(width)
        self.qkv, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(p)

    def forward(self, x, residual=None):
        x = self.norm(x)
        b, t, c = x.size()
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in self.qkv(x).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(b, t, c)
        y = self.dropout(self.out(y))
        return y if residual is None else residual + y


class Block(nn.Module):
    kind = ""

    def __init__(self, width=WIDTH, norm=nn.LayerNorm, p=0.0):
        super().__init__()
        inside = self.kind == "norms inside"
        self.norm, self.norm_again = (nn.Identity(), nn.Identity()) if inside else (norm(width), norm(width))
        self.attention = Attention(width, norm if inside else None, p)
        mlp = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(p)]
        self.mlp = nn.Sequential(norm(width), *mlp) if inside else nn.Sequential(*mlp)

    def forward(self, x):
        if self.kind == "parallel":
            y = self.norm(x)
            return x + self.attention(y) + self.mlp(y)
        if self.kind == "residual inside":
            x = self.attention(self.norm(x), x)
        elif self.kind.startswith("checkpointed"):
            reentrant = self.kind.endswith("reentrant")
            x = x + checkpoint(self.attention, self.norm(x), use_reentrant=reentrant)
        else:
            x = x + self.attention(self.norm(x))
        x = x + self.mlp(self.norm_again(x))
        shifted = F.pad(x, (0, 0, 1, -1)) if self.kind.startswith("shifts") else 0
        return x + (self.norm(shifted) if self.kind == "shifts, then norms" else shifted)


KINDS = ("", "parallel", "residual inside", "norms inside", "checkpointed", "checkpointed reentrant")


def kind_of_block(kind):
    return type("Kind", (Block,), {"kind": kind})


class Language(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.embedding, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def divided(group, build):
    model, whole = (build().double() for _ in range(2))  # not every model can be copied
    whole.load_state_dict(model.state_dict())
    sharding = apply_plan(model, make_plan(model, "auto", group, True), group)
    return model, whole, sharding


@contextmanager
def seen_in_full(model, sharding, group):
    """Show full weights to code outside the layers, as in a step of a run."""
    ParallelState.of(model).sharding = sharding
    views = FullViews(model, sharding.shards, MeshGroups(Mesh(tensor_parallel=group.size)), lambda: (), None)
    with views.in_step():
        yield


def compare(group, model, whole, sharding, lengths=(7, 8, 1), samples=2):
    for length in lengths:
        tokens = torch.randint(TOKENS, (samples, length), generator=torch.Generator().manual_seed(length))
        for one in (model, whole):
            one.zero_grad()
        with seen_in_full(model, sharding, group):
            output = model(tokens)
        y, expected = (getattr(one, "logits", one) for one in (output, whole(tokens)))
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        y.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        finish_gradients(model, sharding.shards, sharding.partial, group)
        same_by_name(model, whole, sharding.shards, group, "grad")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_kinds_of_blocks(group, kind):
    model, whole, sharding = divided(group, lambda: Language([kind_of_block(kind)() for _ in range(2)]))
    compare(group, model, whole, sharding)
    (region,) = sharding.plan.sequence_regions
    # An attention that also takes the residual gets both from the code of its block, which is one sublayer then.
    assert len(region.sublayers) == (2 if kind == "residual inside" else 4)
    assert not region.gathered
    with recorded_communication() as records:
        model(torch.zeros(2, 8, dtype=torch.long))
    # No gather besides those of Megatron, nor of the logits: attention and MLP in parallel share theirs.
    inside = [record.op for record in records if record.op != "all_reduce"]
    assert inside.count("all_gather") == (3 if kind == "parallel" else 5)
    assert inside.count("reduce_scatter") == 4


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["norm of its own", "Qwen3"])
@distributed(world_size=4)
def test_four_ranks(group, name):
    build = qwen3 if name == "Qwen3" else lambda: Language([Block(norm=RMSNorm) for _ in range(2)])
    compare(group, *divided(group, build), lengths=(7, 3), samples=1)


def qwen3():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=4, vocab_size=TOKENS)
    model = transformers.Qwen3ForCausalLM(config)
    for path, child in list(model.named_modules()):
        if "RMSNorm" in type(child).__name__:  # computes in single precision
            model.set_submodule(path, nn.RMSNorm(child.weight.shape, eps=1e-6))
    return model


@distributed(world_size=2)
def test_evaluation_and_gradients_in_it(group):
    model, whole, sharding = divided(group, qwen3)
    prompt = torch.arange(6).view(2, 3)
    for one in (model, whole):
        one.eval()
    generated = [one.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0) for one in (model, whole)]
    assert torch.equal(*generated), "one position a time, with a cache"
    compare(group, model, whole, sharding, lengths=(5,))
    with torch.no_grad(), recorded_communication() as records:
        model(prompt)
    assert not [record.op for record in records if record.op == "reduce_scatter"], "full sequences"


@distributed(world_size=2)
def test_recomputed_lengths_with_equal_parts(group):
    model, whole, sharding = divided(group, lambda: Language([Block() for _ in range(2)]))
    for one in (model, whole):
        for block in one.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        one.zero_grad()
        # Half of either is 4 on the first rank; the first is recomputed after the second has been divided.
        outputs = [one(torch.arange(2 * length).view(2, length) % TOKENS).pow(2).sum() for length in (7, 8)]
        sum(outputs).backward()
    finish_gradients(model, sharding.shards, sharding.partial, group)
    same_by_name(model, whole, sharding.shards, group, "grad")


@distributed(world_size=2)
def test_an_operation_that_mixes_positions_gathers_them(group):
    model, whole, sharding = divided(group, lambda: Language([kind_of_block("shifts")() for _ in range(2)]))
    compare(group, model, whole, sharding)
    (region,) = sharding.plan.sequence_regions
    assert region.sublayers == region.blocks == ("blocks.0", "blocks.1")


@distributed(world_size=2)
def test_a_block_with_parameters_behind_mixed_positions_is_left_whole(group):
    mixing = kind_of_block("shifts, then norms")
    model, whole, sharding = divided(group, lambda: Language([Block(), Block(), mixing(), Block()]))
    compare(group, model, whole, sharding)
    assert [region.blocks for region in sharding.plan.sequence_regions] == [("blocks.0", "blocks.1"), ("blocks.3",)]
    caption = str(sharding_table(model, sharding, 2).caption)
    assert "sequence sharded in blocks.0 to blocks.1" in caption
    assert "full sequences in blocks.2: its blocks compute other results" in caption


class Mixture(nn.Module):
    """Weighs what its layers compute by all positions."""

    def __init__(self, width=WIDTH, p=0.0):
        super().__init__()
        self.gate, self.dropout = nn.Linear(width, 1), nn.Dropout(p)
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x):
        weights = self.gate(x.mean(1, keepdim=True)).sigmoid()
        return self.dropout(weights * self.down(F.gelu(self.up(x))))


class Routed(Block):
    def __init__(self, p=0.0):
        super().__init__()
        self.mlp = Mixture(p=p)


@distributed(world_size=2)
def test_a_module_that_needs_all_positions_gets_them(group):
    model, whole, sharding = divided(group, lambda: Language([Routed() for _ in range(2)]))
    compare(group, model, whole, sharding)
    (region,) = sharding.plan.sequence_regions
    assert region.gathered == ("blocks.0.mlp", "blocks.1.mlp")
    assert region.sublayers == ("blocks.0.attention", "blocks.1.attention")
    assert "gathered for blocks.*.mlp" in str(sharding_table(model, sharding, 2).caption)
    # What all ranks compute is dropped alike.
    model, _, sharding = divided(group, lambda: Language([Routed(p=0.5) for _ in range(2)]))
    assert sharding.plan.sequence_regions[0].gathered
    masks = []
    for block in model.blocks:
        block.mlp.dropout.register_forward_hook(lambda _, args, y: masks.append((y == 0).to(torch.uint8)))
    masks.append(model(torch.arange(16).view(2, 8)).detach())
    assert all(torch.equal(*comm.all_gather(mask[None], group).unbind()) for mask in masks)


@distributed(world_size=2)
def test_dropout_differs_between_the_parts(group):
    model, _, _ = divided(group, lambda: Language([Block(p=0.5) for _ in range(2)]))
    masks = []
    for block in model.blocks:
        for layer in (block.attention.dropout, block.mlp[3]):
            layer.register_forward_hook(lambda _, args, y: masks.append((y.part == 0).to(torch.uint8)))
    state = torch.get_rng_state()
    y = model(torch.arange(16).view(2, 8))
    assert len(masks) == 4
    assert not any(torch.equal(*comm.all_gather(mask[None], group).unbind()) for mask in masks)
    for value in (torch.get_rng_state(), y.detach()):
        assert torch.equal(*comm.all_gather(value[None], group).unbind())
    torch.set_rng_state(state)
    assert torch.equal(model(torch.arange(16).view(2, 8)), y)


@distributed(world_size=2)
def test_functions_of_a_piece(group):
    lengths = shared_inputs(group, 1).lengths
    torch.manual_seed(0)
    whole = torch.randn(2, 5, 4, dtype=torch.float64)
    piece = whole.split(lengths.divide(5), 1)[group.rank].clone().requires_grad_()
    weight, bias = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    x = Piece.of(piece, group, 1, lengths.divide(5))
    assert (x.shape, x.size(1), x.dim(), x.dtype, x.requires_grad) == (whole.shape, 5, 3, whole.dtype, True)
    for function in (
        lambda x: F.layer_norm(x, (4,), bias),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1) * bias,
        lambda x: F.linear(x.float().double(), weight),
        lambda x: F.gelu(2 * x + x - 1) / (1 + x.abs()),
        lambda x: F.softmax(x, dim=2),
        lambda x: x.softmax(1),
        lambda x: x + whole,
        lambda x: x * whole[:, :1],
    ):
        result = function(x)
        assert isinstance(result, Piece)
        torch.testing.assert_close(result.whole(), function(x.whole()))
    for function in (
        lambda x: F.layer_norm(x, (5, 4)),
        lambda x: x.mean(1),
        lambda x: x.cumsum(1),
        lambda x: x + whole[None],
        lambda x: x.flatten(1),
        lambda x: x.mean(),
        lambda x: x[:, 0],
    ):
        result = function(x)
        assert not isinstance(result, Piece)
        torch.testing.assert_close(result, function(x.whole()))


@distributed(world_size=2)
def test_changes_of_a_piece_in_place(group):
    lengths = shared_inputs(group, 1).lengths
    whole = torch.arange(40, dtype=torch.float64).view(2, 5, 4)
    x = Piece.of(whole.split(lengths.divide(5), 1)[group.rank].clone(), group, 1, lengths.divide(5))
    y = x
    y += whole
    y.mul_(2)
    torch.testing.assert_close(x.whole(), 4 * whole)
    total = whole.clone()
    total.add_(x)
    torch.testing.assert_close(total, 5 * whole)
    for change in (lambda x: x.cumsum_(1), lambda x: x.__setitem__((0, 0), 0), lambda x: x[:, 1:3].mul_(2)):
        expected = x.whole().clone()
        change(expected)
        change(x)
        torch.testing.assert_close(x.whole(), expected)
        torch.testing.assert_close(x.part, expected.split(lengths.divide(5), 1)[group.rank])


class TopTwo(nn.Module):
    """Sends each token to two small networks."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        experts = (nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(3))
        self.experts = nn.ModuleList(experts)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        return y.view_as(x)


class ByHand(nn.Module):
    """Multiplies by its weights without layers, and looks at all positions."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, 24)), nn.Linear(24, WIDTH)

    def forward(self, x):
        return F.linear(F.gelu(torch.einsum("btd,dh->bth", x - x.mean(1, keepdim=True), self.up)), self.down.weight)


class Told(Block):
    """Returns its hidden states twice, once without a graph; appends a mean over all positions to a list."""

    def forward(self, x, means):
        means.append(x.mean(1, keepdim=True))
        y = super().forward(x)
        return {"hidden": y, "seen": [y.detach(), None]}


class Looking(Language):
    def forward(self, tokens):
        x, seen, means = self.embedding(tokens), 0.0, []
        for block in self.blocks:
            found = block(x, means)
            x, seen = found["hidden"], seen + found["seen"][0].mean(1, keepdim=True)
        return self.head(self.norm(x + seen + sum(means)))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [TopTwo, ByHand, Told])
@distributed(world_size=2)
def test_routers_products_by_hand_and_further_outputs(group, kind):
    def build():
        torch.manual_seed(0)
        model = Looking([Told(), Told()]) if kind is Told else Language([Block(), Block()])
        for block in model.blocks if kind is not Told else ():
            block.mlp = kind()
        return model

    model, whole, sharding = divided(group, build)
    compare(group, model, whole, sharding)
    (region,) = sharding.plan.sequence_regions
    assert region.gathered == (() if kind is Told else ("blocks.0.mlp", "blocks.1.mlp"))


@distributed(world_size=2)
def test_experts_get_all_positions(group):
    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, head_dim=4, vocab_size=TOKENS)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    plan = make_plan(transformers.Qwen3MoeForCausalLM(config), "auto", group, True)
    (region,) = plan.sequence_regions
    assert region.gathered == tuple(f"model.layers.{number}.mlp" for number in range(2))
    assert region.sublayers == tuple(f"model.layers.{number}.self_attn" for number in range(2))


class BetweenBlocks(Language):
    """Has code between its blocks, of which each is right by itself."""

    kind = ""

    def __init__(self):
        super().__init__([Block() for _ in range(4)])
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.blocks)

    def forward(self, tokens):
        x = first = self.embedding(tokens)
        for number, (block, norm) in enumerate(zip(self.blocks, self.norms)):
            if self.kind == "unseen" and not number:
                assert int(tokens.max()) < TOKENS  # fails without data
            if self.kind in ("residual", "unseen"):
                x = x + block(norm(x))
            elif self.kind == "mean" and number == 2:
                x = block(x + x.mean(1, keepdim=True))
            elif self.kind == "in place" and number:
                x = block(x.add_(0.1))
            elif self.kind == "skip" and number == 3:
                x = block(x + first)
            else:
                x = block(x.to(torch.float64))
            if not number and self.kind == "skip":
                first = x
        return self.head(self.norm(x))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["residual", "unseen", "mean", "in place", "skip"])
@distributed(world_size=2)
def test_blocks_with_code_between_them_are_divided_each_by_itself(group, kind):
    model, whole, sharding = divided(group, type("Kind", (BetweenBlocks,), {"kind": kind}))
    compare(group, model, whole, sharding, lengths=(7, 2))
    runs = {"mean": [(0, 1), (2, 3)], "skip": [(0,), (1, 2), (3,)]}.get(kind, [(0,), (1,), (2,), (3,)])
    expected = [tuple(f"blocks.{number}" for number in run) for run in runs]
    assert [region.blocks for region in sharding.plan.sequence_regions] == expected
    if len(runs) == 4:
        caption = str(sharding_table(model, sharding, 2).caption)
        assert "full sequences between blocks.0, blocks.1, blocks.2, blocks.3: the model may change" in caption


class NormByHand(Block):
    """Computes with the weight of its norm by hand."""

    def forward(self, x):
        x = x + self.attention(F.layer_norm(x, self.norm.normalized_shape, self.norm.weight, self.norm.bias))
        return x + self.mlp(self.norm_again(x))


class UsedTwice(Language):
    """Uses modules or weights of its blocks in two places."""

    kind = ""

    def __init__(self):
        super().__init__([Block() for _ in range(3)])
        first, second, third = self.blocks
        if self.kind == "shared modules":
            third.attention, second.norm, third.norm = first.attention, first.norm, self.norm
        elif self.kind == "shared mlp":
            second.mlp = third.mlp = first.mlp
        elif self.kind == "shared parameters":
            second.mlp[0].weight, third.norm.weight = first.mlp[0].weight, self.norm.weight
        elif self.kind == "one norm in a block":
            first.norm_again = first.norm
        elif self.kind == "by hand in a block":
            self.blocks[1] = NormByHand()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number == 1 and self.kind == "not called":
                x = x + block.attention(block.norm(x) + block.mlp(x))
            else:
                x = block(x)
            if number == 1 and self.kind == "called outside":
                x = x + block.mlp(block.norm(block(x)))
            if number == 1 and self.kind == "recomputed outside":
                x = x + checkpoint(block.mlp, x, use_reentrant=False)
            if number == 1 and self.kind == "computed by hand":
                x = x + F.linear(F.linear(x, block.mlp[0].weight, block.mlp[0].bias), block.mlp[2].weight)
        y = self.head(self.norm(x))
        if self.kind == "read by hand":
            weights = [self.blocks[0].mlp[0].weight, self.blocks[0].mlp[2].weight, self.blocks[1].norm.weight]
            y = y + sum(weight.pow(2).sum() for weight in weights)
        return y


# The blocks of each region, and the modules that get full sequences in these blocks.
TWICE = {
    "shared modules": (["0-2"], ["blocks.2.norm"]),
    "shared mlp": (["0-2"], []),
    "shared parameters": (["0-2"], ["blocks.2.norm"]),
    "one norm in a block": (["0-2"], []),
    "by hand in a block": (["0-2"], []),
    "not called": (["0", "2"], []),
    "called outside": (["0", "1", "2"], ["blocks.1.norm", "blocks.1.mlp"]),
    "recomputed outside": (["0-1", "2"], ["blocks.1.mlp"]),
    "computed by hand": (["0-1", "2"], []),
    "read by hand": (["0-2"], []),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", TWICE)
@distributed(world_size=2)
def test_modules_and_weights_that_are_used_in_two_places(group, kind):
    model, whole = (type("Kind", (UsedTwice,), {"kind": kind})().double() for _ in range(2))
    whole.load_state_dict(model.state_dict())
    trace = record_step(model, model, torch.zeros(2, 8, dtype=torch.long), torch.device("cpu"))
    sharding = apply_plan(model, make_plan(model, "auto", group, True, lambda: trace), group)
    compare(group, model, whole, sharding, lengths=(7, 8))
    runs, gathered = TWICE[kind]
    regions = sharding.plan.sequence_regions
    blocks = [[path.removeprefix("blocks.") for path in region.blocks] for region in regions]
    assert [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in blocks] == runs
    assert {path for region in regions for path in region.gathered} == {*gathered}
    caption = str(sharding_table(model, sharding, 2).caption)
    assert all(f"full sequences in {path}: code " in caption for path in gathered)
    with torch.no_grad():  # a step of evaluation may call more modules outside their blocks
        torch.testing.assert_close(
            model.eval().blocks[0].mlp(torch.ones(2, 5, WIDTH).double()),
            whole.eval().blocks[0].mlp(torch.ones(2, 5, WIDTH).double()),
        )


@distributed(world_size=2)
def test_a_later_use_outside_a_block(group):
    model, whole, sharding = divided(group, lambda: Language([Block() for _ in range(2)]))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    for one in (model, whole):
        with seen_in_full(one, sharding, group) if one is model else nullcontext():
            norm, mlp, x = one.blocks[1].norm, one.blocks[0].mlp, one.embedding(tokens)
            loss = one(tokens).sum() + norm.weight.square().sum() + norm(x).pow(3).sum() + mlp(x).pow(3).sum()
        loss.backward()
    finish_gradients(model, sharding.shards, sharding.partial, group)
    same_by_name(model, whole, sharding.shards, group, "grad")


class Selected(nn.Module):
    """Gives each of its experts, which are of different widths, the tokens that go there."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH)) for width in (8, 12, 16, 20)
        )

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (at,) = (chosen == number).nonzero(as_tuple=True)
            result = result.index_add(0, at, expert(tokens[at]) * weights[at, None])
        return result.reshape(x.shape)


class Selecting(Block):
    """Its attention cannot be divided by heads."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = nn.Identity(), Selected()


@distributed(world_size=2)
def test_experts_of_different_widths_are_no_stack_of_blocks(group):
    class Both(Language):
        def __init__(self):
            super().__init__([Block()])
            self.mixed = nn.ModuleList([kind_of_block("shifts")(), Selecting()])

        def forward(self, tokens):
            x = self.blocks[0](self.embedding(tokens))
            for block in self.mixed:
                x = block(x)
            return self.head(self.norm(x))

    model, whole, sharding = divided(group, Both)
    compare(group, model, whole, sharding)
    assert not any("experts" in path for region in sharding.plan.sequence_regions for path in region.blocks)


class Decaying(Language):
    """Adds decay by hand of one weight in a block to its output."""

    def forward(self, tokens):
        return super().forward(tokens) + self.blocks[0].mlp[2].weight.pow(2).sum()


@distributed(world_size=2)
def test_a_weight_that_code_outside_its_block_trains_has_no_partial_gradient(group):
    model, whole, sharding = divided(group, lambda: Decaying([Block() for _ in range(2)]))
    compare(group, model, whole, sharding)
    assert "blocks.0.mlp.2.weight" not in {*sharding.shards, *sharding.partial}


class Packed(Language):
    """Gives its blocks a mask that it makes of values: a token 0 begins a document."""

    kind = ""

    def __init__(self):
        super().__init__([GivenMask() for _ in range(2)])

    def mask(self, tokens):
        if self.kind == "on the default device":
            documents = (tokens == 0).cumsum(1)
        elif self.kind == "numpy":
            documents = torch.from_numpy(np.cumsum(tokens.numpy() == 0, 1))
        else:
            documents = torch.tensor([[row[: at + 1].count(0) for at in range(len(row))] for row in tokens.tolist()])
        return (documents[:, :, None] == documents[:, None]) & torch.ones(2 * (tokens.shape[1],)).tril().bool()

    def forward(self, tokens, mask=None):
        x = self.embedding(tokens)
        mask = self.mask(tokens)[:, None] if self.kind != "given" else mask.bool()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class MaskedAttention(Attention):
    def forward(self, x, mask):
        b, t, c = x.size()
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in self.qkv(x).split(c, 2))
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(b, t, c))


class GivenMask(Block):
    """Cannot be called with its hidden states alone."""

    def __init__(self):
        super().__init__()
        self.attention = MaskedAttention(WIDTH)

    def forward(self, x, mask):
        x = x + self.attention(self.norm(x), mask)
        return x + self.mlp(self.norm_again(x))


@distributed(world_size=2)
def test_blocks_are_called_with_what_the_model_makes_of_values(group):
    for kind in ("on the default device", "numpy", "loops"):
        model, whole, sharding = divided(group, type("Kind", (Packed,), {"kind": kind}))
        compare(group, model, whole, sharding, lengths=(7,))
        assert sharding.plan.sequence_regions
    with pytest.raises(
        ValueError, match=r"missing 1 required.*'mask'\), and .* not seen.*'NoneType'.*no attribute 'bool'"
    ):
        divided(group, type("Kind", (Packed,), {"kind": "given"}))


class Parametrized(Block):
    def __init__(self, norm):
        super().__init__()
        norm(self.mlp[0])


class Counting(Routed):
    """Changes a buffer in each step, as a router without a loss for its balance does."""

    def __init__(self):
        super().__init__()
        self.mlp.register_buffer("bias", torch.zeros(1))

    def forward(self, *args):
        x = super().forward(*args) + self.mlp.bias
        if self.training:
            self.mlp.bias += 0.1
        return x


def pruned(layer):
    prune.random_unstructured(layer, "weight", 0.3)
    prune.random_unstructured(layer, "bias", 0.3)


NORMS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "pruned": pruned,
    "pruned bias": functools.partial(prune.random_unstructured, name="bias", amount=0.3),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [*NORMS, "a buffer that changes"])
@distributed(world_size=2)
def test_blocks_that_change_in_a_trial_or_refuse_to_be_copied(group, kind):
    make = Counting if kind not in NORMS else functools.partial(Parametrized, NORMS[kind])
    model, whole, sharding = divided(group, lambda: Language([make() for _ in range(2)]))
    assert sharding.plan.sequence_regions
    compare(group, model, whole, sharding)
