"""Join what a step returned for each microbatch into what it would have returned for the whole batch.

samples 3, 2     {"loss": 0.5, "logits": (3, 10)}, {"loss": 0.7, "logits": (2, 10)}
weights .6, .4   {"loss": 0.58, "logits": (5, 10)}
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["join_outputs"]


def join_outputs(values: Sequence[Any], samples: Sequence[int], weights: Sequence[float]) -> Any:
    """One value for the whole batch.

    Tensors and lists with one entry per sample are concatenated; floating-point scalars, and tensors without a sample
    dimension, become the mean by `weights`; integers are counts and are added, but for Python's that are equal in all
    microbatches and not their sizes. Containers are joined entry by entry, arrays as tensors are. What is equal for all
    microbatches stays; anything else becomes a list with an entry per microbatch.

    Args:
        values: What the step gave for each microbatch.
        samples: Samples in each microbatch; empty where nothing is one entry per sample.
        weights: Share of each in the batch; they sum to 1.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if any(type(value) is not type(first) for value in values):
        return list(values)
    if isinstance(first, Tensor):
        return _join_tensors(list(values), samples, weights)
    if isinstance(first, (np.ndarray, np.generic)):
        joined = _join_tensors([torch.as_tensor(value) for value in values], samples, weights)
        return joined.numpy() if isinstance(joined, Tensor) else [part.numpy() for part in joined]
    if isinstance(first, (Mapping, UserDict)):
        return _join_mappings(values, samples, weights)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        joined = copy.copy(first)
        for field in dataclasses.fields(first):
            entries = [getattr(value, field.name) for value in values]
            object.__setattr__(joined, field.name, join_outputs(entries, samples, weights))
        return joined
    if isinstance(first, (list, tuple)):
        return _join_sequences(values, samples, weights)
    if isinstance(first, float):
        return sum(weight * value for weight, value in zip(weights, values))
    if type(first) is int and (len(set(values)) > 1 or list(values) == list(samples)):
        return sum(values)
    return first if all(value == first for value in values) else list(values)


def _join_tensors(values: list[Tensor], samples: Sequence[int], weights: Sequence[float]) -> Any:
    if samples and all(value.dim() > 0 and value.shape[0] == count for value, count in zip(values, samples)):
        if len({value.shape[1:] for value in values}) == 1:
            return torch.cat(values)
        return [row for value in values for row in value]  # lengths that differ between microbatches
    if len({value.shape for value in values}) > 1:
        return values
    if values[0].is_floating_point() or values[0].is_complex():
        return torch.stack([weight * value for weight, value in zip(weights, values)]).sum(0)
    if values[0].dtype != torch.bool:
        return torch.stack(values).sum(0)
    return values[0] if all(torch.equal(value, values[0]) for value in values) else values


def _join_mappings(values: Sequence[Any], samples: Sequence[int], weights: Sequence[float]) -> Any:
    first = values[0]
    if any(value.keys() != first.keys() for value in values):
        return list(values)
    entries = {key: join_outputs([value[key] for value in values], samples, weights) for key in first}
    if type(first) is dict:
        return entries
    joined = copy.copy(first)
    for key, entry in entries.items():
        joined[key] = entry
    return joined


def _join_sequences(values: Sequence[Any], samples: Sequence[int], weights: Sequence[float]) -> Any:
    first = values[0]
    per_sample = len(samples) > 0 and all(len(value) == count for value, count in zip(values, samples))
    if per_sample and not hasattr(first, "_fields") and not all(isinstance(entry, Tensor) for entry in first):
        return type(first)(entry for value in values for entry in value)
    if any(len(value) != len(first) for value in values):
        return type(first)(entry for value in values for entry in value)
    entries = [join_outputs([value[i] for value in values], samples, weights) for i in range(len(first))]
    return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
