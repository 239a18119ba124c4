"""Slow ranks and what makes them slow: constructed times, then sleeping ranks."""

import os
import random
import time
from contextlib import nullcontext
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.callbacks.stock import waits_unseen
from lightning_parallel.callbacks.straggler import KEPT, StragglerAccumulator, StragglerMonitor
from lightning_parallel.recorder import Window
from tests.harness import run
from tests.strategies.models import Samples, trainer_for
from tests.timing import compares_durations, durations

MS = 1_000_000
BASE = {"data_wait": 2, "forward": 10, "backward": 20, "optimizer": 3, "other": 1}


def report_of(steps_by_rank, mesh=(2, 1, 1), **options):
    """`steps_by_rank`: for each rank a list of milliseconds by phase."""
    accumulators = []
    for rank, steps in enumerate(steps_by_rank):
        outer, tensor = divmod(rank, mesh[2])
        data, stage = divmod(outer, mesh[1])
        coordinate = {"data_parallel": data, "pipeline_parallel": stage, "tensor_parallel": tensor}
        accumulator = StragglerAccumulator({"rank": rank, "coordinate": coordinate}, **options)
        wall = [max(sum(steps[i].values()) for steps in steps_by_rank) for i in range(len(steps))]
        for number, phases in enumerate(steps):
            ns = {phase: int(ms * MS) for phase, ms in phases.items()}
            ns["communication_exposed"] = int(wall[number] * MS) - sum(ns.values())
            accumulator.add(Window(number, 0, sum(ns.values()), ns, []))
        accumulators.append(accumulator)
    return accumulators[0].summarize([accumulator.share() for accumulator in accumulators])


def noisy(draw, count=60, extra=None, scale=1.0):
    """Steps whose phases vary by a third, and now and then by a lot."""
    steps = []
    for _ in range(count):
        phases = {phase: scale * ms * draw.uniform(0.8, 1.3) for phase, ms in BASE.items()}
        if draw.random() < 0.1:
            phases[draw.choice(list(BASE))] += draw.uniform(0, 80)
        for phase, ms in (extra or {}).items():
            phases[phase] += ms
        steps.append(phases)
    return steps


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("phase", ["data_wait", "forward", "backward", "optimizer", "other"])
def test_rank_and_cause(phase, ranks):
    draw = random.Random(3)
    steps = [noisy(draw, extra={phase: 30} if rank == 1 else None) for rank in range(ranks)]
    (straggler,) = report_of(steps, (ranks, 1, 1))["stragglers"]
    assert (straggler["rank"], straggler["cause"]) == (1, phase)
    assert straggler["excess"] == pytest.approx(0.030, abs=0.004)


@pytest.mark.parametrize("seed", range(20))
def test_clean_runs_have_none(seed):
    draw = random.Random(seed)
    report = report_of([noisy(draw) for _ in range(2 + seed % 3)], (2 + seed % 3, 1, 1))
    assert report["stragglers"] == []
    assert all(row["late"] < 0.75 for row in report["ranks"])


def test_a_cause_has_to_cover_the_lateness():
    draw = random.Random(5)
    report = report_of([noisy(draw), noisy(draw, extra={"forward": 15, "backward": 15})])
    (straggler,) = report["stragglers"]
    assert (straggler["rank"], straggler["cause"]) == (1, None)


def test_all_slow_alike_and_a_few_slow_steps_are_no_straggler():
    draw = random.Random(6)
    assert report_of([noisy(draw, extra={"forward": 30}) for _ in range(4)], (4, 1, 1))["stragglers"] == []
    often = noisy(draw, 30, extra={"forward": 30}) + noisy(draw, 30)
    assert report_of([noisy(draw), often])["stragglers"] == []


def test_a_heavy_stage_is_no_straggler_but_its_slow_replica_is():
    draw = random.Random(7)
    stages = [noisy(draw, scale=2.0 if rank % 2 else 1.0) for rank in range(4)]
    assert report_of(stages, (2, 2, 1))["stragglers"] == []
    stages[3] = noisy(draw, scale=2.0, extra={"backward": 30})
    (straggler,) = report_of(stages, (2, 2, 1))["stragglers"]
    assert (straggler["rank"], straggler["cause"]) == (3, "backward")


def test_without_peers_or_with_few_steps_nothing_is_said():
    draw = random.Random(8)
    assert report_of([noisy(draw), noisy(draw, extra={"forward": 90})], (1, 2, 1)).keys() == {"missing"}
    assert report_of([noisy(draw, 19), noisy(draw, 19, extra={"forward": 90})]).keys() == {"missing"}


def test_unseen_phases_are_left_out():
    draw = random.Random(9)
    steps = [noisy(draw), noisy(draw, extra={"forward": 30})]
    report = report_of(steps, unseen=("forward", "backward"))
    assert report["stragglers"] == []
    assert "In forward and backward ranks wait for each other unseen" in report["missing"][0]
    steps[1] = noisy(draw, extra={"data_wait": 30})
    (straggler,) = report_of(steps, unseen=("forward", "backward"))["stragglers"]
    assert straggler["cause"] == "data_wait"


