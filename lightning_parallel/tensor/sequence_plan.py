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


def divide_sequences(module: nn.Module, plan: Plan, verifier: PlanVerifier, calls: BlockCalls) -> Plan:
    """Return the plan with the sequence sharded along the stacks of blocks whose results this does not change.

    Raises:
        ValueError: If there is no such stack.
    """
    search = _StackSearch(module, plan, verifier, calls)
    whole = search.divide_stacks()
    # A parameter that gets gradients in two ways keeps full sequences everywhere, which may change the other blocks.
    while new := search.used_in_two_ways():
        search.full |= new
        whole = search.divide_stacks()
    if not search.found.sequence_regions:
        reasons = search.found.whole_sequences or whole
        listed = "".join(f"\n  `{path}`: {reason}" for path, reason in reasons.items())
        raise ValueError(
            f"`sequence_parallel=True` finds no stack of blocks in `{type(module).__name__}` whose activations can be"
            " sharded along the sequence. Blocks must be in a `ModuleList` or `Sequential` and take hidden states"
            " (batch, sequence, features). They must compute each position by itself outside their attention and MLP,"
            f" and return hidden states of the same shape. Use `sequence_parallel=False`.{listed}"
        )
    return search.found


class _StackSearch:
    """The search for stacks of blocks that allow sharded sequences.

    Args:
        root: The full model.
        plan: The plan without sequence parallelism; it stays unchanged.
        verifier: Accepts the plans of single blocks.
        calls: How the model calls its blocks.

    Attributes:
        full: Why a parameter must be used on full sequences, by its `id`.
        found: The plan with the regions of the last call of `divide_stacks`.
    """

    def __init__(self, root: nn.Module, plan: Plan, verifier: PlanVerifier, calls: BlockCalls) -> None:
        self._root = root
        self._plan = plan
        self._verifier = verifier
        self._calls = calls
        self._modules = dict(root.named_modules())
        # A module that several blocks share has one path here, the path in the plan.
        self._paths = {child: path for path, child in self._modules.items()}
        self.full: dict[int, str] = {}
        self.found = plan
        self._blocks: dict[str, Plan] = {}
        self._regions: list[SequenceRegion] = []

    def divide_stacks(self) -> dict[str, str]:
        """Search all stacks of the model; return why stacks are not sharded at all, by path."""
        plan = self._plan
        self.found = Plan({**plan.styles}, {**plan.attributes}, {**plan.notes})
        self._blocks = {}
        self._regions = []
        whole: dict[str, str] = {}
        stacks = [path for path, stack in self._modules.items() if isinstance(stack, (nn.ModuleList, nn.Sequential))]
        # A block has more modules than a block inside it, so outer stacks come first, in any order of registration.
        for path in sorted(stacks, key=lambda path: -_largest_child(self._modules[path])):
            inner = {child for block in self._blocks for child in self._modules[block].modules()}
            children = [*self._modules[path].children()]
            blocks = [self._paths[child] for child in children]
            is_divided = any(_is_divided(child, self._inside(block)) for child, block in zip(children, blocks))
            if _holds_parts(self._modules, path):
                if is_divided:
                    self.found.whole_sequences[path] = PARTS
            # A stack inside a block of a region is sharded together with that block.
            elif inner.isdisjoint(children):
                if is_divided:
                    _refuse_compiled(self._modules, path, blocks)
                    self._divide_stack(path, blocks)
                else:
                    whole[path] = WHOLE
        order = [*self._modules]
        self.found.sequence_regions.sort(key=lambda region: order.index(region.blocks[0]))
        return whole

    def used_in_two_ways(self) -> dict[int, str]:
        """Return the parameters that need full sequences besides `full`: why, by `id`.

        The gradient of a replicated parameter is partial inside a region and complete elsewhere. A sum over the ranks
        would count the complete part once for each rank.

        Raises:
            ValueError: If blocks share a module that full sequences do not make equal.
        """
        partial: set[int] = set()
        ways: dict[nn.Module, dict[object, str]] = {}
        for path, part in self._blocks.items():
            block = self._modules[path]
            (region,) = part.sequence_regions
            for name, child in block.named_modules():
                way = (repr(part.styles.get(name)), name in region.sublayers, name in region.gathered, region.dim)
                ways.setdefault(child, {}).setdefault(way, path)
            for name, style in part.styles.items():
                owner = block.get_submodule(name)
                partial |= {id(owner.get_parameter(each)) for each in style.partial(owner)}
        named = dict(self._root.named_parameters())
        outside = self._calls.used_outside([*self._blocks])
        found = {id(named[name]): why for name, why in outside.items() if id(named[name]) in partial}
        for child, blocks in ways.items():
            if len(blocks) > 1 and any(True for _ in child.parameters()):
                new = {id(parameter) for parameter in child.parameters()} - self.full.keys()
                if not new:
                    raise ValueError(
                        f"`sequence_parallel=True` does not support `{self._paths[child]}`, which"
                        f" {', '.join(f'`{block}`' for block in blocks.values())} share and use in different ways. Give"
                        " each block its own module, or set `sequence_parallel=False`"
                    )
                found |= dict.fromkeys(new, "blocks share it and use it in different ways")
        return found

    def _inside(self, path: str) -> Plan:
        """Return the part of the plan for a block, with paths relative to the block, also for shared modules."""
        paths = {name: self._paths[child] for name, child in self._modules[path].named_modules()}
        return Plan(
            {name: self._plan.styles[full] for name, full in paths.items() if full in self._plan.styles},
            {name: self._plan.attributes[full] for name, full in paths.items() if full in self._plan.attributes},
        )

    def _divide_stack(self, path: str, blocks: list[str]) -> None:
        """Shard the sequence along the blocks in a row that allow it, of the stack at `path`."""
        whole = self.found.whole_sequences
        run: list[SequenceRegion] = []
        joined: set[tuple[str, str]] | None = None
        for block in blocks:
            found = self._block_plan(path, block)
            if isinstance(found, str):
                whole[block] = found
                self._add_region(path, run)
                run = []
                continue
            self._blocks[block] = found
            region = self._add_block(block, found)
            if joined is None:
                joined = self._calls.joined(blocks) if len(blocks) > 1 else set()
            # A region ends where no run has shown that the next block gets the output unchanged.
            if run and not (run[0].dim == region.dim and (run[-1].blocks[-1], block) in joined):
                self._add_region(path, run)
                run = []
            run.append(region)
        self._add_region(path, run)

    def _block_plan(self, path: str, block: str) -> Plan | str:
        """Return the plan that shards the sequence in a block of the stack at `path`, or the reason against it."""
        seen = self._calls.of(block)
        if isinstance(seen, str) and _is_in_a_list(self._root, path):  # perhaps experts, whose tokens have no order
            return UNSEEN
        module = self._modules[block]
        call = None if isinstance(seen, str) else seen
        found = _sequence_plan(module, self._inside(block), self._verifier, call, self._full_inside(module))
        needs_call = isinstance(found, str) and found.startswith(CANNOT_RUN) and isinstance(seen, str)
        return f"{found}, {NOT_SEEN} ({seen})" if needs_call else found

    def _full_inside(self, block: nn.Module) -> dict[str, str]:
        """Return the modules that the block calls and that must compute on full sequences, and why."""
        found: dict[str, str] = {}
        names = {child: name for name, child in block.named_modules()}
        for name, parameter in block.named_parameters(remove_duplicate=False):
            if id(parameter) in self.full:
                found[names[block.get_submodule(_called_by(block, name))]] = self.full[id(parameter)]
        return found

    def _add_block(self, block: str, found: Plan) -> SequenceRegion:
        """Put the styles of a block into the plan; return its region with the paths in the model."""
        module = self._modules[block]
        # The new styles replace all styles of the block; some of the old paths have none any more.
        for child in module.modules():
            self.found.styles.pop(self._paths[child], None)
        self.found.styles |= {self._paths[module.get_submodule(name)]: style for name, style in found.styles.items()}
        (region,) = found.sequence_regions
        for name, why in self._full_inside(module).items():
            self.found.whole_sequences[self._paths[module.get_submodule(name)]] = why
        # A shared module gets its hooks once, from the first region that has it.
        known = {path for other in self._regions for path in (*other.sublayers, *other.gathered)}
        sublayers, gathered = (
            tuple(path for name in names if (path := self._paths[module.get_submodule(name)]) not in known)
            for names in (region.sublayers, region.gathered)
        )
        self._regions.append(SequenceRegion("", (block,), sublayers, gathered, region.dim))
        return self._regions[-1]

    def _add_region(self, path: str, run: list[SequenceRegion]) -> None:
        if run:
            self.found.sequence_regions.append(
                SequenceRegion(
                    path.rpartition(".")[0],
                    tuple(block for part in run for block in part.blocks),
                    tuple(inside for part in run for inside in part.sublayers),
                    tuple(inside for part in run for inside in part.gathered),
                    run[0].dim,
                )
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


def _largest_child(stack: nn.Module) -> int:
    """Return the number of modules in the child that has most."""
    return max((sum(1 for _ in child.modules()) for child in stack.children()), default=0)


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


def _is_in_a_list(root: nn.Module, path: str) -> bool:
    parts = path.split(".")
    around = (root.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts)))
    return any(isinstance(module, (nn.ModuleList, nn.Sequential)) for module in around)


