"""Long sequences: attention of sharded sequences, training steps on them, and a loss in tiles of positions.

    python benchmarks/context.py bytes [--ranks 4] [--length 4096]
    sudo python benchmarks/context.py ring [--hosts 2 4] [--rate 300] [--compute-ms 60 200] [--length 2048]
    python benchmarks/context.py peer [--lengths 1024 4096] [--rounds 5]
    python benchmarks/context.py tiled [--classes 50257 151936] [--length 4096] [--width 256] [--rounds 3] [--record]
    python benchmarks/context.py memory [--ranks 2 4] [--length 256] [--record]
    python benchmarks/context.py step [--length 1024] [--rounds 4] [--record]

bytes: forward and backward of one attention, causal, with 8 query heads. The bytes that `comm` counts stand beside
those of the formula (`attention_messages`), and the ratio to `gather` beside them. The method that `auto` chooses has a
star: for one sequence, and for an H100 on a link of 400 Gbit/s.

ring: hosts are network namespaces whose links are shaped by `tc tbf`. Kernels sleep, as if devices computed: the given
time in forward, and 2.5 of it in backward. `step` is the ratio to a step without communication. `bound` is the ratio to
the longer of computation and messages; 1.00 hides all that can be hidden. `in turn` is the same ring, which waits for
each message before it computes. Without root, `ip` or `tc` nothing is measured.

peer: a step of attention, forward and backward, two ranks in turn in one process group, as ratios to `gather` of this
library. torch's `context_parallel` has no rule for kernels of CPUs, so its ring is called with them by hand, with its
all-to-all and its balance. It shards equal positions only, and joins head and tail as this library does.

tiled: forward and backward of a head and its cross-entropy, with `tiled="auto"` as a ratio to whole logits. `peak` are
the most bytes alive besides hidden states, weight and their gradients. `step` is the time. Both sides in turn.

memory: the GPT of `memory.py` through `ContextParallelStrategy` and the Trainer, with as many positions on each rank.
Counted are the bytes of tensors that a step makes and that are alive at its peak: activations, the embeddings of all
positions, messages, and gradients that exist at that time. Parameters and tensors from before the step do not count.
The rank with the most counts, as a ratio to one rank with the positions of one rank. 1.00 means that a rank holds no
more than its own positions.

step: a training step of the same GPT with the same positions in all, through the Trainer, as ratios to one process.
`step` is the wall time, and `processor` the time of both ranks together. By hand means that the module takes its own
positions, calls torch's ring as above, and trains under DDP.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contenders import in_turn
from context_training import compare_memory, compare_steps
from results import record
from shaped_network import Network, unavailable
from sleeping import LiveBytes
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch_ring import TorchRing

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import patched
from lightning_parallel.compat.torch import CALLS, AroundCalls
from lightning_parallel.tensor import context_attention, ring_attention
from lightning_parallel.tensor.attention_tiles import Gradients, Partial
from lightning_parallel.tensor.context_attention import attend
from lightning_parallel.tensor.context_methods import (
    AttentionShape,
    Method,
    attention_messages,
    balanced_rows,
    choose_method,
)
from lightning_parallel.tensor.tiled_logits import TiledHead
from lightning_parallel.tensor.tiles import tiling_of
from lightning_parallel.tracing import Recorder, activate

METHODS: tuple[Method, ...] = get_args(Method)
HEADS, SIZE = 8, 64
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
BACKWARD = 2.5  # of the time of forward: five products instead of two


def inputs(length: int, kv_heads: int, group: Group, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values of this rank."""
    rows = balanced_rows(length, group.size).sizes[group.rank]
    return [torch.randn(1, heads, rows, SIZE, dtype=dtype, requires_grad=True) for heads in (HEADS, kv_heads, kv_heads)]


def step(method: Method, tensors: list[Tensor], length: int, group: Group) -> Tensor:
    """Forward and backward of one attention; returns its result."""
    rows = balanced_rows(length, group.size)
    shares = tensors[0].shape[1] != tensors[1].shape[1]
    y = attend(*tensors, rows, rows, group, is_causal=True, enable_gqa=shares, method=method)
    y.backward(torch.ones_like(y))
    return y


