"""The clock of a CUDA device: on stand-ins for its events, and on a device where there is one."""

import contextlib
import time

import pytest
import torch

from lightning_parallel import tracing
from lightning_parallel.callbacks.recording.clocks import CudaClock
from lightning_parallel.tracing import Recorder


class Event:
    """An event whose device time the test turns; differences come in single precision, as CUDA gives them."""

    device_ms = 0.0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self, stream):
        self.time_ms = Event.device_ms

    def elapsed_time(self, other):
        return float(torch.tensor(other.time_ms - self.time_ms, dtype=torch.float32))

    def synchronize(self):
        pass

    def query(self):
        return self.time_ms <= Event.device_ms


@pytest.fixture
def stand_ins(monkeypatch):
    stream = object()
    for name, value in {
        "Event": Event,
        "Stream": lambda device: object(),
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Event, "device_ms", 0.0)


@pytest.mark.usefixtures("stand_ins")
def test_times_stay_exact_over_hours():
    clock = CudaClock(torch.device("cuda"))
    start = clock.read(clock.mark())
    for _ in range(20_000):
        Event.device_ms += 700.0
        last = clock.read(clock.mark())
    assert last - start == pytest.approx(20_000 * 0.7e9, abs=1e5)  # after almost four hours


@pytest.mark.usefixtures("stand_ins")
def test_work_in_a_stream_of_its_own_is_not_here(monkeypatch):
    clock = CudaClock(torch.device("cuda"))
    assert clock.is_on_main_stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: object())
    assert not clock.is_on_main_stream()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_phases_are_those_of_the_device_and_the_host_does_not_wait():
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = torch.randn(4096, 4096, device=device)
    matrix @ matrix
    recorder = Recorder(clock=CudaClock(device))
    with tracing.activate(recorder):
        began = time.perf_counter()
        with tracing.span("forward", "forward"):
            for _ in range(50):
                matrix @ matrix
        with tracing.span("backward", "backward"):
            matrix @ matrix
        issued = time.perf_counter() - began
        (window,) = recorder.close_step(wait=True)
    assert window.phases["forward"] > 10 * window.phases["backward"]
    assert window.phases["forward"] / 1e9 > issued
    assert sum(window.phases.values()) == window.wall_ns
