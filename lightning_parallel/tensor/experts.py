"""Experts whose weights are stacked in one tensor each, divided by the features inside of every expert.

    h = act(x W_e[:, r])   y = sum_r h_r V_e[r]        W (E, D, k I), V (E, I, D); rank r holds I / ranks of I

The whole module is a region: each rank computes all experts with its features, so that all have the same work whatever
the router chooses, and one all-reduce sums their outputs. Inputs enter by `copy_to_group`, so the gradients of the
hidden states and of the router's weights are summed in backward. The module's own code runs, with its kernels (grouped,
batched, a loop), as it takes sizes from the weights. What is added behind the last product is added by the first rank.

How gate and up are packed in one weight (one after the other, in turns), which dimension is which, and which sizes the
code reads from attributes, is found by trying: see `plan_experts`.

Legend for shapes: E experts, D features, I features inside of an expert, k projections in one weight (gate and up: 2).

Source: Megatron-LM, section 3, https://arxiv.org/abs/1909.08053, for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import forward_hooks_of, parameters_of, pytree
from lightning_parallel.tensor.autograd import copy_to_group, reduce_from_group, whole_from_group
from lightning_parallel.tensor.inspection import is_linear, sizes_of
from lightning_parallel.tensor.layers import convert, shard_parameters
from lightning_parallel.tensor.low_rank import linear_layers
from lightning_parallel.tensor.per_head import DividedTensor
from lightning_parallel.tensor.plan import Plan
from lightning_parallel.tensor.regions import RandomRegion
from lightning_parallel.tensor.sharding import Shard, ShardPart
from lightning_parallel.tensor.verify import PlanVerifier

__all__ = ["Experts", "ExpertsModule", "find_routers", "plan_experts"]

NOT_THE_SAME = "whole: divided, it would compute something else, draw other random numbers, or keep parts for the loss"
MOST_CANDIDATES = 64
MOST_PROJECTIONS = 3  # in one weight
MOST_AROUND = 2  # modules around the experts that are tried to run, when the experts cannot be run alone
ALIGNED = 8  # features: kernels for grouped products ask for rows of a multiple of 16 bytes


@dataclass(frozen=True)
class Experts:
    """Divides the features inside of each expert of a module that keeps the weights of all of them in stacks.

    Args:
        parameters: The parameters that are divided; the others inside of the module stay whole.
        added: Names of whole parameters that are added behind the last product: the first rank alone adds them.
    """

    parameters: tuple[DividedTensor, ...]
    added: tuple[str, ...] = ()

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        own = dict(module.named_parameters())
        for known in self.parameters:
            if known.name not in own:
                raise TypeError(f"`Experts` applies to a module with a parameter `{known.name}`")
        return {known.name: known.rule(ranks) for known in self.parameters}

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        divided = {known.name for known in self.parameters}
        return frozenset(name for name, _ in module.named_parameters() if name not in divided)

    def apply(self, module: nn.Module, group: Group) -> None:
        """See `Style`."""
        rules = self.rules(module, group.size)
        layer = convert(module, ExpertsModule)
        layer.added = self.added
        layer.group = group
        layer.region = None
        layer.was_called = False
        shard_parameters(layer, rules, group)


class ExpertsModule(nn.Module):
    """Module that computes its experts with this rank's features; see `Experts`."""

    added: tuple[str, ...]
    group: Group
    region: RandomRegion | None
    was_called: bool

    @property
    def region_end(self) -> Literal["inside"]:
        """`"inside"`: random numbers are watched, see `forward` and `tensor.regions`."""
        return "inside"

    @torch.compiler.disable  # the collectives cannot be traced into a graph
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the original class with this rank's features, and sum what the ranks return.

        Raises:
            RuntimeError: If it draws random numbers: whether for the features of a rank or for sums is not known; or
                keeps a tensor with a gradient in an attribute.
        """

        def enter(leaf: Any) -> Any:
            return copy_to_group(leaf, self.group) if _is_floating(leaf) else leaf

        args, kwargs = pytree.tree_map(enter, (args, kwargs))
        draws = RandomRegion.draws
        with self._added_once(), self._random_numbers((args, kwargs)):
            output = super().forward(*args, **kwargs)
        if RandomRegion.draws > draws:
            raise RuntimeError(
                f"`{type(self).__name__}` draws random numbers between its experts' layers, of which each"
                " tensor-parallel rank computes a part. Keep it whole with plan={..., '<its path>': 'replicate'}"
            )
        self._refuse_kept_graphs()
        leaves, tree = pytree.tree_flatten(output)
        first = next((index for index, leaf in enumerate(leaves) if _is_floating(leaf)), None)
        for index, leaf in enumerate(leaves):
            if _is_floating(leaf):
                # What is returned besides (a router's logits or loss) is whole on all ranks.
                leaves[index] = (reduce_from_group if index == first else whole_from_group)(leaf, self.group)
        return pytree.tree_unflatten(leaves, tree)

    def _refuse_kept_graphs(self) -> None:
        """Refuse, at the first call, what is kept in attributes for the loss: its gradients would be parts."""
        if self.was_called or not torch.is_grad_enabled():
            return
        self.was_called = True
        for path, child in self.named_modules():
            for name, value in vars(child).items():
                if type(value) is Tensor and value.grad_fn is not None:
                    raise RuntimeError(
                        f"`{type(self).__name__}` keeps `{f'{path}.{name}'.lstrip('.')}`, whose gradients each"
                        " tensor-parallel rank has a part of. Return it from the forward, or keep the module whole with"
                        " plan={..., '<its path>': 'replicate'}"
                    )

    def _random_numbers(self, given: Any) -> AbstractContextManager[None]:
        """Switch to this rank's stream on the device of the inputs, where a draw is noticed."""
        devices = [leaf.device for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        return self.region.scope(devices[0]) if self.region is not None and self.training and devices else nullcontext()

    @contextmanager
    def _added_once(self) -> Iterator[None]:
        """Let the parameters that are added to the sum over the ranks be zero on all of them but the first."""
        replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        for path in self.added if self.group.rank > 0 else ():
            owner, _, name = path.rpartition(".")
            held = parameters_of(self.get_submodule(owner))
            if isinstance(parameter := held.get(name), nn.Parameter):  # other pipeline stages do not hold it
                replaced.append((held, name, parameter))
        try:
            for held, name, parameter in replaced:
                # Multiplied, and not left out: it has a gradient, of zero, to be summed with that of the first rank.
                held[name] = parameter * 0  # type: ignore[assignment]
            yield
        finally:
            for held, name, parameter in replaced:
                held[name] = parameter


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


# -------------------------------------------------------------------------------------------------------------- search


def plan_experts(module: nn.Module, plan: Plan, verifier: PlanVerifier, group: Group) -> None:
    """Add the divisions of all stacked experts inside `module` that the verifier accepts; note why others are whole.

    Each is verified in the smallest module around that can be run with one tensor.

    Args:
        module: The model.
        plan: What is known so far; changed in place.
        verifier: Accepts divisions.
        group: The tensor-parallel group.
    """
    for path in _owners(module):
        owner = module.get_submodule(path)
        if any(any(forward_hooks_of(child)) for child in owner.modules() if child is not owner):
            plan.notes[path] = "whole: a hook is called around a forward inside of the experts"
            continue
        around = _that_runs(module, path, plan, verifier)
        if around is None:
            plan.notes[path] = f"whole: one tensor is not enough to run `{type(owner).__name__}`"
            continue
        block = module.get_submodule(around)
        candidates = _divisions(owner, group)
        tried = [Plan() for _ in candidates]
        for outer, inner in zip(tried, candidates):
            outer.add(path.removeprefix(around).strip("."), inner)
        accepted = verifier.first_verified(block, plan.under(around), tried, source="experts")
        if accepted is None:
            plan.notes[path] = NOT_THE_SAME if candidates else f"whole: too few features for {group.size} ranks"
        else:
            plan.add(around, accepted)


def _owners(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the paths of the innermost modules that hold stacked weights of experts."""
    prefix = f"{path}." if path else ""
    inside = [found for name, child in module.named_children() for found in _owners(child, prefix + name)]
    if inside:
        yield from dict.fromkeys(inside)
    elif len(_stacks(module)) > 1 and type(module).forward is not nn.Module.forward:
        yield path


def find_routers(module: nn.Module) -> set[str]:
    """Return the paths of the linear layers with an output for each of the experts beside them.

    Every rank needs all outputs to choose between the experts, and their weights are few.
    """
    found: set[str] = set()
    for path, around in module.named_modules():
        counts = {_experts_in(child) for child in around.children()} - {0}
        for name, child in around.named_children() if counts else ():
            if is_linear(child) and sizes_of(child)[1] in counts:
                found.add(f"{path}.{name}".lstrip("."))
    return found


def _experts_in(module: nn.Module) -> int:
    """Return the number of experts of a module: entries of a list of small networks, or of stacked weights."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return len(module) if all(len(linear_layers(child)) > 1 for child in module.children()) else 0
    stacks = _stacks(module) if any(True for _ in module.parameters(recurse=False)) else {}
    return len(next(iter(stacks.values()))) if len(stacks) > 1 else 0


def _stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the three-dimensional parameters of one module with equally many entries, of at least two experts."""
    stacks: dict[int, dict[str, nn.Parameter]] = {}
    for path, child in module.named_modules():
        # Layers of torch mean other things by three dimensions; those of a list of layers are not one module's.
        if type(child).__module__.startswith("torch.nn.") or any(part.isdigit() for part in path.split(".")):
            continue
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.dim() == 3 and parameter.is_floating_point() and parameter.shape[0] > 1:
                stacks.setdefault(parameter.shape[0], {})[f"{path}.{name}".lstrip(".")] = parameter
    return max(stacks.values(), key=len, default={})


def _that_runs(module: nn.Module, path: str, plan: Plan, verifier: PlanVerifier) -> str | None:
    """Return the path of the smallest module around the experts that can be run with one tensor, if there is one."""
    parts = path.split(".") if path else []
    for depth in range(len(parts), max(-1, len(parts) - MOST_AROUND - 1), -1):
        around = ".".join(parts[:depth])
        block = module.get_submodule(around)
        runs = type(block).forward is not nn.Module.forward
        if runs and verifier.first_verified(block, Plan(), [Plan()]) is not None:
            return around
    return None


def _divisions(owner: nn.Module, group: Group) -> list[Plan]:
    """Return ways to divide the experts of a module, the likeliest first."""
    stacks = _stacks(owner)
    biases = _biases(owner, len(next(iter(stacks.values()))))
    found: list[tuple[tuple[int, int], Plan]] = []
    widths = dict.fromkeys(size for weight in reversed([*stacks.values()]) for size in reversed(weight.shape[1:]))
    for width in widths:
        unit = _unit(width, group.size)
        if width // unit < group.size:
            continue
        for dims in product(*(_dims_of(weight, width) for weight in stacks.values())):
            sizes = [weight.shape[dim] for weight, dim in zip(stacks.values(), dims)]
            # What is not divided is as wide as the hidden states, in all of them.
            whole = {weight.shape[3 - dim] for weight, dim in zip(stacks.values(), dims)}
            if width not in sizes:
                continue
            for kinds, packing in product(_uses(biases, sizes), _packings(sizes, width, unit)):
                divided = [DividedTensor(name, dim, packing[size]) for name, dim, size in zip(stacks, dims, sizes)]
                for name, kind in kinds.items():
                    if kind == "divided":
                        divided.append(DividedTensor(name, biases[name].dim() - 1, packing[biases[name].shape[-1]]))
                style = Experts(tuple(divided), tuple(name for name, kind in kinds.items() if kind == "added"))
                for level, values in enumerate(_attributes(owner, width, {*sizes}, unit, group)):
                    found.append(((len(whole), level), Plan({"": style}, {"": values} if values else {})))
    return [plan for _, plan in sorted(found, key=lambda entry: entry[0])[:MOST_CANDIDATES]]


def _unit(width: int, ranks: int) -> int:
    """Return the number of features that stay together where they do not divide evenly."""
    # Uneven by up to a quarter: worth it for the kernels.
    return ALIGNED if width % ranks and width % ALIGNED == 0 and width // ALIGNED >= 4 * ranks else 1


def _dims_of(weight: Tensor, width: int) -> list[int]:
    return [dim for dim in (1, 2) if weight.shape[dim] in {count * width for count in range(1, MOST_PROJECTIONS + 1)}]


Packing = dict[int, tuple[ShardPart, ...]]
"""How as many features as the keys say are packed."""


def _packings(sizes: list[int], width: int, unit: int) -> Iterator[Packing]:
    one: Packing = {width: (ShardPart(width, unit),)}
    fused = {size // width for size in sizes} - {1}
    yield one | {count * width: (ShardPart(width, unit),) * count for count in fused}
    if fused:  # one feature of each projection, in turns
        yield one | {count * width: (ShardPart(count * width, count * unit),) for count in fused}


def _biases(owner: nn.Module, experts: int) -> dict[str, nn.Parameter]:
    """Return what may be added to the outputs of the experts' products: (E, features), or (features)."""
    linear = {path for path, child in owner.named_modules() if is_linear(child)}
    return {
        name: parameter
        for name, parameter in owner.named_parameters()
        if name.rpartition(".")[0] not in linear
        and (parameter.dim() == 1 or (parameter.dim() == 2 and parameter.shape[0] == experts))
    }


def _uses(biases: dict[str, nn.Parameter], sizes: list[int]) -> Iterator[dict[str, str]]:
    """Yield how biases may be used: divided, added by one rank; or whole by all, as a router's weight is."""
    fits = [
        ("divided", "added", "whole") if bias.shape[-1] in sizes else ("added", "whole") for bias in biases.values()
    ]
    for kinds in islice(product(*fits), MOST_CANDIDATES):
        yield dict(zip(biases, kinds))


def _attributes(owner: nn.Module, width: int, sizes: set[int], unit: int, group: Group) -> Iterator[dict[str, int]]:
    """Yield which attributes of the module, numbers of features, its code may read: none, some by name, all."""
    local = Shard.even(0, width, group.size, unit).local_size(group.rank)
    values = {size: size // width * local for size in {width, *sizes}}
    found = {
        name: values[value]
        for name, value in vars(owner).items()
        if type(value) is int and values.get(value, value) != value
    }
    named = {name: value for name, value in found.items() if any(word in name for word in INNER_NAMES)}
    yield from {repr(given): given for given in ({}, named, found)}.values()


INNER_NAMES = ("inter", "inner", "ff", "expert_dim", "mlp")
