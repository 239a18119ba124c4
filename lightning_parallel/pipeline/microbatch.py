"""Microbatches: split a batch of any structure, and merge the results of a step on its parts.

batch      {"ids": (7, 32), "mask": (7, 32), "names": 7 strings, "temperature": 0.5}   into 3
parts      {"ids": (3, 32), "mask": (3, 32), "names": 3 strings, "temperature": 0.5}, (2, ...), (2, ...)

outputs    {"loss": 0.5, "logits": (3, 10)}, {"loss": 0.7, "logits": (2, 10)}   weights .6, .4
merged     {"loss": 0.58, "logits": (5, 10)}
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_parallel.compat import fields_of, is_users_object
from lightning_parallel.compat.torch import pytree

__all__ = [
    "RETURNED",
    "UNCOUNTED",
    "WHOLE_BATCHES",
    "LeftOutCache",
    "ADDED",
    "LIST_KINDS",
    "Merging",
    "add_to_text",
    "chosen_samples",
    "MissingLossError",
    "loss_of",
    "SplitBatch",
    "count_samples",
    "entries_of",
    "few_samples",
    "is_numeric",
    "StepResult",
    "merge_outputs",
    "LOGGED",
    "map_tensors",
    "merge_entries",
    "in_words",
    "num_samples",
    "other_kinds",
    "own_copy",
    "reduce_logged",
    "rule_of",
    "split_batch",
    "split_by",
    "split_lists",
    "tell_microbatch",
    "tensors_inside",
    "microbatch_under_way",
    "under_way",
    "without_caches",
]


_under_way: int | None = None


@contextmanager
def under_way(microbatch: int) -> Iterator[None]:
    """Tell code inside the block which microbatch it is for."""
    global _under_way
    _under_way = microbatch
    try:
        yield
    finally:
        _under_way = None


def microbatch_under_way() -> int | None:
    """Return the number of the microbatch whose forward runs on a stage; None elsewhere, as in a dry run."""
    return _under_way


SplitBatch = Callable[[Any, int], list[Any]]
"""(batch, n) -> at most n microbatches, the same on every rank."""

# Repeated in every microbatch. Other types are refused, because they may or may not hold samples.
_WHOLE = (type(None), str, bytes, bool, int, float, complex, Enum, torch.dtype, torch.device, np.generic)


@dataclasses.dataclass
class StepResult:
    """The result of one step through the pipeline.

    Attributes:
        microbatches: The parts of the batch.
        outputs: The results of the step for each microbatch, detached; empty except on the rank of the last stage.
        weights: The share of each microbatch in the loss; they sum to 1.
        loss: Sum of the microbatches' losses by their weights, on the rank of the last stage in training.
        shared: A value of the last stage, on every rank; None if the caller asks for none.
    """

    microbatches: list[Any]
    outputs: list[Any]
    weights: list[float]
    loss: Tensor | None
    shared: Any = None


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split `batch` into up to `num_microbatches` parts whose sizes differ by at most one sample, larger ones first.

    Tensors and arrays are split along dimension 0, and so are lists without tensors that have one entry per sample.
    Tuples, lists, dicts, named tuples, dataclasses and `UserDict`s (Hugging Face's `BatchEncoding`) are rebuilt around
    their parts. Numbers, strings and tensors without dimensions are repeated. Fewer samples give fewer microbatches.

    Raises:
        ValueError: If two entries differ in their number of samples, or an entry cannot be split; names its key.
    """
    if num_microbatches == 1:
        return [batch]  # even a batch that cannot be split
    # Every rank splits the same batch by itself, so the sizes must not depend on anything but the batch.
    samples = num_samples(batch)
    count = min(num_microbatches, samples)
    if count <= 1:
        return [batch]
    size, longer = divmod(samples, count)
    bounds = accumulate([size + (part < longer) for part in range(count)], initial=0)
    return [_part(batch, slice(start, stop), samples) for start, stop in pairwise(bounds)]


