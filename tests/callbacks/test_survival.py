"""Processes that are killed, or told to end, go on when they are started again: whole scripts, and a launcher."""

import contextlib
import functools
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from lightning_parallel import AutoResume
from tests.harness import free_port, start_script

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def _start(folder, strategy, ranks, steps=16):
    """Start each rank by itself, as a scheduler does: no launcher ends the others when one is gone."""
    folder.mkdir(exist_ok=True)
    arguments = (CHAOS, "train", "--folder", folder, "--strategy", strategy, "--steps", steps, "--every", 5)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
    return [start_script(*arguments, LOCAL_RANK=str(rank), RANK=str(rank), **address) for rank in range(ranks)]


def _step_in(place):
    try:
        return int(place.read_text().split()[1])
    except FileNotFoundError:
        return 0


def _wait_for_step(folder, started, step):
    until = time.monotonic() + 120
    places = [folder / f"{rank}.progress" for rank in range(len(started))]
    while not all(_step_in(place) >= step for place in places):
        assert all(rank.process.is_alive() for rank in started), started[0]().stderr
        assert time.monotonic() < until, f"it has not come to step {step}: {started[0](1).stderr}"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the weights of a run of two ranks that nobody interrupts, by its strategy."""

    @functools.cache
    def weights(strategy):
        folder = tmp_path_factory.mktemp("whole")
        assert [rank(120).returncode for rank in _start(folder, strategy, 2)] == [0, 0]
        return torch.load(folder / "weights.pt")

    return weights


def assert_equal_weights(folder, expected):
    found = torch.load(folder / "weights.pt")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize(
    ("strategy", "ranks", "signalled", "skew_s"),
    [("pipeline", 2, [1], 0), ("hybrid", 2, [0, 1], 0.4), ("ddp", 2, [1, 0, 1, 0], 0.15), ("ddp", 1, [0], 0)],
)
def test_ranks_that_are_told_to_end_save_and_exit(strategy, ranks, signalled, skew_s, tmp_path, whole):
    folder = tmp_path / "cut"
    started = _start(folder, strategy, ranks)
    _wait_for_step(folder, started, 6)
    for rank in signalled:
        with contextlib.suppress(ProcessLookupError):  # it has ended by now
            started[rank].send(signal.SIGTERM)
        time.sleep(skew_s)
    ended = [rank(60) for rank in started]
    assert [rank.returncode for rank in ended] == [AutoResume.EXIT_PREEMPTED] * ranks, ended[0].stderr
    assert not (folder / "weights.pt").exists()
    places = {(folder / f"{rank}.progress").read_text().split()[1] for rank in range(ranks)}
    assert len(places) == 1, "all ranks end after the same step"
    (step,) = places
    assert sorted(path.name for path in (folder / "auto_resume").glob("step*"))[-1] == f"step-{int(step):08d}.ckpt"
    assert [rank(120).returncode for rank in _start(folder, strategy, ranks)] == [0] * ranks
    steps = (folder / "steps").read_text().split()
    assert steps == [str(number + 1) for number in range(16)], "no step is lost or repeated"
    if (strategy, ranks) in (("hybrid", 2), ("ddp", 2)):  # test_auto_resume.py compares the weights of the others
        assert_equal_weights(folder, whole(strategy))


@pytest.mark.sweep(kept=None)
def test_killed_ranks_are_started_again_by_torchrun(tmp_path, whole):
    folder = tmp_path / "killed"
    folder.mkdir()
    started = start_script(Path(__file__).with_name("launched.py"), folder, "async")
    for rank, step in ((1, 5), (0, 11)):
        _wait_for_step(folder, [started] * 2, step)
        process = int((folder / f"{rank}.progress").read_text().split()[0])
        for place in folder.glob("*.progress"):
            place.unlink()
        os.kill(process, signal.SIGKILL)
    ended = started(200)
    assert ended.returncode == 0, ended.stderr
    steps = (folder / "steps").read_text().split()
    assert sorted(set(steps), key=int) == [str(number + 1) for number in range(16)]
    assert len(steps) > 16, "some are repeated"
    assert_equal_weights(folder, whole("hybrid"))
