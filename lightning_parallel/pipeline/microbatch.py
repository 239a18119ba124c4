"""Microbatches: split a batch of any structure, merge what a step gave for its parts.

batch      {"ids": (7, 32), "mask": (7, 32), "names": 7 strings, "temperature": 0.5}   into 3
parts      {"ids": (3, 32), "mask": (3, 32), "names": 3 strings, "temperature": 0.5}, (2, ...), (2, ...)

outputs    {"loss": 0.5, "logits": (3, 10)}, {"loss": 0.7, "logits": (2, 10)}   weights .6, .4
merged     {"loss": 0.58, "logits": (5, 10)}
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_parallel.compat import is_users_object
from lightning_parallel.compat.torch import pytree

__all__ = [
    "UNCOUNTED",
    "chosen_samples",
    "MissingLossError",
    "loss_of",
    "SplitBatch",
    "count_samples",
    "entries_of",
    "few_samples",
    "StepResult",
    "merge_outputs",
    "map_tensors",
    "merge_entries",
    "num_samples",
    "own_copy",
    "reduce_logged",
    "split_batch",
    "split_by",
    "tensors_inside",
]


SplitBatch = Callable[[Any, int], list[Any]]
"""(batch, n) -> at most n microbatches, the same on every rank."""

# Repeated in every microbatch. Other types are refused, since it is not known whether they have samples.
_WHOLE = (type(None), str, bytes, bool, int, float, complex, Enum, torch.dtype, torch.device, np.generic)


@dataclasses.dataclass
class StepResult:
    """The result of one step through the pipeline.

    Attributes:
        microbatches: The parts of the batch.
        outputs: What the step returned for each microbatch, detached; empty except on the rank of the last stage.
        weights: The share of each microbatch in the loss; they sum to 1.
        loss: Sum of the microbatches' losses by their weights, on the rank of the last stage in training.
    """

    microbatches: list[Any]
    outputs: list[Any]
    weights: list[float]
    loss: Tensor | None


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split `batch` into up to `num_microbatches` parts whose sizes differ by at most one sample, larger ones first.

    Tensors and arrays are cut along dimension 0, lists without tensors that have one entry per sample too; tuples,
    lists, dicts, named tuples, dataclasses and `UserDict`s (Hugging Face's `BatchEncoding`) are rebuilt around their
    parts; numbers, strings and tensors without dimensions are repeated. Fewer samples give fewer microbatches.

    Raises:
        ValueError: If two entries differ in their number of samples, or an entry cannot be cut; names its key.
    """
    if num_microbatches == 1:
        return [batch]  # also one that nobody can cut
    # Every rank splits the same batch by itself, so the sizes must not depend on anything but the batch.
    samples = num_samples(batch)
    count = min(num_microbatches, samples)
    if count <= 1:
        return [batch]
    size, longer = divmod(samples, count)
    bounds = accumulate([size + (part < longer) for part in range(count)], initial=0)
    return [_part(batch, slice(start, stop), samples) for start, stop in pairwise(bounds)]


