"""Activations and time of a step with activation checkpointing, as ratios to the step without it.

    python benchmarks/memory.py [--layers 12] [--width 256] [--length 256] [--batch 8] [--rounds 6]

All sides train copies of one GPT in one process, in turn: DistributedDataParallel without checkpoints, the same with
`torch.utils.checkpoint` around each block, and `activation_checkpointing` of this library. `step` is the time of the
processor. `kept` are the bytes of activations at the end of forward, `peak` the most bytes alive in the step besides
parameters and gradients. The last column compares the peak with the inputs of the layers and the activations of one
layer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sleeping import LiveBytes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_parallel.pipeline.recomputation import recompute

CLASSES = 256


class Block(nn.Module):
    """Attention and an MLP, each after a norm and before dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Predicts the next of `CLASSES` tokens; `by_hand` puts torch's checkpoint around each block."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.by_hand = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_hand else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def plain(model: GPT) -> nn.Module:
    """DistributedDataParallel."""
    return DistributedDataParallel(model)


def by_hand(model: GPT) -> nn.Module:
    """The same with torch's checkpoint around each block."""
    model.by_hand = True
    return DistributedDataParallel(model)


def ours(option: str) -> Callable[[GPT], nn.Module]:
    """The same with an option of this library."""

    def side(model: GPT) -> nn.Module:
        recompute(model, option)
        return DistributedDataParallel(model)

    return side


SIDES = {"off": plain, "checkpoint by hand": by_hand, "full": ours("full"), "selective": ours("selective")}


def bytes_of(called: nn.Module, tokens: Tensor) -> tuple[int, int]:
    """Bytes of activations after forward, and the most bytes in the step, of a step after the first two."""
    for _ in range(2):
        called(tokens).backward()
    with LiveBytes() as live:
        loss = called(tokens)
        kept = live.now
        loss.backward()
    return kept, live.peak


def one_layer_bytes(model: GPT, tokens: Tensor) -> int:
    """Bytes of the activations of one layer, beside its input."""
    x = model.embed(tokens).detach().requires_grad_()
    with LiveBytes() as live:
        y = model.blocks[0].forward(x)
    del y
    return live.peak


def main() -> None:
    """Measure all sides, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("width", 256), ("length", 256), ("batch", 8), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    tokens = torch.randint(CLASSES, (given.batch, given.length))
    called, models = [], []
    for side in SIDES.values():
        torch.manual_seed(0)
        models.append(GPT(given.layers, given.width))
        called.append(side(models[-1]))
    found = [bytes_of(model, tokens) for model in called]
    times: list[list[float]] = [[] for _ in called]
    for number in range(given.rounds + 1):
        for side in range(len(called)) if number % 2 else reversed(range(len(called))):
            begun_s = time.process_time()
            called[side](tokens).backward()
            times[side].append(time.process_time() - begun_s)
    medians = [statistics.median(seconds[1:]) for seconds in times]  # the first round is for warming up
    inputs = given.layers * given.batch * given.length * given.width * 4
    bound = inputs + one_layer_bytes(models[0], tokens)
    print(f"{'':22}{'step':>8}{'kept':>8}{'peak':>8}{'peak / (inputs + one layer)':>30}")
    for name, seconds, (kept, peak) in zip(SIDES, medians, found):
        ratios = (seconds / medians[0], kept / found[0][0], peak / found[0][1])
        print(f"{name:22}" + "".join(f"{ratio:8.2f}" for ratio in ratios) + f"{peak / bound:30.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
