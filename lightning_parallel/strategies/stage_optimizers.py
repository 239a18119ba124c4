"""Optimizers of one pipeline stage, built as those of the whole model.

A checkpoint numbers the parameters of an optimizer in the order of its groups. Each stage holds some of them, so while
`configure_optimizers` runs, placeholders fill the gaps; then they are removed from the optimizers, and the order stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.checkpoint import ModelNames
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import parameters_of

__all__ = ["remove_placeholders", "whole_parameters"]


@contextmanager
def whole_parameters(
    module: nn.Module, names: ModelNames, group: Group, device: torch.device
) -> Iterator[dict[nn.Parameter, str]]:
    """Give `module` placeholders for the parameters of other stages inside the block, all in their usual order.

    An optimizer that is built there has the parameter groups that it has in one process. Without the placeholders each
    stage would know the order of its own parameters only, and a checkpoint needs that of all. They have the shape,
    dtype and device of parameters, but one element of memory. Every rank of `group` must call it.

    Args:
        module: The model, of which this rank holds some stages.
        names: Names in the whole model.
        group: The pipeline group.
        device: Of the placeholders.

    Yields:
        The placeholders, and the first name of each.
    """
    held = {
        name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }
    described = {name: facts for stage in comm.all_gather_object(held, group) for name, facts in stage.items()}
    # Not on `meta`: fused optimizers refuse devices that they have no kernels for.
    placeholders = {
        name: nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape), requires_grad)
        for name, (shape, dtype, requires_grad) in described.items()
        if name not in held
    }
    attributes: dict[str, dict[str, str]] = {}
    for name, first in names.parameters.items():
        path, _, attribute = name.rpartition(".")
        attributes.setdefault(path, {})[attribute] = first
    undo: list[Callable[[], None]] = []
    try:
        for path, firsts in attributes.items():
            wanted = {attribute: placeholders.get(first) for attribute, first in firsts.items()}
            undo.append(_fill_in(module.get_submodule(path), wanted))
        yield {parameter: name for name, parameter in placeholders.items()}
    finally:
        for restore in undo:
            restore()


def _fill_in(owner: nn.Module, wanted: Mapping[str, nn.Parameter | None]) -> Callable[[], None]:
    """Register the `wanted` placeholders in `owner` where it lacks the parameter; the result undoes it."""
    parameters = parameters_of(owner)
    before = dict(parameters)
    # What a stage has of a missing parameter is an ordinary attribute, which would hide the registered placeholder.
    hidden = {name: vars(owner).pop(name) for name in wanted if before.get(name) is None and name in vars(owner)}
    # Filled anew rather than added to: the order of the dict is that of `named_parameters`.
    parameters.clear()
    for name, placeholder in wanted.items():
        parameters[name] = placeholder if before.get(name) is None else before[name]
    for name, parameter in before.items():
        parameters.setdefault(name, parameter)

    def restore() -> None:
        added = {name: value for name, value in parameters.items() if name not in before and name not in wanted}
        parameters.clear()
        parameters.update(before)
        parameters.update(added)
        vars(owner).update(hidden)

    return restore


def remove_placeholders(
    optimizer: Optimizer, placeholders: Mapping[nn.Parameter, str], module: nn.Module
) -> list[list[str]]:
    """Remove the parameters of other stages from `optimizer`.

    Returns:
        The names in its parameter groups before that, as one process would have them.
    """
    names = {**{parameter: name for name, parameter in module.named_parameters()}, **placeholders}
    groups = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        groups.append([names.get(parameter, "") for parameter in parameters])
        is_held = [parameter not in placeholders for parameter in parameters]
        for key in ("params", "param_names"):  # the latter where an optimizer was given named parameters
            if key in group:
                group[key] = [entry for entry, keep in zip(group[key], is_held) if keep]
    for parameter in placeholders:
        optimizer.state.pop(parameter, None)  # some optimizers, such as Adagrad, have state from the start
    return groups
