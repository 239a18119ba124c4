"""Pipeline parallelism: our engine against `torch.distributed.pipelining`, in turn, in one process group of gloo ranks.

    python benchmarks/pipeline.py [schedules] [transformer] [balance] [memory] [cut] [connections] [--repeats 5]

    schedules    stages that sleep (F 20 ms, B 40 ms, or I 20 ms and W 20 ms): the step over its closed form, and the
                 best of ours over the best of torch's that holds no more activations
    transformer  stages that compute: ours over torch's, schedule by schedule
    balance      layers of which some are ten times heavier: speed-up over one process, by layer count and measured
    memory       bytes of activations that each rank holds at most
    cut          what playing the absent layers costs, per microbatch and stage
    connections  values that skip over all cuts, and layers that are called twice: the step over that of a plain model
                 with as many calls, and over its simulation

Stages that sleep stand in for devices: they show the schedule and what is added to it, whatever the number of cores.
"best" is the best of the repeats, since what other programs on the machine add is not the schedule's. Where there are
many, `chrt -f 1 python benchmarks/pipeline.py schedules` runs before them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contenders import Contender, Entry, contend, in_turn
from rich.console import Console
from rich.table import Table
from sleeping import LiveBytes, Sleeper
from torch import Tensor, nn

from lightning_parallel import comm, tracing
from lightning_parallel.comm import Group
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.pipeline.simulate import Cost, simulate

RANKS, MICROBATCHES = 4, 8
FORWARD_S, INPUT_S, WEIGHT_S = 0.02, 0.02, 0.02

ENTRIES = [
    Entry("gpipe", target=1.03),
    Entry("1f1b", target=1.03),
    Entry("interleaved_1f1b", 2, target=1.05),
    Entry("interleaved_1f1b", 2, 1.0, target=1.05),
    Entry("zb_h1", target=1.06),
    Entry("interleaved_zb", 2, target=1.06),
    Entry("interleaved_zb", 4, target=1.06),
    Entry("zbv", 2, target=1.06),
    Entry("ScheduleGPipe"),
    Entry("Schedule1F1B"),
    Entry("ScheduleInterleaved1F1B", 2),
    Entry("ScheduleInterleavedZeroBubble"),
    Entry("ScheduleInterleavedZeroBubble", 2),
    Entry("ScheduleInterleavedZeroBubble", 4),
    Entry("ScheduleZBVZeroBubble", 2),
]


def schedules(group: Group, console: Console, repeats: int) -> None:
    """Stages that sleep: how far from the closed form, and the best of each side for the activations held."""

    def make(num_stages: int) -> nn.Sequential:
        share = RANKS / num_stages
        seconds = FORWARD_S * share, INPUT_S * share, WEIGHT_S * share
        return nn.Sequential(*(Sleeper(*seconds) for _ in range(num_stages)))

    batch = torch.ones(2 * MICROBATCHES, 8, requires_grad=True)
    contenders = [contend(entry, group, make, batch, MICROBATCHES) for entry in ENTRIES]
    taken = in_turn([contender.run for contender in contenders], group, repeats)
    table = Table(
        "schedule", "stages a rank", "held", "closed form", "median", "best", "target", title="sleeping stages"
    )
    for contender, seconds in zip(contenders, taken):
        entry = contender.entry
        rank_cost = Cost(FORWARD_S, INPUT_S, WEIGHT_S)
        ideal_s = simulate(contender.schedule, rank_cost.scaled(1 / entry.virtual_stages)).makespan_s
        table.add_row(
            ("" if entry.is_ours else "torch ") + entry.title,
            str(entry.virtual_stages),
            f"{contender.held:g}",
            f"{ideal_s * 1e3:.0f} ms",
            f"{statistics.median(seconds) / ideal_s:.3f}",
            f"{min(seconds) / ideal_s:.3f}",
            _at_most(min(seconds) / ideal_s, entry.target),
        )
    console.print(table, _best_of_each(contenders, taken))


def _best_of_each(contenders: list[Contender], taken: list[list[float]]) -> Table:
    table = Table(
        "held at most", "ours", "torch's", "medians", "bests", "target", title="best of ours / best of torch's"
    )
    for limit in sorted({contender.held for contender in contenders if not contender.entry.is_ours}):
        fits = [pair for pair in zip(contenders, taken) if pair[0].held <= limit]
        sides = [[pair for pair in fits if pair[0].entry.is_ours is ours] for ours in (True, False)]
        row, names = [], []
        for fold in (statistics.median, min):
            ours, peer = (min(side, key=lambda pair: fold(pair[1])) for side in sides)
            row.append(fold(ours[1]) / fold(peer[1]))
            names = [f"{c.entry.title}, {c.entry.virtual_stages} a rank" for c in (ours[0], peer[0])]
        table.add_row(f"{limit:g}", *names, *(f"{ratio:.3f}" for ratio in row), _at_most(row[1], 0.95))
    return table


def transformer(group: Group, console: Console, repeats: int) -> None:
    """Stages that compute: ours over torch's."""

    def make(num_stages: int) -> nn.Sequential:
        def layer() -> nn.Module:
            return nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)

        return nn.Sequential(*(layer() for _ in range(8)))

    batch = torch.randn(MICROBATCHES, 128, 256, requires_grad=True)
    pairs = [
        (Entry("gpipe"), Entry("ScheduleGPipe")),
        (Entry("1f1b"), Entry("Schedule1F1B")),
        (Entry("interleaved_1f1b", 2), Entry("ScheduleInterleaved1F1B", 2)),
        (Entry("interleaved_zb", 2), Entry("ScheduleInterleavedZeroBubble", 2)),
        (Entry("zbv", 2), Entry("ScheduleZBVZeroBubble", 2)),
    ]
    contenders = [contend(entry, group, make, batch, MICROBATCHES) for pair in pairs for entry in pair]
    taken = in_turn([contender.run for contender in contenders], group, repeats)
    table = Table("schedule", "medians", "bests", title="8 transformer layers, 256 wide: ours / torch's")
    for (entry, _), ours, peer in zip(pairs, taken[::2], taken[1::2]):
        ratios = [fold(ours) / fold(peer) for fold in (statistics.median, min)]
        table.add_row(entry.title, *(f"{ratio:.3f}" for ratio in ratios))
    console.print(table)


