"""What a LightningModule does in a step besides computing: it logs, counts in metrics, and remembers values.

The step runs once per microbatch, and to its end on the last stage only. What it did there is merged to what it would
have done for the whole batch, and repeated on every rank of the pipeline.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.pipeline.microbatch import merge_outputs
from lightning_parallel.pipeline.placeholder import PlaceholderTensor

__all__ = ["StepEffects", "to_device", "share_metrics", "side_effects_discarded"]

_LOG = inspect.signature(LightningModule.log)
Call = tuple[str, Any, dict[str, Any]]
"""Name, value, other arguments of a call of `self.log`; a metric is the path of its module."""


class StepEffects:
    """What the steps of one batch log and remember on this rank.

    Args:
        module: The user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.logged: list[list[Call]] = []
        self._before = _remembered(module)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one microbatch: calls of `self.log` count if the step runs to its end."""
        calls: list[Call] = []
        with _recording(self.module, calls):
            yield
        self.logged.append(calls)

    def merged(self, samples: Sequence[int], weights: Sequence[float]) -> tuple[list[Call], dict[str, Any]]:
        """Calls of `self.log`, and attributes, as one step on the whole batch would have left them."""
        return _merge_calls(self.logged, weights), _changes(self.module, self._before, samples, weights)

    def repeat(self, calls: Sequence[Call], attributes: Mapping[str, Any], device: torch.device) -> None:
        """Log and remember on this rank what the last stage did."""
        for name, value in attributes.items():
            self.module.__dict__[name] = to_device(value, device)
        for name, value, arguments in calls:
            if isinstance(value, _MetricAt):
                metric = self.module.get_submodule(value.path)
                metric._forward_cache = to_device(value.cache, device)
                value = metric
            self.module.log(name, to_device(value, device), **arguments)


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with all its tensors on `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


# ------------------------------------------------------------------------------------------------------------ logging


class _MetricAt:
    """A torchmetrics object in a call of `self.log`, with its value for the batch."""

    def __init__(self, path: str, cache: Any) -> None:
        self.path, self.cache = path, cache


@contextmanager
def _recording(module: LightningModule, calls: list[Call]) -> Iterator[None]:
    def log(*args: Any, **kwargs: Any) -> None:
        bound = _LOG.bind(module, *args, **kwargs).arguments
        name, value = bound.pop("name"), bound.pop("value")
        bound.pop("self")
        if isinstance(value, Metric):
            path = next((path for path, child in module.named_modules() if child is value), None)
            if path is None:
                raise ValueError(f"the metric logged as {name!r} is not an attribute of the module; make it one")
            value = _MetricAt(path, value._forward_cache)
        elif isinstance(value, Tensor):
            value = value.detach()
        calls.append((name, value, dict(bound)))

    module.__dict__["log"] = log
    try:
        yield
    finally:
        del module.__dict__["log"]


def _merge_calls(logged: Sequence[Sequence[Call]], weights: Sequence[float]) -> list[Call]:
    by_name: dict[str, list[tuple[float, Any, dict[str, Any]]]] = {}
    for calls, weight in zip(logged, weights):
        for name, value, arguments in calls:
            by_name.setdefault(name, []).append((weight, value, arguments))
    return [_merge_call(name, entries) for name, entries in by_name.items()]


def _merge_call(name: str, entries: list[tuple[float, Any, dict[str, Any]]]) -> Call:
    values, arguments = [value for _, value, _ in entries], dict(entries[-1][2])
    if arguments.get("batch_size") is not None:
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
        return getattr(torch, "a" + kind if kind != "sum" else kind)(values, 0)
    assert callable(reduce_fx)
    return reduce_fx(values)


# --------------------------------------------------------------------------------------------------------- attributes


def _plain(module: LightningModule) -> dict[str, Any]:
    """The attributes in which a module keeps what its steps found: numbers, tensors, and lists of them."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if not (name.startswith("_") or isinstance(value, PlaceholderTensor))
        and isinstance(value, (bool, int, float, str, Tensor, list, type(None)))
    }


def _remembered(module: LightningModule) -> dict[str, tuple[Any, Any]]:
    """Each attribute with what tells whether it changed: the version of a tensor, the length of a list."""
    return {name: (value, _version(value)) for name, value in _plain(module).items()}


def _version(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    return len(value) if isinstance(value, list) else value


def _changes(
    module: LightningModule, before: Mapping[str, tuple[Any, Any]], samples: Sequence[int], weights: Sequence[float]
) -> dict[str, Any]:
    changed = {}
    for name, value in _plain(module).items():
        old, version = before.get(name, (None, None))
        if name in before and value is old and _version(value) == version:
            continue
        start = version if isinstance(old, list) else 0
        if isinstance(value, list) and all(new is known for new, known in zip(value, (old or [])[:start])):
            changed[name] = value[:start] + _merged_entries(value[start:], samples, weights)
        else:
            changed[name] = value
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), changed)


def _merged_entries(added: list[Any], samples: Sequence[int], weights: Sequence[float]) -> list[Any]:
    """The entries that one step adds: one per sample, or as many as each microbatch added."""
    if len(added) == sum(samples) and not _per_step(added, samples):
        return added
    count = len(added) // len(samples)
    if count * len(samples) != len(added):
        return added
    return [merge_outputs(added[entry::count], samples, weights) for entry in range(count)]


def _per_step(added: list[Any], samples: Sequence[int]) -> bool:
    """Whether entries that are as many as the samples are still the whole step's: figures, or tensors of samples."""
    if any(isinstance(entry, Tensor) and entry.dim() > 0 and entry.shape[0] in samples for entry in added):
        return True
    return max(samples) == 1 and all(isinstance(entry, (float, Tensor)) for entry in added)


@contextmanager
def side_effects_discarded(module: LightningModule) -> Iterator[None]:
    """Run steps for a look at them only: what they log is lost, what they remember and count is forgotten."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    counts = [(metric._update_count, metric._computed, metric._forward_cache) for metric in metrics]
    states = [{name: _copied(state) for name, state in _states(metric).items()} for metric in metrics]
    before = _remembered(module)
    try:
        with _recording(module, []):
            yield
    finally:
        for metric, count, state in zip(metrics, counts, states):
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed, metric._forward_cache = count
        for name in _plain(module).keys() - before.keys():
            del module.__dict__[name]
        for name, (value, version) in before.items():
            if isinstance(value, list):
                del value[version:]
            module.__dict__[name] = value


# ------------------------------------------------------------------------------------------------------------ metrics


def share_metrics(module: nn.Module, group: Group, source: int, alone: Callable[[], bool]) -> None:
    """Let torchmetrics objects, which are updated on the last stage, give their value on every rank.

    Args:
        module: The user's module.
        group: The pipeline group.
        source: Position of the last stage's rank.
        alone: Whether a step is running, in which only the last stage may ask for a value.
    """
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.__dict__.setdefault("_computes_alone", metric.compute)
            metric.compute = _shared_compute(metric, group, source, alone)  # type: ignore[method-assign]


def _shared_compute(metric: Metric, group: Group, source: int, alone: Callable[[], bool]) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        if not alone():
            mine = (metric._update_count, to_device(_states(metric), torch.device("cpu")))
            count, states = comm.broadcast_object(mine, group, source)
            if group.rank != source:
                for name, state in states.items():
                    setattr(metric, name, to_device(state, metric.device))
                metric._update_count, metric._computed = count, None
        return metric.__dict__["_computes_alone"](*args, **kwargs)

    return compute


def _copied(state: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return state.clone() if isinstance(state, Tensor) else list(state)


def _states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}
