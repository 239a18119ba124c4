"""Ring attention: keys and values travel from rank to rank, while each rank computes its rows with the keys it holds.

In turn t rank r holds the block of rank r - t. It sends the block on, computes, and merges the result into its rows
(`tensor.attention_tiles`). In backward the blocks travel again. The gradients of a block follow it one turn later, and
return to its owner from the last rank that needs the block. Half of the own block is computed at the end, beside the
last gradients:

    turn        0           1                 2
    rank 1      block 1     block 0           block 3        keys and values
                            gradients of 0    gradients of 3 + the sum from rank 0

The causal order and the mask leave some tiles empty. So a block stops at the last rank that needs it, and the ring
stops when no rank needs another block. All ranks decide alike, because they know all positions and the full mask.

torch's `context_parallel` also has a ring, but it needs equal positions on all ranks and takes no mask.

Source: https://arxiv.org/abs/2310.01889
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.comm.kept import kept
from lightning_parallel.compat.torch import has_data
from lightning_parallel.tensor.attention_tiles import (
    Partial,
    Tile,
    causal_tiles,
    full_tiles,
    high_dtype,
    joined_tiles,
    places_of,
    tile_attention,
    tile_gradients,
)
from lightning_parallel.tensor.sharding import Range

__all__ = ["Turns", "causal_turns", "masked_turns", "ring_attention"]

Ranges = tuple[tuple[Range, ...], ...]
"""Positions of each rank."""

MASK_TILE = 1024
"""Most rows and columns of a tile of an explicit mask, so that few tiles of a narrow mask have any scores."""

# By the process group itself: names are used again after `destroy_process_group`.
_connected: WeakSet[Any] = WeakSet()
"""The groups whose ranks have all communicated once."""
_KEYS_TAG, _GRADIENTS_TAG = ((1 << 20) + number for number in (8, 9))


@dataclass(frozen=True, eq=False)
class Turns:
    """The tiles that each rank computes in each turn.

    A rank asks for its own tiles only: there are ranks x ranks pairs of a rank and a block.

    Attributes:
        columns: Positions of the keys of each rank.
        find: Finds the tiles of a rank in the block of an owner.
        needs: Tells whether the rank has such tiles.
    """

    columns: Ranges
    find: Callable[[int, int], tuple[Tile, ...]]
    needs: Callable[[int, int], bool]
    _known: dict[tuple[int, int], tuple[Tile, ...]] = field(default_factory=dict, repr=False)

    def tiles(self, rank: int, owner: int) -> tuple[Tile, ...]:
        """Return the tiles of a rank in the block of an owner that are not empty."""
        if (rank, owner) not in self._known:
            self._known[rank, owner] = self.find(rank, owner)
        return self._known[rank, owner]

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """Number of ranks that the block of each rank passes on its way to the last rank that needs it."""
        ranks = len(self.columns)
        return tuple(
            next((turn for turn in range(ranks - 1, 0, -1) if self.needs((owner + turn) % ranks, owner)), 0)
            for owner in range(ranks)
        )

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of keys in the block of each rank."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.columns)

    def sent(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the positions that a rank sends in each turn: of keys and values in a pass, and of gradients."""
        ranks = len(self.columns)
        owners = [(rank - turn) % ranks for turn in range(ranks)]
        keys = [self.lengths[owner] * (self.hops[owner] > turn) for turn, owner in enumerate(owners)]
        gradients = [self.lengths[owner] * (self.hops[owner] >= turn > 0) for turn, owner in enumerate(owners)]
        return keys, gradients


@cache
def causal_turns(rows: Ranges, columns: Ranges, is_causal: bool) -> Turns:
    """Plan the turns without an explicit mask."""
    tiles_of = causal_tiles if is_causal else full_tiles
    last_row = [max((stop for start, stop in own if start < stop), default=0) for own in rows]
    first_column = [min((start for start, stop in block if start < stop), default=None) for block in columns]

    def needs(rank: int, owner: int) -> bool:
        first = first_column[owner]
        return first is not None and last_row[rank] > (first if is_causal else 0)

    return Turns(columns, lambda rank, owner: tuple(tiles_of(rows[rank], columns[owner])), needs)


