"""A plan for a model that brings none: Hugging Face's where there is one, else from the structure, verified.

For the structure, the linear layers of each block are grouped in the order in which they were registered,

    query key value | out      up gate | down      first ones opening a divided region, the last one closing it,

and a group is believed only after a trial: a copy of the block runs divided on all ranks and must give the outputs
and gradients of the original. What cannot be tried is divided soundly, each layer by itself with a gathered output;
what cannot be divided stays whole. Both are noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from lightning_parallel.comm import Group
from lightning_parallel.tensor import heads
from lightning_parallel.tensor.conversion import is_linear, is_native
from lightning_parallel.tensor.layers import Column, Row, Style, Vocab
from lightning_parallel.tensor.plan import STYLES, Plan, UserPlan, parse_plan, resolve_ties
from lightning_parallel.tensor.sequence import along_sequence
from lightning_parallel.tensor.sharding import Part
from lightning_parallel.tensor.source import read_elsewhere
from lightning_parallel.tensor.trial import Trials

__all__ = ["make_plan"]

GATHERED = "each layer by itself, its output gathered: how its neighbours use it is not known"
LARGE_TABLE = 1 / 16  # an embedding with this share of the parameters is worth an all-reduce of its output


def make_plan(module: nn.Module, plan: UserPlan, group: Group, sequence_parallel: bool = False) -> Plan:
    """The plan for `module`; every rank of `group` must call it with the same module.

    Args:
        module: The whole model.
        plan: The user's plan, or `"auto"`.
        group: The tensor-parallel group.
        sequence_parallel: Also divide the activations between the layers of stacked blocks along the sequence.

    Raises:
        ValueError: If the user's plan does not fit the model, there are more ranks than attention heads, there is
            nothing that could be divided, or no stack of blocks allows sequence parallelism.
    """
    trials = Trials(group)
    if plan == "auto":
        found = _automatic(module, trials, group)
    else:
        found = parse_plan(module, plan, group)
        _confirm(module, found, trials, group)
        resolve_ties(module, found, group.size)
    if sequence_parallel:
        _divide_sequences(module, found, trials)
    return found


def _confirm(module: nn.Module, plan: Plan, trials: Trials, group: Group) -> None:
    """Try the regions of a user's plan; where a fused layer was named, find out how it is packed.

    Raises:
        ValueError: If a region computes something else than the original.
    """
    for path in _regions(plan):
        block, inside = module.get_submodule(path), plan.under(path)
        if trials.confirms(block, inside) is not False:
            continue
        same = [
            candidate
            for opening, closing in _groups(block, [name for name in inside.styles if name])
            for candidate in _candidates(block, opening, closing, group)
            if all(_unpacked(style) == _unpacked(inside.styles[name]) for name, style in candidate.styles.items())
        ]
        settled = trials.first(block, Plan(), same)
        if settled is None:
            listed = ", ".join(f"`{name}`: {style}" for name, style in inside.styles.items())
            raise ValueError(
                f"divided by the tensor-parallel plan, `{path}` computes something else than it did: {listed}. Are the"
                " layers a pair (`column` then `row`), and is a fused layer given its `Column(parts=...)`?"
            )
        plan.add(path, settled)


def _unpacked(style: Style) -> Style:
    """The style without what is known about the parts of its layer."""
    return replace(style, parts=None, unit=1) if isinstance(style, (Column, Row)) else style


def _regions(plan: Plan) -> list[str]:
    """The smallest modules around each row-parallel layer and the column-parallel ones that lead to it."""
    opening = [path for path, style in plan.styles.items() if isinstance(style, Column) and not style.gather_output]
    found: dict[str, None] = {}
    for path, style in plan.styles.items():
        around = path.split(".")[:-1] if isinstance(style, Row) else None
        while around and not any(other.startswith(".".join(around) + ".") for other in opening):
            around.pop()
        if around:
            found[".".join(around)] = None
    return list(found)


def _automatic(module: nn.Module, trials: Trials, group: Group) -> Plan:
    found = Plan()
    for path, model in _hugging_face_models(module):
        known = _hugging_face_plan(model, group)
        found.add(path, known)
    _discover(module, found, trials, group)
    _embeddings_and_rest(module, found, group)
    resolve_ties(module, found, group.size)
    if not any(style.rules(module.get_submodule(path), group.size) for path, style in found.styles.items()):
        kinds = sorted(
            {type(child).__name__ for child in module.modules() if any(True for _ in child.parameters(False))}
        )
        raise ValueError(
            f"`{type(module).__name__}` has nothing to shard over {group.size} tensor-parallel ranks: looked for linear"
            f" layers, attention and embeddings, found {', '.join(kinds) or 'no parameters'}."
            " Use `tensor_parallel_size=1`, or give a `plan`."
        )
    return found


# -------------------------------------------------------------------------------------------------- Hugging Face plans


def _hugging_face_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost models inside `module` that carry a tensor-parallel plan."""
    found: list[str] = []
    for path, child in module.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in found):
            continue
        if isinstance(getattr(child, "_tp_plan", None), dict) and child._tp_plan and hasattr(child, "config"):
            found.append(path)
            yield path, child


