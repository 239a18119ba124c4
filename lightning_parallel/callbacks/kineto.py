"""Traces of `torch.profiler` beside our own spans, in one file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["add_kineto"]

_FIRST_ROW = 100_000
"""Rows of the profiler lie below ours."""


def add_kineto(trace: dict[str, Any], kineto: Mapping[str, Any], rank: int | None = None) -> int:
    """Add the events of one rank's profiler to a trace of `chrome_trace`, on its clock, under that rank's process.

    Args:
        trace: Changed in place.
        kineto: What `torch.profiler` exported.
        rank: Whose it is; by default what the profiler wrote down, which it does where torch is distributed.

    Returns:
        The rank.

    Raises:
        ValueError: If the rank is not known, or has no part in `trace`.
    """
    if rank is None:
        rank = kineto.get("distributedInfo", {}).get("rank")
    clocks = {clock["rank"]: clock for clock in trace["otherData"]["clocks"]}
    if rank is None and len(clocks) == 1:
        (rank,) = clocks
    if rank not in clocks:
        raise ValueError(f"expected a profile of one of the ranks {sorted(clocks)}, got one of rank {rank}")
    clock = clocks[rank]
    # The profiler's times are Unix time since its base; ours are rank 0's `perf_counter_ns` since the origin.
    shift_ns = kineto.get("baseTimeNanoseconds", 0) - clock["unix_ns"] + clock["offset_ns"]
    shift_us = (shift_ns - trace["otherData"]["origin_ns"]) / 1e3
    rows: dict[tuple[Any, Any], int] = {}
    arrows: dict[tuple[Any, Any], int] = {}
    first_arrow = max((event["id"] for event in trace["traceEvents"] if "id" in event), default=-1) + 1
    for event in kineto["traceEvents"]:
        if event["ph"] == "M" and event["name"] != "thread_name":
            continue
        place = (event.get("pid"), event.get("tid"))
        tid = rows.setdefault(place, _FIRST_ROW + len(rows))
        moved = {**event, "pid": rank, "tid": tid}
        if "ts" in event and event["ph"] != "M":
            moved["ts"] = event["ts"] + shift_us
        if "id" in event:
            moved["id"] = first_arrow + arrows.setdefault((event.get("cat"), event["id"]), len(arrows))
        trace["traceEvents"].append(moved)
    return rank
