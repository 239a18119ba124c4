"""Ghosts: tensors with a shape, a dtype and a device, and no data.

On a stage that does not own the embedding, the embedding answers with a ghost. What is computed from a ghost is a
ghost, so the model's own code runs up to the first layer that the stage owns, at no cost in memory or arithmetic:

    ids (real) -> embed -> ghost -> dropout -> ghost -> layer 0 (elsewhere) -> ghost -> layer 1 (owned) receives
    ids (real) -> positions, masks, rotary angles: computed as ever, real on every stage

Once its data have been received, a ghost has a `value`, which then stands for it in every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Ghost", "GhostError", "missing", "reveal", "trial", "watch_parameters"]


class GhostError(RuntimeError):
    """A computation on this stage needs data that are on another stage.

    Attributes:
        lost: Whether the data would be missing in earnest too, and not in a trial only.
    """

    def __init__(self, message: str, ghosts: Iterable[Ghost] = ()) -> None:
        super().__init__(message)
        self.lost = any(not ghost.live for ghost in ghosts)


class Ghost(Tensor):
    """A tensor without data.

    Args:
        meta: Tensor on the meta device, whose shape, strides and dtype the ghost takes.
        device: The device that the ghost claims to be on.
        origin: What it stands for, in the words of an error message ("the output of `model.embed`").
        parameter: Name of the parameter that it stands in for, if it does.
        live: In a trial without data, whether the data would be there. What is made of live ghosts only is live.

    Attributes:
        value: The data, once they have been received; None before.
        signature: (shape, dtype), without the cost of asking a tensor subclass.
    """

    meta: Tensor
    origin: str
    parameter: str | None
    value: Tensor | None
    live: bool
    signature: tuple[torch.Size, torch.dtype]

    @staticmethod
    def __new__(
        cls, meta: Tensor, device: torch.device, origin: str, parameter: str | None = None, live: bool = False
    ) -> Ghost:
        ghost = Tensor._make_wrapper_subclass(cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device)
        ghost.meta, ghost.origin, ghost.parameter, ghost.value = meta, origin, parameter, None
        ghost.signature, ghost.live = (meta.shape, meta.dtype), live
        return ghost

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def like(
        cls,
        tensor: Tensor,
        origin: str,
        device: torch.device | None = None,
        parameter: str | None = None,
        live: bool = False,
    ) -> Ghost:
        """A ghost with the shape, strides and dtype of `tensor`, on its device unless another is given."""
        return cls(_to_meta(tensor), tensor.device if device is None else device, origin, parameter, live)

    def __repr__(self) -> str:  # type: ignore[override]
        shape, dtype = self.signature
        return f"Ghost({tuple(shape)}, {dtype}, {self.origin}{', received' if self.value is not None else ''})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Ghost:
        return Ghost(self.meta, self.device, self.origin, self.parameter, self.live)

    def receive(self, value: Tensor) -> None:
        """Let `value` stand for this ghost from now on.

        A custom autograd function that takes the ghost computes with the value, but gives its gradient to the ghost:
        see `own_grad`.
        """
        if value.requires_grad and not isinstance(value, Ghost):
            self.requires_grad_()
        self.value = value

    @property
    def own_grad(self) -> Tensor | None:
        """The gradient that came to the ghost itself and not to its value."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Values are put in above autograd, so that gradients flow back to what was received.
        kwargs = reveal(kwargs) if kwargs else {}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*reveal(args), **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        ghosts: list[Ghost] = []
        _collect(args, ghosts)
        _collect(kwargs, ghosts)
        _check(func, ghosts)
        written = _written(func, args, kwargs)
        device = kwargs.get("device") or ghosts[0].device
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        if torch.Tag.inplace_view in func.tags:
            _require_shape(func, written, args, kwargs)
        try:
            result = _shapes(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise GhostError(
                f"`{func}` needs the data of {ghosts[0].origin}, which this pipeline stage does not hold ({error}). "
                "Compute it from the batch, inside one of the repeated layers, or after them",
                ghosts,
            ) from error
        live = all(ghost.live for ghost in ghosts)
        if written is not None:
            written.live = live
            return _rewritten(written, result)
        dead = [ghost for ghost in ghosts if not ghost.live] or ghosts
        origin = next((ghost.origin for ghost in dead if not ghost.parameter), dead[0].origin)
        return _wrap(result, device, origin, live)


_watcher: Callable[[str], None] | None = None


class watch_parameters:
    """Call `watcher` with the name of each absent parameter that is computed with, inside a `with` block."""

    def __init__(self, watcher: Callable[[str], None]) -> None:
        self.watcher = watcher

    def __enter__(self) -> None:
        global _watcher
        self.before, _watcher = _watcher, self.watcher

    def __exit__(self, *exception: object) -> None:
        global _watcher
        _watcher = self.before


def reveal(value: Any) -> Any:
    """Put the data of received ghosts in their places; lists and dicts that have some stay the same objects."""
    if isinstance(value, Ghost):
        return value if value.value is None else value.value
    if isinstance(value, tuple):
        if type(value) is tuple:
            return tuple(map(reveal, value))
        return type(value)(*map(reveal, value)) if hasattr(value, "_fields") else value
    if isinstance(value, (list, dict)):
        for place, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(item, (Ghost, tuple, list, dict)):
                value[place] = reveal(item)
    return value


def missing(value: Any) -> bool:
    """Whether `value` is a ghost whose data are not here."""
    return type(value) is Ghost and value.value is None and not (_on_trial and value.live)


_on_trial = False


@contextmanager
def trial() -> Iterator[None]:
    """Inside the block live ghosts count as present. Outside they do not: a module may have kept one."""
    global _on_trial
    _on_trial = True
    try:
        yield
    finally:
        _on_trial = False


def _collect(value: Any, into: list[Ghost]) -> None:
    if isinstance(value, Ghost):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, into)
    elif isinstance(value, dict):
        _collect(list(value.values()), into)


