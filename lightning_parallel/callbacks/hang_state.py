"""What the ranks of a run that hangs are doing, and which of them the others wait for. No Lightning."""

from __future__ import annotations

import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lightning_parallel import recorder
from lightning_parallel.recorder import Flight, Recorder, Span

__all__ = ["blame", "read_states", "state_of_rank", "write_text"]

State = Mapping[str, Any]
_LAST_SPANS = 50
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "lightning_parallel"))
_LIBRARY = sysconfig.get_path("stdlib")


# ------------------------------------------------------------------------------------------------------- this rank


def state_of_rank(rank: int, where: str, progress: int, idle_s: float, thread: int) -> str:
    """What this process is doing, as JSON.

    Args:
        rank: Of this process.
        where: What its training had begun last.
        progress: How much it has done: ranks in step have the same.
        idle_s: Seconds since then.
        thread: The one that trains.
    """
    state = {"rank": rank, "where": where, "progress": progress, "idle_s": idle_s, "line": _line(thread)}
    active = recorder.active()
    if active is not None:
        state |= _recorded(active)
    return json.dumps({**state, "torch_groups": _torch_groups()}, indent=1)


def _line(thread: int) -> str:
    """Where a thread is, in the user's code if there is any on its stack."""
    frame = sys._current_frames().get(thread)
    frames = list(_walk(frame))
    if not frames:
        return "no known line"
    shown = next((frame for frame in frames if _is_users(frame)), frames[0])
    return f"{shown.f_code.co_filename}:{shown.f_lineno} ({shown.f_code.co_name})"


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not name.startswith(("<", _LIBRARY)) and not any(package in name for package in _PACKAGES)


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _recorded(active: Recorder) -> dict[str, Any]:
    calls = []
    for key, made in list(active.calls.items()):
        axis, ranks, group, *message = key
        op, peer, tag = message or ("", None, None)
        place = {"axis": axis, "ranks": ranks, "group": group}
        calls.append({**place, "op": op, "peer": peer, "tag": tag, "count": made.count})
    flights = [_flight(flight) for flight in list(active.in_flight.values())]
    spans = [_span(span) for span in active.last_steps(3)[-_LAST_SPANS:]]
    return {"calls": calls, "in_flight": flights, "spans": spans}


def _flight(flight: Flight) -> dict[str, Any]:
    fields = ("op", "axis", "ranks", "group", "peer", "tag", "sequence", "bytes", "dtype")
    age_s = (time.perf_counter_ns() - flight.start) / 1e9 if isinstance(flight.start, int) else None
    began_at = None if age_s is None else time.time() - age_s  # ages are taken at other moments on other ranks
    facts = {"waited_for": flight.is_waited_for, "age_s": age_s, "began_at": began_at}
    return {**{name: getattr(flight, name) for name in fields}, **facts}


def _span(span: Span) -> dict[str, Any]:
    ago_s = (time.perf_counter_ns() - span.end_ns) / 1e9
    facts = {"name": span.name, "category": span.category, "step": span.step, "axis": span.axis}
    return {**facts, "duration_s": (span.end_ns - span.start_ns) / 1e9, "ended_s_ago": ago_s}


