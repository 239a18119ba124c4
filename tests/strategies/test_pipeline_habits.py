"""What real models do, in stages: in-place operations, odd classes, copies of the model, towers, means over tokens."""

import copy
import functools
import os
from abc import ABC
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy
from lightning_parallel.compat import patched
from lightning_parallel.pipeline import measure
from tests.harness import distributed
from tests.strategies.models import trainer_for
from tests.strategies.test_pipeline_models import Rows


class Recurrent(ABC, nn.RNNBase):
    """A base that is no module comes first: instances take no class with another first base."""


class LSTM(Recurrent, nn.LSTM):
    pass


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 12), nn.ReLU(inplace=True), nn.Linear(12, 6))

    def forward(self, x):
        y = self.block(x)
        y += x
        return y.mul_(0.5)


class Habit(LightningModule):
    """Tokens (8, 5) to classes, through blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(InPlace() for _ in range(4))
        self.head = nn.Linear(6, 9)
        self.losses = []

    def logits(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            x += 0.1
        return self.head(x)

    def loss(self, tokens, labels):
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), tokens.flatten())

    def training_step(self, batch, index):
        loss = self.loss(*batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=0.1, momentum=0.9)


class OfSeveralBases(Habit):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(LSTM(6, 6, batch_first=True) for _ in range(3))

    def logits(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)[0]
        return self.head(x)


class Averaged(Habit):
    """Its moving average is registered before it."""

    def __init__(self):
        super().__init__()
        model = nn.Sequential(nn.Embedding(9, 6), nn.Sequential(*(InPlace() for _ in range(4))), nn.Linear(6, 9))
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        self.model = model
        del self.embed, self.blocks, self.head

    def logits(self, tokens):
        return self.model(tokens)

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        for mine, theirs in zip(self.teacher.parameters(), self.model.parameters()):
            mine.lerp_(theirs, 0.3)


class Taught(Averaged):
    """The teacher is part of the step, so that it cannot be divided alike."""

    def loss(self, tokens, labels):
        logits = self.logits(tokens)
        with torch.no_grad():
            target = self.teacher(tokens)
        return (logits - target).square().mean()

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        next(self.teacher.parameters(), torch.zeros(1)).mul_(0.9)


class Towers(Habit):
    """Registered in another order than it is run."""

    def __init__(self):
        super().__init__()
        self.up = nn.ModuleList(InPlace() for _ in range(2))
        self.blocks = nn.ModuleList(InPlace() for _ in range(2))
        # The order of registration is that of these lines.
        self._modules = {name: self._modules[name] for name in ("up", "head", "blocks", "embed")}

    def logits(self, tokens):
        x = self.embed(tokens)
        for block in [*self.blocks, *reversed(self.up)]:
            x = block(x)
        return self.head(x)


class Queries(Habit):
    """Reads the matrix of an embedding that it never calls, and passes it to the layers."""

    class Layer(InPlace):
        def forward(self, x, queries):
            return super().forward(x + queries)

    def __init__(self):
        super().__init__()
        self.queries = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(4))

    def logits(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.queries.weight)
        return self.head(x)


class OverTokens(Habit):
    """A mean over the labels that are left."""

    def loss(self, tokens, labels):
        return F.cross_entropy(self.logits(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class AlikeInHalves(OverTokens):
    """In its first batch, all microbatches have equally many labels."""


class AlikeInSamples(OverTokens):
    """In its first batch, all samples have equally many labels."""


class Masked(Habit):
    """A mean over the tokens that a mask leaves."""

    def loss(self, tokens, labels):
        losses = F.cross_entropy(self.logits(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
        return (losses * labels.flatten()).sum() / labels.sum().clamp(min=1)


def batch(kind):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 9, (8, 5), generator=generator)
    labels = tokens.clone()
    labels[1, 2:] = labels[3, 4:] = labels[4:6] = -100  # a microbatch without any, too
    if issubclass(kind, (AlikeInHalves, AlikeInSamples)):
        first = tokens.clone()
        first[1::2, 3:] = -100
        if kind is AlikeInSamples:
            first[::2, 3:] = -100
        return torch.cat([tokens, tokens]), torch.cat([first, labels])
    return tokens, (labels != -100).long() if kind is Masked else labels


def train(kind, strategy, devices):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = kind()
    finally:
        torch.set_default_dtype(before)
    trainer = trainer_for(strategy, devices, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(Rows(batch(kind)), batch_size=8))
    return module, trainer


@functools.lru_cache
def on_one_process(kind):
    return train(kind, "auto", 1)[0]


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        *((Habit, schedule) for schedule in ("1f1b", "zb_h1", "zbv")),
        *(
            (kind, "1f1b")
            for kind in (OfSeveralBases, Averaged, Towers, OverTokens, AlikeInHalves, AlikeInSamples, Masked, Queries)
        ),
    ],
)
@distributed(world_size=2)
def test_equals_one_process(group, kind, schedule):
    expected = on_one_process(kind)
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4, schedule=schedule)
    # As if the model were large, for half of the losses over tokens.
    with patched(measure, "LARGE_BYTES", -1) if kind in (AlikeInSamples, Masked) else nullcontext():
        module, trainer = train(kind, strategy, 2)
    full = strategy.lightning_module_state_dict()
    torch.testing.assert_close(torch.stack(module.losses), torch.stack(expected.losses), rtol=1e-10, atol=1e-12)
    if group.rank == 0:
        assert list(full) == list(expected.state_dict())
        torch.testing.assert_close(full, dict(expected.state_dict()), rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_a_teacher_that_is_divided_otherwise_must_not_change(group):
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4)
    with pytest.raises(RuntimeError, match="`teacher` is a copy of `model` and has changed"):
        train(Taught, strategy, 2)
