"""Products of matrices (matrices, n, m) and thin factors: P = M Q and Q = M^T P, and P Q^T, and the sums beside them.

Factors are stored transposed, P^T (matrices, rank, n) and Q^T (matrices, rank, m): P^T M takes less than a tenth of the
time of M^T P.

On a CPU, access to memory limits the speed, so all work is done on pieces that stay in the cache. A piece of a gradient
is added to the residual and multiplied while it is in the cache. A piece of the mean is subtracted from the residual
when it is written. The products of pieces use numpy: its calls cost a fraction of torch's, and some libraries of torch
are slow for thin matrices. The calling thread computes all products, so pieces and bits do not depend on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import torch
from torch import Tensor

from lightning_parallel.compat.torch import add_all_, copy_all_
from lightning_parallel.compression.compressor_state import Shapes, corners
from lightning_parallel.compression.wire import launches_kernels

__all__ = ["Sum", "orthonormal", "times_left", "times_right", "works_in_cache", "write_product"]

_CACHED = 1 << 17  # numbers in a piece of a tensor; two or three pieces must fit the cache at once
_PRODUCTS = 1 << 18  # multiplications up to which no library divides a product among threads
_LINE_BYTES = 64  # a cache loads this much at once, or more

_Array = Any  # of numpy, whose types the type checker does not know
_Some = Union[int, slice]  # of the matrices


class Sum(NamedTuple):
    """The residuals and the gradients whose sum is to fill matrices.

    Attributes:
        old: The residuals (matrices, *shape), which may be the matrices themselves; None for zeros.
        gradients: One to a matrix, of any floating-point dtype and layout.
        factor: Factor of the gradients.
        rows: The parts of the matrices for the gradients, as views; None if gradients fill them. The rest is zero.
    """

    old: Optional[Tensor]
    gradients: Sequence[Tensor]
    factor: float
    rows: Optional[Sequence[Tensor]] = None


def works_in_cache(tensor: Tensor) -> bool:
    """Return whether matrices on the device of `tensor` are worked on in pieces; only such matrices take a `Sum`."""
    return not (tensor.is_meta or launches_kernels(tensor))


def times_right(matrices: Tensor, right: Tensor, late: Optional[Sum] = None) -> Tensor:
    """Return P^T, after filling the matrices with `late` if there is one."""
    if not works_in_cache(matrices):
        return torch.bmm(right, matrices.mT)
    left = right.new_empty(len(right), right.shape[1], matrices.shape[1])
    by, out = right.numpy(), left.numpy()
    # Gradients that are not finite are allowed here: `watch` finds them in the means and drops the step.
    with np.errstate(all="ignore"):
        for some, rows, piece in _filled(matrices, right.shape[1], late):
            np.matmul(by[some], piece.swapaxes(-1, -2), out=out[some][..., rows])
    return left


def times_left(matrices: Tensor, left: Tensor, late: Optional[Sum] = None) -> Tensor:
    """Return Q^T, after filling the matrices with `late` if there is one."""
    if not works_in_cache(matrices):
        return torch.bmm(left, matrices)
    right = left.new_empty(len(left), left.shape[1], matrices.shape[2])
    by, out = left.numpy(), right.numpy()
    with np.errstate(all="ignore"):
        for some, rows, piece in _filled(matrices, left.shape[1], late):
            # With `late`, the sum has just brought the piece into the cache.
            if late is None and isinstance(some, int):
                _load(piece)
            # The result is uninitialised: the first piece writes it, and later pieces add to it.
            if rows.start == 0:
                np.matmul(by[some][..., rows], piece, out=out[some])
            else:
                total = out[some]
                np.add(total, np.matmul(by[some][..., rows], piece), out=total)
    return right


def write_product(
    left: Tensor,
    right: Tensor,
    outputs: Sequence[Tensor],
    rest: Optional[Tensor] = None,
    taken: Optional[tuple[Tensor, Tensor]] = None,
    shapes: Shapes = None,
) -> None:
    """Write P Q^T into contiguous `outputs`, one to a matrix.

    Args:
        rest: Matrices to subtract the product from; none of them may lie where an output does.
        taken: The factors of the product to subtract, if they differ.
        shapes: Shapes of the outputs, if they are corners of their matrices.
    """
    n, m = left.shape[2], right.shape[2]
    if not works_in_cache(right):
        if rest is not None:
            outer, inner = taken or (left, right)
            rest.baddbmm_(outer.mT, inner, alpha=-1)
        if shapes is not None:
            copy_all_(outputs, corners(torch.bmm(left.mT, right), shapes))
            return
        for one, other, output in zip(left, right, outputs):
            torch.mm(one.t(), other, out=output.view(n, m))
        return
    factors = left.mT.contiguous().numpy(), right.numpy()
    multiply = np.matmul if left.shape[1] > 1 else np.multiply  # equal at rank 1, where numpy's product is slow
    subtracted = factors if taken is None else (taken[0].mT.contiguous().numpy(), taken[1].numpy())
    with np.errstate(all="ignore"):
        for some, all_rows in _divided(len(left), n, m, left.shape[1]):
            target = outputs[some].view(n, m).numpy() if isinstance(some, int) and shapes is None else None
            if isinstance(some, int) and shapes is not None:
                target = np.empty((n, m), factors[1].dtype)
            by, times = factors[0][some], factors[1][some]
            taken_by, taken_times = subtracted[0][some], subtracted[1][some]
            held = None if rest is None else rest[some].numpy()
            for rows in all_rows:
                out = None if target is None else target[rows]
                product = multiply(by[..., rows, :], times, out=out)
                if held is not None:
                    piece = held[..., rows, :]
                    lost = product if taken is None else multiply(taken_by[..., rows, :], taken_times)
                    np.subtract(piece, lost, out=piece)
            if isinstance(some, slice):
                # A range of full matrices has a single piece, so `product` holds all of them.
                _copy_corners(outputs[some], torch.from_numpy(product), shapes and shapes[some])
            elif shapes is not None:
                _copy_corners([outputs[some]], torch.from_numpy(target).unsqueeze(0), (shapes[some],))


def _copy_corners(outputs: Sequence[Tensor], matrices: Tensor, shapes: Shapes) -> None:
    """Copy matrices, or their corners of `shapes`, to the outputs."""
    rows = matrices.view(-1, *outputs[0].shape).unbind() if shapes is None else corners(matrices, shapes)
    copy_all_(outputs, rows)


def _divided(count: int, n: int, m: int, rank: int) -> Iterator[tuple[_Some, list[slice]]]:
    """Yield a range of full matrices, or one matrix with the ranges of its rows.

    The pieces of a matrix depend on n, m and rank alone, so equal matrices give equal bits in any block.
    """
    numbers = min(_CACHED, _PRODUCTS // rank)
    if n * m <= numbers and count > 1:
        at_once = numbers // (n * m)
        for index in range(0, count, at_once):
            yield slice(index, min(index + at_once, count)), [slice(0, n)]
        return
    rows = max(1, numbers // m)
    all_rows = [slice(begin, min(begin + rows, n)) for begin in range(0, n, rows)]
    for index in range(count):
        yield index, all_rows


def _filled(matrices: Tensor, rank: int, late: Optional[Sum]) -> Iterator[tuple[_Some, slice, _Array]]:
    """Yield the matrices in pieces; fill each piece with the sum before."""
    whole = matrices.numpy()
    old = None if late is None or late.old is None else late.old.view(matrices.shape).numpy()
    for some, all_rows in _divided(len(matrices), matrices.shape[1], matrices.shape[2], rank):
        matrix = whole[some]
        if late is None:
            for rows in all_rows:
                yield some, rows, matrix[..., rows, :]
            continue
        if late.rows is not None:
            _fill_rows(matrix, None if old is None else old[some], late, some)
            for rows in all_rows:
                yield some, rows, matrix[..., rows, :]
            continue
        gradients = [late.gradients[some]] if isinstance(some, int) else late.gradients[some]
        source = _array(gradients, matrices.dtype).reshape(matrix.shape)
        before = None if old is None else old[some]
        for rows in all_rows:
            piece, addend = matrix[..., rows, :], source[..., rows, :]
            if late.factor != 1:
                addend = addend * late.factor
            if before is None:
                piece[...] = addend
            else:
                np.add(before[..., rows, :], addend, out=piece)
            yield some, rows, piece


def _fill_rows(matrix: _Array, old: Optional[_Array], late: Sum, some: _Some) -> None:
    """Write the sum for matrices, or for one, whose gradients do not fill them."""
    assert late.rows is not None
    some = slice(some, some + 1) if isinstance(some, int) else some
    # The zeros are written too: after a dropped step the buffer may hold other numbers there.
    if old is None:
        matrix[...] = 0
    elif old.ctypes.data != matrix.ctypes.data:
        matrix[...] = old
    add_all_(late.rows[some], late.gradients[some], late.factor)


def _load(piece: _Array) -> None:
    """Bring a piece into the cache: a product reads across rows, too far apart for the prefetcher of the processor."""
    piece.reshape(-1)[:: _LINE_BYTES // piece.itemsize].max()


def _array(gradients: Sequence[Tensor], dtype: torch.dtype) -> _Array:
    """Return gradients as one array of `dtype`; a lone contiguous gradient of this dtype without a copy."""
    # Cast before the multiplication: divided by the loss scale, a gradient in fp16 may become zero.
    one = gradients[0].unsqueeze(0) if len(gradients) == 1 else torch.stack(list(gradients))
    return one.detach().to(dtype).contiguous().numpy()


_REFLECTED_ROWS = 32  # up to this number reflections of all matrices together are faster than QR one by one


def orthonormal(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of a space that holds the rows, (matrices, rank, extent)."""
    # QR stays accurate for almost dependent rows, unlike one pass of Cholesky-QR, and is the fastest on a CPU. On a
    # GPU it works on one tall matrix after another.
    if launches_kernels(rows) and rows.shape[1] <= _REFLECTED_ROWS:
        return _reflected(rows)
    return torch.linalg.qr(rows.mT).Q.mT.contiguous()


