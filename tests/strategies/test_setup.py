"""The table that is printed when a model has been cut."""

import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import TensorParallelStrategy
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.pipeline.simulate import Link, simulate
from lightning_parallel.strategies.setup.tables import stage_table
from lightning_parallel.tracing.spans import seconds_text
from tests.harness import run
from tests.pipeline.models import built
from tests.strategies.models import trainer_for

LINK = Link(0.01)


def shown(builder, schedule, balance, **options):
    model, step, batch = built(builder, **options)
    plan = analyze(model, 2, schedule, example=(step, batch), balance=balance, link=LINK)
    console = Console(width=160, file=io.StringIO())
    console.print(stage_table(plan, 4))
    text = console.file.getvalue()
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return plan, [row for row in rows if row and row[0].isdigit()], text


def test_each_stage_has_a_row():
    schedule = build_schedule("interleaved_1f1b", 2, 4)
    plan, rows, _ = shown("llama", schedule, [1, 2, 1, 2], layers=6)
    assert [row[:2] for row in rows] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    assert [row[2] for row in rows] == [
        "model.embed_tokens, model.layers.0",
        "model.layers.1 .. 2",
        "model.layers.3",
        "model.layers.4 .. 5, model.norm, lm_head",
    ]
    assert [int(row[3].replace(",", "")) for row in rows] == [plan.stage_parameters(stage) for stage in range(4)]


def test_measured_stages_have_shares_and_a_prediction():
    plan, rows, text = shown("tied", build_schedule("1f1b", 2, 4), "auto")
    shares = [int(row[4].rstrip("%")) for row in rows]
    assert abs(sum(shares) - 100) <= 1
    assert [row[5].split(" x ")[0] for row in rows] == ["2", "1"], "activations held at once"
    assert [row[2].count("embed") for row in rows] == [1, 1], "the tied parameter is on both"
    timeline = simulate(plan.schedule, plan.stage_costs, LINK)
    assert f"step time {seconds_text(timeline.makespan_s)}, bubble {timeline.bubble_fraction:.0%}" in text


def test_what_was_not_measured_is_not_shown():
    _, rows, text = shown("mlp", build_schedule("1f1b", 2, 4), "parameters")
    assert "%" not in text
    assert all(len(row) == 5 for row in rows)


def test_what_skips_over_a_cut_is_named():
    _, rows, _ = shown("outer", build_schedule("1f1b", 2, 4), "uniform", kind="Skipping")
    assert [row[2] for row in rows] == ["embed, layers.0 .. 1", "layers.2 .. 3; receives the output of `embed`"]


class Mostly(LightningModule):
    """Convolutions, which tensor parallelism does not shard, and a layer that it does; a parameter of its own."""

    def __init__(self, hidden):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        convolutions = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.net = nn.Sequential(*convolutions, nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0] * self.scale), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def told(hidden):
    data = TensorDataset(torch.randn(8, 3, 6, 6), torch.arange(8) % 4)
    console = Console(width=100, file=io.StringIO())
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr("lightning_parallel.strategies.setup.divide.print_table", console.print)
        trainer = trainer_for(TensorParallelStrategy(), 2, max_steps=1)
        trainer.fit(Mostly(hidden), DataLoader(data, 4))
    return console.file.getvalue(), [str(one.message) for one in caught if "parallelism shards" in str(one.message)]


def test_a_model_of_which_little_is_sharded_is_better_off_with_replicas():
    """Its ranks repeat the work, however large it is; where most is sharded, nothing is said."""
    for hidden, is_little in ((8, True), (256, False)):
        (text, warned), (_, other) = run(told, 2, hidden=hidden)
        assert "(root)" in text, "parameters of the module itself"
        assert ("Tensor parallelism shards only" in text) == is_little
        assert ("a single device" in text) == (not is_little)
        assert len(warned) == int(is_little)
        assert other == []
        if is_little:
            assert "every rank repeats the work of the rest" in warned[0]
            assert 'strategy="ddp"' in warned[0]