def on_ranks(work: Callable[..., None], arguments: argparse.Namespace) -> None:
    """Call `work(group, arguments)` on as many processes as `arguments.ranks`."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (work, arguments, f"file://{folder}/store"), arguments.ranks)


def _rank(rank: int, work: Callable[..., None], arguments: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, timedelta(seconds=120), rank=rank, world_size=arguments.ranks)
    work(Group.of(), arguments)
    dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------------------- bytes


def count_bytes(group: Group, arguments: argparse.Namespace) -> None:
    """Print counted and predicted bytes of rank 0."""
    rule = balanced_rows(arguments.length, group.size)
    if group.rank == 0:
        print(f"{group.size} ranks, {arguments.length} positions, {HEADS} query heads of {SIZE} features; * is `auto`")
        print(f"{'key heads':>9} {'dtype':>6} {'method':>8} {'counted MB':>11} {'formula MB':>11} {'of gather':>9}")
    for kv_heads in (HEADS, HEADS // 4, 1):
        for dtype in NAMES:
            shape = AttentionShape(1, HEADS, kv_heads, SIZE, SIZE, dtype.itemsize, rule, rule, True)
            tensors = inputs(arguments.length, kv_heads, group, dtype)
            sent = {method: sum(m.sent for m in attention_messages(method, shape)) for method in METHODS}
            for method in METHODS:
                counted = _counted(method, tensors, arguments.length, group)
                if group.rank == 0:
                    star = "*" if method == choose_method(shape) else " "
                    print(
                        f"{kv_heads:9} {NAMES[dtype]:>6} {star + method:>8} {counted / 1e6:11.3f}"
                        f" {sent[method] / 1e6:11.3f} {sent[method] / sent['gather']:9.2f}"
                    )


def _counted(method: Method, tensors: list[Tensor], length: int, group: Group) -> float:
    """Return the bytes that a rank has sent, the mean over the ranks."""
    with activate(Recorder()) as recorder:
        step(method, tensors, length, group)
    calls = [(span.name, span.bytes) for span in recorder.spans if span.category == "communication" and span.bytes]
    # An exchange counts both what a rank sends and what it receives; other calls count what it keeps, too.
    share = 1 / 2 if method == "ring" else (group.size - 1) / group.size
    total = torch.tensor([share * sum(size for _, size in calls)], dtype=torch.float64)
    return comm.all_reduce(total, group).item() / group.size


# ---------------------------------------------------------------------------------------------------------------- ring


class _SleepingKernel(Function):
    """Attention of all positions that takes `seconds`, and `BACKWARD` of it in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seconds: float) -> Tensor:
        ctx.shapes, ctx.seconds = (q.shape, k.shape, v.shape), seconds
        time.sleep(seconds)
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        time.sleep(BACKWARD * ctx.seconds)
        return *(grad.new_zeros(shape) for shape in ctx.shapes), None


def sleeping(stack: ExitStack, seconds: float, length: int, ranks: int) -> None:
    """Let the kernels of a rank sleep `seconds` in a forward, until the stack closes."""
    all_scores = length * (length + 1) / 2 / ranks

    def seconds_of(q: Tensor, k: Tensor, kind: str) -> float:
        scores = q.shape[2] * k.shape[2] / (2 if kind == "diagonal" else 1)
        return seconds * scores / all_scores

    def tile_attention(q: Tensor, k: Tensor, v: Tensor, kind: str, *_: Any) -> Partial:
        time.sleep(seconds_of(q, k, kind))
        out = torch.zeros_like(q)
        return Partial(out, out[..., 0], torch.ones_like(out[..., 0]))

    def tile_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kind: str, *_: Any) -> Gradients:
        time.sleep(BACKWARD * seconds_of(q, k, kind))
        return Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None)

    stack.enter_context(patched(ring_attention, "tile_attention", tile_attention))
    stack.enter_context(patched(ring_attention, "tile_gradients", tile_gradients))
    stack.enter_context(
        patched(context_attention, "_kernel", lambda q, k, v, *_: _SleepingKernel.apply(q, k, v, seconds))
    )


def _exchanged_at_once(*args: Any) -> comm.Pending:
    pending = comm.collectives.exchange(*args)
    pending.wait()
    return pending


