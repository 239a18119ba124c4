"""Sequence parallelism over a stack of blocks against one process."""

import copy
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import comm
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.layers import Column, Replicate, Row
from lightning_parallel.tensor.plan import apply_plan
from lightning_parallel.tensor.sequence_plan import sequence_parallel_styles
from lightning_parallel.tensor.sequence_regions import divide_sequence
from lightning_parallel.tensor.sharding import ShardPart
from tests.harness import distributed, recorded_communication, run
from tests.tensor.oracle import divide, finish_gradients, same_by_name


class Block(nn.Module):
    def __init__(self, width=12, size=3, p=0.0):
        super().__init__()
        self.norm, self.norm_again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 10), nn.Linear(10, width)
        self.size, self.dropout = size, nn.Dropout(p)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(y))
        return x + self.scale * self.down(F.gelu(self.up(self.norm_again(x))))


class Model(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.embedding = nn.Embedding(9, 12)
        self.blocks = nn.Sequential(Block(p=p), Block(p=p))
        self.head = nn.Linear(12, 9)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


HEADS = (ShardPart(12, 3),)
STYLES = {"qkv": Column(parts=HEADS * 3), "out": Row(parts=HEADS), "up": Column(), "down": Row()}


def build(group, p=0.0):
    torch.manual_seed(0)
    model = Model(p).double()
    whole = copy.deepcopy(model)
    styles = {}
    for i, block in enumerate(model.blocks):
        styles |= {
            f"blocks.{i}.{path}".rstrip("."): style for path, style in sequence_parallel_styles(block, STYLES).items()
        }
    rules, partial = divide(model, styles, group)
    divide_sequence(model, list(model.blocks), group)
    return model, whole, rules, partial


@pytest.mark.parametrize("world", [2, 3])
def test_equals_one_process(world):
    run(equals_one_process, world)


def equals_one_process(group):
    model, whole, rules, partial = build(group)
    norms = {f"{norm}.{name}" for norm in ("norm", "norm_again") for name in ("weight", "bias")}
    assert {name.split(".", 2)[2] for name in partial - rules.keys()} == norms | {"scale", "out.bias", "down.bias"}
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, whole)]
    for length in (5, 8, 4):
        tokens = torch.randint(9, (2, length))
        with recorded_communication() as records:
            y = model(tokens)
        assert [record.op for record in records] == [*["all_gather", "reduce_scatter"] * 4, "all_gather"]
        expected = whole(tokens)
        torch.testing.assert_close(y, expected)
        for optimizer in optimizers:
            optimizer.zero_grad()
        y.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        finish_gradients(model, rules, partial, group)
        same_by_name(model, whole, rules, group, "grad")
        for optimizer in optimizers:
            optimizer.step()
    same_by_name(model, whole, rules, group, "data")


@distributed(world_size=2)
def test_dropout_differs_between_the_ranks_inside_only(group):
    model, *_ = build(group, p=0.5)
    masks = []
    for block in model.blocks:
        block.dropout.register_forward_hook(lambda _, inputs, y: masks.append((y == 0).to(torch.uint8)))
    tokens = torch.randint(9, (2, 8))
    state = torch.get_rng_state()
    y = model(tokens)
    assert not any(torch.equal(*comm.all_gather(mask[None], group).unbind()) for mask in masks)
    assert torch.equal(*comm.all_gather(torch.get_rng_state()[None], group).unbind())
    torch.set_rng_state(state)
    assert torch.equal(model(tokens), y)
    with pytest.raises(IndexError):
        model(tokens + 9)
    assert torch.equal(*comm.all_gather(torch.get_rng_state()[None], group).unbind())


def test_styles_that_need_the_whole_sequence_are_refused():
    block = Block()
    for style in (Column(gather_output=True), Row(split_input=True)):
        with pytest.raises(ValueError, match="`up` does not support sequence parallelism"):
            sequence_parallel_styles(block, {"up": style})
    assert sequence_parallel_styles(block, {"norm": Replicate()})["norm"] == Replicate(partial_gradient=True)


