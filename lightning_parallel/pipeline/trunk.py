"""The trunk: the container of the repeated layers, which the pipeline cuts into runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

__all__ = ["Trunk", "find_trunk", "layer_kinds", "pieces", "units"]

_RIVAL_SHARE = 0.5


@dataclass(frozen=True)
class Trunk:
    """The repeated layers of a model.

    Attributes:
        path: Name of their container in the model.
        names: Name of each layer in the model, in order.
        layers: The layers.
    """

    path: str
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]

    @classmethod
    def at(cls, module: nn.Module, path: str) -> Trunk:
        """The container at `path`.

        Raises:
            ValueError: If there is no such module, or it is not a container of layers.
        """
        try:
            container = module.get_submodule(path)
        except AttributeError as error:
            known = ", ".join(f"`{name}`" for name, _ in _containers(module)) or "none"
            raise ValueError(
                f"expected `layers` to name a module, got `{path}` ({error}); containers: {known}"
            ) from None
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            raise ValueError(
                f"expected `layers` to name a `ModuleList` or `Sequential`, got `{path}`, a {type(container).__name__}"
            )
        prefix = f"{path}." if path else ""
        children = {name: layer for name, layer in container._modules.items() if layer is not None}
        return cls(path, tuple(prefix + name for name in children), tuple(children.values()))


def find_trunk(module: nn.Module, num_stages: int, path: str = "auto") -> Trunk:
    """Find the container whose repeated layers hold most of the parameters.

    Args:
        module: The whole model.
        num_stages: Stages to cut into; the container must have as many layers.
        path: Dotted name of the container, or `auto`.

    Raises:
        ValueError: If there is none, or two that could be it; says which, and how to name one.
    """
    if path != "auto":
        trunk = Trunk.at(module, path)
        _require_layers(trunk, num_stages)
        return trunk
    sizes = {name: _repeated_size(container) for name, container in _containers(module)}
    candidates = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
    if not candidates:
        raise ValueError(
            f"found no `ModuleList` or `Sequential` with repeated layers in {type(module).__name__} to cut into "
            f"{num_stages} stages; put the layers into one and call them in turn, or name it: layers='model.blocks'"
        )
    best = candidates[0]
    rivals = [name for name in candidates[1:] if sizes[name] > _RIVAL_SHARE * sizes[best] and not _related(name, best)]
    if rivals:
        listed = ", ".join(f"`{name}` ({sizes[name]:,} parameters)" for name in [best, *rivals])
        raise ValueError(f"several modules could be the layers to cut: {listed}; name one: layers='{best}'")
    trunk = Trunk.at(module, best)
    _require_layers(trunk, num_stages)
    return trunk


def layer_kinds(trunk: Trunk) -> list[int]:
    """Give layers that answer alike the same number.

    Two layers are of one kind if they have the same structure, parameter shapes and plain attributes. An attribute
    that counts the layers (`layer_idx`) is left out.
    """
    described = [_attributes(layer) for layer in trunk.layers]
    counting = {
        key
        for key in described[0]
        if len(described) > 1 and all(type(d.get(key)) is int and d[key] == k for k, d in enumerate(described))
    }
    numbers: dict[object, int] = {}
    kinds = []
    for layer, attributes in zip(trunk.layers, described):
        shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in layer.named_parameters())
        plain = tuple((key, value) for key, value in attributes.items() if key not in counting)
        kinds.append(numbers.setdefault((repr(layer), shapes, plain), len(numbers)))
    return kinds


def pieces(trunk: Trunk) -> tuple[int, ...]:
    """The numbers of layers in the shortest runs that have parameters: an activation goes with the layer before it."""
    starts = [index for index, layer in enumerate(trunk.layers) if next(layer.parameters(), None) is not None]
    return tuple(stop - start for start, stop in pairwise([0, *starts[1:], len(trunk.layers)]))


def units(module: nn.Module, trunk: Trunk, owned: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that have parameters and neither contain the layers nor lie inside them.

    Args:
        owned: Leave out those without parameters; without it, units that have lost theirs are found by their door.
    """

    def walk(name: str, child: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if child in layers:
            return
        if any(other in layers for other in child.modules()) or not name:
            for key, grandchild in child.named_children():
                yield from walk(f"{name}.{key}" if name else key, grandchild)
        elif "_pipeline_door" in child.__dict__ if not owned else next(child.parameters(), None) is not None:
            yield name, child

    layers = set(trunk.layers)
    yield from walk("", module)


def _containers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            yield name, child


def _repeated_size(container: nn.Module) -> int:
    """Most parameters in the container's children of one type; 0 if no type that has any is repeated."""
    sizes: Counter[object] = Counter()
    counts: Counter[object] = Counter()
    for child in container.children():
        size = sum(parameter.numel() for parameter in child.parameters())
        if size:
            is_container = isinstance(child, (nn.ModuleList, nn.Sequential))
            kind = tuple(map(type, child.modules())) if is_container else type(child)
            sizes[kind] += size
            counts[kind] += 1
    return max((size for kind, size in sizes.items() if counts[kind] > 1), default=0)


def _related(one: str, other: str) -> bool:
    """Whether one module lies inside the other."""
    short, long = sorted((one, other), key=len)
    return short == "" or long == short or long.startswith(f"{short}.")


def _require_layers(trunk: Trunk, num_stages: int) -> None:
    if len(trunk.layers) < num_stages:
        raise ValueError(
            f"expected at least one layer per stage, got {len(trunk.layers)} layers in `{trunk.path}` for {num_stages} "
            "stages; use fewer pipeline ranks or virtual stages, or name other layers"
        )


_PLAIN = (int, float, str, bool, tuple, type(None))


def _attributes(layer: nn.Module) -> dict[str, object]:
    return {
        f"{name}.{key}": value
        for name, child in layer.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, _PLAIN) and not key.startswith("_") and _hashable(value)
    }


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
