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

torch.manual_seed(0)  # the same numbers on all ranks, which are forks of this process
STAGES, MICROBATCHES, SAMPLES, WIDTH = 4, 8, 4, 16  # samples in a microbatch
SECONDS, NAMES = {"F": 0.02, "B": 0.04}, {"F": "01234567", "B": "abcdefgh"}


def gpipe(_):
    return [(kind, i) for kind in "FB" for i in range(MICROBATCHES)]


def one_f_one_b(stage):
    warmup = STAGES - 1 - stage  # forwards until the first gradient comes back
    forwards, backwards = gpipe(stage)[:MICROBATCHES], gpipe(stage)[MICROBATCHES:]
    steady = [action for pair in zip(forwards[warmup:], backwards) for action in pair]  # then a backward for each
    return forwards[:warmup] + steady + backwards[MICROBATCHES - warmup :]


def run(schedule, stage, x, y, me):
    kept, sent, times, last = {}, [], [], me == STAGES - 1
    stage.zero_grad()
    for kind, i in schedule(me):
        source, to = (me - 1, me + 1) if kind == "F" else (me + 1, me - 1)
        if 0 <= source < STAGES:
            dist.recv(received := torch.empty(SAMPLES, WIDTH, dtype=torch.float64), source, tag=i)
        start = time.perf_counter()
        if kind == "F":
            output = stage(inputs := (received if me > 0 else x[i]).requires_grad_())
            kept[i] = inputs, (output - y[i]).square().mean() / MICROBATCHES if last else output
        else:
            inputs, output = kept.pop(i)
            output.backward(None if last else received)
        time.sleep(SECONDS[kind])
        times.append((kind, i, len(kept), start, time.perf_counter()))
        if 0 <= to < STAGES:  # nobody waits here: neighbours that send to each other would wait for ever
            sent.append(dist.isend(output.detach() if kind == "F" else inputs.grad, to, tag=i))
    [work.wait() for work in sent]
    return times


def work(me, store):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=STAGES, timeout=timedelta(seconds=60))
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES))).double()
    x, y = torch.randn(2, MICROBATCHES, SAMPLES, WIDTH, dtype=torch.float64)
    expected = list(torch.autograd.grad((whole(x) - y).square().mean(), whole[me].parameters()))  # one process
    for schedule in (gpipe, one_f_one_b):
        steps = [run(schedule, whole[me], x, y, me) for _ in range(3)]
        dist.gather_object(steps, everyone := [None] * STAGES if me == 0 else None)
        torch.testing.assert_close([p.grad for p in whole[me].parameters()], expected, rtol=0, atol=1e-10)
        if me == 0:
            everyone = min(zip(*everyone), key=lambda step: step[0][-1][4] - step[0][0][3])  # the fastest step
            begin, end = everyone[0][0][3], everyone[0][-1][4]  # stage 0 is the first and the last to work
            print(f"{schedule.__name__}: microbatches, 0 to 7 forward, a to h backward")
            for stage, times in enumerate(everyone):
                line = ""
                for kind, i, _, *moments in times:
                    start, stop = (int(66 * (moment - begin) / (end - begin)) for moment in moments)
                    line = line.ljust(start).ljust(stop, NAMES[kind][i])
                print(f"  stage {stage}  {line:66} keeps {max(kept for _, _, kept, _, _ in times)}")
            bubble = 1 - sum(stop - start for times in everyone for *_, start, stop in times) / (end - begin) / STAGES
            print(f"Notice: bubble {bubble:.0%}, by (P-1)/(m+P-1) {(STAGES - 1) / (MICROBATCHES + STAGES - 1):.0%}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"file://{folder}/store",), STAGES, start_method="fork")
