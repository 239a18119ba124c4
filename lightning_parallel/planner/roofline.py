"""The roofline model: counts operations while they run, and predicts their time on a device that need not exist here.

The time of an operation is the longest of three times: its products at the device's peak, its tensors through the
device's memory, and its launch.

Source: Williams, Waterman and Patterson, https://doi.org/10.1145/1498765.1498785
"""

from __future__ import annotations

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
    SOFTMAX,
    SOFTMAX_BACKWARD,
    DataDependentOutputException,
    TorchDispatchMode,
    overload_packet,
    pytree,
    schema_of,
)
from lightning_parallel.planner.context_costs import AttentionSizes, AttentionWork
from lightning_parallel.planner.hardware import Device

__all__ = ["Roofline", "flops_of"]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *_: Any, **__: Any
) -> int:
    return _computed(sdpa_flop_count(query.shape, key.shape, value.shape), is_causal)


def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    **__: Any,
) -> int:
    return _computed(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape), is_causal)


def _computed(flops: int, is_causal: bool) -> int:
    # Kernels leave out the blocks above the diagonal, which torch's count includes.
    return flops // 2 if is_causal else flops


_FORMULAS: dict[Any, Callable[..., int]] = {
    CPU_FLASH_ATTENTION: _attention,
    CPU_FLASH_ATTENTION_BACKWARD: _attention_backward,
}
"""Formulas that torch's table lacks."""


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Return the operations of a call, or None without a formula; a multiplication and its addition count as two."""
    operator = overload_packet(func)
    formula = _FORMULAS.get(operator) or flop_registry.get(operator)
    return None if formula is None else formula(*args, **(kwargs or {}), out_val=out)


class Roofline(TorchDispatchMode):
    """Adds up the time on `device` of all operations inside the block, forward and backward.

    If tensors have no data, a step that asks for a value (`item()`, `if mask.all()`) gets False, or one.

    Attributes:
        seconds: Seconds so far.
        flops: Operations of products so far.
        has_guessed: Whether a step asked for a value without data.
        attention: Forward and backward calls of attention so far.
        attended: The sizes of these calls.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.seconds = 0.0
        self.flops = 0
        self.has_guessed = False
        self.attention = (AttentionWork(), AttentionWork())
        self.attended = AttentionSizes()
        # The factors of the last product of several matrices, and of the scores of attention by their shape.
        self._product: tuple[Tensor, ...] = ()
        self._scores: dict[torch.Size, tuple[int, int, int]] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            self.has_guessed = True
            # Checks such as `if x.isnan().any()` are mostly False. A number may become a size or a divisor, so not 0.
            kind = args[0].dtype
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        # A query such as `tensor.device` costs nothing.
        if func.namespace == "prim":
            return out
        # Neither does a view, but a write into an argument does.
        if any(value.alias_info and not value.alias_info.is_write for value in schema_of(func).returns):
            return out
        flops = flops_of(func, args, kwargs, out) or 0
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        if not tensors:
            return out
        kind = str(next((leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)), tensors[0]).dtype)
        kind = kind.removeprefix("torch.")
        if kind == "float32" and "tf32" in self.device.flops and uses_tf32():
            kind = "tf32"
        moved = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
        products_s = flops / self.device.flops_per_s(kind) if flops else 0.0
        seconds = max(products_s, moved / self.device.bytes_per_s, self.device.launch_s)
        self.seconds += seconds
        self.flops += flops
        self._note_attention(overload_packet(func), args, kwargs or {}, out, seconds)
        return out

    def _note_attention(self, operator: Any, args: Any, kwargs: Any, out: Any, seconds: float) -> None:
        """Count a call of attention: of one kernel, or of a softmax of products of queries and keys."""
        if operator in (CPU_FLASH_ATTENTION, CPU_FLASH_ATTENTION_BACKWARD):
            is_backward = operator is CPU_FLASH_ATTENTION_BACKWARD
            query, key, value = args[1:4] if is_backward else args[:3]
            sizes = AttentionSizes(query.shape[-3], key.shape[-3], query.shape[-2], kwargs.get("attn_mask") is not None)
            keys = key.numel() + value.numel()
            self._count_attention(is_backward, sizes, 2 * query.numel(), keys, query.element_size(), seconds)
        elif operator in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self._product = (*args[-2:], out)
        elif operator is SOFTMAX and self._product and args[0].dim() > 2:
            query, key, scores = self._product
            # Other softmaxes, as of a router, have no such product before them.
            if scores.numel() == args[0].numel() and scores.shape[-1] == args[0].shape[-1]:
                self._scores[args[0].shape] = 2 * query.numel(), 2 * key.numel(), query.element_size()
                self._count_scores(False, args[0].shape)
        elif operator is SOFTMAX_BACKWARD and args[0].shape in self._scores:
            self._count_scores(True, args[0].shape)

    def _count_scores(self, is_backward: bool, shape: torch.Size) -> None:
        sizes = AttentionSizes(shape[-3], shape[-3], shape[-2], True)
        self._count_attention(is_backward, sizes, *self._scores[shape], 0.0)

    def _count_attention(
        self, is_backward: bool, sizes: AttentionSizes, queries: int, keys: int, width: int, seconds: float
    ) -> None:
        """Add a call, with elements of queries and results, and of keys and values."""
        both = list(self.attention)
        call = 1, width * queries, width * keys, max(4, width) * keys, seconds
        both[is_backward] = both[is_backward].plus(*call)
        self.attention = both[0], both[1]
        self.attended = self.attended.least(sizes)
