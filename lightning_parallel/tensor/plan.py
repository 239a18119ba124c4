"""Plans: the style of each module, as plain data; matched, checked together, and applied.

A plan maps module paths to styles. It comes from the user (globs and style names), from the plan that many Hugging Face
models carry, or from the structure of the model (`auto_plan`). The model is changed only after every rank knows that
the full plan is possible.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar, Union

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches
from lightning_parallel.compat.initialization import initialize_tensors
from lightning_parallel.tensor.attention import Attention, TransformerLayer, guard_fast_path
from lightning_parallel.tensor.head import Head
from lightning_parallel.tensor.inspection import full_shape, is_linear, is_native
from lightning_parallel.tensor.layers import Column, Replicate, Row, Style, Vocab
from lightning_parallel.tensor.per_head import set_local_values
from lightning_parallel.tensor.regions import connect_random_regions
from lightning_parallel.tensor.sequence_regions import SequenceRegion, divide_region
from lightning_parallel.tensor.sharding import Shard

__all__ = [
    "STYLES",
    "Plan",
    "Sharding",
    "UserPlan",
    "apply_plan",
    "divided_regions",
    "materialize_shards",
    "parse_plan",
    "region_around",
    "resolve_ties",
    "style_named",
]

UserPlan = Union[Literal["auto"], Mapping[str, Union[str, Style]]]
Shape = tuple[int, ...]
V = TypeVar("V")

# The styles by name; the second group are the names in Hugging Face's plans.
STYLES: dict[str, Style] = {
    "column": Column(),
    "column_gather": Column(gather_output=True),
    "head": Head(),
    "row": Row(),
    "row_split": Row(split_input=True),
    "vocab": Vocab(),
    "replicate": Replicate(),
    "replicate_partial": Replicate(partial_gradient=True),
    "attention": Attention(),
    "transformer_layer": TransformerLayer(),
    "colwise": Column(),
    "colwise_rep": Column(gather_output=True),
    "colwise_gather_output": Column(gather_output=True),
    "rowwise": Row(),
    "rowwise_rep": Row(split_input=True),
    "rowwise_split_input": Row(split_input=True),
    "embedding_rowwise": Vocab(),
    "replicated_with_grad_allreduce": Replicate(partial_gradient=True),
}


@dataclass
class Plan:
    """How the modules of one model are sharded.

    Attributes:
        styles: The style of each sharded module, by path.
        attributes: Local values, such as the number of heads, for `per_head.set_local_values`: `{path: {name: value}}`.
        notes: Why a module is replicated, or sharded less well than it could be, by path.
        sequence_regions: Where activations are sharded along the sequence.
        whole_sequences: Why stacks of blocks keep full sequences, by path.
        quiet: Modules around sharded layers that draw no random numbers in training, by path.
    """

    styles: dict[str, Style] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    sequence_regions: list[SequenceRegion] = field(default_factory=list)
    whole_sequences: dict[str, str] = field(default_factory=dict)
    quiet: set[str] = field(default_factory=set)

    def under(self, prefix: str) -> Plan:
        """Return the part of the plan inside the module at `prefix`, with paths relative to it."""
        start = f"{prefix}." if prefix else ""
        return Plan(_inside(self.styles, start), _inside(self.attributes, start), _inside(self.notes, start))

    def at(self, path: str) -> Plan:
        """Return the part of the plan for the module at `path` and the modules inside, with paths relative to it."""
        found = self.under(path)
        if path in self.styles:
            found.styles[""] = self.styles[path]
        if path in self.attributes:
            found.attributes[""] = self.attributes[path]
        if path in self.notes:
            found.notes[""] = self.notes[path]
        return found

    def add(self, prefix: str, other: Plan) -> None:
        """Add `other`, whose paths are relative to `prefix`."""
        # An empty path inside `other` stands for the module at `prefix` itself.
        start = f"{prefix}." if prefix else ""
        self.styles |= {(start + path).rstrip("."): style for path, style in other.styles.items()}
        self.attributes |= {(start + path).rstrip("."): values for path, values in other.attributes.items()}
        self.notes |= {(start + path).rstrip("."): note for path, note in other.notes.items()}


def _inside(part: dict[str, V], start: str) -> dict[str, V]:
    return {path.removeprefix(start): value for path, value in part.items() if path.startswith(start)}


@dataclass(frozen=True)
class Sharding:
    """Result of applying a plan: the facts that checkpoints, the clip norm and the table need.

    Attributes:
        shards: The shard rules of the sharded parameters, by full name; all other parameters are replicated.
        partial: Names of parameters with partial gradients: the ranges held by several ranks have to be summed.
        plan: The plan that was applied.
        full_shapes: Shape of every full parameter, by name.
        full_attributes: Former values of the attributes that the plan sets: `{path: {name: value}}`.
    """

    shards: dict[str, Shard]
    partial: frozenset[str]
    plan: Plan
    full_shapes: dict[str, Shape]
    full_attributes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def without(self, names: Collection[str], paths: Collection[str]) -> Sharding:
        """Return the facts of a module that no longer has the parameters `names` and the modules at `paths`."""
        plan = replace(
            self.plan,
            styles={path: style for path, style in self.plan.styles.items() if path not in paths},
            attributes={path: values for path, values in self.plan.attributes.items() if path not in paths},
        )
        shards = {name: rule for name, rule in self.shards.items() if name not in names}
        return replace(self, shards=shards, partial=self.partial - set(names), plan=plan)

    def with_copies(self, originals: Mapping[str, str]) -> Sharding:
        """Return the facts of a module that holds copies of sharded tensors.

        Args:
            originals: The names of the original tensors, by the names of their copies.
        """
        owners = {new.rpartition(".")[0]: old.rpartition(".")[0] for new, old in originals.items()}
        styles = {path: self.plan.styles[old] for path, old in owners.items() if old in self.plan.styles}
        shapes = {name: self.full_shapes[old] for name, old in originals.items() if old in self.full_shapes}
        return replace(
            self,
            shards=self.shards | {name: self.shards[old] for name, old in originals.items() if old in self.shards},
            partial=self.partial | {name for name, old in originals.items() if old in self.partial},
            plan=replace(self.plan, styles=self.plan.styles | styles),
            full_shapes=self.full_shapes | shapes,
        )


# ------------------------------------------------------------------------------------------------------ a user's plan


def style_named(name: str) -> Style:
    """Return the style with that name.

    Raises:
        ValueError: If no style has it; the message gives the closest names.
    """
    if name not in STYLES:
        raise ValueError(f"A style must be one of {', '.join(sorted(STYLES))}; got {name!r}{_nearest(name, STYLES)}")
    return STYLES[name]


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def parse_plan(module: nn.Module, plan: Mapping[str, str | Style], group: Group) -> Plan:
    """Match a user's plan to the modules that have parameters.

    Args:
        module: The model.
        plan: Globs over module paths (`*` also matches dots) to styles or their names; the last match wins.
        group: The tensor-parallel group.

    Raises:
        ValueError: If anything is wrong, with all problems in one message: patterns that match nothing, unknown
            styles, modules to which a style does not apply.
    """
    modules = dict(module.named_modules())
    owners = [path for path, owner in modules.items() if any(True for _ in owner.parameters())]
    # All problems are collected before one error is raised, so that the user corrects the plan in one go.
    problems: list[str] = []
    parsed = Plan()
    for pattern, wanted in plan.items():
        matched = [path for path in owners if fnmatchcase(path, pattern)]
        if not matched:
            problems.append(f"`{pattern}` must match a module that has parameters; got none{_nearest(pattern, owners)}")
        try:
            style = style_named(wanted) if isinstance(wanted, str) else wanted
        except ValueError as error:
            problems.append(f"`{pattern}`: {error}")
            continue
        # In the order of the user's plan, so that the last match wins.
        parsed.styles.update(dict.fromkeys(matched, style))
    if not problems:
        problems = _problems(modules, parsed.styles, group.size)
    if problems:
        raise ValueError(
            "The tensor-parallel plan must fit the model; got these problems:\n"
            + "\n".join(f"  {line}" for line in problems)
        )
    return parsed


def _problems(modules: Mapping[str, nn.Module], styles: Mapping[str, Style], ranks: int) -> list[str]:
    problems = []
    for path, style in styles.items():
        try:
            style.rules(modules[path], ranks)
        except (TypeError, ValueError) as error:
            problems.append(f"`{path}`: {error}")
    return problems


# ----------------------------------------------------------------------------------------------------- tied parameters


def resolve_ties(
    module: nn.Module, plan: Plan, ranks: int, is_read: Callable[[str], bool], computes: Callable[[str], bool]
) -> None:
    """Make modules that share parameters agree: shard an embedding and its head by vocabulary, replicate the rest.

    A module that only keeps a reference to a parameter of another module, without computing with it, is ignored.

    Args:
        module: The model.
        plan: Changed in place.
        ranks: Size of the tensor-parallel group.
        is_read: Whether code outside the module at a path computes with its weights.
        computes: Whether the module at a path itself computes with the parameters that it registers.
    """
    modules = dict(module.named_modules())
    groups = _tied_groups(modules, computes)
    # A group that becomes replicated takes the layers of its region with it, and these may be tied themselves.
    while any(_resolve_group({path: modules[path] for path in paths}, plan, ranks, is_read) for paths in groups):
        pass


def _resolve_group(tied: Mapping[str, nn.Module], plan: Plan, ranks: int, is_read: Callable[[str], bool]) -> bool:
    """Settle one group of modules that share parameters; return whether the plan had to change."""
    if not any(path in plan.styles for path in tied):
        return False
    # Code that reads a weight directly expects the full weight.
    if any(map(is_read, tied)):
        _leave_whole(plan, tied, "replicated: other code reads its weight, or the weight of a module that shares it")
        return True
    if _divided_alike(plan.styles, tied, ranks):
        return False
    # Embedding and head use the same rows of one table, so both can be sharded by these rows.
    by_vocabulary: dict[str, Style] = {}
    if all(is_native(owner, nn.Embedding) or is_linear(owner) for owner in tied.values()):
        by_vocabulary = {path: Vocab() if is_native(owner, nn.Embedding) else Head() for path, owner in tied.items()}
    _leave_whole(plan, tied, "replicated: shares a parameter with a module that is sharded in another way")
    if by_vocabulary and _divided_alike(by_vocabulary, tied, ranks):
        plan.styles |= by_vocabulary
        for path in tied:
            plan.notes.pop(path, None)
    return True


def _divided_alike(styles: Mapping[str, Style], tied: Mapping[str, nn.Module], ranks: int) -> bool:
    """Return whether the modules shard each parameter that they share by the same rule."""
    rules: dict[int, set[Shard | None]] = {}
    for path, owner in tied.items():
        known = _rules(styles.get(path), owner, ranks)
        for name, parameter in owner.named_parameters(recurse=False):
            rules.setdefault(id(parameter), set()).add(known.get(name))
    return all(len(different) == 1 for different in rules.values())


def _rules(style: Style | None, module: nn.Module, ranks: int) -> dict[str, Shard]:
    try:
        return style.rules(module, ranks) if style is not None else {}
    except (TypeError, ValueError):
        return {}  # a style that does not apply shards nothing; `apply_plan` reports it


def _leave_whole(plan: Plan, paths: Iterable[str], note: str) -> None:
    """Remove the modules from the plan, and the layers that exchange sharded features with them."""
    for path in paths:
        style = plan.styles.pop(path, None)
        # A replicated column layer gives all features to a row layer that expects this rank's. So the full region must
        # be replicated, and an attention in it gets all its heads back.
        if _is_paired(style):
            around = region_around(plan, path, Row if isinstance(style, Column) else Column)
            for other in [other for other in plan.styles if other.startswith(around)]:
                if _is_paired(plan.styles[other]):
                    del plan.styles[other]
                    plan.notes[other] = f"replicated: it would be sharded together with `{path}`, which is replicated"
            for owner in [owner for owner in plan.attributes if f"{owner}.".startswith(around)]:
                del plan.attributes[owner]
        plan.notes[path] = note


def _is_paired(style: Style | None) -> bool:
    """Return whether the input or output of the layer is sharded, so that it forms a pair with another layer."""
    return (isinstance(style, Column) and not style.gather_output) or (isinstance(style, Row) and not style.split_input)


def region_around(plan: Plan, path: str, partner: type) -> str:
    """Return the prefix of the paths in the smallest module around `path` that also holds its partner."""
    around = path
    while around:
        around = around.rpartition(".")[0]
        start = f"{around}." if around else ""
        inside = [style for other, style in plan.styles.items() if other.startswith(start)]
        if any(isinstance(style, partner) and _is_paired(style) for style in inside):
            return start
    return ""


def divided_regions(plan: Plan) -> list[str]:
    """Return the paths of the smallest modules around sharded layers; inside them ranks compute with parts."""
    found = list(plan.attributes)
    for path, style in plan.styles.items():
        if _is_paired(style):
            found.append(region_around(plan, path, Row if isinstance(style, Column) else Column).rstrip("."))
        elif not isinstance(style, Replicate):
            found.append(path)
    return list(dict.fromkeys(found))


def _tied_groups(modules: Mapping[str, nn.Module], computes: Callable[[str], bool]) -> list[list[str]]:
    """Return groups of paths of modules that share parameters, directly or through a third module."""
    groups: list[tuple[set[int], list[str]]] = []
    for path, owner in modules.items():
        parameters = {id(parameter) for parameter in owner.parameters(recurse=False)}
        is_plain = is_linear(owner) or is_native(owner, nn.Embedding)
        if not parameters or not (is_plain or computes(path)):
            continue
        # A module may share parameters with several groups, which then become one.
        joined = [group for group in groups if group[0] & parameters]
        paths: list[str] = []
        for others, other_paths in joined:
            parameters |= others
            paths += other_paths
        groups = [group for group in groups if group not in joined]
        groups.append((parameters, [*paths, path]))
    return [paths for _, paths in groups if len(paths) > 1]


# -------------------------------------------------------------------------------------------------------------- apply


def apply_plan(module: nn.Module, plan: Plan, group: Group) -> Sharding:
    """Shard `module` in place, after checking that all of `plan` is possible and equal on every rank.

    A module on the meta device stays there and gets shards without data: see `materialize_shards`.

    Raises:
        ValueError: On every rank, if the plan does not fit, or the ranks disagree on it or on the model's shapes.
    """
    modules = dict(module.named_modules())
    problems = _problems(modules, plan.styles, group.size)
    if problems:
        raise ValueError(
            "The model must fit the tensor-parallel plan; got these problems:\n"
            + "\n".join(f"  {line}" for line in problems)
        )
    shapes = {name: tuple(full_shape(parameter)) for name, parameter in module.named_parameters()}
    # Ranks that shard differently would hang in a collective of the first step.
    comm.agree("the tensor-parallel plan", sorted((path, repr(style)) for path, style in plan.styles.items()), group)
    comm.agree("the shapes of the model's parameters", shapes, group)
    # Styles describe full modules, so read the rules before the first module is changed.
    shards, partial = _rules_by_name(module, modules, plan, group.size)
    for path, style in plan.styles.items():
        style.apply(modules[path], group)
    full_attributes: dict[str, dict[str, Any]] = {}
    for path, values in plan.attributes.items():
        full_attributes[path] = set_local_values(modules[path], values)
    for name, parameter in module.named_parameters():
        if name in shards:
            parameter.sharded_as = name  # type: ignore[attr-defined]  # for messages
    # After all layers: a region is found by the sharded layers inside one module.
    connect_random_regions(module, group, plan.quiet)
    for region in plan.sequence_regions:
        divide_region(modules, region, group)
    if any(isinstance(owner, (nn.TransformerEncoder, nn.TransformerEncoderLayer)) for owner in modules.values()):
        guard_fast_path(module)
    return Sharding(shards, partial, plan, shapes, full_attributes)


def _rules_by_name(
    module: nn.Module, modules: Mapping[str, nn.Module], plan: Plan, ranks: int
) -> tuple[dict[str, Shard], frozenset[str]]:
    """Return the shard rules, and the parameters with partial gradients, by the names in `named_parameters()`."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    # A tied parameter has several names; checkpoints and optimizers use the first.
    canonical = {alias: names[id(parameter)] for alias, parameter in module.named_parameters(remove_duplicate=False)}
    shards: dict[str, Shard] = {}
    partial: set[str] = set()
    for path, style in plan.styles.items():
        prefix = f"{path}." if path else ""
        for name, rule in style.rules(modules[path], ranks).items():
            shards[canonical[prefix + name]] = rule
            if rule.replicated:  # shared heads: each holder has the gradient from the query heads on its rank
                partial.add(canonical[prefix + name])
        partial |= {canonical[prefix + name] for name in style.partial(modules[path])}
    return shards, frozenset(partial)


