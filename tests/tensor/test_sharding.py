"""Shard rules: cutting can be undone, and every element counts once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.tensor.sharding import Shard, ShardPart, reduce_partial_
from tests.harness import distributed, recorded_communication


@st.composite
def parts_and_ranks(draw):
    ranks = draw(st.integers(1, 5))
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        unit = draw(st.integers(1, 3))
        kind = draw(st.sampled_from(["plain", "queries", "keys"]))
        if kind == "plain":
            parts.append(ShardPart(unit * draw(st.integers(ranks, 3 * ranks)), unit))
        else:
            key_heads = draw(st.integers(1, 6))
            heads = key_heads * draw(st.integers(-(-ranks // key_heads), 6))
            parts.append(
                ShardPart.queries(heads, unit, key_heads) if kind == "queries" else ShardPart.keys(key_heads, unit)
            )
    return parts, ranks


@given(parts_and_ranks(), st.integers(0, 2))
def test_merge_undoes_split_and_each_element_is_owned_once(cut, dim):
    parts, ranks = cut
    rule = Shard.packed(dim, parts, ranks)
    assert rule.full_size == sum(part.size for part in parts)
    shape = [2, 2, 2]
    shape[dim] = rule.full_size
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    shards = [rule.split(full, rank) for rank in range(ranks)]
    assert [shard.shape[dim] for shard in shards] == list(rule.sizes)
    assert all(shard.shape == rule.local_shape(full.shape, rank) for rank, shard in enumerate(shards))
    assert all(rule.full_shape(shard.shape) == full.shape for shard in shards)
    assert torch.equal(rule.merge(shards), full)
    assert rule.along(dim - 3).merge(shards).equal(full)
    owned = torch.cat([rule.owned(shard, rank).flatten() for rank, shard in enumerate(shards)])
    assert torch.equal(owned.sort().values, full.flatten())
    assert rule.replicated == (sum(rule.sizes) > rule.full_size)
    assert rule.consecutive == (not rule.replicated and torch.equal(torch.cat(shards, dim), full))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_query_heads_stay_with_their_key_head(key_heads, per_key, ranks):
    heads = key_heads * per_key
    if ranks > heads:
        with pytest.raises(ValueError, match=f"{heads} .*{ranks} ranks"):
            Shard.packed(0, [ShardPart.queries(heads, 1, key_heads)], ranks)
        return
    queries, keys = ShardPart.queries(heads, 1, key_heads).split(ranks), ShardPart.keys(key_heads, 1).split(ranks)
    for (first, stop), (key_first, key_stop) in zip(queries, keys):
        assert first < stop
        assert key_first < key_stop
        assert {head // per_key for head in range(first, stop)} == set(range(key_first, key_stop))
        assert (stop - first) % (key_stop - key_first) == 0
        whole = key_stop - key_first > 1 or (stop - first) == per_key
        assert whole or key_heads < ranks


def test_shared_key_heads():
    rule = Shard.packed(0, [ShardPart.keys(2, 4)], 3)
    assert rule.ranges == (((0, 4),), ((0, 4),), ((4, 8),))
    assert rule.replicated
    assert rule.owned(torch.ones(4), 1).numel() == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard.even(0, 3, 4), "3 features cannot be sharded over 4 ranks"),
        (lambda: Shard.even(0, 6, 4, unit=2), r"3 heads \(units of 2 features\) cannot be sharded over 4 ranks"),
        (lambda: Shard.even(0, 7, 2, unit=2), r"of units of 2\); got 7"),
        (lambda: Shard(0, (((0, 2),), ((3, 4),))), "got none for 2 to 3"),
        (lambda: Shard.even(0, 4, 2).split(torch.ones(5), 0), "must have the extent 4 in dimension 0"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_split_owns_its_memory_and_works_on_meta():
    full = torch.arange(4.0)
    shard = Shard.even(0, 4, 2).split(full, 0)
    assert shard.untyped_storage().nbytes() == 8
    assert Shard.even(0, 4, 2).split(torch.empty(4, 3, device="meta"), 1).shape == (2, 3)


@distributed(world_size=3)
def test_reduce_partial_sums_over_holders(group):
    rules = {"kv": Shard.packed(0, [ShardPart.keys(2, 2), ShardPart(3)], 3), "plain": Shard.even(0, 6, 3)}
    grads = {
        "norm": torch.full((2, 2), 1.0 + group.rank),
        "kv": torch.full((3, 2), 10.0 + group.rank),
        "plain": torch.full((2,), 5.0),
        "half": torch.full((4,), 1.0, dtype=torch.bfloat16),
    }
    with recorded_communication() as records:
        reduce_partial_(grads, rules, group)
    assert len(records) == 2, "one all-reduce per dtype"
    assert torch.equal(grads["norm"], torch.full((2, 2), 6.0))
    shared = 21.0 if group.rank < 2 else 12.0
    assert grads["kv"][:, 0].tolist() == [shared, shared, 10.0 + group.rank]
    assert grads["plain"].tolist() == [5.0, 5.0]
    assert grads["half"].tolist() == [3.0] * 4
