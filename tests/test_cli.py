"""The command line: what it prints, what it writes, and what it says to mistakes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_parallel import cli
from lightning_parallel.cli import main
from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, build_schedule
from lightning_parallel.pipeline.simulate import Cost, Link
from lightning_parallel.pipeline.simulate import simulate as played
from lightning_parallel.tracing.spans import seconds_text
from tests.harness import run_script


def simulate(capsys, *words):
    assert main(["simulate", "--width", "120", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    try:
        status = main(["simulate", *map(str, words)])
    except SystemExit as end:  # argparse's
        status = end.code
    assert status == 2
    return capsys.readouterr().err


def test_the_default_is_1f1b_of_four_ranks(capsys):
    out = simulate(capsys)
    assert out.splitlines()[3].startswith("rank 3  ·········F0=B0----F1=B1----")
    assert "step 33 ms, bubble 27.27%" in out


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_played(capsys, name):
    out = simulate(capsys, "--schedule", name, "--costs", "1,1,1")
    assert out.count("rank ") >= 4


def test_several_schedules_are_drawn_one_above_the_other(capsys, tmp_path):
    out = simulate(capsys, "--schedule", "1f1b", "zbv", "--costs", "1,1,1", "--output", tmp_path / "a.svg")
    assert out.index("1f1b") < out.index("step 33 ms") < out.index("zbv, 2 stages a rank") < out.index("step 25.5 ms")
    picture = (tmp_path / "a.svg").read_text()
    assert picture.index(">1f1b<") < picture.index(">zbv, 2 stages a rank<")
    shown = refused(capsys, "--schedule", "1f1b", "zbv", "--save", tmp_path / "a.txt")
    assert "`--save` takes one schedule; got 2" in shown


def write_report(folder, pipeline):
    report = {"version": 1, "run": {}, "reports": {"PipelineTimeline": pipeline}}
    (folder / "report.json").write_text(json.dumps(report))


def test_a_run_is_drawn_as_planned_and_as_it_happened(capsys, tmp_path):
    planned = played(build_schedule("1f1b", 2, 2), Cost(1e-3, 2e-3))
    measured = played(build_schedule("1f1b", 2, 2), Cost(1e-3, 2e-3), Link(1e-3))
    step = {"step": 7, "planned": planned.to_dict(), "measured": measured.to_dict()}
    write_report(tmp_path, {"timeline": step})
    assert main(["timeline", str(tmp_path), "--width", "100", "--output", str(tmp_path / "a.svg")]) == 0
    out = capsys.readouterr().out
    took = f"step {seconds_text(measured.makespan_s)}"
    assert out.index("as planned") < out.index("step 9 ms") < out.index("in step 7") < out.index(took)
    assert "as it happened in step 7" in (tmp_path / "a.svg").read_text()


def test_a_run_without_a_pipeline_has_no_timeline(capsys, tmp_path):
    write_report(tmp_path, {"missing": ["..."]})
    assert main(["timeline", str(tmp_path)]) == 2
    assert "The run must have a pipeline" in capsys.readouterr().err


def test_latency_shows(capsys):
    assert "step 33 ms" not in simulate(capsys, "--latency", "500us")


def test_pictures_and_the_schedule_are_written(capsys, tmp_path):
    out = simulate(capsys, "--output", tmp_path / "a.svg", "--save", tmp_path / "a.txt")
    assert f"wrote {tmp_path / 'a.svg'}" in out.replace("\n", "")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert Schedule.from_text((tmp_path / "a.txt").read_text()) == build_schedule("1f1b", 4, 8)


def test_a_schedule_from_a_file(capsys, tmp_path):
    simulate(capsys, "--schedule", "zbv", "--save", tmp_path / "a.txt")
    assert "zbv, 2 stages" in simulate(capsys, "--schedule", tmp_path / "a.txt", "1f1b", "--costs", "1,1,1")


def test_a_broken_schedule_is_explained(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n")
    assert "rank 0 waits at 0B0 for 1B0 of rank 1" in refused(capsys, "--schedule", tmp_path / "a.txt")


def test_costs_per_stage(capsys, tmp_path):
    out = simulate(capsys, "--ranks", 2, "--microbatches", 2, "--costs", "1,2;2,4")
    assert "step 15 ms" in out
    costs = [{"forward_s": 1e-3, "input_gradient_s": 2e-3}, {"forward_s": 2e-3, "input_gradient_s": 4e-3}]
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    assert "step 15 ms" in simulate(capsys, "--ranks", 2, "--microbatches", 2, "--costs", tmp_path / "costs.json")


def test_auto_compares_and_chooses(capsys):
    out = simulate(capsys, "--schedule", "auto", "--costs", "1,1,1")
    assert "chosen" in out
    assert "interleaved_zb" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--schedule", "2f2b"), "`schedule` must be one of gpipe, 1f1b"),
        (("--costs", "1,x"), "`F,B` or `F,I,W` in milliseconds; got `1,x`"),
        (("--costs", "1,2;1,2"), "1 group for all ranks, or 4, one per stage; got 2"),
        (("--ranks", 0), "num_ranks=0"),
        (("--output", "a.jpg"), "got `a.jpg`"),
        (("--costs", "nowhere.json"), "nowhere.json"),
        (("--costs", "nan,1"), "Costs must be finite and at least 0; got forward_s=nan"),
        (("--costs", "1,inf"), "Costs must be finite and at least 0"),
        (("--latency", "nan"), "The time must have a unit, such as 10us"),
    ],
)
def test_mistakes_are_explained_in_one_line(capsys, words, message):
    assert message in refused(capsys, *words)


@pytest.mark.parametrize("text", ['{"forward_s": 1}', '[{"forward": 1}]', '["a"]', '[{"forward_s": "a"}]', "[", "1"])
def test_a_file_that_holds_no_costs_is_named(capsys, tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    assert f"a list of objects, one per stage; got {tmp_path}" in refused(capsys, "--costs", tmp_path / "costs.json")


@pytest.mark.parametrize("width", ["0", "-5", "x"])
def test_a_picture_needs_columns(capsys, width):
    with pytest.raises(SystemExit):
        main(["simulate", f"--width={width}"])
    assert "must be at least 20; got" in capsys.readouterr().err


def test_it_runs_as_a_module():
    run = run_script(Path(cli.__file__).parents[1] / "__main__.py", "simulate", "--ranks", "2", "--microbatches", "2")
    assert run.returncode == 0, run.stderr
    assert "bubble 33.33%" in run.stdout


WITHOUT_TORCH = """
import sys, types

