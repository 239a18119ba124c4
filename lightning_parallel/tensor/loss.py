"""Cross-entropy of logits whose classes are sharded over the ranks, without gathering them.

Let z be the logits and m their maximum. The ranks exchange only a few numbers per target. The first message is the
maximum. The second holds the sum of exp(z - m) and the z - m of the target's class. With label smoothing, it also holds
the sum of z - m.

Legend: N targets of any shape, C classes, c classes on this rank.

Source: Megatron-LM, section 3, https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import assert_on_device, has_data
from lightning_parallel.tensor.autograd import copy_to_group, reduce_from_group
from lightning_parallel.tensor.sharding import Shard

__all__ = ["class_loss_arguments", "cross_entropy", "nll_loss"]


def class_loss_arguments(
    shape: Sequence[int], place: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of `F.cross_entropy` or `F.nll_loss` by name, `reduction` always among them.

    It returns None for soft targets, outdated arguments, and arguments that do not fit: torch's function knows them.

    Args:
        shape: The sizes of the logits.
        place: The dimension of the classes as the caller sees it.
        args: The arguments after the logits.
        kwargs: Keyword arguments.
    """
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {"reduction": "mean"} | dict(zip(names, args)) | dict(kwargs)
    target, weight = given.get("target"), given.get("weight")
    outdated = (given.pop("size_average", None), given.pop("reduce", None))
    is_known = (
        place == min(1, len(shape) - 1)
        and isinstance(target, Tensor)
        and target.dtype == torch.long
        and [*target.shape] == [size for at, size in enumerate(shape) if at != place]
        and (weight is None or (not weight.requires_grad and [*weight.shape] == [shape[place]]))
        and outdated == (None, None)
        and given["reduction"] in ("mean", "sum", "none")
        and 0.0 <= given.get("label_smoothing", 0.0) <= 1.0
        and given.keys() <= {*names}
    )
    return given if is_known else None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    rule: Shard,
    group: Group,
    *,
    dim: int = -1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of the full logits from this rank's classes.

    Forward: two all-reduces, of one number per target and of two or three. Backward: no communication; each rank gets
    the gradient of its classes.

    Args:
        logits: This rank's classes, (N..., c), or with the classes in dimension `dim`. Half precision is computed in
            single precision.
        target: Class indices (N...) in the full vocabulary, equal on all ranks.
        rule: The shard rule of the classes: one consecutive range per rank; its `dim` does not matter.
        group: The tensor-parallel group.
        dim: Dimension of the classes. PyTorch's own layout is `dim=1`.
        weight: Weight of each of the C classes, (C,), equal on all ranks.
        ignore_index: Targets of this value do not count.
        reduction: As in PyTorch; the mean of no targets is nan.
        label_smoothing: Share of the target distribution that is spread evenly over all classes.

    Returns:
        The loss, equal on all ranks: () for `mean` and `sum`, (N...) for `none`.

    Raises:
        ValueError: If the arguments do not fit each other.
        IndexError: If a target is not a class (on CUDA, an assertion on the device).
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"`label_smoothing` must be between 0 and 1; got {label_smoothing}")
    valid = _valid_targets(logits, target, rule, group, dim, reduction, ignore_index)
    classes = _Classes(rule.ranges[group.rank][0][0], rule.full_size, group, label_smoothing)
    losses, _ = _CrossEntropy.apply(logits.movedim(dim, -1), target, valid, weight, classes)
    if torch.is_autocast_enabled(logits.device.type):
        losses = losses.float()  # torch's cross-entropy gives single precision under autocast
    return _reduced(losses, target, valid, weight, reduction)


def nll_loss(
    log_p: Tensor,
    target: Tensor,
    rule: Shard,
    group: Group,
    *,
    dim: int = -1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Compute `torch.nn.functional.nll_loss` of all log-probabilities from this rank's classes.

    Forward: an all-reduce of one number per target. Backward: no communication. For the arguments see
    `cross_entropy`.
    """
    valid = _valid_targets(log_p, target, rule, group, dim, reduction, ignore_index)
    ((first, stop),) = rule.ranges[group.rank]
    held = valid & (target >= first) & (target < stop)
    own = log_p.movedim(dim, -1).gather(-1, (target - first).masked_fill(~held, 0).unsqueeze(-1)).squeeze(-1)
    # One rank holds the class of each target, so the sum over the ranks is that rank's number.
    losses = -reduce_from_group(own.masked_fill(~held, 0.0), group)
    if weight is not None:
        losses = losses * weight[target.masked_fill(~valid, 0)]
    return _reduced(losses, target, valid, weight, reduction)


def _reduced(losses: Tensor, target: Tensor, valid: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    # An ignored target is no index into `weight`, so class 0 takes its place, with the weight zero.
    counted = valid if weight is None else weight[target.masked_fill(~valid, 0)] * valid
    return losses.sum() / counted.sum()


def _valid_targets(
    logits: Tensor, target: Tensor, rule: Shard, group: Group, dim: int, reduction: str, ignore_index: int
) -> Tensor:
    """Check the arguments, and return a mask of the targets that count."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction` must be 'mean', 'sum' or 'none'; got {reduction!r}")
    if rule.ranks != group.size or not rule.consecutive or any(len(ranges) != 1 for ranges in rule.ranges):
        raise ValueError(f"`rule` must give each of the {group.size} ranks one range, in their order; got {rule}")
    if target.is_floating_point():
        raise ValueError("`target` must hold class indices; class probabilities are not supported")
    shape = list(logits.shape)
    size = shape.pop(dim)
    if size != rule.local_size(group.rank) or shape != list(target.shape):
        raise ValueError(
            f"`logits` must have {tuple(target.shape)} targets by {rule.local_size(group.rank)} classes; got shape"
            f" {tuple(logits.shape)} with the classes in dimension {dim}"
        )
    valid = target != ignore_index
    known = ((target >= 0) & (target < rule.full_size) | ~valid).all()
    if target.device.type != "cpu":
        assert_on_device(known, "Targets must be classes; got a target that is not")  # the host does not wait
    elif has_data(target) and not known:
        raise IndexError(f"Targets must be in [0, {rule.full_size}) or {ignore_index}; got {target.unique().tolist()}")
    return valid


