"""Operations of a model, counted as they run, and the most that a device can do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from lightning_parallel.compat.precision import uses_tf32
from lightning_parallel.compat.torch import (
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    TorchDispatchMode,
    current_autograd_node,
    is_backward_running,
    overload_packet,
)
from lightning_parallel.planner.hardware import data_sheet_flops

__all__ = ["ModelFlops", "PeakFlops", "peak_flops_of"]

PeakFlops = tuple[float, str]
"""Operations per second of a device, and where the figure comes from."""


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


_FORMULAS: dict[Any, Callable[..., int]] = {
    CPU_FLASH_ATTENTION: _attention,
    CPU_FLASH_ATTENTION_BACKWARD: _attention_backward,
}
"""Operations that torch's table lacks."""

_TORCHS_OWN = ("aten", "prim", "prims", "c10d", "c10d_functional", "profiler", "rngprims", "inductor", "debugprims")
"""Namespaces of operators that hide no kernels of a user's own."""

_MULTIPLIES = re.compile(r"(mm|conv|convolution|attention|rnn|lstm|gru|fft|cdist|trilinear)(?![a-z])")
"""Names of torch's operators that take many products for each number they return."""


class ModelFlops(TorchDispatchMode):
    """Counts the operations of matrix products, convolutions and attention inside the block, by torch's formulas.

    Forward and backward are counted as they run: parameters that are frozen need no gradient. Unlike in
    `FlopCounterMode`, what activation checkpointing computes again is left out, and so is what hooks on parameters
    compute, such as compressed gradients, and tensors without data. Of a backward with `create_graph=True`, as for a
    penalty on gradients, only what its own backward computes is counted: within, nothing tells its gradients, which are
    computed with gradients of their own, from what checkpointing computes again.

    Attributes:
        total: Operations so far; a multiplication and its addition are two.
        unknown: Operators that multiply matrices, or that are not torch's own, for which there is no formula.
        paused: Count nothing now but backward: gradients are reduced, or parameters updated, by matrix products that
            are not the model's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.unknown: set[str] = set()
        self.paused = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A tensor subclass has to say first which plain tensors it stands for: those are counted.
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not self._is_of_model() or _is_meta(out):
            return out
        operator = overload_packet(func)
        formula = _FORMULAS.get(operator) or flop_registry.get(operator)
        if formula is None:
            self._note(func)
            return out
        count = formula(*args, **(kwargs or {}), out_val=out)
        # The backward of fused attention takes the product of queries and keys again, the first of its five.
        self.total += count * 4 // 5 if "attention" in func.name() and "backward" in func.name() else count
        return out

    def _is_of_model(self) -> bool:
        if not is_backward_running():
            return not self.paused
        # Gradients are computed without gradients of their own, and what is computed again is computed with them.
        node = current_autograd_node()
        return node is not None and "AccumulateGrad" not in node.name() and not torch.is_grad_enabled()

    def _note(self, func: Any) -> None:
        namespace, _, name = func.name().partition("::")
        if namespace.strip("_") not in _TORCHS_OWN or (namespace == "aten" and _MULTIPLIES.search(name)):
            self.unknown.add(f"{namespace}::{name.partition('.')[0]}")


def _is_meta(out: Any) -> bool:
    first = out[0] if isinstance(out, tuple) else out
    return isinstance(first, Tensor) and first.is_meta


def peak_flops_of(device: torch.device, dtype: torch.dtype) -> PeakFlops | None:
    """Return peak rate of `device` in dense matrix products of `dtype`; None if it is not known."""
    if device.type == "cpu":
        return _measured_flops(dtype), "calibrated by a matrix product"
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    kind = "tf32" if dtype is torch.float32 and uses_tf32() else str(dtype).removeprefix("torch.")
    peaks = data_sheet_flops(name)
    return (peaks[kind], f"data sheet of {name}, dense {kind}") if kind in peaks else None


def _measured_flops(dtype: torch.dtype, size: int = 512, seconds: float = 0.05) -> float:
    """Return the best rate of a square matrix product within some seconds."""
    matrix = torch.ones(size, size, dtype=dtype)
    matrix @ matrix  # the first one allocates
    fastest = float("inf")
    until = time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        matrix @ matrix
        # Other load only ever makes a product slower.
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest
