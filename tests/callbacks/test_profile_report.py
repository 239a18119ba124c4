"""The page, the data and the trace that a run leaves behind; the same again from the command line."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel import TensorParallelStrategy, callbacks, comm
from lightning_parallel.callbacks import ProfileReport, StepBreakdown
from lightning_parallel.callbacks.report.profile_report import part_path, read_parts, write_part
from lightning_parallel.callbacks.report.trace import read_trace
from lightning_parallel.cli import main
from lightning_parallel.tracing import StepSampler
from tests.callbacks.conftest import TRACED_STEPS, place_rank
from tests.harness import run
from tests.strategies.models import Net, loader, trainer_for

OTHERS = (
    "StepBreakdown CommunicationProfiler PipelineTimeline StragglerMonitor Throughput MemoryProfiler"
    " ReplicaDriftMonitor DataShardingMonitor HangWatchdog"
)
FILES = ["report.html", "report.json", "trace.json.gz"]


def others(**options):
    return [getattr(callbacks, name)(**options) for name in OTHERS.split()]


def read(folder):
    return json.loads((folder / "report.json").read_text())


def test_a_run_leaves_page_data_and_trace(profile):
    assert sorted(path.name for path in profile.iterdir()) == FILES
    report = read(profile)
    facts = report["run"]
    sizes = {"data_parallel": 1, "pipeline_parallel": 2, "context_parallel": 1, "tensor_parallel": 2}
    assert facts["mesh"] == sizes
    assert [facts[key] for key in ("model", "schedule", "num_microbatches", "global_batch")] == ["Net", "1f1b", 4, 8]
    assert sorted(report["reports"]) == ["CommunicationProfiler", "PipelineTimeline", "StepBreakdown", "Throughput"]
    assert [rank["rank"] for rank in report["reports"]["StepBreakdown"]["ranks"]] == [0, 1, 2, 3]
    assert report["trace"] | {"file": ""} == {
        "file": "",
        "ranks": [0, 1, 2, 3],
        "left_out": [],
        "steps": TRACED_STEPS,
        "uncertainty": 0.0,
    }
    assert len(report["series"]["loss"]) == 8
    assert report["diagnosis"]


@pytest.mark.parametrize("comes_first", [True, False])
def test_the_loss_is_that_of_the_steps(tmp_path, comes_first):
    module, callback = Net().double(), ProfileReport(str(tmp_path), show_diagnosis=False)
    callbacks = [callback, StepBreakdown(show_table=False)][:: 1 if comes_first else -1]
    trainer_for(callbacks=callbacks).fit(module, loader())
    points = callback.report()["series"]["loss"]
    assert [step for step, _ in points] == list(range(8))
    assert [value for _, value in points] == pytest.approx([float(loss) for loss in module.losses])


class ByHand(Net):
    """Under manual optimization a step may return what it likes; only in the first and the fifth it is one number."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        return [
            {"loss": loss.expand(1, 1)},
            {"loss": loss.expand(3)},
            {"other": loss},
            None,
            DTensor.from_local(loss, mesh),
            DTensor.from_local(loss, mesh, [Partial()]),  # to read it, ranks would have to communicate
            None,
            None,
        ][len(self.losses) - 1]


def losses_of(folder):
    place_rank()
    callback, module = ProfileReport(folder, show_diagnosis=False), ByHand().double()
    trainer_for(callbacks=[callback]).fit(module, loader())
    return callback.report()["series"]["loss"], [float(loss) for loss in module.losses]


def test_only_a_single_number_that_is_here_is_a_loss(tmp_path):
    (found, losses), *_ = run(losses_of, 1, folder=str(tmp_path))
    assert found == [[0, pytest.approx(losses[0])], [4, pytest.approx(losses[4])]]


def test_what_is_not_finite_is_null_in_the_files_and_said_on_the_page(tmp_path):
    class Exploding(Net):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return loss * float("nan") if len(self.losses) > 4 else loss

    class Undefined(StepBreakdown):
        def accumulate(self, trainer, pl_module):
            accumulator = super().accumulate(trainer, pl_module)
            summarize = accumulator.summarize
            accumulator.summarize = lambda shared: {**summarize(shared), "worst": float("inf")}
            return accumulator

    profile = ProfileReport(str(tmp_path), show_diagnosis=False)
    trainer_for(callbacks=[profile, Undefined(dirpath=str(tmp_path))]).fit(Exploding().double(), loader())
    for name in ("report.json", "Undefined.json"):
        json.loads((tmp_path / name).read_text(), parse_constant=pytest.fail)
    assert [step for step, loss in read(tmp_path)["series"]["loss"] if loss is None] == [4, 5, 6, 7]
    assert (tmp_path / "report.html").read_text().count("not finite from step 4 on") == 3  # diagnosis, chart, its words
    assert main(["report", str(tmp_path)]) == 0