@pytest.mark.parametrize(
    ("kind", "device", "unseen"),
    [
        (FSDPStrategy, "cpu", False),
        (FSDPStrategy, "cuda", True),
        (ModelParallelStrategy, "cpu", True),
        (DDPStrategy, "cuda", False),
    ],
)
def test_where_waits_are_seen(kind, device, unseen):
    assert waits_unseen(Mock(spec=kind, root_device=torch.device(device))) is unseen


def test_long_runs_are_sampled_alike_on_all_ranks():
    shares = [StragglerAccumulator({"rank": rank, "coordinate": {}}) for rank in range(2)]
    for number in range(5 * KEPT):
        for accumulator in shares:
            accumulator.add(Window(number, 0, MS, {"forward": MS}, []))
    first, second = (set(accumulator.share()["steps"]) for accumulator in shares)
    assert first == second
    assert KEPT / 2 < len(first) <= KEPT
    assert max(first) > 4.9 * KEPT


def test_bad_arguments():
    with pytest.raises(ValueError, match="between 0 and 1"):
        StragglerMonitor(threshold=1.5)


# ------------------------------------------------------------------------------------------------------------- sleeping


class VirtualClock:
    """Time that passes in sleeps only, so that the load of the machine does not."""

    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns

    def sleep(self, seconds):
        self.now_ns += int(seconds * 1e9)


class Slow(nn.Module):
    """Takes its time, forward or backward."""

    def __init__(self, sleep, forward_s, backward_s):
        super().__init__()
        self.sleep, self.forward_s, self.backward_s = sleep, forward_s, backward_s

    def forward(self, x):
        self.sleep(self.forward_s)
        if x.requires_grad:
            x.register_hook(lambda grad: self.sleep(self.backward_s))
        return x * 1.0


class Sleeping(LightningModule):
    """Two blocks of 5 ms forward and 10 ms backward; the second is `heavy` times as slow, and `extra` seconds late."""

    def __init__(self, sleep, where=None, extra=0.0, heavy=1.0):
        super().__init__()
        torch.manual_seed(2)
        more = {where: extra}
        slow = [Slow(sleep, 0.005, 0.010), Slow(sleep, 0.005 * heavy, 0.010 * heavy)]
        slow[1].forward_s += more.get("forward", 0.0)
        slow[1].backward_s += more.get("backward", 0.0)
        self.first = nn.Linear(12, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), pause) for pause in slow)
        self.double()

    def training_step(self, batch, index):
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(x, batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Late(Samples):
    def __init__(self, sleep, delay_s, length):
        super().__init__(length=length)
        self.sleep, self.delay_s = sleep, delay_s

    def __getitems__(self, indices):
        self.sleep(self.delay_s)
        return [self[index] for index in indices]


def train(where=None, strategy="ddp", slow_rank=1, extra=0.03, heavy=1.0, threshold=0.1, virtual=True):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(size))
    clock, extra = VirtualClock(), extra if rank == slow_rank else 0.0
    sleep = clock.sleep if virtual else time.sleep
    monitor = StragglerMonitor(threshold, show_table=False)
    data = Late(sleep, extra if where == "data_wait" else 0.0, 24 * size)
    loader = DataLoader(data, batch_size=size // 2)  # 24 steps
    strategy = DDPStrategy() if strategy == "ddp" else HybridParallelStrategy(**strategy)
    module = Sleeping(sleep, where, extra, heavy)
    with patch("lightning_parallel.recorder.recorder.perf_counter_ns", clock) if virtual else nullcontext():
        trainer_for(strategy, size, callbacks=[monitor], max_epochs=1).fit(module, loader)
    return monitor.report()


STAGES = {"data_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2, "balance": [1, 1]}
STRATEGIES = {"ddp": "ddp", "mesh": {"data_parallel_size": 2}}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", [None, "data_wait", "forward", "backward"])
def test_a_sleeping_rank(where, strategy):
    report = run(train, 2, where=where, strategy=STRATEGIES[strategy])[0]
    if where is None:
        assert report["stragglers"] == []
    else:
        assert report["stragglers"] == [{"rank": 1, "cause": where, "excess": pytest.approx(0.03)}]
    assert [row["excess"] for row in report["ranks"]] == pytest.approx([-0.03, 0.03] if where else [0, 0])


@pytest.mark.parametrize("slow_rank", [None, 3])
def test_a_heavy_stage_and_its_slow_replica(slow_rank):
    report = run(train, 4, where="backward", strategy=STAGES, slow_rank=slow_rank, heavy=2.0)[0]
    if slow_rank is None:
        assert report["stragglers"] == []
    else:
        assert report["stragglers"] == [{"rank": 3, "cause": "backward", "excess": pytest.approx(0.06)}]
    assert report["ranks"][1]["own"] == pytest.approx(2 * report["ranks"][0]["own"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@compares_durations
def test_waiting_for_a_slow_rank_is_no_work(strategy):
    report = run(train, 2, where="backward", strategy=STRATEGIES[strategy], extra=0.1, virtual=False)[0]
    with durations():
        assert 0 not in [one["rank"] for one in report["stragglers"]]
        assert report["ranks"][1]["excess"] > 0, "on a real clock"


@compares_durations
def test_a_clean_run_on_a_real_clock():
    report = run(train, 2, threshold=0.5, virtual=False)[0]
    with durations():
        assert report["stragglers"] == []
