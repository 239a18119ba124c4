"""A network that is cut in the middle of a run: both sides end, what was saved is whole, and a restart goes on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_parallel.checkpoint import SavedCheckpoint
from tests.harness import free_port, start_script

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from shaped_network import Network, unavailable

ENDLESS = 10**6


def started(network, folder, steps):
    script, port = Path(__file__).with_name("cut_off.py"), free_port()
    words = [(network._names[rank], network.address(0), port, rank, folder, steps) for rank in (0, 1)]
    return [start_script(script, *some) for some in words]


@pytest.mark.sweep(kept=None)
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_both_sides_of_a_cut_network_end_and_a_restart_goes_on(tmp_path):
    if unavailable():
        pytest.skip(unavailable())
    with Network(2, rate_mbit=1000) as network:
        ranks = started(network, tmp_path, ENDLESS)
        deadline = time.monotonic() + 100
        while len(list(tmp_path.glob("step=*"))) < 3:
            assert time.monotonic() < deadline, [rank() for rank in ranks]
            time.sleep(0.05)
        subprocess.run(["ip", "link", "set", network._port(1), "down"], check=True)
        ended = [rank() for rank in ranks]
        for one in ended:
            assert one.returncode != 0
            assert "is gone" in one.stderr or "does not answer" in one.stderr
        saved = SavedCheckpoint.open(str(tmp_path))
        before = saved.manifest.step
        assert before >= 3
        assert all(torch.isfinite(tensor * 1).all() for tensor in saved.checkpoint()["state_dict"].values())
        subprocess.run(["ip", "link", "set", network._port(1), "up"], check=True)
        assert [rank().returncode for rank in started(network, tmp_path, before + 2)] == [0, 0]
    assert SavedCheckpoint.open(str(tmp_path)).manifest.step == before + 2
    assert not list(tmp_path.glob(".partial-*"))
