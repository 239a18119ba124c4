"""Data parallelism by hand: hooks, buckets, and an all-reduce that travels while backward goes on.

Each replica computes gradients of its part of the batch. Those of the last layer come first, and are sent while earlier
ones are computed, as in `DistributedDataParallel`.      python examples/learn/04_data_parallel_mlp.py
"""

import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

REPLICAS, STEPS, BATCH, WIDTH, BUCKET = 2, 5, 256, 256, 500_000  # bytes of gradients that are sent together


def build():
    torch.manual_seed(0)  # the same parameters on each replica; DDP broadcasts those of rank 0
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1)).double()


class Buckets:
    def __init__(self, parameters):
        self.buckets, self.sent = [[]], []
        for parameter in reversed(list(parameters)):  # about the order in which backward makes gradients
            if sum(8 * other.numel() for other in self.buckets[-1]) >= BUCKET:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _, bucket=self.buckets[-1]: self.send(bucket))

    def send(self, bucket):
        if all(parameter.grad is not None for parameter in bucket):
            message, times = torch.cat([parameter.grad.flatten() for parameter in bucket]), [time.perf_counter()]
            work = dist.all_reduce(message, async_op=True)  # returns at once
            work.get_future().add_done_callback(lambda _: times.append(time.perf_counter()))
            self.sent.append((bucket, message, work, times))

    def finish(self):
        for bucket, message, work, times in self.sent:
            work.wait()
            times.append(time.perf_counter())
            for parameter, part in zip(bucket, message.split([parameter.numel() for parameter in bucket])):
                parameter.grad = part.view_as(parameter) / REPLICAS


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=REPLICAS, timeout=timedelta(seconds=60))
    whole, mine = build(), build()  # whole: what one process does, with the whole batch
    buckets = Buckets(mine.parameters())
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, dtype=torch.float64)  # the same numbers on all replicas
        (whole(x) - x.sin()).square().mean().backward()
        loss = (mine(x.chunk(REPLICAS)[me]) - x.chunk(REPLICAS)[me].sin()).square().mean()
        buckets.sent, begin = [], time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        buckets.finish()
        for model in (whole, mine):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    assert (error := max((a - b).abs().max().item() for a, b in zip(whole.parameters(), mine.parameters()))) < 1e-10
    if me == 0:  # the last step
        sent = [(f"{8 * len(message) // 1000} kB", *times[:2]) for _, message, _, times in buckets.sent]
        last = max(end, *(done for _, _, done in sent))
        for name, start, done in [("backward", begin, end), *sent]:
            a, b = (round(60 * (moment - begin) / (last - begin)) for moment in (start, done))
            print(f"{name:>10} {' ' * a + '=' * max(1, b - a):60} {1e3 * (done - start):4.0f} ms")
        took, hidden = (1e3 * sum(min(done, until) - start for _, start, done in sent) for until in (last, end))
        print(f"\nNotice: communication took {took:.1f} ms in all, {hidden:.1f} ms of it during backward.")
        print(f"After {STEPS} steps the parameters equal one process (difference {error:.0e}).")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), REPLICAS, start_method="fork")
