"""The content of a message between stages: layer arguments that the next stage lacks, and skip connections."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_parallel.compat import users_line
from lightning_parallel.pipeline.skips import Skip

__all__ = ["Message", "MessageLayout", "MessageLayouts", "TensorSpec", "line_of_step"]

_SMALL_BYTES = 1 << 16  # up to this size a separate message takes longer than a copy


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor on the wire, and whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """Size on the wire."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a buffer that can be used in training, even inside Lightning's inference mode."""
        # Receives are posted ahead: the buffer of a training step may be made while inference mode is still on.
        with torch.inference_mode(False):
            return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class MessageLayout:
    """The tensors that pass from one stage to the next, which are arguments of a layer.

    Attributes:
        index: The layer.
        positions: Which leaves of its arguments.
        tensors: Their shapes and dtypes.
        line: The line of the step that calls it; see `line_of_step`.
        skips: The skip connections whose tensors follow the arguments.
        is_failure: Whether it stands for tensors that a stage cannot make, because a step has failed before. It has
            no tensors.
    """

    index: int
    positions: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    line: str = ""
    skips: tuple[Skip, ...] = ()
    is_failure: bool = False

    @property
    def packed_bytes(self) -> int:
        """Bytes of the tensors if they travel in the header's message, 0 if they travel separately."""
        num_bytes = sum(spec.num_bytes for spec in self.tensors)
        return num_bytes if num_bytes <= _SMALL_BYTES else 0


def line_of_step() -> str:
    """Name the line that runs of the user's step: see `users_line`."""
    is_inside = False

    def is_end(frame: FrameType) -> bool:
        nonlocal is_inside
        # The runtime calls the step, which calls the layers that the runtime runs. The caller may be that runtime.
        name = frame.f_globals.get("__name__")
        was_inside, is_inside = is_inside, is_inside or name not in (_RUNTIME, __name__)
        return name == _RUNTIME and was_inside

    return users_line(is_end)


_RUNTIME = "lightning_parallel.pipeline.runtime"


class Message(NamedTuple):
    """Tensors that pass from stage to stage, and their layout."""

    layout: MessageLayout
    tensors: tuple[Tensor, ...]


@dataclass
class MessageLayouts:
    """The last layout sent by and received by each stage; kept from step to step."""

    sent: dict[int, MessageLayout] = field(default_factory=dict)
    received: dict[int, MessageLayout] = field(default_factory=dict)
