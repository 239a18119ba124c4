"""Collectives that others call, as far as they pass through functions that can be traced."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel import comm, tracing
from lightning_parallel.callbacks.recording.collective_tracer import CollectiveTracer, trace_collectives
from lightning_parallel.comm import Group
from lightning_parallel.tracing import InFlight, Recorder
from tests.harness import distributed
from tests.tracing.test_recorder import Device


def spans_of(call, axes=None, default="data_parallel", clock=None):
    recorder, tracer = Recorder(clock=clock), CollectiveTracer(axes or {}, default)
    with tracing.activate(recorder), trace_collectives(tracer, recorder):
        call()
        tracer.end_step(recorder)
    (window,) = recorder.close_step(wait=True)
    return window


def exchanged(rank):
    """A message from the first rank to the second."""
    return dist.send(torch.ones(4), 1) if rank == 0 else dist.recv(torch.ones(4), 0)


def pieces(rank):
    return [torch.ones(4), torch.ones(4)] if rank == 0 else None


# Operation -> a call, and its payload. In functional collectives nothing but a result is waited for.
PAYLOADS = {
    "all_reduce": (lambda rank: dist.all_reduce(torch.ones(4)), 16),
    "broadcast": (lambda rank: dist.broadcast(torch.ones(4), src=0), 16),
    "reduce": (lambda rank: dist.reduce(torch.ones(4), dst=0), 16),
    "all_gather": (lambda rank: dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4)), 32),
    "gather": (lambda rank: dist.gather(torch.ones(4), pieces(rank), dst=0), 32),
    "scatter": (lambda rank: dist.scatter(torch.ones(4), pieces(rank), src=0), 32),
    "reduce_scatter": (lambda rank: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4)), 16),
    "all_to_all": (lambda rank: dist.all_to_all_single(torch.ones(4), torch.ones(4)), 16),
    "send recv": (exchanged, 16),
    "all_reduce functional": (lambda rank: functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum(), 16),
    "all_gather functional": (lambda rank: functional.all_gather_tensor(torch.ones(4), 0, dist.group.WORLD).sum(), 32),
    "barrier": (lambda rank: dist.barrier(), None),
    "barrier monitored": (lambda rank: dist.monitored_barrier(), None),
}


@pytest.mark.parametrize("inference", [False, True])
@distributed(world_size=2)
def test_calls_are_seen_with_their_payload(inference, group):
    for op, (call, payload) in PAYLOADS.items():
        with torch.inference_mode(inference):
            window = spans_of(lambda call=call: call(group.rank))
        (span,) = window.spans
        op = op.split()[group.rank if "send" in op else 0]
        assert (span.op, span.bytes, span.axis, span.ranks) == (op, payload, "data_parallel", (0, 1))
        assert span.dtype == (None if payload is None else "float32")
        assert 0 < span.blocked_ns <= span.end_ns - span.start_ns, op
        assert span.exposed_ns == span.blocked_ns
        wait = "communication_exposed" if span.peer is None else "pipeline_wait"
        assert window.phases[wait] == span.blocked_ns


@distributed(world_size=2)
def test_python_objects_are_seen_under_the_names_of_their_calls(group):
    def call():
        dist.all_gather_object([None, None], "x" * 1000)
        dist.broadcast_object_list(["y" * 500], src=0)
        comm.all_gather_object("z" * 2000, group)  # one call, whose size is known later

    *theirs, ours = spans_of(call).spans
    assert [span.op for span in theirs] == ["all_gather_object"] * 2 + ["broadcast_object"] * 2
    assert [span.op for span in (ours,)] == ["all_gather_object"]
    sizes = [theirs[1].bytes, theirs[3].bytes, ours.bytes]
    assert [size // 500 for size in sizes] == [4, 1, 8], "with what pickling adds"
    assert all(span.dtype is None for span in (*theirs, ours))


@distributed(world_size=2)
def test_the_librarys_own_calls_count_once_and_nothing_is_left(group):
    functions = [dist.all_reduce, dist.Work.wait, dist._broadcast_coalesced]

    def call():
        for numbers in (4, 1 << 20):  # as messages between the two, and as a collective
            comm.all_reduce_(torch.ones(numbers), group)

    assert [span.axis for span in spans_of(call).spans] == ["world"] * 2
    assert functions == [dist.all_reduce, dist.Work.wait, dist._broadcast_coalesced]
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(("c10d::", "_c10d_functional::")):
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect"), name


@distributed(world_size=4)
def test_groups_are_named_by_their_ranks():
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]], backend="gloo")
    other, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]], backend="gloo")

    def call():
        for group in (pairs, other, None):
            dist.all_reduce(torch.ones(1), group=group)

    axes = {(0, 2): "tensor_parallel", (1, 3): "tensor_parallel"}
    assert [span.axis for span in spans_of(call, axes, "data_parallel").spans] == [
        "tensor_parallel",
        "world",
        "data_parallel",
    ]


@distributed(world_size=2)
def test_a_collective_that_nobody_waits_for_ends_when_it_is_complete(group):
    def call():
        work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        comm.barrier(group)

    window = spans_of(call)
    span = next(span for span in window.spans if span.op == "all_reduce")
    assert span.in_flight is not None
    assert span.end_ns == span.complete_ns


@distributed(world_size=2)
def test_a_collective_in_another_stream_blocks_nothing():
    for here in (True, False):
        device = Device()
        device.is_on_main_stream = lambda here=here: here
        window = spans_of(lambda: dist.all_reduce(torch.ones(4)), clock=device)
        (span,) = window.spans
        assert (window.phases.get("communication_exposed", 0) > 0) == here == (span.exposed_ns > 0)


def test_a_stream_that_stands_still_for_communication_is_exposed():
    device = Device()
    recorder, tracer = Recorder(clock=device), CollectiveTracer({})
    with tracing.activate(recorder):
        recorder.enter("forward")
        tracer.wait_event(None, None, device.mark)  # for nothing that communicates
        InFlight(recorder, "all_gather", "data_parallel", (0, 1), 8, "float32", None)
        tracer.wait_event(None, "another stream", device.mark)
        tracer.wait_event(None, None, device.mark)
        recorder.leave()
    (window,) = recorder.close_step(wait=True)
    assert window.phases["communication_exposed"] == 20
    assert [span.category for span in window.spans] == ["wait"]


def test_one_process_has_nothing_to_trace():
    assert Group.of().size == 1
    assert spans_of(lambda: None).spans == []


@distributed(world_size=2)
def test_ddp_buckets_are_seen_and_stay_as_they_are(group):
    def gradients(traces):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 200), nn.Linear(200, 64))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
        recorder, tracer = Recorder(), CollectiveTracer({}, "data_parallel")
        with trace_collectives(tracer, recorder), tracing.activate(recorder):
            for _ in range(2 if traces else 0):  # buckets are rebuilt after the first step
                model.zero_grad()
                model(torch.full((3, 64), 1.0 + group.rank)).sum().backward()
                tracer.finish_pending(recorder)
                dist.all_reduce(torch.ones(1))
                (window,) = recorder.close_step()
        if not traces:
            for _ in range(2):
                model.zero_grad()
                model(torch.full((3, 64), 1.0 + group.rank)).sum().backward()
            return [parameter.grad for parameter in model.parameters()]
        model.register_comm_hook(None, default_hooks.allreduce_hook)  # DDP's only place for a hook is free
        return [parameter.grad for parameter in model.parameters()], window.spans

    expected = gradients(traces=False)
    found, (*buckets, last) = gradients(traces=True)
    assert {span.op for span in buckets} == {"broadcast", "all_reduce"}, "what is in which bucket is agreed on once"
    buckets = [span for span in buckets if span.op == "all_reduce"]
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
    assert len(buckets) == 2
    assert sum(span.bytes for span in buckets) == sum(4 * gradient.numel() for gradient in expected)
    assert all(span.in_flight is not None for span in buckets)
    assert last.bytes == 4, "a call from Python is recorded once"
