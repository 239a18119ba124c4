"""Tensor parallelism by hand: one MLP whose hidden features are divided over two ranks.

    x --f--> first[:half]  -> gelu -> second[:, :half] --+       f: identity,   backward all-reduce
    x --f--> first[half:]  -> gelu -> second[:, half:] --+--g--> g: all-reduce, backward identity

Column parallel, then row parallel (Megatron-LM).   python examples/learn/05_tensor_parallel_mlp.py
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

RANKS, WIDTH, HIDDEN, BATCH = 2, 64, 256, 32
messages = []  # bytes of each all-reduce


def all_reduce(x):
    messages.append(8 * x.numel())
    dist.all_reduce(y := x.clone())
    return y


class F(torch.autograd.Function):  # where the paths part: each brings back a part of the gradient
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient)


class G(torch.autograd.Function):  # where the paths meet: each brings a part of the sum
    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def run(x, first, second, begin, end):
    x, first, second = leaves = [tensor.clone().requires_grad_() for tensor in (x, first, second)]
    y = end(gelu(begin(x) @ first.T) @ second.T)
    y.sin().sum().backward()
    return y, *(leaf.grad for leaf in leaves)


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=RANKS, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    shapes = (BATCH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    x, first, second = (torch.randn(shape, dtype=torch.float64) / shape[1] ** 0.5 for shape in shapes)
    y, dx, dfirst, dsecond = run(x, first, second, lambda x: x, lambda y: y)  # one process
    my_first, my_second = first.chunk(RANKS, dim=0)[me], second.chunk(RANKS, dim=1)[me]
    found = run(x, my_first, my_second, F.apply, G.apply)
    expected = y, dx, dfirst.chunk(RANKS, dim=0)[me], dsecond.chunk(RANKS, dim=1)[me]
    error = max((a - b).abs().max().item() for a, b in zip(found, expected))
    assert error < 1e-10
    count, size = len(messages), messages[0]
    partial = run(x, my_first, my_second, lambda x: x, G.apply)[1]  # what a layer before would get without f
    if me == 0:
        for name, tensor, part in zip(("output", "dL/dx", "dL/dfirst", "dL/dsecond"), (y, dx, dfirst, dsecond), found):
            print(f"  {name:10} one process {tuple(tensor.shape)!s:10} each rank {tuple(part.shape)!s:10}")
        print(f"\nNotice: {count} all-reduces, one forward and one backward, of {size} bytes: batch x width x 8.")
        print(f"The result equals one process (difference {error:.0e}). Without f no error is raised, but the")
        print(f"gradient of the layer before is off by {(partial - dx).norm() / dx.norm():.0%}.")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), RANKS, start_method="fork")
