"""Processes started by the Trainer, as functions, by torchrun and from YAML; and what happens when one dies."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

SCRIPT = """
import os, sys, torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_parallel import TensorParallelStrategy


class Project(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, index):
        if os.environ.get("DIES") == str(self.global_rank) and index == 2:
            os._exit(9)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torch.manual_seed(1)
    method = sys.argv[1]
    strategy = "tensor_parallel" if method == "name" else TensorParallelStrategy(2, start_method=method)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    data = TensorDataset(torch.randn(32, 8), torch.randint(3, (32,)))
    module = Project()
    trainer.fit(module, DataLoader(data, 4))
    print("DONE", trainer.global_rank, tuple(module.net[0].weight.shape), flush=True)
"""


def _run(tmp_path, *command, **environment):
    script = tmp_path / "project.py"
    script.write_text(SCRIPT)
    clean = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")}
    process = subprocess.run(
        [sys.executable, *(str(script) if part == "SCRIPT" else part for part in command)],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return process.stdout, process.stderr


def test_the_trainer_runs_the_script_again(tmp_path):
    out, err = _run(tmp_path, "SCRIPT", "name")
    assert out.count("DONE") == 2, err
    assert out.count("(8, 8)") == 2


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_functions_return_the_full_weights(tmp_path, method):
    out, err = _run(tmp_path, "SCRIPT", method)
    assert "DONE 0 (16, 8)" in out, err


def test_torchrun(tmp_path):
    out, err = _run(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node=2", "SCRIPT", "popen")
    assert out.count("(8, 8)") == 2, err


def test_a_rank_that_dies_is_named(tmp_path):
    # Started one by one: a launcher would end the others as soon as it sees that one is gone.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    there = {"DIES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(_run, tmp_path, "SCRIPT", "popen", LOCAL_RANK=str(rank), **there) for rank in range(2)]
        out, err = runs[0].result()
    assert "DONE" not in out
    assert "[rank 0] all_reduce along tensor_parallel" in err
    assert "rank 1 is gone" in err
