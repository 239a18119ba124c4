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

REPLICAS, STEPS, BATCH = 2, 60, 64
METHODS = {
    "dense": None,  # the mean by an all-reduce
    "top 2 %, without error feedback": TopK(0.02, feedback=None),
    "top 2 %, error feedback": TopK(0.02),
    "PowerSGD rank 2, without error feedback": PowerSGD(rank=2, feedback=None),
    "PowerSGD rank 2, error feedback": PowerSGD(rank=2),
}


def batches(me):  # each replica has inputs of its own, and the same function to learn
    teacher = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) / 4
    draws = torch.Generator().manual_seed(1 + me)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 32, generator=draws)
        yield x, (x @ teacher).tanh()


def train(compressor, me):
    """Return the mean loss of the last 10 steps, and the bytes that a replica sends in a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
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
    found = {name: train(compressor, me) for name, compressor in METHODS.items()}
    if me == 0:
        table = Table("gradients", "bytes a step", "loss", title=f"{STEPS} steps of SGD on {REPLICAS} replicas")
        for name, (loss, size) in found.items():
            table.add_row(name, f"{size:,}", f"{loss:.4f}")
        Console().print(table)
        (dense, dense_bytes), (lost, _), (kept, size), *_ = found.values()
        assert kept < lost
        print(f"Notice: the largest 2 % of elements, with their places, take 1/{dense_bytes / size:.0f} of the bytes.")
        print(f"The loss is {lost / dense:.1f} times the dense loss; with error feedback, {kept / dense:.1f} times.")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), REPLICAS, start_method="fork")
