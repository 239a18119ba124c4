"""Dropout: equal on all ranks where activations are, different where they are divided, and reproducible."""

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.tensor.attention import TransformerLayer
from lightning_parallel.tensor.layers import Column, Row
from lightning_parallel.tensor.regions import QUIET, RandomRegion
from lightning_parallel.tensor.sequence_plan import sequence_parallel_styles
from lightning_parallel.tensor.sequence_regions import divide_sequence
from tests.harness import distributed
from tests.tensor.oracle import divide, finish_gradients, same_by_name


class Block(nn.Module):
    """Notes its random draws: after the stream's dropout (all alike) and inside the MLP (of this rank)."""

    def __init__(self, width=8, hidden=64, p=0.5):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.inside, self.outside = nn.Dropout(p), nn.Dropout(p)
        self.masks = []

    def forward(self, x):
        h = self.up(x)
        inside = self.inside(torch.ones_like(h))
        y = self.down(h * inside)
        outside = self.outside(torch.ones_like(y))
        self.masks.append((inside.detach(), outside.detach()))
        return x + y * outside


class Attend(nn.Module):
    """Separate projections and fused attention dropout, which no module announces."""

    def __init__(self, width=8, size=2, p=0.5):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.size, self.p = size, p

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(-2, -3) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)
        return self.out(y.transpose(-2, -3).flatten(-2))


class Model(nn.Module):
    def __init__(self, blocks=3, reentrant=None, p=0.5):
        super().__init__()
        self.blocks = nn.ModuleList(Block(p=p) for _ in range(blocks))
        self.attend = Attend(p=p)
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x + (
            self.attend(x) if self.reentrant is None else checkpoint(self.attend, x, use_reentrant=self.reentrant)
        )

    def styles(self):
        styles = {f"attend.{name}": Column(unit=2) for name in "qkv"} | {"attend.out": Row(unit=2)}
        for i in range(len(self.blocks)):
            styles |= {f"blocks.{i}.up": Column(), f"blocks.{i}.down": Row()}
        return styles


def gathered(group, tensor):
    return list(comm.all_gather(tensor[None].contiguous(), group).unbind())


def build(group, **options):
    torch.manual_seed(1)
    model = Model(**options)
    divide(model, model.styles(), group)
    return model


@distributed(world_size=2)
def test_equal_where_replicated_and_different_where_divided(group):
    model = build(group)
    x = torch.randn(16, 8)
    torch.manual_seed(5)
    y = model(x)
    state = torch.get_rng_state()
    masks = [mask for block in model.blocks for mask in block.masks]
    for inside, outside in masks:
        first, second = gathered(group, inside)
        assert 0.3 < (first == 0).float().mean() < 0.7
        agreement = ((first == 0) == (second == 0)).float().mean()
        assert 0.4 < agreement < 0.6, "independent masks agree half of the time"
        assert torch.equal(*gathered(group, outside))
    assert not torch.equal(masks[0][0], masks[1][0]), "no stream is used twice"
    assert not torch.equal(masks[0][1], masks[1][1])
    assert torch.equal(*gathered(group, y))
    assert torch.equal(*gathered(group, state))
    torch.manual_seed(5)
    assert torch.equal(model(x), y)
    assert torch.equal(torch.get_rng_state(), state)


@distributed(world_size=2)
def test_no_stream_is_used_twice_when_nothing_else_draws(group):
    model = build(group)
    for block in model.blocks:
        block.outside.p = 0.0
    model(torch.ones(16, 8))
    first, second, third = (block.masks[0][0] for block in model.blocks)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


@distributed(world_size=3)
def test_uneven_shards_draw_different_numbers_and_stay_in_step(group):
    torch.manual_seed(1)
    model = Block(hidden=7)
    divide(model, {"up": Column(), "down": Row()}, group)
    for _ in range(3):
        first, *others = gathered(group, model(torch.ones(4, 8)))
        assert all(torch.equal(first, other) for other in others)
    first, *others = gathered(group, torch.get_rng_state())
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("train", [True, False])
@distributed(world_size=2)
def test_without_dropout_the_random_numbers_are_those_of_one_process(group, train):
    model = build(group, p=0.0 if train else 0.5).train(train)
    before = torch.get_rng_state()
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.region.is_open for module in model.modules() if hasattr(module, "region"))


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(world_size=2)
def test_recomputation_draws_the_same(group, reentrant):
    plain, recomputing = build(group), build(group, reentrant=reentrant)
    for step in range(2):
        grads = []
        for model in (plain, recomputing):
            torch.manual_seed(step)
            model.zero_grad()
            for block in model.blocks:
                block.masks.clear()
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
            model(x).pow(2).sum().backward()
            grads.append([x.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()])
        assert all(torch.equal(mine, other) for mine, other in zip(*grads))
    for block in recomputing.blocks:
        forward, *again = block.masks
        assert len(again) == 1 or not reentrant
        assert all(torch.equal(mine, other) for masks in again for mine, other in zip(forward, masks))


