"""What a GPU does in a step: kernels, collectives, and why it stands idle in between, from a trace of `torch.profiler`.

host    | launch K0 | launch K1 |   item()  waits   |   loads a batch   | launch K2 |
device       |  K0  |     |  K1  |  NCCL  |                                   |  K2  |
                    launch       collective  synchronise      data        launch
"""

from __future__ import annotations

import json
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import is_profiler_running

__all__ = ["CAUSES", "GpuSampler", "attribute_idle", "idle_sentence"]

CAUSES = ("collective", "launch", "synchronise", "data", "other")
"""Why a GPU computes nothing."""

STEP = "lightning_parallel step"
"""Annotation of a step, from the start of its batch to that of the next one."""

LATENCY_US = 20.0
"""A kernel begins at most so long after its launch, if the GPU is idle."""

Interval = tuple[float, float]

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_SYNCHRONISING = {
    f"{kind}{name}"
    for kind in ("cuda", "hip")
    for name in ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy", "Free")
}


def attribute_idle(events: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Divide the time of the last annotated step on the GPU into `busy` and `CAUSES`, which add up to `seconds`.

    A step on the GPU lasts from the end of what was launched before it to the end of what was launched in it.
    `collective` is the time in which nothing but kernels of NCCL ran, which also wait for other ranks there. Of the
    time without a kernel, `other` is that in which the next one had been launched: it waits for another stream, or it
    is the time between two kernels. Until the launch, `data` is the time in which the host took a batch from a
    DataLoader of torch; the rest is `synchronise` if the host was waiting when the GPU fell idle, else `launch`.

    Args:
        events: `traceEvents` of a trace of `torch.profiler`, microseconds, with `STEP` annotations of two steps.

    Returns:
        Seconds by key; None if nothing on a GPU was launched in the step, or none of it outlasted what was before.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    steps = sorted(_interval(event) for event in complete if _is_annotation(event) and event["name"] == STEP)
    if not steps:
        return None
    began, ended = steps[-1]
    calls = [event for event in complete if event.get("cat") in _CALLS]
    launched = {_argument(event, "correlation"): event["ts"] for event in calls}
    on_gpu = _on_one_gpu([event for event in complete if event.get("cat") in _ON_GPU])
    launches = [launched.get(_argument(event, "correlation"), event["ts"]) for event in on_gpu]
    before = [_interval(event)[1] for event, launch in zip(on_gpu, launches) if launch < began]
    inside = [_interval(event) for event, launch in zip(on_gpu, launches) if began <= launch < ended]
    if not inside:
        return None
    window = max(before, default=min(inside)[0]), max(end for _, end in inside)
    if window[1] <= window[0]:
        return None
    everything = _union([_interval(event) for event in on_gpu], window)
    computing = _union([_interval(event) for event in on_gpu if "nccl" not in event["name"].lower()], window)
    found = dict.fromkeys(("seconds", "busy", *CAUSES), 0.0)
    found["seconds"] = max(0.0, window[1] - window[0])
    found["busy"] = _length(computing)
    found["collective"] = _length(everything) - found["busy"]
    starts = sorted(zip((event["ts"] for event in on_gpu), launches))
    waits = [_interval(event) for event in calls if event["name"] in _SYNCHRONISING]
    loading = [_interval(event) for event in complete if _is_loading(event)]
    for began, ended in _gaps(everything, window):
        launch = starts[bisect_left(starts, (ended,))][1]
        # From then on the host was not what it waited for.
        could_begin = min(max(began, launch + LATENCY_US), ended) if launch > began - LATENCY_US else began
        in_data = _length(_union(loading, (began, could_begin)))
        is_after_wait = any(start <= began <= end + LATENCY_US for start, end in waits)
        found["data"] += in_data
        found["synchronise" if is_after_wait else "launch"] += could_begin - began - in_data
        found["other"] += ended - could_begin
    return {key: microseconds / 1e6 for key, microseconds in found.items()}


def _is_annotation(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "user_annotation"  # on the GPU's rows they are repeated as `gpu_user_annotation`


def _is_loading(event: Mapping[str, Any]) -> bool:
    return event["name"].startswith("enumerate(DataLoader)") and event.get("cat") != "gpu_user_annotation"


def _argument(event: Mapping[str, Any], name: str) -> Any:
    return event.get("args", {}).get(name)


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event.get("dur", 0.0)


def _on_one_gpu(events: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out GPUs other than the one with the most events: a process trains on one."""
    devices = Counter(_argument(event, "device") for event in events)
    (device, _), *_ = devices.most_common(1) or [(None, 0)]
    return [event for event in events if _argument(event, "device") == device]


def _union(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Merge what of the intervals lies in the window into intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, window[0]), min(end, window[1])
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _gaps(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    """Return what of the window lies outside intervals that do not touch."""
    ends = [window[0], *(end for _, end in intervals)]
    # It ends with one of them, unless that has no duration, as those shorter than the clock's unit.
    starts = [*(start for start, _ in intervals), window[1]]
    return [(end, start) for end, start in zip(ends, starts) if start > end]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


_WORDS = {
    "launch": (
        "because kernels are launched too slowly",
        "Compile the model (`torch.compile`), use CUDA graphs, fused operations, or a larger batch.",
    ),
    "synchronise": (
        "because the host waits for the GPU",
        "Remove `item()`, `print`, comparisons and copies of tensors to the host from the step, or log less often.",
    ),
    "data": ("waiting for data", "Load batches earlier: raise `num_workers`, and set `pin_memory=True`."),
    "collective": ("in collectives", "Communicate less, or overlap communication with the backward pass."),
    "other": ("between kernels that are launched in time", "Look for streams in the trace that wait for each other."),
}
"""A cause in words, and a remedy."""


def idle_sentence(gpu: Mapping[str, float], wall: float) -> tuple[str, str, float]:
    """Say which share of a step a GPU computes nothing, and why.

    Args:
        gpu: What `attribute_idle` returns, mean of some steps.
        wall: Seconds of a step that is not profiled. A profiled one is launched slower: what it takes longer is not
            counted as a wait for launches.

    Returns:
        The words, the remedy of the largest cause, and the share of the time lost to launches and waits of the host.
    """
    excess = min(gpu["launch"], max(0.0, gpu["seconds"] - wall))
    total = (gpu["seconds"] - excess) or 1.0  # all of it can be excess where kernels are shorter than the clock's unit
    shares = {cause: (gpu[cause] - (excess if cause == "launch" else 0.0)) / total for cause in CAUSES}
    largest = sorted((cause for cause in CAUSES if shares[cause] >= 0.01), key=lambda cause: -shares[cause])
    parts = ", ".join(f"{shares[cause]:.0%} {_WORDS[cause][0]}" for cause in largest).replace("%", " %")
    idle = f"{sum(shares.values()):.0%}".replace("%", " %")
    remedy = _WORDS[largest[0]][1] if largest else ""
    return f"is idle for {idle} of a step: {parts}", remedy, shares["launch"] + shares["synchronise"]


class GpuSampler:
    """Runs `torch.profiler` for two steps in every `every_n_steps`, and attributes the second of them.

    In the first of the two the profiler starts, and the GPU's queue fills up again. Where another profiler of torch
    runs it waits for the next time, and when one begins meanwhile it makes way. No error ends the training.

    Args:
        every_n_steps: Steps from one measured step to the next, at least 3.
        activities: What the profiler records.

    Attributes:
        steps: The steps that were measured.
    """

    def __init__(
        self, every_n_steps: int, activities: Sequence[ProfilerActivity] = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
    ) -> None:
        self.steps: list[int] = []
        self._every_n_steps = every_n_steps
        self._activities = activities
        self._sums: Counter[str] = Counter()
        self._profiler: profile | None = None
        self._annotation: record_function | None = None
        self._patches = Patches()
        self._num_apart = 0
        self._has_warned = False
        self._is_broken = False

    def begin_step(self, step: int, num_apart: int = 0, other: bool = False) -> bool:
        """Note that a batch begins; returns whether its time is not that of an ordinary step.

        Args:
            step: Number of the step.
            num_apart: Validations and checkpoints so far, which are no part of a step.
            other: Whether the user has a profiler of torch that may start at any time.
        """
        place = step % self._every_n_steps
        is_due = not self._is_broken and place == self._every_n_steps - 1
        if not is_due and self._profiler is None:
            return False
        try:
            if self._profiler is None:
                self._num_apart = num_apart
                self._start(other)
            elif num_apart != self._num_apart:
                self.abandon()
                return True
            elif place == 0:
                self._annotate()
            else:
                self._finish(step - 1)
                return True  # the trace is read in this step
        except Exception as error:
            self._is_broken = True
            self.abandon()
            warnings.warn(f"The time of the GPU is no longer measured, because of an error: {error!r}", stacklevel=2)
        return self._profiler is not None

    def _start(self, other: bool) -> None:
        if other or is_profiler_running():
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    "Another profiler of torch is running, and there can be only one. The idle time of the GPU is not"
                    " measured in the steps of that profiler",
                    stacklevel=3,
                )
            return
        profiler = profile(activities=list(self._activities))
        profiler.start()
        self._profiler = profiler
        constructor = torch.autograd.profiler.profile.__init__

        def make_way(made: Any, *args: Any, **kwargs: Any) -> None:
            self.abandon()
            constructor(made, *args, **kwargs)

        # Whoever starts one while ours runs would get an error.
        self._patches.replace(torch.autograd.profiler.profile, "__init__", make_way)
        self._annotate()

    def _annotate(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        self._annotation = record_function(STEP)
        self._annotation.__enter__()

    def _finish(self, step: int) -> None:
        profiler = self._profiler
        self.abandon()
        if profiler is None:
            return
        with TemporaryDirectory() as folder:
            # The file has categories, and which call launched what; `events()` has neither in all versions of torch.
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            found = attribute_idle(json.loads(path.read_bytes())["traceEvents"])
        if found is not None:
            self._sums.update(found)
            self.steps.append(step)

    def abandon(self) -> None:
        """Stop the profiler, if it runs; what it has recorded is not looked at."""
        self._patches.undo()
        annotation, self._annotation = self._annotation, None
        profiler, self._profiler = self._profiler, None
        if annotation is not None:
            annotation.__exit__(None, None, None)
        if profiler is not None:
            profiler.stop()

    def row(self) -> dict[str, Any]:
        """Return keys of a rank: `gpu`, the mean of the measured steps, if there are any."""
        count = len(self.steps)
        return {"gpu": {"steps": count, **{key: value / count for key, value in self._sums.items()}}} if count else {}
