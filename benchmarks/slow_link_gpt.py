"""The example GPT over a slow link: loss against wall-clock and bytes sent, by several strategies, as a picture.

    sudo python benchmarks/slow_link_gpt.py [--hosts 2] [--rate 100] [--seconds 150] [--output slow_link.svg] [--record]

All strategies train the same model on the same batches in the same order, for the same time, through Lightning's
Trainer, one after the other, on hosts that are network namespaces behind links shaped by `tc tbf`. Bytes are those that
the first host's interface has sent, headers included. Needs root, `ip`, `tc` and matplotlib; says so and skips
otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, Strategy
from results import record
from shaped_network import Network, unavailable
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_parallel import CompressedDDPStrategy, LocalSGDStrategy, PowerSGD, Quantize, TopK

EVERY, DENSE_STEPS = 20, 20  # the latter of torch's method


class PostLocalSGD(DDPStrategy):
    """What torch has for local steps, which Lightning's DDPStrategy leaves out where there is no CUDA."""

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        # Groups of one rank: steps are local once they begin.
        alone, _ = dist.new_subgroups(group_size=1)
        self.model.register_comm_hook(PostLocalSGDState(None, alone, DENSE_STEPS), post_localSGD_hook)
        self._averager = PeriodicModelAverager(period=EVERY, warmup_steps=DENSE_STEPS)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        assert self.model is not None
        self._averager.average_parameters(self.model.parameters())
        return output


STRATEGIES: dict[str, Any] = {
    "DDP": DDPStrategy,
    "PowerSGD(rank=4)": lambda: CompressedDDPStrategy(PowerSGD(rank=4)),
    "torch's post-local SGD": PostLocalSGD,
    "local SGD, 4 bits": lambda: LocalSGDStrategy(EVERY, Quantize(4), "nesterov"),
    # As SparseLoCo has it, without outer momentum.
    "local SGD, 10 % in 2 bits": lambda: LocalSGDStrategy(
        EVERY, TopK(0.1, chunk=4096, feedback="fading") | Quantize(2)
    ),
    "local Muon, 4 bits": lambda: LocalSGDStrategy(EVERY, Quantize(4), "nesterov"),
}
COLOURS = dict(zip(STRATEGIES, ("#8a8f98", "#1f6feb", "#c98500", "#1a7f37", "#8250df", "#cf222e")))
SMOOTHED = 20  # steps
BATCH = 4
SCHEDULED_STEPS = 2000  # of the learning rate; training ends before
SPARE_S = 120  # to start, to validate, to end
MODEL = {"layers": 4, "width": 256, "heads": 4, "learning_rate": 2e-3, "dropout": 0.0}


class Point(NamedTuple):
    """After one step: seconds and bytes sent since training began, and the loss."""

    seconds: float
    sent: float
    loss: float


