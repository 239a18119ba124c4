"""Facts about a module that decide how it can be sharded: the kind of a layer, and which blocks are alike.

Layers    `is_linear`, `is_native`: does the module compute with an ordinary weight, by the `forward` of its kind?
Code      `forward`, and the methods that it uses, show which attributes a block reads. Code that reads the weight of a
          layer shows in the record: see `block_calls.BlockCalls`.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import CellType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_parallel.compat import PartialModule
from lightning_parallel.compat.torch import PARAMETERS, forward_hooks_of, parameters_of
from lightning_parallel.tensor.sharding import Shard

__all__ = [
    "describe",
    "full_shape",
    "is_linear",
    "is_native",
    "is_transposed",
    "numbers_a_layer",
    "only_wraps",
    "has_hooks_inside",
    "sizes_of",
    "structure_of",
    "why_no_linear",
]

# ------------------------------------------------------------------------------------------------------------- layers


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is an affine map with an ordinary weight: `nn.Linear`, or transformers' `Conv1D`."""
    return is_native(module, nn.Linear) or is_transposed(module) or _computes_linear(module)


def is_native(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether `module` computes with an ordinary floating-point weight by the `forward` of `kind`."""
    own = parameters_of(module)
    weight = own.get("weight")
    # A lazy module has no sizes before its first batch; quantised weights are not floating-point.
    ordinary = weight is not None and not is_lazy(weight) and weight.is_floating_point()
    # A pruned bias is a plain tensor, computed from a parameter of another name.
    ordinary = ordinary and ("bias" in own or not isinstance(getattr(module, "bias", None), Tensor))
    return isinstance(module, kind) and ordinary and _has_class_forward(module) and only_wraps(type(module), kind)


def _computes_linear(module: nn.Module) -> bool:
    """Return whether a subclass of `nn.Linear` with its own `forward` still computes `x @ weight.T + bias`."""
    own = {name for name, value in parameters_of(module).items() if value is not None}
    if not isinstance(module, nn.Linear) or isinstance(module, PartialModule):
        return False
    if own - {"weight", "bias"} or any(True for _ in module.buffers()):
        return False
    weight = parameters_of(module).get("weight")
    plain = weight is not None and not is_lazy(weight) and weight.is_floating_point() and not [*module.children()]
    if not plain or not _has_class_forward(module) or type(module).forward is nn.Linear.forward:
        return False
    # Without the sizes, so that all layers with equal settings share one trial.
    settings = tuple(item for item in _settings(module) if item[0] not in _SIZES_OF_LINEAR)  # type: ignore[index]
    return _tried_as_linear(type(module), module, settings)


_SIZES_OF_LINEAR = {"in_features", "out_features", "training", PARAMETERS}
_TRIED: dict[object, bool] = {}


def _tried_as_linear(kind: type[nn.Module], module: nn.Linear, settings: tuple[object, ...]) -> bool:
    """Run a copy with a few features, once for each kind; in training and in evaluation, with gradients."""
    key = (kind, settings)
    if key not in _TRIED:
        agrees = []
        # Only the generator of the CPU, on which the trial runs.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for bias, training in ((True, True), (False, False)):
                try:
                    agrees.append(_agrees_with_linear(module, bias, training))
                except Exception:  # any error of the user's code
                    agrees.append(False)
        _TRIED[key] = all(agrees)
    return _TRIED[key]


def _agrees_with_linear(module: nn.Linear, bias: bool, training: bool) -> bool:
    found = copy.copy(module)
    plain = nn.Linear(5, 4, bias, dtype=torch.float64)
    # `copy.copy` shares the parameter dict with the original, so a new dict replaces it.
    vars(found).update({"in_features": 5, "out_features": 4, "training": training, PARAMETERS: parameters_of(plain)})
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for layer in (plain, found):
        y = type(layer).forward(layer, x)
        inputs = [x, *filter(lambda p: p is not None, parameters_of(layer).values())]
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])  # type: ignore[arg-type]
    return all(map(torch.allclose, *results)) and results[0][0].dtype == results[1][0].dtype


def is_transposed(module: nn.Module) -> bool:
    """Return whether `module` is transformers' `Conv1D`: a linear layer whose weight is (in, out).

    It is recognised by its class name, because transformers may not be installed.
    """
    weight = parameters_of(module).get("weight")
    named = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    return (
        named
        and _has_class_forward(module)
        and weight is not None
        and weight.dim() == 2
        and full_shape(weight)[1] == getattr(module, "nf", None)
    )


def _has_class_forward(module: nn.Module) -> bool:
    """Return False if the instance has its own `forward`: the class's `forward` then says nothing."""
    return "forward" not in vars(module)


def full_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of the full `parameter`, sharded or not."""
    rule: Shard | None = getattr(parameter, "shard_rule", None)
    return parameter.shape if rule is None else rule.full_shape(parameter.shape)


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Return the (in, out) features of a linear layer; of the shard, if it is sharded."""
    first, second = parameters_of(module)["weight"].shape  # type: ignore[union-attr]
    return (first, second) if is_transposed(module) else (second, first)


def why_no_linear(module: nn.Module) -> str | None:
    """Return in a few words why `module`, which looks like a linear layer or an embedding, is not sharded as such."""
    own = parameters_of(module)
    weight = own.get("weight")
    parametrized = is_parametrized(module) or {"weight_g", "weight_v"} <= own.keys() or "weight_orig" in own
    named = any(word in kind.__name__.lower() for kind in type(module).__mro__[:-2] for word in ("linear", "embedding"))
    if parametrized:
        return "its weight is computed from other parameters in each step (a parametrization, weight or spectral norm)"
    if not named or (weight is None and not own):
        return None
    if weight is not None and not is_lazy(weight) and not weight.is_floating_point():
        return "its weight is quantised"
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        return f"its class is {describe(module)}, not a class of torch"
    return f"{describe(module)} has its own `forward` or parameters"


def describe(module: nn.Module) -> str:
    """Return the class of `module`, for messages."""
    kind = type(module)
    return f"`{kind.__module__}.{kind.__qualname__}`"


# --------------------------------------------------------------------------------------------------------------- code

# Only the user's code is read; the classes of these packages are skipped.
LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "lightning_fabric.", "builtins")
HARMLESS = {"dtype", "device", "requires_grad", "is_cuda"}  # equal for a shard and the full tensor
SIZES = ("weight", "bias", "in_features", "out_features", "num_embeddings")

