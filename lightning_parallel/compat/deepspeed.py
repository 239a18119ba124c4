"""Private names of DeepSpeed that the library cannot do without, each with the reason.

DeepSpeed has no public hook for the communication of gradients: it averages them in one method per kind of optimizer,
and this module replaces that method on the object. The names belong to DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.compat import Patches

__all__ = [
    "disable_shared_memory_kernel",
    "gradients_of_engine",
    "has_overflow_check",
    "is_zero_optimizer",
    "loss_scale_of",
    "parameters_of_bucket",
    "remove_accumulation_hooks",
    "replace_bucket_reduction",
    "replace_fallback_reduction",
]

# -- compression: where gradients are averaged -------------------------------------------------------------------------


def is_zero_optimizer(optimizer: Any) -> bool:
    """Return whether `optimizer` belongs to ZeRO 1 or 2, which fills buckets while backward runs."""
    # By a method that only ZeRO 1 and 2 have: the class could be named only after an import of DeepSpeed.
    return hasattr(optimizer, "gradient_reduction_w_predivide")


def has_overflow_check(optimizer: Any) -> bool:
    """Return whether `optimizer` belongs to DeepSpeed, and so skips steps whose gradients are not finite."""
    return hasattr(optimizer, "overflow")


def loss_scale_of(engine: Any) -> float:
    """Return the number that DeepSpeed multiplied the loss by."""
    return float(getattr(engine.optimizer, "loss_scale", 1.0))


def replace_bucket_reduction(
    engine: Any, reduce_bucket: Callable[[Tensor, torch.dtype], Tensor], patches: Patches
) -> None:
    """Have `reduce_bucket(flat, dtype)` replace a bucket of ZeRO 1 or 2 by its mean."""
    optimizer = engine.optimizer
    patches.replace(optimizer, "reduce_scatter", False)  # each rank would get the mean of its partition only
    patches.replace(optimizer, "gradient_reduction_w_predivide", reduce_bucket)
    patches.replace(optimizer, "check_grad_overflow", True)  # the optimizer then skips the steps that were not applied


def replace_fallback_reduction(
    engine: Any, reduce_all: Callable[..., None], end_step: Callable[[], bool], patches: Patches
) -> None:
    """Have `reduce_all` average the gradients of an engine without ZeRO after backward, and `end_step` end the step."""
    clip = engine.clip_fp32_gradients

    def clip_if_applied() -> None:
        if end_step():  # DeepSpeed's own clipping fails where no gradient is left
            clip()

    patches.replace(engine, "buffered_allreduce_fallback", reduce_all)
    patches.replace(engine, "clip_fp32_gradients", clip_if_applied)


def parameters_of_bucket(optimizer: Any, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the parameters whose gradients lie in the bucket of `dtype` that is being reduced, in order."""
    for group, index, _ in optimizer.ipg_buckets[dtype].params:
        yield optimizer.bit16_groups[group][index]


def gradients_of_engine(engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all parameters of an engine without ZeRO, with their gradients.

    Unused parameters get a gradient of zeros, as in DeepSpeed, so that all ranks yield the same parameters.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "get_grads_for_reduction"):  # bf16 with gradients accumulated in fp32
        for parameters, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients):
            for parameter, gradient in zip(parameters, gradients):
                yield parameter, gradient.view(parameter.shape)
        return
    # Gives unused parameters their zeros.
    engine._get_gradients_for_reduction()
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            yield parameter, parameter.grad


# -- strategies: DeepSpeed's work around training ----------------------------------------------------------------------


def disable_shared_memory_kernel() -> None:
    """Mark the CPU kernel for communication in shared memory as impossible to compile.

    DeepSpeed compiles the kernel when training starts, although only inference uses it. A machine without a compiler
    would fail there. DeepSpeed reads a table of the kernels that it can compile, and has no setter for the table.
    """
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def remove_accumulation_hooks(optimizer: Any) -> None:
    """Remove the hooks by which ZeRO sees gradients accumulate: they would also run in the next training."""
    for hook in getattr(optimizer, "_grad_acc_hooks", ()):
        hook.remove()
