"""Which module is divided how: patterns over module paths, checked as a whole, then applied.

A plan is a dict from module path to `Style`. It comes from the user (globs and style names), from the plan that many
Hugging Face models carry, and from the structure of the rest (`discovery.py`). Nothing is changed before the whole
plan is known to be possible.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeVar, Union

from torch import nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.tensor import heads
from lightning_parallel.tensor.attention import Attention, TransformerLayer, guard_fast_path
from lightning_parallel.tensor.conversion import full_shape, is_linear, is_native
from lightning_parallel.tensor.layers import Column, Replicate, Row, Style, Vocab
from lightning_parallel.tensor.rng import connect
from lightning_parallel.tensor.sequence import divide_sequence
from lightning_parallel.tensor.sharding import Shard
from lightning_parallel.tensor.source import computes_with_parameters, read_elsewhere

__all__ = ["STYLES", "Plan", "Sharding", "UserPlan", "apply_plan", "parse_plan", "resolve_ties", "style_named"]

UserPlan = Union[Literal["auto"], Mapping[str, Union[str, Style]]]
Edits = dict[str, dict[str, int]]
V = TypeVar("V")

# The styles by name; the second group are the names of Hugging Face's plans.
STYLES: dict[str, Style] = {
    "column": Column(),
    "column_gather": Column(gather_output=True),
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
    """How the modules of one model are divided.

    Attributes:
        styles: The style of each divided module, by path.
        edits: Attributes that have to change with it, such as the number of local heads: `{path: {name: value}}`.
        notes: Why a module is divided less well than it could be, or not at all, by path.
        stretches: Where activations are divided along the sequence: paths of the module around, of the first and of
            the last block.
    """

    styles: dict[str, Style] = field(default_factory=dict)
    edits: Edits = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    stretches: list[tuple[str, str, str]] = field(default_factory=list)

    def under(self, prefix: str) -> Plan:
        """The part of the plan inside the module at `prefix`, with paths relative to it."""
        start = f"{prefix}." if prefix else ""
        return Plan(_inside(self.styles, start), _inside(self.edits, start), _inside(self.notes, start))

    def add(self, prefix: str, other: Plan) -> None:
        """Take over `other`, whose paths are relative to `prefix`."""
        start = f"{prefix}." if prefix else ""
        self.styles |= {start + path: style for path, style in other.styles.items()}
        self.edits |= {(start + path).rstrip("."): edit for path, edit in other.edits.items()}
        self.notes |= {(start + path).rstrip("."): note for path, note in other.notes.items()}


def _inside(part: dict[str, V], start: str) -> dict[str, V]:
    return {path.removeprefix(start): value for path, value in part.items() if path.startswith(start)}


@dataclass(frozen=True)
class Sharding:
    """What became of a model: the facts that checkpoints, the clip norm and the table need.

    Attributes:
        shards: How parameters are divided, by full name; the others are whole on every rank.
        partial: Parameters whose gradients are partial: their pieces held by several ranks have to be summed.
        plan: The plan that was applied.
        full_shapes: Shape of every parameter before, by name.
    """

    shards: dict[str, Shard]
    partial: frozenset[str]
    plan: Plan
    full_shapes: dict[str, tuple[int, ...]]


def style_named(name: str) -> Style:
    """The style of that name.

    Raises:
        ValueError: If there is none, with the nearest names.
    """
    if name not in STYLES:
        raise ValueError(f"unknown style {name!r}{_nearest(name, STYLES)}; the styles are {', '.join(sorted(STYLES))}")
    return STYLES[name]


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def parse_plan(module: nn.Module, plan: Mapping[str, str | Style], group: Group) -> Plan:
    """Match a user's plan to the modules that own parameters.

    Args:
        module: The model.
        plan: Globs over module paths (`*` also crosses dots) to styles or their names; the last match wins.
        group: The tensor-parallel group.

    Raises:
        ValueError: With everything that is wrong: patterns that match nothing, unknown styles, modules to which a
            style does not apply.
    """
    modules = dict(module.named_modules())
    owners = [path for path, owner in modules.items() if any(True for _ in owner.parameters())]
    problems, styles = [], {}
    for pattern, wanted in plan.items():
        matched = [path for path in owners if fnmatchcase(path, pattern)]
        if not matched:
            problems.append(f"`{pattern}` matches no module that has parameters{_nearest(pattern, owners)}")
        try:
            style = style_named(wanted) if isinstance(wanted, str) else wanted
        except ValueError as error:
            problems.append(f"`{pattern}`: {error}")
            continue
        styles.update(dict.fromkeys(matched, style))
    found = Plan(styles)
    if not problems:
        heads.complete(module, found.styles, found.edits, group)
        problems = _problems(modules, found.styles, group.size)
    if problems:
        raise ValueError("the tensor-parallel plan cannot be used:\n" + "\n".join(f"  {line}" for line in problems))
    return found


def _problems(modules: Mapping[str, nn.Module], styles: Mapping[str, Style], ranks: int) -> list[str]:
    problems = []
    for path, style in styles.items():
        try:
            style.rules(modules[path], ranks)
        except (TypeError, ValueError) as error:
            problems.append(f"`{path}`: {error}")
    return problems


def resolve_ties(module: nn.Module, plan: Plan, ranks: int) -> None:
    """Make modules that share parameters agree: an embedding and its head are divided alike, others stay whole.

    A module that only keeps a parameter of another one, without computing with it, has no say.
    """
    modules = dict(module.named_modules())
    groups = _tied(modules)
    while any(_resolve(module, {path: modules[path] for path in paths}, plan, ranks) for paths in groups):
        pass


def _resolve(module: nn.Module, tied: Mapping[str, nn.Module], plan: Plan, ranks: int) -> bool:
    """Settle modules that share parameters; whether the plan had to change."""
    if not any(path in plan.styles for path in tied):
        return False
    if any(read_elsewhere(module, path) for path in tied):
        _leave_whole(plan, tied, "whole: other code reads its weight, or that of a module that shares it")
        return True
    if _agree(plan.styles, tied, ranks):
        return False
    alike: dict[str, Style] = {}
    if all(is_native(owner, nn.Embedding) or is_linear(owner) for owner in tied.values()):
        alike = {
            path: Vocab() if is_native(owner, nn.Embedding) else Column(gather_output=True)
            for path, owner in tied.items()
        }
    _leave_whole(plan, tied, "whole: shares a parameter with a module that is divided in another way")
    if alike and _agree(alike, tied, ranks):
        plan.styles |= alike
        for path in tied:
            plan.notes.pop(path, None)
    return True


def _agree(styles: Mapping[str, Style], tied: Mapping[str, nn.Module], ranks: int) -> bool:
    """Whether modules divide the parameters that they share alike."""
    rules: dict[int, set[Shard | None]] = {}
    for path, owner in tied.items():
        cut = _rules(styles.get(path), owner, ranks)
        for name, parameter in owner.named_parameters(recurse=False):
            rules.setdefault(id(parameter), set()).add(cut.get(name))
    return all(len(different) == 1 for different in rules.values())


def _leave_whole(plan: Plan, paths: Iterable[str], note: str) -> None:
    """Divide the modules no more, nor those that hand divided features to them or take them."""
    for path in paths:
        style = plan.styles.pop(path, None)
        if _is_half(style):
            around = _region(plan, path, Row if isinstance(style, Column) else Column)
            for other in [other for other in plan.styles if other.startswith(around)]:
                if _is_half(plan.styles[other]):
                    del plan.styles[other]
                    plan.notes[other] = f"whole: `{path}` is, with which it would be divided"
            for edited in [edited for edited in plan.edits if f"{edited}.".startswith(around)]:
                del plan.edits[edited]
        plan.notes[path] = note


def _is_half(style: Style | None) -> bool:
    """Whether a layer takes or gives divided features, so that another one belongs to it."""
    return (isinstance(style, Column) and not style.gather_output) or (isinstance(style, Row) and not style.split_input)


def _region(plan: Plan, path: str, partner: type) -> str:
    """Beginning of the paths of the smallest module around `path` that also holds its partner."""
    around = path
    while around:
        around = around.rpartition(".")[0]
        start = f"{around}." if around else ""
        if any(
            isinstance(style, partner) and _is_half(style) for p, style in plan.styles.items() if p.startswith(start)
        ):
            return start
    return ""


def _tied(modules: Mapping[str, nn.Module]) -> list[list[str]]:
    """Paths of modules that share parameters, directly or through a third one."""
    groups: list[tuple[set[int], list[str]]] = []
    for path, owner in modules.items():
        held = {id(parameter) for parameter in owner.parameters(recurse=False)}
        if not held or not (is_linear(owner) or is_native(owner, nn.Embedding) or computes_with_parameters(owner)):
            continue
        joined = [group for group in groups if group[0] & held]
        merged = (held.union(*(group[0] for group in joined)), [*(p for group in joined for p in group[1]), path])
        groups = [group for group in groups if group not in joined] + [merged]
    return [paths for _, paths in groups if len(paths) > 1]


def _rules(style: Style | None, module: nn.Module, ranks: int) -> dict[str, Shard]:
    try:
        return style.rules(module, ranks) if style is not None else {}
    except (TypeError, ValueError):
        return {}


def apply_plan(module: nn.Module, plan: Plan, group: Group) -> Sharding:
    """Divide `module` in place, after checking that all of `plan` is possible and the same on every rank.

    Raises:
        ValueError: On every rank, if the plan does not fit, or the ranks disagree on it or on the model's shapes.
    """
    modules = dict(module.named_modules())
    problems = _problems(modules, plan.styles, group.size)
    if problems:
        raise ValueError("the model cannot be divided:\n" + "\n".join(f"  {line}" for line in problems))
    shapes = {name: tuple(full_shape(parameter)) for name, parameter in module.named_parameters()}
    comm.agree("the tensor-parallel plan", sorted((path, repr(style)) for path, style in plan.styles.items()), group)
    comm.agree("the shapes of the model's parameters", shapes, group)
    shards: dict[str, Shard] = {}
    partial: set[str] = set()
    for path, style in plan.styles.items():
        prefix = f"{path}." if path else ""
        rules = style.rules(modules[path], group.size)
        shards |= {prefix + name: rule for name, rule in rules.items()}
        partial |= {prefix + name for name in style.partial(modules[path])}
        partial |= {prefix + name for name, rule in rules.items() if rule.replicated}
        style.apply(modules[path], group)
    for path, edit in plan.edits.items():
        for name, value in edit.items():
            setattr(modules[path], name, value)
    connect(module, group)
    for owner, first, last in plan.stretches:
        divide_sequence(modules[owner], modules[first], modules[last], group)
    if any(isinstance(owner, (nn.TransformerEncoder, nn.TransformerEncoderLayer)) for owner in modules.values()):
        guard_fast_path(module)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    known = {name: names[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}
    shards = {known[name]: rule for name, rule in shards.items()}
    return Sharding(shards, frozenset(known[name] for name in partial), plan, shapes)
