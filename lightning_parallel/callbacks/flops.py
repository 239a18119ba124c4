"""Floating-point operations: how many a forward takes, and how many a device can do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from typing_extensions import override

__all__ = ["ForwardFlops", "Peak", "peak_of"]

Peak = tuple[float, str]
"""Operations per second, and where the figure comes from."""

aten = torch.ops.aten


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


_FORMULAS: dict[Any, Callable[..., int]] = {aten._scaled_dot_product_flash_attention_for_cpu: _attention}


class ForwardFlops(TorchDispatchMode):
    """Counts the operations of matrix products, convolutions and attention inside the block, as torch counts them.

    Backward is left out, and with it what activation checkpointing computes again; so are tensors without data.

    Attributes:
        total: Operations so far; a multiplication and its addition are two.
        paused: Count nothing now: gradients are reduced, or parameters updated, with matrix products of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.paused = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a subclass says first which plain tensors it stands for
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket) or _FORMULAS.get(func._overloadpacket)
        forward = not self.paused and torch._C._current_graph_task_id() == -1
        if formula is not None and forward and not _is_meta(out):
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _is_meta(out: Any) -> bool:
    first = out[0] if isinstance(out, tuple) else out
    return isinstance(first, Tensor) and first.is_meta


_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bfloat16": 2250e12, "float16": 2250e12}),
    ("H200", {"bfloat16": 989.4e12, "float16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12}),
    ("H100 PCIe", {"bfloat16": 756e12, "float16": 756e12, "tf32": 378e12, "float32": 51.2e12}),
    ("H100 NVL", {"bfloat16": 835.5e12, "float16": 835.5e12, "tf32": 417.8e12, "float32": 60e12}),
    ("H100", {"bfloat16": 989.4e12, "float16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12}),
    ("A100", {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12}),
    ("L40S", {"bfloat16": 362e12, "float16": 362e12, "tf32": 183e12, "float32": 91.6e12}),
    ("L4", {"bfloat16": 121e12, "float16": 121e12, "tf32": 60e12, "float32": 30.3e12}),
    ("V100", {"float16": 125e12, "float32": 15.7e12}),
    ("T4", {"float16": 65e12, "float32": 8.1e12}),
    ("MI300X", {"bfloat16": 1307.4e12, "float16": 1307.4e12, "float32": 163.4e12}),
)
"""Dense matrix products per data sheet, by a part of the device's name, the more specific first."""


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """What `device` can do in matrix products of `dtype`: from a table for GPUs, by trying on CPU, None if unknown."""
    if device.type == "cpu":
        return _tried(dtype), "calibrated by a matrix product"
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    kind = str(dtype).removeprefix("torch.")
    if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        kind = "tf32"
    peaks = next((peaks for part, peaks in _PEAKS if re.search(rf"\b{part}\b", name)), {})
    return (peaks[kind], f"data sheet of {name}, dense {kind}") if kind in peaks else None


def _tried(dtype: torch.dtype, size: int = 512, seconds: float = 0.05) -> float:
    """The best rate of a square matrix product in so many seconds."""
    matrix = torch.ones(size, size, dtype=dtype)
    matrix @ matrix
    fastest, until = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        matrix @ matrix
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest
