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

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from lightning_parallel.tensor.ring_attention import Turns, causal_turns
from lightning_parallel.tensor.sharding import Range, Shard, ShardPart, balanced

__all__ = [
    "AttentionMessage",
    "AttentionShape",
    "Method",
    "attention_messages",
    "balanced_rows",
    "attention_bytes_sent",
    "choose_method",
    "head_rules",
    "ulysses_reason",
]

Method = Literal["ulysses", "ring", "gather"]

FLOPS_PER_BYTE = 8000
"""Operations of a device while a link carries a byte: 4e14 per second on an H100, with a link of 400 Gbit/s."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention whose positions are sharded.

    Attributes:
        batch: Number of sequences.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_size: Features of a query or key head.
        value_size: Features of a value head.
        item_bytes: Bytes of an element.
        rows: Positions of the queries on each rank.
        columns: Positions of the keys on each rank.
        is_causal: Whether the order of positions leaves scores empty.
    """

    batch: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    item_bytes: int
    rows: Shard
    columns: Shard
    is_causal: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.rows.ranks

    @property
    def turns(self) -> Turns:
        """The turns of a ring without an explicit mask."""
        return causal_turns(self.rows.ranges, self.columns.ranges, self.is_causal)


class AttentionMessage(NamedTuple):
    """A collective, or the messages of a turn, that one rank takes part in.

    Attributes:
        op: Name in torch's terms; `send` for a turn of the ring.
        payload: Bytes as `comm` counts them, see `Pending`; for a turn, the bytes that this rank sends.
        sent: Bytes that this rank sends to other ranks, in the ring form of a collective.
        is_backward: Whether it belongs to backward.
    """

    op: str
    payload: int
    sent: float
    is_backward: bool


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

    Ranks may have different numbers of heads. With fewer key and value heads than ranks, several ranks hold the same
    head.

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
    """Return the rules of the query heads and of the key and value heads in `ulysses`, with one range on each rank.

    A rank holds full groups of query heads with their key and value heads, or query heads of one group.
    """
    queries, keys = ShardPart.queries(heads, 1, kv_heads), ShardPart.keys(kv_heads, 1)
    return Shard.packed(-3, [queries], ranks), Shard.packed(-3, [keys], ranks)


def attention_messages(
    method: Method, shape: AttentionShape, rank: int = 0, turns: Turns | None = None
) -> list[AttentionMessage]:
    """List the messages of an attention, forward and backward, as one rank sends them.

    Args:
        method: The method.
        shape: Sizes of the attention.
        rank: Position of the rank.
        turns: The turns of a ring with an explicit mask.
    """
    if shape.ranks == 1:
        return []
    item = shape.batch * shape.item_bytes
    pair = item * shape.kv_heads * (shape.head_size + shape.value_size)  # bytes of a key and a value with all heads
    if method == "gather":
        # Backends gather equal parts, so smaller parts have padding.
        payload = shape.ranks * max(shape.columns.sizes) * pair
        sent = payload * (shape.ranks - 1) / shape.ranks
        return [
            AttentionMessage("all_gather", payload, sent, False),
            AttentionMessage("reduce_scatter", payload, sent, True),
        ]
    if method == "ulysses":
        return _ulysses_messages(shape, rank)
    turns = turns or shape.turns
    # Gradients travel in fp32 at least, because each rank adds to them.
    high = pair * max(4, shape.item_bytes) // shape.item_bytes
    onward, home = turns.sent(rank)
    keys = [size * pair for size in onward if size]
    gradients = [size * high for size in home if size]
    ways = [(keys, False), (keys, True), (gradients, True)]
    return [AttentionMessage("send", size, size, backward) for sizes, backward in ways for size in sizes]


def _ulysses_messages(shape: AttentionShape, rank: int) -> list[AttentionMessage]:
    query_heads, key_heads = head_rules(shape.heads, shape.kv_heads, shape.ranks)
    item = shape.batch * shape.item_bytes

    def message(ways: list[tuple[Shard, Shard, int]], is_backward: bool) -> AttentionMessage:
        """Add up the tensors, each with the rule that cuts it, the rule of this rank's part, and its features."""
        parts = [
            sum(cut.sizes[other] * held.sizes[rank] * features * item for cut, held, features in ways)
            for other in range(shape.ranks)
        ]
        return AttentionMessage("all_to_all", sum(parts), sum(parts) - parts[rank], is_backward)

    inputs = [
        (query_heads, shape.rows, shape.head_size),
        (key_heads, shape.columns, shape.head_size),
        (key_heads, shape.columns, shape.value_size),
    ]
    output = [(query_heads, shape.rows, shape.value_size)]
    back = [[(held, cut, features) for cut, held, features in ways] for ways in (output, inputs)]
    return [message(inputs, False), message(back[0], False), message(output, True), message(back[1], True)]


def attention_bytes_sent(method: Method, shape: AttentionShape, rank: int = 0, turns: Turns | None = None) -> float:
    """Return the bytes that one rank sends in forward and backward; see `attention_messages`.

    With n ranks, S keys in equal shards, and b bytes of a key and value with all heads, each rank sends

    | method    | forward                                    | backward                                      |
    |-----------|--------------------------------------------|-----------------------------------------------|
    | `gather`  | (n-1)/n S b                                | (n-1)/n S b                                   |
    | `ulysses` | (n-1)/n^2 S (b + bytes of a query, output) | the same                                      |
    | `ring`    | (n-1)/n S b; less where tiles are empty    | the same, and the same in fp32 for gradients  |
    """
    return sum(message.sent for message in attention_messages(method, shape, rank, turns))


def choose_method(shape: AttentionShape, has_mask: bool = False, flops_per_byte: float = FLOPS_PER_BYTE) -> Method:
    """Choose the method that sends the fewest bytes in the open.

    Computation hides no bytes of `ulysses` and `gather`. It hides bytes of `ring`, at `flops_per_byte`. With `gather`
    each rank keeps the keys and values of all positions for backward. So `gather` is a candidate only if these are at
    most twice the rank's queries and results. With an explicit mask, `ring` has no fused kernel and is no candidate. Of
    equal costs, the first in the order `ulysses`, `gather`, `ring` wins.

    Args:
        shape: Sizes of the attention.
        has_mask: Whether there is an explicit mask.
        flops_per_byte: Operations that a device computes while the link carries a byte.
    """
    costs: dict[Method, float] = {}
    if ulysses_reason(shape.heads, shape.kv_heads, shape.ranks) is None:
        costs["ulysses"] = attention_bytes_sent("ulysses", shape)
    whole = shape.kv_heads * shape.columns.full_size
    if whole <= 2 * shape.heads * max(shape.rows.sizes):
        costs["gather"] = attention_bytes_sent("gather", shape)
    if not has_mask:
        costs["ring"] = _open_bytes(shape, flops_per_byte)
    # With a mask, and with heads that do not fit, one method is left.
    return min(costs, key=lambda method: costs[method]) if costs else "gather"


def _open_bytes(shape: AttentionShape, flops_per_byte: float) -> float:
    """Return the bytes of a ring that no computation hides."""
    turns = shape.turns
    scores = sum(tile.scores for owner in range(shape.ranks) for tile in turns.tiles(0, owner))
    # Two products in forward and five in backward; the last turn hides nothing.
    product = 2 * scores * prod((shape.batch, shape.heads, shape.head_size)) * (1 - 1 / shape.ranks)
    messages = attention_messages("ring", shape)
    ways = ((2, False), (5, True))
    return sum(
        max(0.0, sum(m.sent for m in messages if m.is_backward == backward) - products * product / flops_per_byte)
        for products, backward in ways
    )
