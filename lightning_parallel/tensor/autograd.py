"""Collectives with a forward and a backward: each is an autograd function whose backward is the dual collective.

| function                  | forward                            | backward                              |
|---------------------------|------------------------------------|---------------------------------------|
| `copy_to_group`           | identity                           | all-reduce                            |
| `reduce_from_group`       | all-reduce                         | identity                              |
| `whole_from_group`        | identity                           | divide by the number of ranks         |
| `scatter_to_group`        | keep this rank's slice             | all-gather                            |
| `gather_from_group`       | all-gather                         | keep this rank's slice                |
| `all_gather_to_group`     | all-gather                         | reduce-scatter                        |
| `reduce_scatter_to_group` | reduce-scatter                     | all-gather                            |
| `all_to_all_in_group`     | exchange slices                    | exchange them back                    |

Two functions can have the same forward; the computation that follows decides between them. After `gather_from_group`
all ranks compute the same, so each rank has the full gradient already. After `all_gather_to_group` each rank computes
something different, so the gradients are partial and have to be summed. `copy_to_group` marks the entry of such a
region, and `reduce_from_group` its exit. `whole_from_group` is the exit for results that all ranks computed alike
inside the region.

Inputs are never modified and groups are always explicit. In a group of one rank every function returns its input.
Functions along a dimension take the extent of each rank's slice, so slices may differ in size. Every rank of
the group must call the function, in the same order.

Legend for shapes: n is the extent along `dim` of the full tensor, n_r of the slice of rank r, `ranks` the group's size.

Source: Megatron-LM, section 3, https://arxiv.org/abs/1909.08053; for the sequence, https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_parallel import comm
from lightning_parallel.comm import Group, group_labelled
from lightning_parallel.comm.kept import kept
from lightning_parallel.compat.torch import unsafe_view

__all__ = [
    "all_gather_to_group",
    "all_to_all_in_group",
    "copy_to_group",
    "gather_from_group",
    "no_view",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "scatter_to_group",
    "whole_from_group",
]

RECEIVED = "_ReceivedBackward"
"""Name of the backward node of a tensor that a pipeline stage received from the stage before."""


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Return `x`; in backward, sum its gradient over the ranks.

    Forward: identity. Backward: all-reduce. Enters a region in which each rank does a part of the work.

    Args:
        x: Any shape, equal on all ranks.
        group: The ranks that take part.

    Returns:
        A tensor of the same shape, equal on all ranks. Its gradient is partial; the gradient of `x` is complete.
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_graph("copy_to_group", x, group.label)
    return x if group.size == 1 else _CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Return the sum of `x` over the ranks.

    Forward: all-reduce. Backward: identity. Leaves a region in which each rank does a part of the work.

    Args:
        x: Any shape, the same on all ranks; the values differ.
        group: The ranks that take part.

    Returns:
        A tensor of the same shape, equal on all ranks. Its gradient must be equal on all ranks.
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_graph("reduce_from_group", x, group.label)
    return x if group.size == 1 else _ReduceFromGroup.apply(x, group)


def whole_from_group(x: Tensor, group: Group) -> Tensor:
    """Return `x`, which all ranks computed alike where gradients are summed; in backward, each takes an equal share.

    Forward: identity. Backward: division by the number of ranks. Leaves a region in which each rank does a part of the
    work, with a result that every rank computed in full.

    Args:
        x: Any shape, equal on all ranks.
        group: The ranks that take part.

    Returns:
        A tensor of the same shape. Its gradient must be equal on all ranks.
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_graph("whole_from_group", x, group.label)
    return x if group.size == 1 else _WholeFromGroup.apply(x, group)


