"""What all measuring callbacks have in common, in one `fit` and in several."""

import csv
import json
from datetime import timedelta

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_parallel import TensorParallelStrategy, tracing
from lightning_parallel.callbacks import (
    Accumulator,
    CommunicationProfiler,
    MeasuringCallback,
    PipelineTimeline,
    ProfileReport,
    StepBreakdown,
    Throughput,
)
from lightning_parallel.callbacks.recording.session import Session
from tests.callbacks.conftest import place_rank
from tests.harness import run
from tests.strategies.models import Net, loader, trainer_for

# ------------------------------------------------------------------------------------------------------ the trainer


def test_it_works_beside_lightnings_own(tmp_path, capsys):
    page = ProfileReport(str(tmp_path / "page"), show_diagnosis=False)
    callbacks = [StepBreakdown(dirpath=str(tmp_path)), ThroughputMonitor(len, window_size=2), page]
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="torch", schedule=None)
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
    assert any(line["train/device/samples_per_sec"] for line in logged)
    assert page.report()["reports"]["StepBreakdown"]["ranks"] == report["ranks"]
    assert (tmp_path / "page" / "report.html").exists()
    assert (tmp_path / "fit-torch.txt").exists()
    assert list(tmp_path.glob("*torch*.pt.trace.json"))
    assert tracing.active() is None
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
    assert tracing.active() is None
    trainer_for(callbacks=[callback]).fit(Net().double(), loader())
    assert callback.report()["steps"] == 7


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"max_steps": 0}, {"limit_train_batches": 2}])
def test_a_run_may_be_too_short_to_tell_anything(tmp_path, options):
    kinds = [StepBreakdown, CommunicationProfiler, PipelineTimeline, Throughput]
    callbacks = [kind(dirpath=str(tmp_path)) for kind in kinds]
    trainer = trainer_for(callbacks=callbacks, **{"max_epochs": 1, **options})
    trainer.fit(Net().double(), loader())
    for callback in callbacks:
        assert callback.report()["steps"] == (1 if "limit_train_batches" in options else 0)
        assert json.loads((tmp_path / f"{type(callback).__name__}.json").read_text()) == callback.report()
    trainer.validate(Net().double(), loader(), verbose=False)


@pytest.mark.parametrize("options", [{"every_n_batches": 0}, {"warmup_batches": -1}])
def test_numbers_of_steps_are_checked(options):
    with pytest.raises(ValueError, match="must be an integer of at least"):
        StepBreakdown(**options)


class Mute(Callback):
    """Rank 1 takes no part in the last exchange, as if it had died."""

    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == 1:
            callback = next(c for c in trainer.callbacks if isinstance(c, StepBreakdown))
            callback.session.failure = "gone"


def a_rank_is_missing():
    _, size = place_rank()
    Session.DEADLINE = timedelta(seconds=2)
    try:
        callback = StepBreakdown(show_table=False)
        trainer_for(TensorParallelStrategy(tensor_parallel_size=size), size, callbacks=[Mute(), callback]).fit(
            Net(hidden=16).double(), loader()
        )
    finally:
        Session.DEADLINE = timedelta(seconds=60)
    return callback.report()


@pytest.mark.sweep(kept=None)
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


def test_a_new_callback_takes_three_methods():
    callbacks = [CountSteps(), StepBreakdown(show_table=False, warmup_batches=3)]
    trainer_for(callbacks=callbacks, max_epochs=2).fit(Net().double(), loader())
    report = callbacks[0].report()
    assert (report["counts"], report["tail"], report["steps"]) == ([5], 8, 5)
    assert callbacks[1].report()["steps"] == 5
