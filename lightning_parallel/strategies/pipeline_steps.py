"""Run the user's steps on microbatches as if they ran once on the whole batch.

training_step(batch)
|  split -> each stage runs the user's `training_step` on each microbatch, forward and backward (engine)
|  what it returned, logged and remembered on the last stage is merged, and repeated on every rank
|  gradients are taken away: Lightning sets them to zero next
backward(loss)
the gradients come back, and are reduced over the replicas
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat.lightning import (
    batch_value_of,
    metric_state_of,
    restore_metric_state,
    set_batch_value,
    set_update_count,
    states_of,
    update_count_of,
)
from lightning_parallel.compat.torch import pytree, version_of
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.microbatch import StepResult, merge_outputs, num_samples
from lightning_parallel.pipeline.placeholder import PlaceholderTensor
from lightning_parallel.pipeline.runtime import loss_of
from lightning_parallel.pipeline.stage import StageExit
from lightning_parallel.strategies.checks import STEPS, first_batch, positional_arguments
from lightning_parallel.strategies.setup import PipelineOptions
from lightning_parallel.tensor.verify import StepAudit

__all__ = [
    "LogCall",
    "PipelineSteps",
    "StepEffects",
    "log_recorded",
    "share_metrics",
    "side_effects_discarded",
    "to_device",
]

_LOG = inspect.signature(LightningModule.log)
LogCall = tuple[str, Any, dict[str, Any]]
"""Name, value, other arguments of a call of `self.log`; a metric is the path of its module."""


class PipelineSteps:
    """The steps of a module that is run in stages.

    Args:
        module: The user's module.
        options: The strategy's arguments.
        precision: Gives the context that Lightning runs each step in.
        device: Where this rank computes.
    """

    def __init__(
        self, module: LightningModule, options: PipelineOptions, precision: Precision, device: torch.device
    ) -> None:
        self.module = module
        self.options = options
        self.precision = precision
        self.device = device
        self._engine: PipelineEngine | None = None
        self._positional: dict[str, int] = {}
        self._step_gradients: dict[nn.Parameter, Tensor | None] = {}
        self._gradients_are_watched = False
        self._is_running = False

    @property
    def engine(self) -> PipelineEngine:
        """The pipeline.

        Raises:
            RuntimeError: Before `bind`.
        """
        if self._engine is None:
            raise RuntimeError("the module has not been cut into stages yet")
        return self._engine

    def bind(self, engine: PipelineEngine, patches: Patches) -> None:
        """Run steps through `engine` from now on; metrics give their value on every rank until `patches` are undone."""
        self._engine = engine
        self._gradients_are_watched = self._hooks_see_gradients()
        share_metrics(self.module, engine.group, engine.last_rank, lambda: self._is_running, patches)

    def example(self, trainer: Trainer) -> tuple[Callable[[Any], Any], Any] | None:
        """Return the step of the run that begins, and its first batch; None if that can be read only once."""
        batch = first_batch(trainer)
        if batch is None or trainer.state.fn is None:
            return None
        step = self._step(STEPS[trainer.state.fn], (0,), {})
        if not trainer.training:
            return step, batch

        # A step that returns no loss is refused before anything is cut, not at the first batch on the last stage only.
        def with_loss(microbatch: Any) -> Any:
            output = step(microbatch)
            loss_of(output)
            return output

        return with_loss, batch

    def training_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], audit: StepAudit | None) -> Any:
        """Run forward and backward of a batch; its gradients are kept for `deliver_gradients`.

        Args:
            args, kwargs: Of the module's `training_step`.
            audit: Watches the step, on the first batch of a run with divided layers.
        """
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        # Of the step before: in one process they are set to zero after `training_step`, which would need memory twice.
        held = {parameter: parameter.grad for parameter in parameters} if self._gradients_are_needed() else {}
        for parameter in parameters:
            parameter.grad = None
        output = self._run("training_step", args, kwargs, audit)
        self._step_gradients = {parameter: parameter.grad for parameter in parameters}
        for parameter in parameters:
            parameter.grad = held.get(parameter)
        return output

    def _gradients_are_needed(self) -> bool:
        """Tell whether anybody sees the gradients of earlier batches after `training_step`."""
        trainer = self.module.trainer
        is_accumulating = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches > 0
        return is_accumulating or self._gradients_are_watched

    def _hooks_see_gradients(self) -> bool:
        """Tell whether a hook of the user runs while gradients of the step before are still there in one process."""
        trainer = self.module.trainer
        hooks = [callback for callback in trainer.callbacks if isinstance(callback, Callback)]  # type: ignore[attr-defined]
        return (
            is_overridden("optimizer_zero_grad", self.module)
            or is_overridden("on_before_zero_grad", self.module)
            or any(is_overridden("on_before_zero_grad", callback, parent=Callback) for callback in hooks)
        )

    def deliver_gradients(self, reducer: GradientReducer) -> None:
        """Add the gradients of the last step to `.grad`, and tell the reducer of the replicas that they are there."""
        # Not those without a gradient: marked, they would be reduced as zeros, which weight decay does not ignore.
        fresh = {parameter: gradient for parameter, gradient in self._step_gradients.items() if gradient is not None}
        self._step_gradients = {}
        for parameter, gradient in fresh.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        reducer.mark(fresh)

    def restore_gradients(self) -> None:
        """Put the gradients of the last step into `.grad`, alone."""
        for parameter, gradient in self._step_gradients.items():
            parameter.grad = gradient
        self._step_gradients = {}

    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `validation_step`, `test_step` or `predict_step`."""
        return self._run(name, args, kwargs, None)

    def _step(self, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
        """Return the module's own step, for one microbatch."""
        method = getattr(self.module, name)
        context = {
            "training_step": self.precision.train_step_context,
            "validation_step": self.precision.val_step_context,
            "test_step": self.precision.test_step_context,
            "predict_step": self.precision.predict_step_context,
        }[name]
        if name not in self._positional:
            self._positional[name] = positional_arguments(method)
        # `example` passes a batch index, which the step need not take.
        rest = rest[: self._positional[name] - 1]

        def step(microbatch: Any) -> Any:
            with context():
                return method(microbatch, *rest, **kwargs)

        return step

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], audit: StepAudit | None) -> Any:
        """Run a step on the microbatches of a batch; its result and its effects are those on the whole batch."""
        batch, *rest = args
        effects = StepEffects(self.module)
        step = _StageStep(self._step(name, tuple(rest), kwargs), effects, audit)
        # Metrics that are computed inside the step must not wait for stages that are not there yet.
        self._is_running = True
        try:
            if name == "training_step":
                # Tied gradients are summed in `backward`, after their means over the replicas.
                result = self.engine.forward_backward(step, batch, scale=self.gradient_scale(), synchronize=False)
            else:
                result = self.engine.forward(step, batch)
        finally:
            self._is_running = False
        return self._shared(name, result, effects)

    def _shared(self, name: str, result: StepResult, effects: StepEffects) -> Any:
        """Bring what the last stage found to every rank of the pipeline."""

        def found() -> tuple[Any, Any, Any]:
            samples = [_samples(microbatch) for microbatch in result.microbatches]
            output: Any = merge_outputs(result.outputs, samples, result.weights)
            if name == "training_step":
                output = {**output, "loss": result.loss} if isinstance(output, Mapping) else result.loss
            return (to_device(output, torch.device("cpu")), *effects.merged(samples, result.weights))

        # On the CPU, since objects are pickled; a tensor of another rank's device would be created there.
        output, calls, attributes = comm.broadcast_from(found, self.engine.group, self.engine.last_rank)
        effects.repeat(calls, attributes, self.device)
        return to_device(output, self.device)

    def gradient_scale(self) -> float | Tensor:
        """Return what gradients are multiplied by: the share of a batch in an accumulated one, and the loss scale."""
        # Lightning divides the loss in its closure, after `training_step`, when the gradients are there already.
        share = 1.0 / self.module.trainer.accumulate_grad_batches
        scaler = getattr(self.precision, "scaler", None)
        return share if scaler is None else scaler.scale(torch.full((), share, device=self.device))


