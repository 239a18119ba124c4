"""Stubs: the outputs that modules of other stages would return, inferred without their parameters."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.step_trace.interception import ActiveHandler, Call, CallSite
from lightning_parallel.step_trace.placeholder import (
    PlaceholderError,
    PlaceholderTensor,
)
from lightning_parallel.step_trace.stubs import StubOutputs, free_parameters, stubbed

CPU = torch.device("cpu")


def placeholder(*shape, dtype=torch.float32, **options):
    return PlaceholderTensor.like(torch.empty(*shape, dtype=dtype), "the output of `embed`", **options)


def inferred(stubs, name, kind, module, args, kwargs):
    site = CallSite(ActiveHandler(), name, kind)
    return stubs.infer(Call(site, module, module.__call__, args, kwargs))


def signature(tensor):
    return tuple(tensor.shape), tensor.dtype, tensor.device


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


def test_a_module_runs_once_per_signature():
    module, stubs = Counting(), StubOutputs(CPU)

    def infer(*args, **kwargs):
        return inferred(stubs, "layer", "kind", module, args, kwargs)

    mask = torch.ones(2)
    first, second = infer(placeholder(2, 3), mask=mask), infer(placeholder(2, 3), mask=mask)
    assert module.calls == 1
    assert first["mask"] is second["mask"] is mask
    assert first["x"] is not second["x"], "each output is received on its own"
    assert second["count"] == 2
    other = torch.zeros(2)
    assert infer(placeholder(2, 3), mask=other)["mask"] is other
    assert module.calls == 1
    assert infer(placeholder(4, 3), mask=mask)["x"].shape == (4, 3)
    assert infer(placeholder(2, 3), mask=mask, times=5)["count"] == 6
    assert module.calls == 3
    with torch.autocast("cpu", torch.bfloat16):
        infer(placeholder(2, 3), mask=mask)
    module.eval()
    infer(placeholder(2, 3), mask=mask)
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


def test_a_module_that_needs_data_gets_random_data():
    module, stubs, seen = Routing(), StubOutputs(CPU), SimpleNamespace()
    free_parameters(module.linear, {id(p) for p in module.parameters()}, CPU, {id(p): "w" for p in module.parameters()})
    result, handed_on = inferred(stubs, "layer", "kind", module, (placeholder(2, 3), seen), {})
    assert isinstance(result, PlaceholderTensor)
    assert result.shape == (2, 3)
    assert handed_on is seen
    assert not vars(seen), "it got a copy"
    assert isinstance(module.linear.weight, PlaceholderTensor)
    with pytest.raises(PlaceholderError, match="The shape of the output of `layer` cannot be inferred"):
        inferred(stubs, "layer", "kind", module, (placeholder(2, 4), seen), {})


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_layers(kind):
    module, stubs = kind(3, 4, num_layers=2, batch_first=True), StubOutputs(CPU)
    for length in (7, 2, 7):
        x = placeholder(2, length, 3)
        answer = inferred(stubs, "layer", length, module, (x,), {})
        expected = [tuple(leaf.shape) for leaf in tree_leaves(module(torch.randn(2, length, 3)))]
        assert [tuple(leaf.shape) for leaf in tree_leaves(answer)] == expected
    assert all(isinstance(weight, nn.Parameter) for weight in module._flat_weights)
