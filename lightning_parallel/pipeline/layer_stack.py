"""Find the layer stack of a model: the containers of its repeated layers, which a pipeline splits into runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_parallel.compat.torch import children_of

__all__ = [
    "LayerStack",
    "cut_units",
    "find_layer_stack",
    "find_layer_stacks",
    "layer_kinds",
    "outer_modules",
    "repeated_entries",
    "with_enough_layers",
]

_REVERSED = "[::-1]"
"""After the name of a container whose layers are called from the last to the first."""

_ORDERED = re.compile(r"\[([\d ]+)\]$")
"""After the name of a container whose entries are called in this order, some of them several times: `[0 0 1 1]`."""

# A container with at least this share of the parameters of the largest may be meant as well.
_RIVAL_SHARE = 0.5
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class LayerStack:
    """The repeated layers of a model, in the order of their calls; a layer appears once for each call.

    Attributes:
        path: Name of their container in the model. A suffix gives the order: `[::-1]` from the last layer to the first,
            or a list of entries. Commas join several containers that follow each other.
        names: Name of each layer in the model, in order.
        layers: The layers.
        blocks: The number of layers in each entry of the containers: more than one for a nested list.
    """

    path: str
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    blocks: tuple[int, ...]

    @classmethod
    def at(cls, module: nn.Module, path: str) -> LayerStack:
        """Return the stack of the container or the containers at `path`.

        Raises:
            ValueError: If there is no such module, it is not a container of layers, or it lacks a named entry.
        """
        entries: list[list[tuple[str, nn.Module]]] = []
        for part in _parts(path):
            name = _name_of(part)
            found = _entries(name, _container(module, name))
            order = [*map(int, match[1].split())] if (match := _ORDERED.search(part)) else list(range(len(found)))
            if order and max(order) >= len(found):
                raise ValueError(f"`{part}` must name entries of `{name}`, which has {len(found)}")
            entries += [found[i] for i in (reversed(order) if part.endswith(_REVERSED) else order)]
        layers = [layer for entry in entries for layer in entry]
        # A layer that is registered under several names goes by its first.
        names: dict[nn.Module, str] = {}
        for name, layer in layers:
            names.setdefault(layer, name)
        modules = tuple(layer for _, layer in layers)
        return cls(path, tuple(names[layer] for layer in modules), modules, tuple(map(len, entries)))

    @property
    def passes(self) -> int:
        """How often all layers are called, one after the other; 1 if they are called in another order."""
        in_pass = max(1, len(set(self.layers)))
        passes, rest = divmod(len(self.layers), in_pass)
        return passes if not rest and self.layers == self.layers[:in_pass] * passes else 1

    def passes_over(self, num_ranks: int) -> int:
        """Return how often the split of one pass is repeated, so that a rank holds few of the layers.

        It is 1 if a pass has too few layers: the split then goes through all calls, and stages share layers.
        """
        return self.passes if len(self.blocks) // self.passes >= num_ranks else 1

    def first_pass(self) -> LayerStack:
        """Return the stack with the first call of each layer only, if all are called one after the other."""
        count, num_blocks = (len(found) // self.passes for found in (self.layers, self.blocks))
        return LayerStack(self.path, self.names[:count], self.layers[:count], self.blocks[:num_blocks])

    def places(self) -> dict[nn.Module, tuple[int, ...]]:
        """Return the positions of each layer among the calls."""
        found: dict[nn.Module, tuple[int, ...]] = {}
        for index, layer in enumerate(self.layers):
            found[layer] = (*found.get(layer, ()), index)
        return found

    def in_order_of(self, calls: Sequence[int]) -> str:
        """Return the path of its containers in the order of calls of its layers, without uncalled containers.

        If some layers of an entry are called without the rest, return the stack's own path.

        Args:
            calls: Positions in `layers`, one for each call.
        """
        owner_of = self._owners()
        if len(set(calls)) < len(calls):
            return self._in_order_of_repeated(calls, owner_of)
        starts = [0, *accumulate(self.blocks)]
        found = []
        for part in dict.fromkeys(owner_of[index] for index in calls):
            mine = [index for index in calls if owner_of[index] == part]
            blocks = [start for start in starts if owner_of.get(start) == part]
            name = part.removesuffix(_REVERSED)
            if mine == sorted(mine):
                found.append((part, mine))
            elif [i for i in mine if i in blocks] == blocks[::-1] and len(blocks) == len(mine):
                found.append((name if part.endswith(_REVERSED) else name + _REVERSED, mine))
            else:
                return self.path
        # If containers take turns, no order of the containers gives these calls.
        in_turns = [index for _, mine in found for index in mine] != list(calls)
        return self.path if in_turns or not found else ", ".join(part for part, _ in found)

    def _owners(self) -> dict[int, str]:
        """Return the part of the path to which each layer belongs."""
        parts = _parts(self.path)
        owner_of = {}
        for index, name in enumerate(self.names):
            # If several fit, take the longest: a container may lie in another one's namespace.
            fitting = [part for part in parts if name.startswith(f"{_name_of(part)}.")]
            owner_of[index] = max(fitting, key=len) if fitting else parts[0]
        return owner_of

    def _in_order_of_repeated(self, calls: Sequence[int], owner_of: dict[int, str]) -> str:
        """Return the path if some layers are called several times."""
        bounds = [0, *accumulate(self.blocks)]
        entry_of = {
            index: entry for entry, (start, stop) in enumerate(pairwise(bounds)) for index in range(start, stop)
        }
        called: list[int] = []
        at = 0
        while at < len(calls):
            start, stop = bounds[entry_of[calls[at]]], bounds[entry_of[calls[at]] + 1]
            if list(calls[at : at + stop - start]) != list(range(start, stop)):
                return self.path
            called.append(start)
            at += stop - start
        found = []
        for part, mine in groupby(called, owner_of.__getitem__):
            blocks = [start for start in bounds if owner_of.get(start) == part]
            # In the order of the user's module, which the path may have reversed.
            own = blocks[::-1] if part.endswith(_REVERSED) else blocks
            found += _passes(_name_of(part), [own.index(start) for start in mine], len(own))
        return ", ".join(found)


def _parts(path: str) -> list[str]:
    return [part.strip() for part in path.split(",")]


def _name_of(part: str) -> str:
    """Return the name of the container in a part of a path."""
    return _ORDERED.sub("", part.removesuffix(_REVERSED))


def _passes(name: str, order: list[int], size: int) -> list[str]:
    """Return the parts of the path that call the entries of a container in this order."""
    whole = list(range(size))
    for one, part in ((whole, name), (whole[::-1], name + _REVERSED)):
        passes, rest = divmod(len(order), size)
        if not rest and order == one * passes:
            return [part] * passes
    return [f"{name}[{' '.join(map(str, order))}]"]


def find_layer_stack(module: nn.Module, num_stages: int, path: str = "auto") -> LayerStack:
    """Find the container whose repeated layers hold most of the parameters.

    Args:
        module: The full model.
        num_stages: Number of stages; the container must have as many layers.
        path: Dotted name of the container, or `auto`; commas join several that follow each other.

    Raises:
        ValueError: If there is none, or several candidates; with their names, and how to choose one.
    """
    stacks = find_layer_stacks(module, num_stages, path)
    if len(stacks) > 1:
        sizes = {name: _repeated_size(_container(module, name)) for name in _parts(stacks[0].path)}
        listed = ", ".join(f"`{name}` ({size:,} parameters)" for name, size in sizes.items())
        raise ValueError(
            f"Several modules could be the layers to split: {listed}. Name one, or several that follow each other:"
            f" layers='{stacks[-1].path}'"
        )
    return stacks[0]


def find_layer_stacks(module: nn.Module, num_stages: int, path: str = "auto", traced: bool = False) -> list[LayerStack]:
    """Find the candidates: all similar containers in a row, and the largest alone.

    Args:
        module: The full model.
        num_stages: Number of stages; the containers must have as many layers.
        path: See `find_layer_stack`.
        traced: Whether a trace will show how often layers are called; a container may then have too few.

    Raises:
        ValueError: If there is none; the message says how to name one.
    """
    if path != "auto":
        stack = LayerStack.at(module, path)
        return [stack if traced else with_enough_layers(stack, num_stages)]
    sizes = {name: _repeated_size(container) for name, container in _containers(module)}
    # Of equal ones, prefer trained layers: a frozen teacher is as large as its student.
    trained = {name: any(value.requires_grad for value in module.get_submodule(name).parameters()) for name in sizes}
    candidates = sorted((name for name in sizes if sizes[name]), key=lambda name: (-sizes[name], not trained[name]))
    if not candidates and traced:
        # One layer called as all layers of a model, as in ALBERT. Of nested containers the outermost comes first.
        single = [name for name, child in module.named_modules() if _holds_one_layer(child)]
        if single:
            return [LayerStack.at(module, single[0])]
    if not candidates:
        raise ValueError(
            f"{type(module).__name__} must have a `ModuleList` or `Sequential` with repeated layers to split into"
            " stages; got none. Put the layers into one and call them one after the other, or name it:"
            " layers='model.blocks' [LP021]"
        )
    paths = [candidates[0]]
    row = _containers_in_a_row(module, candidates, sizes)
    if len(row) > 1:
        paths.insert(0, ", ".join(row))
    # The row first: the trace of the step will show whether its containers do follow each other.
    stacks = [LayerStack.at(module, path) for path in paths]
    enough = [stack for stack in stacks if len(stack.blocks) >= num_stages]
    # If all have too few layers, the error names the candidate with the most layers.
    return enough or (stacks if traced else [with_enough_layers(stacks[0], num_stages)])


def repeated_entries(module: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """Return the entries of each list of modules, with their names, by the path of the list; outer lists only."""
    found: dict[str, list[tuple[str, nn.Module]]] = {}
    inside: set[nn.Module] = set()
    for path, container in module.named_modules():
        if isinstance(container, _CONTAINERS) and container not in inside and not _is_namespace(container):
            found[path] = [layer for entry in _entries(path, container) for layer in entry]
            inside.update(child for _, layer in found[path] for child in layer.modules())
    return found


def _containers_in_a_row(module: nn.Module, candidates: list[str], sizes: dict[str, int]) -> list[str]:
    """Return the containers that may follow each other, in order of registration.

    A rival holds nearly as many parameters as the largest, or layers of the same kind. Examples are the groups of a
    residual network, or the encoder and the decoder of a transformer.
    """
    largest = candidates[0]
    kind = _kinds(_container(module, largest)).most_common(1)[0][0]
    row = [largest]
    for name in candidates[1:]:
        is_rival = sizes[name] > _RIVAL_SHARE * sizes[largest] or kind in _kinds(_container(module, name))
        # A module inside another container is a part of its layers, so it cannot follow it.
        if is_rival and not any(_related(name, other) for other in row):
            row.append(name)
    # Registration order mostly equals execution order; if it does not, the trace of the step refuses the row.
    return sorted(row, key=list(sizes).index)


def layer_kinds(stack: LayerStack) -> list[int]:
    """Number the kinds of layers: layers of one kind cost the same and return outputs of the same shapes.

    Two layers are of one kind if they have the same structure, parameter shapes and plain attributes. An attribute
    that counts the layers of a container (`layer_idx`) is left out.
    """
    # Reversed, so that the first name of a shared layer is written last and stays.
    first = {layer: name for name, layer in reversed([*zip(stack.names, stack.layers)])}
    layers = list(dict.fromkeys(stack.layers))
    described = [_attributes(layer) for layer in layers]
    owners = [first[layer].rpartition(".")[0] for layer in layers]
    counting = {}
    for owner in set(owners):
        counting[owner] = _counting([attributes for attributes, other in zip(described, owners) if other == owner])
    numbers: dict[object, int] = {}
    kinds = {}
    for layer, attributes, owner in zip(layers, described, owners):
        shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in layer.named_parameters())
        plain = tuple((key, value) for key, value in attributes.items() if key not in counting[owner])
        # `repr` shows the structure, and the settings that modules report, such as a stride.
        kinds[layer] = numbers.setdefault((repr(layer), shapes, plain), len(numbers))
    return [kinds[layer] for layer in stack.layers]


def _counting(described: list[dict[str, object]]) -> set[str]:
    """Return the attributes that count the layers of a container: 0, 1, 2, ..."""
    # One layer cannot show whether its 0 is a count.
    if len(described) < 2:
        return set()
    counting = set()
    for key in described[0]:
        values = [attributes.get(key) for attributes in described]
        if all(type(value) is int for value in values) and values == list(range(len(values))):
            counting.add(key)
    return counting


def cut_units(stack: LayerStack) -> tuple[int, ...]:
    """Return the sizes of the shortest runs of blocks with parameters: an activation stays with the layer before it."""
    bounds = [0, *accumulate(stack.blocks)]
    starts = [
        start
        for start, stop in pairwise(bounds)
        if any(next(layer.parameters(), None) is not None for layer in stack.layers[start:stop])
    ]
    # From 0 and not from the first start: layers before the first one with parameters go with it.
    return tuple(stop - start for start, stop in pairwise([0, *starts[1:], len(stack.layers)]))


def outer_modules(
    module: nn.Module, stack: LayerStack, with_parameters: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules that are called, have parameters, and neither contain the layers nor lie inside them.

    Args:
        module: The model.
        stack: Its layers; without any, no module is outside.
        with_parameters: Yield modules that have parameters now. If False, yield modules that had some when they were
            intercepted, because a stage frees the parameters of other stages.
    """
    layers = set(stack.layers)

    def walk(name: str, child: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if child in layers:
            return
        # A module that contains layers runs on every stage, so the walk looks at each module inside it.
        holds_layers = any(other in layers for other in child.modules())
        if holds_layers or not name or _is_list(child):
            for key, grandchild in child.named_children():
                yield from walk(f"{name}.{key}" if name else key, grandchild)
        elif (
            with_parameters
            and next(child.parameters(), None) is not None
            or not with_parameters
            and "_pipeline_site" in child.__dict__
        ):
            yield name, child

    if layers:
        yield from walk("", module)


def _container(module: nn.Module, path: str) -> nn.Module:
    try:
        container = module.get_submodule(path)
    except AttributeError as error:
        known = ", ".join(f"`{name}`" for name, _ in _containers(module)) or "none"
        raise ValueError(f"`layers` must name a module; got `{path}` ({error}). Containers: {known}") from None
    if not isinstance(container, _CONTAINERS):
        raise ValueError(
            f"`layers` must name a `ModuleList`, `Sequential` or `ModuleDict`; got `{path}`, a"
            f" {type(container).__name__}"
        )
    return container


def _entries(path: str, container: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Return the layers of each entry of a container, with their names; a nested list is one entry."""
    entries = []
    # Not `named_children`, which omits repeated modules: such a stack has to be refused.
    for key, child in children_of(container).items():
        name = f"{path}.{key}" if path else key
        if child is not None:
            nested = _entries(name, child) if _is_list(child) else [[(name, child)]]
            entries.append([layer for entry in nested for layer in entry])
    return entries


def _is_list(module: nn.Module) -> bool:
    """Return whether `module` is only a container, which is never called itself."""
    # A subclass with its own forward is called, like any other module.
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _containers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if isinstance(child, _CONTAINERS) and len(child) > 1 and not _is_namespace(child):
            yield name, child


def _holds_one_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == 1 and next(module.parameters(), None) is not None


def _is_namespace(container: nn.Module) -> bool:
    """Return whether a `ModuleDict` only names parts, such as `embed` and `blocks`, instead of holding layers."""
    entries = list(container.children())
    is_run = len(_kinds(container)) == 1 and not any(isinstance(entry, _CONTAINERS) for entry in entries)
    return isinstance(container, nn.ModuleDict) and not is_run


def _kinds(container: nn.Module) -> Counter[object]:
    """Return the number of parameters in the container's entries, by type of entry."""
    sizes: Counter[object] = Counter()
    for child in children_of(container).values():
        size = 0 if child is None else sum(parameter.numel() for parameter in child.parameters())
        if size:
            sizes[_kind(child)] += size
    return sizes


def _kind(entry: nn.Module | None) -> object:
    # The type of a nested container says nothing about its layers, so all types inside it count.
    return tuple(map(_class, entry.modules())) if isinstance(entry, _CONTAINERS) else _class(entry)


def _class(module: nn.Module | None) -> type:
    # A parametrization, such as a weight norm, gives each module a separate class.
    return type(module) if module is None or not is_parametrized(module) else type(module).__bases__[0]


def _repeated_size(container: nn.Module) -> int:
    """Return the most parameters in entries of one type; 0 if no type with parameters is repeated."""
    counts: Counter[object] = Counter()
    for child in children_of(container).values():
        if child is not None and next(child.parameters(), None) is not None:
            counts[_kind(child)] += 1
    return max((size for kind, size in _kinds(container).items() if counts[kind] > 1), default=0)


def _related(one: str, other: str) -> bool:
    """Return whether one module lies inside the other, by their names."""
    short, long = sorted((one, other), key=len)
    return short == "" or long == short or long.startswith(f"{short}.")


def with_enough_layers(stack: LayerStack, num_stages: int) -> LayerStack:
    """Return the stack, if it has a layer for each stage; otherwise raise ValueError."""
    if len(stack.blocks) < num_stages:
        raise ValueError(
            f"Every stage must have at least one layer; got {len(stack.blocks)} layers in `{stack.path}` for"
            f" {num_stages} stages. Use fewer pipeline ranks or virtual stages, or name other layers [LP022]"
        )
    return stack


# Attributes that can tell layers apart: a size, a flag, the name of an activation.
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
