"""What compression saves, costs and loses: against what was sent, and against what can be computed by hand."""

import contextlib
import csv
import io
import math
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lightning_parallel import (
    Cast,
    CompressedDDPStrategy,
    CompressedFSDPStrategy,
    HybridParallelStrategy,
    Policy,
    PowerSGD,
    TopK,
    comm,
)
from lightning_parallel.callbacks.monitors.compression import CompressionAccumulator, CompressionMonitor
from lightning_parallel.comm import Group
from lightning_parallel.compat import patched
from lightning_parallel.compression import Dense, wire
from tests.harness import distributed, recorded_communication, run
from tests.strategies.models import Net, loader, trainer_for

KEYS = {"dense_bytes", "sent_bytes", "ratio", "encode", "wire", "decode"}
LOSSES = {"relative_error", "cosine"}


def gradients(group, *shapes, step=0):
    generator = torch.Generator().manual_seed(10 * step + group.rank)
    return {f"p{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}


def watched(reducer, group, *shapes, steps=1, **kwargs):
    accumulator = CompressionAccumulator(reducer, **kwargs)
    for step in range(steps):
        assert reducer.reduce_(gradients(group, *shapes, step=step), group)
        accumulator.count_new_steps()
        accumulator.count_new_steps()  # a second call finds nothing new
    return accumulator.summarize(comm.all_gather_object(accumulator.share(), group))


@distributed(world_size=4)
def test_plain_means_lose_nothing_and_save_nothing(group):
    reducer = Dense()
    reducer.sample_every = 1
    report = watched(reducer, group, (8, 8), (3,), steps=2)
    assert report["steps"] == 2
    assert report["ratio"] == 1
    assert report["dense_bytes"] == report["sent_bytes"] == pytest.approx(2 * 3 / 4 * 4 * 67, abs=1)
    assert report["relative_error"] < 1e-6
    assert report["cosine"] == pytest.approx(1)
    assert "residual_norm" not in report, "nothing is kept, so nothing is reported"


@distributed(world_size=4)
def test_ratio_of_low_rank_factors(group):
    report = watched(PowerSGD(2, min_numel=0), group, (40, 24))
    assert report["ratio"] == pytest.approx(40 * 24 / (2 * (40 + 24)))


@distributed(world_size=4)
def test_sent_bytes_are_those_counted_at_the_wire(group):
    reducer = TopK(0.1, min_numel=0)
    reducer.reduce_(gradients(group, (40, 24)), group)
    with recorded_communication() as records:
        report = watched(reducer, group, (40, 24))
    moved = sum(record.bytes * 3 // 4 for record in records if record.op == "all_gather")
    assert report["sent_bytes"] == moved


@distributed(world_size=2)
def test_losses_of_each_compressor(group):
    reducer = Policy({"p0": TopK(0.1, min_numel=0), "p1": Cast("bf16", min_numel=0), "*": None})
    reducer.sample_every = 1
    before = gradients(group, (16, 16), (16, 16), (4, 4))
    true = {name: comm.all_reduce(value, group) / 2 for name, value in before.items()}
    accumulator = CompressionAccumulator(reducer)
    reducer.reduce_(before, group)
    accumulator.count_new_steps()
    report = accumulator.summarize([accumulator.share()])
    rows = {row["compressor"]: row for row in report["compressors"]}
    for label, name in (("TopK(ratio=0.1, min_numel=0)", "p0"), ("Cast('bf16', min_numel=0)", "p1")):
        error = (before[name] - true[name]).norm() / true[name].norm()
        assert rows[label]["relative_error"] == pytest.approx(error.item(), rel=1e-5)
        assert rows[label]["cosine"] == pytest.approx(
            torch.cosine_similarity(before[name].flatten(), true[name].flatten(), 0).item()
        )
        assert rows[label]["parameters"] == 1
    assert rows["Cast('bf16', min_numel=0)"]["ratio"] == 2
    assert rows["Dense()"]["relative_error"] < 1e-6
    kept = rows["TopK(ratio=0.1, min_numel=0)"]["residual_norm"]
    assert report["residual_norm"] == kept == pytest.approx(reducer.residual_norm)
    assert "residual_norm" not in rows["Cast('bf16', min_numel=0)"]
    assert report["sent_bytes"] == sum(row["sent_bytes"] for row in rows.values())


@distributed(world_size=2)
def test_comparison_every_so_many_steps(group):
    reducer = TopK(0.1, min_numel=0)
    accumulator, compared = CompressionAccumulator(reducer, warmup_steps=1), []
    for batch in range(8):
        accumulator.request_comparison(every_n_steps=3)
        with recorded_communication() as records:
            for step in range(0 if batch == 2 else 2 if batch == 4 else 1):  # none where gradients are accumulated
                reducer.reduce_(gradients(group, (16, 16), step=step), group)
        accumulator.count_new_steps()
        compared.append(sum(record.op == "all_reduce" and record.bytes == 16 * 16 * 4 for record in records))
    assert compared == [0, 1, 0, 0, 0, 1, 0, 0], "the first step counted; the next batch that is three later"
    accumulator.close()
    reducer.reduce_(gradients(group, (16, 16)), group)
    accumulator.count_new_steps()
    assert accumulator.share()["steps"] == 7, "after `close` nothing is seen"


@distributed(world_size=2)
def test_all_steps_between_two_calls_are_counted(group):
    reducer = Policy({"d.*": TopK(0.1, min_numel=0), "g.*": PowerSGD(1, min_numel=0)})
    reducer.sample_every = 1
    accumulator = CompressionAccumulator(reducer)
    for name, shape in (("d.weight", (16, 16)), ("g.weight", (8, 8)), ("g.weight", (8, 8))):
        reducer.reduce_({name: torch.ones(shape)}, group)
    accumulator.count_new_steps()
    report = accumulator.summarize([accumulator.share()])
    rows = {row["compressor"]: row for row in report["compressors"]}
    assert report["steps"] == 3
    assert report["dense_bytes"] == 4 * (256 + 64 + 64) / 3
    assert rows["TopK(ratio=0.1, min_numel=0)"]["dense_bytes"] == 4 * 256 / 3
    assert rows["PowerSGD(rank=1, min_numel=0)"]["relative_error"] < 1e-6 < report["relative_error"]
    assert accumulator.scalars()["compression/dense_bytes"] == report["dense_bytes"]


@distributed(world_size=2)
def test_launches_on_a_device_are_not_shown_as_its_time(group):
    with patched(wire, "launches_kernels", lambda tensor: True):
        report = watched(PowerSGD(1, min_numel=1), group, (8, 8), steps=2)
    assert report["steps"] == 2
    assert report["ratio"] > 1
    assert not {"encode", "wire", "decode"} & report.keys()
    assert CompressionMonitor().table(report).row_count


@distributed(world_size=2)
def test_steps_to_warm_up_and_steps_that_do_not_count(group):
    reducer = PowerSGD(1, min_numel=0)
    accumulator = CompressionAccumulator(reducer, warmup_steps=1)
    for step, value in enumerate([1.0, math.inf, 1.0, 1.0]):
        reducer.reduce_({"p": torch.full((8, 8), value) + step}, group)
        accumulator.count_new_steps()
    assert accumulator.share()["steps"] == 2, "of four, one warms up and one was not finite"


def test_one_replica_sends_nothing():
    report = watched(PowerSGD(1, min_numel=0), Group.alone("data_parallel"), (8, 8))
    assert report["dense_bytes"] == report["sent_bytes"] == 0
    assert "ratio" not in report


# ---------------------------------------------------------------------------------------------- through the Trainer


class Wide(Net):
    """Layers that all layouts can divide."""

    def __init__(self):
        super().__init__(hidden=16)
        self.net = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))


