"""Processes started by the Trainer, as functions and by torchrun; one that dies; groups that fits share."""

import os

import pytest
import torch.distributed as dist

from lightning_parallel import TensorParallelStrategy
from tests.harness import distributed, free_port, run_script, start_script
from tests.strategies.models import Net, fit_parallel, loader, trainer_for

SCRIPT = """
import multiprocessing.forkserver, os, sys, torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_parallel import TensorParallelStrategy
from lightning_parallel.comm import presence

presence._SILENCE_S = 3.0

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
    server = multiprocessing.forkserver._forkserver
    if server._forkserver_address and not hasattr(server, "_forkserver_authkey"):
        server.ensure_running = lambda: None  # that of the harness, of which this is a fork, has imported everything
    strategy = "tensor_parallel"
    if method == "notebook":
        sys.ps1, method = ">>> ", "auto"
    if method != "name":
        strategy = TensorParallelStrategy(tensor_parallel_size=2, start_method=method)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    data = TensorDataset(torch.randn(32, 8), torch.randint(3, (32,)))
    module = Project()
    trainer.fit(module, DataLoader(data, 4))
    print("DONE", trainer.global_rank, tuple(module.net[0].weight.shape), flush=True)
    if method in ("auto", "forkserver"):
        try:
            trainer.fit(module, DataLoader(data, 4))
        except RuntimeError as error:
            print(error)
"""


# The worker processes are forked by torchrun's agent instead of being started, which takes as long as all else.
TORCHRUN = """
import runpy, sys
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args


def run(*words):
    sys.argv = list(words)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    config, _, words = config_from_args(parse_args(sys.argv[1:]))
    config.start_method = "fork"
    config.rdzv_backend, config.rdzv_endpoint = "c10d", "127.0.0.1:0"  # as `run` sets them without a port
    elastic_launch(config, run)(*[word for word in words if word != "-u"])
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "project.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.sweep(kept=None)
def test_the_trainer_runs_the_script_again(script):
    _, out, err = run_script(script, "name")
    assert out.count("DONE") == 2, err
    assert out.count("(16, 8)") == 2


# What "spawn" pickles, and reads again in a process that has not run the script, "forkserver" does in less time.
@pytest.mark.sweep
@pytest.mark.parametrize("method", ["forkserver", "notebook"])
def test_functions_return_the_full_weights(script, method):
    _, out, err = run_script(script, method, LIGHTNING_PARALLEL_LOG="warning")
    assert "DONE 0 (16, 8)" in out, err
    assert "Create a new Trainer" in out
    assert "tensor-parallel ranks" not in out + err  # no table


def test_torchrun(script):
    torchrun = script.with_name("torchrun.py")
    torchrun.write_text(TORCHRUN)
    _, out, err = run_script(torchrun, "--nproc-per-node=2", script, "popen")
    assert out.count("(16, 8)") == 2, err


def test_a_rank_that_dies_is_named(script):
    # Started one by one: a launcher would end the others as soon as it sees that one is gone.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    waits = [start_script(script, "popen", LOCAL_RANK=str(rank), DIES="1", **address) for rank in range(2)]
    (_, out, err), died = (wait() for wait in waits)
    assert died.returncode == 9
    assert "DONE" not in out
    assert "rank 1 is gone" in err


class Interrupted(Net):
    """Fails on one rank: after the last step, when the other waits for it at the end of the run, or in a step."""

    def __init__(self, step=None):
        super().__init__()
        self.step = step

    def fail(self, place):
        if self.global_rank == 1 and place == self.step:
            raise ZeroDivisionError("on rank 1 alone")

    def training_step(self, batch, index):
        self.fail(self.global_step)
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.fail("validation")
        super().validation_step(batch, index)

    def on_train_end(self):
        self.fail(None)


@distributed(world_size=2)
def test_fits_with_the_same_mesh_use_the_same_groups():
    first = fit_parallel(Net().double(), 2, 1).strategy
    alive = len(dist.distributed_c10d._world.pg_map)
    again = fit_parallel(Net().double(), 2, 1).strategy
    assert again.groups is first.groups
    assert again.device_mesh is first.device_mesh
    assert fit_parallel(Net().double(), 2, 2).strategy.groups is not first.groups
    assert fit_parallel(Net().double(), 2, 1).strategy.groups is first.groups
    assert len(dist.distributed_c10d._world.pg_map) <= 2 * alive


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_groups_that_one_rank_left_are_replaced_on_all(group):
    first = fit_parallel(Net().double(), 2, 1).strategy
    expected = pytest.raises(ZeroDivisionError)
    if group.rank == 0:
        expected = pytest.raises(RuntimeError, match="rank 1 stopped with: ZeroDivisionError: on rank 1 alone")
    # The other rank waits in a collective, in validation one of torch, while this process lives on.
    for step in (None, 2, "validation"):
        with expected:
            fit_parallel(Interrupted(step).double(), 2, 1)
        again = fit_parallel(Net().double(), 2, 1).strategy
        assert again.groups is not first.groups
        first = again
    assert fit_parallel(Net().double(), 2, 1).strategy.groups is again.groups


@distributed(world_size=2)
def test_a_trainer_that_counts_other_processes_than_are_connected_is_refused(group):
    """As in Ray Train without its environment: each worker would train alone."""
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="1")
    trainer = trainer_for(TensorParallelStrategy())
    with pytest.raises(ValueError, match="of `torch.distributed`, 2; got 1 by its `LightningEnvironment`"):
        trainer.fit(Net().double(), loader())