@distributed(world_size=2)
def test_a_checkpoint_inside_a_region(group):
    class Inner(Block):
        def forward(self, x):
            h = checkpoint(lambda x: self.inside(F.gelu(self.up(x))), x, use_reentrant=False)
            return self.outside(self.down(h))

    grads = []
    for kind in (
        Inner,
        type("Plain", (Block,), {"forward": lambda s, x: s.outside(s.down(s.inside(F.gelu(s.up(x)))))}),
    ):
        torch.manual_seed(0)
        model = kind()
        divide(model, {"up": Column(), "down": Row()}, group)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(mine, other) for mine, other in zip(*grads))


@distributed(world_size=2)
def test_an_exception_inside_a_region_closes_it(group):
    model, x = build(group), torch.ones(4, 8)
    torch.manual_seed(3)
    expected = [model(x), model(x)]

    def fail(*_):
        raise ArithmeticError

    torch.manual_seed(3)
    model(x)
    state = torch.get_rng_state()
    handle = model.blocks[1].inside.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        model(x)
    handle.remove()
    assert torch.equal(*gathered(group, torch.get_rng_state()))
    assert torch.equal(*gathered(group, model(x)))
    torch.set_rng_state(state)
    assert torch.equal(model(x), expected[1])


@distributed(world_size=2)
def test_a_layer_without_a_counterpart_opens_nothing(group):
    model = nn.ModuleDict({"block": Block(), "head": nn.Linear(8, 32)})
    divide(model, {"block.up": Column(), "block.down": Row(), "head": Column()}, group)
    logits = model["head"](model["block"](torch.ones(4, 8)))
    assert logits.shape == (4, 16)
    assert torch.equal(*gathered(group, F.dropout(torch.ones(50))))


@distributed(world_size=2)
def test_reseeding_inside_a_region_is_respected(group):
    region = RandomRegion(group)
    region.open(torch.device("cpu"))
    assert region.is_open
    torch.manual_seed(11)
    assert not region.is_open
    region.close()
    assert torch.initial_seed() == 11
    with region.scope(torch.device("cpu")), region.scope(torch.device("cpu")):
        assert region.is_open
    assert torch.initial_seed() == 11


@distributed(world_size=2)
def test_torch_transformer_layers(group):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 4, 32, dropout=0.5)
    divide(model, {"": TransformerLayer()}, group)
    drawn = []
    model.dropout.register_forward_hook(lambda _, inputs, output: drawn.append(output == 0))
    for _ in range(2):
        assert torch.equal(*gathered(group, model(torch.ones(5, 3, 8))))
    assert not torch.equal(*gathered(group, drawn[0].to(torch.uint8)))
    assert torch.equal(*gathered(group, torch.get_rng_state()))


def _own(x, generator=torch.Generator()):  # noqa: B008
    return torch.rand(x.shape[0], 1, 1, generator=generator)


WHOLE = {
    "a mask of samples": lambda x: (torch.rand(x.shape[0], 1, 1) < 0.5).to(x),
    "in place": lambda x: x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5),
    "dropout of ones": lambda x: F.dropout(torch.ones(x.shape[0], 1, 1), 0.5),
    "bernoulli": lambda x: torch.bernoulli(torch.full((x.shape[0], 1, 1), 0.5)),
    "normal": lambda x: torch.normal(0.0, 1.0, (x.shape[0], 1, 1)),
    "one number": lambda x: torch.rand(()) * 2,
    "a number as an argument": lambda x: torch.rand(1).item(),
    "a branch": lambda x: 2.0 if torch.rand(1).item() < 0.5 else 0.0,
    "an index": lambda x: torch.randint(0, 7, (x.shape[0], 1, 1)),
    "an order of samples": lambda x: torch.randperm(x.shape[0]).view(-1, 1, 1),
    "an own generator": _own,
    "positional size": lambda x: torch.rand((x.size(0), 1, 1)),
}


class Masked(nn.Module):
    """A block that multiplies by what it draws: on the residual stream, inside of its MLP, or both."""

    def __init__(self, draw, places, p=0.0, hidden=24):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.draw, self.places, self.p = draw, places, p

    def forward(self, x):
        h = F.gelu(self.up(self.norm(x)))
        h = F.dropout(h, self.p)
        y = self.down(h * self.draw(h) if "inside" in self.places else h)
        return x + F.dropout(y * self.draw(y) if "stream" in self.places else y, self.p)


class Stack(nn.Module):
    def __init__(self, *args, reentrant=None, **kwargs):
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(Masked(*args, **kwargs) for _ in range(2)), reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def divided_stack(group, model, sequence):
    dim = 1 if sequence else None
    styles = {}
    for i, block in enumerate(model.blocks):
        inner = {"up": Column(), "down": Row()}
        inner = inner if dim is None else sequence_parallel_styles(block, inner)
        styles |= {f"blocks.{i}.{name}": style for name, style in inner.items()}
    rules = divide(model, styles, group)
    if sequence:
        divide_sequence(model, list(model.blocks), group)
    return rules


