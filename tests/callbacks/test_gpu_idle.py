"""Why a GPU stands idle: traces with known gaps, and torch's own profiler, which must never be in anybody's way."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_parallel.callbacks import StepBreakdown
from lightning_parallel.callbacks.monitors import gpu_idle
from lightning_parallel.callbacks.monitors.gpu_idle import STEP, GpuSampler, attribute_idle, idle_sentence
from lightning_parallel.callbacks.report.diagnosis import diagnose
from lightning_parallel.compat.torch import is_profiler_running


class Trace:
    """Events as `torch.profiler` exports them; times in microseconds."""

    def __init__(self):
        self.events = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]

    def add(self, category, name, begin, end, **args):
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "args": args})

    def kernel(self, launch, begin, end, name="gemm", category="kernel", device=0):
        number = len(self.events)
        self.add("cuda_runtime", "cudaLaunchKernel", launch, launch + 4, correlation=number)
        self.add(category, name, begin, end, device=device, correlation=number)


def test_each_gap_has_its_cause():
    trace = Trace()
    trace.add("user_annotation", STEP, 0, 1000)
    trace.kernel(900, 950, 1000)
    trace.add("user_annotation", STEP, 1000, 5000)
    trace.add("gpu_user_annotation", STEP, 1200, 6000)
    trace.kernel(1190, 1200, 1300)  # 200 after the end of the last step: launched late
    trace.kernel(1195, 1250, 1400, category="gpu_memcpy")  # overlaps
    trace.kernel(1200, 1405, 1500)  # queued long before: 5 of the GPU's own
    trace.kernel(1210, 1450, 1800, name="ncclDevKernel_AllReduce_Sum_f32")  # 300 of it beside no other kernel
    trace.add("cuda_runtime", "cudaStreamSynchronize", 1300, 1803)
    trace.kernel(1995, 2000, 2100)  # 200 after `item()`
    trace.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 2110, 2510)
    trace.add("gpu_user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 2000, 2600)
    trace.kernel(2590, 2600, 4000)  # 400 in the data, and 100 around it
    trace.kernel(4980, 6000, 6100)  # launched in this step, 980 after the last one, and 1000 later it could have begun
    trace.kernel(5010, 6200, 7000)  # of the next step
    trace.kernel(1300, 1300, 9000, device=1)
    found = attribute_idle(trace.events)
    expected = {"seconds": 5100, "launch": 200 + 100 + 1000, "other": 5 + 1000, "collective": 300, "synchronise": 200}
    expected |= {"data": 400, "busy": 200 + 95 + 100 + 1400 + 100}
    assert found == pytest.approx({key: value / 1e6 for key, value in expected.items()})
    assert found["seconds"] == pytest.approx(sum(value for key, value in found.items() if key != "seconds"))
    trace.kernel(4985, 7500, 7500)  # shorter than the clock's unit; the kernel of the next step ended 500 before
    found = attribute_idle(trace.events)
    assert found["seconds"] == pytest.approx(6.5e-3)
    assert found["seconds"] == pytest.approx(sum(value for key, value in found.items() if key != "seconds"))
    trace.kernel(905, 8000, 8001)  # of the last step, on another stream: nothing of this one is left
    assert attribute_idle(trace.events) is None
    assert attribute_idle(trace.events[:2]) is None
    assert attribute_idle([]) is None


def test_profiled_steps_are_slower_and_the_advice_allows_for_that():
    gpu = {"seconds": 0.12, "busy": 0.06, "launch": 0.05, "collective": 0.01, "synchronise": 0, "data": 0, "other": 0}
    words, remedy, lost = idle_sentence(gpu, wall=0.1)
    assert words == ("is idle for 40 % of a step: 30 % because kernels are launched too slowly, 10 % in collectives")
    assert "CUDA graphs" in remedy
    assert lost == pytest.approx(0.3)
    rank = {"rank": 1, "coordinate": {}, "wall": 0.1, "forward": 0.1, "gpu": {"steps": 2, **gpu}}
    report = {"run": {"world_size": 1}, "reports": {"StepBreakdown": {"ranks": [rank]}}}
    assert diagnose(report)[0].title == f"The GPU of rank 1 {words}"
    rank["gpu"]["launch"] = 0.02  # all of it is the profiler's
    assert not any("GPU" in advice.title for advice in diagnose(report))


def train(sampler, steps, numbers=None, apart=()):
    """Run steps as a loop does; the numbers of those that count as no ordinary ones."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    disturbed, num_apart = [], 0
    for step, batch in zip(numbers or range(steps), DataLoader(torch.randn(4 * steps, 8), batch_size=4)):
        num_apart += step in apart
        if sampler is not None and sampler.begin_step(step, num_apart):
            disturbed.append(step)
        layer(batch).square().sum().backward()
    return disturbed, layer.weight.grad