def few_samples(batch: Any, count: int) -> Any:
    """Return `count` samples of a batch: the first ones, but the middle one is the sample least like the first.

    The measure is the number of tokens that are padded, masked or ignored. It shows whether a loss is a mean over
    samples or over tokens.

    Raises:
        ValueError: See `split_batch`.
    """
    samples = num_samples(batch)
    if samples <= count:
        return batch
    counts = torch.zeros(samples, dtype=torch.int64)
    for _, value in entries_of(batch):
        tensor = torch.as_tensor(value)
        # Only integers show ignored entries: tokens, masks and labels.
        if tensor.dim() > 1 and not (tensor.is_floating_point() or tensor.is_complex()):
            # Zero is the usual padding, also of a mask.
            counts += ((tensor != 0) & (tensor != _IGNORED)).flatten(1).sum(1).cpu()
    chosen = list(range(count))
    other = int((counts - counts[0]).abs().argmax())
    # Among the first samples, it is chosen already.
    if other >= count:
        chosen[count // 2] = other
    return _part(batch, chosen, samples)


def chosen_samples(batch: Any, chosen: list[int]) -> Any:
    """Return a batch of the samples at these positions.

    Raises:
        ValueError: See `split_batch`.
    """
    return _part(batch, chosen, num_samples(batch))


# The label that `cross_entropy` ignores by default.
_IGNORED = -100


def split_by(split: SplitBatch, batch: Any, num_microbatches: int) -> Sequence[Any]:
    """Split `batch` by a function that may be the user's.

    Raises:
        ValueError: If it does not return a list or tuple of microbatches.
    """
    parts = split(batch, num_microbatches)
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ValueError(f"`split_batch` must return a list of microbatches; got {parts!r:.200}")
    return parts


UNCOUNTED = (
    "The microbatches of `split_batch` must have a known number of samples; got a {} without one. Give a"
    " `microbatch_weight` function that returns the weight of a microbatch in the loss"
)


def num_samples(batch: Any) -> int:
    """Return the size of the sample dimension of `batch`: dimension 0 of its tensors.

    Raises:
        ValueError: If there is none, or entries disagree; names their keys.
    """
    sizes = {key: value.shape[0] for key, value in entries_of(batch) if len(value.shape)}
    if not sizes:
        raise ValueError(
            f"A batch must have at least one tensor with a sample dimension; got {type(batch).__name__}. Give a"
            " `split_batch` function for this batch [LP008]"
        )
    key, samples = next(iter(sizes.items()))
    wrong = [f"{_quote(other)} has {size}" for other, size in sizes.items() if size != samples]
    if wrong:
        raise ValueError(
            "All tensors of a batch must have the same number of samples in dimension 0; got a batch where"
            f" {_quote(key)} has {samples} and {', '.join(wrong)}. Leave shared tensors out of the batch, or give a"
            " `split_batch` function. [LP008]"
            f"{split_lists(batch)}"
        )
    return samples


def count_samples(batch: Any) -> int:
    """Return the size of the sample dimension of `batch`; -1 if only the user knows it."""
    try:
        return num_samples(batch)
    except ValueError:
        sizes = {value.shape[0] for _, value in tensors_inside(batch) if len(value.shape)}
        # Tensors that disagree tell nothing.
        return sizes.pop() if len(sizes) == 1 else -1


def entries_of(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every tensor and array, with its key such as `inputs.mask[0]`.

    Raises:
        ValueError: At an entry whose type cannot be split.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested):
            raise ValueError(
                f"{_quote(key)} is a sparse or nested tensor, which cannot be split; give a `split_batch` function"
                " [LP008]"
            )
        yield key, value
    elif isinstance(value, (Mapping, UserDict)):
        for name, item in value.items():
            yield from entries_of(item, f"{key}.{name}" if key else str(name))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from entries_of(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
    # A `PackedSequence` is a tuple, but none of its entries has a row for each sample.
    elif isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        for position, item in enumerate(value):
            yield from entries_of(item, f"{key}[{position}]")
    elif not isinstance(value, _WHOLE):
        raise ValueError(
            f"{_quote(key)} is a {type(value).__name__}, which cannot be split; give a `split_batch` function [LP008]"
        )


def tensors_inside(value: Any, key: str = "", outer: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor | np.ndarray]]:
    """Yield every tensor and array that `entries_of` yields, and every one in attributes of objects of any class."""
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, np.ndarray) or (value.layout == torch.strided and not value.is_nested):
            yield key, value
        return
    # `outer` ends the search where objects refer to each other in circles.
    if len(outer) > _DEEPEST or id(value) in outer or isinstance(value, (*_WHOLE, type, nn.Module)):
        return
    items: Any = ()
    if isinstance(value, (Mapping, UserDict)):
        items = [(f"{key}.{name}" if key else str(name), item) for name, item in value.items()]
    elif isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        items = [(f"{key}[{position}]", item) for position, item in enumerate(value)]
    elif hasattr(value, "__dict__"):
        items = [(f"{key}.{name}" if key else name, item) for name, item in vars(value).items()]
    for name, item in items:
        yield from tensors_inside(item, name, (*outer, id(value)))


_DEEPEST = 6  # levels of objects inside objects, in the search of a batch


def _quote(key: str) -> str:
    return f"`{key}`" if key else "the batch"


def _part(value: Any, chosen: slice | list[int], samples: int) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return value[chosen] if len(value.shape) else value
    # A list such as one string per sample; with tensors of samples inside, its length equals theirs by chance.
    is_plain = isinstance(value, (tuple, list)) and not hasattr(value, "_fields")
    if is_plain and len(value) == samples and not any(len(entry.shape) for _, entry in entries_of(value)):
        return value[chosen] if isinstance(chosen, slice) else type(value)(value[index] for index in chosen)
    return _rebuilt(value, lambda item: _part(item, chosen, samples))


