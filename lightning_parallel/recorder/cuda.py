"""The time of a CUDA device, read from events after the fact."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import torch

__all__ = ["CudaClock"]

_ANCHOR_MS = 1000.0


class CudaClock:
    """Marks are events in the current stream of `device`.

    The host's and the device's time are compared once, when the clock is made. From then on times are differences
    between events, taken to an event at most a second before, as CUDA gives them in single precision. The two
    oscillators drift apart by some microseconds a second at most.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._main = torch.cuda.current_stream(device)
        self._side = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_ns = perf_counter_ns()

    def mark(self) -> torch.cuda.Event:
        """Put a mark into the queue."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_here(self) -> bool:
        """Whether the current stream is the one in which the clock was made: the one that computes."""
        return torch.cuda.current_stream(self._device) == self._main

    def completion(self, work: Any) -> torch.cuda.Event:
        """A mark that is passed when `work` is complete; the stream that computes does not wait for it."""
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._side):
            work.wait()
            event.record(self._side)
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has passed `mark`."""
        return mark.query()

    def read(self, mark: torch.cuda.Event) -> int:
        """When the device passed `mark`, in `perf_counter_ns`."""
        elapsed_ms = self._anchor.elapsed_time(mark)
        time_ns = self._anchor_ns + round(elapsed_ms * 1e6)
        if elapsed_ms > _ANCHOR_MS:
            self._anchor, self._anchor_ns = mark, time_ns
        return time_ns

    def synchronize(self) -> None:
        """Wait for the device to pass all marks."""
        torch.cuda.synchronize(self._device)