@dataclass(frozen=True)
class _Classes:
    """This rank's classes: they start at `first`, of `count` in total."""

    first: int
    count: int
    group: Group
    smoothing: float


class _CrossEntropy(Function):
    """Loss of each target (N...), and the probabilities of this rank's classes (N..., c).

    loss = (1 - a) w_t (log s - z_t) + a / C sum_k w_k (log s - z_k),  s = sum_k exp z_k,  z relative to its maximum

    The probabilities are a result only for gradients of gradients: backward computes with them.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, valid: Tensor, weight: Tensor | None, classes: _Classes
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # The sum of exponentials over all classes needs more digits than half precision has.
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # The maximum is over all classes, not this rank's: the ranks' sums of exponentials must share one scale.
        z = z - comm.all_reduce_(z.amax(-1), classes.group, "max").unsqueeze(-1)
        size = z.shape[-1]
        held = (target >= classes.first) & (target < classes.first + size)
        index = (target - classes.first).masked_fill(~held, 0).unsqueeze(-1)
        w = None if weight is None else weight.to(z.dtype)
        local_w = None if w is None else w[classes.first : classes.first + size]
        # The first place is for the sum of exponentials, which exist only after the terms of `z` are taken.
        parts = [None, z.gather(-1, index).squeeze(-1).masked_fill(~held, 0.0)]
        if classes.smoothing:
            parts.append((z if local_w is None else z * local_w).sum(-1))
        p = z.exp_()  # in place, after the terms that need z: the logits are the largest tensor of many models
        parts[0] = p.sum(-1)
        s, z_target, *z_sum = comm.all_reduce_(torch.stack(parts), classes.group).unbind()
        p /= s.unsqueeze(-1)
        log_s = s.log()
        a = classes.smoothing
        w_target = torch.ones_like(s) if w is None else w[target.masked_fill(~valid, 0)]
        w_total = float(classes.count) if w is None else w.sum()
        losses = (1 - a) * w_target * (log_s - z_target)
        if z_sum:
            losses += a / classes.count * (w_total * log_s - z_sum[0])
        # Backward needs the probabilities only, so the logits are not kept.
        ctx.save_for_backward(p, index, held, valid, w_target, local_w)
        ctx.classes = classes
        ctx.w_total = w_total
        ctx.dtype = logits.dtype
        return losses.masked_fill_(~valid, 0.0).to(logits.dtype), p

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_p: Tensor | None) -> tuple[Any, ...]:
        p, index, held, valid, w_target, local_w = ctx.saved_tensors
        group, a = ctx.classes.group, ctx.classes.smoothing
        dz = None
        if grad is not None:
            grad = grad.to(p.dtype).masked_fill(~valid, 0.0)  # not a product: the mean of no targets sends nan
            # Autograd enables gradients inside a backward only for `create_graph=True`.
            if torch.is_grad_enabled():
                grad = copy_to_group(grad, group)
            hard = (1 - a) * w_target * grad
            soft = a / ctx.classes.count * grad
            # The derivative: probabilities times the total weight, minus the weight of each class.
            dz = p * (hard + soft * ctx.w_total).unsqueeze(-1)
            # `index` is 0 where another rank holds the target, and there `held` makes the added value zero.
            dz = dz.scatter_add_(-1, index, -(hard * held).unsqueeze(-1))
            if a:
                dz -= soft.unsqueeze(-1) * (1.0 if local_w is None else local_w)
        if of_p is not None:
            # As of a softmax, whose sum goes over the classes of all ranks.
            total = copy_to_group(reduce_from_group((of_p * p).sum(-1, keepdim=True), group), group)
            dz = p * (of_p - total) if dz is None else dz + p * (of_p - total)
        return None if dz is None else dz.to(ctx.dtype), None, None, None, None
