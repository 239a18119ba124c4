"""Placeholder tensors: a shape, a dtype and a device, without data.

On a stage that does not own the embedding, its stub returns a placeholder. Operations on placeholders return
placeholders, so the model's own code runs up to the first layer that the stage owns, without memory or arithmetic:

    ids (real) -> embed (stub) -> placeholder -> layer 0 (stub) -> placeholder -> layer 1 (owned) receives the data
    ids (real) -> positions, masks, rotary angles: computed from the batch, real on every stage

Once its data have been received, a placeholder has a `value`, which replaces it in every operation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_parallel.compat import Patches, innermost_users_line, module_that_asks, patched
from lightning_parallel.compat.torch import (
    DisableTorchFunctionSubclass,
    computes_on_parts,
    forbid_data_access,
    gathers_first,
    give_data,
    make_wrapper_subclass,
    pytree,
    schema_of,
)

# After queries, keys and values.
_FLEX_ARGUMENTS = ("score_mod", "block_mask", "scale", "enable_gqa", "return_lse")

__all__ = [
    "record_flex_attention",
    "PARAMETERS_ELSEWHERE",
    "PlaceholderError",
    "PlaceholderTensor",
    "UnknownValue",
    "dry_run",
    "in_dry_run",
    "inside_module",
    "missing",
    "nothing_written",
    "require_known",
    "reveal",
    "step_of_stage",
    "watch_operations",
    "written_by",
]


PARAMETERS_ELSEWHERE = (
    "A loss term with parameters of several stages must be present in the first batch; multiply it by zero where you"
    " do not want it. Create its inputs in `__init__` or `setup`, before the model is split. Or use"
    " TensorParallelStrategy, or the optimizer's `weight_decay`"
)


# -------------------------------------------------------------------------------------------------- how a step runs now

Watcher = Callable[[Any, list["PlaceholderTensor"], Any], None]
"""Takes an operation on placeholders: operator, placeholders, result."""


@dataclass
class _Run:
    """How code runs at this moment; each field is set by the function named in it, inside a block.

    Attributes:
        watcher: `watch_operations`.
        is_dry: `dry_run`.
        inside: `inside_module`.
        writes_nothing: `nothing_written`.
        is_stage: `step_of_stage`.
        draws: `draws_numbers`.
    """

    watcher: Watcher | None = None
    is_dry: bool = False
    inside: str = ""
    writes_nothing: bool = False
    is_stage: bool = False
    draws: bool = False


_run = _Run()


def watch_operations(watcher: Watcher) -> AbstractContextManager[Any]:
    """Call `watcher` with each operation on placeholders inside the block.

    The operator is None where code needs the data of the placeholders, and does not compute with them.
    """
    return patched(_run, "watcher", watcher)


def dry_run() -> AbstractContextManager[Any]:
    """Treat available placeholders as data inside the block."""
    # Outside a dry run they count as missing: a module may have kept one from a dry run.
    return patched(_run, "is_dry", True)


def in_dry_run() -> bool:
    """Return whether the step runs without data, to check a split or to be recorded."""
    return _run.is_dry or _run.watcher is not None


def inside_module(name: str) -> AbstractContextManager[Any]:
    """Name the module in messages about values that it computes inside the block and does not return."""
    return patched(_run, "inside", name)


def record_flex_attention(patches: Patches) -> None:
    """Let `flex_attention` of placeholders return placeholders in records of steps, until `patches` are undone.

    It is no operator, and computes nothing on the meta device. Its results have the shapes of the usual attention.
    """

    def with_placeholders(compute: Callable[..., Any]) -> Callable[..., Any]:
        def attend_to_placeholders(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            # The class first: compiled code must not depend on the state of this module.
            if not isinstance(query, PlaceholderTensor) or not in_dry_run():
                return compute(query, key, value, *args, **kwargs)
            given = dict(zip(_FLEX_ARGUMENTS, args)) | kwargs
            out = F.scaled_dot_product_attention(query, key, value, enable_gqa=bool(given.get("enable_gqa")))
            statistics = query[..., 0].float()
            if given.get("return_aux") is not None:
                return out, flex.AuxOutput(statistics, statistics)
            return (out, statistics) if given.get("return_lse") else out

        return attend_to_placeholders

    patches.replace_function(flex.flex_attention, with_placeholders)


@contextmanager
def nothing_written() -> Iterator[None]:
    """Allow writes of placeholders into real tensors inside the block; the tensors do not change."""
    patches = Patches()
    try:
        patches.replace(_run, "writes_nothing", True)
        give_data(patches)
        yield
    finally:
        patches.undo()


def step_of_stage() -> AbstractContextManager[Any]:
    """Refuse, inside the block, operations that a stage must not run, such as writes into other stages' parameters."""
    return patched(_run, "is_stage", True)


