"""How much is trained in a second, and how much of the devices that takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Optional, Union

import torch
from lightning.pytorch import LightningModule, Trainer
from rich import box
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_parallel.callbacks.base import Accumulator, MeasuringCallback
from lightning_parallel.callbacks.flops import ForwardFlops, Peak, peak_of
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.microbatch import num_samples
from lightning_parallel.recorder import Window

__all__ = ["Throughput", "ThroughputAccumulator", "num_tokens"]

POINTS = 512
"""Most points of a curve over the steps."""

BACKWARD_FACTOR = 3
"""A step takes three times the operations of its forward: two of them for the gradients of inputs and weights."""


class Batch(NamedTuple):
    """What one rank was given in one step; None where it could not be told."""

    samples: int | None
    tokens: int | None


class Point(NamedTuple):
    """Some steps that follow each other, up to `step`."""

    step: int
    samples: int
    seconds: float
    steps: int


class ThroughputAccumulator(Accumulator):
    """Samples, tokens and seconds of this rank.

    Args:
        rank: Global rank of this process.
        mesh: The mesh of all ranks.
        peak: What this rank's device can do.
        wants_utilisation: Say so if it cannot be given.
    """

    def __init__(self, rank: int, mesh: Mesh, peak: Peak | None = None, wants_utilisation: bool = True) -> None:
        self._rank, self._mesh, self._peak, self._wants_utilisation = rank, mesh, peak, wants_utilisation
        self._batches: dict[int, Batch] = {}
        self._samples: int | None = 0
        self._tokens: int | None = 0
        self._seconds = 0.0
        self._points: list[Point] = []
        self._stride = 1
        self._logged = (0, 0, 0.0)
        self.flops: tuple[float, int] | None = None
        """Operations of this rank, forward and backward, for so many samples of its replica."""

    def count(self, step: int, batch: Batch) -> None:
        """Take notice of what `step` was given."""
        self._batches[step] = batch

    @override
    def add(self, window: Window) -> None:
        paused_ns = window.phases.get("validation", 0) + window.phases.get("checkpoint", 0)
        seconds = (window.wall_ns - paused_ns) / 1e9
        batch = self._batches.pop(window.step, Batch(None, None))
        self._batches = {step: later for step, later in self._batches.items() if step > window.step}
        self._seconds += seconds
        self._samples = _sum(self._samples, batch.samples)
        self._tokens = _sum(self._tokens, batch.tokens)
        self._draw(Point(window.step, batch.samples or 0, seconds, 1))

    def _draw(self, point: Point) -> None:
        last = self._points[-1] if self._points else None
        if last is not None and last.steps < self._stride:
            self._points[-1] = _joined(last, point)
        else:
            self._points.append(point)
        if len(self._points) > POINTS:
            pairs = zip(self._points[::2], self._points[1::2])
            self._points = [_joined(*pair) for pair in pairs] + self._points[len(self._points) // 2 * 2 :]
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
        }

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
                missing.append(f"The {key} of a batch could not be counted: pass `{key}` to Throughput.")
        utilisation, why = self._utilisation(shared, replicas, report.get("samples_per_second"))
        missing += why if self._wants_utilisation else []
        report |= {**utilisation, "series": _series(replicas)}
        return {**report, "missing": missing} if missing else report

    def _utilisation(
        self,
        shared: Sequence[Mapping[str, Any]],
        replicas: Sequence[Sequence[Mapping[str, Any]]],
        samples_per_second: float | None,
    ) -> tuple[dict[str, Any], list[str]]:
        """What is known of the operations, and what is not."""
        if samples_per_second is None or any(rank["flops"] is None for rank in shared):
            return {}, ["The model's operations could not be counted: pass `flops_per_sample` to Throughput."]
        samples = sum(replica[0]["flops"][1] for replica in replicas)
        per_sample = sum(rank["flops"][0] for rank in shared) / samples
        rate = per_sample * samples_per_second
        known: dict[str, Any] = {"model_flops_per_sample": per_sample, "model_flops_per_second": rate}
        peaks = [rank["peak"] for rank in shared]
        if None in peaks:
            return known, ["The devices' peak is not known: pass `peak_flops` to Throughput."]
        peak = sum(flops for flops, _ in peaks)
        known["peak"] = {"flops_per_second": peak, "source": peaks[0][1]}
        return {**known, "model_flops_utilisation": rate / peak}, []

    def _replicas(self, shared: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """The ranks of each replica: they work on the same samples."""
        by_replica: dict[int, list[dict[str, Any]]] = {}
        for rank in shared:
            by_replica.setdefault(self._mesh.coordinate(rank["rank"]).data_parallel, []).append(rank)
        return list(by_replica.values())

    def _steps(self, shared: Sequence[dict[str, Any]]) -> int:
        return sum(point.steps for point in shared[0]["points"])

    @override
    def scalars(self) -> dict[str, float]:
        samples, tokens, seconds = self._logged
        elapsed = self._seconds - seconds
        if elapsed == 0:
            return {}
        replicas, scalars = self._mesh.data_parallel, {}
        if self._samples is not None:
            scalars["throughput/samples_per_second"] = (self._samples - samples) * replicas / elapsed
        if self._tokens is not None:
            scalars["throughput/tokens_per_second"] = (self._tokens - tokens) * replicas / elapsed
        self._logged = (self._samples or 0, self._tokens or 0, self._seconds)
        return scalars


class Throughput(MeasuringCallback):
    """Counts samples and tokens per second over the replicas, and the share of the devices' peak that they take.

    The ranks of one replica (tensor and pipeline parallel) work on the same samples, which count once. Time is that of
    the steps, without validation and checkpoints.

    Args:
        samples: Samples of a batch; by default the length of its tensors.
        tokens: Tokens of a batch; by default the elements of `input_ids`, or of the first tensor of integers with two
            dimensions.
        flops_per_sample: Operations of forward and backward of the whole model. `"auto"`: three times those of a
            forward, counted in the first step and summed over the ranks of a replica; what tensor-parallel ranks
            compute alike counts on each. None: no utilisation.
        peak_flops: Operations per second of one device. `"auto"`: from a table of dense peaks; on CPU calibrated with a
            matrix product. None: no utilisation.
        exchange_every, warmup_steps, dirpath, show_table: See `MeasuringCallback`.

    `report()` has, besides the common keys:

        replicas, seconds_per_step, samples_per_second, samples_per_second_per_device, tokens_per_second,
        tokens_per_second_per_device, model_flops_per_sample, model_flops_per_second, model_flops_utilisation
        peak: {flops_per_second (of all devices), source}
        series: {samples_per_second: [[step, value]], step_seconds: [[step, value]]}
        missing: [sentence]

    What could not be counted is left out.

    Logged: `throughput/samples_per_second`, `throughput/tokens_per_second`: of rank 0's replica, times the number of
    replicas, over the steps since the last logging.

    Source: PaLM, https://arxiv.org/abs/2204.02311, appendix B (model FLOPs utilisation)
    """

    def __init__(
        self,
        samples: Optional[Callable[[Any], int]] = None,
        tokens: Optional[Callable[[Any], int]] = None,
        flops_per_sample: Union[Literal["auto"], float, None] = "auto",
        peak_flops: Union[Literal["auto"], float, None] = "auto",
        exchange_every: int = 50,
        warmup_steps: int = 1,
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        super().__init__(exchange_every, warmup_steps, dirpath, show_table)
        self.samples, self.tokens = samples or num_samples, tokens or num_tokens
        self.flops_per_sample, self.peak_flops = flops_per_sample, peak_flops
        self._counter: ForwardFlops | None = None
        self._updates: tuple[RemovableHandle, ...] = ()
        self._depth = 0  # of the updates that run: one may call that of its superclass

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> Accumulator:
        assert self.session is not None
        if self.peak_flops == "auto" and self.flops_per_sample is not None:
            peak = peak_of(trainer.strategy.root_device, _dtype(trainer, pl_module))
        else:
            peak = (self.peak_flops, "given") if isinstance(self.peak_flops, (int, float)) else None
        wanted = self.flops_per_sample is not None and self.peak_flops is not None
        return ThroughputAccumulator(self.session.rank, self.session.mesh, peak, wanted)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self.session is not None
        assert self.session.recorder is not None
        assert isinstance(self._accumulator, ThroughputAccumulator)
        step = self.session.recorder.step
        counted = Batch(_counted(self.samples, batch), _counted(self.tokens, batch))
        self._accumulator.count(step, counted)
        if step == 0 and counted.samples:
            if self.flops_per_sample == "auto":
                before, after = self._before_update, self._after_update
                self._updates = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
                self._counter = ForwardFlops()
                self._counter.__enter__()
            elif self.flops_per_sample is not None:
                share = self.session.mesh.world_size // self.session.mesh.data_parallel
                self._accumulator.flops = self.flops_per_sample * counted.samples / share, counted.samples

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
        self._pause(True)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause(False)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._pause(True)  # the loss is known; until the end of the update

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._counter is not None:
            self._stop_counting(_counted(self.samples, batch))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _stop_counting(self, samples: int | None) -> None:
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.__exit__(None, None, None)
        for update in self._updates:
            update.remove()
        self._depth = 0
        assert isinstance(self._accumulator, ThroughputAccumulator)
        if samples and counter.total:
            self._accumulator.flops = BACKWARD_FACTOR * counter.total, samples

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_counting(None)
        super().on_exception(trainer, pl_module, exception)

    @override
    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{key: value for key, value in report.items() if isinstance(value, (int, float))}]

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
    """The elements of `input_ids`, or else of the first tensor of integers with two dimensions.

    Raises:
        ValueError: If there is none.
    """
    leaves = [batch["input_ids"]] if isinstance(batch, Mapping) and "input_ids" in batch else tree_leaves(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype in (torch.int32, torch.int64):
            return leaf.numel()
    raise ValueError("expected `input_ids` or a tensor of integers with two dimensions in the batch, found none")


def _counted(count: Callable[[Any], int], batch: Any) -> int | None:
    try:
        return count(batch)
    except ValueError:
        return None


def _sum(total: int | None, value: int | None) -> int | None:
    return None if total is None or value is None else total + value


def _joined(first: Point, second: Point) -> Point:
    seconds = first.seconds + second.seconds
    return Point(second.step, first.samples + second.samples, seconds, first.steps + second.steps)


def _series(replicas: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, list[list[float]]]:
    """Curves over the steps, from those of one rank of each replica."""
    series: dict[str, list[list[float]]] = {"samples_per_second": [], "step_seconds": []}
    for points in zip(*(replica[0]["points"] for replica in replicas)):
        seconds = max(point.seconds for point in points)
        series["samples_per_second"].append([points[0].step, sum(point.samples for point in points) / seconds])
        series["step_seconds"].append([points[0].step, seconds / points[0].steps])
    return series


def _dtype(trainer: Trainer, pl_module: LightningModule) -> torch.dtype:
    """In which matrices are multiplied."""
    if str(trainer.precision) == "bf16-mixed":
        return torch.bfloat16
    if str(trainer.precision) == "16-mixed":
        return torch.float16
    dtypes = (parameter.dtype for parameter in pl_module.parameters() if parameter.is_floating_point())
    return next(dtypes, torch.float32)
