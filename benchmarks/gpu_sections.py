"""The sections of `benchmarks/gpu.py`: what each measures, and what is expected.

A section is a function of the device that yields figures one by one. On a CPU models are small, and what only a GPU
has is left out.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import GPT, Layout, block_of_7b, fit, fits_alike, shared_card
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_parallel import (
    CompressedDDPStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    comm,
)
from lightning_parallel.callbacks.recording.clocks import CudaClock
from lightning_parallel.comm import Group, objects
from lightning_parallel.compat import Patches
from lightning_parallel.compression import BlockTopK, Cast, Dense, PowerSGD, Quantize, RandomK, Sign, TopK
from lightning_parallel.compression.sparsifiers import largest
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.planner.rank_memory import planned_memory
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import apply_plan


@dataclass(frozen=True)
class Figure:
    """One line of the page.

    Attributes:
        name: What was measured.
        value: The number; None for a fact in words.
        unit: Of the value, or the fact.
        anchor: What was expected.
        is_good: Whether it is as expected; None where that is not decided.
    """

    name: str
    value: float | None
    unit: str
    anchor: str = ""
    is_good: bool | None = None

    @property
    def text(self) -> str:
        """The value with its unit."""
        return self.unit if self.value is None else f"{self.value:,.4g} {self.unit}".rstrip()

    @property
    def verdict(self) -> str:
        """`ok`, `MISSED`, or nothing."""
        return "" if self.is_good is None else "ok" if self.is_good else "MISSED"


@dataclass(frozen=True)
class Section:
    """A part of the programme."""

    name: str
    measure: Callable[[str], Iterator[Figure]]
    deadline_s: float


def at_most(name: str, value: float, limit: float, unit: str = "") -> Figure:
    """Return a figure that is good up to `limit`."""
    return Figure(name, value, unit, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, limit: float, unit: str = "") -> Figure:
    """Return a figure that is good from `limit` on."""
    return Figure(name, value, unit, f">= {limit:g}", value >= limit)


def machine() -> str:
    """Name the device and the versions."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], device: str, repeats: int = 10, warmup: int = 3) -> float:
    """Return the median seconds of one call, the device's work included."""
    for _ in range(warmup):
        call()
    taken = []
    for _ in range(repeats):
        synchronize(device)
        begun_s = time.perf_counter()
        call()
        synchronize(device)
        taken.append(time.perf_counter() - begun_s)
    return statistics.median(taken)


def each_of(call: Callable[[], Any], device: str, count: int = 200) -> float:
    """Return the microseconds of one call among many, without a wait in between."""
    return seconds_of(lambda: [call() for _ in range(count)], device, repeats=5) / count * 1e6


@contextmanager
def fake_ranks(count: int, device: str) -> Iterator[Group]:
    """Give a group of `count` ranks, of which this process is the first and the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    patches = Patches()
    # Python objects come back from ranks that do not exist as nothing: they say what this one says.
    for holder in (comm, objects):
        patches.replace(holder, "all_gather_object", lambda value, group: [value] * group.size)
    try:
        yield Group.of(axis="tensor_parallel")
    finally:
        patches.undo()
        dist.destroy_process_group()


@contextmanager
def doubled_group(device: str) -> Iterator[Group]:
    """Give a group of two positions on a communicator of one rank: sums are the identity, and streams are real."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Group("data_parallel", (0, 0), 0, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------ sections


