"""Two hosts: namespaces of the network with torchrun on each, and processes that find themselves started by SLURM."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.harness import free_port, run, start_script
from tests.strategies.hosts import SHORT
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_pipeline import Deep

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from shaped_network import Network, unavailable

SCRIPT = Path(__file__).with_name("hosts.py")


def trained_by_one_process():
    module, trainer = Deep(), trainer_for("auto", 1, **SHORT)
    trainer.fit(module, loader(), loader())
    return module.state_dict(), dict(trainer.callback_metrics)


def told_by_ranks(folder):
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def check(folder, environment):
    weights, metrics = torch.load(folder / "trained.pt")
    ((expected, expected_metrics),) = run(trained_by_one_process, 1)
    for found, wanted, error in ((weights, expected, 1e-10), (metrics, expected_metrics, 1e-6)):
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name].double(), value.double(), rtol=error, atol=error, msg=name)
    told = told_by_ranks(folder)
    assert {one["environment"] for one in told} == {environment}
    assert [(one["node"], one["stage"], one["shard"]) for one in told] == [(0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1)]
    return told


@pytest.mark.sweep(kept=None)
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_torchrun_on_two_hosts_equals_one_process(tmp_path):
    if unavailable():
        pytest.skip(unavailable())
    with Network(2, rate_mbit=1000) as network:
        rendezvous = f"{network.address(0)}:29400"
        hosts = [
            start_script(SCRIPT, tmp_path, network._names[node], network.address(node), rendezvous, node)
            for node in (0, 1)
        ]
        ended = [host(200) for host in hosts]
        assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
        told = check(tmp_path, "TorchElasticEnvironment")
        assert {one["address"] for one in told} <= {network.address(0), network.address(1)}


def start_by_slurm(folder, tasks_per_node=2, ranks=4, **more):
    """Start some of four processes with the variables that srun sets for each of them, as if on two nodes."""
    variables = {
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "127.0.0.[1-2]",
        "MASTER_PORT": free_port(),
    }
    return [
        start_script(
            SCRIPT, folder, 2, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank % 2), SLURM_NODEID=str(rank // 2),
            **variables, **more,
        )
        for rank in range(ranks)
    ]  # fmt: skip


@pytest.mark.sweep(kept=None)
def test_processes_of_slurm_save_together_when_their_time_is_over(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    (tools / "scontrol").chmod(0o755)
    (tmp_path / "wait").touch()
    started = start_by_slurm(tmp_path, PATH=f"{tools}:{os.environ['PATH']}")
    until = time.monotonic() + 120
    while not all((tmp_path / f"at{rank}").exists() for rank in range(4)):
        assert all(one.process.is_alive() for one in started), [one(1).stderr for one in started]
        assert time.monotonic() < until
        time.sleep(0.02)
    for one in started:
        # As srun does with `--signal=USR1@120`. It finds them at different places of a step.
        one.send(signal.SIGUSR1)
        time.sleep(0.1)
    (tmp_path / "wait").unlink()
    ended = [one(120) for one in started]
    assert [one.returncode for one in ended] == [0] * 4, ended[0].stderr + ended[1].stderr
    check(tmp_path, "SLURMEnvironment")
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == 3, "the step was ended"
    assert all(value.isfinite().all() for value in saved["state_dict"].values())


def test_other_tasks_per_node_than_devices_are_refused(tmp_path):
    (first,) = start_by_slurm(tmp_path, tasks_per_node=4, ranks=1)
    ended = first(60)
    assert ended.returncode != 0
    assert "--ntasks-per-node=4" in ended.stderr
