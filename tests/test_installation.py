"""The wheel, installed where nothing of this repository is: what a user gets from `pip install`."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from sysconfig import get_path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import lightning_parallel, sys
from lightning_parallel.callbacks.report.page import render

assert lightning_parallel.__file__.startswith(sys.argv[1]), lightning_parallel.__file__
assert "<html" in render({"run": {"world_size": 1, "steps": 1}})  # its template is there
print(lightning_parallel.__version__)
"""


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [*map(str, command)]
    ended = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.sweep(kept=None)
def test_the_wheel_works_outside_of_the_repository(tmp_path):
    # Without isolation: the backend is installed with the tests, and needs no network then.
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        ROOT,
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "lightning_parallel",
        "lightning_parallel_cli",
    }
    assert "lightning_parallel/py.typed" in names
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    # torch and Lightning are large: those of the tests are lent. Paths of a `.pth` file are not searched for others,
    # so that the repository, which is installed there, is not found.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(get_path("purelib"))
    version = run(python, "-c", PROGRAM, environment, cwd=tmp_path).split()[-1]
    program = environment / "bin" / "lightning-parallel"
    assert run(program, "--version", cwd=tmp_path) == f"lightning-parallel {version}\n"
    assert "bubble" in run(program, "simulate", "--ranks", "2", cwd=tmp_path)
