"""Checks that ranks make together, and hashes of tensors."""

import pickle
from typing import Any, NamedTuple

import pytest
import torch

from lightning_parallel import comm
from lightning_parallel.comm import fingerprint, fingerprints, row_fingerprints
from lightning_parallel.compat import patched
from tests.harness import distributed

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex128]


@distributed(world_size=2)
def test_errors_and_disagreements_are_raised_everywhere(group):
    with pytest.raises(ValueError, match="(?s)plan.*rank 0: 0.*rank 1: 1"):
        comm.agree("the plan", group.rank, group)
    comm.agree("the plan", "same", group)
    with pytest.raises(TypeError, match="bad" if group.rank else "(?s)bad.*found on rank 1"):
        comm.raise_together(TypeError("bad") if group.rank else None, group)
    comm.raise_together(None, group)


class Point(NamedTuple):
    at: Any
    name: str = "p"


class Opaque:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value


def values_of_steps():
    """Values in an order in which forms repeat and change; the second of a form needs no description."""
    small, large = torch.arange(3, dtype=torch.bfloat16), torch.arange(9000.0).view(9000, 1)
    for step in range(2):
        yield {
            "loss": torch.tensor(1.5 + step),
            "n": 3 + step,
            "x": [True, None, max, "a", (2.5 * step, Point(small))],
            1: {},
        }
    for step in range(2):
        yield [large + step, Point(small + step), torch.empty(0, 2), torch.tensor(True), torch.tensor(2j)]
    yield [large, Point(small, "q"), torch.empty(0, 2), torch.tensor(True), torch.tensor(2j)]
    yield from [None, None, True, 1, 1.0, -(1 << 63), 1 << 63, Opaque(3), {"a": Opaque(4), "b": large}, (), ((),), []]


def is_same(found, value):
    if isinstance(value, torch.Tensor):
        return found.dtype == value.dtype and torch.equal(found, value)
    if isinstance(value, (tuple, list)):
        return type(found) is type(value) and len(found) == len(value) and all(map(is_same, found, value))
    if isinstance(value, dict):
        return list(found) == list(value) and all(is_same(found[key], each) for key, each in value.items())
    return type(found) is type(value) and found == value


@distributed(world_size=3)
def test_a_value_of_any_form_arrives_in_each_step(group):
    broadcast = comm.RepeatedBroadcast(group, 1, torch.device("cpu"))
    for value in values_of_steps():
        outcome = broadcast(lambda value=value: value if group.rank == 1 else None)
        assert not outcome.is_failed
        assert is_same(outcome.value, value)
        assert (outcome.value is value) <= (group.rank == 1 or type(value) in (int, float, bool, type(None), tuple))
    tensor = torch.ones(2)
    once, twice = broadcast(lambda: [tensor, {"again": tensor}]).value
    assert once is twice["again"], "one tensor stays one"


@distributed(world_size=2)
def test_a_failure_of_any_rank_reaches_all_and_keeps_the_form(group):
    broadcast = comm.RepeatedBroadcast(group, 1, torch.device("cpu"))

    def failing():
        raise ValueError("no value")

    assert broadcast(lambda: [1.0, (), ()]).value == [1.0, (), ()]
    with patched(pickle, "dumps", None):
        assert broadcast(lambda: [3.0, (), ()]).value == [3.0, (), ()]
    assert broadcast(lambda: 1.0).value == 1.0
    for failed in range(2):
        # The source meets with a new form, which nobody gets.
        outcome = broadcast(lambda: "new", group.rank == failed)
        assert outcome == (True, None, None)
    outcome = broadcast(failing)
    assert outcome.is_failed
    assert str(outcome.failure) == ("no value" if group.rank else "None")
    outcome = broadcast(lambda: Opaque(lambda: 0))
    assert outcome.is_failed
    assert "pickle" in str(outcome.failure) or group.rank == 0
    with patched(pickle, "dumps", None):
        assert broadcast(lambda: 2.0).value == 2.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype):
    tensor = (torch.randn(3, 2) * 9).to(dtype)
    expected = fingerprint(tensor)
    raw = tensor.view(torch.uint8).view(-1)
    bits = range(8) if dtype != torch.bool else [0]
    for byte in range(len(raw)):
        for bit in bits:
            raw[byte] ^= 1 << bit
            assert fingerprint(tensor) != expected
            raw[byte] ^= 1 << bit
    assert fingerprint(tensor) == expected


def test_places_count_and_strides_do_not():
    tensor = torch.arange(6.0).view(2, 3)
    assert fingerprint(tensor) == fingerprint(tensor.T.contiguous().T)
    assert fingerprint(tensor) != fingerprint(tensor.flip(0))


def test_tensors_are_left_alone_and_longer_ones_hash_in_pieces(monkeypatch):
    tensors = [torch.arange(100), torch.zeros(0), torch.tensor(3.5), torch.randn(70)]
    copies = [tensor.clone() for tensor in tensors]
    whole = fingerprints(tensors)
    monkeypatch.setattr("lightning_parallel.comm.hashes._CHUNK", 32)
    assert fingerprints(tensors) == whole
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies))


def test_rows_are_told_apart_by_evenly_spread_elements():
    rows = torch.randn(4, 3, 1000)
    hashes = row_fingerprints(rows)
    assert hashes.shape == (4,)
    assert torch.equal(row_fingerprints(rows.flip(0)), hashes.flip(0))
    changed = rows.clone()
    changed[2] += 1
    assert (row_fingerprints(changed) != hashes).tolist() == [False, False, True, False]
    assert len(set(row_fingerprints(torch.arange(5)).tolist())) == 5
    assert row_fingerprints(torch.zeros(3, 0)).tolist() == [0, 0, 0]


def test_a_view_hashes_as_its_copy():
    base = torch.randn(20)
    for start, stop in ((0, 20), (1, 19), (1, 18), (3, 3), (2, 7)):
        assert fingerprint(base[start:stop]) == fingerprint(base[start:stop].clone())
    wide = torch.randn(4, 6, dtype=torch.complex64)
    assert fingerprint(wide.T) == fingerprint(wide.T.contiguous())