def own_copy(value: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
    """Return `value` with new containers and copies of its tensors and arrays.

    Args:
        value: A microbatch of any structure.
        copies: Is filled with (original, copy) by the `id` of the original, so that a tensor used twice is one copy.
    """
    # The code may read the `.grad` of a leaf that requires a gradient, so that leaf is not copied.
    if isinstance(value, np.ndarray) or (isinstance(value, Tensor) and not value.requires_grad):
        if id(value) not in copies:
            copies[id(value)] = (value, value.clone() if isinstance(value, Tensor) else value.copy())
        return copies[id(value)][1]
    return _rebuilt(value, lambda item: own_copy(item, copies))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with new containers and changed tensors."""
    if isinstance(value, Tensor):
        return change(value)
    return _rebuilt(value, lambda item: map_tensors(item, change))


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same class with changed entries; return any other value unchanged."""
    # Copies keep the user's class and attributes, because its constructor is unknown.
    # Before `Mapping`: a `UserDict` is a mapping that keeps its entries in `data`.
    if isinstance(value, UserDict):
        part: Any = copy.copy(value)
        part.data = {name: change(item) for name, item in value.data.items()}
        return part
    if isinstance(value, Mapping):
        items = {name: change(item) for name, item in value.items()}
        if type(value) is dict:
            return items
        part = copy.copy(value)
        # One by one: outputs of Hugging Face's models refuse `update`.
        for name, item in items.items():
            part[name] = item
        return part
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        part = copy.copy(value)
        for field in dataclasses.fields(value):
            # Unlike `setattr`, this also works on frozen dataclasses.
            object.__setattr__(part, field.name, change(getattr(value, field.name)))
        return part
    if isinstance(value, (tuple, list)):
        items_of = [change(item) for item in value]
        # A named tuple takes its entries one by one, every other class takes them as one argument.
        return type(value)(*items_of) if hasattr(value, "_fields") else type(value)(items_of)
    return value


_NUMBER = re.compile(r"-?\d[\d.]*(?=[^\[\]]*\])")  # inside brackets: a position, or a part of a key


@functools.lru_cache(4096)
def _unnumbered(label: str) -> str:
    return _NUMBER.sub("#", label)


def rule_of(rules: Mapping[str, str], label: str) -> str:
    """Return the rule of the self-check to merge the values of microbatches under a name.

    A new number in the name changes nothing: `self.outputs[self.current_epoch]` has one rule in all epochs.
    """
    found = rules.get(label)
    if found is None:
        alike = {rules[name] for name in _alike(rules, label)}
        found = alike.pop() if len(alike) == 1 else None
    return found or ""


def _alike(names: Iterable[str], label: str) -> list[str]:
    """Return the names that differ from a label in numbers inside brackets only."""
    kind = _unnumbered(label) if label.endswith("]") else ""
    return [name for name in names if _unnumbered(name) == kind] if kind else []


class Merging:
    """Merges the values of microbatches into the value of the batch: by the rules of the self-check, else by sizes.

    A kind is a word, and for tensors and numbers the dimensions of the result:

    - rows: one below the other, such as predictions, flat or not; of lists and dicts, all entries
    - entries: one for all microbatches, such as a mean, a count, a constant; of lists and dicts, one for each place
    - added_rows, added_entries: the same for new lists that hold the entries of the earlier list first
    - sum, first, last

    Args:
        rules: Kinds by key, such as `return['preds']` for the result of a step, and `scores` for an attribute.
        samples: Samples in each microbatch; empty if no value has one entry per sample.
        weights: Share of each in the batch; they sum to 1.
        is_strict: Whether to raise if microbatches cannot be merged by their rule.
        proven: The keys of rules that fitted different values of microbatches in a comparison with one process, with
            `differs`, `unclear` or `first`, see `unproven`; None if nothing is compared. After `first`, the first
            microbatch alone may change the attribute: each microbatch would set it to the same value.

    Attributes:
        found: The kinds that were used, by key.
        unproven: Keys whose rule no comparison has proven, with the reason to compare. `differs`: other rules give
            another value. Equal values of all microbatches fit every rule, and prove none. `unclear`: some other rules
            give the same value, such as the maximum of 2 and 0, which is their sum; or a condition has let some
            microbatches make a container. `either`: another rule gives the same list. `first`: the first microbatch
            alone has changed an attribute. `once`: another microbatch alone has changed it. `new`: no comparison has
            met the key. `changed`: the key is a new attribute.
    """

    def __init__(
        self,
        rules: Mapping[str, str],
        samples: Sequence[int],
        weights: Sequence[float],
        is_strict: bool = False,
        proven: Mapping[str, str] | None = None,
    ) -> None:
        self.rules = rules
        self.samples = samples
        self.weights = weights
        self.is_strict = is_strict
        self.proven = proven
        self.found: dict[str, str] = {}
        self.unproven: dict[str, str] = {}

    def kind(self, key: str, default: str) -> str:
        """Return the kind by which the values under a key are merged."""
        rule = rule_of(self.rules, key)
        if self._is_new(key):
            self.unproven.setdefault(key, "new")
        # A rule for tensors does not fit a list, which may replace the tensors of earlier steps.
        is_fitting = (" " in rule) == (" " in default)
        self.found[key] = rule if rule and is_fitting else default
        return self.found[key].partition(" ")[0]

    def _is_new(self, key: str) -> bool:
        # A comparison itself meets every key for the first time.
        is_real = self.proven is not None and self.is_strict and len(self.weights) > 1
        return is_real and key not in self.rules and not _alike(self.rules, key)

    def _is_proven(self, key: str) -> bool:
        if self.proven is None or self.proven.get(key) == "differs":
            return True
        alike = [] if key in self.rules else _alike(self.rules, key)
        return bool(alike) and all(self.proven.get(name) == "differs" for name in alike)

    def note(self, key: str, values: Sequence[Any], merged: Any, kind: str = "") -> None:
        """Note values of microbatches, and the value of the batch that their rule makes of them."""
        # Placeholders have no data to compare. Their use raises an error elsewhere.
        if self._is_proven(key) or any(isinstance(value, Tensor) and type(value) is not Tensor for value in values):
            return
        alike = [_is_close(value, merged) for value in values]
        if all(alike):
            return
        kind = kind or self.found.get(key, "entries").partition(" ")[0]
        if kind in ("first", "last"):
            is_unclear = sum(alike) > 1
        else:
            is_unclear = kind in ("entries", "sum") and _is_bound(merged, values)
        self.unproven[key] = "unclear" if is_unclear else "differs"

    def note_change(self, key: str, changes: Mapping[int, tuple[Any, Any]]) -> None:
        """Note the values of an attribute before and after the microbatches that have set it, by their numbers."""
        values = {number: after for number, (before, after) in changes.items() if not _is_close(before, after)}
        if not values or len(self.weights) < 2 or self._is_proven(key):
            return
        if self._is_new(key):
            self.unproven[key] = "changed"
        elif [*values] == [0]:
            # Later microbatches have met no reason to change the value, or have found it set already.
            if (self.proven or {}).get(key) != "first":
                self.unproven[key] = "first"
        elif len(values) == 1:
            self.unproven[key] = "once"
        else:
            found = [*values.values()]
            self.note(key, found, found[-1], "last")

    def doubt(self, key: str, why: str) -> None:
        """Note that the values of microbatches under a key alone do not tell the value of the batch."""
        if not self._is_proven(key):
            self.unproven[key] = why

    def note_list(self, key: str, kind: str, lists: Mapping[str, Sequence[Any]]) -> None:
        """Note the lists that each kind of merging makes, and the kind by which they are merged."""
        if self._is_proven(key):
            return
        alike = {other: _is_close_inside([*values], [*lists[kind]]) for other, values in lists.items()}
        is_added = kind.startswith(ADDED)
        if all(alike.values()):
            self.unproven.pop(key, None)
        # The number of entries tells rows from entries. Only the value tells if the earlier list is a part of the new.
        elif any(same for other, same in alike.items() if other.startswith(ADDED) != is_added):
            self.unproven[key] = "either"
        else:
            self.unproven[key] = "differs"

    def is_per_sample(self, values: Sequence[Any]) -> bool:
        """Return whether all values have as many rows, or entries, as their microbatch has samples."""
        # Fewer values than microbatches come from a condition in the step.
        return len(values) == len(self.samples) > 0 and all(
            _length(value) == count for value, count in zip(values, self.samples)
        )

    def rows(self, values: Sequence[Tensor], key: str) -> Any:
        """Put the rows of tensors one below the other."""
        dims = int(self.found[key].partition(" ")[2])
        # Code that drops a dimension of size one, as by `squeeze()`, also does so for a single sample.
        counts = self.samples or [1] * len(values)
        rows = [value[None] if value.dim() == dims - 1 and n == 1 else value for value, n in zip(values, counts)]
        if len({row.shape[1:] for row in rows}) == 1 and rows[0].dim() == dims:
            return torch.cat(rows)
        self.refuse(key, values)
        # Rows may have other lengths in other microbatches.
        return [row for value in values for row in value] if self.is_per_sample(values) else list(values)

    def refuse(self, key: str, values: Sequence[Any]) -> None:
        """Raise a ValueError if values of microbatches must be merged by a rule, and do not fit it."""
        rule = rule_of(self.rules, key).partition(" ")[0]
        if rule and not self._is_proven(key):
            self.unproven[key] = "differs"
        elif self.is_strict and rule:
            name = in_words(key)
            found = ", ".join(
                f"shape {tuple(each.shape)}" if isinstance(each, (Tensor, np.ndarray)) else f"{each!r:.40}"
                for each in values
            )
            raise ValueError(
                f"{name[0].upper()}{name[1:]} must be of one kind in all microbatches of a batch. In the self-check it"
                f" was {_KINDS[rule]}; got {found}. These values cannot be merged into the value of a single-process"
                " run. Set `num_microbatches=1`"
            )


_KINDS = {
    "rows": "one row for each sample",
    "entries": "one value for all samples, such as a mean",
    "added_rows": "the earlier list with entries for each sample",
    "added_entries": "the earlier list with entries for all samples",
    "sum": "a sum",
    "first": "the value of the first microbatch",
    "last": "the value of the last microbatch",
}


def _is_close_inside(one: Any, two: Any) -> bool:
    """Tell whether two containers have equal values up to rounding in the same places."""
    (ones, structure), (twos, other) = pytree.tree_flatten(one), pytree.tree_flatten(two)
    return bool(structure == other) and all(map(_is_close, ones, twos))


def _is_close(one: Any, two: Any) -> bool:
    """Tell whether two values of microbatches are equal up to rounding."""
    arrays = (Tensor, np.ndarray, np.generic)
    if isinstance(one, arrays) and isinstance(two, arrays):
        if one.shape != two.shape:
            return False
        one, two = torch.as_tensor(one), torch.as_tensor(two)
        if one.is_floating_point() or one.is_complex():
            return torch.allclose(one, two.to(one.dtype), rtol=_CLOSE, atol=0.0, equal_nan=True)
        return torch.equal(one, two)
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=_CLOSE) or (math.isnan(one) and math.isnan(two))
    return one is two or (type(one) is type(two) and isinstance(one, _WHOLE) and bool(one == two))