@dataclass
class _StageStep:
    """The module's step for one microbatch on this stage."""

    step: Callable[[Any], Any]
    effects: StepEffects
    audit: StepAudit | None

    def __call__(self, microbatch: Any) -> Any:
        with self.effects.step():
            if self.audit is None:
                return self.step(microbatch)
            with self.audit.watch():
                return self._audited(microbatch, self.audit)

    def _audited(self, microbatch: Any, audit: StepAudit) -> Any:
        try:
            output = self.step(microbatch)
        # So a step ends on all stages but the last: with what it has to send.
        except StageExit as exit_:
            self._check(audit, exit_.end.leaves, "what this stage sends")
            raise
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self._check(audit, [loss], "the loss")
        return output

    @staticmethod
    def _check(audit: StepAudit, values: Sequence[Any], name: str) -> None:
        for value in values:
            # Placeholders stand for what other stages hold: there are no data to check.
            if isinstance(value, Tensor) and not isinstance(value, PlaceholderTensor):
                audit.check_output(value, name)


def _samples(microbatch: Any) -> int:
    try:
        return num_samples(microbatch)
    except ValueError:  # a batch that only the user's `split_batch` understands
        return -1


class StepEffects:
    """Records what the steps of one batch log and remember on this rank.

    Args:
        module: The user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.logged: list[list[LogCall]] = []
        self._before = _snapshots(module)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one microbatch inside the block: calls of `self.log` count if the step runs to its end."""
        calls: list[LogCall] = []
        with log_recorded(self.module, calls):
            yield
        self.logged.append(calls)

    def merged(self, samples: Sequence[int], weights: Sequence[float]) -> tuple[list[LogCall], dict[str, Any]]:
        """Return calls of `self.log`, and attributes, as one step on the whole batch would have left them."""
        return _merge_calls(self.logged, weights), _changed_attributes(self.module, self._before, samples, weights)

    def repeat(self, calls: Sequence[LogCall], attributes: Mapping[str, Any], device: torch.device) -> None:
        """Log and remember on this rank what the last stage logged and remembered."""
        for name, value in attributes.items():
            self.module.__dict__[name] = to_device(value, device)
        for name, value, arguments in calls:
            if isinstance(value, _MetricAt):
                metric = self.module.get_submodule(value.path)
                assert isinstance(metric, Metric)
                set_batch_value(metric, to_device(value.cache, device))
                value = metric
            self.module.log(name, to_device(value, device), **arguments)


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with all its tensors on `device`."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