def balance(group: Group, console: Console, repeats: int) -> None:
    """Nine layers and three that are ten times heavier, 32 microbatches."""
    light_s, microbatches = (0.002, 0.002, 0.002), 32
    batch = torch.ones(2 * microbatches, 8, requires_grad=True)

    def make() -> nn.Sequential:
        return nn.Sequential(*(Sleeper(*(factor * s for s in light_s)) for factor in [1] * 9 + [10] * 3))

    def alone() -> None:
        model = make()
        for microbatch in batch.split(2) if group.rank == 0 else ():
            model(microbatch).square().mean().backward()

    schedule = build_schedule("1f1b", RANKS, microbatches)
    engines = []
    for how in ("uniform", "auto"):
        model = make()
        engines.append(_engine(model, group, schedule, batch, how))
    runs: list[Callable[[], Any]] = [alone, *(run for _, run in engines)]
    single, *taken = in_turn(runs, group, max(1, repeats // 2))
    table = Table("balance", "layers", "speed-up", "target", "step / simulated", "target", title="unbalanced layers")
    layers = [Cost(*(factor * s for s in light_s)) for factor in [1] * 9 + [10] * 3]
    for how, (engine, _), seconds in zip(("uniform", "auto"), engines, taken):
        ends = [sum(engine.plan.layers_per_stage[:stage]) for stage in range(RANKS + 1)]
        stages = [Cost.in_sequence(layers[start:stop]) for start, stop in zip(ends, ends[1:])]
        speed_up, ratio = min(single) / min(seconds), min(seconds) / simulate(schedule, stages).makespan_s
        target = _at_least(speed_up, 3.4) if how == "auto" else ""
        shown = ", ".join(map(str, engine.plan.layers_per_stage))
        table.add_row(how, shown, f"{speed_up:.2f}", target, f"{ratio:.3f}", _at_most(ratio, 1.03))
    console.print(table)


def _engine(
    model: nn.Sequential, group: Group, schedule: Any, batch: Tensor, how: Any
) -> tuple[PipelineEngine, Callable[[], Any]]:
    rows = len(batch) // schedule.num_microbatches

    def step(microbatch: Tensor) -> Tensor:
        return model(microbatch).square().mean()

    def split(batch: Tensor, count: int) -> list[Tensor]:
        return list(batch.split(rows))

    plan = analyze(model, group.size, schedule, example=(step, batch[:rows]), balance=how, sync_group=group)
    engine = PipelineEngine(model, plan, group, split_batch=split)
    return engine, lambda part=batch: engine.forward_backward(step, part)


def memory(group: Group, console: Console, repeats: int) -> None:
    """What is alive at most: the microbatches in flight, and a few messages that are under way."""
    width, rows = 256, 512
    table = Table("schedule", "rank", "peak bytes", "planned", "messages beyond", title="activations held")
    for name in ("gpipe", "1f1b", "interleaved_1f1b"):
        schedule = build_schedule(name, RANKS, MICROBATCHES)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(schedule.num_stages)))
        engine, run = _engine(model, group, schedule, torch.randn(rows * MICROBATCHES, width), "uniform")
        batch, peaks = torch.randn(rows * MICROBATCHES, width), []
        for part in (batch[:rows], batch):
            run(part)
            with LiveBytes() as live:
                run(part)
            peaks.append(live.peak)
        # A stage keeps its output, and its input if that was received.
        message = rows * width * 4
        kept = statistics.mean(1 + (stage > 0) for stage in engine.stages) * message
        planned = schedule.max_in_flight[group.rank]
        beyond = (peaks[1] - peaks[0] - (planned - 1) * kept) / message
        for rank, facts in enumerate(comm.all_gather_object((f"{peaks[1]:,}", str(planned), f"{beyond:.1f}"), group)):
            table.add_row(name if rank == 0 else "", str(rank), *facts)
    console.print(table)


