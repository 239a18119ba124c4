"""What the code of a module does with parameters that a division would shrink under it.

Read from the methods that a step runs: `forward`, the steps of a LightningModule, and what these use of `self`. What
does not show there (a list of parameters, a weight handed to another function) shows in the graph of the first step:
see `audit.py`.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import ParamSpec, TypeVar

from torch import nn

__all__ = ["computes_with_parameters", "only_wraps", "read_elsewhere"]

STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
FOREIGN = ("torch.", "lightning.", "pytorch_lightning.", "builtins")
HARMLESS = {"dtype", "device", "requires_grad", "is_cuda"}  # a shard has them in common with the whole
P = ParamSpec("P")
R = TypeVar("R")
SIZES = ("weight", "bias", "in_features", "out_features", "num_embeddings")


def _remembered(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, called once for equal arguments; keeps its signature, which `cache` forgets."""
    return cache(function)  # type: ignore[return-value]


def computes_with_parameters(module: nn.Module) -> bool:
    """Whether `module` reads one of its own parameters; torch's own modules do, others when their code shows it."""
    if any(base.__module__.startswith("torch.") and "forward" in vars(base) for base in type(module).__mro__[:-2]):
        return True
    return any(_reads(method, name) for method in _methods(type(module)) for name in module._parameters)


@_remembered
def only_wraps(kind: type[nn.Module], inherited: type[nn.Module]) -> bool:
    """Whether the `forward` of `kind`, if it has one, leaves the computation to that of its base `inherited`."""
    bases = kind.__mro__[: kind.__mro__.index(inherited)]
    forwards = [_parsed(vars(base)["forward"]) for base in bases if "forward" in vars(base)]
    return all(
        method is not None
        and "super().forward(" in ast.unparse(method)
        and not any(_reads(method, name) for name in SIZES)
        for method in forwards
    )


def read_elsewhere(root: nn.Module, path: str) -> bool:
    """Whether the code of the modules around `path` reads the weight of the module there by itself."""
    parts = path.split(".")
    return any(
        pattern.fullmatch(".".join(parts[depth:]))
        for depth in range(len(parts))
        for pattern in _weights_read(type(root.get_submodule(".".join(parts[:depth]))))
    )


@_remembered
def _weights_read(kind: type) -> tuple[re.Pattern[str], ...]:
    """Paths of the modules inside one of class `kind` whose weights its methods read."""
    paths = {
        _path(node.value)
        for method in _methods(kind)
        for node in _attributes(method)
        if node.attr in ("weight", "bias") and not _is_self(node.value)
    }
    return tuple(map(re.compile, sorted(paths)))


def _reads(method: ast.AST, name: str) -> bool:
    return any(node.attr == name and _is_self(node.value) for node in _attributes(method))


def _attributes(method: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a method uses, other than for what a shard has in common with the whole tensor."""
    found = [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
    harmless = {id(node.value) for node in found if node.attr in HARMLESS}
    return (node for node in found if id(node) not in harmless)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _path(node: ast.expr) -> str:
    """A pattern for the path, from `self`, of the module that an expression stands for."""
    if isinstance(node, ast.Attribute):
        return node.attr if _is_self(node.value) else rf"{_path(node.value)}\.{node.attr}"
    if isinstance(node, ast.Subscript) and not _is_self(node.value):
        return rf"{_path(node.value)}\.[^.]+"
    return ".*"  # a local name may be any module inside


@_remembered
def _methods(kind: type) -> tuple[ast.AST, ...]:
    """The methods of a user's class that a step runs."""
    wanted, seen, found = list(STEPS), set(STEPS), []
    while wanted:
        name = wanted.pop()
        for base in kind.__mro__:
            parsed = None if base.__module__.startswith(FOREIGN) else _parsed(vars(base).get(name))
            if parsed is None:
                continue
            found.append(parsed)
            used = {node.attr for node in _attributes(parsed) if _is_self(node.value)} - seen
            seen |= used
            wanted += used
    return tuple(found)


def _parsed(method: object) -> ast.AST | None:
    """The syntax tree of a function or property; None for anything else, and for code without a file."""
    function = method.fget if isinstance(method, property) else method
    if not inspect.isroutine(function):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    itself = next(iter(inspect.signature(function).parameters), "self")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == itself:
            node.id = "self"  # whatever its author calls it
    return tree
