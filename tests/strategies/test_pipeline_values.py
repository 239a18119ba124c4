"""Values that a stage cannot know: equal to those of one process, or refused on every rank before the first step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel import PipelineParallelStrategy
from tests.harness import distributed
from tests.strategies.test_pipeline import Deep, fit


class Reading(nn.Module):
    """A layer that reads its data, and leaves what it found in an attribute or returns it."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind, self.last, self.calls, self.history = kind, 0.0, 0, []

    def forward(self, x):
        y = x + torch.tanh(self.linear(x))
        self.calls += int(y.sum().item() < 1e9)
        if self.kind == "attribute":
            self.last = y.norm().item()
        elif self.kind == "array":
            self.last = y.detach().numpy().std(axis=0)
        elif self.kind == "list":
            self.history.append(y.norm().item())
            self.last = self.history[-1]
        elif self.kind == "returned":
            return y, y.norm().item()
        elif self.kind == "comparison":
            return y, bool(y.sum() > 0)
        return y, 0.0


class Read(Deep):
    """Uses what its layers found in the loss."""

    def __init__(self, kind, is_used):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Reading(kind) for _ in range(4)).double()
        self.is_used = is_used

    def training_step(self, batch, index):
        x, factor = self.embed(batch[0]), 1.0
        for block in self.blocks:
            x, found = block(x)
            if self.is_used:
                factor = factor + 0.1 * (found + block.last).mean() if block.kind == "array" else factor + found * 0.1
        if self.is_used and self.blocks[0].kind != "array":
            factor = factor + 0.1 * sum(block.last for block in self.blocks)
        loss = factor * F.cross_entropy(self.head(x), batch[1])
        self.losses.append(loss.item())
        return {"loss": loss, "logits": torch.zeros(1)}


def train(module, **options):
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=1, balance="uniform", **options)
    return fit(module, strategy, 2, max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)


@pytest.mark.parametrize("kind", ["attribute", "array", "list", "returned", "comparison"])
@distributed(world_size=2)
def test_numbers_of_layers_on_other_stages_are_refused_where_they_are_used(kind):
    module = Read(kind, is_used=True)
    with pytest.raises((ValueError, RuntimeError), match=r"`blocks\.0`.*computed from its data.*keep it a tensor"):
        train(module)
    assert not module.losses
    # What is not used does no harm, and a dry run leaves nothing in attributes.
    expected, module = Read(kind, is_used=False), Read(kind, is_used=False)
    fit(expected, "auto", 1, max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
    train(module)
    assert module.losses == pytest.approx(expected.losses, rel=1e-10)