def cut(group: Group, console: Console, repeats: int) -> None:
    """What a stage of a Llama-like model takes besides its own layers and the wait for its input."""
    table = Table("layers", "stage", "of them", "before", "after", "sum", "target", title="ms per microbatch and stage")
    for counts in ([6, 6, 6, 6], [14, 14, 14, 6]):
        clock, rows = _StageClock(sum(counts)), 2
        ids = torch.randint(64, (rows * MICROBATCHES, 16))
        schedule = build_schedule("gpipe", RANKS, MICROBATCHES)
        plan = analyze(clock.model, group.size, schedule, example=(clock.step, ids[:rows]), balance=counts)
        engine = PipelineEngine(clock.model, plan, group)
        start = sum(counts[: group.rank])
        clock.watch(start, start + counts[group.rank] - 1)
        spent = [clock.spent(partial(engine.forward, clock.step, ids)) for _ in range(repeats + 1)][1:]
        before, after = (min(part) * 1e3 for part in zip(*spent))
        after *= group.rank < RANKS - 1  # norm, head and loss are the last stage's own
        for rank, parts in enumerate(comm.all_gather_object((before, after, before + after), group)):
            shown = (f"{part:.2f}" for part in parts)
            total = str(sum(counts)) if rank == 0 else ""
            table.add_row(total, str(rank), str(counts[rank]), *shown, _at_most(parts[2], 1.0))
    console.print(table)


