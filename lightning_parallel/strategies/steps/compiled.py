"""Compiles repeated layers (`compile_layers=True`), also in stages and shards, and under recomputation."""

from __future__ import annotations

import torch
from torch import nn

from lightning_parallel.compat.torch import CALLS, AroundCalls, compiled_call_of
from lightning_parallel.pipeline.recomputation import repeated_layers
from lightning_parallel.tensor.sharded import CompiledLayer

__all__ = ["compile_layers"]


def compile_layers(module: nn.Module, is_on: bool, path: str, device: torch.device) -> None:
    """Compile the repeated layers of this rank from now on, or no layer.

    Call it before `recompute` and `tile_modules`, whose wrappers run the compiled layers.

    Args:
        module: The module, divided.
        is_on: Whether the run compiles layers at all.
        path: Dotted name of the container of the layers, or `auto`; commas join several.
        device: Where they compute.

    Raises:
        ValueError: If there are no repeated layers.
    """
    for child in module.modules():
        around = vars(child).get(CALLS)
        found = around.compiled if isinstance(around, AroundCalls) else around
        if isinstance(found, CompiledLayer):
            vars(child)[CALLS] = None
    if not is_on:
        return
    for layer in dict.fromkeys(repeated_layers(module, path).layers):
        # A pipeline has replaced the layers of other stages. The user may have compiled a layer.
        if next(layer.parameters(), None) is not None and compiled_call_of(layer) is None:
            vars(layer)[CALLS] = CompiledLayer(layer, device)
