"""Gives the optimizers of a pipeline stage the parameter groups of one process.

A checkpoint numbers the parameters of an optimizer in the order of its groups. A stage holds only some parameters, so
dummy parameters fill the gaps while `configure_optimizers` runs. Afterwards the dummies leave the optimizers, and the
order stays known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.optim import Optimizer

from lightning_parallel.compat.torch import parameters_of

__all__ = ["fill_in", "remove_dummy_parameters"]


def fill_in(owner: nn.Module, wanted: Mapping[str, nn.Parameter | None]) -> Callable[[], None]:
    """Register the `wanted` dummies in `owner` where it lacks the parameter; return a function that undoes it."""
    parameters = parameters_of(owner)
    before = dict(parameters)
    # A placeholder for a missing parameter is an ordinary attribute, which would hide the registered dummy.
    hidden = {name: vars(owner).pop(name) for name in wanted if before.get(name) is None and name in vars(owner)}
    # Cleared and filled again: the order of the dict must be the order of `named_parameters`.
    parameters.clear()
    for name, dummy in wanted.items():
        parameters[name] = dummy if before.get(name) is None else before[name]
    for name, parameter in before.items():
        parameters.setdefault(name, parameter)

    def restore() -> None:
        # `configure_optimizers` may have registered a parameter, which stays.
        added = {name: value for name, value in parameters.items() if name not in before and name not in wanted}
        parameters.clear()
        parameters.update(before)
        parameters.update(added)
        vars(owner).update(hidden)

    return restore


def remove_dummy_parameters(
    optimizer: Optimizer, dummies: Mapping[nn.Parameter, str], module: nn.Module
) -> list[list[str]]:
    """Remove the parameters of other stages from `optimizer`.

    Returns:
        The names in its parameter groups before the removal, which are the groups of one process.
    """
    names = {**{parameter: name for name, parameter in module.named_parameters()}, **dummies}
    groups = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        groups.append([names.get(parameter, "") for parameter in parameters])
        is_held = [parameter not in dummies for parameter in parameters]
        for key in ("params", "param_names"):  # the latter if an optimizer was given named parameters
            if key in group:
                # In place, because optimizers keep a reference to the list.
                group[key][:] = [entry for entry, keep in zip(group[key], is_held) if keep]
    for parameter in dummies:
        optimizer.state.pop(parameter, None)  # some optimizers, such as Adagrad, have state from the start
    return groups