def _reflected(rows: Tensor) -> Tensor:
    """Return the result of QR for all matrices at once, by Householder reflections.

    Like QR, and unlike Gram-Schmidt, it gives an orthonormal basis for any rows, even equal rows or zeros.
    """
    rank = rows.shape[1]
    # The length of a row does not change its direction, and squares of small numbers would underflow to zero.
    tiny = torch.finfo(rows.dtype).tiny
    rest = rows / rows.abs().amax(2, keepdim=True).clamp_min_(tiny)
    normals: list[Tensor] = []
    for index in range(rank):
        # Reflect the rest of a row, x, at `normal`, so that only its first element is not zero. The normal is
        # x / |x| with 1 added to the magnitude of its first element: a row of zeros has the first axis as normal.
        x = rest[:, index, index:]
        unit = x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min_(tiny)
        unit[:, 0].add_(torch.where(unit[:, 0] < 0, -1.0, 1.0))
        normal = unit.div_(torch.linalg.vector_norm(unit, dim=1, keepdim=True)).unsqueeze(1)
        normals.append(normal)
        _reflect(rest[:, index + 1 :, index:], normal)
    basis = torch.eye(rank, rows.shape[2], dtype=rows.dtype, device=rows.device).repeat(len(rows), 1, 1)
    for index in reversed(range(rank)):
        _reflect(basis[:, index:, index:], normals[index])
    return basis


def _reflect(rows: Tensor, normal: Tensor) -> None:
    """Reflect rows (matrices, rows, extent) at the planes of `normal` (matrices, 1, extent), in place."""
    # A sum of products, since a matrix product may be rounded to the 11 bits of TF32.
    rows.addcmul_((rows * normal).sum(2, keepdim=True), normal, value=-2)
