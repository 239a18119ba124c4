"""Puts full copies in place of divided modules in a checkpoint, such as a network among the hyperparameters.

`save_hyperparameters()` keeps the arguments of the constructor. A divided module may contain such an argument. Loading
the file gives the argument to the constructor again, which expects the full module of one process.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from lightning_parallel.compat import DIVISION, ParallelState

__all__ = ["forget_watchers", "holds_modules", "put_full_copies", "weakly"]

_STATES = ("state_dict", "optimizer_states")


def holds_modules(checkpoint: Mapping[str, Any], module: nn.Module) -> bool:
    """Tell whether an entry of a checkpoint other than the states refers to `module` or one of its submodules."""
    return bool(_entries_with_modules(checkpoint, module))


def _entries_with_modules(checkpoint: Mapping[str, Any], module: nn.Module) -> list[tuple[str, Any]]:
    """Return the places of such entries: the key in the checkpoint, and the key in its dict or None."""
    parts = {id(child) for child in module.modules()}
    found: list[tuple[str, Any]] = []
    for key, value in checkpoint.items():
        if key in _STATES:
            continue
        if type(value) is dict:
            found += [(key, name) for name, entry in value.items() if _Finder.finds(parts, entry)]
        elif _Finder.finds(parts, value):
            found.append((key, None))
    return found


def put_full_copies(
    checkpoint: dict[str, Any],
    module: nn.Module,
    known: Mapping[str, Tensor],
    gather: Callable[[], Mapping[str, Tensor]],
    is_written: bool,
) -> None:
    """Replace the entries that `holds_modules` finds by copies with full modules; every rank calls it.

    Args:
        checkpoint: The checkpoint. The rank that writes it changes it in place.
        module: The divided module.
        known: Full tensors of its state dict, which the copies share.
        gather: Returns the full parameters and buffers, with values on the rank that writes.
        is_written: Whether this rank writes the checkpoint.
    """
    full = dict(gather())
    if not is_written:
        return
    # The copies share memory with the state dict, as on one process, so that the file holds each tensor once.
    full.update((name, known[name]) for name, value in full.items() if _is_alike(known.get(name), value))
    memo: dict[int, Any] = {}
    parameters: dict[str, nn.Parameter] = {}
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    state = ParallelState.of(module)
    if state.full_states is not None:
        trained = {name: name in state.full_states.trained for name in full} | trained

    def parameter(name: str) -> nn.Parameter:
        if name not in parameters:
            parameters[name] = nn.Parameter(full[name], trained.get(name, False))
            # `deepcopy` takes an object in `memo` as its own copy, so it does not copy a full parameter again.
            memo[id(parameters[name])] = parameters[name]
        return parameters[name]

    if state.skeleton is None:
        # Each replica holds the full module, but `zero_stage=2` may have sharded a parameter for the step.
        memo.update((id(held), parameter(name)) for name, held in module.named_parameters() if name in full)
        shown: Any = nullcontext()
    else:
        shown = state.skeleton.put_on(
            parameter, {name: full[name] for name in state.skeleton.buffer_names if name in full}
        )
    entries = _entries_with_modules(checkpoint, module)
    with shown:
        for key, name in entries:
            if name is None:
                checkpoint[key] = copy.deepcopy(checkpoint[key], memo)
            else:
                checkpoint[key] = {**checkpoint[key], name: copy.deepcopy(checkpoint[key][name], memo)}
    for value in list(memo.values()):
        if isinstance(value, nn.Module):
            forget_watchers(value)


def _is_alike(known: Tensor | None, value: Tensor) -> bool:
    return known is not None and known.shape == value.shape and known.dtype == value.dtype and not known.is_meta


def forget_watchers(module: nn.Module) -> None:
    """Remove the hooks of this library from a copy: a file with them could not be read without the library."""
    own = vars(module)
    for name in (DIVISION, "_parallel_state", "_pipeline_site"):
        own.pop(name, None)
    if _is_ours(own.get("forward")):
        del own["forward"]
    for name, hooks in own.items():
        if not name.endswith("_hooks") or not isinstance(hooks, dict):
            continue
        for key, hook in list(hooks.items()):
            if _is_ours(hook):
                del hooks[key]


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).partition(".")[0] == "lightning_parallel"


class _WeakTensors(WeakValueDictionary[str, Tensor]):
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # no code of another process holds the tensors


def weakly(state: Mapping[str, Any]) -> WeakValueDictionary[str, Tensor]:
    """Return the tensors of a state dict, for as long as other code holds them."""
    return _WeakTensors({name: value for name, value in state.items() if isinstance(value, Tensor)})


class _Finder(pickle.Pickler):
    """Walks through the objects that a pickle would contain, without the data of tensors."""

    def __init__(self, parts: set[int]) -> None:
        super().__init__(_Nowhere(), pickle.HIGHEST_PROTOCOL)
        self._parts = parts
        self.found = False

    def persistent_id(self, value: Any) -> str | None:
        # Pickle calls this method before it serializes an object, so the data of tensors are never written.
        if isinstance(value, nn.Module) and id(value) in self._parts:
            self.found = True
            return "module"
        return "tensor" if isinstance(value, Tensor) and not isinstance(value, nn.Module) else None

    @classmethod
    def finds(cls, parts: set[int], value: Any) -> bool:
        if value is None or isinstance(value, (bool, int, float, str, Tensor)):
            return False
        finder = cls(parts)
        try:
            finder.dump(value)
        except Exception:
            # The writer of the checkpoint reports an object that cannot be pickled. A module may precede that object.
            return finder.found
        return finder.found


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)
