"""The trace of all ranks: valid, on one clock, with every message's arrow."""

import gzip
import json
import os
import sys
import time
from collections import Counter, defaultdict

import pytest
import torch

from lightning_parallel import tracing
from lightning_parallel.callbacks.recording.clocks import ClockOffset, compare_clocks
from lightning_parallel.callbacks.report.trace import (
    TraceAccumulator,
    add_kineto,
    chrome_trace,
    read_trace,
    write_trace,
)
from lightning_parallel.tracing import Recorder, Span, Window
from tests.callbacks.conftest import TRACED_STEPS
from tests.harness import distributed, run_script, start_script
from tests.timing import compares_durations, durations

MESH = {"data_parallel": 1, "pipeline_parallel": 2, "tensor_parallel": 1}
PIPELINE = ("pipeline_parallel", (0, 1))


SAME_CLOCK = ClockOffset(0, 0, 0)


def part(rank, spans, clock=SAME_CLOCK):
    place = {"rank": rank, "coordinate": {"data_parallel": 0, "pipeline_parallel": rank, "tensor_parallel": 0}}
    accumulator = TraceAccumulator(place, steps=10)
    times = [time for span in spans for time in (span.start_ns, span.end_ns)]
    accumulator.add(Window(0, min(times), max(times), {}, list(spans)))
    return json.loads(json.dumps(accumulator.part(clock)))


def message(op, start, end, peer, blocked=0, tag=0, sequence=0):
    axis, ranks = PIPELINE
    facts = {"axis": axis, "op": op, "bytes": 8, "ranks": ranks, "peer": peer, "dtype": "float32", "tag": tag}
    return Span("communication", op, start, end, 0, blocked_ns=blocked, sequence=sequence, **facts)


def drawn(trace, **wanted):
    return [event for event in trace["traceEvents"] if all(event.get(key) == value for key, value in wanted.items())]


# ------------------------------------------------------------------------------------------------------ a real run


@pytest.fixture(scope="module")
def trace(profile):
    return read_trace(profile / "trace.json.gz")


def test_every_rank_is_a_process_with_its_place_in_the_mesh(trace):
    names = {event["pid"]: event["args"]["name"] for event in drawn(trace, name="process_name")}
    assert names[3] == "rank 3: pipeline_parallel 1, tensor_parallel 1"
    assert sorted(names) == [0, 1, 2, 3]


def test_rows_have_names_and_their_spans_nest(trace):
    rows = defaultdict(list)
    for event in drawn(trace, ph="X"):
        assert event["dur"] >= 0
        assert event["ts"] >= 0
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in drawn(trace, name="thread_name")}
    assert rows.keys() == names.keys()
    expected = {"steps", "compute", "data", "optimizer", "communication: tensor parallel"}
    assert expected <= {name for (rank, _), name in names.items() if rank == 0}
    for spans in rows.values():
        open_ends = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-6
            open_ends.append(end)


def test_there_are_as_many_calls_as_the_profiler_counted(trace, profile):
    counted = Counter()
    for record in json.loads((profile / "report.json").read_text())["reports"]["CommunicationProfiler"]["records"]:
        if record["axis"] == "tensor_parallel":
            counted[record["op"]] += record["count"] * 4 * TRACED_STEPS  # on four ranks
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in drawn(trace, name="thread_name")}
    found = Counter(
        event["name"]
        for event in drawn(trace, cat="communication")
        if rows[event["pid"], event["tid"]].startswith("communication: tensor parallel")
    )
    assert counted == pytest.approx(dict(found))


def test_every_message_has_an_arrow_and_is_sent_before_it_is_received(trace):
    starts = {event["id"]: event for event in drawn(trace, ph="s")}
    ends = {event["id"]: event for event in drawn(trace, ph="f")}
    sends, receipts = (drawn(trace, cat="communication", name=op) for op in ("send", "recv"))
    assert starts.keys() == ends.keys()
    assert len(starts) == len(sends) == len(receipts) > 0
    send_at = {(event["pid"], event["tid"], event["ts"]): event for event in sends}
    for number, start in starts.items():
        end = ends[number]
        sent = send_at[start["pid"], start["tid"], start["ts"]]
        (received,) = [
            event
            for event in receipts
            if (event["pid"], event["tid"]) == (end["pid"], end["tid"])
            and event["ts"] <= end["ts"] < event["ts"] + event["dur"]
        ]
        assert sent["args"]["peer"] == received["pid"]
        assert sent["args"]["bytes"] == received["args"]["bytes"]
        assert sent["ts"] + sent["dur"] <= received["ts"] + received["dur"] + 1e-6


# ---------------------------------------------------------------------------------------------------- written spans


def test_messages_are_matched_by_tag_whatever_their_order():
    sender = part(0, [message("send", 0, 10, 1, tag=1), message("send", 20, 30, 1, tag=2)])
    receiver = part(1, [message("recv", 1, 40, 0, blocked=5, tag=2), message("recv", 2, 50, 0, blocked=5, tag=1)])
    trace = chrome_trace([sender, receiver], MESH)
    lengths = {e["id"]: e["ts"] for e in drawn(trace, ph="f")}
    pairs = {(e["ts"] * 1e3, round(lengths[e["id"]] * 1e3)) for e in drawn(trace, ph="s")}
    assert pairs == {(0, 50), (20, 40)}


def test_a_sending_that_was_waited_for_late_ends_when_it_has_arrived():
    parts = [part(0, [message("send", 0, 900, 1)]), part(1, [message("recv", 0, 100, 0, blocked=100)])]
    (sent,) = drawn(chrome_trace(parts, MESH), name="send")
    assert sent["dur"] == pytest.approx(0.1)


