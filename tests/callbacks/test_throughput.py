"""Samples, tokens and operations per second, against runs of a forced step time and closed forms."""

import time

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parallel import HybridParallelStrategy, PowerSGD
from lightning_parallel.callbacks import Throughput
from lightning_parallel.callbacks.monitors.throughput import (
    POINTS,
    BatchCounts,
    ModelFlops,
    ThroughputAccumulator,
    num_tokens,
)
from lightning_parallel.mesh import Mesh
from lightning_parallel.tracing import Window
from tests.callbacks.conftest import place_rank
from tests.harness import run
from tests.strategies.models import trainer_for
from tests.timing import compares_durations, durations

WIDTH, LENGTH, BATCH, LAYERS, STEP_S = 16, 6, 8, 4, 0.15


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Words(LightningModule):
    """Blocks over embedded words; every step takes the same time on any layout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def training_step(self, batch, index):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def on_train_batch_start(self, batch, index):
        self.until = time.perf_counter() + STEP_S

    def on_train_batch_end(self, outputs, batch, index):
        time.sleep(max(0.0, self.until - time.perf_counter()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


FORWARD_FLOPS = LENGTH * LAYERS * 2 * (2 * WIDTH * 4 * WIDTH)
"""Of one sample."""


def measure(sizes, replicas):
    rank, size = place_rank()
    data = torch.arange(10 * BATCH * LENGTH * 2).reshape(-1, LENGTH) % 50
    sampler = DistributedSampler(data, replicas, rank // (size // replicas), shuffle=False)
    callback = Throughput(show_table=False, peak_flops=1e9)
    strategy, options = HybridParallelStrategy(**sizes), {"limit_train_batches": 4, "max_epochs": 1}
    trainer = trainer_for(strategy, size, callbacks=[callback], **options)
    trainer.fit(Words(), DataLoader(data, batch_size=BATCH, sampler=sampler))
    return callback.report()


LAYOUTS = {
    "tensor": ({"tensor_parallel_size": 2}, 1),
    "pipeline": ({"pipeline_parallel_size": 2, "num_microbatches": 4}, 1),
    "data": ({"data_parallel_size": 2, "compression": PowerSGD(rank=1, min_numel=1)}, 2),
}


@compares_durations
def test_replicas_count_and_the_ranks_of_one_do_not():
    rates = []
    for sizes, replicas in LAYOUTS.values():
        report = run(measure, 2, sizes=sizes, replicas=replicas)[0]
        rates.append(report["tokens_per_second"] / replicas)
        assert report["tokens_per_second"] == pytest.approx(report["samples_per_second"] * LENGTH)
        assert report["tokens_per_second"] * report["seconds_per_step"] == pytest.approx(replicas * BATCH * LENGTH)
        assert report["model_flops_per_sample"] == 3 * FORWARD_FLOPS
        assert report["model_flops_utilisation"] == pytest.approx(
            3 * FORWARD_FLOPS * report["samples_per_second"] / (1e9 * report["world_size"])
        )
        assert report["peak"] == {"flops_per_second": 1e9 * report["world_size"], "source": "given"}
        assert "missing" not in report
    with durations():
        assert max(rates) < 1.25 * min(rates), "of a replica"


def test_what_backward_computes_again_is_not_counted():
    module = Block()
    x = torch.randn(3, WIDTH, requires_grad=True)
    with ModelFlops() as plain:
        module(x).sum().backward()
    with ModelFlops() as again:
        torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).sum().backward()
    with ModelFlops() as meta:
        Block().to("meta")(x.to("meta"))
    with ModelFlops() as reentrant:
        torch.utils.checkpoint.checkpoint(module, x, use_reentrant=True).sum().backward()
    forward = 3 * 2 * (2 * WIDTH * 4 * WIDTH)
    assert plain.total == again.total == reentrant.total == 3 * forward
    assert meta.total == 0
    assert plain.unknown == set()


def test_what_is_frozen_costs_no_gradients_of_weights():
    """Frozen layers of one size with trained low-rank terms, and a trained head, on inputs without gradients."""
    rows, width, rank, layers = 3, 16, 2, 4
    frozen = [torch.randn(width, width) for _ in range(layers)]
    down = [nn.Parameter(torch.randn(width, rank)) for _ in range(layers)]
    up = [nn.Parameter(torch.randn(rank, width)) for _ in range(layers)]
    head = nn.Parameter(torch.randn(width, 5))
    x = torch.randn(rows, width)
    with ModelFlops() as counter:
        for whole, first, second in zip(frozen, down, up):
            x = x @ whole + x @ first @ second
        (x @ head).sum().backward()
    one, low = 2 * rows * width * width, 2 * rows * width * rank
    # The first layer's inputs need no gradient: neither through its frozen matrix, nor through its low-rank term.
    forward, gradients = layers * (one + 2 * low), (layers - 1) * (one + 4 * low) + 3 * low
    assert counter.total == forward + gradients + 3 * (2 * rows * width * 5)


def test_hooks_on_parameters_are_no_work_of_the_model():
    layer = nn.Linear(8, 8, bias=False)
    products = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: products.append(weight.grad @ weight.grad))
    with ModelFlops() as counter:
        layer(torch.ones(2, 8)).sum().backward()
    assert counter.total == 2 * (2 * 2 * 8 * 8)
    assert len(products) == 1


def test_operators_without_a_formula_are_named():
    library = torch.library.Library("of_a_user", "DEF")
    library.define("fused(Tensor x) -> Tensor")
    library.impl("fused", lambda x: x * 2, "CompositeExplicitAutograd")
    accumulator = ThroughputAccumulator(0, Mesh(1), (1e9, "given"))
    with ModelFlops() as counter:
        torch.ops.of_a_user.fused(torch.ones(2, 2) @ torch.ones(2, 2)).sum()
        nn.LSTM(4, 4)(torch.ones(2, 1, 4))
    assert "of_a_user::fused" in counter.unknown
    assert len(counter.unknown) <= 2, "what adds and copies takes no products"
    accumulator.flops, accumulator.uncounted = (16.0, 2), ["of_a_user::fused"]
    accumulator.count(0, BatchCounts(2, 2))
    accumulator.add(Window(0, 0, 10**9, {}, []))
    assert "`of_a_user::fused`" in accumulator.summarize([accumulator.share()])["missing"][0]
    library._destroy()


def test_attention_counts_its_two_products():
    query = torch.randn(2, 3, 5, 8)
    with ModelFlops() as counter:
        F.scaled_dot_product_attention(query, query, query)
    forward = 2 * (2 * 3 * 5 * 5 * 8) * 2
    assert counter.total == forward
    with ModelFlops() as counter:
        F.scaled_dot_product_attention(*(query.clone().requires_grad_() for _ in range(3))).sum().backward()
    assert counter.total == 3 * forward, "four products in backward, beside the one that it takes again"


class Orthogonal(torch.optim.SGD):
    """Multiplies matrices to find its update."""

    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.detach().view(len(parameter), -1).T @ parameter.detach().view(len(parameter), -1)
        return loss


class ByHand(Words):
    """Takes two updates in a step; its optimizer has matrix products of its own."""

    automatic_optimization = False

    def configure_optimizers(self):
        return Orthogonal(self.parameters(), lr=1e-3)

    def training_step(self, batch, index):
        for half in batch.chunk(2):
            loss = super().training_step(half, index)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()


@pytest.mark.parametrize("automatic", [True, False])
def test_what_an_optimizer_computes_is_no_work_of_the_model(automatic):
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from now on torch takes notice of its steps, also within others
    module = ByHand()
    if automatic:
        module.automatic_optimization, module.training_step = True, super(ByHand, module).training_step
    callback = Throughput(show_table=False, peak_flops=1e9)
    trainer = trainer_for(callbacks=[callback], max_steps=3)
    trainer.fit(module, DataLoader(torch.arange(4 * BATCH * LENGTH).reshape(-1, LENGTH) % 50, batch_size=BATCH))
    assert callback.report()["model_flops_per_sample"] == 3 * FORWARD_FLOPS


def window(step, seconds, validation=0.0):
    length = round(seconds * 1e9)
    return Window(
        step, 0, length + round(validation * 1e9), {"forward": length, "validation": round(validation * 1e9)}, []
    )


def report_of(ranks):
    return ranks[0].summarize([rank.share() for rank in ranks])


def test_validation_is_no_training_time():
    rank = ThroughputAccumulator(0, Mesh())
    for step in range(4):
        rank.count(step, BatchCounts(8, None))
        rank.add(window(step, 0.5, validation=1.0))
    report = report_of([rank])
    assert report["samples_per_second"] == pytest.approx(16)
    assert rank.scalars() == {"throughput/samples_per_second": pytest.approx(16)}
    assert rank.scalars() == {}
    assert "tokens_per_second" not in report
    assert "model_flops_utilisation" not in report
    assert len(report["missing"]) == 2


def test_the_slowest_replica_sets_the_pace():
    ranks = [ThroughputAccumulator(rank, Mesh(data_parallel=2, tensor_parallel=2), (1e6, "given")) for rank in range(4)]
    for rank, accumulator in enumerate(ranks):
        accumulator.flops = 3e3, 4
        accumulator.count(0, BatchCounts(4, 40))
        accumulator.add(window(0, 2.0 if rank == 3 else 1.0))
    report = report_of(ranks)
    assert (report["replicas"], report["samples_per_second"], report["tokens_per_second"]) == (2, 4, 40)
    assert report["model_flops_per_sample"] == 4 * 3e3 / 8
    assert report["model_flops_utilisation"] == pytest.approx(4 * 3e3 / 8 * 4 / 4e6)


def test_curves_stay_short_and_keep_their_mean():
    rank = ThroughputAccumulator(0, Mesh())
    for step in range(5 * POINTS):
        rank.count(step, BatchCounts(2, None))
        rank.add(window(step, 0.1))
    series = report_of([rank])["series"]
    assert POINTS / 2 <= len(series["step_seconds"]) <= POINTS
    assert series["step_seconds"][-1][0] == 5 * POINTS - 1
    assert all(value == pytest.approx(20) for _, value in series["samples_per_second"])


def test_tokens_of_a_batch():
    ids = torch.zeros(2, 7, dtype=torch.long)
    assert num_tokens({"pixels": torch.zeros(2, 3), "input_ids": ids}) == 14
    assert num_tokens((ids, ids)) == 14
    with pytest.raises(ValueError, match="input_ids"):
        num_tokens((torch.zeros(2, 7), torch.zeros(2, dtype=torch.long)))