def scatter_to_group(x: Tensor, group: Group, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's slice along `dim`.

    Forward: slice, without communication. Backward: all-gather of the slices' gradients.

    Args:
        x: (..., n, ...), equal on all ranks.
        group: The ranks that take part.
        dim: The dimension that is sharded.
        sizes: Extent n_r of each rank's slice; equal slices by default.

    Returns:
        (..., n_r, ...).

    Raises:
        ValueError: If the slices do not add up to the extent of `x`.
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_graph("scatter_to_group", x, group.label, dim, sizes)
    return x if group.size == 1 else _ScatterToGroup.apply(x, group, dim, _slices(x, group, dim, sizes))


def gather_from_group(x: Tensor, group: Group, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate the slices of all ranks along `dim`, for a computation that all ranks then repeat.

    Forward: all-gather. Backward: slice, without communication.

    Args:
        x: (..., n_r, ...), this rank's slice.
        group: The ranks that take part.
        dim: The dimension that is sharded.
        sizes: Extent n_r of `x` on each rank; the same on all ranks by default.

    Returns:
        (..., n, ...), equal on all ranks. Its gradient must be equal on all ranks.
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_graph("gather_from_group", x, group.label, dim, sizes)
    return x if group.size == 1 else _GatherFromGroup.apply(x, group, dim, sizes or [x.shape[dim]] * group.size)


def all_gather_to_group(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate the slices of all ranks along `dim`, for a computation that each rank then does a part of.

    Forward: all-gather. Backward: reduce-scatter.

    Args:
        x: (..., n_r, ...), this rank's slice.
        group: The ranks that take part.
        dim: The dimension that is sharded.
        sizes: Extent n_r of `x` on each rank; the same on all ranks by default.

    Returns:
        (..., n, ...), equal on all ranks. Its gradients are summed over the ranks.
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_graph("all_gather_to_group", x, group.label, dim, sizes)
    return x if group.size == 1 else _AllGatherToGroup.apply(x, group, dim, sizes or [x.shape[dim]] * group.size)


def reduce_scatter_to_group(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's slice along `dim` of the sum of `x` over the ranks.

    Forward: reduce-scatter. Backward: all-gather.

    Args:
        x: (..., n, ...), the same shape on all ranks; the values differ.
        group: The ranks that take part.
        dim: The dimension that is sharded.
        sizes: Extent n_r of each rank's slice; equal slices by default.

    Returns:
        (..., n_r, ...).

    Raises:
        ValueError: If the slices do not add up to the extent of `x`.
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_graph("reduce_scatter_to_group", x, group.label, dim, sizes)
    return x if group.size == 1 else _ReduceScatterToGroup.apply(x, group, dim, _slices(x, group, dim, sizes))


def all_to_all_in_group(
    x: Tensor,
    group: Group,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Move the sharded dimension of a tensor from `concat_dim` to `split_dim`.

    Forward: split `x` along `split_dim`, send slice r to rank r, concatenate the received slices along `concat_dim`.
    Backward: the same with both dimensions exchanged.

    Args:
        x: (..., n, ..., m_r, ...): full along `split_dim`, sharded along `concat_dim`.
        group: The ranks that take part.
        split_dim: The dimension along which `x` is split.
        concat_dim: The dimension along which the received slices are concatenated.
        split_sizes: Extent n_r of the slice for each rank; equal slices by default.
        concat_sizes: Extent m_r along `concat_dim` of `x` on each rank; the same on all ranks by default.

    Returns:
        (..., n_r, ..., m, ...): sharded along `split_dim`, full along `concat_dim`.

    Raises:
        ValueError: If the slices do not add up to the extent of `x`, or both dimensions are the same.
    """
    if group.size == 1:
        return x
    if split_dim % x.dim() == concat_dim % x.dim():
        raise ValueError(f"`split_dim` and `concat_dim` must differ; got dimension {split_dim % x.dim()} for both")
    concat_sizes = concat_sizes or [x.shape[concat_dim]] * group.size
    split_sizes = _slices(x, group, split_dim, split_sizes)
    return _AllToAllInGroup.apply(x, group, split_dim, concat_dim, split_sizes, concat_sizes)


@torch.compiler.allow_in_graph
def _in_graph(name: str, x: Tensor, label: str, *places: Any) -> Tensor:
    """Run a function of this module by its name.

    It is one node of a compiled graph. The compiler runs its code once, and records the operators.
    """
    return globals()[name](x, group_labelled(label), *places)


def no_view(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return `x.view(shape)` without registering it as a view, so that the caller may change it in place.

    Autograd forbids in-place changes of a view that a `Function` returns.
    """
    return unsafe_view(x, x.shape if shape is None else shape)


def _slices(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> Sequence[int]:
    # Checked before any communication: a rank that raised later would leave the other ranks waiting.
    extent = x.shape[dim]
    if sizes is None and extent % group.size:
        raise ValueError(
            f"The extent of dimension {dim} must be a multiple of the {group.size} ranks; got {extent}. Pass the sizes"
        )
    sizes = sizes or [extent // group.size] * group.size
    if sum(sizes) != extent:
        raise ValueError(f"`sizes` must add up to {extent}, the extent of dimension {dim}; got {list(sizes)}")
    return sizes


def _slice(x: Tensor, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    # A copy: a view would keep the full tensor alive, and could not be changed in place by the caller.
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)


# Each backward calls the differentiable function that is its dual, and not the bare collective. This makes gradients of
# gradients right too. The broadcast and the messages at the end are exceptions.


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)  # an alias, so that the output has a separate `grad_fn`

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Each rank did a part of the work with `x`; their gradients add up.
        return reduce_from_group(grad, ctx.group), None


class _ReduceFromGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return kept(lambda: comm.all_reduce(x, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Every summand has the gradient of the sum, which is equal on all ranks already.
        return copy_to_group(grad, ctx.group), None


class _WholeFromGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # The entry of the region sums over the ranks, so equal shares add up to the full gradient.
        return grad / ctx.group.size, None


class _ScatterToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.args = group, dim, sizes
        return _slice(x, dim, sizes, group.rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Each rank has the gradient of one slice, but the input was replicated, so each needs the full gradient.
        return gather_from_group(grad, *ctx.args), None, None, None


class _GatherFromGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.args = group, dim, sizes
        return kept(lambda: no_view(comm.all_gather(x, group, dim, sizes)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # All ranks computed the same from the output, so `grad` is the full gradient on each of them.
        return scatter_to_group(grad, *ctx.args), None, None, None


class _AllGatherToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.args = group, dim, sizes
        return kept(lambda: no_view(comm.all_gather(x, group, dim, sizes)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Each rank did a part of the work with the output, so the gradients have to be summed before they are sliced.
        return reduce_scatter_to_group(grad, *ctx.args), None, None, None


class _ReduceScatterToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.args = group, dim, sizes
        return kept(lambda: no_view(comm.reduce_scatter(x, group, dim, sizes)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Every rank's summand has the gradient of the full sum, and each rank holds one slice of that gradient.
        return all_gather_to_group(grad, *ctx.args), None, None, None


class _AllToAllInGroup(Function):
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
        # Slices of different shapes go into one flat message; the receiver restores the shapes from the sizes.
        slices = x.split(list(split_sizes), split_dim)
        # Each rank sends a slice of this rank's extent along `split_dim`.
        shape = list(slices[group.rank].shape)
        shapes = []
        for size in concat_sizes:
            shape[concat_dim] = size
            shapes.append(torch.Size(shape))
        sent = torch.cat([part.reshape(-1) for part in slices])
        arriving = [shape.numel() for shape in shapes]
        received = kept(lambda: comm.all_to_all(sent, group, [part.numel() for part in slices], arriving))
        return torch.cat([part.view(shape) for part, shape in zip(received.split(arriving), shapes)], concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return all_to_all_in_group(grad, *ctx.args), None, None, None, None, None
