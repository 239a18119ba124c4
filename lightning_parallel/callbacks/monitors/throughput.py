"""Throughput: samples and tokens per second, and the model's share of the peak of the devices."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Optional, Union

import torch
from lightning.pytorch import LightningModule, Trainer
from rich import box
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback
from lightning_parallel.callbacks.recording.session import Session
from lightning_parallel.compat.precision import uses_tf32
from lightning_parallel.compat.torch import (
    TorchDispatchMode,
    current_autograd_node,
    is_backward_running,
    pytree,
)
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.microbatch import num_samples
from lightning_parallel.planner.hardware import data_sheet_flops
from lightning_parallel.planner.roofline import flops_of
from lightning_parallel.tracing import Window
from lightning_parallel.tracing.spans import count_text, percent

__all__ = ["ModelFlops", "Throughput", "ThroughputAccumulator", "num_tokens"]

POINTS = 512
"""Most points of a curve over the steps."""


class BatchCounts(NamedTuple):
    """Samples and tokens of one rank's batch; None where they could not be counted."""

    samples: int | None
    tokens: int | None


class CurvePoint(NamedTuple):
    """Totals of a run of consecutive steps, the last of which is `step`."""

    step: int
    samples: int
    seconds: float
    steps: int


class ThroughputAccumulator(Accumulator):
    """Adds up samples, tokens and seconds of this rank.

    Args:
        rank: Global rank of this process.
        mesh: The mesh of all ranks.
        peak: Peak of this rank's device.
        wants_utilisation: Whether `missing` names the reason if the utilisation is unknown.

    Attributes:
        flops: Operations of this rank, forward and backward, and their number of samples of its replica; or None.
        uncounted: Operators that `flops` leaves out, because their number of operations is unknown.
    """

    def __init__(self, rank: int, mesh: Mesh, peak: PeakFlops | None = None, wants_utilisation: bool = True) -> None:
        self._rank = rank
        self._mesh = mesh
        self._peak = peak
        self._wants_utilisation = wants_utilisation
        self._batches: dict[int, BatchCounts] = {}
        self._samples: int | None = 0
        self._tokens: int | None = 0
        self._seconds = 0.0
        self._points: list[CurvePoint] = []
        self._stride = 1
        self._logged = (0, 0, 0.0)
        self.flops: tuple[float, int] | None = None
        self.uncounted: list[str] = []

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens of all batches so far could be counted."""
        return self._tokens is not None

    def count(self, step: int, batch: BatchCounts) -> None:
        """Add the batch of `step`; `add` gives its time later."""
        self._batches[step] = batch

    @override
    def add(self, window: Window) -> None:
        # Without validation and checkpoints: their frequency is the user's choice, so the rate must not depend on it.
        paused_ns = window.phases.get("validation", 0) + window.phases.get("checkpoint", 0)
        seconds = (window.wall_ns - paused_ns) / 1e9
        batch = self._batches.pop(window.step, BatchCounts(None, None))
        # Skipped and uncounted steps have no window, so drop their batches here.
        while self._batches and (earliest := next(iter(self._batches))) < window.step:
            del self._batches[earliest]
        self._seconds += seconds
        self._samples = _sum(self._samples, batch.samples)
        self._tokens = _sum(self._tokens, batch.tokens)
        self._add_point(CurvePoint(window.step, batch.samples or 0, seconds, 1))

    def _add_point(self, point: CurvePoint) -> None:
        """Add a step to the curve; a full curve merges pairs of points, so each point covers twice as many steps."""
        last = self._points[-1] if self._points else None
        if last is not None and last.steps < self._stride:
            self._points[-1] = _merged(last, point)
        else:
            self._points.append(point)
        if len(self._points) > POINTS:
            pairs = zip(self._points[::2], self._points[1::2])
            self._points = [_merged(*pair) for pair in pairs] + self._points[len(self._points) // 2 * 2 :]
            self._stride *= 2

    @override
    def share(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "samples": self._samples,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "points": list(self._points),
            "flops": self.flops,
            "peak": self._peak,
            "uncounted": self.uncounted,
        }

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        # Ranks end their steps together, so the slowest rank gives the time of the run.
        seconds = max(rank["seconds"] for rank in shared)
        if seconds == 0:
            return {}
        replicas = self._replicas(shared)
        report: dict[str, Any] = {"replicas": len(replicas), "seconds_per_step": seconds / self._steps(shared)}
        missing = []
        for key in ("samples", "tokens"):
            counts = [replica[0][key] for replica in replicas]
            if None not in counts:
                report[f"{key}_per_second"] = sum(counts) / seconds
                report[f"{key}_per_second_per_device"] = sum(counts) / seconds / self._mesh.world_size
            else:
                missing.append(f"The {key} of a batch could not be counted. Pass `{key}` to `Throughput`.")
        utilisation, why = self._utilisation(shared, replicas, report.get("samples_per_second"))
        missing += why if self._wants_utilisation else []
        uncounted = sorted({name for rank in shared for name in rank["uncounted"]})
        if uncounted:
            names = ", ".join(f"`{name}`" for name in uncounted)
            missing.append(
                f"The operations of {names} are unknown and were not counted. Pass `flops_per_sample` to `Throughput`."
            )
        report |= {**utilisation, "series": _series(replicas)}
        return {**report, "missing": missing} if missing else report

    def _utilisation(
        self,
        shared: Sequence[Mapping[str, Any]],
        replicas: Sequence[Sequence[Mapping[str, Any]]],
        samples_per_second: float | None,
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the report's keys of operations and utilisation, and the reasons for missing keys."""
        if samples_per_second is None or any(rank["flops"] is None for rank in shared):
            return {}, ["The operations of the model could not be counted. Pass `flops_per_sample` to `Throughput`."]
        # Each rank counted its own part of the model, for the samples of its replica.
        samples = sum(replica[0]["flops"][1] for replica in replicas)
        per_sample = sum(rank["flops"][0] for rank in shared) / samples
        rate = per_sample * samples_per_second
        known: dict[str, Any] = {"model_flops_per_sample": per_sample, "model_flops_per_second": rate}
        peaks = [rank["peak"] for rank in shared]
        if None in peaks:
            return known, ["The peak of the devices is unknown. Pass `peak_flops` to `Throughput`."]
        peak = sum(flops for flops, _ in peaks)
        known["peak"] = {"flops_per_second": peak, "source": peaks[0][1]}
        return {**known, "model_flops_utilisation": rate / peak}, []

    def _replicas(self, shared: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Group the ranks by replica: ranks of one replica work on the same samples."""
        by_replica: dict[int, list[dict[str, Any]]] = {}
        for rank in shared:
            by_replica.setdefault(self._mesh.coordinate(rank["rank"]).data_parallel, []).append(rank)
        return list(by_replica.values())

    def _steps(self, shared: Sequence[dict[str, Any]]) -> int:
        return sum(point.steps for point in shared[0]["points"])

    @override
    def scalars(self) -> dict[str, float]:
        samples, tokens, seconds = self._logged
        elapsed = self._seconds - seconds  # none on a device that is behind the host
        if elapsed == 0:
            return {}
        replicas = self._mesh.data_parallel
        scalars = {}
        if self._samples is not None:
            scalars["throughput/samples_per_second"] = (self._samples - samples) * replicas / elapsed
        if self._tokens is not None:
            scalars["throughput/tokens_per_second"] = (self._tokens - tokens) * replicas / elapsed
        self._logged = (self._samples or 0, self._tokens or 0, self._seconds)
        return scalars


class Throughput(MeasuringCallback[ThroughputAccumulator]):
    """Measures samples and tokens per second of all replicas, and the share of the devices' peak that the model uses.

    The ranks of one replica (tensor and pipeline parallel) work on the same samples. These samples count once. The time
    is the time of the steps, without validation and checkpoints.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import Throughput

        throughput = Throughput()
        trainer = Trainer(callbacks=[throughput])
        trainer.fit(MyModule(), MyData())
        print(throughput.report()["samples_per_second"])
        ```

    Args:
        samples: Function that returns the number of samples in a batch. The default returns the length of its tensors.
        tokens: Function that returns the number of tokens in a batch. By default, tokens are the elements of
            `input_ids`, or of the first tensor of integers with two dimensions.
        flops_per_sample: Floating-point operations of forward and backward of the full model, for one sample. `"auto"`
            counts them in the first step (see below). None reports no utilisation.
        peak_flops: Floating-point operations per second of one device. `"auto"` reads a table of dense peaks, or on a
            CPU measures a matrix product. None reports no utilisation.
        every_n_batches: Number of batches between two exchanges of results among the ranks. The smallest value of all
            callbacks counts.
        warmup_batches: Number of first batches that are not counted. The largest value of all callbacks counts.
        dirpath: Folder where rank 0 writes `<name>.json` and `<name>.csv` after training. None writes nothing.
        show_table: Print a table after training, on rank 0.

    Raises:
        ValueError: If a number is too small.

    `flops_per_sample="auto"` counts the operations as they run, and adds them up over the ranks of a replica.

    * Frozen parameters cost less.
    * Operations that activation checkpointing repeats are not counted.
    * An operation that several tensor-parallel ranks repeat counts on each of them.
    * Gradients of `create_graph=True` are not counted. In this case, pass a number.

    `report()` returns the common keys and these:

        replicas, seconds_per_step, samples_per_second, samples_per_second_per_device, tokens_per_second,
        tokens_per_second_per_device, model_flops_per_sample, model_flops_per_second, model_flops_utilisation
        peak: {flops_per_second (of all devices), source}
        series: {samples_per_second: [[step, value]], step_seconds: [[step, value]]}
        missing: [sentence]

    A key is left out if its value could not be counted.

    The progress bar shows `samples/s`, `tokens/s` and `MFU`, after the first `every_n_batches` steps.

    Logged: `throughput/samples_per_second` and `throughput/tokens_per_second`. Both are values of rank 0's replica,
    times the number of replicas, over the steps since the last logging.

    Source: PaLM, https://arxiv.org/abs/2204.02311, appendix B (model FLOPs utilisation)
    """

    def __init__(
        self,
        samples: Optional[Callable[[Any], int]] = None,
        tokens: Optional[Callable[[Any], int]] = None,
        flops_per_sample: Union[Literal["auto"], float, None] = "auto",
        peak_flops: Union[Literal["auto"], float, None] = "auto",
        every_n_batches: int = 50,
        warmup_batches: int = 1,
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        super().__init__(every_n_batches, warmup_batches, dirpath, show_table)
        for name, value in (("flops_per_sample", flops_per_sample), ("peak_flops", peak_flops)):
            if value not in ("auto", None) and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"`{name}` must be a positive number, 'auto' or None; got {value!r}")
        self.samples = samples or num_samples
        self.tokens = tokens or num_tokens
        self.flops_per_sample = flops_per_sample
        self.peak_flops = peak_flops
        self._counter: ModelFlops | None = None
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._depth = 0  # of nested optimizer steps: a step may call the step of its superclass

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> ThroughputAccumulator:
        peak: PeakFlops | None = None
        if isinstance(self.peak_flops, (int, float)):
            peak = self.peak_flops, "given"
        elif self.peak_flops == "auto" and self.flops_per_sample is not None:
            peak = peak_flops_of(trainer.strategy.root_device, _dtype(trainer, pl_module))
            if peak is not None and trainer.strategy.root_device.type == "cpu":
                peak = _share_of(peak, self.open_session)
        wanted = self.flops_per_sample is not None and self.peak_flops is not None
        return ThroughputAccumulator(self.open_session.rank, self.open_session.mesh, peak, wanted)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        session = self.open_session
        step = session.active_recorder.step
        # After one failure, stop counting tokens: the batches of many modules have none.
        tokens = _counted(self.tokens, batch) if self.accumulator.has_tokens else None
        counts = BatchCounts(_counted(self.samples, batch), tokens)
        self.accumulator.count(step, counts)
        # Count only the first step: counting is slow, and the first step warms up anyway.
        if step == 0 and counts.samples:
            if self.flops_per_sample == "auto":
                self._start_counting()
            elif self.flops_per_sample is not None:
                # The ranks of a replica add up to the full model, so each rank takes an equal share.
                share = session.mesh.world_size // session.mesh.data_parallel
                self.accumulator.flops = self.flops_per_sample * counts.samples / share, counts.samples

    def _start_counting(self) -> None:
        # Lightning has no hook at the end of an optimizer step, so use torch's hooks.
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        )
        self._counter = ModelFlops()
        # Without `with`, because the count spans several hooks.
        self._counter.__enter__()

    def _pause(self, paused: bool) -> None:
        if self._counter is not None:
            self._counter.paused = paused

    def _before_update(self, *_: Any) -> None:
        self._depth += 1

    def _after_update(self, *_: Any) -> None:
        self._depth -= 1
        self._pause(self._depth > 0)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # Pause for gradient compression, which multiplies matrices during backward. Backward itself counts even so.
        self._pause(True)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause(False)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._pause(True)  # until the end of the update, which is no part of the model

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._counter is not None:
            self._stop_counting(_counted(self.samples, batch))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _stop_counting(self, samples: int | None) -> None:
        counter = self._counter
        self._counter = None
        if counter is None:
            return
        counter.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._depth = 0
        # `samples` is None after an error, when only a part was counted. A model may also have no such operations.
        if samples and counter.total:
            self.accumulator.flops = float(counter.total), samples
            self.accumulator.uncounted = sorted(counter.unknown)

    @override
    def _leave(self) -> None:
        self._stop_counting(None)
        super()._leave()

    @override
    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{key: value for key, value in report.items() if isinstance(value, (int, float))}]

    @override
    def bar_items(self, report: Mapping[str, Any]) -> dict[str, str]:
        rates = {"samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}
        items = {name: count_text(report[key]) for key, name in rates.items() if key in report}
        share = report.get("model_flops_utilisation")
        return items if share is None else {**items, "MFU": percent(share)}

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        if "seconds_per_step" not in report:
            return None
        table = Table(title="Throughput", box=box.SIMPLE_HEAD, show_header=False)
        for key, form in (
            ("samples_per_second", ",.1f"),
            ("tokens_per_second", ",.1f"),
            ("seconds_per_step", ".4f"),
            ("model_flops_per_second", ".3e"),
            ("model_flops_utilisation", ".2%"),
        ):
            if key in report:
                source = f" ({report['peak']['source']})" if key == "model_flops_utilisation" else ""
                table.add_row(key.replace("_", " ") + source, format(report[key], form))
        return table


def num_tokens(batch: Any) -> int:
    """Count the elements of `input_ids`, or else of the first tensor of integers with two dimensions.

    Raises:
        ValueError: If there is no such tensor.
    """
    # Prefer `input_ids`: other tensors of integers, such as masks and labels, may have another shape.
    leaves = [batch["input_ids"]] if isinstance(batch, Mapping) and "input_ids" in batch else pytree.tree_leaves(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype in (torch.int32, torch.int64):
            return leaf.numel()
    raise ValueError("The batch must hold `input_ids` or a tensor of integers with two dimensions; got neither")


def _counted(count: Callable[[Any], int], batch: Any) -> int | None:
    try:
        return count(batch)
    except ValueError:
        return None


def _sum(total: int | None, value: int | None) -> int | None:
    return None if total is None or value is None else total + value


def _merged(first: CurvePoint, second: CurvePoint) -> CurvePoint:
    seconds = first.seconds + second.seconds
    return CurvePoint(second.step, first.samples + second.samples, seconds, first.steps + second.steps)


def _series(replicas: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, list[list[float]]]:
    """Draw curves over the steps, from the curves of one rank of each replica."""
    series: dict[str, list[list[float]]] = {"samples_per_second": [], "step_seconds": []}
    for points in zip(*(replica[0]["points"] for replica in replicas)):
        # Replicas end their steps together, so the slowest replica sets the rate.
        seconds = max(point.seconds for point in points)
        series["samples_per_second"].append([points[0].step, sum(point.samples for point in points) / seconds])
        series["step_seconds"].append([points[0].step, seconds / points[0].steps])
    return series


def _dtype(trainer: Trainer, pl_module: LightningModule) -> torch.dtype:
    """Return the dtype of matrix products."""
    # Under autocast, products have another dtype than the parameters.
    if str(trainer.precision) == "bf16-mixed":
        return torch.bfloat16
    if str(trainer.precision) == "16-mixed":
        return torch.float16
    dtypes = (parameter.dtype for parameter in pl_module.parameters() if parameter.is_floating_point())
    return next(dtypes, torch.float32)


def _share_of(peak: PeakFlops, session: Session) -> PeakFlops:
    """Return the part of a peak that a rank reaches on its share of the processors.

    Each rank measured the peak with all its threads, as if no other rank used the processors.
    """
    threads = torch.get_num_threads()
    share = min(1.0, session.cores / threads)
    flops, source = peak
    if share == 1:
        return peak
    return share * flops, f"{source}, {session.cores:.3g} cores for {threads} threads"


# --------------------------------------------------------------------------------------------- operations of the model


PeakFlops = tuple[float, str]
"""Operations per second of a device, and the source of the figure."""


_TORCHS_OWN = ("aten", "prim", "prims", "c10d", "c10d_functional", "profiler", "rngprims", "inductor", "debugprims")
"""Namespaces of torch's operators: they hide no kernels of a user."""

_MULTIPLIES = re.compile(r"(mm|conv|convolution|attention|rnn|lstm|gru|fft|cdist|trilinear)(?![a-z])")
"""Names of torch's operators that need many products for each returned number."""


class ModelFlops(TorchDispatchMode):
    """Counts the operations of matrix products, convolutions and attention inside the block, by torch's formulas.

    Forward and backward are counted as they run: frozen parameters need no gradient. Three kinds of operations are
    left out, unlike in `FlopCounterMode`: repetitions by activation checkpointing, operations of hooks on parameters
    (such as compressed gradients), and operations on tensors without data. A backward with `create_graph=True`, as
    for a penalty on gradients, counts only in its own backward. Nothing tells its gradients from such repetitions.

    Attributes:
        total: Operations so far; a multiplication and its addition are two.
        unknown: Operators without a formula that multiply matrices, or that do not belong to torch.
        paused: Whether to count only backward: gradient compression and optimizers also multiply matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.unknown: set[str] = set()
        self.paused = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Let a tensor subclass unwrap its plain tensors first. The mode then counts the operations on plain tensors.
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not self._is_of_model() or _is_meta(out):
            return out
        count = flops_of(func, args, kwargs, out)
        if count is None:
            self._note(func)
            return out
        # One of the five products in the backward of fused attention repeats a product of the forward: leave it out.
        self.total += count * 4 // 5 if "attention" in func.name() and "backward" in func.name() else count
        return out

    def _is_of_model(self) -> bool:
        if not is_backward_running():
            return not self.paused
        # In backward, autograd runs with gradients disabled, and recomputation of checkpointing with gradients enabled.
        node = current_autograd_node()
        return node is not None and "AccumulateGrad" not in node.name() and not torch.is_grad_enabled()

    def _note(self, func: Any) -> None:
        namespace, _, name = func.name().partition("::")
        if namespace.strip("_") not in _TORCHS_OWN or (namespace == "aten" and _MULTIPLIES.search(name)):
            self.unknown.add(f"{namespace}::{name.partition('.')[0]}")


def _is_meta(out: Any) -> bool:
    first = out[0] if isinstance(out, tuple) else out
    return isinstance(first, Tensor) and first.is_meta


def peak_flops_of(device: torch.device, dtype: torch.dtype) -> PeakFlops | None:
    """Return the peak rate of `device` in dense matrix products of `dtype`; None if unknown."""
    if device.type == "cpu":
        return _measured_flops(dtype), "calibrated by a matrix product"
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    kind = "tf32" if dtype is torch.float32 and uses_tf32() else str(dtype).removeprefix("torch.")
    peaks = data_sheet_flops(name)
    return (peaks[kind], f"data sheet of {name}, dense {kind}") if kind in peaks else None


def _measured_flops(dtype: torch.dtype, size: int = 512, seconds: float = 0.05) -> float:
    """Return the best rate of a square matrix product within some seconds."""
    matrix = torch.ones(size, size, dtype=dtype)
    matrix @ matrix  # the first product allocates memory
    fastest = float("inf")
    until = time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        matrix @ matrix
        # Other load only ever makes a product slower.
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest
