"""Train a small Llama: `python examples/huggingface/main.py fit --config examples/huggingface/tensor_parallel.yaml`.

The model is built from its configuration alone, so nothing is downloaded. To fine-tune published weights, replace
`LlamaForCausalLM(...)` by `AutoModelForCausalLM.from_pretrained(...)` and the bytes by its tokenizer's ids.
"""

import argparse
import inspect
import tarfile
import typing
import warnings

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

# A batch is a few slices of one tensor: worker processes would only take cores from training.
warnings.filterwarnings("ignore", ".*does not have many workers.*")


class ByteLlama(LightningModule):
    """A Llama over bytes, with grouped-query attention."""

    def __init__(self, layers: int = 2, width: int = 128, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.llama(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.llama(input_ids=batch, labels=batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Sources(LightningDataModule):
    """Windows of bytes from a few long modules of the standard library."""

    def __init__(self, batch_size: int = 8, length: int = 128) -> None:
        super().__init__()
        self.batch_size = batch_size
        text = "".join(inspect.getsource(module) for module in (argparse, inspect, typing, tarfile)).encode()
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(length)[:-1]
        self.training, self.validation = windows[:-256], windows[-256:]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, self.batch_size)


if __name__ == "__main__":
    defaults = {"accelerator": "cpu", "max_epochs": 1, "limit_train_batches": 100, "gradient_clip_val": 1.0}
    LightningCLI(
        ByteLlama,
        Sources,
        seed_everything_default=1,
        trainer_defaults={**defaults, "default_root_dir": "runs/huggingface"},
        auto_configure_optimizers=False,
    )
