"""A parameter server: asynchronous workers wait for nobody, so each computes with parameters that are out of date.

Rank 0 holds the parameters. A worker sends it a gradient and gets the newest parameters back, a replica of its own.
Synchronous, for comparison: the server answers when all have come.   python examples/learn/07_parameter_server.py
"""

import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

WORKERS, GRADIENTS, SIZE = 3, 90, 8
CURVATURE = torch.linspace(0.2, 1.0, SIZE, dtype=torch.float64)  # loss: half the sum of CURVATURE x parameters^2
SECONDS = {1: 0.004, 2: 0.004, 3: 0.012}  # that a worker takes for a gradient: the last one is slow


def worker(me):
    message = torch.zeros(SIZE + 1, dtype=torch.float64)  # parameters, and their version; a negative one is the end
    while dist.recv(message, 0) == 0 and message[-1] >= 0:
        time.sleep(SECONDS[me])
        dist.send(torch.cat([CURVATURE * message[:-1], message[-1:]]), 0)  # the gradient, and of which version it is


def server(synchronous, rate):
    parameters, version, sent = torch.ones(SIZE, dtype=torch.float64), 0, 0
    replicas, arrived, staleness, drift = {}, [], [], 0.0

    def answer(rank):
        nonlocal sent
        replicas[rank], sent = parameters.clone(), sent + 1
        dist.send(torch.cat([parameters, torch.tensor([version if sent <= GRADIENTS else -1.0])]), rank)

    for rank in range(1, WORKERS + 1):
        answer(rank)
    for _ in range(GRADIENTS):
        message = torch.zeros(SIZE + 1, dtype=torch.float64)
        arrived.append((dist.recv(message), message))  # from whoever comes first
        drift = max(drift, *((a - b).norm().item() for a in replicas.values() for b in replicas.values()))
        if not synchronous or len(arrived) == WORKERS:
            staleness += [version - int(message[-1]) for _, message in arrived]
            parameters -= rate * torch.stack([message[:-1] for _, message in arrived]).mean(0)
            version += 1
            for rank, _ in arrived:
                answer(rank)
            arrived = []
    return sum(staleness) / GRADIENTS, drift, (CURVATURE * parameters**2).sum().item() / 2


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=WORKERS + 1, timeout=timedelta(seconds=60))
    if me == 0:
        print("                learning rate  time     mean staleness  greatest drift  loss")
    found = {}
    for synchronous, rate in ((True, 1.2), (False, 1.2), (False, 0.3)):
        dist.barrier()
        start = time.perf_counter()
        if me > 0:
            worker(me)
            continue
        found[synchronous, rate] = staleness, drift, loss = server(synchronous, rate)
        name, milliseconds = "synchronous" if synchronous else "asynchronous", 1e3 * (time.perf_counter() - start)
        print(f"  {name:13} {rate:13} {milliseconds:6.0f} ms {staleness:14.2f} {drift:15.2g} {loss:11.2g}")
    if me == 0:
        one = (1 - 1.2 * CURVATURE) ** (GRADIENTS // WORKERS)  # what gradient descent on one process makes of a 1
        assert abs(found[True, 1.2][2] - (CURVATURE * one**2).sum() / 2) < 1e-10
        assert found[True, 1.2][1] == 0 < found[False, 1.2][1]
        late = found[False, 1.2][0]
        print(f"\nNotice: a gradient is {late:.1f} versions late, because {WORKERS - 1} other workers do not wait.")
        print("Replicas drift, and the learning rate of one process is too high. Synchronous steps equal one process.")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), WORKERS + 1, start_method="fork")
