"""What the steps of one batch leave besides their results: calls of `self.log`, and attributes that they change.

They are recorded for each microbatch on the last stage, merged into those of one step, and repeated on every rank.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import ParallelState, is_users, patched
from lightning_parallel.compat.lightning import (
    batch_value_of,
    set_batch_value,
    value_of_batches,
)
from lightning_parallel.compat.torch import BatchNormalization, pytree, version_of
from lightning_parallel.pipeline.microbatch import (
    MEANS,
    Merging,
    merge_entries,
    merge_outputs,
    microbatch_under_way,
    reduce_logged,
    rule_of,
)
from lightning_parallel.pipeline.placeholder import in_dry_run, missing, reveal
from lightning_parallel.pipeline.unknown_value import require_known
from lightning_parallel.strategies.steps.metrics import MetricCalls, MetricSnapshot, Place
from lightning_parallel.strategies.steps.state import (
    MISSING,
    Added,
    Edit,
    Elsewhere,
    Fresh,
    Gone,
    Members,
    Path,
    Snapshot,
    TrainerState,
    Value,
    Whole,
    emptied,
    is_container,
    label_of,
    put,
    refuse_unknown,
)

__all__ = ["LogCall", "StepEffects", "buffers_kept", "log_recorded", "side_effects_discarded", "to_device"]

_LOG = inspect.signature(LightningModule.log)
BatchStates = tuple[Metric, dict[str, Any]]
"""A metric, and its states of one microbatch."""
LogCall = tuple[str, Any, dict[str, Any]]
"""Name, value, other arguments of a call of `self.log`; a metric is the path of its module."""


class StepEffects:
    """Records what the steps of one batch log and remember on this rank.

    Args:
        module: The user's module.
        name: Of the step.
    """

    def __init__(self, module: LightningModule, name: str) -> None:
        self.module = module
        self.logged: list[list[LogCall]] = []
        self._start = Snapshot(module)
        self._trainer = TrainerState(module)
        self._of_trainer: list[dict[tuple[str, str], Any]] = []
        self._attributes = {path: dict(vars(holder)) for path, holder in self._start.modules()}
        self._rules = ParallelState.of(module).merging.setdefault(name, {})
        self._history: list[dict[Path, Edit]] = []
        self.metrics = MetricCalls(module)
        # Sums and rows of what each microbatch leaves count where it leaves what was there, too: the size of a batch.
        totals = (label for label, rule in self._rules.items() if rule.startswith(("sum ", "rows ")))
        self._totals = [name for name in totals if isinstance(self._start.original((name,)), (int, float, Tensor))]
        followed = {label_of((*path, "")) for path in self._attributes if path}
        self._counters = [
            _Counter(module, name, rule)
            for name, rule in {**self._rules, **(_rules_of_norms(module) if name == "training_step" else {})}.items()
            if f"{name.rpartition('.')[0]}." not in followed and _is_inside(module, name)
        ]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one microbatch inside the block: it counts if the step runs to its end, else leaves no trace.

        A rank with several stages runs the step of a microbatch several times: each goes on from what layers keep.
        """
        microbatch = microbatch_under_way()
        calls: list[LogCall] = []
        # One process has the value before the batch for all of its samples.
        for path in self._start.paths() if MEANS & set(self._rules.values()) else ():
            if rule_of(self._rules, label_of(path)) in MEANS:
                self._start.put_back(path)
        for path, edit in self._history[-1].items() if self._history else ():
            is_new = isinstance(edit, Value) and edit.before is MISSING
            if is_new and rule_of(self._rules, label_of(path)) in MEANS:
                _remove(self._start.holder(path), path[-1])
        for counter in self._counters:
            counter.reset(microbatch)
        before = Snapshot(self.module)
        state = ParallelState.of(self.module)
        state.batch_states = {}
        try:
            with self.metrics.recording(), log_recorded(self.module, calls, self.metrics):
                yield
        except BaseException:
            # On other stages than the last. Hooks of backward may read what is new.
            before.restore(removes=False)
            raise
        finally:
            state.batch_states = None
            if microbatch is not None:
                for counter in self._counters:
                    counter.note(microbatch)
            # One process decides once for all samples; the last stage is the only one to run a step to its end.
            of_trainer = self._trainer.changes()
            self._trainer.restore()
        self._of_trainer.append(of_trainer)
        self.logged.append(calls)
        # What has come from an earlier stage, such as features that a forward hook keeps, as the data themselves.
        edits = {path: reveal(edit) for path, edit in before.changes().items()}
        for name in self._totals:
            edits.setdefault((name,), Value(before.original((name,)), before.entries_of(self.module)[name], False))
        self._history.append(edits)

    def merging(self, samples: Sequence[int], weights: Sequence[float], is_strict: bool) -> Merging:
        """Return how microbatches are merged."""
        return Merging(self._rules, samples, weights, is_strict)

    def merged(self, merging: Merging) -> tuple[list[LogCall], list[Change]]:
        """Return calls of `self.log`, and changes, as one step on the whole batch would have made them."""
        for name, value, _ in (call for calls in self.logged for call in calls):
            require_known(value, f"`self.log({name!r}, ...)`")
        changes = _merge_changes(self._history, merging)
        for path, _, value in changes:
            require_known(value, f"`self.{label_of(path)}`")
        # Refused where it is used after the step: most such attributes are read inside of it only.
        for path, holder in self._start.modules():
            before = self._attributes[path]
            for name, value in vars(holder).items():
                if missing(value) and value is not before.get(name):
                    changes.append(((*path, name), "set", Elsewhere(value)))
        changes = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), changes)
        if any(self._of_trainer):
            changes.append(((), "trainer", _agreed(self._of_trainer)))
        known = ParallelState.of(self.module).logged
        self.metrics.repeat(merging.samples, merging.weights)
        return _merge_calls(self.logged, merging.samples, merging.weights, known, self.metrics), changes

    @torch.no_grad()
    def settle(self, samples: Sequence[int], weights: Sequence[float], group: Group) -> None:
        """Set what layers keep to what one step on the whole batch would have left there, numbers on every rank."""
        with torch.inference_mode(False):
            for counter in self._counters:
                counter.settle(samples, weights)
        numbers = [counter for counter in self._counters if not counter.is_tensor]
        # All ranks have the same rules, and numbers stay where parameters are freed.
        if numbers:
            mine = {counter.label: counter.value for counter in numbers if counter.has_moved}
            for theirs in comm.all_gather_object(mine, group):
                for counter in numbers:
                    if counter.label in theirs and not counter.has_moved:
                        counter.value = theirs[counter.label]

    def repeat(self, calls: Sequence[LogCall], changes: Sequence[Change], device: torch.device) -> None:
        """Log and remember on this rank what the last stage logged and remembered."""
        with torch.inference_mode(False):
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


