"""Pipeline parallelism by hand: GPipe and 1F1B, by send and receive.

Each rank holds one stage of the model, and the batch is cut into microbatches so that stages work at the same time. A
sleep stands for the accelerator, so that 4 stages overlap on 2 cores.     python examples/learn/06_pipeline_mlp.py
"""

import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

STAGES, MICROBATCHES, SAMPLES, WIDTH = 4, 8, 4, 16  # samples in a microbatch
SECONDS, NAMES = {"F": 0.02, "B": 0.04}, {"F": "01234567", "B": "abcdefgh"}


def gpipe(stage):
    return [(kind, i) for kind in "FB" for i in range(MICROBATCHES)]


def one_f_one_b(stage):
    warmup = STAGES - 1 - stage  # forwards until the first gradient comes back
    forwards, backwards = ([(kind, i) for i in range(MICROBATCHES)] for kind in "FB")
    steady = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
    return forwards[:warmup] + steady + backwards[MICROBATCHES - warmup :]


def run(schedule, stage, x, y, me):
    kept, sent, times, most = {}, [], [], 0
    first, last = me == 0, me == STAGES - 1
    for kind, i in schedule(me):
        received = torch.empty(SAMPLES, WIDTH, dtype=torch.float64)
        if not (first if kind == "F" else last):
            dist.recv(received, me - 1 if kind == "F" else me + 1, tag=i)
        start = time.perf_counter()
        if kind == "F":
            inputs = (x[i] if first else received).requires_grad_()
            output = stage(inputs)
            kept[i] = inputs, (output - y[i]).square().mean() / MICROBATCHES if last else output
        else:
            inputs, output = kept.pop(i)
            output.backward(None if last else received)
        time.sleep(SECONDS[kind])
        times.append((kind, i, start, time.perf_counter()))
        most = max(most, len(kept))
        if not (last if kind == "F" else first):  # not waited for: neighbours that send to each other never would end
            message, to = (output.detach(), me + 1) if kind == "F" else (inputs.grad, me - 1)
            sent.append(dist.isend(message, to, tag=i))
    [work.wait() for work in sent]
    return times, most  # when each action ran, and how many microbatches were kept at once


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=STAGES, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES))).double()
    x, y = torch.randn(2, MICROBATCHES, SAMPLES, WIDTH, dtype=torch.float64)
    expected = torch.autograd.grad((whole(x) - y).square().mean(), whole[me].parameters())  # one process
    run(gpipe, whole[me], x, y, me)  # the first messages connect the ranks, which takes time
    for schedule in (gpipe, one_f_one_b):
        whole.zero_grad()
        result = run(schedule, whole[me], x, y, me)
        for parameter, gradient in zip(whole[me].parameters(), expected):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-10)
        dist.gather_object(result, everyone := None if me else [None] * STAGES)
        if me == 0:
            begin, end = everyone[0][0][0][2], everyone[0][0][-1][3]  # stage 0 is the first and the last to work
            print(f"{schedule.__name__}: the microbatches, 0 to 7 forward and a to h backward")
            for stage, (times, most) in enumerate(everyone):
                line = ""
                for kind, i, start, stop in times:
                    line = line.ljust(int(66 * (start - begin) / (end - begin)))
                    line = line.ljust(int(66 * (stop - begin) / (end - begin)), NAMES[kind][i])
                print(f"  stage {stage}  {line:66} keeps {most}")
            busy = sum(stop - start for times, _ in everyone for *_, start, stop in times)
            bubble, formula = 1 - busy / (end - begin) / STAGES, (STAGES - 1) / (MICROBATCHES + STAGES - 1)
            print(f"Notice: the bubble is {bubble:.0%} of the time; (P-1)/(m+P-1) = {formula:.0%}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), STAGES, start_method="fork")
