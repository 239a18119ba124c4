"""Plain Lightning projects for the strategies, and how to train them on one process or many."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_parallel import TensorParallelStrategy

BATCH = 8


class Samples(Dataset):
    """Deterministic samples and classes."""

    def __init__(self, features=12, classes=5, length=32, dtype=torch.float64):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, features, generator=generator, dtype=dtype)
        self.y = torch.randint(classes, (length,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(LightningModule):
    """An MLP with a norm; logs, and remembers its gradients."""

    def __init__(self, lr=0.1, momentum=0.9, hidden=18):
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(
            nn.Linear(12, hidden), nn.GELU(), nn.Linear(hidden, 12), nn.LayerNorm(12), nn.Linear(12, 5)
        )
        self.lr, self.momentum = lr, momentum
        self.losses, self.norms = [], []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def loader(replicas=1, rank=0, batch=BATCH, dtype=torch.float64, shuffle=False):
    """The global batch is always `BATCH`: replicas see interleaved parts of it."""
    data = Samples(dtype=dtype)
    sampler = DistributedSampler(data, replicas, rank, shuffle=shuffle)
    return DataLoader(data, batch_size=batch // replicas, sampler=sampler)


def trainer_for(strategy="auto", devices=1, verifies=False, **kwargs):
    """Make a trainer; its strategy leaves the proof out, which takes longer than these runs, unless it is asked for."""
    if getattr(strategy, "verify", "") == "auto" and not verifies:
        strategy.verify = "off"
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(strategy=strategy, devices=devices, **{**defaults, **kwargs})


SHORT = {"limit_train_batches": 2, "limit_val_batches": 2}


def fit_parallel(module, world_size, tensor, ckpt_path=None, strategy_kwargs=None, **kwargs):
    """Train on the ranks of the harness, two epochs of two steps each; returns the trainer."""
    strategy = TensorParallelStrategy(tensor_parallel_size=tensor, **(strategy_kwargs or {}))
    trainer = trainer_for(strategy, world_size, **{**SHORT, **kwargs})
    rank = int(torch.distributed.get_rank())
    replicas = world_size // tensor
    train = loader(replicas, rank // tensor)
    trainer.fit(module, train, loader(replicas, rank // tensor), ckpt_path=ckpt_path)
    return trainer


def fit_single(module, ckpt_path=None, **kwargs):
    trainer = trainer_for(**{**SHORT, **kwargs})
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return trainer