def draws_numbers(is_drawing: bool) -> AbstractContextManager[Any]:
    """Let operations on placeholders take as many random numbers inside the block as they would with data, or none.

    A step's draws before its layers must be the same on the stage with the data and on all other stages.
    """
    return patched(_run, "draws", is_drawing)


# ------------------------------------------------------------------------------------------------------- placeholders


class PlaceholderError(RuntimeError):
    """A computation on this stage needs data that are on another stage.

    Attributes:
        is_missing: True if the data would be missing in a real run too.
    """

    def __init__(self, message: str, placeholders: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.is_missing = any(not placeholder.available for placeholder in placeholders)

    @property
    def lacks_parameter(self) -> bool:
        """Whether the step computes with a parameter that no stage sends."""
        # By the text, which survives on the way to other ranks.
        return PARAMETERS_ELSEWHERE in str(self)


class PlaceholderTensor(Tensor):
    """A tensor without data.

    Args:
        meta: Tensor on the meta device, whose shape, strides and dtype the placeholder takes.
        device: The device that the placeholder claims to be on.
        provenance: Which tensor it represents, for error messages ("the output of `model.embed`").
        parameter: Name of the parameter that it represents, if any.
        available: In a dry run, whether this rank would have the data in a real run. A result is available if all
            placeholders that it is computed from are.

    Attributes:
        value: The data, once they have been received; None before.
        shard: For a parameter that is sharded over other ranks, a tensor without data in the shape of the shard.
        signature: (shape, dtype), without the cost of asking a tensor subclass.
        view_of: Name of the parameter whose data it shares, if any.
        is_trained: Whether the parameter that it represents requires a gradient, which the placeholder does not.
    """

    meta: Tensor
    provenance: str
    parameter: str | None
    value: Tensor | None
    shard: Tensor | None
    available: bool
    signature: tuple[torch.Size, torch.dtype]
    view_of: str | None = None
    is_trained: bool = False

    @staticmethod
    def __new__(
        cls, meta: Tensor, device: torch.device, provenance: str, parameter: str | None = None, available: bool = False
    ) -> PlaceholderTensor:
        placeholder = make_wrapper_subclass(cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device)
        # Otherwise C++ code that asks for the data would read from address zero.
        forbid_data_access(placeholder)
        placeholder.meta = meta
        placeholder.provenance = provenance
        placeholder.parameter = placeholder.view_of = parameter
        placeholder.value = placeholder.shard = None
        placeholder.available = available
        placeholder.signature = (meta.shape, meta.dtype)
        return placeholder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # `Tensor.__init__` takes no arguments; `__new__` sets the attributes

    @classmethod
    def like(
        cls,
        tensor: Tensor,
        provenance: str,
        device: torch.device | None = None,
        parameter: str | None = None,
        available: bool = False,
    ) -> PlaceholderTensor:
        """Return a placeholder with the shape, strides and dtype of `tensor`, on its device unless another is given.

        For a named parameter that is sharded, it has the shape of the full tensor, as the step sees it.
        """
        meta = shown = _to_meta(tensor)
        rule = None if parameter is None else getattr(tensor, "shard_rule", None)
        if rule is not None:
            shown = torch.empty(rule.full_shape(meta.shape), dtype=meta.dtype, device="meta")
        placeholder = cls(shown, tensor.device if device is None else device, provenance, parameter, available)
        placeholder.shard = None if rule is None else meta
        if parameter is not None:
            # A placeholder requires no gradient itself, even if its parameter does.
            placeholder.is_trained = getattr(tensor, "is_trained", False) or tensor.requires_grad
        return placeholder

    def again(self, dtype: torch.dtype | None = None, is_shard: bool = False) -> PlaceholderTensor:
        """Return another placeholder for the same tensor, without received data.

        Args:
            dtype: Its dtype, if it is another one.
            is_shard: Whether it has the shape of the shard, for code that computes with the shard.
        """
        metas = [self.meta if self.shard is None or not is_shard else self.shard, None if is_shard else self.shard]
        meta, shard = (each if dtype is None or each is None else each.to(dtype) for each in metas)
        assert meta is not None
        placeholder = PlaceholderTensor(meta, self.device, self.provenance, self.parameter, self.available)
        placeholder.shard, placeholder.is_trained = shard, self.is_trained
        return placeholder

    def __repr__(self) -> str:  # type: ignore[override]
        # `Tensor.__repr__` would read the data.
        shape, dtype = self.signature
        received = ", received" if self.value is not None else ""
        return f"PlaceholderTensor({tuple(shape)}, {dtype}, {self.provenance}{received})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PlaceholderTensor:
        # `Tensor.__deepcopy__` would copy a storage. The copy has no received data.
        return self.again()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        if self.value is None:
            # A consumer would read from the address of the data, which is zero.
            raise PlaceholderError(
                f"{self.provenance} is on another pipeline stage, so there are no data to share", [self]
            )
        return self.value.__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self.__dlpack__() if self.value is None else self.value.__dlpack_device__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlaceholderError(f"{self.provenance} is on another pipeline stage and cannot be pickled", [self])

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register a hook for the gradient of received data. Without data, the stage that holds them does so."""
        return RemovableHandle(OrderedDict()) if self.value is None else self.value.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register nothing: the stage that has the parameter does."""
        return RemovableHandle(OrderedDict())

    def data_for(self, tensor: Tensor) -> Tensor | None:
        """Return the value that `tensor.data = self` sets; None in a dry run, in which `tensor` does not change.

        Raises:
            PlaceholderError: If the data are on another stage.
        """
        if isinstance(tensor, PlaceholderTensor):
            return self
        if self.value is None:
            _require_data_to_write("`.data = ...`", [self])
        return self.value

    def receive(self, value: Tensor) -> None:
        """Use `value` in place of this placeholder from now on."""
        # A custom autograd function that takes the placeholder computes with the value, but gives its gradient to the
        # placeholder. So the placeholder has to require one: see `own_grad`.
        if value.requires_grad and not isinstance(value, PlaceholderTensor):
            self.requires_grad_()
        self.value = value

    @property
    def own_grad(self) -> Tensor | None:
        """Gradient that reached the placeholder itself instead of its value."""
        # Through `__torch_function__` this would be the gradient of the value.
        with DisableTorchFunctionSubclass():
            return self.grad if self.is_leaf else None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(gathers_first, types)) or any(map(computes_on_parts, types)):
            return NotImplemented
        # Each operation asks this, so the questions that need the asking module come after one look-up.
        if func in _QUESTIONS and _is_answered_with_true(func, args[0], module_that_asks()):
            return True
        if getattr(func, "__name__", "") in _NEEDS_ADDRESS:
            _require_address(func.__name__, args)
        kwargs = reveal(kwargs) if kwargs else {}
        with DisableTorchFunctionSubclass():
            return func(*reveal(args), **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        placeholders: list[PlaceholderTensor] = []
        _collect(args, placeholders)
        if kwargs:
            _collect(kwargs, placeholders)
        _check(func, placeholders)
        result = None
        try:
            result = _computed(func, args, kwargs, placeholders)
            return result
        finally:
            # Also an operation that fails: it uses its arguments.
            if _run.watcher is not None:
                _run.watcher(func, placeholders, result)


def _computed(func: Any, args: Any, kwargs: dict[str, Any], placeholders: list[PlaceholderTensor]) -> Any:
    """Return the result of an operator on placeholders.

    Raises:
        PlaceholderError: If it needs data.
    """
    written = written_by(func, args, kwargs)
    if written and not all(isinstance(value, PlaceholderTensor) for value in written):
        _require_data_to_write(f"`{func}`", placeholders)
        # The tensor does not change: only shapes matter here. An operator without a list returns its tensor.
        returned = schema_of(func).returns
        return None if not returned else written[0] if len(returned) == 1 else tuple(written)
    for value in written:
        _require_no_parameter(value)
    # Draw and discard: the generator must advance as far as on the stage with the data.
    if _run.draws and torch.Tag.nondeterministic_seeded in func.tags:
        func(*_with_data(args), **_with_data(kwargs))
    # Shapes are computed on the meta device; the result claims the device that the real operation would use.
    device = kwargs.get("device") or placeholders[0].device
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    if torch.Tag.inplace_view in func.tags:
        _require_shape(func, written[0], args, kwargs)
    try:
        result = _shapes_with_data(func, args, kwargs)
    except (RuntimeError, NotImplementedError) as error:
        what = "`.item()`, `float()` or `if`" if "local_scalar" in str(func) else f"`{func}`"
        raise PlaceholderError(
            f"{what} in {innermost_users_line()} needs the data of {placeholders[0].provenance}, which this "
            f"pipeline stage does not hold ({error}). {_way_out(placeholders[0].provenance)}",
            placeholders,
        ) from error
    available = all(placeholder.available for placeholder in placeholders)
    for value in written:
        # From here on, messages must name the missing source instead of the former one.
        if value.available and not available:
            value.provenance = _provenance(placeholders)
        value.available = available
    if written:
        # An operator that writes into a list of tensors returns nothing.
        return None if result is None else _rewritten(written[0], result)
    wrapped = _wrap(result, device, _provenance(placeholders), available)
    if placeholders[0].view_of and isinstance(wrapped, PlaceholderTensor) and _is_view(func):
        wrapped.view_of = placeholders[0].view_of
    return wrapped


def _is_answered_with_true(func: Any, asked: Any, asking: str) -> bool:
    """Return whether the placeholder `asked` answers True, and not as torch would answer.

    Args:
        func: One of `_QUESTIONS`.
        asked: A tensor.
        asking: The name of the module that asks.

    Raises:
        PlaceholderError: If another stage may answer differently.
    """
    if func in _GRADIENT_QUESTIONS and _cannot_answer(asked, asking):
        raise PlaceholderError(
            f"The step asks for `{_GRADIENT_QUESTIONS[func]}` of {asked.provenance}, which is on another"
            " pipeline stage and may have another value there. Make the step independent of this value",
            [asked],
        )
    # Compared by `==`, because each look-up of a slot makes a new object.
    if func == _SET_DATA:
        _require_no_parameter(asked)
    if func == _REQUIRES_GRAD and isinstance(asked, PlaceholderTensor) and asked.is_trained:
        return asking.partition(".")[0] not in ("torch", __name__.partition(".")[0])
    # A distribution validates its arguments, and raises on the stage that has them if they are wrong.
    return func is Tensor.__bool__ and asked.value is None and asking == "torch.distributions.distribution"


_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

# Placeholders have no graph, so torch would answer as for a constant.
_GRADIENT_QUESTIONS = {getattr(Tensor, name).__get__: name for name in ("requires_grad", "grad_fn", "is_leaf")}

# `p.data = ...` is no operation, so it needs its own check.
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

_QUESTIONS = {*_GRADIENT_QUESTIONS, Tensor.__bool__, _SET_DATA}


# These functions read the address of the data in C++, and a placeholder has none.
_NEEDS_ADDRESS = {"apply_", "data_ptr", "map2_", "map_", "numpy", "share_memory_", "storage", "tolist"}
_NEEDS_ADDRESS |= {"__array__", "_typed_storage", "untyped_storage"}


def _require_address(name: str, values: Iterable[Any]) -> None:
    lacking = [value for value in values if type(value) is PlaceholderTensor and value.value is None]
    if lacking:
        provenance = lacking[0].provenance
        raise PlaceholderError(
            f"`{name}` in {innermost_users_line()} asks for the memory of {provenance}, which is on another pipeline"
            f" stage. {_way_out(provenance)}",
            lacking,
        )


def _cannot_answer(placeholder: Any, asking: str) -> bool:
    """Return whether the stage with the data may answer differently; `asking` is the name of the asking module."""
    if not isinstance(placeholder, PlaceholderTensor) or placeholder.value is not None or placeholder.parameter:
        return False
    is_differentiable = placeholder.signature[1].is_floating_point or placeholder.signature[1].is_complex
    # Torch itself asks only to warn, or to choose between ways to the same result.
    return (
        is_differentiable
        and torch.is_grad_enabled()
        and asking.partition(".")[0] not in ("torch", __name__.partition(".")[0])
    )


def _with_data(value: Any) -> Any:
    """Replace placeholders by tensors of ones; the number of draws depends on shapes only."""
    if isinstance(value, PlaceholderTensor):
        meta = value.meta
        # The value 1 is a valid probability, rate and deviation, so every distribution takes it.
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=value.device).fill_(1)
    if isinstance(value, (list, tuple)):
        return type(value)(_with_data(item) for item in value)
    if isinstance(value, dict):
        return {key: _with_data(item) for key, item in value.items()}
    return value


