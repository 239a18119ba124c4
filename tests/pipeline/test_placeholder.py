"""Tensors without data: what they look like, what is made of them, and what cannot be."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.pipeline.interception import ActiveHandler, Call, CallSite
from lightning_parallel.pipeline.placeholder import (
    PlaceholderError,
    PlaceholderTensor,
    missing,
    reveal,
    watch_parameters,
)
from lightning_parallel.pipeline.stubs import StubOutputs, free_parameters, stubbed

CPU = torch.device("cpu")


def placeholder(*shape, dtype=torch.float32, **options):
    return PlaceholderTensor.like(torch.empty(*shape, dtype=dtype), "the output of `embed`", **options)


def inferred(stubs, name, kind, module, args, kwargs):
    site = CallSite(ActiveHandler(), name, kind)
    return stubs.infer(Call(site, module, module.__call__, args, kwargs))


def signature(tensor):
    return tuple(tensor.shape), tensor.dtype, tensor.device


OPERATIONS = {
    "arithmetic": lambda x: (x * 2.5 + torch.ones(5, 1)).to(torch.bfloat16) / 3,
    "promotion": lambda x: x.half() * torch.ones((), dtype=torch.float64),
    "views": lambda x: x.transpose(0, 1).reshape(5, -1)[1:, ::2].unsqueeze(0),
    "indexing": lambda x: x[:, torch.tensor([0, 2])][..., None],
    "joining": lambda x: torch.cat([x, torch.zeros(2, 3, 8)], 1),
    "masking": lambda x: x.masked_fill(torch.ones(2, 5, 1, dtype=torch.bool), 0.0).softmax(-1),
    "writing": lambda x: x.clone().mul_(2).index_fill_(1, torch.tensor([1]), 0.0),
    "filling": lambda x: torch.zeros_like(x).copy_(x),
    "reducing": lambda x: x.float().mean(dim=(0, 1)).argmax(),
    "comparing": lambda x: (x > 0) & torch.ones(8, dtype=torch.bool),
    "chunks": lambda x: torch.stack(x.chunk(4, dim=-1)[:2]),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "linear": lambda x: F.layer_norm(F.linear(x, torch.ones(3, 8)), (3,)),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "convolution": lambda x: F.conv1d(x, torch.ones(4, 5, 3), padding=1),
    "einsum": lambda x: torch.einsum("bse,be->bs", x, torch.ones(2, 8)),
    "new": lambda x: x.new_ones(3, 4),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_made_of_a_ghost_is_a_ghost_of_the_right_kind(name):
    state = torch.get_rng_state()
    for _ in range(2):  # the second time from memory
        result = OPERATIONS[name](placeholder(2, 5, 8))
        assert isinstance(result, PlaceholderTensor)
    assert torch.equal(torch.get_rng_state(), state), "placeholders draw no random numbers"
    assert signature(result) == signature(OPERATIONS[name](torch.ones(2, 5, 8)))
    assert "embed" in repr(result)


def test_autocast_and_devices_look_real():
    x = placeholder(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(8, 3)(x).dtype == torch.bfloat16
        assert (x + 1).dtype == torch.float32
    positions = torch.arange(x.shape[1], device=x.device)
    assert type(positions) is torch.Tensor
    elsewhere = placeholder(2, 8, device=torch.device("cuda", 0))
    assert elsewhere.device == torch.device("cuda", 0)
    assert (elsewhere * 2).device == torch.device("cuda", 0)
    assert elsewhere.to("cpu").device == CPU


def test_a_ghost_holds_no_memory():
    huge = PlaceholderTensor.like(torch.empty(1 << 20, 1 << 20, device="meta"), "x", CPU)
    assert (huge @ huge).shape == huge.shape


NEEDS_DATA = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool(x.any()),
    "boolean index": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("name", NEEDS_DATA)
def test_data_cannot_be_had(name):
    with pytest.raises(PlaceholderError, match="needs the data of the output of `embed`"):
        NEEDS_DATA[name](placeholder(2, 3))


@pytest.mark.parametrize("write", ["copy_", "add_", "__setitem__"])
def test_a_real_tensor_is_never_overwritten_silently(write):
    target = torch.zeros(4, 3)
    arguments = (slice(1, 3), placeholder(2, 3)) if write == "__setitem__" else (placeholder(4, 3),)
    with pytest.raises(PlaceholderError, match="writes the output of `embed`.*torch.cat"):
        getattr(target, write)(*arguments)


def test_received_data_take_the_ghosts_place_with_gradients():
    x, other = placeholder(2, 3), placeholder(2, 3)
    received = torch.ones(2, 3, requires_grad=True)
    x.value = received
    assert not missing(x)
    assert missing(other)
    y = (torch.cat([x, x * 2]) @ torch.ones(3, 1)).sum()
    assert not isinstance(y, PlaceholderTensor)
    y.backward()
    assert torch.equal(received.grad, torch.full((2, 3), 3.0))
    assert isinstance(x + other, PlaceholderTensor)
    assert reveal({"a": [x, (other,)]})["a"][0] is received


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_gradients_through_custom_functions_are_not_lost():
    x = placeholder(2, 3)
    x.receive(torch.full((2, 3), 5.0, requires_grad=True))
    Double.apply(x).sum().backward()
    assert torch.equal(x.own_grad, torch.full((2, 3), 10.0))
    assert x.value.grad is None


def test_liveness_is_handed_on_only_by_the_living():
    dead, available = placeholder(2, 3), placeholder(2, 3)
    available.available = True
    assert (available * torch.ones(3)).available
    assert not (available + dead).available
    available.add_(dead)
    assert not available.available


def test_parameters_are_watched():
    weight = PlaceholderTensor.like(torch.empty(3, 8), "the parameter `head.weight`", parameter="head.weight")
    seen = []
    with watch_parameters(seen.append):
        F.linear(torch.ones(2, 8), weight)
    F.linear(torch.ones(2, 8), weight)
    assert seen == ["head.weight"]
    assert isinstance(copy.deepcopy(weight), PlaceholderTensor)


MODULES = {
    "linear": (nn.Linear(8, 3), torch.ones(2, 8)),
    "embedding": (nn.Embedding(5, 3), torch.zeros(2, 4, dtype=torch.long)),
    "lstm": (nn.LSTM(8, 6, num_layers=2, batch_first=True), torch.ones(2, 5, 8)),
    "batch norm": (nn.BatchNorm1d(5), torch.ones(2, 5, 8)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.ones(2, 5, 8)),
    "convolution": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)), torch.ones(1, 3, 9, 9)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("real", [True, False])
def test_stubs_return_the_right_shapes(name, real):
    module, example = MODULES[name]
    before = {key: value.clone() for key, value in module.state_dict().items()}
    stubs = StubOutputs(CPU)
    argument = example if real else PlaceholderTensor.like(example, "x")
    for _ in range(2):
        result = inferred(stubs, name, name, module, (argument,), {})
        leaves = result if isinstance(result, tuple) else (result,)
        expected = module(example)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for leaf, wanted in zip(leaves, expected):
            if isinstance(leaf, torch.Tensor):
                assert isinstance(leaf, PlaceholderTensor)
                assert signature(leaf) == signature(wanted)
        module.load_state_dict(before)
    with stubbed(module, CPU):
        module(example)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items()), "buffers are safe"


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x, mask=None, times=1):
        self.calls += 1
        return {"x": x * self.weight, "mask": mask, "count": times + 1}


def test_a_module_is_asked_once_per_signature():
    module, stubs = Counting(), StubOutputs(CPU)

    def ask(*args, **kwargs):
        return inferred(stubs, "layer", "kind", module, args, kwargs)

    mask = torch.ones(2)
    first, second = ask(placeholder(2, 3), mask=mask), ask(placeholder(2, 3), mask=mask)
    assert module.calls == 1
    assert first["mask"] is second["mask"] is mask
    assert first["x"] is not second["x"], "each output is received on its own"
    assert second["count"] == 2
    other = torch.zeros(2)
    assert ask(placeholder(2, 3), mask=other)["mask"] is other
    assert module.calls == 1
    assert ask(placeholder(4, 3), mask=mask)["x"].shape == (4, 3)
    assert ask(placeholder(2, 3), mask=mask, times=5)["count"] == 6
    assert module.calls == 3
    with torch.autocast("cpu", torch.bfloat16):
        ask(placeholder(2, 3), mask=mask)
    module.eval()
    ask(placeholder(2, 3), mask=mask)
    assert module.calls == 5


class Routing(nn.Module):
    """Looks at its data."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, seen):
        chosen = self.linear(x)[:, 0].nonzero()
        seen.chosen = len(chosen)
        return self.linear(x).index_add(0, chosen[:, 0], torch.ones(len(chosen), 3)), seen


