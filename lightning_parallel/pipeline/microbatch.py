"""Split a batch of any structure into microbatches along the sample dimension.

{"ids": (7, 32), "mask": (7, 32), "names": 7 strings, "temperature": 0.5}   into 3
{"ids": (3, 32), "mask": (3, 32), "names": 3 strings, "temperature": 0.5}, (2, ...), (2, ...)
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["Split", "num_samples", "split_batch"]

Split = Callable[[Any, int], list[Any]]
"""(batch, microbatches) -> at most so many microbatches, the same on every rank."""

_WHOLE = (type(None), str, bytes, bool, int, float, complex, Enum, torch.dtype, torch.device, np.generic)


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split `batch` into up to `num_microbatches` parts whose sizes differ by at most one sample, larger ones first.

    Tensors and arrays are cut along dimension 0, lists without tensors that have one entry per sample too; tuples,
    lists, dicts, named tuples, dataclasses and `UserDict`s (Hugging Face's `BatchEncoding`) are rebuilt around their
    parts; numbers, strings and tensors without dimensions are repeated. Fewer samples give fewer microbatches.

    Raises:
        ValueError: If two entries differ in their number of samples, or an entry cannot be cut; names its key.
    """
    samples = num_samples(batch)
    count = min(num_microbatches, samples)
    if count <= 1:
        return [batch]
    size, longer = divmod(samples, count)
    bounds = accumulate([size + (part < longer) for part in range(count)], initial=0)
    return [_part(batch, start, stop, samples) for start, stop in pairwise(bounds)]


def num_samples(batch: Any) -> int:
    """Size of the sample dimension of `batch`: dimension 0 of its tensors.

    Raises:
        ValueError: If there is none, or entries disagree; names their keys.
    """
    sizes = {key: value.shape[0] for key, value in _entries(batch, "") if len(value.shape)}
    if not sizes:
        raise ValueError(
            f"expected a batch with at least one tensor with a sample dimension, got {type(batch).__name__}; "
            "give a `split` function that knows this batch"
        )
    key, samples = next(iter(sizes.items()))
    wrong = [f"{_quote(other)} has {size}" for other, size in sizes.items() if size != samples]
    if wrong:
        raise ValueError(
            f"expected all tensors of a batch to have the same number of samples in dimension 0, but {_quote(key)} has "
            f"{samples} and {', '.join(wrong)}; leave shared tensors out of the batch or give a `split` function"
        )
    return samples


def _entries(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and array, with its key such as `inputs.mask[0]`.

    Raises:
        ValueError: At an entry of a type that cannot be cut.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested):
            raise ValueError(
                f"{_quote(key)} is a sparse or nested tensor, which cannot be cut; give a `split` function"
            )
        yield key, value
    elif isinstance(value, (Mapping, UserDict)):
        for name, item in value.items():
            yield from _entries(item, f"{key}.{name}" if key else str(name))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _entries(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
    elif isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        for position, item in enumerate(value):
            yield from _entries(item, f"{key}[{position}]")
    elif not isinstance(value, _WHOLE):
        raise ValueError(f"{_quote(key)} is a {type(value).__name__}, which cannot be split; give a `split` function")


def _quote(key: str) -> str:
    return f"`{key}`" if key else "the batch"


def _part(value: Any, start: int, stop: int, samples: int) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return value[start:stop] if len(value.shape) else value
    if isinstance(value, UserDict):
        part: Any = copy.copy(value)
        part.data = {name: _part(item, start, stop, samples) for name, item in value.data.items()}
        return part
    if isinstance(value, Mapping):
        items = {name: _part(item, start, stop, samples) for name, item in value.items()}
        if type(value) is dict:
            return items
        part = copy.copy(value)
        part.update(items)
        return part
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        part = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(part, field.name, _part(getattr(value, field.name), start, stop, samples))
        return part
    if isinstance(value, (tuple, list)):
        is_named = hasattr(value, "_fields")
        if len(value) == samples and not is_named and not any(len(entry.shape) for _, entry in _entries(value, "")):
            return value[start:stop]
        items_of = [_part(item, start, stop, samples) for item in value]
        return type(value)(*items_of) if is_named else type(value)(items_of)
    return value