class _Counter:
    """A number, or buffer, that a submodule updates once in each step: see `ParallelState.merging`."""

    def __init__(self, module: nn.Module, name: str, rule: str) -> None:
        self.label = name
        path, _, self._name = name.rpartition(".")
        self._holder = module.get_submodule(path)
        self._rule = rule
        self._before = self.value
        self.is_tensor = isinstance(self._before, Tensor)
        # One that the steps do not write into: autograd may have saved those.
        self._start = self._original = self._copied()
        # What batch normalisation counts tells whether its statistics have moved, without a look at their data.
        self._is_of_norm = isinstance(self._holder, BatchNormalization) and rule in MEANS
        self._mark()
        self._after: dict[int, Any] = {}

    @property
    def value(self) -> Any:
        """What it is now."""
        return getattr(self._holder, self._name)

    @value.setter
    def value(self, value: Any) -> None:
        put(self._holder, self._name, value)

    @property
    def has_moved(self) -> bool:
        """Whether steps on this rank have changed it."""
        return bool(self._after)

    def _copied(self) -> Any:
        return self._before.detach().clone() if isinstance(self._before, Tensor) else self._before

    def reset(self, microbatch: int | None) -> None:
        """Give the next microbatch the value before the batch, or what its own steps have left."""
        if self._rule not in MEANS:
            return
        self._start = self._original if microbatch is None else self._after.get(microbatch, self._original)
        put(self._holder, self._name, self._start.clone() if isinstance(self._start, Tensor) else self._start)
        self._mark()

    def _mark(self) -> None:
        self._count = self._holder.num_batches_tracked if self._is_of_norm else None
        self._version = version_of(self._count) if isinstance(self._count, Tensor) else 0

    def note(self, microbatch: int) -> None:
        """Keep what a microbatch has left, if it came by."""
        value = self.value
        if isinstance(self._count, Tensor):
            count = self._holder.num_batches_tracked
            same = count is self._count and version_of(count) == self._version
        else:
            same = torch.equal(value, self._start) if isinstance(value, Tensor) else value == self._start
        if not same:
            self._after[microbatch] = value

    def settle(self, samples: Sequence[int], weights: Sequence[float]) -> None:
        """Set the mean; the same object stays."""
        if self._rule not in MEANS:
            return
        value: Any = self._original
        if self._after:
            value = _mean(value, self._after, _shares(self._rule, samples, weights))
        if isinstance(self._before, Tensor):
            value = self._before.copy_(value) if self._before.shape == value.shape else value
        put(self._holder, self._name, value)