SIDES: dict[str, Method] = {"alone": "ring", "ring": "ring", "ring, in turn": "ring", "gather": "gather"}
SIDES["ulysses"] = "ulysses"


def _side(name: str, tensors: list[Tensor], length: int, group: Group) -> None:
    with ExitStack() as stack:
        if name == "alone":
            stack.enter_context(comm.skip_communication())
        elif name == "ring, in turn":
            stack.enter_context(patched(comm, "exchange", _exchanged_at_once))
        step(SIDES[name], tensors, length, group)


def time_ring(arguments: argparse.Namespace) -> None:
    """Measure the methods, as one host among others; the first one writes the results."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    address = f"tcp://{arguments.address}:29500"
    dist.init_process_group("gloo", address, timeout, rank=arguments.rank, world_size=arguments.world_size)
    group, length = Group.of(), arguments.length
    tensors = inputs(length, HEADS, group)
    found = []
    for compute_ms in arguments.compute_ms:
        with ExitStack() as stack:
            sleeping(stack, compute_ms / 1e3, length, group.size)
            runs = [partial(_side, name, tensors, length, group) for name in SIDES]
            # In turn: what else runs on the machine slows all of them.
            taken = in_turn(runs, group, arguments.rounds)
            for name, run, seconds in zip(SIDES, runs, taken):
                before = _sent_bytes()
                run()
                found.append((compute_ms, name, statistics.median(seconds), _sent_bytes() - before))
    if group.rank == 0:
        Path(arguments.results).write_text(json.dumps(found))
    dist.destroy_process_group()


def _sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def show_ring(arguments: argparse.Namespace) -> None:
    """Print a table for each number of hosts."""
    if reason := unavailable():
        print(f"the ring is skipped: {reason}")
        return
    for hosts in arguments.hosts:
        with tempfile.TemporaryDirectory() as folder, Network(hosts, arguments.rate) as network:
            results = Path(folder) / "results.json"
            script = [sys.executable, __file__, "ring", "--world-size", str(hosts), "--results", str(results)]
            script += ["--address", network.address(0), "--length", str(arguments.length)]
            script += ["--rounds", str(arguments.rounds), "--compute-ms", *map(str, arguments.compute_ms)]
            network.run([[*script, "--rank", str(host)] for host in range(hosts)], deadline_s=300)
            found = json.loads(results.read_text())
        print(f"\n{hosts} hosts, {arguments.rate} Mbit/s, {arguments.length} positions; kernels sleep")
        print(f"{'computation':>12} {'method':14} {'sent MB':>8} {'messages':>9} {'step':>6} {'bound':>6}")
        alone = {compute_ms: seconds for compute_ms, name, seconds, _ in found if name == "alone"}
        for compute_ms, name, seconds, sent in found:
            if name != "alone":
                messages_s = sent * 8 / (arguments.rate * 1e6)
                bound = seconds / max(alone[compute_ms], messages_s)
                print(
                    f"{compute_ms:9.0f} ms {name:14} {sent / 1e6:8.1f} {messages_s / alone[compute_ms]:9.2f}"
                    f" {seconds / alone[compute_ms]:6.2f} {bound:6.2f}"
                )


# ---------------------------------------------------------------------------------------------------------------- peer


def torch_ring(tensors: list[Tensor], group: Group) -> Tensor:
    """Forward and backward of one attention in torch's ring; returns its result."""
    y = TorchRing.apply(*tensors, group.process_group or dist.group.WORLD)
    y.backward(torch.ones_like(y))
    return y


def compare_peer(group: Group, arguments: argparse.Namespace) -> None:
    """Print the time of torch's ring beside the methods of this library."""
    if group.rank == 0:
        print(f"{group.size} ranks, {HEADS} heads of {SIZE} features; time as a ratio to `gather`")
        print(f"{'length':>8} {'ulysses':>14} {'ring':>14} {'ring of torch':>14}")
    for length in arguments.lengths:
        tensors = inputs(length, HEADS, group)
        names: tuple[Method, ...] = ("gather", "ulysses", "ring")
        runs = [partial(step, method, tensors, length, group) for method in names]
        theirs = partial(torch_ring, tensors, group)
        torch.testing.assert_close(theirs(), step("ring", tensors, length, group))
        taken = in_turn([*runs, theirs], group, arguments.rounds)
        gather, *others = map(statistics.median, taken)
        if group.rank == 0:
            print(f"{length:8} " + " ".join(f"{seconds / gather:14.2f}" for seconds in others))


