"""`lightning-parallel report`: the page of a run once more, the comparison of two runs, files that are damaged."""

import gzip
import json
import os
import shutil

import pytest

from lightning_parallel.callbacks.monitors.hang import write_text
from lightning_parallel.callbacks.report.comparison import Change, changes
from lightning_parallel.callbacks.report.profile_report import part_path, write_part
from lightning_parallel.callbacks.report.trace import read_trace, write_trace
from lightning_parallel.cli import main
from lightning_parallel.tracing.spans import percent
from tests.callbacks.sample import sample_report


def test_the_page_is_made_again(profile, tmp_path, capsys):
    folder = tmp_path / "run" / "profile"
    shutil.copytree(profile, folder)
    (folder / "report.html").unlink()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text() == (profile / "report.html").read_text()


def test_profiles_of_torch_are_added_to_the_trace(profile, tmp_path, capsys):
    shutil.copytree(profile, tmp_path / "run")
    events = [{"ph": "X", "name": "kernel", "pid": 7, "tid": 7, "ts": 5.0, "dur": 1.0}]
    kineto = {"traceEvents": events, "distributedInfo": {"rank": 2}, "baseTimeNanoseconds": 0}
    (tmp_path / "rank2.json").write_text(json.dumps(kineto))
    assert main(["report", str(tmp_path / "run"), "--kineto", str(tmp_path / "rank2.json")]) == 0
    (added,) = [e for e in read_trace(tmp_path / "run" / "trace.json.gz")["traceEvents"] if e["name"] == "kernel"]
    assert added["pid"] == 2


def test_two_runs_are_compared(tmp_path, capsys):
    first, second = sample_report(), sample_report()
    for rank in second["reports"]["StepBreakdown"]["ranks"]:
        rank["wall"] -= rank["pipeline_wait"] / 2
        rank["pipeline_wait"] /= 2
    for name, report in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps({**report, "diagnosis": []}))
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == str(tmp_path / "b" / "comparison.html")
    assert "waiting for other stages: 7.5 ms less (50 %)" in out
    verdicts = {change.name: change.kind for change in changes(first, second)}
    assert verdicts["step"] == verdicts["waiting for other stages"] == "faster"
    assert verdicts["forward"] == verdicts["samples per second"] == ""


def test_a_difference_that_cannot_be_written_is_none():
    assert Change("share", 0.0004, 0.0001, "more", percent).kind == ""
    assert Change("share", 0.004, 0.001, "more", percent).verdict == "0.3 % less"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99, "run": {}}', '{"version": 1, ', "\xff"])
@pytest.mark.parametrize("others", [0, 1])
def test_a_file_that_holds_no_report_is_named(profile, tmp_path, capsys, text, others):
    (tmp_path / "report.json").write_bytes(text.encode("latin1"))
    assert main(["report", *[str(profile)] * others, str(tmp_path)]) == 2
    assert str(tmp_path / "report.json") in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: gzip.compress(b'{"x": 1}'), lambda data: b""])
def test_files_that_are_not_whole_are_left_out_or_named(profile, tmp_path, capsys, damage):
    folder = tmp_path / "run"
    shutil.copytree(profile, folder)
    trace = folder / "trace.json.gz"
    (folder / "part0.json.gz").write_bytes(damage(trace.read_bytes()))
    assert main(["report", str(folder)]) == 0
    trace.write_bytes(damage(trace.read_bytes()))
    assert main(["report", str(folder), "--kineto", str(profile / "trace.json.gz")]) == 2
    assert str(trace) in capsys.readouterr().err


def changed(report, path, value):
    *keys, last = path
    inner = report
    for key in keys:
        inner = inner[key]
    inner[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["run", "world_size"], 10**12),
        (["run", "world_size"], "2"),
        (["run", "world_size"], -1),
        (["run"], 3),
        (["run", "mesh"], "x"),
        (["reports"], [1]),
        (["reports", "StepBreakdown"], 3),
        (["reports", "StepBreakdown", "ranks"], {"a": "b"}),
        (["reports", "StepBreakdown", "ranks", 0], {}),
        (["reports", "CommunicationProfiler"], "x"),
        (["series"], 5),
    ],
)
@pytest.mark.parametrize("others", [0, 1])
def test_a_report_with_other_values_is_named(profile, tmp_path, capsys, path, value, others):
    report = json.loads((profile / "report.json").read_text())
    report["reports"].setdefault("StepBreakdown", sample_report()["reports"]["StepBreakdown"])
    changed(report, path, value)
    (tmp_path / "report.json").write_text(json.dumps(report))
    status = main(["report", *[str(profile)] * others, str(tmp_path)])
    captured = capsys.readouterr()
    # What is not drawn is not looked at.
    assert status == 0 or (status == 2 and f"{tmp_path}" in captured.err), captured.err
    assert status == 2 or path[0] != "run" or len(path) == 1 or others == 1 or path[1] != "world_size"


def test_a_link_that_is_there_already_leads_nowhere(profile, tmp_path):
    """Others may write to the folder, and guess names: what they lead to is not written."""
    folder, victim = tmp_path / "run", tmp_path / "victim"
    shutil.copytree(profile, folder)
    victim.write_text("precious")
    for name in ("report.html", "report.json", "trace.json.gz"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / f".{name}").symlink_to(victim)
        (folder / f".{name}.{os.getpid()}").symlink_to(victim)
        if name == "report.json":
            (folder / name).write_bytes(content)
        else:
            (folder / name).symlink_to(victim)
    (folder / ".part5.json.gz").symlink_to(victim)
    assert main(["report", str(folder)]) == 0
    write_part(part_path(folder, 5), {"rank": 5})
    write_text(folder / "report.json", "text")
    write_trace({"traceEvents": []}, folder / "trace.json.gz")
    assert victim.read_text() == "precious"
    assert not (folder / "report.html").is_symlink()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}/nothing"], "The folder of a profiled run must hold"),
        (["{}", "{}", "{}"], "one run, or two runs to compare"),
        (["{}", "--output", "a.html"], "`--output` names"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, words, message):
    assert main(["report", *(word.format(tmp_path) for word in words)]) == 2
    assert message in capsys.readouterr().err
