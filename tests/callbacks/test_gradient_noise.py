"""The gradient noise scale: a closed form, and runs against gradients that are taken one by one."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_parallel import GradientNoiseScale, HybridParallelStrategy, PowerSGD
from lightning_parallel.callbacks.monitors.gradient_noise import (
    GradientNoiseAccumulator,
    NoisePoint,
    noise_estimates,
    noise_rows,
)
from lightning_parallel.callbacks.report.page import render
from lightning_parallel.mesh import Mesh
from tests.harness import distributed
from tests.strategies.models import BATCH, Samples, loader, trainer_for
from tests.strategies.test_pipeline import Deep, fit


def test_estimates_are_those_of_a_known_distribution():
    """Gradients of samples with mean `g` and variance 4 in each of 50 dimensions: |g|^2 = 12.5, trace 200."""
    generator = torch.Generator().manual_seed(0)
    batches = 0.5 + 2.0 * torch.randn(4000, 8, 4, 50, generator=generator, dtype=torch.float64)  # steps, replicas
    small = batches.mean(2).square().sum(-1).mean(1)
    big = batches.mean((1, 2)).square().sum(-1)
    found = [noise_estimates(float(s), float(b), 4, 32) for s, b in zip(small, big)]
    square, variance = (torch.tensor(values).mean() for values in zip(*found))
    torch.testing.assert_close(square, torch.tensor(12.5), rtol=0.02, atol=0.0)
    torch.testing.assert_close(variance, torch.tensor(200.0), rtol=0.02, atol=0.0)


class Still(Deep):
    """Does not move, so that each step can be taken again."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _by_hand(small_batches, decay):
    """Return the squared norm of the gradient and its variance, from autograd's own gradients."""
    module = Still()
    square = variance = 0.0
    for batches in small_batches:
        each = []
        for x, y in batches:
            loss = F.cross_entropy(module(x), y)
            each.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))]))
        small, big = sum(g.dot(g) for g in each) / len(each), torch.stack(each).mean(0).square().sum()
        b, n = len(batches[0][1]), len(batches)
        square = decay * square + (1 - decay) * (n * b * big - b * small) / (n * b - b)
        variance = decay * variance + (1 - decay) * (small - big) / (1 / b - 1 / (n * b))
    weight = 1 - decay ** len(small_batches)
    return {"gradient_square": float(square / weight), "variance": float(variance / weight)}


def _assert_found(report, expected):
    assert {key: report[key] for key in expected} == pytest.approx(expected, rel=1e-10)


def test_reports_over_ranks():
    """Two replicas of two ranks each; a step that a rank has not measured is left out."""
    mesh = Mesh(data_parallel=2, tensor_parallel=2)
    shared = [{"rank": rank, "points": [NoisePoint(0, 3.0, 1.0, 4.0, 4.0)]} for rank in range(4)]
    shared[0]["points"].append(NoisePoint(1, 9.0, 1.0, 4.0, 4.0))
    report = GradientNoiseAccumulator(mesh, 0, 0.9, lambda: []).summarize(shared)
    # small 6, big 2: (8 * 2 - 4 * 6) / 4 < 0, so that the noise cannot be told.
    assert "noise_scale" not in report
    assert "Measure more steps" in report["missing"][0]
    for rank in shared:
        rank["points"] = [NoisePoint(0, 3.0, 2.0, 4.0, 4.0)]
    report = GradientNoiseAccumulator(mesh, 0, 0.9, lambda: shared).summarize(shared)
    # Small 6, big 4: (8 * 4 - 4 * 6) / 4 = 2, and (6 - 4) / (1 / 4 - 1 / 8) = 16.
    found = {key: report[key] for key in ("noise_scale", "critical_replicas", "efficiency", "gain_of_doubling")}
    expected = {"noise_scale": 8.0, "critical_replicas": 2, "efficiency": 0.5, "gain_of_doubling": 2.0 / 1.5}
    assert found == pytest.approx(expected)
    assert ["largest useful batch", "2 of 4 samples each"] in noise_rows(report)
    page = render({"run": {"world_size": 4, "steps": 1}, "reports": {"GradientNoiseScale": report}})
    assert "2 of 4 samples each" in page


def test_accumulated_batches_of_one_process(tmp_path):
    noise = GradientNoiseScale(every_n_steps=1, decay=0.5, dirpath=str(tmp_path))
    module = Still()
    options = {"limit_train_batches": 5, "limit_val_batches": 0, "max_epochs": 1, "accumulate_grad_batches": 2}
    trainer_for(callbacks=[noise], **options).fit(module, DataLoader(Samples(), batch_size=4))
    batches = list(DataLoader(Samples(), batch_size=4))
    report = noise.report()
    # The last batch of the epoch is a step by itself, and left out.
    assert report["measured_steps"] == 2
    _assert_found(report, _by_hand([batches[:2], batches[2:4]], 0.5))
    assert (tmp_path / "GradientNoiseScale.json").exists()
    # With scaled losses, in a precision in which scaling is exact.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    plugin.forward_context = nullcontext
    again = GradientNoiseScale(every_n_steps=1, decay=0.5, show_table=False)
    trainer_for(callbacks=[again], plugins=[plugin], **options).fit(Still(), DataLoader(Samples(), batch_size=4))
    _assert_found(again.report(), {key: report[key] for key in ("gradient_square", "variance")})
    for options, reason in (
        ({}, "no batches are accumulated"),
        ({"every_n_steps": 0}, "`every_n_steps` must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            trainer_for(callbacks=[GradientNoiseScale(**options)]).fit(Still(), loader())


LAYOUTS = {
    "ddp": (DDPStrategy, 2, 2),
    "tensor": (lambda: HybridParallelStrategy(tensor_parallel_size=2), 4, 2),
    "pipeline": (lambda: HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=2), 4, 2),
}


def _check(layout):
    make, ranks, replicas = LAYOUTS[layout]
    noise = GradientNoiseScale(every_n_steps=1, decay=0.5, show_table=False)
    fit(Still(), make(), ranks, replicas, callbacks=[noise], max_epochs=1, use_distributed_sampler=False)
    parts = [list(loader(replicas, replica)) for replica in range(replicas)]
    expected = _by_hand([list(step) for step in list(zip(*parts))[:2]], 0.5)
    report = noise.report()
    _assert_found(report, expected)
    assert (report["batch"], report["batch_of_replica"]) == (BATCH, BATCH / replicas)


@distributed(world_size=2)
def test_replicas_of_ddp():
    _check("ddp")
    strategy = HybridParallelStrategy(compression=PowerSGD(1))
    with pytest.raises(ValueError, match="compressed gradients are not the mean"):
        fit(Still(), strategy, 2, 2, callbacks=[GradientNoiseScale()])


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@distributed(world_size=4)
def test_replicas_that_are_divided(layout):
    _check(layout)
