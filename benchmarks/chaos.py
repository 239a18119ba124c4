"""Kills processes of a run at random moments, and compares its weights with those of a run that was left alone.

    python benchmarks/chaos.py --kills 10 --seed 0 --strategy hybrid
    python benchmarks/chaos.py --kills 6 --strategy tensor --elastic     # goes on with another number of processes
    python benchmarks/chaos.py --kills 6 --format async                  # sharded, written while training goes on

Every third kill waits until a checkpoint is being written. Exits with 1 if the weights differ.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROCESSES = 4
# Of the mesh, by the number of processes: tensor, pipeline; the rest are replicas.
SIZES = {
    "tensor": {4: (2, 1), 2: (2, 1), 1: (1, 1)},
    "pipeline": {4: (1, 2), 2: (1, 2), 1: (1, 1)},
    "hybrid": {4: (2, 2), 2: (2, 1), 1: (1, 1)},
    "ddp": {4: (1, 1), 2: (1, 1), 1: (1, 1)},
}
GLOBAL_BATCH = 8
PATIENCE_S = 180.0


# -- one process of the run --------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Train as one of the processes that torchrun starts."""
    import torch
    import torch.nn.functional as F
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.strategies import DDPStrategy
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_parallel import AutoResume, HybridParallelStrategy

    torch.set_num_threads(1)
    folder, world = Path(options.folder), int(os.environ.get("WORLD_SIZE", 1))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(options.width, options.width), nn.Linear(options.width, options.width)
            # Which numbers it draws depends on the layout.
            self.dropout = nn.Dropout(0.0 if options.elastic else 0.1)

        def forward(self, x):
            return x + self.dropout(self.down(F.gelu(self.up(x))))

    class Project(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(options.width, 4)).double()

        def training_step(self, batch, index):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    class Progress(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            time.sleep(options.pause)
            rank = os.environ.get("RANK", "0")
            part = folder / f"{rank}.part"
            part.write_text(f"{os.getpid()} {trainer.global_step}")
            part.replace(folder / f"{rank}.progress")  # whole, or not there
            if rank == "0" and (index + 1) % trainer.accumulate_grad_batches == 0:
                with (folder / "steps").open("a") as file:
                    file.write(f"{trainer.global_step}\n")

    seed_everything(options.seed)
    tensor, pipeline = SIZES[options.strategy][world]
    replicas = world // (tensor * pipeline)
    if options.strategy == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    else:
        sharded = {} if options.format == "full" else {"checkpoint_format": "sharded"}
        sharded |= {"async_save": True} if options.format == "async" else {}
        sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        strategy = HybridParallelStrategy(**sizes, **sharded, balance="uniform", verify="off")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(GLOBAL_BATCH * 10, options.width, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(4, (len(x),), generator=generator))
    batch, most = GLOBAL_BATCH // 4 if options.elastic else GLOBAL_BATCH // replicas, max(SIZES[options.strategy])
    accumulate = GLOBAL_BATCH // (
        batch * (most // (SIZES[options.strategy][most][0] * SIZES[options.strategy][most][1]))
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy if world > 1 or options.strategy != "ddp" else "auto",
        max_steps=options.steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate if options.elastic else 1,
        callbacks=[AutoResume(str(folder / "auto_resume"), every_n_train_steps=options.every), Progress()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Project()
    trainer.fit(module, DataLoader(data, batch, shuffle=True))
    if trainer.is_global_zero:
        torch.save(module.state_dict(), folder / "weights.part")
        (folder / "weights.part").replace(folder / "weights.pt")


# -- the one who kills -------------------------------------------------------------------------------------------------


class Run:
    """A run of several processes, started again each time that one of them is killed.

    Args:
        options: Of the command line.
        folder: For everything that it writes.
        kills: How many there will be.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, kills: int) -> None:
        self.options, self.folder, self.kills = options, folder, kills
        self.random = random.Random(options.seed)
        self.starts, self.log = 0, folder / "log"
        folder.mkdir()

    def start(self, processes: int) -> subprocess.Popen[bytes]:
        # torchrun itself starts as many processes again, which meet in the store of those that have died.
        restarts = 0 if self.options.elastic else self.kills
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["--max-restarts", str(restarts), __file__, "train", "--folder", str(self.folder)]
        for name in ("strategy", "format", "steps", "every", "width", "pause", "seed"):
            command += [f"--{name}", str(getattr(self.options, name))]
        command += ["--elastic"] if self.options.elastic else []
        self.starts += 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def __call__(self) -> None:
        """Run to the end.

        Raises:
            RuntimeError: If it stops to make progress.
        """
        processes = PROCESSES
        started = self.start(processes)
        try:
            for number in range(self.kills):
                self._kill(started, number, processes)
                if self.options.elastic:
                    started.wait(PATIENCE_S)
                    others = [size for size in SIZES[self.options.strategy] if size not in (processes, 1)]
                    processes = self.random.choice(others)
                    started = self.start(processes)
            self._wait(started, lambda: started.poll() is not None, "its end")
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
        if started.returncode:
            raise RuntimeError(f"the run ended with status {started.returncode}:\n{self._last_lines()}")

    def _kill(self, started: subprocess.Popen[bytes], number: int, processes: int) -> None:
        for path in self.folder.glob("*.progress"):
            path.unlink()
        share = self.options.steps / (self.kills + 1)
        step = int(share * number + self.random.uniform(1, share))
        self._wait(started, lambda: self._is_at(step, processes), f"step {step}")
        folder = self.folder / "auto_resume"
        if number % 3 == 2:
            self._wait(started, lambda: any(folder.glob(".partial-*")), "a checkpoint")
        else:
            time.sleep(self.random.uniform(0, 2 * self.options.pause))
        rank = self.random.randrange(processes)
        process = int((self.folder / f"{rank}.progress").read_text().split()[0])
        for path in self.folder.glob("*.progress"):
            path.unlink(missing_ok=True)
        os.kill(process, signal.SIGKILL)

    def _is_at(self, step: int, processes: int) -> bool:
        found = [path.read_text().split() for path in self.folder.glob("*.progress")]
        return len(found) == processes and min(int(entry[1]) for entry in found) >= step

    def _wait(self, started: subprocess.Popen[bytes], is_there, what: str) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not is_there():
            if started.poll() is not None and what != "its end":
                raise RuntimeError(f"the run ended before {what}:\n{self._last_lines()}")
            if time.monotonic() > end_s:
                raise RuntimeError(f"the run does not come to {what}:\n{self._last_lines()}")
            time.sleep(0.002)

    def _last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    @property
    def steps(self) -> list[int]:
        """The steps that were taken, those that were repeated as often as they were."""
        return [int(line) for line in (self.folder / "steps").read_text().split()]


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("kill", "train"), default="kill", help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=sorted(SIZES), default="hybrid")
    parser.add_argument("--format", choices=("full", "sharded", "async"), default="full")
    parser.add_argument("--elastic", action="store_true", help="go on with another number of processes")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=3, help="steps between two checkpoints")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that each step takes longer")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.command == "train":
        train(options)
        return 0
    return report(options)


def report(options: argparse.Namespace) -> int:
    """Run alone and with kills, and compare; tells whether the weights differ."""
    import torch
    from rich.console import Console
    from rich.table import Table

    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    try:
        begun_s = time.monotonic()
        alone, killed = Run(options, folder / "alone", 0), Run(options, folder / "killed", options.kills)
        alone()
        middle_s = time.monotonic()
        killed()
        end_s = time.monotonic()
        weights = [torch.load(run.folder / "weights.pt") for run in (alone, killed)]
        differences = [(a - b).abs().max().item() for a, b in zip(*(entry.values() for entry in weights))]
        steps = killed.steps
    finally:
        shutil.rmtree(folder)
    table = Table("strategy", "format", "kills", "steps", "repeated", "weights differ by", "seconds, left alone")
    restarts = f"{options.kills}{' elastic' if options.elastic else ''}"
    difference, allowed = max(differences), 1e-10 if options.elastic else 0.0
    repeated = str(len(steps) - len(set(steps)))
    seconds = f"{end_s - middle_s:.0f}, {middle_s - begun_s:.0f}"
    table.add_row(
        options.strategy, options.format, restarts, str(options.steps), repeated, f"{difference:.1e}", seconds
    )
    Console().print(table)
    return int(difference > allowed)


if __name__ == "__main__":
    sys.exit(main())