def test_one_step_in_every_n_is_looked_at_in_a_real_trace():
    """The host's events are those of torch; a kernel is put behind each of its matrix products."""
    traces = []

    def attribute(events):
        trace = Trace()
        trace.events = events
        for event in [event for event in events if event.get("name") == "aten::addmm"]:
            trace.kernel(event["ts"], event["ts"] + 3, event["ts"] + 4)
        traces.append(events)
        return attribute_idle(events)

    sampler = GpuSampler(5, [ProfilerActivity.CPU])
    with patch.object(gpu_idle, "attribute_idle", attribute):
        disturbed, gradient = train(sampler, 14)
    assert disturbed == [4, 5, 6, 9, 10, 11]
    assert sampler.steps == [5, 10]
    assert torch.equal(gradient, train(None, 14)[1])
    gpu = sampler.row()["gpu"]
    assert gpu["steps"] == 2
    assert gpu["busy"] == pytest.approx(1e-6, rel=0.01)
    assert gpu["data"] > 0
    assert gpu["launch"] > 0
    assert gpu["seconds"] == pytest.approx(sum(gpu[key] for key in ("busy", *gpu_idle.CAUSES)))
    assert all(sum(event.get("name") == STEP for event in events) == 2 for events in traces)
    assert GpuSampler(5).row() == {}
    assert not is_profiler_running()


class OnHost(StepBreakdown):
    """Looks at a step as if there were a GPU."""

    def accumulate(self, trainer, pl_module):
        accumulator = super().accumulate(trainer, pl_module)
        self._gpu = accumulator._gpu = GpuSampler(5, [ProfilerActivity.CPU])
        return accumulator


@pytest.mark.parametrize("profiler", [None, "pytorch"])
def test_steps_that_the_profiler_made_longer_are_not_counted(profiler, tmp_path):
    callback = OnHost(show_table=False)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[callback],
        profiler=PyTorchProfiler(tmp_path, schedule=None) if profiler else None,
        max_steps=14,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    warns = pytest.warns(UserWarning, match="Another profiler") if profiler else nullcontext()
    found = {"seconds": 2e-3, "busy": 1e-3}
    with patch.object(gpu_idle, "attribute_idle", lambda events: found), warns:
        trainer.fit(BoringModel(), DataLoader(torch.randn(14, 32)))
    report = callback.report()
    assert report["steps"] == (13 if profiler else 13 - 6)
    assert report["ranks"][0].get("gpu") == (None if profiler else {"steps": 2, **found})
    assert not is_profiler_running()
    with pytest.raises(ValueError, match="at least 3"):
        StepBreakdown(gpu_every_n_batches=2)


def test_a_profiler_of_the_users_own_comes_first_and_errors_do_not_end_the_training():
    sampler = GpuSampler(5, [ProfilerActivity.CPU])
    with pytest.warns(UserWarning, match="Another profiler of torch is running"), profile() as own:
        assert train(sampler, 14)[0] == []
    assert any(event.name == "aten::addmm" for event in own.events())
    sampler.begin_step(4)
    assert is_profiler_running()
    with profile(activities=[ProfilerActivity.CPU]) as own:  # begins meanwhile
        assert train(sampler, 2, numbers=[6, 7])[0] == []
    assert any(event.name == "aten::addmm" for event in own.events())
    assert train(sampler, 8, apart=[5])[0] == [4, 5]  # a validation before step 5
    assert sampler.steps == []
    broken = patch.object(gpu_idle, "attribute_idle", side_effect=KeyError("ts"))
    with broken, pytest.warns(UserWarning, match="no longer measured"):
        train(sampler, 7)
    assert train(sampler, 7)[0] == []
    assert not is_profiler_running()
