"""Every collective, forward and backward: what each rank holds before and after.

A collective is a function of the tensors x of all ranks. Its backward is a collective again. Each is compared with
autograd on one process, which has the tensors of all ranks in a list. Run: python examples/learn/01_collectives.py
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

RANKS = 4
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its older name
CALLS = {  # what rank `me` calls to turn its tensor x into its tensor y
    "all-reduce": lambda x, y, me: dist.all_reduce(y.copy_(x)),
    "identity": lambda x, y, me: y.copy_(x),
    "all-gather": lambda x, y, me: dist.all_gather(list(y.chunk(RANKS)), x),
    "reduce-scatter": lambda x, y, me: reduce_scatter(y, x),
    "broadcast": lambda x, y, me: dist.broadcast(y.copy_(x), src=0),
    "reduce": lambda x, y, me: dist.reduce(y.copy_(x), dst=0) or y.mul_(me == 0),  # the others have partial sums
    "scatter": lambda x, y, me: dist.scatter(y, None if me else list(x.chunk(RANKS)), src=0),
    "gather": lambda x, y, me: dist.gather(x, None if me else list(y.chunk(RANKS)), dst=0),
    "all-to-all": lambda x, y, me: dist.all_to_all_single(y, x),
    "send right": lambda x, y, me: (dist.isend(x, (me + 1) % RANKS), dist.recv(y, (me - 1) % RANKS))[0].wait(),
    "send left": lambda x, y, me: (dist.isend(x, (me - 1) % RANKS), dist.recv(y, (me + 1) % RANKS))[0].wait(),
}
RULES = {  # the backward; on one process: the list of all x -> the list of all y, or that of the first rank alone
    "all-reduce": ("all-reduce", lambda xs: [sum(xs)] * RANKS),
    "g: all-reduce": ("f: identity", lambda xs: [sum(xs)] * RANKS),  # all compute the same loss from it: it counts once
    "f: identity": ("g: all-reduce", lambda xs: [xs[0]] * RANKS),  # all ranks hold the same tensor
    "all-gather": ("reduce-scatter", lambda xs: [torch.cat(xs)] * RANKS),
    "reduce-scatter": ("all-gather", lambda xs: sum(xs).chunk(RANKS)),
    "broadcast": ("reduce", lambda xs: [xs[0]] * RANKS),
    "reduce": ("broadcast", lambda xs: [sum(xs)]),
    "scatter": ("gather", lambda xs: xs[0].chunk(RANKS)),
    "gather": ("scatter", lambda xs: [torch.cat(xs)]),
    "all-to-all": ("all-to-all", lambda xs: torch.stack(xs).T),
    "send right": ("send left", lambda xs: xs[-1:] + xs[:-1]),
    "send left": ("send right", lambda xs: xs[1:] + xs[:1]),
}


class Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        ctx.name, y = name, torch.zeros_like(RULES[name][1]([x] * RANKS)[0])
        CALLS[name.split(": ")[-1]](x, y, dist.get_rank())
        return y

    @staticmethod
    def backward(ctx, gradient):
        return Collective.apply(gradient.contiguous(), RULES[ctx.name][0]), None


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=RANKS, timeout=timedelta(seconds=60))
    for name, (backward, on_one_process) in RULES.items():
        places = torch.arange(1.0, 2 if name[-6:] == "gather" else RANKS + 1)
        xs = [(10 * rank + places).requires_grad_() for rank in range(1, RANKS + 1)]
        ys = list(on_one_process(xs := xs[:1] * RANKS if name[:2] == "f:" else xs))
        dys = [(1 if name[:2] == "g:" else rank) * 10 ** torch.arange(0.0, len(ys[0])) for rank in range(1, RANKS + 1)]
        counted = 1 if name[:2] == "g:" else len(ys)
        dxs = torch.autograd.grad(ys[:counted], xs, dys[:counted], allow_unused=True, materialize_grads=True)
        (y := Collective.apply(x := xs[me].detach().requires_grad_(), name)).backward(dys[me])
        assert all(map(torch.equal, (y, x.grad), ([*ys, *RANKS * [0 * y]][me], dxs[me]))), name
        dist.gather_object((x, y, dys[me], x.grad), rows := None if me else [None] * RANKS)
        if me == 0:
            print(f"\n{name}, backward: {backward}\n  rank  {'x':20}{'y':20}{'dL/dy':20}dL/dx")
            for rank, row in enumerate(rows):
                print(f"  {rank:4} ", *(f"{' '.join(f'{value:g}' for value in tensor.tolist()):19}" for tensor in row))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), RANKS, start_method="fork")
    mutual = sum(RULES[backward][0] == name for name, (backward, _) in RULES.items())
    print(f"\nNotice: {len(RULES)} collectives equal one process exactly; {mutual} are the backward of their backward.")
