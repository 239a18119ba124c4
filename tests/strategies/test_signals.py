"""A run ends on every rank, and soon, whichever process gets a signal or fails, in training and before it."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.harness import free_port, start_script

SCRIPT = """
import os, signal, sys, torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_parallel import HybridParallelStrategy

signal.alarm(150)  # not for ever if the test itself is ended
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in processes of a shell's background
torch.set_num_threads(1)
torch.manual_seed(1)
method, layout, folder, when = sys.argv[1:]
SIZES = {"tensor": (1, 2, 1), "pipeline": (1, 1, 2), "hybrid": (1, 2, 2), "data": (2, 1, 1)}[layout]
AXES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Project(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(4)], nn.Linear(8, 3))

    def fails(self, now):
        if when == now and self.global_rank == 1:
            raise MemoryError("as much as rank 1 wants")

    def setup(self, stage):
        self.fails("setup hook")

    def to(self, *args, **kwargs):
        self.fails("move")
        return super().to(*args, **kwargs)

    def train_dataloader(self):
        self.fails("loader")
        return loader

    def on_fit_start(self):
        self.fails("fit start")

    def on_train_start(self):
        self.fails("train start")

    def step(self, batch, index):
        if index == 2:
            open(f"{folder}/{self.global_rank}.part", "w").write(str(os.getpid()))
            # In one piece: each epoch writes it again, and a file opened for writing is empty until then.
            os.replace(f"{folder}/{self.global_rank}.part", f"{folder}/{self.global_rank}")
            self.fails("step")
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, index):
        return self.step(batch, index)

    def validation_step(self, batch, index):
        self.step(batch, index)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


loader = DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(3, (16,))), 2)


class Endless(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return torch.ones(8), index % 3


if __name__ == "__main__":
    strategy = HybridParallelStrategy(**dict(zip(AXES, SIZES)), start_method=method, verify="off")
    trainer = Trainer(accelerator="cpu", devices=4 if layout == "hybrid" else 2, strategy=strategy, max_epochs=10**6,
                      logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    module = Project()
    if when == "validation":
        trainer.validate(module, DataLoader(Endless(), 2))
    else:
        trainer.fit(module)
    print("DONE")
"""
ENDS_WITHIN_S = 20.0  # where it waits for a peer for ever, half an hour


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "project.py"
    path.write_text(SCRIPT)
    return path


def _start_ranks(script, layout, when="training"):
    """Start each rank by itself, as a scheduler does: no launcher ends the others when one is gone."""
    ranks = 4 if layout == "hybrid" else 2
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
    arguments = (script, "popen", layout, script.parent, when)
    return [start_script(*arguments, LOCAL_RANK=str(rank), **address) for rank in range(ranks)]


def _wait_for_steps(folder, ranks, *started):
    """Return the process of each rank, once all of them have been at a step."""
    until = time.monotonic() + 120
    # Not only there: it is read between its creation and its text otherwise.
    while not all((folder / str(rank)).exists() and (folder / str(rank)).read_text() for rank in range(ranks)):
        assert all(script.process.is_alive() for script in started), started[0]().stderr
        assert time.monotonic() < until, "it has not begun"
        time.sleep(0.02)
    time.sleep(0.3)
    return [int((folder / str(rank)).read_text()) for rank in range(ranks)]


def _is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def _wait_for_end(processes):
    until = time.monotonic() + ENDS_WITHIN_S
    while any(map(_is_running, processes)) and time.monotonic() < until:
        time.sleep(0.02)
    left = [process for process in processes if _is_running(process)]
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "it waits for ever"


@pytest.mark.sweep(kept=1)
@pytest.mark.parametrize(
    ("layout", "when"),
    [("hybrid", "training"), ("pipeline", "validation")],
)
def test_sigterm_to_all_ranks_at_once(script, layout, when):
    started = _start_ranks(script, layout, when)
    processes = _wait_for_steps(script.parent, len(started), *started)
    for rank in started:
        rank.send(signal.SIGTERM)
    _wait_for_end(processes)
    for rank in started:
        returncode, out, err = rank(5)
        assert returncode == 0, err
        assert "DONE" not in out


@pytest.mark.sweep(kept=1)
@pytest.mark.parametrize(("layout", "signum"), [("tensor", signal.SIGINT), ("pipeline", signal.SIGKILL)])
def test_a_signal_to_one_rank(script, layout, signum):
    started = _start_ranks(script, layout)
    processes = _wait_for_steps(script.parent, len(started), *started)
    started[1].send(signum)
    _wait_for_end(processes)
    ended = [rank(5) for rank in started]
    assert all(rank.returncode != 0 for rank in ended)
    if signum == signal.SIGKILL:
        assert "rank 1 is gone" in ended[0].stderr


@pytest.mark.parametrize(
    ("method", "signum", "to_group"),
    [
        ("fork", signal.SIGTERM, False),
    ],
)
def test_a_signal_to_the_launching_process(script, method, signum, to_group):
    started = start_script(script, method, "pipeline", script.parent, "training")
    processes = _wait_for_steps(script.parent, 2, started)
    started.send(signum, to_group)
    _wait_for_end(processes)
    assert "DONE" not in started(10).stdout


@pytest.mark.sweep(kept=1)
@pytest.mark.parametrize(
    ("layout", "when"),
    [
        ("tensor", "setup hook"),
        ("pipeline", "loader"),
        ("pipeline", "step"),
    ],
)
def test_an_error_on_one_rank_reaches_all(script, layout, when):
    started = _start_ranks(script, layout, when)
    first, second = (rank(60) for rank in started)
    assert "MemoryError: as much as rank 1 wants" in second.stderr
    assert first.returncode == 1, "it waits for ever"
    assert "as much as rank 1 wants" in first.stderr
