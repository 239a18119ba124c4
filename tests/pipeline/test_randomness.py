"""Random numbers that a step draws before its layers are the same on the stages before and after a cut.

The layers change nothing and the loss is the distance between the noise that went in and the noise that the loss knows:
zero, if both stages have drawn the same.
"""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel.pipeline.random_streams import OwnGenerators
from tests.harness import distributed
from tests.pipeline.test_engine import engine_for


class Unchanged(nn.Module):
    """A layer with a parameter that adds nothing."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return x + self.nothing


class Embedding(nn.Module):
    """A module with parameters, so that it is on one stage only, which draws."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x):
        self.draw(x)
        return self.linear(x)


class Noisy(nn.Module):
    def __init__(self, source):
        super().__init__()
        self.source = source
        self.embed = Embedding(self.draw_inside if source == "module" else lambda x: None)
        self.layers = nn.ModuleList(Unchanged() for _ in range(4))
        self.generator = torch.Generator().manual_seed(3)
        self.others = {"numpy": np.random.default_rng(3), "old": np.random.RandomState(3), "python": random.Random(3)}

    def draw_inside(self, x):
        F.dropout(x)
        torch.rand((), generator=self.generator)
        random.random()
        np.random.rand()

    def noise(self, x):
        numbers = {
            "torch": lambda: torch.rand(x.shape, generator=self.generator),
            "numpy": lambda: torch.tensor(self.others["numpy"].random(x.shape)),
            "old": lambda: torch.tensor(self.others["old"].rand(*x.shape)),
            "python": lambda: torch.tensor([[self.others["python"].random() for _ in row] for row in x]),
        }
        draw = numbers.get(self.source, lambda: torch.randn(x.shape) + random.random() + float(np.random.rand()))
        return draw().to(x.dtype)

    def forward(self, x):
        hidden = self.embed(x)
        if self.source == "functional":
            hidden = F.dropout(hidden, 0.5) + torch.rand_like(hidden)
        noise = self.noise(x)
        hidden = 0 * hidden + noise
        for layer in self.layers:
            hidden = layer(hidden)
        return (hidden - noise).square().mean()


SOURCES = ["module", "functional", "torch", "numpy", "old", "python", "rank zero"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@distributed(world_size=2)
def test_what_is_drawn_before_the_layers_is_equal_on_all_stages(group, schedule):
    for source in SOURCES:
        torch.manual_seed(5)
        model, batch = Noisy(source), torch.randn(4, 8)
        engine = engine_for(group, model, model, batch, schedule, microbatches=2)
        if source == "rank zero" and group.rank == 0:
            torch.rand(3)
        for _ in range(2):
            result = engine.forward_backward(model, batch)
            if group.rank == engine.last_rank:
                assert result.loss < 1e-12, source


@distributed(world_size=2)
def test_steps_and_microbatches_draw_other_numbers_and_a_seed_repeats_them(group):
    class Shown(Noisy):
        def forward(self, x):
            seen.append(self.noise(x))
            return super().forward(x)

    for source in ("torch", "module"):
        runs = []
        for _ in range(2):
            seen = []
            torch.manual_seed(5)
            model, batch = Shown(source), torch.ones(4, 8)
            engine = engine_for(group, model, model, batch, microbatches=2)
            seen.clear()
            for _ in range(2):
                engine.forward_backward(model, batch)
            runs.append(torch.cat(seen[-4:]))
        assert torch.equal(*runs)
        assert len({row.sum().item() for row in runs[0]}) == len(runs[0])


class Chancy(nn.Module):
    """A layer that draws from all generators."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(F.dropout(x, 0.3)) * random.random() + torch.rand_like(x) * float(np.random.rand())


@distributed(world_size=2)
def test_layers_draw_the_same_wherever_the_pipeline_is_cut(group):
    """A run that is resumed before its first checkpoint measures again, and may be cut elsewhere."""
    losses = []
    for balance in ([1, 3], [3, 1]):
        torch.manual_seed(5)
        model, batch = nn.Sequential(*(Chancy() for _ in range(4))), torch.randn(4, 8)
        step = lambda batch, model=model: model(batch).square().mean() + torch.rand(()) * random.random()  # noqa: E731
        engine = engine_for(group, model, step, batch, microbatches=2, balance=balance)
        engine.seeds = random.Random(7).getstate(), 1
        result = engine.forward_backward(step, batch)
        losses.append(result.loss if group.rank == engine.last_rank else torch.zeros(()))
    assert torch.equal(*losses)


def test_generators_in_one_state_are_equal_wherever_it_is_in_memory():
    one, other = OwnGenerators([Noisy("torch")]), OwnGenerators([Noisy("torch")])
    before = one.states()
    assert before == other.states() == one.states()
    expected = [torch.rand(3, generator=one.generators[0]) for _ in range(2)]
    assert one.states() != before
    one.restore(before)
    assert one.states() == before
    assert torch.equal(torch.rand(3, generator=one.generators[0]), expected[0])
