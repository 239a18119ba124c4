"""Watch one step for computations with divided parameters outside of the layers that know about the division.

A regulariser over `self.parameters()`, or a weight handed to a function, would see one rank's piece and give other
numbers than one process, without a sign. Such a step is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.tensor.plan import Sharding

__all__ = ["audited", "check_loss"]

# With the parameter as a later argument these take its dtype and device only.
CASTS = {"to", "type_as"}


def audited(module: nn.Module, sharding: Sharding) -> AbstractContextManager[Any]:
    """A block in which divided parameters may be used by their own layers only.

    Compiled modules cannot be watched; with one of them inside `module` the block watches nothing.

    Raises:
        RuntimeError: Inside the block, where something else computes with a divided parameter.
    """
    compiled = any(
        type(inner).__name__ == "OptimizedModule" or getattr(inner, "_compiled_call_impl", None) is not None
        for inner in module.modules()
    )
    return nullcontext() if compiled else _Audit(module, sharding)


# Backward nodes of what joins the pieces of a divided tensor, and of what divides a whole one (see `linear.py` and
# `collectives.py`).
JOINS = {"_RowBackward", "_ReduceBackward", "_GatherBackward", "_AllGatherBackward"}
DIVIDES = {"_ColumnBackward", "_ScatterBackward"}


def check_loss(loss: Tensor) -> None:
    """Follow the graph of `loss` back: divided activations must not reach it but through what joins them.

    Raises:
        RuntimeError: If the loss depends on this rank's piece of an activation.
    """
    todo: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    seen: set[tuple[Any, bool]] = set()
    while todo:
        node, inside = todo.pop()
        if node is None or (node, inside) in seen:
            continue
        seen.add((node, inside))
        name = node.name()
        along_sequence = name == "_RowBackward" and node.lengths is not None
        if not inside and (name in DIVIDES or along_sequence):
            raise RuntimeError(
                "the loss depends on an activation of which each rank holds only a piece (hidden features, attention"
                f" weights; met at {name.removesuffix('Backward')}), so it would differ from that of one process. Let"
                " the layer that makes it gather its output: plan={..., '<its path>': 'column_gather'}"
            )
        if name in JOINS and not along_sequence:
            inside = True
        elif name in DIVIDES:
            lengths = node.gradient.inputs.lengths if name == "_ColumnBackward" and node.gradient is not None else None
            inside = lengths is not None
        todo += [(following, inside) for following, _ in node.next_functions]


class _Audit(TorchFunctionMode):
    def __init__(self, module: nn.Module, sharding: Sharding) -> None:
        super().__init__()
        modules = dict(module.named_modules(remove_duplicate=False))
        divided = sharding.shards.keys() | sharding.partial
        self._names: dict[int, str] = {}
        self._users: dict[int, set[int]] = {}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for alias, parameter in module.named_parameters(remove_duplicate=False):
            if names[id(parameter)] in divided:
                self._names[id(parameter)] = names[id(parameter)]
                users = self._users.setdefault(id(parameter), set())
                users |= {id(modules[path]) for path in _around(alias, sharding.plan.styles)}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(result)):
            name = getattr(func, "__name__", str(func))
            inputs = args[:1] if name in CASTS else (args, kwargs)
            for leaf in tree_leaves(inputs):
                if id(leaf) in self._names and leaf is not result:
                    self._check(leaf, name)
        return result

    def _check(self, parameter: Tensor, function: str) -> None:
        users = self._users[id(parameter)]
        frame = sys._getframe(2)
        while frame is not None:
            if id(frame.f_locals.get("self")) in users:
                return
            frame = frame.f_back  # type: ignore[assignment]
        name = self._names[id(parameter)]
        owner = name.rpartition(".")[0]
        raise RuntimeError(
            f"the step computes with `{name}` outside of its layer (`{function}`), but each rank holds only a piece of"
            f" it, so the result would differ from that of one process. Keep that layer whole with plan={{...,"
            f" {owner!r}: 'replicate'}}, or leave what uses the parameter out of the step (the optimizer's"
            " `weight_decay` stands for a squared norm)"
        )


def _around(name: str, styled: Iterable[str]) -> list[str]:
    """Paths of the module that owns a parameter, and of the divided modules around it."""
    owner = name.rpartition(".")[0]
    return [owner, *(path for path in styled if owner == path or owner.startswith(f"{path}."))]