PLAN = {"net.0": "column", "net.2": "row"}
STRATEGIES = {
    "ddp": (2, lambda compression: CompressedDDPStrategy(compression)),
    "fsdp": (2, lambda compression: CompressedFSDPStrategy(compression)),
    "hybrid": (
        4,
        lambda compression: HybridParallelStrategy(
            tensor_parallel_size=2, data_parallel_size=2, tensor_plan=PLAN, compression=compression
        ),
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_layout_of_replicas_has_the_whole_report(name):
    run(check, STRATEGIES[name][0], name=name)


def check(name, group):
    monitor = CompressionMonitor(every_n_steps=2, show_table=False)
    ranks, make = STRATEGIES[name]
    batches = 2 if name == "ddp" else 1
    strategy = make(PowerSGD(1, min_numel=16))
    trainer = trainer_for(strategy, ranks, callbacks=[monitor], accumulate_grad_batches=batches)
    trainer.fit(Wide().double(), loader(2, group.rank * 2 // ranks))
    report = monitor.report()
    assert report["steps"] == 8 // batches - 1, "of eight batches, without the step that warms up"
    assert KEYS | LOSSES | {"residual_norm", "version", "world_size", "mesh"} <= report.keys()
    assert report["ratio"] > 1.5
    assert report["residual_norm"] > 0
    assert 0 < report["relative_error"] < 3
    assert 0.1 < report["cosine"] <= 1
    assert min(report["encode"], report["wire"], report["decode"]) > 0
    assert {row["compressor"] for row in report["compressors"]} == {"PowerSGD(rank=1, min_numel=16)", "Dense()"}
    assert [report] * group.size == comm.all_gather_object(report, group)


@distributed(world_size=2)
def test_ranks_that_would_compare_in_different_steps_are_refused(group):
    monitor = CompressionMonitor(every_n_steps=2 + group.rank)
    trainer = trainer_for(CompressedDDPStrategy(TopK(0.1)), 2, callbacks=[monitor])
    with pytest.raises(ValueError, match="every_n_steps"):
        trainer.fit(Net().double(), loader(2, group.rank))


@distributed(world_size=2)
def test_table_and_logger(group):
    folder = comm.all_gather_object(tempfile.mkdtemp(), group)[0]
    monitor = CompressionMonitor(every_n_steps=4, warmup_steps=0, dirpath=folder)
    trainer = trainer_for(
        CompressedDDPStrategy(PowerSGD(1, min_numel=16)),
        group.size,
        callbacks=[monitor],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
    )
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        trainer.fit(Net().double(), loader(group.size, group.rank))
    assert ("PowerSGD(rank=1, min_numel=16)" in shown.getvalue()) == (group.rank == 0)
    if group.rank == 0:
        written = Path(folder).glob("CompressionMonitor.*")
        assert sorted(path.suffix for path in written) == [".csv", ".json"]
        logged = list(csv.DictReader((Path(trainer.logger.log_dir) / "metrics.csv").open()))
        assert sum(row["compression/ratio"] != "" for row in logged) == 8
        assert sum(row["compression/cosine"] != "" for row in logged) == 2


def test_strategy_without_compression_is_refused():
    trainer = trainer_for(SingleDeviceStrategy("cpu"), callbacks=[CompressionMonitor()])
    with pytest.raises(ValueError, match="needs a strategy with `compression`"):
        trainer.fit(Net().double(), loader())


def test_steps_must_be_plausible():
    with pytest.raises(ValueError, match="every_n_steps"):
        CompressionMonitor(every_n_steps=-1)
