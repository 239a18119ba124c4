"""Data-parallel training over slow links: compressed gradients against DDP, as ratios.

    sudo python benchmarks/slow_link.py [--hosts 2 4] [--rates 100 1000] [--steps 10] [--compute-ms 100]

Hosts are network namespaces whose links are shaped by `tc tbf`; they talk gloo over TCP. All methods train copies of
one MLP of 5.3 million parameters, in turn, in one process group. Per method:

    step        median over the steps, of the slowest host
    speed-up    step of DDP / step
    sent        bytes that the interface of host 0 has sent in a step, headers included
    exposed     step - the same step without communication
    bound       step / max(compute, sent / rate); the target is at most 1.25 for PowerSGD
    codec       nanoseconds that the host takes per parameter to encode and decode, in the fastest step

Where hosts have no core to spare, a step takes compute + codec, however well they overlap. With `--compute-ms` layers
sleep instead, as if a device computed, and each is a bucket of its own.

Then torch's own PowerSGD hook runs with two buckets. Without root, `ip` or `tc` nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from shaped_network import Network, unavailable
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel import Cast, PowerSGD, Quantize, Sign, TopK
from lightning_parallel.compression import HookState, Reducer, compression_hook

WIDTH, LAYERS, CLASSES, BATCH = 1024, 5, 10, 64
SLEEPING_LAYERS = 12
ONE_BUCKET_MB = 1000
SMALL_BUCKET_MB = 4  # one layer: its factors are small, and travel while the next layer's gradient is computed
TARGETS = {100: 20.0, 1000: 3.0}  # speed-up of PowerSGD(4), by the rate in Mbit/s
Step = Callable[[], None]


class Side(NamedTuple):
    """One method: a training step, how to let go of what it holds, and our compressor, if it is one."""

    step: Step
    close: Callable[[], None]
    compressor: Reducer | None = None


def _nothing() -> None:
    pass


class _Sleep(Function):
    """Passes its input on; its backward takes `seconds`, and gives the weight a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, ctx.gradient, None, None


class SleepingLayer(nn.Module):
    """A weight whose gradient is the same in each step, and takes `backward_s`."""

    def __init__(self, backward_s: float) -> None:
        super().__init__()
        self.backward_s = backward_s
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.gradient = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> the same."""
        return _Sleep.apply(x, self.weight, self.gradient, self.backward_s)


compute_ms: float | None = None  # of the layers, if they sleep


def mlp() -> nn.Module:
    """5.3 million parameters, or 12.6 in layers that sleep."""
    if compute_ms is not None:
        layers = [SleepingLayer(compute_ms / 1e3 / SLEEPING_LAYERS) for _ in range(SLEEPING_LAYERS)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def data() -> tuple[Tensor, Tensor]:
    """A batch of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def stepper(called: nn.Module, finish: Step = _nothing) -> Step:
    """Forward, backward with its reduction, SGD."""
    x, y = data()
    optimizer = torch.optim.SGD(called.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(called(x), y).backward()
        finish()
        optimizer.step()

    return step


def alone() -> Side:
    """No communication at all."""
    return Side(stepper(mlp()), _nothing)


def with_torch_hook(hook: Any = None, state: Callable[[], Any] = _nothing, bucket_cap_mb: int | None = None) -> Side:
    """DDP, with one of torch's hooks."""
    model = DistributedDataParallel(mlp(), bucket_cap_mb=bucket_cap_mb)
    if hook is not None:
        model.register_comm_hook(state(), hook)
    return Side(stepper(model), _nothing)


def torch_powersgd(bucket_cap_mb: int | None = None) -> Side:
    """Torch's PowerSGD hook, which compresses from its third step on."""
    return with_torch_hook(
        powerSGD_hook.powerSGD_hook,
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2),
        bucket_cap_mb,
    )


def ours(compressor: Reducer, bucket_cap_mb: float | None = None) -> Side:
    """DDP with one of this library's compressors."""
    bucket_cap_mb = SMALL_BUCKET_MB if compute_ms is not None else bucket_cap_mb
    model = DistributedDataParallel(mlp(), bucket_cap_mb=bucket_cap_mb)
    state = HookState(compressor, model, bucket_bytes=model.bucket_bytes_cap)
    model.register_comm_hook(state, compression_hook)
    return Side(stepper(model, lambda: state.finish() and None), state.close, compressor)


METHODS: dict[str, Callable[[], Side]] = {
    "no communication": alone,
    "DDP": with_torch_hook,
    "torch fp16 hook": lambda: with_torch_hook(default_hooks.fp16_compress_hook),
    "torch PowerSGD(4), one bucket": lambda: torch_powersgd(ONE_BUCKET_MB),
    "PowerSGD(4)": lambda: ours(PowerSGD(4)),
    "PowerSGD(4), small buckets": lambda: ours(PowerSGD(4), SMALL_BUCKET_MB),
    "PowerSGD(4, alternate=True)": lambda: ours(PowerSGD(4, alternate=True)),
    "TopK(0.02)": lambda: ours(TopK(0.02)),
    "TopK(0.02) | Quantize(8)": lambda: ours(TopK(0.02) | Quantize(8)),
    "Quantize(8)": lambda: ours(Quantize(8)),
    "Quantize(4)": lambda: ours(Quantize(4)),
    "Sign()": lambda: ours(Sign()),
    "Cast('bf16')": lambda: ours(Cast("bf16")),
}