def _rules_of_norms(module: nn.Module) -> dict[str, str]:
    """Return the rules by which batch normalisation updates its statistics once in each step.

    The self-check cannot find them out: it runs the layers as one microbatch, or with fixed statistics. Counts come
    first, as the other counters look at them.
    """
    norms = [path for path, child in module.named_modules() if path and isinstance(child, BatchNormalization)]
    kinds = {"num_batches_tracked": "mean", "running_mean": "samples", "running_var": "samples"}
    return {f"{path}.{name}": rule for name, rule in kinds.items() for path in norms}


def _is_inside(module: nn.Module, name: str) -> bool:
    """Tell whether a name is that of a buffer or number of a submodule that this rank holds."""
    path, _, key = name.rpartition(".")
    if not path or "[" in path:
        return False
    try:
        value = getattr(module.get_submodule(path), key)
    except AttributeError:
        return False
    return isinstance(value, (int, float, Tensor)) and not missing(value)


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with all its tensors on `device`."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


# ------------------------------------------------------------------------------------------------------------ logging


class _MetricAt:
    """A torchmetrics object in a call of `self.log`, with its value for the batch."""

    def __init__(self, path: str, cache: Any, metric: Metric | None = None, batch: BatchStates | None = None) -> None:
        self.path = path
        self.cache = cache
        self.metric = metric
        self.batch = batch


class _BatchValue(NamedTuple):
    """What a torchmetrics object returned, in a call of `self.log`."""

    cache: Tensor
    batch: BatchStates | None
    place: Place | None


@contextmanager
def log_recorded(module: LightningModule, calls: list[LogCall], metrics: MetricCalls | None = None) -> Iterator[None]:
    """Add the calls of `self.log` inside the block to `calls` instead; `metrics` tells where values come from."""

    def log(*args: Any, **kwargs: Any) -> None:
        batches = ParallelState.of(module).batch_states or {}
        bound = _LOG.bind(module, *args, **kwargs).arguments
        bound.pop("self")
        name = bound.pop("name")
        value = bound.pop("value")
        if isinstance(value, Metric):
            # By its path: every rank has another object for it.
            path = next((path for path, child in module.named_modules() if child is value), None)
            if path is None:
                raise ValueError(f"The metric logged as {name!r} must be an attribute of the module; make it one")
            value = _MetricAt(path, batch_value_of(value), value, batches.get(id(value)))
        elif in_dry_run():
            # In a real step the last stage refuses it when all are there to hear of it: see `StepEffects.merged`.
            require_known(value, f"`self.log({name!r}, ...)`")
        elif isinstance(value, Tensor):
            # What is logged is kept until the batch ends, and must not keep a microbatch's graph alive.
            batch = next((each for each in batches.values() if batch_value_of(each[0]) is value), None)
            place = None if metrics is None else metrics.place_of(value)
            is_plain = batch is None and place is None
            value = value.detach() if is_plain else _BatchValue(value.detach(), batch, place)
        calls.append((name, value, dict(bound)))

    with patched(module, "log", log):
        yield


