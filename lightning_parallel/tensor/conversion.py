"""Turn ordinary modules into sharded modules in place: the new class is a subclass of the module's class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from inspect import get_annotations
from typing import TypeVar

from torch import nn

from lightning_parallel.comm import Group
from lightning_parallel.compat import Division, PartialModule, class_in_place
from lightning_parallel.tensor.inspection import only_wraps
from lightning_parallel.tensor.sharding import Shard

__all__ = ["convert", "shard_parameters"]

L = TypeVar("L", bound=nn.Module)


def convert(module: nn.Module, layer: type[L]) -> L:
    """Make `module` an instance of both `layer` and its original class, in place.

    If an overridden `forward` calls the inherited method, it now calls the `forward` of `layer`. The `Division` of
    the module keeps the attributes that `layer` declares, because the caller sets them.
    """
    declared = {name for base in layer.__mro__ if not _is_torchs(base) for name in get_annotations(base)}
    Division.of(module).keep(module, *declared)
    module.__class__ = _subclass(layer, type(module))  # type: ignore[arg-type]
    assert isinstance(module, layer)
    return module


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "builtins")


class _Divided(PartialModule):
    """First base of the class of every converted module."""

    def _what_is_missing(self) -> str:
        return f"This `{type(self).__name__}` is sharded over the tensor-parallel ranks, and each holds only its shard"


# Cached, so that all converted modules of a class share one class again.
@cache
def _subclass(layer: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    if issubclass(layer, original):
        return layer
    name = layer.__name__ if original.__module__.startswith("torch.nn.") else f"{layer.__name__}[{original.__name__}]"
    for native in (nn.Linear, nn.Embedding):
        if issubclass(original, native) and original.forward is not native.forward and only_wraps(original, native):
            # The user's forward goes first, and its `super().forward` finds `layer.forward`, not `native.forward`.
            bases: tuple[type, ...] = (original, _subclass(layer, native))  # type: ignore[arg-type]
            return type(name, bases, {"__module__": layer.__module__})
    # The layer precedes the original class, so its `forward` overrides or wraps the original one.
    bases = (_Divided, layer, original)
    return class_in_place(name, bases, {"__module__": layer.__module__})


def shard_parameters(module: nn.Module, rules: Mapping[str, Shard], group: Group) -> None:
    """Reduce the data (and gradients) of the named parameters of `module` to this rank's shards.

    The rule is kept with the parameter, as `shard_rule`. A parameter that has a rule already, because it is tied to a
    parameter of another module, is left unchanged. Parameters on the meta device get the shard's shape.

    Raises:
        ValueError: If the parameter was sharded by a different rule.
    """
    for name, rule in rules.items():
        parameter = module.get_parameter(name)
        known = getattr(parameter, "shard_rule", None)
        if known is not None and known != rule:
            raise ValueError(f"Tied parameters must be sharded in the same way; got {known} and {rule} for `{name}`")
        if known is None:
            # The object stays: optimizers, hooks and tied modules hold references to it.
            parameter.data = rule.split(parameter.data, group.rank)
            if parameter.grad is not None:
                parameter.grad = rule.split(parameter.grad, group.rank)
            parameter.shard_rule = rule  # type: ignore[attr-defined]