def facts(device: str) -> Iterator[Figure]:
    """Say what the machine is, and how fast its simplest operations are: the other figures compare with these."""
    yield Figure("machine", None, machine())
    if device == "cuda":
        yield Figure("NCCL", None, ".".join(map(str, torch.cuda.nccl.version())))
        properties = torch.cuda.get_device_properties(0)
        yield Figure("memory", properties.total_memory / 2**30, "GiB")
    size = 1 << (30 if device == "cuda" else 24)
    source, target = torch.empty(size, dtype=torch.float32, device=device), torch.empty(size, device=device)
    taken_s = seconds_of(partial(target.copy_, source), device)
    yield Figure("copy, read and written", 8 * size / taken_s / 1e12, "TB/s", "3.9 of an H200's 4.8")
    del source, target
    width = 8192 if device == "cuda" else 64
    matrix = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    taken_s = seconds_of(lambda: matrix @ matrix, device)
    yield Figure(f"bf16 product of {width}", 2 * width**3 / taken_s / 1e12, "TFLOP/s", "650 to 800 on an H200")
    small = torch.zeros(1, device=device)
    yield Figure("launch", each_of(lambda: small.add_(1), device), "us", "3 to 5")
    yield Figure("wait of the host", each_of(lambda: small.item(), device), "us", "8 to 15")
    if device == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        yield Figure("record an event", each_of(event.record, device), "us", "1 to 3")
    with doubled_group(device) as group:
        yield Figure("objects travel on", None, group.host_device)


def gpu_tests(device: str) -> Iterator[Figure]:
    """Run the tests marked gpu."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        yield Figure("tests marked gpu", None, f"left out: there is no {', '.join(missing)}")
        return
    # The files by name: others need more than a machine with torch and lightning has. Nor are pytest's plugins needed.
    files = ["test_gpu.py", "comm/test_work.py", "callbacks/test_clocks.py", "tensor/test_random.py"]
    options = ["-q", "-m", "gpu", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{name}" for name in files)]
    folder = Path(__file__).resolve().parent.parent
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    last = next(reversed(ended.stdout.strip().splitlines()), "no output")
    yield Figure("tests marked gpu", None, re.sub(r"\x1b\[\d+m", "", last), "none failed", ended.returncode == 0)


def world_one(device: str) -> Iterator[Figure]:
    """Train one model under each strategy on one device: as under stock Lightning, bit for bit."""
    strategies: Mapping[str, Callable[[], Any]] = {
        "TensorParallelStrategy": TensorParallelStrategy,
        "PipelineParallelStrategy": lambda: PipelineParallelStrategy(num_microbatches=1),
        "HybridParallelStrategy": HybridParallelStrategy,
    }
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        if precision == "16-mixed" and device == "cpu":
            continue
        expected = fit("auto", precision, device)
        for name, make in strategies.items():
            found = fit(make(), precision, device)
            difference = fits_alike(found, expected)
            limit = 0.0 if precision == "32-true" else 1e-2
            yield at_most(f"{name}, {precision}: largest difference", difference, limit)
        expected = fit("ddp", precision, device)
        difference = fits_alike(fit(CompressedDDPStrategy(Dense()), precision, device), expected)
        yield at_most(f"CompressedDDPStrategy(Dense()), {precision}: largest difference", difference, limit)
    for compressor in (Cast("bf16"), Quantize(8), Sign(), TopK(0.1), RandomK(0.1), BlockTopK(0.1), PowerSGD(2)):
        losses = fit(CompressedDDPStrategy(compressor), "32-true", device).losses
        yield Figure(f"CompressedDDPStrategy({compressor}): last loss", losses[-1], "", "finite", losses[-1] < 100)


def races(device: str) -> Iterator[Figure]:
    """Look for tensors that are given back while a communication still reads them."""
    if device != "cuda":
        return
    with doubled_group(device) as group:
        torch.manual_seed(0)
        width = 1024
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(device)
        plain = [parameter.clone().requires_grad_() for parameter in model.parameters()]
        reducer = GradientReducer(dict(model.named_parameters()), group, bucket_bytes=4 << 20)
        wrong = 0
        for _ in range(50):
            x = torch.randn(64, width, device=device)
            model.zero_grad()
            model(x).square().mean().backward()
            # Memory of the same sizes is taken and written at once, where something was given back too early.
            churn = [torch.full_like(parameter, 7.0) for parameter in model.parameters()]
            reducer.reduce()
            found = [parameter.grad for parameter in model.parameters()]
            gradients = torch.autograd.grad(
                torch.func.functional_call(model, dict(zip(dict(model.named_parameters()), plain)), x).square().mean(),
                plain,
            )
            wrong += sum(not torch.equal(2 * one, other) for one, other in zip(found, gradients) if one is not None)
            del churn
        yield at_most("reducer: gradients that are not half of those of one rank", wrong, 0)
        reducer.remove()
        wrong = 0
        for _ in range(20):
            sent = torch.full((1 << 28,), 3.0, device=device)
            pending = comm.all_reduce_(sent.clone(), group, async_op=True)
            noise = torch.full_like(sent, 9.0)
            wrong += not torch.equal(pending.wait(), sent)
            del noise
        yield at_most("collectives that found other data", wrong, 0)


def clock(device: str) -> Iterator[Figure]:
    """Read the device's clock: marks of one lane do not wait for those of another, and cost little."""
    if device != "cuda":
        return
    watch = CudaClock(torch.device("cuda", torch.cuda.current_device()))

    class Work:
        def __init__(self, stream: torch.cuda.Stream) -> None:
            self.stream = stream

        def wait(self) -> None:
            torch.cuda.current_stream().wait_stream(self.stream)

    long, short = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(long):
        torch.cuda._sleep(2_000_000_000)
    first = watch.completion(Work(long), "long")
    second = watch.completion(Work(short), "short")
    time.sleep(0.05)
    is_apart = watch.passed(second) and not watch.passed(first)
    yield Figure("a short call is complete before a long one", None, str(is_apart), "True", is_apart)
    synchronize(device)
    yield at_most("a mark, on the host", each_of(watch.mark, device), 5, "us")


