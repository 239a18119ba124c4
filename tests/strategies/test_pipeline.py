"""Strategies of meshes against one process, through the Trainer."""

import functools
import os

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy, comm
from tests.harness import distributed
from tests.pipeline.other_models import Block
from tests.strategies.models import loader, trainer_for


class Deep(LightningModule):
    """Repeated blocks between an embedding and a head; logs, counts, and remembers what it did."""

    def __init__(self, blocks=4, lr=0.1, momentum=0.9):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(12, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(blocks))
        self.head = nn.Linear(8, 5)
        self.accuracy = MulticlassAccuracy(5, average="micro")
        self.mean = MeanMetric()
        self.lr, self.momentum = lr, momentum
        self.losses, self.hooks, self.outs = [], [], []
        self.seen = 0
        self.double()

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, index):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", logits.max(), reduce_fx="max", sync_dist=True)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.losses.append(loss.detach())
        self.seen += len(x)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.mean.update(loss, weight=len(x))
        self.log_dict({"val_loss": loss, "val_mean": self.mean}, sync_dist=True)
        self.outs.append(loss)

    def on_validation_epoch_end(self):
        self.log("val_by_hand", torch.stack(self.outs).mean(), sync_dist=True)
        self.outs.clear()

    def on_before_zero_grad(self, optimizer):
        self.hooks.append("zero_grad")

    def on_before_backward(self, loss):
        self.hooks.append("before_backward")

    def on_after_backward(self):
        self.hooks.append("after_backward")

    def on_train_batch_end(self, outputs, batch, index):
        self.hooks.append(tuple(outputs["logits"].shape))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def fit(module, strategy, devices, replicas=1, ckpt_path=None, **options):
    """Train two epochs of two steps each, unless told otherwise: momentum, schedulers and metrics pass an epoch.

    Each is followed by one batch of validation.
    """
    rank = comm.Group.of().rank if devices > 1 else 0
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(devices))
    short = {"limit_train_batches": 2, "limit_val_batches": 1}
    trainer = trainer_for(strategy, devices, **{**short, **options})
    replica = rank // (devices // replicas) if devices > 1 else 0
    trainer.fit(module, loader(replicas, replica), loader(replicas, replica), ckpt_path=ckpt_path)
    return trainer


def assert_same(trainer, module, expected_trainer, expected):
    full = trainer.strategy.lightning_module_state_dict()
    if trainer.global_rank == 0:
        assert list(full) == list(expected.state_dict())
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(full[name], tensor, rtol=1e-10, atol=1e-12, msg=f"{name} differs")
    assert trainer.callback_metrics.keys() == expected_trainer.callback_metrics.keys()
    for key, value in expected_trainer.callback_metrics.items():
        if key == "accuracy_step" and trainer.strategy.mesh.data_parallel > 1:
            continue  # of one replica's samples, as in Lightning's own strategies
        torch.testing.assert_close(
            trainer.callback_metrics[key].double(), value.double(), rtol=1e-6, atol=1e-7, msg=f"{key} differs"
        )


LAYOUTS = {
    "data": ({"tensor_parallel_size": 1}, 4),
    "tensor": ({"tensor_parallel_size": 4}, 1),
    "tensor x data": ({"tensor_parallel_size": 2}, 2),
    "pipeline": ({"pipeline_parallel_size": 4}, 1),
    "pipeline x data": ({"pipeline_parallel_size": 2, "data_parallel_size": 2}, 2),
    "pipeline x tensor": ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 1),
}


@functools.lru_cache(maxsize=6)  # on all ranks alike
def on_one_process(**options):
    module = Deep()
    return module, fit(module, "auto", 1, **options)


EVALUATES = {"num_sanity_val_steps": 1, "limit_val_batches": 2}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("data", {"gradient_clip_val": 0.3}),
        ("tensor", {"gradient_clip_val": 0.3}),
        ("tensor x data", {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
        ("pipeline", {}),
        ("pipeline x data", {"gradient_clip_val": 0.3}),
        ("pipeline x tensor", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    ],
)
@distributed(world_size=4)
def test_training_equals_one_process(layout, options):
    sizes, replicas = LAYOUTS[layout]
    expected, expected_trainer = on_one_process(**options, **EVALUATES)
    module = Deep()
    if "pipeline" in layout:
        strategy = HybridParallelStrategy(num_microbatches=3, balance="uniform", gather_after_fit="off", **sizes)
    else:
        strategy = TensorParallelStrategy(gather_after_fit="off", **sizes)
    trainer = fit(module, strategy, 4, replicas, **options, **EVALUATES)
    assert_same(trainer, module, expected_trainer, expected)
    if replicas == 1:
        torch.testing.assert_close(torch.stack(module.losses), torch.stack(expected.losses), rtol=1e-10, atol=1e-10)
        assert (module.hooks, module.seen) == (expected.hooks, expected.seen)
    assert layout == "data" or sum(p.numel() for p in module.parameters()) < 0.75 * sum(
        p.numel() for p in expected.parameters()
    )


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["interleaved_zb", "zbv", "auto"])
@distributed(world_size=2)
def test_schedules(schedule):
    options = {"max_epochs": 1, "accumulate_grad_batches": 2}
    expected, expected_trainer = on_one_process(**options)
    module = Deep()
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, schedule=schedule)
    assert_same(fit(module, strategy, 2, **options), module, expected_trainer, expected)