P = ParamSpec("P")
R = TypeVar("R")


def _cached(function: Callable[P, R]) -> Callable[P, R]:
    """Apply `functools.cache`, keeping the signature: a class is no `Hashable` for the type checker."""
    return cache(function)  # type: ignore[return-value]


@_cached
def only_wraps(kind: type[nn.Module], inherited: type[nn.Module]) -> bool:
    """Return whether the `forward` of `kind`, if it has one, leaves the computation to its base `inherited`."""
    # A forward that calls the inherited one and reads no sizes still works after `convert` replaces the latter.
    bases = kind.__mro__[: kind.__mro__.index(inherited)]
    forwards = [_parsed(vars(base)["forward"]) for base in bases if "forward" in vars(base)]
    return all(
        method is not None
        and "super().forward(" in ast.unparse(method)
        and not any(_reads(method, name) for name in SIZES)
        for method in forwards
    )


@_cached
def _computes_with(kind: type[nn.Module], name: str) -> bool:
    """Return whether the code of a class may compute with the attribute `name`, its position; True without source.

    A layer that only finds its entry in the cache of generation does not compute with its position. Otherwise the
    layers of a large language model would all differ, and each of them would be tried.
    """
    bases = [base for base in kind.__mro__ if not base.__module__.startswith(LIBRARIES)]
    hidden = any("forward" in vars(base) and _parsed(vars(base)["forward"]) is None for base in bases)
    return hidden or any(_reads(method, name) and not _only_for_cache(method, name) for method in _methods(kind))


def _only_for_cache(method: ast.AST, name: str) -> bool:
    """Return whether `self.name` is only an argument or an index of an object with a cache's name."""
    of_cache = set()
    for node in ast.walk(method):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call) and _CACHE.search(ast.unparse(node.func)):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Subscript) and _CACHE.search(ast.unparse(node.value)):
            given = [node.slice]
        of_cache |= {id(part) for part in given}
    reads = [node for node in _attributes(method) if node.attr == name and _is_self(node.value)]
    return all(id(node) in of_cache for node in reads)


_CACHE = re.compile("cache|past")


def numbers_a_layer(kind: type[nn.Module], name: str) -> bool:
    """Return whether the attribute `name` is the position of a layer: by its name, or as the key of a cache."""
    return name in POSITIONS or _is_cache_key(kind, name)