class Measured(NamedTuple):
    """One method on one network."""

    name: str
    step_s: float
    sent_bytes: float
    codec_ns: float | None = None


def sent_bytes() -> int:
    """What the interface of this host has sent so far; 0 where there is none of its own."""
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def measure(name: str, steps: int) -> Measured:
    """Time one method; every rank gets the same result."""
    side = METHODS[name]()
    for _ in range(3):
        side.step()
    dist.barrier()
    taken, codec_s, before = [], [], sent_bytes()
    for _ in range(steps):
        start = time.perf_counter()
        side.step()
        taken.append(time.perf_counter() - start)
        if side.compressor is not None:
            codec_s.append(side.compressor.seconds.encode + side.compressor.seconds.decode)
    sent = (sent_bytes() - before) / steps
    slowest = torch.tensor(statistics.median(taken), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    side.close()
    count = sum(parameter.numel() for parameter in mlp().parameters())
    return Measured(name, float(slowest), sent, min(codec_s) * 1e9 / count if codec_s else None)


def join(arguments: argparse.Namespace) -> None:
    """Meet the other hosts."""
    torch.set_num_threads(1)
    address = f"tcp://{arguments.address}:29500"
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", address, timeout, rank=arguments.rank, world_size=arguments.world_size)


def work(arguments: argparse.Namespace) -> None:
    """Measure the methods, as one host among others; the first one writes the results."""
    global compute_ms
    compute_ms = arguments.compute_ms
    join(arguments)
    found = []
    for name in arguments.methods:
        dense = name in ("DDP", "torch fp16 hook", "Cast('bf16')")
        found.append(measure(name, max(arguments.steps // 3, 2) if dense else arguments.steps))
        if arguments.rank == 0:
            Path(arguments.results).write_text(json.dumps(found))
    dist.destroy_process_group()


def work_on_two_buckets(arguments: argparse.Namespace) -> None:
    """Take a few steps with torch's PowerSGD hook in several buckets."""
    join(arguments)
    side = torch_powersgd(bucket_cap_mb=8)
    for _ in range(6):
        side.step()


def commands(network: Network, task: str, *options: str) -> list[list[str]]:
    """This script on every host."""
    script = [sys.executable, __file__, "--task", task, "--world-size", str(network.hosts)]
    script += ["--address", network.address(0), *options]
    return [[*script, "--rank", str(host)] for host in range(network.hosts)]


def compare(hosts: int, rate_mbit: int, steps: int, methods: list[str], sleep_ms: float | None = None) -> None:
    """Print the table of one network."""
    with tempfile.TemporaryDirectory() as folder, Network(hosts, rate_mbit) as network:
        results = Path(folder) / "results.json"
        options = ["--steps", str(steps), "--results", str(results), "--methods", *methods]
        options += [] if sleep_ms is None else ["--compute-ms", str(sleep_ms)]
        codes = network.run(commands(network, "work", *options), deadline_s=600)
        found = [Measured(*row) for row in json.loads(results.read_text())] if results.exists() else []
    by_name = {row.name: row for row in found}
    compute_s = by_name["no communication"].step_s
    print(f"\n{hosts} hosts, {rate_mbit} Mbit/s; a step without communication takes {compute_s * 1e3:.0f} ms")
    print(f"{'':32} {'step ms':>8} {'speed-up':>9} {'sent MB':>9} {'exposed ms':>11} {'bound':>6} {'codec':>6}")
    for row in found[1:]:
        bound = row.step_s / max(compute_s, row.sent_bytes * 8 / (rate_mbit * 1e6))
        codec = "" if row.codec_ns is None else f"{row.codec_ns:.2f}"
        target = f"  target: >= {TARGETS[rate_mbit]:.0f}, <= 1.25" if row.name == "PowerSGD(4)" else ""
        print(
            f"{row.name:32} {row.step_s * 1e3:8.1f} {by_name['DDP'].step_s / row.step_s:9.2f} "
            f"{row.sent_bytes / 1e6:9.3f} {(row.step_s - compute_s) * 1e3:11.1f} {bound:6.2f} {codec:>6}{target}"
        )
    if any(codes):
        print(f"the hosts ended with {codes}; what is missing above did not survive")


def show_two_buckets() -> None:
    """Print what becomes of torch's PowerSGD hook with several buckets."""
    deadline_s = 30
    with Network(2, 1000) as network:
        codes = network.run(commands(network, "two-buckets"), deadline_s)
    if None in codes:
        verdict = f"no end of six steps after {deadline_s} s: a deadlock"
    elif any(codes):
        verdict = f"the processes end with {codes}"
    else:
        verdict = "six steps went well this time"
    print(f"\ntorch's PowerSGD hook with several buckets on gloo: {verdict}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 1000], help="Mbit/s")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="those compared with DDP")
    parser.add_argument("--compute-ms", type=float, help="that the layers of a step sleep, instead of computing")
    for hidden in ("--task", "--address", "--results"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--world-size"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task is not None:
        {"work": work, "two-buckets": work_on_two_buckets}[arguments.task](arguments)
        return
    reason = unavailable()
    if reason:
        print(f"slow links are skipped: {reason}")
    else:
        methods = list(dict.fromkeys(["no communication", "DDP", *arguments.methods]))
        for hosts in arguments.hosts:
            for rate_mbit in arguments.rates:
                compare(hosts, rate_mbit, arguments.steps, methods, arguments.compute_ms)
        if arguments.compute_ms is None:
            show_two_buckets()


if __name__ == "__main__":
    main()
