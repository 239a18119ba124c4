"""Tensor parallelism against a hand-written DTensor plan, sequence parallelism against without, and parts of models.

    python benchmarks/tensor_parallel.py [plan] [sequence] [experts] [head]
        [--widths 128 256 512 1024] [--steps 30] [--ranks 2] [--threads 1] [--implementation grouped_mm]
        [--vocabulary 50257]
    sudo python benchmarks/tensor_parallel.py overlap
        [--hosts 2 4] [--rate 600] [--compute-ms 100 200] [--length 2048] [--rounds 6]

    plan      the same transformer (pre-norm blocks, separate query, key and value): ours / DTensor
    sequence  the same with sequence parallelism / without; also the bytes that a rank keeps for backward
    experts   transformers' Mixtral (eight experts, two for each token): ours / one process, the first rank alone with
              as many threads; and the share of the parameters that a rank holds
    head      a head without bias and `F.cross_entropy` of 512 targets, whose logits stay divided, are gathered (ours,
              with `gather_logits`), or are DTensors under `loss_parallel`; and the most bytes of tensors that a step
              makes, over those of all logits
    overlap   a layer with sequence parallelism on hosts whose links are shaped by `tc tbf`. Products sleep, as if
              devices computed: the given time in forward, and twice as long in backward. `exposed` is the share of the
              communication that a step waits for, above a step without communication: with communication before and
              after whole products, and with both in spans. From the least time of each in all rounds. Without root,
              `ip` or `tc` it is skipped

The same input, forward + backward, and an SGD step but for the head. Steps of all alternate, so that a change of the
machine's speed meets them alike. Only ratios are printed, below 1 is faster. They depend on the threads per rank.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import in_turn
from gpu_models import Block
from rich.console import Console
from rich.table import Table
from shaped_network import Network, unavailable
from sleeping import LiveBytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import patched
from lightning_parallel.tensor import linear
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.head import Head
from lightning_parallel.tensor.layers import Column, Row, Style
from lightning_parallel.tensor.plan import Plan, apply_plan

TARGETS = {128: 0.45, 256: 0.55, 512: 0.75, 1024: 0.95}
BATCH, LENGTH, LAYERS, WARMUP = 4, 128, 4, 3


def _stepper(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    return step


def _pair(width: int) -> dict[str, Callable[[], None]]:
    """One step of each contender; both start from the same weights."""
    ours = _blocks(width)
    theirs = copy.deepcopy(ours)
    group = Group.of(axis="tensor_parallel")
    plan = make_plan(ours, "auto", group)
    assert not plan.notes, plan.notes
    apply_plan(ours, plan, group)
    mesh = init_device_mesh("cpu", (group.size,))
    styles = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    for block in theirs:
        parallelize_module(block, mesh, {**styles, "out": RowwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(BATCH, LENGTH, width)
    return {"ours": _stepper(ours, x), "DTensor": _stepper(theirs, x)}


def _experts(width: int, implementation: str) -> tuple[dict[str, Callable[[], None]], float]:
    """One step of each contender on a Mixture of Experts, and the share of the parameters that a rank holds."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(4, width // 64),
        num_key_value_heads=max(2, width // 128),
        num_local_experts=8,
        vocab_size=256,
    )
    torch.manual_seed(0)
    whole = MixtralForCausalLM(config)
    whole.set_experts_implementation(implementation)
    ours = copy.deepcopy(whole)
    group = Group.of(axis="tensor_parallel")
    apply_plan(ours, make_plan(ours, "auto", group), group)
    held = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, whole)]
    tokens = torch.randint(256, (BATCH, LENGTH))

    def stepper(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        return step

    alone = stepper(whole) if group.rank == 0 else lambda: None
    return {"ours": stepper(ours), "one process": alone}, held[0] / held[1]


def _blocks(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, max(4, width // 64)) for _ in range(LAYERS)))


def _sequence_pair(width: int) -> tuple[dict[str, Callable[[], None]], float]:
    """One step with sequence parallelism and one without, and the ratio of the bytes that are kept for backward."""
    group = Group.of(axis="tensor_parallel")
    x = torch.randn(BATCH, LENGTH, width)
    steps, kept = {}, {}
    for name, sequence_parallel in (("with", True), ("without", False)):
        model = _blocks(width)
        apply_plan(model, make_plan(model, "auto", group, sequence_parallel), group)
        steps[name], kept[name] = _stepper(model, x), _kept_bytes(model, x)
    return steps, kept["with"] / kept["without"]


def _kept_bytes(model: nn.Module, x: Tensor) -> int:
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(x)
    del output
    return sum(sizes.values())


def _heads(width: int, vocabulary: int) -> dict[str, Callable[[], None]]:
    """One forward and backward of a head with its loss, for each contender."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    x, targets = torch.randn(BATCH * LENGTH, width), torch.randint(vocabulary, (BATCH * LENGTH,))
    group = Group.of(axis="tensor_parallel")
    mesh = init_device_mesh("cpu", (group.size,))
    styles: dict[str, Style] = {"divided": Head(), "gathered": Column(gather_output=True)}
    steps: dict[str, Callable[[], None]] = {}
    for name, style in styles.items():
        apply_plan(model := copy.deepcopy(whole), Plan({"1": style}), group)
        steps[name] = partial(_head_step, model, x, targets, nullcontext)
    theirs = parallelize_module(
        copy.deepcopy(whole), mesh, {"1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    )
    steps["loss_parallel"] = partial(_head_step, theirs, x, targets, loss_parallel)
    return steps


def _head_step(model: nn.Module, x: Tensor, targets: Tensor, around: Callable[[], Any]) -> None:
    model.zero_grad()
    with around():
        nn.functional.cross_entropy(model(x), targets).backward()


def _peak_bytes(step: Callable[[], None]) -> int:
    with LiveBytes() as live:
        step()
    return live.peak


# ------------------------------------------------------------------------------------------------------------- overlap


class _Products(TorchDispatchMode):
    """Lets products take the time of a device of a given speed, without a core; their results have any values.

    Attributes:
        flops: Of all products so far.
        seconds_per_flop: The time of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.seconds_per_flop = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name not in ("mm", "addmm", "addmm_", "bmm", "baddbmm"):
            return func(*args, **kwargs)
        one, other = args[-2:]
        flops = 2 * one.numel() * other.shape[-1]
        self.flops += flops
        if self.seconds_per_flop:
            time.sleep(flops * self.seconds_per_flop)
        if name == "addmm_":
            return args[0]
        return kwargs.get("out", one.new_zeros(()).expand(*one.shape[:-1], other.shape[-1]).contiguous())


class _Layer(nn.Module):
    """The products of a transformer block, without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions of this rank, width) -> the same."""
        x = x + self.out(self.qkv(self.norm(x)).chunk(3, -1)[0].contiguous())
        return x + self.down(self.up(self.mlp_norm(x)))


@contextmanager
def _side(name: str, products: _Products, seconds_per_flop: float) -> Iterator[None]:
    with ExitStack() as stack:
        if name == "alone":
            stack.enter_context(comm.skip_communication())
        if name in ("whole", "messages"):
            stack.enter_context(patched(linear, "MIN_SPAN_BYTES", {}))
        products.seconds_per_flop = 0.0 if name == "messages" else seconds_per_flop
        yield


def time_overlap(options: argparse.Namespace) -> None:
    """Measure the sides, as one host among others; the first one writes the results."""
    torch.set_num_threads(1)
    address = f"tcp://{options.address}:29500"
    dist.init_process_group("gloo", address, timedelta(seconds=120), rank=options.rank, world_size=options.ranks)
    group, width = Group.of(axis="tensor_parallel"), options.widths[0]
    torch.manual_seed(0)
    model = _Layer(width)
    column, row = Column(sequence_dim=1), Row(sequence_dim=1)
    styles: dict[str, Style] = {"qkv": column, "out": row, "up": column, "down": row}
    apply_plan(model, Plan(styles), group)
    lengths = linear.shared_inputs(group, 1).lengths
    assert lengths is not None
    x = torch.randn(1, lengths.divide(options.length)[group.rank], width, requires_grad=True)

    def step(name: str, seconds_per_flop: float) -> None:
        with products, _side(name, products, seconds_per_flop):
            model(x).backward(x.detach())

    found = []
    with (products := _Products()):
        model(x)
    flops = products.flops
    for compute_ms in options.compute_ms:
        runs = [partial(step, name, compute_ms / 1e3 / flops) for name in ("alone", "messages", "whole", "in spans")]
        # In turn: what else runs on the machine slows all of them.
        found.append([compute_ms, *map(min, in_turn(runs, group, options.rounds))])
    if group.rank == 0:
        Path(options.results).write_text(json.dumps(found))
    dist.destroy_process_group()


def show_overlap(options: argparse.Namespace) -> None:
    """Print a table for each number of hosts."""
    if reason := unavailable():
        print(f"overlap is skipped: {reason}")
        return
    width = options.widths[0] if options.widths != list(TARGETS) else 1024
    for hosts in options.hosts:
        with tempfile.TemporaryDirectory() as folder, Network(hosts, options.rate) as network:
            results = Path(folder) / "results.json"
            script = [sys.executable, __file__, "overlap", "--ranks", str(hosts), "--results", str(results)]
            script += ["--address", network.address(0), "--length", str(options.length), "--widths", str(width)]
            script += ["--rounds", str(options.rounds), "--compute-ms", *map(str, options.compute_ms)]
            network.run([[*script, "--rank", str(host)] for host in range(hosts)], deadline_s=600)
            found = json.loads(results.read_text())
        table = Table(title=f"{hosts} hosts, {options.rate} Mbit/s, {options.length} positions; products sleep")
        for header in ("forward", "communication / products", "exposed, whole", "exposed, in spans", "step / whole"):
            table.add_column(header, justify="right")
        for compute_ms, alone_s, messages_s, whole_s, spans_s in found:
            exposed = [(seconds - alone_s) / messages_s for seconds in (whole_s, spans_s)]
            ratios = [messages_s / alone_s, *exposed, spans_s / whole_s]
            table.add_row(f"{compute_ms:.0f} ms", *(f"{ratio:.2f}" for ratio in ratios))
        Console().print(table)


def plan(options: argparse.Namespace) -> Table:
    """Our plan against one of DTensor."""
    table = _table("ours / DTensor", "target")
    for width in options.widths:
        target = TARGETS.get(width)
        table.add_row(str(width), *_ratios(_pair(width), options.steps), f"<= {target}" if target else "")
    return table


def sequence(options: argparse.Namespace) -> Table:
    """Sequence parallelism against without."""
    table = _table("with sequence parallelism / without", "bytes kept for backward")
    for width in options.widths:
        steps, kept = _sequence_pair(width)
        table.add_row(str(width), *_ratios(steps, options.steps), f"{kept:.2f}")
    return table


def experts(options: argparse.Namespace) -> Table:
    """Divided experts against one process."""
    table = _table(f"{options.implementation} experts, ours / one process", "parameters held")
    for width in options.widths:
        steps, share = _experts(width, options.implementation)
        table.add_row(str(width), *_ratios(steps, options.steps), f"{share:.0%}")
    return table


def head(options: argparse.Namespace) -> Table:
    """Divided logits against gathered ones and DTensor's."""
    table = Table(title=f"a head of {options.vocabulary:,} classes and its cross-entropy")
    for header in ("width", "step", "time / gathered", "time / loss_parallel", "bytes / all logits"):
        table.add_column(header, justify="right")
    for width in options.widths:
        steps = _heads(width, options.vocabulary)
        seconds = _times(steps, options.steps)
        for name, step in steps.items():
            ratios = [
                statistics.median(mine / other for mine, other in zip(seconds[name], seconds[against]))
                for against in ("gathered", "loss_parallel")
            ]
            share = _peak_bytes(step) / (BATCH * LENGTH * options.vocabulary * 4)
            # What DTensors compute inside is not seen.
            shown = "" if name == "loss_parallel" else f"{share:.2f}"
            table.add_row(str(width), name, *(f"{ratio:.2f}" for ratio in ratios), shown)
    return table


def _table(title: str, last: str) -> Table:
    table = Table(title=f"step time, {title}")
    for header in ("width", "median", "least", "most", last):
        table.add_column(header, justify="right")
    return table


SECTIONS = {section.__name__: section for section in (plan, sequence, experts, head)}


def _measure(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    store = dist.FileStore(f"{folder}/rendezvous", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    console = Console(quiet=rank > 0)
    console.print(f"{ranks} gloo ranks, {options.threads} thread(s) each")
    for name in options.sections:
        console.print(SECTIONS[name](options))
    dist.destroy_process_group()


def _ratios(contenders: dict[str, Callable[[], None]], count: int) -> list[str]:
    """Median, least and most of the first contender's step time over the second's."""
    first, second = _times(contenders, count).values()
    ratios = [one / other for one, other in zip(first, second)]
    return [f"{figure:.2f}" for figure in (statistics.median(ratios), min(ratios), max(ratios))]


def _times(steps: dict[str, Callable[[], None]], count: int) -> dict[str, list[float]]:
    """Return the seconds of each step, one after the other in turn, without those of the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(count + WARMUP):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: found[WARMUP:] for name, found in seconds.items()}


def main() -> None:
    """Read the options, start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SECTIONS, "overlap"]
    parser.add_argument("sections", nargs="*", choices=[*names, []], help="what to measure (default: everything)")
    parser.add_argument("--widths", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--implementation", choices=["eager", "batched_mm", "grouped_mm"], default="grouped_mm")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", type=int, default=600, help="Mbit/s")
    parser.add_argument("--compute-ms", type=float, nargs="+", default=[100, 200], help="of a forward")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=6)
    for name in ("rank", "address", "results"):
        parser.add_argument(f"--{name}", type=int if name == "rank" else str, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sections = options.sections or names
    if "overlap" in options.sections:
        (show_overlap if options.rank is None else time_overlap)(options)
        options.sections.remove("overlap")
    if options.sections:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_measure, (options.ranks, folder, options), options.ranks)


if __name__ == "__main__":
    main()
