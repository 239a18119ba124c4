"""A run that is interrupted and started again ends with the weights of one that was not."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import AutoResume, CompressedDDPStrategy, HybridParallelStrategy, PowerSGD, TopK
from lightning_parallel.callbacks.resume import auto_resume
from lightning_parallel.compat import patched
from lightning_parallel.strategies import mesh_strategy
from tests.harness import distributed
from tests.strategies.models import Samples, trainer_for


class Interruption(RuntimeError):
    pass


class Interrupt(Callback):
    """Fails after some optimizer steps, as a process that is killed."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step == self.step:
            raise Interruption


class Dropping(LightningModule):
    """Draws random numbers, has schedulers, logs means of epochs, and remembers which samples it has seen."""

    def __init__(self, dropout=0.3, lr=0.1):
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 5)).double()
        self.lr = lr
        self.seen, self.epoch_means = [], []

    def training_step(self, batch, index):
        x, y = batch
        self.seen.append(x[:, 0].tolist())
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.epoch_means.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97), "interval": "step"}]


def loader_of(batch_size=4, length=36, **options):
    return DataLoader(Samples(length=length), batch_size, **({"shuffle": True} | options))


def fit(folder, loader, interrupt=None, strategy="auto", devices=1, module=None, every=2, resume=None, **options):
    """Train until the end, or until the interruption; returns module and trainer."""
    seed_everything(11)
    module = module or Dropping()
    callbacks = [resume or AutoResume(str(folder), every_n_train_steps=every), *options.pop("callbacks", ())]
    if interrupt is not None:
        callbacks.append(Interrupt(interrupt))
    trainer = trainer_for(strategy, devices, callbacks=callbacks, **{"max_epochs": 3, **options})
    if interrupt is None:
        trainer.fit(module, loader)
    else:
        with pytest.raises(Interruption):
            trainer.fit(module, loader)
    return module, trainer


def assert_equal_weights(module, expected):
    for name, value in expected.state_dict().items():
        assert value.isfinite().all(), name
        assert torch.equal(module.state_dict()[name], value), name


@pytest.mark.sweep
@pytest.mark.parametrize("step", [1, 2, 5, 9, 10, 17, 26])
def test_one_process_goes_on_bit_for_bit(step, tmp_path):
    expected, _ = fit(tmp_path / "whole", loader_of())
    cut, _ = fit(tmp_path / "cut", loader_of(), step)
    module, trainer = fit(tmp_path / "cut", loader_of())
    assert trainer.global_step == 27
    assert_equal_weights(module, expected)
    saved = step - 1 - (step - 1) % 2
    assert cut.seen[:saved] + module.seen == expected.seen
    assert module.epoch_means == expected.epoch_means[saved // 9 :]


@pytest.mark.parametrize("interrupt", [None, 3])
def test_the_filters_of_warnings_are_those_before(interrupt, tmp_path):
    """Also one of the user's that is equal, and one that was added during the run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mine")
        before = list(warnings.filters)
        fit(tmp_path, loader_of(), interrupt)
        assert list(warnings.filters) == before
        message = "You're resuming from a checkpoint that ended before the epoch ended"
        warnings.filterwarnings("ignore", message=message)
        fit(tmp_path / "other", loader_of(), interrupt)
        assert [entry[1] and entry[1].pattern for entry in warnings.filters].count(message) == 1


# -- several ranks -----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(12, 8), nn.Linear(8, 12), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class DeepDropping(Dropping):
    """Layers that a pipeline can cut."""

    def __init__(self, dropout=0.3, lr=0.02):
        super().__init__(dropout, lr)
        torch.manual_seed(5)
        blocks = [Residual(dropout) for _ in range(4)]
        self.net = nn.Sequential(*blocks, nn.Linear(12, 5)).double()


STRATEGIES = {
    "pipeline x data": lambda: HybridParallelStrategy(pipeline_parallel_size=2, balance="uniform"),
    "pipeline x tensor, sharded, in the background": lambda: HybridParallelStrategy(
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        balance="uniform",
        checkpoint_format="sharded",
        async_save=True,
    ),
    "sharded, compressed": lambda: HybridParallelStrategy(
        tensor_parallel_size=2, checkpoint_format="sharded", compression=TopK(0.1, min_numel=1)
    ),
    "data": HybridParallelStrategy,
    "context x data": lambda: HybridParallelStrategy(context_parallel_size=2, zero_stage=2),
    # Otherwise DDP arranges its buckets anew after the first step, and then sums four gradients in another order.
    "ddp": lambda: DDPStrategy(find_unused_parameters=True),
    "compressed ddp": lambda: CompressedDDPStrategy(PowerSGD(1, min_numel=1)),
}


@pytest.mark.sweep(kept=3)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "saved before there was a context axis"])
@distributed(world_size=4)
def test_ranks_go_on_bit_for_bit(strategy, tmp_path):
    options = {"devices": 4, "module": None, "max_epochs": 2}
    make = STRATEGIES.get(strategy, STRATEGIES["pipeline x data"])
    saved = nullcontext() if strategy in STRATEGIES else patched(auto_resume, "_layout", lambda trainer: [2, 2, 1])

    def data():
        return loader_of(2, 20)  # 10 steps in an epoch of one replica, 3 of four: it ends in the first or in the second

    # The layers have no positions that a context axis could split.
    with patched(mesh_strategy, "plan_sequences", lambda *_: None):
        whole, _ = fit(tmp_path / "whole", data(), strategy=make(), **options | {"module": DeepDropping()})
        with saved:
            fit(tmp_path / "cut", data(), 4, strategy=make(), **options | {"module": DeepDropping()})
        module, trainer = fit(tmp_path / "cut", data(), strategy=make(), **options | {"module": DeepDropping()})
    assert_equal_weights(module, whole)
    assert module.epoch_means == whole.epoch_means
