"""Gradient noise scale: the batch size beyond which more samples or replicas help little."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple, Optional, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from rich import box
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback
from lightning_parallel.compat.twins import is_a
from lightning_parallel.compression.compressor import check_integer
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.microbatch import num_samples
from lightning_parallel.tracing.spans import count_text, percent

__all__ = ["GradientNoiseAccumulator", "GradientNoiseScale", "noise_estimates", "noise_rows"]

_MOST_POINTS = 1000


class NoisePoint(NamedTuple):
    """Figures of one rank in one step, over the gradient elements that this rank counts.

    Attributes:
        step: The optimizer step.
        small: Mean of the squared norms of the gradients of its small batches.
        big: Squared norm of the step's gradient.
        small_samples: Samples of a small batch.
        samples: Samples of the rank's replica in the step.
    """

    step: int
    small: float
    big: float
    small_samples: float
    samples: float


def noise_estimates(small: float, big: float, small_samples: float, big_samples: float) -> tuple[float, float]:
    """Return unbiased estimates of the squared norm of the true gradient, and of the trace of its covariance.

    The covariance describes the gradients of single samples.

    Args:
        small: Mean squared norm of gradients over `small_samples` samples.
        big: Squared norm of a gradient over `big_samples` samples.
        small_samples: Samples of a small batch.
        big_samples: Samples of a step; more than `small_samples`.

    Source: McCandlish et al., https://arxiv.org/abs/1812.06162, appendix A.1
    """
    square = (big_samples * big - small_samples * small) / (big_samples - small_samples)
    variance = (small - big) / (1.0 / small_samples - 1.0 / big_samples)
    return square, variance


class GradientNoiseAccumulator(Accumulator):
    """Keeps the measured steps of this rank; a report adds up all ranks.

    Args:
        mesh: The mesh of all ranks.
        rank: Rank of this process.
        decay: Decay of the exponential means of both estimates.
        latest: Returns the last shared data, by rank; empty before the first exchange.
        missing: Sentences on parts that are not measured.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        decay: float,
        latest: Callable[[], Sequence[Any]],
        missing: Sequence[str] = (),
    ) -> None:
        self._mesh = mesh
        self._rank = rank
        self._decay = decay
        self._latest = latest
        self._missing = list(missing)
        self._points: deque[NoisePoint] = deque(maxlen=_MOST_POINTS)

    def keep(self, point: NoisePoint) -> None:
        """Add a measured step; a step without finite gradients is left out."""
        # If only one rank meets infinity, the other ranks keep the step. `_steps` later drops such incomplete steps.
        if isfinite(point.small) and isfinite(point.big):
            self._points.append(point)

    @override
    def share(self) -> dict[str, Any]:
        return {"rank": self._rank, "points": list(self._points)}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        missing = list(self._missing)
        # A single rank knows only its part, so a report needs all ranks.
        steps = list(self._steps(shared)) if len(shared) == self._mesh.world_size else []
        if not steps:
            missing.append("No step was measured on all ranks.")
            return {"missing": missing}
        square = variance = weight = 0.0
        series = []
        for point in steps:
            one = noise_estimates(point.small, point.big, point.small_samples, point.samples)
            # Average both terms separately over all steps so far: the mean of their quotient would be biased.
            square = self._decay * square + (1 - self._decay) * one[0]
            variance = self._decay * variance + (1 - self._decay) * one[1]
            weight = self._decay * weight + (1 - self._decay)
            if square > 0 and variance > 0:
                series.append([point.step, variance / square])
        last = steps[-1]
        replica = last.samples / self._mesh.data_parallel
        report: dict[str, Any] = {
            "measured_steps": len(steps),
            "gradient_square": square / weight,
            "variance": variance / weight,
            "batch": last.samples,
            "batch_of_replica": replica,
            "series": {"noise_scale": series},
        }
        if not (square > 0 and variance > 0):
            missing.append("The noise could not be separated from the mean of the gradients. Measure more steps.")
            return {**report, "missing": missing}
        scale = variance / square
        report |= {
            "noise_scale": scale,
            "critical_replicas": max(1, round(scale / replica)),
            # Share of the samples that small batches would need: 1 / (1 + B / B_noise).
            "efficiency": 1.0 / (1.0 + last.samples / scale),
            "gain_of_doubling": (1.0 + scale / last.samples) / (1.0 + scale / (2 * last.samples)),
        }
        return {**report, "missing": missing} if missing else report

    def _steps(self, shared: Sequence[Mapping[str, Any]]) -> Iterator[NoisePoint]:
        """Yield the steps that all ranks have measured, with the sums over ranks that hold parts of a replica."""
        by_step: dict[int, list[tuple[int, NoisePoint]]] = {}
        for rank in shared:
            for point in rank["points"]:
                by_step.setdefault(point[0], []).append((rank["rank"], NoisePoint(*point)))
        replicas = self._mesh.data_parallel
        for step, found in sorted(by_step.items()):
            if len(found) < len(shared):
                continue
            samples = {self._mesh.coordinate(rank).data_parallel: point.samples for rank, point in found}
            # The mean over replicas weighs them alike. With unequal sample counts it is no mean over samples.
            if len(set(samples.values())) > 1:
                continue
            small, big = (sum(getattr(point, key) for _, point in found) / replicas for key in ("small", "big"))
            if sum(samples.values()) > found[0][1].small_samples:
                yield NoisePoint(step, small, big, found[0][1].small_samples, sum(samples.values()))

    @override
    def scalars(self) -> dict[str, float]:
        shared = self._latest()
        found = self.summarize(shared) if shared else {}
        return {"gradient_noise/noise_scale": found["noise_scale"]} if "noise_scale" in found else {}


