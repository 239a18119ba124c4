"""Ring attention by hand: each rank has a part of the queries, while keys and values travel from rank to rank.

    turn 0     rank 0: q0 k0 v0    rank 1: q1 k1 v1    ...      Two results are merged by the weights of their blocks:
    turn 1     rank 0: q0 k3 v3    rank 1: q1 k0 v0    ...      the sums of exponentials, kept as logarithms.

Causal attention on 4 ranks (Liu et al., 2310.01889).   python examples/learn/11_context_parallel.py
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

RANKS, HEADS, LENGTH, SIZE = 4, 2, 64, 16
sent = []  # bytes of each message


def shift(x, by):
    me, y = dist.get_rank(), torch.empty_like(x)
    sent.append(8 * x.numel())
    ways = [(dist.isend, x.contiguous(), (me + by) % RANKS), (dist.irecv, y, (me - by) % RANKS)]
    [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(*way) for way in ways])]
    return y


class Pass(torch.autograd.Function):  # what travels on in forward sends its gradient back in backward
    @staticmethod
    def forward(ctx, x):
        return shift(x, 1)

    @staticmethod
    def backward(ctx, gradient):
        return shift(gradient, -1)


def attend(q, kv, rows, columns):
    scores = (q @ kv[0].mT * SIZE**-0.5).masked_fill(columns > rows[:, None], -1e9)  # exp(-1e9) is zero
    return scores.softmax(-1) @ kv[1], scores.logsumexp(-1, keepdim=True)


def ring(q, kv, positions, me):
    out, log_sum = attend(q, kv, positions[me], positions[me])
    for turn in range(1, RANKS):
        kv = Pass.apply(kv)  # a real ring sends before it computes, so that the message costs no time
        block, other = attend(q, kv, positions[me], positions[(me - turn) % RANKS])
        out, log_sum = torch.lerp(out, block, (other - log_sum).sigmoid()), torch.logaddexp(log_sum, other)
    return out


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=RANKS, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    whole = torch.randn(3, HEADS, LENGTH, SIZE, dtype=torch.float64, requires_grad=True)  # queries, keys, values
    order = torch.arange(LENGTH)
    (expected := attend(whole[0], whole[1:], order, order)[0]).sin().sum().backward()  # one process
    balanced = [torch.cat([order.chunk(2 * RANKS)[chunk] for chunk in (rank, -1 - rank)]) for rank in range(RANKS)]
    for name, positions in {"consecutive": order.chunk(RANKS), "head and tail": balanced}.items():
        mine = whole.detach()[:, :, positions[me]].requires_grad_()
        sent.clear()
        out = ring(mine[0], mine[1:], positions, me)
        out.sin().sum().backward()
        error = (out - expected[:, positions[me]]).abs().max().item()
        assert max(error, (mine.grad - whole.grad[:, :, positions[me]]).abs().max().item()) < 1e-10
        if me == 0:
            scores = [sum(row + 1 for row in rows.tolist()) for rows in positions]
            print(f"{name}: rank 0 sends {len(sent)} messages of {sent[0]} bytes, has {positions[0].tolist()}")
            print(f"  scores by rank {scores}: the busiest rank computes {max(scores) / sum(scores):.0%} of all scores")
    if me == 0:
        print(f"\nNotice: {RANKS - 1} turns send keys and values forward, and {RANKS - 1} send their gradients back.")
        print(
            f"Both equal one process (difference {error:.0e}). Only head-and-tail positions share causal work equally."
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), RANKS, start_method="fork")
