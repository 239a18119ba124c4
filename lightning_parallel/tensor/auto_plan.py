"""Automatic plans: from the plan that a Hugging Face model carries, or else from the structure of the model, verified.

From the structure: the linear layers of each block are grouped in the order of their registration.

    query key value | out      up gate | down      the first layers open a sharded region, the last layer closes it

A group is accepted only after `PlanVerifier` ran a sharded copy of the block on all ranks. Its outputs and gradients
must equal those tensors of the original. Layers of blocks that cannot run alone are sharded one by one, with gathered
outputs, which is always right. Modules without a sharded form stay replicated. The plan's notes tell both.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.compat.initialization import tensor_parallel_plan_of
from lightning_parallel.compat.torch import forward_hooks_of, pytree
from lightning_parallel.step_trace.record import Record, no_record
from lightning_parallel.tensor.attention import divide_by_heads
from lightning_parallel.tensor.block_calls import block_call
from lightning_parallel.tensor.dataflow import NOT_RUN, RegionFinder
from lightning_parallel.tensor.experts import Experts, find_routers, join_lists, plan_experts
from lightning_parallel.tensor.head import NOTE, find_heads
from lightning_parallel.tensor.inspection import (
    AttentionHeads,
    called_around,
    has_hooks_inside,
    heads_of,
    is_linear,
    is_native,
    local_attributes,
    read_elsewhere,
    structure_of,
    why_no_linear,
)
from lightning_parallel.tensor.layers import Column, Row, Style, Vocab
from lightning_parallel.tensor.low_rank import layer_sizes, linear_layers
from lightning_parallel.tensor.per_head import PerHead
from lightning_parallel.tensor.plan import STYLES, Plan, UserPlan, parse_plan, resolve_ties
from lightning_parallel.tensor.sequence_plan import divide_sequences
from lightning_parallel.tensor.sharding import ShardPart
from lightning_parallel.tensor.verify import BlockCall, PlanVerifier

__all__ = ["make_plan"]

GATHERED = "the use of it by its neighbours is not known"
LISTENED = "a hook is called around the forward of a neighbour"
AS_CALLED = "the module around it takes a tensor for all heads, such as a position bias"
IDLE = "the module around it calls other layers if it takes more than one tensor"
REJECTED = "the module around it computes other results with some of the heads"
LARGE_TABLE = 1 / 16  # an embedding with this share of the parameters is worth an all-reduce of its output
# Head sizes to try for fused projections of modules that do not tell their number of heads.
HEAD_SIZES = (128, 96, 80, 64, 48, 40, 32, 24, 16, 12, 8, 6, 4, 2, 1)


def make_plan(
    module: nn.Module, plan: UserPlan, group: Group, sequence_parallel: bool = False, record: Record = no_record
) -> Plan:
    """Make the plan for `module`; every rank of `group` must call it with the same module.

    The module is not changed and may be on the meta device: single blocks of it are copied and run.

    Args:
        module: The full model.
        plan: The user's plan, or `"auto"`.
        group: The tensor-parallel group.
        sequence_parallel: Also shard the activations between the layers of stacked blocks along the sequence.
        record: Gives the record of the user's step, which shows how the model calls its blocks.

    Raises:
        ValueError: If the user's plan does not fit the model, or the model has fewer attention heads than `group` has
            ranks. Also if nothing can be sharded, or no stack of blocks allows sequence parallelism.
    """
    verifier = PlanVerifier(group)
    if plan == "auto":
        found = _automatic_plan(module, verifier, group, record)
    else:
        found = parse_plan(module, plan, group)
        # The user has told the parts of these layers, so no trial has to find them.
        told = [pattern for pattern, wanted in plan.items() if isinstance(wanted, Column) and _tells_parts(wanted)]
        explicit = {path for path in found.styles if any(fnmatchcase(path, pattern) for pattern in told)}
        _verify_regions(module, found, verifier, group, explicit)
        resolve_ties(module, found, group.size)
    if sequence_parallel:
        divide_sequences(module, found, verifier, record)
    return found


def _verify_regions(
    module: nn.Module, plan: Plan, verifier: PlanVerifier, group: Group, explicit: Collection[str]
) -> None:
    """Verify the regions of a user's plan, and find out how their fused layers are packed.

    Raises:
        ValueError: If a region computes other results than the original. Also if a region cannot run alone and has a
            fused layer outside `explicit`, the layers whose parts the user has told.
    """
    for path in _regions(plan):
        block = module.get_submodule(path)
        inside = plan.under(path)
        verdict = verifier.verify(block, inside)
        # The block cannot run alone, so only widths can show a fused layer.
        if verdict is None:
            _check_fused(block, path, inside, explicit)
        if verdict is not False:
            continue
        candidates = []
        for opening, closing in _possible_regions(block, [name for name in inside.styles if name]):
            for candidate in _candidates(block, opening, closing, group):
                if _same_but_for_parts(candidate.styles, inside.styles):
                    candidates.append(candidate)
        settled = verifier.first_verified(block, Plan(), candidates)
        if settled is None:
            listed = ", ".join(f"`{name}`: {style}" for name, style in inside.styles.items())
            raise ValueError(
                f"`{path}` must compute the same with the tensor-parallel plan as without it; got {listed}. Make the"
                " layers a pair (`column` then `row`), and give a fused layer its `Column(parts=...)`"
            )
        plan.add(path, settled)


def _tells_parts(style: Column) -> bool:
    return style.parts is not None or style.unit > 1


def _check_fused(block: nn.Module, path: str, inside: Plan, explicit: Collection[str]) -> None:
    """Refuse fused layers of a region that cannot run alone, unless the user has told how they are packed."""
    order = [name for name, _ in block.named_modules() if name in inside.styles]
    width: int | None = None  # the input features of the row-parallel layer that follows
    # From each row-parallel layer back to the layers that feed it.
    for name in reversed(order):
        style = inside.styles[name]
        full = f"{path}.{name}" if path else name
        if isinstance(style, Row):
            width = layer_sizes(block.get_submodule(name))[0]
        if not isinstance(style, Column) or style.gather_output or full in explicit or width is None:
            continue
        out_features = layer_sizes(block.get_submodule(name))[1]
        if out_features > width:
            raise ValueError(
                f"`{full}` makes {out_features} features for a row-parallel layer that takes {width}, so it holds"
                f" several projections. `{path}` cannot run with one tensor, so their packing is not known. Give it"
                " in the tensor-parallel plan: `Column(parts=(size, size, ...))` for one projection after another,"
                " each by full heads with `ShardPart(size, head_size)`, or `Column(unit=...)` for units that stay"
                " together. Or use 'column_gather' and 'row_split'"
            )


def _same_but_for_parts(candidate: dict[str, Style], wanted: dict[str, Style]) -> bool:
    return all(_without_parts(style) == _without_parts(wanted[name]) for name, style in candidate.items())


def _without_parts(style: Style) -> Style:
    return replace(style, parts=None, unit=1) if isinstance(style, (Column, Row)) else style


def _regions(plan: Plan) -> list[str]:
    """Return the paths of the smallest modules around each row-parallel layer and its column-parallel layers."""
    opening = [path for path, style in plan.styles.items() if isinstance(style, Column) and not style.gather_output]
    found: dict[str, None] = {}
    for path, style in plan.styles.items():
        around = path.split(".")[:-1] if isinstance(style, Row) else None
        while around and not any(other.startswith(".".join(around) + ".") for other in opening):
            around.pop()
        if around:
            found[".".join(around)] = None
    return list(found)


def _automatic_plan(module: nn.Module, verifier: PlanVerifier, group: Group, record: Record) -> Plan:
    # The model's own plan comes before the structure: the search skips modules that have a style already.
    found = Plan()
    gathered: dict[str, Style] = {}
    for path, model in _hugging_face_models(module):
        own = _hugging_face_plan(model, group)
        # The model's plan gathers the outputs of fused projections; the structure may shard them without a gather.
        inner = {name: own.styles.pop(name) for name in [*own.styles] if _is_gathered_in_block(name, own.styles[name])}
        gathered |= {f"{path}.{name}".strip("."): style for name, style in inner.items()}
        found.add(path, own)
    plan_experts(module, found, verifier, group)
    paths = {id(child): path for path, child in module.named_modules()}
    search = _Search(module, verifier, RegionFinder(group), group, paths, {*gathered}, record)
    planned = [*found.styles]
    _plan_by_structure(module, found, search)
    search.add_what_was_left(found)
    search.drop_what_fails_as_called(found, {*planned})
    for path, style in gathered.items():
        if not _has_style(path, found.styles) and not found.under(path).styles:
            found.styles[path] = style
            found.notes.setdefault(path, f"gathered by the model's own plan; {search.reasons.get(path, GATHERED)}")
    join_lists(module, found, verifier, group)
    _plan_remaining_layers(module, found, group, search.reasons)
    resolve_ties(module, found, group.size)
    # Last, because only layers with gathered outputs can be heads, and ties may change them.
    found.styles |= (heads := find_heads(module, found.styles))
    found.notes |= dict.fromkeys(heads, NOTE)
    if not any(style.rules(module.get_submodule(path), group.size) for path, style in found.styles.items()):
        kinds = sorted({_kind(child) for child in module.modules() if any(True for _ in child.parameters(False))})
        raise ValueError(
            f"`{type(module).__name__}` must have linear, attention or embedding layers of torch to shard over"
            f" {group.size} tensor-parallel ranks; got {', '.join(kinds) or 'no parameters'}. Use"
            " `tensor_parallel_size=1`, or give a `tensor_plan`. [LP012]"
        )
    return found


def _kind(module: nn.Module) -> str:
    is_plain = is_linear(module) or is_native(module, nn.Embedding)
    # Such as few numbers of a distribution, or features of a narrow embedding.
    why = "too small to shard, or its weight is read elsewhere" if is_plain else why_no_linear(module)
    return type(module).__name__ if why is None else f"{type(module).__name__} ({why})"


def _owners(path: str, module: nn.Module) -> list[str]:
    """Return the paths of the modules inside `module`, itself at `path`, that hold parameters directly."""
    owners = [name for name, child in module.named_modules() if any(True for _ in child.parameters(recurse=False))]
    return [f"{path}.{name}".strip(".") for name in owners]


# -------------------------------------------------------------------------------------------------- Hugging Face plans


def _hugging_face_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost models inside `module` that carry a tensor-parallel plan, with their paths."""
    found: list[str] = []
    for path, child in module.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in found):
            continue
        # A wrapper may forward the attributes of the model inside it, but the plan's paths start at that model.
        table = tensor_parallel_plan_of(child) if hasattr(child, "config") else {}
        if any(_planned(table, name) is not None for name, _ in child.named_modules()):
            found.append(path)
            yield path, child


