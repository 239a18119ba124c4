"""Finds changes of the model and its optimizers by the user's code during training, and accepts or rejects them.

    layers pruned, replaced, added or removed; parameters registered or removed     `ModelWatch.differences`
    optimizers set up again, replaced, or with other parameter groups              `ModelWatch.has_new_optimizers`

Ranks that only replicate the model accept every change. Sharded layers and pipeline stages cannot: shards on other
ranks, communication between stages and names in checkpoints fit the model at set-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from lightning_parallel.compat.torch import MODULES, buffers_of, parameters_of
from lightning_parallel.tensor.plan import Sharding, divided_regions

__all__ = ["Differences", "ModelWatch", "refuse_in_shards", "refuse_in_stages", "refuse_new_parameters"]

_MOST_NAMED = 4


class _HeldThen(NamedTuple):
    """Holds the former contents of a module. The references keep the objects alive, so that each `id` stays unique."""

    module: nn.Module
    parameters: tuple[Any, ...]
    children: tuple[Any, ...]
    buffers: tuple[str, ...]


class Differences(NamedTuple):
    """Lists the differences between a model and its former state.

    Attributes:
        gone, come: Removed and added parameters, by name. A replaced parameter is in both.
        gone_modules, come_modules: Removed and added modules, by path.
        buffers: Names of removed and added buffers.
    """

    gone: dict[str, nn.Parameter]
    come: dict[str, nn.Parameter]
    gone_modules: dict[str, nn.Module]
    come_modules: dict[str, nn.Module]
    buffers: tuple[str, ...]

    @property
    def places(self) -> list[str]:
        """Paths of the modules whose own contents changed, without submodules of removed and added modules."""
        inner = {*self.gone_modules, *self.come_modules}
        owners = {path.rpartition(".")[0] for path in (*inner, *self.gone, *self.come)}
        return sorted(path for path in owners if path not in inner)

    def __str__(self) -> str:
        parts = []
        for word, found in (("gone", self.gone | self.gone_modules), ("new", self.come | self.come_modules)):
            names = sorted(name for name in found if name.rpartition(".")[0] in self.places)
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            if names:
                parts.append(f"{word}: {', '.join(f'`{name}`' for name in names[:_MOST_NAMED])}{more}")
        if self.buffers and not parts:
            parts.append(f"buffers: {', '.join(f'`{name}`' for name in self.buffers[:_MOST_NAMED])}")
        return "; ".join(parts)

    def summary(self) -> tuple[list[str], ...]:
        """Return only the names, for a comparison between ranks."""
        return tuple(sorted(part) for part in self)


class ModelWatch:
    """Finds changes of a model or its optimizers between two steps.

    A check takes a microsecond per module, since it compares lengths and identities only.

    Args:
        module: The user's module.
        optimizers: Returns the present optimizers of the Trainer.
    """

    def __init__(self, module: nn.Module, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        self._module = module
        self._optimizers = optimizers
        self.begin()

    def begin(self) -> None:
        """Take the present model and optimizers as the state to compare with."""
        self._seen = [
            _HeldThen(
                child,
                tuple(parameters_of(child).values()),
                tuple(vars(child)[MODULES].values()),
                tuple(buffers_of(child)),
            )
            for child in self._module.modules()
        ]
        # With duplicates: a tied parameter has several names, and code may replace the parameter under a single name.
        self._parameters = dict(self._module.named_parameters(remove_duplicate=False))
        self._modules = dict(self._module.named_modules(remove_duplicate=False))
        self._buffers = dict(self._module.named_buffers(remove_duplicate=False)).keys()
        self._groups = _groups(self._optimizers())

    @property
    def is_changed(self) -> bool:
        """Whether the model or an optimizer has changed."""
        return self.has_new_model or self.has_new_optimizers

    @property
    def has_new_model(self) -> bool:
        """Whether a module or parameter was added, removed or replaced, or a buffer added or removed."""
        return not all(
            _is_same(seen.parameters, parameters_of(seen.module).values())
            and _is_same(seen.children, vars(seen.module)[MODULES].values())
            # Buffers by name only: a step may assign a new tensor to a buffer.
            and seen.buffers == tuple(buffers_of(seen.module))
            for seen in self._seen
        )

    @property
    def has_new_optimizers(self) -> bool:
        """Whether an optimizer was added, removed or replaced, or has other parameters."""
        now = _groups(self._optimizers())
        return not (
            len(now) == len(self._groups) and all(_is_same(before, after) for before, after in zip(self._groups, now))
        )

    def differences(self) -> Differences:
        """Return the differences between the model and its state at `begin`."""
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        modules = dict(self._module.named_modules(remove_duplicate=False))
        buffers = dict(self._module.named_buffers(remove_duplicate=False)).keys()
        return Differences(
            _lost(self._parameters, parameters),
            _lost(parameters, self._parameters),
            _lost(self._modules, modules),
            _lost(modules, self._modules),
            tuple(sorted(self._buffers ^ buffers)),
        )


def _is_same(before: Sequence[Any], after: Any) -> bool:
    # By identity: `==` of two parameters compares their elements.
    return len(before) == len(after) and all(map(is_, before, after))


def _groups(optimizers: Iterable[Optimizer]) -> list[tuple[Any, ...]]:
    """Return each optimizer with its parameters, and None after each parameter group."""
    # None ends each group, so that a parameter that moves to the next group counts as a change.
    return [
        (optimizer, *(value for group in optimizer.param_groups for value in (*group["params"], None)))
        for optimizer in optimizers
    ]


def _lost(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in before.items() if after.get(name) is not value}


# ------------------------------------------------------------------------------------------------------ refusals

_WAY_OUT = "Change the model before `fit` (in `__init__` or `configure_model`)"


def refuse_in_shards(found: Differences, sharding: Sharding, modules: Mapping[str, nn.Module]) -> None:
    """Refuse changes of sharded layers and of modules between them.

    Args:
        found: The changes.
        sharding: How layers are sharded.
        modules: The present modules, by path.

    Raises:
        ValueError: With the modules, and what to do.
    """
    # A region that the user has moved still exists as an object, but its plan belongs to the old path.
    still_there = set(map(id, modules.values()))
    for region in divided_regions(sharding.plan):
        was = found.gone_modules.get(region)
        is_moved = was is not None and id(was) in still_there
        if is_moved or (was is None and any(_is_inside(place, region) for place in found.places)):
            raise ValueError(
                f"The model was changed between two steps: `{region or type(modules['']).__name__}` must keep its"
                f" contents from the start of the run; got others ({found}). Its layers are sharded over"
                f" tensor-parallel ranks, and the self-check has not tried this form. {_WAY_OUT}, replace the full"
                f" module, or keep it replicated: tensor_plan={{..., {f'{region}.*' if region else '*'!r}:"
                " 'replicate'} [LP030]"
            )
    for sequence in sharding.plan.sequence_regions:
        places = [*found.places, *found.gone_modules]
        inside = [place for place in places if any(_is_inside(place, block) for block in sequence.blocks)]
        if inside:
            raise ValueError(
                f"The model was changed between two steps: `{inside[0]}` must keep its contents from the start of"
                f" the run; got others ({found}). Its activations are sharded along the sequence. {_WAY_OUT}, or set"
                " `sequence_parallel=False` [LP030]"
            )


def refuse_in_stages(found: Differences, layers: str, is_intercepted: Callable[[nn.Module], bool]) -> None:
    """Refuse changes of a model in pipeline stages. Modules without parameters outside the stages may change.

    Args:
        found: The changes.
        layers: Path of the container of the split layers.
        is_intercepted: Tells whether calls of a module go through the pipeline.

    Raises:
        ValueError: With the modules, and what to do.
    """
    containers = [part.strip() for part in layers.split(",")]
    changed = [*found.gone_modules.items(), *found.come_modules.items()]
    names = [path for path, module in changed if any(is_intercepted(child) for child in module.modules())]
    names += [path for path, _ in changed if any(_is_inside(path, container) for container in containers)]
    names += [*found.gone, *found.come]
    if names:
        raise ValueError(
            f"The model was changed between two steps: `{names[0]}` must keep its modules and parameters from the"
            f" start of the run; got others ({found}). The model is split into pipeline stages, which hold its layers"
            f" by the plan of the first batch. {_WAY_OUT}, or train with TensorParallelStrategy [LP030]"
        )


def refuse_new_parameters(found: Differences, reason: str) -> None:
    """Refuse added and removed parameters.

    Args:
        found: The changes.
        reason: Why the parameters must stay.

    Raises:
        ValueError: If a parameter was added or removed.
    """
    if found.gone or found.come:
        raise ValueError(
            "The model was changed between two steps: it must keep its parameters from the start of the run; got"
            f" others ({found}). {reason} {_WAY_OUT} [LP030]"
        )


def _is_inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")
