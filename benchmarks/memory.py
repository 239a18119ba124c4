"""Peak memory and time of a step with activation checkpointing and full sharding, as ratios to DDP.

    python benchmarks/memory.py [activations] [peers] [--layers 12] [--width 256] [--length 256] [--batch 8]
        [--rounds 6] [--record]

All sides train copies of one GPT in turn, alone or with `torch.utils.checkpoint` around each block (by hand).

activations: one process, DistributedDataParallel around the model. `step` is the time of the processor. `kept` are the
bytes of activations at the end of forward, `peak` the most bytes alive in the step besides parameters and gradients.
The last column compares the peak with the inputs of the layers and one layer that trains alone, which needs the
activations of the layer and their gradients. Targets: `full` 1.36 of the time and 1.10 of this bound, `selective` 1.10
of the time with 0.60 of `kept`. A layer keeps 18 times its input on a CPU, whose dropout has masks in single precision.
`selective` keeps 11: the input, attention 1, and the products qkv 3, out 1, up 4 and down 1 (asked for by the dropout
after it).

peers: two replicas through the Trainer, with AdamW and half of the batch. Peers are Lightning's strategies, and
DeepSpeed, which may keep two layers gathered. `step` is the wall time, which includes waits; `processor` leaves them
out, and other programs of the machine. `alive` are the most bytes alive in a step: parameters, gradients, optimizer,
activations and buckets.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from results import record
from sleeping import LiveBytes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_parallel import CompressedDeepSpeedStrategy, HybridParallelStrategy
from lightning_parallel.pipeline.recomputation import recompute

CLASSES = 256
RANKS, WARMUP, STEPS = 2, 2, 4
Shares = Mapping[str, Mapping[str, float]]


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

    def __init__(self, layers: int, width: int, by_hand: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.by_hand = by_hand

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_hand else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def show(title: str, shares: Shares) -> None:
    """Print a row for each side."""
    print(f"{title:40}" + "".join(f"{name:>10}" for name in next(iter(shares.values()))))
    for name, row in shares.items():
        print(f"{name:40}" + "".join(f"{share:10.2f}" for share in row.values()), flush=True)


# ---------------------------------------------------------------------------------------------------- activations alone


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
    """Most bytes of a step of one layer alone, besides its input."""
    x = model.embed(tokens).detach().requires_grad_()
    gradient = torch.ones_like(x)
    with LiveBytes() as live:
        model.blocks[0].forward(x).backward(gradient)
    return live.peak


def activations(given: argparse.Namespace) -> Shares:
    """Measure activation checkpointing in this process."""
    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    tokens = torch.randint(CLASSES, (given.batch, given.length))
    options = {"DDP": "off", "DDP, checkpoint by hand": "off", "full": "full", "selective": "selective"}
    called, models = [], []
    for name, option in options.items():
        torch.manual_seed(0)
        models.append(GPT(given.layers, given.width, by_hand="hand" in name))
        recompute(models[-1], option)
        called.append(DistributedDataParallel(models[-1]))
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
    dist.destroy_process_group()
    return {
        name: {
            "step": seconds / medians[0],
            "kept": kept / found[0][0],
            "peak": peak / found[0][1],
            "of bound": peak / bound,
        }
        for name, seconds, (kept, peak) in zip(options, medians, found)
    }


# ---------------------------------------------------------------------------------------------------- beside the peers


class Project(LightningModule):
    """The GPT with AdamW, whose state is twice the parameters."""

    def __init__(self, given: argparse.Namespace, by_hand: bool) -> None:
        super().__init__()
        self.model = GPT(given.layers, given.width, by_hand)

    def configure_model(self) -> None:
        """Shard the blocks as Lightning's own strategy asks its users to."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            assert self.device_mesh is not None
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """Return the loss."""
        return self.model(tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make AdamW."""
        return torch.optim.AdamW(self.parameters())


class Side(NamedTuple):
    """A function that makes a strategy for layers of so many elements; whether the model checkpoints by hand."""

    strategy: Callable[[int], Strategy]
    by_hand: bool = False


def ours(zero_stage: Any, option: Any) -> Side:
    """This library, without the self-check of the first step."""
    options: dict[str, Any] = {"zero_stage": zero_stage, "activation_checkpointing": option, "verify": "off"}
    return Side(lambda elements: HybridParallelStrategy(data_parallel_size=RANKS, **options))


def fsdp2(elements: int) -> Strategy:
    """FSDP2: each block gathers in forward, and again in backward."""
    return ModelParallelStrategy(RANKS, 1)


def deepspeed(elements: int) -> Strategy:
    """DeepSpeed ZeRO-3. By default it would keep a billion elements gathered, which is all of this model."""
    stage = {
        "stage": 3,
        "stage3_max_live_parameters": 2 * elements,
        "stage3_max_reuse_distance": elements,
        "stage3_prefetch_bucket_size": elements,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": elements,
    }
    config = {"zero_allow_untested_optimizer": True, "zero_optimization": stage}
    return CompressedDeepSpeedStrategy(config=config)


SIDES = {
    "DDP": Side(lambda elements: DDPStrategy()),
    "DDP, checkpoint by hand": Side(lambda elements: DDPStrategy(), by_hand=True),
    "zero_stage=0": ours(0, "off"),
    "zero_stage=0, full": ours(0, "full"),
    "zero_stage=0, selective": ours(0, "selective"),
    "FSDP2": Side(fsdp2),
    "FSDP2, checkpoint by hand": Side(fsdp2, by_hand=True),
    "DeepSpeed ZeRO-3": Side(deepspeed),
    "DeepSpeed ZeRO-3, checkpoint by hand": Side(deepspeed, by_hand=True),
    "zero_stage=3": ours(3, "off"),
    "zero_stage=3, full": ours(3, "full"),
    "zero_stage=3, selective": ours(3, "selective"),
}


class Watch(Callback):
    """Seconds of the steps after the first ones, on the wall and of the processor, and the most bytes alive in them."""

    def __init__(self, live: LiveBytes | None = None) -> None:
        self.live = live
        self.wall_s: list[float] = []
        self.processor_s: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.live is not None and batch_idx == WARMUP:
            self.live.forget_peak()
        if self.live is None:
            dist.barrier()
        self.begun = time.perf_counter(), time.process_time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx >= WARMUP:
            self.wall_s.append(time.perf_counter() - self.begun[0])
            self.processor_s.append(time.process_time() - self.begun[1])


def train(side: Side, given: argparse.Namespace, rank: int, watch: Watch) -> None:
    """Train a few steps."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(RANKS))
    torch.manual_seed(0)
    module = Project(given, side.by_hand)
    strategy = side.strategy(sum(parameter.numel() for parameter in module.model.blocks[0].parameters()))
    fit(module, strategy, given, watch, RANKS, given.batch // RANKS)


def fit(
    module: LightningModule,
    strategy: Strategy,
    given: argparse.Namespace,
    watch: Callback,
    devices: int,
    batch: int,
    **options: Any,
) -> None:
    """Train a module a few steps on random tokens, with batches of `batch` samples on each rank."""
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=WARMUP + STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
        **options,
    )
    tokens = torch.randint(CLASSES, ((WARMUP + STEPS) * given.batch, given.length))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(module, DataLoader(tokens, batch))


def peers(rank: int, given: argparse.Namespace, folder: str) -> None:
    """Measure all sides on one of two ranks, and show them on the first."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29417", RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    alive = []
    for side in SIDES.values():
        gc.collect()
        with LiveBytes() as live:
            train(side, given, rank, Watch(live))
        alive.append(live.peak)
    watches = [Watch() for _ in SIDES]
    for number in range(given.rounds):
        turns = list(zip(SIDES.values(), watches))
        for side, watch in turns if number % 2 else reversed(turns):
            train(side, given, rank, watch)
            gc.collect()
    if rank == 0:
        rows = [(statistics.median(watch.wall_s), statistics.median(watch.processor_s)) for watch in watches]
        shares = {
            name: {"step": wall / rows[0][0], "processor": own / rows[0][1], "alive": most / alive[0]}
            for name, (wall, own), most in zip(SIDES, rows, alive)
        }
        report("two replicas, beside DDP", shares, given)
    dist.destroy_process_group()


def report(title: str, shares: Shares, given: argparse.Namespace) -> None:
    """Show the rows, and record them if asked to."""
    load = os.getloadavg()[0]
    show(f"{title} (load {load:.1f})", shares)
    if given.record:
        rounded = {side: {name: round(share, 2) for name, share in row.items()} for side, row in shares.items()}
        record(f"memory, {title.partition(',')[0]}", rounded)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["activations", "peers"], help="activations, peers")
    for name, default in (("layers", 12), ("width", 256), ("length", 256), ("batch", 8), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--record", action="store_true", help="write the figures to results.json")
    given = parser.parse_args()
    if "activations" in given.parts:
        report("one process, beside DDP", activations(given), given)
    if "peers" in given.parts:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(peers, (given, folder), RANKS)


if __name__ == "__main__":
    main()
