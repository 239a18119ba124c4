"""Placeholder tensors: their look, the operations on them, and the operations that need data."""

import copy
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.dlpack
from torch import nn

from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import give_data
from lightning_parallel.step_trace.placeholder import (
    PlaceholderError,
    PlaceholderTensor,
    missing,
    nothing_written,
    reveal,
    watch_operations,
)

CPU = torch.device("cpu")


def placeholder(*shape, dtype=torch.float32, **options):
    return PlaceholderTensor.like(torch.empty(*shape, dtype=dtype), "the output of `embed`", **options)


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
def test_operations_on_placeholders_give_placeholders(name):
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


def test_a_placeholder_holds_no_memory():
    huge = PlaceholderTensor.like(torch.empty(1 << 20, 1 << 20, device="meta"), "x", CPU)
    assert (huge @ huge).shape == huge.shape


NEEDS_DATA = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool(x.any()),
    "boolean index": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("name", NEEDS_DATA)
def test_operations_that_need_data_are_refused(name):
    message = r"in `.*` \(test_placeholder.py, line \d+\) needs the data of the output of `embed`"
    with pytest.raises(PlaceholderError, match=message):
        NEEDS_DATA[name](placeholder(2, 3))


def test_a_distribution_leaves_the_validation_to_the_stage_that_has_the_data():
    normal = torch.distributions.Normal(placeholder(2, 3), placeholder(2, 3).exp(), validate_args=True)
    assert normal.log_prob(normal.rsample()).shape == (2, 3)
    received = placeholder(2, 3)
    received.receive(torch.full((2, 3), -1.0))
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, received, validate_args=True)


@pytest.mark.parametrize("write", ["copy_", "add_", "__setitem__"])
def test_a_real_tensor_is_never_overwritten_silently(write):
    target = torch.zeros(4, 3)
    arguments = (slice(1, 3), placeholder(2, 3)) if write == "__setitem__" else (placeholder(4, 3),)
    with pytest.raises(PlaceholderError, match="writes the output of `embed`.*torch.cat"):
        getattr(target, write)(*arguments)


def test_received_data_replace_the_placeholder_and_get_gradients():
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


def test_a_result_is_available_if_all_its_inputs_are():
    unavailable, available = placeholder(2, 3), placeholder(2, 3)
    available.available = True
    assert (available * torch.ones(3)).available
    assert not (available + unavailable).available
    available.add_(unavailable)
    assert not available.available


def test_operations_are_watched():
    weight = PlaceholderTensor.like(torch.empty(3, 8), "the parameter `head.weight`", parameter="head.weight")
    seen = []
    with watch_operations(lambda function, inputs, output: seen.extend(value.parameter for value in inputs)):
        F.linear(torch.ones(2, 8), weight)
    F.linear(torch.ones(2, 8), weight)
    assert "head.weight" in seen
    assert isinstance(copy.deepcopy(weight), PlaceholderTensor)


def test_the_shape_of_a_placeholder_cannot_be_changed_in_place():
    with pytest.raises(PlaceholderError, match="must not change the shape of .* in place"):
        placeholder(2, 3).transpose_(0, 1)
    assert placeholder(3, 3).transpose_(0, 1).shape == (3, 3)
    assert (placeholder(2, 3) + 0).shape == (2, 3), "nothing that is remembered has changed"


@pytest.mark.parametrize(
    "take",
    [
        lambda x: x.share_memory_(),
        lambda x: torch.ones(2).set_(x.untyped_storage(), 0, (2,)).add(1),
        lambda x: torch.ones(2).set_(x.storage()).add(1),
        lambda x: x.untyped_storage().share_memory_(),
        lambda x: torch.ones(2).map_(x, max),
        lambda x: x.numpy(),
        lambda x: x.data_ptr(),
    ],
)
def test_memory_that_is_not_there_is_not_lent(take):
    """With the address zero the process would end by a segmentation fault."""
    for kept in (nullcontext(), nothing_written()):
        with (
            kept,
            pytest.raises(PlaceholderError, match="in `<lambda>`.* asks for the memory of the output of `embed`"),
        ):
            take(placeholder(2))


def test_a_tensor_is_not_given_memory_that_is_not_there():
    patches, known = Patches(), torch.Tensor.data
    give_data(patches)
    try:
        target, received = torch.zeros(2), placeholder(2)
        with pytest.raises(PlaceholderError, match=r"`.data = ...`.* writes the output of `embed`"):
            target.data = received
        with nothing_written():
            target.data = received
        assert target.tolist() == [0, 0]
        received.receive(torch.ones(2))
        target.data = received
        assert target.tolist() == [1, 1]
    finally:
        patches.undo()
    assert torch.Tensor.data is known


def test_data_are_not_shared_nor_pickled():
    placeholder = PlaceholderTensor.like(torch.randn(3), "the output of `x`")
    for share in (torch.from_dlpack, torch.utils.dlpack.to_dlpack, np.from_dlpack, pickle.dumps):
        with pytest.raises(RuntimeError):
            share(placeholder)
    placeholder.receive(torch.ones(3))
    assert torch.from_dlpack(placeholder).tolist() == [1, 1, 1]
