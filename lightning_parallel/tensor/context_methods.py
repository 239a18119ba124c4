"""Context parallelism in numbers: how positions are sharded, and which messages each method of attention sends.

| method    | forward                                     | backward                                           |
|-----------|---------------------------------------------|----------------------------------------------------|
| `gather`  | all-gather of keys and values               | reduce-scatter of their gradients                  |
| `ulysses` | all-to-all of queries, keys, values; output | the same, in the other direction                   |
| `ring`    | keys and values travel from rank to rank    | they travel again, and their gradients with them   |

Source: Ulysses, https://arxiv.org/abs/2309.14509; ring, https://arxiv.org/abs/2310.01889; balance of causal work,
https://arxiv.org/abs/2311.09431
"""

from __future__ import annotations

from typing import Literal

from lightning_parallel.tensor.sharding import Range, Shard, ShardPart, balanced

__all__ = ["Method", "balanced_rows", "head_rules", "ulysses_reason"]

Method = Literal["ulysses", "ring", "gather"]


def balanced_rows(length: int, ranks: int) -> Shard:
    """Shard positions so that each rank has almost the same work under a causal mask.

    The positions are cut into 2 `ranks` chunks. Rank r holds chunk r from the head of the sequence, whose rows attend
    to few columns, and chunk r from its tail, whose rows attend to many.

    >>> balanced_rows(8, 2).ranges
    (((0, 2), (6, 8)), ((2, 6),))
    """
    sizes = balanced(length, 2 * ranks)
    starts = [sum(sizes[:chunk]) for chunk in range(2 * ranks + 1)]

    def ranges(rank: int) -> tuple[Range, ...]:
        head, tail = rank, 2 * ranks - 1 - rank
        if head + 1 == tail:
            chunks = [(starts[head], starts[tail + 1])]  # neighbours
        else:
            chunks = [(starts[chunk], starts[chunk + 1]) for chunk in (head, tail)]
        return tuple((start, stop) for start, stop in chunks if start < stop)

    return Shard(0, tuple(ranges(rank) for rank in range(ranks)))


def ulysses_reason(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Return why heads cannot be sharded over the ranks, or None if they can.

    Ranks may have different numbers of heads. Several ranks hold the same key and value head if there are fewer than
    ranks.

    Args:
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        ranks: Number of ranks.
    """
    if heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} key and value heads"
    if heads < ranks:
        return f"{heads} heads cannot be sharded over {ranks} ranks: each rank needs at least one"
    return None


def head_rules(heads: int, kv_heads: int, ranks: int) -> tuple[Shard, Shard]:
    """Return which query heads, and which key and value heads, each rank computes in `ulysses`: one range each.

    A rank holds full groups of query heads with their key and value heads, or query heads of one group.
    """
    queries, keys = ShardPart.queries(heads, 1, kv_heads), ShardPart.keys(kv_heads, 1)
    return Shard.packed(-3, [queries], ranks), Shard.packed(-3, [keys], ranks)