class _Mirrored(nn.Sequential):
    """Each of the second half of the layers gets what its opposite has returned, as in a U-Net."""

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, layer in enumerate(self):
            x = layer(x)
            if 2 * index < len(self) - 2:
                kept.append(x)
            elif 2 * index >= len(self):
                x = x + kept.pop() if kept else x
        return x


class _Twice(nn.Sequential):
    """All layers are called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def connections(group: Group, console: Console, repeats: int) -> None:
    """Eight calls of layers that sleep, of 64 KiB a microbatch."""
    seconds, rows = (FORWARD_S / 2, INPUT_S / 2, WEIGHT_S / 2), 8
    batch = torch.ones(rows * MICROBATCHES, 2048, requires_grad=True)
    table = Table("model", "schedule", "sent by a rank", "/ plain", "/ simulated", title="8 calls, 4 ranks")
    cases = (("1f1b", 1, _Mirrored, 8), ("interleaved_1f1b", 2, _Twice, 4))
    for name, chunks, other, layers in cases:
        schedule = build_schedule(name, RANKS, MICROBATCHES, chunks)
        kinds = ((nn.Sequential, 8), (other, layers))
        models = [kind(*(Sleeper(*seconds, 2048) for _ in range(count))) for kind, count in kinds]
        engines = [_engine(model, group, schedule, batch, "uniform") for model in models]
        taken = in_turn([run for _, run in engines], group, repeats)
        ideal_s = simulate(schedule, Cost(*(len(models[0]) * s / schedule.num_stages for s in seconds))).makespan_s
        for model, (engine, run), times in zip(models, engines, taken):
            with tracing.activate(tracing.Recorder()) as active:
                run()
            sent = sum(span.bytes for span in active.spans if span.op == "send")
            table.add_row(
                type(model).__name__.lstrip("_"),
                engine.plan.schedule.name,
                f"{max(comm.all_gather_object(sent, group)) / 1e6:.1f} MB",
                f"{statistics.median(times) / statistics.median(taken[0]):.3f}",
                f"{statistics.median(times) / ideal_s:.3f}",
            )
    console.print(table)


class _StageClock:
    """A model, and when its step enters and leaves the layers of this stage."""

    def __init__(self, layers: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, use_cache=False))
        self.moments: list[float] = []

    def _note(self, *_: Any) -> None:
        self.moments.append(time.perf_counter())

    def step(self, ids: Tensor) -> Tensor:
        self._note()
        try:
            return self.model(input_ids=ids, labels=ids).loss
        finally:
            self._note()

    def watch(self, first: int, last: int) -> None:
        self.model.model.layers[first].register_forward_pre_hook(self._note)
        self.model.model.layers[last].register_forward_hook(self._note)

    def spent(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Seconds before and after the layers, mean over the microbatches."""
        self.moments.clear()
        with tracing.activate(tracing.Recorder()) as active:
            run()
        waited_s = sum(span.blocked_ns for span in active.spans if span.op == "recv") * 1e-9
        begun, entered, left, ended = (sum(self.moments[part::4]) for part in range(4))
        return (entered - begun - waited_s) / MICROBATCHES, (ended - left) / MICROBATCHES


def _at_most(value: float, target: float | None) -> str:
    return "" if target is None else f"[{'green' if value <= target else 'red'}]<= {target}"


def _at_least(value: float, target: float) -> str:
    return f"[{'green' if value >= target else 'red'}]>= {target}"


SECTIONS = {section.__name__: section for section in (schedules, transformer, balance, memory, cut, connections)}


def _rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/ranks", RANKS), rank=rank, world_size=RANKS)
    group = Group.of(axis="pipeline_parallel")
    console = Console(quiet=rank > 0)
    for name in options.sections or SECTIONS:
        SECTIONS[name](group, console, options.repeats)
    comm.barrier(group)
    dist.destroy_process_group()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="what to measure (default: everything)")
    parser.add_argument("--repeats", type=int, default=5)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, parser.parse_args()), RANKS)


if __name__ == "__main__":
    main()
