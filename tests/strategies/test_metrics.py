"""Objects of torchmetrics in a pipeline: their value for a batch, for an epoch, and on rank zero alone."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, PearsonCorrCoef, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, MinMaxMetric, Running

from lightning_parallel import HybridParallelStrategy, comm
from tests.harness import distributed, run
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_pipeline import Deep, fit


class Spread(Metric):
    """The root of a mean, of states that add up; `forward` updates it twice, as Metric's default is."""

    def __init__(self):
        super().__init__()
        self.add_state("squares", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits):
        self.squares += logits.detach().pow(2).sum()
        self.count += logits.numel()

    def compute(self):
        return (self.squares / self.count).sqrt()


class Scored(Deep):
    """Logs metrics that are no means over samples, as objects and as what their `forward` returns."""

    def __init__(self):
        super().__init__()
        kinds = {"f1": MulticlassF1Score(5), "acc": MulticlassAccuracy(5), "auroc": MulticlassAUROC(5)}
        self.kept = MetricCollection(kinds, prefix="kept/")
        self.returned = MetricCollection(kinds, prefix="returned/").clone()
        self.spread, self.late, self.average = Spread(), MulticlassF1Score(5), MeanMetric()

    def training_step(self, batch, index):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.kept(logits, y)
        self.log_dict(self.kept, on_step=True, on_epoch=True)
        self.log_dict(self.returned(logits, y), on_step=True, on_epoch=True)
        self.log("spread", self.spread(logits))
        self.late(logits, y)
        self.log("late", self.late, on_step=False, on_epoch=True, prog_bar=True)
        self.average(loss)
        self.log("average", self.average, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}


class Bar(Callback):
    """Looks at what was logged on rank zero alone, as progress bars do, and in each step on all ranks."""

    def __init__(self):
        self.seen, self.bar = [], []

    def on_train_batch_end(self, trainer, *args):
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer, *args):
        if trainer.is_global_zero:
            self.bar.append({name: float(value) for name, value in trainer.progress_bar_metrics.items()})


