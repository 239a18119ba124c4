"""Making a module parallel in place: its class becomes a subclass of what it was, its parameters shrink to shards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_parallel.comm import Group
from lightning_parallel.tensor.linear import Inputs, SequenceLengths
from lightning_parallel.tensor.sharding import Shard
from lightning_parallel.tensor.source import only_wraps

__all__ = [
    "convert",
    "describe",
    "full_shape",
    "is_linear",
    "is_native",
    "is_transposed",
    "shard_parameters",
    "shared_inputs",
]

L = TypeVar("L", bound=nn.Module)


def convert(module: nn.Module, layer: type[L]) -> L:
    """Make `module` an instance of `layer` and of what it was.

    A `forward` of its own, which calls the inherited one, calls that of `layer` instead.
    """
    module.__class__ = _subclass(layer, type(module))  # type: ignore[arg-type]
    assert isinstance(module, layer)
    return module


@cache
def _subclass(layer: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    if issubclass(layer, original):
        return layer
    name = layer.__name__ if original.__module__.startswith("torch.nn.") else f"{layer.__name__}[{original.__name__}]"
    for native in (nn.Linear, nn.Embedding):
        if issubclass(original, native) and original.forward is not native.forward:
            return type(name, (original, _subclass(layer, native)), {"__module__": layer.__module__})  # type: ignore[arg-type]
    return type(name, (layer, original), {"__module__": layer.__module__})


def shard_parameters(module: nn.Module, rules: Mapping[str, Shard], group: Group) -> None:
    """Reduce the data (and gradients) of the named parameters of `module` to this rank's shards.

    A parameter that has already been divided, because it is tied to one of another module, is left as it is.

    Raises:
        ValueError: If it has been divided by another rule.
    """
    for name, rule in rules.items():
        parameter = module.get_parameter(name)
        known = getattr(parameter, "shard_rule", None)
        if known is not None and known != rule:
            raise ValueError(f"`{name}` is tied to a parameter that is divided in another way: {known}, not {rule}")
        if known is None:
            parameter.data = rule.split(parameter.data, group.rank)
            if parameter.grad is not None:
                parameter.grad = rule.split(parameter.grad, group.rank)
            parameter.shard_rule = rule  # type: ignore[attr-defined]


@cache
def shared_inputs(group: Group, sequence_dim: int | None) -> Inputs:
    """The `Inputs` that all column-parallel layers of `group` share."""
    return Inputs(group, None if sequence_dim is None else SequenceLengths(group, sequence_dim))


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is an affine map with an ordinary weight: `nn.Linear`, or transformers' `Conv1D`."""
    return is_native(module, nn.Linear) or is_transposed(module)


def is_native(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether `module` computes with an ordinary floating-point weight by the `forward` of `kind`."""
    weight = module._parameters.get("weight")
    ordinary = weight is not None and not is_lazy(weight) and weight.is_floating_point()
    return isinstance(module, kind) and ordinary and _plain(module) and only_wraps(type(module), kind)


def is_transposed(module: nn.Module) -> bool:
    """Whether `module` is transformers' `Conv1D`: a linear layer whose weight is (in, out)."""
    weight = module._parameters.get("weight")
    named = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    return (
        named
        and _plain(module)
        and weight is not None
        and weight.dim() == 2
        and full_shape(weight)[1] == getattr(module, "nf", None)
    )


def _plain(module: nn.Module) -> bool:
    return "forward" not in vars(module)


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape that `parameter` has, or had before it was divided."""
    rule: Shard | None = getattr(parameter, "shard_rule", None)
    return parameter.shape if rule is None else rule.full_shape(parameter.shape)


def describe(module: nn.Module) -> str:
    """The class of `module`, for messages."""
    kind = type(module)
    return f"`{kind.__module__}.{kind.__qualname__}`"
