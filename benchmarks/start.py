"""From `fit` to the end of the first step: two pipeline stages beside one process; and the import of the library.

    python benchmarks/start.py [--parameters 2.64e8] [--repeat 3] [--profile FILE]

A Llama is built in `__init__` before the clock starts. One process and two stages train in turn in the same two
processes, with one thread each; the self-check of the first step is included. Printed is the least of each row, and
its ratio to one process. The first round, with a small model, loads libraries and is not counted.

The import is that of a new interpreter: processor time of `import lightning_parallel` after `import lightning.pytorch`.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.pytorch import Callback, LightningModule, Trainer
from real_size import Llama
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy

RANKS, BATCH, LENGTH = 2, 8, 64
# Garbage of torch and Lightning is collected before: its collection, 0.2 s, may fall into any later import.
IMPORTS = (
    "import gc, time, lightning.pytorch; gc.collect(); began = time.process_time(); import lightning_parallel;"
    "print(time.process_time() - began)"
)


class _FirstStep(Callback):
    """Notes when the first step has ended."""

    at_s = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.at_s = time.perf_counter()


def fit(module: Llama, strategy: Any, devices: int) -> float:
    """Train for one step; give the seconds from `fit` to its end."""
    first = _FirstStep()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[first],
    )
    ids = torch.randint(2048, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    began_s = time.perf_counter()
    trainer.fit(module, DataLoader(ids, BATCH))
    return first.at_s - began_s


def worker(rank: int, store: str, parameters: float, repeat: int, profile: str, queue: Any) -> None:
    """Train on one rank; rank 0 puts what was measured into `queue`."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    environment = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    found: dict[str, list[float]] = {"one process": [], "without the self-check": [], "two stages": []}
    for size in (1e6, *[parameters] * repeat):
        for name, seconds in found.items():
            is_alone = name == "one process"
            verify = "off" if name == "without the self-check" else "auto"
            os.environ.update(environment, LOCAL_RANK=str(0 if is_alone else rank), WORLD_SIZE=str(RANKS))
            torch.manual_seed(0)
            module = Llama(size, "init")
            dist.barrier()
            if is_alone and rank:
                continue  # its core is free meanwhile
            strategy: Any = "auto"
            if not is_alone:
                strategy = PipelineParallelStrategy(
                    pipeline_parallel_size=RANKS, num_microbatches=4, verify=verify, gather_after_fit="off"
                )
            recorder = cProfile.Profile()
            if profile and rank == 0 and name == "two stages" and size == parameters:
                taken = recorder.runcall(fit, module, strategy, RANKS)
                recorder.dump_stats(profile)
            else:
                taken = fit(module, strategy, 1 if is_alone else RANKS)
            if size == parameters:
                seconds.append(taken)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run the processes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=2.64e8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", default="", help="write what cProfile sees of the last fit on two stages")
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", options.parameters, options.repeat, options.profile, queue)
        torch.multiprocessing.spawn(worker, arguments, RANKS)
    found = queue.get()
    table = Table("from fit to the end of the first step", "seconds", "of one process")
    for name, seconds in found.items():
        table.add_row(name, f"{min(seconds):.2f}", f"{min(seconds) / min(found['one process']):.2f}")
    Console().print(table)
    # Without bytecode, which the first run writes, an import would mostly compile.
    writes = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", IMPORTS]
    runs = [subprocess.run(command, capture_output=True, text=True, env=writes) for _ in range(4)]
    print(f"import lightning_parallel: {min(float(run.stdout) for run in runs[1:]):.2f} s of processor time")


if __name__ == "__main__":
    main()
