"""Spans of time, and where the time of each step went.

Code that does work names it where it happens; without an active recorder that costs a function call and nothing else:

    with recorder.span("1B0", phase="backward", category="pipeline", stage=1, microbatch=0):
        ...

A `Recorder` keeps the last spans in a ring buffer. Its `Ledger` charges every nanosecond of the main thread to the
innermost phase that was running, so the phases of a step add up to its wall time exactly. Times are
`time.perf_counter_ns()`, one clock for all processes of a host.

Where a device computes while the host runs ahead, a `DeviceClock` puts marks into the device's queue instead of reading
the time. They are read steps later, when the device has passed them: nothing ever waits for the device. The one for
CUDA is in `recorder.cuda`; everything else here is free of torch.
"""

from lightning_parallel.recorder.ledger import OTHER, Ledger
from lightning_parallel.recorder.recorder import (
    Calls,
    DeviceClock,
    Flight,
    OpenSpan,
    Recorder,
    activate,
    active,
    span,
)
from lightning_parallel.recorder.spans import Span, Window

__all__ = [
    "OTHER",
    "Calls",
    "DeviceClock",
    "Flight",
    "Ledger",
    "OpenSpan",
    "Recorder",
    "Span",
    "Window",
    "activate",
    "active",
    "span",
]
