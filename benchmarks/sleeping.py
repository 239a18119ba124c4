"""Layers that sleep: they take the time of a device that computes, but no core, so that a schedule shows its shape."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.pipeline.weight_gradients import weight_gradient_queue

__all__ = ["LiveBytes", "Sleeper", "pause"]

_WAKING_S = 1e-3


def pause(seconds: float) -> None:
    """Let exactly `seconds` pass: sleep, and watch the clock for the last moment, in which the system would wake."""
    end_s = time.perf_counter() + seconds
    if seconds > _WAKING_S:
        time.sleep(seconds - _WAKING_S)
    while time.perf_counter() < end_s:
        pass


class _Device:
    """The time of what would compute: what this layer itself takes on the host passes meanwhile."""

    def __init__(self) -> None:
        self.free_s = 0.0

    def start(self) -> None:
        self.free_s = time.perf_counter()

    def spend(self, seconds: float) -> None:
        self.free_s += seconds
        pause(self.free_s - time.perf_counter())


class Sleeper(nn.Module):
    """Multiplies its input by a weight, and takes its time.

        x ----> sleep I, back --> *  --> sleep F --> y
        weight -> sleep W, back -/

    The two halves of its backward are separate nodes of the graph, so that every library can split it.

    Args:
        forward_s: Seconds of F.
        input_gradient_s: Seconds of I.
        weight_gradient_s: Seconds of W.
        width: Features; a microbatch of n samples holds n x width numbers from F to the end of the backward.
    """

    def __init__(self, forward_s: float, input_gradient_s: float, weight_gradient_s: float, width: int = 8) -> None:
        super().__init__()
        self.forward_s, self.input_gradient_s = forward_s, input_gradient_s
        self.weight_gradient_s = weight_gradient_s
        self.weight = nn.Parameter(torch.ones(width))
        self.device = _Device()

    def forward(self, x: Tensor) -> Tensor:
        """(samples, width) -> the same."""
        self.device.start()
        x = _Through.apply(x, self.device, self.input_gradient_s)
        y = _Product.apply(x, _Weight.apply(self.weight, self.device, self.weight_gradient_s), self.device)
        self.device.spend(self.forward_s)
        return y


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, device: _Device) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.device = device
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.device.start()
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0), None


class _Through(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: _Device, backward_s: float) -> Tensor:
        ctx.device, ctx.seconds = device, backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.device.spend(ctx.seconds)
        return gradient, None, None


class _Weight(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, device: _Device, backward_s: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.device, ctx.seconds = device, backward_s
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (weight,) = ctx.saved_tensors
        device, seconds = ctx.device, ctx.seconds

        def compute() -> Tensor:
            device.start()
            device.spend(seconds)
            return gradient

        queue = weight_gradient_queue()
        if queue is not None and queue.defer(weight, compute):
            return None, None, None
        device.spend(seconds)
        return gradient, None, None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside the block and still alive.

    Attributes:
        peak: Most that was alive at once, after any operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        # Storages are asked anew each time: FSDP frees parameters by changing the size of their storage.
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def now(self) -> int:
        """Alive at present."""
        return sum(storage.nbytes() for known in list(self._alive.values()) if (storage := known()) is not None)

    def forget_peak(self) -> None:
        """Let the peak begin anew."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {storage._cdata for storage in _storages((args, kwargs))}
        made = [storage for storage in _storages(result) if storage._cdata not in before]
        for storage in made:
            self._note(storage)
        # To ask all storages takes longer than most operators.
        if made:
            self.peak = max(self.peak, self.now)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage)
            weakref.finalize(storage, self._alive.pop, key, None)


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(value):
        # Operators of a DTensor run on its local tensor, out of sight.
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if type(local) in (Tensor, nn.Parameter) and local.device.type != "meta":
            yield local.untyped_storage()