def test_ranks_are_moved_onto_one_clock_and_left_out_where_it_is_not_known():
    spans = [Span("phase", "forward", 1000, 2000, 0)]
    shifted = [Span("phase", "forward", 6000, 7000, 0)]
    parts = [part(0, spans), part(1, shifted, ClockOffset(-5000, 7, 0)), part(2, spans, None)]
    trace = chrome_trace(parts, {**MESH, "pipeline_parallel": 3})
    first, second = drawn(trace, name="forward")
    assert (first["ts"], first["dur"]) == (second["ts"], second["dur"]) == (0, 1)
    assert trace["otherData"]["left_out"] == [2]
    assert [clock["uncertainty_ns"] for clock in trace["otherData"]["clocks"]] == [0, 7]


def test_spans_that_overlap_get_rows_of_their_own():
    spans = [Span("communication", "all_reduce", *times, 0, axis="data_parallel") for times in ((0, 50), (40, 90))]
    trace = chrome_trace([part(0, spans)], MESH)
    names = [event["args"]["name"] for event in drawn(trace, name="thread_name")]
    assert names == ["steps", "communication: data parallel", "communication: data parallel (2)"]


def test_the_optimizer_is_drawn_without_the_forward_inside_of_it():
    spans = [Span("phase", "optimizer", 0, 100, 0), Span("phase", "forward", 20, 60, 0)]
    pieces = drawn(chrome_trace([part(0, spans)], MESH), name="optimizer", ph="X")
    assert [(event["ts"] * 1e3, event["dur"] * 1e3) for event in pieces] == [(0, 20), (60, 40)]


def test_a_trace_is_read_as_it_was_written(tmp_path):
    trace = chrome_trace([part(0, [Span("phase", "forward", 0, 5, 0)])], MESH)
    write_trace(trace, tmp_path / "trace.json.gz")
    assert read_trace(tmp_path / "trace.json.gz") == json.loads(json.dumps(trace))
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="traceEvents"):
        read_trace(tmp_path / "other.json")
    with gzip.open(tmp_path / "bomb.json.gz", "wb") as file:
        for _ in range(100):
            file.write(b" " * (1 << 20))
    for content, expected in ((None, "more than 50 times its size"), (b"[" * 100_000, "recursion"), (b"\xff", "utf-8")):
        if content is not None:
            (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(content))
        with pytest.raises(ValueError, match=f"bomb.json.gz must hold JSON.*{expected}"):
            read_trace(tmp_path / "bomb.json.gz")


# ---------------------------------------------------------------------------------------------------------- clocks


@compares_durations
@distributed(world_size=3)
def test_a_clock_that_is_five_seconds_ahead_is_set_back(group):
    ahead_ns = 5_000_000_000 if group.rank > 0 else 0
    clock = compare_clocks(group, "b" if group.rank > 0 else "a", lambda: time.perf_counter_ns() + ahead_ns)
    with durations():
        assert clock.uncertainty_ns < 50_000_000
    assert abs(clock.offset_ns + ahead_ns) <= clock.uncertainty_ns
    assert (clock.uncertainty_ns == 0) == (group.rank == 0)


@compares_durations
def test_events_of_the_profiler_lie_within_the_span_that_they_ran_in(tmp_path):
    with tracing.activate(Recorder()) as recorder, torch.profiler.profile() as profiler:
        with tracing.span("forward", "forward"):
            torch.randn(200, 200) @ torch.randn(200, 200)
        (window,) = recorder.close_step()
    accumulator = TraceAccumulator({"rank": 0, "coordinate": {}}, steps=1)
    accumulator.add(window)
    trace = chrome_trace([accumulator.part(ClockOffset(0, 0, time.time_ns() - time.perf_counter_ns()))], {})
    profiler.export_chrome_trace(str(tmp_path / "kineto.json"))
    assert add_kineto(trace, read_trace(tmp_path / "kineto.json")) == 0
    (forward,) = drawn(trace, name="forward")
    (product,) = drawn(trace, name="aten::mm", ph="X")
    slack_us = 500  # two readings of two clocks
    with durations():
        assert forward["ts"] - slack_us <= product["ts"]
        assert product["ts"] + product["dur"] <= forward["ts"] + forward["dur"] + slack_us
    assert product["pid"] == 0
    with pytest.raises(ValueError, match="rank 7"):
        add_kineto(trace, read_trace(tmp_path / "kineto.json"), rank=7)


CLOCK_SCRIPT = """
import ctypes, os, sys, torch.distributed as dist
from lightning_parallel.callbacks.recording.clocks import clock_id, compare_clocks
from lightning_parallel.comm import Group

CLONE_NEWTIME = 0x80


def main(rank):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    print(compare_clocks(Group.of(), clock_id()).offset_ns, flush=True)


if sys.argv[2] == "0":
    main(0)
elif ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWTIME):
    print("refused", os.strerror(ctypes.get_errno()), flush=True)
elif sys.argv[2] == "1":
    with open("/proc/self/timens_offsets", "w") as offsets:
        offsets.write("monotonic 5000 0")
    child = os.fork()  # the first process inside
    if child == 0:
        main(1)
    else:
        os.waitpid(child, 0)
"""


@pytest.mark.root
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root on Linux")
def test_a_process_in_another_time_namespace_is_set_back(tmp_path):
    script, meeting = tmp_path / "clock.py", tmp_path / "meeting"
    script.write_text(CLOCK_SCRIPT)
    tried = run_script(script, meeting, "try").stdout
    if "refused" in tried:
        pytest.skip(f"no time namespaces here: {tried}")
    first, second = (int(wait().stdout) for wait in [start_script(script, meeting, rank) for rank in range(2)])
    assert first == 0
    assert second / 1e9 == pytest.approx(-5000, abs=5)  # seconds; processes wait for each other in between
