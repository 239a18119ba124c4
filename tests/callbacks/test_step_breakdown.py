"""Exclusive phases of a step, against runs whose times are made of sleeps."""

import json
import os
import time

import pytest
from torch import nn

from lightning_parallel import TensorParallelStrategy, comm
from lightning_parallel.callbacks import StepBreakdown
from lightning_parallel.callbacks.phases import PHASES
from tests.harness import run
from tests.strategies.models import Net, loader, trainer_for


class Sleepy(nn.Module):
    """Takes a given time forward and backward."""

    def __init__(self, forward_s=0.0, backward_s=0.0):
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x):
        time.sleep(self.forward_s)
        if x.requires_grad:
            x.register_hook(lambda grad: time.sleep(self.backward_s))
        return x * 1.0


def rank_and_size():
    group = comm.Group.of()
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE=str(group.size))
    return group.rank, group.size


def fit(module, callbacks, strategy="auto", devices=1, data=None, **options):
    trainer = trainer_for(strategy, devices, callbacks=callbacks, **options)
    trainer.fit(module, data or loader(), loader() if options.get("limit_val_batches", 0) else None)
    return trainer


def check_sums(report):
    for rank in report["ranks"]:
        assert rank["wall"] == pytest.approx(sum(rank[phase] for phase in PHASES), rel=1e-9)
        assert all(rank[phase] >= 0 for phase in PHASES)


def every_rank_reports():
    rank, size = rank_and_size()
    callback = StepBreakdown(show_table=False, exchange_every=2)
    fit(Net(hidden=16).double(), [callback], TensorParallelStrategy(tensor_parallel_size=size), size)
    return callback.report()


def test_every_rank_has_the_report_of_all():
    reports = run(every_rank_reports, 2)
    assert reports[0] == reports[1]
    report = reports[0]
    assert json.loads(json.dumps(report)) == report
    assert (report["version"], report["steps"], report["world_size"]) == (1, 7, 2)
    assert report["mesh"] == {"data_parallel": 1, "pipeline_parallel": 1, "tensor_parallel": 2}
    assert [rank["coordinate"]["tensor_parallel"] for rank in report["ranks"]] == [0, 1]
    check_sums(report)
    assert all(rank["communication_exposed"] > 0 for rank in report["ranks"])
