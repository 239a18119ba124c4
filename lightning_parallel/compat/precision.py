"""Private names of PyTorch about precision: gradient scaling, autocast, norms and factors of many tensors at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from lightning_parallel.compat import Patches

__all__ = [
    "TOTAL_NORM",
    "clip_grad",
    "device_of_scaler",
    "kept_casts",
    "norms_of",
    "patch_unscale",
    "scale_all",
    "shared_casts",
    "uses_tf32",
]

# The function inside torch's `clip_grad_norm_` that takes the norm of a list of gradients. Only its replacement reaches
# modules that call `clip_grad_norm_` themselves.
TOTAL_NORM = "_get_total_norm" if hasattr(clip_grad, "_get_total_norm") else "get_total_norm"


def norms_of(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """Return the norm of each tensor, in one kernel for all on CUDA; the public function takes one tensor."""
    return list(torch._foreach_norm(tensors, norm_type)) if tensors else []


@cache
def _keeps_casts_apart() -> bool:
    """Tell whether autocast never reuses a cast made without gradients where gradients are on.

    Otherwise the parameter would get no gradient.
    """
    # Tried, because torch tells it nowhere: the first pass caches a cast without gradients, the second pass needs one.
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        weight = torch.ones(1, 1, dtype=torch.float32, device="cpu", requires_grad=True)
        for has_gradients in (False, True):
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(has_gradients):
                output = nn.functional.linear(weight.detach(), weight)
        if output.requires_grad:
            output.backward()
        return weight.grad is not None


@contextmanager
def shared_casts(device: torch.device) -> Iterator[None]:
    """Let autocast contexts in the block share the casts of parameters.

    Autocast forgets its casts when the outermost context ends. This context is the outermost one, and casts nothing.
    """
    with torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def kept_casts() -> Iterator[None]:
    """Let autocast keep the casts of parameters that it makes in the block; Lightning's plugins keep none."""
    before = torch.is_autocast_cache_enabled()
    # Off in versions of torch that would reuse a cast without gradients: a parameter would then get no gradient.
    torch.set_autocast_cache_enabled(_keeps_casts_apart())
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def scale_all(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place, in one kernel for many tensors on CUDA, which no public function offers."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (dtype, device), alike in kinds.items():
        torch._foreach_mul_(alike, factor.to(device, dtype))


def patch_unscale(scaler: Any, change: Any, patches: Patches) -> None:
    """Let `change` see and correct the overflow by device that a `GradScaler` finds when it unscales gradients.

    The scaler decides without a hook whether it skips the step.
    """
    unscale = scaler._unscale_grads_
    patches.replace(scaler, "_unscale_grads_", lambda *args, **kwargs: change(unscale(*args, **kwargs)))


def device_of_scaler(scaler: Any) -> str:
    """Return the device type of a `GradScaler`; its constructor takes the type, and no getter returns it."""
    return scaler._device


def uses_tf32() -> bool:
    """Tell whether products of single precision run on tensor cores of CUDA, several times as fast."""
    # The switch of torch 2.9 and later comes first: once it is used, the older switches raise.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return precision == "tf32" if precision not in (None, "none") else torch.get_float32_matmul_precision() != "highest"
