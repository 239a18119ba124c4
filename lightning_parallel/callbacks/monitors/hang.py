"""Hang watchdog: writes down every rank's stacks and pending communication, names the missing ranks, and exits."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from types import FrameType
from typing import Any, NamedTuple, Optional

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_parallel import comm, tracing
from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback, create_folder
from lightning_parallel.checkpoint.place import put_file
from lightning_parallel.compat.torch import flight_recorder_entries
from lightning_parallel.tracing import InFlight, Recorder, Span

__all__ = ["EXIT_STATUS", "HangWatchdog", "Watchdog", "explain_hang"]

EXIT_STATUS = 70
"""Exit status of a process without progress."""

GRACE_S = 5.0
"""Seconds that a rank waits for the states of other ranks; a twentieth of the deadline if that is more."""

RankState = Mapping[str, Any]  # as `state_of_rank` writes it

_LAST_SPANS = 50
# Skip frames of packages and of the standard library, to show a line of the user's code.
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "lightning_parallel"))
_LIBRARY = sysconfig.get_path("stdlib")


class Watchdog:
    """Ends the process after `deadline` seconds without progress, and reports the reason.

    The ranks communicate through files in `folder`, because they may be stuck in a collective. The first rank that
    misses its deadline creates the folder. The other ranks then see the folder, and each rank writes its state.

        rank0.txt    stacks of all threads
        rank0.json   communication that has begun and not ended, calls made so far, last spans
        verdict.txt  the missing ranks

    The watchdog kills a process of this host that does not answer: a stopped process would never end.

    Args:
        rank: Rank of this process.
        processes: The processes of all ranks, by rank.
        folder: The same on all ranks, and used by this run only; must not exist.
        deadline: Seconds without progress after which the process ends.
        end: Ends the process; by default with `EXIT_STATUS`.

    Attributes:
        longest: Longest time without progress, in seconds.
    """

    def __init__(
        self,
        rank: int,
        processes: list[comm.Process],
        folder: Path,
        deadline: float,
        end: Callable[[], Any] = lambda: os._exit(EXIT_STATUS),
    ) -> None:
        self.rank = rank
        self.processes = processes
        self.folder = folder
        self.deadline = deadline
        # By default not `sys.exit`, which would end the thread of the watchdog alone.
        self.end = end
        self.longest = 0.0
        self._main = threading.get_ident()
        self._where = "the start"
        self._count = 0
        self._since = time.monotonic()
        self._stopped = threading.Event()
        self._thread = comm.Helper("watchdog", self._watch, self._stopped.set)

    def start(self) -> None:
        """Start to watch the calling thread."""
        self._main = threading.get_ident()
        self.progress("the start")
        self._thread.start()

    @property
    def started(self) -> bool:
        """Whether the watchdog was started."""
        return self._thread.ident is not None

    def progress(self, where: str) -> None:
        """Note progress: training has reached `where`."""
        # No lock: only the training thread writes these fields, and the watchdog thread only reads them.
        now = time.monotonic()
        self.longest = max(self.longest, now - self._since)
        self._where = where
        self._since = now
        self._count += 1

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=GRACE_S)

    def _watch(self) -> None:
        # A collective releases Python's lock, so this thread runs while the main thread waits in one.
        while not self._stopped.wait(min(1.0, self.deadline / 10)):
            if time.monotonic() - self._since > self.deadline or self.folder.exists():
                try:
                    self._report()
                except Exception as error:  # such as a full disk: only stderr remains
                    text = f"[rank {self.rank}] no progress in {self._where}; could not write details: {error!r}"
                    print(text, file=sys.stderr, flush=True)  # noqa: T201
                    faulthandler.dump_traceback()
                finally:
                    self.end()
                return

    def _report(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)  # the signal for other ranks
        with (self.folder / f"rank{self.rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        idle = time.monotonic() - self._since
        state = state_of_rank(self.rank, self._where, self._count, idle, self._main)
        write_text(self.folder / f"rank{self.rank}.json", state)
        states = read_states(self.folder, len(self.processes), max(GRACE_S, self.deadline / 20))
        silent = [rank for rank in range(len(self.processes)) if rank not in states]
        lines = explain_hang(states, len(self.processes))
        lines += [f"killed rank {rank}, which did not answer" for rank in silent if self.processes[rank].kill()]
        text = "\n".join(
            [f"[rank {self.rank}] no progress for {idle:.0f} s", *lines, f"details: {self.folder} [LP029]"]
        )
        # All ranks reach the same verdict, so only the lowest answering rank prints it.
        if self.rank == min(states):
            write_text(self.folder / "verdict.txt", text + "\n")
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - loggers may be stuck, and the process ends


class PauseAccumulator(Accumulator):
    """Shares the longest time without progress, which a watchdog measures."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    @override
    def share(self) -> dict[str, Any]:
        return {"rank": self._watchdog.rank, "longest_pause": self._watchdog.longest}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"deadline": self._watchdog.deadline, "ranks": list(shared)}