def _way_out(provenance: str) -> str:
    is_parameter = provenance.startswith("the parameter `")
    return PARAMETERS_ELSEWHERE if is_parameter else _COMPUTED_ELSEWHERE


_COMPUTED_ELSEWHERE = "Compute it from the batch, inside one of the repeated layers, or after them"


def _provenance(placeholders: list[PlaceholderTensor]) -> str:
    """Choose the placeholder to name in a message: unavailable before available, activation before parameter."""
    missing_first = [placeholder for placeholder in placeholders if not placeholder.available] or placeholders
    if _run.inside and _run.is_dry:
        return f"a tensor that `{_run.inside}` makes and does not return"
    for placeholder in missing_first:
        if not placeholder.parameter:
            return placeholder.provenance
    return missing_first[0].provenance


def reveal(value: Any) -> Any:
    """Replace received placeholders by their data; lists and dicts that hold some stay the same objects."""
    # Written out, because `pytree` takes several times longer, and this runs for every operation on a placeholder.
    if isinstance(value, PlaceholderTensor):
        return value if value.value is None else value.value
    if isinstance(value, tuple):
        if type(value) is tuple:
            return tuple(map(reveal, value))
        return type(value)(*map(reveal, value)) if hasattr(value, "_fields") else value
    if isinstance(value, (list, dict)):
        for place, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(item, (PlaceholderTensor, tuple, list, dict)):
                value[place] = reveal(item)
    return value