def materialize_shards(
    module: nn.Module,
    device: torch.device,
    sharding: Sharding,
    group: Group,
    *,
    wanted: Callable[[Tensor], bool] = lambda tensor: True,
    holds: Callable[[Tensor], bool] = lambda tensor: True,
    made: Callable[[nn.Parameter], object] = lambda parameter: None,
) -> None:
    """Allocate and initialise this rank's shards of a module that was sharded on the meta device.

    The shards get the same values as in one process with the same seed. The random generators end in the
    same state as in one process. At most the shards and the full tensors of one module are allocated: see
    `initialize_tensors`.

    Args:
        module: The sharded module.
        device: Where the shards are allocated; random numbers are drawn there too.
        sharding: The result of `apply_plan`.
        group: The tensor-parallel group; all its ranks must start from the same random state.
        wanted, made: See `initialize_tensors`.
        holds: Whether this rank, as a pipeline stage, holds any of a parameter or buffer; if not, it stays on meta.

    Raises:
        ValueError: If a module with tensors on the meta device has no initialiser.
    """

    def keep(tensor: Tensor, full: Tensor) -> Tensor | None:
        if not holds(tensor):
            return None
        rule: Shard | None = getattr(tensor, "shard_rule", None)
        return full if rule is None else rule.split(full, group.rank)

    patches = Patches()
    try:
        # An initialiser may read the number of heads; it fills full tensors, so it must see the full number.
        for path, values in sharding.full_attributes.items():
            for name, value in values.items():
                patches.replace(module.get_submodule(path), name, value)
        initialize_tensors(module, device, wanted=wanted, full_shape=full_shape, keep=keep, made=made)
    finally:
        patches.undo()