class Normalized(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        layers = [layer for _ in range(3) for layer in (nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(12, 5)).double()

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Averaged(Metric):
    """A mean over batches, whose inputs are no rows of samples."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx=None)

    def update(self, value, *, batch=None):
        self.total += value.detach() if batch is None else batch["logits"].std() * batch["labels"].double().mean()
        self.count = self.count + 1

    def compute(self):
        return self.total / self.count


class Whole(Deep):
    """Logs metrics whose value for a batch nothing but the whole batch gives; its batches do not divide evenly."""

    def __init__(self):
        super().__init__()
        kinds = {"pearson": PearsonCorrCoef(), "returned": PearsonCorrCoef(), "hand": PearsonCorrCoef()}
        kinds |= {"classes": ClasswiseWrapper(MulticlassF1Score(5, average=None)), "seen": MulticlassF1Score(5)}
        kinds |= {"extremes": MinMaxMetric(MulticlassAccuracy(5)), "running": Running(MulticlassAccuracy(5), window=2)}
        kinds |= {"average": MeanMetric(), "loss": Averaged(), "sum": SumMetric(), "most": MaxMetric()}
        kinds |= {"batch": Averaged(), "total": Averaged(), "tracker": MetricTracker(MulticlassAccuracy(5))}
        kinds["tracker"].increment()
        self.metrics = nn.ModuleDict(kinds)
        self.group = MetricCollection([MulticlassAccuracy(5), MulticlassF1Score(5)], prefix="group/")
        self.ends = []

    def on_train_epoch_start(self):
        self.metrics["tracker"].increment()

    def training_step(self, batch, index):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        metrics, seen = self.metrics, logits.detach()
        pair = seen[:, 0], y.double()
        metrics["pearson"](*pair)
        metrics["hand"].update(preds=pair[0], target=pair[1])
        metrics["seen"].update(seen, y)
        for name in ("average", "loss"):
            metrics[name](loss)
        metrics["sum"](len(y))
        metrics["most"](seen.max())
        metrics["batch"](None, batch={"logits": seen, "labels": y})
        metrics["total"](F.cross_entropy(seen, y, reduction="sum"))
        names = ("pearson", "average", "loss", "sum", "most", "batch", "total")
        values = {name: metrics[name] for name in names} | {"returned": metrics["returned"](*pair)}
        values |= metrics["classes"](seen, y) | metrics["extremes"](seen, y)
        values |= {"running": metrics["running"](seen, y), "tracker": metrics["tracker"](seen, y)}
        values |= {"computed": metrics["seen"].compute()}
        self.group(seen, y)
        self.log_dict({**values, **self.group}, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": seen}

    validation_step = None

    def on_train_epoch_end(self):
        metrics = self.metrics
        ends = [metrics["hand"].compute(), metrics["running"].compute(), *metrics["extremes"].compute().values()]
        self.ends.append([float(value) for value in (*ends, metrics["tracker"].best_metric())])
        for name in ("hand", "seen"):
            metrics[name].reset()


def stages(num_microbatches=4):
    return HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=num_microbatches, balance="uniform")


@distributed(world_size=2)
def test_values_of_batches_and_epochs(group):
    alone, cut = Bar(), Bar()
    fit(Scored(), "auto", 1, callbacks=[alone])
    fit(Scored(), stages(), 2, callbacks=[cut])
    torch.testing.assert_close(cut.seen, alone.seen, rtol=1e-6, atol=1e-7)
    if group.rank == 0:
        assert "late" in cut.bar[0]
        torch.testing.assert_close(cut.bar, alone.bar, rtol=1e-6, atol=1e-7)


def train_whole(strategy, devices):
    data = loader().dataset
    bar, module = Bar(), Whole()
    trainer = trainer_for(strategy, devices, callbacks=[bar])
    trainer.fit(module, DataLoader(Subset(data, range(21)), batch_size=8))
    return bar.seen, module.ends


def whole_in_stages():
    return train_whole(stages(), 2)


def test_values_that_only_a_whole_batch_gives():
    expected = train_whole("auto", 1)
    for found in run(whole_in_stages, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
def test_batch_normalization_is_loaded_after_a_run(group):
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    one, cut = Normalized(), Normalized()
    expected = fit(one, "auto", 1)
    trainer = fit(cut, stages(1), 2)
    trainer.save_checkpoint(folder / "cut.ckpt")
    found = trainer.test(cut, trainer.val_dataloaders, ckpt_path=folder / "cut.ckpt")
    torch.testing.assert_close(found, expected.test(one, expected.val_dataloaders), rtol=1e-10, atol=1e-12)
    if group.rank == 0:
        saved = torch.load(folder / "cut.ckpt", weights_only=False)["state_dict"]
        assert saved._metadata["net.1"] == one.state_dict()._metadata["net.1"]  # what modules convert goes by it


class Ended(Scored):
    """Its hook at the end of an epoch is watched, behind those of callbacks."""

    def on_train_epoch_end(self):
        self.ended = True


@distributed(world_size=2, deadline_s=60)
def test_rank_zero_alone_asks_before_hooks_of_all_replicas(group):
    seen = []
    for stage in (0, 1, 2):
        bar = Bar()
        fit(Ended(), HybridParallelStrategy(zero_stage=stage), 2, 2, callbacks=[bar], limit_train_batches=2)
        seen.append(bar.bar)
    if group.rank == 0:
        assert "late" in seen[0][0]
    assert seen[0] == seen[1] == seen[2]


@distributed(world_size=2)
def test_batch_normalization_counts_batches(group):
    one, cut = Normalized(), Normalized()
    expected = fit(one, "auto", 1).strategy.lightning_module_state_dict()
    for options in ({}, {"verify": "off"}):
        cut = Normalized()
        strategy = HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, balance="uniform", **options)
        found = fit(cut, strategy, 2).strategy.lightning_module_state_dict()
        for name in [name for name in found if "num_batches" in name]:
            assert found[name] == expected[name] == 4, name
        for name in [name for name in found if name == "net.1.running_mean"]:
            # Begins with the same mean in each microbatch, and in the first layer it sees the same data.
            torch.testing.assert_close(found[name], expected[name], rtol=0.1, atol=0.01)


class Twice(Normalized):
    """Calls its layers for two views, as self-supervised losses do."""

    def training_step(self, batch, index):
        one, two = self.net(batch[0]), self.net(0.5 * batch[0] + 0.1)
        return F.cross_entropy(one, batch[1]) + F.mse_loss(one, two)


@distributed(world_size=2)
def test_batch_normalization_that_is_called_twice(group):
    expected = fit(Twice(), "auto", 1).strategy.lightning_module_state_dict()
    found = fit(Twice(), stages(1), 2).strategy.lightning_module_state_dict()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found = fit(Twice(), stages(2), 2).strategy.lightning_module_state_dict()
    for name in [name for name in found if "num_batches" in name]:
        assert found[name] == expected[name] == 8, name


@distributed(world_size=2)
def test_batch_normalization_has_two_samples_in_each_microbatch(group):
    def train(samples, num_microbatches):
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(samples, 12).double(), torch.randint(0, 5, (samples,)))
        strategy = HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=num_microbatches)
        trainer = trainer_for(strategy, 2, max_epochs=1)
        trainer.fit(Normalized(), DataLoader(data, batch_size=4))
        return trainer.global_step

    assert train(11, "auto") == 3  # the last batch has three samples
    with pytest.raises(
        ValueError, match="a batch of 4 samples must have at most 2 microbatches.*Set `num_microbatches`"
    ):
        train(8, 4)