def missing(value: Any) -> bool:
    """Return whether `value` is a placeholder without data."""
    return type(value) is PlaceholderTensor and value.value is None and not (_run.is_dry and value.available)


def _collect(value: Any, into: list[PlaceholderTensor]) -> None:
    if isinstance(value, PlaceholderTensor):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, into)
    elif isinstance(value, dict):
        _collect(list(value.values()), into)


def _check(func: Any, placeholders: list[PlaceholderTensor]) -> None:
    for placeholder in placeholders:
        if placeholder.value is not None:
            raise PlaceholderError(
                f"{placeholder.provenance} reached `{func}` on a way that autograd cannot follow, such as a custom"
                " autograd function outside the layers. This stage received it for a layer. Move that call into a"
                " layer"
            )


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that `func` writes in place."""
    place = _written_argument(func)
    if place is None:
        return []
    position, name = place
    given = args[position] if position < len(args) else kwargs.get(name)
    written = list(given) if isinstance(given, (list, tuple)) else [given]
    return [value for value in written if isinstance(value, Tensor)]


def _require_data_to_write(what: str, placeholders: list[PlaceholderTensor]) -> None:
    """Refuse to write placeholders into a real tensor, whose contents would be lost.

    A dry run allows it if the data would be there. A trace, which reads no contents, always allows it.
    """
    if _run.watcher is not None:
        _run.watcher(None, placeholders, None)
    lacking = [placeholder for placeholder in placeholders if not (_run.is_dry and placeholder.available)]
    if lacking and (_run.is_dry or not _run.writes_nothing):
        raise PlaceholderError(
            f"{what} in {innermost_users_line()} writes {lacking[0].provenance}, which is on another pipeline stage,"
            " into a tensor of this stage. Build the tensor out of place (`torch.cat`, `torch.where`) instead",
            lacking,
        )


def _require_no_parameter(written: Any) -> None:
    """Refuse a step that writes into a parameter outside modules."""
    # The self-check misses a teacher that equals its student, and a bound that is not reached before the first step.
    if (_run.is_dry or (_run.is_stage and not _run.writes_nothing)) and getattr(written, "view_of", None):
        error = PlaceholderError(
            f"The step writes into the parameter `{written.view_of}` in {innermost_users_line()}. A pipeline runs"
            " the step once per microbatch, and each stage has other parameters. Write in a hook, such as"
            " `on_train_batch_start`; or use TensorParallelStrategy, whose ranks run a step once"
        )
        error.is_missing = True
        raise error


@cache
def _is_view(func: Any) -> bool:
    """Return whether the result of `func` shares the data of its first argument."""
    return any(result.alias_info is not None for result in schema_of(func).returns)


@cache
def _written_argument(func: Any) -> tuple[int, str] | None:
    """Return the position and name of the argument that `func` writes in place; None if it writes none."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return position, argument.name
    return None


