"""The results of a step, and the differences of two runs: loss, logged values, outputs, attributes, modules."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections import Counter, UserDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_parallel.compat import fields_of, is_users, is_users_object
from lightning_parallel.compat.torch import pytree
from lightning_parallel.pipeline.microbatch import LeftOutCache, is_numeric
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.strategies.steps.state import (
    Added,
    Elsewhere,
    Fresh,
    Members,
    Replaced,
    Snapshot,
    Value,
    is_plain,
    label_of,
)
from lightning_parallel.tensor.context import Positions
from lightning_parallel.tensor.pieces import Piece

__all__ = [
    "HALF",
    "StepDifference",
    "ModuleTrace",
    "ObservedStep",
    "changed_attributes",
    "comparable_attributes",
    "compare",
    "compare_counters",
    "compare_gradients",
    "counters_of",
    "flags_of",
    "first_difference",
    "largest_of",
    "numbers_in",
    "relative_difference",
    "tolerance_of",
]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The largest difference relative to the largest value, by the precision of the step."""
HALF = 5e-2
"""The largest difference in less precise steps."""
_MIXED = 1e-5
"""The largest difference in double precision with single precision inside, as in norms of transformers."""

_PIECE = 1 << 22
"""Elements of a large tensor that are compared at a time."""


def tolerance_of(precisions: set[torch.dtype]) -> float:
    """Return the largest relative difference that rounding explains in a step that computes in `precisions`."""
    found = {kind for kind in precisions if kind.is_floating_point}
    if found - _TOLERANCES.keys():
        return HALF
    if found == {torch.float64}:
        return _TOLERANCES[torch.float64]
    return _MIXED if torch.float64 in found else _TOLERANCES[torch.float32]


@dataclass
class ObservedStep:
    """The results of one run of a step.

    Attributes:
        loss: The loss; None if the step returned none, and in evaluation.
        logged: Name and value of each call of `self.log`.
        output: Numbers and tensors in the output, by key.
        attributes: The attributes of the module that changed.
        unknown: Attributes whose value is on another stage; a read of such an attribute raises.
        counters: The numbers that changed in the user's submodules.
        flags: Attributes that were true or false before.
        left_by_backward: The name of a value, other than gradients, that the backward pass has changed.
        left_in_callback: The name of a value that the step has changed in a callback, as by a forward hook.
        part_in_loss: An error message if the loss depends on this rank's part of an activation.
    """

    loss: float | None = None
    logged: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()
    counters: dict[str, int | float] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    left_by_backward: str = ""
    left_in_callback: str = ""
    part_in_loss: str = ""


def numbers_in(value: Any, name: str) -> dict[str, Any]:
    """Return the tensors, numbers and texts in `value`, by key, detached and on the CPU."""
    found: dict[str, Any] = {}
    leaves, _ = pytree.tree_flatten_with_path(value)
    for path, leaf in leaves:
        key = name + pytree.keystr(path)
        if _is_unknown(leaf) or isinstance(leaf, LeftOutCache):
            continue
        if isinstance(leaf, Tensor):
            # A clone: the rest of the run, and its undoing, may write into the tensor.
            found[key] = leaf.detach().cpu().clone()
        elif isinstance(leaf, np.ndarray) and not is_numeric(leaf):
            found.update(numbers_in(leaf.tolist(), key))
        elif isinstance(leaf, np.ndarray):
            found[key] = torch.as_tensor(leaf).clone()
        elif isinstance(leaf, (Mapping, UserDict)):
            found.update(numbers_in(dict(leaf), key))
        elif isinstance(leaf, (list, tuple, deque, array)):
            found.update(numbers_in(list(leaf), key))
        elif isinstance(leaf, (set, frozenset)):
            # The order of a set differs between processes, and the entries are compared by position.
            found.update(numbers_in(sorted(leaf, key=lambda member: (str(type(member)), str(member))), key))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
            found.update(numbers_in({name: getattr(leaf, name) for name in fields}, key))
        elif is_users_object(leaf):
            found.update(numbers_in(fields_of(leaf), key))
        elif isinstance(leaf, (bool, int, float)):
            found[key] = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
        elif isinstance(leaf, (bytes, bytearray)) or (leaf is not None and is_plain(leaf)):
            text = leaf if isinstance(leaf, (bytes, bytearray)) else str(leaf).encode(errors="replace")
            found[key] = torch.tensor(list(text), dtype=torch.uint8)
    return found


