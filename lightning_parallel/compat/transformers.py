"""Private names of Hugging Face's transformers that the library uses, each with the reason.

Nothing here imports transformers: a model that has these attributes brings them along.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

__all__ = ["tensor_parallel_plan_of", "weight_initializer_of"]


def tensor_parallel_plan_of(model: nn.Module) -> dict[str, str]:
    """Return the tensor-parallel plan that a model carries, module pattern to style name; empty if it has none.

    The public `supports_tp_plan` only says whether there is one.
    """
    plan = getattr(model, "_tp_plan", None)
    return dict(plan) if isinstance(plan, dict) else {}


def weight_initializer_of(model: nn.Module) -> Callable[[nn.Module], None] | None:
    """Return the function by which a model initialises each module inside it; None if it has none.

    The public `init_weights` initialises a whole model at once, which would then have to be in memory as a whole.
    """
    initialize = getattr(model, "_init_weights", None)
    return initialize if callable(initialize) else None
