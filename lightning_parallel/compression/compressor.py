"""Compressors: reducers with one method for all tensors, and the plain mean for those not worth compressing."""

from __future__ import annotations

import abc
import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from lightning_parallel.compression.arguments import check_fraction, check_integer
from lightning_parallel.compression.feedback import Feedback, FeedbackName, GradientBlock
from lightning_parallel.compression.reducer import Method, Reducer
from lightning_parallel.compression.wire import (
    AllReduceRequest,
    Codec,
    Exact,
    ReduceScatterRequest,
    Requests,
    StepContext,
    Traffic,
    split_by_rank,
)

__all__ = ["Compressor", "Dense"]

_OF_THE_OUTER = {"feedback", "decay", "start_step", "min_numel"}  # what an encoding of values has no use for


class Compressor(Reducer, Method):
    """A reducer that treats all tensors alike; the base of what users construct.

    `a | b` sends what `a` selects encoded by `b`; the error feedback is then that of `a`.

    Args:
        feedback: Error feedback: None, `classic`, `decayed` or `ef21`.
        decay: How much of the old residual `decayed` keeps, in [0, 1); 0.5 when omitted.
        start_step: Steps with plain means before compression begins.
        min_numel: Tensors with fewer elements, and those of less than two dimensions, are averaged as they are.
        values: Encoding of what is sent, as `| values` would set it.
        momentum: Momentum correction; the optimizer must then have none.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range, or a combination makes no sense.
    """

    codecs: ClassVar[tuple[str, ...]] = ()  # names of the classes allowed as `values`
    own_slots: ClassVar[frozenset[str]] = frozenset()  # in memory, besides those of the feedback

    def __init__(
        self,
        feedback: Optional[FeedbackName],
        decay: Optional[float] = None,
        start_step: int = 0,
        min_numel: int = 1024,
        values: Optional[Codec] = None,
        momentum: float = 0.0,
    ) -> None:
        super().__init__()
        if feedback not in (None, "classic", "decayed", "ef21"):
            raise ValueError(f"`feedback` must be None, 'classic', 'decayed' or 'ef21', got {feedback!r}")
        if decay is not None:
            check_fraction("decay", decay)
            if feedback != "decayed":
                raise ValueError(f"`decay` is that of feedback='decayed', got decay={decay} with feedback={feedback!r}")
        check_fraction("momentum", momentum)
        check_integer("start_step", start_step, least=0)
        check_integer("min_numel", min_numel, least=0)
        if momentum and feedback != "classic":
            raise ValueError(f"momentum correction accumulates in classic error feedback, got feedback={feedback!r}")
        self.start_step, self.min_numel = start_step, min_numel
        self.decay = decay
        self.feedback = Feedback(feedback, 0.5 if decay is None else decay, momentum)
        self.values: Codec = Exact()
        self._dense = Dense(momentum)
        if values is not None:
            self._set_values(values)

    @abc.abstractmethod
    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        """Send `work` M, (names, *shape), and write the mean into `block.outputs`; turn M into M - C(M)."""

    @property
    def slots(self) -> frozenset[str]:
        return self.own_slots | self.feedback.slots | self._dense.slots

    @property
    def separate(self) -> bool:
        return self.values.stochastic

    def accepts(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of `shape` is worth compressing."""
        return len(shape) >= 2 and math.prod(shape) >= max(self.min_numel, 1)

    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        return self if step >= self.start_step and self.accepts(shape) else self._dense

    def requests(self, block: GradientBlock, step: StepContext) -> Requests:
        work = self.feedback.apply(block, step.memory, step.scale)
        yield from self.compress(work, block, step)
        self.feedback.update(block, step.memory, work, step.scale)

    def __or__(self, values: Codec) -> Compressor:
        composed = copy.deepcopy(self)
        composed._set_values(values)
        return composed

    def _set_values(self, values: Codec) -> None:
        allowed = f"one of {', '.join(self.codecs)}" if self.codecs else "nothing"
        if not isinstance(values, (Codec, Compressor)):
            raise TypeError(f"{type(self).__name__} can be followed by {allowed}, got {values!r}")
        if type(values).__name__ not in self.codecs:
            raise ValueError(
                f"`{type(self).__name__} | {type(values).__name__}` is not possible: "
                f"{type(self).__name__} can be followed by {allowed}"
            )
        if not isinstance(self.values, Exact):
            raise ValueError(f"{type(self).__name__} already encodes its values by {self.values!r}; use one encoding")
        settings = values._settings() if isinstance(values, Compressor) else {}
        useless = {name: value for name, value in settings.items() if name in _OF_THE_OUTER and value is not None}
        if useless:
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in useless)} would have no effect on the encoding of values, got "
                f"{values!r}; give it to {type(self).__name__}"
            )
        self.values = values

    def _settings(self) -> dict[str, Any]:
        """What it was made with where that is not the default, by argument; without the encoding of its values."""
        held = {**vars(self), "feedback": self.feedback.kind, "momentum": self.feedback.momentum}
        arguments = inspect.signature(type(self)).parameters
        return {
            name: held[name]
            for name, argument in arguments.items()
            if name != "values" and name in held and held[name] != argument.default
        }

    def _main(self) -> dict[str, str]:
        """The argument that is always shown, and how."""
        return {}

    def __repr__(self) -> str:
        main = self._main()
        others = [f"{name}={value!r}" for name, value in self._settings().items() if name not in main]
        alone = f"{type(self).__name__}({', '.join([*main.values(), *others])})"
        return alone if isinstance(self.values, Exact) else f"{alone} | {self.values!r}"


class Dense(Reducer, Method):
    """The plain mean, by all-reduce. Exact, linear and unbiased.

    Gradients of 16 bits are summed in fp32 and travel as that, twice what `DistributedDataParallel` sends without a
    hook: so do those of a compressor that are small, or come before its `start_step`. fp64 travels as it is.

    Args:
        momentum: Applied to the mean here, where an optimizer without momentum expects it done (momentum correction).
    """

    linear = True
    unbiased = True
    collective = "all_reduce"

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__()
        check_fraction("momentum", momentum)
        self.feedback = Feedback(momentum=momentum)

    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        return self

    @property
    def slots(self) -> frozenset[str]:
        return self.feedback.slots

    @property
    def scatters(self) -> bool:
        return not self.feedback.momentum

    def requests(self, block: GradientBlock, step: StepContext) -> Requests:
        block.allocate_outputs()
        if block.shard is not None:
            yield from self._shard_requests(block, block.shard, step)
            return
        if len(block.names) == 1 and block.outputs[0] is block.gradients[0]:
            total = yield AllReduceRequest(block.outputs[0].unsqueeze(0))
        else:
            total = yield AllReduceRequest(torch.stack([gradient.to(block.dtype) for gradient in block.gradients]))
        step.average_(total)
        self.feedback.apply_momentum(total, block, step.memory, step.scale)
        block.write(total)
        block.write_gradients(scale=1.0)

    @staticmethod
    def _shard_requests(block: GradientBlock, shard: int, step: StepContext) -> Requests:
        rows = torch.stack([gradient.to(block.dtype).flatten() for gradient in block.gradients])
        mine = yield ReduceScatterRequest(split_by_rank(rows, step.group.size, shard).flatten(1))
        step.watch(mine)
        block.write_shard(mine.div_(step.group.size).view(-1, shard), step.group.rank)
        block.write_gradients(scale=1.0)

    def traffic(self, shape: Sequence[int], element_bytes: int, world_size: int, step: int) -> list[Traffic]:
        return [Traffic("all_reduce", element_bytes * math.prod(shape))]

    def scatter_traffic(self, shard: int, element_bytes: int, world_size: int) -> list[Traffic]:
        return [Traffic("reduce_scatter", element_bytes * world_size * shard)]

    def __repr__(self) -> str:
        return f"Dense(momentum={self.feedback.momentum})" if self.feedback.momentum else "Dense()"