def _torch_groups() -> dict[str, dict[str, Any]]:
    """By process group, how many collectives torch has issued and the last one; what its flight recorder keeps."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None:
        return {}
    trace = json.loads(dump())
    groups: dict[str, dict[str, Any]] = {}
    for entry in trace.get("entries", ()):
        name, description = entry["process_group"]
        count = entry["collective_seq_id"]
        if not entry["is_p2p"] and count >= groups.get(name, {"count": -1})["count"]:
            last = entry["profiling_name"].partition(":")[2]
            groups[name] = {"count": count, "last": last, "name": description}
    return groups


# ------------------------------------------------------------------------------------------------------- all ranks


def write_text(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def read_states(folder: Path, world_size: int, patience_s: float) -> dict[int, State]:
    """The states of the ranks that write one within `patience_s`."""
    until = time.monotonic() + patience_s
    paths = {rank: folder / f"rank{rank}.json" for rank in range(world_size)}
    while time.monotonic() < until and not all(path.exists() for path in paths.values()):
        time.sleep(0.05)
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def blame(states: Mapping[int, State], world_size: int) -> list[str]:
    """Say which ranks did not come, and where each is.

    Args:
        states: By rank, of those that answered.
        world_size: How many ranks there are.
    """
    silent = [rank for rank in range(world_size) if rank not in states]
    lines = [f"rank {rank} does not answer: it is stopped, gone, or keeps Python's lock" for rank in silent]
    absences = list(_absences(states, waited_for=True)) or list(_absences(states, waited_for=False))
    absences.sort(key=lambda absence: absence[0])
    waiting = {waiter for _, waiters, _, _ in absences for waiter in waiters}
    roots = [absence for absence in absences if absence[2] not in waiting]
    if not roots and not silent and absences:
        lines.append("ranks wait for each other: one of them left out a call, or made one too many")
        roots = absences  # whoever waits longest first; clocks and ranks are not in step enough to say more
    lines += [text for _, _, _, text in roots]
    if not lines:
        lines += _behind(states) or ["every rank answered, and none is known to be late: see their stacks"]
    return lines + [_place(state) for _, state in sorted(states.items())]


def _place(state: State) -> str:
    waits = [flight for flight in state.get("in_flight", ()) if flight["waited_for"]]
    held = "".join(f", waiting in {flight['op']} for ranks {flight['ranks']}" for flight in waits)
    return f"rank {state['rank']} is in {state['where']}, at {state['line']}{held}"


Absence = tuple[float, list[int], int, str]
"""Since when ranks have been waiting (Unix time), which, the rank that did not come, and that in words."""


def _absences(states: Mapping[int, State], waited_for: bool) -> Iterator[Absence]:
    """What keeps ranks waiting; or what they have begun and may be waiting for where it cannot be seen, as in C++."""
    seen = set()
    for state in states.values():
        for flight in state.get("in_flight", ()):
            key = (*flight["ranks"], flight["group"], flight["sequence"], flight["peer"], flight["tag"])
            if flight["waited_for"] == waited_for and key not in seen:
                seen.add(key)
                yield from _absent(flight, state["rank"], states)


def _absent(flight: State, waiter: int, states: Mapping[int, State]) -> Iterator[Absence]:
    op, axis, ranks, sequence = (flight[name] for name in ("op", "axis", "ranks", "sequence"))
    along = f"along {axis.replace('_', ' ')}"
    if flight["peer"] is None:
        missing = [r for r in ranks if r in states and _count(states[r], flight) <= sequence]
        text = f"did not enter {op} {along}, call {sequence} of ranks {ranks}"
    elif op == "recv":
        peer = flight["peer"]
        is_sent = peer not in states or _count(states[peer], flight, "send", waiter, flight["tag"]) > sequence
        missing, text = [] if is_sent else [peer], f"did not send message {sequence} {along} to rank {waiter}"
    else:
        return
    waiters = [r for r in ranks if r not in missing] if flight["peer"] is None else [waiter]
    for rank in missing:
        who = f"rank {waiters[0]} waits" if len(waiters) == 1 else f"ranks {', '.join(map(str, waiters))} wait"
        since = math.inf if flight["began_at"] is None else flight["began_at"]
        yield since, waiters, rank, f"rank {rank} {text}, where {who}"


def _count(state: State, flight: State, op: str = "", peer: int | None = None, tag: Any = None) -> int:
    """How many calls a rank has made in the group of `flight`; messages count apart."""
    wanted = {"ranks": flight["ranks"], "group": flight["group"], "op": op, "peer": peer, "tag": tag}
    return next(
        (c["count"] for c in state.get("calls", ()) if all(c[key] == value for key, value in wanted.items())), 0
    )


def _behind(states: Mapping[int, State]) -> list[str]:
    """Ranks that have issued fewer collectives of torch's, or have done less, than others."""
    lines = []
    groups = {name: made for state in states.values() for name, made in state.get("torch_groups", {}).items()}
    for name, group in groups.items():
        known = {r: state["torch_groups"][name] for r, state in states.items() if name in state.get("torch_groups", {})}
        most = max(made["count"] for made in known.values())
        last = next(made["last"] for made in known.values() if made["count"] == most)
        late = [str(rank) for rank, made in known.items() if made["count"] < most]
        if late:
            lines.append(f"rank {', '.join(late)} did not enter {last}, call {most} of torch's group {group['name']}")
    most = max((state["progress"] for state in states.values()), default=0)
    ahead = next((state["where"] for state in states.values() if state["progress"] == most), "")
    behind = [rank for rank, state in states.items() if state["progress"] < most]
    return lines or [f"rank {rank} is behind: others have got to {ahead}" for rank in behind]
