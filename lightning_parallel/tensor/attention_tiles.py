"""Attention in tiles: the scores of some rows and some columns, whose results are merged row by row.

The result of some columns comes with the statistics of its rows. Two results of the same rows are merged by them:

    top = max(top_1, top_2)    w_i = total_i exp(top_i - top)    out = (w_1 out_1 + w_2 out_2) / (w_1 + w_2)

`top` is the largest score of a row, and `total` the sum of exp(score - top). A kernel that only gives the logarithm of
the sum of exponentials has this as `top`, and a total of 1. `top` and the logarithm of `total` are kept apart: a mask
may add the most negative number to all scores of a row, and the sum would then lose the logarithm.

Legend for shapes: B batch, H query heads, H_kv heads of keys and values, l rows and s columns of a tile, E features of
queries and keys, E_v features of values.

Source: https://arxiv.org/abs/1805.02867; backward by tiles: https://arxiv.org/abs/2205.14135, appendix B
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_parallel.compat.torch import (
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    CUDA_FLASH_ATTENTION,
    CUDA_FLASH_ATTENTION_BACKWARD,
    has_data,
)
from lightning_parallel.tensor.sharding import Range

__all__ = [
    "Gradients",
    "Partial",
    "Tile",
    "causal_tiles",
    "full_tiles",
    "high_dtype",
    "joined_tiles",
    "places_of",
    "tile_attention",
    "tile_gradients",
]

MAX_SCORES = 1 << 26
"""Most scores that exist at once without a fused kernel."""


class Tile(NamedTuple):
    """Scores of some rows and columns.

    Attributes:
        rows, columns: Their places among the rows and columns that a rank holds.
        kind: `full`: each row attends to each column. `diagonal`: a square in which row i attends to columns up to i.
            `masked`: an explicit mask decides.
        seen: The rows and columns of the mask, in positions of the full sequence; None without a mask.
    """

    rows: Range
    columns: Range
    kind: Literal["full", "diagonal", "masked"]
    seen: tuple[Range, Range] | None = None

    @property
    def scores(self) -> float:
        """Number of scores that a row attends to: about half of the square of a diagonal."""
        rows, columns = (stop - start for start, stop in (self.rows, self.columns))
        return (rows * (rows + 1) / 2) if self.kind == "diagonal" else float(rows * columns)


def full_tiles(own: Sequence[Range], block: Sequence[Range]) -> list[Tile]:
    """Return one tile of all rows and columns of these ranges of positions, or none if there are no scores."""
    rows, columns = (sum(stop - start for start, stop in ranges) for ranges in (own, block))
    return [Tile((0, rows), (0, columns), "full")] if rows and columns else []


def causal_tiles(own: Sequence[Range], block: Sequence[Range]) -> list[Tile]:
    """Cut the scores of a causal order into full tiles and squares on the diagonal, the only kinds of the kernels.

    Args:
        own: Positions of the rows.
        block: Positions of the columns.

    Returns:
        The tiles that are not empty, few and large.
    """
    if own == block and list(own) == sorted(own):
        # The rows and columns lie in the same ascending order.
        return [tile._replace(kind="diagonal") for tile in full_tiles(own, block)]
    found = [
        Tile(places_of(own, tile.rows), places_of(block, tile.columns), tile.kind)
        for rows in own
        for columns in block
        for tile in _causal_tiles(rows, columns)
    ]
    return joined_tiles(found)


def _causal_tiles(rows: Range, columns: Range) -> Iterator[Tile]:
    """Yield at most three tiles, in positions."""
    (start, stop), (first, last) = rows, columns
    start = max(start, first)  # earlier rows attend to none of the columns
    end = min(stop, last)
    found = [
        Tile((start, stop), (first, min(last, start)), "full"),
        Tile((start, end), (start, end), "diagonal"),
        Tile((end, stop), (start, end), "full"),
    ]
    for tile in found:
        if all(low < high for low, high in (tile.rows, tile.columns)):
            yield tile


def places_of(ranges: Sequence[Range], positions: Range) -> Range:
    """Return the places of consecutive positions in a shard of these ranges."""
    at = 0
    for start, stop in ranges:
        if start <= positions[0] < stop:
            at += positions[0] - start
            return at, at + positions[1] - positions[0]
        at += stop - start
    raise IndexError(f"Positions {positions} must be in the ranges {ranges}")


def joined_tiles(tiles: Iterable[Tile]) -> list[Tile]:
    """Join full tiles that are neighbours: a kernel computes few large tiles faster."""
    found = sorted(tiles, key=lambda tile: (tile.kind, tile.columns, tile.rows))
    for by_rows in (True, False):
        done: list[Tile] = []
        for tile in found:
            before = done[-1] if done and done[-1].kind == tile.kind == "full" else None
            if before is not None and by_rows and before.columns == tile.columns and before.rows[1] == tile.rows[0]:
                done[-1] = Tile((before.rows[0], tile.rows[1]), tile.columns, "full")
            elif before is not None and before.rows == tile.rows and before.columns[1] == tile.columns[0]:
                done[-1] = Tile(tile.rows, (before.columns[0], tile.columns[1]), "full")
            else:
                done.append(tile)
        found = sorted(done, key=lambda tile: (tile.kind, tile.rows, tile.columns))
    return found


class Partial(NamedTuple):
    """Attention of rows to some of their columns.

    Attributes:
        out: (B, H, l, E_v), in high precision; zero for a row without columns.
        top, total: (B, H, l), see the module; -inf and 0 for a row without columns.
    """

    out: Tensor
    top: Tensor
    total: Tensor

    @classmethod
    def empty(cls, shape: Sequence[int], like: Tensor) -> Partial:
        """Return the attention to no columns; `shape` is that of `out`."""
        out = torch.zeros(*shape, dtype=high_dtype(like), device=like.device)
        return cls(out, torch.full_like(out[..., 0], -torch.inf), torch.zeros_like(out[..., 0]))

    def merge_(self, rows: slice, other: Partial) -> None:
        """Add the attention of `rows` to further columns, in place."""
        out, top, total = (x[:, :, rows] for x in self)
        highest = torch.maximum(top, other.top)
        # A row without columns so far has no top; its weights are zero below any finite one.
        finite = highest.masked_fill(highest == -torch.inf, 0.0)
        mine, others = total * (top - finite).exp(), other.total * (other.top - finite).exp()
        both = mine + others
        share = others / both.masked_fill(both == 0, 1.0)
        out.mul_((1 - share)[..., None]).add_(other.out * share[..., None])
        top.copy_(highest)
        total.copy_(both)

    def log_sum(self) -> Tensor:
        """Return log(sum(exp(scores))) of each row; inf for a row without columns, so that its weights become 0."""
        return torch.where(self.total > 0, self.top + self.total.log(), torch.inf)


class Gradients(NamedTuple):
    """Gradients of a tile: (B, H, l, E), (B, H_kv, s, E), (B, H_kv, s, E_v), and of the mask (B, H, l, s) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