class HangWatchdog(MeasuringCallback[PauseAccumulator]):
    """Ends training that makes no progress, and names the ranks for which the other ranks wait.

    A rank may be stopped or stuck, or may run other code. By default, the other ranks then wait for half an hour and
    raise an error, though they did nothing wrong. `HangWatchdog` ends training after `deadline_s`:

    * Every rank that still runs writes files: the stacks of its threads, its last spans and its unfinished
      communication.
    * The ranks without such a file are named on stderr.
    * The processes end with status 70. A process of the same host that does not answer is killed.

    Progress is the begin or the end of a batch, in training or validation, or of an epoch. `deadline_s` must be longer
    than the longest time between two such events. `report()` returns this time; it includes the checkpoints that are
    saved in between. Hooks after the last epoch are not watched: `on_fit_end`, and `on_train_end` of callbacks further
    down the list.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import HangWatchdog

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[HangWatchdog(deadline_s=300)])
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        deadline_s: Seconds without progress after which the processes end.
        dirpath: Where to create a folder for the files when they are needed. All ranks must share this file system.
            None selects the trainer's log folder.

    `report()` returns the common keys and these:

    | key | meaning, unit |
    |---|---|
    | `deadline` | `deadline_s`, seconds |
    | `ranks` | `[{rank, longest_pause}]`: the longest time without progress, seconds |

    Raises:
        ValueError: If `deadline_s` is not positive.
    """

    def __init__(self, deadline_s: float = 600.0, dirpath: Optional[str] = None) -> None:
        if not isinstance(deadline_s, (int, float)) or not deadline_s > 0:
            raise ValueError(f"`deadline_s` must be a number of seconds above 0; got {deadline_s!r}")
        super().__init__(show_table=False)
        self.deadline_s = deadline_s
        self.folder = dirpath
        self._watchdog: Watchdog | None = None

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> PauseAccumulator:
        session = self.open_session
        base = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        base = create_folder(base, session.group)
        # The folder of rank 0 counts. Creating the folder ends the run, so no other program may guess its name.
        name = f"hang-{datetime.now():%Y%m%d-%H%M%S}-{token_hex(4)}"
        by_rank = comm.all_gather_object((base / name, comm.Process.of()), session.group)
        folder = by_rank[0][0]
        processes = [process for _, process in by_rank]
        self._watchdog = Watchdog(session.rank, processes, folder, self.deadline_s)
        return PauseAccumulator(self._watchdog)

    def _progress(self, where: str) -> None:
        if self._watchdog is not None:
            self._watchdog.progress(where)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in `on_fit_start`: the setup of later callbacks may take any time.
        self._start()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._start()

    def _start(self) -> None:
        if self._watchdog is not None and not self._watchdog.started:
            self._watchdog.start()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress(f"epoch {trainer.current_epoch}")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._progress(f"training batch {batch_idx}")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._progress(f"after training batch {batch_idx}")

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._progress(f"validation batch {batch_idx}")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._progress("after validation")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress("the end of training")
        super().on_train_end(trainer, pl_module)
        if self._watchdog is not None:
            self._watchdog.stop()  # later work, such as an export of the model, may take any time

    @override
    def _leave(self) -> None:
        super()._leave()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None


# ------------------------------------------------------------------------------------------------ state of this rank


