"""Compressed gradients: fewer bytes, an approximate mean, and error feedback, which sends later what was left out.

python examples/learn/08_compression.py
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_parallel import PowerSGD, TopK

REPLICAS, STEPS, BATCH = 2, 150, 64
METHODS = {  # None: the mean by an all-reduce
    "dense": None,
    "top 2 %, what is left out is lost": lambda: TopK(0.02, feedback=None),
    "top 2 %, error feedback": lambda: TopK(0.02),
    "PowerSGD rank 2, what is left out is lost": lambda: PowerSGD(rank=2, feedback=None),
    "PowerSGD rank 2, error feedback": lambda: PowerSGD(rank=2),
}


def batches(me):
    """Yield inputs and targets: each replica has data of its own, of one and the same teacher."""
    teacher = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) / 4
    draws = torch.Generator().manual_seed(1 + me)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 32, generator=draws)
        yield x, (x @ teacher).tanh()


def train(compressor, me):
    """Train, and return the loss of all replicas in the last steps, the compressor's residual, and its bytes a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in batches(me):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        if compressor is not None:
            compressor.reduce_(gradients)  # in place; the same bits on every replica
        else:
            for gradient in gradients.values():
                dist.all_reduce(gradient.div_(REPLICAS))
        optimizer.step()
        losses.append(loss.item())
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    dense = sum(4 * shape.numel() for shape in shapes.values()) * 2 * (REPLICAS - 1) // REPLICAS
    last = torch.tensor(losses[-10:]).mean() / REPLICAS
    dist.all_reduce(last)
    return last.item(), compressor.wire_bytes(shapes, REPLICAS) if compressor is not None else dense


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=REPLICAS, timeout=timedelta(seconds=60))
    found = {name: train(method and method(), me) for name, method in METHODS.items()}
    if me == 0:
        table = Table(
            "gradients", "bytes a step", "loss at the end", title=f"{STEPS} steps of SGD on {REPLICAS} replicas"
        )
        for name, (loss, size) in found.items():
            table.add_row(name, f"{size:,}", f"{loss:.4f}")
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), REPLICAS, start_method="fork")