def high_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which results are merged and summed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def tile_attention(q: Tensor, k: Tensor, v: Tensor, kind: str, mask: Tensor | None, scale: float) -> Partial:
    """Compute the attention of a tile.

    Args:
        q: (B, H, l, E).
        k: (B, H_kv, s, E).
        v: (B, H_kv, s, E_v).
        kind: See `Tile`.
        mask: Broadcastable to (B, H, l, s), of a masked tile.
        scale: Factor of the scores.
    """
    k, v = (_for_heads(x, q.shape[1]) for x in (k, v))
    is_diagonal = kind == "diagonal"
    if mask is None and _has_cpu_kernel(q, v):
        out, log_sum = CPU_FLASH_ATTENTION(q, k, v, 0.0, is_diagonal, scale=scale)
    elif mask is None and _has_cuda_kernel(q, k, v, is_diagonal):
        out, log_sum = CUDA_FLASH_ATTENTION(q, k, v, 0.0, is_diagonal, scale=scale)[:2]
    else:
        parts = [
            _softmax(q[:, :, rows], k[:, :, columns], v[:, :, columns], _rows_of(mask, rows), is_diagonal, scale)
            for rows, columns in _slices(q, k, is_diagonal)
        ]
        return Partial(*(torch.cat(found, 2) for found in zip(*parts)))
    log_sum = log_sum.to(high_dtype(q))
    return Partial(out.to(log_sum.dtype), log_sum, torch.ones_like(log_sum))


