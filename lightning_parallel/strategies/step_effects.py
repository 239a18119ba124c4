"""What the steps of one batch leave besides their results: calls of `self.log`, and attributes that they change.

They are recorded for each microbatch on the last stage, merged into those of one step, and repeated on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.compat import ParallelState, patched
from lightning_parallel.compat.lightning import (
    batch_value_of,
    metric_state_of,
    restore_metric_state,
    set_batch_value,
    states_of,
)
from lightning_parallel.compat.torch import pytree, version_of
from lightning_parallel.pipeline.microbatch import merge_entries, merge_outputs, reduce_logged
from lightning_parallel.pipeline.placeholder import PlaceholderTensor, in_dry_run, missing, require_known

__all__ = ["LogCall", "StepEffects", "log_recorded", "side_effects_discarded", "to_device"]

_LOG = inspect.signature(LightningModule.log)
LogCall = tuple[str, Any, dict[str, Any]]
"""Name, value, other arguments of a call of `self.log`; a metric is the path of its module."""


class StepEffects:
    """Records what the steps of one batch log and remember on this rank.

    Args:
        module: The user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.logged: list[list[LogCall]] = []
        self._before = _snapshots(module)
        self._attributes = dict(vars(module))
        self._rules = ParallelState.of(module).attributes
        self._values: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one microbatch inside the block: calls of `self.log` count if the step runs to its end."""
        calls: list[LogCall] = []
        before = self._ruled_values()
        with log_recorded(self.module, calls):
            yield
        self.logged.append(calls)
        self._values.append((before, self._ruled_values()))

    def _ruled_values(self) -> dict[str, Any]:
        """Return the attributes for which the proof has found how microbatches give the value of one step."""
        values = {name: vars(self.module)[name] for name in self._rules if name in vars(self.module)}
        return pytree.tree_map_only(Tensor, lambda value: value.detach().clone(), values)

    def merged(self, samples: Sequence[int], weights: Sequence[float]) -> tuple[list[LogCall], dict[str, Any]]:
        """Return calls of `self.log`, and attributes, as one step on the whole batch would have left them."""
        for name, value, _ in (call for calls in self.logged for call in calls):
            require_known(value, f"`self.log({name!r}, ...)`")
        attributes = _changed_attributes(self.module, self._before, samples, weights)
        for name, value in attributes.items():
            require_known(value, f"`self.{name}`")
        # Refused where it is used after the step: most such attributes are read inside of it only.
        for name, value in vars(self.module).items():
            if missing(value) and value is not self._attributes.get(name):
                shape, dtype = value.signature
                attributes[name] = _Elsewhere(shape, dtype, value.provenance)
        for name in attributes.keys() & self._rules.keys():
            attributes[name] = self._by_rule(name, weights)
        known = ParallelState.of(self.module).logged
        return _merge_calls(self.logged, samples, weights, known), attributes

    def _by_rule(self, name: str, weights: Sequence[float]) -> Any:
        """Return what one step on the whole batch would leave in an attribute, by the mean over microbatches.

        A value that is set is the mean of those that are set; one that is counted up goes up by the mean.
        """
        pairs = [(before.get(name, 0), after[name]) for before, after in self._values]
        if self._rules[name] == "mean":
            result = sum(weight * after for weight, (_, after) in zip(weights, pairs))
        else:
            changes = sum(weight * (after - before) for weight, (before, after) in zip(weights, pairs))
            result = pairs[0][0] + changes
        if isinstance(result, Tensor):
            return result.detach().cpu()
        return round(result) if isinstance(pairs[-1][1], int) else result

    def repeat(self, calls: Sequence[LogCall], attributes: Mapping[str, Any], device: torch.device) -> None:
        """Log and remember on this rank what the last stage logged and remembered."""
        for name, value in attributes.items():
            if isinstance(value, _Elsewhere):
                meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
                value = PlaceholderTensor(meta, device, value.provenance)
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
        elif in_dry_run():
            # In a real step the last stage refuses it when all are there to hear of it: see `StepEffects.merged`.
            require_known(value, f"`self.log({name!r}, ...)`")
        elif isinstance(value, Tensor):
            # What is logged is kept until the batch ends, and must not keep a microbatch's graph alive.
            value = value.detach()
        calls.append((name, value, dict(bound)))

    with patched(module, "log", log):
        yield


def _merge_calls(
    logged: Sequence[Sequence[LogCall]],
    samples: Sequence[int],
    weights: Sequence[float],
    known: Mapping[str, tuple[bool, bool]],
) -> list[LogCall]:
    by_name: dict[str, list[tuple[int, float, Any, dict[str, Any]]]] = {}
    for calls, count, weight in zip(logged, samples, weights):
        for name, value, arguments in calls:
            by_name.setdefault(name, []).append((count, weight, value, arguments))
    return [_merge_call(name, entries, known.get(name, (False, False))) for name, entries in by_name.items()]


def _merge_call(name: str, entries: list[tuple[int, float, Any, dict[str, Any]]], known: tuple[bool, bool]) -> LogCall:
    is_by_samples, is_constant = known
    values = [value for _, _, value, _ in entries]
    arguments = dict(entries[-1][3])
    if arguments.get("batch_size") is not None and not is_constant:
        # Lightning weights the batches of an epoch by these sizes, so they are the weights inside a batch, too.
        sizes = [float(entry["batch_size"]) for *_, entry in entries]
        arguments["batch_size"] = sum(entry["batch_size"] for *_, entry in entries)
    else:
        sizes = [float(count) if is_by_samples else weight for count, weight, _, _ in entries]
    if isinstance(values[0], _MetricAt):
        caches = [value.cache for value in values if value.cache is not None]
        shares = [size / sum(sizes) for size in sizes]
        return name, _MetricAt(values[0].path, merge_outputs(caches, (), shares) if caches else None), arguments
    numbers = torch.stack([torch.as_tensor(value).detach().cpu() for value in values])
    return name, reduce_logged(numbers, sizes, arguments.get("reduce_fx", "mean")), arguments


# --------------------------------------------------------------------------------------------------------- attributes


class _Snapshot(NamedTuple):
    """An attribute before the steps, and what tells whether it was changed in place: see `_version`."""

    value: Any
    version: Any


class _Elsewhere(NamedTuple):
    """An attribute that the last stage does not know; on other ranks it is that of one microbatch."""

    shape: torch.Size
    dtype: torch.dtype
    provenance: str


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
            changed[name] = value[: len(kept)] + merge_entries(value[len(kept) :], samples, weights)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), changed)


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


def _copied(state: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return state.clone() if isinstance(state, Tensor) else list(state)