def changed_attributes(before: Snapshot) -> tuple[dict[str, Any], frozenset[str]]:
    """Return new and changed numbers and tensors, and the names of values that this rank does not know.

    For lists and sets, returns the added entries.
    """
    changed: dict[str, Any] = {}
    unknown: set[str] = set()
    for path, edit in before.changes().items():
        label, value = label_of(path), None
        if isinstance(edit, Value):
            value = None if _is_same(edit.before, edit.after) else edit.after
        elif isinstance(edit, Added):
            value = edit.entries
        elif isinstance(edit, Members) or (isinstance(edit, Fresh) and edit.added is not None):
            value = edit.added
        elif isinstance(edit, Fresh) and edit.is_grown:
            value = {key: entry for key, entry in edit.value.items() if key not in edit.kept}
        elif isinstance(edit, (Fresh, Replaced)):
            value = edit.value
        leaves, _ = pytree.tree_flatten_with_path(value)
        unknown |= {label + pytree.keystr(where) for where, leaf in leaves if _is_unknown(leaf)}
        changed.update(numbers_in(value, label))
    return changed, frozenset(unknown)


def flags_of(snapshot: Snapshot) -> dict[str, bool]:
    """Return the attributes that are true or false, by name."""
    values = {label_of(path): snapshot.original(path) for path in snapshot.paths()}
    return {label: value for label, value in values.items() if isinstance(value, bool)}


def comparable_attributes(found: ObservedStep, expected: ObservedStep) -> dict[str, Any]:
    """Return the attributes that the expected run changed, without attributes that cannot be compared."""
    return {
        name: value
        for name, value in expected.attributes.items()
        # A first call sets flags, such as "hooks are registered". The analysis made the first call, and its hooks stay.
        if name not in found.unknown
        and not (isinstance(value, Tensor) and value.dtype == torch.bool and found.flags.get(name) is bool(value.all()))
    }


def counters_of(module: nn.Module) -> dict[str, int | float]:
    """Return the numbers in attributes of the user's submodules of `module`, by name."""
    return {
        f"{path}.{name}": value
        for path, child in module.named_modules()
        if path and is_users(type(child))
        for name, value in vars(child).items()
        if type(value) in (int, float)
    }


def compare_counters(found: ObservedStep, expected: ObservedStep, module: nn.Module) -> dict[str, float]:
    """Return the relative differences of the numbers in submodules of `module`, which have their old values again."""
    names = {*expected.counters, *found.counters}
    now = {name: float(value) for name, value in counters_of(module).items() if name in names}
    pairs = {name: (found.counters.get(name, old), expected.counters.get(name, old)) for name, old in now.items()}
    return {name: abs(one - two) / max(abs(two), 1e-2) for name, (one, two) in pairs.items()}


def _is_unknown(leaf: Any) -> bool:
    return isinstance(leaf, (PlaceholderTensor, Elsewhere))


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor) and not (_is_unknown(new) or _is_unknown(old)):
        return old.shape == new.shape and torch.equal(old, new)
    return type(old) is type(new) and isinstance(old, (bool, int, float, str)) and old == new


# --------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class StepDifference:
    """A value of the parallel step that differs from a single-process run.

    Attributes:
        kind: `loss`, `gradient`, `logged value`, `output`, `attribute` or `buffer`.
        name: The name of the value.
        relative: Largest difference, relative to the largest expected value; infinite for another shape.
        detail: Both values in words, if they are short.
    """

    kind: str
    name: str
    relative: float
    detail: str = ""

    def __str__(self) -> str:
        by = (
            "has another shape" if math.isinf(self.relative) else f"differs by {self.relative:.2g} of its largest value"
        )
        what = self.kind if self.kind == "loss" else f"{self.kind} `{self.name}`"
        return f"{what} {self.detail or by}"


