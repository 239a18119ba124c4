"""Windows of bytes from the Python standard library's own sources, split into training and validation by file."""

import hashlib
import sysconfig
from functools import cached_property
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

__all__ = ["StandardLibrary", "Windows", "bigram_entropy", "split_sources"]

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def split_sources(root: Path, validation_share: float) -> tuple[list[Path], list[Path]]:
    """Assign every module below `root` to training or validation by a hash of its path.

    Both lists are in the order of the hashes, so that a cap on bytes takes a fair sample of the library.
    """
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    digests = {
        hashlib.sha256(name.as_posix().encode()).digest(): name for name in names if SKIPPED.isdisjoint(name.parts)
    }
    training, validation = [], []
    for digest, name in sorted(digests.items()):
        is_validation = int.from_bytes(digest[-4:], "big") < validation_share * 2**32
        (validation if is_validation else training).append(root / name)
    return training, validation


def read_bytes(paths: list[Path], max_bytes: int) -> Tensor:
    """Concatenate files up to `max_bytes`, leaving out what is not UTF-8."""
    text = bytearray()
    for path in paths:
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError:
            continue
        text += content
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:max_bytes]


def bigram_entropy(training: Tensor, validation: Tensor, smoothing: float = 0.1) -> float:
    """Nats per byte at which pair counts of the training text predict the validation text."""
    pairs = training[:-1].long() * 256 + training[1:]
    counts = torch.bincount(pairs, minlength=256 * 256).view(256, 256) + smoothing
    log_probability = (counts / counts.sum(dim=1, keepdim=True)).log()
    return -log_probability[validation[:-1].long(), validation[1:].long()].mean().item()


class Windows(Dataset[Tensor]):
    """Neighbouring windows of `context` bytes, each with the byte that follows it: (context + 1,)."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()


class StandardLibrary(LightningDataModule):
    """The sources of the running Python's standard library.

    Args:
        batch_size: Windows per data-parallel replica and training step; four times as many in validation.
        context: Length of a window in bytes.
        validation_share: Share of the files that is held out.
        training_bytes: Cap on the training text.
        validation_bytes: Cap on the validation text.
        seed: Of the order of the training windows.
    """

    def __init__(
        self,
        batch_size: int = 16,
        context: int = 128,
        validation_share: float = 0.1,
        training_bytes: int = 8_000_000,
        validation_bytes: int = 150_000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, stage: str) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        training, validation = split_sources(root, self.hparams["validation_share"])
        context = self.hparams["context"]
        self.training = Windows(read_bytes(training, self.hparams["training_bytes"]), context)
        self.validation = Windows(read_bytes(validation, self.hparams["validation_bytes"]), context)

    @cached_property
    def bigram_entropy(self) -> float:
        """Nats per byte that pair counts reach on the validation text."""
        return bigram_entropy(self.training.text, self.validation.text)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.validation, 4 * self.batch_size, shuffle=False)  # without gradients, more fit

    def _loader(self, windows: Windows, batch_size: int, shuffle: bool) -> DataLoader[Tensor]:
        # One sampler for any number of replicas: together they draw, step by step, the windows that a single device
        # draws with the whole batch. Lightning's own choice would be a different order on one device.
        replica = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(windows, shuffle=shuffle, seed=self.seed, drop_last=True, **replica)
        return DataLoader(windows, batch_size, sampler=sampler, drop_last=True)