def state_of_rank(rank: int, where: str, progress: int, idle_s: float, thread: int) -> str:
    """Describe the state of this process, as JSON.

    Args:
        rank: Rank of this process.
        where: The place of its last progress in training.
        progress: Number of progress events; equal on ranks at the same place.
        idle_s: Seconds since the last progress.
        thread: Identifier of the thread that trains.
    """
    state = {"rank": rank, "where": where, "progress": progress, "idle_s": idle_s, "line": _line(thread)}
    active = tracing.active()
    if active is not None:
        state |= _recorder_state(active)
    return json.dumps({**state, "torch_groups": _torch_groups()}, indent=1)


def _line(thread: int) -> str:
    """Return the current line of a thread; in the user's code, if its stack has any."""
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


def _recorder_state(active: Recorder) -> dict[str, Any]:
    calls = []
    # Copies of the dicts, to which other threads may still add entries.
    for key, made in list(active.calls.items()):
        axis, ranks, group, *message = key
        op, peer, tag = message or ("", None, None)
        place = {"axis": axis, "ranks": ranks, "group": group}
        calls.append({**place, "op": op, "peer": peer, "tag": tag, "count": made.count})
    flights = [_flight_state(flight) for flight in list(active.in_flight.values()) if not flight.has_ended]
    spans = [_span_state(span) for span in active.last_steps(3)[-_LAST_SPANS:]]
    return {"calls": calls, "in_flight": flights, "spans": spans}


def _flight_state(flight: InFlight) -> dict[str, Any]:
    fields = ("op", "axis", "ranks", "group", "peer", "tag", "sequence", "bytes", "dtype")
    # On CUDA the start is a mark of the device, which cannot be read while the device hangs.
    age_s = (time.perf_counter_ns() - flight.start) / 1e9 if isinstance(flight.start, int) else None
    # Ranks write their states at different moments, so that ages alone do not compare.
    began_at = None if age_s is None else time.time() - age_s
    facts = {"waited_for": flight.is_waited_for, "age_s": age_s, "began_at": began_at}
    return {**{name: getattr(flight, name) for name in fields}, **facts}


def _span_state(span: Span) -> dict[str, Any]:
    ago_s = (time.perf_counter_ns() - span.end_ns) / 1e9
    facts = {"name": span.name, "category": span.category, "step": span.step, "axis": span.axis}
    return {**facts, "duration_s": (span.end_ns - span.start_ns) / 1e9, "ended_s_ago": ago_s}


def _torch_groups() -> dict[str, dict[str, Any]]:
    """Return by process group the number of collectives that torch's flight recorder has seen, and the last one."""
    groups: dict[str, dict[str, Any]] = {}
    for entry in flight_recorder_entries():
        name, description = entry["process_group"]
        count = entry["collective_seq_id"]
        # Skip messages: torch counts them separately, by pair of ranks.
        if not entry["is_p2p"] and count >= groups.get(name, {"count": -1})["count"]:
            last = entry["profiling_name"].partition(":")[2]
            groups[name] = {"count": count, "last": last, "name": description}
    return groups