def _is_bound(merged: Any, values: Sequence[Any]) -> bool:
    """Tell whether a number or tensor is the least or the greatest of others."""
    everything = [*values, merged]
    if not all(isinstance(value, (int, float, Tensor, np.ndarray, np.generic)) for value in everything):
        return False
    if len({np.shape(value) for value in everything}) > 1:
        return False
    # On the CPU, since some devices have no double precision.
    *parts, found = (torch.as_tensor(value).cpu() for value in everything)
    if found.is_complex():
        return False
    numbers = torch.stack([part.double() for part in parts])
    return any(_is_close(found.double(), bound) for bound in (numbers.amin(0), numbers.amax(0)))


_CLOSE = 1e-6

ADDED = "added_"
"""The beginning of the kinds of new lists that hold the entries of the earlier list first."""

LIST_KINDS = ("entries", "rows", f"{ADDED}rows", f"{ADDED}entries")
"""The kinds by which lists are merged."""


RETURNED = "return"
"""The key of the result of a step, among the names of attributes."""

LOGGED = "self.log "
"""The beginning of the key of a logged value."""


def in_words(key: str) -> str:
    """Name the value under a key in a sentence."""
    if key.startswith(LOGGED):
        return f"the logged value `{key.removeprefix(LOGGED)}`"
    if not key.startswith(RETURNED):
        return f"`self.{key}`"
    at = key.removeprefix(RETURNED)
    return f"the result of the step{f' at {at}' if at else ''}"