# ------------------------------------------------------------------------------------------------- squares of gradients


def _square(gradient: Tensor) -> Tensor:
    # Squares in half precision overflow from 256 on, and sums over all parameters lose digits in single precision.
    wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(gradient.detach(), dtype=wide).double().square()


def _total(squares: Sequence[Tensor]) -> float:
    return float(torch.stack([one.to(squares[0].device) for one in squares]).sum()) if squares else 0.0


class _BatchGradients:
    """Squared gradients of single batches, taken before any reduction.

    Args:
        trainer: The trainer.
        module: The module; this rank holds its full parameters.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._handles: list[RemovableHandle] = []
        self._squares: list[Tensor] = []

    def begin(self) -> None:
        self._squares = []
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                # A hook of the tensor runs before autograd adds to `.grad`, and before DDP reduces the gradient.
                # `append` returns None, so the hook leaves the gradient unchanged.
                self._handles.append(parameter.register_hook(lambda gradient: self._squares.append(_square(gradient))))

    def end(self, batches: int) -> tuple[float, float, float]:
        """Return (mean square of small batches, square of the mean, small batches of this rank)."""
        self.cancel()
        # Lightning divides the loss of each batch by the number of batches, so multiply by its square.
        small = _total(self._squares) * batches**2 / batches
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None and p.requires_grad]
        return small, _total([_square(gradient) for gradient in gradients]), batches

    def cancel(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class _ReplicaGradients:
    """Squared gradients of this replica before their all-reduce, over the elements that this rank counts.

    Args:
        trainer: The trainer; its strategy shards or splits the model over a mesh.
        module: The module.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._strategy = cast(Any, trainer.strategy)
        self._module = module
        engine = self._strategy.run.engine
        # Each owner of a tied parameter has a part of its gradient. The sum exists only after the mean over replicas.
        self.left_out = frozenset() if engine is None else frozenset(engine.tied)
        self._squares: dict[str, Tensor] = {}

    def begin(self) -> None:
        self._squares = {}
        self._strategy.run.reducer.observer = self._see

    def _see(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            part = self._counted(name, gradient)
            if part is not None:
                self._squares[name] = _square(part)

    def _counted(self, name: str, gradient: Tensor) -> Tensor | None:
        if name in self.left_out:
            return None
        rank, rule = self._strategy.groups.tensor_parallel.rank, self._strategy.run.rules.get(name)
        if rule is not None:
            part: Tensor = rule.owned(gradient, rank)
            return part
        # All tensor-parallel ranks hold a replicated parameter, so only the first rank counts it.
        return gradient if rank == 0 else None

    def end(self, batches: int) -> tuple[float, float, float]:
        self.cancel()
        named = {name: value.grad for name, value in self._module.named_parameters() if value.grad is not None}
        parts = [self._counted(name, gradient) for name, gradient in named.items() if name in self._squares]
        big = [_square(part) for part in parts if part is not None]
        return _total(list(self._squares.values())), _total(big), 1

    def cancel(self) -> None:
        reducer = self._strategy.run.reducer
        if reducer is not None:
            reducer.observer = None


class GradientNoiseScale(MeasuringCallback[GradientNoiseAccumulator]):
    """Estimates the batch size and the number of replicas that are worth their cost, from the gradient noise.

    The simple noise scale is `tr(C) / |G|^2`. `G` is the true gradient. `C` is the covariance of the gradient of one
    sample. Steps with fewer samples than the noise scale are mostly noise: twice the samples save nearly half of the
    steps. Steps with more samples hardly improve.

    Both terms are estimated from the gradients of small batches and from their mean. A small batch is the batch of one
    replica, or one accumulated batch. The callback sends no extra messages. The noise scale grows during training, so
    look at the end, too.

    `GradientNoiseScale` works under DDP, on one process with `accumulate_grad_batches`, and under the mesh strategies
    with replicas. Some strategies are not supported. FSDP and DeepSpeed do not keep the gradient of a replica.
    Compression and local steps do not compute the exact mean. There, measure a plain run: the noise depends only on the
    model and the data.

    `report()` returns the common keys and these:

    | key | meaning, unit |
    |---|---|
    | `noise_scale` | noise scale, samples |
    | `critical_replicas` | the noise scale in replicas of the present size |
    | `efficiency` | samples that training with small batches would need / samples that it needs now |
    | `gain_of_doubling` | factor by which twice the replicas reduce the number of steps |
    | `gradient_square`, `variance` | estimates of the squared norm of `G`, and of `tr(C)` |
    | `batch`, `batch_of_replica` | samples of a step, and of a small batch |
    | `measured_steps` | number of measured steps |
    | `series` | `{noise_scale: [[step, value]]}` |
    | `missing` | sentences that say which figures are missing, and why |

    With `noise_scale` samples in a step, training needs twice the minimum of samples and twice the minimum of steps.

    Logged: `gradient_noise/noise_scale`, as of the last exchange.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import GradientNoiseScale

        trainer = Trainer(accumulate_grad_batches=4, callbacks=[GradientNoiseScale()])
        trainer.fit(MyModule(), MyData())  # prints the batch size that is worth it
        ```

    Args:
        every_n_steps: Number of optimizer steps between two measurements.
        decay: Decay of the exponential means of both estimates, per measured step.
        samples: Function that returns the number of samples in a batch. The default returns the length of its tensors.
        dirpath: Folder where rank 0 writes `<name>.json` and `<name>.csv` after training. None writes nothing.
        show_table: Print a table after training, on rank 0.

    Raises:
        ValueError: If an argument is out of range. Also at the start of `fit`, on every rank, if the noise scale cannot
            be measured.

    Source: McCandlish et al., https://arxiv.org/abs/1812.06162
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        decay: float = 0.95,
        samples: Optional[Callable[[Any], int]] = None,
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        super().__init__(dirpath=dirpath, show_table=show_table)
        check_integer("every_n_steps", every_n_steps, least=1)
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"`decay` must be from 0 to below 1; got {decay}")
        self.every_n_steps = every_n_steps
        self.decay = decay
        self.samples = samples or num_samples
        self._gradients: _BatchGradients | _ReplicaGradients | None = None
        self._sizes: list[int] = []
        self._is_measuring = False
        self._begins = True
        self._seen_step = -1

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> GradientNoiseAccumulator:
        _check_measurable(trainer, pl_module)
        groups = getattr(trainer.strategy, "groups", None)
        missing = []
        if groups is not None and groups.replica.size > 1:
            self._gradients = _ReplicaGradients(trainer, pl_module)
            if self._gradients.left_out:
                missing.append("Parameters that several stages share were left out.")
        else:
            self._gradients = _BatchGradients(trainer, pl_module)
        self._is_measuring = False
        self._begins = True
        self._seen_step = -1
        session = self.open_session

        def latest() -> list[Any]:
            position = session.members.index(self.accumulator)
            return [values[position] for values in session.latest if len(values) > position]

        return GradientNoiseAccumulator(session.mesh, session.rank, self.decay, latest, missing)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self._begins and step % self.every_n_steps == 0 and step != self._seen_step:
            assert self._gradients is not None
            self._sizes, self._is_measuring, self._seen_step = [], True, step
            self._gradients.begin()
        self._begins = False
        if self._is_measuring:
            self._sizes.append(self.samples(batch))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._begins = True
        if not self._is_measuring:
            return
        assert self._gradients is not None
        batches, self._is_measuring = len(self._sizes), False
        small, big, parts = self._gradients.end(batches)
        # The end of an epoch accumulates fewer batches, but Lightning divides the loss by the full number.
        if batches != trainer.accumulate_grad_batches or len(set(self._sizes)) > 1:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())  # the gradients of the step are unscaled by now
        total = float(sum(self._sizes))
        # The small batches still had the loss scale, and their squares have its square.
        self.accumulator.keep(NoisePoint(trainer.global_step, small / scale**2, big, total / parts, total))

    @override
    def _leave(self) -> None:
        if self._gradients is not None:
            self._gradients.cancel()
            self._gradients = None
        super()._leave()

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        if "noise_scale" not in report:
            return None
        table = Table(title="Gradient noise", box=box.SIMPLE_HEAD, show_header=False)
        for words, value in noise_rows(report):
            table.add_row(words, value)
        return table

    @override
    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"step": step, "noise_scale": value} for step, value in report.get("series", {}).get("noise_scale", ())]


def noise_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Format the figures of a report as rows of a table; no rows without a noise scale."""
    if "noise_scale" not in report:
        return []
    replicas = report["critical_replicas"]
    return [
        ["noise scale", f"{count_text(report['noise_scale'])} samples"],
        ["batch of this run", f"{count_text(report['batch'])} samples"],
        ["largest useful batch", f"{replicas} of {count_text(report['batch_of_replica'])} samples each"],
        ["steps saved by twice as many replicas", percent(1.0 - 1.0 / report["gain_of_doubling"])],
        ["samples used as well as in small batches", percent(report["efficiency"])],
    ]


def _check_measurable(trainer: Trainer, module: LightningModule) -> None:
    strategy: Any = trainer.strategy
    groups = getattr(strategy, "groups", None)
    replicas = trainer.world_size if groups is None else groups.data_parallel.size
    reason = ""
    if any(is_a(strategy, kind) for kind in (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)):
        reason = f"`{type(strategy).__name__}` reduces gradients in pieces, so no rank holds the gradients of a replica"
    elif getattr(strategy, "steps_between_reductions", 1) > 1:
        reason = "replicas with local steps do not average their gradients"
    elif getattr(strategy, "compression", None) is not None and replicas > 1:
        reason = "compressed gradients are not the mean of the gradients of the replicas"
    elif getattr(strategy, "zero_stage", 0) >= 2 and replicas > 1:
        reason = f"with `zero_stage={strategy.zero_stage}` no rank holds the full mean of the gradients"
    elif groups is not None and groups.context_parallel.size > 1:
        reason = "each rank of the context axis has a part of its replica's gradients"
    elif not module.automatic_optimization:
        reason = "with manual optimization, it is not known which gradients belong to a step"
    elif groups is not None and groups.replica.size > 1 and replicas == 1:
        reason = "there is one replica, and its ranks hold gradients of the full step only"
    elif replicas == 1 and trainer.accumulate_grad_batches == 1:
        reason = "there is one replica, and no batches are accumulated, so there are no gradients to compare"
    if reason:
        raise ValueError(
            f"`GradientNoiseScale` cannot measure this run: {reason}. The noise depends only on the model and its"
            " data. Measure some steps under DDP, or on one process with `accumulate_grad_batches=2` or more"
        )
