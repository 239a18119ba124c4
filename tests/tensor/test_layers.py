"""Column, row and vocabulary layers against the same layers in one process."""

import copy
import gc
import pickle
import time
import weakref
from contextlib import nullcontext
from functools import partial as partial_of
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.comm.kept import KeptResults
from lightning_parallel.compat import patched
from lightning_parallel.tensor import linear
from lightning_parallel.tensor.autograd import (
    all_gather_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    scatter_to_group,
)
from lightning_parallel.tensor.layers import (
    Column,
    ColumnLinear,
    Replicate,
    Row,
    RowLinear,
    Vocab,
    VocabEmbedding,
    convert,
)
from lightning_parallel.tensor.linear import shared_inputs
from lightning_parallel.tensor.pieces import Piece
from lightning_parallel.tensor.sharding import Shard, ShardPart, balanced
from tests.harness import distributed, recorded_communication, run
from tests.strict_order import strict_order
from tests.tensor.oracle import check, divide, finish_gradients, same_by_name

WORLDS = pytest.mark.parametrize("world", [2, 3])  # shards of one size and of several


class Conv1D(nn.Module):
    """The layer of that name in transformers: a linear layer with a transposed weight."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def __repr__(self):
        return "Conv1D(...)"

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Gated(nn.Module):
    """An MLP whose two input layers share their input, with a bias everywhere."""

    def __init__(self, width=6, hidden=10):
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Grouped(nn.Module):
    """Attention with fewer key/value heads than query heads, a norm per head, and one packed projection."""

    def __init__(self, heads=4, key_heads=2, size=4, width=8):
        super().__init__()
        self.size = size
        self.sizes = [heads * size, key_heads * size, key_heads * size]
        self.qkv = nn.Linear(width, sum(self.sizes))
        self.norm = nn.LayerNorm(size)
        self.out = nn.Linear(heads * size, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        y = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def double(*shape):
    return torch.randn(*shape, dtype=torch.double)


MLP = {"gate": Column(), "up": Column(), "down": Row()}


@WORLDS
def test_pair(world):
    run(pair, world)


def pair(group):
    x = double(3, 5, 6)
    check(Gated().double(), MLP, [x], group)
    check(Gated().double(), MLP, [x[0, 0]], group)
    check(Gated().double(), MLP, [x[:0]], group)
    check(Gated().float(), MLP, [x.float()], group, atol=1e-5)
    check(Gated(hidden=4 * 3).double(), {"gate": Column(unit=3), "up": Column(unit=3), "down": Row(unit=3)}, [x], group)
    loose = {"gate": Column(gather_output=True), "up": Column(gather_output=True), "down": Row(split_input=True)}
    check(Gated().double(), loose, [x], group)
    packed = Column(gather_output=True, parts=(6, 4))
    check(Gated().double(), {"gate": packed, "down": Row(split_input=True, parts=(4, 6))}, [x], group)
    conv = nn.Sequential(Conv1D(9, 6), nn.GELU(), Conv1D(6, 9)).double()
    check(conv, {"0": Column(), "2": Row()}, [x], group)
    assert isinstance(conv[0], Conv1D)
    assert not isinstance(conv[0], nn.Linear)
    assert "ColumnLinear[Conv1D](in_features=6, out_features=9, bias=True, local_out_features=" in repr(conv)
    for bias in (True, False):
        ends = (nn.Linear(6, 8, bias=bias), nn.Linear(8, 6, bias=bias))
        check(nn.Sequential(ends[0], nn.ReLU(inplace=True), ends[1]).double(), {"0": Column(), "2": Row()}, [x], group)
    # A later step may call the second layer by hand, with all features.
    model = Gated().double()
    whole = copy.deepcopy(model)
    divide(model, MLP, group)
    hidden = double(3, 10)
    torch.testing.assert_close(model.down(hidden), whole.down(hidden), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", [2, 4])
def test_grouped_queries_and_norms_of_local_heads(world):
    run(grouped, world)


def grouped(group):
    heads, keys, size = 4, 2, 4
    parts = (ShardPart.queries(heads, size, keys), ShardPart.keys(keys, size), ShardPart.keys(keys, size))
    styles = {"qkv": Column(parts=parts), "norm": Replicate(partial_gradient=True), "out": Row(parts=parts[:1])}

    def adapt(model):  # what a model that keeps sizes instead of asking its tensors needs
        model.sizes = [rule.local_size(group.rank) for rule in (Shard.packed(0, [p], group.size) for p in parts)]

    rules = check(Grouped(heads, keys, size).double(), styles, [double(2, 3, 8)], group, adapt=adapt)
    assert rules["qkv.weight"].replicated == (group.size > keys)


class Tied(nn.Module):
    def __init__(self, vocabulary=11, width=4, padding=None):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=padding)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)))


@WORLDS
def test_vocabulary_and_tied_head(world):
    run(vocabulary, world)


def vocabulary(group):
    tokens = torch.arange(22).view(2, 11) % 11
    styles = {"embedding": Vocab(), "head": Column(gather_output=True)}
    for padding in (None, 1, 10):
        model = Tied(padding=padding).double()
        check(model, styles, [tokens], group, loss=lambda y: (y + y.pow(2)).sum())
        assert model.head.weight is model.embedding.weight
        assert isinstance(model.embedding, VocabEmbedding)
    with pytest.raises(IndexError, match=r"\[0, 11\); got 0 to 11"):
        model.embedding(torch.tensor([0, 11]))
    with pytest.raises(ValueError, match="Tied parameters must be sharded in the same way"):
        divide(Tied(), {"embedding": Vocab(), "head": Row()}, group)


@distributed(world_size=2)
def test_the_layers_keep_identity_names_and_hooks(group):
    model, calls = Gated(), []
    model.gate.register_forward_hook(lambda *_: calls.append("hook"))
    before = {name: id(p) for name, p in model.named_parameters()}
    modules = [id(module) for module in model.modules()]
    divide(model, MLP, group)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert [id(module) for module in model.modules()] == modules
    assert isinstance(model.gate, ColumnLinear)
    assert isinstance(model.down, RowLinear)
    assert isinstance(model.gate, nn.Linear)
    model(torch.randn(2, 6))
    assert calls == ["hook"]
    assert f"in_features=6, out_features=10, bias=True, local_out_features=5, rank={group.rank}/2" in repr(model)
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 4 * (2 * (5 * 6 + 5) + 6 * 5 + 6)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(1, 6)), model(torch.ones(1, 6)))


@distributed(world_size=2)
def test_subclasses_of_linear(group):
    class Named(nn.Linear):
        pass

    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.weight.sum()

    class Wrapping(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x + 1)

    wrapping, x = Wrapping(4, 4), torch.randn(3, 4)
    expected = wrapping(x)
    Row(split_input=True).apply(wrapping, group)
    assert isinstance(wrapping, Wrapping)
    torch.testing.assert_close(wrapping(x), expected)
    layer = Named(4, 4)
    Column().apply(layer, group)
    assert isinstance(layer, Named)
    assert isinstance(layer, ColumnLinear)
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    for refused in (Own(4, 4), patched, normed, nn.LayerNorm(4), nn.LazyLinear(4)):
        for style in (Column(), Row()):
            with pytest.raises(TypeError, match=f"`{type(style).__name__}` must apply to"):
                style.apply(refused, group)


def test_what_cannot_be_divided_is_refused():
    group = Group("tensor_parallel", (0, 1, 2, 3), 0, None)
    refused = [
        (Column(unit=4), nn.Linear(6, 12), ValueError, r"3 heads \(units of 4 features\) cannot .* 4 ranks"),
        (Column(parts=(4, 4)), nn.Linear(6, 12), ValueError, "the 12 features of the layer; got 8 from"),
        (
            Row(parts=(ShardPart.keys(2, 2),)),
            nn.Linear(4, 4),
            ValueError,
            "Input features that several ranks share are not supported",
        ),
        (Vocab(), nn.Embedding(8, 2, max_norm=1.0), ValueError, "does not support `max_norm`"),
        (Vocab(), nn.Linear(8, 2), TypeError, "`Vocab` must apply to `nn.Embedding`; got `torch.nn"),
    ]
    for style, module, error, message in refused:
        with pytest.raises(error, match=message):
            style.apply(module, group)
    with pytest.raises(ValueError, match="gather_output"):
        Column(gather_output=True, parts=(ShardPart.keys(2, 2),))


# ----------------------------------------------------------------------------------------------------- communication


def counted(function):
    with recorded_communication() as records:
        function()
    return [record.op for record in records]


@distributed(world_size=2)
def test_collective_counts(group):
    model = Gated()
    divide(model, MLP, group)
    x = torch.randn(2, 6, requires_grad=True)
    assert counted(lambda: model(x)) == ["all_reduce"], "forward: the row layer's"
    loss = model(x).sum()
    assert counted(loss.backward) == ["all_reduce"], "backward: one for both column layers"
    with torch.no_grad():
        assert counted(lambda: model(x)) == ["all_reduce"]
    loss = model(x.detach()).sum()
    assert counted(loss.backward) == [], "nobody needs the gradient of the input"


@distributed(world_size=2)
def test_frozen_weights_get_no_gradient(group):
    model = Gated()
    divide(model, MLP, group)
    model.gate.requires_grad_(False)
    model.down.weight.requires_grad_(False)
    x = torch.randn(2, 6, requires_grad=True)
    model(x).sum().backward()
    assert model.gate.weight.grad is None
    assert model.gate.bias.grad is None
    assert model.down.weight.grad is None
    assert model.down.bias.grad is not None
    assert model.up.weight.grad is not None
    assert x.grad is not None


@distributed(world_size=2)
def test_overlap_changes_no_bit(group):
    layer, plain = nn.Linear(33, 40), nn.Linear(33, 20)
    Column().apply(layer, group)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 17, 33, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    torch.manual_seed(group.rank)
    grad = torch.randn(4, 17, 20)
    layer(x).backward(grad)
    plain(copy_to_group(other, group)).backward(grad)
    assert torch.equal(x.grad, other.grad)
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert torch.equal(layer.bias.grad, plain.bias.grad)


@distributed(world_size=2)
def test_the_weight_gradient_is_computed_while_the_reduction_runs(group):
    layer = nn.Linear(6, 8)
    Column().apply(layer, group)
    computed = []
    layer.weight.register_hook(lambda _: computed.append(time.perf_counter_ns()))
    y = layer(torch.randn(3, 6, requires_grad=True)).sum()
    with recorded_communication() as records:
        y.backward()
        collected = time.perf_counter_ns()
    assert records[0].start_ns < computed[0] < collected
    assert len(records) == 1


# ---------------------------------------------------------------------------------------- other ways through autograd


@distributed(world_size=2)
def test_partial_and_repeated_backward_passes(group):
    """The shared input's gradient is right whichever of its layers take part, and after passes that left it out."""
    model = Gated().double()
    whole = copy.deepcopy(model)
    rules, _ = divide(model, MLP, group)
    x, z = (t.requires_grad_() for t in double(2, 4, 6).unbind())
    x, z = x.detach().requires_grad_(), x.detach().clone().requires_grad_()
    y, expected = model(x).pow(2).sum(), whole(z).pow(2).sum()
    (grad,) = torch.autograd.grad(y, [model.gate.weight], retain_graph=True)  # does not need the input's gradient
    torch.testing.assert_close(
        grad,
        rules["gate.weight"].split(
            torch.autograd.grad(expected, [whole.gate.weight], retain_graph=True)[0], group.rank
        ),
    )
    for _ in range(2):
        y.backward(retain_graph=True)
        expected.backward(retain_graph=True)
    torch.testing.assert_close(x.grad, z.grad)
    same_by_name(model, whole, rules, group, "grad")
    # Only one of the two layers that share the input takes part.
    for m, leaf in ((model, x), (whole, z)):
        leaf.grad = None
        gate, up = m.gate(leaf), m.up(leaf)
        assert up is not None
        (gate.sum() if m is whole else reduce_from_group(gate.sum(), group)).backward()
    torch.testing.assert_close(x.grad, z.grad)
    # An input that is changed between its two uses is not the same input.
    for m, leaf in ((model, x), (whole, z)):
        leaf.grad = None
        m.gate.weight.requires_grad_(False)
        h = leaf * 1
        gate = m.gate(h).sum()
        h.mul_(2)
        total = gate + m.up(h).sum()
        (total if m is whole else reduce_from_group(total, group)).backward()
    torch.testing.assert_close(x.grad, z.grad)