def _sequence_plan(
    block: nn.Module, inside: Plan, verifier: PlanVerifier, call: BlockCall | None, full: Mapping[str, str]
) -> Plan | str:
    """Return the plan that shards the sequence in one block, or the reason against it, in a few words.

    Args:
        block: The full module.
        inside: The plan of the block without sequence parallelism.
        verifier: Accepts plans.
        call: How the model calls the block, if that is known.
        full: Paths of the modules inside that must compute on full sequences, and why.
    """
    if not _is_divided(block, inside):
        return WHOLE
    # A region of layers that all compute on full sequences would only add communication.
    if full and all(_is_inside(path, full) for path in inside.styles):
        return next(iter(full.values()))
    shape = None if call is None else call.hidden.shape
    if shape is not None and len(shape) < 3:
        return FLAT
    # The trial has more positions than samples, so the longer dimension holds the positions.
    dim = 0 if _has_positions_first(block) or (shape is not None and shape[0] > shape[1]) else 1
    candidates = list(_candidates(block, inside, dim, tuple(full)))
    given = Plan(attributes=inside.attributes)  # the candidates have the styles of all layers
    found = verifier.first_verified(block, given, candidates, call)
    if found is not None:
        return found
    # Tried on full sequences, so that the reason tells whether the block runs at all.
    runs = verifier.first_verified(block, inside, [Plan()], call) is not None
    return DIFFERS if runs else f"{CANNOT_RUN}{f' ({verifier.failure})' if verifier.failure else ''}"


