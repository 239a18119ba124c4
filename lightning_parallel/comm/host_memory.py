"""Copies tensors of a device to host memory and back, beside the work of the device (`cpu_offload`)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostCopies"]


class HostCopies:
    """Copies between a device and the host, each direction in order. For tensors on the CPU, it copies at once.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        # Streams apart from the computation and from each other: kernels and both directions run at the same time.
        self._away = torch.cuda.Stream(device) if is_cuda else None
        self._back = torch.cuda.Stream(device) if is_cuda else None

    def to_host(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """Begin to copy a tensor to host memory; the result is valid after `arrive`.

        Args:
            tensor: The tensor.
            into: Host memory from an earlier call, whose copies to the device were joined.
        """
        tensor = tensor.detach()
        if into is None:
            # Pinned: from other memory, a copy is not asynchronous.
            into = torch.empty_like(tensor, device="cpu", pin_memory=self._away is not None)
        _copy(into, tensor, tensor, self._away)
        return into

    def to_device(self, host: Tensor, into: Tensor) -> None:
        """Begin to copy host memory into a tensor of the device; kernels read the tensor after `join`.

        The host must not write into the memory before a later `to_host` into it has arrived.
        """
        _copy(into, host, into, self._back)

    def mark(self) -> torch.cuda.Event | None:
        """Return a mark after the copies to the host that have begun."""
        return None if self._away is None else self._away.record_event()

    def arrive(self, mark: torch.cuda.Event | None) -> None:
        """Let the host wait for the copies to the host before a mark."""
        if mark is not None:
            mark.synchronize()

    def join(self) -> None:
        """Let kernels that are launched from now on wait for all copies."""
        for stream in (self._away, self._back):
            if stream is not None:
                torch.cuda.current_stream(stream.device).wait_stream(stream)


def _copy(target: Tensor, source: Tensor, on_device: Tensor, stream: torch.cuda.Stream | None) -> None:
    if stream is None:
        target.copy_(source)
        return
    # Kernels that write the source, or read the target, may still be in the queue of the current stream.
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    # The allocator must not give this memory to other tensors before the copy has ended.
    on_device.record_stream(stream)