@distributed(world_size=2)
def test_a_layer_that_reads_its_input_alone(group):
    """After one backward pass, such a layer sums its input's gradient itself, until another layer reads that input."""
    torch.manual_seed(0)
    model = Gated().double()
    whole = copy.deepcopy(model)
    rules, _ = divide(model, MLP, group)
    leaves = [x.requires_grad_() for x in double(1, 3, 6).expand(2, 3, 6).clone().unbind()]

    def total(m, leaf, is_shared=False, has_graph=False):
        y = m.down(F.silu(m.gate(leaf)) * (m.up(leaf) if is_shared else 1)).pow(2).sum()
        if not has_graph:
            return y
        of_leaf, of_weight = torch.autograd.grad(y, [leaf, m.gate.weight], create_graph=True)
        of_weight = of_weight.pow(2).sum()
        return y + of_leaf.pow(2).sum() + (of_weight if m is whole else reduce_from_group(of_weight, group))

    def same(*args):
        for m, leaf in zip((model, whole), leaves):
            m.zero_grad()
            leaf.grad = None
            y = total(m, leaf, *args)
            y.backward(retain_graph=True)
            if m is model:
                taken.append((m.gate.reader.is_alone, counted(lambda: y.backward(retain_graph=True))))  # noqa: B023
            else:
                y.backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-10, atol=1e-10)
        same_by_name(model, whole, rules, group, "grad")

    taken = []
    for args in ((), (), (False, True), (True,), (True,)):
        same(*args)
    messages = [(is_alone, len(ops)) for is_alone, ops in taken if is_alone is not None]
    assert messages[:2] == [(True, 1), (True, 1)]
    assert messages[3:] == [(False, 2), (False, 1)], "the first time, the second layer comes too late to share"
    model.gate.reader.is_alone = True
    model.gate.weight.requires_grad_(False)
    whole.gate.weight.requires_grad_(False)
    same()
    assert model.gate.weight.grad is None


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@distributed(world_size=3)
def test_gradients_of_gradients(group, cast):
    """A penalty on gradients of the input and the weights, with sharded sequences too."""
    torch.manual_seed(0)
    for dim in (None, 0):
        model = Gated() if cast else Gated().double()
        whole = copy.deepcopy(model)
        styles = {
            "gate": Column(sequence_dim=dim),
            "up": Column(sequence_dim=dim),
            "down": Row(sequence_dim=dim),
        }
        rules, partial = divide(model, styles, group)
        x = torch.randn(5, 2, 6, dtype=model.gate.weight.dtype)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        totals = []
        for m, leaf in zip((model, whole), leaves):
            is_divided = m is model and dim is not None
            given = leaf
            if is_divided:
                shared_inputs(group, dim).lengths.divide(5)
                given = leaf.split(balanced(5, group.size))[group.rank]
            with torch.autocast("cpu", dtype=cast) if cast else nullcontext():
                y = m(given)
            names = [name for name, _ in m.named_parameters() if name not in partial]
            asked = [m.get_parameter(name) for name in names]
            found = torch.autograd.grad(
                y.float().pow(3).sum() if cast else y.pow(3).sum(), [leaf, *asked], create_graph=True
            )
            total = 0.0
            for name, gradient in zip(["x", *names], found):
                part = gradient.pow(2).sum()
                is_part = m is model and (name in rules or (is_divided and name == "x"))
                total = total + (reduce_from_group(part, group) if is_part else part)
            totals.append(total)
            total.backward()
        tolerance = 5e-2 if cast else 1e-10
        torch.testing.assert_close(*totals, rtol=tolerance, atol=tolerance)
        finish_gradients(model, rules, partial, group)
        if not cast:
            same_by_name(model, whole, rules, group, "grad")
        of_leaf = leaves[0].grad
        if dim is not None:
            of_leaf = comm.all_reduce(of_leaf, group)
        torch.testing.assert_close(of_leaf, leaves[1].grad, rtol=tolerance, atol=tolerance * leaves[1].grad.abs().max())


