"""Train one project in one layout, on ranks as torchrun starts them, and write what came of it.

Every rank writes `rankN.pt`, with the loss of each step, the metrics, and the module's state dict after the run, or
`rankN.refused` with the error's text; rank 0 leaves `final.ckpt`. Ranks are forks of a process that has imported what
takes long, and has run no backward: threads of autograd do not live on in a fork.
"""

import importlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import lightning_parallel
from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from tests.projects.catalog import CATALOG, Entry

# Number of processes, and the one line that changes.
LAYOUTS = {
    "one process": (1, lambda: "auto"),
    "tensor": (2, lambda: TensorParallelStrategy()),
    "pipeline": (2, lambda: PipelineParallelStrategy()),
    "hybrid": (4, lambda: HybridParallelStrategy(tensor_parallel_size=2, pipeline_parallel_size=2)),
}


DEADLINE_S = 600.0
GRACE_S = 60.0  # for the ranks that are left when one has failed


def train(project: str, layout: str, folder: Path) -> bool | None:
    """Run all ranks; returns whether they succeeded, or None after `DEADLINE_S`."""
    folder.mkdir(parents=True)
    entry = CATALOG[project]
    importlib.import_module(entry.imports)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork").Process
    ranks = [fork(target=_rank, args=(project, layout, folder, rank, port)) for rank in range(LAYOUTS[layout][0])]
    for process in ranks:
        process.start()
    end = time.monotonic() + DEADLINE_S
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        time.sleep(0.1)
        if any(process.exitcode for process in ranks):
            end = min(end, time.monotonic() + GRACE_S)
    failed = any(process.exitcode for process in ranks)
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    return None if late and not failed else not failed


def _rank(project: str, layout: str, folder: Path, rank: int, port: int) -> None:
    """Be one rank, in a fork: what it prints goes into `rankN.log`."""
    with (folder / f"rank{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    if LAYOUTS[layout][0] > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _fit(CATALOG[project], layout, folder, rank)


def _fit(entry: Entry, layout: str, folder: Path, rank: int) -> None:
    pl = importlib.import_module(entry.imports)

    class Recorder(pl.Callback):
        """Keeps the loss of each step, and what was logged until then."""

        def __init__(self) -> None:
            self.losses: list[torch.Tensor] = []
            self.metrics: list[dict[str, torch.Tensor]] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(outputs["loss"].detach().clone())
            self._keep(trainer)

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            self._keep(trainer)

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            self._keep(trainer)

        def _keep(self, trainer: Any) -> None:
            self.metrics.append({name: value.clone() for name, value in trainer.callback_metrics.items()})

    pl.seed_everything(1)
    made = entry.make(folder)
    devices, strategy = LAYOUTS[layout]
    recorder = Recorder()
    trainer = pl.Trainer(
        strategy=strategy(),
        devices=devices,
        accelerator="cpu",
        precision=entry.precision,
        max_epochs=2,
        callbacks=[recorder],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **made.trainer,
    )
    try:
        trainer.fit(made.module, made.train, made.validation)
    except ValueError as error:
        if trainer.global_step == 0 and _is_ours(error):
            _write(folder / f"rank{rank}.refused", str(error))
        raise
    trainer.save_checkpoint(folder / "final.ckpt")
    results = {"losses": recorder.losses, "metrics": recorder.metrics, "module": made.module.state_dict()}
    _write(folder / f"rank{rank}.pt", results)


def _is_ours(error: BaseException) -> bool:
    """Tell whether this package raised it, rather than the project or a library."""
    raised = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1]
    return Path(raised).is_relative_to(Path(lightning_parallel.__file__).parent)


def _write(path: Path, value: Any) -> None:
    """Write a file that is whole whenever it is there."""
    temporary = path.with_name(f"{path.name}.tmp")
    torch.save(value, temporary)
    os.replace(temporary, path)
