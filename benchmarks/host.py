"""What the host does for a block: calls of Python functions, and processor time against the plain block.

    python benchmarks/host.py [calls] [time] [--repeats 300]

    calls   calls of Python functions in forward and in backward, which are equal in each run. Exits with status 1 above
            a budget
    time    processor time of forward, and of forward + backward, over that of the plain block. The blocks run in turn,
            in another order each time

    plain       a transformer block with tensors so small that the kernels take no time
    positions   the same block, its hidden states split along positions over two ranks
    tensor      the same block, its layers sharded over two ranks
    owned       what a pipeline adds to a block that its stage owns
    stub        a block of another stage, in a pipeline

The other rank is pretended: messages return at once, so only the host's work remains. The counts hold for the versions
of torch that the tests run, as `nn.Module` itself takes some of the calls.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.context import PositionSplit
from lightning_parallel.tensor.plan import apply_plan

__all__ = ["BUDGETS", "STAGE_BUDGETS", "Counts", "calls_of_stages", "counted", "runs"]

BATCH, LENGTH, WIDTH, HEADS = 2, 8, 64, 4
WARMUP = 40  # until a block that draws nothing counts as such


class Counts(NamedTuple):
    """Calls of Python functions."""

    forward: int
    backward: int


# At most.
BUDGETS = {"positions": Counts(445, 75), "tensor": Counts(103, 41)}


STAGE_BUDGETS = {"owned": 4, "stub": 5}


class Block(nn.Module):
    """A pre-norm transformer block with one layer for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        b, t, _ = x.shape
        qkv = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (each.view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for each in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, -1))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Run(NamedTuple):
    """Forward of a block, and the backward of its result."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]


def runs() -> dict[str, Run]:
    """Return the runs of all blocks, with the same weights."""
    return {"plain": _plain(), "positions": _on_positions(), "tensor": _sharded()}


def _block() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Block(), torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)


def _plain() -> Run:
    block, x = _block()
    return Run(lambda: block(x), lambda y: y.backward(torch.ones_like(y)))


def _on_positions() -> Run:
    block, x = _block()
    split = PositionSplit(Group.pretended("context_parallel", 2), "gather", is_causal=True)
    piece: Any = split.split(x, 1)

    def backward(y: Any) -> None:
        y.valid_part.backward(torch.ones_like(y.valid_part), retain_graph=True)  # the split is in all graphs

    return Run(lambda: block(piece), backward)


def _sharded() -> Run:
    block, x = _block()
    group = Group.pretended("tensor_parallel", 2)
    model = nn.Sequential(block)
    apply_plan(model, make_plan(model, "auto", group), group)
    return Run(lambda: block(x), lambda y: y.backward(torch.ones_like(y)))


def _calls(function: Callable[[], Any]) -> tuple[int, Any]:
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return count - 1, result  # without the function itself


def counted(run: Run) -> Counts:
    """Count the calls of a step that is like the steps before it."""
    for _ in range(WARMUP):
        run.backward(run.forward())
    forward, y = _calls(run.forward)
    return Counts(forward, _calls(lambda: run.backward(y))[0])


class _Stages:
    """A model of blocks in two stages on this rank, and the same model without a pipeline.

    Args:
        first, second: The number of blocks of each stage.
    """

    def __init__(self, first: int, second: int) -> None:
        def model() -> nn.Sequential:
            return nn.Sequential(*(Block() for _ in range(first + second)))

        torch.manual_seed(0)
        self.batch = torch.randn(BATCH, LENGTH, WIDTH)
        self.plain, module = model(), model()
        self.module = module
        example = (lambda x: module(x).square().mean(), self.batch)
        counts = {"num_microbatches": 1, "virtual_stages": 2}
        plan = analyze(module, 1, "interleaved_1f1b", example=example, balance=[first, second], **counts)  # type: ignore[arg-type]
        self._engine = PipelineEngine(module, plan, Group.alone("pipeline_parallel"))

    def step(self) -> None:
        self._engine.forward_backward(lambda x: self.module(x).square().mean(), self.batch)

    def plain_step(self) -> None:
        self.plain(self.batch).square().mean().backward()


def calls_of_stages() -> dict[str, float]:
    """Count the calls that a pipeline makes for a block, as the difference of steps with more and fewer blocks."""

    def counted_in(first: int, second: int) -> int:
        stages = _Stages(first, second)
        for _ in range(WARMUP):
            stages.step()
            stages.plain_step()
        return _calls(stages.step)[0] - _calls(stages.plain_step)[0]

    least = counted_in(2, 2)
    # Stage 1 has a stub of each block of stage 0.
    owned, stub = (counted_in(2, 6) - least) / 4, (counted_in(6, 2) - least) / 4
    return {"owned": owned, "stub": stub - owned}


def _show_calls() -> int:
    table = Table("block", "forward", "backward", "at most", title="calls of Python functions in a block")
    is_within = True
    for name, run in runs().items():
        counts, budget = counted(run), BUDGETS.get(name)
        is_within &= budget is None or all(made <= most for made, most in zip(counts, budget))
        limits = "" if budget is None else f"{budget.forward} + {budget.backward}"
        table.add_row(name, str(counts.forward), str(counts.backward), limits)
    for name, added in calls_of_stages().items():
        is_within &= added <= STAGE_BUDGETS[name]
        table.add_row(name, f"{added:g}", "0", str(STAGE_BUDGETS[name]))
    Console().print(table)
    return 0 if is_within else 1


def _show_time(repeats: int) -> int:
    forward: dict[str, list[float]] = {}
    both: dict[str, list[float]] = {}
    every = runs()
    order, shuffle = list(every), random.Random(0).shuffle
    for repeat in range(WARMUP + repeats):
        shuffle(order)  # a block is slower after one that has filled the caches
        for name in order:
            run = every[name]
            start = time.process_time()
            y = run.forward()
            middle = time.process_time()
            run.backward(y)
            end = time.process_time()
            if repeat >= WARMUP:
                forward.setdefault(name, []).append(middle - start)
                both.setdefault(name, []).append(end - start)
    table = Table("block", "forward", "forward + backward", title="processor time over that of the plain block")
    for name in every:
        ratios = (statistics.median(times[name]) / statistics.median(times["plain"]) for times in (forward, both))
        table.add_row(name, *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)
    _show_time_of_stages(repeats)
    return 0


def _show_time_of_stages(repeats: int) -> None:
    few, owned, stubs = _Stages(2, 2), _Stages(2, 14), _Stages(14, 2)
    steps = {
        "plain, few": few.plain_step,
        "plain": owned.plain_step,
        "few": few.step,
        "owned": owned.step,
        "stub": stubs.step,
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(WARMUP + repeats):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if repeat >= WARMUP:
                times[name].append(time.process_time() - start)
    taken = {name: statistics.median(each) for name, each in times.items()}
    block = taken["plain"] - taken["plain, few"]
    table = Table("block", "forward + backward", title="processor time of a pipeline over that of the plain block")
    table.add_row("owned", f"{(taken['owned'] - taken['few']) / block:.3f}")
    table.add_row("stub", f"{(taken['stub'] - taken['owned']) / block:.3f}")
    Console().print(table)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="calls, time; both by default")
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    statuses = {"calls": _show_calls, "time": lambda: _show_time(options.repeats)}
    return max(statuses[part]() for part in options.parts or ("calls", "time"))


if __name__ == "__main__":
    sys.exit(main())