@distributed(world_size=2)
def test_an_input_changed_before_backward_is_noticed(group):
    layer = nn.Linear(6, 4)
    Column().apply(layer, group)
    x = torch.randn(2, 6, requires_grad=True) * 1
    y = layer(x).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@distributed(world_size=2)
def test_no_memory_is_held_after_backward(group):
    model = Gated()
    divide(model, MLP, group)

    class Token:
        """Lives as long as a node of the graph."""

    gc.disable()
    try:
        for backward in (True, False):
            x = torch.randn(2, 6, requires_grad=True) * 1
            x.grad_fn.metadata["token"] = token = Token()
            seen = weakref.ref(token)
            y = model(x).sum()
            if backward:
                y.backward()
            del x, y, token
            deadline = time.monotonic() + 5  # gloo's thread may still be letting go of the tensor it has reduced
            while seen() is not None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert seen() is None
        model(torch.randn(2, 6, requires_grad=True)).sum().backward()  # a leaf lives on in its own graph
        assert model.gate.inputs._entry is None
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(world_size=2)
def test_activation_checkpointing(group, reentrant):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlps = nn.ModuleList(Gated() for _ in range(2))

        def forward(self, x):
            for mlp in self.mlps:
                x = x + checkpoint(mlp, x, use_reentrant=reentrant)
            return x

    styles = {f"mlps.{i}.{name}": style for i in range(2) for name, style in MLP.items()}
    check(Block().double(), styles, [double(3, 6)], group)


