"""Models of the GPU programme, and how they are trained."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_parallel.comm import MeshGroups
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.strategies.setup.divide import message_groups
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import apply_plan
from lightning_parallel.tensor.sharding import Shard

__all__ = ["GPT", "Block", "block_of_7b", "fit", "Layout", "fits_alike", "shared_card"]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        h = self.norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def block_of_7b(width: int) -> Block:
    """Make a block with at least eight heads."""
    return Block(width, max(8, width // 128))


class GPT(LightningModule):
    """A GPT with tied embeddings."""

    def __init__(self, width: int = 32, layers: int = 4, vocabulary: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, max(4, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.lr = lr
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def batch(self, samples: int, length: int) -> list[Tensor]:
        """Make tokens and their successors."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(self.embedding.num_embeddings, (samples, length + 1), generator=generator)
        return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]

    def loss(self, batch: Any) -> Tensor:
        """Return the mean cross-entropy."""
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1).float(), targets.flatten())

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the loss."""
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD: Adam would hide errors of scale."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Samples(Dataset[list[Tensor]]):
    """The same samples every time."""

    def __init__(self, model: GPT, count: int, length: int) -> None:
        self.tokens, self.targets = model.batch(count, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [self.tokens[index], self.targets[index]]


class Clock(Callback):
    """Notes when steps end on the device."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


@dataclass
class Fit:
    """What training has left."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    step_s: float = 0.0


def fit(
    strategy: Any,
    precision: str,
    device: str,
    steps: int = 20,
    width: int = 256,
    layers: int = 4,
    vocabulary: int = 512,
    length: int = 64,
    batch: int = 8,
) -> Fit:
    """Train a GPT; on a CPU a smaller one."""
    if device == "cpu":
        width, vocabulary, length, steps = min(width, 32), min(vocabulary, 64), min(length, 16), min(steps, 4)
    model = GPT(width, layers, vocabulary)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            strategy=strategy,
            precision=precision,
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            max_steps=steps,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(model, DataLoader(Samples(model, steps * batch, length), batch_size=batch))
    taken = sorted(later - sooner for sooner, later in zip(clock.times[1:], clock.times[2:]))
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    if dist.is_initialized():
        dist.destroy_process_group()
    return Fit([float(loss) for loss in model.losses[:steps]], weights, taken[len(taken) // 2])


def fits_alike(one: Fit, other: Fit) -> float:
    """Return the largest difference of any weight."""
    differences = [(one.weights[name] - value).abs().max() for name, value in other.weights.items()]
    return float(torch.stack(differences).double().max())


# ---------------------------------------------------------------------------------------------- ranks that share a card


class Layout(NamedTuple):
    """How ranks that share a card divide the model."""

    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"


def shared_card(device: str, layouts: Sequence[Layout]) -> list[float]:
    """Return the largest difference of a gradient from one process, for layouts of as many gloo ranks on one card."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = layouts[0].tensor * layouts[0].pipeline
        torch.multiprocessing.spawn(_on_rank, (ranks, folder, device, tuple(layouts)), ranks)
        found = torch.stack([torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)])
        return found.amax(0).tolist()


def _on_rank(rank: int, ranks: int, folder: str, device: str, layouts: tuple[Layout, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    found = [_difference(rank, device, layout) for layout in layouts]
    torch.save(torch.tensor(found), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _difference(rank: int, device: str, layout: Layout) -> float:
    groups = MeshGroups(Mesh(tensor_parallel=layout.tensor, pipeline_parallel=layout.pipeline))
    reference, model = (GPT(layers=8).double().to(device) for _ in range(2))
    batch = [entry.to(device) for entry in reference.batch(8, 16)]
    reference.loss(batch).backward()
    rules: Mapping[str, Shard] = {}
    if layout.pipeline > 1:
        plan = analyze(model, layout.pipeline, layout.schedule, example=(model.loss, batch), sync_group=groups.world)
        channels = message_groups(groups, plan.schedule)
        where = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        engine = PipelineEngine(model, plan, groups.pipeline_parallel, device=where, message_groups=channels)
        engine.forward_backward(model.loss, batch)
    else:
        plan = make_plan(model, "auto", groups.tensor_parallel)
        rules = apply_plan(model, plan, groups.tensor_parallel).shards
        model.loss(batch).backward()
    difference = 0.0
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.numel():  # other stages hold the rest
            whole = expected[name]
            part = rules[name].split(whole, rank) if name in rules else whole
            difference = max(difference, float((parameter.grad - part).abs().max()))
    return difference
