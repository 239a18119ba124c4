"""Records the calls of `self.log` and the changed attributes of a step, for each microbatch on the last stage.

Merges them into the calls and changes of one step on the whole batch, and repeats these on every rank.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_parallel.compat import ParallelState, fields_of, patched
from lightning_parallel.compat.lightning import (
    batch_value_of,
    set_batch_value,
    value_of_batches,
)
from lightning_parallel.compat.torch import BatchNormalization, map_only, version_of
from lightning_parallel.pipeline.microbatch import (
    ADDED,
    LIST_KINDS,
    LOGGED,
    Merging,
    merge_entries,
    merge_outputs,
    microbatch_under_way,
    reduce_logged,
    rule_of,
)
from lightning_parallel.pipeline.random_streams import OwnGenerators
from lightning_parallel.step_trace.placeholder import in_dry_run, missing, require_known, reveal
from lightning_parallel.strategies.steps.gradient_hooks import HookedState
from lightning_parallel.strategies.steps.metrics import MetricCalls, MetricSnapshot, Place
from lightning_parallel.strategies.steps.state import (
    MISSING,
    Added,
    Edit,
    Elsewhere,
    Fresh,
    Gone,
    Members,
    Replaced,
    Snapshot,
    StatePath,
    TrainerState,
    Value,
    is_container,
    is_fixed,
    is_plain,
    label_of,
    put,
    refill,
    refilled,
    remove,
)

__all__ = [
    "Change",
    "LogCall",
    "StepEffects",
    "changes_undone",
    "log_recorded",
    "side_effects_discarded",
    "to_device",
]

_LOG = inspect.signature(LightningModule.log)
BatchStates = tuple[Metric, dict[str, Any]]
"""A metric, and its states of one microbatch."""
LogCall = tuple[str, Any, dict[str, Any]]
"""Name, value, other arguments of a call of `self.log`; a metric is the path of its module."""
_STATISTICS = ("num_batches_tracked", "running_mean", "running_var")


class StepEffects:
    """Records the logged values and changed attributes of the microbatches of one batch, on this rank.

    Args:
        module: The user's module.
        name: The name of the step, such as `training_step`.
    """

    def __init__(self, module: LightningModule, name: str) -> None:
        self.module = module
        self.logged: list[list[LogCall]] = []
        self._start = Snapshot(module)
        self._trainer = TrainerState(module)
        self._of_trainer: list[dict[tuple[str, str], Any]] = []
        self._attributes = {path: dict(vars(holder)) for path, holder in self._start.modules()}
        self._rules = ParallelState.of(module).merging.setdefault(name, {})
        self._proven = ParallelState.of(module).proven.setdefault(name, {})
        self._statistics = _BatchStatistics.of(module) if name == "training_step" else []
        self._history: list[dict[StatePath, Edit]] = []
        self.metrics = MetricCalls(module)
        # A value that is merged by rows or by sum counts in every microbatch, even in one that leaves it unchanged.
        totals = (label for label, rule in self._rules.items() if rule.startswith(("sum ", "rows ")))
        self._totals = [name for name in totals if isinstance(self._start.original((name,)), (int, float, Tensor))]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one microbatch inside the block; undo its changes if the step does not run to its end.

        A rank with several stages runs the step of a microbatch once per stage.
        """
        microbatch = microbatch_under_way()
        calls: list[LogCall] = []
        for statistics in self._statistics:
            statistics.reset(microbatch)
        before = Snapshot(self.module)
        state = ParallelState.of(self.module)
        state.batch_states = {}
        try:
            with self.metrics.recording(), log_recorded(self.module, calls, self.metrics):
                yield
        except BaseException:
            # A stage before the last ends the step early. New attributes stay: hooks of backward may read them.
            before.restore(removes=False)
            raise
        finally:
            state.batch_states = None
            if microbatch is not None:
                for statistics in self._statistics:
                    statistics.note(microbatch)
            # One process changes the trainer once per batch, so `repeat` makes the changes after the last microbatch.
            of_trainer = self._trainer.changes()
            self._trainer.restore()
        self._of_trainer.append(of_trainer)
        self.logged.append(calls)
        # An attribute may hold a placeholder whose data came from an earlier stage: record the data.
        edits = {path: reveal(edit) for path, edit in before.changes().items()}
        for name in self._totals:
            edits.setdefault((name,), Value(before.original((name,)), before.entries_of(self.module)[name], False))
        self._history.append(edits)

    def merging(self, samples: Sequence[int], weights: Sequence[float], is_strict: bool) -> Merging:
        """Return how microbatches are merged."""
        return Merging(self._rules, samples, weights, is_strict, self._proven)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Put the attributes from before the batch back inside the block."""
        after = Snapshot(self.module)
        self._start.restore()
        try:
            yield
        finally:
            after.restore()

    def undo(self) -> None:
        """Undo the batch: its changes of attributes and metrics."""
        self._start.restore()
        self.metrics.restore()

    def merged(self, merging: Merging) -> tuple[list[LogCall], list[Change]]:
        """Return the calls of `self.log` and the changes of one step on the whole batch."""
        for name, value, _ in (call for calls in self.logged for call in calls):
            require_known(value, f"`self.log({name!r}, ...)`")
        changes = _merge_changes(self._history, merging)
        for path, _, value in changes:
            require_known(value, f"`self.{label_of(path)}`")
        # Code after the step cannot read data of other stages. Most such attributes are read inside the step only, so
        # not the attribute but a later read of it raises.
        for path, holder in self._start.modules():
            before = self._attributes[path]
            for name, value in vars(holder).items():
                if missing(value) and value is not before.get(name):
                    changes.append(((*path, name), "set", Elsewhere(value)))
        # An attribute with history would keep the graphs of all microbatches alive.
        changes = map_only(Tensor, lambda tensor: tensor.detach(), changes)
        if any(self._of_trainer):
            changes.append(((), "trainer", _agreed(self._of_trainer)))
        known = ParallelState.of(self.module).logged
        # Before the calls are merged, because a logged value may come from a repeated metric.
        self.metrics.repeat(merging.samples, merging.weights)
        return _merge_calls(self.logged, merging, known, self.metrics), changes

    @torch.no_grad()
    def settle(self, samples: Sequence[int]) -> None:
        """Set the statistics of batch normalizations to the result of one step on the whole batch."""
        with torch.inference_mode(False):
            for statistics in self._statistics:
                statistics.settle(samples)

    def repeat(self, calls: Sequence[LogCall], changes: Sequence[Change], device: torch.device) -> None:
        """Log the values of the last stage on this rank, and set the attributes that it changed."""
        with torch.inference_mode(False):
            # The ranks have run different stages, so all begin with the state before the batch.
            self._start.restore(removes=False)
            _apply(self.module, self._start, [change for change in changes if change[1] != "trainer"], device)
        for values in (value for _, action, value in changes if action == "trainer"):
            self._trainer.put(values)
        for name, value, arguments in calls:
            if isinstance(value, _MetricAt):
                metric = self.module.get_submodule(value.path)
                assert isinstance(metric, Metric)
                set_batch_value(metric, to_device(value.cache, device))
                value = metric
            self.module.log(name, to_device(value, device), **arguments)


class _BatchStatistics:
    """Averages the statistics of a batch normalization over the microbatches, and counts them as one batch."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm
        self._buffers: dict[str, Tensor] = {name: getattr(norm, name) for name in _STATISTICS}
        # Copies: autograd may have saved the buffers, and the microbatches write into them.
        self._before = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}
        self._after: dict[int, dict[str, Tensor]] = {}
        self._mark()

    @staticmethod
    def of(module: nn.Module) -> list[_BatchStatistics]:
        """Return the statistics of all batch normalizations that this rank holds."""
        norms = [child for child in module.modules() if isinstance(child, BatchNormalization)]
        buffers = {norm: [getattr(norm, name, None) for name in _STATISTICS] for norm in norms}
        return [
            _BatchStatistics(norm)
            for norm, found in buffers.items()
            if all(isinstance(buffer, Tensor) and not missing(buffer) for buffer in found)
        ]

    def reset(self, microbatch: int | None) -> None:
        """Give the next microbatch the statistics from before the batch, or from its own call in an earlier stage."""
        found = self._before if microbatch is None else self._after.get(microbatch, self._before)
        for name, value in found.items():
            put(self._norm, name, value.clone())
        self._mark()

    def _mark(self) -> None:
        self._count = self._norm.num_batches_tracked
        self._version = version_of(self._count)

    def note(self, microbatch: int) -> None:
        """Keep the statistics that a microbatch leaves, if it ran the layer."""
        # The kernels do not raise the versions of the statistics, so compare the counter's version. A comparison of
        # values would make the host wait for the GPU.
        count = self._norm.num_batches_tracked
        if count is not self._count or version_of(count) != self._version:
            self._after[microbatch] = {name: getattr(self._norm, name) for name in _STATISTICS}

    def settle(self, samples: Sequence[int]) -> None:
        """Set the mean over the microbatches by samples; the buffers stay the same objects."""
        for name, buffer in self._buffers.items():
            if self._after:
                every = [self._after.get(number, self._before)[name] for number in range(len(samples))]
                # If only the user knows the counts, each count is -1, and the shares are equal.
                value: Any = sum(count / sum(samples) * each for count, each in zip(samples, every))
                buffer.copy_(value if buffer.is_floating_point() else value.round())
            put(self._norm, name, buffer)


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with all its tensors on `device`."""
    return map_only(Tensor, lambda tensor: tensor.to(device), value)


# ------------------------------------------------------------------------------------------------------------ logging


class _MetricAt(NamedTuple):
    """A torchmetrics object in a call of `self.log`, with its value for the batch."""

    path: str
    cache: Any
    metric: Metric | None = None
    batch: BatchStates | None = None


class _BatchValue(NamedTuple):
    """The value of a torchmetrics object, in a call of `self.log`."""

    cache: Tensor
    batch: BatchStates | None
    place: Place | None


@contextmanager
def log_recorded(module: LightningModule, calls: list[LogCall], metrics: MetricCalls | None = None) -> Iterator[None]:
    """Add the calls of `self.log` inside the block to `calls` instead; `metrics` tells the source of a value."""

    def log(*args: Any, **kwargs: Any) -> None:
        batches = ParallelState.of(module).batch_states or {}
        bound = _LOG.bind(module, *args, **kwargs).arguments
        bound.pop("self")
        name = bound.pop("name")
        value = bound.pop("value")
        if isinstance(value, Metric):
            # Record its path, since each rank has a different object for the metric.
            path = next((path for path, child in module.named_modules() if child is value), None)
            if path is None:
                raise ValueError(f"The metric logged as {name!r} must be an attribute of the module; make it one")
            value = _MetricAt(path, batch_value_of(value), value, batches.get(id(value)))
        elif in_dry_run():
            # In a real step `StepEffects.merged` refuses the value: its error reaches all ranks.
            require_known(value, f"`self.log({name!r}, ...)`")
        elif isinstance(value, Tensor):
            # Logged values live until the batch ends; without `detach` they would keep the microbatch's graph.
            batch = next((each for each in batches.values() if batch_value_of(each[0]) is value), None)
            place = None if metrics is None else metrics.place_of(value)
            is_plain = batch is None and place is None
            value = value.detach() if is_plain else _BatchValue(value.detach(), batch, place)
        calls.append((name, value, dict(bound)))

    with patched(module, "log", log):
        yield


def _merge_calls(
    logged: Sequence[Sequence[LogCall]],
    merging: Merging,
    known: Mapping[str, tuple[bool, bool]],
    metrics: MetricCalls,
) -> list[LogCall]:
    by_name: dict[str, list[tuple[int, float, Any, dict[str, Any]]]] = {}
    for calls, count, weight in zip(logged, merging.samples, merging.weights):
        for name, value, arguments in calls:
            by_name.setdefault(name, []).append((count, weight, value, arguments))
    return [
        _merge_call(name, entries, known.get(name, (False, False)), metrics, merging)
        for name, entries in by_name.items()
    ]


def _merge_call(
    name: str,
    entries: list[tuple[int, float, Any, dict[str, Any]]],
    known: tuple[bool, bool],
    metrics: MetricCalls,
    merging: Merging,
) -> LogCall:
    is_by_samples, is_constant = known
    values = [value for _, _, value, _ in entries]
    arguments = dict(entries[-1][3])
    if arguments.get("batch_size") is not None and not is_constant:
        # Lightning weights the batches of an epoch by these sizes, so use them as weights inside a batch, too.
        sizes = [float(entry["batch_size"]) for *_, entry in entries]
        arguments["batch_size"] = sum(entry["batch_size"] for *_, entry in entries)
    else:
        sizes = [float(count) if is_by_samples else weight for count, weight, _, _ in entries]
    if isinstance(values[0], _MetricAt):
        metric = values[0].metric
        if metric is not None and metrics.is_repeated(metric):
            return name, _MetricAt(values[0].path, batch_value_of(metric)), arguments
        caches = [value.cache for value in values if value.cache is not None]
        total = sum(sizes) or math.nan  # as for plain values, if no microbatch has a weight
        shares = [size / total for size in sizes]
        is_shown = arguments.get("on_step") is not False
        merged = _value_of_all(values) if caches and is_shown else None
        if merged is None and caches:
            merged = merge_outputs(caches, Merging({}, (), shares))
        return name, _MetricAt(values[0].path, merged), arguments
    if all(isinstance(value, _BatchValue) for value in values):
        merged = metrics.value_at(values[-1].place)
        merged = _value_of_all(values) if merged is None else merged
        if merged is not None:
            return name, merged, arguments
    values = [value.cache if isinstance(value, _BatchValue) else value for value in values]
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    # Stack Python floats in double precision: the default dtype would round each before the mean.
    dtype = torch.float64 if device is None and any(isinstance(value, float) for value in values) else None
    numbers = torch.stack([torch.as_tensor(value, device=device, dtype=dtype).detach() for value in values])
    kind = arguments.get("reduce_fx", "mean")
    number: Any = reduce_logged(numbers, sizes, kind)
    merging.note(f"{LOGGED}{name}", list(numbers), number, "entries" if kind in ("mean", "avg") else "logged")
    return name, number if dtype is None else number.item(), arguments


def _value_of_all(values: Sequence[_MetricAt | _BatchValue]) -> Any:
    """Return the value of a metric for a batch from its states of the microbatches; None if they do not combine.

    The states are combined, not the values: a mean over classes, a quotient or a rank is no mean over microbatches.
    """
    batches = [value.batch for value in values if value.batch is not None]
    if not len(batches) == len(values) > 1 or any(metric is not batches[0][0] for metric, _ in batches):
        return None
    return value_of_batches(batches[0][0], [states for _, states in batches])


# --------------------------------------------------------------------------------------------------------- attributes


Change = tuple[StatePath, str, Any]
"""Path, action, value.