def _require_shape(func: Any, written: PlaceholderTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse operations that change the shape of `written` in place, which a tensor subclass cannot do."""
    # Tried on copies, because the meta tensors of placeholders are shared.
    changed = func(*_on_meta(args, copied=True), **_on_meta(kwargs, copied=True))
    if changed.shape != written.signature[0]:
        raise PlaceholderError(
            f"`{func}` must not change the shape of {written.provenance} in place; use the form that makes a new tensor"
        )


def _rewritten(written: PlaceholderTensor, result: Any) -> Any:
    # The result of an in-place operation is the placeholder itself, unless the operator returns several tensors.
    if isinstance(result, (list, tuple)):
        return _wrap(result, written.device, written.provenance, written.available)
    return written


_known_shapes: dict[Any, Any] = {}
_MOST_KNOWN = 10_000


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of `func` on the meta device; cached, because meta kernels are slow Python code."""
    key = (func, _key(args), _key(kwargs))
    try:
        return _known_shapes[key]
    except KeyError:
        pass
    except TypeError:  # an argument that cannot be hashed
        return func(*_on_meta(args), **_on_meta(kwargs))
    # Sequence lengths vary without end in some data sets, so the cache has a limit.
    if len(_known_shapes) > _MOST_KNOWN:
        _known_shapes.clear()
    result = _known_shapes[key] = func(*_on_meta(args), **_on_meta(kwargs))
    return result


def _shapes_with_data(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of `_shapes`, even if it depends on the data of other arguments, such as lengths."""
    try:
        return _shapes(func, args, kwargs)
    except (RuntimeError, NotImplementedError):
        with suppress(RuntimeError, NotImplementedError):
            return func(*_on_meta(args, with_data=True), **_on_meta(kwargs, with_data=True))
        # The error of the first try, which shows the missing data.
        raise


def _key(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        meta = value.meta if isinstance(value, PlaceholderTensor) else value
        return meta.shape, meta.stride(), meta.dtype
    if kind is tuple or kind is list:
        return kind, tuple(map(_key, value))
    if kind is dict:
        return tuple((name, _key(item)) for name, item in value.items())
    # With the type, because 1, 1.0 and True are equal keys of a dict.
    return kind, value


def _to_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, PlaceholderTensor):
        return tensor.meta
    # `tensor.to("meta")` would record a copy in the graph.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(value: Any, copied: bool = False, with_data: bool = False) -> Any:
    """Replace tensors by tensors on the meta device, or by copies of these; with `with_data`, placeholders only."""
    if isinstance(value, Tensor):
        if with_data and not isinstance(value, PlaceholderTensor):
            return value
        return torch.empty_like(_to_meta(value)) if copied else _to_meta(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(item, copied, with_data) for item in value)
    if isinstance(value, dict):
        return {key: _on_meta(item, copied, with_data) for key, item in value.items()}
    return value


def _wrap(value: Any, device: torch.device, provenance: str, available: bool) -> Any:
    if isinstance(value, Tensor):
        if not value.is_meta:
            return value  # made from other arguments, such as lengths
        # The step may have named the device by a string.
        return PlaceholderTensor(value, torch.device(device), provenance, available=available)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap(item, device, provenance, available) for item in value)
    return value


# ------------------------------------------------------------------------------------------- values that no stage knows


class UnknownValue:
    """A Python or numpy value that a module of another stage computed from its data, as by `tensor.item()`.

    It can be passed on and returned; any use of it raises `PlaceholderError`.

    Args:
        sample: The value for random data, for modules that run on random data.
        provenance: The module that computed it, for the message.
        available: As for `PlaceholderTensor`.

    """

    def __init__(self, sample: Any, provenance: str, available: bool) -> None:
        self.__dict__.update(sample=sample, provenance=provenance, available=available)

    def __repr__(self) -> str:
        return f"UnknownValue({type(self.sample).__name__} of {self.provenance})"

    def refuse(self, *_: Any, **__: Any) -> Any:
        """Raise a `PlaceholderError` that names the value."""
        kind = type(self.sample).__name__
        error = PlaceholderError(
            f"{self.provenance} leaves a value of type {kind} that is computed from its data, as by `.item()`. The"
            " step uses this value on a pipeline stage that does not hold the module. A pipeline sends only tensors"
            " between layers: keep it a tensor and pass it through the layers, or do not use it"
        )
        error.is_missing = not self.available
        raise error

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for methods that may be absent; any other access would be a use of the value.
        if name.startswith("__") and name.endswith("__") and name not in ("__array__", "__array_interface__"):
            raise AttributeError(name)
        return self.refuse()


_REFUSED = (
    "add sub mul truediv floordiv mod divmod pow matmul radd rsub rmul rtruediv rfloordiv rmod rdivmod rpow rmatmul "
    "and or xor rand ror rxor lshift rshift neg pos abs invert lt le gt ge eq ne bool int float complex index round "
    "trunc floor ceil len iter next contains getitem setitem format str hash array call"
)
for _operation in _REFUSED.split():
    # Special methods are looked up on the class. numpy and torch ask for `__array__`, `__float__` or `__index__`.
    setattr(UnknownValue, f"__{_operation}__", UnknownValue.refuse)


def require_known(value: Any, name: str) -> None:
    """Refuse placeholders, and numbers of other stages, in a value that a step leaves behind; a record notes the need.

    Args:
        value: A value of any structure.
        name: Where the step leaves it, for the message.

    Raises:
        PlaceholderError: If there is one.
    """
    leaves = pytree.tree_leaves(value)
    if _run.watcher is not None:
        _run.watcher(None, [leaf for leaf in leaves if type(leaf) is PlaceholderTensor], None)
        return
    for leaf in leaves:
        if isinstance(leaf, UnknownValue) or missing(leaf):
            raise PlaceholderError(
                f"{name} is made of {leaf.provenance}, which is on an earlier pipeline stage. The last stage, where a "
                "step ends, does not know this value. Make it of the outputs of the layers, or pass it through the "
                "layers"
                " [LP024]",
                [leaf],
            )