def other_kinds(kind: str) -> list[str]:
    """Return the other kinds by which microbatches might be merged, the most usual first."""
    word, _, dims = kind.partition(" ")
    if not dims:
        return [other for other in LIST_KINDS if other != kind]
    rows = [f"rows {int(dims)}"] if int(dims) else []
    # "last" is the kind of attributes: their means are refused, as a microbatch may read the value of another one.
    words = ("sum",) if word == "last" else ("sum", "entries", "last", "first")
    others = [*rows, f"rows {int(dims) + 1}", *(f"{other} {dims}" for other in words)]
    return [other for other in others if other != kind]


def _length(value: Any) -> int:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.shape[0] if len(value.shape) else -1
    return len(value)


def merge_outputs(values: Sequence[Any], merging: Merging, key: str = RETURNED) -> Any:
    """Merge the outputs of a step for each microbatch into its output for the full batch.

    Without a rule, tensors and lists with one entry per sample are concatenated. Floating-point scalars, and tensors
    without a sample dimension, become the mean by weights. Integers are counts and are added, except Python integers
    that are equal in all microbatches and differ from their sizes. Containers, and the user's objects, are merged entry
    by entry, arrays like tensors. Other values that are equal in all microbatches stay. Anything else becomes a list
    with an entry per microbatch.

    Args:
        values: The output for each microbatch.
        merging: The rules.
        key: The name of the output.
    """
    if len(values) == 1:
        return values[0]
    merged = _merge(values, merging, key)
    if isinstance(values[0], (*_WHOLE, Tensor, np.ndarray)):
        merging.note(key, values, merged)
    return merged


