"""Collectives that others call, as far as they pass through functions that can be traced."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel import comm, tracing
from lightning_parallel.callbacks.collective_tracer import CollectiveTracer, trace_collectives, trace_ddp_buckets
from lightning_parallel.comm import Group
from lightning_parallel.tracing import Recorder
from tests.harness import distributed
from tests.tracing.test_recorder import Device


def spans_of(call, axes=None, default="data_parallel", clock=None):
    recorder, tracer = Recorder(clock=clock), CollectiveTracer(axes or {}, default)
    with tracing.activate(recorder), trace_collectives(tracer):
        call()
        tracer.finish_pending(recorder)
    (window,) = recorder.close_step(wait=True)
    return window


PAYLOADS = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(4)), 16),
    "broadcast": (lambda: dist.broadcast(torch.ones(4), src=0), 16),
    "all_gather": (lambda: dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4)), 32),
    "all_to_all": (lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4)), 16),
    "all_gather_object": (lambda: dist.all_gather_object([None, None], "x"), None),
    "barrier": (lambda: dist.barrier(), None),
}


@pytest.mark.parametrize("op", list(PAYLOADS))
@distributed(world_size=2)
def test_calls_are_seen_with_their_payload(op):
    call, payload = PAYLOADS[op]
    window = spans_of(call)
    (span,) = window.spans
    assert (span.op, span.bytes, span.axis, span.ranks) == (op, payload, "data_parallel", (0, 1))
    assert span.dtype == (None if payload is None else "float32")
    assert 0 < span.blocked_ns <= span.end_ns - span.start_ns
    assert window.phases["communication_exposed"] == span.blocked_ns


@distributed(world_size=2)
def test_the_librarys_own_calls_count_once_and_the_functions_come_back(group):
    before = dist.all_reduce
    window = spans_of(lambda: comm.all_reduce_(torch.ones(1 << 20), group))
    assert [span.axis for span in window.spans] == ["world"]
    assert dist.all_reduce is before


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
def test_a_collective_waited_for_elsewhere_ends_when_it_is_complete(group):
    def call():
        dist.all_reduce(torch.ones(1 << 20), async_op=True).wait()
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
        assert (window.phases.get("communication_exposed", 0) > 0) == here == (span.blocked_ns > 0)
        assert span.in_flight > 0


def test_one_process_has_nothing_to_trace():
    assert Group.of().size == 1
    assert spans_of(lambda: None).spans == []


@distributed(world_size=2)
def test_ddp_buckets_are_seen_and_stay_as_they_are(group):
    def gradients(traces):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 200), nn.Linear(200, 64))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
        strategy = SimpleNamespace(model=model)
        recorder, tracer = Recorder(), CollectiveTracer({}, "data_parallel")
        with trace_collectives(tracer), trace_ddp_buckets(tracer, strategy), tracing.activate(recorder):
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
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
    assert len(buckets) == 2
    assert sum(span.bytes for span in buckets) == sum(4 * gradient.numel() for gradient in expected)
    assert {span.op for span in buckets} == {"all_reduce"}
    assert all(span.in_flight is not None for span in buckets)
    assert last.bytes == 4, "a call from Python is recorded once"