# ----------------------------------------------------------------------------------------------- states of all ranks


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: other processes see the complete file or no file."""
    put_file(path, text.encode())


def read_states(folder: Path, world_size: int, patience_s: float) -> dict[int, RankState]:
    """Read the states of all ranks that write their state within `patience_s` seconds."""
    until = time.monotonic() + patience_s
    paths = {rank: folder / f"rank{rank}.json" for rank in range(world_size)}
    while time.monotonic() < until and not all(path.exists() for path in paths.values()):
        time.sleep(0.05)
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


class MissingCall(NamedTuple):
    """A call that `rank` has not made, and for which `waiters` wait.

    Attributes:
        since: Unix time at which the wait began; infinite if unknown.
        waiters: The waiting ranks.
        rank: The missing rank.
        text: Sentence that describes the call.
    """

    since: float
    waiters: list[int]
    rank: int
    text: str


def explain_hang(states: Mapping[int, RankState], world_size: int) -> list[str]:
    """Name the missing ranks and the place of each answering rank, in one sentence per line."""
    silent = [rank for rank in range(world_size) if rank not in states]
    lines = [f"rank {rank} does not answer: it is stopped, has ended, or holds the lock of Python" for rank in silent]
    # Prefer calls for which a thread visibly waits. For a wait in C++, only the unfinished call is visible.
    missing = list(_missing_calls(states, waited_for=True)) or list(_missing_calls(states, waited_for=False))
    missing.sort(key=lambda call: call.since)
    waiting = {waiter for call in missing for waiter in call.waiters}
    # A rank that waits itself is not the cause: the cause is at the end of the chain.
    roots = [call for call in missing if call.rank not in waiting]
    if not roots and not silent and missing:
        lines.append("ranks wait for each other: one rank left out a call, or made an extra call")
        # List the longest wait first. The clocks of the ranks differ too much to conclude more.
        roots = missing
    lines += [call.text for call in roots]
    if not lines:
        lines += _ranks_behind(states) or ["every rank answered, and no rank is known to be late; see the stacks"]
    return lines + [_place(state) for _, state in sorted(states.items())]


def _place(state: RankState) -> str:
    waits = [flight for flight in state.get("in_flight", ()) if flight["waited_for"]]
    held = "".join(f", waiting in {flight['op']} for ranks {flight['ranks']}" for flight in waits)
    return f"rank {state['rank']} is in {state['where']}, at {state['line']}{held}"


def _missing_calls(states: Mapping[int, RankState], waited_for: bool) -> Iterator[MissingCall]:
    """Find the missing calls behind unfinished communication, with or without a visible wait of a thread."""
    seen = set()
    for state in states.values():
        for flight in state.get("in_flight", ()):
            key = (*flight["ranks"], flight["group"], flight["sequence"], flight["peer"], flight["tag"])
            if flight["waited_for"] == waited_for and key not in seen:
                seen.add(key)  # each rank that waits reports the same call
                yield from _missing_in(flight, state["rank"], states)


def _missing_in(flight: RankState, waiter: int, states: Mapping[int, RankState]) -> Iterator[MissingCall]:
    """Find the ranks that have not yet joined a communication of `waiter`."""
    op = flight["op"]
    ranks = flight["ranks"]
    sequence = flight["sequence"]
    along = f"along {flight['axis'].replace('_', ' ')}"
    if flight["peer"] is None:
        missing = [rank for rank in ranks if rank in states and _count(states[rank], flight) <= sequence]
        waiters = [rank for rank in ranks if rank not in missing]
        text = f"did not enter {op} {along}, call {sequence} of ranks {ranks}"
    elif op == "recv":
        peer = flight["peer"]
        is_sent = peer not in states or _count(states[peer], flight, "send", waiter, flight["tag"]) > sequence
        missing = [] if is_sent else [peer]
        waiters = [waiter]
        text = f"did not send message {sequence} {along} to rank {waiter}"
    else:
        return
    who = f"rank {waiters[0]} waits" if len(waiters) == 1 else f"ranks {', '.join(map(str, waiters))} wait"
    since = math.inf if flight["began_at"] is None else flight["began_at"]
    for rank in missing:
        yield MissingCall(since, waiters, rank, f"rank {rank} {text}, where {who}")


def _count(state: RankState, flight: RankState, op: str = "", peer: int | None = None, tag: Any = None) -> int:
    """Return a rank's number of calls in the group of `flight`; messages have separate counters."""
    wanted = {"ranks": flight["ranks"], "group": flight["group"], "op": op, "peer": peer, "tag": tag}
    for calls in state.get("calls", ()):
        if all(calls[key] == value for key, value in wanted.items()):
            return calls["count"]
    return 0


def _ranks_behind(states: Mapping[int, RankState]) -> list[str]:
    """Name ranks that issued fewer of torch's collectives than other ranks, or else made less progress."""
    by_group: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, state in states.items():
        for name, issued in state.get("torch_groups", {}).items():
            by_group.setdefault(name, {})[rank] = issued
    lines = []
    for by_rank in by_group.values():
        first = max(by_rank.values(), key=lambda issued: issued["count"])
        late = [str(rank) for rank, issued in by_rank.items() if issued["count"] < first["count"]]
        if late:
            call = f"{first['last']}, call {first['count']} of torch's group {first['name']}"
            lines.append(f"rank {', '.join(late)} did not enter {call}")
    if lines:
        return lines
    most = max((state["progress"] for state in states.values()), default=0)
    ahead = next((state["where"] for state in states.values() if state["progress"] == most), "")
    behind = [rank for rank, state in states.items() if state["progress"] < most]
    return [f"rank {rank} is behind; the furthest rank is in {ahead}" for rank in behind]
