"""What a step leaves behind besides gradients, on microbatches as on the whole batch."""

import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy, comm
from lightning_parallel.strategies.hooks.views import HookError
from tests.harness import distributed
from tests.strategies.models import Samples, trainer_for
from tests.strategies.test_pipeline import Block, Deep, assert_same, fit


class Listing(Deep):
    """Keeps predictions sample by sample, figures step by step, and several things in what it returns."""

    def __init__(self):
        super().__init__()
        self.predicted, self.rows, self.figures, self.logits, self.seen_outputs = [], [], [], [], []

    def training_step(self, batch, index):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        best = logits.argmax(-1)
        self.predicted.extend(best.tolist())
        self.rows += list(zip(y.tolist(), best.tolist()))
        self.figures.append(loss.item())
        self.logits.append(logits.detach())
        return {"loss": loss, "n": len(y), "right": (best == y).sum(), "array": best.numpy(), "name": "step"}

    def on_train_batch_end(self, outputs, batch, index):
        self.seen_outputs.append({name: value for name, value in outputs.items() if name != "loss"})


@pytest.mark.parametrize("microbatches", [2, 8])
@distributed(world_size=2)
def test_lists_and_outputs(microbatches):
    expected, module = Listing(), Listing()
    fit(expected, "auto", 1, max_epochs=1)
    fit(module, PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=microbatches), 2, max_epochs=1)
    assert module.predicted == expected.predicted
    assert module.rows == expected.rows
    assert module.figures == pytest.approx(expected.figures)
    for mine, theirs in zip(module.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(module.seen_outputs, expected.seen_outputs, strict=True):
        assert mine.keys() == theirs.keys()
        assert (mine["n"], int(mine["right"]), mine["name"]) == (theirs["n"], int(theirs["right"]), "step")
        np.testing.assert_array_equal(mine["array"], theirs["array"])


class Frozen(Deep):
    """Trains the last blocks and the head, as fine-tuning does; a stage may have nothing to train."""

    def __init__(self, kept):
        super().__init__()
        self.requires_grad_(False)
        for name in kept:
            self.get_submodule(name).requires_grad_(True)

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1, momentum=0.9)


@pytest.mark.sweep
@pytest.mark.parametrize("kept", [["head"], ["embed", "blocks.0"]])
@distributed(world_size=2)
def test_a_stage_without_anything_to_train(group, kept):
    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "half.ckpt"
    expected, module = Frozen(kept), Frozen(kept)
    options = {"gradient_clip_val": 0.3}
    expected_trainer = fit(expected, "auto", 1, **options)
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, balance="uniform")
    fit(module, strategy, 2, max_epochs=1, **options).save_checkpoint(path)
    resumed = Frozen(kept)
    trainer = fit(
        resumed, PipelineParallelStrategy(pipeline_parallel_size=2, balance="uniform"), 2, ckpt_path=path, **options
    )
    assert_same(trainer, resumed, expected_trainer, expected)


@distributed(world_size=2)
def test_optimizers_with_nothing_to_train_anywhere_are_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        fit(Frozen([]), PipelineParallelStrategy(pipeline_parallel_size=2), 2)


@distributed(world_size=2)
def test_an_error_in_configure_optimizers_of_one_stage_is_raised_on_all(group):
    class Failing(Deep):
        def configure_optimizers(self):
            if self.global_rank == 1:
                raise KeyError("head")
            return super().configure_optimizers()

    with pytest.raises((KeyError, RuntimeError), match="head"):
        fit(Failing(), PipelineParallelStrategy(pipeline_parallel_size=2), 2)


class Counting(Block):
    """Sets its buffers anew in every forward pass."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return super().forward(x)


@distributed(world_size=2)
def test_buffers_that_layers_set_can_be_saved(group):
    def build():
        module = Deep()
        torch.manual_seed(3)
        module.blocks = nn.ModuleList(Counting(8) for _ in range(4)).double()
        return module

    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "buffers.ckpt"
    expected, module = build(), build()
    fit(expected, "auto", 1, max_epochs=1)
    fit(
        module, PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2), 2, max_epochs=1
    ).save_checkpoint(path)
    state = torch.load(path, weights_only=False)["state_dict"]
    for index in range(4):
        assert state[f"blocks.{index}.calls"] == 2 * expected.blocks[index].calls, "once per microbatch"
        torch.testing.assert_close(state[f"blocks.{index}.largest"], expected.blocks[index].largest)


class Centred(Deep):
    """Keeps statistics of its outputs in buffers of its own, as DINO does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def training_step(self, batch, index):
        logits = self(batch[0])
        self.centre += logits.detach().sum(0)
        self.count = self.count + len(logits)
        return F.cross_entropy(logits - self.centre / 1000, batch[1])

    def on_train_batch_end(self, outputs, batch, index):
        pass


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])  # with the last stage on the last rank, and on the first
@distributed(world_size=2)
def test_buffers_that_the_last_stage_updates_are_saved_from_there(schedule, group):
    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "centre.ckpt"
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    expected, module = Centred(), Centred()
    fit(expected, "auto", 1, **options)
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=1, schedule=schedule)
    fit(module, strategy, 2, **options).save_checkpoint(path)
    state = torch.load(path, weights_only=False)["state_dict"]
    assert state["count"] == expected.count == 16
    torch.testing.assert_close(state["centre"], expected.centre, rtol=1e-10, atol=1e-10)


class Sum(Deep):
    def training_step(self, batch, index):
        return {"loss": F.cross_entropy(self(batch[0]), batch[1], reduction="sum"), "logits": torch.zeros(1)}