def _has_positions_first(block: nn.Module) -> bool:
    return any(isinstance(child, nn.MultiheadAttention) and not child.batch_first for child in block.modules())


def _candidates(block: nn.Module, inside: Plan, dim: int, full: tuple[str, ...]) -> Iterator[Plan]:
    """Yield plans that shard the sequence in `block` and gather it for the modules at `full`, the best first."""
    around = [region_around(inside, path, Column).rstrip(".") for path in inside.styles if _is_row(inside.styles[path])]
    sublayers = tuple(dict.fromkeys(filter(None, around)))
    # A layer that takes or makes full features by itself also needs full sequences, like the layers beside it.
    alone = {path: style for path, style in inside.styles.items() if _needs_whole(style)}
    modules = tuple(dict.fromkeys(_parent(block, path) for path in alone if not _is_inside(path, sublayers)))
    # A sublayer may mix positions outside its sharded layers (a router); it then computes on full sequences.
    whole = [(), *((path,) for path in sublayers if len(sublayers) > 1)]
    if (mixing := _with_full_weights(block, inside.styles)) and not _is_inside("", mixing):
        whole.insert(1, mixing)
    whole = [tuple(dict.fromkeys((*full, *paths))) for paths in whole]
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
            found[_called_by(block, name)] = None
    return tuple(found)


def _called_by(block: nn.Module, name: str) -> str:
    """Return the path of the module that `block` calls and that holds the parameter `name`; empty for the block."""
    parts = name.split(".")[:-1]
    # The entries of a list are called, not the list.
    is_list = parts and isinstance(block.get_submodule(parts[0]), (nn.ModuleList, nn.ModuleDict))
    return ".".join(parts[: 2 if is_list else 1])


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