def sent_bytes() -> int:
    """Bytes sent through all interfaces of this host but the one to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(field[9]) for field in fields if field[0] != "lo")


class Meter(Callback):
    """The loss after each step, with what it has taken."""

    def __init__(self) -> None:
        self.curve: list[Point] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start, self._sent = time.perf_counter(), sent_bytes()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = float(trainer.callback_metrics["train_loss"])
        self.curve.append(Point(time.perf_counter() - self._start, sent_bytes() - self._sent, loss))


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of the blocks and AdamW for the rest, in one optimizer: one step before an exchange.

    `torch.optim.Muon` multiplies in bf16, which takes most processors seconds for each matrix; this multiplies in fp32.
    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; as an inner optimizer: MuLoCo, arXiv
    2505.23725.
    """

    def __init__(self, groups: list[dict[str, Any]], learning_rate: float) -> None:
        super().__init__(groups, {"lr": learning_rate})
        self.adamw = torch.optim.AdamW([self.param_groups[1]], betas=(0.9, 0.95))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take the steps of both."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        matrices, others = self.param_groups
        for value in matrices["params"]:
            momentum = self.state[value].setdefault("momentum", torch.zeros_like(value))
            momentum.lerp_(value.grad, 0.05)
            update = orthogonal(value.grad.lerp(momentum, 0.95))
            value.mul_(1 - matrices["lr"] * matrices["weight_decay"])
            # With the root mean square of AdamW's steps, so that both take one learning rate.
            value.sub_(update, alpha=matrices["lr"] * 0.2 * max(value.shape) ** 0.5)
        self.adamw.param_groups[0]["lr"] = others["lr"]
        self.adamw.step()
        return loss


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with about the singular vectors of `matrix`, all of whose singular values are about 1."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp_min(1e-7)
    for _ in range(5):  # Newton and Schulz
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def with_muon(optimizers: Any) -> Any:
    """What `configure_optimizers` returns, with Muon for its first group, of matrices."""
    adamw = optimizers["optimizer"]
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in adamw.param_groups]
    schedule = optimizers["lr_scheduler"]["scheduler"]
    optimizer = MuonAndAdamW(groups, schedule.base_lrs[0])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.lr_lambdas)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def work(arguments: argparse.Namespace) -> None:
    """Train as one host among others; the first one writes the curve."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))
    from data import StandardLibrary
    from model import ByteGPT

    class MuonGPT(ByteGPT):
        def configure_optimizers(self) -> Any:
            return with_muon(super().configure_optimizers())

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=arguments.address, MASTER_PORT="29500", NODE_RANK=str(arguments.rank), LOCAL_RANK="0")
    seed_everything(1, verbose=False)
    strategy: Strategy = STRATEGIES[arguments.strategy]()
    meter = Meter()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=arguments.hosts,
        strategy=strategy,
        max_steps=arguments.steps or SCHEDULED_STEPS,
        max_time=timedelta(seconds=arguments.seconds),
        callbacks=[meter],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=20,
    )
    model = MuonGPT if "Muon" in arguments.strategy else ByteGPT
    module, data = model(**MODEL), StandardLibrary(batch_size=BATCH)
    trainer.fit(module, data)
    validation = float(trainer.validate(module, data, verbose=False)[0]["val_loss"])
    if arguments.rank == 0:
        Path(arguments.results).write_text(json.dumps({"curve": meter.curve, "validation": validation}))


def train(name: str, arguments: argparse.Namespace, steps: int = 0) -> dict[str, Any]:
    """Train by one strategy on a network of its own; for the time given, or at most so many steps."""
    with tempfile.TemporaryDirectory() as folder, Network(arguments.hosts, arguments.rate) as network:
        results = Path(folder) / "results.json"
        command = [sys.executable, __file__, "--strategy", name, "--address", network.address(0), "--steps", str(steps)]
        command += ["--hosts", str(arguments.hosts), "--seconds", str(arguments.seconds), "--results", str(results)]
        commands = [[*command, "--rank", str(host)] for host in range(arguments.hosts)]
        codes = network.run(commands, deadline_s=arguments.seconds + SPARE_S)
        if any(code != 0 for code in codes):
            raise RuntimeError(f"{name}: the hosts ended with {codes}; None is too late")
        found = json.loads(results.read_text())
    return {**found, "curve": [Point(*point) for point in found["curve"]]}


def smooth(losses: Sequence[float]) -> list[float]:
    """Means over the last steps."""
    return [fmean(losses[max(0, end - SMOOTHED) : end]) for end in range(1, len(losses) + 1)]


def smoothed(run: dict[str, Any]) -> list[Point]:
    """The curve of a run with smoothed losses."""
    losses = smooth([point.loss for point in run["curve"]])
    return [point._replace(loss=loss) for point, loss in zip(run["curve"], losses)]


def report(found: dict[str, dict[str, Any]], at_equal_steps: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Print what each strategy has reached, and what it took to reach DDP's last loss; return the figures to record."""
    figures = {}
    dense = smoothed(found["DDP"])
    last = dense[-1]
    print(f"DDP: {len(dense)} steps, {last.sent / 2**20:.1f} MiB, training loss {last.loss:.3f}")
    titles = "".join(f"{title:^28}" for title in ("in the same time", "at the same steps", "to the loss of DDP"))
    print(f"{'':28}{titles}{'same bytes':>10}{'peak':>8}")
    heads = ("steps", "loss", "val"), ("val", "/ DDP", "1/bytes"), ("steps", "times", "1/bytes")
    print(f"{'':28}" + "".join(f"{a:>10}{b:>9}{c:>9}" for a, b, c in heads) + f"{'loss':>10}{'MiB':>8}")
    for name, run in found.items():
        curve, equal = smoothed(run), at_equal_steps[name]
        cells = [f"{len(curve)}", f"{curve[-1].loss:.3f}", f"{run['validation']:.3f}"]
        less = last.sent / equal["curve"][-1].sent
        ratio = equal["validation"] / found["DDP"]["validation"]
        figures[name] = {"steps": len(curve), "loss": round(ratio, 4), "fewer_bytes": round(less, 2)}
        cells += [f"{equal['validation']:.3f}", f"{ratio:.3f}", f"{less:.1f}"]
        number = next((number for number, point in enumerate(curve) if point.loss <= last.loss), None)
        if number is None:
            cells += ["-"] * 3
        else:
            point = curve[number]
            cells += [f"{number + 1}", f"{last.seconds / point.seconds:.1f}", f"{last.sent / point.sent:.1f}"]
        within = [point for point in curve if point.sent <= last.sent]
        print(f"{name:28}" + "".join(f"{cell:>{10 if i % 3 == 0 else 9}}" for i, cell in enumerate(cells)), end="")
        # The bytes of one step are what a link has to carry at once.
        peak = max(after.sent - before.sent for before, after in itertools.pairwise(equal["curve"]))
        figures[name]["peak_mib"] = round(peak / 2**20, 2)
        print(f"{within[-1].loss:>10.3f}{peak / 2**20:>8.2f}", flush=True)
    return figures