class BetweenBlocks(Model):
    """Changes or reads the hidden states between its blocks, or leaves blocks out, as no run without data has shown."""

    kind, left_out = "", None

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(GivenContext() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(12))
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in self.blocks)
        self.register_buffer("positions", torch.randn(9, 12))
        self.seen = []
        for block in self.blocks:
            block.register_forward_hook(lambda _, args, y: self.seen.append(y))

    def forward(self, tokens):
        self.seen.clear()
        x = self.embedding(tokens)
        context = x.detach().mean((0, 1))
        outputs = []
        for number, (block, norm) in enumerate(zip(self.blocks, self.norms)):
            if self.kind == "positions":
                x = x + self.positions[: x.shape[1]]
            elif self.kind == "in place" and block is not self.blocks[0]:
                x.add_(self.positions[: x.shape[1]])
            elif self.kind == "mean":
                x = x + x.mean(1, keepdim=True)
            elif self.kind == "scale":
                x = x * self.scale
            elif self.kind == "norm":
                x = norm(x)
            if number != self.left_out:
                x = block(x, context)
            if self.kind == "context":
                context = x.detach().mean((0, 1))
            if self.kind == "heads":
                outputs.append(self.head(x))
            elif self.kind == "pooled":
                outputs.append(self.head(x.mean(1))[:, None])
        if self.kind == "hooks":
            outputs = [self.head(y) for y in self.seen]
        return torch.cat([*outputs, self.head(x)], 1)


class GivenContext(Block):
    def forward(self, x, context=None):
        return super().forward(x if context is None else x + context)


def between_blocks(group, kind, stages=False):
    model, whole = (BetweenBlocks().double() for _ in range(2))
    whole.load_state_dict(model.state_dict())
    plan = make_plan(
        model, {"*.qkv": STYLES["qkv"], "*.out": STYLES["out"], "*.up": "column", "*.down": "row"}, group, True
    )
    plan.sequence_regions = [dataclasses.replace(region, sends_pieces=stages) for region in plan.sequence_regions]
    assert [len(region.blocks) for region in plan.sequence_regions] == [3]
    sharding = apply_plan(model, plan, group)
    for each in (model, whole):
        each.kind, each.left_out = kind, int(kind[-1]) if kind.startswith("without") else None
    return model, whole, sharding


KINDS = ("positions", "in place", "mean", "scale", "norm", "context")
READ = ("heads", "pooled", "hooks", "without 0", "without 1", "without 2")


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_code_between_blocks_gets_whole_sequences(group):
    for kind in (*KINDS, *READ):
        model, whole, sharding = between_blocks(group, kind)
        for length in (7, 2):
            tokens = torch.arange(2 * length).view(2, length) % 9
            for each in (model, whole):
                each.zero_grad()
            y, expected = model(tokens), whole(tokens)
            torch.testing.assert_close(y, expected, msg=lambda text, kind=kind: f"{kind}: {text}")
            y.pow(2).sum().backward()
            expected.pow(2).sum().backward()
            finish_gradients(model, sharding.shards, sharding.partial, group)
            same_by_name(model, whole, sharding.shards, group, "grad")


@distributed(world_size=2)
def test_hidden_states_that_change_between_blocks_of_stages_are_refused(group):
    tokens = torch.arange(14).view(2, 7) % 9
    for kind in KINDS:
        model, *_ = between_blocks(group, kind, stages=True)
        with pytest.raises(RuntimeError, match=r"reads the output of `blocks.0` \(`|`blocks.1` takes a tensor"):
            model(tokens)


@pytest.mark.sweep
@pytest.mark.parametrize("stages", [False, True])
@distributed(world_size=2)
def test_blocks_that_feed_each_other_are_not_refused(group, stages):
    for reentrant in (None, False, True):
        model, whole, sharding = between_blocks(group, "", stages)
        tokens = torch.arange(14).view(2, 7) % 9
        if reentrant is not None:
            for block in model.blocks:
                run = block.forward
                block.forward = functools.partial(checkpoint, run, use_reentrant=reentrant)
        for _ in range(2):
            model(tokens).sum().backward()
            whole(tokens).sum().backward()
        with torch.inference_mode():
            assert model.eval()(tokens).shape == (2, 7, 9)
        copy.deepcopy(model)(tokens).sum().backward()
        finish_gradients(model, sharding.shards, sharding.partial, group)
        same_by_name(model, whole, sharding.shards, group, "grad")


@distributed(world_size=2)
def test_reentrant_checkpoints_around_blocks(group):
    for kind in ("", "heads", "without 2"):
        model, whole, sharding = between_blocks(group, kind)
        for each in (model, whole):
            each.blocks = _Checkpointed(each.blocks)
            each(torch.arange(14).view(2, 7) % 9).pow(2).sum().backward()
        finish_gradients(model, sharding.shards, sharding.partial, group)
        same_by_name(model, whole, sharding.shards, group, "grad")


class _Checkpointed(nn.ModuleList):
    def __iter__(self):
        return (functools.partial(checkpoint, block, use_reentrant=True) for block in super().__iter__())
