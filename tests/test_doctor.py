"""`lightning-parallel doctor`: what it finds on a machine, in a launcher's variables, and between processes."""

from pathlib import Path

import pytest

from lightning_parallel import cli
from lightning_parallel.cli import main
from tests.harness import free_port, start_script

PROGRAM = Path(cli.__file__).parents[1] / "__main__.py"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS")


@pytest.fixture
def found(capsys, monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)

    def doctor(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        status = main(["doctor"])
        return status, capsys.readouterr().out

    return doctor


def test_versions_machine_and_network_are_told(found):
    _, out = found(NCCL_DEBUG="INFO", OMP_NUM_THREADS="1")
    for word in (
        "versions",
        "torch",
        "cores",
        "/dev/shm",
        "open files",
        "address told to peers",
        "interfaces",
        "launcher",
    ):
        assert word in out
    assert "INFO prints the transports that NCCL chooses" in out


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "`RANK` is set but MASTER_ADDR, MASTER_PORT are not"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, "a SLURM allocation without `srun`"),
        ({"TORCHELASTIC_RUN_ID": "a", "SLURM_NTASKS_PER_NODE": "8"}, "Set `--ntasks-per-node=1`"),
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, "names no interface here; use one of"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "block the compute stream. Unset it"),
        ({"LOCAL_WORLD_SIZE": "4096"}, "4096 processes share"),
        ({"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "1234"}, "cannot be reached from here"),
    ],
)
def test_problems_are_named_with_a_fix(found, environment, problem):
    status, out = found(**environment)
    assert status == 1
    assert f"problem: {problem}" in out or problem in out.partition("problem: ")[2]


def meet(ranks, size, timeout, **further):
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(size), **further}
    words = PROGRAM, "doctor", "--rendezvous", "--timeout", str(timeout)
    return [start_script(*words, RANK=str(rank), LOCAL_RANK=str(rank), **places) for rank in ranks]


def test_processes_meet_and_measure_their_link():
    first, second = (rank() for rank in meet(range(2), 2, 60))
    assert "2 of 2 in" in first.stdout, first.stderr
    assert "all-reduce over gloo" in first.stdout
    assert "ranks" not in second.stdout


@pytest.mark.sweep(kept=None)
def test_a_rank_that_does_not_come_is_named():
    started = [*meet([0], 2, 3), *meet([1], 2, 3)]  # two places, at once
    alone, late = (rank() for rank in started)
    assert alone.returncode == 1
    assert "ranks [1] did not come within 3 s" in alone.stdout, alone.stderr
    assert late.returncode == 1
    assert "rank 1 cannot reach the store at 127.0.0.1" in late.stdout, late.stderr