@distributed(world_size=2)
def test_autocast(group):
    model, x = Gated(), torch.randn(4, 6)
    whole = copy.deepcopy(model)
    rules, _ = divide(model, MLP, group)
    for m in (model, whole):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(leaf)
        assert y.dtype == torch.bfloat16
        y.float().pow(2).sum().backward()
        m.leaf = leaf
    assert model.leaf.grad.dtype == torch.float32
    assert model.gate.weight.grad.dtype == torch.float32
    torch.testing.assert_close(model.leaf.grad, whole.leaf.grad, rtol=5e-2, atol=5e-2)
    same_by_name(model, whole, rules, group, "grad", atol=5e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.double()(x.double()).dtype == torch.double, "as in torch, autocast leaves double precision alone"


@distributed(world_size=2)
def test_inference_mode_and_meta(group):
    model = Gated().double()
    whole = copy.deepcopy(model)
    divide(model, MLP, group)
    with torch.inference_mode():
        x = double(2, 6)
        torch.testing.assert_close(model(x), whole(x))
    model(double(2, 6)).sum().backward()
    with torch.device("meta"):
        empty = Gated()
    divide(empty, MLP, group)
    assert empty.gate.weight.shape == (5, 6)
    assert empty.gate.weight.is_meta


# --------------------------------------------------------------------------------------------------- sequence parallel


class Stream(nn.Module):
    """A residual stream that a sequence-parallel layout divides along the sequence, norms included."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.mlp = Gated()
        self.last = nn.LayerNorm(6)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.last(x + self.mlp(self.norm(x)))


def stream(group, dim):
    """A model whose layers are sharded along the sequence, the whole model, and the rules."""
    torch.manual_seed(0)
    model = Stream().double()
    whole = copy.deepcopy(model)
    column = Column(sequence_dim=dim)
    styles = {
        "embedding": Vocab(sequence_dim=dim),
        "norm": Replicate(partial_gradient=True),
        "mlp.gate": column,
        "mlp.up": column,
        "mlp.down": Row(sequence_dim=dim),
        "last": Replicate(partial_gradient=True),
    }
    return model, whole, *divide(model, styles, group)


@pytest.mark.parametrize("dim", [0, 1])
@distributed(world_size=3)
def test_sequence_parallel(group, dim):
    model, whole, rules, partial = stream(group, dim)
    assert partial == {"norm.weight", "norm.bias", "last.weight", "last.bias", "mlp.down.bias"}
    for length in (5, 8, 6):
        tokens = torch.randint(9, (length, 3) if dim == 0 else (3, length))
        for m in (model, whole):
            m.zero_grad()
        with recorded_communication() as records:
            y = model(tokens)
        assert [record.op for record in records] == ["reduce_scatter", "all_gather", "reduce_scatter"]
        sizes = balanced(length, group.size)
        expected = whole(tokens)
        torch.testing.assert_close(y, expected.split(sizes, dim)[group.rank])
        with recorded_communication() as records:
            y.pow(2).sum().backward()
        # The second gathers the input of the two columns again, of which each rank kept its part.
        assert [record.op for record in records] == ["all_gather", "all_gather", "reduce_scatter", "all_gather"]
        expected.pow(2).sum().backward()
        finish_gradients(model, rules, partial, group)
        same_by_name(model, whole, rules, group, "grad")


def short_spans():
    """Cut each product into as many spans as there may be."""
    return patched(linear, "MIN_SPAN_BYTES", {"cpu": 1})


@pytest.mark.parametrize(("world", "in_order"), [(2, False), (4, False), (4, True)])
def test_products_that_are_cut_into_spans(world, in_order):
    run(in_spans, world, in_order=in_order)


def in_spans(group, in_order):
    with short_spans(), strict_order() if in_order else nullcontext():
        for dim, lengths in ((0, (13, 7)), (1, (13, 7, 1))):
            model, whole, rules, partial = stream(group, dim)
            for length in lengths:
                tokens = torch.randint(9, (length, 3) if dim == 0 else (3, length))
                sizes = balanced(length, group.size)
                for m in (model, whole):
                    m.zero_grad()
                with recorded_communication() as records:
                    y = model(tokens)
                # With 2 ranks a part has 4 spans, if it has as many positions; with 4 ranks there are 3 turns.
                turns = ["exchange"] * min(max(1, 4 // (group.size - 1)), min(sizes)) * (group.size - 1)
                gather, reduce = (turns, turns) if turns else (["all_gather"], ["reduce_scatter"])
                assert [record.op for record in records] == ["reduce_scatter", *gather, *reduce]
                expected = whole(tokens)
                torch.testing.assert_close(y, expected.split(sizes, dim)[group.rank])
                with recorded_communication() as records:
                    y.pow(2).sum().backward()
                assert [record.op for record in records] == [*gather, "all_gather", *reduce, "all_gather"]
                expected.pow(2).sum().backward()
                finish_gradients(model, rules, partial, group)
                same_by_name(model, whole, rules, group, "grad")


@distributed(world_size=2)
def test_spans_in_layers_that_are_recomputed_frozen_or_cast(group):
    tokens = torch.randint(9, (3, 9))
    for case in ("kept", "recomputed", "reentrant", "frozen", "no bias", "no gradient", "autocast"):
        model, whole, rules, partial = stream(group, 1)
        for m in (model, whole):
            m.mlp.gate.requires_grad_(case != "frozen")
            m.mlp.down.weight.requires_grad_(case != "frozen")
            if case == "no bias":
                m.mlp.up.bias = m.mlp.down.bias = None
            elif case == "autocast":
                m.float()
        if case in ("kept", "recomputed", "reentrant"):
            results = KeptResults()
            options = {"context_fn": lambda results=results: (results, results)} if case == "kept" else {}
            model.mlp.forward = partial_of(checkpoint, model.mlp.forward, use_reentrant=case == "reentrant", **options)
        with (
            short_spans(),
            torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"),
            torch.set_grad_enabled(case != "no gradient"),
            recorded_communication() as forward,
        ):
            y = model(tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            expected = whole(tokens)
        tolerance = 5e-2 if case == "autocast" else 1e-10
        torch.testing.assert_close(y, expected.split([5, 4], 1)[group.rank], rtol=tolerance, atol=tolerance)
        # Without gradients, layers do not share an input.
        assert ops(forward).count("exchange") == (12 if case in ("no gradient", "reentrant") else 8), case
        if case == "no gradient":
            continue
        with short_spans(), recorded_communication() as backward:
            y.pow(2).sum().backward()
        # A second run that keeps its results sends nothing.
        assert ops(backward).count("exchange") == (16 if case in ("recomputed", "reentrant") else 8), case
        expected.pow(2).sum().backward()
        finish_gradients(model, rules, partial, group)
        same_by_name(model, whole, rules, group, "grad", tolerance)


def ops(records):
    return [record.op for record in records]


@distributed(world_size=2)
def test_a_product_starts_before_the_next_span_has_arrived(group):
    events = []

    def exchange(*args):
        pending = comm.exchange(*args)
        number = sum(event.startswith("send") for event in events) % 4
        events.append(f"send {number}")
        return SimpleNamespace(wait=lambda: events.append(f"wait {number}") or pending.wait())

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
                events.append("product")
            return func(*args, **(kwargs or {}))

    first, last = nn.Linear(6, 8), nn.Linear(8, 6)
    Column(sequence_dim=1).apply(first, group)
    Row(sequence_dim=1).apply(last, group)
    x = torch.randn(2, first.inputs.lengths.divide(9)[group.rank], 6, requires_grad=True)
    with short_spans(), patched(comm.collectives, "exchange", exchange), Products():
        y = first(x)
        # Two messages are in flight, so that the link is never idle.
        gather = ["send 0", "send 1", "product", "wait 0", "send 2", "product", "wait 1", "send 3", "product"]
        gather += ["wait 2", "product", "wait 3", "product"]
        assert events == gather
        events.clear()
        y = last(y)
        reduce = [event for number in range(4) for event in ("product", f"send {number}")] + ["product"]
        waits = [f"wait {number}" for number in range(4)]
        assert events == reduce + waits
        events.clear()
        y.sum().backward()
        # Both weight gradients come last, and the one of the column layer before the waits for the sum.
        assert events == [*gather, "product", *reduce, "product", *waits]


@distributed(world_size=2)
def test_a_sequence_that_nobody_divided_is_refused(group):
    layer = nn.Linear(4, 4)
    Column(sequence_dim=1).apply(layer, group)
    with pytest.raises(RuntimeError, match="an earlier layer sharded; got 3 positions in dimension 1"):
        layer(torch.randn(2, 3, 4))


def test_one_rank():
    group = Group.alone("tensor_parallel")
    model, tokens = Tied(), torch.randint(11, (2, 3))
    expected = model(tokens)
    divide(model, {"embedding": Vocab(), "head": Column(gather_output=True)}, group)
    assert torch.equal(model(tokens), expected)
    assert gather_from_group(expected, group) is scatter_to_group(expected, group) is expected
    assert all_gather_to_group(expected, group) is expected


class Scaled(nn.Linear):
    """A class of its own, with a method for copies of its own."""

    def __deepcopy__(self, memo):
        copied = type(self).__new__(type(self))
        copied.__dict__ = {**self.__dict__, "scale": 2}
        return copied


@pytest.mark.parametrize("kind", [nn.Linear, Scaled])
def test_a_divided_layer_is_copied_but_never_pickled_as_if_it_were_whole(kind):
    model = nn.Sequential(kind(4, 4))
    convert(model[0], ColumnLinear)
    copied = copy.deepcopy(model)
    assert type(copied[0]) is type(model[0])
    assert getattr(copied[0], "scale", 2) == 2
    assert torch.equal(copied[0].weight, model[0].weight)
    with pytest.raises(RuntimeError, match=r"`ColumnLinear.*` is sharded over the tensor-parallel ranks"):
        pickle.dumps(model)


class Embedded(Gated):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 6)

    def forward(self, tokens):
        return super().forward(self.table(tokens))


@distributed(world_size=2)
def test_functional_calls_give_layers_full_tensors(group):
    torch.manual_seed(3)
    alone = Embedded().double()
    module = copy.deepcopy(alone)
    styles = {"gate": Column(), "up": Column(), "down": Row(), "table": Vocab()}
    rules = {}
    for name, style in styles.items():
        rules |= {f"{name}.{key}": rule for key, rule in style.rules(getattr(module, name), 2).items()}
        style.apply(getattr(module, name), group)
    tokens = torch.tensor([[0, 4, 2], [3, 3, 1]])

    def loss(model, parameters):
        return torch.func.functional_call(model, parameters, (tokens,)).square().sum()

    expected = loss(alone, {name: 2 * value for name, value in alone.named_parameters()})
    expected.backward()
    full = {name: value.detach().clone().requires_grad_() for name, value in alone.named_parameters()}
    pieces = {
        name: Piece.by_rule(value, rules[name], group) if name in rules else value
        for name, value in module.named_parameters()
    }
    for given in (pieces, full):
        found = loss(module, {name: 2 * value for name, value in given.items()})
        torch.testing.assert_close(found, expected)
        found.backward()
    for name, value in alone.named_parameters():
        own = module.get_parameter(name).grad
        torch.testing.assert_close(full[name].grad, value.grad)
        torch.testing.assert_close(own, rules[name].split(value.grad, group.rank) if name in rules else value.grad)
