"""Repeats the calls of torchmetrics objects in microbatches once, on the inputs of the whole batch.

    microbatches    metric(pred[:4], y[:4]), metric(pred[4:], y[4:])      values that the step may use
    at the end      the metric is restored, then metric(pred, y)          the state of one process

A rank correlation, an average of batch means or a window over batches does not combine from microbatches. States that
add up do, and no inputs are kept for them: most metrics of torchmetrics have such states, see `adds_up`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection

from lightning_parallel.compat import ParallelState, patched
from lightning_parallel.compat.lightning import adds_up, has_sums, held_by
from lightning_parallel.compat.torch import pytree
from lightning_parallel.pipeline.microbatch import Merging, merge_outputs, reduce_logged

__all__ = ["MetricCalls", "MetricSnapshot", "Place", "learn_numbers"]

_METHODS = ("forward", "update", "compute", "reset")
_MOST_ENTRIES = 1 << 20
"""The most entries of inputs that are kept for a metric whose states add up: the inputs are rarely needed."""


class _Call(NamedTuple):
    method: str
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    results: list[Any]


Place = tuple[int, int, int]
"""The source of a value: the `id` of the metric, the number of the call, the number of the value in its result."""


class MetricSnapshot:
    """The states of a metric, or of a collection or wrapper of metrics with all metrics inside."""

    def __init__(self, holder: Metric | MetricCollection) -> None:
        # The metrics of a compute group share states, so one copy per object keeps them shared.
        copies: dict[int, Any] = {}
        children = [child for child in holder.modules() if isinstance(child, (Metric, MetricCollection))]
        with torch.inference_mode(False):
            # Copies from inference mode could not be updated in training.
            # Without methods: the first call of a step finds the functions that record its calls in their place.
            held = [(child, {k: v for k, v in held_by(child).items() if k not in _METHODS}) for child in children]
            self._held = [
                (child, {name: _copied(value, copies) for name, value in values.items()}) for child, values in held
            ]

    def restore(self) -> None:
        """Restore the states; a later call may restore them again."""
        copies: dict[int, Any] = {}
        with torch.inference_mode(False):
            for child, values in self._held:
                vars(child).update({name: _copied(value, copies) for name, value in values.items()})


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if id(value) not in copies:
        copies[id(value)] = value
        if isinstance(value, Tensor):
            copies[id(value)] = value.detach().clone()
        elif isinstance(value, (list, dict)):
            copies[id(value)] = value.copy()
    return copies[id(value)]


class MetricCalls:
    """The calls of a module's metrics by the microbatches of one step.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders = [child for child in module.modules() if isinstance(child, (Metric, MetricCollection))]
        self._paths = {id(child): path for path, child in module.named_modules()} if self._holders else {}
        self._before: dict[int, MetricSnapshot] = {}
        self._calls: list[dict[int, list[_Call]]] = []
        self._current: dict[int, list[_Call]] = {}
        self._results: dict[tuple[int, int], list[Any]] = {}
        self._repeated: set[int] = set()
        self._is_inside = False
        self._known = ParallelState.of(module).metric_numbers

    @property
    def holders(self) -> list[Metric | MetricCollection]:
        """The metrics, and collections of metrics, of the module now."""
        return self._holders

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls inside the block; they count if the block runs to its end."""
        self._current = {}
        with ExitStack() as stack:
            for holder in self._holders:
                for method in _METHODS:
                    stack.enter_context(patched(holder, method, self._recorded(holder, method)))
            yield
        # The results of a metric may keep the graph of the microbatch alive.
        self._calls.append(
            {holder: [call._replace(results=[]) for call in calls] for holder, calls in self._current.items()}
        )

    def _recorded(self, holder: Metric | MetricCollection, method: str) -> Any:
        call = getattr(holder, method)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            # `forward` calls `update`, and a collection calls its metrics: only the outer call is to be repeated.
            if self._is_inside:
                return call(*args, **kwargs)
            if id(holder) not in self._before:
                self._before[id(holder)] = MetricSnapshot(holder)
            self._is_inside = True
            try:
                result = call(*args, **kwargs)
            finally:
                self._is_inside = False
            # Inputs with history would keep the graph of the microbatch alive.
            inputs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            size = sum(leaf.numel() for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
            is_kept = size <= _MOST_ENTRIES or not adds_up(holder)
            results = pytree.tree_leaves(result)
            if len({id(each) for each in results}) < len(results):
                # Give each name its own view: `place_of` finds a result by identity, and values of the whole batch may
                # differ by name.
                result = pytree.tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), result)
                results = pytree.tree_leaves(result)
            self._current.setdefault(id(holder), []).append(
                _Call(method, inputs[0] if is_kept else None, inputs[1] if is_kept else {}, results)
            )
            return result

        return recorded

    def numbers(self) -> dict[str, Tensor]:
        """Return the numbers among the inputs of the last microbatch, by metric and argument."""
        return {
            self._key(holder, key): torch.as_tensor(value, dtype=torch.float64)
            for holder in self._holders
            for call in self._calls[-1].get(id(holder), [])
            for key, value in _inputs_of(call).items()
            if _is_number(value)
        }

    def _key(self, holder: Metric | MetricCollection, key: str) -> str:
        return f"{type(holder).__qualname__} {key}({self._paths[id(holder)]})"

    def place_of(self, value: Tensor) -> Place | None:
        """Return the source of a value in the current microbatch; None if no metric returned the value."""
        for holder, calls in self._current.items():
            for number, call in enumerate(calls):
                for position, result in enumerate(call.results):
                    if result is value:
                        return holder, number, position
        return None

    def restore(self) -> None:
        """Restore the metrics to their states from before the batch."""
        for snapshot in self._before.values():
            snapshot.restore()

    def repeat(self, samples: Sequence[int], weights: Sequence[float]) -> None:
        """Restore the metrics, and call them with the inputs of all microbatches together."""
        for holder in self._holders if len(self._calls) > 1 else ():
            lists = [calls.get(id(holder), []) for calls in self._calls]
            if id(holder) in self._before and self._is_to_repeat(holder, lists):
                self._before[id(holder)].restore()
                self._repeat(holder, lists, samples, weights)
                self._repeated |= {id(child) for child in holder.modules()}

    def _is_to_repeat(self, holder: Metric | MetricCollection, lists: Sequence[Sequence[_Call]]) -> bool:
        calls = [call for each in lists for call in each]
        if any(call.args is None for call in calls):
            return False
        if any(call.method in ("compute", "reset") for call in calls):
            return True
        if isinstance(holder, Metric) and not isinstance(holder, MeanMetric) and has_sums(holder):
            inputs = [(self._key(holder, key), value) for call in calls for key, value in _inputs_of(call).items()]
            if any(_is_number(value) and not self._kind(key) for key, value in inputs):
                return False  # the metric is a mean or a sum over the samples
        return not adds_up(holder)

    def _repeat(
        self,
        holder: Metric | MetricCollection,
        lists: Sequence[Sequence[_Call]],
        samples: Sequence[int],
        weights: Sequence[float],
    ) -> None:
        for number in range(max(map(len, lists))):
            # A microbatch that has no rows for the metric may not call it.
            found = {part: calls[number] for part, calls in enumerate(lists) if number < len(calls)}
            calls, first = [*found.values()], next(iter(found.values()))
            if any(
                (call.method, len(call.args or ()), call.kwargs.keys())
                != (first.method, len(first.args or ()), first.kwargs.keys())
                for call in calls
            ):
                raise ValueError(
                    f"Every microbatch must call the metric `self.{self._paths[id(holder)]}` alike; got"
                    f" {[call.method for call in calls]} for call {number + 1}. Make these calls independent of the"
                    " data, or set `num_microbatches=1`"
                )
            # The microbatches that make this call may all be without weight.
            total = sum(weights[part] for part in found) or 1.0
            counts = [samples[part] for part in found] if min(samples) > 0 else []
            shares = [weights[part] / total for part in found]
            inputs = [_inputs_of(call) for call in calls]
            merged = {
                key: self._merged(self._key(holder, key), [each[key] for each in inputs], counts, shares)
                for key in inputs[0]
            }
            args = [merged[f"{first.method} {place}"] for place in range(len(first.args or ()))]
            kwargs = {name: merged[f"{first.method} {name}"] for name in first.kwargs}
            call = holder if first.method == "forward" else getattr(holder, first.method)
            self._results[id(holder), number] = pytree.tree_leaves(call(*args, **kwargs))

    def _merged(self, key: str, values: Sequence[Any], samples: Sequence[int], shares: Sequence[float]) -> Any:
        if not all(map(_is_number, values)):
            return merge_outputs(values, _Inputs({}, samples, shares))
        numbers = torch.stack([torch.as_tensor(value) for value in values])
        number = reduce_logged(numbers, shares, self._kind(key) or "mean")
        return number if isinstance(values[0], Tensor) else number.item()

    def _kind(self, key: str) -> str:
        """Return how numbers combine to the number of the batch; an unknown metric takes the rule of its class."""
        kinds = {kind for other, kind in self._known.items() if other.partition("(")[0] == key.partition("(")[0]}
        return self._known.get(key, kinds.pop() if len(kinds) == 1 else "")

    def is_repeated(self, metric: Metric) -> bool:
        """Tell whether a metric has seen the whole batch at once."""
        return id(metric) in self._repeated

    def value_at(self, place: Place | None) -> Any:
        """Return the value for the whole batch; None if the call was not repeated."""
        if place is None or place[:2] not in self._results:
            return None
        results = self._results[place[:2]]
        return results[place[2]] if place[2] < len(results) else None


def _inputs_of(call: _Call) -> dict[str, Any]:
    args = {f"{call.method} {place}": value for place, value in enumerate(call.args or ())}
    return {**args, **{f"{call.method} {name}": value for name, value in call.kwargs.items()}}


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and not value.dim() and value.is_floating_point())


def learn_numbers(
    module: nn.Module, whole: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
) -> None:
    """Learn how numbers for metrics in microbatches combine to the number of the batch: see `metric_numbers`."""
    for key, expected in whole.items():
        values = [part[key] for part in parts if key in part]
        if len(values) < len(parts):
            continue
        found = {kind: reduce_logged(torch.stack(values), shares, kind) for kind in ("mean", "sum", "max", "min")}
        errors = {kind: float((value - expected).abs()) for kind, value in found.items()}
        best = min(errors, key=lambda kind: errors[kind])
        # Prefer the mean: equal numbers fit several rules, and rounding alone would decide between them.
        is_mean = errors["mean"] <= 100 * errors[best]
        ParallelState.of(module).metric_numbers[key] = "mean" if is_mean else best


class _Inputs(Merging):
    """Merges inputs of metrics, whose rows are samples or parts of samples."""

    def is_per_sample(self, values: Sequence[Any]) -> bool:
        if isinstance(values[0], tuple):
            return super().is_per_sample(values)
        lengths = [len(value) if not isinstance(value, Tensor) or value.dim() else 0 for value in values]
        shares = {length / count for length, count in zip(lengths, self.samples)}
        return len(shares) == 1 and shares.pop() >= 1