def waits(device: str) -> Iterator[Figure]:
    """Count for what the host waits in a step, by line."""
    if device != "cuda":
        return
    with fake_ranks(8, device) as group:
        model = nn.Sequential(*(block_of_7b(256) for _ in range(2))).to(device)
        apply_plan(model, make_plan(model, "auto", group), group)
        x = torch.randn(2, 32, 256, device=device)
        yield _waits("tensor parallel 8, forward and backward", lambda: model(x).square().mean().backward(), 0)
        reducer = GradientReducer(dict(model.named_parameters()), group)

        def reduced() -> None:
            model(x).square().mean().backward()
            reducer.reduce()

        yield _waits("data-parallel reducer", reduced, 1)
        reducer.remove()
        gradients = {f"w{number}": torch.randn(64, 64, device=device) for number in range(8)}
        for compressor in (Cast("bf16"), Quantize(8), Sign(), TopK(0.1), RandomK(0.1), BlockTopK(0.1), PowerSGD(2)):
            yield _waits(
                f"{compressor}",
                lambda compressor=compressor: compressor.reduce_(
                    {name: gradient.clone() for name, gradient in gradients.items()}, group
                ),
                1,
            )
    engine, step, batch = _engine(device, 2)
    yield _waits("pipeline engine of one stage", lambda: engine.forward_backward(step, batch), 0)


def _waits(name: str, call: Callable[[], Any], limit: int) -> Figure:
    call()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)
    )
    where = ", ".join(f"{place} x{count}" for place, count in places.most_common(3))
    figure = at_most(f"{name}: waits of the host", sum(places.values()), limit)
    return Figure(figure.name, figure.value, where, figure.anchor, figure.is_good)