Actions: `set`, `write` (in place), `create`, `extend`, `grow` (into a new list), `join`, `fill`, `remove`, `trainer`.
"""


def _agreed(found: Sequence[dict[tuple[str, str], Any]]) -> dict[tuple[str, str], Any]:
    """Return the changes of the trainer, which must be the same in all microbatches.

    Raises:
        ValueError: If two microbatches have set different values.
    """
    for label, key in dict.fromkeys(place for each in found for place in each):
        values = [each.get((label, key), "nothing") for each in found]
        if any(value != values[0] for value in values):
            name = f"{label}.{key}" if label == "self.trainer" else f"{label}[{key!r}]"
            raise ValueError(
                f"The step must set `{name}` to the same value in all microbatches; got {values}. A single process"
                " sets it once, from the full batch. Set it in `on_train_batch_end`, from `outputs['loss']`, or set"
                " `num_microbatches=1`"
            )
    return found[-1]


def _merge_changes(history: Sequence[dict[StatePath, Edit]], merging: Merging) -> list[Change]:
    """Return the changes of one step on the whole batch, containers before their entries."""
    history = [dict(edits) for edits in history]
    paths = list(dict.fromkeys(path for edits in history for path in edits))
    merged: list[Change] = []
    settled: set[StatePath] = set()
    for path in paths:  # grows inside
        found = [(number, edits[path]) for number, edits in enumerate(history) if path in edits]
        if any(path[:length] in settled for length in range(1, len(path))):
            continue
        fresh = [(number, edit) for number, edit in found if isinstance(edit, Fresh)]
        edits, edit, label = [each for _, each in found], found[-1][1], label_of(path)
        added: list[tuple[int, dict[StatePath, Edit]]] = []
        is_anew = len(fresh) < max(2, len(edits)) and _may_grow(edits)
        if is_anew:
            # One microbatch has made the list anew; another one may have appended to it.
            edits = [_as_added(each) for each in edits]
            fresh = [(number, each) for (number, _), each in zip(found, edits) if isinstance(each, Fresh)]
        if kept := _kept_by([each for _, each in fresh]):
            # Treat `self.found = {**self.found, key: x}` like `self.found[key] = x`.
            added = [(number, _inside(path, each.value, kept)) for number, each in fresh]
        elif fresh and isinstance(fresh[0][1].value, (set, frozenset)):
            settled.add(path)
            states = [fresh[-1][1].value.__class__(_filled(edits[: end + 1])) for end in range(len(edits))]
            merged.append((path, "set", merge_outputs(states, merging, label)))
        elif len(fresh) > 1:
            settled.add(path)
            merged += _merge_made(path, [each for _, each in fresh], merging, len(history))
        elif isinstance(edit, Gone):
            settled.add(path)
            merged.append((path, "remove", None))
        elif isinstance(edit, Value):
            values = [(number, each) for number, each in found if isinstance(each, Value)]
            merged.append(_merge_values(path, values, merging))
        elif fresh and _holds_names(fresh[0][1].value):
            # One microbatch has made it, and later microbatches may have changed it.
            number, new = fresh[0]
            merged.append((path, "create", refilled(new.value, ()) if isinstance(new.value, dict) else new.value))
            added = [(number, _inside(path, new.value))]
        elif anew := _lists_anew(edits, len(merging.samples)):
            settled.add(path)
            merged.append((path, "fill", merge_entries(anew, merging, label)))
        elif any(isinstance(each, Replaced) for each in edits) or (fresh and isinstance(edits[0], Added)):
            settled.add(path)
            merged += [(path, "create", refilled(each.value, ())) for _, each in fresh]
            merged.append((path, "fill", _filled(edits)))
        else:
            merged += [(path, "create", refilled(each.value, ())) for _, each in fresh]
            merged += _merge_entries_of(path, edits, merging, "grow" if is_anew else "extend")
        for number, inside in added:
            history[number].update(inside)
            paths.extend(key for key in inside if key not in paths)
    return merged


def _kept_by(edits: Sequence[Fresh]) -> frozenset[Any]:
    """Return the keys of a dict that all microbatches keep while one adds entries; empty if it does not grow."""
    kept = edits[0].kept if edits and edits[0].is_grown else frozenset()
    is_kept = all(kept <= each.kept for each in edits) and any(each.value.keys() - kept for each in edits if kept)
    return kept if is_kept else frozenset()


def _holds_names(value: Any) -> bool:
    """Tell whether a container or object holds its values under names or keys."""
    return isinstance(value, dict) or is_fixed(value) or not is_container(value)


def _inside(path: StatePath, value: Any, kept: frozenset[Any] = frozenset()) -> dict[StatePath, Edit]:
    """Return the entries of a new dict other than `kept`, or the fields of a new object; a named tuple has none."""
    entries = value if isinstance(value, dict) else {} if is_fixed(value) else fields_of(value)
    return {
        (*path, key): Fresh(entry) if is_container(entry) else Value(MISSING, entry, False)
        for key, entry in entries.items()
        if key not in kept
    }


def _merge_fresh(edits: Sequence[Fresh], merging: Merging, label: str) -> Any:
    """Return the container or object of the whole batch.

    Raises:
        ValueError: If the containers of the microbatches do not fit together.
    """
    values = [each.value for each in edits]
    last = values[-1]
    if rule_of(merging.rules, label).startswith(ADDED):
        # A window over batches drops its first entries once it is full, so it is more than entries of each microbatch.
        merging.unproven[label] = "differs"
    # Lists and tensors that all microbatches take from the earlier dict belong to earlier batches.
    earlier = frozenset.intersection(*(each.kept for each in edits))
    kept = {key: last[key] for key in earlier if not is_plain(last[key])}
    if kept:
        values = [refilled(each, {key: each[key] for key in each if key not in kept}) for each in values]
    merged = merge_outputs(values, merging, label)
    if merging.is_strict and type(merged) is not type(last):
        raise ValueError(
            f"`self.{label}` must be of one kind in all microbatches of a batch; got {values!r:.200}. These values"
            " cannot be merged into the value of a single-process run. Append the values to a list, or set"
            " `num_microbatches=1`"
        )
    return refilled(merged, {**kept, **merged}) if kept and isinstance(merged, dict) else merged


_OTHERS = (Value, Members, Gone)


def _lists_anew(edits: Sequence[Edit], count: int) -> list[list[Any]]:
    """Return the new lists of figures or tensors of all microbatches; empty if one microbatch has made no new list.

    An example is a list of the outputs of layers, which each step clears first.
    """
    found = [edit.entries if isinstance(edit, Added) else edit.value for edit in edits if not isinstance(edit, _OTHERS)]
    lists = [list(each) for each in found]
    are_anew = len(lists) == count > 1 and all(isinstance(edit, Replaced) for edit in edits[1:])
    if not are_anew or not all(isinstance(entry, (Tensor, float)) for each in lists for entry in each):
        return []
    # By identity: a list that keeps entries of an earlier microbatch, such as a window over batches, is not new.
    seen = {id(entry) for each in lists for entry in each}
    return lists if len(seen) == sum(map(len, lists)) and len({*map(len, lists)}) == 1 else []


def _filled(edits: Sequence[Edit]) -> list[Any] | set[Any]:
    """Return the entries of a list or set after all changes, of which one has replaced or made them."""
    value: Any = set() if isinstance(edits[0], Members) else []
    for edit in edits:
        if isinstance(edit, (Replaced, Fresh)):
            value = set(edit.value) if isinstance(edit.value, (set, frozenset)) else list(edit.value)
        elif isinstance(edit, Added):
            value.extend(edit.entries)
        elif isinstance(edit, Members):
            value |= edit.added
    return value


def _may_grow(edits: Sequence[Edit]) -> bool:
    """Tell whether new lists or tuples of microbatches may be the earlier list with further entries.

    `self.found = self.found + [x]` makes such lists. `self.labels = y.tolist()` may make equal ones by chance.
    """
    begins = [isinstance(edit, Added) or (isinstance(edit, Fresh) and edit.added is not None) for edit in edits]
    is_new = any(isinstance(edit, Fresh) and edit.added is not None for edit in edits)
    return is_new and all(begins[1:]) and isinstance(edits[0], (Fresh, Added))


def _as_added(edit: Edit) -> Edit:
    """Return a new list that begins with the earlier list as entries that were added to the earlier list."""
    return Added(edit.added) if isinstance(edit, Fresh) and edit.added is not None else edit


def _merge_made(path: StatePath, edits: Sequence[Fresh], merging: Merging, count: int) -> list[Change]:
    """Return the changes by containers or objects that several of `count` microbatches have made."""
    if _may_grow(edits):
        return _merge_lists(path, edits, merging, count)
    if len(edits) == count:
        return [(path, "set", _merge_fresh(edits, merging, label_of(path)))]
    # By a condition in the step, which one process checks for the whole batch.
    merging.unproven[label_of(path)] = "unclear"
    return [(path, "set", edits[-1].value)]


def _merge_lists(path: StatePath, edits: Sequence[Fresh], merging: Merging, count: int) -> list[Change]:
    """Return the changes by new lists that may be the earlier list with further entries, or lists of their own.

    Args:
        path: The path of the list.
        edits: The new lists.
        merging: The rules, which tell both apart if a comparison has seen other values.
        count: The number of microbatches.
    """
    label = label_of(path)
    rule = rule_of(merging.rules, label)
    added = [list(edit.value) if edit.added is None else edit.added for edit in edits]
    grows = rule.startswith(ADDED) if rule else any(added[1:])
    changes: list[Change] = []
    if grows:
        if edits[0].added is None:
            changes.append((path, "create", refilled(edits[0].value, ())))
        changes.append((path, "grow", merge_entries(added, merging, label, ADDED)))
    elif len(edits) == count:
        changes.append((path, "set", _merge_fresh(edits, merging, label)))
    else:
        changes.append((path, "set", edits[-1].value))
    if len(edits) < count:
        merging.doubt(label, "unclear")
        return changes
    values = [list(edit.value) for edit in edits]
    start = values[0][: len(values[0]) - len(added[0])]
    lists = {}
    for kind in LIST_KINDS:
        trial = Merging({label: kind}, merging.samples, merging.weights)
        is_added = kind.startswith(ADDED)
        lists[kind] = [*start, *merge_entries(added, trial, label)] if is_added else merge_outputs(values, trial, label)
    merging.note_list(label, merging.found[label], lists)
    return changes


def _merge_entries_of(
    path: StatePath, edits: Sequence[Any], merging: Merging, action: Literal["extend", "grow"]
) -> list[Change]:
    """Return the change that adds the entries of all microbatches to a list, tuple, deque or set."""
    values = [edit.value if isinstance(edit, Fresh) else edit[0] for edit in edits]
    if isinstance(values[0], set):
        return [(path, "join", set().union(*values))]
    return [(path, action, merge_entries([list(value) for value in values], merging, label_of(path)))]


_NOTED = (bool, int, float, str, np.generic, np.ndarray, Tensor)


def _merge_values(path: StatePath, found: Sequence[tuple[int, Value]], merging: Merging) -> Change:
    """Return the value of the last microbatch, or the rows or the sum of all, as the self-check has found.

    An example of a sum is the size of a batch, such as the key of a cache.
    """
    after = found[-1][1].after
    is_known = isinstance(after, _NOTED) and not any(missing(each.before) or missing(each.after) for _, each in found)
    # A new entry of one microbatch alone, such as the score of a sample by its name, collides with no other entry.
    if is_known and (len(path) == 1 or len(found) > 1 or found[0][1].before is not MISSING):
        merging.note_change(label_of(path), {number: (each.before, each.after) for number, each in found})
    ends = _ends(found, len(merging.samples))
    if ends:
        label, before, dims = label_of(path), found[0][1].before, np.ndim(ends[0])
        # A running mean may have as many rows as a microbatch has samples, by chance.
        is_running = isinstance(before, type(ends[0])) and np.shape(before) == np.shape(ends[0])
        are_rows = dims > 0 and merging.is_per_sample(ends) and not is_running
        if merging.kind(label, f"{'rows' if are_rows else 'last'} {dims}") in ("rows", "sum"):
            merged = merge_outputs(ends, merging, label)
            if isinstance(merged, type(after)):
                after = merged
            else:
                # A list of tensors that do not fit together is no buffer.
                merging.found[label] = f"last {dims}"
    return path, "write" if found[0][1].in_place else "set", after


def _ends(found: Sequence[tuple[int, Value]], count: int) -> list[Any]:
    """Return the number or tensor after each microbatch; an empty list if their kinds differ."""
    edits = {number: edit.after for number, edit in found}
    ends = [found[0][1].before]
    for number in range(count):
        ends.append(edits.get(number, ends[-1]))
    kinds = [(int, float), (Tensor, np.ndarray)]
    is_one = any(all(isinstance(end, kind) and not isinstance(end, bool) for end in ends[1:]) for kind in kinds)
    return ends[1:] if is_one and count > 1 else []


def _apply(module: LightningModule, start: Snapshot, changes: Sequence[Change], device: torch.device) -> None:
    """Make changes in a module, whose attributes must be restored to the values of `start`."""
    for path, action, value in changes:
        value = map_only(Elsewhere, lambda unknown: unknown.placeholder(device), to_device(value, device))
        if action in ("create", "set"):
            start.put(path, value)
        elif action == "remove":
            remove(start.holder(path), path[-1])
        elif action == "write":
            original = start.original(path)
            if isinstance(original, Tensor) and original.shape == value.shape and original.dtype == value.dtype:
                # Other code may hold the tensor: a step that writes in place leaves the same object.
                with torch.no_grad(), torch.inference_mode(original.is_inference()):
                    original.copy_(value)
                value = original
            elif isinstance(original, np.ndarray) and original.shape == value.shape:
                original[...] = value
                value = original
            start.put(path, value)
        else:
            target = start.entries_of(start.holder(path))[path[-1]]
            items = value if action == "fill" else [*target, *value]
            # The earlier list stays as it is: other attributes may hold it.
            if action == "grow" or isinstance(target, (tuple, frozenset)):
                start.put(path, refilled(target, items))
            else:
                refill(target, items)


@contextmanager
def side_effects_discarded(module: LightningModule) -> Iterator[None]:
    """Undo the changes of attributes, metrics and the trainer inside the block, and log nothing."""
    metrics = [MetricSnapshot(child) for child in module.modules() if isinstance(child, (Metric, MetricCollection))]
    before, trainer = Snapshot(module, with_buffers=False, scope="users"), TrainerState(module)
    try:
        with log_recorded(module, []):
            yield
    finally:
        for metric in metrics:
            metric.restore()
        trainer.restore()
        # In place, since the skeleton compares attributes by identity. The block may free tensors of other stages, or
        # move them to the device.
        before.restore(tensors=False, in_place=True)


@contextmanager
def changes_undone(module: LightningModule) -> Iterator[None]:
    """Undo the changes of a run of the step, gradients and generators included."""
    state = Snapshot(module, scope="all")
    trainer, hooked = TrainerState(module), HookedState.of(module)
    # Set the gradients themselves aside, not copies: the run begins without gradients and cannot change them.
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    for parameter in gradients:
        parameter.grad = None
    try:
        with OwnGenerators(module.modules()).preserved():
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        trainer.restore()
        hooked.restore()
        state.restore(in_place=True)