def _merge(values: Sequence[Any], merging: Merging, key: str) -> Any:
    first = values[0]
    # By type and not `isinstance`: booleans are no numbers here.
    if all(type(value) in (int, float) for value in values):
        return _merge_numbers(values, merging, key)
    if any(type(value) is not type(first) for value in values):
        merging.refuse(key, values)
        return list(values)
    if isinstance(first, Tensor):
        return _merge_tensors(list(values), merging, key)
    if isinstance(first, np.ndarray) and not is_numeric(first):
        are_alike = all(np.array_equal(value, first) for value in values)
        return first if are_alike and not merging.is_per_sample(values) else np.concatenate(values)
    if isinstance(first, (np.ndarray, np.generic)):
        merged = _merge_tensors([torch.as_tensor(value) for value in values], merging, key)
        return merged.numpy() if isinstance(merged, Tensor) else [part.numpy() for part in merged]
    if isinstance(first, (Mapping, UserDict)):
        return _merge_mappings(values, merging, key)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        merged = copy.copy(first)
        for field in dataclasses.fields(first):
            entries = [getattr(value, field.name) for value in values]
            object.__setattr__(merged, field.name, merge_outputs(entries, merging, f"{key}[{field.name!r}]"))
        return merged
    if isinstance(first, (list, tuple)):
        return _merge_sequences(values, merging, key)
    if isinstance(first, (set, frozenset)):
        return first.union(*values) if merging.kind(key, "rows") == "rows" else values[-1]
    fields = [fields_of(value) for value in values] if is_users_object(first) else []
    if fields and all(each.keys() == fields[0].keys() for each in fields):
        merged = copy.copy(first)
        for name in fields[0]:
            field_values = [each[name] for each in fields]
            object.__setattr__(merged, name, merge_outputs(field_values, merging, f"{key}[{name!r}]"))
        return merged
    return first if all(value == first for value in values) else list(values)


def is_numeric(array: np.ndarray) -> bool:
    """Tell whether an array holds numbers, and not texts, dates or objects."""
    return array.dtype.kind in "biufc"


def _merge_numbers(values: Sequence[Any], merging: Merging, key: str) -> Any:
    # Add a number of samples or tokens, but not a constant such as the number of classes.
    is_whole = all(type(value) is int for value in values)
    is_count = is_whole and (len(set(values)) > 1 or list(values) == list(merging.samples))
    kind = merging.kind(key, "sum 0" if is_count else "entries 0")
    if kind in ("first", "last"):
        return values[0 if kind == "first" else -1]
    if kind == "rows":
        return list(values)
    if kind == "sum":
        return sum(values)
    if is_whole and len(set(values)) > 1:
        merging.refuse(key, values)
        return list(values)
    return values[0] if is_whole else sum(weight * value for weight, value in zip(merging.weights, values) if weight)


def _merge_tensors(values: list[Tensor], merging: Merging, key: str) -> Any:
    first, is_equal = values[0], len({value.shape for value in values}) == 1
    # Tensors of different shapes can only be rows.
    are_rows = first.dim() > 0 and (merging.is_per_sample(values) or not is_equal)
    kind = merging.kind(key, f"{'rows' if are_rows else 'entries'} {first.dim()}")
    if kind == "rows":
        return merging.rows(values, key)
    if kind in ("first", "last"):
        return values[0 if kind == "first" else -1]
    if not is_equal:
        merging.refuse(key, values)
        return values
    if kind != "sum" and (first.is_floating_point() or first.is_complex()):
        # A microbatch without weight (no tokens in it) may hold 0 / 0, and 0 * nan would spread.
        return torch.stack([weight * value for weight, value in zip(merging.weights, values) if weight]).sum(0)
    # Integers are counts.
    if first.dtype != torch.bool:
        return torch.stack(values).sum(0)
    return first if all(torch.equal(value, first) for value in values) else values


def _merge_mappings(values: Sequence[Any], merging: Merging, key: str) -> Any:
    first = values[0]
    if isinstance(first, Counter):
        merged = copy.copy(first)
        for value in values[1:]:
            merged.update(value)
        return merged
    is_alike = all(value.keys() == first.keys() for value in values)
    if merging.kind(key, "entries" if is_alike else "rows") == "rows":
        # The keys are names or numbers of samples, so the entries do not collide.
        entries = {name: entry for value in values for name, entry in value.items()}
        if len(entries) < sum(map(len, values)):
            merging.refuse(key, values)
            if not merging.is_strict:
                return list(values)  # no rule for the comparison: the last entry may be right by chance
    elif is_alike:
        entries = {n: merge_outputs([value[n] for value in values], merging, f"{key}[{n!r}]") for n in first}
    else:
        return list(values)
    if type(first) is dict:
        return entries
    merged = copy.copy(first)
    # One by one: the `ModelOutput` of Hugging Face refuses `update`.
    for name, entry in entries.items():
        merged[name] = entry
    return merged


