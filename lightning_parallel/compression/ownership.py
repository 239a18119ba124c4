"""A compressor and the model that it serves: what it remembers of one is no use to another."""

from __future__ import annotations

import warnings
import weakref

from torch import nn

from lightning_parallel.compression.policy import Policy
from lightning_parallel.compression.reducer import Reducer

__all__ = ["give_to", "warn_of_unmatched"]

_OWNERS: weakref.WeakKeyDictionary[Reducer, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def give_to(module: nn.Module, reducer: Reducer) -> None:
    """Let `reducer` belong to `module`; it starts anew, with a warning, if it has taken steps for another one."""
    owner = _OWNERS.get(reducer)
    if owner is not None and owner() is not module and reducer.step > 0:
        warnings.warn(
            f"{reducer!r} has taken {reducer.step} steps for another model; it forgets them and starts anew.",
            stacklevel=2,
        )
        reducer.reset()
    _OWNERS[reducer] = weakref.ref(module)


def warn_of_unmatched(module: nn.Module, reducer: Reducer) -> None:
    """Warn of patterns of a policy that decide about no parameter of `module`: a name may be misspelt."""
    names = [name for name, _ in module.named_parameters()]
    unmatched = reducer.unmatched(names) if isinstance(reducer, Policy) else []
    if unmatched:
        warnings.warn(
            f"The patterns {unmatched} of the policy are not the first to match any parameter of "
            f"{type(module).__name__}, whose names look like {names[:3]}.",
            stacklevel=2,
        )
