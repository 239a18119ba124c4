"""Values that a stage cannot know: equal to those of one process, or refused on every rank before the first step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy
from tests.harness import distributed
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_pipeline import Deep, assert_same, fit


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


@pytest.mark.sweep
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


class Changing(Deep):
    """Changes its batch in place, inputs and targets, in a dict or not."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def change(self, batch):
        x, y = batch
        x.div_(2)
        y.add_(1).remainder_(5)
        return x, y

    def training_step(self, batch, index):
        x, y = self.change(batch)
        loss = F.cross_entropy(self(x), y)
        self.losses.append(loss.item())
        return {"loss": loss, "logits": torch.zeros(1)}

    def validation_step(self, batch, index):
        x, y = self.change(batch)
        self.outs.append(F.cross_entropy(self(x), y))

    def on_train_batch_end(self, outputs, batch, index):
        self.batches.append([entry.clone() for entry in batch])


class ChangingInTraining(Changing):
    """Validates first, by a step that leaves its batch alone."""

    def validation_step(self, batch, index):
        x, y = batch
        self.outs.append(F.cross_entropy(self(x), y))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [Changing, ChangingInTraining])
@pytest.mark.parametrize(
    "options", [{}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}], ids=["1f1b", "virtual"]
)
@distributed(world_size=2)
def test_a_batch_that_the_step_changes_in_place_is_changed_once(group, options, kind):
    def trained(strategy, size):
        module = kind()
        # These loaders give the same tensors in each epoch: what is changed in them stays.
        data, others = (DataLoader([list(batch) for batch in loader()], batch_size=None) for _ in range(2))
        trainer = trainer_for(strategy, size, max_epochs=2, num_sanity_val_steps=1)
        trainer.fit(module, data, others)
        return module, trainer.callback_metrics["val_by_hand"], trainer.strategy.lightning_module_state_dict()

    expected, expected_metric, expected_weights = trained("auto", 1)
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, balance="uniform", **options)
    module, metric, weights = trained(strategy, 2)
    assert module.losses == pytest.approx(expected.losses, rel=1e-10)
    torch.testing.assert_close(metric, expected_metric, rtol=1e-10, atol=0)
    for name, value in weights.items() if group.rank == 0 else ():
        torch.testing.assert_close(value, expected_weights[name], rtol=1e-10, atol=1e-12)
    if group.rank == group.size - 1:
        torch.testing.assert_close(module.batches, expected.batches)


class Leaving(Deep):
    """Leaves something of its embedding behind: in a log, a list, an attribute; or asks it for a gradient."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.found = kind, []

    def forward(self, x):
        self.embedded = x = self.embed(x)
        factor = 1.0 if self.kind != "gradient" or x.requires_grad else 0.5
        for block in self.blocks:
            x = block(x)
        return self.head(x) * factor

    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if self.kind == "log":
            self.log("norm", self.embedded.norm())
        elif self.kind == "list":
            self.found.append(self.embedded.detach().norm())
        self.losses.append(loss.item())
        return {"loss": loss, "logits": torch.zeros(1)}

    def on_train_batch_end(self, outputs, batch, index):
        if self.kind == "attribute":
            self.found.append(self.embedded.norm().item())


REFUSED = {
    "list": r"`self\.found` is made of .*`embed`",
    "attribute": "`embed`",
    "gradient": r"asks for `requires_grad` of the output of `embed`",
}


@pytest.mark.parametrize("kind", REFUSED)
@distributed(world_size=2)
def test_what_is_made_of_other_stages_is_refused_on_every_rank(kind):
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[kind]):
        train(Leaving(kind))


@distributed(world_size=2)
def test_what_is_logged_of_other_stages_is_sent():
    for kind in ("", "log"):
        module, expected = Leaving(kind), Leaving(kind)
        truth = fit(expected, "auto", 1, max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
        found = train(module)
        assert module.losses == pytest.approx(expected.losses, rel=1e-10)
        for name, value in truth.callback_metrics.items():
            torch.testing.assert_close(found.callback_metrics[name], value, rtol=1e-10, atol=0)


class Moving(Deep):
    """A buffer that follows what the model computes, written in one way or another."""

    def __init__(self, way, place, since=0):
        super().__init__()
        self.way, self.place, self.since = way, place, since
        self.register_buffer("center", torch.zeros(8, dtype=torch.float64))

    def move(self, x):
        new = 0.9 * self.center + 0.1 * x.detach().mean(0)
        if self.since > self.trainer.global_step:
            pass
        elif self.way == "data":
            self.center.data = new
        elif self.way == "share":
            new.share_memory_()
        elif self.way == "set":
            self.center.set_(new)
        elif self.way == "copy":
            self.center.copy_(new)
        elif self.way == "register":
            self.register_buffer("center", new)
        else:
            self.center = new
        return x - self.center

    def forward(self, x):
        x = self.embed(x)
        x = self.move(x) if self.place == "before" else x
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = self.move(x) if number == 1 and self.place == "between" else x
        return self.head(self.move(x) if self.place == "after" else x)


class FilledInPlace(Deep):
    """Validates by a tensor that it fills with features; packs sequences in front of its blocks."""

    def features(self, x):
        found, x = [], self.embed(x)
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return found

    def forward(self, x):
        x = self.embed(x)[:, None].expand(-1, 3, -1)
        packed = pack_padded_sequence(x, torch.full((len(x),), 3), batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(packed, batch_first=True)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

    def validation_step(self, batch, index):
        product = torch.ones(len(batch[0]), 8, dtype=torch.float64)
        for found in self.features(batch[0]):
            product *= found
        self.log("val_loss", product.mean())

    def on_validation_epoch_end(self):
        pass


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_what_is_written_in_place_is_right_or_refused():
    """By `.data` it was a tensor without memory in dry runs: the process died."""
    cases = [Moving(way, "after") for way in ("data", "set", "copy", "register", "assign")]
    cases += [Moving("data", "between"), Moving("copy", "before"), FilledInPlace()]
    for expected in cases:
        module = copy.deepcopy(expected)
        expected_trainer = fit(expected, "auto", 1, max_epochs=1)
        trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=1), 2, max_epochs=1)
        assert_same(trainer, module, expected_trainer, expected)
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4, verify="always")
    with pytest.raises(RuntimeError, match="num_microbatches=1"):
        fit(Moving("data", "between"), strategy, 2, max_epochs=1)
    # Later than the first batch, the next stage lacks the output of `embed`, and the step runs again with it.
    expected, module = Moving("data", "before", since=2), Moving("data", "before", since=2)
    expected_trainer = fit(expected, "auto", 1, max_epochs=2)
    trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=1), 2, max_epochs=2)
    assert_same(trainer, module, expected_trainer, expected)
    # The record ends here, and what the stage does not hold was taken for memory.
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=1)
    with pytest.raises(RuntimeError, match="the output of `embed`, which is on another pipeline stage"):
        fit(Moving("share", "before", since=2), strategy, 2, max_epochs=4)
