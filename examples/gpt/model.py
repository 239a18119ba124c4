"""A byte-level GPT: pre-norm blocks, causal attention, one matrix for the embedding and the head."""

import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

__all__ = ["Attention", "Block", "ByteGPT", "MLP"]

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"`width` must be a multiple of `heads`; got {width} and {heads}")
        self.head_size = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        heads = (t.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two layers with a GELU in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then MLP, each on a normalised input and added to the stream after dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ByteGPT(LightningModule):
    """Predicts the next byte.

    Args:
        layers: Number of blocks.
        width: Features of the residual stream.
        heads: Attention heads per block; must divide `width`.
        context: Longest window in bytes.
        dropout: Probability of dropping a feature on its way into the residual stream.
        learning_rate: Peak of the schedule.
        weight_decay: Applied to the matrices inside the blocks, not to biases, norms and embeddings.
        warmup_steps: Optimizer steps of linear warm-up; a cosine to a tenth of the peak follows.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.1,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 40,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes (batch, length) -> logits of each next byte (batch, length, 256)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean nats per byte over windows (batch, length + 1)."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Bytes (batch, length) -> logits of the byte that follows (batch, 256)."""
        return self(batch)[:, -1]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        decayed, plain = [], []
        for name, parameter in self.named_parameters():
            is_matrix = name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name
            (decayed if is_matrix else plain).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.hparams["weight_decay"]},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["learning_rate"], betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _learning_rate_factor(self, step: int) -> float:
        warmup = self.hparams["warmup_steps"]
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, self.trainer.estimated_stepping_batches - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.3)  # small ones learn little more than pair counts for hundreds of steps
    if isinstance(module, nn.Linear) and module.bias is not None:  # not the head, which is the embedding
        nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
        nn.init.zeros_(module.bias)
