"""Counts, bytes and times of communication, against closed forms and constructed waits."""

import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_parallel import HybridParallelStrategy, comm, tracing
from lightning_parallel.callbacks import CommunicationProfiler, StepBreakdown
from lightning_parallel.callbacks.monitors.communication import CommunicationAccumulator, bus_factor, wire_factor
from lightning_parallel.callbacks.recording.clocks import ClockOffset
from lightning_parallel.callbacks.recording.collective_tracer import CollectiveTracer, trace_collectives
from lightning_parallel.comm import Group
from lightning_parallel.tracing import CallCounter, Recorder, Span, Window
from tests.callbacks.conftest import place_rank
from tests.harness import distributed, run
from tests.strategies.models import BATCH, Net, loader, trainer_for
from tests.strategies.test_pipeline import Deep
from tests.timing import compares_durations, durations

WORD = 32
"""Bytes beside the activations of a microbatch."""


def fit(sizes, replicas=1, microbatches=4, **options):
    rank, size = place_rank()
    callback = CommunicationProfiler(show_table=False, every_n_batches=3, warmup_batches=0)
    trainer = trainer_for(
        HybridParallelStrategy(num_microbatches=microbatches, **sizes), size, callbacks=[callback], **options
    )
    module = Deep()
    trainer.fit(module, loader(replicas, rank // (size // replicas)))
    return callback.report(), sum(parameter.numel() for parameter in module.parameters())


def chosen(report, axis, op, least=0):
    """The records of an operation with numbers of at least so many bytes."""
    records = [record for record in report["records"] if (record["axis"], record["op"]) == (axis, op)]
    return [record for record in records if record.get("payload_bytes", -1) >= least]


def total(report, axis, op, least=0):
    """Bytes of all steps and ranks."""
    records = chosen(report, axis, op, least)
    return report["world_size"] * report["steps"] * sum(record["count"] * record["payload_bytes"] for record in records)


def test_bytes_between_replicas_are_those_of_the_parameters_at_each_accumulated_step():
    sizes = {"data_parallel_size": 2}
    (report, parameters), other = run(fit, 2, sizes=sizes, replicas=2, accumulate_grad_batches=2)
    assert other[0] == report
    assert report["steps"] == 8
    assert total(report, "data_parallel", "all_reduce", least=100) == pytest.approx(2 * 8 * 8 * parameters / 2)
    assert report["desynchronised"] == []


def test_bytes_between_stages_are_those_of_the_boundaries():
    (report, _), *_ = run(fit, 4, sizes={"pipeline_parallel_size": 4})
    message = BATCH // 4 * 8 * 8
    messages = report["steps"] * 4 * 3  # microbatches, boundaries
    received = total(report, "pipeline_parallel", "recv")
    assert total(report, "pipeline_parallel", "send") == pytest.approx(received)
    beside = received - messages * (2 * message + WORD)
    assert 0 <= beside < 1000  # what the neighbours agreed on once


class Extra(Deep):
    """Rank 1 calls one collective more than the others, in a group of its own."""

    def training_step(self, batch, index):
        if index == 2 and self.global_rank == 1 and self.current_epoch == 0:
            self.stray = comm.all_reduce_(torch.ones(3), self.extra, async_op=True)
        return super().training_step(batch, index)


def fit_tensor_parallel_with_a_stray_collective():
    rank, size = place_rank()
    callback = CommunicationProfiler(show_table=False)
    module = Extra()
    module.extra = Group.of(dist.new_group(backend="gloo"), "extra")
    trainer_for(HybridParallelStrategy(tensor_parallel_size=size), size, callbacks=[callback]).fit(module, loader())
    if rank == 1:
        module.stray.wait()
    else:
        comm.all_reduce_(torch.ones(3), module.extra)
    return callback.report()


def test_bytes_between_tensor_parallel_ranks_and_a_rank_with_a_collective_too_many():
    report, other = run(fit_tensor_parallel_with_a_stray_collective, 2)
    assert report == other
    # Of activations; the loss over divided classes sends a number for each of its rows.
    (record,) = (
        one for one in chosen(report, "tensor_parallel", "all_reduce") if one["payload_bytes"] == BATCH * 8 * 8
    )
    assert record["count"] == 4 + 4 + 1  # forward and backward of each block, and backward of the head
    assert (record["group_size"], record["dtype"]) == (2, "float64")
    (found,) = report["desynchronised"]
    assert (found["axis"], found["group"]) == ("extra", [0, 1])
    assert 1 in found["ranks"] or "rank 1 issued 1" in found["detail"]
    assert "all_reduce of 12 bytes float32 on rank 1" in found["detail"]


# --------------------------------------------------------------------------------------------------- the accumulator


@distributed(world_size=2)
def test_groups_of_the_same_ranks_are_told_apart(group):
    """Between two groups the order is free: a thread may use a group of its own."""
    groups = [Group.of(dist.new_group([0, 1]), "data_parallel") for _ in range(2)]
    recorder, tracer = Recorder(), CollectiveTracer({(0, 1): "data_parallel"})
    with tracing.activate(recorder), trace_collectives(tracer, recorder):
        for _ in range(20):
            mine = groups[:: 1 if group.rank == 0 else -1]
            pending = [comm.all_reduce_(torch.ones(4 + 4 * (one is groups[0])), one, async_op=True) for one in mine]
            works = [dist.all_reduce(torch.ones(9), group=one.process_group, async_op=True) for one in mine]
            for each in (*pending, *works):
                each.wait()
            tracer.finish_pending(recorder)
    accumulator = CommunicationAccumulator(group.rank, None, recorder.calls, [])
    for window in recorder.close_step():
        accumulator.add(window)
    report = accumulator.summarize(comm.all_gather_object(accumulator.share(), group))
    assert report["desynchronised"] == []
    assert [record["count"] for record in report["records"]] == [40, 20, 20]


def window(*spans):
    return Window(0, 0, 10**9, {}, list(spans))


def collective(start_ns, end_ns, complete=True, ranks=(0, 1), op="all_reduce", blocked_ns=0, sequence=0):
    in_flight = end_ns - start_ns if complete else None
    facts = {"axis": "data_parallel", "op": op, "bytes": 1000, "ranks": ranks, "dtype": "float32"}
    facts |= {"in_flight": in_flight, "blocked_ns": blocked_ns, "sequence": sequence, "exposed_ns": blocked_ns}
    return Span("communication", op, start_ns, end_ns, 0, **facts)


def report_of(*by_rank, clocks=None, calls=None):
    ranks = [CommunicationAccumulator(rank, clocks, (calls or {}).get(rank, {}), []) for rank in range(len(by_rank))]
    for accumulator, spans in zip(ranks, by_rank):
        accumulator.add(window(*spans))
    return ranks[0].summarize([accumulator.share() for accumulator in ranks])


def test_latency_begins_with_the_last_call_and_skew_ends_there():
    spans = [collective(100, 900, blocked_ns=300)], [collective(700, 910, blocked_ns=100)]
    (record,) = report_of(*spans)["records"]
    assert record["exposed"] == pytest.approx(200e-9), "mean over the ranks"
    assert record["skew"] == pytest.approx(600e-9)
    assert record["latency"] == pytest.approx(200e-9)
    assert record["bus_bandwidth"] == pytest.approx(1000 / 200e-9)


def test_bandwidth_is_that_of_the_group_and_not_of_the_world():
    issued = [(0, "all_reduce"), (200, "all_reduce"), (400, "all_gather")]
    calls = [
        [collective(start, start + 100, ranks=pair, op=op, sequence=start) for start, op in issued]
        for pair in ((0, 1), (0, 1), (2, 3), (2, 3))
    ]
    gather, reduce = report_of(*calls)["records"]
    assert (gather["count"], reduce["count"]) == (1, 2)
    assert (reduce["group_size"], reduce["wire_bytes"]) == (2, 1000)
    assert reduce["bus_bandwidth"] == pytest.approx(1000 / 100e-9)
    assert gather["bus_bandwidth"] == pytest.approx(gather["algorithm_bandwidth"] / 2)


def test_without_a_common_clock_there_is_no_skew_and_latency_is_that_of_the_rank_that_waits_least():
    report = report_of([collective(100, 900)], [collective(5700, 5910)], clocks={})
    (record,) = report["records"]
    assert "skew" not in record
    assert record["latency"] == pytest.approx(210e-9)
    assert "clocks were not compared" in report["missing"][0]
    (record,) = report_of([collective(100, 900)], [collective(700, 910, complete=False)], clocks={})["records"]
    assert "latency" not in record  # the other may have been the one that nobody waited for


def test_skew_between_hosts_has_an_uncertainty():
    """The clock of rank 1 is 5000 ahead of that of rank 0, give or take 40."""
    clocks = {0: ClockOffset(0, 0, 0), 1: ClockOffset(-5000, 40, 0)}
    (record,) = report_of([collective(100, 900)], [collective(5700, 5910)], clocks=clocks)["records"]
    assert record["skew"] == pytest.approx(600e-9)
    assert record["skew_uncertainty"] == pytest.approx(40e-9)
    assert record["latency"] == pytest.approx(210e-9), "that of the rank that waits least needs no clock"


def message(op, peer, start_ns, end_ns, blocked_ns):
    facts = {"axis": "pipeline_parallel", "op": op, "bytes": 64, "ranks": (0, 1), "dtype": "float32", "peer": peer}
    return Span("communication", op, start_ns, end_ns, 0, blocked_ns=blocked_ns, sequence=0, tag=1, **facts)


@pytest.mark.parametrize(("since", "latency"), [(400, 150e-9), (550, None)])
def test_the_time_of_a_message_is_known_if_it_was_already_waited_for(since, latency):
    report = report_of([message("send", 1, 500, 505, 5)], [message("recv", 0, 100, 650, 650 - since)])
    received, sent = report["records"]
    assert received.get("latency") == sent.get("latency") == (latency and pytest.approx(latency))
    assert (received["count"], sent["count"], sent["wire_bytes"], received["wire_bytes"]) == (0.5, 0.5, 64, 0)


def issued(count, *extra):
    calls = CallCounter()
    for _ in range(count):
        calls.add("all_reduce", 8, "float32")
    for op in extra:
        calls.add(op, 8, "float32")
    return {("tensor_parallel", (0, 1, 2), "1"): calls}


@pytest.mark.parametrize(
    ("last", "detail"),
    [
        (issued(100, "broadcast"), "call 100 is broadcast of 8 bytes float32 on rank 2, none on rank 0"),
        (issued(99, "broadcast"), "call 99 is broadcast of 8 bytes float32 on rank 2, all_reduce of 8 bytes"),
        (issued(200), "rank 2 issued 200 collectives, rank 0 100; the first difference is older"),
        (issued(99), "call 99 is none on rank 2"),
        ({}, "rank 2 issued 0 collectives"),
    ],
)
def test_the_call_in_which_ranks_differ_is_named(last, detail):
    report = report_of([], [], [], calls={0: issued(100), 1: issued(100), 2: last})
    (found,) = report["desynchronised"]
    assert (found["ranks"], found["group"], found["axis"]) == ([2], [0, 1, 2], "tensor_parallel")
    assert detail in found["detail"]


@pytest.mark.parametrize(
    ("op", "bus", "wire"),
    [("all_reduce", 1.5, 1.5), ("all_gather", 0.75, 0.75), ("broadcast", 1, 0.75), ("send", 1, 1), ("recv", 1, 0)],
)
def test_factors_of_four_ranks(op, bus, wire):
    assert (bus_factor(op, 4), wire_factor(op, 4)) == (bus, wire)


# ------------------------------------------------------------------------------------------------- stock strategies


class SlowOnOne(Net):
    """Rank 1 comes late to the exchange of gradients."""

    def on_before_backward(self, loss):
        time.sleep(0.06 * self.global_rank)


def fit_stock(kind, module_class=Net, accumulate=1):
    rank, size = place_rank()
    callbacks = [StepBreakdown(show_table=False), CommunicationProfiler(show_table=False, warmup_batches=2)]
    strategies = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "unused": lambda: DDPStrategy(process_group_backend="gloo", find_unused_parameters=True),
    }
    module = module_class(hidden=64)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    trainer = trainer_for(strategies[kind](), size, callbacks=callbacks, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(size, rank, dtype=torch.float32))
    return [callback.report() for callback in callbacks], parameters


@compares_durations
def test_the_buckets_of_ddp_are_seen_and_so_is_the_wait_for_them():
    ((breakdown, report), parameters), _ = run(fit_stock, 2, kind="ddp", module_class=SlowOnOne)
    (record,) = chosen(report, "data_parallel", "all_reduce", least=100)
    assert (record["payload_bytes"], record["count"]) == (4 * parameters, 1)
    assert record["skew"] > 0.05
    first, late = breakdown["ranks"]
    assert first["communication_exposed"] > 0.05
    with durations():
        assert record["latency"] < record["skew"] / 2
        assert late["communication_exposed"] < first["communication_exposed"] / 2
        assert first["backward"] < first["communication_exposed"] / 2


def test_ddp_exchanges_accumulated_gradients_once():
    ((_, report), parameters), _ = run(fit_stock, 2, kind="unused", accumulate=2)
    (record,) = chosen(report, "data_parallel", "all_reduce", least=100)
    assert (record["payload_bytes"], record["count"]) == (4 * parameters, 0.5)