def _hugging_face_plan(model: nn.Module, group: Group) -> Plan:
    """The model's own plan; layers whose style is not known here, and those beside them, are left out."""
    table = dict(model._tp_plan)  # type: ignore[arg-type]
    found, unknown = Plan(), set()
    for path, child in model.named_modules():
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", path)
        name = table.get(path) or table.get(generic)
        if name is None:
            continue
        style = STYLES.get(name)
        if style is None or not _applies(style, child) or read_elsewhere(model, path):
            unknown.add(path.rpartition(".")[0])
        else:
            found.styles[path] = style
    for path in [path for path in found.styles if path.rpartition(".")[0] in unknown]:
        del found.styles[path]
    heads.complete(model, found.styles, found.edits, group)
    return found


def _applies(style: Style, module: nn.Module) -> bool:
    try:
        style.rules(module, 1)
    except (TypeError, ValueError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------ by structure


def _discover(module: nn.Module, plan: Plan, trials: Trials, group: Group, path: str = "") -> None:
    """Divide the modules inside `module`, innermost first, as far as trials confirm it."""
    for kind in ("transformer_layer", "attention"):
        if _applies(STYLES[kind], module):
            STYLES[kind].rules(module, group.size)  # more ranks than heads is an error, not a reason to look further
            plan.styles[path] = STYLES[kind]
            return
    prefix = f"{path}." if path else ""
    for name, child in module.named_children():
        _discover(child, plan, trials, group, prefix + name)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).forward is nn.Module.forward:
        return
    inside = plan.under(path)
    free = [
        name
        for name, child in module.named_modules()
        if name and is_linear(child) and not _belongs(name, inside.styles) and not read_elsewhere(module, name)
    ]
    repeated = any(isinstance(child, (nn.ModuleList, nn.ModuleDict)) for child in module.modules())
    if len(free) < 2 or repeated or any(_holds_blocks(child) for child in module.children()):
        return
    for opening, closing in _groups(module, free):
        accepted = trials.first(module, inside, _candidates(module, opening, closing, group))
        if accepted is not None:
            inside.styles |= accepted.styles
            inside.edits |= accepted.edits
            plan.add(path, accepted)


def _belongs(name: str, styles: dict[str, Style]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in styles)


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a sequence consists of several blocks of more than one linear layer each."""
    blocks = [child for child in module.children() if sum(is_linear(part) for part in child.modules()) > 1]
    return isinstance(module, nn.Sequential) and len(blocks) > 1


def _groups(module: nn.Module, names: list[str]) -> Iterator[tuple[list[str], str]]:
    """Runs of layers that may form one divided region: (those that open it, the one that closes it)."""
    opening: list[str] = []
    for position, name in enumerate(names):
        in_features, out_features = heads.sizes_of(module.get_submodule(name))
        if opening:
            width, first_out = heads.sizes_of(module.get_submodule(opening[0]))
            following = names[position + 1 : position + 2]
            same_again = following and heads.sizes_of(module.get_submodule(following[0])) == (in_features, out_features)
            closes = in_features in (first_out, first_out // 3, first_out // 2) and not (
                same_again and (in_features, out_features) == (width, first_out)
            )
            if closes:
                yield opening, name
                opening = []
                continue
            if in_features != width:
                opening = []
        opening.append(name)


def _candidates(module: nn.Module, opening: list[str], closing: str, group: Group) -> Iterator[Plan]:
    """Ways to divide one region, the likeliest first.

    Raises:
        ValueError: If the region is an attention with fewer heads than ranks.
    """
    width = heads.sizes_of(module.get_submodule(closing))[0]
    outs = [heads.sizes_of(module.get_submodule(name))[1] for name in opening]
    owners = {path.rpartition(".")[0]: module.get_submodule(path.rpartition(".")[0]) for path in [*opening, closing]}
    for path, owner in [*owners.items(), ("", module)]:
        found = heads.heads_of(owner)
        if found is None or found.queries * found.size != width:
            continue
        edits = {path: heads.local_edits(owner, found, group)}
        for parts in _layouts(outs, found):
            columns: dict[str, Style] = {name: Column(parts=part) for name, part in zip(opening, parts)}
            yield Plan({**columns, closing: Row(parts=(found.query_part(),))}, edits)
    if set(outs) == {width}:
        yield Plan({**{name: Column() for name in opening}, closing: Row()})
    for count in sorted({len(outs), *(out // width for out in outs)}):
        if count > 1 and set(outs) == {count * width}:
            yield from _fused(opening, closing, width, count, group)


def _layouts(outs: list[int], found: heads.Heads) -> Iterator[list[tuple[Part, ...]]]:
    """What the outputs of an attention's projections may consist of."""
    queries, keys = found.query_part(), found.key_part()
    if outs == [queries.size + 2 * keys.size]:
        yield [(queries, keys, keys)]
        if found.keys == found.queries:
            yield [(Part(3 * queries.size, 3 * found.size),)]  # query, key, value of one head after another
    elif all(out in (queries.size, keys.size) for out in outs):
        yield [(queries,) if out == queries.size else (keys,) for out in outs]