def tile_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: str,
    mask: Tensor | None,
    scale: float,
    whole: Partial,
    needs_mask: bool = False,
) -> Gradients:
    """Compute the gradients of a tile from the result of its rows over all columns.

    Args:
        grad: (B, H, l, E_v), gradient of the result of the rows.
        q, k, v, kind, mask, scale: See `tile_attention`.
        whole: The attention of the rows to all their columns, with `out` in the dtype of `q`.
        needs_mask: Whether to compute the gradient of the mask.
    """
    kv_heads = k.shape[1]
    k, v = (_for_heads(x, q.shape[1]) for x in (k, v))
    is_diagonal = kind == "diagonal"
    on_cpu = mask is None and _has_cpu_kernel(q, v)
    found: Gradients
    if on_cpu or (mask is None and _has_cuda_kernel(q, k, v, is_diagonal)):
        # The kernel computes the weights again, from the scores and from the sums over all columns.
        log_sum = whole.log_sum()
        if on_cpu:
            grads = CPU_FLASH_ATTENTION_BACKWARD(grad, q, k, v, whole.out, log_sum, 0.0, is_diagonal, scale=scale)
        else:
            seed = q.new_empty(0, dtype=torch.int64)  # of a dropout
            lengths = None, None, q.shape[2], k.shape[2]
            grads = CUDA_FLASH_ATTENTION_BACKWARD(
                grad, q, k, v, whole.out, log_sum, *lengths, 0.0, is_diagonal, seed, seed, scale=scale
            )
        grad_q, grad_k, grad_v = (x.to(high_dtype(q)) for x in grads)
        found = Gradients(grad_q, grad_k, grad_v, None)
    else:
        found = _softmax_gradients(grad, q, k, v, is_diagonal, mask, scale, whole, needs_mask)
    return found._replace(k=_of_heads(found.k, kv_heads), v=_of_heads(found.v, kv_heads))


# ------------------------------------------------------------------------------------------------------------- kernels


def _has_cpu_kernel(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _has_cuda_kernel(q: Tensor, k: Tensor, v: Tensor, is_diagonal: bool) -> bool:
    # torch pads other sizes of heads before it calls the operator.
    if q.device.type != "cuda" or q.shape[-1] % 8 or q.shape[-1] != v.shape[-1]:
        return False
    if not has_data(q):
        return q.dtype in (torch.float16, torch.bfloat16)  # a rehearsal, possibly on a machine without the device
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, is_diagonal, False)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _for_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _of_heads(grad: Tensor, kv_heads: int) -> Tensor:
    return grad if grad.shape[1] == kv_heads else grad.unflatten(1, (kv_heads, -1)).sum(2)


def _slices(q: Tensor, k: Tensor, is_diagonal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield rows, and the columns up to which they attend, with a bounded number of scores each."""
    rows, columns = q.shape[2], k.shape[2]
    step = max(1, MAX_SCORES // max(1, q.shape[0] * q.shape[1] * columns))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield slice(start, stop), slice(0, stop if is_diagonal else columns)


def _rows_of(mask: Tensor | None, rows: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_diagonal: bool, scale: float) -> Tensor:
    """Return the masked scores (B, H, l, s) in high precision."""
    high = high_dtype(q)
    scores = (q.to(high) * scale) @ k.to(high).transpose(-1, -2)
    if is_diagonal:
        # The last row attends to all columns.
        rows, columns = scores.shape[-2:]
        later = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
        return scores.masked_fill_(later, -torch.inf)
    if mask is None:
        return scores
    return scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)


def _softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_diagonal: bool, scale: float) -> Partial:
    scores = _scores(q, k, mask, is_diagonal, scale)
    top = scores.amax(-1)
    weights = scores.sub_(top.masked_fill(top == -torch.inf, 0.0)[..., None]).exp_()
    total = weights.sum(-1)
    out = weights @ v.to(weights.dtype) / total.masked_fill(total == 0, 1.0)[..., None]
    return Partial(out, top, total)


def _softmax_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_diagonal: bool,
    mask: Tensor | None,
    scale: float,
    whole: Partial,
    needs_mask: bool,
) -> Gradients:
    """Compute `tile_gradients` without a fused kernel; keys and values have all query heads."""
    high = high_dtype(q)
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=high, device=x.device) for x in (q, k, v))
    grad_scores = []
    for rows, columns in _slices(q, k, is_diagonal):
        own, keys, values, grads = q[:, :, rows], k[:, :, columns], v[:, :, columns], grad[:, :, rows].to(high)
        out, top, total = (x[:, :, rows] for x in whole)
        scores = _scores(own, keys, _rows_of(mask, rows), is_diagonal, scale)
        weights = scores.sub_(top.masked_fill(top == -torch.inf, 0.0)[..., None]).exp_()
        weights /= total.masked_fill(total == 0, 1.0)[..., None]
        grad_v[:, :, columns] += weights.transpose(-1, -2) @ grads
        inner = (grads * out.to(high)).sum(-1, keepdim=True)
        changed = (grads @ values.to(high).transpose(-1, -2) - inner) * weights
        grad_q[:, :, rows] = changed @ keys.to(high) * scale
        grad_k[:, :, columns] += changed.transpose(-1, -2) @ own.to(high) * scale
        if needs_mask:
            grad_scores.append(changed)
    return Gradients(grad_q, grad_k, grad_v, torch.cat(grad_scores, 2) if needs_mask else None)
