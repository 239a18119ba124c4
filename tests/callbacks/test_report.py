"""The page, the data and the trace that a run leaves behind."""

import json
import os

import pytest

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.callbacks import CommunicationProfiler, PipelineTimeline, ProfileReport, StepBreakdown
from tests.harness import run
from tests.strategies.models import Net, loader, trainer_for


def fit(callbacks, strategy="auto", devices=1, module=None, **options):
    trainer = trainer_for(strategy, devices, callbacks=callbacks, **options)
    trainer.fit(module or Net().double(), loader())
    return trainer


def hybrid(folder):
    group = comm.Group.of()
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE=str(group.size))
    strategy = HybridParallelStrategy(
        tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=4, layers="net"
    )
    callbacks = [ProfileReport(folder, trace_steps=3), StepBreakdown(), CommunicationProfiler(), PipelineTimeline()]
    fit(callbacks, strategy, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    run(hybrid, 4, folder=str(folder))
    return folder


def test_a_run_leaves_page_data_and_trace(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json", "trace.json.gz"]
    report = json.loads((folder / "report.json").read_text())
    assert report["run"]["mesh"] == {"data_parallel": 1, "pipeline_parallel": 2, "tensor_parallel": 2}
