"""The example GPT over a slow link: loss against wall-clock, dense and compressed, as a picture.

    sudo python benchmarks/slow_link_gpt.py [--hosts 2] [--rate 100] [--seconds 150] [--output slow_link.svg]

Both strategies train the same model on the same batches in the same order, for the same time, through Lightning's
Trainer, one after the other, on hosts that are network namespaces behind links shaped by `tc tbf`. Needs root, `ip`,
`tc` and matplotlib; says so and skips otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, Strategy
from shaped_network import Network, unavailable

from lightning_parallel import CompressedDDPStrategy, PowerSGD

STRATEGIES: dict[str, Any] = {"DDP": DDPStrategy, "PowerSGD(rank=4)": lambda: CompressedDDPStrategy(PowerSGD(rank=4))}
COLOURS = {"DDP": "#8a8f98", "PowerSGD(rank=4)": "#1f6feb"}
SMOOTHED = 20  # steps
BATCH = 4
SCHEDULED_STEPS = 2000  # of the learning rate; training ends before
SPARE_S = 120  # to start, to validate, to end
MODEL = {"layers": 4, "width": 256, "heads": 4, "learning_rate": 2e-3, "dropout": 0.0}


class Clock(Callback):
    """The loss after each step, with the seconds since training began."""

    def __init__(self) -> None:
        self.curve: list[tuple[float, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = float(trainer.callback_metrics["train_loss"])
        self.curve.append((time.perf_counter() - self._start, loss))


def work(arguments: argparse.Namespace) -> None:
    """Train as one host among others; the first one writes the curve."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))
    from data import StandardLibrary
    from model import ByteGPT

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=arguments.address, MASTER_PORT="29500", NODE_RANK=str(arguments.rank), LOCAL_RANK="0")
    seed_everything(1, verbose=False)
    strategy: Strategy = STRATEGIES[arguments.strategy]()
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=arguments.hosts,
        strategy=strategy,
        max_steps=SCHEDULED_STEPS,
        max_time=timedelta(seconds=arguments.seconds),
        callbacks=[clock],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=20,
    )
    module, data = ByteGPT(**MODEL), StandardLibrary(batch_size=BATCH)
    trainer.fit(module, data)
    validation = float(trainer.validate(module, data, verbose=False)[0]["val_loss"])
    if arguments.rank == 0:
        Path(arguments.results).write_text(json.dumps({"curve": clock.curve, "validation": validation}))


def train(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train by one strategy on a network of its own."""
    with tempfile.TemporaryDirectory() as folder, Network(arguments.hosts, arguments.rate) as network:
        results = Path(folder) / "results.json"
        command = [sys.executable, __file__, "--strategy", name, "--address", network.address(0)]
        command += ["--hosts", str(arguments.hosts), "--seconds", str(arguments.seconds), "--results", str(results)]
        commands = [[*command, "--rank", str(host)] for host in range(arguments.hosts)]
        codes = network.run(commands, deadline_s=arguments.seconds + SPARE_S)
        if any(code != 0 for code in codes):
            raise RuntimeError(f"{name}: the hosts ended with {codes}; None is too late")
        return json.loads(results.read_text())


def smooth(losses: Sequence[float]) -> list[float]:
    """Means over the last steps."""
    return [fmean(losses[max(0, end - SMOOTHED) : end]) for end in range(1, len(losses) + 1)]


def lead(found: dict[str, dict[str, Any]]) -> tuple[float | None, float]:
    """How many times sooner the compressed run reaches the last loss of the dense one, and that loss."""
    dense, compressed = (run["curve"] for run in found.values())
    loss = smooth([value for _, value in dense])[-1]
    values = smooth([value for _, value in compressed])
    reached = next((second for (second, _), value in zip(compressed, values) if value <= loss), None)
    return None if reached is None else dense[-1][0] / reached, loss


def draw(found: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "slow_link"
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, run in found.items():
        seconds, losses = zip(*run["curve"])
        label = f"{name}, {len(losses)} steps"
        axes.plot(seconds, smooth(losses), color=COLOURS[name], linewidth=1.8, label=label)
    sooner, loss = lead(found)
    if sooner is not None:
        axes.axhline(loss, color=COLOURS["DDP"], linewidth=0.8, linestyle=":")
        axes.annotate(f"{sooner:.1f} times sooner", (0.98 * arguments.seconds, loss), ha="right", va="top")
    axes.legend(frameon=False)
    axes.set_xlabel(f"seconds, {arguments.hosts} hosts, {arguments.rate:.0f} Mbit/s")
    axes.set_ylabel("training loss (nats per byte)")
    axes.set_ylim(bottom=0.9 * min(min(smooth([loss for _, loss in run["curve"]])) for run in found.values()))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, metadata={"Date": None} if arguments.output.endswith(".svg") else None)


def main() -> None:
    """Train twice, print the comparison, draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s")
    parser.add_argument("--seconds", type=float, default=150, help="for each strategy")
    parser.add_argument("--output", default="slow_link.svg")
    for hidden in ("--strategy", "--address", "--results"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.strategy is not None:
        work(arguments)
        return
    missing = "" if importlib.util.find_spec("matplotlib") else "matplotlib is not installed"
    reason = unavailable() or missing
    if reason:
        print(f"skipped: {reason}")
        return
    found = {name: train(name, arguments) for name in STRATEGIES}
    for name, run in found.items():
        print(f"{name:20} {len(run['curve']):6} steps, validation loss {run['validation']:.3f}")
    sooner, loss = lead(found)
    print(
        f"PowerSGD reaches the last training loss of DDP, {loss:.3f}, "
        + (f"{sooner:.1f} times sooner" if sooner else "never")
    )
    draw(found, arguments)


if __name__ == "__main__":
    main()
