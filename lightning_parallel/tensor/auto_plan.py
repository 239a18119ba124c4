"""Automatic plans: found by running each block as its model calls it, and verified on all ranks.

    query key value -> [attention] -> out      up gate -> [activation] -> down
    column column column ............ row      column ..................... row

The use of the outputs of linear layers shows which layers form a region, see `dataflow`. A region is accepted only
after `PlanVerifier` ran a sharded copy of its block on all ranks. Its outputs and gradients must equal the outputs and
gradients of the original. Layers outside regions are sharded one by one, with gathered outputs, which is always right.
Modules without a sharded form stay replicated. The plan's notes tell both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import nn

from lightning_parallel.comm import Group
from lightning_parallel.compat.initialization import tensor_parallel_plan_of
from lightning_parallel.step_trace.record import Record, no_record
from lightning_parallel.tensor.block_calls import BlockCalls
from lightning_parallel.tensor.dataflow import NOT_RUN, find_regions
from lightning_parallel.tensor.experts import Experts, find_routers, join_lists, plan_experts
from lightning_parallel.tensor.head import NOTE, find_heads
from lightning_parallel.tensor.inspection import has_hooks_inside, is_linear, is_native, structure_of, why_no_linear
from lightning_parallel.tensor.layers import Column, Row, Style, Vocab
from lightning_parallel.tensor.low_rank import layer_sizes, linear_layers
from lightning_parallel.tensor.per_head import PerHead
from lightning_parallel.tensor.plan import (
    STYLES,
    Plan,
    UserPlan,
    divided_regions,
    parse_plan,
    region_around,
    resolve_ties,
)
from lightning_parallel.tensor.sequence_plan import divide_sequences
from lightning_parallel.tensor.verify import BlockCall, PlanVerifier

__all__ = ["make_plan"]

GATHERED = "the use of it by its neighbours is not known"
LISTENED = "a hook is called around the forward of a neighbour"
REJECTED = "the module around it computes other results with some of the heads"
BY_TABLE = "by the table that the model carries, which no run has checked"
LARGE_TABLE = 1 / 16  # an embedding with this share of the parameters is worth an all-reduce of its output


def make_plan(
    module: nn.Module,
    plan: UserPlan,
    group: Group,
    sequence_parallel: bool = False,
    record: Record = no_record,
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
        ValueError: If the user's plan does not fit the model. Also if nothing can be sharded, or no stack of blocks
            allows sequence parallelism.
    """
    verifier = PlanVerifier(group)
    search = _Search(module, verifier, BlockCalls(module, group, record))
    if plan == "auto":
        found = _automatic_plan(module, search, group)
    else:
        found = parse_plan(module, plan, group)
        # The user has told the parts of these layers, so no trial has to find them.
        told = [pattern for pattern, wanted in plan.items() if isinstance(wanted, Column) and _tells_parts(wanted)]
        explicit = {path for path in found.styles if any(fnmatchcase(path, pattern) for pattern in told)}
        _verify_regions(module, found, search, explicit)
        search.resolve_ties(found)
    if sequence_parallel:
        found = divide_sequences(module, found, verifier, search.calls)
    found.quiet = {
        path for path in divided_regions(found) if verifier.is_quiet(module.get_submodule(path), search.call(path))
    }
    return found


def _verify_regions(module: nn.Module, plan: Plan, search: _Search, explicit: Collection[str]) -> None:
    """Verify the regions of a user's plan, and find out how their layers are packed and split by heads.

    Raises:
        ValueError: If a region computes other results than the original. Also if a region cannot run alone and has a
            fused layer outside `explicit`, the layers whose parts the user has told.
    """
    for path in _regions(plan):
        block = module.get_submodule(path)
        inside = plan.under(path)
        call = search.call(path)
        verdict = search.verifier.verify(block, inside, call)
        # The block cannot run alone, so only widths can show a fused layer.
        if verdict is None:
            _check_fused(block, path, inside, explicit)
        if verdict is not False:
            continue
        free = [name for name in linear_layers(block) if name in inside.styles]
        settled = Plan()
        for region in find_regions(block, free, search.verifier, call).regions:
            if _same_but_for_parts(region.styles, inside.styles):
                settled.add("", region)
        if search.verifier.first_verified(block, inside, [settled], call) is None:
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
                f" several projections. `{path}` cannot run alone, so their packing is not known. Give it"
                " in the tensor-parallel plan: `Column(parts=(size, size, ...))` for one projection after another,"
                " each by full heads with `ShardPart(size, head_size)`, or `Column(unit=...)` for units that stay"
                " together. Or use 'column_gather' and 'row_split'"
            )


