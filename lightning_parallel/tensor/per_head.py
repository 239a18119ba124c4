"""Per-head state of attention modules, besides linear layers: parameters, buffers, and numbers of heads.

    slopes (H, 1, 1)    tables of relative positions (buckets, H)    scales (H, 1, 1)    num_heads = H

Legend for shapes: H heads, h heads on this rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.compat import Division
from lightning_parallel.compat.torch import buffers_of, pytree, version_of
from lightning_parallel.tensor.autograd import copy_to_group
from lightning_parallel.tensor.conversion import convert, shard_parameters
from lightning_parallel.tensor.pieces import NarrowInput, part_along, whole_input, whole_of
from lightning_parallel.tensor.sharding import Shard, ShardPart

__all__ = ["DividedTensor", "PerHead", "PerHeadModule", "set_local_values"]

"""Attribute of a leaf of autograd's graph that a forward made for this rank's heads; nobody reads its gradient."""


@dataclass(frozen=True)
class DividedTensor:
    """A parameter or buffer; each rank uses the entries of its heads.

    Attributes:
        name: Its name in its module.
        dim: The dimension of the heads.
        parts: The parts of that dimension that are split one by one.
    """

    name: str
    dim: int
    parts: tuple[ShardPart, ...]

    def rule(self, ranks: int) -> Shard:
        """Return which entries each rank uses."""
        return Shard.packed(self.dim, self.parts, ranks)


@dataclass(frozen=True)
class PerHead:
    """Shards the parameters of a module that belong to heads, and lets its code see this rank's heads only.

    Args:
        parameters: The sharded parameters.
        buffers: The forward sees this rank's entries of these buffers; they stay full, as checkpoints keep them.
        shared: Names of parameters that all heads use: each rank has the gradient from its heads.
        width: The parts of the features of all heads, if the code takes their number from the input's last size. The
            code then reads this rank's number there.
        given: The arguments of the forward that hold a value for each head, such as a position bias; `name` is the
            position or the keyword, and the dimension counts from the end. The forward sees the entries of this rank's
            heads.
        common: Positions or keywords of further arguments that all heads use: each rank has a part of their gradients.
        returned: The entries of the returned tuple that hold a value for each head; `name` is the position. The caller
            gets the values of all heads.
    """

    parameters: tuple[DividedTensor, ...] = ()
    buffers: tuple[DividedTensor, ...] = ()
    shared: tuple[str, ...] = ()
    width: tuple[ShardPart, ...] | None = None
    given: tuple[DividedTensor, ...] = ()
    common: tuple[str, ...] = ()
    returned: tuple[DividedTensor, ...] = ()

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        own = dict(module.named_parameters(recurse=False))
        for known in self.parameters:
            if known.name not in own:
                raise TypeError(f"`PerHead` must apply to a module with a parameter `{known.name}`")
        return {known.name: known.rule(ranks) for known in self.parameters}

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        return frozenset(self.shared)

    def apply(self, module: nn.Module, group: Group) -> None:
        """See `Style`."""
        rules = self.rules(module, group.size)
        # A later call may give by keyword what the recorded call gave by position.
        names = _positional_names(module.forward)
        layer = convert(module, PerHeadModule)
        layer.positional = names
        layer.buffer_rules = {known.name: known.rule(group.size) for known in self.buffers}
        layer.given_rules = {_named(names, known.name): known.rule(group.size) for known in self.given}
        layer.common = tuple(_named(names, name) for name in self.common)
        layer.returned_rules = {int(known.name): known.rule(group.size) for known in self.returned}
        layer.input_features = None
        if self.width is not None:
            layer.input_features = Shard.packed(0, self.width, group.size).local_size(group.rank)
        layer.group = group
        shard_parameters(layer, rules, group)


class PerHeadModule(nn.Module):
    """Module that computes this rank's heads; see `PerHead`."""

    buffer_rules: dict[str, Shard]
    positional: tuple[str, ...]
    given_rules: dict[str, Shard]
    common: tuple[str, ...]
    returned_rules: dict[int, Shard]
    input_features: int | None
    group: Group

    @torch.compiler.disable  # the input's own size and the buffers' slices are made in every call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the original class with this rank's entries.

        Raises:
            RuntimeError: If it changes a buffer, because it sees only this rank's entries.
        """
        if self.input_features is not None and args and isinstance(args[0], Tensor):
            args = (NarrowInput.of(args[0], self.input_features), *args[1:])
        if self.given_rules or self.common:
            args, kwargs = self._of_own_heads(args, kwargs)
        own = buffers_of(self)
        # A pipeline stage may have freed the buffers of another stage.
        whole = {name: buffer for name in self.buffer_rules if (buffer := own.get(name)) is not None}
        local = {name: self.buffer_rules[name].split(buffer, self.group.rank) for name, buffer in whole.items()}
        # A write into a local copy would be lost, so it must be detected.
        versions = {name: version_of(buffer) for name, buffer in local.items()}
        try:
            own.update(local)
            output = super().forward(*args, **kwargs)
            for name, buffer in local.items():
                if own[name] is not buffer or version_of(buffer) != versions[name]:
                    raise RuntimeError(
                        f"`{type(self).__name__}` must not change its buffer `{name}`: each tensor-parallel rank"
                        " sees only the entries of its heads. Keep the layers of this module replicated with"
                        " tensor_plan={..., '<its path>.*': 'replicate'}"
                    )
        finally:
            # Also after an error: checkpoints read the full buffers.
            own.update(whole)
        # An output may be the narrow input itself, and other code needs its true sizes.
        output = pytree.tree_map(whole_input, output)
        return self._of_all_heads(output) if self.returned_rules else output

    def _of_own_heads(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the arguments with a value for each head by the values of this rank's heads."""
        positions = [_named(self.positional, str(at)) for at in range(len(args))]
        found = {**dict(zip(positions, args)), **kwargs}
        for name in (*self.given_rules, *self.common):
            if name in found:
                found[name] = pytree.tree_map(partial(self._entered, self.given_rules.get(name)), found[name])
        return tuple(found[name] for name in positions), {name: found[name] for name in kwargs}

    def _entered(self, rule: Shard | None, value: Any) -> Any:
        """Return an argument for this rank's heads; in backward, its gradient becomes the gradient of all heads."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if rule is not None and value.dim() >= -rule.dim and value.shape[rule.dim] == rule.full_size:
            return part_along(value, self.group, value.dim() + rule.dim, rule.sizes)
        # All heads share it, and it broadcasts.
        return copy_to_group(value, self.group) if value.requires_grad else value

    def _of_all_heads(self, output: Any) -> Any:
        """Return an output whose values of this rank's heads read as the values of all heads."""
        if type(output) is not tuple:  # such as the main output alone
            return output
        entries = list(output)
        for at, rule in self.returned_rules.items():
            value = entries[at] if at < len(entries) else None
            if isinstance(value, Tensor) and value.dim() >= -rule.dim:
                # A module of the same kind takes this rank's part from it, so nothing is sent between the two.
                entries[at] = whole_of(value, self.group, value.dim() + rule.dim, rule.sizes)
        return tuple(entries)