def _hugging_face_plan(model: nn.Module, group: Group) -> Plan:
    """Return the plan that the model carries, without the layers of modules in which some style is unknown here."""
    table = tensor_parallel_plan_of(model)
    found = Plan()
    unknown: set[str] = set()
    for path, child in model.named_modules():
        # A hook would get a piece, so the layers beside this one stay out of the plan.
        if any(forward_hooks_of(child)):
            unknown.add(path.rpartition(".")[0])
        name = _planned(table, path)
        if name is None:
            continue
        style = STYLES.get(name)
        if style is None or not _applies(style, child) or read_elsewhere(model, path):
            unknown.add(path.rpartition(".")[0])
        else:
            found.styles[path] = style
    # A row-parallel layer without its column-parallel partner would take full features for this rank's.
    for path in [path for path in found.styles if path.rpartition(".")[0] in unknown]:
        del found.styles[path]
    found.notes |= divide_by_heads(model, found.styles, found.attributes, group, may_gather=True)
    return found


def _is_gathered_in_block(path: str, style: Style) -> bool:
    is_gathered = (isinstance(style, Column) and style.gather_output) or (isinstance(style, Row) and style.split_input)
    return is_gathered and re.search(r"(^|\.)\d+\.", path) is not None


def _planned(table: Mapping[str, str], path: str) -> str | None:
    # The plans of transformers write `*` for the number of a layer.
    return table.get(path) or table.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))