def _same_but_for_parts(found: Mapping[str, Style], wanted: Mapping[str, Style]) -> bool:
    layers = {path: style for path, style in found.items() if isinstance(style, (Column, Row))}
    return all(_without_parts(style) == _without_parts(wanted[name]) for name, style in layers.items())


def _without_parts(style: Style) -> Style:
    return replace(style, parts=None, unit=1) if isinstance(style, (Column, Row)) else style


def _regions(plan: Plan) -> list[str]:
    """Return the paths of the smallest modules around each row-parallel layer and its column-parallel layers."""
    around = (region_around(plan, path, Column) for path, style in plan.styles.items() if isinstance(style, Row))
    return list(dict.fromkeys(prefix.rstrip(".") for prefix in around if prefix))


def _automatic_plan(module: nn.Module, search: _Search, group: Group) -> Plan:
    found = Plan()
    plan_experts(module, found, search.verifier, search.call)
    _plan_by_structure(module, found, search)
    search.add_what_was_left(found)
    join_lists(module, found, search.verifier, search.call, search.calls.is_stack)
    _plan_by_tables(module, found, group, search.reasons)
    _plan_remaining_layers(module, found, search)
    search.resolve_ties(found)
    # Last, because only layers with gathered outputs can be heads, and ties may change them.
    found.styles |= (heads := find_heads(module, found.styles))
    found.notes |= dict.fromkeys(heads, NOTE)
    if not any(style.rules(module.get_submodule(path), group.size) for path, style in found.styles.items()):
        if _is_read(module, search.calls):
            # Such as a penalty over all parameters. Few gathers cost less than a full model on each rank.
            search.calls.allow_readers()
            return _automatic_plan(module, _Search(module, search.verifier, search.calls), group)
        kinds = sorted({_kind(child) for child in module.modules() if any(True for _ in child.parameters(False))})
        raise ValueError(
            f"`{type(module).__name__}` must have linear, attention or embedding layers of torch to shard over"
            f" {group.size} tensor-parallel ranks; got {', '.join(kinds) or 'no parameters'}. Use"
            " `tensor_parallel_size=1`, or give a `tensor_plan`. [LP012]"
        )
    return found


def _is_read(module: nn.Module, calls: BlockCalls) -> bool:
    """Tell whether the step computes with the weight of a layer that could be sharded otherwise."""
    plain = (path for path, child in module.named_modules() if is_linear(child) or is_native(child, nn.Embedding))
    return any(calls.reader_of(path) is not None for path in plain)


def _kind(module: nn.Module) -> str:
    is_plain = is_linear(module) or is_native(module, nn.Embedding)
    # Such as few numbers of a distribution, or features of a narrow embedding.
    why = "too small to shard, or its weight is read elsewhere" if is_plain else why_no_linear(module)
    return type(module).__name__ if why is None else f"{type(module).__name__} ({why})"


def _owners(path: str, module: nn.Module) -> list[str]:
    """Return the paths of the modules inside `module`, itself at `path`, that hold parameters directly."""
    owners = [name for name, child in module.named_modules() if any(True for _ in child.parameters(recurse=False))]
    return [f"{path}.{name}".strip(".") for name in owners]


# ------------------------------------------------------------------------------------------------- Hugging Face tables


