"""Exclusive phases of a step, against runs whose times are made of sleeps."""

import csv
import json
import os
import time
from datetime import timedelta

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_parallel import PipelineParallelStrategy, TensorParallelStrategy, comm
from lightning_parallel import recorder as recording
from lightning_parallel.callbacks import (
    Accumulator,
    CommunicationProfiler,
    MeasuringCallback,
    PipelineTimeline,
    StepBreakdown,
    Throughput,
)
from lightning_parallel.callbacks.phases import PHASES, phase_of
from lightning_parallel.callbacks.session import Session
from lightning_parallel.callbacks.step_breakdown import KEPT, BreakdownAccumulator, hidden_ns, union_ns
from lightning_parallel.recorder import Span, Window
from tests.harness import run
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_pipeline import Deep
from tests.timing import compares_durations, durations

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


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(SLEEPS["forward"])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SLEEPS["backward"])
        return gradient


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
        loss = Pause.apply(self.layer(batch)).sum()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch, index):
        with recording.span("0F0", "forward"):  # as a pipeline does
            Pause.apply(self.layer(batch))
        time.sleep(SLEEPS["validation"] - SLEEPS["forward"])

    def on_save_checkpoint(self, checkpoint):
        time.sleep(SLEEPS["checkpoint"])

    def configure_optimizers(self):
        return SlowSGD(self.parameters(), lr=0.1)


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


def rank_and_size():
    group = comm.Group.of()
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE=str(group.size))
    return group.rank, group.size


def every_rank_reports(strategy, module):
    _, size = rank_and_size()
    callback = StepBreakdown(show_table=False, exchange_every=2)
    strategies = {"tensor": lambda: TensorParallelStrategy(size), "pipeline": lambda: PipelineParallelStrategy(size)}
    modules = {"net": lambda: Net(hidden=16).double(), "deep": Deep}
    trainer_for(strategies[strategy](), size, callbacks=[callback]).fit(modules[module](), loader(), loader())
    return callback.report()


@pytest.mark.parametrize(
    ("strategy", "module", "wait"), [("tensor", "net", "communication_exposed"), ("pipeline", "deep", "pipeline_wait")]
)
def test_every_rank_has_the_report_of_all(strategy, module, wait):
    report, other = run(every_rank_reports, 2, strategy=strategy, module=module)
    assert report == other
    assert json.loads(json.dumps(report)) == report
    assert (report["version"], report["steps"], report["world_size"]) == (1, 7, 2)
    assert report["mesh"][f"{strategy}_parallel"] == 2
    assert [rank["coordinate"][f"{strategy}_parallel"] for rank in report["ranks"]] == [0, 1]
    check_sums(report)
    assert all(rank[wait] > 0 for rank in report["ranks"])
    assert all(rank["validation"] > 0 for rank in report["ranks"])


# ------------------------------------------------------------------------------------------------------ the trainer


def test_it_works_beside_lightnings_own(tmp_path, capsys):
    callbacks = [StepBreakdown(dirpath=str(tmp_path)), ThroughputMonitor(len, window_size=2)]
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="torch", schedule=None, export_to_chrome=False)
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")]
    trainer = trainer_for(callbacks=callbacks, logger=loggers, profiler=profiler, log_every_n_steps=2)
    trainer.fit(Net().double(), loader())
    assert "Where a step goes" in capsys.readouterr().out
    report = callbacks[0].report()
    assert json.loads((tmp_path / "StepBreakdown.json").read_text()) == report
    (row,) = csv.DictReader((tmp_path / "StepBreakdown.csv").open())
    assert float(row["backward"]) == report["ranks"][0]["backward"]
    assert row["coordinate.tensor_parallel"] == "0"
    logged = list(csv.DictReader(next(tmp_path.rglob("metrics.csv")).open()))
    values = [float(line["step_breakdown/forward"]) for line in logged if line["step_breakdown/forward"]]
    assert len(values) == 4
    assert all(value > 0 for value in values)
    assert (tmp_path / "fit-torch.txt").exists()
    assert recording.active() is None
    assert "start" not in vars(profiler)


def test_one_callback_measures_one_fit_after_another():
    callback = StepBreakdown(show_table=False)
    with pytest.raises(RuntimeError, match="there was none yet"):
        callback.report()
    for epochs in (1, 2):
        trainer_for(callbacks=[callback], max_epochs=epochs).fit(Net().double(), loader())
        assert callback.report()["steps"] == 4 * epochs - 1


