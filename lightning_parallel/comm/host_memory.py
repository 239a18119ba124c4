"""Copies tensors of a device to host memory and back, beside the work of the device (`cpu_offload`)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostCopies"]


class HostCopies:
    """Copies between a device and the host, in order. For tensors on the CPU, it copies at once.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        # A stream apart from the computation, so that kernels and copies run at the same time.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """Begin to copy a tensor to host memory; the result is valid after `arrive`.

        Args:
            tensor: The tensor.
            into: Host memory from an earlier call.
        """
        tensor = tensor.detach()
        if into is None:
            # Pinned: from other memory, a copy is not asynchronous.
            into = torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)
        self._copy(into, tensor, tensor)
        return into

    def to_device(self, host: Tensor, into: Tensor) -> None:
        """Begin to copy host memory into a tensor of the device; kernels read the tensor after `join`.

        The host must not write into the memory before a later `arrive`.
        """
        self._copy(into, host, into)

    def _copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        # Kernels that write the source, or read the target, may still be in the queue of the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # The allocator must not give this memory to other tensors before the copy has ended.
        on_device.record_stream(self._stream)

    def arrive(self) -> None:
        """Let the host wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self) -> None:
        """Let kernels that are launched from now on wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
