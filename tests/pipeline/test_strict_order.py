"""Pipelines by NCCL's rules: what is issued to a group is carried one after the other; sends wait to be received."""

import os
import sys
from datetime import timedelta
from graphlib import TopologicalSorter

import pytest
import torch
from torch import nn

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups, Pending
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.schedule import SCHEDULES, Kind, build_schedule
from lightning_parallel.pipeline.simulate import Cost, Link, simulate
from lightning_parallel.strategies.setup.divide import message_groups
from tests.harness import distributed, run, run_script
from tests.pipeline.test_engine import expect_equal
from tests.pipeline.test_skips import Towers, model_of
from tests.strict_order import is_strict, strict_order


class Tied(nn.Module):
    """Deep enough for four ranks with two stages each; embedding and head share their matrix."""

    def __init__(self, is_tied):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.head = nn.Linear(6, 11, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def example(is_tied):
    torch.manual_seed(2)
    model = Tied(is_tied).double()
    tokens = torch.randint(11, (10, 3), generator=torch.Generator().manual_seed(4))

    def step(batch):
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return model, step, tokens


def groups_of(schedule, world):
    groups = MeshGroups(Mesh(pipeline_parallel=world))
    return groups.pipeline_parallel, message_groups(groups, schedule)


def expect_one_process(world, name, build):
    schedule = build_schedule(name, world, 2 * world)
    with strict_order():
        group, channels = groups_of(schedule, world)
        reference, reference_step, batch = build()
        model, step, _ = build()
        plan = analyze(model, world, schedule, example=(step, batch), balance="uniform", sync_group=group)
        engine = PipelineEngine(model, plan, group, message_groups=channels)
        # The last batch has fewer samples than there are microbatches; evaluation goes between two steps.
        for samples in (10, 3, 10):
            part = batch[:samples] if isinstance(batch, torch.Tensor) else [entry[:samples] for entry in batch]
            model.zero_grad()
            reference.zero_grad()
            loss = reference_step(part)
            loss.backward()
            expect_equal(engine, model, engine.forward_backward(step, part), reference, loss)
            found = engine.forward(step, part)
            if group.rank == engine.last_rank:
                total = sum(weight * output for weight, output in zip(found.weights, found.outputs))
                torch.testing.assert_close(total, loss.detach(), rtol=1e-10, atol=1e-10)


def every_schedule(world):
    for name in SCHEDULES:
        # A tied matrix adds messages; two ranks show that it is not they that keep the others apart.
        for is_tied in (False, True) if world == 2 else (True,):
            expect_one_process(world, name, lambda is_tied=is_tied: example(is_tied))
    expect_one_process(world, "1f1b", lambda: model_of(Towers))


@distributed(world_size=2)
def test_two_ranks():
    every_schedule(2)


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_four_ranks():
    every_schedule(4)


@distributed(world_size=2)
def test_a_receive_holds_up_what_follows(group):
    """The rules themselves: without them, both ranks receive first and go on."""

    def crosswise():
        mine, theirs = torch.full((4,), float(group.rank)), torch.empty(4)
        pending = [comm.irecv(theirs, group, 1 - group.rank), comm.isend(mine, group, 1 - group.rank)]
        return pending, theirs

    with strict_order(False):
        pending, theirs = crosswise()
        for work in pending:
            work.wait()
    assert theirs[0] == 1 - group.rank
    groups = MeshGroups(Mesh(pipeline_parallel=2), timeout=timedelta(seconds=2))
    group = groups.pipeline_parallel
    with strict_order():
        pending, _ = crosswise()
        with pytest.raises(RuntimeError, match="recv along pipeline_parallel"):
            pending[0].wait()
        with pytest.raises(RuntimeError, match="send along pipeline_parallel"):
            pending[1].wait()
        # What is one operation does not wait for itself; and what follows a failure fails at once.
        other = MeshGroups(Mesh(pipeline_parallel=2)).pipeline_parallel
        mine, theirs = torch.full((4,), float(other.rank)), torch.empty(4)
        comm.exchange([(mine, 1 - other.rank)], [(theirs, 1 - other.rank)], other).wait()
        assert theirs[0] == 1 - other.rank


def _rules(group):
    return is_strict(), group.is_ordered, Pending.launch.__module__, "tests.preload" in sys.modules


def test_the_environment_holds_in_pytest_in_ranks_and_in_scripts(tmp_path):
    """`LIGHTNING_PARALLEL_STRICT_P2P=1 pytest` is to test all processes by the rules."""
    is_on = os.environ.get("LIGHTNING_PARALLEL_STRICT_P2P", "") not in ("", "0")
    here = (is_on, is_on, "tests.strict_order" if is_on else "lightning_parallel.comm.work")
    assert _rules(Group.alone("here"))[:3] == here
    assert run(_rules, 2) == [(*here, True)] * 2
    script = tmp_path / "script.py"
    script.write_text(
        "from lightning_parallel.comm import Group\n"
        "from tests.pipeline.test_strict_order import _rules\n"
        "print(_rules(Group.alone('here')))"
    )
    assert run_script(script).stdout == f"{(*here, True)}\n"


# --------------------------------------------------------------------------------------------------- without processes


def makespan(schedule, costs):
    """Play a schedule by NCCL's rules; returns the end of the last action. Raises CycleError if it waits in a circle.

    A message is one event on both of its ends. It begins when its sender has computed it, when the receiver has reached
    the action that used the message before, and when all messages that were issued before to the same group, on either
    end, are over.
    """
    after = {}  # event -> events that have to be over before
    seconds = {}
    for rank, row in enumerate(schedule.rows):
        computed = None
        issued = {}
        posted = {}  # (way, sender) -> what was computed when the next receive was issued

        def carry(message, group, computed, issued=issued):
            after.setdefault(message, set()).update(event for event in (computed, issued.get(group)) if event)
            issued[group] = message

        for action in row:
            kind, stage, microbatch = action
            target = stage + (1 if kind is Kind.F else -1)
            source = stage + (-1 if kind is Kind.F else 1)
            way = Kind.F if kind is Kind.F else Kind.I
            needs = {computed} - {None}
            if kind is not Kind.W and 0 <= source < schedule.num_stages:
                other = schedule.stage_ranks[source]
                message = ("message", way, source, microbatch)
                if other != rank:
                    carry(message, (way, other, rank), posted.get((way, other)))
                    posted[way, other] = computed
                    needs.add(message)
            after[action] = needs
            seconds[action] = costs[kind]
            computed = action
            if kind is not Kind.W and 0 <= target < schedule.num_stages:
                other = schedule.stage_ranks[target]
                if other != rank:
                    carry(("message", way, stage, microbatch), (way, rank, other), action)
    ends = {}
    for event in TopologicalSorter(after).static_order():
        ends[event] = max((ends[before] for before in after[event]), default=0) + seconds.get(event, 0)
    return max(ends.values())


@pytest.mark.sweep
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_waits_in_a_circle_or_for_long(name):
    cost = Cost(forward_s=1, input_gradient_s=1, weight_gradient_s=1)
    seconds = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2}
    for ranks in (1, 2, 3, 4, 5, 8, 12, 16):
        for microbatches in sorted({ranks, 2 * ranks, 4 * ranks}):
            schedule = build_schedule(name, ranks, microbatches)
            ideal = simulate(schedule, [cost] * schedule.num_stages, Link(0)).makespan_s
            assert makespan(schedule, seconds) <= 1.03 * ideal, (ranks, microbatches)
