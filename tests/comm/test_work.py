"""Communication as it is recorded, and left out in a dry run."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_parallel import comm
from lightning_parallel.comm import presence
from lightning_parallel.comm.work import Pending
from lightning_parallel.tracing import DeviceClock, Recorder, activate, span
from tests.harness import distributed, recorded_communication
from tests.strict_order import strict_order


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
def test_communication_is_skipped_on_its_own_thread_only(group):
    def reduce_elsewhere():
        found.append(comm.all_reduce(torch.ones(3), group).tolist())

    found = []
    with recorded_communication() as calls:
        with comm.skip_communication():
            with comm.skip_communication():
                pass
            if group.rank == 0:  # nobody answers
                assert comm.all_gather(torch.ones(2, 3), group).shape == (4, 3)
            thread = threading.Thread(target=reduce_elsewhere)
            thread.start()
            thread.join()
        assert comm.all_reduce(torch.ones(1), group).item() == 2
    assert found == [[2.0] * 3]
    assert [call.bytes for call in calls] == [12, 4]


class _Reduced(torch.autograd.Function):
    """Notes on which thread backward runs, as a layer's collective in backward would see it."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        _Reduced.threads.append(threading.get_ident())
        return gradient


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_backward_on_a_device_skips_communication_too():
    """Autograd would run it on a thread of the device, where the flag of the caller's thread is not seen."""
    _Reduced.threads = []
    with comm.skip_communication():
        _Reduced.apply(torch.ones(2, device="cuda", requires_grad=True)).sum().backward()
    assert _Reduced.threads == [threading.get_ident()]


@distributed(world_size=2)
def test_the_error_of_an_earlier_run_does_not_explain_a_later_one(group):
    for attempt in range(2):
        comm.start_heartbeat()
        comm.barrier(group)
        if attempt == 0:
            presence._heartbeat.report("an earlier error")
        comm.barrier(group)
        assert bool(presence._heartbeat.errors([1 - group.rank])) == (attempt == 0)
        comm.barrier(group)
        comm.stop_heartbeat()


class Fails:
    """A handle of torch whose communication fails."""

    def wait(self):
        raise RuntimeError("Connection closed by peer")


@distributed(world_size=2)
def test_each_wait_for_a_failed_call_raises(group):
    pending = Pending("all_reduce", group, 4, torch.float32, torch.empty(1)).launch(Fails)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="all_reduce.*Connection closed by peer"):
            pending.wait()


class DeviceThatWaits(DeviceClock):
    """A clock as of a GPU: to mark the end of a call, a stream waits for its handle."""

    def mark(self):
        return time.perf_counter_ns()

    def is_on_main_stream(self):
        return True

    def completion(self, work, lane):
        work.wait()
        return self.mark()

    def passed(self, mark):
        return True

    def read(self, mark):
        return mark

    def synchronize(self):
        pass


@distributed(world_size=2)
@strict_order(False)
def test_what_hosts_exchange_is_not_waited_for_by_the_clock_of_a_device(group):
    """gloo's handles are used up by one wait; a second one would wait for another message."""
    with activate(Recorder(clock=DeviceThatWaits())):
        received = torch.zeros(3)
        pending = comm.irecv(received, group, 1 - group.rank, 5)
        comm.isend(torch.full((3,), 1.0 + group.rank), group, 1 - group.rank, 5).wait()
        pending.wait()
        assert received.tolist() == [2.0 - group.rank] * 3
        assert comm.all_reduce(torch.tensor([1.0 + group.rank]), group).item() == 3
        assert comm.on_any_rank([group.rank == 1, False], group) == [True, False]
