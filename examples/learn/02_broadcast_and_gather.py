"""Broadcast, gather and all-reduce built from send and receive: what they cost, and what they are for.

Every rank counts the bytes that it sends. Time is about `rounds * latency + bytes of the busiest rank / bandwidth`.

    python examples/learn/02_broadcast_and_gather.py
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

RANKS, SIZE = 4, 1200  # numbers in the tensor, of 8 bytes each


class Link:
    """Sends and receives, and counts the bytes that this rank sends and the rounds in which it takes part."""

    bytes = rounds = 0

    def round(self, to=None, tensor=None, source=None, size=SIZE):
        """Send `tensor` to rank `to`, and receive `size` numbers from rank `source`: one or the other, or both at once."""
        self.rounds += 1
        sending = [] if to is None else [dist.isend(tensor, to)]
        received = torch.zeros(size, dtype=torch.float64)
        if source is not None:
            dist.recv(received, source)
        for sent in sending:
            sent.wait()
            self.bytes += 8 * tensor.numel()
        return received


def star_broadcast(x, me, link):
    for rank in range(1, RANKS):  # rank 0 sends everything itself, one rank after the other
        if me == 0:
            link.round(to=rank, tensor=x)
        elif me == rank:
            x = link.round(source=0, size=SIZE)
    return x


def tree_broadcast(x, me, link):
    for step in [RANKS >> level for level in range(1, RANKS.bit_length())]:  # 2, 1: those who have it pass it on
        if me % (2 * step) == 0:
            link.round(to=me + step, tensor=x)
        elif me % (2 * step) == step:
            x = link.round(source=me - step, size=SIZE)
    return x


def ring_all_reduce(x, me, link):
    parts, right, left = list(x.clone().chunk(RANKS)), (me + 1) % RANKS, (me - 1) % RANKS
    for step in range(RANKS - 1):  # reduce-scatter: a partial sum goes round and grows
        parts[(me - step - 1) % RANKS] += link.round(right, parts[(me - step) % RANKS], left, SIZE // RANKS)
    for step in range(RANKS - 1):  # all-gather: the finished parts go round
        parts[(me - step) % RANKS] = link.round(right, parts[(me - step + 1) % RANKS], left, SIZE // RANKS)
    return torch.cat(parts)


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=RANKS, timeout=timedelta(seconds=60))
    xs = [torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
    n, whole = RANKS, 8 * SIZE
    if me == 0:
        print(f"{n} ranks, a tensor of S = {whole} bytes\n\n  {'':16} rounds  busiest rank sends  closed form")
    for collective, expected, form, factor in [
        (star_broadcast, xs[0], "(n-1) S", n - 1),
        (tree_broadcast, xs[0], "log2(n) S", n.bit_length() - 1),
        (ring_all_reduce, sum(xs), "2 (n-1)/n S", 2 * (n - 1) / n),
    ]:
        torch.testing.assert_close(collective(xs[me], me, link := Link()), expected, rtol=0, atol=1e-10)
        most = torch.tensor([link.rounds, link.bytes])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        assert most[1] == factor * whole
        if me == 0:
            print(f"  {collective.__name__:16} {most[0]:6} {most[1]:13} bytes  {form:12} = {factor:.1f} S")
    losses = torch.arange(10.0).chunk(RANKS)[me]  # 10 samples: 3, 3, 3 and 1
    mine = torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
    dist.gather(mine, everyone := [torch.zeros(2) for _ in range(n)] if me == 0 else None, dst=0)
    if me == 0:
        sums, counts = torch.stack(everyone).T
        right, wrong = (sums.sum() / counts.sum()).item(), (sums / counts).mean().item()
        assert right == torch.arange(10.0).mean()
        print(f"\n  gathered from each rank: sums of losses {sums.tolist()}, samples {counts.long().tolist()}")
        print(
            f"\nNotice: the ring sends {2 * (n - 1) / n:.1f} S on {n} ranks and never more than 2 S on any number: links are used both ways all the"
        )
        print(
            f"time. The mean of all losses is {right:.2f}; the mean of the ranks' means, {wrong:.2f}, is wrong: gather sums and counts."
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), RANKS, start_method="fork")
