"""Broadcast, gather and all-reduce, built from send and receive: what they cost, and what they are for.

Every rank counts the bytes that it sends. Time is about `rounds x latency + bytes of the busiest rank / bandwidth`.

    python examples/learn/02_broadcast_and_gather.py
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

RANKS, SIZE = 4, 1200  # numbers in the tensor, of 8 bytes each
sent = {"rounds": 0, "bytes": 0}


def exchange(to=None, tensor=None, source=None, size=SIZE):
    """Send `tensor` to rank `to`, receive `size` numbers from rank `source`, or both at the same time: one round."""
    received = torch.zeros(size, dtype=torch.float64)
    sending = None if to is None else dist.isend(tensor, to)
    if source is not None:
        dist.recv(received, source)
    if sending is not None:
        sending.wait()
        sent["bytes"] += 8 * tensor.numel()
    sent["rounds"] += 1
    return received


def tree_broadcast(x, me):  # all ranks that have it send it on; rank 0 alone would take n-1 rounds
    for step in [RANKS >> level for level in range(1, RANKS.bit_length())]:  # 2, 1
        if me % (2 * step) == 0:
            exchange(me + step, x)
        elif me % (2 * step) == step:
            x = exchange(source=me - step)
    return x


def ring_all_reduce(x, me):
    parts, right, left = list(x.clone().chunk(RANKS)), (me + 1) % RANKS, (me - 1) % RANKS
    for step in range(RANKS - 1):  # reduce-scatter: each partial sum goes round, and grows
        parts[(me - step - 1) % RANKS] += exchange(right, parts[(me - step) % RANKS], left, SIZE // RANKS)
    for step in range(RANKS - 1):  # all-gather: each sum goes round, as it is
        parts[(me - step) % RANKS] = exchange(right, parts[(me - step + 1) % RANKS], left, SIZE // RANKS)
    return torch.cat(parts)


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=RANKS, timeout=timedelta(seconds=60))
    xs = [torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
    calls = [
        (tree_broadcast, xs[0], "log2(n) S", RANKS.bit_length() - 1),
        (ring_all_reduce, sum(xs), "2 (n-1)/n S", 2 * (RANKS - 1) / RANKS),
    ]
    for collective, expected, closed_form, factor in calls:
        sent.update(rounds=0, bytes=0)
        torch.testing.assert_close(collective(xs[me], me), expected, rtol=0, atol=1e-10)
        dist.all_reduce(most := torch.tensor(list(sent.values())), op=dist.ReduceOp.MAX)
        assert most[1] == factor * 8 * SIZE
        if me == 0:
            print(f"{collective.__name__:15} {most[0]} rounds, at most {most[1]} bytes = {closed_form} = {factor} S")
    losses = torch.arange(10.0).chunk(RANKS)[me]  # 10 samples: 3, 3, 3 and 1
    mine = torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
    dist.gather(mine, table := None if me else list(torch.zeros(RANKS, 2)), dst=0)
    if me == 0:
        (sums, counts), n = torch.stack(table).T, RANKS
        right, wrong = sums.sum() / counts.sum(), (sums / counts).mean()
        assert right == torch.arange(10.0).mean() != wrong
        print(f"gathered by rank 0: sums of losses {sums.tolist()}, numbers of samples {counts.tolist()}\n")
        print(f"Notice: in a ring, each of {n} ranks sends {2 * (n - 1) / n} S, each of 64 {2 * 63 / 64:.2f} S.")
        print(f"The mean loss is {right:.2f}. The mean of the ranks' means is {wrong:.2f}. Gather sums and counts.")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), RANKS, start_method="fork")