class Failing(Net):
    def training_step(self, batch, index):
        if index == 2:
            raise OSError("no disk")
        return super().training_step(batch, index)


def test_an_error_in_training_ends_the_recording():
    callback = StepBreakdown(show_table=False)
    trainer = trainer_for(callbacks=[callback])
    with pytest.raises(OSError, match="no disk"):
        trainer.fit(Failing().double(), loader())
    assert recording.active() is None
    trainer_for(callbacks=[callback]).fit(Net().double(), loader())
    assert callback.report()["steps"] == 7


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"max_steps": 0}, {"limit_train_batches": 2}])
@pytest.mark.parametrize("kind", [StepBreakdown, CommunicationProfiler, PipelineTimeline, Throughput])
def test_a_run_may_be_too_short_to_tell_anything(tmp_path, kind, options):
    callback = kind(dirpath=str(tmp_path))
    trainer = trainer_for(callbacks=[callback], **{"max_epochs": 1, **options})
    trainer.fit(Net().double(), loader())
    assert callback.report()["steps"] == (1 if "limit_train_batches" in options else 0)
    assert json.loads((tmp_path / f"{kind.__name__}.json").read_text()) == callback.report()
    trainer.validate(Net().double(), loader(), verbose=False)


@pytest.mark.parametrize("options", [{"exchange_every": 0}, {"warmup_steps": -1}])
def test_numbers_of_steps_are_checked(options):
    with pytest.raises(ValueError, match="expected exchange_every >= 1 and warmup_steps >= 0"):
        StepBreakdown(**options)


class Mute(Callback):
    """Rank 1 takes no part in the last exchange, as if it had died."""

    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == 1:
            callback = next(c for c in trainer.callbacks if isinstance(c, StepBreakdown))
            callback.session.failure = "gone"


def a_rank_is_missing():
    _, size = rank_and_size()
    Session.DEADLINE = timedelta(seconds=2)
    try:
        callback = StepBreakdown(show_table=False)
        trainer_for(TensorParallelStrategy(size), size, callbacks=[Mute(), callback]).fit(
            Net(hidden=16).double(), loader()
        )
    finally:
        Session.DEADLINE = timedelta(seconds=60)
    return callback.report()


def test_a_rank_that_does_not_answer_makes_the_report_incomplete_and_no_hang():
    report, _ = run(a_rank_is_missing, 2)
    assert [rank["rank"] for rank in report["ranks"]] == [0]
    assert "profiling" in report["incomplete"]


class Steps(Accumulator):
    def __init__(self):
        self.count, self.tail = 0, None

    def add(self, window):
        self.count += 1

    def end(self, window):
        self.tail = window.step

    def share(self):
        return self.count

    def summarize(self, shared):
        return {"counts": list(shared), "tail": self.tail}

    def scalars(self):
        return {"steps/count": float(self.count)}


class CountSteps(MeasuringCallback):
    def accumulate(self, trainer, pl_module):
        return Steps()


def test_a_callback_of_ones_own_takes_three_methods():
    callbacks = [CountSteps(), StepBreakdown(show_table=False, warmup_steps=3)]
    trainer_for(callbacks=callbacks, max_epochs=2).fit(Net().double(), loader())
    report = callbacks[0].report()
    assert (report["counts"], report["tail"], report["steps"]) == ([5], 8, 5)
    assert callbacks[1].report()["steps"] == 5


# --------------------------------------------------------------------------------------------------- the accumulator


def flight(start, end, blocked, complete=None, **facts):
    in_flight = None if complete is None else complete - start
    return Span("communication", "all_reduce", start, end, 0, blocked_ns=blocked, in_flight=in_flight, **facts)


def test_hidden_communication_is_what_nobody_waited_for():
    assert hidden_ns([flight(0, 100, 20, complete=90)]) == 70
    assert hidden_ns([flight(0, 100, 0, complete=60), flight(40, 110, 10, complete=100)]) == 90
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


@pytest.mark.parametrize(
    ("action", "phase"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", "data_wait"),
        ("[Strategy]DDPStrategy.training_step", "forward"),
        ("[LightningModule]Net.optimizer_step", "optimizer"),
        ("save_checkpoint", "checkpoint"),
        ("[Callback]Mine.backward", None),
        ("[Strategy]DDPStrategy.validation_step", None),
    ],
)
def test_phases_of_lightnings_actions(action, phase):
    assert phase_of(action) == phase
