"""The ring of torch's `context_parallel`, whose kernels of devices are replaced by those of CPUs.

torch's `context_parallel` has no rule for attention on a CPU, so its functions are called by hand.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch import Tensor
from torch.autograd import Function

from lightning_parallel.compat.torch import CPU_FLASH_ATTENTION, CPU_FLASH_ATTENTION_BACKWARD

__all__ = ["TorchRing"]


class TorchRing(Function):
    """Causal attention of positions that lie balanced: (B, H, L_r, E) -> the same."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, process_group: Any) -> Tensor:
        def kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Any:
            return (*CPU_FLASH_ATTENTION(query, key, value, 0.0, is_causal), None)

        out, log_sum, *_ = _theirs()._templated_ring_attention(process_group, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.process_group = process_group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        def kernel(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, **rest: Any) -> Any:
            is_causal = rest["is_causal"]
            return CPU_FLASH_ATTENTION_BACKWARD(grad_out, query, key, value, out, rest["logsumexp"], 0.0, is_causal)

        found = _theirs()._templated_ring_attention_backward(
            ctx.process_group, 2, kernel, grad, "grad_out", *ctx.saved_tensors, is_causal=True
        )
        return *found[:3], None


def _theirs() -> Any:
    folder = "torch.distributed.tensor.experimental"
    has_package = importlib.util.find_spec(f"{folder}._context_parallel") is not None  # in newer versions
    module: Any = importlib.import_module(
        f"{folder}._context_parallel._attention" if has_package else f"{folder}._attention"
    )
    module._cp_options.rotate_method = module._RotateMethod.ALL_TO_ALL
    return module
