"""Batches of any structure, cut along the sample dimension and put together again."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import BaseModelOutput

from lightning_parallel.pipeline.microbatch import (
    Merging,
    merge_entries,
    merge_outputs,
    num_samples,
    split_batch,
    without_caches,
)
from lightning_parallel.strategies.self_check.observed import numbers_in


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    scale: float
    names: list[Any]


def test_sizes_differ_by_at_most_one():
    for samples in (1, 4, 7, 12):
        parts = split_batch(torch.arange(samples), 4)
        sizes = [len(part) for part in parts]
        assert len(sizes) == min(4, samples)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert torch.equal(torch.cat(parts), torch.arange(samples))


def test_structures_are_rebuilt():
    x = torch.arange(10).view(5, 2)
    batch = {
        "pair": Pair(x, x[:, 0]),
        "nested": [(x, None), {"scalar": torch.tensor(3.0), "array": np.arange(5)}],
        "example": Example(x, 0.5, list("abcde")),
        "flag": True,
        "names": ["one", "two"],
        "output": BaseModelOutput(last_hidden_state=x),
    }
    first, second = split_batch(batch, 2)
    assert torch.equal(second["output"].last_hidden_state, x[3:])
    assert isinstance(first["pair"], Pair)
    assert torch.equal(first["pair"].image, x[:3])
    assert torch.equal(second["pair"].label, x[3:, 0])
    assert torch.equal(second["nested"][0][0], x[3:])
    assert first["nested"][1]["scalar"] == 3.0
    assert second["nested"][1]["array"].tolist() == [3, 4]
    assert isinstance(second["example"], Example)
    assert (second["example"].scale, second["example"].names) == (0.5, ["d", "e"])
    assert first["names"] == second["names"] == ["one", "two"], "not one per sample"
    assert first["flag"] is True
    assert num_samples(first) == 3


def test_batch_encoding():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(8).view(4, 2), "labels": torch.arange(4)})
    first, second = split_batch(batch, 2)
    assert type(second) is transformers.BatchEncoding
    assert second.input_ids.tolist() == [[4, 5], [6, 7]]
    assert first["labels"].tolist() == [0, 1]
    assert batch["labels"].tolist() == [0, 1, 2, 3], "the batch itself is left alone"


def test_lists_with_an_entry_per_sample():
    targets = [{"label": 3, "box": (0.5, 1.0), "weight": torch.tensor(2.0)}, {"label": 4}, {"label": 5}]
    point = Position(1.0, 2.0, 3.0)
    first, second = split_batch({"x": torch.ones(3, 2), "targets": targets, "point": point, "views": [[1, 2]]}, 2)
    assert first["targets"] == targets[:2]
    assert second["targets"] == targets[2:]
    assert first["point"] == second["point"] == point, "a named tuple is one thing"
    assert second["views"] == [[1, 2]]


class Position(NamedTuple):
    x: float
    y: float
    z: float


class Graph:
    pass


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.ones(4, 2), "deep": {"mask": torch.ones(3, 3)}}, "`x` has 4 and `deep.mask` has 3"),
        ({"x": torch.ones(4), "graph": Graph()}, "`graph` is a Graph.*`split_batch` function"),
        ([torch.ones(4), pack_sequence([torch.ones(3), torch.ones(2)])], r"`\[1\]` is a PackedSequence"),
        ({"x": torch.eye(4).to_sparse()}, "`x` is a sparse or nested tensor"),
        ({"x": 3}, "at least one tensor with a sample dimension; got dict"),
        (torch.tensor(1.0), "got Tensor"),
    ],
)
def test_what_cannot_be_cut_is_named(batch, message):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, 2)


def test_results_that_steps_of_one_sample_collect_in_dicts():
    added = [[{"loss": torch.tensor(loss), "scores": torch.full((1, 3), loss)}] for loss in (1.0, 3.0)]
    (merged,) = merge_entries(added, Merging({}, [1, 1], [0.5, 0.5]), "scores")
    assert merged["loss"] == 2.0
    assert torch.equal(merged["scores"], torch.tensor([[1.0] * 3, [3.0] * 3]))
    words = [[{"word": "a"}], [{"word": "b"}]]
    assert merge_entries(words, Merging({}, [1, 1], [0.5, 0.5]), "words") == [{"word": "a"}, {"word": "b"}]


def test_a_tuple_with_as_many_entries_as_samples_by_chance_holds_columns():
    parts = [(torch.full((2, 3), float(n)), {"ids": torch.tensor([n, n])}) for n in range(2)]
    logits, rest = merge_outputs(parts, Merging({}, [2, 2], [0.5, 0.5]))
    assert logits.shape == (4, 3)
    assert rest["ids"].tolist() == [0, 0, 1, 1]
    texts = merge_outputs([["a", None], ["b", "c"]], Merging({}, [2, 2], [0.5, 0.5]))
    assert texts == ["a", None, "b", "c"]


@pytest.mark.parametrize(
    ("values", "rule", "shown"),
    [
        ([0.0, 0.0], "", {}),
        ([0.0, 1.0], "", {"return": "differs"}),
        ([torch.tensor(1), torch.tensor(0)], "", {"return": "unclear"}),  # the sum is the maximum
        ([torch.tensor(2), torch.tensor(1)], "", {"return": "differs"}),
        ([3.0, 1.0], "first 0", {"return": "differs"}),
        ([3.0, 1.0, 3.0], "first 0", {"return": "unclear"}),
        ([True, False], "", {"return": "differs"}),
    ],
)
def test_only_values_that_other_rules_would_merge_otherwise_prove_a_rule(values, rule, shown):
    count = len(values)
    merging = Merging({"return": rule} if rule else {}, [2] * count, [1 / count] * count, proven={})
    merge_outputs(values, merging)
    assert merging.unproven == shown
    known = Merging({"return": rule or "sum 0"}, [2] * count, [1 / count] * count, proven={"return": "differs"})
    merge_outputs(values, known)
    assert not known.unproven


class KeyCache:
    """As those of Hugging Face's models, of which each tensor-parallel rank holds its heads."""

    def __init__(self, keys):
        self.keys = keys


def test_caches_that_a_step_returns_are_neither_compared_nor_given_to_hooks():
    output = {"loss": torch.ones(()), "logits": torch.ones(4, 5), "past": (KeyCache(torch.ones(4, 2)), 3)}
    found = without_caches(output)
    assert output["past"][0].keys.shape == (4, 2)
    assert [*numbers_in(found, "")] == ["['loss']", "['logits']", "['past'][1]"]
    assert without_caches(found) is found
    copied = pickle.loads(pickle.dumps(copy.deepcopy(found)))
    with pytest.raises(AttributeError, match=r"a cache under `return\['past'\]\[0\]`.*use_cache=False"):
        copied["past"][0].keys  # noqa: B018
    same = {"loss": torch.ones(()), "hidden": (torch.ones(2), torch.ones(2))}
    assert without_caches(same) is same
