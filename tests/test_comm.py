"""Collectives against what they mean, and what they record."""

import time

import pytest
import torch
import torch.distributed as dist

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups, liveness
from lightning_parallel.mesh import Mesh
from lightning_parallel.tracing import Recorder, activate, span
from tests.harness import RankError, distributed, run


@distributed(world_size=4)
def test_collectives(group):
    rank, size = group.rank, group.size
    mine = torch.arange(6.0).view(2, 3) + 10 * rank
    everyone = [torch.arange(6.0).view(2, 3) + 10 * other for other in range(size)]
    assert torch.equal(comm.all_reduce(mine, group), sum(everyone))
    assert torch.equal(comm.all_reduce(mine, group, "max"), everyone[-1])
    assert torch.equal(mine, everyone[rank]), "all_reduce must not change its input"
    for dim in (0, 1, -1):
        assert torch.equal(comm.all_gather(mine, group, dim), torch.cat(everyone, dim))
    assert torch.equal(comm.broadcast_(mine.clone(), group, source=2), everyone[2])
    wide = torch.arange(8.0).view(4, 2) + rank
    assert torch.equal(comm.all_to_all(wide, group)[:, 0], torch.arange(size) + 2.0 * rank)


@distributed(world_size=4)
def test_uneven_gather_and_scatter(group):
    sizes = [3, 0, 1, 2]
    full = torch.arange(12.0).view(2, 6)
    start = sum(sizes[: group.rank])
    mine = full[:, start : start + sizes[group.rank]]
    assert torch.equal(comm.all_gather(mine, group, 1, sizes), full)
    assert torch.equal(comm.reduce_scatter(full, group, 1, sizes), 4 * mine)
    assert torch.equal(comm.reduce_scatter(full.t()[:4], group, 0), 4 * full.t()[group.rank : group.rank + 1])


@distributed(world_size=2)
def test_send_and_receive(group):
    other = 1 - group.rank
    send = comm.isend(torch.full((3,), float(group.rank)), group, other)
    received = comm.irecv(torch.empty(3), group, other).wait()
    send.wait()
    assert received.tolist() == [other] * 3


@distributed(world_size=4)
def test_mesh_groups_and_records():
    groups = MeshGroups(Mesh(data_parallel=2, tensor_parallel=2))
    assert groups.tensor_parallel.ranks == ((0, 1), (0, 1), (2, 3), (2, 3))[groups.world.rank]
    assert groups.data_parallel.ranks == ((0, 2), (1, 3), (0, 2), (1, 3))[groups.world.rank]
    assert groups.pipeline_parallel.size == 1
    assert groups.model is groups.tensor_parallel
    with comm.record() as records:
        comm.all_reduce(torch.zeros(5), groups.tensor_parallel)
        pending = comm.all_reduce_(torch.zeros(7), groups.data_parallel, async_op=True)
        assert len(records) == 1
        pending.wait()
        comm.all_reduce(torch.zeros(7), groups.pipeline_parallel)
    assert [(record.op, record.axis, record.bytes, record.group_size) for record in records] == [
        ("all_reduce", "tensor_parallel", 20, 2),
        ("all_reduce", "data_parallel", 28, 2),
    ]
    assert all(0 <= record.blocked_s <= record.seconds for record in records)


def test_a_group_of_one_needs_no_processes():
    group = Group.alone("tensor_parallel")
    tensor = torch.ones(3)
    assert comm.all_reduce(tensor, group) is tensor
    assert comm.all_gather(tensor, group) is tensor
    assert comm.all_reduce_(tensor, group, async_op=True).wait() is tensor
    comm.agree("x", 1, group)


@distributed(world_size=2)
def test_errors_and_disagreements_are_raised_everywhere(group):
    with pytest.raises(ValueError, match="(?s)plan.*rank 0: 0.*rank 1: 1"):
        comm.agree("the plan", group.rank, group)
    comm.agree("the plan", "same", group)
    with pytest.raises(TypeError, match="bad" if group.rank else "(?s)bad.*found on rank 1"):
        comm.raise_together(TypeError("bad") if group.rank else None, group)
    comm.raise_together(None, group)


def _fail_on_rank_one(group):
    assert group.rank == 0, "this rank fails"
    comm.barrier(group)


def test_the_harness_shows_every_failing_rank_and_recovers():
    with pytest.raises(RankError, match="(?s)rank 0.*rank 1: error.*this rank fails"):
        run(_fail_on_rank_one, 2, deadline_s=5)
    test_send_and_receive()


def _late(rank, seconds):
    if dist.get_rank() == rank:
        time.sleep(seconds)


@distributed(world_size=2)
def test_a_recorder_sees_what_was_exposed_and_what_was_hidden(group):
    large = torch.ones(1 << 20)  # beyond what two ranks exchange directly, so that its completion is reported
    recorder = Recorder()
    comm.barrier(group)
    recorder.close_step()
    with activate(recorder):
        _late(1, 0.08)
        pending = comm.all_reduce_(large, group, async_op=True)
        with span("compute", phase="forward"):
            _late(0, 0.05)
        pending.wait()
        (window,) = recorder.close_step()
    found = next(entry for entry in window.spans if entry.category == "communication")
    assert (found.op, found.axis, found.bytes, found.dtype, found.ranks, found.sequence) == (
        "all_reduce",
        "world",
        4 << 20,
        "float32",
        (0, 1),
        0,
    )
    assert sum(window.phases.values()) == window.wall_ns
    exposed = window.phases["communication_exposed"]
    assert exposed == found.blocked_ns
    computed = next(entry for entry in window.spans if entry.name == "compute")
    late = comm.all_gather_object(found.start_ns, group)[1]  # the clock is that of the machine
    assert max(0, late - computed.end_ns) <= exposed <= window.wall_ns - (computed.end_ns - computed.start_ns)
    assert found.complete_ns >= late


@distributed(world_size=2)
def test_a_recorder_sees_messages_and_objects(group):
    recorder = Recorder()
    with activate(recorder):
        comm.broadcast_object("x", group)
        if group.rank == 0:
            time.sleep(0.03)
            comm.isend(torch.ones(4), group, 1).wait()
        else:
            comm.irecv(torch.ones(4), group, 0).wait()
        (window,) = recorder.close_step()
    broadcast, message = window.spans
    assert (broadcast.op, broadcast.bytes) == ("broadcast_object", None)
    assert (message.op, message.bytes, message.peer) == (("send", "recv")[group.rank], 16, 1 - group.rank)
    sent = comm.all_gather_object(message.start_ns, group)[0]  # the clock is that of the machine
    assert group.rank == 0 or window.phases["pipeline_wait"] >= sent - message.start_ns
    assert not recorder.in_flight


@distributed(world_size=2)
def test_what_stopped_an_earlier_run_is_not_said_of_a_later_one(group):
    for attempt in range(2):
        liveness.start()
        comm.barrier(group)
        if attempt == 0:
            liveness._heartbeat.report("an earlier error")
        comm.barrier(group)
        _, said = liveness._heartbeat.silent([1 - group.rank])
        assert bool(said) == (attempt == 0)
        comm.barrier(group)
        liveness.stop()
