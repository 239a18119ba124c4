"""The example GPT trained with each compressor for equal steps: its loss over that of plain means.

    python benchmarks/compression_convergence.py [--ranks 2] [--steps 400] ["PowerSGD(8, start_step=100)" ...]

Every run begins with the same weights and reads the same batches in the same order; only the mean of the gradients
differs. The model is small (2 blocks of width 64) and trained by AdamW with clipping, as the example is. The loss is
that of held-out text, in nats per byte. Dense runs from other seeds show what of a difference is chance.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lightning_parallel.compression as compression
from lightning_parallel.comm import Group
from lightning_parallel.compression import Dense, Reducer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))
DEFAULTS = (
    *("Cast()", "Quantize()", "Quantize(4)", "PowerSGD()", "PowerSGD(8)", "PowerSGD(16)", "PowerSGD(alternate=True)"),
    *("TopK()", "TopK(0.1)", "BlockTopK()", "RandomK()", "Sign()", "PowerSGD(start_step=100)", "TopK(start_step=100)"),
)
CONTEXT, BATCH, PEAK, WARM_UP, SEEDS = 64, 8, 3e-3, 40, 3


def train(reducer: Reducer, steps: int, group: Group, seed: int = 0) -> float:
    """Nats per byte of held-out text after training from the weights of `seed`."""
    from data import Windows, read_bytes, split_sources
    from model import ByteGPT

    training, validation = split_sources(Path(sysconfig.get_paths()["stdlib"]), 0.1)
    windows = Windows(read_bytes(training, 1_000_000), CONTEXT)
    unseen = Windows(read_bytes(validation, 60_000), CONTEXT)
    held_out = torch.stack([unseen[index] for index in range(0, len(unseen), 2)])
    torch.manual_seed(seed)
    model = ByteGPT(layers=2, width=64, heads=2, context=CONTEXT, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
    )
    order = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(len(windows), (group.size, BATCH), generator=order)[group.rank].tolist()
        optimizer.zero_grad()
        model.loss(torch.stack([windows[index] for index in chosen])).backward()
        reducer.reduce_({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    with torch.no_grad():
        return float(model.loss(held_out))


def work(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Train as one rank; the first one prints."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    group = Group.of()
    dense = [train(Dense(), arguments.steps, group, seed) for seed in range(SEEDS)]
    if rank == 0:
        spread = ", ".join(f"{loss / dense[0] - 1:+.1%}" for loss in dense[1:])
        print(f"plain means: {dense[0]:.4f} nats per byte after {arguments.steps} steps; from other seeds {spread}")
    for text in arguments.compressors or DEFAULTS:
        loss = train(eval(text, vars(compression)), arguments.steps, group)
        if rank == 0:
            print(f"{text:32} {loss:.4f}  {loss / dense[0] - 1:+.1%}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Train with every compressor in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compressors", nargs="*", help="as written in Python")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (arguments, folder), arguments.ranks)


if __name__ == "__main__":
    main()