def test_a_long_run_keeps_values_at_equal_distances():
    kept = StepSampler(most=100)
    for step in range(10_000):
        kept.add(step, 2 * step)
    assert 50 < len(kept.values) <= 100
    assert {later - earlier for earlier, later in pairwise(kept.values)} == {128}
    assert all(value == 2 * step for step, value in kept.values.items())


def test_it_works_alone_and_says_what_is_missing(tmp_path, capsys):
    trainer_for(callbacks=[ProfileReport(str(tmp_path))]).fit(Net().double(), loader())
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert read(tmp_path)["reports"] == {}
    assert "StepBreakdown()" in (tmp_path / "report.html").read_text()
    assert str(tmp_path / "report.html") in capsys.readouterr().out


@pytest.mark.parametrize("kinds", [[], [TensorBoardLogger, CSVLogger]], ids=["none", "both"])
def test_it_writes_beside_the_logs(tmp_path, kinds):
    loggers = [kind(tmp_path / kind.__name__, name="run") for kind in kinds]
    callbacks = [StepBreakdown(show_table=False), ProfileReport(show_diagnosis=False)]
    trainer = trainer_for(callbacks=callbacks, logger=loggers or False, default_root_dir=tmp_path, log_every_n_steps=2)
    trainer.fit(Net().double(), loader())
    folder = tmp_path / (f"{kinds[0].__name__}/run/version_0/profile" if kinds else "profile")
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_it_can_be_used_again(tmp_path):
    module, callbacks = Net().double(), [StepBreakdown(show_table=False), ProfileReport(str(tmp_path))]
    trainer = trainer_for(callbacks=callbacks, max_epochs=1)
    trainer.fit(module, loader())
    trainer.validate(module, loader(), verbose=False)
    again = trainer_for(callbacks=callbacks, max_epochs=3)
    again.fit(module, loader())
    assert [read(tmp_path)["reports"]["StepBreakdown"]["steps"], read(tmp_path)["run"]["steps"]] == [11, 11]
    assert len(read(tmp_path)["series"]["loss"]) == 12


class Stream(IterableDataset):
    """Has no length, and ends at once."""

    def __iter__(self):
        return iter(())


def test_a_run_without_a_step_has_a_page(tmp_path):
    trainer = trainer_for(callbacks=[ProfileReport(str(tmp_path)), *others()])
    trainer.fit(Net().double(), DataLoader(Stream()))
    assert [read(tmp_path)["run"]["steps"], trainer.callbacks[0].report()["run"]["steps"]] == [0, 0]
    assert "0 steps" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("nothing", [{"limit_train_batches": 0}, {"max_steps": 0}, {"max_epochs": 0}])
def test_where_nothing_is_trained_the_files_are_left_alone(tmp_path, nothing):
    """As after the resume of a run that is over."""
    (tmp_path / "report.html").write_text("of the run")
    trainer_for(callbacks=[ProfileReport(str(tmp_path)), *others()], **nothing).fit(Net().double(), loader())
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.html", "of the run")]


# ---------------------------------------------------------------------------------------------------------- errors


class Failing(Net):
    """Raises in the sixth step."""

    def training_step(self, batch, index):
        if len(self.losses) == 5:
            raise ValueError("the sixth step failed")
        return super().training_step(batch, index)


def fail(folder):
    _, size = place_rank()
    callbacks = [StepBreakdown(every_n_batches=2, show_table=False), ProfileReport(folder, show_diagnosis=False)]
    trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=2), size, callbacks=callbacks)
    with pytest.raises(ValueError, match="the sixth step failed"):
        trainer.fit(Failing().double(), loader())
    comm.barrier(comm.Group.of())


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """What two ranks left behind that failed."""
    folder = tmp_path_factory.mktemp("failed")
    run(fail, 2, folder=str(folder))
    return folder


@pytest.fixture
def copied(failed, tmp_path):
    return shutil.copytree(failed, tmp_path / "copy")