def relative_difference(found: Tensor, expected: Tensor, floor: float) -> float:
    """Return the largest difference, relative to the largest expected value or `floor`."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    if not (found.is_floating_point() or found.is_complex()):
        # Integers and flags have no small errors: the result is the share of entries that differ.
        return float((found != expected.to(found.dtype)).double().mean())
    if found.dtype == expected.dtype:
        # The fast path makes few passes over large gradients. Values that are not finite take the slow path below.
        expected = expected.detach().to(found.device)
        # Compare in pieces: memory may have no room for another tensor of the largest size.
        pieces = zip(found.detach().reshape(-1).split(_PIECE), expected.reshape(-1).split(_PIECE))
        distances, scale = [largest_of(one - two) for one, two in pieces], largest_of(expected)
        if all(map(math.isfinite, (*distances, scale))):
            return max(distances) / max(scale, floor, 1e-30)
    kind = torch.complex128 if found.is_complex() else torch.float64
    one, two = found.detach().to(kind), expected.detach().to(found.device, kind)
    same = (one == two) | (one.isnan() & two.isnan())
    if bool(same.all()):
        return 0.0
    difference = torch.where(same, torch.zeros_like(one), one - two).abs().max()
    scale = max(float(two.abs().nan_to_num().max()), floor, 1e-30)
    return math.inf if difference.isnan() else float(difference) / scale


def largest_of(value: Tensor) -> float:
    """Return the largest absolute value; NaN if one value is NaN, 0 without values."""
    if not value.numel():
        return 0.0
    if value.is_complex():
        return float(value.detach().abs().max())
    # `aminmax` makes one fast pass; `vector_norm` takes seven times as long on a CPU.
    least, greatest = torch.aminmax(value.detach())
    return max(-float(least), float(greatest))


def compare(kind: str, found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> list[StepDifference]:
    """Compare small values by name."""
    differences = []
    for name, value in expected.items():
        if name not in found:
            differences.append(StepDifference(kind, name, math.inf, _in_one_run(kind, name, value, True)))
            continue
        mine = found[name]
        value, mine = _as_tensor(value), _as_tensor(mine)
        is_exact = not (value.is_floating_point() or value.is_complex())
        if is_exact != (not (mine.is_floating_point() or mine.is_complex())):
            # A mean over microbatches may be a float where one process has a count.
            value, mine, is_exact = value.double(), mine.double(), False
        relative = relative_difference(mine, value, 1e-2)
        # In half precision even an integer may differ, such as the position of a maximum.
        if relative > (0.0 if is_exact and tolerance < HALF else tolerance):
            short = value.numel() == 1 and mine.numel() == 1
            detail = _two_numbers(mine.item(), value.item()) if short else ""
            if mine.shape != value.shape:
                detail = f"has shape {tuple(mine.shape)}, but {tuple(value.shape)} on one process"
            differences.append(StepDifference(kind, name, relative, detail))
    differences += [
        StepDifference(kind, name, math.inf, _in_one_run(kind, name, value, False))
        for name, value in found.items()
        if name not in expected
    ]
    return differences


def _in_one_run(kind: str, name: str, value: Any, is_on_one_process: bool) -> str:
    """Say that one of both runs alone has made or changed a value."""
    if kind != "attribute" or name.endswith("]"):
        return "is missing" if is_on_one_process else "is not there on one process"
    value = _as_tensor(value)
    new = f"{value.item():.6g}" if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if is_on_one_process:
        return f"keeps its value, but becomes {new} on one process"
    return f"becomes {new}, but keeps its value on one process"


def _as_tensor(value: Any) -> Tensor:
    # Convert Python floats to double precision: the default dtype would round them before the comparison.
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=_DOUBLE.get(type(value)))


_DOUBLE = {float: torch.float64}


def _two_numbers(found: float, expected: float) -> str:
    """Return two numbers in words, with enough digits to show that they differ."""
    one, two = f"{found:.6g}", f"{expected:.6g}"
    for digits in range(7, 18):
        if one != two:
            break
        one, two = f"{found:.{digits}g}", f"{expected:.{digits}g}"
    return f"is {one}, but {two} on one process"


def compare_gradients(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor], floor: float, tolerance: float
) -> list[StepDifference]:
    """Compare gradients by name; a missing gradient equals a gradient of zeros."""
    differences = []
    for name, mine in found.items():
        theirs = expected.get(name)
        if mine is None and theirs is None:
            continue
        one = torch.zeros_like(theirs) if mine is None else mine  # type: ignore[arg-type]
        one = one.to_dense() if one.is_sparse else one
        two = torch.zeros_like(one) if theirs is None else theirs.to(one.device)
        relative = relative_difference(one, two, floor)
        if relative > tolerance:
            differences.append(StepDifference("gradient", name, relative))
    return differences


# ----------------------------------------------------------------------------------------------------- modules


_Sketch = tuple[tuple[int, ...], tuple[float, ...]]
"""Shape of a tensor, and three means over its elements, which distinguish most tensors."""


class ModuleTrace:
    """Records a sketch of the output of each module, and of the output's gradient, for calls inside a block.

    Args:
        module: The module whose submodules are traced.
        left_out: The `id` of modules that do not compute their outputs on this rank, such as modules of other stages.

    Attributes:
        outputs, gradients: By the path of the module and the number of its call, in the order of the forward pass.
    """

    def __init__(self, module: nn.Module, left_out: Collection[int] = ()) -> None:
        self.outputs: dict[tuple[str, int], _Sketch] = {}
        self.gradients: dict[tuple[str, int], _Sketch] = {}
        self._paths = {id(child): path for path, child in module.named_modules() if path and id(child) not in left_out}
        self._calls: Counter[str] = Counter()

    def __reduce__(self) -> Any:
        # Send the records to another rank without the module.
        return _trace, (self.outputs, self.gradients)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside the block."""
        handle = register_module_forward_hook(self._record)
        try:
            yield
        finally:
            handle.remove()

    def _record(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self._paths.get(id(module))
        tensor = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None)
        is_plain = tensor is not None and not isinstance(tensor, PlaceholderTensor) and tensor.is_floating_point()
        if path is None or tensor is None or not is_plain:
            return
        key = (path, self._calls[path])
        self._calls[path] += 1
        self.outputs[key] = _sketch(tensor)
        # The gradient of split positions is partial, and later modules have computed with the parts.
        is_split = isinstance(tensor, Piece) and isinstance(tensor.family, Positions)
        if tensor.requires_grad and not is_split:
            tensor.register_hook(partial(self._record_gradient, key))

    def _record_gradient(self, key: tuple[str, int], gradient: Tensor | None) -> None:
        if gradient is not None:  # an output of which code uses only a detached copy gets no gradient
            self.gradients[key] = _sketch(gradient)


