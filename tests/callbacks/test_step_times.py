"""Phases of a step and slow ranks: against constructed times, and runs whose times are made of sleeps."""

import io
import json
import random
import re
import time
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy, tracing
from lightning_parallel.callbacks import (
    StepBreakdown,
)
from lightning_parallel.callbacks.monitors.step_times import (
    KEPT,
    BreakdownAccumulator,
    StragglerAccumulator,
    StragglerMonitor,
    hidden_ns,
    union_ns,
)
from lightning_parallel.callbacks.recording.session import PHASES
from lightning_parallel.tracing import Span, Window
from tests.callbacks.conftest import place_rank
from tests.harness import run
from tests.strategies.models import Samples, loader, trainer_for
from tests.strategies.test_pipeline import Deep
from tests.timing import Sleep, compares_durations, durations

SLEEPS = {
    "data_wait": 0.02,
    "forward": 0.03,
    "backward": 0.05,
    "optimizer": 0.01,
    "validation": 0.04,
    "checkpoint": 0.03,
}


class SlowSamples(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        time.sleep(SLEEPS["data_wait"] * (index % 4 == 0))
        return torch.ones(3)


def pause(x):
    return Sleep.apply(x, SLEEPS["forward"], SLEEPS["backward"])


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        time.sleep(SLEEPS["optimizer"])
        return loss


class Sleepy(LightningModule):
    """Every phase of a step takes a given time."""

    def __init__(self, manual=False):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.automatic_optimization = not manual

    def training_step(self, batch, index):
        loss = pause(self.layer(batch)).sum()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch, index):
        with tracing.span("0F0", "forward"):  # as a pipeline does
            pause(self.layer(batch))
        time.sleep(SLEEPS["validation"] - SLEEPS["forward"])

    def on_save_checkpoint(self, checkpoint):
        time.sleep(SLEEPS["checkpoint"])

    def configure_optimizers(self):
        return SlowSGD(self.parameters(), lr=0.1)


@pytest.mark.sweep
@pytest.mark.parametrize("manual", [False, True])
@compares_durations
def test_every_phase_has_its_sleeps_and_nothing_else(tmp_path, manual):
    callback = StepBreakdown(show_table=False)
    data = DataLoader(SlowSamples(), batch_size=4)
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = trainer_for(
        callbacks=[callback, checkpoint],
        max_epochs=2,
        enable_checkpointing=True,
        val_check_interval=2,
        limit_val_batches=1,
    )
    trainer.fit(Sleepy(manual), data, DataLoader(torch.ones(4, 3), batch_size=4))
    report = callback.report()
    (rank,) = report["ranks"]
    assert report["steps"] == 7
    often = dict.fromkeys(SLEEPS, 1.0) | {"validation": 4 / 7, "checkpoint": 4 / 7}
    with durations():
        for phase, seconds in SLEEPS.items():
            assert 0.95 * seconds * often[phase] < rank[phase] < 2 * seconds * often[phase] + 0.02, phase
    assert rank["pipeline_wait"] == rank["communication_exposed"] == rank["communication_hidden"] == 0
    check_sums(report)


def check_sums(report):
    for rank in report["ranks"]:
        assert rank["wall"] == pytest.approx(sum(rank[phase] for phase in PHASES), rel=1e-9)
        assert all(rank[phase] >= 0 for phase in PHASES)


def every_rank_reports(strategy):
    _, size = place_rank()
    callback = StepBreakdown(show_table=False, every_n_batches=2)
    kind = {"tensor": TensorParallelStrategy, "pipeline": PipelineParallelStrategy}[strategy]
    chosen = kind(**{f"{strategy}_parallel_size": size})
    trainer_for(chosen, size, callbacks=[callback]).fit(Deep(), loader(), loader())
    return callback.report()


