"""Tells the user about a compressor when a run begins: its savings, its memory, and optimizers that do not fit it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.compat.lightning import tell
from lightning_parallel.compression import Dense, Reducer
from lightning_parallel.compression.compressor_state import REPLICATED
from lightning_parallel.compression.reducer import LATE
from lightning_parallel.tracing.spans import bytes_text, count_text

__all__ = ["tell_costs", "warn_of_misfits"]


def tell_costs(reducer: Reducer, module: nn.Module, replicas: int, owners: int = 1, steps: int = 1) -> None:
    """Print, on rank zero, the bytes per optimizer step with and without compression, and the bytes of memory.

    Args:
        reducer: The compressor.
        module: The module, or this rank's part of it.
        replicas: Ranks that hold the same parameters.
        owners: Ranks of a node that divide the parameters among them.
        steps: Optimizer steps between two reductions.
    """
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    if replicas < 2 or not trained:
        return
    # Per dtype: gradients travel in their own dtype, and `wire_bytes` takes one dtype.
    kinds = {value.dtype for value in trained.values()}
    sent = dense = 0.0
    for dtype in kinds:
        shapes = {name: tuple(value.shape) for name, value in trained.items() if value.dtype == dtype}
        sent += reducer.wire_bytes(shapes, replicas, dtype=dtype) / steps
        dense += Dense().wire_bytes(shapes, replicas, dtype=dtype)
    kept = sum(_kept_bytes(reducer, name, value) for name, value in trained.items())
    memory = f"; error-feedback buffer {bytes_text(kept / owners)}" if kept else ""
    tell(
        f"{reducer!r}: {bytes_text(sent / owners)} sent per rank and step{' between nodes' if owners > 1 else ''}"
        f" instead of {bytes_text(dense / owners)} ({count_text(dense / max(1.0, sent))}x less){memory}."
    )


def _kept_bytes(reducer: Reducer, name: str, value: Tensor) -> int:
    """Return the bytes of memory in the shape of a parameter, without factors and other small slots."""
    slots = getattr(reducer.method(name, tuple(value.shape), LATE), "slots", None) or frozenset()
    width = max(4, value.element_size())
    return len(slots - REPLICATED) * value.numel() * width


def warn_of_misfits(reducer: Reducer, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Warn, on rank zero, of optimizers that do not fit the compressor; with measured figures."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names = {id(value): name for name, value in module.named_parameters()}
    told: set[str] = set()
    for group in groups:
        for value in group["params"]:
            method = reducer.method(names.get(id(value), ""), tuple(value.shape), LATE)
            for kind, text in _misfits(method, group):
                if kind not in told:
                    told.add(kind)
                    rank_zero_warn(text)


def _misfits(method: Any, group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kind = type(method).__name__
    betas = group.get("betas")
    momentum = group.get("momentum") or (betas[0] if betas else 0)
    own = getattr(getattr(method, "feedback", None), "momentum", 0)
    if own and momentum:
        yield (
            f"{kind} momentum",
            f"`{method!r}` applies a momentum of {own} before it selects, and the optimizer applies {momentum} after"
            " it, so every gradient is accelerated twice. Give the optimizer no momentum (`momentum=0`, `betas=(0,"
            " ...)`), or leave `momentum` out of the compressor.",
        )
    # Adam and its relatives divide by the history of each element, and call a setting `eps`.
    loss = getattr(method, "loss_under_adam", "")
    if loss and betas and "eps" in group:
        yield (
            kind,
            f"`{method!r}` works poorly with Adam-type optimizers, whose per-element statistics see mostly zeros:"
            f" the loss of a small GPT was {loss}. Use SGD with this compressor. Or use `PowerSGD(16)`, `Quantize(8)`"
            " or `Quantize(4)`, which were within 1 %.",
        )