def compression(device: str) -> Iterator[Figure]:
    """Compress a large gradient, and those of many matrices."""
    elements = 1 << (26 if device == "cuda" else 18)
    flat = torch.randn(elements, device=device)
    group = Group.alone("alone")
    targets = {Cast("bf16", feedback=None): 2.0, Quantize(8): 1.0, Sign(): 0.8}
    for compressor, target in targets.items():
        taken_s = seconds_of(lambda compressor=compressor: compressor.reduce_({"w": flat}, group), device, 5)
        speed = 4 * elements / taken_s / 1e12
        yield Figure(f"{compressor}, 64 M elements", speed, "TB/s", f">= {target}", speed >= target)
    for compressor, limit_ms in ((TopK(0.01), 3.0), (RandomK(0.25), 2.0)):
        taken_s = seconds_of(lambda compressor=compressor: compressor.reduce_({"w": flat}, group), device, 5)
        yield at_most(f"{compressor}, 64 M elements", taken_s * 1e3, limit_ms, "ms")
    values = flat[: 1 << (21 if device == "cuda" else 16)].view(1, -1)
    ours_s = seconds_of(lambda: largest(values, values.shape[1] // 100), device)
    theirs_s = seconds_of(lambda: values.abs().topk(values.shape[1] // 100), device)
    yield at_most("largest 1 % over torch.topk", ours_s / theirs_s, 1.1)
    width = 1024 if device == "cuda" else 64
    matrices = {f"w{number}": torch.randn(width, 4 * width, device=device) for number in range(96)}
    with fake_ranks(8, device) as ranks:
        for compressor, limit_ms in ((Quantize(8), 5.0), (PowerSGD(4), 3.0)):
            taken_s = seconds_of(lambda compressor=compressor: compressor.reduce_(matrices, ranks), device, 5)
            yield at_most(f"{compressor}, 96 matrices, 8 ranks", taken_s * 1e3, limit_ms, "ms")


def gpt(device: str) -> Iterator[Figure]:
    """Train a GPT of 350 M parameters: tokens a second of stock Lightning, and ours over it."""
    large = {"width": 1024, "layers": 24, "vocabulary": 50304, "length": 1024, "batch": 16}
    size = large if device == "cuda" else {"width": 32, "layers": 4, "vocabulary": 64, "length": 16, "batch": 16}
    steps = 8 if device == "cuda" else 4

    def timed(strategy: Any) -> float:
        return fit(strategy, "bf16-mixed", device, steps=steps, **size).step_s

    stock_s = timed("auto")
    tokens = size["batch"] * size["length"]
    yield Figure("stock Lightning", tokens / stock_s / 1e3, "k tokens/s", "150 to 185 on an H200, eager")
    yield at_most("TensorParallelStrategy on one device / stock", timed(TensorParallelStrategy()) / stock_s, 1.01)
    for microbatches, limit in ((1, 1.02), (4, 1.08), (16, 1.25)):
        taken_s = timed(PipelineParallelStrategy(num_microbatches=microbatches))
        yield at_most(f"one stage, {microbatches} microbatches / stock", taken_s / stock_s, limit)
    virtual = PipelineParallelStrategy(num_microbatches=8, schedule="interleaved_1f1b", virtual_stages=4)
    yield Figure("four virtual stages, 8 microbatches / stock", timed(virtual) / stock_s, "")
    split = PipelineParallelStrategy(num_microbatches=8, schedule="zb_h1")
    yield Figure("zb_h1 on one rank, 8 microbatches / stock", timed(split) / stock_s, "")


def memory(device: str) -> Iterator[Figure]:
    """Compare the predicted memory of a pipeline with what was allocated at most."""
    if device != "cuda":
        return
    for virtual_stages in (1, 2, 4):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine, step, batch = _engine(device, virtual_stages)
        engine.forward_backward(step, batch)
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        engine.forward_backward(step, batch)
        predicted = planned_memory(engine.plan, engine.stages, 2.0).total
        measured = torch.cuda.max_memory_allocated() - before
        name = f"predicted / allocated, {virtual_stages} stages on one rank"
        yield Figure(name, predicted / measured, "", "0.9 to 1.1", abs(predicted / measured - 1) <= 0.1)
        del engine, step, batch


def _engine(device: str, virtual_stages: int) -> tuple[PipelineEngine, Callable[[Any], Any], Any]:
    size = {"width": 1024, "layers": 8, "vocabulary": 8192} if device == "cuda" else {}
    model = GPT(**size).to(device)
    batch = model.batch(8, 512 if device == "cuda" else 16)
    batch = [entry.to(device) for entry in batch]

    def step(part: Any) -> torch.Tensor:
        return model.loss(part)

    name = "1f1b" if virtual_stages == 1 else "interleaved_1f1b"
    plan = analyze(
        model,
        1,
        name,
        num_microbatches=4,
        virtual_stages=virtual_stages,
        example=(step, [entry[:2] for entry in batch]),
    )
    return PipelineEngine(model, plan, Group.alone("pipeline_parallel")), step, batch


def tensor_fake(device: str) -> Iterator[Figure]:
    """Run one rank's step of tensor parallel 8: the host must not take longer than the device."""
    for name, width, length in (("350 M model", 1024, 1024), ("7 B layer", 4096, 2048)):
        if device == "cpu":
            width, length = width // 16, 16
        with fake_ranks(8, device) as group:
            model = nn.Sequential(*(block_of_7b(width) for _ in range(4))).to(device, torch.bfloat16)
            apply_plan(model, make_plan(model, "auto", group), group)
            x = torch.randn(2, length, width, device=device, dtype=torch.bfloat16)

            def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
                model(x).square().mean().backward()

            total_s = seconds_of(step, device)
            synchronize(device)
            begun_s = time.perf_counter()
            step()
            host_s = time.perf_counter() - begun_s
            yield Figure(f"{name}: step of one rank of 8", total_s * 1e3, "ms")
            yield Figure(f"{name}: host / step", host_s / total_s, "", "< 1", host_s < total_s)


def gloo_ranks(device: str) -> Iterator[Figure]:
    """Let two and four gloo ranks share the card: pipelines and tensor parallelism equal one process in fp64."""
    for layouts in (
        [Layout(tensor=2), *(Layout(pipeline=2, schedule=name) for name in ("1f1b", "zb_h1", "interleaved_1f1b"))],
        [Layout(pipeline=4), Layout(pipeline=4, schedule="zb_h1")],
    ):
        for layout, difference in zip(layouts, shared_card(device, layouts)):
            way = f"tensor {layout.tensor}" if layout.tensor > 1 else f"pipeline {layout.pipeline}, {layout.schedule}"
            yield at_most(f"{way}: largest difference of a gradient", difference, 1e-10)


def queues(device: str) -> Iterator[Figure]:
    """See whether work that waits in many streams holds up a kernel in another."""
    if device != "cuda":
        return
    program = (
        "import time, torch\n"
        "streams = [torch.cuda.Stream() for _ in range(12)]; x = torch.zeros(1, device='cuda')\n"
        "torch.cuda._sleep(1000); torch.cuda.synchronize()\n"
        "for stream in streams:\n"
        "    with torch.cuda.stream(stream):\n"
        "        torch.cuda._sleep(200_000_000); torch.cuda._sleep(200_000_000)\n"
        "begun = time.perf_counter(); x.add_(1); torch.cuda.current_stream().synchronize()\n"
        "print(time.perf_counter() - begun)\n"
    )
    for connections in (1, 8, 32):
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        delay_ms = float(ended.stdout or "nan") * 1e3
        yield Figure(f"delay with CUDA_DEVICE_MAX_CONNECTIONS={connections}", delay_ms, "ms", "free with 32")


def measured_layers(device: str) -> Iterator[Figure]:
    """Compare what the plan has measured of layers with a step."""
    engine, step, batch = _engine(device, 1)
    costs = engine.plan.stage_costs
    taken_s = seconds_of(lambda: engine.forward_backward(step, batch), device, 5)
    predicted_s = sum(cost.total_s for cost in costs) * engine.schedule.num_microbatches
    ratio = predicted_s / taken_s
    yield Figure("measured layers / step of the engine", ratio, "", "0.9 to 1.1", abs(ratio - 1) <= 0.1)


SECTIONS = {
    section.name: section
    for section in (
        Section("facts", facts, 60),
        Section("gpu_tests", gpu_tests, 120),
        Section("world_one", world_one, 120),
        Section("races", races, 60),
        Section("waits", waits, 45),
        Section("compression", compression, 60),
        Section("gpt", gpt, 180),
        Section("memory", memory, 45),
        Section("clock", clock, 45),
        Section("tensor_fake", tensor_fake, 60),
        Section("gloo_ranks", gloo_ranks, 90),
        Section("queues", queues, 40),
        Section("measured_layers", measured_layers, 60),
    )
}
"""In the order of what they are worth."""

ABOUT_NUMBERS = {"world_one", "races", "gloo_ranks"}
"""Sections whose verdicts hold on a CPU, too."""
