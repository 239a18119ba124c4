"""One profiled run of four processes, tensor x pipeline, that several tests look at."""

import os

import pytest

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.callbacks import (
    CommunicationProfiler,
    PipelineTimeline,
    ProfileReport,
    StepBreakdown,
    Throughput,
)
from tests.harness import run
from tests.strategies.models import Net, loader, trainer_for

TRACED_STEPS = 3


def place_rank():
    """Tell Lightning which process of the harness this is, as a launcher would; returns its rank and how many are."""
    group = comm.Group.of()
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE=str(group.size))
    return group.rank, group.size


def train(folder):
    place_rank()
    strategy = HybridParallelStrategy(
        tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=4, layers="net"
    )
    callbacks = [
        ProfileReport(folder, trace_steps=TRACED_STEPS),
        StepBreakdown(show_table=False),
        CommunicationProfiler(show_table=False),
        PipelineTimeline(show_table=False),
        Throughput(show_table=False, peak_flops=1e12),
    ]
    trainer_for(strategy, 4, callbacks=callbacks).fit(Net().double(), loader())


@pytest.fixture(scope="session")
def profile(tmp_path_factory):
    """The folder that the run left behind."""
    folder = tmp_path_factory.mktemp("profile")
    run(train, 4, folder=str(folder))
    return folder