@pytest.mark.sweep
@pytest.mark.parametrize("sequence", [False, True])
@distributed(world_size=2)
def test_what_is_drawn_for_whole_samples_is_that_of_one_process(group, sequence):
    x = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0))  # as many samples as positions of a rank
    for (name, draw), places in itertools.product(WHOLE.items(), (["stream"], ["inside"], ["stream", "inside"])):
        for reentrant in (None, False) if name == "a mask of samples" else (None,):
            torch.manual_seed(1)
            model = Stack(draw, places, reentrant=reentrant)
            whole = copy.deepcopy(model)
            rules, partial = divided_stack(group, model, sequence)
            for _ in range(2):
                results = []
                for one in (whole, model):
                    one.zero_grad()
                    torch.manual_seed(5)
                    _own.__defaults__[0].manual_seed(5)
                    y = one(x)
                    y.square().sum().backward()
                    results.append((y, torch.get_rng_state()))
                torch.testing.assert_close(*(y for y, _ in results), msg=f"{name} {places}")
                assert torch.equal(*(state for _, state in results)), (name, places)
                finish_gradients(model, rules, partial, group)
                same_by_name(model, whole, rules, group, "grad", 1e-4)


@pytest.mark.parametrize("length", [8, 7, 2])
@distributed(world_size=2)
def test_masks_of_samples_and_dropout_in_one_region(group, length):
    for sequence, hidden in itertools.product((False, True), (24, 25, 6)):
        drawn = []

        def draw(h, drawn=drawn):
            drawn.append((torch.rand(h.shape[0], 1, 1) < 0.5).to(h))
            return drawn[-1]

        torch.manual_seed(1)
        model = Stack(draw, ["stream", "inside"], p=0.3, hidden=hidden)
        divided_stack(group, model, sequence)
        for _ in range(2):
            y = model(torch.ones(4, length, 8))
            y.sum().backward()
            assert torch.equal(*gathered(group, y))
        assert all(torch.equal(*gathered(group, mask)) for mask in drawn)
        assert torch.equal(*gathered(group, torch.get_rng_state()))


def _attention(h, rate=0.0):
    q = h.unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q, None, rate).squeeze(1)


OFF = {
    "rate zero": functools.partial(F.dropout, p=0.0),
    "evaluation": lambda h: F.dropout(h, 0.5, False),
    "attention": _attention,
    "randomized leaky units": lambda h: F.rrelu(h, training=False),
}


@distributed(world_size=2)
def test_what_draws_nothing_moves_no_stream_where_parts_are_uneven(group):
    for (name, off), sequence, hidden, length in itertools.product(OFF.items(), (False, True), (24, 25), (8, 7, 1)):
        torch.manual_seed(1)
        model = Stack(off, ["stream", "inside"], hidden=hidden)
        divided_stack(group, model, sequence)
        before = torch.get_rng_state()
        model(torch.ones(4, length, 8)).sum().backward()
        assert torch.equal(before, torch.get_rng_state()), (name, sequence, hidden, length)


@distributed(world_size=2)
def test_a_region_that_drew_nothing_is_opened_when_it_does(group):
    for reentrant in (None, False, True):
        model = build(group, p=0.0, reentrant=reentrant)
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for _ in range(QUIET // 4 + 1):
            model(x).sum().backward()
        region = model.blocks[0].up.region
        assert not region.is_open
        assert region._quiet == QUIET
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        for block in model.blocks:
            block.masks.clear()
        for _ in range(2):
            assert torch.equal(*gathered(group, model(x)))
            model(x).sum().backward()
            assert torch.equal(*gathered(group, torch.get_rng_state()))
        for block in model.blocks:
            if reentrant is not None:
                assert len(block.masks) == 6
                assert all(map(torch.equal, block.masks[1], block.masks[2]))
                assert all(map(torch.equal, block.masks[4], block.masks[5]))
            assert not torch.equal(*gathered(group, block.masks[-1][0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_of_a_gpu():
    device, drawn = torch.device("cuda", 0), []
    for rank in range(2):
        region = RandomRegion(Group("tensor_parallel", (0, 1), rank, None))
        torch.cuda.manual_seed(7)
        before = torch.cuda.get_rng_state(device)
        with region.scope(device):
            pass
        assert torch.equal(torch.cuda.get_rng_state(device), before), "a region that draws nothing leaves no trace"
        with region.scope(device):
            inside = torch.rand(1000, device=device)
        between = torch.rand(1000, device=device)
        with region.scope(device):
            again = torch.rand(1000, device=device)
        drawn.append((inside, between, again, torch.cuda.get_rng_state(device)))
    (inside, between, again, state), other = drawn
    assert torch.equal(between, other[1])
    assert torch.equal(state, other[3])
    streams = [inside, between, again, other[0], other[2]]
    assert not any(torch.equal(a, b) for i, a in enumerate(streams) for b in streams[:i])
