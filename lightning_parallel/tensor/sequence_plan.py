"""Sequence parallelism of a plan: stacks of blocks between which activations are sharded along the sequence.

    rank 0   positions 0..3    norm   gather -> column ... row -> reduce-scatter    dropout   norm   ...
    rank 1   positions 4..7

The layers between the sharded layers, norms and dropout, compute each position by itself. So a rank computes its own
positions, and the gradients of the parameters there are sums over the ranks. A trial shows whether a block allows that:
called in the model's way, it must compute the same as before. Such blocks in a row form one region if a run of the
model shows that each passes its output to the next unchanged. Otherwise each block is one region, with full sequences
between them.

Source: https://arxiv.org/abs/2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import nn

from lightning_parallel.compat.torch import has_compiled_calls
from lightning_parallel.tensor.attention import Attention, TransformerLayer, transformer_styles
from lightning_parallel.tensor.block_calls import BlockCalls
from lightning_parallel.tensor.layers import Column, Replicate, Row, Style
from lightning_parallel.tensor.per_head import PerHead
from lightning_parallel.tensor.plan import Plan, region_around
from lightning_parallel.tensor.sequence_regions import SequenceRegion
from lightning_parallel.tensor.verify import BlockCall, PlanVerifier

__all__ = ["divide_sequences", "sequence_parallel_styles"]

CANNOT_RUN = "its blocks cannot be run alone to compare them"
DIFFERS = "its blocks compute other results with some of the positions"
FLAT = "its hidden states have no sequence dimension"
NOT_SEEN = "and the model's calls of them were not seen; let its `forward` make their inputs from one tensor"
PARTS = "no module calls its parts as one block"
UNSEEN = "it is in a block of another list, and a run of the model without data did not show its inputs"
WHOLE = "its layers are not sharded"


def divide_sequences(module: nn.Module, plan: Plan, verifier: PlanVerifier, calls: BlockCalls) -> None:
    """Shard the sequence along the stacks of blocks whose results this does not change.

    Raises:
        ValueError: If there is no such stack.
    """
    modules = dict(module.named_modules())
    whole: dict[str, str] = {}
    for path, stack in modules.items():
        if not isinstance(stack, (nn.ModuleList, nn.Sequential)):
            continue
        blocks = [f"{path}.{name}".lstrip(".") for name, _ in stack.named_children()]
        known = [block for region in plan.sequence_regions for block in region.blocks]
        # A stack inside a block of a region is sharded together with that block.
        inside_of_another = any(path.startswith(f"{block}.") for block in known)
        if _holds_parts(modules, path):
            if any(_is_divided(modules[block], _inside(plan, block)) for block in blocks):
                plan.whole_sequences[path] = PARTS
            continue
        if not inside_of_another and any(_is_divided(modules[block], _inside(plan, block)) for block in blocks):
            _refuse_compiled(modules, path, blocks)
            _divide_stack(module, path, blocks, plan, verifier, calls)
        elif not inside_of_another:
            whole[path] = WHOLE
    if not plan.sequence_regions:
        reasons = "".join(f"\n  `{path}`: {reason}" for path, reason in (plan.whole_sequences or whole).items())
        raise ValueError(
            f"`sequence_parallel=True` finds no stack of blocks in `{type(module).__name__}` whose activations can be"
            " sharded along the sequence. Blocks must be in a `ModuleList` or `Sequential` and take hidden states"
            " (batch, sequence, features). They must compute each position by itself outside their attention and MLP,"
            f" and return hidden states of the same shape. Use `sequence_parallel=False`.{reasons}"
        )


def _refuse_compiled(modules: Mapping[str, nn.Module], path: str, blocks: Sequence[str]) -> None:
    """Refuse compiled blocks, and compiled modules around them, which cannot run on some of the positions.

    Raises:
        ValueError: If one of them is compiled.
    """
    parts = path.split(".")
    around = ["", *(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))]
    for name in (*around, *blocks):
        if has_compiled_calls(modules[name]):
            raise ValueError(
                f"`sequence_parallel=True` cannot run compiled blocks: the modules in `{path}` must be plain, but"
                f" `{name or type(modules['']).__name__}` is compiled. Its code is fixed for full sequences. Do not"
                " compile blocks or the modules around them, or set `sequence_parallel=False`"
            )


def _holds_parts(modules: Mapping[str, nn.Module], path: str) -> bool:
    """Return whether a list in a list holds attention and MLP of a block, which other code adds to the stream."""
    around = modules[path.rpartition(".")[0]]
    return isinstance(around, nn.ModuleList) and len({type(child) for child in modules[path].children()}) > 1


def _is_divided(block: nn.Module, inside: Plan) -> bool:
    kinds = (Attention, TransformerLayer, Column, Row)
    # A list of blocks, or a linear layer of a sublayer, is no block.
    if isinstance(block, (nn.ModuleList, nn.ModuleDict)) or isinstance(inside.styles.get(""), (Column, Row)):
        return False
    return any(isinstance(style, kinds) for style in inside.styles.values())


def _inside(plan: Plan, block: str) -> Plan:
    """Return the part of the plan inside a block, with the style and the attributes of the block itself."""
    found = plan.under(block)
    return Plan(
        found.styles | ({"": plan.styles[block]} if block in plan.styles else {}),
        found.attributes | ({"": plan.attributes[block]} if block in plan.attributes else {}),
    )


def _divide_stack(
    root: nn.Module, path: str, blocks: list[str], plan: Plan, verifier: PlanVerifier, calls: BlockCalls
) -> None:
    """Shard the sequence along the blocks in a row that allow it, of the stack at `path`."""
    run: list[SequenceRegion] = []
    seen = calls.of(blocks[0])
    call, unseen = (None, seen) if isinstance(seen, str) else (seen, "")
    if call is None and _is_in_a_list(root, path):  # perhaps experts, whose tokens have no order
        plan.whole_sequences |= dict.fromkeys(blocks, UNSEEN)
        return
    joined = calls.joined(blocks) if len(blocks) > 1 else set()
    for block in blocks:
        found = _sequence_plan(root.get_submodule(block), _inside(plan, block), verifier, call)
        if isinstance(found, str):
            needs_call = found.startswith(CANNOT_RUN) and unseen
            plan.whole_sequences[block] = f"{found}, {NOT_SEEN} ({unseen})" if needs_call else found
            _add_region(plan, path, run)
            run = []
            continue
        # The new styles replace all styles of the block; some of the old paths have none any more.
        for inside in [name for name in plan.styles if name == block or name.startswith(f"{block}.")]:
            del plan.styles[inside]
        plan.add(block, found)
        region = found.sequence_regions[0]
        sublayers, gathered = (
            tuple(f"{block}.{name}".rstrip(".") for name in names) for names in (region.sublayers, region.gathered)
        )
        # A region ends where no run has shown that the next block gets the output unchanged.
        if run and not (run[0].dim == region.dim and (run[-1].blocks[-1], block) in joined):
            _add_region(plan, path, run)
            run = []
        run.append(SequenceRegion("", (block,), sublayers, gathered, region.dim))
    _add_region(plan, path, run)


def _is_in_a_list(root: nn.Module, path: str) -> bool:
    parts = path.split(".")
    around = (root.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts)))
    return any(isinstance(module, (nn.ModuleList, nn.Sequential)) for module in around)


def _add_region(plan: Plan, path: str, run: list[SequenceRegion]) -> None:
    if run:
        plan.sequence_regions.append(
            SequenceRegion(
                path.rpartition(".")[0],
                tuple(block for part in run for block in part.blocks),
                tuple(inside for part in run for inside in part.sublayers),
                tuple(inside for part in run for inside in part.gathered),
                run[0].dim,
            )
        )


def _sequence_plan(block: nn.Module, inside: Plan, verifier: PlanVerifier, call: BlockCall | None) -> Plan | str:
    """Return the plan that shards the sequence in one block, or the reason against it, in a few words."""
    if not _is_divided(block, inside):
        return WHOLE
    shape = None if call is None else call.hidden.shape
    if shape is not None and len(shape) < 3:
        return FLAT
    # The trial has more positions than samples, so the longer dimension holds the positions.
    dim = 0 if _has_positions_first(block) or (shape is not None and shape[0] > shape[1]) else 1
    candidates = list(_candidates(block, inside, dim))
    given = Plan(attributes=inside.attributes)  # the candidates have the styles of all layers
    found = verifier.first_verified(block, given, candidates, call)
    if found is not None:
        return found
    # Tried on full sequences, so that the reason tells whether the block runs at all.
    runs = verifier.first_verified(block, inside, [Plan()], call) is not None
    return DIFFERS if runs else f"{CANNOT_RUN}{f' ({verifier.failure})' if verifier.failure else ''}"


def _has_positions_first(block: nn.Module) -> bool:
    return any(isinstance(child, nn.MultiheadAttention) and not child.batch_first for child in block.modules())


def _candidates(block: nn.Module, inside: Plan, dim: int) -> Iterator[Plan]:
    """Yield plans that shard the sequence in `block`, the best first."""
    around = [region_around(inside, path, Column).rstrip(".") for path in inside.styles if _is_row(inside.styles[path])]
    sublayers = tuple(dict.fromkeys(filter(None, around)))
    # A layer that takes or makes full features by itself also needs full sequences, like the layers beside it.
    alone = {path: style for path, style in inside.styles.items() if _needs_whole(style)}
    modules = tuple(dict.fromkeys(_parent(block, path) for path in alone if not _is_inside(path, sublayers)))
    # A sublayer may mix positions outside its sharded layers (a router); it then computes on full sequences.
    whole = [(), *((path,) for path in sublayers if len(sublayers) > 1)]
    if (mixing := _with_full_weights(block, inside.styles)) and not _is_inside("", mixing):
        whole.insert(1, mixing)
    for gathered in whole:
        divided = tuple(path for path in sublayers if not _is_inside(path, gathered))
        yield from _candidate(block, inside, SequenceRegion("", ("",), divided, (*gathered, *modules), dim))
    # Last the whole block as one sublayer, whose input has the full sizes: each operation costs more.
    others = [path for path, style in alone.items() if not isinstance(style, (Column, Row))]
    modules = tuple(dict.fromkeys(_parent(block, path) for path in others))
    for gathered in whole:
        yield from _candidate(block, inside, SequenceRegion("", ("",), ("",), (*gathered, *modules), dim))


def _with_full_weights(block: nn.Module, styles: Mapping[str, Style]) -> tuple[str, ...]:
    """Return the modules that the block calls and that hold a full matrix: a router, or products by hand."""
    sharded = [path for path, style in styles.items() if not isinstance(style, Replicate)]
    found: dict[str, None] = {}
    for name, weight in block.named_parameters():
        if weight.dim() > 1 and not _is_inside(name.rpartition(".")[0], sharded):
            parts = name.split(".")[:-1]
            # The entries of a list are called, not the list.
            is_list = parts and isinstance(block.get_submodule(parts[0]), (nn.ModuleList, nn.ModuleDict))
            found[".".join(parts[: 2 if is_list else 1])] = None
    return tuple(found)


def _candidate(block: nn.Module, inside: Plan, region: SequenceRegion) -> Iterator[Plan]:
    """Yield the plan that shards the sequence as `region` says, unless a style does not support that."""
    with suppress(ValueError):
        styles = sequence_parallel_styles(block, inside.styles, region.dim, region.sublayers, region.gathered)
        yield Plan(styles, sequence_regions=[region])


def _parent(block: nn.Module, path: str) -> str:
    """Return the path of the module that calls the module at `path`; `path` itself if the block calls it."""
    parent = path.rpartition(".")[0]
    is_called = parent and not isinstance(block.get_submodule(parent), (nn.ModuleList, nn.ModuleDict))
    return parent if is_called else path


def _is_row(style: Style) -> bool:
    return isinstance(style, Row) and not style.split_input


def _is_gathered(style: Style) -> bool:
    return bool(getattr(style, "gather_output", False) or getattr(style, "split_input", False))


def _needs_whole(style: Style) -> bool:
    """Return whether a module with this style computes on full sequences: layers by themselves, experts."""
    kinds = (Column, Row, Attention, TransformerLayer, Replicate, PerHead)
    return _is_gathered(style) or not isinstance(style, kinds)


def _is_inside(path: str, modules: Collection[str]) -> bool:
    return any(not module or path == module or path.startswith(f"{module}.") for module in modules)


def sequence_parallel_styles(
    block: nn.Module,
    styles: Mapping[str, Style],
    dim: int = 1,
    sublayers: Collection[str] = (),
    gathered: Collection[str] = (),
) -> dict[str, Style]:
    """Return the styles of a `block` whose input and output are sharded along the sequence.

    Args:
        block: The full module.
        styles: The styles of its layers without sequence parallelism, by path inside it.
        dim: Dimension of the sequence.
        sublayers: Paths of the modules whose inputs read as full sequences.
        gathered: Paths of the modules that compute on full sequences.

    Returns:
        The same styles with sequence parallelism, and partial gradients for all other parameters of the block.

    Raises:
        ValueError: If a style cannot be combined with sequence parallelism.
    """
    result: dict[str, Style] = {}
    styles = _inner_styles(block, styles)
    for path, style in styles.items():
        inside = _is_inside(path, sublayers)
        if _is_inside(path, gathered) or isinstance(style, (Replicate, PerHead)) or (inside and _is_gathered(style)):
            result[path] = style
        elif isinstance(style, Attention):
            result[path] = replace(style, sequence_dim=dim)
        elif isinstance(style, (Column, Row)) and not _is_gathered(style):
            result[path] = replace(style, sequence_dim=dim, in_sublayer=inside)
        else:
            raise ValueError(
                f"`{path}` does not support sequence parallelism with {style}; use `Column()` and `Row()` in pairs"
            )
    known = [path for path, style in styles.items() if not isinstance(style, (Replicate, PerHead))]
    for path, module in block.named_modules():
        # Norms and other layers see this rank's positions only, so their gradients are partial.
        whole = _is_inside(path, known) or _is_inside(path, gathered) or isinstance(styles.get(path), PerHead)
        if any(True for _ in module.parameters(recurse=False)) and not whole:
            result[path] = Replicate(partial_gradient=True)
    return result


def _inner_styles(block: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return the styles, with the style of torch's own transformer layers replaced by styles of the modules inside."""
    result: dict[str, Style] = {}
    for path, style in styles.items():
        inner = (
            {"": style} if not isinstance(style, TransformerLayer) else transformer_styles(block.get_submodule(path))
        )
        result |= {f"{path}.{name}".strip("."): found for name, found in inner.items()}
    return result