def draw(found: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write the picture: loss against seconds, and against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "slow_link"
    figure, (by_time, by_bytes) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for name, run in found.items():
        curve = smoothed(run)
        style = {"color": COLOURS[name], "linewidth": 1.8, "label": f"{name}, {len(curve)} steps"}
        by_time.plot([point.seconds for point in curve], [point.loss for point in curve], **style)
        by_bytes.plot([max(1, point.sent) / 2**20 for point in curve], [point.loss for point in curve], **style)
    last = smoothed(found["DDP"])[-1]
    for axes in (by_time, by_bytes):
        axes.axhline(last.loss, color=COLOURS["DDP"], linewidth=0.8, linestyle=":")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    by_time.legend(frameon=False, fontsize=8)
    by_time.set_xlabel(f"seconds, {arguments.hosts} hosts, {arguments.rate:.0f} Mbit/s")
    by_bytes.set_xlabel("MiB sent by one host")
    by_bytes.set_xscale("log")
    by_bytes.set_xlim(left=0.1)
    by_time.set_ylabel("training loss (nats per byte)")
    # The first steps, which all take alike, are far above.
    by_time.set_ylim(0.95 * min(point.loss for run in found.values() for point in smoothed(run)), 1.7 * last.loss)
    by_time.set_xlim(left=0)
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, metadata={"Date": None} if arguments.output.endswith(".svg") else None)


def main() -> None:
    """Train by each strategy, print the comparison, draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s")
    parser.add_argument("--seconds", type=float, default=150, help="for each strategy")
    parser.add_argument("--output", default="slow_link.svg")
    parser.add_argument("--only", nargs="+", default=list(STRATEGIES)[1:], choices=STRATEGIES, help="beside DDP")
    parser.add_argument("--record", action="store_true", help="write the figures to benchmarks/results.json")
    for hidden in ("--strategy", "--address", "--results"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--steps"):
        parser.add_argument(hidden, type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.strategy is not None:
        work(arguments)
        return
    missing = "" if importlib.util.find_spec("matplotlib") else "matplotlib is not installed"
    reason = unavailable() or missing
    if reason:
        print(f"skipped: {reason}")
        return
    chosen = ["DDP", *arguments.only]
    found = {name: train(name, arguments) for name in chosen}
    steps = len(found["DDP"]["curve"])
    equal = {name: found[name] if name == "DDP" else train(name, arguments, steps) for name in chosen}
    figures = report(found, equal)
    if arguments.record:
        record("slow_link_gpt", figures)
    draw(found, arguments)


if __name__ == "__main__":
    main()