def masked_turns(rows: Ranges, columns: Ranges, mask: Tensor) -> Turns:
    """Plan the turns of an explicit mask (B or 1, H or 1, L or 1, S or 1), the same on all ranks."""
    row_ranges, column_ranges = _cut(rows), _cut(columns)
    if not has_data(mask):
        return _masked_turns(rows, columns, None)  # in a rehearsal, whose values are not known
    attends = mask if mask.dtype == torch.bool else mask > -torch.inf
    # A mask of zeros that is learned has a gradient, so its scores need the mask.
    plain = mask if mask.dtype == torch.bool else (mask == 0) & (not mask.requires_grad)
    some = _by_tile(attends, row_ranges, column_ranges, torch.any)
    every = _by_tile(plain, row_ranges, column_ranges, torch.all)
    # One transfer from the device, where the plan of each rank would need one for each tile.
    states = (some.to(torch.int8) + every.to(torch.int8)).tolist()
    kinds = {
        (r, c): ("masked" if states[i][j] == 1 else "full")
        for i, r in enumerate(row_ranges)
        for j, c in enumerate(column_ranges)
        if states[i][j]
    }
    return _masked_turns(rows, columns, kinds)


def _masked_turns(rows: Ranges, columns: Ranges, kinds: Mapping[tuple[Range, Range], Any] | None) -> Turns:
    """Plan the turns of a mask from the kinds of its tiles, by rows and columns; with None, all tiles are masked."""

    def tiles(own: Sequence[Range], block: Sequence[Range]) -> tuple[Tile, ...]:
        found = []
        for seen in product(_cut([own]), _cut([block])):
            kind: Any = "masked" if kinds is None else kinds.get(seen)
            if kind is not None:
                places = places_of(own, seen[0]), places_of(block, seen[1])
                found.append(Tile(*places, kind, seen if kind == "masked" else None))
        return tuple(joined_tiles(found))

    turns = Turns(
        columns, lambda rank, owner: tiles(rows[rank], columns[owner]), lambda *pair: bool(turns.tiles(*pair))
    )
    return turns


def _cut(ranges: Sequence[Sequence[Range]]) -> list[Range]:
    """Cut ranges into ranges of at most `MASK_TILE` positions."""
    return [
        (at, min(at + MASK_TILE, stop)) for own in ranges for start, stop in own for at in range(start, stop, MASK_TILE)
    ]


