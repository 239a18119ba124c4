"""Find out by experiment what an optimizer looks at: single elements, whole tensors, or all tensors together.

A rank has shards of tensors, or the tensors of some stages. An optimizer that treats each element by itself steps as in
one process there; one that takes norms, factors or projections over more than it is given does not. Names do not tell:
everybody writes a LAMB. So fresh optimizers of the same class and options train a small problem whose gradient has no
coupling between elements, once as a whole and once in pieces.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["is_elementwise", "is_tensorwise"]

# Some factor or project only matrices with 128 rows or more.
_SIZE = 160
# Enough that what looks at norms or distances has left its first step behind.
_STEPS = 8
# Evaluation of the loss at which a run is looked at for the first time; the first two are of the start.
_EARLY = 3
# Of the largest update. States may be kept in single precision.
_TOLERANCE = 1e-4
_PLAIN = (bool, int, float, str, tuple, list, type(None))

Split = Callable[[list[Tensor]], list[list[Tensor]]]


def is_elementwise(optimizer: Optimizer, group: Mapping[str, Any]) -> bool | None:
    """Tell whether a parameter group updates each element by itself, so that shards of its tensors train alike.

    Args:
        optimizer: The user's, which is only read.
        group: One of its parameter groups.

    Returns:
        None if no fresh optimizer of the class can be made or stepped.
    """

    def rows(tensors: list[Tensor]) -> list[list[Tensor]]:
        matrix, *others = tensors
        return [[matrix[: _SIZE // 2], *others], [matrix[_SIZE // 2 :], *others]]

    def columns(tensors: list[Tensor]) -> list[list[Tensor]]:
        matrix, *others = tensors
        return [[matrix[:, : _SIZE // 2], *others], [matrix[:, _SIZE // 2 :], *others]]

    return _is_same(optimizer, group, (rows, columns))


def is_tensorwise(optimizer: Optimizer, group: Mapping[str, Any]) -> bool | None:
    """Tell whether a parameter group updates each tensor by itself, so that stages with some of them train alike.

    Args, Returns: As for `is_elementwise`.
    """
    return _is_same(optimizer, group, (lambda tensors: [[tensor] for tensor in tensors],))


def _is_same(optimizer: Optimizer, group: Mapping[str, Any], splits: Sequence[Split]) -> bool | None:
    device = next((parameter.device for parameter in group["params"]), torch.device("cpu"))
    shapes: list[list[tuple[int, ...]]] = [[(_SIZE, _SIZE), (_SIZE,)], [(_SIZE, _SIZE), (_SIZE, _SIZE)]]
    for tried in shapes:  # the second for those that take matrices only
        try:
            with isolate_rng():
                return all(_agrees(optimizer, group, tried, split, device) for split in splits)
        except Exception:
            continue
    return None


def _agrees(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    split: Split,
    device: torch.device,
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        # Parts of different size, so that a norm over one differs from that over all.
        for tensor in tensors:
            tensor[: _SIZE // 2].mul_(4.0)
            if tensor.dim() > 1:
                tensor[:, : _SIZE // 4].mul_(3.0)
        tensors[-1].mul_(5.0)
        return [tensor.to(device) for tensor in tensors]

    values, targets = drawn(), drawn()
    whole = _train(optimizer, group, values, targets)
    starts = [start for part in split(values) for start in part]
    pieces = [_train(optimizer, group, part, aims) for part, aims in zip(split(values), split(targets))]
    compared = [
        (start, expected, found)
        for stop, tensors in enumerate(whole)
        for start, expected, found in zip(
            starts,
            [tensor for part in split(tensors) for tensor in part],
            [tensor for piece in pieces for tensor in piece[stop]],
        )
    ]
    for start, expected, found in compared:
        largest = (expected - start).abs().max()
        # No bound on what is not a number: the problem is at fault then, and not the split.
        if bool((expected - found).abs().max() > _TOLERANCE * largest):
            return False
    return True


def _train(
    optimizer: Optimizer, group: Mapping[str, Any], values: Sequence[Tensor], targets: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what `values` are early on, and after some steps towards `targets` by a fresh optimizer."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(value.clone()) for value in values]
    # Curvatures that differ, or one step would end at the target whatever an optimizer estimates.
    curvatures = [1.0 + torch.sigmoid(target) for target in targets]
    fresh = _fresh(optimizer, group, parameters)
    seen: list[list[Tensor]] = []

    def closure() -> Tensor:
        # Separable: the gradient of an element depends on that element alone, whatever is cut where.
        # Those that evaluate often in one step, as LBFGS does, are at the target after it, however they came there.
        seen.append([parameter.detach().clone() for parameter in parameters] if len(seen) == _EARLY else [])
        loss = torch.zeros((), dtype=torch.float64, device=values[0].device)
        for parameter, target, curvature in zip(parameters, targets, curvatures):
            distance = parameter.detach() - target
            parameter.grad = curvature * distance
            loss = loss + (curvature * distance.square()).sum() / 2
        return loss

    takes_closure = bool(inspect.signature(fresh.step).parameters)
    for _ in range(_STEPS):
        closure()  # some ignore the one that they are given
        fresh.step(closure) if takes_closure else fresh.step()  # type: ignore[call-arg, call-overload]
    return seen[_EARLY], [parameter.detach() for parameter in parameters]


def _fresh(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Make an optimizer of the same class and options for other parameters.

    Raises:
        Exception: Whatever its constructor raises.
    """
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
    # A scheduler with warmup has set it to zero by now, where every optimizer leaves everything as it is.
    rate = float(options["lr"]) if "lr" in options else None
    if rate is not None:
        options["lr"] = rate if rate > 0 and math.isfinite(rate) else float(optimizer.defaults.get("lr") or 1e-2)
    taken = inspect.signature(type(optimizer).__init__).parameters
    known = {**vars(optimizer), **optimizer.defaults, **options}
    arguments = {name: known[name] for name in list(taken)[2:] if name in known and isinstance(known[name], _PLAIN)}
    kind = type(optimizer)
    try:
        fresh = kind([{**options, "params": parameters}], **arguments)
    except Exception:
        fresh = kind(parameters, **arguments)  # type: ignore[call-arg]
    for made in fresh.param_groups:
        made.update(options)
    return fresh