def _trace(outputs: dict[tuple[str, int], _Sketch], gradients: dict[tuple[str, int], _Sketch]) -> ModuleTrace:
    trace = ModuleTrace(nn.Module())
    trace.outputs = outputs
    trace.gradients = gradients
    return trace


@torch.no_grad()
def _sketch(tensor: Tensor) -> _Sketch:
    flat = tensor.detach().double().reshape(-1).cpu()
    # The mean of products with a wave depends on the order of the elements, so it finds permuted elements.
    wave = torch.cos(torch.arange(len(flat), dtype=torch.float64))
    sums = [flat.mean(), flat.abs().mean(), (flat * wave).mean()] if len(flat) else []
    return tuple(tensor.shape), tuple(float(value) for value in sums)


def first_difference(
    expected: ModuleTrace, found: Sequence[ModuleTrace], tolerance: float
) -> tuple[tuple[str, int], str]:
    """Find the first call whose output differs, in the order of the forward pass; else the last wrong gradient.

    Backward begins with the last module, so its gradient is the first to be wrong. Outputs of another shape are shards
    of the full output, and are skipped.

    Args:
        expected: The trace of the step on the full model.
        found: The trace of the parallel step, for each rank.
        tolerance: Largest relative difference.

    Returns:
        The path of the module with the number of its call, and a text about the difference; empty without a difference.
    """
    counts = Counter(path for path, _ in expected.outputs)

    def named(key: tuple[str, int]) -> str:
        path, number = key
        return f"`{path}`" + (f" (call {number + 1} of {counts[path]})" if counts[path] > 1 else "")

    for key, output in expected.outputs.items():
        distance = max((_distance(output, trace.outputs.get(key)) for trace in found), default=0.0)
        if distance > tolerance:
            return key, f"{named(key)}, whose output differs by {distance:.2g}"
    for key in reversed(expected.outputs):
        gradient = expected.gradients.get(key)
        distance = max((_distance(gradient, trace.gradients.get(key)) for trace in found), default=0.0)
        if distance > tolerance:
            return key, f"{named(key)}, whose output gets a gradient that differs by {distance:.2g}"
    return ("", 0), ""


def _distance(one: _Sketch | None, two: _Sketch | None) -> float:
    if one is None or two is None or one[0] != two[0]:
        return 0.0
    scale = max((abs(value) for value in one[1]), default=0.0)
    distance = max((abs(a - b) for a, b in zip(one[1], two[1])), default=0.0)
    return distance / scale if scale else distance