# ------------------------------------------------------------------------------------------------------------ logging


class _MetricAt:
    """A torchmetrics object in a call of `self.log`, with its value for the batch."""

    def __init__(self, path: str, cache: Any) -> None:
        self.path = path
        self.cache = cache


@contextmanager
def log_recorded(module: LightningModule, calls: list[LogCall]) -> Iterator[None]:
    """Add the calls of `self.log` inside the block to `calls` instead."""

    def log(*args: Any, **kwargs: Any) -> None:
        bound = _LOG.bind(module, *args, **kwargs).arguments
        bound.pop("self")
        name = bound.pop("name")
        value = bound.pop("value")
        if isinstance(value, Metric):
            # By its path: every rank has another object for it.
            path = next((path for path, child in module.named_modules() if child is value), None)
            if path is None:
                raise ValueError(f"the metric logged as {name!r} is not an attribute of the module; make it one")
            value = _MetricAt(path, batch_value_of(value))
        elif isinstance(value, Tensor):
            # What is logged is kept until the batch ends, and must not keep a microbatch's graph alive.
            value = value.detach()
        calls.append((name, value, dict(bound)))

    with patched(module, "log", log):
        yield


def _merge_calls(logged: Sequence[Sequence[LogCall]], weights: Sequence[float]) -> list[LogCall]:
    by_name: dict[str, list[tuple[float, Any, dict[str, Any]]]] = {}
    for calls, weight in zip(logged, weights):
        for name, value, arguments in calls:
            by_name.setdefault(name, []).append((weight, value, arguments))
    return [_merge_call(name, entries) for name, entries in by_name.items()]


def _merge_call(name: str, entries: list[tuple[float, Any, dict[str, Any]]]) -> LogCall:
    values = [value for _, value, _ in entries]
    arguments = dict(entries[-1][2])
    if arguments.get("batch_size") is not None:
        # Lightning weights the batches of an epoch by these sizes, so they are the weights inside a batch, too.
        sizes = [float(entry["batch_size"]) for _, _, entry in entries]
        arguments["batch_size"] = sum(entry["batch_size"] for _, _, entry in entries)
    else:
        sizes = [weight for weight, _, _ in entries]
    if isinstance(values[0], _MetricAt):
        caches = [value.cache for value in values if value.cache is not None]
        shares = [size / sum(sizes) for size in sizes]
        return name, _MetricAt(values[0].path, merge_outputs(caches, (), shares) if caches else None), arguments
    numbers = torch.stack([torch.as_tensor(value).detach().cpu() for value in values])
    return name, _reduced(numbers, sizes, arguments.get("reduce_fx", "mean")), arguments


def _reduced(values: Tensor, sizes: Sequence[float], reduce_fx: str | Callable[[Any], Any]) -> Tensor:
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if kind in ("mean", "avg"):
        values = values if values.is_floating_point() else values.float()
        shares = torch.tensor(sizes, dtype=values.dtype) / sum(sizes)
        return torch.tensordot(shares, values, 1)
    if kind in ("sum", "max", "min"):
        return getattr(torch, kind if kind == "sum" else f"a{kind}")(values, 0)
    assert callable(reduce_fx)
    return reduce_fx(values)


# --------------------------------------------------------------------------------------------------------- attributes


class _Snapshot(NamedTuple):
    """An attribute before the steps, and what tells whether it was changed in place: see `_version`."""

    value: Any
    version: Any


