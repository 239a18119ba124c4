"""Steps for evaluation that cannot run in stages: every rank runs them on the whole model, as one process does."""

import os
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy
from lightning_parallel.comm import Group
from tests.harness import distributed
from tests.strategies.models import trainer_for
from tests.strategies.test_pipeline_models import Rows


class Sampler(LightningModule):
    """Trains on tokens; evaluates by sampling, by its encoder alone, or not at all."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(4)])
        self.head = nn.Linear(6, 9)
        self.right = MeanMetric()
        self.way = way

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))

    def training_step(self, batch, index):
        return F.cross_entropy(self(batch).flatten(0, 1), batch.flatten())

    def sampled(self, tokens):
        for _ in range(3):
            odds = self(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(odds, 1)], 1)
        return tokens

    def validation_step(self, batch, index):
        if self.way == "nothing":
            return
        if self.way == "a part":
            self.log("part", self.blocks[:2](self.embed(batch)).square().mean())
        elif self.way == "twice":
            self.right.update(F.mse_loss(self(batch), self(batch.flip(1))))
            self.log("right", self.right)
        elif self.way == "sampled":
            self.log("sum", self.sampled(batch).double().mean())
        elif self.way == "weight":
            self.log("weight", F.linear(self.head.weight, self.embed.weight).sum() + batch.double().mean())

    def predict_step(self, batch, index):
        return self.sampled(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Varying(Sampler):
    """Its second batch needs what the first did not."""

    def test_step(self, batch, index):
        start = self.embed(batch)
        self.log("loss", (self.head(self.blocks(start)).mean() + (start.mean() if index else 0.0)).double())


class Later(Sampler):
    """Needs what skips over the cut, in training only."""

    def training_step(self, batch, index):
        start = self.embed(batch)
        return F.cross_entropy(self.head(self.blocks(start) + start).flatten(0, 1), batch.flatten())


def run(way, strategy, devices):
    rank = Group.of().rank if devices > 1 else 0
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(devices))
    tokens = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(Rows(tokens), batch_size=4)
    module = Sampler(way).double()
    trainer = trainer_for(strategy, devices, True, max_epochs=1, num_sanity_val_steps=1)
    torch.manual_seed(7)
    trainer.fit(module, loader, loader)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    torch.manual_seed(8)
    predicted = torch.cat(trainer.predict(module, loader)) if way == "sampled" else None
    return logged, predicted, {name: value.clone() for name, value in module.state_dict().items()}


def trained_later(strategy, devices):
    """Sample with a new model, and train it afterwards."""
    rank = Group.of().rank if devices > 1 else 0
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(devices))
    tokens = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(Rows(tokens), batch_size=4)
    module = Later("nothing").double()
    trainer = trainer_for(strategy, devices, True, max_epochs=1, limit_val_batches=0)
    torch.manual_seed(8)
    predicted = torch.cat(trainer.predict(module, loader))
    trainer.fit(module, loader)
    return predicted, {name: value.clone() for name, value in module.state_dict().items()}


def expect_one_process(way, strategy, devices):
    expected = run(way, "auto", 1)
    text = "`validation_step` is not run in pipeline stages: .*Every rank runs it"
    with pytest.warns(UserWarning, match=text) if Group.of().rank == 0 else nullcontext():
        found = run(way, strategy, devices)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-10, atol=1e-12)
    if way == "sampled":
        assert torch.equal(found[1], expected[1])


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["nothing", "a part", "twice", "sampled", "weight"])
@distributed(world_size=2)
def test_a_pipeline_evaluates_like_one_process(group, way):
    expect_one_process(way, PipelineParallelStrategy(), 2)


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_a_hybrid_evaluates_like_one_process(group):
    expect_one_process("sampled", HybridParallelStrategy(tensor_parallel_size=2, pipeline_parallel_size=2), 4)


@distributed(world_size=2)
def test_a_later_batch_that_needs_more(group):
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    loader = DataLoader(Rows(torch.zeros(8, 5, dtype=torch.long)), batch_size=4)
    module = Varying("nothing").double()
    found = []
    for strategy, devices in (("auto", 1), (PipelineParallelStrategy(), 2)):
        found += trainer_for(strategy, devices, True).test(module, loader, verbose=False)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_a_new_model_samples_first_and_trains_later(group):
    expected = trained_later("auto", 1)
    for strategy in (PipelineParallelStrategy(), PipelineParallelStrategy(gather_after_fit="off")):
        predicted, state = trained_later(strategy, 2)
        assert torch.equal(predicted, expected[0])
        for name, value in state.items():
            torch.testing.assert_close(value, expected[1][name], rtol=1e-10, atol=1e-12)
