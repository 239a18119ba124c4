"""Collectives that autograd understands: each comes with its dual.

| operation               | forward                                | backward                              |
|-------------------------|----------------------------------------|---------------------------------------|
| `copy_to_group`         | nothing                                | all-reduce                            |
| `reduce_from_group`     | all-reduce                             | nothing                               |
| `scatter_to_group`      | keep this rank's slice                 | all-gather                            |
| `gather_from_group`     | all-gather                             | keep this rank's slice                |
| `all_gather_to_group`   | all-gather                             | reduce-scatter                        |
| `reduce_scatter_to_group` | reduce-scatter                       | all-gather                            |
| `all_to_all_in_group`   | exchange slices                        | exchange them back                    |
| `broadcast_to_group`    | take the source's tensor               | sum at the source, zero elsewhere     |
| `send_to`               | send                                   | receive the gradient                  |
| `receive_from`          | receive                                | send the gradient                     |

Which of two operations with the same forward is right depends on what follows. After `gather_from_group` every rank
does the same work, so every rank already has the whole gradient; after `all_gather_to_group` each rank does work of
its own, so the gradients are parts that have to be summed. `copy_to_group` is for the entry of such a region,
`reduce_from_group` for its exit.

Inputs are never changed, groups are always explicit, and in a group of one rank every operation but `send_to` and
`receive_from` returns its input. Collectives along a dimension take the extent of each rank's slice, so slices may
differ in size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_parallel import comm
from lightning_parallel.comm import Group

__all__ = [
    "all_gather_to_group",
    "all_to_all_in_group",
    "broadcast_to_group",
    "copy_to_group",
    "gather_from_group",
    "no_view",
    "receive_from",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "scatter_to_group",
    "send_to",
]


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Enter a region where each rank does a part of the work: the same `x` everywhere, its gradients summed."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Leave such a region: the sum of `x` over the ranks, on every rank."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def scatter_to_group(x: Tensor, group: Group, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's slice along `dim` of an `x` that is the same on every rank.

    Args:
        sizes: Extent of each rank's slice; equal slices when omitted.

    Raises:
        ValueError: If the slices do not add up to the extent of `x`.
    """
    return x if group.size == 1 else _Scatter.apply(x, group, dim, _slices(x, group, dim, sizes))


