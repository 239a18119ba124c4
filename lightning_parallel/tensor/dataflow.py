"""Which features belong together: found by running a block whose linear layers return random numbers.

A region is a set of linear layers whose outputs alone decide the inputs of another layer. Gradients tell which features
of the outputs the first feature of that input depends on. Changing these features tells which other inputs depend on
them:

    qkv -> [reshape, permute, softmax, ...] -> out        out[0] <- q, k of head 0, one feature of v -> all of head 0

Features that are connected in this way, a head or a group of heads with their keys, must stay on one rank. Names of
attributes prove nothing. The places of the features show how they are packed. A run with the features of some heads
shows which numbers the code takes for the number of heads.

Legend for shapes: B samples, T positions, E features, U units (heads or groups of heads).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import combinations, islice, product
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.compat.torch import buffers_of, is_backward_running, parameters_of, pytree
from lightning_parallel.tensor.inspection import numbers_a_layer, structure_of
from lightning_parallel.tensor.layers import Column, Replicate, Row, Style
from lightning_parallel.tensor.low_rank import layer_sizes, linear_layers
from lightning_parallel.tensor.per_head import DividedTensor, PerHead, set_local_values
from lightning_parallel.tensor.pieces import NarrowInput, whole_input
from lightning_parallel.tensor.plan import Plan
from lightning_parallel.tensor.sharding import Shard, ShardPart
from lightning_parallel.tensor.verify import BlockCall, PlanVerifier, Trial, copy_in_double

__all__ = ["NOT_RUN", "Dataflow", "find_regions"]

Parts = tuple[ShardPart, ...]
Slot = tuple[str, str, int, tuple[int, ...]]
"""A number that the code may read: path of the module, name (see `set_local_values`), value, and value on each rank."""
Given = tuple[DividedTensor, Tensor]
"""An argument of the block with a value for each head, and its tensor in the record."""

# Of the largest value: rounding of a matrix product that was computed in another order, by the precision of the run.
NEGLIGIBLE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}
MOST_TRIALS = 200
FEW_TRIALS = 8
MOST_OPTIONS = 32  # of numbers that may count several things
MOST_GIVEN = 8  # sets of arguments with a value for each head
MOST_NESTED = 3
NOT_RUN = "its block cannot be run alone"
RETURNED = "the module around it returns features of the heads"
RANDOM = "does not run on random numbers"
AS_CALLED = "the module around it takes a tensor for all heads, such as a position bias"
IDLE = "the module around it calls other layers if it takes more than one tensor"


@dataclass
class Dataflow:
    """The findings about a block.

    Attributes:
        regions: Plans for each region, the largest region first.
        reasons: Why layers of the block are in no region, by path.
    """

    regions: list[Plan] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


class _RefusedError(Exception):
    """A region cannot be sharded; the message says why, in a few words."""


def find_regions(block: nn.Module, free: Sequence[str], verifier: PlanVerifier, call: BlockCall | None) -> Dataflow:
    """Return the regions that the linear layers `free` of `block` form; every rank of the group must call this.

    Args:
        block: The full module.
        free: Paths of the linear layers that have no style yet.
        verifier: Knows how the block runs alone.
        call: How the model calls the block, if that is known; otherwise it is called with one tensor.
    """
    trial = verifier.trial(block, call)
    if trial is None:
        return Dataflow(reasons=dict.fromkeys(free, f"{NOT_RUN}: `{type(block).__name__}`"))
    group = verifier.group

    def find() -> Dataflow:
        with trial.precision():
            found = _find(block, free, group.size, trial)
        # Ranks that propose different plans would wait for each other.
        if len(set(comm.all_gather_object(repr((found.regions, found.reasons)), group))) > 1:
            found = Dataflow()
        return Dataflow([_of_rank(plan, group.rank) for plan in found.regions], found.reasons)

    return verifier.once((structure_of(block), tuple(free), trial.call.signature), find)


def _of_rank(plan: Plan, rank: int) -> Plan:
    found: Any = plan.attributes
    # Found as the values of all ranks, so that the ranks could compare.
    attributes = {path: {name: local[rank] for name, local in values.items()} for path, values in found.items()}
    return Plan(plan.styles, attributes)


def _find(block: nn.Module, free: Sequence[str], ranks: int, trial: Trial) -> Dataflow:
    try:
        cut = _CutBlock(block, trial)
    except _RefusedError as error:
        return Dataflow(reasons=dict.fromkeys(free, str(error)))
    except Exception:  # the user's code on numbers it may not be made for
        return Dataflow(reasons=dict.fromkeys(free, RANDOM))
    found = Dataflow()
    idle = {cut.sizes[name][1] for name in free if name not in cut.inputs}
    for opening, closing in cut.regions():
        # A layer of the region has another plan already.
        if not {*opening, *closing} <= {*free}:
            continue
        try:
            # In the model's own call such a layer, for example for a context, may add its output to the region's.
            if not trial.is_known and any(cut.sizes[name][1] in idle for name in opening):
                raise _RefusedError(IDLE)
            found.regions.append(_Region(cut, opening, closing, ranks).plan(trial.is_known))
        except _RefusedError as error:
            found.reasons |= dict.fromkeys([*opening, *closing], str(error))
        except Exception:  # the user's code on numbers it may not be made for
            found.reasons |= dict.fromkeys([*opening, *closing], RANDOM)
    return found


# ------------------------------------------------------------------------------------------------------ running blocks


class _CutBlock:
    """A copy of a block whose linear layers return given outputs, or random ones, and keep their inputs."""

    def __init__(self, block: nn.Module, trial: Trial) -> None:
        self.x = trial.hidden.clone().requires_grad_(True)
        self.call = trial.call
        # In double precision, so that rounding is not taken for a dependence.
        self.module = copy_in_double(block, hollow=True)
        self.modules = dict(self.module.named_modules())
        self.layers = {name: self.modules[name] for name in linear_layers(block)}
        inside = {f"{name}.{path}" for name, layer in self.layers.items() for path, _ in layer.named_modules() if path}
        self.tensors: dict[tuple[str, str], Tensor] = {}
        for path, child in self.modules.items():
            for name, tensor in [*parameters_of(child).items(), *buffers_of(child).items()]:
                if tensor is None or path in self.layers or path in inside:
                    continue
                if tensor.is_floating_point():
                    tensor.requires_grad_(True)
                    with torch.no_grad():  # a zero (a scale, at the start of training) would hide the scaled values
                        tensor.copy_(torch.where(tensor == 0, torch.rand_like(tensor), tensor))
                self.tensors[path, name] = tensor
        self.sizes = {name: layer_sizes(layer) for name, layer in linear_layers(block).items()}
        self.outputs: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self.returned: list[tuple[str, Tensor]] = []  # by the last run, see `_placed`
        self._given: Mapping[str, Tensor] = {}
        # The tensors with a gradient among the further arguments, as leaves of the graph of the first run.
        self.arguments = {
            name: self._leaves(value) for name, value in self.call.named() if value is not self.call.hidden
        }
        for name, layer in self.layers.items():
            layer.forward = partial(self._answer, name)
        # Multiplied, because code may change an argument in place.
        leaves = {at: leaf * 1 for given in self.arguments.values() for at, leaf in given.items()}
        self.inputs = self.run({}, arguments=leaves)
        self.full = self.returned

    def _leaves(self, value: Any) -> dict[int, Tensor]:
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return {id(leaf): leaf.detach().to(self.x.detach(), copy=True).requires_grad_(True) for leaf in tensors}

    def run(
        self, given: Mapping[str, Tensor], x: Tensor | None = None, arguments: Mapping[int, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Run the block with `given` instead of the first outputs of the layers; return the inputs of its layers."""
        self._given = given
        # The inputs of the first run are compared with, so a later run must not replace them.
        before, self.inputs = self.inputs, {}
        try:
            output = self.call(self.module, self.x if x is None else x, arguments)
            # A block with its attention inside adds to its input, whose last size may be narrow.
            self.returned = [(place, whole_input(leaf)) for place, leaf in _placed(output)]
            return self.inputs
        finally:
            self.inputs = before

    def _answer(self, name: str, *args: Tensor, **kwargs: Any) -> Tensor:
        if len(args) != 1 or kwargs:
            raise _RefusedError(f"`{name}` gets several inputs")
        x = whole_input(args[0])
        if is_backward_running():  # a block that checkpoints itself is computed again
            return self._given.get(name, self.outputs[name])
        if name in self.inputs:
            raise _RefusedError(f"`{name}` is called twice")
        self.inputs[name] = x
        # Kept from run to run, so that runs differ only by the `given` outputs.
        if name not in self.outputs:
            shape = (*x.shape[:-1], self.sizes[name][1])
            self.outputs[name] = torch.randn(shape, dtype=x.dtype, device=x.device, requires_grad=True)
        y = self._given.get(name, self.outputs[name])
        if y.shape[:-1] != x.shape[:-1]:
            raise _RefusedError(f"`{name}` gets an input of another shape")
        return y

    def regions(self) -> list[tuple[list[str], list[str]]]:
        """Return the possible regions: (layers that open it, layers that close it), most weights first."""
        groups: dict[tuple[str, ...], list[str]] = {}
        leaves = [self.x, *self.outputs.values()]
        for name, y in self.inputs.items():
            if not y.requires_grad:
                continue
            # Random weights: the gradient of a plain sum may vanish, as behind a softmax or a norm.
            past, *found = _gradients(y * torch.randn_like(y), leaves)
            opening = tuple(leaf for leaf, gradient in zip(self.outputs, found) if bool(gradient.any()))
            # If it also depends on the input of the block directly, the region is not closed.
            if opening and not bool(past.any()):
                groups.setdefault(opening, []).append(name)
        regions = [(list(opening), closing) for opening, closing in groups.items()]
        return sorted(regions, key=lambda region: -sum(self._weights(name) for part in region for name in part))

    def _weights(self, name: str) -> int:
        return self.sizes[name][0] * self.sizes[name][1]


