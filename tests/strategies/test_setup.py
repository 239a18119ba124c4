"""The table that is printed when a model has been cut."""

import io

from rich.console import Console

from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.pipeline.simulate import Link, simulate
from lightning_parallel.strategies.stage_table import stage_table
from lightning_parallel.tracing.spans import seconds_text
from tests.pipeline.models import built

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
    assert f"{seconds_text(timeline.makespan_s)} a step, bubble {timeline.bubble_fraction:.0%}" in text


def test_what_was_not_measured_is_not_shown():
    _, rows, text = shown("mlp", build_schedule("1f1b", 2, 4), "parameters")
    assert "%" not in text
    assert all(len(row) == 5 for row in rows)


def test_what_skips_over_a_cut_is_named():
    _, rows, _ = shown("outer", build_schedule("1f1b", 2, 4), "uniform", kind="Skipping")
    assert [row[2] for row in rows] == ["embed, layers.0 .. 1", "layers.2 .. 3; gets the output of `embed`"]