def _refusal(style: Style, module: nn.Module, ranks: int) -> str | None:
    """Return why a style that applies to `module` cannot shard it over so many ranks, in a few words."""
    try:
        style.rules(module, ranks)
        return None
    except ValueError as error:
        return str(error).partition(":")[0]


def _applies(style: Style, module: nn.Module) -> bool:
    try:
        style.rules(module, 1)
    except (TypeError, ValueError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------ by structure


@dataclass
class _Search:
    """The shared state of a search through the structure of a model.

    Attributes:
        root: The full model.
        verifier: Accepts plans.
        finder: Proposes plans where the order of the layers gives none for all of them.
        group: The tensor-parallel group.
        paths: The first path of each module, by `id`: a module that is registered twice is planned once.
        gathered: Layers whose outputs the model's own plan gathers. Their block is also tried as its model calls it.
        record: Gives the record of the user's step.
        left: Plans for some layers of a module only, with its path. A module around it may shard all of them, such as
            a layer with its low-rank term.
        reasons: Why layers are in no region, by path.
    """

    root: nn.Module
    verifier: PlanVerifier
    finder: RegionFinder
    group: Group
    paths: Mapping[int, str]
    gathered: Collection[str] = ()
    record: Record = no_record
    left: list[tuple[str, Plan]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    _calls: dict[object, BlockCall | None] = field(default_factory=dict)

    def call(self, module: nn.Module, path: str, outermost: bool = False) -> BlockCall | None:
        """Return how the model calls the module at `path`; blocks of equal structure are examined once."""
        key = (structure_of(module), outermost)
        if key not in self._calls:
            found = block_call(self.root, path, self.group, outermost, self.record())
            self._calls[key] = None if isinstance(found, str) else found
        return self._calls[key]

    def as_called(self, module: nn.Module, path: str, free: Sequence[str], inside: Plan, accepted: Plan) -> Plan:
        """Return the accepted regions, or none if layers that a call with one tensor skips may not fit them.

        In the model's own call such a layer, for example for a context, may add its output to the region's features.
        """
        widths = {
            layer_sizes(module.get_submodule(name))[1]
            for name, style in accepted.styles.items()
            if isinstance(style, Column) and not style.gather_output
        }
        idle = [name for name in self.finder.find(module, free).idle if name not in accepted.styles]
        if not any(layer_sizes(module.get_submodule(name))[1] in widths for name in idle):
            return accepted
        call = self.call(module, path) if path else None
        plan = Plan({**inside.styles, **accepted.styles}, {**inside.attributes, **accepted.attributes})
        if call is not None and self.verifier.verify(module, plan, call):
            return accepted
        self.note(f"{path}." if path else "", dict.fromkeys(accepted.styles, IDLE))
        return Plan()

    def drop_what_fails_as_called(self, plan: Plan, planned: Collection[str]) -> None:
        """Drop regions that pass with one tensor, but compute other results with the model's own arguments.

        Args:
            plan: The plan; changed in place.
            planned: Paths of the layers that were not planned by structure.
        """
        for path in _regions(plan):
            inside = plan.under(path)
            is_planned = any(f"{path}.{name}" in planned for name in inside.styles)
            if path and not is_planned and self.fails_as_called(path, inside):
                for name in inside.styles:
                    del plan.styles[f"{path}.{name}".rstrip(".")]
                    self.reasons[f"{path}.{name}".rstrip(".")] = AS_CALLED
                for name in inside.attributes:
                    del plan.attributes[f"{path}.{name}".rstrip(".")]

    def fails_as_called(self, path: str, inside: Plan) -> bool:
        """Return whether the model gives the module at `path` a tensor for all heads, with which `inside` is wrong."""
        module = self.root.get_submodule(path)
        if len(inspect.signature(module.forward).parameters) < 2:
            return False
        call = self.call(module, path, outermost=True)
        if call is None or call.hidden.dim() != 3:
            return False
        leaves = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
        if not any(_is_for_heads(leaf, call.hidden.shape[1]) for leaf in leaves if leaf is not call.hidden):
            return False
        return self.verifier.verify(module, inside, call) is False

    def note(self, prefix: str, reasons: Mapping[str, str]) -> None:
        """Keep, for the layers below `prefix`, the reasons of the innermost module that could run."""
        for name, reason in reasons.items():
            # Inner modules are noted first: only a reason that says "could not run" is replaced.
            if self.reasons.get(prefix + name, NOT_RUN).startswith(NOT_RUN):
                self.reasons[prefix + name] = reason

    def add_what_was_left(self, plan: Plan) -> None:
        """Add the plans in `left` for layers that no module around has sharded."""
        for path, part in reversed(self.left):  # the outermost first
            if not plan.under(path).styles.keys() & part.styles.keys() and path not in plan.styles:
                plan.add(path, part)


def _plan_by_structure(module: nn.Module, plan: Plan, search: _Search, path: str = "") -> None:
    """Plan the modules inside `module`, innermost first, as far as the verifier accepts it."""
    if isinstance(plan.styles.get(path), Experts):
        return
    for kind in ("transformer_layer", "attention"):
        if _applies(STYLES[kind], module):
            if kind == "transformer_layer" and has_hooks_inside(module):
                continue
            if isinstance(why := _refusal(STYLES[kind], module, search.group.size), str):
                plan.notes[path] = f"replicated: {why}"
                if kind == "transformer_layer":
                    continue  # its inner layers may still be sharded
            else:
                plan.styles[path] = STYLES[kind]
            return
    prefix = f"{path}." if path else ""
    for name, child in module.named_children():
        # A module that is registered twice is planned under its first path only.
        if search.paths[id(child)] == prefix + name:
            _plan_by_structure(child, plan, search, prefix + name)
    # Containers have no forward, so there is nothing to verify.
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).forward is nn.Module.forward:
        return
    inside = plan.under(path)
    free = [
        name
        for name, layer in linear_layers(module).items()
        if name
        and search.paths[id(layer)] == prefix + name
        and not _has_style(name, inside.styles)
        and not read_elsewhere(module, name)
        and not called_around(search.root, path, name)
    ]
    # A module around repeated blocks is not one region; its blocks have been planned above.
    if len(free) < 2 or any(_repeats_blocks(child) for child in [module, *module.modules()]):
        return
    if has_hooks_inside(module):
        search.note(prefix, dict.fromkeys(free, LISTENED))
        return
    accepted = _regions_by_order(module, free, inside, search)
    if not accepted.styles.keys() >= {*free}:
        other = _regions_by_dataflow(module, free, inside, search, prefix)
        # The plan that shards more weights; on a tie, the plan by order.
        accepted = max(accepted, other, key=lambda part: _weights(module, part))
        accepted = search.as_called(module, path, free, inside, accepted)
    if accepted.styles.keys() >= {*free}:
        plan.add(path, accepted)
    elif accepted.styles:
        search.left.append((path, accepted))


def _regions_by_order(module: nn.Module, free: list[str], inside: Plan, search: _Search) -> Plan:
    """Return the verified regions of the layers `free`, by the order of their registration."""
    found = Plan()
    for opening, closing in _possible_regions(module, free):
        given = Plan({**inside.styles, **found.styles}, {**inside.attributes, **found.attributes})
        candidates = _candidates(module, opening, closing, search.group)
        accepted = search.verifier.first_verified(module, given, candidates)
        if accepted is not None:
            found.add("", accepted)
    return found


def _regions_by_dataflow(module: nn.Module, free: list[str], inside: Plan, search: _Search, prefix: str) -> Plan:
    """Return the verified regions of the layers `free`, by the use of their outputs; note the other layers' reasons."""
    flow = search.finder.find(module, free)
    call = None
    is_gathered = any(prefix + name in search.gathered for name in free)
    if prefix and is_gathered and any(reason.startswith(NOT_RUN) for reason in flow.reasons.values()):
        call = search.call(module, prefix[:-1])
        flow = flow if call is None else search.finder.find(module, free, call)
    search.note(prefix, flow.reasons)
    found = Plan()
    for region in flow.regions:
        # Regions may overlap, and the larger one comes first.
        if region.styles.keys() & found.styles.keys():
            continue
        given = Plan({**inside.styles, **found.styles}, {**inside.attributes, **found.attributes})
        accepted = search.verifier.first_verified(module, given, [region], "called" if call else "dataflow", call)
        if accepted is not None:
            found.add("", accepted)
        else:
            search.note(prefix, dict.fromkeys(region.styles, REJECTED))
    return found


def _is_for_heads(given: Tensor, length: int) -> bool:
    """Return whether an argument of a block may have a dimension of heads, like a bias of positions, slopes, a scale.

    A mask for all heads has extent 1 in that dimension, or lacks it.
    """
    if given.dim() == 1:
        return given.is_floating_point() and len(given) > 1
    return given.dim() > 2 and given.shape[-1] in (1, length) and given.shape[-3] != 1


def _weights(module: nn.Module, plan: Plan) -> int:
    layers = [module.get_submodule(path) for path, style in plan.styles.items() if isinstance(style, (Column, Row))]
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def _repeats_blocks(module: nn.Module) -> bool:
    """Return whether `module` holds a list of modules with linear layers inside, and not just of linear layers."""
    if isinstance(module, nn.Sequential):
        return sum(len(linear_layers(child)) > 1 for child in module.children()) > 1
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and any(
        not linear_layers(child).keys() <= {""} for child in module.children()
    )


def _has_style(name: str, styles: dict[str, Style]) -> bool:
    # `PerHead` covers a module's own head-dependent values; the layers inside still need styles.
    whole = [path for path, style in styles.items() if not isinstance(style, PerHead)]
    return any(name == path or name.startswith(f"{path}.") for path in whole)


def _possible_regions(module: nn.Module, names: list[str]) -> Iterator[tuple[list[str], str]]:
    """Yield runs of layers that may form one sharded region: (layers that open it, the layer that closes it)."""
    sizes = [layer_sizes(module.get_submodule(name)) for name in names]
    opening: list[int] = []
    for position, (in_features, out_features) in enumerate(sizes):
        if opening:
            width, first_out = sizes[opening[0]]
            # Square layers (query, key, value, out) fit as opening and as closing: the last one of equal sizes closes.
            square = (in_features, out_features) == (width, first_out)
            more_of_the_same = sizes[position + 1 : position + 2] == [(in_features, out_features)]
            # The opening layer may be fused: gate and up make two projections, query, key and value three.
            takes_in_the_region = in_features in (first_out, first_out // 3, first_out // 2)
            if takes_in_the_region and not (square and more_of_the_same):
                yield [names[index] for index in opening], names[position]
                opening = []
                continue
            if in_features != width:
                opening = []
        opening.append(position)


def _candidates(module: nn.Module, opening: list[str], closing: str, group: Group) -> Iterator[Plan]:
    """Yield plans for one region, the likeliest first."""
    width = layer_sizes(module.get_submodule(closing))[0]
    outs = [layer_sizes(module.get_submodule(name))[1] for name in opening]
    owners = dict.fromkeys(name.rpartition(".")[0] for name in [*opening, closing])
    # Either the owner of the layers or the block itself may keep the number of heads.
    for path in [*owners, ""]:
        owner = module.get_submodule(path)
        found = heads_of(owner)
        # Heads with other features than the closing layer takes belong to another module.
        if found is None or found.queries * found.size != width or found.queries < group.size:
            continue
        attributes = {path: local_attributes(owner, found, group)}
        for parts in _possible_parts(outs, found):
            columns: dict[str, Style] = {name: Column(parts=part) for name, part in zip(opening, parts)}
            yield Plan({**columns, closing: Row(parts=(found.query_part(),))}, attributes)
    if set(outs) == {width}:
        yield Plan({**{name: Column() for name in opening}, closing: Row()})
    # Several projections in one layer: gate and up make two, query, key and value three.
    for count in sorted({len(outs), *(out // width for out in outs)}):
        if count > 1 and set(outs) == {count * width}:
            yield from _fused(opening, closing, width, count, group)


def _possible_parts(outs: list[int], found: AttentionHeads) -> Iterator[list[tuple[ShardPart, ...]]]:
    """Yield possible parts of the outputs of an attention's projections, one tuple per projection."""
    queries = found.query_part()
    keys = found.key_part()
    if outs == [queries.size + 2 * keys.size]:
        yield [(queries, keys, keys)]
        if found.keys == found.queries:
            yield [(ShardPart(3 * queries.size, 3 * found.size),)]  # query, key, value of one head after another
    elif all(out in (queries.size, keys.size) for out in outs):
        yield [(queries,) if out == queries.size else (keys,) for out in outs]


def _fused(opening: list[str], closing: str, width: int, count: int, group: Group) -> Iterator[Plan]:
    """Yield plans for `count` projections fused in one layer, by head size: each rank must hold full heads."""
    for size in HEAD_SIZES:
        if width % size == 0 and width // size >= group.size:
            part = ShardPart(width, size)
            yield Plan({**{name: Column(parts=(part,) * count) for name in opening}, closing: Row(parts=(part,))})


# --------------------------------------------------------------------------------------------------------- the rest


def _plan_remaining_layers(module: nn.Module, plan: Plan, group: Group, reasons: Mapping[str, str]) -> None:
    """Gather the outputs of linear layers outside regions; shard large and tied embeddings by vocabulary."""
    total = sum(parameter.numel() for parameter in module.parameters())
    weights: dict[int, int] = {}
    for child in module.modules():
        if is_linear(child):
            weights[id(child.weight)] = weights.get(id(child.weight), 0) + 1
    layers = linear_layers(module)
    routers = find_routers(module)
    # A gathered output costs an all-gather but is right for any use of it.
    for path, child in module.named_modules():
        if _has_style(path, plan.styles):
            continue
        if not (path in layers or is_native(child, nn.Embedding)):
            if (why := why_no_linear(child)) is not None:
                plan.notes |= dict.fromkeys(_owners(path, child), f"replicated: {why}")
            continue
        if path in routers:
            plan.notes[path] = "replicated: every rank chooses between the experts"
        elif read_elsewhere(module, path):
            plan.notes[path] = "replicated: its weight is read outside its forward"
        elif is_native(child, nn.Embedding):
            # A tied head is sharded with its table, whatever the size.
            large = child.weight.numel() >= LARGE_TABLE * total or id(child.weight) in weights
            if large and child.weight.shape[0] >= group.size and _applies(Vocab(), child):
                plan.styles[path] = Vocab()
        elif layer_sizes(child)[1] >= group.size:
            plan.styles[path] = Column(gather_output=True)
            plan.notes[path] = reasons.get(path, GATHERED)