def _placed(output: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in an output, each with its position if it is an entry of a returned tuple, else with ""."""
    entries = enumerate(output) if type(output) is tuple else [("", output)]
    return [
        (str(place) if leaf is entry else "", leaf)
        for place, entry in entries
        for leaf in pytree.tree_leaves(entry)
        if isinstance(leaf, Tensor)
    ]


def _gradients(values: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the sum of `values`; zeros for a leaf that the sum does not depend on."""
    if not leaves:
        return []
    found = torch.autograd.grad(values.sum(), leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in zip(found, leaves)]


def _features(values: Tensor) -> Tensor:
    """Return which features (E,) of values (..., E) are not zero anywhere."""
    return (values != 0).flatten(0, -2).any(0)


# --------------------------------------------------------------------------------------------------------- one region


class _Region:
    """A region of a block, and its units: (layers that open it) -> (layers that close it)."""

    def __init__(self, cut: _CutBlock, opening: list[str], closing: list[str], ranks: int) -> None:
        self.cut = cut
        self.opening = opening
        self.closing = closing
        self.ranks = ranks
        self.y = cut.inputs[closing[0]]
        if not all(_equal(cut.inputs[name], self.y) for name in closing):
            raise _RefusedError("its output is used in several ways")
        # Retry with features that all units share, until one unit does not span all features.
        for common in self._common():
            first, opened = self._first_unit(common)
            if not bool(first.all()):
                break
        else:
            raise _RefusedError("features of all heads are mixed (a norm over all, one head)")
        self.row = _parts(first)
        self.columns = {name: _parts_beside(mask, common.get(name, slice(0, 0))) for name, mask in opened.items()}
        divided = [part for parts in [self.row, *self.columns.values()] for part in parts if not part.shared]
        counts = {part.size // part.unit for part in divided}
        self.units = self.groups = min(counts)
        if len(counts) > 1:
            raise _RefusedError("no regular order of heads")
        if self.units < ranks and not common:
            first = self._share_keys(first)
        if self.units < ranks:
            raise _RefusedError(f"{self.units} heads for {ranks} ranks")
        self.tensors, self.shared = self._tensors(first)

    def _share_keys(self, group: Tensor) -> Tensor:
        """Split the query heads of each group too, so that several ranks may hold the same key and value heads.

        Args:
            group: The features of the closing layers' input that use the same key and value head as the first feature.

        Returns:
            The features of one query head among them; `group` if there are no such heads.
        """
        for common in islice(self._common(), 1, None):
            first, opened = self._first_unit(common)
            heads = len(first) // max(int(first.sum()), 1)
            row = _grouped(self.row, first, heads)
            columns = {name: _grouped(parts, opened[name], heads) for name, parts in self.columns.items()}
            if heads > self.units and row and all(columns.values()) and bool((first <= group).all()):
                self.row, self.units = row, heads
                self.columns = {name: parts for name, parts in columns.items() if parts}
                return first
        return group

    def _local_values(self, value: int) -> list[tuple[int, ...]]:
        """Return what a number may be on each rank, if it counts heads, key heads, or query heads of one key head."""
        queries, keys = (
            [stop - start for start, stop in part.split(self.ranks)]
            for part in (ShardPart.queries(self.units, 1, self.groups), ShardPart.keys(self.groups, 1))
        )
        found = []
        if value % self.units == 0:
            found.append(tuple(value // self.units * count for count in queries))
        if value % self.groups == 0:
            found.append(tuple(value // self.groups * count for count in keys))
        if value * self.groups == self.units and self.units > self.groups:
            found.append(tuple(mine // held for mine, held in zip(queries, keys)))
        return list(dict.fromkeys(found)) if value > 1 else []

    def plan(self, is_known: bool) -> Plan:
        """Return the plan, with the values of all ranks for each attribute.

        Args:
            is_known: Whether the model calls the block in this way.

        Raises:
            _RefusedError: If the code does not run with some of the units.
        """
        given_of_heads = self._given_of_all_heads()
        settled = next((found for found in self._possible(given_of_heads) if self._works(*found)), None)
        if settled is None:
            known = f"the code works with all {self.units} heads only"
            raise _RefusedError(AS_CALLED if self._is_surely_of_heads(given_of_heads) else known)
        slots, narrow, given = settled
        # Numbers that only happen to fit, such as a number of buckets, stay: longer inputs would show them.
        for slot in sorted(slots, key=lambda slot: slot[2] == self.units):
            fewer = tuple(other for other in slots if other is not slot)
            if self._works(fewer, narrow, given):
                slots = fewer
        self._works(slots, narrow, given)
        returned = self._returned(is_known)
        attributes: dict[str, dict[str, Any]] = {}
        for path, name, _, local in slots:
            attributes.setdefault(path, {})[name] = local
        per_head = tuple(known for known, _ in given)
        of_block = {"width": self.row if narrow else None, "given": per_head, "returned": returned}
        return Plan(self._styles({**of_block, "common": self._shared_arguments(per_head, returned)}), attributes)

    def _shared_arguments(
        self, given: tuple[DividedTensor, ...], returned: tuple[DividedTensor, ...]
    ) -> tuple[str, ...]:
        """Return the arguments that all heads use, and that the block uses for the heads only."""
        places = {known.name for known in returned}
        outside = [leaf for place, leaf in self.cut.full if place not in places and leaf.requires_grad]
        found = []
        for name, leaves in self.cut.arguments.items():
            if any(name == known.name for known in given):
                continue
            inside = _gradients(self.y * torch.randn_like(self.y), [*leaves.values()])
            beside = [gradient for leaf in outside for gradient in _gradients(leaf, [*leaves.values()])]
            if any(bool(gradient.any()) for gradient in inside) and not any(bool(each.any()) for each in beside):
                found.append(name)
        return tuple(found)

    def _given_of_all_heads(self) -> list[Given]:
        """Return the tensors with an extent of all heads that the model gives to the block, by each such dimension."""
        call = self.cut.call
        found: list[Given] = []
        for name, value in call.named():
            if isinstance(value, Tensor) and value is not call.hidden and value.is_floating_point():
                dims = [dim for dim, size in enumerate(value.shape) if size == self.units]
                # Counted from the end, as a sum does: the same argument may have a batch dimension in another step.
                found += [(self._per_head(name, dim - value.dim()), value) for dim in dims]
        return found

    def _is_surely_of_heads(self, given: list[Given]) -> bool:
        # No dimension of the hidden states counts heads, but one may have the same extent.
        return bool(given) and self.units not in self.cut.call.hidden.shape

    def _per_head(self, name: str, dim: int) -> DividedTensor:
        return DividedTensor(name, dim, (ShardPart.queries(self.units, 1, self.groups),))

    def _possible(self, given_of_heads: list[Given]) -> Iterator[tuple[tuple[Slot, ...], bool, tuple[Given, ...]]]:
        """Yield numbers and arguments to reduce, the likeliest first; see `_possible_slots`."""
        # No number changes the size of an argument; it does no harm if the code does not use the argument.
        for given in islice(((), *_subsets(given_of_heads)), MOST_GIVEN):
            is_few = given or self._is_surely_of_heads(given_of_heads)
            possible = islice(self._possible_slots(), FEW_TRIALS if is_few else MOST_TRIALS)
            # One dimension of each argument.
            if len({known.name for known, _ in given}) == len(given):
                yield from ((slots, narrow, given) for slots, narrow in possible)

    def _returned(self, is_known: bool) -> tuple[DividedTensor, ...]:
        """Return the outputs with a value for each head, of the last run, which was for the last rank.

        Raises:
            _RefusedError: If other features of the heads are returned.
        """
        found, full_outputs = self.cut.returned, self.cut.full
        if len(found) != len(full_outputs):
            raise _RefusedError(RETURNED)
        per_head = []
        for (place, mine), (_, full) in zip(found, full_outputs):
            if _equal(mine, full):
                continue
            dims = [dim for dim, size in enumerate(full.shape) if size == self.units and place]
            known = [self._per_head(place, dim - full.dim()) for dim in dims]
            right = (each for each in known if _equal(mine, each.rule(self.ranks).split(full, self.ranks - 1)))
            # The model may also give the values of all heads to a block whose call is a guess.
            if (first := next(right, None)) is None or not is_known:
                raise _RefusedError(RETURNED)
            per_head.append(first)
        return tuple(per_head)

    def _common(self) -> Iterator[dict[str, slice]]:
        """Yield output features of the opening layers that all units may use: none; the keys and values of one head."""
        yield {}
        width = self.y.shape[-1]
        outs = {name: self.cut.outputs[name].shape[-1] for name in self.opening}
        yield {name: slice(0, out) for name, out in outs.items() if out < width}
        if all(width < out <= 2 * width for out in outs.values()):
            yield {name: slice(width, out) for name, out in outs.items()}
            yield {name: slice(0, out - width) for name, out in outs.items()}

    def _first_unit(self, common: Mapping[str, slice]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the features of one unit: of the closing layers' input, and of the opening layers' outputs."""
        first = torch.zeros(self.y.shape[-1], dtype=torch.bool, device=self.y.device)
        first[0] = True
        leaves = [self.cut.outputs[name] for name in self.opening]
        # Repeats until no feature joins: each new input feature may depend on more outputs, and they on more inputs.
        while True:
            gradients = _gradients((self.y * torch.randn_like(self.y))[..., first], leaves)
            opened = {name: _features(gradient) for name, gradient in zip(self.opening, gradients)}
            for name, features in common.items():
                opened[name][features] = False
            changed = first | self._changed_by(opened)
            if bool((changed == first).all()):
                return first, opened
            first = changed

    def _changed_by(self, opened: Mapping[str, Tensor]) -> Tensor:
        given = {
            name: self.cut.outputs[name].detach() + torch.randn_like(self.cut.outputs[name]) * mask
            for name, mask in opened.items()
        }
        # With gradients: without them, torch's encoder layers run a fused kernel that calls no layers.
        changed = self.cut.run(given).get(self.closing[0])
        if changed is None or changed.shape != self.y.shape:
            raise _RefusedError("values decide which layers are called")
        difference = (changed.detach() - self.y.detach()).abs()
        if not bool(difference.isfinite().all()):
            raise _RefusedError("computes with infinite numbers")
        return _features(difference > NEGLIGIBLE[self.y.dtype] * float(self.y.detach().abs().max()))

    def _tensors(self, first: Tensor) -> tuple[dict[tuple[str, str], DividedTensor], list[tuple[str, str]]]:
        """Return the parameters and buffers that the units split, and the tensors that all units share."""
        floating = {key: tensor for key, tensor in self.cut.tensors.items() if tensor.requires_grad}
        weighted = self.y * torch.randn_like(self.y)
        of_first = _gradients(weighted[..., first], list(floating.values()))
        of_others = _gradients(weighted[..., ~first], list(floating.values()))
        divided = {}
        shared = []
        for (key, tensor), mine, theirs in zip(floating.items(), of_first, of_others):
            if not bool(mine.any()) and not bool(theirs.any()):
                continue
            # The heads lie along the dimension that separates this unit from all other units.
            for dim in range(tensor.dim()):
                unit, rest = (_features(part.movedim(dim, -1).unsqueeze(0)) for part in (mine, theirs))
                if not bool((unit & rest).any()) and bool(unit.any()):
                    divided[key] = DividedTensor(key[1], dim, self._of_heads(_parts(unit)))
                    break
            else:
                shared.append(key)
        for known in divided.values():
            if {part.size // part.unit for part in known.parts} != {self.units}:
                raise _RefusedError(f"no regular order of heads in `{known.name}`")
        return divided, shared

    def _of_heads(self, parts: Parts) -> Parts:
        """Return parts of full heads, split over the ranks like the heads themselves."""
        is_shared = self.groups < self.units
        return tuple(replace(part, groups=self.groups) for part in parts) if is_shared else parts

    # ------------------------------------------------------------------------------------------------------- styles

    def _styles(self, of_block: dict[str, Any]) -> dict[str, Style]:
        styles: dict[str, Style] = {name: Column(parts=_unless_plain(parts)) for name, parts in self.columns.items()}
        styles |= {name: Row(parts=_unless_plain(self.row)) for name in self.closing}
        paths = dict.fromkeys(path for path, _ in [*self.tensors, *self.shared])
        for path in dict.fromkeys([*paths, *([""] if any(of_block.values()) else [])]):
            own = parameters_of(self.cut.modules[path])
            divided = [known for key, known in self.tensors.items() if key[0] == path]
            shared = tuple(sorted(name for at, name in self.shared if at == path and name in own))
            buffers = tuple(known for known in divided if known.name not in own)
            special: dict[str, Any] = {} if path else of_block
            inside = self.cut.modules[path].named_parameters()  # `Replicate` also counts parameters of children
            if divided or any(special.values()) or len(shared) < sum(1 for _ in inside):
                divided = [known for known in divided if known.name in own]
                styles[path] = PerHead(tuple(divided), buffers, shared, **special)
            elif shared:
                styles[path] = Replicate(partial_gradient=True)
        return styles

    # --------------------------------------------------------------------------------------------- numbers of heads

    def _slots(self) -> list[Slot]:
        """Return the numbers in the region's modules that may count units, or features of all units."""
        inside = {path for path, _ in [*self.tensors, *self.shared]}
        around = {name.rpartition(".")[0] for name in [*self.opening, *self.closing]}
        slots = []
        for path, module in self.cut.modules.items():
            own = any(True for _ in module.parameters(recurse=False))
            # A layer with parameters outside the region keeps its own sizes, not the region's.
            if path in self.cut.layers or (own and path not in inside and path not in around):
                continue
            for name, value in vars(module).items():
                if name not in _OF_MODULES and not numbers_a_layer(type(module), name):
                    for full, number in _numbers(name, value):
                        slots += [(path, full, number, local) for local in self._local_values(number)]
        return slots

    def _possible_slots(self) -> Iterator[tuple[tuple[Slot, ...], bool]]:
        """Yield sets of numbers to reduce, and whether the width of the input is one; the likeliest first."""
        options: dict[tuple[str, str], list[Slot]] = {}
        for slot in self._slots():
            options.setdefault(slot[:2], []).append(slot)
        slots = [several[0] for several in options.values()]
        single = {part.unit for parts in [self.row, *self.columns.values()] for part in parts if not part.shared}
        values = sorted({value for _, _, value, _ in slots})
        # The size of one head is the same on all ranks, so numbers of that size are unlikely.
        likely = tuple(slot for slot in slots if slot[2] not in single)
        # A module's own numbers come first: other modules share its configuration.
        own = tuple(slot for slot in likely if "." not in slot[1])
        choices = [(), own, likely, tuple(slots)]
        choices += [tuple(slot for slot in slots if slot[2] in some) for some in _subsets(values)]
        choices += [tuple(slot for slot in likely if slot not in left) for left in islice(_subsets(likely), 100)]
        choices += list(islice(_subsets(slots), 100))
        # A number may count several things: as many key heads as query heads for each of them.
        other = product(*(several for several in options.values() if several[0] in own))
        choices[4:4] = islice(other, 1, MOST_OPTIONS)
        wide = self.cut.x.shape[-1] == self.y.shape[-1]
        for slots_and in dict.fromkeys(choices):
            yield slots_and, False
            if wide and "forward" not in vars(self.cut.module):
                yield slots_and, True

    def _works(self, slots: tuple[Slot, ...], narrow: bool, given: tuple[Given, ...]) -> bool:
        """Return whether the code, with some of the units, makes the features of these units."""
        # The first rank holds the largest share, the last rank the smallest: one run is enough if they are equal.
        ranks = (self.ranks - 1,) if self.groups % self.ranks == 0 else (0, self.ranks - 1)
        return all(self._works_on(rank, slots, narrow, given) for rank in ranks)

    def _works_on(self, rank: int, slots: tuple[Slot, ...], narrow: bool, arguments: tuple[Given, ...]) -> bool:
        rules = {name: Shard.packed(-1, parts, self.ranks) for name, parts in self.columns.items()}
        given = {name: rule.split(self.cut.outputs[name].detach(), rank) for name, rule in rules.items()}
        row = Shard.packed(-1, self.row, self.ranks)
        x = NarrowInput.of(self.cut.x.detach(), row.local_size(rank)) if narrow else None
        cut = {id(value): known.rule(self.ranks).split(value.to(self.y), rank) for known, value in arguments}
        saved: list[tuple[Any, dict[str, Any]]] = []
        try:
            for path, name, _, local in slots:
                module = self.cut.modules[path]
                saved.append((vars(module), set_local_values(module, {name: local[rank]})))
            for (path, _), known in self.tensors.items():
                for own in (parameters_of(self.cut.modules[path]), buffers_of(self.cut.modules[path])):
                    if known.name in own:
                        saved.append((own, {known.name: own[known.name]}))
                        share = known.rule(self.ranks).split(own[known.name].detach(), rank)  # type: ignore[union-attr]
                        own[known.name] = share  # type: ignore[assignment]
            inputs = self.cut.run(given, x, cut)
        except Exception:  # the user's code with sizes it may not be made for
            return False
        finally:
            # In reverse: a module may be changed twice, and its first saved values are the original ones.
            for own, values in reversed(saved):
                own.update(values)
        expected = {name: row.split(y, rank) if name in self.closing else y for name, y in self.cut.inputs.items()}
        return all(name in inputs and _equal(inputs[name], y) for name, y in expected.items())


def _equal(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    found, expected = found.detach(), expected.detach()
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    return bool((found - expected).abs().max() <= NEGLIGIBLE[expected.dtype] * float(expected.abs().max()))


def _unless_plain(parts: Parts) -> Parts | None:
    """Return None for features that are independent of each other."""
    return None if parts == (ShardPart(parts[0].size),) else parts


def _parts(first: Tensor) -> Parts:
    """Return the parts of features (E,), from the features of the first unit: each part begins with some of them.

        1100 1100 1100    three parts of two units of two features

    Raises:
        _RefusedError: If the parts are not made of full units.
    """
    marks = [False, *first.tolist(), False]
    starts = [at for at in range(len(first)) if marks[at + 1] and not marks[at]]
    stops = [at for at in range(1, len(first) + 1) if marks[at] and not marks[at + 1]]
    if not starts or starts[0] != 0:
        raise _RefusedError("no regular order of heads")
    sizes = [after - start for start, after in zip(starts, [*starts[1:], len(first)])]
    units = [stop - start for start, stop in zip(starts, stops)]
    if any(size % unit for size, unit in zip(sizes, units)):
        raise _RefusedError("no regular order of heads")
    return tuple(ShardPart(size, unit) for size, unit in zip(sizes, units))


def _parts_beside(first: Tensor, common: slice) -> Parts:
    """Return the parts of features; all units use the features in `common`, which lie at one end."""
    size = common.stop - common.start
    if size == 0:
        return _parts(first)
    shared = ShardPart.keys(1, size)
    if size == len(first):
        return (shared,)
    return (shared, *_parts(first[size:])) if common.start == 0 else (*_parts(first[: common.start]), shared)


def _grouped(parts: Parts, head: Tensor, heads: int) -> Parts | None:
    """Return the parts of groups of heads with smaller units: query heads, and keys that the heads of a group share.

    Args:
        parts: One unit for each group.
        head: The features of the first query head.
        heads: Number of query heads.

    Returns:
        None if the features of the heads have no regular order.
    """
    found: list[ShardPart] = []
    start = 0
    for part in parts:
        groups, size = part.size // part.unit, int(head[start : start + part.unit].sum())
        if size and part.size != heads * size:
            return None
        found.append(ShardPart.queries(heads, size, groups) if size else ShardPart.keys(groups, part.unit))
        start += part.size
    return tuple(found)


def _subsets(items: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    for count in range(1, len(items) + 1):
        yield from combinations(items, count)


_OF_MODULES = {*vars(nn.Module())}
_NO_HOLDERS = (nn.Module, Tensor, Enum, type, FunctionType, MethodType, ModuleType, str, bytes)


def _numbers(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the integers in the value of an attribute, with their names; see `set_local_values`."""
    if isinstance(value, int) and not isinstance(value, (bool, Enum)):
        yield name, value
    if depth == MOST_NESTED or isinstance(value, _NO_HOLDERS):
        return
    if isinstance(value, dict):
        inner = [(key, item) for key, item in value.items() if isinstance(key, str) and "." not in key]
    elif isinstance(value, (list, tuple)):
        inner = [(str(index), item) for index, item in enumerate(value)]
    else:
        inner = list(getattr(value, "__dict__", {}).items())
    for key, item in inner:
        yield from _numbers(f"{name}.{key}", item, depth + 1)