def _merge_sequences(values: Sequence[Any], merging: Merging, key: str) -> Any:
    first = values[0]
    is_fixed = hasattr(first, "_fields")
    are_rows = merging.is_per_sample(values) and not is_fixed and not all(isinstance(each, Tensor) for each in first)
    if are_rows and len({type(each) for each in first}) > 1:
        # Such as a pair of logits and a dict, in microbatches that happen to have two samples.
        rows = [{len(leaf) for _, leaf in tensors_inside(value) if len(leaf.shape)} for value in values]
        are_rows = not all(count in found for found, count in zip(rows, merging.samples))
    are_rows |= any(len(value) != len(first) for value in values)
    if not is_fixed and any(map(len, values)):
        # Rows and entries are lists of other lengths, so each of both proves itself in a comparison.
        merging.doubt(key, "differs")
    if not is_fixed and merging.kind(key, "rows" if are_rows else "entries") == "rows":
        return type(first)(entry for value in values for entry in value)
    if any(len(value) != len(first) for value in values):
        merging.refuse(key, values)
        return list(values)
    names = [f".{name}" for name in first._fields] if is_fixed else [f"[{index}]" for index in range(len(first))]
    entries = [merge_outputs([value[i] for value in values], merging, key + name) for i, name in enumerate(names)]
    if isinstance(first, torch.Size) and not all(isinstance(entry, int) for entry in entries):
        return tuple(entries)
    return type(first)(*entries) if is_fixed else type(first)(entries)


def merge_entries(added: Sequence[list[Any]], merging: Merging, key: str, prefix: str = "") -> list[Any]:
    """Merge the entries that one step adds to a list, given each microbatch's entries: one per sample, or as many.

    Args:
        added: The entries of each microbatch.
        merging: The rules.
        key: The name of the list.
        prefix: The beginning of the kind: `ADDED` for new lists that hold the earlier entries.
    """
    entries = [entry for each in added for entry in each]
    counts = {len(each) for each in added}
    is_every = len(added) == len(merging.samples)
    are_rows = len(counts) > 1 or not is_every
    if len(entries) == sum(merging.samples) and is_every:
        are_rows = not _is_per_step(entries, merging.samples)
    kind = merging.kind(key, prefix + ("rows" if are_rows else "entries"))
    if kind.endswith("rows") or len(counts) > 1 or not is_every:
        return entries
    count = counts.pop()
    # Every `count`-th entry comes from the same place of another microbatch.
    return [merge_outputs(entries[n::count], merging, f"{key}[{n}]") for n in range(count)]


def _is_per_step(added: list[Any], samples: Sequence[int]) -> bool:
    """Return whether entries, as many as the samples, still belong to steps: figures, or tensors of samples."""
    leaves = pytree.tree_leaves(added)
    if any(isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] in samples for leaf in leaves):
        return True
    return max(samples) == 1 and all(isinstance(leaf, (float, Tensor)) for leaf in leaves)


def reduce_logged(values: Tensor, sizes: Sequence[float], reduce_fx: str | Callable[[Any], Any]) -> Tensor:
    """Reduce the stacked values that microbatches logged, by the rule of `self.log`; means are weighted by `sizes`."""
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if kind in ("mean", "avg"):
        values = values if values.is_floating_point() else values.float()
        shares = (torch.tensor(sizes, dtype=values.dtype) / sum(sizes)).to(values.device, non_blocking=True)
        # A microbatch without weight (no tokens in it) may hold 0 / 0, and 0 * nan would spread.
        return torch.tensordot(shares, torch.where(shares.view(-1, *[1] * (values.dim() - 1)) > 0, values, 0.0), 1)
    if kind in ("sum", "max", "min"):
        return getattr(torch, kind if kind == "sum" else f"a{kind}")(values, 0)
    assert callable(reduce_fx)
    return reduce_fx(values)


def tell_microbatch(error: BaseException, microbatches: Sequence[Any], number: int) -> None:
    """Add to an error of a step that the step ran on a microbatch, and which lists were split by their length."""
    if len(microbatches) == 1:
        return
    counts = [count_samples(microbatch) for microbatch in microbatches]
    of = f"{counts[number]} of the {sum(counts)} samples of its batch" if min(counts) >= 0 else "a part of its batch"
    add_to_text(error, f"The step ran on a microbatch: {of}. {WHOLE_BATCHES}{split_lists(microbatches[number])}")


WHOLE_BATCHES = "A step that needs full batches gets them with `num_microbatches=1`."


def add_to_text(error: BaseException, text: str) -> None:
    """Add sentences to the text of an error, or to its notes if its text is not its argument."""
    if text in str(error):
        return
    if error.args == (str(error),):
        error.args = (f"{error}\n{text}",)
    else:
        # As `add_note` does, which Python 3.10 lacks.
        error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), text]


