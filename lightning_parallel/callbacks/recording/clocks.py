"""Clocks: the clock of a CUDA device beside the host clock, and the clocks of several hosts beside each other."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import Any, NamedTuple

import torch

from lightning_parallel import comm
from lightning_parallel.comm import Group

__all__ = ["NOT_COMPARED", "ClockOffset", "CudaClock", "clock_id", "compare_clocks", "on_one_clock"]

PINGS = 16
ANCHOR_MS = 1000.0
"""Longest distance between two events. CUDA measures it in single precision: below 0.1 microseconds over a second."""


class CudaClock:
    """Reads the time of a CUDA device from events in its streams, after the fact.

    The clock compares host and device time once, when it is created. Every later time is a difference between two
    events, of which the earlier is about a second old at most. The two oscillators drift apart by a few microseconds
    per second.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._main = torch.cuda.current_stream(device)
        # A stream for each lane: in one stream, a mark would be passed only after all communication before it.
        self._lanes: defaultdict[Hashable, torch.cuda.Stream] = defaultdict(lambda: torch.cuda.Stream(device))
        torch.cuda.synchronize(device)
        self._anchor = self.mark()
        self._anchor.synchronize()
        # The host wakes up some microseconds late. The error is constant, so differences between times are exact.
        self._anchor_ns = perf_counter_ns()

    def mark(self) -> torch.cuda.Event:
        """Put a mark into the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_on_main_stream(self) -> bool:
        """Return whether the current stream is the compute stream, in which the clock was created."""
        return torch.cuda.current_stream(self._device) == self._main

    def is_main(self, stream: Any) -> bool:
        """Return whether `stream` is the compute stream. None stands for the current stream."""
        return stream is None or stream == self._main

    def completion(self, work: Any, lane: Hashable) -> torch.cuda.Event:
        """Create a mark that is passed when `work` is complete, without delaying the compute stream.

        Args:
            work: Torch's handle. The caller must keep its tensors: torch releases them at the first wait, which is
                here.
            lane: Key of a sequence whose operations complete in the order of their start, such as a group.
        """
        event = torch.cuda.Event(enable_timing=True)
        side = self._lanes[lane]
        # `work.wait()` makes the current stream wait, so the current stream must not be the compute stream.
        with torch.cuda.stream(side):
            work.wait()
            event.record(side)
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Return whether the device has passed `mark`."""
        return mark.query()

    def read(self, mark: torch.cuda.Event) -> int:
        """Return when the device passed `mark`, in `perf_counter_ns`."""
        elapsed_ms = self._anchor.elapsed_time(mark)
        time_ns = self._anchor_ns + round(elapsed_ms * 1e6)
        # Marks are read in the order of their time. The anchor moves along, so single precision stays good enough.
        if elapsed_ms > ANCHOR_MS:
            self._anchor = mark
            self._anchor_ns = time_ns
        return time_ns

    def synchronize(self) -> None:
        """Wait for the device to pass all marks."""
        torch.cuda.synchronize(self._device)


class ClockOffset(NamedTuple):
    """Difference between the clock of one rank and the clock of rank 0, in nanoseconds.

    Attributes:
        offset_ns: Added to `perf_counter_ns()` of this rank, it gives `perf_counter_ns()` of rank 0.
        uncertainty_ns: Possible error of `offset_ns`.
        unix_ns: Added to `perf_counter_ns()` of this rank, it gives `time_ns()` of this rank.
    """

    offset_ns: int
    uncertainty_ns: int
    unix_ns: int

    @classmethod
    def none(cls) -> ClockOffset:
        """Return no offset: this rank reads the clock of rank 0."""
        return cls(0, 0, time_ns() - perf_counter_ns())


def compare_clocks(group: Group, clock_id: str, now: Callable[[], int] = perf_counter_ns) -> ClockOffset:
    """Compare the clocks of all ranks of `group` with the clock of its first rank; every rank must call it.

    Ranks with the same `clock_id` read the same clock. For every other clock, one rank makes 16 round trips to the
    first rank. The fastest round trip bounds the offset best: the first rank answered at some moment within the trip.

    Args:
        group: All ranks; on CPU.
        clock_id: Identifies the clock that this rank reads.
        now: Reads the clock.
    """
    ids = comm.all_gather_object(clock_id, group)
    # One rank for each clock: other ranks on its host read the same clock.
    representatives = [ids.index(each) for each in dict.fromkeys(ids) if each != ids[0]]
    mine = (0, 0)
    for representative in representatives:
        if group.rank == 0:
            _answer(group, representative, now)
        elif group.rank == representative:
            mine = _ask(group, now)
    offsets = comm.all_gather_object(mine, group)
    # The first rank with this clock is its representative, or the first rank itself.
    offset, uncertainty = offsets[ids.index(clock_id)]
    return ClockOffset(offset, uncertainty, time_ns() - perf_counter_ns())


NOT_COMPARED = "The ranks run on several hosts, whose clocks were not compared."
"""The reason why a report lacks times between ranks; see `on_one_clock`."""


def on_one_clock(
    shared: Sequence[dict[str, Any]],
    clocks: Mapping[int, ClockOffset] | None,
    shift: Callable[[dict[str, Any], int], dict[str, Any]],
) -> tuple[Sequence[dict[str, Any]], int | None]:
    """Express the times of all ranks by the clock of the first rank.

    Args:
        shared: Data of each rank, with its `rank`.
        clocks: See `Session.clocks`; None if all ranks read one clock.
        shift: Adds nanoseconds to all times in the data of a rank.

    Returns:
        The data, and the possible error of a time between two ranks, in nanoseconds. The error is None if a clock is
        unknown; the times are then unchanged.
    """
    if clocks is None:
        return shared, 0
    if not clocks.keys() >= {rank["rank"] for rank in shared}:
        return shared, None
    # A time between ranks involves two ranks: at worst the two least certain ranks.
    uncertainties = sorted(clocks[rank["rank"]].uncertainty_ns for rank in shared)
    return [shift(rank, clocks[rank["rank"]].offset_ns) for rank in shared], sum(uncertainties[-2:])


def _ask(group: Group, now: Callable[[], int]) -> tuple[int, int]:
    """Ask the first rank for its time; return the offset of its clock, and the possible error."""
    answer = torch.zeros(1, dtype=torch.int64)
    trips = []
    for _ in range(PINGS):
        begin = now()
        comm.isend(answer, group, 0).wait()
        comm.irecv(answer, group, 0).wait()
        end = now()
        trips.append((end - begin, int(answer.item()) - (begin + end) // 2))
    # The first rank answered between `begin` and `end`, so the error is at most half of the trip.
    length, offset = min(trips)
    return offset, (length + 1) // 2


def _answer(group: Group, asker: int, now: Callable[[], int]) -> None:
    """Tell `asker` the time, as often as it asks."""
    question = torch.zeros(1, dtype=torch.int64)
    for _ in range(PINGS):
        comm.irecv(question, group, asker).wait()
        comm.isend(torch.tensor([now()]), group, asker).wait()


def clock_id() -> str:
    """Identify the clock that `perf_counter_ns` reads: one boot of one host, in one time namespace."""
    namespace = Path("/proc/self/ns/time")
    # Containers on one host share its clock unless they have a time namespace. Other systems than Linux use the name.
    if not (comm.boot_id() and namespace.is_symlink()):
        return platform.node()
    return f"{comm.boot_id()} {namespace.readlink()}"
