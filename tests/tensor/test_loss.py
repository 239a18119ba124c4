"""Cross-entropy over divided classes against PyTorch's over all of them."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from lightning_parallel.comm import Group
from lightning_parallel.tensor.autograd import reduce_from_group
from lightning_parallel.tensor.loss import cross_entropy
from lightning_parallel.tensor.sharding import Shard
from tests.harness import distributed, recorded_communication, run


def compare(group, logits, target, classes, dim=-1, atol=1e-12, **options):
    """`logits` are whole, with the classes in dimension `dim`."""
    rule = Shard.even(dim, classes, group.size)
    mine = rule.split(logits, group.rank).requires_grad_()
    whole = logits.clone().requires_grad_()
    loss = cross_entropy(mine, target, rule, group, dim=dim, **options)
    expected = F.cross_entropy(whole.movedim(dim, -1).reshape(-1, classes), target.flatten(), **options)
    torch.testing.assert_close(loss.flatten(), expected.flatten(), rtol=atol, atol=atol, equal_nan=True)
    assert loss.dtype == expected.dtype
    if options.get("reduction") == "none":
        assert loss.shape == target.shape
    factor = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype)
    (loss.flatten() * factor).sum().backward()
    (expected.flatten() * factor).sum().backward()
    torch.testing.assert_close(mine.grad, rule.split(whole.grad, group.rank), rtol=atol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("world", [2, 3])
def test_equals_torch(world):
    run(equals_torch, world)


def equals_torch(group):
    classes = 11
    logits = torch.randn(2, 3, classes, dtype=torch.double) * 3
    target = torch.randint(classes, (2, 3))
    some = target.clone()
    some[0, 1] = some[1, 2] = -100
    weight = torch.rand(classes, dtype=torch.double)
    for chosen, w, smoothing, reduction in itertools.product(
        (target, some, torch.zeros_like(target)), (None, weight), (0.0, 0.1), ("mean", "sum", "none")
    ):
        compare(group, logits, chosen, classes, weight=w, label_smoothing=smoothing, reduction=reduction)
    compare(group, logits, torch.full_like(target, -100), classes)
    compare(group, logits, torch.full_like(target, -100), classes, reduction="sum", label_smoothing=0.1)
    compare(group, logits, target, classes, ignore_index=int(target[0, 0]), label_smoothing=0.2)
    compare(group, logits.movedim(-1, 1), target, classes, dim=1)
    compare(group, logits[0, 0], target[0, 0], classes)
    compare(group, logits.float(), some, classes, atol=1e-5, label_smoothing=0.1)
    compare(group, logits.bfloat16(), some, classes, atol=2e-2)


@distributed(world_size=2)
def test_gradients_of_gradients(group):
    classes = 7
    rule = Shard.even(-1, classes, group.size)
    logits, target = torch.randn(2, 3, classes, dtype=torch.double), torch.tensor([[1, 6, -100], [3, 0, 2]])
    for smoothing, weight in ((0.0, None), (0.2, torch.rand(classes, dtype=torch.double))):
        mine = rule.split(logits, group.rank).requires_grad_()
        whole = logits.clone().requires_grad_()
        options = {"label_smoothing": smoothing, "weight": weight}
        loss = cross_entropy(mine.sin(), target, rule, group, **options)
        expected = F.cross_entropy(whole.sin().flatten(0, 1), target.flatten(), **options)
        (first,) = torch.autograd.grad(loss.exp(), mine, create_graph=True)
        (wanted,) = torch.autograd.grad(expected.exp(), whole, create_graph=True)
        (loss + reduce_from_group(first.pow(2).sum(), group)).backward()
        (expected + wanted.pow(2).sum()).backward()
        torch.testing.assert_close(mine.grad, rule.split(whole.grad, group.rank), rtol=1e-12, atol=1e-12)


@distributed(world_size=2)
def test_large_and_masked_logits_are_stable(group):
    logits = torch.tensor([[1e4, -1e4, 0.0, 9999.0], [-1e30, 3.0, 2.0, 1.0]], dtype=torch.double)
    compare(group, logits, torch.tensor([3, 1]), 4)
    logits[:, 2:] = -torch.inf  # a shard without a single possible class
    compare(group, logits, torch.tensor([1, 1]), 4)


@distributed(world_size=2)
def test_small_messages_only(group):
    rule = Shard.even(-1, 64, 2)
    logits = torch.randn(5, 32, requires_grad=True)
    with recorded_communication() as records:
        cross_entropy(logits, torch.randint(64, (5,)), rule, group, label_smoothing=0.1).backward()
    assert [(record.op, record.bytes) for record in records] == [("all_reduce", 20), ("all_reduce", 60)]


@distributed(world_size=2)
def test_autocast_gives_single_precision(group):
    rule = Shard.even(-1, 8, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(torch.randn(3, 4).bfloat16(), torch.randint(8, (3,)), rule, group)
    assert loss.dtype == torch.float32


def test_one_rank():
    compare(Group.alone("tensor_parallel"), torch.randn(3, 5, dtype=torch.double), torch.tensor([1, 0, 4]), 5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reduction": "average"}, ValueError, "`reduction` must be"),
        ({"label_smoothing": 1.5}, ValueError, "`label_smoothing` must be between 0 and 1"),
        ({"target": torch.rand(3, 5)}, ValueError, "class probabilities"),
        ({"target": torch.tensor([1, 2])}, ValueError, r"2,\) targets by 5 classes; got shape \(3, 5\)"),
        ({"target": torch.tensor([1, 2, 5])}, IndexError, r"Targets must be in \[0, 5\) or -100"),
        ({"rule": Shard.even(0, 10, 2)}, ValueError, "each of the 1 ranks one range"),
    ],
)
def test_errors(change, error, message):
    arguments = {
        "logits": torch.randn(3, 5),
        "target": torch.tensor([1, 2, 3]),
        "rule": Shard.even(0, 5, 1),
        "group": Group.alone("tensor_parallel"),
    }
    with pytest.raises(error, match=message):
        cross_entropy(**{**arguments, **change})
