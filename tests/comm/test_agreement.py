"""Checks that ranks make together, and hashes of tensors."""

import pytest
import torch

from lightning_parallel import comm
from lightning_parallel.comm import fingerprint, fingerprints, row_fingerprints
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
