"""Experts of a Mixture-of-Experts layer, in stacks of weights or in a list, sharded by the features inside each expert.

    h = act(x W_e[:, r])   y = sum_r h_r V_e[r]        W (E, D, k I), V (E, I, D); rank r holds I / ranks of I

The full module is one region. Each rank computes all experts with its share of the features, so all ranks have equal
work whatever the router chooses. One all-reduce sums their outputs. Inputs enter by `copy_to_group`, so backward sums
the gradients of the hidden states and of the router's weights. The module's own code runs, with its kernels (grouped,
batched, a loop), because it takes sizes from the weights. Only the first rank adds biases behind the last product.

A search finds how one weight packs gate and up (one after the other, or in turns). It also finds which dimension is
which, and which sizes the code reads from attributes; see `plan_experts`.

Legend for shapes: E experts, D features, I features inside an expert, k projections in one weight (gate and up: 2).

Source: Megatron-LM, section 3, https://arxiv.org/abs/1909.08053, for each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import copy_of, parameters_of, pytree
from lightning_parallel.tensor.autograd import copy_to_group, reduce_from_group, whole_from_group
from lightning_parallel.tensor.inspection import has_hooks_inside, is_linear, is_native, sizes_of, structure_of
from lightning_parallel.tensor.layers import Column, Row, convert, shard_parameters
from lightning_parallel.tensor.low_rank import linear_layers
from lightning_parallel.tensor.per_head import DividedTensor
from lightning_parallel.tensor.plan import Plan
from lightning_parallel.tensor.regions import RandomRegion
from lightning_parallel.tensor.sharding import Shard, ShardPart, layer_of
from lightning_parallel.tensor.verify import BlockCall, PlanVerifier

__all__ = ["Experts", "ExpertsModule", "find_routers", "join_lists", "plan_experts"]

NOT_THE_SAME = (
    "replicated: in shards it would compute other results, draw other random numbers, or keep parts for the loss"
)
MOST_CANDIDATES = 64
MOST_PROJECTIONS = 3  # in one weight
MOST_ATTRIBUTES = 4  # choices of some of them
FEW = 8  # features for each rank, in trials
ALIGNED = 16  # bytes: kernels of grouped products need rows of a multiple of it


@dataclass(frozen=True)
class Experts:
    """Shards the features inside each expert of a module that holds all experts, and sums its output once.

    Args:
        parameters: The sharded parameters; all other parameters of the module stay replicated.
        added: Names of replicated parameters that are added behind the last product: the first rank alone adds them.
    """

    parameters: tuple[DividedTensor, ...]
    added: tuple[str, ...] = ()

    def rules(self, module: nn.Module, ranks: int) -> dict[str, Shard]:
        """See `Style`."""
        own = dict(module.named_parameters())
        for known in self.parameters:
            if known.name not in own:
                raise TypeError(f"`Experts` must apply to a module with a parameter `{known.name}`")
        return {known.name: known.rule(ranks) for known in self.parameters}

    def partial(self, module: nn.Module) -> frozenset[str]:
        """See `Style`."""
        # Each rank has the gradients from its own features only, so all other gradients are sums.
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
        """Run the forward of the original class with this rank's features, and sum the outputs over the ranks.

        Raises:
            RuntimeError: If it draws random numbers, which may be for a rank's features or for sums. Also if it keeps
                a tensor with a gradient in an attribute.
        """

        def enter(leaf: Any) -> Any:
            # Only floating-point inputs have a gradient to sum.
            return copy_to_group(leaf, self.group) if _is_floating(leaf) else leaf

        args, kwargs = pytree.tree_map(enter, (args, kwargs))
        # A draw in here may be for a part or for all experts, so a higher count is refused below.
        draws = RandomRegion.draws
        with self._added_once(), self._random_numbers((args, kwargs)):
            output = super().forward(*args, **kwargs)
        if RandomRegion.draws > draws:
            path = layer_of(self.named_parameters(), "<its path>")
            raise RuntimeError(
                f"`{path}` draws random numbers (a noisy router?) in the module that runs its experts, of which each"
                " tensor-parallel rank computes a part. It is not known whether the numbers are for a part or for all"
                " experts. Draw them in the module around, or keep it replicated with tensor_plan={...,"
                f" {f'{path}*'!r}: 'replicate'}}"
            )
        self._refuse_kept_graphs()
        leaves, tree = pytree.tree_flatten(output)
        first = next((index for index, leaf in enumerate(leaves) if _is_floating(leaf)), None)
        for index, leaf in enumerate(leaves):
            if _is_floating(leaf):
                # All ranks compute the further outputs (a router's logits or loss) in full, so a sum would be wrong.
                leaves[index] = (reduce_from_group if index == first else whole_from_group)(leaf, self.group)
        return pytree.tree_unflatten(leaves, tree)

    def _refuse_kept_graphs(self) -> None:
        """Refuse, at the first call, tensors that attributes keep for the loss: their gradients would be parts."""
        if self.was_called or not torch.is_grad_enabled():
            return
        self.was_called = True
        for path, child in self.named_modules():
            for name, value in vars(child).items():
                if type(value) is Tensor and value.grad_fn is not None:
                    raise RuntimeError(
                        f"`{type(self).__name__}` keeps `{f'{path}.{name}'.lstrip('.')}`, but each tensor-parallel"
                        " rank has only a part of its gradients. Return it from the forward, or keep the module"
                        " replicated with tensor_plan={..., '<its path>': 'replicate'}"
                    )

    def _random_numbers(self, given: Any) -> AbstractContextManager[None]:
        """Switch to this rank's random stream on the device of the inputs, where a draw is noticed."""
        devices = [leaf.device for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        return self.region.scope(devices[0]) if self.region is not None and self.training and devices else nullcontext()

    @contextmanager
    def _added_once(self) -> Iterator[None]:
        """Make the parameters that are added to the sum zero on all ranks but the first."""
        replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        for path in self.added if self.group.rank > 0 else ():
            owner, _, name = path.rpartition(".")
            held = parameters_of(self.get_submodule(owner))
            if isinstance(parameter := held.get(name), nn.Parameter):  # other pipeline stages do not hold it
                replaced.append((held, name, parameter))
        try:
            for held, name, parameter in replaced:
                # Multiplied by zero, not left out: every rank needs a gradient for the sum over the ranks.
                held[name] = parameter * 0  # type: ignore[assignment]
            yield
        finally:
            for held, name, parameter in replaced:
                held[name] = parameter


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


# -------------------------------------------------------------------------------------------------------------- search


@dataclass(frozen=True)
class _Division:
    """One way to shard the experts of a module.

    Attributes:
        width: I, the width in the module.
        tensors: The sharded tensors: name, dimension, and how many projections of I features that dimension holds.
        added: See `Experts`.
        in_turns: Whether several projections are packed feature by feature, and not one after the other.
        attributes: Attributes of the module that equal a multiple of I, with that multiple.
        aligned: Features in rows of `ALIGNED` bytes.
    """

    width: int
    tensors: tuple[tuple[str, int, int], ...]
    added: tuple[str, ...]
    in_turns: bool
    attributes: tuple[tuple[str, int], ...]
    aligned: int

    def plan(self, width: int, group: Group) -> Plan:
        """Return the plan for the module, or for a copy with another number of features inside the experts."""
        unit = _unit(width, group.size, self.aligned)

        def packed(count: int) -> tuple[ShardPart, ...]:
            return (ShardPart(count * width, count * unit),) if self.in_turns else (ShardPart(width, unit),) * count

        style = Experts(tuple(DividedTensor(name, dim, packed(count)) for name, dim, count in self.tensors), self.added)
        local = Shard.even(0, width, group.size, unit).local_size(group.rank)
        values = {name: count * local for name, count in self.attributes}
        return Plan({"": style}, {"": values} if values else {})

    def narrowed(self, owner: nn.Module, width: int) -> nn.Module:
        """Return a copy of the module with only `width` features inside each expert."""
        full = {name: owner.get_parameter(name).detach() for name, _, _ in self.tensors}
        narrow = {
            id(owner.get_parameter(name)): nn.Parameter(full[name].narrow(dim, 0, count * width).clone())
            for name, dim, count in self.tensors
        }
        copied = copy_of(owner, narrow)
        for name, count in self.attributes:
            setattr(copied, name, count * width)
        return copied


def plan_experts(
    module: nn.Module, plan: Plan, verifier: PlanVerifier, call: Callable[[str], BlockCall | None]
) -> None:
    """Add the verified plans for all stacked experts inside `module`; note why other experts stay replicated.

    Each is verified as the model calls it, with few features inside the experts. Code does not depend on the number of
    features, and the experts of one layer may fill most of a node's memory.

    Args:
        module: The model.
        plan: The plan so far; changed in place.
        verifier: Accepts plans.
        call: Returns how the model calls the module at a path, if that is known.
    """
    for path in _owners(module):
        owner = module.get_submodule(path)
        if has_hooks_inside(owner):
            plan.notes[path] = "replicated: a hook is called around a forward inside the experts"
            continue
        divisions = _divisions(owner, verifier.group.size)
        accepted = _accepted(owner, divisions, verifier, call(path))
        if accepted is None:
            plan.notes[path] = (
                NOT_THE_SAME if divisions else f"replicated: too few features for {verifier.group.size} ranks"
            )
        else:
            plan.add(path, accepted)


def join_lists(
    module: nn.Module,
    plan: Plan,
    verifier: PlanVerifier,
    call: Callable[[str], BlockCall | None],
    is_stack: Callable[[list[str]], bool],
) -> None:
    """Replace the single plans of a list of experts by one plan, with one all-reduce for all experts.

    Args:
        module: The model.
        plan: The plan so far; changed in place.
        verifier: Accepts plans.
        call: Returns how the model calls the module at a path, if that is known.
        is_stack: Tells whether one of the modules at these paths takes the output of another.
    """
    for path, around in module.named_modules():
        lists = {
            name: child
            for name, child in around.named_children()
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and _experts_in(child)
        }
        inside = plan.under(path)
        if inside.attributes or not lists or has_hooks_inside(around):
            continue
        start = f"{path}." if path else ""
        # A stack of blocks would be refused only by a trial of all its blocks, and not at all in a pretended group.
        if any(
            is_stack([f"{start}{name}.{key}" for key, _ in child.named_children()]) for name, child in lists.items()
        ):
            continue
        known = call(path)
        # A LightningModule whose forward the step does not call uses the experts elsewhere.
        is_used = known is not None or not hasattr(around, "training_step")
        division = _division_of_pairs(around, inside) if is_used else None
        accepted = division and _accepted(around, [division], verifier, known)
        if accepted:
            # The plan of the module around replaces the plans of its layers.
            for name in inside.styles:
                del plan.styles[start + name]
            plan.add(path, accepted)


def _division_of_pairs(around: nn.Module, inside: Plan) -> _Division | None:
    """Return the division that column- and row-parallel layers inside a module make, if nothing else is sharded."""
    tensors: list[tuple[str, int, int]] = []
    added: list[str] = []
    widths: set[int] = set()
    for path, style in inside.styles.items():
        layer = around.get_submodule(path)
        # Only plain styles: parts, or a gathered output, would need another division.
        if not is_native(layer, nn.Linear) or not isinstance(style, (Column, Row)) or style not in (Column(), Row()):
            return None
        biased = getattr(layer, "bias", None) is not None
        tensors.append((f"{path}.weight", 0 if isinstance(style, Column) else 1, 1))
        widths.add(sizes_of(layer)[1 if isinstance(style, Column) else 0])
        if biased and isinstance(style, Column):
            tensors.append((f"{path}.bias", 0, 1))
        elif biased:
            added.append(f"{path}.bias")
    return _Division(widths.pop(), tuple(tensors), tuple(added), False, (), 1) if len(widths) == 1 else None


def _accepted(
    owner: nn.Module, divisions: list[_Division], verifier: PlanVerifier, call: BlockCall | None
) -> Plan | None:
    """Return the verified plan for the experts of a module; None if none passes."""

    def find() -> _Division | None:
        # Divisions that need the same narrow copy are tried together.
        alike: dict[Any, list[_Division]] = {}
        for division in divisions:
            alike.setdefault((division.width, division.tensors, division.attributes), []).append(division)
        for several in alike.values():
            width = min(several[0].width, FEW * verifier.group.size)
            candidates = [division.plan(width, verifier.group) for division in several]
            accepted = verifier.first_verified(several[0].narrowed(owner, width), Plan(), candidates, call)
            if accepted is not None:
                return several[candidates.index(accepted)]
        return None

    # The copies hold new objects in their attributes, so they look like blocks of another structure.
    signature = None if call is None else call.signature
    division = verifier.once((structure_of(owner), tuple(divisions), signature), find)
    return None if division is None else division.plan(division.width, verifier.group)


def _owners(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the paths of the innermost modules that hold stacked weights of experts."""
    prefix = f"{path}." if path else ""
    inside = [found for name, child in module.named_children() for found in _owners(child, prefix + name)]
    if inside:
        yield from dict.fromkeys(inside)
    elif len(_stacks(module)) > 1 and type(module).forward is not nn.Module.forward:
        yield path


def find_routers(module: nn.Module) -> set[str]:
    """Return the paths of the linear layers with one output for each of the experts beside them.

    Every rank needs all outputs to choose between the experts, and such layers have few weights.
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
        # Lists of unlike modules hold the parts of a block, such as its attention and its MLP.
        are_alike = len({type(child) for child in module.children()}) == 1
        return len(module) if are_alike and all(len(linear_layers(child)) > 1 for child in module.children()) else 0
    stacks = _stacks(module) if any(True for _ in module.parameters(recurse=False)) else {}
    return len(next(iter(stacks.values()))) if len(stacks) > 1 else 0


def _stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the three-dimensional parameters of one module with equally many entries, of at least two experts."""
    stacks: dict[int, dict[str, nn.Parameter]] = {}
    for path, child in module.named_modules():
        # Layers of torch use three dimensions otherwise, and layers of a list do not belong to one module.
        if type(child).__module__.startswith("torch.nn.") or any(part.isdigit() for part in path.split(".")):
            continue
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.dim() == 3 and parameter.is_floating_point() and parameter.shape[0] > 1:
                stacks.setdefault(parameter.shape[0], {})[f"{path}.{name}".lstrip(".")] = parameter
    # The largest set: a module may have other parameters with three dimensions.
    return max(stacks.values(), key=len, default={})


def _divisions(owner: nn.Module, ranks: int) -> list[_Division]:
    """Return ways to shard the experts of a module, the likeliest first."""
    stacks = _stacks(owner)
    biases = _biases(owner, len(next(iter(stacks.values()))))
    # By the narrowest dtype, of which a row of `ALIGNED` bytes holds the most features.
    aligned = ALIGNED // min(weight.element_size() for weight in stacks.values())
    found: list[tuple[tuple[int, int], _Division]] = []
    widths = dict.fromkeys(size for weight in reversed([*stacks.values()]) for size in reversed(weight.shape[1:]))
    for width in (width for width in widths if width >= ranks):
        for dims in product(*(_dims_of(weight, width) for weight in stacks.values())):
            counts = [weight.shape[dim] // width for weight, dim in zip(stacks.values(), dims)]
            # The other dimension has the width of the hidden states, and all weights should agree on it.
            whole = {weight.shape[3 - dim] for weight, dim in zip(stacks.values(), dims)}
            # The last projection holds I features once; otherwise `width` is a divisor of I.
            if 1 not in counts:
                continue
            in_turns = [False, True] if max(counts) > 1 else [False]
            for kinds, turns in product(_uses(biases, {count * width for count in counts}), in_turns):
                divided = [*zip(stacks, dims, counts)]
                for name, kind in kinds.items():
                    if kind == "divided":
                        divided.append((name, biases[name].dim() - 1, biases[name].shape[-1] // width))
                added = tuple(name for name, kind in kinds.items() if kind == "added")
                for level, attributes in enumerate(_attributes(owner, width, {1, *counts})):
                    division = _Division(width, tuple(divided), added, turns, attributes, aligned)
                    # For the order: likely divisions agree on the hidden width and reduce few attributes.
                    found.append(((len(whole), level), division))
    return [division for _, division in sorted(found, key=lambda entry: entry[0])[:MOST_CANDIDATES]]


def _unit(width: int, ranks: int, aligned: int) -> int:
    """Return how many features stay together: one, or a kernel's alignment if even shares would break it."""
    fits = width % ranks == 0 and width // ranks % aligned == 0
    return aligned if not fits and width % aligned == 0 and width // aligned >= ranks else 1


def _dims_of(weight: Tensor, width: int) -> list[int]:
    return [dim for dim in (1, 2) if weight.shape[dim] in {count * width for count in range(1, MOST_PROJECTIONS + 1)}]


def _biases(owner: nn.Module, experts: int) -> dict[str, nn.Parameter]:
    """Return the possible biases of the experts' products: (E, features), or (features)."""
    linear = {path for path, child in owner.named_modules() if is_linear(child)}
    return {
        name: parameter
        for name, parameter in owner.named_parameters()
        if name.rpartition(".")[0] not in linear
        and (parameter.dim() == 1 or (parameter.dim() == 2 and parameter.shape[0] == experts))
    }


def _uses(biases: dict[str, nn.Parameter], sizes: set[int]) -> Iterator[dict[str, str]]:
    """Yield the possible uses of biases: sharded, added by one rank, or full on all ranks like a router's weight."""
    fits = [
        ("divided", "added", "whole") if bias.shape[-1] in sizes else ("added", "whole") for bias in biases.values()
    ]
    for kinds in islice(product(*fits), MOST_CANDIDATES):
        yield dict(zip(biases, kinds))


def _attributes(owner: nn.Module, width: int, counts: set[int]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the sets of attributes, numbers of features, that the code may read: none, each, all, some of few."""
    numbers = {name: value for name, value in vars(owner).items() if type(value) is int}
    found = tuple((name, value // width) for name, value in numbers.items() if value in {n * width for n in counts})
    some = (several for size in range(2, len(found)) for several in combinations(found, size))
    yield from dict.fromkeys([(), *((each,) for each in found), found, *islice(some, MOST_ATTRIBUTES)])