@pytest.mark.sweep
@pytest.mark.parametrize(("strategy", "wait"), [("tensor", "communication_exposed"), ("pipeline", "pipeline_wait")])
def test_every_rank_has_the_report_of_all(strategy, wait):
    report, other = run(every_rank_reports, 2, strategy=strategy)
    assert report == other
    assert json.loads(json.dumps(report)) == report
    assert (report["version"], report["steps"], report["world_size"]) == (1, 7, 2)
    assert report["mesh"][f"{strategy}_parallel"] == 2
    assert [rank["coordinate"][f"{strategy}_parallel"] for rank in report["ranks"]] == [0, 1]
    check_sums(report)
    assert all(rank[wait] > 0 for rank in report["ranks"])
    assert all(rank["validation"] > 0 for rank in report["ranks"])


# --------------------------------------------------------------------------------------------------- the accumulator


def flight(start, end, blocked, complete=None, **facts):
    in_flight = None if complete is None else complete - start
    facts = {"exposed_ns": blocked, **facts}
    return Span("communication", "all_reduce", start, end, 0, blocked_ns=blocked, in_flight=in_flight, **facts)


def test_hidden_communication_is_what_nobody_waited_for():
    assert hidden_ns([flight(0, 100, 20, complete=90)]) == 80
    assert hidden_ns([flight(0, 100, 0, complete=60), flight(40, 110, 20, complete=100)]) == 90
    lane = flight(0, 100, 60, complete=100, exposed_ns=0)
    assert hidden_ns([lane]) == 100  # only the thread that called it was blocked
    assert hidden_ns([lane, Span("wait", "results", 70, 130, 0)]) == 70
    assert hidden_ns([flight(0, 100, 20, complete=90, apart="validation")]) == 0
    assert hidden_ns([flight(0, 100, 0)]) == 0  # over before it was waited for: nobody knows when
    assert hidden_ns([flight(0, 100, 0, complete=90, peer=1), flight(0, 9, 0, 9, axis="pipeline_parallel")]) == 0


def test_unions():
    assert union_ns([]) == 0
    assert union_ns([(5, 9), (0, 3), (2, 4), (3, 3)]) == 8


def test_means_are_per_step_and_unknown_phases_are_other():
    accumulator = BreakdownAccumulator({"rank": 0}, ["DDP hides something."])
    assert accumulator.summarize([accumulator.share()]) == {"ranks": [], "missing": ["DDP hides something."]}
    for step in range(2):
        accumulator.add(Window(step, 0, 10**9, {"forward": 6 * 10**8, "lunch": 4 * 10**8}, []))
    accumulator.end(Window(2, 0, 10**9, {"validation": 10**9}, []))
    (rank,) = accumulator.summarize([accumulator.share()])["ranks"]
    assert (rank["forward"], rank["other"], rank["validation"], rank["wall"]) == (0.6, 0.4, 0.5, 1.5)
    assert rank["communication_exposed"] == 0
    assert accumulator.scalars()["step_breakdown/wall"] == 1.5
    assert accumulator.scalars() == {}