class Contrastive(Deep):
    def training_step(self, batch, index):
        features = self(batch[0])
        loss = F.cross_entropy(features @ features.T, torch.arange(len(features)))
        return {"loss": loss, "logits": torch.zeros(1)}


class Noisy(Deep):
    def training_step(self, batch, index):
        x, y = batch
        return {"loss": F.cross_entropy(self(x + torch.randn_like(x)), y), "logits": torch.zeros(1)}


@pytest.mark.parametrize(("kind", "warned"), [(Sum, True), (Contrastive, True), (Noisy, False), (Deep, False)])
@distributed(world_size=2)
def test_losses_that_are_no_means_over_samples_are_warned_about(group, kind, warned):
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # The proof would refuse them.
        strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4, verify="off")
        trainer = trainer_for(strategy, 2, max_steps=1)
        trainer.fit(kind(), DataLoader(Samples(), batch_size=8))
    if group.rank == 0:
        assert any("must be a mean over samples" in str(warning.message) for warning in caught) == warned


class Steering(Deep):
    """Its step reads and sets what belongs to the trainer: rates, a scheduler, the end of the run."""

    def training_step(self, batch, index):
        output = super().training_step(batch, index)
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("last", self.lr_schedulers().get_last_lr()[0])
        # Here, where the first stages do not come; each time once more, whatever else runs the step.
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5
        self.lr_schedulers().last_epoch += 1
        self.trainer.should_stop = self.global_step >= 2
        return output

    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_value_(self.embed.parameters(), 1e-3)  # of which one stage has none

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)]


class SteeringByLoss(Steering):
    def training_step(self, batch, index):
        output = super().training_step(batch, index)
        self.trainer.optimizers[0].param_groups[0]["lr"] = float(output["loss"].detach())
        return output


@distributed(world_size=2)
def test_a_step_may_steer_the_trainer():
    options = {"max_epochs": 2, "verifies": True}
    expected = Steering()
    expected_trainer = fit(expected, "auto", 1, **options)
    module, strategy = Steering(), PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4)
    trainer = fit(module, strategy, 2, **options)
    assert_same(trainer, module, expected_trainer, expected)
    assert trainer.global_step == expected_trainer.global_step == 3
    mine, theirs = (each.lr_scheduler_configs[0].scheduler for each in (trainer, expected_trainer))
    assert mine.last_epoch == theirs.last_epoch
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4)
    with pytest.raises(ValueError, match=r"set `self.trainer.optimizers\[0\].param_groups\[0\]\['lr'\]` to the same"):
        fit(SteeringByLoss(), strategy, 2, **options)


class Turning(Deep):
    """From its second batch on, or for rare samples, its loss depends on which samples come together."""

    def __init__(self, way):
        super().__init__(lr=1e-3)
        self.way, self.least = way, torch.tensor(torch.inf)

    def training_step(self, batch, index):
        logits = self(batch[0])
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        loss = losses.mean()
        if self.way == "step" and self.global_step > 0:
            loss = losses.max()
        if self.way == "data" and index == 1:
            rare = torch.zeros(len(losses), dtype=torch.bool) | (losses > losses.detach().quantile(0.8))
            loss = loss + logits[rare].square().mean()
        if self.way == "attribute":
            self.least = torch.minimum(self.least, loss.detach())
        return {"loss": loss, "logits": logits.detach()}


@distributed(world_size=2)
def test_what_later_steps_compute_otherwise_is_compared_as_well():
    def strategy():
        return PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4)

    for way in ("step", "data"):
        with pytest.raises(RuntimeError, match="of a step whose loss used other operations than the earlier steps"):
            fit(Turning(way), strategy(), 2, max_epochs=2, verifies=True)
    with pytest.raises(RuntimeError, match="attribute `least`(.|\n)*Append values"):
        fit(Turning("attribute"), strategy(), 2, max_epochs=1, verifies=True)


class Features(Deep):
    """Keeps what layers return, by forward hooks, for the loss; not so in validation."""

    def __init__(self):
        super().__init__()
        self.found, self.all, self.last = {}, [], None
        self.blocks[0].register_forward_hook(lambda layer, args, output: setattr(self, "last", output))
        for index in (0, 2):
            self.blocks[index].register_forward_hook(
                lambda layer, args, output, index=index: self.found.__setitem__(index, output)
            )
        for block in self.blocks:
            block.register_forward_hook(lambda layer, args, output: self.all.append(output) if layer.training else None)

    def training_step(self, batch, index):
        self.all.clear()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        kept = [self.last, *self.found.values(), *self.all]
        return {"loss": loss + 0.1 * sum(each.square().mean() for each in kept), "logits": torch.zeros(1)}

    def validation_step(self, batch, index):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        pass


class Remembers(Callback):
    def on_fit_start(self, trainer, module):
        self.found = {}
        module.blocks[0].register_forward_hook(lambda layer, args, output: self.found.update(last=output.detach()))


@distributed(world_size=2)
def test_features_that_forward_hooks_keep(group):
    expected, module = Features(), Features()
    fit(expected, "auto", 1, num_sanity_val_steps=0)
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, balance="uniform")
    fit(module, strategy, 2, num_sanity_val_steps=0, verifies=True)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-10, atol=1e-12)
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2)
    with pytest.raises(
        HookError,
        match="`training_step` must not change callbacks; got a change of `found.last` of the callback `Remembers`",
    ):
        fit(Deep(), strategy, 2, verifies=True, callbacks=[Remembers()])
