"""Keep results of a layer for a second run of it, which communicates nothing and computes no product again.

    forward    kept(compute)  ->  computes, and keeps the result
    backward   kept(compute)  ->  returns the result that the first run kept

Functions of sharded layers pass each communication through `kept`, with the product before it. Outside `KeptResults`,
`kept` only computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from lightning_parallel.compat.torch import (
    PRODUCTS,
    TorchDispatchMode,
    is_traced_now,
    pytree,
    same_memory,
    storage_address,
    unsafe_view,
    version_of,
)

__all__ = ["KeptResults", "kept", "running_results"]

T = TypeVar("T")

_running: KeptResults | None = None


def kept(compute: Callable[[], T]) -> T:
    """Return the result of `compute`, or in the second run of a layer the result of the first run.

    Args:
        compute: Computes containers of tensors and plain values, without a graph. Its tensors may be returned again, so
            code may change them in place: the second run then computes again.
    """
    global _running
    results = _running
    if results is None or is_traced_now():
        return compute()
    # Calls inside `compute` belong to its result.
    _running = None
    try:
        return results.next(compute)
    finally:
        _running = results


def running_results() -> KeptResults | None:
    """Return the results of the layer that runs now; None outside such layers, and in code that is compiled."""
    return None if _running is None or is_traced_now() else _running


class KeptResults:
    """Keeps the results of one call of a layer; a context for its first run, and for each later run.

    Args:
        most: The number of results that a later run asks for; None if it is unknown.

    Attributes:
        is_again: Whether the first run has ended.
        asked: The results for which the last run has asked.
    """

    def __init__(self, most: int | None = None) -> None:
        self.is_again = False
        self.asked = 0
        self._most = most
        # Each with the code that made it, and with the versions of all tensors in its memory.
        self._results: list[tuple[Any, Any, list[tuple[Tensor, int]]]] = []
        self._products = _Products()
        self._around: list[KeptResults | None] = []

    def __enter__(self) -> KeptResults:
        global _running
        self._around.append(_running)
        _running = self
        self.asked = 0
        self._products.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        global _running
        self._products.__exit__(*error)
        _running = self._around.pop()
        self.is_again = True

    def tensors(self) -> list[Tensor]:
        """Return the tensors in the results that are kept."""
        return [leaf for _, held, _ in self._results for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor)]

    def watch(self, other: Tensor) -> None:
        """Take note of a tensor that may share its memory, but not its version, with a result of the first run."""
        address = storage_address(other.untyped_storage())
        for _, _, versions in self._results:
            if not self.is_again and any(storage_address(own.untyped_storage()) == address for own, _ in versions):
                versions += _versions(same_memory(other))

    def next(self, compute: Callable[[], Any]) -> Any:
        """Return the next result of the first run, or compute it."""
        # The code of a closure, or the function of a `partial`.
        code = getattr(compute, "__code__", None) or getattr(compute, "func", None)
        if not self.is_again:
            result = compute()
            if self._most is None or self.asked < self._most:
                # Aliases: autograd gives the tensors themselves a place in its graph.
                held = pytree.tree_map_only(Tensor, same_memory, result)
                self._results.append((code, held, _versions(held)))
            self.asked += 1
            return result
        # A later run may skip a result, because its code has cached a value. It gets no result of other code.
        for index in range(self.asked, len(self._results)):
            found, held, versions = self._results[index]
            if found == code:
                self.asked = index + 1
                if all(version_of(tensor) == version for tensor, version in versions):
                    return pytree.tree_map_only(Tensor, same_memory, held)
                break
        else:
            self.asked += self.asked >= len(self._results)
        # No run has asked for this result so far, or a change in place has spoilt it.
        return compute()


def _versions(value: Any) -> list[tuple[Tensor, int]]:
    return [(leaf, version_of(leaf)) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class _Products(TorchDispatchMode):
    """Keeps the results of products and attention.

    `torch.utils.checkpoint.create_selective_checkpoint_contexts` counts all operators of a run. A second run that skips
    the operators before a communication would get the results of other products.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # A compiled layer keeps its compiled code, whose products are computed again.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is unsafe_view and _running is not None:
            # `matmul` makes such a view, and `linear` may add a bias to it in place.
            view = func(*args, **kwargs)
            _running.watch(view)
            return view
        places = PRODUCTS.get(func)
        if places is None:
            return func(*args, **kwargs)
        # A result that was drawn moves the generator, so the second run has to draw it again.
        if any((args[place] if place < len(args) else kwargs.get("dropout_p", 0)) > 0 for place in places):
            return func(*args, **kwargs)
        return kept(partial(func, *args, **kwargs))