def _merge_calls(
    logged: Sequence[Sequence[LogCall]],
    samples: Sequence[int],
    weights: Sequence[float],
    known: Mapping[str, tuple[bool, bool]],
    metrics: MetricCalls,
) -> list[LogCall]:
    by_name: dict[str, list[tuple[int, float, Any, dict[str, Any]]]] = {}
    for calls, count, weight in zip(logged, samples, weights):
        for name, value, arguments in calls:
            by_name.setdefault(name, []).append((count, weight, value, arguments))
    return [_merge_call(name, entries, known.get(name, (False, False)), metrics) for name, entries in by_name.items()]


def _merge_call(
    name: str, entries: list[tuple[int, float, Any, dict[str, Any]]], known: tuple[bool, bool], metrics: MetricCalls
) -> LogCall:
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
        metric = values[0].metric
        if metric is not None and metrics.is_repeated(metric):
            return name, _MetricAt(values[0].path, batch_value_of(metric)), arguments
        caches = [value.cache for value in values if value.cache is not None]
        shares = [size / sum(sizes) for size in sizes]
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
    # The default precision would round a number of Python's before all are there.
    dtype = torch.float64 if device is None and any(isinstance(value, float) for value in values) else None
    numbers = torch.stack([torch.as_tensor(value, device=device, dtype=dtype).detach() for value in values])
    number: Any = reduce_logged(numbers, sizes, arguments.get("reduce_fx", "mean"))
    return name, number if dtype is None else number.item(), arguments


def _value_of_all(values: Sequence[_MetricAt | _BatchValue]) -> Any:
    """Return the value of a metric for a batch whose microbatches it has seen; None if it cannot be put together.

    A mean over classes, a quotient or a rank is no mean over microbatches.
    """
    batches = [value.batch for value in values if value.batch is not None]
    if not len(batches) == len(values) > 1 or any(metric is not batches[0][0] for metric, _ in batches):
        return None
    return value_of_batches(batches[0][0], [states for _, states in batches])


# --------------------------------------------------------------------------------------------------------- attributes


Change = tuple[Path, str, Any]
"""What to do where: `set`, `write` into what is there, `create`, `extend`, `join`, `fill`, `remove`, `trainer`."""