def _fused(opening: list[str], closing: str, width: int, count: int, group: Group) -> Iterator[Plan]:
    """Layers of `count` packed projections, with heads of every size that leaves whole heads to each rank."""
    sizes = [size for size in (128, 96, 80, 64, 48, 40, 32, 24, 16, 12, 8, 6, 4, 2, 1) if width % size == 0]
    for size in sizes:
        if width // size >= group.size:
            part = Part(width, size)
            yield Plan({**{name: Column(parts=(part,) * count) for name in opening}, closing: Row(parts=(part,))})


def _divide_sequences(module: nn.Module, plan: Plan, trials: Trials) -> None:
    """Divide the sequence along stacks of blocks in which it is shown to change nothing."""
    modules = dict(module.named_modules())
    for path, stack in modules.items():
        if not isinstance(stack, (nn.ModuleList, nn.Sequential)) or len(stack) == 0 or not path:
            continue
        blocks = [f"{path}.{name}" for name, _ in stack.named_children()]
        divided = [_along_sequence(modules[block], plan.under(block), trials) for block in blocks]
        if all(part is not None for part in divided):
            for block, part in zip(blocks, divided):
                assert part is not None
                plan.add(block, part)
            plan.stretches.append((path.rpartition(".")[0], blocks[0], blocks[-1]))
    if not plan.stretches:
        raise ValueError(
            f"`sequence_parallel=True` finds no stack of blocks in `{type(module).__name__}` whose activations can be"
            " divided along the sequence (dimension 1): blocks must take one tensor (batch, sequence, features), and"
            " lengths from their projections, not from the input. Use `sequence_parallel=False`."
        )


def _along_sequence(block: nn.Module, inside: Plan, trials: Trials) -> Plan | None:
    if not any(isinstance(style, Column) for style in inside.styles.values()):
        return None
    try:
        styles = along_sequence(block, inside.styles)
    except ValueError:
        return None
    return trials.first(block, inside, [Plan(styles, stretches=[("", "", "")])])


# --------------------------------------------------------------------------------------------------------- the rest


def _embeddings_and_rest(module: nn.Module, plan: Plan, group: Group) -> None:
    """Gather the outputs of linear layers that belong to no region; divide large and tied tables by vocabulary."""
    total = sum(parameter.numel() for parameter in module.parameters())
    weights: dict[int, int] = {}
    for child in module.modules():
        if is_linear(child):
            weights[id(child.weight)] = weights.get(id(child.weight), 0) + 1
    for path, child in module.named_modules():
        if _belongs(path, plan.styles) or not any(True for _ in child.parameters(recurse=False)):
            continue
        if not (is_linear(child) or is_native(child, nn.Embedding)):
            continue
        if read_elsewhere(module, path):
            plan.notes[path] = "whole: its weight is read outside of its forward"
        elif is_native(child, nn.Embedding):
            large = child.weight.numel() >= LARGE_TABLE * total or id(child.weight) in weights
            if large and child.weight.shape[0] >= group.size and _applies(Vocab(), child):
                plan.styles[path] = Vocab()
        elif heads.sizes_of(child)[1] >= group.size:
            plan.styles[path] = Column(gather_output=True)
            plan.notes[path] = GATHERED
