"""Who reads which sample: the order is computed by every replica for itself, and nothing is sent.

All replicas shuffle with the same seed and epoch, and each takes every n-th sample. So the batches of all replicas
together are the batch of one process, and the mean of their gradients is its gradient.

    python examples/learn/03_data_loader.py
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

REPLICAS, SAMPLES, BATCH = 4, 24, 8  # BATCH is the global batch: 2 samples on each of 4 replicas
inputs = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
data = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True))


def global_order(epoch, samples=SAMPLES, seed=0):
    """Return the order of an epoch, which is the same for any number of replicas."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


class Part:
    """The samples of one replica in one epoch. This is what `DistributedSampler` does."""

    def __init__(self, me, epoch, samples=SAMPLES):
        order = global_order(epoch, samples)
        order += order[: -samples % REPLICAS]  # all replicas take equally many steps: the first samples come again
        self.mine = order[me::REPLICAS]

    def __iter__(self):
        return iter(self.mine)

    def __len__(self):
        return len(self.mine)


def gradient(x, y):
    weight = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(((x @ weight - y) ** 2).mean(), weight)[0]


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=REPLICAS, timeout=timedelta(seconds=60))
    error = 0.0
    for epoch in range(2):
        theirs = DistributedSampler(data, REPLICAS, me, shuffle=True, seed=0)
        theirs.set_epoch(epoch)  # without it every epoch has the order of epoch 0
        assert list(theirs) == Part(me, epoch).mine
        for step, (places, x, y) in enumerate(DataLoader(data, BATCH // REPLICAS, sampler=Part(me, epoch))):
            whole = global_order(epoch)[step * BATCH : (step + 1) * BATCH]
            read = [torch.empty_like(places) for _ in range(REPLICAS)]
            dist.all_gather(read, places)
            assert sorted(torch.cat(read).tolist()) == sorted(whole)
            dist.all_reduce(mean := gradient(x, y) / REPLICAS)
            error = max(error, (mean - gradient(*data[whole][1:])).abs().max().item())
            if me == 0:
                picture = "   ".join(f"{rank}: {part.tolist()}" for rank, part in enumerate(read))
                print(f"epoch {epoch} step {step}   by replica   {picture}")
    assert error < 1e-10
    if me == 0:
        uneven = [Part(rank, 0, samples=22).mine for rank in range(REPLICAS)]
        reads = torch.bincount(torch.tensor(uneven).flatten())
        forgetful = DistributedSampler(data, REPLICAS, 0)
        same = list(forgetful) == list(forgetful) == Part(0, epoch=0).mine
        print(f"\nNotice: the mean gradient equals one process (difference {error:.0e}). No rank sent an index.")
        print(f"Without `set_epoch`, all epochs have the order of epoch 0: {same}.")
        print(f"Of 22 samples {int((reads == 2).sum())} are read twice, as replicas read equally many.")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), REPLICAS, start_method="fork")
