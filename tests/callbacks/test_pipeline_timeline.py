"""The bubble and its parts, against stages that sleep and against timelines made by the simulator."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy
from lightning_parallel.callbacks import PipelineTimeline
from lightning_parallel.callbacks.monitors.pipeline_timeline import PipelineAccumulator
from lightning_parallel.callbacks.recording.clocks import ClockOffset
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.pipeline.simulate import Cost, Timeline, simulate
from lightning_parallel.tracing import Span, Window
from tests.callbacks.conftest import place_rank
from tests.harness import run
from tests.strategies.models import trainer_for
from tests.timing import Sleep, compares_durations, durations


class Sleeper(nn.Module):
    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x):
        return Sleep.apply(x * self.weight, self.forward_s, self.backward_s)


class Sleepers(LightningModule):
    """Layers that take the same time; one may take several times as long."""

    def __init__(self, layers, forward_s, slow=None):
        super().__init__()
        factors = [1.0] * layers if slow is None else [2.0 if layer == slow else 1.0 for layer in range(layers)]
        self.layers = nn.Sequential(*(Sleeper(f * forward_s, 2 * f * forward_s) for f in factors))

    def training_step(self, batch, index):
        return self.layers(batch).square().mean()

    def validation_step(self, batch, index):
        self.layers(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def measure(schedule, microbatches, forward_s, virtual_stages=1, slow=None, steps=2, **options):
    _, size = place_rank()
    callback = PipelineTimeline(show_table=False)
    strategy = PipelineParallelStrategy(
        pipeline_parallel_size=size,
        schedule=schedule,
        num_microbatches=microbatches,
        virtual_stages=virtual_stages,
        balance="uniform",
    )
    module = Sleepers(size * virtual_stages, forward_s, slow)
    data = DataLoader(torch.randn(microbatches * (steps + 1), 4), batch_size=microbatches)
    trainer = trainer_for(strategy, size, callbacks=[callback], max_epochs=1, **options)
    trainer.fit(module, data, data if options else None)
    return callback.report()


@pytest.mark.sweep(kept=None)
@compares_durations
def test_the_bubble_of_sleeping_stages():
    expected = 3 / 11  # of an interleaved schedule of four ranks, two stages each, and four microbatches
    report, *others = run(measure, 4, schedule="interleaved_1f1b", microbatches=4, forward_s=0.02, virtual_stages=2)
    bubble = report["bubble"]
    assert all(other == report for other in others)
    assert bubble["ideal"] == pytest.approx(expected, abs=1e-4)
    with durations():
        assert expected - 0.01 < bubble["simulated"] < expected + 0.06
        assert expected - 0.01 < bubble["measured"] < expected + 0.08
    assert [row["stages"] for row in report["ranks"]] == [[rank, rank + 4] for rank in range(4)]
    for row in report["ranks"]:
        assert row["wait"] == pytest.approx(row["wait_before"] + row["wait_between"] + row["wait_after"])
    measured = Timeline.from_dict(report["timeline"]["measured"])
    with durations():
        for stage in report["stages"]:
            assert stage["backward"] == pytest.approx(2 * stage["forward"], rel=0.3)
        assert measured.bubble_fraction == pytest.approx(bubble["measured"], abs=0.05)


@compares_durations
def test_a_slow_stage_shows_as_imbalance():
    truth = simulate(build_schedule("1f1b", 2, 4), [Cost(0.01, 0.02), Cost(0.02, 0.04)]).bubble_fraction
    report, _ = run(measure, 2, schedule="1f1b", microbatches=4, forward_s=0.01, slow=1, num_sanity_val_steps=1)
    bubble = report["bubble"]
    assert bubble["ideal"] == pytest.approx(0.2, abs=1e-4)
    with durations():
        assert bubble["simulated"] == pytest.approx(truth, abs=0.03)
        assert truth - 0.03 < bubble["measured"] < truth + 0.08
    assert report["steps"] == 2
    assert [row["in_flight_peak"] for row in report["ranks"]] == [2, 1]


# --------------------------------------------------------------------------------------------------- the accumulator


def windows(timeline, rank, jitter_ns=0, before=()):
    """One step of one rank, as the recorder would have it."""
    spans = [
        Span("pipeline", str(action), round(start * 1e9), round(end * 1e9) + jitter_ns, 0, action.stage)
        for action, (start, end) in timeline.spans[rank].items()
    ]
    return Window(0, 0, 10**9, {}, [*before, *spans])


def report_of(schedule, costs, before=(), **options):
    mesh = Mesh(pipeline_parallel=schedule.num_ranks)
    ranks = [PipelineAccumulator(rank, mesh, schedule, **options) for rank in range(schedule.num_ranks)]
    timeline = simulate(schedule, costs)
    for rank, accumulator in enumerate(ranks):
        accumulator.add(windows(timeline, rank, before=before))
    return ranks[0].summarize([accumulator.share() for accumulator in ranks]), timeline


@pytest.mark.parametrize(
    ("name", "ranks", "virtual", "microbatches", "expected"),
    [
        ("1f1b", 2, 1, 4, 0.2),
        ("1f1b", 4, 1, 4, 0.4286),
        ("gpipe", 4, 1, 8, 0.2727),
        ("interleaved_1f1b", 4, 2, 8, 0.1579),
        ("zbv", 4, 2, 8, 0.0588),
    ],
)
def test_a_run_that_keeps_to_its_schedule(name, ranks, virtual, microbatches, expected):
    schedule = build_schedule(name, ranks, microbatches, virtual)
    report, timeline = report_of(schedule, Cost(0.02, 0.02, 0.02))
    assert report["bubble"]["measured"] == pytest.approx(timeline.bubble_fraction, abs=1e-6)
    assert report["bubble"]["simulated"] == pytest.approx(report["bubble"]["ideal"], abs=1e-6)
    assert report["bubble"]["ideal"] == pytest.approx(expected, abs=1e-4)
    assert [row["in_flight_peak"] for row in report["ranks"]] == timeline.in_flight_peaks
    assert Timeline.from_dict(report["timeline"]["measured"]).makespan_s == pytest.approx(timeline.makespan_s)


def test_what_validation_ran_before_the_step_is_left_out():
    schedule = build_schedule("1f1b", 2, 4)
    validation = [Span("pipeline", f"{stage}F0", 0, 10**9, 0, stage) for stage in (0, 1)]
    report, timeline = report_of(schedule, Cost(0.02, 0.02), before=validation)
    assert report["bubble"]["measured"] == pytest.approx(timeline.bubble_fraction, abs=1e-6)


def test_a_step_on_fewer_microbatches_is_not_compared_with_the_schedule():
    schedule, short = build_schedule("1f1b", 2, 4), build_schedule("1f1b", 2, 3)
    accumulator = PipelineAccumulator(0, Mesh(pipeline_parallel=2), schedule)
    accumulator.add(windows(simulate(short, Cost(0.02, 0.02)), 0))
    assert "bubble" not in accumulator.summarize([accumulator.share()] * 2)


def test_the_bubble_between_hosts_has_an_uncertainty():
    schedule = build_schedule("1f1b", 2, 4)
    clocks = {0: ClockOffset(0, 0, 0), 1: ClockOffset(0, 5_000_000, 0)}
    report, timeline = report_of(schedule, Cost(0.02, 0.02), clocks=clocks, predicted_s=0.15)
    assert report["bubble"]["measured"] == pytest.approx(timeline.bubble_fraction, abs=1e-6)
    assert report["bubble"]["uncertainty"] == pytest.approx(0.005 / timeline.makespan_s)
    assert report["seconds"]["predicted"] == 0.15
    assert report["seconds"]["measured"] == pytest.approx(report["seconds"]["simulated"]) == timeline.makespan_s


def test_what_cannot_be_known_is_missing():
    schedule = build_schedule("1f1b", 2, 4)
    report, _ = report_of(schedule, Cost(0.02, 0.02), clocks={})
    assert set(report["bubble"]) == {"ideal", "simulated"}
    assert "ranks" not in report
    assert len(report["missing"]) == 1
    alone = PipelineAccumulator(0, Mesh(), None)
    alone.add(Window(0, 0, 1, {}, []))
    assert list(alone.summarize([alone.share()])) == ["missing"]
