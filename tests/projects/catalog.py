"""Projects that others wrote, with tiny models and random data, and what is expected of them.

All are without dropout: where activations are divided, or cut into microbatches, masks are drawn from other streams of
random numbers.
"""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.projects.sources import GLUE, TRANSFORMER, VIT, Source, definitions

BATCH = 8


class Project(NamedTuple):
    """What a project's own script makes."""

    module: Any
    train: Any
    validation: Any
    trainer: dict[str, Any] = {}


class Entry(NamedTuple):
    """One row of the table.

    `tolerance` is that of the largest difference of losses, metrics, parameters and optimizer state: 1e-10 for SGD in
    double precision. Adam divides gradients that should be zero, and are rounding, by their own size.
    """

    make: Callable[[Path], Project]
    tolerance: float = 1e-10
    imports: str = "lightning.pytorch"
    source: Source | None = None
    precision: str = "64-true"
    python: tuple[int, int] = (3, 10)  # the oldest that its package runs on
    refused: dict[str, str] = {}  # layout -> what the refusal must say


def litgpt(folder: Path) -> Project:
    """A GPT of litgpt in a LightningModule, as litgpt's documentation shows it."""
    import lightning.pytorch as pl
    from litgpt import GPT
    from litgpt.utils import chunked_cross_entropy

    class LanguageModel(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = GPT.from_name("pythia-14m", n_layer=4, n_embd=32, n_head=4, padded_vocab_size=64)

        def training_step(self, batch, index):
            logits = self.model(batch[0])
            loss = chunked_cross_entropy(logits[..., :-1, :], batch[0][..., 1:])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch, index):
            logits = self.model(batch[0])
            self.log("val_loss", chunked_cross_entropy(logits[..., :-1, :], batch[0][..., 1:], chunk_size=0))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    train, validation = (DataLoader(TensorDataset(_tokens(count, 16)), BATCH) for count in (32, 16))
    return Project(LanguageModel(), train, validation, {"gradient_clip_val": 1.0})


def chemprop(folder: Path) -> Project:
    """The message passing network of chemprop, on chains of carbon and oxygen."""
    from chemprop import data, models, nn

    chains = ["C" * (1 + i % 7) + "O" * (1 + i % 3) + "C" * (i % 5) for i in range(48)]
    points = [data.MoleculeDatapoint.from_smi(chain, [float(len(chain))]) for chain in chains]
    train, validation = data.MoleculeDataset(points[:32]), data.MoleculeDataset(points[32:])
    validation.normalize_targets(train.normalize_targets())
    head = nn.RegressionFFN(input_dim=16, hidden_dim=16)
    network = models.MPNN(nn.BondMessagePassing(d_h=16), nn.MeanAggregation(), head)
    loaders = [data.build_dataloader(each, BATCH, shuffle=False) for each in (train, validation)]
    return Project(network, *loaders)


def transformer(folder: Path) -> Project:
    """The language model of Lightning's own examples."""
    module = definitions(TRANSFORMER, "transformer_example")
    tokens = _tokens(48, 13)
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    train, validation = torch.utils.data.random_split(data, [32, 16])
    loaders = DataLoader(train, BATCH, shuffle=True), DataLoader(validation, BATCH)
    network = module.LanguageModel(vocab_size=64)
    for part in network.modules():  # the example leaves the rate as it is, which has no argument
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        elif isinstance(part, torch.nn.MultiheadAttention):
            part.dropout = 0.0
    return Project(network, *loaders, {"gradient_clip_val": 0.25})


def vit(folder: Path) -> Project:
    """The vision transformer of the UvA course."""
    images, classes = torch.rand(48, 3, 16, 16, dtype=torch.float64), torch.randint(10, (48,))
    train = DataLoader(TensorDataset(images[:32], classes[:32]), BATCH, shuffle=True, drop_last=True)
    validation = DataLoader(TensorDataset(images[32:], classes[32:]), BATCH)
    module = definitions(VIT, "vit_tutorial", train_loader=train)
    sizes = {"embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "num_layers": 4, "patch_size": 4, "num_channels": 3}
    sizes |= {"num_patches": 16, "num_classes": 10, "dropout": 0.0}
    return Project(module.ViT(model_kwargs=sizes, lr=3e-4), train, validation)


def glue(folder: Path) -> Project:
    """The GLUE tutorial, on a DistilBERT of random weights.

    The tutorial was written for older versions of two packages: `AdamW` of transformers was torch's, and `datasets`,
    which would download the metric, is replaced by a module with that one function.
    """
    import transformers

    transformers.AdamW = torch.optim.AdamW
    sys.modules["datasets"] = types.ModuleType("datasets")
    sys.modules["datasets"].load_metric = lambda *_, **__: _Accuracy()
    module = definitions(GLUE, "glue_tutorial")
    name = str(folder / "distilbert")
    sizes = {"vocab_size": 64, "dim": 32, "hidden_dim": 64, "n_layers": 4, "n_heads": 4}
    config = transformers.DistilBertConfig(**sizes, dropout=0, attention_dropout=0, seq_classif_dropout=0)
    transformers.DistilBertForSequenceClassification(config).save_pretrained(name)
    tokens, labels = _tokens(48, 12), torch.randint(2, (48,))
    rows = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label}
        for ids, label in zip(tokens, labels, strict=True)
    ]
    network = module.GLUETransformer(name, num_labels=2, task_name="mrpc", learning_rate=1e-2)
    return Project(network, DataLoader(rows[:32], BATCH, shuffle=True), DataLoader(rows[32:], BATCH))


class _Accuracy:
    def compute(self, predictions, references):
        return {"accuracy": float((predictions == references).mean())}


def _tokens(count: int, length: int) -> torch.Tensor:
    return torch.randint(64, (count, length))


_BATCH_OF_GRAPHS = "split_batch"
CATALOG = {
    "litgpt": Entry(litgpt),
    "chemprop": Entry(
        chemprop,
        1e-5,
        precision="32-true",  # Lightning does not convert the tensors inside of its graphs
        python=(3, 11),
        refused={"pipeline": _BATCH_OF_GRAPHS, "hybrid": _BATCH_OF_GRAPHS},
    ),
    "transformer": Entry(transformer, source=TRANSFORMER),
    "vit": Entry(vit, 1e-7, "pytorch_lightning", source=VIT),
    "glue": Entry(glue, 1e-7, "pytorch_lightning", source=GLUE),
}


def unavailable(entry: Entry) -> str:
    """Return why this project cannot be run here, or an empty string."""
    if entry.source and not entry.source.fetched.exists():
        return f"{entry.source.path} of {entry.source.repository} was not fetched (network, or PROJECTS_DIR)"
    if sys.version_info < entry.python:
        return f"it needs Python {entry.python[0]}.{entry.python[1]}"
    return ""