def _by_tile(mask: Tensor, rows: list[Range], columns: list[Range], reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce a mask over samples, heads, and the positions of each tile; returns (rows, columns)."""
    mask = reduce(mask.flatten(0, 1), 0)
    for dim, ranges in enumerate((rows, columns)):
        mask = mask.expand(*(size if size > 1 or at != dim else ranges[-1][1] for at, size in enumerate(mask.shape)))
        mask = torch.stack([reduce(mask.narrow(dim, start, stop - start), dim) for start, stop in ranges], dim)
    return mask


# ---------------------------------------------------------------------------------------------------------- attention


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, turns: Turns, group: Group
) -> Tensor:
    """Compute this rank's rows of an attention, while keys and values travel.

    Args:
        q: (B, H, L_r, E).
        k: (B, H_kv, S_r, E).
        v: (B, H_kv, S_r, E_v).
        mask: (B or 1, H or 1, L or 1, S or 1), of all positions. Its gradient is partial.
        scale: Factor of the scores; 1 / sqrt(E) by default.
        turns: The tiles to compute, from the same mask.
        group: The ranks.

    Returns:
        (B, H, L_r, E_v).
    """
    return _Ring.apply(q, k, v, mask, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, turns, group)


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, turns: Turns, group: Group
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor, Tensor]:
            with _own_precision(q):
                result = Partial.empty((*q.shape[:-1], v.shape[-1]), q)
                trip = _Trip(torch.cat([k, v], -1), turns, _past_gate(group))
                for turn in range(trip.turns):
                    owner, block = trip.start(turn)  # before the computation, which hides the messages
                    for part in _inputs_of(q, block, mask, turns.tiles(group.rank, owner)):
                        kernel = part.q, part.k, part.v, part.tile.kind, part.mask, scale
                        result.merge_(part.rows, tile_attention(*kernel))
                    trip.wait()
                return result.out.to(q.dtype), result.top, result.total

        # The attention itself is kept, as of other layers: a second run neither sends nor computes.
        out, top, total = kept(compute)
        ctx.save_for_backward(q, k, v, mask, out, top, total)
        ctx.args = scale, turns, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, mask, *whole = ctx.saved_tensors
        grads = _ring_gradients(grad, q, k, v, mask, Partial(*whole), ctx.needs_input_grad[3], *ctx.args)
        return *grads, None, None, None


def _ring_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    whole: Partial,
    needs_mask: bool,
    scale: float,
    turns: Turns,
    group: Group,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of queries, keys, values and the mask."""
    grad, high = grad.contiguous(), high_dtype(q)
    grad_q = torch.zeros(q.shape, dtype=high, device=q.device)
    grad_mask = torch.zeros(mask.shape, dtype=high, device=q.device) if mask is not None and needs_mask else None
    group = _past_gate(group)
    trip = _Trip(torch.cat([k, v], -1), turns, group)
    home = _HomeTrip(turns, group)

    def add(tiles: Sequence[Tile], block: Tensor | None, added: Tensor) -> None:
        for part in _inputs_of(q, block, mask, tiles):
            rows = Partial(*(x[:, :, part.rows] for x in whole))
            kernel = part.q, part.k, part.v, part.tile.kind, part.mask, scale, rows, needs_mask
            found = tile_gradients(grad[:, :, part.rows], *kernel)
            grad_q[:, :, part.rows] += found.q
            added[:, :, part.columns] += torch.cat([found.k, found.v], -1)
            if grad_mask is not None and found.mask is not None and part.tile.seen is not None:
                seen = _seen(grad_mask, part.tile.seen)
                seen += found.mask.sum_to_size(seen.shape)

    # The gradients of the own block do not travel. Half of it hides the first keys, and the rest the last gradients.
    own_tiles = turns.tiles(group.rank, group.rank)
    first, last = _halves(own_tiles) if trip.turns > 1 else (own_tiles, ())
    own_added = torch.zeros((*k.shape[:3], trip.width), dtype=high, device=k.device)
    with _own_precision(q):
        for turn in range(trip.turns):
            owner, block = trip.start(turn)
            shape = (*k.shape[:2], turns.lengths[owner], trip.width)
            added = own_added if turn == 0 else own_added.new_zeros(shape)
            add(turns.tiles(group.rank, owner) if turn else first, block, added)
            home.send(turn, owner, added)
            trip.wait()
        add(last, trip.own, own_added)
        grad_k, grad_v = home.wait().to(k.dtype).split([k.shape[-1], v.shape[-1]], -1)
    grad_mask = grad_mask.to(mask.dtype) if grad_mask is not None and mask is not None else None
    return grad_q.to(q.dtype), grad_k, grad_v, grad_mask


def _own_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Suspend autocast, which would lower the precision of sums."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


@dataclass(frozen=True)
class _TileInputs:
    """The tensors of a tile.

    Attributes:
        tile: The tile.
        rows: Its rows among the queries of this rank.
        columns: Its columns in the block.
        q, k, v, mask: Its queries, keys, values and mask.
    """

    tile: Tile
    rows: slice
    columns: slice
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


def _inputs_of(q: Tensor, block: Tensor | None, mask: Tensor | None, tiles: Sequence[Tile]) -> Iterator[_TileInputs]:
    """Yield the tensors of tiles of a block (B, H_kv, S_r, E + E_v)."""
    for tile in tiles:
        assert block is not None  # the block travels to each rank that has tiles of it
        rows, columns = slice(*tile.rows), slice(*tile.columns)
        k, v = block[:, :, columns].tensor_split([q.shape[-1]], -1)
        seen = None if mask is None or tile.seen is None else _seen(mask, tile.seen)
        yield _TileInputs(tile, rows, columns, q[:, :, rows], k, v, seen)


def _seen(mask: Tensor, seen: tuple[Range, Range]) -> Tensor:
    """Return a view of the mask of a tile."""
    for dim, (start, stop) in zip((-2, -1), seen):
        if mask.shape[dim] > 1:
            mask = mask.narrow(dim, start, stop - start)
    return mask


def _halves(tiles: Sequence[Tile]) -> tuple[Sequence[Tile], Sequence[Tile]]:
    """Cut the tiles of a block into two groups with about equally many scores, if their kind allows it."""
    if len(tiles) != 1:
        return tiles[: len(tiles) // 2], tiles[len(tiles) // 2 :]
    ((top, bottom), (left, right), kind, _) = tiles[0]
    row, column = (top + bottom) // 2, (left + right) // 2
    if kind == "masked" or not (top < row and left < column):
        return tiles, ()
    if kind == "full":
        return [Tile((top, bottom), (left, column), kind)], [Tile((top, bottom), (column, right), kind)]
    # Two half diagonals have as many scores as the square below them.
    diagonals = [Tile((top, row), (left, column), kind), Tile((row, bottom), (column, right), kind)]
    return diagonals, [Tile((row, bottom), (left, column), "full")]


# -------------------------------------------------------------------------------------------------------------- travel


def _past_gate(group: Group) -> Group:
    """Pass the gate of a group once for all turns, in which ranks send different numbers of messages."""
    if group.gate is None or comm.skips_communication():
        return group
    group.gate("ring")
    return group.behind_gate


class _Trip:
    """Keys and values (B, H_kv, S_r, E + E_v) that travel from each rank to the next.

    Attributes:
        turns: Number of turns until no rank needs another block.
        width: E + E_v.
        own: This rank's block.
    """

    def __init__(self, own: Tensor, turns: Turns, group: Group) -> None:
        self.turns = 1 + max(turns.hops)
        self.width = own.shape[-1]
        self._plan = turns
        self._group = group
        self.own = own
        self._block: Tensor | None = own
        self._next: Tensor | None = None
        self._pending: comm.Pending | None = None
        # NCCL connects a group at its first call, in which all ranks must take part. A rank without messages would not.
        if group.is_ordered and group.process_group not in _connected and not comm.skips_communication():
            comm.all_reduce_(own.new_zeros(1), group)
            _connected.add(group.process_group)

    def start(self, turn: int) -> tuple[int, Tensor | None]:
        """Start to send the block on; return its owner, and the block if it travels to this rank."""
        me, ranks, hops = self._group.rank, self._group.size, self._plan.hops
        owner, coming = (me - turn) % ranks, (me - turn - 1) % ranks
        sent, received = [], []
        if hops[owner] > turn:
            assert self._block is not None
            sent = [(self._block, (me + 1) % ranks)]
        self._next = None
        if hops[coming] > turn:
            shape = (*self.own.shape[:2], self._plan.lengths[coming], self.width)
            self._next = self.own.new_empty(shape)
            received = [(self._next, (me - 1) % ranks)]
        self._pending = comm.exchange(sent, received, self._group, _KEYS_TAG) if sent or received else None
        return owner, self._block

    def wait(self) -> None:
        """Wait for the block of the next turn."""
        if self._pending is not None:
            self._pending.wait()
        self._block = self._next


class _HomeTrip:
    """Gradients (B, H_kv, S_r, E + E_v) of blocks, which follow the blocks and then return to their owners."""

    def __init__(self, turns: Turns, group: Group) -> None:
        self._plan = turns
        self._group = group
        self._own: Tensor | None = None
        self._passing: Tensor | None = None  # gradients of the next turn's block
        self._returned: Tensor | None = None
        self._pending: comm.Pending | None = None

    def send(self, turn: int, owner: int, added: Tensor) -> None:
        """Add the gradients of this turn to those of earlier ranks, and start to send the sum."""
        if turn == 0:
            self._own = added
            return
        me, ranks, hops = self._group.rank, self._group.size, self._plan.hops
        arrived = self._arrive()
        sent: list[tuple[Tensor, int]] = []
        if hops[owner] >= turn:
            if arrived is not None:
                added += arrived
            sent = [(added, (me + 1) % ranks if hops[owner] > turn else owner)]
        shape, coming = list(added.shape), (me - turn - 1) % ranks
        received: list[tuple[Tensor, int]] = []
        if hops[coming] > turn:
            shape[2] = self._plan.lengths[coming]
            self._passing = added.new_empty(shape)
            received.append((self._passing, (me - 1) % ranks))
        if hops[me] == turn:
            shape[2] = self._plan.lengths[me]
            self._returned = added.new_empty(shape)
            received.append((self._returned, (me + turn) % ranks))
        if sent or received:
            self._pending = comm.exchange(sent, received, self._group, _GRADIENTS_TAG)

    def _arrive(self) -> Tensor | None:
        """Wait for the messages of the last turn; return the gradients that this rank passes on."""
        if self._pending is not None:
            self._pending.wait()
        passing, self._pending, self._passing = self._passing, None, None
        return passing

    def wait(self) -> Tensor:
        """Return the gradients of this rank's own block."""
        self._arrive()
        assert self._own is not None
        return self._own if self._returned is None else self._own.add_(self._returned)
