"""A pipelined training step, ready to run: in our engine, or in `torch.distributed.pipelining`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sleeping import pause
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.schedule import SCHEDULES, Action, Schedule, build_schedule

__all__ = ["Contender", "Entry", "Model", "contend", "in_turn"]

_MEET_S = 2e-3

Model = Callable[[int], nn.Sequential]
"""Makes a model for a number of stages, with a multiple of as many layers."""


class Entry(NamedTuple):
    """A schedule of ours by name, or of torch's by class."""

    name: str
    virtual_stages: int = 1
    warmup: float | None = None
    target: float | None = None
    """Measured over closed form."""

    @property
    def is_ours(self) -> bool:
        """Whether it runs in our engine."""
        return self.name in SCHEDULES

    @property
    def title(self) -> str:
        """Its name, and how far it runs ahead where that is not usual."""
        name = self.name.removeprefix("Schedule")
        return name if self.warmup is None else f"{name}, warm-up {self.warmup:g}"


class Contender(NamedTuple):
    """A step that is ready to run."""

    entry: Entry
    schedule: Schedule
    run: Callable[[], Any]

    @property
    def held(self) -> float:
        """Most activations held by any rank, in microbatches through all its layers."""
        return max(self.schedule.max_in_flight) / self.schedule.virtual_stages


def contend(entry: Entry, group: Group, make: Model, batch: Tensor, num_microbatches: int) -> Contender:
    """Get a step ready; the loss is the mean square of the output."""
    torch.manual_seed(0)
    return (_ours if entry.is_ours else _torch)(entry, group, make, batch, num_microbatches)


def in_turn(runs: list[Callable[[], Any]], group: Group, repeats: int) -> list[list[float]]:
    """Seconds of each run, from a start that the ranks agree on to the last rank's end; after one round to warm up."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for seconds, run in zip(taken, runs):
            start_s = max(comm.all_gather_object(time.perf_counter(), group)) + _MEET_S
            pause(start_s - time.perf_counter())
            run()
            seconds.append(max(comm.all_gather_object(time.perf_counter(), group)) - start_s)
    return [seconds[1:] for seconds in taken]


def _loss(output: Tensor, target: Tensor | None = None) -> Tensor:
    return output.square().mean()


def _ours(entry: Entry, group: Group, make: Model, batch: Tensor, num_microbatches: int) -> Contender:
    schedule = build_schedule(entry.name, group.size, num_microbatches, entry.virtual_stages, entry.warmup)
    model = make(schedule.num_stages)

    def step(microbatch: Tensor) -> Tensor:
        return _loss(model(microbatch))

    balance = [len(model) // schedule.num_stages] * schedule.num_stages
    example = (step, batch[: len(batch) // num_microbatches])
    plan = analyze(model, group.size, schedule, example=example, balance=balance, sync_group=group)
    engine = PipelineEngine(model, plan, group)

    def run() -> Any:
        model.zero_grad()
        return engine.forward_backward(step, batch)

    return Contender(entry, schedule, run)


def _torch(entry: Entry, group: Group, make: Model, batch: Tensor, num_microbatches: int) -> Contender:
    num_stages = group.size * entry.virtual_stages
    model = make(num_stages)
    size = len(model) // num_stages
    mine = [stage for stage in range(num_stages) if _torch_rank(entry, stage, group.size) == group.rank]
    parts = [model[stage * size : (stage + 1) * size] for stage in mine]
    device = torch.device("cpu")
    stages = [
        PipelineStage(part, stage, num_stages, device, group=group.process_group) for part, stage in zip(parts, mine)
    ]
    is_single = entry.name in ("ScheduleGPipe", "Schedule1F1B")
    peer = getattr(pipelining, entry.name)(stages[0] if is_single else stages, num_microbatches, loss_fn=_loss)
    if is_single:  # its table of 1F1B is not what it runs
        schedule = build_schedule("gpipe" if "GPipe" in entry.name else "1f1b", group.size, num_microbatches)
    else:
        order = (peer.pipeline_order[rank] for rank in range(group.size))
        schedule = Schedule.from_rows([Action.parse(str(a)) for a in row if a is not None] for row in order)

    def run() -> Any:
        for part in parts:
            part.zero_grad()
        inputs = (batch,) if 0 in mine else ()
        target = batch if num_stages - 1 in mine else None
        return peer.step(*inputs, target=target, return_outputs=False)

    return Contender(entry, schedule, run)


def _torch_rank(entry: Entry, stage: int, ranks: int) -> int:
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if turn % 2 and "ZBV" in entry.name else place