@_cached
def _is_cache_key(kind: type[nn.Module], name: str) -> bool:
    methods = [method for method in _methods(kind) if _reads(method, name)]
    return bool(methods) and all(_only_for_cache(method, name) for method in methods)


def has_hooks_inside(module: nn.Module) -> bool:
    """Return whether hooks run around a forward inside `module`: after sharding they would get pieces."""
    return any(path and any(forward_hooks_of(child)) for path, child in module.named_modules())


def _reads(method: ast.AST, name: str) -> bool:
    return any(node.attr == name and _is_self(node.value) for node in _attributes(method))


def _attributes(method: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a method uses, unless it only reads a harmless property of them."""
    found = [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
    harmless = {id(node.value) for node in found if node.attr in HARMLESS}
    # The class of a shard is the class of the full tensor.
    tests = [node for node in ast.walk(method) if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"]
    harmless |= {id(part) for test in tests for part in test.args}
    return (node for node in found if id(node) not in harmless)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@_cached
def _methods(kind: type) -> tuple[ast.AST, ...]:
    """Return the syntax trees of the `forward` of a user's class, and of the methods that it uses."""
    wanted = ["forward"]
    seen = {*wanted}
    found = []
    while wanted:
        name = wanted.pop()
        # Every class of the hierarchy, because an overridden method may call the inherited one.
        for base in kind.__mro__:
            parsed = None if base.__module__.startswith(LIBRARIES) else _parsed(vars(base).get(name))
            if parsed is None:
                continue
            found.append(parsed)
            used = {node.attr for node in _attributes(parsed) if _is_self(node.value)} - seen
            seen |= used
            wanted += used
    return tuple(found)


def _parsed(method: object) -> ast.AST | None:
    """Return the syntax tree of a function or property; None for anything else, and for code without a file."""
    function = method.fget if isinstance(method, property) else method
    if not inspect.isroutine(function):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    first = next(iter(inspect.signature(function).parameters), "self")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == first:
            node.id = "self"  # the author may have given the instance any name
    return tree


# ---------------------------------------------------------------------------------------------------------- structure


def structure_of(block: nn.Module) -> tuple[object, ...]:
    """Return a key that is equal for blocks which compute the same function of their parameters."""
    parameters = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    return (parameters, tuple((type(child), _settings(child)) for child in block.modules()))


# Attributes that number the layers of a model; most models do not compute with them.
POSITIONS = {"layer_idx", "layer_id", "layer_number", "index", "idx"}
MOST_NESTED = 4


def _settings(module: nn.Module) -> tuple[object, ...]:
    """Return the attributes on which the behaviour of a module may depend, in addition to its class."""
    settings: list[object] = []
    # Sorted: equal modules may set their attributes in another order.
    for name, value in sorted(vars(module).items()):
        if name in POSITIONS and not _computes_with(type(module), name):
            continue
        if "hooks" in name and isinstance(value, dict):
            value = list(value.values())  # the keys number all hooks of the process
        settings.append((name, _fingerprint(value)))
    return tuple(settings)


def _fingerprint(value: Any, depth: int = 0) -> object:
    """Return a key that is equal for values with which the same code computes the same; the `id` if nothing else helps.

    If two values have equal keys on one rank, they must have equal keys on all ranks. Ranks that try different blocks
    would wait for each other.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes, type, torch.dtype, torch.device)):
        return (type(value), value)
    if isinstance(value, (nn.Module, nn.Parameter)):
        return type(value)  # `structure_of` lists registered modules and parameters
    if depth == MOST_NESTED:
        return id(value)
    inner = partial(_fingerprint, depth=depth + 1)
    if isinstance(value, Tensor):
        known = value.is_meta or type(value) is not Tensor
        # By its numbers, because the `hash` of a tensor is its `id`.
        return (value.shape, value.dtype, None if known else hash(str(value.detach().cpu().flatten().tolist())))
    if isinstance(value, partial):
        return (partial, inner(value.func), inner(value.args), inner(value.keywords))
    if isinstance(value, dict):
        return (type(value), tuple((inner(key), inner(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(map(inner, value)))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(map(inner, value)))
    if inspect.isfunction(value):
        # Functions of the same code compute with their cells and defaults, so these belong to the key.
        # An empty cell raises an error when it is read.
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return (value.__code__, inner(cells), inner(value.__defaults__), inner(value.__kwdefaults__))
    return (type(value), id(value))