def test_a_module_that_must_see_data_is_asked_with_made_up_data():
    module, stubs, seen = Routing(), StubOutputs(CPU), SimpleNamespace()
    free_parameters(module.linear, {id(p) for p in module.parameters()}, CPU, {id(p): "w" for p in module.parameters()})
    result, handed_on = inferred(stubs, "layer", "kind", module, (placeholder(2, 3), seen), {})
    assert isinstance(result, PlaceholderTensor)
    assert result.shape == (2, 3)
    assert handed_on is seen
    assert not vars(seen), "it was asked with a copy"
    assert isinstance(module.linear.weight, PlaceholderTensor)
    with pytest.raises(PlaceholderError, match="cannot tell what the output of `layer`"):
        inferred(stubs, "layer", "kind", module, (placeholder(2, 4), seen), {})


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_layers_answer(kind):
    module, stubs = kind(3, 4, num_layers=2, batch_first=True), StubOutputs(CPU)
    for length in (7, 2, 7):
        x = placeholder(2, length, 3)
        answer = inferred(stubs, "layer", length, module, (x,), {})
        expected = [tuple(leaf.shape) for leaf in tree_leaves(module(torch.randn(2, length, 3)))]
        assert [tuple(leaf.shape) for leaf in tree_leaves(answer)] == expected
    assert all(isinstance(weight, nn.Parameter) for weight in module._flat_weights)


def test_a_ghost_cannot_change_its_shape():
    with pytest.raises(PlaceholderError, match="changes the shape of .* in place"):
        placeholder(2, 3).transpose_(0, 1)
    assert placeholder(3, 3).transpose_(0, 1).shape == (3, 3)
    assert (placeholder(2, 3) + 0).shape == (2, 3), "nothing that is remembered has changed"
