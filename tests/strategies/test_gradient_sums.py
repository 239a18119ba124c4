"""`gradient_sum_dtype`: gradients of 16-bit parameters are added in single precision and rounded once."""

import functools

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parallel import (
    Cast,
    HybridParallelStrategy,
    LocalSGDStrategy,
    MemoryProfiler,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_parallel.comm.gradient_sums import bytes_of_exact, exact_gradient, sum_exactly
from tests.harness import distributed
from tests.strategies.models import Samples, trainer_for

SAMPLES, WIDTH = 128, 12


class Blocks(LightningModule):
    """Repeated blocks with norms; keeps the gradients of its step, and their exact sums."""

    def __init__(self, is_tied=False):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        if is_tied:
            self.head.weight = self.embed.weight
        # Weights of 16 bits, so that all precisions compute with the same ones.
        self.bfloat16().double()
        self.gradients, self.between, self.bytes_in_step = {}, [], []

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x.to(self.embed.weight.dtype)).double(), y)

    def on_after_backward(self):
        self.sent = self.trainer.strategy.run.reducer.traffic.peak
        self.between.append({p.grad.dtype for p in self.parameters() if p.grad is not None})

    def on_before_optimizer_step(self, optimizer):
        # Full values: hooks see the gradients of the full model, as tensors that gather.
        named = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        self.gradients = {name: torch.tensor(gradient.tolist()).double() for name, gradient in named.items()}
        self.bytes_in_step.append(sum(map(bytes_of_exact, self.parameters())))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _loader(batch, replicas=1, rank=0):
    data = Samples(WIDTH, length=SAMPLES)
    return DataLoader(data, batch, sampler=DistributedSampler(data, replicas, rank, shuffle=False))


@functools.cache
def _expected(is_tied=False):
    module = Blocks(is_tied)
    module.training_step(next(iter(_loader(SAMPLES))), 0).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def _error(module, is_tied=False):
    """The largest relative error of a gradient beside one process in double precision."""
    expected = _expected(is_tied)
    errors = [(found - expected[name]).norm() / expected[name].norm() for name, found in module.gradients.items()]
    return float(torch.stack(errors).mean())