def _agreed(found: Sequence[dict[tuple[str, str], Any]]) -> dict[tuple[str, str], Any]:
    """Return what every microbatch has set in the trainer.

    Raises:
        ValueError: If one has set something else than another.
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


def _merge_changes(history: Sequence[dict[Path, Edit]], merging: Merging) -> list[Change]:
    """Return the changes that one step on the whole batch would have made, containers before what is inside."""
    history = [dict(edits) for edits in history]
    paths = list(dict.fromkeys(path for edits in history for path in edits))
    merged: list[Change] = []
    settled: set[Path] = set()
    for path in paths:  # grows inside
        found = [(number, edits[path]) for number, edits in enumerate(history) if path in edits]
        if any(path[:length] in settled for length in range(1, len(path))):
            continue
        fresh = [(number, edit) for number, edit in found if isinstance(edit, Fresh)]
        edit = found[-1][1]
        if len(fresh) > 1:
            # A container of each microbatch's own.
            settled.add(path)
            merged.append((path, "set", merge_outputs([edit.value for _, edit in fresh], merging, label_of(path))))
        elif isinstance(edit, Gone):
            settled.add(path)
            merged.append((path, "remove", None))
        elif isinstance(edit, Value):
            values = [(number, each) for number, each in found if isinstance(each, Value)]
            merged.append(_merge_values(path, values, merging))
        elif anew := _lists_anew([each for _, each in found], len(merging.samples)):
            settled.add(path)
            merged.append((path, "fill", merge_entries(anew, merging, label_of(path))))
        elif any(isinstance(each, Whole) for _, each in found):
            settled.add(path)
            merged += [(path, "create", emptied(edit.value)) for _, edit in fresh]
            merged.append((path, "fill", _filled([each for _, each in found])))
        else:
            if fresh:
                number, new = fresh[0]
                merged.append((path, "create", emptied(new.value)))
                if isinstance(new.value, dict):
                    inside = {(*path, key): _first(value) for key, value in new.value.items()}
                    history[number].update(inside)
                    paths.extend(key for key in inside if key not in paths)
            merged += _merge_entries_of(path, found, merging)
    return merged


_OTHERS = (Value, Members, Gone)


def _lists_anew(edits: Sequence[Edit], count: int) -> list[list[Any]]:
    """Return the lists of tensors that all microbatches have made in place of the one before; empty if they have not.

    Such as the outputs of layers, in a list that each step clears first.
    """
    found = [edit.entries if isinstance(edit, Added) else edit.value for edit in edits if not isinstance(edit, _OTHERS)]
    lists = [list(each) for each in found]
    are_anew = len(lists) == count > 1 and all(isinstance(edit, Whole) for edit in edits[1:])
    if not are_anew or not all(isinstance(entry, Tensor) for each in lists for entry in each):
        return []
    seen = {id(entry) for each in lists for entry in each}
    return lists if len(seen) == sum(map(len, lists)) and len({*map(len, lists)}) == 1 else []


def _filled(edits: Sequence[Edit]) -> list[Any] | set[Any]:
    """Return what a list or set holds after changes one after the other, of which one has changed it as a whole."""
    value: Any = []
    for edit in edits:
        if isinstance(edit, (Whole, Fresh)):
            value = set(edit.value) if isinstance(edit.value, set) else list(edit.value)
        elif isinstance(edit, Added):
            value.extend(edit.entries)
        elif isinstance(edit, Members):
            value |= edit.added
    return value


def _first(value: Any) -> Edit:
    return Fresh(value) if is_container(value) else Value(MISSING, value, False)


def _merge_entries_of(path: Path, found: Sequence[tuple[int, Any]], merging: Merging) -> list[Change]:
    """Return how what microbatches added to a list, deque or set is added at once."""
    values = [edit.value if isinstance(edit, Fresh) else edit[0] for _, edit in found]
    if isinstance(values[0], set):
        return [(path, "join", set().union(*values))]
    if isinstance(values[0], dict):
        return []
    return [(path, "extend", merge_entries([list(value) for value in values], merging, label_of(path)))]


def _merge_values(path: Path, found: Sequence[tuple[int, Value]], merging: Merging) -> Change:
    """Return what one step on the whole batch would leave in a number, tensor or array.

    That is the mean where the self-check has found so; each microbatch has begun with the value before the batch then.
    Else it is what the last one left, but tensors with a row per sample are concatenated.
    """
    values = [edit.after for _, edit in found]
    before, after = found[0][1].before, values[-1]
    label, rules, samples = label_of(path), merging.rules, merging.samples
    refuse_unknown(rules, label)
    rule = rule_of(rules, label)
    if rule in MEANS and isinstance(after, (bool, int, float, Tensor, np.ndarray, np.generic)):
        shares = _shares(rule, samples, merging.weights)
        after = _mean(before, {number: edit.after for number, edit in found}, shares)
    elif ends := _ends(found, len(samples)):
        is_number = not isinstance(ends[0], (Tensor, np.ndarray))
        # A running mean may have as many rows by chance.
        is_running = isinstance(before, type(values[0])) and np.shape(before) == np.shape(values[0])
        are_rows = not is_number and merging.is_per_sample(ends) and not is_running
        if merging.kind(label, f"{'rows' if are_rows else 'last'} {0 if is_number else ends[0].ndim}") != "last":
            merged = merge_outputs(ends, merging, label)
            # A list of tensors that do not fit together is no buffer.
            after = merged if is_number or isinstance(merged, type(after)) else after
    return path, "write" if found[0][1].in_place else "set", after


def _ends(found: Sequence[tuple[int, Value]], count: int) -> list[Any]:
    """Return the numbers, or tensors, that each of several microbatches has left; nothing if one has left another."""
    edits = {number: edit.after for number, edit in found}
    ends = [found[0][1].before]
    for number in range(count):
        ends.append(edits.get(number, ends[-1]))
    kinds = [(int, float), (Tensor, np.ndarray)]
    is_one = any(all(isinstance(end, kind) and not isinstance(end, bool) for end in ends[1:]) for kind in kinds)
    return ends[1:] if is_one and count > 1 else []


def _shares(rule: str, samples: Sequence[int], weights: Sequence[float]) -> Sequence[float]:
    return [count / sum(samples) for count in samples] if rule == "samples" else weights


def _mean(before: Any, values: Mapping[int, Any], shares: Sequence[float]) -> Any:
    after = next(iter(values.values()))
    # A microbatch that left the value alone has the old one.
    every = [values.get(number, 0 if before is MISSING else before) for number in range(len(shares))]
    total = sum(share * value for share, value in zip(shares, every))
    if isinstance(after, Tensor):
        total = torch.as_tensor(total, device=after.device)
        return (total if after.is_floating_point() or after.is_complex() else total.round()).to(after.dtype)
    if isinstance(after, np.ndarray):
        return (np.round(total) if after.dtype.kind in "iu" else np.asarray(total)).astype(after.dtype)
    return round(total) if isinstance(after, (int, np.integer)) else total


def _apply(module: LightningModule, start: Snapshot, changes: Sequence[Change], device: torch.device) -> None:
    """Change what a module keeps, which is as it was in `start`."""
    for path, action, value in changes:
        holder, key = start.holder(path), path[-1]
        value = pytree.tree_map_only(Elsewhere, lambda unknown: unknown.placeholder(device), to_device(value, device))
        if action == "create":
            put(holder, key, value)
        elif action == "remove":
            _remove(holder, key)
        elif action == "set":
            put(holder, key, value)
        elif action == "write":
            original = start.original(path)
            if isinstance(original, Tensor) and original.shape == value.shape and original.dtype == value.dtype:
                # Others may hold the tensor, which is the same one after the step.
                with torch.no_grad(), torch.inference_mode(original.is_inference()):
                    original.copy_(value)
                value = original
            elif isinstance(original, np.ndarray) and original.shape == value.shape:
                original[...] = value
                value = original
            put(holder, key, value)
        else:
            target = start.entries_of(holder)[key] if path else holder
            if action == "fill":
                target.clear()
            target.update(value) if isinstance(target, (dict, set)) else target.extend(value)


def _remove(holder: Any, key: Any) -> None:
    if not isinstance(holder, (list, deque)):
        (holder if isinstance(holder, dict) else vars(holder)).pop(key, None)


@contextmanager
def side_effects_discarded(module: LightningModule) -> Iterator[None]:
    """Drop what steps log, remember and count inside the block."""
    metrics = [MetricSnapshot(child) for child in module.modules() if isinstance(child, (Metric, MetricCollection))]
    before = Snapshot(module, with_buffers=False)
    trainer = TrainerState(module)
    inside = [
        Snapshot(child, with_buffers=False)
        for child in module.modules()
        if child is not module and is_users(type(child))
    ]
    try:
        with log_recorded(module, []):
            yield
    finally:
        for metric in metrics:
            metric.restore()
        trainer.restore()
        # In place: the module as it was before the block is known by its objects, see `skeleton`.
        before.restore(in_place=True)
        # Tensors of other stages are freed inside the block, or moved to the device.
        for child in inside:
            child.restore(removes=False, tensors=False, in_place=True)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put back at the end of the block what buffers held, in place: layers and the user's code may refer to them."""
    before = {n: b.detach().clone() for n, b in module.named_buffers() if type(b) is Tensor and not b.is_meta}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in before and not buffer.is_meta and buffer.shape == before[name].shape:
                    buffer.copy_(before[name])