def test_an_error_leaves_a_page_too(failed):
    assert sorted(path.name for path in failed.iterdir()) == ["part0.json.gz", "part1.json.gz", *FILES]
    report = read(failed)
    assert report["run"]["error"] == "ValueError: the sixth step failed"
    assert report["trace"]["ranks"] == [0, 1]
    assert {event["name"] for event in read_trace(failed / "trace.json.gz")["traceEvents"]} >= {"step 5"}
    assert len(report["reports"]["StepBreakdown"]["ranks"]) == 2


def test_the_error_shown_is_the_first_and_not_its_echo(copied):
    started = read(copied)["run"]["started"]
    (part,) = [part for part in read_parts(copied, 2, started, 0.0) if part["rank"] == 1]
    earlier = {"error": "OSError: no disk", "failed_ns": part["failed_ns"] - 10**9}
    write_part(part_path(copied, 1), {**part, **earlier, "run": started})
    assert main(["report", str(copied)]) == 0
    assert (read(copied)["run"]["error"], read(copied)["run"]["error_rank"]) == ("OSError: no disk", 1)
    assert "ended with an error on rank 1." in (copied / "report.html").read_text()


def test_a_part_that_came_late_is_in_the_trace_made_again(copied):
    late = (copied / "part1.json.gz").rename(copied / "late")
    assert main(["report", str(copied)]) == 0
    assert read(copied)["trace"]["ranks"] == [0]
    late.rename(copied / "part1.json.gz")
    assert main(["report", str(copied)]) == 0
    assert read(copied)["trace"]["ranks"] == [0, 1]
    assert len(read(copied)["series"]["loss"]) == 5


class Removing(Failing):
    """Puts a file where the folder of the profile was, and fails or not."""

    def __init__(self, folder, fails):
        super().__init__()
        self.folder, self.fails = folder, fails

    def training_step(self, batch, index):
        if self.folder.is_dir():
            shutil.rmtree(self.folder)
            self.folder.write_text("")
        return super().training_step(batch, index) if self.fails else Net.training_step(self, batch, index)


def profiled(folder):
    return trainer_for(callbacks=[ProfileReport(str(folder)), *others(dirpath=str(folder))])


def test_what_cannot_be_written_does_not_hide_an_error(tmp_path):
    with (
        pytest.warns(UserWarning, match="the profile could not be written: .*File exists"),
        pytest.raises(ValueError, match="sixth step"),
    ):
        profiled(tmp_path / "there").fit(Removing(tmp_path / "there", fails=True).double(), loader())


def test_what_cannot_be_written_does_not_end_a_fit_with_an_error(tmp_path):
    with pytest.warns(UserWarning, match="could not be written") as warned:
        profiled(tmp_path / "there").fit(Removing(tmp_path / "there", fails=False).double(), loader())
    messages = [str(one.message) for one in warned if "could not be written" in str(one.message)]
    assert len(messages) == len(OTHERS.split()), messages
    assert sum("the profile could not be written" in message for message in messages) == 1


def refuse(folder):
    """Only rank 0 looks at the folder, every rank is told; then the Trainer can be used with another one."""
    (_, size), path = place_rank(), Path(folder)
    path.joinpath("file").write_text("")
    for given in ([ProfileReport(f"{folder}/file/a")], [StepBreakdown(), StepBreakdown(dirpath=f"{folder}/file")]):
        trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=size), size, callbacks=given)
        module = Net(hidden=16).double()
        with pytest.raises((ValueError, RuntimeError), match="folder for profiles must be writable"):
            trainer.fit(module, loader())
        given[-1].dirpath = f"{folder}/good"
        trainer.fit(module, loader())
    comm.barrier(comm.Group.of())
    return sorted(each.name for each in path.joinpath("good").iterdir())


def test_a_folder_that_cannot_be_written_to_is_refused_on_all_ranks(tmp_path):
    assert run(refuse, 2, folder=str(tmp_path)) == [["StepBreakdown.csv", "StepBreakdown.json", *FILES]] * 2


def test_without_traced_steps_there_is_no_trace(tmp_path, capsys):
    (tmp_path / "trace.json.gz").write_text("of another run")
    trainer_for(callbacks=[ProfileReport(str(tmp_path), trace_steps=0)]).fit(Net().double(), loader())
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES[:2]
    assert "trace" not in read(tmp_path)
    assert "trace:" not in capsys.readouterr().out
    assert "perfetto" not in (tmp_path / "report.html").read_text()


def test_the_number_of_traced_steps_must_not_be_negative():
    with pytest.raises(ValueError, match="`trace_steps` must be an integer of at least 0"):
        ProfileReport(trace_steps=-1)