def few_samples(batch: Any, count: int) -> Any:
    """Return `count` samples of a batch: the first ones, but in the middle of them the one least like the first.

    That is, in what it leaves out: how many tokens are padded, masked or ignored shows whether a loss is a mean over
    samples or over tokens.

    Raises:
        ValueError: As `split_batch`.
    """
    samples = num_samples(batch)
    if samples <= count:
        return batch
    counts = torch.zeros(samples, dtype=torch.int64)
    for _, value in entries_of(batch):
        tensor = torch.as_tensor(value)
        if tensor.dim() > 1 and not (tensor.is_floating_point() or tensor.is_complex()):
            counts += ((tensor != 0) & (tensor != _IGNORED)).flatten(1).sum(1).cpu()
    chosen = list(range(count))
    other = int((counts - counts[0]).abs().argmax())
    if other >= count:
        chosen[count // 2] = other
    return _part(batch, chosen, samples)


def chosen_samples(batch: Any, chosen: list[int]) -> Any:
    """Return a batch of the samples at these positions.

    Raises:
        ValueError: As `split_batch`.
    """
    return _part(batch, chosen, num_samples(batch))


# The label that `cross_entropy` leaves out by default.
_IGNORED = -100


def split_by(split: SplitBatch, batch: Any, num_microbatches: int) -> Sequence[Any]:
    """Split `batch` by a function that may be the user's.

    Raises:
        ValueError: If it does not return a list or tuple of microbatches.
    """
    parts = split(batch, num_microbatches)
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ValueError(f"expected `split_batch` to return a list of microbatches, got {parts!r:.200}")
    return parts


UNCOUNTED = (
    "expected to count the samples of each microbatch, but `split_batch` returns a {}, in which nothing tells their"
    " number; give a `microbatch_weight` function too, which returns by how much a microbatch counts in the loss"
)


def num_samples(batch: Any) -> int:
    """Return the size of the sample dimension of `batch`: dimension 0 of its tensors.

    Raises:
        ValueError: If there is none, or entries disagree; names their keys.
    """
    sizes = {key: value.shape[0] for key, value in entries_of(batch) if len(value.shape)}
    if not sizes:
        raise ValueError(
            f"expected a batch with at least one tensor with a sample dimension, got {type(batch).__name__}; "
            "give a `split_batch` function that knows this batch"
        )
    key, samples = next(iter(sizes.items()))
    wrong = [f"{_quote(other)} has {size}" for other, size in sizes.items() if size != samples]
    if wrong:
        raise ValueError(
            f"expected all tensors of a batch to have the same number of samples in dimension 0, but {_quote(key)} has "
            f"{samples} and {', '.join(wrong)}; leave shared tensors out of the batch or give a `split_batch` function"
        )
    return samples


def count_samples(batch: Any) -> int:
    """Return the size of the sample dimension of `batch`; -1 where nobody but the user knows it."""
    try:
        return num_samples(batch)
    except ValueError:
        sizes = {value.shape[0] for _, value in tensors_inside(batch) if len(value.shape)}
        return sizes.pop() if len(sizes) == 1 else -1


def entries_of(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every tensor and array, with its key such as `inputs.mask[0]`.

    Raises:
        ValueError: At an entry of a type that cannot be cut.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested):
            raise ValueError(
                f"{_quote(key)} is a sparse or nested tensor, which cannot be cut; give a `split_batch` function"
            )
        yield key, value
    elif isinstance(value, (Mapping, UserDict)):
        for name, item in value.items():
            yield from entries_of(item, f"{key}.{name}" if key else str(name))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from entries_of(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
    elif isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        for position, item in enumerate(value):
            yield from entries_of(item, f"{key}[{position}]")
    elif not isinstance(value, _WHOLE):
        raise ValueError(
            f"{_quote(key)} is a {type(value).__name__}, which cannot be split; give a `split_batch` function"
        )


def tensors_inside(value: Any, key: str = "", outer: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor | np.ndarray]]:
    """Yield every tensor and array that `entries_of` yields, and those in attributes of objects of any class."""
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, np.ndarray) or (value.layout == torch.strided and not value.is_nested):
            yield key, value
        return
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


_DEEPEST = 6  # objects inside of objects, where a batch is looked into


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
        copies: Is filled with (original, copy) by the `id` of the original, so that what occurs twice is one copy.
    """
    # A leaf that requires a gradient is one whose `.grad` somebody reads.
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
    """Return a container of the same class with changed entries; other values as they are."""
    # Copies keep the class and the attributes of what the user made, whose constructor is not known.
    if isinstance(value, UserDict):
        part: Any = copy.copy(value)
        part.data = {name: change(item) for name, item in value.data.items()}
        return part
    if isinstance(value, Mapping):
        items = {name: change(item) for name, item in value.items()}
        if type(value) is dict:
            return items
        part = copy.copy(value)
        part.update(items)
        return part
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        part = copy.copy(value)
        for field in dataclasses.fields(value):
            # Also on frozen dataclasses.
            object.__setattr__(part, field.name, change(getattr(value, field.name)))
        return part
    if isinstance(value, (tuple, list)):
        items_of = [change(item) for item in value]
        return type(value)(*items_of) if hasattr(value, "_fields") else type(value)(items_of)
    return value


def merge_outputs(values: Sequence[Any], samples: Sequence[int], weights: Sequence[float]) -> Any:
    """Merge the outputs of a step for each microbatch into its output for the whole batch.

    Tensors and lists with one entry per sample are concatenated; floating-point scalars, and tensors without a sample
    dimension, become the mean by `weights`. Integers are counts and are added, except Python integers that are equal in
    all microbatches and are not their sizes. Containers, and objects of the user's, are merged entry by entry, arrays
    like tensors. Other values that are equal in all microbatches stay; anything else becomes a list with an entry per
    microbatch.

    Args:
        values: The output for each microbatch.
        samples: Samples in each microbatch; empty if no value has one entry per sample.
        weights: Share of each in the batch; they sum to 1.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if any(type(value) is not type(first) for value in values):
        return list(values)
    if isinstance(first, Tensor):
        return _merge_tensors(list(values), samples, weights)
    if isinstance(first, (np.ndarray, np.generic)):
        merged = _merge_tensors([torch.as_tensor(value) for value in values], samples, weights)
        return merged.numpy() if isinstance(merged, Tensor) else [part.numpy() for part in merged]
    if isinstance(first, (Mapping, UserDict)):
        return _merge_mappings(values, samples, weights)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        merged = copy.copy(first)
        for field in dataclasses.fields(first):
            entries = [getattr(value, field.name) for value in values]
            object.__setattr__(merged, field.name, merge_outputs(entries, samples, weights))
        return merged
    if isinstance(first, (list, tuple)):
        return _merge_sequences(values, samples, weights)
    if is_users_object(first) and all(vars(value).keys() == vars(first).keys() for value in values):
        merged = copy.copy(first)
        vars(merged).update(
            {n: merge_outputs([vars(each)[n] for each in values], samples, weights) for n in vars(first)}
        )
        return merged
    if isinstance(first, float):
        return sum(weight * value for weight, value in zip(weights, values) if weight)
    # A number of samples or tokens is added up; a constant such as the number of classes is not.
    if type(first) is int and (len(set(values)) > 1 or list(values) == list(samples)):
        return sum(values)
    return first if all(value == first for value in values) else list(values)