def _positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters that a call may give by position."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, known in signature(forward).parameters.items() if known.kind in kinds)


def _named(names: Sequence[str], name: str) -> str:
    """Return the name of an argument, given its position or its keyword."""
    return names[int(name)] if name.isdigit() and int(name) < len(names) else name


def set_local_values(module: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set attributes, or values inside them, to this rank's values; return the old attributes.

    The value of an attribute is copied before a change, because other modules may hold it (a configuration).

    Args:
        module: The module.
        values: New values by name; "config.heads" and "sizes.0" name values inside an attribute.
    """
    before: dict[str, Any] = {}
    for name, value in values.items():
        attribute, *inner = name.split(".")
        Division.of(module).keep(module, attribute)
        old = getattr(module, attribute)
        # The first value of an attribute is the original one: several names may change parts of it.
        before.setdefault(attribute, old)
        setattr(module, attribute, _with_value(old, inner, value))
    return before


def _with_value(holder: Any, keys: list[str], value: Any) -> Any:
    """Return a copy of `holder` in which the value at the end of `keys` is replaced."""
    if not keys:
        return value
    key, *rest = keys
    if isinstance(holder, (list, tuple)):
        items = list(holder)
        items[int(key)] = _with_value(items[int(key)], rest, value)
        return type(holder)(*items) if hasattr(holder, "_fields") else type(holder)(items)
    copied = copy.copy(holder)
    if isinstance(holder, dict):
        copied[key] = _with_value(holder[key], rest, value)
    else:
        # A frozen dataclass refuses `setattr`.
        object.__setattr__(copied, key, _with_value(getattr(holder, key), rest, value))
    return copied