def gather_from_group(x: Tensor, group: Group, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """All ranks' `x` along `dim`, for work that every rank then does alike.

    Args:
        sizes: Extent of `x` on each rank; the same everywhere when omitted.
    """
    return x if group.size == 1 else _Gather.apply(x, group, dim, sizes or [x.shape[dim]] * group.size)


def all_gather_to_group(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """All ranks' `x` along `dim`, for work of which every rank then does a part.

    Args:
        sizes: Extent of `x` on each rank; the same everywhere when omitted.
    """
    return x if group.size == 1 else _AllGather.apply(x, group, dim, sizes or [x.shape[dim]] * group.size)


def reduce_scatter_to_group(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's slice along `dim` of the sum of `x` over the ranks.

    Args:
        sizes: Extent of each rank's slice; equal slices when omitted.

    Raises:
        ValueError: If the slices do not add up to the extent of `x`.
    """
    return x if group.size == 1 else _ReduceScatter.apply(x, group, dim, _slices(x, group, dim, sizes))


def all_to_all_in_group(
    x: Tensor,
    group: Group,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Cut `x` along `split_dim`, send slice j to rank j, and join what arrives along `concat_dim`.

    Args:
        split_sizes: Extent of the slice for each rank; equal slices when omitted.
        concat_sizes: Extent along `concat_dim` of `x` on each rank; the same everywhere when omitted.

    Raises:
        ValueError: If the slices do not add up to the extent of `x`, or both dimensions are the same.
    """
    if group.size == 1:
        return x
    if split_dim % x.dim() == concat_dim % x.dim():
        raise ValueError(f"`split_dim` and `concat_dim` must differ, both are dimension {split_dim % x.dim()}")
    concat_sizes = concat_sizes or [x.shape[concat_dim]] * group.size
    return _AllToAll.apply(x, group, split_dim, concat_dim, _slices(x, group, split_dim, split_sizes), concat_sizes)


def broadcast_to_group(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """The `x` of the rank at position `source`, on every rank; elsewhere `x` only says shape and dtype."""
    return x if group.size == 1 else _Broadcast.apply(x, group, source)


def send_to(x: Tensor, group: Group, to: int, tag: int = 0) -> Tensor:
    """Send `x` to the rank at position `to`.

    Returns:
        A zero, connected to `x`, whose backward receives the gradient of `x`: add it to the loss.
    """
    return _Send.apply(x, group, to, tag)


def receive_from(like: Tensor, group: Group, source: int, tag: int = 0) -> Tensor:
    """Receive a tensor from the rank at position `source`; its backward sends the gradient there.

    Args:
        like: Gives shape, dtype and device.
    """
    anchor = torch.zeros((), requires_grad=like.is_floating_point())
    return _Receive.apply(anchor, like, group, source, tag)


def no_view(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """`x.view(shape)`, but not known as a view: autograd lets nobody change a view that a `Function` returns."""
    return _unsafe_view(x, x.shape if shape is None else shape)


_unsafe_view = torch.ops.aten._unsafe_view.default


def _slices(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> Sequence[int]:
    extent = x.shape[dim]
    if sizes is None and extent % group.size:
        raise ValueError(f"dimension {dim} of {extent} does not divide over {group.size} ranks; pass the sizes")
    sizes = sizes or [extent // group.size] * group.size
    if sum(sizes) != extent:
        raise ValueError(f"slices of {list(sizes)} do not add up to dimension {dim} of {extent}")
    return sizes


def _slice(x: Tensor, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return reduce_from_group(grad, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return comm.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return copy_to_group(grad, ctx.group), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.args = group, dim, sizes
        return _slice(x, dim, sizes, group.rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return gather_from_group(grad, *ctx.args), None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.args = group, dim, sizes
        return no_view(comm.all_gather(x, group, dim, sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return scatter_to_group(grad, *ctx.args), None, None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.args = group, dim, sizes
        return no_view(comm.all_gather(x, group, dim, sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return reduce_scatter_to_group(grad, *ctx.args), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.args = group, dim, sizes
        return no_view(comm.reduce_scatter(x, group, dim, sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return all_gather_to_group(grad, *ctx.args), None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        split_dim: int,
        concat_dim: int,
        split_sizes: Sequence[int],
        concat_sizes: Sequence[int],
    ) -> Tensor:
        ctx.args = group, concat_dim, split_dim, concat_sizes, split_sizes
        slices = x.split(list(split_sizes), split_dim)
        shape = list(slices[group.rank].shape)
        shapes = []
        for size in concat_sizes:
            shape[concat_dim] = size
            shapes.append(torch.Size(shape))
        sent = torch.cat([piece.reshape(-1) for piece in slices])
        arriving = [shape.numel() for shape in shapes]
        received = comm.all_to_all(sent, group, [piece.numel() for piece in slices], arriving)
        return torch.cat([piece.view(shape) for piece, shape in zip(received.split(arriving), shapes)], concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return all_to_all_in_group(grad, *ctx.args), None, None, None, None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, source: int) -> Tensor:
        ctx.group, ctx.source = group, source
        return comm.broadcast_(x.clone(memory_format=torch.contiguous_format), group, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        total = comm.all_reduce(grad, ctx.group)
        return total if ctx.group.rank == ctx.source else torch.zeros_like(total), None, None


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, to: int, tag: int) -> Tensor:
        ctx.args = group, to, tag
        ctx.like = x.shape, x.dtype, x.device
        comm.isend(x.contiguous(), group, to, tag).wait()
        return torch.zeros((), dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        group, to, tag = ctx.args
        shape, dtype, device = ctx.like
        received = comm.irecv(torch.empty(shape, dtype=dtype, device=device), group, to, tag).wait()
        return received, None, None, None


class _Receive(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor, group: Group, source: int, tag: int) -> Tensor:
        ctx.args = group, source, tag
        return comm.irecv(torch.empty_like(like, memory_format=torch.contiguous_format), group, source, tag).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        comm.isend(grad.contiguous(), *ctx.args).wait()
        return torch.zeros(()), None, None, None, None