def test_what_all_ranks_of_a_stage_wait_is_told_from_waiting_for_each_other():
    """Two stages of two ranks; in the first, one rank is 20 later in even steps and the other in odd ones."""
    places = [{"rank": r, "coordinate": {"pipeline_parallel": r // 2}} for r in range(4)]
    accumulators = [BreakdownAccumulator(place) for place in places]
    for step in range(1, 1000):
        for rank, waits in enumerate((5 + 20 * (step % 2), 25 - 20 * (step % 2), 7, 9)):
            accumulators[rank].add(Window(step, 0, 100, {"communication_exposed": waits}, []))
    shared = [accumulator.share() for accumulator in accumulators]
    report = accumulators[0].summarize(shared)
    assert report["communication_least"] == pytest.approx([5e-9, 7e-9])
    assert [rank["communication_exposed"] for rank in report["ranks"]][:2] == pytest.approx([15e-9] * 2, rel=0.01)
    assert len(shared[0]["waits"]) <= KEPT
    assert "communication_least" not in accumulators[0].summarize(shared[:1])
    shared[0]["waits"] = {-1: 5}
    assert "communication_least" not in accumulators[0].summarize(shared), "the ranks of a stage share no step"


# ---------------------------------------------------------------------------------------------------------- stragglers


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
        return Sleep.apply(x, self.forward_s, self.backward_s, self.sleep)


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


def train(where, strategy, slow_rank=1, extra=0.03, heavy=1.0, virtual=True):
    rank, size = place_rank()
    clock, extra = VirtualClock(), extra if rank == slow_rank else 0.0
    sleep = clock.sleep if virtual else time.sleep
    monitor = StragglerMonitor(show_table=False)
    data = Late(sleep, extra if where == "data_wait" else 0.0, 24 * size)
    loader = DataLoader(data, batch_size=size // 2)  # 24 steps
    strategy = DDPStrategy() if strategy == "ddp" else HybridParallelStrategy(**strategy)
    module = Sleeping(sleep, where, extra, heavy)
    with patch("lightning_parallel.tracing.recorder.perf_counter_ns", clock) if virtual else nullcontext():
        trainer_for(strategy, size, callbacks=[monitor], max_epochs=1).fit(module, loader)
    return monitor.report()


STAGES = {"data_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2, "balance": [1, 1]}
STRATEGIES = {"ddp": "ddp", "mesh": {"data_parallel_size": 2}}


@pytest.mark.parametrize(
    ("strategy", "where"), [("ddp", "data_wait"), ("ddp", "backward"), ("mesh", "forward"), ("mesh", "backward")]
)
def test_a_sleeping_rank(strategy, where):
    report = run(train, 2, where=where, strategy=STRATEGIES[strategy])[0]
    assert report["stragglers"] == [{"rank": 1, "cause": where, "excess": pytest.approx(0.03)}]
    assert [row["excess"] for row in report["ranks"]] == pytest.approx([-0.03, 0.03])


def test_a_heavy_stage_is_no_straggler_but_its_slow_replica_is_in_training():
    report = run(train, 4, where="backward", strategy=STAGES, slow_rank=3, heavy=2.0)[0]
    assert report["stragglers"] == [{"rank": 3, "cause": "backward", "excess": pytest.approx(0.06)}]
    assert report["ranks"][1]["own"] == pytest.approx(2 * report["ranks"][0]["own"])


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", STRATEGIES)
@compares_durations
def test_waiting_for_a_slow_rank_is_no_work(strategy):
    report = run(train, 2, where="backward", strategy=STRATEGIES[strategy], extra=0.04, virtual=False)[0]
    with durations():
        assert 0 not in [one["rank"] for one in report["stragglers"]]
        assert report["ranks"][1]["excess"] > 0, "on a real clock"


@pytest.mark.parametrize("width", [80, 120])
def test_every_column_of_the_table_can_be_told_from_the_others(width):
    keys = ["wall", *PHASES, "communication_hidden"]
    ranks = [{"rank": rank, **{key: 0.41235 / (at + 1) for at, key in enumerate(keys)}} for rank in range(2)]
    console = Console(width=width, file=io.StringIO())
    console.print(StepBreakdown().table({"ranks": ranks, "steps": 200}))
    text = console.file.getvalue()
    assert "…" not in text
    lines = text.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.strip().startswith("rank"))
    heads = [*zip(*(re.findall(r"(?=(.{7}))", line.ljust(width)) for line in lines[at - 1 : at + 1]))]
    assert len(lines[at].split()) == len(keys) + 1
    ends = [match.end() for match in re.finditer(r"\S+", lines[at])]
    assert len({heads[end - 7] if end >= 7 else heads[0] for end in ends}) == len(keys) + 1
    assert lines[at + 2].split()[1:4] == ["412", "206", "137"]