def split_lists(batch: Any) -> str:
    """Name the lists of a batch that are split with its samples, or that look like one entry for each sample."""
    counts = {value.shape[0] for _, value in tensors_inside(batch) if len(value.shape)}
    plain, listed = [], []
    for key, items in _lists_in(batch):
        if any(True for _ in tensors_inside(items)):
            # Two tensors of the same samples are common as well: ids and labels, or two views.
            is_pair = len(items) == 2 and all(isinstance(item, (Tensor, np.ndarray)) for item in items)
            if _are_alike(items) and not (is_pair and len(counts) == 1):
                listed.append(_quote(key))
        elif counts == {len(items)}:
            plain.append(_quote(key))
    text = ""
    if plain:
        text += (
            f" The list {' and '.join(plain)} has as many entries as the batch has samples, so it was split with them."
            " Keep a list that belongs to no sample in the module, or give a `split_batch` function."
        )
    if listed:
        example = _LIST_EXAMPLE if "the batch" in listed else _COLUMNS_EXAMPLE
        if isinstance(batch, Mapping):
            example = _DICT_EXAMPLE
        text += (
            f" If there is one entry per sample in {' and '.join(listed)}, give functions that know this batch, such"
            f" as:\n{example}\n"
            "[LP009]"
        )
    return text


_LIST_EXAMPLE = """\
    def split(batch, parts):
        size = -(-len(batch) // parts)
        return [batch[start : start + size] for start in range(0, len(batch), size)]

    PipelineParallelStrategy(..., split_batch=split, microbatch_weight=len)"""
_COLUMNS_EXAMPLE = """\
    def split(batch, parts):  # of columns with an entry for each sample, such as (images, targets)
        count = len(batch[0])
        size = -(-count // parts)
        return [tuple(column[start : start + size] for column in batch) for start in range(0, count, size)]

    PipelineParallelStrategy(..., split_batch=split, microbatch_weight=lambda batch: len(batch[0]))"""

_DICT_EXAMPLE = """\
    def split(batch, parts):  # where each value of the dict has an entry for each sample
        count = len(next(iter(batch.values())))
        size = -(-count // parts)
        starts = range(0, count, size)
        return [{name: value[start : start + size] for name, value in batch.items()} for start in starts]

    PipelineParallelStrategy(..., split_batch=split, microbatch_weight=lambda batch: len(next(iter(batch.values()))))"""


def _lists_in(value: Any, key: str = "") -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the plain lists and tuples of two or more entries in a batch, from outside to inside."""
    if isinstance(value, (Mapping, UserDict)):
        for name, item in value.items():
            yield from _lists_in(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence) and not hasattr(value, "_fields"):
        if len(value) > 1:
            yield key, value
        if not _are_alike(value):
            for position, item in enumerate(value):
                yield from _lists_in(item, f"{key}[{position}]")


def _are_alike(items: Sequence[Any]) -> bool:
    """Return whether entries have one structure, like samples and unlike the columns of a batch."""

    def structure(value: Any) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            return (type(value), str(value.dtype), len(value.shape))
        if isinstance(value, (Mapping, UserDict)):
            return (type(value), tuple((name, structure(item)) for name, item in value.items()))
        if isinstance(value, (list, tuple)):
            entries = [structure(item) for item in value]
            # Entries that are alike make lists of any length alike.
            return (type(value), tuple(dict.fromkeys(entries)) if len({*entries}) <= 1 else tuple(entries))
        return type(value)

    return len(items) > 1 and len({structure(item) for item in items}) == 1


class LeftOutCache:
    """Replaces a cache of keys and values in the result of a step. Each rank has a part of it, so reads are refused."""

    def __init__(self, key: str) -> None:
        self.__dict__["key"] = key

    def __getattr__(self, name: str) -> Any:
        # Copies and pickles ask for methods that the object may lack.
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index: Any) -> Any:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AttributeError(
            f"The step returned a cache under `{self.key}`. Each rank holds a part of the cache, so hooks cannot read"
            " it. Hooks can read the loss, logits or hidden states. Return the needed parts of the cache as tensors, or"
            " call the model with `use_cache=False`"
        )


def without_caches(output: Any, key: str = RETURNED) -> Any:
    """Return the result of a step, with a `LeftOutCache` for each cache that models keep for generating text."""
    # By name, because transformers is optional.
    if any(base.__name__.endswith("Cache") for base in type(output).__mro__) and hasattr(output, "__dict__"):
        return output if isinstance(output, LeftOutCache) else LeftOutCache(key)
    if isinstance(output, MutableMapping):
        entries = {name: without_caches(item, f"{key}[{name!r}]") for name, item in output.items()}
        changed = {name: item for name, item in entries.items() if item is not output[name]}
        part = copy.copy(output) if changed else output
        for name, item in changed.items():  # one by one, see `_merge_mappings`
            part[name] = item
        return part
    if type(output) in (list, tuple):
        items = [without_caches(item, f"{key}[{position}]") for position, item in enumerate(output)]
        return output if all(one is two for one, two in zip(items, output)) else type(output)(items)
    return output


class MissingLossError(ValueError):
    """A training step returned no loss."""


def loss_of(result: Any) -> Tensor:
    """Return the loss of a step's result: the tensor itself, or the entry `loss`; otherwise raise MissingLossError."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise MissingLossError(
            f"The step must return its loss, or a dict with the key `loss`; got {type(result).__name__}. A pipeline"
            " cannot skip a microbatch"
        )
    return loss
