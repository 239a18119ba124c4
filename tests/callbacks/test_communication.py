"""Counts, bytes and times of communication, against closed forms and constructed waits."""

import os

import pytest

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.callbacks import CommunicationProfiler
from lightning_parallel.comm import Group
from tests.harness import run
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_pipeline import Deep


def fit(sizes, replicas=1, microbatches=4, **options):
    group = Group.of()
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE=str(group.size))
    callback = CommunicationProfiler(show_table=False, exchange_every=3, warmup_steps=0)
    strategy = HybridParallelStrategy(num_microbatches=microbatches, **sizes)
    trainer = trainer_for(strategy, group.size, callbacks=[callback], **options)
    replica = group.rank // (group.size // replicas)
    module = Deep()
    trainer.fit(module, loader(replicas, replica))
    return callback.report(), sum(parameter.numel() for parameter in module.parameters())


def bytes_per_step(report, axis, op, dtype="float64"):
    """Over all ranks."""
    records = [r for r in report["records"] if (r["axis"], r["op"], r["dtype"]) == (axis, op, dtype)]
    return report["world_size"] * sum(record["count"] * record["payload_bytes"] for record in records)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bytes_between_replicas_are_those_of_the_parameters(accumulate):
    sizes = {"data_parallel_size": 2}
    results = run(fit, 2, sizes=sizes, replicas=2, accumulate_grad_batches=accumulate)
    report, parameters = results[0]
    assert report["steps"] == 8
    assert bytes_per_step(report, "data_parallel", "all_reduce") == pytest.approx(2 * 8 * parameters / accumulate)
