"""Training with compressed gradients arrives where training with plain means does."""

import functools

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_parallel.comm import Group
from lightning_parallel.compression import BlockTopK, Dense, PowerSGD, Quantize, RandomK, Sign, TopK
from tests.harness import distributed

STEPS, BATCH = 150, 128


def _train(compressor, group):
    """Loss over all digits after training a small network on them, each rank with its part of every batch."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    order, share = torch.Generator().manual_seed(1), BATCH // group.size
    for _ in range(STEPS):
        chosen = torch.randperm(len(images), generator=order)[:BATCH][group.rank * share :][:share]
        optimizer.zero_grad()
        cross_entropy(model(images[chosen]), labels[chosen], label_smoothing=0.1).backward()
        assert compressor.reduce_({name: parameter.grad for name, parameter in model.named_parameters()}, group)
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return cross_entropy(model(images), labels, label_smoothing=0.1).item()


@functools.cache
def _dense_loss(size):
    return _train(Dense(), Group.of())


MADE = {
    "alternating": lambda: PowerSGD(alternate=True),
    "sign": lambda: Sign(start_step=25),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [Quantize, "sign", PowerSGD, "alternating", TopK, BlockTopK, RandomK])
@distributed(world_size=2)
def test_digits_reach_the_dense_loss_with_the_defaults(kind, group):
    compressor = MADE.get(kind, kind)()
    assert _train(compressor, group) < 1.06 * _dense_loss(group.size)


@distributed(world_size=2)
def test_digits_do_not_reach_it_without_error_feedback(group):
    assert _train(TopK(feedback=None), group) > 1.15 * _dense_loss(group.size)


def _quadratic(compressor, group, learning_rate, steps):
    """Distance to the minimum of the mean of two quadratics whose own minima lie far apart."""
    draws = torch.Generator().manual_seed(group.rank)
    slope = torch.rand(8, 8, generator=draws, dtype=torch.float64) + 0.5
    center = 5 * torch.randn(8, 8, generator=draws, dtype=torch.float64)
    slopes, pulls = slope.clone(), slope * center
    Dense().reduce_({"slopes": slopes, "pulls": pulls}, group)
    minimum, x = pulls / slopes, torch.zeros(8, 8, dtype=torch.float64)
    for _ in range(steps):
        gradient = slope * (x - center)
        compressor.reduce_({"x": gradient}, group)
        x -= learning_rate * gradient
    return ((x - minimum).norm() / minimum.norm()).item()


@distributed(world_size=2)
def test_heterogeneous_quadratic(group):
    for compressor in (
        TopK(0.2, feedback="ef21", min_numel=0),
        PowerSGD(2, feedback="ef21", min_numel=0),
        RandomK(0.5, feedback="ef21", min_numel=0),
    ):
        assert _quadratic(compressor, group, 0.3, 80) < 1e-6, "EF21 converges to the minimum at a constant step size"
    for compressor in (TopK(0.2, min_numel=0), Sign(min_numel=0), PowerSGD(1, min_numel=0), Quantize(4, min_numel=0)):
        assert _quadratic(compressor, group, 0.05, 80) < 0.1, "classic feedback stays near it"
    assert _quadratic(Sign(feedback=None, min_numel=0), group, 0.05, 80) > 0.5, "without feedback signs do not agree"
    assert _quadratic(TopK(0.1, feedback=None, min_numel=0), group, 0.05, 80) > 0.5, "without feedback large ones win"