package = types.ModuleType("lightning_parallel")  # without what its own __init__ imports
package.__path__ = [sys.argv[1]]
sys.modules["lightning_parallel"] = package
from lightning_parallel.cli import main

assert main(["simulate", "--schedule", "1f1b", "auto", "--output", sys.argv[2]]) == 0
print([name for name in ("torch", "lightning", "jinja2") if name in sys.modules])
"""


def test_drawing_a_schedule_needs_no_torch(tmp_path):
    words = [sys.executable, "-c", WITHOUT_TORCH, str(Path(cli.__file__).parents[1]), str(tmp_path / "a.svg")]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["[]"], run.stderr


def test_a_layout_is_inspected_without_processes(capsys):
    words = ["inspect", "--model", "tests.planner.test_planner:Model", "--batch", "8x6:int64", "--width", "120"]
    assert main([*words, "--tensor", "2", "--pipeline", "2", "--microbatches", "4"]) == 0
    out = capsys.readouterr().out
    assert "Model over 2 tensor-parallel ranks" in out
    assert "Model in 2 pipeline stages: 1f1b, 4 microbatches" in out
    assert main(words) == 0
    assert "Each rank holds the full model" in capsys.readouterr().out
    for wrong, message in (
        (
            ["--pipeline", "2", "--microbatches", "9"],
            "`--microbatches` must be at most the samples of a batch, 8; got 9",
        ),
        (["--pipeline", "64"], "64"),
        (["--script", "main.py"], "`--model` must be given without `--script`"),
    ):
        assert main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_an_inspected_script_gives_its_own_layout(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "from lightning.pytorch import Trainer\n"
        "from lightning_parallel import TensorParallelStrategy\n"
        "from tests.planner.test_planner import Model, tokens\n"
        "Trainer(devices=2, strategy=TensorParallelStrategy()).fit(Model(), [tokens()])\n"
    )
    assert main(["inspect", "--script", str(script), "--width", "120"]) == 0
    assert "Model over 2 tensor-parallel ranks" in capsys.readouterr().out
    assert main(["inspect", "--script", str(script), "--width", "120", "--data", "2"]) == 0
    assert "Each rank holds the full model" in capsys.readouterr().out


def test_help_and_mistakes_load_no_torch():
    code = (
        "import sys; from lightning_parallel_cli import main\n"
        "try: main(['plan', '--rows', 'x'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
