"""Train a small classifier of sequences on four processes: `python examples/quick_start.py`.

A plain Lightning script. Only the `strategy` argument knows of `lightning_parallel`.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import HybridParallelStrategy


class Classifier(LightningModule):
    def __init__(self, vocabulary: int = 64, width: int = 128, classes: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def training_step(self, batch, batch_index):
        tokens, labels = batch
        logits = self.head(self.encoder(self.embedding(tokens)).mean(1))
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    seed_everything(0)
    tokens = torch.randint(64, (512, 16))
    data = TensorDataset(tokens, tokens[:, 0] % 8)  # the label is hidden in the first token
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=HybridParallelStrategy(tensor_parallel_size=2, pipeline_parallel_size=2),
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))
    trainer.print(f"train_loss {trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
