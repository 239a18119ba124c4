"""Optimizer steps in host memory, one bucket of parameters after another (`cpu_offload`).

    to the host      [ 0 ][ 1 ][ 2 ]            parameters and gradients
    step                  [ 0 ]   [ 1 ]   [ 2 ]
    to the device                 [ 0 ]   [ 1 ]   [ 2 ]

The copies begin only when the optimizer steps: until then, clipping, loss scaling and hooks may change gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.comm import fill_buckets
from lightning_parallel.comm.host_memory import HostCopies
from lightning_parallel.compat.torch import DisableTorchFunctionSubclass
from lightning_parallel.data_parallel.bucketed_reducer import BUCKET_BYTES

__all__ = ["HostSteps", "only_parameters", "put_data"]


class HostSteps:
    """Gives an optimizer copies of its parameters in host memory for a step.

    Args:
        device: The device of the parameters.

    Attributes:
        in_turns: The optimizers whose steps may be called for one bucket after another; others step once.
    """

    def __init__(self, device: torch.device) -> None:
        self.in_turns: set[Optimizer] = set()
        self._copies = HostCopies(device)
        # By parameter: host memory for its data, and for its gradient.
        self._memory: dict[Tensor, tuple[Tensor, Tensor | None]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the copies in host memory."""
        return sum(one.nbytes for pair in self._memory.values() for one in pair if one is not None)

    def keep(self, parameters: Collection[int]) -> None:
        """Free the host memory of all parameters but these, given by `id`."""
        self._memory = {one: memory for one, memory in self._memory.items() if id(one) in parameters}

    def turns(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Yield for each call of a step, while the parameters of one bucket and their gradients are in host memory.

        After an error, the device keeps the values before the step of all buckets whose turn has not ended.
        """
        held = {parameter: (parameter.data, parameter.grad) for parameter in parameters}
        buckets = self._buckets([*held], optimizer in self.in_turns)
        marks = []
        for bucket in buckets:
            for parameter in bucket:
                self._send(parameter, *held[parameter])
            marks.append(self._copies.mark())
        try:
            for number, (bucket, mark) in enumerate(zip(buckets, marks)):
                # The host reads these copies next.
                self._copies.arrive(mark)
                for parameter in bucket:
                    mine, theirs = self._memory[parameter]
                    put_data(parameter, mine, None if held[parameter][1] is None else theirs)
                # Parameters without a gradient stay in the first turn: some optimizers look at them.
                with only_parameters(optimizer, bucket, None if number else held):
                    yield
                for parameter in bucket:
                    updated = parameter.data
                    put_data(parameter, *held[parameter])
                    # The next turn steps meanwhile.
                    self._copies.to_device(updated, parameter.data)
        finally:
            for parameter, (data, gradient) in held.items():
                put_data(parameter, data, gradient)
            self._copies.join()

    def _buckets(self, parameters: list[Tensor], in_turns: bool) -> list[list[Tensor]]:
        if not in_turns or not parameters:
            return [parameters]
        sizes = {str(index): parameter.nbytes for index, parameter in enumerate(parameters)}
        return [[parameters[int(name)] for name in names] for names in fill_buckets(sizes, BUCKET_BYTES)]

    def _send(self, parameter: Tensor, data: Tensor, gradient: Tensor | None) -> None:
        known = self._memory.get(parameter)
        fits = known is not None and known[0].shape == data.shape and known[0].dtype == data.dtype
        mine, theirs = known if known is not None and fits else (None, None)
        if gradient is not None:
            theirs = self._copies.to_host(gradient, theirs)
        # In each step: other code may have written into the parameter since.
        self._memory[parameter] = self._copies.to_host(data, mine), theirs


@contextmanager
def only_parameters(optimizer: Optimizer, mine: Iterable[Tensor], shared: Collection[Tensor] | None) -> Iterator[None]:
    """Leave some parameters in the groups of an optimizer inside the block: some steps expect a gradient for each.

    Args:
        optimizer: The optimizer.
        mine: The parameters that stay.
        shared: Parameters of several turns, without which all others stay as well; None for no others.
    """
    groups = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
    stays = set(mine)
    # In place, because optimizers keep references to the lists.
    for params, every in groups:
        params[:] = [each for each in every if each in stays or (shared is not None and each not in shared)]
    try:
        yield
    finally:
        for params, every in groups:
            params[:] = every


def put_data(parameter: Tensor, data: Tensor, gradient: Tensor | None) -> None:
    """Give a parameter other data, and a gradient of the same shape."""
    with DisableTorchFunctionSubclass():
        # Cleared first: a gradient must have the shape of its parameter at any time.
        parameter.grad = None
        parameter.data = data
        parameter.grad = gradient