def _fit(strategy, group, batch, replicas, is_tied=False, **kwargs):
    module = Blocks(is_tied)
    trainer = trainer_for(strategy, group.size, max_steps=1, precision="bf16-true", **kwargs)
    trainer.fit(module, _loader(batch, replicas, group.rank * replicas // group.size))
    return module


LAYOUTS = {
    "pipeline": (PipelineParallelStrategy, {"num_microbatches": 64}, 64, 1),
    "pipeline, zero bubble": (PipelineParallelStrategy, {"num_microbatches": 64, "schedule": "zb_h1"}, 64, 1),
    "pipeline, accumulated": (PipelineParallelStrategy, {"num_microbatches": 8}, 16, 1),
    "data": (HybridParallelStrategy, {}, 1, 2),
    "data, zero 1": (HybridParallelStrategy, {"zero_stage": 1}, 1, 2),
    "data, zero 2": (HybridParallelStrategy, {"zero_stage": 2}, 1, 2),
    "data, zero 3": (HybridParallelStrategy, {"zero_stage": 3}, 1, 2),
    "data, compressed": (HybridParallelStrategy, {"compression": Cast("fp32")}, 1, 2),
    "tensor": (TensorParallelStrategy, {}, 2, 1),
    "local": (LocalSGDStrategy, {"pipeline_parallel_size": 2, "num_microbatches": 64}, 64, 1),
}


def _expect_small_errors(strategy, group, batch, replicas, is_tied=False, share=0.5):
    accumulated = SAMPLES // batch // replicas
    errors = {}
    for dtype in ("bf16", None):
        module = _fit(strategy(dtype), group, batch, replicas, is_tied, accumulate_grad_batches=accumulated)
        errors[dtype] = _error(module, is_tied)
        assert module.between == [{torch.bfloat16}] * accumulated, (dtype, module.between[:3], len(module.between))
        assert module.bytes_in_step == [0]  # freed before the optimizer's state and its temporaries need memory
    assert errors[None] < share * errors["bf16"], errors
    assert errors[None] < 0.0035, errors  # rounded once: 0.0017, and the rest in forward and backward


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAYOUTS)
@distributed(world_size=2)
def test_64_gradients_are_added_without_their_errors(name, group):
    kind, options, batch, replicas = LAYOUTS[name]
    # Sums of few sums have smaller errors.
    share = 0.7 if "accumulated" in name else 0.5
    make = functools.partial(kind, **options)
    _expect_small_errors(lambda dtype: make(gradient_sum_dtype=dtype), group, batch, replicas, share=share)


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("zero_stage", [0, 2])
@distributed(world_size=4)
def test_tied_parameters_of_a_pipeline_with_replicas(zero_stage, group):
    def strategy(dtype):
        sizes = {"pipeline_parallel_size": 2, "num_microbatches": 64, "zero_stage": zero_stage}
        return HybridParallelStrategy(**sizes, gradient_sum_dtype=dtype)

    _expect_small_errors(strategy, group, 64, 2, is_tied=True)


@distributed(world_size=2)
def test_the_profiler_counts_the_sums(group):
    profiler = MemoryProfiler(activations=False)
    module = _fit(PipelineParallelStrategy(num_microbatches=4), group, 8, 1, callbacks=[profiler])
    elements = sum(parameter.numel() for parameter in module.parameters())  # of both stages, after the run
    ranks = profiler.report()["ranks"]
    assert sum(rank["gradients"] for rank in ranks) == 6 * elements
    assert [rank["gradients"] for rank in ranks] == [rank["predicted"]["gradients"] for rank in ranks]


@distributed(world_size=2)
def test_one_gradient_needs_no_sum(group):
    for dtype, width in ((None, 2), ("fp32", 4), (torch.bfloat16, 2)):
        strategy = HybridParallelStrategy(gradient_sum_dtype=dtype)
        module = _fit(strategy, group, 8, 2)
        assert strategy.run.reducer is None
        assert module.sent == width * sum(parameter.numel() for parameter in module.parameters())
        assert module.between == [{torch.bfloat16}]


@distributed(world_size=2)
def test_frozen_and_unfrozen_parameters_and_manual_steps(group):
    class Manual(Blocks):
        automatic_optimization = False

        def on_train_epoch_start(self):
            self.head.requires_grad_(self.current_epoch > 0)

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            for x, y in zip(*(part.split(2) for part in batch)):
                self.manual_backward(super().training_step((x, y), index) * len(x) / len(batch[1]))
            optimizer.step()
            optimizer.zero_grad()

    errors = {}
    for dtype in ("bf16", "fp32"):
        module = Manual()
        trainer = trainer_for(HybridParallelStrategy(gradient_sum_dtype=dtype), 2, precision="bf16-true")
        trainer.fit(module, _loader(SAMPLES // 2, 2, group.rank))
        assert set(module.gradients) == set(_expected())
        errors[dtype] = _error(module)
    assert errors["fp32"] < 0.5 * errors["bf16"], errors


class Weight:
    """A parameter whose gradients are added exactly, and the gradients of its losses."""

    def __init__(self):
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 64).bfloat16())
        self.handles = sum_exactly(self.weight, torch.float32)

    def add(self, **kwargs):
        loss = (torch.randn(8, 64).bfloat16() @ self.weight).float().pow(2).mean()
        gradient = torch.autograd.grad(loss, self.weight, retain_graph=True)[0]
        loss.backward(**kwargs)
        return gradient.float()


def test_grad_is_the_rounded_sum_at_any_time():
    one = Weight()
    total = torch.zeros(64, 64)
    for _ in range(8):
        total += one.add()
        assert torch.equal(one.weight.grad, total.bfloat16())
    assert torch.equal(exact_gradient(one.weight.grad), total)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.grad.data.zero_(),  # no version counts it
        lambda weight: weight.grad.clamp_(-1e-3, 1e-3),
        lambda weight: setattr(weight, "grad", weight.grad * 0.5),
        lambda weight: setattr(weight, "grad", None),
        lambda weight: torch.nn.utils.clip_grad_norm_([weight], 1e-3),
    ],
)
def test_the_next_gradient_is_added_to_a_changed_one(change):
    one = Weight()
    one.add()
    one.add()
    change(one.weight)
    now = torch.zeros(64, 64) if one.weight.grad is None else one.weight.grad.float()
    new = one.add()
    # Below the largest rounding: half of the spacing at 0.5.
    torch.testing.assert_close(exact_gradient(one.weight.grad).float(), now + new, rtol=0.0, atol=1e-3)


def test_hooks_of_the_user_see_each_gradient_and_the_sum():
    one = Weight()
    seen, sums = [], []
    one.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
    one.weight.register_post_accumulate_grad_hook(lambda weight: sums.append(weight.grad.clone()))
    first, second = one.add(), one.add()
    # Each `add` also asks for the gradient alone, which runs the hook, too.
    assert torch.equal(2 * seen[1], first.bfloat16())
    assert torch.equal(2 * seen[3], second.bfloat16())
    assert torch.equal(sums[-1], one.weight.grad)
    assert torch.equal(exact_gradient(one.weight.grad), first + second)


def test_graphs_of_gradients_stay_torchs():
    one = Weight()
    one.add(create_graph=True)
    one.add(create_graph=True)
    assert one.weight.grad.requires_grad
    assert not bytes_of_exact(one.weight)


def test_a_wrong_dtype_is_told():
    with pytest.raises(ValueError, match="`gradient_sum_dtype` must be None, 'fp32', .*got 'fp64'"):
        TensorParallelStrategy(gradient_sum_dtype="fp64")
