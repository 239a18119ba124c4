"""Memory of each rank while a model is set up and trained that one rank does not hold.

    python benchmarks/real_size.py [--layout pipeline | hybrid] [--parameters 1e9] [--built-in configure_model | init]
        [--verify auto | off]

A Llama (https://arxiv.org/abs/2302.13971) is built in `configure_model` on four gloo processes, four stages or 2 x 2
with tensor parallelism, and takes three steps with SGD. Printed are the most bytes that each rank ever held above what
Python and its libraries take, beside the ideal:

    set-up     own parameters + the largest layer
    training   what the table of stages predicts: parameters, gradients, activations in flight

The self-check of the step is part of the training: its peak must not exceed that of `--verify off`.

Times are printed for orientation only: they are those of this machine.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.planner.rank_memory import planned_memory

RANKS, STEPS = 4, 3
BATCH, LENGTH = 8, 64
LAYOUTS = {"pipeline": (4, 1), "hybrid": (2, 2)}  # pipeline x tensor ranks
GIB = 2**30


def config_of(parameters: float) -> transformers.LlamaConfig:
    """Give the configuration of a Llama of about so many parameters, in the proportions of the one with 1.1 billion."""
    layers = 22 if parameters > 3e8 else 8
    width = 64 * max(1, round((parameters / (layers * 10.5)) ** 0.5 / 64))
    return transformers.LlamaConfig(
        vocab_size=32000 if parameters > 3e8 else 2048,
        hidden_size=width,
        intermediate_size=round(2.75 * width / 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 64 // 4) if width % 256 == 0 else width // 64,
        use_cache=False,
    )


class Llama(LightningModule):
    """Predicts the next token."""

    def __init__(self, parameters: float, built_in: str) -> None:
        super().__init__()
        self.config = config_of(parameters)
        self.model: Any = None
        if built_in == "init":
            self.configure_model()

    def configure_model(self) -> None:
        """Build the model, where the strategy decides what of it gets memory."""
        if self.model is None:
            self.model = transformers.LlamaForCausalLM(self.config)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        """Cross-entropy of the next tokens."""
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD, which has no state."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def peak_bytes() -> int:
    """Give the most bytes that this process has held since `forget_peak`."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def forget_peak() -> int:
    """Let the peak begin anew; gives the bytes held now."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak_bytes()


class _Memory(Callback):
    """Peaks of set-up and training, and what they should be."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.base = forget_peak()
        self.began_s = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.setup_bytes = peak_bytes() - self.base
        self.setup_s = time.perf_counter() - self.began_s
        forget_peak()
        self.own_bytes = sum(value.numel() * value.element_size() for value in pl_module.parameters())
        engine = trainer.strategy.run.engine
        layers = list(engine.plan.layers)
        sizes = dict.fromkeys(layers, 0)
        for name, parameter in engine.plan.parameters.items():
            for layer in layers:
                if name.startswith(f"{layer}."):
                    sizes[layer] += parameter.num_bytes
        outer = [parameter.num_bytes for name, parameter in engine.plan.parameters.items() if "layers." not in name]
        # The plan has shards; a layer is made whole, and divided then.
        self.largest_bytes = max(*sizes.values(), *outer) * trainer.strategy.groups.tensor_parallel.size
        stages = engine.stages
        self.predicted_bytes = planned_memory(engine.plan, stages, 2.0).total

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.step_s = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.train_bytes = peak_bytes() - self.base
        self.step_s = time.perf_counter() - self.step_s


def worker(rank: int, store: str, layout: str, parameters: float, built_in: str, verify: Any, queue: Any) -> None:
    """Train on one rank; put what was measured into `queue`."""
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="29400"
    )
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // RANKS))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    for size in (1e6, parameters):  # with a small model first: what it loads of libraries is not counted
        memory = _Memory()
        fit(Llama(size, built_in), layout, verify, memory)
    queue.put((rank, {name: value for name, value in vars(memory).items() if isinstance(value, int | float)}))
    dist.destroy_process_group()


def fit(module: Llama, layout: str, verify: Any, memory: Callback) -> None:
    """Train for a few steps."""
    pipeline, tensor = LAYOUTS[layout]
    strategy = HybridParallelStrategy(
        pipeline_parallel_size=pipeline, tensor_parallel_size=tensor, num_microbatches=BATCH // 2, verify=verify
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[memory],
    )
    ids = torch.randint(2048, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(ids, BATCH))


def main() -> None:
    """Run the processes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=LAYOUTS, default="pipeline")
    parser.add_argument("--parameters", type=float, default=1.1e9)
    parser.add_argument("--built-in", choices=("configure_model", "init"), default="configure_model")
    parser.add_argument("--verify", choices=("auto", "off"), default="auto", help="with the self-check or without")
    options = parser.parse_args()
    # Blocks go back to the system as soon as they are freed: what is measured is what is held, not what malloc keeps.
    os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536", MALLOC_ARENA_MAX="1")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", options.layout, options.parameters, options.built_in, options.verify, queue)
        torch.multiprocessing.spawn(worker, arguments, RANKS)
    found = dict(queue.get() for _ in range(RANKS))
    pipeline, tensor = LAYOUTS[options.layout]
    with torch.device("meta"):
        count = sum(
            value.numel() for value in transformers.LlamaForCausalLM(config_of(options.parameters)).parameters()
        )
    table = Table(
        title=f"Llama of {count / 1e9:.2f} billion parameters, {pipeline} stages x {tensor} tensor ranks, GiB"
    )
    for name in ("rank", "own parameters", "set-up", "ideal", "ratio", "training", "predicted", "ratio"):
        table.add_column(name, justify="right")
    for rank in range(RANKS):
        row = found[rank]
        setup_ideal = row["own_bytes"] + row["largest_bytes"]
        train_ideal = row["predicted_bytes"]
        cells = [row["own_bytes"], row["setup_bytes"], setup_ideal, row["train_bytes"], train_ideal]
        own, setup, setup_best, train, train_best = (f"{cell / GIB:.2f}" for cell in cells)
        setup_ratio = f"{row['setup_bytes'] / setup_ideal:.2f}"
        train_ratio = f"{row['train_bytes'] / train_ideal:.2f}"
        table.add_row(str(rank), own, setup, setup_best, setup_ratio, train, train_best, train_ratio)
    Console().print(table)
    Console().print(f"set-up {found[0]['setup_s']:.0f} s, last step {found[0]['step_s']:.0f} s")


if __name__ == "__main__":
    main()