# -------------------------------------------------------------------------------------------------- tiles of positions


def head_step(head: nn.Linear, hidden: Tensor, target: Tensor) -> None:
    """Run forward and backward of a head and its loss, as users write them."""
    logits = head(hidden)
    functional.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1)).backward()
    hidden.grad = head.weight.grad = None


def compare_tiles(arguments: argparse.Namespace) -> None:
    """Print peak bytes and time of a loss in tiles, as ratios to whole logits."""
    print(f"{'classes':>10}{'tiles':>8}{'peak':>8}{'step':>8}")
    found = {}
    for classes in arguments.classes:
        hidden = torch.randn(1, arguments.length, arguments.width, requires_grad=True)
        target = torch.randint(classes, (1, arguments.length))
        heads = [nn.Linear(arguments.width, classes, bias=False) for _ in range(2)]
        vars(heads[1])[CALLS] = AroundCalls(heads[1], TiledHead(heads[1]))
        tiling = tiling_of(arguments.length, arguments.width, classes, hidden.element_size())
        # The gradients take their own bytes on both sides.
        beside = (hidden.numel() + heads[0].weight.numel()) * hidden.element_size()
        peaks, times = [], [[], []]
        for head in heads:
            with LiveBytes() as live:
                head_step(head, hidden, target)
            peaks.append(live.peak - beside)
        for _ in range(arguments.rounds):
            for head, own in zip(heads, times):
                begun_s = time.perf_counter()
                head_step(head, hidden, target)
                own.append(time.perf_counter() - begun_s)
        whole_s, tiled_s = map(statistics.median, times)
        found[f"{classes} classes"] = {"peak": peaks[1] / peaks[0], "step": tiled_s / whole_s}
        print(f"{classes:10}{tiling.count:8}{peaks[1] / peaks[0]:8.2f}{tiled_s / whole_s:8.2f}", flush=True)
    if arguments.record:
        record("tiled", found)


def main() -> None:
    """Print the tables of a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("bytes")
    command.add_argument("--ranks", type=int, default=4)
    command.add_argument("--length", type=int, default=4096)
    command = commands.add_parser("ring")
    command.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    command.add_argument("--rate", type=int, default=300, help="Mbit/s")
    command.add_argument("--compute-ms", type=float, nargs="+", default=[60, 200], help="of a forward")
    command.add_argument("--length", type=int, default=2048)
    command.add_argument("--rounds", type=int, default=4)
    for hidden in ("--address", "--results"):
        command.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--world-size"):
        command.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    command = commands.add_parser("peer")
    command.add_argument("--ranks", type=int, default=2)
    command.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    command.add_argument("--rounds", type=int, default=5)
    command = commands.add_parser("tiled")
    command.add_argument("--classes", type=int, nargs="+", default=[50257, 151936])
    command.add_argument("--length", type=int, default=4096)
    command.add_argument("--width", type=int, default=256)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--record", action="store_true")
    for name, length in (("memory", 256), ("step", 1024)):
        command = commands.add_parser(name)
        command.add_argument("--length", type=int, default=length, help="on each rank" if name == "memory" else "")
        for option, default in (("layers", 4), ("width", 256), ("batch", 1)):
            command.add_argument(f"--{option}", type=int, default=default)
        command.add_argument("--record", action="store_true", help="write the figures to results.json")
        if name == "memory":
            command.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
        else:
            command.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    here = {"tiled": compare_tiles, "memory": compare_memory, "step": compare_steps}
    if arguments.command in here:
        here[arguments.command](arguments)
    elif arguments.command == "ring":
        (show_ring if arguments.rank is None else time_ring)(arguments)
    else:
        on_ranks({"bytes": count_bytes, "peer": compare_peer}[arguments.command], arguments)


if __name__ == "__main__":
    main()