def _followed_attributes(module: LightningModule) -> dict[str, Any]:
    """Return the attributes in which a module keeps what its steps found: numbers, tensors, and lists of them."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if not (name.startswith("_") or isinstance(value, PlaceholderTensor))
        and isinstance(value, (bool, int, float, str, Tensor, list, type(None)))
    }


def _snapshots(module: LightningModule) -> dict[str, _Snapshot]:
    return {name: _Snapshot(value, _version(value)) for name, value in _followed_attributes(module).items()}


def _version(value: Any) -> Any:
    """Return what a change in place changes: the version of a tensor, the length of a list."""
    if isinstance(value, Tensor):
        # Inference tensors count no versions; to ask for one is an error.
        return None if value.is_inference() else version_of(value)
    return len(value) if isinstance(value, list) else value


def _changed_attributes(
    module: LightningModule, before: Mapping[str, _Snapshot], samples: Sequence[int], weights: Sequence[float]
) -> dict[str, Any]:
    """Return the attributes that the steps have changed, with the entries they added to lists merged."""
    changed = {}
    for name, value in _followed_attributes(module).items():
        old, version = before.get(name, (None, None))
        if name in before and value is old and _version(value) == version:
            continue
        changed[name] = value
        kept = old[:version] if isinstance(old, list) else []
        # A list whose old entries were exchanged is no record of steps: it stays as it is.
        if isinstance(value, list) and all(new is known for new, known in zip(value, kept)):
            changed[name] = value[: len(kept)] + _merged_entries(value[len(kept) :], samples, weights)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), changed)


def _merged_entries(added: list[Any], samples: Sequence[int], weights: Sequence[float]) -> list[Any]:
    """Return the entries that one step adds: one per sample, or as many as each microbatch added."""
    is_per_sample = len(added) == sum(samples) and not _is_per_step(added, samples)
    count, rest = divmod(len(added), len(samples))
    if is_per_sample or rest:
        return added
    return [merge_outputs(added[entry::count], samples, weights) for entry in range(count)]


def _is_per_step(added: list[Any], samples: Sequence[int]) -> bool:
    """Return whether entries, as many as the samples, are still those of steps: figures, or tensors of samples."""
    if any(isinstance(entry, Tensor) and entry.dim() > 0 and entry.shape[0] in samples for entry in added):
        return True
    return max(samples) == 1 and all(isinstance(entry, (float, Tensor)) for entry in added)


@contextmanager
def side_effects_discarded(module: LightningModule) -> Iterator[None]:
    """Drop what steps log, remember and count inside the block."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    saved = [metric_state_of(metric) for metric in metrics]
    # Copies, since updates change tensors and lists of a metric in place.
    states = [{name: _copied(state) for name, state in states_of(metric).items()} for metric in metrics]
    before = _snapshots(module)
    try:
        with log_recorded(module, []):
            yield
    finally:
        for metric, own, state in zip(metrics, saved, states):
            for name, value in state.items():
                setattr(metric, name, value)
            restore_metric_state(metric, own)
        for name in _followed_attributes(module).keys() - before.keys():
            del module.__dict__[name]
        for name, (value, version) in before.items():
            if isinstance(value, list):
                del value[version:]
            module.__dict__[name] = value


# ------------------------------------------------------------------------------------------------------------ metrics


def share_metrics(
    module: nn.Module, group: Group, source: int, is_running: Callable[[], bool], patches: Patches
) -> None:
    """Let torchmetrics objects, which are updated on the last stage, give their value on every rank.

    Args:
        module: The user's module.
        group: The pipeline group.
        source: Position of the last stage's rank.
        is_running: Tells whether a step is running, in which only the last stage may ask for a value.
        patches: Undo it.
    """
    for metric in module.modules():
        if isinstance(metric, Metric):
            patches.replace(metric, "compute", _shared_compute(metric, metric.compute, group, source, is_running))


def _shared_compute(
    metric: Metric, compute: Callable[..., Any], group: Group, source: int, is_running: Callable[[], bool]
) -> Callable[..., Any]:
    def shared(*args: Any, **kwargs: Any) -> Any:
        if not is_running():
            mine = (update_count_of(metric), to_device(states_of(metric), torch.device("cpu")))
            # A collective: Lightning computes what is logged on every rank, in the same order.
            count, states = comm.broadcast_object(mine, group, source)
            if group.rank != source:
                for name, state in states.items():
                    setattr(metric, name, to_device(state, metric.device))
                set_update_count(metric, count)
        return compute(*args, **kwargs)

    return shared


def _copied(state: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return state.clone() if isinstance(state, Tensor) else list(state)