def _check(func: Any, ghosts: list[Ghost]) -> None:
    for ghost in ghosts:
        if ghost.value is not None:
            raise GhostError(
                f"{ghost.origin} was received for a layer, and then reached `{func}` by a way that autograd cannot "
                "follow, such as a custom autograd function outside the layers. Move that call into a layer"
            )
        if ghost.parameter is not None and _watcher is not None:
            _watcher(ghost.parameter)


@cache
def _written_argument(func: Any) -> tuple[int, str] | None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return position, argument.name
    return None


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that `func` writes in place.

    Raises:
        GhostError: If it is a real tensor, whose contents would be lost.
    """
    place = _written_argument(func)
    if place is None:
        return None
    position, name = place
    written = args[position] if position < len(args) else kwargs.get(name)
    if isinstance(written, Tensor) and not isinstance(written, Ghost):
        ghosts: list[Ghost] = []
        _collect([args, kwargs], ghosts)
        raise GhostError(
            f"`{func}` writes {ghosts[0].origin}, which is on another pipeline stage, into a tensor of this stage. "
            "Build the tensor out of place (`torch.cat`, `torch.where`) instead",
            ghosts,
        )
    return written


def _require_shape(func: Any, written: Ghost, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """See that `func` leaves the shape of `written` as it is; a ghost cannot change its own."""
    changed = func(*_on_meta(args, copied=True), **_on_meta(kwargs, copied=True))
    if changed.shape != written.signature[0]:
        raise GhostError(
            f"`{func}` changes the shape of {written.origin} in place; use the form that makes a new tensor"
        )


def _rewritten(written: Ghost, result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return _wrap(result, written.device, written.origin, written.live)
    return written


_known_shapes: dict[Any, Any] = {}
_MOST_KNOWN = 10_000


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` returns, on the meta device; remembered, since meta kernels are slow Python code."""
    key = (func, _key(args), _key(kwargs))
    try:
        return _known_shapes[key]
    except KeyError:
        pass
    except TypeError:  # an argument that cannot be hashed
        return func(*_on_meta(args), **_on_meta(kwargs))
    if len(_known_shapes) > _MOST_KNOWN:
        _known_shapes.clear()
    result = _known_shapes[key] = func(*_on_meta(args), **_on_meta(kwargs))
    return result


def _key(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        meta = value.meta if isinstance(value, Ghost) else value
        return meta.shape, meta.stride(), meta.dtype
    if kind is tuple or kind is list:
        return kind, tuple(map(_key, value))
    if kind is dict:
        return tuple((name, _key(item)) for name, item in value.items())
    return kind, value


def _to_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Ghost):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(value: Any, copied: bool = False) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(_to_meta(value)) if copied else _to_meta(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(item, copied) for item in value)
    if isinstance(value, dict):
        return {key: _on_meta(item, copied) for key, item in value.items()}
    return value


def _wrap(value: Any, device: torch.device, origin: str, live: bool) -> Any:
    if isinstance(value, Tensor):
        return Ghost(value, torch.device(device), origin, live=live)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap(item, device, origin, live) for item in value)
    return value
