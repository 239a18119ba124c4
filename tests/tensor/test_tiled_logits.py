"""Logits in tiles of positions: loss and gradients equal to whole logits, with no tensor of their size."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel.compat import patched
from lightning_parallel.compat.torch import CALLS, AroundCalls
from lightning_parallel.tensor import tiles
from lightning_parallel.tensor.tiled_logits import TiledHead, TiledLogits

SAMPLES, LENGTH, FEATURES, CLASSES = 3, 7, 8, 40


@contextlib.contextmanager
def small_tiles():
    """Use tiles also for few positions."""
    with patched(tiles, "LEAST_BYTES", 1), patched(tiles, "LEAST_ROWS", 1):
        yield


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operator makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if type(value) is torch.Tensor and not value.is_meta:
                self.size = max(self.size, value.numel())
        return result


def labels():
    found = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    found[0, :3] = -100
    return found


Y = labels()
WEIGHT = torch.linspace(0, 1, CLASSES, dtype=torch.float64)


def flat(z):
    return z.view(-1, z.shape[-1])


def selected(z):
    return F.cross_entropy(z[Y >= 0], Y[Y >= 0])


def of_each(z):
    losses = F.cross_entropy(z.transpose(1, 2), Y, reduction="none", weight=WEIGHT)
    return (losses * torch.arange(LENGTH)).mean()


TILED = {
    "mean": lambda z: F.cross_entropy(flat(z), Y.view(-1)),
    "shifted": lambda z: F.cross_entropy(z[:, :-1].reshape(-1, CLASSES), Y[:, 1:].reshape(-1)),
    "shifted as in transformers": lambda z: F.cross_entropy(
        flat(z[..., :-1, :].contiguous().float().double()), Y[:, 1:].reshape(-1), ignore_index=-100
    ),
    "smoothing, weights": lambda z: F.cross_entropy(flat(z), Y.view(-1), weight=WEIGHT, label_smoothing=0.2),
    "sum": lambda z: F.cross_entropy(flat(z), Y.view(-1), reduction="sum"),
    "none": of_each,
    "softcap": lambda z: F.cross_entropy(flat(torch.tanh(z / 3.0) * 3.0 + WEIGHT), Y.view(-1)),
    "log_softmax": lambda z: F.nll_loss(flat(F.log_softmax(z, -1)), Y.view(-1)),
    "selected": selected,
    "nothing counts": lambda z: F.cross_entropy(flat(z), torch.full((SAMPLES * LENGTH,), -100)),
    "two losses": lambda z: F.cross_entropy(flat(z), Y.view(-1)) + 2 * selected(z),
    # The parameters of the head get no gradient from these.
    "detached": lambda z: selected(z.detach()) + of_each(z.detach()) + F.cross_entropy(flat(z), Y.view(-1)),
    "no gradient": lambda z: F.cross_entropy(flat(z.detach()), Y.view(-1)),
}


def changed_factor(z):
    factor = WEIGHT.clone()
    logits = (z + factor) - WEIGHT
    factor.mul_(3.0)
    return F.cross_entropy(flat(logits), Y.view(-1))


TILED["changed factor"] = changed_factor


def changed(z):
    before = flat(z) * 1.5
    view = flat(z)
    z.mul_(2.0)
    return F.cross_entropy(view, Y.view(-1)) + 3 * F.cross_entropy(before, Y.view(-1))


def hooked(z):
    z.register_hook(lambda gradient: 2 * gradient)
    return F.cross_entropy(flat(z), Y.view(-1))


def with_own_gradient(z):
    leaf = flat(z).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(leaf, Y.view(-1)), leaf)
    return (flat(z) * gradient).sum()


def joined_with_detached(z):
    return F.cross_entropy(flat(torch.cat([z[:, :2].detach(), z[:, 2:]], 1)), Y.view(-1))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


WHOLE = {
    "changed in place": changed,
    "hook": hooked,
    "gradient of logits": with_own_gradient,
    "joined": lambda z: F.cross_entropy(
        flat(torch.cat([z[:, :2], z[:, 5:]], 1)), torch.cat([Y[:, :2], Y[:, 5:]], 1).view(-1)
    ),
    "joined with detached": joined_with_detached,
    "another function": lambda z: F.cross_entropy(flat(z), Y.view(-1)) + z.logsumexp(-1).square().mean(),
    "weights that torch hides": lambda z: F.l1_loss(z, z.detach() + 1, weight=WEIGHT.expand_as(z)),
    "custom function": lambda z: Squared.apply(z.float().double()),
    "masked": lambda z: F.cross_entropy(flat(z.masked_fill(WEIGHT > 0.9, -9.0)), Y.view(-1)),
}


def layers(bias, tied=False):
    torch.manual_seed(3)
    first, head = nn.Linear(FEATURES, FEATURES).double(), nn.Linear(FEATURES, CLASSES, bias=bias).double()
    return first, head


def results(loss_of, tiled, bias=True, with_graph=False):
    first, head = layers(bias)
    if tiled:
        vars(head)[CALLS] = AroundCalls(head, TiledHead(head))
    x = torch.randn(SAMPLES, LENGTH, FEATURES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parameters = [*first.parameters(), *head.parameters()]
    with small_tiles(), Largest() as largest:
        logits = head(first(x))
        assert isinstance(logits, TiledLogits) == tiled
        # The tied embedding has a gradient from elsewhere, too.
        loss = loss_of(logits) + head.weight.square().sum()
        best = logits.argmax(-1)
        gradients = torch.autograd.grad(loss, parameters, create_graph=with_graph, allow_unused=True)
        if with_graph:
            gradients = torch.autograd.grad(sum(each.square().sum() for each in gradients), parameters)
    return largest.size, [loss, best, *gradients]


def assert_close(found, expected, tolerance=1e-10):
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", TILED)
def test_losses_equal_whole_logits_and_make_none(name, bias):
    _, expected = results(TILED[name], False, bias)
    largest, found = results(TILED[name], True, bias)
    assert_close(found, expected, 1e-5 if "transformers" in name else 1e-10)
    assert largest < SAMPLES * (LENGTH - 1) * CLASSES / 2


@pytest.mark.parametrize("name", WHOLE)
def test_other_functions_read_whole_logits(name):
    _, expected = results(WHOLE[name], False)
    assert_close(results(WHOLE[name], True)[1], expected)


@pytest.mark.parametrize("name", ["mean", "none", "another function"])
def test_gradients_of_gradients(name):
    loss_of = {**TILED, **WHOLE}[name]
    assert_close(results(loss_of, True, with_graph=True)[1], results(loss_of, False, with_graph=True)[1])


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    first, head = layers(True)
    vars(head)[CALLS] = AroundCalls(head, TiledHead(head))
    x = torch.randn(SAMPLES, LENGTH, FEATURES, dtype=torch.float64)
    with small_tiles():
        loss = TILED["mean"](head(first(x))) * 0.5
    once = torch.autograd.grad(loss, head.parameters(), retain_graph=True)
    assert_close(torch.autograd.grad(loss, head.parameters()), once)


@pytest.mark.parametrize("kind", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_half_precision_is_as_exact_as_whole_logits(kind):
    dtype = torch.float16 if kind.startswith("16") else torch.bfloat16
    first, head = (layer.to(torch.float32 if "mixed" in kind else dtype) for layer in layers(True))
    exact = copy.deepcopy(nn.Sequential(first, head)).double()
    x = torch.randn(SAMPLES, LENGTH, FEATURES).to(first.weight.dtype)
    scale = 1024.0
    expected = torch.autograd.grad(TILED["mean"](exact(x.double())) * scale, exact.parameters())
    errors = []
    for tiled in (False, True):
        if tiled:
            vars(head)[CALLS] = AroundCalls(head, TiledHead(head))
        with small_tiles(), torch.autocast("cpu", dtype, enabled="mixed" in kind):
            loss = TILED["mean"](head(first(x)))
        assert loss.dtype == (torch.float32 if "mixed" in kind else dtype)
        found = torch.autograd.grad(loss * scale, [*first.parameters(), *head.parameters()])
        errors.append([(one.double() - two).norm() / two.norm() for one, two in zip(found, expected)])
    assert all(one <= 1.3 * other + 1e-4 for one, other in zip(errors[1], errors[0]))


def test_hooks_must_come_before_the_loss():
    first, head = layers(True)
    vars(head)[CALLS] = AroundCalls(head, TiledHead(head))
    logits = head(first(torch.randn(SAMPLES, LENGTH, FEATURES, dtype=torch.float64)))
    TILED["mean"](logits)
    with pytest.raises(RuntimeError, match="must come before other functions of them"):
        logits.retain_grad()
    with pytest.raises(RuntimeError, match="must come before other functions of them"):
        torch.autograd.grad(TILED["mean"](logits), logits)


@pytest.mark.parametrize("changes", ["input", "weight"])
def test_input_and_weight_must_not_change_before_the_loss(changes):
    first, head = layers(True)
    vars(head)[CALLS] = AroundCalls(head, TiledHead(head))
    hidden = first(torch.randn(SAMPLES, LENGTH, FEATURES, dtype=torch.float64))
    logits = head(hidden)
    with torch.no_grad():
        (hidden if changes == "input" else head.weight).add_(1)
    with pytest.raises(RuntimeError, match="must not change in place before its output is read"):
        TILED["mean"](logits)


@pytest.mark.parametrize("name", ["mean", "none", "log_softmax"])
def test_autocast_applies_to_the_head_only_if_it_began_before(name):
    found = []
    for of_head, of_loss in ((False, True), (True, False)):
        for tiled in (False, True):
            first, head = (layer.float() for layer in layers(True))
            if tiled:
                vars(head)[CALLS] = AroundCalls(head, TiledHead(head))
            x = torch.randn(SAMPLES, LENGTH, FEATURES, generator=torch.Generator().manual_seed(2))
            with small_tiles():
                with torch.autocast("cpu", torch.bfloat16, enabled=of_head):
                    logits = head(first(x))
                    logits = F.log_softmax(logits, -1) if name == "log_softmax" else logits
                with torch.autocast("cpu", torch.bfloat16, enabled=of_loss):
                    function = F.nll_loss if name == "log_softmax" else F.cross_entropy
                    reduction = "none" if name == "none" else "mean"
                    loss = function(flat(logits), Y.view(-1), reduction=reduction).mean()
                found.append((loss, torch.autograd.grad(loss, head.weight)[0], of_head))
    for (loss, gradient, is_rounded), (tiled_loss, tiled_gradient, _) in zip(found[::2], found[1::2]):
        assert loss.dtype == tiled_loss.dtype
        tolerance = 1e-2 if is_rounded else 1e-5
        torch.testing.assert_close(tiled_loss, loss, rtol=tolerance if loss.dtype != torch.float32 else 1e-5, atol=1e-6)
        assert (tiled_gradient - gradient).norm() <= tolerance * gradient.norm()