def _merge_tensors(values: list[Tensor], samples: Sequence[int], weights: Sequence[float]) -> Any:
    if samples and all(value.dim() > 0 and value.shape[0] == count for value, count in zip(values, samples)):
        if len({value.shape[1:] for value in values}) == 1:
            return torch.cat(values)
        return [row for value in values for row in value]  # lengths that differ between microbatches
    if len({value.shape for value in values}) > 1:
        return values
    if values[0].is_floating_point() or values[0].is_complex():
        # A microbatch without weight (no tokens in it) may have given 0 / 0.
        return torch.stack([weight * value for weight, value in zip(weights, values) if weight]).sum(0)
    if values[0].dtype != torch.bool:
        return torch.stack(values).sum(0)
    return values[0] if all(torch.equal(value, values[0]) for value in values) else values


def _merge_mappings(values: Sequence[Any], samples: Sequence[int], weights: Sequence[float]) -> Any:
    first = values[0]
    if any(value.keys() != first.keys() for value in values):
        return list(values)
    entries = {key: merge_outputs([value[key] for value in values], samples, weights) for key in first}
    if type(first) is dict:
        return entries
    merged = copy.copy(first)
    # One by one: the `ModelOutput` of Hugging Face refuses `update`.
    for key, entry in entries.items():
        merged[key] = entry
    return merged


def _merge_sequences(values: Sequence[Any], samples: Sequence[int], weights: Sequence[float]) -> Any:
    first = values[0]
    per_sample = len(samples) > 0 and all(len(value) == count for value, count in zip(values, samples))
    if per_sample and not hasattr(first, "_fields") and not all(isinstance(entry, Tensor) for entry in first):
        return type(first)(entry for value in values for entry in value)
    if any(len(value) != len(first) for value in values):
        return type(first)(entry for value in values for entry in value)
    entries = [merge_outputs([value[i] for value in values], samples, weights) for i in range(len(first))]
    return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)


def merge_entries(added: list[Any], samples: Sequence[int], weights: Sequence[float]) -> list[Any]:
    """Return the entries that one step adds: one per sample, or as many as each microbatch added."""
    is_per_sample = len(added) == sum(samples) and not _is_per_step(added, samples)
    count, rest = divmod(len(added), len(samples))
    if is_per_sample or rest:
        return added
    return [merge_outputs(added[entry::count], samples, weights) for entry in range(count)]


def _is_per_step(added: list[Any], samples: Sequence[int]) -> bool:
    """Return whether entries, as many as the samples, are still those of steps: figures, or tensors of samples."""
    leaves = pytree.tree_leaves(added)
    if any(isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] in samples for leaf in leaves):
        return True
    return max(samples) == 1 and all(isinstance(leaf, (float, Tensor)) for leaf in leaves)


def reduce_logged(values: Tensor, sizes: Sequence[float], reduce_fx: str | Callable[[Any], Any]) -> Tensor:
    """Reduce what was logged for each microbatch, stacked, as `self.log` says; means are weighted by `sizes`."""
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if kind in ("mean", "avg"):
        values = values if values.is_floating_point() else values.float()
        shares = (torch.tensor(sizes, dtype=values.dtype) / sum(sizes)).to(values.device, non_blocking=True)
        # A microbatch without weight (no tokens in it) may have given 0 / 0.
        return torch.tensordot(shares, torch.where(shares.view(-1, *[1] * (values.dim() - 1)) > 0, values, 0.0), 1)
    if kind in ("sum", "max", "min"):
        return getattr(torch, kind if kind == "sum" else f"a{kind}")(values, 0)
    assert callable(reduce_fx)
    return reduce_fx(values)


class MissingLossError(ValueError):
    """A training step returned no loss."""


def loss_of(result: Any) -> Tensor:
    """Return the loss of a step's result: the tensor itself, or the entry `loss`, else raise MissingLossError."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise MissingLossError(
            f"expected the step to return its loss, or a dict with the key `loss`, got {type(result).__name__}; "
            "a pipeline cannot skip a microbatch"
        )
    return loss