def _plan_by_tables(module: nn.Module, plan: Plan, group: Group, reasons: Mapping[str, str]) -> None:
    """Shard layers of blocks that cannot be run in the pairs of the table that a Hugging Face model carries."""
    for path, model in _hugging_face_models(module):
        table = tensor_parallel_plan_of(model)
        counts = [getattr(model.config, name, None) or 0 for name in ("num_attention_heads", "num_key_value_heads")]
        # Each rank takes equal numbers of features, so full heads must fit them.
        if any(count % group.size for count in counts):
            continue
        for name, child in model.named_modules():
            layer = f"{path}.{name}".lstrip(".")
            style = STYLES.get(_planned(table, name) or "")
            is_pair = style == Column() or style == Row()
            beside = [other for other in reasons if other.rpartition(".")[0] == layer.rpartition(".")[0]]
            # All layers of one module, as a pair without one of its layers computes something else.
            if style is None or not is_pair or not all(reasons[other].startswith(NOT_RUN) for other in beside):
                continue
            if layer in reasons and not _has_style(layer, plan.styles) and _applies(style, child):
                plan.styles[layer] = style
                plan.notes[layer] = BY_TABLE


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
        calls: How the model calls its blocks.
        left: Plans for some layers of a module only, with its path. A module around it may shard all of them, such as
            a layer with its low-rank term.
        reasons: Why layers are in no region, by path.
    """

    root: nn.Module
    verifier: PlanVerifier
    calls: BlockCalls
    left: list[tuple[str, Plan]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The first path of each module: a module that is registered twice is planned once.
        self.paths = {id(child): path for path, child in self.root.named_modules()}
        # The plans of blocks, with the parts of `left` and `reasons` for them; all paths are relative to the block.
        self.planned: dict[object, tuple[Plan, list[tuple[str, Plan]], dict[str, str]]] = {}

    def is_shared(self, module: nn.Module, path: str) -> bool:
        """Return whether a module inside `module`, which is at `path`, has an earlier path elsewhere."""
        return any(not f"{self.paths[id(child)]}.".startswith(f"{path}.") for child in module.modules())

    def call(self, path: str) -> BlockCall | None:
        """Return how the model calls the module at `path`, if that is known."""
        found = self.calls.of(path)
        return None if isinstance(found, str) else found

    def note(self, prefix: str, reasons: Mapping[str, str]) -> None:
        """Keep, for the layers below `prefix`, the reasons of the innermost module that could run."""
        for name, reason in reasons.items():
            # Inner modules are noted first: only a reason that says "could not run" is replaced.
            if self.reasons.get(prefix + name, NOT_RUN).startswith(NOT_RUN):
                self.reasons[prefix + name] = reason

    def resolve_ties(self, plan: Plan) -> None:
        """Make modules that share parameters agree, see `plan.resolve_ties`."""
        calls = self.calls
        ranks = self.verifier.group.size
        resolve_ties(
            self.root, plan, ranks, lambda path: calls.reader_of(path) is not None, calls.computes_with_parameters
        )

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
            if isinstance(why := _refusal(STYLES[kind], module, search.verifier.group.size), str):
                plan.notes[path] = f"replicated: {why}"
                if kind == "transformer_layer":
                    continue  # its inner layers may still be sharded
            else:
                plan.styles[path] = STYLES[kind]
            return
    prefix = f"{path}." if path else ""
    # A list: the record, made when a call is asked for the first time, restores the dicts of modules.
    for name, child in [*module.named_children()]:
        # A module that is registered twice is planned under its first path only.
        if search.paths[id(child)] == prefix + name:
            _plan_once(child, plan, search, prefix + name)
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
        and search.calls.reader_of(prefix + name) is None
        and not search.calls.is_called_apart(path, name)
    ]
    # A module around repeated blocks is not one region; its blocks have been planned above.
    if len(free) < 2 or any(_repeats_blocks(child) for child in [module, *module.modules()]):
        return
    if has_hooks_inside(module):
        search.note(prefix, dict.fromkeys(free, LISTENED))
        return
    accepted = _accepted_regions(path, module, free, inside, search)
    if accepted.styles.keys() >= {*free}:
        plan.add(path, accepted)
    elif accepted.styles:
        search.left.append((path, accepted))


def _plan_once(module: nn.Module, plan: Plan, search: _Search, path: str) -> None:
    """Plan the modules inside `module`, or repeat the plan of an earlier module that the step uses in the same way."""
    # Blocks of a list have a number for a name.
    may_repeat = path.rpartition(".")[2].isdigit() and plan.at(path) == Plan() and not search.is_shared(module, path)
    used = search.calls.use_of(path) if may_repeat else None
    if used is None:
        _plan_by_structure(module, plan, search, path)
        return
    key = (structure_of(module), used)
    if key not in search.planned:
        first = len(search.left)
        _plan_by_structure(module, plan, search, path)
        start = f"{path}."
        left = [(around.removeprefix(path).lstrip("."), part) for around, part in search.left[first:]]
        reasons = {name.removeprefix(start): why for name, why in search.reasons.items() if name.startswith(start)}
        search.planned[key] = plan.at(path), left, reasons
        return
    found, left, reasons = search.planned[key]
    plan.add(path, found)
    search.left += [(f"{path}.{around}".rstrip("."), part) for around, part in left]
    search.note(f"{path}.", reasons)


def _accepted_regions(path: str, module: nn.Module, free: list[str], inside: Plan, search: _Search) -> Plan:
    """Return the verified regions of the layers `free` in the module at `path`; note why other layers are in none."""
    call = search.call(path)
    prefix = f"{path}." if path else ""
    flow = find_regions(module, free, search.verifier, call)
    search.note(prefix, flow.reasons)
    regions: list[Plan] = []
    for region in flow.regions:
        # Regions may overlap, and the larger one comes first.
        if not any(region.styles.keys() & other.styles.keys() for other in regions):
            regions.append(region)
    together = Plan()
    for region in regions:
        together.add("", region)
    # A pretended group cannot compare values, and a copy of a block of a large model would not fit a laptop.
    is_pretended = search.verifier.group.is_pretended
    if is_pretended or (len(regions) > 1 and search.verifier.first_verified(module, inside, [together], call)):
        return together
    found = Plan()
    for region in regions:
        given = Plan({**inside.styles, **found.styles}, {**inside.attributes, **found.attributes})
        if search.verifier.first_verified(module, given, [region], call) is not None:
            found.add("", region)
        else:
            search.note(prefix, dict.fromkeys(region.styles, REJECTED))
    return found


def _repeats_blocks(module: nn.Module) -> bool:
    """Return whether `module` holds a list of modules with linear layers inside, and not just of linear layers."""
    if isinstance(module, nn.Sequential):
        return sum(len(linear_layers(child)) > 1 for child in module.children()) > 1
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and any(
        not linear_layers(child).keys() <= {""} for child in module.children()
    )


def _has_style(name: str, styles: dict[str, Style]) -> bool:
    around = [name]
    while "." in around[-1]:
        around.append(around[-1].rpartition(".")[0])
    # `PerHead` covers a module's own head-dependent values; the layers inside still need styles.
    return any(path in styles and not isinstance(styles[path], PerHead) for path in around)


# --------------------------------------------------------------------------------------------------------- the rest


def _plan_remaining_layers(module: nn.Module, plan: Plan, search: _Search) -> None:
    """Gather the outputs of linear layers outside regions; shard large and tied embeddings by vocabulary."""
    ranks = search.verifier.group.size
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
        elif (line := search.calls.reader_of(path)) is not None:
            plan.notes[path] = f"replicated: its weight is read outside its forward{f', in {line}' if line else ''}"
        elif is_native(child, nn.Embedding):
            # A tied head is sharded with its table, whatever the size.
            large = child.weight.numel() >= LARGE_TABLE * total or id(child.weight) in weights
            if large and child.weight.shape[0] >= ranks and _applies(Vocab(), child):
                plan.styles[path] = Vocab()
        elif layer_sizes(child)[1] >= ranks:
            plan.styles[path] = Column(gather_output=True)
            plan.notes[path] = search.reasons.get(path, GATHERED)
