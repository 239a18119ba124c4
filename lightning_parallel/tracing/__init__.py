"""Spans of time, the recorder that keeps them, and the phases of a step.

Code names its work with a span; without an active recorder, a span costs one function call:

    with tracing.span("1B0", phase="backward", category="pipeline", stage=1, microbatch=0):
        ...

A `Recorder` keeps the latest spans in a ring buffer. Its `Ledger` charges every nanosecond of the main thread to the
innermost phase that was running, so the phases of a step add up to its wall time exactly. Times are
`time.perf_counter_ns()`, one clock for all processes of a host.

If a device computes while the host runs ahead, a `DeviceClock` puts marks into the device's queue instead of reading
the time. The recorder reads the marks steps later, when the device has passed them, so nothing waits for the device.
The clock for CUDA is `callbacks.recording.clocks.CudaClock`; this package does not import torch.
"""

from lightning_parallel.tracing.recorder import (
    DeviceClock,
    InFlight,
    OpenSpan,
    Recorder,
    activate,
    active,
    is_suspended,
    span,
    suspended,
    waiting,
)
from lightning_parallel.tracing.spans import OTHER, CallCounter, Ledger, Span, StepSampler, Window

__all__ = [
    "OTHER",
    "CallCounter",
    "DeviceClock",
    "InFlight",
    "Ledger",
    "OpenSpan",
    "Recorder",
    "Span",
    "StepSampler",
    "Window",
    "activate",
    "active",
    "is_suspended",
    "span",
    "suspended",
    "waiting",
]
